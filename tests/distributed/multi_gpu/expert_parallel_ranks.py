"""What the processes of test_expert_parallel_multi_gpu.py do; each function runs on all ranks.

Ranks that share one GPU have SYMMETRIC alone: NCCL takes one rank a GPU.

The problems are exact: every correct kernel gives the same bits, whatever its tiles and the order
of its sums. The judge is the same layer with all experts on this rank's GPU.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mxpert
from mxpert import MoEWeights
from mxpert.distributed import ExpertParallel, Transport
from mxpert.moe.local_weights import take_experts
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape
from support.exact import exact_moe_problem
from tests.distributed.multi_gpu.environment import gpu_group, share_one_gpu

SHAPE = MoEShape(hidden_size=704, intermediate_size=384, num_experts=13, top_k=3, has_bias=True)
MAX_TOKENS = 160
SHARED = share_one_gpu()
CAPTURED = (Transport.SYMMETRIC,) if SHARED else (Transport.GATHER, Transport.SYMMETRIC)
TRANSPORTS = CAPTURED if SHARED else (*CAPTURED, Transport.ALL_TO_ALL)
FORMATS = (("bf16", "bf16"), ("bf16", "mxfp8"), ("mxfp8", "mxfp8"))
"""Wire format, activation format."""


@dataclass(frozen=True)
class Layer:
    """A layer on this rank's GPU.

    Args:
        ep: the object under test.
        inputs: the tokens of all ranks.
        whole, mine: prepared weights of all experts, and of this rank's.
        activation_format: of both.
    """

    ep: ExpertParallel
    inputs: MoEInputs
    whole: MoEWeights
    mine: MoEWeights
    activation_format: str

    def tokens(self, count: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """`count` tokens: x, topk_weights, topk_ids; others on each rank and for each seed."""
        inputs, device = self.inputs, self.ep.device
        generator = torch.Generator().manual_seed(1000 * seed + self.ep.rank)
        rows = torch.randint(0, inputs.x.shape[0], (count,), generator=generator).to(device)
        return inputs.x[rows], inputs.topk_weights[rows], inputs.topk_ids[rows]

    def run(self, *tokens: Any) -> torch.Tensor:
        return self._run(self.mine, tokens, expert_parallel=self.ep)

    def judge(self, *tokens: Any) -> torch.Tensor:
        return self._run(self.whole, tokens)

    def _run(self, weights: MoEWeights, tokens: tuple[Any, ...], **options: Any) -> torch.Tensor:
        x, *routing = tokens
        options["activation_format"] = self.activation_format
        return mxpert.fused_moe(x, weights, *routing, activation=self.inputs.activation, **options)


def make_layer(
    transport: Transport,
    wire_format: str,
    activation_format: str,
    shape: MoEShape = SHAPE,
    max_tokens: int = MAX_TOKENS,
) -> Layer:
    group = gpu_group()
    ep = ExpertParallel(
        group,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        max_tokens=max_tokens,
        transport=transport,
        wire_format=wire_format,
        timeout_s=120.0,  # ranks compile in between
        device="cuda" if SHARED else None,
    )
    assert ep.device == torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    inputs = exact_moe_problem(shape, 400)  # on the CPU: the same on every rank
    local = take_experts(inputs.weights, ep.local_experts)
    whole, mine = (weights.prepare(device=ep.device) for weights in (inputs.weights, local))
    names = "x", "topk_weights", "topk_ids"
    here = replace(inputs, **{name: getattr(inputs, name).to(ep.device) for name in names})
    return Layer(ep, here, whole, mine, activation_format)


def graphs_equal_eager_calls() -> None:
    """CUDA graphs, replayed with other tokens and routings, between eager calls."""
    for transport, (wire_format, activation_format) in itertools.product(CAPTURED, FORMATS):
        layer, what = make_layer(transport, wire_format, activation_format), transport.name
        static = tuple(part.clone() for part in layer.tokens(64 - layer.ep.rank))
        for _ in range(4):  # compile, and make NCCL's communicator
            layer.run(*static)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = layer.run(*static)
        for seed in range(20):
            tokens = layer.tokens(64 - layer.ep.rank, seed)
            for mine, other in zip(static, tokens, strict=True):
                mine.copy_(other)
            graph.replay()
            replayed = out.clone()
            assert_exact(
                replayed, layer.run(*tokens), f"{what} {wire_format}: replay {seed} and eager"
            )
            assert_exact(replayed, layer.judge(*tokens), f"{what} {wire_format}: replay {seed}")
        layer.ep.check()
        torch.cuda.synchronize()
        dist.barrier()
        del graph
        layer.ep.close()


def a_second_stream_is_refused() -> None:
    layer = make_layer(Transport.GATHER, "bf16", "bf16")
    tokens = layer.tokens(4)
    layer.run(*tokens)
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(ValueError, match="stream"):
        layer.run(*tokens)
    assert_exact(layer.run(*tokens), layer.judge(*tokens), "the first stream")

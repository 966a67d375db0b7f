"""What the processes of test_warm_up.py do; each function runs on all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import mxpert
from mxpert import GateUpOrder, SiLU
from mxpert.distributed import ExpertParallel, Transport
from mxpert.moe import warm_up as module
from mxpert.testing.numerics import assert_close_relative
from mxpert.testing.problems import MoEShape, random_moe_problem, random_tokens
from support.interpreter import install
from tests.distributed.ranked_layer import part_of

install()

SHAPE = MoEShape(64, 32, 5, 2, SiLU(), GateUpOrder.CONCATENATED, False)


def the_exchange_is_clean_after_warm_up() -> None:
    """Nothing is stored on another rank while kernels are compiled; the layer then computes."""
    whole = random_moe_problem(SHAPE, 0).weights
    ep = ExpertParallel(
        num_experts=SHAPE.num_experts,
        top_k=SHAPE.top_k,
        hidden_size=SHAPE.hidden_size,
        max_tokens=2,
        transport=Transport.SYMMETRIC,
        wire_format="mxfp8",
        combine_dtype=torch.float32,
        timeout_s=600.0,
    )
    options: dict[str, Any] = dict(activation=SHAPE.activation, activation_format="mxfp8")
    mine = part_of(whole, ep).prepare(device="cpu")
    together = module.run_together
    flags: Any = ep.exchange
    stored = []

    def run(*arguments: Any) -> None:
        dist.barrier()
        stored.append(bool(flags._sections["arrived"].any()))
        dist.barrier()
        together(*arguments)
        stored.append(bool(flags._sections["arrived"].any()))

    with mxpert.override(backend="triton"):
        with mock.patch.object(module, "run_together", run):
            counts = mxpert.warm_up(mine, 1, top_k=2, **options, expert_parallel=ep)
        assert counts == (0, 1)
        assert stored == [False, True]
        generator = torch.Generator().manual_seed(dist.get_rank())
        x, weights, ids = random_tokens(SHAPE, 1 + dist.get_rank(), generator)
        options["out_dtype"] = torch.float32
        out = mxpert.fused_moe(x, mine, weights, ids, **options, expert_parallel=ep)
        alone = mxpert.fused_moe(x, whole.prepare(device="cpu"), weights, ids, **options)
    assert_close_relative(out, alone, 1e-6, "after warm_up")
    ep.check()
    dist.barrier()
    ep.close()

"""The MoE kernels on a GPU: model shapes, every combination of options, graphs, repeats.

The float64 reference runs on the GPU too, on a sample of tokens: a token's result does not depend
on the others, whatever blocks it shares with them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

import mxpert
from mxpert import Combine, GateUpOrder, GemmConfig, MoEConfig, ReferenceConfig
from mxpert.backends.triton import moe_kernels
from mxpert.formats import MXTensor
from mxpert.problem import ACTIVATION_FORMATS, ACTIVATIONS
from mxpert.routing import RoutingPlan
from mxpert.testing.exact import exact_moe_problem
from mxpert.testing.numerics import (
    END_TO_END_GATE,
    STAGE_GATE,
    assert_close_relative,
    assert_exact,
    end_to_end_tolerance,
    stage_tolerance,
)
from mxpert.testing.poison import nan_filled_scratch, poison_weights
from mxpert.testing.problems import MODEL_SHAPES, MoEInputs, MoEShape, random_moe_problem

pytestmark = pytest.mark.gpu

TOKENS = (1, 3, 17, 128, 777, 4096)
SAMPLE = 12
FLOAT64 = ReferenceConfig(torch.float64)
SMALL = MoEShape(hidden_size=704, intermediate_size=384, num_experts=9, top_k=3, has_bias=True)


@pytest.fixture(autouse=True)
def triton_only() -> Iterator[None]:
    """The kernels answer, or nobody; scratch and outputs start as NaN."""
    with mxpert.override(backend="triton"), nan_filled_scratch():
        yield


@functools.lru_cache(maxsize=1)
def model_inputs(name: str, device: torch.device) -> MoEInputs:
    """A model's largest batch; smaller ones are its first tokens. One model stays in memory."""
    return random_moe_problem(name, max(TOKENS), device=device)


def first_tokens(inputs: MoEInputs, chosen: slice | torch.Tensor) -> MoEInputs:
    return replace(inputs, x=inputs.x[chosen].contiguous(),
                   topk_ids=inputs.topk_ids[chosen].contiguous(),
                   topk_weights=inputs.topk_weights[chosen].contiguous())


def make_plan(inputs: MoEInputs, routing_block_m: int) -> RoutingPlan:
    return mxpert.make_routing_plan(inputs.topk_ids, inputs.topk_weights,
                                    num_experts=inputs.weights.num_experts,
                                    routing_block_m=routing_block_m)


def take(h: torch.Tensor | MXTensor, rows: torch.Tensor) -> torch.Tensor | MXTensor:
    if isinstance(h, MXTensor):
        return replace(h, qdata=h.qdata[rows], scale=h.scale[rows])
    return h[rows]


def place(h: torch.Tensor | MXTensor, rows: torch.Tensor, size: int) -> torch.Tensor | MXTensor:
    """The rows of `h` at `rows` of `size` rows, zeros elsewhere."""
    if isinstance(h, MXTensor):
        return replace(h, qdata=place(h.qdata, rows, size), scale=place(h.scale, rows, size))
    placed = h.new_zeros((size, h.shape[1]))
    placed[rows] = h
    return placed


@dataclass(frozen=True)
class Oracle:
    """The float64 reference of a sample of tokens, by stage."""

    h: torch.Tensor | MXTensor  # [S · k, F], by (token, slot)
    rows: torch.Tensor  # float64 [S · k, H], weighted, by (token, slot)

    @classmethod
    def of(cls, sample: MoEInputs, a_format: str, *, on_input: bool = False,
           h: torch.Tensor | MXTensor | None = None) -> Oracle:
        """From the sample itself, or for stage 2 from a given intermediate `h` [S · k, F]."""
        with mxpert.override(backend="reference", config=FLOAT64):
            plan = make_plan(sample, 16)
            places = plan.slot_rows.flatten().long()
            if h is None:
                h = take(mxpert.moe_gate_up(
                    sample.x, sample.weights, plan, activation=sample.activation,
                    activation_format=a_format, apply_router_weight_on_input=on_input), places)
            rows = mxpert.moe_down(
                place(h, places, plan.capacity), sample.weights, plan, combine=Combine.FLAT,
                apply_router_weight_on_input=on_input, out_dtype=torch.float64)[places]
        return cls(h, rows)

    def output(self, top_k: int) -> torch.Tensor:
        return self.rows.unflatten(0, (-1, top_k)).sum(1)

    def cancellation(self, top_k: int) -> float:
        """``√Σ‖row‖² / ‖Σ row‖``, at least 1: how much larger than the sum its summands are."""
        return max(1.0, (self.rows.norm() / self.output(top_k).norm()).item())


def sample_tokens(num_tokens: int, device: torch.device) -> torch.Tensor:
    """First, last and tokens between, at most SAMPLE."""
    return torch.linspace(0, num_tokens - 1, min(num_tokens, SAMPLE), device=device).long().unique()


def check_layer(inputs: MoEInputs, a_format: str, *, combine: Combine = Combine.REDUCE,
                on_input: bool = False, chosen: torch.Tensor) -> None:
    """fused_moe in bfloat16 against the oracle, on the chosen tokens."""
    y = mxpert.fused_moe(inputs.x, inputs.weights, inputs.topk_ids, inputs.topk_weights,
                         activation=inputs.activation, activation_format=a_format, combine=combine,
                         apply_router_weight_on_input=on_input)
    assert y.isfinite().all()
    top_k, weights = inputs.topk_ids.shape[1], inputs.weights
    oracle = Oracle.of(first_tokens(inputs, chosen), a_format, on_input=on_input)
    tolerance = end_to_end_tolerance(
        a_format, torch.bfloat16, weights.hidden_size, weights.intermediate_size,
        top_k=top_k if combine is Combine.REDUCE else 1, numel=y[chosen].numel(),
        cancellation=oracle.cancellation(top_k))
    assert tolerance <= END_TO_END_GATE
    assert_close_relative(y[chosen], oracle.output(top_k), tolerance, "layer")


def check_stages(inputs: MoEInputs, a_format: str, *, combine: Combine = Combine.FLAT,
                 on_input: bool = False, chosen: torch.Tensor) -> None:
    """Each stage against the oracle of that stage on the same operands, for the chosen tokens."""
    top_k, weights = inputs.topk_ids.shape[1], inputs.weights
    plan = make_plan(inputs, 64)
    places = plan.slot_rows[chosen].flatten().long()
    sample = first_tokens(inputs, chosen)
    h = mxpert.moe_gate_up(inputs.x, weights, plan, activation=inputs.activation,
                           activation_format=a_format, apply_router_weight_on_input=on_input)
    h_rows, h_dtype = take(h, places), None if isinstance(h, MXTensor) else torch.bfloat16
    numel = len(places) * weights.intermediate_size
    assert_close_relative(h_rows, Oracle.of(sample, a_format, on_input=on_input).h, stage_tolerance(
        a_format, h_dtype, weights.hidden_size, numel=numel), "stage 1")
    oracle = Oracle.of(sample, a_format, on_input=on_input, h=h_rows)
    # REDUCE rounds every row: compared in float32, where only accumulation differs.
    out_dtype = torch.float32 if combine is Combine.REDUCE else torch.bfloat16
    y = mxpert.moe_down(h, weights, plan, combine=combine, out_dtype=out_dtype,
                        apply_router_weight_on_input=on_input)
    flat = combine is Combine.FLAT
    y, expected = (y[places], oracle.rows) if flat else (y[chosen], oracle.output(top_k))
    tolerance = stage_tolerance(
        a_format, out_dtype, weights.intermediate_size, numel=y.numel(),
        top_k=top_k if combine is Combine.REDUCE else 1,
        cancellation=1.0 if flat else oracle.cancellation(top_k))
    assert tolerance <= STAGE_GATE
    assert_close_relative(y, expected, tolerance, "stage 2")


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_model_shape(name: str, a_format: str, num_tokens: int, device: torch.device) -> None:
    inputs = first_tokens(model_inputs(name, device), slice(num_tokens))
    chosen = sample_tokens(num_tokens, device)
    check_layer(inputs, a_format, chosen=chosen)
    check_stages(inputs, a_format, chosen=chosen)


@pytest.mark.parametrize("combine", Combine, ids=lambda combine: combine.value)
@pytest.mark.parametrize("order", GateUpOrder, ids=lambda order: order.value)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_every_option(a_format: str, activation: str, order: GateUpOrder, combine: Combine,
                      device: torch.device) -> None:
    """The full product, routing weight on either stage, with and without bias."""
    for on_input in (False, True):
        shape = replace(SMALL, activation=ACTIVATIONS[activation](), gate_up_order=order,
                        has_bias=on_input != (order is GateUpOrder.CONCATENATED))
        inputs = random_moe_problem(shape, 77, device=device)
        everything = torch.arange(77, device=device)
        check_stages(inputs, a_format, combine=combine, on_input=on_input, chosen=everything)
        if combine is not Combine.FLAT:
            check_layer(inputs, a_format, combine=combine, on_input=on_input, chosen=everything)


TILES = {
    "small": MoEConfig(16, GemmConfig(16, 32, 64, 4, 2), GemmConfig(16, 64, 64, 4, 2)),
    "wide": MoEConfig(32, GemmConfig(32, 128, 128, 8, 3), GemmConfig(32, 256, 128, 8, 3)),
    "split_k": MoEConfig(32, GemmConfig(32, 64, 128, 8, 3, 4, 3),
                         GemmConfig(16, 128, 128, 8, 4, 4, 2)),
    "large": MoEConfig(128, GemmConfig(128, 64, 64, 8, 4, 8), GemmConfig(128, 128, 64, 8, 4, 8)),
    "deep": MoEConfig(64, GemmConfig(64, 64, 256, 8, 2), GemmConfig(64, 64, 256, 8, 2)),
    "small_in_large": MoEConfig(128, GemmConfig(16, 64, 128, 8), GemmConfig(64, 128, 128, 8)),
}


@pytest.mark.parametrize("combine", [Combine.REDUCE, Combine.ATOMIC], ids=lambda c: c.value)
@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
@pytest.mark.parametrize("tiles", [*TILES, "heuristic"])
def test_exact_problem_is_bit_identical(tiles: str, a_format: str, combine: Combine,
                                        device: torch.device) -> None:
    for seed, activation in enumerate(ACTIVATIONS.values()):
        shape = replace(SMALL, activation=activation(), has_bias=seed % 2 == 0,
                        gate_up_order=list(GateUpOrder)[seed % 3])
        inputs = exact_moe_problem(shape, 333, seed=seed, device=device)
        arguments = (inputs.x, inputs.weights, inputs.topk_ids, inputs.topk_weights)
        options = {"activation": inputs.activation, "activation_format": a_format,
                   "combine": combine}
        with mxpert.override(backend="reference", config=FLOAT64):
            expected = mxpert.fused_moe(*arguments, **options)
        with mxpert.override(backend="triton", config=TILES.get(tiles)):
            for _ in range(20):  # also hunts races: any of them changes bits
                assert_exact(mxpert.fused_moe(*arguments, **options), expected, tiles,
                             ignore_zero_sign=True)


@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_padded_weight_storage_is_never_read(a_format: str, device: torch.device) -> None:
    inputs = random_moe_problem(SMALL, 100, device=device)
    padded = poison_weights(inputs.weights, extra_columns=512)
    clean, strided = (
        mxpert.fused_moe(inputs.x, weights, inputs.topk_ids, inputs.topk_weights,
                         activation=inputs.activation, activation_format=a_format)
        for weights in (inputs.weights, padded))
    assert clean.isfinite().all()
    assert_exact(strided, clean, "strided weights")


@pytest.mark.parametrize("num_tokens", [1, 17, 777])
@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_graph_replay_equals_eager(a_format: str, num_tokens: int, device: torch.device) -> None:
    """Captured once, replayed with other tokens and other routing: REDUCE gives the same bits."""
    shape = replace(MODEL_SHAPES["gpt-oss-20b"], num_experts=16)
    first, second = (random_moe_problem(shape, num_tokens, seed=seed, device=device)
                     for seed in (0, 1))
    static = [first.x.clone(), first.topk_ids.clone(), first.topk_weights.clone()]

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return mxpert.fused_moe(x, first.weights, ids, weights, activation=first.activation,
                                activation_format=a_format)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*static)
    for inputs in (second, first):
        for buffer, new in zip(static, (inputs.x, inputs.topk_ids, inputs.topk_weights),
                               strict=True):
            buffer.copy_(new)
        graph.replay()
        assert_exact(captured, run(inputs.x, inputs.topk_ids, inputs.topk_weights), "replay")


def test_weights_beyond_4_gib(device: torch.device) -> None:
    """The last expert of a tensor above 2^32 bytes answers like a copy of it alone."""
    shape = MoEShape(4096, 2048, 600, 1)  # gate/up codes: 600 · 4096 · 2048 bytes = 4.7 GiB
    inputs = random_moe_problem(shape, 8, device=device)
    weights = inputs.weights
    assert weights.gate_up_proj.qdata.numel() > 2**32
    last = replace(weights, gate_up_proj=weights.gate_up_proj[-1:],
                   down_proj=weights.down_proj[-1:])
    ids = torch.zeros_like(inputs.topk_ids)
    alone, among = (mxpert.fused_moe(inputs.x, w, i, inputs.topk_weights,
                                     activation=inputs.activation)
                    for w, i in ((last, ids), (weights, ids + 599)))
    assert_exact(among, alone, "last expert")


def test_compile_count_is_constant(device: torch.device) -> None:
    """After the first model, launches of others compile nothing."""
    config = MoEConfig(16, GemmConfig(16, 64, 128, 8, 4), GemmConfig(16, 128, 128, 8, 4))
    kernels = (moe_kernels._moe_gate_up_kernel, moe_kernels._moe_down_kernel)
    counts = []
    for shape, num_tokens in zip(MODEL_SHAPES.values(), (1, 2, 3, 5, 8, 16) * 2, strict=True):
        shape = replace(shape, num_experts=shape.top_k + 3, has_bias=False,
                        activation=mxpert.SiLU())
        inputs = random_moe_problem(shape, num_tokens, device=device)
        with mxpert.override(backend="triton", config=config):
            mxpert.fused_moe(inputs.x, inputs.weights, inputs.topk_ids, inputs.topk_weights,
                             activation=inputs.activation)
        counts.append([len(kernel.device_caches[torch.cuda.current_device()][0])
                       for kernel in kernels])
    assert counts == counts[:1] * len(counts)


@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_no_tokens(a_format: str, device: torch.device) -> None:
    inputs = random_moe_problem(SMALL, 0, device=device)
    y = mxpert.fused_moe(inputs.x, inputs.weights, inputs.topk_ids, inputs.topk_weights,
                         activation=inputs.activation, activation_format=a_format)
    assert y.shape == (0, SMALL.hidden_size)

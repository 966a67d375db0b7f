"""Race tests for kernels with wgmma's operand A in registers.

Every variant runs repeatedly on the same data, next to other work on the GPU, and must return the
same bits. Then the data are replaced. ``--race-repeats`` sets the number of repeats (20000 for a
long run). A CUDA graph holds both stages and the comparison, so repeats have little host work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert import GateUpOrder, MoEConfig, MoEWeights, SiLU, SwiGLU
from mxpert.formats import MXTensor
from mxpert.routing import RoutingPlan
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem

from .hopper_problems import require_hopper, tiles_of

pytestmark = pytest.mark.gpu

FRESH = 100
"""Number of repeats on the same data."""

SHAPES: dict[str, MoEShape] = {
    "swiglu_bias": MoEShape(1472, 704, 32, 4, SwiGLU(), GateUpOrder.INTERLEAVED, True),
    "silu": MoEShape(1472, 704, 32, 4, SiLU()),
}
"""With every tile size both stages have more tiles than CTAs, so the tile scheduler is used."""

FILLED = 0.7
"""Mean fraction of a tile's rows that are used: several blocks, the last of them not full."""

VARIANTS = {f"{a_format}-{name}": (a_format, config) for a_format in ("bf16", "mxfp8")
            for name, config in tiles_of(a_format).items()}
"""Format and tile of every GEMM binary; mxfp4 rows share those of mxfp8 rows."""


@dataclass(frozen=True)
class Hunt:
    """Fixed buffers of one variant, and the stages that run on them."""

    inputs: MoEInputs
    plan: RoutingPlan
    a_format: str
    generator: torch.Generator

    @classmethod
    def of(cls, shape: MoEShape, a_format: str, config: MoEConfig, device: torch.device) -> Hunt:
        rows = int(FILLED * config.gate_up.block_m * config.gate_up.group_m)
        num_tokens = rows * shape.num_experts // shape.top_k + 1
        inputs = random_moe_problem(shape, num_tokens, device=device)
        inputs = replace(inputs, weights=inputs.weights.prepare(device=device))
        with mxpert.override():
            plan = mxpert.make_routing_plan(
                inputs.topk_weights, inputs.topk_ids, num_experts=shape.num_experts,
                routing_block_m=config.routing_block_m)
        return cls(inputs, plan, a_format, torch.Generator(device).manual_seed(1))

    def renew(self) -> None:
        """Redraw activations, and weights in packed form."""
        self.inputs.x.normal_(generator=self.generator)
        for part in projections(self.inputs.weights):
            part.qdata.random_(0, 256, generator=self.generator)
            part.scale.random_(0, 15, generator=self.generator)
            assert part.reference is not None
            part.reference.random_(119, 123, generator=self.generator)

    def run(self) -> tuple[torch.Tensor, ...]:
        """Run both stages; return h of real tokens and y as bits. (FLAT rows never use split-K.)"""
        places = self.plan.slot_rows.flatten().long()
        h = mxpert.moe_gate_up(self.inputs.x, self.inputs.weights, self.plan,
                               activation=self.inputs.activation,
                               activation_format=self.a_format)
        y = mxpert.moe_down(h, self.inputs.weights, self.plan, out_dtype=torch.float32)
        rows = (h.qdata, h.scale) if isinstance(h, MXTensor) else (h.view(torch.int16),)
        return *(tensor[places] for tensor in rows), y.view(torch.int32)


def projections(weights: MoEWeights) -> tuple[MXTensor, MXTensor]:
    return weights.gate_up_proj, weights.down_proj


class Load:
    """Load on another stream: matrix products and copies compete for SMs, caches and memory."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.matrix = torch.randn(2048, 2048, dtype=torch.bfloat16, device=device)
        self.memory = torch.empty(1 << 26, dtype=torch.uint8, device=device)

    def start(self, rounds: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(rounds):
                torch.mm(self.matrix, self.matrix)
                self.memory.add_(1)


@pytest.fixture(autouse=True)
def hopper_only(device: torch.device) -> Iterator[None]:
    require_hopper(device)
    yield
    torch.cuda.synchronize(device)


def hunt(run: Callable[[], tuple[torch.Tensor, ...]], renew: Callable[[], None], repeats: int,
         device: torch.device) -> int:
    """Number of values that differed from the first result on the same data."""
    load = Load(device)
    first = [result.clone() for result in run()]
    torch.cuda.synchronize(device)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for result, expected in zip(run(), first, strict=True):
            differing.add_((result != expected).sum())
    for _ in range(-(-repeats // FRESH)):
        renew()
        for expected, result in zip(first, run(), strict=True):
            expected.copy_(result)
        torch.cuda.synchronize(device)
        load.start(20)
        for _ in range(min(FRESH, repeats)):
            graph.replay()
    torch.cuda.synchronize(device)
    return int(differing)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("a_format, config", VARIANTS.values(), ids=VARIANTS)
def test_repeats_give_the_same_bits(
    a_format: str, config: MoEConfig, shape: str, device: torch.device,
    pytestconfig: pytest.Config,
) -> None:
    repeats = pytestconfig.getoption("--race-repeats")
    variant = Hunt.of(SHAPES[shape], a_format, config, device)
    with mxpert.override(backend="hopper", config=config):
        results = variant.run()
        assert any(result.any() for result in results)
        differing = hunt(variant.run, variant.renew, repeats, device)
    assert differing == 0, f"{differing} values differed in {repeats} repeats"


@dataclass(frozen=True)
class Layers:
    """Layers in sequence with shared weights and different routings.

    The layers reuse the memory of plans and rows: a kernel that reads them too early gets data of
    another routing.
    """

    inputs: MoEInputs
    a_format: str
    batches: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    generator: torch.Generator

    @classmethod
    def of(cls, shape: MoEShape, a_format: str, device: torch.device) -> Layers:
        """Make layers that leave most CTAs of a GEMM idle, and layers that do not."""
        inputs = random_moe_problem(shape, 1, device=device)
        inputs = replace(inputs, weights=inputs.weights.prepare(device=device))
        batches = tuple((
            torch.empty(count, shape.hidden_size, dtype=torch.bfloat16, device=device),
            torch.empty(count, shape.num_experts, device=device)) for count in (1, 1, 2, 24, 24, 2))
        layers = cls(inputs, a_format, batches, torch.Generator(device).manual_seed(1))
        layers.renew()
        return layers

    def renew(self) -> None:
        """Redraw activations and routings."""
        for each in (tensor for batch in self.batches for tensor in batch):
            each.normal_(generator=self.generator)

    def run(self) -> tuple[torch.Tensor, ...]:
        """Run all layers; return their results as bits."""
        results = []
        for x, logits in self.batches:
            with mxpert.override():  # the tile is the GEMMs'
                weights, ids = mxpert.route_topk(logits, self.inputs.topk_ids.shape[1])
            results.append(mxpert.fused_moe(
                x, self.inputs.weights, weights, ids, activation=self.inputs.activation,
                activation_format=self.a_format).view(torch.int16))
        return tuple(results)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("a_format, config", VARIANTS.values(), ids=VARIANTS)
def test_layers_wait_for_what_they_read(
    a_format: str, config: MoEConfig, device: torch.device, pytestconfig: pytest.Config,
) -> None:
    """Kernels of a layer start while earlier kernels still run; results must not change."""
    layers = Layers.of(SHAPES["swiglu_bias"], a_format, device)
    with mxpert.override(backend="hopper", config=config):
        alone = []
        for index in range(len(layers.batches)):
            torch.cuda.synchronize(device)
            alone.append(replace(layers, batches=layers.batches[index:index + 1]).run()[0].clone())
        for result, expected in zip(layers.run(), alone, strict=True):
            assert torch.equal(result, expected)
        differing = hunt(layers.run, layers.renew, pytestconfig.getoption("--race-repeats"), device)
    assert differing == 0


def test_the_hunt_catches_a_race(device: torch.device) -> None:
    """Control: an operand that changes between repeats is reported."""
    counter = torch.zeros(8, dtype=torch.int32, device=device)
    x = torch.zeros(1000, dtype=torch.int32, device=device)

    def racy(**_: Any) -> tuple[torch.Tensor, ...]:
        counter.add_(1)
        return ((x + (counter[0] % 50 == 0)).clone(),)

    assert hunt(racy, x.zero_, 200, device) > 0

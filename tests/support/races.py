"""Race hunts: a kernel that runs again on the same data must give the same bits.

A hunt captures some repeats in a CUDA graph and replays it while other work runs on a second
stream. Each repeat is compared with the first result on the device, so that the host waits once for
each set of data. On a CPU the same steps run one after the other, for dry runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mxpert.configs import HopperGemmConfig, HopperKernel
from mxpert.core.problem import ActivationFormat, MoEConfig
from mxpert.core.registry import override
from mxpert.formats.spec import MXFP4
from mxpert.formats.tensor import MXTensor
from mxpert.moe.hopper.layout import decode_units
from mxpert.moe.op import moe_down, moe_gate_up
from mxpert.routing.plan import RoutingPlan
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.layers import plan_of

Run = Callable[[], tuple[torch.Tensor, ...]]
"""One repeat: results as integers, which hold the bits."""

FRESH = 100
"""Repeats on the same data."""
FILLED = 0.7
"""Mean share of a tile's rows that are real: several blocks, the last of them not full."""
LOAD_ROUNDS = 20


@dataclass(frozen=True)
class Found:
    """What a hunt saw.

    Args:
        repeats: finished repeats. mismatches: values that differed, over all of them.
    """

    repeats: int
    mismatches: int


class Load:
    """Matrix products and copies on another stream, which compete for SMs, caches and memory."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.matrix = torch.randn(2048, 2048, dtype=torch.bfloat16, device=device)
        self.memory = torch.empty(1 << 26, dtype=torch.uint8, device=device)

    def start(self, rounds: int = LOAD_ROUNDS) -> None:
        """Launch `rounds` of both; they run beside what the current stream launches next."""
        with torch.cuda.stream(self.stream):
            for _ in range(rounds):
                torch.mm(self.matrix, self.matrix)
                self.memory.add_(1)


def _count(count: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    if count.device.type == "cuda":
        from support._difference_kernel import count_differences

        count_differences(count, first.contiguous(), second)
    else:
        count.add_((first != second).sum())


def _repeat(once: Callable[[], None], times: int, device: torch.device) -> Callable[[], None]:
    """`once` so many times: a graph on a GPU, calls elsewhere."""

    def several() -> None:
        for _ in range(times):
            once()

    if device.type != "cuda":
        return several
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        several()
    return graph.replay


def hunt(
    run: Run,
    renew: Callable[[], None],
    repeats: int,
    device: torch.device,
    *,
    fresh: int = FRESH,
    per_graph: int = 1,
    deadline: float = math.inf,
    plant: int | None = None,
) -> Found:
    """Repeat `run` and compare every result with the first one on the same data.

    Args:
        run: capturable in a CUDA graph. renew: draws other data into the same tensors.
        repeats: how many at least; whole sets of data are finished.
        fresh: repeats on the same data. per_graph: repeats in one graph, at most `fresh`.
        deadline: of `time.monotonic`; no further data are drawn after it.
        plant: flips one bit of the first result in this repeat, to show that it is found.
    """
    on_gpu = device.type == "cuda"
    first = [result.clone() for result in run()]
    differing = torch.zeros((), dtype=torch.int64, device=device)
    number = torch.zeros((), dtype=torch.int64, device=device)
    if on_gpu:
        load = Load(device)
        _count(differing, first[0], first[0])  # compiles
        torch.cuda.synchronize(device)

    def once() -> None:
        results = run()
        if plant is not None:
            value = results[0].view(-1)[:1]
            value.bitwise_xor_((number == plant).to(value.dtype))
            number.add_(1)
        for result, expected in zip(results, first, strict=True):
            _count(differing, result, expected)

    per_graph = min(per_graph, fresh, repeats)
    replay = _repeat(once, per_graph, device)
    rounds, done = max(1, min(fresh, repeats) // per_graph), 0
    while done < repeats and time.monotonic() < deadline:
        renew()
        for expected, result in zip(first, run(), strict=True):
            expected.copy_(result)
        if on_gpu:
            torch.cuda.synchronize(device)
            load.start()
        for _ in range(rounds):
            replay()
        done += rounds * per_graph
    return Found(done, int(differing))


def one_launch(a_format: str) -> MoEConfig:
    """The layer of a few tokens in one launch."""
    from mxpert.moe.hopper import config as heuristics

    return heuristics.one_launch(a_format == "bf16")


def fp8_tiles() -> dict[str, MoEConfig]:
    """Every tile that reads an FP8 copy of the weights, by name."""
    from mxpert.moe.hopper import config as heuristics

    return {
        name: MoEConfig(config.block_m, config, config)
        for name, config in heuristics.fp8_tiles().items()
    }


def hopper_tiles(a_format: str, weight_format: str = MXFP4.name) -> dict[str, MoEConfig]:
    """Every tile of the Hopper MoE kernels for two formats, by name; those of decode with their
    depth split, too. INT4 weights are symmetric, with bfloat16 scales."""
    from mxpert.moe.hopper import config as heuristics

    found, hi_lo = {}, a_format == "bf16"
    float16 = hi_lo and weight_format.startswith("int4")
    for name, config in heuristics.tiles(hi_lo, weight_format, float16).items():
        found[name] = MoEConfig(config.block_m, config, config)
        if config.kernel is HopperKernel.DECODE:
            found[name + "_split"] = MoEConfig(
                config.block_m, replace(config, k_splits=3), replace(config, k_splits=2)
            )
    return found


def tokens_for(shape: MoEShape, config: MoEConfig) -> int:
    """Tokens that fill the tiles of stage 1 to `FILLED` in the mean."""
    tile = config.gate_up
    assert isinstance(tile, HopperGemmConfig)  # for the type checker
    rows = int(FILLED * tile.block_m * tile.blocks_per_tile)
    return rows * shape.num_experts // shape.top_k + 1


def redraw(inputs: MoEInputs, generator: torch.Generator) -> None:
    """Other activations, and other MXFP4 weights, drawn in their stored form."""
    inputs.x.normal_(generator=generator)
    if inputs.weights.weight_format != MXFP4.name:
        return
    for part in inputs.weights.mx_projections:
        part.qdata.random_(0, 256, generator=generator)
        if part.reference is None:
            part.scale.random_(119, 127, generator=generator)
        else:
            part.scale.random_(0, 15, generator=generator)
            part.reference.random_(119, 123, generator=generator)
        if part.fp8_codes is not None:
            decode_units(part, part.fp8_codes)


@dataclass(frozen=True)
class MoEHunt:
    """Both stages of a layer on fixed buffers and a fixed plan."""

    inputs: MoEInputs
    plan: RoutingPlan
    a_format: ActivationFormat
    generator: torch.Generator

    @classmethod
    def of(
        cls, shape: MoEShape, a_format: ActivationFormat, config: MoEConfig, device: torch.device
    ) -> MoEHunt:
        """A problem whose blocks fit `config`, prepared for this device."""
        inputs = random_moe_problem(shape, tokens_for(shape, config), device=device)
        assert isinstance(config.gate_up, HopperGemmConfig)  # for the type checker
        keep_fp8 = config.gate_up.kernel is HopperKernel.PREFILL_FP8
        prepared = inputs.weights.prepare(device=device, keep_fp8=keep_fp8)
        inputs = replace(inputs, weights=prepared)
        with override():  # a pinned backend is that of the GEMMs
            plan = plan_of(inputs, config.routing_block_m)
        return cls(inputs, plan, a_format, torch.Generator(device).manual_seed(1))

    def renew(self) -> None:
        redraw(self.inputs, self.generator)

    def stages(self) -> tuple[torch.Tensor | MXTensor, torch.Tensor]:
        """The intermediate, and y in float32."""
        weights, form = self.inputs.weights, self.a_format
        activation = self.inputs.activation
        h = moe_gate_up(
            self.inputs.x, weights, self.plan, activation=activation, activation_format=form
        )
        return h, moe_down(h, weights, self.plan, out_dtype=torch.float32, activation_format=form)

    def run(self) -> tuple[torch.Tensor, ...]:
        """y as bits; it depends on every value of the intermediate."""
        return (self.stages()[1].view(torch.int32),)

    def run_stages(self) -> tuple[torch.Tensor, ...]:
        """The intermediate of real tokens, and y, as bits. (FLAT rows are never split.)"""
        places = self.plan.slot_rows.flatten().long()
        h, y = self.stages()
        rows = (h.qdata, h.scale) if isinstance(h, MXTensor) else (h.view(torch.int16),)
        return *(tensor[places] for tensor in rows), y.view(torch.int32)

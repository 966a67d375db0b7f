"""Race tests for kernels with wgmma's operand A in registers.

Every variant runs repeatedly on the same data, next to other work on the GPU, and must return the
same bits. Then the data are replaced. ``--race-repeats`` sets the number of repeats (20000 for a
long run). A CUDA graph holds both stages and the comparison, so repeats have little host work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert import GateUpOrder, SiLU, SwiGLU
from mxpert.configs import MoEConfig
from mxpert.core.problem import ACTIVATION_FORMATS
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.races import MoEHunt, fp8_tiles, hunt
from tests.moe.hopper.problems import tiles_of

pytestmark = pytest.mark.usefixtures("hopper")


SHAPES: dict[str, MoEShape] = {
    "swiglu_bias": MoEShape(1472, 704, 32, 4, SwiGLU(), GateUpOrder.INTERLEAVED, True),
    "silu": MoEShape(1472, 704, 32, 4, SiLU()),
}
"""With every tile size both stages have more tiles than CTAs, so the tile scheduler is used."""

VARIANTS = {
    f"{a_format}-{name}": (a_format, config)
    for a_format in ACTIVATION_FORMATS
    for name, config in tiles_of(a_format).items()
} | {f"mxfp8-{name}": ("mxfp8", config) for name, config in fp8_tiles().items()}
"""Every activation format with every tile; tiles that read FP8 copies with one."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("a_format, config", VARIANTS.values(), ids=VARIANTS)
def test_repeats_give_the_same_bits(
    a_format: str, config: MoEConfig, shape: str, device: torch.device, pytestconfig: pytest.Config
) -> None:
    repeats = pytestconfig.getoption("--race-repeats")
    variant = MoEHunt.of(SHAPES[shape], a_format, config, device)
    with mxpert.override(backend="hopper", config=config):
        results = variant.run_stages()
        assert any(result.any() for result in results)
        found = hunt(variant.run_stages, variant.renew, repeats, device)
    assert found.mismatches == 0, f"{found.mismatches} values differed in {repeats} repeats"


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
        weights = inputs.weights.prepare(device=device, keep_fp8=a_format != "bf16")
        inputs = replace(inputs, weights=weights)
        batches = tuple(
            (
                torch.empty(count, shape.hidden_size, dtype=torch.bfloat16, device=device),
                torch.empty(count, shape.num_experts, device=device),
            )
            for count in (1, 1, 2, 24, 24, 2)
        )
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
            results.append(
                mxpert.fused_moe(
                    x,
                    self.inputs.weights,
                    weights,
                    ids,
                    activation=self.inputs.activation,
                    activation_format=self.a_format,
                ).view(torch.int16)
            )
        return tuple(results)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("a_format, config", VARIANTS.values(), ids=VARIANTS)
def test_layers_wait_for_what_they_read(
    a_format: str, config: MoEConfig, device: torch.device, pytestconfig: pytest.Config
) -> None:
    """Kernels of a layer start while earlier kernels still run; results must not change."""
    layers = Layers.of(SHAPES["swiglu_bias"], a_format, device)
    with mxpert.override(backend="hopper", config=config):
        alone = []
        for index in range(len(layers.batches)):
            torch.cuda.synchronize(device)
            alone.append(
                replace(layers, batches=layers.batches[index : index + 1]).run()[0].clone()
            )
        for result, expected in zip(layers.run(), alone, strict=True):
            assert torch.equal(result, expected)
        found = hunt(layers.run, layers.renew, pytestconfig.getoption("--race-repeats"), device)
    assert found.mismatches == 0


def test_the_hunt_catches_a_race(device: torch.device) -> None:
    """Control: an operand that changes between repeats is reported."""
    counter = torch.zeros(8, dtype=torch.int32, device=device)
    x = torch.zeros(1000, dtype=torch.int32, device=device)

    def racy(**_: Any) -> tuple[torch.Tensor, ...]:
        counter.add_(1)
        return ((x + (counter[0] % 50 == 0)).clone(),)

    assert hunt(racy, x.zero_, 200, device).mismatches > 0

"""The kernels around Hopper's dual quantisation in Triton's interpreter, against the reference.

The quantising kernels are Gluon and run only on a GPU. A stand-in stores the marked scales of
blocks, and the kernels under test turn them into scales of spans.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from mxpert.core.compilation import ThroughTriton
from mxpert.core.problem import DualProblem, Op, Target
from mxpert.core.target import on_device
from mxpert.formats import MXTensor, ScaleRule, ScaleSpan
from mxpert.formats.spec import get_format
from mxpert.quantize import dual_hopper as dual
from mxpert.quantize.dual_hopper_kernel import _quantize_dual_hopper_kernel
from mxpert.quantize.inputs import DualInputs
from mxpert.routing.plan import padded_group_offsets
from mxpert.testing.numerics import assert_exact
from support.kernels import kernels_of

REFERENCE = kernels_of("reference")[Op.QUANTIZE_DUAL]
H200 = Target("cuda", "sm_90", "NVIDIA H200", 132, 232448)
SIZES = (0, 37, 1, 0, 200, 34)
TAIL, WIDTH = 9, 352
FREE, ONE_TOO_FAR = 2.0**-9, 2.0**-10
"""Size of a block next to blocks of 1 … 1.5: exact under the row's scale (FREE), or not."""
SPANS = {
    "auto": (ScaleSpan.AUTO, ScaleSpan.AUTO),
    "row": (ScaleSpan.ROW, ScaleSpan.ROW),
    "span128": (ScaleSpan.SPAN128, ScaleSpan.ROW),
    "one": (ScaleSpan.BLOCK, ScaleSpan.AUTO),
    "other": (ScaleSpan.AUTO, ScaleSpan.BLOCK),
}


def describe(
    x: torch.Tensor, offsets: torch.Tensor | None, spans: tuple[ScaleSpan, ScaleSpan]
) -> DualProblem:
    groups = offsets.numel() - 1 if offsets is not None else x.shape[0]
    return DualProblem(
        Op.QUANTIZE_DUAL,
        H200,
        tuple(x.shape),
        x.dtype,
        get_format("mxfp8_e4m3"),
        ScaleRule.RCEIL,
        groups,
        offsets is not None,
        *spans,
    )


def quantized(
    x: torch.Tensor, offsets: torch.Tensor | None, span: ScaleSpan
) -> tuple[MXTensor, MXTensor]:
    return REFERENCE.launch(
        describe(x, offsets, (span, span)), None, DualInputs(x=x, group_offsets=offsets)
    )


@pytest.fixture
def choose() -> Any:
    """Run Hopper's launches, with a stand-in for the Gluon kernel that stores reference scales.

    It marks blocks of zeros inside spans, as the Gluon kernel does.
    """

    def run(
        x: torch.Tensor, offsets: torch.Tensor | None, spans: tuple[ScaleSpan, ScaleSpan]
    ) -> tuple[MXTensor, MXTensor]:
        blocks = quantized(x, offsets, ScaleSpan.BLOCK)

        class StandIn(ThroughTriton):
            def execute(
                self, kernel: Any, grid: Any, arguments: Mapping[str, Any], *, warmup: bool
            ) -> None:
                if kernel is not _quantize_dual_hopper_kernel:
                    super().execute(kernel, grid, arguments, warmup=warmup)
                    return
                for name, copy in zip(("row", "column"), blocks, strict=True):
                    scale = arguments[f"{name}_scale"]
                    if arguments["CHOOSE"]:
                        marked = arguments[f"MARK_{name.upper()}S"]
                        zeros = (copy.qdata.unflatten(-1, (-1, 32)) & 0x7F == 0).all(-1)
                        if name == "column" and offsets is not None:
                            zeros[:, int(padded_group_offsets(offsets)[-1]) // 32 :] = False
                        scale.copy_(torch.where(zeros & marked, 0, copy.scale.clamp(min=1)))

        with on_device(executor=StandIn()):
            return dual.QUANTIZE_DUAL.launch(
                describe(x, offsets, spans), None, DualInputs(x=x, group_offsets=offsets)
            )

    return run


def data(small: float, *, grouped: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values around 1 with blocks of zeros, and one block of size `small` in each copy."""
    generator = torch.Generator().manual_seed(1)
    if not grouped:
        x = torch.empty(3, 96, WIDTH).uniform_(1, 1.5, generator=generator)
        x[1, 32:64, 64:96] *= small
        x[2, :, 128:192] = 0
        return x, None
    x = torch.empty(sum(SIZES) + TAIL, WIDTH).uniform_(1, 1.5, generator=generator)
    x[70:102, 64:96] *= small  # the second block of the group that begins at row 38
    x[102:134, 32:64] = 0
    x[sum(SIZES) :] = torch.nan
    offsets = torch.tensor([0, *itertools.accumulate(SIZES)], dtype=torch.int32)
    return x, offsets


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "weights"])
@pytest.mark.parametrize("small", [FREE, ONE_TOO_FAR], ids=["narrow", "wide"])
@pytest.mark.parametrize("mode", SPANS)
def test_scales_of_spans(choose: Any, mode: str, small: float, grouped: bool) -> None:
    x, offsets = data(small, grouped=grouped)
    actual = choose(x, offsets, SPANS[mode])
    expected = (quantized(x, offsets, span)[place] for place, span in enumerate(SPANS[mode]))
    for name, have, want in zip(("row", "column"), actual, expected, strict=True):
        assert_exact(have.scale, want.scale, f"{name} scales")
        assert (have.wide_blocks is None) == (want.wide_blocks is None)
        if have.wide_blocks is not None:
            assert_exact(have.wide_blocks, want.wide_blocks, f"{name} count")
            assert (int(want.wide_blocks) > 0) == (small == ONE_TOO_FAR)

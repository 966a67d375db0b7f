"""Copies and limits of gfx950's dual quantiser, on emulated gfx950 code.

tests/conformance/test_quantize.py compares its bits with the codec's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert.core.problem import DualProblem, Op
from mxpert.device.cdna4_operands import Operand
from mxpert.formats import MXTensor, ScaleRule
from mxpert.formats.spec import ScaleSpan, get_format
from mxpert.quantize.dual_cdna4 import QUANTIZE_DUAL
from mxpert.testing.gfx950 import MI355X, emulate

pytestmark = pytest.mark.usefixtures("nan_scratch")


def dual(x: torch.Tensor, *arguments: object, **options: object) -> tuple[MXTensor, MXTensor]:
    with emulate() as emulation, mxpert.override(backend="cdna4"):
        copies = mxpert.quantize_dual(x, *arguments, **options)
    assert set(emulation.kernels) <= {"_quantize_dual_cdna4_kernel"}
    return copies


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "weights": lambda x: x.view(3, 64, 160),
    "columns": lambda x: x[:, 32:96],
}


@pytest.mark.parametrize("view", ["weights", "columns", "groups"])
def test_results_are_operands(view: str) -> None:
    """The grouped GEMM reads both copies in place; any backend reads them by their strides."""
    x = normal(190, 192).to(torch.bfloat16)
    offsets = torch.tensor([0, 33, 190]) if view == "groups" else None
    x = x if offsets is not None else VIEWS[view](normal(192, 160).to(torch.bfloat16))
    for copy in dual(x, group_offsets=offsets):
        operand = Operand.of(copy)
        assert operand.codes is copy.qdata
        assert operand.scale is copy.scale
        assert not operand.pitch % 128
        contiguous = replace(copy, qdata=copy.qdata.contiguous(), scale=copy.scale.contiguous())
        assert torch.equal(mxpert.dequantize(copy), contiguous.dequantize())


@pytest.mark.parametrize("grouped", [False, True], ids=["weights", "groups"])
def test_fake_results_have_the_same_strides(grouped: bool) -> None:
    """torch.compile relies on the strides of fake results, at symbolic sizes too."""
    x = normal(190, 96) if grouped else normal(3, 64, 160)
    offsets = torch.tensor([0, 33, 190]) if grouped else None
    arguments = ("rceil", "mxfp8_e4m3", ["block", "block"], x, offsets, None)
    with emulate(), mxpert.override(backend="cdna4"):
        torch.library.opcheck(
            torch.ops.mxpert.quantize_dual,
            arguments,
            test_utils=("test_faketensor", "test_aot_dispatch_dynamic"),
        )


def test_is_limited_by_memory() -> None:
    """VALU cycles of a tile, against its bytes at the 7.3 TB/s that 256 compute units share."""
    x = normal(256, 512).to(torch.bfloat16)
    with emulate(checks=False) as emulation, mxpert.override(backend="cdna4"):
        mxpert.quantize_dual(x)
    report = emulation.last
    assert report is not None
    assert report.program.metadata["vgpr_spill_count"] == 0
    tiles = 4 * 4
    valu = sum(n for name, n in report.counts.items() if name.startswith("v_")) / tiles
    num_bytes = 64 * 128 * (2 + 1 + 1) * (1 + 1 / 128)
    memory_cycles = num_bytes / (7.3e12 / 256 / 2.4e9)
    assert valu * 4 / 4 <= 1.05 * memory_cycles  # 4 cycles an instruction, 4 SIMDs


REFUSALS = {
    "elsewhere": (dict(target=replace(MI355X, arch="gfx942")), "needs gfx950"),
    "float64": (dict(dtype=torch.float64), "reads float32, bfloat16 or float16"),
    "spans": (dict(row_span=ScaleSpan.ROW), "one scale per block"),
    "groups": (dict(num_groups=1025, grouped_rows=True), "at most 1024 groups"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    changes, reason = REFUSALS[case]
    problem = DualProblem(
        Op.QUANTIZE_DUAL,
        MI355X,
        (64, 64),
        torch.bfloat16,
        get_format("mxfp8"),
        ScaleRule.RCEIL,
        0,
        False,
    )
    assert QUANTIZE_DUAL.unsupported(problem) is None
    assert reason in (QUANTIZE_DUAL.unsupported(replace(problem, **changes)) or "")

"""What is special to gfx950's grouped GEMMs, on emulated code, against the reference in float64.

tests/conformance/test_grouped.py has what every backend must compute.
Operands are small integers with a power of two for each block, so every sum is exact in float32 and
results must have the reference's bits. Sizes are no multiples of the tiles, groups are ragged, some
are empty, and rows outside the groups are NaN.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
import mxpert.training
from gfx950emu.timing import Execution, model_loop
from mxpert.core.problem import GroupedProblem, Op, ReferenceConfig
from mxpert.device.cdna4_operands import Operand, empty_operand, scale_strides, to_planes
from mxpert.formats import MXTensor
from mxpert.formats.spec import ScaleSpan, get_format
from mxpert.grouped.cdna4 import GROUPED_GEMM, GROUPED_WGRAD
from mxpert.grouped.inputs import GroupedGemmInputs, GroupedWgradInputs
from mxpert.routing.plan import padded_group_offsets
from mxpert.testing.gfx950 import MI355X, emulate
from mxpert.testing.numerics import assert_close_relative, assert_exact, stage_tolerance
from support.poison import poison_gaps

pytestmark = pytest.mark.usefixtures("nan_scratch")

OFFSETS = {
    "ragged": (0, 0, 37, 38, 38, 290, 310),
    "all_in_last": (0, 0, 0, 310),
    "empty": (0, 0, 0),
}
NUM_ROWS = 330
PAIRS = {
    "e4m3": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "hybrid": ("mxfp8_e5m2", "mxfp8_e4m3"),
    "e5m2_right": ("mxfp8_e4m3", "mxfp8_e5m2"),
}
FLOAT64 = ReferenceConfig(torch.float64)
HIGH, LOW = (
    next(
        config
        for config in GROUPED_GEMM.configs(
            GroupedProblem(
                Op.GROUPED_GEMM, MI355X, 512, 1, 256, 256, *PAIRS["e4m3"], True, torch.float32
            )
        )
        if config.block_m == block_m
    )
    for block_m in (256, 128)
)


def offsets_of(case: str) -> torch.Tensor:
    return torch.tensor(OFFSETS[case], dtype=torch.int32)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-3, 4, size, generator=draw(seed)).float()


def scaled(*size: int, seed: int = 0) -> torch.Tensor:
    """Integers, times a power of two for each block of 32 along the last axis."""
    blocks = torch.randint(-3, 4, (*size[:-1], size[-1] // 32), generator=draw(seed + 100))
    return integers(*size, seed=seed) * torch.exp2(blocks).repeat_interleave(32, -1)


def reference(op: Any, *operands: Any, **options: Any) -> torch.Tensor:
    with mxpert.override(backend="reference", config=FLOAT64):
        return op(*operands, **options, out_dtype=torch.float64)


def gemm_operands(case: str, pair: str, n: int, k: int) -> tuple[MXTensor, MXTensor, torch.Tensor]:
    offsets = offsets_of(case)
    a = mxpert.quantize(scaled(NUM_ROWS, k), PAIRS[pair][0])
    b = mxpert.quantize(scaled(len(offsets) - 1, n, k, seed=1), PAIRS[pair][1])
    a.scale[OFFSETS[case][-1] :] = 255
    return a, b, offsets


def wgrad_operands(case: str, pair: str, n: int, k: int) -> tuple[MXTensor, MXTensor, torch.Tensor]:
    offsets, copies = offsets_of(case), []
    for width, fmt, seed in zip((n, k), PAIRS[pair], (0, 1), strict=True):
        rows = integers(NUM_ROWS, width, seed=seed)
        rows[OFFSETS[case][-1] :] = torch.nan
        copy = mxpert.quantize_dual(rows, fmt, group_offsets=offsets)[1]
        copy.scale[:, int(padded_group_offsets(offsets)[-1]) // 32 :] = 255
        copies.append(copy)
    return copies[0], copies[1], offsets


@pytest.mark.parametrize("n", [130, 257])
def test_matrices_that_end_within_a_word_of_scales(n: int) -> None:
    """Scales of each matrix of b begin at a word of four rows, which its N does not fill."""
    a, b, offsets = gemm_operands("ragged", "e4m3", n, 160)
    expected = reference(mxpert.grouped_gemm, a, b, offsets)
    weight = empty_operand(torch.empty(0), tuple(b.shape), b.format)
    weight.qdata.copy_(b.qdata)
    weight.scale.copy_(b.scale)
    for name, operand in (("copied", b), ("in place", weight)):
        with emulate(), mxpert.override(backend="cdna4", config=LOW):
            actual = mxpert.grouped_gemm(a, operand, offsets, out_dtype=torch.float32)
        assert_exact(actual, expected.float(), name, ignore_zero_sign=True)


@pytest.mark.parametrize("config", [HIGH, LOW], ids=["high", "low"])
@pytest.mark.parametrize("op", ["gemm", "wgrad"])
def test_gaps_between_rows_reach_no_result(op: str, config: Any) -> None:
    """Copies of `quantize_dual`: rows of codes and planes of scales begin at lines of 128 bytes."""
    offsets = offsets_of("ragged")
    if op == "gemm":
        run, b = mxpert.grouped_gemm, scaled(len(offsets) - 1, 96, 160, seed=1)
        first = mxpert.quantize_dual(scaled(NUM_ROWS, 160), group_offsets=offsets)[0]
        second = mxpert.quantize_dual(b)[0]
    else:
        run = mxpert.grouped_wgrad
        first, second, _ = wgrad_operands("ragged", "e4m3", 96, 160)
    expected = reference(run, first, second, offsets)
    with emulate(), mxpert.override(backend="cdna4", config=config):
        operands = (poison_gaps(first), poison_gaps(second))
        actual = run(*operands, offsets, out_dtype=torch.float32)
    assert_exact(actual, expected.float(), op, ignore_zero_sign=True)


def sparse(shape: torch.Size, pitch: int) -> torch.Tensor:
    """Rows of zeros, `pitch` bytes each; untouched pages take no memory."""
    rows = mmap.mmap(-1, math.prod(shape[:-1]) * pitch)
    return torch.frombuffer(rows, dtype=torch.uint8).view(*shape[:-1], pitch)


@pytest.mark.parametrize("config", [HIGH, LOW], ids=["high", "low"])
def test_operands_beyond_2_gib(config: Any) -> None:
    """The last group's rows and matrix begin more than 2 GiB after the first."""
    offsets, pitch = torch.tensor([0, 1, 1, 288, 300]), (1 << 23) - 128
    near = [
        mxpert.quantize(scaled(*shape, 160, seed=k), "mxfp8_e4m3")
        for k, shape in enumerate([(300,), (4, 96)])
    ]
    expected = reference(mxpert.grouped_gemm, *near, offsets)
    far, memories = [], []
    # The checks keep a state of each word of memory that is shared.
    with emulate(checks=False) as emulation, mxpert.override(backend="cdna4", config=config):
        for name, each in zip("ab", near, strict=True):
            memory = sparse(each.shape, pitch)
            codes = memory[..., : each.shape[-1]]
            assert codes[-1].data_ptr() - codes.data_ptr() > 1 << 31
            codes.copy_(each.qdata)
            # Memory that others share is read access by access, and never copied as a whole.
            emulation.reach(name, memory, shared=True)
            memories.append(memory)
            far.append(MXTensor.unchecked(codes, each.scale, each.format))
        actual = mxpert.grouped_gemm(*far, offsets, out_dtype=torch.float32)
    assert_exact(actual, expected.float(), "far operands", ignore_zero_sign=True)


@pytest.mark.parametrize("wgrad", [False, True], ids=["gemm", "wgrad"])
def test_workgroups_compute_several_tiles(wgrad: bool) -> None:
    """Eight workgroups; the sum of a tile may not depend on the one before."""
    few = replace(MI355X, num_sms=8)
    if wgrad:
        grad, a, offsets = wgrad_operands("ragged", "e4m3", 288, 320)
        n, k, rows = 288, 320, grad.shape[1]
        expected = reference(mxpert.grouped_wgrad, grad, a, offsets)
    else:
        n, k, rows = 304, 416, NUM_ROWS
        a, b, offsets = gemm_operands("ragged", "e4m3", n, k)
        expected = reference(mxpert.grouped_gemm, a, b, offsets)
    problem = GroupedProblem(
        Op.GROUPED_WGRAD if wgrad else Op.GROUPED_GEMM,
        few,
        rows,
        len(offsets) - 1,
        n,
        k,
        *PAIRS["e4m3"],
        not wgrad,
        torch.float32,
    )
    with emulate(schedule="random", seed=1) as emulation:
        if wgrad:
            actual = GROUPED_WGRAD.launch(
                problem, HIGH, GroupedWgradInputs(grad=grad, a=a, group_offsets=offsets)
            )
        else:
            actual = GROUPED_GEMM.launch(
                problem, HIGH, GroupedGemmInputs(a=a, b=b, group_offsets=offsets)
            )
    assert emulation.last is not None
    assert emulation.last.grid == (8, 1, 1)
    assert_exact(actual, expected.float(), "several tiles", ignore_zero_sign=True)


def test_nan_stays_in_its_row() -> None:
    a, b, offsets = gemm_operands("all_in_last", "e4m3", 304, 416)
    a.scale[5, 3], a.qdata[70, 40] = 255, 0x7F  # a scale and a code that are NaN
    with emulate(), mxpert.override(backend="cdna4", config=HIGH):
        actual = mxpert.grouped_gemm(a, b, offsets, out_dtype=torch.float32)
    rows = actual.isnan().any(1).nonzero().flatten().tolist()
    assert rows == [5, 70]
    assert actual[rows].isnan().all()


def test_nan_stays_in_its_group() -> None:
    """Wgrad's steps reach into neighbouring groups, whose blocks count as zeros even if NaN."""
    grad, a, offsets = wgrad_operands("ragged", "e4m3", 288, 320)
    starts = padded_group_offsets(offsets) // 32  # groups 2 and 4: blocks 2 and 3 … 10
    grad.scale[7, starts[2]], a.scale[9, starts[4]] = 255, 255
    with emulate(), mxpert.override(backend="cdna4", config=HIGH):
        actual = mxpert.grouped_wgrad(grad, a, offsets, out_dtype=torch.float32)
    expected = torch.zeros_like(actual, dtype=torch.bool)
    expected[2, 7], expected[4, :, 9] = True, True
    assert torch.equal(actual.isnan(), expected)


OPERANDS: dict[str, tuple[Callable[[MXTensor], MXTensor], bool]] = {
    "as it is": (lambda x: x, True),
    "matrices": (lambda x: x[1:], True),
    "one matrix": (lambda x: x[2], True),
    "rows": (lambda x: x[0][4:40], True),
    "rows within a word": (lambda x: x[0][3:40], False),
    "every second matrix": (lambda x: x[::2], False),
}


@pytest.mark.parametrize("case", OPERANDS)
def test_what_is_read_in_place(case: str) -> None:
    """Views of an operand; the kernel reads rows of codes at any line, scales at whole words."""
    view, in_place = OPERANDS[case]
    whole = empty_operand(torch.empty(0), (3, 44, 416), get_format("mxfp8"))
    whole.qdata.copy_(torch.randint(0, 120, whole.qdata.shape, generator=draw(5)))
    whole.scale.copy_(torch.randint(0, 255, whole.scale.shape, generator=draw(6)))
    value = view(whole)
    with emulate():
        operand = Operand.of(value)
    assert (operand.scale.data_ptr() == value.scale.data_ptr()) == in_place
    assert torch.equal(operand.scale, value.scale)
    assert torch.equal(operand.codes, value.qdata)
    assert not operand.scale.stride(-1) % 4
    assert operand.scale_pitch == operand.scale.stride(-1) // 4


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_other_backends_read_the_copies(backend: str) -> None:
    """What the native quantiser stores, by its strides; K = 160 makes rows a part of a line."""
    offsets = torch.tensor([0, 33, 70])
    with emulate():
        with mxpert.override(backend="cdna4"):
            row, column = mxpert.quantize_dual(integers(70, 160), group_offsets=offsets)
            weight, _ = mxpert.quantize_dual(integers(2, 96, 160, seed=1))
            grad = mxpert.quantize_dual(integers(70, 96, seed=2), group_offsets=offsets)[1]
        assert not any(each.scale.is_contiguous() for each in (row, column, weight, grad))
        results = []
        for each in ("cdna4", backend):
            with mxpert.override(backend=each):
                y = mxpert.grouped_gemm(row, weight, offsets, out_dtype=torch.float32)
                dw = mxpert.grouped_wgrad(grad, column, offsets, out_dtype=torch.float32)
            results.append((y, dw))
    for ours, theirs in zip(*results, strict=True):
        assert_exact(ours, theirs, backend, ignore_zero_sign=True)


def test_longer_spans_are_served() -> None:
    """A tensor with longer spans has a scale for each block, too; the kernel reads those."""
    offsets = torch.tensor([0, 70])
    row, _ = mxpert.quantize_dual(scaled(96, 416), scale_span=ScaleSpan.AUTO)
    weight, _ = mxpert.quantize_dual(scaled(1, 320, 416, seed=1), scale_span=ScaleSpan.ROW)
    expected = reference(mxpert.grouped_gemm, row, weight, offsets)
    with emulate(), mxpert.override(backend="cdna4", config=HIGH):
        actual = mxpert.grouped_gemm(row, weight, offsets, out_dtype=torch.float32)
    tolerance = stage_tolerance("bf16", torch.float32, 416, numel=actual.numel())
    assert_close_relative(actual, expected, tolerance, "grouped_gemm")


def test_training_step() -> None:
    """Forward, dgrad and wgrad of a layer, and its quantisation: the bits of the reference."""
    offsets = torch.tensor([0, 70, 70, 140])
    data = integers(150, 96), integers(3, 160, 96, seed=1), integers(150, 160, seed=2)

    def step() -> list[torch.Tensor]:
        x, weight, grad = (each.to(torch.bfloat16) for each in data)
        x.requires_grad_()
        weight.requires_grad_()
        y = mxpert.training.grouped_linear(x, weight, offsets)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]

    with mxpert.override(backend="reference"):
        expected = step()
    with emulate() as emulation, mxpert.override(backend="cdna4"):
        actual = step()
    assert emulation.kernels["_grouped_gemm_cdna4_kernel"].launches == 3
    for name, ours, theirs in zip(("y", "dx", "dweight"), actual, expected, strict=True):
        assert_exact(ours, theirs, name, ignore_zero_sign=True)


@pytest.mark.parametrize("shape", [(37, 13), (3, 37, 13), (150, 40)], ids=str)
def test_scales_become_planes(shape: tuple[int, ...]) -> None:
    """The same scales, a plane for each block; every matrix begins at a word."""
    scale = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw(3))
    with emulate():
        planes = to_planes(scale)
    assert torch.equal(planes, scale)
    assert planes.stride() == scale_strides(shape)
    assert planes.stride(-2) == 1
    assert not any(stride % 4 for stride in (planes.stride(-1), *planes.stride()[:-2]))


@pytest.mark.parametrize(
    "config, mfma, barriers, others, efficiency",
    [pytest.param(HIGH, 64, 8, 4, 0.9, id="high"), pytest.param(LOW, 32, 4, 6, 0.8, id="low")],
)
def test_hot_loop(config: Any, mfma: int, barriers: int, others: int, efficiency: float) -> None:
    """The loop of a tile (two steps), and its modelled efficiency."""
    a = mxpert.quantize(integers(config.block_m, 1280), "mxfp8_e4m3")
    b = mxpert.quantize(integers(1, 256, 1280, seed=1), "mxfp8_e4m3")
    with (
        emulate(checks=False, trace=True) as emulation,
        mxpert.override(backend="cdna4", config=config),
    ):
        mxpert.grouped_gemm(a, b, torch.tensor([0, config.block_m]))
    report = model_loop(Execution.of(emulation.reports[-1]))
    assert emulation.last is not None
    assert emulation.last.program.metadata["vgpr_spill_count"] == 0
    assert report.instructions["mfma"] == mfma
    assert report.instructions["barrier"] == barriers
    assert report.other_per_mfma <= others
    assert report.mfma_efficiency >= efficiency
    single_bytes = ("_ubyte", "_sbyte", "_u8", "_i8")
    assert not [name for name in emulation.last.counts if name.endswith(single_bytes)]


@pytest.mark.parametrize(
    "config, others, efficiency",
    [pytest.param(HIGH, 5, 0.85, id="high"), pytest.param(LOW, 7.5, 0.72, id="low")],
)
def test_hot_loop_across_the_reduction(config: Any, others: float, efficiency: float) -> None:
    """b [G, K, N] is multiplied by scaled MFMA as it lies, through transposing reads of LDS."""
    a = mxpert.quantize(integers(config.block_m, 1280), "mxfp8_e4m3")
    b = mxpert.quantize(integers(1, 1280, 256, seed=1), "mxfp8_e4m3", axis=-2)
    with (
        emulate(checks=False, trace=True) as emulation,
        mxpert.override(backend="cdna4", config=config),
    ):
        mxpert.grouped_gemm(a, b, torch.tensor([0, config.block_m]), trans_b=False)
    assert emulation.kernels["_grouped_gemm_cdna4_kernel"].launches == 1
    report = model_loop(Execution.of(emulation.reports[-1]))
    assert emulation.last is not None
    assert emulation.last.program.metadata["vgpr_spill_count"] == 0
    steps, waves, blocks = 10, 8, config.block_m // 16 * 16
    assert emulation.counts["v_mfma_scale_f32_16x16x128_f8f6f4"] == steps * blocks
    assert emulation.counts["ds_read_b64_tr_b8"] == steps * waves * 16
    assert report.other_per_mfma <= others
    assert report.mfma_efficiency >= efficiency


def gapped(values: torch.Tensor, gap: int, poison: int) -> torch.Tensor:
    """The same [G, rows, bytes], with `gap` bytes of poison after each row."""
    storage = values.new_full((*values.shape[:-1], values.shape[-1] + gap), poison)
    return storage[..., : values.shape[-1]].copy_(values)


@pytest.mark.parametrize("config", [HIGH, LOW], ids=["high", "low"])
@pytest.mark.parametrize("n", [304, 290])
def test_gaps_across_the_reduction_reach_no_result(config: Any, n: int) -> None:
    """Rows of b that do not end at 16 bytes are copied, others read in place."""
    a, _, offsets = gemm_operands("ragged", "e4m3", n, 416)
    weight = scaled(len(offsets) - 1, n, 416, seed=1).mT.contiguous()
    b = mxpert.quantize(weight, "mxfp8_e4m3", axis=-2)
    expected = reference(mxpert.grouped_gemm, a, b, offsets, trans_b=False)
    codes = gapped(b.qdata, -n % 32 + 32, 0x7F)
    far = MXTensor(codes, gapped(b.scale, -n % 4 + 4, 255), b.format, -2)
    operand = Operand.across(far)
    in_place = operand.codes.data_ptr() == codes.data_ptr()
    assert in_place == (operand.scale.data_ptr() == far.scale.data_ptr()) == (n % 16 == 0)
    config = config if n % 16 == 0 else LOW
    with emulate(), mxpert.override(backend="cdna4", config=config):
        actual = mxpert.grouped_gemm(a, far, offsets, trans_b=False, out_dtype=torch.float32)
    assert_exact(actual, expected.float(), "gaps", ignore_zero_sign=True)


@pytest.mark.parametrize("config", [HIGH, LOW], ids=["high", "low"])
def test_values_past_the_reduction_are_not_multiplied(config: Any) -> None:
    """The last step of a matrix is a part of one; the next matrix, which follows it, is NaN."""
    a, _, _ = gemm_operands("ragged", "e5m2_right", 320, 160)
    b = mxpert.quantize(scaled(2, 320, 160, seed=1).mT.contiguous(), "mxfp8_e5m2", axis=-2)
    b.qdata[1], b.scale[1] = 0x7F, 255
    offsets = torch.tensor([0, 310, 310])
    with emulate(), mxpert.override(backend="cdna4", config=config):
        actual = mxpert.grouped_gemm(a, b, offsets, trans_b=False, out_dtype=torch.float32)
    expected = reference(mxpert.grouped_gemm, a, b, offsets, trans_b=False)
    assert_exact(actual, expected.float(), "next matrix", ignore_zero_sign=True)


@pytest.mark.parametrize("config", [HIGH, LOW], ids=["high", "low"])
@pytest.mark.parametrize("steps", [2, 3])
def test_no_step_of_zeros_is_multiplied(config: Any, steps: int) -> None:
    """Steps of 128 values come in pairs; an odd last one has no partner."""
    k = 128 * steps - 96
    a = mxpert.quantize(integers(config.block_m, k), "mxfp8_e4m3")
    b = mxpert.quantize(integers(1, 256, k, seed=1), "mxfp8_e4m3")
    with emulate(checks=False) as emulation, mxpert.override(backend="cdna4", config=config):
        mxpert.grouped_gemm(a, b, torch.tensor([0, config.block_m]))
    blocks = config.block_m // 16 * 256 // 16
    assert emulation.counts["v_mfma_scale_f32_16x16x128_f8f6f4"] == steps * blocks


@pytest.mark.parametrize("size", [2048, 2880])
def test_rows_are_whole_lines(size: int) -> None:
    """Training's copies: the loop is as fast where rows of codes have a part of a line."""
    offsets = torch.tensor([0, 256])
    with emulate(checks=False), mxpert.override(backend="cdna4"):
        row = mxpert.quantize_dual(integers(256, size), group_offsets=offsets)[0]
        weight = mxpert.quantize_dual(integers(1, 256, size, seed=1))[0]
    with (
        emulate(checks=False, trace=True) as emulation,
        mxpert.override(backend="cdna4", config=HIGH),
    ):
        mxpert.grouped_gemm(row, weight, offsets)
    assert set(emulation.kernels) == {"_grouped_gemm_cdna4_kernel"}  # nothing is copied before
    assert model_loop(Execution.of(emulation.reports[-1])).mfma_efficiency >= 0.9


REFUSALS = {
    "elsewhere": (dict(target=replace(MI355X, arch="gfx942")), "needs gfx950"),
    "bf16": (dict(a_format="bf16", b_format="bf16"), "multiplies MXFP8 operands"),
    "wide": (dict(trans_b=False, n=1 << 23), "across the reduction with at most"),
    "float64": (dict(out_dtype=torch.float64), "writes bfloat16, float16 or float32"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    changes, reason = REFUSALS[case]
    problem = GroupedProblem(
        Op.GROUPED_GEMM, MI355X, 512, 2, 256, 256, *PAIRS["e4m3"], True, torch.bfloat16
    )
    assert GROUPED_GEMM.unsupported(problem) is None
    assert reason in (GROUPED_GEMM.unsupported(replace(problem, **changes)) or "")


def test_wgrad_refuses_many_groups() -> None:
    problem = GroupedProblem(
        Op.GROUPED_WGRAD, MI355X, 1 << 16, 1025, 64, 64, *PAIRS["e4m3"], False, torch.bfloat16
    )
    assert "at most 1024 groups" in (GROUPED_WGRAD.unsupported(problem) or "")


def test_refuses_a_config_of_another_kernel() -> None:
    a, b, offsets = gemm_operands("all_in_last", "e4m3", 304, 416)
    config = mxpert.configs.GemmConfig(64, 64, 64)
    with (
        emulate(),
        mxpert.override(backend="cdna4", config=config),
        pytest.raises(ValueError, match="a config of this backend"),
    ):
        mxpert.grouped_gemm(a, b, offsets)

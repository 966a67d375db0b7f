"""Ops and kernels of Triton and Gluon through gfx950 code, and that nothing of it stays behind."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import gfx950emu
import mxpert
from mxpert.core.compilation import compile_only
from mxpert.core.problem import Target
from mxpert.core.target import current_device, detect_target, on_device
from mxpert.formats.tensor import Layout
from mxpert.moe.weights import MoEWeights
from mxpert.testing import gfx950
from mxpert.testing.problems import MoEShape
from support.exact import exact_moe_problem
from support.layers import run_layer

SHAPE = MoEShape(256, 128, 4, 2, has_bias=True)


@triton.jit
def _scaled_sum_kernel(out_ptr, x_ptr, factor, count, BLOCK: tl.constexpr):
    """Sum of each program's BLOCK elements, times a factor. Grid: (blocks,)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(x) * factor)


@gluon.jit
def _negate_kernel(out_ptr, x_ptr, BLOCK: gl.constexpr):
    """Negate BLOCK elements. Grid: (blocks,)."""
    layout: gl.constexpr = gl.BlockedLayout([4], [64], [4], [0])
    place = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(out_ptr + place, -gl.load(x_ptr + place))


def test_an_op_sees_an_mi355x_and_gives_the_same_bits() -> None:
    x = torch.randn(48, 160) * torch.exp2(torch.randint(-20, 20, (48, 160)).float())
    want = mxpert.quantize(x, "mxfp8")
    with gfx950.emulate() as emulation:
        target = detect_target("cpu")
        got = mxpert.quantize(x, "mxfp8")
    assert target == gfx950.MI355X == Target("hip", "gfx950", target.name, 256, 160 * 1024)
    assert torch.equal(got.qdata, want.qdata)
    assert torch.equal(got.scale, want.scale)
    assert list(emulation.kernels) == ["_quantize_rows_kernel"]
    assert emulation.launches == 1
    assert emulation.instructions == sum(emulation.counts.values()) > 1000
    assert emulation.last is not None
    assert emulation.last.kernel == "_quantize_rows_kernel"
    assert detect_target("cpu").kind == "cpu"


@pytest.mark.filterwarnings("ignore::mxpert.PerformanceWarning")
@pytest.mark.parametrize("layout", [Layout.ROW_MAJOR, Layout.CDNA4_FRAGMENT])
@pytest.mark.parametrize("activation_format", ["mxfp8", "mxfp4", "bf16"])
def test_a_layer_is_exact_in_all_schedules_and_with_all_garbage(
    activation_format: str, layout: Layout
) -> None:
    inputs = exact_moe_problem(SHAPE, 16, seed=3)
    native = layout is Layout.CDNA4_FRAGMENT
    prepared = inputs.weights.prepare(device="cpu", layout=layout) if native else inputs.weights

    def layer(weights: MoEWeights = prepared) -> torch.Tensor:
        return run_layer(inputs, weights=weights, activation_format=activation_format)

    want = layer(inputs.weights)
    for options in ({}, {"seed": 1}, {"schedule": "random"}, {"schedule": "random", "seed": 2}):
        with gfx950.emulate(**options) as emulation:  # type: ignore[arg-type]
            got = layer()
        assert torch.equal(got, want), options
        assert ("_moe_gate_up_kernel" in emulation.kernels) != native
        assert any(name.startswith("v_mfma") for name in emulation.counts)


def test_plain_launches_of_triton_and_gluon() -> None:
    x, out = torch.randn(1000), torch.zeros(4)
    with gfx950.emulate() as emulation:
        grid = lambda given: (triton.cdiv(given["count"], given["BLOCK"]),)  # noqa: E731
        _scaled_sum_kernel[grid](out, x, 0.5, 1000, BLOCK=256, num_warps=2)
        negated = torch.zeros(1024)
        _negate_kernel[(2,)](negated, torch.arange(1024.0), BLOCK=512)
    parts = torch.nn.functional.pad(x, (0, 24)).view(4, 256).double().sum(1) * 0.5
    assert torch.allclose(out.double(), parts, atol=1e-4)  # 256 sums of |x| < 5, 2**-24 each
    assert torch.equal(negated, -torch.arange(1024.0))
    assert [totals.launches for totals in emulation.kernels.values()] == [1, 1]


def test_a_fault_names_the_source_line() -> None:
    with gfx950.emulate(), pytest.raises(gfx950emu.OutOfBoundsFault) as caught:
        _negate_kernel[(2,)](torch.zeros(512), torch.zeros(1024), BLOCK=512)
    assert caught.value.place.kernel == "_negate_kernel"
    assert caught.value.place.line.startswith("test_emulate.py:")
    assert "byte 2048 of the 2048 of out_ptr" in caught.value.what


def test_nothing_stays_behind() -> None:
    """Calls ahead of, inside and after the block run as if there were no other."""
    x = torch.randn(8, 64)
    plain = current_device()
    mxpert.quantize(x, "mxfp4")  # warm: the next such call skips its checks
    with gfx950.emulate() as emulation:
        for calls in range(1, 5):
            mxpert.quantize(x, "mxfp4")
            assert emulation.launches == calls  # no replay, no cached resolution
        assert current_device() is not plain
    mxpert.quantize(x, "mxfp4")
    assert emulation.launches == 4
    assert current_device() is plain
    with pytest.raises(RuntimeError, match="stop"), gfx950.emulate():
        raise RuntimeError("stop")
    assert current_device() is plain
    assert detect_target("cpu").kind == "cpu"


class DropsTheLast(gfx950.Emulation):
    """A wrong executor: it leaves out the last program of each grid."""

    def run(self, compiled: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> Any:
        first, *others = grid
        return super().run(compiled, (first - 1, *others), arguments)


@pytest.mark.parametrize("executor, is_right", [(gfx950.Emulation, True), (DropsTheLast, False)])
def test_a_wrong_executor_is_seen(executor: type[gfx950.Emulation], is_right: bool) -> None:
    """Results of ops and of plain launches are the executor's."""
    x, negated = torch.randn(512, 160), torch.zeros(1024)
    want = mxpert.quantize(x, "mxfp8")  # stays in memory, where unwritten codes could equal it
    with on_device(gfx950.MI355X, executor({})):
        codes = mxpert.quantize(x, "mxfp8")
        _negate_kernel[(2,)](negated, torch.arange(1024.0), BLOCK=512)
    assert torch.equal(codes.qdata, want.qdata) is is_right
    assert torch.equal(negated, -torch.arange(1024.0)) is is_right


def test_kernels_are_only_compiled() -> None:
    out = torch.zeros(1024)
    with gfx950.emulate() as emulation, compile_only():
        binary = _negate_kernel.warmup(out, torch.arange(1024.0), BLOCK=512, grid=(2,))
        mxpert.quantize(torch.ones(2, 32), "mxfp4")
    assert "amdgcn" in binary.asm
    assert not emulation.launches
    assert not out.any()


def test_blocks_nest() -> None:
    x = torch.randn(8, 64)
    with gfx950.emulate() as outer:
        with gfx950.emulate(checks=False) as inner:
            mxpert.quantize(x, "mxfp4")
        assert inner.last is not None
        assert not inner.last.checks
        assert (outer.launches, inner.launches) == (0, 1)
        mxpert.quantize(x, "mxfp4")
        assert (outer.launches, inner.launches) == (1, 1)
        assert outer.last is not None
        assert outer.last.checks


def test_a_block_holds_for_its_own_thread() -> None:
    x, found = torch.randn(8, 64), []

    def elsewhere() -> None:
        found.append((detect_target("cpu").kind, mxpert.quantize(x, "mxfp4")))

    with gfx950.emulate() as emulation:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        mine = mxpert.quantize(x, "mxfp4")
    assert found[0][0] == "cpu"
    assert emulation.launches == 1
    assert torch.equal(found[0][1].qdata, mine.qdata)


def test_blocks_of_two_threads_overlap() -> None:
    x, barrier, counts = torch.randn(8, 64), threading.Barrier(2), []

    def work(calls: int) -> None:
        with gfx950.emulate() as emulation:
            barrier.wait()
            for _ in range(calls):
                mxpert.quantize(x, "mxfp4")
            counts.append((calls, emulation.launches))

    threads = [threading.Thread(target=work, args=(calls,)) for calls in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counts) == [(1, 1), (3, 3)]
    assert detect_target("cpu").kind == "cpu"


def test_weights_are_prepared_for_gfx950() -> None:
    weights = exact_moe_problem(SHAPE, 1, seed=3).weights
    with gfx950.emulate():
        prepared = weights.prepare(device="cpu")
    assert prepared.layout is Layout.CDNA4_FRAGMENT
    assert weights.prepare(device="cpu").layout is Layout.ROW_MAJOR


def test_emulation_forgets_memory_that_is_freed() -> None:
    with gfx950.emulate() as emulation:
        first, second = torch.zeros(4), torch.zeros(4)
        for each in (first, second, first):
            emulation.reach("peer", each, shared=True)
        assert [each.name for each in emulation.reachable] == ["peer", "peer (2)"]
        del first, each
        assert [each.name for each in emulation.reachable] == ["peer (2)"]

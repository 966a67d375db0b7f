"""`Launch` against Triton's own launches: both use the same binary and the same arguments.

A mock driver without a device records the C launcher's arguments, so the comparison runs on any
machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mxpert.core import launch
from mxpert.core.launch import Launch
from mxpert.device.hopper import GluonDescriptorSpec
from support.launches import without_device

_HOOKS = slice(9, 13)
"""Metadata for hooks and the hooks themselves, which a direct launch does not pass."""


@triton.jit(do_not_specialize=["count"])
def _scale_kernel(out, x, bias, count, stride, factor, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + columns * stride, mask=columns < count, other=0.0) * factor
    if bias is not None:
        values += tl.load(bias + columns, mask=columns < count, other=0.0)
    tl.store(out + columns, values, mask=columns < count)


@gluon.jit
def _copy_kernel(out, x_desc, rows, COLUMNS: gl.constexpr):
    """Copy the first 8 rows of a tensor, or of the first of its matrices."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [0] * len(x_desc.block_type.shape), ready, tile)
    mbarrier.wait(ready, 0)
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    values = tile.reshape([8, COLUMNS]).load(layout)
    gl.store(out + row * COLUMNS + column, values, mask=row < rows)


@pytest.fixture
def calls() -> Iterator[list[tuple[Any, ...]]]:
    with without_device() as launches:
        yield launches


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Keys whose launches went through Triton."""
    keys: list[tuple[Any, ...]] = []
    learn = Launch._learn

    def note(self: Launch, key: tuple[Any, ...], tensors: Any) -> None:
        keys.append(key)
        learn(self, key, tensors)

    monkeypatch.setattr(Launch, "_learn", note)
    monkeypatch.setattr(launch, "_BINARIES", {})
    return keys


def plain(arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments of a C launcher, with pointers as integers."""
    kept = [
        value
        for index, value in enumerate(arguments)
        if index not in range(_HOOKS.start + 1, _HOOKS.stop)
    ]
    return [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in kept]


def scale(size: int, *, stride: int = 1, factor: float = 2.0, block: int = 64) -> Launch:
    return Launch(
        _scale_kernel,
        (triton.cdiv(size, block),),
        count=size,
        stride=stride,
        factor=factor,
        BLOCK=block,
        num_warps=2,
    )


def check_like_triton(calls: list[tuple[Any, ...]], made: Launch, **tensors: Any) -> None:
    """Check that two `Launch` calls, the second direct, and Triton's launch are all equal."""
    for _ in range(2):
        made(**tensors)
    made.kernel[made.grid](**made.arguments(tensors))
    assert calls[-2][10:13] == (None, None, None), "the second launch is direct"
    assert plain(calls[-3]) == plain(calls[-2]) == plain(calls[-1])


STORAGE = torch.zeros(4096)
TENSORS = {
    "aligned": {"out": STORAGE[:64], "x": STORAGE[64:], "bias": None},
    "with-bias": {"out": STORAGE[:64], "x": STORAGE[64:], "bias": STORAGE[128:]},
    "misaligned": {"out": STORAGE[1:65], "x": STORAGE[66:], "bias": STORAGE[129:]},
    "one-misaligned": {"out": STORAGE[:64], "x": STORAGE[65:], "bias": None},
    "bfloat16": {"out": STORAGE[:64], "x": STORAGE[64:].bfloat16(), "bias": None},
}


@pytest.mark.parametrize("stride", [1, 2, 16])
@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
def test_a_direct_launch_is_tritons(calls, learned, tensors, stride):
    check_like_triton(calls, scale(40, stride=stride), **tensors)


def test_what_changes_the_binary_is_looked_at(calls, learned):
    """Different calls are interleaved: a key that is too coarse would find the wrong binary."""
    for _ in range(2):
        for tensors in TENSORS.values():
            for made in (
                scale(40),
                scale(48),
                scale(1),
                scale(40, stride=2),
                scale(40, stride=16),
                scale(40, stride=1 << 31),
                scale(40, block=128),
            ):
                made(**tensors)
                direct = calls[-1]
                made.kernel[made.grid](**made.arguments(tensors))
                assert plain(direct) == plain(calls[-1])
    assert len({call[4] for call in calls}) == 1, "the stub names functions by kernel alone"


def test_sizes_share_a_binary(calls, learned):
    """A new token count or factor needs no launch through Triton."""
    for size in (40, 41, 1, 48, 1000):
        for factor in (2.0, 0.5):
            scale(size, factor=factor)(**TENSORS["aligned"])
            assert calls[-1][-4:-1] == (size, 1, factor)
    assert len(learned) == 1


def test_copies_of_matrices(calls):
    """3-D descriptors with one matrix per leading index; reads past a matrix give zeros."""
    layout = gl.NVMMASharedLayout.get_default_for([1, 8, 64], gl.float32)
    tile = GluonDescriptorSpec((1, 8, 64), 64, layout)
    small = STORAGE[:1920].view(2, 3, 5, 64)
    described = tile.descriptor(small)
    assert [*described.shape] == [6, 5, 64]
    assert [*described.strides] == [320, 64, 1]
    assert [*tile.descriptor(STORAGE.view(2, 4, 2, 256)).shape] == [8, 8, 64]
    made = Launch(_copy_kernel, (1,), {"x_desc": tile}, rows=3, COLUMNS=64, num_warps=4)
    for x in (small, STORAGE[960:2880].view(2, 3, 5, 64), STORAGE.view(8, 8, 64)):
        check_like_triton(calls, made, out=torch.empty(512), x_desc=x)


def test_descriptors_are_encoded_once_for_each_tensor(calls, learned, monkeypatch):
    layout = gl.NVMMASharedLayout.get_default_for([8, 64], gl.float32)
    made = Launch(
        _copy_kernel,
        (1,),
        {"x_desc": GluonDescriptorSpec((8, 64), 64, layout)},
        rows=3,
        COLUMNS=64,
        num_warps=4,
    )
    encoded: list[object] = []
    encode = nvidia.make_tensordesc_arg
    for x in (STORAGE, STORAGE[:2048], STORAGE.view(64, 64)[8:]):
        check_like_triton(calls, made, out=torch.empty(512), x_desc=x)
    monkeypatch.setattr(
        nvidia,
        "make_tensordesc_arg",
        lambda *arguments: encoded.append(arguments) or encode(*arguments),
    )
    out = torch.empty(512)
    for _ in range(3):
        made(out=out, x_desc=STORAGE[1024:])
    assert len(encoded) == 1
    for _ in range(2):
        with pytest.raises(AssertionError, match="contiguous"):
            made(out=out, x_desc=STORAGE.view(64, 64)[:, ::2])


def test_hooks_see_every_launch(calls, learned):
    seen: list[str] = []
    made = scale(40)
    made(**TENSORS["aligned"])
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        made(**TENSORS["aligned"])
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    made(**TENSORS["aligned"])
    assert [call[11] is not None for call in calls] == [True, True, False]


def test_an_unknown_c_launcher_is_left_to_triton(calls, learned, monkeypatch):
    monkeypatch.setattr(launch, "_DIRECT", False)
    made = scale(40)
    for _ in range(2):
        made(**TENSORS["aligned"])
        assert calls[-1][11] is not None
    assert not learned


def test_no_tensors_are_refused(calls):
    with pytest.raises(ValueError, match="need a tensor, got none"):
        scale(40)(out=None, x=None, bias=None)

"""What a device is taken for, from what torch tells of it or a block says; who launches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mxpert
from mxpert.core import target
from mxpert.core.compilation import ThroughTriton, compile_only
from mxpert.core.ops import OPS
from mxpert.core.problem import MoEOptions, MoEProblem, Op, SiLU, Target
from mxpert.distributed.symmetric import SymmetricExchange
from mxpert.formats.tensor import Layout
from mxpert.moe.triton import config as heuristics
from support.devices import DEVICES, HOPPER_CARDS
from support.exchange import Case


@pytest.fixture(autouse=True)
def _no_target_is_remembered() -> Iterator[None]:
    target._gpu_target.cache_clear()
    yield
    target._gpu_target.cache_clear()


def device_with(monkeypatch: pytest.MonkeyPatch, hip: str | None, **properties: object) -> Target:
    """The target of a GPU with these properties, in a build of torch for CUDA or ROCm."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties)
    )
    return target.detect_target("cuda:0")


@pytest.mark.parametrize(
    "name, arch",
    [
        ("gfx950:sramecc+:xnack-", "gfx950"),
        ("gfx950", "gfx950"),
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx90a:sramecc-:xnack+", "gfx90a"),
    ],
)
def test_amd_features_are_no_part_of_the_architecture(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = device_with(
        monkeypatch,
        "7.0.51831",
        gcnArchName=name,
        name="AMD Instinct MI355X",
        multi_processor_count=256,
    )
    assert found == Target("hip", arch, "AMD Instinct MI355X", 256, 160 * 1024)
    problem = MoEProblem(
        Op.FUSED_MOE, found, 16, 4, 32, 512, 512, MoEOptions(SiLU(), "mxfp8"), Layout.ROW_MAJOR
    )
    assert (heuristics.unsupported(problem) is None) is (arch == "gfx950")


def test_cuda_architecture_is_the_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    found = device_with(
        monkeypatch,
        None,
        major=9,
        minor=0,
        name="NVIDIA H200",
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
        clock_rate=1_980_000,
        memory_clock_rate=3_201_000,
        memory_bus_width=6144,
    )
    assert found == HOPPER_CARDS["H200"]
    assert (found.clock, found.bandwidth) == (1.98e9, 4.916736e12)  # kHz; two transfers a clock


class Named(ThroughTriton):
    """An executor that notes the kernels it gets, and launches none."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, bool]] = []
        self.memories: list[tuple[str, bool]] = []

    def execute(
        self, kernel: Any, grid: Any, arguments: Mapping[str, Any], *, warmup: bool
    ) -> None:
        self.kernels.append((kernel.__name__, warmup))

    def reach(self, name: str, tensor: torch.Tensor, *, shared: bool = False) -> None:
        self.memories.append((name, shared))


QUANTIZE = "_quantize_rows_kernel"


def quantize() -> mxpert.MXTensor:
    return mxpert.quantize(torch.ones(2, 32), "mxfp4")


def test_blocks_nest_and_keep_what_is_not_given() -> None:
    real, outer, inner = target.current_device(), Named(), Named()
    with target.on_device(DEVICES["sm_90"], outer):
        with target.on_device(executor=inner):
            quantize()
            assert target.detect_target("cpu") == DEVICES["sm_90"]
        with target.on_device(DEVICES["gfx950"]):
            quantize()
            assert {target.detect_target(each).arch for each in ("cpu", "meta")} == {"gfx950"}
            with compile_only():
                quantize()
        assert target.detect_target("cpu") == DEVICES["sm_90"]
    assert inner.kernels == [(QUANTIZE, False)]
    assert outer.kernels == [(QUANTIZE, False), (QUANTIZE, True)]
    assert target.current_device() is real
    assert target.detect_target("cpu").kind == "cpu"


def test_an_error_ends_a_block() -> None:
    real = target.current_device()
    with (
        target.on_device(DEVICES["sm_90"]),
        pytest.raises(RuntimeError, match="stop"),
        target.on_device(DEVICES["gfx950"], Named()),
    ):
        raise RuntimeError("stop")
    assert target.current_device() is real


def test_a_block_holds_for_its_own_thread() -> None:
    seen: list[tuple[str, list[tuple[str, bool]]]] = []
    ready = threading.Barrier(3)

    def on(arch: str, calls: int) -> None:
        with target.on_device(DEVICES[arch], launched := Named()):
            ready.wait()
            for _ in range(calls):
                quantize()
            seen.append((target.detect_target("cpu").arch, launched.kernels))
            ready.wait()

    threads = [threading.Thread(target=on, args=each) for each in (("sm_90", 1), ("gfx950", 3))]
    for thread in threads:
        thread.start()
    ready.wait()
    assert target.detect_target("cpu").kind == "cpu"
    here = quantize()
    ready.wait()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [("gfx950", [(QUANTIZE, False)] * 3), ("sm_90", [(QUANTIZE, False)])]
    assert here.qdata.shape == (2, 16)


def test_calls_are_cached_by_device() -> None:
    """A call that is warm elsewhere takes neither the kernel nor the launches of the other device,
    and a block leaves nothing in the cache."""
    real, cache = target.current_device(), OPS["quantize"]._calls
    want = quantize()
    cached = dict(real.calls[cache])
    for _ in range(2):
        with target.on_device(DEVICES["sm_90"], launched := Named()):
            for calls in range(1, 5):
                quantize()
                assert launched.kernels == [(QUANTIZE, False)] * calls, "no call is replayed"
        assert real.calls[cache] == cached
    assert torch.equal(quantize().qdata, want.qdata)


def test_an_executor_is_told_of_memory_behind_addresses() -> None:
    memory = torch.zeros(8, dtype=torch.uint8)
    target.tell_executor("nobody listens", memory)
    with target.on_device(DEVICES["gfx950"], told := Named()):
        SymmetricExchange(None, Case(size=1).spec(0), torch.device("cpu"))
    assert told.memories == [("the memory of rank 0", True), ("the words of an exchange", False)]

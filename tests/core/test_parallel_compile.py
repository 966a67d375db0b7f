"""Kernels of a call are compiled in threads before its first launch, on the mock driver."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime import _async_compile

import mxpert
from mxpert.core import calls, launch
from mxpert.core.launch import Launch, record_launches
from mxpert.core.parallel_compile import compile_in_threads
from mxpert.core.problem import MoEProblem
from mxpert.core.target import on_device
from mxpert.formats.tensor import Layout
from mxpert.moe.combine import _moe_combine_kernel
from mxpert.moe.hopper.decode import _moe_gemm_decode_kernel
from mxpert.moe.hopper.encode import _moe_encode_rows_kernel
from mxpert.routing.triton_plan_kernels import _routing_plan_expert_kernel
from mxpert.testing.ahead_of_time import compile_kernel
from mxpert.testing.problems import MoEShape
from support.launches import H200, recorded_launches, without_device
from support.without_data import layer_of, packed, weights_of

SHAPE = MoEShape(288, 160, 7, 2, mxpert.SiLU())
TOKENS = 19
LAYER = [
    "_moe_combine_kernel",
    "_moe_encode_rows_kernel",
    "_moe_gemm_decode_kernel",
    "_moe_gemm_decode_kernel",
    "_routing_plan_expert_kernel",
]
"""Kernels of the layer, one for each binary."""


@triton.jit
def _fill_kernel(out, VALUE: tl.constexpr):
    tl.static_assert(VALUE > 0, "a value that is refused")
    tl.store(out, VALUE)


class Made(NamedTuple):
    """A binary that Triton made: its kernel, its bytes, and whether a thread made it."""

    name: str
    binary: bytes
    in_thread: bool


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Made]:
    """What Triton compiles from now on, with empty caches."""
    binaries: list[Made] = []

    def note(src: Any, metadata_group: dict[str, str], cache_hit: bool, **_: object) -> None:
        (path,) = (each for name, each in metadata_group.items() if name.endswith(".cubin"))
        in_thread = threading.current_thread() is not threading.main_thread()
        if not cache_hit:
            binaries.append(Made(src.fn.__name__, Path(path).read_bytes(), in_thread))

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", note)
    monkeypatch.setattr(launch, "_BINARIES", {})
    kernels: tuple[Any, ...] = (
        _fill_kernel,
        _moe_combine_kernel,
        _moe_encode_rows_kernel,
        _moe_gemm_decode_kernel,
        _routing_plan_expert_kernel,
    )
    for kernel in kernels:
        caches = collections.defaultdict(kernel.create_binder)
        monkeypatch.setattr(kernel, "device_caches", caches)
    return binaries


@pytest.fixture
def launched() -> Iterator[list[tuple[Any, ...]]]:
    with without_device() as launches:
        yield launches


def run_layer() -> None:
    problem: MoEProblem = layer_of(SHAPE, TOKENS, H200, Layout.HOPPER_FRAGMENT, "mxfp8")
    x = torch.empty(TOKENS, SHAPE.hidden_size, dtype=torch.bfloat16)
    routed = torch.ones(TOKENS, 2), torch.zeros(TOKENS, 2, dtype=torch.int32)
    weights = weights_of(problem, in_memory, has_bias=False)
    with on_device(H200):
        mxpert.fused_moe(
            x, weights, *routed, activation=SHAPE.activation, activation_format="mxfp8"
        )


def in_memory(experts: int, rows: int, depth: int) -> Any:
    """A projection whose codes are whatever memory holds."""
    like = packed(experts, rows, depth)
    parts = {name: torch.empty_like(getattr(like, name), device="cpu") for name in PARTS}
    return mxpert.MXTensor(**{**like.__dict__, **parts})


PARTS = ("qdata", "scale", "reference")


def test_a_layer_is_compiled_in_threads_to_the_same_binaries(made, launched, monkeypatch, tmp_path):
    run_layer()
    assert sorted(each.name for each in made) == LAYER
    assert all(each.in_thread for each in made)
    assert len(launched) == 6, "rows are encoded in both stages"
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "one-after-the-other"))
    with recorded_launches() as launches:
        run_layer()
    alone = {
        compile_kernel(each.kernel, each.arguments, target="sm_90").asm["cubin"]
        for each in launches
    }
    assert alone == {each.binary for each in made}
    assert not any(each.in_thread for each in made[len(LAYER) :])


class Fills:
    """A kernel that launches once for each value, and then does something else."""

    def __init__(self, *values: int, then: Callable[[], object] = lambda: None) -> None:
        self.values, self.then, self.runs = values, then, 0

    def launch(self, problem: Any, config: None, inputs: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        out = inputs.new_empty(4)
        for value in self.values:
            Launch(_fill_kernel, (1,), VALUE=value)(out=out)
        self.then()
        return out


def call(kernel: Any) -> Any:
    problem = layer_of(SHAPE, TOKENS, H200, Layout.HOPPER_FRAGMENT, "mxfp8")
    return calls._launch(kernel, None, problem, torch.empty(4))


def test_an_error_is_raised_by_the_launch_that_needs_the_kernel(made, launched):
    with pytest.raises(CompilationError, match="a value that is refused"):
        call(Fills(1, 0, 2))
    assert len(launched) == 1
    assert [each.in_thread for each in made] == [True, True], "1 and 2"
    assert [len(cache[0]) for cache in _fill_kernel.device_caches.values()] == [2], "both are kept"
    assert _async_compile.active_mode.get() is None


def test_a_call_runs_again_only_for_what_is_missing(made, launched):
    kernel = Fills(1, 2)
    out = call(kernel)
    assert out.device.type == "cpu"
    assert kernel.runs == 2
    call(kernel)
    assert kernel.runs == 3
    assert (len(made), len(launched)) == (2, 4)


def test_code_that_needs_memory_ends_the_rehearsal(made, launched):
    """A tensor of zeros is made once; kernels behind it are compiled when they are launched."""
    zeros: list[torch.Tensor] = []
    kernel = Fills(1, then=lambda: zeros.append(torch.zeros(2)))
    call(kernel)
    assert [each.device.type for each in zeros] == ["cpu"]
    assert [each.in_thread for each in made] == [True]


def test_a_recorded_call_does_not_run_twice(made, launched):
    kernel = Fills(1)
    with record_launches() as records:
        call(kernel)
    assert (kernel.runs, len(records)) == (1, 1)
    assert [each.in_thread for each in made] == [False]


def test_an_interrupt_leaves_no_thread_in_charge(made, launched, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as while_waiting:
        while_waiting.setattr(triton.AsyncCompileMode, "__exit__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(Fills(1, 2))
    assert _async_compile.active_mode.get() is None
    call(Fills(1, 2))
    assert len(launched) == 2


def test_other_work_in_threads_is_left_alone(made, launched):
    """A caller's own mode: it compiles what is launched inside it."""
    with compile_in_threads():
        call(Fills(1))
    assert (len(made), len(launched)) == (1, 1)

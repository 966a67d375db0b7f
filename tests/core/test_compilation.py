"""The first call compiles all its kernels in threads; the launches find the binaries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia import driver as nvidia

import mxpert
from mxpert.core import launch
from mxpert.core.compilation import compile_together, whole_call
from mxpert.core.environment import MOST_THREADS, THREADS_VARIABLE, compile_threads
from mxpert.core.launch import Launch, record_launches
from mxpert.core.target import current_device, on_device
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.launches import H200, without_device

Compiled = list[tuple[str, bool]]
"""Of each compilation, the kernel's name and whether a thread of the pool made it."""


@triton.jit
def _fill_kernel(out, VALUE: tl.constexpr):
    tl.store(out + tl.arange(0, 16), tl.full([16], VALUE, tl.int32))


@triton.jit
def _add_kernel(out, VALUE: tl.constexpr):
    place = out + tl.arange(0, 16)
    tl.store(place, tl.load(place) + VALUE)


@triton.jit
def _broken_kernel(out, VALUE: tl.constexpr):
    tl.static_assert(VALUE < 0, "it never compiles")
    tl.store(out, VALUE)


def in_pool() -> bool:
    """Whether this thread compiles for others."""
    return threading.current_thread().name.startswith("mxpert-compile")


def in_pass_ahead() -> bool:
    """Whether launches only compile."""
    return current_device().compiles_only


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """Compilations of a process that knows no binary, with two threads on any machine."""
    found: Compiled = []

    def note(src: Any, **_: object) -> None:
        found.append((src.name, in_pool()))

    monkeypatch.setenv(THREADS_VARIABLE, "2")
    monkeypatch.setattr(launch, "_BINARIES", {})
    for kernel in (_fill_kernel, _add_kernel, _broken_kernel):
        kernel.device_caches.clear()
    with knobs.compilation.scope(), knobs.cache.scope():
        knobs.compilation.listener = note
        knobs.cache.dir = str(tmp_path)
        yield found


def launches(*kernels: Any) -> Callable[[], None]:
    """A call that launches these kernels."""
    made = [Launch(kernel, (1,), VALUE=7) for kernel in kernels]
    out = torch.zeros(16, dtype=torch.int32)

    def call() -> None:
        for each in made:
            each(out=out)

    return call


def run(call: Callable[[], object], times: int = 1) -> int:
    """Number of launches of an op's call, made so often."""
    with without_device() as launched:
        for _ in range(times):
            with whole_call(call):
                call()
    return len(launched)


def test_the_first_launch_without_a_binary_compiles_the_call(compiled: Compiled) -> None:
    call = launches(_fill_kernel, _add_kernel, _fill_kernel)
    assert run(call, times=2) == 6
    assert sorted(compiled) == [("_add_kernel", True), ("_fill_kernel", True)]


def test_what_launches_a_binary_is_built_in_threads_too(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders: list[bool] = []
    build = nvidia.CudaLauncher.__init__

    def note(self: Any, *arguments: Any) -> None:
        builders.append(in_pool())
        build(self, *arguments)

    monkeypatch.setattr(nvidia.CudaLauncher, "__init__", note)
    run(launches(_fill_kernel, _add_kernel))
    assert builders == [True, True, False, False]  # at the launch it comes from the cache


def test_a_launch_is_recorded_once(compiled: Compiled) -> None:
    with record_launches() as records:
        run(launches(_fill_kernel, _add_kernel))
    assert [each.launch.kernel for each in records] == [_fill_kernel, _add_kernel]
    assert all(each.binary for each in records)


def test_a_known_binary_is_not_compiled_again(compiled: Compiled) -> None:
    assert run(launches(_fill_kernel)) == 1
    assert run(launches(_fill_kernel, _add_kernel)) == 2
    assert sorted(compiled) == [("_add_kernel", True), ("_fill_kernel", True)]


def test_an_inner_call_belongs_to_the_outer(compiled: Compiled) -> None:
    first, last, runs = launches(_fill_kernel), launches(_add_kernel), []

    def inner() -> None:
        runs.append(in_pass_ahead())
        first()

    def outer() -> None:
        with whole_call(inner):
            inner()
        last()

    assert run(outer) == 2
    assert runs == [False, True]
    assert sorted(compiled) == [("_add_kernel", True), ("_fill_kernel", True)]


def test_one_thread_compiles_one_after_the_other(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "1")
    assert run(launches(_fill_kernel, _add_kernel)) == 2
    assert compiled == [("_fill_kernel", False), ("_add_kernel", False)]


def test_without_a_call_around_it_a_launch_compiles_alone(compiled: Compiled) -> None:
    with without_device() as launched:
        launches(_fill_kernel, _add_kernel)()
    assert len(launched) == 2
    assert compiled == [("_fill_kernel", False), ("_add_kernel", False)]


def test_a_call_that_fails_ahead_is_launched_all_the_same(compiled: Compiled) -> None:
    """The pass ahead needs the call's memory once more."""
    call, failures = launches(_fill_kernel, _add_kernel), [torch.OutOfMemoryError("no memory")]

    def launches_or_fails() -> None:
        if failures and in_pass_ahead():
            raise failures.pop()
        call()

    assert run(launches_or_fails) == 2
    assert not failures
    assert compiled == [("_fill_kernel", False), ("_add_kernel", False)]


def test_an_error_of_the_compiler_is_raised_by_the_launch(compiled: Compiled) -> None:
    with pytest.raises(triton.CompilationError, match="never compiles"):
        run(launches(_fill_kernel, _broken_kernel))
    assert compiled == [("_fill_kernel", True)]


def test_a_block_compiles_without_launching(compiled: Compiled) -> None:
    call = launches(_fill_kernel, _add_kernel)
    with without_device() as launched:
        with compile_together():
            call()
        assert sorted(compiled) == [("_add_kernel", True), ("_fill_kernel", True)]
        assert not launched
        call()
    assert len(launched) == 2
    assert len(compiled) == 2


def test_filters_of_warnings_are_as_before(compiled: Compiled) -> None:
    """Triton replaces them at each operation; threads restore each other's."""
    note = knobs.compilation.listener

    def leave_a_filter(**found: Any) -> None:
        warnings.simplefilter("error")
        note(**found)

    knobs.compilation.listener = leave_a_filter
    before = list(warnings.filters)
    run(launches(_fill_kernel, _add_kernel))
    assert warnings.filters == before
    assert len(compiled) == 2


FIRST_LAYER = """
import json, sys, threading, torch, mxpert
from triton import knobs
from benchmarks.moe.cells import MODELS
from benchmarks.moe.warm_up import unwritten_weights
from mxpert.core.target import on_device
from support.launches import H200, without_device

compiled = []
def note(src, **_):
    compiled.append((src.name, threading.current_thread().name.startswith("mxpert-compile")))
knobs.compilation.listener, knobs.cache.dir = note, sys.argv[1]
model, num_tokens = MODELS["gpt-oss-120b"], 11
x = torch.empty(num_tokens, model.H, dtype=torch.bfloat16)
topk_weights = torch.empty(num_tokens, model.k)
routing = topk_weights, torch.zeros(num_tokens, model.k, dtype=torch.int32)
with without_device() as launched, on_device(H200):
    mxpert.fused_moe(x, unwritten_weights(model), *routing, activation=mxpert.SwiGLU())
json.dump([len(launched), compiled], sys.stdout)
"""


def test_a_layer_compiles_its_kernels_ahead(tmp_path: Path) -> None:
    """Through the public function: no launch compiles, and no binary is compiled twice.

    In a process of its own, which knows no binary.
    """
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LAYER, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": path, THREADS_VARIABLE: "2"},
    )
    launched, compiled = json.loads(done.stdout)
    assert launched > len(compiled), compiled
    assert all(ahead for _, ahead in compiled), compiled
    counts = Counter(name for name, _ in compiled)
    assert counts["_moe_gemm_decode_kernel"] == 2, compiled  # one for each stage


@pytest.mark.parametrize("combine", ["reduce", "atomic"])
def test_a_layer_ahead_writes_nothing(combine: str) -> None:
    """`out` may be x, which the launches after it still read."""
    shape = MoEShape(hidden_size=64, intermediate_size=64, num_experts=4, top_k=2)
    inputs = random_moe_problem(shape, 13, device="cpu")
    before = inputs.x.clone()
    arguments = inputs.x, inputs.weights, inputs.topk_weights, inputs.topk_ids
    options: dict[str, Any] = dict(activation=inputs.activation, combine=combine, out=inputs.x)
    with without_device(), on_device(H200), mxpert.override(backend="triton"), compile_together():
        assert mxpert.fused_moe(*arguments, **options) is inputs.x
    assert torch.equal(inputs.x, before)


def test_a_gradient_ahead_is_not_added() -> None:
    grad, x = (mxpert.quantize_dual(torch.randn(64, 64).bfloat16())[1] for _ in range(2))
    sums = torch.randn(2, 64, 64)
    before, offsets = sums.clone(), torch.tensor([0, 32, 64], dtype=torch.int32)
    with without_device(), on_device(H200), compile_together():
        mxpert.grouped_wgrad(grad, x, offsets, accumulate_into=sums)
    assert torch.equal(sums, before)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²"])
def test_another_number_of_threads_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, text)
    with pytest.raises(ValueError, match="MXPERT_COMPILE_THREADS — need an integer from 1 on"):
        compile_threads()


def test_threads_follow_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    assert 1 <= compile_threads() <= MOST_THREADS
    monkeypatch.setenv(THREADS_VARIABLE, "12")
    assert compile_threads() == 12

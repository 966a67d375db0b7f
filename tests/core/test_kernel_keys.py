"""Keys in Triton's cache are the same whatever was hashed before: binaries are found again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from triton.runtime.jit import JITFunction

from mxpert.core.kernel_keys import hash_callees_first
from mxpert.core.launch import Launch
from mxpert.testing.ahead_of_time import specialize
from support.aot import TRITON_RELEASE

HELPERS = """
import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from mxpert.device.compat import aggregate

STEP, WIDTH, LIMIT = tl.constexpr(3), tl.constexpr(4), gl.constexpr(5)

@triton.jit
def further(x):
    return x + STEP

@triton.jit
def narrow(x):
    return further(x) % WIDTH

@aggregate
class Pair:
    first: gl.tensor

    @gluon.jit
    def bounded(self):
        return gl.minimum(self.first, LIMIT)
"""
KERNELS = """
import helpers
import triton
from helpers import Pair, narrow
from triton.experimental import gluon

@triton.jit
def by_name(pointer):
    narrow(0)

@triton.jit
def by_module(pointer):
    helpers.narrow(0)

@gluon.jit
def by_method(pointer):
    Pair(pointer).bounded()
"""
CALLERS = ("by_name", "by_module", "by_method")


def launch(kernel: JITFunction) -> None:
    Launch(kernel, (1,))


def compile_ahead(kernel: JITFunction) -> None:
    specialize(kernel, {"pointer": torch.empty(1, device="meta")}, "sm_90")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """Imports KERNELS and HELPERS once more: the same functions, none of them hashed yet."""
    for name, source in (("helpers", HELPERS), ("kernels", KERNELS)):
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def load_both() -> ModuleType:
        load("helpers")
        return load("kernels")

    return load_both


def key_after_helpers(module: ModuleType, caller: str) -> str:
    """The key of a kernel if all that it calls was hashed before, the innermost first."""
    for function in (module.helpers.further, module.narrow, module.Pair.bounded):
        _ = function.cache_key
    return str(getattr(module, caller).cache_key)


@pytest.mark.parametrize("use", [launch, compile_ahead, hash_callees_first])
@pytest.mark.parametrize("caller", CALLERS)
def test_a_kernel_has_the_key_of_one_that_is_hashed_last(
    caller: str, use: Callable[[JITFunction], object], fresh: Callable[[], ModuleType]
) -> None:
    kernel = getattr(fresh(), caller)
    use(kernel)
    assert kernel.cache_key == key_after_helpers(fresh(), caller)


@pytest.mark.skipif(TRITON_RELEASE >= (3, 8), reason="Triton hashes callees first")
@pytest.mark.parametrize("caller", CALLERS)
def test_without_it_keys_differ(caller: str, fresh: Callable[[], ModuleType]) -> None:
    """Control."""
    assert getattr(fresh(), caller).cache_key != key_after_helpers(fresh(), caller)


def test_recursion_ends(fresh: Callable[[], ModuleType]) -> None:
    module = fresh()
    narrow = module.helpers.narrow
    module.helpers.further.fn.__globals__["STEP"] = narrow  # calls its caller now
    hash_callees_first(narrow)
    assert narrow.cache_key


IN_ORDER = """
import importlib, json, pkgutil, sys
import mxpert
from mxpert.core.kernel_keys import hash_callees_first
from triton.runtime.jit import JITFunction

functions = {}
for info in pkgutil.walk_packages(mxpert.__path__, "mxpert."):
    if info.name.split(".")[1] in ("device", "distributed", "grouped", "moe", "quantize",
                                   "routing", "training"):
        for name, value in vars(importlib.import_module(info.name)).items():
            if isinstance(value, JITFunction) and value.__module__ == info.name:
                functions[f"{info.name}.{name}"] = value
for name in sorted(functions, reverse=sys.argv[1] == "backwards"):
    hash_callees_first(functions[name])
json.dump({name: functions[name].cache_key for name in functions}, sys.stdout)
"""


def test_keys_of_all_kernels_do_not_depend_on_the_order() -> None:
    """Nor on addresses in memory, by which Triton orders constants of the same name."""
    first, second = (
        json.loads(subprocess.check_output([sys.executable, "-c", IN_ORDER, order], text=True))
        for order in ("forwards", "backwards")
    )
    assert len(first) > 400
    assert {name for name in first if first[name] != second[name]} == set()

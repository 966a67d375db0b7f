"""Random calls of every public function inside of ambient state, bit for bit equal to plain calls.

A case draws a function, its arguments, and one to three states of torch (autocast, default dtype
and device, precision of float32 matmuls, deterministic algorithms, inference mode, modes that
observe ops, …), and runs forward and backward inside of them. The long run:
``python tests/fuzz/ambient.py --cases 20000``; one case again: ``--seed SEED --cases 1``.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from fuzz_target import Target
from fuzz_targets import TARGETS
from run import flat
from seeds import Report, each_seed, long_run, parser
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mxpert.formats import MXTensor


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _WatchFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _setting(get: Callable[[], Any], put: Callable[[Any], object], value: object) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def _deterministic(warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _default_dtype(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    return _setting(torch.get_default_dtype, torch.set_default_dtype, dtype)


def _precision(name: str) -> contextlib.AbstractContextManager[None]:
    return _setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, name)


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "default float64": lambda: _default_dtype(torch.float64),
    "default float16": lambda: _default_dtype(torch.float16),
    "default bfloat16": lambda: _default_dtype(torch.bfloat16),
    "default meta": lambda: torch.device("meta"),
    "default cpu": lambda: torch.device("cpu"),
    "matmul medium": lambda: _precision("medium"),
    "matmul high": lambda: _precision("high"),
    "deterministic": lambda: _deterministic(warn_only=False),
    "deterministic, warning": lambda: _deterministic(warn_only=True),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "dispatch mode": _Watch,
    "function mode": _WatchFunctions,
}
WITHOUT_GRADIENT = frozenset({"inference mode", "no grad"})
MAKES_TENSORS = frozenset({"MoE", "RoutingPlan", "MXGroupedLinear", "MXMoE"})
"""Targets that make tensors in their call, as their callers do, in the default dtype."""


def outcome(target: Target, arguments: dict[str, Any]) -> list[Any] | str:
    """The leaves of the answer, or the error."""
    try:
        return flat(target.call(**arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def bits(leaf: Any) -> Any:
    """What is compared: dtype, shape and bytes of a tensor, else the value."""
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, (str, int, float, bool, type(None))) else type(leaf)
    plain = leaf.detach().cpu().contiguous().resolve_neg()
    return leaf.dtype, tuple(leaf.shape), bytes(plain.view(-1).view(torch.uint8).tolist())


def differs(plain: list[Any] | str, inside: list[Any] | str, *, no_gradient: bool) -> str | None:
    """What is different; without a gradient, the results are compared alone."""
    if isinstance(plain, str) or isinstance(inside, str):
        return None if plain == inside else f"{plain!s:.200} — {inside!s:.200}"
    if len(plain) != len(inside) and not (no_gradient and len(inside) == 1):
        return f"{len(plain)} and {len(inside)} results"
    for number, (a, b) in enumerate(zip(plain, inside, strict=False)):
        if bits(a) != bits(b):
            return f"result {number}: {summary(a)} and {summary(b)}"
    return None


def summary(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)[:80]
    return f"{leaf.dtype} {list(leaf.shape)} {leaf.detach().reshape(-1)[:3].tolist()}"


def copied(value: Any) -> Any:
    """Arguments of one call: an answer may alias them, and backward sets their gradients."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, MXTensor):
        return value.to(value.device)
    return value


def one(targets: list[Target], seed: int, report: Report) -> None:
    """One case."""
    rng = random.Random(seed)
    target = rng.choice(targets)
    torch.manual_seed(seed)
    arguments = target.arguments(rng)
    names = [
        name for name in STATES if not (target.name in MAKES_TENSORS and name.startswith("default"))
    ]
    chosen = rng.sample(names, rng.randint(1, 3))
    if "inference mode" in chosen:  # torch itself cannot record what it makes there
        chosen = [name for name in chosen if name != "grad"]
    first_inside = rng.random() < 0.5
    found: dict[bool, list[Any] | str] = {}
    for inside in (first_inside, not first_inside):
        torch.manual_seed(seed)
        given = {name: copied(value) for name, value in arguments.items()}
        with contextlib.ExitStack() as stack:
            for name in chosen if inside else ():
                stack.enter_context(STATES[name]())
            found[inside] = outcome(target, given)
    problem = differs(
        found[False], found[True], no_gradient=not WITHOUT_GRADIENT.isdisjoint(chosen)
    )
    wrong = f"{target.name} in {chosen}: {problem}" if problem else None
    report.add(seed, chosen, counted=isinstance(found[False], str), wrong=wrong)


def run(cases: int, seed: int, targets: list[Target] = TARGETS) -> Report:
    """Cases of consecutive seeds; errors are counted."""
    return each_seed(lambda number, report: one(targets, number, report), cases, seed)


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    long_run(lambda: run(options.cases, options.seed), "ambient", "errors")

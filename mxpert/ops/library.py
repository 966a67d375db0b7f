"""The table of ops, and how a call of one runs: check → describe → resolve → launch.

Ops are registered with torch.library so that torch.compile, export and FakeTensor see them as
leaves. Eager calls skip torch's dispatcher, which costs as much host time as a launch.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

import torch

from ..dispatch import CallCache, launch, resolve_cached, without_grad
from ..dispatch.ambient import forward_mode, refuse_transforms
from ..formats.tensor import TENSOR_FIELDS, Aggregate
from ..problem import MoEOptions, Problem
from ..runtime.geometry import CachedCall, Described, describe
from .schema import FlatLayout, kind_of

_LIBRARY = torch.library.Library("mxpert", "FRAGMENT")
_T = TypeVar("_T")

OPS: dict[str, OpSpec[Any]] = {}
"""Every op, by name."""


class OpSpec(Generic[_T]):
    """One op: its checks, its problem, its fake implementation. Call it to run the op.

    All functions get the options by position and the inputs by keyword, as the call does. Options
    are numbers, names and dtypes; inputs are what the kernel's `launch` takes.

    Args:
        name: name of the op in torch.library.
        check: raises for arguments that do not fit. Its type hints are the op's schema: options
            first, then inputs.
        describe: the problem of arguments that passed `check`.
        fake: empty tensors (or a sequence of them) like those of the result.
        returns: the schema's result type.
        build: the result from its tensors and the arguments; None if the result is its tensors.
        mutates: the input that the op writes to, if it returns nothing else.
        is_public: whether `explain` knows the op.
    """

    def __init__(
        self,
        name: str,
        *,
        check: Callable[..., object],
        describe: Callable[..., Problem],
        fake: Callable[..., Any],
        returns: str = "Tensor",
        build: Callable[..., _T] | None = None,
        mutates: str | None = None,
        is_public: bool = True,
    ) -> None:
        self.name, self.returns, self.is_public = name, returns, is_public
        self._check, self._describe, self._fake, self._build = check, describe, fake, build
        hints = get_type_hints(check)
        del hints["return"]
        self._layout = FlatLayout((each, kind_of(hint)) for each, hint in hints.items())
        options = list(itertools.takewhile(_is_option, hints.values()))
        self._inputs = list(hints)[len(options) :]
        first = next(iter(hints.values()))
        self._calls = CallCache(_is_compared_by_identity(first))
        self._register(mutates)
        OPS[name] = self

    def __call__(self, *options: Any, **inputs: Any) -> _T:
        """Run the op: eagerly, or through torch's dispatcher where something observes ops."""
        geometry = describe(inputs.values()) if runs_eagerly() else None
        result: _T
        if geometry is None:
            result = self._through_torch(options, inputs)
        else:
            result = self._run(options, geometry, inputs)
        return result

    def _run(
        self, options: Sequence[Any], geometry: Described | None, inputs: dict[str, Any]
    ) -> Any:
        """Check → describe → resolve → launch; the first two once for each geometry."""
        call = self._checked(options, geometry, inputs)  # 1 check, 2 describe
        kernel, config = resolve_cached(call)  # 3 resolve
        return launch(kernel, config, call, geometry, inputs)  # 4 launch

    def _checked(
        self, options: Sequence[Any], geometry: Described | None, inputs: dict[str, Any]
    ) -> CachedCall:
        """The call with this geometry; its arguments are checked if there was none before."""
        call = self._calls.find(options, geometry)
        if call is None:
            call = self._calls.add(options, geometry, self.problem(*options, **inputs))
        return call

    def checked_call(self, *options: Any, **inputs: Any) -> CachedCall:
        """Check the arguments, and return their call without launching it."""
        return self._checked(options, describe(inputs.values()), inputs)

    def problem(self, *options: Any, **inputs: Any) -> Problem:
        """Check the arguments and describe their problem."""
        self._check(*options, **inputs)
        return self._describe(*options, **inputs)

    def problem_of(self, flat: tuple[Any, ...]) -> Problem:
        """`problem` for the arguments of the registered op."""
        options, inputs = self._rebuild(flat)
        return self.problem(*options, **inputs)

    def _through_torch(self, options: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        refuse_transforms(self.name, _tensors_in(inputs.values()))
        self._check(*options, **inputs)
        flat = self._layout.flatten([*options, *[inputs[name] for name in self._inputs]])
        result = self._leaf(*flat)
        return result if self._build is None else self._build(result, *options, **inputs)

    def _register(self, mutates: str | None) -> None:
        arguments = [
            f"{'Tensor(a!)' if name == mutates else schema} {name}"
            for name, schema in self._layout.types
        ]
        _LIBRARY.define(f"{self.name}({', '.join(arguments)}) -> {self.returns}")
        _LIBRARY.impl(self.name, without_grad(self._run_flat), "CompositeExplicitAutograd")
        _LIBRARY.impl(self.name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"mxpert::{self.name}", self._run_fake, lib=_LIBRARY)
        self._leaf = getattr(torch.ops.mxpert, self.name)

    def _rebuild(self, flat: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
        """Options and inputs from the flat arguments."""
        values = self._layout.rebuild(flat)
        inputs = {name: values.pop(name) for name in self._inputs}
        return list(values.values()), inputs

    def _run_flat(self, *flat: Any) -> Any:
        options, inputs = self._rebuild(flat)
        return self._flat(self._run(options, describe(inputs.values()), inputs))

    def _run_fake(self, *flat: Any) -> Any:
        options, inputs = self._rebuild(flat)
        return self._flat(self._fake(*options, **inputs))

    def _flat(self, result: Any) -> Any:
        """The result as the schema returns it."""
        if self.returns == "()":
            return None
        if self.returns == "Tensor":
            return result
        return (list if self.returns == "Tensor[]" else tuple)(_tensors(result))


def _is_option(hint: Any) -> bool:
    return not any("Tensor" in schema for _, schema in kind_of(hint).types)


def _is_compared_by_identity(hint: Any) -> bool:
    """Whether equal values of this type are one object, which is faster to compare than values."""
    return isinstance(hint, type) and (
        issubclass(hint, (enum.Enum, torch.dtype)) or hint is MoEOptions
    )


def _tensors_in(arguments: Iterable[Any]) -> Iterator[Any]:
    """The arguments, with aggregates of tensors field by field."""
    for value in arguments:
        names = TENSOR_FIELDS.get(type(value))
        if names is None:
            yield value
        else:
            yield from _tensors_in(getattr(value, name) for name in names)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, Aggregate):
        parts = [getattr(result, name) for name in TENSOR_FIELDS[type(result)]]
        return [part for part in parts if part is not None]
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in _tensors(part)]


def _observers() -> tuple[Callable[[], object], ...] | None:
    """Return torch's functions that tell whether something observes ops.

    Observers are modes (fake tensors, export, counters), functorch, tracing and the profiler. The
    result is None if this torch lacks such functions.
    """
    try:
        return (
            torch._C._len_torch_dispatch_stack,
            torch._C._len_torch_function_stack,
            torch._C._functorch.peek_interpreter_stack,
            torch._C._get_tracing_state,
            torch._C._autograd._profiler_enabled,
        )
    except AttributeError:
        return None


_OBSERVERS = _observers()


def runs_eagerly() -> bool:
    """Return whether calls may skip torch's dispatcher: eager ones that nothing observes."""
    if torch.compiler.is_compiling() or _OBSERVERS is None:
        return False
    dispatch_modes, function_modes, transforms, tracing, profiler = _OBSERVERS
    observed = dispatch_modes() or function_modes() or transforms() or tracing() or profiler()
    return not (observed or forward_mode())

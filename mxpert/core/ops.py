"""The table of ops, and how a call of one runs: check → describe → resolve → launch.

Ops are registered with torch.library so that torch.compile, export and FakeTensor see them as
leaves. Eager calls skip torch's dispatcher, which costs as much host time as a launch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

import torch
from torch.autograd import forward_ad

from ..formats.tensor import TENSOR_FIELDS, Aggregate
from .ambient import refuse_transforms
from .calls import CallCache, launch, without_grad
from .geometry import CachedCall, Described, describe
from .kernel import values_of
from .problem import MoEOptions, Problem
from .registry import resolve_cached
from .schema import FlatLayout, kind_of

_LIBRARY = torch.library.Library("mxpert", "FRAGMENT")
OptionsT = TypeVar("OptionsT")
InputsT = TypeVar("InputsT")
ResultT = TypeVar("ResultT")

OPS: dict[str, OpSpec[Any, Any, Any]] = {}  # Any: the options, inputs and results of all ops
"""Every op, by name."""


class OpSpec(Generic[OptionsT, InputsT, ResultT]):
    """One op: its checks, its problem, its fake implementation. Call it to run the op.

    All functions get the options and the inputs, as the call does. Options are numbers, names and
    dtypes: one value, or a NamedTuple of several. Inputs are what the kernel's `launch` takes, the
    dataclass in `inputs.py` beside the op.

    Args:
        name: name of the op in torch.library.
        check: raises for arguments that do not fit. Its type hints are the op's schema: the fields
            of the options first, then those of the inputs.
        describe: the problem of arguments that passed `check`.
        fake: empty tensors (or a sequence of them) like those of the result.
        absent: fields of the inputs that are no arguments of the op, and always None.
        returns: the schema's result type.
        build: the result from its tensors and the arguments; None if the result is its tensors.
        mutates: the input that the op writes to, if it returns nothing else.
        is_public: whether `explain` knows the op.
    """

    def __init__(
        self,
        name: str,
        *,
        check: Callable[[OptionsT, InputsT], object],
        describe: Callable[[OptionsT, InputsT], Problem],
        fake: Callable[[OptionsT, InputsT], torch.Tensor | Sequence[torch.Tensor]],
        absent: Sequence[str] = (),
        returns: str = "Tensor",
        build: Callable[[Sequence[torch.Tensor], OptionsT, InputsT], ResultT] | None = None,
        mutates: str | None = None,
        is_public: bool = True,
    ) -> None:
        self.name, self.returns, self.is_public = name, returns, is_public
        self._check, self._describe, self._fake, self._build = check, describe, fake, build
        (option, of_options), (_, of_inputs), *_ = get_type_hints(check).items()
        self._options, self._inputs = of_options, of_inputs
        options = {} if of_options is type(None) else {option: of_options}
        if _is_named_tuple(of_options):
            options = get_type_hints(of_options)
        self.values: Callable[[InputsT], tuple[object, ...]] = values_of(of_inputs)
        """Takes the inputs apart: the value of each field, in order."""
        inputs = get_type_hints(of_inputs)
        self._names = [name for name in inputs if name not in absent]
        kinds = [*options.items(), *[(name, inputs[name]) for name in self._names]]
        self._layout = FlatLayout((each, kind_of(hint)) for each, hint in kinds)
        self._calls = CallCache[OptionsT](_is_compared_by_identity(kinds[0][1]))
        self._register(mutates)
        OPS[name] = self

    def __call__(self, options: OptionsT, inputs: InputsT) -> ResultT:
        """Run the op: eagerly, or through torch's dispatcher where something observes ops."""
        if not runs_eagerly():
            return self._through_torch(options, inputs)
        values = self.values(inputs)
        known = self._calls.recall(options, values)
        if known is not None:  # 1 check, 2 describe
            return self._launch(*known, inputs)
        geometry = describe(values)
        if geometry is None:
            return self._through_torch(options, inputs)
        call = self._calls.find(options, geometry)
        if call is None:
            call = self._add(options, geometry, inputs)
        else:
            self._calls.learn(options, values, call)
        return self._launch(call, geometry[0], inputs)

    def _launch(
        self, call: CachedCall, tensors: list[torch.Tensor] | None, inputs: InputsT
    ) -> ResultT:
        """Resolve → launch, for arguments that are checked and described."""
        kernel, config = resolve_cached(call)  # 3 resolve
        result: ResultT = launch(kernel, config, call, tensors, inputs)  # 4 launch
        return result

    def _checked(
        self, options: OptionsT, geometry: Described | None, inputs: InputsT
    ) -> CachedCall:
        """The call with this geometry; its arguments are checked if there was none before."""
        return self._calls.find(options, geometry) or self._add(options, geometry, inputs)

    def _add(self, options: OptionsT, geometry: Described | None, inputs: InputsT) -> CachedCall:
        """Check and describe a call with a new geometry, and keep it."""
        return self._calls.add(options, geometry, self.problem(options, inputs))

    def checked_call(self, options: OptionsT, inputs: InputsT) -> CachedCall:
        """Check the arguments, and return their call without launching it."""
        return self._checked(options, describe(self.values(inputs)), inputs)

    def problem(self, options: OptionsT, inputs: InputsT) -> Problem:
        """Check the arguments and describe their problem."""
        self._check(options, inputs)
        return self._describe(options, inputs)

    def problem_of(self, flat: tuple[object, ...]) -> Problem:
        """`problem` for the arguments of the registered op."""
        return self.problem(*self._rebuild(flat))

    def _through_torch(self, options: OptionsT, inputs: InputsT) -> ResultT:
        tensors = [getattr(inputs, name) for name in self._names]  # dynamo traces no attrgetter
        refuse_transforms(self.name, _tensors_in(tensors))
        self._check(options, inputs)
        values = options if isinstance(options, tuple) else () if options is None else (options,)
        result = self._leaf(*self._layout.flatten([*values, *tensors]))
        made: ResultT = result if self._build is None else self._build(result, options, inputs)
        return made

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

    def _rebuild(self, flat: Sequence[object]) -> tuple[OptionsT, InputsT]:
        """Options and inputs from the flat arguments."""
        values = self._layout.rebuild(flat)
        inputs = self._inputs(**{name: values.pop(name) for name in self._names})
        if _is_named_tuple(self._options):
            return self._options(**values), inputs
        only: Any = next(iter(values.values()), None)  # of the hint that `check` gives
        return only, inputs

    def _run_flat(self, *flat: object) -> object:
        options, inputs = self._rebuild(flat)
        geometry = describe(self.values(inputs))
        call = self._checked(options, geometry, inputs)
        return self._flat(self._launch(call, geometry and geometry[0], inputs))

    def fake_of(self, flat: tuple[object, ...]) -> object:
        """Empty results of the registered op, for these arguments."""
        return self._flat(self._fake(*self._rebuild(flat)))

    def _run_fake(self, *flat: object) -> object:
        return self.fake_of(flat)

    def _flat(self, result: object) -> object:
        """The result as the schema returns it."""
        if self.returns == "()":
            return None
        if self.returns == "Tensor":
            return result
        return (list if self.returns == "Tensor[]" else tuple)(_tensors(result))


def _is_named_tuple(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple)


def _is_compared_by_identity(hint: object) -> bool:
    """Whether equal values of this type are one object, which is faster to compare than values."""
    return isinstance(hint, type) and (
        issubclass(hint, (enum.Enum, torch.dtype)) or hint is MoEOptions
    )


def _tensors_in(arguments: Iterable[object]) -> Iterator[object]:
    """The arguments, with aggregates of tensors field by field."""
    for value in arguments:
        names = TENSOR_FIELDS.get(type(value))
        if names is None:
            yield value
        else:
            yield from _tensors_in(getattr(value, name) for name in names)


def _tensors(result: object) -> list[torch.Tensor]:
    if isinstance(result, Aggregate):
        parts = [getattr(result, name) for name in TENSOR_FIELDS[type(result)]]
        return [part for part in parts if part is not None]
    if isinstance(result, torch.Tensor):
        return [result]
    assert isinstance(result, (tuple, list))  # for the type checker: what is left
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
_is_compiling = torch.compiler.is_compiling


def runs_eagerly() -> bool:
    """Return whether calls may skip torch's dispatcher: eager ones that nothing observes."""
    if _is_compiling() or _OBSERVERS is None:
        return False
    dispatch_modes, function_modes, transforms, tracing, profiler = _OBSERVERS
    observed = dispatch_modes() or function_modes() or transforms() or tracing() or profiler()
    return not (observed or forward_ad._current_level >= 0)

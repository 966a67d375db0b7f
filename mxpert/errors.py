"""Exception types, the message form that every op uses, and checks of common arguments.

A message reads ``op: argument — need X, got Y; remedy``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class UnsupportedError(RuntimeError):
    """Raised where a request makes sense, but no kernel on this machine can serve it.

    Example:
        >>> raise UnsupportedError(message("fused_moe", "backend", "a GPU", "none"))
        Traceback (most recent call last):
        mxpert.errors.UnsupportedError: fused_moe: backend — need a GPU, got none
    """


class PeerLostError(RuntimeError):
    """Raised where a rank of an expert-parallel group died or did not arrive in time.

    The `ExpertParallel` that raised it is lost too: each later call raises the same error. The
    process can go on: make a group of the ranks that are left, and an `ExpertParallel` on it.

    Args:
        text: the message.
        ranks: the lost ranks, counted in the object's group; empty where nothing names them.

    Example:
        >>> try:
        ...     raise PeerLostError(message("check", "rank 3", "an answer in 30 s", "none"), (3,))
        ... except PeerLostError as error:
        ...     print(error.ranks, error)
        (3,) check: rank 3 — need an answer in 30 s, got none
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class PerformanceWarning(RuntimeWarning):
    """A request runs on a slower kernel than this device has for similar requests.

    It is given once per reason and names the reason and the remedy. `mxpert.explain` shows the same
    for a single call.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", PerformanceWarning)  # make slow requests fail
    """


def message(op: str, argument: str, need: object, got: object, remedy: str = "") -> str:
    """Compose ``op: argument — need X, got Y; remedy``."""
    text = f"{op}: {argument} — need {need}, got {got}"
    return f"{text}; {remedy}" if remedy else text


def require(
    condition: bool,
    op: str,
    argument: str,
    *,
    need: object,
    got: object,
    remedy: str = "",
    error: type[Exception] = ValueError,
) -> None:
    """Raise `error` with the library's message form unless `condition` holds."""
    if not condition:
        raise error(message(op, argument, need, got, remedy))


def require_tensor(
    value: object,
    op: str,
    argument: str,
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    shape: Sequence[int | None] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
) -> None:
    """Check that `value` is a dense tensor of this dtype, shape (None: any size) and device."""
    if not torch.compiler.is_compiling() and _fits(value, dtype, shape, device, contiguous):
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(message(op, argument, "a torch.Tensor", type(value).__name__))
    # Traced tensors are dense, and tracing a backward refuses to read `layout`.
    if not torch.compiler.is_compiling() and (value.layout is not torch.strided or value.is_nested):
        got = "a nested tensor" if value.is_nested else str(value.layout)
        remedy = "make it dense with .to_dense() or .to_padded_tensor(0.0)"
        raise TypeError(message(op, f"{argument}.layout", torch.strided, got, remedy))
    if dtype is not None:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if value.dtype not in allowed:
            names = [str(each).removeprefix("torch.") for each in allowed]
            got = str(value.dtype).removeprefix("torch.")
            remedy = f"convert with .to(torch.{names[0]})"
            raise TypeError(message(op, f"{argument}.dtype", " or ".join(names), got, remedy))
    if shape is not None:
        fits = value.dim() == len(shape) and all(
            want is None or have == want for have, want in zip(value.shape, shape, strict=True)
        )
        if not fits:  # composed on failure alone: under torch.compile sizes are symbols
            wanted = "[" + ", ".join("*" if want is None else str(want) for want in shape) + "]"
            raise ValueError(message(op, f"{argument}.shape", wanted, list(value.shape)))
    if device is not None:
        require(
            value.device == device,
            op,
            f"{argument}.device",
            need=device,
            got=value.device,
            remedy=f"move it with .to('{device}')",
        )
    if contiguous:
        require(
            value.is_contiguous(),
            op,
            f"{argument}",
            need="a contiguous tensor",
            got=f"strides {value.stride()}",
            remedy="call .contiguous()",
        )


MAX_FLOAT32 = torch.finfo(torch.float32).max

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types of plain tensors; a subclass may give its data another meaning."""


def _fits(
    value: object,
    dtype: torch.dtype | Sequence[torch.dtype] | None,
    shape: Sequence[int | None] | None,
    device: torch.device | None,
    contiguous: bool,
) -> bool:
    """Return whether a plain tensor passes `require_tensor`; the fast path of that check."""
    if (
        not isinstance(value, torch.Tensor)
        or type(value) not in PLAIN_TENSORS
        or value.layout is not torch.strided
        or value.is_nested
        or (device is not None and value.device != device)
        or (contiguous and not value.is_contiguous())
    ):
        return False
    if (
        dtype is not None
        and value.dtype is not dtype
        and (isinstance(dtype, torch.dtype) or value.dtype not in dtype)
    ):
        return False
    if shape is None or value.shape == shape:
        return True
    if len(value.shape) != len(shape):
        return False
    for have, want in zip(value.shape, shape, strict=True):
        if want is not None and have != want:
            return False
    return True


def require_dtype(
    value: object, allowed: Sequence[torch.dtype], op: str, argument: str = "dtype"
) -> None:
    """Check that `value` is one of the dtypes `allowed`.

    Raises:
        TypeError: another dtype, or no dtype at all.
    """
    if not (isinstance(value, torch.dtype) and value in allowed):
        names = [str(dtype).removeprefix("torch.") for dtype in allowed]
        raise TypeError(
            message(
                op,
                argument,
                " or ".join(filter(None, (", ".join(names[:-1]), names[-1]))),
                repr(value),
            )
        )


def require_number(value: object, op: str, argument: str) -> None:
    """Check that `value` is an int or a float that float32 holds as a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(message(op, argument, "a number", repr(value)))
    require(abs(value) <= MAX_FLOAT32, op, argument, need="a finite float32 number", got=value)


def require_int(value: object, op: str, argument: str, *, least: int = 0) -> None:
    """Check that `value` is an int (under torch.compile a symbol) of at least `least`."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(message(op, argument, "an int", repr(value)))
    if value < least:
        raise ValueError(message(op, argument, f"at least {least}", value))


class Checks:
    """Checks of one op's arguments; their errors start with its name.

    Args:
        op: the function that reports an error.

    Example:
        >>> need = Checks("quantize")
        >>> need(3 % 32 == 0, "x.shape[-1]", "a multiple of 32", 3, "pad with zeros")
        Traceback (most recent call last):
        ValueError: quantize: x.shape[-1] — need a multiple of 32, got 3; pad with zeros
    """

    def __init__(self, op: str) -> None:
        self.op = op

    def __call__(
        self, holds: bool, argument: str, wanted: object, got: object, remedy: str = ""
    ) -> None:
        """`require` of this op."""
        if not holds:
            raise self.value_error(argument, wanted, got, remedy)

    def value_error(
        self, argument: str, wanted: object, got: object, remedy: str = ""
    ) -> ValueError:
        """The error to raise where a text holds sizes: they may be symbols before it fails."""
        return ValueError(message(self.op, argument, wanted, got, remedy))

    def type_error(self, argument: str, wanted: object, got: object, remedy: str = "") -> TypeError:
        """The error of an argument of a wrong type."""
        return TypeError(message(self.op, argument, wanted, got, remedy))

    def tensor(
        self,
        value: object,
        argument: str,
        *,
        dtype: torch.dtype | Sequence[torch.dtype] | None = None,
        shape: Sequence[int | None] | None = None,
        device: torch.device | None = None,
        contiguous: bool = False,
    ) -> None:
        """`require_tensor` of this op."""
        require_tensor(
            value, self.op, argument, dtype=dtype, shape=shape, device=device, contiguous=contiguous
        )

    def dtype(self, value: object, allowed: Sequence[torch.dtype], argument: str = "dtype") -> None:
        """`require_dtype` of this op."""
        require_dtype(value, allowed, self.op, argument)

    def number(self, value: object, argument: str) -> None:
        """`require_number` of this op."""
        require_number(value, self.op, argument)


def require_device(device: object, op: str, argument: str = "device") -> torch.device:
    """Return the torch.device that `device` names; it must exist. "meta" always does.

    Args:
        device: a name, an index or a torch.device.
        op: the function that reports an error.
        argument: the name that the error gives to `device`.

    Raises:
        ValueError: no device of that name, or none that this machine and this torch can use.

    Example:
        >>> require_device("cpu", "prepare")
        device(type='cpu')
    """
    try:
        named = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise ValueError(
            message(op, argument, "a device", repr(device), "for example 'cuda' or 'cpu'")
        ) from None
    if named.type == "cuda":
        count = torch.cuda.device_count()
        require(
            (named.index or 0) < count,
            op,
            argument,
            need="a GPU of this machine",
            got=f"'{named}' and {count} GPUs",
            remedy="run mxpert doctor to see what is here",
        )
    elif named.type not in ("cpu", "meta"):
        try:
            torch.empty(0, device=named)
        except (RuntimeError, AssertionError, ImportError, NotImplementedError):
            raise ValueError(
                message(
                    op,
                    argument,
                    "a device that this torch can use",
                    f"'{named}'",
                    "for example 'cuda' or 'cpu'",
                )
            ) from None
    result: torch.device = named
    return result

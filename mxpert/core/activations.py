"""The activations of MoE layers: what joins gate and up, or squares an up projection alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import UnsupportedError, message, require, require_number


@dataclass(frozen=True)
class SiLU:
    """``silu(gate) * up``, computed in float32 from the outputs of stage 1 after the bias.

    Source:
        GLU variants improve transformer (arXiv 2002.05202), there SwiGLU.

    Example:
        >>> SiLU().parameters
        (0.0, 0.0)
    """

    name = "silu"
    is_gated = True

    @property
    def parameters(self) -> tuple[float, float]:
        """The two numbers that kernels take; 0 where there is none."""
        return 0.0, 0.0


@dataclass(frozen=True)
class SwiGLU:
    """gpt-oss: ``g * sigmoid(alpha g) * (u + beta)``, g = min(gate, limit), u = clamp(up, ±limit).

    Args:
        alpha: factor inside the sigmoid.
        limit: bound of gate and up; None and infinity mean none.
        beta: what is added to up.

    Raises:
        TypeError: a parameter that is no number.
        ValueError: `alpha` or `beta` is not finite, or `limit` is not above zero.

    Source:
        gpt-oss (arXiv 2508.10925), where beta is 1.

    Example:
        >>> SwiGLU(limit=None, beta=0.0)  # clamps nothing, adds nothing
        SwiGLU(alpha=1.702, limit=inf, beta=0.0)
    """

    alpha: float = 1.702
    limit: float = 7.0
    beta: float = 1.0
    name = "swiglu"
    is_gated = True

    if TYPE_CHECKING:  # the fields as callers may pass them

        def __init__(
            self, alpha: float = ..., limit: float | None = ..., beta: float = ...
        ) -> None: ...

    def __post_init__(self) -> None:
        if self.limit is None:
            object.__setattr__(self, "limit", math.inf)
        _require_number("SwiGLU", "alpha", self.alpha)
        _require_number("SwiGLU", "limit", self.limit, limit=True)
        _require_number("SwiGLU", "beta", self.beta)

    @property
    def parameters(self) -> tuple[float, ...]:
        """The numbers that kernels take; the third is there where beta is not 1."""
        return (self.alpha, self.limit, *([] if self.beta == 1 else [self.beta]))


@dataclass(frozen=True)
class ClampedSiLU:
    """DeepSeek-V4: ``silu(min(gate, limit)) * clamp(up, ±limit)``.

    Args:
        limit: bound of gate and up; infinity means none.

    Raises:
        TypeError: `limit` is no number.
        ValueError: `limit` is not above zero.

    Source:
        DeepSeek-V4's experts.

    Example:
        >>> ClampedSiLU().limit
        10.0
    """

    limit: float = 10.0
    name = "clamped_silu"
    is_gated = True

    def __post_init__(self) -> None:
        _require_number("ClampedSiLU", "limit", self.limit, limit=True)

    @property
    def parameters(self) -> tuple[float, float]:
        """The two numbers that kernels take; 0 where there is none."""
        return self.limit, 0.0


@dataclass(frozen=True)
class SiTUv2:
    """``beta tanh(gate / beta) sigmoid(gate) * beta_up tanh(up / beta_up)``.

    Args:
        beta: bound of gate.
        beta_up: bound of up.

    Raises:
        TypeError: a parameter that is no number.
        ValueError: a parameter that is not finite or not above zero.

    Source:
        The two-stage MoE kernels of FlyDSL (pull request 753).

    Example:
        >>> SiTUv2(beta=2.0).parameters
        (2.0, 25.0)
    """

    beta: float = 4.0
    beta_up: float = 25.0
    name = "situ_v2"
    is_gated = True

    def __post_init__(self) -> None:
        for name, value in (("beta", self.beta), ("beta_up", self.beta_up)):
            _require_number("SiTUv2", name, value)
            require(value > 0, "SiTUv2", name, need="a number above zero", got=value)

    @property
    def parameters(self) -> tuple[float, float]:
        """The two numbers that kernels take; 0 where there is none."""
        return self.beta, self.beta_up


@dataclass(frozen=True)
class GELU:
    """``gelu(gate) * up`` (GeGLU): ``gelu(x) = x (1 + erf(x / √2)) / 2``, or its tanh form.

    Args:
        approximate: "none" for erf; "tanh" for ``x (1 + tanh(√(2 / π) (x + 0.044715 x³))) / 2``.

    Raises:
        TypeError, ValueError: another value.

    Source:
        Gaussian error linear units (arXiv 1606.08415); torch.nn.GELU, whose names these are.
        Gemma's experts have the tanh form.

    Example:
        >>> GELU("tanh").name
        'gelu_tanh'
    """

    approximate: Literal["none", "tanh"] = "none"
    is_gated = True

    def __post_init__(self) -> None:
        value = self.approximate
        need, got = "'none' or 'tanh'", repr(value)
        error = ValueError if isinstance(value, str) else TypeError
        known = isinstance(value, str) and value in ("none", "tanh")
        require(known, "GELU", "approximate", need=need, got=got, error=error)

    @property
    def name(self) -> str:
        """What kernels call it: "gelu" or "gelu_tanh"."""
        return "gelu" if self.approximate == "none" else "gelu_tanh"

    @property
    def parameters(self) -> tuple[float, float]:
        """The two numbers that kernels take; 0 where there is none."""
        return 0.0, 0.0


@dataclass(frozen=True)
class ReLU2:
    """``relu(up)²``, of experts without a gate: stage 1 has F rows of weights, not 2F.

    Source:
        Primer (arXiv 2109.08668); the experts of Nemotron-H.

    Example:
        >>> ReLU2().is_gated
        False
    """

    name = "relu2"
    is_gated = False

    @property
    def parameters(self) -> tuple[float, float]:
        """The two numbers that kernels take; 0 where there is none."""
        return 0.0, 0.0


def _require_number(op: str, name: str, value: object, *, limit: bool = False) -> None:
    """`value` is a float32 number or, for a limit, above zero; an infinite limit clamps nothing."""
    if limit and isinstance(value, float) and value == math.inf:
        return
    require_number(value, op, name)
    require(
        not limit or value > 0,  # type: ignore[operator]
        op,
        name,
        need="a number above zero",
        got=value,
    )


Activation = SiLU | SwiGLU | ClampedSiLU | SiTUv2 | GELU | ReLU2
_KINDS = (SiLU, SwiGLU, ClampedSiLU, SiTUv2, GELU, ReLU2)

ACTIVATIONS: dict[str, type[SiLU | SwiGLU | ClampedSiLU | SiTUv2]] = {
    a.name: a for a in (SiLU, SwiGLU, ClampedSiLU, SiTUv2)
}
"""Gated activations by their one name. GELU has a name for each form, and ReLU2 no gate."""

ActivationLike = (
    Activation
    | Literal[
        "silu",
        "swiglu",
        "swigluoai",
        "clamped_silu",
        "situ_v2",
        "gelu",
        "gelu_tanh",
        "gelu_pytorch_tanh",
        "relu2",
    ]
)
"""An activation, or the name of one with its default parameters."""

NAMED_ACTIVATIONS: dict[str, Activation] = {
    "silu": SiLU(),
    "swiglu": SwiGLU(),
    "swigluoai": SwiGLU(),
    "clamped_silu": ClampedSiLU(),
    "situ_v2": SiTUv2(),
    "gelu": GELU(),
    "gelu_tanh": GELU("tanh"),
    "gelu_pytorch_tanh": GELU("tanh"),
    "relu2": ReLU2(),
}
"""What each name stands for; "swigluoai" is vLLM's name of gpt-oss's, "gelu_pytorch_tanh" and
"relu2" are Transformers'."""


def parse_activation(value: object, op: str) -> Activation:
    """Return the activation that `value` is or names.

    Args:
        value: an activation; or "silu" for ``silu(gate) * up``, "swiglu" or "swigluoai" for
            gpt-oss's SwiGLU(alpha=1.702, limit=7.0), "clamped_silu" for ClampedSiLU(limit=10.0),
            "situ_v2" for SiTUv2(beta=4.0, beta_up=25.0), "gelu" for GELU(), "gelu_tanh" or
            "gelu_pytorch_tanh" for GELU("tanh"), "relu2" for ReLU2().
        op: the function that reports a wrong one.

    Raises:
        ValueError: an unknown name. TypeError: anything else, a class included.

    Example:
        >>> parse_activation("swigluoai", "fused_moe")
        SwiGLU(alpha=1.702, limit=7.0, beta=1.0)
    """
    if isinstance(value, _KINDS):
        return value
    found = NAMED_ACTIVATIONS.get(value) if isinstance(value, str) else None
    if found is not None:
        return found
    remedy = ""
    if isinstance(value, type) and value in _KINDS:
        remedy = f"pass mxpert.{value.__name__}()"
    calls = ", ".join(f"{kind.__name__}()" for kind in _KINDS)
    names = ", ".join(map(repr, NAMED_ACTIVATIONS))
    error = ValueError if isinstance(value, str) else TypeError
    need = f"an activation object: {calls}; or one of the names {names}"
    raise error(message(op, "activation", need, repr(value), remedy))


def parse_gated_activation(value: object, op: str) -> Activation:
    """As `parse_activation`, for layers that have gate rows.

    Raises:
        UnsupportedError: an activation without a gate.
    """
    activation = parse_activation(value, op)
    need, remedy = "one that joins gate and up", "mxpert.convert(model, recipe=…) trains ReLU2"
    if not activation.is_gated:
        raise UnsupportedError(message(op, "activation", need, activation, remedy))
    return activation


def activation_from(name: str, parameters: Iterable[float]) -> Activation:
    """Rebuild an activation from its name and its parameters."""
    numbers = tuple(parameters)
    match name:
        case "silu":
            return SiLU()
        case "swiglu":
            return SwiGLU(*numbers)
        case "clamped_silu":
            return ClampedSiLU(numbers[0])
        case "situ_v2":
            return SiTUv2(*numbers)
        case "gelu" | "gelu_tanh":
            return GELU("none" if name == "gelu" else "tanh")
        case "relu2":
            return ReLU2()
    names = sorted({activation.name for activation in NAMED_ACTIVATIONS.values()})
    raise ValueError(message("activation_from", "name", f"one of {names}", repr(name)))


def kernel_parameters(activation: Activation) -> dict[str, float | None]:
    """The arguments p0, p1 and p2 of kernels; p2 is None, and no argument, where there is none."""
    p0, p1, *rest = map(float, activation.parameters)
    return {"p0": p0, "p1": p1, "p2": rest[0] if rest else None}

"""The gated activations of MoE layers: what joins gate and up, with its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from ..errors import message, require, require_number


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

    @property
    def parameters(self) -> tuple[float, float]:
        """The two numbers that kernels take; 0 where there is none."""
        return 0.0, 0.0


@dataclass(frozen=True)
class SwiGLU:
    """gpt-oss: ``g * sigmoid(alpha g) * (u + 1)``, g = min(gate, limit), u = clamp(up, ±limit).

    Args:
        alpha: factor inside the sigmoid.
        limit: bound of gate and up; infinity means none.

    Raises:
        TypeError: a parameter that is no number.
        ValueError: `alpha` is not finite, or `limit` is not above zero.

    Source:
        gpt-oss (arXiv 2508.10925).

    Example:
        >>> SwiGLU(limit=float("inf"))  # clamps nothing
        SwiGLU(alpha=1.702, limit=inf)
    """

    alpha: float = 1.702
    limit: float = 7.0
    name = "swiglu"

    def __post_init__(self) -> None:
        _require_number("SwiGLU", "alpha", self.alpha)
        _require_number("SwiGLU", "limit", self.limit, limit=True)

    @property
    def parameters(self) -> tuple[float, float]:
        """The two numbers that kernels take; 0 where there is none."""
        return self.alpha, self.limit


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

    def __post_init__(self) -> None:
        for name, value in (("beta", self.beta), ("beta_up", self.beta_up)):
            _require_number("SiTUv2", name, value)
            require(value > 0, "SiTUv2", name, need="a number above zero", got=value)

    @property
    def parameters(self) -> tuple[float, float]:
        """The two numbers that kernels take; 0 where there is none."""
        return self.beta, self.beta_up


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


Activation = SiLU | SwiGLU | ClampedSiLU | SiTUv2
ACTIVATIONS: dict[str, type] = {a.name: a for a in (SiLU, SwiGLU, ClampedSiLU, SiTUv2)}

ActivationLike = Activation | Literal["silu", "swiglu", "swigluoai", "clamped_silu", "situ_v2"]
"""An activation, or the name of one with its default parameters."""

NAMED_ACTIVATIONS: dict[str, Activation] = {
    "silu": SiLU(),
    "swiglu": SwiGLU(),
    "swigluoai": SwiGLU(),
    "clamped_silu": ClampedSiLU(),
    "situ_v2": SiTUv2(),
}
"""What each name stands for; "swigluoai" is vLLM's name of gpt-oss's."""


def parse_activation(value: object, op: str) -> Activation:
    """Return the activation that `value` is or names.

    Args:
        value: an activation; or "silu" for ``silu(gate) * up``, "swiglu" or "swigluoai" for
            gpt-oss's SwiGLU(alpha=1.702, limit=7.0), "clamped_silu" for ClampedSiLU(limit=10.0),
            "situ_v2" for SiTUv2(beta=4.0, beta_up=25.0).
        op: the function that reports a wrong one.

    Raises:
        ValueError: an unknown name. TypeError: anything else, a class included.

    Example:
        >>> parse_activation("swigluoai", "fused_moe")
        SwiGLU(alpha=1.702, limit=7.0)
    """
    if isinstance(value, tuple(ACTIVATIONS.values())):
        return cast("Activation", value)
    found = NAMED_ACTIVATIONS.get(value) if isinstance(value, str) else None
    if found is not None:
        return found
    remedy = ""
    if isinstance(value, type) and value in ACTIVATIONS.values():
        remedy = f"pass mxpert.{value.__name__}()"
    calls = ", ".join(f"{kind.__name__}()" for kind in ACTIVATIONS.values())
    names = ", ".join(map(repr, NAMED_ACTIVATIONS))
    error = ValueError if isinstance(value, str) else TypeError
    need = f"an activation object: {calls}; or one of the names {names}"
    raise error(message(op, "activation", need, repr(value), remedy))


def activation_from(name: str, parameters: Iterable[float]) -> Activation:
    """Rebuild an activation from its name and its two parameters."""
    first, second = parameters
    match name:
        case "silu":
            return SiLU()
        case "swiglu":
            return SwiGLU(first, second)
        case "clamped_silu":
            return ClampedSiLU(first)
        case "situ_v2":
            return SiTUv2(first, second)
    raise ValueError(
        message("activation_from", "name", f"one of {sorted(ACTIVATIONS)}", repr(name))
    )

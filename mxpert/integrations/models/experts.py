"""Find, describe and check the experts modules of a model in memory.

Transformers (5 and later) stacks the experts of a layer in one module, decorated with
``use_experts_implementation``: parameters ``gate_up_proj`` and ``down_proj``, flags for their
layout, and a method ``_apply_gate``. Llama 4 has such parameters without flags or method, and a
block of its own around them. The activation is recognised by calling that method on sample values
(``act_fn`` where there is no gate), not by its name. This module does not import transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ...core.problem import GELU, Activation, ClampedSiLU, ReLU2, SiLU, SwiGLU
from ...errors import Checks, UnsupportedError, message, require
from ...formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE
from ...moe.published_tensors import published_projections
from ...moe.weights import GateUpOrder, gate_up_rows
from ...training.activation import gated_activation

_FLAGS = ("is_transposed", "has_bias", "_apply_gate")
_LLAMA4 = "transformers.models.llama4.modeling_llama4"
_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
_SAMPLE_FEATURES = 64
_SAMPLE_TOLERANCE = 1e-5
"""Rounding of float32 values up to a few tens; a wrong gate differs by whole units."""


@dataclass(frozen=True)
class FoundExperts:
    """One experts module of a model and what its conversion needs to know.

    Args:
        name: full module path, ``model.layers.3.mlp.experts``; the first one of a shared module.
        places: every (parent, attribute) with ``getattr(parent, attribute) is module``. A module
            that several layers share has several.
        module: the experts module itself.
        num_experts, hidden_size, intermediate_size: E, H, F.
        activation: what stands between the two GEMMs.
        order: order of gate and up rows; None where the experts have no gate.
        transposed: projections are [E, K, N] instead of [E, N, K].
        has_bias: whether there are ``gate_up_proj_bias`` [E, 2F] and ``down_proj_bias`` [E, H].
        weight_on_input: whether the router weights multiply the experts' input (Llama 4).

    Experts without a gate have ``up_proj`` [E, F, H] and ``up_proj_bias`` [E, F] instead.
    """

    name: str
    places: tuple[tuple[torch.nn.Module, str], ...]
    module: torch.nn.Module
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    order: GateUpOrder | None
    transposed: bool
    has_bias: bool
    weight_on_input: bool = False

    def routed(
        self, arguments: tuple[torch.Tensor, ...], result: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """A call of the module and its result, as ``experts(x, topk_ids, topk_weights)`` has it."""
        llama4 = _llama4_of(self.module)
        if llama4 is None:
            return arguments, result
        call: tuple[tuple[torch.Tensor, ...], torch.Tensor] = llama4.routed_call(
            arguments[0], result, self.num_experts
        )
        return call

    @property
    def projections(self) -> tuple[str, str]:
        """Names of the module's two weights."""
        return published_projections(self.order is not None)

    @property
    def current(self) -> torch.nn.Module:
        """The module that stands in the first of the places now."""
        parent, attribute = self.places[0]
        module: torch.nn.Module = getattr(parent, attribute)
        return module

    def replace_by(self, module: torch.nn.Module) -> None:
        """Put `module` in all of the places; Llama 4's blocks call it as they call this module."""
        llama4 = _llama4_of(self.module)
        for parent, attribute in self.places:
            setattr(parent, attribute, module)
            if llama4 is not None:
                llama4.route(parent, routed=module is not self.module)


def find_experts(model: torch.nn.Module, op: str) -> list[FoundExperts]:
    """Find and check every experts module of a model without changing it.

    Args:
        model: a model of transformers 5 or later (or modules with the same attributes); weights
            may be on the meta device.
        op: name of the operation that error messages start with.

    Returns:
        FoundExperts in the model's order.

    Raises:
        ValueError: no experts, or sizes that are no multiples of 32.
        UnsupportedError: experts with an activation or tensors of their own.
    """
    found = [
        _describe(name, tuple(places), places[0][0]._modules[places[0][1]], op)
        for name, places in _experts_places(model).items()
    ]
    require(
        bool(found),
        op,
        type(model).__name__,
        got="none",
        need="experts modules of transformers >= 5 (stacked gate_up_proj and down_proj)",
        remedy="mxpert converts the experts of MoE models; this one is dense, converted "
        "already, or has experts of another form",
    )
    return found


def check_loaded(found: list[FoundExperts], op: str) -> None:
    """Check that every weight is loaded, of a float dtype, and finite.

    Raises:
        ValueError: a weight on the meta device, or NaN or infinity. TypeError: a wrong dtype.
    """
    for experts in found:
        for name, parameter in experts.current.named_parameters():
            where = f"{experts.name}.{name}"
            require(
                not parameter.is_meta,
                op,
                where,
                need="loaded weights",
                got="a meta tensor",
                remedy="load the model first, without offloading",
            )
            require(
                parameter.dtype in FLOAT_DTYPES,
                op,
                f"{where}.dtype",
                error=TypeError,
                need="bfloat16, float16 or float32",
                got=parameter.dtype,
                remedy="dequantise the model to bfloat16 first",
            )
            require_finite(op, where, parameter.detach())


def require_finite(op: str, where: str, weights: torch.Tensor) -> None:
    """Raise ValueError for NaN or infinity in `weights` [N, …], which are looked at row by row."""
    require(
        all(bool(part.isfinite().all()) for part in weights),
        op,
        where,
        need="finite weights",
        got="NaN or infinity",
        remedy="repair the model; a NaN would blank its whole block",
    )


def unconverted_modules(model: torch.nn.Module) -> list[str]:
    """Modules that have parameters of their own, numbers in their paths as ``*``.

    Example:
        >>> unconverted_modules(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        ['*']
    """
    names = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    return sorted({starred(name) for name in names})


def starred(path: str) -> str:
    """A module path with its numbers as ``*``.

    Example:
        >>> starred("model.layers.3.mlp.experts")
        'model.layers.*.mlp.experts'
    """
    return re.sub(r"(?:(?<=\.)|^)\d+(?=\.|$)", "*", path)


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module declares itself as stacked experts, or is Llama 4's."""
    return all(hasattr(module, flag) for flag in _FLAGS) or _llama4_of(module) is not None


def _llama4_of(module: torch.nn.Module) -> ModuleType | None:
    """The module `llama4` if `module` is the experts of that model, else None."""
    if type(module).__module__ != _LLAMA4:
        return None
    from . import llama4

    return llama4 if llama4.is_experts(module) else None


def stays_dense(module: torch.nn.Module) -> bool:
    """Whether the checkpoint or the caller of ``from_pretrained`` left these experts dense."""
    return getattr(module, "dense_implementation", None) is not None


def _experts_places(model: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, str]]]:
    """The (parent, attribute) pairs of each experts module, by the path of the first pair."""
    names: dict[torch.nn.Module, str] = {}
    places: dict[str, list[tuple[torch.nn.Module, str]]] = {}
    for path, parent in model.named_modules():
        for attribute, module in parent._modules.items():
            if module is not None and is_experts(module):
                name = names.setdefault(module, f"{path}.{attribute}".removeprefix("."))
                places.setdefault(name, []).append((parent, attribute))
    return places


def _describe(
    name: str,
    places: tuple[tuple[torch.nn.Module, str], ...],
    module: Any,  # experts modules of Transformers have no common class
    op: str,
) -> FoundExperts:
    has_gate = bool(getattr(module, "has_gate", True))
    first, second = published_projections(has_gate)
    _check_tensors(name, module, (first, second), op)
    need = Checks(op)
    gate_up, down = getattr(module, first), module.down_proj
    llama4 = _llama4_of(module)
    if llama4 is not None:
        llama4.check_blocks(name, [parent for parent, _ in places], op)
    transposed = llama4 is not None or bool(module.is_transposed)
    has_bias = llama4 is None and bool(module.has_bias)
    experts, hidden, intermediate = down.shape
    if transposed:
        hidden, intermediate = intermediate, hidden
    wide = intermediate * (2 if has_gate else 1)
    shape = [experts, hidden, wide] if transposed else [experts, wide, hidden]
    have, remedy = list(gate_up.shape), f"down_proj is {list(down.shape)}"
    need(have == shape, f"{name}.{first}.shape", shape, have, remedy)
    for what, size in (("hidden size", hidden), ("intermediate size", intermediate)):
        wanted = f"a {what} that is a multiple of {MX_BLOCK_SIZE}"
        remedy = "MXFP4 has no partial blocks; pad the model first"
        need(size % MX_BLOCK_SIZE == 0, name, wanted, size, remedy)
    if has_bias:
        for projection, rows in ((first, wide), (second, hidden)):
            have, shape = list(getattr(module, f"{projection}_bias").shape), [experts, rows]
            need(have == shape, f"{name}.{projection}_bias.shape", shape, have)
    order: GateUpOrder | None = None
    if has_gate:
        activation, order = recognise_gate(module, name, op)
    else:
        activation = _recognise_without_gate(module, name, op)
    return FoundExperts(
        name,
        places,
        module,
        experts,
        hidden,
        intermediate,
        activation,
        order,
        transposed,
        has_bias,
        llama4 is not None,
    )


def _check_tensors(
    name: str, module: torch.nn.Module, projections: tuple[str, str], op: str
) -> None:
    wanted = set(projections)
    if getattr(module, "has_bias", False):
        wanted |= {f"{projection}_bias" for projection in projections}
    present = {key for key, _ in module.named_parameters()}
    present |= {key for key, _ in module.named_buffers()}
    if present != wanted:
        raise UnsupportedError(
            message(
                op,
                name,
                f"experts made of {sorted(wanted)}",
                sorted(present),
                "weights quantised by another library are dequantised first",
            )
        )
    for projection in projections:
        shape = getattr(module, projection).shape
        require(
            len(shape) == 3 and 0 not in shape,
            op,
            f"{name}.{projection}.shape",
            need="three dimensions, none empty",
            got=list(shape),
        )


def recognise_gate(
    module: Any,  # experts modules of Transformers have no common class
    name: str,
    op: str,
) -> tuple[Activation, GateUpOrder]:
    """Recognise the activation and row order of a module's ``_apply_gate`` by its results.

    The method and every activation of mxpert, with the module's parameters, get the same gate and
    up values from −16 to 16 (published models clamp at 7 or 10). The activation with equal results
    is the module's.

    Args:
        module: an experts module; ``_apply_gate`` takes [R, 2F] and returns [R, F]. Llama 4's is
            found by its forward.
        name, op: for the message.

    Returns:
        The activation and the order that the module's ``is_concatenated`` states.

    Raises:
        UnsupportedError: no activation gives these results in this order.
    """
    values = _samples(2 * _SAMPLE_FEATURES)
    llama4 = _llama4_of(module)
    with torch.no_grad():
        gate = module._apply_gate if llama4 is None else partial(llama4.gate_of, module)
        expected = gate(values.clone())
    orders = [GateUpOrder.CONCATENATED, GateUpOrder.INTERLEAVED]
    if hasattr(module, "is_concatenated"):  # the first releases of transformers 5 have no such flag
        orders = orders[:1] if module.is_concatenated else orders[1:]
    for order in orders:
        sorted_values = values[:, torch.cat(gate_up_rows(order, _SAMPLE_FEATURES))]
        for activation in _candidates(module):
            answer = gated_activation(sorted_values, activation)
            if _equal(answer, expected):
                return activation, order
    raise UnsupportedError(
        message(
            op,
            f"{name}: activation",
            "SiLU, GELU, gpt-oss's SwiGLU or clamped SiLU, gate and up "
            + " or ".join(order.value for order in orders),
            _gate_name(module),
            "leave this model unconverted",
        )
    )


def _recognise_without_gate(
    module: Any,  # experts modules of Transformers have no common class
    name: str,
    op: str,
) -> Activation:
    """ReLU2, if the module's ``act_fn`` has its results; the counterpart of `recognise_gate`."""
    values = _samples(_SAMPLE_FEATURES)
    with torch.no_grad():
        expected = module.act_fn(values.clone())
    if _equal(values.clamp(min=0).square(), expected):
        return ReLU2()
    need = "relu(x)² in experts without a gate"
    remedy = "leave this model unconverted"
    raise UnsupportedError(message(op, f"{name}: activation", need, _gate_name(module), remedy))


def _samples(features: int) -> torch.Tensor:
    """Float32 values from −16 to 16, [8, features].

    Models may be built under another default dtype and device, so both are stated.
    """
    draw = torch.Generator().manual_seed(0)
    return 32 * torch.rand(8, features, generator=draw, dtype=torch.float32, device="cpu") - 16


def _equal(answer: torch.Tensor, expected: torch.Tensor) -> bool:
    return expected.shape == answer.shape and torch.allclose(
        answer, expected, rtol=_SAMPLE_TOLERANCE, atol=_SAMPLE_TOLERANCE
    )


def _candidates(module: torch.nn.Module) -> Iterator[Activation]:
    limits = _numbers(module, _LIMITS)
    yield SiLU()
    yield GELU("tanh")
    yield GELU()
    for limit in limits:
        yield ClampedSiLU(limit)
        for alpha in _numbers(module, _ALPHAS) or [SwiGLU.alpha]:
            yield SwiGLU(alpha, limit)


def _numbers(module: torch.nn.Module, names: tuple[str, ...]) -> list[float]:
    values = (getattr(module, name, None) for name in names)
    return [
        float(value)
        for value in values
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    ]


def _gate_name(module: torch.nn.Module) -> str:
    activation = getattr(module, "act_fn", None)
    return f"{type(module).__name__} with {type(activation).__name__ if activation else 'its own'}"

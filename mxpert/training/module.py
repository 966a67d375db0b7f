"""MXGroupedLinear: the weights of many linear layers, applied to rows sorted by group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from ..errors import message, require, require_device
from ..formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE, WIDE_DTYPES
from ..formats.tensor import MXTensor
from ..quantize.dual_op import quantize_dual
from .autograd import grouped_linear, run_grouped_linear
from .quantized import Given, Quantized, copies_of
from .recipe import MXFP8Recipe


class MXGroupedLinear(torch.nn.Module):
    """One linear layer per group: ``y[r] = x[r] @ weight[g(r)].T + bias[g(r)]``, in MXFP8.

    Parameters keep their dtype (float32 by default) and are quantised on each call, so any
    optimiser works. Calls between two updates may share one quantisation: `quantize_weight`. See
    `grouped_linear` for gradients, memory and ``main_grad``.

    With `group_ids` the module holds some groups of a layer of `num_groups`, as a rank does under
    expert parallelism. Its parameters are those groups of the layer that the same random state
    gives without `group_ids`: every group is drawn, and one that is not held is dropped at once.
    ``load_state_dict`` takes tensors of these groups, or of the whole layer, which it slices.
    ``state_dict`` has these groups alone.

    Args:
        num_groups: G, for example experts. in_features: K. out_features: N. With MXFP8, K and N
            are multiples of 32.
        bias: whether there is a bias [G, N].
        group_ids: the groups that this module holds, ascending; None is all of them.
            Parameters and `group_offsets` have these groups alone: G is their number then.
        recipe: formats and switches.
        device: of the parameters. dtype: bfloat16, float16 or float32; without MXFP8 float64 too.
        num_sms: most SMs that each GEMM occupies, as for `grouped_linear`; may be assigned later.

    Raises:
        TypeError, ValueError: a size that is not a positive int, or not a multiple of 32; a
            `bias`, `group_ids`, `recipe`, `device` or `dtype` of the wrong type or value.

    Example:
        >>> import torch
        >>> from mxpert.training import MXGroupedLinear
        >>> layer = MXGroupedLinear(4, 64, 32)
        >>> layer(torch.randn(6, 64, dtype=torch.bfloat16), torch.tensor([0, 1, 1, 4, 6])).shape
        torch.Size([6, 32])
        >>> half = MXGroupedLinear(4, 64, 32, group_ids=[2, 3])
        >>> half.load_state_dict(layer.state_dict())
        <All keys matched successfully>
        >>> torch.equal(half.weight, layer.weight[2:])
        True
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        group_ids: Sequence[int] | None = None,
        recipe: MXFP8Recipe = MXFP8Recipe(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        num_sms: int | None = None,
    ) -> None:
        super().__init__()
        op = "MXGroupedLinear"
        device = check_options(op, recipe, bias, device, dtype)
        unit = MX_BLOCK_SIZE if recipe.enabled else 1
        for name, size, multiple in (
            ("num_groups", num_groups, 1),
            ("in_features", in_features, unit),
            ("out_features", out_features, unit),
        ):
            require_size(op, name, size, multiple)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.recipe, self.num_sms = recipe, num_sms
        self.group_ids = None if group_ids is None else _check_group_ids(group_ids, num_groups, op)
        held = num_groups if self.group_ids is None else len(self.group_ids)
        self.weight = torch.nn.Parameter(
            torch.empty(held, out_features, in_features, device=device, dtype=dtype)
        )
        self.register_parameter(
            "bias",
            torch.nn.Parameter(torch.empty(held, out_features, device=device, dtype=dtype))
            if bias
            else None,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/√K, as torch.nn.Linear, group by group.

        Raises:
            ValueError: some of the groups, in parameters that FSDP2 has sharded.
        """
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            if not hasattr(parameter, "device_mesh"):
                self._draw(parameter, bound)
                continue
            require(
                self.group_ids is None,
                "MXGroupedLinear",
                "reset_parameters",
                need="plain tensors where the module has group_ids",
                got="a DTensor",
                remedy="initialise before fully_shard",
            )
            torch.nn.init.uniform_(parameter, -bound, bound)  # torch draws it as a whole

    @torch.no_grad()
    def _draw(self, parameter: torch.Tensor, bound: float) -> None:
        """Draw every group of the whole layer, and keep those of this module."""
        held = range(self.num_groups) if self.group_ids is None else self.group_ids
        places = {group: place for place, group in enumerate(held)}
        dropped = torch.empty_like(parameter[0])
        for group in range(self.num_groups):
            kept = parameter[places[group]] if group in places else dropped
            torch.nn.init.uniform_(kept, -bound, bound)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: object) -> None:
        """Take this module's groups out of tensors of the whole layer."""
        if self.group_ids is not None:
            names = [f"{prefix}weight", f"{prefix}bias"]
            state_dict = take_groups(state_dict, names, self.num_groups, self.group_ids)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(
        self,
        x: torch.Tensor | Quantized,
        group_offsets: torch.Tensor,
        *,
        weight: Quantized | None = None,
    ) -> torch.Tensor:
        """X [M, K] sorted by group, group_offsets int32 or int64 [G + 1] → [M, N].

        Args:
            x: a tensor, or quantised before; see `grouped_linear`.
            group_offsets: where groups begin and end.
            weight: ``self.weight``, quantised before: `quantize_weight` or squares. It is used in
                place of a quantisation by this call; ``self.weight`` has the gradient.
        """
        if weight is None:
            return grouped_linear(
                x,
                self.weight,
                group_offsets,
                bias=self.bias,
                recipe=self.recipe,
                num_sms=self.num_sms,
            )
        copies = copies_of(weight)
        if copies is None:
            need = "an MXTensor or the copies of quantize_dual"
            raise TypeError(message("MXGroupedLinear", "weight", need, type(weight).__name__))
        given = Given(copies_of(x), copies)
        return run_grouped_linear(
            x, self.weight, given, group_offsets, self.bias, self.recipe, self.num_sms
        )

    @torch.no_grad()
    def quantize_weight(self) -> tuple[MXTensor, MXTensor]:
        """Both copies of the weight as every call makes them, for calls between two updates.

        Raises:
            ValueError: a recipe without MXFP8.

        Example:
            >>> layer, offsets = MXGroupedLinear(2, 64, 32), torch.tensor([0, 1, 3])
            >>> weight = layer.quantize_weight()
            >>> parts = torch.randn(2, 3, 64, dtype=torch.bfloat16)  # two micro-batches
            >>> sum(layer(part, offsets, weight=weight).sum() for part in parts).backward()
            >>> layer.weight.grad.shape
            torch.Size([2, 32, 64])
        """
        recipe, need = self.recipe, "MXFP8Recipe(enabled=True)"
        require(recipe.enabled, "MXGroupedLinear", "recipe", need=need, got="enabled=False")
        return quantize_dual(
            self.weight,
            recipe.forward_format,
            scale_rule=recipe.scale_rule,
            scale_span=recipe.spans(self.weight.device).weight,
        )

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, "
            + ("" if self.group_ids is None else f"group_ids={list(self.group_ids)}, ")
            + f"in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}, "
            f"recipe={self.recipe}" + ("" if self.num_sms is None else f", num_sms={self.num_sms}")
        )


def check_options(
    op: str,
    recipe: object,
    bias: object,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> torch.device | None:
    """Check what the modules of this package have in common; returns the device.

    Raises:
        TypeError: a wrong type, or parameters of a dtype that the GEMMs do not take.
        ValueError: no such device.
    """
    if not isinstance(recipe, MXFP8Recipe):
        raise TypeError(message(op, "recipe", "an MXFP8Recipe", repr(recipe)))
    if not isinstance(bias, bool):
        raise TypeError(message(op, "bias", "True or False", _kind(bias)))
    allowed = float_dtypes(recipe)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in allowed:
        names = " or ".join(str(each).removeprefix("torch.") for each in allowed)
        raise TypeError(message(op, "dtype", names, repr(dtype)))
    return None if device is None else require_device(device, op)


def float_dtypes(recipe: MXFP8Recipe) -> tuple[torch.dtype, ...]:
    """The dtypes of inputs and parameters under a recipe; float64 without MXFP8 alone."""
    return FLOAT_DTYPES if recipe.enabled else WIDE_DTYPES


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)


def _check_group_ids(group_ids: Sequence[int], num_groups: int, op: str) -> tuple[int, ...]:
    """The groups that a module holds, ascending: a whole layer then has one order alone."""
    if not isinstance(group_ids, Sequence) or not all(type(each) is int for each in group_ids):
        raise TypeError(message(op, "group_ids", "a sequence of ints", repr(group_ids)))
    held = tuple(group_ids)
    require(
        bool(held) and list(held) == sorted(set(held)) and held[0] >= 0 and held[-1] < num_groups,
        op,
        "group_ids",
        need=f"ascending numbers of groups, 0 to {num_groups - 1}",
        got=list(held),
    )
    return held


def take_groups(
    state_dict: Mapping[str, Any], names: Sequence[str], num_groups: int, group_ids: Sequence[int]
) -> dict[str, Any]:
    """A state dict with some groups of those named tensors that have all of them.

    Example:
        >>> take_groups({"w": torch.arange(4), "b": torch.arange(2)}, ["w", "b"], 4, [1, 3])
        {'w': tensor([1, 3]), 'b': tensor([0, 1])}
    """
    taken = dict(state_dict)
    for name in names:
        stored = taken.get(name)
        if torch.is_tensor(stored) and stored.shape[:1] == (num_groups,):
            taken[name] = _rows(stored, list(group_ids))
    return taken


def _rows(stored: torch.Tensor, index: list[int]) -> torch.Tensor:
    """``stored[index]``; of a DTensor a DTensor, sharded likewise."""
    if not hasattr(stored, "device_mesh"):
        return stored[index]
    from torch.distributed.tensor import DTensor, Replicate  # not in every build of torch

    sharded = cast(DTensor, stored)
    mesh = sharded.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    part = DTensor.from_local(sharded.full_tensor()[index], mesh, everywhere, run_check=False)
    return part.redistribute(placements=sharded.placements)


MAX_SIZE = 1 << 20
"""Bound of every size of a layer, so that the product of three is an int64."""


def require_size(op: str, name: str, value: int, multiple: int = 1) -> None:
    """Check that a size is a positive int and a multiple of `multiple`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(message(op, name, "an int", repr(value)))
    require(value < MAX_SIZE, op, name, need=f"less than {MAX_SIZE}", got=value)
    require(
        value > 0 and value % multiple == 0,
        op,
        name,
        got=value,
        need=f"a positive multiple of {multiple}" if multiple > 1 else "at least 1",
        remedy="pad the layer, or pass MXFP8Recipe(enabled=False)" if multiple > 1 else "",
    )

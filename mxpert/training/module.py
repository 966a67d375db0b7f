"""MXGroupedLinear: the weights of many linear layers, applied to rows sorted by group."""

from __future__ import annotations

import math

import torch

from ..errors import message, require
from ..formats.spec import MX_BLOCK_SIZE
from .autograd import grouped_linear
from .recipe import MXFP8Recipe


class MXGroupedLinear(torch.nn.Module):
    """One linear layer per group: ``y[r] = x[r] @ weight[g(r)].T + bias[g(r)]``, in MXFP8.

    Parameters keep the dtype that they are given (float32 by default) and are quantised on each
    call, so any optimiser works. See `grouped_linear` for gradients, memory and ``main_grad``.

    Args:
        num_groups: G, for example experts. in_features: K. out_features: N. With MXFP8, K and N
            are multiples of 32.
        bias: whether there is a bias [G, N].
        recipe: formats and switches. device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: a size that is not a positive int, or not a multiple of 32.

    Example:
        >>> import torch
        >>> from mxpert.training import MXGroupedLinear
        >>> layer = MXGroupedLinear(4, 64, 32)
        >>> layer(torch.randn(6, 64, dtype=torch.bfloat16), torch.tensor([0, 1, 1, 4, 6])).shape
        torch.Size([6, 32])
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self, num_groups: int, in_features: int, out_features: int, *, bias: bool = False,
        recipe: MXFP8Recipe = MXFP8Recipe(), device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "MXGroupedLinear"
        if not isinstance(recipe, MXFP8Recipe):
            raise TypeError(message(op, "recipe", "an MXFP8Recipe", type(recipe).__name__))
        unit = MX_BLOCK_SIZE if recipe.enabled else 1
        for name, size, multiple in (("num_groups", num_groups, 1),
                                     ("in_features", in_features, unit),
                                     ("out_features", out_features, unit)):
            require_size(op, name, size, multiple)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.recipe = recipe
        self.weight = torch.nn.Parameter(
            torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", torch.nn.Parameter(
            torch.empty(num_groups, out_features, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/√K, as torch.nn.Linear."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
        """x [M, K] sorted by group, group_offsets int32 or int64 [G + 1] → [M, N]."""
        return grouped_linear(x, self.weight, group_offsets, bias=self.bias, recipe=self.recipe)

    def extra_repr(self) -> str:
        return (f"num_groups={self.num_groups}, in_features={self.in_features}, "
                f"out_features={self.out_features}, bias={self.bias is not None}, "
                f"recipe={self.recipe}")


def require_size(op: str, name: str, value: int, multiple: int = 1) -> None:
    """A module's size is a positive int and a multiple of `multiple`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(message(op, name, "an int", repr(value)))
    require(value > 0 and value % multiple == 0, op, name, got=value,
            need=f"a positive multiple of {multiple}" if multiple > 1 else "at least 1",
            remedy="pad the layer, or pass MXFP8Recipe(enabled=False)" if multiple > 1 else "")

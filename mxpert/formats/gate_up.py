"""The order of gate and up rows in the weights of stage 1."""

from __future__ import annotations

from typing import Literal

import torch

from .spec import ValueEnum


class GateUpOrder(ValueEnum):
    """Order of the 2F rows of `gate_up_proj`.

    The library never guesses it, because a wrong order gives wrong answers without an error.

    CONCATENATED: F gate rows, then F up rows (DeepSeek, Qwen, Mixtral once stacked).
    INTERLEAVED: gate, up, gate, up, … row by row (gpt-oss checkpoints).
    INTERLEAVED_16: 16 gate rows, 16 up rows, … (as AITER and FlyDSL kernels read them).

    Source:
        The checkpoints of the models that are named above.

    Example:
        >>> gate, up = gate_up_rows(GateUpOrder.INTERLEAVED, 3)
        >>> gate.tolist(), up.tolist()
        ([0, 2, 4], [1, 3, 5])
    """

    CONCATENATED = "concatenated"
    INTERLEAVED = "interleaved"
    INTERLEAVED_16 = "interleaved_16"

    def group(self, intermediate_size: int) -> int:
        """Return g, the number of gate rows before the first up row.

        In every order feature j has its gate at row ``(j // g) * 2g + j % g``, and its up row g
        rows further.
        """
        groups = {GateUpOrder.INTERLEAVED: 1, GateUpOrder.INTERLEAVED_16: 16}
        return groups.get(self, intermediate_size)


GateUpOrderLike = GateUpOrder | Literal["concatenated", "interleaved", "interleaved_16"]
"""A GateUpOrder or its name."""


def gate_up_rows(
    order: GateUpOrder, intermediate_size: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row indices of gate and of up, int64 [F] each, for weights in `order`."""
    feature = torch.arange(intermediate_size, device=device)
    group = order.group(intermediate_size)
    gate = feature // group * (2 * group) + feature % group
    return gate, gate + group


def interleaved_rows(
    order: GateUpOrder, intermediate_size: int, device: torch.device | str = "cpu", group: int = 1
) -> torch.Tensor:
    """Return row indices [2F] that bring rows in `order` to the order gate, up, gate, up.

    group: rows of each gate and each up run; 16 gives INTERLEAVED_16.
    """
    rows = torch.stack(gate_up_rows(order, intermediate_size, device))
    result: torch.Tensor = rows.unflatten(1, (-1, group)).transpose(0, 1).flatten()
    return result

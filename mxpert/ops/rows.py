"""The passes between the grouped GEMMs of training: activation and combine, each with its backward.

`mxpert.training` gives them their autograd; none of them has one here.
"""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import detect_target
from ..errors import require, require_dtype, require_tensor
from ..problem import Activation, ActivationLike, Op, RowsProblem, parse_activation
from .library import OpSpec
from .quantize import FLOAT_DTYPES

ROW_DTYPES = (*FLOAT_DTYPES, torch.float64)


def activate_rows(gate_up: torch.Tensor, activation: ActivationLike) -> torch.Tensor:
    """``act(gate, up)`` of rows with gate first, computed in float32 (float64 for float64).

    Args:
        gate_up: [R, 2F], a float dtype.

    Returns:
        [R, F] in the dtype of `gate_up`.

    Example:
        >>> import mxpert
        >>> activate_rows(torch.tensor([[0.0, 20.0, 3.0, 3.0]]), mxpert.SiLU())
        tensor([[ 0., 60.]])
    """
    activation = parse_activation(activation, "activate_rows")
    return _ACTIVATE(activation, gate_up=_dense(gate_up))


def activate_rows_backward(
    grad: torch.Tensor, gate_up: torch.Tensor, activation: ActivationLike
) -> torch.Tensor:
    """The gradient of `gate_up` [R, 2F] from that of the activation [R, F].

    Example:
        >>> import mxpert
        >>> gate_up, grad = torch.tensor([[0.0, 2.0]]), torch.ones(1, 1)
        >>> activate_rows_backward(grad, gate_up, mxpert.SiLU())
        tensor([[1., 0.]])
    """
    activation = parse_activation(activation, "activate_rows_backward")
    return _ACTIVATE_BACKWARD(activation, grad=_dense(grad), gate_up=_dense(gate_up))


def combine_rows(
    rows: torch.Tensor,
    row_ids: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``out[t] = Σ_slot weights[t, slot] · rows[row_ids[t, slot]]``, summed in slot order.

    Args:
        rows: [R, H], a float dtype; summed in float32 (float64 for float64).
        row_ids: int64 [T, top_k]: each row at most once, and ids of R or more, which add nothing.
        weights: float32 [T, top_k] (float64 for float64), or None for ones.
        out_dtype: that of the rows by default.

    Returns:
        [T, H].

    Example:
        >>> rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
        >>> combine_rows(rows, torch.tensor([[3, 0], [1, 2]])).flatten().tolist()
        [9.0, 6.0]
    """
    return _COMBINE(
        rows=_dense(rows),
        row_ids=_dense(row_ids),
        weights=_dense(weights),
        out_dtype=getattr(rows, "dtype", None) if out_dtype is None else out_dtype,
    )


def combine_rows_backward(
    grad: torch.Tensor, rows: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows [R, H] and of the weights [T, top_k] of `combine_rows`.

    The gradient of a weight whose id names no row is 0; that of a row without an id is undefined.

    Example:
        >>> rows, ids = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0]])
        >>> by_row, by_weight = combine_rows_backward(
        ...     torch.tensor([[10.0]]), rows, ids, torch.tensor([[0.5, 0.25]]))
        >>> by_row.flatten().tolist(), by_weight.tolist()
        ([2.5, 5.0], [[20.0, 10.0]])
    """
    return _COMBINE_BACKWARD(
        grad=_dense(grad), rows=_dense(rows), row_ids=_dense(row_ids), weights=_dense(weights)
    )


def _dense(value: Any) -> Any:
    """A contiguous tensor; whatever else was passed goes on to the checks."""
    if not isinstance(value, torch.Tensor):
        return value
    # torch.compile forbids reading the layout in a backward pass; it traces strided tensors alone.
    if torch.compiler.is_compiling() or value.layout is torch.strided:
        return value.contiguous()
    return value


def _check_activate(activation: Activation, gate_up: torch.Tensor) -> None:
    _check_gate_up(gate_up, "activate_rows")


def _check_gate_up(gate_up: torch.Tensor, op: str) -> None:
    require_tensor(gate_up, op, "gate_up", dtype=ROW_DTYPES, shape=(None, None))
    require(
        gate_up.shape[1] % 2 == 0,
        op,
        "gate_up.shape[1]",
        need="an even number",
        got=gate_up.shape[1],
        remedy="gate first, then up",
    )


def _check_activate_backward(
    activation: Activation, grad: torch.Tensor, gate_up: torch.Tensor
) -> None:
    op = "activate_rows_backward"
    _check_gate_up(gate_up, op)
    rows, width = gate_up.shape
    require_tensor(
        grad, op, "grad", dtype=gate_up.dtype, shape=(rows, width // 2), device=gate_up.device
    )


def _check_combine(
    rows: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor | None, out_dtype: torch.dtype
) -> None:
    op = "combine_rows"
    _check_rows(rows, row_ids, weights, op)
    require_dtype(out_dtype, ROW_DTYPES, op, "out_dtype")


def _check_combine_backward(
    grad: torch.Tensor, rows: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor
) -> None:
    op = "combine_rows_backward"
    _check_rows(rows, row_ids, weights, op)
    require_tensor(
        grad,
        op,
        "grad",
        dtype=ROW_DTYPES,
        shape=(row_ids.shape[0], rows.shape[1]),
        device=rows.device,
    )


def _check_rows(
    rows: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor | None, op: str
) -> None:
    require_tensor(rows, op, "rows", dtype=ROW_DTYPES, shape=(None, None))
    require_tensor(
        row_ids, op, "row_ids", dtype=torch.int64, shape=(None, None), device=rows.device
    )
    require(
        row_ids.numel() >= rows.shape[0],
        op,
        "row_ids",
        need=f"at least {rows.shape[0]} entries, one for each row",
        got=row_ids.numel(),
    )
    if weights is not None:
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        require_tensor(
            weights, op, "weights", dtype=wide, shape=tuple(row_ids.shape), device=rows.device
        )


def _activate_problem(
    activation: Activation, *, gate_up: torch.Tensor, grad: torch.Tensor | None = None
) -> RowsProblem:
    return RowsProblem(
        Op.ACTIVATE_ROWS if grad is None else Op.ACTIVATE_ROWS_BACKWARD,
        detect_target(gate_up.device),
        gate_up.shape[0],
        gate_up.shape[1] // 2,
        gate_up.dtype,
        activation=activation,
    )


def _combine_problem(
    *, rows: torch.Tensor, row_ids: torch.Tensor, grad: torch.Tensor | None = None, **_: Any
) -> RowsProblem:
    return RowsProblem(
        Op.COMBINE_ROWS if grad is None else Op.COMBINE_ROWS_BACKWARD,
        detect_target(rows.device),
        rows.shape[0],
        rows.shape[1],
        rows.dtype,
        row_ids.shape[1],
    )


def _fake_activate(activation: Activation, *, gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _fake_activate_backward(
    activation: Activation, *, grad: torch.Tensor, gate_up: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(gate_up)


def _fake_combine(
    *, rows: torch.Tensor, row_ids: torch.Tensor, out_dtype: torch.dtype, **_: Any
) -> torch.Tensor:
    return rows.new_empty((row_ids.shape[0], rows.shape[1]), dtype=out_dtype)


def _fake_combine_backward(
    *, rows: torch.Tensor, weights: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


_ACTIVATE: OpSpec[torch.Tensor] = OpSpec(
    "activate_rows",
    check=_check_activate,
    describe=_activate_problem,
    fake=_fake_activate,
    is_public=False,
)
_ACTIVATE_BACKWARD: OpSpec[torch.Tensor] = OpSpec(
    "activate_rows_backward",
    check=_check_activate_backward,
    describe=_activate_problem,
    fake=_fake_activate_backward,
    is_public=False,
)
_COMBINE: OpSpec[torch.Tensor] = OpSpec(
    "combine_rows",
    check=_check_combine,
    describe=_combine_problem,
    fake=_fake_combine,
    is_public=False,
)
_COMBINE_BACKWARD: OpSpec[tuple[torch.Tensor, torch.Tensor]] = OpSpec(
    "combine_rows_backward",
    check=_check_combine_backward,
    describe=_combine_problem,
    fake=_fake_combine_backward,
    returns="(Tensor, Tensor)",
    is_public=False,
)

"""The passes between the grouped GEMMs of training: activation and combine, each with its backward.

`mxpert.training` gives them their autograd; none of them has one here.
"""

from __future__ import annotations

import torch

from ..dispatch import Calls, detect_target
from ..errors import require, require_dtype, require_tensor
from ..problem import Activation, Op, RowsProblem, activation_from, require_activation
from .library import register
from .quantize import FLOAT_DTYPES

ROW_DTYPES = (*FLOAT_DTYPES, torch.float64)

_ACTIVATE, _ACTIVATE_BACKWARD, _COMBINE, _COMBINE_BACKWARD = Calls(), Calls(), Calls(), Calls()


def activate_rows(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
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
    _check_gate_up(gate_up, activation, "activate_rows")
    result: torch.Tensor = _activate_op(
        gate_up.contiguous(), activation.name, list(activation.parameters)
    )
    return result


def activate_rows_backward(
    grad: torch.Tensor, gate_up: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """The gradient of `gate_up` [R, 2F] from that of the activation [R, F].

    Example:
        >>> import mxpert
        >>> gate_up, grad = torch.tensor([[0.0, 2.0]]), torch.ones(1, 1)
        >>> activate_rows_backward(grad, gate_up, mxpert.SiLU())
        tensor([[1., 0.]])
    """
    op = "activate_rows_backward"
    _check_gate_up(gate_up, activation, op)
    rows, width = gate_up.shape
    require_tensor(
        grad, op, "grad", dtype=gate_up.dtype, shape=(rows, width // 2), device=gate_up.device
    )
    result: torch.Tensor = _activate_backward_op(
        grad.contiguous(), gate_up.contiguous(), activation.name, list(activation.parameters)
    )
    return result


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
        row_ids: int64 [T, top_k] with T · top_k = R, each row once.
        weights: float32 [T, top_k] (float64 for float64), or None for ones.
        out_dtype: that of the rows by default.

    Returns:
        [T, H].

    Example:
        >>> rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
        >>> combine_rows(rows, torch.tensor([[3, 0], [1, 2]])).flatten().tolist()
        [9.0, 6.0]
    """
    op = "combine_rows"
    _check_combine(rows, row_ids, weights, op)
    if out_dtype is not None:
        require_dtype(out_dtype, ROW_DTYPES, op, "out_dtype")
    result: torch.Tensor = _combine_op(
        rows.contiguous(),
        row_ids.contiguous(),
        None if weights is None else weights.contiguous(),
        out_dtype or rows.dtype,
    )
    return result


def combine_rows_backward(
    grad: torch.Tensor, rows: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows [R, H] and of the weights [T, top_k] of `combine_rows`.

    Example:
        >>> rows, ids = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0]])
        >>> by_row, by_weight = combine_rows_backward(
        ...     torch.tensor([[10.0]]), rows, ids, torch.tensor([[0.5, 0.25]]))
        >>> by_row.flatten().tolist(), by_weight.tolist()
        ([2.5, 5.0], [[20.0, 10.0]])
    """
    op = "combine_rows_backward"
    _check_combine(rows, row_ids, weights, op)
    require_tensor(
        grad,
        op,
        "grad",
        dtype=ROW_DTYPES,
        shape=(row_ids.shape[0], rows.shape[1]),
        device=rows.device,
    )
    by_row, by_weight = _combine_backward_op(
        grad.contiguous(), rows.contiguous(), row_ids.contiguous(), weights.contiguous()
    )
    return by_row, by_weight


def _check_gate_up(gate_up: torch.Tensor, activation: Activation, op: str) -> None:
    require_activation(activation, op)
    require_tensor(gate_up, op, "gate_up", dtype=ROW_DTYPES, shape=(None, None))
    require(
        gate_up.shape[1] % 2 == 0,
        op,
        "gate_up.shape[1]",
        need="an even number",
        got=gate_up.shape[1],
        remedy="gate first, then up",
    )


def _check_combine(
    rows: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor | None, op: str
) -> None:
    require_tensor(rows, op, "rows", dtype=ROW_DTYPES, shape=(None, None))
    require_tensor(
        row_ids, op, "row_ids", dtype=torch.int64, shape=(None, None), device=rows.device
    )
    require(
        row_ids.numel() == rows.shape[0],
        op,
        "row_ids",
        need=f"{rows.shape[0]} entries, one for each row",
        got=row_ids.numel(),
    )
    if weights is not None:
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        require_tensor(
            weights, op, "weights", dtype=wide, shape=tuple(row_ids.shape), device=rows.device
        )


def _activation_problem(
    op: Op, gate_up: torch.Tensor, name: str, parameters: list[float]
) -> RowsProblem:
    return RowsProblem(
        op,
        detect_target(gate_up.device),
        gate_up.shape[0],
        gate_up.shape[1] // 2,
        gate_up.dtype,
        activation=activation_from(name, parameters),
    )


def _combine_problem(op: Op, rows: torch.Tensor, row_ids: torch.Tensor) -> RowsProblem:
    return RowsProblem(
        op, detect_target(rows.device), rows.shape[0], rows.shape[1], rows.dtype, row_ids.shape[1]
    )


def _run_activate(gate_up: torch.Tensor, name: str, parameters: list[float]) -> torch.Tensor:
    out: torch.Tensor = _ACTIVATE.launch(
        None,
        (name, *parameters),
        dict(gate_up=gate_up),
        lambda: _activation_problem(Op.ACTIVATE_ROWS, gate_up, name, parameters),
    )
    return out


def _fake_activate(gate_up: torch.Tensor, name: str, parameters: list[float]) -> torch.Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _run_activate_backward(
    grad: torch.Tensor, gate_up: torch.Tensor, name: str, parameters: list[float]
) -> torch.Tensor:
    by_row: torch.Tensor = _ACTIVATE_BACKWARD.launch(
        None,
        (name, *parameters),
        dict(grad=grad, gate_up=gate_up),
        lambda: _activation_problem(Op.ACTIVATE_ROWS_BACKWARD, gate_up, name, parameters),
    )
    return by_row


def _fake_activate_backward(
    grad: torch.Tensor, gate_up: torch.Tensor, name: str, parameters: list[float]
) -> torch.Tensor:
    return torch.empty_like(gate_up)


def _run_combine(
    rows: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    out: torch.Tensor = _COMBINE.launch(
        None,
        (),
        dict(rows=rows, row_ids=row_ids, weights=weights, out_dtype=out_dtype),
        lambda: _combine_problem(Op.COMBINE_ROWS, rows, row_ids),
    )
    return out


def _fake_combine(
    rows: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    return rows.new_empty((row_ids.shape[0], rows.shape[1]), dtype=out_dtype)


def _run_combine_backward(
    grad: torch.Tensor, rows: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    by_row, by_weight = _COMBINE_BACKWARD.launch(
        None,
        (),
        dict(grad=grad, rows=rows, row_ids=row_ids, weights=weights),
        lambda: _combine_problem(Op.COMBINE_ROWS_BACKWARD, rows, row_ids),
    )
    return by_row, by_weight


def _fake_combine_backward(
    grad: torch.Tensor, rows: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


_ACTIVATION_SCHEMA = "Tensor gate_up, str activation, float[] activation_parameters"
_activate_op = register(
    f"activate_rows({_ACTIVATION_SCHEMA}) -> Tensor", _run_activate, _fake_activate
)
_activate_backward_op = register(
    f"activate_rows_backward(Tensor grad, {_ACTIVATION_SCHEMA}) -> Tensor",
    _run_activate_backward,
    _fake_activate_backward,
)
_combine_op = register(
    "combine_rows(Tensor rows, Tensor row_ids, Tensor? weights, ScalarType out_dtype) -> Tensor",
    _run_combine,
    _fake_combine,
)
_combine_backward_op = register(
    "combine_rows_backward(Tensor grad, Tensor rows, Tensor row_ids, Tensor weights) "
    "-> (Tensor, Tensor)",
    _run_combine_backward,
    _fake_combine_backward,
)

"""The passes between the grouped GEMMs of training: activation and combine, each with its backward.

`mxpert.training` gives them their autograd; none of them has one here.
"""

from __future__ import annotations

import torch

from ...core.ops import OpSpec
from ...core.problem import Activation, ActivationLike, Op, RowsProblem, parse_gated_activation
from ...core.target import detect_target
from ...errors import Checks
from ...formats.spec import WIDE_DTYPES
from .inputs import ActivateBackwardInputs, ActivateInputs, CombineBackwardInputs, CombineInputs


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
    activation = parse_gated_activation(activation, "activate_rows")
    return _ACTIVATE(activation, ActivateInputs(_dense(gate_up)))


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
    activation = parse_gated_activation(activation, "activate_rows_backward")
    return _ACTIVATE_BACKWARD(activation, ActivateBackwardInputs(_dense(grad), _dense(gate_up)))


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
    if out_dtype is None:
        out_dtype = getattr(rows, "dtype", torch.float32)  # the checks refuse what has none
    factors = None if weights is None else _dense(weights)
    return _COMBINE(None, CombineInputs(_dense(rows), _dense(row_ids), factors, out_dtype))


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
        None, CombineBackwardInputs(_dense(grad), _dense(rows), _dense(row_ids), _dense(weights))
    )


def _dense(value: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor; whatever else was passed goes on to the checks."""
    if not isinstance(value, torch.Tensor):
        return value
    # torch.compile forbids reading the layout in a backward pass; it traces strided tensors alone.
    if torch.compiler.is_compiling() or value.layout is torch.strided:
        return value.contiguous()
    return value


def _check_activate(activation: Activation, inputs: ActivateInputs) -> None:
    _check_gate_up(inputs.gate_up, Checks("activate_rows"))


def _check_gate_up(gate_up: torch.Tensor, need: Checks) -> None:
    need.tensor(gate_up, "gate_up", dtype=WIDE_DTYPES, shape=(None, None))
    need(
        gate_up.shape[1] % 2 == 0,
        "gate_up.shape[1]",
        "an even number",
        gate_up.shape[1],
        "gate first, then up",
    )


def _check_activate_backward(activation: Activation, inputs: ActivateBackwardInputs) -> None:
    need, gate_up = Checks("activate_rows_backward"), inputs.gate_up
    _check_gate_up(gate_up, need)
    rows, width = gate_up.shape
    shape, device = (rows, width // 2), gate_up.device
    need.tensor(inputs.grad, "grad", dtype=gate_up.dtype, shape=shape, device=device)


def _check_combine(options: None, inputs: CombineInputs) -> None:
    need = Checks("combine_rows")
    _check_rows(inputs.rows, inputs.row_ids, inputs.weights, need)
    need.dtype(inputs.out_dtype, WIDE_DTYPES, "out_dtype")


def _check_combine_backward(options: None, inputs: CombineBackwardInputs) -> None:
    need, rows, row_ids = Checks("combine_rows_backward"), inputs.rows, inputs.row_ids
    need.tensor(inputs.weights, "weights")
    _check_rows(rows, row_ids, inputs.weights, need)
    shape = row_ids.shape[0], rows.shape[1]
    need.tensor(inputs.grad, "grad", dtype=WIDE_DTYPES, shape=shape, device=rows.device)


def _check_rows(
    rows: torch.Tensor, row_ids: torch.Tensor, weights: torch.Tensor | None, need: Checks
) -> None:
    need.tensor(rows, "rows", dtype=WIDE_DTYPES, shape=(None, None))
    need.tensor(row_ids, "row_ids", dtype=torch.int64, shape=(None, None), device=rows.device)
    need(
        row_ids.numel() >= rows.shape[0],
        "row_ids",
        f"at least {rows.shape[0]} entries, one for each row",
        row_ids.numel(),
    )
    if weights is not None:
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        need.tensor(weights, "weights", dtype=wide, shape=tuple(row_ids.shape), device=rows.device)


def _activate_problem(
    activation: Activation, inputs: ActivateInputs | ActivateBackwardInputs
) -> RowsProblem:
    gate_up, forward = inputs.gate_up, isinstance(inputs, ActivateInputs)
    return RowsProblem(
        Op.ACTIVATE_ROWS if forward else Op.ACTIVATE_ROWS_BACKWARD,
        detect_target(gate_up.device),
        gate_up.shape[0],
        gate_up.shape[1] // 2,
        gate_up.dtype,
        activation=activation,
    )


def _combine_problem(options: None, inputs: CombineInputs | CombineBackwardInputs) -> RowsProblem:
    rows, forward = inputs.rows, isinstance(inputs, CombineInputs)
    return RowsProblem(
        Op.COMBINE_ROWS if forward else Op.COMBINE_ROWS_BACKWARD,
        detect_target(rows.device),
        rows.shape[0],
        rows.shape[1],
        rows.dtype,
        inputs.row_ids.shape[1],
    )


def _fake_activate(activation: Activation, inputs: ActivateInputs) -> torch.Tensor:
    rows, width = inputs.gate_up.shape
    return inputs.gate_up.new_empty((rows, width // 2))


def _fake_combine(options: None, inputs: CombineInputs) -> torch.Tensor:
    shape = inputs.row_ids.shape[0], inputs.rows.shape[1]
    return inputs.rows.new_empty(shape, dtype=inputs.out_dtype)


def _fake_combine_backward(
    options: None, inputs: CombineBackwardInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(inputs.rows), torch.empty_like(inputs.weights)


_ACTIVATE: OpSpec[Activation, ActivateInputs, torch.Tensor] = OpSpec(
    "activate_rows",
    check=_check_activate,
    describe=_activate_problem,
    fake=_fake_activate,
    is_public=False,
)
_ACTIVATE_BACKWARD: OpSpec[Activation, ActivateBackwardInputs, torch.Tensor] = OpSpec(
    "activate_rows_backward",
    check=_check_activate_backward,
    describe=_activate_problem,
    fake=lambda _, inputs: torch.empty_like(inputs.gate_up),
    is_public=False,
)
_COMBINE: OpSpec[None, CombineInputs, torch.Tensor] = OpSpec(
    "combine_rows",
    check=_check_combine,
    describe=_combine_problem,
    fake=_fake_combine,
    is_public=False,
)
_COMBINE_BACKWARD: OpSpec[None, CombineBackwardInputs, tuple[torch.Tensor, torch.Tensor]] = OpSpec(
    "combine_rows_backward",
    check=_check_combine_backward,
    describe=_combine_problem,
    fake=_fake_combine_backward,
    returns="(Tensor, Tensor)",
    is_public=False,
)

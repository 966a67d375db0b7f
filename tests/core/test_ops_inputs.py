"""An op's inputs have one type from its checks to the launch of each kernel."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
import torch

from mxpert.core.backend import BACKENDS
from mxpert.core.ops import OPS
from mxpert.core.problem import Op
from mxpert.errors import Checks
from mxpert.training.rows import op as rows  # noqa: F401  (it fills OPS)
from support.inputs import INPUTS, LAUNCHED
from support.kernels import kernels_of

KERNELS = {
    f"{backend}-{op.value}": kernel
    for backend in BACKENDS
    for op, kernel in kernels_of(backend).items()
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_kernel_takes_the_inputs_of_its_op(kernel: Any) -> None:
    hints = get_type_hints(kernel.launch)
    assert list(hints)[:3] == ["problem", "config", "inputs"]
    assert hints["inputs"] == LAUNCHED[kernel.op]


@pytest.mark.parametrize("op", Op, ids=lambda op: op.value)
def test_the_checks_of_an_op_take_its_inputs(op: Op) -> None:
    """So do its description and its fake; the op takes them apart field by field."""
    spec = OPS[op.value]
    for function in (spec._check, spec._fake):
        if function.__name__ != "<lambda>":
            assert {INPUTS[op], LAUNCHED[op]} & {*get_type_hints(function).values()}
    inputs = INPUTS[op](*range(len(INPUTS[op].__slots__)))
    assert spec.values(inputs) == tuple(range(len(INPUTS[op].__slots__)))


def test_checks_name_their_op() -> None:
    need = Checks("quantize")
    need(True, "x", "a", "b")
    with pytest.raises(ValueError, match=r"quantize: x — need a, got b; c$"):
        need(False, "x", "a", "b", "c")
    with pytest.raises(TypeError, match=r"quantize: x — need a torch.Tensor, got int"):
        need.tensor(3, "x")
    with pytest.raises(TypeError, match=r"quantize: dtype — need int8, got 'int8'"):
        need.dtype("int8", (torch.int8,))

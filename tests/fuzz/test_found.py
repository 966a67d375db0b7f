"""Bugs that the fuzz of the public functions found, each with its smallest call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import mxpert
from mxpert import formats
from mxpert.core.geometry import describe
from mxpert.testing.problems import MoEShape, random_moe_problem
from mxpert.training import MXGroupedLinear, grouped_linear
from mxpert.training.rows.op import combine_rows, combine_rows_backward
from support.layers import run_layer

LAYER = random_moe_problem(MoEShape(64, 32, 4, 2), 5)
W = formats.quantize_blocks(torch.randn(2, 64), "mxfp4")
ARRAY = numpy.ones(3)
ONE = torch.ones(1, 1)
BAD: dict[str, Callable[[], Any]] = {
    "no columns": lambda: formats.quantize_token_rows(torch.zeros(3, 0)),
    "array as limit": lambda: mxpert.SwiGLU(limit=ARRAY),  # type: ignore[arg-type]
    "array as out_dtype": lambda: run_layer(LAYER, activation=mxpert.SiLU(), out_dtype=ARRAY),  # type: ignore[arg-type]
    "array as dtype": lambda: W.dequantize(ARRAY),  # type: ignore[arg-type]
    "array as groups": lambda: mxpert.route_topk(torch.zeros(1, 4), 1, top_groups=ARRAY),  # type: ignore[arg-type]
    "device as certificate": lambda: formats.fold(W, torch.device("cpu")),  # type: ignore[arg-type]
    "layout as out_dtype": lambda: combine_rows(
        torch.ones(2, 2), torch.tensor([[0, 1]]), out_dtype=torch.strided
    ),  # type: ignore[arg-type]
    "empty path": lambda: LAYER.weights.save(""),
    "huge layer": lambda: MXGroupedLinear(2**63, 32, 32, device="meta"),
    "tuple as dtype": lambda: mxpert.dequantize(W, dtype=()),  # type: ignore[arg-type]
    "array as dtype of parameters": lambda: MXGroupedLinear(1, 32, 32, dtype=ARRAY),  # type: ignore[arg-type]
    "no weights": lambda: combine_rows_backward(ONE, ONE, ONE.long() - 1, None),  # type: ignore[arg-type]
    "nested offsets": lambda: grouped_linear(
        torch.ones(4, 32), torch.ones(1, 32, 32), torch.nested.nested_tensor([torch.ones(2)])
    ),
    "no experts": lambda: mxpert.quantize_weights(
        torch.ones(1, 64, 32),
        torch.ones(0, 32, 32),
        gate_up_order="concatenated",
        weight_format="nvfp4",
    ),
    "sparse offsets": lambda: mxpert.quantize_dual(
        torch.ones(2, 32), "mxfp8", group_offsets=torch.tensor([0, 2]).to_sparse()
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_in_the_form_of_the_library(case: str) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^[\w.]+: .+ — need .+, got "):
        BAD[case]()


@pytest.mark.parametrize("shape", [(2, 0), (3, 0, 16)])
def test_weights_without_values(shape: tuple[int, ...]) -> None:
    assert formats.quantize_weight(torch.ones(shape), "nvfp4").shape == torch.Size(shape)


def test_float16_weights_under_autocast() -> None:
    projections = torch.ones(2, 64, 32).half(), torch.ones(2, 32, 32).half()
    options: dict[str, Any] = dict(gate_up_order="concatenated", weight_format="int4_g32")
    with torch.autocast("cpu", torch.bfloat16):
        weights = mxpert.quantize_weights(*projections, **options)
    expected = mxpert.quantize_weights(*projections, **options)
    assert torch.equal(weights.down_proj.scale, expected.down_proj.scale)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_views_that_torch_negates_lazily(name: str) -> None:
    """`z.conj().imag` shares memory with z and is negated when it is read."""
    z = torch.complex(torch.randn(4, 64), torch.randn(4, 64))
    x = z.conj().imag
    assert x.is_neg()
    assert describe([x]) is None  # torch's dispatcher negates it before a kernel reads memory
    expected = mxpert.quantize(-z.imag, name)
    for q in (mxpert.quantize(x, name), formats.quantize_blocks(x, name)):
        assert torch.equal(q.qdata, expected.qdata)
        assert torch.equal(q.scale, expected.scale)
    element = formats.get_format(name).element
    assert torch.equal(formats.encode(x, element), formats.encode(-z.imag, element))

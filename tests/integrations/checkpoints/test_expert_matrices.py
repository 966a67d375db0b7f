"""Matrices that compressed-tensors packed decode to what compressed-tensors decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mxpert.formats.tensor import MXTensor
from mxpert.integrations.checkpoints.containers import CONTAINERS
from mxpert.integrations.checkpoints.expert_matrices import Exact, MatrixFormat
from mxpert.integrations.checkpoints.nvfp4_casts import NotACast
from mxpert.integrations.checkpoints.stated_quantization import Statement
from mxpert.testing.numerics import assert_exact

FIXTURE = json.loads(Path(__file__).with_name("compressed_tensors.json").read_text("utf-8"))
"""Made by compressed_tensors_fixture.py, which says how."""

MXFP4 = ("mxfp4", "cast", "cast by 3")
CASES = [name for name in FIXTURE if name != "version"]


def tensor_of(entry: dict[str, Any]) -> torch.Tensor:
    data = torch.tensor(list(bytes.fromhex(entry["bytes"])), dtype=torch.uint8)
    return data.view(getattr(torch, entry["dtype"].removeprefix("torch."))).view(entry["shape"])


def stored_tensors(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor_of(entry) for name, entry in case["tensors"].items()}


def format_of(case: dict[str, Any]) -> MatrixFormat:
    (container,) = [each for each in CONTAINERS if each.name.endswith(f" {case['format']}")]
    group = {"targets": ["Linear"], "weights": case["weights"], "format": case["format"]}
    entry = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    statement = Statement("compressed-tensors", entry, {}, "config.json", "load")
    return container.stored(statement, "model.layers.0.mlp.experts.0.up_proj")


def decoded(stored: MatrixFormat, tensors: dict[str, torch.Tensor]) -> Exact:
    arguments = [tensors[part.suffix] for part in stored.parts]
    found = stored.decode(*arguments)
    if isinstance(found, NotACast):
        assert stored.otherwise is not None
        found = stored.otherwise.decode(*arguments)
    assert not isinstance(found, NotACast)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_matrix_of_compressed_tensors_decodes_to_its_values(name: str) -> None:
    """Bit for bit in the dtype that compressed-tensors decodes to.

    It multiplies there: codes and zero points are exact, so that its product is our exact one,
    rounded once. Of NVFP4 see `nvfp4_of`.
    """
    case = FIXTURE[name]
    stored, tensors = format_of(case), stored_tensors(case)
    assert {part.suffix for part in stored.parts} == set(tensors)
    for part in stored.parts:
        assert tuple(tensors[part.suffix].shape) in part.shapes(*case["shape"])
    assert stored.parts[0].sizes(tuple(tensors[stored.parts[0].suffix].shape)) == tuple(
        case["shape"]
    )
    found = decoded(stored, tensors)
    assert isinstance(found, MXTensor) == (name in MXFP4)
    wanted = tensor_of(case["decoded"])
    dtype = torch.float64 if name in MXFP4 else wanted.dtype  # MXFP4 is not rounded
    wanted = wanted.to(torch.float64)
    assert wanted.unique().numel() > 30
    assert_exact(found.dequantize(dtype).to(torch.float64), wanted, name)
    codes = tensors[stored.parts[0].suffix]
    bytes_ = codes.view(torch.uint8)
    swapped = (bytes_ >> 4 | bytes_ << 4).view(codes.dtype)
    wrong = decoded(stored, tensors | {stored.parts[0].suffix: swapped})
    with pytest.raises(AssertionError):
        assert_exact(wrong.dequantize(dtype).to(torch.float64), wanted, name)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("nvfp4")])
def test_exact_nvfp4_is_nearer_to_the_quotient_than_compressed_tensors_is(name: str) -> None:
    """``code · scale / g`` in float64, which has 29 more bits than any of these."""
    case = FIXTURE[name]
    tensors = stored_tensors(case)
    found = decoded(format_of(case), tensors)
    divisor = tensors["weight_global_scale"].double()
    without = decoded(format_of(case), tensors | {"weight_global_scale": torch.ones(1)})
    quotient = without.dequantize(torch.float64) / divisor
    own = (found.dequantize(torch.float64) - quotient).abs()
    theirs = (tensor_of(case["decoded"]) - quotient).abs()
    assert bool((own <= 2.0**-24 * quotient.abs() * (1 + 2.0**-20)).all())
    assert bool((theirs <= 2.0**-8 * quotient.abs() * (1 + 2.0**-10)).all())
    assert float(own.max()) == 0 if "power" in name else float(theirs.max()) > float(own.max())


@pytest.mark.parametrize("name", [name for name in CASES if "zero points" in name])
def test_zero_points_off_by_one_are_seen(name: str) -> None:
    case = FIXTURE[name]
    tensors = stored_tensors(case)
    zeros = tensors["weight_zero_point"]
    plain = decoded(format_of(case), tensors)
    shifted = decoded(format_of(case), tensors | {"weight_zero_point": zeros.roll(1, dims=1)})
    wanted, dtype = tensor_of(case["decoded"]).to(torch.float64), plain.scale.dtype
    assert_exact(plain.dequantize(dtype).to(torch.float64), wanted, name)
    off = type(plain)(plain.qdata, plain.scale, plain.format, plain.zero_point + 1)
    for wrong in (shifted, off) if zeros.shape[1] > 1 else (off,):
        with pytest.raises(AssertionError):
            assert_exact(wrong.dequantize(dtype).to(torch.float64), wanted, name)

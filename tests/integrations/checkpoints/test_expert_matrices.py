"""Matrices that compressed-tensors packed decode to what compressed-tensors decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mxpert.formats.tensor import MXTensor
from mxpert.integrations.checkpoints.containers import CONTAINERS
from mxpert.testing.numerics import assert_exact

FIXTURE = json.loads(Path(__file__).with_name("compressed_tensors.json").read_text("utf-8"))
"""Made by compressed_tensors_fixture.py, which says how."""

CASES = {
    "mxfp4": "compressed-tensors mxfp4-pack-quantized",
    "cast": "compressed-tensors nvfp4-pack-quantized",
    "cast by 3": "compressed-tensors nvfp4-pack-quantized",
}
_DTYPES = {"torch.uint8": torch.uint8, "torch.float8_e4m3fn": torch.float8_e4m3fn}


def stored_tensors(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    rows = case["shape"][0]
    tensors = {
        name: torch.tensor(list(bytes.fromhex(case[name])), dtype=torch.uint8)
        .view(rows, -1)
        .view(_DTYPES[case["dtypes"][name]])
        for name in ("weight_packed", "weight_scale")
    }
    if case["weight_global_scale"] is not None:
        tensors["weight_global_scale"] = torch.tensor([case["weight_global_scale"]])
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_a_matrix_of_compressed_tensors_decodes_to_its_values(name: str) -> None:
    (container,) = [each for each in CONTAINERS if each.name == CASES[name]]
    stored, case = container.stored, FIXTURE[name]  # type: ignore[attr-defined]
    tensors = stored_tensors(case)
    assert [part.suffix for part in stored.parts] == list(tensors)
    for part in stored.parts:
        assert tuple(tensors[part.suffix].shape) in part.shapes(*case["shape"])
    found = stored.decode(*tensors.values())
    assert isinstance(found, MXTensor)
    wanted = torch.tensor(case["decoded"], dtype=torch.float64)
    assert wanted.unique().numel() > 30
    assert_exact(found.dequantize(torch.float64), wanted, name)
    swapped = tensors["weight_packed"] >> 4 | tensors["weight_packed"] << 4
    wrong = stored.decode(swapped, *list(tensors.values())[1:])
    with pytest.raises(AssertionError):
        assert_exact(wrong.dequantize(torch.float64), wanted, name)

"""Encoders give the bytes that the owners' libraries store, and undo the decoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mxpert.formats import WeightTensor
from mxpert.integrations.checkpoints.expert_matrices import BadMatrixError
from mxpert.integrations.checkpoints.matrix_encoders import exact_divisor
from mxpert.integrations.checkpoints.written_containers import TARGETS
from support.exact_matrices import Int4Matrix
from tests.integrations.checkpoints.test_expert_matrices import (
    CASES,
    FIXTURE,
    decoded,
    format_of,
    stored_tensors,
)


def exact_of(case: dict[str, Any]) -> Any:
    """The matrix with its own codes and scales, NVFP4 also where it is a cast."""
    stored = format_of(case)
    return decoded(stored.otherwise or stored, stored_tensors(case))


@pytest.mark.parametrize("name", CASES)
def test_compressed_tensors_stores_the_same_bytes(name: str) -> None:
    case = FIXTURE[name]
    tensors = stored_tensors(case)
    encode = TARGETS[case["format"]].encode
    assert encode is not None
    found = encode(exact_of(case))
    assert found.keys() == tensors.keys()
    for suffix, tensor in tensors.items():
        if suffix == "weight_global_scale":  # one of the divisors with this reciprocal
            assert torch.equal(1 / found[suffix], 1 / tensor)
            continue
        wanted = tensor.to(torch.int64) if suffix == "weight_shape" else tensor
        assert found[suffix].dtype == wanted.dtype, suffix
        pair = [each.reshape(-1) for each in (found[suffix], wanted)]
        assert torch.equal(*(each.view(torch.uint8) for each in pair)), suffix


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("target", ["pack-quantized", "awq", "gptq"])
def test_int4_is_stored_as_its_formulas_say(target: str, group: int, has_zeros: bool) -> None:
    generator = torch.Generator().manual_seed(group)
    matrix = Int4Matrix.random(generator, 48, 256, group=group, has_zeros=has_zeros)
    encode = TARGETS[target].encode
    assert encode is not None
    parts = matrix.parts
    given = WeightTensor(parts["qdata"], parts["scale"], f"int4_g{group}", parts.get("zero_point"))
    wanted = {
        "pack-quantized": lambda: matrix.pack_quantized,
        "awq": lambda: matrix.awq,
        "gptq": lambda: matrix.gptq(less=0 if has_zeros else 1),
    }[target]()
    found = encode(given)
    assert found.keys() == wanted.keys()
    for suffix, tensor in wanted.items():
        assert found[suffix].dtype == tensor.dtype, suffix
        assert torch.equal(found[suffix], tensor), suffix


def test_a_divisor_has_the_factor_as_its_reciprocal_or_there_is_none() -> None:
    """All float32 from 1 to 2 in steps of 4,099: below sqrt(2) always, above it sometimes."""
    factors = torch.arange(0x3F800000, 0x40000000, 4099, dtype=torch.int32).view(torch.float32)
    near = (1 / factors).view(torch.int32).unsqueeze(1) + torch.arange(-8, 9, dtype=torch.int32)
    there = (1 / near.view(torch.float32) == factors.unsqueeze(1)).any(1)
    assert bool(there[factors < 2**0.5].all())
    assert 0.82 < float(there.float().mean()) < 0.84  # 2 (sqrt(2) - 1), where all round evenly
    for factor, is_there in zip(factors.unbind(), there.tolist(), strict=True):
        if is_there:
            assert 1 / exact_divisor(factor, "g") == factor
        else:
            with pytest.raises(BadMatrixError):
                exact_divisor(factor, "g")


@pytest.mark.parametrize("factor", [1e-39, 0.0, float("nan")])
def test_a_factor_without_a_finite_reciprocal_has_no_divisor(factor: float) -> None:
    with pytest.raises(BadMatrixError):
        exact_divisor(torch.tensor(factor), "g")

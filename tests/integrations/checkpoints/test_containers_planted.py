"""Planted faults of readers, each of which the comparison of a checkpoint must see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mxpert.errors import UnsupportedError
from mxpert.integrations.checkpoints import expert_matrices, per_expert
from mxpert.integrations.checkpoints.containers import CONTAINERS
from mxpert.integrations.checkpoints.expert_matrices import MatrixFormat
from support.expert_containers import KINDS, check_checkpoint, write

EVERY_KIND = pytest.mark.parametrize("name", KINDS)
CT, QUARK, MODELOPT = ("compressed-tensors mxfp4-pack-quantized", "Quark OCP MX", "ModelOpt NVFP4")


def swapped_nibbles(stored: MatrixFormat) -> MatrixFormat:
    def decode(codes: torch.Tensor, *rest: torch.Tensor) -> Any:
        codes = codes.view(torch.uint8)
        return stored.decode(codes >> 4 | codes << 4, *rest)

    return MatrixFormat(stored.parts, decode, stored.unread)


def shifted_scales(stored: MatrixFormat) -> MatrixFormat:
    def decode(codes: torch.Tensor, scale: torch.Tensor, *rest: torch.Tensor) -> Any:
        rolled = scale.view(torch.uint8).roll(1, dims=0).view(scale.dtype)
        return stored.decode(codes, rolled, *rest)

    return MatrixFormat(stored.parts, decode, stored.unread)


FAULTS = {"nibbles swapped": swapped_nibbles, "scale row shifted": shifted_scales}


@EVERY_KIND
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_decoding_is_seen(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = write(tmp_path, name)
    read = per_expert.read_matrix
    plant = FAULTS[fault]
    monkeypatch.setattr(per_expert, "read_matrix", lambda r, n, stored: read(r, n, plant(stored)))
    with pytest.raises(AssertionError):
        check_checkpoint(tmp_path, modules)


def test_gate_and_up_swapped_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = write(tmp_path, CT, layers=[0])
    monkeypatch.setitem(per_expert.PARTS, "gate_proj", "up")
    monkeypatch.setitem(per_expert.PARTS, "up_proj", "gate")
    with pytest.raises(AssertionError):
        check_checkpoint(tmp_path, modules)


@pytest.mark.parametrize("name", [MODELOPT, "compressed-tensors nvfp4-pack-quantized"])
def test_a_global_scale_used_the_other_way_round_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = write(tmp_path, name, layers=[0])
    (container,) = [each for each in CONTAINERS if each.name == name]
    stored = container.stored  # type: ignore[attr-defined]  # one matrix per expert
    inverse = expert_matrices.nvfp4_cast_matrix(
        *(part.suffix for part in stored.parts), is_divisor=not stored.decode.keywords["is_divisor"]
    )
    read = per_expert.read_matrix
    monkeypatch.setattr(per_expert, "read_matrix", lambda r, n, _: read(r, n, inverse))
    with pytest.raises((AssertionError, UnsupportedError)):
        check_checkpoint(tmp_path, modules)


@pytest.mark.parametrize("name", [MODELOPT, "compressed-tensors nvfp4-pack-quantized"])
def test_the_gates_global_scale_for_up_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = write(tmp_path, name, layers=[0])
    read = per_expert.CheckpointReader.read

    def gates(self: Any, tensor: str) -> torch.Tensor:
        if tensor.endswith(("_scale_2", "weight_global_scale")):
            tensor = tensor.replace(".up_proj.", ".gate_proj.")
        return read(self, tensor)

    monkeypatch.setattr(per_expert.CheckpointReader, "read", gates)
    with pytest.raises(AssertionError):
        check_checkpoint(tmp_path, modules)

"""Planted faults of readers, each of which the comparison of a checkpoint must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mxpert.errors import UnsupportedError
from mxpert.integrations.checkpoints import int4_matrices, per_expert, stacked_experts
from mxpert.integrations.checkpoints.expert_matrices import MatrixFormat, nvfp4_matrix
from mxpert.integrations.checkpoints.per_expert import decode_matrix
from support.expert_containers import EXACT_NVFP4, KINDS, check_checkpoint, gptq, write

CT, MODELOPT = "compressed-tensors mxfp4-pack-quantized", "ModelOpt NVFP4"
ALL = KINDS | {f"exact {name}": kind for name, kind in EXACT_NVFP4.items()}
EVERY_NVFP4 = pytest.mark.parametrize("name", [name for name in ALL if "nvfp4" in name.lower()])
Plant = Callable[[MatrixFormat], MatrixFormat]


def plant(monkeypatch: pytest.MonkeyPatch, fault: Plant) -> None:
    """Decode every matrix with a fault."""

    def decode(op: str, name: str, stored: MatrixFormat, tensors: Any, codes: Any = None) -> Any:
        return decode_matrix(op, name, fault(stored), tensors)

    for module in (per_expert, stacked_experts):
        monkeypatch.setattr(module, "decode_matrix", decode)


def swapped_nibbles(stored: MatrixFormat) -> MatrixFormat:
    def decode(codes: torch.Tensor, *rest: torch.Tensor) -> Any:
        swapped = codes.view(torch.uint8)
        return stored.decode((swapped >> 4 | swapped << 4).view(codes.dtype), *rest)

    return replace(stored, decode=decode)


def shifted_scales(stored: MatrixFormat) -> MatrixFormat:
    """Each row of the matrix has the scales of another one."""
    place = next(i for i, part in enumerate(stored.parts) if "scale" in part.suffix)
    rows = stored.parts[place].shape.index("N")

    def decode(*tensors: torch.Tensor) -> Any:
        scale = tensors[place]
        bytes_ = scale.view(torch.uint8).unflatten(-1, (scale.shape[-1], -1))
        rolled = bytes_.roll(1, dims=rows).flatten(-2).view(scale.dtype)
        return stored.decode(*tensors[:place], rolled, *tensors[place + 1 :])

    return replace(stored, decode=decode)


FAULTS = [
    (name, fault)
    for name in ALL
    for fault in (swapped_nibbles, shifted_scales)
    if fault is shifted_scales or ALL[name].format != "mxfp8_e4m3"  # whose codes are whole bytes
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_planted_fault_of_decoding_is_seen(
    name: str, fault: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = write(tmp_path, ALL[name])
    check_checkpoint(tmp_path, modules)
    plant(monkeypatch, fault)
    with pytest.raises(AssertionError):
        check_checkpoint(tmp_path, modules)


def test_gate_and_up_swapped_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = write(tmp_path, CT, layers=[0])
    monkeypatch.setitem(per_expert.PARTS, "gate_proj", "up")
    monkeypatch.setitem(per_expert.PARTS, "up_proj", "gate")
    with pytest.raises(AssertionError):
        check_checkpoint(tmp_path, modules)


@EVERY_NVFP4
def test_a_global_scale_used_the_other_way_round_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = write(tmp_path, ALL[name], layers=[0])

    def inverse(stored: MatrixFormat) -> MatrixFormat:
        names = [part.suffix for part in stored.parts]
        found = nvfp4_matrix(*names, is_divisor=not stored.decode.keywords["is_divisor"])
        return found if stored.otherwise is not None else found.otherwise

    plant(monkeypatch, inverse)
    with pytest.raises(AssertionError):
        check_checkpoint(tmp_path, modules)


@EVERY_NVFP4
def test_the_gates_global_scale_for_up_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = write(tmp_path, ALL[name], layers=[0])
    read = per_expert.CheckpointReader.read_into

    def gates(self: Any, tensor: str, memory: torch.Tensor) -> None:
        if tensor.endswith(("_scale_2", "weight_global_scale")):
            tensor = tensor.replace(".up_proj.", ".gate_proj.")
        read(self, tensor, memory)

    monkeypatch.setattr(per_expert.CheckpointReader, "read_into", gates)
    with pytest.raises(AssertionError):
        check_checkpoint(tmp_path, modules)


@pytest.mark.parametrize("planted", [range(8), (0, 2, 4, 6, 1, 3, 5, 7)], ids=["plain", "inverse"])
def test_another_order_of_awqs_nibbles_is_seen(
    planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = write(tmp_path, "AWQ", layers=[0])
    monkeypatch.setattr(int4_matrices, "AWQ_NIBBLES", tuple(planted))
    with pytest.raises(AssertionError):
        check_checkpoint(tmp_path, modules)


@pytest.mark.parametrize("written", [gptq(32), gptq(32, v2=True)], ids=["v1", "v2"])
def test_zero_points_off_by_one_are_seen(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = write(tmp_path, written, layers=[0])
    check_checkpoint(tmp_path, modules)

    def fault(stored: MatrixFormat) -> MatrixFormat:
        group, decode = stored.decode.args  # of the check of g_idx
        format, is_symmetric, is_less_one = decode.args
        wrong = partial(decode.func, format, is_symmetric, not is_less_one)
        return replace(stored, decode=partial(stored.decode.func, group, wrong))

    plant(monkeypatch, fault)
    with pytest.raises((AssertionError, UnsupportedError)):  # 15, less 1, is refused
        check_checkpoint(tmp_path, modules)


def test_gptqs_zero_points_must_not_be_read_as_gptq_v2s(tmp_path: Path) -> None:
    stated = gptq(32).config["quantization_config"] | {"checkpoint_format": "gptq_v2"}
    modules = write(tmp_path, gptq(32), layers=[0], quantization_config=stated)
    with pytest.raises(AssertionError):
        check_checkpoint(tmp_path, modules)

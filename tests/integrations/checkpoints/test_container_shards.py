"""Reading back finds what was written wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mxpert.integrations.checkpoints import change_container, container_plan, container_shards
from mxpert.integrations.checkpoints.change_container import convert_checkpoint
from mxpert.integrations.checkpoints.written_containers import TARGETS
from support.expert_containers import EXACT_NVFP4, KINDS, awq, write
from support.memory import peak_bytes


def swapped_nibbles(matrix: Any) -> Any:
    return replace(matrix, qdata=matrix.qdata >> 4 | matrix.qdata << 4)


FAULTS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "nibble order": ("Quark OCP MX", "mxfp4-pack-quantized", swapped_nibbles),
    "nibble order of INT4": ("AWQ", "gptq", swapped_nibbles),
    "zero point off by one": (
        "AWQ",
        "pack-quantized",
        lambda matrix: replace(matrix, zero_point=matrix.zero_point + 1 & 15),
    ),
    "global multiplied": (
        "compressed-tensors nvfp4-pack-quantized",
        "modelopt-nvfp4",
        lambda matrix: replace(matrix, row_scale=1 / matrix.row_scale),
    ),
    "scale row shifted": (
        "MiniMax MXFP8",
        "modelopt-mxfp8",
        lambda matrix: replace(matrix, scale=matrix.scale.roll(1, 0)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_nothing_is_kept(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, spoil = FAULTS[fault]
    write(tmp_path / "in", EXACT_NVFP4.get(source, KINDS[source]))
    encode = TARGETS[target].encode
    assert encode is not None
    spoiled = replace(TARGETS[target], encode=lambda matrix: encode(spoil(matrix)))
    monkeypatch.setitem(TARGETS, target, spoiled)
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", container=target)
    assert len(report.failures) == report.matrices
    assert "has other weights than the source" in report.failures[0]
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_swapped_gate_and_up_are_found(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_checkpoint(demo, tmp_path / "in", container="quark")
    whole = container_shards._interleaved
    monkeypatch.setattr(container_shards, "_interleaved", lambda parts: whole(parts[::-1]))
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", container="gpt-oss")
    found = {failure.split(" has ")[1] for failure in report.failures}
    assert found == {"other weights than the source", "another bias than the source"}


def test_memory_holds_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """INT4 is packed anew: what is written has memory of its own. Six layers, four experts each."""
    modules = write(tmp_path / "in", awq(64), layers=range(6), sizes=(256, 512))
    files = list((tmp_path / "in").glob("*.safetensors"))
    (mapped,) = {file.stat().st_size for file in files}
    layer = sum(tensor.nbytes for tensor in load_file(files[0]).values())
    codes = max(matrix.codes.numel() for matrix in modules[0].matrices.values())
    monkeypatch.setattr(change_container, "_verify", lambda *_: [])  # it maps other files

    def peak(limit: int, name: str) -> int:
        monkeypatch.setattr(container_plan, "MAX_COPY_BYTES", limit)
        return peak_bytes(
            lambda: None,
            lambda _: convert_checkpoint(tmp_path / "in", tmp_path / name, container="gptq"),
            mapped=mapped,
        )

    # Besides the file a matrix is unpacked, transposed and packed: six copies at a byte a code.
    assert peak(layer // 4, "by expert") < layer // 4 + 6 * codes
    whole = peak(layer, "by layer")
    assert layer < whole < layer + 6 * codes
    assert layer // 4 + 6 * codes < whole, "the measure would not see a whole layer"

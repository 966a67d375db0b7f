"""Reading back finds what was written wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mxpert.integrations.checkpoints import container_shards
from mxpert.integrations.checkpoints.change_container import convert_checkpoint
from mxpert.integrations.checkpoints.written_containers import TARGETS
from support.expert_containers import EXACT_NVFP4, KINDS, write


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

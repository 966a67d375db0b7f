"""Matrices are read and decoded by a few threads: what these leave alone, and how they fail."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mxpert.integrations.checkpoints import stacked_experts
from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.integrations.checkpoints.safetensors_files import CheckpointReader
from support.expert_containers import write


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_ops_of_a_thread_start_no_others(two_threads: None, tmp_path: Path) -> None:
    """And those of other threads, there or to come, as many as before."""
    write(tmp_path, "GPTQ", layers=[0])
    reader = CheckpointReader(tmp_path, "test")
    at_once = threading.Barrier(2)

    def counted() -> int:
        at_once.wait(30)
        torch.randn(256, 256).t().contiguous()
        return torch.get_num_threads()

    assert [each.result() for each in [reader.threads.submit(counted) for _ in range(2)]] == [1, 1]
    found: list[int] = []
    for _ in range(2):
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert [*found, torch.get_num_threads()] == [2, 2, 2]


def test_nothing_is_read_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first matrix fails; when the error is raised, no thread works on the others."""
    write(tmp_path, "GPTQ", layers=[0])
    decode, calls = stacked_experts.decode_matrix, []

    def failing(op: str, name: str, *rest: Any) -> Any:
        calls.append(name)
        if name.endswith(".experts.0.gate_proj"):
            raise ValueError("planted")
        return decode(op, name, *rest)

    monkeypatch.setattr(stacked_experts, "decode_matrix", failing)
    with pytest.raises(ValueError, match="planted"):
        next(load_expert_weights(tmp_path))
    counted = len(calls)
    threading.Event().wait(0.2)
    assert len(calls) == counted


def test_tensors_are_read_into_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and scales of MXFP4 are copied nowhere; AWQ's codes are decoded in place."""
    places = {"compressed-tensors mxfp4-pack-quantized": 2, "AWQ": 1}
    for name, wanted in places.items():
        write(tmp_path / name, name, layers=[0])
        decode, in_place = stacked_experts.decode_matrix, []

        def recorded(*arguments: Any, decode: Any = decode, found: list[Any] = in_place) -> Any:
            matrix = decode(*arguments)
            found.append(matrix)
            return matrix

        monkeypatch.setattr(stacked_experts, "decode_matrix", recorded)
        ((_, weights),) = load_expert_weights(tmp_path / name)
        monkeypatch.undo()
        whole = weights.gate_up_proj, weights.down_proj

        def lies_in(tensor: torch.Tensor, field: str, whole: Any = whole) -> bool:
            ranges = [(t.data_ptr(), t.nbytes) for t in (getattr(each, field) for each in whole)]
            return any(0 <= tensor.data_ptr() - start < size for start, size in ranges)

        for matrix in in_place:
            held = [lies_in(getattr(matrix, field), field) for field in ("qdata", "scale")]
            assert sum(held) == wanted, name


def test_a_file_that_was_cut_since_it_was_opened_is_named(tmp_path: Path) -> None:
    write(tmp_path, "AWQ", layers=[0])
    reading = load_expert_weights(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ValueError, match=f"{file.name} — need a complete .* it ends within "):
        next(reading)

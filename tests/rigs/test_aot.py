"""The listings of binaries that ahead-of-time tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

from support import aot


@pytest.fixture
def disassembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The cubins that nvdisasm was given, with an empty cache."""
    given: list[bytes] = []

    def tool(cubin: bytes, tool: str, option: str) -> str:
        given.append(cubin)
        return f"{tool} {option} {cubin.decode()}"

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(aot, "_tool", tool)
    return given


def test_a_cubin_is_disassembled_once(disassembled: list[bytes]) -> None:
    first = aot.disassembled(b"one")
    assert first == aot.disassembled(b"one") == "nvdisasm -c one"
    assert aot.disassembled(b"two") == "nvdisasm -c two"
    assert disassembled == [b"one", b"two"]


def test_another_disassembler_lists_it_again(
    disassembled: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    aot.disassembled(b"one")
    monkeypatch.setattr(aot, "_disassembler", lambda: b"another release")
    aot.disassembled(b"one")
    assert disassembled == [b"one", b"one"]

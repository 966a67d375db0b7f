"""tools/binaries.py: hashes of compiled texts by kernel, and what a comparison must see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.scripts import load_script

binaries = load_script("tools/binaries.py")


def written(folder: Path, **texts: str) -> Path:
    """A record of kernels with these texts."""
    cache = folder / "cache"
    for number, (name, text) in enumerate(texts.items()):
        place = cache / str(number)
        place.mkdir(parents=True)
        (place / f"{name}.ptx").write_text(text.replace("NAME", name), encoding="utf-8")
    path = folder / "record.json"
    path.write_text(json.dumps(binaries.texts(cache)), encoding="utf-8")
    return path


def test_equal_records_and_renamed_kernels_compare_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(tmp_path / "a", one=".entry NAME()", two="add NAME")
    after = written(tmp_path / "b", one=".entry NAME()", second="add NAME")
    assert binaries.main(["compare", str(before), str(before)]) == 0
    assert capsys.readouterr().out == "2 binaries, 0 differ\n"
    assert binaries.main(["compare", str(before), str(after), "--renamed", "two=second"]) == 0
    assert binaries.main(["compare", str(before), str(after)]) == 1


def test_a_changed_text_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = written(tmp_path / "a", one="add"), written(tmp_path / "b", one="mul")
    assert binaries.main(["compare", str(before), str(after)]) == 1
    assert capsys.readouterr().out == "one ptx: 1 only before, 1 only after\n"


def test_the_compiling_tests_are_found() -> None:
    found = binaries.compiling_tests()
    assert "tests/moe/hopper/test_kernels_aot.py" in found
    assert "tests/moe/cdna4/test_decode.py" in found

"""`make test-transformers` runs whole folders, so that no new test falls out of it."""

from __future__ import annotations

import ast
import re

import pytest

from tests.integrations.run_versions import ROOT, TESTS, WITHOUT_MODELS


def test_every_test_of_models_and_checkpoints_is_run() -> None:
    folder = ROOT / "tests" / "integrations"
    ignored = [ROOT / each.removeprefix("--ignore=") for each in TESTS if "--" in each]
    chosen = [ROOT / each for each in TESTS if "--" not in each]
    left_out = {
        file.relative_to(ROOT).as_posix()
        for file in folder.rglob("test_*.py")
        if any(map(file.is_relative_to, ignored)) or not any(map(file.is_relative_to, chosen))
    }
    serving = {each for each in left_out if each.startswith("tests/integrations/serving/")}
    assert left_out - serving == {*WITHOUT_MODELS}


@pytest.mark.parametrize("place", WITHOUT_MODELS)
def test_what_is_left_out_has_no_model(place: str) -> None:
    """Neither by name nor by a fixture of the folder, whose checkpoints Transformers writes."""
    text = (ROOT / place).read_text("utf-8")
    fixtures = (ROOT / place).with_name("conftest.py").read_text("utf-8")
    made = {*re.findall(r"@pytest.fixture.*\ndef (\w+)", fixtures)}
    arguments = {node.arg for node in ast.walk(ast.parse(text)) if isinstance(node, ast.arg)}
    assert made
    assert not made & arguments
    assert not re.search(r"(import|from) transformers\b", text)

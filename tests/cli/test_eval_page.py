"""docs/formats.md has the accuracies of the results file, and says of them what they say."""

from __future__ import annotations

import copy
import json
from types import ModuleType

import pytest

from mxpert.cli.eval import EVAL_WEIGHTS
from support.scripts import load_script


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    return load_script("docs/_accuracy.py")


@pytest.fixture(scope="module")
def document(writer: ModuleType) -> dict:
    return json.loads(writer.RESULTS.read_text("utf-8"))


def test_the_table_is_that_of_the_results(writer: ModuleType, document: dict) -> None:
    """Run `python docs/_accuracy.py` after a new run."""
    text = writer.PAGE.read_text(encoding="utf-8")
    assert writer.with_table(text, document) == text
    other = copy.deepcopy(document)
    other["formats"][3]["delta"] += 0.001
    assert writer.with_table(text, other) != text


def test_every_format_is_in_it(writer: ModuleType, document: dict) -> None:
    names = {name.replace("mxfp8_e4m3", "mxfp8") for name in EVAL_WEIGHTS}
    found = {writer.pair_of(entry["name"]) for entry in document["formats"][1:]}
    assert {weights.replace("mxfp8_e4m3", "mxfp8") for _, weights in found} == names
    assert {activation for activation, _ in found} == {"bf16", "mxfp8"}
    assert len(found) == 2 * len(names)


def test_the_page_says_of_them_what_they_say(writer: ModuleType, document: dict) -> None:
    _, *results = document["formats"]
    assert all(abs(each["delta"]) < 2 * each["delta_error"] for each in results)
    worst = {
        writer.pair_of(each["name"])[1]: min(
            layer["sqnr_db"][each["name"]] for layer in document["layers"]
        )
        for each in results
        if writer.pair_of(each["name"])[0] == "bf16"
    }
    assert 12.5 < worst["mxfp8_e4m3"] - worst["mxfp4"] < 13.5
    others = [worst[name] - worst["mxfp4"] for name in worst if name[:4] in ("int4", "nvfp")]
    assert min(others) > 1
    assert max(others) < 2.5
    assert 0.5 < worst["nvfp4"] - worst["nvfp4-e4m3"] < 1.5

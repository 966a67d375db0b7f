"""docs/which-checkpoints-run.md has the containers of the registry, and says what they do."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from mxpert.integrations.checkpoints.containers import CONTAINERS, UNSERVED
from mxpert.integrations.checkpoints.written_containers import TARGETS
from support.scripts import load_script
from tests.integrations.serving import stored_experts
from tests.integrations.test_container_checkpoints import BESIDE_DENSE
from tests.integrations.test_container_checkpoints_fp8 import BESIDE_FP8


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    return load_script("docs/_containers.py")


def test_the_tables_are_those_of_the_registry(writer: ModuleType) -> None:
    """Run `python docs/_containers.py` after a change of the registry."""
    text = writer.PAGE.read_text(encoding="utf-8")
    assert writer.with_tables(text) == text
    for table in writer.TABLES.values():
        assert table() in text
    for each in (*CONTAINERS, *UNSERVED):
        assert f"| {each.name} |" in text


def test_every_container_that_is_written_has_a_row(writer: ModuleType) -> None:
    table = writer.conversion_table()
    assert all(f"| `{name}` |" in table for name in TARGETS)


def test_another_table_is_seen(writer: ModuleType) -> None:
    text = writer.PAGE.read_text(encoding="utf-8")
    planted = text.replace("| MiMo | MXFP4 |", "| MiMo | MXFP8 |")
    assert planted != text
    assert writer.with_tables(planted) == text


def test_every_container_has_its_ways_and_a_command(writer: ModuleType) -> None:
    names = [container.name for container in CONTAINERS]
    assert list(writer.WAYS) == names
    text = writer.PAGE.read_text(encoding="utf-8")
    commands = text.partition("## One command for each")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([^|`]+?) \| `", commands, re.MULTILINE) == names


def test_the_ways_are_those_that_tests_try(writer: ModuleType) -> None:
    """Transformers: what test_container_checkpoints.py loads; vLLM and SGLang: cases of layers."""
    beside = {name for name, ways in writer.WAYS.items() if "dense" in ways.transformers}
    assert beside == set(BESIDE_DENSE)
    fp8 = {name for name, ways in writer.WAYS.items() if "FP8" in ways.transformers}
    assert fp8 == set(BESIDE_FP8)
    layers = {*stored_experts.CONTAINERS.values(), "gpt-oss"}
    by_vllm = {name for name, ways in writer.WAYS.items() if ways.vllm.startswith("yes")}
    assert by_vllm == {*layers, "DeepSeek-V4"}
    by_sglang = {name for name, ways in writer.WAYS.items() if ways.sglang.startswith("yes")}
    assert by_sglang == layers - {*stored_experts.NOT_IN_SGLANG}


def test_commands_are_those_of_the_ways(writer: ModuleType) -> None:
    text = writer.PAGE.read_text(encoding="utf-8")
    commands = text.partition("## One command for each")[2].partition("\n## ")[0]
    for name, ways in writer.WAYS.items():
        (row,) = re.findall(rf"^\| {re.escape(name)} \| `.*$", commands, re.MULTILINE)
        assert ("vllm serve" in row) == ways.vllm.startswith("yes"), name
        assert ("sglang" in row) == ways.sglang.startswith("yes"), name
        assert "from_pretrained" in row, name

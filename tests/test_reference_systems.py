"""docs/reference-systems.md: every file, name and test that its table gives exists."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from support.scripts import load_script

ROOT = Path(__file__).resolve().parents[1]


TABLE = load_script("docs/_reference_systems.py")
ROWS = [row for rows in TABLE.sections().values() for row in rows]
"""Of type Capability."""
SOURCES = {"#330", "#431", "#660", "#753"}
BACKENDS = {"cdna4", "hopper", "triton"}


@functools.cache
def names_of(path: str) -> frozenset[str]:
    """What a file defines: functions, classes, parameters, fields, constants. In other languages
    than Python every word of it counts."""
    if not path.endswith(".py"):
        return frozenset(re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8")))
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def missing(texts: Sequence[str]) -> list[str]:
    """The files and names of "file: name, name" that do not exist."""
    wrong = []
    for path, names in TABLE.entries(texts):
        if not (ROOT / path).is_file():
            wrong.append(path)
        else:
            wrong += [f"{path}: {name}" for name in names if name not in names_of(path)]
    return wrong


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.source} {row.name}"[:60])
def test_what_a_row_names_exists(row: object) -> None:
    assert missing(row.where) == []  # type: ignore[attr-defined]
    assert missing(row.tests) == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", TABLE.faults(), ids=lambda fault: fault.name[:60])
def test_what_sees_a_fault_exists(fault: object) -> None:
    assert missing(fault.tests) == []  # type: ignore[attr-defined]


def test_tests_are_tests_or_cases_of_the_suites() -> None:
    for row in ROWS:
        for path, names in TABLE.entries(row.tests):
            assert path.startswith("tests/"), row
            if not path.startswith("tests/conformance/cases/"):
                assert all(name.startswith("test_") for name in names), row


def test_states_have_reasons() -> None:
    for row in ROWS:
        assert row.state in TABLE.STATES, row
        assert bool(row.reason) is (row.state != TABLE.WORKS), row
        assert not {"partly", "absent"} & set(row.reason.split()), row
        assert row.source in SOURCES, row
        assert set(row.backends.split(", ")) <= BACKENDS, row
    assert {row.source for row in ROWS} == SOURCES
    assert len({(row.source, row.name) for row in ROWS}) == len(ROWS)


def test_the_page_has_the_table() -> None:
    """Run `python docs/_reference_systems.py` after a change."""
    text = TABLE.PAGE.read_text(encoding="utf-8")
    assert TABLE.with_tables(text) == text
    assert TABLE.counts(ROWS) in text
    assert len(ROWS) >= 87


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("mxpert/nothing.py: f", "mxpert/nothing.py"),
        ("mxpert/explain.py: no_such_name", "mxpert/explain.py: no_such_name"),
        ("tests/test_docs.py: test_no_such", "tests/test_docs.py: test_no_such"),
    ],
)
def test_what_does_not_exist_is_seen(text: str, wrong: str) -> None:
    assert missing(["mxpert/explain.py: explain", text]) == [wrong]
    with pytest.raises(AssertionError):
        test_what_a_row_names_exists(replace(ROWS[0], where=[text]))

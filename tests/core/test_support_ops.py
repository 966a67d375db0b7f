"""The table of docs/supported-ops.md: written by the registry, complete, and what dispatch does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from mxpert.core.backend import BACKENDS, layouts_for
from mxpert.core.problem import Op
from mxpert.core.registry import explain_problem, kernel_of
from mxpert.formats.tensor import Layout
from support.executors import CHIPS
from support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("docs/_ops.py")


def test_the_page_has_todays_table(script: ModuleType) -> None:
    """Run `python docs/_ops.py` after a change of what a kernel serves."""
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.BEGIN in text
    assert script.with_table(text) == text, "python docs/_ops.py"


def test_every_op_and_backend_is_in_it(script: ModuleType) -> None:
    problems = [
        problem
        for row in script.ROWS
        for problem in row.problems(script.H200, lambda _: Layout.ROW_MAJOR)
    ]
    assert {problem.op for problem in problems} == set(Op)
    assert {column.backend for column in script.COLUMNS} == set(BACKENDS)
    assert {column.target.arch for column in script.COLUMNS} >= set(CHIPS)


def test_cells_are_what_dispatch_does(script: ModuleType) -> None:
    """On a chip with kernels of its own these serve exactly the rows where they are not absent."""
    for arch, own in CHIPS.items():
        (column,) = (each for each in script.COLUMNS if each.backend == own)
        assert column.target.arch == arch
        for row in script.ROWS:
            here = script.cell(row, column)

            def layout_of(weight_format: str, arch: str = arch, here: str = here) -> Layout:
                return Layout.ROW_MAJOR if here == "absent" else layouts_for(arch, weight_format)[0]

            for problem in row.problems(column.target, layout_of):
                found = explain_problem(problem).resolution.kernel.backend
                assert (found == own) is (here != "absent"), (row.ops, row.formats)


def test_bf16_training_is_absent_where_no_kernel_has_it(script: ModuleType) -> None:
    cells = {
        (row.ops, row.formats, column.title): script.cell(row, column)
        for row in script.ROWS
        for column in script.COLUMNS
    }
    assert cells["`grouped_wgrad`", "bf16", "hopper, sm_90"] == "absent"
    assert cells["`grouped_gemm`: forward", "bf16", "cdna4, gfx950 (AMD)"] == "absent"
    assert cells["`grouped_gemm`: forward", "bf16", "hopper, sm_90"] == "measured"


def test_a_kernel_that_refuses_changes_the_table(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = script.table()
    kernel = kernel_of(BACKENDS["triton"], Op.GROUPED_WGRAD)
    own = getattr(kernel, "_kernel", kernel)
    monkeypatch.setattr(own, "unsupported", lambda problem: "is gone", raising=False)
    changed = [
        (one, other)
        for one, other in zip(before.splitlines(), script.table().splitlines(), strict=True)
        if one != other
    ]
    assert len(changed) == 2
    assert all(one.startswith("| `grouped_wgrad`") for one, _ in changed)


def test_a_row_that_is_served_in_part_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(each for each in script.ROWS if each.ops.startswith("`grouped_gemm`: forward"))
    kernel = kernel_of(BACKENDS["triton"], Op.GROUPED_GEMM)
    own = getattr(kernel, "_kernel", kernel)
    monkeypatch.setattr(
        own,
        "unsupported",
        lambda problem: "no" if "e5m2" in problem.a_format else None,
        raising=False,
    )
    with pytest.raises(ValueError, match="serves some; split the row"):
        script.cell(row, script.COLUMNS[2])

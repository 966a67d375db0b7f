"""Tables keep what tells rows apart, progress foretells, documents are whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mxpert.cli import report
from mxpert.cli.main import app
from mxpert.cli.report import Column, print_table

COLUMNS = ["name", Column("wide", 2), Column("wider", 1), "value"]
ROWS = [[f"row{i}", "x" * 90, "y" * 90, str(10**i)] for i in range(3)]


def test_a_file_or_pipe_gets_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = io.StringIO()
    print_table(Console(file=text), "A title", COLUMNS, ROWS)
    lines = text.getvalue().splitlines()
    assert len(lines) == 6, lines
    assert all(cell in line for row, line in zip(ROWS, lines[3:], strict=True) for cell in row)


def test_a_terminal_leaves_columns_out_and_names_them() -> None:
    text = io.StringIO()
    console = Console(file=text, width=60, force_terminal=True, color_system=None)
    print_table(console, "A title", COLUMNS, ROWS)
    assert "left out at 60 columns: wide, wider" in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= 60


KEYS = {
    "plan": (["bench", "--plan", "--ranks", "8,16", "--tokens", "16,64"], 4),
    "bench": (["bench", "--scale", "32", "--tokens", "1,2", "--stage", "gate_up,down"], 4),
    "tune": (["tune", "--dry-run", "--target", "nvidia-h200", "--tokens", "1,16"], 3),
}


@pytest.mark.parametrize("command", KEYS)
def test_rows_differ_in_their_names_at_any_width(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a terminal of 40 columns the cells fold; the columns that name a row are all there."""
    shown: list[tuple[list[str], list[list[str]]]] = []
    table = report._table

    def note(columns: Any, rows: Any, kept: Any) -> Any:
        names = [columns[i].name for i in kept]
        shown.append((names, [[row[i] for i in kept] for row in rows]))
        return table(columns, rows, kept)

    monkeypatch.setattr(report, "_table", note)
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setattr(Console, "width", 40)
    arguments, count = KEYS[command]
    folder = [] if command == "tune" else ["--output", str(tmp_path)]
    outcome = CliRunner().invoke(app, [*arguments, *folder])
    assert outcome.exit_code == 0, outcome.output
    names, rows = shown[-1]
    keys = {"model", "T", "T a rank", "format", "stage", "ranks", "cell", "candidates", "backend"}
    assert len({*names} & keys) >= min(count, 2)
    places = [names.index(name) for name in names if name in keys]
    assert len({tuple(row[i] for i in places) for row in rows}) == len(rows)


@pytest.mark.parametrize("load", [0.0, 60.0])
def test_time_left_is_that_of_the_work(load: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What precedes the first step does not count (a model is loaded); 1 % says too little."""
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    text = io.StringIO()
    with report.progress(Console(file=text, width=80), "demo") as advance:
        now[0] = load
        advance(0, 1000, "a")
        for seconds, done in ((7, 10), (20, 200), (40, 400)):
            now[0] = load + seconds
            advance(done, 1000, "b")
    lines = text.getvalue().splitlines()
    assert [line.partition(", b")[2] for line in lines[1:]] == [
        "",
        ", about 80 s left",
        ", about 60 s left",
    ]

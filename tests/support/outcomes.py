"""What a command of the command line ended with."""

from __future__ import annotations

from typing import Any


def assert_one_line(outcome: Any, *parts: str) -> None:
    """Exit code 2, the last line of standard error is the message, and there is no traceback.

    outcome: of typer's CliRunner. parts: what the line holds.
    """
    assert outcome.exit_code == 2, outcome.output
    assert "Traceback" not in outcome.output
    line = outcome.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert " — need " in line
    for part in parts:
        assert part in line

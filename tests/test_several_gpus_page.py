"""What docs/several-gpus*.md show runs as they say: the script on two ranks, the commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mxpert.cli.expert_parallel import ranks
from mxpert.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("several-gpus.md", "several-gpus-measured.md", "several-gpus-plan.md")
TEXTS = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES]
PYTHON = re.findall(r"^```python\n(.*?)^```", TEXTS[0], re.DOTALL | re.MULTILINE)
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", "".join(TEXTS), re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


def test_the_pages_show_these_commands() -> None:
    starts = [shlex.split(command)[:2] for command in COMMANDS]
    assert starts.count(["torchrun", "--nproc-per-node"]) == 2
    assert starts.count(["mxpert", "bench"]) == 2
    assert ["mxpert", "doctor"] in starts
    assert len(COMMANDS) == 5


def test_the_script_runs_on_two_ranks(tmp_path: Path) -> None:
    """Its first two blocks are layer.py; it compares its own experts with the layer."""
    script = tmp_path / "layer.py"
    script.write_text("".join(PYTHON[:2]), encoding="utf-8")
    (command,) = (each for each in COMMANDS if "layer.py" in each)
    program, *arguments = shlex.split(command)
    assert program == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: 4 of 8 experts" in done.stdout


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if each.startswith("mxpert")], ids=lambda text: text[:28]
)
def test_the_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of `bench --expert-parallel` are started by tests/cli; here are its options."""
    asked: list[Any] = []

    def start(function: object, num_ranks: int, request: object) -> list[Any]:
        asked.append((num_ranks, request))
        return [{"gate": "not measured here"}]

    monkeypatch.setattr(ranks, "start_ranks", start)
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, shlex.split(command)[1:])
    if "--expert-parallel" not in command:
        assert outcome.exit_code == 0, outcome.output
        return
    assert outcome.exit_code == 1
    ((count, request),) = asked
    assert (count, request.tokens, request.formats) == (2, [1, 16, 128, 1024], ["mxfp8"])


def test_the_example_of_training_exists() -> None:
    (command,) = (each for each in COMMANDS if "train_moe_lm" in each)
    path, option, count = shlex.split(command)[3:]
    assert (option, count) == ("--expert-parallel", "2")
    assert f'"{option}"' in (ROOT / path).read_text(encoding="utf-8")

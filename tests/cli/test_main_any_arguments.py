"""Every command ends in a documented way, whatever its arguments are."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mxpert.cli import bench, demo, demo_layers, main, tune
from mxpert.cli.doctor import command
from mxpert.cli.main import app

pytest.importorskip("transformers")
from mxpert.cli import eval as eval_module

runner = CliRunner()
WORDS = """
0 -1 -0 1 16 nan inf 1e308 2147483648 ١٢ 1,,2 1,1 , bf16 a8w4,mxfp8 A16W4 layer [red] [/] é😀 - --
--json . .. / /dev/null /nowhere/x file folder pipe cpu cuda:99 meta auto gpt-oss-20b 4,2,64,64
0,0,0,0 reference triton nvidia-h200 floor ceil %s {0}
"""
NASTY = ["", " ", "a b", "9" * 5000, "x" * 5000, "\udcff", *WORDS.split()]
OPTIONS = {
    "doctor": "--json",
    "demo": "--checkpoint --output --tokens --layers --backend --json",
    "bench": "--model --tokens --format --stage --routing --backend --scale --output --json",
    "tune": (
        "--model --shape --tokens --format --time-budget --output --backend --commit --target "
        "--json --dry-run --force"
    ),
    "inspect": "--source --layer --weight-rounding --json",
    "eval": (
        "--text --format --weight-format --context --max-tokens --batch --device --json --plot "
        "--bytes"
    ),
    "quantize": "--scale-rule --device --json",
    "convert": "--container --json",
}
FLAGS = {"--dry-run", "--force", "--bytes"}


def mkdir_inside(
    folder: Path, mkdir: Callable[..., None], path: Any, *args: Any, **kw: Any
) -> None:
    """`os.mkdir`, refused outside of `folder`: `demo --output /nowhere/x` would make it as root."""
    if not Path(path).absolute().is_relative_to(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    mkdir(path, *args, **kw)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to be in, and commands whose work is left out: what is fuzzed is arguments."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")

    def done(*_: object, **__: object) -> None:
        raise typer.Exit(0)

    for module, name in (
        (demo, "run_demo"),
        (demo_layers, "write_demo_checkpoint"),
        (bench, "run_bench"),
        (tune, "run_tune"),
        (eval_module, "load_dense"),
    ):
        monkeypatch.setattr(module, name, done)
    monkeypatch.setattr(os, "mkdir", functools.partial(mkdir_inside, tmp_path, os.mkdir))
    for name in ("examine_toolchain", "examine_operations"):  # the machine stays the same
        monkeypatch.setattr(command, name, functools.cache(getattr(command, name)))
    yield tmp_path
    for entry in tmp_path.iterdir():
        entry.chmod(0o700)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", OPTIONS)
def test_any_arguments_end_in_a_documented_way(command: str, sandbox: Path) -> None:
    """Exit code 0, 1 or 2, no traceback, no hang; 100 calls of each command."""
    value = st.sampled_from(NASTY) | st.text(max_size=8)
    option = st.sampled_from(OPTIONS[command].split()).flatmap(
        lambda name: st.just([name]) if name in FLAGS else st.tuples(st.just(name), value)
    )

    @settings(
        max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(option, max_size=4), st.lists(value, max_size=2))
    def check(options: list[Any], positional: list[str]) -> None:
        arguments = [part.replace("\0", "") for each in options for part in each]
        outcome = runner.invoke(app, [command, *arguments, *positional])
        assert outcome.exit_code in (0, 1, 2), (arguments, positional, outcome.output)
        assert "Traceback" not in outcome.output
        if outcome.exit_code == 2:
            assert outcome.stderr.strip(), (arguments, positional)

    check()
    assert main.COMMANDS.keys() == OPTIONS.keys()

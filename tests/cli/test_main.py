"""The command group: help without imports, versions, one-line errors, `doctor`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import mxpert
from mxpert.cli import main
from mxpert.errors import UnsupportedError, message

ROOT = Path(__file__).resolve().parents[2]
runner = CliRunner()


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from mxpert.cli.main import app; "
        "print(CliRunner().invoke(app, ['--help']).output); "
        "print([m for m in sys.modules if m.startswith('mxpert.cli.') or m == 'transformers'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in main.COMMANDS:
        assert name in done.stdout
    assert done.stdout.strip().endswith("['mxpert.cli.streams', 'mxpert.cli.main']")


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
@pytest.mark.parametrize("command", ["", *main.COMMANDS])
def test_examples_stand_each_on_a_line(
    command: str, rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.core.HAS_RICH", rich, raising=False)
    monkeypatch.setenv("COLUMNS", "100")  # narrower ones continue a long example on the next line
    outcome = runner.invoke(main.app, [*command.split(), "--help"])
    assert outcome.exit_code == 0, outcome.output
    *_, last = outcome.output.rstrip().partition("Examples:\n")
    lines = last.splitlines()
    assert len(lines) >= 2, outcome.output
    assert all(line.startswith(f"  mxpert {command}") for line in lines)
    assert outcome.output.count("Examples:") == 1


@pytest.mark.parametrize("part", ["--help", "mistake", "files"])
def test_eval_without_transformers(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Help and mistakes need no package; only loading does."""
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("mxpert.cli.eval", "mxpert.integrations.transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoTransformers(), *sys.meta_path])
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "text").write_text("text")
    arguments = {
        "--help": ["--help"],
        "mistake": ["nowhere", "--text", str(tmp_path / "text")],
        "files": [str(tmp_path), "--text", str(tmp_path / "text")],
    }[part]
    outcome = runner.invoke(main.app, ["eval", *arguments])
    assert outcome.exit_code == (0 if part == "--help" else main.EXIT_USER_ERROR)
    said = {"--help": "Examples:", "mistake": "nowhere — need", "files": "need transformers, got"}
    assert said[part] in outcome.output
    assert "Traceback" not in outcome.output


class NoTransformers:
    """Transformers is not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_version() -> None:
    assert runner.invoke(main.app, ["--version"]).output.strip() == f"mxpert {mxpert.__version__}"


def test_unknown_command_is_a_usage_error() -> None:
    outcome = runner.invoke(main.app, ["dem"])
    assert outcome.exit_code == 2
    assert "demo" in outcome.output


@pytest.fixture
def failing_command(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A command group whose `doctor` raises the parameter."""

    def fail() -> None:
        raise request.param

    def load(name: str) -> object:
        single = typer.Typer()
        single.command(name)(fail)
        return typer.main.get_command(single)

    monkeypatch.setattr(main, "_load", load)
    return str(request.param)


@pytest.mark.parametrize(
    "failing_command",
    [
        pytest.param(ValueError(message("op", "x", "one", "two", "fix it")), id="value"),
        pytest.param(TypeError(message("op", "x", "one", "two")), id="type"),
        pytest.param(UnsupportedError(message("op", "backend", "one", "none")), id="unsupported"),
    ],
    indirect=True,
)
def test_library_errors_are_one_line_with_exit_code_2(failing_command: str) -> None:
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == main.EXIT_USER_ERROR
    assert outcome.output == f"error: {failing_command}\n"


@pytest.mark.parametrize(
    "failing_command", [PermissionError(13, "Permission denied", "/x/y")], indirect=True
)
def test_a_path_that_cannot_be_used_is_named(failing_command: str) -> None:
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == main.EXIT_USER_ERROR
    assert outcome.output == (
        "error: mxpert doctor: /x/y — need a path that can be used, got Permission denied\n"
    )


UNUSABLE = {
    "demo-output": (["demo", "--output", "FILE"], "demo: --output — need a folder"),
    "bench-output": (["bench", "--output", "FILE/deeper"], "bench: --output — need a folder"),
    **{
        f"{name}-json": ([*call, "--json", "FOLDER"], f"{call[0]}: --json — need a file")
        for name, call in {
            "bench": ["bench"],
            "demo": ["demo"],
            "doctor": ["doctor"],
            "tune": ["tune", "--dry-run"],
            "inspect": ["inspect", "FILE"],
            "quantize": ["quantize", "FILE", "FOLDER/new"],
            "convert": ["convert", "FILE", "FOLDER/new", "--container", "quark"],
            "eval": ["eval", "FOLDER", "--text", "FILE"],
        }.items()
    },
    "demo-backend": (["demo", "--backend", "cuda"], "demo: --backend — need one of cdna4, "),
    "bench-backend": (["bench", "--backend", "cuda"], "bench: --backend — need one of cdna4, "),
}


@pytest.mark.parametrize(("arguments", "match"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_options_are_refused_before_the_work(
    arguments: list[str], match: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    given = [
        each.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path))
        for each in arguments
    ]
    outcome = runner.invoke(main.app, given)
    assert outcome.exit_code == main.EXIT_USER_ERROR
    assert match in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failing_command", [ValueError("a bug"), KeyError("a bug")], indirect=True)
def test_other_errors_keep_their_traceback(failing_command: str) -> None:
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == main.EXIT_DEFECT
    assert "Traceback" in outcome.stderr
    assert "Error: " in outcome.stderr.splitlines()[-2]
    assert outcome.stderr.splitlines()[-1] == "error: a defect of mxpert; please report it"


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.COMMANDS, "demo", main._Lazy("demo", "demo", "planted"))

    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(main.importlib, "import_module", missing)
    outcome = runner.invoke(main.app, ["demo"])
    assert outcome.exit_code == main.EXIT_USER_ERROR
    assert "pip install transformers" in outcome.output


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("command", ["", *main.COMMANDS])
def test_help_cuts_no_word(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word of every text is there as a whole, and no line is wider than the terminal."""
    monkeypatch.setenv("COLUMNS", str(width))
    shown = runner.invoke(main.app, [*command.split(), "--help"]).output
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    parser = main._load(command) if command else typer.main.get_command(main.app)
    texts = [parser.help, parser.examples, parser.epilog]
    for parameter in parser.params:
        texts += [getattr(parameter, "help", None), ",".join(parameter.opts)]
        if isinstance(parameter.default, str) and parameter.show_default is not False:
            texts.append(parameter.default)
    if not command:
        texts += [text for name, entry in main.COMMANDS.items() for text in (name, entry.summary)]
    found = set(words(shown.replace("│", " ")))
    assert not set(words(" ".join(filter(None, texts)))) - found


def words(text: str) -> list[str]:
    return re.sub(r"[\[\];,]", " ", text.replace("`", "")).split()

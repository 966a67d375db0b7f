"""Run the tests of Transformers models on the oldest and the newest release that mxpert admits.

Each release gets an environment of its own on top of this one: torch and pytest are this one's,
Transformers and what it needs in other versions are installed above. The newest is whatever the
package index has today, without pins, constraints and local wheels, so a red run may be news. Both
run at the same time. The last line is the summary; the exit status is 0 only if all pass.

    python tests/integrations/run_versions.py [pytest arguments]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-transformers"
WITHOUT_MODELS = tuple(
    f"tests/integrations/checkpoints/test_{name}.py"
    for name in (
        "containers_exact",
        "containers_planted",
        "containers_refused",
        "expert_matrices",
        "nvfp4_casts",
        "scale_counts",
        "stated_quantization",
    )
)
"""Files of tests that pass without Transformers: `make test` has run them."""
LEFT_OUT = ("tests/integrations/serving", *WITHOUT_MODELS)
TESTS = ("tests/integrations", *(f"--ignore={place}" for place in LEFT_OUT))
"""Every test of models and checkpoints, new files too; plug-ins have environments of their own."""
CLOSING = re.compile(r"^=* ?(\d+ [a-z].*) in [\d.]+s.*$", re.MULTILINE)
SHOWN = 6000
"""Characters of a failed run's output."""


@dataclass(frozen=True)
class Release:
    """One release and where it lives. Args: name: "oldest" or "newest". requirement: for pip."""

    name: str
    requirement: str

    @property
    def python(self) -> Path:
        return FOLDER / self.name / "bin" / "python"

    def install(self) -> str:
        """Bring the environment up to date; returns the version."""
        if not self.python.exists():
            run(sys.executable, "-m", "venv", "--without-pip", FOLDER / self.name)
            site = next((FOLDER / self.name).glob("lib/python*/site-packages"))
            (site / "inherited.pth").write_text(f"{sysconfig.get_path('purelib')}\n", "utf-8")
        pip = (sys.executable, "-m", "pip", "--python", self.python, "--no-input")
        options = ("--quiet", "--disable-pip-version-check", "--upgrade")
        run(*pip, "install", *options, self.requirement, environment=plain_index())
        return run(self.python, "-c", "import transformers; print(transformers.__version__)").split(
            "\n"
        )[-2]

    def start(self, arguments: list[str]) -> subprocess.Popen[str]:
        """The tests, in the environment."""
        command = (self.python, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider")
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*map(str, command), "-m", "not gpu", *TESTS, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def run(*command: object, environment: dict[str, str] | None = None) -> str:
    """Standard output of a command; ends the program with its messages if it fails."""
    done = subprocess.run(
        [*map(str, command)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def plain_index() -> dict[str, str]:
    """The environment of a pip that asks the configured index, and nothing else on this machine."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    index = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    plain = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_CONSTRAINT": ""}
    return os.environ | plain | ({"PIP_INDEX_URL": index} if index else {})


def releases() -> list[Release]:
    """The bounds of pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (requirement,) = extras["optional-dependencies"]["transformers"]
    oldest = re.search(r">=([\d.]+)", requirement)
    assert oldest, requirement
    return [Release("oldest", f"transformers=={oldest[1]}"), Release("newest", requirement)]


def main(arguments: list[str]) -> int:
    begin, found = time.monotonic(), releases()
    versions = [release.install() for release in found]
    print(f"Transformers {' and '.join(versions)} installed", flush=True)
    processes = [release.start(arguments) for release in found]
    summary, status = [], 0
    for version, process in zip(versions, processes, strict=True):
        output, _ = process.communicate()
        counts = CLOSING.findall(output)
        summary.append(f"Transformers {version}: {counts[-1] if counts else 'no tests ran'}")
        if process.returncode:
            status = 1
            print(f"--- Transformers {version}\n{output[-SHOWN:]}", flush=True)
    print(f"{'; '.join(summary)} ({time.monotonic() - begin:.0f} s)")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

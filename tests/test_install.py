"""What pip resolves for this project, above all beside a torch that brings its own Triton.

Packages are stand-ins of a few bytes in a local folder: no index is asked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SMALL = ("numpy", "safetensors", "typer", "rich")
CUDA = {"cuda-core": "1.99"}
"""What NVIDIA GPUs alone need."""
ROCM = {"torch": ("2.13.0+rocm7.0", "triton-rocm==3.7.1"), "triton-rocm": ("3.7.1", None)}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is required on Linux alone")


def write_wheel(folder: Path, name: str, version: str, requires: str | None = None) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requires}"] * (requires is not None)
    module = {"triton-rocm": "triton"}.get(name, name)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", f"__version__ = {version!r}\n")
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(
            f"{stem}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Stand-ins for every dependency, at versions inside and outside of the bounds."""
    for name in SMALL:
        write_wheel(tmp_path, name, "99.0")
    for version in ("0.7", "1.99", "2.0"):
        write_wheel(tmp_path, "cuda-core", version)
    for version in ("3.5.0", "3.6.0", "3.9.0", "3.9.1", "3.10.0"):
        write_wheel(tmp_path, "triton", version)
    return tmp_path


def resolve(packages: Path, *requirements: str) -> dict[str, str]:
    """Version by distribution that pip would install into an empty environment."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--quiet",
            "--no-index",
            "--ignore-installed",
            "--disable-pip-version-check",
            "--find-links",
            str(packages),
            "--report",
            "-",
            *requirements,
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=packages,
        env={"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null"},
    )
    report = json.loads(done.stdout)
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in report["install"]}


def test_pip_takes_the_newest_release_inside_the_bounds(packages: Path) -> None:
    for version in ("2.10.0", "2.11.0", "2.15.2", "2.16.0"):
        write_wheel(packages, "torch", version)
    found = resolve(packages, *PROJECT["dependencies"])
    small = dict.fromkeys(SMALL, "99.0")
    assert found == {"torch": "2.15.2", "triton": "3.9.1"} | CUDA | small


def test_the_pins_belong_together(packages: Path) -> None:
    """torch's CUDA builds ask for one Triton each; every index but PyTorch's own has these."""
    for version, triton in (("2.11.0", "3.6.0"), ("2.13.0", "3.7.1"), ("2.15.0", "3.9.0")):
        write_wheel(packages, "torch", version, f"triton=={triton}")
    write_wheel(packages, "triton", "3.7.1")
    write_wheel(packages, "numpy", "2.3.5")
    found = resolve(packages, "-c", str(ROOT / "constraints.txt"), *PROJECT["dependencies"])
    assert (found["torch"], found["triton"]) == ("2.11.0", "3.6.0"), "the measured pair"


def test_beside_a_rocm_torch_pip_would_add_a_second_triton(packages: Path) -> None:
    """Two distributions then write the module `triton`: why the guide says --no-deps."""
    for name, (version, requires) in ROCM.items():
        write_wheel(packages, name, version, requires)
    found = resolve(packages, *PROJECT["dependencies"])
    assert found["torch"] == "2.13.0+rocm7.0", "the bounds admit it"
    assert {"triton", "triton-rocm"} <= found.keys()


def test_the_guide_for_rocm_leaves_its_triton_alone(packages: Path) -> None:
    """Its commands: torch; this project without dependencies; the small dependencies by name."""
    for name, (version, requires) in ROCM.items():
        write_wheel(packages, name, version, requires)
    guide = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    section = re.search(r"## AMD\n(.*?)\n## ", guide, re.S)
    assert section is not None
    commands = re.findall(r"^pip install (.*)$", section[1], re.M)
    assert commands[0] == "--no-deps ."
    named = commands[1].split()
    required = {re.split(r"[<>=;]", each)[0].strip() for each in PROJECT["dependencies"]}
    assert set(named) == required - {"torch", "triton", *CUDA}
    found = resolve(packages, "torch", *named)
    assert found == {"torch": "2.13.0+rocm7.0", "triton-rocm": "3.7.1"} | dict.fromkeys(
        SMALL, "99.0"
    )

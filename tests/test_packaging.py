"""What a release contains: sdist and wheel, built from a copy of the checkout."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import mxpert

ROOT = Path(__file__).resolve().parent.parent
BUILD = "from setuptools import build_meta; print(build_meta.build_{kind}({out!r}))"
NOT_COPIED = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "dist", "reports", "*.egg-info", "results"
)


def built(kind: str, source: Path, out: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind=kind, out=str(out))],
        cwd=source,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, work / "copy", ignore=NOT_COPIED)
    return built("sdist", work / "copy", work)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, which must hold all that the wheel needs."""
    work = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(work, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return built("wheel", work / sdist.name.removesuffix(".tar.gz"), work)


@pytest.fixture(scope="module")
def sdist_names(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_string(archive.read(name).decode())


def test_sdist_has_changelog_docs_and_examples(sdist_names: set[str]) -> None:
    wanted = {
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "RELEASING.md",
        "LICENSE",
        "pyproject.toml",
    }
    for folder in ("docs", "examples"):
        wanted |= {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".md", ".py", ".png")
        }
    assert wanted <= sdist_names, sorted(wanted - sdist_names)


def test_archives_have_no_tests(sdist_names: set[str], wheel_names: set[str]) -> None:
    for names in (sdist_names, wheel_names):
        stray = [
            name
            for name in names
            if re.match(r"(tests|benchmarks)/|.*(/|^)test_\w+\.py|.*conftest\.py", name)
        ]
        assert not stray


def test_wheel_holds_the_package_and_nothing_else(wheel_names: set[str]) -> None:
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "mxpert").rglob("*")
        if path.suffix in (".py", ".json") or path.name == "py.typed"
    }
    assert {name for name in wheel_names if ".dist-info/" not in name} == package


def test_metadata_names_the_project(metadata: Message) -> None:
    assert metadata["Version"] == mxpert.__version__
    assert metadata["Author"] == "mxpert contributors"
    urls = dict(entry.split(", ") for entry in metadata.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(urls)
    assert all(url.startswith("https://github.com/mxpert/mxpert") for url in urls.values())
    assert metadata["License-File"] == "LICENSE"


def test_page_of_the_index_has_absolute_links_only(metadata: Message) -> None:
    """The package index shows the README outside the repository."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", str(metadata.get_payload()), flags=re.DOTALL)
    relative = [
        target
        for target in re.findall(r"\]\(([^)]+)\)", text)
        if not target.startswith(("https://", "#"))
    ]
    assert not relative


def test_classifiers_claim_the_pythons_that_ci_runs(metadata: Message) -> None:
    claimed = {
        entry.rpartition(" ")[2]
        for entry in metadata.get_all("Classifier", [])
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", entry)
    }
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert claimed == set(re.findall(r'python-version: "(3\.\d+)"', workflow))


def test_changelog_has_this_version_on_top() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", text, re.MULTILINE)
    assert newest
    assert newest[1] == mxpert.__version__


def test_version_has_one_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mxpert.__version__"}

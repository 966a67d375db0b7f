"""What a release contains: sdist and wheel, built from a copy of the checkout."""

from __future__ import annotations

import email
import os
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
BUILD = "from hatchling import build; print(build.build_{kind}({out!r}))"
REPOSITORY = "https://github.com/mxpert/mxpert/blob/main/"
PICTURES = "https://raw.githubusercontent.com/mxpert/mxpert/main/"
RELATIVE = """
[guide](docs/install.md) and [part](docs/install.md#amd),
[above](#install), [far](https://a.b/c)
![picture](docs/figures/layer.svg)
[![both](docs/both.png)](docs/both.md)
<img alt="x" src="docs/light.svg"> <source srcset="docs/dark.svg">
<a href="docs/a.md">a</a>
"""
"""Appended to the README of the copy: links of every form."""
ABSOLUTE = f"""
[guide]({REPOSITORY}docs/install.md) and [part]({REPOSITORY}docs/install.md#amd),
[above](#install), [far](https://a.b/c)
![picture]({PICTURES}docs/figures/layer.svg)
[![both]({PICTURES}docs/both.png)]({REPOSITORY}docs/both.md)
<img alt="x" src="{PICTURES}docs/light.svg"> <source srcset="{PICTURES}docs/dark.svg">
<a href="{REPOSITORY}docs/a.md">a</a>
"""
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
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, named as a clone is."""
    work = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT, work / "mxpert", ignore=NOT_COPIED)
    with (work / "mxpert" / "README.md").open("a", encoding="utf-8") as readme:
        readme.write(RELATIVE)
    return work / "mxpert"


@pytest.fixture(scope="module")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", clone, tmp_path_factory.mktemp("sdist"))


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
        if path.suffix in (".py", ".json", ".cu", ".cuh") or path.name == "py.typed"
    }
    assert {name for name in wheel_names if ".dist-info/" not in name} == package


def test_an_editable_install_is_a_path(clone: Path, tmp_path: Path) -> None:
    """So type checkers and IDEs follow it, and the folder above may have a folder `mxpert`."""
    with zipfile.ZipFile(built("editable", clone, tmp_path)) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        (path_file,) = files
        assert path_file.endswith(".pth")
        assert Path(archive.read(path_file).decode().strip()) == clone
        archive.extract(path_file, tmp_path / "site")
    code = (
        "import importlib.util, site\n"
        f"site.addsitedir({str(tmp_path / 'site')!r})\n"
        "print(importlib.util.find_spec('mxpert').origin)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # without the packages that are installed here
        cwd=clone.parent,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.strip() == str(clone / "mxpert" / "__init__.py")


def test_metadata_names_the_project(metadata: Message) -> None:
    assert metadata["Version"] == mxpert.__version__
    assert metadata["Author"] == "mxpert contributors"
    urls = dict(entry.split(", ") for entry in metadata.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(urls)
    assert all(url.startswith("https://github.com/mxpert/mxpert") for url in urls.values())
    assert metadata["License-File"] == "LICENSE"


def test_page_of_the_index_has_absolute_links_only(metadata: Message) -> None:
    """The package index shows the README outside the repository."""
    page = str(metadata.get_payload())
    assert ABSOLUTE in page
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text)
    urls = [url for pair in targets for url in pair if url]
    assert not [url for url in urls if not url.startswith(("https://", "#"))]


def test_page_of_the_index_has_the_code_as_it_is(metadata: Message) -> None:
    blocks = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert blocks.findall(str(metadata.get_payload())) == blocks.findall(readme) != []


EMULATOR = ROOT / "gfx950-emulator"


@pytest.fixture(scope="module")
def emulator_wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second distribution's wheel, built from its sdist."""
    work = tmp_path_factory.mktemp("emulator")
    sdist = built("sdist", clone / "gfx950-emulator", work)
    with tarfile.open(sdist) as archive:
        archive.extractall(work, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return built("wheel", work / sdist.name.removesuffix(".tar.gz"), work)


def test_the_emulator_is_a_distribution_of_its_own(emulator_wheel: Path) -> None:
    package = {
        path.relative_to(EMULATOR).as_posix()
        for path in (EMULATOR / "gfx950emu").rglob("*")
        if path.suffix in (".py", ".s", ".hsaco", ".typed")
    }
    with zipfile.ZipFile(emulator_wheel) as archive:
        names = set(archive.namelist())
        name = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_string(archive.read(name).decode())
    assert {name for name in names if ".dist-info/" not in name} == package
    assert metadata["Name"] == "gfx950-emulator"
    assert metadata["License-File"] == "LICENSE"
    assert (EMULATOR / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    needs = [re.match(r"[\w-]+", entry) for entry in metadata.get_all("Requires-Dist", [])]
    assert [found[0] for found in needs if found] == ["numpy", "torch"]
    page = str(metadata.get_payload())
    assert not [url for url in re.findall(r"\]\(([^)]+)\)", page) if not url.startswith("https://")]


def test_mxpert_is_without_the_emulator(wheel_names: set[str], sdist_names: set[str]) -> None:
    assert not [name for name in wheel_names | sdist_names if "gfx950emu" in name]


def test_actions_are_pinned_by_hash() -> None:
    """A tag can be moved to other code; a commit cannot."""
    workflows = (ROOT / ".github/workflows").glob("*.yml")
    used = [
        line.strip()
        for path in workflows
        for line in path.read_text(encoding="utf-8").splitlines()
        if "uses:" in line
    ]
    assert used
    pinned = re.compile(r"(- )?uses: [\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
    assert not [line for line in used if not pinned.fullmatch(line)]


def test_classifiers_claim_the_pythons_that_ci_runs(metadata: Message) -> None:
    claimed = {
        entry.rpartition(" ")[2]
        for entry in metadata.get_all("Classifier", [])
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", entry)
    }
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    setups = re.findall(r"python-version: \|\n((?: +3\.\d+\n)+)", workflow)
    assert claimed == set(re.findall(r"3\.\d+", "".join(setups)))
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier", [])


def test_changelog_has_this_version_on_top() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", text, re.MULTILINE)
    assert newest
    assert newest[1] == mxpert.__version__


def test_version_has_one_source() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", mxpert.__version__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"] == {"path": "mxpert/__init__.py"}


def test_plugins_and_command_are_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        text = archive.read(name).decode()
    for group, target in (
        ("console_scripts", "mxpert.cli.main:app"),
        ("vllm.general_plugins", "mxpert.integrations.vllm:register"),
        ("sglang.srt.plugins", "mxpert.integrations.sglang:register"),
    ):
        assert f"[{group}]\nmxpert = {target}\n" in text

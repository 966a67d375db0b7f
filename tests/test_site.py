"""The documentation site: every public name with its example, and no dead link in any document."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

import mxpert
import mxpert.distributed
import mxpert.distributed.planner
import mxpert.formats
import mxpert.training
from support.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = (
    mxpert,
    mxpert.configs,
    mxpert.training,
    mxpert.distributed,
    mxpert.distributed.planner,
    mxpert.formats,
)
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
)
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


SITE = load_script("docs/_site.py")


@cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def anchors(path: str) -> frozenset[str]:
    """Anchors of a document: its headings as GitHub names them, and names of the API reference."""
    text = CODE.sub("", text_of(path))
    found: Counter[str] = Counter()
    names = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return frozenset(names)


def dead_links(path: str, text: str) -> list[str]:
    """Links to files of the repository that are not there, or to anchors that they lack."""
    dead = []
    for target in SITE.links(text):
        local = SITE.local_target(target, path)
        if local is None:
            continue
        file, anchor = local
        if not (ROOT / file).exists() or (
            anchor and file.endswith(".md") and anchor not in anchors(file)
        ):
            dead.append(target)
    return dead


def listed() -> list[str]:
    """Every name of the API reference."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    return [
        name
        for page in pages
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def resolved(name: str) -> object:
    """The object with a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def public_names() -> list[str]:
    """`mxpert.fused_moe`, …; what two modules export is listed under the first."""
    names = {}
    for module in PUBLIC:
        for name in module.__all__:
            if module is mxpert or name not in mxpert.__all__:
                names[f"{module.__name__}.{name}"] = None
    return list(names)


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links_lead_somewhere(path: str) -> None:
    assert not dead_links(path, text_of(path))


def missing_names(text: str) -> list[str]:
    """Names in inline code that do not exist: `mxpert.x`, and `Class.x` of public classes."""
    classes = {
        name.rpartition(".")[2]: resolved(name)
        for name in public_names()
        if inspect.isclass(resolved(name))
    }
    gone = []
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", CODE.sub("", text)):
        for name in re.findall(r"(?<![\w./-])(?:mxpert(?:\.\w+)+|[A-Z]\w+\.\w+)", code):
            owner, _, member = name.partition(".")
            if owner == "mxpert":
                try:
                    pkgutil.resolve_name(name)
                except (AttributeError, ImportError):
                    gone.append(name)
            elif owner in classes:
                fields = getattr(classes[owner], "__dataclass_fields__", {})
                if not hasattr(classes[owner], member) and member not in fields:
                    gone.append(name)
    return gone


def test_missing_names_are_found() -> None:
    text = "`mxpert.nothing(x)`, `Placement.of(maps)`, `mxpert.fused_moe` and `Placement.owners`"
    assert missing_names(text) == ["mxpert.nothing", "Placement.of"]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path != "CHANGELOG.md"])
def test_names_in_the_text_exist(path: str) -> None:
    """But for the changelog, which names what was."""
    assert not missing_names(text_of(path))


@pytest.mark.parametrize(
    "text",
    [
        "[a](docs/nowhere.md)",
        "[`a`](CHANGELOG.md#nowhere)",
        "![a](docs/figures/nowhere.png)",
        "[a](#nowhere)",
        '<img alt="a" src="docs/figures/nowhere.svg">',
        '<source media="(max-width: 700px)" srcset="docs/figures/nowhere.svg">',
        "[a](https://github.com/mxpert/mxpert/blob/main/docs/nowhere.md)",
        "[a](https://github.com/mxpert/mxpert/blob/main/CONTRIBUTING.md#nowhere)",
        "![a](https://raw.githubusercontent.com/mxpert/mxpert/main/docs/figures/nowhere.png)",
    ],
)
def test_dead_links_are_found(text: str) -> None:
    assert len(dead_links("README.md", text)) == 1


def test_examples_of_the_hooks_hold() -> None:
    outcome = doctest.testmod(SITE)
    assert outcome.attempted
    assert not outcome.failed


def test_links_in_code_are_none() -> None:
    text = "`kernel[grid](args)` and\n\n```python\nkernel[grid](args)\n```\n\n[`x`](README.md)\n"
    assert SITE.links(text) == ["README.md"]


@pytest.mark.parametrize("source", SITE.documents())
def test_pages_of_the_site_link_to_pages_or_to_the_repository(source: str) -> None:
    """After rewriting, no relative link leaves the site."""
    page = SITE.PAGES.get(source, source.removeprefix("docs/"))
    kept = {SITE.PAGES.get(each, each.removeprefix("docs/")) for each in SITE.documents()}
    kept |= SITE.outside_images()
    for kind in SITE.IMAGES:
        found = (ROOT / "docs").rglob(f"*{kind}")
        kept |= {path.relative_to(ROOT / "docs").as_posix() for path in found}
    for target in SITE.links(SITE.rewritten(text_of(source), source)):
        local = None if "://" in target else SITE.local_target(target, page)
        assert local is None or local[0] in kept, target


def test_readme_links_follow_it_to_the_site() -> None:
    repository = SITE.REPOSITORY
    assert (
        SITE.rewritten(f"[a]({repository}/blob/main/docs/training.md#x)", "README.md")
        == "[a](training.md#x)"
    )
    assert (
        SITE.rewritten("[a](../mxpert/core/problem.py)", "docs/tuning.md")
        == f"[a]({repository}/blob/main/mxpert/core/problem.py)"
    )
    assert (
        SITE.rewritten("[a](../../CONTRIBUTING.md)", "docs/dev/architecture.md")
        == "[a](../contributing.md)"
    )
    assert SITE.rewritten("`[a](../x.py)`", "docs/tuning.md") == "`[a](../x.py)`"


@pytest.mark.parametrize(
    "source, address, built",
    [
        ("README.md", "docs/figures/layer.svg", "figures/layer.svg"),
        ("docs/tuning.md", "figures/layer.svg", "../figures/layer.svg"),
        ("docs/api/index.md", "../figures/layer.svg", "../figures/layer.svg"),
        ("README.md", "https://example.org/a.svg", "https://example.org/a.svg"),
    ],
)
def test_pictures_in_html_lead_from_the_built_page(source: str, address: str, built: str) -> None:
    """MkDocs rewrites links of Markdown alone; pages but for index.md are folders of the site."""
    text = '<source srcset="{0}"><img src="{0}" alt="a">'
    assert SITE.rewritten(text.format(address), source) == text.format(built)


def test_examples_of_the_reference_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompts; what an example prints is a comment."""
    griffe = SimpleNamespace(Extension=object, Object=object)  # of the environment of `make docs`
    monkeypatch.setitem(sys.modules, "griffe", griffe)
    docstrings = load_script("docs/_docstrings.py")
    assert not doctest.testmod(docstrings).failed
    for name in listed():
        text = docstrings.fenced(inspect.getdoc(resolved(name)) or "")
        assert ">>>" not in text, name
        for block in re.findall(r"^ *```python\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
            compile(textwrap.dedent(block), name, "exec")


def test_navigation_names_every_page() -> None:
    page = r"^ +- (?:[^:\n]+: )?(?!https:)(\S+\.md)$"
    entries = re.findall(page, text_of("mkdocs.yml"), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert Counter(entries) == Counter(pages | set(SITE.PAGES.values()))


def test_api_reference_lists_every_public_name() -> None:
    missing = sorted(set(public_names()) - set(listed()))
    assert not missing, f"add these to a page of docs/api: {missing}"


def test_api_reference_lists_names_once_and_none_that_is_gone() -> None:
    assert [name for name, count in Counter(listed()).items() if count > 1] == []
    for name in listed():
        resolved(name)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in listed()
        if inspect.isroutine(resolved(name)) or inspect.isclass(resolved(name))
    ],
)
def test_functions_and_classes_of_the_reference_have_an_example(name: str) -> None:
    tests = doctest.DocTestFinder().find(resolved(name), name)
    assert any(test.examples for test in tests), f"{name}: its docstring needs an example"

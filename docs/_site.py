"""MkDocs hooks: documents from outside docs/ become pages, and links are rewritten for the site.

README, CHANGELOG, CONTRIBUTING and benchmarks/README.md are written for the repository. The site
shows them too. A link to a file that the site holds becomes a link to its page; a link to any other
file of the repository becomes a link to GitHub; an image from outside docs/ is copied.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/mxpert/mxpert"
RAW = "https://raw.githubusercontent.com/mxpert/mxpert"
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Documents outside docs/ that are pages of the site, and the page's name."""

IMAGES = (".png", ".svg")
CODE_OR_LINK = re.compile(
    r"(?P<fence>^```.*?^```$)|(?P<code>`[^`\n]+`)|\]\((?P<target>[^)\s]+)\)"
    r'|(?P<name>\b(?:src|srcset|href))="(?P<value>[^"\s]+)"',
    re.DOTALL | re.MULTILINE,
)
"""Code, whose links are none; a link or image of Markdown; an address in an HTML element."""

IN_REPOSITORY = re.compile(
    f"(?:{re.escape(REPOSITORY)}/(?:blob|tree|raw)|{re.escape(RAW)})/main/(?P<path>[^#]*)"
)


def links(markdown: str) -> list[str]:
    """Targets of the links and images of a document, without those inside code."""
    found = (each["target"] or each["value"] for each in CODE_OR_LINK.finditer(markdown))
    return [target for target in found if target]


def local_target(target: str, source: str) -> tuple[str, str] | None:
    """(path from the repository's root, anchor) of a link, None where it leads elsewhere.

    `source` is the document that holds the link, from the root.

    >>> local_target("../benchmarks/README.md#peers", "docs/performance.md")
    ('benchmarks/README.md', 'peers')
    >>> local_target("https://github.com/mxpert/mxpert/blob/main/docs/training.md", "README.md")
    ('docs/training.md', '')
    >>> local_target("https://example.org/", "README.md") is None
    True
    """
    address, _, anchor = target.partition("#")
    inside = IN_REPOSITORY.fullmatch(address)
    if inside:
        return posixpath.normpath(inside["path"]), anchor
    if "://" in target or target.startswith("mailto:"):
        return None
    if not address:
        return source, anchor
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), address)), anchor


def site_name(path: str) -> str | None:
    """Where the site keeps a file of the repository; None where it does not."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and path.endswith((".md", *IMAGES)):
        return path.removeprefix("docs/")
    return path if path.endswith(IMAGES) else None


def folder_of(page: str) -> str:
    """The folder of a built page, where the browser reads its addresses.

    >>> folder_of("index.md"), folder_of("api/index.md"), folder_of("dev/architecture.md")
    ('', 'api', 'dev/architecture')
    """
    stem = page.removesuffix(".md")
    return posixpath.dirname(page) if posixpath.basename(stem) == "index" else stem


def rewritten(markdown: str, source: str) -> str:
    """A document of the repository with its links as the site needs them."""
    page = PAGES.get(source, source.removeprefix("docs/"))

    def replace(found: re.Match[str]) -> str:
        target, is_html = found["target"] or found["value"], bool(found["value"])
        local = target and local_target(target, source)
        if not local or target.startswith("#"):
            return found[0]
        path, anchor = local
        kept = site_name(path)
        if kept is None:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            new = f"{REPOSITORY}/{kind}/main/{path}"
        else:
            # MkDocs finds the place of a link in Markdown, but leaves HTML as it is.
            new = posixpath.relpath(
                kept, (folder_of(page) if is_html else posixpath.dirname(page)) or "."
            )
        new += "#" + anchor if anchor else ""
        return f'{found["name"]}="{new}"' if is_html else f"]({new})"

    return CODE_OR_LINK.sub(replace, markdown)


def documents() -> list[str]:
    """Every document of the site, as a path from the repository's root."""
    inside = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
    return [*PAGES, *inside]


def outside_images() -> set[str]:
    """Images outside docs/ that a document of the site shows."""
    found = set()
    for source in documents():
        for target in links((ROOT / source).read_text(encoding="utf-8")):
            local = local_target(target, source)
            if local and local[0].endswith(IMAGES) and not local[0].startswith("docs/"):
                found.add(local[0])
    return found


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages and images from outside docs/ (called by MkDocs)."""
    from mkdocs.structure.files import File

    generated: Callable[..., Any] = File.generated
    for source, page in PAGES.items():
        files.append(generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for image in sorted(outside_images()):
        if (ROOT / image).is_file():
            files.append(generated(config, image, abs_src_path=os.fspath(ROOT / image)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrites the links of a page (called by MkDocs)."""
    del config, files
    name = page.file.src_uri
    source = next((source for source, known in PAGES.items() if known == name), f"docs/{name}")
    # Markdown inside HTML blocks is read where the block asks for it.
    return rewritten(markdown, source).replace("<details>", '<details markdown="1">')

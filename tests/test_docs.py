"""What the documents show runs: README, CONTRIBUTING and docs code blocks, doctests, figures."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mxpert

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS_TRITON = ("mxpert.backends.triton", "mxpert.backends.hopper", "mxpert.testing")
NEEDS_TRANSFORMERS = (
    "mxpert.integrations.container_checkpoints",
    "mxpert.integrations.dense_checkpoints",
    "mxpert.integrations.transformers",
    "mxpert.integrations.models.convert",
    "mxpert.integrations.models.evaluation",
    "mxpert.cli.eval",
)
NEEDS_VLLM = tuple(
    f"mxpert.integrations.vllm.{name}"
    for name in ("_configs", "_experts", "_layer_formats", "_method", "_refusals")
)
NEEDS_SGLANG = ("mxpert.integrations.sglang._method",)


def pages() -> list[Path]:
    return [path for path in DOCUMENTS if BLOCK.search(path.read_text(encoding="utf-8"))]


def modules() -> list[str]:
    return ["mxpert", *(found.name for found in pkgutil.walk_packages(mxpert.__path__, "mxpert."))]


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_code_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order, in one namespace and an empty folder."""
    text = path.read_text(encoding="utf-8")
    for package in ("transformers", "torchao"):
        if package in "".join(BLOCK.findall(text)):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    for index, block in enumerate(BLOCK.findall(text), start=1):
        exec(compile(block, f"<{path.name}, block {index}>", "exec"), namespace)


@pytest.mark.parametrize(
    "script", sorted((ROOT / "docs" / "figures").glob("*.py")), ids=lambda path: path.stem
)
def test_figures_are_drawn_by_their_script(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    drawn = sorted(tmp_path.iterdir())
    assert drawn
    for path in drawn:
        committed = script.parent / path.name
        assert committed.is_file()
        if path.suffix == ".svg":
            assert path.read_bytes() == committed.read_bytes()


@pytest.mark.parametrize("tokens, added", [(16, []), (512, ["_moe_tile_schedule_kernel"])])
def test_the_picture_of_a_layer_has_its_launches(
    tokens: int, added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, for few tokens and for many: a box each, and what the legend adds."""
    pytest.importorskip("triton")
    from mxpert.core.target import on_device
    from mxpert.testing.problems import MoEShape, random_moe_problem
    from support.launches import H200, recorded_launches

    monkeypatch.syspath_prepend(ROOT / "docs" / "figures")
    steps = importlib.import_module("layer").STEPS
    shape = MoEShape(256, 256, num_experts=8, top_k=2, activation=mxpert.SwiGLU())
    problem = random_moe_problem(shape, tokens)
    layout = mxpert.formats.Layout.HOPPER_FRAGMENT
    weights = problem.weights.prepare(device="cpu", layout=layout)
    layer = {"activation": shape.activation, "activation_format": "a8w4"}
    with on_device(H200), recorded_launches() as launches:
        routing = mxpert.route_topk(torch.randn(tokens, 8), top_k=2)
        mxpert.fused_moe(problem.x, weights, *routing, **layer)
    names = [launch.kernel.__name__ for launch in launches]
    assert [name for name in names if name in added] == added
    launched = [name for name in names if name not in added]
    assert len(launched) == len(steps)
    for name, step in zip(launched, steps, strict=True):
        first, *others = step.kernel.split(" or ")
        stem = first.rpartition("_")[0]
        assert name.startswith((f"_{first}", *(f"_{stem}{other}" for other in others)))
    for launch in launches:
        if launch.kernel.__name__ == "_moe_encode_rows_kernel":
            rows = launch.arguments["codes"].shape[0]
            assert launch.arguments["codes"].dtype == torch.float8_e4m3fn
            assert launch.arguments["scale"].dtype == torch.float32
            assert launch.arguments["scale"].shape == (rows,)


def rendered_words(markdown: str) -> int:
    """Words that a reader sees: prose, tables, code and the texts of pictures.

    A word is what stands between spaces and has a letter or a digit. Addresses of links, fences,
    HTML and the rules of tables are not seen.
    """
    text = re.sub(r"<!--.*?-->", " ", markdown, flags=re.DOTALL)
    text = re.sub(r'<[^<>]*\balt="([^"]*)"[^<>]*>', r" \1 ", text)
    text = re.sub(r"</?[a-z][^<>]*>", " ", text)
    text = re.sub(r"^```\w*$", " ", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)\s]*\)", " ", text)
    text = re.sub(r"^\|[-:|]+\|$", " ", text, flags=re.MULTILINE).replace("|", " ")
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_words_are_counted_as_a_reader_does() -> None:
    prose = "# Two words\n\n<!-- unseen --> A [link of four](https://example.org/a/b) words: 7.\n"
    picture = '<picture><source srcset="a.svg"><img src="b.svg" alt="a picture"></picture>\n'
    table = "| a | b c |\n|---|---:|\n| – | 1.5 |\n"
    code = "```python\nx = f(1, 2)\n```\n"
    found = [rendered_words(text) for text in (prose, picture, table, code)]
    assert found == [8, 2, 4, 3]
    assert rendered_words("\n".join((prose, picture, table, code))) == sum(found)


def test_readme_can_be_read_in_five_minutes() -> None:
    assert rendered_words((ROOT / "README.md").read_text(encoding="utf-8")) <= 1000


def test_readme_has_its_first_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = BLOCK.findall(text)[0].strip().splitlines()
    assert len(block) <= 12, "the first example is ten lines"
    for part in ("make demo", "make test", "vllm serve", "from_pretrained", "MXMoE"):
        assert part in text


def test_readme_says_for_whom_then_shows_it_and_ends_with_limits() -> None:
    """In this order: three sentences, the picture, three ways, the commands, figures, limits."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = (
        "times as fast as the best of",
        "<picture>",
        "docs/figures/layer.svg",
        "vllm serve",
        "```python",
        "## Install",
        "pip install 'torch==2.11.*' .",
        "## Which GPU, which model",
        "<!-- measured speed-ups: begin -->",
        "benchmarks/results/nvidia-h200/moe.json",
        "## Limits",
    )
    places = [text.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)


def test_readme_links_are_relative() -> None:
    """A plain clone, a fork and a preview without a network show its pictures and pages."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "mxpert/mxpert" not in text


def test_the_weight_formats_page_says_which_are_slower_than_a_peer() -> None:
    """On average: 16-bit activations with 1024 tokens, of INT4 in groups of 32."""
    page = (ROOT / "docs/formats.md").read_text("utf-8")
    begin, end = (f"<!-- measured weight formats: {side} -->" for side in ("begin", "end"))
    lines = page.split(begin)[1].split(end)[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \w+, a\d", line)]
    assert len(rows) == 9  # five formats and two widths; no peer has NVFP4 with 8 bits
    tokens = (1, 16, 128, 1024, 8192)
    slower = {
        (name, count)
        for name, *values in rows
        for count, value in zip(tokens, values, strict=True)
        if float(value) < 1
    }
    assert slower == {("int4_g32, a16", 1024)}


DEVELOPERS_PAGES = (
    "CONTRIBUTING.md",
    "docs/add-an-architecture.md",
    "docs/dev/architecture.md",
    "docs/dev/inside-a-layer.md",
    "docs/dev/performance-log.md",
)
NAMED_PATH = re.compile(
    r"(?<![\w/.-])((?:[\w-]+/)+[\w-]+\.(?:py|md|json|txt)"
    r"|(?:mxpert|tests|docs|benchmarks)/(?:[\w-]+/)*)(?![\w<*({$])"
)


def missing_paths(text: str) -> list[str]:
    """Files and folders in code spans and blocks that neither the repository nor mxpert/ has."""
    spans = re.findall(r"```text\n.*?\n```|`[^`\n]+`", text, re.S)
    found = [path for span in spans for path in NAMED_PATH.findall(span)]
    return [
        path
        for path in found
        if not path.startswith(("tools/", "build/"))
        if not any((ROOT / start / path).exists() for start in ("", "mxpert"))
    ]


@pytest.mark.parametrize("page", DEVELOPERS_PAGES)
def test_paths_exist(page: str) -> None:
    assert missing_paths((ROOT / page).read_text(encoding="utf-8")) == []
    assert missing_paths("see `ops/moe.py`") == ["ops/moe.py"]


NOT_OURS = "<!-- another program's message -->\n"
SYMPTOM = re.compile(
    rf"(?P<other>{re.escape(NOT_OURS)})?^```text\n(?P<text>.*?)\n```$", re.M | re.S
)
GLUE = re.compile(r"^[^—]*— need |^\w+(?:Error|Warning): |…|, got |; ")
"""What joins the parts of a message: the error's class, "op: argument — need ", …"""


def strings_of_the_package() -> str:
    """Every string of the package's code, constants as well as parts of f-strings, on lines."""
    found = []
    for path in (ROOT / "mxpert").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
        found += [node.value for node in constants if isinstance(node.value, str)]
    return "\n".join(found)


def unknown_fragments(message: str, strings: str) -> list[str]:
    """Parts of a message that no string of the package has, leaving out names and numbers."""
    parts = (part.strip(" :.,") for part in GLUE.split(message))
    return [part for part in parts if " " in part and part not in strings]


def test_messages_of_troubleshooting_exist() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    symptoms = [found["text"] for found in SYMPTOM.finditer(text) if not found["other"]]
    strings = strings_of_the_package()
    assert len(symptoms) >= 15
    for message in symptoms:
        assert not unknown_fragments(message, strings), message
    told = "fused_moe: x — need two dimensions, got …; buy a larger GPU"
    assert unknown_fragments(told, strings) == ["buy a larger GPU"]


@pytest.mark.parametrize("name", modules())
def test_doctests_pass(name: str) -> None:
    if name.startswith(NEEDS_TRITON):
        pytest.importorskip("triton")
    if name in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers")
    if name in NEEDS_VLLM:
        pytest.importorskip("vllm")
    if name in NEEDS_SGLANG:
        pytest.importorskip("sglang")
    outcome = doctest.testmod(importlib.import_module(name), verbose=False)
    assert outcome.failed == 0, f"{outcome.failed} of {outcome.attempted} examples failed"


def test_doctests_exist() -> None:
    """The check above is worth something only where there are examples to run."""
    finder = doctest.DocTestFinder()
    for name in ("fused_moe", "quantize", "route_topk", "make_routing_plan"):
        tests = finder.find(getattr(mxpert, name), name)
        assert any(test.examples for test in tests), f"{name} has no example"

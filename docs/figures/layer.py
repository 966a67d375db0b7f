"""The picture of a layer, `layer.svg` for wide screens and `layer-narrow.svg` for phones:
python docs/figures/layer.py [FOLDER]. Needs Python alone.

Steps, shapes and launches are those of `fused_moe` on Hopper (`mxpert/moe/layer.py`
and `mxpert/moe/hopper/host.py`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from textwrap import wrap

WIDTHS = {4: 3, 8: 6, 16: 12, 32: 18}
"""Width of an arrow by the bits of a value."""
HEAD = 9
"""Length of an arrow's head."""

STYLE = """
text { font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.page { fill: #ffffff; }
.card { fill: #f4f6fa; stroke: #9aa6bd; }
.text { fill: #1d2533; }
.soft { fill: #4a5568; }
.title { font-weight: 700; font-size: 14.5px; fill: #1d2533; }
.data { font-weight: 600; fill: #1d2533; }
.kernel { font-family: ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace;
  font-size: 11px; fill: #4a5568; }
.b4 { fill: #1a7f4b; } .b8 { fill: #c05a00; } .b16 { fill: #2b5fd9; } .b32 { fill: #6b7280; }
.rule { stroke: #9aa6bd; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  .page { fill: #14181f; } .card { fill: #1f2631; stroke: #5b687f; }
  .text, .title, .data { fill: #eef1f6; } .soft, .kernel { fill: #b8c1d0; }
  .b4 { fill: #4fc98a; } .b8 { fill: #ff9d4d; } .b16 { fill: #7ea6ff; } .b32 { fill: #a0a8b5; }
  .rule { stroke: #5b687f; }
}
"""


@dataclass(frozen=True)
class Tensor:
    """What goes into or comes out of a step: its name and shape, what it holds, bits a value."""

    shape: str
    note: str
    bits: int


@dataclass(frozen=True)
class Step:
    """One kernel launch, with what it reads beside the result of the step before."""

    title: str
    kernel: str
    lines: tuple[str, ...]
    result: Tensor
    reads: Tensor | None = None
    second: tuple[str, ...] = ()


CODES = "8-bit codes, a float32 scale a row"
WEIGHTS = "4 bit + a scale byte per 32"
GEMM = "moe_gemm_decode or _prefill"
STEPS = (
    Step(
        "1 Route",
        "route_topk",
        ("chooses k experts and their", "weights for each token"),
        Tensor("ids, weights [T, k]", "int32, float32", 32),
        Tensor("router logits [T, E]", "float32, bf16 or fp16", 16),
    ),
    Step(
        "2 Sort",
        "routing_plan",
        ("groups rows by expert, pads", "them to blocks: P ≥ T·k"),
        Tensor("row numbers [P]", "int32, and each block's expert", 32),
    ),
    Step(
        "3 Encode",
        "moe_encode_rows",
        ("a8w4: MXFP8, a scale byte", "per 32; then a scale a row"),
        Tensor("rows [P, H]", CODES, 8),
        Tensor("x [T, H]", "bf16", 16),
    ),
    Step(
        "4 Gate/up GEMM",
        GEMM,
        ("FP8 × FP8, float32 sums",),
        Tensor("h [P, F]", "bf16", 16),
        Tensor("gate, up [E, 2F, H]", WEIGHTS, 4),
        ("activation: SwiGLU, SiLU, …",),
    ),
    Step(
        "5 Encode",
        "moe_encode_rows",
        ("quantises h as step 3", "quantises x"),
        Tensor("rows [P, F]", CODES, 8),
    ),
    Step(
        "6 Down GEMM",
        GEMM,
        ("FP8 × FP8, float32 sums;", "times the routing weight"),
        Tensor("rows [P, H]", "bf16", 16),
        Tensor("down [E, H, F]", WEIGHTS, 4),
    ),
    Step(
        "7 Combine",
        "moe_combine",
        ("sums each token's k rows", "in float32"),
        Tensor("y [T, H]", "bf16", 16),
    ),
)
LEGEND = (
    "A box is one kernel launch; with many rows the sort takes two, and a list of tiles one more.",
    "T tokens, k of E experts each; H hidden, F intermediate size; P sorted rows.",
    "a16w4: steps 3 and 5 write two 8-bit codes a value. a4w4: 4-bit values.",
    "The GEMMs put weight scales into 8-bit codes, in registers.",
    "With few rows, sums may be split: other kernels then do steps 5 and 7.",
    "An arrow is as wide as its values have bits.",
)
TITLE = "An MXFP4 layer on Hopper, from router logits to the output: seven kernel launches"


def text(x: float, y: float, words: str, kind: str = "text") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def labels(x: float, y: float, tensor: Tensor) -> list[str]:
    """A tensor's name and what it holds, on two lines."""
    return [text(x, y, tensor.shape, "data"), text(x, y + 15, tensor.note, "soft")]


def arrow(x: float, y: float, length: float, bits: int, direction: str) -> str:
    """An arrow that starts at (x, y) and points "right", "left" or "down"."""
    half, wing, shaft = WIDTHS[bits] / 2, WIDTHS[bits] / 2 + 4, length - HEAD
    side = [(0.0, half), (shaft, half), (shaft, wing)]
    outline = [*side, (length, 0.0), *((along, -across) for along, across in reversed(side))]
    place = {
        "right": lambda along, across: (x + along, y + across),
        "left": lambda along, across: (x - along, y + across),
        "down": lambda along, across: (x + across, y + along),
    }[direction]
    points = (place(*point) for point in outline)
    joined = " ".join(f"{a:g},{b:g}" for a, b in points)
    return f'<polygon points="{joined}" class="b{bits}"/>'


def height_of(step: Step) -> float:
    return 46 + 16 * (len(step.lines) + len(step.second)) + (10 if step.second else 0)


def card(step: Step, x: float, y: float, width: float, height: float) -> list[str]:
    """A box with the step's title, kernel and lines."""
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" class="card"/>',
        text(x + 10, y + 20, step.title, "title"),
        text(x + 10, y + 35, step.kernel, "kernel"),
        *(text(x + 10, y + 54 + 16 * index, line) for index, line in enumerate(step.lines)),
    ]
    end = y + 45 + 16 * len(step.lines)
    if step.second:
        parts.append(f'<path d="M{x:g} {end:g}h{width:g}" class="rule"/>')
    parts += [text(x + 10, end + 17 + 16 * index, line) for index, line in enumerate(step.second)]
    return parts


def legend(x: float, y: float, columns: int) -> tuple[list[str], float]:
    """The legend's lines of at most `columns` letters, and where they end."""
    lines = [line for entry in LEGEND for line in (*wrap(entry, columns), "")][:-1]
    place, parts = y, []
    for line in lines:
        parts += [text(x, place, line, "soft")] if line else []
        place += 15.5 if line else 5
    return parts, place


def picture(width: float, height: float, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-labelledby="title">\n'
        f'<title id="title">{escape(TITLE)}</title>\n<style>{STYLE}</style>\n'
        f'<rect width="{width:g}" height="{height:g}" rx="10" class="page"/>\n{body}\n</svg>\n'
    )


def narrow() -> str:
    """Steps one below the other, for 400 pixels."""
    x, width = 10.0, 204.0
    parts, y = [text(x + 2, 24, "One MoE layer on Hopper: fused_moe", "title")], 38.0
    for step in STEPS:
        height = height_of(step)
        parts += card(step, x, y, width, height)
        if step.reads:
            parts.append(arrow(x + width + 22, y + 28, 21, step.reads.bits, "left"))
            parts += labels(x + width + 28, y + 25, step.reads)
        y += height
        parts.append(arrow(x + 30, y + 2, 35, step.result.bits, "down"))
        parts += labels(x + 52, y + 16, step.result)
        y += 40
    lines, end = legend(x + 2, y + 18, 62)
    return picture(412, end, [*parts, *lines])


def wide() -> str:
    """Two rows of steps and the legend."""
    pitch, width, height = 232.0, 192.0, 94.0
    parts: list[str] = []
    for index, step in enumerate(STEPS):
        x, y = 14 + pitch * (index % 4), 14 + 202.0 * (index // 4)
        reads = step.reads
        if index == 4:  # begins the second row
            reads = replace(STEPS[3].result, note="bf16, from step 4")
        if reads:
            parts += labels(x + 40, y + 12, reads)
            parts.append(arrow(x + 22, y, 40, reads.bits, "down"))
        parts += card(step, x, y + 42, width, height)
        parts += labels(x + 10, y + 42 + height + 17, step.result)
        if index in (3, 6):  # the ends of both rows
            parts.append(arrow(x + 150, y + 139, 34, step.result.bits, "down"))
        else:
            parts.append(arrow(x + width + 3, y + 89, 34, step.result.bits, "right"))
    lines, end = legend(14 + 3 * pitch, 14 + 202 + 12, 34)
    return picture(950, end - 4, [*parts, *lines])


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, drawn in (("layer.svg", wide()), ("layer-narrow.svg", narrow())):
        (folder / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()

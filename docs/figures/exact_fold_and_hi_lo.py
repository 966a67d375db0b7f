"""Figures of docs/exact-fold-and-hi-lo.md, computed with the library's own codecs:
python docs/figures/exact_fold_and_hi_lo.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import mxpert
from mxpert.cli.plots import INK, NO_LINE, figure, line_style, log_scale, save, styled
from mxpert.formats import E2M1, E4M3, decode, encode
from mxpert.formats.folding import FOLD_SPAN, FOLD_TOP

SHIFTS = range(19)
BINADES = range(22)
SPREADS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0)


def folded(shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The seven e2m1 magnitudes above zero times 2^(6 − shift), wanted and as e4m3 has them."""
    wanted = decode(torch.arange(1, 8, dtype=torch.uint8), E2M1) * 2.0 ** (FOLD_TOP - shift)
    return wanted, decode(encode(wanted, E4M3), E4M3)


def split(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 rows [R, K] as ``scale · (hi + lo / 16)``: the values of two e4m3 rows, and [R, 1]."""
    largest = rows.float().abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa · 2^exponent
    exponent = exponent - 9 + (mantissa > 0.875).int()  # 448 = 0.875 · 2^9 is the largest hi
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    values = rows.float() / scale
    hi = decode(encode(values, E4M3), E4M3)
    return hi, decode(encode((values - hi) * 16, E4M3), E4M3), scale


def spread_rows(spread: float, seed: int = 0) -> torch.Tensor:
    """bf16 rows [256, 4096]: normal values times 2^(normal · spread)."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(256, 4096, generator=generator)
    return (values * torch.exp2(spread * torch.randn(256, 4096, generator=generator))).bfloat16()


def relative_rms(approximation: torch.Tensor, rows: torch.Tensor) -> float:
    """``|a − x| / |x|`` over everything."""
    return float((approximation - rows.float()).norm() / rows.float().norm())


def encodings(rows: torch.Tensor) -> dict[str, float]:
    """Relative error of three ways to bring bf16 rows to FP8 tensor cores."""
    hi, lo, scale = split(rows)
    blocks = mxpert.dequantize(mxpert.quantize(rows, "mxfp8_e4m3"))
    return {
        "e4m3, one scale a row": relative_rms(hi * scale, rows),
        "MXFP8, 1×32 scales": relative_rms(blocks, rows),
        "hi + lo / 16": relative_rms((hi + lo / 16) * scale, rows),
    }


@styled
def draw_fold(path: Path) -> None:
    drawing, ((axes,),) = figure("", 1, 1, size=(8, 4.2), dpi=110)
    for shift in SHIFTS:
        wanted, got = folded(shift)
        exact = wanted == got
        for mask, style, label, once in (
            (exact, {"color": 0}, "an e4m3 number", SHIFTS[0]),
            (~exact, {"color": 3, "fill": "none"}, "between two e4m3 numbers", SHIFTS[-1]),
        ):
            axes.plot(
                [shift] * int(mask.sum()),
                wanted[mask].tolist(),
                label=label if shift == once else None,
                **line_style(**style, dash=NO_LINE, size=4),
            )
    axes.axvspan(-0.5, FOLD_SPAN - 0.5, alpha=0.12)
    axes.axhline(448, color=INK, linewidth=0.8, label="largest e4m3, 448")
    axes.axhline(2.0**-9, color=INK, linestyle="--", linewidth=0.8, label="smallest, 2⁻⁹")
    axes.set(
        xlabel="row's largest scale minus block's scale, binades",
        ylabel="e2m1 magnitude · 2^(6 − difference)",
        title="Blocks within 15 binades of the row fold exactly",
    )
    axes.set_yscale("log", base=2)
    axes.legend(fontsize="small")
    save(drawing, path)


@styled
def draw_split(path: Path) -> None:
    drawing, ((left, right),) = figure("", 1, 2, size=(11, 4.2), dpi=110)
    mantissas = 1 + torch.arange(128) / 128  # every bf16 mantissa of a binade
    errors: dict[str, list[float]] = {"hi alone": [], "hi + lo / 16": []}
    for binade in BINADES:
        row = torch.cat((torch.tensor([448.0]), 256 * mantissas * 2.0**-binade)).bfloat16()[None]
        hi, lo, scale = split(row.clamp(max=448))
        for name, approximation in (
            ("hi alone", hi * scale),
            ("hi + lo / 16", (hi + lo / 16) * scale),
        ):
            wanted = row.clamp(max=448)[:, 1:].float()
            errors[name].append(float(((approximation[:, 1:] - wanted) / wanted).abs().max()))
    for index, (name, values) in enumerate(errors.items()):
        heights = [max(value, 1e-5) for value in values]
        left.plot(list(BINADES), heights, label=name, **line_style(index))
    left.set(
        xlabel="binades below the row's maximum",
        ylabel="largest relative error (1e-5 stands for 0)",
        title="Every bf16 value of a binade",
    )
    log_scale(left, y=10)
    left.grid()
    left.legend(fontsize="small")
    curves = [encodings(spread_rows(spread)) for spread in SPREADS]
    for index, name in enumerate(curves[0]):  # the first two coincide
        heights = [max(curve[name], 1e-8) for curve in curves]
        right.plot(SPREADS, heights, label=name, **line_style(index, size=8 - 2 * index))
    right.set(
        xlabel="spread of magnitudes, standard deviation in binades",
        ylabel="relative error of the rows (1e-8 stands for 0)",
        title="Three encodings of the same rows",
    )
    log_scale(right, y=10)
    right.grid()
    right.legend(fontsize="small")
    save(drawing, path)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    draw_fold(folder / "exact-fold.png")
    draw_split(folder / "hi-lo.png")
    for spread in SPREADS:
        found = encodings(spread_rows(spread)).items()
        sys.stdout.write(f"{spread}: " + ", ".join(f"{n} {v:.1e}" for n, v in found) + "\n")


if __name__ == "__main__":
    main()

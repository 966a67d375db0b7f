"""Figures of docs/exact-fold-and-hi-lo.md, computed with the library's own codecs:
python docs/figures/exact_fold_and_hi_lo.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import mxpert
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


def draw_fold(path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    for shift in SHIFTS:
        wanted, got = folded(shift)
        exact = wanted == got
        for mask, color, label, once in (
            (exact, "tab:blue", "an e4m3 number", SHIFTS[0]),
            (~exact, "tab:red", "between two e4m3 numbers", SHIFTS[-1]),
        ):
            axes.plot(
                [shift] * int(mask.sum()),
                wanted[mask].tolist(),
                "o",
                color=color,
                markersize=4,
                label=label if shift == once else None,
            )
    axes.axvspan(-0.5, FOLD_SPAN - 0.5, alpha=0.12)
    axes.axhline(448, color="gray", linewidth=0.8, label="largest e4m3, 448")
    axes.axhline(2.0**-9, color="gray", linestyle="--", linewidth=0.8, label="smallest, 2⁻⁹")
    axes.set(
        yscale="log",
        xlabel="row's largest scale minus block's scale, binades",
        ylabel="e2m1 magnitude · 2^(6 − difference)",
        title="Blocks within 15 binades of the row fold exactly",
    )
    axes.set_yscale("log", base=2)
    axes.legend(fontsize="small")
    figure.savefig(path)


def draw_split(path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
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
    for name, values in errors.items():
        left.plot(list(BINADES), [max(value, 1e-5) for value in values], marker="o", label=name)
    left.set(
        yscale="log",
        xlabel="binades below the row's maximum",
        ylabel="largest relative error (1e-5 stands for 0)",
        title="Every bf16 value of a binade",
    )
    left.grid(alpha=0.3)
    left.legend(fontsize="small")
    curves = [encodings(spread_rows(spread)) for spread in SPREADS]
    for name, style in zip(curves[0], ("-", "--", "-"), strict=True):  # the first two coincide
        right.plot(
            SPREADS, [max(curve[name], 1e-8) for curve in curves], style, marker="o", label=name
        )
    right.set(
        yscale="log",
        xlabel="spread of magnitudes, standard deviation in binades",
        ylabel="relative error of the rows (1e-8 stands for 0)",
        title="Three encodings of the same rows",
    )
    right.grid(alpha=0.3)
    right.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    draw_fold(folder / "exact-fold.png")
    draw_split(folder / "hi-lo.png")
    for spread in SPREADS:
        found = encodings(spread_rows(spread)).items()
        sys.stdout.write(f"{spread}: " + ", ".join(f"{n} {v:.1e}" for n, v in found) + "\n")


if __name__ == "__main__":
    main()

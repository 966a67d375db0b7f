"""The quantisers of training against the copy ceiling: quantize_dual and rebase."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import mxpert
from benchmarks.grouped.cells import MODES, Operands, Part
from benchmarks.grouped.ours import columns_of, recipe_of, rows_of, wide
from benchmarks.grouped.rows import Row
from mxpert.cli.measure import GateError
from mxpert.formats import MXTensor
from mxpert.testing.numerics import sqnr_db
from mxpert.testing.timing import Timing

MX_BYTES = 33 / 32
"""Of one value: its code, and a scale byte for 32 of them."""

SNR_GATE_DB = 25.0
"""e4m3 with 1×32 scales keeps 31 dB of normal values."""

FEATURES = slice(0, 16)


@dataclass(frozen=True)
class Case:
    """One timed quantisation; `call` gives the rowwise and the columnwise copy, of rebase one."""

    operand: str
    op: str
    mode: str
    source: torch.Tensor
    call: Callable[[], Any]

    @property
    def name(self) -> str:
        return f"{self.op}/{self.operand}/{self.dtype}/{self.mode}"

    @property
    def dtype(self) -> str:
        return str(self.source.dtype).removeprefix("torch.")

    @property
    def bytes_ideal(self) -> int:
        """Each value read once, each copy written once."""
        read = 0 if self.op == "rebase" else self.source.element_size()
        return round(self.source.numel() * (read + 2 * MX_BYTES))


def cases(data: Operands, modes: Sequence[str]) -> Iterator[Case]:
    """x, gradient and weights in bfloat16, weights in float32 too, in every mode; the weights of
    "block128" are those of "row"."""
    sources = {"x": data.x, "grad": data.grad, "weight": data.weight}
    for operand, source in [*sources.items(), ("weight", data.weight.float())]:
        offsets = None if operand == "weight" else data.group_offsets
        for mode in modes:
            if (operand, mode) != ("weight", "block128"):
                spans = getattr(recipe_of(mode).spans(source.device), operand)
                options = {"group_offsets": offsets, "scale_span": spans}
                call = functools.partial(mxpert.quantize_dual, source, **options)
                yield Case(operand, "quantize_dual", mode, source, call)
    if "row" in modes:  # torch operations: one case shows what they cost
        exact = mxpert.quantize(data.x, "mxfp8_e4m3")
        call = functools.partial(mxpert.rebase, exact, MODES["row"])
        yield Case("x", "rebase", "row", data.x, call)


def check_case(case: Case, parts: Sequence[Part]) -> None:
    """Both copies hold the values.

    Raises:
        GateError: one of them does not.
    """
    result = case.call()
    row, col = result if isinstance(result, tuple) else (result, None)
    for part in parts:
        if case.operand == "weight":
            source = case.source[part.group].double()
            found = [(wide(row[part.group]), source)]
            if col is not None:
                found.append((wide(col[part.group]), source.T))
        else:
            found = [(rows_of(row, part), case.source[part.rows].double())]
            if col is not None:
                found.append(_column_pair(col, part, case.source))
        for actual, wanted in found:
            snr = sqnr_db(actual, wanted)
            if not snr >= SNR_GATE_DB:
                raise GateError(f"{case.name}: SNR {snr:.1f} dB, gate {SNR_GATE_DB:.0f} dB")


def _column_pair(
    col: MXTensor, part: Part, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = source[part.start : part.end, FEATURES].T.double()
    return columns_of(col, part, FEATURES)[:, : wanted.shape[1]], wanted


def make_quantiser_row(
    data: Operands, case: Case, timing: Timing, ceilings: Mapping[str, float]
) -> Row:
    """One measurement against the copy rate of the same run."""
    tbs = case.bytes_ideal / timing.us / 1e6
    return {
        "shape": str(data.shape),
        "operand": case.operand,
        "op": case.op,
        "mode": case.mode,
        "dtype": case.dtype,
        "width": case.source.shape[-1],
        "bytes_ideal": case.bytes_ideal,
        "us": timing.us,
        "tbs": tbs,
        "of_copy": tbs / ceilings["copy_tbs"],
    }

"""The OCP MX 1.0 tables, written from the specification text and from nothing in the library."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mxpert.formats import MXTensor, ScaleRule, dequantize_blocks

INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Table:
    """Tables 2 to 5 of the specification: exponent width, mantissa width, bias, largest normal."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_normal: float
    emax: int

    @property
    def magnitudes(self) -> list[float]:
        """Values of the codes with sign bit 0, in code order."""
        values = []
        for field in range(1 << self.exponent_bits):
            for mantissa in range(1 << self.mantissa_bits):
                fraction = mantissa / (1 << self.mantissa_bits)
                if field == 0:
                    values.append(math.ldexp(fraction, 1 - self.bias))
                else:
                    values.append(math.ldexp(1 + fraction, field - self.bias))
        return values

    @property
    def finite(self) -> list[float]:
        return [v for v in self.magnitudes if v <= self.max_normal]


E2M1 = Table(2, 1, 1, 6.0, 2)
E4M3 = Table(4, 3, 7, 448.0, 8)
E5M2 = Table(5, 2, 15, 57344.0, 15)
TABLES = {"mxfp4": E2M1, "mxfp8_e4m3": E4M3, "mxfp8_e5m2": E5M2}


def code_values(name: str) -> list[float]:
    """Value of every code of a format, special codes as sections 5.3.1 to 5.3.3 give them."""
    table = TABLES[name]
    values = table.magnitudes
    if name == "mxfp8_e4m3":
        values[0x7F] = NAN
    elif name == "mxfp8_e5m2":
        values[0x7C:0x80] = [INF, NAN, NAN, NAN]
    return values + [-v for v in values]


def nearest_codes(values: torch.Tensor, name: str) -> torch.Tensor:
    """Saturating nearest-even codes of finite float64 `values`, by comparison with every tie."""
    finite = torch.tensor(TABLES[name].finite, dtype=torch.float64)
    ties = (finite[1:] + finite[:-1]) / 2  # exact: few bits
    magnitude = values.double().abs().contiguous()
    below = torch.searchsorted(ties, magnitude)
    on_tie = torch.searchsorted(ties, magnitude, right=True) != below
    codes = torch.where(on_tie, below + below % 2, below)
    return (codes + values.signbit() * len(code_values(name)) // 2).to(torch.uint8)


def scale_byte(amax: float, name: str, rule: ScaleRule) -> int:
    """The scale byte of a finite amax by the definition of each rule, in exact float64 steps."""
    table = TABLES[name]
    if amax == 0:
        return 127
    fraction, exponent = math.frexp(amax)
    mantissa, exponent = 2 * fraction, exponent - 1
    if rule is ScaleRule.FLOOR:
        unbiased = exponent - table.emax
    elif rule is ScaleRule.CEIL:
        unbiased = exponent + (mantissa > 1) - table.emax
    elif rule is ScaleRule.EVEN:
        step = 2.0**-table.mantissa_bits
        unbiased = exponent + (round(mantissa / step) * step >= 2) - table.emax
    else:
        unbiased = exponent - table.emax + (mantissa > table.max_normal / 2**table.emax)
    return min(max(unbiased + 127, 0), 254)


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Raise unless two byte tensors agree everywhere; say where they first differ."""
    assert ours.dtype == theirs.dtype == torch.uint8
    assert ours.shape == theirs.shape, f"{what}: shapes {ours.shape} and {theirs.shape}"
    different = (ours != theirs).nonzero()
    if len(different):
        at = tuple(different[0].tolist())
        raise AssertionError(
            f"{what}: {len(different)} of {ours.numel()} differ, first at {at}: "
            f"{int(ours[at]):#04x} against {int(theirs[at]):#04x}"
        )


def assert_same_values(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raise unless two float tensors hold the same values, NaN equal to NaN and -0 not to 0."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    same = (ours == theirs) & (ours.signbit() == theirs.signbit()) | (ours.isnan() & theirs.isnan())
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} values differ"


def assert_represents(t: MXTensor, values: torch.Tensor) -> None:
    """Raise unless `t` decodes to exactly `values`."""
    assert_same_values(dequantize_blocks(t, values.dtype), values)

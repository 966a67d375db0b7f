"""Grouped GEMMs written a second time: float64, torch's own float8 types, one einsum a group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from mxpert import MXTensor

FLOAT8 = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Groups:
    """Sizes of the groups of one operand and the rows that belong to none, before and after."""

    sizes: tuple[int, ...]
    tail: int = 0
    first: int = 0

    @property
    def starts(self) -> list[int]:
        return list(accumulate(self.sizes, initial=self.first))

    @property
    def used(self) -> int:
        """End of the last group."""
        return self.starts[-1]

    @property
    def rows(self) -> int:
        return self.used + self.tail

    @property
    def columns(self) -> list[int]:
        """Where the rows stand in a columnwise copy."""
        starts = accumulate((-(-size // 32) * 32 for size in self.sizes), initial=0)
        return [
            start + i for start, size in zip(starts, self.sizes, strict=False) for i in range(size)
        ]

    def offsets(
        self, dtype: torch.dtype = torch.int32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        return torch.tensor(self.starts, dtype=dtype, device=device)


GROUPS = {
    "mixed": Groups((0, 1, 31, 32, 33, 63, 130), tail=7),
    "one-group": Groups((65,)),
    "all-in-one": Groups((0, 0, 130, 0), tail=3),
    "no-groups-hit": Groups((0, 0), tail=5),
    "no-rows": Groups((0, 0)),
}


def values(tensor: torch.Tensor | MXTensor) -> torch.Tensor:
    """float64 values, NaN for scale byte 255."""
    if not isinstance(tensor, MXTensor):
        return tensor.double()
    codes = tensor.qdata.view(FLOAT8[tensor.format.name]).double()
    scale = torch.exp2(tensor.scale.double() - 127).masked_fill(tensor.scale == 255, torch.nan)
    return codes * scale.repeat_interleave(32, dim=tensor.axis)


def forward(
    a: torch.Tensor | MXTensor, b: torch.Tensor | MXTensor, groups: Groups, *, trans_b: bool = True
) -> torch.Tensor:
    """float64 [M, N], zero in the rows of no group."""
    weights = values(b) if trans_b else values(b).mT
    rows = values(a)[groups.first : groups.used].split(groups.sizes)
    out = [torch.einsum("rk,nk->rn", *pair) for pair in zip(rows, weights, strict=True)]
    return torch.nn.functional.pad(torch.cat(out), (0, 0, groups.first, groups.tail))


def wgrad(
    grad: torch.Tensor | MXTensor, a: torch.Tensor | MXTensor, groups: Groups
) -> torch.Tensor:
    """float64 [G, N, K] from rows [M, ·], or from columnwise copies [·, P]."""
    left, right = (
        values(x).mT[groups.columns] if isinstance(x, MXTensor) else values(x)[groups.first :]
        for x in (grad, a)
    )
    parts = (x[: sum(groups.sizes)].split(groups.sizes) for x in (left, right))
    return torch.stack([torch.einsum("rn,rk->nk", *pair) for pair in zip(*parts, strict=True)])

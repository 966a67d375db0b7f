"""Grouped GEMMs written a second time: float64, torch's own float8 types, one einsum each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from mxpert import MXTensor

FLOAT8 = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Groups:
    """Sizes of the groups of one operand and the rows that belong to none."""

    sizes: tuple[int, ...]
    tail: int = 0

    @property
    def starts(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))

    @property
    def used(self) -> int:
        return sum(self.sizes)

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

    def ids(self, device: torch.device) -> torch.Tensor:
        sizes = torch.tensor(self.sizes, device=device)
        return torch.arange(len(self.sizes), device=device).repeat_interleave(sizes)


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
    """float64 [M, N], zero in the tail."""
    weights = values(b) if trans_b else values(b).mT
    rows = values(a)[: groups.used]
    out = torch.einsum("rk,rnk->rn", rows, weights[groups.ids(rows.device)])
    return torch.nn.functional.pad(out, (0, 0, 0, groups.tail))


def wgrad(
    grad: torch.Tensor | MXTensor, a: torch.Tensor | MXTensor, groups: Groups
) -> torch.Tensor:
    """float64 [G, N, K] from rows [M, ·], or from columnwise copies [·, P]."""
    left, right = (
        values(x).mT[groups.columns] if isinstance(x, MXTensor) else values(x)[: groups.used]
        for x in (grad, a)
    )
    member = torch.nn.functional.one_hot(groups.ids(left.device), len(groups.sizes)).double()
    return torch.einsum("rg,rn,rk->gnk", member, left, right)

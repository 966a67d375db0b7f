"""Placement: which rank holds which experts, and to which copy each rank sends."""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass

import torch

from ..errors import Checks, message, require, require_int

_OP = "Placement"


def contiguous_bounds(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """First expert of each rank, and E at the end; sizes differ by at most one.

    >>> contiguous_bounds(5, 2)
    (0, 3, 5)
    """
    require(
        1 <= num_ranks <= num_experts,
        "contiguous_bounds",
        "num_ranks",
        need=f"1 to {num_experts}",
        got=num_ranks,
    )
    each, more = divmod(num_experts, num_ranks)
    return tuple(rank * each + min(rank, more) for rank in range(num_ranks + 1))


@dataclass(frozen=True, eq=False, repr=False)
class Placement:
    """The ranks that hold each expert of a layer.

    Experts may lie on several ranks. A rank sends a token to exactly one copy of each expert: its
    own, if it has one, else ``copies[rank % len(copies)]`` of the ascending ranks that have one.

    Args:
        expert_maps: int32 [N, E] on the CPU: the local id of each global expert on each rank, or
            −1. The local ids of a rank are 0 … L − 1, each once, with L at least 1; each expert
            lies on at least one rank.

    Raises:
        TypeError: another type or dtype.
        ValueError: local ids with gaps or repetitions, an expert on no rank, a rank without
            experts.

    Source:
        The expert map of vLLM; redundant experts as in DeepSeek's EPLB.

    Example:
        >>> import torch
        >>> from mxpert.distributed import Placement
        >>> Placement.contiguous(5, 2).num_local_experts
        (3, 2)
        >>> placement = Placement(torch.tensor([[0, 1, -1], [-1, 0, 1]], dtype=torch.int32))
        >>> placement.owners.tolist()  # each rank takes its own copy of expert 1
        [[0, 0, 1], [0, 1, 1]]
    """

    expert_maps: torch.Tensor

    def __post_init__(self) -> None:
        need = Checks(_OP)
        maps = self.expert_maps
        need.tensor(maps, "expert_maps", dtype=torch.int32, shape=(None, None))
        need(maps.device.type == "cpu", "expert_maps.device", "cpu", maps.device)
        need(min(maps.shape) > 0, "expert_maps.shape", "[N, E]", list(maps.shape))
        for rank, row in enumerate(maps.tolist()):
            local = sorted(place for place in row if place != -1)
            need(
                len(local) > 0 and local == list(range(len(local))),
                f"expert_maps[{rank}]",
                "the local ids 0 … L − 1, each once, with L at least 1, and −1 elsewhere",
                local,
            )
        missing = (maps < 0).all(0).nonzero().flatten().tolist()
        need(not missing, "expert_maps", "each expert on a rank", f"{missing} on none")

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Placement:
        """Give each rank consecutive experts; the numbers differ by at most one.

        Args:
            num_experts: E, at least `num_ranks`.
            num_ranks: N, at least 1. The first ``E mod N`` ranks hold one expert more.

        Raises:
            TypeError: an argument that is no int.
            ValueError: a number out of range.
        """
        require_int(num_ranks, _OP, "num_ranks", least=1)
        require_int(num_experts, _OP, "num_experts", least=num_ranks)
        maps = torch.full((num_ranks, num_experts), -1, dtype=torch.int32)
        parts = itertools.pairwise(contiguous_bounds(num_experts, num_ranks))
        for row, (first, last) in zip(maps, parts, strict=True):
            row[first:last] = torch.arange(last - first, dtype=torch.int32)
        return cls(maps)

    @property
    def num_ranks(self) -> int:
        """N."""
        return self.expert_maps.shape[0]

    @property
    def num_experts(self) -> int:
        """E, the global experts; a redundant one counts once."""
        return self.expert_maps.shape[1]

    @functools.cached_property
    def num_local_experts(self) -> tuple[int, ...]:
        """The number of experts of each rank."""
        return tuple((self.expert_maps >= 0).sum(1).tolist())

    @functools.cached_property
    def owners(self) -> torch.Tensor:
        """int32 [N, E]: the rank that computes expert e for the tokens of rank s, at ``[s, e]``."""
        owners = torch.empty_like(self.expert_maps)
        for expert, column in enumerate(self.expert_maps.T.tolist()):
            copies = [rank for rank, local in enumerate(column) if local >= 0]
            for source in range(self.num_ranks):
                own = source in copies
                owners[source, expert] = source if own else copies[source % len(copies)]
        return owners

    @functools.cached_property
    def local_ids(self) -> torch.Tensor:
        """int32 [N, E]: the id of expert e on rank ``owners[s, e]``, at ``[s, e]``."""
        return self.expert_maps.gather(0, self.owners.long())

    def share(self, rank: int) -> float:
        """Part of all ids that `rank` computes if tokens spread evenly over ranks and experts."""
        self._check_rank(rank)
        return float((self.owners == rank).double().mean())

    def expert_map(self, rank: int) -> torch.Tensor:
        """int32 [E]: the local id of each global expert on `rank`, or −1."""
        self._check_rank(rank)
        return self.expert_maps[rank]

    def local_experts(self, rank: int) -> tuple[int, ...]:
        """The global experts of `rank`, in the order of their local ids."""
        self._check_rank(rank)
        places = [(local, expert) for expert, local in enumerate(self.expert_maps[rank].tolist())]
        return tuple(expert for local, expert in sorted(places) if local >= 0)

    def received_ids(self, rank: int) -> torch.Tensor:
        """int32 [N, E + 2]: the local id on `rank` of what each source sends there, else −1.

        Column ``e + 1`` is of global expert e; the first and the last column, for ids below 0 and
        beyond E − 1, are −1.
        """
        self._check_rank(rank)
        here = torch.where(self.owners == rank, self.local_ids, -1)
        return torch.nn.functional.pad(here, (1, 1), value=-1)

    @functools.cached_property
    def digest(self) -> str:
        """A short name of the placement: equal for equal placements."""
        data = self.expert_maps.contiguous().numpy().tobytes()
        return f"{list(self.expert_maps.shape)} {hashlib.sha256(data).hexdigest()[:16]}"

    def __repr__(self) -> str:
        counts = ", ".join(map(str, self.num_local_experts))
        return f"Placement({self.num_experts} experts on {self.num_ranks} ranks: {counts})"

    def _check_rank(self, rank: int) -> None:
        require_int(rank, _OP, "rank")
        if rank >= self.num_ranks:
            raise ValueError(message(_OP, "rank", f"0 to {self.num_ranks - 1}", rank))

"""Which transport runs in a group, and why not the others."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UnsupportedError, message
from .groups import gather_objects
from .transport import Exchange, ExchangeSpec, Transport

_CLASSES = {
    Transport.GATHER: ("gather", "GatherExchange"),
    Transport.ALL_TO_ALL: ("all_to_all", "AllToAllExchange"),
    Transport.SYMMETRIC: ("symmetric", "SymmetricExchange"),
}
"""Module of this package and class of each transport, imported when it is asked for."""


def choose(
    wanted: Transport, group: dist.ProcessGroup | None, size: int, device: torch.device
) -> tuple[Transport, dict[Transport, str]]:
    """Return the transport that runs on every rank, and a reason for each that was looked at.

    AUTO takes SYMMETRIC where it runs, else GATHER; with one rank GATHER, which then sends nothing.

    Raises:
        UnsupportedError: `wanted` is named and cannot run on some rank.
    """
    if wanted is Transport.AUTO and size == 1:
        return Transport.GATHER, {Transport.GATHER: "one rank, which sends nothing"}
    candidate = Transport.SYMMETRIC if wanted is Transport.AUTO else wanted
    reason = _reason(candidate, group, device)
    if reason is None:
        pinned = "the fastest that runs here" if wanted is Transport.AUTO else "asked for by name"
        return candidate, {candidate: pinned}
    if wanted is Transport.AUTO:
        why = "runs with every backend of torch.distributed"
        return Transport.GATHER, {Transport.GATHER: why, candidate: reason}
    raise UnsupportedError(
        message(
            "ExpertParallel",
            "transport",
            "one that runs on every rank",
            f"{wanted.name}: {reason}",
            "pass Transport.AUTO; mxpert doctor lists what runs here",
        )
    )


def make_exchange(
    transport: Transport, group: dist.ProcessGroup | None, spec: ExchangeSpec, device: torch.device
) -> Exchange:
    """The exchange of a transport that `choose` has returned."""
    exchange: Exchange = _class(transport)(group, spec, device)
    return exchange


def unavailable(
    transport: Transport, group: dist.ProcessGroup | None, device: torch.device
) -> str | None:
    """Why a transport cannot run on this rank, as a phrase; None if it can."""
    try:
        made = _class(transport)
    except ImportError as error:
        return f"cannot be imported ({error})"
    reason: str | None = made.unavailable(group, device)
    return reason


def _class(transport: Transport) -> Any:
    module, name = _CLASSES[transport]
    return getattr(importlib.import_module(f".{module}", __package__), name)


def _reason(
    transport: Transport, group: dist.ProcessGroup | None, device: torch.device
) -> str | None:
    """Why a transport cannot run on some rank; None if it runs on every one."""
    reasons = gather_objects(group, unavailable(transport, group, device))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            same = all(other == reason for other in reasons)
            return str(reason) if same else f"{reason} (rank {rank})"
    return None

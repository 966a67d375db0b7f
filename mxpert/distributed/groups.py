"""Groups of ranks: finding one, agreeing in it, and noticing that a rank is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PeerLostError, message
from .transport import ExchangeSpec

_OP = "ExpertParallel"
_GRACE_S = 1.0
"""Seconds beyond the time-out in which ranks that are alive answer the roll call."""


def find_group(group_or_mesh: object, num_ranks: int | None) -> Any:
    """Return the ProcessGroup that is meant; None for one rank without torch.distributed.

    Args:
        group_or_mesh: None (the default group), a ProcessGroup or a one-dimensional DeviceMesh.
        num_ranks: how many ranks a placement asks for, if there is one.

    Raises:
        TypeError: anything else.
        ValueError: a mesh of several dimensions, a group without this process, or no
            torch.distributed where several ranks are meant.
    """
    if isinstance(group_or_mesh, DeviceMesh):
        if group_or_mesh.ndim != 1:
            names = group_or_mesh.mesh_dim_names
            raise ValueError(
                message(
                    _OP,
                    "group_or_mesh",
                    "a mesh of one dimension",
                    f"{group_or_mesh.ndim} dimensions, {names}",
                    f'pass one of them, for example mesh["{names[0] if names else "ep"}"]',
                )
            )
        return group_or_mesh.get_group()
    if group_or_mesh is None and not (dist.is_available() and dist.is_initialized()):
        if (num_ranks or 1) > 1 or (dist.is_available() and dist.is_torchelastic_launched()):
            raise ValueError(
                message(
                    _OP,
                    "torch.distributed",
                    "a process group",
                    "none",
                    "call torch.distributed.init_process_group() in a script started with "
                    f"torchrun --nproc-per-node {max(num_ranks or 2, 2)} script.py",
                )
            )
        return None
    group = dist.group.WORLD if group_or_mesh is None else group_or_mesh
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            message(_OP, "group_or_mesh", "a group that this process is in", "another group")
        )
    if not isinstance(group, dist.ProcessGroup):
        need = "None, a ProcessGroup or a DeviceMesh"
        raise TypeError(message(_OP, "group_or_mesh", need, type(group).__name__))
    return group


def default_device(group: Any) -> torch.device:
    """The device whose tensors the group's backend moves: the current GPU, or the CPU."""
    on_gpu = torch.cuda.is_available()
    if group is not None:
        on_gpu = on_gpu and "nccl" in str(dist.get_backend_config(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def gather_objects(group: Any, value: Any) -> list[Any]:
    """The `value` of each rank, on every rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree(group: Any, arguments: dict[str, object] | Exception) -> None:
    """Check on all ranks that they got the same arguments, or raise on all of them.

    Args:
        group: the ProcessGroup, or None for one rank.
        arguments: values by name; an error where this rank has refused its arguments.

    Raises:
        ValueError: ranks differ, or another rank has refused its arguments.
        Exception: `arguments`, if it is an error.
    """
    own = str(arguments) if isinstance(arguments, Exception) else arguments
    records = gather_objects(group, own)
    if isinstance(arguments, Exception):
        raise arguments
    for rank, record in enumerate(records):
        if isinstance(record, str):
            need = "arguments that every rank accepts"
            raise ValueError(message(_OP, f"rank {rank}", need, f"an error there: {record}"))
    for name in arguments:
        ranks: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            ranks.setdefault(str(record[name]), []).append(rank)
        if len(ranks) > 1:
            got = ", ".join(f"{value} on rank {_listed(where)}" for value, where in ranks.items())
            raise ValueError(message(_OP, name, "the same on every rank", got))


def _listed(ranks: list[int]) -> str:
    """Ranks as text, at most eight of them."""
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")


class Ranks:
    """The ranks of one exchange, and the collectives between them.

    With gloo the collectives run in a group of their own, so that they end after ``timeout_s``.
    NCCL's collectives run in the given group, whose own time-out governs them.

    Args:
        group: the ProcessGroup; None for one rank.
        spec: of the exchange.
        device: of the tensors.
    """

    def __init__(self, group: Any, spec: ExchangeSpec, device: torch.device) -> None:
        self.size = spec.size
        self._spec, self._device, self._group = spec, device, group
        self._lost: PeerLostError | None = None
        self._owns_group = group is not None and dist.get_backend(group) == "gloo"
        if self._owns_group:
            self._group = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timedelta(seconds=spec.timeout_s),
                backend="gloo",
                use_local_synchronization=True,
            )

    def run(self, step: str, collective: Callable[..., object], *arguments: Any) -> None:
        """Call ``collective(*arguments, group=…)``.

        Args:
            step: the method that reports an error.
            collective: a function of torch.distributed.
            arguments: its arguments before `group`.

        Raises:
            PeerLostError: the backend failed, here or in an earlier call.
        """
        self.raise_lost()
        started = time.monotonic()
        try:
            collective(*arguments, group=self._group)
        except RuntimeError as error:
            self._lost = self._lost_peer(step, error, started)
            raise self._lost from error

    def raise_lost(self) -> None:
        """Raise the error of an earlier call again, if there was one."""
        if self._lost is not None:
            raise PeerLostError(str(self._lost), self._lost.ranks)

    def _lost_peer(self, step: str, error: RuntimeError, started: float) -> PeerLostError:
        ranks = self._absent(started + self._spec.timeout_s + _GRACE_S)
        argument = f"rank {_listed(list(ranks))}" if ranks else "peers"
        return PeerLostError(
            message(
                f"{_OP}.{step}",
                argument,
                f"an answer within {self._spec.timeout_s:g} s",
                f"none ({str(error).splitlines()[0][:200]})",
                "make a new group of the ranks that are left, and an ExpertParallel on it",
            ),
            ranks,
        )

    def _absent(self, deadline: float) -> tuple[int, ...]:
        """Ranks that do not answer a roll call in the group's store; () where it is gone too."""
        store = dist.distributed_c10d._get_process_group_store(self._group)
        absent = []
        try:
            store.set(f"lost/{self._spec.rank}", "1")
            for rank in range(self.size):
                left = max(deadline - time.monotonic(), 0.01)
                try:
                    store.wait([f"lost/{rank}"], timedelta(seconds=left))
                except dist.DistStoreError:
                    absent.append(rank)
        except RuntimeError:  # the process that held the store is gone
            return ()
        return tuple(absent)

    def check(self) -> None:
        """Synchronise with the device; raise the error of an earlier call again."""
        self.raise_lost()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Destroy the group, if this object made it."""
        if self._owns_group:
            self._owns_group = False
            dist.destroy_process_group(self._group)

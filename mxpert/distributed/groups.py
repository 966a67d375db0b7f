"""Groups of ranks: finding one, agreeing in it, and noticing that a rank is lost."""

from __future__ import annotations

import contextlib
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PeerLostError, message
from .transport import ExchangeSpec

if dist.is_available():  # `import mxpert` works with a torch that was built without it
    from torch.distributed import distributed_c10d as c10d

_Value = TypeVar("_Value")

_OP = "ExpertParallel"
_GRACE_S, _POLL_S = 1.0, 0.02
"""Seconds after the time-out in which living ranks answer the roll call, and between two looks."""


def find_group(group_or_mesh: object, num_ranks: int | None) -> dist.ProcessGroup | None:
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


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """The device whose tensors the group's backend moves: the current GPU, or the CPU."""
    on_gpu = torch.cuda.is_available()
    if group is not None:
        on_gpu = on_gpu and "nccl" in str(dist.get_backend_config(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def gather_objects(group: dist.ProcessGroup | None, value: _Value) -> list[_Value]:
    """The `value` of each rank, on every rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree(group: dist.ProcessGroup | None, arguments: dict[str, object] | Exception) -> str:
    """Check on all ranks that they got the same arguments, or raise on all of them.

    Args:
        group: the ProcessGroup, or None for one rank.
        arguments: values by name; an error where this rank has refused its arguments.

    Returns:
        A name that no other object has, the same on every rank.

    Raises:
        ValueError: ranks differ, or another rank has refused its arguments.
        Exception: `arguments`, if it is an error.
    """
    own = str(arguments) if isinstance(arguments, Exception) else arguments
    names, records = zip(*gather_objects(group, (uuid.uuid4().hex, own)), strict=True)
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
    return str(names[0])


def _listed(ranks: list[int]) -> str:
    """Ranks as text, at most eight of them."""
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")


class RollCall:
    """Ranks that say in a group's store what they have done.

    Args:
        group: the ProcessGroup whose store it is.
        spec: name, rank and size.
    """

    def __init__(self, group: dist.ProcessGroup, spec: ExchangeSpec) -> None:
        self._rank, self._size = spec.rank, spec.size
        # Names of torch's own new groups repeat once a group was destroyed; this one is unique.
        self.store = c10d.PrefixStore(f"mxpert/{spec.name}", c10d._get_process_group_store(group))

    def say(self, what: str) -> None:
        """Tell the others that this rank has done `what`."""
        self.store.set(f"{what}/{self._rank}", "1")

    def missing_ranks(self, what: str, deadline: float = 0.0) -> tuple[int, ...]:
        """The ranks that have not said `what` by `deadline`, a time of time.monotonic().

        Raises:
            RuntimeError: the process that held the store is gone.
        """
        missing = list(range(self._size))
        while True:
            missing = [rank for rank in missing if not self.store.check([f"{what}/{rank}"])]
            if not missing or time.monotonic() > deadline:
                return tuple(missing)
            time.sleep(_POLL_S)


_dropped: list[tuple[dist.ProcessGroup, RollCall]] = []
"""Groups that this rank no longer uses and other ranks perhaps still do: a rank that closes its
connections early can break the last collective of another."""


def _drop(group: dist.ProcessGroup, roll: RollCall) -> None:
    """Keep a group until all ranks have dropped it."""
    with contextlib.suppress(RuntimeError):  # the process that held the store is gone
        roll.say("dropped")
    _dropped.append((group, roll))


def _free_dropped() -> None:
    """Free the groups that all ranks have dropped."""
    for pair in _dropped.copy():
        try:
            in_use = bool(pair[1].missing_ranks("dropped"))
        except RuntimeError:
            in_use = False
        if not in_use:
            _dropped.remove(pair)


class Ranks:
    """The ranks of one exchange, and the collectives between them.

    Over gloo the collectives run in a group of their own, so that they end after ``timeout_s``.
    NCCL's run in the given group, whose own time-out governs them.

    Args:
        group: the ProcessGroup; None for one rank.
        spec: of the exchange.
        device: of the tensors.

    Raises:
        PeerLostError: a rank did not arrive.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, spec: ExchangeSpec, device: torch.device
    ) -> None:
        self.size = spec.size
        self._spec, self._device, self._group = spec, device, group
        self._lost: PeerLostError | None = None
        self._is_closed = False
        self._drop: Callable[[], object] = lambda: None
        if group is None:
            return
        self._roll = RollCall(group, spec)
        if f"{device.type}:gloo" in str(dist.get_backend_config(group)):
            self._group = self._new_group()
            self._drop = finalizer = weakref.finalize(self, _drop, self._group, self._roll)
            finalizer.atexit = False
        # Without asyncOp, NCCL runs on the current stream.
        self._gather_options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
        self._reduce_options = c10d.ReduceScatterOptions()
        self._all_to_all_options = c10d.AllToAllOptions()
        for options in (self._gather_options, self._reduce_options, self._all_to_all_options):
            options.asyncOp = False

    def _new_group(self) -> Any:  # a ProcessGroupGloo, which torch does not type as a ProcessGroup
        """A gloo group that all ranks have joined."""
        _free_dropped()
        spec, started = self._spec, time.monotonic()
        timeout = timedelta(seconds=spec.timeout_s)
        try:
            group = c10d.ProcessGroupGloo(self._roll.store, spec.rank, spec.size, timeout)
            self._roll.say("joined")
            if self._roll.missing_ranks("joined", started + spec.timeout_s):
                raise RuntimeError("the group is not complete")
        except RuntimeError as error:
            raise self._lost_peer("group", error, started) from error
        return group

    def all_gather(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Contiguous [n, …] of each rank → `out` [N · n, …], in rank order."""
        self._run("dispatch", "_allgather_base", out, rows, self._gather_options)

    def reduce_scatter(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Contiguous [N · n, …] of each rank → `out` [n, …], the sum of this rank's part."""
        self._run("combine", "_reduce_scatter_base", out, rows, self._reduce_options)

    def all_to_all(
        self,
        step: str,
        out: torch.Tensor,
        rows: torch.Tensor,
        received: Sequence[int] = (),
        sent: Sequence[int] = (),
    ) -> None:
        """Contiguous rows by rank → `out`; counts of rows by rank, or equal parts.

        step: the method that reports an error.
        """
        arguments = out, rows, received, sent, self._all_to_all_options
        self._run(step, "alltoall_base", *arguments)

    def _run(self, step: str, collective: str, *arguments: object) -> None:
        """Run a collective and wait for it as its backend does: the host or the stream.

        Raises:
            PeerLostError: the backend failed, here or in an earlier call.
            torch.OutOfMemoryError: this rank has no memory for it.
        """
        self.raise_lost()
        started = time.monotonic()
        try:
            work = getattr(self._group, collective)(*arguments)
            if work is not None:  # else the backend has waited
                work.wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._lost = self._lost_peer(step, error, started)
            raise self._lost from error

    def raise_lost(self) -> None:
        """Raise the error of an earlier call again, if there was one; refuse a closed object."""
        if self._lost is not None:
            raise PeerLostError(str(self._lost), self._lost.ranks)
        if self._is_closed:
            raise ValueError(message(_OP, "object", "an open one", "a closed one", "make another"))

    def _lost_peer(self, step: str, error: RuntimeError, started: float) -> PeerLostError:
        deadline = started + self._spec.timeout_s + _GRACE_S
        try:
            self._roll.say("failed")
            ranks = self._roll.missing_ranks("failed", deadline)
        except RuntimeError:  # the process that held the store is gone
            ranks = ()
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

    def check(self) -> None:
        """Synchronise with the device; raise the error of an earlier call again."""
        self.raise_lost()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Drop the group; the other ranks may be gone."""
        self._group, self._is_closed = None, True
        self._drop()

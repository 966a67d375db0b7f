"""Memory that the ranks of a group can write in each other: on GPUs, on CPUs, in one process."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from ..core.target import tell_executor
from ..errors import UnsupportedError, message
from .groups import gather_objects
from .links import RankPlace, group_refusal, symmetric_refusal, visible_links


@dataclass(frozen=True, eq=False)
class Workspace:
    """A rank's memory, and where this rank sees the memories of all ranks.

    Args:
        own: uint8 [nbytes], zero when every rank has its Workspace.
        addresses: of the N memories in rank order, as this rank's kernels use them.
        keep: objects that hold the mappings.
    """

    own: torch.Tensor
    addresses: tuple[int, ...]
    keep: object = None  # each kind of memory has its own


def make_workspace(group: dist.ProcessGroup | None, nbytes: int, device: torch.device) -> Workspace:
    """Make the memory of this rank; all ranks of the group call at the same time.

    group: the ProcessGroup; None for one rank.
    """
    if group is None:
        return plain_workspaces(1, nbytes, device)[0]
    made = _mapped_files(group, nbytes) if device.type == "cpu" else _peers(group, nbytes, device)
    gather_objects(group, None)  # no rank stores before every memory is zero
    return made


def plain_workspaces(num_ranks: int, nbytes: int, device: torch.device) -> list[Workspace]:
    """Memories of ranks that live in one process, each on a stream of its own."""
    memories = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
    addresses = _addresses(memories)
    return [Workspace(memory, addresses, memories) for memory in memories]


def _addresses(memories: list[torch.Tensor]) -> tuple[int, ...]:
    """The addresses that kernels get, of the memories of all ranks."""
    for rank, memory in enumerate(memories):
        tell_executor(f"the memory of rank {rank}", memory, shared=True)
    return tuple(memory.data_ptr() for memory in memories)


def refuse_group(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Why the ranks cannot write in each other's memory, as a phrase; None if they can.

    All ranks of the group call at the same time.
    """
    if group is None:
        return None
    on_gpu, devices = device.type != "cpu", gather_objects(group, device.index)
    refusal = symmetric_refusal(visible_links(devices)) if on_gpu else None
    refused = group_refusal(gather_objects(group, RankPlace(_host(), refusal)))
    if refused is not None or not on_gpu:
        return refused
    try:
        _peers(group, 8, device)
    except (ImportError, RuntimeError) as error:
        return f"torch's symmetric memory refuses the group: {str(error).splitlines()[0]}"
    return None


def _host() -> str:
    """A name of this machine that containers on it share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else socket.gethostname()


def _peers(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Workspace:
    """Symmetric memory of torch."""
    import torch.distributed._symmetric_memory as symmetric_memory

    own, error = None, None
    try:
        own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as caught:  # the other ranks would wait for this one in `rendezvous`
        error = str(caught).splitlines()[0]
    _require_memory(gather_objects(group, error), nbytes)
    assert own is not None  # for the type checker
    handle = symmetric_memory.rendezvous(own, group)
    own.zero_()
    torch.cuda.synchronize(device)
    # The device's own table of addresses (buffer_ptrs_dev) leaves out the offset of `own`.
    addresses = (
        handle.get_buffer(rank, (nbytes,), torch.uint8).data_ptr() for rank in range(group.size())
    )
    return Workspace(own, tuple(addresses), handle)


def _require_memory(
    errors: list[str | None], nbytes: int, where: str = "GPU memory", remedy: str = ""
) -> None:
    """Raise an UnsupportedError on every rank where one has no memory. errors: by rank."""
    for rank, error in enumerate(errors):
        if error is not None:
            raise UnsupportedError(
                message(
                    "ExpertParallel",
                    "max_tokens",
                    f"{nbytes} bytes of {where} on every rank",
                    f"an error on rank {rank}: {error}",
                    f"choose fewer slots{remedy}",
                )
            )


def _reserve(file: IO[bytes], nbytes: int) -> str | None:
    """Give a file its memory now; return why that fails. A write beyond it would end in SIGBUS."""
    try:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        folder = os.path.dirname(file.name)
        usage = shutil.disk_usage(folder)
        return f"{folder} has {usage.free} of {usage.total} bytes free ({error.strerror})"
    return None


def _mapped_files(group: dist.ProcessGroup, nbytes: int) -> Workspace:
    """Memory of CPU processes: each rank maps one file of each rank."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    with tempfile.NamedTemporaryFile(prefix="mxpert-", dir=folder) as file:
        refused = gather_objects(group, _reserve(file, nbytes))
        _require_memory(refused, nbytes, folder, f" or enlarge {folder} (docker run --shm-size)")
        names = gather_objects(group, file.name)
        maps = []
        for name in names:
            with open(name, "r+b") as opened:
                maps.append(mmap.mmap(opened.fileno(), nbytes))
        gather_objects(group, None)  # every rank has mapped every file: their names may go
    memories = [torch.frombuffer(map, dtype=torch.uint8) for map in maps]
    return Workspace(memories[group.rank()], _addresses(memories), memories)

"""Links between the GPUs of a host, and which transports of expert parallelism can use them.

`find_links` asks torch and the driver. The other functions are pure: they judge what was found, so
`mxpert doctor` and `ExpertParallel` give the same reasons.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ..core.environment import ranks_may_share_gpus
from ..core.problem import Target

_NVLINK_RATE = re.compile(r"Link \d+: ([\d.]+) GB/s")
_GPU_LINE = re.compile(r"^GPU \d+: ", re.MULTILINE)


@dataclass(frozen=True)
class Links:
    """Links between the GPUs that this process sees.

    Args:
        kind: "cuda", "hip", or "cpu" without a GPU.
        num_gpus: GPUs visible to this process.
        num_host_gpus: GPUs that the driver lists on this host; None if that is unknown.
        unreachable: pairs of visible GPUs (by index) where the first cannot read the second.
        nvlink_gbs: NVLink bandwidth of the first GPU in one direction, GB/s; 0 without NVLink,
            None if it is unknown.
        multicast: whether torch can use multicast (NVLink SHARP); None if it is unknown.
        symmetric_memory: whether this torch has symmetric memory for the GPUs.
        backends: backends of torch.distributed that this torch was built with.
    """

    kind: str = "cpu"
    num_gpus: int = 0
    num_host_gpus: int | None = None
    unreachable: tuple[tuple[int, int], ...] = ()
    nvlink_gbs: float | None = None
    multicast: bool | None = None
    symmetric_memory: bool = False
    backends: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankPlace:
    """Where one rank of a group runs.

    Args:
        host: what identifies its host. refusal: what `symmetric_refusal` says there.
    """

    host: str
    refusal: str | None = None


@dataclass(frozen=True)
class TransportState:
    """Whether one transport can run, and whether AUTO takes it.

    Args:
        name: "SYMMETRIC", "GATHER" or "ALL_TO_ALL".
        refusal: why it cannot run here; None if it can.
        is_auto: whether AUTO takes it on this host.
        note: why AUTO takes it or prefers another one; empty if it cannot run.
    """

    name: str
    refusal: str | None
    is_auto: bool = False
    note: str = ""


def find_links() -> Links:
    """Examine the GPUs of this process, the driver and torch; nothing is allocated on a GPU.

    Example:
        >>> links = find_links()
        >>> links.num_gpus == torch.cuda.device_count()
        True
    """
    links = visible_links()
    if links.kind != "cuda":
        return links
    return replace(
        links, num_host_gpus=_host_gpus(), nvlink_gbs=_nvlink_gbs(), multicast=_has_multicast()
    )


def visible_links(devices: Iterable[int] | None = None) -> Links:
    """Links as torch knows them, without the driver's tools.

    Args:
        devices: indices of the GPUs whose access to each other matters; None for all.
    """
    names = ("nccl", "gloo", "ucc", "mpi", "xccl")
    backends = tuple(name for name in names if dist.is_available() and _has_backend(name))
    if not torch.cuda.is_available():
        return Links(backends=backends)
    count = torch.cuda.device_count()
    chosen = range(count) if devices is None else sorted({each for each in devices if each < count})
    return Links(
        kind="cuda" if torch.version.hip is None else "hip",
        num_gpus=count,
        unreachable=tuple(
            (one, other)
            for one, other in itertools.permutations(chosen, 2)
            if not torch.cuda.can_device_access_peer(one, other)
        ),
        symmetric_memory=_has_symmetric_memory(),
        backends=backends,
    )


def symmetric_refusal(links: Links) -> str | None:
    """Why SYMMETRIC cannot run between GPUs that this process sees; None if it can.

    Ranks share a GPU if TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is 1, a variable of torch.

    Example:
        >>> symmetric_refusal(Links(kind="cuda", num_gpus=1, symmetric_memory=True))
        'this process sees one GPU; make all GPUs of the host visible to every rank'
    """
    if links.num_gpus == 0:
        return "there is no GPU"
    if not links.symmetric_memory:
        return "this torch has no symmetric memory for its GPUs"
    if links.num_gpus == 1 and not ranks_may_share_gpus():
        hidden = (links.num_host_gpus or 1) - 1
        seen = f"one GPU of {links.num_host_gpus}" if hidden else "one GPU"
        return f"this process sees {seen}; make all GPUs of the host visible to every rank"
    if links.unreachable:
        one, other = links.unreachable[0]
        return f"no peer access from GPU {one} to GPU {other}"
    return None


def collective_refusal(links: Links) -> str | None:
    """Why GATHER and ALL_TO_ALL cannot run; None if they can.

    Example:
        >>> collective_refusal(Links(backends=("gloo",))) is None
        True
    """
    if not links.backends:
        return "this torch has no backend for torch.distributed"
    return None


def group_refusal(places: Sequence[RankPlace]) -> str | None:
    """Why SYMMETRIC cannot run in a group; None if it can.

    Args:
        places: one for each rank.

    Example:
        >>> group_refusal([RankPlace("a"), RankPlace("b")])
        'the ranks run on 2 hosts; it needs one'
    """
    for rank, place in enumerate(places):
        if place.refusal is not None:
            return f"rank {rank}: {place.refusal}"
    hosts = {place.host for place in places}
    if len(hosts) > 1:
        return f"the ranks run on {len(hosts)} hosts; it needs one"
    return None


def kernel_refusal(target: Target) -> str | None:
    """Why SYMMETRIC has no kernels for a device; None if it has."""
    try:
        from .exchange import host
    except ImportError as error:
        return f"its kernels cannot be imported ({error})"
    return host.refuse(2, target)


def transports(links: Links, kernels: str | None = None) -> list[TransportState]:
    """Every transport: whether it can run here, and which one AUTO takes.

    Args:
        links: what was found. kernels: what `kernel_refusal` says.

    Example:
        >>> [state.is_auto for state in transports(Links(backends=("gloo",)))]
        [False, True, False]
    """
    symmetric, collective = symmetric_refusal(links) or kernels, collective_refusal(links)
    preferred = "AUTO prefers {}"
    if symmetric is None:
        first = "one-sided kernels, no collective: the least latency"
        rest = preferred.format("SYMMETRIC")
        return [
            TransportState("SYMMETRIC", None, True, first),
            TransportState("GATHER", collective, False, "" if collective else rest),
            TransportState("ALL_TO_ALL", collective, False, "" if collective else rest),
        ]
    return [
        TransportState("SYMMETRIC", symmetric),
        TransportState(
            "GATHER",
            collective,
            collective is None,
            "" if collective else "runs on every backend; can be captured with NCCL",
        ),
        TransportState(
            "ALL_TO_ALL",
            collective,
            False,
            "" if collective else f"{preferred.format('GATHER')}: this one synchronises the host",
        ),
    ]


def _has_backend(name: str) -> bool:
    found = getattr(dist, f"is_{name}_available", None)
    return bool(found and found())


def _has_symmetric_memory() -> bool:
    """Whether torch has symmetric memory, and a build for GPUs."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return False
    return hasattr(_symmetric_memory, "rendezvous") and torch.cuda.is_available()


def _has_multicast() -> bool | None:
    """Links as the driver and torch report them; no multicast object is made."""
    try:
        from torch._C import _autograd, _distributed_c10d

        kind = _autograd.DeviceType.CUDA
        return bool(_distributed_c10d._SymmetricMemory.has_multicast_support(kind, 0))
    except (ImportError, AttributeError, RuntimeError):
        return None


def _nvidia_smi(*arguments: str) -> str | None:
    """Output of nvidia-smi; None where it does not exist or fails."""
    try:
        done = subprocess.run(
            ("nvidia-smi", *arguments),
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _host_gpus() -> int | None:
    text = _nvidia_smi("--list-gpus")
    return None if text is None else len(_GPU_LINE.findall(text))


def _nvlink_gbs() -> float | None:
    text = _nvidia_smi("nvlink", "-s", "-i", "0")
    return None if text is None else sum(map(float, _NVLINK_RATE.findall(text)))

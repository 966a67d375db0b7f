"""Findings of `mxpert doctor` on a machine: packages, compiler, GPU, links."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core import cuda_compiler
from ...core.problem import Target
from ...core.toolchain import toolchain
from ...distributed.links import Links, TransportState
from ...errors import message
from ..report import Row, package_version

MINIMUM_VERSIONS = {"torch": "2.11", "triton": "3.6", "numpy": "1.26", "safetensors": "0.5"}
"""As in pyproject.toml; a test compares the two."""
TESTED_UP_TO = {"torch": "2.15", "triton": "3.9"}
"""Newest release series that the kernels were compiled with; pyproject.toml admits no later one."""
OPTIONAL = {"transformers": "5.7", "matplotlib": "3.8"}
MINIMUM_PYTHON = (3, 11)
BESIDE = ("accelerate", "vllm", "sglang")
"""Packages that mxpert works with and does not need; their versions belong into a report."""
OK, INFO, WARNING, BROKEN = "ok", "info", "warning", "broken"
CACHE_REMEDY = "set TRITON_CACHE_DIR to a folder that can be written"
PACKAGES, COMPILER, DEVICE, LINKS = "Packages", "Compiler", "Device", "Several GPUs"


@dataclass(frozen=True)
class Finding:
    """One line of the examination.

    state: "ok", "warning", "broken", or "info" for what is neither right nor wrong.
    """

    name: str
    value: str
    state: str
    note: str = ""
    section: str = PACKAGES


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison.

    >>> release("2.13.0+cpu") >= release("2.11")
    True
    """
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def installed_version(name: str) -> str | None:
    """Version of a package, or of the distribution that brings its module under another name.

    The ROCm build of torch brings Triton so. None if neither is there.
    """
    found = package_version(name)
    if found is None:
        others = importlib.metadata.packages_distributions().get(name, ())
        found = next((package_version(other) for other in others), None)
    return found


def examine_version(name: str, minimum: str, *, needed: bool, remedy: str) -> Finding:
    """Whether a package is there, new enough, and not newer than what was tested."""
    found = installed_version(name)
    if found is None:
        return Finding(name, "absent", BROKEN if needed else INFO, remedy)
    if release(found) < release(minimum):
        return Finding(name, found, BROKEN if needed else WARNING, f"need {minimum} or newer")
    if name not in TESTED_UP_TO:
        return Finding(name, found, OK)
    newest = TESTED_UP_TO[name]
    if release(found)[:2] > release(newest):
        return Finding(
            name,
            found,
            WARNING,
            f"newer than the tested {minimum} to {newest}; pip install '{requirement(name)}'",
        )
    return Finding(name, found, OK, f"tested: {minimum} to {newest}")


def requirement(name: str) -> str:
    """What pip is asked for, as in pyproject.toml.

    >>> requirement("triton"), requirement("numpy")
    ('triton>=3.6,<3.10', 'numpy>=1.26')
    """
    minimum = f"{name}>={MINIMUM_VERSIONS[name]}"
    if name not in TESTED_UP_TO:
        return minimum
    major, minor = release(TESTED_UP_TO[name])
    return f"{minimum},<{major}.{minor + 1}"


def examine_versions(target: Target, facts: Row) -> list[Finding]:
    """mxpert, Python and packages against the supported ranges; a GPU needs Triton."""
    fits = sys.version_info >= MINIMUM_PYTHON
    commit, _, changes = (facts["commit"] or "").partition("+")
    findings = [
        Finding(
            "mxpert",
            facts["versions"]["mxpert"],
            OK,
            f"commit {commit[:12]}{changes and ', with changes'}"
            if commit
            else "installed from a package, without a commit",
        ),
        Finding(
            "python",
            platform.python_version(),
            OK if fits else BROKEN,
            "" if fits else "need 3.11 or newer",
        ),
    ]
    for name, minimum in MINIMUM_VERSIONS.items():
        needed = name != "triton" or target.kind != "cpu"
        remedy = f"pip install '{requirement(name)}'"
        if name == "triton" and target.kind == "hip":
            remedy = "install the ROCm build of torch again: it brings Triton"
        findings.append(examine_version(name, minimum, needed=needed, remedy=remedy))
    for name, minimum in OPTIONAL.items():
        findings.append(
            examine_version(
                name, minimum, needed=False, remedy=f"optional: pip install '{name}>={minimum}'"
            )
        )
    for name in BESIDE:
        findings.append(Finding(name, package_version(name) or "absent", INFO))
    return findings


def cache_fault(directory: str) -> str | None:
    """Why Triton cannot store kernels in a folder; None if a file could be written there."""
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory) as probe:
            probe.write(bytes(4096))
            probe.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


def require_cache() -> None:
    """Raise ValueError if kernels cannot be stored, before one is compiled."""
    directory = toolchain().cache_directory
    fault = cache_fault(directory)
    if fault is not None:
        got = f"{directory} ({fault})"
        raise ValueError(
            message("doctor", "Triton's cache", "a folder to write", got, CACHE_REMEDY)
        )


def examine_toolchain(target: Target) -> list[Finding]:
    """The assembler, and whether compiled kernels can be kept."""
    state = BROKEN if target.kind != "cpu" else WARNING
    try:
        tools = toolchain()
    except ImportError as error:
        return [Finding("triton", "cannot be imported", state, str(error), COMPILER)]
    fault = cache_fault(tools.cache_directory)
    cache = Finding("triton cache", tools.cache_directory, OK, section=COMPILER)
    if fault is not None:
        note = f"cannot be written: {fault}; {CACHE_REMEDY}"
        cache = Finding("triton cache", tools.cache_directory, state, note, COMPILER)
    assembler = Finding("ptxas", tools.ptxas or "absent", INFO, section=COMPILER)
    return [assembler, *_examine_cuda_compiler(target), cache]


def _examine_cuda_compiler(target: Target) -> list[Finding]:
    """What compiles the kernels in CUDA C++: on NVIDIA GPUs of a kind that has such kernels."""
    if target.arch != "sm_90":
        return []
    name, reason = cuda_compiler.COMPILER, cuda_compiler.missing_compiler()
    if reason is None:
        return [Finding(name, package_version(name) or "absent", OK, section=COMPILER)]
    note = f"layers of one to four tokens take several launches: the fast kernel {reason}"
    return [Finding(name, "absent", WARNING, note, COMPILER)]


def examine_device(target: Target, facts: Row) -> Finding:
    """GPUs that torch sees, and their driver."""
    if target.kind == "cpu":
        return Finding("gpu", "none", INFO, "every operation runs on the CPU", DEVICE)
    driver = facts.get("gpu", {}).get("driver_version", "unknown")
    return Finding("gpu", f"{torch.cuda.device_count()} visible", OK, f"driver {driver}", DEVICE)


def examine_links(links: Links, states: Sequence[TransportState]) -> list[Finding]:
    """Links between the GPUs, the transport that AUTO takes, and why not the others."""
    findings = [Finding("backends", ", ".join(links.backends) or "none", INFO, section=LINKS)]
    hidden = (links.num_host_gpus or links.num_gpus) - links.num_gpus
    note = f"{hidden} more on this host are hidden from this process" if hidden > 0 else ""
    state = INFO
    if links.num_gpus < 2:
        value = "one GPU" if links.num_gpus else "no GPU"
    elif links.nvlink_gbs is None:
        value = "unknown"
    else:
        rate = f"NVLink, {links.nvlink_gbs:.0f} GB/s a direction"
        value = rate if links.nvlink_gbs else "no NVLink"
    if links.unreachable:
        pairs = links.num_gpus * (links.num_gpus - 1)
        note, state = f"no peer access in {len(links.unreachable)} of {pairs} directions", WARNING
    findings.append(Finding("link", value, state, note, LINKS))
    if links.multicast is not None:
        value = "on" if links.multicast else "off"
        findings.append(Finding("multicast", value, INFO, "no transport needs it", LINKS))
    for each in states:
        value = "AUTO" if each.is_auto else "can run" if each.refusal is None else "cannot run"
        state = OK if each.refusal is None else INFO
        findings.append(Finding(each.name, value, state, each.refusal or each.note, LINKS))
    return findings

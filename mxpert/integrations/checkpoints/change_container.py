"""Write a checkpoint with quantised experts in another container, where no weight changes.

Matrices are read, checked and written one after the other. What cannot be held exactly is refused,
and the destination appears when it is complete and was read back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...errors import Checks
from .container_plan import OP, ConversionPlan, QuantizedCheckpoint, Shard, plan_conversion
from .container_shards import copy_side_files, verify_shard, write_config, write_shard

ProgressCallback = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, what is being done)."""


@dataclass(frozen=True)
class ConversionReport:
    """Outcome of `convert_checkpoint`.

    Args:
        source, destination: directories.
        source_container, container: names of both.
        source_format, weight_format: of the weights ("MXFP4", "NVFP4", "MXFP8", "INT4").
        modules, matrices: numbers of experts modules and of matrices that were converted.
        activation_scales: tensors with scales of activations, which were left out.
        source_bytes, bytes: of all tensors, before and after.
        failures: what verification found; the destination does not exist then.
    """

    source: str
    destination: str
    source_container: str
    container: str
    source_format: str
    weight_format: str
    modules: int
    matrices: int
    activation_scales: int
    source_bytes: int
    bytes: int
    failures: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"verified": self.verified}


def convert_checkpoint(
    source: Path | str,
    destination: Path | str,
    *,
    container: str,
    on_progress: ProgressCallback | None = None,
) -> ConversionReport:
    """Write a checkpoint with quantised experts in another container; no weight changes.

    Each decoded weight has the same bits before and after. Between containers of one format codes,
    scales and zero points are stored in another order alone. MXFP4 becomes NVFP4 where each
    expert's scales lie within 18 binades, and NVFP4 becomes MXFP4 where it is a cast of it; MXFP4
    becomes MXFP8 with the same scales. Other quantised layers are converted like the experts, and
    dense tensors and side files copied. Scales of activations are left out: what is written is
    quantised in its weights alone.

    Memory holds one output file, of at most 4 GiB, or one layer of stacked experts. The
    destination is written under a temporary name beside its own, read back, compared, and renamed.

    Args:
        source: directory of a checkpoint in any container that `load_expert_weights` reads, or the
            id of a model on the Hugging Face Hub.
        destination: directory to write; it must not exist.
        container: "gpt-oss", "mxfp4-pack-quantized", "quark", "modelopt-nvfp4",
            "nvfp4-pack-quantized", "minimax-mxfp8", "modelopt-mxfp8", "mxfp8-quantized",
            "pack-quantized", "awq" or "gptq".
        on_progress: called after every expert and every copied tensor, and while reading back.

    Returns:
        ConversionReport; `failures` lists what verification found.

    Raises:
        ValueError: a bad source, a destination that exists, an unknown container, or weights that
            the container does not hold exactly. No destination is left behind.
        UnsupportedError: a format or a form of it that is not served.

    Example:
        >>> convert_checkpoint("/nowhere", "/tmp/out", container="quark")
        Traceback (most recent call last):
        ValueError: convert_checkpoint: /nowhere — need an existing checkpoint, \
got no such file or directory
    """
    plan = plan_conversion(source, destination, container)
    need, target = Checks(OP), plan.destination
    need(
        not target.exists() and not target.is_symlink(),
        str(target),
        "a destination that does not exist",
        "one that does",
        "name another one, or remove it yourself",
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    progress = _Progress(on_progress, 2 * plan.total_bytes)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
        folder = Path(work) / "checkpoint"
        folder.mkdir()
        written = {}
        for shard in plan.shards:
            written[shard.name] = write_shard(plan, shard, folder, progress.advance)
            progress.finish(shard, "written")
        copy_side_files(plan, folder)
        write_config(plan, folder, written)
        failures = _verify(plan, folder, progress)
        if not failures:
            folder.rename(target)
    return ConversionReport(
        source=str(plan.source.reader.path),
        destination=str(target),
        source_container=plan.source.container.name,
        container=plan.target.container,
        source_format=plan.source.container.weight_format,
        weight_format=plan.target.weight_format,
        modules=len(plan.source.modules),
        matrices=sum(len(unit.names) for shard in plan.shards for unit in shard.units),
        activation_scales=len(plan.left_out),
        source_bytes=sum(plan.source.reader.info(name).nbytes for name in plan.source.reader.names),
        bytes=sum(each.nbytes for each in written.values()),
        failures=failures,
    )


def _verify(plan: ConversionPlan, folder: Path, progress: _Progress) -> list[str]:
    """Read everything back as a user would, and compare each weight."""
    failures: list[str] = []
    try:
        written = QuantizedCheckpoint.open(folder, plan.target.weight_format)
        got, want = written.container.name, plan.target.container
        if got != want or written.modules.keys() != plan.source.modules.keys():
            return [f"{folder}: {len(written.modules)} modules in {got}, not as {want} has them"]
        for shard in plan.shards:
            failures += verify_shard(plan, shard, written, progress.advance)
            progress.finish(shard, "verified")
    except ValueError as error:  # an unreadable or incomplete destination
        failures.append(str(error))
    return failures


class _Progress:
    """Sums what is done of shards, each of which is written and read back."""

    def __init__(self, callback: ProgressCallback | None, total: int) -> None:
        self._callback = callback or (lambda done, total, what: None)
        self._total, self._before = total, 0

    def advance(self, done: int, what: str) -> None:
        """Report bytes of the shard in work."""
        self._callback(self._before + done, self._total, what)

    def finish(self, shard: Shard, what: str) -> None:
        """Report a shard that is done."""
        self._before += shard.source_bytes
        self._callback(self._before, self._total, f"{shard.name} {what}")

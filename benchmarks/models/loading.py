"""How fast experts in each container are read, decoded and prepared, and how much memory it takes.

    python -m benchmarks.models.loading --folder /tmp

Each container is written with random experts of Qwen3-30B-A3B's size (a file a layer), its pages
are dropped from the system's cache, and it is read back three ways, layer by layer: the bytes of
the files, the experts, and the experts prepared for the device. Torch has two threads. Without a
GPU the device is the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness.document import Row
from benchmarks.harness.run import Run
from benchmarks.harness.script import Script, machine, parse_list
from benchmarks.harness.tables import absences, bullets, page, row_table, where
from mxpert.integrations.checkpoints.load import load_expert_weights
from support.expert_containers import KINDS, write
from support.memory import held_and_peak

LAYERS, SIZES = 48, (2048, 768)
"""Of four experts each: 0.45 GB in 4 bits."""
DRY_LAYERS, DRY_SIZES = 2, (64, 96)
THREADS = 2
REPEATS = 3
GOAL_SHARE, GOAL_MBS = 0.8, 2000.0
PROTOCOL = {
    "data": f"random experts, {LAYERS} layers of 4, H {SIZES[0]}, F {SIZES[1]}, a file a layer",
    "cold": "pages of the files are dropped before each pass (POSIX_FADV_DONTNEED)",
    "read": "the files' bytes, one after the other",
    "load": "load_expert_weights on the device, each layer freed before the next",
    "prepare": "the same, and weights.prepare(device=...)",
    "peak": "most bytes of PyTorch's CPU allocator, over those of the largest layer, with one "
    "thread that reads",
    "figures": f"MB/s of the files, the best of {REPEATS} passes; {THREADS} threads",
}


def write_layers(folder: Path, container: str, layers: int, sizes: tuple[int, int]) -> None:
    """A checkpoint whose layers are copies of one."""
    write(folder, container, layers=(0,), sizes=sizes)
    (first,) = folder.glob("*.safetensors")
    tensors = load_file(first)
    first.unlink()
    weight_map = {}
    for layer in range(layers):
        named = {name.replace("layers.0.", f"layers.{layer}."): t for name, t in tensors.items()}
        file = f"model-{layer:05d}.safetensors"
        save_file(named, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(named, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop_pages(folder: Path) -> None:
    """Let the next read come from the disk, where the system can do that."""
    if hasattr(os, "posix_fadvise"):
        for file in files_of(folder):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_files(folder: Path) -> None:
    for file in files_of(folder):
        file.read_bytes()


@dataclass(kw_only=True)
class LoadingRun(Run):
    """folder: where checkpoints are written; None for a temporary one. is_tiny: for a dry run."""

    folder: Path | None
    is_tiny: bool

    @property
    def dry(self) -> bool:
        """A CPU is a device that this script measures."""
        return self.is_tiny


def rate(work: Callable[[Path], object], folder: Path, size: int, run: Run) -> float:
    """MB/s of the fastest pass over the files, each from the disk."""
    seconds = []
    for _ in range(1 if run.dry else REPEATS):
        drop_pages(folder)
        start = time.perf_counter()
        work(folder)
        run.synchronize()
        seconds.append(time.perf_counter() - start)
    return size / min(seconds) / 1e6


def measure_container(run: LoadingRun, container: str) -> None:
    """One row."""

    def load(folder: Path) -> None:
        for _path, weights in load_expert_weights(folder, device=run.device):
            del weights

    def prepare(folder: Path) -> None:
        for _path, weights in load_expert_weights(folder, device=run.device):
            prepared = weights.prepare(device=run.device)
            del weights, prepared

    layers, sizes = (DRY_LAYERS, DRY_SIZES) if run.dry else (LAYERS, SIZES)
    with TemporaryDirectory(dir=run.folder) as parent:
        folder = Path(parent) / "checkpoint"
        write_layers(folder, container, layers, sizes)
        size = sum(file.stat().st_size for file in files_of(folder))
        held, peak = held_and_peak(folder)
        row: Row = dict(container=container, weights=KINDS[container].format, bytes=size)
        row |= {
            name: rate(work, folder, size, run)
            for name, work in (("read", read_files), ("load", load), ("prepare", prepare))
        }
        run.add(row | {"peak_over_layer": peak / held})
        shutil.rmtree(folder)


def measure(options: argparse.Namespace, run: LoadingRun) -> int:
    """All containers until the time limit; 0 if each could be read."""
    torch.set_num_threads(THREADS)
    for container in run.each(options.containers):
        with run.blaming(container):
            measure_container(run, container)
    run.save()
    print(markdown(run.as_json()))
    if not run.dry:
        SCRIPT.write_tables(run.path, run.as_json())
    return 1 if run.failures else 0


def markdown(document: Row) -> str:
    """A line a container, and the goal."""
    meta, rows = document["meta"], document["rows"]
    met = [row for row in rows if row["load"] >= min(GOAL_SHARE * row["read"], GOAL_MBS)]
    columns = {
        "container": "{container}",
        "weights": "{weights}",
        "MB": "{mb:.0f}",
        "read, MB/s": "{read:.0f}",
        "load": "{load:.0f}",
        "load and prepare": "{prepare:.0f}",
        "peak / layer": "{peak_over_layer:.2f}",
    }
    return page(
        "# Loading experts",
        where(meta) + ".",
        row_table([row | {"mb": row["bytes"] / 1e6} for row in rows], columns),
        f"Goal: load at {GOAL_SHARE} of the rate of reading or at {GOAL_MBS:.0f} MB/s: "
        f"{len(met)} of {len(rows)} containers.",
        bullets(meta["protocol"]),
        absences("Not measured", [f"{n}: {e}" for n, e in meta["failures"].items()], meta["left"]),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    add = parser.add_argument
    add("--containers", default=",".join(KINDS), help="default: %(default)s")
    add("--folder", type=Path, help="where checkpoints are written; default: a temporary one")


def prepare_run(options: argparse.Namespace) -> LoadingRun:
    """The document."""
    options.containers = parse_list(options.containers, list(KINDS), "--containers")
    meta = machine(options, "device", "versions", "commit", "date", protocol=PROTOCOL)
    own = dict(folder=options.folder, is_tiny=options.dry_run)
    return LoadingRun.of(options, meta, ("container",), **own)


SCRIPT = Script(
    "loading",
    __doc__,
    measure,
    prepare_run,
    add_options,
    limit=200.0,
    markdown=markdown,
    needs_gpu=False,
)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())

"""One invocation of a script that measures cell by cell: its document, device, deadline, end."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from benchmarks.harness.document import Document, Row
from benchmarks.harness.script import Item, Script, within
from mxpert.testing.timing import Timing


@dataclass(kw_only=True)
class Run(Document):
    """What one invocation works with, and what it has found."""

    device: torch.device
    deadline: float

    @classmethod
    def of(
        cls,
        options: argparse.Namespace,
        meta: Row,
        key: Sequence[str],
        blame: Sequence[str] = (),
        **more: Any,
    ) -> Self:
        """The run that the options describe; with --resume it has the rows of its file.

        Raises:
            ValueError: the file is of another device, commit or protocol.
        """
        place = dict(device=options.device, deadline=options.deadline)
        run = cls(options.path, meta, key, blame, **place, **more)
        if getattr(options, "resume", False) and run.path.is_file():
            run.take_over(json.loads(run.path.read_text("utf-8")))
        return run

    @property
    def dry(self) -> bool:
        """Whether nothing is measured: everything is tiny then."""
        return not self._on_gpu

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def take_over(self, old: Row) -> None:
        """Go on where an earlier run ended."""
        self.resume(old)

    def synchronize(self) -> None:
        """Wait for the device; kernels of a CPU are done."""
        if self._on_gpu:
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def blaming(self, *where: str) -> Iterator[None]:
        """Note an exception of the block as the failure of a cell, and go on."""
        try:
            yield
        except Exception as error:
            print(f"{' '.join(where)}: {self.fail(where, error)}", file=sys.stderr, flush=True)

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Items until the time limit; the document is saved after each, `left` names the others."""
        left: list[Item] = []
        for item in within(items, self.deadline, left):
            began = time.monotonic()
            yield item
            if self._on_gpu:
                torch.cuda.empty_cache()
            self.save()
            print(f"{item}: {time.monotonic() - began:.1f} s", flush=True)
        self.left += map(str, left)

    def end(self, script: Script, options: argparse.Namespace, of: str = "cells") -> int:
        """Write the document and its tables; the exit code: 0 if nothing failed."""
        self.save()
        if self.meta["ceilings"]:  # every page names them; dry runs of compilers have none
            script.write_tables(self.path, self.as_json())
        seconds = time.monotonic() - options.began
        print(
            f"wrote {self.path}: {len(self.rows)} rows, {len(self.failures)} failures, "
            f"{len(self.left)} {of} left, {seconds:.0f} s"
        )
        return 1 if self.failures else 0


def times_of(timing: Timing) -> Row:
    """The columns `us`, the median, and `us_spread`, the width of the 10–90 % band."""
    return {"us": timing.us, "us_spread": timing.high_us - timing.low_us}

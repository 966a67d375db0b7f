"""The command line that all benchmark scripts have in common."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks import ROOT
from benchmarks.harness.document import Row
from mxpert.cli.report import environment
from mxpert.core.target import detect_target
from mxpert.errors import message

RESULTS = ROOT / "benchmarks/results"
Markdown = Callable[[Row], str]
Item = TypeVar("Item")
_OF_MEMORY = re.compile(r"\d+gb|hbm\d\w*")


def device_folder(name: str) -> str:
    """The folder of a device's results: its name without size and kind of its memory.

    >>> device_folder("NVIDIA H100 80GB HBM3"), device_folder("NVIDIA H100 PCIe")
    ('nvidia-h100', 'nvidia-h100-pcie')
    """
    return "-".join(word for word in name.lower().split() if not _OF_MEMORY.fullmatch(word))


def bare_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that prints a script's docstring as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


@dataclass(frozen=True)
class Script:
    """One script's command line: options, device, paths, refusals.

    Args:
        name: the file's, without .py. description: for --help.
        measure: gets the options and what `prepare` returned; returns the exit code.
        prepare: checks the script's own options. add_options: adds them to the parser.
        limit: default of --time-limit, in seconds; None: there is no such option.
        resumes: whether there is --resume.
        output: the JSON in the folder of the device. suffix: of that folder's name.
        markdown: what --render writes from a JSON; None: there is no such option.
        needs_gpu: False measures on the CPU where there is no GPU.
    """

    name: str
    description: str | None
    measure: Callable[[argparse.Namespace, Any], int]
    prepare: Callable[[argparse.Namespace], Any] = lambda options: None
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    limit: float | None = None
    resumes: bool = False
    output: str = ""
    suffix: str = ""
    markdown: Markdown | None = None
    needs_gpu: bool = True

    def parser(self) -> argparse.ArgumentParser:
        """The script's own options, and those that all have in common."""
        parser = bare_parser(self.description)
        add = parser.add_argument
        self.add_options(parser)
        add("--output", type=Path, help=f"default: {self.file} in the device's folder")
        add("--commit", help="where the checkout has no history")
        add("--dry-run", action="store_true", help="tiny on the CPU: proves that everything runs")
        if self.limit is not None:
            text = "what does not fit is listed as left; default: %(default)s"
            add("--time-limit", type=float, default=self.limit, metavar="SECONDS", help=text)
        if self.resumes:
            add("--resume", action="store_true", help="keep what --output holds, measure the rest")
        if self.markdown is not None:
            text = "only write FILE's .md again, from the JSON alone"
            add("--render", type=Path, metavar="FILE", help=text)
        return parser

    @property
    def file(self) -> str:
        return self.output or f"{self.name}.json"

    def default_output(self, device: torch.device) -> Path:
        """Where results of a device belong."""
        return RESULTS / (device_folder(detect_target(device).name) + self.suffix) / self.file

    def complete(self, options: argparse.Namespace) -> None:
        """Add `device`, `path`, `began` and `deadline` (of `time.monotonic`) to the options.

        Raises:
            ValueError: there is no GPU, which the script needs, and it is no dry run.
        """
        options.began = time.monotonic()
        options.deadline = options.began + getattr(options, "time_limit", 0.0)
        on_cpu = options.dry_run or not (self.needs_gpu or torch.cuda.is_available())
        options.device = torch.device("cpu" if on_cpu else "cuda")
        if options.device.type == "cuda" and not torch.cuda.is_available():
            hint = "run with --dry-run to try the script"
            raise ValueError(message(self.name, "device", "a GPU", "none", hint))
        dry = ROOT / "reports" / f"{self.name.replace('_', '-')}-dry-run.json"
        own = dry if options.dry_run else self.default_output(options.device)
        options.path = options.output or own

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Prepare, then measure; the exit code, 2 for options that are refused."""
        options = self.parser().parse_args(arguments)
        options.owns_process = arguments is None
        try:
            if self.markdown is not None and options.render is not None:
                return self.render(options.render)
            self.complete(options)
            prepared = self.prepare(options)
        except (ValueError, TypeError) as error:
            print(error, file=sys.stderr)
            return 2
        return self.measure(options, prepared)

    def render(self, path: Path) -> int:
        """Write the tables of an earlier run's JSON beside it; the exit code.

        Raises:
            ValueError: `path` is not a JSON file.
        """
        if not path.is_file():
            raise ValueError(message(self.name, "--render", "a JSON file", path))
        self.write_tables(path, json.loads(path.read_text("utf-8")))
        return 0

    def write_tables(self, path: Path, document: Row) -> None:
        """The document's tables beside its JSON."""
        if self.markdown is not None:
            path.with_suffix(".md").write_text(self.markdown(document), encoding="utf-8")


def restart(options: argparse.Namespace, *limits: str) -> None:
    """Go on in a new process where this one's CUDA context is lost; what failed is on record.

    Args:
        limits: options in seconds, from which the time that has passed is taken.
    """
    seconds = time.monotonic() - options.began
    names = tuple(f"--{name.replace('_', '-')}" for name in limits)
    rest = [
        word
        for index, word in enumerate(sys.argv[1:])
        if not word.startswith(names) and sys.argv[index] not in names
    ]
    for option, name in zip(names, limits, strict=True):
        value = getattr(options, name)
        rest += [f"{option}={max(0.0, value - seconds):.0f}"] if math.isfinite(value) else []
    rest += [] if options.resume else ["--resume"]
    print("the CUDA context is lost; going on in a new process", flush=True)
    command = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]  # -m and this module
    os.execv(sys.executable, [sys.executable, *command, *rest])


def machine(options: argparse.Namespace, *names: str, **more: Any) -> Row:
    """Meta of a run: the environment, all of it or what is named, and `more`.

    `clocks` are those that nvidia-smi tells; `versions` then contain the driver's.
    """
    facts = environment(options.device)
    facts["commit"] = options.commit or facts["commit"]
    if "clocks" in names:
        facts["clocks"] = facts.get("gpu", {})
        facts["versions"] = facts["versions"] | {"driver": facts["clocks"].get("driver_version")}
    return {name: facts[name] for name in names or facts} | more


def within(items: Iterable[Item], deadline: float, left: list[Item]) -> Iterator[Item]:
    """Items until one as long as the longest so far would not fit; the others go to `left`."""
    longest = 0.0
    for item in items:
        began = time.monotonic()
        if began + longest > deadline:
            left.append(item)
            continue
        yield item
        longest = max(longest, time.monotonic() - began)


class Seconds(Counter[str]):
    """Where the time of a run went."""

    @contextlib.contextmanager
    def clock(self, what: str) -> Iterator[None]:
        """Add the time of a block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self[what] += time.monotonic() - began

    def __str__(self) -> str:
        parts = (f"{what} {seconds:.1f}" for what, seconds in self.most_common())
        return "seconds: " + ", ".join(parts)


def parse_list(text: str, allowed: Sequence[str], option: str) -> list[str]:
    """Comma-separated choices out of `allowed`.

    >>> parse_list("a16, a8", ["a16", "a8"], "--activations")
    ['a16', 'a8']
    """
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [name for name in chosen if name not in allowed]
    if wrong or not chosen:
        need = f"some of {', '.join(allowed)}"
        raise ValueError(message("benchmarks", option, need, repr(wrong[0] if wrong else text)))
    return list(dict.fromkeys(chosen))


def parse_tokens(text: str) -> list[int]:
    """Comma-separated positive token counts.

    >>> parse_tokens("1,16")
    [1, 16]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        need = "positive numbers, comma-separated"
        raise ValueError(message("benchmarks", "--tokens", need, repr(text)))
    return list(dict.fromkeys(map(int, parts)))

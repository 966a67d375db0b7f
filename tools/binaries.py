"""Record every binary that the ahead-of-time tests compile, and compare two records.

A change of structure must not change what runs on a GPU. `record` runs tests that compile kernels
(sm_80 to sm_103 and gfx950) with a compiler cache of its own and without source locations, and
writes a hash of each PTX or AMDGCN text under the kernel's name. `compare` lists what differs.

    python tools/binaries.py record before.json
    python tools/binaries.py record after.json
    python tools/binaries.py compare before.json after.json --renamed old_kernel=new_kernel

Kernels' names are left out of the hashes, so that a renamed kernel compares equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = (".ptx", ".amdgcn")

Record = dict[str, list[str]]
"""Kernel and kind of text → hashes of its different texts."""


def compiling_tests() -> list[str]:
    """Tests that compile kernels of the package: `test_*_aot.py`, and all of cdna4's."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    chosen = (each for each in tests if each.stem.endswith("_aot") or "cdna4" in str(each))
    return [str(each.relative_to(ROOT)) for each in chosen]


def texts(cache: Path) -> Record:
    """Hashes of all texts in a compiler cache, by kernel and kind of text."""
    found: dict[str, set[str]] = {}
    for path in cache.rglob("*"):
        if path.suffix in SUFFIXES:
            text = path.read_text(encoding="utf-8").replace(path.stem, "KERNEL")
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            found.setdefault(f"{path.stem} {path.suffix[1:]}", set()).add(digest)
    return {key: sorted(hashes) for key, hashes in sorted(found.items())}


def record(output: Path, arguments: list[str]) -> int:
    """Run the tests, and write the record; return pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"TRITON_CACHE_DIR": folder, "TRITON_DISABLE_LINE_INFO": "1"}
        command = [sys.executable, "-m", "pytest", "-q", *(arguments or compiling_tests())]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False)
        made = texts(Path(folder))
    output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{output}: {len(made)} kernels, {sum(map(len, made.values()))} different binaries")
    return done.returncode


def compare(before: Record, after: Record, renamed: dict[str, str]) -> list[str]:
    """Lines that say which kernels have texts on one side only."""
    old: dict[str, set[str]] = {}
    for key, hashes in before.items():
        name, kind = key.rsplit(" ", 1)
        old.setdefault(f"{renamed.get(name, name)} {kind}", set()).update(hashes)
    lines = []
    for key in sorted(old.keys() | after.keys()):
        lost, new = old.get(key, set()) - {*after.get(key, ())}, {*after.get(key, ())}
        new -= old.get(key, set())
        if lost or new:
            lines.append(f"{key}: {len(lost)} only before, {len(new)} only after")
    return lines


def main(arguments: list[str]) -> int:
    """Run one of the two commands; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="compile, and write the hashes")
    recorder.add_argument("output", type=Path)
    recorder.add_argument("tests", nargs=argparse.REMAINDER, help="pytest's arguments")
    comparer = commands.add_parser("compare", help="list what differs; exit status 1 if anything")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    comparer.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    options = parser.parse_args(arguments)
    if options.command == "record":
        return record(options.output, options.tests)
    before, after = (
        json.loads(path.read_text(encoding="utf-8")) for path in (options.before, options.after)
    )
    lines = compare(before, after, dict(pair.split("=", 1) for pair in options.renamed))
    print("\n".join(lines) or f"{sum(map(len, after.values()))} binaries, 0 differ")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

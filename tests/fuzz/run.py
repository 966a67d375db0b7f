"""Random calls of every public function, in a process of its own: prints a JSON report.

Each call starts from right arguments and exchanges none, one or two of them (or of the tensors
inside them). What may come of it: an error in the library's form, or an answer. An answer has the
shapes and dtypes of the right call's where the arguments' geometry is unchanged, and its values
where they hold the same values; where anything else was accepted, contiguous copies of the same
arguments give the same answer. Right calls are compared with float64 where the target knows how.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import math
import os
import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import fuzz_values as wrong
import hypothesis
import torch
from fuzz_targets import FOLDER, TARGETS, Target
from hypothesis import strategies as st

from mxpert import UnsupportedError
from mxpert.formats import MXTensor, TokenRows

SECONDS_PER_CALL = 60
MEMORY = 16 << 30


@dataclass
class Report:
    """What happened so far; a bug is counted once for each target and kind."""

    calls: int = 0
    errors: int = 0
    answers: int = 0
    by_target: dict[str, int] = field(default_factory=dict)
    bugs: dict[str, str] = field(default_factory=dict)


def is_documented(error: BaseException) -> bool:
    text = str(error)
    return (
        type(error) in (ValueError, TypeError, UnsupportedError, IndexError)
        and ": " in text
        and " — need " in text
        and ", got " in text
    )


def mutate(
    rng: random.Random, arguments: dict[str, Any], skip: frozenset[str]
) -> tuple[str, str, dict[str, Any]]:
    """What kind of change, which, and the arguments with it.

    Kinds: "none", "values" (equal values), "geometry" (other values), "other".
    """
    names = [name for name in arguments if name not in skip]
    if not names or rng.random() < 0.2:
        return "none", "", arguments
    name = rng.choice(names)
    parts = wrong.tensor_parts(arguments[name])
    if not parts or rng.random() < 0.3:
        value = rng.choice(wrong.VALUES)
        return "other", f"{name} = {wrong.describe(value)}", arguments | {name: value}
    part = rng.choice(list(parts))
    kind, table = rng.choice(
        (
            ("values", wrong.SAME_VALUES),
            ("geometry", wrong.SAME_GEOMETRY),
            ("other", wrong.OTHER),
            ("other", wrong.OTHER),
        )
    )
    how = rng.choice(list(table))
    try:
        changed = table[how](parts[part])
    except Exception:  # torch cannot make this one
        return "none", "", arguments
    where = f"{name}.{part} {how}" if part else f"{name} {how}"
    return kind, where, arguments | {name: Lazy(arguments[name], part, changed)}


@dataclass
class Lazy:
    """An aggregate with one tensor exchanged, made inside the watched call: it may refuse."""

    value: Any
    part: str
    changed: Any

    def make(self) -> Any:
        return wrong.with_part(self.value, self.part, self.changed)


def flat(result: Any) -> list[Any]:
    """Tensors and plain values of a result."""
    if isinstance(result, (tuple, list)):
        return [leaf for item in result for leaf in flat(item)]
    if isinstance(result, dict):
        return [leaf for item in result.values() for leaf in flat(item)]
    if isinstance(result, TokenRows):
        return [result.qdata, result.scale]
    parts = wrong.tensor_parts(result)
    if parts and not isinstance(result, torch.Tensor):
        facts = [(result.format, result.axis)] if isinstance(result, MXTensor) else []
        return [*parts.values(), *facts]
    return [result]


def same(left: Any, right: Any) -> bool:
    """Equal results, NaN equal to NaN."""
    a, b = flat(left), flat(right)
    return len(a) == len(b) and all(map(same_leaf, a, b))


def same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return False
        return a.device.type == "meta" or torch.allclose(
            a.detach().double(), b.detach().double(), rtol=1e-5, atol=1e-6, equal_nan=True
        )
    return type(a) is type(b)


def same_geometry(left: Any, right: Any) -> bool:
    a, b = flat(left), flat(right)
    return len(a) == len(b) and all(
        (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        else True
        for x, y in zip(a, b, strict=True)
    )


def close(result: Any, expected: Any, tolerance: float) -> bool:
    for a, b in zip(flat(result), flat(expected), strict=False):
        if not isinstance(b, torch.Tensor):
            if a != b:
                return False
            continue
        if a.shape != b.shape:
            return False
        error = (a.double() - b.double()).norm()
        if not error <= tolerance * max(1.0, b.double().norm().item()):
            return False
    return True


class Fuzz:
    """The calls of one process."""

    def __init__(self, log: Path) -> None:
        self.report, self.log = Report(), log.open("w", encoding="utf-8")

    def one(self, target: Target, seed: int) -> None:
        """Make a call from a seed, judge it, count it."""
        rng = random.Random(seed)
        torch.manual_seed(seed)
        right = target.arguments(rng)
        kind, change, arguments = mutate(rng, right, target.skip)
        if kind == "other" and rng.random() < 0.3:
            first = change.split(" ")[0].split(".")[0]
            _, second, arguments = mutate(rng, arguments, target.skip | {first})
            change = f"{change}, {second}"
        self.log.seek(0)
        self.log.truncate()
        self.log.write(f"{target.name} seed {seed}: {change}")
        self.log.flush()
        faulthandler.dump_traceback_later(SECONDS_PER_CALL, exit=True)
        try:
            problem = self.judge(target, kind, right, arguments)
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.report.calls += 1
        self.report.by_target[target.name] = self.report.by_target.get(target.name, 0) + 1
        if problem:
            key = f"{target.name}: {problem.splitlines()[0][:90]}"
            self.report.bugs.setdefault(key, f"seed {seed}: {change}\n{problem}")

    def judge(
        self, target: Target, kind: str, right: dict[str, Any], arguments: dict[str, Any]
    ) -> str | None:
        """What is wrong with a call; None where nothing is."""
        try:
            given = {
                name: value.make() if isinstance(value, Lazy) else value
                for name, value in arguments.items()
            }
            result = target.call(**given)
        except Exception as error:
            self.report.errors += 1
            if "can't allocate memory" in str(error):
                return None  # a size that the machine does not have room for
            if is_documented(error):
                return (
                    "refused: " + str(error)
                    if kind == "none"
                    and not target.name.endswith(("state_dict", "load", "convert"))
                    else None
                )
            frames = [
                f"{frame.filename.rpartition('/mxpert/')[2]}:{frame.lineno}: {frame.line}"
                for frame in traceback.extract_tb(error.__traceback__)
            ]
            ours = [line for line in frames if not line.startswith("/")]
            return "\n".join(
                [
                    f"{type(error).__name__} at {(ours or frames)[-1]}",
                    str(error)[:300],
                    *frames[-5:],
                ]
            )
        self.report.answers += 1
        if kind == "none":
            expected = target.expected(right) if target.expected else None
            if expected is not None and not close(result, expected, target.tolerance):
                return "wrong answer"
            return None
        if kind == "geometry" and not same_geometry(result, target.call(**right)):
            return "other values give another geometry"
        if kind == "values" and not same(result, target.call(**right)):
            return "equal values give another answer"
        again = target.call(**{name: wrong.plain(value) for name, value in given.items()})
        return None if same(result, again) else "contiguous copies give another answer"

    def run(self, calls: int, seed: int) -> None:
        share = math.ceil(calls / len(TARGETS))
        for number, target in enumerate(TARGETS):
            self.many(target, share, seed + number)

    def many(self, target: Target, calls: int, seed: int) -> None:
        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=calls,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(st.integers(0, 2**62))
        def test(number: int) -> None:
            self.one(target, number)

        test()


PLANTED = ("foreign", "wrong", "strides", "shape", "refusal", "crash", "hang")


def planted(call: Callable[..., Any], fault: str) -> Callable[..., Any]:
    """A function of one MXTensor with a fault."""

    def run(tensor: Any, **arguments: Any) -> Any:
        if fault == "crash":
            ctypes.string_at(0)
        if fault == "hang":
            faulthandler.dump_traceback_later(1, exit=True)
            time.sleep(60)
        if fault == "refusal":
            raise ValueError("dequantize: tensor — need nothing, got something")
        if fault == "foreign" and not isinstance(tensor, MXTensor):
            raise RuntimeError("from inside")
        result = call(tensor, **arguments)
        if fault == "wrong":
            return result + 1
        if fault == "strides" and not tensor.qdata.is_contiguous():
            return result + 1
        return result[:-1] if fault == "shape" and (tensor.scale == 255).any() else result

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=FOLDER / "log", help="the call in progress")
    parser.add_argument("--only", help="this target alone, with --one its seed")
    parser.add_argument("--one", type=int)
    parser.add_argument("--plant", choices=PLANTED, help="a fault to be found")
    options = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    started, fuzz = time.monotonic(), Fuzz(options.log.absolute())
    os.chdir(FOLDER)  # names such as "cpu" are tried as paths, too
    targets = [target for target in TARGETS if options.only in (None, target.name)]
    if options.plant:
        targets[0].call = planted(targets[0].call, options.plant)
    if options.one is not None:
        fuzz.one(targets[0], options.one)
    elif options.only:
        fuzz.many(targets[0], options.calls, options.seed)
    else:
        fuzz.run(options.calls, options.seed)
    json.dump(vars(fuzz.report) | {"seconds": time.monotonic() - started}, sys.stdout)


if __name__ == "__main__":
    main()

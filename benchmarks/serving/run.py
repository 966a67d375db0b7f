"""gpt-oss models in vLLM, with its own expert kernels and with mxpert's: decode, prefill, memory.

    python -m benchmarks.serving.run --dry-run                       # CPU build of vLLM
    python -m benchmarks.serving.run --models gpt-oss-20b --time-limit 540
    python -m benchmarks.serving.run --models gpt-oss-120b --time-limit 540 --resume
    python -m benchmarks.serving.render benchmarks/results/nvidia-h200/serving.json

Needs an environment with vLLM. Each backend is a process with one engine; weights and codes are
random. First the gate: on 2 layers, prompt log-probabilities beside vLLM's default. Then several
engines share the GPU and take turns: three rounds, all of them recorded. `--resume` measures what
the time limit left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.document import FACTS, Document, Row
from benchmarks.harness.script import Script, machine, parse_list
from benchmarks.serving.backends import BACKENDS, DEFAULT, OURS
from benchmarks.serving.gate import REFERENCES, judge
from benchmarks.serving.models import GATE_LAYERS, SIZES
from benchmarks.serving.process import EngineError, EngineProcess
from benchmarks.serving.rows import ENGINE_KEY, KEY_COLUMNS, SCHEMA
from mxpert.cli.report import package_version
from mxpert.errors import message

TOGETHER = {"gpt-oss-20b": 4, "gpt-oss-120b": 1, "tiny": 2}
"""Engines that share 139 GiB: weights of 13 and 61 GiB, and 4 to 6 GiB each beside them."""

PROMPT = 128
COLUMNS = ("phase", "concurrency", "prompt_tokens", "new_tokens", "seconds", "first_s")
COLUMNS += ("tokens_per_s",)
PROTOCOL = {
    "decode": f"greedy, prompts of {PROMPT} random tokens; tokens/s without the time of the first "
    "token, which is that of the same requests with one new token",
    "prefill": "prompts in one batch, one new token each; the best of three a round",
    "rounds": "engines of a group are loaded once and take turns, each round in another order",
    "request": "the first request after loading and the better of two further ones: a prompt of "
    "128 tokens, 32 new ones. In gates: Triton's cache empty, no CUDA graphs, 2 layers",
    "weights": "random codes, scales and values by tensor name; model memory is that of parameters",
}


@dataclass
class Phase:
    """The gate of a model (`is_gate`), or a group of engines that share the GPU."""

    model: str
    backends: list[str]
    is_gate: bool
    engines: dict[str, EngineProcess] = field(default_factory=dict)


@dataclass
class Bench:
    """What to measure, what is measured, where engines have their caches and logs."""

    options: argparse.Namespace
    document: Document
    folder: Path
    gates: dict[tuple[str, str], Row] = field(default_factory=dict)
    loaded: dict[tuple[str, str], Row] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    """Seconds of a model's longest group so far."""

    def save(self) -> None:
        sections = {"engines": self.loaded, "gates": self.gates}
        self.document.sections = {name: list(rows.values()) for name, rows in sections.items()}
        SCHEMA.validate(self.document.as_json())
        self.document.save()

    def missing(self, model: str, backend: str) -> list[int]:
        """Rounds without all of their rows."""
        done = [key[-1] for key in self.document.rows if key[:2] == (model, backend)]
        wanted = len(self.options.concurrency) + 1
        return [index for index in range(self.options.rounds) if done.count(index) < wanted]

    def start(self, phase: Phase) -> None:
        """Start the phase's processes; they import, and wait for the order to load."""
        options = self.options
        for name in phase.backends:
            spec = {
                "model": phase.model,
                "backend": name,
                "layers": GATE_LAYERS if phase.is_gate else None,
                "device": options.device.type,
                "eager": phase.is_gate or options.dry_run,
                "concurrency": [4] if phase.is_gate else options.concurrency,
                "prompt": options.prompt,
                "new_tokens": options.new_tokens,
                "prefill": options.prefill,
            }
            phase.engines[name] = EngineProcess(spec, self.folder / phase.model / name)

    def each(self, phase: Phase, names: Sequence[str], do: str, **arguments: Any) -> dict[str, Row]:
        """Let engines work at once; their answers. One that fails is noted and stopped."""
        for name in names:
            phase.engines[name].order(do, **arguments)
        return self.answers(phase, names)

    def answers(self, phase: Phase, names: Sequence[str]) -> dict[str, Row]:
        found = {}
        for name in names:
            engine = phase.engines[name]
            try:
                found[name] = engine.answer(self.options.deadline)
            except EngineError as error:
                engine.stop()
                what = "gate" if phase.is_gate else "engine"
                text = self.document.fail((f"{phase.model} {name} {what}",), error)
                print(f"{engine.name}: {text} (log: {engine.log})", file=sys.stderr, flush=True)
        return found

    def load(self, phase: Phase) -> dict[str, Row]:
        """Load all engines of a phase at once, then time the first requests one by one."""
        alive = self.answers(phase, phase.backends)
        loaded = self.each(phase, list(alive), "load")
        for name in list(loaded):
            loaded |= {
                name: loaded[name] | answer
                for name, answer in self.each(phase, [name], "first_requests").items()
            }
        return {name: facts for name, facts in loaded.items() if "warm_request_s" in facts}


def gate(bench: Bench, phase: Phase) -> None:
    """Judge the backends of a model that have no row yet; red ones are not timed."""
    count, length = (2, 24) if bench.options.dry_run else (4, 256)
    loaded = bench.load(phase)
    answers = bench.each(phase, list(loaded), "log_probabilities", count=count, length=length)
    judged = judge({name: answer["log_probabilities"] for name, answer in answers.items()})
    for name, (difference, bound) in judged.items():
        if (phase.model, name) in bench.gates:  # a reference of the others
            continue
        passed = difference <= bound
        facts = {key: loaded[name][key] for key in ("first_request_s", "warm_request_s")}
        bench.gates[phase.model, name] = {
            "model": phase.model,
            "backend": name,
            "difference": difference,
            "bound": bound,
            "passed": passed,
            **facts,
        }
        first, warm = facts.values()
        text = f"differs by {difference:.4f}, allowed {bound:.4f}: {'green' if passed else 'RED'}"
        print(f"{phase.model} {name}: {text}; first request {first:.2f} s, warm {warm:.2f} s")
        if not passed:
            bench.document.fail((f"{phase.model} {name} gate",), f"red: {text}")
    bench.save()


def measure(bench: Bench, phase: Phase) -> None:
    """Load a group, then measure in turns; every round is saved."""
    model = phase.model
    for name, facts in bench.load(phase).items():
        row = {"model": model, "backend": name, "together": len(phase.backends), "peak_gib": 0.0}
        bench.loaded[model, name] = row | facts
        print(
            f"{model} {name}: loaded in {facts['load_s']:.0f} s, {facts['moe_method']}", flush=True
        )
    for index in range(bench.options.rounds):
        turn = index % len(phase.backends)
        for name in phase.backends[turn:] + phase.backends[:turn]:
            if (model, name) not in bench.loaded or index not in bench.missing(model, name):
                continue
            for answer in bench.each(phase, [name], "measure").values():
                bench.loaded[model, name]["peak_gib"] = answer["peak_gib"]
                for values in answer["rows"]:
                    place = {"model": model, "backend": name, "round": index}
                    bench.document.add(place | dict(zip(COLUMNS, values, strict=True)))
                rates = ", ".join(f"{row[1]}: {row[-1]:,.0f}" for row in answer["rows"])
                print(f"{model} {name}, round {index}: tokens/s {rates}", flush=True)
                bench.save()


def phases(bench: Bench) -> list[Phase]:
    """What is left to do, a model after the other: its gate, then its groups."""
    options, found = bench.options, []
    for model in options.models:
        judged = [name for name in options.backends if BACKENDS[name].computes]
        if any((model, name) not in bench.gates for name in judged):
            references = [] if options.dry_run else REFERENCES
            found.append(Phase(model, list(dict.fromkeys([*references, *judged])), is_gate=True))
        left = [name for name in options.backends if bench.missing(model, name)]
        size = options.together or TOGETHER[model]
        groups = [left[start : start + size] for start in range(0, len(left), size)]
        found += [Phase(model, group, is_gate=False) for group in groups]
    return found


def is_allowed(bench: Bench, model: str, name: str) -> bool:
    """Whether a backend may be timed: its gate is green, or it computes nothing."""
    row = bench.gates.get((model, name))
    return not BACKENDS[name].computes or (row is not None and row["passed"])


def fits(bench: Bench, phase: Phase) -> bool:
    """Whether another group as long as the model's longest would end before the limit."""
    usual = 0.0 if phase.is_gate else bench.longest.get(phase.model, 0.0)
    return time.monotonic() + usual < bench.options.deadline


def work(bench: Bench) -> None:
    """All phases; the processes of the next one import while one loads."""
    todo = phases(bench)
    for index, phase in enumerate(todo):
        if not phase.is_gate:
            refused = [n for n in phase.backends if not is_allowed(bench, phase.model, n)]
            for name in refused:
                phase.backends.remove(name)
                if name in phase.engines:
                    phase.engines.pop(name).stop()
        try:
            if not phase.backends or not fits(bench, phase):
                continue
            began = time.monotonic()
            if not phase.engines:
                bench.start(phase)
            if index + 1 < len(todo) and not bench.options.dry_run:
                bench.start(todo[index + 1])
            (gate if phase.is_gate else measure)(bench, phase)
            if not phase.is_gate:
                spent = time.monotonic() - began
                bench.longest[phase.model] = max(spent, bench.longest.get(phase.model, 0.0))
        finally:
            for engine in phase.engines.values():
                engine.stop()
    options = bench.options
    bench.document.left = [
        f"{model} {name}"
        for model in options.models
        for name in options.backends
        if bench.missing(model, name) and (f"{model} {name} gate",) not in bench.document.failures
    ]
    bench.save()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    add = parser.add_argument
    add("--models", default="gpt-oss-20b,gpt-oss-120b", help="default: %(default)s")
    add("--backends", default=",".join(DEFAULT), help=f"some of {', '.join(BACKENDS)}")
    add("--rounds", type=int, default=3)
    add("--together", type=int, help="engines that share the GPU; default by model")
    add("--concurrency", default=[1, 8, 64, 256], type=lambda text: list(map(int, text.split(","))))
    add("--new-tokens", type=int, default=64)
    add("--caches", type=Path, help="keep engines' caches and logs there, for --resume")


def prepare(options: argparse.Namespace) -> None:
    """Check the options; those of a dry run are tiny."""
    if package_version("vllm") is None:
        raise ValueError(message("serving", "vllm", "an environment with it", "none"))
    options.prompt, options.prefill = PROMPT, (8, 1024)
    options.backends = parse_list(options.backends, tuple(BACKENDS), "--backends")
    if options.dry_run:
        options.models, options.concurrency, options.new_tokens = ["tiny"], [1, 2], 4
        options.prompt, options.prefill, options.rounds = 8, (2, 32), 2
        served = (*OURS, "no-experts")  # vLLM has no MXFP4 kernels for a CPU
        options.backends = [name for name in options.backends if name in served]
    else:
        options.models = parse_list(options.models, tuple(SIZES), "--models")


def run(options: argparse.Namespace, _: None) -> int:
    """Measure and write; 1 if nothing of ours was measured."""
    meta = machine(options, *FACTS, protocol=PROTOCOL)
    meta["versions"] |= {"vllm": package_version("vllm")}
    document = Document(options.path, meta, KEY_COLUMNS)
    with tempfile.TemporaryDirectory(prefix="serving-", ignore_cleanup_errors=True) as folder:
        bench = Bench(options, document, options.caches or Path(folder))
        if options.resume and options.path.exists():
            old = SCHEMA.load(options.path)
            document.resume(old)
            bench.gates = {tuple(row[name] for name in ENGINE_KEY): row for row in old["gates"]}
            bench.loaded = {tuple(row[name] for name in ENGINE_KEY): row for row in old["engines"]}
        work(bench)
    print(f"wrote {document.path} after {time.monotonic() - options.began:.0f} s")
    if document.left:
        print(f"left, for --resume: {', '.join(document.left)}", file=sys.stderr)
    return 0 if any(row["backend"] in OURS for row in document.rows.values()) else 1


SCRIPT = Script(
    "serving", __doc__, run, prepare=prepare, add_options=add_options, limit=540.0, resumes=True
)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())

"""Cells of `mxpert tune` (one format, shape and token count each), and the search of one cell.

Those of grouped GEMMs, which are searched alike, are in `tune_grouped`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from ..core.backend import BACKENDS, layouts_for
from ..core.kernel import AnyKernel
from ..core.problem import GroupedProblem, MoEConfig, MoEOptions, MoEProblem, Op, OwnFormat, Target
from ..core.registry import config_exists, explain_problem, override
from ..core.stage_configs import StageConfig
from ..core.tables import FORMATS, Source, TunedRow, row_key, table_name
from ..errors import UnsupportedError, message, require
from ..formats.names import WITH_FP8
from ..formats.spec import MX_BLOCK_SIZE, MXFP4
from ..formats.tensor import Layout
from ..formats.weight_tensor import WeightFormatName, parse_weight_format
from ..moe.inputs import FusedMoEInputs
from ..moe.op import fused_moe
from ..moe.weights import MoEWeights
from ..routing.plan import TOKEN_MASK
from ..testing.numerics import relative_l2
from ..testing.problems import MODEL_SHAPES, MoEShape, random_tokens
from ..testing.timing import Timing, time_graph
from .measure import RunWeights, error_gate, float64_reference, intermediate_sizes, rotations
from .options import FORMAT_NAMES, check_model, parse_numbers

NUM_PROBES = 16
"""Tokens of a batch that are compared with float64; all tokens are compared among configs."""
REPEATS = 30
BATCH_SIZE = 8
"""Configs timed together, besides the heuristic's choice; each keeps its buffers meanwhile."""
LARGE_BATCH_TOKENS = 1024
"""Above this many tokens half as many configs are timed together."""
TARGETS = {
    table_name(target).removesuffix(".json"): target
    for backend in BACKENDS.values()
    for target in backend.devices
}
"""Known devices by table name, for --dry-run without a GPU and for checking shipped tables."""


@dataclass(frozen=True)
class Cell:
    """One problem to tune: a layer shape, a token count and formats.

    model: its displayed name. keep_fp8: with an FP8 copy of the weights.
    """

    model: str
    shape: MoEShape
    num_tokens: int
    activation_format: OwnFormat
    weight_format: WeightFormatName = "mxfp4"
    keep_fp8: bool = False

    @property
    def name(self) -> str:
        """As "gpt-oss-120b T=64 a16w4", with other weights or an FP8 copy "… bf16xnvfp4"."""
        shown = FORMAT_NAMES[self.activation_format]
        if self.weight_format != MXFP4.name or self.keep_fp8:
            copy = WITH_FP8 if self.keep_fp8 else ""
            shown = f"{self.activation_format}x{self.weight_format}{copy}"
        return f"{self.model} T={self.num_tokens} {shown}"

    @property
    def batch_size(self) -> int:
        """Configs that are timed together."""
        return BATCH_SIZE // (1 + (self.num_tokens > LARGE_BATCH_TOKENS))

    def operands(self, device: torch.device) -> RunWeights:
        """Random weights, which cells of one shape share."""
        return RunWeights.random(self.shape, device, self.weight_format, keep_fp8=self.keep_fp8)

    def layouts(self, target: Target) -> list[Layout]:
        """Layouts that the weights may have on a target, the fastest first.

        Raises:
            UnsupportedError: an FP8 copy on a target without one.
        """
        held = parse_weight_format(self.weight_format, "tune").name
        known = [*layouts_for(target.arch, held)]
        if not self.keep_fp8:
            return known
        copied = [copy for each in known if (copy := getattr(each, "with_fp8", None)) is not None]
        need, got = "a device whose kernels read FP8 copies", target.name
        require(bool(copied), "tune", "--keep-fp8", need=need, got=got, error=UnsupportedError)
        return copied

    def trial(
        self, operands: RunWeights, target: Target, backend: str | None
    ) -> tuple[Choice[MoEProblem], Callable[[], Trial]]:
        """What serves the cell with these weights, and how to make its trial."""
        stored = {each.layout: each for each in (operands.plain, operands.prepared)}
        choice = choose(self, target, list(reversed(stored)), backend)
        own = stored[choice.problem.weight_layout]
        return choice, lambda: Trial(choice, self.shape, operands.plain, own)

    def problem(self, target: Target, layout: Layout) -> MoEProblem:
        """The whole layer on a target, with weights in a layout."""
        shape = self.shape
        return MoEProblem(
            Op.FUSED_MOE,
            target,
            self.num_tokens,
            shape.top_k,
            shape.num_experts,
            shape.hidden_size,
            shape.intermediate_size,
            MoEOptions(shape.activation, self.activation_format),
            layout,
            weight_format=parse_weight_format(self.weight_format, "tune").name,
        )


ProblemT = TypeVar("ProblemT", MoEProblem, GroupedProblem)
Tunable = MoEConfig | StageConfig
"""Config of a layer, or of a grouped GEMM."""


@dataclass(frozen=True)
class Choice(Generic[ProblemT]):
    """The kernel that serves a cell, and the problem as it is described to that kernel."""

    kernel: AnyKernel
    problem: ProblemT

    @property
    def key(self) -> tuple[object, ...]:
        """The key of the cell's row in a table."""
        return row_key(self.problem, self.kernel.backend)

    def configs(self) -> list[Tunable]:
        """The heuristic's choice first, then the kernel's other configs, most similar first."""
        heuristic: Tunable = self.kernel.heuristic(self.problem)
        chosen = _settings(heuristic)

        def differences(config: Tunable) -> int:
            settings = _settings(config)
            return sum(chosen.get(name) != value for name, value in settings.items())

        others: dict[Tunable, None] = dict.fromkeys(self.kernel.configs(self.problem))
        return [heuristic, *sorted((each for each in others if each != heuristic), key=differences)]


def _settings(config: Tunable) -> dict[tuple[str, str], object]:
    """The fields of a config, or of both stages of a layer's."""
    stages = {"": asdict(config)}
    if isinstance(config, MoEConfig):
        stages = {"gate_up": asdict(config.gate_up), "down": asdict(config.down)}
    return {(stage, name): stages[stage][name] for stage in stages for name in stages[stage]}


def choose(
    cell: Cell, target: Target, layouts: Sequence[Layout], backend: str | None
) -> Choice[MoEProblem]:
    """The kernel that would serve `cell`, with the first weight layout that a kernel reads.

    Raises:
        UnsupportedError: no kernel serves it, or only the reference, which has no tiles to tune.
    """
    return choose_kernel([cell.problem(target, layout) for layout in layouts], backend)


def choose_kernel(problems: Sequence[ProblemT], backend: str | None) -> Choice[ProblemT]:
    """The kernel that would serve the first of these problems that has one with tiles."""
    reason = ""
    for problem in problems:
        try:
            with override(backend=backend):
                explanation = explain_problem(problem)
        except UnsupportedError as error:
            reason = str(error)
            continue
        kernel = explanation.resolution.kernel
        if kernel.backend != "reference":
            return Choice(kernel, problem)
        reason = "; ".join(f"{name} {why}" for name, why in explanation.rejected)
    need = f"a kernel with tiles on {problems[0].target.name}"
    raise UnsupportedError(
        message("tune", "--backend", need, f"none ({reason})", "see mxpert doctor")
    )


def invalid_row(row: TunedRow, target: Target) -> str | None:
    """Why a row of a tuned table cannot run on its device, None if it can.

    The layer's kernel must offer the row's config, or the kernels of both stages must offer their
    part of it for the row's routing unit.
    """
    shape = MoEShape(row.hidden_size, row.intermediate_size, row.num_experts, row.top_k)
    activation_format, weight_format = FORMATS[row.formats]
    held, keep_fp8 = cast("WeightFormatName", weight_format), row.formats.endswith(WITH_FP8)
    cell = Cell(row.place, shape, row.num_tokens, activation_format, held, keep_fp8)
    try:
        choice = choose(cell, target, cell.layouts(target), row.backend)
    except (UnsupportedError, ValueError) as error:
        return f"{row.place}: {error}"
    if config_exists(choice.problem, row):
        return None
    return f"{row.place}: {row.config} is no config of {row.backend}"


def parse_shape(text: str) -> MoEShape:
    """Parse "E,k,H,F" to a shape with SiLU and no bias (tables depend on neither).

    >>> parse_shape("8,2,64,96").intermediate_size
    96
    """
    sizes = parse_numbers(text, "tune", "--shape")
    require(len(sizes) == 4, "tune", "--shape", need="four numbers E,k,H,F", got=repr(text))
    experts, top_k, hidden, inner = sizes
    require(top_k <= experts, "tune", "--shape", need=f"k of at most E = {experts}", got=top_k)
    require(
        hidden % MX_BLOCK_SIZE == 0 and inner % MX_BLOCK_SIZE == 0,
        "tune",
        "--shape",
        need=f"H and F in multiples of {MX_BLOCK_SIZE}",
        got=f"{hidden}, {inner}",
    )
    return MoEShape(hidden, inner, experts, top_k)


def make_cells(
    models: Iterable[str],
    shapes: Iterable[str],
    tokens: Sequence[int],
    formats: Sequence[OwnFormat],
    weight_format: WeightFormatName = "mxfp4",
    *,
    keep_fp8: bool = False,
) -> list[Cell]:
    """All cells without duplicates, ordered by shape so that each shape's weights are made once."""
    named = [(name, MODEL_SHAPES[check_model(name, "tune")]) for name in models]
    named += [(text, parse_shape(text)) for text in shapes]
    cells: dict[tuple[object, ...], Cell] = {}
    for name, shape in named:
        require(
            max(tokens) * shape.top_k <= TOKEN_MASK,
            "tune",
            "--tokens",
            got=max(tokens),
            need=f"T · k of at most {TOKEN_MASK}",
        )
        widths = [shape.hidden_size, shape.intermediate_size]
        group = getattr(parse_weight_format(weight_format, "tune"), "group_size", MX_BLOCK_SIZE)
        need = f"H and F in multiples of {group} on {name}"
        fits = all(width % group == 0 for width in widths)
        require(fits, "tune", "--weight-format", need=need, got=f"{widths} with {weight_format}")
        sizes = (shape.num_experts, shape.top_k, *widths)
        for activation_format in formats:
            for count in tokens:
                cell = Cell(name, shape, count, activation_format, weight_format, keep_fp8)
                cells.setdefault((*sizes, activation_format, count), cell)
    return list(cells.values())


class AnyTrial:
    """Runs and times configs of one cell on a device.

    Attributes:
        choice: the kernel and the problem. batches: arguments of `run`, which timings rotate among.
        truth: the float64 result of the probes, which are a part of the first batch's results.
        limit: the largest relative L2 of a right result.
    """

    choice: Choice[Any]
    device: torch.device
    batches: list[Any]
    truth: torch.Tensor
    limit: float
    sound: torch.Tensor | None = None
    """Result of the first config that passed the gate, whole."""

    def run(self, config: Any, batch: Any) -> torch.Tensor:  # Any: those of the trial's op
        """The result for one batch."""
        raise NotImplementedError

    def probes(self, result: torch.Tensor) -> torch.Tensor:
        """The part of a result that `truth` holds."""
        raise NotImplementedError

    def error(self, config: Tunable) -> float:
        """The larger of two errors: of the probes to float64, of the rest to a right result.

        The right result is the first one. The second error is halved: two right results may differ
        by twice the gate.
        """
        result = self.run(config, self.batches[0])
        error = relative_l2(self.probes(result), self.truth)
        if not error <= self.limit:
            return error
        if self.sound is None:
            if not bool(result.isfinite().all()):
                return float("nan")
            self.sound = result
        apart = relative_l2(result, self.sound) / 2
        return apart if not apart <= error else error

    def times(
        self, configs: Sequence[Tunable], failures: dict[str, Exception]
    ) -> dict[str, Timing]:
        """Time the configs in turns with a cold L2 cache; both dictionaries go by index."""
        calls = {
            str(index): [functools.partial(self.run, config, batch) for batch in self.batches]
            for index, config in enumerate(configs)
        }
        return time_graph(calls, device=self.device, repeats=REPEATS, warmup=1, failures=failures)

    def require_alive(self, config: Tunable) -> None:
        """Raise ValueError if the config's fault destroyed the device context."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            place, got = f"{self.choice.kernel.backend} {config}", str(error).splitlines()[0]
            remedy = "report it as a defect; finished cells are kept"
            need = "a config that leaves the device usable"
            raise ValueError(message("tune", place, need, got, remedy)) from error


class Trial(AnyTrial):
    """Configs of a layer; the probes are tokens."""

    def __init__(
        self, choice: Choice[MoEProblem], shape: MoEShape, plain: MoEWeights, own: MoEWeights
    ) -> None:
        """plain: ROW_MAJOR weights, for the reference. own: the same as the kernel reads them."""
        self.choice, self.weights, self.device = choice, own, own.device
        num_tokens = choice.problem.num_tokens
        self.batches = [
            random_tokens(shape, num_tokens, torch.Generator(own.device).manual_seed(seed))
            for seed in range(rotations(num_tokens))
        ]
        x, topk_weights, topk_ids = self.batches[0]
        count, options = min(num_tokens, NUM_PROBES), choice.problem.options
        places = torch.linspace(0, num_tokens - 1, count, dtype=torch.float64).round().long()
        self.places = places.to(self.device)
        with float64_reference():
            self.truth = fused_moe(
                x[self.places],
                plain,
                topk_weights[self.places],
                topk_ids[self.places],
                activation=options.activation,
                activation_format=options.activation_format,
            )
        sizes = intermediate_sizes(count, shape.top_k, shape.intermediate_size)
        self.limit = error_gate("layer", options.activation_format, sizes)

    def run(self, config: MoEConfig, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """The layer's output for one batch."""
        x, topk_weights, topk_ids = batch
        inputs = FusedMoEInputs(x, self.weights, topk_weights, topk_ids)
        result: torch.Tensor = self.choice.kernel.launch(self.choice.problem, config, inputs)
        return result

    def probes(self, result: torch.Tensor) -> torch.Tensor:
        return result[self.places]


@dataclass
class Candidate:
    """A config that was tried.

    Args:
        state: "timed"; "wrong" if its error to float64 is too large; "failed" if it raised.
        rel_l2: its error to float64. reason: why it is wrong or failed, in words.
        us: microseconds of one call; None before it is timed.
        heuristic_us: of the heuristic's choice in the same run; None if that is not sound.
        spread: wider 10–90 % band of these two, relative to the median.
    """

    config: Tunable
    state: str = "timed"
    rel_l2: float | None = None
    reason: str = ""
    us: float | None = None
    heuristic_us: float | None = None
    spread: float = 0.0

    @property
    def ratio(self) -> float:
        """Its time over that of the heuristic's choice in the same run; µs without the latter."""
        return math.inf if self.us is None else self.us / (self.heuristic_us or 1.0)


@dataclass(frozen=True)
class Outcome:
    """The result of a search: the candidates as tried, and the fastest (None if none is sound).

    The comparison with the heuristic's choice is in words. valid: number of configs.
    """

    candidates: list[Candidate]
    valid: int
    winner: Candidate | None
    source: Source
    note: str


def search(
    configs: Sequence[Tunable],
    trial: AnyTrial,
    *,
    deadline: float,
    batch_size: int = BATCH_SIZE,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Find the fastest sound config.

    Configs are tried in batches. Each config of a batch runs once and must pass the gate. The sound
    ones and the heuristic's choice are then timed in turns, so that only times of the same run are
    compared. The first batch may exceed the deadline.

    Args:
        configs: the heuristic's choice first.
        trial: runs and times them.
        deadline: seconds on `clock`; no batch is started after it.
        batch_size: configs timed together, besides the heuristic's choice.
    """
    heuristic = _gated(configs[0], trial)
    tried = [heuristic]
    for start in range(1, max(len(configs), 2), batch_size):
        if start > 1 and clock() >= deadline:
            break
        batch = [_gated(config, trial) for config in configs[start : start + batch_size]]
        tried += batch
        entrants = [each for each in (heuristic, *batch) if each.state == "timed"]
        _time(entrants, heuristic, trial)
    sound = [each for each in tried if each.state == "timed"]
    rival = min(
        (each for each in sound if each is not heuristic), key=lambda each: each.ratio, default=None
    )

    def outcome(winner: Candidate | None, source: Source, note: str) -> Outcome:
        return Outcome(tried, len(configs), winner, source, note)

    if heuristic.state != "timed":
        note = f"the heuristic's choice {heuristic.state}: {heuristic.reason}"
        return outcome(rival, "search", note)
    if rival is None:
        return outcome(heuristic, "heuristic", "no other sound config")
    gain, spread = 1 - rival.ratio, f"spread {rival.spread:.1%}"
    if gain > rival.spread:
        note = f"{gain:.1%} faster than the heuristic's choice, {spread}"
        return outcome(rival, "search", note)
    heuristic.spread = rival.spread
    note = f"the best other is {abs(gain):.1%} {'faster' if gain > 0 else 'slower'}, {spread}"
    return outcome(heuristic, "heuristic", note)


def _gated(config: Tunable, trial: AnyTrial) -> Candidate:
    """Run a config once and compare its error with the gate; NaN never passes."""
    try:
        error = trial.error(config)
    except Exception as failure:  # compilers raise types of their own
        trial.require_alive(config)
        return Candidate(config, "failed", reason=_one_line(failure))
    if not error <= trial.limit:
        reason = f"relative L2 to float64 is {error:.3e}, at most {trial.limit:.1e}"
        return Candidate(config, "wrong", error, reason)
    return Candidate(config, rel_l2=error)


def _one_line(failure: Exception) -> str:
    text = str(failure).strip()
    return f"{type(failure).__name__}: {text.splitlines()[0] if text else 'no message'}"


def _time(candidates: Sequence[Candidate], heuristic: Candidate, trial: AnyTrial) -> None:
    """Time candidates in one run. The heuristic's choice is the first one, unless it is unsound."""
    failures: dict[str, Exception] = {}
    timings = trial.times([each.config for each in candidates], failures)
    base = next(
        (timings.get(str(i)) for i, each in enumerate(candidates) if each is heuristic), None
    )
    for index, each in enumerate(candidates):
        own = timings.get(str(index))
        if own is None:
            trial.require_alive(each.config)
            each.state, each.reason = "failed", _one_line(failures[str(index)])
        else:
            each.us, each.heuristic_us = own.us, base.us if base else None
            each.spread = max(own.spread, base.spread if base else 0.0)

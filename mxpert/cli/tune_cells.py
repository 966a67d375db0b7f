"""Cells of `mxpert tune` (one format, shape and token count each), and running one on a device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..dispatch import explain_problem, override
from ..dispatch.registry import offers_row
from ..dispatch.tables import TunedRow, problem_key, table_name
from ..errors import UnsupportedError, message, require
from ..formats.spec import MX_BLOCK_SIZE
from ..formats.tensor import Layout
from ..kernel_spec import KernelSpec
from ..ops.moe import fused_moe
from ..problem import MoEConfig, MoEOptions, MoEProblem, Op, Target
from ..routing import TOKEN_MASK
from ..testing.numerics import relative_l2
from ..testing.problems import MODEL_SHAPES, MoEShape, random_routing
from ..testing.timing import Timing, time_graph
from ..weights import MoEWeights
from .measure import error_gate, float64_reference, intermediate_sizes
from .options import parse_numbers
from .tune_search import DeviceLostError

NUM_PROBES = 16
TARGETS = {
    table_name(target).removesuffix(".json"): target
    for target in (
        Target("cuda", "sm_90", "NVIDIA H200", 132, 232448),
        Target("cuda", "sm_90", "NVIDIA H100 80GB HBM3", 132, 232448),
        Target("cuda", "sm_100", "NVIDIA B200", 148, 232448),
        Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024),
    )
}
"""Known devices by table name, for --dry-run without a GPU and for checking shipped tables."""


@dataclass(frozen=True)
class Cell:
    """One problem to tune: a layer shape, a token count and a format. model: its displayed name."""

    model: str
    shape: MoEShape
    num_tokens: int
    activation_format: str

    @property
    def options(self) -> MoEOptions:
        return MoEOptions(self.shape.activation, self.activation_format)

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
            self.options,
            layout,
        )


@dataclass(frozen=True)
class Choice:
    """The kernel that serves a cell, and the problem as it is described to that kernel."""

    kernel: KernelSpec
    problem: MoEProblem

    @property
    def key(self) -> tuple[object, ...]:
        """The key of the cell's row in a table."""
        return (*problem_key(self.problem, self.kernel.backend), self.problem.num_tokens)


def choose(cell: Cell, target: Target, layouts: Sequence[Layout], backend: str | None) -> Choice:
    """The kernel that would serve `cell`, with the first weight layout that a kernel reads.

    Raises:
        UnsupportedError: no kernel serves it, or only the reference, which has no tiles to tune.
    """
    reason = ""
    for layout in layouts:
        problem = cell.problem(target, layout)
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
    raise UnsupportedError(
        message(
            "tune",
            "--backend",
            f"a kernel with tiles on {target.name}",
            f"none ({reason})",
            "see mxpert doctor",
        )
    )


def expected_layouts(target: Target) -> list[Layout]:
    """Weight layouts that `MoEWeights.prepare` tries for a target, in order."""
    prepared = [Layout.HOPPER_FRAGMENT] if target.arch == "sm_90" else []
    return [*prepared, Layout.ROW_MAJOR]


def invalid_row(row: TunedRow, target: Target) -> str | None:
    """Why a row of a tuned table cannot run on its device, None if it can.

    The layer's kernel must offer the row's config, or the kernels of both stages must offer their
    part of it for the row's routing unit.
    """
    shape = MoEShape(row.hidden_size, row.intermediate_size, row.num_experts, row.top_k)
    cell = Cell(row.place, shape, row.num_tokens, row.formats.partition("x")[0])
    try:
        choice = choose(cell, target, expected_layouts(target), row.backend)
    except (UnsupportedError, ValueError) as error:
        return f"{row.place}: {error}"
    if offers_row(choice.problem, row):
        return None
    return f"{row.place}: {row.config} is no config of {row.backend}"


def parse_shape(text: str) -> tuple[str, MoEShape]:
    """Parse "E,k,H,F" to a name and a shape with SiLU and no bias (tables depend on neither).

    >>> parse_shape("8,2,64,96")[1].intermediate_size
    96
    """
    sizes = parse_numbers(text, "tune", "--shape")
    require(len(sizes) == 4, "tune", "--shape", need="four numbers E,k,H,F", got=repr(text))
    num_experts, top_k, hidden_size, intermediate_size = sizes
    require(
        top_k <= num_experts, "tune", "--shape", need=f"k of at most E = {num_experts}", got=top_k
    )
    require(
        hidden_size % MX_BLOCK_SIZE == 0 and intermediate_size % MX_BLOCK_SIZE == 0,
        "tune",
        "--shape",
        need=f"H and F in multiples of {MX_BLOCK_SIZE}",
        got=f"{hidden_size}, {intermediate_size}",
    )
    return text, MoEShape(hidden_size, intermediate_size, num_experts, top_k)


def make_cells(
    models: Sequence[str], shapes: Sequence[str], tokens: Sequence[int], formats: Sequence[str]
) -> list[Cell]:
    """All cells without duplicates, ordered by shape so that each shape's weights are made once."""
    for name in models:
        require(
            name in MODEL_SHAPES,
            "tune",
            "--model",
            got=repr(name),
            need=f"one of {', '.join(MODEL_SHAPES)}",
        )
    named = [(name, MODEL_SHAPES[name]) for name in models] + [parse_shape(s) for s in shapes]
    for _, shape in named:
        require(
            max(tokens) * shape.top_k <= TOKEN_MASK,
            "tune",
            "--tokens",
            got=max(tokens),
            need=f"T · k of at most {TOKEN_MASK}",
        )
    cells: dict[tuple[object, ...], Cell] = {}
    for name, shape in named:
        for activation_format in formats:
            for num_tokens in dict.fromkeys(tokens):
                key = (
                    shape.num_experts,
                    shape.top_k,
                    shape.hidden_size,
                    shape.intermediate_size,
                    activation_format,
                    num_tokens,
                )
                cells.setdefault(key, Cell(name, shape, num_tokens, activation_format))
    return list(cells.values())


@dataclass(frozen=True)
class Batch:
    """Tokens and routing: x bfloat16 [T, H], topk_weights float32 and topk_ids int32 [T, k]."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    @classmethod
    def random(cls, shape: MoEShape, num_tokens: int, device: torch.device, seed: int) -> Batch:
        """Standard normal tokens with uniform routing."""
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(num_tokens, shape.hidden_size, device=device, generator=generator)
        weights, ids = random_routing(
            num_tokens, shape.num_experts, shape.top_k, generator=generator
        )
        return cls(x.to(torch.bfloat16), weights, ids)

    def plant(self, probes: Batch) -> torch.Tensor:
        """Overwrite evenly spaced tokens, first and last included, with probes.

        Returns:
            The indices of the overwritten tokens, int64.
        """
        count = min(len(self.x), len(probes.x))
        places = torch.linspace(0, len(self.x) - 1, count, dtype=torch.float64).round().long()
        places = places.to(self.x.device)
        for own, other in (
            (self.x, probes.x),
            (self.topk_ids, probes.topk_ids),
            (self.topk_weights, probes.topk_weights),
        ):
            own[places] = other[:count]
        return places


@dataclass(frozen=True)
class Probes:
    """Tokens with their float64 result; every batch of a shape contains the same ones."""

    batch: Batch
    truth: torch.Tensor

    @classmethod
    def of(cls, shape: MoEShape, weights: MoEWeights, options: MoEOptions) -> Probes:
        """Run the reference on NUM_PROBES tokens of ROW_MAJOR weights."""
        batch = Batch.random(shape, NUM_PROBES, weights.device, seed=0)
        with float64_reference():
            truth = fused_moe(
                batch.x,
                weights,
                batch.topk_weights,
                batch.topk_ids,
                activation=options.activation,
                activation_format=options.activation_format,
            )
        return cls(batch, truth)


class DeviceTrial:
    """Runs configs of one cell on a device; implements `tune_search.Trial`."""

    def __init__(
        self, choice: Choice, shape: MoEShape, weights: MoEWeights, probes: Probes
    ) -> None:
        num_tokens, device = choice.problem.num_tokens, weights.device
        rotations = max(1, min(8, 64 // num_tokens))  # small batches hit few experts each
        self.choice, self.weights, self.device = choice, weights, device
        self.batches = [
            Batch.random(shape, num_tokens, device, seed) for seed in range(1, rotations + 1)
        ]
        self.places = self.batches[0].plant(probes.batch)
        self.truth = probes.truth[: len(self.places)]
        sizes = intermediate_sizes(len(self.places), shape.top_k, shape.intermediate_size)
        self.limit = error_gate("layer", choice.problem.options.activation_format, sizes)
        self.sound: torch.Tensor | None = None
        """Result of the first config that passed the gate, for all tokens."""

    def run(self, config: MoEConfig, batch: Batch) -> torch.Tensor:
        """The layer's output for one batch."""
        result: torch.Tensor = self.choice.kernel.launch(
            self.choice.problem,
            config,
            x=batch.x,
            weights=self.weights,
            topk_ids=batch.topk_ids,
            topk_weights=batch.topk_weights,
            expert_map=None,
            num_local_tokens=None,
        )
        return result

    def error(self, config: MoEConfig) -> float:
        """The larger of two errors: of the probes to float64, and of all tokens to the first right
        result. The second is halved: two right results may differ by twice the gate."""
        try:
            result = self.run(config, self.batches[0])
            error = relative_l2(result[self.places], self.truth)
        except Exception:
            self._require_alive(config)
            raise
        if not error <= self.limit:
            return error
        if self.sound is None:
            if not bool(result.isfinite().all()):
                return float("nan")
            self.sound = result
        apart = relative_l2(result, self.sound) / 2
        return apart if not apart <= error else error

    def times(
        self, configs: Sequence[MoEConfig], repeats: int, failures: dict[MoEConfig, Exception]
    ) -> dict[MoEConfig, Timing]:
        """Time the configs in turns with a cold L2 cache, through `time_graph`."""
        names = {str(index): config for index, config in enumerate(configs)}
        failed: dict[str, Exception] = {}
        timings = time_graph(
            {
                name: [functools.partial(self.run, config, batch) for batch in self.batches]
                for name, config in names.items()
            },
            device=self.device,
            repeats=repeats,
            warmup=1,
            failures=failed,
        )
        if failed:
            self._require_alive(names[next(iter(failed))])
        failures.update({names[name]: error for name, error in failed.items()})
        return {names[name]: timing for name, timing in timings.items()}

    def _require_alive(self, config: MoEConfig) -> None:
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise DeviceLostError(
                message(
                    "tune",
                    f"{self.choice.kernel.backend} {config}",
                    "a config that leaves the device usable",
                    str(error).splitlines()[0],
                    "report it as a defect; finished cells are kept",
                )
            ) from error

"""resolve(): which kernel and which config serve a problem, and why.

The order is: an explicit `override()`, the tuned row for exactly this device and shape, the
backend's heuristic. A backend asked for by name that cannot serve a problem raises. Where something
about the request rules out the fast kernel of its device, `resolve` gives a PerformanceWarning once
for each reason, and `explain()` shows the same phrase.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from ..errors import PerformanceWarning, UnsupportedError, message, require
from . import tables
from .backend import BACKENDS, Backend, Status, add_backend, made_for
from .geometry import CachedCall
from .kernel import NO_PERSISTENT_GRID, AnyKernel, refuse
from .problem import (
    Config,
    GemmConfig,
    GroupedProblem,
    MoEConfig,
    MoEProblem,
    Op,
    Problem,
    ReferenceConfig,
    StageConfig,
    TopKProblem,
)
from .stage_configs import name_kinds
from .support import remedy_of, support_of

_CACHED_RESOLUTIONS = 8192


@dataclass(frozen=True)
class Override:
    """What `override()` pins; None leaves the choice open."""

    backend: str | None = None
    config: Config = None


_override: contextvars.ContextVar[Override] = contextvars.ContextVar(
    "mxpert_override", default=Override()
)


@contextlib.contextmanager
def override(*, backend: str | None = None, config: Config = None) -> Iterator[None]:
    """Pin the backend, the config or both for every op inside a with block.

    It holds for the current thread or task.

    Args:
        backend: "triton", "reference" or the name of a chip's backend; an op that it cannot serve
            raises UnsupportedError. None leaves the choice to the library.
        config: for one stage a config of the backend that serves it (`mxpert.configs`), a MoEConfig
            for a layer or its stages, or a ReferenceConfig for the reference backend. Ops that take
            no such config ignore it.

    Returns:
        A context manager.

    Raises:
        ValueError: an unknown backend.
        TypeError: a config of another type.

    Example:
        >>> import torch, mxpert
        >>> with mxpert.override(backend="reference"):
        ...     why = mxpert.explain(mxpert.quantize, torch.zeros(1, 32), "mxfp4")
        >>> why.resolution.kernel.backend
        'reference'
    """
    known = backend is None or (isinstance(backend, str) and backend in BACKENDS)
    require(known, "override", "backend", need=f"one of {sorted(BACKENDS)}", got=repr(backend))
    if config is not None and not isinstance(config, StageConfig | MoEConfig | ReferenceConfig):
        need = name_kinds(MoEConfig, ReferenceConfig)
        raise TypeError(message("override", "config", need, repr(config)))
    token = _override.set(Override(backend, config))
    try:
        yield
    finally:
        _override.reset(token)


@dataclass(frozen=True)
class Resolution:
    """The chosen kernel and config.

    Args:
        source: "override", "table" or "heuristic". detail: which override, row or backend.
        slower: why this is not the device's fast kernel, and the remedy; "" if it is.
    """

    kernel: AnyKernel
    config: Any  # of the kernel's own type
    source: str
    detail: str
    slower: str = ""


@dataclass(frozen=True)
class Explanation:
    """Which kernel and config serve a problem, and why; `print()` it.

    Args:
        problem: of the op; with `expert_parallel` that of this rank's local layer.
        resolution: the chosen kernel and config.
        rejected: backends that cannot serve the problem, each with its reason.
        transport: with `expert_parallel`: how tokens travel, and why.
        weights: what was done to the weights' values, where they were rounded on request.
    """

    problem: Problem
    resolution: Resolution
    rejected: tuple[tuple[str, str], ...]
    transport: str = ""
    weights: str = ""

    @property
    def status(self) -> str:
        """What of the chosen backend was tried on this device, as docs/supported-gpus.md has it."""
        on_reference = self.resolution.kernel.backend == "reference"
        status = Status.REFERENCE if on_reference else support_of(self.problem.target).status
        return status.value

    def __str__(self) -> str:
        chosen = self.resolution
        target = self.problem.target
        lines = [
            f"{self.problem.op.value} on {target.name} ({target.arch})",
            f"  backend: {chosen.kernel.backend}",
            f"  config:  {_config_text(chosen.config)}",
            f"  source:  {chosen.source} ({chosen.detail})",
        ]
        if formats := getattr(self.problem, "formats", ""):
            lines.insert(1, f"  formats: {formats}")
        if self.weights:
            lines.insert(2, f"  weights: {self.weights}")
        mode = getattr(chosen.kernel, "mode", None)
        if mode is not None and (text := mode(self.problem)):
            lines.append(f"  mode:    {text}")
        if isinstance(self.problem, MoEProblem) and self.problem.choice is not None:
            lines.append(f"  routing: {_choice_text(self.problem.choice)}")
        if (num_sms := getattr(self.problem, "num_sms", None)) is not None:
            lines.append(f"  SMs:     GEMMs occupy at most {num_sms} of {target.num_sms}")
        if target.kind != "cpu":
            lines.append(f"  status:  {self.status}")
        if chosen.slower:
            lines.append(f"  slower:  {chosen.slower}")
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected]
        lines += [f"  {line}" for line in self.transport.splitlines()]
        return "\n".join(lines)


def _config_text(config: object) -> str:
    """A config's fields with their names; the two stages of a layer on lines of their own."""
    if config is None:
        return "none needed"
    if isinstance(config, MoEConfig):
        stages = (
            f"\n    {name}: {_config_text(getattr(config, name))}" for name in ("gate_up", "down")
        )
        return f"routing_block_m={config.routing_block_m}{''.join(stages)}"
    if not is_dataclass(config):
        return str(config)
    values = ((field.name, getattr(config, field.name)) for field in fields(config))
    return " ".join(
        f"{name}={value.value if isinstance(value, enum.Enum) else value}" for name, value in values
    )


def _choice_text(choice: TopKProblem) -> str:
    """How a layer chooses its experts: "top 8 of 256 experts in 4 of 8 groups, sigmoid"."""
    options = choice.options
    grouped = options.num_groups > 1
    groups = f" in {options.top_groups} of {options.num_groups} groups" if grouped else ""
    scoring = f"{options.scoring.value}, normalised" if options.normalize else options.scoring.value
    return f"top {choice.top_k} of {choice.num_experts} experts{groups}, {scoring}"


def register_backend(backend: Backend) -> None:
    """Let ops ask another backend; choices that were made before are made again.

    Raises:
        ValueError: a backend of this name is registered.
    """
    add_backend(backend)
    tables.reload_tables()


@functools.cache
def kernel_of(backend: Backend, op: Op) -> AnyKernel | str:
    """The backend's kernel for an op, imported at the first request, or the reason it has none."""
    if op not in backend.kernels:
        return f"has no {op.value}"
    try:
        kernel = backend.load(op)
        if backend.replays:
            from .replay import replayed  # needs Triton, as the kernel does

            (kernel,) = replayed(kernel)
    except ImportError as error:
        return f"cannot be imported ({error})"
    return kernel


def _candidate(backend: str, problem: Problem) -> AnyKernel | str:
    """The backend's kernel for a problem, or the reason it has none."""
    kernel = kernel_of(BACKENDS[backend], problem.op)
    return kernel if isinstance(kernel, str) else kernel.unsupported(problem) or kernel


def _stage_config(problem: Problem, config: Config) -> Config:
    """The part of `config` that applies to the problem's op; None if there is none."""
    if isinstance(config, MoEConfig) and problem.op is not Op.FUSED_MOE:
        return {Op.MOE_GATE_UP: config.gate_up, Op.MOE_DOWN: config.down}.get(problem.op)
    if isinstance(config, StageConfig) and problem.op is Op.FUSED_MOE:
        return MoEConfig(config.block_m, config, config)
    if isinstance(config, GemmConfig):
        return config if isinstance(problem, MoEProblem | GroupedProblem) else None
    if isinstance(config, StageConfig | MoEConfig) and not isinstance(problem, MoEProblem):
        return None
    return config


def _choose_config(kernel: AnyKernel, problem: Problem, config: Config) -> tuple[object, str, str]:
    """Config, source and detail for a chosen kernel; `config` is what override() pins."""
    pinned = _stage_config(problem, config)
    for_reference = isinstance(pinned, ReferenceConfig)
    if pinned is not None and for_reference == (kernel.backend == "reference"):
        _check_pinned(kernel, problem, pinned)
        return pinned, "override", "config pinned by override()"
    if isinstance(problem, GroupedProblem) and kernel.backend != "reference":
        found = tables.tuned_grouped_row(problem, kernel.backend)
        if found is not None and found.config in kernel.configs(problem):
            return found.config, "table", _place(found)
        if found is not None:
            _warn_outdated(found.place)
    elif isinstance(problem, MoEProblem) and kernel.backend != "reference":
        row = tables.tuned_row(problem, kernel.backend)
        if row is not None and config_exists(problem, row):
            tuned = _stage_config(problem, row.config)
            if _block_fits(problem, tuned):
                return tuned, "table", _place(row)
        elif row is not None:
            _warn_outdated(row.place)
    return kernel.heuristic(problem), "heuristic", f"{kernel.backend} backend"


def _place(row: tables.AnyRow) -> str:
    """Where a row is, and whether nobody has measured it."""
    return row.place + ("; modelled, not measured" if row.modelled else "")


def config_exists(problem: MoEProblem, row: tables.TunedRow) -> bool:
    """Whether the row's backend has the row's config for this problem's layer.

    As a whole or for each stage. A table of another version may name tiles that no longer exist.
    """

    def offers(op: Op, config: Config, unit: int) -> bool:
        layer = replace(problem, op=op, num_tokens=row.num_tokens, routing_block_m=unit)
        kernel = _candidate(row.backend, layer)
        return not isinstance(kernel, str) and config in kernel.configs(layer)

    whole, unit = row.config, row.config.routing_block_m
    return offers(Op.FUSED_MOE, whole, 0) or (
        offers(Op.MOE_GATE_UP, whole.gate_up, unit) and offers(Op.MOE_DOWN, whole.down, unit)
    )


def _within_sms(kernel: AnyKernel, problem: Problem, config: object, source: str) -> object | str:
    """The config of a grid that keeps to `num_sms`, or the reason there is none.

    Raises:
        UnsupportedError: `override()` pins a config without such a grid.
    """
    if getattr(problem, "num_sms", None) is None:
        return config
    limit: Callable[..., object] = getattr(kernel, "persistent", lambda *_: NO_PERSISTENT_GRID)
    limited = limit(problem, config)
    if source == "override" and limited != config:
        got = limited if isinstance(limited, str) else repr(config)
        need, remedy = "a config with a persistent grid", "pin one, or drop num_sms"
        raise UnsupportedError(message(problem.op.value, "num_sms", need, got, remedy))
    return limited


def _block_fits(problem: Problem, config: object) -> bool:
    return (
        not isinstance(config, StageConfig)
        or not isinstance(problem, MoEProblem)
        or problem.routing_block_m % config.block_m == 0
    )


def _check_pinned(kernel: AnyKernel, problem: Problem, config: object) -> None:
    """Raise an error for a pinned config of another backend or with another row block."""
    own = BACKENDS[kernel.backend].stage_config
    kind = own if isinstance(problem, MoEProblem) else GemmConfig
    stages = (config.gate_up, config.down) if isinstance(config, MoEConfig) else (config,)
    for stage in stages:
        if isinstance(stage, StageConfig) and not isinstance(stage, kind):
            need = f"a {kind.__name__}, which the {kernel.backend} backend takes"
            raise TypeError(message(problem.op.value, "config", need, repr(stage)))
    require(
        _block_fits(problem, config),
        problem.op.value,
        "plan.routing_block_m",
        need=f"a multiple of block_m = {getattr(config, 'block_m', None)}",
        got=getattr(problem, "routing_block_m", None),
        remedy="build the plan with a larger routing_block_m or pin a smaller block_m",
    )


def _slower(problem: Problem, kernel: AnyKernel, rejected: list[tuple[str, str]]) -> str:
    """Why `kernel` is not the fast one of the problem's device, as a phrase; "" if it is."""
    if problem.target.kind == "cpu":
        return ""
    own = made_for(problem.target.arch)
    fast = own.name if own is not None and problem.op in own.kernels else ""
    reasons = [
        f"{name} {reason}"
        for name, reason in rejected
        if kernel.backend == "reference" or name == fast
    ]
    if reasons:
        remedy = remedy_of(problem.target)
        reasons += [remedy] if remedy else []
        return f"runs on the {kernel.backend} backend: {'; '.join(reasons)}"
    say: Callable[[Problem], str] = getattr(kernel, "slower", lambda _: "")
    return say(problem)


@functools.cache
def _warn_slower(op: Op, arch: str, slower: str) -> None:
    warnings.warn(
        f"mxpert: {op.value} on {arch} {slower}", PerformanceWarning, stacklevel=_callers_level()
    )


def _callers_level() -> int:
    """Return the `stacklevel` for a warning of the calling function.

    The warning then names the line outside of this package that led to it.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("mxpert."):
        frame, level = frame.f_back, level + 1
    return level


@functools.cache
def _warn_outdated(place: str) -> None:
    warnings.warn(
        f"mxpert: {place} names tiles that this version does not have, so the heuristic "
        "chooses; run mxpert tune again",
        RuntimeWarning,
        stacklevel=_callers_level(),
    )


def _asked(kind: str) -> list[str]:
    """Backends for a kind of target, in the order in which they are asked."""
    asked = [each for each in BACKENDS.values() if kind in each.rank]
    return [each.name for each in sorted(asked, key=lambda each: each.rank[kind])]


@functools.lru_cache(_CACHED_RESOLUTIONS)
def _resolve(
    problem: Problem, pins: Override, generation: int
) -> tuple[Resolution, tuple[tuple[str, str], ...]]:
    """The choice, and each rejected backend with its reason.

    Cached until tables change, which `generation` counts.
    """
    rejected: list[tuple[str, str]] = []
    pinned = pins.backend
    for backend in (pinned,) if pinned else _asked(problem.target.kind):
        found = _candidate(backend, problem)
        if isinstance(found, str):
            rejected.append((backend, found))
            continue
        config, source, detail = _choose_config(found, problem, pins.config)
        config = _within_sms(found, problem, config, source)
        if isinstance(config, str):
            rejected.append((backend, config))
            continue
        if pinned and source == "heuristic":
            detail += ", pinned by override()"
        slower = "" if pinned else _slower(problem, found, rejected)
        return Resolution(found, config, source, detail, slower), tuple(rejected)
    if pinned:
        raise UnsupportedError(
            message(
                problem.op.value,
                "backend",
                "one that serves this problem",
                f"{pinned!r}, which {rejected[0][1]}",
                "name another backend, or none; mxpert doctor lists them",
            )
        )
    raise refuse(problem, (f"{name} {reason}" for name, reason in rejected))


def resolve(problem: Problem) -> tuple[AnyKernel, Any]:
    """The kernel and the config for `problem`; warns once of each reason for a slow choice.

    Raises:
        UnsupportedError: no backend, or not the pinned one, can serve it.
    """
    resolution, _ = _resolve(problem, _override.get(), tables.generation())
    if resolution.slower:
        _warn_slower(problem.op, problem.target.arch, resolution.slower)
    return resolution.kernel, resolution.config


def resolve_cached(call: CachedCall) -> tuple[AnyKernel, Any]:
    """`resolve` for the problem of a cached call, without hashing it."""
    pins, generation = _override.get(), tables.generation()
    cached = call.resolved
    if cached is None or cached[0] is not pins or cached[1] != generation:
        call.resolved = cached = pins, generation, resolve(call.problem)
    choice: tuple[AnyKernel, Any] = cached[2]
    return choice


def refusal(problem: Problem, backend: str) -> str | None:
    """Why a backend cannot serve `problem`, as a phrase after its name; None if it can."""
    found = _candidate(backend, problem)
    return found if isinstance(found, str) else None


def explain_problem(problem: Problem) -> Explanation:
    """What `resolve` would choose, the source of the choice, and the rejected backends.

    A CPU takes the reference without asking the faster backends; their reasons are told, too.
    """
    pins = _override.get()
    resolution, rejected = _resolve(problem, pins, tables.generation())
    if problem.target.kind == "cpu" and not pins.backend:
        having = [name for name in sorted(BACKENDS) if problem.op in BACKENDS[name].kernels]
        reasons = {name: refusal(problem, name) for name in having}
        rejected = tuple((name, reason) for name, reason in reasons.items() if reason)
    return Explanation(problem, resolution, rejected)

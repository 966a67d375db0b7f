"""Backend: what a family of kernels is made for and what it has, stated once, as data."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import require
from ..formats.layouts import WeightLayout
from ..formats.spec import MXFP4, ScaleSpan
from ..formats.tensor import Layout
from .kernel import AnyKernel
from .problem import GemmConfig, Op, StageConfig, Target


class Status(enum.Enum):
    """What is known of the kernels on a GPU."""

    MEASURED = "measured"
    SAME_BINARIES = "not run; the binaries of the H200"
    COMPILED = "compiled, not run"
    EMULATED = "emulated: its code runs on a CPU in the tests"
    NOT_TRIED = "not tried"
    REFERENCE = "torch reference, slow"


@dataclass(frozen=True)
class Support:
    """A row of the table of GPUs.

    Args:
        gpus: names, for people. architectures: as in `Target.arch`.
        kernels: the fastest backend. status: what was tried.
        name: pattern that the driver's name of the device contains; "" matches any.
    """

    gpus: str
    architectures: tuple[str, ...]
    kernels: str
    status: Status
    name: str = ""

    @property
    def has_kernels(self) -> bool:
        """Whether anything faster than torch runs."""
        return self.kernels != "reference"


@dataclass(frozen=True, eq=False)
class Backend:
    """The manifest of a backend; `dispatch.register_backend` makes it known.

    Args:
        name: its name in `override`, `explain` and tuned tables.
        kernels: "module:NAME" of the KernelSpec of each op, imported when the op is first resolved.
        rank: the kinds of target ("cuda", "hip", "cpu") whose ops ask it; lower ranks first.
        made_for: architectures that have it as their fast backend.
        stage_config: type of the configs of its MoE stages; JSON in tuned tables has its fields.
        weight_layout: the layout of MXFP4 weights that its MoE kernels read; None is ROW_MAJOR.
        other_layouts: those of other formats.
        training_span: scale span on `made_for` of recipes that leave it open.
        replays: whether calls may be repeated without the host code of `launch`.
        gpus: its rows of the table of GPUs.
        devices: known devices, for `mxpert tune --dry-run` and for checks of shipped tables.
    """

    name: str
    kernels: Mapping[Op, str]
    rank: Mapping[str, int]
    made_for: tuple[str, ...] = ()
    stage_config: type[StageConfig] = GemmConfig
    weight_layout: WeightLayout | None = None
    other_layouts: tuple[WeightLayout, ...] = ()
    training_span: ScaleSpan = ScaleSpan.BLOCK
    replays: bool = True
    gpus: tuple[Support, ...] = ()
    devices: tuple[Target, ...] = ()

    def load(self, op: Op) -> AnyKernel:
        """Import the kernel of an op that it has."""
        module, _, name = self.kernels[op].partition(":")
        kernel: AnyKernel = getattr(importlib.import_module(module), name)
        return kernel


BACKENDS: dict[str, Backend] = {}
"""Every backend by name, in the order of the table of GPUs."""


def add_backend(backend: Backend) -> None:
    """Add a manifest and the weight layouts that it names."""
    name = backend.name
    require(name not in BACKENDS, "register_backend", "name", need="a new name", got=repr(name))
    BACKENDS[name] = backend
    for layout in (backend.weight_layout, *backend.other_layouts):
        if layout is not None:
            Layout.register(layout)


def made_for(arch: str) -> Backend | None:
    """The backend of an architecture's own; elsewhere the portable one is the fast one."""
    return next((each for each in BACKENDS.values() if arch in each.made_for), None)


def layouts_for(arch: str, weight_format: str = MXFP4.name) -> tuple[Layout, ...]:
    """Layouts that `MoEWeights.prepare` tries for a format on an architecture, in order."""
    backend = made_for(arch)
    layouts = () if backend is None else (backend.weight_layout, *backend.other_layouts)
    own = (each for each in layouts if each is not None and weight_format in each.formats)
    return (*own, Layout.ROW_MAJOR)

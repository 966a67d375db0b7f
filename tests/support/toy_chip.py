"""A made-up chip: one kernel, a config type and a weight layout of its own, and the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mxpert.core.backend import BACKENDS, Backend, Status, Support
from mxpert.core.problem import MoEProblem, Op, Target
from mxpert.core.stage_configs import MoEConfig, ReferenceConfig, StageConfig, require_integers
from mxpert.errors import require_tensor
from mxpert.formats.gate_up import GateUpOrder
from mxpert.formats.layouts import WeightLayout, require_plain
from mxpert.formats.tensor import Layout, MXTensor
from mxpert.moe.inputs import FusedMoEInputs

TARGET = Target("toy", "toy1", "Toy 1", num_sms=2, shared_memory=1 << 16)


class _LastRowFirst(WeightLayout):
    """Rows of each expert from the last to the first; it holds no row without a scale."""

    name, value = "LAST_ROW_FIRST", "last_row_first"
    gate_up_order = GateUpOrder.INTERLEAVED
    holds = "rows above 2^-127"

    def fits(self, certificate: Any) -> bool:
        return bool((certificate.reference > 0).all())

    def check(self, t: MXTensor, op: str) -> None:
        experts, rows, depth = t.shape
        for name, tensor, width in (
            ("qdata", t.qdata, depth // 2),
            ("scale", t.scale, depth // 32),
        ):
            require_tensor(tensor, op, name, dtype=torch.uint8, shape=(experts, rows, width))

    def pack(
        self,
        t: MXTensor,
        certificate: Any = None,
        rows: torch.Tensor | None = None,
        *,
        out: MXTensor | None = None,
    ) -> MXTensor:
        require_plain(t, "pack_toy")
        order = slice(None) if rows is None else rows
        codes, scale = t.qdata[:, order].flip(1), t.scale[:, order].flip(1)
        if out is None:
            return MXTensor(codes, scale, t.format, -1, self, logical_shape=tuple(t.shape))
        out.qdata.copy_(codes)
        out.scale.copy_(scale)
        return out

    def unpack(self, t: MXTensor, rows: torch.Tensor | None = None) -> MXTensor:
        self.require_own(t, "unpack_toy")
        codes, scale = torch.empty_like(t.qdata), torch.empty_like(t.scale)
        order = slice(None) if rows is None else rows
        codes[:, order], scale[:, order] = t.qdata.flip(1), t.scale.flip(1)
        return MXTensor(codes, scale, t.format)


LAST_ROW_FIRST = _LastRowFirst()


@dataclass(frozen=True)
class ToyGemmConfig(StageConfig):
    block_m: int
    lanes: int

    def __post_init__(self) -> None:
        require_integers(self, ("block_m", "lanes"))


class _FusedMoE:
    """The whole layer, on the reference; `launched` holds the config of each call."""

    op, backend = Op.FUSED_MOE, "toy"
    launched: list[MoEConfig]

    def __init__(self) -> None:
        self.launched = []

    def unsupported(self, problem: MoEProblem) -> str | None:
        if problem.weight_layout is not LAST_ROW_FIRST:
            return "needs weights in LAST_ROW_FIRST layout: call weights.prepare(device=...)"
        return None

    def configs(self, problem: MoEProblem) -> Iterator[MoEConfig]:
        for lanes in (4, 8):
            yield MoEConfig(16, ToyGemmConfig(16, lanes), ToyGemmConfig(16, lanes))

    def heuristic(self, problem: MoEProblem) -> MoEConfig:
        return next(self.configs(problem))

    def launch(
        self, problem: MoEProblem, config: MoEConfig, inputs: FusedMoEInputs
    ) -> torch.Tensor:
        self.launched.append(config)
        plain = inputs.weights.unprepare()
        layer = replace(problem, weight_layout=Layout.ROW_MAJOR)
        reference = BACKENDS["reference"].load(Op.FUSED_MOE)
        result: torch.Tensor = reference.launch(
            layer, ReferenceConfig(), replace(inputs, weights=plain)
        )
        return result


FUSED_MOE = _FusedMoE()

BACKEND = Backend(
    "toy",
    kernels={Op.FUSED_MOE: f"{__name__}:FUSED_MOE"},
    rank={"toy": 0},
    made_for=("toy1",),
    stage_config=ToyGemmConfig,
    weight_layout=LAST_ROW_FIRST,
    replays=False,
    gpus=(Support("Toy 1", ("toy1",), "toy", Status.NOT_TRIED),),
    devices=(TARGET,),
)

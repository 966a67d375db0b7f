"""Cases of MoE layers and of their stages, and their comparison with float64.

`tests.moe.oracle` computes each row of a layer alone, without the library's code. Sizes are no
multiples of the tiles, memory that may not be read is NaN. Exact cases (`support.exact`) have the
bits of float64 in any order of the sums; others have tolerances of `mxpert.testing.numerics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch

import mxpert
from mxpert import Combine, GateUpOrder, RoutingPlan, ScaleRule
from mxpert.configs import Cdna4GemmConfig, GemmConfig, MoEConfig
from mxpert.core.backend import BACKENDS
from mxpert.core.problem import (
    Activation,
    ClampedSiLU,
    MoEOptions,
    MoEProblem,
    Op,
    OwnFormat,
    SiLU,
    SiTUv2,
    SwiGLU,
    Target,
    activation_mx_format,
)
from mxpert.formats import Layout, MXTensor, quantize_blocks
from mxpert.moe.cdna4.config import prefill_config
from mxpert.testing.numerics import (
    assert_close_relative,
    assert_exact,
    end_to_end_tolerance,
    stage_tolerance,
)
from mxpert.testing.problems import MoEInputs, MoEShape, Routing, random_moe_problem, random_routing
from support import hopper
from support.exact import exact_moe_problem
from support.executors import Executor
from support.poison import poison_weights
from tests.moe.oracle import Rows, moe_layer

FORMATS: tuple[OwnFormat, ...] = ("bf16", "mxfp8", "mxfp4", "fp8_token")
EXACT_FORMATS = FORMATS[:3]
"""Their scales are powers of two."""
SWIGLU = SwiGLU()
ACTIVATIONS = (SiLU(), SWIGLU, ClampedSiLU(), SiTUv2())
TIGHT = (SiLU(), SwiGLU(alpha=1.3, limit=1.0), ClampedSiLU(0.5), SiTUv2(beta=0.7, beta_up=1.1))
"""Parameters that change many of normal values."""
ORDERS, RULES = tuple(GateUpOrder), tuple(ScaleRule)
COMBINES = (Combine.REDUCE, Combine.ATOMIC, Combine.FLAT)
BAD_TOKEN = 5


def decode(
    block_m: int = 16, k_slices: int = 1, k_splits: int = 1, stages: int = 4, warps: int = 4
) -> Cdna4GemmConfig:
    block_n = 64 * warps // k_slices
    return Cdna4GemmConfig("decode", block_m, block_n, warps, stages, k_splits, k_slices)


def both(stage: Cdna4GemmConfig, unit: int = 0) -> MoEConfig:
    return MoEConfig(unit or stage.block_m, stage, stage)


def tile(unit: int, gate_up: GemmConfig, down: GemmConfig) -> MoEConfig:
    return MoEConfig(unit, gate_up, down)


TILES: dict[str, dict[str, MoEConfig]] = {
    "chosen": {},
    "small": {
        "triton": tile(16, GemmConfig(16, 64, 128), GemmConfig(16, 128, 128)),
        "cdna4": both(decode()),
    },
    "wide": {
        "triton": tile(32, GemmConfig(32, 64, 128), GemmConfig(32, 128, 64)),
        "cdna4": both(decode(warps=8)),
    },
    "small_in_units": {
        "triton": tile(64, GemmConfig(16, 32, 128), GemmConfig(32, 64, 64)),
        "cdna4": both(decode(), 32),
    },
    "grouped": {
        "triton": tile(16, GemmConfig(16, 64, 128, group_m=2), GemmConfig(16, 128, 128, group_m=2)),
        "cdna4": both(decode(stages=2)),
    },
    "split": {
        "triton": tile(
            32,
            GemmConfig(32, 128, 64, split_k=2, group_m=4),
            GemmConfig(32, 256, 64, split_k=2, group_m=2),
        ),
        "cdna4": both(decode(32, k_splits=3)),
    },
    "more_splits_than_steps": {
        "triton": tile(64, GemmConfig(64, 64, 128, split_k=4), GemmConfig(64, 128, 128, split_k=4)),
        "cdna4": both(decode(k_splits=2, warps=1)),
    },
    "sliced": {
        "triton": tile(32, GemmConfig(32, 64, 256), GemmConfig(32, 256, 64)),
        "cdna4": both(decode(32, k_slices=4)),
    },
    "sliced_and_split": {
        "triton": tile(32, GemmConfig(32, 64, 128, split_k=2), GemmConfig(32, 128, 64, split_k=2)),
        "cdna4": both(decode(32, 2, 2, stages=2)),
    },
    **{
        name: {"triton": tile(64, GemmConfig(64, 64, 128), GemmConfig(64, 128, 64)), "cdna4": own}
        for name, own in {
            "high_64": both(prefill_config(64)),
            "high_128": both(prefill_config(128)),
            "high_128_in_units": both(prefill_config(128), 256),
            "high_256": both(prefill_config(256)),
        }.items()
    },
}
"""Configs of both stages by backend. A backend that is not named chooses its own."""


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a layer; `experts` are the local ones."""

    hidden: int = 160
    inner: int = 96
    experts: int = 3
    top_k: int = 2
    tokens: int = 20


SMALL = Sizes()
"""Two steps of depth, the second a quarter full, and one."""
DEEP = Sizes(2336, experts=2, top_k=1)
"""73 blocks of depth: several copies of activations to LDS, the last unit a quarter full."""
HIGH = Sizes(tokens=70)
"""A row block of 64 and a part of one."""
HIGH_DEEP = Sizes(1312, experts=2, top_k=1, tokens=70)


@dataclass(frozen=True)
class MoECase:
    """One layer, or its two stages.

    Args:
        exact: compare bits; otherwise normal values and a tolerance.
        tile: one of `TILES`.
        expert_map: global → local expert, −1 for those of other ranks.
        local_tokens: the others' activations are NaN. stray_ids: some ids name no expert.
        ids_dtype, weights_dtype: of the router's results.
        x: how activations arrive: bfloat16, quantised, or as a view at an odd address or with gaps.
        out: written by the op: a new tensor, or x itself. poisoned: weights lie in larger storage
            that is NaN. bad: stands in one element of one token, which has no finite result then.
    """

    a_format: OwnFormat
    activation: Activation = SWIGLU
    order: GateUpOrder = GateUpOrder.INTERLEAVED
    combine: Combine = Combine.REDUCE
    has_bias: bool = True
    on_input: bool = False
    rule: ScaleRule = ScaleRule.RCEIL
    out_dtype: torch.dtype = torch.bfloat16
    sizes: Sizes = SMALL
    exact: bool = True
    tile: str = "small"
    routing: Routing = Routing.UNIFORM
    expert_map: tuple[int, ...] | None = None
    local_tokens: int | None = None
    stray_ids: bool = False
    ids_dtype: torch.dtype = torch.int32
    weights_dtype: torch.dtype = torch.float32
    x: Literal["plain", "quantised", "shifted", "gaps"] = "plain"
    out: Literal["new", "x"] | None = None
    poisoned: bool = False
    bad: float | None = None
    seed: int = 0

    def problem(self, target: Target, layout: Layout) -> MoEProblem:
        """The problem that a backend is asked for."""
        sizes = self.sizes
        options = MoEOptions(
            self.activation, self.a_format, self.rule, self.on_input, self.combine, self.out_dtype
        )
        dimensions = sizes.tokens, sizes.top_k, sizes.experts, sizes.hidden, sizes.inner
        return MoEProblem(Op.FUSED_MOE, target, *dimensions, options, layout)

    def served_by(self, backend: str) -> bool:
        """`test_backends_serve_what_the_cases_say` compares this with the kernels."""
        return backend in BACKENDS

    def is_exact_on(self, backend: str) -> bool:
        """Whether to compare bits. Scales of fp8_token are no powers of two, and FP8 tensor cores
        round the sums of its codes."""
        return self.exact and (backend, self.a_format) != ("hopper", "fp8_token")

    def config(self, executor: Executor) -> MoEConfig | None:
        """The tiles of the executor's backend; None: it chooses."""
        return TILES[self.tile].get(executor.backend)

    def inputs(self) -> MoEInputs:
        """Operands on the CPU, with whole bfloat16 activations."""
        sizes, draw = self.sizes, torch.Generator().manual_seed(self.seed)
        shape = MoEShape(
            sizes.hidden,
            sizes.inner,
            sizes.experts,
            sizes.top_k if self.expert_map is None else 1,
            self.activation,
            self.order,
            self.has_bias,
        )
        if self.exact:
            made = exact_moe_problem(
                shape,
                sizes.tokens,
                seed=self.seed,
                routing=self.routing,
                apply_router_weight_on_input=self.on_input,
            )
        else:
            made = random_moe_problem(shape, sizes.tokens, seed=self.seed, routing=self.routing)
        if self.expert_map is not None:
            weights, ids = random_routing(
                sizes.tokens, len(self.expert_map), sizes.top_k, generator=draw
            )
            weights = (weights > 0.5) / 2 + 0.5
            made = replace(made, topk_weights=weights, topk_ids=ids)
        if self.stray_ids:
            made.topk_ids[0, 0], made.topk_ids[1], made.topk_ids[2, 0] = -1, 99, 2**31 - 1
        return replace(
            made,
            topk_weights=made.topk_weights.to(self.weights_dtype),
            topk_ids=made.topk_ids.to(self.ids_dtype),
        )

    def expected(self, inputs: MoEInputs) -> Rows:
        """Every row, by the oracle."""
        ids = inputs.topk_ids
        if self.local_tokens is not None:
            beyond = torch.arange(self.sizes.tokens)[:, None] >= self.local_tokens
            ids = ids.masked_fill(beyond, -1)
        return moe_layer(
            inputs.x,
            inputs.weights,
            inputs.topk_weights,
            ids,
            activation=inputs.activation,
            activation_format=self.a_format,
            scale_rule=self.rule,
            apply_router_weight_on_input=self.on_input,
            expert_map=None if self.expert_map is None else torch.tensor(self.expert_map),
        )

    def given(self, inputs: MoEInputs, executor: Executor) -> MoEInputs:
        """The operands as the executor gets them."""
        weights, x = inputs.weights, inputs.x.clone()
        if self.local_tokens is not None:
            x[self.local_tokens :] = torch.nan
        if self.bad is not None:
            x[BAD_TOKEN, 7] = self.bad
        if self.poisoned:
            weights = poison_weights(weights)
        device = executor.device
        return replace(
            inputs,
            x=self._arrive(x.to(device)),
            weights=weights.prepare(device=device, layout=layout_of(executor.backend)),
            topk_weights=inputs.topk_weights.to(device),
            topk_ids=inputs.topk_ids.to(device),
        )

    def _arrive(self, x: torch.Tensor) -> Any:
        """Activations as `self.x` says: a tensor or an MXTensor."""
        if self.x == "quantised":
            fmt = activation_mx_format(self.a_format)
            assert fmt is not None
            return quantize_blocks(x, fmt, -1, self.rule)
        if self.x == "plain":
            return x
        before, after = (1, 2) if self.x == "shifted" else (0, 40)
        wide = x.new_full((x.shape[0], before + x.shape[1] + after), torch.nan)
        view = wide[:, before : before + x.shape[1]]
        return view.copy_(x)

    def run(self, inputs: MoEInputs) -> torch.Tensor:
        """The layer's result."""
        device, options = inputs.topk_ids.device, {}
        if self.expert_map is not None:
            options["expert_map"] = torch.tensor(self.expert_map, dtype=torch.int32, device=device)
        if self.local_tokens is not None:
            options["num_local_tokens"] = torch.tensor(
                [self.local_tokens], dtype=torch.int32, device=device
            )
        x = inputs.x
        if self.out == "x":
            options["out"] = x = x.clone()
        elif self.out == "new":
            options["out"] = torch.full_like(x, torch.nan, dtype=self.out_dtype)
        y = mxpert.fused_moe(
            x,
            inputs.weights,
            inputs.topk_weights,
            inputs.topk_ids,
            activation=inputs.activation,
            activation_format=self.a_format,
            combine=self.combine,
            scale_rule=self.rule,
            apply_router_weight_on_input=self.on_input,
            out_dtype=self.out_dtype,
            **options,
        )
        assert y is options.get("out", y)
        return y

    def check(self, executor: Executor) -> None:
        """Run the layer and compare. On a GPU later calls are replayed."""
        inputs = self.inputs()
        expected, given = self.expected(inputs), self.given(inputs, executor)
        with executor.serving(self.config(executor)):
            for _ in range(4 if executor.way == "gpu" else 1):
                self.compare(self.run(given).cpu(), inputs, expected, executor.backend)

    def compare(
        self, actual: torch.Tensor, inputs: MoEInputs, expected: Rows, backend: str = ""
    ) -> None:
        """Raise unless the layer's result is right."""
        wanted = expected.y.sum(1)
        assert (actual.dtype, actual.shape) == (self.out_dtype, wanted.shape)
        assert not actual[~expected.valid.any(1)].any()
        if self.bad is not None:
            assert not actual[BAD_TOKEN].isfinite().any()
            others = torch.arange(len(actual)) != BAD_TOKEN
            actual, wanted = actual[others], wanted[others]
        if self.is_exact_on(backend):
            assert_exact(actual, wanted.to(self.out_dtype), "layer", ignore_zero_sign=True)
        elif backend == "hopper":
            bound = hopper.layer_tolerance(self.a_format, self.out_dtype, inputs, len(actual))
            assert_close_relative(actual, wanted, bound, "layer")
        else:
            sizes = self.sizes.hidden, self.sizes.inner
            bound = end_to_end_tolerance(
                self.a_format, self.out_dtype, *sizes, **self._sum(expected, actual)
            )
            assert_close_relative(actual, wanted, bound, "layer")

    def _sum(self, expected: Rows, actual: torch.Tensor) -> dict[str, Any]:
        """What a tolerance depends on: the rows that are summed, and the number of values."""
        cancellation = (expected.y.norm() / expected.y.sum(1).norm()).item()
        flat = self.combine is Combine.FLAT
        return {
            "top_k": self.sizes.top_k if self.combine is Combine.REDUCE else 1,
            "numel": actual.numel(),
            "cancellation": 1.0 if flat else max(1.0, cancellation),
        }

    # ---- stages -----------------------------------------------------------------------------

    def check_stages(self, executor: Executor) -> None:
        """Run each stage on the oracle's operands and compare."""
        # REDUCE rounds each row. In float32 the tolerance is the accumulator's.
        rounds = not self.exact and self.combine is Combine.REDUCE
        case = replace(self, out_dtype=torch.float32) if rounds else self
        inputs, config = case.inputs(), case.config(executor)
        expected, given = case.expected(inputs), case.given(inputs, executor)
        unit = 64 if config is None else config.routing_block_m
        with executor.serving(config):
            h, y = case.run_stages(given, expected, unit)
        case.compare_gate_up(h.to("cpu"), expected, executor.backend)
        case.compare_down(y.cpu(), inputs, expected, executor.backend)

    def run_stages(
        self, given: MoEInputs, expected: Rows, unit: int
    ) -> tuple[torch.Tensor | MXTensor, torch.Tensor]:
        """Stage 1's rows, and stage 2's from the oracle's: sums, or with FLAT rows.

        Rows are by (token, slot); padding of stage 2's operand is NaN.
        """
        weights, num_experts = given.weights, self.sizes.experts
        with mxpert.override(backend="reference"):
            plan = mxpert.make_routing_plan(
                given.topk_weights, given.topk_ids, num_experts=num_experts, routing_block_m=unit
            )
        options: Mapping[str, Any] = {
            "activation_format": self.a_format,
            "apply_router_weight_on_input": self.on_input,
        }
        h = mxpert.moe_gate_up(
            given.x, weights, plan, activation=given.activation, scale_rule=self.rule, **options
        )
        operand = _padded(self.intermediate(expected), plan).to(weights.device)
        y = mxpert.moe_down(
            operand, weights, plan, combine=self.combine, out_dtype=self.out_dtype, **options
        )
        flat = self.combine is Combine.FLAT
        assert h.shape == (plan.capacity, self.sizes.inner)
        assert y.shape[0] == (plan.capacity if flat else self.sizes.tokens)
        rows = plan.slot_rows.flatten().long()
        return _rows_of(h, rows), y[rows] if flat else y

    def intermediate(self, expected: Rows) -> torch.Tensor | MXTensor:
        """Stage 1's rows by (token, slot) as it stores them."""
        rows = expected.h.flatten(0, 1).float().bfloat16()
        fmt = activation_mx_format(self.a_format)
        return rows if fmt is None else quantize_blocks(rows, fmt, -1, self.rule)

    def compare_gate_up(self, h: torch.Tensor | MXTensor, expected: Rows, backend: str) -> None:
        """Raise unless stage 1's rows by (token, slot) are right."""
        wanted = self.intermediate(expected)
        assert type(h) is type(wanted)
        if self.exact:
            assert_exact(h, wanted, "stage 1", ignore_zero_sign=True)
            return
        numel = expected.h.numel()
        dtype = None if isinstance(h, MXTensor) else torch.bfloat16
        if backend == "hopper":
            bound = hopper.intermediate_tolerance(self.a_format, numel)
        else:
            bound = stage_tolerance(self.a_format, dtype, self.sizes.hidden, numel=numel)
        assert_close_relative(h, wanted, bound, "stage 1")

    def compare_down(
        self, y: torch.Tensor, inputs: MoEInputs, expected: Rows, backend: str
    ) -> None:
        """Raise unless stage 2's sums, or with FLAT its rows by (token, slot), are right."""
        flat = self.combine is Combine.FLAT
        wanted = expected.y.flatten(0, 1) if flat else expected.y.sum(1)
        assert (y.dtype, y.shape) == (self.out_dtype, wanted.shape)
        if self.exact:
            assert_exact(y, wanted.to(self.out_dtype), "stage 2", ignore_zero_sign=True)
            return
        if backend == "hopper":
            bound = hopper.down_tolerance(self.a_format, self.out_dtype, inputs, len(y))
        else:
            bound = stage_tolerance(
                self.a_format, self.out_dtype, self.sizes.inner, **self._sum(expected, y)
            )
        assert_close_relative(y, wanted, bound, "stage 2")


def layout_of(backend: str) -> Layout:
    """The layout that a backend's kernels read."""
    own = BACKENDS[backend].weight_layout
    return Layout.ROW_MAJOR if own is None else own


def _rows_of(h: torch.Tensor | MXTensor, rows: torch.Tensor) -> torch.Tensor | MXTensor:
    if isinstance(h, MXTensor):
        return replace(h, qdata=h.qdata[rows], scale=h.scale[rows])
    return h[rows]


def _padded(rows: torch.Tensor | MXTensor, plan: RoutingPlan) -> torch.Tensor | MXTensor:
    """Rows by (token, slot) in the plan's order; padding decodes to NaN."""
    places = plan.slot_rows.flatten().long().cpu()
    if isinstance(rows, MXTensor):
        qdata = rows.qdata.new_full((plan.capacity, rows.qdata.shape[1]), 0x77)
        scale = rows.scale.new_full((plan.capacity, rows.scale.shape[1]), 255)
        qdata[places], scale[places] = rows.qdata, rows.scale
        return replace(rows, qdata=qdata, scale=scale)
    padded = rows.new_full((plan.capacity, rows.shape[1]), torch.nan)
    padded[places] = rows
    return padded


# ---- the list -----------------------------------------------------------------------------------

Cases = dict[str, MoECase]
FOUR_TILES = ("small", "small_in_units", "split", "more_splits_than_steps")
EXACT: Cases = {
    f"{a_format}-{ACTIVATIONS[i].name}-{tile}": MoECase(
        a_format,
        ACTIVATIONS[i],
        ORDERS[(i + j) % 3],
        COMBINES[(i + j) % 2],
        has_bias=i % 2 == 0,
        on_input=i == 1,
        rule=RULES[(i + j) % len(RULES)],
        tile=tile,
        sizes=Sizes(tokens=33),
    )
    for (i, tile), (j, a_format) in product(enumerate(FOUR_TILES), enumerate(EXACT_FORMATS))
}
"""Every tile with every format."""
OTHER_TILES: Cases = {
    "bf16": MoECase("bf16", ClampedSiLU(), GateUpOrder.INTERLEAVED_16, sizes=DEEP, tile="small"),
    "mxfp4-sliced": MoECase(
        "mxfp4", SiTUv2(), combine=Combine.ATOMIC, sizes=replace(DEEP, tokens=40), tile="sliced"
    ),
    "mxfp8-split": MoECase("mxfp8", sizes=replace(DEEP, tokens=40), tile="split"),
    "bf16-sliced_and_split": MoECase(
        "bf16", combine=Combine.ATOMIC, sizes=DEEP, tile="sliced_and_split"
    ),
    "mxfp8-floor": MoECase("mxfp8", SiLU(), rule=ScaleRule.FLOOR, sizes=DEEP, tile="grouped"),
    "mxfp4-wide": MoECase("mxfp4", SiLU(), rule=ScaleRule.EVEN, tile="wide"),
    "fp8_token": MoECase(
        "fp8_token", SiTUv2(), has_bias=False, on_input=True, tile="small_in_units"
    ),
    "fp8_token-high": MoECase(
        "fp8_token", SiTUv2(), has_bias=False, on_input=True, sizes=HIGH, tile="high_64"
    ),
}
HIGH_TILES: Cases = {
    "mxfp4-256": MoECase("mxfp4", sizes=HIGH, tile="high_256"),
    "mxfp8-256-deep": MoECase(
        "mxfp8", SiLU(), GateUpOrder.CONCATENATED, Combine.ATOMIC, sizes=HIGH_DEEP, tile="high_256"
    ),
    "mxfp4-128-deep": MoECase(
        "mxfp4",
        SiTUv2(),
        combine=Combine.ATOMIC,
        rule=ScaleRule.EVEN,
        sizes=replace(HIGH_DEEP, tokens=150),
        tile="high_128",
    ),
    "mxfp8-128-units": MoECase(
        "mxfp8",
        ClampedSiLU(),
        rule=ScaleRule.FLOOR,
        sizes=replace(HIGH, tokens=100),
        tile="high_128_in_units",
    ),
    "mxfp8-64-deep": MoECase(
        "mxfp8", order=GateUpOrder.INTERLEAVED_16, sizes=HIGH_DEEP, tile="high_64"
    ),
    "mxfp4-64": MoECase("mxfp4", SiLU(), has_bias=False, on_input=True, sizes=HIGH, tile="high_64"),
    "mxfp8-one_expert": MoECase(
        "mxfp8",
        sizes=replace(HIGH, tokens=130, top_k=1),
        routing=Routing.ONE_EXPERT,
        tile="high_128_in_units",
    ),
}
STAGES: Cases = {
    f"{a_format}-{activation.name}": MoECase(
        a_format,
        activation,
        ORDERS[(i + j) % 3],
        COMBINES[(i + 2 * j) % 3],
        has_bias=j % 2 == 0,
        on_input=j % 4 == i,
        rule=RULES[j % 4],
        exact=False,
        tile=FOUR_TILES[j % 4],
        sizes=Sizes(experts=5, tokens=64),
    )
    for i, a_format in enumerate(FORMATS)
    for j, activation in enumerate((ACTIVATIONS, TIGHT)[i % 2])
}
"""Pairwise: every format with every activation, order, combine, rule and tile, every activation
with every order and combine. An activation more is one in `ACTIVATIONS` and in `TIGHT`."""
NO_TOKENS: Cases = {
    combine.value: MoECase("mxfp8", combine=combine, sizes=Sizes(tokens=0)) for combine in COMBINES
}
ROUNDED: Cases = {
    a_format: MoECase(
        a_format, out_dtype=dtype, exact=False, sizes=Sizes(experts=5, tokens=64), seed=1
    )
    for a_format, dtype in (
        ("bf16", torch.float32),
        ("mxfp8", torch.float16),
        ("mxfp4", torch.bfloat16),
        ("fp8_token", torch.bfloat16),
    )
} | {"mxfp8-deep": MoECase("mxfp8", exact=False, sizes=replace(DEEP, tokens=40))}
MAP = (1, -1, 0, -1, -1)
ROUTED: Cases = {
    **{
        f"{tokens}_tokens-{a_format}": MoECase(
            a_format, sizes=Sizes(experts=5, tokens=tokens), tile="chosen"
        )
        for tokens, a_format in product((0, 1, 3), ("bf16", "mxfp4"))
    },
    **{
        routing.value: MoECase(
            "mxfp8", routing=routing, sizes=Sizes(experts=7, top_k=3, tokens=45), tile="grouped"
        )
        for routing in (Routing.ZIPF, Routing.ONE_EXPERT, Routing.HALF)
    },
    "one_expert_of_one": MoECase("bf16", sizes=Sizes(experts=1, top_k=1)),
    "many_slots": MoECase("mxfp4", sizes=Sizes(experts=7, top_k=6, tokens=9)),
    **{
        f"map-{combine.value}": MoECase(
            a_format,
            combine=combine,
            expert_map=MAP,
            local_tokens=17,
            stray_ids=True,
            sizes=Sizes(experts=2),
        )
        for a_format, combine in (("bf16", Combine.REDUCE), ("mxfp4", Combine.ATOMIC))
    },
    "stray_ids": MoECase("mxfp8", stray_ids=True, tile="chosen"),
    "no_local_tokens": MoECase("bf16", local_tokens=0),
}
OPERANDS: Cases = {
    "quantised": MoECase("mxfp4", x="quantised", rule=ScaleRule.EVEN),
    "shifted": MoECase("bf16", x="shifted"),
    "gaps-router_bf16": MoECase(
        "bf16", x="gaps", stray_ids=True, ids_dtype=torch.int64, weights_dtype=torch.bfloat16
    ),
    "shifted-router_float16-map": MoECase(
        "mxfp8",
        x="shifted",
        stray_ids=True,
        expert_map=MAP,
        ids_dtype=torch.int64,
        weights_dtype=torch.float16,
        sizes=Sizes(experts=2),
    ),
    "gaps-fp8_token": MoECase("fp8_token", x="gaps", exact=False, sizes=Sizes(experts=5)),
    "poisoned": MoECase("mxfp8", poisoned=True, tile="split"),
    "nan": MoECase("bf16", bad=torch.nan),
    "nan-mxfp8": MoECase("mxfp8", bad=torch.nan, sizes=HIGH, tile="high_64"),
    "infinity-mxfp4": MoECase("mxfp4", SiLU(), bad=-torch.inf),
    "infinity-fp8_token": MoECase("fp8_token", bad=torch.inf, exact=False, sizes=Sizes(experts=5)),
}
"""Activations, router results and weights of other dtypes, strides and contents."""
OUT: Cases = {
    f"{out}-{str(dtype).removeprefix('torch.')}-{combine.value}-{tile}": MoECase(
        "bf16", combine=combine, out_dtype=dtype, out=out, tile=tile, sizes=Sizes(tokens=33)
    )
    for out, dtype, tiles in (
        ("new", torch.bfloat16, ("small", "split")),
        ("new", torch.float32, ("split", "small")),
        ("x", torch.bfloat16, ("small", "split")),
    )
    for combine, tile in zip(COMBINES[:2], tiles, strict=True)
} | {"no_tokens": MoECase("bf16", out="new", sizes=Sizes(tokens=0))}
ALL = (EXACT, OTHER_TILES, HIGH_TILES, STAGES, NO_TOKENS, ROUNDED, ROUTED, OPERANDS, OUT)

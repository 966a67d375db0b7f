"""A case of an MoE layer or of its stages: how it runs, and its comparison with float64.

`tests.moe.oracle` computes each row of a layer alone, without the library's code. Memory that may
not be read is NaN. Exact cases (`support.exact`) have the bits of float64 in any order of the sums;
others have tolerances of `mxpert.testing.numerics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import mxpert
from mxpert import Combine, GateUpOrder, MoEWeights, RoutingPlan, ScaleRule
from mxpert.configs import MoEConfig
from mxpert.core.backend import BACKENDS
from mxpert.core.problem import (
    Activation,
    MoEOptions,
    MoEProblem,
    Op,
    OwnFormat,
    SwiGLU,
    Target,
    activation_mx_format,
)
from mxpert.formats import Layout, MXTensor, quantize_blocks
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
from support.layers import plan_of, take
from support.poison import poison_prepared, poison_weights
from support.weight_formats import in_format
from tests.conformance.cases.moe_tiles import TILES
from tests.moe.oracle import Rows, moe_layer

BAD_TOKEN = 5
SWIGLU = SwiGLU()


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a layer; `experts` are the local ones.

    Depths of 160 and 96 are two steps of 128, the second a quarter full, and one.
    """

    hidden: int = 160
    inner: int = 96
    experts: int = 3
    top_k: int = 2
    tokens: int = 20


SMALL = Sizes()


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
            that is NaN, as is what pads prepared ones. bad: stands in one element of one token,
            which has no finite result then. w_format: of the weights. zero_points: whether INT4
            weights have them.
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
    w_format: str = "mxfp4"
    zero_points: bool = False
    seed: int = 0

    def problem(self, target: Target, backend: str) -> MoEProblem:
        """The problem that a backend is asked for."""
        sizes = self.sizes
        options = MoEOptions(
            self.activation, self.a_format, self.rule, self.on_input, self.combine, self.out_dtype
        )
        dimensions = sizes.tokens, sizes.top_k, sizes.experts, sizes.hidden, sizes.inner
        held = self.layout_on(backend)
        return MoEProblem(
            Op.FUSED_MOE, target, *dimensions, options, held, weight_format=self.w_format
        )

    def layout_on(self, backend: str) -> Layout:
        """The layout of the weights that a backend's kernels read."""
        own = BACKENDS[backend]
        layouts = (own.weight_layout, *own.other_layouts)
        held = (each for each in layouts if each is not None and self.w_format in each.formats)
        return next(held, Layout.ROW_MAJOR)

    def served_by(self, backend: str) -> bool:
        """`test_backends_serve_what_the_cases_say` compares this with the kernels."""
        if backend in ("reference", "triton"):
            return True
        return self.activation.is_gated and self.layout_on(backend) is not Layout.ROW_MAJOR

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
        if self.w_format != "mxfp4":
            other = in_format(
                made.weights,
                self.w_format,
                exact=self.exact,
                seed=self.seed,
                zero_points=self.zero_points,
            )
            made = replace(made, weights=other)
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
        device, x = executor.device, inputs.x.clone()
        if self.local_tokens is not None:
            x[self.local_tokens :] = torch.nan
        if self.bad is not None:
            x[BAD_TOKEN, 7] = self.bad
        return replace(
            inputs,
            x=self._arrive(x.to(device)),
            weights=self._prepared(inputs.weights, executor),
            topk_weights=inputs.topk_weights.to(device),
            topk_ids=inputs.topk_ids.to(device),
        )

    def _prepared(self, weights: MoEWeights, executor: Executor) -> MoEWeights:
        """Weights as the executor's kernels read them; preparing copies to dense storage."""
        layout = self.layout_on(executor.backend)
        if not self.poisoned:
            return weights.prepare(device=executor.device, layout=layout)
        if layout is Layout.ROW_MAJOR:
            return poison_weights(weights.prepare(device=executor.device, layout=layout))
        prepared = poison_weights(weights).prepare(device=executor.device, layout=layout)
        for part in (prepared.gate_up_proj, prepared.down_proj):
            poison_prepared(part)
        return prepared

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

    def run(
        self, inputs: MoEInputs, num_sms: int | None = None, logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer's result; logits: choose experts from them, not by the inputs' ids."""
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
        op: Any = mxpert.fused_moe  # Any: one of two ops
        routing: tuple[object, ...] = inputs.topk_weights, inputs.topk_ids
        if logits is not None:
            op, routing = mxpert.fused_moe_from_logits, (logits, self.sizes.top_k)
        y: torch.Tensor = op(
            x,
            inputs.weights,
            *routing,
            activation=inputs.activation,
            activation_format=self.a_format,
            combine=self.combine,
            scale_rule=self.rule,
            apply_router_weight_on_input=self.on_input,
            out_dtype=self.out_dtype,
            num_sms=num_sms,
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

    def check_from_logits(self, executor: Executor) -> None:
        """Compare the bits of the layer from logits with those of the layer from ids."""
        sizes, given = self.sizes, self.given(self.inputs(), executor)
        experts = sizes.experts if self.expert_map is None else len(self.expert_map)
        draw = torch.Generator().manual_seed(self.seed)
        logits = torch.randn(sizes.tokens, experts, generator=draw).to(executor.device)
        # Chips have no top-k of their own: their layers launch the portable one.
        chooses = "reference" if executor.backend == "reference" else "triton"
        with executor.serving(self.config(executor)):
            with mxpert.override(backend=chooses):
                topk_weights, topk_ids = mxpert.route_topk(logits, sizes.top_k)
            want = self.run(replace(given, topk_weights=topk_weights, topk_ids=topk_ids))
            for _ in range(4 if executor.way == "gpu" else 1):
                assert torch.equal(self.run(given, logits=logits), want)
            assert want.any() or not sizes.tokens

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
        weights = given.weights
        with mxpert.override(backend="reference"):
            plan = plan_of(given, unit)
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
        return take(h, rows), y[rows] if flat else y

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

"""What a hunt repeats: one entry for each kernel variant, on small problems and on large ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import mxpert
from benchmarks.grouped.cells import MODES, Shape
from benchmarks.grouped.ours import recipe_of
from mxpert import GateUpOrder, ScaleSpan, SwiGLU
from mxpert.configs import MoEConfig
from mxpert.core.problem import ACTIVATION_FORMATS, TopKOptions
from mxpert.formats import MXTensor
from mxpert.formats.token import FP8_TOKEN
from mxpert.formats.weight_tensor import WeightFormatName
from mxpert.testing.problems import MODEL_SHAPES, MoEShape, random_moe_problem, random_routing
from support.races import MoEHunt, Run, fp8_tiles, hopper_tiles, one_launch, redraw, tokens_for

REPEATS = 50_000
FORMAT_REPEATS = 10_000
LARGE_REPEATS = 2_000

WEIGHT_FORMATS: tuple[WeightFormatName, ...] = ("mxfp8_e4m3", "nvfp4", "int4_g32", "int4_g128")

SMALL = MoEShape(640, 384, 64, 4, SwiGLU(), GateUpOrder.INTERLEAVED, True)
"""Both stages have more tiles than a decode kernel has CTAs, over weights that fit into L2."""
TINY = MoEShape(64, 32, 4, 2, SwiGLU(), GateUpOrder.INTERLEAVED, True)
TINY_GROUPS = replace(TINY, hidden_size=128, intermediate_size=128)
"""Every weight format has whole groups in it."""

CHOICES = {
    "from logits": TopKOptions(),
    "from logits of groups": TopKOptions("sigmoid", num_groups=2, group_score="top2"),
}
"""How layers in one launch choose their experts; the groups are those of tiny problems, too."""

GROUPED = Shape(8, 256, 352, 544)
"""Ragged groups, no whole tiles."""
TINY_GROUPED = Shape(2, 32, 32, 64)
LARGE_GROUPED = Shape(16, 2048, 4096, 7168)
DUAL_SPANS = {
    "exact": (ScaleSpan.BLOCK, ScaleSpan.BLOCK),
    "row": (ScaleSpan.ROW, ScaleSpan.ROW),
    "span128-row": (ScaleSpan.SPAN128, ScaleSpan.ROW),
    "auto": (ScaleSpan.AUTO, ScaleSpan.AUTO),
}


@dataclass(frozen=True)
class Hunted:
    """A problem in fixed buffers, and how it is launched.

    Args:
        run, renew: of `races.hunt`. config: the tiles that ran.
    """

    run: Run
    renew: Callable[[], None]
    config: str


@dataclass(frozen=True)
class Variant:
    """One kernel variant.

    Args:
        name: ``kernel/format or op/tile``. shape: as it stands in the JSON.
        make: the problem on a device; True asks for a tiny one that the reference computes.
        backend, config: pinned; None leaves them to the dispatcher.
    """

    name: str
    shape: str
    make: Callable[[torch.device, bool], Hunted]
    repeats: int = REPEATS
    backend: str | None = None
    config: MoEConfig | None = None

    def pinned(self, dry: bool) -> contextlib.AbstractContextManager[None]:
        """Backend and tile of the variant; a dry run has neither."""
        pins = {} if dry else {"backend": self.backend, "config": self.config}
        return mxpert.override(**pins)


def bits(result: Any) -> tuple[torch.Tensor, ...]:
    """Results as integers, codes and scales of MX tensors apart."""
    if isinstance(result, (tuple, list)):
        return tuple(part for each in result for part in bits(each))
    if isinstance(result, MXTensor):
        wide = [] if result.wide_blocks is None else [result.wide_blocks]
        return (result.qdata, result.scale, *wide)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return (result.view(integers[result.itemsize]) if result.is_floating_point() else result,)


def copy_into(target: Any, source: Any) -> None:
    """Values of tensors, of MX tensors, or of tuples of them."""
    if isinstance(target, MXTensor):
        target.qdata.copy_(source.qdata)
        target.scale.copy_(source.scale)
        if target.wide_blocks is not None:
            target.wide_blocks.copy_(source.wide_blocks)
    elif isinstance(target, torch.Tensor):
        target.copy_(source)
    else:
        for each, other in zip(target, source, strict=True):
            copy_into(each, other)


def text_of(shape: MoEShape, tokens: str) -> str:
    return (
        f"E{shape.num_experts} k{shape.top_k} H{shape.hidden_size} "
        f"F{shape.intermediate_size}, {tokens}"
    )


# --- MoE ----------------------------------------------------------------------------------------


def stages(a_format: str, config: MoEConfig) -> Callable[[torch.device, bool], Hunted]:
    """Both stages with one tile of the Hopper kernels."""

    def make(device: torch.device, dry: bool) -> Hunted:
        smallest = next(iter(hopper_tiles(a_format).values()))  # has few tokens
        case = (TINY, a_format, smallest) if dry else (SMALL, a_format, config)
        made = MoEHunt.of(*case, device)
        return Hunted(made.run, made.renew, str(config))

    return make


def layer(
    shape: MoEShape,
    tokens: int,
    a_format: str,
    *,
    prepared: bool,
    weight_format: WeightFormatName = "mxfp4",
    choice: TopKOptions | None = None,
) -> Callable[[torch.device, bool], Hunted]:
    """A fused layer with the tiles that are pinned, else the dispatcher's. With `choice` it chooses
    its experts from logits. Its routing or its logits are drawn anew, too, and so are its weights
    if they are MXFP4."""

    def make(device: torch.device, dry: bool) -> Hunted:
        chosen = TINY_GROUPS if dry else shape
        count = 3 if dry else tokens
        inputs = random_moe_problem(chosen, count, device=device, weight_format=weight_format)
        if prepared:
            inputs = replace(inputs, weights=inputs.weights.prepare(device=device))
        generator = torch.Generator(device).manual_seed(1)
        logits = torch.randn(count, chosen.num_experts, device=device)
        routing: tuple[Any, ...] = inputs.topk_weights, inputs.topk_ids
        op: Callable[..., torch.Tensor] = mxpert.fused_moe
        options: dict[str, Any] = {"activation": inputs.activation, "activation_format": a_format}
        if choice is not None:
            routing, op = (logits, chosen.top_k), mxpert.fused_moe_from_logits
            options["routing"] = choice
        arguments = inputs.x, inputs.weights, *routing

        def renew() -> None:
            redraw(inputs, generator)
            if choice is not None:
                logits.normal_(generator=generator)
                return
            sizes = len(inputs.x), chosen.num_experts, chosen.top_k
            copy_into(routing, random_routing(*sizes, generator=generator))

        resolution = mxpert.explain(op, *arguments, **options).resolution
        run = lambda: bits(op(*arguments, **options))  # noqa: E731
        return Hunted(run, renew, f"{resolution.kernel.backend}: {resolution.config}")

    return make


def tile_variants() -> Iterator[Variant]:
    """Both stages with every tile that reads MXFP4 weights, or their FP8 copies."""
    tiles = [
        (f"hopper moe/{a_format}/{tile}", a_format, config)
        for a_format in ACTIVATION_FORMATS
        for tile, config in hopper_tiles(a_format).items()
    ]
    copies = fp8_tiles().items()
    tiles += [(f"hopper fp8 copy/mxfp8/{tile}", "mxfp8", config) for tile, config in copies]
    for name, a_format, config in tiles:
        make, shape = stages(a_format, config), text_of(SMALL, "tiles filled to 0.7")
        yield Variant(name, shape, make, backend="hopper", config=config)


def one_launch_variants() -> Iterator[Variant]:
    """Layers of a few tokens in one launch, small and large. fp8_token has none: a scale needs the
    whole row."""
    for a_format in (name for name in ACTIVATION_FORMATS if name != FP8_TOKEN):
        config = one_launch(a_format)
        for tokens in (1, 2, 4):
            name, shape = f"hopper one launch/{a_format}/T={tokens}", text_of(SMALL, f"T {tokens}")
            make = layer(SMALL, tokens, a_format, prepared=True)
            yield Variant(name, shape, make, backend="hopper", config=config)
            if a_format == "bf16":
                for source, choice in CHOICES.items():
                    make = layer(SMALL, tokens, a_format, prepared=True, choice=choice)
                    full_name = f"{name} {source}"
                    yield Variant(full_name, shape, make, backend="hopper", config=config)
        shape = MODEL_SHAPES["gpt-oss-20b"]
        name = f"large one launch/{a_format}/gpt-oss-20b"
        make = layer(shape, 1, a_format, prepared=True)
        yield Variant(name, text_of(shape, "T 1"), make, backend="hopper", config=config)


def weight_format_variants() -> Iterator[Variant]:
    """Every tile of the other weight formats, with activations of 16 and of 8 bits, and layers of
    two tokens in one launch."""
    for weight_format in WEIGHT_FORMATS:
        for a_format in ("bf16", "mxfp8"):
            name = f"hopper one launch/{weight_format} weights/{a_format}/T=2"
            make = layer(SMALL, 2, a_format, prepared=True, weight_format=weight_format)
            few = one_launch(a_format)
            yield Variant(name, text_of(SMALL, "T 2"), make, backend="hopper", config=few)
            for tile, config in hopper_tiles(a_format, weight_format).items():
                tokens = tokens_for(SMALL, config)
                name = f"hopper {weight_format} weights/{a_format}/{tile}"
                make = layer(SMALL, tokens, a_format, prepared=True, weight_format=weight_format)
                text = text_of(SMALL, f"T {tokens}")
                yield Variant(name, text, make, FORMAT_REPEATS, backend="hopper", config=config)


def moe_variants() -> Iterator[Variant]:
    """Every tile of the Hopper kernels and the portable kernels in every format; large layers."""
    yield from tile_variants()
    yield from one_launch_variants()
    yield from weight_format_variants()
    for a_format in ACTIVATION_FORMATS:
        for tokens in (16, 512):
            name, shape = f"triton moe/{a_format}/T={tokens}", text_of(SMALL, f"T {tokens}")
            make = layer(SMALL, tokens, a_format, prepared=False)
            yield Variant(name, shape, make, backend="triton")
    for model, tokens in (("gpt-oss-120b", 64), ("kimi-k2-tp4", 2048)):
        for a_format in ACTIVATION_FORMATS:
            name, shape = f"large layer/{a_format}/{model}", MODEL_SHAPES[model]
            make = layer(shape, tokens, a_format, prepared=True)
            text = text_of(shape, f"T {tokens}")
            yield Variant(name, text, make, LARGE_REPEATS, backend="hopper")


# --- training -----------------------------------------------------------------------------------


class Grouped:
    """Operands of a grouped layer, quantised for one mode, with groups of changing sizes."""

    def __init__(self, shape: Shape, mode: str, device: torch.device) -> None:
        self.shape, self.mode, self.device = shape, mode, device
        self.generator = torch.Generator(device).manual_seed(1)
        self.main_grad = torch.zeros(shape.G, shape.N, shape.K, device=device)
        self.offsets = torch.empty(shape.G + 1, dtype=torch.int32, device=device)
        self._draw_offsets()
        self.copies = self._quantised()

    def _values(self, *size: int) -> torch.Tensor:
        x = torch.randn(size, generator=self.generator, device=self.device)
        spread = torch.randint(-2, 3, (*size[:-1], 1), generator=self.generator, device=self.device)
        return (x * 2.0**spread).to(torch.bfloat16)

    def _draw_offsets(self) -> None:
        rows, size = self.shape.G * self.shape.rows, (self.shape.G - 1,)
        ends = torch.randint(0, rows + 1, size, generator=self.generator, device=self.device)
        self.offsets[0], self.offsets[-1] = 0, rows
        self.offsets[1:-1] = ends.sort().values

    def _quantised(self) -> tuple[Any, ...]:
        """Both copies of x, of the weights and of the gradient."""
        shape, rows = self.shape, self.shape.G * self.shape.rows
        x, weight, grad = (
            self._values(*size)
            for size in ((rows, shape.K), (shape.G, shape.N, shape.K), (rows, shape.N))
        )
        if self.mode == "bf16":
            return (x, x), (weight, weight.mT.contiguous()), (grad, grad)
        spans = recipe_of(self.mode).spans(self.device)
        return (
            mxpert.quantize_dual(x, group_offsets=self.offsets, scale_span=spans.x),
            mxpert.quantize_dual(weight, scale_span=spans.weight),
            mxpert.quantize_dual(grad, group_offsets=self.offsets, scale_span=spans.grad),
        )

    def renew(self) -> None:
        self._draw_offsets()
        copy_into(self.copies, self._quantised())

    def run(self, op: str) -> tuple[torch.Tensor, ...]:
        """One GEMM; "wgrad_accumulate" adds to a float32 gradient."""
        x, weight, grad = self.copies
        match op:
            case "forward":
                return bits(mxpert.grouped_gemm(x[0], weight[0], self.offsets))
            case "dgrad":
                return bits(mxpert.grouped_gemm(grad[0], weight[1], self.offsets))
            case "wgrad":
                return bits(mxpert.grouped_wgrad(grad[1], x[1], self.offsets))
        sums = self.main_grad.clone()
        return bits(mxpert.grouped_wgrad(grad[1], x[1], self.offsets, accumulate_into=sums))

    def config(self, op: str) -> str:
        """Backend and tile of a GEMM."""
        x, weight, grad = self.copies
        case = {
            "forward": (mxpert.grouped_gemm, x[0], weight[0]),
            "dgrad": (mxpert.grouped_gemm, grad[0], weight[1]),
        }.get(op, (mxpert.grouped_wgrad, grad[1], x[1]))
        found = mxpert.explain(*case, self.offsets).resolution
        return f"{found.kernel.backend}: {found.config}"


def grouped(shape: Shape, mode: str, op: str) -> Callable[[torch.device, bool], Hunted]:
    """One grouped GEMM."""

    def make(device: torch.device, dry: bool) -> Hunted:
        made = Grouped(TINY_GROUPED if dry else shape, mode, device)
        return Hunted(lambda: made.run(op), made.renew, made.config(op))

    return make


def dual(spans: tuple[ScaleSpan, ScaleSpan]) -> Callable[[torch.device, bool], Hunted]:
    """Both copies of an activation with groups."""

    def make(device: torch.device, dry: bool) -> Hunted:
        made = Grouped(TINY_GROUPED if dry else GROUPED, "bf16", device)
        x, options = made.copies[0][0], {"group_offsets": made.offsets, "scale_span": spans}
        found = mxpert.explain(mxpert.quantize_dual, x, **options).resolution
        run = lambda: bits(mxpert.quantize_dual(x, **options))  # noqa: E731
        return Hunted(run, made.renew, f"{found.kernel.backend}: {found.config}")

    return make


def training_variants() -> Iterator[Variant]:
    """Every mode of the grouped GEMMs and of the quantiser; large GEMMs."""
    modes = dict.fromkeys(MODES, ("forward", "dgrad", "wgrad", "wgrad_accumulate"))
    for mode, ops in (modes | {"bf16": ("forward", "dgrad")}).items():
        for op in ops:
            yield Variant(f"hopper grouped/{mode}/{op}", str(GROUPED), grouped(GROUPED, mode, op))
    for name, spans in DUAL_SPANS.items():
        yield Variant(f"hopper dual/bf16/{name}", str(GROUPED), dual(spans))
    for mode in ("auto", "exact"):
        for op in ("forward", "dgrad", "wgrad"):
            name, make = f"large grouped/{mode}/{op}", grouped(LARGE_GROUPED, mode, op)
            yield Variant(name, str(LARGE_GROUPED), make, LARGE_REPEATS // 2)


# --- routing and rows ---------------------------------------------------------------------------


def routing(
    op: str, tokens: int, experts: int, top_k: int
) -> Callable[[torch.device, bool], Hunted]:
    """The choice of experts, or the plan of such a choice."""

    def make(device: torch.device, dry: bool) -> Hunted:
        generator = torch.Generator(device).manual_seed(1)
        logits = torch.empty(5 if dry else tokens, experts, device=device)
        weights, ids = mxpert.route_topk(logits.normal_(generator=generator), top_k)

        def renew() -> None:
            copy_into((weights, ids), mxpert.route_topk(logits.normal_(generator=generator), top_k))

        def plan() -> tuple[torch.Tensor, ...]:
            made = mxpert.make_routing_plan(weights, ids, num_experts=experts, routing_block_m=32)
            sorted_rows = made.sorted_token_ids, made.sorted_weights
            return bits((*sorted_rows, made.block_expert_ids, made.num_valid, made.slot_rows))

        run = plan if op == "plan" else lambda: bits(mxpert.route_topk(logits, top_k))
        return Hunted(run, renew, "triton")

    return make


def combine(op: str, tokens: int, width: int, top_k: int) -> Callable[[torch.device, bool], Hunted]:
    """Sum of a token's rows, or its gradients."""

    def make(device: torch.device, dry: bool) -> Hunted:
        count, size = (5, 32) if dry else (tokens, width)
        generator = torch.Generator(device).manual_seed(1)
        rows = torch.empty(count * top_k, size, dtype=torch.bfloat16, device=device)
        grad, weights = rows.new_empty(count, size), torch.empty(count, top_k, device=device)
        ids = torch.randperm(count * top_k, generator=generator, device=device).view(count, top_k)

        def renew() -> None:
            for each in (rows, grad, weights):
                each.normal_(generator=generator)
            ids.copy_(torch.randperm(ids.numel(), generator=generator, device=device).view_as(ids))

        renew()

        def run() -> tuple[torch.Tensor, ...]:
            if op == "forward":
                return bits(mxpert.training.rows.op.combine_rows(rows, ids, weights))
            return bits(mxpert.training.rows.op.combine_rows_backward(grad, rows, ids, weights))

        return Hunted(run, renew, "triton")

    return make


def small_variants() -> Iterator[Variant]:
    """Routing and combining, with the plan in one program and in several kernels."""
    for op in ("topk", "plan"):
        for tokens, experts, top_k in ((1, 128, 4), (64, 384, 8), (4096, 384, 8)):
            name, shape = f"routing/{op}/T={tokens}", f"T{tokens} E{experts} k{top_k}"
            yield Variant(name, shape, routing(op, tokens, experts, top_k))
    for op in ("forward", "backward"):
        yield Variant(f"combine/{op}", "T512 k4 H704", combine(op, 512, 704, 4))


def variants() -> Sequence[Variant]:
    """All, the small problems first; names are unique."""
    found = [*small_variants(), *moe_variants(), *training_variants()]
    return sorted(found, key=lambda each: each.name.startswith("large"))

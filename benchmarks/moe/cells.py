"""What is measured: models, stages, activation formats, and the order of the cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.harness.script import parse_list, parse_tokens
from mxpert.errors import message
from mxpert.formats.names import FORMAT_OF
from mxpert.routing.op import route_topk
from mxpert.testing.problems import MODEL_SHAPES

GEMM_STAGES = ("gate_up_gemm", "down_gemm")
STAGES = (*GEMM_STAGES, "gate_up", "down", "layer")
"""`*_gemm` is the GEMM kernel with its epilogue on ready operands; gate_up and down are the whole
stage on a ready routing; layer goes from router logits and x to y."""

ACTIVATION_FORMATS = {"a16": ("bf16",), "a8": ("mxfp8", "fp8_token"), "a4": ("mxfp4",)}
"""Width of the activations → our formats of that width. Peers' a8 are "fp8_token" and "fp8_group",
e4m3 with one scale for each token or for 128 values."""

FORMATS = tuple(name for names in ACTIVATION_FORMATS.values() for name in names)
NAMES = {"bf16": "a16w4", "mxfp8": "a8w4, MXFP8", "fp8_token": "a8w4, token", "mxfp4": "a4w4"}
"""Our formats in tables of ours alone."""

WIDTHS = {"bf16": "a16", "fp8_token": "a8", "fp8_group": "a8", "mxfp8": "a8", "mxfp4": "a4"}
"""Activation as it stands in the rows → the width of the activations."""

PEER_WIDTHS = {"a16": "a16", "a8": "a8", "a4": "a8"}
"""Width of ours → width of the peers that it is compared with: no peer multiplies a4."""

ROUTINGS = ("uniform", "zipf", "hot")
DECODE_TOKENS = 256
"""Up to here a cell counts as decode."""


@dataclass(frozen=True)
class Model:
    """One MoE layer: E experts, top k, hidden size H, intermediate size F."""

    name: str
    E: int
    k: int
    H: int
    F: int

    @property
    def columns(self) -> dict[str, Any]:
        """What a row says of it."""
        return {"model": self.name, **{name: getattr(self, name) for name in "EkHF"}}


def named(*names: str) -> dict[str, Model]:
    """Models of mxpert's list of names."""
    shapes = {name: MODEL_SHAPES[name] for name in names}
    return {
        name: Model(name, each.num_experts, each.top_k, each.hidden_size, each.intermediate_size)
        for name, each in shapes.items()
    }


NAMED = named("gpt-oss-120b", "kimi-k2-tp4", "dsv3-ep8", "gpt-oss-20b", "qwen3-235b", "dsv4-flash")
"""In order of importance."""

REFERENCE = named("kimi-e385", "r1-e384")
"""Shapes that the reference systems publish; their third is gpt-oss-120b."""

MODELS = NAMED | REFERENCE
"""What is measured by default."""

RECENT = named("kimi-k3-ep8", "dsv4-pro-ep8", "dsv4.1-flash-ep8", "minimax-m3-tp4")
"""Recent models that nothing was tuned for; measured where they are asked for."""

OFFERED = MODELS | RECENT
TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096, 8192)
REFERENCE_TOKENS = (4, 16, 64, 256, 16384)
_FIRST_TOKENS = (1, 16, 128, 256, 1024, 8192)


@dataclass(frozen=True)
class Cell:
    """One model at one number of tokens under one routing."""

    model: Model
    tokens: int
    routing: str = "uniform"

    @property
    def rotations(self) -> int:
        """Routings that one replay goes through: a single small one would find its weights in L2
        and its time among launch gaps."""
        return max(1, 8 // self.tokens)

    @property
    def is_reference(self) -> bool:
        """Whether it is measured for the reference systems' sake."""
        return self.model.name in REFERENCE or self.tokens == REFERENCE_TOKENS[-1]

    def stages(self, asked: Sequence[str]) -> list[str]:
        """Those of the stages asked for that are measured; of reference cells whole stages only."""
        return [stage for stage in asked if not (self.is_reference and stage in GEMM_STAGES)]

    def __str__(self) -> str:
        return f"{self.model.name} T={self.tokens} {self.routing}"


def tokens_of(model: Model) -> tuple[int, ...]:
    """Token counts that a comparison measures of a model unless told otherwise."""
    if model.name in REFERENCE:
        return REFERENCE_TOKENS
    return (*TOKENS, REFERENCE_TOKENS[-1]) if model.name == "gpt-oss-120b" else TOKENS


def ordered_cells(
    models: Sequence[Model],
    tokens: Sequence[int] | None = None,
    routings: Sequence[str] = ("uniform",),
) -> list[Cell]:
    """The most telling cells first: named models at six token counts, the reference systems'
    shapes, the rest.

    Args:
        tokens: None takes `tokens_of` each model.

    >>> [cell.tokens for cell in ordered_cells([MODELS["dsv3-ep8"]], [1, 4, 8192])]
    [1, 8192, 4]
    """
    cells = [
        Cell(model, count, routing)
        for routing in routings
        for model in models
        for count in tokens or tokens_of(model)
    ]
    importance = {name: rank for rank, name in enumerate(OFFERED)}

    def rank(cell: Cell) -> tuple[int, ...]:
        tier = 1 if cell.is_reference else 0 if cell.tokens in _FIRST_TOKENS else 2
        model = importance.get(cell.model.name, len(importance))
        return ROUTINGS.index(cell.routing), tier, model, cell.tokens

    return sorted(cells, key=rank)


def parse_cells(models: str, tokens: str, offered: Mapping[str, Model] = NAMED) -> list[Cell]:
    """Cells of --models and --tokens, both comma-separated.

    >>> [str(cell) for cell in parse_cells("dsv3-ep8", "1,4")]
    ['dsv3-ep8 T=1 uniform', 'dsv3-ep8 T=4 uniform']
    """
    chosen = parse_list(models, list(offered), "--models")
    return [Cell(offered[name], count) for name in chosen for count in parse_tokens(tokens)]


def parse_activations(text: str) -> list[str]:
    """Our formats, from widths and from all names of formats.

    >>> parse_activations("a8, a16w4")
    ['mxfp8', 'fp8_token', 'bf16']
    """
    known = {name: (own,) for name, own in FORMAT_OF.items()} | ACTIVATION_FORMATS
    chosen = parse_list(text, list(known), "--activations")
    return list(dict.fromkeys(own for name in chosen for own in known[name]))


def tiny(model: Model) -> Model:
    """A model's top k and name with sizes that a CPU multiplies in milliseconds."""
    return replace(model, E=max(model.k, 8), H=64, F=32)


@dataclass(frozen=True)
class Inputs:
    """One batch: x bfloat16 [T, H], logits float32 [T, E]."""

    x: torch.Tensor
    logits: torch.Tensor


def mean_hit(batches: Sequence[Inputs], top_k: int) -> float:
    """Experts that a batch hits, on average."""
    ids = [route_topk(each.logits, top_k)[1] for each in batches]
    return sum(each.unique().numel() for each in ids) / len(ids)


def random_inputs(cell: Cell, device: torch.device) -> list[Inputs]:
    """One batch for each rotation, the same on every run.

    The k largest logits choose: normal logits hit all experts alike ("uniform"); "zipf" weighs
    expert e by 1 / (e + 1); "hot" sends half of the tokens to expert 0.
    """
    if cell.routing not in ROUTINGS:
        need = f"one of {ROUTINGS}"
        raise ValueError(message("random_inputs", "routing", need, repr(cell.routing)))
    model, batches = cell.model, []
    for rotation in range(cell.rotations):
        generator = torch.Generator(device).manual_seed(1000 * cell.tokens + rotation)
        x = torch.randn(cell.tokens, model.H, generator=generator, device=device)
        logits = torch.randn(cell.tokens, model.E, generator=generator, device=device)
        if cell.routing == "zipf":
            uniform = torch.rand(logits.shape, generator=generator, device=device)
            rank = torch.arange(1, model.E + 1, device=device, dtype=torch.float32)
            logits = -torch.log(rank) - torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-6)))
        elif cell.routing == "hot":
            logits[::2, 0] = 10.0  # above any normal logit
        batches.append(Inputs(x.to(torch.bfloat16), logits))
    return batches

"""Cells of ranks/run.py: a model's layer, its formats, its routing, tokens of a rank."""

from __future__ import annotations

from dataclasses import dataclass

from mxpert.cli.expert_parallel.layer import Case
from mxpert.testing.problems import MODEL_SHAPES, MoEShape, scaled_shape

MODELS = ("gpt-oss-120b", "deepseek-v3", "kimi-k2")
TOKENS = (1, 16, 128, 1024, 4096)
WIRES = {"mxfp8": "mxfp8", "bf16": "bf16"}
"""Wire format → activation format of the layer that takes such rows."""
ROUTINGS = ("uniform", "zipf")
DRY_MODEL = "tiny"
DRY_TOKENS = (1, 4)


@dataclass(frozen=True)
class Cell:
    """One case; equal on all ranks."""

    model: str
    routing: str
    wire: str
    num_tokens: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.model, self.routing, self.wire, self.num_tokens

    def case(self) -> Case:
        """What the ranks compute."""
        form = WIRES[self.wire]
        return Case(
            self.model, shape_of(self.model), self.num_tokens, self.routing, form, self.wire
        )

    def __str__(self) -> str:
        return f"{self.model} {self.routing} {self.wire} T={self.num_tokens}"


def shape_of(model: str) -> MoEShape:
    """A model's dimensions; those of a dry run are tiny."""
    if model == DRY_MODEL:
        return scaled_shape("gpt-oss-20b", hidden_size=64, intermediate_size=64, num_experts=8)
    return MODEL_SHAPES[model]


def cells_of(models: list[str], tokens: tuple[int, ...], wires: list[str]) -> list[Cell]:
    """All cells, a model after the other, the most important ones first."""
    return [
        Cell(model, routing, wire, count)
        for model in models
        for routing in ROUTINGS
        for wire in wires
        for count in tokens
    ]

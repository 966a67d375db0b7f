"""Layers that `mxpert demo` checks: those of a gpt-oss checkpoint, or random ones."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from ..core.files import short
from ..core.problem import SwiGLU
from ..errors import require
from ..integrations.checkpoints.gpt_oss import (
    DEMO_TEXT,
    collect_moe_inputs,
    demo_token_ids,
    load_transformers_oracle,
    write_demo_checkpoint,
)
from ..integrations.checkpoints.hub import local_checkpoint
from ..integrations.checkpoints.load import LoadedMoELayer, load_gpt_oss_layers
from ..integrations.checkpoints.safetensors_files import CONFIG_FILE, positive_int, read_json
from ..moe.weights import GateUpOrder
from ..routing.op import route_topk
from ..testing.problems import MoEShape, random_moe_problem
from .main import quiet_imports
from .measure import RunWeights
from .options import check_checkpoint, open_folder, reading

RANDOM_SHAPE = MoEShape(
    hidden_size=512,
    intermediate_size=512,
    num_experts=16,
    top_k=4,
    activation=SwiGLU(),
    gate_up_order=GateUpOrder.INTERLEAVED,
    has_bias=True,
)
"""The random layers: gpt-oss, scaled down."""
WITHOUT_TRANSFORMERS = (
    "Transformers is not installed: random layers, compared with a loop over "
    "experts in torch.\npip install transformers runs a whole model instead."
)


@dataclass(frozen=True)
class DemoLayer:
    """One layer with what flows into it and what another implementation makes of it."""

    layer: LoadedMoELayer
    weights: RunWeights
    hidden: torch.Tensor
    oracle: torch.Tensor

    def rows(self, num_tokens: int) -> torch.Tensor:
        """The first tokens' hidden states as the layer takes them."""
        return self.hidden[:num_tokens].to(torch.bfloat16).contiguous()


def text_token_ids(checkpoint: Path, count: int) -> torch.Tensor:
    """Real text as token ids [count]: by the checkpoint's tokenizer, else as bytes."""
    if not (checkpoint / "tokenizer.json").is_file():
        return demo_token_ids(count)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    ids = tokenizer(DEMO_TEXT)["input_ids"]
    return torch.tensor((ids * (count // len(ids) + 1))[:count])


def route(case: DemoLayer, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_weights, topk_ids of the first tokens, by the checkpoint's router."""
    layer = case.layer
    logits = torch.nn.functional.linear(
        case.hidden[:num_tokens].float(), layer.router_weight.float(), layer.router_bias.float()
    )
    return route_topk(logits, top_k=layer.top_k)


@dataclass(frozen=True)
class CheckpointLayers:
    """Layers of a gpt-oss checkpoint, beside Transformers' MoE output."""

    checkpoint: Path
    oracle = "transformers"
    first_step = "; loading the model"

    def default(self) -> list[int]:
        """The first layer and the last."""
        path = self.checkpoint / CONFIG_FILE
        config = read_json(path, "demo")
        return sorted({0, positive_int(config, ["num_hidden_layers"], path, "demo") - 1})

    def cases(
        self, layers: list[int], num_tokens: int, device: torch.device
    ) -> Iterator[DemoLayer]:
        """The layers, each with hidden states that reach it."""
        loaded = load_gpt_oss_layers(self.checkpoint, layers, device)
        with reading(self.checkpoint, "demo"), quiet_imports():
            oracle = load_transformers_oracle(self.checkpoint, num_layers=max(layers) + 1)
            token_ids = text_token_ids(self.checkpoint, num_tokens)
        for layer in loaded:
            capture = collect_moe_inputs(oracle, token_ids, layer.layer)
            yield DemoLayer(
                layer,
                RunWeights.of(layer.weights, device),
                capture.hidden.to(device),
                capture.output.to(device),
            )


@dataclass(frozen=True)
class RandomLayers:
    """Layers with random weights, router and hidden states, beside a loop over experts in torch."""

    checkpoint = None
    oracle = "torch"
    first_step = ""

    def default(self) -> list[int]:
        """Two layers."""
        return [0, 1]

    def cases(
        self, layers: list[int], num_tokens: int, device: torch.device
    ) -> Iterator[DemoLayer]:
        """The layers; a layer's number is its seed."""
        shape = RANDOM_SHAPE
        for number in layers:
            problem = random_moe_problem(shape, num_tokens, seed=number)
            draw = torch.Generator().manual_seed(number)
            # Logits of standard deviation 2 route decisively.
            router = torch.randn(shape.num_experts, shape.hidden_size, generator=draw)
            layer = LoadedMoELayer(
                number,
                problem.weights,
                2 / math.sqrt(shape.hidden_size) * router,
                torch.randn(shape.num_experts, generator=draw) / 10,
                shape.top_k,
                shape.activation,
            )
            oracle = loop_over_experts(layer, problem.x)
            layer = replace(
                layer,
                weights=layer.weights.to(device),
                router_weight=layer.router_weight.to(device),
                router_bias=layer.router_bias.to(device),
            )
            yield DemoLayer(
                layer, RunWeights.of(layer.weights, device), problem.x.to(device), oracle.to(device)
            )


def has_transformers() -> bool:
    """Whether Transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def open_layers(
    checkpoint: Path | None, output: Path, console: Console
) -> CheckpointLayers | RandomLayers:
    """Layers of `checkpoint`, or of a small checkpoint that is written to `output`.

    Without a checkpoint and without Transformers, random layers.
    """
    if checkpoint is not None:
        checkpoint = local_checkpoint(checkpoint, "demo")
        check_checkpoint(checkpoint, "demo")
        config = read_json(checkpoint / CONFIG_FILE, "demo")
        require(
            config.get("model_type") == "gpt_oss",
            "demo",
            f"{checkpoint / CONFIG_FILE}: model_type",
            need="gpt_oss",
            got=short(config.get("model_type")),
            remedy="`mxpert eval` compares formats on other MoE checkpoints",
        )
    open_folder(output, "demo", "--output")
    if checkpoint is not None:
        return CheckpointLayers(checkpoint)
    if not has_transformers():
        console.print(WITHOUT_TRANSFORMERS, highlight=False)
        return RandomLayers()
    checkpoint = output / "checkpoint"
    if not (checkpoint / CONFIG_FILE).is_file():
        with quiet_imports():
            write_demo_checkpoint(checkpoint)
        console.print(f"wrote {checkpoint}", markup=False, highlight=False)
    check_checkpoint(checkpoint, "demo")
    return CheckpointLayers(checkpoint)


def loop_over_experts(layer: LoadedMoELayer, hidden: torch.Tensor) -> torch.Tensor:
    """A gpt-oss MoE layer in plain torch, float64 [T, H]; hidden is [T, H], biases are needed."""
    weights, act = layer.weights, layer.activation
    assert isinstance(act, SwiGLU)  # for the type checker: RANDOM_SHAPE's
    assert weights.gate_up_bias is not None  # for the type checker: RANDOM_SHAPE has biases
    assert weights.down_bias is not None  # for the type checker: RANDOM_SHAPE has biases
    logits = torch.nn.functional.linear(hidden.float(), layer.router_weight, layer.router_bias)
    chosen, ids = logits.topk(layer.top_k)
    shares = chosen.double().softmax(-1)
    gate_up, down = weights.dequantize(torch.float64)
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        both = hidden[token].double() @ gate_up[expert].T + weights.gate_up_bias[expert]
        gate, up = both[:, 0::2].clamp(max=act.limit), both[:, 1::2].clamp(-act.limit, act.limit)
        inner = gate * torch.sigmoid(act.alpha * gate) * (up + 1)
        rows = inner @ down[expert].T + weights.down_bias[expert]
        out.index_add_(0, token, shares[token, slot, None] * rows)
    return out

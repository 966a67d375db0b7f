"""gpt-oss with transformers: write a small checkpoint in the published layout, and load one.

A checkpoint that transformers loads defines what its MoE layers compute.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ...core.files import is_file, partial_name
from ...errors import Checks, UnsupportedError, message, require, require_tensor
from ...formats.codec import quantize_blocks
from ...formats.spec import MX_BLOCK_SIZE, MXFP4, ScaleRule
from ...moe.weights import GateUpOrder, MoEWeights
from ..models.saved_config import GPT_OSS_UNCONVERTED
from ..module_paths import layer_number
from ..transformers_versions import INSTALL
from .hub import local_checkpoint
from .load import GPT_OSS_LIMIT, save_gpt_oss_layer_tensors
from .published_experts import stored_gate_up_order
from .safetensors_files import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointReader,
    write_json,
    write_tensors,
)

if TYPE_CHECKING:
    from transformers import GptOssForCausalLM

_Tensors = tuple[torch.Tensor, ...]

DEMO_VOCABULARY = 256
"""Token ids of the demo model are bytes, so it needs no tokenizer."""

DEMO_TEXT = (
    "A mixture-of-experts layer asks one small question for every token that passes: who should "
    "look at this? A router scores a shelf of specialists, the best few are called, and the others "
    "stay asleep in memory. That is why such a model can be large and still answer quickly. The "
    "price is paid in bytes. Each token may wake different experts, so the weights of many of them "
    "travel from memory to the arithmetic units for the sake of a handful of rows, and the journey "
    "takes longer than the sums at its end. Microscaling formats shorten the journey. They keep "
    "four bits per weight and one shared power of two for every thirty-two neighbours: a small "
    "ruler, chosen afresh for each short stretch of a row. The ruler is coarse, yet never far "
    "from the size of the numbers that it measures. 17 words, 4 bits, 32 neighbours, 1 scale: the "
    "bookkeeping is simple enough to check by hand, and this page exists to be checked. If two "
    "programs read the same bytes and disagree about what they mean, at least one is wrong, and "
    "a good test names the one. So here is some ordinary text, a few digits (0123456789), a little "
    "punctuation, and an invitation: compare, and trust nothing else.\n"
)


@dataclass(frozen=True)
class MoECapture:
    """Input, routing and output of one MoE layer while a model ran.

    Args:
        hidden: [T, H], the hidden states that entered the MoE module.
        output: [T, H], what the module returned for them.
        topk_weights: [T, top_k], its router's weights. topk_ids: int64 [T, top_k], its choice.
    """

    hidden: torch.Tensor
    output: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def write_demo_checkpoint(
    directory: Path | str,
    *,
    hidden_size: int = 512,
    intermediate_size: int = 512,
    num_experts: int = 16,
    top_k: int = 4,
    num_layers: int = 2,
    seed: int = 0,
    sharded: bool = True,
) -> Path:
    """Write a scaled-down gpt-oss with random weights, in the layout of the published checkpoints.

    The model is transformers' GptOssForCausalLM; its vocabulary is the 256 bytes. Expert weights
    are normal times a log-normal factor per row (sigma 0.75 binades) and per block of 32 (sigma 1
    binade), so their scales spread over about ten binades. They are quantised to MXFP4 (RCEIL) and
    saved as blocks, scales and bf16 biases. The same arguments give the same bytes.

    Args:
        directory: absent or empty. After an error it is as before.
        hidden_size, intermediate_size: H and F, multiples of 32 (H of 64, the head size).
        num_experts, top_k, num_layers: sizes of the model.
        seed: of all random weights.
        sharded: one file per layer with an index, or a single ``model.safetensors``.

    Returns:
        `directory` as a Path.

    Raises:
        ValueError: sizes that do not fit, or a directory that is not empty.
        UnsupportedError: transformers is not installed.
    """
    op, directory = "write_demo_checkpoint", Path(directory)
    need = Checks(op)
    for name, size, unit in (
        ("hidden_size", hidden_size, 64),
        ("intermediate_size", intermediate_size, MX_BLOCK_SIZE),
        ("num_experts", num_experts, 1),
        ("num_layers", num_layers, 1),
    ):
        need(size > 0 and size % unit == 0, name, f"a positive multiple of {unit}", size)
    need(0 < top_k <= num_experts, "top_k", f"1 to {num_experts}", top_k)
    need(
        not directory.exists() or (directory.is_dir() and not any(directory.iterdir())),
        str(directory),
        "an absent or empty directory",
        "files in it",
        "name another directory",
    )
    heads = hidden_size // 64
    model = _random_model(
        op,
        seed,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        num_attention_heads=heads,
        num_key_value_heads=math.gcd(heads, 8),
    )
    tensors = _published_tensors(model, torch.Generator().manual_seed(seed))
    partial = partial_name(directory)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _save(tensors, partial, sharded=sharded)
        method = {"quant_method": "mxfp4", "modules_to_not_convert": GPT_OSS_UNCONVERTED}
        write_json(partial / CONFIG_FILE, model.config.to_dict() | {"quantization_config": method})
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return directory


def _random_model(op: str, seed: int, **sizes: int) -> GptOssForCausalLM:
    """Transformers' GptOssForCausalLM with random weights; `sizes` are those of its config."""
    transformers = _transformers(op)
    config = transformers.GptOssConfig(
        **sizes,
        vocab_size=DEMO_VOCABULARY,
        head_dim=64,
        swiglu_limit=GPT_OSS_LIMIT,
        dtype="bfloat16",
        architectures=["GptOssForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.GptOssForCausalLM(config)


def load_transformers_oracle(
    directory: Path | str, *, dtype: torch.dtype = torch.float32, num_layers: int | None = None
) -> GptOssForCausalLM:
    """Load a gpt-oss MXFP4 checkpoint with transformers, experts dequantised by transformers.

    Args:
        directory: a published checkpoint or one of ours, or the id of one on the Hub.
        dtype: of parameters and arithmetic; dequantised weights are exact in bfloat16.
        num_layers: load only this many decoder layers; None is all.

    Returns:
        ``transformers.GptOssForCausalLM`` on the CPU, in evaluation mode, with the plain loop over
        experts ("eager").

    Raises:
        ValueError: no directory, a missing or damaged file in it, or more layers than there are.
        UnsupportedError: transformers is not installed.
    """
    need = Checks("load_transformers_oracle")
    directory = local_checkpoint(directory, need.op)
    need(
        is_file(directory / CONFIG_FILE),
        str(directory),
        f"a checkpoint directory with {CONFIG_FILE}",
        "none",
    )
    reader = CheckpointReader(directory, need.op)
    stored_gate_up_order(reader.config(), directory / CONFIG_FILE, need.op)
    reader.check_files()
    transformers = _transformers(need.op)
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    if num_layers is not None:
        need(
            0 < num_layers <= config.num_hidden_layers,
            "num_layers",
            f"1 to {config.num_hidden_layers}",
            num_layers,
        )
        config.num_hidden_layers = num_layers
        config.layer_types = config.layer_types[:num_layers]
    with _quiet(transformers):
        model, info = transformers.GptOssForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            experts_implementation="eager",
            output_loading_info=True,
            quantization_config=transformers.Mxfp4Config(dequantize=True),
        )
    absent = sorted({*info["missing_keys"], *info["mismatched_keys"]}, key=str)
    need(
        not absent,
        str(directory),
        "every tensor of the model",
        f"{len(absent)} missing or mis-shaped, for example {absent and absent[0]}",
        "transformers would fill them with random numbers",
    )
    return model.to(dtype).eval()


def demo_token_ids(num_tokens: int) -> torch.Tensor:
    """Bytes of `DEMO_TEXT`, repeated as often as needed: int64 [num_tokens].

    Example:
        >>> bytes(demo_token_ids(9).tolist()).decode()
        'A mixture'
    """
    require(num_tokens > 0, "demo_token_ids", "num_tokens", need="at least 1", got=num_tokens)
    text = torch.tensor(list(DEMO_TEXT.encode("utf-8")), dtype=torch.int64)
    return text.repeat(-(-num_tokens // len(text)))[:num_tokens]


def collect_moe_inputs(model: GptOssForCausalLM, token_ids: torch.Tensor, layer: int) -> MoECapture:
    """Run a gpt-oss model over tokens and record one MoE layer's input, routing and output.

    Args:
        model: from `load_transformers_oracle`.
        token_ids: int64 [T], one sequence, or [B, S].
        layer: decoder layer index.

    Returns:
        MoECapture, rows in the order of `token_ids`, in the model's dtype.

    Raises:
        TypeError, ValueError: token ids that are no int64 tensor of this vocabulary, or no such
            layer.
    """
    op, layers = "collect_moe_inputs", model.model.layers
    require_tensor(token_ids, op, "token_ids", dtype=torch.int64)
    require(
        token_ids.dim() in (1, 2) and token_ids.numel() > 0,
        op,
        "token_ids.shape",
        need="[T] or [B, S], not empty",
        got=list(token_ids.shape),
    )
    vocabulary, low, high = model.config.vocab_size, int(token_ids.min()), int(token_ids.max())
    require(
        low >= 0 and high < vocabulary,
        op,
        "token_ids",
        need=f"ids from 0 to {vocabulary - 1}",
        got=f"{low} to {high}",
    )
    require(0 <= layer < len(layers), op, "layer", need=f"0 to {len(layers) - 1}", got=layer)
    seen: dict[str, torch.Tensor] = {}

    def on_moe(module: torch.nn.Module, arguments: _Tensors, result: _Tensors) -> None:
        seen["hidden"], seen["output"] = arguments[0].flatten(0, -2), result[0].flatten(0, -2)

    def on_router(module: torch.nn.Module, arguments: _Tensors, result: _Tensors) -> None:
        _, seen["topk_weights"], seen["topk_ids"] = result

    moe = layers[layer].mlp
    handles = [moe.register_forward_hook(on_moe), moe.router.register_forward_hook(on_router)]
    try:
        with torch.no_grad():
            model.model(token_ids.reshape(-1, token_ids.shape[-1]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return MoECapture(**{name: tensor.detach().clone() for name, tensor in seen.items()})


def _published_tensors(
    model: GptOssForCausalLM, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The model's tensors in bf16 under their published names, experts in MXFP4."""
    tensors: dict[str, torch.Tensor] = {}
    experts: dict[str, torch.Tensor] = {}

    def normal(like: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator) * std

    for name, initial in model.state_dict().items():
        value = initial
        if name.endswith(".experts.gate_up_proj"):
            value = _spread(initial.transpose(1, 2).shape, 1.0, generator)
        elif name.endswith(".experts.down_proj"):
            value = _spread(initial.transpose(1, 2).shape, 0.5, generator)
        elif name.endswith("embed_tokens.weight"):  # tokens differ enough to be routed apart
            value = normal(initial, 1.0)
        elif name.endswith("router.weight"):  # logits of standard deviation 2
            value = normal(initial, 2 / math.sqrt(initial.shape[-1]))
        elif name.endswith("norm.weight"):
            value = torch.exp(normal(initial, 0.3))
        elif name.endswith((".bias", "_bias", ".sinks")):
            value = normal(initial, 0.1)
        value = value.to(torch.bfloat16).contiguous()
        if ".experts." in name:
            experts[name] = value
        else:
            tensors[name] = value
    for layer in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up, down = (
            quantize_blocks(experts[f"{prefix}.{projection}"], MXFP4, rule=ScaleRule.RCEIL)
            for projection in ("gate_up_proj", "down_proj")
        )
        gate_up_bias, down_bias = (
            experts[f"{prefix}.{projection}_bias"].float()
            for projection in ("gate_up_proj", "down_proj")
        )
        tensors |= save_gpt_oss_layer_tensors(
            layer,
            MoEWeights(
                gate_up, down, gate_up_bias, down_bias, gate_up_order=GateUpOrder.INTERLEAVED
            ),
        )
    return tensors


def _spread(shape: torch.Size, gain: float, generator: torch.Generator) -> torch.Tensor:
    """Random weights [E, N, K], standard deviation about gain / sqrt(K), scales widely spread."""
    experts, rows, columns = shape
    row = 0.75 * torch.randn(experts, rows, 1, 1, generator=generator)
    block = torch.randn(experts, rows, columns // MX_BLOCK_SIZE, 1, generator=generator)
    values = torch.randn(*block.shape[:-1], MX_BLOCK_SIZE, generator=generator)
    return (values * torch.exp2(row + block) * gain / math.sqrt(columns)).flatten(-2)


def _save(tensors: dict[str, torch.Tensor], directory: Path, *, sharded: bool) -> None:
    """Write the tensors as one file, or as one file per layer and one for the rest."""
    if not sharded:
        write_tensors(directory / SINGLE_FILE, tensors)
        return
    groups: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(layer_number(name), {})[name] = tensor
    weight_map = {}
    for position, layer in enumerate(sorted(groups), start=1):
        file = f"model-{position:05d}-of-{len(groups):05d}.safetensors"
        write_tensors(directory / file, groups[layer])
        weight_map.update(dict.fromkeys(groups[layer], file))
    write_json(
        directory / INDEX_FILE,
        {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": weight_map,
        },
    )


def _transformers(op: str) -> ModuleType:
    """The transformers module, an optional dependency."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedError(
            message(op, "transformers", "the package", error, INSTALL)
        ) from error


@contextlib.contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Hide transformers' progress bars and notices while it loads."""
    log = transformers.utils.logging
    bars, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()

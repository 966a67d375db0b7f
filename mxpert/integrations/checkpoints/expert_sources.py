"""Experts of unquantised MoE checkpoints, found by name, checked, and read one by one.

Four namings exist: one matrix per expert as ``w1`` (gate), ``w3`` (up), ``w2`` (down), as Mixtral
publishes; the same as ``gate_proj``, ``up_proj``, ``down_proj`` (Qwen-MoE, DeepSeek and most
others); stacked ``experts.gate_up_proj``, ``experts.down_proj`` (transformers 5, gpt-oss); and the
same as ``input_linear``, ``output_linear`` (GraniteMoe). Models of `WITHOUT_GATE` have no gate
matrices, and stacked ``experts.up_proj``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.files import is_file
from ...errors import Checks, UnsupportedError, message, require
from ...formats.spec import MX_BLOCK_SIZE
from ...moe.published_tensors import published_projections
from ...moe.weights import GateUpOrder
from ...moe.weights_state import PROJECTIONS
from ..module_paths import module_order
from .safetensors_files import CONFIG_FILE, CheckpointReader, TensorInfo, quantization_method
from .stated_quantization import config_parts

SOURCE_DTYPES = ("BF16", "F16", "F32")

PARTS = {
    "w1": "gate",
    "gate_proj": "gate",
    "w3": "up",
    "up_proj": "up",
    "w2": "down",
    "down_proj": "down",
}
"""Part of an expert by the name of its matrix."""
_EXPERT = re.compile(r"^(?P<experts>(?:.*\.)?experts)\.(?P<tail>.+)$")
_GRANITE = re.compile(
    r"^(?P<block>(?:.*\.)?block_sparse_moe)\.(?P<part>input_linear|output_linear)\.weight$"
)
_GRANITE_PARTS = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
_MATRIX = re.compile(r"^(?P<expert>\d{1,9})\.(?P<part>w[123]|(?:gate|up|down)_proj)\.weight$")

STACKED_ORDERS = {"gpt_oss": GateUpOrder.INTERLEAVED} | dict.fromkeys(
    (
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5_moe",
        "gemma4",
        "gemma4_text",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "kimi_linear",
        "minimax",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
    ),
    GateUpOrder.CONCATENATED,
)
"""Gate/up order of stacked ``gate_up_proj`` by model_type, from transformers' model classes.

Tensor names do not show the order. For other model types the converter is asked, which recognises
it in Transformers' class."""

WITHOUT_GATE = ("nemotron_h",)
"""Model types whose experts have no gate. Names alone would not tell them from an incomplete
checkpoint."""

OrderOf = Callable[[], GateUpOrder | None]
"""Gives the gate/up order of a model's stacked experts; None if nobody knows it."""


@dataclass(frozen=True)
class ExpertSource:
    """The experts of one layer of an unquantised checkpoint.

    Args:
        prefix: full module path, ``model.layers.3.mlp.experts``.
        num_experts, hidden_size, intermediate_size: E, H, F.
        tensors: names of the weights that quantisation replaces.
        biases: names of bias tensors below the prefix; the gate/up one has its rows interleaved.
        parts: for one matrix per expert: name by (expert, "gate" | "up" | "down"); else empty.
        order: gate/up order of the stacked tensor; None where experts have no gate.
        transposed: the stacked tensors are [E, K, N] (gpt-oss) instead of [E, N, K].
        source_bytes: bytes of `tensors`.
    """

    prefix: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    tensors: tuple[str, ...]
    biases: tuple[str, ...]
    parts: dict[tuple[int, str], str]
    order: GateUpOrder | None
    transposed: bool
    source_bytes: int

    @property
    def projections(self) -> tuple[str, str]:
        """Names of the two projections that are written."""
        return published_projections(self.order is not None)

    def shape(self, projection: str) -> tuple[int, int, int]:
        """[E, N, K] of a projection."""
        if projection == "gate_up_proj":
            return self.num_experts, 2 * self.intermediate_size, self.hidden_size
        if projection == "up_proj":
            return self.num_experts, self.intermediate_size, self.hidden_size
        return self.num_experts, self.hidden_size, self.intermediate_size

    @property
    def numel(self) -> int:
        """Number of weights of both projections."""
        return sum(math.prod(self.shape(projection)) for projection in self.projections)

    def read(self, reader: CheckpointReader, projection: str, expert: int) -> torch.Tensor:
        """One expert's projection [N, K], gate and up rows INTERLEAVED, in the source's dtype."""
        if self.parts:
            if projection == "down_proj":
                return reader.read(self.parts[expert, "down"])
            if self.order is None:
                return reader.read(self.parts[expert, "up"])
            gate = reader.read(self.parts[expert, "gate"])
            up = reader.read(self.parts[expert, "up"])
            return torch.stack((gate, up), dim=1).flatten(0, 1)
        matrix = reader.read_row(self.tensors[self.projections.index(projection)], expert)
        if self.transposed:
            matrix = matrix.T
        return self._interleave(matrix) if projection == "gate_up_proj" else matrix.contiguous()

    def read_bias(self, reader: CheckpointReader, name: str) -> torch.Tensor:
        """A bias tensor [E, N], the gate/up one with its rows interleaved."""
        bias = reader.read(name)
        if not name.endswith("gate_up_proj_bias"):
            return bias
        return self._interleave(bias.T).T.contiguous()

    def _interleave(self, rows: torch.Tensor) -> torch.Tensor:
        if self.order is GateUpOrder.INTERLEAVED:
            return rows.contiguous()
        gate, up = rows.chunk(2)
        return torch.stack((gate, up), dim=1).flatten(0, 1)


def find_expert_sources(
    reader: CheckpointReader, config: dict[str, Any], order_of: OrderOf = lambda: None
) -> list[ExpertSource]:
    """Find and check the experts of every MoE layer; reads headers only.

    Args:
        reader: an unquantised checkpoint.
        config: its ``config.json``.
        order_of: gives the gate/up order of stacked experts of a model that STACKED_ORDERS lacks.

    Returns:
        One ExpertSource per experts module, in the order of their paths.

    Raises:
        ValueError: no experts, quantised weights, missing experts or parts, shapes that do not fit
            each other or MX blocks. UnsupportedError: stacked experts of an unknown model type, or
            other tensors among the experts.
    """
    op, where = reader.op, reader.directory / CONFIG_FILE
    require(
        config.get("quantization_config") is None,
        op,
        f"{where}: quantization_config",
        need="an unquantised (bf16, fp16 or fp32) checkpoint",
        got=quantization_method(config),
        remedy="dequantise it to bf16 first",
    )
    groups: dict[str, dict[str, str]] = {}
    for name in reader.names:
        if match := _EXPERT.match(name):
            groups.setdefault(match["experts"], {})[match["tail"]] = name
        elif match := _GRANITE.match(name):
            part = _GRANITE_PARTS[match["part"]]
            groups.setdefault(f"{match['block']}.experts", {})[part] = name
    require(
        bool(groups),
        op,
        str(reader.path),
        need="MoE experts (*.experts.N.w1|gate_proj…weight or *.experts.gate_up_proj)",
        got="none",
        remedy="mxpert quantises the experts of MoE models; this one is dense",
    )
    layers = [
        _stacked(reader, config, prefix, names, order_of)
        if {*PROJECTIONS, "up_proj"} & set(names)
        else _per_expert(reader, config, prefix, list(names))
        for prefix, names in groups.items()
    ]
    return sorted(layers, key=lambda found: module_order(found.prefix))


def _per_expert(
    reader: CheckpointReader, config: dict[str, Any], prefix: str, tails: list[str]
) -> ExpertSource:
    op = reader.op
    parts: dict[tuple[int, str], str] = {}
    for tail in tails:
        match = _MATRIX.match(tail)
        if match is None:
            raise UnsupportedError(
                message(
                    op,
                    f"{prefix}.{tail}",
                    "experts made of gate, up and down weights alone",
                    "another tensor among them",
                    "merge or drop it first",
                )
            )
        parts[int(match["expert"]), PARTS[match["part"]]] = f"{prefix}.{tail}"
    experts = stated_experts(config, default=1 + max(expert for expert, _ in parts))
    has_gate = states_gate(config)
    kinds = ("gate", "up", "down") if has_gate else ("up", "down")
    for expert in range(experts):
        for part in kinds:
            require(
                (expert, part) in parts,
                op,
                f"{reader.path}: {prefix}.{expert}",
                need=f"a {part} projection for each of {experts} experts",
                got="none",
                remedy="the checkpoint is incomplete: download it again",
            )
    where, count = f"{reader.path}: {prefix}", len(kinds) * experts
    need, remedy = (
        f"{len(kinds)} matrices for each of {experts} experts",
        "config and tensors differ",
    )
    require(len(parts) == count, op, where, need=need, got=len(parts), remedy=remedy)
    gate = _float_matrix(reader, parts[0, kinds[0]], dims=2)
    intermediate, hidden = gate.shape
    check_blocks(op, gate, hidden, intermediate)
    total = 0
    for (_, part), name in parts.items():
        shape = (hidden, intermediate) if part == "down" else (intermediate, hidden)
        total += reader.require(
            name, dtypes=SOURCE_DTYPES, shape=shape, remedy=f"{gate.name} is {list(gate.shape)}"
        ).nbytes
    check_hidden(reader, config, hidden, gate)
    return ExpertSource(
        prefix,
        experts,
        hidden,
        intermediate,
        tuple(parts.values()),
        (),
        parts,
        GateUpOrder.CONCATENATED if has_gate else None,
        False,
        total,
    )


def _stacked(
    reader: CheckpointReader,
    config: dict[str, Any],
    prefix: str,
    names: dict[str, str],
    order_of: OrderOf,
) -> ExpertSource:
    op, need = reader.op, Checks(reader.op)
    has_gate = states_gate(config)
    projections = published_projections(has_gate)
    biases = tuple(names[f"{p}_bias"] for p in projections if f"{p}_bias" in names)
    known = {*projections, *(f"{p}_bias" for p in projections)}
    unknown = sorted(set(names) - known)
    if unknown:
        argument, want = f"{prefix}.{unknown[0]}", f"experts made of {sorted(known)}"
        remedy = "merge or drop it first"
        raise UnsupportedError(message(op, argument, want, "another tensor", remedy))
    order = _stacked_order(reader, config, order_of) if has_gate else None
    gate_up, down = (
        _float_matrix(reader, names.get(p, f"{prefix}.{p}"), dims=3) for p in projections
    )
    # [E, 2F, H] with [E, H, F], or both transposed. Because of the factor 2 one case alone fits.
    experts, hidden, intermediate = down.shape
    transposed = has_gate and gate_up.shape == (experts, intermediate, 2 * hidden)
    if transposed:
        hidden, intermediate = intermediate, hidden
    argument, got = f"{gate_up.file}: {gate_up.name}.shape", list(gate_up.shape)
    rows = intermediate * (2 if has_gate else 1)
    fits = transposed or gate_up.shape == (experts, rows, hidden)
    shapes = "[E, 2F, H] or [E, H, 2F]" if has_gate else "[E, F, H]"
    need(fits, argument, f"{shapes} that fits down_proj {list(down.shape)}", got)
    check_blocks(op, gate_up, hidden, intermediate)
    check_hidden(reader, config, hidden, gate_up)
    stated = stated_experts(config, default=experts)
    need(stated == experts, argument, f"{stated} experts, as {CONFIG_FILE} states", got)
    for bias in biases:
        shape = experts, hidden if bias.endswith("down_proj_bias") else rows
        remedy = "one bias per row of the projection"
        reader.require(bias, dtypes=SOURCE_DTYPES, shape=shape, remedy=remedy)
    return ExpertSource(
        prefix,
        experts,
        hidden,
        intermediate,
        (gate_up.name, down.name),
        biases,
        {},
        order,
        transposed,
        gate_up.nbytes + down.nbytes,
    )


def _stacked_order(
    reader: CheckpointReader, config: dict[str, Any], order_of: OrderOf
) -> GateUpOrder:
    """The gate/up order of stacked experts, which tensors do not show."""
    kinds = _model_types(config)
    orders = [STACKED_ORDERS[kind] for kind in kinds if kind in STACKED_ORDERS]
    order = orders[0] if orders else order_of()
    if order is not None:
        return order
    argument = f"{reader.directory / CONFIG_FILE}: model_type"
    want = f"one of {sorted(STACKED_ORDERS)} where gate and up are stacked"
    remedy = "save it with one matrix per expert (transformers: save_original_format=True)"
    text = message(reader.op, argument, want, " / ".join(kinds) or "none", remedy)
    raise UnsupportedError(text)


def _float_matrix(reader: CheckpointReader, name: str, *, dims: int) -> TensorInfo:
    info = reader.info(name)
    require(
        info.dtype in SOURCE_DTYPES,
        reader.op,
        f"{info.file}: {name}.dtype",
        need=" or ".join(SOURCE_DTYPES),
        got=info.dtype,
        remedy="dequantise it to bf16 first",
    )
    require(
        len(info.shape) == dims and 0 not in info.shape,
        reader.op,
        f"{info.file}: {name}.shape",
        need=f"{dims} dimensions, none empty",
        got=list(info.shape),
    )
    return info


def check_blocks(op: str, info: TensorInfo, hidden: int, intermediate: int) -> None:
    """Raise ValueError for sizes that are no whole blocks."""
    for what, size in (("hidden_size", hidden), ("intermediate_size", intermediate)):
        require(
            size % MX_BLOCK_SIZE == 0,
            op,
            f"{info.file}: {info.name}.shape",
            need=f"{what} a multiple of {MX_BLOCK_SIZE} (one scale per block)",
            got=list(info.shape),
            remedy="there are no partial blocks; pad the model first",
        )


def _model_types(config: Mapping[str, Any]) -> list[str]:
    return [str(part["model_type"]) for part in config_parts(config) if part.get("model_type")]


def states_gate(config: Mapping[str, Any]) -> bool:
    """Whether the experts of a config's model have a gate."""
    return not {*_model_types(config)} & {*WITHOUT_GATE}


def stated_experts(config: Mapping[str, Any], default: int) -> int:
    """The number of routed experts that a config states."""
    for part in config_parts(config):
        for key in ("num_local_experts", "num_experts", "n_routed_experts"):
            if type(part.get(key)) is int:
                return int(part[key])
    return default


def check_hidden(
    reader: CheckpointReader, config: Mapping[str, Any], hidden: int, info: TensorInfo
) -> None:
    """Raise ValueError where a config states another hidden size than a tensor has."""
    stated = [
        part[key]
        for part in config_parts(config)
        for key in ("hidden_size", "moe_latent_size")  # Nemotron-H may narrow its experts' input
        if type(part.get(key)) is int
    ]
    require(
        not stated or hidden in stated,
        reader.op,
        f"{info.file}: {info.name}.shape",
        need=f"hidden_size {stated and stated[0]}, as {reader.directory / CONFIG_FILE} states",
        got=list(info.shape),
        remedy="config and tensors belong to different models",
    )


def source_directory_files(directory: Path) -> list[Path]:
    """Tokenizer, template and other small files, which are copied unchanged."""
    weights = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
    return sorted(
        path
        for path in directory.iterdir()
        if is_file(path)
        and path.suffix not in weights
        and path.name != CONFIG_FILE
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
    )

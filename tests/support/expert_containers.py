"""Tiny checkpoints in every container of quantised experts, written by formula.

Names, dtypes and shapes are those of published checkpoints. What is written uses none of mxpert's
codecs: the values that a reader must find come from the table of E2M1 and powers of two.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import mxpert
from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.moe.weights import GateUpOrder, MoEWeights
from mxpert.testing.numerics import assert_exact

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
"""OCP MX 1.0, table of E2M1; codes 8 to 15 are the same with a sign."""

HIDDEN, INTERMEDIATE, EXPERTS = 64, 96, 4
MATRIX_SIZES = {
    "gate": (INTERMEDIATE, HIDDEN),
    "up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
"""[N, K]."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Matrix:
    """MXFP4 by meaning: codes 0 to 15 [N, K], exponents of the blocks of 32 [N, K/32]."""

    codes: torch.Tensor
    exponents: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """float64 [N, K], exact."""
        sign = torch.where(self.codes > 7, -1.0, 1.0).to(torch.float64)
        scale = torch.exp2(self.exponents.to(torch.float64)).repeat_interleave(32, dim=1)
        return E2M1[self.codes & 7] * sign * scale

    @property
    def packed(self) -> torch.Tensor:
        """uint8 [N, K/2]: the low nibble is the even k."""
        return (self.codes[:, ::2] | self.codes[:, 1::2] << 4).to(torch.uint8)

    @property
    def e8m0(self) -> torch.Tensor:
        """uint8 [N, K/32]."""
        return (self.exponents + 127).to(torch.uint8)


def random_matrix(generator: torch.Generator, rows: int, columns: int) -> Matrix:
    """Random codes, and exponents that no two neighbours need share."""
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    return Matrix(codes, torch.randint(-7, 0, (rows, columns // 32), generator=generator))


def _nvfp4_scale(matrix: Matrix, factor: float) -> torch.Tensor:
    """e4m3 [N, K/16]: the scale of each half, times `factor`."""
    scale = torch.exp2(matrix.exponents.float()).repeat_interleave(2, dim=1) * factor
    stored = scale.to(torch.float8_e4m3fn)
    assert torch.equal(stored.float(), scale), "e4m3 holds these scales"
    return stored


def _compressed_tensors(matrix: Matrix, factor: int) -> Tensors:
    return {"weight_packed": matrix.packed, "weight_scale": matrix.e8m0}


def _bytes(matrix: Matrix, factor: int) -> Tensors:
    return {"weight": matrix.packed, "weight_scale": matrix.e8m0}


def _deepseek(matrix: Matrix, factor: int) -> Tensors:
    scale = matrix.e8m0.view(torch.float8_e8m0fnu)
    return {"weight": matrix.packed.view(torch.int8), "scale": scale}


def _modelopt(matrix: Matrix, factor: int) -> Tensors:
    """w = code · scale · scale_2."""
    whole = 2.0**-factor
    return {
        "weight": matrix.packed,
        "weight_scale": _nvfp4_scale(matrix, 1 / whole),
        "weight_scale_2": torch.tensor(whole),
        "input_scale": torch.tensor(0.25),
    }


def _nvfp4_packed(matrix: Matrix, factor: int) -> Tensors:
    """w = code · scale / global_scale; the global one need not be a power of two."""
    divisor = 1.5 * 2.0**factor
    return {
        "weight_packed": matrix.packed,
        "weight_scale": _nvfp4_scale(matrix, divisor),
        "weight_global_scale": torch.tensor([divisor]),
        "input_global_scale": torch.tensor([3.0]),
    }


def _groups(format: str, bits: int, group: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"format": format, "targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    }


PROJ = ("gate_proj", "up_proj", "down_proj")
NUMBERED = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Kind:
    """One container. Args: store: tensors of a matrix; config: entries of config.json."""

    store: Callable[[Matrix, int], Tensors]
    config: dict[str, Any]
    names: tuple[str, str, str] = PROJ
    layer: str = "model.layers.{}.mlp.experts"


KINDS: dict[str, Kind] = {
    "compressed-tensors mxfp4-pack-quantized": Kind(
        _compressed_tensors, {"quantization_config": _groups("mxfp4-pack-quantized", 4, 32)}
    ),
    "Quark OCP MX": Kind(
        _bytes,
        {
            "quantization_config": {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": {
                        "dtype": "fp4",
                        "qscheme": "per_group",
                        "group_size": 32,
                        "scale_format": "e8m0",
                    },
                    "input_tensors": {"dtype": "fp4"},
                },
                "layer_quant_config": {"*self_attn*": {"weight": {"dtype": "fp8_e4m3"}}},
                "exclude": ["lm_head", "*self_attn*", "*mlp.gate"],
                "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
            }
        },
    ),
    "DeepSeek-V4": Kind(
        _deepseek,
        {
            "expert_dtype": "fp4",
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128],
            },
        },
        NUMBERED,
        "layers.{}.ffn.experts",
    ),
    "MiMo": Kind(
        _bytes,
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "store_dtype": "mxfp4",
                "mxfp4_block_size": 32,
                "weight_block_size": [128, 128],
                "ignored_layers": ["model.layers.0.self_attn.o_proj"],
            }
        },
    ),
    "ModelOpt NVFP4": Kind(
        _modelopt,
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "group_size": 16,
                "ignore": ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.gate"],
            }
        },
    ),
    "compressed-tensors nvfp4-pack-quantized": Kind(
        _nvfp4_packed, {"quantization_config": _groups("nvfp4-pack-quantized", 4, 16)}
    ),
}
"""By the names of mxpert.integrations.checkpoints.containers."""


@dataclass
class Experts:
    """The experts of one module by meaning: a Matrix by (expert, "gate" | "up" | "down")."""

    path: str
    matrices: dict[tuple[int, str], Matrix] = field(default_factory=dict)

    def stacked(self, part: str) -> torch.Tensor:
        """float64 [E, N, K]."""
        found = [matrix for (_, each), matrix in self.matrices.items() if each == part]
        return torch.stack([matrix.values for matrix in found])


def random_experts(
    path: str, seed: int, *, parts: Sequence[str] = ("gate", "up", "down")
) -> Experts:
    """The experts of one module."""
    generator = torch.Generator().manual_seed(seed)
    experts = Experts(path)
    for expert in range(EXPERTS):
        for part in parts:
            experts.matrices[expert, part] = random_matrix(generator, *MATRIX_SIZES[part])
    return experts


def tensors_of(kind: Kind, experts: Experts, names: Sequence[str] | None = None) -> Tensors:
    """The stored tensors of a module; every matrix has another factor between its two scales."""
    written = dict(zip(("gate", "up", "down"), names or kind.names, strict=True))
    return {
        f"{experts.path}.{expert}.{written[part]}.{suffix}": tensor.contiguous()
        for index, ((expert, part), matrix) in enumerate(experts.matrices.items())
        for suffix, tensor in kind.store(matrix, index % 3).items()
    }


def write(
    directory: Path,
    name: str,
    *,
    layers: Sequence[int] = (0, 1),
    names: Sequence[str] | None = None,
    more: Tensors | None = None,
    **config: Any,
) -> list[Experts]:
    """Write a checkpoint with these layers, one shard a layer.

    Args:
        directory: made by this. name: of a container.
        names: of the gate, up and down matrices; None takes the container's own.
        more: tensors besides the experts. config: entries that are added or replaced.

    Returns:
        What the experts are.
    """
    kind = KINDS[name]
    directory.mkdir(parents=True, exist_ok=True)
    modules = [random_experts(kind.layer.format(layer), layer) for layer in layers]
    weight_map: dict[str, str] = {}
    for module in modules:
        parts = [tensors_of(kind, module, names), more or {}]
        tensors = parts[0] | (parts[1] if module is modules[0] else {})
        file = f"model-{len(weight_map):05d}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    stated = {"model_type": "toy", "hidden_size": HIDDEN, "num_experts": EXPERTS}
    stated |= kind.config | config
    (directory / "config.json").write_text(json.dumps(stated), encoding="utf-8")
    return modules


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the first shard, and the index with them."""
    index_file = path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text("utf-8"))
    file = next(iter(index["weight_map"].values()))
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file, metadata={"format": "pt"})
    kept = {name: each for name, each in index["weight_map"].items() if each != file}
    index["weight_map"] = kept | dict.fromkeys(tensors, file)
    index_file.write_text(json.dumps(index), encoding="utf-8")


def check_weights(weights: MoEWeights, experts: Experts) -> None:
    """Values in float64, gate rows before up rows; codes and scales as they are stored."""
    assert weights.gate_up_order is GateUpOrder.CONCATENATED
    gate_up, down = weights.dequantize(torch.float64)
    wanted = torch.cat((experts.stacked("gate"), experts.stacked("up")), dim=1)
    assert_exact(gate_up, wanted, "gate_up_proj")
    assert_exact(down, experts.stacked("down"), "down_proj")
    for expert in range(EXPERTS):
        matrix = experts.matrices[expert, "down"]
        assert torch.equal(weights.down_proj.qdata[expert], matrix.packed)
        assert torch.equal(weights.down_proj.scale[expert], matrix.e8m0)


def check_checkpoint(path: Path, modules: list[Experts]) -> None:
    loaded = dict(load_expert_weights(path))
    assert list(loaded) == [module.path for module in modules]
    for module in modules:
        check_weights(loaded[module.path], module)


def matrix_of(weight: torch.Tensor) -> Matrix:
    """What `convert` makes of a matrix, by meaning."""
    quantized = mxpert.quantize(weight, "mxfp4", scale_rule="rceil")
    codes = torch.stack((quantized.qdata & 15, quantized.qdata >> 4), dim=-1).flatten(-2)
    return Matrix(codes.to(torch.int64), quantized.scale.to(torch.int64) - 127)


def is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith(".weight")


def store_experts(
    dense: Path, out: Path, kind: str, keep: Callable[[str], bool] = lambda name: False
) -> Path:
    """Write a bf16 checkpoint with its experts in a container, except for those of `keep`."""
    shutil.copytree(dense, out)
    for file in out.glob("*.safetensors"):
        file.unlink()
    written: Tensors = {}
    stored = {
        name: tensor
        for file in sorted(dense.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    for index, (name, tensor) in enumerate(stored.items()):
        if not is_expert(name) or keep(name):
            written[name] = tensor
            continue
        parts = KINDS[kind].store(matrix_of(tensor), index % 3)
        prefix = name.removesuffix("weight")
        written |= {f"{prefix}{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    edit(out, **KINDS[kind].config)
    return out


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text("utf-8")) | changes
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")

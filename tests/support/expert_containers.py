"""Tiny checkpoints in every container of quantised experts, written by formula.

Names, dtypes and shapes are those of published checkpoints. What is written uses none of mxpert's
codecs: the values that a reader must find come from the table of E2M1 and powers of two.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import mxpert
from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.moe.weights import GateUpOrder, MoEWeights
from mxpert.testing.numerics import assert_exact
from support.exact_matrices import Int4Matrix, Mxfp8Matrix, NvfpMatrix, codes_of, e2m1, packed

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
        scale = torch.exp2(self.exponents.to(torch.float64)).repeat_interleave(32, dim=1)
        return e2m1(self.codes) * scale

    @property
    def packed(self) -> torch.Tensor:
        """uint8 [N, K/2]: the low nibble is the even k."""
        return packed(self.codes)

    @property
    def e8m0(self) -> torch.Tensor:
        """uint8 [N, K/32]."""
        return (self.exponents + 127).to(torch.uint8)

    @property
    def parts(self) -> Tensors:
        """What a reader holds of it."""
        return {"qdata": self.packed, "scale": self.e8m0}


AnyMatrix = Matrix | NvfpMatrix | Mxfp8Matrix | Int4Matrix


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


def groups(format: str, bits: int, group: int, **more: Any) -> dict[str, Any]:
    """What compressed-tensors writes into a config."""
    weights = {"num_bits": bits, "type": "float", "group_size": group, **more}
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
    """One container.

    Args:
        store: tensors of a matrix; config: entries of config.json.
        draw: makes a random matrix [N, K]. of: quantises one. format: of the weights, and
            group: of one scale.
    """

    store: Callable[[Any, int], Tensors]
    config: dict[str, Any]
    names: tuple[str, str, str] = PROJ
    layer: str = "model.layers.{}.mlp.experts"
    draw: Callable[[torch.Generator, int, int], AnyMatrix] = random_matrix
    of: Callable[[torch.Tensor], AnyMatrix] | None = None
    format: str = "mxfp4"
    group: int = 32


def pack_quantized(
    group: int, dtype: torch.dtype = torch.bfloat16, *, has_zeros: bool = False, **stated: Any
) -> Kind:
    """compressed-tensors ``pack-quantized``."""
    more = {"type": "int", "strategy": "group", "symmetric": not has_zeros, "actorder": None}
    return Kind(
        lambda matrix, factor: matrix.pack_quantized,
        {"quantization_config": groups("pack-quantized", 4, group, **more | stated)},
        draw=partial(Int4Matrix.random, group=group, dtype=dtype, has_zeros=has_zeros),
        of=Int4Matrix.of,
        format=f"int4_g{group}",
        group=group,
    )


def awq(group: int, **stated: Any) -> Kind:
    """AWQ's ``gemm``."""
    entry = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Kind(
        lambda matrix, factor: matrix.awq,
        {"quantization_config": entry | {"version": "gemm"} | stated},
        draw=partial(Int4Matrix.random, group=group, dtype=torch.float16, has_zeros=True),
        of=partial(Int4Matrix.of, has_zeros=True),
        format=f"int4_g{group}",
        group=group,
    )


def gptq(group: int, *, sym: bool = False, v2: bool = False, **stated: Any) -> Kind:
    """GPTQ, whose zero points are 1 to 15 in v1."""
    entry = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": sym, "desc_act": False}
    form = {"checkpoint_format": "gptq_v2"} if v2 else {}
    drawn: dict[str, Any] = dict(group=group, dtype=torch.float16, has_zeros=not sym)
    return Kind(
        lambda matrix, factor: matrix.gptq(less=0 if v2 else 1),
        {"quantization_config": entry | form | stated},
        draw=partial(Int4Matrix.random, lowest=0 if v2 else 1, **drawn),
        of=partial(Int4Matrix.of, has_zeros=not sym),
        format=f"int4_g{group}",
        group=group,
    )


def mxfp8(scale: str, entry: dict[str, Any]) -> Kind:
    """MXFP8 whose scales have this suffix."""
    return Kind(
        lambda matrix, factor: matrix.stored(scale),
        {"quantization_config": entry},
        draw=Mxfp8Matrix.random,
        of=Mxfp8Matrix.of,
        format="mxfp8_e4m3",
    )


KINDS: dict[str, Kind] = {
    "compressed-tensors mxfp4-pack-quantized": Kind(
        _compressed_tensors, {"quantization_config": groups("mxfp4-pack-quantized", 4, 32)}
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
        _nvfp4_packed, {"quantization_config": groups("nvfp4-pack-quantized", 4, 16)}
    ),
    "MiniMax MXFP8": mxfp8(
        "weight_scale_inv", {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}
    ),
    "ModelOpt MXFP8": mxfp8("weight_scale", {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "compressed-tensors mxfp8-quantized": mxfp8("weight_scale", groups("mxfp8-quantized", 8, 32)),
    "compressed-tensors pack-quantized": pack_quantized(32),
    "AWQ": awq(32),
    "GPTQ": gptq(32),
}
"""By the names of mxpert.integrations.checkpoints.containers; those of NVFP4 are casts."""

MX_KINDS = [name for name, kind in KINDS.items() if kind.format == "mxfp4"]
"""Containers whose experts load as MXFP4."""


def _exact(name: str, *, is_divisor: bool) -> Kind:
    return replace(
        KINDS[name],
        store=lambda matrix, factor: matrix.compressed if is_divisor else matrix.modelopt,
        draw=partial(NvfpMatrix.random, is_divisor=is_divisor),
        of=partial(NvfpMatrix.of, is_divisor=is_divisor),
        format="nvfp4",
        group=16,
    )


EXACT_NVFP4 = {
    "ModelOpt NVFP4": _exact("ModelOpt NVFP4", is_divisor=False),
    "compressed-tensors nvfp4-pack-quantized": _exact(
        "compressed-tensors nvfp4-pack-quantized", is_divisor=True
    ),
}
"""The same containers with weights that MXFP4 does not hold."""


@dataclass
class Experts:
    """The experts of one module by meaning: a matrix by (expert, "gate" | "up" | "down")."""

    path: str
    matrices: dict[tuple[int, str], Any] = field(default_factory=dict)

    def stacked(self, part: str) -> torch.Tensor:
        """float64 [E, N, K]."""
        found = [matrix for (_, each), matrix in self.matrices.items() if each == part]
        return torch.stack([matrix.values for matrix in found])


def random_experts(
    path: str,
    seed: int,
    draw: Callable[[torch.Generator, int, int], AnyMatrix] = random_matrix,
    sizes: tuple[int, int] = (HIDDEN, INTERMEDIATE),
) -> Experts:
    """The experts of one module with these H and F."""
    rows = {"gate": sizes[::-1], "up": sizes[::-1], "down": sizes}
    generator = torch.Generator().manual_seed(seed)
    experts = Experts(path)
    for expert in range(EXPERTS):
        for part in rows:
            experts.matrices[expert, part] = draw(generator, *rows[part])
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
    name: str | Kind,
    *,
    layers: Sequence[int] = (0, 1),
    sizes: tuple[int, int] = (HIDDEN, INTERMEDIATE),
    names: Sequence[str] | None = None,
    more: Tensors | None = None,
    **config: Any,
) -> list[Experts]:
    """Write a checkpoint with these layers, one shard a layer.

    Args:
        directory: made by this. name: of a container, or one. sizes: H and F.
        names: of the gate, up and down matrices; None takes the container's own.
        more: tensors besides the experts. config: entries that are added or replaced.

    Returns:
        What the experts are.
    """
    kind = name if isinstance(name, Kind) else KINDS[name]
    directory.mkdir(parents=True, exist_ok=True)
    modules = [
        random_experts(kind.layer.format(layer), layer, kind.draw, sizes) for layer in layers
    ]
    weight_map: dict[str, str] = {}
    for module in modules:
        parts = [tensors_of(kind, module, names), more or {}]
        tensors = parts[0] | (parts[1] if module is modules[0] else {})
        file = f"model-{len(weight_map):05d}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    stated = {"model_type": "toy", "hidden_size": sizes[0], "num_experts": EXPERTS}
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


def rewrite_all(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change all tensors of a checkpoint, which are then in one file."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    change(tensors)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def check_weights(weights: MoEWeights, experts: Experts) -> None:
    """Values in float64, gate rows before up rows; codes and scales as they are stored."""
    assert weights.gate_up_order is GateUpOrder.CONCATENATED
    gate_up, down = weights.dequantize(torch.float64)
    wanted = torch.cat((experts.stacked("gate"), experts.stacked("up")), dim=1)
    assert_exact(gate_up, wanted, "gate_up_proj")
    assert_exact(down, experts.stacked("down"), "down_proj")
    for expert in range(EXPERTS):
        for name, part in experts.matrices[expert, "down"].parts.items():
            found = getattr(weights.down_proj, name)[expert]
            assert found.dtype == part.dtype, name
            assert torch.equal(found, part), name


def check_checkpoint(path: Path, modules: list[Experts]) -> None:
    loaded = dict(load_expert_weights(path))
    assert list(loaded) == [module.path for module in modules]
    for module in modules:
        check_weights(loaded[module.path], module)


def matrix_of(weight: torch.Tensor) -> Matrix:
    """What `convert` makes of a matrix, by meaning."""
    quantized = mxpert.quantize(weight, "mxfp4", scale_rule="rceil")
    return Matrix(codes_of(quantized.qdata), quantized.scale.to(torch.int64) - 127)


def is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith(".weight")


def store_experts(
    dense: Path, out: Path, kind: str | Kind, keep: Callable[[str], bool] = lambda name: False
) -> Path:
    """Write a bf16 checkpoint with its experts in a container, except for those of `keep`."""
    kind = kind if isinstance(kind, Kind) else KINDS[kind]
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
        parts = kind.store((kind.of or matrix_of)(tensor), index % 3)
        prefix = name.removesuffix("weight")
        written |= {f"{prefix}{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    edit(out, **kind.config)
    return out


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text("utf-8")) | changes
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")

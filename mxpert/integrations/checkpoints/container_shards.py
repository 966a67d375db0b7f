"""Write the files of a conversion, and read them back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ...core.files import write_atomically
from ...errors import message, require
from ...formats.codec import decode, encode, unpack_codes
from ...formats.spec import E2M1, E4M3, MXFP4, MXFP8_E4M3
from ...formats.tensor import TENSOR_FIELDS, MXTensor
from ...formats.weight_tensor import WeightTensor
from ...moe.published_tensors import BLOCK_BYTES
from ..models.experts import starred
from ..models.saved_config import (
    GPT_OSS,
    GPT_OSS_UNCONVERTED,
    implementation_entry,
    quantization_config,
)
from .container_plan import OP, ConversionPlan, QuantizedCheckpoint, Shard, Unit
from .expert_matrices import BadMatrixError, Exact
from .expert_sources import source_directory_files
from .matrix_encoders import stated_zeros
from .nvfp4_casts import cast_of_mxfp4
from .quantize import MANIFEST_FILE
from .safetensors_files import CONFIG_FILE, INDEX_FILE, write_json, write_tensors
from .stated_quantization import HF_QUANT_CONFIG_FILE
from .verify import same_bytes
from .written_containers import Form, dense_modules

Advance = Callable[[int, str], None]
"""Called with (bytes of the shard that are done, what is being done)."""

_STATED = ("quantization_config", "expert_dtype", "experts_implementation")
"""Entries of a config that say what the source's weights are."""


@dataclass(frozen=True)
class WrittenShard:
    """What a file holds.

    Args:
        names: of its tensors. nbytes: of them. forms: of its quantised matrices.
    """

    names: tuple[str, ...]
    nbytes: int
    forms: frozenset[Form]


def write_shard(plan: ConversionPlan, shard: Shard, folder: Path, advance: Advance) -> WrittenShard:
    """Convert and copy the tensors of one file, and write it.

    Raises:
        ValueError, UnsupportedError: weights that the container does not hold exactly.
    """
    tensors: dict[str, torch.Tensor] = {}
    forms, done = set(), 0
    for unit in shard.units:
        matrices = _recoded(unit, plan.source.matrices(unit), plan.target.weight_format)
        forms |= {Form.of(matrix) for matrix in matrices.values()}
        if plan.target.is_stacked:
            _put(tensors, plan, unit, matrices)
        else:
            tensors |= _encoded(plan, unit, matrices)
        done += unit.source_bytes
        advance(done, next(iter(unit.names.values())))
    for name in shard.copied:
        tensors[name] = plan.source.reader.read(name).contiguous()
        done += tensors[name].nbytes
        advance(done, name)
    write_tensors(folder / shard.name, tensors)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return WrittenShard(tuple(tensors), num_bytes, frozenset(forms))


def copy_side_files(plan: ConversionPlan, folder: Path) -> None:
    """Copy tokenizer and templates, without what says how the source was quantised."""
    for file in source_directory_files(plan.source.reader.directory):
        if file.name not in (MANIFEST_FILE, HF_QUANT_CONFIG_FILE):
            write_atomically(folder / file.name, partial(shutil.copyfile, file))


def write_config(plan: ConversionPlan, folder: Path, written: Mapping[str, WrittenShard]) -> None:
    """Write the index, and what ``config.json`` says of the new container.

    Raises:
        ValueError: weights in several forms, which the container's config cannot state.
    """
    forms = {form for each in written.values() for form in each.forms}
    got = " and ".join(
        sorted(f"{each.format.name}{' with zero points' * each.has_zeros}" for each in forms)
    )
    need = "matrices with one size of groups, all or none with zero points"
    require(len(forms) == 1, OP, str(plan.source.reader.path), need=need, got=got)
    (form,) = forms
    weight_map = {name: file for file, each in written.items() for name in each.names}
    total = sum(each.nbytes for each in written.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX_FILE, index)
    config = {
        key: {name: each for name, each in value.items() if name not in _STATED}
        if key == "text_config" and isinstance(value, dict)
        else value
        for key, value in plan.source.statement.config.items()
        if key not in _STATED
    }
    copied = [plan.source.reader.info(name) for shard in plan.shards for name in shard.copied]
    dense, kind = dense_modules(copied), config.get("model_type")
    if plan.target.entry is not None:
        config["quantization_config"] = plan.target.entry(form, dense)
    else:
        names = sorted({starred(name) for name in dense})
        names = GPT_OSS_UNCONVERTED if kind == GPT_OSS else names
        config["quantization_config"] = quantization_config(names, None)
        config |= implementation_entry(kind)
    write_json(folder / CONFIG_FILE, config)


def verify_shard(
    plan: ConversionPlan, shard: Shard, written: QuantizedCheckpoint, advance: Advance
) -> list[str]:
    """Compare every weight and every copied tensor of a file with the source.

    Returns:
        What differs, one line each.
    """
    failures, done = [], 0
    for unit in shard.units:
        before, after = plan.source.matrices(unit), written.matrices(unit)
        biases = plan.source.biases(unit), written.biases(unit)
        for part, name in unit.names.items():
            if not _same_values(before[part], after[part]):
                failures.append(f"{shard.name}: {name} has other weights than the source")
            if not _same_tensors(biases[0].get(part), biases[1].get(part)):
                failures.append(f"{shard.name}: {name} has another bias than the source")
        done += unit.source_bytes
        advance(done, f"verifying {next(iter(unit.names.values()))}")
    for name in shard.copied:
        tensor = plan.source.reader.read(name)
        if not same_bytes(tensor, written.reader.read(name)):
            failures.append(f"{shard.name}: {name} differs from the source")
        done += tensor.nbytes
        advance(done, f"verifying {name}")
    return failures


def _recoded(unit: Unit, matrices: dict[str, Exact], wanted: str) -> dict[str, Exact]:
    """The matrices of a unit in the format that the target holds, with the same values.

    Raises:
        ValueError: MXFP4 whose scales NVFP4 does not hold.
    """
    if wanted == "MXFP8":
        return {part: _as_mxfp8(matrix) for part, matrix in matrices.items()}
    if wanted != "NVFP4":
        return matrices
    recoded = dict(matrices)
    for stage in (("gate", "up"), ("down",)):  # gate and up share a factor, as vLLM reads them
        found = {part: matrices[part] for part in stage if part in matrices}
        mxfp4 = [each for each in found.values() if isinstance(each, MXTensor)]
        if not mxfp4:
            continue
        cast = cast_of_mxfp4(mxfp4)
        if cast is None:
            need, got = "scales within 18 binades, none NaN, for NVFP4's e4m3", "others"
            raise ValueError(message(OP, unit.names[stage[-1]], need, got, "keep MXFP4"))
        recoded |= dict(zip(found, cast, strict=True))
    return recoded


def _as_mxfp8(matrix: Exact) -> Exact:
    """MXFP4 in e4m3 codes: all e2m1 numbers are e4m3 numbers."""
    if matrix.format != MXFP4:
        return matrix
    table = encode(decode(torch.arange(16, dtype=torch.uint8), E2M1, torch.float32), E4M3)
    return MXTensor(table[unpack_codes(matrix.qdata).to(torch.int64)], matrix.scale, MXFP8_E4M3)


def _encoded(
    plan: ConversionPlan, unit: Unit, matrices: dict[str, Exact]
) -> dict[str, torch.Tensor]:
    """The tensors of a unit by full name, one matrix each."""
    encode_matrix = plan.target.encode
    assert encode_matrix is not None  # for the type checker: not stacked
    tensors: dict[str, torch.Tensor] = {}
    for part, matrix in matrices.items():
        name = unit.names[part]
        try:
            parts = encode_matrix(matrix)
        except BadMatrixError as bad:
            text = message(OP, f"{name}.{bad.suffix}", bad.need, bad.got, bad.remedy)
            raise ValueError(text) from None
        tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in parts.items()}
    for part, bias in plan.source.biases(unit).items():
        tensors[f"{unit.names[part]}.bias"] = bias.contiguous()
    return tensors


def _put(
    tensors: dict[str, torch.Tensor], plan: ConversionPlan, unit: Unit, matrices: dict[str, Exact]
) -> None:
    """Put an expert into stacked tensors, gate and up rows interleaved."""
    module = plan.source.modules[unit.path]
    biases = plan.source.biases(unit)
    for stage in module.stages:
        parts = [matrices[part] for part in stage]
        rows, columns = (parts[0].qdata.shape[0] * len(parts), parts[0].scale.shape[1])
        found = {
            "blocks": _interleaved([each.qdata for each in parts]).view(rows, columns, BLOCK_BYTES),
            "scales": _interleaved([each.scale for each in parts]),
        }
        if biases.keys() >= {*stage}:
            found["bias"] = _interleaved([biases[part] for part in stage])
        projection = "gate_up_proj" if len(stage) == 2 else f"{stage[0]}_proj"
        for kind, tensor in found.items():
            name = f"{unit.path}.{projection}_{kind}"
            if name not in tensors:
                tensors[name] = tensor.new_empty((module.num_experts, *tensor.shape))
            tensors[name][unit.expert] = tensor


def _interleaved(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts, dim=1).flatten(0, 1)


def _same_values(left: Exact, right: Exact) -> bool:
    """Whether two matrices have the same bits; of other formats, the same decoded values."""
    if left.format != right.format:
        bits = [each.dequantize(torch.float64).view(torch.int64) for each in (left, right)]
        return torch.equal(*bits)
    fields = [
        {name: getattr(each, name) for name in TENSOR_FIELDS[type(each)]} | _zero_points(each)
        for each in (left, right)
    ]
    return all(_same_tensors(fields[0][name], fields[1][name]) for name in fields[0])


def _same_tensors(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Whether both are there with the same bits, or neither is."""
    if left is None or right is None:
        return left is right
    return same_bytes(left, right)


def _zero_points(matrix: Exact) -> dict[str, torch.Tensor]:
    """The zero points of INT4, of which all are 8 where none are stored."""
    if isinstance(matrix, WeightTensor) and matrix.format.is_integer:
        return {"zero_point": stated_zeros(matrix)}
    return {}

"""Expert weights as named tensors and facts: what `MoEWeights.state_dict` and its files hold."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from ..core.files import JSONReader, is_file, parse_json, write_atomically
from ..errors import Checks, message, require, require_tensor
from ..formats.folding import FoldCertificate
from ..formats.spec import FORMATS, MXFP4, MXFP8_E4M3
from ..formats.tensor import Layout, MXTensor
from ..formats.weight_rounding import RoundingCertificate
from ..formats.weight_tensor import WEIGHT_FORMATS, WeightLike, WeightTensor

if TYPE_CHECKING:
    from .weights import MoEWeights

PROJECTIONS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_bias", "down_bias")
FACTS = "_extra_state"
"""Key of the facts beside the tensors: the name that torch gives to a module's extra state."""

_OF_DENSE = "mxpert.quantize_weights takes both dense weights"
_OF_CODES = (
    "codes and scales of MXFP4 become MXTensor(qdata, scale, 'mxfp4') with qdata uint8 [E, N, K/2] "
    "(of gpt-oss: blocks.flatten(-2)) and scale uint8 [E, N, K/32]; mxpert.load_expert_weights "
    "reads a checkpoint"
)
"""Remedy: the types that a projection may have."""

_PARTS = ("qdata", "scale", "reference", "zero_point", "row_scale", "fp8_codes")
_OPTIONAL_PARTS = ("zero_point", "row_scale")
MX_WEIGHTS = (MXFP4, MXFP8_E4M3)
"""Formats of projections that are MXTensors."""
WEIGHT_FORMAT_NAMES = (*(each.name for each in MX_WEIGHTS), *WEIGHT_FORMATS)
"""Every format of expert weights."""
_CERTIFICATE_PARTS = ("reference", "rows_outside", "blocks_outside")
_CERTIFICATE_DTYPES = (torch.uint8, torch.bool, torch.int64)
_SIZES = ("num_experts", "hidden_size", "intermediate_size")
_FILE_FORMAT, _FILE_VERSION = "mxpert.MoEWeights", "1"


def flatten(weights: MoEWeights) -> dict[str, Any]:
    """Return the tensors of MoEWeights by name, and their facts under FACTS."""
    state: dict[str, Any] = {}
    certificates = weights.fold_certificates
    for index, name in enumerate(PROJECTIONS):
        projection = getattr(weights, name)
        state |= {f"{name}.{part}": getattr(projection, part, None) for part in _PARTS}
        if certificates is not None:
            state |= {
                f"{name}.certificate.{part}": getattr(certificates[index], part)
                for part in _CERTIFICATE_PARTS
            }
    state |= {name: getattr(weights, name) for name in BIASES}
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    facts = identity(weights) | {"biases": [name for name in BIASES if name in state]}
    if weights.source_order is not None:
        facts["source_order"] = weights.source_order.value
    if certificates is not None:
        facts["num_blocks"] = [certificate.num_blocks for certificate in certificates]
        facts["widest_span"] = [certificate.widest_span for certificate in certificates]
    if weights.rounding_certificates is not None:
        facts["rounding"] = [asdict(each) for each in weights.rounding_certificates]
    return state | {FACTS: facts}


def identity(weights: MoEWeights) -> dict[str, Any]:
    """Return the facts in which MoEWeights must agree for one to be copied into the other."""
    order = weights.gate_up_order
    return {
        **{name: getattr(weights, name) for name in _SIZES},
        "layout": weights.layout.value,
        "gate_up_order": None if order is None else order.value,
        "weight_format": weights.weight_format,
    }


def build(state: Mapping[str, Any], op: str) -> dict[str, Any]:
    """Return the fields of MoEWeights that `state` holds; orders stay names.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: missing or unknown entries, or facts that do not fit.
    """
    need = Checks(op)
    facts = _checked_facts(state, op)
    layout, prepared = Layout(facts["layout"]), "num_blocks" in facts
    experts, hidden, intermediate = (facts[name] for name in _SIZES)
    shapes = {
        "gate_up_proj": (experts, intermediate * (2 if facts["gate_up_order"] else 1), hidden),
        "down_proj": (experts, hidden, intermediate),
    }
    parts = [*(_PARTS[:3] if layout.is_folded else _PARTS[:2])]
    if layout.has_fp8_codes:
        parts.append("fp8_codes")
    names = {f"{name}.{part}" for name in PROJECTIONS for part in parts}
    if facts["weight_format"] in WEIGHT_FORMATS:
        optional = {f"{name}.{part}" for name in PROJECTIONS for part in _OPTIONAL_PARTS}
        names |= optional & set(state)
    if prepared:
        names |= {
            f"{name}.certificate.{part}" for name in PROJECTIONS for part in _CERTIFICATE_PARTS
        }
    stated = facts.get("biases", [])  # older files do not state them
    need(
        isinstance(stated, list) and set(map(str, stated)) <= set(BIASES),
        "biases",
        f"some of {list(BIASES)}",
        repr(stated),
    )
    names |= set(stated)
    missing, unknown = names - set(state), set(state) - names - {FACTS, *BIASES}
    need(not missing, "state", f"the entries {sorted(names)}", f"a state without {sorted(missing)}")
    need(
        not unknown,
        "state",
        f"entries of {sorted({*names, FACTS, *BIASES})}",
        f"others: {sorted(map(repr, unknown))[:4]}",
    )
    fields: dict[str, Any] = {name: state.get(name) for name in BIASES}
    for name in PROJECTIONS:
        fields[name] = _projection(state, name, facts["weight_format"], layout, shapes[name])
        need(
            tuple(fields[name].shape) == shapes[name],
            f"{name}.qdata.shape",
            f"codes of {list(shapes[name])}",
            list(state[f"{name}.qdata"].shape),
        )
    fields["fold_certificates"] = _certificates(state, facts, shapes, op) if prepared else None
    fields["rounding_certificates"] = _roundings(facts, op)
    return fields | {name: facts.get(name) for name in ("gate_up_order", "source_order")}


def _roundings(
    facts: Mapping[str, Any], op: str
) -> tuple[RoundingCertificate, RoundingCertificate] | None:
    """What rounding has cost both projections; None where they were not rounded."""
    if "rounding" not in facts:
        return None
    reader = JSONReader(op, "pass what MoEWeights.state_dict() returned")
    found = reader.value(list[RoundingCertificate], facts["rounding"], "rounding")
    require(len(found) == 2, op, "rounding", need="two certificates", got=len(found))
    first, second = found
    return first, second


def _projection(
    state: Mapping[str, Any], name: str, format: str, layout: Layout, shape: tuple[int, ...]
) -> WeightLike:
    """One projection from its entries of a state."""
    qdata, scale = state[f"{name}.qdata"], state[f"{name}.scale"]
    packed = layout is not Layout.ROW_MAJOR
    if format in WEIGHT_FORMATS:
        zero_point, row_scale = (state.get(f"{name}.{part}") for part in _OPTIONAL_PARTS)
        sizes = shape if packed else None
        return WeightTensor(qdata, scale, format, zero_point, row_scale, layout, sizes)
    return MXTensor(
        qdata,
        scale,
        FORMATS[format],
        -1,
        layout,
        state[f"{name}.reference"] if layout.is_folded else None,
        shape if packed else None,
        fp8_codes=state[f"{name}.fp8_codes"] if layout.has_fp8_codes else None,
    )


def _checked_facts(state: Mapping[str, Any], op: str) -> dict[str, Any]:
    need = Checks(op)
    remedy = "pass what MoEWeights.state_dict() returned"
    if not isinstance(state, Mapping):
        raise need.type_error("state", "a dict", type(state).__name__, remedy)
    facts = state.get(FACTS)
    need(
        isinstance(facts, dict),
        f"state[{FACTS!r}]",
        "a dict of facts",
        type(facts).__name__,
        remedy,
    )
    assert isinstance(facts, dict)  # for the type checker
    for name in _SIZES:
        need(
            type(facts.get(name)) is int and facts[name] > 0,
            name,
            "a positive int",
            repr(facts.get(name)),
        )
    need("gate_up_order" in facts, "gate_up_order", "a fact, None without a gate", "none", remedy)
    facts = {"weight_format": MXFP4.name, **facts}  # older files do not state it
    format, names = facts["weight_format"], list(WEIGHT_FORMAT_NAMES)
    need(format in names, "weight_format", f"one of {names}", repr(format))
    layouts = [layout.value for layout in Layout]
    need(facts.get("layout") in layouts, "layout", f"one of {layouts}", repr(facts.get("layout")))
    if "num_blocks" in facts or "widest_span" in facts:
        for name in ("num_blocks", "widest_span"):
            value = facts.get(name)
            need(
                isinstance(value, list)
                and len(value) == 2
                and all(type(item) is int and item >= 0 for item in value),
                name,
                "two ints",
                repr(value),
            )
    return facts


def _certificates(
    state: Mapping[str, Any],
    facts: dict[str, Any],
    shapes: dict[str, tuple[int, int, int]],
    op: str,
) -> tuple[FoldCertificate, ...]:
    certificates = []
    for index, name in enumerate(PROJECTIONS):
        rows = shapes[name][:2]
        tensors = [state[f"{name}.certificate.{part}"] for part in _CERTIFICATE_PARTS]
        for part, tensor, dtype in zip(
            _CERTIFICATE_PARTS, tensors, _CERTIFICATE_DTYPES, strict=True
        ):
            require_tensor(
                tensor,
                op,
                f"{name}.certificate.{part}",
                dtype=dtype,
                shape=rows[:1] if part == "blocks_outside" else rows,
            )
        reference, rows_outside, blocks_outside = tensors
        certificates.append(
            FoldCertificate(
                reference,
                rows_outside,
                blocks_outside,
                facts["num_blocks"][index],
                facts["widest_span"][index],
            )
        )
    return tuple(certificates)


def copy_into(current: dict[str, Any], new: Mapping[str, Any], op: str) -> None:
    """Copy the tensors of one state into those of another of the same layout and sizes."""
    pairs = [
        (name, tensor, new[name])
        for name, tensor in current.items()
        if name != FACTS and ".certificate." not in name
    ]
    for name, tensor, source in pairs:
        require_tensor(source, op, name, dtype=tensor.dtype, shape=tuple(tensor.shape))
        overlaps = any(
            stride == 0 and size > 1
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        )
        require(
            not overlaps,
            op,
            f"weights.{name}",
            need="a tensor that can be written to",
            got=f"strides {tensor.stride()}",
            remedy="call weights.prepare(device=...)",
        )
    with torch.no_grad():
        for _, tensor, source in pairs:
            tensor.copy_(source)


def write(path: str | os.PathLike[str], state: dict[str, Any], op: str) -> None:
    """Write a state to a safetensors file; an existing file is replaced as a whole.

    Raises:
        TypeError: `path` is no path.
        ValueError: weights without data, or a path that cannot be written.
    """
    target = _path(path, op)
    require(bool(target.name), op, "path", need="the name of a file", got=repr(str(path)))
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        if name == FACTS:
            continue
        require(
            tensor.device.type != "meta",
            op,
            f"weights.{name}",
            need="a tensor with data",
            got="one on 'meta'",
            remedy="load the weights first",
        )
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen:
            tensor = tensor.clone()  # the format refuses tensors that share storage
        seen.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    header = {"format": _FILE_FORMAT, "version": _FILE_VERSION, "facts": json.dumps(state[FACTS])}
    try:
        write_atomically(
            target,
            lambda partial: safetensors.torch.save_file(tensors, partial, header),
            shared=True,
        )
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(
            message(op, "path", "a path that can be written", repr(str(target)), str(error))
        ) from None


def read(path: str | os.PathLike[str], op: str, *, copy: bool) -> dict[str, Any]:
    """Return the state that `write` has written, its tensors on the CPU.

    copy: whether tensors have memory of their own; else they are the pages of the file.

    Raises:
        TypeError: `path` is no path.
        ValueError: no such file, or a file of something else.
    """
    need = Checks(op)
    source = _path(path, op)
    remedy = "MoEWeights.save writes such files; load_expert_weights reads a model's checkpoint"
    need(is_file(source), "path", "a file", repr(str(source)), remedy)
    try:
        with safetensors.safe_open(source, framework="pt") as file:
            header = file.metadata() or {}
            need(
                header.get("format") == _FILE_FORMAT,
                "path",
                f"a safetensors file of {_FILE_FORMAT}",
                f"another: '{source}'",
                remedy,
            )
            need(
                header.get("version") == _FILE_VERSION,
                "path",
                f"version {_FILE_VERSION} of the format",
                header.get("version"),
                "update mxpert",
            )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if copy:
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise need.value_error(
            "path", "a safetensors file", repr(str(source)), f"it cannot be read: {error}"
        ) from None
    try:
        facts = parse_json(header.get("facts", "null"))
    except ValueError as error:
        raise need.value_error(
            "path",
            "a safetensors file with JSON as facts",
            repr(str(source)),
            f"it cannot be read: {error}",
        ) from None
    return {**tensors, FACTS: facts}


def _path(path: object, op: str) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(message(op, "path", "a path", repr(path)))
    return Path(os.fsdecode(path))


def check_projection(projection: object, op: str, name: str) -> None:
    """Require weights [E, N, K] in a format of WEIGHT_FORMAT_NAMES, quantised along K."""
    if not isinstance(projection, WeightLike):
        got, remedy = type(projection).__name__, _OF_DENSE
        if isinstance(projection, torch.Tensor):
            dtype = str(projection.dtype).removeprefix("torch.")
            got = f"a {dtype} Tensor {list(projection.shape)}"
            remedy = _OF_DENSE if projection.is_floating_point() else _OF_CODES
        raise TypeError(message(op, name, "an MXTensor or a WeightTensor", got, remedy))
    shape, axis, format = list(projection.shape), projection.axis, projection.format.name
    formats = " or ".join(WEIGHT_FORMAT_NAMES)
    for argument, fits, need, given, remedy in (
        ("format", format in WEIGHT_FORMAT_NAMES, formats, format, ""),
        ("shape", len(shape) == 3, "three dimensions [E, N, K]", shape, ""),
        ("axis", axis == -1, -1, axis, "quantise along the last axis"),
    ):
        require(fits, op, f"{name}.{argument}", need=need, got=given, remedy=remedy)

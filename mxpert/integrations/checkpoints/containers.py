"""The containers in which checkpoints store quantised experts, and which of them a checkpoint is.

The config says which container is meant, the names of the tensors confirm it; nothing is tried out.
A container turns the tensors of an experts module into `MoEWeights`. Formats that are known and not
served are listed too, so that an error names them.

One more with a matrix per expert is an entry of `CONTAINERS` with a `MatrixFormat`, or with a
function that makes one of what the config says.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.files import short
from ...errors import UnsupportedError, message
from .container_kinds import Container, PerExpertContainer, PublishedContainer, StatedAs
from .expert_matrices import MatrixFormat, mxfp4_matrix, mxfp8_matrix, nvfp4_matrix
from .int4_matrices import awq_matrix, gptq_matrix, pack_quantized_matrix
from .per_expert import expert_tails, linear_of
from .safetensors_files import CONFIG_FILE, CheckpointReader, quantization_method
from .stated_quantization import Statement


@dataclass(frozen=True)
class UnservedFormat:
    """A format of experts that is known and cannot run.

    Args:
        name: of the container. weight_format: of the weights. stated: in the config.
    """

    name: str
    weight_format: str
    stated: StatedAs


def _compressed(format: str) -> StatedAs:
    return StatedAs(
        "compressed-tensors",
        (format,),
        f'"quant_method": "compressed-tensors", "format": "{format}"',
    )


def _modelopt(*algorithms: str) -> StatedAs:
    shown = " or ".join(f'"{name}"' for name in algorithms)
    return StatedAs("modelopt", algorithms, f'"quant_method": "modelopt", "quant_algo": {shown}')


def _method(method: str) -> StatedAs:
    return StatedAs(method, ("",), f'"quant_method": "{method}"')


def _fixed(name: str, weight_format: str, stated: StatedAs, stored: MatrixFormat) -> Container:
    """A container whose matrices are all stored alike, whatever else its config says."""
    suffixes = tuple(part.suffix for part in stored.parts)
    return PerExpertContainer(name, weight_format, stated, suffixes, lambda *_: stored)


GPT_OSS = PublishedContainer(
    "gpt-oss", "MXFP4", StatedAs("mxfp4", ("",), '"quant_method": "mxfp4"')
)

CONTAINERS: tuple[Container, ...] = (
    GPT_OSS,
    _fixed(
        "compressed-tensors mxfp4-pack-quantized",
        "MXFP4",
        _compressed("mxfp4-pack-quantized"),
        mxfp4_matrix("weight_packed", "weight_scale"),
    ),
    _fixed(
        "Quark OCP MX",
        "MXFP4",
        StatedAs(
            "quark",
            ("fp4",),
            '"quant_method": "quark", weights `fp4` with `group_size` 32 and `scale_format` e8m0',
        ),
        mxfp4_matrix("weight", "weight_scale"),
    ),
    _fixed(
        "DeepSeek-V4",
        "MXFP4",
        StatedAs("fp8", ("expert_dtype=fp4",), '"quant_method": "fp8", "expert_dtype": "fp4"'),
        mxfp4_matrix("weight", "scale"),
    ),
    _fixed(
        "MiMo",
        "MXFP4",
        StatedAs("fp8", ("store_dtype=mxfp4",), '"quant_method": "fp8", "store_dtype": "mxfp4"'),
        mxfp4_matrix("weight", "weight_scale"),
    ),
    _fixed(
        "ModelOpt NVFP4",
        "NVFP4",
        StatedAs(
            "modelopt",
            ("NVFP4", "W4A16_NVFP4"),
            '"quant_method": "modelopt", "quant_algo": "NVFP4" or "W4A16_NVFP4"; or '
            "`hf_quant_config.json`",
        ),
        nvfp4_matrix("weight", "weight_scale", "weight_scale_2", is_divisor=False),
    ),
    _fixed(
        "compressed-tensors nvfp4-pack-quantized",
        "NVFP4",
        _compressed("nvfp4-pack-quantized"),
        nvfp4_matrix("weight_packed", "weight_scale", "weight_global_scale", is_divisor=True),
    ),
    _fixed("MiniMax MXFP8", "MXFP8", _method("mxfp8"), mxfp8_matrix("weight", "weight_scale_inv")),
    _fixed("ModelOpt MXFP8", "MXFP8", _modelopt("MXFP8"), mxfp8_matrix("weight", "weight_scale")),
    _fixed(
        "compressed-tensors mxfp8-quantized",
        "MXFP8",
        _compressed("mxfp8-quantized"),
        mxfp8_matrix("weight", "weight_scale"),
    ),
    PerExpertContainer(
        "compressed-tensors pack-quantized",
        "INT4",
        _compressed("pack-quantized"),
        ("weight_packed", "weight_scale", "weight_shape"),
        pack_quantized_matrix,
    ),
    PerExpertContainer("AWQ", "INT4", _method("awq"), ("qweight", "qzeros", "scales"), awq_matrix),
    PerExpertContainer(
        "GPTQ", "INT4", _method("gptq"), ("qweight", "qzeros", "scales", "g_idx"), gptq_matrix
    ),
)
"""Every container that loads."""


UNSERVED: tuple[UnservedFormat, ...] = (
    UnservedFormat("FP8 in blocks", "FP8", _method("fp8")),
    UnservedFormat(
        "ModelOpt FP8", "FP8", _modelopt("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
    ),
    UnservedFormat("compressed-tensors float-quantized", "FP8", _compressed("float-quantized")),
    UnservedFormat("ModelOpt NVFP4 with AWQ", "NVFP4", _modelopt("NVFP4_AWQ")),
    UnservedFormat("ModelOpt W4A8 MXFP4", "MXFP4", _modelopt("W4A8_MXFP4_FP8")),
)
"""Known formats that cannot run."""

METHODS = frozenset(
    [each.stated.method for each in CONTAINERS] + [each.stated.method for each in UNSERVED]
)
"""Every ``quant_method`` that `container_of` knows."""


def container_of(reader: CheckpointReader) -> tuple[Container, Statement]:
    """The container that a checkpoint's config states, and what it says.

    Args:
        reader: a quantised checkpoint.

    Raises:
        ValueError: no quantisation, or modules in several formats. UnsupportedError: a format that
            is known and not served, or an unknown one.
    """
    op, statement = reader.op, Statement.read(reader)
    if statement is None:
        where = f"{reader.directory / CONFIG_FILE}: quantization_config.quant_method"
        need, remedy = _served_methods(), "convert the checkpoint with `mxpert quantize`"
        raise ValueError(message(op, where, need, quantization_method(reader.config()), remedy))
    linears = [linear_of(*module) for module in expert_tails(reader.names).items()]
    quantized = [linear for linear in linears if not statement.excludes(linear)]
    if linears and not quantized:
        need, got = "quantised experts", f"{linears[0]} among the layers that it excludes"
        raise ValueError(message(op, statement.where, need, got))
    formats = {statement.format_of(linear): linear for linear in quantized or [""]}
    if len(formats) > 1:
        need = "experts in one format"
        got = " and ".join(f"{short(name)} ({linear})" for name, linear in formats.items())
        raise ValueError(message(op, statement.where, need, got))
    (format,) = formats
    return served(statement, format), statement


def served(statement: Statement, format: str) -> Container:
    """The container of a format that a config states.

    Raises:
        UnsupportedError: a format that is known and not served, or an unknown one.
    """
    for container in CONTAINERS:
        if container.stated.fits(statement.method, format):
            return container
    got, remedy = short(f"{statement.method} {format}".strip()), "see docs/which-checkpoints-run.md"
    for each in UNSERVED:
        if each.stated.fits(statement.method, format):
            got = f"{each.name} ({each.weight_format})"
            remedy = f"{each.weight_format} experts in this container are not served; {remedy}"
    raise UnsupportedError(message(statement.op, statement.where, _served_methods(), got, remedy))


def _served_methods() -> str:
    return f"one of {', '.join(container.name for container in CONTAINERS)}"

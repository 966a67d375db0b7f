"""The containers in which checkpoints store quantised experts, and which of them a checkpoint is.

The config says which container is meant, the names of the tensors confirm it; nothing is tried out.
A container turns the tensors of an experts module into `MoEWeights`. Formats that are known and not
served are listed too, so that an error names them.

One more with a matrix per expert is an entry of `CONTAINERS` with a `MatrixFormat`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.files import short
from ...errors import UnsupportedError, message, require
from ...formats.tensor import MXTensor
from ...moe.published_tensors import published_projections
from ...moe.weights import MoEWeights
from ...moe.weights_state import PROJECTIONS
from ..module_paths import module_order
from .expert_matrices import Decoded, MatrixFormat, mxfp4_matrix, nvfp4_cast_matrix
from .per_expert import (
    ExpertModule,
    check_module,
    dense_tensor,
    expert_tails,
    linear_of,
    read_module,
    read_stage,
)
from .published_experts import (
    check_experts,
    expert_modules_of,
    has_gate,
    read_experts,
    read_published_matrix,
    stored_gate_up_order,
)
from .safetensors_files import CONFIG_FILE, CheckpointReader, quantization_method
from .stated_quantization import Statement


@dataclass(frozen=True)
class StatedAs:
    """What a config says of one container.

    Args:
        method: ``quant_method``. formats: what `Statement.format_of` answers; "" where the method
            has one format alone.
        example: the entries of the config, for the documentation.
    """

    method: str
    formats: tuple[str, ...]
    example: str

    def fits(self, method: str, format: str) -> bool:
        """Whether a config that says this means the container."""
        return method == self.method and format in self.formats


@dataclass(frozen=True)
class UnservedFormat:
    """A format of experts that is known and cannot run.

    Args:
        name: of the container. weight_format: of the weights. stated: in the config.
    """

    name: str
    weight_format: str
    stated: StatedAs


@dataclass(frozen=True)
class Container(ABC):
    """One way to store the quantised experts of a checkpoint.

    Args:
        name: as messages and documents give it.
        weight_format: what the tensors hold.
        stated: in the config.
    """

    name: str
    weight_format: str
    stated: StatedAs

    @property
    @abstractmethod
    def tensors(self) -> tuple[str, ...]:
        """Names of tensors below an experts module, as an example."""

    @abstractmethod
    def paths(self, reader: CheckpointReader, statement: Statement) -> list[str]:
        """Full paths of all modules with quantised experts, in order.

        Raises:
            ValueError: no such module, or dense experts that the config does not exclude.
        """

    @abstractmethod
    def check(
        self,
        reader: CheckpointReader,
        statement: Statement,
        paths: Sequence[str],
        *,
        mmap: bool = False,
    ) -> list[ExpertModule]:
        """Check the tensors of some modules by their headers.

        Args:
            reader, statement: of `container_of`. paths: of `paths`.
            mmap: whether their weights shall be the file's pages.

        Raises:
            ValueError: a missing, foreign or mis-shaped tensor, which the message names; `mmap`
                where tensors have to be stacked.
        """

    @abstractmethod
    def read(
        self,
        reader: CheckpointReader,
        module: ExpertModule,
        device: torch.device | str = "cpu",
        *,
        experts: Sequence[int] | None = None,
        mmap: bool = False,
    ) -> MoEWeights:
        """Read the weights of a checked module.

        Args:
            reader, module: of `check`. device: of the weights.
            experts: indices in the wanted order; None is all of them.
            mmap: let the tensors be the file's pages, where `check` allows it.

        Raises:
            UnsupportedError: weights that no kernel serves.
        """

    @abstractmethod
    def matrix(
        self, reader: CheckpointReader, module: ExpertModule, projection: str, expert: int
    ) -> Decoded:
        """One expert's projection [N, K] on the CPU, in the module's gate/up order."""


class PublishedContainer(Container):
    """Stacked blocks and scales, as gpt-oss publishes them."""

    @property
    def tensors(self) -> tuple[str, ...]:
        return ("gate_up_proj_blocks", "gate_up_proj_scales")

    def paths(self, reader: CheckpointReader, statement: Statement) -> list[str]:
        found = expert_modules_of(reader)
        foreign = next(
            (f"{path}.{tails[0]}" for path, tails in expert_tails(reader.names).items()), "none"
        )
        require(
            bool(found),
            reader.op,
            str(reader.path),
            need="tensors named *.gate_up_proj_blocks or *.up_proj_blocks",
            got=foreign,
            remedy="convert the checkpoint with `mxpert quantize`",
        )
        return found

    def check(
        self,
        reader: CheckpointReader,
        statement: Statement,
        paths: Sequence[str],
        *,
        mmap: bool = False,
    ) -> list[ExpertModule]:
        where = reader.directory / CONFIG_FILE
        owner = {**statement.config, "quantization_config": dict(statement.entry)}
        order = stored_gate_up_order(owner, where, reader.op)
        biased = [
            projection
            for projection in (*PROJECTIONS, "up_proj")
            if statement.config.get("model_type") == "gpt_oss"
            or any(
                f"{path}.{projection}_bias" in reader.names for path in expert_modules_of(reader)
            )
        ]
        modules = []
        for path in paths:
            sizes = check_experts(reader, path, biased=biased)
            modules.append(
                ExpertModule(path, *sizes, order if has_gate(reader, path) else None, {})
            )
        return modules

    def read(
        self,
        reader: CheckpointReader,
        module: ExpertModule,
        device: torch.device | str = "cpu",
        *,
        experts: Sequence[int] | None = None,
        mmap: bool = False,
    ) -> MoEWeights:
        return read_experts(reader, module.path, module.order, device, experts=experts, mmap=mmap)

    def matrix(
        self, reader: CheckpointReader, module: ExpertModule, projection: str, expert: int
    ) -> MXTensor:
        return read_published_matrix(reader, module.path, projection, expert)


@dataclass(frozen=True)
class PerExpertContainer(Container):
    """One matrix per expert and projection. Args: stored: how each matrix is stored."""

    stored: MatrixFormat

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(f"0.gate_proj.{part.suffix}" for part in self.stored.parts)

    def paths(self, reader: CheckpointReader, statement: Statement) -> list[str]:
        found, dense = [], None
        for path, tails in expert_tails(reader.names).items():
            tensor = dense_tensor(reader, path, tails)
            if tensor is None:
                found.append(path)
                continue
            dense = tensor
            require(
                statement.excludes(tensor.name.rpartition(".")[0]),
                reader.op,
                f"{tensor.file}: {tensor.name}",
                need=f"{' and '.join(self.tensors)} in {path}, as {statement.where} says "
                f"({self.name})",
                got=f"dense {tensor.dtype} weights that it does not exclude",
                remedy="config and tensors do not belong together",
            )
        require(
            bool(found),
            reader.op,
            str(reader.path),
            need=f"*.experts.{' and '.join(self.tensors)}, as {statement.where} says ({self.name})",
            got="no quantised experts" if dense is None else f"dense experts alone ({dense.name})",
        )
        return sorted(found, key=module_order)

    def check(
        self,
        reader: CheckpointReader,
        statement: Statement,
        paths: Sequence[str],
        *,
        mmap: bool = False,
    ) -> list[ExpertModule]:
        require(
            not mmap,
            reader.op,
            "mmap",
            need=f"False for {self.name}",
            got=True,
            remedy="its experts are stacked, which copies them",
        )
        tails = expert_tails(reader.names)
        return [
            check_module(reader, statement.config, path, tails[path], self.stored, self.name)
            for path in paths
        ]

    def read(
        self,
        reader: CheckpointReader,
        module: ExpertModule,
        device: torch.device | str = "cpu",
        *,
        experts: Sequence[int] | None = None,
        mmap: bool = False,
    ) -> MoEWeights:
        return read_module(reader, module, self.stored, device, experts)

    def matrix(
        self, reader: CheckpointReader, module: ExpertModule, projection: str, expert: int
    ) -> Decoded:
        stage = published_projections(module.order is not None).index(projection)
        return read_stage(reader, module, self.stored, stage, expert)


GPT_OSS = PublishedContainer(
    "gpt-oss", "MXFP4", StatedAs("mxfp4", ("",), '"quant_method": "mxfp4"')
)

CONTAINERS: tuple[Container, ...] = (
    GPT_OSS,
    PerExpertContainer(
        "compressed-tensors mxfp4-pack-quantized",
        "MXFP4",
        StatedAs(
            "compressed-tensors",
            ("mxfp4-pack-quantized",),
            '"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"',
        ),
        mxfp4_matrix("weight_packed", "weight_scale"),
    ),
    PerExpertContainer(
        "Quark OCP MX",
        "MXFP4",
        StatedAs(
            "quark",
            ("fp4",),
            '"quant_method": "quark", weights `fp4` with `group_size` 32 and `scale_format` e8m0',
        ),
        mxfp4_matrix("weight", "weight_scale"),
    ),
    PerExpertContainer(
        "DeepSeek-V4",
        "MXFP4",
        StatedAs("fp8", ("expert_dtype=fp4",), '"quant_method": "fp8", "expert_dtype": "fp4"'),
        mxfp4_matrix("weight", "scale"),
    ),
    PerExpertContainer(
        "MiMo",
        "MXFP4",
        StatedAs("fp8", ("store_dtype=mxfp4",), '"quant_method": "fp8", "store_dtype": "mxfp4"'),
        mxfp4_matrix("weight", "weight_scale"),
    ),
    PerExpertContainer(
        "ModelOpt NVFP4",
        "NVFP4, cast from MXFP4",
        StatedAs(
            "modelopt",
            ("NVFP4", "W4A16_NVFP4"),
            '"quant_method": "modelopt", "quant_algo": "NVFP4" or "W4A16_NVFP4"; or '
            "`hf_quant_config.json`",
        ),
        nvfp4_cast_matrix("weight", "weight_scale", "weight_scale_2", is_divisor=False),
    ),
    PerExpertContainer(
        "compressed-tensors nvfp4-pack-quantized",
        "NVFP4, cast from MXFP4",
        StatedAs(
            "compressed-tensors",
            ("nvfp4-pack-quantized",),
            '"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"',
        ),
        nvfp4_cast_matrix("weight_packed", "weight_scale", "weight_global_scale", is_divisor=True),
    ),
)
"""Every container that loads."""


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


UNSERVED: tuple[UnservedFormat, ...] = (
    UnservedFormat("MXFP8", "MXFP8", _method("mxfp8")),
    UnservedFormat("ModelOpt MXFP8", "MXFP8", _modelopt("MXFP8")),
    UnservedFormat("compressed-tensors mxfp8-quantized", "MXFP8", _compressed("mxfp8-quantized")),
    UnservedFormat("compressed-tensors pack-quantized", "INT4", _compressed("pack-quantized")),
    UnservedFormat("AWQ", "INT4", _method("awq")),
    UnservedFormat("GPTQ", "INT4", _method("gptq")),
    UnservedFormat("FP8 in blocks", "FP8", _method("fp8")),
    UnservedFormat(
        "ModelOpt FP8", "FP8", _modelopt("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
    ),
    UnservedFormat("compressed-tensors float-quantized", "FP8", _compressed("float-quantized")),
    UnservedFormat("ModelOpt NVFP4 with AWQ", "NVFP4", _modelopt("NVFP4_AWQ")),
    UnservedFormat("ModelOpt W4A8 MXFP4", "MXFP4", _modelopt("W4A8_MXFP4_FP8")),
)
"""Known formats that cannot run; exact NVFP4 is found when its scales are read."""

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

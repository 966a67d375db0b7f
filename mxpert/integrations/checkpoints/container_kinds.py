"""What a container of quantised experts does: finds its modules, checks them, and reads them.

There are two kinds, stacked tensors and one matrix per expert; mxpert.integrations.checkpoints.
containers lists the containers themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...errors import require
from ...formats.gate_up import gate_up_rows
from ...formats.spec import MXFP4
from ...formats.tensor import MXTensor
from ...moe.published_tensors import published_projections
from ...moe.weights import MoEWeights
from ...moe.weights_state import PROJECTIONS
from ..module_paths import module_order
from .expert_matrices import Decoded, Exact, MatrixFormat
from .per_expert import (
    ExpertModule,
    check_module,
    dense_tensor,
    expert_tails,
    linear_of,
    read_matrix,
    read_stage,
    settle,
)
from .published_experts import (
    check_experts,
    expert_modules_of,
    has_gate,
    read_experts,
    read_published_matrix,
    stored_gate_up_order,
)
from .safetensors_files import CONFIG_FILE, CheckpointReader
from .stacked_experts import read_module
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
            ValueError, UnsupportedError: tensors whose content does not fit.
        """

    def settle(
        self, reader: CheckpointReader, module: ExpertModule
    ) -> tuple[ExpertModule, tuple[int, int] | None]:
        """The module that `matrix` takes: in the format that `read` gives its weights.

        Returns:
            The module; of NVFP4, how many experts of both projections are casts of MXFP4.
        """
        return module, None

    @abstractmethod
    def matrix(
        self, reader: CheckpointReader, module: ExpertModule, projection: str, expert: int
    ) -> Exact:
        """One expert's projection [N, K] on the CPU, in the module's gate/up order.

        Args:
            reader: the checkpoint. module: of `settle`. projection: its published name.
            expert: its index.
        """

    @abstractmethod
    def parts(
        self, reader: CheckpointReader, module: ExpertModule, expert: int
    ) -> dict[str, Decoded]:
        """One expert's matrices [N, K] on the CPU: "gate" (where there is one), "up" and "down".

        Args:
            reader: the checkpoint. module: of `check` or `settle`. expert: its index.
        """

    @abstractmethod
    def biases(
        self, reader: CheckpointReader, module: ExpertModule, expert: int
    ) -> dict[str, torch.Tensor]:
        """One expert's biases [N] by part, in their stored dtype; empty without."""


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

    def parts(
        self, reader: CheckpointReader, module: ExpertModule, expert: int
    ) -> dict[str, Decoded]:
        first, second = published_projections(module.order is not None)
        down = read_published_matrix(reader, module.path, second, expert)
        whole = read_published_matrix(reader, module.path, first, expert)
        if module.order is None:
            return {"up": whole, "down": down}
        gate, up = (
            MXTensor(whole.qdata[rows], whole.scale[rows], MXFP4)
            for rows in gate_up_rows(module.order, module.intermediate_size)
        )
        return {"gate": gate, "up": up, "down": down}

    def biases(
        self, reader: CheckpointReader, module: ExpertModule, expert: int
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for projection in published_projections(module.order is not None):
            name = f"{module.path}.{projection}_bias"
            if name not in reader.names:
                continue
            bias = reader.read_row(name, expert)
            if projection == "gate_up_proj" and module.order is not None:
                rows = gate_up_rows(module.order, module.intermediate_size)
                found |= {part: bias[each] for part, each in zip(("gate", "up"), rows, strict=True)}
            else:
                found[projection.removesuffix("_proj")] = bias
        return found


@dataclass(frozen=True)
class PerExpertContainer(Container):
    """One matrix per expert and projection.

    Args:
        suffixes: of the tensors of a matrix, as an example.
        stored: how each matrix is stored, by what the config says of its layer.
    """

    suffixes: tuple[str, ...]
    stored: Callable[[Statement, str], MatrixFormat]

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(f"0.gate_proj.{suffix}" for suffix in self.suffixes)

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
        found = expert_tails(reader.names)
        modules = []
        for path in paths:
            tails = found[path]
            stored = self.stored(statement, linear_of(path, tails))
            modules.append(check_module(reader, statement.config, path, tails, stored, self.name))
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
        return read_module(reader, module, device, experts)

    def settle(
        self, reader: CheckpointReader, module: ExpertModule
    ) -> tuple[ExpertModule, tuple[int, int] | None]:
        return settle(reader, module)

    def matrix(
        self, reader: CheckpointReader, module: ExpertModule, projection: str, expert: int
    ) -> Exact:
        stage = published_projections(module.order is not None).index(projection)
        return read_stage(reader, module, stage, expert)

    def parts(
        self, reader: CheckpointReader, module: ExpertModule, expert: int
    ) -> dict[str, Decoded]:
        assert module.stored is not None  # for the type checker: one matrix per expert
        names = {part: module.matrices[expert, part] for stage in module.stages for part in stage}
        return {part: read_matrix(reader, name, module.stored) for part, name in names.items()}

    def biases(
        self, reader: CheckpointReader, module: ExpertModule, expert: int
    ) -> dict[str, torch.Tensor]:
        return {
            part: reader.read(f"{module.matrices[expert, part]}.bias")
            for stage in module.stages
            for part in stage
            if module.biased.intersection(stage)
        }

"""MoEWeights: the expert weights of one MoE layer, checked at construction."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import weights_state
from .errors import message, require, require_device, require_tensor
from .formats.folding import FoldCertificate, fold_certificate
from .formats.layouts import check_hopper, hopper_can_hold, pack_hopper, unpack_hopper
from .formats.spec import MXFP4
from .formats.tensor import Aggregate, Layout, MXTensor


class GateUpOrder(enum.Enum):
    """Order of the 2F rows of `gate_up_proj`.

    The library never guesses it, because a wrong order gives wrong answers without an error.

    CONCATENATED: F gate rows, then F up rows (DeepSeek, Qwen, Mixtral once stacked).
    INTERLEAVED: gate, up, gate, up, … row by row (gpt-oss checkpoints).
    INTERLEAVED_16: 16 gate rows, 16 up rows, … (as AITER and FlyDSL kernels read them).

    Source:
        The checkpoints of the models that are named above.

    Example:
        >>> gate, up = gate_up_rows(GateUpOrder.INTERLEAVED, 3)
        >>> gate.tolist(), up.tolist()
        ([0, 2, 4], [1, 3, 5])
    """

    CONCATENATED = "concatenated"
    INTERLEAVED = "interleaved"
    INTERLEAVED_16 = "interleaved_16"

    def group(self, intermediate_size: int) -> int:
        """Return g, the number of gate rows before the first up row.

        In every order feature j has its gate at row ``(j // g) * 2g + j % g``, and its up row g
        rows further.
        """
        groups = {
            GateUpOrder.CONCATENATED: intermediate_size,
            GateUpOrder.INTERLEAVED: 1,
            GateUpOrder.INTERLEAVED_16: 16,
        }
        return groups[self]


def gate_up_rows(
    order: GateUpOrder, intermediate_size: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row indices of gate and of up, int64 [F] each, for weights in `order`."""
    feature = torch.arange(intermediate_size, device=device)
    group = order.group(intermediate_size)
    gate = feature // group * (2 * group) + feature % group
    return gate, gate + group


def interleaved_rows(
    order: GateUpOrder, intermediate_size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return row indices [2F] that bring rows in `order` to the order gate, up, gate, up, …"""
    return torch.stack(gate_up_rows(order, intermediate_size, device), 1).flatten()


@dataclass(frozen=True, eq=False, repr=False)
class MoEWeights(Aggregate):
    """MXFP4 weights of one layer's experts.

    Args:
        gate_up_proj: MXFP4 [E, 2F, H], blocks of 32 along H; row order given by `gate_up_order`.
        down_proj: MXFP4 [E, H, F], blocks of 32 along F.
        gate_up_bias: float32 [E, 2F] in the row order of `gate_up_proj`, or None.
        down_bias: float32 [E, H], or None.
        gate_up_order: the order of gate and up rows; required.
        fold_certificates: set by `prepare`: whether each projection folds into e4m3 exactly.
        source_order: set by `prepare`: the order before it rearranged the rows.

    `qdata` and `scale` may be strided views into padded storage; kernels never read outside of the
    logical shape.

    Raises:
        TypeError: a wrong type or dtype, or no gate/up order.
        ValueError: shapes, formats or devices that do not fit together.

    Source:
        The experts of gpt-oss checkpoints (arXiv 2508.10925).

    Example:
        >>> import mxpert
        >>> w = lambda *shape: mxpert.quantize(torch.ones(*shape), "mxfp4")
        >>> weights = MoEWeights(gate_up_proj=w(4, 64, 32), down_proj=w(4, 32, 32),
        ...                      gate_up_order=GateUpOrder.CONCATENATED)
        >>> weights.num_experts, weights.hidden_size, weights.intermediate_size, weights.nbytes
        (4, 32, 32, 6528)
    """

    gate_up_proj: MXTensor
    down_proj: MXTensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_order: GateUpOrder | None = None
    fold_certificates: tuple[FoldCertificate, FoldCertificate] | None = None
    source_order: GateUpOrder | None = None

    def __post_init__(self) -> None:
        op = "MoEWeights"
        if not isinstance(self.gate_up_order, GateUpOrder):
            raise TypeError(
                message(
                    op,
                    "gate_up_order",
                    "a GateUpOrder",
                    repr(self.gate_up_order),
                    "gpt-oss checkpoints are GateUpOrder.INTERLEAVED, stacked gate and up"
                    " projections GateUpOrder.CONCATENATED",
                )
            )
        for name in ("gate_up_proj", "down_proj"):
            projection = getattr(self, name)
            if not isinstance(projection, MXTensor):
                raise TypeError(
                    message(
                        op,
                        name,
                        "an MXTensor",
                        type(projection).__name__,
                        "quantise with mxpert.quantize(w, 'mxfp4')",
                    )
                )
            require(
                projection.format == MXFP4,
                op,
                f"{name}.format",
                need="mxfp4",
                got=projection.format.name,
            )
            require(
                len(projection.shape) == 3,
                op,
                f"{name}.shape",
                need="three dimensions [E, N, K]",
                got=list(projection.shape),
            )
            require(
                projection.axis == -1,
                op,
                f"{name}.axis",
                need=-1,
                got=projection.axis,
                remedy="quantise along the last axis",
            )
        require(
            self.down_proj.layout is self.layout,
            op,
            "down_proj.layout",
            need=self.layout,
            got=self.down_proj.layout,
            remedy="bring both projections into one layout",
        )
        for projection in (self.gate_up_proj, self.down_proj):
            if self.layout is Layout.HOPPER_FRAGMENT:
                check_hopper(projection, op)
        require(
            self.layout is Layout.ROW_MAJOR or self.gate_up_order is GateUpOrder.INTERLEAVED,
            op,
            "gate_up_order",
            need=f"{GateUpOrder.INTERLEAVED} in {self.layout}",
            got=self.gate_up_order,
            remedy="call prepare on ROW_MAJOR weights",
        )
        experts, hidden, intermediate = self.num_experts, self.hidden_size, self.intermediate_size
        require(
            min(experts, hidden, intermediate) > 0,
            op,
            "down_proj.shape",
            need="E, H and F above zero",
            got=list(self.down_proj.shape),
        )
        require(
            tuple(self.gate_up_proj.shape) == (experts, 2 * intermediate, hidden),
            op,
            "gate_up_proj.shape",
            need=f"[E, 2F, H] = {[experts, 2 * intermediate, hidden]}",
            got=list(self.gate_up_proj.shape),
            remedy=f"down_proj [E, H, F] is {list(self.down_proj.shape)}",
        )
        if self.gate_up_order is GateUpOrder.INTERLEAVED_16:
            require(
                intermediate % 16 == 0,
                op,
                "gate_up_order",
                got=intermediate,
                need="intermediate_size divisible by 16 for INTERLEAVED_16",
            )
        require(
            self.down_proj.device == self.device,
            op,
            "down_proj.device",
            need=self.device,
            got=self.down_proj.device,
        )
        for name, width in (("gate_up_bias", 2 * intermediate), ("down_bias", hidden)):
            bias = getattr(self, name)
            if bias is not None:
                require_tensor(
                    bias,
                    op,
                    name,
                    dtype=torch.float32,
                    shape=(experts, width),
                    device=self.device,
                    contiguous=True,
                )

    @property
    def num_experts(self) -> int:
        """E, the number of (local) experts."""
        return self.down_proj.shape[0]

    @property
    def hidden_size(self) -> int:
        """H, the width of the layer's input and output."""
        return self.down_proj.shape[1]

    @property
    def intermediate_size(self) -> int:
        """F, the width between the two projections."""
        return self.down_proj.shape[2]

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.gate_up_proj.device

    @property
    def layout(self) -> Layout:
        """Memory order of both projections."""
        return self.gate_up_proj.layout

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales of both projections."""
        return self.gate_up_proj.nbytes + self.down_proj.nbytes

    def __repr__(self) -> str:
        biases = [name for name in weights_state.BIASES if getattr(self, name) is not None]
        order = self.gate_up_order.name if self.gate_up_order is not None else None
        return (
            f"MoEWeights(num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size},\n"
            f"           gate_up_order={order}, layout={self.layout.name}, biases={biases},\n"
            f"           device='{self.device}', nbytes={self.nbytes})"
        )

    def to(self, device: torch.device | str) -> MoEWeights:
        """Return these weights on `device`, in the layout that they have.

        `prepare` moves weights too, and brings them into the device's fastest layout.

        Args:
            device: where the result lives; tensors that are there already are not copied.

        Returns:
            MoEWeights on `device`.

        Raises:
            ValueError: there is no such device.

        Example:
            >>> import mxpert
            >>> w = lambda *shape: mxpert.quantize(torch.ones(*shape), "mxfp4")
            >>> weights = MoEWeights(gate_up_proj=w(4, 64, 32), down_proj=w(4, 32, 32),
            ...                      gate_up_order=GateUpOrder.CONCATENATED)
            >>> weights.to("meta").device
            device(type='meta')
        """
        device = require_device(device, "MoEWeights.to")
        certificates = self.fold_certificates
        if certificates is not None:
            certificates = (certificates[0].to(device), certificates[1].to(device))
        gate_up_bias, down_bias = (
            bias if bias is None else bias.to(device)
            for bias in (self.gate_up_bias, self.down_bias)
        )
        return replace(
            self,
            gate_up_proj=self.gate_up_proj.to(device),
            down_proj=self.down_proj.to(device),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            fold_certificates=certificates,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors of these weights by name, and their facts under "_extra_state".

        The tensors are the weights' own, not copies. `torch.save` and `torch.load` take the
        dictionary, with ``weights_only=True`` too.

        Returns:
            A dictionary that `from_state_dict` and `load_state_dict` accept: "gate_up_proj.qdata",
            "gate_up_proj.scale", the same of "down_proj", the biases that there are, what a
            prepared layout adds; and "_extra_state" with sizes, layout and gate/up order.

        Example:
            >>> import mxpert
            >>> w = lambda *shape: mxpert.quantize(torch.ones(*shape), "mxfp4")
            >>> weights = MoEWeights(gate_up_proj=w(4, 64, 32), down_proj=w(4, 32, 32),
            ...                      gate_up_order=GateUpOrder.CONCATENATED)
            >>> state = weights.state_dict()
            >>> state["down_proj.scale"].shape, state["_extra_state"]["layout"]
            (torch.Size([4, 32, 1]), 'row_major')
        """
        return weights_state.flatten(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> MoEWeights:
        """Return the weights that `state_dict` described; they share its tensors.

        Args:
            state: what `state_dict` returned.

        Returns:
            MoEWeights.

        Raises:
            TypeError: an entry of the wrong type or dtype.
            ValueError: entries that are missing, unknown, or do not fit together.

        Example:
            >>> import mxpert
            >>> w = lambda *shape: mxpert.quantize(torch.ones(*shape), "mxfp4")
            >>> weights = MoEWeights(gate_up_proj=w(4, 64, 32), down_proj=w(4, 32, 32),
            ...                      gate_up_order=GateUpOrder.CONCATENATED)
            >>> MoEWeights.from_state_dict(weights.state_dict()).num_experts
            4
        """
        return cls._from_state(state, "MoEWeights.from_state_dict")

    @classmethod
    def _from_state(cls, state: Mapping[str, Any], op: str) -> MoEWeights:
        fields = weights_state.build(state, op)
        for name in ("gate_up_order", "source_order"):
            values = [order.value for order in GateUpOrder] + [None] * (name == "source_order")
            require(
                fields[name] in values, op, name, need=f"one of {values}", got=repr(fields[name])
            )
            fields[name] = None if fields[name] is None else GateUpOrder(fields[name])
        return cls(**fields)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy `state` into these weights in place; CUDA graphs that read them stay valid.

        Args:
            state: the `state_dict` of weights with the same sizes, layout, gate/up order and
                biases, on any device.

        Raises:
            TypeError: an entry of the wrong type or dtype.
            ValueError: another size, layout or order, missing or unknown entries, or weights whose
                tensors cannot be written to.

        Example:
            >>> import mxpert
            >>> w = lambda value, *shape: mxpert.quantize(torch.full(shape, value), "mxfp4")
            >>> a, b = (MoEWeights(gate_up_proj=w(value, 4, 64, 32), down_proj=w(value, 4, 32, 32),
            ...                    gate_up_order=GateUpOrder.CONCATENATED) for value in (1.0, 3.0))
            >>> a.load_state_dict(b.state_dict())
            >>> a.down_proj.dequantize().unique().item()
            3.0
        """
        op = "MoEWeights.load_state_dict"
        new = self._from_state(state, op)
        mine, theirs = map(weights_state.identity, (self, new))
        require(
            mine == theirs,
            op,
            "state",
            need=f"weights of {mine}",
            got=theirs,
            remedy="MoEWeights.from_state_dict makes new weights of any kind",
        )
        for name in weights_state.BIASES:
            ours, given = (getattr(weights, name) is not None for weights in (self, new))
            require(
                ours == given,
                op,
                name,
                need="a tensor" if ours else "None",
                got="a tensor" if given else "None",
            )
        require(
            self.device.type != "meta",
            op,
            "weights.device",
            need="a device that holds data",
            got="'meta'",
            remedy="MoEWeights.from_state_dict makes new weights",
        )
        weights_state.copy_into(self.state_dict(), new.state_dict(), op)
        certificates = new.fold_certificates
        if certificates is not None:
            certificates = (certificates[0].to(self.device), certificates[1].to(self.device))
        self.__dict__.update(fold_certificates=certificates, source_order=new.source_order)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write these weights, prepared or not, to one safetensors file.

        The file holds the tensors of `state_dict`, and sizes, layout and gate/up order in its
        header. An existing file is replaced as a whole.

        Args:
            path: the file to write.

        Raises:
            TypeError: `path` is no path.
            ValueError: weights on "meta", or a path that cannot be written.

        Example:
            >>> import mxpert, pathlib, tempfile
            >>> w = lambda *shape: mxpert.quantize(torch.ones(*shape), "mxfp4")
            >>> weights = MoEWeights(gate_up_proj=w(4, 64, 32), down_proj=w(4, 32, 32),
            ...                      gate_up_order=GateUpOrder.CONCATENATED)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     weights.save(pathlib.Path(folder, "layer.safetensors"))
            ...     MoEWeights.load(pathlib.Path(folder, "layer.safetensors")).gate_up_order
            <GateUpOrder.CONCATENATED: 'concatenated'>
        """
        weights_state.write(path, self.state_dict(), "MoEWeights.save")

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu"
    ) -> MoEWeights:
        """Read weights that `save` wrote, in the layout that they were saved in.

        Args:
            path: a file of `save`.
            device: where the weights will live.

        Returns:
            MoEWeights on `device`. Prepared weights need no `prepare`.

        Raises:
            TypeError: `path` is no path.
            ValueError: no such file or device, a file of something else, or a damaged file.

        Example:
            >>> MoEWeights.load("no.safetensors")  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: MoEWeights.load: path — need a file, got 'no.safetensors'; ...
        """
        op = "MoEWeights.load"
        device = require_device(device, op)
        return cls._from_state(weights_state.read(path, op), op).to(device)

    def prepare(self, *, device: torch.device | str, layout: Layout | None = None) -> MoEWeights:
        """Return the weights on `device`, in the layout that its fastest kernels read.

        Call it once, when the model is loaded. The result computes the same function, and
        `unprepare` returns these weights bit for bit. On Hopper the layout is HOPPER_FRAGMENT if
        every block folds into e4m3 exactly; everywhere else it is ROW_MAJOR.

        Args:
            device: where the layer will run.
            layout: the layout to use; None chooses.

        Returns:
            MoEWeights on `device` with `fold_certificates` set. Only the kernels of a prepared
            layout can read it.

        Raises:
            TypeError: `layout` is no Layout.
            ValueError: weights that are prepared already, a layout that cannot hold them exactly,
                or a device that does not exist.

        Example:
            >>> import mxpert
            >>> w = lambda *shape: mxpert.quantize(torch.ones(*shape), "mxfp4")
            >>> weights = MoEWeights(gate_up_proj=w(4, 64, 32), down_proj=w(4, 32, 32),
            ...                      gate_up_order=GateUpOrder.CONCATENATED)
            >>> weights.prepare(device="cpu").layout.name
            'ROW_MAJOR'
        """
        device = require_device(device, "prepare")
        require(
            device.type != "meta",
            "prepare",
            "device",
            need="a device that holds data",
            got="'meta'",
            remedy="load the weights first",
        )
        if not (layout is None or isinstance(layout, Layout)):
            raise TypeError(message("prepare", "layout", "a Layout or None", repr(layout)))
        require(
            self.layout is Layout.ROW_MAJOR,
            "prepare",
            "weights.layout",
            got=self.layout,
            need=Layout.ROW_MAJOR,
            remedy="call unprepare() first",
        )
        gate_up, down = (_dense(p.to(device)) for p in (self.gate_up_proj, self.down_proj))
        biases = [b if b is None else b.to(device) for b in (self.gate_up_bias, self.down_bias)]
        certificates = (fold_certificate(gate_up), fold_certificate(down))
        if layout is None:
            foldable = all(hopper_can_hold(certificate) for certificate in certificates)
            layout = (
                Layout.HOPPER_FRAGMENT
                if foldable and _is_hopper(gate_up.device)
                else Layout.ROW_MAJOR
            )
        moved = replace(
            self,
            gate_up_proj=gate_up,
            down_proj=down,
            gate_up_bias=biases[0],
            down_bias=biases[1],
            fold_certificates=certificates,
        )
        return moved if layout is Layout.ROW_MAJOR else moved._pack_hopper(certificates)

    def _pack_hopper(self, certificates: tuple[FoldCertificate, FoldCertificate]) -> MoEWeights:
        assert self.gate_up_order is not None  # checked at construction
        rows = interleaved_rows(self.gate_up_order, self.intermediate_size, self.device)
        bias = None if self.gate_up_bias is None else self.gate_up_bias[:, rows].contiguous()
        return replace(
            self,
            gate_up_proj=pack_hopper(self.gate_up_proj, certificates[0], rows),
            down_proj=pack_hopper(self.down_proj, certificates[1]),
            gate_up_bias=bias,
            gate_up_order=GateUpOrder.INTERLEAVED,
            source_order=self.gate_up_order,
        )

    def unprepare(self) -> MoEWeights:
        """Return the ROW_MAJOR weights that `prepare` was called on, on the present device."""
        if self.layout is Layout.ROW_MAJOR:
            return replace(self, fold_certificates=None)
        order = self.source_order or GateUpOrder.INTERLEAVED
        rows = interleaved_rows(order, self.intermediate_size, self.device)
        bias = self.gate_up_bias
        if bias is not None:
            bias = torch.empty_like(bias).index_copy_(1, rows, bias)
        return replace(
            self,
            gate_up_proj=unpack_hopper(self.gate_up_proj, rows),
            down_proj=unpack_hopper(self.down_proj),
            gate_up_bias=bias,
            gate_up_order=order,
            source_order=None,
            fold_certificates=None,
        )


def _is_hopper(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def _dense(tensor: MXTensor) -> MXTensor:
    """Contiguous codes and scales: views into padded storage become packed copies."""
    return replace(tensor, qdata=tensor.qdata.contiguous(), scale=tensor.scale.contiguous())

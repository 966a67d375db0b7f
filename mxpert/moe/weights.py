"""MoEWeights: the expert weights of one MoE layer, checked at construction."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError, message, require, require_device, require_tensor
from ..formats.folding import FoldCertificate
from ..formats.gate_up import GateUpOrder as GateUpOrder
from ..formats.gate_up import GateUpOrderLike as GateUpOrderLike
from ..formats.gate_up import gate_up_rows as gate_up_rows
from ..formats.gate_up import interleaved_rows as interleaved_rows
from ..formats.layouts import WeightLayout
from ..formats.spec import MX_BLOCK_SIZE
from ..formats.tensor import Aggregate, Layout, LayoutLike, MXTensor
from ..formats.weight_rounding import RoundingCertificate, WeightRounding, round_to_e4m3
from ..formats.weight_tensor import NVFP4, WeightLike, WeightTensor
from . import prepared_weights, weights_state

_OP = "MoEWeights"
ORDERS = "gpt-oss checkpoints are 'interleaved', stacked gate and up projections 'concatenated'"
"""What an error about the order of rows advises."""


@dataclass(frozen=True, eq=False, repr=False)
class MoEWeights(
    Aggregate,
    tensors=("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"),
    facts=("gate_up_order",),
):
    """Quantised weights of one layer's experts.

    Args:
        gate_up_proj: [E, 2F, H], quantised along H: an MXTensor of MXFP4 or MXFP8 (e4m3), or a
            WeightTensor of NVFP4 or INT4; row order given by `gate_up_order`. Of experts without a
            gate: their up projection [E, F, H].
        down_proj: [E, H, F] in the same format, quantised along F.
        gate_up_bias: float32 [E, 2F] in the row order of `gate_up_proj`, or None; [E, F] without a
            gate.
        down_bias: float32 [E, H], or None.
        gate_up_order: the order of gate and up rows, or its name; None without a gate.
        fold_certificates: set by `prepare`: whether each projection folds into e4m3 exactly.
        source_order: set by `prepare`: the order before it rearranged the rows.
        rounding_certificates: set by `round_weights`: what it has cost each projection.

    `qdata` and `scale` may be strided views into padded storage; kernels never read outside of the
    logical shape.

    Raises:
        TypeError: a wrong type or dtype, or no gate/up order.
        ValueError: shapes, formats or devices that do not fit together; H or F that is no multiple
            of 32.

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

    gate_up_proj: WeightLike
    down_proj: WeightLike
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_order: GateUpOrder | None = None
    fold_certificates: tuple[FoldCertificate, FoldCertificate] | None = None
    source_order: GateUpOrder | None = None
    rounding_certificates: tuple[RoundingCertificate, RoundingCertificate] | None = None

    if TYPE_CHECKING:  # the fields as callers may pass them

        def __init__(
            self,
            gate_up_proj: WeightLike,
            down_proj: WeightLike,
            gate_up_bias: torch.Tensor | None = ...,
            down_bias: torch.Tensor | None = ...,
            gate_up_order: GateUpOrderLike | None = ...,
            fold_certificates: tuple[FoldCertificate, FoldCertificate] | None = ...,
            source_order: GateUpOrder | None = ...,
            rounding_certificates: tuple[RoundingCertificate, RoundingCertificate] | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        weights_state.check_projection(self.gate_up_proj, _OP, "gate_up_proj")
        weights_state.check_projection(self.down_proj, _OP, "down_proj")
        order = parse_order(self.gate_up_order, self.gate_up_proj, self.down_proj, _OP)
        if order is not self.gate_up_order:  # its name was given
            object.__setattr__(self, "gate_up_order", order)
        if isinstance(self.source_order, str):
            source = GateUpOrder.parse(self.source_order, _OP, "source_order", ORDERS)
            object.__setattr__(self, "source_order", source)
        self._check_layout()
        self._check_sizes()

    def _check_layout(self) -> None:
        down, order = self.down_proj.layout, self.gate_up_order
        remedy = "bring both projections into one layout"
        _check(down is self.layout, "down_proj.layout", self.layout, down, remedy)
        own, theirs = self.weight_format, self.down_proj.format.name
        _check(own == theirs, "down_proj.format", f"{own}, as gate_up_proj has", theirs)
        if not isinstance(self.layout, WeightLayout):
            return
        need = f"one of {list(self.layout.formats)} in {self.layout}"
        _check(own in self.layout.formats, "gate_up_proj.format", need, own)
        for projection in (self.gate_up_proj, self.down_proj):
            self.layout.check(projection, _OP)
        wanted = self.layout.gate_up_order
        need, remedy = f"{wanted} in {self.layout}", "call prepare on ROW_MAJOR weights"
        _check(order is wanted, "gate_up_order", need, order, remedy)

    def _check_sizes(self) -> None:
        experts, hidden, inner = self.down_proj.shape
        down, gate_up = list(self.down_proj.shape), list(self.gate_up_proj.shape)
        rows, device = 2 * inner if self.has_gate else inner, self.down_proj.device
        wanted = [experts, rows, hidden]
        _check(min(down) > 0, "down_proj.shape", "E, H and F above zero", down)
        blocks = f"H and F as multiples of {MX_BLOCK_SIZE}"
        _check(
            hidden % MX_BLOCK_SIZE == 0 == inner % MX_BLOCK_SIZE, "down_proj.shape", blocks, down
        )
        need = f"[E, 2F, H] = {wanted}" if self.has_gate else f"[E, F, H] = {wanted}"
        remedy = f"down_proj [E, H, F] is {down}"
        if gate_up == [experts, inner, hidden]:
            remedy += ", and experts without a gate have gate_up_order=None"
        _check(gate_up == wanted, "gate_up_proj.shape", need, gate_up, remedy)
        divisible = self.gate_up_order is not GateUpOrder.INTERLEAVED_16 or inner % 16 == 0
        need = "intermediate_size divisible by 16 for INTERLEAVED_16"
        _check(divisible, "gate_up_order", need, inner)
        _check(device == self.device, "down_proj.device", self.device, device)
        for name, width in (("gate_up_bias", rows), ("down_bias", hidden)):
            bias = getattr(self, name)
            if bias is not None:
                require_tensor(
                    bias,
                    _OP,
                    name,
                    dtype=torch.float32,
                    shape=(experts, width),
                    device=self.device,
                    contiguous=True,
                )

    @property
    def has_gate(self) -> bool:
        """Whether `gate_up_proj` has gate rows, as every activation but ReLU2 needs them."""
        return self.gate_up_order is not None

    @property
    def weight_format(self) -> str:
        """Name of both projections' format, as "mxfp4", "mxfp8_e4m3", "nvfp4" or "int4_g32"."""
        return self.gate_up_proj.format.name

    @property
    def mx_projections(self) -> tuple[MXTensor, MXTensor]:
        """Both projections of MXFP4 or MXFP8 weights; UnsupportedError for other formats."""
        gate_up, down = self.gate_up_proj, self.down_proj
        if not (isinstance(gate_up, MXTensor) and isinstance(down, MXTensor)):
            need, got = "MXFP4 or MXFP8", self.weight_format
            raise UnsupportedError(message(_OP, "weight_format", need, got))
        return gate_up, down

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
            f"           weight_format='{self.weight_format}', gate_up_order={order}, "
            f"layout={self.layout.name}, biases={biases},\n"
            f"{self._rounding}"
            f"           device='{self.device}', nbytes={self.nbytes})"
        )

    @property
    def _rounding(self) -> str:
        found = self.rounding_certificates
        return "" if found is None else f"           rounded: {found[0]}; {found[1]},\n"

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype of the codes; of 4-bit formats two values a byte."""
        return self.down_proj.dtype

    @property
    def ndim(self) -> int:
        """3: both projections are [E, N, K]."""
        return self.down_proj.ndim

    def numel(self) -> int:
        """Number of weights of both projections."""
        return self.gate_up_proj.numel() + self.down_proj.numel()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode both projections, prepared or not.

        Args:
            dtype: float32, bfloat16, float16 or float64.

        Returns:
            gate_up [E, 2F, H], its rows in the order that the weights were made with ([E, F, H]
            without a gate), and down [E, H, F]. `quantize_weights` takes them back.

        Raises:
            TypeError: another dtype.

        Example:
            >>> import mxpert
            >>> weights = mxpert.quantize_weights(torch.ones(4, 64, 32), torch.ones(4, 32, 32),
            ...                                   gate_up_order="concatenated")
            >>> [(tuple(each.shape), each.unique().item()) for each in weights.dequantize()]
            [((4, 64, 32), 1.0), ((4, 32, 32), 1.0)]
        """
        plain = self.unprepare()
        return plain.gate_up_proj.dequantize(dtype), plain.down_proj.dequantize(dtype)

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
            >>> weights = mxpert.quantize_weights(torch.ones(4, 64, 32), torch.ones(4, 32, 32),
            ...                                   gate_up_order="concatenated")
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
            >>> weights = mxpert.quantize_weights(torch.ones(4, 64, 32), torch.ones(4, 32, 32),
            ...                                   gate_up_order="concatenated")
            >>> MoEWeights.from_state_dict(weights.state_dict()).num_experts
            4
        """
        return cls._from_state(state, "MoEWeights.from_state_dict")

    @classmethod
    def _from_state(cls, state: Mapping[str, Any], op: str) -> MoEWeights:
        fields = weights_state.build(state, op)
        for name in ("gate_up_order", "source_order"):
            values = [*(order.value for order in GateUpOrder), None]
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
        remedy = "MoEWeights.from_state_dict makes new weights of any kind"
        require(mine == theirs, op, "state", need=f"weights of {mine}", got=theirs, remedy=remedy)
        for name in weights_state.BIASES:
            ours, given = (
                "None" if getattr(weights, name) is None else "a tensor" for weights in (self, new)
            )
            require(ours == given, op, name, need=ours, got=given)
        remedy = "MoEWeights.from_state_dict makes new weights"
        prepared_weights.check_holds_data(self.device, op, "weights.device", remedy)
        weights_state.copy_into(self.state_dict(), new.state_dict(), op)
        facts = {name: getattr(new, name) for name in ("source_order", "rounding_certificates")}
        self.__dict__.update(fold_certificates=new.to(self.device).fold_certificates, **facts)

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
            >>> weights = mxpert.quantize_weights(torch.ones(4, 64, 32), torch.ones(4, 32, 32),
            ...                                   gate_up_order="concatenated")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     weights.save(pathlib.Path(folder, "layer.safetensors"))
            ...     MoEWeights.load(pathlib.Path(folder, "layer.safetensors")).gate_up_order
            <GateUpOrder.CONCATENATED: 'concatenated'>
        """
        weights_state.write(path, self.state_dict(), "MoEWeights.save")

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu", mmap: bool = False
    ) -> MoEWeights:
        """Read weights that `save` wrote, in the layout that they were saved in.

        Args:
            path: a file of `save`.
            device: where the weights will live.
            mmap: on a CPU, use the file's pages: whoever changes the file changes the weights.

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
        state = weights_state.read(path, op, copy=device.type == "cpu" and not mmap)
        return cls._from_state(state, op).to(device)

    def round_weights(self, weight_rounding: WeightRounding = "e4m3") -> MoEWeights:
        """Return NVFP4 weights rounded to MXFP8, one e4m3 number each; nothing does so by default.

        8-bit matrix units then multiply a weight once, where they need two products for an exact
        NVFP4 weight; MXFP8 has 8.25 bits a weight instead of 4.5, which decoding pays for.
        `rounding_certificates` says what it has cost; `mxpert.formats.round_to_e4m3` has the
        formula.

        Args:
            weight_rounding: "e4m3".

        Returns:
            MoEWeights in MXFP8, on the same device.

        Raises:
            ValueError: another name, another format than NVFP4, or prepared weights.

        Example:
            >>> import mxpert
            >>> weights = mxpert.quantize_weights(torch.randn(4, 64, 32), torch.randn(4, 32, 32),
            ...                                   gate_up_order="concatenated",
            ...                                   weight_format="nvfp4")
            >>> rounded = weights.round_weights("e4m3")
            >>> rounded.weight_format, rounded.rounding_certificates[0].snr_db > 29
            ('mxfp8_e4m3', True)
        """
        op, got = "round_weights", self.weight_format
        require(weight_rounding == "e4m3", op, "weight_rounding", need="e4m3", got=weight_rounding)
        remedy = "other formats are multiplied exactly with 8 bits a weight"
        require(got == NVFP4.name, op, "weights", need=NVFP4.name, got=got, remedy=remedy)
        gate_up, down = self.gate_up_proj, self.down_proj
        assert isinstance(gate_up, WeightTensor)  # for the type checker: NVFP4
        assert isinstance(down, WeightTensor)  # for the type checker: as above
        first, second = round_to_e4m3(gate_up), round_to_e4m3(down)
        return replace(
            self,
            gate_up_proj=first[0],
            down_proj=second[0],
            rounding_certificates=(first[1], second[1]),
        )

    def prepare(
        self,
        *,
        device: torch.device | str,
        layout: LayoutLike | None = None,
        keep_fp8: bool = False,
    ) -> MoEWeights:
        """Return the weights on `device`, in the layout that its fastest kernels read.

        Call it once, when the model is loaded. The result computes the same function, and
        `unprepare` returns these weights bit for bit. The layout is that of the device's own
        backend if it holds these weights exactly, as one with folded scales does where every block
        folds into e4m3. Without such a backend, and without a gate, it is ROW_MAJOR.

        Args:
            device: where the layer will run.
            layout: the layout to use; None chooses.
            keep_fp8: keep an e4m3 copy of MXFP4 weights too, in 2.9 times the memory. GEMMs with
                many rows an expert then decode nothing, for the same result; `explain` says when. A
                file of `save` holds the copy.

        Returns:
            MoEWeights on `device`, of MXFP4 with `fold_certificates` set. Only the kernels of a
            prepared layout can read it.

        Raises:
            TypeError: `layout` is no Layout and no name; `keep_fp8` is no bool.
            ValueError: weights that are prepared already, a layout that cannot hold them exactly,
                or a device that does not exist; `keep_fp8` for weights or a device without it.

        Example:
            >>> import mxpert
            >>> weights = mxpert.quantize_weights(torch.ones(4, 64, 32), torch.ones(4, 32, 32),
            ...                                   gate_up_order="concatenated")
            >>> weights.prepare(device="cpu").layout.name
            'ROW_MAJOR'
        """
        return prepared_weights.prepare(self, require_device(device, "prepare"), layout, keep_fp8)

    def unprepare(self) -> MoEWeights:
        """Return the ROW_MAJOR weights that `prepare` was called on, on the present device."""
        return prepared_weights.unprepare(self)


def _check(condition: bool, argument: str, need: object, got: object, remedy: str = "") -> None:
    require(condition, _OP, argument, need=need, got=got, remedy=remedy)


def parse_order(
    order: GateUpOrderLike | None,
    gate_up_proj: WeightLike | torch.Tensor,
    down_proj: WeightLike | torch.Tensor,
    op: str,
) -> GateUpOrder | None:
    """The order of gate and up rows; None, which stands for no gate, is right for F rows alone."""
    if order is None and gate_up_proj.shape[1] == down_proj.shape[2]:
        return None
    return GateUpOrder.parse(order, op, "gate_up_order", ORDERS)

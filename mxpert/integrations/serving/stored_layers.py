"""A layer's experts as an engine loaded them: matrices in the form of the checkpoint.

An engine has one parameter for each kind of tensor, ``w13_<suffix>`` and ``w2_<suffix>`` with all
local experts; of w13 the gate's share stands before that of up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...errors import message
from ...formats.weight_tensor import WeightTensor
from ..checkpoints.expert_matrices import BadMatrixError, Decoded, Exact, MatrixFormat, Part
from ..checkpoints.stacked_experts import stack_matrices

_SHARES = {"w13": ("gate", "up"), "w2": ("down",)}
_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of INT4; the first that holds all scales of a layer is taken."""


class StoredLayer:
    """Reads one layer, again and again in the format of the first time.

    Args:
        stored: how its matrices are stored.
        op, prefix: what messages start with, and the layer's name.
    """

    def __init__(self, stored: MatrixFormat, op: str, prefix: str) -> None:
        self.stored, self.op, self.prefix = stored, op, prefix
        self._is_settled, self._scale_dtype = False, torch.float32

    @property
    def names(self) -> list[str]:
        """The parameters that a checkpoint fills."""
        return [f"{stem}_{part.suffix}" for stem in _SHARES for part in self.stored.parts]

    @property
    def has_integers(self) -> bool:
        """Whether scales are floats of any dtype, which float32 parameters keep exactly."""
        return any("F32" in part.dtypes and part.shape for part in self.stored.parts)

    def read(self, layer: torch.nn.Module) -> tuple[Exact, Exact]:
        """Both projections, in new memory: [E, 2F, H] with gate rows first, and [E, H, F].

        NVFP4 is MXFP4 where every matrix is a cast of it, and INT4 scales have the narrowest dtype
        that holds all of them: what the first call finds is the format of all later ones.

        Raises:
            ValueError: a tensor whose content does not fit, or a later call with weights that are
                not of the first one's format.
        """
        found = self._projections(layer)
        if found is None:
            if self._is_settled or self.stored.otherwise is None:
                raise ValueError("NVFP4 weights that are no cast of MXFP4, as the loaded ones are")
            self.stored = self.stored.otherwise
            found = self._projections(layer)
        assert found is not None  # for the type checker: the last format decodes all
        if self.has_integers:
            dtypes = (self._scale_dtype,) if self._is_settled else _SCALE_DTYPES
            chosen = next((each for each in dtypes if _hold(each, found)), torch.float32)
            if self._is_settled and chosen is not self._scale_dtype:
                raise ValueError(f"scales that {self._scale_dtype} does not hold exactly")
            self._scale_dtype = chosen
            found = _with_scales(found[0], chosen), _with_scales(found[1], chosen)
        self._is_settled = True
        return found

    def _projections(self, layer: torch.nn.Module) -> tuple[Exact, Exact] | None:
        first = self._projection(layer, "w13")
        second = None if first is None else self._projection(layer, "w2")
        return None if first is None or second is None else (first, second)

    def _projection(self, layer: torch.nn.Module, stem: str) -> Exact | None:
        parts = self.stored.parts
        tensors = [getattr(layer, f"{stem}_{part.suffix}").data for part in parts]
        experts, (num_rows, _) = tensors[0].shape[0], parts[0].sizes(tuple(tensors[0].shape[1:]))
        matrices = (self._matrices(stem, expert, tensors) for expert in range(experts))
        return stack_matrices(matrices, experts, num_rows, tensors[0].device)

    def _matrices(self, stem: str, expert: int, tensors: list[torch.Tensor]) -> Iterator[Decoded]:
        shares = _SHARES[stem]
        for share, name in enumerate(shares):
            own = [
                _share(part, tensor[expert], share, len(shares))
                for part, tensor in zip(self.stored.parts, tensors, strict=True)
            ]
            try:
                yield self.stored.decode(*own)
            except BadMatrixError as bad:
                where = f"{self.prefix}.{stem}_{bad.suffix}[{expert}] ({name})"
                text = message(self.op, where, bad.need, bad.got, bad.remedy)
                raise ValueError(text) from None


def _share(part: Part, tensor: torch.Tensor, share: int, shares: int) -> torch.Tensor:
    """The tensor of one matrix, of those that an engine holds side by side along N."""
    if not part.shape:
        return tensor.reshape(-1)[share]
    axis = next(axis for axis, size in enumerate(part.shape) if size.startswith("N"))
    return tensor.chunk(shares, axis)[share]


def _hold(dtype: torch.dtype, projections: tuple[Exact, Exact]) -> bool:
    """Whether a dtype has all scales exactly."""
    scales = (each.scale for each in projections)
    return all(bool((scale.to(dtype).to(scale.dtype) == scale).all()) for scale in scales)


def _with_scales(projection: Exact, dtype: torch.dtype) -> Exact:
    assert isinstance(projection, WeightTensor)  # for the type checker: it has integers
    return replace(projection, scale=projection.scale.to(dtype))

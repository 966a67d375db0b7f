"""Which experts SGLang's configs describe, and how its parameters hold them until prepared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedError, message
from ...formats.spec import MX_BLOCK_SIZE
from ..checkpoints.expert_matrices import MatrixFormat, Part, mxfp4_matrix, mxfp8_matrix
from ..serving import shares
from ..serving.refusals import FORMATS
from ._plugin import OP

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.quantization.base_config import QuantizationConfig

_INPUT_SCALES = tuple(Part(name, ("F32",), ()) for name in ("input_scale", "input_global_scale"))
_SHAPE = (Part("weight_shape", ("I32",), ("2",)),)


@dataclass(frozen=True)
class Experts:
    """How SGLang's parameters hold a layer's experts.

    Args:
        format: of the weights, for messages: "MXFP4", "MXFP8", "NVFP4" or "INT4".
        stored: how they hold each matrix; None for MXFP4 of ``"quant_method": "mxfp4"``, whose
            parameters kernels read as they are.
        unread: tensors of a checkpoint that nothing is computed with; models of SGLang look for a
            parameter for each tensor.
    """

    format: str
    stored: MatrixFormat | None = None
    unread: tuple[Part, ...] = ()

    @property
    def block(self) -> int:
        """What the sizes of a rank's share are a multiple of."""
        stored = self.stored
        return MX_BLOCK_SIZE if stored is None else math.lcm(MX_BLOCK_SIZE, stored.group)


def experts_of(config: QuantizationConfig, layer: torch.nn.Module, prefix: str) -> Experts | None:
    """Return how a layer's experts are stored; None if the checkpoint leaves them unquantised.

    Args:
        config: SGLang's, under one of the plugin's NAMES. layer: its FusedMoE. prefix: its name.

    Raises:
        UnsupportedError: the experts are quantised to something else.
    """
    return _READERS[config.get_name()](config, layer, prefix)


# Any: each of these functions takes another class of SGLang.
def _mxfp4(config: Any, layer: torch.nn.Module, prefix: str) -> Experts:
    if not config.is_checkpoint_mxfp4_serialized:
        raise UnsupportedError(
            message(
                OP,
                "--quantization mxfp4",
                "a checkpoint with MXFP4 experts",
                "other weights, which SGLang would quantise",
                "quantise the checkpoint first: mxpert quantize",
            )
        )
    return Experts("MXFP4")


def _compressed(config: Any, layer: torch.nn.Module, prefix: str) -> Experts | None:
    config._add_fused_moe_to_target_scheme_map()
    names = (f"{prefix}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    schemes = [config.get_scheme_dict(layer, name) for name in names]
    if any(scheme != schemes[0] for scheme in schemes):
        raise _unsupported(prefix, "other schemes in gate, up and down projections")
    scheme = schemes[0]
    if scheme is None:
        return None
    weights, inputs = scheme.get("weights"), scheme.get("input_activations")
    kind = getattr(weights.type, "value", weights.type)
    found = kind, weights.num_bits, weights.group_size
    if found == ("float", 4, MX_BLOCK_SIZE):
        return Experts("MXFP4", mxfp4_matrix("weight_packed", "weight_scale"), _INPUT_SCALES)
    if found == ("float", 4, 16):
        return Experts("NVFP4", shares.COMPRESSED_NVFP4, _INPUT_SCALES)
    if found == ("float", 8, MX_BLOCK_SIZE):
        return Experts("MXFP8", mxfp8_matrix("weight", "weight_scale"), _INPUT_SCALES)
    stored_as = scheme.get("format") or config.quant_format
    if inputs is None and shares.is_packed_int4(weights, stored_as):
        return Experts("INT4", shares.compressed_int4(weights, prefix, OP), _SHAPE)
    raise _unsupported(prefix, f"a compressed-tensors scheme of {weights}")


def _quark(config: Any, layer: torch.nn.Module, prefix: str) -> Experts | None:
    from sglang.srt.layers.quantization.quark.utils import should_ignore_layer

    excluded = {"ignore": config.exclude_layers, "fused_mapping": config.packed_modules_mapping}
    if should_ignore_layer(prefix, **excluded):
        return None
    matched = config._find_matched_config(prefix, layer)
    weight = matched.get("weight")
    weight = weight[0] if isinstance(weight, list) and len(weight) == 1 else weight
    stated = {} if not isinstance(weight, Mapping) else weight
    found = stated.get("dtype"), stated.get("group_size"), stated.get("scale_format")
    if found != ("fp4", MX_BLOCK_SIZE, "e8m0") or not config.is_prequantized:
        raise _unsupported(prefix, f"a quark scheme of {weight}")
    return Experts("MXFP4", mxfp4_matrix("weight", "weight_scale"), _INPUT_SCALES)


def _modelopt(config: Any, layer: torch.nn.Module, prefix: str) -> Experts | None:
    if config.is_layer_excluded(prefix):
        return None
    if not config.is_checkpoint_nvfp4_serialized or getattr(config, "is_awq", False):
        raise _unsupported(prefix, "weights that SGLang quantises, or NVFP4 with AWQ")
    return Experts("NVFP4", shares.MODELOPT_NVFP4, _INPUT_SCALES)


def _mixed(config: Any, layer: torch.nn.Module, prefix: str) -> Experts | None:
    if config.is_layer_excluded(prefix):
        return None
    algorithm = config._resolve_quant_algo(prefix)
    if algorithm is None:
        return None
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise _unsupported(prefix, f"quant_algo {algorithm!r}")
    return Experts("NVFP4", shares.MODELOPT_NVFP4, _INPUT_SCALES)


def _mxfp8(config: Any, layer: torch.nn.Module, prefix: str) -> Experts | None:
    from sglang.srt.layers.quantization.utils import is_layer_skipped

    fused = config.packed_modules_mapping
    if is_layer_skipped(prefix, config.ignored_layers, fused_mapping=fused):
        return None
    if not config.is_checkpoint_fp8_serialized:
        raise _unsupported(prefix, "weights that SGLang quantises")
    return Experts("MXFP8", mxfp8_matrix("weight", "weight_scale_inv"), _INPUT_SCALES)


def _awq(config: Any, layer: torch.nn.Module, prefix: str) -> Experts | None:
    if any(name in prefix for name in config.modules_to_not_convert or ()):
        return None
    return Experts("INT4", shares.awq(config.full_config, prefix, OP))


def _gptq(config: Any, layer: torch.nn.Module, prefix: str) -> Experts:
    stored = shares.gptq(config.full_config, prefix, OP)
    zeros = Part("qzeros", ("I32",), (f"K/{stored.group}", "N/8"))  # of "sym", which says them
    read = {part.suffix for part in stored.parts}
    order = Part("g_idx", ("I32",), ("K",))
    return Experts("INT4", stored, (order,) if zeros.suffix in read else (order, zeros))


def _unsupported(prefix: str, got: str) -> UnsupportedError:
    remedy = "choose another --moe-runner-backend: SGLang has kernels for these experts"
    return UnsupportedError(message(OP, prefix, FORMATS, got, remedy))


_READERS: dict[str, Callable[[Any, torch.nn.Module, str], Experts | None]] = {
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "compressed_tensors": _compressed,
    "quark": _quark,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _mixed,
    "mxfp8": _mxfp8,
    "awq_marlin": _awq,
    "gptq_marlin": _gptq,
}
"""By the name that a config has itself."""

"""mxpert as an experts implementation of Transformers.

``AutoModelForCausalLM.from_pretrained(path, experts_implementation="mxpert")`` gives a converted
model (see mxpert.convert). bf16 experts are quantised layer by layer after they are loaded. MXFP4
checkpoints (gpt-oss, or written by ``mxpert quantize`` or by a converted model) go from blocks and
scales to prepared weights without being dequantised, and so do experts in other containers beside
dense layers (see docs/which-checkpoints-run.md). With ``expert_parallel=`` (a
mxpert.distributed.ExpertParallel) each rank reads its own experts alone, and quantises those of a
bf16 checkpoint one by one; ``weight_rounding="e4m3"`` rounds NVFP4 weights to one e4m3 each;
``keep_fp8=True`` keeps an FP8 copy of MXFP4 weights on Hopper, for prefill in 8 or 4 bits.
"mxpert" computes with bf16 activations (a16w4); "mxpert_mxfp8" or "mxpert_a8w4", "mxpert_mxfp4" or
"mxpert_a4w4", and "mxpert_fp8_token" with narrower ones.

``import mxpert`` is enough: it registers these names once Transformers' models are imported.
Experts functions and quantisers are added to Transformers' tables, and two methods of
``PreTrainedModel`` are wrapped, ``from_pretrained`` and ``set_experts_implementation``. Both pass
on every call that does not ask for mxpert, with all of its arguments.
"""

from __future__ import annotations

import importlib

from ..errors import UnsupportedError, message
from . import on_import
from .models.expert_modules import MXExperts
from .models.implementations import IMPLEMENTATIONS, NAME
from .on_import import MODELS, experts_forward
from .transformers_versions import INSTALL, check_version

check_version()  # before names that other releases do not have

try:
    from .mxfp4_checkpoints import MXQuantizer
    from .transformers_loading import load_pretrained, set_implementation
except ImportError as error:
    need = "the names that mxpert's loader uses"
    text = message("mxpert.integrations.transformers", "transformers", need, error, INSTALL)
    raise UnsupportedError(text) from error


def register() -> None:
    """Add mxpert to Transformers; a second call changes nothing."""
    on_import.register(importlib.import_module(MODELS))


register()

__all__ = [
    "IMPLEMENTATIONS",
    "NAME",
    "MXExperts",
    "MXQuantizer",
    "experts_forward",
    "load_pretrained",
    "register",
    "set_implementation",
]

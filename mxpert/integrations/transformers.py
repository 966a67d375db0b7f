"""mxpert as an experts implementation of Transformers.

``AutoModelForCausalLM.from_pretrained(path, experts_implementation="mxpert")`` gives a converted
model (see mxpert.convert). bf16 experts are quantised layer by layer after they are loaded. MXFP4
checkpoints (gpt-oss, or written by ``mxpert quantize`` or by a converted model) go from blocks and
scales to prepared weights without being dequantised. With ``expert_parallel=`` (a
mxpert.distributed.ExpertParallel) each rank reads its own experts alone, and quantises those of a
bf16 checkpoint one by one. "mxpert" computes with bf16 activations (a16w4); "mxpert_mxfp8" or
"mxpert_a8w4", "mxpert_mxfp4" or "mxpert_a4w4", and "mxpert_fp8_token" with narrower ones.

``import mxpert`` registers this module once Transformers' models are imported; importing it does so
at once. It adds experts functions and quantisers to Transformers' tables, and wraps two methods of
``PreTrainedModel``: ``from_pretrained`` and ``set_experts_implementation``. Both pass on every call
that does not ask for mxpert, with all of its arguments.
"""

from __future__ import annotations

from .models.expert_modules import MXExperts
from .models.implementations import IMPLEMENTATIONS, NAME
from .transformers_versions import check_version

check_version()  # before names that other releases do not have

from .mxfp4_checkpoints import MXQuantizer  # noqa: E402
from .transformers_loading import experts_forward, register  # noqa: E402

register()

__all__ = ["IMPLEMENTATIONS", "NAME", "MXExperts", "MXQuantizer", "experts_forward", "register"]

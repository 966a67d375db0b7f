"""vLLM plugin: MXFP4 experts of a served model run on mxpert's kernels.

    vllm serve openai/gpt-oss-20b --additional-config '{"mxpert": "a16w4"}'

vLLM finds `register` through the entry point group ``vllm.general_plugins``. Registration puts a
light class in front of each quantisation config that can hold MXFP4 experts. Without the option
every layer gets the method that vLLM's own config gives it.
"""

from __future__ import annotations

NAMES = ("gpt_oss_mxfp4", "mxfp4", "deepseek_v4_fp8", "compressed-tensors", "quark")
"""vLLM's names of the quantisation configs that can hold MXFP4 experts."""


PROBE = "mxpert"
"""Name of a quantisation config that no checkpoint has: see `_start.probe`."""


def register() -> None:
    """Register the configs with vLLM; it may be called several times.

    Nothing is imported beyond what vLLM itself has imported when it loads plugins. Names that
    this version of vLLM does not have are left alone. In a version outside of the supported range
    the configs stay vLLM's, and the option is refused.
    """
    import vllm
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )

    from ._lazy import lazy_config
    from ._start import probe
    from .options import is_supported

    register_quantization_config(PROBE)(probe())
    if is_supported(vllm.__version__):
        for name in NAMES:
            if name in QUANTIZATION_METHODS:
                register_quantization_config(name)(lazy_config(name))

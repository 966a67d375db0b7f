"""vLLM plugin: MXFP4 experts of a served model run on mxpert's kernels.

    vllm serve openai/gpt-oss-20b --additional-config '{"mxpert": "a16w4"}'

vLLM finds `register` through the entry point group ``vllm.general_plugins``. Registration adds a
check of the engine's options. Where they ask for mxpert, the check puts a light class in front of
each quantisation config that can hold MXFP4 experts. Without the option vLLM keeps its own.
"""

from __future__ import annotations

NAMES = ("gpt_oss_mxfp4", "mxfp4", "deepseek_v4_fp8", "compressed-tensors", "quark")
"""vLLM's names of the quantisation configs that can hold MXFP4 experts."""


PROBE = "mxpert"
"""Name of a quantisation config that no checkpoint has: see `_start.probe`."""


def register() -> None:
    """Register the check of an engine's options with vLLM; it may be called several times.

    Nothing is imported beyond what vLLM itself has imported when it loads plugins, or imports next.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config

    from ._start import check_every_model, probe

    register_quantization_config(PROBE)(probe())
    check_every_model()


def serve(wanted: bool) -> None:
    """Put mxpert's configs in front of vLLM's in this process, or take them away again.

    Names that this version of vLLM does not have are left alone.
    """
    from vllm.model_executor.layers import quantization

    from ._lazy import Lazy, lazy_config

    registered = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    for name in NAMES:
        found = registered.get(name)
        ours = isinstance(found, type) and issubclass(found, Lazy)
        if wanted and not ours and name in quantization.QUANTIZATION_METHODS:
            quantization.register_quantization_config(name)(lazy_config(name, found))
        elif ours and not wanted:
            del registered[name]
            if found.replaced is not None:  # another plugin's
                registered[name] = found.replaced

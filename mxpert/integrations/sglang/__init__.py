"""SGLang plugin: MXFP4 experts of a served model run on mxpert's kernels.

    python -m sglang.launch_server --model-path openai/gpt-oss-20b --moe-runner-backend mxpert

SGLang finds `register` through the entry point group ``sglang.srt.plugins``. Without one of the
backends in `BACKENDS` every layer gets the method that SGLang's own config gives it.
"""

from __future__ import annotations

from ..models.implementations import IMPLEMENTATIONS

BACKENDS = IMPLEMENTATIONS
"""Value of ``--moe-runner-backend`` → activation format of the experts: "mxpert" is bf16, and
"mxpert_NAME" any name that the API takes."""

OLDEST, BELOW = (0, 5, 21), (0, 5, 24)
"""Supported versions of SGLang: from OLDEST on, below BELOW."""

OP = "mxpert for SGLang"


def register() -> None:
    """Add the backends to SGLang's registries, and a check of its options.

    SGLang calls it once in each process. Nothing is imported beyond what SGLang's own model
    configuration imports. In a version outside of the supported range the configs stay SGLang's,
    and the check refuses the backends.
    """
    import sglang
    from sglang.srt.arg_groups.choices import add_moe_runner_backend_choices
    from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ..serving.versions import in_range
    from ._lazy import lazy_config, lazy_core
    from ._start import TARGET, check

    HookRegistry.register(TARGET, check, HookType.AFTER)
    add_moe_runner_backend_choices(list(BACKENDS))
    for name in BACKENDS:
        register_moe_runner_core(name, lazy_core)
    on_gpus = "mxfp4" in QUANTIZATION_METHODS
    if on_gpus and in_range(sglang.__version__, OLDEST, BELOW):
        QUANTIZATION_METHODS["mxfp4"] = lazy_config(QUANTIZATION_METHODS["mxfp4"])

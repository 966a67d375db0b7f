"""Registration with SGLang: light objects that import the kernels when a layer needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..models.implementations import IMPLEMENTATIONS

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase

    from ._method import MxpertRunnerCore

ROUNDED = "_e4m3"
"""End of a backend's name that asks for NVFP4 weights rounded to e4m3."""

KEPT = "_keep_fp8"
"""End of a backend's name that asks for FP8 copies of MXFP4 weights."""

BACKENDS = {
    f"{name}{end}": own for end in ("", ROUNDED, KEPT) for name, own in IMPLEMENTATIONS.items()
}
"""Value of ``--moe-runner-backend`` → activation format of the experts: "mxpert" is bf16, and
"mxpert_NAME" any name that the API takes; each of them with ROUNDED or KEPT at its end, too."""

OLDEST, BELOW = (0, 5, 21), (0, 5, 24)
"""Supported versions of SGLang: from OLDEST on, below BELOW."""

OP = "mxpert for SGLang"

NAMES = (
    "mxfp4",
    "compressed-tensors",
    "quark",
    "modelopt_fp4",
    "modelopt_mixed",
    "mxfp8",
    "awq_marlin",
    "gptq_marlin",
)
"""SGLang's names of the quantisation configs that can hold experts as mxpert reads them."""


def register() -> None:
    """Add the backends to SGLang's registries, and a check of its options.

    SGLang calls it once in each process. Nothing is imported beyond what SGLang's own model
    configuration imports. In a version outside of the supported range the configs stay SGLang's,
    and the check refuses the backends.
    """
    import sglang
    from sglang.srt.arg_groups.choices import (
        add_moe_runner_backend_choices,
        add_mxfp8_moe_runner_backend_choices,
    )
    from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ..serving.versions import in_range
    from ._start import TARGET, check

    HookRegistry.register(TARGET, check, HookType.AFTER)
    add_moe_runner_backend_choices(list(BACKENDS))
    add_mxfp8_moe_runner_backend_choices(list(BACKENDS))
    for name in BACKENDS:
        register_moe_runner_core(name, lazy_core)
    if in_range(sglang.__version__, OLDEST, BELOW):
        for name in NAMES:
            if name in QUANTIZATION_METHODS:  # not all of them on every device
                QUANTIZATION_METHODS[name] = lazy_config(QUANTIZATION_METHODS[name])


def lazy_core(config: MoeRunnerConfig) -> MxpertRunnerCore:
    """Return the runner core of a layer; SGLang's registry calls this with a MoeRunnerConfig."""
    from ._start import require_supported

    require_supported()
    from ._method import MxpertRunnerCore

    return MxpertRunnerCore(config)


def lazy_config(in_tree: Any) -> type:  # Any: mypy takes no other variable as a base class
    """Return a config of SGLang with mxpert's method for the experts, if it was asked for."""

    class MxpertConfig(in_tree):
        """SGLang's own answers, except for experts under one of mxpert's backends."""

        def get_quant_method(
            self, layer: torch.nn.Module, prefix: str
        ) -> QuantizeMethodBase | None:
            from sglang.srt.layers.moe.utils import get_moe_runner_backend

            if get_moe_runner_backend().value in BACKENDS:
                from ._method import method_of

                served = method_of(self, layer, prefix)
                if served is not None:
                    return served
            return super().get_quant_method(layer, prefix)

    MxpertConfig.__name__ = MxpertConfig.__qualname__ = f"Mxpert{in_tree.__name__}"
    return MxpertConfig

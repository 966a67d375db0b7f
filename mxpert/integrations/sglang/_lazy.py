"""Light objects for SGLang's registries; they import the plugin when a layer needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import BACKENDS

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase

    from ._method import MxpertRunnerCore


def lazy_core(config: MoeRunnerConfig) -> MxpertRunnerCore:
    """Return the runner core of a layer; SGLang's registry calls this with a MoeRunnerConfig."""
    from ._start import require_supported

    require_supported()
    from ._method import MxpertRunnerCore

    return MxpertRunnerCore(config)


def lazy_config(in_tree: Any) -> type:  # Any: mypy takes no other variable as a base class
    """Return SGLang's MXFP4 config with mxpert's method for the experts, if it was asked for."""

    class MxpertMxfp4Config(in_tree):
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

    return MxpertMxfp4Config

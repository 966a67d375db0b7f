"""Registration with vLLM: light configs that import the kernels when vLLM first uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .options import LATER, NAMES

if TYPE_CHECKING:
    import torch

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


def served_names() -> list[str]:
    """Those of `NAMES` that mxpert serves in this version of vLLM."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    known = QUANTIZATION_METHODS
    return [name for name in NAMES if name in known and LATER.get(name, name) in known]


def serve(wanted: bool) -> None:
    """Put mxpert's configs in front of vLLM's in this process, or take them away again."""
    from vllm.model_executor.layers import quantization

    registered = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    for name in served_names():
        found = registered.get(name)
        ours = isinstance(found, type) and issubclass(found, Lazy)
        if wanted and not ours:
            quantization.register_quantization_config(name)(lazy_config(name, found))
        elif ours and not wanted:
            del registered[name]
            if found.replaced is not None:  # another plugin's
                registered[name] = found.replaced


class Lazy:
    """Base of the stand-ins. replaced: the config that another plugin registered."""

    replaced: type | None = None


def lazy_config(name: str, before: type | None = None) -> type:
    """Return a config class that imports the served config when vLLM first uses it.

    Args:
        name: a member of `NAMES`. before: what was registered under the name, if anything was.

    Returns:
        A subclass of vLLM's QuantizationConfig. `from_config` returns the served config itself, so
        vLLM makes no instance of the stand-in.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    def served() -> Any:
        from ._configs import SERVED

        return SERVED[name]

    class Config(Lazy, QuantizationConfig):
        replaced = before

        def get_name(self) -> str:
            return name

        def get_supported_act_dtypes(self) -> Any:
            return served().get_supported_act_dtypes()

        @classmethod
        def get_min_capability(cls) -> int:
            capability: int = served().get_min_capability()
            return capability

        @staticmethod
        def get_config_filenames() -> Any:
            return served().get_config_filenames()

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return served().from_config(config)

        @classmethod
        def override_quantization_method(cls, *args: object, **kwargs: object) -> str | None:
            name: str | None = served().override_quantization_method(*args, **kwargs)
            return name

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
            raise NotImplementedError("from_config returns the served config")

    Config.__name__ = Config.__qualname__ = f"Mxpert[{name}]"
    return Config

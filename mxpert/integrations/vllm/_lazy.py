"""Stand-ins for vLLM's quantisation configs, light enough to make at plugin time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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

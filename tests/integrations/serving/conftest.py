"""SGLang's Python imports what single layers never use; where it is, that gets stand-ins."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from unittest import mock

import pytest

ABSENT = (
    "soundfile",
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)
"""Torchvision's CPU build is not on the package index; a text model needs none of them."""


def install() -> None:
    """Put stand-ins into sys.modules; nothing that is installed is replaced."""
    from transformers import AutoProcessor  # noqa: F401 - looks for torchvision itself

    for name in ABSENT:
        if name not in sys.modules:
            stub = mock.MagicMock(name=name)
            stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
            stub.__path__, stub.__version__ = [], "0"
            sys.modules[name] = stub


if importlib.util.find_spec("sglang") is not None:
    install()


@pytest.fixture(scope="session")
def sglang_plugin() -> None:
    """The plugin in SGLang's registries, as on a GPU: on a CPU SGLang has no "mxfp4"."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.plugins.hook_registry import HookRegistry

    from mxpert.integrations import sglang as plugin

    QUANTIZATION_METHODS["mxfp4"] = Mxfp4Config
    plugin.register()
    HookRegistry.apply_hooks()


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's older methods and configs ask of a GPU before any weight is there."""
    import torch
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(marlin_utils, "num_compute_units", lambda *_: 1, raising=False)
    if "auto_awq" not in quantization.QUANTIZATION_METHODS:
        from vllm.model_executor.layers.quantization import awq_marlin

        monkeypatch.setattr(awq_marlin, "verify_marlin_supported", lambda *_, **__: None)

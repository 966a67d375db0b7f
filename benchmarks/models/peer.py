"""Transformers' own MXFP4 path under the same model: its kernels are a package of their own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from transformers.integrations import mxfp4

from mxpert.integrations.models.expert_modules import MXExperts
from mxpert.moe.published_tensors import published_expert_tensors

HUB = "kernels-community/gpt-oss-triton-kernels"
PARTS = (
    "matmul_ogs",
    "routing",
    "swiglu",
    "tensor",
    "tensor_details.layout",
    "numerics_details.mxfp",
)


class TransformersMXFP4:
    """Transformers' Mxfp4GptOssExperts with the codes and scales of converted experts."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.modules: list[torch.nn.Module] = []

    @classmethod
    def load(cls) -> TransformersMXFP4 | str:
        """The path, or why it is absent: from the hub where `kernels` is installed, else from an
        installed triton_kernels of the version that Transformers was written for."""
        try:
            return cls(importlib.import_module("kernels").get_kernel(HUB))
        except Exception as error:
            reason = f"kernels: {type(error).__name__}: {error}"
        try:
            package = importlib.import_module("triton_kernels")
            for part in PARTS:
                importlib.import_module(f"triton_kernels.{part}")
            return cls(package)
        except Exception as error:
            text = f"absent: {reason}; triton_kernels: {type(error).__name__}: {error}"
            return " ".join(text.split())[:300]

    def install(self, converted: Sequence[MXExperts]) -> None:
        """Hang these experts and their forward under every MoE block."""
        mxfp4.triton_kernels_hub = self.kernels
        for index, experts in enumerate(converted):
            if index == len(self.modules):
                self.modules.append(self._experts(experts))
            experts.source.replace_by(self.modules[index])
            ((block, _),) = experts.source.places
            block.forward = MethodType(mxfp4.mlp_forward, block)

    def _experts(self, experts: MXExperts) -> torch.nn.Module:
        weights, config = experts.weights, experts.source.module.config
        with torch.device("meta"):
            module = mxfp4.Mxfp4GptOssExperts(config)
        tensors = published_expert_tensors(weights.unprepare(), dtype=torch.float32)
        for name in ("gate_up_proj", "down_proj"):
            mxfp4.swizzle_mxfp4_convertops(
                tensors[f"{name}_blocks"],
                tensors[f"{name}_scales"],
                module,
                name,
                weights.device,
                self.kernels,
            )
            setattr(
                module,
                f"{name}_bias",
                torch.nn.Parameter(tensors[f"{name}_bias"], requires_grad=False),
            )
        return module.eval()

"""What computes the experts: vLLM's own backends, mxpert's formats, or nothing.

What vLLM 0.26 and 0.33 offer for gpt-oss's MXFP4 on Hopper, by the name for ``--moe-backend``:

- ``auto`` takes the first of TRITON (triton_kernels, their routing included), FlashInfer CUTLASS
  and Marlin that runs. vLLM 0.33 has Humming before Marlin there, 0.26 never takes it by itself.
- ``triton_unfused``: triton_kernels behind vLLM's router, the activation in a launch of its own.
- ``flashinfer_cutlass``: needs FlashInfer and its kernels, compiled or from its cubins.
- ``marlin``: bfloat16 activations; FP8 ones are for SM 8.9 and 12 only.
- ``humming``: indexed GEMMs, or grouped ones behind a permutation; the variable
  ``VLLM_HUMMING_INPUT_QUANT_CONFIG`` asks for activations in e4m3.
- ``emulation`` dequantises each call: for tests, so it is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_FP8_TOKEN = {"VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "float8e4m3"}'}
_GROUPED = {"VLLM_HUMMING_MOE_GEMM_TYPE": "grouped"}


@dataclass(frozen=True)
class Backend:
    """One choice of kernels for the experts.

    Args:
        name: as it stands in rows and on the command line.
        moe_backend: vLLM's --moe-backend, for its own.
        activation_format: mxpert's, for ours.
        quantises: format of the activations that one of vLLM's own quantises.
        environment: variables of its process.
        modular: behind vLLM's router, instead of choosing the experts itself.
        computes: False leaves the experts out: a step then takes what the rest of the model takes.
    """

    name: str
    moe_backend: str | None = None
    activation_format: str | None = None
    quantises: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    modular: bool = False
    computes: bool = True

    @property
    def is_ours(self) -> bool:
        return self.activation_format is not None and self.computes

    @property
    def form(self) -> str | None:
        """Format of the activations; None are bfloat16 ones of vLLM's own."""
        return self.activation_format or self.quantises

    @property
    def is_narrow(self) -> bool:
        """Whether the activations have fewer than 16 bits."""
        return self.form not in (None, "a16w4")


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("vllm"),
        Backend("marlin", moe_backend="marlin"),
        Backend("humming", moe_backend="humming"),
        Backend(
            "humming-fp8_token",
            moe_backend="humming",
            quantises="fp8_token",
            environment=_FP8_TOKEN,
        ),
        Backend("mxpert-a16w4", activation_format="a16w4"),
        Backend("mxpert-a8w4", activation_format="a8w4"),
        Backend("mxpert-fp8_token", activation_format="fp8_token"),
        Backend("mxpert-a4w4", activation_format="a4w4"),
        Backend("mxpert-a16w4-modular", activation_format="a16w4", modular=True),
        Backend("no-experts", activation_format="a16w4", computes=False),
        Backend("humming-grouped", moe_backend="humming", environment=_GROUPED),
        Backend(
            "humming-grouped-fp8_token",
            moe_backend="humming",
            quantises="fp8_token",
            environment=_FP8_TOKEN | _GROUPED,
        ),
        Backend("triton", moe_backend="triton"),
        Backend("triton-unfused", moe_backend="triton_unfused"),
        Backend("flashinfer", moe_backend="flashinfer_cutlass"),
    )
}
"""The most important first. "vllm" is what vLLM takes by itself: TRITON on Hopper for gpt-oss.
Those of its own are all that vLLM 0.26 and 0.33 offer, but for emulation; 0.20 has no Humming."""

DEFAULT = tuple(BACKENDS)[:10]
IN_TREE = tuple(name for name, each in BACKENDS.items() if each.activation_format is None)
OURS = tuple(name for name, each in BACKENDS.items() if each.is_ours)

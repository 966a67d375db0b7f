"""What computes the experts: vLLM's own backends, mxpert's formats, or nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """One choice of kernels for the experts.

    Args:
        name: as it stands in rows and on the command line.
        moe_backend: vLLM's --moe-backend, for its own.
        activation_format: mxpert's, for ours.
        modular: behind vLLM's router, instead of choosing the experts itself.
        computes: False leaves the experts out: a step then takes what the rest of the model takes.
    """

    name: str
    moe_backend: str | None = None
    activation_format: str | None = None
    modular: bool = False
    computes: bool = True

    @property
    def is_ours(self) -> bool:
        return self.activation_format is not None and self.computes


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("vllm"),
        Backend("marlin", moe_backend="marlin"),
        Backend("mxpert-a16w4", activation_format="a16w4"),
        Backend("mxpert-a8w4", activation_format="a8w4"),
        Backend("mxpert-fp8_token", activation_format="fp8_token"),
        Backend("mxpert-a4w4", activation_format="a4w4"),
        Backend("mxpert-a16w4-modular", activation_format="a16w4", modular=True),
        Backend("no-experts", activation_format="a16w4", computes=False),
        Backend("triton", moe_backend="triton"),
        Backend("humming", moe_backend="humming"),
    )
}
"""The most important first. "vllm" is what vLLM takes by itself: TRITON on Hopper for gpt-oss."""

DEFAULT = tuple(BACKENDS)[:8]
IN_TREE = tuple(name for name, each in BACKENDS.items() if each.activation_format is None)
OURS = tuple(name for name, each in BACKENDS.items() if each.is_ours)

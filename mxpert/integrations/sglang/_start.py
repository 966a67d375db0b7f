"""The check of a server's options, in the process that reads them, before others start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...moe.prepared_weights import check_keep_fp8
from ..serving.refusals import Refusal, one_line_in_commands, refuse_first
from ..serving.versions import require_version
from ._plugin import BACKENDS, BELOW, KEPT, NAMES, OLDEST, OP

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

TARGET = "sglang.srt.server_args.ServerArgs.check_server_args"
"""Called by SGLang once its options are resolved, before it starts a process."""


def require_supported() -> None:
    """Raise UnsupportedError unless this version of SGLang is in the tested range."""
    import sglang

    otherwise = "choose another --moe-runner-backend"
    require_version(OP, "sglang", sglang.__version__, OLDEST, BELOW, otherwise)


def check(result: object, server_args: ServerArgs) -> None:
    """Refuse a version of SGLang, or options that mxpert does not serve; a hook behind TARGET.

    Args:
        result: what TARGET returned. server_args: SGLang's ServerArgs.

    Raises:
        ValueError, UnsupportedError: one line. In a command of SGLang the process ends with it.
    """
    if server_args.moe_runner_backend in BACKENDS:
        with one_line_in_commands("sglang"):
            require_supported()
            backend = server_args.moe_runner_backend
            check_keep_fp8(backend.endswith(KEPT), BACKENDS[backend], OP, "--moe-runner-backend")
            refuse_first(OP, refused_options(server_args))
            refuse_first(OP, refused_model(server_args))


def refused_model(server_args: ServerArgs) -> Iterator[Refusal]:
    """The quantisation of a model whose experts SGLang would compute itself, without a word."""
    model = getattr(server_args, "_model_config", None)  # made while SGLang resolved its options
    if model is not None and model.quantization not in NAMES:
        got, remedy = repr(model.quantization), "choose another --moe-runner-backend"
        if model.quantization is None:
            got = "a model that is not quantised"
            remedy = f"quantise its experts first (mxpert quantize) or {remedy}"
        yield "the model's quantization", ", ".join(map(repr, NAMES)), got, remedy


def refused_options(server_args: ServerArgs) -> Iterator[Refusal]:
    """Each option of SGLang's ServerArgs that mxpert does not serve."""
    from sglang.srt.arg_groups.model_override_base import resolved_view

    resolved = resolved_view(server_args)

    def given(name: str) -> Any:
        return getattr(resolved, name, None)

    if given("moe_a2a_backend") not in (None, "none"):
        got = repr(given("moe_a2a_backend"))
        need = "'none': tokens in SGLang's standard format"
        yield "--moe-a2a-backend", need, got, "remove --moe-a2a-backend"
    if given("enable_eplb"):
        yield "--enable-eplb", "experts that stay where they are", "true", "remove --enable-eplb"
    if given("enable_lora") or given("lora_paths"):
        yield "--enable-lora", "experts without LoRA", "true", "remove --enable-lora"
    if given("cpu_offload_gb"):
        got, remedy = given("cpu_offload_gb"), "remove --cpu-offload-gb"
        yield "--cpu-offload-gb", "0 (weights on the device)", got, remedy
    if (given("offload_group_size") or 0) > 0:
        got, remedy = given("offload_group_size"), "remove --offload-group-size"
        yield "--offload-group-size", "off (weights on the device)", got, remedy
    if given("enable_deterministic_inference"):
        remedy = "remove --enable-deterministic-inference"
        yield "--enable-deterministic-inference", "off: tiles depend on the batch", "on", remedy

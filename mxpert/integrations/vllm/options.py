"""The plugin's option in ``--additional-config``, and the versions of vLLM that it serves."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import get_args

from ...errors import message, require
from ...formats.names import FORMAT_OF, SHORT_NAMES, OwnFormat
from ...formats.weight_rounding import WeightRounding
from ...moe.prepared_weights import check_keep_fp8
from ..serving.versions import in_range, require_version

KEY = "mxpert"
OLDEST, BELOW = (0, 20, 2), (0, 34, 0)
"""Supported versions of vLLM: from OLDEST on, below BELOW."""

OP = "mxpert for vLLM"

MODELOPT_NAMES = ("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "mxfp8")
AWQ_NAMES, GPTQ_NAMES = ("auto_awq", "awq", "awq_marlin"), ("auto_gptq", "gptq", "gptq_marlin")
NAMES = (
    *("gpt_oss_mxfp4", "mxfp4", "deepseek_v4_fp8", "compressed-tensors", "quark"),
    *MODELOPT_NAMES,
    *AWQ_NAMES,
    *GPTQ_NAMES,
)
"""vLLM's names of the quantisation configs that can hold experts in `FORMATS`."""

LATER = {"awq": "auto_awq", "gptq": "auto_gptq", "mxfp8": "auto_awq", "modelopt_mxfp8": "auto_awq"}
"""Names that are served where vLLM has the second one: before, three were other configs, and
experts of ModelOpt's MXFP8 could not be created."""
_SIMILAR = 0.8
"""Ratio of `difflib` from which a key counts as a misspelt KEY."""


@dataclass(frozen=True)
class Options:
    """What ``--additional-config`` asks for: ``{"mxpert": {"activation_format": …}}``.

    Args:
        activation_format: of the experts; an entry that is a name alone is this one.
        weight_rounding: as `mxpert.load_expert_weights` takes it.
        keep_fp8: as `mxpert.MoEWeights.prepare` takes it.
    """

    activation_format: OwnFormat
    weight_rounding: WeightRounding | None = None
    keep_fp8: bool = False


def requested_options(additional_config: object) -> Options | None:
    """Return what ``--additional-config`` asks for.

    Args:
        additional_config: vLLM's option; other plugins' keys are ignored, and so are objects that
            are no mapping.

    Returns:
        The options; None if the plugin is off.

    Raises:
        ValueError: an unknown format or option, a key that looks like a misspelt "mxpert", or
            `keep_fp8` with bfloat16 activations.

    Example:
        >>> requested_options({"mxpert": "a8w4"})
        Options(activation_format='mxfp8', weight_rounding=None, keep_fp8=False)
        >>> rounded = {"activation_format": "a8w4", "weight_rounding": "e4m3"}
        >>> requested_options({"mxpert": rounded})
        Options(activation_format='mxfp8', weight_rounding='e4m3', keep_fp8=False)
    """
    if not isinstance(additional_config, Mapping):
        return None
    for key in additional_config:
        require(
            key == KEY or not _looks_like_ours(key),
            OP,
            f"--additional-config key {key!r}",
            need=f"{KEY!r}",
            got=repr(key),
            remedy=f"""for example '{{"{KEY}": "a16w4"}}'""",
        )
    asked = additional_config.get(KEY)
    if asked is None:
        return None
    stated = asked if isinstance(asked, Mapping) else {"activation_format": asked}
    name, rounding = stated.get("activation_format"), stated.get("weight_rounding")
    keep_fp8 = stated.get("keep_fp8", False)
    found = FORMAT_OF.get(name) if isinstance(name, str) else None
    known = not stated.keys() - {field.name for field in fields(Options)}
    known = known and rounding in (None, *get_args(WeightRounding)) and type(keep_fp8) is bool
    if found is None or not known:
        names = ", ".join(f"{short!r} ({own!r})" for own, short in SHORT_NAMES.items())
        more = '{"activation_format": one of these, "weight_rounding": "e4m3", "keep_fp8": true}'
        need = f"one of {names}, or {more}"
        raise ValueError(
            message(OP, f"--additional-config {KEY!r}", need, repr(asked), "or no key")
        )
    check_keep_fp8(keep_fp8, found, OP, '"keep_fp8"')
    return Options(found, rounding, keep_fp8)


def require_supported(version: str) -> None:
    """Raise UnsupportedError unless this version of vLLM is in the tested range.

    Example:
        >>> require_supported("0.26.0")
        >>> require_supported("0.11.0")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        mxpert.errors.UnsupportedError: mxpert for vLLM: vllm — need 0.20.2 or newer, below ...
    """
    otherwise = f'remove "{KEY}" from --additional-config'
    require_version(OP, "vllm", version, OLDEST, BELOW, otherwise)


def is_supported(version: str) -> bool:
    """Whether this version of vLLM is in the tested range."""
    return in_range(version, OLDEST, BELOW)


def _looks_like_ours(key: object) -> bool:
    word = str(key).lower()
    return word.startswith(KEY) or bool(difflib.get_close_matches(word, [KEY], cutoff=_SIMILAR))

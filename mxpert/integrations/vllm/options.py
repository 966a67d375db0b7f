"""The plugin's option in ``--additional-config``, and the versions of vLLM that it serves."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ...errors import message, require
from ...formats.names import FORMAT_OF, SHORT_NAMES, OwnFormat
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


def requested_format(additional_config: object) -> OwnFormat | None:
    """Return the activation format that ``--additional-config`` asks for.

    Args:
        additional_config: vLLM's option; other plugins' keys are ignored, and so are objects that
            are no mapping.

    Returns:
        The format's own name; None if the plugin is off.

    Raises:
        ValueError: an unknown format, or a key that looks like a misspelt "mxpert".

    Example:
        >>> requested_format({"mxpert": "a8w4"}), requested_format({})
        ('mxfp8', None)
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
    found = FORMAT_OF.get(asked) if isinstance(asked, str) else None
    if found is None:
        names = ", ".join(f"{short!r} ({own!r})" for own, short in SHORT_NAMES.items())
        raise ValueError(
            message(OP, f"--additional-config {KEY!r}", f"one of {names}", repr(asked), "or no key")
        )
    return found


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

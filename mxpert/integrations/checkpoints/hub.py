"""Checkpoints by the id of a model on the Hugging Face Hub, through huggingface_hub's cache."""

from __future__ import annotations

import re
from pathlib import Path

from ...core.files import exists
from ...errors import message, require

_NAME = r"[A-Za-z0-9_][\w.-]*"
_REVISION = r"[A-Za-z0-9_](?:(?!\.\.)[\w./-])*"
_ID = re.compile(rf"(?P<model>{_NAME}/{_NAME})(?:@(?P<revision>{_REVISION}))?")
_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
"""Weights, config, tokenizer and templates. Other formats of the weights are left out."""


def local_checkpoint(place: Path | str, op: str) -> Path:
    """The folder or file of a checkpoint; that of a Hub id is downloaded to the cache first.

    The cache, offline mode and the token are huggingface_hub's: ``HF_HOME``, ``HF_HUB_OFFLINE``,
    ``HF_TOKEN``. A path that exists takes precedence.

    Args:
        place: a path, or an id of the form ``organisation/model`` (its main branch) or
            ``organisation/model@revision``: a branch, a tag or a whole commit hash.
        op: name of the operation that error messages start with.

    Raises:
        ValueError: an id or revision that the Hub or its cache does not have, or huggingface_hub is
            missing.

    Example:
        >>> local_checkpoint("/nowhere", "load_expert_weights").name
        'nowhere'
    """
    path, name = Path(place), str(place)
    given = _ID.fullmatch(name)
    if given is None or exists(path):
        return path
    need = "a folder, or the id of a model on the Hugging Face Hub"
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError as error:
        got = f"no such folder; ids need huggingface_hub: {error}"
        raise ValueError(message(op, name, need, got, "pip install huggingface_hub")) from error
    try:
        found = snapshot_download(
            given["model"],
            revision=given["revision"],
            local_files_only=constants.HF_HUB_OFFLINE,  # else the files of a commit are asked for
            allow_patterns=[*_PATTERNS],
            ignore_patterns=["*/*"],
        )
    except (OSError, ValueError) as error:  # its errors are OSErrors, those of ids ValueErrors
        reason = " ".join(str(error).split())[:200]
        got = f"no such folder, and {type(error).__name__}: {reason}"
        remedy = "check the name and revision; HF_HUB_OFFLINE=1 takes what is in the cache"
        raise ValueError(message(op, name, need, got, remedy)) from error
    folder = Path(found)
    got = "none of these files" if exists(folder) else "no such snapshot"
    weights = any(folder.glob("*.safetensors"))
    require(weights, op, name, need="safetensors files at its top level", got=got)
    return folder

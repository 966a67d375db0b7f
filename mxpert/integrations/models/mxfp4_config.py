"""The quantisation config of converted models, an object of Transformers' own kind.

This module imports Transformers. It is imported once a model of Transformers is marked or loaded.
"""

from __future__ import annotations

from typing import Any

import transformers


class Mxfp4Config(transformers.Mxfp4Config):
    """Transformers' config of MXFP4 checkpoints that keeps what mxpert states about one.

    It has the same name, because Transformers compares the names of a checkpoint's config and of
    one that is passed to ``from_pretrained``.

    Args:
        modules_to_not_convert: modules that are not in MXFP4.
        mxpert: order of gate and up rows, scale rule and version, as `quantization_config` states.
        loading: attributes that a checkpoint's config takes over while it is loaded.
    """

    def __init__(
        self,
        modules_to_not_convert: list[str] | None = None,
        *,
        mxpert: dict[str, Any] | None = None,
        loading: dict[str, Any] | None = None,
        **options: object,
    ) -> None:
        super().__init__(modules_to_not_convert=modules_to_not_convert, **options)
        self.mxpert = mxpert
        self._loading = loading

    def get_loading_attributes(self) -> dict[str, Any]:
        """Settings that Transformers writes into the config of the checkpoint that it loads."""
        attributes: dict[str, Any] = super().get_loading_attributes()
        return attributes | (self._loading or {})

    def to_dict(self) -> dict[str, Any]:
        """The entry ``quantization_config`` of a config.json."""
        entry: dict[str, Any] = super().to_dict()
        return entry if self.mxpert is None else entry | {"mxpert": self.mxpert}

"""What a checkpoint's config says about the weights of its experts; no tensor is looked at.

Each ``quant_method`` has its own words: groups of compressed-tensors, ``quant_algo`` of ModelOpt,
patterns of Quark, ``expert_dtype`` and ``store_dtype`` beside FP8. `Statement.format_of` brings
them to one name, which a container is chosen by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ...core.files import exists, short
from ...errors import message, require
from .safetensors_files import CONFIG_FILE, CheckpointReader, read_json

HF_QUANT_CONFIG_FILE = "hf_quant_config.json"
"""ModelOpt's own file, beside a ``config.json`` that may say nothing."""

_EXCLUDING = ("ignore", "exclude", "exclude_modules", "ignored_layers", "modules_to_not_convert")
"""Keys of the lists of modules that stay dense."""


@dataclass(frozen=True)
class Statement:
    """The quantisation that a checkpoint states.

    Args:
        method: ``quant_method``.
        entry: the whole entry; of ``hf_quant_config.json`` its ``quantization``.
        config: the checkpoint's ``config.json``.
        where: file and key, for messages.
        op: name of the operation that error messages start with.
    """

    method: str
    entry: Mapping[str, Any]
    config: Mapping[str, Any]
    where: str
    op: str

    @classmethod
    def read(cls, reader: CheckpointReader) -> Statement | None:
        """The statement beside a checkpoint's tensors; None where there is none."""
        file = reader.directory / HF_QUANT_CONFIG_FILE
        producer = read_json(file, reader.op) if exists(file) else None
        return cls.of(reader.config(), producer, str(reader.directory), reader.op)

    @classmethod
    def of(
        cls, config: Mapping[str, Any], producer: Mapping[str, Any] | None, place: str, op: str
    ) -> Statement | None:
        """The statement of a parsed config; None where there is none.

        Args:
            config: ``config.json``; its ``text_config`` may have the entry.
            producer: ``hf_quant_config.json``, which is asked where `config` says nothing.
            place: the checkpoint, for messages.
            op: name of the operation that error messages start with.

        Raises:
            ValueError: an entry that is no object, or has no method.
        """
        for part in config_parts(config):
            if part.get("quantization_config") is not None:
                where = f"{place}/{CONFIG_FILE}: quantization_config"
                entry = _object(part["quantization_config"], where, op)
                method = entry.get("quant_method")
                need = "the name of a method"
                require(isinstance(method, str), op, f"{where}.quant_method", need=need, got=method)
                return cls(plain_method(str(method)), entry, config, where, op)
        if producer is None:
            return None
        where = f"{place}/{HF_QUANT_CONFIG_FILE}: quantization"
        entry = _object(producer.get("quantization"), where, op)
        is_quantized = entry.get("quant_algo") or entry.get("quantized_layers")
        return cls("modelopt", entry, config, where, op) if is_quantized else None

    def format_of(self, linear: str) -> str:
        """The name that this method gives to the format of one linear layer's weight.

        Args:
            linear: full path of the layer, ``model.layers.3.mlp.experts.0.gate_proj``.

        Returns:
            ``mxfp4-pack-quantized`` or ``NVFP4``, for example; "" for a method with one format.

        Raises:
            ValueError: entries that cannot be read.
        """
        find = {
            "compressed-tensors": self._compressed_tensors,
            "quark": self._quark,
            "modelopt": self._modelopt,
            "fp8": self._fp8,
        }.get(self.method)
        return "" if find is None else find(linear)

    def excludes(self, linear: str) -> bool:
        """Whether the config lists this layer, or a module above it, among those that stay dense.

        Example:
            >>> entry = {"quant_method": "modelopt", "ignore": ["model.layers.0.*", "lm_head"]}
            >>> stated = Statement("modelopt", entry, {}, "config.json", "load")
            >>> stated.excludes("model.layers.0.mlp.experts.0.up_proj"), stated.excludes("h.1.up")
            (True, False)
        """
        patterns = [
            pattern
            for key in _EXCLUDING
            for pattern in self._list(self.entry.get(key), key)
            if isinstance(pattern, str)
        ]
        if any(self._names(pattern, linear) for pattern in patterns):
            return True
        layers = self.entry.get("quantized_layers")
        return self.method == "modelopt" and bool(layers) and self._mixed(linear) is None

    def weights_of(self, linear: str) -> dict[str, Any]:
        """What compressed-tensors states of the weights of one linear layer.

        Raises:
            ValueError: entries that cannot be read, or none for this layer.
        """
        group = self._group(linear)
        where = f"{self.where}.config_groups"
        return _object(None if group is None else group.get("weights"), where, self.op)

    def dynamic_of(self, linear: str) -> object:
        """What GPTQModel states of one layer alone, ``dynamic``; None without."""
        for pattern, settings in self._mapping("dynamic").items():
            if self._names(f"re:{pattern.lstrip('+-:')}", linear):
                return {pattern: settings}
        return None

    def _compressed_tensors(self, linear: str) -> str:
        group = self._group(linear)
        stated = None if group is None else group.get("format")
        return str(stated or self.entry.get("format") or "")

    def _group(self, linear: str) -> dict[str, Any] | None:
        """The group of compressed-tensors that a layer belongs to."""
        groups = [
            _object(group, f"{self.where}.config_groups", self.op)
            for group in self._mapping("config_groups").values()
        ]
        targets = [(group, self._list(group.get("targets"), "targets")) for group in groups]
        fits = [
            group
            for group, names in targets
            if any(isinstance(name, str) and self._names(name, linear) for name in names)
        ] or [group for group, names in targets if "Linear" in names]
        return fits[0] if fits else None

    def _quark(self, linear: str) -> str:
        patterns = self._mapping("layer_quant_config")
        fits = [patterns[name] for name in patterns if fnmatchcase(linear, name)]
        chosen = fits[0] if fits else self.entry.get("global_quant_config")
        where = f"{self.where}.global_quant_config"
        weight = _object(chosen, where, self.op).get("weight")
        if isinstance(weight, list) and len(weight) == 1:
            (weight,) = weight
        if not isinstance(weight, Mapping):
            return short(weight)
        dtype, group = weight.get("dtype"), weight.get("group_size")
        scale = weight.get("scale_format")
        stored = self._mapping("export").get("weight_format", "real_quantized")
        parts = [str(dtype)]
        if dtype == "fp4" and (group, scale) != (32, "e8m0"):
            parts.append(f"group_size={short(group)} scale_format={short(scale)}")
        return " ".join(parts if stored == "real_quantized" else [*parts, str(stored)])

    def _modelopt(self, linear: str) -> str:
        mixed = self._mixed(linear) if self.entry.get("quantized_layers") else None
        return str(mixed or self.entry.get("quant_algo") or "").upper()

    def _mixed(self, linear: str) -> str | None:
        """The algorithm that ModelOpt's list of layers has for one, or for a module above it."""
        layers = self._mapping("quantized_layers")
        for name, layer in layers.items():
            if self._names(name, linear):
                where = f"{self.where}.quantized_layers.{name}"
                return str(_object(layer, where, self.op).get("quant_algo"))
        return None

    def _fp8(self, linear: str) -> str:
        for key in ("store_dtype", "expert_dtype"):
            for part in (self.entry, *config_parts(self.config)):
                if part.get(key) in ("fp4", "mxfp4"):
                    return f"{key}={part[key]}"
        return ""

    def _names(self, pattern: str, linear: str) -> bool:
        """Whether a pattern names a layer or a module above it.

        ``re:`` starts a regular expression (compressed-tensors), ``*`` stands for anything, and
        other patterns are whole components of the path.
        """
        if pattern.startswith("re:"):
            try:
                return re.match(pattern.removeprefix("re:"), linear) is not None
            except (re.error, RecursionError, OverflowError) as error:
                text = message(self.op, self.where, "regular expressions", short(error))
                raise ValueError(text) from error
        return fnmatchcase(linear, pattern) or f".{pattern}." in f".{linear}."

    def _mapping(self, key: str) -> Mapping[str, Any]:
        value = self.entry.get(key)
        return {} if value is None else _object(value, f"{self.where}.{key}", self.op)

    def _list(self, value: object, key: str) -> list[Any]:
        wanted = f"{self.where}.{key}"
        fits = value is None or isinstance(value, list)
        require(fits, self.op, wanted, need="a list", got=type(value).__name__)
        return value if isinstance(value, list) else []


def config_parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config and the language part of a multimodal one."""
    yield config
    if isinstance(config.get("text_config"), Mapping):
        yield config["text_config"]


def plain_method(method: str) -> str:
    """A method's name without the suffix that ModelOpt adds for a format."""
    return "modelopt" if method.startswith("modelopt") else method


def _object(value: object, where: str, op: str) -> dict[str, Any]:
    require(isinstance(value, dict), op, where, need="a JSON object", got=short(value))
    assert isinstance(value, dict)  # for the type checker
    return value

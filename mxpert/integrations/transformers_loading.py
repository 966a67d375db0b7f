"""What mxpert adds to Transformers: loading with experts in MXFP4, and the switch to them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import cached_file

from ..core.problem import ActivationFormat
from ..distributed import ExpertParallel
from ..errors import UnsupportedError, message, require
from ..formats.spec import ScaleRule
from ..moe.prepared_weights import check_keep_fp8
from .checkpoints.containers import METHODS
from .checkpoints.published_experts import stored_gate_up_order
from .checkpoints.rounded import check_rounding
from .checkpoints.safetensors_files import CONFIG_FILE, read_json
from .checkpoints.stated_quantization import HF_QUANT_CONFIG_FILE, Statement, plain_method
from .container_checkpoints import (
    ContainerConfig,
    ContainerRequest,
    Fp8ContainerConfig,
    unquantized_config,
)
from .dense_checkpoints import LocalExpertsConfig
from .models.convert import convert, mx_experts
from .models.experts import is_experts
from .models.implementations import IMPLEMENTATIONS, NAME
from .models.saved_config import GPT_OSS
from .mxfp4_checkpoints import LoadRequest, MXQuantizer, require_loaded, run_as_transformers
from .transformers_versions import warn_of_newer

_OP = "from_pretrained"
_MXFP4 = "mxfp4"
_OPTION = f'experts_implementation="{NAME}"'
_HUB_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


def load_pretrained(
    original: Callable[..., Any],
    cls: type[PreTrainedModel],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``from_pretrained``, and the preparation of experts where the call asks for it.

    Args:
        original: Transformers' own function. cls, args, kwargs: of the call. Three more keyword
            arguments are known, ``expert_parallel``, ``weight_rounding`` and ``keep_fp8``.
    """
    expert_parallel = kwargs.pop("expert_parallel", None)
    weight_rounding = kwargs.pop("weight_rounding", None)
    keep_fp8 = kwargs.pop("keep_fp8", False)
    require(
        isinstance(expert_parallel, ExpertParallel | None),
        _OP,
        "expert_parallel",
        need="an ExpertParallel",
        got=type(expert_parallel).__name__,
        error=TypeError,
    )
    stated = _stated_config(cls, args, kwargs)
    asked = _asked(kwargs.get("experts_implementation"), kwargs.get("config"), stated)
    if asked is None:
        ours = {"expert_parallel": expert_parallel, "weight_rounding": weight_rounding}
        ours["keep_fp8"] = keep_fp8 or None
        for name, value in ours.items():
            need, got = f"{_OPTION} with it", repr(kwargs.get("experts_implementation"))
            require(value is None, _OP, name, need=need, got=got)
        _refuse_own_checkpoint(stated)
        return original(cls, *args, **kwargs)
    check_keep_fp8(keep_fp8, IMPLEMENTATIONS[asked], _OP)
    warn_of_newer()
    if kwargs.get("experts_implementation") is None:
        kwargs["experts_implementation"] = asked
    load = functools.partial(original, cls, *args)
    if _is_container(cls, args, kwargs, stated):
        kwargs["config"] = unquantized_config(cls, _place(args, kwargs), kwargs, _hub(kwargs))
        options = expert_parallel, weight_rounding, keep_fp8
        request = ContainerRequest(IMPLEMENTATIONS[asked], *options)
        quantization = _quantization(stated)
        is_fp8 = quantization.get("quant_method") == "fp8"  # of the other layers
        kwargs["quantization_config"] = (
            Fp8ContainerConfig(request, quantization) if is_fp8 else ContainerConfig(request)
        )
        return _load_container(load, kwargs)
    method = _quantization(stated).get("quant_method", "dense weights")
    check_rounding(weight_rounding, method, "the checkpoint", _OP)
    return _load(load, kwargs, asked, stated, expert_parallel, keep_fp8)


def _is_container(
    cls: type[PreTrainedModel],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    stated: Mapping[str, Any],
) -> bool:
    """Whether a checkpoint states a method whose experts `ContainerQuantizer` reads or refuses.

    An argument ``quantization_config`` asks Transformers to read the checkpoint.
    """
    if kwargs.get("quantization_config") is not None or kwargs.get("gguf_file") is not None:
        return False
    quantization = _quantization(stated)
    if not quantization:
        producer = _quant_config_file(cls, args, kwargs)
        return Statement.of({}, producer, str(_place(args, kwargs)), _OP) is not None
    method = str(quantization.get("quant_method"))
    return method != _MXFP4 and plain_method(method) in METHODS


def _load_container(original: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Load with Transformers' own function, experts with the quantiser that `kwargs` names."""
    wants_info = kwargs.pop("output_loading_info", False)
    model, info = original(**kwargs, output_loading_info=True)
    require_loaded(info, [name for name, each in model.named_modules() if is_experts(each)])
    return (model, info) if wants_info else model


def _quant_config_file(
    cls: type[PreTrainedModel], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """ModelOpt's own config of a checkpoint, fetched where that is on the Hub; None without one."""
    place = _place(args, kwargs)
    if place is None or getattr(cls, "config_class", None) is None:
        return None
    file = Path(place, kwargs.get("subfolder") or "", HF_QUANT_CONFIG_FILE)
    if not file.parent.is_dir():
        try:
            file = Path(cached_file(place, HF_QUANT_CONFIG_FILE, **_hub(kwargs)))
        except (OSError, TypeError, ValueError):  # none, or no such checkpoint: see there
            return None
    return read_json(file, _OP) if file.is_file() else None


def _place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The checkpoint that a call names."""
    return args[0] if args else kwargs.get("pretrained_model_name_or_path")


def _hub(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call that say where on the Hub a checkpoint is."""
    return {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}


def _load(
    original: Callable[..., Any],
    kwargs: dict[str, Any],
    asked: str,
    stated: Mapping[str, Any],
    ranks: ExpertParallel | None,
    keep_fp8: bool,
) -> Any:
    """Load with Transformers' own function, then prepare or convert the experts."""
    quantization = _quantization(stated)
    unconverted = _take_mxfp4_options(kwargs)
    activation_format = IMPLEMENTATIONS[asked]
    if quantization.get("quant_method") == _MXFP4:
        require(
            kwargs.get("quantization_config") is None,
            _OP,
            "quantization_config",
            need="none, or a Mxfp4Config, for a checkpoint in MXFP4",
            got=type(kwargs.get("quantization_config")).__name__,
            remedy="leave it out",
        )
        where = f"the checkpoint's {CONFIG_FILE}"
        owner = {**stated, "quantization_config": quantization}
        kwargs["quantization_config"] = LoadRequest(
            activation_format,
            stored_gate_up_order(owner, where, _OP),
            _stated_rule(quantization.get("mxpert")),
            tuple(quantization.get("modules_to_not_convert") or ()),
            ranks,
            keep_fp8,
        ).config()
    elif ranks is not None and not quantization and not _names_another_source(kwargs):
        kwargs["quantization_config"] = LocalExpertsConfig(ranks, keep_fp8=keep_fp8)
    wants_info = kwargs.pop("output_loading_info", False)
    model, info = original(**kwargs, output_loading_info=True)
    if isinstance(getattr(model, "hf_quantizer", None), MXQuantizer):
        model.hf_quantizer.finish(model, info)
    elif not mx_experts(model):
        _convert(model, info, activation_format, unconverted, ranks, keep_fp8)
    return (model, info) if wants_info else model


def _convert(
    model: PreTrainedModel,
    info: Mapping[str, Any],
    activation_format: ActivationFormat,
    unconverted: list[str],
    ranks: ExpertParallel | None,
    keep_fp8: bool,
) -> None:
    """Convert dense experts, except for those that the caller named."""
    experts = {name: each for name, each in model.named_modules() if is_experts(each)}
    require_loaded(info, experts)
    for name, module in experts.items():
        if not should_convert_module(name, unconverted):
            run_as_transformers(model, module)
    convert(model, activation_format, expert_parallel=ranks, keep_fp8=keep_fp8)


def _take_mxfp4_options(kwargs: dict[str, Any]) -> list[str]:
    """Take Transformers' own MXFP4 options out of the arguments: experts are mxpert's to quantise.

    Returns:
        ``modules_to_not_convert``.

    Raises:
        ValueError: dequantised experts are asked for, too.
    """
    given = kwargs.get("quantization_config")
    options = given if isinstance(given, dict) else {} if given is None else given.to_dict()
    if options.get("quant_method") != _MXFP4:
        return []
    require(
        not (options.get("dequantize") or getattr(given, "dequantize", False)),
        _OP,
        "quantization_config.dequantize",
        need=f"False with {_OPTION}",
        got=True,
        remedy="leave one of both out; for dense experts load with it and call "
        "mxpert.integrations.models.convert.restore(model)",
    )
    del kwargs["quantization_config"]
    return list(options.get("modules_to_not_convert") or ())


def _names_another_source(kwargs: Mapping[str, Any]) -> bool:
    """Whether weights come from a GGUF file, or another quantiser is asked for."""
    return any(kwargs.get(name) is not None for name in ("quantization_config", "gguf_file"))


def _asked(option: object, config: object, stated: Mapping[str, Any]) -> str | None:
    """The implementation of mxpert that a call of ``from_pretrained`` asks for.

    Args:
        option: ``experts_implementation``, which may have an entry for each part of a model.
        config: the config object that was passed. stated: the checkpoint's config.
    """
    if option is None and isinstance(config, PreTrainedConfig):
        parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        names = [getattr(part, "_experts_implementation", None) for part in parts]
    elif option is None:
        names = [stated.get("experts_implementation")]
    else:
        names = list(option.values()) if isinstance(option, Mapping) else [option]
    return next((name for name in names if name in IMPLEMENTATIONS), None)


def _stated_config(
    cls: type[PreTrainedModel], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The config that a call of ``from_pretrained`` loads; empty where it is not found.

    Transformers then says so itself.
    """
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        names = "model_type", "quantization_config", "_name_or_path"
        found = {name: getattr(config, name, None) for name in names}
        text = getattr(config, "text_config", None)
        nested = {"quantization_config": getattr(text, "quantization_config", None)}
        return found | {"text_config": nested}
    place = config or _place(args, kwargs)
    if place is None or getattr(cls, "config_class", None) is None:
        return {}
    try:
        file = Path(place, kwargs.get("subfolder") or "", CONFIG_FILE)
        if file.is_file():
            return dict(json.loads(file.read_text("utf-8")))
        return dict(cls.config_class.get_config_dict(place, **_hub(kwargs))[0])
    except (OSError, TypeError, ValueError):
        return {}


def _quantization(stated: Mapping[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of a config or of its text model; empty without one."""
    text = stated.get("text_config")
    for part in (stated, text if isinstance(text, Mapping) else {}):
        found = part.get("quantization_config")
        if found is not None:
            return dict(found if isinstance(found, dict) else found.to_dict())
    return {}


def _stated_rule(stated: object) -> ScaleRule | None:
    """The scale rule that mxpert's entry in a quantisation config states."""
    name = stated.get("scale_rule") if isinstance(stated, Mapping) else None
    return next((rule for rule in ScaleRule if rule.value == name), None)


def _refuse_own_checkpoint(stated: Mapping[str, Any]) -> None:
    """Refuse to load what only mxpert reads with another implementation.

    Transformers takes each MXFP4 checkpoint for one of gpt-oss, whose matrices are transposed.
    """
    if "mxpert" in _quantization(stated) and stated.get("model_type") != GPT_OSS:
        raise UnsupportedError(
            message(
                _OP,
                f"{stated.get('_name_or_path') or 'the checkpoint'}: experts in MXFP4",
                _OPTION,
                "another implementation, or none",
                f"pass {_OPTION}; for dense experts call "
                "mxpert.integrations.models.convert.restore(model) afterwards",
            )
        )


def set_implementation(
    original: Callable[..., Any],
    model: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``set_experts_implementation``, which converts the model where it names mxpert.

    Args:
        original: Transformers' own method. model, args, kwargs: of the call.

    Raises:
        UnsupportedError: another implementation for experts in MXFP4. As `convert`: experts that
            cannot be converted; the implementation is then the one of before.
    """
    option = args[0] if args else kwargs.get("experts_implementation")
    asked = _asked(option, None, {})
    before = [
        (module.config, module.config._experts_implementation)
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    ]
    if asked is None and mx_experts(model):
        require(
            not {name for _, name in before} & set(IMPLEMENTATIONS),
            "set_experts_implementation",
            "experts_implementation",
            need=f"one of {', '.join(IMPLEMENTATIONS)} for experts in MXFP4",
            got=repr(option),
            remedy="mxpert.integrations.models.convert.restore(model) makes them dense",
            error=UnsupportedError,
        )
    result = original(model, *args, **kwargs)
    if asked is not None:
        try:
            convert(model, IMPLEMENTATIONS[asked])
        except BaseException:
            for config, name in before:
                config._experts_implementation_internal = name
            raise
    return result

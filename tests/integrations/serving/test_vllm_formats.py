"""Layers of this vLLM in every format of weights: created, loaded and computed as it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-serving")
import vllm
from vllm.model_executor import parameter
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.v1.worker import workspace

import mxpert
from mxpert import UnsupportedError
from mxpert.integrations.serving import layer_weights
from mxpert.integrations.serving.requantize import requantize_layer_
from mxpert.integrations.vllm import _method as vllm_method
from mxpert.integrations.vllm._configs import SERVED
from mxpert.integrations.vllm._method import ServedMethod
from support.expert_containers import Experts
from support.memory import peak_bytes
from tests.integrations.serving.every_engine import StoredExperts
from tests.integrations.serving.stored_experts import (
    CASES,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    NVFP4,
    PREFIX,
    TOP_K,
    calls_of_loaders,
    check_layer,
    check_rounded,
    experts_of,
    format_of,
    stored_tensors,
    tokens,
)
from tests.integrations.serving.vllm_layers import call, current_config, moe_config, routed_experts

NAMES = {
    "compressed-tensors": "compressed-tensors",
    "Quark": "quark",
    "ModelOpt NVFP4": "modelopt_fp4",
    "ModelOpt cast": "modelopt_fp4",
    "ModelOpt MXFP8": "modelopt_mxfp8",
    "MiniMax": "mxfp8",
    "AWQ": "auto_awq",
    "GPTQ": "auto_gptq",
}
OLDER = {"auto_awq": "awq_marlin", "auto_gptq": "gptq_marlin"}
"""Names before vLLM had the others."""


PREPARED = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
NOT_IN = {"compressed-tensors INT4 zero points": ("0.20.", "0.26.")}
"""Cases that older versions cannot load."""


def name_of(case: str) -> str:
    """vLLM's name of a case's config, in this version."""
    name = next(found for start, found in NAMES.items() if case.startswith(start))
    name = name if name in SERVED else OLDER.get(name, name)
    if name not in SERVED or vllm.__version__.startswith(NOT_IN.get(case, ())):
        pytest.skip(f"vLLM {vllm.__version__} does not load it")
    return name


@pytest.fixture(autouse=True)
def on_a_cpu(without_a_gpu: None) -> None:
    """vLLM's scratch memory."""
    workspace.init_workspace_manager(torch.device("cpu"))


def config_of(case: str, **changes: Any) -> Any:
    name = name_of(case)
    entry = CASES[case].config["quantization_config"] | changes
    entry.setdefault("export", {}) if name == "quark" else None
    if name == "quark":
        entry["export"] = {"kv_cache_group": [], "pack_method": "order"}
        entry["layer_type_quant_config"], entry["exclude"] = {}, ["lm_head"]
        entry["layer_quant_config"] = {}
        scheme = dict(entry["global_quant_config"])
        scheme["weight"] = scheme["weight"] | {"is_dynamic": False}
        entry["global_quant_config"] = scheme | {"input_tensors": None}
    made: Any = SERVED[name]
    return made.from_config(entry)


def created(
    case: str,
    *,
    config: Any = None,
    rank: int = 0,
    ranks: int = 1,
    option: str | dict[str, Any] = "a16w4",
    **changes: Any,
) -> Any:
    """A layer of vLLM's class with the method and the parameters that vLLM gives it."""
    share = INTERMEDIATE // ranks
    moe = moe_config(
        **dict(
            num_experts=EXPERTS,
            num_logical_experts=EXPERTS,
            num_local_experts=EXPERTS,
            experts_per_token=TOP_K,
            hidden_dim=HIDDEN,
            intermediate_size=INTERMEDIATE,
            intermediate_size_per_partition=share,
            routing_method=RoutingMethodType.DeepSeekV3,
            parallel=dict(tp_size=ranks, tp_rank=rank),
        )
        | changes
    )
    layer = routed_experts(moe)
    made = config_of(case) if config is None else config
    unset = ("num_expert_group", "e_score_correction_bias", "custom_routing_function")
    for name, value in {
        **dict.fromkeys((*unset, "_fused_shared_expert_quantizer", "routing_sink"), None),
        "quant_config": made,
        "activation": moe.activation,
        "apply_router_weight_on_input": False,
        "_loaded_expert_biases": set(),
        "hidden_size": HIDDEN,
        "intermediate_size_per_partition": share,
        "moe_parallel_config": moe.moe_parallel_config,
        "global_num_experts": EXPERTS,
        "_map_global_expert_id_to_local_expert_id": lambda expert: expert,
    }.items():
        if not isinstance(getattr(type(layer), name, None), property):  # older versions compute it
            setattr(layer, name, value)
    with (
        current_config({"mxpert": option}),
        mock.patch.object(type(layer), "expert_map", None, create=True),
    ):
        layer.quant_method = method = made.get_quant_method(layer, PREFIX)
        assert isinstance(method, ServedMethod)
        create(layer, method, share)
    return layer


def create(layer: Any, method: Any, share: int) -> None:
    moe = method.moe
    sizes = method.maybe_roundup_sizes(
        moe.hidden_dim, share, torch.bfloat16, moe.moe_parallel_config
    )
    with (
        mock.patch.object(parameter, "get_tensor_model_parallel_rank", return_value=0),
        mock.patch.object(parameter, "get_tensor_model_parallel_world_size", return_value=1),
    ):  # the loader of a layer has its own
        method.create_weights(
            layer=layer,
            num_experts=EXPERTS,
            hidden_size=sizes[0],
            intermediate_size_per_partition=sizes[1],
            params_dtype=torch.bfloat16,
            weight_loader=layer.weight_loader,
            intermediate_size_full=INTERMEDIATE,
            global_num_experts=EXPERTS,
        )


def fill(layer: Any, case: str, experts: Experts, without: str = "") -> None:
    """Through vLLM's loader, as its models call it."""
    for name, tensor, shard, expert in calls_of_loaders(stored_tensors(case, experts)):
        found = getattr(layer, name, None)
        if found is None or f"{name}[{expert}]" == without:
            continue  # models of vLLM skip tensors that have no parameter
        whole = f"{PREFIX}.{name}"
        found.weight_loader(found, tensor, whole, shard_id=shard, expert_id=expert)


def process(layer: Any) -> torch.Tensor:
    """Prepare the layer and run it."""
    with mock.patch.object(type(layer), "expert_map", None, create=True):
        layer.quant_method.process_weights_after_loading(layer)
        y: torch.Tensor = call(layer.quant_method, layer, *tokens())
    return y


def weights_of(layer: Any) -> mxpert.MoEWeights:
    weights: mxpert.MoEWeights = layer.quant_method.moe_kernel.fused_experts.layer.weights
    return weights


def admit(layer: Any, max_tokens: int) -> None:
    """Let vLLM schedule batches of this size."""
    layer.quant_method.max_tokens = max_tokens


def recreate(layer: Any) -> None:
    """Fresh parameters in place of the prepared ones, as in vLLM's reload."""
    for name in dict(layer.named_parameters()):
        delattr(layer, name)
    create(layer, layer.quant_method, INTERMEDIATE)


class TestStoredExperts(StoredExperts):
    created, fill = staticmethod(created), staticmethod(fill)
    process, weights_of = staticmethod(process), staticmethod(weights_of)
    admit, recreate = staticmethod(admit), staticmethod(recreate)
    kept: ClassVar = {"option": {"activation_format": "a8w4", "keep_fp8": True}}
    rounded: ClassVar = {"option": {"activation_format": "a16w4", "weight_rounding": "e4m3"}}


@pytest.mark.parametrize("activation_format", ["a8w4", "a4w4", "fp8_token"])
@pytest.mark.parametrize("case", ["ModelOpt NVFP4", "AWQ g128", "compressed-tensors MXFP8"])
def test_the_option_chooses_the_activations(case: str, activation_format: str) -> None:
    layer = created(case, option=activation_format)
    fill(layer, case, experts_of(case))
    y = process(layer)
    x, *routing = tokens()
    options: Any = dict(activation="silu", activation_format=activation_format)
    assert torch.equal(y, mxpert.fused_moe(x, weights_of(layer), *routing, **options))
    assert not torch.equal(y, mxpert.fused_moe(x, weights_of(layer), *routing, activation="silu"))


ROUNDED = {"activation_format": "a8w4", "weight_rounding": "e4m3"}


@pytest.mark.parametrize("case", NVFP4)
def test_nvfp4_is_rounded_on_request(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """And again by a reload; the log says it."""
    layer = created(case, option=ROUNDED)
    for seed in (0, 9):
        experts = experts_of(case, seed=seed)
        fill(layer, case, experts)
        with mock.patch.object(vllm_method.logger, "info_once") as log:
            y = process(layer)
        check_rounded(weights_of(layer), y, experts, "a8w4")
        recreate(layer)
        if seed == 0:
            said, *arguments = log.call_args.args
            assert "NVFP4 (rounded to e4m3) experts" in said % tuple(arguments)


@pytest.mark.parametrize("case", CASES)
def test_the_parameters_are_the_prepared_tensors(case: str) -> None:
    layer = created(case)
    fill(layer, case, experts_of(case))
    process(layer)
    weights, parameters = weights_of(layer), dict(layer.named_parameters())
    others = [parameters[name].nbytes for name in set(parameters) - set(PREPARED)]
    assert sum(others) < weights.nbytes / 8  # scales of inputs, biases that are zero, and the like
    assert parameters["w13_weight"].data_ptr() == weights.gate_up_proj.qdata.data_ptr()
    assert parameters["w2_weight_scale"].data_ptr() == weights.down_proj.scale.data_ptr()


@pytest.mark.parametrize("case", CASES)
def test_a_reload_writes_into_the_same_tensors(case: str) -> None:
    layer, second = created(case), experts_of(case, seed=9)
    fill(layer, case, experts_of(case))
    process(layer)
    held, addresses = weights_of(layer), addresses_of(layer)
    recreate(layer)
    fill(layer, case, second)
    check_layer(held, process(layer), second)
    assert addresses_of(layer) == addresses


def addresses_of(layer: Any) -> list[int]:
    return [getattr(layer, name).data_ptr() for name in PREPARED]


TRAINED = ("ModelOpt NVFP4", "compressed-tensors MXFP8", "compressed-tensors INT4 g32")


@pytest.mark.parametrize("case", TRAINED)
def test_a_trainers_weights_are_quantised_in_place(case: str) -> None:
    layer, generator = created(case), torch.Generator().manual_seed(3)
    fill(layer, case, experts_of(case))
    process(layer)
    weights, addresses = weights_of(layer), addresses_of(layer)
    shapes = (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    dense = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    with mock.patch.object(type(layer), "expert_map", None, create=True):
        requantize_layer_(layer, *dense)
    wanted: Any = mxpert.quantize_weights(
        *dense, gate_up_order="concatenated", weight_format=format_of(case)
    )
    assert addresses_of(layer) == addresses
    for held, found in (
        (weights.gate_up_proj, wanted.gate_up_proj),
        (weights.down_proj, wanted.down_proj),
    ):
        assert torch.equal(held.qdata, found.qdata)
        assert torch.equal(held.scale, found.scale)


@pytest.mark.parametrize("case", ["ModelOpt cast", "compressed-tensors INT4 g32"])
def test_a_reload_in_another_format_is_refused(case: str) -> None:
    """NVFP4 that is no cast after one that is, scales that need more bits: NaN from then on."""
    layer = created(case)
    fill(layer, case, experts_of(case))
    process(layer)
    recreate(layer)
    other, said = "ModelOpt NVFP4", "no cast of MXFP4"
    if case != "ModelOpt cast":
        other, said = case, r"scales that torch\.bfloat16 does not hold"
    fill(layer, other, experts_of(other))
    if other == case:
        layer.w13_weight_scale.data[1, 2, 0] = 1 + 2**-20
    with pytest.raises(ValueError, match=f"reloaded weights — need .*{said}"):
        process(layer)
    x, *routing = tokens()
    weights = weights_of(layer)
    assert mxpert.fused_moe(x, weights, *routing, activation="silu").isnan().all()


@pytest.mark.parametrize("case", CASES)
def test_tensors_that_a_checkpoint_lacks_are_named(case: str) -> None:
    layer = created(case)
    names = [name for name, *_ in calls_of_loaders(stored_tensors(case, experts_of(case)))]
    for name in sorted(set(names)):
        unread = ("input", "shape", "g_idx", *(("qzeros",) if case.startswith("GPTQ") else ()))
        if any(each in name for each in unread):
            continue  # nothing that the layer computes with
        layer = created(case)
        fill(layer, case, experts_of(case), without=f"{name}[2]")
        with pytest.raises(ValueError, match=rf"none for {PREFIX}\.{name}\[2\]"):
            process(layer)


def test_a_global_scale_that_is_no_number_is_named() -> None:
    case = "ModelOpt NVFP4"
    layer = created(case)
    fill(layer, case, experts_of(case))
    layer.w13_weight_scale_2.data[3, 1] = float("nan")
    with pytest.raises(ValueError, match=r"w13_weight_scale_2\[3\] \(up\) — need a positive"):
        process(layer)


@pytest.mark.parametrize("case", ["AWQ g128", "GPTQ g128", "compressed-tensors INT4 g128"])
def test_scales_are_those_of_the_checkpoint(case: str) -> None:
    """float16 scales stay, whatever the model's dtype; float32 where 16 bits do not hold them."""
    for wide in (False, True):
        layer = created(case)
        fill(layer, case, experts_of(case))
        name = "w2_weight_scale" if case.startswith("compressed") else "w2_scales"
        if wide:
            getattr(layer, name).data[0, 0, 0] = 1 + 2**-20
        process(layer)
        weights = weights_of(layer)
        found = {weights.gate_up_proj.scale.dtype, weights.down_proj.scale.dtype}
        assert found == {torch.float32 if wide else torch.float16}


class Refused(NamedTuple):
    """A change of a case, and what the refusal says."""

    case: str
    said: str
    stated: dict[str, Any] = {}  # noqa: RUF012 - it is not changed
    moe: dict[str, Any] = {}  # noqa: RUF012
    ranks: int = 1


REFUSED = [
    Refused("AWQ g128", "bits — need 4|num_bits", {"bits": 8}),
    Refused("AWQ g128", "version — need 'gemm', got 'gemv'", {"version": "gemv"}),
    Refused("AWQ g128", "group_size — need 32 or 64 or 128, got 16", {"group_size": 16}),
    Refused("GPTQ g128", "desc_act — need False, got True|desc_act=True", {"desc_act": True}),
    Refused("GPTQ g128", "checkpoint_format — need", {"checkpoint_format": "marlin"}),
    Refused("GPTQ g128", "dynamic — need", {"dynamic": {r"+:.*\.0\.gate_proj": {"bits": 8}}}),
    Refused("AWQ g128", "INT4 without biases, got biases", moe={"has_bias": True}),
    Refused("ModelOpt NVFP4", "NVFP4 without biases", moe={"has_bias": True}),
    Refused(
        "compressed-tensors INT4 g32",
        "gate rows before up rows in INT4, got swigluoai",
        moe={"activation": MoEActivation.SWIGLUOAI},
    ),
    Refused("AWQ g128", "need a multiple of 128 columns for each rank, got 64", ranks=4),
    Refused("AWQ g128", "hidden_size — need a multiple of the group, 128", moe={"hidden_dim": 96}),
]


@pytest.mark.parametrize("case", NOT_IN)
def test_what_an_older_vllm_cannot_load_is_refused(case: str) -> None:
    layer, known = routed_experts(moe_config()), vllm.__version__
    made: Any = SERVED["compressed-tensors"]
    config = made.from_config(CASES[case].config["quantization_config"])
    if not known.startswith(NOT_IN[case]):
        assert config.experts(layer, PREFIX) is not None
        return
    with pytest.raises(UnsupportedError, match=r"need vllm 0\.\d\d or newer for .*; install it"):
        config.experts(layer, PREFIX)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.said[:30])
def test_what_is_not_served_is_refused_in_one_line(refused: Refused) -> None:
    def built() -> None:
        config = config_of(refused.case, **refused.stated)
        created(refused.case, config=config, ranks=refused.ranks, **refused.moe)

    refusal = UnsupportedError, ValueError  # the second of vLLM's own config
    with pytest.raises(refusal, match=refused.said) as error:
        built()
    assert "\n" not in str(error.value)


def test_biases_in_a_gptq_checkpoint_are_refused() -> None:
    layer, case = created("GPTQ g128"), "GPTQ g128"
    if not hasattr(layer, "w13_bias"):
        pytest.skip(f"vLLM {vllm.__version__} does not load them")
    fill(layer, case, experts_of(case))
    bias = torch.ones(INTERMEDIATE)
    name = f"{PREFIX}.w13_bias"
    layer.w13_bias.weight_loader(layer.w13_bias, bias, name, shard_id="w1", expert_id=0)
    with pytest.raises(UnsupportedError, match="need INT4 experts without biases, got w13_bias"):
        process(layer)


OTHERS = {
    "FP8 of ModelOpt": ("modelopt_mixed", {"quant_algo": "FP8"}, "quant_algo 'FP8'"),
    "a layer in NVFP4": ("modelopt_mixed", {"quant_algo": "NVFP4", "group_size": 16}, ""),
    "no such layer": ("modelopt_mixed", None, ""),
}


@pytest.mark.parametrize("case", OTHERS)
def test_modelopts_lists_of_layers(case: str) -> None:
    name, stated, said = OTHERS[case]
    layers = {"model.layers.3.mlp.experts.0.gate_proj": {"quant_algo": "NVFP4"}}
    if stated is not None:
        layers[f"{PREFIX}.0.gate_proj"] = stated
    entry = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    made: Any = SERVED[name]
    config = made.from_config(entry)
    layer = SimpleNamespace(moe_config=moe_config())
    if said:
        with pytest.raises(UnsupportedError, match=f"{PREFIX} — need experts in .*{said}"):
            config.experts(layer, PREFIX)
        return
    found = config.experts(layer, PREFIX)
    assert (found is None) == (stated is None)
    assert found is None or found.format == "NVFP4"


EXCLUDED = {
    "compressed-tensors INT4 g32": {"ignore": ["re:.*layers.0.mlp.experts.*"]},
    "ModelOpt NVFP4": {"ignore": ["model.layers.0.mlp.experts*"]},
    "ModelOpt MXFP8": {"ignore": ["model.layers.0.mlp.experts*"]},
    "MiniMax MXFP8": {"ignored_layers": ["model.layers.0.mlp.experts"]},
    "AWQ g128": {"modules_to_not_convert": ["layers.0.mlp"]},
    "GPTQ g128": {"dynamic": {r"-:.*layers\.0\.mlp.*": {}}},
}


@pytest.mark.parametrize("case", EXCLUDED)
def test_experts_that_stay_dense_are_left_to_vllm(case: str) -> None:
    layer = routed_experts()
    config = config_of(case, **EXCLUDED[case])
    assert config.experts(layer, PREFIX) is None
    assert config.experts(layer, "model.layers.1.mlp.experts") is not None


def test_a_layer_is_prepared_without_a_second_one_in_memory() -> None:
    """Peak while a loaded model is read and prepared: two layers at most, and nothing dequantised.

    A layer in bfloat16 would be four.
    """
    case, layers = "ModelOpt NVFP4", 6
    experts = experts_of(case)

    def loaded() -> list[Any]:
        made = [created(case) for _ in range(layers)]
        for layer in made:
            fill(layer, case, experts)
        return made

    def prepare(made: list[Any]) -> None:
        for layer in made:
            with mock.patch.object(type(layer), "expert_map", None, create=True):
                layer.quant_method.process_weights_after_loading(layer)

    matrices, kept, read = 3 * EXPERTS * HIDDEN * INTERMEDIATE, [], layer_weights._loaded
    layer_bytes = matrices // 2 + matrices // 16

    def keeping(layer: Any, *rest: Any) -> Any:  # planted
        kept.append(list(layer.parameters()))
        return read(layer, *rest)

    with mock.patch.object(ServedMethod, "_warm_up"):
        peak = peak_bytes(loaded, prepare)
        with mock.patch.object(layer_weights, "_loaded", keeping):
            planted_peak = peak_bytes(loaded, prepare)
    assert 0 < peak < 2 * layer_bytes
    assert planted_peak > (layers - 1) * layer_bytes

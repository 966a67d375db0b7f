"""Layers of this SGLang in every format of weights: created, loaded and computed as it does."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang's Python: make test-serving")
from sglang.srt.layers.moe.fused_moe_triton import layer as moe_layer
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.awq import awq

import mxpert
from mxpert import UnsupportedError
from mxpert.integrations.sglang import _method as served
from mxpert.testing.numerics import assert_exact
from support.expert_containers import Experts
from support.memory import peak_bytes
from tests.integrations.serving.every_engine import StoredExperts
from tests.integrations.serving.stored_experts import (
    CASES,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    NOT_IN_SGLANG,
    NVFP4,
    PREFIX,
    TOP_K,
    calls_of_loaders,
    check_layer,
    check_rounded,
    experts_of,
    share_of,
    stored_tensors,
    tokens,
)
from tests.integrations.serving.test_sglang_layers import call, choose, config_of, server

__all__ = ["server"]  # a fixture of every test
pytestmark = pytest.mark.usefixtures("sglang_plugin")

NAMES = {
    "compressed-tensors": "compressed-tensors",
    "Quark": "quark",
    "ModelOpt NVFP4": "modelopt_fp4",
    "ModelOpt cast": "modelopt_fp4",
    "MiniMax": "mxfp8",
    "AWQ": "awq_marlin",
    "GPTQ": "gptq_marlin",
}
SERVED = [case for case in CASES if case not in NOT_IN_SGLANG]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's AWQ asks of a GPU, and where it keeps experts that move."""
    monkeypatch.setattr(awq, "verify_marlin_supported", lambda *_, **__: None)
    for name in ("get_global_expert_location_metadata",):
        monkeypatch.setattr(moe_layer, name, lambda: None)


def quantization_of(case: str, **changes: Any) -> Any:
    """SGLang's config of a case, through the plugin's."""
    name = next(found for start, found in NAMES.items() if case.startswith(start))
    entry = CASES[case].config["quantization_config"] | changes
    if name == "mxfp8":
        entry = {"activation_scheme": "dynamic", **entry}
    if name == "quark":
        scheme = dict(entry["global_quant_config"])
        scheme["weight"] = scheme["weight"] | {"is_dynamic": False}
        inputs = scheme["weight"] | {"is_dynamic": True}
        entry |= {
            "global_quant_config": scheme | {"input_tensors": inputs, "output_tensors": None},
            "export": {"kv_cache_group": [], "pack_method": "order"},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": ["lm_head"],
            "packed_modules_mapping": {},
        }
    return QUANTIZATION_METHODS[name].from_config(entry)


def created(
    case: str,
    *,
    backend: str = "mxpert",
    quantization: Any = None,
    rank: int = 0,
    ranks: int = 1,
    with_bias: bool = False,
    **changes: Any,
) -> Any:
    """A layer of SGLang's class with the method and the parameters that SGLang gives it."""
    if case in NOT_IN_SGLANG:
        pytest.skip("SGLang's config of it is none of the plugin's")
    choose(backend)
    share = INTERMEDIATE // ranks
    sizes = dict(num_experts=EXPERTS, num_local_experts=EXPERTS, hidden_size=HIDDEN, top_k=TOP_K)
    sizes["intermediate_size_per_partition"] = share
    config = config_of(**(sizes | changes))
    layer = moe_layer.FusedMoE.__new__(moe_layer.FusedMoE)
    torch.nn.Module.__init__(layer)
    layer.moe_runner_config, config.layer = config, layer
    made = quantization_of(case) if quantization is None else quantization
    for name, value in {
        "quant_config": made,
        "moe_tp_size": ranks,
        "moe_tp_rank": rank,
        "use_presharded_weights": False,
        "use_triton_kernels": False,
        "use_flashinfer_trtllm_moe": False,
        "use_flashinfer_mxfp4_moe": False,
        "weight_load_method": None,
        "num_fused_shared_experts": 0,
        "_has_fused_shared": False,
        "_num_local_routed": EXPERTS,
        "_num_global_routed": EXPERTS,
        "_expert_storage_rank": 0,
        "moe_ep_rank": 0,
        "moe_ep_size": 1,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "uses_expert_location": False,
        "quant_method": None,
    }.items():
        if not isinstance(getattr(type(layer), name, None), property):
            setattr(layer, name, value)
    layer.quant_method = method = made.get_quant_method(layer, PREFIX)
    assert isinstance(method, served.ServedMethod)
    method.create_weights(
        layer=layer,
        num_experts=EXPERTS,
        hidden_size=config.hidden_size,
        intermediate_size_per_partition=share,
        params_dtype=torch.bfloat16,
        weight_loader=layer.weight_loader,
        with_bias=with_bias,
        moe_intermediate_size=INTERMEDIATE,
    )
    method.create_moe_runner(layer, config)
    return layer


def fill(layer: Any, case: str, experts: Experts, without: str = "") -> None:
    """Through SGLang's loader, as its models call it: every tensor has a parameter."""
    tensors = stored_tensors(case, experts)
    if case == "MiniMax MXFP8":  # as in the checkpoint
        tensors = {
            name.replace("weight_scale", "weight_scale_inv"): each for name, each in tensors.items()
        }
    present = dict(layer.named_parameters())
    for name, tensor, shard, expert in calls_of_loaders(tensors):
        if f"{name}[{expert}]" != without:
            parameter = present[name]
            parameter.weight_loader(
                parameter, tensor, f"{PREFIX}.{name}", shard_id=shard, expert_id=expert
            )


def process(layer: Any) -> torch.Tensor:
    """Prepare the layer and run it."""
    layer.quant_method.process_weights_after_loading(layer)
    return call(layer.quant_method, layer, *tokens())


def weights_of(layer: Any) -> mxpert.MoEWeights:
    weights: mxpert.MoEWeights = layer.quant_method.info.layer.weights
    return weights


def admit(layer: Any, max_tokens: int) -> None:
    """Let SGLang prefill as many tokens at once."""
    served.get_server_args().chunked_prefill_size = max_tokens


def recreate(layer: Any) -> None:
    """SGLang's loaders find the layer's parameters as they are."""


class TestStoredExperts(StoredExperts):
    created, fill = staticmethod(created), staticmethod(fill)
    process, weights_of = staticmethod(process), staticmethod(weights_of)
    admit, recreate = staticmethod(admit), staticmethod(recreate)
    kept: ClassVar = {"backend": "mxpert_a8w4_keep_fp8"}
    rounded: ClassVar = {"backend": "mxpert_e4m3"}


@pytest.mark.parametrize("case", NVFP4)
def test_nvfp4_is_rounded_on_request(case: str) -> None:
    """And again by an update; the log says it."""
    with mock.patch.object(served, "_log_once") as log:
        layer = created(case, backend="mxpert_a8w4_e4m3")
    said, *arguments = log.call_args.args
    assert "NVFP4 (rounded to e4m3, but for casts of MXFP4) experts" in said % tuple(arguments)
    for seed in (0, 9):
        experts = experts_of(case, seed=seed)
        fill(layer, case, experts)
        y = process(layer)
        check_rounded(weights_of(layer), y, experts, "a8w4")


@pytest.mark.parametrize("case", SERVED)
def test_an_update_writes_into_the_prepared_tensors(case: str) -> None:
    """By the checkpoint's names, which the layer keeps; an update without the layer is none."""
    layer = created(case)
    fill(layer, case, experts_of(case))
    process(layer)
    held, method = weights_of(layer), layer.quant_method
    addresses = held.gate_up_proj.qdata.data_ptr(), held.down_proj.scale.data_ptr()
    method.restore_weights_before_loading(layer)
    check_layer(held, process(layer), experts_of(case))
    for seed in (9, 10):
        method.restore_weights_before_loading(layer)
        fill(layer, case, experts_of(case, seed=seed))
        check_layer(held, process(layer), experts_of(case, seed=seed))
        assert weights_of(layer) is held
    assert addresses == (held.gate_up_proj.qdata.data_ptr(), held.down_proj.scale.data_ptr())


LAYOUTS = {
    "compressed-tensors INT4 zero points": mxpert.Layout.HOPPER_GROUPS,
    "AWQ g128": mxpert.Layout.HOPPER_GROUPS,
    "ModelOpt NVFP4": mxpert.Layout.HOPPER_GROUPS,
    "ModelOpt cast": mxpert.Layout.HOPPER_FRAGMENT,
    "MiniMax MXFP8": mxpert.Layout.HOPPER_GROUPS,
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_an_update_of_another_layout(case: str) -> None:
    """As on a Hopper GPU, whose packed codes are the memory that an update is loaded into."""
    prepare = mxpert.MoEWeights.prepare

    def for_layout(weights: mxpert.MoEWeights, **options: Any) -> mxpert.MoEWeights:
        return prepare(weights, **{**options, "layout": LAYOUTS[case]})

    with (
        mock.patch.object(mxpert.MoEWeights, "prepare", for_layout),
        mock.patch.object(served, "warm_up_layer"),
    ):
        layer = created(case)
        for seed in (0, 9, 10):
            experts = experts_of(case, seed=seed)
            fill(layer, case, experts)
            layer.quant_method.process_weights_after_loading(layer)
            weights = weights_of(layer)
            assert weights.layout is LAYOUTS[case]
            gate_up, down = share_of(experts, 0, 1)
            assert_exact(weights.dequantize(torch.float64)[0], gate_up, "gate_up_proj")
            assert_exact(weights.dequantize(torch.float64)[1], down, "down_proj")


def test_an_update_in_another_format_is_refused() -> None:
    """NVFP4 that is no cast of MXFP4 after one that is: NaN from then on."""
    case, other = "ModelOpt cast", "ModelOpt NVFP4"
    layer = created(case)
    fill(layer, case, experts_of(case))
    process(layer)
    fill(layer, other, experts_of(other))
    with pytest.raises(ValueError, match=r"reloaded weights — need .*no cast of MXFP4"):
        process(layer)
    assert call(layer.quant_method, layer, *tokens()).isnan().all()


@pytest.mark.parametrize("case", SERVED)
def test_tensors_that_a_checkpoint_lacks_are_named(case: str) -> None:
    names = [name for name, *_ in calls_of_loaders(stored_tensors(case, experts_of(case)))]
    unread = ("input", "shape", "g_idx", *(("qzeros",) if case.startswith("GPTQ") else ()))
    for name in sorted({name for name in names if not any(each in name for each in unread)}):
        wanted = name.replace("scale", "scale_inv") if case.startswith("MiniMax") else name
        layer = created(case)
        fill(layer, case, experts_of(case), without=f"{wanted}[2]")
        with pytest.raises(ValueError, match=rf"none for {PREFIX}\.{wanted}\[2\]"):
            process(layer)


class Refused(NamedTuple):
    """A change of a case, and what the refusal says."""

    case: str
    said: str
    stated: dict[str, Any] = {}  # noqa: RUF012 - it is not changed
    layer: dict[str, Any] = {}  # noqa: RUF012


REFUSED = [
    Refused("AWQ g128", "bits — need 4, got 8", {"bits": 8}),
    Refused("AWQ g128", "version — need 'gemm', got 'gemv'", {"version": "gemv"}),
    Refused("GPTQ g128", "desc_act — need False, got True", {"desc_act": True}),
    Refused("GPTQ g128", "dynamic — need", {"dynamic": {r"+:.*\.0\.gate_proj": {"bits": 8}}}),
    Refused("AWQ g128", "INT4 without biases, got biases", layer={"with_bias": True}),
    Refused(
        "ModelOpt NVFP4",
        "gate rows before up rows in NVFP4, got rows that alternate",
        layer={"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
    ),
    Refused("AWQ g128", "need a multiple of 128 columns for each rank, got 64", layer={"ranks": 4}),
    Refused(
        "AWQ g128", "hidden_size — need a multiple of the group, 128", layer={"hidden_size": 96}
    ),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.said[:30])
def test_what_is_not_served_is_refused_in_one_line(refused: Refused) -> None:
    quantization = quantization_of(refused.case, **refused.stated)
    with pytest.raises(UnsupportedError, match=refused.said) as error:
        created(refused.case, quantization=quantization, **refused.layer)
    assert "\n" not in str(error.value)


EXCLUDED = {
    "compressed-tensors INT4 g32": {"ignore": ["re:.*layers.0.mlp.experts.*"]},
    "ModelOpt NVFP4": {"ignore": ["model.layers.0.mlp.experts*"]},
    "MiniMax MXFP8": {"ignored_layers": ["model.layers.0.mlp.experts"]},
    "AWQ g128": {"modules_to_not_convert": ["layers.0.mlp"]},
}


@pytest.mark.parametrize("case", EXCLUDED)
def test_experts_that_stay_dense_are_left_to_sglang(case: str) -> None:
    layer = created(case)
    config = quantization_of(case, **EXCLUDED[case])
    assert served.method_of(config, layer, PREFIX) is None
    assert served.method_of(config, layer, "model.layers.1.mlp.experts") is not None


@pytest.mark.parametrize("case", SERVED)
def test_other_backends_get_sglangs_own_method(case: str) -> None:
    layer, config = created(case), quantization_of(case)
    (in_tree,) = type(config).__bases__
    choose("triton")
    with mock.patch.object(in_tree, "get_quant_method", return_value="in-tree") as own:
        assert config.get_quant_method(layer, PREFIX) == "in-tree"
        choose("mxpert")
        assert config.get_quant_method(torch.nn.Linear(1, 1), "head") == "in-tree"
    assert own.call_count == 2


def test_modelopts_lists_of_layers() -> None:
    layers = {
        "model.layers.0.mlp.experts.0.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.experts.0.gate_proj": {"quant_algo": "FP8"},
    }
    entry = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    config = QUANTIZATION_METHODS["modelopt_mixed"].from_config(entry)
    layer = created("ModelOpt NVFP4")
    found = served.method_of(config, layer, PREFIX)
    assert found is not None
    assert found.experts.format == "NVFP4"
    assert served.method_of(config, layer, "model.layers.2.mlp.experts") is None
    with pytest.raises(UnsupportedError, match=r"layers\.1.* — need experts in .*'FP8'"):
        served.method_of(config, layer, "model.layers.1.mlp.experts")


def test_a_layer_is_prepared_without_a_second_one_in_memory() -> None:
    """Peak while a loaded model is prepared: two layers at most, and nothing dequantised."""
    case, layers = "ModelOpt NVFP4", 6
    experts = experts_of(case)

    def loaded() -> list[Any]:
        made = [created(case) for _ in range(layers)]
        for layer in made:
            fill(layer, case, experts)
        return made

    def prepare(made: list[Any]) -> None:
        for layer in made:
            layer.quant_method.process_weights_after_loading(layer)

    matrices = 3 * EXPERTS * HIDDEN * INTERMEDIATE
    with mock.patch.object(served, "warm_up_layer"):
        peak = peak_bytes(loaded, prepare)
    assert 0 < peak < 2 * (matrices // 2 + matrices // 16)

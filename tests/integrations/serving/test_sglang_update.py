"""Other weights in loaded layers of this SGLang: updates, what a checkpoint lacks, a trainer's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang's Python: make test-serving")
import mxpert
from mxpert.integrations.serving import layer_weights
from mxpert.integrations.serving.requantize import requantize_layer_, served_layers
from mxpert.integrations.sglang import _method as served
from mxpert.modules import quantize_weights
from tests.integrations.serving.test_sglang_layers import (
    EXPERTS,
    GPT_OSS,
    HIDDEN,
    INTERMEDIATE,
    KINDS,
    built,
    call,
    config_of,
    copy_all,
    experts_layer,
    server,
    tensors_of,
    tokens,
    weights_of,
)

__all__ = ["server"]  # a fixture of every test
pytestmark = pytest.mark.usefixtures("sglang_plugin")


def update(layer: Any, tensors: dict[str, torch.Tensor | None]) -> None:
    """What SGLang does at a weight update: load, then process each layer."""
    present = dict(layer.named_parameters())
    for name, tensor in tensors.items():
        if tensor is not None:
            present[name].weight_loader(present[name], tensor, weight_name=name, shard_id=None)
    layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("layout", [mxpert.Layout.ROW_MAJOR, mxpert.Layout.HOPPER_FRAGMENT])
@pytest.mark.parametrize("kind", ["gpt_oss", "silu"])
def test_an_update_writes_into_the_prepared_tensors(kind: str, layout: mxpert.Layout) -> None:
    """Other weights at the same addresses; updates of other layers change nothing here."""
    prepare = mxpert.MoEWeights.prepare

    def for_layout(weights: mxpert.MoEWeights, **options: Any) -> mxpert.MoEWeights:
        return prepare(weights, **{**options, "layout": layout})

    with (
        mock.patch.object(mxpert.MoEWeights, "prepare", for_layout),
        mock.patch.object(served, "warm_up_layer"),
    ):
        method, layer, first = built(kind)
        held = method.info.layer.weights
        addresses = {name: tensor.data_ptr() for name, tensor in layer.named_parameters()}
        method.restore_weights_before_loading(layer)
        method.process_weights_after_loading(layer)  # an update without this layer
        assert_weights(held.unprepare(), first)
        order = first.gate_up_order
        assert order is not None
        second = weights_of(order, INTERMEDIATE, biased=kind == "gpt_oss", seed=9)
        for _ in range(2):
            update(layer, tensors_of(second))
            assert method.info.layer.weights is held
            assert_weights(held.unprepare(), second)
            assert {name: t.data_ptr() for name, t in layer.named_parameters()} == addresses


def assert_weights(found: mxpert.MoEWeights, want: mxpert.MoEWeights) -> None:
    for name, tensor in tensors_of(want).items():
        other = tensors_of(found)[name]
        assert (tensor is None) == (other is None)
        if tensor is not None and other is not None:
            assert torch.equal(other, tensor), name


def test_tensors_that_an_update_lacks_are_named_and_nothing_is_computed() -> None:
    """Another layer of the model, which is complete, computes NaN too."""
    method, layer, weights = built("gpt_oss")
    other, other_layer, _ = built("gpt_oss")
    lacking = {**tensors_of(weights), "w2_weight_scale": None}
    with pytest.raises(ValueError, match=r"none for .*experts\.w2_weight_scale;") as error:
        update(layer, lacking)
    assert "\n" not in str(error.value)
    x, *routing = tokens()
    for each, of in ((method, layer), (other, other_layer)):
        assert call(each, of, x, *routing).isnan().all()
    for of in (layer, other_layer):
        update(of, tensors_of(weights))
    want = mxpert.fused_moe(x, weights, *routing, activation=KINDS["gpt_oss"][1])
    for each, of in ((method, layer), (other, other_layer)):
        assert torch.equal(call(each, of, x, *routing), want)


def test_a_checkpoint_without_a_layer_is_refused(server: SimpleNamespace) -> None:
    server.load_format = "auto"
    with pytest.raises(ValueError, match="all tensors of the experts"):
        built("silu")


def test_a_trainers_experts_are_quantised_in_place() -> None:
    method, layer, _ = built("gpt_oss")
    layer.quant_method = method
    assert served_layers(torch.nn.Sequential(layer)) == {"0": layer}
    generator = torch.Generator().manual_seed(5)
    dense = {
        name: torch.randn(*shape, generator=generator).bfloat16()
        for name, shape in (
            ("gate_up_proj", (EXPERTS, 2 * INTERMEDIATE, HIDDEN)),
            ("down_proj", (EXPERTS, HIDDEN, INTERMEDIATE)),
            ("gate_up_bias", (EXPERTS, 2 * INTERMEDIATE)),
            ("down_bias", (EXPERTS, HIDDEN)),
        )
    }
    addresses = {name: tensor.data_ptr() for name, tensor in layer.named_parameters()}
    requantize_layer_(layer, **dense)
    order = mxpert.GateUpOrder.INTERLEAVED
    assert_weights(
        method.info.layer.weights.unprepare(), quantize_weights(**dense, gate_up_order=order)
    )
    assert {name: tensor.data_ptr() for name, tensor in layer.named_parameters()} == addresses


def test_an_update_clears_the_padding() -> None:
    """48 of 64 columns: what lies behind them is what the prepared tensors held, or NaN."""
    config = config_of(intermediate_size_per_partition=48, **GPT_OSS)
    layer = experts_layer(config)
    layer.quant_method = method = served.ServedMethod("a16w4", "layers.0")
    method.create_weights(layer, EXPERTS, HIDDEN, 48, torch.bfloat16, weight_loader=copy_all)
    method.create_moe_runner(layer, config)
    x, *routing = tokens()
    for seed in (0, 9):
        whole = weights_of(mxpert.GateUpOrder.INTERLEAVED, 64, biased=False, seed=seed)
        layer_weights.clear_padding(whole, 48)
        given = tensors_of(whole)
        for name in ("w13_weight", "w13_weight_scale"):
            given[name] = given[name][:, :96]  # type: ignore[index]
        given["w2_weight"] = given["w2_weight"][..., :24]  # type: ignore[index]
        for parameter in layer.parameters():
            parameter.data.fill_(255)
        update(layer, given)
        want = mxpert.fused_moe(x, whole, *routing, activation=KINDS["gpt_oss"][1])
        assert torch.equal(call(method, layer, x, *routing), want)

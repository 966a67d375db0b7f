"""Llama 4, whose router weights multiply the experts' input, against Transformers' own blocks."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import mxpert
from mxpert import UnsupportedError
from mxpert.distributed import ExpertParallel, Transport
from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from mxpert.integrations.models.convert import convert, mx_experts, restore
from mxpert.integrations.models.experts import find_experts
from mxpert.integrations.models.llama4 import Llama4TextMoe, RoutedLlama4Moe
from mxpert.testing.noise import sqnr_floor_db
from mxpert.testing.numerics import (
    assert_close_relative,
    assert_exact,
    cosine,
    relative_l2,
    rounding_rms,
    sampling_margin,
)
from mxpert.training import MXFP8Recipe
from tests.integrations.families import EXPERTS, HIDDEN, build, greedy, oracle_of, teach

COSINE = 0.9999
BLOCKS = (1, 2)
"""Layers with experts."""


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[None]).logits[0]


def ranks(**changes: Any) -> ExpertParallel:
    """One rank that has all experts."""
    options: dict[str, Any] = dict(num_experts=EXPERTS, top_k=1, hidden_size=HIDDEN)
    return ExpertParallel(**options | dict(max_tokens=128, device="cpu") | changes)


@pytest.fixture(scope="module")
def taught(sequence: torch.Tensor) -> tuple[Any, Any]:
    """The oracle and the converted model, with the same taught head, in float32."""
    model = build("llama4")
    oracle = oracle_of(model)
    teach(oracle, sequence)
    model.lm_head.load_state_dict(oracle.lm_head.state_dict())
    return oracle, convert(model, progress=False)


def test_logits_and_greedy_tokens_are_those_of_the_dequantised_weights(taught, sequence) -> None:
    oracle, model = taught
    expected = logits(oracle, sequence)
    assert cosine(logits(model, sequence), expected) >= COSINE
    assert torch.equal(greedy(oracle, sequence), sequence), "the head was not taught"
    assert torch.equal(greedy(model, sequence), sequence)
    wrong = copy.deepcopy(model)
    for experts in mx_experts(wrong):
        experts.apply_router_weight_on_input = False
    assert cosine(logits(wrong, sequence), expected) < 0.99


@torch.no_grad()
@pytest.mark.parametrize("layer", BLOCKS)
def test_a_block_differs_from_float64_by_the_intermediate_rounding_alone(taught, layer) -> None:
    """Transformers' block in float64, with the dequantised weights, is the judge."""
    oracle, model = (each.model.layers[layer].feed_forward for each in taught)
    oracle, block = copy.deepcopy(oracle).double(), copy.deepcopy(model)
    for each in (oracle, block):
        each.shared_expert.down_proj.weight.zero_()
    tokens = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected, router_logits = oracle(tokens.double())
    actual, own_logits = block(tokens.float())
    assert len(router_logits.argmax(-1).unique()) > EXPERTS // 2
    assert_close_relative(own_logits, router_logits, 1e-5, "router")
    # bfloat16 intermediate; float32 sums and scores add less than 1e-6
    bound = rounding_rms(8) * sampling_margin(actual.numel())
    assert rounding_rms(8) / 2 < relative_l2(actual, expected) < bound
    block.experts.apply_router_weight_on_input = False
    assert relative_l2(block(tokens.float())[0], expected) > 10 * bound


def test_restored_blocks_are_transformers_own(taught, sequence) -> None:
    model = copy.deepcopy(taught[1])
    kinds = [type(layer.feed_forward).__name__ for layer in model.model.layers]
    assert kinds == ["Llama4TextMLP", "RoutedLlama4Moe", "RoutedLlama4Moe"]
    shapes = {name: list(value.shape) for name, value in taught[0].named_parameters()}
    restored = restore(model)
    assert {type(restored.model.layers[each].feed_forward) for each in BLOCKS} == {Llama4TextMoe}
    assert {name: list(value.shape) for name, value in restored.named_parameters()} == shapes
    assert_exact(logits(restored, sequence), logits(taught[0], sequence), "logits")


def test_copies_and_pickles_compute_the_same(taught, sequence) -> None:
    model, buffer = taught[1], io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for again in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert isinstance(again.model.layers[1].feed_forward, RoutedLlama4Moe)
        assert_exact(logits(again, sequence), logits(model, sequence), "logits")


@pytest.mark.parametrize("activation_format", ["bf16", "mxfp8", "mxfp4", "fp8_token"])
def test_checkpoints_load_as_they_convert(activation_format, tmp_path, sequence) -> None:
    dense, mxfp4, saved = (tmp_path / name for name in ("dense", "mxfp4", "saved"))
    model = build("llama4", dtype=torch.bfloat16)
    model.save_pretrained(dense)
    converted = convert(model, activation_format, progress=False)
    converted.save_pretrained(saved)
    assert quantize_checkpoint(dense, mxfp4).verified
    for path in (dense, mxfp4, saved):
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            experts_implementation=f"mxpert_{activation_format}".removesuffix("_bf16"),
            attn_implementation="eager",
            output_loading_info=True,
        )
        assert not any(info.values()), info
        assert {each.activation_format for each in mx_experts(loaded)} == {activation_format}
        assert_exact(logits(loaded, sequence), logits(converted, sequence), path.name)
    for path in (mxfp4, saved):
        weights = dict(load_expert_weights(path))
        assert list(weights) == [f"model.layers.{each}.feed_forward.experts" for each in BLOCKS]
        for (name, found), experts in zip(weights.items(), mx_experts(converted), strict=True):
            own = experts.weights.unprepare()
            assert_exact(found.down_proj.qdata, own.down_proj.qdata, name)


def test_gradients_are_transformers_own(sequence) -> None:
    """Without rounding, of every parameter; the router's come through the experts' input."""
    model = build("llama4").train()
    trained = convert(copy.deepcopy(model), recipe=MXFP8Recipe(enabled=False), progress=False)
    for each in (model, trained):
        each(sequence[None], labels=sequence[None]).loss.backward()
    wanted = dict(model.named_parameters())
    for name, parameter in trained.named_parameters():  # float32 sums in another order
        assert relative_l2(parameter.grad, wanted[name].grad) < 1e-4, name
    assert_exact(
        logits(restore(trained), sequence), logits(model, sequence), "a restored model trains on"
    )


def test_mxfp8_training_rounds_the_scaled_input() -> None:
    """The accuracy of its GEMMs is tested where they live (tests/grouped); here, what they get."""
    trained = convert(build("llama4"), recipe=MXFP8Recipe(), progress=False)
    experts = trained.model.layers[1].feed_forward.experts
    plain = copy.deepcopy(experts)
    plain._source = replace(plain.source, weight_on_input=False)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(48, HIDDEN, generator=generator).bfloat16()
    weights = torch.rand(48, 1, generator=generator).bfloat16()
    ids = torch.randint(EXPERTS, (48, 1), generator=generator)
    results = []
    for module, by_hand in ((experts, False), (plain, True)):
        x, w = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
        y = module(x * w, ids, torch.ones_like(w)) if by_hand else module(x, ids, w)
        y.float().square().sum().backward()
        results.append((y, x.grad, w.grad, module.gate_up_proj.grad, module.down_proj.grad))
    for actual, expected in zip(*results, strict=True):
        assert_exact(actual, expected, "experts")


@pytest.mark.parametrize("recipe", [None, MXFP8Recipe(enabled=False)], ids=["mxfp4", "recipe"])
def test_expert_parallel_layers_take_it(recipe, sequence) -> None:
    model = build("llama4")
    options = {} if recipe is None else {"recipe": recipe}
    one = convert(copy.deepcopy(model), progress=False, **options)
    ep = ranks(transport=Transport.ALL_TO_ALL, combine_dtype=torch.float32)
    several = convert(model, expert_parallel=ep, progress=False, **options)
    assert_close_relative(logits(several, sequence), logits(one, sequence), 1e-5, "logits")


def test_evaluate_compares_the_chosen_experts(sequence) -> None:
    """The SQNR of a layer is that of its experts for bf16's inputs."""
    model = build("llama4", dtype=torch.bfloat16)
    formats = {"a16w4": "bf16", "a8w4": "mxfp8", "a4w4": "mxfp4"}
    report = mxpert.evaluate(model, sequence, formats=list(formats), context=len(sequence))
    names = [f"model.layers.{each}.feed_forward.experts" for each in BLOCKS]
    assert [layer.name for layer in report.layers] == names
    for layer in report.layers:
        for name, long in formats.items():
            floor = sqnr_floor_db(long, quantised_weights=True)
            assert floor < layer.sqnr_db[name] < floor + 3, name


def multimodal(**changes: Any) -> Any:
    text = build("llama4").config.to_dict() | changes
    vision = dict(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vision_output_dim=32,
        projector_input_dim=32,
        projector_output_dim=32,
        image_size=28,
        patch_size=14,
    )
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    model.language_model.load_state_dict(build("llama4").state_dict())
    return model


def test_the_language_model_of_a_multimodal_checkpoint(tmp_path, sequence) -> None:
    model = multimodal()
    model.save_pretrained(tmp_path / "dense")
    assert quantize_checkpoint(tmp_path / "dense", tmp_path / "mxfp4").verified
    convert(model, progress=False)
    for name in ("dense", "mxfp4"):
        loaded, info = transformers.AutoModelForImageTextToText.from_pretrained(
            tmp_path / name,
            experts_implementation="mxpert",
            dtype=torch.float32,
            output_loading_info=True,
        )
        assert not any(info.values()), info
        assert len(mx_experts(loaded)) == len(BLOCKS)
        actual, expected = (logits(each.language_model, sequence) for each in (loaded, model))
        assert cosine(actual, expected) >= COSINE


def test_what_does_not_fit_is_refused_before_a_layer_changes() -> None:
    several = build("llama4", num_experts_per_tok=2)
    with pytest.raises(UnsupportedError, match=r"one expert per token.*num_experts_per_tok=2"):
        convert(several, progress=False)
    model = build("llama4")

    class Sharded(Llama4TextMoe):
        """As FSDP2 makes of a module."""

    model.model.layers[2].feed_forward.__class__ = Sharded
    with pytest.raises(UnsupportedError, match=r"need a Llama4TextMoe .*got Sharded; .*sharded"):
        convert(model, progress=False)
    assert not mx_experts(model)
    assert type(model.model.layers[1].feed_forward) is Llama4TextMoe


def test_the_gate_is_found_by_the_experts_forward() -> None:
    """Another activation, or another order of gate and up, is not taken for SiLU."""
    model = build("llama4")
    assert {found.activation for found in find_experts(model, "op")} == {mxpert.SiLU()}
    for layer in BLOCKS:
        model.model.layers[layer].feed_forward.experts.act_fn = torch.nn.Tanh()
    with pytest.raises(UnsupportedError, match="activation — need SiLU"):
        convert(model, progress=False)

"""Calls as numbers: what differs changes the word and the flags' tag, and is named."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from mxpert import Combine, ScaleRule, SiLU, SwiGLU
from mxpert.core.problem import ACTIVATION_FORMATS, MoEOptions
from mxpert.device.exchange_wait import TAG_BITS
from mxpert.distributed.calls import (
    MOST_LAYERS,
    Call,
    differences,
    layer_call,
    require_same,
    without_layer,
)
from mxpert.distributed.exchange.host import _TAG_MODULUS

OPTIONS = MoEOptions(SiLU())
LAYER = layer_call(16, OPTIONS, 64, 0)


def of(**changes: object) -> Call:
    return layer_call(16, replace(OPTIONS, **changes), 64, 0)


DIFFER = {
    "max_tokens 16 on rank 0, 17 on rank 1": replace(LAYER, bound=17),
    "max_tokens 16 on rank 0, 16777215 on rank 1": replace(LAYER, bound=(1 << 24) - 1),
    "activation_format bf16 on rank 0, mxfp8 on rank 1": of(activation_format="mxfp8"),
    "scale_rule RCEIL on rank 0, EVEN on rank 1": of(scale_rule=ScaleRule.EVEN),
    "apply_router_weight_on_input False on rank 0, True on rank 1": of(
        apply_router_weight_on_input=True
    ),
    "combine REDUCE on rank 0, ATOMIC on rank 1": of(combine=Combine.ATOMIC),
    "the call fused_moe on rank 0, MXMoE on rank 1": replace(LAYER, op="MXMoE"),
    "layer none on rank 0, 0 on rank 1": replace(LAYER, layer=0),
    "layer none on rank 0, 4094 on rank 1": replace(LAYER, layer=MOST_LAYERS - 1),
    "the activation, sizes or biases of the layer: on rank 0 and on rank 1 differ": of(
        activation=SwiGLU()
    ),
}


@pytest.mark.parametrize("said", DIFFER)
def test_each_difference_has_another_tag_and_a_name(said: str) -> None:
    words = [LAYER.word, DIFFER[said].word]
    assert words[0] != words[1]
    assert words[0] % _TAG_MODULUS != words[1] % _TAG_MODULUS
    assert differences(words) == said
    with pytest.raises(ValueError, match="op: calls — need the same call on every rank, got ") as e:
        require_same("op", words)
    assert said in str(e.value)
    assert "\n" not in str(e.value)


def test_words_are_wide_and_tags_fit_their_bits() -> None:
    """A word that fits 32 bits would compile another kernel."""
    calls = [Call(1), Call((1 << 24) - 1), LAYER, *DIFFER.values()]
    for call in calls:
        assert 1 << 62 <= call.word < 1 << 63
        assert call.word % _TAG_MODULUS < 1 << TAG_BITS.value
    assert 1 << TAG_BITS.value > _TAG_MODULUS
    assert all(_TAG_MODULUS % each for each in range(2, 1024))  # a prime


def test_formats_activations_and_sizes_are_told_apart() -> None:
    words = {
        layer_call(16, replace(OPTIONS, activation_format=name, activation=kind), size, bias).word
        for name, kind, size, bias in itertools.product(
            ACTIVATION_FORMATS, (SiLU(), SwiGLU(), SwiGLU(limit=5.0)), (64, 96), (0, 1, 2)
        )
    }
    assert len(words) == 4 * 3 * 2 * 3


def test_three_ranks_and_the_same_call() -> None:
    words = [Call(4).word, Call(8).word, Call(4).word]
    assert differences(words) == "max_tokens 4 on rank 0, 2, 8 on rank 1"
    require_same("op", words[:1] * 3)
    assert Call(4).word == Call(4).word
    result = replace(OPTIONS, out_dtype=None)  # each rank's own choice
    assert layer_call(16, result, 64, 0).word == LAYER.word


def test_layers_do_not_change_the_rest() -> None:
    for number in (None, 0, 5, MOST_LAYERS - 1):
        assert without_layer(replace(LAYER, layer=number).word) == LAYER.word
    assert without_layer(Call(3).word) != without_layer(Call(4).word)

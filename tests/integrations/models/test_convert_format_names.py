"""One vocabulary: a16w4 and bf16, a8w4 and mxfp8, a4w4 and mxfp4 name the same formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import mxpert
import mxpert.integrations.transformers  # registers the implementations
from mxpert.integrations.models.convert import mx_experts
from mxpert.integrations.models.evaluation import evaluate
from mxpert.modules import quantize_weights
from support.mixtral import tiny_mixtral

ALIASES = {"a16w4": "bf16", "a8w4": "mxfp8", "a4w4": "mxfp4"}
EVERY_ALIAS = pytest.mark.parametrize(("alias", "full"), ALIASES.items())


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return tiny_mixtral(vocab_size=256).eval()


def formats_of(model: Any) -> list[str]:
    return [experts.activation_format for experts in mx_experts(model)]


@EVERY_ALIAS
def test_convert(alias: str, full: str, model: Any) -> None:
    assert formats_of(mxpert.convert(model, alias, progress=False)) == [full]
    assert formats_of(mxpert.convert(model, "fp8_token")) == ["fp8_token"]
    assert formats_of(mxpert.convert(model, alias)) == [full]


@EVERY_ALIAS
def test_from_pretrained(alias: str, full: str, model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "dense")
    mxpert.convert(model, progress=False).save_pretrained(tmp_path / "mxfp4")
    for directory in ("dense", "mxfp4"):
        for name in (alias, full):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / directory, experts_implementation=f"mxpert_{name}"
            )
            assert formats_of(loaded) == [full]


@EVERY_ALIAS
def test_the_module(alias: str, full: str) -> None:
    weights = quantize_weights(
        torch.ones(2, 64, 32), torch.ones(2, 32, 32), gate_up_order=mxpert.GateUpOrder.CONCATENATED
    )
    made = mxpert.MoE(weights, torch.ones(2, 32), top_k=1, activation_format=alias)
    assert made.experts.activation_format == full


def test_evaluate(model: Any) -> None:
    report = evaluate(model, torch.arange(64), context=32, formats=["mxfp8", "bf16", "a8w4"])
    assert [result.name for result in report.formats] == ["bf16", "a8w4", "a16w4"]


def test_errors_list_both(model: Any) -> None:
    for call in (
        lambda: mxpert.convert(model, "int8"),
        lambda: evaluate(model, torch.arange(64), context=32, formats=["int8"]),
    ):
        with pytest.raises(ValueError, match=r"'mxfp8' \('a8w4'\).* got 'int8'"):
            call()
    with pytest.raises(ValueError, match="formats — need a list of names, got 'a8w4'"):
        evaluate(model, torch.arange(64), context=32, formats="a8w4")

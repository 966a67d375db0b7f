"""docs/supported-models.md says what each family does here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from mxpert import UnsupportedError
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from tests.integrations.supported import (
    FAMILIES,
    HEADER,
    PAGE,
    build,
    skip_before_its_release,
    table_of,
    try_family,
)


def rows() -> list[str]:
    return table_of(PAGE.read_text(encoding="utf-8")).removeprefix(HEADER).splitlines()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_page_says_what_works(model_type: str, tmp_path: Path) -> None:
    skip_before_its_release(model_type)
    assert try_family(model_type, tmp_path).row(model_type) in rows()


def test_the_page_has_every_family_once() -> None:
    assert [row.split("`")[1] for row in rows()] == list(FAMILIES)


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is refused: no published Llama 4 has several experts per token."""
    folder = tmp_path_factory.mktemp("llama4") / "dense"
    build("llama4_text", num_experts_per_tok=2).save_pretrained(folder)
    return folder


def test_what_the_converter_refuses_is_refused_before_anything_is_written(
    llama4: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"config\.json — need a model that mxpert can load"):
        quantize_checkpoint(llama4, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_transformers_the_names_decide(
    llama4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str, *package: Any) -> None:
        assert name == "transformers"

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(UnsupportedError, match=r"model_type — need one of .* got llama4_text"):
        quantize_checkpoint(llama4, tmp_path / "out")
    config = json.loads((llama4 / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "llama4_text"

"""A toy MoE language model on real text learns as well in MXFP8 as in bf16, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mxpert.training.autograd
from mxpert.testing.numerics import cosine
from mxpert.training import MXFP8Recipe
from support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
TEXT = Path(__file__).with_name("text.txt")
STEPS = 60
TOLERANCE = 0.02
"""The contract's: the final loss in MXFP8 lies within 2 % of bf16's."""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("examples/train_moe_lm.py")


def train(example: ModuleType, name: str, steps: int = STEPS) -> tuple[Any, dict[str, Any]]:
    size = example.SIZES["tiny"]
    data = example.split(TEXT.read_bytes(), size.length)
    return example.train(example.RECIPES[name], data, size, steps, seed=0)


@pytest.fixture(scope="module")
def baseline(example: ModuleType) -> float:
    """Final loss in bf16, well below where it began."""
    run = train(example, "bf16")[1]
    assert run["final"] < 0.75 * run["losses"][0]
    assert run["held_out"] < 0.75 * run["losses"][0]
    return run["final"]


@pytest.mark.parametrize("name", ["mxfp8-exact", "mxfp8-block128", "mxfp8-row", "mxfp8-hybrid"])
def test_final_loss_is_that_of_bf16(name: str, example: ModuleType, baseline: float) -> None:
    assert train(example, name)[1]["final"] == pytest.approx(baseline, rel=TOLERANCE)


def test_the_comparison_sees_a_wrong_gradient(
    example: ModuleType, baseline: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = mxpert.training.autograd.grouped_wgrad

    def wrong(*operands: object, **options: object) -> torch.Tensor:
        return -right(*operands, **options)

    monkeypatch.setattr(mxpert.training.autograd, "grouped_wgrad", wrong)
    assert train(example, "mxfp8")[1]["final"] != pytest.approx(baseline, rel=TOLERANCE)


def test_runs_differ_in_nothing_but_the_recipe(example: ModuleType) -> None:
    first, again = (train(example, "bf16", 2)[1]["losses"] for _ in range(2))
    assert first == again
    assert train(example, "mxfp8", 2)[1]["losses"][0] == pytest.approx(first[0], rel=1e-2)


def test_held_out_text_is_not_trained_on(example: ModuleType) -> None:
    text = bytes(range(256)) * 64
    train_data, held_out = example.split(text, 8)
    assert len(train_data) + len(held_out) == len(text)
    assert 0.03 < len(held_out) / len(text) < 0.08
    short = example.split(text[:200], 8)
    assert torch.cat(short).tolist() == list(text[:200])
    with pytest.raises(SystemExit, match="need at least"):
        example.split(text[:20], 8)


def test_the_text_of_the_installation_is_large(example: ModuleType) -> None:
    text = example.read_text(None)
    assert len(text) > 4 << 20
    assert text == example.read_text(None)


def run(example: ModuleType, folder: Path, *arguments: str) -> int:
    return example.main(
        ["--size=tiny", "--device=cpu", f"--text={TEXT}", f"--output={folder}", *arguments]
    )


def test_it_writes_losses_and_a_plot(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert run(example, tmp_path, "--steps=3") == 0
    assert "mxfp8: final loss" in capsys.readouterr().out
    found = json.loads((tmp_path / "loss.json").read_text())
    assert found["meta"]["steps"] == 3
    assert list(found["runs"]) == ["bf16", "mxfp8"]
    for each in found["runs"].values():
        assert len(each["losses"]) == 3
        assert each["final"] == pytest.approx(sum(each["losses"]) / 3)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_worse_loss_fails(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = example.train

    def worse(recipe: MXFP8Recipe, *rest: Any, **options: Any) -> Any:
        model, found = right(recipe, *rest, **options)
        return model, found | {"final": found["final"] * (1.03 if recipe.enabled else 1)}

    monkeypatch.setattr(example, "train", worse)
    assert run(example, tmp_path, "--steps=1") == 1


def test_unknown_formats_are_refused(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(example, tmp_path, "--formats=fp4")
    assert "--formats: need some of bf16" in capsys.readouterr().err


def test_the_saved_model_is_a_mixtral_checkpoint(example: ModuleType, tmp_path: Path) -> None:
    """transformers loads it and computes the same logits; a learnt norm and position count."""
    transformers = pytest.importorskip("transformers")
    model = train(example, "bf16", 20)[0]
    example.save_mixtral(model, tmp_path)
    other, loading = transformers.MixtralForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values())
    ids = torch.randint(256, (2, model.size.length))
    with torch.no_grad():
        assert cosine(model(ids), other(ids).logits) > 0.9999


def test_the_documentation_shows_the_results() -> None:
    text = (ROOT / "docs/training.md").read_text()
    for seed in range(4):
        path = ROOT / f"benchmarks/results/cpu/train_moe_lm_{seed}.json"
        found = json.loads(path.read_text())["runs"]
        bf16, *others = (found[name] for name in ("bf16", "mxfp8-exact", "mxfp8-row"))
        cells = [
            f"{seed}",
            f"{bf16['final']:.4f}",
            *(f"{run['ratio']:.4f}" for run in others),
            *(f"{run['held_out'] / bf16['held_out']:.4f}" for run in others),
        ]
        assert f"| {' | '.join(cells)} |" in text
        assert all(run["ratio"] <= 1 + TOLERANCE for run in found.values())

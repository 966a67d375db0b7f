"""Ids of models on the Hub wherever a folder is taken, out of huggingface_hub's cache, offline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import transformers
from typer.testing import CliRunner

from mxpert.cli.main import app
from mxpert.integrations.checkpoints.gpt_oss import load_transformers_oracle
from mxpert.integrations.checkpoints.hub import local_checkpoint
from mxpert.integrations.checkpoints.inspect import inspect_checkpoint
from mxpert.integrations.checkpoints.load import load_expert_weights, load_gpt_oss_layers
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from mxpert.integrations.models.convert import mx_experts
from support.expert_containers import edit, store_experts
from support.mixtral import tiny_mixtral

MIXTRAL, GPT_OSS, OF_BYTES = "acme/mixtral-tiny", "acme/gpt-oss.tiny", "acme/of_bytes"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = COMMIT[::-1]
REVISIONS = ("v1.0", "refs/pr/1", OTHER_COMMIT)
"""A tag, a branch and the hash of another commit of MIXTRAL and OF_BYTES, whose experts differ."""


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are bytes."""
    path = tmp_path_factory.mktemp("of-bytes")
    tiny_mixtral(vocab_size=256).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def other_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one, with three layers."""
    path = tmp_path_factory.mktemp("other-bytes")
    tiny_mixtral(vocab_size=256, num_hidden_layers=3).save_pretrained(path)
    return path


@pytest.fixture
def hub(tmp_path, monkeypatch, sources, demo, of_bytes, other_bytes) -> Path:
    """A cache with three models, and no network; returns an empty folder."""
    cache = tmp_path / "cache"
    for name, source in ((MIXTRAL, sources["mixtral"]), (GPT_OSS, demo), (OF_BYTES, of_bytes)):
        folder = cache / f"models--{name.replace('/', '--')}"
        shutil.copytree(source, folder / "snapshots" / COMMIT)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
    for name in (MIXTRAL, OF_BYTES):
        folder = cache / f"models--{name.replace('/', '--')}"
        shutil.copytree(other_bytes, folder / "snapshots" / OTHER_COMMIT)
        (folder / "refs" / "refs" / "pr").mkdir(parents=True)
        for ref in ("v1.0", "refs/pr/1"):
            (folder / "refs" / ref).write_text(OTHER_COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_functions_take_ids(hub, sources, demo) -> None:
    report = quantize_checkpoint(MIXTRAL, hub / "quantised")
    assert report.verified
    by_id = inspect_checkpoint(hub / "quantised", source=MIXTRAL)
    assert by_id == inspect_checkpoint(hub / "quantised", source=sources["mixtral"])
    for found, wanted in (
        (load_expert_weights(GPT_OSS), load_expert_weights(demo)),
        (load_gpt_oss_layers(GPT_OSS), load_gpt_oss_layers(demo)),
    ):
        assert len(list(found)) == len(list(wanted)) > 0
    assert inspect_checkpoint(GPT_OSS) == inspect_checkpoint(demo)
    assert load_transformers_oracle(GPT_OSS, num_layers=1).config.num_hidden_layers == 1


@pytest.mark.parametrize("revision", REVISIONS)
def test_an_id_may_name_a_revision(revision, hub) -> None:
    name = f"{MIXTRAL}@{revision}"
    assert local_checkpoint(name, "op").name == OTHER_COMMIT
    assert local_checkpoint(MIXTRAL, "op").name == COMMIT
    assert quantize_checkpoint(name, hub / "quantised").verified
    assert len(list(load_expert_weights(hub / "quantised"))) == 3
    assert len(inspect_checkpoint(hub / "quantised", source=name)) == 6
    (hub / "acme").mkdir()
    folder = (hub / "acme" / "mixtral-tiny@v1.0").absolute()
    folder.mkdir()
    assert local_checkpoint("acme/mixtral-tiny@v1.0", "op") == folder.relative_to(hub)


def test_commands_take_revisions(hub) -> None:
    (hub / "text.txt").write_text("\x01\x02" * 32)
    runs = (
        ("quantize", f"{MIXTRAL}@v1.0", "quantised"),
        ("inspect", "quantised", "--source", f"{MIXTRAL}@v1.0"),
        ("eval", f"{OF_BYTES}@refs/pr/1", "--text", "text.txt", "--context", "16", "--bytes")
        + ("--format", "a16w4", "--json", "eval.json"),
    )
    for arguments in runs:
        outcome = CliRunner().invoke(app, list(arguments))
        assert outcome.exit_code == 0, outcome.output
    report = json.loads((hub / "eval.json").read_text("utf-8"))
    assert report["checkpoint"] == f"{OF_BYTES}@refs/pr/1"
    assert len(report["layers"]) == 3


@pytest.mark.parametrize("revision", ["v2", COMMIT[:7], "main..v1"])
def test_a_revision_that_is_not_there_is_refused_by_name(revision, hub) -> None:
    with pytest.raises(ValueError, match=f"load_expert_weights: {MIXTRAL}@{revision} — need "):
        load_expert_weights(f"{MIXTRAL}@{revision}")


def test_transformers_takes_ids(hub) -> None:
    options = dict(
        experts_implementation="mxpert",
        local_files_only=True,
        cache_dir=huggingface_hub.constants.HF_HUB_CACHE,
    )
    for name, own in (
        (MIXTRAL, transformers.MixtralForCausalLM),
        (GPT_OSS, transformers.GptOssForCausalLM),
    ):
        for model_class in (transformers.AutoModelForCausalLM, own):
            model = model_class.from_pretrained(name, **options)
            assert len(mx_experts(model)) == 2


def test_modelopts_own_config_is_fetched_with_a_model(hub: Path, sources: dict[str, Path]) -> None:
    """The Hub's config.json says nothing of quantisation there."""
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    folder = cache / "models--acme--casts"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = store_experts(sources["mixtral"], folder / "snapshots" / COMMIT, "ModelOpt NVFP4")
    edit(snapshot, quantization_config=None)
    own = {"quantization": {"quant_algo": "NVFP4"}}
    (snapshot / "hf_quant_config.json").write_text(json.dumps(own), encoding="utf-8")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        "acme/casts", experts_implementation="mxpert", local_files_only=True, cache_dir=cache
    )
    assert len(mx_experts(model)) == 2
    assert len(list(load_expert_weights("acme/casts"))) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", GPT_OSS),
        ("quantize", MIXTRAL, "quantised"),
        ("eval", OF_BYTES, "--text", "text.txt", "--context", "16", "--bytes", "--format", "a16w4"),
        ("demo", "--checkpoint", GPT_OSS, "--tokens", "1", "--output", "out"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_take_ids(arguments, hub) -> None:
    (hub / "text.txt").write_text("\x01\x02" * 32)
    outcome = CliRunner().invoke(app, list(arguments))
    assert outcome.exit_code == 0, outcome.output


@pytest.mark.parametrize("name", ["acme/nothing", "acme/empty"])
def test_an_id_that_is_not_there_is_refused_by_name(name, hub) -> None:
    empty = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--acme--empty"
    (empty / "snapshots" / COMMIT).mkdir(parents=True)
    (empty / "refs").mkdir()
    (empty / "refs" / "main").write_text(COMMIT)
    with pytest.raises(ValueError, match=f"op: {name} — need "):
        local_checkpoint(name, "op")


def test_a_folder_takes_precedence(hub) -> None:
    (hub / MIXTRAL).mkdir(parents=True)
    assert local_checkpoint(MIXTRAL, "op") == Path(MIXTRAL)
    for path in ("nothing", "./acme/nothing", "/acme/nothing", "a/b/c", "../acme/nothing"):
        assert local_checkpoint(path, "op") == Path(path), "no id, so the Hub is not asked"

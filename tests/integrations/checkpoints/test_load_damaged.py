"""Damaged checkpoints are one-line errors of the library's form, never a hang."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mxpert.core.files import partial_name, write_atomically
from mxpert.integrations.checkpoints import safetensors_files
from mxpert.integrations.checkpoints.gpt_oss import load_transformers_oracle, write_demo_checkpoint
from mxpert.integrations.checkpoints.inspect import inspect_checkpoint
from mxpert.integrations.checkpoints.load import load_expert_weights, load_gpt_oss_layers
from mxpert.integrations.checkpoints.quantize import MANIFEST_FILE, quantize_checkpoint
from mxpert.integrations.checkpoints.safetensors_files import (
    INDEX_FILE,
    CheckpointReader,
    read_json,
    write_json,
    write_tensors,
)

pytestmark = pytest.mark.timeout(60)  # a FIFO that is opened waits for ever

SIZES = dict(hidden_size=64, intermediate_size=32, num_experts=2, top_k=1, num_layers=1)
SHARD = "model-00002-of-00002.safetensors"
DEEP = "[" * 100_000 + "]" * 100_000
LONG = "1" * 5000

Damage = Callable[[Path], object]
READERS: dict[str, Callable[[Path], object]] = {
    "load_gpt_oss_layers": lambda path: list(load_gpt_oss_layers(path)),
    "load_expert_weights": lambda path: list(load_expert_weights(path)),
    "inspect_checkpoint": inspect_checkpoint,
    "load_transformers_oracle": load_transformers_oracle,
}


def truncate(path: Path) -> None:
    os.truncate(path / SHARD, (path / SHARD).stat().st_size - 10)


def change_config(**changes: Any) -> Damage:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text("utf-8")) | changes
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    return change


def replace(name: str, text: str) -> Damage:
    return lambda path: (path / name).write_text(text, encoding="utf-8")


def pipe(name: str) -> Damage:
    def change(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return change


def folder(name: str) -> Damage:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return change


EVERYWHERE = {
    "truncated shard": truncate,
    "empty shard": lambda path: os.truncate(path / SHARD, 0),
    "missing shard": lambda path: (path / SHARD).unlink(),
    "fifo as shard": pipe(SHARD),
    "folder as shard": folder(SHARD),
    "fifo as index": pipe(INDEX_FILE),
    "index nested too deeply": replace(INDEX_FILE, f'{{"weight_map": {DEEP}}}'),
    "index with a long integer": replace(INDEX_FILE, f'{{"metadata": {LONG}}}'),
    "index with a name that no file has": replace(
        INDEX_FILE,
        json.dumps({"weight_map": {"model.layers.0.mlp.experts.gate_up_proj_blocks": "x" * 5000}}),
    ),
}
IN_THE_CONFIG = {
    "config nested too deeply": replace("config.json", f'{{"hidden_size": {DEEP}}}'),
    "config with a long integer": replace("config.json", f'{{"hidden_size": {LONG}}}'),
    "fifo as config": pipe("config.json"),
    "folder as config": folder("config.json"),
    "quantization_config as a string": change_config(quantization_config="mxfp4"),
    "quantization_config as a list": change_config(quantization_config=["mxfp4"]),
    "order as a list": change_config(
        quantization_config={"quant_method": "mxfp4", "mxpert": {"gate_up_order": ["a"]}}
    ),
    "mxpert as a string": change_config(
        quantization_config={"quant_method": "mxfp4", "mxpert": "interleaved"}
    ),
}
OF_GPT_OSS = {
    "more layers than memory": change_config(num_hidden_layers=10**30),
    "a limit beyond floats": change_config(swiglu_limit=10**400),
    "sizes beyond memory": change_config(hidden_size=32 * 10**30),
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_checkpoint(tmp_path_factory.mktemp("demo") / "gpt-oss", **SIZES)


@pytest.fixture
def damaged(demo: Path, tmp_path: Path) -> Callable[[Damage], Path]:
    def copy(damage: Damage) -> Path:
        target = tmp_path / "copy"
        target.mkdir()
        for file in demo.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        damage(target)
        return target

    return copy


def refused(function: Callable[[Path], object], path: Path, operation: str) -> None:
    with pytest.raises((ValueError, OSError)) as caught:
        function(path)
    text = str(caught.value)
    assert text.startswith(f"{operation}: "), text
    assert " — need " in text, text
    assert "\n" not in text, text
    assert len(text) < 6000, text[:200]


@pytest.mark.parametrize("case", EVERYWHERE)
@pytest.mark.parametrize("operation", READERS)
def test_readers_refuse(operation: str, case: str, damaged: Any) -> None:
    refused(READERS[operation], damaged(EVERYWHERE[case]), operation)


@pytest.mark.parametrize("case", IN_THE_CONFIG)
@pytest.mark.parametrize("operation", [name for name in READERS if name != "inspect_checkpoint"])
def test_readers_of_the_config_refuse(operation: str, case: str, damaged: Any) -> None:
    refused(READERS[operation], damaged(IN_THE_CONFIG[case]), operation)


@pytest.mark.parametrize("case", OF_GPT_OSS)
def test_sizes_that_no_machine_has_are_refused(case: str, damaged: Any) -> None:
    refused(READERS["load_gpt_oss_layers"], damaged(OF_GPT_OSS[case]), "load_gpt_oss_layers")


def test_a_shard_that_is_damaged_after_it_was_opened_is_refused(damaged: Any) -> None:
    directory = damaged(lambda path: None)
    reader = CheckpointReader(directory, "read")
    name = "model.layers.0.mlp.experts.down_proj_blocks"

    class Broken:
        def get_slice(self, name: str) -> Any:
            class View:
                def get_dtype(self) -> str:
                    return "U8"

                def get_shape(self) -> list[int]:
                    return [1]

                def __getitem__(self, index: slice) -> None:
                    raise safetensors_files.SafetensorError("cut off")

            return View()

        def get_tensor(self, name: str) -> None:
            raise safetensors_files.SafetensorError("cut off")

    reader._handles[reader.info(name).file] = Broken()
    refused(lambda _: reader.read(name), directory, "read")
    refused(lambda _: reader.read_row(name, 0), directory, "read")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint with the experts of one layer."""
    directory = tmp_path_factory.mktemp("dense")
    save_file(
        {
            f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight": torch.randn(
                32, 32
            ).bfloat16()
            for expert in range(2)
            for part in ("gate", "up", "down")
        },
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text("{}", encoding="utf-8")
    return directory


ENTRY = "shards.model-00001-of-00001.safetensors"
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "shards as a list": (lambda m: m | {"shards": []}, "shards — need an object"),
    "no shards": (lambda m: m | {"shards": None}, "shards — need an object"),
    "an entry as a string": (
        lambda m: m | {"shards": {"model-00001-of-00001.safetensors": "done"}},
        f"{ENTRY} — need an object",
    ),
    **{
        f"an entry without {key}": (
            lambda m, key=key: (
                m
                | {
                    "shards": {
                        name: {k: v for k, v in entry.items() if k != key}
                        for name, entry in m["shards"].items()
                    }
                }
            ),
            rf"{ENTRY} — need .*, got \['{key}'\] missing",
        )
        for key in ("sha256", "bytes", "projections")
    },
    **{
        f"a projection with {key}={value!r}": (
            lambda m, key=key, value=value: (
                m
                | {
                    "shards": {
                        name: entry | {"projections": [entry["projections"][0] | {key: value}]}
                        for name, entry in m["shards"].items()
                    }
                }
            ),
            rf"{ENTRY}\.projections\[0\]{need}",
        )
        for key, value, need in (
            ("shape", [1, 2], r"\.shape — need a list of 3, got 2"),
            ("shape", ["a", 2, 3], r"\.shape\[0\] — need an integer of at least 0, got 'a'"),
            ("signal", "1", r"\.signal — need a finite number of at least 0, got '1'"),
            ("more", 1, r" — need .*, got unknown \['more'\]"),
            ("noise", None, r"\.noise — need a finite number of at least 0, got None"),
            ("module", 3, r"\.module — need a string, got 3"),
        )
    },
    "a projection as a number": (
        lambda m: (
            m
            | {
                "shards": {
                    name: entry | {"projections": [1]} for name, entry in m["shards"].items()
                }
            }
        ),
        rf"{ENTRY}\.projections\[0\] — need an object, got int",
    ),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_damaged_manifest_entry_is_named(case: str, dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(dense, out)
    change, expected = MANIFESTS[case]
    path = out / MANIFEST_FILE
    path.write_text(json.dumps(change(json.loads(path.read_text("utf-8")))), encoding="utf-8")
    with pytest.raises(ValueError, match=f"^quantize_checkpoint: .*{expected}.*; empty the dest"):
        quantize_checkpoint(dense, out)


def test_a_manifest_nested_too_deeply_is_refused(dense: Path, tmp_path: Path) -> None:
    quantize_checkpoint(dense, tmp_path)
    (tmp_path / MANIFEST_FILE).write_text(f'{{"shards": {DEEP}}}', encoding="utf-8")
    refused(lambda path: quantize_checkpoint(dense, path), tmp_path, "quantize_checkpoint")


def test_expert_numbers_of_thousands_of_digits_are_refused(tmp_path: Path) -> None:
    save_file(
        {f"model.layers.0.mlp.experts.{LONG}.w1.weight": torch.zeros(32, 32)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RuntimeError, match="need experts made of gate, up and down weights alone"):
        quantize_checkpoint(tmp_path, tmp_path.parent / "out")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_of_the_umask(mask: int, dense: Path, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        quantize_checkpoint(dense, tmp_path / "out")
        demo = write_demo_checkpoint(tmp_path / "demo", **SIZES, sharded=False)
        write_json(tmp_path / "report.json", {})
    finally:
        os.umask(before)
    files = [*(tmp_path / "out").iterdir(), *demo.iterdir(), tmp_path / "report.json"]
    assert len(files) > 5
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~mask}


def test_a_full_disk_is_an_oserror_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise safetensors_files.SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(safetensors_files, "save_file", full)
    with pytest.raises(OSError, match=r"No space left .*x\.safetensors"):
        write_tensors(tmp_path / "x.safetensors", {})
    assert not list(tmp_path.iterdir())


def test_a_leftover_of_an_interrupted_write_does_not_stay(tmp_path: Path) -> None:
    partial_name(tmp_path / "a.json").write_text("half", encoding="utf-8")
    write_atomically(tmp_path / "a.json", lambda path: path.write_text("{}", encoding="utf-8"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert read_json(tmp_path / "a.json", "read") == {}

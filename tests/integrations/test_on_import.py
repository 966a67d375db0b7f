"""What `import mxpert` does to Transformers: nothing, but for calls that name mxpert."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mxpert.errors import UnsupportedError
from mxpert.integrations import transformers_versions
from support.gpt_oss import tiny_gpt_oss
from tests.integrations.families import build

TIME_LIMIT = 240


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


def result(process: subprocess.Popen[str]) -> Any:
    """The JSON on the last line of a process's standard output."""
    out, err = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


LOADS = """
import hashlib, json, logging, sys, warnings
if sys.argv[1] == "with":
    import mxpert, mxpert.integrations.transformers
import torch, transformers
from transformers.quantizers import auto
records = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: records.append([record.levelname, record.getMessage()])
logging.getLogger("transformers").addHandler(handler)
mixtral, gpt_oss = sys.argv[2:]
dequantised = dict(quantization_config=transformers.Mxfp4Config(dequantize=True))
found = {}
for name, model_class, path, options in (
    ("dense", transformers.AutoModelForCausalLM, mixtral, {}),
    ("direct", transformers.MixtralForCausalLM, mixtral, dict(experts_implementation="eager")),
    ("mxfp4", transformers.AutoModelForCausalLM, gpt_oss, dequantised),
    ("on CPU", transformers.AutoModelForCausalLM, gpt_oss, dequantised | dict(device_map=None)),
    ("mistake", transformers.AutoModelForCausalLM, mixtral, dict(experts_implementation="none")),
    ("nowhere", transformers.AutoModelForCausalLM, mixtral + "-nowhere", {}),
):
    records.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            model = model_class.from_pretrained(path, local_files_only=True, **options)
        except Exception as error:
            found[name] = {"error": [type(error).__name__, str(error)[:60]]}
            continue
    state = hashlib.sha256()
    for key, value in model.state_dict().items():
        state.update(key.encode() + str(value.dtype).encode())
        state.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    found[name] = {
        "weights": state.hexdigest(),
        "classes": [f"{type(m).__module__}.{type(m).__name__}" for m in model.modules()],
        "quantizer": str(type(getattr(model, "hf_quantizer", None))),
        "config": model.config.to_json_string(),
        "warnings": [[each.category.__name__, str(each.message)] for each in warned],
        "records": list(records),
    }
found["tables"] = {name: str(auto.AUTO_QUANTIZER_MAPPING[name]) for name in ("mxfp4", "fp8")}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    build("mixtral", dtype=torch.bfloat16).save_pretrained(root / "mixtral")
    return root / "mixtral", tiny_gpt_oss(root / "gpt-oss")


def test_loads_that_do_not_ask_are_those_without_mxpert(checkpoints) -> None:
    """Weights, classes, quantisers, configs, warnings and log records of six loads."""
    processes = [start(LOADS, each, *checkpoints) for each in ("with", "without")]
    found, wanted = map(result, processes)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if "error" in wanted[name]] == ["mistake", "nowhere"]
    for name in wanted:
        assert found[name] == wanted[name], name


ALONE = """
import json, sys
light = []
if sys.argv[2] == "after":
    import transformers.modeling_utils
import mxpert
if sys.argv[2] == "before":
    light.append("transformers" not in sys.modules)
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
import transformers
light.append("mxpert.integrations.transformers_loading" not in sys.modules)
model_class = getattr(transformers, sys.argv[3])
model = model_class.from_pretrained(sys.argv[1], experts_implementation="mxpert_a8w4")
models = sys.modules["transformers.modeling_utils"]
light.append(models.__loader__ is models.__spec__.loader and "mxpert" not in str(models.__loader__))
print(json.dumps([type(model.model.layers[0].mlp.experts).__name__, light]))
"""


def test_importing_mxpert_alone_is_enough_and_light(checkpoints) -> None:
    """Before and after Transformers; neither import pulls in the other, or what loads models."""
    before = start(ALONE, checkpoints[0], "before", "AutoModelForCausalLM")
    after = start(ALONE, checkpoints[0], "after", "MixtralForCausalLM")
    assert result(before) == ["MXExperts", [True, True, True]]
    assert result(after) == ["MXExperts", [True, True]]


def load(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


@pytest.mark.parametrize("version", ["5.6.2", "6.0.0", "4.57.6"])
def test_another_release_is_refused_where_it_is_asked_and_nowhere_else(
    version, checkpoints, monkeypatch
) -> None:
    importlib.import_module("mxpert.integrations.transformers")
    monkeypatch.delitem(sys.modules, "mxpert.integrations.transformers")
    monkeypatch.setattr(transformers_versions, "installed", lambda: version)
    text = f"transformers — need transformers >= 5.7 and < 6, got {version}; pip install"
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        load(checkpoints[0], experts_implementation="mxpert")
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        importlib.import_module("mxpert.integrations.transformers")
    assert load(checkpoints[0]).model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16


def test_a_newer_release_warns_once(monkeypatch, checkpoints) -> None:
    monkeypatch.setattr(transformers_versions, "installed", lambda: "5.99.0.dev0")
    transformers_versions.warn_of_newer.cache_clear()
    with pytest.warns(UserWarning, match=r"tested with Transformers 5\.7 to .*5\.99\.0\.dev0"):
        load(checkpoints[0], experts_implementation="mxpert")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        load(checkpoints[0], experts_implementation="mxpert")
    assert not [each for each in warned if "tested with" in str(each.message)]


def test_bounds_are_those_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    assert set(re.findall(r'"transformers(>[^"]*)"', text)) == {">=5.7,<6"}
    assert transformers_versions.INSTALL == "pip install 'transformers>=5.7,<6'"

"""What is refused while this SGLang reads its options, before it starts other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mxpert import UnsupportedError
from mxpert.integrations import sglang as plugin

pytest.importorskip("sglang", reason="needs SGLang's Python: make test-serving")
import sglang
from sglang.srt.arg_groups import validation_hook
from sglang.srt.layers.moe.moe_runner import runner
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.server_args import ServerArgs, prepare_server_args

from mxpert.integrations.sglang._plugin import KEPT, NAMES, lazy_core

pytestmark = pytest.mark.usefixtures("sglang_plugin")
OTHERS = {"moe_runner_backend": "triton", "enable_eplb": True}


def served(**changes: Any) -> dict[str, Any]:
    return {"moe_runner_backend": "mxpert", **changes}


def sglang_checks(**arguments: Any) -> None:
    """What SGLang does with its resolved options before it starts a process.

    Its own checks want the options of a whole machine.
    """
    with mock.patch.object(validation_hook, "check_server_args"):
        ServerArgs.check_server_args(SimpleNamespace(**arguments))


def test_served_options_and_other_backends_pass() -> None:
    for backend, activation_format in plugin.BACKENDS.items():
        if backend.endswith(KEPT) and activation_format == "bf16":
            continue  # refused below
        sglang_checks(moe_runner_backend=backend, moe_a2a_backend="none", cpu_offload_gb=0)
    sglang_checks(**OTHERS)


@pytest.mark.parametrize(
    "option, changes",
    [
        ("--moe-a2a-backend", {"moe_a2a_backend": "deepep"}),
        ("--enable-eplb", {"enable_eplb": True}),
        ("--enable-lora", {"lora_paths": ["a"]}),
        ("--cpu-offload-gb", {"cpu_offload_gb": 8}),
        ("--enable-deterministic-inference", {"enable_deterministic_inference": True}),
        ("--enable-eplb", {"_resolved_overrides": [("another option", {"enable_eplb": True})]}),
    ],
)
def test_refusals_name_the_option(option: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"mxpert for SGLang: {option} — need") as error:
        sglang_checks(**served(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("backend", ["mxpert_keep_fp8", "mxpert_a16w4_keep_fp8"])
def test_copies_beside_bf16_are_refused(backend: str) -> None:
    match = r"^mxpert for SGLang: --moe-runner-backend — need activations in 8 or .* got 'bf16'; "
    with pytest.raises(ValueError, match=match + "choose a8w4, a4w4 or a8w4-token, or omit it$"):
        sglang_checks(**served(moe_runner_backend=backend))


@pytest.mark.parametrize(
    "quantization, said",
    [(None, "got a model that is not quantised; quantise its experts"), ("fp8", "got 'fp8'")],
)
def test_other_models_are_refused(quantization: str | None, said: str) -> None:
    model = SimpleNamespace(quantization=quantization)
    with pytest.raises(
        UnsupportedError, match=f"the model's quantization — need 'mxfp4', .*{said}"
    ):
        sglang_checks(**served(_model_config=model))
    for name in NAMES:
        sglang_checks(**served(_model_config=SimpleNamespace(quantization=name)))
    sglang_checks(**OTHERS, _model_config=model)


def test_a_server_refuses_a_model_that_is_not_quantised(tmp_path: Path) -> None:
    line = server_line(tmp_path)
    assert line.startswith(
        "mxpert for SGLang: the model's quantization — need 'mxfp4', 'compressed-tensors',"
    )
    assert "got a model that is not quantised" in line


@pytest.mark.parametrize("program", ["/somewhere/bin/sglang", "-m sglang.launch_server"])
def test_commands_end_with_the_line_alone(program: str) -> None:
    module = SimpleNamespace(name=program.removeprefix("-m "))
    main = SimpleNamespace(__spec__=module if program.startswith("-m") else None)
    with (
        mock.patch.object(sys, "argv", [program.partition(" ")[0], "--model-path=a"]),
        mock.patch.dict(sys.modules, __main__=main),
        pytest.raises(SystemExit, match=r"^mxpert for SGLang: --enable-eplb — need .*$"),
    ):
        sglang_checks(**served(enable_eplb=True))


COMMAND = """
import runpy
from tests.integrations.serving import conftest
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 512,
}


def test_a_server_ends_with_the_line(tmp_path: Path) -> None:
    assert server_line(tmp_path, "--cpu-offload-gb=4") == (
        "mxpert for SGLang: --cpu-offload-gb — need 0 (weights on the device), got 4; "
        "remove --cpu-offload-gb"
    )


def server_line(folder: Path, *options: str) -> str:
    """The last line of SGLang's own command on a CPU, with the plugin from its entry point."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    arguments = [
        f"--model-path={folder}",
        "--device=cpu",
        "--attention-backend=torch_native",
        "--skip-tokenizer-init",
        "--moe-runner-backend=mxpert",
        *options,
    ]
    paths = [*map(str, Path(__file__).parents[2:4]), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    *_, line = done.stderr.strip().splitlines()
    return line


def test_a_wrong_backend_is_no_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare_server_args(["--model-path=a", "--moe-runner-backend=mxpert_a2w4"])
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert "invalid choice: 'mxpert_a2w4'" in line
    assert "mxpert_a8w4" in line


def test_outside_the_range_sglang_keeps_its_config_and_the_backend_is_refused() -> None:
    with (
        mock.patch.object(sglang, "__version__", "0.5.20"),
        mock.patch.dict(runner._CUSTOM_RUNNER_CORE_FACTORIES, clear=True),
        mock.patch.dict(QUANTIZATION_METHODS, dict.fromkeys(NAMES, object)),
    ):
        plugin.register()
        assert all(QUANTIZATION_METHODS[name] is object for name in NAMES)
        sglang_checks(**OTHERS)
        said = r"sglang — need 0.5.21 or newer, below 0.5.24, got 0.5.20; install such a sglang"
        for refused in (lambda: sglang_checks(**served()), lambda: lazy_core(None)):
            with pytest.raises(UnsupportedError, match=said) as error:
                refused()
            assert "\n" not in str(error.value)

"""A tiny gpt-oss through a whole vLLM on a CPU: LLM(...) in parallel modes, and `vllm serve`.

Stock vLLM has no MXFP4 kernels for a CPU, so an answer at all comes from mxpert. Engines that a
process can have one after another share one (`engine.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm", reason="needs vLLM: make test-serving")
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("needs a vLLM that runs on a CPU", allow_module_level=True)

from mxpert.integrations.checkpoints.gpt_oss import (
    demo_token_ids,
    load_transformers_oracle,
    write_demo_checkpoint,
)

HERE = Path(__file__).parent
PROMPT = demo_token_ids(200)
START_SECONDS = 280


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers; 96 columns are 48 a rank with TP2, which is not a multiple of 32."""
    return write_demo_checkpoint(
        tmp_path_factory.mktemp("gpt-oss") / "model",
        hidden_size=128,
        intermediate_size=96,
        num_experts=8,
        num_layers=2,
    )


def log_probabilities(model: Any, *, activation_format: str | None = None) -> torch.Tensor:
    """Of each prompt token but the first, float32 [199], by Transformers."""
    if activation_format is not None:
        import mxpert

        model = mxpert.convert(model, activation_format)
    with torch.no_grad():
        logits = model(PROMPT[None]).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(1, PROMPT[1:, None])[:, 0]


class Oracle:
    """Transformers' float32 answer, and how far its own bfloat16 is from it.

    The gate: a bfloat16 engine with other kernels rounds as often as Transformers in bfloat16 does,
    in another order. Its mean error is of the same size; twice that is allowed.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.exact = log_probabilities(load_transformers_oracle(checkpoint))
        self.rounded = self.error(log_probabilities(self.model()))

    def model(self) -> Any:
        return load_transformers_oracle(self.checkpoint, dtype=torch.bfloat16)

    def error(self, found: torch.Tensor) -> float:
        return float((found - self.exact).abs().mean())

    def check(self, found: torch.Tensor, rounded: float | None = None) -> None:
        allowed = 2 * (self.rounded if rounded is None else rounded)
        assert found.shape == self.exact.shape
        assert self.error(found) <= allowed, (self.error(found), allowed)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


class Engines:
    """A process of `engine.py`, which imports vLLM once and makes one engine after another."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        self.checkpoint, self.log = checkpoint, log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "engine.py")],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer of an engine, with what it logged as "log"."""
        begin = self.log.stat().st_size
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"model": str(self.checkpoint), **request}) + "\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + START_SECONDS
        while True:
            log = self.log.read_bytes()[begin:].decode()
            found = re.search(r"^ANSWER (.*)\n", log, re.MULTILINE)
            if found:
                return {**json.loads(found[1]), "log": log}
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"no answer\n{log[-4000:]}")
            time.sleep(0.2)

    def answered(self, **request: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """Log-probabilities [199] of the prompt, and the answer."""
        answer = self.ask(**request)
        assert "error" not in answer, answer["error"] + answer["log"][-4000:]
        return torch.tensor(answer["log_probabilities"][0]), answer

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(checkpoint, tmp_path_factory.mktemp("engines") / "log")
    yield made
    made.end()


def test_the_gate_sees_a_wrong_layer(oracle: Oracle) -> None:
    """Planted: gate and up exchanged in one layer, one expert's output lost."""
    for plant in ("exchanged", "lost"):
        model = oracle.model()
        experts = model.model.layers[1].mlp.experts
        with torch.no_grad():
            if plant == "exchanged":
                rows = experts.gate_up_proj.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
                experts.gate_up_proj.copy_(rows)
            else:
                experts.down_proj[3] = 0
        with pytest.raises(AssertionError):
            oracle.check(log_probabilities(model))


def test_one_rank_and_reload(engines: Engines, oracle: Oracle) -> None:
    found, answer = engines.answered(format="a16w4", reload=True)
    oracle.check(found)
    assert "mxpert 0" in answer["log"]
    assert "activations a16w4, experts chosen by mxpert" in answer["log"]
    assert answer["log_probabilities"][1] == answer["log_probabilities"][0]


def test_eight_bit_activations(engines: Engines, oracle: Oracle) -> None:
    """Within twice the error of Transformers with the same experts in bfloat16."""
    converted = log_probabilities(oracle.model(), activation_format="a8w4")
    found, answer = engines.answered(format="a8w4", compile=True)
    oracle.check(found, oracle.error(converted))
    assert "DYNAMO_TRACE_ONCE" in answer["log"]


def test_tensor_parallel_sizes_are_padded(engines: Engines, oracle: Oracle) -> None:
    """Padding of a rank is cleared again in a reload, whose memory is not initialised."""
    found, answer = engines.answered(format="a16w4", tensor_parallel_size=2, reload=True)
    oracle.check(found)
    assert answer["log_probabilities"][1] == answer["log_probabilities"][0]


def test_expert_parallel(engines: Engines, oracle: Oracle) -> None:
    found, _ = engines.answered(format="a16w4", tensor_parallel_size=2, enable_expert_parallel=True)
    oracle.check(found)


def test_a_wrong_option_is_refused_before_the_engine(engines: Engines) -> None:
    answer = engines.ask(format="w4a16")
    assert "mxpert for vLLM: --additional-config 'mxpert' — need one of 'a16w4'" in answer["error"]
    assert "Initializing a V1 LLM engine" not in answer["log"]


def test_a_checkpoint_without_a_tensor_is_refused(
    engines: Engines, checkpoint: Path, tmp_path: Path
) -> None:
    lacking, name = tmp_path / "lacking", "model.layers.1.mlp.experts.down_proj_scales"
    shutil.copytree(checkpoint, lacking)
    index = json.loads((lacking / "model.safetensors.index.json").read_text())
    path = lacking / index["weight_map"].pop(name)
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    (lacking / "model.safetensors.index.json").write_text(json.dumps(index))
    answer = engines.ask(format="a16w4", model=str(lacking))
    assert "need all tensors of the experts of model.layers.1.mlp.experts" in answer["error"]
    assert "w2_weight_scale" in answer["error"]


def test_without_the_option_vllm_does_as_ever(engines: Engines) -> None:
    """It refuses MXFP4, or on processors that its own CPU kernels know uses those."""
    answer = engines.ask(format=None)
    if "error" in answer:
        assert answer["error"].startswith("NotImplementedError: No MXFP4 MoE backend supports")
    else:
        assert "Using 'CPU' Mxfp4 MoE backend" in answer["log"]
    assert "mxpert" not in answer["log"]


def command(checkpoint: Path, port: int, option: str) -> list[str]:
    return [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(checkpoint),
        "--host=127.0.0.1",
        f"--port={port}",
        f"--additional-config={option}",
        "--served-model-name=demo",
        "--skip-tokenizer-init",
        "--enforce-eager",
        "--max-model-len=256",
        "--max-num-batched-tokens=256",
        "--kv-cache-memory-bytes=67108864",
    ]


@contextmanager
def served(checkpoint: Path, port: int, log: Path, end: signal.Signals) -> Iterator[str]:
    """`vllm serve` on the loopback; yields its address, and ends all of its processes."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command(checkpoint, port, '{"mxpert": "a16w4"}'),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        if process.poll() is None:
            os.killpg(process.pid, end)
        process.wait(60)


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    return number


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["first", "after a kill"])
def test_a_server_answers(
    checkpoint: Path, oracle: Oracle, tmp_path: Path, port: int, end: signal.Signals
) -> None:
    """Twice on one port: a killed server leaves nothing behind that stops the next one."""
    request = {
        "model": "demo",
        "prompt": PROMPT.tolist(),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
        "detokenize": False,
    }
    log = tmp_path / "serve.log"
    with served(checkpoint, port, log, end) as address:
        call = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(request).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(call, timeout=120) as answer:
                choice = json.load(answer)["choices"][0]
        except OSError as error:
            pytest.fail(f"{error}\n{log.read_text()[-4000:]}")
    each = [next(iter(found.values()))["logprob"] for found in choice["prompt_logprobs"][1:]]
    oracle.check(torch.tensor(each))
    assert "experts chosen by mxpert" in log.read_text()


def test_a_wrong_option_ends_the_command_with_one_line(checkpoint: Path, port: int) -> None:
    done = subprocess.run(
        command(checkpoint, port, '{"mxpert": "w4a16"}'),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    *_, line = done.stderr.strip().splitlines()
    assert line.startswith("mxpert for vLLM: --additional-config 'mxpert' — need one of 'a16w4'")
    assert "Traceback" not in done.stdout + done.stderr
    assert "EngineCore" not in done.stdout + done.stderr

"""One vLLM engine in a process of its own: orders on stdin, one JSON line each as the answer.

    python -m benchmarks.serving.engine '{"model": "tiny", "backend": "mxpert-a16w4", …}'

Imports run at once, so that several engines import while another one measures. Orders: load,
first_requests, log_probabilities, measure. What vLLM prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving.backends import BACKENDS, Backend
from benchmarks.serving.models import cache_bytes, config_of, register_loader, write_config

_GIB = 1 << 30
_LOADER = "random_gpt_oss"
_TRIES = 3
REQUEST = (128, 32)
"""Prompt and new tokens of the first request."""

NONE_FOUND = "none found"


def select(backend: Backend) -> dict[str, Any]:
    """vLLM's options for a backend; the plugin is registered where it is not installed."""
    if backend.activation_format is None:
        return {} if backend.moe_backend is None else {"moe_backend": backend.moe_backend}
    from mxpert.integrations.vllm import register

    register()
    from mxpert.integrations.serving.layer import ServedLayer
    from mxpert.integrations.vllm._experts import RoutingExperts

    if backend.modular:
        RoutingExperts.serves = staticmethod(lambda *_: False)  # type: ignore[method-assign]
    if not backend.computes:
        RoutingExperts.apply = lambda self, hidden_states, **_: hidden_states.clone()
        ServedLayer.run = lambda self, x, *_, out=None, **__: (
            x.clone() if out is None else out.copy_(x)
        )
    return {"additional_config": {"mxpert": backend.activation_format}}


def require_asked(backend: Backend, method: str) -> None:
    """Raise RuntimeError where vLLM's own method runs in the place of ours, or the other way."""
    ours = backend.activation_format is not None
    if method != NONE_FOUND and method.startswith("Mxpert") != ours:
        raise RuntimeError(f"{backend.name}: the experts are computed by {method}")


class Engine:
    """The engine of one model and backend.

    Args:
        spec: model, backend, layers (or None), device, eager, concurrency (all of them), prompt and
            new tokens, prefill (requests, tokens), folder.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.model, self.warm = spec, None, False
        self.config = config_of(spec["model"], spec["layers"])

    def load(self) -> dict[str, Any]:
        """Make the engine: weights, kernels, CUDA graphs."""
        spec, began = self.spec, time.monotonic()
        on_gpu = spec["device"] == "cuda"
        register_loader(_LOADER, spec["device"], lambda model: setattr(self, "model", model))
        lengths = spec["prompt"] + spec["new_tokens"]
        requests, length = spec["prefill"]
        tokens = max(*(count * lengths for count in spec["concurrency"]), requests * length, 2048)
        options: dict[str, Any] = select(BACKENDS[spec["backend"]])
        if on_gpu:  # several engines may share the GPU: memory is given, not profiled
            options["gpu_memory_utilization"] = 0.1
        if on_gpu and not spec["eager"]:
            sizes = sorted({1, *spec["concurrency"]})
            options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        from vllm import LLM

        self.llm = LLM(
            model=str(write_config(Path(spec["folder"]), spec["model"], spec["layers"])),
            skip_tokenizer_init=True,
            load_format=_LOADER,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=max(8, *spec["concurrency"]),
            max_num_batched_tokens=8192 if on_gpu else 512,
            kv_cache_memory_bytes=cache_bytes(self.config, tokens),
            enable_prefix_caching=False,
            enforce_eager=spec["eager"],
            disable_log_stats=True,
            **options,
        )
        seconds, method = time.monotonic() - began, self.moe_method()
        require_asked(BACKENDS[spec["backend"]], method)
        return {
            "load_s": seconds,
            "moe_method": method,
            "weights_gib": sum(p.nbytes for p in self.model.parameters()) / _GIB,  # type: ignore[attr-defined]
        }

    def first_requests(self) -> dict[str, Any]:
        """Time the first request after loading, and two further ones."""
        first, *warm = (self.generate(1, *REQUEST, seed=seed) for seed in range(3))
        return {"first_request_s": first, "warm_request_s": min(warm)}

    def moe_method(self) -> str:
        """Which of vLLM's methods computes the experts, the backend that it chose if it chose one,
        and the class of the experts."""
        for module in self.model.modules():  # type: ignore[attr-defined]
            method = getattr(module, "quant_method", None)
            if hasattr(method, "process_weights_after_loading") and hasattr(module, "w13_weight"):
                name, chosen = type(method).__name__, getattr(method, "mxfp4_backend", None)
                chose = "" if name.startswith("Mxpert") else getattr(chosen, "name", "")
                kernel = getattr(method, "moe_kernel", None)
                experts = getattr(kernel, "fused_experts", None)
                computes = "" if experts is None else type(experts).__name__
                return " ".join(filter(None, (name, chose, computes)))
        return NONE_FOUND

    def prompts(self, count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.config["vocab_size"], (count, length), generator=generator)
        return [{"prompt_token_ids": line} for line in ids.tolist()]

    def generate(self, count: int, length: int, new: int, seed: int = 0) -> float:
        """Seconds in which `count` prompts of `length` tokens get `new` tokens each."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        batch = self.prompts(count, length, seed)
        self.wait()
        began = time.perf_counter()
        done = self.llm.generate(batch, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        if not all(len(each.outputs[0].token_ids) == new for each in done):
            raise RuntimeError("a request ended early")
        return seconds

    def wait(self) -> None:
        if self.spec["device"] == "cuda":
            torch.cuda.synchronize()

    def log_probabilities(self, count: int, length: int) -> dict[str, Any]:
        """Of each token but the first of fixed prompts."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        done = self.llm.generate(self.prompts(count, length, 1), sampling, use_tqdm=False)
        return {
            "log_probabilities": [
                found[token].logprob
                for each in done
                for token, found in zip(
                    each.prompt_token_ids[1:], each.prompt_logprobs[1:], strict=True
                )
            ]
        }

    def decode_times(self, count: int, prompt: int, new: int) -> tuple[float, float]:
        """Seconds to the first token and to the last of `new`; again where noise swaps them."""
        for _ in range(_TRIES):
            first, seconds = (self.generate(count, prompt, each) for each in (1, new))
            if seconds > first:
                return first, seconds
        raise RuntimeError(f"{new} tokens took no longer than one, {_TRIES} times")

    def measure(self) -> dict[str, Any]:
        """One round: decode at each concurrency, then prefill; the first one warms up before."""
        spec, rows, warm = self.spec, [], self.warm
        self.warm = True
        prompt, new = spec["prompt"], spec["new_tokens"]
        for count in spec["concurrency"]:
            if not warm:
                self.generate(count, prompt, 4)
            first, seconds = self.decode_times(count, prompt, new)
            rate = count * (new - 1) / (seconds - first)
            rows.append(("decode", count, prompt, new, seconds, first, rate))
        count, length = spec["prefill"]
        if not warm:
            self.generate(count, length, 1)
        seconds = min(self.generate(count, length, 1, seed=seed) for seed in range(3))
        rows.append(("prefill", count, length, 1, seconds, seconds, count * length / seconds))
        peak = torch.cuda.max_memory_allocated() / _GIB if spec["device"] == "cuda" else 0.0
        return {"rows": rows, "peak_gib": peak}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    import vllm

    engine = Engine(json.loads(sys.argv[1]))
    answer: dict[str, Any] = {"vllm": vllm.__version__}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        order = json.loads(line)
        try:
            answer = getattr(engine, order.pop("do"))(**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}


if __name__ == "__main__":
    main()

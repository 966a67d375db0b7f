"""vLLM engines one after another in one process: requests on stdin, answers on stdout.

A request is a JSON line, for example {"model": "path", "format": "a16w4"}. The answer is a line
``ANSWER {"log_probabilities": …}`` with those of a prompt's tokens, or ``ANSWER {"error": …}``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from mxpert.integrations.checkpoints.gpt_oss import demo_token_ids

MAX_NUM_BATCHED_TOKENS = 256


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Make one engine and ask it; with "reload" once more after its weights were loaded again."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    activation_format, reload = request.pop("format"), request.pop("reload", False)
    eager = not request.pop("compile", False)
    llm = LLM(
        **request,
        skip_tokenizer_init=True,
        enforce_eager=eager,
        max_model_len=MAX_NUM_BATCHED_TOKENS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        kv_cache_memory_bytes=1 << 26,
        dtype="bfloat16",
        additional_config={} if activation_format is None else {"mxpert": activation_format},
    )
    prompt = {"prompt_token_ids": demo_token_ids(200).tolist()}
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)

    def log_probabilities() -> list[float]:
        found = llm.generate([prompt], sampling, use_tqdm=False)[0].prompt_logprobs
        return [next(iter(each.values())).logprob for each in found[1:]]

    answers = [log_probabilities()]
    if reload:
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        answers.append(log_probabilities())
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return {"log_probabilities": answers}


if __name__ == "__main__":
    # The scheduler runs in this process, and so does a single rank. What is compiled is traced, but
    # not by Inductor, whose C++ takes minutes.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1"}
    for line in sys.stdin:
        try:
            made = answer(json.loads(line))
        except Exception as error:
            made = {"error": f"{type(error).__name__}: {error}"}
        print("ANSWER", json.dumps(made), flush=True)

"""One vLLM engine in a process of its own: prompt log-probabilities as a JSON line.

python engine.py '{"model": "path", "format": "a16w4", "tensor_parallel_size": 2}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mxpert.integrations.checkpoints.gpt_oss import demo_token_ids


def main(request: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    activation_format, reload = request.pop("format"), request.pop("reload", False)
    eager = not request.pop("compile", False)
    llm = LLM(
        **request,
        skip_tokenizer_init=True,
        enforce_eager=eager,
        max_model_len=256,
        max_num_batched_tokens=512,
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
    print("ANSWER", json.dumps({"log_probabilities": answers}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

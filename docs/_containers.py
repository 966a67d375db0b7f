"""Writes the tables of docs/which-checkpoints-run.md: `python docs/_containers.py`.

tests/integrations/checkpoints/test_containers_page.py fails if the page has other tables than
mxpert.integrations.checkpoints.containers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mxpert.integrations.checkpoints.containers import CONTAINERS, UNSERVED

PAGE = Path(__file__).with_name("which-checkpoints-run.md")
_BESIDE_DENSE = "where other layers are dense"
_FP8 = "yes, FP8 layers become bf16"


@dataclass(frozen=True)
class Ways:
    """Where a container runs, besides `load_expert_weights` and `mxpert inspect`."""

    transformers: str
    vllm: str
    sglang: str


WAYS: dict[str, Ways] = {
    "gpt-oss": Ways("yes", "yes", "yes"),
    "compressed-tensors mxfp4-pack-quantized": Ways(_BESIDE_DENSE, "yes", "yes"),
    "Quark OCP MX": Ways(_BESIDE_DENSE, "yes, no static scales of activations", "yes"),
    "DeepSeek-V4": Ways(_FP8, "yes", "no"),
    "MiMo": Ways(_FP8, "no", "no"),
    "ModelOpt NVFP4": Ways(_BESIDE_DENSE, "yes", "yes"),
    "compressed-tensors nvfp4-pack-quantized": Ways(_BESIDE_DENSE, "yes", "yes"),
    "MiniMax MXFP8": Ways(_BESIDE_DENSE, "yes, from 0.26", "yes, where SGLang has MXFP8"),
    "ModelOpt MXFP8": Ways(_BESIDE_DENSE, "yes, from 0.26", "no"),
    "compressed-tensors mxfp8-quantized": Ways(_BESIDE_DENSE, "yes", f"yes, {_BESIDE_DENSE}"),
    "compressed-tensors pack-quantized": Ways(_BESIDE_DENSE, "yes; zero points from 0.32", "yes"),
    "AWQ": Ways(_BESIDE_DENSE, "yes", "yes"),
    "GPTQ": Ways(_BESIDE_DENSE, "yes, with `sym`", "yes, with `sym`"),
}


def served_table() -> str:
    """The containers that load."""
    lines = [
        "| container | weights | tensors of experts | `load_expert_weights`, `inspect` "
        "| Transformers | vLLM | SGLang |",
        "|---|---|---|---|---|---|---|",
    ]
    for container in CONTAINERS:
        ways, tensors = WAYS[container.name], ", ".join(f"`{each}`" for each in container.tensors)
        cells = container.name, container.weight_format, tensors, "yes"
        lines.append(f"| {' | '.join((*cells, ways.transformers, ways.vllm, ways.sglang))} |")
    return "\n".join(lines)


def config_table() -> str:
    """What the config of each container says."""
    lines = ["| container | `config.json` |", "|---|---|"]
    lines += [f"| {each.name} | {_code(each.stated.example)} |" for each in CONTAINERS]
    return "\n".join(lines)


def unserved_table() -> str:
    """Known formats that are refused by name."""
    lines = ["| format | container | `config.json` |", "|---|---|---|"]
    lines += [
        f"| {each.weight_format} | {each.name} | {_code(each.stated.example)} |"
        for each in UNSERVED
    ]
    return "\n".join(lines)


def _code(example: str) -> str:
    """Entries of a config as code; text that has code of its own stays."""
    return re.sub(r'"[\w.]+": "[\w.-]+"', lambda entry: f"`{entry[0]}`", example)


TABLES = {"containers": served_table, "configs": config_table, "refused": unserved_table}


def with_tables(text: str) -> str:
    """The page's text with today's tables between their markers."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: python docs/_containers.py -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        if found:
            text = f"{before}{begin}\n\n{table()}\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

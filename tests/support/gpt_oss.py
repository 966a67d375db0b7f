"""A tiny gpt-oss checkpoint in the published MXFP4 layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mxpert.integrations.checkpoints.gpt_oss import write_demo_checkpoint


def tiny_gpt_oss(directory: Path, **changes: Any) -> Path:
    """The checkpoint, in shards; `changes` replace single sizes."""
    sizes: dict[str, Any] = dict(
        hidden_size=64, intermediate_size=96, num_experts=4, top_k=2, num_layers=2
    )
    return write_demo_checkpoint(directory, **sizes | changes)

"""Checkpoints without some of their tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def copy_without(source: Path, target: Path, *names: str) -> Path:
    """Copy a checkpoint without tensors, of which neither a file nor the index knows.

    Args:
        names: of the tensors; each must be there.
    """
    shutil.copytree(source, target)
    dropped = set()
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        present = set(names) & set(tensors)
        dropped |= present
        if present:
            kept = {name: tensor for name, tensor in tensors.items() if name not in present}
            save_file(kept, file, metadata={"format": "pt"})
    assert dropped == set(names), set(names) - dropped
    index = target / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text("utf-8"))
        for name in names:
            del content["weight_map"][name]
        index.write_text(json.dumps(content), "utf-8")
    return target

"""Run one MoE layer of a gpt-oss checkpoint on random tokens.

    python examples/gpt_oss_layer.py                          a small random checkpoint
    python examples/gpt_oss_layer.py ./gpt-oss-20b --layer 12

The random checkpoint needs transformers; it is written to a temporary folder. Prints the layer's
output shape and root mean square, and the kernel that ran.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import mxpert
from mxpert.integrations.checkpoints.gpt_oss import write_demo_checkpoint
from mxpert.integrations.checkpoints.load import load_gpt_oss_layers


def run(directory: Path, index: int, num_tokens: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = next(load_gpt_oss_layers(directory, [index], device))
    weights = layer.weights.prepare(device=device)
    x = torch.randn(num_tokens, weights.hidden_size, device=device, dtype=torch.bfloat16)
    logits = torch.nn.functional.linear(x, layer.router_weight, layer.router_bias)
    topk_weights, topk_ids = mxpert.route_topk(logits, top_k=layer.top_k)
    y = mxpert.fused_moe(x, weights, topk_weights, topk_ids, activation=layer.activation)
    rms = y.float().square().mean().sqrt()
    print(f"layer {index}: {tuple(x.shape)} -> {tuple(y.shape)}, rms {rms:.3f}")
    print(
        mxpert.explain(
            mxpert.fused_moe, x, weights, topk_weights, topk_ids, activation=layer.activation
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        nargs="?",
        help="directory of a gpt-oss checkpoint (default: a small random one)",
    )
    parser.add_argument("--layer", type=int, default=0, help="decoder layer (default: 0)")
    parser.add_argument("--tokens", type=int, default=16, help="number of tokens (default: 16)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or write_demo_checkpoint(Path(folder) / "gpt-oss")
        run(checkpoint, options.layer, options.tokens)


if __name__ == "__main__":
    main()

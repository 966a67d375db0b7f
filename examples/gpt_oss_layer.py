"""One MoE layer of a gpt-oss checkpoint: python examples/gpt_oss_layer.py DIRECTORY [LAYER]."""

import sys

import torch

import mxpert
from mxpert.integrations.checkpoints import load_gpt_oss_layers

directory, index = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = next(load_gpt_oss_layers(directory, [index], device))
weights = layer.weights.prepare(device=device)
x = torch.randn(16, weights.hidden_size, device=device, dtype=torch.bfloat16)
logits = torch.nn.functional.linear(x, layer.router_weight, layer.router_bias)
topk_weights, topk_ids = mxpert.route_topk(logits, top_k=layer.top_k)
y = mxpert.fused_moe(x, weights, topk_weights, topk_ids, activation=layer.activation)
rms = y.float().square().mean().sqrt()
print(f"layer {index}: {tuple(x.shape)} -> {tuple(y.shape)}, rms {rms:.3f}")

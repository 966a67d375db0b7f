"""Seconds to quantise a trainer's bf16 weights into a prepared model, in place, on this GPU.

    python -m benchmarks.moe.requantize --model gpt-oss-120b --layers 36 --json requantize.json

One layer's prepared weights and its dense ones are in memory; they are written `layers` times, as
an update of the whole model does layer by layer. Before it is timed, the bits are compared with
those of the offline path. The GPU's read bandwidth gives the least time: dense weights are read
once.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from mxpert import GateUpOrder
from mxpert.modules import quantize_weights, requantize_

SIZES = {"gpt-oss-20b": (32, 2880, 2880, 24), "gpt-oss-120b": (128, 2880, 2880, 36)}
"""Experts, hidden and intermediate size, layers."""


def seconds(call: object, repeats: int) -> list[float]:
    """Device seconds of each call, after two that are not counted."""
    found = []
    for repeat in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()  # type: ignore[operator]
        end.record()
        end.synchronize()
        if repeat >= 2:
            found.append(start.elapsed_time(end) / 1e3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, default="gpt-oss-120b")
    parser.add_argument("--layers", type=int, help="of the model; default: its own")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    experts, hidden, inner, layers = SIZES[options.model]
    layers = options.layers or layers
    device, order = torch.device("cuda"), GateUpOrder.INTERLEAVED

    def dense() -> tuple[torch.Tensor, torch.Tensor]:
        made = []
        for size in ((experts, 2 * inner, hidden), (experts, hidden, inner)):
            weight = torch.empty(size, dtype=torch.bfloat16, device=device)
            for expert in weight:
                expert.normal_(std=hidden**-0.5)
            made.append(weight)
        return made[0], made[1]

    weights = quantize_weights(*dense(), gate_up_order=order).prepare(device=device)
    new = dense()
    requantize_(weights, *new)
    wanted = quantize_weights(*new, gate_up_order=order).prepare(device=device)
    for name, tensor in wanted.state_dict().items():
        assert name == "_extra_state" or torch.equal(weights.state_dict()[name], tensor), name
    del wanted
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    times = seconds(lambda: requantize_(weights, *new), options.repeats)
    scratch = torch.cuda.max_memory_allocated() - held
    nbytes = sum(each.nbytes for each in new)
    read = statistics.median(seconds(lambda: [each.sum() for each in new], options.repeats))
    layer = statistics.median(times)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": options.model,
        "layout": weights.layout.name,
        "layers": layers,
        "layer_s": layer,
        "layer_band_s": [min(times), max(times)],
        "model_s": layer * layers,
        "read_alone_model_s": read * layers,
        "dense_bytes_per_s": nbytes / layer,
        "scratch_bytes": scratch,
    }
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

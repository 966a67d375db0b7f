"""Switch a model from torch._grouped_mm to MXFP8 by changing one function.

    python examples/grouped_mm_drop_in.py

The experts below call torch's op, as those of torchtitan do. The same module runs on
`mxpert.training.grouped_mm`, which has the same signature. Prints the SQNR of the output and of
every gradient of the MXFP8 run against the bf16 run. Takes seconds on a CPU.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import silu

from mxpert.training import grouped_mm


class Experts(nn.Module):
    """SwiGLU experts over rows that are sorted by expert, in bfloat16."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        multiply: Callable[..., torch.Tensor],
    ):
        super().__init__()
        self.multiply = multiply
        shapes = {
            "w1": (intermediate_size, hidden_size),
            "w2": (hidden_size, intermediate_size),
            "w3": (intermediate_size, hidden_size),
        }
        for name, (rows, columns) in shapes.items():
            weight = torch.randn(num_experts, rows, columns) / columns**0.5
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        w1, w2, w3 = (weight.bfloat16().transpose(-2, -1) for weight in (self.w1, self.w2, self.w3))
        hidden = silu(self.multiply(x, w1, offs=ends)) * self.multiply(x, w3, offs=ends)
        return self.multiply(hidden, w2, offs=ends)


def run(multiply: Callable[..., torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """Output and gradients of one pass, from the same seed."""
    torch.manual_seed(0)
    experts = Experts(4, 256, 512, multiply).to(device)
    tokens_per_expert = torch.tensor([64, 0, 128, 64], device=device)
    x = torch.randn(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = experts(x, tokens_per_expert)
    y.backward(torch.randn(y.shape, device=device, dtype=y.dtype))
    return {
        "y": y.detach(),
        "x.grad": x.grad,
        **{f"{name}.grad": value.grad for name, value in experts.named_parameters()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where to run (default: the GPU where there is one)",
    )
    device = parser.parse_args().device
    plain, quantised = run(torch._grouped_mm, device), run(grouped_mm, device)
    for name, wanted in plain.items():
        noise = (quantised[name].double() - wanted.double()).norm() / wanted.double().norm()
        print(f"{name}: {-20 * noise.log10():.1f} dB")


if __name__ == "__main__":
    main()

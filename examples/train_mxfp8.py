"""Train a character-level MoE language model twice from one seed, in bf16 and in MXFP8:
python examples/train_mxfp8.py --steps 300 --plot loss.png [--hidden-size 512 --num-layers 4 …]."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from mxpert.training import MXFP8Recipe, MXMoE

TEXT = Path(__file__).resolve().parent.parent / "tests" / "training" / "text.txt"
RECIPES = {"bf16": MXFP8Recipe(enabled=False), "mxfp8": MXFP8Recipe(),
           "mxfp8-hybrid": MXFP8Recipe.hybrid()}


class Block(nn.Module):
    """Causal attention, then experts on bfloat16 activations; parameters stay float32."""

    def __init__(self, size: argparse.Namespace, recipe: MXFP8Recipe):
        super().__init__()
        hidden = size.hidden_size
        self.heads = hidden // 32
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.moe = MXMoE(hidden, 2 * hidden, size.num_experts, size.top_k, recipe=recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, 32)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(*qkv, is_causal=True)  # [B, heads, S, 32]
        x = x + self.out(attention.transpose(1, 2).flatten(-2))
        return x + self.moe(self.norms[1](x).bfloat16())


class LanguageModel(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, vocabulary: int, size: argparse.Namespace, recipe: MXFP8Recipe):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size.hidden_size)
        self.position = nn.Embedding(size.length, size.hidden_size)
        self.blocks = nn.ModuleList(Block(size, recipe) for _ in range(size.num_layers))
        self.head = nn.Linear(size.hidden_size, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(recipe: MXFP8Recipe, options: argparse.Namespace) -> list[float]:
    """Loss of each step; seed, initial weights and batches are the same for every recipe."""
    text = options.text.read_text(encoding="utf-8")
    letters = {letter: index for index, letter in enumerate(sorted(set(text)))}
    data = torch.tensor([letters[letter] for letter in text], device=options.device)
    torch.manual_seed(options.seed)
    model = LanguageModel(len(letters), options, recipe).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    window = torch.arange(options.length + 1, device=options.device)
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(data) - options.length, (options.batch, 1))
        ids = data[starts.to(options.device) + window]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        (loss + sum(block.moe.aux_loss for block in model.blocks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def final_loss(losses: list[float]) -> float:
    """Mean of the last sixth of the steps."""
    last = losses[-max(1, len(losses) // 6):]
    return sum(last) / len(last)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 300), ("batch", 8), ("length", 128), ("hidden-size", 64),
                          ("num-layers", 2), ("num-experts", 8), ("top-k", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["bf16", "mxfp8"])
    parser.add_argument("--plot", type=Path, help="write the loss curves to this file")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    curves = {name: train(RECIPES[name], options) for name in options.recipes}
    reference = final_loss(next(iter(curves.values())))
    for name, losses in curves.items():
        final = final_loss(losses)
        print(f"{name}: final loss {final:.4f} ({final / reference - 1:+.2%})")
    if options.plot:
        from matplotlib import pyplot

        for name, losses in curves.items():
            pyplot.plot(losses, label=name, linewidth=1)
        pyplot.gca().set(xlabel="step", ylabel="cross entropy per character", yscale="log")
        pyplot.legend()
        pyplot.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    main()

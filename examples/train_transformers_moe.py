"""Train a small Qwen3-MoE of Transformers on the bytes of a text, its experts in MXFP8; save it.

    python examples/train_transformers_moe.py                     a short run
    python examples/train_transformers_moe.py /tmp/moe --steps 300 --batch 8 --length 128
    mxpert eval /tmp/moe --text tests/training/text.txt --context 128

Prints the loss as it falls and writes a bf16 checkpoint that Transformers loads.
"""

import argparse
from pathlib import Path

import torch
import transformers

import mxpert
from mxpert.integrations.models.convert import restore
from mxpert.training import MXFP8Recipe

TEXT = Path(__file__).resolve().parent.parent / "tests" / "training" / "text.txt"


def build(options: argparse.Namespace) -> transformers.PreTrainedModel:
    """A Qwen3-MoE whose token ids are bytes."""
    size = options.hidden_size
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=size,
        moe_intermediate_size=2 * size,
        head_dim=32,
        num_attention_heads=size // 32,
        num_key_value_heads=size // 32,
        num_hidden_layers=options.num_layers,
        num_experts=options.num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(options.seed)
    return transformers.Qwen3MoeForCausalLM(config)


def train(options: argparse.Namespace) -> transformers.PreTrainedModel:
    """The trained model with its experts as Transformers has them."""
    model = build(options).to(options.device).train()
    mxpert.convert(model, recipe=MXFP8Recipe(), progress=False)
    content = bytearray(options.text.read_bytes())
    data = torch.frombuffer(content, dtype=torch.uint8).long().to(options.device)
    held_out = len(data) // 8  # the last eighth is not trained on
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    window = torch.arange(options.length, device=options.device)
    for step in range(options.steps):
        starts = torch.randint(len(data) - held_out - options.length, (options.batch, 1))
        ids = data[starts.to(options.device) + window]
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return restore(model)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "output",
        type=Path,
        nargs="?",
        default=Path("reports/train_transformers_moe"),
        help="folder of the checkpoint (default: reports/train_transformers_moe)",
    )
    gpu = torch.cuda.is_available()
    for name, default, text in (
        ("steps", 300 if gpu else 20, "training steps"),
        ("batch", 8 if gpu else 2, "windows in a batch"),
        ("length", 128 if gpu else 32, "bytes in a window"),
        ("hidden-size", 64, "hidden size, a multiple of 32"),
        ("num-layers", 2 if gpu else 1, "decoder layers"),
        ("num-experts", 8 if gpu else 4, "experts in a layer"),
        ("seed", 0, "of the weights"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default here: {default})"
        )
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: 0.002)")
    parser.add_argument("--text", type=Path, default=TEXT, help="a file to train on")
    parser.add_argument(
        "--device",
        default="cuda" if gpu else "cpu",
        help="where to run (default: the GPU where there is one)",
    )
    options = parser.parse_args()
    train(options).to(torch.bfloat16).save_pretrained(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()

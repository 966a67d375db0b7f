"""Train a byte-level MoE language model in bf16 and in MXFP8 from one seed and compare the losses.

    python examples/train_moe_lm.py                              a short run of a tiny model
    python examples/train_moe_lm.py --size small --steps 300 --output runs
    torchrun --nproc-per-node 2 examples/train_moe_lm.py --expert-parallel 2

Prints the final and the held-out loss of each format. --output writes loss.json and loss.png;
--save writes the model of the last format as a Mixtral checkpoint, which transformers loads.
With --expert-parallel N each of N ranks holds a part of the experts, and the windows of a batch are
dealt out to all ranks of torchrun. A run with --micro-batches of as many parts has the same losses.
Without --text the text is the Python source of this installation's standard library: about 30 MB,
more than a run reads. The exit code is 1 if the final loss of a format is more than 2 % above the
first format's.
"""

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F  # noqa: N812 (torch's own convention)
from torch.nn.parallel import DistributedDataParallel

import mxpert
from mxpert.cli.plots import figure, has_matplotlib, line_style, save, styled
from mxpert.cli.report import PLOT_HINT
from mxpert.distributed import ExpertParallel, Transport
from mxpert.training import (
    MXFP8Recipe,
    MXMoE,
    clip_grad_norm_,
    full_state_dict,
    local_expert_parameters,
    prepare_for_ddp,
)

RECIPES = {
    "bf16": MXFP8Recipe(enabled=False),
    "mxfp8": MXFP8Recipe(),
    "mxfp8-hybrid": MXFP8Recipe.hybrid(),
    "mxfp8-exact": MXFP8Recipe(scale_span=mxpert.ScaleSpan.BLOCK),
    "mxfp8-block128": MXFP8Recipe(scale_span=mxpert.ScaleSpan.SPAN128),
    "mxfp8-row": MXFP8Recipe(scale_span=mxpert.ScaleSpan.ROW),
}
VOCABULARY = 256
"""Bytes: no tokenizer."""

ROPE_THETA, NORM_EPSILON = 10_000.0, 1e-5
WORST_RATIO = 1.02
FINAL_STEPS = 20
HELD_OUT_BATCHES = 4
LONGEST_TEXT = 1 << 25


@dataclass(frozen=True)
class Size:
    """A model and its batches of `batch` windows of `length` bytes."""

    hidden: int
    layers: int
    heads: int
    experts: int
    top_k: int
    ffn: int
    length: int
    batch: int
    lr: float


SIZES = {
    "tiny": Size(64, 1, 2, 4, 2, 96, 32, 4, 4e-3),  # a test of seconds on a CPU
    "small": Size(64, 2, 2, 8, 2, 128, 128, 8, 3e-3),  # minutes on a CPU
    "full": Size(512, 6, 8, 16, 2, 512, 512, 32, 1e-3),  # 82 million parameters, for a GPU
}


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(size.hidden, size.hidden, bias=False) for _ in range(4)
        )
        width = size.hidden // size.heads
        rate = ROPE_THETA ** (-torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(size.length), rate).repeat(1, 2)  # [S, D]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # [B, heads, S, D]
        y = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        low, high = x.chunk(2, dim=-1)
        turned = x * self.cos[:length] + torch.cat((-high, low), -1) * self.sin[:length]
        return turned.to(x.dtype)


class Block(nn.Module):
    """Attention, then experts on bfloat16 activations; parameters stay float32.

    A float64 model, for checks, is float64 throughout.
    """

    def __init__(self, size: Size, recipe: MXFP8Recipe, ep: ExpertParallel | None):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(size.hidden, NORM_EPSILON) for _ in range(2))
        self.attention = Attention(size)
        self.moe = MXMoE(
            size.hidden, size.ffn, size.experts, size.top_k, recipe=recipe, expert_parallel=ep
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        rows = self.norms[1](x)
        return x + self.moe(rows if rows.dtype == torch.float64 else rows.bfloat16())


class LanguageModel(nn.Module):
    """The architecture of Mixtral: bytes [B, S] in, logits [B, S, 256] of the next byte out."""

    def __init__(self, size: Size, recipe: MXFP8Recipe, ep: ExpertParallel | None = None):
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(VOCABULARY, size.hidden)
        self.blocks = nn.ModuleList(Block(size, recipe, ep) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, NORM_EPSILON)
        self.head = nn.Linear(size.hidden, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(
        self, window: torch.Tensor, wrapped: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross entropy in nats per byte of windows [B, S + 1], and the balancing loss.

        `wrapped` is this model in DistributedDataParallel.
        """
        with torch.autocast(window.device.type, torch.bfloat16, enabled=window.is_cuda):
            logits = (wrapped or self)(window[:, :-1])
        balance = torch.stack([block.moe.aux_loss for block in self.blocks]).sum()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()), balance


def start_ranks(expert_parallel: int, device: str) -> DeviceMesh:
    """The processes of torchrun: experts lie along "ep"; ranks along "dp" hold the same ones."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if expert_parallel < 1 or world % expert_parallel or "WORLD_SIZE" not in os.environ:
        raise SystemExit(
            f"--expert-parallel: need a divisor of {world} ranks, got {expert_parallel}; start "
            f"with torchrun --nproc-per-node {max(expert_parallel, 1)}"
        )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shape = expert_parallel, world // expert_parallel
    return init_device_mesh(device, shape, mesh_dim_names=("ep", "dp"))


def parallel_experts(mesh: DeviceMesh, size: Size) -> ExpertParallel:
    """The exchange of all layers, which run one after the other."""
    return ExpertParallel(
        mesh["ep"],
        num_experts=size.experts,
        top_k=size.top_k,
        hidden_size=size.hidden,
        max_tokens=size.batch * size.length,
        transport=Transport.ALL_TO_ALL,
    )


def read_text(path: Path | None) -> bytes:
    """A file, or the sources of the standard library in a fixed order."""
    if path is not None:
        return path.read_bytes()
    folder = Path(sysconfig.get_path("stdlib"))
    sources = sorted(
        source
        for source in folder.rglob("*.py")
        if not {"site-packages", "dist-packages"} & set(source.parts)
    )
    text = b"".join(source.read_bytes() for source in sources)
    return text[:LONGEST_TEXT]


def split(text: bytes, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on and bytes held out: every twentieth stretch of the text, or, of a short
    text, its end."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    unit = 2 * (length + 1)
    if len(data) < 4 * unit:
        raise SystemExit(f"--text: need at least {4 * unit} bytes, got {len(data)}")
    pieces = data.split(max(len(data) // 400, unit))
    if len(pieces) < 40:
        return data[:-unit], data[-unit:]
    train = [piece for index, piece in enumerate(pieces) if index % 20 != 10]
    return torch.cat(train), torch.cat(pieces[10::20])


def windows(data: torch.Tensor, size: Size, count: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches int64 [B, S + 1] at random places, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(size.length + 1, device=data.device)
    for _ in range(count):
        starts = torch.randint(len(data) - size.length, (size.batch, 1), generator=generator)
        yield data[starts.to(data.device) + window].long()


def rate(step: int, steps: int) -> float:
    """Factor of the learning rate: a tenth of the steps up, then down a cosine to a tenth."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def train(
    recipe: MXFP8Recipe,
    data: tuple[torch.Tensor, torch.Tensor],
    size: Size,
    steps: int,
    seed: int,
    *,
    micro_batches: int = 1,
    mesh: DeviceMesh | None = None,
) -> tuple[LanguageModel, dict[str, Any]]:
    """One run; seed, first weights and batches do not depend on the recipe or the ranks."""
    train_data, held_out = data
    torch.manual_seed(seed)
    ep = mesh and parallel_experts(mesh, size)
    model = LanguageModel(size, recipe, ep).to(train_data.device)
    wrapped = None
    if mesh:  # the experts' gradients are averaged over "dp", all others over all ranks
        prepare_for_ddp(model, mesh["dp"].get_group())
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.lr, betas=(0.9, 0.95), fused=train_data.is_cuda
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    losses, began = [], time.perf_counter()
    for batch in windows(train_data, size, steps, seed):
        own = batch.chunk(mesh.size())[mesh.get_rank()] if mesh else batch
        total = torch.zeros((), device=batch.device)
        for part in own.chunk(micro_batches):
            loss, balance = model.loss(part, wrapped)
            ((loss + balance) / micro_batches).backward()
            total += loss.detach() / micro_batches
        if mesh:
            dist.all_reduce(total.div_(mesh.size()))
        clip_grad_norm_(model, 1.0, expert_parallel_group=ep and ep.group)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    losses = [round(loss, 5) for loss in torch.stack(losses).tolist()]  # waits for the device
    seconds = time.perf_counter() - began
    with torch.no_grad():
        batches = windows(held_out, size, HELD_OUT_BATCHES, seed)
        test = torch.stack([model.loss(batch)[0] for batch in batches]).mean().item()
    return model, {
        "losses": losses,
        "final": final_loss(losses),
        "held_out": test,
        "seconds": seconds,
    }


def final_loss(losses: Sequence[float]) -> float:
    """Mean of the last steps."""
    last = losses[-FINAL_STEPS:]
    return sum(last) / len(last)


def save_mixtral(model: LanguageModel, folder: Path, ep: ExpertParallel | None = None) -> None:
    """Weights in bfloat16 under the names of a Mixtral checkpoint, and its config.json.

    Every rank of `ep` calls it; the first one writes.
    """
    state = model.state_dict() if ep is None else full_state_dict(model, ep)
    if dist.is_initialized() and dist.get_rank():
        return
    tensors = {
        "model.embed_tokens.weight": state["embed.weight"],
        "model.norm.weight": state["norm.weight"],
        "lm_head.weight": state["head.weight"],
    }
    for index in range(model.size.layers):
        block, layer = f"blocks.{index}", f"model.layers.{index}"
        names = {"input_layernorm": "norms.0", "post_attention_layernorm": "norms.1"} | {
            f"self_attn.{name}_proj": f"attention.{name}_proj" for name in "qkvo"
        }
        tensors |= {
            f"{layer}.{theirs}.weight": state[f"{block}.{ours}.weight"]
            for theirs, ours in names.items()
        }
        experts = f"{layer}.block_sparse_moe"
        tensors[f"{experts}.gate.weight"] = state[f"{block}.moe.router"]
        for expert in range(model.size.experts):
            gate, up = state[f"{block}.moe.gate_up_proj.weight"][expert].chunk(2)
            down = state[f"{block}.moe.down_proj.weight"][expert]
            tensors |= {
                f"{experts}.experts.{expert}.{name}.weight": value
                for name, value in (("w1", gate), ("w3", up), ("w2", down))
            }
    size = model.size
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.hidden // size.heads,
        "num_local_experts": size.experts,
        "num_experts_per_tok": size.top_k,
        "max_position_embeddings": size.length,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "hidden_act": "silu",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    stored = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


@styled
def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Smoothed losses with the held-out ones as crosses, and their distance from the first run."""
    drawing, ((curves,), (ratios,)) = figure("", 2, 1, size=(7, 6), dpi=130, heights=(2, 1))
    reference = smooth(next(iter(runs.values()))["losses"])
    for index, (name, run) in enumerate(runs.items()):
        values = smooth(run["losses"])
        style = line_style(index, size=4) | {"markevery": (index, max(1, len(values) // 12))}
        (line,) = curves.plot(values, label=f"{name}: {run['final']:.3f}", **style)
        curves.plot(len(values), run["held_out"], "x", color=line.get_color())
        distances = [100 * (v / base - 1) for v, base in zip(values, reference, strict=True)]
        ratios.plot(distances, **style)
    curves.set(ylabel="cross entropy, nats per byte")
    ratios.set(xlabel="step", ylabel=f"% above {next(iter(runs))}", ylim=(-3, 3))
    for axes in (curves, ratios):
        axes.grid()
    curves.legend(title="final loss; × held out")
    save(drawing, path)


def smooth(losses: Sequence[float]) -> list[float]:
    """Mean of the last FINAL_STEPS at each step."""
    return [final_loss(losses[:end]) for end in range(1, len(losses) + 1)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    names = ", ".join(RECIPES)
    add("--steps", type=int, default=300 if gpu else 15, help="training steps (%(default)s here)")
    add(
        "--formats",
        default="bf16,mxfp8",
        type=lambda text: text.split(","),
        help=f"comma-separated, some of {names}; the others are compared with the first "
        "(default: bf16,mxfp8)",
    )
    add(
        "--size",
        choices=SIZES,
        default="small" if gpu else "tiny",
        help="tiny: seconds on a CPU; small: minutes on a CPU; full: 82 million "
        "parameters, for a GPU (%(default)s here)",
    )
    add("--expert-parallel", type=int, metavar="N", help="ranks that share the experts; torchrun")
    add("--micro-batches", type=int, default=1, metavar="N", help="parts of each batch (1)")
    add("--text", type=Path, help="a file to train on")
    add("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    add("--device", default="cuda" if gpu else "cpu", help="where to run (%(default)s here)")
    add("--output", type=Path, metavar="DIR", help="write loss.json and loss.png there")
    add("--save", type=Path, metavar="DIR", help="write the last model as a Mixtral checkpoint")
    options = parser.parse_args(arguments)
    unknown = set(options.formats) - set(RECIPES)
    if unknown:
        parser.error(f"--formats: need some of {names}, got {sorted(unknown)}")
    if options.steps < 1:
        parser.error(f"--steps: need at least 1, got {options.steps}")
    return options


def describe(options: argparse.Namespace, model: LanguageModel, text: bytes) -> dict[str, Any]:
    """What the losses were measured on."""
    experts = local_expert_parameters(model)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": name,
        "torch": torch.__version__,
        "mxpert": mxpert.__version__,
        "size": options.size,
        **vars(model.size),
        "steps": options.steps,
        "seed": options.seed,
        "text_bytes": len(text),
        "parameters": sum(
            parameter.numel() * (options.expert_parallel if name in experts else 1)
            for name, parameter in model.named_parameters()
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare, write; 1 if a format ends more than 2 % above the first."""
    options = parse(arguments)
    size, text = SIZES[options.size], read_text(options.text)
    mesh = options.expert_parallel and start_ranks(options.expert_parallel, options.device)
    writes = not mesh or mesh.get_rank() == 0
    shares = options.micro_batches * (mesh.size() if mesh else 1)
    if size.batch % shares:
        raise SystemExit(f"need ranks · micro-batches that divide {size.batch}, got {shares}")
    data = tuple(part.to(options.device) for part in split(text, size.length))
    runs: dict[str, dict[str, Any]] = {}
    for name in options.formats:
        model, runs[name] = train(
            RECIPES[name],
            data,
            size,
            options.steps,
            options.seed,
            micro_batches=options.micro_batches,
            mesh=mesh,
        )
        first, run = runs[options.formats[0]], runs[name]
        run["ratio"] = run["final"] / first["final"]
        if not writes:
            continue
        print(
            f"{name}: final loss {run['final']:.4f} ({run['ratio']:.4f} of "
            f"{options.formats[0]}), held out {run['held_out']:.4f} "
            f"({run['held_out'] / first['held_out']:.4f}), {run['seconds']:.1f} s",
            flush=True,
        )
    if options.output and writes:
        options.output.mkdir(parents=True, exist_ok=True)
        document = {"meta": describe(options, model, text), "runs": runs}
        written = json.dumps(document, indent=1) + "\n"
        (options.output / "loss.json").write_text(written, encoding="utf-8")
        if has_matplotlib():
            plot(runs, options.output / "loss.png")
        else:
            print(PLOT_HINT, file=sys.stderr)
    if options.save:
        save_mixtral(model, options.save, model.blocks[0].moe.expert_parallel)
    if mesh:
        dist.destroy_process_group()
    return int(any(run["ratio"] > WORST_RATIO for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())

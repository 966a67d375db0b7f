"""Random MoE problems at model shapes, generated on the device as MX codes and scales."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace

import torch

from ..core.problem import Activation, ClampedSiLU, SiLU, SwiGLU
from ..errors import require
from ..formats.weight_tensor import WeightFormatName
from ..moe.weights import GateUpOrder, MoEWeights
from .random_weights import random_mxfp4 as random_mxfp4
from .random_weights import random_weight as random_weight


@dataclass(frozen=True)
class MoEShape:
    """Dimensions, activation, gate/up order and bias of one model's MoE layer.

    Args:
        about: which model, and which share of it one GPU holds.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: Activation = field(default_factory=SiLU)
    gate_up_order: GateUpOrder = GateUpOrder.CONCATENATED
    has_bias: bool = False
    about: str = field(default="", compare=False)


_WHOLE_V3, _WHOLE_K2 = MoEShape(7168, 2048, 256, 8), MoEShape(7168, 2048, 384, 8)
_GPT_OSS = MoEShape(2880, 2880, 128, 4, SwiGLU(), GateUpOrder.INTERLEAVED, True)
_OF_EIGHT = "the experts of one of 8 ranks; tokens have all their experts here"
_ONE_SHARED = "the shared expert is one more, which every token takes"

MODEL_SHAPES: dict[str, MoEShape] = {
    "gpt-oss-120b": replace(_GPT_OSS, about="gpt-oss-120b, whole"),
    "gpt-oss-20b": replace(_GPT_OSS, num_experts=32, about="gpt-oss-20b, whole"),
    "deepseek-v3": replace(_WHOLE_V3, about="DeepSeek-V3, V3.1 and R1, whole"),
    "deepseek-v3-shared": MoEShape(7168, 2048, 257, 9, about=f"DeepSeek-V3, whole; {_ONE_SHARED}"),
    "dsv3-ep8": replace(_WHOLE_V3, num_experts=32, about=f"DeepSeek-V3, {_OF_EIGHT}"),
    "kimi-k2": replace(_WHOLE_K2, about="Kimi-K2, whole"),
    "kimi-k2-tp4": replace(
        _WHOLE_K2, intermediate_size=512, about="Kimi-K2, a quarter of each expert (TP 4)"
    ),
    "kimi-k2-tp8": replace(
        _WHOLE_K2, intermediate_size=256, about="Kimi-K2, an eighth of each expert (TP 8)"
    ),
    "kimi-k2-tp4-shared": MoEShape(
        7168, 512, 385, 9, about=f"Kimi-K2, a quarter of each expert (TP 4); {_ONE_SHARED}"
    ),
    "kimi-e385": MoEShape(
        7168, 256, 385, 9, about=f"Kimi-K2, an eighth of each expert (TP 8); {_ONE_SHARED}"
    ),
    "r1-e384": MoEShape(
        7168, 1024, 384, 8, about="a shape that other libraries publish as DeepSeek-R1's"
    ),
    "dsv4-pro": MoEShape(7168, 3072, 384, 6, ClampedSiLU(), about="DeepSeek-V4 Pro, whole"),
    "dsv4-flash": MoEShape(4096, 2048, 256, 6, ClampedSiLU(), about="DeepSeek-V4 Flash, whole"),
    "dsv4-pro-ep8": MoEShape(
        7168, 3072, 48, 6, ClampedSiLU(), about=f"DeepSeek-V4 Pro, {_OF_EIGHT}"
    ),
    "dsv4.1-flash-ep8": MoEShape(
        5120, 2304, 48, 6, ClampedSiLU(), about=f"DeepSeek-V4.1 Flash, {_OF_EIGHT}"
    ),
    "kimi-k3-ep8": MoEShape(3584, 3072, 112, 16, about=f"Kimi-K3, {_OF_EIGHT}"),
    "minimax-m3-tp4": MoEShape(
        6144, 768, 128, 4, about="MiniMax-M3, a quarter of each expert (TP 4)"
    ),
    "qwen3-30b": MoEShape(2048, 768, 128, 8, about="Qwen3-30B-A3B, whole"),
    "glm-5.1": MoEShape(6144, 2048, 256, 8, about="GLM-5.1, whole"),
    "minimax-m2.7": MoEShape(3072, 1536, 256, 8, about="MiniMax-M2.7, whole"),
    "qwen3-235b": MoEShape(4096, 1536, 128, 8, about="Qwen3-235B-A22B, whole"),
    "qwen3-next": MoEShape(2048, 512, 512, 10, about="Qwen3-Next-80B-A3B, whole"),
}
"""Named model shapes: the one list for tests, benchmarks and the command line."""


class Routing(enum.Enum):
    """Distribution of tokens over experts.

    UNIFORM: every set of experts is equally likely. ZIPF: expert e has weight 1 / (e + 1).
    ONE_EXPERT: every token takes the same top_k experts (with top_k = 1: one expert). HALF: only
    the first half of the experts (but at least top_k) is chosen.
    """

    UNIFORM = "uniform"
    ZIPF = "zipf"
    ONE_EXPERT = "one_expert"
    HALF = "half"


@dataclass(frozen=True)
class MoEInputs:
    """Arguments of `mxpert.fused_moe`: x bfloat16 [T, H]; routing weights and ids [T, k]."""

    x: torch.Tensor
    weights: MoEWeights
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    activation: Activation


def model_shape(shape: str | MoEShape) -> MoEShape:
    """A shape by its name in MODEL_SHAPES.

    >>> model_shape("gpt-oss-20b").hidden_size
    2880
    """
    if isinstance(shape, MoEShape):
        return shape
    require(
        shape in MODEL_SHAPES,
        "model_shape",
        "shape",
        need=f"one of {sorted(MODEL_SHAPES)}",
        got=repr(shape),
    )
    return MODEL_SHAPES[shape]


def random_routing(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    generator: torch.Generator,
    routing: Routing | str = Routing.UNIFORM,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax weights float32 [T, k] and distinct ids int32 [T, k] on the generator's device.

    The ids are the k largest of ``log weight + Gumbel noise``: a sample without replacement.
    """
    routing, device = Routing(routing), generator.device
    require(
        1 <= top_k <= num_experts, "random_routing", "top_k", need=f"1 to {num_experts}", got=top_k
    )
    index = torch.arange(num_experts, device=device, dtype=torch.float32)
    log_weight = torch.zeros_like(index)
    if routing is Routing.ZIPF:
        log_weight = -torch.log(index + 1)
    elif routing is Routing.HALF:
        log_weight[max(top_k, num_experts // 2) :] = -math.inf
    uniform = torch.rand((num_tokens, num_experts), generator=generator, device=device)
    scores = log_weight - torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-6)))
    if routing is Routing.ONE_EXPERT and num_tokens:
        scores = scores[:1].expand(num_tokens, -1)
    ids = scores.topk(top_k, dim=-1).indices.to(torch.int32).contiguous()
    logits = torch.randn((num_tokens, top_k), generator=generator, device=device)
    return logits.softmax(dim=-1), ids


def random_tokens(
    shape: MoEShape,
    num_tokens: int,
    generator: torch.Generator,
    routing: Routing | str = Routing.UNIFORM,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standard normal x bfloat16 [T, H], and topk_weights and topk_ids of `random_routing`."""
    x = torch.randn((num_tokens, shape.hidden_size), generator=generator, device=generator.device)
    return x.to(torch.bfloat16), *random_routing(
        num_tokens, shape.num_experts, shape.top_k, generator=generator, routing=routing
    )


def random_moe_problem(
    shape: str | MoEShape,
    num_tokens: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    scale_spread: float = 1.0,
    routing: Routing | str = Routing.UNIFORM,
    weight_format: WeightFormatName = "mxfp4",
) -> MoEInputs:
    """A reproducible MoE layer and batch. Weights are generated as codes, without a bf16 copy.

    x is standard normal. Weights are scaled so that gate, up and the layer's output are of order 1,
    where the activations are not linear.

    Args:
        shape: a name of MODEL_SHAPES or explicit dimensions. num_tokens: T.
        seed: seed of the generator. device: device of the tensors.
        scale_spread: see `random_weight`. routing: see `Routing`.
        weight_format: of the weights: "mxfp4", "mxfp8", "nvfp4", "int4_g32", …

    Example:
        >>> shape = MoEShape(hidden_size=64, intermediate_size=32, num_experts=4, top_k=2)
        >>> random_moe_problem(shape, 3).weights.gate_up_proj.shape
        torch.Size([4, 64, 64])
    """
    shape, generator = model_shape(shape), torch.Generator(device)
    generator.manual_seed(seed)
    hidden, inner, experts = shape.hidden_size, shape.intermediate_size, shape.num_experts
    has_gate = shape.activation.is_gated
    first = 2 * inner if has_gate else inner
    gate_up, down = (
        random_weight(
            size,
            weight_format,
            rms=1.5 / math.sqrt(size[-1]),
            scale_spread=scale_spread,
            generator=generator,
        )
        for size in ((experts, first, hidden), (experts, hidden, inner))
    )
    gate_up_bias, down_bias = (
        torch.randn((experts, width), generator=generator, device=device) / 2
        if shape.has_bias
        else None
        for width in (first, hidden)
    )
    order = shape.gate_up_order if has_gate else None
    weights = MoEWeights(gate_up, down, gate_up_bias, down_bias, order)
    x, topk_weights, topk_ids = random_tokens(shape, num_tokens, generator, routing)
    return MoEInputs(x, weights, topk_weights, topk_ids, shape.activation)


def scaled_shape(
    shape: str | MoEShape,
    *,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int | None = None,
) -> MoEShape:
    """A model's shape with other dimensions, for tests on small machines; the rest is unchanged.

    >>> scaled_shape("gpt-oss-20b", hidden_size=64, intermediate_size=96, num_experts=5).has_bias
    True
    """
    shape = model_shape(shape)
    return replace(
        shape,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=shape.top_k if top_k is None else top_k,
    )

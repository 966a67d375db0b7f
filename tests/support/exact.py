"""MoE problems in exact arithmetic: every product and partial sum is a float32 number.

Every correct kernel must return the float64 result bit for bit (up to the sign of zeros), whatever
its summation order, tile shape, combine mode or split-K. The data is built as follows.

*x* holds integers in −4 … 4, which are exact in bfloat16, MXFP8 and MXFP4 under every scale rule.
One *anchor* block of channels is sparse: a constant 4, which sets the gates, and one ±1 per token,
which selects the ups. All other channels are dense and come in random pairs ``x_i = −x_j`` with
equal weights, so each pair cancels exactly. The block scale of each weight is one of three at
random, so equal weights have different codes. A kernel that uses a wrong nibble, scale or row
breaks the cancellation.

*Gates* are at least 64. There ``sigmoid(g)`` rounds to 1 in float32, hence ``silu(g) = g``. The
parameters from `exact_activation` keep the clamped and saturating activations exact, too. Gates are
powers of two and ups are small integers (or halves): ``g · u`` fits bfloat16, e4m3 and e2m1.

*Down weights* use the same idea. The features of one anchor block have one non-zero weight per
output; the others are pairs of equal features with opposite weights. Routing weights are 1 or 1/2.
Outputs and all partial sums of rows stay below 256 units, so they are exact in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxpert.core.problem import GELU, Activation, ClampedSiLU, SiLU, SiTUv2, SwiGLU
from mxpert.errors import require
from mxpert.formats.codec import encode, exact_power_of_two, pack_codes
from mxpert.formats.spec import E2M1, E8M0_BIAS, MX_BLOCK_SIZE, MXFP4
from mxpert.formats.tensor import MXTensor
from mxpert.moe.weights import MoEWeights, gate_up_rows
from mxpert.testing.problems import MoEInputs, MoEShape, Routing, model_shape, random_routing

GATE = 128.0
"""Gates are GATE or 2 · GATE. A routing weight of 1/2 on the input halves them."""

MAX_EXACT_TOP_K = 12


def exact_activation(activation: Activation) -> Activation:
    """The same kind of activation with parameters that are exact for gates of 64 to 256.

    SwiGLU and ClampedSiLU clamp gates to 128 (which is exact) and leave ups alone. GELU stays.
    SiTUv2 with ``beta = 4``, ``beta_up = 2^−6`` saturates both tanh: ``tanh(16)`` and ``tanh(32)``
    round to 1.

    >>> exact_activation(SwiGLU())
    SwiGLU(alpha=1.5, limit=128.0, beta=1.0)
    """
    match activation:
        case SwiGLU(beta=beta):  # an integer
            return SwiGLU(alpha=1.5, limit=GATE, beta=beta)
        case GELU():  # Φ rounds to 1, as the sigmoid does
            return activation
        case ClampedSiLU():
            return ClampedSiLU(limit=GATE)
        case SiTUv2():
            return SiTUv2(beta=4.0, beta_up=2.0**-6)
    return SiLU()


def exact_moe_problem(
    shape: str | MoEShape,
    num_tokens: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    routing: Routing | str = Routing.UNIFORM,
    apply_router_weight_on_input: bool = False,
) -> MoEInputs:
    """An MoE problem in which every intermediate value is exact (see the module docstring).

    Args:
        shape: a name of MODEL_SHAPES or explicit dimensions; its activation gets exact parameters
            (`MoEInputs.activation`), its bias and gate/up order are kept. num_tokens: T.
        seed, device, routing: as `random_moe_problem`.
        apply_router_weight_on_input: the option that the kernel is run with. If True, gate biases
            are 0, since ``w · g + b`` would not be a power of two.

    Returns:
        MoEInputs. The layer's float64 result is a bfloat16 number in every element.

    Raises:
        ValueError: top_k above 12, where a token's sum could need more than 8 bits.

    Example:
        >>> inputs = exact_moe_problem(MoEShape(64, 64, 3, 2), 5)
        >>> inputs.x.abs().max().item()
        4.0
    """
    shape, generator = model_shape(shape), torch.Generator(device)
    require(
        shape.top_k <= MAX_EXACT_TOP_K,
        "exact_moe_problem",
        "top_k",
        need=f"at most {MAX_EXACT_TOP_K}",
        got=shape.top_k,
    )
    generator.manual_seed(seed)
    draw = _Draw(generator)
    activation = exact_activation(shape.activation)
    channels = _Pairing.random(shape.hidden_size, draw)
    features = _Pairing.random(shape.intermediate_size, draw)
    gate_up = [_gate_up_expert(shape, channels, features, draw) for _ in range(shape.num_experts)]
    down = [_down_expert(shape, features, draw) for _ in range(shape.num_experts)]
    gate_up_bias, down_bias = (
        _biases(shape, activation, features, draw, gates=not apply_router_weight_on_input)
        if shape.has_bias
        else (None, None)
    )
    weights = MoEWeights(
        _stack(gate_up), _stack(down), gate_up_bias, down_bias, shape.gate_up_order
    )
    topk_weights, topk_ids = random_routing(
        num_tokens, shape.num_experts, shape.top_k, generator=generator, routing=routing
    )
    halves = draw.choice(topk_weights.shape, (0.5, 1.0))
    return MoEInputs(_tokens(num_tokens, channels, draw), weights, halves, topk_ids, activation)


class _Draw:
    """Random draws from short lists of values, on the generator's device."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.device = generator, generator.device

    def index(self, shape: tuple[int, ...], end: int) -> torch.Tensor:
        return torch.randint(0, end, shape, generator=self.generator, device=self.device)

    def choice(self, shape: tuple[int, ...], values: tuple[float, ...]) -> torch.Tensor:
        choices = torch.tensor(values, dtype=torch.float32, device=self.device)
        return choices[self.index(shape, len(values))]


@dataclass(frozen=True)
class _Pairing:
    """Partition of an axis of `size` elements: one anchor block, and random pairs (left, right)."""

    size: int
    anchor: int
    left: torch.Tensor
    right: torch.Tensor

    @classmethod
    def random(cls, size: int, draw: _Draw) -> _Pairing:
        anchor = MX_BLOCK_SIZE * int(draw.index((1,), size // MX_BLOCK_SIZE))
        order = torch.randperm(size - MX_BLOCK_SIZE, generator=draw.generator, device=draw.device)
        order = order + MX_BLOCK_SIZE * (order >= anchor)
        left, right = order.view(-1, 2).unbind(1) if len(order) else (order, order)
        return cls(size, anchor, left, right)

    @property
    def anchors(self) -> slice:
        return slice(self.anchor, self.anchor + MX_BLOCK_SIZE)

    def fill(self, rows: int, draw: _Draw, sign: float) -> torch.Tensor:
        """Integers −3 … 3 [rows, size]: ``value[right] = sign · value[left]``, anchors 0."""
        values = torch.zeros((rows, self.size), device=draw.device)
        pairs = draw.choice((rows, len(self.left)), (-3, -2, -1, 0, 1, 2, 3))
        values[:, self.left], values[:, self.right] = pairs, sign * pairs
        return values


def _tokens(num_tokens: int, channels: _Pairing, draw: _Draw) -> torch.Tensor:
    """x [T, H]: cancelling pairs, 4 in the first anchor channel, ±1 in one other anchor channel."""
    x = channels.fill(num_tokens, draw, sign=-1)
    x[:, channels.anchor] = 4
    chosen = channels.anchor + 1 + draw.index((num_tokens, 1), MX_BLOCK_SIZE - 1)
    x.scatter_(1, chosen, draw.choice((num_tokens, 1), (-1.0, 1.0)))
    return x.to(torch.bfloat16)


def _gate_up_expert(
    shape: MoEShape, channels: _Pairing, features: _Pairing, draw: _Draw
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales [2F, H] of one expert's gate and up rows; paired features are equal."""
    inner = shape.intermediate_size
    gate, up = channels.fill(inner, draw, sign=1), channels.fill(inner, draw, sign=1)
    # Times x = 4 in the anchor channel: gates of 128 or 256 (only 128 if a bias may add 128).
    gate[:, channels.anchor] = (
        draw.choice((inner,), (GATE / 4,))
        if shape.has_bias
        else draw.choice((inner,), (GATE / 4, GATE / 2))
    )
    up[:, channels.anchor + 1 : channels.anchor + MX_BLOCK_SIZE] = draw.choice(
        (inner, MX_BLOCK_SIZE - 1), (-1, 0, 1)
    )
    for values in (gate, up):
        values[features.right] = values[features.left]
    gate_rows, up_rows = gate_up_rows(shape.gate_up_order, inner, draw.device)
    rows = torch.empty((2 * inner, shape.hidden_size), device=draw.device)
    rows[gate_rows], rows[up_rows] = gate, up
    exponent = draw.index((2 * inner, shape.hidden_size // MX_BLOCK_SIZE), 3) - 1
    # 32 and 64 are codes 2 and 4 at 2^4, 1 and 2 at 2^5.
    exponent[gate_rows, channels.anchor // MX_BLOCK_SIZE] = 4 + draw.index((inner,), 2)
    return _codes(rows, exponent)


def _down_expert(
    shape: MoEShape, features: _Pairing, draw: _Draw
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales [H, F] of one expert: paired features have opposite weights, and one
    feature of the anchor block has a weight of ±1."""
    values = features.fill(shape.hidden_size, draw, sign=-1)
    chosen = features.anchor + draw.index((shape.hidden_size, 1), MX_BLOCK_SIZE)
    values.scatter_(1, chosen, draw.choice((shape.hidden_size, 1), (-1, 1)))
    return _codes(values, draw.index((shape.hidden_size, values.shape[1] // MX_BLOCK_SIZE), 3) - 1)


def _biases(
    shape: MoEShape, activation: Activation, features: _Pairing, draw: _Draw, *, gates: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random biases [E, 2F] and [E, H].

    Gate biases are 0 or 128 and up biases −1 or 0, equal for paired features. Down biases are 0 or
    plus or minus one unit of h.
    """
    size = (shape.num_experts, shape.intermediate_size)
    gate, up = draw.choice(size, (0, GATE if gates else 0)), draw.choice(size, (-1, 0))
    for bias in (gate, up):
        bias[:, features.right] = bias[:, features.left]
    gate_rows, up_rows = gate_up_rows(shape.gate_up_order, size[1], draw.device)
    gate_up = torch.empty((size[0], 2 * size[1]), device=draw.device)
    gate_up[:, gate_rows], gate_up[:, up_rows] = gate, up
    unit = activation.beta * activation.beta_up if isinstance(activation, SiTUv2) else GATE
    return gate_up, draw.choice((size[0], shape.hidden_size), (-unit, 0, unit))


def _codes(values: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact MXFP4 codes and scales of integers [N, K] for given block exponents [N, K / 32]."""
    inverse = exact_power_of_two(-exponent, torch.float32).unsqueeze(-1)
    blocks = values.unflatten(-1, (-1, MX_BLOCK_SIZE)) * inverse
    return (pack_codes(encode(blocks.flatten(-2), E2M1)), (exponent + E8M0_BIAS).to(torch.uint8))


def _stack(experts: list[tuple[torch.Tensor, torch.Tensor]]) -> MXTensor:
    qdata, scale = (torch.stack(parts) for parts in zip(*experts, strict=True))
    return MXTensor(qdata, scale, MXFP4)

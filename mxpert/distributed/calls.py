"""Rules of calls: all ranks make the same ones, each a number; an object has one stream."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..core.problem import ACTIVATION_FORMATS, Combine, MoEOptions
from ..errors import message
from ..formats.spec import ScaleRule
from ..moe.weights import MoEWeights

_LAYER = "layer"
_REST = "the activation, sizes or biases of the layer"
_NONE = "none"
_LAYER_BITS = 12
MOST_LAYERS = (1 << _LAYER_BITS) - 1
"""Numbers of layers that calls tell apart; one more means no number."""
_OPS = ("dispatch", "fused_moe", "MXMoE")
_FIELDS: tuple[tuple[str, int, tuple[str, ...] | None], ...] = (
    ("the call", 2, _OPS),
    ("max_tokens", 24, None),
    ("activation_format", 3, (_NONE, *ACTIVATION_FORMATS)),
    ("scale_rule", 3, tuple(rule.name for rule in ScaleRule)),
    ("apply_router_weight_on_input", 1, ("False", "True")),
    ("combine", 2, (_NONE, *(mode.name for mode in Combine))),
    (_LAYER, _LAYER_BITS, None),
    (_REST, 15, None),
)
"""Name, bits, and the names of its values, from the highest bits down: 62 together."""


@dataclass(frozen=True)
class Call:
    """One call of an ExpertParallel, as far as all ranks must agree on it.

    Args:
        bound: slots of a rank: `max_tokens` of the view that is called.
        op: "dispatch", "fused_moe" or "MXMoE". scale_rule: of rows that are quantised on their way.
        options: of the layer; None where the caller computes it. sizes: of the layer, as text.
        layer: its number, below MOST_LAYERS; None where it has none.
    """

    bound: int
    op: str = "dispatch"
    scale_rule: ScaleRule = ScaleRule.RCEIL
    options: MoEOptions | None = None
    sizes: str = ""
    layer: int | None = None

    @functools.cached_property
    def word(self) -> int:
        """The call as an int64 of at least 2^62, so that it never fits 32 bits."""
        options, names = self.options, {name: values for name, _, values in _FIELDS}
        given: dict[str, str | int] = {"the call": self.op, "max_tokens": self.bound}
        given["scale_rule"] = self.scale_rule.name
        given[_LAYER] = 0 if self.layer is None else 1 + self.layer
        if options is not None:
            given["activation_format"] = options.activation_format
            given["combine"] = options.combine.name
            given["apply_router_weight_on_input"] = str(options.apply_router_weight_on_input)
        rest = f"{None if options is None else options.activation} {self.sizes}"
        given[_REST] = int.from_bytes(hashlib.blake2b(rest.encode(), digest_size=8).digest(), "big")
        word = 1
        for name, bits, _ in _FIELDS:
            values, value = names[name], given.get(name, 0)
            number = values.index(value) if values and isinstance(value, str) else int(value)
            word = word << bits | number % (1 << bits)
        return word


@functools.lru_cache(maxsize=4096)
def layer_call(
    bound: int, options: MoEOptions, intermediate_size: int, biases: int, layer: int | None = None
) -> Call:
    """The call of `fused_moe` with these options; biases: how many of the two the weights have."""
    sizes = f"{intermediate_size} {biases}"
    return Call(bound, "fused_moe", options.scale_rule, options, sizes, layer)


def call_of(options: MoEOptions, weights: MoEWeights, bound: int, layer: int | None) -> Call:
    """The call of a layer with these weights and this number."""
    biases = (weights.gate_up_bias is not None) + (weights.down_bias is not None)
    return layer_call(bound, options, weights.intermediate_size, biases, layer)


def without_layer(word: int) -> int:
    """`Call.word` of the same call for a layer without a number."""
    rest = _FIELDS[-1][1]
    return word & ~(MOST_LAYERS << rest)


def differences(words: Sequence[int]) -> str:
    """Arguments that differ between the ranks' calls, with the ranks that have each value.

    words: `Call.word` of the ranks, in rank order.
    """
    of_ranks, texts = [_fields_of(word) for word in words], []
    for name, _, _ in _FIELDS:
        ranks: dict[str, list[int]] = {}
        for rank, found in enumerate(of_ranks):
            ranks.setdefault(found[name], []).append(rank)
        if len(ranks) > 1 and name == _REST:
            texts.append(f"{_REST}: {' and '.join(_on(each) for each in ranks.values())} differ")
        elif len(ranks) > 1:
            texts.append(f"{name} " + ", ".join(f"{v} {_on(r)}" for v, r in ranks.items()))
    return "; ".join(texts)


def difference_error(op: str, text: str) -> ValueError:
    """The error for ranks that do not make the same call."""
    remedy = "make the same calls in the same order on all ranks, then a new ExpertParallel"
    return ValueError(message(op, "calls", "the same call on every rank", text, remedy))


def require_same(op: str, words: Sequence[int]) -> None:
    """Raise a ValueError that names what differs, unless all ranks make the same call."""
    if any(word != words[0] for word in words):
        raise difference_error(op, differences(words))


def _fields_of(word: int) -> dict[str, str]:
    found = {}
    for name, bits, values in reversed(_FIELDS):
        number = word & ((1 << bits) - 1)
        word >>= bits
        text = values[number] if values and number < len(values) else str(number)
        if name == _LAYER:
            text = str(number - 1) if number else _NONE
        found[name] = text
    return found


def _on(ranks: list[int]) -> str:
    more = " …" if len(ranks) > 8 else ""
    return f"on rank {', '.join(map(str, ranks[:8]))}{more}"


def eager_stream(device: torch.device) -> int | None:
    """The handle of the current stream; None while a CUDA graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        return None
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


class StreamGuard:
    """Refuses eager calls on a second stream.

    The first eager call binds the object to its stream. Captures are exempt: a graph may be
    captured on a stream of its own, and replays where the caller wants it.

    Args:
        device: of the tensors; nothing is checked on a CPU.
        current: the handle of a device's current stream, or None where it does not count.
    """

    def __init__(
        self, device: torch.device, current: Callable[[torch.device], int | None] = eager_stream
    ) -> None:
        self._device, self._current = device, current
        self._is_checked = device.type == "cuda"
        self._bound: int | None = None

    def check(self, op: str) -> None:
        """Bind the current stream, or raise a ValueError where another one is bound."""
        if not self._is_checked:
            return
        stream = self._current(self._device)
        if stream is None or stream == self._bound:
            return
        if self._bound is not None:
            raise ValueError(
                message(
                    op,
                    "stream",
                    f"the one of its first call, {self._bound:#x}",
                    f"{stream:#x}",
                    "make an ExpertParallel for each stream of work",
                )
            )
        self._bound = stream

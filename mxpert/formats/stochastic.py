"""Stochastic rounding to the element formats, with random bits that depend on seed and place alone.

Every backend computes the bits of this file, so that a tensor has the same codes everywhere. The
bits of an element are those of Philox-4x32-10, keyed by the seed: counter ``index // 4``, output
``index % 4``, where `index` is the element's place in the contiguous tensor.

Source: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), Philox with ten rounds.
"""

from __future__ import annotations

import torch

from ..errors import require, require_dtype
from .spec import FLOAT_DTYPES, ElementFormat

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_FRACTION_BITS = 24
"""Bits of a value's distance to the step below it, where steps are as wide as subnormal ones."""


def random_bits(seed: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """32 random bits for each element of a tensor.

    Args:
        seed: int64 [1]. shape: of the tensor.

    Returns:
        int64 of this shape on the device of the seed, 0 to 2^32 − 1.

    Example:
        >>> random_bits(torch.tensor([0]), (2,)).tolist()  # the first two words of the zero key
        [1713891541, 3781805453]
    """
    count = 1
    for size in shape:
        count *= size
    counter = torch.arange(-(-count // 4), dtype=torch.int64, device=seed.device)
    words = [counter & _WORD, counter >> 32, torch.zeros_like(counter), torch.zeros_like(counter)]
    low, high = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        first, second = (words[2 * i] * _MULTIPLIERS[i] for i in range(2))  # mod 2^64
        words = [
            ((second >> 32) & _WORD) ^ words[1] ^ low,
            second & _WORD,
            ((first >> 32) & _WORD) ^ words[3] ^ high,
            first & _WORD,
        ]
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    return torch.stack(words, dim=-1).reshape(-1)[:count].reshape(shape)


def encode_stochastic(
    values: torch.Tensor, element: ElementFormat, random: torch.Tensor
) -> torch.Tensor:
    """Round `values` to one of the two neighbouring codes, with probabilities by the distances.

    The expected value is the value itself, to 2^-20 of a step (2^-24 below the smallest normal
    number); values beyond the largest one saturate. Signs, zeros and NaN are those of
    `codec.encode`; an infinity becomes what NaN becomes.

    Args:
        values: float32, bfloat16 or float16, any shape. element: format of the codes.
        random: `random_bits` of these elements, in the order of the values.

    Returns:
        uint8 codes, one per byte, shape of `values`.

    Raises:
        TypeError: another dtype. ValueError: another number of random numbers.

    Example:
        >>> from mxpert.formats import E2M1
        >>> values = torch.full((1000,), 0.625)  # a quarter of the way from 0.5 to 1
        >>> codes = encode_stochastic(values, E2M1, random_bits(torch.tensor([3]), (1000,)))
        >>> codes.unique().tolist(), 200 < int((codes == 2).sum()) < 300
        ([1, 2], True)
    """
    op = "encode_stochastic"
    require_dtype(values.dtype, FLOAT_DTYPES, op, "values.dtype")
    count = values.numel()
    require(random.numel() == count, op, "random.numel()", need=count, got=random.numel())
    random = random.reshape(values.shape)
    values = values.detach().float().resolve_neg()
    mantissa, smallest = element.mantissa_bits, 1 - element.bias
    size = values.abs().clamp(max=element.max_value)
    dropped = 23 - mantissa
    bits = size.view(torch.int32).long()
    normal = ((bits + (random >> (32 - dropped))) >> dropped) - ((126 + smallest) << mantissa)
    power = 2.0**smallest
    steps = (size.clamp(max=power) * 2.0 ** (_FRACTION_BITS + mantissa - smallest)).nan_to_num(0)
    small = (steps.long() + (random >> (32 - _FRACTION_BITS))) >> _FRACTION_BITS
    code = torch.where(size < power, small, normal)
    sign_bit = 1 << (element.bits - 1)
    code |= (values.view(torch.int32) >> 31).long() & sign_bit
    return code.masked_fill(~(values.abs() < float("inf")), sign_bit - 1).to(torch.uint8)

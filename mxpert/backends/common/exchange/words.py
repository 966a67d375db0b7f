"""Constants of the exchange, which kernels and host share."""

from __future__ import annotations

import triton.language as tl

MAX_CTAS = tl.constexpr(128)
"""Flags of a rank in each phase, and epoch words: the largest number of CTAs."""
MAX_RANKS = tl.constexpr(60)
"""An int64 mask holds as many; combine shifts it by multiples of four ranks."""

# Indices of an exchange's private int64 words.
DECIDED = tl.constexpr(0)
"""The last epoch whose tokens have all arrived; negative for good once something is lost:
−1 − r for rank r, or one of the two codes below."""
RUNNING = tl.constexpr(1)
"""Calls between the start of dispatch and the end of combine; more than one are two streams."""
TIMEOUT = tl.constexpr(2)
"""Ticks of `wait.clock` after which a wait ends."""
EPOCHS = tl.constexpr(16)
"""First of MAX_CTAS copies of the epoch. A CTA of dispatch reads its own copy before it writes."""
NUM_WORDS = 16 + 128

TWO_STREAMS = tl.constexpr(-(1 << 30))
"""words[DECIDED] after a dispatch that started while another call of the exchange was running."""
NO_WAIT = tl.constexpr(-(1 << 30) - 1)
"""words[DECIDED] after a combine whose tokens no kernel had waited for."""

POISON = tl.constexpr(1 << 62)
"""Flags from here on are poisoned: POISON + 1 + r says that rank r is lost."""

# Indices of the int64 words of `arrivals`, which tell the sort kernels what to wait for.
ARRIVED_ADDRESS = tl.constexpr(0)
WORDS_ADDRESS = tl.constexpr(1)
NUM_RANKS = tl.constexpr(2)
NUM_CTAS = tl.constexpr(3)
NUM_ARRIVALS = 16
"""Words of one `arrivals` tensor; a row of them keeps the alignment of 16 bytes."""

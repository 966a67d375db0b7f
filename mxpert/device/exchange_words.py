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
−1 − r for rank r, or one of the codes below."""
RUNNING = tl.constexpr(1)
"""Calls between the start of dispatch and the end of combine; more than one are two streams."""
TIMEOUT = tl.constexpr(2)
"""Ticks of `wait.clock` after which a wait ends."""
SEND_OFF = tl.constexpr(3)
"""Not 0 once a combine has known of a loss: later dispatches store no tokens on other ranks."""
RETURN_OFF = tl.constexpr(4)
"""Not 0 once a kernel before combine has known of a loss: combine stores no rows on other ranks.
These two words do not change while the kernel that reads them runs, as words[DECIDED] may."""
EPOCHS = tl.constexpr(16)
"""First of MAX_CTAS copies of the epoch. A CTA of dispatch reads its own copy before it writes."""
NUM_WORDS = 16 + 128

TAG_BITS = tl.constexpr(20)
"""Low bits of epochs and flags: a tag of the call. Ranks that make other calls have other tags."""

TWO_STREAMS = tl.constexpr(-(1 << 30))
"""words[DECIDED] after a dispatch that started while another call of the exchange was running."""
NO_WAIT = tl.constexpr(-(1 << 30) - 1)
"""words[DECIDED] after a combine whose tokens no kernel had waited for."""

DIFFERS = tl.constexpr(-(1 << 31))
"""words[DECIDED] is DIFFERS − r after a call in which rank r has made another one."""

POISON = tl.constexpr(1 << 62)
"""Flags above are poisoned: POISON − d has the meaning of words[DECIDED] = d on another rank."""

# Indices of the int64 words of `arrivals`, which tell the sort kernels what to wait for.
ARRIVED_ADDRESS = tl.constexpr(0)
WORDS_ADDRESS = tl.constexpr(1)
NUM_RANKS = tl.constexpr(2)
NUM_CTAS = tl.constexpr(3)
NUM_ARRIVALS = 16
"""Words of one `arrivals` tensor; a row of them keeps the alignment of 16 bytes."""

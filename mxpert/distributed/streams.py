"""StreamGuard: an object that is used from one CUDA stream alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import message


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

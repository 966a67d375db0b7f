"""Fixtures of the tests with whole models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from tests.integrations.families import NEW_TOKENS, PROMPT, VOCABULARY


@pytest.fixture(scope="session")
def sequence() -> torch.Tensor:
    """Token ids [PROMPT + NEW_TOKENS], each token about once and a half."""
    return torch.randint(
        VOCABULARY, (PROMPT + NEW_TOKENS,), generator=torch.Generator().manual_seed(3)
    )


@pytest.fixture(autouse=True, scope="session")
def _quiet_and_single_threaded() -> Iterator[None]:
    """Tiny tensors: handing them to a second thread costs several times what it saves."""
    log = transformers.utils.logging
    level, threads = log.get_verbosity(), torch.get_num_threads()
    torch.set_num_threads(1)
    log.set_verbosity_error()
    log.disable_progress_bar()
    yield
    torch.set_num_threads(threads)
    log.set_verbosity(level)
    log.enable_progress_bar()

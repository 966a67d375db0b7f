"""mxpert.warm_up over SYMMETRIC with two processes, its kernels interpreted."""

from __future__ import annotations

import pytest

from support.ranks import run_once

MODULE = "tests.conformance.warm_up_ranks"
SCENARIO = "the_exchange_is_clean_after_warm_up"


@pytest.mark.timeout(300)
def test_the_exchange_is_clean_after_warm_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_once(tmp_path_factory, MODULE, [SCENARIO], 2, limit_s=250).check(SCENARIO)

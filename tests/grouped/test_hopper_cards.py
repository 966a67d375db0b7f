"""What the number of SMs of a Hopper card changes in the grouped GEMMs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from mxpert.core.problem import Op
from mxpert.grouped import hopper
from support.devices import HOPPER_CARDS
from tests.grouped.test_hopper_aot import FORMATS, SPANS, gemm, ops


@ops
@pytest.mark.parametrize("card", HOPPER_CARDS)
def test_every_card_is_filled_with_the_binaries_of_an_h200(op: Op, card: str) -> None:
    """One CTA an SM; they compute a nearly square part of a result at a time."""
    target = HOPPER_CARDS[card]
    launch = gemm(op, FORMATS["e4m3"], SPANS["row"], target=target)
    other = gemm(op, FORMATS["e4m3"], SPANS["row"])
    assert launch.grid == (target.num_sms,)
    assert launch.binary == other.binary
    square = (target.num_sms * hopper.BLOCK_N / hopper.BLOCK_M) ** 0.5
    nearest = min(hopper._BANDS, key=lambda band: max(band / square, square / band))
    assert launch.arguments["BAND"] == nearest

"""What tests and proofs share: hunts count what differs, and poison touches padding alone."""

from __future__ import annotations

import pytest
import torch

from mxpert.formats import MXTensor
from mxpert.formats.layouts import UNIT_CODES, UNIT_ROWS
from mxpert.moe.hopper.layout import HOPPER_FRAGMENT, HOPPER_FRAGMENT_FP8, _unpack_codes
from mxpert.testing.numerics import is_exact
from mxpert.testing.problems import random_mxfp4
from support.poison import poison_prepared
from support.races import hunt
from tests.moe.hopper.test_layout import fp8_values

CPU = torch.device("cpu")


def test_a_hunt_finishes_whole_sets_of_data_and_renews_between_them() -> None:
    x, drawn = torch.zeros(8, dtype=torch.int32), []
    found = hunt(lambda: (x + 1,), lambda: drawn.append(x.add_(1)), 250, CPU, per_graph=7)
    assert (found.repeats, found.mismatches, len(drawn)) == (294, 0, 3)


@pytest.mark.parametrize("every", [1, 3])
def test_a_hunt_counts_values_that_differ(every: int) -> None:
    count = [0]

    def racy() -> tuple[torch.Tensor, ...]:
        count[0] += 1
        return torch.zeros(4, dtype=torch.int32), torch.arange(8) * (count[0] % every)

    found = hunt(racy, lambda: None, 12, CPU, fresh=12)
    assert found.mismatches == (0 if every == 1 else 7 * 8)  # two of three differ, 0 · 0 does not


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_a_planted_bit_is_one_mismatch(dtype: torch.dtype) -> None:
    assert (
        hunt(lambda: (torch.ones(3, 5, dtype=dtype),), lambda: None, 20, CPU, plant=13).mismatches
        == 1
    )


def test_a_hunt_ends_at_its_deadline() -> None:
    assert (
        hunt(
            lambda: (torch.zeros(1, dtype=torch.int32),), lambda: None, 10, CPU, deadline=0.0
        ).repeats
        == 0
    )


@pytest.mark.parametrize("shape", [(3, 96, 160), (2, 64, 256), (2, 224, 128), (1, 32, 32)])
def test_poison_in_prepared_padding_leaves_the_values(shape: tuple[int, int, int]) -> None:
    weights = random_mxfp4(
        shape, rms=1.0, scale_spread=1.0, generator=torch.Generator().manual_seed(0)
    )
    prepared = HOPPER_FRAGMENT.pack(weights)
    poison_prepared(prepared)
    assert is_exact(HOPPER_FRAGMENT.unpack(prepared), weights)
    _, rows, depth = shape
    codes = torch.stack([_unpack_codes(each) for each in prepared.qdata])
    assert codes.shape[1:] == (
        -(-rows // UNIT_ROWS) * UNIT_ROWS,
        -(-depth // UNIT_CODES) * UNIT_CODES,
    )
    assert (codes[:, rows:] == 7).all()
    assert (codes[:, :, depth:] == 7).all()
    assert prepared.reference is not None
    assert (prepared.reference[:, rows:] == 255).all()


@pytest.mark.parametrize("shape", [(3, 96, 160), (2, 64, 256), (2, 224, 128), (1, 32, 32)])
def test_poison_in_an_fp8_copy_leaves_the_values(shape: tuple[int, int, int]) -> None:
    weights = random_mxfp4(
        shape, rms=1.0, scale_spread=1.0, generator=torch.Generator().manual_seed(0)
    )
    prepared = HOPPER_FRAGMENT_FP8.pack(weights)
    before = fp8_values(prepared)
    poison_prepared(prepared)
    after = fp8_values(prepared)
    _, rows, depth = shape
    assert torch.equal(after[:, :rows, :depth], before[:, :rows, :depth])
    assert after[:, rows:].isnan().all()
    factor = torch.exp2(prepared.reference[:, :rows, None].double() - 133)
    assert (after[:, :rows, depth:] == 448 * factor).all()


def test_only_prepared_weights_have_padding_to_poison() -> None:
    plain: MXTensor = random_mxfp4(
        (1, 64, 64), rms=1.0, scale_spread=1.0, generator=torch.Generator()
    )
    with pytest.raises(ValueError, match=r"need Layout\.CDNA4_FRAGMENT or"):
        poison_prepared(plain)

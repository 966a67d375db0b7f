"""The page of executed and refused instructions is the emulator's table."""

from __future__ import annotations

import re

import pytest

from gfx950_support.instruction_page import ENCODINGS, PAGE, REFUSED, mnemonics, page, refusal
from gfx950_support.single import Single
from gfx950emu.instructions import TABLE, UnknownInstructionError


def test_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "PYTHONPATH=tests python -m gfx950_support.instruction_page"


def test_every_mnemonic_is_named_once() -> None:
    """What the table executes is on the page, and each class of refused ones has members."""
    executed = {name for encoding in ENCODINGS for name in mnemonics(encoding)[0]}
    assert executed == TABLE.keys()
    refused = {name for encoding in ENCODINGS for name in mnemonics(encoding)[1]}
    assert {refusal(name) for name in refused} == REFUSED.keys()
    named = re.findall(r"`([a-z]\w*_\w+)`", PAGE.read_text().split("## Refused")[1])
    assert sorted(named) == sorted(refused)


def test_what_is_refused_raises() -> None:
    for text in ("v_rcp_f64 v[0:1], v[2:3]", "v_sin_f32 v0, v1", "v_dot2_f32_f16 v0, v1, v2, v3"):
        assert text.split()[0] not in TABLE
        with pytest.raises(UnknownInstructionError, match="mnemonics"):
            Single(1).run(text)

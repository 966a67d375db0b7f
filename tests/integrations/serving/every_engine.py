"""What layers of every engine do with stored experts: the tests that all of them share."""

from __future__ import annotations

from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from mxpert.core.target import on_device
from mxpert.formats.tensor import Layout
from mxpert.integrations.serving import layer as serving
from tests.integrations.serving.stored_experts import (
    CASES,
    PLANTED,
    PREFIX,
    check_layer,
    check_sum,
    experts_of,
    format_of,
    planted,
)

OTHERS = [case for case in CASES if format_of(case) != "nvfp4" and not case.endswith("cast")]
"""Cases whose config names no NVFP4."""


class StoredExperts:
    """A subclass has the functions of an engine's tests.

    Its ``created(case, rank=, ranks=)`` gives a layer of the engine, ``fill`` loads it,
    ``process`` prepares and runs it, ``recreate`` makes it ready for other weights, and ``admit``
    sets the largest batch. ``rounded`` and ``kept`` are arguments of ``created`` that ask for
    weights rounded to e4m3, and for FP8 copies.
    """

    created: Any
    fill: Any
    process: Any
    weights_of: Any
    recreate: Any
    admit: Any
    rounded: ClassVar[dict[str, Any]]
    kept: ClassVar[dict[str, Any]]

    @pytest.mark.parametrize("case", CASES)
    def test_a_layer_computes_with_the_stored_values(self, case: str) -> None:
        layer, experts = self.created(case), experts_of(case)
        self.fill(layer, case, experts)
        y = self.process(layer)
        assert self.weights_of(layer).weight_format == format_of(case)
        check_layer(self.weights_of(layer), y, experts)

    @pytest.mark.parametrize("case", CASES)
    def test_tensor_parallel_ranks_have_their_shares(self, case: str) -> None:
        """Two ranks through the engine's loader: each has its share, and their sum is the layer."""
        experts, outputs = experts_of(case), []
        for rank in range(2):
            layer = self.created(case, rank=rank, ranks=2)
            self.fill(layer, case, experts)
            outputs.append(self.process(layer))
            check_layer(self.weights_of(layer), outputs[-1], experts, rank, 2)
        check_sum(outputs, experts)

    @pytest.mark.parametrize("case, fault", PLANTED, ids=lambda value: value)
    def test_faults_of_a_reader_are_found(self, case: str, fault: str) -> None:
        experts = experts_of(case)
        with planted(fault):
            layer = self.created(case)
            self.fill(layer, case, experts)
            y = self.process(layer)
        with pytest.raises(AssertionError):
            check_layer(self.weights_of(layer), y, experts)

    def test_casts_are_not_rounded(self) -> None:
        case = "ModelOpt cast"
        layer, experts = self.created(case, **self.rounded), experts_of(case)
        self.fill(layer, case, experts)
        y = self.process(layer)
        check_layer(self.weights_of(layer), y, experts)

    @pytest.mark.parametrize("case", OTHERS)
    def test_rounding_another_format_is_refused(self, case: str) -> None:
        said = rf"weight_rounding — need None, since .*, got (MX|INT).* \({PREFIX}\)"
        with pytest.raises(ValueError, match=said) as error:
            self.created(case, **self.rounded)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("case", ["compressed-tensors MXFP4", "ModelOpt cast"])
    def test_copies_are_kept_and_their_kernels_compiled(self, case: str) -> None:
        """As on an H200, where nothing is launched; and a reload renews the copies in place."""
        pytest.importorskip("triton")
        from support.launches import H200, Recorder, without_device

        layer, launches = self.created(case, **self.kept), Recorder()
        self.admit(layer, 1024)
        with (
            mock.patch.object(serving, "_warm", set()),
            without_device(record=False),
            on_device(H200, launches),
        ):
            self.fill(layer, case, experts_of(case))
            self.process(layer)
            held = self.weights_of(layer)
            copies = [held.gate_up_proj.fp8_codes, held.down_proj.fp8_codes]
            before = [copy.clone() for copy in copies]
            assert "_moe_gemm_prefill_fp8_kernel" in {each.kernel.__name__ for each in launches}
            self.recreate(layer)
            self.fill(layer, case, experts_of(case, seed=9))
            self.process(layer)
        assert held.layout is Layout.HOPPER_FRAGMENT_FP8
        assert self.weights_of(layer) is held
        for part, copy, old in zip(
            (held.gate_up_proj, held.down_proj), copies, before, strict=True
        ):
            assert part.fp8_codes is copy
            assert not torch.equal(copy, old)

    def test_copies_are_refused_where_there_are_none(self) -> None:
        """In one line: experts that are no MXFP4, and this CPU."""
        text = r"^mxpert for \w+: prepare: keep_fp8 — need .*, got "
        for case, said in (("ModelOpt NVFP4", "nvfp4; omit it$"), ("Quark", "ROW_MAJOR on cpu; ")):
            layer = self.created(case, **self.kept)
            self.fill(layer, case, experts_of(case))
            with pytest.raises(ValueError, match=text + said):
                self.process(layer)
        text = r'("keep_fp8"|--moe-runner-backend) — need MXFP4 weights, '
        with pytest.raises(ValueError, match=rf"{text}.* got INT4 \({PREFIX}\); omit it$"):
            self.created("AWQ g128", **self.kept)

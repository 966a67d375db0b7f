"""What layers of every engine do with stored experts: the tests that all of them share."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

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
    ``process`` prepares and runs it, and ``rounded`` are arguments of ``created`` that ask for
    weights rounded to e4m3.
    """

    created: Any
    fill: Any
    process: Any
    weights_of: Any
    rounded: ClassVar[dict[str, Any]]

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

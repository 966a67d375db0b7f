"""What configs say, in every method's words; any JSON is read or refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from mxpert.errors import UnsupportedError
from mxpert.integrations.checkpoints.containers import METHODS, served
from mxpert.integrations.checkpoints.stated_quantization import Statement

hypothesis = pytest.importorskip("hypothesis", reason="the property test is written with it")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

LINEAR = "model.layers.3.mlp.experts.0.gate_proj"


def stated(**entry: Any) -> Statement:
    found = Statement.of({"quantization_config": entry}, None, "here", "load")
    assert found is not None
    return found


EXCLUDED: dict[str, tuple[dict[str, Any], bool]] = {
    "a whole layer": ({"ignore": ["model.layers.3.*"]}, True),
    "another layer": ({"ignore": ["model.layers.30.*", "model.layers.1*"]}, False),
    "the module": ({"modules_to_not_convert": ["model.layers.3.mlp.experts"]}, True),
    "a part of the path": ({"exclude": ["mlp.experts"]}, True),
    "a part of a word": ({"exclude": ["mlp.expert"]}, False),
    "a regular expression": ({"ignore": ["re:.*experts.*"]}, True),
    "one from the start": ({"ignore": ["re:mlp"]}, False),
    "entries that are no text": ({"ignore": [3, None, ["a"]]}, False),
    "nothing": ({}, False),
}


@pytest.mark.parametrize("case", EXCLUDED)
def test_lists_of_dense_modules(case: str) -> None:
    entry, wanted = EXCLUDED[case]
    assert stated(quant_method="modelopt", **entry).excludes(LINEAR) is wanted


def test_the_own_file_of_modelopt_counts_where_it_quantises() -> None:
    none: dict[str, Any] = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    assert Statement.of({}, none, "here", "load") is None
    some: dict[str, Any] = {"quantization": {"quant_algo": "nvfp4"}}
    found = Statement.of({}, some, "here", "load")
    assert found is not None
    assert (found.method, found.format_of(LINEAR)) == ("modelopt", "NVFP4")
    config = {"quantization_config": {"quant_method": "awq"}}
    found = Statement.of(config, some, "here", "load")  # what config.json says comes first
    assert found is not None
    assert found.method == "awq"


WORDS = [
    *METHODS,
    "NVFP4",
    "fp4",
    "mxfp4",
    "Linear",
    "re:(",
    "re:.*experts.*",
    "model.layers.*",
    "mxfp4-pack-quantized",
    "e8m0",
    "\n",
]
KEYS = [
    "config_groups",
    "group_0",
    "targets",
    "format",
    "weights",
    "ignore",
    "exclude",
    "global_quant_config",
    "layer_quant_config",
    "*experts*",
    "weight",
    "dtype",
    "group_size",
    "scale_format",
    "export",
    "weight_format",
    "quant_algo",
    "quantized_layers",
    "expert_dtype",
    "store_dtype",
    "text_config",
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(
    method=st.sampled_from(sorted(METHODS)) | JSON,
    entry=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5),
    config=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=2),
    producer=st.none() | st.dictionaries(st.just("quantization"), JSON, max_size=1),
)
def test_any_json_is_read_or_refused_in_one_line(
    method: Any, entry: dict[str, Any], config: dict[str, Any], producer: dict[str, Any] | None
) -> None:
    whole = config | {"quantization_config": entry | {"quant_method": method}}
    for stored in (whole, config):
        try:
            found = Statement.of(stored, producer, "here", "load")
            if found is None or found.excludes(LINEAR):
                continue
            container = served(found, found.format_of(LINEAR))
            assert container.stated.method == found.method
        except (ValueError, UnsupportedError) as error:
            text = str(error)
            assert text.startswith("load: here/"), text
            assert " — need " in text, text
            assert "\n" not in text, text

"""The plugin's option and version range; vLLM is not needed."""

from __future__ import annotations

import re

import pytest

from mxpert import UnsupportedError
from mxpert.formats.names import FORMAT_OF, SHORT_NAMES
from mxpert.integrations.vllm.options import Options, requested_options, require_supported


@pytest.mark.parametrize("name", FORMAT_OF)
def test_every_format_switches_the_plugin_on(name: str) -> None:
    wanted = Options(FORMAT_OF[name])
    assert requested_options({"mxpert": name, "another_plugin": 3}) == wanted
    assert requested_options({"mxpert": {"activation_format": name}}) == wanted
    rounded = {"activation_format": name, "weight_rounding": "e4m3"}
    assert requested_options({"mxpert": rounded}) == Options(FORMAT_OF[name], "e4m3")


@pytest.mark.parametrize("name", FORMAT_OF)
def test_copies_are_kept_with_narrow_activations_alone(name: str) -> None:
    asked = {"mxpert": {"activation_format": name, "keep_fp8": True}}
    if FORMAT_OF[name] != "bf16":
        assert requested_options(asked) == Options(FORMAT_OF[name], keep_fp8=True)
        return
    match = (
        r'^mxpert for vLLM: "keep_fp8" — need activations in 8 or 4 bits, .*, got \'bf16\'; choose'
    )
    with pytest.raises(ValueError, match=match):
        requested_options(asked)
    assert requested_options({"mxpert": {"activation_format": name, "keep_fp8": False}})


@pytest.mark.parametrize("config", [None, {}, {"another_plugin": {"x": 1}}, {"mxpert": None}, 7])
def test_without_the_option_it_is_off(config: object) -> None:
    assert requested_options(config) is None


WRONG = [
    *("A16W4", "", True, 4, {"format": "a16w4"}, ["a16w4"]),
    {"weight_rounding": "e4m3"},
    {"activation_format": "a16w4", "weight_rounding": "e5m2"},
    {"activation_format": "a16w4", "weight_rounded": "e4m3"},
    {"activation_format": "a8w4", "keep_fp8": 1},
    {"activation_format": "a8w4", "keep_fp8": None},
]


@pytest.mark.parametrize("value", WRONG)
def test_a_wrong_value_names_the_allowed_ones_in_one_line(value: object) -> None:
    with pytest.raises(ValueError) as error:
        requested_options({"mxpert": value})
    text = str(error.value)
    assert "\n" not in text
    assert repr(value) in text
    assert all(repr(name) in text for name in (*SHORT_NAMES, *SHORT_NAMES.values()))
    assert '"weight_rounding": "e4m3", "keep_fp8": true' in text


@pytest.mark.parametrize("key", ["mxprt", "MXPERT", "mxpert_format", "mx-pert", "mxperts"])
def test_a_misspelt_key_is_not_ignored(key: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(key))) as error:
        requested_options({key: "a16w4"})
    assert "'mxpert'" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("version", ["0.20.2", "0.26.0", "0.32.0+cpu", "0.33.0", "0.33.4.dev7"])
def test_versions_in_the_range(version: str) -> None:
    require_supported(version)


@pytest.mark.parametrize("version", ["0.20.1", "0.11.0", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_in_one_line(version: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(version)) as error:
        require_supported(version)
    assert "0.20.2 or newer, below 0.34.0" in str(error.value)
    assert "\n" not in str(error.value)

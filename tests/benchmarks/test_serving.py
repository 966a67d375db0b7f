"""The benchmark of whole vLLM servers, with engines that answer from a script."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import gate
from benchmarks.serving import render as serving_render
from benchmarks.serving import run as serving
from benchmarks.serving.backends import BACKENDS, DEFAULT, OURS
from benchmarks.serving.engine import NONE_FOUND, Engine, require_asked
from benchmarks.serving.models import SIZES, cache_bytes, config_of, random_tensors, write_config
from benchmarks.serving.process import EngineError, EngineProcess
from benchmarks.serving.rows import SCHEMA

FAKE = """
import json, sys, time
spec = json.loads(sys.argv[1])
name, rates = spec["backend"], {"no-experts": 9000.0, "marlin": 100.0, "humming-fp8_token": 200.0}
rate = rates.get(name, 150.0)
print(json.dumps({"vllm": "0"}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    with open(LOG, "a") as log:
        log.write(f"{name} {order['do']}\\n")
    answer = {}
    if order["do"] == "load":
        if name in BROKEN.split(","):
            sys.exit("no memory")
        answer = {"load_s": 1.0, "moe_method": METHODS.get(name, "fake"), "weights_gib": 1.0}
    if order["do"] == "first_requests":
        answer = {"first_request_s": 2.0, "warm_request_s": 1.0}
    if order["do"] == "log_probabilities":
        shift = {"marlin": 0.01, "humming-fp8_token": 0.05, RED: 5.0}.get(name, 0.001)
        answer = {"log_probabilities": [-1.0 - shift * (name != "vllm"), -2.0]}
    if order["do"] == "measure":
        if name == SLOW:
            time.sleep(60)
        rows = [["decode", c, 128, 64, 2.0, 1.0, rate * c] for c in spec["concurrency"]]
        answer = {"rows": [*rows, ["prefill", 8, 1024, 1, 1.0, 1.0, 8192.0]], "peak_gib": 2.0}
    print(json.dumps(answer), flush=True)
"""


class Rig:
    """Runs serving.main with fake engines, and notes their orders."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.output, self.log = folder, folder / "serving.json", folder / "orders"
        self.patch = monkeypatch
        monkeypatch.setattr(serving, "package_version", lambda name: "0.99")
        monkeypatch.setattr(serving.SCRIPT.__class__, "complete", complete)

    def run(self, *arguments: str, broken: str = "", red: str = "", slow: str = "") -> int:
        program = self.folder / "fake.py"
        methods = {"vllm": "Mxfp4 TRITON", "marlin": "Mxfp4 MARLIN"}
        names: dict[str, Any] = {"LOG": str(self.log), "BROKEN": broken, "RED": red, "SLOW": slow}
        names["METHODS"] = methods
        text = "\n".join(f"{name} = {value!r}" for name, value in names.items()) + FAKE
        program.write_text(text, encoding="utf-8")
        made = partial(EngineProcess, command=(str(program),))
        self.patch.setattr(serving, "EngineProcess", made)
        self.log.write_text("", encoding="utf-8")
        options = ["--models", "gpt-oss-20b", "--output", str(self.output), "--commit", "abc"]
        return serving.main([*options, "--concurrency", "1,8", *arguments])

    @property
    def orders(self) -> list[str]:
        return self.log.read_text("utf-8").splitlines()

    @property
    def document(self) -> dict[str, Any]:
        document = json.loads(self.output.read_text("utf-8"))
        SCHEMA.validate(document)
        return document


def complete(script: Any, options: Any) -> None:
    """As on a GPU, without one."""
    import torch

    options.began, options.device = time.monotonic(), torch.device("cpu")
    options.deadline, options.path = options.began + options.time_limit, options.output


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


FEW = ("--backends", "vllm,marlin,mxpert-a16w4,no-experts", "--rounds", "2")


def test_every_round_of_every_engine_is_recorded(rig: Rig) -> None:
    assert rig.run(*FEW, "--together", "4") == 0
    rows = rig.document["rows"]
    assert len(rows) == 4 * 2 * (2 + 1)
    assert {row["round"] for row in rows} == {0, 1}
    assert [row["backend"] for row in rig.document["gates"]] == ["vllm", "marlin", "mxpert-a16w4"]
    assert all(row["peak_gib"] == 2.0 for row in rig.document["engines"])
    assert rig.document["meta"]["left"] == []


def test_engines_take_turns_in_another_order_each_round(rig: Rig) -> None:
    rig.run(*FEW, "--together", "4")
    turns = [order.split()[0] for order in rig.orders if order.endswith("measure")]
    assert turns[:4] == ["vllm", "marlin", "mxpert-a16w4", "no-experts"]
    assert turns[4:] == ["marlin", "mxpert-a16w4", "no-experts", "vllm"]


def test_groups_are_loaded_one_after_the_other(rig: Rig) -> None:
    rig.run(*FEW, "--together", "2")
    kinds = [order.split()[1] for order in rig.orders if order.split()[1] in ("load", "measure")]
    assert kinds == ["load"] * 3 + (["load"] * 2 + ["measure"] * 4) * 2
    assert {row["together"] for row in rig.document["engines"]} == {2}


def test_a_red_gate_is_not_timed(rig: Rig) -> None:
    assert rig.run(*FEW, red="mxpert-a16w4") == 1
    assert "mxpert-a16w4" not in {row["backend"] for row in rig.document["rows"]}
    failures = rig.document["meta"]["failures"]
    assert failures["gpt-oss-20b mxpert-a16w4 gate"].startswith("red: differs by 2.5000")


def test_an_engine_that_ends_is_noted_with_its_last_words(rig: Rig) -> None:
    assert rig.run(*FEW, broken="marlin") == 0
    assert "no memory" in rig.document["meta"]["failures"]["gpt-oss-20b marlin gate"]
    assert "marlin" not in {row["backend"] for row in rig.document["rows"]}


def test_a_run_in_which_nothing_starts_ends_all_the_same(rig: Rig) -> None:
    assert rig.run("--backends", "mxpert-a16w4", broken="vllm,marlin,mxpert-a16w4") == 1
    assert rig.document["rows"] == []
    assert [order.split()[1] for order in rig.orders] == ["load"] * 3


def test_a_resumed_gate_has_the_references_again_and_keeps_their_rows(rig: Rig) -> None:
    rig.run("--backends", "vllm,marlin")
    before = rig.document["gates"]
    assert rig.run("--backends", "mxpert-a16w4", "--resume") == 0
    assert rig.document["gates"][:2] == before
    assert rig.document["gates"][2]["difference"] == pytest.approx(0.0005)
    assert {order for order in rig.orders if order.endswith("measure")} == {"mxpert-a16w4 measure"}


def test_what_the_limit_leaves_out_is_resumed(rig: Rig) -> None:
    assert rig.run(*FEW, "--time-limit", "8", "--together", "1", slow="mxpert-a16w4") == 1
    left = rig.document["meta"]["left"]
    assert "gpt-oss-20b mxpert-a16w4" in left
    assert "gpt-oss-20b vllm" not in left
    before = len(rig.document["rows"])
    assert rig.run(*FEW, "--resume", "--together", "4") == 0
    assert {order.split()[0] for order in rig.orders} == {name.split()[1] for name in left}
    assert not any(order.endswith("log_probabilities") for order in rig.orders)
    assert len(rig.document["rows"]) == 24 > before
    assert rig.document["meta"]["left"] == []


def test_without_time_nothing_is_started(rig: Rig) -> None:
    assert rig.run(*FEW, "--time-limit", "0") == 1
    assert rig.orders == []
    assert len(rig.document["meta"]["left"]) == 4


def test_tables_and_plot(rig: Rig) -> None:
    rig.run(*FEW)
    assert serving_render.main([str(rig.output)]) == 0
    text = rig.output.with_suffix(".md").read_text("utf-8")
    assert "| mxpert-a16w4 | 150 (1.00×) | 1,200 (1.00×) |" in text
    assert "| vllm | 98 % | 98 % |" in text
    assert "| mxpert-a16w4 | 150 / 150 |" in text
    assert rig.output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_panel_without_bars_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.run(*FEW)
    document = rig.document
    document["rows"].append(document["rows"][0] | {"model": "other", "concurrency": 512})
    drawn: list[Any] = []
    monkeypatch.setattr(
        serving_render, "save_figure", lambda figure, panels, *_, **__: drawn.extend(panels)
    )
    serving_render.plot(document, rig.output)
    empty = [axes for axes in drawn if not axes.patches]
    assert 0 < len(empty) < len(drawn)
    for axes in drawn:
        wanted = ["not measured"] if axes in empty else []
        assert [text.get_text() for text in axes.texts] == wanted


def test_ours_is_compared_with_activations_as_wide_or_wider(rig: Rig) -> None:
    """8-bit activations of vLLM's own are no baseline of 16-bit ones; the page says who ran."""
    names = "vllm,marlin,humming-fp8_token,mxpert-a16w4,mxpert-a8w4"
    rig.run("--backends", names, "--rounds", "1")
    gates = {row["backend"]: row for row in rig.document["gates"]}
    assert gates["humming-fp8_token"]["passed"]  # within the noise of its format
    assert gates["humming-fp8_token"]["bound"] > 2 * gates["mxpert-a16w4"]["bound"]
    serving_render.main([str(rig.output)])
    text = rig.output.with_suffix(".md").read_text("utf-8")
    assert "| mxpert-a16w4 | 150 (1.00×) |" in text
    assert "| mxpert-a8w4 | 150 (0.75×) |" in text
    assert (
        "vLLM's own that were measured: vllm (TRITON), marlin (MARLIN), humming-fp8_token" in text
    )
    assert (
        "; not measured: humming, humming-grouped, humming-grouped-fp8_token, triton-unfused, "
        "flashinfer." in text
    )


def test_the_summary_has_medians_ratios_and_the_span_of_both_formats(rig: Rig) -> None:
    names = "vllm,marlin,humming-fp8_token,mxpert-a16w4,mxpert-a8w4,mxpert-a4w4,no-experts"
    rig.run("--backends", names, "--rounds", "1")
    document = rig.document
    text = serving_render.summary_table(document)
    assert "| model, experts | decode, 1 request | 8 | prefill, 8 × 1024 tokens |" in text
    assert "| gpt-oss-20b, vLLM's default (triton_kernels) | 150 | 1200 | 8192 |" in text
    assert "| gpt-oss-20b, Humming, FP8 activations | 200 | 1600 | 8192 |" in text
    assert "| gpt-oss-20b, mxpert a8w4 | 150 (0.75×) | 1200 (0.75×) | 8192 (1.00×) |" in text
    assert "a4w4" not in text
    assert "no-experts" not in text
    ours = serving_render.summary_table(document, ours_only=True).splitlines()
    assert [line.split(" | ")[0] for line in ours[2:]] == [
        "| gpt-oss-20b, mxpert a16w4",
        "| gpt-oss-20b, mxpert a8w4",
    ]
    assert serving_render.decode_text(document) == (
        "in a16w4 1.00 and in a8w4 0.75 times as fast as with the best of vLLM's own kernels "
        "with activations as wide or wider"
    )
    nothing: dict[str, Any] = {"rows": [], "engines": []}
    assert serving_render.decode_text(nothing) == serving_render.summary_table(nothing) == ""


def test_where_experts_do_not_decide_the_text_says_so(rig: Rig) -> None:
    """At 8 requests an engine whose experts take no time is here 1.05 times as fast as vLLM's."""
    rig.run("--backends", "vllm,mxpert-a16w4,no-experts", "--rounds", "1")
    document = rig.document
    for row in document["rows"]:
        if (row["backend"], row["concurrency"], row["phase"]) == ("no-experts", 8, "decode"):
            row["tokens_per_s"] = 1.05 * 8 * 150
    assert serving_render.decode_text(document) == (
        "in a16w4 1.00 times as fast as with the best of vLLM's own kernels with activations as "
        "wide or wider; with 8 requests of gpt-oss-20b the rest of the engine decides "
        "(1.00, experts that take no time 1.05)"
    )


def test_a_backends_variables_are_those_of_its_process(tmp_path: Path) -> None:
    """A back end that differs by a variable alone would else be measured twice."""
    program = tmp_path / "say.py"
    name = "VLLM_HUMMING_INPUT_QUANT_CONFIG"
    program.write_text(f"import os\nprint('{{\"it\":', os.environ.get('{name}', 0), '}}')\n")
    found = {}
    for backend in ("humming", "humming-fp8_token"):
        spec = {"model": "tiny", "backend": backend}
        engine = EngineProcess(spec, tmp_path / backend, command=(str(program),))
        found[backend] = engine.answer(time.monotonic() + 30)["it"]
        engine.stop()
    assert found == {"humming": 0, "humming-fp8_token": {"dtype": "float8e4m3"}}


def test_wrong_options_and_a_missing_vllm(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert rig.run("--backends", "vlm") == 2
    assert "--backends — need some of vllm, marlin" in capsys.readouterr().err
    rig.patch.setattr(serving, "package_version", lambda name: None)
    assert rig.run() == 2
    assert "serving: vllm — need an environment with it" in capsys.readouterr().err


def test_the_gate_bound_follows_the_formats_noise() -> None:
    names = [None, "a16w4", "a8w4", "fp8_token", "a4w4"]
    bounds = [gate.bound(name, 0.011) for name in names]
    assert bounds[0] == bounds[1] == pytest.approx(0.011)
    assert 0.03 < bounds[2] < bounds[4] < 1.0  # e4m3 has two more bits of mantissa than e2m1
    assert bounds[3] == pytest.approx(bounds[2], rel=0.5)
    assert gate.bound("a8w4", 0.022) == pytest.approx(2 * bounds[2])


def test_the_reference_is_vllm_and_the_pair_its_own_backends() -> None:
    found = {"mxpert-a16w4": [0.0, 0.0], "marlin": [0.1, 0.0], "vllm": [0.0, 0.2]}
    judged = gate.judge(found)
    assert judged["vllm"][0] == 0.0
    margin = 1 + 3 * (0.1 / 2**0.5) / 0.15  # of 0.1 and 0.2
    assert judged["mxpert-a16w4"] == pytest.approx((0.1, 0.15 * margin))
    del found["vllm"]
    assert gate.judge(found)["mxpert-a16w4"] == (0.0, gate.IN_TREE_PAIR)
    assert gate.judge({"no-experts": [0.0]}) == {}


def test_an_engine_that_is_silent_runs_out_of_time(tmp_path: Path) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    spec = {"model": "tiny", "backend": "vllm"}
    engine = EngineProcess(spec, tmp_path / "folder", command=(str(silent),))
    with pytest.raises(EngineError, match="out of time"):
        engine.answer(time.monotonic() + 0.2)
    engine.stop()
    with pytest.raises(EngineError, match="ended: it said nothing"):
        engine.answer(time.monotonic() + 10)


def test_random_tensors_have_the_checkpoints_names_and_no_zeros(tmp_path: Path) -> None:
    from types import SimpleNamespace

    config = json.loads((write_config(tmp_path / "m", "tiny") / "config.json").read_text("utf-8"))
    made = dict(random_tensors(SimpleNamespace(**config), "cpu"))
    again = dict(random_tensors(SimpleNamespace(**config), "cpu"))
    assert all((made[name] == again[name]).all() for name in made)
    blocks = made["model.layers.1.mlp.experts.gate_up_proj_blocks"]
    assert blocks.shape == (8, 256, 4, 16)
    assert (blocks == 0).float().mean() < 0.01  # uniform: one byte of 256
    assert not made["model.layers.0.mlp.experts.down_proj_bias"].eq(0).all()


def engine_with(*seconds: float) -> Engine:
    """An engine whose requests take these times, in order."""
    engine, times = Engine.__new__(Engine), iter(seconds)
    engine.spec = {"concurrency": [2], "prompt": 8, "new_tokens": 5, "prefill": (4, 16)}
    engine.spec["device"], engine.warm = "cpu", True
    engine.generate = lambda *_, **__: next(times)  # type: ignore[method-assign]
    return engine


def test_rates_leave_out_the_first_token() -> None:
    decode, prefill = engine_with(1.0, 3.0, 8.0, 4.0, 16.0).measure()["rows"]
    assert decode == ("decode", 2, 8, 5, 3.0, 1.0, 2 * 4 / 2.0)
    assert prefill == ("prefill", 4, 16, 1, 4.0, 4.0, 4 * 16 / 4.0)


def test_swapped_times_are_taken_again() -> None:
    (decode, _) = engine_with(2.0, 1.0, 1.0, 3.0, 8.0, 4.0, 16.0).measure()["rows"]
    assert decode[-1] == 4.0
    with pytest.raises(RuntimeError, match="took no longer than one, 3 times"):
        engine_with(2.0, 1.0, 2.0, 1.0, 2.0, 2.0).measure()


def made(kind: str, **attributes: Any) -> Any:
    """An object of a class of that name."""
    it = type(kind, (), {})()
    vars(it).update(attributes)
    return it


@pytest.mark.parametrize(
    "method, chose, experts, told",
    [
        ("GptOssMethod", "TRITON", "MonolithicExperts", "GptOssMethod TRITON MonolithicExperts"),
        ("GptOssMethod", "MARLIN", "", "GptOssMethod MARLIN"),
        ("MxpertGptOssMethod", "EMULATION", "RoutingExperts", "MxpertGptOssMethod RoutingExperts"),
    ],
)
def test_a_method_is_told_with_what_computes(
    method: str, chose: str, experts: str, told: str
) -> None:
    """vLLM's "emulation" of a method of ours says how weights are loaded, and is left out."""
    engine = Engine.__new__(Engine)
    kernel = made("Kernel", fused_experts=made(experts)) if experts else None
    found = made(
        method,
        mxfp4_backend=made("Backend", name=chose),
        moe_kernel=kernel,
        process_weights_after_loading=None,
    )
    layers = [made("Linear"), made("RoutedExperts", quant_method=found, w13_weight=0)]
    engine.model = made("Model", modules=lambda: layers)
    assert engine.moe_method() == told
    engine.model = made("Model", modules=lambda: layers[:1])
    assert engine.moe_method() == NONE_FOUND


def test_another_method_than_the_one_asked_for_is_not_measured() -> None:
    ours, theirs = BACKENDS["mxpert-a16w4"], BACKENDS["vllm"]
    for backend, method in ((ours, "MxpertMethod"), (theirs, "Method"), (ours, NONE_FOUND)):
        require_asked(backend, method)
    for backend, method in ((ours, "Method TRITON"), (theirs, "MxpertMethod")):
        with pytest.raises(RuntimeError, match=f"{backend.name}: .* computed by {method}"):
            require_asked(backend, method)


def test_sizes_are_the_published_ones() -> None:
    for model, depth in (("gpt-oss-20b", 24), ("gpt-oss-120b", 36)):
        config = config_of(model)
        assert (config["num_hidden_layers"], config["hidden_size"]) == (depth, 2880)
        assert len(config["layer_types"]) == depth
        assert SIZES[model][1] == config["num_local_experts"]
    assert config_of("gpt-oss-20b", 2)["num_hidden_layers"] == 2
    per_token = cache_bytes(config_of("gpt-oss-20b"), 1001) - cache_bytes(
        config_of("gpt-oss-20b"), 1
    )
    assert per_token == pytest.approx(1.25 * 1000 * 24 * 2 * 8 * 64 * 2)


def test_backends_are_named_once() -> None:
    assert set(DEFAULT) <= set(BACKENDS)
    assert DEFAULT[:2] == ("vllm", "marlin")
    assert {"mxpert-a16w4", "mxpert-a8w4", "mxpert-a4w4", "mxpert-fp8_token"} <= set(OURS)
    assert "no-experts" not in OURS
    assert {"vllm", "marlin", "humming", "humming-fp8_token", "no-experts"} <= set(DEFAULT)
    narrow = {name for name, each in BACKENDS.items() if each.is_narrow}
    theirs = {"humming-fp8_token", "humming-grouped-fp8_token"}
    assert narrow == theirs | {"mxpert-a8w4", "mxpert-a4w4", "mxpert-fp8_token"}

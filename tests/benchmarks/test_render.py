"""Renders a comparison: speed-ups, goals, tables, the measured blocks of documents."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT
from benchmarks.harness.document import Document
from benchmarks.moe import cells, figures, goals, layers, render
from benchmarks.moe.rows import KEY_COLUMNS, SCHEMA, row_key
from tests.benchmarks.comparison_rows import CEILINGS, META, row


def test_each_of_our_formats_is_compared_with_the_best_peer_of_its_width() -> None:
    rows = [
        row(us=10),
        row("marlin", 40),
        row("triton_kernels", 20),
        row(us=30, activation="mxfp8"),
        row(us=12, activation="fp8_token"),
        row("humming", 15, activation="fp8_token"),
        row(us=5, tokens=1024),
        row(us=7, stage="down"),
        row(us=6, activation="mxfp4"),
    ]
    found = {each.activation: each for each in figures.speed_ups(rows)}
    assert list(found) == ["bf16", "mxfp8", "fp8_token", "mxfp4"]
    assert (found["bf16"].peer["impl"], found["bf16"].value) == ("triton_kernels", 2.0)
    assert (found["mxfp8"].value, found["fp8_token"].value) == (0.5, 1.25)
    assert (found["mxfp4"].peer["activation"], found["mxfp4"].value) == ("fp8_token", 2.5)
    assert [each.activation for each in figures.slower_cells(found.values())] == ["mxfp8"]


def test_geometric_means_by_stage_and_regime() -> None:
    rows = [
        row(us=10, tokens=1),
        row("marlin", 40, tokens=1),
        row(us=10, tokens=256),
        row("marlin", 10, tokens=256),
        row(us=30, tokens=1024),
        row("marlin", 10, tokens=1024),
    ]
    assert figures.geometric_means(figures.speed_ups(rows)) == {
        ("bf16", "layer", "decode"): (pytest.approx(2.0), 2, 1.0),
        ("bf16", "layer", "prefill"): (pytest.approx(1 / 3), 1, 1 / 3),
    }


def test_the_gemms_share_needs_all_three_times() -> None:
    rows = [
        row(us=13),
        row(us=8, stage="gate_up_gemm"),
        row(us=4, stage="down_gemm"),
        row(us=9, tokens=64),
    ]
    assert figures.gemm_shares(rows) == {("dsv3-ep8", "uniform", "bf16", 16): 12 / 13}


def test_formats_compare_where_both_are_and_by_the_sum_of_the_stages() -> None:
    rows = [
        row(us=10, activation="mxfp8"),
        row(us=11, activation="fp8_token"),
        row("humming", 1, activation="fp8_token"),
        row(us=5, activation="mxfp8", tokens=1),
    ]
    for stage, blocks, token in (("gate_up", 9, 4), ("down", 3, 6)):
        rows += [
            row(us=blocks, activation="mxfp8", stage=stage),
            row(us=token, activation="fp8_token", stage=stage),
        ]
    found = {
        stage: value
        for (_, _, _, stage), value in figures.format_speed_ups(rows, "mxfp8", "fp8_token").items()
    }
    assert found == {"layer": 1.1, "gate_up": 4 / 9, "down": 2.0, "gate_up + down": 10 / 12}


@pytest.mark.parametrize(
    "activation, tokens, bound",
    [("bf16", 16, "read"), ("mxfp8", 16, "read"), ("bf16", 8192, "bf16"), ("mxfp8", 8192, "fp8")],
)
def test_the_roof_names_what_bounds_a_cell(activation: str, tokens: int, bound: str) -> None:
    found = row(us=1e4, activation=activation, tokens=tokens)
    roof = figures.Roof.of(found, CEILINGS)
    assert roof.bound == bound
    assert 100 * roof.share == pytest.approx(found["percent_of_roof"])


def goal(rows: list[dict[str, Any]], what: str, *, of_mean: bool = False) -> goals.Goal:
    found = goals.goals({"meta": META, "rows": rows})
    return next(each for each in found if what in each.what and each.of_mean == of_mean)


def test_every_goal_is_there_for_every_format() -> None:
    rows = [row(activation=name) for name in ("bf16", "mxfp8", "fp8_token", "mxfp4")]
    found = goals.goals({"meta": META, "rows": rows})
    assert [each.number for each in found] == [1] * 16 + [2] * 12 + [3] * 2 + [4] * 4
    assert found[-6].columns()[0] == "3. speed of mxfp8 over fp8_token"
    assert found[-5].values == {"dsv3-ep8 T=16 layer": 1.0}
    assert found[-1].columns()[-1] == "not measured"


def test_a_goal_of_every_cell_and_one_of_the_mean() -> None:
    rows = [row(us=10), row("marlin", 40), row(us=11, tokens=4), row("marlin", 10, tokens=4)]
    each, mean = (goal(rows, "bf16 decode, speed", of_mean=of_mean) for of_mean in (False, True))
    assert (each.num_met, each.is_met, each.worst) == (1, False, "dsv3-ep8 T=4 layer")
    assert mean.is_met
    assert mean.mean == pytest.approx((4 / 1.1) ** 0.5)
    shown = "mean ≥ 1.67|1.91|0.91 (dsv3-ep8 T=4 layer)|1 of 2|met"
    assert "|".join(mean.columns()[1:]) == shown


def test_a_goal_with_a_least_figure() -> None:
    read, missed = 62.0, 80.0  # µs; at the read ceiling it would be 61.4
    rows = [
        row(us=us, tokens=tokens, stage="down_gemm", activation="mxfp8")
        for us, tokens in ((read, 64), (missed, 128), (read, 16))
    ]
    found = goal(rows, "read ceiling")
    assert list(found.values) == ["dsv3-ep8 T=64 down_gemm", "dsv3-ep8 T=128 down_gemm"]
    assert found.worst == "dsv3-ep8 T=128 down_gemm"
    assert not found.is_met
    assert found.keeps(0.95)
    assert not found.keeps(0.94)


def test_goals_speak_of_the_cells_that_they_name() -> None:
    few = row(us=10, model="kimi-k2-tp4", tokens=64, stage="down_gemm")  # 31.5 of 384 experts
    late = row(us=30, model="dsv3-ep8", tokens=1)  # cannot be read in 30 µs
    prompt = row(us=30, model="gpt-oss-20b", tokens=1)
    rows = [few, late, prompt | {"tbs": 1.0}]
    assert goal(rows, "read ceiling").values == {}
    assert goal(rows, "layer at T = 1").values == {"gpt-oss-20b T=1 layer": 30.0}
    dense, sparse = (
        row(us=1e3, model=name, tokens=1024, stage="down_gemm")
        for name in ("dsv3-ep8", "kimi-k2-tp4")
    )
    assert list(goal([dense, sparse], "cuBLAS").values) == ["dsv3-ep8 T=1024 down_gemm"]
    large = [
        row(us=1e3, model=name, tokens=8192, stage="down_gemm")
        for name in ("gpt-oss-120b", "gpt-oss-20b")
    ]
    rates = goal(large, "TFLOP/s at T")
    assert list(rates.values) == ["gpt-oss-120b T=8192 down_gemm"]
    layers = [
        row(us=us, tokens=tokens, stage=stage)
        for tokens in (16, 64)
        for us, stage in ((12, "layer"), (8, "gate_up_gemm"), (4, "down_gemm"))
    ]
    assert goal(layers, "two GEMMs /").values == {"dsv3-ep8 T=64": 1.0}


def test_everything_is_rendered_from_the_json_alone(tmp_path: Path) -> None:
    rows = [
        row(us=10),
        row("marlin", 8),
        row(us=8, stage="gate_up_gemm"),
        row("marlin", 9, stage="gate_up_gemm"),
        row(us=30, activation="mxfp8"),
        row(us=20, activation="fp8_token"),
        row(us=15, activation="mxfp4"),
        row("humming", 30, activation="fp8_token"),
        row(us=7, model="r1-e384", tokens=64),
        row(us=900, tokens=8192, stage="down_gemm", activation="mxfp8"),
    ]
    found = Document(tmp_path / "moe.json", dict(META), KEY_COLUMNS, KEY_COLUMNS)
    found.meta["peers"] = {"humming/bf16": "absent: no nvcc"}
    found.left.append("dsv3-ep8 T=4 uniform")
    for tokens in (64, 16):
        found.fail(row_key(row("humming", tokens=tokens)), "no nvcc")
    for each in rows:
        found.add(each)
    found.save()
    assert render.main([str(tmp_path / "moe.json")]) == 0
    full = (tmp_path / "moe.md").read_text()
    assert "| dsv3-ep8 T=16 layer bf16 | 10.0 |" in full
    assert "| marlin 8.0 |" in full
    assert "1 of 5 cells." in full
    assert "| layer | 0.67 | 0.67 (dsv3-ep8 T=16) | 1 |" in full
    assert "| layer | 2.00 | 2.00 (dsv3-ep8 T=16) | 1 |" in full
    assert "| 3. speed of mxfp8 over fp8_token | ≥ 0.91 | 0.67 |" in full
    assert "absent: no nvcc" in full
    assert "- humming/bf16 dsv3-ep8, T = 16, 64, layer: `no nvcc`" in full
    assert "out of time: dsv3-ep8 T=4 uniform" in full
    assert full.count("<details>") == full.count("</details>") == 3
    assert "10 (0.80×)" in (tmp_path / "moe-summary.md").read_text()
    for name in ("moe.png", "layers.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def markers(name: str, text: str = "old") -> str:
    return f"<!-- measured {name}: begin -->\n{text}\n<!-- measured {name}: end -->\n"


def test_documents_get_the_blocks_that_they_have_markers_of(tmp_path: Path) -> None:
    rows = [
        row(us=10),
        row("marlin", 8),
        row(us=15, activation="mxfp4"),
        row("humming", 30, activation="fp8_token"),
        row(us=9, activation="fp8_token"),
        row(us=7, model="r1-e384", tokens=64),
    ]
    document = {"meta": META | {"device": "NVIDIA H200"}, "rows": rows}
    (tmp_path / "moe.json").write_text(json.dumps(document))
    readme, page = tmp_path / "README.md", tmp_path / "performance.md"
    readme.write_text(f"before\n{markers('speed-ups')}after\n")
    page.write_text(markers("speed-ups") + "between\n" + markers("layers"))
    arguments = [str(tmp_path / "moe.json"), "--page", str(readme), "--page", str(page)]
    assert render.main(arguments) == 0
    short, long = readme.read_text(), page.read_text()
    assert short.startswith("before\n<!--")
    assert short.endswith("-->\nafter\n")
    assert "old" not in short + long
    assert "| a16w4 | 0.80 |\n| a4w4 | 2.00 |" in short
    assert "r1-e384" not in short
    assert "| dsv3-ep8 a16w4 | 10 (0.80×) |\n| dsv3-ep8 a4w4 | 15 (2.00×) |" in long
    assert "| r1-e384 a16w4 | 7 |" in long
    assert "fp8_token" not in short + long
    assert "\nbetween\n" in long


@pytest.mark.parametrize("text", ["no markers", markers("layers") * 2, markers("layers")[:-10]])
def test_a_document_without_whole_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "moe.json").write_text(json.dumps({"meta": META, "rows": [row(us=10)]}))
    page = tmp_path / "page.md"
    page.write_text(text)
    assert render.main([str(tmp_path / "moe.json"), "--page", str(page)]) == 2
    assert page.read_text() == text


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_the_committed_blocks_are_those_of_the_json(name: str) -> None:
    document = SCHEMA.load(ROOT / "benchmarks/results/nvidia-h200/moe.json")
    assert layers.filled(document, ROOT / name) == (ROOT / name).read_text("utf-8")


def test_blocks_of_another_card_have_their_own_place(tmp_path: Path) -> None:
    """The JSON of an H100 leaves the blocks of the H200, and links to its own files."""
    document = SCHEMA.load(ROOT / "benchmarks/results/nvidia-h200/moe.json")
    document["meta"]["device"] = "NVIDIA H100 80GB HBM3"
    page = tmp_path / "page.md"
    text = markers("layers") + markers("layers, nvidia-h100")
    page.write_text(text)
    found = layers.filled(document, page)
    assert found.startswith(markers("layers"))
    assert "on one NVIDIA H100 80GB HBM3" in found
    assert "results/nvidia-h100/moe.json" in found
    page.write_text(markers("layers"))
    with pytest.raises(ValueError, match="measured speed-ups, nvidia-h100: begin"):
        layers.filled(document, page)


def test_links_of_a_block_lead_from_its_document(tmp_path: Path) -> None:
    assert "](benchmarks/results/nvidia-h200/moe.json)" in (ROOT / "README.md").read_text("utf-8")
    page = (ROOT / "docs/performance.md").read_text("utf-8")
    assert (
        page.count("](../benchmarks/results/nvidia-h200/moe.json)") == 3
    )  # two blocks, the list of files


def test_a_long_list_of_slower_cells_is_folded() -> None:
    rows = []
    for model, tokens in itertools.product(cells.MODELS, (1, 4, 16)):
        place: Any = dict(model=model, tokens=tokens)
        rows += [row(us=20, **place), row("marlin", 10, **place)]
    text = render.slower_part(figures.speed_ups(rows), CEILINGS)
    assert text.startswith("24 of 24 cells.")
    assert "<summary>the other 12</summary>" in text
    shown = figures.Roof.of(rows[0], CEILINGS), figures.Roof.of(rows[1], CEILINGS)
    assert f"| 20.0 | {shown[0]} | marlin 10.0 | {shown[1]} | 0.50 |" in text


def test_a_comparison_without_fp8_token_still_renders(tmp_path: Path) -> None:
    text = render.full({"meta": META, "rows": [row(us=10), row(us=9, activation="mxfp8")]})
    assert "Not measured: needs rows of mxpert with mxfp8 and with fp8_token." in text
    assert "| 3. speed of mxfp8 over fp8_token | ≥ 0.91 | – | – | – | not measured |" in text


def test_the_plot_has_no_panel_without_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []

    def save(figure: Any, panels: Any, *_: Any, **__: Any) -> None:
        titles.extend(axes.get_title() for axes in panels)

    monkeypatch.setattr(render, "save_figure", save)
    rows = [row(stage="gate_up_gemm"), row(stage="layer", model="kimi-e385")]
    render.plot({"meta": META, "rows": rows}, tmp_path / "moe.png")
    assert titles == ["dsv3-ep8, gate_up_gemm"] * 2

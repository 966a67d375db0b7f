"""Renders a comparison: speed-ups, goals, tables, the measured blocks of documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT
from benchmarks.harness.document import Document
from benchmarks.moe import figures, goals, layers, render
from benchmarks.moe.rows import KEY_COLUMNS, SCHEMA
from tests.benchmarks.comparison_rows import META, row, row_key


def test_the_gemms_share_needs_all_three_times() -> None:
    rows = [
        row(us=13),
        row(us=8, stage="gate_up_gemm"),
        row(us=4, stage="down_gemm"),
        row(us=9, tokens=64),
    ]
    assert figures.gemm_shares(rows) == {("dsv3-ep8", "uniform", "bf16", 16): 12 / 13}


def test_every_goal_is_there_for_every_format() -> None:
    rows = [row(activation=name) for name in ("bf16", "mxfp8", "fp8_token", "mxfp4")]
    found = goals.goals({"meta": META, "rows": rows})
    assert [each.number for each in found] == [1] * 16 + [2] * 12 + [3] * 2 + [4] * 4
    assert found[-6].columns()[0] == "3. speed of mxfp8 over fp8_token"
    assert found[-5].values == {"dsv3-ep8 T=16 layer": 1.0}
    assert found[-1].columns()[-1] == "not measured"


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


@pytest.mark.parametrize("count", [1, 5, len(render.CHART_PEERS)])
def test_marks_stay_on_the_line_of_their_model_and_labels_in_the_figure(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(render, "save", lambda drawing, path: drawn.append(drawing))
    peers = render.CHART_PEERS[:count]
    rows = [row(us=10, activation=name, tokens=128) for name in ("bf16", "mxfp8")]
    rows += [row(peer.impl, 20, activation=peer.activation, tokens=128) for peer in peers]
    render.plot_layers({"meta": META, "rows": rows}, tmp_path / "layers.png")
    marks = [marks for axes in drawn[0].axes for marks in axes.collections]
    places = [float(each.get_offsets()[0, 1]) for each in marks]
    assert len(set(places)) == count
    assert all(abs(place) < 0.5 for place in places)
    drawn[0].draw_without_rendering()
    (legend,) = drawn[0].legends
    assert len(legend.get_texts()) == count
    box, whole = legend.get_window_extent(), drawn[0].bbox
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1


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


def test_a_mean_has_all_models_of_the_run(tmp_path: Path) -> None:
    """T = 4 was measured of one model, T = 16 of two: the first has no place in the table."""
    places = [("dsv3-ep8", 4), ("dsv3-ep8", 16), ("gpt-oss-20b", 16)]
    rows = [
        row(name, us, model=model, tokens=tokens)
        for model, tokens in places
        for name, us in (("mxpert", 10), ("marlin", 20))
    ]
    found = layers.speed_up_block({"meta": META, "rows": rows}, ".")
    assert "| speed-up | T = 16 |" in found
    assert "T = 4" not in found


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


def test_a_block_names_the_peers_and_scales_that_were_measured() -> None:
    rows = [row(), row("humming", 30, activation="fp8_token"), row("marlin", 30)]
    assert "the best of Marlin and Humming with" in layers.speed_up_block(
        {"meta": META, "rows": rows}, "."
    )
    assert layers.peers_of([row()]) == "triton_kernels, Marlin, Humming and FlashInfer"
    assert layers.peers_of([row("marlin")]) == "Marlin"

    def scales(*extra: dict[str, Any]) -> str:
        text = layers.layer_block({"meta": META, "rows": [*rows, *extra]}, ".")
        return text.partition("which have ")[2].partition(" (")[0]

    assert scales() == "one scale for each token"
    group = row("humming", 20, activation="fp8_group")
    assert scales(group) == "one scale for each token or for 128 values"
    found = figures.speed_ups([row(activation="mxfp8"), *rows, group])
    assert [each.peer["activation"] for each in found if each.activation == "mxfp8"] == [
        "fp8_group"
    ]

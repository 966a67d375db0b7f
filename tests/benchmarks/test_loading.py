"""The benchmark of loading: every container is read whole, and the table says what was reached."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.models import loading
from mxpert.integrations.checkpoints.load import load_expert_weights
from support.expert_containers import KINDS


def test_a_dry_run_reads_every_container(tmp_path: Path) -> None:
    output = tmp_path / "loading.json"
    assert loading.main(["--dry-run", "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    assert [row["container"] for row in document["rows"]] == list(KINDS)
    assert not document["meta"]["failures"]
    for row in document["rows"]:
        assert min(row["read"], row["load"], row["prepare"], row["bytes"]) > 0
        assert row["peak_over_layer"] >= 1


def test_layers_are_copies_of_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    loading.write_layers(folder, "AWQ", layers=3, sizes=(64, 96))
    loaded = list(load_expert_weights(folder))
    assert [path for path, _ in loaded] == [f"model.layers.{i}.mlp.experts" for i in range(3)]
    first, *others = (weights.state_dict() for _, weights in loaded)
    for other in others:
        assert all(other[name].equal(first[name]) for name in first if name != "_extra_state")


def test_the_goal_is_a_share_of_the_disk_or_a_rate() -> None:
    meta = dict(device="x", date="today", commit="c", versions={}, protocol={})
    meta |= dict(failures={}, left=[])
    row = dict(container="AWQ", weights="int4_g32", bytes=1e6, prepare=1.0, peak_over_layer=1.0)
    rows = [row | dict(read=r, load=v) for r, v in ((1000, 800), (1000, 790), (9000, 2000))]
    assert "2 of 3 containers" in loading.markdown({"meta": meta, "rows": rows})

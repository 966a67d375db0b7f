"""Tuned tables: strict reading, whole writing, the user's rows over the shipped ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mxpert.cli import tune, tune_cells
from mxpert.cli.tune_cells import TARGETS, Cell
from mxpert.configs import Cdna4GemmConfig, HopperGemmConfig
from mxpert.core import files, registry, tables
from mxpert.core.backend import BACKENDS
from mxpert.core.problem import GemmConfig, MoEConfig, MoEProblem, Op, StageConfig
from mxpert.core.registry import explain_problem
from mxpert.formats.tensor import Layout
from support.tables import H200, HEAD, MEASURED, SHAPE, ship_tables_of


def config(block_m: int, **settings: int) -> MoEConfig:
    stage = GemmConfig(block_m, 128, 128, **settings)
    return MoEConfig(block_m, stage, stage)


FIRST, SECOND, THIRD = config(8), config(16), config(32)


def row(num_tokens: int, chosen: MoEConfig, backend: str = "hopper") -> tables.TunedRow:
    return tables.TunedRow("bf16xmxfp4", 4, 2, 64, 64, num_tokens, backend, chosen, **MEASURED)


def problem(
    num_tokens: int, op: Op = Op.FUSED_MOE, unit: int = 0, layout: Layout = Layout.HOPPER_FRAGMENT
) -> MoEProblem:
    whole = Cell("x", SHAPE, num_tokens, "bf16").problem(H200, layout)
    return replace(whole, op=op, routing_block_m=unit)


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The shipped table of a package whose tables lie in a folder of this test."""
    return ship_tables_of(tmp_path, monkeypatch)


SHIPPED = sorted((Path(tables.__file__).parent / "tables").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_table_is_what_would_be_written(path: Path) -> None:
    """So that a new row changes one line: also the order of keys stays."""
    text = path.read_text("utf-8")
    table = tables.read_table(text, path.name)
    assert tables.format_table(table.provenance, [*table.rows, *table.grouped]) == text


def test_user_rows_replace_shipped_rows_one_by_one(shipped: Path) -> None:
    tables.add_rows(shipped, HEAD, [row(4, FIRST), row(16, FIRST), row(4, THIRD, "triton")])
    own = tables.user_table(H200)
    tables.add_rows(own, HEAD, [row(4, SECOND)])
    chosen = [tables.tuned_row(problem(tokens), "hopper") for tokens in (4, 13, 16)]
    assert [each.config for each in chosen] == [SECOND, FIRST, FIRST]
    assert [each.place for each in chosen[:2]] == [f"{own}: rows[0]", "nvidia-h200.json: rows[1]"]
    assert tables.tuned_row(problem(4), "triton").config == THIRD
    assert tables.tuned_row(problem(4), "reference") is None
    assert tables.tuned_row(replace(problem(4), num_experts=5), "hopper") is None


def test_a_row_answers_near_its_own_token_count(shipped: Path) -> None:
    tables.add_rows(shipped, HEAD, [row(4, FIRST), row(16, SECOND)])
    answering = {tokens: tables.tuned_row(problem(tokens), "hopper") for tokens in range(1, 20)}
    assert {tokens: found.num_tokens for tokens, found in answering.items() if found} == {
        4: 4,
        13: 16,
        14: 16,
        15: 16,
        16: 16,
    }


def test_dispatch_takes_the_row_of_the_chosen_backend(shipped: Path) -> None:
    found = registry.kernel_of(BACKENDS["triton"], Op.FUSED_MOE)
    if isinstance(found, str):
        pytest.skip(found)
    rows_by_backend = {}
    for backend, layout in (("hopper", Layout.HOPPER_FRAGMENT), ("triton", Layout.ROW_MAJOR)):
        kernel = registry.kernel_of(BACKENDS[backend], Op.FUSED_MOE)
        config = list(kernel.configs(problem(4, layout=layout)))[1]
        rows_by_backend[backend] = row(4, config, backend)
    tables.add_rows(shipped, HEAD, rows_by_backend.values())
    for backend, layout in (("hopper", Layout.HOPPER_FRAGMENT), ("triton", Layout.ROW_MAJOR)):
        found = explain_problem(problem(4, layout=layout)).resolution
        assert (found.kernel.backend, found.source) == (backend, "table")
        assert found.config == rows_by_backend[backend].config
        assert "nvidia-h200.json: rows[" in str(explain_problem(problem(4, layout=layout)))
    config = rows_by_backend["hopper"].config
    stage = explain_problem(problem(4, Op.MOE_DOWN, config.routing_block_m)).resolution
    assert (stage.source, stage.config) == ("table", config.down)
    assert explain_problem(problem(4, Op.MOE_DOWN, 8)).resolution.source == (
        "table" if 8 % config.down.block_m == 0 else "heuristic"
    )


def test_a_row_of_another_version_is_passed_over(shipped: Path) -> None:
    """Tiles come and go; a table must not stop a layer that ran before."""
    pytest.importorskip("triton")
    kernel = registry.kernel_of(BACKENDS["hopper"], Op.FUSED_MOE)
    chosen = kernel.heuristic(problem(4))
    gone = replace(chosen, down=replace(chosen.down, consumers=7))
    tables.add_rows(shipped, HEAD, [row(4, gone)])
    registry._warn_outdated.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"rows\[0\] names tiles .* run mxpert tune again"):
        found = explain_problem(problem(4)).resolution
    assert (found.source, found.config) == ("heuristic", chosen)
    stage = problem(4, Op.MOE_GATE_UP, chosen.routing_block_m)
    assert explain_problem(stage).resolution.source == "heuristic"


@pytest.mark.parametrize("op", [Op.FUSED_MOE, Op.MOE_DOWN])
@pytest.mark.parametrize(
    ("layout", "pinned", "need"),
    [
        (Layout.HOPPER_FRAGMENT, GemmConfig(8, 64, 128), "a HopperGemmConfig, .* hopper backend"),
        (Layout.ROW_MAJOR, HopperGemmConfig("decode", 8, 5), "a GemmConfig, .* triton backend"),
    ],
    ids=["hopper", "triton"],
)
def test_a_pinned_config_is_of_the_backends_kind(
    op: Op, layout: Layout, pinned: StageConfig, need: str
) -> None:
    pytest.importorskip("triton")
    with (
        registry.override(config=pinned),
        pytest.raises(TypeError, match=f"{op.value}: config — need {need}"),
    ):
        explain_problem(problem(4, op, 16, layout))


def test_no_home_means_no_user_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MXPERT_CACHE_DIR", raising=False)
    assert tables.user_table(H200) == Path.home() / ".cache/mxpert/tables/nvidia-h200.json"
    monkeypatch.setattr(Path, "home", homeless)
    assert tables.user_table(H200) is None


def table(change: Callable[[dict], object] = lambda _: None) -> str:
    """A table of two rows, T = 4 and T = 8, with a change to its document."""
    document = json.loads(tables.format_table(HEAD, [row(4, FIRST), row(8, FIRST)]))
    change(document)
    return json.dumps(document)


def test_a_table_survives_a_round_trip() -> None:
    rows = [row(8, THIRD), row(4, config(16, split_k=2)), row(4, FIRST, "triton")]
    head, read = tables.parse_table(tables.format_table(HEAD, rows), "t")
    assert head == HEAD
    assert [replace(each, place="") for each in read] == sorted(rows, key=lambda each: each.key)


def test_a_missing_setting_takes_its_default() -> None:
    text = table(lambda d: d["rows"][0]["config"]["down"].pop("split_k"))
    assert tables.parse_table(text, "t")[1][0].config == FIRST


@pytest.mark.parametrize(
    "stage",
    [
        GemmConfig(8, 64, 128, split_k=2),
        HopperGemmConfig("decode", 8, 5, hi_lo=True),
        Cdna4GemmConfig("prefill", 8, 256),
        GemmConfig(8, 64, 128, weight_cache="stream"),
        Cdna4GemmConfig("prefill", 8, 256, weight_cache="stream", group_m=2, persistent=True),
    ],
)
def test_a_config_of_either_kind_can_be_read(stage: StageConfig) -> None:
    layer = MoEConfig(8, stage, stage)

    def read(**changes: object) -> object:
        written = asdict(layer)
        written["down"].update(changes)
        return tables._READER.value(MoEConfig, json.loads(json.dumps(written)), "t")

    assert read() == layer
    with pytest.raises(ValueError, match=r"t\.down — need .* unknown \['speed'\]"):
        read(speed=1)
    if isinstance(stage, GemmConfig | Cdna4GemmConfig):
        with pytest.raises(ValueError, match=r"t\.down — .* weight_cache — need .* 'drop'"):
            read(weight_cache="drop")
    if isinstance(stage, HopperGemmConfig):
        with pytest.raises(ValueError, match=r"t\.down — .* kernel — need .* 'dense'"):
            read(kernel="dense")
        with pytest.raises(ValueError, match=r"t\.down\.hi_lo — need true or false, got 1"):
            read(hi_lo=1)


BROKEN: dict[str, tuple[Callable[[dict], object], list[str]]] = {
    "no-commit": (lambda d: d["provenance"].pop("commit"), ["provenance", "commit"]),
    "no-rows": (lambda d: d.update(rows={}), ["t.json: rows", "a list"]),
    "unknown-part": (lambda d: d.update(extra=1), ["extra"]),
    "row-is-no-object": (lambda d: d["rows"].append(3), ["rows[2]", "an object"]),
    "missing-key": (lambda d: d["rows"][1].pop("us"), ["rows[1]", "us"]),
    "unknown-key": (lambda d: d["rows"][1].update(speed=1), ["rows[1]", "speed"]),
    "place-in-the-file": (lambda d: d["rows"][1].update(place="x"), ["rows[1]", "place"]),
    "float-T": (lambda d: d["rows"][0].update(T=4.0), ["rows[0].T", "4.0"]),
    "boolean-E": (lambda d: d["rows"][0].update(E=True), ["rows[0].E", "True"]),
    "negative-time": (lambda d: d["rows"][0].update(us=-1), ["rows[0].us"]),
    "infinite-time": (lambda d: d["rows"][0].update(us=1e999), ["rows[0].us", "inf"]),
    "number-as-note": (lambda d: d["rows"][0].update(note=1), ["rows[0].note"]),
    "unknown-format": (
        lambda d: d["rows"][0].update(formats="fp8xfp8"),
        ["rows[0].formats", "fp8xfp8"],
    ),
    "unknown-source": (lambda d: d["rows"][0].update(source="guess"), ["rows[0].source"]),
    "unknown-setting": (
        lambda d: d["rows"][1]["config"]["down"].update(stages=2),
        ["rows[1].config.down", "stages"],
    ),
    "missing-setting": (
        lambda d: d["rows"][1]["config"]["down"].pop("block_n"),
        ["rows[1].config.down", "block_n"],
    ),
    "unit-not-a-multiple": (
        lambda d: d["rows"][1]["config"].update(routing_block_m=12),
        ["rows[1].config", "routing_block_m", "12"],
    ),
    "two-rows-for-one-key": (lambda d: d["rows"][1].update(T=4), ["rows[1]", "rows[0]"]),
}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param("{", ["need JSON"], id="no-json"),
        pytest.param("[]", ["need an object"], id="list"),
        *(pytest.param(table(change), parts, id=name) for name, (change, parts) in BROKEN.items()),
    ],
)
def test_a_bad_table_names_file_row_and_key(text: str, parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"load_table: .* — need .*, got .*; ") as caught:
        tables.parse_table(text, "t.json")
    for part in ("t.json", *parts):
        assert part in str(caught.value)


def test_a_table_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    tables.add_rows(path, HEAD, [row(4, FIRST)])
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        tables.add_rows(path, HEAD, [row(8, FIRST)])
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_belongs_to_one_device(tmp_path: Path) -> None:
    tables.add_rows(tmp_path / "t.json", HEAD, [row(4, FIRST)])
    with pytest.raises(ValueError, match=r"need NVIDIA B200, got NVIDIA H200"):
        tables.add_rows(tmp_path / "t.json", HEAD | {"device": "NVIDIA B200"}, [row(8, FIRST)])


SHIPPED = sorted((Path(tables.__file__).parent / "tables").glob("*.json"))


def test_shipped_tables_are_valid() -> None:
    pytest.importorskip("triton")
    for path in SHIPPED:
        assert path.stem in TARGETS, f"{path.name}: name the device in tune_cells.TARGETS"
        target = TARGETS[path.stem]
        reasons = [tune.invalid_any(each, target) for each in tables.every_row(path, target.name)]
        assert not any(reasons), "\n".join(reason for reason in reasons if reason)


@pytest.mark.parametrize(
    ("changes", "backend", "part"),
    [
        pytest.param({}, "hopper", None, id="valid"),
        pytest.param({"num_stages": 9}, "hopper", "is no config", id="stages"),
        pytest.param({"consumers": 7}, "hopper", "is no config", id="tile"),
        pytest.param({"hi_lo": False}, "hopper", "is no config", id="hi-lo"),
        pytest.param({}, "triton", "is no config", id="other-backends-tile"),
        pytest.param({}, "cutlass", "override", id="unknown-backend"),
    ],
)
def test_an_invalid_row_is_found(changes: dict, backend: str, part: str | None) -> None:
    pytest.importorskip("triton")
    kernel = registry.kernel_of(BACKENDS["hopper"], Op.FUSED_MOE)
    chosen = kernel.heuristic(problem(1))
    found = tune_cells.invalid_row(
        row(1, replace(chosen, down=replace(chosen.down, **changes)), backend), H200
    )
    assert (found is None) if part is None else part in found

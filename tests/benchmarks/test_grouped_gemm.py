"""The grouped GEMM benchmark: its cells, its gates, its document, and the script on tiny shapes."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import multiprocessing
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mxpert
from benchmarks.grouped import (
    cells,
    ours,
    peers,
    published,
    quantiser,
    training_host,
    training_rows,
)
from benchmarks.grouped import render as grouped_render
from benchmarks.grouped import run as grouped_gemm
from benchmarks.grouped.cells import SHAPES, Operands, Shape, sample
from benchmarks.grouped.rows import SCHEMA
from benchmarks.harness.timing import time_calls
from mxpert.cli.measure import GateError
from tests.benchmarks.comparison_rows import grouped_document as document
from tests.benchmarks.comparison_rows import grouped_row as row
from tests.benchmarks.scripts import dry_run

CPU = torch.device("cpu")
TINY = cells.tiny(SHAPES[0])
RAGGED = Shape(4, 40, 96, 64)


@pytest.fixture(scope="module")
def ragged() -> Operands:
    return Operands.random(RAGGED, "skewed", CPU)


def test_skewed_groups_are_ragged_and_one_is_empty() -> None:
    for shape in SHAPES:
        sizes = cells.group_sizes(shape, "skewed")
        assert len(sizes) == shape.G
        assert sum(sizes) == shape.G * shape.rows
        assert sizes.count(0) == 1
        assert max(sizes) > 2 * min(size for size in sizes if size)
        assert any(size % 8 for size in sizes)


def test_operands_are_the_same_on_every_run(ragged: Operands) -> None:
    again = Operands.random(RAGGED, "skewed", CPU)
    for name in ("x", "weight", "grad", "group_offsets"):
        assert getattr(ragged, name).equal(getattr(again, name))


def test_the_sample_lies_in_its_groups(ragged: Operands) -> None:
    parts = sample(ragged)
    largest = max(range(RAGGED.G), key=lambda group: ragged.sizes[group])
    assert largest in {part.group for part in parts}
    for part in parts:
        assert part.rows.min() == part.start
        assert part.rows.max() == part.end - 1
        assert part.features.max() == RAGGED.N - 1


@pytest.mark.parametrize("mode", list(cells.MODES))
def test_every_variant_passes_its_gate(ragged: Operands, mode: str) -> None:
    mine = ours.Ours(ragged, mode)
    main_grad = torch.zeros(RAGGED.G, RAGGED.N, RAGGED.K)
    variants = [*mine.kernels(main_grad), *mine.layer()]
    assert {(each.op, each.with_quant) for each in variants} == {
        *itertools.product(("forward", "dgrad", "wgrad"), (False, True)),
        ("wgrad_accumulate", False),
        ("backward", True),
        ("forward+backward", True),
    }
    for variant in variants:
        rel_l2, snr_db = ours.check(variant, ragged, sample(ragged))
        assert 25 < snr_db < 40, variant.name
        assert rel_l2 is None or rel_l2 < ours.GATE
    assert set(mine.explain()) == {"forward", "dgrad", "wgrad"}


@pytest.mark.parametrize("op", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize(
    "spoil",
    [lambda y: 1.01 * y, lambda y: y.roll(1, 0), lambda y: torch.full_like(y, math.nan)],
    ids=["scaled", "rows-moved", "nan"],
)
def test_a_wrong_result_is_refused(ragged: Operands, op: str, spoil: Any) -> None:
    mine = ours.Ours(ragged, "exact")
    variant = next(each for each in mine.kernels(torch.zeros(1)) if each.op == op)
    wrong = ours.Variant("mxpert", "exact", op, False, lambda: spoil(variant.call()), variant.exact)
    with pytest.raises(GateError, match=f"mxpert/exact/{op}/kernel: relative L2"):
        ours.check(wrong, ragged, sample(ragged))


def test_a_peer_that_multiplies_something_else_is_refused(ragged: Operands) -> None:
    y = torch.randn(len(ragged.grad), RAGGED.N)
    wrong = ours.Variant("torch", "bf16", "forward", False, lambda: y)
    with pytest.raises(GateError, match="SNR"):
        ours.check(wrong, ragged, sample(ragged))


def test_torch_passes_its_gate(ragged: Operands) -> None:
    made = {name: make for name, make in peers.torch_variants(ragged).items() if "fp8" not in name}
    assert len(made) == 4
    for make in made.values():
        rel_l2, snr_db = ours.check(make(), ragged, sample(ragged))
        assert rel_l2 is None
        assert snr_db > 45


def test_scaled_blocks_keep_the_values() -> None:
    x = torch.randn(300, 200, dtype=torch.bfloat16)
    for rows, columns in ((1, 128), (128, 128), (128, 1), (1, 200)):
        codes, scale = peers.scaled_blocks(x, rows, columns)
        assert codes.shape == x.shape
        wide = scale.repeat_interleave(rows, 0)[:300].repeat_interleave(columns, 1)[:, :200]
        assert mxpert.testing.numerics.sqnr_db(codes.float() * wide, x.double()) > 28


class FakeDeepGemm(ModuleType):
    """The four functions that are called, computed in float64 from what they are given."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")

    @staticmethod
    def values(pair: tuple[torch.Tensor, torch.Tensor], block_rows: int) -> torch.Tensor:
        codes, scale = pair
        wide = scale.repeat_interleave(block_rows, -2)[..., : codes.shape[-2], :]
        return codes.double() * wide.repeat_interleave(128, -1)[..., : codes.shape[-1]]

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: Any, b: Any, out: torch.Tensor, group: torch.Tensor, *, disable_ue8m0_cast: bool
    ) -> None:
        assert disable_ue8m0_cast
        self.m_grouped_bf16_gemm_nt_contiguous(self.values(a, 1), self.values(b, 128), out, group)

    def m_grouped_bf16_gemm_nt_contiguous(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, group: torch.Tensor
    ) -> None:
        for first in range(0, len(a), 128):  # a block belongs to the group of its first row
            block = slice(first, first + 128)
            out[block] = (a[block] @ b[group[first]].T.to(a.dtype)).to(out.dtype)

    def k_grouped_fp8_gemm_nt_contiguous(
        self, a: Any, b: Any, d: torch.Tensor, sizes: list[int], on_device: torch.Tensor, c: Any
    ) -> None:
        assert d is c
        assert on_device.tolist() == sizes
        start = 0
        for group, size in enumerate(sizes):
            end, operands = start + size, []
            for (flat, scale), width in ((a, d.shape[1]), (b, d.shape[2])):
                codes = flat[start * width : end * width].view(width, size)
                operands.append(self.values((codes, scale[:, start // 128 : end // 128]), 1))
            first, second = operands
            d[group] += (first @ second.T).float()
            start += size


@pytest.fixture
def fake_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", FakeDeepGemm())


@pytest.mark.usefixtures("fake_deepgemm")
@pytest.mark.parametrize("balance", cells.BALANCES)
def test_deepgemm_is_given_what_it_asks_for(balance: str) -> None:
    """Against a stand-in that reads its documented layouts: padded groups, scales, transposes."""
    shape = Shape(4, 128, 96, 160)
    data = Operands.random(shape, balance, CPU)
    jobs = {
        (shape, mode, op): peers.Job() for mode, ops in peers.DEEPGEMM_OPS.items() for op in ops
    }
    variants = peers.DeepGemm(data).variants(jobs)
    assert len(variants) == 4
    for name, make in variants.items():
        snr_db = ours.check(make(), data, sample(data))[1]
        assert snr_db > (45 if "bf16" in name else 28), name


@pytest.mark.usefixtures("fake_deepgemm")
def test_what_was_not_compiled_says_why(ragged: Operands) -> None:
    jobs = {(RAGGED, "bf16", "forward"): peers.Job(error="no nvcc")}
    variants = peers.DeepGemm(ragged).variants(jobs)
    with pytest.raises(RuntimeError, match="no nvcc"):
        variants["deepgemm/bf16/forward"]()
    with pytest.raises(RuntimeError, match="was not compiled"):
        variants["deepgemm/fp8_1x128/dgrad"]()


@pytest.mark.usefixtures("fake_deepgemm")
@pytest.mark.parametrize("refuses", [False, True])
def test_the_depth_is_padded_where_the_library_needs_it(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = peers.DeepGemm(Operands.random(Shape(2, 128, 96, 160), "balanced", CPU))
    right = FakeDeepGemm.m_grouped_fp8_gemm_nt_contiguous

    def only_multiples_of_128(self: Any, a: Any, *rest: Any, **options: Any) -> None:
        if refuses and a[0].shape[1] % 128:
            raise RuntimeError("depth")
        right(self, a, *rest, **options)

    monkeypatch.setattr(FakeDeepGemm, "m_grouped_fp8_gemm_nt_contiguous", only_multiples_of_128)
    assert peers.find_padding(library, "fp8_1x128", "forward") is refuses
    padded = library.variant("fp8_1x128", "forward", refuses)
    assert ours.check(padded, library.data, sample(library.data))[1] > 28


def test_quantiser_cases_pass_their_gate_and_see_errors(ragged: Operands) -> None:
    parts = sample(ragged)
    found = list(quantiser.cases(ragged, list(cells.MODES)))
    assert len({case.name for case in found}) == len(found)
    for case in found:
        quantiser.check_case(case, parts)
    dual = found[0]
    assert dual.bytes_ideal == ragged.x.numel() * (2 + 2 * 33 / 32)
    other = mxpert.quantize_dual(ragged.x.roll(1, 0), group_offsets=ragged.group_offsets)
    wrong = quantiser.Case("x", "quantize_dual", "exact", ragged.x, lambda: other)
    with pytest.raises(GateError, match="SNR"):
        quantiser.check_case(wrong, parts)


def test_a_failing_call_leaves_the_others_timed() -> None:
    failures: dict[str, Exception] = {}
    calls = {"bad": lambda: 1 / 0, "good": lambda: None}
    found = time_calls(calls, device=CPU, repeats=1, failures=failures)
    assert set(found) == {"good"}
    assert isinstance(failures["bad"], ZeroDivisionError)


def test_random_groups_are_a_split_of_the_rows() -> None:
    for shape in SHAPES:
        sizes = cells.group_sizes(shape, "random")
        assert len(sizes) == shape.G
        assert sum(sizes) == shape.G * shape.rows
        assert min(sizes) > 0
        assert max(sizes) > 1.2 * min(sizes)
        assert sizes == cells.group_sizes(shape, "random"), "the same on every run"


def test_every_shape_has_the_published_figures() -> None:
    assert len(SHAPES) == len(set(SHAPES)) == 16
    keys = {
        (str(shape), balance, *op)
        for shape in SHAPES
        for balance in ("balanced", "random")
        for op in published.OPS
    }
    assert set(published.PUBLISHED) == keys
    figures = published.PUBLISHED
    assert figures["16x2048-4096-7168", "balanced", "forward", False] == 2178.9
    assert figures["32x4096-2880-2880", "random", "backward", True] == 1204.0
    assert figures["4x2048-2880-2880", "balanced", "wgrad", False] == 1291.8
    assert all(0.1 < rate / published.REFERENCE_PEAK < 0.5 for rate in figures.values())


def test_published_figures_stand_beside_shares_of_each_peak() -> None:
    rows = [row(us=1000.0), row(us=2000.0, op="backward", with_quant=True)]
    found = document(*rows)
    found["meta"]["device"] = "NVIDIA H200"
    text = grouped_render.published_table(found)
    tflops = 2 * 16 * 2048 * 4096 * 7168 / 1e9
    share = f"{tflops:.0f} ({100 * tflops / 1979:.0f} %)"
    assert f"| 16x2048-4096-7168 balanced forward | {share} | 2179 (43 %) |" in text
    assert f"| 16x2048-4096-7168 balanced backward with quantisation | {share} |" in text
    assert "| 16x2048-4096-7168 random wgrad | – | 1745 (35 %) |" in text
    assert text.count("|\n") + 1 >= 2 + 160
    found["meta"]["device"] = "a GPU"
    assert f"| {tflops:.0f} | 2179 (43 %) |" in grouped_render.published_table(found)
    assert "a GPU whose peak is not listed" in grouped_render.published_text(found)


def test_rates_count_real_work() -> None:
    found = row(us=1000.0, op="forward+backward", with_quant=True)
    assert found["tflops"] == pytest.approx(6 * 16 * 2048 * 4096 * 7168 / 1e9)
    assert found["us_spread"] == 1.0


@pytest.fixture
def dry(tmp_path: Path) -> Path:
    path = tmp_path / "grouped.json"
    assert dry_run(grouped_gemm.main, path, "--shapes", "1,5")[0] == 0
    return path


def test_a_dry_run_is_whole_and_renders(dry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = SCHEMA.load(dry)
    modes = list(cells.MODES)
    assert found["meta"]["commit"] == "abc"
    assert {(each["shape"], each["balance"]) for each in found["rows"]} == set(
        itertools.product(map(str, map(cells.tiny, (SHAPES[0], SHAPES[4]))), cells.BALANCES)
    )
    assert len(found["rows"]) == 2 * len(cells.BALANCES) * (9 * len(modes) + 4)
    failed = {each["variant"] for each in found["meta"]["failures"]}
    assert failed == {"torch/fp8_row/forward/kernel"}
    assert set(found["meta"]["kernels"]) == {f"mxpert/{mode}" for mode in modes}
    assert {each["operand"] for each in found["quantiser"]} == {"x", "grad", "weight"}
    assert grouped_render.main([str(dry)]) == 0
    text = dry.with_suffix(".md").read_text()
    assert "| exact / torch bf16 |" in text
    assert "| 32x4096-2880-2880 random backward with quantisation | – |" in text
    assert "absent: no --peers directory" in text
    assert dry.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "skewed / balanced" in capsys.readouterr().out


def test_a_wrong_kernel_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = mxpert.grouped_gemm
    monkeypatch.setattr(mxpert, "grouped_gemm", lambda *args, **rest: 1.1 * right(*args, **rest))
    monkeypatch.setattr(ours.Ours, "explain", lambda self: {})
    cell = ("--shapes", "1", "--balances", "balanced", "--modes", "exact")
    code, found = dry_run(grouped_gemm.main, tmp_path / "x.json", *cell)
    assert code == 1
    SCHEMA.validate(found)
    mine = {(each["op"], each["with_quant"]) for each in found["rows"] if each["impl"] == "mxpert"}
    assert ("forward", False) not in mine
    assert ("wgrad", False) in mine
    assert any("relative L2" in each["error"] for each in found["meta"]["failures"])


def test_after_the_time_limit_nothing_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = dry_run(grouped_gemm.main, tmp_path / "x.json", "--time-limit", "0")
    assert (code, found["rows"]) == (0, [])
    assert "time limit" in capsys.readouterr().out


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    path, kept = tmp_path / "x.json", ("--balances", "balanced", "--modes", "row")
    _, first = dry_run(grouped_gemm.main, path, "--shapes", "1", *kept)
    code, both = dry_run(grouped_gemm.main, path, "--shapes", "1,5", "--resume", *kept)
    assert code == 0
    assert both["rows"][: len(first["rows"])] == first["rows"]
    assert len(both["rows"]) > len(first["rows"])
    assert both["quantiser"][: len(first["quantiser"])] == first["quantiser"]
    assert both["meta"]["ceilings"] == first["meta"]["ceilings"]
    failures = first["meta"]["failures"]  # a kernel that CPUs have not
    assert failures
    assert both["meta"]["failures"][: len(failures)] == failures


def test_a_compiler_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "QUIET_SECONDS", 0.3)
    compiler = peers.Compiler.__new__(peers.Compiler)
    compiler.pool = concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
    calls = {"forward": (bool, 1), "dgrad": (time.sleep, 60)}
    compiler.futures = {
        (TINY, "bf16", op): compiler.pool.submit(*call) for op, call in calls.items()
    }
    compiler.futures[TINY, "bf16", "forward"].result()
    began = time.monotonic()
    jobs = compiler.wait(began + 30)
    assert time.monotonic() - began < 10
    assert jobs[TINY, "bf16", "forward"].pad_depth
    assert jobs[TINY, "bf16", "dgrad"].error == "its compiler was not ready in time"


def test_host_time_counts_launches_of_the_backward_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 runs one grouped GEMM forward and two backward."""
    recipes = {"bf16": training_host.RECIPES["bf16"]}
    monkeypatch.setattr(training_host, "RECIPES", recipes)
    code, found = dry_run(training_host.main, tmp_path / "host.json")
    assert code == 0
    (row,) = found["rows"]
    assert (row["recipe"], row["launches"]) == ("bf16", 3)
    assert row["host_us"] > 0


def test_row_passes_are_timed_beside_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = dry_run(training_rows.main, tmp_path / "rows.json")
    assert (code, len(found["rows"])) == (0, 2 * 5)
    assert all(each["us"] > 0 < each["torch_us"] for each in found["rows"])
    assert "| dsv3 combine backward |" in capsys.readouterr().out

"""A chip is its manifest and what the manifest names; nothing else in the library is edited."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from mxpert import MoEWeights
from mxpert.cli.tune_cells import Cell, choose
from mxpert.core import tables
from mxpert.core.backend import BACKENDS, layouts_for
from mxpert.core.problem import GemmConfig, MoEOptions, MoEProblem, Op, QuantizeProblem, SiLU
from mxpert.core.registry import explain_problem, override, register_backend, resolve
from mxpert.core.stage_configs import MoEConfig
from mxpert.core.support import markdown_table
from mxpert.formats import fold_certificate, tensor
from mxpert.formats.tensor import Layout
from mxpert.modules import requantize_
from mxpert.moe.prepared_weights import fastest_layout
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.toy_chip import BACKEND, FUSED_MOE, LAST_ROW_FIRST, TARGET, ToyGemmConfig

SHAPE = MoEShape(64, 32, num_experts=4, top_k=2)
LANES_8 = MoEConfig(16, ToyGemmConfig(16, 8), ToyGemmConfig(16, 8))


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    register_backend(BACKEND)
    FUSED_MOE.launched.clear()
    yield
    del BACKENDS["toy"], tensor._LAYOUTS["last_row_first"], Layout.LAST_ROW_FIRST
    tables.reload_tables()


def layer(layout: Layout = LAST_ROW_FIRST) -> MoEProblem:
    return MoEProblem(Op.FUSED_MOE, TARGET, 5, 2, 4, 64, 32, MoEOptions(SiLU()), layout)


def inputs(layout: str = "last_row_first") -> tuple[tuple[Any, ...], MoEWeights]:
    made = random_moe_problem(SHAPE, 5)
    prepared = made.weights.prepare(device="cpu", layout=layout)
    return (made.x, prepared, made.topk_weights, made.topk_ids), made.weights


def test_its_target_gets_its_kernel() -> None:
    kernel, config = resolve(layer())
    assert (kernel, config) == (FUSED_MOE, FUSED_MOE.heuristic(layer()))
    shown = str(explain_problem(layer()))
    assert "fused_moe on Toy 1 (toy1)\n  formats: bf16xmxfp4\n  backend: toy" in shown
    assert "lanes=4" in shown
    assert "status:  not tried" in shown


def test_what_it_lacks_is_refused_by_name() -> None:
    with pytest.raises(mxpert.UnsupportedError, match="toy needs weights in LAST_ROW_FIRST"):
        resolve(layer(Layout.ROW_MAJOR))
    problem = QuantizeProblem(
        Op.QUANTIZE, TARGET, (1, 32), -1, torch.float32, tensor.get_format("mxfp4")
    )
    refused = pytest.raises(mxpert.UnsupportedError, match="'toy', which has no quantize")
    with refused, override(backend="toy"):
        resolve(problem)


def test_the_op_runs_on_it() -> None:
    call, plain = inputs()
    with override(backend="toy"):
        why = mxpert.explain(mxpert.fused_moe, *call, activation="silu")
        y = mxpert.fused_moe(*call, activation="silu")
    assert why.resolution.kernel.backend == "toy"
    assert FUSED_MOE.launched == [why.resolution.config]
    wanted = mxpert.fused_moe(call[0], plain, *call[2:], activation="silu")
    assert torch.equal(y, wanted)


def test_a_config_of_its_own_is_pinned_and_others_are_refused() -> None:
    call, _ = inputs()
    with override(backend="toy", config=LANES_8):
        mxpert.fused_moe(*call, activation="silu")
    assert FUSED_MOE.launched == [LANES_8]
    tile = GemmConfig(16, 64, 128)
    refused = pytest.raises(TypeError, match="a ToyGemmConfig, which the toy backend takes")
    with refused, override(backend="toy", config=tile):
        mxpert.fused_moe(*call, activation="silu")


def test_weights_take_its_layout(tmp_path: Path) -> None:
    (_, prepared, *_), plain = inputs()
    assert prepared.layout is Layout.LAST_ROW_FIRST is Layout("last_row_first")
    assert prepared.gate_up_order is mxpert.GateUpOrder.INTERLEAVED
    back = prepared.unprepare()
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(getattr(back, name).qdata, getattr(plain, name).qdata)
        assert torch.equal(getattr(back, name).scale, getattr(plain, name).scale)
    prepared.save(tmp_path / "layer")
    torch.save(prepared, tmp_path / "pickled")
    for loaded in (MoEWeights.load(tmp_path / "layer"), torch.load(tmp_path / "pickled")):
        assert loaded.layout is LAST_ROW_FIRST
        assert torch.equal(loaded.down_proj.qdata, prepared.down_proj.qdata)


def test_prepare_chooses_its_layout_where_it_holds_the_weights() -> None:
    _, plain = inputs()
    certificate = fold_certificate(plain.down_proj)
    assert layouts_for("toy1") == (LAST_ROW_FIRST, Layout.ROW_MAJOR)
    assert fastest_layout("toy1", [certificate]) is LAST_ROW_FIRST
    zero = mxpert.MXTensor(plain.down_proj.qdata, torch.zeros_like(plain.down_proj.scale), "mxfp4")
    assert fastest_layout("toy1", [fold_certificate(zero)]) is Layout.ROW_MAJOR


def test_new_weights_are_written_into_its_layout() -> None:
    weights = inputs()[1].prepare(device="cpu", layout="last_row_first")
    dense = torch.randn(4, 64, 64), torch.randn(4, 64, 32)
    requantize_(weights, *dense)
    order = weights.source_order
    wanted = mxpert.quantize_weights(*dense, gate_up_order=order)
    assert torch.equal(weights.unprepare().gate_up_proj.qdata, wanted.gate_up_proj.qdata)
    tiny = dense[0] * 2.0**-126, dense[1]
    with pytest.raises(ValueError, match=r"need rows above 2\^-127, as the prepared layout"):
        requantize_(weights, *tiny)


def test_tuned_tables_hold_its_configs_and_tune_tries_them() -> None:
    choice = choose(Cell("toy", SHAPE, 5, "bf16"), TARGET, layouts_for("toy1"), None)
    assert choice.configs() == list(FUSED_MOE.configs(layer()))
    text = {
        "routing_block_m": 16,
        **{name: {"block_m": 16, "lanes": 8} for name in ("gate_up", "down")},
    }
    assert tables._READER.value(MoEConfig, text, "a row") == LANES_8


def test_the_table_of_gpus_has_its_row() -> None:
    assert "| Toy 1 | `toy1` | `toy` | not tried |" in markdown_table()


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="register_backend: name — need a new name, got 'toy'"):
        register_backend(BACKEND)


def imported(code: str) -> set[str]:
    """Modules of mxpert that a process has imported after `code`."""
    show = "import sys; print(*[m for m in sys.modules if m.startswith('mxpert.')])"
    command = [sys.executable, "-c", f"import torch, mxpert\n{code}\n{show}"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_a_first_quantize_imports_no_other_kernels() -> None:
    added = imported('mxpert.quantize(torch.zeros(4, 64), "mxfp4")') - imported("")
    assert added == {"mxpert.quantize.reference"}


@pytest.mark.parametrize("backend", ["cdna4", "hopper", "reference", "triton"])
def test_every_kernel_of_a_manifest_is_there(backend: str) -> None:
    manifest = BACKENDS[backend]
    for op in manifest.kernels:
        kernel = manifest.load(op)
        assert (kernel.op, kernel.backend) == (op, backend)

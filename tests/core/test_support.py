"""The table of GPUs: which row a device has, and that pages and messages say the same."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mxpert
from mxpert import SiLU
from mxpert.cli.doctor.operations import problem_name, small_problems
from mxpert.core import registry
from mxpert.core.backend import Status
from mxpert.core.problem import MoEOptions, MoEProblem, Op, Target
from mxpert.core.registry import explain_problem, resolve
from mxpert.core.support import markdown_table, remedy_of, rows, support_of
from mxpert.core.target import detect_target
from mxpert.errors import PerformanceWarning
from mxpert.formats.tensor import Layout
from support.devices import DEVICES, MMA_SYNC
from support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


def nvidia(arch: str, name: str) -> Target:
    return Target("cuda", arch, name, 100, 100 * 1024)


@pytest.mark.parametrize(
    "target, status",
    [
        (nvidia("sm_90", "NVIDIA H200"), Status.MEASURED),
        (nvidia("sm_90", "NVIDIA H200 NVL"), Status.MEASURED),
        (nvidia("sm_90", "NVIDIA H100 80GB HBM3"), Status.MEASURED),
        (nvidia("sm_90", "NVIDIA H100 PCIe"), Status.SAME_BINARIES),
        (nvidia("sm_90", "NVIDIA GH200 480GB"), Status.SAME_BINARIES),
        (nvidia("sm_90", "NVIDIA H20"), Status.SAME_BINARIES),
        (nvidia("sm_90", "NVIDIA H800"), Status.SAME_BINARIES),
        (nvidia("sm_100", "NVIDIA B200"), Status.COMPILED),
        (nvidia("sm_103", "NVIDIA B300"), Status.COMPILED),
        (nvidia("sm_120", "NVIDIA GeForce RTX 5090"), Status.COMPILED),
        (nvidia("sm_80", "NVIDIA A100-SXM4-80GB"), Status.COMPILED),
        (nvidia("sm_86", "NVIDIA GeForce RTX 3090"), Status.COMPILED),
        (nvidia("sm_89", "NVIDIA L40S"), Status.COMPILED),
        (nvidia("sm_87", "Orin"), Status.NOT_TRIED),
        (nvidia("sm_121", "NVIDIA GB10"), Status.NOT_TRIED),
        (nvidia("sm_75", "Tesla T4"), Status.REFERENCE),
        (DEVICES["gfx950"], Status.EMULATED),
        (DEVICES["gfx942"], Status.REFERENCE),
        (Target("hip", "gfx90a", "AMD Instinct MI250X", 104, 65536), Status.REFERENCE),
        (Target("cpu", "cpu", "x86_64", 8, 0), Status.REFERENCE),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_each_device_has_its_row(target: Target, status: Status) -> None:
    assert support_of(target).status is status


def layer(target: Target, layout: Layout = Layout.ROW_MAJOR) -> MoEProblem:
    return MoEProblem(
        Op.FUSED_MOE, target, 16, 4, 32, 512, 512, MoEOptions(SiLU(), "mxfp8"), layout
    )


OWN = {"sm_90": Layout.HOPPER_FRAGMENT, "gfx950": Layout.CDNA4_FRAGMENT}
"""Architectures whose fastest kernels read a layout of their own."""


@pytest.mark.filterwarnings("ignore::mxpert.PerformanceWarning")
@pytest.mark.parametrize("arch", DEVICES)
def test_the_table_names_the_backend_that_serves(arch: str) -> None:
    """The kernels of a row are what `resolve` takes for a layer."""
    kernel, _ = resolve(layer(DEVICES[arch], OWN.get(arch, Layout.ROW_MAJOR)))
    assert kernel.backend == support_of(DEVICES[arch]).kernels


@pytest.mark.parametrize("arch", MMA_SYNC)
def test_portable_kernels_serve_every_op(arch: str) -> None:
    """No operation of these chips is left to torch."""
    problems = small_problems(DEVICES[arch])
    served = {problem_name(problem): resolve(problem)[0].backend for problem in problems}
    assert served == dict.fromkeys(served, "triton")
    assert {"quantize", "fused_moe a8w4", "grouped_gemm", "quantize_dual"} <= set(served)


@pytest.mark.parametrize("arch", DEVICES)
def test_explain_says_the_status(arch: str) -> None:
    shown = str(explain_problem(layer(DEVICES[arch], OWN.get(arch, Layout.ROW_MAJOR))))
    assert f"  status:  {support_of(DEVICES[arch]).status.value}" in shown.splitlines()


def test_explain_of_the_reference_never_says_measured() -> None:
    wide = replace(layer(DEVICES["sm_90"]), options=MoEOptions(SiLU(), out_dtype=torch.float64))
    explanation = explain_problem(wide)
    assert explanation.resolution.kernel.backend == "reference"
    assert explanation.status == "torch reference, slow"


def test_explain_on_a_cpu_says_why_nothing_faster_was_taken() -> None:
    problem = layer(detect_target("cpu"))
    rejected = dict(explain_problem(problem).rejected)
    assert rejected["hopper"] == "needs sm_90, not cpu"
    assert rejected["cdna4"] == "needs gfx950, not cpu"
    assert "TRITON_INTERPRET=1" in rejected["triton"]
    with mxpert.override(backend="reference"):
        assert explain_problem(problem).rejected == (), "nothing else was asked for"


@pytest.mark.parametrize(
    "target", [DEVICES["gfx942"], nvidia("sm_75", "Tesla T4")], ids=lambda target: target.arch
)
def test_a_slow_gpu_is_told_with_the_remedy(target: Target) -> None:
    registry._warn_slower.cache_clear()
    with pytest.warns(PerformanceWarning) as caught:
        resolve(layer(target))
    registry._warn_slower.cache_clear()
    assert remedy_of(target)
    assert remedy_of(target) in str(caught[0].message)
    assert "docs/supported-gpus.md" in str(caught[0].message)


@pytest.mark.parametrize("arch", [name for name in DEVICES if name != "gfx942"])
def test_served_gpus_are_not_warned(arch: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        resolve(layer(DEVICES[arch], OWN.get(arch, Layout.ROW_MAJOR)))


def slow_requests() -> dict[str, MoEProblem]:
    """Requests that the portable kernels refuse on a chip that they serve."""
    fine = layer(DEVICES["sm_80"])
    return {
        "float64": replace(fine, options=MoEOptions(SiLU(), out_dtype=torch.float64)),
        "row block": replace(fine, op=Op.MOE_DOWN, routing_block_m=24),
    }


@pytest.mark.parametrize("name", slow_requests())
def test_each_refusal_names_its_remedy(name: str) -> None:
    slower = explain_problem(slow_requests()[name]).resolution.slower
    assert slower.startswith("runs on the reference backend: ")
    assert any(remedy in slower for remedy in ("; pass one as out_dtype", "; make the plan with"))


def test_pages_have_this_table() -> None:
    """Run `python docs/_gpus.py` after a change of the table."""
    script = load_script("docs/_gpus.py")
    found = list(script.pages())
    assert ROOT / "docs" / "supported-gpus.md" in found
    for page in found:
        text = page.read_text(encoding="utf-8")
        assert markdown_table() in text, f"{page.name}: python docs/_gpus.py"
        assert script.with_table(text) == text


def test_an_outdated_page_is_written_anew() -> None:
    script = load_script("docs/_gpus.py")
    old = f"before\n{script.BEGIN}\n| H200 | nothing |\n{script.END}\nafter\n"
    assert script.with_table(old) == (
        f"before\n{script.BEGIN}\n\n{markdown_table()}\n{script.END}\nafter\n"
    )


def test_every_row_is_in_the_table() -> None:
    lines = markdown_table().splitlines()
    assert len(lines) == 2 + len(rows()) + 2
    for row in rows():
        assert any(row.gpus in line and row.status.value in line for line in lines)

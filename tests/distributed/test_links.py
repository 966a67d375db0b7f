"""Links between GPUs: which transport AUTO takes, and why the others cannot run."""

from __future__ import annotations

import io
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from mxpert.cli.doctor import command, findings
from mxpert.core.problem import Target
from mxpert.core.target import detect_target
from mxpert.distributed import links
from mxpert.distributed.links import (
    Links,
    RankPlace,
    collective_refusal,
    find_links,
    group_refusal,
    kernel_refusal,
    symmetric_refusal,
    transports,
)

HOST = Links(
    kind="cuda",
    num_gpus=8,
    num_host_gpus=8,
    nvlink_gbs=478.116,
    multicast=False,
    symmetric_memory=True,
    backends=("nccl", "gloo"),
)
NVLINK_STATUS = """GPU 0: NVIDIA H200 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
"""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({}, None, id="eight-gpus"),
        pytest.param({"multicast": None, "nvlink_gbs": 0.0}, None, id="pcie-with-peer-access"),
        pytest.param({"num_gpus": 0}, "there is no GPU", id="no-gpu"),
        pytest.param({"symmetric_memory": False}, "no symmetric memory", id="old-torch"),
        pytest.param({"num_gpus": 1}, "one GPU of 8; make all GPUs", id="one-visible"),
        pytest.param({"num_gpus": 1, "num_host_gpus": 1}, "sees one GPU;", id="one"),
        pytest.param({"num_gpus": 1, "num_host_gpus": None}, "sees one GPU;", id="one-unknown"),
        pytest.param({"unreachable": ((0, 3), (3, 0))}, "from GPU 0 to GPU 3", id="no-peer-access"),
    ],
)
def test_why_symmetric_cannot_run(changes: dict, reason: str | None) -> None:
    found = symmetric_refusal(replace(HOST, **changes))
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert reason in found


@pytest.mark.parametrize("value, runs", [("1", True), ("0", False)])
def test_ranks_share_a_gpu_if_torch_allows_it(
    monkeypatch: pytest.MonkeyPatch, value: str, runs: bool
) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", value)
    assert (symmetric_refusal(replace(HOST, num_gpus=1)) is None) is runs


def test_auto_takes_symmetric_then_gather_then_nothing() -> None:
    def states(found: Links) -> dict[str, tuple[bool, bool]]:
        return {each.name: (each.refusal is None, each.is_auto) for each in transports(found)}

    usable, taken = (True, False), (True, True)
    assert states(HOST) == {"SYMMETRIC": taken, "GATHER": usable, "ALL_TO_ALL": usable}
    assert states(Links(backends=("gloo",))) == {
        "SYMMETRIC": (False, False),
        "GATHER": taken,
        "ALL_TO_ALL": usable,
    }
    assert not any(any(state) for state in states(Links()).values())
    (symmetric, gather, _) = transports(HOST, "needs sm_90 or gfx950")
    assert (symmetric.refusal, gather.is_auto) == ("needs sm_90 or gfx950", True)
    assert collective_refusal(Links()) == "this torch has no backend for torch.distributed"
    for state in (*transports(HOST), *transports(Links())):
        assert bool(state.refusal) != bool(state.note), "a reason for each, and one alone"


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        pytest.param([RankPlace("a"), RankPlace("a")], None, id="one-host"),
        pytest.param([RankPlace("a"), RankPlace("b")], "2 hosts; it needs one", id="two-hosts"),
        pytest.param(
            [RankPlace("a"), RankPlace("a", "there is no GPU")],
            "rank 1: there is no GPU",
            id="refused-there",
        ),
    ],
)
def test_why_a_group_cannot_use_symmetric(places: list[RankPlace], reason: str | None) -> None:
    found = group_refusal(places)
    assert found is None if reason is None else reason in (found or "")


def test_kernels_need_a_device_that_they_were_written_for() -> None:
    pytest.importorskip("triton")
    assert kernel_refusal(Target("cuda", "sm_90", "NVIDIA H200", 132, 232448)) is None
    assert kernel_refusal(detect_target("cpu"))


def test_links_of_a_host_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch and nvidia-smi answer as on a host whose second GPU is not reachable."""

    def run(command: tuple[str, ...], **options: object) -> SimpleNamespace:
        gpus = "".join(f"GPU {index}: NVIDIA H200 (UUID: GPU-{index})\n" for index in range(4))
        return SimpleNamespace(stdout=gpus if "--list-gpus" in command else NVLINK_STATUS)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: 1 not in (a, b))
    monkeypatch.setattr(links, "_has_multicast", lambda: False)
    found = find_links()
    assert (found.num_gpus, found.num_host_gpus, found.nvlink_gbs) == (3, 4, 2 * 26.562)
    assert found.unreachable == ((0, 1), (1, 0), (1, 2), (2, 1))
    assert "gloo" in found.backends
    pair = links.visible_links([0, 2, 0, 7])
    assert pair.unreachable == (), "other GPUs do not matter to these two"
    assert (pair.num_gpus, pair.nvlink_gbs) == (3, None)


def test_a_driver_that_does_not_answer_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: object, **options: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", run)
    assert links._nvlink_gbs() is None
    assert links._host_gpus() is None


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        pytest.param({}, ["NVLink, 478 GB/s a direction", "SYMMETRIC AUTO", "off"], id="nvlink"),
        pytest.param({"nvlink_gbs": 0.0}, ["no NVLink"], id="no-nvlink"),
        pytest.param({"nvlink_gbs": None}, ["unknown"], id="unknown"),
        pytest.param(
            {"num_gpus": 1},
            ["one GPU", "7 more on this host are hidden", "SYMMETRIC cannot run", "GATHER AUTO"],
            id="one-visible",
        ),
        pytest.param(
            {"unreachable": ((0, 1),)}, ["no peer access in 1 of 56 directions"], id="no-access"
        ),
        pytest.param({"num_gpus": 0}, ["no GPU", "GATHER AUTO"], id="no-gpu"),
    ],
)
def test_doctor_says_what_the_links_are(changes: dict, parts: list[str]) -> None:
    text = io.StringIO()
    found = replace(HOST, **changes)
    examined = findings.examine_links(found, transports(found))
    command._print_findings(Console(width=200, file=text), examined)
    printed = " ".join(text.getvalue().split())
    for part in parts:
        assert part in printed
    assert all(finding.state != findings.BROKEN for finding in examined)

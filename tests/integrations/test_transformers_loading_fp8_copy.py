"""from_pretrained(…, keep_fp8=True): copies whatever the checkpoint holds, or one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mxpert.distributed import ExpertParallel
from mxpert.formats.tensor import Layout
from mxpert.integrations.models.convert import mx_experts
from support.devices import prepared_for
from support.expert_containers import EXACT_NVFP4, store_experts
from tests.integrations.families import EXPERTS, build
from tests.integrations.test_transformers_loading import load

CONTAINER, CAST, NVFP4 = "compressed-tensors mxfp4-pack-quantized", "ModelOpt NVFP4", "exact NVFP4"
KINDS = ("dense", "mxfp4", CONTAINER, CAST)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same experts in bf16, as gpt-oss stores MXFP4, and in containers."""
    root = tmp_path_factory.mktemp("stored")
    made = {"dense": root / "dense", "mxfp4": root / "mxfp4"}
    build("qwen3_moe", dtype=torch.bfloat16).save_pretrained(made["dense"])
    load(made["dense"]).save_pretrained(made["mxfp4"])
    for index, kind in enumerate((CONTAINER, CAST)):
        made[kind] = store_experts(made["dense"], root / str(index), kind)
    made[NVFP4] = store_experts(made["dense"], root / "exact", EXACT_NVFP4[CAST])
    return made


@pytest.fixture
def hopper() -> Iterator[None]:
    with prepared_for("sm_90"):
        yield


def ranks() -> ExpertParallel:
    model = build("qwen3_moe").config
    sizes = dict(hidden_size=model.hidden_size, top_k=model.num_experts_per_tok)
    return ExpertParallel(num_experts=EXPERTS, max_tokens=32, **sizes)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_parallel", [False, True], ids=["one", "ranks"])
def test_every_checkpoint_gets_copies(kind: str, is_parallel: bool, stored: Any) -> None:
    options = {"expert_parallel": ranks()} if is_parallel else {}
    for keep_fp8, layout in ((True, Layout.HOPPER_FRAGMENT_FP8), (False, Layout.HOPPER_FRAGMENT)):
        model = load(stored[kind], "mxpert_a8w4", keep_fp8=keep_fp8, **options)
        assert [experts.weights.layout for experts in mx_experts(model)] == [layout] * 2


@pytest.mark.usefixtures("hopper")
def test_what_has_no_copy_is_refused(stored: Any) -> None:
    said = r"^prepare: keep_fp8 — need False for other formats than MXFP4, got nvfp4; omit it$"
    with pytest.raises(ValueError, match=said):
        load(stored[NVFP4], "mxpert_a8w4", keep_fp8=True)
    for kind in KINDS:
        said = r"^from_pretrained: keep_fp8 — need activations in 8 or 4 bits.* got 'bf16'; choose"
        with pytest.raises(ValueError, match=said):
            load(stored[kind], "mxpert", keep_fp8=True)


@pytest.mark.parametrize("kind", KINDS)
def test_other_devices_are_refused(kind: str, stored: Any) -> None:
    with pytest.raises(ValueError, match=r"^prepare: keep_fp8 — .* got ROW_MAJOR on cpu; 0 blocks"):
        load(stored[kind], "mxpert_a8w4", keep_fp8=True)


def test_the_option_is_one_of_mxpert_alone(stored: Any) -> None:
    with pytest.raises(ValueError, match=r"^from_pretrained: keep_fp8 — need experts_implementati"):
        load(stored["dense"], "eager", keep_fp8=True)
    assert load(stored["dense"], "eager", keep_fp8=False) is not None
    with pytest.raises(TypeError, match=r"^from_pretrained: keep_fp8 — need a bool, got 'yes'"):
        load(stored["dense"], "mxpert_a8w4", keep_fp8="yes")

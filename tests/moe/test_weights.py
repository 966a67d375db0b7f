"""MoEWeights: what construction refuses; prepare and unprepare are inverse, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

import mxpert
from mxpert import GateUpOrder, MoEWeights
from mxpert.core.geometry import parts_of
from mxpert.core.target import on_device
from mxpert.formats import (
    FORMATS,
    MXTensor,
    dequantize_blocks,
    fold_certificate,
    pack_codes,
    unpack_codes,
)
from mxpert.formats.tensor import Layout
from mxpert.moe.hopper.layout import HOPPER_FRAGMENT
from mxpert.moe.weights import gate_up_rows
from support.devices import DEVICES
from support.poison import poison_weights

MXFP4, MXFP8 = FORMATS["mxfp4"], FORMATS["mxfp8_e4m3"]
E, H, F = 3, 96, 160
FRAGMENT = Layout.HOPPER_FRAGMENT

orders = pytest.mark.parametrize("order", GateUpOrder, ids=lambda o: o.value)
biased = pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])


def projection(*shape: int, seed: int = 0, spread: int = 15) -> MXTensor:
    generator = torch.Generator().manual_seed(seed)
    *leading, depth = shape
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    scale = 127 - torch.randint(0, spread, (*leading, depth // 32), generator=generator)
    return MXTensor(pack_codes(codes), scale.to(torch.uint8), MXFP4)


def make_weights(
    order: GateUpOrder = GateUpOrder.CONCATENATED, *, bias: bool = False, spread: int = 15
) -> MoEWeights:
    generator = torch.Generator().manual_seed(9)
    gate_up_bias = torch.randn(E, 2 * F, generator=generator) if bias else None
    down_bias = torch.randn(E, H, generator=generator) if bias else None
    return MoEWeights(
        projection(E, 2 * F, H, seed=1, spread=spread),
        projection(E, H, F, seed=2, spread=spread),
        gate_up_bias,
        down_bias,
        order,
    )


def assert_identical(a: MoEWeights, b: MoEWeights) -> None:
    for name in ("gate_up_proj", "down_proj"):
        left, right = getattr(a, name), getattr(b, name)
        assert torch.equal(left.qdata, right.qdata), name
        assert torch.equal(left.scale, right.scale), name
        assert (left.layout, left.shape, left.format) == (right.layout, right.shape, right.format)
    for name in ("gate_up_bias", "down_bias"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name
    assert a.gate_up_order is b.gate_up_order


# --- construction -------------------------------------------------------------------------------


def mxfp8_projection(*shape: int) -> MXTensor:
    return MXTensor(
        torch.zeros(shape, dtype=torch.uint8),
        torch.zeros(*shape[:-1], shape[-1] // 32, dtype=torch.uint8),
        MXFP8,
    )


REFUSED: dict[str, tuple[dict[str, Callable[[], Any]], type[Exception], str]] = {
    "no_order": (
        {"gate_up_order": lambda: None},
        TypeError,
        r"gate_up_order — need a GateUpOrder .*, got None; gpt-oss checkpoints",
    ),
    "order_as_string": (
        {"gate_up_order": lambda: "gate_first"},
        ValueError,
        r"gate_up_order — need a GateUpOrder \('concatenated', .*, got 'gate_first'",
    ),
    "plain_tensor": (
        {"down_proj": lambda: torch.zeros(E, H, F)},
        TypeError,
        "down_proj — need an MXTensor or a WeightTensor, got a float32 .*quantize_weights takes",
    ),
    "format": (
        {"gate_up_proj": lambda: mxfp8_projection(E, 2 * F, H)},
        ValueError,
        r"down_proj\.format — need mxfp8_e4m3, as gate_up_proj has, got mxfp4",
    ),
    "dimensions": (
        {"down_proj": lambda: projection(H, F)},
        ValueError,
        r"down_proj\.shape — need three dimensions \[E, N, K\], got \[96, 160\]",
    ),
    "axis": (
        {
            "down_proj": lambda: MXTensor(
                torch.zeros(E, H // 2, F, dtype=torch.uint8),
                torch.zeros(E, H // 32, F, dtype=torch.uint8),
                MXFP4,
                -2,
            )
        },
        ValueError,
        r"down_proj\.axis — need -1, got -2; quantise along the last axis",
    ),
    "experts": (
        {"gate_up_proj": lambda: projection(E + 1, 2 * F, H)},
        ValueError,
        r"gate_up_proj\.shape — need \[E, 2F, H\] = \[3, 320, 96\], got \[4, 320, 96\]",
    ),
    "one_half": (
        {"gate_up_proj": lambda: projection(E, F, H)},
        ValueError,
        r"gate_up_proj\.shape — .* got \[3, 160, 96\]; down_proj \[E, H, F\] is",
    ),
    "hidden": (
        {"down_proj": lambda: projection(E, 64, F)},
        ValueError,
        r"gate_up_proj\.shape — need \[E, 2F, H\] = \[3, 320, 64\]",
    ),
    "device": (
        {
            "down_proj": lambda: MXTensor(
                torch.empty(E, H, F // 2, dtype=torch.uint8, device="meta"),
                torch.empty(E, H, F // 32, dtype=torch.uint8, device="meta"),
                MXFP4,
            )
        },
        ValueError,
        r"down_proj\.device — need cpu, got meta",
    ),
    "bias_dtype": (
        {"gate_up_bias": lambda: torch.zeros(E, 2 * F, dtype=torch.bfloat16)},
        TypeError,
        r"gate_up_bias\.dtype — need float32, got bfloat16",
    ),
    "bias_shape": (
        {"down_bias": lambda: torch.zeros(E, F)},
        ValueError,
        r"down_bias\.shape — need \[3, 96\], got \[3, 160\]",
    ),
    "bias_strides": (
        {"down_bias": lambda: torch.zeros(H, E).T},
        ValueError,
        r"down_bias — need a contiguous tensor",
    ),
    "bias_device": (
        {"down_bias": lambda: torch.zeros(E, H, device="meta")},
        ValueError,
        r"down_bias\.device — need cpu, got meta",
    ),
    "bias_type": (
        {"gate_up_bias": lambda: [0.0]},
        TypeError,
        r"gate_up_bias — need a torch\.Tensor, got list",
    ),
    "mixed_layouts": (
        {"down_proj": lambda: HOPPER_FRAGMENT.pack(projection(E, H, F))},
        ValueError,
        r"down_proj\.layout — need Layout\.ROW_MAJOR, got Layout\.HOPPER_FRAGMENT",
    ),
    "packed_order": (
        {
            "gate_up_proj": lambda: HOPPER_FRAGMENT.pack(projection(E, 2 * F, H)),
            "down_proj": lambda: HOPPER_FRAGMENT.pack(projection(E, H, F)),
        },
        ValueError,
        r"gate_up_order — need GateUpOrder\.INTERLEAVED .*call prepare",
    ),
}


@pytest.mark.parametrize("changes, error, text", REFUSED.values(), ids=REFUSED)
def test_construction_refuses(
    changes: dict[str, Callable[[], Any]], error: type[Exception], text: str
) -> None:
    arguments: dict[str, Any] = dict(
        gate_up_proj=projection(E, 2 * F, H),
        down_proj=projection(E, H, F),
        gate_up_order=GateUpOrder.CONCATENATED,
    )
    MoEWeights(**arguments)
    with pytest.raises(error, match="MoEWeights: " + text):
        MoEWeights(**arguments | {name: make() for name, make in changes.items()})


@orders
def test_gate_and_up_rows(order: GateUpOrder) -> None:
    gate, up = gate_up_rows(order, F)
    written = {
        GateUpOrder.CONCATENATED: lambda j: j,
        GateUpOrder.INTERLEAVED: lambda j: 2 * j,
        GateUpOrder.INTERLEAVED_16: lambda j: j // 16 * 32 + j % 16,
    }[order]
    distance = {
        GateUpOrder.CONCATENATED: F,
        GateUpOrder.INTERLEAVED: 1,
        GateUpOrder.INTERLEAVED_16: 16,
    }[order]
    assert gate.tolist() == [written(j) for j in range(F)]
    assert (up - gate).unique().tolist() == [distance]
    assert sorted([*gate.tolist(), *up.tolist()]) == list(range(2 * F))


# --- prepare and unprepare ----------------------------------------------------------------------


@biased
@orders
def test_unprepare_inverts_prepare(order: GateUpOrder, bias: bool) -> None:
    weights = make_weights(order, bias=bias)
    prepared = weights.prepare(device="cpu", layout=FRAGMENT)
    assert prepared.layout is prepared.down_proj.layout is FRAGMENT
    assert prepared.gate_up_order is GateUpOrder.INTERLEAVED
    assert prepared.source_order is order
    assert (prepared.num_experts, prepared.hidden_size, prepared.intermediate_size) == (E, H, F)
    back = prepared.unprepare()
    assert_identical(back, weights)
    assert back.fold_certificates is None
    assert back.source_order is None
    assert_identical(back.prepare(device="cpu", layout=FRAGMENT).unprepare(), weights)


@orders
def test_prepared_rows_alternate_gate_and_up(order: GateUpOrder) -> None:
    """Stored row 2j is the gate of feature j, row 2j + 1 its up; the bias goes along."""
    weights = make_weights(order, bias=True)
    prepared = weights.prepare(device="cpu", layout=FRAGMENT)
    as_stored = replace(prepared, source_order=GateUpOrder.INTERLEAVED).unprepare()
    values, source = (dequantize_blocks(w.gate_up_proj) for w in (as_stored, weights))
    gate, up = gate_up_rows(order, F)
    assert torch.equal(values[:, 0::2], source[:, gate])
    assert torch.equal(values[:, 1::2], source[:, up])
    assert prepared.gate_up_bias is not None
    assert weights.gate_up_bias is not None
    assert torch.equal(prepared.gate_up_bias[:, 0::2], weights.gate_up_bias[:, gate])
    assert torch.equal(prepared.gate_up_bias[:, 1::2], weights.gate_up_bias[:, up])


def test_certificates_are_attached() -> None:
    weights = make_weights()
    for layout in (None, FRAGMENT):
        prepared = weights.prepare(device="cpu", layout=layout)
        assert prepared.fold_certificates is not None
        for certificate, source in zip(
            prepared.fold_certificates, (weights.gate_up_proj, weights.down_proj), strict=True
        ):
            expected = fold_certificate(source)
            assert certificate.exact
            assert torch.equal(certificate.reference, expected.reference)
            assert certificate.num_blocks == expected.num_blocks
        assert prepared.unprepare().fold_certificates is None


@pytest.mark.parametrize(
    "layout",
    [each for each in Layout if not each.name.startswith("HOPPER_GROUPS")],
    ids=lambda v: v.value,
)
def test_strided_views_prepare_like_dense_weights(layout: Layout) -> None:
    """What lies around a view is NaN: it must show up nowhere."""
    weights = make_weights(bias=True)
    views = poison_weights(weights)
    assert not views.gate_up_proj.qdata.is_contiguous()
    prepared, expected = (w.prepare(device="cpu", layout=layout) for w in (views, weights))
    assert_identical(prepared, expected)
    assert prepared.gate_up_proj.qdata.is_contiguous()
    assert_identical(prepared.unprepare(), weights)


def test_prepare_leaves_its_argument_alone() -> None:
    weights = make_weights(GateUpOrder.INTERLEAVED_16, bias=True)
    before = MoEWeights(
        *(
            MXTensor(p.qdata.clone(), p.scale.clone(), MXFP4)
            for p in (weights.gate_up_proj, weights.down_proj)
        ),
        weights.gate_up_bias.clone(),
        weights.down_bias.clone(),
        GateUpOrder.INTERLEAVED_16,
    )
    weights.prepare(device="cpu", layout=FRAGMENT).unprepare()
    assert_identical(weights, before)


def test_preparing_twice_is_refused() -> None:
    prepared = make_weights().prepare(device="cpu", layout=FRAGMENT)
    with pytest.raises(ValueError, match=r"prepare: weights\.layout — .* call unprepare\(\) first"):
        prepared.prepare(device="cpu")
    row_major = make_weights().prepare(device="cpu")
    assert_identical(row_major.prepare(device="cpu"), row_major)  # nothing was rearranged


def test_a_layout_is_an_object_or_its_name() -> None:
    named = make_weights().prepare(device="cpu", layout="hopper_fragment")
    assert_identical(named, make_weights().prepare(device="cpu", layout=FRAGMENT))
    with pytest.raises(ValueError, match=r"prepare: layout — need a Layout \(.*, got 'row'; None"):
        make_weights().prepare(device="cpu", layout="row")  # type: ignore[arg-type]


# --- what does not fold -------------------------------------------------------------------------


def wide(weights: MoEWeights, name: str) -> MoEWeights:
    """One block of one row 40 binades below its neighbours."""
    part = getattr(weights, name)
    codes, scale = unpack_codes(part.qdata).clone(), part.scale.clone()
    codes[1, 7, 32:64] = 3
    scale[1, 7, 1] -= 40
    return replace(weights, **{name: MXTensor(pack_codes(codes), scale, MXFP4)})


@pytest.fixture
def hopper() -> Iterator[None]:
    """Every device counts as a Hopper."""
    with on_device(DEVICES["sm_90"]):
        yield


@pytest.mark.usefixtures("hopper")
def test_hopper_chooses_the_fragment_layout() -> None:
    assert make_weights().prepare(device="cpu").layout is FRAGMENT
    assert make_weights().prepare(device="cpu", layout=Layout.ROW_MAJOR).layout is Layout.ROW_MAJOR


@pytest.mark.parametrize("order", GateUpOrder)
def test_gfx950_chooses_its_layout(order: GateUpOrder) -> None:
    weights = make_weights(order, bias=True)
    with on_device(DEVICES["gfx950"]):
        prepared = weights.prepare(device="cpu")
    assert prepared.layout is prepared.down_proj.layout is Layout.CDNA4_FRAGMENT
    assert prepared.gate_up_order is GateUpOrder.INTERLEAVED_16
    assert_identical(prepared.unprepare(), weights)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_gfx950_holds_any_range(name: str) -> None:
    weights = wide(make_weights(bias=True), name)
    prepared = weights.prepare(device="cpu", layout=Layout.CDNA4_FRAGMENT)
    assert_identical(prepared.unprepare(), weights)


def test_other_devices_keep_the_order() -> None:
    assert make_weights().prepare(device="cpu").layout is Layout.ROW_MAJOR


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_wide_range_rows_stay_row_major(name: str) -> None:
    weights = wide(make_weights(bias=True), name)
    prepared = weights.prepare(device="cpu")
    assert prepared.layout is prepared.down_proj.layout is Layout.ROW_MAJOR
    assert_identical(prepared, weights)
    assert prepared.fold_certificates is not None
    outside = {
        n: c.total_outside
        for n, c in zip(("gate_up_proj", "down_proj"), prepared.fold_certificates, strict=True)
    }
    assert outside == {"gate_up_proj": 0, "down_proj": 0} | {name: 1}
    with pytest.raises(ValueError, match=r"1 of \d+ blocks outside; keep Layout\.ROW_MAJOR"):
        weights.prepare(device="cpu", layout=FRAGMENT)


@pytest.mark.usefixtures("hopper")
def test_tiny_rows_stay_row_major() -> None:
    """A row factor below 2^−126 would be no normal float32."""
    weights = make_weights()
    scale = weights.down_proj.scale.clone()
    scale[2, 5] = 6
    weights = replace(weights, down_proj=MXTensor(weights.down_proj.qdata, scale, MXFP4))
    assert weights.prepare(device="cpu").layout is Layout.ROW_MAJOR


@pytest.mark.parametrize(
    "hidden, inner", [(2880, 2880), (2048, 512)], ids=["gpt_oss", "qwen3_next"]
)
def test_prepared_weights_cost_three_percent_at_most(hidden: int, inner: int) -> None:
    weights = MoEWeights(
        projection(1, 2 * inner, hidden),
        projection(1, hidden, inner),
        gate_up_order=GateUpOrder.INTERLEAVED,
    )
    prepared = weights.prepare(device="cpu", layout=FRAGMENT)
    assert prepared.fold_certificates is not None
    kept = sum(c.reference.numel() + c.rows_outside.numel() for c in prepared.fold_certificates)
    assert prepared.nbytes + kept <= 1.03 * weights.nbytes


def test_indexing_prepared_weights_is_refused() -> None:
    prepared = make_weights().prepare(device="cpu", layout=FRAGMENT)
    with pytest.raises(ValueError, match="index before preparing"):
        prepared.gate_up_proj[0]


def test_copies_and_pickles_take_the_fields_alone() -> None:
    """What ops keep beside the fields stays where it is."""
    plan = mxpert.make_routing_plan(
        torch.ones(1, 2),
        torch.tensor([[0, 1]], dtype=torch.int32),
        num_experts=2,
        routing_block_m=16,
    )
    tensor = mxpert.quantize(torch.randn(2, 64), "mxfp8")
    for original in (plan, tensor):
        assert parts_of(original) is not None
        names = {field.name for field in dataclasses.fields(original)}
        for other in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
            assert vars(other).keys() == names < vars(original).keys()
            assert parts_of(other) is not None
    assert torch.equal(pickle.loads(pickle.dumps(tensor)).qdata, tensor.qdata)


def overwrite(path: Path) -> None:
    """Change a file's tensors in place."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))


def test_loaded_weights_do_not_follow_the_file(tmp_path: Path) -> None:
    """On a CPU safetensors hands out the file's pages: they are copied, unless mmap asks."""
    path, weights = tmp_path / "layer.safetensors", make_weights(bias=True)
    weights.save(path)
    loaded, pages = MoEWeights.load(path), MoEWeights.load(path, mmap=True)
    overwrite(path)
    for name, tensor in weights.state_dict().items():
        if name != "_extra_state":
            assert torch.equal(loaded.state_dict()[name], tensor), name
    changed = [
        name
        for name, tensor in weights.state_dict().items()
        if name != "_extra_state" and not torch.equal(pages.state_dict()[name], tensor)
    ]
    assert changed  # planted: without the copy a later write reaches the weights


def test_two_threads_may_save_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are inside of `save` at the same time; who reads meanwhile finds a whole file."""
    path, both = tmp_path / "layer.safetensors", threading.Barrier(2)
    first, second = make_weights(), make_weights(bias=True)
    first.save(path)
    save = safetensors.torch.save_file

    def together(tensors: Any, partial: Path, header: Any) -> None:
        both.wait(30)
        assert Path(partial).stat().st_size == 0  # nobody else writes there
        both.wait(30)
        save(tensors, partial, header)
        both.wait(30)
        assert MoEWeights.load(path).num_experts == E

    monkeypatch.setattr(safetensors.torch, "save_file", together)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(each.save, path) for each in (first, second)]:
            done.result()
    found = MoEWeights.load(path)
    assert torch.equal(found.down_proj.qdata, first.down_proj.qdata)
    assert [file.name for file in tmp_path.iterdir()] == ["layer.safetensors"]


@pytest.mark.parametrize("missing", ["gate_up_proj.qdata", "down_proj.scale", "down_bias"])
def test_a_file_without_one_of_its_tensors_is_refused(missing: str, tmp_path: Any) -> None:
    """Also without a bias, which other weights do not have."""
    path = tmp_path / "layer.safetensors"
    make_weights(bias=True).save(path)
    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    del tensors[missing]
    save_file(tensors, path, metadata=header)
    with pytest.raises(ValueError, match=rf"MoEWeights.load: state — .*without \['{missing}'\]"):
        MoEWeights.load(path)

"""NVFP4, MXFP8 and INT4 in every group size and dtype: exact values, and what is refused by name.

The values come from tests/support/exact_matrices.py, which writes each layout by its published
formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from mxpert.errors import UnsupportedError
from mxpert.formats.weight_tensor import WeightTensor
from mxpert.integrations.checkpoints.containers import container_of
from mxpert.integrations.checkpoints.load import load_expert_weights, save_gpt_oss_layer_tensors
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from mxpert.integrations.checkpoints.safetensors_files import CheckpointReader
from support.exact_matrices import Int4Matrix, NvfpMatrix
from support.expert_containers import (
    EXACT_NVFP4,
    EXPERTS,
    KINDS,
    Kind,
    awq,
    check_checkpoint,
    gptq,
    pack_quantized,
    rewrite,
    write,
)
from support.memory import held_and_peak

SIZES = (256, 128)
"""H and F that groups of 128 divide."""
F16, F32 = torch.float16, torch.float32
VARIANTS: dict[str, Kind] = {
    **{f"exact {name}": kind for name, kind in EXACT_NVFP4.items()},
    **{f"pack-quantized {group}": pack_quantized(group) for group in (32, 64, 128)},
    "pack-quantized, fp16": pack_quantized(32, F16),
    "pack-quantized, fp32": pack_quantized(128, F32),
    "pack-quantized, asymmetric": pack_quantized(64, has_zeros=True),
    "pack-quantized, actorder of weights": pack_quantized(128, actorder="weight"),
    **{f"AWQ {group}": awq(group) for group in (32, 64, 128)},
    **{f"GPTQ {group}": gptq(group) for group in (32, 64, 128)},
    "GPTQ, symmetric": gptq(128, sym=True),
    "GPTQ v2": gptq(64, v2=True),
    "GPTQ v2 under another key": gptq(64, v2=True, checkpoint_format=None, format="gptq_v2"),
    "GPTQ without a format": gptq(64, checkpoint_format=None),
    "pack-quantized without a strategy": pack_quantized(64, strategy=None, type=None),
    "GPTQ v2, symmetric": gptq(64, v2=True, sym=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_loads_bit_for_bit(name: str, tmp_path: Path) -> None:
    kind = VARIANTS[name]
    modules = write(tmp_path, kind, sizes=SIZES)
    check_checkpoint(tmp_path, modules)
    for _, weights in load_expert_weights(tmp_path):
        assert weights.weight_format == kind.format
        assert weights.gate_up_proj.format.name == weights.down_proj.format.name == kind.format


@pytest.mark.parametrize("name", [name for name in VARIANTS if "NVFP4" in name])
def test_gate_and_up_rows_have_global_scales_of_their_own(name: str, tmp_path: Path) -> None:
    (module,) = write(tmp_path, VARIANTS[name], layers=[0], sizes=SIZES)
    ((_, weights),) = load_expert_weights(tmp_path)
    assert isinstance(weights.gate_up_proj, WeightTensor)
    rows = weights.gate_up_proj.row_scale
    assert rows is not None
    for expert in range(EXPERTS):
        gate, up = (module.matrices[expert, part].rows_factor for part in ("gate", "up"))
        assert gate != up
        assert torch.equal(rows[expert], torch.cat((gate.repeat(128), up.repeat(128))))


def test_a_divisor_is_within_a_rounding_of_its_quotient(tmp_path: Path) -> None:
    kind = EXACT_NVFP4["compressed-tensors nvfp4-pack-quantized"]
    (module,) = write(tmp_path, kind, layers=[0])
    ((_, weights),) = load_expert_weights(tmp_path)
    found = weights.dequantize(torch.float64)[1]
    for expert in range(EXPERTS):
        matrix = module.matrices[expert, "down"]
        one = replace(matrix, factor=torch.tensor(1.0))
        quotient = one.values / matrix.factor.to(torch.float64)
        error = (found[expert] - quotient).abs()
        assert bool((error <= 2.0**-24 * quotient.abs() * (1 + 2.0**-20)).all())
        assert float(error.max()) > 0  # or else the bound says nothing


def test_a_power_of_two_as_divisor_is_exact(tmp_path: Path) -> None:
    name = "compressed-tensors nvfp4-pack-quantized"
    draw = partial(NvfpMatrix.random, is_divisor=True)
    kind = replace(
        EXACT_NVFP4[name], draw=lambda *a: replace(draw(*a), factor=torch.tensor(2.0**9))
    )
    (module,) = write(tmp_path, kind, layers=[0])
    ((_, weights),) = load_expert_weights(tmp_path)
    matrix = module.matrices[1, "down"]
    quotient = replace(matrix, factor=torch.tensor(1.0)).values / 2.0**9
    assert torch.equal(weights.dequantize(torch.float64)[1][1], quotient)


@pytest.mark.parametrize("name", EXACT_NVFP4)
def test_one_matrix_that_is_no_cast_makes_its_module_exact(name: str, tmp_path: Path) -> None:
    modules = write(tmp_path, name)
    changed = f"{modules[0].path}.3.down_proj.weight_scale"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[changed].view(torch.uint8)[0, 0] += 1

    before = dict(load_expert_weights(tmp_path))
    rewrite(tmp_path, change)
    after = dict(load_expert_weights(tmp_path))
    assert [weights.weight_format for weights in before.values()] == ["mxfp4", "mxfp4"]
    assert [weights.weight_format for weights in after.values()] == ["nvfp4", "mxfp4"]
    values, wanted = (
        weights[modules[0].path].dequantize(torch.float64) for weights in (after, before)
    )
    if name == "ModelOpt NVFP4":  # its global scales are powers of two
        assert torch.equal(values[0], wanted[0])
        assert torch.equal(values[1][:3], wanted[1][:3])
    differs = values[1] != wanted[1]
    assert not differs[3, 0, 16:].any() or name != "ModelOpt NVFP4"
    assert differs[3, 0, :16].any()


def test_ranks_agree_on_a_format(tmp_path: Path) -> None:
    """Some experts have the format of the whole module, also where they are casts themselves."""
    modules = write(tmp_path, "ModelOpt NVFP4", layers=[0])
    name = f"{modules[0].path}.3.up_proj.weight_scale"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.uint8)[0, 0] += 1

    rewrite(tmp_path, change)
    reader = CheckpointReader(tmp_path, "read")
    container, statement = container_of(reader)
    (module,) = container.check(reader, statement, container.paths(reader, statement))
    whole = container.read(reader, module).dequantize(torch.float64)
    for experts in ([0, 1], [2, 3]):
        part = container.read(reader, module, experts=experts)
        assert part.weight_format == "nvfp4"
        for found, wanted in zip(part.dequantize(torch.float64), whole, strict=True):
            assert torch.equal(found, wanted[experts])


@pytest.mark.parametrize("name", ["exact ModelOpt NVFP4", "AWQ 32", "GPTQ 32", "pack-quantized 32"])
def test_one_layer_is_held_at_a_time(name: str, tmp_path: Path) -> None:
    write(tmp_path, VARIANTS[name], layers=range(6), sizes=SIZES)
    codes = SIZES[0] * SIZES[1] // 2  # bytes of one matrix
    assert _most_bytes(tmp_path) < 12 * codes  # AWQ: its nibbles as bytes, three times


def test_casts_are_freed_before_the_module_is_read_as_exact(tmp_path: Path) -> None:
    """What was read until the last matrix is no cast."""
    modules = write(tmp_path, "ModelOpt NVFP4", layers=[0], sizes=SIZES)
    name = f"{modules[0].path}.{EXPERTS - 1}.down_proj.weight_scale"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.uint8)[-1, -1] += 1

    rewrite(tmp_path, change)
    assert _most_bytes(tmp_path) < 8 * SIZES[0] * SIZES[1] // 2


def _most_bytes(path: Path) -> int:
    """Bytes above those of one layer's weights that loading takes at most."""
    held, peak = held_and_peak(path)
    assert peak >= held
    return peak - held


ALL = KINDS | VARIANTS


@pytest.mark.parametrize("name", [name for name in ALL if ALL[name].format != "mxfp4"])
def test_a_layer_computes_with_what_loads(name: str, tmp_path: Path) -> None:
    """The reference backend on the loaded weights, and on their values by a formula of its own."""
    (module,) = write(tmp_path, ALL[name], layers=[0], sizes=SIZES)
    ((_, weights),) = load_expert_weights(tmp_path)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, SIZES[0], generator=draw).bfloat16()
    ids = torch.tensor([[0, 3], [1, 2], [3, 1]])
    routed = torch.full((3, 2), 0.5)
    found = mxpert.fused_moe(x, weights.prepare(device="cpu"), routed, ids.int(), activation="silu")
    wanted = torch.zeros(3, SIZES[0], dtype=torch.float64)
    for token in range(3):
        for expert in ids[token].tolist():
            gate, up, down = (
                module.matrices[expert, part].values for part in ("gate", "up", "down")
            )
            row = x[token].double()
            gated = torch.nn.functional.silu(gate @ row) * (up @ row)
            wanted[token] += down @ gated / 2
    error = (found.double() - wanted).norm() / wanted.norm()
    assert float(error) < 2.0**-7  # x·w in float32, h and y rounded to bf16: 2^-9 each


@pytest.mark.parametrize("name", ["GPTQ", "MiniMax MXFP8", "exact ModelOpt NVFP4"])
def test_what_writes_mxfp4_refuses_other_formats(name: str, tmp_path: Path) -> None:
    write(tmp_path / "stored", ALL[name], layers=[0], sizes=SIZES)
    ((_, weights),) = load_expert_weights(tmp_path / "stored")
    with pytest.raises(ValueError, match=r"^save_gpt_oss_layer_tensors: weights.weight_format — n"):
        save_gpt_oss_layer_tensors(0, weights)
    with pytest.raises(ValueError, match=r"quantization_config — need an unquantised .*dequantise"):
        quantize_checkpoint(tmp_path / "stored", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    state = weights.state_dict()
    again = mxpert.MoEWeights.from_state_dict(state)
    assert again.weight_format == ALL[name].format


# ---- what is refused ----------------------------------------------------------------------------

CT = "compressed-tensors pack-quantized"
FIRST = "model.layers.0.mlp.experts.0.gate_proj"


def words(**stated: Any) -> dict[str, Any]:
    return pack_quantized(32, **stated).config


STATED: dict[str, tuple[str, dict[str, Any], str]] = {
    "8 bits": (CT, words(num_bits=8), "weights.num_bits — need 4, got 8; see docs/which-check"),
    "floats": (CT, words(type="float"), "weights.type — need 'int' or none, got 'float'"),
    "channels": (
        CT,
        words(strategy="channel"),
        "weights.strategy — need 'group' or none, got 'channel'",
    ),
    "groups of 16": (CT, words(group_size=16), "weights.group_size — need 32 or 64 or 128, got 16"),
    "no group": (CT, words(group_size=None), "weights.group_size — need 32 or 64 or 128, got None"),
    "actorder": (CT, words(actorder="group"), "weights.actorder — need none or .*, got 'group'"),
    "AWQ of 8 bits": ("AWQ", awq(32, bits=8).config, "bits — need 4, got 8"),
    "AWQ without bits": ("AWQ", awq(32, bits=None).config, "bits — need 4, got None"),
    "AWQ gemv": ("AWQ", awq(32, version="GEMV").config, "version — need 'gemm', got 'gemv'"),
    "AWQ, no zeros": ("AWQ", awq(32, zero_point=False).config, "zero_point — need True, got False"),
    "AWQ of channels": ("AWQ", awq(32, group_size=-1).config, "group_size — need 32 .*, got -1"),
    "GPTQ of 3 bits": ("GPTQ", gptq(32, bits=3).config, "bits — need 4, got 3"),
    "desc_act": ("GPTQ", gptq(32, desc_act=True).config, "desc_act — need False, got True"),
    "marlin": (
        "GPTQ",
        gptq(32, checkpoint_format="marlin").config,
        "checkpoint_format — need 'gptq' or 'gptq_v2', got 'marlin'",
    ),
    "dynamic": (
        "GPTQ",
        gptq(32, dynamic={r"+:.*\.experts\..*": {"bits": 8}}).config,
        "dynamic — need none or .*bits",
    ),
}


@pytest.mark.parametrize("case", STATED)
def test_what_a_config_states_and_nothing_decodes_is_named(case: str, tmp_path: Path) -> None:
    name, config, expected = STATED[case]
    write(tmp_path, name, **config)
    with pytest.raises(UnsupportedError, match=f"^load_expert_weights: [^\n]*{expected}[^\n]*$"):
        load_expert_weights(tmp_path)


def test_settings_of_other_layers_do_not_matter(tmp_path: Path) -> None:
    stated = gptq(32, dynamic={r"-:.*self_attn.*": {}, r"+:.*lm_head": {"bits": 8}})
    check_checkpoint(tmp_path, write(tmp_path, stated))


def changed(suffix: str, function: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        new = function(tensors.pop(f"{FIRST}.{suffix}"))
        if new is not None:
            tensors[f"{FIRST}.{suffix}"] = new.contiguous()

    return change


MISSING = "need this tensor in the checkpoint"
HEADERS: dict[str, tuple[Any, Any, str]] = {
    "no scales": ("AWQ", changed("scales", lambda t: None), rf"scales — {MISSING}"),
    "no zero points": ("GPTQ", changed("qzeros", lambda t: None), rf"qzeros — {MISSING}"),
    "no g_idx": ("GPTQ", changed("g_idx", lambda t: None), rf"g_idx — {MISSING}"),
    "no shape": (CT, changed("weight_shape", lambda t: None), rf"weight_shape — {MISSING}"),
    "asymmetric without zero points": (
        pack_quantized(32, has_zeros=True),
        changed("weight_zero_point", lambda t: None),
        rf"weight_zero_point — {MISSING}",
    ),
    "symmetric with zero points": (
        CT,
        lambda tensors: tensors.update({f"{FIRST}.weight_zero_point": torch.zeros(1)}),
        r"gate_proj\.weight_zero_point — need N\.gate_proj\.weight_packed and .*got another",
    ),
    "g_idx of compressed-tensors": (
        CT,
        lambda tensors: tensors.update({f"{FIRST}.weight_g_idx": torch.zeros(1)}),
        r"gate_proj\.weight_g_idx — need N\.gate_proj\.weight_packed and .*got another",
    ),
    "scales of another group": (
        CT,
        changed("weight_scale", lambda t: t[:, :1]),
        r"weight_scale\.shape — need \[96, 2\], got \[96, 1\]; the matrix is \[96, 64\]",
    ),
    "AWQ's words along K": (
        "AWQ",
        changed("qweight", lambda t: t.view(8, -1)),
        r"qweight\.shape — need hidden_size a multiple of 32",
    ),
    "codes as bytes": (
        CT,
        changed("weight_packed", lambda t: t.view(torch.uint8)),
        r"need hidden_size 64, as|weight_packed\.dtype — need I32, got U8",
    ),
    "scales of two dtypes": (
        CT,
        changed("weight_scale", lambda t: t.float()),
        r"weight_scale\.dtype — need F32, as .*experts\.0\.gate_proj has, got BF16",
    ),
    "e5m2": (
        "MiniMax MXFP8",
        changed("weight", lambda t: t.view(torch.uint8).view(torch.float8_e5m2)),
        r"weight\.dtype — need F8_E4M3, got F8_E5M2",
    ),
    "float scales of MXFP8": (
        "MiniMax MXFP8",
        changed("weight_scale_inv", lambda t: t.float()),
        r"weight_scale_inv\.dtype — need U8 or F8_E8M0, got F32",
    ),
    "groups that do not divide": (
        pack_quantized(64),
        lambda tensors: None,
        r"N and K — need multiples of the group, 64, got \[96, 64\]",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_wrong_header_is_named_before_anything_is_read(case: str, tmp_path: Path) -> None:
    kind, damage, expected = HEADERS[case]
    write(tmp_path, kind)
    rewrite(tmp_path, damage)
    with pytest.raises(ValueError, match=f"^load_expert_weights: [^\n]*{expected}[^\n]*$"):
        load_expert_weights(tmp_path)


GATE = rf"{FIRST}\."
CONTENT: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "another shape": (
        CT,
        changed("weight_shape", lambda t: t + 1),
        ValueError,
        GATE + r"weight_shape — need \[96, 64\], the shape of weight_packed, got \[97, 65\]",
    ),
    "columns in another order": (
        "GPTQ",
        changed("g_idx", lambda t: t.flip(0)),
        UnsupportedError,
        GATE + r"g_idx — need k // 32, got another order; columns in another order are not",
    ),
    "zero points that sym excludes": (
        gptq(32, sym=True),
        changed("qzeros", torch.zeros_like),
        ValueError,
        GATE + r"qzeros — need 8, as sym states, got 1;",
    ),
    "zero points less 1 of 15": (
        "GPTQ",
        changed("qzeros", lambda t: torch.full_like(t, -1)),
        UnsupportedError,
        GATE + r"qzeros — need 0 to 14, .* got 15; readers disagree on 15: save as gptq_v2",
    ),
    **{
        f"a global scale of {number}": (
            kind,
            changed(suffix, lambda t, number=number: torch.full_like(t, number)),
            ValueError,
            GATE + rf"{suffix} — need a positive number, got {number}; the checkpoint is damaged",
        )
        for number in (0.0, -1.0, float("nan"), float("inf"))
        for kind, suffix in (
            ("ModelOpt NVFP4", "weight_scale_2"),
            ("compressed-tensors nvfp4-pack-quantized", "weight_global_scale"),
        )
    },
}


@pytest.mark.parametrize("case", CONTENT)
def test_wrong_content_is_named(case: str, tmp_path: Path) -> None:
    kind, damage, error, expected = CONTENT[case]
    write(tmp_path, kind)
    rewrite(tmp_path, damage)
    with pytest.raises(error, match=f"^load_expert_weights: {expected}[^\n]*$"):
        list(load_expert_weights(tmp_path))


def test_random_matrices_use_every_code_and_zero_point() -> None:
    """Or else a fault of packing might go unseen."""
    drawn = Int4Matrix.random(torch.Generator().manual_seed(0), 96, 128, has_zeros=True)
    assert drawn.zeros is not None
    assert drawn.codes.unique().numel() == drawn.zeros.unique().numel() == 16

"""grouped_linear: wiring in float64, quantised gradients against float64, memory, tails, errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import mxpert
from mxpert.formats.spec import ScaleRule
from mxpert.testing.noise import gaussian_magnitudes, quantisation_noise
from mxpert.testing.numerics import is_exact, rounding_rms, sampling_margin, sqnr_db
from mxpert.training import MXFP8Recipe, grouped_linear

PLAIN = MXFP8Recipe(enabled=False)
RECIPES = {
    "e4m3": MXFP8Recipe(),
    "e5m2": MXFP8Recipe("mxfp8_e5m2", "mxfp8_e5m2"),
    "hybrid": MXFP8Recipe.hybrid(),
    "high-precision-wgrad": MXFP8Recipe(high_precision_wgrad=True),
    "bf16": PLAIN,
}
SIZES = {"balanced": [4, 4], "ragged-with-empty": [0, 3, 0, 5, 1], "one": [6], "none": [0, 0]}
SNR_SIZES = [96, 0, 1, 64, 130, 33]
E4M3_GATE, HYBRID_GATE = 25.0, 20.0


def offsets_of(sizes: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(dtype)


def loop(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition: each group by itself, zeros beyond the last."""
    parts = []
    for group, (start, end) in enumerate(itertools.pairwise(offsets)):
        y = x[start:end] @ weight[group].T
        parts.append(y if bias is None else y + bias[group])
    return torch.cat([*parts, x.new_zeros(x.shape[0] - int(offsets[-1]), weight.shape[1])])


def gradients(
    function: Callable[..., torch.Tensor], grad: torch.Tensor, *leaves: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Output and gradients of copies of `leaves`."""
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    y = function(*copies)
    y.backward(grad.to(y.dtype))
    return (y.detach(), *(copy.grad for copy in copies))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradcheck_of_the_wiring(sizes: list[int], dtype: torch.dtype) -> None:
    """The same autograd Function with the quantisation off; two rows beyond the last group."""
    torch.manual_seed(0)
    offsets = offsets_of(sizes, dtype)
    shapes = ((sum(sizes) + 2, 3), (len(sizes), 4, 3), (len(sizes), 4))
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return grouped_linear(x, weight, offsets, bias=bias, recipe=PLAIN)

    torch.testing.assert_close(function(x, weight, bias), loop(x, weight, offsets, bias))
    assert torch.autograd.gradcheck(function, (x, weight, bias))


def snr_floor_db(first: str, second: str, numel: int) -> float:
    """Least SQNR of sums of products of Gaussians whose factors are quantised.

    Noise over signal of a product of independent factors is ``n_a + n_b + n_a n_b``; sums of such
    products keep it. Rounding the result to bfloat16 adds r². `numel` values of the smaller operand
    are what the noise is sampled from.
    """
    noise_a, noise_b = (
        quantisation_noise(name, ScaleRule.RCEIL, gaussian_magnitudes()) for name in (first, second)
    )
    total = noise_a + noise_b + noise_a * noise_b + rounding_rms(8) ** 2
    return -10 * math.log10(total * sampling_margin(numel) ** 2)


def snr_operands() -> tuple[torch.Tensor, ...]:
    """grad, x, weight, offsets: Gaussian bfloat16, ragged groups, 3 rows beyond the last."""
    torch.manual_seed(1)
    rows, k, n = sum(SNR_SIZES) + 3, 256, 192
    return (
        torch.randn(rows, n).bfloat16(),
        torch.randn(rows, k).bfloat16(),
        torch.randn(len(SNR_SIZES), n, k).bfloat16(),
        offsets_of(SNR_SIZES),
    )


@pytest.mark.parametrize(
    "name, gate", [("e4m3", E4M3_GATE), ("hybrid", HYBRID_GATE), ("e5m2", HYBRID_GATE)]
)
def test_snr_against_float64_on_unquantised_operands(name: str, gate: float) -> None:
    grad, x, weight, offsets = snr_operands()
    recipe = RECIPES[name]
    actual = gradients(lambda x, w: grouped_linear(x, w, offsets, recipe=recipe), grad, x, weight)
    expected = gradients(lambda x, w: loop(x, w, offsets), grad, x.double(), weight.double())
    forward, backward = recipe.forward_format, recipe.backward_format
    for what, (a, b), found, wanted in zip(
        ("y", "dx", "dweight"),
        ((forward, forward), (backward, forward), (backward, forward)),
        actual,
        expected,
        strict=True,
    ):
        floor = snr_floor_db(a, b, min(x.numel(), weight.numel(), grad.numel()))
        assert floor >= gate, f"{name} {what}: the derivation allows {floor:.2f} dB"
        snr = sqnr_db(found, wanted)
        # Without quantisation it would be the 55 dB of a bfloat16 output.
        assert floor <= snr < 40, f"{name} {what}: {snr:.2f} dB, floor {floor:.2f}"


@pytest.mark.parametrize("planted", ["groups-exchanged", "grad-of-another-row"])
def test_snr_sees_a_planted_error(planted: str) -> None:
    grad, x, weight, offsets = snr_operands()
    expected = gradients(lambda x, w: loop(x, w, offsets), grad, x.double(), weight.double())
    if planted == "groups-exchanged":
        weight = weight[[4, 1, 2, 3, 0, 5]]
    else:
        grad = grad.roll(1, 0)
    actual = gradients(lambda x, w: grouped_linear(x, w, offsets), grad, x, weight)
    assert min(map(sqnr_db, actual, expected)) < HYBRID_GATE


def test_high_precision_wgrad_is_the_bf16_gradient() -> None:
    grad, x, weight, offsets = snr_operands()
    recipe = RECIPES["high-precision-wgrad"]
    y, dx, dweight = gradients(
        lambda x, w: grouped_linear(x, w, offsets, recipe=recipe), grad, x, weight
    )
    plain = gradients(lambda x, w: grouped_linear(x, w, offsets, recipe=PLAIN), grad, x, weight)
    quantised = gradients(lambda x, w: grouped_linear(x, w, offsets), grad, x, weight)
    assert is_exact(dweight, plain[2])
    assert is_exact(y, quantised[0])
    assert is_exact(dx, quantised[1])


@pytest.mark.parametrize("name", RECIPES)
def test_rows_beyond_the_last_group_are_not_read(name: str) -> None:
    grad, x, weight, offsets = snr_operands()
    bias = torch.randn(weight.shape[:2])
    end = int(offsets[-1])

    def run(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients(
            lambda x, w, b: grouped_linear(x, w, offsets, bias=b, recipe=RECIPES[name]),
            grad,
            x,
            weight,
            bias,
        )

    clean = run(grad[:end], x[:end])
    poisoned_grad, poisoned_x = grad.clone(), x.clone()
    poisoned_grad[end:] = poisoned_x[end:] = math.nan
    poisoned = run(poisoned_grad, poisoned_x)
    for wanted, found in zip(clean, poisoned, strict=True):
        assert is_exact(found[: len(wanted)], wanted)
        assert not found[len(wanted) :].any()
    assert is_exact(poisoned[3], run(poisoned_grad, poisoned_x)[3]), "repeats are bit-exact"
    for group, size in enumerate(SNR_SIZES):
        if size == 0:
            assert not poisoned[2][group].any()
            assert not poisoned[3][group].any()


@pytest.mark.parametrize("name", RECIPES)
def test_bias_gradient_is_the_sum_of_each_groups_rows(name: str) -> None:
    grad, x, weight, offsets = snr_operands()
    bias = torch.randn(weight.shape[:2])
    y, _, _, dbias = gradients(
        lambda x, w, b: grouped_linear(x, w, offsets, bias=b, recipe=RECIPES[name]),
        grad,
        x,
        weight,
        bias,
    )
    without = grouped_linear(x, weight, offsets, recipe=RECIPES[name])
    groups = torch.repeat_interleave(torch.arange(len(SNR_SIZES)), torch.tensor(SNR_SIZES))
    end = int(offsets[-1])
    assert is_exact(y[:end], without[:end] + bias.bfloat16()[groups])
    wanted = torch.zeros(weight.shape[:2], dtype=torch.float64).index_add_(
        0, groups, grad[:end].double()
    )
    torch.testing.assert_close(dbias.double(), wanted)


def saved_bytes(function: Callable[[], Any]) -> tuple[Any, int]:
    """Result, and the bytes that autograd keeps for backward, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return result, sum(storages.values())


@pytest.mark.parametrize("frozen", ["nothing", "weight", "x"])
@pytest.mark.parametrize("name", ["e4m3", "high-precision-wgrad", "bf16"])
def test_backward_keeps_what_is_documented(name: str, frozen: str) -> None:
    _, x, weight, offsets = snr_operands()
    x.requires_grad_(frozen != "x")
    weight.requires_grad_(frozen != "weight")
    (rows, k), (groups, n, _) = x.shape, weight.shape
    capacity = mxpert.padded_capacity(rows, groups)
    of_x = {"e4m3": k * capacity * 33 // 32}.get(name, x.nbytes)
    of_weight = {"bf16": weight.nbytes}.get(name, groups * k * n * 33 // 32)
    _, found = saved_bytes(lambda: grouped_linear(x, weight, offsets, recipe=RECIPES[name]))
    assert found == (
        (of_x if frozen != "weight" else 0) + (of_weight if frozen != "x" else 0) + offsets.nbytes
    )


@pytest.mark.parametrize("name", RECIPES)
def test_main_grad_takes_the_weight_gradient(name: str) -> None:
    """Accumulated in float32 over two uses and two steps; weight.grad stays empty."""
    grad, x, weight, offsets = snr_operands()
    master = torch.nn.Parameter(weight.float())
    recipe = RECIPES[name]
    single = gradients(lambda w: grouped_linear(x, w, offsets, recipe=recipe), grad, master)[1]
    master.main_grad = torch.zeros_like(master)
    for _ in range(2):
        twice = sum(grouped_linear(x, master, offsets, recipe=recipe) for _ in range(2))
        twice.backward(grad)
    assert master.grad is None
    torch.testing.assert_close(master.main_grad, 4 * single)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RECIPES)
def test_a_16_bit_main_grad_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    grad, x, weight, offsets = snr_operands()
    master, recipe = torch.nn.Parameter(weight.float()), RECIPES[name]
    single = gradients(lambda w: grouped_linear(x, w, offsets, recipe=recipe), grad, master)[1]
    held = torch.randn_like(master).to(dtype)
    master.main_grad = held.clone()
    grouped_linear(x, master, offsets, recipe=recipe).backward(grad)
    assert torch.equal(master.main_grad, (held.float() + single).to(dtype))


class MegatronHook:
    """What Megatron-LM's DistributedDataParallel does with a gradient, overlap_grad_reduce on."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        self.calls = 0
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: self(parameter))
        self.node = node

    def __call__(self, parameter: torch.nn.Parameter) -> None:
        self.calls += 1
        assert parameter.grad is not None  # else it is not safe that reductions overlap
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.dtype == parameter.dtype
        zeros = getattr(parameter, "zero_out_wgrad", False)
        if not parameter.grad_added_to_main_grad or zeros:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


@pytest.mark.parametrize("zero_out", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_megatrons_hook_adds_nothing_twice(name: str, zero_out: bool) -> None:
    """Two micro-batches; garbage in the gradient that stands for the real one is not read."""
    grad, x, weight, offsets = snr_operands()
    master, recipe = torch.nn.Parameter(weight.bfloat16()), RECIPES[name]
    plain = torch.nn.Parameter(weight.bfloat16())
    plain.main_grad = torch.zeros(weight.shape)
    hook = MegatronHook(master)
    if zero_out:
        master.zero_out_wgrad = True
    empty_like = torch.empty_like

    def with_garbage(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        made = empty_like(tensor, **options)
        return made.fill_(torch.nan) if tensor is master else made

    garbage = mock.patch.object(torch, "empty_like", with_garbage)
    for _ in range(2):
        grouped_linear(x, plain, offsets, recipe=recipe).backward(grad)
        with garbage:
            y = grouped_linear(x, master, offsets, recipe=recipe)
            y.backward(grad)
    assert hook.calls == 2
    assert master.grad_added_to_main_grad
    assert torch.equal(master.main_grad, plain.main_grad)
    assert master.main_grad.any()


def test_megatrons_fsdp_gives_main_grad_and_overwrites_it() -> None:
    grad, x, weight, offsets = snr_operands()
    master = torch.nn.Parameter(weight.float())
    single = gradients(lambda w: grouped_linear(x, w, offsets), grad, master)[1]
    buffer = torch.full_like(master, torch.nan)
    master.__fsdp_param__, master.overwrite_main_grad = True, True
    master.get_main_grad = lambda: buffer
    y = grouped_linear(x, master, offsets)
    y.backward(grad)
    assert torch.equal(buffer, single)
    assert master.grad_added_to_main_grad


@pytest.mark.parametrize("name", RECIPES)
def test_only_requested_gradients(name: str) -> None:
    grad, x, weight, offsets = snr_operands()
    _, dx, dweight = gradients(
        lambda x, w: grouped_linear(x, w, offsets, recipe=RECIPES[name]), grad, x, weight
    )
    assert is_exact(
        gradients(lambda x: grouped_linear(x, weight, offsets, recipe=RECIPES[name]), grad, x)[1],
        dx,
    )
    assert is_exact(
        gradients(lambda w: grouped_linear(x, w, offsets, recipe=RECIPES[name]), grad, weight)[1],
        dweight,
    )
    with torch.no_grad():
        y, kept = saved_bytes(
            lambda: grouped_linear(x, weight.requires_grad_(), offsets, recipe=RECIPES[name])
        )
    assert kept == 0
    assert not y.requires_grad


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"x": torch.zeros(4, 32, dtype=torch.float64)}, TypeError, "x.dtype"),
        ({"x": torch.zeros(4, 64)}, ValueError, "weight.shape"),
        (
            {"weight": torch.zeros(2, 33, 32)},
            ValueError,
            r"weight.shape\[1\] — need a multiple of 32",
        ),
        ({"weight": torch.zeros(0, 32, 32)}, ValueError, r"weight.shape\[0\] — need at least one"),
        ({"group_offsets": torch.zeros(4, dtype=torch.int32)}, ValueError, "group_offsets.shape"),
        ({"group_offsets": torch.zeros(3)}, TypeError, "group_offsets.dtype"),
        ({"bias": torch.zeros(2, 31)}, ValueError, "bias.shape"),
        ({"recipe": "mxfp8"}, TypeError, "recipe — need an MXFP8Recipe"),
    ],
    ids=[
        "float64",
        "width",
        "ragged-block",
        "no-group",
        "offsets-shape",
        "offsets-dtype",
        "bias",
        "recipe",
    ],
)
def test_bad_arguments_raise(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {
        "x": torch.zeros(4, 32),
        "weight": torch.zeros(2, 32, 32),
        "group_offsets": torch.zeros(3, dtype=torch.int32),
        **change,
    }
    with pytest.raises(error, match=f"grouped_linear: {text}"):
        grouped_linear(
            arguments.pop("x"), arguments.pop("weight"), arguments.pop("group_offsets"), **arguments
        )


def test_bad_main_grad_raises() -> None:
    weight = torch.nn.Parameter(torch.zeros(1, 32, 32))
    weight.main_grad = torch.zeros(1, 32, 32, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"weight.main_grad.dtype — need float32"):
        grouped_linear(torch.zeros(4, 32), weight, torch.tensor([0, 4]))


@pytest.mark.parametrize(
    "options", [{"forward_format": "mxfp4"}, {"backward_format": "fp8"}], ids=["mxfp4", "unknown"]
)
def test_bad_recipe_raises(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"MXFP8Recipe: .*_format — need one of"):
        MXFP8Recipe(**options)


def test_bad_scale_rule_raises() -> None:
    with pytest.raises(ValueError, match="MXFP8Recipe: scale_rule — need a ScaleRule"):
        MXFP8Recipe(scale_rule="up")


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", ["e4m3", "high-precision-wgrad", "bf16"])
def test_compiles_without_a_graph_break(name: str, autocast: bool) -> None:
    """Group sizes change from call to call, the graph stays."""
    _, x, weight, _ = snr_operands()
    grad = torch.randn(len(x), weight.shape[1]).bfloat16()
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)

    def run(function: Callable[..., torch.Tensor], sizes: list[int]) -> tuple[torch.Tensor, ...]:
        offsets = offsets_of(sizes)
        return gradients(
            lambda x, w: function(x, w, offsets, recipe=RECIPES[name]), grad, x, weight
        )

    for sizes in (SNR_SIZES, SNR_SIZES[::-1]):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            actual = run(compiled, sizes)
        assert all(map(is_exact, actual, run(grouped_linear, sizes)))


def test_bad_input_is_refused_warm_as_cold() -> None:
    """A check that was passed is left out for the same recipe and the same geometry alone."""
    x, weight, offsets = torch.randn(8, 40), torch.randn(2, 32, 40), offsets_of([4, 4])
    main_grad = torch.zeros(2, 32, 40)
    for _ in range(3):
        grouped_linear(x, weight, offsets, recipe=PLAIN)
    with pytest.raises(ValueError, match=r"weight.shape\[2\] — need a multiple of 32"):
        grouped_linear(x, weight, offsets)
    with pytest.raises(ValueError, match="num_sms — need at least 1"):
        grouped_linear(x, weight, offsets, recipe=PLAIN, num_sms=0)
    with pytest.raises(TypeError, match="recipe — need an MXFP8Recipe"):
        grouped_linear(x, weight, offsets, recipe=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"group_offsets\.shape"):
        grouped_linear(x, weight, offsets[:-1], recipe=PLAIN)
    with pytest.raises(ValueError, match=r"bias\.shape"):
        grouped_linear(x, weight, offsets, recipe=PLAIN, bias=torch.zeros(2, 40))
    weight.main_grad = main_grad[:1]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"main_grad\.shape"):
        grouped_linear(x, weight, offsets, recipe=PLAIN)
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    grouped_linear(x, weight, offsets, recipe=PLAIN)

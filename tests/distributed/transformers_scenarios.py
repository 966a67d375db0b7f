"""What ranks do in test_experts_ranks.py of tests/integrations; each function runs on all.

The judge is the same model on one rank: `convert` without `expert_parallel` in the same process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import mxpert
import mxpert.integrations.transformers
from mxpert.distributed import ExpertParallel, Transport
from mxpert.errors import UnsupportedError
from mxpert.integrations import dense_checkpoints
from mxpert.integrations.checkpoints import per_expert, stacked_experts
from mxpert.integrations.checkpoints.expert_matrices import Decoded
from mxpert.integrations.checkpoints.expert_sources import ExpertSource
from mxpert.integrations.checkpoints.per_expert import decode_matrix
from mxpert.integrations.checkpoints.safetensors_files import CheckpointReader
from mxpert.integrations.models.convert import mx_experts, restore
from mxpert.moe import stacked
from mxpert.testing.numerics import is_exact, relative_l2, requantisation_error
from mxpert.training import MXFP8Recipe, full_state_dict, local_expert_parameters
from support.expert_containers import store_experts
from support.incomplete import copy_without
from support.memory import peak_bytes
from tests.integrations.families import FAMILIES, PROMPT, VOCABULARY, build, oracle_of, teach

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

EVERY_FAMILY = (*FAMILIES, "llama4")
TRANSPORTS = (Transport.GATHER, Transport.ALL_TO_ALL)
NEW_TOKENS = 16
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3}
FLOAT32 = 1e-5
"""Two layers of float32, whose sums are in another order: some hundred roundings of 6e-8."""


def logits_bound(model: Any) -> float:
    """Relative L2 of float32 models in which sums are in another order.

    Experts read bfloat16. A difference of `FLOAT32` before that rounding flips it now and then; a
    gated activation at most doubles the error, and every layer adds its own.
    """
    config = model.config
    flips = requantisation_error(None, FLOAT32, 24 * config.hidden_size)
    return 2 * flips * config.num_hidden_layers


def parallel(hidden_size: int = 128, **changes: Any) -> ExpertParallel:
    options: dict[str, Any] = dict(num_experts=8, top_k=2, max_tokens=64, device="cpu")
    return ExpertParallel(hidden_size=hidden_size, **options | changes)


def converted(model: Any, ep: ExpertParallel | None, *formats: str) -> Any:
    return mxpert.convert(copy.deepcopy(model), *formats, expert_parallel=ep, progress=False)


@torch.no_grad()
def logits(model: Any, length: int = 24) -> torch.Tensor:
    result: torch.Tensor = model(torch.arange(length)[None] % VOCABULARY).logits
    return result


def sequence() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCABULARY, (PROMPT + NEW_TOKENS,), generator=generator)


def taught() -> Any:
    """A tiny gpt-oss whose greedy tokens continue `sequence` with a margin."""
    model = build("gpt_oss")
    oracle = oracle_of(model)
    teach(oracle, sequence())
    model.lm_head.load_state_dict(oracle.lm_head.state_dict())
    return model


def generated(model: Any, prompt: torch.Tensor, **options: Any) -> list[int]:
    result = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        **options,
    )
    tokens: list[int] = result[0].tolist()
    return tokens


def generate_gives_the_tokens_of_one_rank() -> None:
    model = taught()
    for transport in TRANSPORTS:
        for wire, formats in (("bf16", ()), ("mxfp8", ("mxfp8",))):
            one = generated(converted(model, None, *formats), sequence()[:PROMPT])
            assert one == sequence().tolist()
            ep = parallel(transport=transport, wire_format=wire)
            assert generated(converted(model, ep, *formats), sequence()[:PROMPT]) == one


def ranks_may_generate_from_different_prompts() -> None:
    """Rank 0 ends early; with synced_gpus it takes part until the others have ended."""
    model, rank = taught(), dist.get_rank()
    prompt = sequence()[: PROMPT + 3 * rank]
    end = sequence()[PROMPT + 4].item() if rank == 0 else None
    options = dict(eos_token_id=end, pad_token_id=0)
    one = generated(converted(model, None), prompt, **options)
    ranks = converted(model, parallel())
    found = generated(ranks, prompt, synced_gpus=True, **options)
    length = PROMPT + 5 if rank == 0 else PROMPT + 3 + NEW_TOKENS
    assert len(one) == length
    assert found[:length] == one


def every_family_computes_what_one_rank_does() -> None:
    for family in EVERY_FAMILY:
        model = build(family)
        ep = parallel(top_k=model.config.num_experts_per_tok, combine_dtype=torch.float32)
        ranks = converted(model, ep)
        wanted = logits(converted(model, None), 24 + dist.get_rank())
        assert relative_l2(logits(ranks, 24 + dist.get_rank()), wanted) < logits_bound(model)
        for experts in mx_experts(ranks):
            assert experts.weights.num_experts == ep.num_local_experts
            assert experts.expert_parallel is ep
        assert "ExpertParallel(rank" in repr(ranks)


def prepared_bytes(model: Any) -> int:
    return sum(buffer.nbytes for experts in mx_experts(model) for buffer in experts.buffers())


def a_rank_holds_its_experts_alone() -> None:
    """Peak memory of a conversion, which for all experts would be above the bound.

    A layer's dense weights are freed once it is prepared: codes are held twice until then.
    """
    ep = parallel(256)
    layer = prepared_bytes(converted(build("gpt_oss", **SIZES), None)) // 3
    peaks = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stacked.CHUNK_ELEMENTS, "cpu", 1 << 14)  # small as the layers are
        for name, ranks in (("whole", None), ("local", ep)):
            made: list[Any] = []
            peaks[name] = peak_bytes(
                lambda: build("gpt_oss", dtype=torch.bfloat16, **SIZES),
                lambda model, ranks=ranks, made=made: made.append(
                    mxpert.convert(model, expert_parallel=ranks, progress=False)
                ),
            )
            assert prepared_bytes(made[0]) == 3 * layer // (1 if ranks is None else ep.size)
            dense = [name for name, _ in made[0].named_parameters() if "experts" in name]
            assert not dense
    assert peaks["local"] < 1.5 * layer <= peaks["whole"], (peaks, layer)


def training_frees_foreign_experts_layer_by_layer() -> None:
    """Local copies of one layer are the peak: all layers', or foreign experts kept, exceed it."""
    ep = parallel(256, transport=Transport.ALL_TO_ALL)
    made: list[Any] = []
    peak = peak_bytes(
        lambda: build("gpt_oss", dtype=torch.bfloat16, **SIZES),
        lambda model: made.append(
            mxpert.convert(model, recipe=MXFP8Recipe(), expert_parallel=ep, progress=False)
        ),
    )
    local = sum(value.nbytes for value in local_expert_parameters(made[0]).values()) // 3
    assert local <= peak < 2 * local, (peak, local)


@contextmanager
def checkpoint_of(model: Any, without: str | None = None) -> Iterator[Path]:
    """A folder that all ranks read; Transformers lets the first rank alone write one.

    Args:
        without: a tensor that is not in it.
    """
    with TemporaryDirectory() as folder:
        if dist.get_rank() == 0:
            whole = folder if without is None else f"{folder}/whole"
            model.save_pretrained(whole)
            if without is not None:
                folder = str(copy_without(Path(whole), Path(folder, "incomplete"), without))
        paths = [folder]
        dist.broadcast_object_list(paths)
        yield Path(paths[0])
        dist.barrier()


def load(path: Path, ep: ExpertParallel | None, **options: Any) -> Any:
    options = {"experts_implementation": "mxpert"} | options
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", expert_parallel=ep, **options
    )


def mxfp4_checkpoints_are_read_in_part() -> None:
    """Rows of the local experts alone are read, and held: all of them would exceed the bound."""
    ep = parallel(256, combine_dtype=torch.float32)
    model = converted(build("gpt_oss", dtype=torch.bfloat16, **SIZES), None)
    with checkpoint_of(model) as path, pytest.MonkeyPatch.context() as patch:
        rows: set[int] = set()
        read_row = CheckpointReader.read_row

        def recorded(reader: CheckpointReader, name: str, row: int) -> torch.Tensor:
            rows.add(row)
            return read_row(reader, name, row)

        def refused(reader: CheckpointReader, name: str) -> torch.Tensor:
            raise AssertionError(f"{name} was read as a whole")

        patch.setattr(CheckpointReader, "read_row", recorded)
        patch.setattr(CheckpointReader, "read", refused)
        patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the profiler sees one thread
        own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        alone = parallel(256, group_or_mesh=own, combine_dtype=torch.float32)
        file = (path / "model.safetensors").stat().st_size
        made: list[Any] = []
        peaks = []
        for ranks in (ep, alone):
            peaks.append(
                peak_bytes(
                    lambda: None,
                    lambda _, ranks=ranks: made.append(load(path, ranks, dtype=torch.float32)),
                    mapped=file,
                )
            )
            assert rows == set(ranks.local_experts)
        local, whole = made
        everything = prepared_bytes(whole)
        assert prepared_bytes(local) == everything // ep.size
        least = everything + sum(value.nbytes for value in whole.parameters())
        assert peaks[0] < least <= peaks[1], (peaks, least)
        assert relative_l2(logits(local), logits(whole)) < logits_bound(model)
        again, info = load(path, ep, dtype=torch.float32, output_loading_info=True)
        assert not any(info.values()), info
        assert relative_l2(logits(again), logits(local)) < logits_bound(model)


def read_in_part(path: Path, ep: ExpertParallel) -> tuple[int, Any]:
    """Peak bytes of loading a bf16 checkpoint, and the model; only its own experts are read."""
    experts: set[int] = set()
    made: list[Any] = []
    read = ExpertSource.read

    def recorded(layer: ExpertSource, reader: Any, name: str, expert: int) -> torch.Tensor:
        experts.add(expert)
        return read(layer, reader, name, expert)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertSource, "read", recorded)
        patch.setitem(stacked.CHUNK_ELEMENTS, "cpu", 1 << 14)  # small as the layers are
        file = (path / "model.safetensors").stat().st_size
        peak = peak_bytes(lambda: None, lambda _: made.append(load(path, ep)), mapped=file)
    assert experts == set(ep.local_experts)
    return peak, made[0]


def bf16_checkpoints_are_read_in_part() -> None:
    """Matrices of the local experts alone are read, and no more than one is held in bf16."""
    ep = parallel(256, combine_dtype=torch.float32)
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    alone = parallel(256, group_or_mesh=own, combine_dtype=torch.float32)
    for family in ("gpt_oss", "qwen3_moe"):  # stacked tensors, and one matrix per expert
        changes = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {}
        model = build(family, dtype=torch.bfloat16, **SIZES | changes)
        with checkpoint_of(model) as path:
            peak, local = read_in_part(path, ep)
            peak_alone, whole = read_in_part(path, alone)
            everything = prepared_bytes(whole)
            assert prepared_bytes(local) == everything // ep.size
            least = everything + sum(value.nbytes for value in whole.parameters())
            assert peak < least <= peak_alone, (family, peak, least, peak_alone)
            dense = sum(v.nbytes for n, v in model.named_parameters() if ".experts." in n)
            assert least < dense // ep.size, "the local experts in bf16 would exceed the bound"
            check_same(local, converted(load(path, None, experts_implementation="eager"), ep))


def check_same(found: Any, wanted: Any) -> None:
    state = wanted.state_dict()
    assert found.state_dict().keys() == state.keys()
    for name, value in found.state_dict().items():
        assert value.dtype == state[name].dtype, name
        assert is_exact(value, state[name]), name
    assert is_exact(logits(found), logits(wanted))
    entries = [each.config.quantization_config.to_dict() for each in (found, wanted)]
    assert entries[0] == entries[1]
    assert not hasattr(found, "hf_quantizer")


def containers_are_read_in_part() -> None:
    """One quantised matrix per expert: those of the local experts alone are read.

    Of NVFP4 the other experts' scales are, too: they decide on the format of the layer.
    """
    ep = parallel(combine_dtype=torch.float32)
    experts = set()

    def recorded(op: str, name: str, *rest: Any) -> Decoded:
        experts.add(int(name.split(".")[-2]))
        return decode_matrix(op, name, *rest)

    model = build("qwen3_moe", dtype=torch.bfloat16)
    with (
        checkpoint_of(model) as dense,
        TemporaryDirectory() as own,
        pytest.MonkeyPatch.context() as patch,
    ):
        for module in (per_expert, stacked_experts):
            patch.setattr(module, "decode_matrix", recorded)
        wanted = converted(load(dense, None, experts_implementation="eager"), ep)
        every = set(range(ep.placement.num_experts))
        for name, needed in (("Quark OCP MX", set(ep.local_experts)), ("ModelOpt NVFP4", every)):
            experts.clear()
            found = load(store_experts(dense, Path(own, name), name), ep)
            assert experts == needed, name
            for key, value in wanted.state_dict().items():
                assert is_exact(found.state_dict()[key], value), key
            assert is_exact(logits(found), logits(wanted))
            with pytest.raises(UnsupportedError, match="save_pretrained: experts — need a model"):
                found.save_pretrained("/nowhere")


def bf16_checkpoints_load_as_they_convert() -> None:
    """Every family, in the dtype that was asked for; no key is missing or unexpected."""
    for family in EVERY_FAMILY:
        model = build(family)
        ep = parallel(top_k=model.config.num_experts_per_tok, combine_dtype=torch.float32)
        with checkpoint_of(model) as path, pytest.MonkeyPatch.context() as patch:
            patch.setattr(dense_checkpoints, "_logger", None)  # none is loaded as a whole
            options = dict(dtype=torch.bfloat16)  # of float32: rounded, then quantised
            name = "mxpert_mxfp8"
            local, info = load(
                path, ep, experts_implementation=name, output_loading_info=True, **options
            )
            assert not any(info.values()), info
            assert {each.activation_format for each in mx_experts(local)} == {"mxfp8"}
            assert {each.group_ids for each in mx_experts(local)} == {ep.local_experts}
            dense = load(path, None, experts_implementation="eager", **options)
            check_same(local, converted(dense, ep, "mxfp8"))
            with pytest.raises(UnsupportedError, match="save_pretrained: experts"):
                local.save_pretrained("nowhere")
            direct = type(local).from_pretrained(
                path,
                attn_implementation="eager",
                experts_implementation=name,
                expert_parallel=ep,
                **options,
            )
            check_same(direct, local)


def missing_tensors_of_experts_are_named() -> None:
    """On every rank, from MXFP4 (read in part) and from bf16 (which is then loaded as a whole)."""
    ep, dense = parallel(), build("gpt_oss", dtype=torch.bfloat16)
    for model, kinds in (
        (converted(dense, None), ("gate_up_proj_blocks", "down_proj_scales", "down_proj_bias")),
        (dense, ("gate_up_proj", "down_proj_bias")),
    ):
        for kind in kinds:
            name = f"model.layers.1.mlp.experts.{kind}"
            with checkpoint_of(model, without=name) as path, pytest.raises(ValueError, match=name):
                load(path, ep)


def other_checkpoints_are_loaded_as_a_whole() -> None:
    """Where the experts cannot be named, all are loaded, and the foreign ones dropped."""
    ep, model = parallel(), build("mixtral", dtype=torch.bfloat16)
    wanted = converted(model, ep)
    refused = UnsupportedError("experts of another kind")
    with checkpoint_of(model) as path, pytest.MonkeyPatch.context() as patch:
        warned: list[str] = []
        logger = dense_checkpoints._logger
        patch.setattr(logger, "warning", lambda text, *rest: warned.append(text % rest))
        for name, error in (("find_expert_sources", refused), ("reader_of", ValueError("files"))):

            def fail(*_: object, error: Exception = error) -> None:
                raise error

            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(dense_checkpoints, name, fail)
                check_same(load(path, ep), wanted)
        text = "mxpert: all experts are loaded, and foreign ones dropped afterwards: "
        assert warned == [text + "experts of another kind", text + "files"]
        with pytest.raises(ValueError, match='need experts_implementation="mxpert" with it'):
            load(path, ep, experts_implementation="eager")
        with pytest.raises(TypeError, match="expert_parallel — need an ExpertParallel, got str"):
            load(path, "ep")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="num_experts=8 and hidden_size=128"):
            load(path, parallel(num_experts=4))


def weights_that_are_not_finite_are_refused() -> None:
    ep, model = parallel(), build("mixtral", dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[ep.local_experts[-1], 3, 5] = torch.nan
    with checkpoint_of(model) as path:
        if dist.get_rank() == 0:  # it has written the file, with a NaN in its own experts
            text = r"layers\.1\.mlp\.experts\.down_proj\[3\] — need finite weights"
            with pytest.raises(ValueError, match=text):
                load(path, ep)
        else:
            assert load(path, ep)


def states_are_local_and_load_whole() -> None:
    ep, model = parallel(), build("gpt_oss")
    whole = converted(model, None).state_dict()
    ranks = converted(model, ep)
    own = ranks.state_dict()
    assert own.keys() == whole.keys()
    for name, value in own.items():
        part = whole[name][list(ep.local_experts)] if ".experts." in name else whole[name]
        assert is_exact(value, part), name
    gathered = full_state_dict(ranks, ep)
    assert gathered.keys() == whole.keys()
    assert all(is_exact(value, whole[name]) for name, value in gathered.items())
    other = converted(build("gpt_oss", seed=1), ep)
    for state in (whole, own, gathered):
        assert not any(other.load_state_dict(state))
        assert is_exact(logits(other), logits(ranks))
        other = copy.deepcopy(other)


def training_gives_the_gradients_of_one_rank() -> None:
    """With a recipe: the local experts' gradients are those of the mean of the ranks' losses."""
    size, rank = dist.get_world_size(), dist.get_rank()
    recipe = MXFP8Recipe(enabled=False)
    # transposed, interleaved, with biases; none of these; weights on the input
    for family in ("gpt_oss", "qwen3_moe", "llama4"):
        model = build(family).train()
        whole = mxpert.convert(copy.deepcopy(model), recipe=recipe)
        top_k = model.config.num_experts_per_tok
        ep = parallel(top_k=top_k, transport=Transport.ALL_TO_ALL)
        local = mxpert.convert(copy.deepcopy(model), recipe=recipe, expert_parallel=ep)
        ids = [torch.arange(20 + each, 40 + 2 * each)[None] % VOCABULARY for each in range(size)]
        for each in ids:
            (whole(each, labels=each).loss / size).backward()
        local(ids[rank], labels=ids[rank]).loss.backward()
        wanted = dict(whole.named_parameters())
        experts = local_expert_parameters(local)
        assert len(experts) == (8 if family == "gpt_oss" else 4)
        for name, parameter in local.named_parameters():
            gradient = parameter.grad
            if name in experts:
                part = wanted[name].grad[list(ep.local_experts)]
            else:
                part = wanted[name].grad
                dist.all_reduce(gradient.div_(size))
            assert relative_l2(gradient, part) < FLOAT32, name
        full = full_state_dict(local, ep)
        assert all(is_exact(value, model.state_dict()[name]) for name, value in full.items())
        changed = {name: value + 1 for name, value in full.items()}
        assert not any(local.load_state_dict(changed))
        for name, value in full_state_dict(local, ep).items():
            assert is_exact(value, changed[name]), name
        with pytest.raises(UnsupportedError, match=r"restore: .*need all experts of the layer"):
            restore(local)
        with pytest.raises(UnsupportedError, match=r"convert: .*full_state_dict"):
            mxpert.convert(local, progress=False)


def what_does_not_fit_is_refused() -> None:
    model = build("mixtral")
    for changes, text in (
        (dict(num_experts=4), "num_experts=8 and hidden_size=128, as model.layers.0"),
        (dict(hidden_size=64), "got num_experts=8 and hidden_size=64"),
        (dict(wire_format="mxfp8"), 'activation_format — need "mxfp8"'),
    ):
        with pytest.raises(ValueError, match=text):
            mxpert.convert(model, expert_parallel=parallel(**changes), progress=False)
    with pytest.raises(TypeError, match="expert_parallel — need an ExpertParallel"):
        mxpert.convert(model, expert_parallel="ep")
    assert not mx_experts(model)
    ranks = mxpert.convert(model, expert_parallel=parallel(), progress=False)
    with pytest.raises(ValueError, match="convert: expert_parallel — need a model with dense"):
        mxpert.convert(ranks, expert_parallel=parallel(), progress=False)
    with pytest.raises(UnsupportedError, match=r"restore: .*got 4 of 8"):
        restore(ranks)
    with pytest.raises(UnsupportedError, match="save_pretrained: experts"):
        ranks.save_pretrained("nowhere")
    with pytest.raises(ValueError, match="at most max_tokens = 64 tokens a rank"):
        logits(ranks, 65)

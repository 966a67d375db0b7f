"""`mxpert eval` and what it reports: losses, paired errors, SQNR by layer; by bytes or tokens."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from mxpert.cli.eval import read_text, read_tokens
from mxpert.cli.main import app
from mxpert.integrations.models.convert import convert, mx_experts
from mxpert.integrations.models.evaluation import evaluate
from mxpert.testing.numerics import sqnr_db
from support.mixtral import tiny_mixtral

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "tests" / "training" / "text.txt"
FORMATS = ["a16w4", "a8w4", "a8w4-token", "a4w4"]
runner = CliRunner()


def run(*arguments: object) -> Any:
    return runner.invoke(app, ["eval", *(str(argument) for argument in arguments)])


def of_text(path: Path, context: int, max_tokens: int, *options: object) -> Any:
    sizes = ("--context", context, "--max-tokens", max_tokens)
    return run(path, "--text", TEXT, *sizes, "--device", "cpu", *options)


def model_of(vocabulary: int = 256, seed: int = 0) -> Any:
    """A random Mixtral whose experts matter."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=vocabulary, intermediate_size=64, num_hidden_layers=2)
    model = tiny_mixtral(**sizes, bos_token_id=None, eos_token_id=None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model.eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    model_of().to(torch.bfloat16).save_pretrained(path)
    return path


def test_table_json_and_plot(checkpoint, tmp_path) -> None:
    summary, plot = tmp_path / "eval.json", tmp_path / "eval.png"
    outputs = ("--json", summary, "--plot", plot)
    done = of_text(checkpoint, 64, 1024, "--formats", ",".join(FORMATS), *outputs)
    assert done.exit_code == 0, done.output
    assert "tiny: 1008 tokens in 16 windows of 64" in done.stdout
    content = json.loads(summary.read_text("utf-8"))
    found = {entry["name"]: entry for entry in content["formats"]}
    assert list(found) == ["bf16", *FORMATS]
    for entry in found.values():
        assert f"{entry['loss']:.4f}" in done.stdout
        assert entry["perplexity"] == pytest.approx(math.exp(entry["loss"]))
        assert entry["delta"] == pytest.approx(entry["loss"] - found["bf16"]["loss"])
    layers = content["layers"]
    assert [layer["name"] for layer in layers] == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    for layer in layers:  # MXFP4 weights, then ever narrower activations
        ratios = [layer["sqnr_db"][name] for name in FORMATS]
        assert 10 < ratios[3] < min(ratios[:3]) <= max(ratios) == ratios[0] < 30
    assert content["environment"]["versions"]["transformers"] == transformers.__version__
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_losses_and_ratios_are_what_they_say() -> None:
    model, ids = model_of(), torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8)
    ids = ids[:300].long()
    windows = ids[:256].view(4, 64)  # 300 tokens fill four windows of 64
    seen: list[Any] = []
    handle = model.model.layers[1].mlp.experts.register_forward_hook(
        lambda module, given, result: seen.append((given, result))
    )
    with torch.no_grad():
        plain = [float(model(row[None], labels=row[None]).loss) for row in windows]
    handle.remove()
    steps: list[tuple[int, int, str]] = []
    report = evaluate(
        model,
        ids,
        formats=["a16w4"],
        context=64,
        batch=3,
        on_progress=lambda *step: steps.append(step),
    )
    with torch.no_grad():
        quantised = [float(model(row[None], labels=row[None]).loss) for row in windows]
        given, expected = seen[0]
        ratio = sqnr_db(mx_experts(model)[1](*given), expected)
    bf16, a16w4 = report.formats
    assert bf16.loss == pytest.approx(sum(plain) / 4, rel=1e-6)
    assert a16w4.loss == pytest.approx(sum(quantised) / 4, rel=1e-6)
    difference = torch.tensor(quantised).double() - torch.tensor(plain).double()
    assert a16w4.delta == pytest.approx(difference.mean().item(), abs=1e-6)
    assert a16w4.delta_error == pytest.approx(difference.std().item() / 2, rel=1e-3)
    assert (bf16.delta, report.tokens, report.windows) == (0.0, 252, 4)
    assert report.layers[1].sqnr_db["a16w4"] == pytest.approx(ratio, abs=0.05)
    assert steps[-1] == (512, 512, "a16w4")


def test_weights_that_were_mxfp4_lose_nothing(checkpoint, tmp_path) -> None:
    """Of an MXFP4 checkpoint bf16 and a16w4 differ by rounding alone: two orders of summation."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    convert(model, progress=False).save_pretrained(tmp_path / "mxfp4")
    summary = tmp_path / "eval.json"
    done = of_text(tmp_path / "mxfp4", 64, 256, "--formats", "a16w4", "--json", summary)
    assert done.exit_code == 0, done.output
    content = json.loads(summary.read_text("utf-8"))
    assert all(layer["sqnr_db"]["a16w4"] > 40 for layer in content["layers"])


def test_a_tokenizer_is_used_where_there_is_one(tmp_path) -> None:
    words = sorted(set(TEXT.read_text("utf-8").split()))
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["[U]", *words])}, unk_token="[U]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model_of(len(words) + 1).save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    ids = read_tokens(tmp_path, TEXT, as_bytes=False, limit=10_000)
    assert tokenizer.decode(ids.tolist()).split() == TEXT.read_text("utf-8").split()
    assert len(read_tokens(tmp_path, TEXT, as_bytes=False, limit=7)) == 7
    as_bytes = read_tokens(tmp_path, TEXT, as_bytes=True, limit=10_000)
    assert bytes(as_bytes.tolist()) == TEXT.read_bytes()
    done = of_text(tmp_path, 32, 64, "--json", "-", "--formats", "a8w4")
    assert json.loads(done.stdout)["windows"] == 2  # nothing but JSON on standard output


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--formats", "a2w2"], "--format — need some of a16w4,a8w4,a4w4,a8w4-token or bf16,mxfp8"),
        (["--context", 100000], "need at least 100000 tokens, got 5022"),
        (["--device", "cuda:99"], "--device — need a GPU of this machine"),
        (["--text", "/nowhere.txt"], "/nowhere.txt — need a text file"),
        (["--json", "/nowhere/eval.json"], "--json — need a file in an existing directory"),
        (["--plot", "/nowhere/eval.png"], "--plot — need a file in an existing directory"),
    ],
)
def test_bad_arguments_are_one_line(arguments, match, checkpoint) -> None:
    done = run(checkpoint, "--text", TEXT, "--device", "cpu", *arguments)
    assert done.exit_code == 2, done.output
    assert match in done.stderr


def test_bad_checkpoints_are_one_line(tmp_path) -> None:
    missing = run(tmp_path / "none", "--text", TEXT)
    assert (missing.exit_code, "need a checkpoint directory" in missing.stderr) == (2, True)
    empty = run(tmp_path, "--text", TEXT)
    assert (empty.exit_code, "need an existing JSON file" in empty.stderr) == (2, True)
    model_of(100).save_pretrained(tmp_path / "small")
    small = run(tmp_path / "small", "--text", TEXT, "--device", "cpu")
    assert (small.exit_code, "need a tokenizer" in small.stderr) == (2, True)


def test_a_model_trained_in_mxfp8_can_be_evaluated(tmp_path) -> None:
    train = ["--steps=8", "--batch=2", "--length=32", "--num-layers=1", "--num-experts=4"]
    done = subprocess.run(
        [sys.executable, "examples/train_transformers_moe.py", str(tmp_path / "moe"), *train]
        + ["--device=cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = of_text(tmp_path / "moe", 64, 512, "--json", "-")
    formats = json.loads(shown.stdout)["formats"]
    assert formats[0]["loss"] < math.log(256)
    assert all(abs(entry["delta"]) < 0.05 for entry in formats)


@pytest.mark.parametrize("content", ["", " \n"], ids=["nothing", "blanks"])
def test_an_empty_text_is_blamed_and_not_the_checkpoint(
    content: str, checkpoint: Path, tmp_path: Path
) -> None:
    text = tmp_path / "empty.txt"
    text.write_text(content, encoding="utf-8")
    done = run(checkpoint, "--text", text)
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: eval: {text} — need text, got none; name a text of a few thousand words\n"
    )


def test_a_text_that_cannot_be_read_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ValueError, match=r"text\.txt — need a file that can be read, got Permiss"):
        read_text(tmp_path / "text.txt")

"""Options that several commands share: names of models and formats."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mxpert.cli.main import app
from mxpert.cli.options import check_model, models_table
from mxpert.testing.problems import MODEL_SHAPES


def test_the_list_of_models_explains_each() -> None:
    lines = models_table().splitlines()
    assert len(lines) == len(MODEL_SHAPES) + 2
    for line, (name, shape) in zip(lines[1:-1], MODEL_SHAPES.items(), strict=True):
        sizes = [shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size]
        assert line.split()[:5] == [name, *map(str, sizes)]
        assert line.endswith(shape.about)


def test_an_unknown_model_is_told_where_the_list_is() -> None:
    with pytest.raises(ValueError, match=r"bench: --model — need .*dsv3-ep8.*--list-models says"):
        check_model("mixtral", "bench")


@pytest.mark.parametrize(
    "arguments", [["bench", "--list-models"], ["tune", "--list-models"]], ids=lambda a: a[0]
)
def test_commands_list_the_models(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert done.stdout.rstrip("\n") == models_table()


@pytest.mark.parametrize("name", ["dsv3-ep8", "kimi-e385", "r1-e384", "kimi-k2-tp4-shared"])
def test_names_of_the_tables_can_be_tuned(name: str) -> None:
    arguments = ["tune", "--model", name, "--dry-run", "--target", "nvidia-h200"]
    done = CliRunner().invoke(app, [*arguments, "--tokens", "1", "--format", "a8w4_token"])
    assert done.exit_code == 0, done.stderr
    assert name in done.stdout

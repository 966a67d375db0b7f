"""`make test-transformers` runs whole folders, so that no new test falls out of it."""

from __future__ import annotations

from tests.integrations.run_versions import ROOT, TESTS


def test_every_test_of_models_and_checkpoints_is_run() -> None:
    folder = ROOT / "tests" / "integrations"
    ignored = [ROOT / each.removeprefix("--ignore=") for each in TESTS if "--" in each]
    chosen = [ROOT / each for each in TESTS if "--" not in each]
    left_out = {
        file.relative_to(folder).parts[0]
        for file in folder.rglob("test_*.py")
        if any(map(file.is_relative_to, ignored)) or not any(map(file.is_relative_to, chosen))
    }
    assert left_out == {"serving"}

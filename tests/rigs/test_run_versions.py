"""`make test-transformers` runs whole folders, so that no new test falls out of it."""

from __future__ import annotations

from tests.integrations.run_versions import ROOT, TESTS, Release, to_run


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


def test_only_the_release_of_make_test_is_left_out() -> None:
    oldest, newest = Release("oldest", ""), Release("newest", "")
    assert to_run({"5.7.0": oldest, "5.17.0": newest}, "5.17.0") == {"5.7.0": oldest}
    both = {"5.7.0": oldest, "5.18.0": newest}
    assert to_run(both, "5.17.0") == both
    assert to_run({"5.17.0": newest}, "5.17.0") == {}

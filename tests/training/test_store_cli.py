"""`outrider features`: the exact size before anything is written, the question, two writers, damage."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import outrider.cli.main as main
import outrider.training.run as training_run
from tests.toys.command_line import Run, in_process
from tests.toys.target_directory import save_toy_recipe, save_toy_target


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with a random target and ten prompts; responses are made by the first command."""
    directory = tmp_path_factory.mktemp("toy")
    save_toy_target(directory / "target", layers=5)
    return save_toy_recipe(directory, "features: {dtype: int8, shard_tokens: 70}\n")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`outrider features ARGS` in this process: (exit status, stdout, stderr)."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    return in_process(monkeypatch, capfd, "features")


@pytest.fixture
def store(recipe: Path) -> Path:
    """Where the recipe's store goes; empty at the start of every test."""
    directory = recipe.parent / "out" / "features"
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def shard_bytes(store: Path) -> int:
    return sum(path.stat().st_size for path in store.glob("*.safetensors"))


def test_the_size_is_said_before_and_true_after(run: Run, recipe: Path, store: Path) -> None:
    status, said, errors = run("plan", recipe)
    assert status == 0, errors
    found = re.search(r"(\d+) bytes \(0\.00 GB\) in (\d+) shards, int8: 7 samples", said)
    assert found and not store.exists()
    size, shards = int(found[1]), int(found[2])
    status, _, errors = run("write", recipe, "--limit-gb", 1e-9)
    assert status == 2 and f"this writes {size} bytes" in errors and "--yes" in errors and not store.exists()
    assert run("write", recipe, "--limit-gb", 1e-9, "--yes")[0] == 0
    assert shard_bytes(store) == size and len(list(store.glob("*.safetensors"))) == shards
    status, said, _ = run("write", recipe, "--limit-gb", 1e-9)  # nothing is left to write, so nothing is asked
    assert status == 0 and f"0 shards written, {shards} were there" in said
    assert run("check", recipe)[0] == 0


def test_ranks_share_the_shards_and_end_with_the_bytes_of_one_process(
    run: Run, recipe: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("write", recipe)[0] == 0
    alone = {path.name: path.read_bytes() for path in store.iterdir()}
    shutil.rmtree(store)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, said, _ = run("write", recipe)
    assert status == 0 and "not complete yet" in said
    numbers = {int(path.stem.rpartition("-")[2]) for path in store.glob("*.safetensors")}
    assert numbers and all(number % 2 for number in numbers)
    status, _, errors = run("check", recipe)
    assert status == 2 and "not complete" in errors and "shard-00000" in errors
    assert run("write", recipe, "--shard", 0, "--of", 2)[0] == 0
    assert {path.name: path.read_bytes() for path in store.iterdir()} == alone


def test_damage_is_named_and_one_shard_rebuilt(run: Run, recipe: Path, store: Path) -> None:
    assert run("write", recipe)[0] == 0
    path = store / "shard-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    status, _, errors = run("check", recipe)
    assert status == 2 and "shard-00001.safetensors is truncated" in errors and "--only 1" in errors
    assert run("write", recipe, "--only", 1)[0] == 0 and path.read_bytes() == whole
    assert run("check", recipe)[0] == 0


def test_mistakes(run: Run, recipe: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "processes are numbered 0 to 1" in run("write", recipe, "--shard", 2, "--of", 2)[2]
    assert "--only 77: the store has the shards 0 to" in run("write", recipe, "--only", 77)[2]
    assert "holds no feature store" in run("check", recipe)[2]
    monkeypatch.setattr("outrider.utils.files.free_bytes", lambda directory: 5)
    monkeypatch.setattr(training_run, "load_target", lambda *_, **__: pytest.fail("a model is loaded"))
    monkeypatch.setattr("outrider.training.setup._CHECKPOINT_BYTES", 0)
    status, _, errors = run("write", recipe, "--yes")
    assert status == 2 and "the store still needs" in errors and "nothing was written" in errors and not store.exists()


def test_a_byte_budget_fills_a_window(run: Run, recipe: Path, store: Path) -> None:
    status, said, errors = run("write", recipe, "--max-bytes", 30_000)
    assert status == 0, errors
    window = store / "window-0-of-1"
    assert 0 < shard_bytes(window) <= 30_000 and f"window of {shard_bytes(window)} bytes" in said


@pytest.mark.parametrize(
    ("verb", "words"),
    [("plan", []), ("write", ["--shard", "--of", "--yes"]), ("check", [])],
)
def test_help(verb: str, words: list[str]) -> None:
    shown = CliRunner().invoke(main.app, ["features", verb, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert shown.exit_code == 0 and all(word in shown.output for word in words)

"""`outrider train` on a toy target: what `auto` became is said, kept on resume, and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import outrider.training.run as training_run
from outrider.training import machine
from outrider.training.trainer import Trainer
from tests.toys.command_line import Run, check_error, in_process


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`outrider train ARGS` in this process; bfloat16 products take half as long as float32 ones."""
    monkeypatch.setattr(machine, "_cached_ratio", lambda: 0.5)
    return in_process(monkeypatch, capfd, "train")


@pytest.fixture
def recipe(toy: Path, tmp_path: Path) -> Path:
    prompts = [json.dumps({"id": str(i), "turns": [f"add {i} and 3"]}) for i in range(6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        f"target: {toy / 'target'}\nout: {tmp_path / 'out'}\n"
        "data: {prompts: [{path: prompts.jsonl}], max_new_tokens: 12, max_prompt_tokens: 100, held_out: 2}\n"
        "drafter: {num_aux_layers: 2, num_hidden_layers: 1, markov_rank: 4, mask_token: <|end|>}\n"
        "optimizer: {steps: 3, sequences_per_step: 2, anchors_per_sequence: 2}\n"
        "watch: {decode_prompts: 1, decode_tokens: 4}\n"
    )
    return tmp_path / "recipe.yaml"


@pytest.fixture
def began(run: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """OUT of a run that was stopped after one of its three steps."""
    with monkeypatch.context() as patched:
        whole = Trainer.train
        patched.setattr(Trainer, "train", lambda self: whole(self, stop_after=1))
        status, said, errors = run(recipe)
    assert status == 0, errors
    assert "precision: bfloat16 (2.0x the products per second of float32 on this processor)" in said
    return recipe.parent / "out"


def state(out: Path) -> dict:
    return json.loads((out / "state" / "state.json").read_text())


def test_a_resumed_run_keeps_the_precision_it_began_with(
    run: Run, recipe: Path, began: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state(began)["settings"]["precision"] == "bfloat16"
    changed = {**state(began), "threads": 64}
    (began / "state" / "state.json").write_text(json.dumps(changed))
    monkeypatch.setattr(machine, "_cached_ratio", lambda: 22.0)
    status, said, errors = run(recipe)
    assert status == 0, errors
    assert "precision: bfloat16 (as the run began)" in said and "the run was at 64" in said
    assert state(began)["step"] == 3 and state(began)["threads"] < 64
    recorded = json.loads((began / "drafter" / "outrider.json").read_text())["recipe"]
    assert (recorded["precision"], recorded["device"]) == ("bfloat16", "cpu")


def test_another_precision_than_the_runs_is_refused(run: Run, recipe: Path, began: Path) -> None:
    check_error(run(recipe, "precision=float32"), "precision was bfloat16, is now float32")


def test_a_finished_run_and_a_changed_one_load_nothing(
    run: Run, recipe: Path, began: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    def without_loading(*changes: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patched:
            patched.setattr(training_run, "load_target", loads)
            return run(recipe, *changes)

    check_error(without_loading("optimizer.steps=5"), "optimizer.steps was 3, is now 5")
    check_error(without_loading("optimizer.steps=5"), f"start_from={began / 'drafter'}")
    with pytest.raises(AssertionError, match="a model is loaded"):
        without_loading()  # two steps are left
    trained = run(recipe)
    assert trained[0] == 0 and "step 3 of 3: loss" in trained[1], "where there is no terminal for a bar"
    status, said, errors = without_loading()
    assert status == 0, errors
    assert "already finished: 3 of 3 steps, held-out expected accepted length 1." in said
    check_error(without_loading("optimizer.steps=5"), "optimizer.steps was 3, is now 5")
    (began.parent / "file").write_text("")
    check_error(without_loading(f"out={began.parent / 'file'}"), "is a file")


def test_a_run_of_epochs_ends_after_them(run: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four conversations in twos: its two steps are known when they are asked for again."""
    recipe.write_text(recipe.read_text().replace("steps: 3, ", "epochs: 1, "))
    assert run(recipe)[0] == 0
    monkeypatch.setattr(training_run, "load_target", lambda *_, **__: pytest.fail("a model is loaded"))
    status, said, errors = run(recipe)
    assert status == 0, errors
    assert "already finished: 2 of 2 steps" in said


@pytest.mark.parametrize(
    ("text", "message"), [(None, "prompts.jsonl"), ('{"id": "1"}\n', "prompts.jsonl:1"), ("{", "prompts.jsonl:1")]
)
def test_prompts_are_read_before_a_model_is(
    run: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str
) -> None:
    prompts = recipe.parent / "prompts.jsonl"
    prompts.unlink() if text is None else prompts.write_text(text)
    monkeypatch.setattr(training_run, "load_target", lambda *_, **__: pytest.fail("a model is loaded"))
    check_error(run(recipe), message)


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "load_target", lambda *_, **__: pytest.fail("a model is loaded"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["start_from=TOY/other"], "made for another target: vocab_size is"),
        (["start_from=TOY/drafter", "drafter.block_size=16"], "contradicts TOY/drafter: block_size is 16, there 7"),
        (["start_from=TOY/drafter", "drafter={algorithm: eagle3}"], "algorithm is eagle3, there dspark"),
        (["start_from=TOY/drafter", "drafter.num_hidden_layers=3"], "num_hidden_layers is 3, there"),
        (["start_from=TOY/target"], "TOY/target/config.json"),
        (["drafter.target_layer_ids=[0, 9]"], "do not fit a target of 5 layers"),
        (["drafter.mask_token=<|nowhere|>"], "is not one token of"),
        (["data.max_new_tokens=9999"], "reads 256 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(
    run: Run, recipe: Path, toy: Path, nothing_loads: None, changes: list[str], message: str
) -> None:
    text = recipe.read_text()
    if changes[0].startswith("start_from"):  # whose fields are taken from there
        recipe.write_text("".join(line for line in text.splitlines(True) if not line.startswith("drafter")))
    check_error(run(recipe, *(change.replace("TOY", str(toy)) for change in changes)), message.replace("TOY", str(toy)))


def test_a_full_disk_is_said_before_a_model_is_loaded(
    run: Run, recipe: Path, nothing_loads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.utils.files.free_bytes", lambda directory: 1000)
    check_error(run(recipe), "training, for its checkpoints, needs")
    assert not (recipe.parent / "out").exists()


def test_a_run_that_patience_ended_is_finished(run: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ["watch.decode_every=null", "eval_every=1", "watch.min_delta=100"]
    status, said, errors = run(recipe, *ended, "watch.patience=1")
    assert status == 0 and "patience of 1 checks spent" in said, errors
    with monkeypatch.context() as patched:
        patched.setattr(training_run, "load_target", lambda *_, **__: pytest.fail("a model is loaded"))
        status, said, errors = run(recipe, *ended, "watch.patience=1")
        assert status == 0, errors
        assert "already finished: 2 of 3 steps" in said and "raise watch.patience=1 to go on" in said
    status, said, errors = run(recipe, *ended, "watch.patience=2")
    assert status == 0 and state(recipe.parent / "out")["step"] == 3, errors


def test_the_way_out_of_a_finished_run_never_ends_worse(run: Run, recipe: Path, began: Path) -> None:
    """Going on with a learning rate that ruins the drafter: the best one is the start, evaluated as step 0."""
    assert run(recipe)[0] == 0
    out = recipe.parent / "more"
    changes = [f"start_from={began / 'drafter'}", f"out={out}", "watch.decode_every=null", "eval_every=1"]
    status, said, errors = run(recipe, *changes, "optimizer.learning_rate=100")
    assert status == 0, errors
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    held = [line for line in lines if line["group"] == "held_out"]
    assert [line["step"] for line in held] == [0, 1, 2, 3]
    best = json.loads((out / "best" / "outrider.json").read_text())
    lengths = [line["expected_length_greedy"] for line in held]
    assert best["step"] == lengths.index(max(lengths)), lengths
    said_of_best = f"best drafter: step {best['step']}" if best["step"] else "no step was better than the drafter that"
    assert said_of_best in said
    again = run(recipe, *changes, "optimizer.learning_rate=100")
    assert again[0] == 0 and (f"of step {best['step']}," if best["step"] else "No step was better") in again[1]
    assert f"--drafter {out / 'best'} --out {out / 'eval'} --tasks YOUR_PROMPTS.jsonl" in said.splitlines()[-1]


def test_going_on_with_another_draft_vocabulary(run: Run, recipe: Path, began: Path) -> None:
    """What is checked before a model is loaded knows the size alone."""
    out = recipe.parent / "other"
    changes = [f"start_from={began / 'drafter'}", f"out={out}", "drafter.draft_vocab_size=40"]
    status, said, errors = run(recipe, *changes, "optimizer.steps=1")
    assert status == 0, errors
    assert "draft vocabulary: 40 tokens, " in said + errors
    assert json.loads((out / "drafter" / "config.json").read_text())["draft_vocab_size"] == 40

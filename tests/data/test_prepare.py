"""`outrider prepare` as a process: kill -9 at random points, the last run's bytes, counts, recipes and mistakes."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import outrider.training.responses as job
from outrider.cli.command import parse
from outrider.cli.data import prepare
from outrider.data.responses import companion_file, read_responses
from outrider.target.model import Target, load_target
from outrider.training import dataset
from outrider.training.dataset import existing_responses, recipe_samples
from outrider.training.recipe import Recipe
from outrider.training.responses import ResponseJob
from tests.toys.command_line import check_error, in_process
from tests.toys.openai_server import ToyServer, dead_url, serving
from tests.toys.tokenizer import byte_tokenizer
from tests.toys.zygote import Zygote, run_killed, size, write_toy, zygote_in

KILLS = 10


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with zygote_in(tmp_path_factory.mktemp("zygote")) as started:
        yield started


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def served(toy: Path) -> Target:
    return load_target(toy / "target")


def command(toy: Path, out: Path, *more: object) -> tuple[object, ...]:
    fixed: tuple[object, ...] = (
        "--threads",
        1,
        "--max-new-tokens",
        12,
        "--max-prompt-tokens",
        200,
        "--temperature",
        1.1,
        "--seed",
        5,
        "--batch-size",
        3,
    )
    recipe = toy / "float32.yaml"  # bfloat16 rounds differently for another number of rows, and than the toy servers
    section = {"prompts": [{"path": "-"}]}
    recipe.write_text(json.dumps({"target": "-", "out": "-", "precision": "float32", "data": section}))
    fixed += ("--recipe", recipe)
    return ("prepare", "--target", toy / "target", "--prompts", toy / "prompts.jsonl", "--out", out, *fixed, *more)


def kill_again_and_again(
    zygote: Zygote, whole: Path, args: tuple[object, ...], out: Path, chance: random.Random
) -> int:
    """Run `args`, killed KILLS times at random moments after random sizes of the journal; how many runs died."""
    journal = companion_file(out, "journal")

    def run() -> int:
        limit = size(journal) + chance.randrange(size(whole) // (2 * KILLS))
        return run_killed(zygote, args, lambda: size(journal) > limit, chance.random() * 0.02)

    killed = sum(run() for _ in range(KILLS))
    status, output = zygote.run(*args)
    assert status == 0, output
    return killed


@pytest.mark.slow
def test_killed_at_random_points_the_local_engine_ends_with_the_same_bytes(
    zygote: Zygote, toy: Path, tmp_path: Path
) -> None:
    single = ("--batch-size", 1)  # as many moments to be killed at as there are turns
    status, output = zygote.run(*command(toy, tmp_path / "whole.jsonl", *single))
    assert status == 0, output
    assert "36 turns = 36 done + 0 skipped (prompt too long) + 0 failed + 0 waiting" in output
    assert "tokens/s in this run" in output and "finished by themselves" in output and "50%" in output
    out = tmp_path / "out.jsonl"
    killed = kill_again_and_again(zygote, tmp_path / "whole.jsonl", command(toy, out, *single), out, random.Random(7))
    assert killed == KILLS
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".lock") == ["out.jsonl", "whole.jsonl"], (
        "nothing is left behind"
    )


@pytest.mark.slow
def test_killed_at_random_points_servers_end_with_the_same_bytes(
    zygote: Zygote, toy: Path, served: Target, tmp_path: Path
) -> None:
    chance = random.Random(3)
    faults = ["429", "500", "drop", "malformed"]

    def fault(number: int, body: dict[str, object]) -> str | None:
        time.sleep(0.01)
        return chance.choice(faults) if chance.random() < 0.2 else None

    with serving(ToyServer(served, fault)) as a, serving(ToyServer(served, fault)) as b:
        more = ("--base-url", a.url, "--base-url", b.url, "--base-url", dead_url(), "--concurrency", 2)
        status, output = zygote.run(*command(toy, tmp_path / "whole.jsonl", *more))
        assert status == 0 and "36 turns = 36 done" in output, output
        out = tmp_path / "out.jsonl"
        args = command(toy, out, *more)
        assert kill_again_and_again(zygote, tmp_path / "whole.jsonl", args, out, random.Random(1)) == KILLS
        assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    status, output = zygote.run(*command(toy, tmp_path / "local.jsonl", "--batch-size", 1))
    assert status == 0
    assert read_responses(tmp_path / "local.jsonl")[1] == read_responses(out)[1], "server and engine say the same"


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_what_was_finished_inside_a_batch_is_kept(
    zygote: Zygote, toy: Path, tmp_path: Path, by: signal.Signals
) -> None:
    lengths = ("--max-prompt-tokens", 56, "--max-new-tokens", 200)

    def args(name: str) -> tuple[object, ...]:  # one batch of 24 responses, which end at steps of their own
        return command(toy, tmp_path / name, *lengths, "--batch-size", 24, "--max-turns", 1)

    journal = companion_file(tmp_path / "out.jsonl", "journal")

    def kept() -> int:
        lines = journal.read_text().splitlines()[1:] if journal.exists() else []
        return sum(len(json.loads(line)["replies"]) for line in lines if line.endswith("]}"))

    status, output = zygote.run(*args("whole.jsonl"))
    assert status == 0 and f"loading {toy / 'target'}\nanswering 24 prompts with" in output, output
    assert "the first one, as the target reads it:\n  <|im_start|>user\\n\n  word a<|im_end|>\\n\n" in output
    assert re.search(r"warning: \d+ of 24 responses \(\d+%\) were cut off at max_new_tokens 200", output)
    status, output = zygote.run(*args("out.jsonl"), kill_when=lambda: kept() >= 3, by=by)
    count = kept()
    assert 3 <= count < 24
    if by == signal.SIGINT:
        said = re.fullmatch(r"stopped, (\d+) replies kept; the same command goes on", output.splitlines()[-1])
        # The signal may come while a reply is being written: it is kept, and not counted yet.
        assert status == 130 and said and 2 <= int(said[1]) <= count, output
    else:
        assert status == -signal.SIGKILL
    status, output = zygote.run(*args("out.jsonl"))
    assert status == 0 and f"; {count} replies exist" in output, output
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_control_c_while_servers_answer(zygote: Zygote, toy: Path, served: Target, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    journal = companion_file(out, "journal")

    def slow(number: int, body: dict[str, object]) -> str | None:
        time.sleep(0.05)
        return None

    with serving(ToyServer(served, slow)) as server:
        args = command(toy, out, "--base-url", server.url, "--concurrency", 2)
        status, output = zygote.run(*args, kill_when=lambda: size(journal) > 2000, by=signal.SIGINT)
        assert status == 130 and "replies kept; the same command goes on" in output, output
        assert "Traceback" not in output and "never retrieved" not in output, output
        status, output = zygote.run(*args)
    assert status == 0 and "36 turns = 36 done" in output, output


def test_failures_waiting_and_guessed_tokens_are_reported(
    zygote: Zygote, toy: Path, served: Target, tmp_path: Path
) -> None:
    out = tmp_path / "r.jsonl"
    with serving(ToyServer(served, lambda number, _: "400" if number in (2, 3) else None, ids=None)) as server:
        status, output = zygote.run(*command(toy, out, "--base-url", server.url, "--concurrency", 1, "--limit", 4))
        assert status == 0, output
        assert "6 turns = 3 done + 0 skipped (prompt too long) + 3 failed + 0 waiting" in output
        assert "100.0% of the responses came as text" in output and "r.failed.jsonl" in output
    status, output = zygote.run(
        *command(toy, out, "--base-url", dead_url(), "--model", "toy", "--limit", 4, "--retries", 0)
    )
    assert status == 2 and "cannot be reached" in output and "3 of 6 turns are waiting" in output


def test_a_recipe_gives_what_the_command_line_does_not(zygote: Zygote, toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = {
        "target": str(toy / "target"),
        "out": str(out),
        "data": {
            "prompts": [{"path": str(toy / "prompts.jsonl"), "limit": 6}],
            "max_new_tokens": 9,
            "max_prompt_tokens": 99,
            "thinking": True,
            "held_out": 2,
        },
    }
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    status, output = zygote.run("prepare", "--recipe", tmp_path / "r.yaml", "--max-new-tokens", 5, "--no-thinking")
    assert status == 0, output
    trained: list[str] = []
    target = load_target(toy / "target")
    recipe_samples(
        Recipe.model_validate({**recipe, "out": str(tmp_path / "base")}),
        Target(target.model, byte_tokenizer(chat=False), "base"),
        say=trained.append,
    )
    assert trained[0] == "base has no chat template: prompts are continued as plain text", "and so does training"
    assert trained[1] == "answering 6 prompts with base" and trained[3] == "  word a"
    assert trained[-1].startswith("warning: ") and "cut off at max_new_tokens 9" in trained[-1]
    settings, replies = read_responses(out / "responses.jsonl")
    assert settings["max_new_tokens"] == 5 and settings["max_prompt_tokens"] == 99 and settings["thinking"] is False
    assert {r.id for r in replies} == {f"c{i}" for i in range(6)}


def test_prompts_without_ids_may_be_inserted_moved_repeated_and_removed(served: Target, tmp_path: Path) -> None:
    def samples(*turns: str) -> tuple[dict[str, list[int]], str]:
        lines = [json.dumps({"turns": [turn]}) + "\n" for turn in turns]
        (tmp_path / "prompts.jsonl").write_text("".join(lines))
        section = {"prompts": [{"path": str(tmp_path / "prompts.jsonl")}], "temperature": 1.1, "max_new_tokens": 12}
        recipe = {"target": served.name, "out": str(tmp_path), "data": {**section, "held_out": 1, "batch_size": 2}}
        said: list[str] = []
        train, held_out, _ = recipe_samples(Recipe.model_validate(recipe), served, say=said.append)
        return {s.id: s.tokens for s in [*train, *held_out]}, "\n".join(said)

    first, _ = samples("one", "two", "three", "four")
    assert len(first) == 4
    more, said = samples("new", "four", "two", "one", "three")
    assert "; 4 replies exist" in said, "nothing is asked again, whatever its place"
    assert len(more) == 5 and first.items() <= more.items()
    (tmp_path / "responses.jsonl").unlink()
    again, said = samples("three", "new", "one", "four", "two")
    assert again == more and "replies exist" not in said, "another order, the same responses"
    copied, _ = samples("two", "two", "one")
    assert len(copied) == 3 and {name: more[name] for name in copied if name in more} == {
        name: copied[name] for name in copied if not name.endswith("-2")
    }, "what was removed from the file is left out, and a copy is a prompt of its own"


def test_a_run_whose_minutes_are_over_says_what_it_goes_on_with(
    served: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 0.0, 91.0])  # when it begins, and before each batch
    monkeypatch.setattr(dataset, "time", SimpleNamespace(monotonic=lambda: next(now)))
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"turns": ["word {i}"]}}\n' for i in range(6)))
    data = {"prompts": [{"path": str(tmp_path / "prompts.jsonl")}], "max_new_tokens": 8, "held_out": 1, "batch_size": 2}
    recipe = Recipe.model_validate({"target": served.name, "out": str(tmp_path), "data": data | {"max_minutes": 1.5}})
    said: list[str] = []
    train, held_out, _ = recipe_samples(recipe, served, say=said.append)
    assert len(train) + len(held_out) == 2
    assert "data.max_minutes, 1.5, is over: 2 of 6 turns are answered, which training goes on with" in said


def test_mistakes_end_in_one_line(zygote: Zygote, toy: Path, tmp_path: Path) -> None:
    target = ("--target", toy / "target")
    for args, message in [
        (("--prompts", "train_math", "--out", "x.jsonl"), "--target is missing"),
        ((*target, "--out", tmp_path / "x.jsonl"), "--prompts is missing"),
        ((*target, "--prompts", "train_math"), "--out is missing"),
        ((*target, "--limit", 3, "--out", "x.jsonl"), "--limit and --max-turns belong to --prompts"),
        ((*target, "--prompts", "train_math", "--out", "x.jsonl"), "is 768 and"),
    ]:
        status, output = zygote.run("prepare", *args)
        assert status == 2 and message in output and "Traceback" not in output, output
    assert not (tmp_path / "x.jsonl").exists()


def recipe_for(toy: Path, out: Path, responses: Path) -> Recipe:
    data = {"responses": str(responses), "held_out": 4}
    return Recipe.model_validate({"target": str(toy / "target"), "out": str(out), "data": data})


def test_training_uses_a_finished_file_as_it_is(zygote: Zygote, toy: Path, served: Target, tmp_path: Path) -> None:
    responses = tmp_path / "r.jsonl"
    status, output = zygote.run(*command(toy, responses))
    assert status == 0, output
    before = responses.read_bytes()
    train, held_out, settings = recipe_samples(recipe_for(toy, tmp_path / "out", responses), served)
    assert len({s.id for s in held_out}) == 4 and len({s.id for s in train}) == 20
    assert responses.read_bytes() == before and settings["target"] == served.name
    tokens = sum(s.num_supervised for s in [*train, *held_out])
    assert tokens == sum(len(r.response) for r in read_responses(responses)[1])
    with pytest.raises(ValueError, match=r"no responses file .*nope\.jsonl; `outrider prepare` makes one"):
        recipe_samples(recipe_for(toy, tmp_path, tmp_path / "nope.jsonl"), served)
    companion_file(tmp_path / "half.jsonl", "journal").write_text("{}\n")
    with pytest.raises(ValueError, match="`outrider prepare` is unfinished"):
        recipe_samples(recipe_for(toy, tmp_path, tmp_path / "half.jsonl"), served)
    assert served.tokenizer is not None
    plain = byte_tokenizer()
    plain.chat_template = str(plain.chat_template) + " "
    with pytest.raises(ValueError, match="another chat template"):
        existing_responses(responses, Target(served.model, plain, served.name))
    untold = tmp_path / "untold.jsonl"
    untold.write_text(responses.read_text().replace("chat_template_sha256", "other_sha256", 1))
    with pytest.raises(ValueError, match=r"untold\.jsonl does not say with which chat template"):
        existing_responses(untold, Target(served.model, served.tokenizer, served.name))
    with pytest.raises(ValueError, match="another target"):
        existing_responses(responses, Target(served.model, served.tokenizer, "other"))


def test_a_directory_of_prompts_on_the_command_line_comes_before_the_recipes(
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "recipe.yaml"
    section = {"prompts": [{"path": "mine"}], "directory": "/recipes"}
    recipe.write_text(json.dumps({"target": "t", "out": str(tmp_path), "data": section}))
    for given, expected in ((("--data-dir", "/given"), "/given"), ((), "/recipes")):
        config = parse(prepare, "prepare", ["--recipe", str(recipe), *given])
        assert ResponseJob.of(config).data.directory == expected


def test_what_cannot_be_is_refused_before_the_target_is_loaded(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "load_target", lambda *_, **__: pytest.fail("the target is loaded"))
    run, out = in_process(monkeypatch, capfd), tmp_path / "out" / "r.jsonl"
    check_error(run(*command(toy, out, "--max-new-tokens", 9999)), "--max-prompt-tokens + --max-new-tokens is 10199")
    (tmp_path / "bad.jsonl").write_text('{"id": "1"}\n')
    check_error(run(*command(toy, out, "--prompts", tmp_path / "bad.jsonl")), "bad.jsonl:1")
    monkeypatch.setattr("outrider.utils.files.free_bytes", lambda directory: 36 * 12 * 7 - 1)
    check_error(run(*command(toy, out)), "a file of the longest responses needs 3024 bytes")
    assert not out.parent.exists()

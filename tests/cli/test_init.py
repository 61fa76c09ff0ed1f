"""`outrider init`: the split, the recipe and the commands, for a toy fine-tune whose base has a drafter."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import outrider.checkpoints.published as published
import outrider.cli.main as main
import outrider.cli.train as train
from outrider.checkpoints.checkpoint import add_metadata, load_checkpoint
from outrider.data.chat import Chat, render
from outrider.data.conversations import Conversation, content_id
from outrider.data.sources import load_prompts
from outrider.training.first_run import Plan, prompt_tokens, split_prompts
from outrider.training.recipe import Recipe, load_recipe
from tests.toys.command_line import Run, check_error


def conversations(count: int, start: int = 0) -> list[Conversation]:
    """Different prompts with ids of their content."""
    turns = [(f"What is {number} + 1?",) for number in range(start, start + count)]
    return [Conversation(content_id(turn, ()), turn) for turn in turns]


def write(place: Path, prompts: Sequence[str]) -> Path:
    place.write_text("".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in prompts))
    return place


@pytest.fixture
def place(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with models/a, a drafter for the toy target, and mine/, a fine-tune of that target."""
    shutil.copytree(toy / "drafter", tmp_path / "models" / "a")
    add_metadata(tmp_path / "models" / "a", target=str(toy / "target"))
    shutil.copytree(toy / "target", tmp_path / "mine")
    (tmp_path / "mine" / "README.md").write_text(f"---\nbase_model: {toy / 'target'}\n---\n")
    monkeypatch.setattr(published, "_places", lambda: [tmp_path / "models"])
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_adding_prompts_moves_none() -> None:
    before, after = split_prompts(conversations(60, start=20)), split_prompts(conversations(400)[::-1])
    for name in ("train", "held_out", "test"):
        known, now = set(getattr(before, name)), set(getattr(after, name))
        assert known and known < now, name
    shares = [len(part) / 400 for part in after[:3]]
    assert shares == pytest.approx([0.7, 0.1, 0.2], abs=0.05)
    assert sum(map(len, after[:3])) == 400 and after.duplicates == 0
    again = split_prompts([*conversations(60, start=20), Conversation("other id", ("What is 20 + 1?",))])
    assert again == before._replace(duplicates=1), "a copy is one by its content, and the first one's id stays"


def test_every_part_has_a_prompt_and_every_prompt_an_id_of_its_own() -> None:
    for start in range(30):
        assert all(split_prompts(conversations(3, start))[:3])
        train, held_out, test, _ = split_prompts(conversations(30, start))
        assert len(test) >= 10 and len(held_out) >= 4 and len(train) >= 8, "a verdict needs more than three prompts"
    with pytest.raises(ValueError, match="2 different prompts cannot be split into three parts"):
        split_prompts(conversations(2) * 3)
    same = [Conversation("a", (text,)) for text in ("one", "two", "three")]
    ids = [conversation.id for part in split_prompts(same)[:3] for conversation in part]
    assert sorted(ids) == sorted(content_id((text,), ()) for text in ("one", "two", "three"))


def test_a_fine_tune_goes_on_from_the_drafter_of_its_base(place: Path, toy: Path, run: Run) -> None:
    """Files, what is said, commands that their verbs read, and a recipe that trains."""
    prompts = write(place / "prompts.jsonl", [f"Name {n} rivers." for n in range(30)] + ["Name 3 rivers."])
    status, said, _ = run("init", "--target", place / "mine", "--prompts", prompts, "--out", place / "first")
    assert status == 0
    files = {name: load_prompts(place / "first" / f"{name}.jsonl") for name in ("train", "held_out", "test")}
    assert sorted(c.turns[0] for part in files.values() for c in part) == sorted(f"Name {n} rivers." for n in range(30))
    assert re.search(r"estimate  training .+ of memory, .+ on disk \(free: .+\)", said)
    for line in (
        f"base      {place / 'mine'} is a fine-tune of {toy / 'target'}\n",
        f"drafters  {place / 'models' / 'a'}, made for {toy / 'target'}\n",
        f"{len(files['train'])} to train, {len(files['held_out'])} held out, {len(files['test'])} to test; 1 left out",
    ):
        assert line in said
    given = [shlex.split(line) for line in said.splitlines() if line.startswith("outrider ")]
    assert [words[1] for words in given] == ["eval", "eval", "train", "doctor", "calibrate", "eval", "export"]
    group: Any = get_command(main.app)
    for _, name, *arguments in given:
        group.resolve_command(group.context_class(group), [name])[1].make_context(name, arguments)
    few = ("--tasks", f"{place}/first/held_out.jsonl,eval_chat", "--max-samples", "8")
    assert all(word in given[4] for word in few), "calibrate wants a hundred rounds"
    drafters = [words[words.index("--drafter") + 1] for words in given if "--drafter" in words]
    assert drafters[:2] == ["ngram", f"{place}/models/a"] and set(drafters[2:]) == {f"{place}/first/run/best"}

    recipe = load_recipe(place / "first" / "recipe.yaml")
    assert recipe.start_from == f"{place}/models/a" and recipe.out == f"{place}/first/run"
    short = ("optimizer.steps=2", "data.max_new_tokens=8", "data.held_out=1", "data.prompts=[{path: train.jsonl}]")
    assert run("train", place / "first" / "recipe.yaml", *short, "watch.decode_tokens=4")[0] == 0
    assert load_checkpoint(place / "first" / "run" / "drafter").metadata["history"], "it went on from another"


def test_nothing_is_written_over(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_estimated", lambda *_, **__: "not asked for")
    out, prompts = place / "first", write(place / "p.jsonl", "abcdefgh")
    command = ("init", "--target", place / "mine", "--prompts", prompts, "--out", out)
    assert run(*command)[0] == 0
    (out / "recipe.yaml").write_text("mine")
    check_error(run(*command), f"{out / 'recipe.yaml'}, {out / 'train.jsonl'}, ")
    assert (out / "recipe.yaml").read_text() == "mine"
    assert run(*command, "--force")[0] == 0 and (out / "recipe.yaml").read_text() != "mine"
    check_error(
        run("init", "--target", place / "mine", "--prompts", "none.jsonl", "--out", place / "second"), "no prompt file"
    )
    assert not (place / "second").exists()


def test_without_prompts_packaged_ones_are_split_and_not_added_again(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_estimated", lambda *_, **__: "not asked for")
    status, said, _ = run("init", "--target", place / "mine", "--out", place / "first")
    assert status == 0 and "none given, so packaged ones are used" in said
    assert [source.path for source in load_recipe(place / "first" / "recipe.yaml").data.prompts] == [
        f"{place}/first/train.jsonl"
    ]


def recipe_of(plan: Plan) -> Recipe:
    plan.directory.mkdir(exist_ok=True)
    (plan.directory / "recipe.yaml").write_text(plan.recipe())
    return load_recipe(plan.directory / "recipe.yaml")


def test_the_recipe_follows_prompts_and_machine(toy: Path, tmp_path: Path) -> None:
    chat = Chat.load(str(toy / "target"))
    few, many = conversations(20), conversations(4000)
    start = (str(toy / "drafter"), "base")

    def made(prompts: Sequence[Conversation], **more: Any) -> Recipe:
        return recipe_of(Plan(chat, tmp_path / "a: b", prompts, 5, **more))

    adapted, fresh = made(few, start_from=start), made(few)
    assert adapted.start_from == start[0] and fresh.start_from is None and fresh.drafter.algorithm == "dspark"
    assert adapted.optimizer.steps < fresh.optimizer.steps and [s.limit for s in fresh.data.prompts] == [
        None,
        60,
        60,
        60,
    ]
    assert made(many, start_from=start).start_from is None, "enough for a drafter of its own"
    assert made(many).optimizer.steps > fresh.optimizer.steps and len(made(many).data.prompts) == 1
    assert made(few, gpu=True).data.max_minutes is None and made(few).data.max_minutes == 10
    assert fresh.data.max_prompt_tokens + fresh.data.max_new_tokens <= chat.max_context


def test_steps_are_as_many_as_there_is_time_for(toy: Path, tmp_path: Path) -> None:
    few = Plan(Chat.load(str(toy / "target")), tmp_path, conversations(20), 5)
    assert few.budget == 1200 and few.within_budget(200, fixed=200, seconds_per_step=5) is few
    slow = few.within_budget(200, fixed=200, seconds_per_step=10)
    assert recipe_of(slow).optimizer.steps == 100 and recipe_of(few).optimizer.steps == 300
    assert recipe_of(few.within_budget(200, fixed=2000, seconds_per_step=10)).optimizer.steps == 20
    assert recipe_of(few.within_budget(999, fixed=200, seconds_per_step=1.1)).optimizer.steps == 300, "never more"


def test_the_longest_prompt_counts_earlier_responses(toy: Path) -> None:
    chat, turns, replies = Chat.load(str(toy / "target")), ("a first turn", "and more", "and again"), ["x" * 50] * 2
    counted = prompt_tokens(chat, Conversation("c", turns), max_new_tokens=50)
    assert counted == len(render(chat.tokenizer, turns, replies)), "a token per byte"

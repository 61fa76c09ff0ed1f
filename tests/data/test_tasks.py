"""Prompts by name: what is asked, the cache, and where they come from without network."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import datasets
import httpx
import pytest

import outrider.data.sources as sources
from outrider.data.conversations import Conversation, Turn
from outrider.data.regenerate import DataSection, PromptSource
from outrider.data.responses import read_responses
from outrider.data.sources import (
    TASKS,
    EvaluationText,
    find_prompts,
    load_prompts,
    load_tasks,
    prompt_sources,
    shipped_sets,
)
from outrider.training.dataset import recipe_prompts
from outrider.training.recipe import load_recipe
from tests.toys.command_line import Run, check_error

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "2 + 2?", "answer": "4"},
    "math500": {"problem": "x = 1?"},
    "aime25": {"problem_idx": 1, "problem": "n?", "answer": 7},
    "aime24": {"id": 60, "problem": "m?", "solution": "...", "answer": "204"},
    "gpqa": {"Question": "Which? ", "Correct Answer": " b", "Incorrect Answer 1": "d\n", "Incorrect Answer 2": "a",
             "Incorrect Answer 3": "c"},
    "humaneval": {"prompt": "def f():\n", "test": "..."},
    "mbpp": {"prompt": "Write f.", "code": "..."},
    "livecodebench": {"question_content": "Sum them.", "starter_code": "class S:", "private_test_cases": "..."},
    "swe-bench-lite": {"repo": "a/b", "problem_statement": "It fails.", "patch": "...", "hints_text": ""},
    "speed-bench": {"question_id": "q", "category": "coding", "turns": ["One?", "Two?"], "multiturn": True},
    "hermes-tools": {"id": "x", "tools": "[...]", "conversations": [
        {"from": "system", "value": "Tools: f"}, {"from": "human", "value": "Call f."},
        {"from": "gpt", "value": "<tool_call>"}, {"from": "tool", "value": "7"}, {"from": "gpt", "value": "7."}
    ]},
    "mt-bench": {"prompt": ["First?", "Second?"], "category": "writing"},
    "alpaca": {"instruction": "Translate.", "input": "Hund", "output": "dog"},
    "arena-hard": {"uid": "u", "prompt": "Hard.", "category": "c"},
    "gsm8k-train": {"question": "3 + 3?", "answer": "6"},
    "sharegpt": {"id": "x_0", "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}]},
    "ultrachat": {"prompt": "A?", "prompt_id": "p", "messages": [
        {"role": "user", "content": "A?"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "B?"}
    ]},
    "codealpaca": {"instruction": "Sort it.", "input": "[2, 1]", "output": "[1, 2]"},
    "perfectblend": {"conversations": [{"from": "human", "value": "Sum."}], "source": "math"},
}  # fmt: skip
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TURNS: dict[str, tuple[Turn, ...]] = {
    "gsm8k": ("2 + 2?" + BOXED,),
    "math500": ("x = 1?" + BOXED,),
    "aime25": ("n?" + BOXED,),
    "aime24": ("m?" + BOXED,),
    "gpqa": ("Which?\n\nA) a\nB) b\nC) c\nD) d" + BOXED,),
    "humaneval": (
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n\n```",
    ),
    "mbpp": ("Write f.",),
    "livecodebench": (
        "Write a Python program that solves this problem.\n\nSum them.\n\n"
        "Start from this code:\n```python\nclass S:\n```",
    ),
    "swe-bench-lite": ("Fix this issue of the repository a/b. Answer with a patch.\n\nIt fails.",),
    "speed-bench": ("One?", "Two?"),
    "hermes-tools": (
        ({"role": "system", "content": "Tools: f"}, {"role": "user", "content": "Call f."}),
        ({"role": "tool", "content": "7"},),
    ),
    "mt-bench": ("First?", "Second?"),
    "alpaca": ("Translate.\n\nInput:\nHund",),
    "arena-hard": ("Hard.",),
    "gsm8k-train": ("3 + 3?" + BOXED,),
    "sharegpt": ("Hi?",),
    "ultrachat": ("A?", "B?"),
    "codealpaca": ("Sort it.\n\nInput:\n[2, 1]",),
    "perfectblend": ("Sum.",),
}
DATA_SETS = {
    ("mlabonne/open-perfectblend", "train"),
    ("HuggingFaceH4/ultrachat_200k", "train_sft"),
    ("Aeala/ShareGPT_Vicuna_unfiltered", "train"),
    *(("nvidia/Nemotron-Post-Training-Dataset-v2", split) for split in ("chat", "code", "math", "stem")),
}
Asked = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    """Calls of `datasets.load_dataset`, which has the rows above 600 times."""
    calls: Asked = []

    def load_dataset(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        calls.append((args, kwargs))
        repo = (
            args[0]
            if args[0] != "json"
            else "/".join(kwargs["data_files"].removeprefix("hf://datasets/").split("/")[:2])
        )
        split = "train" if args[0] == "json" else kwargs["split"]
        return 600 * [ROWS[next(task.name for task in TASKS if (task.repo, task.split) == (repo, split))]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "hub_answers", lambda: True)
    return calls


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, no directory of prompts, and neither offline nor asked before."""
    monkeypatch.setattr(sources, "cache_dir", lambda: tmp_path / "cache")  # models stay where they are
    for name in ("OUTRIDER_DATA", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sources, "_unreachable", [])
    sources._say_once.cache_clear()


@pytest.mark.parametrize("name", [task.name for task in TASKS])
def test_prompts_of_a_task(name: str, asked: Asked, tmp_path: Path) -> None:
    found = load_prompts(name)
    most = min(600, next(task.most for task in TASKS if task.name == name))
    assert len(found) == most and found[0].id == f"{name}-1" and len(asked) == 1 and asked[0][1]["streaming"]
    assert found[0].turns == TURNS[name]
    again = load_prompts(name, 3)
    assert again == found[:3] and len(asked) == 1, "the second time it is read from the cache"
    assert [path.name for path in (tmp_path / "cache" / "tasks").iterdir()] == [f"{name}.jsonl"]


@pytest.mark.parametrize(
    ("name", "column", "turns"),
    [
        ("livecodebench", "starter_code", ("Write a Python program that solves this problem.\n\nSum them.",)),
        ("alpaca", "input", ("Translate.",)),
    ],
)
def test_a_column_that_may_be_empty(
    name: str, column: str, turns: tuple[str, ...], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROWS, name, {**ROWS[name], column: ""})
    assert load_prompts(name, 1)[0].turns == turns


def test_prompts_that_a_data_set_masks_are_left_out(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    masked = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [{"turns": [masked]}, {"turns": ["One?"]}, {"turns": ["Two?", masked]}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    assert [(one.id, one.turns) for one in load_prompts("speed-bench")] == [("speed-bench-2", ("One?",))]


def test_files_inside_a_data_set_are_read_without_its_script(asked: Asked) -> None:
    load_prompts("livecodebench", 1)
    args, options = asked[0]
    assert args == ("json",) and options["data_files"] == "hf://datasets/livecodebench/code_generation_lite/test*.jsonl"


def test_all_files_of_livecodebench_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """test.jsonl, test2.jsonl, .. up to the newest, in this order; more rows than other sets have, and nothing else."""
    files = {"test.jsonl": 400, "test2.jsonl": 111, "test7.jsonl": 2, "README.jsonl": 1}
    place = tmp_path / "repo"
    place.mkdir()
    for name, count in files.items():
        rows = ({"question_content": f"{name} {i}", "starter_code": ""} for i in range(count))
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    load_dataset = datasets.load_dataset

    def from_the_place(kind: str, *, data_files: str, **options: Any) -> Any:
        found = data_files.replace("hf://datasets/livecodebench/code_generation_lite", str(place))
        return load_dataset(kind, data_files=found, **options)

    monkeypatch.setattr(datasets, "load_dataset", from_the_place)
    monkeypatch.setattr(sources, "hub_answers", lambda: True)
    asked = [str(prompt.turns[0]).rpartition("\n")[2] for prompt in load_prompts("livecodebench")]
    assert asked == [f"{name} {i}" for name, count in list(files.items())[:3] for i in range(count)]


@pytest.mark.parametrize("name", ["dflash", "dflash-coder", "dflash-llama", "dspark", "eagle3"])
def test_large_recipes_name_prompts_that_can_be_read(name: str) -> None:
    """A data set and its split, or a name that is known; what a data set's rows look like is what we read."""
    recipe = load_recipe(Path(f"large/{name}"))
    for source in recipe.data.prompts:
        if source.path.startswith("hf:"):
            repo, _, split = source.path.removeprefix("hf:").partition(":")
            assert repo.count("/") == 1 and (repo, split or "train") in DATA_SETS, source.path
        else:
            assert source.path in sources.task_names()
    data = recipe.data
    if name.startswith("dflash"):
        assert data.max_prompt_tokens + data.max_new_tokens == (4096 if name == "dflash-coder" else 3072)
        assert recipe.drafter.algorithm == "dflash" and recipe.optimizer.epochs == 6
    if name in ("dflash", "dflash-coder"):
        assert sum(source.limit or 20_000 for source in data.prompts) == 800_000


def failing(after: int) -> Callable[..., Any]:
    def rows() -> Any:
        for _ in range(after):
            yield ROWS["gsm8k"]
        raise ConnectionError("no route to huggingface.co\nmore")

    return lambda *args, **kwargs: rows()


@pytest.mark.parametrize("after", [0, 3])
def test_a_data_set_that_breaks_off_leaves_nothing(
    after: int, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", failing(after))
    assert load_prompts("gsm8k") == load_prompts("eval_math"), "the packaged set stands in"
    (said,) = [record for record in caplog.records if record.name == sources.__name__]
    assert said.levelno == logging.WARNING and said.getMessage() == (
        "prompts gsm8k: the shipped set eval_math in its place (ConnectionError: no route to huggingface.co; "
        "$OUTRIDER_DATA names no directory)"
    )
    assert not list((tmp_path / "cache").rglob("*.jsonl*")), "nothing half-written"


@pytest.mark.parametrize(
    ("error", "tried"),
    [(ConnectionError("reset"), 1), (httpx.ReadTimeout("slow"), 1), (KeyError("another column"), 2)],
)
def test_after_a_fetch_that_the_network_broke_off_no_other_is_tried(
    error: Exception, tried: int, asked: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each could take minutes to fail. What is wrong with one data set stops no other."""
    calls = []

    def load_dataset(*args: Any, **kwargs: Any) -> NoReturn:
        calls.append(args)
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_prompts("gsm8k") == load_prompts("math500") and len(calls) == tried
    last = caplog.messages[-1]
    assert ("not tried: fetching openai/gsm8k failed" in last) == (tried == 1), last


@pytest.mark.parametrize("place", ["train", "Training", "eval", "test"])
def test_what_is_trained_on_is_not_measured_with(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory below whose name says what its files are for is not looked into for the other use."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = prompt_directory(tmp_path / "data", f"{place}/gsm8k.jsonl", f"{place}/gsm8k_train.jsonl")
    trains = place.lower().startswith("train")
    for name, found in (("gsm8k", not trains), ("gsm8k-train", trains)):
        (said,) = [task for task in [find_prompts(name, data)] if task is not None]
        assert said.stands_in != found, (name, place)
    other = prompt_directory(tmp_path / "other", "eval/gsm8k.jsonl", "train/gsm8k.jsonl")
    assert load_prompts("gsm8k", directory=other)[0].turns == ("of eval/gsm8k.jsonl",)


def test_what_is_measured_with_is_not_trained_on_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A packaged evaluation set is not trained on in the place of a file that a name does not find."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = prompt_directory(tmp_path / "data", "train/gsm8k.jsonl", "eval/alpaca.jsonl", "train/sharegpt.jsonl")
    with pytest.raises(ValueError, match=r"prompts gsm8k: .* eval_math.*gsm8k-train"):
        prompt_sources(["sharegpt", "gsm8k"], str(data))
    assert not caplog.messages
    given = ["sharegpt", str(data / "train/gsm8k.jsonl"), "alpaca", "eval_code", "ultrachat"]
    assert prompt_sources(given, str(data)) == [True] * 5
    assert [line.partition(": an evaluation set")[0] for line in caplog.messages] == [
        "prompts alpaca", "prompts eval_code"
    ]  # fmt: skip


def test_a_failed_write_leaves_nothing(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        load_prompts("gsm8k")
    assert list((tmp_path / "cache" / "tasks").iterdir()) == []


def prompt_directory(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"id": "a", "turns": [f"of {name}"]}) + "\n")
    return folder


def test_without_network_a_directory_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By any spelling of the name, in it or one level below; the environment or the caller names it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    caplog.set_level(logging.INFO)
    names = ("eval/gsm8k.jsonl", "train/gsm8k_train_prompts.jsonl", "mt_bench.jsonl", "mine.jsonl")
    place = prompt_directory(tmp_path / "data", *names)
    monkeypatch.setenv("OUTRIDER_DATA", str(place))
    for name, file in zip(("gsm8k", "gsm8k-train", "mt-bench", "mine"), names, strict=True):
        assert load_prompts(name) == [Conversation("a", (f"of {file}",))]
        assert f"prompts {name}: {place / file}" in caplog.messages[-1]
    assert [label for label, _ in load_tasks(["gsm8k", "humaneval"])] == ["gsm8k", "eval_code-for-humaneval"]
    assert f"no humaneval.jsonl in {place}" in caplog.messages[-1]
    monkeypatch.delenv("OUTRIDER_DATA")
    assert load_prompts("gsm8k", directory=place)[0].turns == ("of eval/gsm8k.jsonl",)
    assert find_prompts("gsm8k") == find_prompts("gsm8k", fetch=False)._replace(  # type: ignore[union-attr]
        origin=find_prompts("gsm8k").origin  # type: ignore[union-attr]
    )
    prompt_directory(place, "gsm8k.jsonl")
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl, .*gsm8k\.jsonl: .*match gsm8k"):
        load_prompts("gsm8k", directory=place)
    with pytest.raises(ValueError, match=r"nowhere is no directory: .*\$OUTRIDER_DATA"):
        load_prompts("gsm8k", directory=tmp_path / "nowhere")


def test_the_hub_is_asked_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer at all is waited for three seconds, once; a blocked socket not even that."""
    sources.hub_answers.cache_clear()
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    monkeypatch.setattr(httpx, "head", lambda *_, **__: time.sleep(30))
    started = time.monotonic()
    assert load_prompts("humaneval") == load_prompts("eval_code") and load_prompts("mbpp", 1)
    assert time.monotonic() - started < 10
    monkeypatch.undo()
    sources.hub_answers.cache_clear()

    def blocked(*_: object, **__: object) -> NoReturn:
        raise OSError("no network")

    def unreadable(*_: object, **__: object) -> NoReturn:
        raise httpx.InvalidURL("none of httpx.HTTPError")

    failed: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(httpx, "head", unreadable)
        patch.setattr(threading, "excepthook", failed.append)
        assert not sources.hub_answers() and not failed
    sources.hub_answers.cache_clear()
    monkeypatch.setattr(socket, "socket", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    assert not sources.hub_answers()
    sources.hub_answers.cache_clear()


def test_every_name_has_a_packaged_set_that_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for task in TASKS:
        found = find_prompts(task.name)
        assert found is not None and found.path == shipped_sets()[task.shipped] and found.stands_in
        assert task.shipped.startswith("train" if task.most == 20_000 else "eval"), "never trained on what is measured"


def test_a_config_file_names_the_directory(
    run: Run, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    prompt_directory(tmp_path / "config" / "prompts", "gsm8k.jsonl")
    config = tmp_path / "config" / "eval.yaml"
    config.write_text("data-dir: prompts\ntasks: gsm8k\nmax-new-tokens: 2\n")
    command = ("eval", "--target", toy / "target", "--drafter", toy / "drafter", "--config", config)
    status, _, told = run(*command, "--out", tmp_path / "out")
    assert status == 0 and f"prompts gsm8k: {tmp_path}/config/prompts/gsm8k.jsonl" in told
    (task,) = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]
    assert task["task"] == "gsm8k" and "OUTRIDER_DATA" not in os.environ, "for that command alone"


def test_one_file_under_two_names_is_not_measured_and_fitted_on(
    run: Run, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shipped set that stands in for a data set is itself."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = ("calibrate", "--target", toy / "target", "--drafter", toy / "drafter")
    refused = run(*command, "--tasks", "eval_code,gsm8k", "--fit-tasks", "eval_math")
    check_error(refused, "gsm8k: in --tasks and --fit-tasks; measure on what was not fitted on")


def test_files_of_that_name_come_first(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").write_text('{"turns": ["Local?"]}\n')
    assert load_prompts("gsm8k")[0].turns == ("Local?",) and asked == []
    with pytest.raises(ValueError, match=r"no prompt file 'gsm9k'.*one of the tasks gsm8k, math500"):
        load_prompts("gsm9k")


# ----------------------------------------------------------------------------
# Prompts that share text with what is measured with.
# ----------------------------------------------------------------------------

THIRTEEN = "A ferry with nine red cabins leaves the old pier at seven every"  # words, as are these of no other prompt
ASKED = " Please reason step by step, and put your final answer within \\boxed{}."


def lines_of(path: Path, *prompts: str | list[str]) -> str:
    """A file of prompts, whose ids are their numbers."""
    rows = [{"id": str(i), "turns": [p] if isinstance(p, str) else p} for i, p in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def apart(tmp_path: Path) -> dict[str, str]:
    """Prompts to train on (`mine`), and two sets to measure with; each pair of them shares what the names say."""
    words = THIRTEEN.split()
    exact, twelve, eight = THIRTEEN, " ".join(words[:12]), " ".join(words[3:11])
    return {
        "sums": lines_of(
            tmp_path / "sums.jsonl",
            f"{exact} day, how often is that in a week?{ASKED}",
            f"How many apples are there in total?{ASKED}",
            f"What is seven times six?{ASKED}",
        ),
        "talk": lines_of(tmp_path / "talk.jsonl", ["Name four metals.", "Why is the sky blue?"], ["Name four birds."]),
        "mine": lines_of(
            tmp_path / "mine.jsonl",
            f"Once more: {exact}!",  # 0: thirteen words
            exact.upper().replace(" ", " - "),  # 1: the same, whatever the case and signs
            f"Once more: {twelve} morning.",  # 2: twelve, of which eight are counted
            f"They said {eight} but no more.",  # 3: exactly eight
            f"They said {eight.removeprefix(words[3])} but no more.",  # 4: seven
            f"How many pears are there in total?{ASKED}",  # 5: what the set is asked with
            "why is the sky   BLUE",  # 6: the whole of a short turn
            "Why is the sky blue? Say it in one sentence.",  # 7: it is but a part
            ["Name four trees.", f"Or this: {exact}."],  # 8: in a later turn
            "Name four metals.",  # 9: the whole of another turn of the same conversation
        ),
    }


def test_prompts_that_share_thirteen_words_are_dropped_and_counted(apart: dict[str, str]) -> None:
    told: list[str] = []
    data = DataSection(prompts=[PromptSource(path=apart["mine"])], not_in=[apart["sums"], apart["talk"]])
    assert [prompt.id for prompt in recipe_prompts(data, told.append)] == ["2", "3", "4", "5", "7"]
    assert told == [
        "| prompts | read | set | share 8 words | of the set | dropped | of the set |",
        "|---|---:|---|---:|---:|---:|---:|",
        "| mine | 10 | sums | 5 | 1 of 3 | 3 | 1 of 3 |",
        "| mine | 10 | talk | 2 | 1 of 2 | 2 | 1 of 2 |",
    ]
    other = data.model_copy(update={"not_in": [lines_of(Path(apart["talk"]), "Something else.", "And another.")]})
    told.clear()
    assert len(recipe_prompts(other, told.append)) == 10 and told[2:] == ["| mine | 10 | none | 0 | 0 | 0 | 0 |"]
    told.clear()
    assert len(recipe_prompts(other.model_copy(update={"not_in": []}), told.append)) == 10 and told == []


def test_a_limit_counts_what_is_left(apart: dict[str, str]) -> None:
    told: list[str] = []
    few = PromptSource(path=apart["mine"], limit=3)
    data = DataSection(prompts=[few], not_in=[apart["sums"]])
    assert [prompt.id for prompt in recipe_prompts(data, told.append)] == ["2", "3", "4"]
    assert told[2].startswith("| mine | 5 | sums |"), "no more are read"
    short = few.model_copy(update={"limit": None, "max_turns": 1})
    assert "8" in [prompt.id for prompt in recipe_prompts(data.model_copy(update={"prompts": [short]}))], "turns in use"


def test_what_every_prompt_of_a_set_begins_or_ends_with_is_not_its_text(tmp_path: Path) -> None:
    asked = "Write a solution to the following problem and make sure that it passes the tests:"
    set_ = lines_of(tmp_path / "s.jsonl", f"{asked} sort by age", f"{asked} sort by name", f"{asked} {THIRTEEN} day")
    text = EvaluationText([set_])
    mine = [Conversation("", (turn,)) for turn in (f"{asked} sum", f"{asked} sort by size", f"{THIRTEEN} night")]
    assert [text.shares("mine", prompt) for prompt in mine] == [False, False, True]
    alone = EvaluationText([lines_of(tmp_path / "one.jsonl", f"{asked} sort by age")])
    assert alone.shares("mine", mine[0]), "of a single prompt everything is text"
    few = EvaluationText([lines_of(tmp_path / "few.jsonl", "Write a poem about the sea", "Write a poem about rain")])
    said = [Conversation("", (turn,)) for turn in ("write a poem about rain", "about rain", "Write a poem about snow")]
    assert [few.shares("mine", prompt) for prompt in said] == [True, False, False], "a few words are no instruction"


def test_only_what_users_say_is_compared(tmp_path: Path) -> None:
    turn = ({"role": "system", "content": THIRTEEN}, {"role": "user", "content": "Go on."})
    text = EvaluationText([lines_of(tmp_path / "s.jsonl", THIRTEEN, "Other words.", "?", f"No: {THIRTEEN}")])
    assert not text.shares("mine", Conversation("", (turn,)))
    assert text.shares("mine", Conversation("", ((turn[0] | {"role": "user"},),)))
    assert not text.shares("mine", Conversation("", ("?!",))), "a turn without words"
    assert text.table()[2:] == ["| mine | 3 | s | 1 | 2 of 4 | 1 | 2 of 4 |"], "two prompts have the words"


def test_responses_say_which_prompts_were_dropped(run: Run, toy: Path, tmp_path: Path, apart: dict[str, str]) -> None:
    out = tmp_path / "r.jsonl"
    small = ("--max-new-tokens", 2, "--max-prompt-tokens", 200)
    command = ("prepare", "--target", toy / "target", "--prompts", apart["mine"], *small, "--out", out)
    sets = ("--not-in", apart["talk"], "--not-in", apart["sums"])
    status, stdout, stderr = run(*command, *sets)
    assert status == 0 and "| mine | 10 | sums | 5 | 1 of 3 | 3 | 1 of 3 |" in stdout + stderr
    assert read_responses(out)[0]["not_in"] == ["sums", "talk"]
    assert {reply.id for reply in read_responses(out)[1]} == {"2", "3", "4", "5", "7"}
    before = out.read_bytes()
    assert run(*command, *sets[2:], *sets[:2])[0] == 0 and out.read_bytes() == before
    check_error(run(*command), "was made with other settings: not_in ['sums', 'talk'], not []")
    status, _, stderr = run(*command, *sets[:2])
    assert status == 2 and "not_in ['sums', 'talk'], not ['talk']" in stderr.splitlines()[-1]
    plain = tmp_path / "plain.jsonl"
    assert run(*command[:-1], plain)[0] == 0 and "not_in" not in read_responses(plain)[0]
    status, _, stderr = run(*command[:-1], plain, *sets)
    assert status == 2 and "not_in [], not ['sums', 'talk']" in stderr.splitlines()[-1]
    tried = run(*command[:-1], tmp_path / "none.jsonl", "--not-in", "gsm9k")
    check_error(tried, "no prompt file 'gsm9k'; give a JSONL path or one of the shipped sets")
    assert "loading" not in tried[1] and not (tmp_path / "none.jsonl").exists(), "told before the work"


def test_sets_of_a_recipe_are_beside_it(tmp_path: Path, apart: dict[str, str]) -> None:
    section = {"prompts": [{"path": "mine.jsonl"}], "not_in": ["sums.jsonl", "humaneval"]}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"target": "t", "out": "o", "data": section}))
    assert load_recipe(path).data.not_in == [apart["sums"], "humaneval"]

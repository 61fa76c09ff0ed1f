"""The papers' data sets by name: prompts, the cache, and what is said without network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from outrider.data.conversations import Conversation
from outrider.data.sources import TASKS, load_prompts, task_file

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "2 + 2?", "answer": "4"},
    "math500": {"problem": "x = 1?"},
    "aime25": {"problem_idx": 1, "problem": "n?", "answer": 7},
    "humaneval": {"prompt": "def f():\n", "test": "..."},
    "mbpp": {"prompt": "Write f.", "code": "..."},
    "livecodebench": {"question_content": "Sum them.", "starter_code": "class S:", "private_test_cases": "..."},
    "mt-bench": {"prompt": ["First?", "Second?"], "category": "writing"},
    "alpaca": {"instruction": "Translate.", "input": "Hund", "output": "dog"},
    "arena-hard": {"uid": "u", "prompt": "Hard.", "category": "c"},
}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TURNS: dict[str, tuple[str, ...]] = {
    "gsm8k": ("2 + 2?" + BOXED,),
    "math500": ("x = 1?" + BOXED,),
    "aime25": ("n?" + BOXED,),
    "humaneval": (
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n\n```",
    ),
    "mbpp": ("Write f.",),
    "livecodebench": (
        "Write a Python program that solves this problem.\n\nSum them.\n\n"
        "Start from this code:\n```python\nclass S:\n```",
    ),
    "mt-bench": ("First?", "Second?"),
    "alpaca": ("Translate.\n\nInput:\nHund",),
    "arena-hard": ("Hard.",),
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
        return 600 * [ROWS[next(task.name for task in TASKS if task.repo == repo)]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return calls


@pytest.mark.parametrize("name", [task.name for task in TASKS])
def test_prompts_of_a_task(name: str, asked: Asked, tmp_path: Path) -> None:
    found = load_prompts(name)
    assert len(found) == 500 and found[0].id == f"{name}-1" and len(asked) == 1 and asked[0][1]["streaming"]
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


def test_files_inside_a_data_set_are_read_without_its_script(asked: Asked) -> None:
    load_prompts("livecodebench", 1)
    args, options = asked[0]
    assert args == ("json",) and options["data_files"] == "hf://datasets/livecodebench/code_generation_lite/test6.jsonl"


def failing(after: int) -> Callable[..., Any]:
    def rows() -> Any:
        for _ in range(after):
            yield ROWS["gsm8k"]
        raise ConnectionError("no route to huggingface.co\nmore")

    return lambda *args, **kwargs: rows()


@pytest.mark.parametrize("after", [0, 3])
def test_without_network(after: int, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", failing(after))
    path = tmp_path / "cache" / "tasks" / "gsm8k.jsonl"
    with pytest.raises(ValueError, match=r"not cached.*ConnectionError: no route.*Without network") as caught:
        load_prompts("gsm8k")
    assert str(path) in str(caught.value) and "JSONL file" in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.jsonl*")), "nothing half-written"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"id": "a", "turns": ["Mine?"]}) + "\n")
    assert load_prompts("gsm8k") == [Conversation("a", ("Mine?",))]


def test_a_failed_write_leaves_nothing(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        task_file("gsm8k")
    assert list((tmp_path / "cache" / "tasks").iterdir()) == []


def test_files_of_that_name_come_first(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").write_text('{"turns": ["Local?"]}\n')
    assert load_prompts("gsm8k")[0].turns == ("Local?",) and asked == []
    with pytest.raises(ValueError, match=r"no prompt file 'gsm9k'.*one of the tasks gsm8k, math500"):
        load_prompts("gsm9k")

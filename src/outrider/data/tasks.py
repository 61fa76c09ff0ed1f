r"""The data sets that papers on drafting measure, by name, with their prompts: gsm8k, humaneval, mt-bench, ...

    name -> $OUTRIDER_CACHE/tasks/NAME.jsonl: read if there, else made of the Hugging Face data set's rows

Mathematics asks for a boxed answer, HumanEval for a solution that passes the tests; the others are asked as they are:
the prompts of DFlash's evaluation (arXiv 2602.06036). Two have words of ours: LiveCodeBench, where DFlash's are longer
and want nothing but the program, and arena-hard, which is not in it. As in DSpark (arXiv 2607.05147) at most 500 rows
of a set count. LiveCodeBench is its newest file: all six are 4.5 GB, nearly all of it tests; figures on
it are not the papers'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from outrider.data.hub import open_dataset
from outrider.formats.files import write_atomically
from outrider.target.resolve import cache_dir

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_MOST_ROWS = 500

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """A data set on the hub. `turns` makes a conversation of a row; `files` are read instead of its own loading."""

    name: str
    repo: str
    split: str
    turns: Callable[[Row], list[str]]
    config: str | None = None
    files: str | None = None


def _problem(column: str) -> Callable[[Row], list[str]]:
    return lambda row: [row[column] + _BOXED]


def _humaneval(row: Row) -> list[str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{task}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Row) -> list[str]:
    start = f"\n\nStart from this code:\n```python\n{row['starter_code']}\n```" if row.get("starter_code") else ""
    return [f"Write a Python program that solves this problem.\n\n{row['question_content']}{start}"]


def _alpaca(row: Row) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row.get("input") else row["instruction"]]


TASKS = (
    Task("gsm8k", "openai/gsm8k", "test", _problem("question"), config="main"),
    Task("math500", "HuggingFaceH4/MATH-500", "test", _problem("problem")),
    Task("aime25", "MathArena/aime_2025", "train", _problem("problem")),
    Task("humaneval", "openai/openai_humaneval", "test", _humaneval),
    Task("mbpp", "google-research-datasets/mbpp", "test", lambda row: [row["prompt"]], config="sanitized"),
    Task("livecodebench", "livecodebench/code_generation_lite", "train", _livecodebench, files="test6.jsonl"),
    Task("mt-bench", "HuggingFaceH4/mt_bench_prompts", "train", lambda row: list(row["prompt"])),
    Task("alpaca", "tatsu-lab/alpaca", "train", _alpaca),
    Task(
        "arena-hard",
        "lmarena-ai/arena-hard-auto",
        "train",
        lambda row: [row["prompt"]],
        files="data/arena-hard-v2.0/question.jsonl",
    ),
)


def task_names() -> list[str]:
    """All of them."""
    return [task.name for task in TASKS]


def task_file(name: str) -> Path:
    """The cached JSONL file of a task, made on first use.

    Raises:
        ValueError: it is not cached and cannot be had; the message names the file that would do.
    """
    task = next(task for task in TASKS if task.name == name)
    path = cache_dir() / "tasks" / f"{name}.jsonl"
    if path.is_file():
        return path
    try:
        rows = open_dataset(task.repo, task.split, task.config, task.files)
        lines = [
            json.dumps({"id": f"{name}-{number}", "turns": task.turns(row)}, ensure_ascii=False)
            for number, row in enumerate(islice(rows, _MOST_ROWS), start=1)
        ]
        if not lines:
            raise ValueError(f"the data set {task.repo} has no rows")
    except Exception as error:  # rows are streamed: the network may fail at any of them, in any library's way
        reason = str(error).splitlines()[0] if str(error) else "no details"
        raise ValueError(
            f"task {name!r} is not cached and cannot be had from the hub ({type(error).__name__}: {reason}). Without "
            f'network, write its prompts to {path}, one {{"turns": [...]}} per line, or give a JSONL file of yours '
            "instead of its name."
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{line}\n" for line in lines), durable=True)
    return path

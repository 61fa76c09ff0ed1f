"""Sources of conversations: JSON Lines files, shipped sets, the standard library, Hugging Face data sets and tasks.

    a line of a file     {"turns": [user turn, ...]} or {"messages": [...], "tools": [...]}; `id` is optional
    a row of a data set  the column messages, conversations (from/value or role/content), turns or prompt

Hugging Face data sets are `hf:owner/name[:split]` or a directory with a data set in it. Rows are streamed, so a limit
costs no more than the rows it takes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from outrider.data.conversations import SHAPES, Conversation, parse_row
from outrider.sampling import SamplingParams
from outrider.utils.files import cache_dir, write_atomically

PREFIX = "hf:"
_COLUMNS = ("messages", "conversations", "turns", "prompt")


def dataset_conversations(source: str) -> Iterator[Conversation]:
    """Conversations of a data set, in its order; rows without anything to answer are passed over and counted.

    Raises:
        ValueError: `datasets` is not installed, the data set cannot be had, or none of its columns holds conversations.
    """
    name, _, split = source.removeprefix(PREFIX).partition(":")
    rows = open_dataset(name, split or "train")
    known = list(rows.column_names or next(iter(rows), {}))
    if not known:
        raise ValueError(f"data set {name!r} has no rows; of a directory, give a JSONL file in it.")
    if not set(_COLUMNS) & set(known):
        raise ValueError(
            f"data set {name!r} has the columns {', '.join(known)}; conversations are looked for in "
            f"{', '.join(_COLUMNS)}. Rename a column, or write the prompts to a JSONL file."
        )
    bad = total = 0
    reason = ""
    for total, row in enumerate(rows, start=1):
        try:
            conversation = parse_row(row)
        except ValueError as error:
            bad, reason = bad + 1, reason or f"row {total}: {error}"
            continue
        yield conversation
    if total == bad:
        raise ValueError(
            f"data set {name!r} has no conversation to answer in {total} rows ({reason or 'it is empty'})."
        )
    if bad:
        warnings.warn(f"{name}: {bad} of {total} rows passed over; the first: {reason}", stacklevel=2)


def open_dataset(name: str, split: str, config: str | None = None, files: str | None = None) -> Any:
    """Rows of a data set, streamed where it is on the hub; `files` inside it are JSONL files to read instead.

    Raises:
        ValueError: `datasets` is not installed, or the data set cannot be had.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"reading the data set {name!r} needs the package datasets: pip install 'outrider[hub]', or write the "
            "prompts to a JSONL file."
        ) from error
    try:
        if (Path(name) / "state.json").is_file():
            return datasets.load_from_disk(name)
        if (Path(name) / "dataset_dict.json").is_file():
            return datasets.load_from_disk(name)[split]
        if files is not None:  # by the reader of such files: the data set's own script, if any, is never run
            return datasets.load_dataset(
                "json", data_files=f"hf://datasets/{name}/{files}", split=split, streaming=True
            )
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # the library raises its own, the hub client's, fsspec's and the file system's errors
        raise ValueError(
            f"no data set {name!r} with a split {split!r}: looked for a local directory and on the Hugging Face hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}). Without network, "
            'write the prompts to a JSONL file with one {"turns": [...]} per line.'
        ) from error


# ----------------------------------------------------------------------------
# Code prompts made from the documented functions of the running Python's own standard library.
#
#     def name(arguments):  +  its docstring   ->   "implement this function"
#
# Sources are parsed, never imported, so nothing runs and nothing of the library is stored in the project.
# ----------------------------------------------------------------------------


NAME = "stdlib_functions"
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__"}
_DOCSTRING_CHARACTERS = range(40, 900)
_WORDINGS = (
    "Write a Python function for this signature and description, and check that it does what is asked.",
    "Implement the following function in Python.",
    "Complete this Python function so that it behaves as documented:",
    "Solve this programming task. The function must do what its docstring says.",
)


def stdlib_turns() -> Iterator[tuple[str, str]]:
    """(id, user turn) for every documented public function and method, in an order that mixes modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if _SKIPPED & set(place.parts) or any(part.startswith("_") for part in place.parts[:-1]):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for name, definition in _functions(tree, ".".join(place.with_suffix("").parts)):
            key = hashlib.sha256(definition.encode()).hexdigest()
            wording = _WORDINGS[int(key[:8], 16) % len(_WORDINGS)]
            found.setdefault(key, (f"stdlib-{name}-{key[:6]}", f"{wording}\n```python\n{definition}\n```"))
    yield from (found[key] for key in sorted(found))


def _functions(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None or len(docstring) not in _DOCSTRING_CHARACTERS or not (node.args.args or node.args.vararg):
            continue
        arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("cls, ")
        if arguments in ("self", "cls"):
            continue
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        text = docstring.replace("\n", "\n    ").replace("\n    \n", "\n\n")
        yield f"{module}.{node.name}", f'def {node.name}({arguments}){returns}:\n    """{text}\n    """'


# ----------------------------------------------------------------------------
# The data sets that papers on drafting measure, by name, with their prompts: gsm8k, humaneval, mt-bench, ...
#
#     name -> $OUTRIDER_CACHE/tasks/NAME.jsonl: read if there, else made of the Hugging Face data set's rows
#
# Mathematics asks for a boxed answer, HumanEval for a solution that passes the tests; the others are asked as they are:
# the prompts of DFlash's evaluation (arXiv 2602.06036). Two have words of ours: LiveCodeBench, where DFlash's are
# longer and want nothing but the program, and arena-hard, which is not in it. As in DSpark (arXiv 2607.05147) at most
# 500 rows of a set count. LiveCodeBench is its newest file: all six are 4.5 GB, nearly all of it tests; figures on
# it are not the papers'.
# ----------------------------------------------------------------------------


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
    Task("gsm8k", "openai/gsm8k", "test", turns=_problem("question"), config="main"),
    Task("math500", "HuggingFaceH4/MATH-500", "test", turns=_problem("problem")),
    Task("aime25", "MathArena/aime_2025", "train", turns=_problem("problem")),
    Task("humaneval", "openai/openai_humaneval", "test", turns=_humaneval),
    Task("mbpp", "google-research-datasets/mbpp", "test", turns=lambda row: [row["prompt"]], config="sanitized"),
    Task("livecodebench", "livecodebench/code_generation_lite", "train", turns=_livecodebench, files="test6.jsonl"),
    Task("mt-bench", "HuggingFaceH4/mt_bench_prompts", "train", turns=lambda row: list(row["prompt"])),
    Task("alpaca", "tatsu-lab/alpaca", "train", turns=_alpaca),
    Task(
        "arena-hard",
        "lmarena-ai/arena-hard-auto",
        "train",
        turns=lambda row: [row["prompt"]],
        files="data/arena-hard-v2.0/question.jsonl",
    ),
)


def task_names() -> list[str]:
    """Names of all tasks."""
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
        rows = open_dataset(task.repo, task.split, task.config, files=task.files)
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


# ----------------------------------------------------------------------------
# Any of these sources by its name or path.
# ----------------------------------------------------------------------------


def shipped_sets() -> dict[str, Path]:
    """The prompt sets inside the package, by name (train_chat, eval_math, ...)."""
    folder = Path(str(resources.files("outrider.data") / "prompts"))
    return {path.stem: path for path in sorted(folder.glob("*.jsonl"))}


def iterate_prompts(path_or_name: str | Path) -> Iterator[Conversation]:
    """Conversations of a source one by one, so that a limit need not read all of it. See `load_prompts`."""
    name = str(path_or_name)
    if name == NAME:
        yield from (Conversation(key, (turn,)) for key, turn in stdlib_turns())
    elif name in task_names() and not Path(name).exists():
        yield from _lines(task_file(name))
    elif name.startswith(PREFIX) or Path(name).is_dir():
        yield from dataset_conversations(name)
    else:
        yield from _lines(shipped_sets().get(name, Path(name)))


def load_prompts(path_or_name: str | Path, limit: int | None = None) -> list[Conversation]:
    """Read a JSONL file, a shipped set, `stdlib_functions` or a task (gsm8k, ...) by its name, `hf:owner/name[:split]`,
    or a data set's directory.

    Raises:
        ValueError: no such file or set, or a malformed line (the message names file and line).
    """
    return list(islice(iterate_prompts(path_or_name), limit))


@dataclass(frozen=True)
class TaskSettings:
    """How the prompts of tasks are decoded. `max_samples`: prompts per task, None for all; `thinking`: asked of the
    chat template."""

    max_samples: int | None = None
    max_new_tokens: int = 256
    params: SamplingParams = field(default_factory=SamplingParams)
    thinking: bool = False


def load_tasks(tasks: Sequence[str], max_samples: int | None = None) -> list[tuple[str, list[Conversation]]]:
    """(name, prompts) of each task; the name is that of the file without its ending.

    Raises:
        ValueError: a task file is missing or malformed, or has the name of another.
    """
    names = [Path(task).stem for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two task files are called {', '.join(twice)}, and results go by that name: rename one.")
    return [(name, load_prompts(task, max_samples)) for name, task in zip(names, tasks, strict=True)]


def _lines(path: Path) -> Iterator[Conversation]:
    if not path.is_file():
        raise ValueError(
            f"no prompt file {str(path)!r}; give a JSONL path or one of the shipped sets: "
            f"{', '.join([*shipped_sets(), NAME])}; one of the tasks {', '.join(task_names())}; "
            f"or {PREFIX}owner/name for a Hugging Face data set."
        )
    empty = True
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                conversation = parse_row(text)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}. Each line must be {SHAPES}.") from error
            empty = False
            yield conversation
    if empty:
        raise ValueError(f"{path}: no prompts in the file.")

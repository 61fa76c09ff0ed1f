"""Read conversations from JSON Lines files, named prompt sets, generators and Hugging Face data sets.

    a line of a file     {"turns": [user turn, ...]} or {"messages": [...], "tools": [...]}; `id` is optional
    a row of a data set  any of the shapes that data/conversations.py reads

A Hugging Face data set is `hf:owner/name[/config][:split]` or the directory of one. Rows are streamed, so a limit reads
only the rows that it takes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
import re
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import islice, takewhile
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import httpx

from outrider.data.conversations import COLUMNS, SHAPES, Conversation, instruction, messages_of, parse_row, row_of
from outrider.data.made_prompts import made_prompts
from outrider.sampling import SamplingParams
from outrider.utils.files import cache_dir, write_atomically
from outrider.utils.terminal import markdown_table

PREFIX = "hf:"
DATA = "OUTRIDER_DATA"  # environment variable with a directory of prompt files
_log = logging.getLogger(__name__)


def dataset_conversations(source: str) -> Iterator[Conversation]:
    """Yield the conversations of a data set, in its order; rows without a prompt are skipped and counted.

    Raises:
        ValueError: `datasets` is not installed, the data set cannot be loaded, or no column holds conversations.
    """
    name, _, split = source.removeprefix(PREFIX).partition(":")
    config = None
    if not Path(name).exists() and name.count("/") == 2:
        name, _, config = name.rpartition("/")
    rows = open_dataset(name, split or "train", config)
    known = list(rows.column_names or next(iter(rows), {}))
    if not known:
        raise ValueError(f"data set {name!r} has no rows; if it is a directory of JSONL files, give one of the files.")
    if not set(COLUMNS) & set(known):
        raise ValueError(
            f"data set {name!r} has the columns {', '.join(known)}, none of {', '.join(COLUMNS)}. Rename a column, or "
            "write the prompts to a JSONL file."
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
        warnings.warn(f"{name}: {bad} of {total} rows skipped; the first: {reason}", stacklevel=2)


def open_dataset(name: str, split: str, config: str | None = None, files: str | None = None) -> Any:
    """Open the rows of a data set, streamed from the hub; `files` names JSONL files in it to read instead.

    Raises:
        ValueError: `datasets` is not installed, or the data set cannot be loaded.
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
        local = Path(name).exists()
        if not local and not _offline() and not hub_answers():  # offline, the library uses its cache
            raise ConnectionError(f"{_hub()} does not answer")
        if files is not None:  # read as JSON: the data set's script, if any, never runs
            return datasets.load_dataset(
                "json", data_files=f"hf://datasets/{name}/{files}", split=split, streaming=True
            )
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # errors of the library, the hub client, fsspec and the file system
        raise ValueError(
            f"no data set {name!r} with a split {split!r}: looked for a local directory and on the Hugging Face hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}). Without network, "
            'write the prompts to a JSONL file with one {"turns": [...]} per line.'
        ) from error


# ----------------------------------------------------------------------------
# Code prompts made from the documented functions of Python's standard library.
#
#     def name(arguments):  +  its docstring   ->   "implement this function"
#
# Sources are parsed, never imported, so none of their code runs; nothing of the library is stored in the project.
# ----------------------------------------------------------------------------


_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__"}
_DOCSTRING_CHARACTERS = range(40, 900)
_WORDINGS = (
    "Write a Python function for this signature and description, and check that it does what is asked.",
    "Implement the following function in Python.",
    "Complete this Python function so that it behaves as documented:",
    "Solve this programming task. The function must do what its docstring says.",
)


def stdlib_turns() -> Iterator[tuple[str, str]]:
    """Yield (id, user turn) for every documented public function and method, in an order that mixes modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    turns: dict[str, tuple[str, str]] = {}
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
            turns.setdefault(key, (f"stdlib-{name}-{key[:6]}", f"{wording}\n```python\n{definition}\n```"))
    yield from (turns[key] for key in sorted(turns))


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


_MADE: dict[str, Callable[[], Iterator[Conversation]]] = {
    "stdlib_functions": lambda: (Conversation(key, (turn,)) for key, turn in stdlib_turns()),
    "made_prompts": lambda: (Conversation(made.id, made.turns) for made in made_prompts()),
}


# ----------------------------------------------------------------------------
# Prompts by name: the data sets that papers on drafting evaluate on (gsm8k, humaneval, mt-bench, ...) and train on
# (gsm8k-train, sharegpt, ...). A name is searched in this order, and a message reports the place:
#
#     1. the hub               fetched once, cached in $OUTRIDER_CACHE/tasks/NAME.jsonl
#     2. a directory           $OUTRIDER_DATA, or the one given by a recipe, a table or --data-dir: NAME.jsonl in it or
#                              in one of its subdirectories
#     3. the package           a shipped set of the same kind of text instead; results call it SET-for-NAME
#
# Prompts are those of DFlash's evaluation (arXiv 2602.06036): mathematics asks for a boxed answer, HumanEval for a
# solution that passes the tests, the others add nothing. Two differ: LiveCodeBench, where DFlash's prompt is longer and
# demands only the program, and arena-hard, which DFlash does not use. As in DSpark (arXiv 2607.05147) evaluation takes
# at most 500 rows of a set. LiveCodeBench is all of its files, test.jsonl to the newest, whole: 4.5 GB, mostly tests,
# are read once for its 1,055 problems.
# ----------------------------------------------------------------------------


_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_MOST_ROWS, _MOST_TRAINING_ROWS = 500, 20_000
_WHOLE = 100_000
_SECONDS_FOR_THE_HUB = 3.0

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """A named set of prompts.

    Args:
        repo: the data set on the hub.
        shipped: the packaged set that replaces it offline.
        turns: converts a row to user turns, [] if it has none; None: rows are read as in any data set.
        files: JSONL files of the data set to read instead of loading it, by a name that may have a *.
        most: maximum number of conversations.
    """

    name: str
    repo: str
    split: str
    shipped: str
    turns: Callable[[Row], list[str]] | None = None
    config: str | None = None
    files: str | None = None
    most: int = _MOST_ROWS

    @property
    def trains(self) -> bool:
        """Whether the prompts are for training and not for evaluation."""
        return self.shipped.startswith("train")


def _problem(column: str) -> Callable[[Row], list[str]]:
    return lambda row: [row[column] + _BOXED]


def _humaneval(row: Row) -> list[str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{task}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Row) -> list[str]:
    start = f"\n\nStart from this code:\n```python\n{row['starter_code']}\n```" if row.get("starter_code") else ""
    return [f"Write a Python program that solves this problem.\n\n{row['question_content']}{start}"]


def _alpaca(row: Row) -> list[str]:
    return [instruction(row["instruction"], row.get("input"))]


def _prompt(row: Row) -> list[str]:
    return [row["prompt"]]


def _gpqa(row: Row) -> list[str]:
    """Ask the question with its four answers, sorted so that their order does not reveal the correct one."""
    answers = sorted(row[name].strip() for name in ("Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))))
    choices = "\n".join(f"{letter}) {answer}" for letter, answer in zip("ABCD", answers, strict=True))
    return [f"{row['Question'].strip()}\n\n{choices}{_BOXED}"]


def _swe_bench(row: Row) -> list[str]:
    return [f"Fix this issue of the repository {row['repo']}. Answer with a patch.\n\n{row['problem_statement']}"]


_MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # in SPEED-Bench for prompts that it may not copy


def _speed_bench(row: Row) -> list[str]:
    return [] if any(_MASKED in turn for turn in row["turns"]) else list(row["turns"])


_MATH, _CODE, _CHAT = "eval_math", "eval_code", "eval_chat"
TASKS = (
    Task("gsm8k", "openai/gsm8k", "test", shipped=_MATH, turns=_problem("question"), config="main"),
    Task("math500", "HuggingFaceH4/MATH-500", "test", shipped=_MATH, turns=_problem("problem")),
    Task("aime25", "MathArena/aime_2025", "train", shipped=_MATH, turns=_problem("problem")),
    Task("aime24", "HuggingFaceH4/aime_2024", "train", shipped=_MATH, turns=_problem("problem")),
    Task("gpqa", "Idavidrein/gpqa", "train", shipped=_MATH, turns=_gpqa, config="gpqa_diamond"),
    Task("humaneval", "openai/openai_humaneval", "test", shipped=_CODE, turns=_humaneval),
    Task("mbpp", "google-research-datasets/mbpp", "test", shipped=_CODE, turns=_prompt, config="sanitized"),
    Task("livecodebench", "livecodebench/code_generation_lite", "train", shipped=_CODE, turns=_livecodebench,
         files="test*.jsonl", most=_WHOLE),
    Task("swe-bench-lite", "princeton-nlp/SWE-bench_Lite", "test", shipped=_CODE, turns=_swe_bench),
    Task("mt-bench", "HuggingFaceH4/mt_bench_prompts", "train", shipped=_CHAT, turns=lambda row: list(row["prompt"])),
    Task("alpaca", "tatsu-lab/alpaca", "train", shipped=_CHAT, turns=_alpaca),
    Task("arena-hard", "lmarena-ai/arena-hard-auto", "train", shipped=_CHAT, turns=_prompt,
         files="data/arena-hard-v2.0/question.jsonl"),
    Task("speed-bench", "nvidia/SPEED-Bench", "test", shipped=_CHAT, turns=_speed_bench, config="qualitative"),
    # Several turns with tool calls and results; the tools are in the system messages.
    Task("hermes-tools", "NousResearch/hermes-function-calling-v1", "train", shipped=_CHAT, files="func-calling.json"),
    Task("gsm8k-train", "openai/gsm8k", "train", shipped="train_math", turns=_problem("question"), config="main",
         most=_MOST_TRAINING_ROWS),
    Task("sharegpt", "Aeala/ShareGPT_Vicuna_unfiltered", "train", shipped="train_chat", most=_MOST_TRAINING_ROWS),
    Task("ultrachat", "HuggingFaceH4/ultrachat_200k", "train_sft", shipped="train_chat", most=_MOST_TRAINING_ROWS),
    Task("codealpaca", "sahil2801/CodeAlpaca-20k", "train", shipped="train_code", most=_MOST_TRAINING_ROWS),
    Task("perfectblend", "mlabonne/open-perfectblend", "train", shipped="train_chat", most=_MOST_TRAINING_ROWS),
)  # fmt: skip


def task_names() -> list[str]:
    """List the names of all tasks."""
    return [task.name for task in TASKS]


class Found(NamedTuple):
    """A prompt file, its name in results, its origin for messages, and whether it replaces another set."""

    path: Path
    label: str
    origin: str = ""
    stands_in: bool = False


def find_prompts(source: str | Path, directory: str | Path | None = None, fetch: bool = True) -> Found | None:
    """Find the file of a source by path or name; None if it is no file (a data set, generated prompts).

    Args:
        directory: directory of prompt files; None: $OUTRIDER_DATA.
        fetch: whether a named data set may be fetched from the hub.

    Raises:
        ValueError: the source is unknown, or the directory does not exist or has two files of that name.
    """
    name = str(source)
    if name in _MADE or name.startswith(PREFIX) or Path(name).is_dir():
        return None
    if Path(name).is_file():
        return Found(Path(name), Path(name).stem)
    if (shipped := shipped_sets().get(name)) is not None:
        return Found(shipped, name)
    place = directory or os.environ.get(DATA)
    task = next((task for task in TASKS if task.name == name), None)
    if task is not None:
        return _find_task(task, Path(place) if place else None, fetch)
    if place and (file := _file_in(Path(place), name)) is not None:
        return Found(file, name, str(file))
    raise ValueError(
        f"no prompt file {name!r}; give a JSONL path or one of the shipped sets: "
        f"{', '.join([*shipped_sets(), *_MADE])}; one of the tasks {', '.join(task_names())}; "
        f"or {PREFIX}owner/name for a Hugging Face data set."
    )


def _find_task(task: Task, directory: Path | None, fetch: bool) -> Found:
    path = cache_dir() / "tasks" / f"{task.name}.jsonl"
    why: str | None = "not fetched"
    if fetch and not path.is_file():
        if _offline():
            why = f"{' or '.join(_OFFLINE)} is set"
        elif _unreachable:
            why = f"not tried: {_unreachable[0]}"
        else:
            why = _not_fetched(task, path) if hub_answers() else f"{_hub()} does not answer"
    if path.is_file():
        return Found(path, task.name, f"{task.repo} of the hub")
    file = None if directory is None else _file_in(directory, task.name, not_in=_EVALUATED if task.trains else _TRAINED)
    if file is not None:
        return Found(file, task.name, f"{file} ({why})")
    missing = f"${DATA} names no directory" if directory is None else f"no {task.name}.jsonl in {directory}"
    origin = f"the shipped set {task.shipped} in its place ({why}; {missing})"
    return Found(shipped_sets()[task.shipped], f"{task.shipped}-for-{task.name}", origin, stands_in=True)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").removesuffix("-prompts")


_TRAINED, _EVALUATED = ("train",), ("eval", "test")  # prefixes of the directories of such prompts


def _file_in(directory: Path, name: str, not_in: tuple[str, ...] = ()) -> Path | None:
    """Find NAME.jsonl in a directory or one level below, ignoring case, `_` or `-`, and a suffix _prompts.

    Args:
        not_in: prefixes of subdirectories to skip, so that a drafter is not evaluated on its training prompts.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory: set ${DATA} or --data-dir to one with NAME.jsonl files.")
    below = [file for file in directory.glob("*/*.jsonl") if not file.parent.name.lower().startswith(not_in)]
    files = sorted([*directory.glob("*.jsonl"), *below])
    matches = [file for file in files if _plain(file.stem) == _plain(name)]
    if len(matches) > 1:
        raise ValueError(f"{', '.join(map(str, matches))}: several files match {name}. Keep one, or give its path.")
    return matches[0] if matches else None


@cache
def _not_fetched(task: Task, path: Path) -> str | None:
    """Fetch a task into the cache; return the reason if that fails, without retries in this process."""
    try:
        rows = open_dataset(task.repo, task.split, task.config, files=task.files)
        lines = [json.dumps(line, ensure_ascii=False) for line in islice(_task_lines(task, rows), task.most)]
        if not lines:
            raise ValueError(f"the data set {task.repo} has no rows")
    except (
        Exception
    ) as error:  # rows are streamed, so the network may fail at any row, with errors of several libraries
        if _of_network(error):
            _unreachable.append(f"fetching {task.repo} failed")
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{line}\n" for line in lines), durable=True)
    return None


_unreachable: list[str] = []  # the reason to stop fetching: each further data set could take minutes to fail


def _of_network(error: BaseException | None) -> bool:
    """Return whether this error or one of its causes is a failed connection, and not a problem of this data set."""
    while error is not None and not isinstance(error, (ConnectionError, TimeoutError, httpx.TransportError)):
        error = error.__cause__ or error.__context__
    return error is not None


def _task_lines(task: Task, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, start=1):
        if task.turns is not None:
            if turns := task.turns(row):
                yield {"id": f"{task.name}-{number}", "turns": turns}
            continue
        with suppress(ValueError):  # such collections have rows without a prompt
            yield {**row_of(parse_row({k: v for k, v in row.items() if k in COLUMNS})), "id": f"{task.name}-{number}"}


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _offline() -> bool:
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _OFFLINE)


_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


@cache
def hub_answers() -> bool:
    """Return whether the hub answers within three seconds or $HF_HUB_ETAG_TIMEOUT; checked once per process."""
    answered: list[bool] = []
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", _SECONDS_FOR_THE_HUB))

    def ask() -> None:
        with suppress(Exception):  # a misspelt $HF_ENDPOINT or proxy raises other errors than httpx.HTTPError
            httpx.head(_hub(), timeout=seconds)
            answered.append(True)

    # In a thread, because the timeout does not bound the DNS lookup.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answered)


@cache
def _say_once(line: str, level: int) -> None:
    _log.log(level, line)


# ----------------------------------------------------------------------------
# All sources by name or path.
# ----------------------------------------------------------------------------


def shipped_sets() -> dict[str, Path]:
    """Return the prompt sets inside the package, by name (train_chat, eval_math, ...)."""
    folder = Path(str(resources.files("outrider.data") / "prompts"))
    return {path.stem: path for path in sorted(folder.glob("*.jsonl"))}


def iterate_prompts(path_or_name: str | Path, directory: str | Path | None = None) -> Iterator[Conversation]:
    """Yield the conversations of a source one by one, so that a limit reads only part of it. See `load_prompts`."""
    name = str(path_or_name)
    file = find_prompts(name, directory)
    if file is None and name in _MADE:
        yield from _MADE[name]()
    elif file is None:
        yield from dataset_conversations(name)
    else:
        if file.origin:
            _say_once(f"prompts {name}: {file.origin}", logging.WARNING if file.stands_in else logging.INFO)
        yield from _lines(file.path)


def load_prompts(
    path_or_name: str | Path, limit: int | None = None, directory: str | Path | None = None
) -> list[Conversation]:
    """Read a JSONL file, a shipped set, `stdlib_functions`, `made_prompts`, prompts by name (gsm8k, ...; see above), a
    data set of the hub (`hf:owner/name[/config][:split]`), or a data set's directory.

    Args:
        directory: directory of prompt files, searched without network; None: $OUTRIDER_DATA.

    Raises:
        ValueError: the source is unknown, or a line is malformed (the message names file and line).
    """
    return list(islice(iterate_prompts(path_or_name, directory), limit))


def prompt_sources(sources: Sequence[str], directory: str | None = None) -> list[bool]:
    """Return which training sources to read: a shipped set that replaces several sources is read once.

    It warns of sources that are also evaluation sets.

    Raises:
        ValueError: see `find_prompts`; or an evaluation set would replace a source.
    """
    files = [find_prompts(source, directory) for source in sources]
    for source, file in zip(sources, files, strict=True):
        if file is not None and _measures(source):
            if file.stands_in:
                raise ValueError(
                    f"prompts {source}: an evaluation set that is not available; training would use {file.path.stem}, "
                    "another evaluation set. Give the path of your training file, or one of "
                    f"{', '.join(task.name for task in TASKS if task.trains)}."
                )
            line = f"prompts {source}: an evaluation set; a drafter trained on it gets inflated results there"
            _say_once(line, logging.WARNING)
    taken = {file.path for file in files if file is not None and not file.stands_in}
    chosen = []
    for source, file in zip(sources, files, strict=True):
        chosen.append(file is None or not file.stands_in or file.path not in taken)
        if file is not None and not chosen[-1]:
            _say_once(f"prompts {source}: left out, {file.path.stem} is read once: {file.origin}", logging.WARNING)
        elif file is not None:
            taken.add(file.path)
    return chosen


def _measures(source: str) -> bool:
    """Return whether a source is a task or shipped set for evaluation."""
    return (source in shipped_sets() and source.startswith("eval")) or any(
        task.name == source and not task.trains for task in TASKS
    )


def prompts_label(source: str | Path, directory: str | Path | None = None) -> str:
    """Return a source's name in results: its name, a file's stem, or SET-for-NAME if a shipped set replaces it."""
    file = find_prompts(source, directory)
    return Path(str(source)).stem if file is None else file.label


@dataclass(frozen=True)
class TaskSettings:
    """Decoding settings for tasks. `max_samples`: prompts per task, None for all; `thinking`: switch of the chat
    template."""

    max_samples: int | None = None
    max_new_tokens: int = 256
    params: SamplingParams = field(default_factory=SamplingParams)
    thinking: bool = False


def load_tasks(tasks: Sequence[str], max_samples: int | None = None) -> list[tuple[str, list[Conversation]]]:
    """Load (name, prompts) of each task, named by `prompts_label`.

    Raises:
        ValueError: a task file is missing or malformed, or two have the same name.
    """
    names = [prompts_label(task) for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two task files have the name {', '.join(twice)} in results: rename one.")
    return [(name, load_prompts(task, max_samples)) for name, task in zip(names, tasks, strict=True)]


# ----------------------------------------------------------------------------
# Overlap: training prompts that share text with evaluation prompts.
#
#     a user turn  ->  words: runs of letters and digits, lower case  ->  all runs of 13 words, and of 8
#
# A turn of fewer words is one run, so only an equal turn shares it. Words that all first turns of a set begin or end
# with, 8 or more, are its prompt template and not counted: "Please reason step by step ..." is no text of gsm8k.
# ----------------------------------------------------------------------------


SHARED_WORDS = 13  # a training prompt that shares so many in a row with an evaluation prompt is dropped
_COUNTED_WORDS = 8  # shared runs of this length are counted only
_WORD = re.compile(r"\w+")


class EvaluationText:
    """The text of evaluation sets; counts the training prompts that share some of it, by source.

    Args:
        names: names of the sets, as in `load_prompts`.

    Raises:
        ValueError: see `load_prompts`.
    """

    def __init__(self, names: Sequence[str], directory: str | Path | None = None) -> None:
        self.sizes: dict[str, int] = {}  # prompts of each set
        self.read: Counter[str] = Counter()  # prompts of each source that were checked
        self.sharing: Counter[tuple[str, str, int]] = Counter()  # (source, set, words): prompts of the source
        self.touched: defaultdict[tuple[str, str, int], set[int]] = defaultdict(set)  # prompts of the set, by number
        self._places: dict[str, set[tuple[str, int]]] = {}  # run of words -> (set, number of the prompt)
        for name in names:
            label, prompts = prompts_label(name, directory), load_prompts(name, directory=directory)
            self.sizes[label] = len(prompts)
            turns = [_words_of(prompt) for prompt in prompts]
            begins, ends = _frame([first for first, *_ in turns])
            for number, (first, *later) in enumerate(turns):
                for words in (first[begins : len(first) - ends], *later):
                    for run in {*_runs(words, SHARED_WORDS), *_runs(words, _COUNTED_WORDS)}:
                        self._places.setdefault(run, set()).add((label, number))

    def shares(self, source: str, prompt: Conversation) -> bool:
        """Return whether a prompt shares SHARED_WORDS words in a row with a set, and count it."""
        self.read[source] += 1
        for size in (_COUNTED_WORDS, SHARED_WORDS):
            places: set[tuple[str, int]] = set()
            for words in _words_of(prompt):
                for run in _runs(words, size):
                    places |= self._places.get(run, set())
            for label in {label for label, _ in places}:
                self.sharing[source, label, size] += 1
            for label, number in places:
                self.touched[source, label, size].add(number)
        return bool(places)

    def table(self) -> list[str]:
        """Return the counts: a line for every source and set that share text, and one for a source that shares none."""
        headings = ("prompts", "read", "set", f"share {_COUNTED_WORDS} words", "of the set", "dropped", "of the set")
        rows = []
        for source, read in self.read.items():
            sharing = [label for label in self.sizes if self.sharing[source, label, _COUNTED_WORDS]]
            for label in sharing:
                counted = []
                for size in (_COUNTED_WORDS, SHARED_WORDS):
                    key = source, label, size
                    counted += [f"{self.sharing[key]}", f"{len(self.touched[key])} of {self.sizes[label]}"]
                rows.append((source, str(read), label, *counted))
            if not sharing:
                rows.append((source, str(read), "none", "0", "0", "0", "0"))
        return markdown_table(headings, rows, text=("prompts", "set"))


def _words_of(prompt: Conversation) -> list[list[str]]:
    """Split the user messages of each turn into words."""
    user_texts = [[str(m["content"]) for m in messages_of(turn) if m["role"] == "user"] for turn in prompt.turns]
    return [_WORD.findall("\n".join(texts).lower()) for texts in user_texts]


def _runs(words: Sequence[str], size: int) -> Iterator[str]:
    """Yield all runs of `size` words; all words, if they are fewer."""
    for start in range(max(len(words) - size, 0) + 1 if words else 0):
        yield " ".join(words[start : start + size])


def _frame(turns: Sequence[list[str]]) -> tuple[int, int]:
    """Count the words that all turns begin and end with; 0 if fewer than _COUNTED_WORDS."""

    def common(lists: Sequence[Sequence[str]]) -> int:
        same = sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False)))
        return same if same >= _COUNTED_WORDS else 0

    if len({" ".join(words) for words in turns}) < 2:
        return 0, 0
    begins = common(turns)
    return begins, common([words[begins:][::-1] for words in turns])


def _lines(path: Path) -> Iterator[Conversation]:
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

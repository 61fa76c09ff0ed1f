"""Readers of files and of servers' answers, on JSON changed at random: each is read, or refused with a ValueError.

`make fuzz` gives each ten minutes, and keeps what it finds in the user's cache directory.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from outrider.backends.openai import parse_event
from outrider.backends.registry import server_of
from outrider.checkpoints.checkpoint import Checkpoint, read_metadata
from outrider.checkpoints.describe import TrainingInfo
from outrider.data.conversations import parse_row
from outrider.data.responses import read_responses
from outrider.evaluation.draft_cost import load_costs
from outrider.evaluation.loadtest.simulate import load_machine
from outrider.evaluation.results import Results
from outrider.training.recipe import load_recipe
from outrider.training.runs import find_runs
from outrider.utils.documents import parse_json, parse_yaml
from outrider.utils.files import cache_dir
from tests.toys.evaluations import results
from tests.toys.profiles import SETTING, cells_of, linear, profile_of

_SECONDS = float(os.environ.get("OUTRIDER_FUZZ_SECONDS", "0"))
_DATABASE = DirectoryBasedExampleDatabase(cache_dir() / "fuzz") if _SECONDS else None
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([2**31, -(2**63), 10**30]),
    st.floats(),
    st.sampled_from(["", "x", "1", "nan", "\x1b[31m", "\0", "\ud800", "/"]),
)
_VALUES = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a value."""
    pairs = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [(value, key) for key, _ in pairs] + [place for _, inner in pairs for place in _places(inner)]


@st.composite
def changed(draw: Any, valid: Any) -> Any:
    """A valid value with up to three of its parts replaced, removed or doubled."""
    value = [copy.deepcopy(valid)]
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(_places(value)))
        what = draw(st.sampled_from(("replace", "remove", "double")))
        if what == "replace" or container is value:
            container[key] = draw(_VALUES)
        elif what == "remove":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        if not value or not _places(value):
            break
    return value[0] if value else None


def _lines(value: Any) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in (value if isinstance(value, list) else [value]))


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _read_outrider_json(value: Any, here: Path) -> None:
    metadata = read_metadata(_written(here / "outrider.json", json.dumps(value)).parent)
    TrainingInfo.of(metadata)
    assert Checkpoint(None, metadata).calibration is not None  # type: ignore[arg-type]


def _read_replies(value: Any, here: Path) -> None:
    _, replies = read_responses(_written(here / "r.jsonl", _lines(value)))
    found, said = [asdict(reply) for reply in replies], [{"exact": True} | line for line in value[1:]]
    assert json.dumps(found, sort_keys=True) == json.dumps(said, sort_keys=True)  # as text: 1, 1.0 and true differ


def _read_recipe(value: Any, here: Path) -> None:
    load_recipe(_written(here / "recipe.yaml", json.dumps(value)))


def _list_runs(value: Any, here: Path) -> None:
    state, metrics, results_json = value if isinstance(value, list) and len(value) == 3 else (value, value, value)
    _written(here / "runs/a/state/state.json", json.dumps(state))
    _written(here / "runs/a/metrics.jsonl", _lines(metrics))
    _written(here / "runs/a/results.json", json.dumps(results_json))
    assert len(list(find_runs(here / "runs"))) == 1


def _read_event(value: Any, here: Path) -> None:
    part = parse_event(json.dumps(value), server_of("vllm"))
    assert isinstance(part.text, str | None) and isinstance(part.finish_reason, str | None)
    assert all(type(token) is int and token >= 0 for token in (part.tokens or []) + (part.prompt or []))
    assert part.accepted_length is None or 1 <= part.accepted_length < math.inf


_REPLY = {"id": "a", "turn": 0, "prompt": [5, 6], "response": [7], "finished": True, "exact": True}
_CALIBRATION = {
    "temperatures": [1.0, 2.0],
    "offsets": [0.0, 0.1],
    "estimator": {"weights": [1.0, 0.5], "biases": [0.0, 1.0]},
}
_METADATA = {
    "format": 1, "target": "t", "step": 3, "history": [{"step": 1, "anchors": 2}], "recipe": {"seed": 1}, "anchors": 3,
    "recommended": {"confidence_threshold": 0.5}, "calibration": _CALIBRATION, "candidates": {"accuracy": [[0.5]]},
}  # fmt: skip
_STATE = {"step": 1, "settings": {"target": "t", "optimizer": {"steps": 2}}, "watch": {"best": 1.0, "measure": {}}}
_COSTS = {
    "target": "t", "context": 8, "repeats": 3, "drafters": [], "machine": {}, "versions": {}, "date": None,
}  # fmt: skip
_RECIPE = {
    "target": "t", "out": "o", "seed": 1, "threads": 2, "data": {"prompts": [{"path": "p.jsonl"}], "temperature": 0.5},
    "drafter": {"algorithm": "dspark", "num_hidden_layers": 1}, "optimizer": {"steps": 5, "learning_rate": 0.1},
}  # fmt: skip
_ROW = {"id": "a", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}], "turns": ["y"]}
_SPECULATION = {"num_spec_steps": 4, "mean_acceptance_length": 2.5}
_EVENT = {
    "choices": [{"delta": {"content": "x"}, "token_ids": [1, 2], "finish_reason": None, "stop_reason": None}],
    "usage": {"completion_tokens": 2}, "prompt_token_ids": [1], "metrics": {"speculative_decoding": _SPECULATION},
}  # fmt: skip

Reader = Callable[[Any, Path], object]
READERS: dict[str, tuple[Any, Reader]] = {
    "outrider.json": (_METADATA, _read_outrider_json),
    "responses": (
        [{"format": 2, "settings": {"target": "t"}, "summary": {}}, _REPLY, {**_REPLY, "turn": 1}],
        _read_replies,
    ),
    "results.json": (
        json.loads(results("a").model_dump_json()),
        lambda value, here: Results.load(_written(here / "results.json", json.dumps(value))),
    ),
    "profile": (
        json.loads(profile_of(cells_of(linear, (1,), (64,))).model_dump_json()),
        lambda value, here: load_machine(_written(here / "p.json", json.dumps(value)), SETTING.model_dump()),
    ),
    "table of steps": (
        {"sps": [3.0, 2.0], "draft_seconds": [0.1], "other_seconds": 0.0},
        lambda value, here: load_machine(_written(here / "p.json", json.dumps(value)), {}),
    ),
    "draft costs": (_COSTS, lambda value, here: load_costs(_written(here / "c.json", json.dumps(value)))),
    "recipe": (_RECIPE, _read_recipe),
    "prompts": (_ROW, lambda value, here: parse_row(json.dumps(value))),
    "runs": ([_STATE, [{"step": 1, "group": "train"}], {"settings": {}, "tasks": []}], _list_runs),
    "an event of a server": (_EVENT, _read_event),
}


@pytest.mark.parametrize("name", READERS)
def test_changed_files(name: str, tmp_path: Path) -> None:
    valid, read = READERS[name]
    if name not in ("prompts",):  # its row has two conversations, of which the reader takes one
        read(valid, tmp_path)

    @settings(
        max_examples=1000 if _SECONDS else 60,
        deadline=None,
        database=_DATABASE,
        suppress_health_check=list(HealthCheck),
        derandomize=not _SECONDS,
    )
    @given(value=changed(valid))
    def check(value: Any) -> None:
        try:
            read(value, tmp_path)
        except ValueError as error:
            assert str(error)

    end = time.monotonic() + _SECONDS
    check()
    while time.monotonic() < end:
        check()


@pytest.mark.parametrize("parse", [parse_json, parse_yaml])
@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 101 + "]" * 101, '{"a":' * 150 + "1" + "}" * 150, "1" * 6000])
def test_depth_is_bounded(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"deep|digits"):
        parse(text)
    assert parse("[" * 99 + "]" * 99) is not None


def test_aliases_are_bounded() -> None:
    lines = [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    with pytest.raises(ValueError, match="more than 1000000 values"):
        parse_yaml("a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(lines))
    with pytest.raises(ValueError, match="deep"):
        parse_yaml("&a [*a]")
    assert parse_yaml("a: &a [1]\nb: *a\n") == {"a": [1], "b": [1]}

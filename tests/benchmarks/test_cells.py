"""The table of cells: ratios, which cells fail and why, and prompts of kinds that no drafter was trained on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cells import Asks, Lane, Run, answer, compared, differing, kinds, prompts, ratios, report, simulate
from outrider.data.sources import load_prompts
from outrider.decoding.engine import Engine
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.evaluation.loadtest.traces import Response, Traces
from tests.toys.profiles import cells_of, linear, profile_of
from tests.toys.targets import toy_target

Cell = dict[str, Any]


def cell(task: str, users: int, rates: dict[str, float]) -> Cell:
    """Four requests of 10 tokens each, one after the other, whose prompts cost as much as any step."""
    runs = [Run(name, 40 / r, 40, 40, 4, 4 / r, 4, {id: (10 / r, 10) for id in "abcd"}) for name, r in rates.items()]
    return {"task": task, "temperature": 0.0, "users": users, "runs": [asdict(run) for run in runs]}


def test_cells_that_fail_are_named() -> None:
    measured = [
        cell("gsm8k", 1, {"none": 10, "fixed-3": 15, "look-ahead+skip": 15}),
        cell("gsm8k", 2, {"none": 20, "fixed-3": 22, "look-ahead+skip": 21}),
        cell("gsm8k", 4, {"none": 30, "fixed-3": 20, "look-ahead+skip": 29.7}),
        cell("json", 1, {"none": 10, "look-ahead+skip": 12}),
    ]
    lines = report(measured, "look-ahead+skip")
    assert lines[2].split(" | ")[1:] == [
        "1.50 (1.50-1.50) / 1.00", "1.05 (1.05-1.05) / 0.95", "0.99 (0.99-0.99) / 0.99 |",
    ]  # fmt: skip
    assert lines[3].endswith("1.20 (1.20-1.20) / 1.20 |  |  |")
    assert lines[5] == "2 of 4 cells pass, mean 1.185 of plain"
    assert lines[6:] == [
        "* gsm8k, T=0 at 2: 1.050 of plain, 0.955 of fixed-3",
        "* gsm8k, T=0 at 4: 0.990 of plain, 0.990 of none",
    ]
    with pytest.raises(ValueError, match="gsm8k at 1 users: prefix was not measured"):
        report(measured[:1], "prefix")


def test_repeats_are_added_up() -> None:
    """2 x 40 tokens in 4 + 2 seconds against 4 + 8: not the mean of the two ratios."""
    measured = [
        cell("json", 1, {"none": 10, "look-ahead+skip": 10}),
        cell("json", 1, {"none": 5, "look-ahead+skip": 20}),
    ]
    assert report(measured, "look-ahead+skip")[2].endswith("2.00 (1.00-4.00) / 2.00 |")


def test_prompts_are_counted_once_per_request() -> None:
    """0.1 s a token and 2 s a prompt, however many prompts there are: four (with 3 tokens in their steps), or eight."""
    few, many = Run("none", 2.7 + 0.3 + 8, 30, 30, 4, 0.3 + 8, 3), Run("none", 2.7 + 0.6 + 16, 33, 33, 8, 0.6 + 16, 6)
    assert few.rate(10) == pytest.approx(10 / (2 + 10 * 0.1)) == many.rate(10)
    assert Run.total([few, many]).rate(10) == pytest.approx(few.rate(10))


def test_where_every_step_of_a_variant_reads_prompts_all_are_counted_as_they_are() -> None:
    some, whole = Run("none", 10.0, 100, 20, 4, 8.0, 60), Run("fixed-1", 5.0, 100, 10, 4, 5.0, 100)
    assert Run.rates([some, whole], 48) == {"none": 10, "fixed-1": 20}
    assert Run.rates([some], 48) == {"none": some.rate(48)} != {"none": 10}


def test_lanes_take_turns_and_answer_the_same() -> None:
    """Two users: always two requests at once, no lane a step ahead in tokens; runs hold what is counted."""
    target = toy_target()

    def ask(number: int) -> Request:
        return Request(str(number), [number % 9, 2, 3], rules=StopRules(6 if number else 3, stop_ids=()))

    lanes = [Lane(name, Engine(target, config=EngineConfig(2, num_blocks=64)), 2, ask) for name in "ab"]
    ahead, running = [], []
    for lane in lanes:
        own = lane.engine.step

        def step(own: Any = own, lane: Lane = lane) -> Any:
            outputs = own()
            running.append(len(lane.engine.scheduler.running))
            ahead.append(lanes[0].run.tokens - lanes[1].run.tokens)
            return outputs

        lane.engine.step = step  # type: ignore[method-assign]
    answer(lanes, 7)
    for lane in lanes:
        assert lane.run.tokens == 8 and lane.run.requests.keys() == {"0"} and lane.done == {"0"}
        lane.count_from_here()
    answer(lanes, 30)
    assert lanes[0].texts == lanes[1].texts and max(map(abs, ahead)) <= 2
    assert min(running) == 1 and max(running) == 2, "counted behind a step, when a request may have ended"
    for lane in lanes:
        assert lane.run.tokens == 30 and {tokens for _, tokens in lane.run.requests.values()} == {6}
        assert not {"0", "1", "2"} & lane.run.requests.keys(), "they began before"
        longest = max(seconds for seconds, _ in lane.run.requests.values())
        assert 0 < longest < lane.run.seconds


def test_requests_end_one_after_another() -> None:
    """The first of each of four users have a quarter, a half, ... of the tokens, those behind all of them."""
    asks = Asks([[1], [2], [3]], 1.0, 8, users=4, first=5)
    assert [asks(i).rules.max_new_tokens for i in range(6)] == [2, 4, 6, 8, 8, 8]
    assert [asks(i).prompt for i in range(3)] == [[3], [1], [2]]
    assert {asks(i).params.seed for i in range(3)} == {5, 6, 7} == {int(asks(i).id) for i in range(3)}


def test_answers_that_differ_are_counted() -> None:
    lanes = [Lane(name, Engine(toy_target()), 1, Asks([[1]], 0.0, 4, users=1)) for name in ("none", "fixed-3")]
    for lane, (first, second) in zip(lanes, (([1, 2], [3]), ([1, 2, 3], [4])), strict=True):
        lane.texts, lane.done = {"0": first, "1": second}, {"0"}
    assert differing(lanes) == 1, "the other has not ended"


def test_cells_are_simulated_by_the_same_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every draft is right: steps of one and of two tokens, whose seconds the profile says."""
    tokens = 40
    responses = [Response((number, 1), list(range(tokens)), False, number * tokens) for number in range(4)]
    drafted = np.tile(np.minimum(7, np.arange(tokens - 1, -1, -1)), 4)
    sure_NK = (np.arange(7) < drafted[:, None]).astype(np.float32)
    Traces(responses, sure_NK, drafted, drafted, {}).save(tmp_path / "json-0.npz")
    profile = profile_of(cells_of(linear))
    profile.save(tmp_path / "profile.json")
    measured = {**cell("json", 1, {"none": 10, "fixed-1": 15}), "max_new_tokens": 20}
    (tmp_path / "cells.jsonl").write_text(json.dumps(measured) + "\n")
    out = tmp_path / "simulated.jsonl"
    simulate([tmp_path / "cells.jsonl"], tmp_path, tmp_path / "profile.json", out)
    found = json.loads(out.read_text())
    other = profile.other.at(1)
    plain = linear(1, 1, 64) + other
    fast = linear(1, 2, 64) + other + profile.draft_seconds(1, 1)
    none, fixed = (Run(**run) for run in found["runs"])
    assert (none.seconds - none.prompt_seconds) / (none.tokens - none.prompt_tokens) == pytest.approx(plain, rel=0.05)
    assert (fixed.seconds - fixed.prompt_seconds) / (fixed.steps - fixed.prompts) == pytest.approx(fast, rel=0.05)
    error = ratios(found)["fixed-1"] / 1.5 - 1
    assert f"fixed-1, T=0 | {error:+.1%} ({error:+.1%} to {error:+.1%}) |" in capsys.readouterr().out
    assert compared([measured], [found])[-1].startswith("1 of 1" if abs(error) <= 0.1 else "0 of 1")


def test_prompts_of_three_kinds(tmp_path: Path) -> None:
    prompts(tmp_path)
    for kind, texts in kinds().items():
        found = load_prompts(str(tmp_path / f"{kind}.jsonl"))
        assert [conversation.turns[0] for conversation in found] == texts
        assert len(texts) == 32 and len(set(texts)) > 8
        assert json.loads((tmp_path / f"{kind}.jsonl").read_text().splitlines()[0])["id"] == f"{kind}-01"

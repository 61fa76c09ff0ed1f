"""Load tests of sampled requests: who is sampled how, what is compared, traces of sampled text, the real SmolLM2."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import outrider.evaluation.loadtest.bench as bench
from outrider.decoding.engine import Engine
from outrider.decoding.policies import FixedPolicy, LookAhead, Policy, ThresholdPolicy
from outrider.decoding.request import Request, StepRecord, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.decoding.verification import TargetRows, verify
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.draft import Draft, DraftRow, Siblings
from outrider.drafters.ngram import NgramDrafter
from outrider.evaluation.loadtest.config import Traffic
from outrider.evaluation.loadtest.engines import compare_asked
from outrider.evaluation.loadtest.load import Ask
from outrider.evaluation.loadtest.metrics import Frontier, Journal
from outrider.evaluation.loadtest.simulate import SimulatedEngine, TableMachine
from outrider.evaluation.loadtest.traces import DraftsGivenText, Traces, record
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.proof.enumeration import EnumeratingSource, enumerate_traces
from tests.toys.command_line import invoke

LINEAR = TableMachine(sps=[1 / (0.1 + 0.01 * b) for b in range(1, 400)], draft_seconds=[0.05], other_seconds=0.002)
RULES = StopRules(24, stop_ids=(0,))
SAMPLED = Traffic((1.0,), 0.9)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 97, (3 + 3 * i,), generator=generator).tolist() for i in range(10)]


def test_requests_take_turns_with_the_temperatures() -> None:
    traffic = Traffic((0.0, 1.0), 0.9)
    asks = traffic.asks([[i] for i in range(400)], seed=5)
    temperatures = [ask.params.temperature for ask in asks]
    assert all(sorted(temperatures[i : i + 2]) == [0.0, 1.0] for i in range(0, 400, 2)), "one of each in every pair"
    for tasks in (2, 3, 4):  # prompts of so many tasks in turn: no task gets one temperature alone
        assert all(0.3 < sum(temperatures[task::tasks]) / len(temperatures[task::tasks]) < 0.7 for task in range(tasks))
    assert len({ask.params.seed for ask in asks}) == 400
    assert {ask.params.top_p for ask in asks} == {1.0, 0.9} and not any(ask.params.coupled for ask in asks)
    assert asks == traffic.asks([[i] for i in range(400)], seed=5), "runs repeat"
    assert asks[:7] == traffic.asks([[i] for i in range(7)], seed=5), "more prompts change nothing before them"
    again = traffic.asks([[i] for i in range(400)], seed=5, repeat=1)
    assert [ask.params.temperature for ask in again] == temperatures
    assert not {ask.params.seed for ask in again} & {ask.params.seed for ask in asks}, "each repeat draws anew"
    coupled = Traffic((0.0, 1.0), coupled=True)
    assert coupled.asks([[1]] * 9, seed=5, repeat=1) == coupled.asks([[1]] * 9, seed=5), "compared with one reference"
    assert [ask.comparable for ask in asks[:2]] == [t == 0 for t in temperatures[:2]]
    assert all(ask.comparable for ask in coupled.asks([[1]] * 9, seed=5))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (((),), "one at least"),
        (((0.0, 0.0),), "different temperatures"),
        (((-1.0,),), "--temperature -1.0"),
        (((1.0,), 0.0), "--top-p 0.0"),
        (((0.0,), 1.0, True), "--coupled is for sampled requests"),
    ],
)
def test_no_such_traffic(fields: tuple[tuple[float, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Traffic(*fields)


# Distributions over three tokens by the tokens before; p_d has no token 2 behind token 1.
P_T = {(): (0.5, 0.3, 0.2), (0,): (0.1, 0.6, 0.3), (1,): (0.4, 0.4, 0.2), (2,): (0.25, 0.25, 0.5)}
P_D = {(): (0.3, 0.6, 0.1), (0,): (0.2, 0.2, 0.6), (1,): (0.7, 0.3, 0.0), (2,): (0.5, 0.25, 0.25)}
IDS = torch.tensor([1, 0])  # a reduced draft vocabulary, in another order than the target's


def rows(table: dict[tuple[int, ...], tuple[float, ...]], before: tuple[int, ...]) -> Tensor:
    return torch.tensor(table[before], dtype=torch.float64)


def drafted(ids: Tensor | None, before: tuple[int, ...]) -> Tensor:
    row = rows(P_D, before)
    return row if ids is None else row[ids] / row[ids].sum()


def law(run: Callable[[EnumeratingSource], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    found: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for outcome, weight in enumerate_traces(run):
        found[outcome] += weight
    return dict(found)


@pytest.mark.parametrize("ids", [None, IDS])
def test_drafts_after_the_text_have_the_law_of_drafts_before_it(ids: Tensor | None) -> None:
    """Joint distribution of two drafts, two tokens of text and how many drafts were accepted, in float64."""

    def token(index: int) -> int:
        return index if ids is None else int(ids[index])

    def decoding(source: EnumeratingSource) -> tuple[int, ...]:
        first = token(source.choose(drafted(ids, ())))
        second = token(source.choose(drafted(ids, (first,))))
        siblings = {
            -1: Siblings(DraftRow(drafted(ids, ()), ids, 3)),
            0: Siblings(DraftRow(drafted(ids, (first,)), ids, 3)),
        }
        target = [rows(P_T, ()), rows(P_T, (first,)), torch.ones(3, dtype=torch.float64) / 3]
        verdict = verify(Draft.chain([first, second], siblings), TargetRows(target.__getitem__), source)
        text = [*[first, second][: verdict.accepted], verdict.next_token][:2]
        while len(text) < 2:
            text.append(source.choose(rows(P_T, tuple(text))))
        return first, second, *text, verdict.accepted

    def given_text(source: EnumeratingSource) -> tuple[int, ...]:
        text = [source.choose(rows(P_T, ()))]
        text.append(source.choose(rows(P_T, tuple(text))))
        drawn = DraftsGivenText(text, 7, torch.stack([rows(P_T, ()), rows(P_T, (text[0],))]), source)
        drawn.start()
        first = token(drawn.pick(drafted(ids, ()), 7, ids))
        second = token(drawn.pick(drafted(ids, (first,)), 8, ids))
        accepted = 0 if first != text[0] else 1 if second != text[1] else 2
        return first, second, *text, accepted

    before, after = law(decoding), law(given_text)
    assert sum(before.values()) == pytest.approx(1.0, abs=1e-12)
    assert {accepted for *_, accepted in before} == {0, 1, 2}
    for outcome in before.keys() | after.keys():
        assert before.get(outcome, 0.0) == pytest.approx(after.get(outcome, 0.0), abs=1e-12), outcome


def test_drafts_given_nearly_greedy_text_are_those_of_greedy_decoding(
    target: Target, drafter: BlockDrafter, prompts: list[list[int]]
) -> None:
    """At temperature 1e-4 nothing is left to chance, so every position, feature and confidence must be in its place."""
    greedy = record(target, drafter, [Ask(prompt) for prompt in prompts], RULES, {})
    cold = record(target, drafter, Traffic((1e-4,)).asks(prompts, 0), RULES, {})
    assert [r.tokens for r in cold.responses] == [r.tokens for r in greedy.responses]
    assert [r.stopped for r in cold.responses] == [r.stopped for r in greedy.responses]
    assert cold.drafted_N.tolist() == greedy.drafted_N.tolist()
    agree = cold.accepted_N == greedy.accepted_N
    assert agree.mean() > 0.98 and greedy.accepted_N.sum() > 50, "a draft that is as likely as another may differ"
    assert abs(cold.confidences_NK - greedy.confidences_NK)[agree][:, 0].max() < 1e-5


COUNTED = ("requests", "drafting", "tokens", "prefill_tokens", "proposed", "admitted", "accepted", "committed")


def steps(engine: Engine | SimulatedEngine, asks: list[Ask]) -> tuple[list[StepRecord], dict[str, list[int]]]:
    for number, ask in enumerate(asks):
        engine.submit(Request(str(number), ask.prompt, ask.params, rules=RULES))
    records, texts = list[StepRecord](), defaultdict[str, list[int]](list)
    while not engine.idle:
        for output in engine.step():
            texts[output.id] += output.tokens
        assert engine.last is not None
        records.append(engine.last)
    return records, dict(texts)


@pytest.mark.parametrize("policy", [FixedPolicy(), FixedPolicy(2), ThresholdPolicy(0.55), LookAhead(LINEAR)])
def test_coupled_traffic_is_replayed_step_by_step(
    target: Target, drafter: BlockDrafter, prompts: list[list[int]], policy: Policy, tmp_path: Path
) -> None:
    """A mixture of greedy and coupled requests: the simulator's counts of every step are the engine's."""
    asks = Traffic((0.0, 1.0), 0.95, coupled=True).asks(prompts, seed=2)
    record(target, drafter, asks, RULES, {}).save(tmp_path / "traces.npz")
    traces = Traces.load(tmp_path / "traces.npz")
    assert [(r.prompt, r.params) for r in traces.responses] == [(tuple(ask.prompt), ask.params) for ask in asks]
    config = EngineConfig(max_requests=4, token_budget=24, block_size=4, num_blocks=40)
    real, texts = steps(Engine(target, drafter, policy, config), asks)
    simulated, replayed = steps(SimulatedEngine(traces, LINEAR, policy, config), asks)
    assert texts == replayed
    assert [[getattr(one, n) for n in COUNTED] for one in simulated] == [
        [getattr(one, n) for n in COUNTED] for one in real
    ]
    assert sum(one.accepted for one in real) > 10
    other = Ask(asks[0].prompt, Traffic((0.5,)).asks([[1]], 0)[0].params)
    with pytest.raises(ValueError, match=r"asks for .*temperature=0\.5.*record what is asked"):
        steps(SimulatedEngine(traces, LINEAR), [other])


def test_sampled_traffic_is_replayed_in_distribution(
    target: Target, drafter: BlockDrafter, prompts: list[list[int]]
) -> None:
    """Tokens per round of the simulator and of the engine, many seeds each: within four standard errors."""

    def rounds(engine_of: Callable[[list[Ask]], Engine | SimulatedEngine], seeds: range) -> Counter[int]:
        found = Counter[int]()
        for seed in seeds:
            asks = SAMPLED.asks(prompts, seed)
            for one in steps(engine_of(asks), asks)[0]:
                found[one.accepted] += one.requests == 1
        return found

    alone = EngineConfig(max_requests=1, token_budget=64, block_size=4, num_blocks=40)
    real = rounds(lambda asks: Engine(target, drafter, FixedPolicy(3), alone), range(5))
    simulated = rounds(
        lambda asks: SimulatedEngine(record(target, drafter, asks, RULES, {}), LINEAR, FixedPolicy(3), alone),
        range(100, 105),
    )
    means, errors = [], []
    for found in (real, simulated):
        count = found.total()
        mean = sum(k * n for k, n in found.items()) / count
        means.append(mean)
        errors.append(sum(n * (k - mean) ** 2 for k, n in found.items()) / count / count)
    assert 0.1 < means[0] < 2.9 and real.total() > 400
    assert abs(means[0] - means[1]) < 4 * sum(errors) ** 0.5, (means, errors)


def test_copied_drafts_of_sampled_text_are_accepted_where_they_equal_it(target: Target) -> None:
    """A copy is not drawn: given the text it is accepted if it equals it."""
    prompt = [5, 6, 7, 5, 6, 7, 5]
    traces = record(target, NgramDrafter(), Traffic((1.0,)).asks([prompt], 1), RULES, {})
    (response,) = traces.responses
    text = [*prompt, *response.tokens]
    assert traces.drafted_N[0] > 0
    first = int(traces.accepted_N[0] > 0)
    assert first == (text[len(prompt)] == 6)


def test_coupled_differences_are_mismatches_unless_the_race_was_close(target: Target, prompts: list[list[int]]) -> None:
    ask = Traffic((1.0,), 0.9, coupled=True).asks(prompts, 3)[4]
    _, texts = steps(Engine(target), [ask])
    plain = texts["0"]
    assert compare_asked(target, ask, plain, plain) == "same"
    other = [*plain[:5], (plain[5] + 1) % 97, *plain[6:]]
    assert compare_asked(target, ask, plain, other) == "mismatch"
    greedy = Ask(ask.prompt, SamplingParams())
    assert compare_asked(target, greedy, plain, other) in ("mismatch", "tie")


def test_calibration_at_another_temperature_is_said() -> None:
    metadata = {"calibration": {"sampling": {"temperature": 0.0}}}
    assert bench.calibration_note(metadata, Traffic()) == bench.calibration_note({}, Traffic((1.0,))) == []
    (line,) = bench.calibration_note(metadata, Traffic((0.0, 1.0)))
    assert line.startswith("confidences were calibrated at temperature 0, requests are sampled at 0, 1")
    both = {**metadata, "calibration_sampled": {"sampling": {"temperature": 1.0}}}
    assert bench.calibration_note(both, Traffic((0.0, 1.0))) == bench.calibration_note(both, Traffic((1.0,))) == []
    (line,) = bench.calibration_note(both, Traffic((0.7,)))
    assert line.startswith("confidences were calibrated at temperature 0, 1, requests are sampled at 0.7")


@pytest.mark.slow
def test_the_real_model_under_a_mixture(smollm: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coupled requests give plain decoding's tokens in any company; others are sampled and not compared."""
    monkeypatch.setattr("outrider.utils.measure.set_up", lambda threads: None)
    monkeypatch.setattr(bench, "load_target", lambda *_: smollm)
    command = ["--tasks", "eval_math,eval_chat", "--temperature", "0,1", "--top-p", 0.95, "--variants", "fixed-3"]
    command += ["--concurrency", 2, "--requests-per-point", 4, "--max-new-tokens", 10, "--repeats", 1, "--prompts", 6]
    for more, compared in ((["--coupled"], 4), ([], 2)):
        out = tmp_path / str(compared)
        found = invoke("bench", *command, *more, "--out", out)
        assert found.exit_code == 0, (found.output, found.exception)
        frontier = Frontier.load(out / "frontier.json")
        assert "were calibrated at temperature" not in found.output, "the packaged drafter was, at both"
        assert frontier.settings["traffic"] == {"temperatures": [0.0, 1.0], "top_p": 0.95, "coupled": bool(more)}
        points = Journal(out, json.loads((out / "settings.json").read_text())).points
        assert len(points) == 2 and [p.metrics.requests for p in points] == [4, 4]
        assert all((p.same + p.ties, p.mismatches) == (compared, 0) and p.ties <= 1 for p in points)
        assert points[1].variant == "fixed-3" and (points[1].metrics.acceptance or 0) > 0.1


def test_greedy_engines_refuse_sampled_traffic(tmp_path: Path) -> None:
    base = ["--tasks", "eval_math", "--out", str(tmp_path / "x")]
    for more, message in (
        (("--backend", "transformers", "--temperature", "1"), "transformers decodes greedily here"),
        (("--backend", "vllm", "--temperature", "1", "--coupled"), "--coupled is for --backend local and mlx"),
        (("--temperature", "warm"), "--temperature 'warm': give numbers"),
        (("--temperature", "1", "--top-p", "2"), "--top-p 2.0"),
        (("--coupled",), "--coupled is for sampled requests"),
        (("--user-speeds", "0"), "--user-speeds 0.0"),
    ):
        found = invoke("bench", *base, *more)
        assert isinstance(found.exception, ValueError) and message in str(found.exception), (more, found.exception)
    assert not (tmp_path / "x").exists()

"""Load generators and the frontier on a fake engine and a simulated clock, exact numbers; the verb on a toy model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.backends.local import build_variant, default_variants, limited
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.decoding.config import ProfileConfig
from outrider.decoding.cost import SpsTable
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.learned_cost import LearnedCost
from outrider.decoding.policies import LookAhead, SkipDrafting
from outrider.decoding.profile import measure_profile
from outrider.decoding.request import Output, Request, StepRecord, StopRules
from outrider.drafters.base import DraftCall, DrafterWeights, LimitedDrafter
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.draft import Draft, TreeSize
from outrider.drafters.dspark import DSpark
from outrider.drafters.eagle3 import DynamicTreeDrafter, Eagle3Drafter, TreeShape
from outrider.evaluation.loadtest.config import Sla
from outrider.evaluation.loadtest.load import (
    Ask,
    ClosedLoop,
    LoadConfig,
    Poisson,
    WallClock,
    Window,
    mixed_prompts,
    run_load,
)
from outrider.evaluation.loadtest.metrics import (
    Frontier,
    Journal,
    Point,
    histogram_rows,
    level_verdicts,
    overall_verdicts,
    summarise,
    summarise_points,
)
from outrider.evaluation.loadtest.plots import write_plots
from outrider.evaluation.loadtest.sweep import Sweep, run_sweep
from outrider.target.model import load_target
from tests.toys.command_line import invoke
from tests.toys.eagle3 import make_drafter
from tests.toys.targets import toy_config, toy_target
from tests.toys.tokenizer import byte_tokenizer

LEAST = Sla(ttft=0.5, tokens_per_second=4.0)


class FakeEngine:
    """Every request gets `per_step` tokens a step, counting up from its prompt's first; 3 drafts admitted of each."""

    def __init__(self, per_step: int = 2, seconds: float = 0.5, shift: int = 0) -> None:
        self.per_step, self.seconds, self.shift = per_step, seconds, shift
        self.last: StepRecord | None = None
        self.live: dict[str, list[int]] = {}
        self.submitted: list[tuple[int, int]] = []
        self.most = 0

    @property
    def idle(self) -> bool:
        return not self.live

    def submit(self, request: Request) -> None:
        assert request.id not in self.live
        first, count = request.prompt[0] + self.shift, request.rules.max_new_tokens
        self.live[request.id] = list(range(first, first + count))
        self.submitted.append((request.prompt[0], count))
        self.most = max(self.most, len(self.live))

    def cancel(self, id: str) -> bool:
        return self.live.pop(id, None) is not None

    def step(self) -> list[Output]:
        outputs = []
        for id, rest in list(self.live.items()):
            tokens, self.live[id] = rest[: self.per_step], rest[self.per_step :]
            finish = None if self.live[id] else "length"
            outputs.append(Output(id, tokens, "", finish, accepted=len(tokens) - 1))  # type: ignore[arg-type]
            if not self.live[id]:
                del self.live[id]
        n, committed = len(outputs), sum(len(output.tokens) for output in outputs)
        parts = (0.2 * self.seconds, 0.7 * self.seconds, 0.1 * self.seconds)
        self.last = StepRecord(self.seconds, *parts, n, n, 4 * n, 0, 3 * n, 3 * n, n, committed, 0, n, 0, 0)
        return outputs


class SimulatedClock:
    """Steps take what their records say; waiting takes no time."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def stepped(self, last: StepRecord | None) -> None:
        assert last is not None, "a simulated step says how long it took"
        self._now += last.seconds

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


def closed(users: int, engine: FakeEngine, **changes: object) -> Window:
    config = replace(LoadConfig(requests=3, max_new_tokens=4, warmup=users, warmup_tokens=4), **changes)  # type: ignore[arg-type]
    asks = [Ask([100 * i]) for i in range(10)]
    return run_load(engine, asks, ClosedLoop(users), config, SimulatedClock())


def test_closed_loop_counts_exactly_what_its_window_holds() -> None:
    """Two users; warm-up of 2 and 4 tokens; window from 1.0 s, when the first counted one comes, to 3.0 s."""
    engine = FakeEngine()
    window = closed(2, engine)
    assert [served.arrived for served in window.requests] == [1.0, 1.5, 2.0]
    assert [served.times for served in window.requests] == [[1.5, 2.0], [2.0, 2.5], [2.5, 3.0]]
    assert [served.tokens[0] for served in window.requests] == [0, 100, 200]
    assert (window.seconds, window.tokens, window.finished, len(window.steps)) == (2.0, 16, 4, 4)
    assert window.histogram == (0, 8)
    assert engine.idle and engine.most == 2, "what was in flight is cancelled, and nobody more came"
    found = summarise(window, LEAST)
    assert (found.tokens_per_second, found.user_p50, found.user_p95) == (8.0, 4.0, 4.0)
    assert (found.ttft_p50, found.ttft_p95, found.gap_p50, found.rounds_per_request) == (0.5, 0.5, 0.5, 2.0)
    assert (found.budget, found.acceptance, found.tau, found.draft_share) == (4.0, 1 / 3, 2.0, pytest.approx(0.2))
    assert (found.attainment, found.goodput) == (1.0, 2.0)
    assert summarise(window, replace(LEAST, tokens_per_second=4.01)).goodput == 0
    assert summarise(window, replace(LEAST, ttft=0.49)).goodput == 0


def test_load_never_falls_and_counted_prompts_do_not_depend_on_speed() -> None:
    for per_step in (1, 2, 4):
        engine = FakeEngine(per_step)
        window = closed(3, engine, requests=5)
        assert all(step.requests == 3 for step in window.steps)
        assert [served.index for served in window.requests] == [0, 1, 2, 3, 4]
        assert window.tokens / window.seconds == 3 * per_step / 0.5


def test_window_by_seconds() -> None:
    window = closed(2, FakeEngine(), requests=None, seconds=1.2)
    assert window.seconds == 1.5 and len(window.requests) == 2 and window.tokens == 12
    with pytest.raises(ValueError, match="no request was answered within"):
        summarise(closed(2, FakeEngine(), requests=None, seconds=0.1), LEAST)


def test_poisson_waits_count_from_the_arrival() -> None:
    engine, clock = FakeEngine(per_step=4, seconds=1.0), SimulatedClock()
    config = LoadConfig(requests=6, max_new_tokens=4, warmup=1)
    window = run_load(engine, [Ask([0])], Poisson(2.0, 5, 0.0), config, clock)
    gaps = random.Random(5)
    moments = [0.0]
    while len(moments) < 60:
        moments.append(moments[-1] + gaps.expovariate(2.0))
    starts, now, arrived = [], 0.0, 0
    while arrived < 20:  # who has come by the beginning of a step is answered at its end
        now = max(now, moments[arrived])
        while moments[arrived] <= now:
            starts.append(now)
            arrived += 1
        now += 1.0
    counted = [moments.index(served.arrived) for served in window.requests]
    first = counted[0]
    assert first == next(i for i, start in enumerate(starts) if start >= 1.0)
    assert counted == list(range(first, first + 6))
    for served, i in zip(window.requests, counted, strict=True):
        assert served.times == [pytest.approx(starts[i] + 1.0)]
    assert max(served.times[0] - served.arrived for served in window.requests) > 1.2, "somebody waited"


def sweep(**changes: object) -> Sweep:
    base = Sweep("closed", (1, 2), ("none", "fixed-1", "look-ahead"), 2, 3, None, 4, LEAST)
    return replace(base, **changes)  # type: ignore[arg-type]


def measure(
    directory: Path, plan: Sweep, speeds: dict[str, int], verdict: str = "same", stop_after: int | None = None
) -> tuple[Journal, list[tuple[str, float]]]:
    served: list[tuple[str, float]] = []

    def serve(variant: str, level: float) -> FakeEngine:
        if stop_after is not None and len(served) > stop_after:
            raise KeyboardInterrupt
        served.append((variant, level))
        return FakeEngine(speeds[variant], shift=int(verdict != "same" and variant == "look-ahead"))

    def compare(ask: Ask, plain: Sequence[int], other: Sequence[int]) -> str:
        assert plain[0] == ask.prompt[0] and other[0] == ask.prompt[0] + 1
        return verdict

    journal = Journal(directory, {"seed": 0})
    prompts = [[100 * i] for i in range(10)]
    run_sweep(plan, serve, prompts, compare, journal, SimulatedClock)
    return journal, served


SPEEDS = {"none": 1, "fixed-1": 2, "look-ahead": 4}


def test_variants_take_turns_and_a_stopped_sweep_goes_on(tmp_path: Path) -> None:
    journal, served = measure(tmp_path / "whole", sweep(), SPEEDS)
    assert served[0] == ("none", 2) and len(served) == 13, "the reference, then 3 variants x 2 levels x 2 repeats"
    assert [p.key for p in journal.points[:6]] == [
        ("none", 1, 0), ("fixed-1", 1, 0), ("look-ahead", 1, 0),
        ("fixed-1", 2, 0), ("look-ahead", 2, 0), ("none", 2, 0),
    ]  # fmt: skip
    assert journal.points[6].variant == "fixed-1", "somebody else comes first in the next repeat"
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path / "cut", sweep(), SPEEDS, stop_after=5)
    path = tmp_path / "cut" / "points.jsonl"
    assert len(path.read_bytes().splitlines()) == 5
    with path.open("ab") as file:
        file.write(b'{"variant": "none", "lev')  # killed inside a line
    again, rest = measure(tmp_path / "cut", sweep(), SPEEDS)
    assert len(rest) == 7 and again.points == journal.points
    assert path.read_bytes() == (tmp_path / "whole" / "points.jsonl").read_bytes()
    assert measure(tmp_path / "cut", sweep(), SPEEDS)[1] == []
    assert len(measure(tmp_path / "cut", sweep(repeats=3), SPEEDS)[1]) == 6
    with pytest.raises(ValueError, match="other settings: seed was 0, now 1"):
        Journal(tmp_path / "cut", {"seed": 1})
    path.write_text('{"variant": "none"}\n')
    with pytest.raises(ValueError, match=r"points\.jsonl:1: not a point"):
        Journal(tmp_path / "cut", {"seed": 0})


def test_a_sweep_without_points_binds_nobody_to_its_settings(tmp_path: Path) -> None:
    failed = Journal(tmp_path, {"backend": "vllm"})
    failed.keep_reference([[1]])
    failed.keep_said([[[2]]])
    assert Journal(tmp_path, {"backend": "vllm"}).reference() == [[1]]
    other = Journal(tmp_path, {"backend": "sglang"})
    assert other.reference() is None and other.said() == []
    assert Journal(tmp_path, {"backend": "sglang"}).points == []


@pytest.mark.parametrize("verdict", ["tie", "mismatch"])
def test_responses_are_compared_with_plain_decoding(tmp_path: Path, verdict: str) -> None:
    points = summarise_points(measure(tmp_path, sweep(), SPEEDS, verdict)[0].points)
    for point in points:
        count = 2 * max(3, int(point.level))  # 2 repeats
        other = count if point.variant == "look-ahead" else 0
        wrong = {"tie": point.ties, "mismatch": point.mismatches}
        assert (point.same, wrong[verdict], sum(wrong.values())) == (count - other, other, other)


def point(variant: str, level: float, repeat: int, rate: float) -> Point:
    metrics = summarise(closed(2, FakeEngine()), LEAST).model_copy(
        update={"tokens_per_second": rate, "user_p50": rate / level, "budget": 1 + 8 / level}
    )
    return Point(variant=variant, level=level, repeat=repeat, metrics=metrics, same=3, ties=0, mismatches=0)


def test_verdicts() -> None:
    rates = {
        "none": (10.0, 40.0), "fixed-1": (12.0, 50.0), "fixed-3": (15.0, 30.0),
        "prefix": (14.0, 44.0), "look-ahead+skip": (15.0, 49.0),
    }  # fmt: skip
    points = [
        point(variant, level, repeat, rate + repeat - 1)
        for variant, found in rates.items()
        for level, rate in zip((1, 8), found, strict=True)
        for repeat in range(3)
    ]
    summaries = summarise_points(points)
    assert summaries[0].quartiles["tokens_per_second"] == (9.5, 10.0, 10.5)
    first, second = level_verdicts(summaries)
    assert (first.static, first.adaptive, first.ratio) == ("fixed-3", "look-ahead+skip", 1.0)
    assert (second.static, second.adaptive, second.ratio) == ("fixed-1", "look-ahead+skip", 0.98)
    overall = overall_verdicts(summaries)
    assert [v.variant for v in overall] == ["look-ahead+skip", "prefix", "fixed-1", "fixed-3", "none"]
    assert [v.adaptive for v in overall] == [True, True, False, False, False]
    assert overall[0].mean_ratio == pytest.approx((1.5 + 1.225) / 2) and overall[3].worst_ratio == 0.75
    assert overall_verdicts([p for p in summaries if p.variant != "none"]) == []
    partial = [p for p in summaries if (p.variant, p.level) != ("prefix", 8)]
    assert "prefix" not in {v.variant for v in overall_verdicts(partial)}


def test_plots_are_written(tmp_path: Path) -> None:
    points = summarise_points([point(v, c, 0, c * 5.0) for v in ("none", "fixed-1", "prefix") for c in (1, 2, 4)])
    frontier = Frontier(arrivals="closed", points=points, levels=[], overall=[], settings={}, machine={}, versions={})
    assert len(write_plots(frontier, tmp_path)) == 2 and histogram_rows(frontier) == []
    for one in points:
        one.acceptance_histogram = {"none": (9,), "fixed-1": (1, 2), "prefix": (300, 1, *[0] * 9, 40, 59)}[one.variant]
    paths = write_plots(frontier, tmp_path)
    assert paths[2].name == "accepted.png" and all(path.stat().st_size > 10_000 for path in paths)
    headings, first, second, *_ = histogram_rows(frontier)
    assert headings == ["load", "variant", *map(str, range(10)), "10+"]
    assert first == ["1", "fixed-1", "33", "67", *[""] * 9] and second == ["1", "prefix", "75", "<1", *["0"] * 8, "25"]


def test_variants_by_name() -> None:
    cost = SpsTable([1.0])
    names = default_variants(4, 0.2, confident=True)
    built = {name: build_variant(name, 4, 0.2, cost) for name in names}
    lengths = {"none": 0, "fixed-1": 1, "fixed-2": 2, "fixed-3": 3}
    assert {name: variant.drafts for name, variant in built.items()} == {name: lengths.get(name, 4) for name in names}
    assert all(variant.name == name for name, variant in built.items())
    assert names[:5] == ["none", "fixed-1", "fixed-2", "fixed-3", "threshold"]
    assert default_variants(4, None, confident=True)[:5] == ["none", "fixed-1", "fixed-2", "fixed-3", "prefix"]
    assert default_variants(4, 0.2, confident=False) == ["none", "fixed-1", "fixed-2", "fixed-3"]
    skipping = build_variant("look-ahead+skip", 4, None, cost).policy
    assert isinstance(skipping, SkipDrafting) and isinstance(skipping.policy, LookAhead)
    assert isinstance(skipping.cost, LearnedCost) and skipping.cost is skipping.policy.cost
    assert not build_variant("look-ahead", 4, None, cost).policy.skips
    for bad, message in (("fixed-5", "drafts 1 to 4"), ("fixed-0", "drafts 1 to 4"), ("best", "no variant 'best'")):
        with pytest.raises(ValueError, match=message):
            build_variant(bad, 4, 0.2, cost)
    with pytest.raises(ValueError, match="recommends none"):
        build_variant("threshold", 4, None, cost)
    with pytest.raises(ValueError, match=r"variant prefix decides by what steps cost here.*outrider profile"):
        build_variant("prefix", 4, 0.2, None)


def test_a_variant_gets_as_much_of_the_drafter_as_it_wants() -> None:
    target = toy_target()
    drafter = BlockDrafter(DrafterWeights(DSpark(toy_config()).eval()), target)
    names = ("none", "fixed-3", "threshold")
    found = {name: limited(drafter, build_variant(name, 4, 0.2, None).drafts) for name in names}
    shortened = found["fixed-3"]
    assert found["none"] is None and found["threshold"] is drafter
    assert isinstance(shortened, LimitedDrafter)
    assert (shortened.gamma, shortened.aux_layers) == (3, drafter.aux_layers)
    engine = Engine(target, shortened)
    engine.submit(Request("a", [5, 6, 7], rules=StopRules(12, stop_ids=())))
    proposed = []
    while not engine.idle:
        engine.step()
        assert engine.last is not None
        proposed.append(engine.last.proposed)
    assert max(proposed) == 3, "blocks are not drawn in full and cut"


def test_a_tree_is_pruned_not_cut() -> None:
    target = toy_target()
    whole = DynamicTreeDrafter(Eagle3Drafter(DrafterWeights(make_drafter(target)), target), TreeShape(3, 4, 20))
    assert limited(whole, build_variant("fixed-20", 20, None, None).drafts) is whole
    pruned = limited(whole, build_variant("fixed-5", 20, None, None).drafts)
    assert isinstance(pruned, LimitedDrafter) and pruned.trees and (pruned.nodes, pruned.gamma) == (5, 3)
    asked: list[int | None] = []
    real = whole.propose

    def propose(calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        asked.extend(call.nodes for call in calls)
        return real(calls, min_confidence)

    whole.propose = propose  # type: ignore[method-assign]
    plain = generate(target, [5, 6, 7], rules=StopRules(12, stop_ids=())).tokens
    engine, found, proposed = Engine(target, pruned), list[int](), list[int]()
    engine.submit(Request("a", [5, 6, 7], rules=StopRules(12, stop_ids=())))
    while not engine.idle:
        for output in engine.step():
            found += output.tokens
        assert engine.last is not None
        proposed.append(engine.last.proposed)
    assert found == plain and max(proposed) == 5 and set(asked) == {5}


def test_the_verb_with_trees(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.utils.measure.set_up", lambda threads: None)
    loaded = load_target(str(toy / "target"))
    module = make_drafter(loaded, draft_vocab=loaded.vocab_size)
    save_drafter(Checkpoint(DrafterWeights(module)), tmp_path / "drafter")
    config = ProfileConfig(max_requests=2, max_tokens=16, contexts=(16,), repeats=1, seconds=0.0)
    served = Eagle3Drafter(DrafterWeights(module), loaded)
    measure_profile(loaded, served.with_trees(TreeSize(9)), config).save(tmp_path / "p.json")
    out = tmp_path / "out"
    command = ["--target", toy / "target", "--drafter", tmp_path / "drafter", "--tasks", toy / "tasks.jsonl"]
    command += ["--out", out, "--concurrency", "2", "--requests-per-point", 3, "--max-new-tokens", 6, "--repeats", 1]
    command += ["--tree", 9, "--variants", "fixed-4,fixed-9,prefix", "--profile", tmp_path / "p.json"]
    found = invoke("bench", *command)
    assert found.exit_code == 0, (found.output, found.exception)
    frontier = Frontier.model_validate_json((out / "frontier.json").read_text())
    rows = {p.variant: p.median("budget") or 0 for p in frontier.points}
    assert list(rows) == ["none", "fixed-4", "fixed-9", "prefix"]
    assert 2 < rows["fixed-4"] <= 5 < rows["fixed-9"] <= 10 and not any(p.mismatches for p in frontier.points)
    found = invoke("bench", *command, "--confidence-threshold", "0.5")
    assert isinstance(found.exception, ValueError) and "--tree with --confidence-threshold" in str(found.exception)


def test_mixed_prompts(tmp_path: Path) -> None:
    for name, count in (("a", 5), ("b", 2)):
        lines = [json.dumps({"id": f"{name}{i}", "turns": [f"{name} {i}", "more"]}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    tasks = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    mixed = mixed_prompts(byte_tokenizer(), tasks, 6, seed=1)
    assert [p.name[0] for p in mixed] == ["a", "b", "a", "b", "a", "a"] and len({p.name for p in mixed}) == 6
    assert mixed == mixed_prompts(byte_tokenizer(), tasks, 6, seed=1) != mixed_prompts(byte_tokenizer(), tasks, 6, 2)
    assert mixed[:3] == mixed_prompts(byte_tokenizer(), tasks, 3, seed=1)
    with pytest.raises(ValueError, match="no prompt file"):
        mixed_prompts(byte_tokenizer(), ["nope.jsonl"], 3, 1)


def test_impossible_sweeps() -> None:
    for changes, message in (
        ({"levels": (1, 1)}, "different numbers above 0"),
        ({"levels": (1.5,)}, "number of users must be whole"),
        ({"variants": ("none", "none")}, "named twice"),
        ({"repeats": 0}, "at least 1"),
        ({"requests": None}, "give one of the two"),
        ({"seconds": 3.0}, "give one of the two"),
        ({"requests": None, "seconds": float("inf")}, "seconds=inf must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep(**changes)


def test_wall_clock_waits() -> None:
    clock = WallClock()
    clock.wait_until(clock.now() - 1)
    moment = clock.now() + 0.05
    clock.wait_until(moment)
    assert moment <= clock.now() < moment + 5


@pytest.mark.parametrize(("arrivals", "levels"), [("closed", ("--concurrency", "1,3")), ("poisson", ("--rates", "50"))])
def test_the_verb_on_a_toy_model(
    toy: Path, tmp_path: Path, arrivals: str, levels: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.utils.measure.set_up", lambda threads: None)
    loaded = load_target(str(toy / "target"))
    packed = load_checkpoint(toy / "drafter").serve(loaded)
    config = ProfileConfig(max_requests=2, max_tokens=16, contexts=(16,), repeats=1, seconds=0.1)
    measure_profile(loaded, packed, config).save(tmp_path / "profile.json")
    out = tmp_path / "out"
    command = ["--target", toy / "target", "--drafter", toy / "drafter", "--tasks", toy / "tasks.jsonl", "--out", out]
    command += ["--arrivals", arrivals, *levels, "--variants", "none,fixed-2,look-ahead+skip"]
    # Of --max-requests (poisson) depends how many numbers of rows are warmed up: a kernel of each shape for each.
    command += ["--requests-per-point", 5, "--max-new-tokens", 8, "--repeats", 1, "--max-requests", 3]
    found = invoke("bench", *command)
    assert isinstance(found.exception, ValueError) and "--profile FILE" in str(found.exception)
    found = invoke("bench", *command, "--variants", " , ")
    assert isinstance(found.exception, ValueError) and "--variants ' , ' names nothing" in str(found.exception)
    assert not out.exists()
    command += ["--profile", tmp_path / "profile.json"]
    found = invoke("bench", *command)
    assert found.exit_code == 0, (found.output, found.exception)
    frontier = Frontier.model_validate_json((out / "frontier.json").read_text())
    count = 2 if arrivals == "closed" else 1
    assert len(frontier.points) == 3 * count and len(frontier.levels) == (count if arrivals == "closed" else 0)
    for p in frontier.points:
        assert p.repeats == 1 and p.same + p.ties == 5 and p.mismatches == 0 and p.throughput > 0
        assert p.median("budget") == 1 if p.variant == "none" else p.median("budget") is not None
        assert p.variant != "fixed-2" or 1 < (p.median("budget") or 0) <= 3
        rounds = p.acceptance_histogram
        assert rounds is not None and len(rounds) <= {"none": 1, "fixed-2": 3}.get(p.variant, 8)
        least = p.median("tau") or 0  # what comes behind the last token of a response is accepted and not given
        assert least - 1e-9 <= sum((k + 1) * count for k, count in enumerate(rounds)) / sum(rounds) <= least + 1
    assert (out / "frontier.png").is_file() and (out / "load.png").is_file()
    before = (out / "points.jsonl").read_bytes()
    again = invoke("bench", *command)
    assert again.exit_code == 0 and (out / "points.jsonl").read_bytes() == before

"""Profiles: exact where measured, sane elsewhere, refused where they do not belong, and measured end to end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import outrider.cli.main as main
import outrider.decoding.profile as profile_module
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.decoding.config import ProfileConfig
from outrider.decoding.cost import Additive, Cell, Profile
from outrider.decoding.engine import Engine
from outrider.decoding.policies import PrefixScheduler, StepView
from outrider.decoding.profile import (
    break_even,
    forward_jobs,
    measure_profile,
    setting_of,
    shape_digest,
    sweep,
)
from outrider.decoding.request import Request, StepRecord
from outrider.drafters.base import DraftCall, Drafter, DrafterWeights
from outrider.drafters.draft import Draft
from outrider.drafters.dspark import DSpark
from outrider.drafters.eagle3 import DynamicTreeDrafter, Eagle3Drafter, TreeShape
from outrider.sampling import SamplingParams
from outrider.target.model import Target, load_target
from outrider.target.paged import PagedKV, Span
from outrider.utils.measure import machine
from tests.toys.eagle3 import make_drafter
from tests.toys.engine import toy_drafter
from tests.toys.profiles import SETTING, cells_of, linear, profile_of
from tests.toys.published import published_target
from tests.toys.target_directory import save_toy_target
from tests.toys.targets import randomise, toy_config, toy_target


def staircase(requests: float, tokens: float, context: float) -> float:
    """Cliffs behind 4, 8, 12, ... tokens."""
    return linear(requests, 4 * np.ceil(tokens / 4), context)


def noisy(requests: float, tokens: float, context: float) -> float:
    """The same, but 8 tokens seem cheaper than 5, 6 and 7."""
    return staircase(requests, tokens, context) - 0.001 * (tokens == 8)


def verify(profile: Profile, requests: int, tokens: int, context: float) -> float:
    return float(profile.verify_seconds(np.array([tokens]), requests, context)[0])


def test_rising_cells_are_exact() -> None:
    profile = profile_of(cells_of(staircase))
    for cell in profile.cells:
        assert verify(profile, cell.requests, cell.tokens, cell.context) == pytest.approx(cell.median, rel=1e-12)
    assert verify(profile, 1, 9, 64) > 1.1 * verify(profile, 1, 8, 64), "the test's cliff"


def test_cells_that_fall_are_pooled() -> None:
    profile = profile_of(cells_of(noisy))
    pooled = (3 * noisy(1, 7, 64) + noisy(1, 8, 64)) / 4
    assert [verify(profile, 1, b, 64) for b in (5, 6, 7, 8)] == pytest.approx([pooled] * 4)
    assert verify(profile, 1, 9, 64) == pytest.approx(noisy(1, 9, 64)), "the cliff behind them stays"
    for requests, context in product((1, 2, 3, 8), (64.0, 100.0)):
        curve_N = profile.verify_seconds(np.arange(requests, 150), requests, context)
        assert (np.diff(curve_N) >= 0).all()


@pytest.mark.parametrize(
    ("requests", "tokens", "context"),
    [
        (3, 9, 100.0),  # between rows and contexts
        (6, 7, 256.0),  # fewer tokens than the row of 8 requests was measured with
        (8, 100, 64.0),  # behind the row's own end, where another was measured
        (1, 400, 64.0),  # behind all
        (40, 320, 64.0),  # more requests
        (5, 20, 2000.0),  # longer contexts
        (40, 320, 2000.0),
    ],
)
def test_between_and_beyond_a_linear_table_is_that_line(requests: int, tokens: int, context: float) -> None:
    found = verify(profile_of(cells_of(linear)), requests, tokens, context)
    assert found == pytest.approx(linear(requests, tokens, context), rel=1e-9)


def test_between_cells_a_staircase_stays_between_them() -> None:
    profile = profile_of(cells_of(staircase))
    for requests, tokens, context in product((1, 3, 5, 7, 8), (8, 9, 12, 13, 30), (64.0, 150.0, 256.0)):
        around = [
            staircase(r, b, s)
            for r, b, s in product((requests - 1, requests, requests + 1), range(tokens - 4, tokens + 6), (64, 256))
        ]
        assert min(around) <= verify(profile, requests, tokens, context) <= max(around)
    assert verify(profile, 6, 8, 64) < verify(profile, 6, 9, 64), "the cliff is there between measured requests too"


def test_one_dense_row_gives_the_others_their_cliffs() -> None:
    every = cells_of(staircase)
    sparse = profile_of([c for c in every if c.requests == 1 or c.tokens % c.requests == 0])
    assert len(sparse.cells) < 0.7 * len(every)
    for requests, tokens, context in product((2, 4, 8), range(8, 17), (64, 256)):
        assert verify(sparse, requests, tokens, context) == pytest.approx(
            staircase(requests, tokens, context), rel=1e-9
        )


def test_a_step_is_draft_verify_and_the_rest() -> None:
    profile, tokens = profile_of(cells_of(linear)), np.array([4, 5, 12])
    parts = profile.verify_seconds(tokens, 4, 100.0) + profile.other_seconds(4, tokens - 4)
    np.testing.assert_allclose(profile.seconds(tokens, 4, 100.0), parts, rtol=1e-12)
    assert profile.draft_seconds(0) == 0.0
    assert profile.draft_seconds(3) == pytest.approx(0.0053)
    assert profile.draft_seconds(20) == pytest.approx(0.024)
    # Reading comes with every block. Blocks kept short: linear in depth between one token and gamma = 7.
    assert [profile.draft_seconds(3, k) for k in (0, 1, 4, 7, 9)] == pytest.approx([0, 0.0038, 0.00455, 0.0053, 0.0053])
    assert profile.other_seconds(4, tokens - 4) == pytest.approx([0.0018] * 3)
    dear = profile.model_copy(update={"verified": 0.001})
    np.testing.assert_allclose(dear.seconds(tokens, 4, 100.0) - profile.seconds(tokens, 4, 100.0), [0, 0.001, 0.008])
    plain = profile.plain()
    assert plain.draft_seconds(3) == 0.0 and plain.other.at(4) == pytest.approx(0.0018)
    assert np.array_equal(plain.verify_seconds(tokens, 4, 100.0), profile.verify_seconds(tokens, 4, 100.0))


def test_the_additive_fit() -> None:
    fit = Additive.fit(cells_of(linear))
    assert (fit.bias, fit.alpha, fit.theta, fit.sigma) == pytest.approx((0.01, 0.002, 0.0005, 1e-6), rel=1e-6)
    assert fit.spread < 1e-9
    cells = cells_of(staircase)
    fit = Additive.fit(cells)
    for cell, residual in zip(cells, fit.residuals, strict=True):
        line = fit.bias + fit.alpha * cell.requests + fit.theta * cell.tokens + fit.sigma * cell.requests * cell.context
        assert residual == pytest.approx(line / cell.median - 1)
    assert 0.005 < fit.spread < 0.1
    one = Additive.fit(cells_of(linear, (1,), (64,))[:1])  # one cell says nothing of slopes; the line passes through it
    assert one.residuals == pytest.approx([0.0])


def test_a_profile_is_of_what_it_is_used_with() -> None:
    profile = profile_of(cells_of(linear))
    profile.check(SETTING)
    profile.check(SETTING.model_copy(update={"drafter": None}))
    changes = {"target": "u", "dtype": "bfloat16", "processor": "another", "threads": 4, "drafter": "e"}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=rf"else: {name} is .*, here it is {value}\. Measure"):
            profile.check(SETTING.model_copy(update={name: value}))
    with pytest.raises(ValueError) as every:
        profile.check(SETTING.model_copy(update=changes))
    assert all(f"{name} is " in str(every.value) for name in changes)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    profile = profile_of(cells_of(staircase))
    profile.save(path)
    again = Profile.load(path)
    assert again == profile and [p.name for p in path.parent.iterdir()] == ["profile.json"]
    assert verify(again, 3, 9, 100.0) == verify(profile, 3, 9, 100.0)

    raw = json.loads(path.read_text())
    wrongs: list[tuple[str, object, str]] = [
        ("format", 1, "format: Input should be 2"),
        ("setting", {**raw["setting"], "threads": "many"}, "setting.threads"),
        ("cells", [{**raw["cells"][0], "median": -1.0}], "cells.0.median"),
        ("cells", raw["cells"][:1] * 2, "come twice"),
        ("cells", [c for c in raw["cells"] if (c["requests"], c["context"]) != (4, 64)], "4 requests .* at context 64"),
        ("draft", {"requests": [2, 1], "seconds": [[1, 1, 1]] * 2}, "draft: .*ascending"),
        ("unheard", 1, "unheard: Extra"),
    ]
    for name, value, message in wrongs:
        path.write_text(json.dumps({**raw, name: value}))
        with pytest.raises(ValueError, match=rf"profile\.json: not a profile this version reads: .*{message}"):
            Profile.load(path)
    path.write_text(json.dumps(raw)[:-30])
    with pytest.raises(ValueError, match="the file: Invalid JSON"):
        Profile.load(path)
    with pytest.raises(ValueError, match="no such profile"):
        Profile.load(tmp_path / "none.json")


def test_a_committed_profile_is_still_of_its_drafter() -> None:
    """Fields that change no shape come and go without making profiles useless. It is of the drafter shipped before."""
    root = Path(__file__).parents[2]
    stored = json.loads((root / "docs" / "results" / "load" / "profile.json").read_text())["setting"]["drafter"]
    config = replace(load_checkpoint("smollm2-135m-dspark").config, draft_vocab_size=12288)
    assert stored == f"DSpark, gamma 7, shape {shape_digest(config)}"


def test_a_policy_decides_with_it() -> None:
    """The ninth token of the forward costs a step of 2 ms; the three behind it are free, and an early stop is early."""
    view = StepView.of([[0.9] * 5, [0.5] * 5], [5, 5], [64, 64])
    assert PrefixScheduler(profile_of(cells_of(linear))).lengths(view).tolist() == [5, 2]
    assert PrefixScheduler(profile_of(cells_of(staircase))).lengths(view).tolist() == [5, 1]


def test_rows_of_prompts_are_priced_without_logits_and_by_the_keys_they_see() -> None:
    """As the cells of one request have them: those of several have a logit row for every token."""

    def cost(requests: float, tokens: float, context: float) -> float:
        return linear(requests, tokens, context) + 0.004 * (requests > 1) * tokens

    profile = profile_of(cells_of(cost))
    rows = np.array([4, 6])
    beside = profile.verify_seconds(rows, 4, 64, prompts=[(64, 10)])
    assert beside == pytest.approx(profile.verify_seconds(rows, 4, 64) + 10 * 0.0005)
    assert (beside < profile.verify_seconds(rows + 10, 4, 64) - 0.03).all()


PROMPTS: list[list[tuple[int, int]]] = [
    [(0, 100)],
    [(64, 40)],
    [(0, 30), (0, 30), (0, 40)],  # fewer keys than one request of 100 at any context
    [(500, 20), (0, 60)],
    [(0, 150), (20, 150), (0, 200)],  # more rows than there are cells
]


@pytest.mark.parametrize("prompts", PROMPTS)
def test_a_chunk_of_a_prompt_costs_by_its_rows_and_the_keys_they_see(prompts: list[tuple[int, int]]) -> None:
    """Against the very cost that the cells are of: so much a row and so much a key of each row."""

    def cost(requests: float, tokens: float, context: float) -> float:
        return 0.02 + 0.001 * tokens + 1e-6 * tokens * (context + tokens / requests / 2)

    cells = [
        Cell(requests=1, tokens=b, context=s, low=t, median=t, high=t)
        for b in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
        for s in (64, 256, 768)
        for t in [cost(1, b, s)]
    ]
    found = profile_of(cells).table.prompt_seconds(prompts)
    expected = sum(0.001 * count + 1e-6 * count * (cached + count / 2) for cached, count in prompts)
    assert found == pytest.approx(expected, rel=0.02)
    assert profile_of(cells).table.prompt_seconds([]) == 0.0


@pytest.mark.timed
def test_policies_may_ask_at_every_step() -> None:
    """A generous bound on one call, for 32 requests that drafted 7 tokens each."""
    profile, tokens = profile_of(cells_of(staircase)), np.arange(32, 257)
    best = float("inf")
    for _ in range(50):
        started = time.perf_counter()
        for _ in range(20):
            profile.seconds(tokens, 7, 123.4)
        best = min(best, (time.perf_counter() - started) / 20)
    assert best < 100e-6, best


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target (target/) and its drafter (drafter/)."""
    directory = tmp_path_factory.mktemp("toy")
    vocab = save_toy_target(directory / "target", layers=5)
    drafter = DSpark(toy_config(vocab_size=vocab, draft_vocab_size=vocab))
    randomise(drafter)
    save_drafter(Checkpoint(DrafterWeights(drafter)), directory / "drafter")
    return directory


Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`outrider profile ARGS` in this process, on one thread: what it prints, or the mistake it names."""
    monkeypatch.setattr("outrider.utils.measure.set_up", lambda threads: torch.set_num_threads(1))

    def call(*args: object) -> str:
        result = CliRunner().invoke(main.app, ["profile", *map(str, args)], env={"COLUMNS": "160"})
        if isinstance(result.exception, ValueError):
            return str(result.exception)
        assert result.exit_code == 0, result.output
        return result.output

    return call


def test_the_verb_measures_what_fits_its_own_setting(run: Run, toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "p" / "profile.json"
    sizes = ("--max-requests", 3, "--max-tokens", 20, "--contexts", "16,5", "--repeats", 2, "--plot", "--tables")
    printed = run("--target", toy / "target", "--drafter", toy / "drafter", "--out", out, *sizes)
    assert "(2 repeats)" in printed and out.with_suffix(".png").stat().st_size > 10_000
    for words in (
        "after 16 cached tokens",
        "forwards per second",
        "3 req.",
        "drafter reads",
        "additive form: ",
        "% at worst",
        "per cent",
    ):
        assert words in printed, printed
    *_, step, draft, verify, pays, form, verdict = printed.splitlines()
    assert step.startswith("plain step after 16 tokens: ") and "with 1 request, " in step and "3 requests" in step
    assert draft.startswith("4 drafts: ") and verify.startswith("verifying them: ") and form.startswith("additive form")
    assert pays.startswith("accepted length at which they pay: ") and verdict.startswith("Verdict: drafts ")

    profile = Profile.load(out)
    assert {(c.requests, c.context) for c in profile.cells} == set(product((1, 2, 3), (5, 16)))
    assert {c.tokens for c in profile.cells if c.requests == 3} == {3, 6, 9, 12, 15}
    assert {c.tokens for c in profile.cells if c.requests == 1} == set(range(1, 21))
    assert all(c.low <= c.median <= c.high for c in profile.cells) and len(profile.fit.residuals) == len(profile.cells)
    assert profile.draft and profile.extend and profile.draft.requests == profile.other.requests == [1, 2, 3]
    assert (profile.seconds(np.arange(3, 40), 3, 10.0) > 0).all()

    assert (profile.setting.threads, profile.setting.processor) == (1, machine()["cpu"])
    target = load_target(str(toy / "target"))
    checkpoint = load_checkpoint(toy / "drafter")
    profile.check(setting_of(target, checkpoint.serve(target)))
    profile.check(setting_of(target, checkpoint.weights.serve(target)))  # costs the same
    other = DSpark(replace(checkpoint.config, num_hidden_layers=1)).eval()
    with pytest.raises(
        ValueError, match=r"else: drafter is DSpark, gamma 4, shape .* here it is DSpark, gamma 4, shape"
    ):
        profile.check(setting_of(target, Checkpoint(DrafterWeights(other)).serve(target)))
    with pytest.raises(ValueError, match=r"else: target is target \(5 x 32\), here it is toy-qwen3 \(5 x 32\)\. "):
        profile.check(setting_of(toy_target("qwen3"), None))


def test_steps_without_drafts_are_timed_without_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps take beside their forwards is that of plain steps; what a verified draft adds is told apart."""
    step = SimpleNamespace(admitted=4)

    def steps(
        target: Target, drafter: Drafter | None, params: Sequence[SamplingParams], repeats: int
    ) -> list[SimpleNamespace]:
        seconds = 0.001 * len(params) + (0.0 if drafter is None else 0.008)
        return [SimpleNamespace(**vars(step), other_seconds=seconds)] * repeats

    monkeypatch.setattr(profile_module, "engine_steps", steps)
    target = toy_target("qwen3")
    config = ProfileConfig(max_requests=2, max_tokens=8, contexts=(4,), repeats=1)
    found = measure_profile(target, toy_drafter(target), config)
    assert [seconds for seconds in found.other.seconds] == [(0.001,) * 3, (0.002,) * 3]
    assert found.verified == pytest.approx(0.008 / 4)


def test_the_verb_without_a_drafter_and_its_mistakes(run: Run, toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    command = ("--target", toy / "target", "--drafter", "none", "--out", out, "--repeats", 1)
    run(*command, "--max-requests", 1, "--max-tokens", 2, "--contexts", "8")
    profile = Profile.load(out)
    assert profile.draft is None and profile.setting.drafter is None and len(profile.cells) == 2
    out.unlink()
    for options, message in (
        (("--contexts", "300", "--max-tokens", 32), r"need 332 positions, .*/target has 256; lower --contexts"),
        (("--contexts", "8,x"), "--contexts '8,x'"),
        (("--contexts", "8,8"), r"contexts \[8, 8\] must be different"),
        (("--max-tokens", 8), "--max-tokens 8 is below --max-requests 32"),
    ):
        found = run(*command, *options)
        assert re.search(message, found), found
        assert not out.exists()


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "deepseek_v4"])
@torch.inference_mode()
def test_states_and_latents_are_profiled_at_any_context(name: str) -> None:
    jobs = forward_jobs(published_target(name), (), [(2, 4, 20), (1, 3, 40), (2, 2, 8)], 2)
    assert all(job() > 0 for _ in range(2) for job in jobs.values())


def test_requests_are_profiled_at_the_temperatures_that_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted, verified = list[list[float]](), list[list[float]]()

    class Recorded(Engine):
        def submit(self, request: Request) -> None:
            verified[-1].append(request.params.temperature)
            super().submit(request)

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            verified.append([])

    target = toy_target("qwen3")
    drafter, propose = toy_drafter(target), type(toy_drafter(target)).propose

    def recorded(self: Drafter, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        drafted.append([call.params.temperature for call in calls])
        return propose(self, calls, min_confidence)

    monkeypatch.setattr(type(drafter), "propose", recorded)
    monkeypatch.setattr(profile_module, "Engine", Recorded)
    config = ProfileConfig(3, max_tokens=8, contexts=(4,), repeats=1, seconds=0.0, temperatures=(0.0, 0.7))
    profile = measure_profile(target, drafter, config)
    assert profile.temperatures == [0.0, 0.7]
    assert verified == [[0.0], [0.0, 0.7], [0.0, 0.7, 0.0], [0.0, 0.7, 0.0]]
    assert {len(one): one for one in drafted} == {1: [0.0], 2: [0.0, 0.7], 3: [0.0, 0.7, 0.0]}
    with pytest.raises(ValueError, match="--temperature -1"):
        ProfileConfig(temperatures=(0.0, -1.0))


def test_trees_are_profiled_by_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = toy_target(), list[list[Span]]()
    real = target.forward_ragged

    def forward_ragged(spans: list[Span], kv: PagedKV, aux_layers: tuple[int, ...]) -> object:
        asked.append(spans)
        return real(spans, kv, aux_layers)

    monkeypatch.setattr(target, "forward_ragged", forward_ragged)
    drafter = DynamicTreeDrafter(Eagle3Drafter(DrafterWeights(make_drafter(target)), target), TreeShape(3, 4, 25))
    config = ProfileConfig(max_requests=2, max_tokens=60, contexts=(8,), repeats=1, seconds=0.0)
    profile = measure_profile(target, drafter, config)
    counts = {r: [cell.tokens for cell in profile.cells if cell.requests == r] for r in (1, 2)}
    assert max(counts[2]) == 2 * 26 and {2 * k for k in (1, 2, 16, 24, 26)} <= set(counts[2]) and 34 not in counts[2]
    widths = {len(span.tokens): span.parents for spans in reversed(asked) for span in spans if len(spans) == 1}
    assert widths[26] is not None and widths[26][:5] == [-1, 0, 0, 1, 1] and widths[60] is None, (
        "prefill has no branches"
    )
    steps = {len(spans[0].tokens) for spans in asked if spans[0].past and len(spans[0].tokens) > 1}
    assert 26 in steps, "what a step does besides is measured with whole trees"
    assert profile.gamma == 3 and str(profile.setting.drafter).startswith("Eagle3, tree of 25, depth 3, shape ")
    for other in (TreeShape(3, 4, 24), TreeShape(3, 3, 25)):  # narrower rows cost less to draft
        with pytest.raises(ValueError, match="drafter is Eagle3, tree of 25, depth 3"):
            profile.check(setting_of(target, DynamicTreeDrafter(drafter.drafter, other)))


def test_break_even_is_where_drafting_is_as_fast_as_plain_decoding() -> None:
    profile = profile_of(cells_of(linear))
    for count, tau in break_even(profile, 64, 8).items():
        around = 0.001 + 0.0002 * count
        plain = linear(count, count, 64) + around
        drafts = linear(count, 8 * count, 64) + around + 0.002 + 0.0011 * count
        assert tau == pytest.approx(drafts / plain, rel=1e-6)
    free = break_even(profile.plain(), 64, 8)
    assert list(free) == [1, 2, 4, 8] and free[1] < break_even(profile, 64, 8)[1]


def test_what_a_step_does_besides_is_repeated_as_often_as_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def steps(
        target: Target, drafter: Drafter | None, params: Sequence[SamplingParams], repeats: int
    ) -> list[StepRecord]:
        asked.append(repeats)
        return engine_steps(target, drafter, params, repeats)

    engine_steps = profile_module.engine_steps
    monkeypatch.setattr(profile_module, "engine_steps", steps)
    config = ProfileConfig(max_requests=2, max_tokens=2, contexts=(4,), repeats=9, seconds=0.0)
    assert measure_profile(toy_target(), None, config).repeats == 3 and asked == [3, 3]


def test_jobs_take_turns_and_end_in_time() -> None:
    calls: list[int] = []

    def job(number: int) -> float:
        calls.append(number)
        time.sleep(0.002)
        return 1.0

    jobs = {("forward", (1, n, 8)): partial(job, n) for n in range(6)}
    timed = sweep(jobs, 20, 0.01, lambda what, done, total: None)
    assert len(calls) == 6 + 18, "a warm-up that is not counted, then three sweeps although they take too long"
    assert all(seconds == [1.0] * 3 for seconds in timed.values())
    sweeps = [calls[i : i + 6] for i in range(6, 24, 6)]
    assert all(sorted(s) == list(range(6)) for s in sweeps) and len({tuple(s) for s in sweeps}) == 3


def test_tokens_are_divided_evenly_and_unevenly_in_turn() -> None:
    target = toy_target()
    asked: list[list[int]] = []

    def forward_ragged(spans: list[Span], kv: PagedKV, aux_layers: tuple[int, ...]) -> None:
        asked.append([len(span.tokens) for span in spans])
        assert all(len(span.blocks) * 16 >= span.end for span in spans)

    target.forward_ragged = forward_ragged  # type: ignore[method-assign,assignment]
    jobs = forward_jobs(target, (), [(3, 10, 28), (4, 4, 8), (2, 13, 8)], 6)
    for job in jobs.values():
        for _ in range(3):
            job()
    assert asked == [[4, 3, 3], [6, 3, 1], [4, 3, 3], *[[1, 1, 1, 1]] * 3, *[[7, 6]] * 3]


def test_a_request_verifies_a_block_at_most_and_prefills_beyond() -> None:
    target = toy_target()
    asked: list[list[Span]] = []

    def forward_ragged(spans: list[Span], kv: PagedKV, aux_layers: tuple[int, ...]) -> None:
        asked.append(spans)

    target.forward_ragged = forward_ragged  # type: ignore[method-assign,assignment]
    jobs = forward_jobs(target, (), [(3, 17, 20), (1, 40, 8)], 6)
    for job in jobs.values():
        job()
    spans, prefill = asked
    assert [len(span.tokens) for span in spans] == [6, 6, 5] and {span.past for span in spans} == {20}
    assert [span.logits for span in spans] == [6, 6, 5]
    assert [(len(span.tokens), span.logits, span.past) for span in prefill] == [(40, 6, 8)]
    blocks = [block for span in spans for block in span.blocks]
    assert len(set(blocks)) == len(blocks) and all(len(span.blocks) * 16 >= span.end for span in spans)

"""What decoding chooses by itself, and what a caller may ask for instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import outrider
import outrider.api.scheduling as scheduling
from outrider.api.scheduling import BY_PROFILE, UNGATED, choose_scheduling
from outrider.data.sources import TaskSettings
from outrider.decoding.cost import Curve
from outrider.decoding.drafting import Drafting
from outrider.decoding.engine import Engine
from outrider.decoding.learned_cost import LearnedCost
from outrider.decoding.policies import FixedPolicy, LookAhead, Policy, SkipDrafting, ThresholdPolicy
from outrider.decoding.profile import MachineProfile, setting_of
from outrider.decoding.request import Output
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import Drafter, Sources
from outrider.drafters.draft import TreeSize
from outrider.drafters.ngram import HybridDrafter
from outrider.evaluation.evaluate import evaluate
from outrider.sampling import SamplingParams
from outrider.serving.start import build_server
from outrider.target.model import Target
from tests.toys.profiles import cells_of, linear, profile_of
from tests.toys.shipped import tasks_file

PROMPT = "say a word"
KNOWN = MachineProfile(profile_of(cells_of(linear)), Path("kept.json"), None)
LEARNED = LearnedCost(KNOWN.profile)


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step costs by a formula, as if this machine had been measured."""

    def known(target: Target, drafter: Drafter | None, say: Callable[[str], None], *, again: bool) -> MachineProfile:
        return KNOWN

    monkeypatch.setattr(scheduling, "machine_profile", known)


@pytest.fixture
def model(toy: Path) -> outrider.Model:
    return outrider.load(toy / "target", drafter=toy / "drafter", device="cpu")


def test_costs_decide_by_default_and_the_text_is_plain(profiled: None, model: outrider.Model) -> None:
    chosen = model.scheduling
    assert chosen.policy == SkipDrafting(LEARNED, LookAhead(LEARNED))
    assert str(chosen) == f"draft lengths by {BY_PROFILE}: {KNOWN.facts}, kept.json"
    plain = model.generate(PROMPT, max_new_tokens=20, policy=FixedPolicy(0))
    assert plain.rounds == 20 and model.generate(PROMPT, max_new_tokens=20).tokens == plain.tokens
    assert [r.tokens for r in model.generate([PROMPT] * 2, max_new_tokens=20)] == [plain.tokens] * 2


def test_what_is_asked_for_is_done(profiled: None, model: outrider.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in a batch; nothing is measured for it."""
    monkeypatch.setattr(scheduling, "machine_profile", None)
    whole = model.generate(PROMPT, max_new_tokens=20, policy=FixedPolicy())
    for asked in ({"confidence_threshold": 1.0}, {"policy": ThresholdPolicy(1.0)}):
        found = model.generate(PROMPT, max_new_tokens=20, **asked)
        assert found.rounds == 20 and found.tokens == whole.tokens, "no confidence reaches 1: nothing is verified"
        assert model.generate([PROMPT], max_new_tokens=20, **asked)[0].rounds == 20

    class Never(FixedPolicy):
        def depths(self, view: object) -> object:
            return 0 * super().depths(view)  # type: ignore[arg-type]

    gated = [model.generate(PROMPT, max_new_tokens=20, policy=Never()), *model.generate([PROMPT], policy=Never())]
    assert all(found.accepted_length == 1 for found in gated)
    with pytest.raises(ValueError, match="confidence_threshold and policy"):
        model.stream(PROMPT, confidence_threshold=0.5, policy=FixedPolicy())


def test_trees_and_what_cannot_be_timed_are_decoded_as_before(
    profiled: None, model: outrider.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.drafter is not None
    branching = replace(model.drafter, drafter=cast(Drafter, _Trees(model.drafter.drafter)), tree=TreeSize.parse("16"))
    assert choose_scheduling(model.target, branching).policy == FixedPolicy()
    assert choose_scheduling(model.target, None).policy == FixedPolicy()

    said: list[str] = []

    def refused(*_: object, **more: object) -> MachineProfile:
        raise ValueError("not batched")

    monkeypatch.setattr(scheduling, "machine_profile", refused)
    assert choose_scheduling(model.target, model.drafter, said.append).policy == FixedPolicy()
    recommended = replace(model.drafter, metadata={"recommended": {"confidence_threshold": 0.25}})
    chosen = choose_scheduling(model.target, recommended, said.append)
    assert chosen.policy == ThresholdPolicy(0.25) and not str(chosen)
    assert said == ["step costs cannot be measured here: not batched"] * 2


def test_drafters_without_confidences_are_chosen_for_by_cost_too(profiled: None, model: outrider.Model) -> None:
    assert model.drafter is not None
    unsure = replace(model.drafter, drafter=cast(Drafter, _Chains()), metadata={})
    chosen = choose_scheduling(model.target, unsure)
    assert chosen.policy == SkipDrafting(LEARNED, LookAhead(LEARNED))


def test_drafts_that_cost_nothing_are_not_gated(model: outrider.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    least = Curve(requests=[1], seconds=[(0.0, 1e-6, 1e-5)])
    free = KNOWN.profile.model_copy(update=dict.fromkeys(("draft", "draft_one", "extend"), least))
    monkeypatch.setattr(scheduling, "machine_profile", lambda *_, **more: replace(KNOWN, profile=free))
    chosen = choose_scheduling(model.target, model.drafter)
    assert chosen.policy == LookAhead(free) and chosen.name == UNGATED
    assert model.drafter is not None
    beside = replace(model.drafter, drafter=HybridDrafter(model.drafter.drafter))
    learned = LearnedCost(free)
    assert choose_scheduling(model.target, beside).policy == SkipDrafting(learned, LookAhead(learned)), (
        "lookups are weighed by what was measured"
    )


def test_what_requests_taught_stays_with_the_model(
    profiled: None, model: outrider.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no draft can change a token; elsewhere, and under a policy of the caller's, every request begins anew."""
    begun: list[bool] = []
    init = Drafting.__init__

    def watched(self: Drafting, drafter: Drafter | None, policy: Policy, *rest: Any, **more: Any) -> None:
        init(self, drafter, policy, *rest, **more)
        begun.append(self.acceptance.plan_view([], []).typical_K is None)

    monkeypatch.setattr(Drafting, "__init__", watched)
    plain = model.generate(PROMPT, max_new_tokens=12, policy=FixedPolicy(0)).tokens
    for _ in range(2):
        assert model.generate(PROMPT, max_new_tokens=12).tokens == plain
    assert model.generate([PROMPT] * 2, max_new_tokens=12)[1].tokens == plain
    model.generate(PROMPT, max_new_tokens=12, temperature=1.0, coupled=True, seed=2)
    assert begun == [True, True, False, False, False]
    sampled = [model.generate(PROMPT, max_new_tokens=12, temperature=1.0, seed=5).tokens for _ in range(2)]
    assert sampled[0] == sampled[1] and begun[5:] == [True, True]
    first, second = model.stream(PROMPT, max_new_tokens=12), model.stream(PROMPT, max_new_tokens=12)
    next(first), next(second)
    assert begun[7:] == [False, True], "a request beside another"
    first.close()
    ((_, richer),) = model._scheduler_states
    second.close()
    ((_, kept),) = model._scheduler_states
    assert kept is richer, "what one request taught does not take the place of what five did"
    assert len(kept.acceptance._slots) == 0


def test_what_a_turn_taught_is_known_in_the_next_one_of_its_task(
    profiled: None, model: outrider.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In an evaluation by costs: as a model's requests."""
    assert model.drafter is not None and isinstance(model.target, Target)
    begun: list[bool] = []
    init = Drafting.__init__

    def watched(self: Drafting, drafter: Drafter | None, policy: Policy, *rest: Any, **more: Any) -> None:
        init(self, drafter, policy, *rest, **more)
        if drafter is not None:
            begun.append(self.acceptance.plan_view([], []).typical_K is None)

    monkeypatch.setattr(Drafting, "__init__", watched)
    tasks = [str(tasks_file(tmp_path / f"{name}.jsonl")) for name in "ab"]
    chosen, greedy = model.scheduling, TaskSettings(2, 8)
    measure = partial(evaluate, model.target, model.drafter.drafter, tasks, drafter_info=model.drafter.info())
    found = measure(greedy, policy=chosen.policy.reproducible())  # a toy's drafts do not pay here, as one learns
    turns = [task.turns for task in found.tasks]
    assert min(turns) > 1
    assert begun == [True] * 2 + [number == 0 for count in turns for number in range(count)], "two of a warm-up first"
    begun.clear()
    measure(greedy, policy=FixedPolicy())
    measure(replace(greedy, params=SamplingParams(1.0, seed=5)), policy=chosen.policy)
    assert begun == [True] * 2 * (2 + sum(turns)), "no costs decide; a seed gives the same tokens in any order"


def test_an_interrupted_batch_leaves_no_requests_behind(
    profiled: None, model: outrider.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Engine.step, 0

    def breaking(engine: Engine) -> list[Output]:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise RuntimeError("out of memory")
        return step(engine)

    monkeypatch.setattr(Engine, "step", breaking)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.generate([PROMPT] * 2, max_new_tokens=30)
    ((_, kept),) = model._scheduler_states
    assert not kept.acceptance._slots


def test_a_server_s_profile_decides_for_every_drafter_of_chains(toy: Path, tmp_path: Path) -> None:
    model = outrider.load(toy / "target", drafter="ngram@8", device="cpu")
    assert isinstance(model.target, Target) and model.drafter is not None
    measured = KNOWN.profile.model_copy(update={"setting": setting_of(model.target, model.drafter.drafter)})
    measured.save(tmp_path / "profile.json")

    def served(model: outrider.Model) -> Engine:
        config = EngineConfig(num_blocks=8)
        built = build_server(
            model, config, tmp_path / "profile.json", max_waiting=1, max_new_tokens=None, name="m", thinking=False
        )
        return cast(Engine, built.worker.engine)

    engine = served(model)
    learned = LearnedCost(measured)
    assert engine.policy == SkipDrafting(learned, LookAhead(learned))
    with pytest.raises(ValueError, match="no chains are drafted here"):
        served(replace(model, drafter=None))


class _Chains:
    """What is asked of a drafter of chains without confidences."""

    trees, heads, gamma = False, None, 7

    @property
    def sources(self) -> Sources:
        return Sources(cast(Drafter, self))


class _Trees:
    """What is asked of a drafter of trees that is as confident as the toy."""

    def __init__(self, drafter: Drafter) -> None:
        self.trees, self.heads = True, drafter.heads

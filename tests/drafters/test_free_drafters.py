"""Drafters without training: n-gram copies against a search, a small model against its own plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from outrider.api.drafter import DrafterChoice, choose_drafter, require_directory, require_drafter
from outrider.data.chat import render
from outrider.data.sources import load_prompts
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate, stream
from outrider.decoding.policies import FixedPolicy, ThresholdPolicy
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import DraftCall, Drafter
from outrider.drafters.draft import Draft
from outrider.drafters.language_model import GrowingKV, StandaloneDrafter
from outrider.drafters.ngram import NgramConfig, NgramDrafter
from outrider.evaluation.evaluate import compare_greedy
from outrider.sampling import PositionNoise, RandomSource, SamplingParams, SeenTokens, warp
from outrider.target.model import Target
from outrider.target.paged import Span
from outrider.utils.packaged import PACKAGE
from tests.proof.cases import TOLERANCE, VISIBLE, WARPS, deviation
from tests.proof.enumeration import RequestFactory, Tokens
from tests.proof.toys import ToyTarget
from tests.toys.drafters import call_for, small_model
from tests.toys.engine import assert_solo, finish, prompts
from tests.toys.oracle import claiming, drafted_with, row_of
from tests.toys.published import published_target
from tests.toys.targets import toy_target

PROMPT = [5, 9, 33, 60, 7]
NO_STOPS = StopRules(40, stop_ids=())


def proposal_after(drafter: Drafter, text: Sequence[int], **how: Any) -> Draft:
    """In a session that has just begun."""
    session = drafter.new_session(len(text) + 20)
    drafter.extend([session], [list(text[:-1])], None)
    return drafter.propose([call_for(session, text, **how)])[0]


# N-grams.


def brute_force(text: Sequence[int], config: NgramConfig) -> list[int]:
    """The latest earlier occurrence of the longest suffix, by looking everywhere."""
    for n in range(min(config.longest, len(text) - 1), config.shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if list(text[end - n : end]) == list(text[-n:]):
                grown = list(text)
                for k in range(config.gamma):
                    grown.append(grown[end + k])
                return grown[len(text) :]
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 12),
)
def test_copies_are_those_of_a_brute_force_search(
    text: list[int], parts: list[int], shortest: int, more: int, gamma: int
) -> None:
    """Whatever the parts in which the text was committed."""
    config = NgramConfig(gamma, shortest + more, shortest)
    drafter = NgramDrafter(config)
    session = drafter.new_session(len(text))
    done = 0
    for part in [*parts, len(text)]:
        drafter.extend([session], [text[done : min(done + part, len(text) - 1)]], None)
        done = min(done + part, len(text) - 1)
        proposal = drafter.propose([call_for(session, text[: done + 1], vocab=4)])[0]
        assert proposal.tokens == brute_force(text[: done + 1], config)
        assert drafted_with(proposal) == [1.0] * len(proposal.tokens)
        assert len(proposal.confidences) == len(proposal.tokens) and all(0 < c < 1 for c in proposal.confidences)
        assert proposal.confidences == sorted(proposal.confidences), "the more tokens agree, the surer"
        for k, token in enumerate(proposal.tokens):
            assert row_of(proposal, k, 4).tolist() == [float(token == v) for v in range(4)]


class CountingDict(dict[Any, Any]):
    """Counts questions and answers."""

    operations = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.operations += 1
        return super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.operations += 1
        super().__setitem__(key, value)


class CountingList(list[int]):
    """Counts elements read."""

    operations = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.operations += len(found) if isinstance(found, list) else 1
        return found


@pytest.mark.parametrize("known", [True, False])
def test_the_work_of_a_round_does_not_grow_with_the_text(known: bool) -> None:
    """Known suffixes are copied, unknown ones cost every look-up there is."""

    def operations(length: int) -> int:
        chooser = random.Random(0)
        drafter = NgramDrafter(NgramConfig(10, 4, 1))
        session = drafter.new_session(length)
        text = [chooser.randrange(900) for _ in range(length)]
        drafter.extend([session], [[*text, 901, 902, 903, 904, *text[:20], 901, 902, 903]], None)
        session.places, session.tokens = CountingDict(session.places), CountingList(session.tokens)
        anchor = 904 if known else 950
        proposal = drafter.propose([call_for(session, [*session.tokens, anchor], vocab=1000)])[0]
        assert len(proposal.tokens) == (10 if known else 0)
        drafter.extend([session], [[anchor, 905, 906]], None)
        return session.places.operations + session.tokens.operations

    assert operations(50) == operations(5000) <= 4 + 10 + 3 * (4 + 4 + 3 + 2 + 1) + 60


def test_a_loop_is_drafted_whole_and_limits_hold() -> None:
    drafter = NgramDrafter(NgramConfig(7, 3, 2))
    assert proposal_after(drafter, [4, 5, 6, 4, 5]).tokens == [6, 4, 5, 6, 4, 5, 6]
    assert proposal_after(drafter, [4, 5, 6, 4, 5], limit=2).tokens == [6, 4]
    assert proposal_after(drafter, [4, 5, 6, 7, 5]).tokens == [], "one token alone is too short a suffix here"
    assert proposal_after(drafter, [4]).tokens == []
    with pytest.raises(ValueError, match="1 <= shortest <= longest"):
        NgramConfig(longest=2, shortest=3)
    with pytest.raises(ValueError, match="gamma=0"):
        NgramConfig(0)


class Vocabulary:
    """A tokenizer that knows its tokens and nothing else."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def with_vocabulary(target: Target, *tokens: str) -> Target:
    target.tokenizer = cast(Any, Vocabulary(*tokens))
    return target


def model_row(model: Target, text: Sequence[int], params: SamplingParams) -> Tensor:
    """p_k as plain decoding of the small model has it."""
    logits_BTV = model.forward(torch.tensor([list(text)]), model.new_cache(len(text))).logits_BTV
    assert logits_BTV is not None
    return warp(logits_BTV[0, -1], params, SeenTokens(97, params, text).with_tokens())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_greedy_drafts_are_the_small_models_own_text(family: str) -> None:
    """Many requests at once, of other lengths and with other limits."""
    target, model = toy_target(), toy_target(family, seed=1)
    drafter, texts = StandaloneDrafter(model, target, 5), prompts(6)
    sessions = [drafter.new_session(60) for _ in texts]
    drafter.extend(sessions, [text[:-1] for text in texts], None)
    calls = [
        call_for(s, text, limit=limit) for s, text, limit in zip(sessions, texts, [None, 1, 2, 5, 9, 3], strict=True)
    ]
    for call, text, proposal in zip(calls, texts, drafter.propose(calls), strict=True):
        count = min(5, call.limit or 5)
        assert proposal.tokens == generate(model, text, rules=StopRules(count, stop_ids=())).tokens
        assert drafted_with(proposal) == [1.0] * count


SAMPLED = {
    "plain": SamplingParams(temperature=1.0, seed=3),
    "warped": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.5, seed=5),
    "coupled": SamplingParams(temperature=0.9, repetition_penalty=1.3, seed=7, coupled=True),
    "greedy with penalty": SamplingParams(repetition_penalty=1.7),
}


@pytest.mark.parametrize("name", SAMPLED)
@torch.inference_mode()
def test_rows_are_the_small_models_warped_distributions(name: str) -> None:
    params, model, target = SAMPLED[name], small_model(), toy_target()
    drafter = StandaloneDrafter(model, target, 4)
    noise = PositionNoise(params.seed or 0, 97) if params.coupled else None
    for text in prompts(4, seed=2):
        proposal = proposal_after(drafter, text, params=params, noise=noise)
        assert len(proposal.tokens) == 4
        for k, token in enumerate(proposal.tokens):
            grown = [*text, *proposal.tokens[:k]]
            expected_V = model_row(model, grown, params)
            torch.testing.assert_close(row_of(proposal, k), expected_V, atol=1e-5, rtol=1e-4)
            assert drafted_with(proposal)[k] == row_of(proposal, k)[token].item() > 0
            certain = model_row(model, grown, SamplingParams(temperature=1.0)).max().item()
            assert proposal.confidences[k] == pytest.approx(certain, abs=1e-5), "known before the warp and the draw"
            if noise is not None:
                assert token == noise.pick(row_of(proposal, k), len(text) + k)


def watched(model: Target, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Rows per request of every forward of the model from now on."""
    seen: list[list[int]] = []
    forward = model.forward_ragged

    def counted(spans: Sequence[Span], *more: Any) -> Any:
        seen.append([len(span.tokens) for span in spans])
        return forward(spans, *more)

    monkeypatch.setattr(model, "forward_ragged", counted)
    return seen


@pytest.mark.parametrize("accepted", range(5))
@torch.inference_mode()
def test_rollback_after_rejections(accepted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was accepted stays read, what was not is forgotten: the next draft is that of a session without a past."""
    params, gamma = SamplingParams(temperature=1.0, seed=1), 4
    model = small_model()
    drafter = StandaloneDrafter(model, toy_target(), gamma)
    seen = watched(model, monkeypatch)
    text = prompts(1, seed=4)[0] + [9] * 6
    session = drafter.new_session(80)
    drafter.extend([session], [text[:-1]], None)
    for _ in range(3):
        first = drafter.propose([call_for(session, text, params)])[0]
        seen.clear()
        kept = first.tokens[:accepted]
        correction = (first.tokens[accepted] + 1) % 97 if accepted < gamma else 11
        drafter.extend([session], [[text[-1], *kept]], None)
        text = [*text, *kept, correction]
        second = drafter.propose([call_for(session, text, params)])[0]
        assert seen == [[2 if accepted == gamma else 1], [1], [1], [1]], "nothing is read twice"
        fresh = proposal_after(drafter, text, params=params)
        assert second.tokens == fresh.tokens
        for k in range(gamma):
            torch.testing.assert_close(row_of(second, k), row_of(fresh, k), atol=1e-6, rtol=1e-4)


@torch.inference_mode()
def test_few_tokens_wait_for_the_next_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    drafter = StandaloneDrafter(model, toy_target(), 3)
    seen, session = watched(model, monkeypatch), drafter.new_session(80)
    drafter.extend([session], [list(range(4, 24))], None)
    assert seen == [[20]], "a prompt is read when it is there"
    for token in range(30, 36):  # a request that does not draft for a while
        drafter.extend([session], [[token]], None)
    assert seen == [[20], [5]]
    drafter.propose([call_for(session, [*range(4, 24), *range(30, 36), 8])])
    assert seen == [[20], [5], [2], [1], [1]]


@torch.inference_mode()
def test_a_floor_ends_the_draft_at_the_first_unsure_position() -> None:
    model, target = small_model(), toy_target()
    drafter, params = StandaloneDrafter(model, target, 6), SamplingParams(temperature=1.0)
    lengths = set()
    for text in prompts(8, seed=5):
        whole = proposal_after(drafter, text, params=params)
        min_confidence = sorted(whole.confidences)[2]
        session = drafter.new_session(80)
        drafter.extend([session], [text[:-1]], None)
        cut = drafter.propose([call_for(session, text, params)], min_confidence)[0]
        until = next(k for k, certain in enumerate(whole.confidences) if certain < min_confidence)
        assert cut.tokens == whole.tokens[:until] and len(cut.confidences) == until
        lengths.add(until)
        again = drafter.propose([call_for(session, text, params)])[0]
        assert again.tokens == whole.tokens, "a draft that nothing was committed after leaves no trace"
    assert len(lengths) > 1
    cut_by_policy = generate(target, PROMPT, drafter, rules=NO_STOPS, policy=ThresholdPolicy(0.1))
    assert cut_by_policy.tokens == generate(target, PROMPT, rules=NO_STOPS).tokens


@pytest.mark.parametrize("rows", [(101, 97), (97, 101)])
def test_padding_rows_do_not_count(rows: tuple[int, int]) -> None:
    """97 tokens, and more embedding rows than that in one of the models."""
    names = [str(i) for i in range(97)]
    model, target = (with_vocabulary(small_model(seed, rows[seed]), *names) for seed in (0, 1))
    drafter = StandaloneDrafter(model, target, 3)
    params = SamplingParams(temperature=1.5)
    text = [*PROMPT, rows[1] - 1, 6]  # the target's last row, which the smaller model may not have
    proposal = proposal_after(drafter, text, params=params, vocab=rows[1])
    logits_V = drafter.model.forward(
        torch.tensor([[min(token, rows[0] - 1) for token in text]]), model.new_cache(len(text))
    ).logits_BTV
    assert logits_V is not None
    shared = min(rows)
    torch.testing.assert_close(
        row_of(proposal, 0)[:shared], warp(logits_V[0, -1, :shared], params), atol=1e-5, rtol=1e-4
    )
    assert len(row_of(proposal, 0)) == rows[1] and row_of(proposal, 0)[shared:].sum() == 0
    target.tokenizer = None  # it cannot decode
    rules = StopRules(12, stop_ids=())
    assert generate(target, PROMPT, drafter, rules=rules).tokens == generate(target, PROMPT, rules=rules).tokens


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"small-90 cannot draft for toy-llama: .*90 and 97 embedding rows"):
        StandaloneDrafter(small_model(vocab=90), toy_target())
    model, target = with_vocabulary(small_model(), "a", "b", "c"), with_vocabulary(toy_target(), "a", "c", "b")
    with pytest.raises(ValueError, match="2 tokens, as 'b': 1 in one, 2 in the other"):
        StandaloneDrafter(model, target)
    with pytest.raises(ValueError, match="1 tokens, as 'd': None in one, 3 in the other"):
        StandaloneDrafter(with_vocabulary(model, "a", "b", "c"), with_vocabulary(target, "a", "b", "c", "d"))
    with pytest.raises(ValueError, match="gamma=0"):
        StandaloneDrafter(small_model(), toy_target(), 0)


def test_a_small_model_that_cannot_be_rolled_back_is_refused(tmp_path: Path) -> None:
    model = small_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 2.0})
    with pytest.raises(
        ValueError, match=r"small-97 \(model_type 'llama'\) cannot draft: .*Choose .* or --drafter ngram"
    ):
        StandaloneDrafter(model, toy_target())
    with pytest.raises(ValueError, match=r"\(model_type 'qwen3_next'\) cannot draft: .*--drafter ngram"):
        StandaloneDrafter(published_target("qwen3_next"), toy_target())
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"--drafter lm:.*: model_type 'gpt2' is not a supported"):
        require_drafter(f"lm:{tmp_path}", "t").open(toy_target())


def test_a_small_model_that_reads_less_than_the_target() -> None:
    target, model = toy_target(), small_model(max_position_embeddings=24)
    drafter = StandaloneDrafter(model, target)
    result = generate(target, PROMPT, drafter, rules=NO_STOPS)
    assert result.tokens == generate(target, PROMPT, rules=NO_STOPS).tokens
    proposed = [r.proposed for r in result.rounds]
    assert proposed[0] == 4 and proposed[-1] == 0, "no drafts behind its last position"
    long = generate(target, [5] * 30, drafter, rules=NO_STOPS)
    assert not any(r.proposed for r in long.rounds)


def test_blocks_are_one_sessions_own_until_they_are_freed() -> None:
    """Blocks are allocated and freed at random: no two holders share one, and gaps are used again."""
    chooser, memory = random.Random(0), GrowingKV(small_model())
    held: dict[int, tuple[range, int]] = {}
    peak = 0
    for number in range(1, 200):
        if len(held) > 6 or (held and chooser.random() < 0.4):
            memory.free(held.pop(chooser.choice(list(held)))[0])
        slots = chooser.randint(1, 90)
        held[number] = memory.allocate(slots), slots
        assert len(held[number][0]) * memory.kv.block_size >= slots
        for name, (blocks, slots) in held.items():
            if name == number:
                memory.kv.pools[0][0][:, :, memory.kv.slots(list(blocks), 0, slots)] = float(number)
        for name, (blocks, slots) in held.items():
            assert (memory.kv.pools[0][0][:, :, memory.kv.slots(list(blocks), 0, slots)] == name).all()
        peak = max(peak, sum(len(blocks) for blocks, _ in held.values()))
    assert memory.kv.num_blocks <= 4 * peak


def test_decoding_ends_the_sessions_it_began() -> None:
    """A whole response, one whose reader stops early, and the engine's finished and cancelled requests free blocks."""
    target, model = toy_target(), small_model()
    drafter = StandaloneDrafter(model, target)
    generate(target, PROMPT, drafter, rules=NO_STOPS)
    chunks = stream(target, PROMPT, drafter, rules=NO_STOPS)
    next(chunks)
    assert len(drafter.memory._held) == 1
    chunks.close()
    assert drafter.memory._held == []
    engine = Engine(target, drafter, config=EngineConfig(num_blocks=12, block_size=8, max_requests=3))
    for name in "abc":
        engine.submit(Request(name, PROMPT, rules=StopRules(30, stop_ids=())))
    engine.step()
    assert len(drafter.memory._held) == 3
    engine.cancel("b")
    while not engine.idle:
        engine.step()
    assert drafter.memory._held == []


# Losslessness: enumerated, greedy, in company.


@dataclass
class ServedRequest:
    """One round of a toy target with a drafter as it is served."""

    target: ToyTarget
    drafter: Drafter
    context: Tokens
    source: RandomSource

    def draft(self, min_confidence: float) -> Draft:
        session = self.drafter.new_session(len(self.context))
        self.drafter.extend([session], [self.context[:-1]], None)
        call = call_for(session, self.context, self.target.params, self.target.vocab_size, self.source)
        return self.drafter.propose([call], min_confidence)[0]

    def score(self, tokens: list[int]) -> Callable[[int], Tensor]:
        return lambda k: self.target.row(self.context + tuple(tokens[:k]))


def served(target: ToyTarget, drafter: Drafter) -> RequestFactory:
    return lambda context, source: ServedRequest(target, drafter, context, source)


def exact_model(vocab: int) -> Target:
    """A language model in float64: rounding must stay below what a proof forgives."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    small = small_model(2, vocab, head_dim=4, **shape)
    return Target(small.model.double(), None, "exact")


def deviations(target: ToyTarget, drafter: Drafter, prompts: list[Tokens], tokens: int) -> float:
    return max(
        deviation(served(target, drafter), target, prompts, policy, tokens)
        for policy in (FixedPolicy(), FixedPolicy(1))
    )


@pytest.mark.parametrize("name", WARPS)
def test_enumerated_ngram(name: str) -> None:
    target = ToyTarget(3, WARPS[name])
    drafter = NgramDrafter(NgramConfig(3, 2, 1))
    assert proposal_after(drafter, (0, 1, 0), vocab=3).tokens, "an empty draft would prove nothing"
    assert deviations(target, drafter, [(0, 1, 0)], 4) <= TOLERANCE
    small = ToyTarget(2, WARPS[name])
    assert deviations(small, NgramDrafter(NgramConfig(2, 2, 1)), [(0, 0), (1, 0, 1)], 3) <= TOLERANCE


@pytest.mark.parametrize("name", WARPS)
def test_enumerated_small_model(name: str) -> None:
    target = ToyTarget(3, WARPS[name])
    drafter = StandaloneDrafter(exact_model(3), cast(Target, _AsTarget(3)), 2)
    assert deviations(target, drafter, [(0, 1)], 3) <= TOLERANCE
    if name in ("plain", "penalty"):
        min_confidence = deviation(served(target, drafter), target, [(0, 1)], ThresholdPolicy(0.4), 3)
        assert min_confidence <= TOLERANCE


class _AsTarget:
    """What a drafter over a language model asks of its target."""

    tokenizer, device, name = None, torch.device("cpu"), "toy"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


def test_the_enumeration_sees_a_wrong_draft_distribution() -> None:
    """Claims of another p_d than the one that was drawn from are found out."""

    class Boasting(NgramDrafter):
        def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
            return [claiming(p, [0.5] * len(p.tokens), 3) for p in super().propose(calls, min_confidence)]

    class Hotter(StandaloneDrafter):
        def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
            hot = [replace(call, params=replace(call.params, temperature=2.0)) for call in calls]
            cold = super().propose(calls, min_confidence)
            return [
                claiming(c, [row_of(h, 0)[c.tokens[0]].item(), *drafted_with(c)[1:]]) if c.tokens else c
                for c, h in zip(cold, super().propose([replace(call, source=_First()) for call in hot]), strict=True)
            ]

    class _First:
        def accept(self, probability: float) -> bool:
            raise AssertionError

        def choose(self, probs_V: Tensor) -> int:
            return 0

    target = ToyTarget(3, WARPS["plain"])
    assert deviations(target, Boasting(NgramConfig(2, 2, 1)), [(0, 1, 0)], 3) > VISIBLE
    hotter = Hotter(exact_model(3), cast(Target, _AsTarget(3)), 1)
    assert deviations(target, hotter, [(0, 1)], 2) > VISIBLE


def predictable_target(family: str = "llama") -> Target:
    """Few likely tokens, so that drafts are right now and then."""
    target = toy_target(family)
    target.head_VD[3:] *= 0.01
    return Target(target.model, None, f"toy-{family}")


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["ngram", "small", "itself"])
def test_greedy_output_equals_plain_decoding(kind: str, family: str) -> None:
    target = predictable_target(family)
    drafter, rules = drafter_of(kind, target), StopRules(24, stop_ids=())
    for params in (SamplingParams(), SamplingParams(repetition_penalty=1.2)):
        plain = generate(target, PROMPT, params=params, rules=rules)
        fast = generate(target, PROMPT, drafter, params, rules)
        assert compare_greedy(target, PROMPT, plain.tokens, fast.tokens) == "same"
        if kind == "itself":
            assert all(r.accepted == r.proposed for r in fast.rounds), "the target agrees with itself"


def drafter_of(kind: str, target: Target) -> Drafter:
    if kind == "ngram":
        return NgramDrafter()
    return StandaloneDrafter(small_model() if kind == "small" else target, target)


@pytest.mark.parametrize("kind", ["ngram", "small", "itself"])
def test_in_company(kind: str) -> None:
    """Prefill in chunks, requests of all lengths, preemption: everybody's text is that of plain decoding."""
    target = predictable_target()
    drafter = drafter_of(kind, target)
    config = EngineConfig(max_requests=6, token_budget=40, block_size=4, num_blocks=24)
    engine, preempted, accepted = Engine(target, drafter, config=config), 0, 0
    requests = [Request(str(i), prompt, rules=StopRules(8 + 4 * i, stop_ids=())) for i, prompt in enumerate(prompts(9))]
    plan = engine.scheduler.plan

    def counting_plan() -> Any:
        nonlocal preempted
        found = plan()
        preempted += len(found.preempted)
        return found

    def look() -> None:
        nonlocal accepted
        assert engine.last is not None
        accepted += engine.last.accepted

    engine.scheduler.plan = counting_plan  # type: ignore[method-assign]
    found = finish(engine, requests, look)
    assert preempted and accepted > (0 if kind == "small" else 20)
    for request in requests:
        assert len(found[request.id]) == request.rules.max_new_tokens
        assert_solo(target, request, found[request.id])
    if isinstance(drafter, StandaloneDrafter):
        assert not drafter.memory._held, "finished and preempted requests have freed their blocks"


def test_coupled_tokens_are_plain_decodings() -> None:
    target = predictable_target()
    params = SamplingParams(temperature=0.8, seed=4, coupled=True)
    plain = generate(target, PROMPT, params=params, rules=NO_STOPS).tokens
    for kind in ("ngram", "small", "itself"):
        fast = generate(target, PROMPT, drafter_of(kind, target), params, NO_STOPS)
        assert fast.tokens == plain
        if kind == "itself":
            assert all(r.accepted == r.proposed for r in fast.rounds), "shared noise, shared distribution"


# The command line.


def test_what_the_option_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTRIDER_MODELS", raising=False)
    assert choose_drafter("none", "some/target") is None and choose_drafter("auto", "some/target") is None
    assert choose_drafter("ngram", "t") == DrafterChoice("ngram", "")
    assert choose_drafter("ngram@6", "t") == DrafterChoice("ngram", "", 6)
    assert choose_drafter("lm:owner/small-1.5B", "t") == DrafterChoice("lm", "owner/small-1.5B")
    assert choose_drafter("lm:/models/a@b@3", "t") == DrafterChoice("lm", "/models/a@b", 3)
    shipped = str(PACKAGE / "models" / "smollm2-135m-dspark")
    assert choose_drafter("smollm2-135m-dspark", "t") == DrafterChoice("directory", shipped)
    assert choose_drafter("./ngram", "t") == DrafterChoice("directory", "./ngram")
    assert choose_drafter("models/mine", "t") == DrafterChoice("directory", "models/mine")
    for wrong in ("lm:", "lm", "ngram:6", "ngram@", "ngram@six", "lm:@3"):
        with pytest.raises(ValueError, match="write ngram, ngram@8, lm:ID_OR_DIR"):
            choose_drafter(wrong, "t")
    beside = DrafterChoice("directory", shipped, hybrid=True)
    assert choose_drafter("hybrid:smollm2-135m-dspark", "t") == beside
    assert choose_drafter("hybrid", "HuggingFaceTB/SmolLM2-135M-Instruct") == beside
    assert choose_drafter("./hybrid", "t") == DrafterChoice("directory", "./hybrid")
    with pytest.raises(ValueError, match=r"no trained drafter for some/target.*ngram"):
        choose_drafter("hybrid", "some/target")
    for wrong in ("hybrid:ngram", "hybrid:lm:a/b", "hybrid:hybrid"):
        with pytest.raises(ValueError, match="write hybrid, or hybrid:DIR_OR_NAME"):
            choose_drafter(wrong, "HuggingFaceTB/SmolLM2-135M-Instruct")
    with pytest.raises(ValueError, match="give the trained drafter itself"):
        require_directory("hybrid:smollm2-135m-dspark", "t")
    with pytest.raises(ValueError, match=r"no drafter for some/target. Give its directory, .* use ngram or lm:"):
        require_drafter("none", "some/target")
    with pytest.raises(ValueError, match="no directory no/such/target: --target takes"):
        require_drafter("auto", "./no/such/target")
    with pytest.raises(ValueError, match="ngram has no directory"):
        require_directory("ngram", "t")
    target = toy_target()
    opened = require_drafter("ngram", "t").open(target)
    assert opened.name == "ngram@10" and opened.drafter.heads is None and opened.recommended_threshold is None
    with pytest.raises(ValueError, match="gamma=0"):
        require_drafter("ngram@0", "t").open(target)


# The real model.


@pytest.mark.slow
def test_the_real_model(smollm: Target) -> None:
    """Its own text with copies, and with the model drafting for itself: everything it drafts is accepted."""
    assert smollm.tokenizer is not None
    ngram, itself = NgramDrafter(), StandaloneDrafter(smollm, smollm)
    chosen = [prompt for name in ("eval_code", "eval_math", "eval_chat") for prompt in load_prompts(name, 2)]
    accepted = 0
    for number, prompt in enumerate(chosen):
        tokens, rules = render(smollm.tokenizer, prompt.turns[:1], []), StopRules(64 if number else 24)
        plain = generate(smollm, tokens, rules=rules)
        copied = generate(smollm, tokens, ngram, rules=rules)
        assert compare_greedy(smollm, tokens, plain.tokens, copied.tokens) != "mismatch"
        accepted += sum(r.accepted for r in copied.rounds)
        if number < 2:
            short = StopRules(24)
            own = generate(smollm, tokens, itself, rules=short)
            assert compare_greedy(smollm, tokens, plain.tokens[:24], own.tokens) != "mismatch"
            rejected = sum(r.reach - r.accepted for r in own.rounds)
            assert rejected <= 1, "a tie of rounding, at most"
    assert accepted > 20

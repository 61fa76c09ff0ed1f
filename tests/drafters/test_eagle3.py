"""EAGLE-3 against a second implementation in numpy; trained equals served; nothing leaks; text is plain decoding's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.decoding.generate import generate
from outrider.decoding.policies import ThresholdPolicy
from outrider.decoding.request import StopRules
from outrider.drafters.base import DraftCalibration, DrafterWeights
from outrider.drafters.confidence import CertaintyEstimator, ConfidenceScaling
from outrider.drafters.draft import Draft
from outrider.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Drafter, eagle_aux_layers
from outrider.sampling import SamplingParams
from outrider.training.dataset import choose_draft_ids
from outrider.training.recipe import load_recipe
from tests.toys.alignment import build, check_alignment
from tests.toys.eagle3 import call_of, inputs_for, make_drafter
from tests.toys.eagle_reference import EagleReference
from tests.toys.oracle import drafted_with, row_of
from tests.toys.targets import toy_samples, toy_target
from tests.toys.training import lower_loss

TOLERANCE = 1e-4
PROMPT = [5, 9, 33, 60, 7]
NO_STOPS = StopRules(40, stop_ids=())
ROUNDS = (9, 1, 4, 2, 1, 3, 8, 1)  # committed tokens before each draft: the prompt but its last, then accepted + 1


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_the_training_forward_equals_numpy(family: str) -> None:
    target = toy_target(family)
    module = make_drafter(target)
    lengths, anchors, sequence = [11, 20], [1, 6, 11, 2, 13, 14, 20], [0, 0, 0, 1, 1, 1, 1]
    inputs = inputs_for(target, lengths, anchors, sequence, 4)
    rows_NKH = module.rows(inputs).hidden_NKH
    reference = EagleReference(module, target)
    for n, (anchor, number) in enumerate(zip(anchors, sequence, strict=True)):
        start = lengths[0] * number
        tokens = [0, *inputs.next_tokens_S[start : start + anchor].tolist()]
        expected = reference.chain(inputs.aux_SLD[start : start + anchor], tokens, inputs.previous_NK[n, 1:].tolist())
        for k, hidden in enumerate(expected):
            torch.testing.assert_close(rows_NKH[n, k].double(), torch.tensor(hidden), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "flags", [(), ("fc_norm", "norm_output"), ("norm_before_fc", "norm_before_residual")], ids="+".join
)
def test_served_chains_equal_numpy_over_rounds(flags: tuple[str, ...]) -> None:
    """Two requests in one batch, one of which is behind; rejected drafts leave nothing in the caches."""
    target = toy_target()
    module = make_drafter(target, **dict.fromkeys(flags, True))
    reference, drafter = EagleReference(module, target), Eagle3Drafter(DrafterWeights(module), target)
    generator = torch.Generator().manual_seed(5)
    aux_TLD = 5 * torch.randn(2, sum(ROUNDS), 3, 32, generator=generator)
    text = torch.randint(4, 97, (2, sum(ROUNDS) + 1), generator=generator).tolist()
    sessions = [drafter.new_session(sum(ROUNDS)) for _ in text]
    read: list[Tensor] = []
    head = drafter.head
    drafter.head = lambda hidden_AH: read.append(hidden_AH) or head(hidden_AH)  # type: ignore[assignment, func-returns-value]
    ends, different = [0, 0], set()
    for counts in zip(ROUNDS, (5, *ROUNDS[1:]), strict=True):
        begins, ends = ends, [end + count for end, count in zip(ends, counts, strict=True)]
        parts = [text[r][begins[r] : ends[r]] for r in range(2)]
        drafter.extend(sessions, parts, torch.cat([aux_TLD[r, begins[r] : ends[r]] for r in range(2)]))
        assert [session.length for session in sessions] == ends
        read.clear()
        proposals = drafter.propose([call_of(sessions[r], text[r][ends[r]]) for r in range(2)])
        for r, proposal in enumerate(proposals):
            expected = reference.chain(aux_TLD[r, : ends[r]], text[r][: ends[r] + 1], proposal.tokens[:-1])
            assert len(expected) == len(read) == len(proposal.tokens) == 4
            for hidden, served_RH, token in zip(expected, read, proposal.tokens, strict=True):
                torch.testing.assert_close(served_RH[r].double(), torch.tensor(hidden), atol=TOLERANCE, rtol=0)
                assert token == int(reference.log_probs(hidden).argmax())
            different.add(tuple(proposal.tokens))
    assert len(different) > 8, "drafts that do not differ would prove nothing"


@pytest.mark.parametrize(("family", "draft_vocab"), [("qwen3", 97), ("llama", 40)])
def test_trained_equals_served(family: str, draft_vocab: int) -> None:
    target, samples = toy_target(family), toy_samples(4)
    ids = choose_draft_ids(samples, 97, draft_vocab, frozenset({1}))
    assert check_alignment(target, make_drafter(target, draft_vocab=draft_vocab), samples, ids) > 50


def test_an_anchor_with_nothing_before_it_is_trained_as_it_is_served() -> None:
    target = toy_target()
    module = make_drafter(target)
    inputs = inputs_for(target, [0, 2], [0, 2], [0, 1], 4)
    hidden_KH = module.rows(inputs).hidden_NKH[0]
    assert hidden_KH.isfinite().all()
    drafter = Eagle3Drafter(DrafterWeights(module), target)
    session = drafter.new_session(8)
    drafter.extend([session], [[]], torch.empty(0, 3, 32))
    state = session.waiting[0]
    for k, token in enumerate(inputs.previous_NK[0].tolist()):
        hidden, state = drafter.advance([session], state, [token], depth=k, written=k)
        torch.testing.assert_close(hidden[0], hidden_KH[k], atol=TOLERANCE, rtol=0)
    plain = generate(target, [5], rules=NO_STOPS)
    assert generate(target, [5], drafter, rules=NO_STOPS).tokens == plain.tokens


def test_a_row_sees_earlier_tokens_of_its_chain_and_slots_before_its_anchor_only() -> None:
    target = toy_target()
    module = make_drafter(target)
    lengths, anchors, sequence = [11, 20], [1, 6, 11, 2, 13, 14, 20], [0, 0, 0, 1, 1, 1, 1]
    inputs = inputs_for(target, lengths, anchors, sequence, 4)
    with torch.no_grad():
        before_NKH = module.rows(inputs).hidden_NKH
        for n in (1, 4):
            anchor, start = anchors[n], lengths[0] * sequence[n]
            # aux hidden states at and after the anchor and of other sequences, tokens after it, tokens of all other
            # chains
            aux_layers, following = torch.randn_like(inputs.aux_SLD), torch.randint(4, 97, inputs.next_tokens_S.shape)
            aux_layers[start : start + anchor] = inputs.aux_SLD[start : start + anchor]
            following[start : start + anchor] = inputs.next_tokens_S[start : start + anchor]
            previous = torch.randint(4, 97, inputs.previous_NK.shape)
            previous[n] = inputs.previous_NK[n]
            changed = replace(inputs, aux_SLD=aux_layers, next_tokens_S=following, previous_NK=previous)
            torch.testing.assert_close(module.rows(changed).hidden_NKH[n], before_NKH[n], atol=1e-5, rtol=1e-5)
            # and the test can fail: what lies before matters, feature and token alike
            aux_layers = inputs.aux_SLD.clone()
            aux_layers[start + anchor - 2] += 5
            moved = module.rows(replace(inputs, aux_SLD=aux_layers)).hidden_NKH[n]
            assert ((moved - before_NKH[n]).abs().amax(-1) > 1e-4).all()
            following = inputs.next_tokens_S.clone()
            following[start + anchor - 2] = (following[start + anchor - 2] + 1) % 97
            moved = module.rows(replace(inputs, next_tokens_S=following)).hidden_NKH[n]
            assert ((moved - before_NKH[n]).abs().amax(-1) > 1e-4).all()
        for k in range(4):
            previous = inputs.previous_NK.clone()
            previous[4, k] = (previous[4, k] + 1) % 97
            moved = module.rows(replace(inputs, previous_NK=previous)).hidden_NKH
            others = torch.arange(len(anchors)) != 4
            assert torch.equal(moved[others], before_NKH[others]) and torch.equal(moved[4, :k], before_NKH[4, :k])
            assert ((moved[4, k:] - before_NKH[4, k:]).abs().amax(-1) > 1e-4).all()


def test_steps_lower_the_loss() -> None:
    target, samples = toy_target(), toy_samples(6)
    torch.manual_seed(0)
    module = Eagle3(Eagle3Config.from_target(target, gamma=4))
    batch, compute = build(module, target, samples, torch.arange(97), [(i, s.anchors) for i, s in enumerate(samples)])
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)

    def step() -> float:
        loss = compute(module, batch).loss
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters()), "all of it is trained"
        optimizer.step()
        return loss.item()

    lower_loss(step, to=0.7)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma3_text"])
def test_greedy_output_equals_plain_decoding(family: str) -> None:
    target = toy_target(family)
    drafter = Eagle3Drafter(DrafterWeights(make_drafter(target)), target)
    plain = generate(target, PROMPT, rules=NO_STOPS)
    assert generate(target, PROMPT, drafter, rules=NO_STOPS).tokens == plain.tokens and len(plain.tokens) == 40


def test_a_reduced_vocabulary_and_coupled_sampling_are_lossless_too() -> None:
    target = toy_target()
    ids_Vd = torch.arange(20, 60)
    drafter = Eagle3Drafter(DrafterWeights(make_drafter(target, draft_vocab=40), ids_Vd), target)
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=3, coupled=True)):
        plain = generate(target, PROMPT, params=params, rules=NO_STOPS)
        fast = generate(target, PROMPT, drafter, params, NO_STOPS)
        assert fast.tokens == plain.tokens
    session = drafter.new_session(8)
    drafter.extend([session], [[5, 9]], torch.randn(2, 3, 32))
    (proposal,) = drafter.propose([call_of(session, 7, params=SamplingParams(temperature=1.0))])
    assert set(proposal.tokens) <= set(range(20, 60))
    for k, token in enumerate(proposal.tokens):
        row_V = row_of(proposal, k)
        assert row_V[token].item() == drafted_with(proposal)[k] and row_V[ids_Vd].sum().item() == pytest.approx(1.0)


def test_a_batch_drafts_what_lone_requests_draft_each_to_its_own_limit() -> None:
    target = toy_target()
    drafter = Eagle3Drafter(DrafterWeights(make_drafter(target)), target)
    aux_TLD = 5 * torch.randn(12, 3, 32)
    parts = [list(range(4, 9)), [8], list(range(30, 36))]
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5)

    def drafts(limits: list[int | None], together: bool) -> list[Draft]:
        sessions = [drafter.new_session(8) for _ in parts]
        drafter.extend(sessions, parts, aux_TLD)
        calls = [call_of(s, 11 + r, limits[r], params) for r, s in enumerate(sessions)]
        return drafter.propose(calls) if together else [drafter.propose([call])[0] for call in calls]

    limits: list[int | None] = [None, 1, 3]
    batch = drafts(limits, True)
    assert [len(proposal.tokens) for proposal in batch] == [4, 1, 3]
    for one, other in zip(batch, drafts(limits, False), strict=True):
        assert one.tokens == other.tokens and drafted_with(one) == pytest.approx(drafted_with(other), abs=1e-5)


def test_an_estimator_gives_confidences_and_a_threshold_stops_the_draft() -> None:
    target = toy_target()
    estimator = CertaintyEstimator([1.0, -0.2], [4.0, 3.5, 3.0, 2.5])
    drafter = Eagle3Drafter(
        DrafterWeights(make_drafter(target)), target, DraftCalibration(ConfidenceScaling(estimator=estimator))
    )
    plain = generate(target, PROMPT, rules=NO_STOPS)
    cut = generate(target, PROMPT, drafter, rules=NO_STOPS, policy=ThresholdPolicy(0.4))
    assert cut.tokens == plain.tokens
    assert len({r.proposed for r in cut.rounds}) > 1 and all(r.proposed == r.verified for r in cut.rounds)


def test_a_saved_drafter_serves_as_the_trained_one(tmp_path: Path) -> None:
    target = toy_target()
    module = make_drafter(target, draft_vocab=40)
    ids_Vd = torch.arange(20, 60)
    save_drafter(Checkpoint(DrafterWeights(module, ids_Vd)), tmp_path / "drafter")
    loaded = load_checkpoint(tmp_path / "drafter")
    assert isinstance(loaded.config, Eagle3Config) and loaded.config == module.config
    aux_TLD = 5 * torch.randn(5, 3, 32)
    proposals = []
    for drafter in (Eagle3Drafter(DrafterWeights(module, ids_Vd), target), loaded.serve(target)):
        session = drafter.new_session(8)
        drafter.extend([session], [PROMPT], aux_TLD)
        proposals += drafter.propose([call_of(session, 7)])
    assert proposals[0].tokens == proposals[1].tokens


def test_aux_layers_are_the_official_ones() -> None:
    assert eagle_aux_layers(32) == [1, 15, 28]  # what layers 2, 16 and 29 read
    assert eagle_aux_layers(30) == [1, 14, 26]
    assert Eagle3Config.from_target(toy_target()).target_layer_ids == (1,), "a toy's three are one"


def test_users_mistakes_are_named() -> None:
    target = toy_target()
    module = make_drafter(target, draft_vocab=40)
    with pytest.raises(ValueError, match="97 draft ids for a draft vocabulary of 40"):
        Eagle3Drafter(DrafterWeights(module), target)
    with pytest.raises(ValueError, match="target_layer_ids"):
        Eagle3Config.from_target(target, target_layer_ids=[2, 9])
    with pytest.raises(ValueError, match="gamma 0"):
        replace(module.config, gamma=0)


def test_the_recipe_asks_for_it() -> None:
    recipe = load_recipe(Path("smollm2-135m/eagle3"))
    assert recipe.drafter.config is Eagle3Config and recipe.drafter.gamma == 7

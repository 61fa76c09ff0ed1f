"""The decode loop on toy models: identical to plain decoding, exact limits, stops inside a block, honest statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from outrider.decoding.generate import generate, stream
from outrider.decoding.policies import FixedPolicy, Policy, ThresholdPolicy
from outrider.decoding.request import StopRules
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import BlockDrafter, DFlash
from outrider.drafters.dspark import DSpark
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.toys.oracle import GAMMA, Oracle
from tests.toys.targets import randomise, toy_config, toy_target

PROMPT = [5, 9, 33, 60, 7]
NO_STOPS = StopRules(40, stop_ids=())


def oracle_for(target: Target, spoil: float = 0.3, seed: int = 0, params: SamplingParams | None = None) -> Oracle:
    plain = generate(target, PROMPT, params=params, rules=StopRules(60, stop_ids=()))
    return Oracle(target, [*PROMPT, *plain.tokens], spoil, seed)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma"])
@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_greedy_output_equals_plain_decoding(family: str, head: str) -> None:
    target = toy_target(family)
    drafter = DFlash(toy_config(False)) if head == "none" else DSpark(toy_config(markov_head_type=head))
    randomise(drafter)
    plain = generate(target, PROMPT, rules=NO_STOPS)
    speculative = generate(target, PROMPT, BlockDrafter(DrafterWeights(drafter), target), rules=NO_STOPS)
    assert speculative.tokens == plain.tokens and len(plain.tokens) == 40


@pytest.mark.parametrize("policy", [FixedPolicy(), FixedPolicy(3), FixedPolicy(0), ThresholdPolicy(0.5)])
@pytest.mark.parametrize("spoil", [0.0, 0.3, 1.0])
def test_policies_and_acceptance_never_change_the_output(policy: Policy, spoil: float) -> None:
    target = toy_target()
    result = generate(target, PROMPT, oracle_for(target, spoil), rules=NO_STOPS, policy=policy)
    assert result.tokens == generate(target, PROMPT, rules=NO_STOPS).tokens
    assert sum(len(r.tokens) for r in result.rounds) == 40
    if isinstance(policy, FixedPolicy) and policy.length is not None:
        assert max(r.verified for r in result.rounds) == policy.length
    if spoil == 1.0:
        assert all(r.accepted == 0 for r in result.rounds)
    if spoil == 0.0 and policy == FixedPolicy():
        assert len(result.rounds) == 40 // (GAMMA + 1), "a perfect drafter fills every round"


def test_the_repetition_penalty_is_that_of_transformers_prompt_included() -> None:
    target = toy_target()
    prompt = [*PROMPT, *generate(target, PROMPT, rules=NO_STOPS).tokens]  # of tokens that the target likes

    def penalised(seen_from: int) -> list[int]:
        tokens, processor = list(prompt), RepetitionPenaltyLogitsProcessor(3.0)
        for _ in range(12):
            with torch.inference_mode():
                logits_1V = target.model(torch.tensor([tokens])).logits[:, -1]
            tokens.append(int(processor(torch.tensor([tokens[seen_from:]]), logits_1V).argmax()))
        return tokens[len(prompt) :]

    expected = penalised(seen_from=0)
    assert expected != penalised(seen_from=len(prompt) - 1), "the prompt matters"
    params, rules = SamplingParams(repetition_penalty=3.0), StopRules(12, stop_ids=())
    assert generate(target, prompt, params=params, rules=rules).tokens == expected


@pytest.mark.parametrize("params", [SamplingParams(repetition_penalty=1.4), SamplingParams(top_k=1, temperature=0.7)])
def test_deterministic_warps_equal_plain_decoding(params: SamplingParams) -> None:
    target = toy_target()
    oracle = oracle_for(target, params=params)
    result = generate(target, PROMPT, oracle, params, NO_STOPS)
    assert result.tokens == generate(target, PROMPT, params=params, rules=NO_STOPS).tokens
    assert max(r.accepted for r in result.rounds) > 1


def test_the_drafter_reads_the_aux_hidden_states_of_the_tokens_that_stay() -> None:
    target = toy_target()
    text = [*PROMPT, *generate(target, PROMPT, rules=NO_STOPS).tokens]
    expected_TLD = target.forward(torch.tensor([text]), target.new_cache(len(text)), (1,)).aux_BTLD
    assert expected_TLD is not None

    class Comparing(Oracle):
        def extend(self, sessions: Sequence[Any], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
            first = sessions[0].length
            super().extend(sessions, tokens, aux_TLD)
            assert aux_TLD is not None
            torch.testing.assert_close(aux_TLD, expected_TLD[0, first : sessions[0].length], atol=1e-3, rtol=1e-3)

    result = generate(target, PROMPT, Comparing(target, text, spoil=0.3), rules=NO_STOPS)
    assert max(r.accepted for r in result.rounds) > 1 and any(r.accepted < r.verified for r in result.rounds)


@pytest.mark.parametrize("limit", range(1, 19))
def test_max_new_tokens_is_exact(limit: int) -> None:
    target = toy_target()
    plain = generate(target, PROMPT, rules=StopRules(limit, stop_ids=()))
    fast = generate(target, PROMPT, oracle_for(target), rules=StopRules(limit, stop_ids=()))
    assert fast.tokens == plain.tokens and len(fast.tokens) == limit and fast.finish == "length"


@pytest.mark.parametrize("at", range(12))
def test_a_stop_token_inside_a_block_cuts_the_commit_there(at: int) -> None:
    target = toy_target()
    plain = generate(target, PROMPT, rules=NO_STOPS).tokens
    stop = plain[at]
    expected = plain[: plain.index(stop) + 1]
    result = generate(target, PROMPT, oracle_for(target, 0.0), rules=StopRules(40, stop_ids=[stop]))
    assert result.tokens == expected and result.finish == "stop"
    assert all(r.accepted <= len(r.tokens) for r in result.rounds), "drafts behind the stop are not counted"
    assert generate(target, PROMPT, rules=StopRules(40, stop_ids=[stop])).tokens == expected


def test_outputs_say_where_tokens_come_from_and_where_time_went() -> None:
    target = toy_target()
    outputs = list(stream(target, PROMPT, oracle_for(target), rules=NO_STOPS))
    for output in outputs:
        assert output.accepted <= output.reach <= output.verified <= output.proposed <= GAMMA
        assert output.origins[:-1] == ["draft"] * (len(output.tokens) - 1)
        assert output.origins[-1] == ("bonus" if output.accepted == output.reach else "correction")
        assert min(output.draft_seconds, output.verify_seconds, output.other_seconds) >= 0
    assert [o.finish for o in outputs[:-1]] == [None] * (len(outputs) - 1) and outputs[-1].finish == "length"


@pytest.mark.parametrize("window", [None, 8])
def test_a_bfloat16_target_decodes_with_a_float32_drafter(window: int | None) -> None:
    target = toy_target()
    half = Target(target.model.bfloat16(), None, "toy-bf16")
    drafter = DSpark(toy_config(sliding_window=window, draft_vocab_size=50))
    randomise(drafter)
    packed = BlockDrafter(DrafterWeights(drafter, torch.arange(10, 60)), half)
    for params in (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2)):
        result = generate(half, PROMPT, packed, params, NO_STOPS)
        assert len(result.tokens) == 40


def test_a_threshold_stops_the_draft_where_confidence_ends() -> None:
    target = toy_target()
    drafter = DSpark(toy_config())
    randomise(drafter)
    packed = BlockDrafter(DrafterWeights(drafter), target)
    cut = generate(target, PROMPT, packed, rules=NO_STOPS, policy=ThresholdPolicy(0.6))
    assert {r.proposed for r in cut.rounds} > {0}, "some rounds draft nothing, some do"
    assert all(r.proposed == r.verified for r in cut.rounds)
    assert cut.tokens == generate(target, PROMPT, rules=NO_STOPS).tokens


def test_seeds_are_reproducible_and_differ() -> None:
    target = toy_target()
    drafter = DSpark(toy_config())
    randomise(drafter)
    packed = BlockDrafter(DrafterWeights(drafter), target)
    texts = [
        generate(target, PROMPT, packed, SamplingParams(temperature=1.0, seed=seed), NO_STOPS).tokens
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_context_is_a_hard_limit() -> None:
    target = toy_target()
    long = torch.randint(4, 97, (250,), generator=torch.Generator().manual_seed(1)).tolist()
    drafter = DSpark(toy_config())
    randomise(drafter)
    packed = BlockDrafter(DrafterWeights(drafter), target)
    result = generate(target, long, packed, rules=NO_STOPS)
    assert len(result.tokens) == 6 and result.finish == "length"
    assert result.tokens == generate(target, long, rules=NO_STOPS).tokens
    with pytest.raises(ValueError, match="the prompt has 256 tokens and toy-llama reads 256"):
        generate(target, [5] * 256)


def test_users_mistakes_are_named() -> None:
    target = toy_target()
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(target, [])
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        StopRules(0)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        generate(target, PROMPT, rules=StopRules(stop_strings=["x"]))
    with pytest.raises(ValueError, match="confidence"):
        drafter = DSpark(toy_config(enable_confidence_head=False, confidence_head_with_markov=False))
        generate(target, PROMPT, BlockDrafter(DrafterWeights(drafter), target), policy=ThresholdPolicy(0.5))

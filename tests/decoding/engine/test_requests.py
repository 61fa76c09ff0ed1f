"""What a request of the engine may ask for besides its tokens: log-probabilities, and how many drafts it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch

from outrider.decoding.engine import Engine
from outrider.decoding.generate import stream
from outrider.decoding.policies import FixedPolicy
from outrider.decoding.request import Output, Request, StopRules
from outrider.drafters.base import Drafter
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.toys.engine import assert_solo, prompts
from tests.toys.oracle import Oracle

RULES = StopRules(24, stop_ids=())


def outputs(engine: Engine, requests: Sequence[Request]) -> dict[str, list[Output]]:
    for request in requests:
        engine.submit(request)
    found: dict[str, list[Output]] = {request.id: [] for request in requests}
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            found[output.id].append(output)
    return found


def test_logprobs_are_those_of_the_targets_logits(target: Target, drafter: Drafter) -> None:
    """Of every token, accepted drafts too, at any temperature and penalty; the likeliest first. Others ask for none."""
    params = [SamplingParams(), SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.4, seed=3)]
    requests = [
        Request(f"{i}", prompt, params[i % 2], rules=RULES, logprobs=None if i == 2 else i)
        for i, prompt in enumerate(prompts(4))
    ]
    found = outputs(Engine(target, drafter), requests)
    assert sum(output.accepted for some in found.values() for output in some) > 5
    for request in requests:
        tokens = [token for output in found[request.id] for token in output.tokens]
        if request.logprobs is None:
            assert all(output.logprobs is None for output in found[request.id])
            continue
        told = [one for output in found[request.id] for one in output.logprobs or ()]
        text = torch.tensor([[*request.prompt, *tokens]])
        with torch.inference_mode():
            logits_TV = target.model(text).logits[0, len(request.prompt) - 1 : -1]
        expected_TV = logits_TV.log_softmax(-1)
        torch.testing.assert_close(
            torch.tensor([one.logprob for one in told]), expected_TV.gather(1, text[0, -len(tokens) :, None])[:, 0]
        )
        values_TK, ids_TK = expected_TV.topk(request.logprobs)
        torch.testing.assert_close(torch.tensor([[value for _, value in one.top] for one in told]), values_TK)
        assert [[id for id, _ in one.top] for one in told] == ids_TK.tolist()


def assert_alike(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Equal, and probabilities nearly so."""
    for one, other in zip(found, expected, strict=True):
        tops = one.pop("top", []), other.pop("top", [])
        assert [id for id, _ in tops[0]] == [id for id, _ in tops[1]]
        assert [value for _, value in tops[0]] == pytest.approx([value for _, value in tops[1]], abs=1e-5)
        assert one == pytest.approx(other, abs=1e-5)


def test_a_request_alone_has_the_engines_trace(target: Target, drafter: Drafter) -> None:
    """From its second round on: the engine reads the prompt in the first, without a draft."""
    prompt, policy = prompts(1)[0], FixedPolicy(3)
    requests = [Request("a", prompt, rules=RULES, trace=True)]
    first, *theirs = [output.trace for output in outputs(Engine(target, drafter, policy), requests)["a"]]
    assert first is not None
    text, rules = [*prompt, first.tokens[0].token], StopRules(23, stop_ids=())
    mine = [chunk.trace for chunk in stream(target, text, drafter, rules=rules, policy=policy, traced=True)]
    assert len(mine) == len(theirs)
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True), 1):
        assert one is not None and other is not None and one.number == number
        assert (one.source, one.reason) == (other.source, other.reason)
        assert_alike(asdict(one)["drafts"], asdict(other)["drafts"])
        assert_alike(asdict(one)["tokens"], asdict(other)["tokens"])
    outcomes = {draft.outcome for one in mine if one is not None for draft in one.drafts}
    assert {"accepted", "rejected", "left out"} <= outcomes


def test_a_stop_cuts_the_logprobs_too(target: Target) -> None:
    """Among the tokens of one round, all of them accepted."""
    prompt = prompts(1)[0]
    plain = [
        token for output in outputs(Engine(target), [Request("a", prompt, rules=RULES)])["a"] for token in output.tokens
    ]
    stop = next(token for i, token in enumerate(plain) if i > 3 and token not in plain[:i])
    oracle = Oracle(target, [*prompt, *plain, *[5] * 16], spoil=0.0)
    found = outputs(Engine(target, oracle), [Request("a", prompt, rules=StopRules(24, [stop]), logprobs=0)])["a"]
    assert [token for output in found for token in output.tokens] == plain[: plain.index(stop) + 1]
    assert all(len(output.logprobs or ()) == len(output.tokens) for output in found)
    assert any(len(output.tokens) <= output.accepted for output in found), "the stop was an accepted draft"


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_request_has_as_many_drafts_as_it_may(target: Target, drafter: Drafter, most: int) -> None:
    """Others in the batch have more, and every text is the solo run's."""
    requests = [
        Request(f"{i}", prompt, rules=RULES, most_drafts=None if i % 2 else most) for i, prompt in enumerate(prompts(6))
    ]
    found = outputs(Engine(target, drafter), requests)
    for request in requests:
        verified = [output.verified for output in found[request.id]]
        assert max(verified) == (drafter.slots if request.most_drafts is None else most)
        assert_solo(target, request, [token for output in found[request.id] for token in output.tokens])

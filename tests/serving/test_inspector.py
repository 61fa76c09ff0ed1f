"""Traces, the live counts and the page of the inspector, over real HTTP with the real SmolLM2."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import outrider
from outrider.api.model import Model
from outrider.decoding.text import TextStream
from outrider.decoding.trace import RoundTrace, TokenTrace
from outrider.serving.inspector import page, trace_json
from outrider.target.hub import EMBEDDED_ID
from tests.toys.serving import Served, serving, wait_for
from tests.toys.tokenizer import TOKENIZER, ids

KEY = {"Authorization": "Bearer secret"}
REPEATED = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="module")
def model() -> Model:
    return outrider.load(EMBEDDED_ID, "hybrid")


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model, key="secret") as running:
        yield running


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 24,
        "trace": True,
        **more,
    }


def chat(served: Served, prompt: str, **more: Any) -> Any:
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked(prompt, **more), headers=KEY, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def texts(rounds: list[dict[str, Any]]) -> str:
    return "".join(token["text"] for one in rounds for token in one["tokens"] if token["in_text"])


def outcomes(rounds: list[dict[str, Any]], outcome: str) -> int:
    return sum(draft["outcome"] == outcome for one in rounds for draft in one["drafts"])


@pytest.mark.parametrize(("final", "in_text"), [(False, [True, False]), (True, [True, True])])
def test_a_character_that_is_cut_is_text_where_the_response_ends(final: bool, in_text: list[bool]) -> None:
    tokens = [TokenTrace(token, "plain", None, target=1.0, top=[]) for token in ids("aé")[:2]]
    trace = RoundTrace(1, None, "", drafts=[], tokens=tokens)
    shown = trace_json(trace, TextStream(TOKENIZER), lambda token: "piece", final=final)["tokens"]
    assert [token["in_text"] for token in shown] == in_text and shown[0]["text"] == "a"


def test_a_trace_agrees_with_the_answer(served: Served) -> None:
    """Text, log-probabilities, counts of drafts; streamed as whole; and nothing of it where it is not asked for."""
    answer = chat(served, "Name three rivers.", logprobs=True, top_logprobs=2)
    choice, counted = answer["choices"][0], answer["metrics"]["speculative_decoding"]
    rounds = choice["trace"]
    assert texts(rounds) == choice["message"]["content"]
    assert [one["round"] for one in rounds] == list(range(1, len(rounds) + 1))
    tokens = [token for one in rounds for token in one["tokens"]]
    told = choice["logprobs"]["content"]
    assert [token["target"] for token in tokens] == pytest.approx([math.exp(one["logprob"]) for one in told], abs=1e-3)
    assert [token["top"][1]["text"] for token in tokens] == [one["top_logprobs"][1]["token"] for one in told]
    accepted, rejected, unread = (outcomes(rounds, name) for name in ("accepted", "rejected", "unread"))
    assert accepted == counted["num_accepted_draft_tokens"] > 0 and rejected > 0
    assert accepted + rejected + unread == counted["num_draft_tokens"]
    for one in rounds:
        drafts, own = one["drafts"], one["tokens"][-1]
        assert one["reason"] and (one["source"] is None) == (not drafts)
        assert [token["origin"] for token in one["tokens"][:-1]] == ["draft"] * (len(one["tokens"]) - 1)
        refused = [draft for draft in drafts if draft["outcome"] == "rejected"]
        verified = any(draft["outcome"] != "left out" for draft in drafts)
        expected = "correction" if refused else "bonus" if verified else "plain"
        assert own["origin"] in (expected, "draft"), "the last is a draft where a draft ended the response"
        for token in one["tokens"]:
            if token["draft"] is not None:
                draft = drafts[token["draft"]]
                assert (draft["id"], draft["target"]) == (token["id"], pytest.approx(token["target"]))
        for draft in drafts:
            looked_at = draft["outcome"] in ("accepted", "rejected")
            assert (draft["p_target"] is not None) == (draft["target"] is not None) == looked_at
            assert one["source"] == "copy" or (0 < draft["calibrated"] < 1 and 0 < draft["raw"] < 1)
    with httpx.stream(
        "POST",
        f"{served.url}/v1/chat/completions",
        json=asked("Name three rivers.", stream=True),
        headers=KEY,
        timeout=60,
    ) as stream:
        streamed = [one for event in events_of(stream.iter_lines()) for one in event["choices"][0].get("trace", [])]
    assert [(one["tokens"], one["drafts"]) for one in streamed][:1] == [(rounds[0]["tokens"], rounds[0]["drafts"])]
    assert texts(streamed) == texts(rounds)
    assert "trace" not in chat(served, "Name three rivers.", trace=False, max_tokens=2)["choices"][0]


def test_what_was_drawn_is_told_with_its_probabilities(served: Served) -> None:
    both = chat(served, "Tell me about a sea.", temperature=1, seed=3, n=2)["choices"]
    assert [texts(choice["trace"]) for choice in both] == [choice["message"]["content"] for choice in both]
    drafts = [draft for choice in both for one in choice["trace"] for draft in one["drafts"]]
    assert any(draft["outcome"] == "accepted" and 0 < draft["p_draft"] < 1 for draft in drafts)
    refused = [draft for draft in drafts if draft["outcome"] == "rejected"]
    told = [draft for draft in refused if draft["p_draft"] >= 1e-4]  # less is rounded to 0, as what is less still
    assert told and all(draft["p_target"] < draft["p_draft"] for draft in told)


def test_copies_and_plain_tokens_are_told_apart(served: Served) -> None:
    copied = [one for one in chat(served, REPEATED, max_tokens=50)["choices"][0]["trace"] if one["source"] == "copy"]
    assert copied and outcomes(copied, "accepted") > 0
    assert all(draft["raw"] is draft["calibrated"] is None for one in copied for draft in one["drafts"])
    assert all(0 < draft["believed"] <= 1 for one in copied for draft in one["drafts"])
    for more, reason in (({"speculative": "off"}, "asked for no drafts"), ({"max_tokens": 1}, "read in this step")):
        rounds = chat(served, "Say hello.", **more)["choices"][0]["trace"]
        assert {token["origin"] for one in rounds for token in one["tokens"]} == {"plain"}
        assert all(reason in one["reason"] for one in rounds)


def test_events_count_what_the_engine_does(served: Served) -> None:
    with httpx.stream("GET", f"{served.url}/inspector/events", headers=KEY, timeout=60) as stream:
        events = events_of(stream.iter_lines())
        about = next(events)
        assert about["model"] == "m" and about["most_drafts"] > 0 and about["policy"] == "threshold"
        answer = chat(served, "Name three rivers.")
        counted = answer["metrics"]["speculative_decoding"]
        seen: list[dict[str, Any]] = []
        while sum(event["tokens"] for event in seen) < answer["usage"]["completion_tokens"]:
            seen.append(next(events))
    assert sum(event["tokens"] for event in seen) == answer["usage"]["completion_tokens"]
    assert sum(event["verified"] for event in seen) == counted["num_draft_tokens"]
    assert sum(sum(event["accepted_at"]) for event in seen) == counted["num_accepted_draft_tokens"]
    assert sum(event["reached_at"][0] for event in seen) == counted["num_spec_steps"]
    rounds = answer["choices"][0]["trace"]
    looked_at = outcomes(rounds, "accepted") + outcomes(rounds, "rejected")
    assert sum(sum(event["reached_at"]) for event in seen) == looked_at, "what was not read was not reached"
    assert seen[-1]["running"] == seen[-1]["waiting"] == 0 and seen[-1]["cost"] is None
    wait_for(lambda: not served.server.worker.watches)  # a listener that has gone is told no more


def test_the_page_is_open_and_what_it_shows_is_not(served: Served) -> None:
    found = httpx.get(served.url)
    assert found.status_code == 200 and "default-src 'none'" in found.headers["content-security-policy"]
    with httpx.stream("GET", f"{served.url}/inspector/events", timeout=60) as refused:  # an answer would never end
        assert refused.status_code == 401
    assert httpx.post(f"{served.url}/v1/chat/completions", json=asked("Hi"), timeout=60).status_code == 401
    html, _ = page()
    assert found.text == html and not re.search(r"<link rel=.stylesheet|<script src|<img|@import|\son\w+=", html)
    addresses = set(re.findall(r"https?://[\w./-]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the namespace, which nothing is loaded from"


def test_listeners_are_few_and_do_not_hold_up_the_end(model: Model) -> None:
    with serving(model) as served:
        served.server.worker.watches |= {object() for _ in range(16)}  # type: ignore[misc]
        assert served.get("/inspector/events").status_code == 429
        served.server.worker.watches.clear()
        with httpx.stream("GET", f"{served.url}/inspector/events", timeout=60) as stream:
            events = events_of(stream.iter_lines())
            next(events)
            served.stop()
            assert sum(1 for _ in events) < 10, "the stream ends with the server"

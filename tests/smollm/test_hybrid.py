"""Copies beside the packaged drafter on the real SmolLM2: the text is plain decoding's, alone and in the engine."""

from __future__ import annotations

import pytest

from outrider.api.drafter import choose_drafter
from outrider.data.chat import render
from outrider.data.sources import load_prompts
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.evaluation.evaluate import compare_greedy
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.toys.engine import finish

CODE = "Write three Python functions: add(x, y), sub(x, y) and mul(x, y), each with a docstring."
PARAMS = {"greedy": SamplingParams(), "coupled": SamplingParams(0.8, top_p=0.95, seed=7, coupled=True)}


@pytest.mark.parametrize("name", PARAMS)
def test_the_text_is_plain_decoding_s(smollm: Target, name: str) -> None:
    choice = choose_drafter("hybrid", smollm.name)
    assert smollm.tokenizer is not None and choice is not None
    opened = choice.open(smollm)
    assert opened.name.startswith("hybrid:") and opened.algorithm == "hybrid dspark"
    chat = load_prompts("eval_chat", 1)[0].turns[0]
    prompts = [render(smollm.tokenizer, [text], []) for text in (CODE, chat)]
    params, rules = PARAMS[name], StopRules(80)
    requests = [Request(str(number), prompt, params, rules) for number, prompt in enumerate(prompts)]
    texts = finish(Engine(smollm), requests)
    together = finish(Engine(smollm, opened.drafter, config=EngineConfig(2, 64, 16, 100)), requests)
    longest = 0
    for request in requests:
        prompt, plain = request.prompt, texts[request.id]
        alone = generate(smollm, prompt, opened.drafter, params, rules)
        for tokens in (alone.tokens, together[request.id]):
            same = compare_greedy(smollm, prompt, plain, tokens) != "mismatch" if name == "greedy" else tokens == plain
            assert same, request.id
        longest = max([longest, *(r.proposed for r in alone.rounds)])
    assert longest > 7, "a copy longer than the drafter's blocks"

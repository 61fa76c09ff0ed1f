"""Our decoding against z-lab's published loop (`dflash` 0.1.0): one checkpoint, target, machine and set of prompts.

    pytest tests/test_zlab_speed.py -s    prints both rates and the median ratio of the times (quartiles)

The drafter is trained for a few seconds on some of these prompts' answers, so that drafts are accepted in earnest.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch
from dflash.model import DFlashDraftModel, dflash_generate

from outrider.backends.transformers import load_causal_lm
from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.data.chat import render
from outrider.data.sources import load_prompts
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.evaluation.evaluate import compare_greedy
from outrider.target.hub import EMBEDDED_ID
from outrider.target.model import Target
from tests.toys.small_training import TOKENS, answer, train_until

KNOWN, PROMPTS = 3, 5  # prompts whose answers the drafter learned, and prompts in all


@pytest.mark.timed
def test_at_least_as_fast_as_the_published_loop(smollm: Target, tmp_path: Path) -> None:
    assert smollm.tokenizer is not None
    prompts = [render(smollm.tokenizer, prompt.turns, []) for prompt in load_prompts("eval_math", PROMPTS)]
    sections = {"drafter": {"algorithm": "dflash"}}  # the whole vocabulary: their loop knows no other
    answers = answer(smollm, prompts[:KNOWN])
    directory = train_until(1.6, "dflash", smollm, answers, tmp_path, sections=sections).directory
    ours, theirs = load_checkpoint(directory).serve(smollm), DFlashDraftModel.from_pretrained(directory).eval()
    target = load_causal_lm(EMBEDDED_ID, "cpu", torch.float32)
    ratios, seconds, rounds = [], [0.0, 0.0], 0
    for prompt in [prompts[0], *prompts]:  # the first once more, to warm up
        begun = time.perf_counter()
        found = generate(smollm, prompt, ours, rules=StopRules(TOKENS, stop_ids=()))
        between = time.perf_counter()
        with torch.inference_mode():
            output = dflash_generate(theirs, target, torch.tensor([prompt]), TOKENS, stop_token_ids=None)
        taken = between - begun, time.perf_counter() - between
        assert compare_greedy(smollm, prompt, output[0, len(prompt) :].tolist(), found.tokens) in ("same", "tie")
        ratios.append(taken[1] / taken[0])
        seconds = [total + one for total, one in zip(seconds, taken, strict=True)]
        rounds += len(found.rounds)
    count = len(ratios) * TOKENS
    low, middle, high = statistics.quantiles(ratios[1:], n=4)
    print(
        f"\n{count / rounds:.2f} tokens a round; {count / seconds[0]:.1f} tokens/s here, {count / seconds[1]:.1f} in "
        f"dflash 0.1.0: {middle:.2f}x ({low:.2f}-{high:.2f} over {PROMPTS} prompts)"
    )
    assert count / rounds > 1.1
    assert middle > 1.0

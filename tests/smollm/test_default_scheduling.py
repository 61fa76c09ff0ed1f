"""Draft lengths by default, on the real model: by the profile of the machine, measured once; the text is plain."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import outrider
import outrider.api.scheduling as scheduling
from benchmarks.wrong_costs import uneven
from outrider.api.drafter import require_drafter
from outrider.api.scheduling import by_profile
from outrider.data.chat import render
from outrider.data.sources import load_prompts
from outrider.decoding.generate import generate
from outrider.decoding.policies import FixedPolicy, LookAhead, SkipDrafting
from outrider.decoding.profile import machine_profile
from outrider.decoding.request import StopRules
from outrider.target.hub import EMBEDDED_ID
from outrider.target.model import Target
from outrider.utils.files import cache_dir
from tests.toys.command_line import Run

PROMPT = "What is 17 + 25? Think step by step."


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measurements as a user has them, in a cache without any; the model converted before is in it."""
    (tmp_path / "SmolLM2-135M-Instruct").symlink_to(cache_dir() / "SmolLM2-135M-Instruct")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(scheduling, "machine_profile", machine_profile)


def test_generate_and_python_follow_the_machines_profile(
    run: Run, measured: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    status, said, beside = run("generate", PROMPT, "--max-new-tokens", 24)
    assert status == 0, beside
    (profile,) = (tmp_path / "profiles").glob("*.json")
    assert beside.count("measuring what a step of") == 1
    assert "; draft lengths by look-ahead+skip: step costs measured now in " in beside and str(profile) in beside

    caplog.set_level(logging.INFO, logger="outrider")
    model = outrider.load(EMBEDDED_ID)
    again = model.generate(PROMPT, max_new_tokens=24)
    chosen = model.scheduling
    assert isinstance(chosen.policy, SkipDrafting) and isinstance(chosen.policy.policy, LookAhead)
    assert chosen.costs.startswith("step costs measured on ") and chosen.profile == profile and not caplog.text
    plain = model.generate(PROMPT, max_new_tokens=24, policy=FixedPolicy(0))
    assert said.rstrip("\n") == again.text == plain.text and again.rounds < plain.rounds == 24
    together = model.generate([PROMPT, PROMPT], max_new_tokens=24)
    assert [response.text for response in together] == [plain.text] * 2 and together[0].rounds < 24


def test_an_uneven_profile_keeps_nobody_from_drafting(measured: None, smollm: Target) -> None:
    """It made drafts look so dear that a race against plain decoding ended at an accepted length of 1.04."""
    opened = require_drafter("auto", EMBEDDED_ID).open(smollm)
    right = machine_profile(smollm, opened.drafter)
    assert right.path is not None
    chosen = by_profile(opened.drafter, replace(right, profile=uneven(right.profile)))
    prompts = load_prompts("eval_math", 4)
    lengths = []
    for prompt in prompts:
        tokens = render(smollm.tokenizer, prompt.turns[:1], [])
        response = generate(smollm, tokens, opened.drafter, rules=StopRules(96), policy=chosen.policy)
        lengths.append(len(response.tokens) / len(response.rounds))
    assert float(np.mean(lengths)) > 2.0, lengths

"""Every recipe for SmolLM2 on the real SmolLM2: its drafter and objective, trained as in production, then served.

A few seconds of training on a few answers make each drafter fluent in them, so that decoding the same prompts accepts
drafts in earnest. What is asked of each: the loss falls, it is served as it was trained, greedy output is plain
decoding's but for one tie at most, and so it is with trees where it has them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
import torch
import yaml

from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.checkpoints.registry import method_of
from outrider.data.chat import render
from outrider.data.sources import load_prompts
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.draft import TreeSize
from outrider.evaluation.evaluate import compare_greedy
from outrider.target.model import Target
from outrider.utils.packaged import PACKAGE
from tests.toys.alignment import check_alignment
from tests.toys.small_training import TOKENS, Answer, answer, train_until

LENGTH = 1.5  # the accepted length at which training ends
NODES, SHIPPED = (16, 60), "dspark"  # the method of the drafter that ships; the others are slow tests
RECIPES = sorted((PACKAGE / "recipes" / "smollm2-135m").glob("*.yaml"))


@pytest.fixture(scope="module")
def answers(smollm: Target) -> list[Answer]:
    assert smollm.tokenizer is not None
    return answer(smollm, [render(smollm.tokenizer, prompt.turns, []) for prompt in load_prompts("eval_math", 4)])


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem != SHIPPED)) for path in RECIPES],
)
def test_trained_served_and_lossless(path: Path, smollm: Target, answers: list[Answer], tmp_path: Path) -> None:
    recipe = yaml.safe_load(path.read_text())
    sections = {name: recipe[name] for name in ("drafter", "objective") if name in recipe}
    method = method_of(recipe["drafter"]["algorithm"])
    trained = train_until(LENGTH, method.name, smollm, answers, tmp_path, sections=sections)
    run, directory = trained.run, trained.directory
    logged = [json.loads(line) for line in (directory.parent / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in logged if row["group"] == "train"]
    assert losses[-1] < losses[0], losses

    with torch.no_grad():
        assert check_alignment(smollm, run.drafter.eval(), run.samples[:1], run.draft_ids_Vd) > 20

    decoded = list(zip(answers, trained.decoded, strict=True))
    accepted = {"chain": trained.accepted}
    if method.module.drafts_trees():
        served = load_checkpoint(directory).serve(smollm)
        for nodes, one in zip(NODES, answers, strict=False):  # large trees take the longest to verify
            found = generate(smollm, one.prompt, served.with_trees(TreeSize(nodes)), rules=StopRules(TOKENS))
            decoded.append((one, found))
            accepted[f"{nodes} nodes"] = mean(stats.accepted for stats in found.rounds)
    verdicts = Counter(compare_greedy(smollm, *one, found.tokens) for one, found in decoded)
    assert not verdicts["mismatch"] and verdicts["tie"] <= 1, verdicts
    assert min(accepted.values()) > 0.2, f"identity with nothing accepted would say little: {accepted}"

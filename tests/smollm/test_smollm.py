"""The real SmolLM2-135M-Instruct: greedy identity, stops, a two-sample test at temperature 1, CPU speed, the CLI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.forward import forward_curve, plain_against_transformers
from outrider.calibration.collect import target_texts
from outrider.data.chat import render
from outrider.data.responses import Sample
from outrider.data.sources import TaskSettings, load_prompts
from outrider.decoding.generate import generate, stream
from outrider.decoding.request import StopRules
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.evaluation.evaluate import compare_greedy
from outrider.sampling import Randomness, SamplingParams, SeededSource
from outrider.target.model import Target
from outrider.training.dataset import choose_draft_ids
from outrider.training.features import measure_aux_scale
from tests.toys.alignment import check_alignment
from tests.toys.oracle import Oracle, SelfDrafter

PROMPTS, NEW_TOKENS = 52, 128


@pytest.mark.slow
def test_greedy_identity_on_fifty_prompts(smollm: Target) -> None:
    """Spoiled oracles give every accepted length; short answers stop inside blocks."""
    assert smollm.tokenizer is not None
    names = ("eval_math", "eval_chat", "eval_code", "train_chat")
    prompts = [p for name in names for p in load_prompts(name)][:PROMPTS]
    rules, verdicts, stops, accepted = StopRules(NEW_TOKENS), Counter[str](), 0, Counter[int]()
    rendered = [render(smollm.tokenizer, prompt.turns[:1], []) for prompt in prompts]
    texts = target_texts(smollm, rendered, TaskSettings(max_new_tokens=NEW_TOKENS))  # many at once: faster
    for number, (tokens, plain) in enumerate(zip(rendered, texts, strict=True)):
        oracle = Oracle(smollm, [*tokens, *plain, *[5] * 16], spoil=0.25, seed=number)
        fast = generate(smollm, tokens, oracle, rules=rules)
        verdicts[compare_greedy(smollm, tokens, plain, fast.tokens)] += 1
        stops += fast.finish == "stop" and fast.rounds[-1].committed == fast.rounds[-1].accepted
        accepted.update(r.accepted for r in fast.rounds)
        assert fast.finish == ("stop" if plain[-1] in smollm.eos_ids else "length") or verdicts["tie"]
    assert verdicts["mismatch"] == 0 and verdicts["tie"] <= 1, verdicts
    assert stops >= 5, "the prompts must include answers that end inside a block"
    assert set(accepted) == set(range(8)), "every accepted length occurs"


def test_stop_strings_inside_a_block(smollm: Target) -> None:
    assert smollm.tokenizer is not None
    tokens = render(smollm.tokenizer, ["List the days of the week, separated by commas."], [])
    plain = generate(smollm, tokens, rules=StopRules(60))
    stop = plain.text[25:32]
    oracle = Oracle(smollm, [*tokens, *plain.tokens, *[5] * 16], spoil=0.0)
    fast = generate(smollm, tokens, oracle, rules=StopRules(60, stop_strings=[stop]))
    assert fast.text == plain.text[: plain.text.index(stop)] and fast.finish == "stop"


def test_trained_equals_served(smollm: Target) -> None:
    """On the model's own text, with a reduced draft vocabulary and massive activations in the aux hidden states."""
    assert smollm.tokenizer is not None
    samples = []
    for prompt in load_prompts("eval_math", 2):
        tokens = render(smollm.tokenizer, prompt.turns, [])
        response = generate(smollm, tokens, rules=StopRules(40)).tokens
        samples.append(Sample(prompt.id, tokens + response, ((len(tokens), len(tokens) + len(response)),)))
    drafter = DSpark(DSparkConfig.from_target(smollm, draft_vocab_size=2000, markov_head_type="rnn"))
    drafter.aux_scale_L.copy_(measure_aux_scale(smollm, samples, drafter.config.target_layer_ids))
    drafter.initialize_from(smollm, [s.tokens for s in samples])
    ids = choose_draft_ids(samples, smollm.vocab_size, 2000, smollm.eos_ids)
    assert check_alignment(smollm, drafter, samples, ids) > 200


def chi_square(first: Counter[int], second: Counter[int], least: int = 10) -> float:
    """p-value of the two-sample chi-square test; rare tokens share one cell."""
    common = [t for t in first | second if first[t] + second[t] >= 2 * least]
    cells = [(first[t], second[t]) for t in common]
    cells.append((first.total() - sum(a for a, _ in cells), second.total() - sum(b for _, b in cells)))
    table = torch.tensor([c for c in cells if sum(c)], dtype=torch.float64)
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(table) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


class AcceptAll(SeededSource):
    def accept(self, probability: float) -> bool:
        return True


@pytest.mark.slow
def test_two_samples_at_temperature_one(smollm: Target) -> None:
    """Speculative and plain sampling agree position by position; a rule that accepts everything does not."""
    assert smollm.tokenizer is not None
    prompt = list(smollm.tokenizer("My favourite season of the year is")["input_ids"])
    rules, gamma, draws = StopRules(3, stop_ids=()), 2, 250
    drafter = SelfDrafter(smollm, temperature=1.8, gamma=gamma)

    def sample(speculative: bool, first_seed: int, randomness: Randomness | None = None) -> list[Counter[int]]:
        counts: list[Counter[int]] = [Counter(), Counter(), Counter()]
        for seed in range(first_seed, first_seed + draws):
            chosen = drafter if speculative else None
            params = SamplingParams(temperature=1.0, seed=seed)
            chunks = stream(smollm, prompt, chosen, params, rules, randomness=randomness)
            for position, token in enumerate(token for chunk in chunks for token in chunk.tokens):
                counts[position][token] += 1
        return counts

    plain, fast = sample(False, 0), sample(True, 10_000)
    p_values = [chi_square(a, b) for a, b in zip(plain, fast, strict=True)]
    assert min(p_values) > 1e-3, p_values
    broken = sample(True, 20_000, Randomness(AcceptAll))
    assert min(chi_square(a, b) for a, b in zip(plain[:2], broken[:2], strict=True)) < 1e-3


@pytest.mark.timed
def test_eight_tokens_cost_little_more_than_one(smollm: Target) -> None:
    """The curve itself is in docs/results.md; shared CI machines only get a loose bound."""
    points = {p.tokens: p for p in forward_curve(smollm, context=256, repeats=7)}
    assert points[8].packed[1] / points[1].packed[1] < 2.0
    assert points[8].packed[1] < points[8].linear[1]


@pytest.mark.timed
def test_plain_decoding_keeps_up_with_transformers(smollm: Target) -> None:
    figures = plain_against_transformers(smollm, repeats=3, new_tokens=48)
    assert figures["identical"]
    # 1.7 to 1.9 on an EPYC with AVX-512, 0.8 on a Xeon with AMX (docs/log.md): the bound finds a lost fast path only.
    assert figures["ratio"] > 0.6


@pytest.mark.slow
def test_demo_from_prompts_to_a_measured_speedup(tmp_path: Path) -> None:
    """The whole road in small: a few responses, a few steps, a real evaluation, the files it promises."""
    command = [
        sys.executable, "-m", "outrider.cli.main", "demo", "--out", str(tmp_path / "demo"), "--eval-samples", "2",
        "--eval-tokens", "32", "data.max_minutes=0.2", "data.batch_size=16", "data.max_new_tokens=48",
        "data.held_out=2", "optimizer.steps=12", "optimizer.sequences_per_step=2", "eval_every=6",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "demo" / "eval" / "results.json").read_text())
    assert [t["task"] for t in results["tasks"]] == ["eval_math", "eval_chat", "eval_code"]
    for task in results["tasks"]:
        assert task["greedy_identical"] or task["greedy_ties"]
        assert sum(task["acceptance_histogram"]) == task["rounds"] and task["accepted_length"] >= 1
        assert task["tokens_per_second"] > 0 and task["baseline_tokens_per_second"] > 0
    for picture in ("conditional_acceptance.png", "accepted_length.png"):
        assert (tmp_path / "demo" / "eval" / picture).read_bytes()[:4] == b"\x89PNG"
        assert picture in done.stdout.replace("\n", "")
    page = tmp_path / "demo" / "report.html"
    *_, url, _, following = done.stdout.strip().splitlines()
    assert url.strip() == page.as_uri() and following.startswith("next: outrider serve")
    shown = page.read_text(encoding="utf-8")
    assert all(heading in shown for heading in ("Evaluation", "Training", "Generation"))

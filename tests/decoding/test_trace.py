"""Traces of rounds: what becomes of the nodes of chains and trees, and the confidences before calibration."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from outrider.decoding.cost import SpsTable
from outrider.decoding.policies import (
    BY_COST,
    FixedPolicy,
    Policy,
    StepView,
    ThresholdPolicy,
)
from outrider.decoding.trace import RoundTrace, _likeliest, path_rows, trace_round
from outrider.decoding.verification import RoundResult, Verdict
from outrider.drafters.confidence import ChainHeads, ConfidenceScaling, SampledScaling
from outrider.drafters.draft import Draft, Siblings

LOGITS_NV = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(9, 1)
TREE = Draft([1, 2, 1, 3, 2, 3], [-1, -1, 0, 0, 1, 2])


def traced(draft: Draft, verified: int, path: list[int], tokens: int, **more: object) -> RoundTrace:
    result = RoundResult(draft, draft.truncated(verified), Verdict(path, 0))
    about = {"compared": {}, "number": 1, "source": "drafter", "reason": "because", "raw": None, "believed": []}
    (rows,) = path_rows(LOGITS_NV, [(0, path)])
    return trace_round(result, result.tokens[:tokens], rows, **{**about, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("draft", "verified", "path", "tokens", "outcomes", "origins"),
    [
        (Draft.chain([1, 2, 3]), 3, [0, 1, 2], 4, "aaa", ["draft", "draft", "draft", "bonus"]),
        (Draft.chain([1, 2, 3]), 2, [0], 2, "arl", ["draft", "correction"]),
        (Draft.chain([1, 2, 3]), 3, [], 1, "ruu", ["correction"]),
        (Draft.chain([1, 2, 3]), 0, [], 1, "lll", ["plain"]),
        (Draft.chain([1, 2, 3]), 3, [0, 1], 1, "auu", ["draft"]),  # the response ended with the first
        (TREE, 6, [1, 4], 3, "rauuau", ["draft", "draft", "bonus"]),
        (TREE, 5, [0, 3], 3, "aurauu"[:4] + "ul", ["draft", "draft", "bonus"]),
        (TREE, 6, [0], 2, "aurruu", ["draft", "correction"]),
    ],
)
def test_what_became_of_every_node(
    draft: Draft, verified: int, path: list[int], tokens: int, outcomes: str, origins: list[str]
) -> None:
    found = traced(draft, verified, path, tokens)
    assert "".join(one.outcome[0] for one in found.drafts) == outcomes
    assert [token.origin for token in found.tokens] == origins
    assert [token.node for token in found.tokens] == [*path, None][:tokens]
    for one in found.drafts:
        looked_at = one.outcome in ("accepted", "rejected")
        assert (one.target is not None) == looked_at and (one.p_target is not None) == looked_at
        assert one.target is None or one.target == pytest.approx(0.1 * (one.token + 1))
    assert [id for id, _ in found.tokens[0].top] == [3, 2, 1, 0]


def test_the_probabilities_that_were_compared() -> None:
    row_V = torch.tensor([0.0, 0.5, 0.25, 0.25])
    drawn = {-1: Siblings(lambda: row_V, first=0.5), 0: Siblings(lambda: row_V)}
    draft = Draft.chain([1, 2, 3], drawn, [0.9, 0.8, 0.7])
    compared = {0: torch.tensor([0.0, 0.7, 0.3, 0.0]), 1: torch.tensor([0.9, 0.0, 0.1, 0.0])}
    found = traced(draft, 3, [0], 2, compared=compared, raw=lambda c, k: c / (k + 2), believed=[0.4, float("nan")])
    assert [one.p_draft for one in found.drafts] == [0.5, 0.25, 1.0]
    assert [one.p_target for one in found.drafts] == [pytest.approx(0.7), pytest.approx(0.1), None]
    assert [one.calibrated for one in found.drafts] == [0.9, 0.8, 0.7]
    assert [one.raw for one in found.drafts] == [0.45, pytest.approx(0.8 / 3), 0.175]
    assert [one.believed for one in found.drafts] == [0.4, None, None]
    copied = traced(draft, 3, [0], 2, source="copy", believed=[0.4])
    assert [one.calibrated for one in copied.drafts] == [None] * 3 and copied.drafts[0].believed == 0.4


def test_confidences_before_calibration() -> None:
    sampled = SampledScaling(0.8, ConfidenceScaling([1.5, 0.75], [-0.5, 0.125]))
    heads = ChainHeads(8, scaling=ConfidenceScaling([0.5, 2.0], [0.25, -1.0]), sampled=sampled)
    logit_N = torch.tensor([-3.0, 0.0, 2.0])
    for k, temperature in product((0, 1), (0.0, 0.5, 1.0)):
        calibrated = heads.calibrated(logit_N, k, [temperature] * 3).tolist()
        raw = [heads.uncalibrated(c, k, temperature) for c in calibrated]
        assert raw == pytest.approx(logit_N.sigmoid().tolist(), abs=1e-5)
    assert ChainHeads(8).uncalibrated(1.0, 0, 0.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (FixedPolicy(1), ["verifies 1 drafts"]),
        (ThresholdPolicy(0.45), ["confidence 0.40 of draft 2", "threshold 0.45"]),
        # One request, survival 0.5 and 0.5 * 0.4: 1.5 tokens in 1/80 s against 1.7 in 1/40 s.
        (BY_COST["prefix"](SpsTable([100, 80, 40])), ["probability 0.20", "12.5 ms", "120.0 tokens/s", "68.0 with it"]),
        (BY_COST["goodput"](SpsTable([100, 80, 40])), ["68.0 with it; the length"]),
    ],
)
def test_policies_say_why_they_stopped(policy: Policy, said: list[str]) -> None:
    view = StepView.of([[0.5, 0.4]], [2])
    lengths_R = policy.lengths(view)
    assert lengths_R.tolist() == [1]
    reason = policy.reason(view, lengths_R, 0)
    assert all(part in reason for part in said), reason


def test_the_likeliest_are_those_of_the_whole_vocabulary() -> None:
    """Wherever they are: several in one chunk, and behind the last whole chunk of 64."""
    logits_PV = torch.randn(3, 64 * 40 + 9, generator=torch.Generator().manual_seed(0))
    logits_PV[0, [5, 7, 9, 11, 13]] += 20.0
    logits_PV[1, -9:] += 20.0
    for logits in (logits_PV, logits_PV[:, : 64 * 40], logits_PV[:, :70]):
        assert _likeliest(logits, 5).tolist() == logits.sort(-1, descending=True).indices[:, :5].tolist()


@pytest.mark.parametrize("paths", [[(0, [0]), (2, []), (3, [0, 1])], [(1, [1, 3]), (6, []), (7, [0])]])
def test_rows_of_several_rounds_are_those_of_each_alone(paths: list[tuple[int, list[int]]]) -> None:
    """Also where rejected drafts lie between them, as in the second case."""
    logits_NV = torch.randn(9, 200, generator=torch.Generator().manual_seed(0))
    together = path_rows(logits_NV, paths)
    assert len(together) == len(paths)
    for (anchor, path), found in zip(paths, together, strict=True):
        probs_PV = logits_NV[[anchor, *(anchor + 1 + node for node in path)]].softmax(-1)
        torch.testing.assert_close(torch.from_numpy(found.probs_PV), probs_PV)
        values, ids = probs_PV.topk(5)
        assert [[id for id, _ in row] for row in found.top] == ids.tolist()
        torch.testing.assert_close(torch.tensor([[p for _, p in row] for row in found.top]), values)

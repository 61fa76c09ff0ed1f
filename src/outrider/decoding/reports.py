"""What a request may ask to be told of its rounds beside the tokens: log-probabilities and a trace. Neither changes a
token. Shapes: N rows with logits, T committed tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from outrider.decoding.drafting import Drafted, Drafting, DraftTurn
from outrider.decoding.policies import StepView
from outrider.decoding.request import Request, TokenLogprob
from outrider.decoding.scoring import Scores
from outrider.decoding.trace import path_rows, trace_round
from outrider.decoding.verification import RoundResult
from outrider.sampling import at_least_float32


def report(
    committed: Mapping[str, tuple[Request, Sequence[int]]],
    drafting: Drafting,
    scores: Scores,
    *,
    turns: Sequence[DraftTurn],
    drafted: Drafted,
    unasked: Mapping[str, str],
    view: StepView | None,
    results: Mapping[str, RoundResult],
) -> dict[str, dict[str, Any]]:
    """Fields of the outputs of a step, of requests that asked for a report.

    Args:
        committed: requests with what the step gave them.
        turns, drafted: of all requests that decode.
        unasked: why a request was not asked for a draft; "": it was.
        view: as the policy was shown; None: nothing was drafted.
    """
    fields: dict[str, dict[str, Any]] = {}
    for id, (request, tokens) in committed.items():
        if request.logprobs is not None:
            logprobs = _logprobs(scores, id, results[id].verdict.path, tokens=tokens, count=request.logprobs)
            fields[id] = {"logprobs": logprobs}
    traced = [id for id, (request, _) in committed.items() if request.trace]
    if not traced:
        return fields
    assert scores.logits_NV is not None, "the rounds were verified"
    paths = path_rows(scores.logits_NV, [(scores.logit_rows[id].start, results[id].verdict.path) for id in traced])
    places = {turn.id: place for place, turn in enumerate(turns)}
    lengths_R = np.array([len(rows.tokens) for rows in scores.drafts])
    heads = None if drafting.drafter is None or drafting.drafter.trees else drafting.drafter.heads
    for id, rows in zip(traced, paths, strict=True):
        place, tokens = places[id], committed[id][1]
        turn = turns[place]
        fields.setdefault(id, {})["trace"] = trace_round(
            results[id],
            tokens,
            rows,
            compared=scores.compared[id],
            number=turn.state.rounds,
            source=drafted.proposals[place].source if results[id].draft.tokens else None,
            reason=unasked[id] or drafting.reason(drafted, view, lengths_R, request=place),
            raw=None if heads is None else partial(heads.uncalibrated, temperature=turn.state.params.temperature),
            believed=[] if view is None else view.confidences_RK[place].tolist(),
        )
    return fields


def _logprobs(scores: Scores, id: str, path: Sequence[int], tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of committed tokens and of the `count` likeliest in place of each."""
    rows = [0, *(node + 1 for node in path)][: len(tokens)]  # the row that each token was drawn from
    assert scores.logits_NV is not None, "tokens were committed"
    logprobs_TV = at_least_float32(scores.logits_NV[scores.logit_rows[id]][rows]).log_softmax(-1)
    its = logprobs_TV.gather(1, torch.tensor(tokens, device=logprobs_TV.device)[:, None])[:, 0].tolist()
    top_values, top_ids = (part.tolist() for part in logprobs_TV.topk(min(count, logprobs_TV.shape[1])))
    return [
        TokenLogprob(logprob, list(zip(ids, values, strict=True)))
        for logprob, ids, values in zip(its, top_ids, top_values, strict=True)
    ]

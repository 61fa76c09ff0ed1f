"""Measure how often a Medusa or Hydra head's i-th candidate is right: what a tree of fixed shape is chosen by.

    a_k(i) = share of positions where the true x_k is the rank-i token of head k, given the true x_1 .. x_{k-1}

Measured with the serving code on prompts the drafter was not trained on; the true tokens are those of the target's own
response at the temperature of serving. `drafters/trees.py` chooses the tree by these accuracies.

Ranks are by likelihood at any temperature. Above 0, serving *draws* siblings: the i-th drawn token is not the rank-i
token, and it is accepted more often than it equals the target's. The accuracies then only show where branching helps,
and lengths computed from them are no predictions.
Source: Medusa, arXiv 2401.10774, section 2.3.3. Shapes: N positions, K heads, H hidden, T tokens, Vd draft vocab.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from outrider.data.chat import render
from outrider.data.sources import TaskSettings, load_tasks
from outrider.drafters.base import DraftCall, Drafter
from outrider.drafters.trees import assumed_accuracy, best_tree, expected_length, measured_accuracy
from outrider.evaluation.calibration.collect import target_texts
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target

SIZES = (4, 8, 16, 32, 60)  # nodes of the trees that are compared
_AT_ONCE = 16  # positions measured together; more only take memory
_FEWEST = 100  # positions; accuracies from fewer are mostly noise


class Candidates(BaseModel):
    """`candidates` of outrider.json: `accuracy[k][i]` is a_{k+1}(i) over `positions` tokens of `tasks`."""

    accuracy: list[list[float]]
    positions: int
    tasks: list[str]
    sampling: dict[str, Any]
    max_new_tokens: int
    versions: dict[str, str]


def measure_candidates(
    target: Target,
    drafter: Drafter,
    tasks: Sequence[str],
    settings: TaskSettings,
    versions: dict[str, str],
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Candidates:
    """Measure the accuracies over the target's responses to the first turns of all prompts.

    Raises:
        ValueError: a task file is missing or malformed (before anything is decoded), or responses have too few tokens.
    """
    assert target.tokenizer is not None
    ranks: list[Tensor] = []
    loaded = load_tasks(tasks, settings.max_samples)
    for name, conversations in loaded:
        on_progress(name, 0, len(conversations))
        prompts = [
            render(target.tokenizer, c.turns[:1], [], tools=c.tools, thinking=settings.thinking) for c in conversations
        ]
        for done, (prompt, text) in enumerate(zip(prompts, target_texts(target, prompts, settings), strict=True), 1):
            ranks.append(true_ranks(target, drafter, prompt, text=text))
            on_progress(name, done, len(conversations))
    ranks_NK = torch.cat(ranks)
    if (ranks_NK[:, -1] >= 0).sum() < _FEWEST:
        raise ValueError(
            f"the last head was judged at fewer than {_FEWEST} tokens of the responses: give more prompts "
            "(--max-samples) or longer responses (--max-new-tokens)."
        )
    return Candidates(
        accuracy=measured_accuracy(ranks_NK, ranks_NK >= 0),
        positions=len(ranks_NK),
        tasks=[name for name, _ in loaded],
        sampling=asdict(settings.params),
        max_new_tokens=settings.max_new_tokens,
        versions=versions,
    )


@torch.inference_mode()
def true_ranks(target: Target, drafter: Drafter, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
    """Rank [N, K] of the true token by each head, after the prompt and each token of `text` but the last.

    -1 beyond the end of the text. A token outside the draft vocabulary ranks after all others.
    """
    assert drafter.heads is not None
    tokens, K, draft_ids_Vd = [*prompt, *text], drafter.gamma, drafter.heads.draft_ids_Vd
    block = torch.tensor([tokens[:-1]], device=target.device)
    aux_BTLD = target.forward(block, target.new_cache(len(tokens)), drafter.aux_layers, logits=0).aux_BTLD
    assert aux_BTLD is not None
    anchors = range(len(prompt) - 1, len(tokens) - 1)
    ranks_NK = torch.full((len(anchors), K), -1)
    for first in range(0, len(anchors), _AT_ONCE):
        chosen = anchors[first : first + _AT_ONCE]
        level = drafter.levels([_call(target, drafter, tokens[a], aux_TLD=aux_BTLD[0, :a]) for a in chosen], K)
        for k in range(K):
            known = [n for n, a in enumerate(chosen) if a + k + 1 < len(tokens)]
            # Positions too close to the end are padded with token 0; their rows are dropped below.
            paths = [[*tokens[a : a + k + 1], *[0] * (k + 1)][: k + 1] for a in chosen]
            logits_NVd = level(k, torch.tensor(paths, device=target.device)[:, None])[known, 0]
            true_N = torch.tensor([tokens[chosen[n] + k + 1] for n in known], dtype=torch.long, device=target.device)
            ranks_NK[[first + n for n in known], k] = _ranks(logits_NVd, true_N, draft_ids_Vd).cpu()
    return ranks_NK


def _call(target: Target, drafter: Drafter, anchor: int, aux_TLD: Tensor) -> DraftCall:
    session = drafter.new_session(len(aux_TLD))
    drafter.extend([session], [[0] * len(aux_TLD)], aux_TLD)  # keeps the last hidden state
    return DraftCall(session, anchor, SamplingParams(), seen=SeenTokens(target.vocab_size), source=SeededSource(0))


def _ranks(logits_NVd: Tensor, true_N: Tensor, draft_ids_Vd: Tensor | None) -> Tensor:
    if draft_ids_Vd is None:
        return (logits_NVd > logits_NVd.gather(1, true_N[:, None])).sum(1)
    matches_NVd = draft_ids_Vd == true_N[:, None]
    own_N = logits_NVd.masked_fill(~matches_NVd, -torch.inf).amax(1)  # -inf where it cannot be drafted
    return (logits_NVd > own_N[:, None]).sum(1)


def expected_lengths(accuracy: Sequence[Sequence[float]]) -> list[tuple[int, float, float]]:
    """(nodes, expected accepted drafts of the tree chosen by `accuracy`, and of the default tree) for several sizes.

    The default tree has no more ranks of a head than were measured.
    """
    paths = sum(accumulate((len(row) for row in accuracy), operator.mul))
    assumed = assumed_accuracy(len(accuracy), ranks=max(map(len, accuracy)))
    assumed = [default[: len(row)] for default, row in zip(assumed, accuracy, strict=True)]
    found = []
    for nodes in (size for size in SIZES if size <= paths):
        trees = (best_tree(table, nodes) for table in (accuracy, assumed))
        mine, default = (expected_length(tree, accuracy) for tree in trees)
        found.append((nodes, mine, default))
    return found

"""Is a drafter served as it was trained? The same acceptance, position by position, from both sides.

    training   all anchors at once, one forward              decoding   token by token, with its sessions, in uneven
               over the whole text                                      rounds, teacher-forced on the same text

Works for every method of the catalogue whose drafts are chains.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from outrider.data.responses import Sample
from outrider.decoding.engine import Engine, config_alone
from outrider.decoding.request import Request, RequestState, StopRules
from outrider.decoding.verification import RoundResult, Verdict
from outrider.drafters.base import Drafter, DrafterWeights, DraftModule, draft_slots
from outrider.sampling import PositionNoise, SamplingParams
from outrider.target.model import Target
from outrider.training.batches import BlockBatch, build_batch
from outrider.training.features import FeatureSource
from outrider.training.objective import BlockObjective, scatter
from tests.toys.oracle import row_of


def build(
    drafter: DraftModule, target: Target, samples: list[Sample], ids: Tensor, chosen: list[tuple[int, list[int]]]
) -> tuple[BlockBatch, BlockObjective]:
    aux_layers, scale = drafter.config.target_layer_ids, drafter.aux_scale_L
    features = FeatureSource(
        target, samples, aux_layers, scale, 2**30, dtype=torch.float32
    )  # only alignment may differ
    batch = build_batch(chosen, samples, [features[i] for i, _ in chosen], drafter.config.gamma)
    return batch, BlockObjective(target, ids, drafter.config.objective())


def check_alignment(target: Target, drafter: DraftModule, samples: list[Sample], ids: Tensor) -> int:
    """Compare acceptance at every anchor the decoding loop visits; returns how many positions were compared."""
    drafting = DrafterWeights(drafter, ids if len(ids) < target.vocab_size else None).serve(target)
    served = [serve(drafting, target, sample) for sample in samples]
    chosen = [(i, sorted(visited)) for i, visited in enumerate(served)]
    batch, compute = build(drafter, target, samples, ids, chosen)
    with torch.no_grad():
        trained_NK = scatter(compute(drafter, batch).acceptance_N, batch.supervised_NK)
    rows = iter(zip(trained_NK, batch.supervised_NK, strict=True))
    checked = 0
    for index, anchors in chosen:
        for anchor in anchors:
            trained_K, supervised_K = next(rows)
            served_K = served[index][anchor]
            compared = supervised_K & served_K.isfinite()
            torch.testing.assert_close(trained_K[compared], served_K[compared], atol=1e-4, rtol=0)
            checked += int(compared.sum())
    return checked


@torch.inference_mode()
def serve(drafter: Drafter, target: Target, sample: Sample) -> dict[int, Tensor]:
    """The decoding loop, teacher-forced on the sample: {anchor: acceptance per position}, rounds of uneven length."""
    tokens, gamma = sample.tokens, drafter.gamma
    params = SamplingParams(temperature=1.0)
    prompt = tokens[: sample.spans[0][0]]
    rules = StopRules(len(tokens) + 16 - len(prompt), stop_ids=())
    request = Request("", prompt, params, rules)
    engine = Engine(target, drafter, config=config_alone(target, request, draft_slots(drafter)))
    state = read_prompt(engine, request)
    accepting = itertools.cycle([0, 2, 1, gamma, 0, 0, 1])
    at, found = sample.spans[0][0] - 1, {}
    while at < len(tokens) - 1:
        assert state.anchor == tokens[at]
        following = tokens[at + 1 : at + 1 + gamma]
        state.noise = Forced(following, at + 1)
        step = engine.begin()
        (proposal,) = engine.draft(step)
        scores = engine.score(step, [proposal])
        (row,) = scores.rows
        matching = 0  # a token outside the draft vocabulary cannot be forced: decoding never gets past it
        found[at] = torch.full((gamma,), torch.nan)
        for k in range(len(following)):
            found[at][k] = torch.minimum(row.row(k), row_of(proposal, k)).sum()
            if proposal.tokens[k] != following[k]:
                break
            matching += 1
        accepted = min(next(accepting), matching, len(tokens) - 2 - at)
        committed = tokens[at + 1 : at + 2 + accepted]
        verdict = Verdict(list(range(accepted)), committed[-1])
        engine.commit(step, None, scores, {"": RoundResult(proposal, proposal, verdict)})
        at += len(committed)
    return found


def read_prompt(engine: Engine, request: Request) -> RequestState:
    """The state of a request whose prompt has been read, but for the anchor."""
    engine.submit(request)
    while True:
        assert not engine.step(), "only the prompt is read"
        if engine.scheduler.running[request.id].cached == len(request.prompt) - 1:
            break
    return engine._states[request.id]


class Forced(PositionNoise):
    """Noise that draws the given tokens, from `start` on: teacher forcing through the production sampling chain."""

    def __init__(self, tokens: list[int], start: int) -> None:
        self.tokens = dict(enumerate(tokens, start))

    def pick(self, probs: Tensor, position: int, ids: Tensor | None = None) -> int:
        token = self.tokens.get(position, 0)
        if ids is None:
            return token
        places = (ids == token).nonzero()
        return int(places[0]) if len(places) else 0  # what cannot be drafted cannot be forced

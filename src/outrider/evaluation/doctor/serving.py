"""Does the drafter serve as it was trained? The checks that run both ways, on the same text.

    leak       what a block computes must not change when everything after its anchor does
    served     accepted drafts of the decoding loop = agreement of the training forward, round by round
    record     the accepted length now, beside the one training wrote down
    length     acceptance by position in the conversation

Shapes: N anchors, K draft positions, S context slots, H draft hidden.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from outrider.data.samples import Sample
from outrider.decoding import StopRules, generate
from outrider.evaluation.doctor.case import Case
from outrider.evaluation.doctor.finding import Result, fault, ok, skipped, warning
from outrider.evaluation.doctor.probe import Variant
from outrider.training.features import Features

_BLOCKS = 8
_TOLERANCE = 1e-3  # of hidden states, which are normed to about 1
_GAP = 0.05  # share of the trained length
_ROUNDS = 0.1  # share of rounds that may differ (ties) before it is worth a warning
_RECORD = (0.6, 0.25)  # share of the recorded drafts (length less 1): below it a warning, a fault
_NOTHING = 1.1  # tokens a round
_FALL = 0.75
_FEWEST = 12  # anchors in a bucket
_STANDARD_ERRORS = 3.0


@torch.no_grad()
def leak(case: Case) -> Result:
    """Does a block see anything after its anchor?"""
    probe = case.probe
    sample = max(case.chosen, key=lambda s: s.num_supervised)
    every = sample.anchors
    if len(every) < 2:
        return skipped("no response is long enough to have a future")
    anchors = every[:: max(1, len(every) // _BLOCKS)]
    middle = (len(anchors) - 1) // 2
    cut = anchors[middle]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, case.target.vocab_size, (len(sample.tokens),), generator=generator).tolist()
    changed = Sample("changed", sample.tokens[: cut + 1] + noise[cut + 1 :], sample.spans)
    source = probe.source([sample, changed])
    own, future = source[0], source[1]
    taps_SLD = torch.randn(future.taps_SLD.shape, generator=generator).to(own.taps_SLD) * own.taps_SLD.std()
    future = replace(future, taps_SLD=torch.cat((future.taps_SLD[:cut], taps_SLD[cut:])))
    past = replace(own, taps_SLD=torch.cat((taps_SLD[:cut], own.taps_SLD[cut:])))

    def hidden(text: Sample, features: Features) -> Tensor:
        batch = probe.batch([(text, features, anchors)], Variant())
        return probe.objective.rows(probe.drafter, batch).hidden_NKH

    before = hidden(sample, own)
    moved = (hidden(changed, future) - before)[: middle + 1].abs().max().item()
    if not moved <= _TOLERANCE:
        return fault(
            f"hidden states of a block move by {moved:.2g} when only its future changes",
            "The block mask lets a block see tokens or features that decoding does not have yet (visibility by index "
            "instead of position is the usual cause): training looks splendid, serving does not.",
            "Restore the mask: context slots strictly before the anchor, and the block's own rows.",
        )
    used = (hidden(sample, past) - before)[middle].abs().max().item()
    if used <= _TOLERANCE:
        return warning(
            f"nothing moves with the future ({moved:.1g}), nor with the past ({used:.1g})",
            "The drafter does not use the target's features at all: it drafts from the anchor alone.",
            "Look at fc, hidden_norm and the key and value projections; train longer.",
        )
    return ok(f"{middle + 1} blocks move by {moved:.1g} with their future, by {used:.2g} with their past")


def trained_against_served(case: Case) -> Result:
    """Does decoding accept what the training forward says it will, on the text decoding itself produced?"""
    served_by = case.checkpoint.packed(case.target, calibrated=False)
    gamma = case.drafter.config.gamma
    trained, served = [], []
    for sample in case.chosen:
        prompt = sample.tokens[: sample.spans[0][0]]
        generation = generate(case.target, prompt, served_by, rules=StopRules(case.max_new_tokens))
        text = Sample(sample.id, prompt + generation.tokens, ((len(prompt), len(prompt) + len(generation.tokens)),))
        at, anchors = len(prompt) - 1, []
        for stats in generation.rounds:
            if at + gamma + 1 < len(text.tokens):  # the last rounds are cut by the end of the response
                anchors.append(at)
                served.append(stats.accepted)
            at += stats.committed
        if anchors:
            features = case.probe.source([text])[0]
            trained.append(case.probe.accept([(text, features, anchors)], Variant()).greedy_lengths_N)
    if not trained:
        return skipped("every response was too short to hold a whole block; raise --max-new-tokens")
    trained_N = torch.cat(trained)
    served_N = torch.tensor(served) + 1.0
    gap_N = trained_N - served_N
    gap, differ = gap_N.mean().item(), (gap_N.abs() > 0.5).float().mean().item()
    figure = (
        f"{trained_N.mean():.2f} tokens a round by the training forward, {served_N.mean():.2f} by decoding, over "
        f"{len(gap_N)} rounds; {differ:.0%} of them differ"
    )
    noise = _STANDARD_ERRORS * gap_N.std().item() / len(gap_N) ** 0.5 if len(gap_N) > 1 else 0.0
    meaning = (
        "The two compute the same drafter on the same text and must agree but for ties: positions, features or masks "
        "differ between training and serving."
    )
    remedy = "Compare the two paths on one block (tests/test_alignment.py does); report it if the code is unchanged."
    if abs(gap) > max(_GAP * trained_N.mean().item(), noise):
        return fault(figure, meaning, remedy)
    return warning(figure, meaning, remedy) if differ > _ROUNDS else ok(figure)


def training_record(case: Case) -> Result:
    """Does the drafter accept what its record says it accepted?"""
    now = case.probe.own.greedy_lengths_N.mean().item()
    recorded = case.checkpoint.metadata.get("held_out", {}).get("expected_length_greedy")
    remedy = "Look at the other findings first; then at target, precision and data."
    if recorded is None:
        if now >= _NOTHING:
            return ok(f"{now:.2f} tokens a round at temperature 0 on this data; no record to compare with")
        meaning = "The drafter's proposals are next to never accepted: it is untrained, or not connected as trained."
        return warning(f"{now:.2f} tokens a round at temperature 0; no record to compare with", meaning, remedy)
    figure = f"{now:.2f} tokens a round at temperature 0 on this data, {recorded:.2f} recorded on held-out data"
    level = sum(now - 1 < limit * (recorded - 1) for limit in _RECORD)
    if level == 0:
        return ok(figure)
    return (fault if level == 2 else warning)(
        figure,
        "The drafter is worth much less here than in training. Data of another kind (code beside chat, say) explains "
        "some of it; a drafter that is wired differently, or another target, the rest.",
        remedy,
    )


def context_length(case: Case) -> Result:
    """Does acceptance fall as the conversation grows?"""
    found = case.probe.own
    lengths_N, positions_N = found.lengths_N(), found.positions_N
    edges = [0, *(2**i for i in range(5, 24))]
    buckets = []
    for low, high in pairwise(edges):
        inside_N = (positions_N >= low) & (positions_N < high)
        if int(inside_N.sum()) >= _FEWEST:
            buckets.append((low, high, lengths_N[inside_N]))
    if len(buckets) < 2:
        return skipped(f"positions up to {int(positions_N.max())} are too few to compare lengths")
    figure = "tokens a round by position: " + ", ".join(f"{low}-{high}: {x.mean():.2f}" for low, high, x in buckets)
    last = buckets[-1][2]
    best = max((x for _, _, x in buckets[:-1]), key=lambda x: x.mean().item())
    error = (best.var().item() / len(best) + last.var().item() / len(last)) ** 0.5
    fall = best.mean().item() - last.mean().item()
    if last.mean() - 1 < _FALL * (best.mean() - 1) and fall > _STANDARD_ERRORS * error:
        return warning(
            figure,
            "Acceptance falls with the length of the context: a wrong RoPE base or scaling, a window too small, or "
            "training on shorter conversations than these.",
            "Compare RoPE and window with the target's; train on conversations as long as those served.",
        )
    return ok(figure)

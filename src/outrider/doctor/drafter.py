"""Doctor checks of a drafter: its files, its wiring, and whether it serves as it was trained.

Wiring: each part is replaced by what it is commonly confused with (neighbouring aux layers, another order, another mask
token, the other block layout, another RoPE base, a sorted d2t) and acceptance is measured again. A trained drafter is
best as it was trained, so a replacement that makes it clearly better shows a mistake. One that does not proves nothing
about other mistakes; the training record is compared for those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor

from outrider.data.responses import Sample
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.doctor.case import Finding, Inputs, Variant, fault, gain, graded, ok, skipped, unclear, warning
from outrider.drafters.base import check_fits
from outrider.drafters.config import mask_token_id
from outrider.target.model import Target
from outrider.training.features import Features
from outrider.utils.measure import dtype_name

_MOST_MASKS = 24
_TIE = 0.05  # tokens a round; special tokens that were never trained are embedded alike
COMMON_THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)


@dataclass(frozen=True)
class VariantComparison:
    """Acceptance of the unchanged drafter against the best of its variants.

    Args:
        level: see `gain`.
        power: None where the comparison can tell (see `Probe.can_tell`), else the finding that it cannot.
    """

    figure: str
    best: Variant
    level: int
    power: Finding | None

    def finding(self, meaning: str, remedy: str, shown: str = "") -> Finding:
        """A fault where the variant is much better, a warning where it is clearly better, else ok or unclear.

        `shown`: what stands before the figures where all is well.
        """
        if self.power is not None:
            return self.power
        if self.level == 0:
            return ok(shown + self.figure)
        margin = "By a small but clear margin: " if self.level == 1 else ""
        return graded(self.level, self.figure, margin + meaning, remedy=remedy)


def _compare(inputs: Inputs, variants: Sequence[Variant], tie: float = 0.0) -> VariantComparison:
    best, theirs = inputs.probe.best(variants, tie)
    gamma = min(inputs.drafter.config.gamma, theirs.sampled_NK.shape[1])  # layouts differ in it
    own_N, other_N = inputs.probe.own.lengths_N(gamma), theirs.lengths_N(gamma)
    figure = f"{own_N.mean():.2f} tokens a round as it is, {other_N.mean():.2f} with {best.label}"
    power = None if inputs.probe.can_tell(theirs, gamma) else unclear(own_N.mean().item(), len(own_N))
    return VariantComparison(figure, best, gain(other_N, own_N), power=power)


def aux_indices(inputs: Inputs) -> Finding:
    """Check `target_layer_ids`: acceptance with each aux layer one lower or higher."""
    last = inputs.target.num_layers - 2
    variants = []
    for step in (-1, 1):
        shifted = tuple(min(max(aux_layer + step, -1), last) for aux_layer in inputs.probe.aux_layers)
        if len(set(shifted)) == len(shifted):
            variants.append(Variant(f"aux_layers {list(shifted)}", aux_layers=shifted))
    if not variants:
        return skipped("the aux layers have no neighbours to compare with")
    found = _compare(inputs, variants)
    return found.finding(
        f"target_layer_ids {list(inputs.probe.aux_layers)} are off by one: the drafter was trained on the neighbouring "
        "layers. Conventions differ: here aux layer i is the output of decoder layer i, which transformers reports as "
        "hidden_states[i + 1].",
        f"Write {found.best.label.replace('aux_layers', 'target_layer_ids')} into the drafter's config.json.",
    )


def aux_order(inputs: Inputs) -> Finding:
    """Check the order of the aux layers: acceptance with other orders of the columns of fc."""
    aux_layers = inputs.probe.aux_layers
    if len(aux_layers) < 2:
        return skipped("one aux layer has no order")
    orders = {aux_layers[::-1], *(aux_layers[i:] + aux_layers[:i] for i in range(1, len(aux_layers)))}
    for i, j in combinations(range(len(aux_layers)), 2):
        swapped = list(aux_layers)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        orders.add(tuple(swapped))
    found = _compare(inputs, [Variant(f"order {list(o)}", aux_layers=o) for o in sorted(orders - {aux_layers})])
    return found.finding(
        f"the aux hidden states arrive in another order than in training: target_layer_ids says "
        f"{list(aux_layers)}, and each slice of fc belongs to one aux layer.",
        f"The columns of fc.weight stand in the {found.best.label}: sort them by layer, ascending, as engines do.",
    )


def mask_token(inputs: Inputs) -> Finding:
    """Check the mask token: acceptance with other tokens that could have been meant."""
    target, own = inputs.target, inputs.block_drafter.config.mask_token_id
    others = plausible_masks(target, own)
    if not others:
        return skipped("the target names no other token that could be the mask")
    found = _compare(inputs, [Variant(f"mask token {i}", {"mask_token_id": i}) for i in others], _TIE)
    right = found.best.config["mask_token_id"]
    return found.finding(
        f"mask_token_id {own}{_spelled(target, own)} is not the token the drafter was trained with; "
        f"{right}{_spelled(target, right)}, or one embedded like it, is. Every draft position but the "
        "anchor starts from the wrong embedding.",
        f"Set mask_token_id to {right} in the drafter's config.json.",
        shown=f"id {own}{_spelled(target, own)}: ",
    )


def plausible_masks(target: Target, own: int) -> list[int]:
    """Ids that could have been meant: special tokens, the one training would choose, neighbours by number."""
    ids: list[int | None] = [own - 1, own + 1, 0, *target.eos_ids]
    tokenizer = target.tokenizer
    if tokenizer is not None:
        with suppress(ValueError):  # no spare special token
            ids.insert(0, mask_token_id(target, None))
        ids += [tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
        ids += sorted(tokenizer.get_added_vocab().values())
    ids += [getattr(target.config, "pad_token_id", None), target.vocab_size - 1]
    found = dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < target.vocab_size and i != own)
    return list(found)[:_MOST_MASKS]


def _spelled(target: Target, index: int) -> str:
    return "" if target.tokenizer is None else f" ({target.tokenizer.convert_ids_to_tokens(index)!r})"


def block_layout(inputs: Inputs) -> Finding:
    """Check `sample_from_anchor` (row k predicts the next position or its own): acceptance with the other layout."""
    config = inputs.block_drafter.config
    if config.block_size < 2:
        return skipped("a block of one row has one layout")
    flipped = not config.sample_from_anchor
    found = _compare(inputs, [Variant(f"sample_from_anchor={flipped}", {"sample_from_anchor": flipped})])
    return found.finding(
        f"the block layout is wrong: sample_from_anchor={config.sample_from_anchor} reads every draft from the "
        "neighbouring row, so all positions are shifted by one.",
        f"Set sample_from_anchor to {str(flipped).lower()} in the drafter's config.json.",
    )


def rope_base(inputs: Inputs) -> Finding:
    """Check `rope_theta`: acceptance with the target's RoPE base and other common ones."""
    own = inputs.block_drafter.config.rope_theta
    theirs = target_rope(inputs.target).get("rope_theta")
    bases = [float(b) for b in dict.fromkeys([theirs, *COMMON_THETAS]) if b is not None and float(b) != own]
    found = _compare(inputs, [Variant(f"rope_theta {b:g}", {"rope_theta": b}) for b in bases])
    return found.finding(
        f"rope_theta {own:g} is not what the drafter was trained with: it looks at the wrong distances, and the more "
        "so the longer the context.",
        f"Set {found.best.label.replace(' ', ' to ')} in the drafter's config.json.",
        shown=f"rope_theta {own:g}: ",
    )


def target_rope(target: Target) -> dict[str, Any]:
    """The target's RoPE parameters; of its full-attention layers where there are several kinds."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    return dict(rope.get("full_attention", rope))


def draft_vocabulary_order(inputs: Inputs) -> Finding:
    """Check which token each row of the draft head stands for: acceptance with `d2t` in ascending order."""
    ids = inputs.checkpoint.weights.draft_ids_Vd
    if ids is None:
        return skipped("the draft vocabulary is the target's own")
    in_order = ids.sort().values
    if bool((in_order == ids).all()):
        return ok(f"{len(ids)} ids, ascending")
    found = _compare(inputs, [Variant("d2t in ascending order", draft_ids_Vd=in_order)])
    return found.finding(
        "d2t is shuffled: the rows of the draft head (markov_w2) stand for other tokens than d2t says.",
        "Store the ids in the order of the draft head's rows; Outrider writes them ascending.",
        shown=f"{len(ids)} ids, not ascending: ",
    )


# ----------------------------------------------------------------------------
# Checks of the files, without running the drafter: numbers, shapes, vocabulary, positions.
# ----------------------------------------------------------------------------


# an output head before training, and a vocabulary that is not reduced, are zero
_MAY_BE_ZERO = ("bias", "markov_w2.weight", "d2t", "t2d")
_COVERED = (0.9, 0.6)  # share of response tokens inside the draft vocabulary: below the first a warning, then a fault


def tensors(inputs: Inputs) -> Finding:
    """Check that no stored weight is zero throughout; what is not finite was refused when it was read."""
    empty = [name for name, t in inputs.stored.items() if not name.endswith(_MAY_BE_ZERO) and not t.any()]
    if empty:
        return warning(
            f"{len(empty)} tensors of zeros: {', '.join(empty[:3])}",
            "A weight that is zero throughout was never trained or never copied.",
            "Look at how the checkpoint was made; convert or train it again.",
        )
    kinds = Counter(dtype_name(t.dtype) for t in inputs.stored.values())
    size = sum(t.nbytes for t in inputs.stored.values()) / 1e6
    return ok(f"{len(inputs.stored)} tensors, {size:.1f} MB, {', '.join(sorted(kinds))}, all finite")


def fits_target(inputs: Inputs) -> Finding:
    """Check that the drafter was made for a target of these shapes and this name."""
    try:
        check_fits(inputs.drafter.config, inputs.target, inputs.drafter.reads_final_layer)
    except ValueError as error:
        return fault(
            str(error),
            "Every number in a drafter refers to its own target's layers and vocabulary.",
            "Name the right target with --target, or train a drafter for this one.",
        )
    trained_on = inputs.checkpoint.metadata.get("target")
    config = inputs.drafter.config
    layers = list(config.target_layer_ids)
    figure = f"hidden size {config.hidden_size}, {config.num_target_layers} layers, aux layers {layers}"
    if trained_on is not None and _short(trained_on) != _short(inputs.target.name):
        return warning(
            f"trained on {trained_on}, examined with {inputs.target.name}",
            "The shapes agree but the names do not. Another fine-tune of the same base lowers acceptance without any "
            "other sign.",
            "If the two are one model under two names, ignore this; else use the target it was trained on.",
        )
    return ok(figure)


def _short(name: object) -> str:
    return str(name).rstrip("/").rsplit("/", 1)[-1].casefold()


def vocabulary(inputs: Inputs) -> Finding:
    """Check that the tokenizer fits the target's vocabulary and that stop tokens can be drafted."""
    target, config = inputs.target, inputs.drafter.config
    tokenizer = target.tokenizer
    if tokenizer is not None and len(tokenizer) > target.vocab_size:
        return fault(
            f"the tokenizer has {len(tokenizer)} tokens, the target {target.vocab_size}",
            "Tokens beyond the target's embedding cannot be read: tokens were added without resizing the model.",
            "Resize the target's embeddings and train it on the new tokens, or remove them from the tokenizer.",
        )
    ids = inputs.checkpoint.weights.draft_ids_Vd
    if ids is not None:
        absent = sorted(inputs.target.eos_ids - set(ids.tolist()))
        if absent:
            return warning(
                f"stop tokens {absent} are not in the draft vocabulary",
                "The drafter can never propose the end of a response; its last blocks are always cut short.",
                "Keep stop tokens in the draft vocabulary (outrider train always does).",
            )
    return ok(f"target {target.vocab_size}, drafter {config.vocab_size}, drafts {config.draft_vocab_size} of them")


def coverage(inputs: Inputs) -> Finding:
    """Check the share of response tokens that the draft vocabulary holds."""
    if inputs.checkpoint.weights.draft_ids_Vd is None:
        return skipped("the draft vocabulary is the target's own")
    spoken = torch.tensor([t for sample in inputs.conversations for t in sample.supervised_tokens])
    share = torch.isin(spoken, inputs.draft_ids_Vd.cpu()).float().mean().item()
    figure = f"{share:.1%} of {len(spoken)} response tokens are in the draft vocabulary of {len(inputs.draft_ids_Vd)}"
    return graded(
        2 - sum(share >= limit for limit in _COVERED),
        figure,
        "A token outside the draft vocabulary ends every block it stands in: acceptance cannot exceed this share.",
        remedy="Raise drafter.draft_vocab_size, or choose the ids from text like this.",
    )


def embedding_and_head(inputs: Inputs) -> Finding:
    """Check that stored copies of embedding and head are the target's, and that these are tied as its config says."""
    target = inputs.target
    for name, own_VD in (("embed_tokens.weight", target.embed_VD), ("lm_head.weight", target.head_VD)):
        found = inputs.stored.get(name)
        if found is None:
            continue
        expected = own_VD if len(found) == len(own_VD) else own_VD[inputs.draft_ids_Vd]
        if found.shape != expected.shape or not torch.allclose(found.float(), expected.float().cpu(), atol=1e-2):
            return warning(
                f"the file's {name} {list(found.shape)} is not the target's",
                "It is served as it is, and costs memory of its own; a drafter for another target looks the same.",
                "Make sure of the target. To train on, start a new drafter: training uses the target's frozen ones.",
            )
    tied = bool(getattr(target.config, "tie_word_embeddings", False))
    same = target.embed_VD.data_ptr() == target.head_VD.data_ptr() or torch.equal(target.embed_VD, target.head_VD)
    if tied != same:
        return warning(
            f"the target's config says tie_word_embeddings={str(tied).lower()}, its tensors say otherwise",
            "A converter may have dropped or copied the head; the drafter uses what is loaded.",
            "Compare the target's output with its publisher's before training on it.",
        )
    return ok(f"the target's own, {'tied' if tied else 'apart'}")


def positions(inputs: Inputs) -> Finding:
    """Check RoPE base and scaling, the longest position and the window against target and data."""
    config, target = inputs.block_drafter.config, inputs.target
    rope = target_rope(target)
    longest = max((len(s.tokens) for s in inputs.conversations), default=0)
    kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta")
    window = config.sliding_window
    figure = f"rope_theta {config.rope_theta:g}, window {window or 'none'}, longest conversation {longest or 'unknown'}"
    if theta is not None and float(theta) != config.rope_theta:
        return warning(
            f"rope_theta is {config.rope_theta:g}, the target's {float(theta):g}",
            "A drafter trained that way is right; one whose config was edited or defaulted loses acceptance as the "
            "context grows.",
            "Compare with the config it was trained with; look at the checks of the RoPE base and of context length.",
        )
    reach = rope.get("original_max_position_embeddings")
    if kind != "default" and longest > (reach or config.max_position_embeddings):
        return warning(
            f"the target scales RoPE ({kind}), the drafter does not; the longest conversation has {longest} tokens",
            "Beyond the unscaled length the drafter's positions are ones it never trained on.",
            "Train on conversations as long as those it will serve.",
        )
    if longest > config.max_position_embeddings:
        return warning(
            f"max_position_embeddings is {config.max_position_embeddings}, the longest conversation has {longest}",
            "Engines refuse or truncate contexts beyond it.",
            "Raise max_position_embeddings if the drafter was trained on such lengths.",
        )
    if window is not None and not config.layer_types and longest > window:
        return warning(
            f"sliding_window {window}, longest conversation {longest}",
            "The drafter does not see the beginning of long contexts; text that copies from there is drafted blindly.",
            "Train with a larger window, or with none, if acceptance falls with context length.",
        )
    return ok(figure)


# ----------------------------------------------------------------------------
# Does the drafter serve as it was trained? Training forward and decoding on the same text.
#
#     leak       what a block computes must not change when everything after its anchor does
#     served     accepted drafts of the decoding loop = agreement of the training forward, round by round
#     record     the accepted length now, against the one recorded in training
#     length     acceptance by position in the conversation
#
# Shapes: N anchors, K draft positions, S context slots, H draft hidden.
# ----------------------------------------------------------------------------


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
def leak(inputs: Inputs) -> Finding:
    """Check that a block's hidden states do not change when everything after its anchor does."""
    probe = inputs.probe
    sample = max(inputs.chosen, key=lambda s: s.num_supervised)
    every = sample.anchors
    if len(every) < 2:
        return skipped("no response is long enough to have a future")
    anchors = every[:: max(1, len(every) // _BLOCKS)]
    middle = (len(anchors) - 1) // 2
    cut = anchors[middle]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, inputs.target.vocab_size, (len(sample.tokens),), generator=generator).tolist()
    changed = Sample("changed", sample.tokens[: cut + 1] + noise[cut + 1 :], sample.spans)
    source = probe.source([sample, changed])
    own, future = source[0], source[1]
    aux_SLD = torch.randn(future.aux_SLD.shape, generator=generator).to(own.aux_SLD) * own.aux_SLD.std()
    future = replace(future, aux_SLD=torch.cat((future.aux_SLD[:cut], aux_SLD[cut:])))
    past = replace(own, aux_SLD=torch.cat((aux_SLD[:cut], own.aux_SLD[cut:])))

    def hidden(text: Sample, features: Features) -> Tensor:
        batch = probe.batch([(text, features, anchors)], Variant())
        return probe.objective.rows(probe.drafter, batch).hidden_NKH

    before = hidden(sample, own)
    moved = (hidden(changed, future) - before)[: middle + 1].abs().max().item()
    if not moved <= _TOLERANCE:
        return fault(
            f"hidden states of a block move by {moved:.2g} when only its future changes",
            "The block mask lets a block see tokens or features that decoding does not have yet (visibility by index "
            "instead of position is the usual cause): acceptance is high in training and low in serving.",
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


def trained_against_served(inputs: Inputs) -> Finding:
    """Check that decoding accepts what the training forward predicts on the text that was decoded."""
    served_by = inputs.checkpoint.weights.serve(inputs.target)
    gamma = inputs.drafter.config.gamma
    trained, served = [], []
    for sample in inputs.chosen:
        prompt = sample.tokens[: sample.spans[0][0]]
        generation = generate(inputs.target, prompt, served_by, rules=StopRules(inputs.max_new_tokens))
        text = Sample(sample.id, prompt + generation.tokens, ((len(prompt), len(prompt) + len(generation.tokens)),))
        at, anchors = len(prompt) - 1, []
        for stats in generation.rounds:
            if at + gamma + 1 < len(text.tokens):  # the last rounds are cut by the end of the response
                anchors.append(at)
                served.append(stats.accepted)
            at += len(stats.tokens)
        if anchors:
            features = inputs.probe.source([text])[0]
            trained.append(inputs.probe.accept([(text, features, anchors)], Variant()).greedy_lengths_N)
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
    remedy = "Compare both on one block (tests/drafters/test_alignment.py does); report it if the code is unchanged."
    least = max(_GAP * trained_N.mean().item(), noise)
    if abs(gap) > least:
        return fault(figure, meaning, remedy)
    if differ > _ROUNDS:
        return warning(figure, meaning, remedy)
    # A drafter that is accepted by less than the gap that counts agrees with decoding whatever is wrong.
    return ok(figure) if trained_N.mean().item() - 1 > least else unclear(trained_N.mean().item(), len(gap_N))


def training_record(inputs: Inputs) -> Finding:
    """Check the accepted length against the one recorded in training."""
    lengths_N = inputs.probe.own.greedy_lengths_N
    now, error = lengths_N.mean().item(), lengths_N.std().item() / len(lengths_N) ** 0.5
    recorded = inputs.checkpoint.metadata.get("held_out", {}).get("expected_length_greedy")
    remedy = "Look at the other findings first; then at target, precision and data."
    if recorded is None:
        if now >= _NOTHING and not inputs.probe.can_tell(inputs.probe.own, inputs.drafter.config.gamma):
            return unclear(now, len(inputs.probe.own.greedy_NK))
        if now >= _NOTHING:
            return ok(f"{now:.2f} tokens a round at temperature 0 on this data; no record to compare with")
        meaning = "The drafter's proposals are next to never accepted: it is untrained, or not connected as trained."
        return warning(f"{now:.2f} tokens a round at temperature 0; no record to compare with", meaning, remedy)
    figure = f"{now:.2f} tokens a round at temperature 0 on this data, {recorded:.2f} recorded on held-out data"
    return graded(
        sum(now + _STANDARD_ERRORS * error - 1 < limit * (recorded - 1) for limit in _RECORD),
        figure,
        "The drafter is worth much less here than in training. Data of another kind (code beside chat, say) explains "
        "some of it; a drafter that is wired differently, or another target, the rest.",
        remedy=remedy,
    )


def context_length(inputs: Inputs) -> Finding:
    """Check that acceptance does not fall with the position in the conversation."""
    found = inputs.probe.own
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
    if (1 - _FALL) * (best.mean().item() - 1) < _STANDARD_ERRORS * error:  # such a fall would be noise
        return unclear(lengths_N.mean().item(), len(lengths_N))
    return ok(figure)

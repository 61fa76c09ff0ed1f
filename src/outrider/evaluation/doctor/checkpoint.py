"""What can be said of a drafter's files without running it: numbers, shapes, vocabulary, positions."""

from __future__ import annotations

from collections import Counter

import torch

from outrider.drafters.method import check_fits
from outrider.evaluation.doctor.case import Case
from outrider.evaluation.doctor.finding import Result, fault, ok, skipped, warning
from outrider.evaluation.doctor.wiring import target_rope
from outrider.target.resolve import dtype_name

# A head that training never moved; a vocabulary that is not reduced.
_MAY_BE_ZERO = ("bias", "markov_w2.weight", "d2t", "t2d")
_COVERED = (0.9, 0.6)  # share of response tokens inside the draft vocabulary: below the first a warning, then a fault


def tensors(case: Case) -> Result:
    """Are the stored weights numbers, and is any of them empty?"""
    broken = [name for name, tensor in case.stored.items() if not tensor.isfinite().all()]
    if broken:
        return fault(
            f"{len(broken)} tensors with NaN or infinity: {', '.join(broken[:3])}",
            "Training diverged or the file was damaged. One such number makes every draft worthless.",
            "Go back to an earlier checkpoint; lower the learning rate if training goes on from it.",
        )
    empty = [name for name, t in case.stored.items() if not name.endswith(_MAY_BE_ZERO) and not t.any()]
    if empty:
        return warning(
            f"{len(empty)} tensors of zeros: {', '.join(empty[:3])}",
            "A weight that is zero throughout was never trained or never copied.",
            "Look at how the checkpoint was made; convert or train it again.",
        )
    kinds = Counter(dtype_name(t.dtype) for t in case.stored.values())
    size = sum(t.nbytes for t in case.stored.values()) / 1e6
    return ok(f"{len(case.stored)} tensors, {size:.1f} MB, {', '.join(sorted(kinds))}, all finite")


def fits_target(case: Case) -> Result:
    """Was the drafter made for a target of these shapes, and of this name?"""
    try:
        check_fits(case.drafter.config, case.target, case.drafter.final_tap)
    except ValueError as error:
        return fault(
            str(error),
            "Every number in a drafter refers to its own target's layers and vocabulary.",
            "Name the right target with --target, or train a drafter for this one.",
        )
    trained_on = case.checkpoint.metadata.get("target")
    config = case.drafter.config
    figure = (
        f"hidden size {config.hidden_size}, {config.num_target_layers} layers, taps {list(config.target_layer_ids)}"
    )
    if trained_on is not None and _short(trained_on) != _short(case.target.name):
        return warning(
            f"trained on {trained_on}, examined with {case.target.name}",
            "The shapes agree but the names do not. Another fine-tune of the same base lowers acceptance without any "
            "other sign.",
            "If the two are one model under two names, ignore this; else use the target it was trained on.",
        )
    return ok(figure)


def _short(name: object) -> str:
    return str(name).rstrip("/").rsplit("/", 1)[-1].casefold()


def vocabulary(case: Case) -> Result:
    """Do tokenizer, target and drafter count the same tokens, and can the end be drafted?"""
    target, config = case.target, case.drafter.config
    tokenizer = target.tokenizer
    if tokenizer is not None and len(tokenizer) > target.vocab_size:
        return fault(
            f"the tokenizer has {len(tokenizer)} tokens, the target {target.vocab_size}",
            "Tokens beyond the target's embedding cannot be read: tokens were added without resizing the model.",
            "Resize the target's embeddings and train it on the new tokens, or remove them from the tokenizer.",
        )
    ids = case.checkpoint.draft_ids_Vd
    if ids is not None:
        absent = sorted(case.target.eos_ids - set(ids.tolist()))
        if absent:
            return warning(
                f"stop tokens {absent} are not in the draft vocabulary",
                "The drafter can never propose the end of a response; its last blocks are always cut short.",
                "Keep stop tokens in the draft vocabulary (outrider train always does).",
            )
    return ok(f"target {target.vocab_size}, drafter {config.vocab_size}, drafts {config.draft_vocab_size} of them")


def coverage(case: Case) -> Result:
    """How much of what the target says can be drafted at all?"""
    if case.checkpoint.draft_ids_Vd is None:
        return skipped("the draft vocabulary is the target's own")
    spoken = torch.tensor([t for sample in case.conversations for t in sample.supervised_tokens])
    share = torch.isin(spoken, case.draft_ids_Vd.cpu()).float().mean().item()
    figure = f"{share:.1%} of {len(spoken)} response tokens are in the draft vocabulary of {len(case.draft_ids_Vd)}"
    if share >= _COVERED[0]:
        return ok(figure)
    return (warning if share >= _COVERED[1] else fault)(
        figure,
        "A token outside the draft vocabulary ends every block it stands in: acceptance cannot exceed this share.",
        "Raise drafter.draft_vocab_size, or choose the ids from text like this.",
    )


def embedding_and_head(case: Case) -> Result:
    """Does the file bring an embedding or a head of its own, and are the target's tied as it says?"""
    target = case.target
    for name, own_VD in (("embed_tokens.weight", target.embed_VD), ("lm_head.weight", target.head_VD)):
        found = case.stored.get(name)
        if found is None:
            continue
        expected = own_VD if len(found) == len(own_VD) else own_VD[case.draft_ids_Vd]
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


def positions(case: Case) -> Result:
    """Do the drafter's positions reach as far as the target's, in the same measure?"""
    config, target = case.block_drafter.config, case.target
    rope = target_rope(target)
    longest = max((len(s.tokens) for s in case.conversations), default=0)
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

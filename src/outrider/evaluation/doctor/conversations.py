"""What can be said of the data without a model: spans, ends, repeats, and prompts that belong to an evaluation."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from outrider.data.conversations import messages_of
from outrider.evaluation.doctor.case import Case
from outrider.evaluation.doctor.finding import Result, fault, ok, skipped, warning
from outrider.evaluation.doctor.template import content, shells

_TRUNCATED = 0.9  # share of responses without an end above which a drafter sees too few ends
_REPEATED = 0.05  # share of conversations with the prompt of another
_GRAM = 8  # words
_NEAR = 0.8  # share of an evaluation prompt's word sequences found in one training prompt


def loss_mask(case: Case) -> Result:
    """Do the spans of generated tokens lie where generation can have put them?"""
    bad = []
    for sample in case.conversations:
        ends = [0, *(end for _, end in sample.spans)]
        placed = all(0 < a < b and a >= last for (a, b), last in zip(sample.spans, ends, strict=False))
        if not placed or ends[-1] > len(sample.tokens):
            bad.append(sample.id)
    if bad:
        return fault(
            f"{len(bad)} conversations with spans outside their tokens, the first {bad[0]!r}",
            "The loss would be taken at positions that the target never generated.",
            "Write the responses again; prompt and response must be the generator's own tokens.",
        )
    empty = sum(not reply.response for reply in case.replies)
    if empty:
        return warning(
            f"{empty} of {len(case.replies)} replies are empty",
            "They supervise nothing.",
            "Look at why the generator returned nothing for them.",
        )
    total = sum(len(s.tokens) for s in case.conversations)
    share = sum(s.num_supervised for s in case.conversations) / total
    return ok(f"{len(case.conversations)} conversations, {total} tokens, {share:.0%} supervised")


def ends(case: Case) -> Result:
    """Do finished responses end with a stop token of the target, and how many were cut off?"""
    stops = case.target.eos_ids
    finished = [r for r in case.replies if r.finished]
    wrong = [r.id for r in finished if not r.response or r.response[-1] not in stops]
    if wrong:
        return fault(
            f"{len(wrong)} of {len(finished)} finished responses do not end with a stop token {sorted(stops)}",
            f"The drafter never learns where a response ends (the first is {wrong[0]!r}).",
            "Keep the stop token when responses are written; take token ids from the generator rather than its text.",
        )
    cut = 1 - len(finished) / len(case.replies)
    figure = f"{cut:.0%} of {len(case.replies)} responses were cut off before their end"
    if cut > _TRUNCATED:
        return warning(
            figure,
            "The drafter sees hardly any end of a response.",
            "Raise data.max_new_tokens, unless the target never stops by itself.",
        )
    return ok(figure)


def token_ids(case: Case) -> Result:
    """Are all ids tokens of the target?"""
    outside = [r.id for r in case.replies if any(not 0 <= t < case.target.vocab_size for t in r.prompt + r.response)]
    if outside:
        return fault(
            f"{len(outside)} replies hold ids outside the target's vocabulary, the first {outside[0]!r}",
            "The data was tokenized for another model.",
            "Regenerate the responses with this target.",
        )
    return ok(f"all below {case.target.vocab_size}")


def mask_in_data(case: Case) -> Result:
    """Does the token that means 'to be drafted' occur in the text?"""
    mask = case.block_drafter.config.mask_token_id
    said = sum(mask in r.response for r in case.replies)
    read = sum(mask in r.prompt for r in case.replies)
    if said or read:
        return warning(
            f"mask token {mask} occurs in {said} responses and {read} prompts",
            "The drafter cannot tell such a token from a place to fill.",
            "Train with a mask token that text never contains (drafter.mask_token).",
        )
    return ok(f"mask token {mask} occurs nowhere")


def duplicates(case: Case) -> Result:
    """How many conversations open with the prompt of another?"""
    first = Counter(tuple(r.prompt) for r in case.replies if r.turn == 0)
    repeated = sum(first.values()) - len(first)
    share = repeated / max(1, sum(first.values()))
    figure = f"{repeated} of {sum(first.values())} conversations repeat another's prompt"
    if share <= _REPEATED:
        return ok(figure)
    return warning(
        figure,
        "Repeats weigh more than the rest, and one of them in the held-out part makes its figures too good.",
        "Remove repeated prompts before regenerating.",
    )


def contamination(case: Case) -> Result:
    """Are prompts of the evaluation set among the training prompts, word for word or nearly?"""
    tokenizer, known = case.target.tokenizer, shells(case)
    assert tokenizer is not None
    texts = [_words(content(tokenizer, r.prompt, known)) for r in case.replies if r.turn == 0]
    if not texts:
        return skipped("the data has no first turns")
    exact = {tuple(words) for words in texts}
    wanted: dict[tuple[str, ...], set[int]] = defaultdict(set)
    asked = [
        _words(" ".join(str(m.get("content") or "") for m in messages_of(prompt.turns[0])))
        for prompt in case.eval_prompts
    ]
    for number, words in enumerate(asked):
        for gram in _grams(words):
            wanted[gram].add(number)
    most: Counter[int] = Counter()
    for words in texts:
        shared = Counter(number for gram in _grams(words) for number in wanted.get(gram, ()))
        for number, count in shared.items():
            most[number] = max(most[number], count)
    found = [
        prompt.id
        for number, (prompt, words) in enumerate(zip(case.eval_prompts, asked, strict=True))
        if tuple(words) in exact or (len(words) >= _GRAM and most[number] >= _NEAR * len(_grams(words)))
    ]
    figure = f"{len(found)} of {len(asked)} evaluation prompts are in the data"
    if not found:
        return ok(figure)
    return fault(
        f"{figure}: {', '.join(found[:5])}",
        "Results on prompts that were trained on say nothing about prompts that were not.",
        "Remove them from the training prompts and train again, or evaluate on others.",
    )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _grams(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + _GRAM]) for i in range(len(words) - _GRAM + 1)}

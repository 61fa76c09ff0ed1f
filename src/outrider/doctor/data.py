"""Doctor checks of training data: chat template and thinking mode, spans, repeats, evaluation prompts, on-policy text.

    prompt = prefix + the user's words + suffix        prefix and suffix: what the chat template puts around a message

The suffix is the generation prompt, and depends on the thinking mode. A drafter trained with another template or mode
serves contexts it was not trained on: its drafts are fluent and rarely accepted. Recorded digests and flags are
compared where there are any; otherwise the template's prefix and suffix are looked for in the data.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from outrider.data.chat import Chat, render
from outrider.data.conversations import messages_of
from outrider.data.regenerate import temperature_of
from outrider.data.responses import TRUNCATED_SHARE, Reply, Sample
from outrider.doctor.case import Finding, Inputs, fault, graded, ok, skipped, warning
from outrider.target.model import Target

_MARKERS = ("<think>", "</think>", "<thinking>", "</thinking>", "<|channel|>analysis")
_LOOKED_AT = 200  # replies, evenly spread
_FEW, _MOST = 0.05, 0.95


@dataclass(frozen=True)
class TemplateTokens:
    """The tokens that the chat template puts before and after a first user message."""

    prefix: list[int]
    suffix: list[int]

    def begins(self, prompt: Sequence[int]) -> bool:
        return list(prompt[: len(self.prefix)]) == self.prefix

    def ends(self, prompt: Sequence[int]) -> bool:
        return list(prompt[len(prompt) - len(self.suffix) :]) == self.suffix


def template_tokens(tokenizer: PreTrainedTokenizerBase, thinking: bool) -> TemplateTokens:
    """The tokens around a message, found by rendering two messages without a common beginning or end."""
    first, second = (render(tokenizer, [text], [], thinking=thinking) for text in ("alpha 1", "Zulu ?"))
    return TemplateTokens(_shared_beginning(first, second), _shared_beginning(first[::-1], second[::-1])[::-1])


def _shared_beginning(first: list[int], second: list[int]) -> list[int]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


def both_modes(inputs: Inputs) -> dict[bool, TemplateTokens]:
    """The template's tokens by thinking mode, the serving mode first; empty for a base model."""
    tokenizer = inputs.tokenizer
    modes = (inputs.thinking, not inputs.thinking) if tokenizer.chat_template else ()
    return {thinking: template_tokens(tokenizer, thinking) for thinking in modes}


def content(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], known: Mapping[bool, TemplateTokens]) -> str:
    """The user's words of a first turn; the whole prompt where the template is not recognised."""
    for around in known.values():
        if around.begins(prompt) and around.ends(prompt):
            return str(tokenizer.decode(list(prompt[len(around.prefix) : len(prompt) - len(around.suffix)])))
    return str(tokenizer.decode(list(prompt), skip_special_tokens=True))


def _records(inputs: Inputs, name: str) -> dict[str, Any]:
    """A setting as the responses file and outrider.json record it, where they do."""
    trained = {} if inputs.loaded_checkpoint is None else inputs.loaded_checkpoint.metadata.get("responses", {})
    records = {"the data": inputs.settings.get(name), "the drafter": trained.get(name)}
    return {where: value for where, value in records.items() if value is not None}


def _first_turns(inputs: Inputs) -> list[Reply]:
    first = [r for r in inputs.replies if r.turn == 0]
    return first[:: max(1, len(first) // _LOOKED_AT)][:_LOOKED_AT]


def chat_template(inputs: Inputs) -> Finding:
    """Check that the prompts in the data have the shape that today's chat template gives them."""
    tokenizer = inputs.tokenizer
    now = Chat.of(inputs.target).template_sha256
    other = {w: str(v)[:12] for w, v in _records(inputs, "chat_template_sha256").items() if v != now}
    remedy = "Serve with the template of training, or regenerate the responses and train with today's."
    if other:
        recorded = " and ".join(f"{where} {digest}" for where, digest in other.items())
        return fault(
            f"the chat template is {now[:12]}; recorded by {recorded}",
            "The chat template changed since the responses were made: the drafter serves contexts it never saw.",
            remedy,
        )
    if not tokenizer.chat_template:
        return ok("no chat template, prompts are plain text")
    prompts = [r.prompt for r in _first_turns(inputs)]
    if not prompts:
        return skipped("the data has no first turns")
    known = both_modes(inputs)
    begins = _share(prompts, lambda p: any(s.begins(p) for s in known.values()))
    ends = _share(prompts, lambda p: any(s.ends(p) for s in known.values()))
    figure = f"{begins:.0%} of {len(prompts)} prompts begin and {ends:.0%} end as the template has it"
    if ends < _MOST:
        wanted = tokenizer.decode(known[inputs.thinking].suffix)
        return fault(
            figure,
            f"Prompts should end with {wanted!r} before the response begins; these were made with another template, or "
            "without its generation prompt.",
            remedy,
        )
    if begins < _MOST:
        return warning(
            figure,
            "Prompts begin otherwise: system prompts or tools of their own, a template that prints the date, or "
            "another template.",
            "If the data brings its own system prompts, ignore this; else " + remedy[0].lower() + remedy[1:],
        )
    same = _share(
        prompts,
        lambda p: any(render(tokenizer, [content(tokenizer, p, known)], [], thinking=on) == p for on in (False, True)),
    )
    if same < _MOST:
        return warning(
            f"{figure}; {same:.0%} are rendered the same again",
            "The tokenizer now splits the same text into other tokens, or the template changes what users write.",
            "Check that tokenizer and template are those of training.",
        )
    return ok(f"{figure}, {same:.0%} rendered the same again")


def thinking_mode(inputs: Inputs) -> Finding:
    """Check that the data was made in the thinking mode that the drafter is to serve in."""
    tokenizer = inputs.tokenizer
    chosen = _first_turns(inputs)
    if not chosen:
        return skipped("the data has no first turns")
    texts = [str(tokenizer.decode(r.response)) for r in chosen]
    marked = sum(any(m in text for m in _MARKERS) for text in texts) / len(texts)
    records = _records(inputs, "thinking")
    if len(set(records.values())) > 1:
        return fault(
            "; ".join(f"{where}: thinking {'on' if on else 'off'}" for where, on in records.items()),
            "The drafter was trained on responses of the other mode than these.",
            "Examine it with the data it was trained on, or train it on these.",
        )
    on = bool(next(iter(records.values()))) if records else _made_thinking(inputs, chosen)
    mode = {True: "on", False: "off", None: "not recorded"}
    modes = f"data: thinking {mode[on]}, serving: {mode[inputs.thinking]}"
    figure = f"{modes}; {marked:.0%} of responses hold thinking marks"
    if on is not None and on != inputs.thinking:
        return fault(
            figure,
            "The drafter was trained on the other mode: its responses begin differently and read differently.",
            f"Serve with thinking {mode[on]}, or regenerate the responses with it {mode[inputs.thinking]} "
            "(tell the doctor what will serve with --thinking or --no-thinking).",
        )
    if on is False and marked > _FEW:
        return fault(
            figure,
            "Responses think although the prompts ask them not to: they were not made with these prompts.",
            "Regenerate the responses from the prompts as they are rendered.",
        )
    if on is None and _FEW < marked < _MOST:
        return warning(
            figure,
            "Two modes are mixed in one file.",
            "Regenerate with one setting for all conversations.",
        )
    return ok(figure)


def _made_thinking(inputs: Inputs, chosen: Sequence[Reply]) -> bool | None:
    """The mode the data was made in, by its generation prompts; None where both modes have the same."""
    known = both_modes(inputs)
    if not known or known[False].suffix == known[True].suffix:
        return None
    prompts = [r.prompt for r in chosen]
    modes = [mode for mode, around in known.items() if _share(prompts, around.ends) > 0.5]
    return modes[0] if len(modes) == 1 else None


def _share(prompts: Sequence[list[int]], test: Any) -> float:
    return sum(bool(test(p)) for p in prompts) / len(prompts)


# ----------------------------------------------------------------------------
# Checks without a model: spans, ends, repeats, and prompts that belong to an evaluation.
# ----------------------------------------------------------------------------


_REPEATED = 0.05  # share of conversations with the prompt of another
_GRAM = 8  # words
_NEAR = 0.8  # share of an evaluation prompt's word sequences found in one training prompt


def loss_mask(inputs: Inputs) -> Finding:
    """Check that the spans of generated tokens lie inside their conversations, in order and not empty."""
    bad = []
    for sample in inputs.conversations:
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
    empty = sum(not reply.response for reply in inputs.replies)
    if empty:
        return warning(
            f"{empty} of {len(inputs.replies)} replies are empty",
            "They supervise nothing.",
            "Look at why the generator returned nothing for them.",
        )
    total = sum(len(s.tokens) for s in inputs.conversations)
    share = sum(s.num_supervised for s in inputs.conversations) / total
    return ok(f"{len(inputs.conversations)} conversations, {total} tokens, {share:.0%} supervised")


def ends(inputs: Inputs) -> Finding:
    """Check that finished responses end with a stop token of the target, and how many were cut off."""
    stops = inputs.target.eos_ids
    finished = [r for r in inputs.replies if r.finished]
    wrong = [r.id for r in finished if not r.response or r.response[-1] not in stops]
    if wrong:
        return fault(
            f"{len(wrong)} of {len(finished)} finished responses do not end with a stop token {sorted(stops)}",
            f"The drafter never learns where a response ends (the first is {wrong[0]!r}).",
            "Keep the stop token when responses are written; take token ids from the generator rather than its text.",
        )
    cut = 1 - len(finished) / len(inputs.replies)
    figure = f"{cut:.0%} of {len(inputs.replies)} responses were cut off before their end"
    if cut > TRUNCATED_SHARE:
        return warning(
            figure,
            "The drafter learns from the beginnings of responses, and how they go on and end it seldom or never sees.",
            "Raise data.max_new_tokens, unless the target never stops by itself.",
        )
    return ok(figure)


def token_ids(inputs: Inputs) -> Finding:
    """Check that all ids are tokens of the target."""
    vocab_size = inputs.target.vocab_size
    outside = [r.id for r in inputs.replies if any(not 0 <= t < vocab_size for t in r.prompt + r.response)]
    if outside:
        return fault(
            f"{len(outside)} replies hold ids outside the target's vocabulary, the first {outside[0]!r}",
            "The data was tokenized for another model.",
            "Regenerate the responses with this target.",
        )
    return ok(f"all below {vocab_size}")


def mask_in_data(inputs: Inputs) -> Finding:
    """Check that the mask token does not occur in the text."""
    mask = inputs.block_drafter.config.mask_token_id
    said = sum(mask in r.response for r in inputs.replies)
    read = sum(mask in r.prompt for r in inputs.replies)
    if said or read:
        return warning(
            f"mask token {mask} occurs in {said} responses and {read} prompts",
            "The drafter cannot tell such a token from a place to fill.",
            "Train with a mask token that text never contains (drafter.mask_token).",
        )
    return ok(f"mask token {mask} occurs nowhere")


def duplicates(inputs: Inputs) -> Finding:
    """Check how many conversations begin with the prompt of another."""
    first = Counter(tuple(r.prompt) for r in inputs.replies if r.turn == 0)
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


def contamination(inputs: Inputs) -> Finding:
    """Check that no evaluation prompt is among the training prompts, word for word or nearly."""
    tokenizer, known = inputs.tokenizer, both_modes(inputs)
    texts = [_words(content(tokenizer, r.prompt, known)) for r in inputs.replies if r.turn == 0]
    if not texts:
        return skipped("the data has no first turns")
    exact = {tuple(words) for words in texts}
    wanted: dict[tuple[str, ...], set[int]] = defaultdict(set)
    asked = [
        _words(" ".join(str(m.get("content") or "") for m in messages_of(prompt.turns[0])))
        for prompt in inputs.eval_prompts
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
        for number, (prompt, words) in enumerate(zip(inputs.eval_prompts, asked, strict=True))
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


# ----------------------------------------------------------------------------
# Is the data on-policy? Text of another origin is less likely under the target than its own samples are.
#
#     nll_T      = mean of -log p_T(x)            over response tokens, p_T the target's distribution at temperature T
#     entropy_T  = mean of the entropy of p_T     the expected nll_T of text drawn from p_T
#     agreement  = share of tokens that are the target's argmax     all of them, ties apart, at temperature 0
#
# Sampling with top-p or top-k only lowers nll_T, so the test is one-sided. It is made on all responses together, which
# shows a small shift, and on each, which shows a few foreign ones. A drafter trained on foreign text learns to continue
# what the target would not say. Shapes: R response tokens, V vocab.
# ----------------------------------------------------------------------------


_HEAD_CHUNK = 64
_GREEDY = (0.95, 0.9)  # agreement at temperature 0: below the first a warning, below the second a fault; decoding in
# bfloat16 and judging in float32 alone changes up to three in a hundred
_EXCESS = (0.1, 0.3)  # nats a token above the entropy, likewise
_FOREIGN = 0.2  # share of responses that are worse than the second limit: a fault above it, a warning below
_WORST = 3
_STANDARD_ERRORS = 4.0


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of responses under the target, per response token, judged at the temperature they were drawn at.

    A temperature of None: not recorded, drawn at 1 or below, where nll_1 <= entropy_1.
    """

    id: str
    temperature: float | None
    nll_R: torch.Tensor
    entropy_R: torch.Tensor
    agreement_R: torch.Tensor

    @staticmethod
    def joined(parts: Sequence[Likelihood], temperature: float | None = None) -> Likelihood:
        """All of them as one response."""
        names = ("nll_R", "entropy_R", "agreement_R")
        return Likelihood("all", temperature, *(torch.cat([getattr(part, name) for part in parts]) for name in names))

    @property
    def level(self) -> int:
        """0 on-policy, 1 doubtful, 2 foreign."""
        if self.temperature == 0:
            return sum(self.agreement_R.mean().item() < limit for limit in _GREEDY)
        excess_R = self.nll_R - self.entropy_R
        noise = _STANDARD_ERRORS * excess_R.std().item() / len(excess_R) ** 0.5 if len(excess_R) > 1 else float("inf")
        return sum(excess_R.mean().item() > max(limit, noise) for limit in _EXCESS)


@torch.inference_mode()
def likelihood(target: Target, sample: Sample, temperature: float | None) -> Likelihood:
    """Likelihood of a sample's responses under the target; at 1 where the temperature is 0 or None."""
    tokens = torch.tensor([sample.tokens[:-1]], device=target.device)
    output = target.forward(tokens, target.new_cache(tokens.shape[1]), logits=0)
    hidden_RD = output.hidden_BTD[0, sample.anchors]
    said_R = torch.tensor(sample.supervised_tokens, device=target.device)
    nll, entropy, agreement = [], [], []
    for rows, said in zip(hidden_RD.split(_HEAD_CHUNK), said_R.split(_HEAD_CHUNK), strict=True):
        logits = target.logits(rows).float()
        log_p = (logits / (temperature or 1.0)).log_softmax(-1)
        nll.append(-log_p.gather(1, said[:, None])[:, 0])
        entropy.append(-(log_p.exp() * log_p).sum(-1))
        agreement.append((logits.argmax(-1) == said).float())
    of_R = {"nll_R": torch.cat(nll), "entropy_R": torch.cat(entropy), "agreement_R": torch.cat(agreement)}
    return Likelihood(sample.id, temperature, **of_R)


def _listed(temperatures: Iterable[float]) -> str:
    return " and ".join(f"{temperature:g}" for temperature in sorted(set(temperatures)))


def on_policy(inputs: Inputs) -> Finding:
    """Check that the responses are as likely under the target as its own samples are."""
    recorded: float | list[float] | None = inputs.settings.get("temperature")
    drawn_at = [None if recorded is None else temperature_of(sample.id, recorded) for sample in inputs.chosen]
    found = [likelihood(inputs.target, sample, own) for sample, own in zip(inputs.chosen, drawn_at, strict=True)]
    whole = Likelihood.joined(found)
    judged_at = _listed(own or 1.0 for own in drawn_at)
    figure = (
        f"{whole.agreement_R.mean():.1%} of {len(whole.nll_R)} tokens are the target's first choice; "
        f"{whole.nll_R.mean():.2f} nats a token, {whole.entropy_R.mean():.2f} expected at temperature {judged_at}"
    )
    foreign = sum(f.level == 2 for f in found)
    alike = [Likelihood.joined([f for f in found if f.temperature == own], own) for own in set(drawn_at)]
    level = max(*(some.level for some in alike), (foreign > 0) + (foreign > _FOREIGN * len(found)))
    worst = sorted(found, key=lambda f: (f.nll_R - f.entropy_R).mean().item(), reverse=True)[:_WORST]
    names = "; ".join(f"{f.id}: {f.agreement_R.mean():.0%}, {f.nll_R.mean():.2f} nats" for f in worst)
    figure += f"; {foreign} of {len(found)} responses are foreign" if level else ""
    drawn = "any temperature up to 1" if recorded is None else f"temperature {_listed(own or 0.0 for own in drawn_at)}"
    return graded(
        level,
        figure,
        f"The responses are not what this target says at {drawn}: another model, a person, another template or another "
        f"precision wrote them. Worst: {names}.",
        remedy="Regenerate the responses with this target (outrider train does when data.responses names a new file).",
    )

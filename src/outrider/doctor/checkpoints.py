"""The doctor of a drafter, its target and its data: what is examined, measurements, and rules at the end of this file.

    files     tensors, shapes, vocabulary, positions
    data      chat template and thinking mode, spans, repeats, evaluation prompts, likelihood under the target
    wiring    acceptance with each part replaced by what it is commonly taken for (probe.py)
    serving   acceptance by decoding against that of the training forward, and against the training record

Shapes: N anchors, K draft positions, R response tokens, S context slots, V vocab, Vd draft vocab, H draft hidden.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint
from outrider.checkpoints.dialects.base import UnknownDepth
from outrider.data.chat import Chat, render
from outrider.data.conversations import Conversation, messages_of
from outrider.data.regenerate import temperature_of
from outrider.data.responses import TRUNCATED_SHARE, Reply, Sample, join_turns, read_responses
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.doctor.evidence import Check, Finding, NotMeasured, always, graded
from outrider.doctor.probe import (
    Probe,
    Variant,
    draft_ids,
    gain,
    neighbouring_layers,
    other_bases,
    other_masks,
    other_orders,
    target_rope,
)
from outrider.drafters.base import DraftModule
from outrider.target.model import Target
from outrider.training.features import Features
from outrider.utils.files import read_weights
from outrider.utils.measure import dtype_name


@dataclass
class Inputs:
    """The target, drafter and data under examination, each of which may be absent.

    Args:
        stored: tensors of the drafter's files, as on disk.
        settings: of the responses file.
        thinking: the mode the drafter is to serve in.
        samples: conversations that are run through the models.
        max_new_tokens: length of the responses that are decoded.
    """

    loaded_target: Target | None = None
    loaded_checkpoint: Checkpoint | None = None
    stored: dict[str, Tensor] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    eval_prompts: list[Conversation] = field(default_factory=list)
    thinking: bool = False
    samples: int = 8
    max_new_tokens: int = 48

    @property
    def target(self) -> Target:
        assert self.loaded_target is not None
        return self.loaded_target

    @property
    def checkpoint(self) -> Checkpoint:
        assert self.loaded_checkpoint is not None
        return self.loaded_checkpoint

    @property
    def drafter(self) -> DraftModule:
        return self.checkpoint.weights.module

    @property
    def block_config(self) -> Any:
        """The config of a block drafter, for checks of blocks, mask tokens and positions."""
        backbone = self.drafter.block_backbone()
        assert backbone is not None
        return backbone.config

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        assert self.target.tokenizer is not None
        return self.target.tokenizer

    @cached_property
    def draft_ids_Vd(self) -> Tensor:
        """Target ids of the draft vocabulary; all ids if it is not reduced."""
        return draft_ids(self.checkpoint.weights)

    @cached_property
    def conversations(self) -> list[Sample]:
        return join_turns(self.replies)

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation; 0 without data."""
        return max((len(s.tokens) for s in self.conversations), default=0)

    @property
    def first_turns(self) -> list[Reply]:
        """Up to 200 first replies, evenly spread."""
        first = [r for r in self.replies if r.turn == 0]
        if not first:
            raise NotMeasured("the data has no first turns")
        return first[:: max(1, len(first) // _LOOKED_AT)][:_LOOKED_AT]

    @cached_property
    def chosen(self) -> list[Sample]:
        """The samples that are run through the models: the longest, and others evenly spread over the file."""
        fits = [
            s
            for s in self.conversations
            if len(s.tokens) <= self.target.max_context and max(s.tokens) < self.target.vocab_size
        ]
        longest = max(fits, key=lambda s: len(s.tokens), default=None)
        if longest is None:
            raise ValueError("no conversation of the data fits the target's vocabulary and context.")
        rest = [s for s in fits if s is not longest]
        count = min(self.samples - 1, len(rest))
        return [longest, *(rest[i * len(rest) // count] for i in range(count))]

    @cached_property
    def probe(self) -> Probe:
        return Probe(self.target, self.checkpoint.weights, self.chosen)

    def recorded(self, name: str) -> dict[str, Any]:
        """A setting as the responses file and outrider.json record it, if they do."""
        trained = {} if self.loaded_checkpoint is None else self.loaded_checkpoint.metadata.get("responses", {})
        records = {"the data": self.settings.get(name), "the drafter": trained.get(name)}
        return {source: value for source, value in records.items() if value is not None}

    def missing(self, need: str) -> str | None:
        """The reason why `need` is not met; None if it is."""
        if need == "working":
            return self._unusable
        if need == "block":
            blocks = self.drafter.block_backbone() is not None
            return None if blocks else f"nothing to check in {self.drafter.algorithm} drafters"
        data = (bool(self.replies), "no data was given (--data), or it could not be read")
        target, drafter = self.loaded_target, self.loaded_checkpoint
        given, reason = {
            "target": (target is not None, "no target was given (--target)"),
            "tokenizer": (target is not None and target.tokenizer is not None, "no tokenizer was given"),
            "drafter": (drafter is not None, "no drafter was given (--drafter), or it could not be read"),
            "data": data,
            "samples": data,
            "eval": (bool(self.eval_prompts), "no evaluation prompts were given (--eval)"),
        }[need]
        return None if given else reason

    @cached_property
    def _unusable(self) -> str | None:
        try:
            self.drafter.check_target(self.target)
        except ValueError:
            return "the drafter does not fit the target"
        if not getattr(self.drafter.config, "plain_logits", True):
            return "its logits are multiplied or capped, which training here does not know"
        return None


def read_drafter(inputs: Inputs, directory: Path, device: str = "cpu") -> Finding | None:
    """Read a drafter into `inputs`; a finding if it cannot be read.

    Raises:
        UnknownDepth: it does not say how deep its target is, and no target was given.
    """
    try:
        depth = None if inputs.loaded_target is None else inputs.loaded_target.num_layers
        inputs.loaded_checkpoint = load_checkpoint(directory, device, depth)
        inputs.stored = read_weights(directory)
    except UnknownDepth:
        raise
    except (ValueError, KeyError, OSError) as error:
        meaning = "No engine that checks what it loads will serve it."
        remedy = "Save the drafter again with the tool that trained it, or correct the named field of its config.json."
        return Finding("fault", str(error), meaning, remedy=remedy, group="checkpoint", check="readable")
    return None


def read_data(inputs: Inputs, path: Path) -> Finding | None:
    """Read a responses file into `inputs`; a finding if it cannot be read."""
    unread = partial(Finding, "fault", group="data", check="readable")
    try:
        inputs.settings, inputs.replies = read_responses(path)
    except (ValueError, OSError) as error:
        remedy = "Give the responses file that `outrider prepare` or `outrider train` wrote."
        return unread(figure=str(error), meaning="Training would stop at the same place.", remedy=remedy)
    if not inputs.replies:
        meaning = "There is nothing to train on, and nothing to check a drafter with."
        return unread(figure="no responses in the file", meaning=meaning, remedy="Look at what prepare reported.")
    return None


# ----------------------------------------------------------------------------
# Files, without running the drafter: numbers, shapes, vocabulary, positions.
# ----------------------------------------------------------------------------

# an output head before training, and a vocabulary that is not reduced, are zero
_MAY_BE_ZERO = ("bias", "markov_w2.weight", "d2t", "t2d")
_COVERED = (0.9, 0.6)  # share of response tokens inside the draft vocabulary: below the first a warning, then a fault


def tensors(inputs: Inputs) -> SimpleNamespace:
    """Stored weights that are zero throughout; a weight that is not finite was refused when it was read."""
    stored = inputs.stored
    empty = [name for name, t in stored.items() if not name.endswith(_MAY_BE_ZERO) and not t.any()]
    size, names = sum(t.nbytes for t in stored.values()) / 1e6, ", ".join(empty[:3])
    dtypes = ", ".join(sorted({dtype_name(t.dtype) for t in stored.values()}))
    return SimpleNamespace(empty=len(empty), names=names, count=len(stored), size=size, dtypes=dtypes)


def fits_target(inputs: Inputs) -> SimpleNamespace:
    """Whether the drafter was made for a target of these shapes and this name."""
    config, error = inputs.drafter.config, ""
    try:
        inputs.drafter.check_target(inputs.target)
    except ValueError as refused:
        error = str(refused)
    trained_on, name = inputs.checkpoint.metadata.get("target"), inputs.target.name
    short = [str(n).rstrip("/").rsplit("/", 1)[-1].casefold() for n in (trained_on, name)]
    renamed = trained_on is not None and short[0] != short[1]
    layers = list(config.target_layer_ids)
    return SimpleNamespace(error=error, renamed=renamed, trained_on=trained_on, name=name, config=config, layers=layers)


def vocabulary(inputs: Inputs) -> SimpleNamespace:
    """Whether the tokenizer fits the target's vocabulary, and stop tokens can be drafted."""
    target, ids = inputs.target, inputs.checkpoint.weights.draft_ids_Vd
    tokens = 0 if target.tokenizer is None else len(target.tokenizer)
    absent = [] if ids is None else sorted(target.eos_ids - set(ids.tolist()))
    return SimpleNamespace(tokens=tokens, vocab=target.vocab_size, absent=absent, config=inputs.drafter.config)


def embedding_and_head(inputs: Inputs) -> SimpleNamespace:
    """Whether stored copies of embedding and head are the target's, and these are tied as its config says."""
    target, foreign = inputs.target, ""
    for name, own_VD in (("embed_tokens.weight", target.embed_VD), ("lm_head.weight", target.head_VD)):
        stored = inputs.stored.get(name)
        if stored is None or foreign:
            continue
        expected = own_VD if len(stored) == len(own_VD) else own_VD[inputs.draft_ids_Vd]
        if stored.shape != expected.shape or not torch.allclose(stored.float(), expected.float().cpu(), atol=1e-2):
            foreign = f"{name} {list(stored.shape)}"
    tied = bool(getattr(target.config, "tie_word_embeddings", False))
    same = target.embed_VD.data_ptr() == target.head_VD.data_ptr() or torch.equal(target.embed_VD, target.head_VD)
    return SimpleNamespace(foreign=foreign, tied=tied, same=same, kind="tied" if tied else "apart")


def positions(inputs: Inputs) -> SimpleNamespace:
    """RoPE base and scaling, the longest position and the window, against target and data."""
    config, rope, longest = inputs.block_config, target_rope(inputs.target), inputs.longest
    theta, window = rope.get("rope_theta"), config.sliding_window
    m = SimpleNamespace(window=window or "none", longest=longest, shown=longest or "unknown")
    m.own, m.theirs = config.rope_theta, config.rope_theta if theta is None else float(theta)
    m.scaling, m.most = rope.get("rope_type", "default"), config.max_position_embeddings
    m.drops_scaling = m.scaling != "default" and config.rope_scaling is None
    m.unscaled = rope.get("original_max_position_embeddings") or m.most
    m.outside = window is not None and not config.layer_types and longest > window
    return m


# ----------------------------------------------------------------------------
# Data without a model: spans, ends, repeats, and prompts that belong to an evaluation.
#
#     prompt = prefix + the user's words + suffix        prefix and suffix: what the chat template puts around a message
#
# The suffix is the generation prompt, and depends on the thinking mode. A drafter trained with another template or mode
# serves contexts it was not trained on: its drafts are fluent and rarely accepted. Recorded digests and flags are
# compared if there are any; otherwise the template's prefix and suffix are looked for in the data.
# ----------------------------------------------------------------------------

_MARKERS = ("<think>", "</think>", "<thinking>", "</thinking>", "<|channel|>analysis")
_LOOKED_AT = 200  # replies, evenly spread
_FEW, _MOST = 0.05, 0.95
_REPEATED = 0.05  # share of conversations with the prompt of another
_GRAM = 8  # words
_NEAR = 0.8  # share of an evaluation prompt's word sequences in one training prompt


def loss_mask(inputs: Inputs) -> SimpleNamespace:
    """Whether the spans of generated tokens lie inside their conversations, in order and not empty."""
    bad = []
    for sample in inputs.conversations:
        ends = [0, *(end for _, end in sample.spans)]
        placed = all(0 < a < b and a >= last for (a, b), last in zip(sample.spans, ends, strict=False))
        if not placed or ends[-1] > len(sample.tokens):
            bad.append(sample.id)
    total = sum(len(s.tokens) for s in inputs.conversations)
    m = SimpleNamespace(bad=bad, count=len(bad), conversations=len(inputs.conversations), total=total)
    m.empty, m.replies = sum(not reply.response for reply in inputs.replies), len(inputs.replies)
    m.share = sum(s.num_supervised for s in inputs.conversations) / max(1, total)
    return m


def token_ids(inputs: Inputs) -> SimpleNamespace:
    """Replies with ids that are no tokens of the target."""
    vocab = inputs.target.vocab_size
    outside = [r.id for r in inputs.replies if any(not 0 <= t < vocab for t in r.prompt + r.response)]
    return SimpleNamespace(vocab=vocab, outside=outside, count=len(outside))


def response_ends(inputs: Inputs) -> SimpleNamespace:
    """Finished responses without a stop token of the target, and the share that was cut off."""
    stops, finished = inputs.target.eos_ids, [r for r in inputs.replies if r.finished]
    wrong = [r.id for r in finished if not r.response or r.response[-1] not in stops]
    m = SimpleNamespace(wrong=wrong, count=len(wrong), finished=len(finished), stops=sorted(stops))
    m.replies, m.cut = len(inputs.replies), 1 - len(finished) / len(inputs.replies)
    return m


def mask_in_text(inputs: Inputs) -> SimpleNamespace:
    """How often the mask token occurs in the text."""
    mask = inputs.block_config.mask_token_id
    responses, prompts = (sum(mask in getattr(r, name) for r in inputs.replies) for name in ("response", "prompt"))
    return SimpleNamespace(mask=mask, responses=responses, prompts=prompts)


def repeats(inputs: Inputs) -> SimpleNamespace:
    """How many conversations begin with the prompt of another."""
    first = Counter(tuple(r.prompt) for r in inputs.replies if r.turn == 0)
    total = sum(first.values())
    figure = f"{total - len(first)} of {total} conversations repeat another's prompt"
    return SimpleNamespace(share=(total - len(first)) / max(1, total), figure=figure)


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


def _both_modes(inputs: Inputs) -> dict[bool, TemplateTokens]:
    """The template's tokens by thinking mode, the serving mode first; empty for a base model."""
    modes = (inputs.thinking, not inputs.thinking) if inputs.tokenizer.chat_template else ()
    return {thinking: template_tokens(inputs.tokenizer, thinking) for thinking in modes}


def _content(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], modes: Mapping[bool, TemplateTokens]) -> str:
    """The user's words of a first turn; the whole prompt if the template is not recognised."""
    for around in modes.values():
        if around.begins(prompt) and around.ends(prompt):
            return str(tokenizer.decode(list(prompt[len(around.prefix) : len(prompt) - len(around.suffix)])))
    return str(tokenizer.decode(list(prompt), skip_special_tokens=True))


def _share(prompts: Sequence[list[int]], test: Callable[[list[int]], bool]) -> float:
    return sum(bool(test(p)) for p in prompts) / len(prompts)


def chat_template(inputs: Inputs) -> SimpleNamespace:
    """Whether the prompts in the data have the shape that today's chat template gives them."""
    tokenizer, now = inputs.tokenizer, Chat.of(inputs.target).template_sha256
    other = {name: str(v)[:12] for name, v in inputs.recorded("chat_template_sha256").items() if v != now}
    recorded = " and ".join(f"{name} {digest}" for name, digest in other.items())
    m = SimpleNamespace(now=str(now)[:12], recorded=recorded, plain=not tokenizer.chat_template)
    if recorded or m.plain:
        return m
    prompts, modes = [r.prompt for r in inputs.first_turns], _both_modes(inputs)

    def unchanged(prompt: list[int]) -> bool:
        content = _content(tokenizer, prompt, modes)
        return any(render(tokenizer, [content], [], thinking=on) == prompt for on in (False, True))

    m.begins = _share(prompts, lambda p: any(around.begins(p) for around in modes.values()))
    m.ends = _share(prompts, lambda p: any(around.ends(p) for around in modes.values()))
    m.same = _share(prompts, unchanged)
    m.suffix = tokenizer.decode(modes[inputs.thinking].suffix)
    m.figure = f"{m.begins:.0%} of {len(prompts)} prompts begin and {m.ends:.0%} end as the template has it"
    return m


def thinking_mode(inputs: Inputs) -> SimpleNamespace:
    """Whether the data was made in the thinking mode that the drafter is to serve in."""
    first = inputs.first_turns
    texts = [str(inputs.tokenizer.decode(r.response)) for r in first]
    marked = sum(any(m in text for m in _MARKERS) for text in texts) / len(texts)
    records = inputs.recorded("thinking")
    on = bool(next(iter(records.values()))) if records else _made_thinking(inputs, first)
    mode = {True: "on", False: "off", None: "not recorded"}
    m = SimpleNamespace(on=on, marked=marked, data=mode[on], serving=mode[inputs.thinking])
    m.unlike, m.other = len(set(records.values())) > 1, on is not None and on != inputs.thinking
    m.records = "; ".join(f"{source}: thinking {mode[bool(value)]}" for source, value in records.items())
    m.figure = f"data: thinking {m.data}, serving: {m.serving}; {marked:.0%} of responses hold thinking marks"
    return m


def _made_thinking(inputs: Inputs, replies: Sequence[Reply]) -> bool | None:
    """The mode the data was made in, by its generation prompts; None if both modes have the same."""
    known = _both_modes(inputs)
    if not known or known[False].suffix == known[True].suffix:
        return None
    modes = [mode for mode, around in known.items() if _share([r.prompt for r in replies], around.ends) > 0.5]
    return modes[0] if len(modes) == 1 else None


def contamination(inputs: Inputs) -> SimpleNamespace:
    """Evaluation prompts that are among the training prompts, word for word or nearly."""
    modes = _both_modes(inputs)
    texts = [_words(_content(inputs.tokenizer, r.prompt, modes)) for r in inputs.replies if r.turn == 0]
    if not texts:
        raise NotMeasured("the data has no first turns")
    exact = {tuple(words) for words in texts}
    by_gram: dict[tuple[str, ...], set[int]] = defaultdict(set)
    asked = [messages_of(prompt.turns[0]) for prompt in inputs.eval_prompts]
    questions = [_words(" ".join(str(m.get("content") or "") for m in messages)) for messages in asked]
    for number, words in enumerate(questions):
        for gram in _grams(words):
            by_gram[gram].add(number)
    shared: Counter[int] = Counter()  # with the training prompt that shares most
    for words in texts:
        for number, count in Counter(n for gram in _grams(words) for n in by_gram.get(gram, ())).items():
            shared[number] = max(shared[number], count)
    known = [
        prompt.id
        for number, (prompt, words) in enumerate(zip(inputs.eval_prompts, questions, strict=True))
        if tuple(words) in exact or (len(words) >= _GRAM and shared[number] >= _NEAR * len(_grams(words)))
    ]
    figure = f"{len(known)} of {len(questions)} evaluation prompts are in the data"
    return SimpleNamespace(known=known, names=", ".join(known[:5]), figure=figure)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _grams(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + _GRAM]) for i in range(len(words) - _GRAM + 1)}


def coverage(inputs: Inputs) -> SimpleNamespace:
    """Share of response tokens that the draft vocabulary holds."""
    if inputs.checkpoint.weights.draft_ids_Vd is None:
        raise NotMeasured("the draft vocabulary is the target's own")
    tokens = torch.tensor([t for sample in inputs.conversations for t in sample.supervised_tokens])
    share = torch.isin(tokens, inputs.draft_ids_Vd.cpu()).float().mean().item()
    figure = f"{share:.1%} of {len(tokens)} response tokens are in the draft vocabulary of {len(inputs.draft_ids_Vd)}"
    return SimpleNamespace(level=2 - sum(share >= limit for limit in _COVERED), figure=figure)


# ----------------------------------------------------------------------------
# Is the data on-policy? Text of another origin is less likely under the target than its own samples are.
#
#     nll_T      = mean of -log p_T(x)            over response tokens, p_T the target's distribution at temperature T
#     entropy_T  = mean of the entropy of p_T     the expected nll_T of text drawn from p_T
#     agreement  = share of tokens that are the target's argmax     all of them, ties apart, at temperature 0
#
# Sampling with top-p or top-k only lowers nll_T, so the test is one-sided. It is made on all responses together, which
# shows a small shift, and on each, which shows a few foreign ones.
# ----------------------------------------------------------------------------

_HEAD_CHUNK = 64
_GREEDY = (0.95, 0.9)  # agreement at temperature 0: below the first a warning, below the second a fault; decoding in
# bfloat16 and judging in float32 alone changes up to three in a hundred
_EXCESS = (0.1, 0.3)  # nats a token above the entropy, likewise
_FOREIGN = 0.2  # share of responses that are worse than the second limit: a fault above it, a warning below
_WORST = 3


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
        noise = 4.0 * excess_R.std().item() / len(excess_R) ** 0.5 if len(excess_R) > 1 else float("inf")
        return sum(excess_R.mean().item() > max(limit, noise) for limit in _EXCESS)


@torch.inference_mode()
def likelihood(target: Target, sample: Sample, temperature: float | None) -> Likelihood:
    """Likelihood of a sample's responses under the target; at 1 if the temperature is 0 or None."""
    tokens = torch.tensor([sample.tokens[:-1]], device=target.device)
    output = target.forward(tokens, target.new_cache(tokens.shape[1]), logits=0)
    hidden_RD = output.hidden_BTD[0, sample.anchors]
    tokens_R = torch.tensor(sample.supervised_tokens, device=target.device)
    nll, entropy, agreement = [], [], []
    for hidden_CD, tokens_C in zip(hidden_RD.split(_HEAD_CHUNK), tokens_R.split(_HEAD_CHUNK), strict=True):
        logits = target.logits(hidden_CD).float()
        log_p = (logits / (temperature or 1.0)).log_softmax(-1)
        nll.append(-log_p.gather(1, tokens_C[:, None])[:, 0])
        entropy.append(-(log_p.exp() * log_p).sum(-1))
        agreement.append((logits.argmax(-1) == tokens_C).float())
    parts_R = {"nll_R": torch.cat(nll), "entropy_R": torch.cat(entropy), "agreement_R": torch.cat(agreement)}
    return Likelihood(sample.id, temperature, **parts_R)


def on_policy(inputs: Inputs) -> SimpleNamespace:
    """Whether the responses are as likely under the target as its own samples are."""
    recorded: float | list[float] | None = inputs.settings.get("temperature")
    drawn_at = [None if recorded is None else temperature_of(sample.id, recorded) for sample in inputs.chosen]
    each = [likelihood(inputs.target, sample, T) for sample, T in zip(inputs.chosen, drawn_at, strict=True)]
    whole, foreign = Likelihood.joined(each), sum(one.level == 2 for one in each)
    alike = [Likelihood.joined([one for one in each if one.temperature == T], T) for T in set(drawn_at)]
    level = max(*(some.level for some in alike), (foreign > 0) + (foreign > _FOREIGN * len(each)))
    worst = sorted(each, key=lambda one: (one.nll_R - one.entropy_R).mean().item(), reverse=True)[:_WORST]
    names = "; ".join(f"{one.id}: {one.agreement_R.mean():.0%}, {one.nll_R.mean():.2f} nats" for one in worst)
    figure = (
        f"{whole.agreement_R.mean():.1%} of {len(whole.nll_R)} tokens are the target's first choice; "
        f"{whole.nll_R.mean():.2f} nats a token, {whole.entropy_R.mean():.2f} expected at temperature "
        f"{_listed(T or 1.0 for T in drawn_at)}"
    )
    figure += f"; {foreign} of {len(each)} responses are foreign" if level else ""
    drawn = "any temperature up to 1" if recorded is None else f"temperature {_listed(T or 0.0 for T in drawn_at)}"
    return SimpleNamespace(level=level, figure=figure, drawn=drawn, worst=names)


def _listed(temperatures: Iterable[float]) -> str:
    return " and ".join(f"{temperature:g}" for temperature in sorted(set(temperatures)))


# ----------------------------------------------------------------------------
# Wiring: acceptance with a part replaced by what it is commonly taken for. A replacement that accepts clearly more
# shows a mistake. One that does not proves nothing about other mistakes; the training record is compared for those.
# ----------------------------------------------------------------------------

_TIE = 0.05  # tokens a round; special tokens that were never trained are embedded alike


def _compare(inputs: Inputs, variants: Sequence[Variant], own: object, tie: float = 0.0) -> SimpleNamespace:
    """The unchanged drafter, whose part is `own`, against the best of its variants."""
    best, theirs = inputs.probe.best(variants, tie)
    gamma = min(inputs.drafter.config.gamma, theirs.sampled_NK.shape[1])  # layouts differ in it
    own_N, other_N = inputs.probe.own.lengths_N(gamma), theirs.lengths_N(gamma)
    m = SimpleNamespace(own=own, best=best, length=own_N.mean().item(), positions=len(own_N))
    m.value = next(iter(best.config.values()), list(best.aux_layers or ()))
    m.level, m.unclear = gain(other_N, own_N), not inputs.probe.can_tell(theirs, gamma)
    m.figure = f"{own_N.mean():.2f} tokens a round as it is, {other_N.mean():.2f} with {best.label}"
    return m


def aux_indices(inputs: Inputs) -> SimpleNamespace:
    """Acceptance with each aux layer one lower or higher."""
    layers = inputs.probe.aux_layers
    if not (moved := neighbouring_layers(layers, inputs.target)):
        raise NotMeasured("the aux layers have no neighbours to compare with")
    return _compare(inputs, moved, own=list(layers))


def aux_order(inputs: Inputs) -> SimpleNamespace:
    """Acceptance with other orders of the columns of fc."""
    layers = inputs.probe.aux_layers
    if len(layers) < 2:
        raise NotMeasured("one aux layer has no order")
    return _compare(inputs, other_orders(layers), own=list(layers))


def mask_token(inputs: Inputs) -> SimpleNamespace:
    """Acceptance with other mask tokens that could have been meant."""
    target, mask = inputs.target, inputs.block_config.mask_token_id
    others = other_masks(target, mask)
    if not others:
        raise NotMeasured("the target names no other token that could be the mask")

    def spelled(index: int) -> str:
        return "" if target.tokenizer is None else f" ({target.tokenizer.convert_ids_to_tokens(index)!r})"

    m = _compare(inputs, others, own=f"{mask}{spelled(mask)}", tie=_TIE)
    m.right = f"{m.value}{spelled(m.value)}"
    return m


def block_layout(inputs: Inputs) -> SimpleNamespace:
    """Acceptance with the other layout: row k of a block predicts the next position, or its own."""
    config = inputs.block_config
    if config.block_size < 2:
        raise NotMeasured("a block of one row has one layout")
    flipped = not config.sample_from_anchor
    variant = Variant(f"sample_from_anchor={flipped}", {"sample_from_anchor": flipped})
    m = _compare(inputs, [variant], own=config.sample_from_anchor)
    m.value = str(flipped).lower()
    return m


def rope_base(inputs: Inputs) -> SimpleNamespace:
    """Acceptance with the target's RoPE base and other common ones."""
    base = inputs.block_config.rope_theta
    return _compare(inputs, other_bases(inputs.target, base), own=base)


def vocabulary_order(inputs: Inputs) -> SimpleNamespace:
    """Acceptance with `d2t` in ascending order: which token each row of the draft head stands for."""
    ids = inputs.checkpoint.weights.draft_ids_Vd
    if ids is None:
        raise NotMeasured("the draft vocabulary is the target's own")
    in_order = ids.sort().values
    if bool((in_order == ids).all()):
        return SimpleNamespace(ascending=True, own=len(ids))
    m = _compare(inputs, [Variant("d2t in ascending order", draft_ids_Vd=in_order)], own=len(ids))
    m.ascending = False
    return m


# ----------------------------------------------------------------------------
# Does the drafter serve as it was trained? Training forward and decoding on the same text.
#
#     leak       what a block computes must not change when everything after its anchor does
#     served     accepted drafts of the decoding loop = agreement of the training forward, round by round
#     record     the accepted length now, against the one recorded in training
#     length     acceptance by position in the conversation
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
def leak(inputs: Inputs) -> SimpleNamespace:
    """By how much a block's hidden states move when everything after its anchor changes, or everything before it."""
    probe = inputs.probe
    sample = max(inputs.chosen, key=lambda s: s.num_supervised)
    if len(sample.anchors) < 2:
        raise NotMeasured("no response is long enough to have a future")
    anchors = sample.anchors[:: max(1, len(sample.anchors) // _BLOCKS)]
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
    used = (hidden(sample, past) - before)[middle].abs().max().item()
    return SimpleNamespace(moved=moved, used=used, blocks=middle + 1)


def trained_and_served(inputs: Inputs) -> SimpleNamespace:
    """Whether decoding accepts as many drafts as the training forward predicts on the text that was decoded."""
    served_by, gamma = inputs.checkpoint.weights.serve(inputs.target), inputs.drafter.config.gamma
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
        raise NotMeasured("every response was too short to hold a whole block; raise --max-new-tokens")
    trained_N, served_N = torch.cat(trained), torch.tensor(served) + 1.0
    gap_N = trained_N - served_N
    noise = _STANDARD_ERRORS * gap_N.std().item() / len(gap_N) ** 0.5 if len(gap_N) > 1 else 0.0
    length, differ = trained_N.mean().item(), (gap_N.abs() > 0.5).float().mean().item()
    least = max(_GAP * length, noise)
    m = SimpleNamespace(gap=abs(gap_N.mean().item()), least=least, differ=differ, length=length, positions=len(gap_N))
    m.unclear = length - 1 <= least  # accepted by less than the gap that counts: it agrees whatever is wrong
    m.figure = f"{length:.2f} tokens a round by the training forward, {served_N.mean():.2f} by decoding, over "
    m.figure += f"{len(gap_N)} rounds; {differ:.0%} of them differ"
    return m


def training_record(inputs: Inputs) -> SimpleNamespace:
    """The accepted length against the one recorded in training."""
    probe = inputs.probe
    lengths_N = probe.own.greedy_lengths_N
    now, error = lengths_N.mean().item(), lengths_N.std().item() / len(lengths_N) ** 0.5
    recorded = inputs.checkpoint.metadata.get("held_out", {}).get("expected_length_greedy")
    m = SimpleNamespace(recorded=recorded, length=now, positions=len(lengths_N), level=0, unclear=False)
    if recorded is None:
        m.unclear = now >= _NOTHING and not probe.can_tell(probe.own, inputs.drafter.config.gamma)
    else:
        m.level = sum(now + _STANDARD_ERRORS * error - 1 < limit * (recorded - 1) for limit in _RECORD)
        m.figure = f"{now:.2f} tokens a round at temperature 0 on this data, {recorded:.2f} recorded on held-out data"
    return m


def context_length(inputs: Inputs) -> SimpleNamespace:
    """Whether acceptance falls with the position in the conversation."""
    own = inputs.probe.own
    lengths_N, positions_N = own.lengths_N(), own.positions_N
    buckets = []
    for low, high in pairwise([0, *(2**i for i in range(5, 24))]):
        inside_N = (positions_N >= low) & (positions_N < high)
        if int(inside_N.sum()) >= _FEWEST:
            buckets.append((f"{low}-{high}", lengths_N[inside_N]))
    if len(buckets) < 2:
        raise NotMeasured(f"positions up to {int(positions_N.max())} are too few to compare lengths")
    last = buckets[-1][1]
    best = max((x for _, x in buckets[:-1]), key=lambda x: x.mean().item())
    error = _STANDARD_ERRORS * (best.var().item() / len(best) + last.var().item() / len(last)) ** 0.5
    fall = best.mean().item() - last.mean().item()
    m = SimpleNamespace(length=lengths_N.mean().item(), positions=len(lengths_N))
    m.falls = bool(last.mean() - 1 < _FALL * (best.mean() - 1)) and fall > error
    m.unclear = (1 - _FALL) * (best.mean().item() - 1) < error  # such a fall would be noise
    m.figure = "tokens a round by position: " + ", ".join(f"{place}: {x.mean():.2f}" for place, x in buckets)
    return m


# ----------------------------------------------------------------------------
# The rules: what is measured (the check), the test, and the sentences (figure, cause, fix).
# ----------------------------------------------------------------------------

_UNCLEAR = (
    "unclear",
    lambda m: m.unclear,
    "cannot tell yet: accepted length too low ({m.length:.2f}; {m.positions} positions)",
    "A mistake would cost this drafter too little to be seen here.",
    "Train it longer, or examine more conversations (--samples); then run the doctor again.",
)


def _wiring(meaning: str, remedy: str, fine: str = "") -> tuple[tuple[Any, ...], ...]:
    return (_UNCLEAR, *graded(meaning, remedy, prefix="By a small but clear margin: ", fine=fine))


_TEXT = ("data", "target", "tokenizer")
_MODEL = ("target", "drafter", "samples", "working")
_BLOCK = ("target", "drafter", "block", "samples", "working")
_TEMPLATE_REMEDY = "Serve with the template of training, or regenerate the responses and train with today's."
_SERVED = (
    "Training and serving must agree but for ties; positions, features or masks differ between them.",
    "Compare both on one block (tests/drafters/test_alignment.py does); report it if the code is unchanged.",
)

CHECKS: tuple[Check, ...] = (
    Check.of("checkpoint", "tensors", tensors,
        ("warning", lambda m: m.empty, "{m.empty} tensors of zeros: {m.names}",
         "A weight that is zero throughout was never trained or never copied.",
         "Look at how the checkpoint was made; convert or train it again."),
        ("ok", always, "{m.count} tensors, {m.size:.1f} MB, {m.dtypes}, all finite"), needs=("drafter",)),
    Check.of("checkpoint", "fits target", fits_target,
        ("fault", lambda m: m.error, "{m.error}",
         "Every number in a drafter refers to its own target's layers and vocabulary.",
         "Name the right target with --target, or train a drafter for this one."),
        ("warning", lambda m: m.renamed, "trained on {m.trained_on}, examined with {m.name}",
         "The shapes agree, the names do not. Another fine-tune of the same base lowers acceptance silently.",
         "If the two are one model under two names, ignore this; else use the target it was trained on."),
        ("ok", always,
         "hidden size {m.config.hidden_size}, {m.config.num_target_layers} layers, aux layers "
         "{m.layers}"), needs=("target", "drafter")),
    Check.of("checkpoint", "vocabulary", vocabulary,
        ("fault", lambda m: m.tokens > m.vocab, "the tokenizer has {m.tokens} tokens, the target {m.vocab}",
         "Tokens beyond the target's embedding cannot be read: tokens were added without resizing the model.",
         "Resize the target's embeddings and train it on the new tokens, or remove them from the tokenizer."),
        ("warning", lambda m: m.absent, "stop tokens {m.absent} are not in the draft vocabulary",
         "The drafter can never propose the end of a response; its last blocks are always cut short.",
         "Keep stop tokens in the draft vocabulary (outrider train always does)."),
        ("ok", always,
         "target {m.vocab}, drafter {m.config.vocab_size}, drafts "
         "{m.config.draft_vocab_size}"), needs=("target", "drafter")),
    Check.of("checkpoint", "embedding and head", embedding_and_head,
        ("warning", lambda m: m.foreign, "the file's {m.foreign} is not the target's",
         "Serving uses it as it is, and it costs memory of its own; a drafter for another target looks the same.",
         "Make sure of the target. To train on, start a new drafter: training uses the target's frozen ones."),
        ("warning", lambda m: m.tied != m.same,
         "the target's config says tie_word_embeddings={m.tied}, its tensors say otherwise",
         "A converter may have dropped or copied the head; the drafter uses what is loaded.",
         "Compare the target's output with its publisher's before training on it."),
        ("ok", always, "the target's own, {m.kind}"), needs=("target", "drafter", "working")),
    Check.of("checkpoint", "positions", positions,
        ("warning", lambda m: m.theirs != m.own, "rope_theta is {m.own:g}, the target's {m.theirs:g}",
         "A drafter trained with it is right; one with an edited config loses acceptance as the context grows.",
         "Compare with the config of training; look at the checks of RoPE base and context length."),
        ("warning", lambda m: m.drops_scaling and m.longest > m.unscaled,
         "the target scales RoPE ({m.scaling}), the drafter does not; the longest of the data has {m.longest} tokens",
         "Beyond the unscaled length the drafter's positions are ones it never trained on.",
         "Train on conversations as long as those it will serve."),
        ("warning", lambda m: m.longest > m.most,
         "max_position_embeddings is {m.most}, the longest conversation has {m.longest}",
         "Engines refuse or truncate contexts beyond it.",
         "Raise max_position_embeddings if the drafter was trained on such lengths."),
        ("warning", lambda m: m.outside, "sliding_window {m.window}, longest conversation {m.longest}",
         "The drafter does not see the beginning of long contexts, and cannot draft text copied from there.",
         "Train with a larger window, or with none, if acceptance falls with context length."),
        ("ok", always,
         "rope_theta {m.own:g}, window {m.window}, longest conversation "
         "{m.shown}"), needs=("target", "drafter", "block")),
    Check.of("data", "loss mask", loss_mask,
        ("fault", lambda m: m.bad, "{m.count} conversations with spans outside their tokens, first {m.bad[0]!r}",
         "The loss would be taken at positions that the target never generated.",
         "Write the responses again; prompt and response must be the generator's own tokens."),
        ("warning", lambda m: m.empty, "{m.empty} of {m.replies} replies are empty", "They supervise nothing.",
         "Look at why the generator returned nothing for them."),
        ("ok", always, "{m.conversations} conversations, {m.total} tokens, {m.share:.0%} supervised"), needs=("data",)),
    Check.of("data", "token ids", token_ids,
        ("fault", lambda m: m.outside,
         "{m.count} replies hold ids outside the target's vocabulary, the first {m.outside[0]!r}",
         "The data was tokenized for another model.", "Regenerate the responses with this target."),
        ("ok", always, "all below {m.vocab}"), needs=("data", "target")),
    Check.of("data", "ends of responses", response_ends,
        ("fault", lambda m: m.wrong,
         "{m.count} of {m.finished} finished responses do not end with a stop token {m.stops}",
         "The drafter never learns where a response ends (the first is {m.wrong[0]!r}).",
         "Keep the stop token when responses are written: take the generator's token ids, not its text."),
        ("warning", lambda m: m.cut > TRUNCATED_SHARE,
         "{m.cut:.0%} of {m.replies} responses were cut off before their end",
         "The drafter learns from the beginnings of responses and seldom or never sees how they go on and end.",
         "Raise data.max_new_tokens, unless the target never stops by itself."),
        ("ok", always, "{m.cut:.0%} of {m.replies} responses were cut off before their end"), needs=("data", "target")),
    Check.of("data", "chat template", chat_template,
        ("fault", lambda m: m.recorded, "the chat template is {m.now}; recorded by {m.recorded}",
         "The chat template changed since the responses were made: the drafter serves contexts it never saw.",
         _TEMPLATE_REMEDY),
        ("ok", lambda m: m.plain, "no chat template, prompts are plain text"),
        ("fault", lambda m: m.ends < _MOST, "{m.figure}",
         "Prompts should end with {m.suffix!r}: these have another template, or no generation prompt.",
         _TEMPLATE_REMEDY),
        ("warning", lambda m: m.begins < _MOST, "{m.figure}",
         "Prompts begin otherwise: with system prompts or tools of their own, a date, or another template.",
         "If the data brings its own system prompts, ignore this. " + _TEMPLATE_REMEDY),
        ("warning", lambda m: m.same < _MOST, "{m.figure}; {m.same:.0%} are rendered the same again",
         "The tokenizer splits the same text into other tokens now, or the template changes users' words.",
         "Check that tokenizer and template are those of training."),
        ("ok", always, "{m.figure}, {m.same:.0%} rendered the same again"), needs=_TEXT),
    Check.of("data", "thinking mode", thinking_mode,
        ("fault", lambda m: m.unlike, "{m.records}",
         "The drafter was trained on responses of the other mode than these.",
         "Examine it with the data it was trained on, or train it on these."),
        ("fault", lambda m: m.other, "{m.figure}",
         "The drafter was trained on the other mode, whose responses read differently.",
         "Serve with thinking {m.data}, or regenerate with it {m.serving} (--thinking, --no-thinking)."),
        ("fault", lambda m: m.on is False and m.marked > _FEW, "{m.figure}",
         "Responses think although the prompts ask them not to: they were not made with these prompts.",
         "Regenerate the responses from the prompts as they are rendered."),
        ("warning", lambda m: m.on is None and _FEW < m.marked < _MOST, "{m.figure}",
         "Two modes are mixed in one file.", "Regenerate with one setting for all conversations."),
        ("ok", always), needs=_TEXT),
    Check.of("data", "on-policy", on_policy,
        *graded("The responses are not what this target says at {m.drawn}: another model, template or precision, or a "
                "person, wrote them. Worst: {m.worst}.",
                "Regenerate the responses with this target (outrider train does when data.responses names a new "
                "file)."), needs=("samples", "target")),
    Check.of("data", "mask token in text", mask_in_text,
        ("warning", lambda m: m.responses or m.prompts,
         "mask token {m.mask} occurs in {m.responses} responses and {m.prompts} prompts",
         "The drafter cannot tell such a token from a place to fill.",
         "Train with a mask token that text never contains (drafter.mask_token)."),
        ("ok", always, "mask token {m.mask} occurs nowhere"), needs=("data", "drafter", "block")),
    Check.of("data", "draft vocabulary coverage", coverage,
        *graded("A token outside the draft vocabulary ends every block it stands in: acceptance cannot exceed this "
                "share.",
                "Raise drafter.draft_vocab_size, or choose the ids from text like this."), needs=("data", "drafter")),
    Check.of("data", "repeated prompts", repeats,
        ("warning", lambda m: m.share > _REPEATED, "{m.figure}",
         "Repeats weigh more than the rest, and a repeat in the held-out part makes its figures too good.",
         "Remove repeated prompts before regenerating."),
        ("ok", always), needs=("data",)),
    Check.of("data", "evaluation prompts", contamination,
        ("fault", lambda m: m.known, "{m.figure}: {m.names}",
         "Results on prompts that were trained on say nothing about prompts that were not.",
         "Remove them from the training prompts and train again, or evaluate on others."),
        ("ok", always), needs=(*_TEXT, "eval")),
    Check.of("wiring", "aux layer indices", aux_indices,
        *_wiring("target_layer_ids {m.own} are off by one: aux layer i is the output of decoder layer i, transformers' "
                 "hidden_states[i + 1].",
                 "Write target_layer_ids {m.value} into the drafter's config.json."), needs=_MODEL),
    Check.of("wiring", "aux layer order", aux_order,
        *_wiring("the aux hidden states arrive in another order than in training; target_layer_ids says {m.own}.",
                 "Sort the columns of fc.weight by layer, ascending, as engines do; they stand in the "
                 "{m.best.label}."), needs=_MODEL, slow=True),
    Check.of("wiring", "mask token", mask_token,
        *_wiring("mask_token_id {m.own} is not that of training; {m.right}, or a token embedded like it, is.",
                 "Set mask_token_id to {m.value} in the drafter's config.json.",
                 "id {m.own}: "), needs=_BLOCK, slow=True),
    Check.of("wiring", "block layout", block_layout,
        *_wiring("the block layout is wrong: every draft is read from the neighbouring row "
                 "(sample_from_anchor={m.own}).",
                 "Set sample_from_anchor to {m.value} in the drafter's config.json."), needs=_BLOCK),
    Check.of("wiring", "RoPE base", rope_base,
        *_wiring("rope_theta {m.own:g} is not that of training: the drafter attends at wrong distances, worse in long "
                 "contexts.", "Set rope_theta to {m.value:g} in the drafter's config.json.",
                 "rope_theta {m.own:g}: "), needs=_BLOCK, slow=True),
    Check.of("wiring", "draft vocabulary order", vocabulary_order,
        ("ok", lambda m: m.ascending, "{m.own} ids, ascending"),
        *_wiring("d2t is shuffled: rows of the draft head (markov_w2) stand for other tokens than d2t says.",
                 "Store the ids in the order of the head's rows; Outrider writes them ascending.",
                 "{m.own} ids, not ascending: "), needs=_MODEL),
    Check.of("serving", "leak", leak,
        ("fault", lambda m: not m.moved <= _TOLERANCE,
         "hidden states of a block move by {m.moved:.2g} when only its future changes",
         "The block mask shows a block tokens or features that decoding does not have yet, so acceptance is high in "
         "training and low in serving. The usual cause is visibility by index instead of position.",
         "Restore the mask: context slots strictly before the anchor, and the block's own rows."),
        ("warning", lambda m: m.used <= _TOLERANCE,
         "nothing moves with the future ({m.moved:.1g}), nor with the past ({m.used:.1g})",
         "The drafter does not use the target's features at all: it drafts from the anchor alone.",
         "Look at fc, hidden_norm and the key and value projections; train longer."),
        ("ok", always,
         "{m.blocks} blocks move by {m.moved:.1g} with the future, by {m.used:.2g} with the past"), needs=_BLOCK),
    Check.of("serving", "trained = served", trained_and_served,
        ("fault", lambda m: m.gap > m.least, "{m.figure}", *_SERVED),
        ("warning", lambda m: m.differ > _ROUNDS, "{m.figure}", *_SERVED),
        _UNCLEAR,
        ("ok", always), needs=_MODEL),
    Check.of("serving", "training record", training_record,
        _UNCLEAR,
        ("warning", lambda m: m.recorded is None and m.length < _NOTHING,
         "{m.length:.2f} tokens a round at temperature 0; no record to compare with",
         "The drafter's proposals are next to never accepted: it is untrained, or not connected as trained.",
         "Look at the other findings first; then at target, precision and data."),
        ("ok", lambda m: m.recorded is None,
         "{m.length:.2f} tokens a round at temperature 0 on this data; no record to compare with"),
        *graded("Acceptance is much lower than in training: data of another kind, other wiring, or another target.",
                "Look at the other findings first; then at target, precision and data."), needs=_MODEL),
    Check.of("serving", "context length", context_length,
        ("warning", lambda m: m.falls, "{m.figure}",
         "Acceptance falls with context length: wrong RoPE base or scaling, a small window, or short training data.",
         "Compare RoPE and window with the target's; train on conversations as long as those served."),
        _UNCLEAR,
        ("ok", always), needs=_MODEL, slow=True),
)  # fmt: skip


# ----------------------------------------------------------------------------
# The examination, quick or whole.
# ----------------------------------------------------------------------------

QUICK = tuple(check for check in CHECKS if not check.slow)
QUICK_SAMPLES, QUICK_TOKENS = 2, 16  # at most, in a quick examination
LONG = tuple(check for check in CHECKS if "samples" in check.needs)  # left out of a quick one, or on few conversations


def examine(
    inputs: Inputs, on_progress: Callable[[int, int], None] = lambda done, total: None, checks: Sequence[Check] = CHECKS
) -> list[Finding]:
    """Run every check whose needs are met; a check that raises is a fault and stops nothing.

    Checks of block drafters are one skipped finding together if the drafter is of another kind.
    """
    findings = []
    foreign = inputs.missing("block") if inputs.loaded_checkpoint is not None else None
    chosen = [check for check in checks if foreign is None or "block" not in check.needs]
    on_progress(0, len(chosen))
    for done, check in enumerate(chosen, 1):
        if (finding := _outcome(check, inputs)) is not None:
            findings.append(finding)
        on_progress(done, len(chosen))
    if foreign is not None and (names := [check.name for check in CHECKS if "block" in check.needs]):
        reason = f"{foreign}: {', '.join(names)}"
        findings.append(Finding("skipped", reason, group="checkpoint", check="checks of block drafters"))
    return findings


def _outcome(check: Check, inputs: Inputs) -> Finding | None:
    for need in check.needs:
        if reason := inputs.missing(need):
            return check.finding("skipped", reason)
    try:
        return check.find(inputs)
    except Exception as error:
        return check.finding(
            "fault",
            f"the check itself broke: {type(error).__name__}: {error}",
            "What it looks at is so far from expected that it could not be examined.",
            remedy="Correct the other findings first; report this if it stays.",
        )


def left_out(inputs: Inputs) -> str:
    """What a quick examination leaves out, of checks and conversations."""
    names = ", ".join(check.name for check in CHECKS if check.slow)
    count = len(inputs.conversations)
    seen = f"; {min(inputs.samples, count)} of {count} conversations were run through the models" if count else ""
    return f"left out: {names}{seen}"


def replaced(findings: Sequence[Finding], newer: Sequence[Finding]) -> list[Finding]:
    """The findings with those of the same check replaced by the newer ones, in the order of the report."""
    latest = {(f.group, f.check): f for f in (*findings, *newer)}
    order = [(check.group, check.name) for check in CHECKS]
    return sorted(latest.values(), key=lambda f: order.index((f.group, f.check)) if (f.group, f.check) in order else -1)

"""One request: its text and stops, and its state between rounds.

A token may end inside a UTF-8 character, so text is released only when it no longer changes; text that may
be the beginning of a stop string is held back until it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.decoding.structured import Grammar
from outrider.decoding.verification import TargetRows
from outrider.drafters.base import DraftCall
from outrider.drafters.draft import Draft
from outrider.sampling import (
    Constraint,
    Randomness,
    RandomSource,
    SamplingParams,
    SeenTokens,
    at_least_float32,
    constrained,
    likeliest,
    warp,
)
from outrider.target.cache import KVCache
from outrider.target.model import DecodingTarget

# ----------------------------------------------------------------------------
# Tokens to text, piece by piece.
#
#     window of tokens    | context: text is final | text not final yet |
#     decoded             | prefix: in the text    | new | U+FFFD x0..3 |
#
# A character has at most four bytes, so the last three replacement characters may still become one: the last alone,
# where a decoder writes one for an unfinished character (byte-level BPE), or all three, where it writes one for every
# byte (byte fallback). All that is before them is final, also in a run of bytes that never becomes text. Decoding
# together with the context keeps the space that some tokenizers write between two tokens.
# ----------------------------------------------------------------------------


_REPLACEMENT = "\ufffd"
_UNFINISHED = 3  # bytes of a character that lacks its last
_KEPT_TOKENS = 8  # of a window that has grown to twice as many: more than a character has bytes


class TextStream:
    """Incremental detokenisation with stop strings. The work for a token does not grow with the text.

    Args:
        tokenizer: the target's; None gives no text (token-only use).
        stop_strings: text that ends the response; it is not part of the output. Special tokens are not either, but a
            stop string with the text of one is looked for among them too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop_strings: Sequence[str] = ()) -> None:
        if any(not stop for stop in stop_strings):
            raise ValueError("an empty stop string would stop before the first token; leave it out.")
        if stop_strings and tokenizer is None:
            raise ValueError("stop strings need a tokenizer; load the target with one.")
        self.tokenizer = tokenizer
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._special = {id: token.content for id, token in added.items() if token.special}
        among_special = [any(content in stop for content in self._special.values()) for stop in stop_strings]
        self._special_stops = tuple(stop for stop, among in zip(stop_strings, among_special, strict=True) if among)
        self._text_stops = tuple(stop for stop, among in zip(stop_strings, among_special, strict=True) if not among)
        self.text = ""  # everything final so far, cut at a stop string
        self.stopped = False
        self._window: list[int] = []
        self._context = 0  # tokens of the window whose text is final
        self._prefix = ""  # the beginning of the decoded window, which is in `text`
        self._released = 0
        self._marked = ""  # `text` with special tokens, for the stop strings that have any
        self._marks: list[tuple[int, int]] = []  # where a special token begins and ends in it

    def push(self, token: int) -> bool:
        """Add one token; True when a stop string is complete."""
        if self.tokenizer is None:
            return False
        if token in self._special:
            return self._add("", special=self._special[token])
        self._window.append(token)
        pending = self._pending(self.tokenizer)
        unfinished = min(len(pending) - len(pending.rstrip(_REPLACEMENT)), _UNFINISHED)
        new = pending[: len(pending) - unfinished]
        if not unfinished:
            del self._window[: self._context]
            self._context, self._prefix = len(self._window), self._decode(self.tokenizer)
        elif len(self._window) >= 2 * _KEPT_TOKENS:
            del self._window[:-_KEPT_TOKENS]
            decoded = self._decode(self.tokenizer)
            self._context, self._prefix = _KEPT_TOKENS - _UNFINISHED, decoded[: max(0, len(decoded) - unfinished)]
        else:
            self._prefix += new
        return self._add(new)

    def cut(self, tokens: Sequence[int], stop_ids: frozenset[int]) -> tuple[list[int], bool]:
        """Push tokens up to and including the first that stops the response; says whether one did."""
        for position, token in enumerate(tokens):
            if self.push(token) or token in stop_ids:
                return list(tokens[: position + 1]), True
        return list(tokens), False

    def release(self, final: bool = False) -> str:
        """Text not released before; keeps back what may become a stop string, unless `final`."""
        if final and self.tokenizer is not None and not self.stopped:
            pending = self._pending(self.tokenizer, final=True)
            self._prefix += pending
            self._add(pending)
        end = len(self.text)
        if not final:
            held = [_overlap(self.text, stop) for stop in self._text_stops]
            held += [self._characters(_overlap(self._marked, stop)) for stop in self._special_stops]
            end -= max(held, default=0)
        piece = self.text[self._released : end]
        self._released = max(self._released, end)
        return piece

    def _pending(self, tokenizer: PreTrainedTokenizerBase, final: bool = False) -> str:
        """Text of the window that is not in `text` yet, unfinished characters at its end included."""
        decoded = self._decode(tokenizer)
        if not decoded.startswith(self._prefix):  # byte fallback: a run of bytes is text as a whole, or not at all
            if not final and decoded.endswith(_REPLACEMENT) and len(self._window) - self._context <= _UNFINISHED:
                return _REPLACEMENT  # it may be again
            del self._window[: self._context]
            self._context, self._prefix = 0, ""
            decoded = self._decode(tokenizer)
        return decoded[len(self._prefix) :]

    def _decode(self, tokenizer: PreTrainedTokenizerBase) -> str:
        return str(tokenizer.decode(self._window, skip_special_tokens=True))

    def _add(self, text: str, special: str = "") -> bool:
        """Add final text, or a special token, which is not part of the output; True when a stop string is complete."""
        self.text += text
        places = _places(self.text, self._text_stops, added=len(text))
        if self._special_stops:
            self._marked += text + special
            if special:
                self._marks.append((len(self._marked) - len(special), len(self._marked)))
            found = _places(self._marked, self._special_stops, added=len(text + special))
            places += [len(self.text) - self._characters(len(self._marked) - at) for at in found]
        if places:
            self.text = self.text[: min(places)]
            self.stopped = True
        return self.stopped

    def _characters(self, count: int) -> int:
        """How many of the last `count` characters of text and special tokens are text."""
        start = len(self._marked) - count
        for begin, end in reversed(self._marks):
            if end <= start:
                break
            count -= end - max(begin, start)
        return count


def _places(text: str, stops: Sequence[str], added: int) -> list[int]:
    """Where each stop string begins that the last `added` characters completed."""
    begins = [text.find(stop, max(0, len(text) - added - len(stop) + 1)) for stop in stops]
    return [at for at in begins if at >= 0]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


FinishReason = Literal["stop", "length", "error"]  # error: in an engine; a request decoded alone raises it


@dataclass(frozen=True)
class StopRules:
    """When a response ends. `stop_ids` None: the target's own stop tokens; () to ignore them."""

    max_new_tokens: int = 256
    stop_ids: Sequence[int] | None = None
    stop_strings: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1.")

    def ids(self, target: DecodingTarget) -> frozenset[int]:
        """The stop tokens."""
        return target.eos_ids if self.stop_ids is None else frozenset(self.stop_ids)


def check_prompt(target: DecodingTarget, prompt: Sequence[int]) -> None:
    """A prompt must leave room for a response.

    Raises:
        ValueError: it is empty, does not fit the target's context, or has tokens the target does not know.
    """
    if bad := [token for token in prompt if not 0 <= token < target.vocab_size]:
        raise ValueError(
            f"prompt token {bad[0]} is outside {target.name}'s vocabulary of {target.vocab_size}: tokenise the "
            "prompt for this model."
        )
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token.")
    if len(prompt) >= target.max_context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and {target.name} reads {target.max_context}, the response included: "
            "shorten the prompt."
        )


# ----------------------------------------------------------------------------
# The state of one request, and what a round does to it.
#
#     committed tokens x_0 .. x_{n-1};  target cache and draft cache hold x_0 .. x_{n-2};  anchor = x_{n-1}
#     draft()   a draft after the anchor
#     score()   target forward on [anchor, d_1 .. d_l] or [anchor, nodes of a tree], rows warped when read
#     commit()  keep the cache slots of the accepted path and give the drafter the aux hidden states of what stayed
#
# In plain decoding every draft is empty and every token is a bonus token.
# Shapes: B = 1, K rows of one draft, T tokens, L aux layers, V vocab.
# ----------------------------------------------------------------------------


def target_rows(states: Sequence[RequestState], logits_NV: Tensor, drafts: Sequence[Draft]) -> list[TargetRows]:
    """The target's rows of several requests, from the logits after each anchor and its draft, request after request.

    What verification will ask of a GPU is read for all of them at once: the likeliest tokens where any request is
    greedy, and probabilities where any is sampled.
    """
    greedy = any(state.params.temperature == 0.0 for state in states)
    likeliest_N = likeliest(logits_NV) if greedy else None
    rows: list[TargetRows] = []
    found: list[Tensor] = []
    asked: list[int] = []  # the requests that they belong to
    first = 0
    for state, draft in zip(states, drafts, strict=True):
        own = slice(first, first + len(draft.tokens) + 1)
        first = own.stop
        rows.append(state.target_rows(logits_NV[own], draft, None if likeliest_N is None else likeliest_N[own]))
        sampled = state.noise is not None or rows[-1].pick is None
        if logits_NV.is_cuda and sampled and state.constraint is None:  # a constraint that fails ends its request alone
            rows[-1], values = state.gpu_rows(logits_NV[own], draft)
            asked.append(len(rows) - 1)
            found.append(values.double())
    read = torch.cat(found).tolist() if any(len(values) for values in found) else []
    for i, values in zip(asked, found, strict=True):
        its, read = read[: len(values)], read[len(values) :]
        if states[i].noise is None:
            rows[i] = replace(rows[i], node_probs=its)
        else:
            rows[i] = replace(rows[i], pick=[int(token) for token in its].__getitem__)
    return rows


class RequestState:
    """What decoding knows of one request between two rounds, alone or in the engine.

    Attributes:
        tokens: committed tokens, the prompt first and the anchor last.
        capacity: most committed tokens, the prompt included.
        seed: of its random draws.
        source, noise: where its random draws come from; `noise` for coupled sampling, else None.
        seen: the tokens so far, as penalties read them.
        constraint: what its response must follow; None: nothing. Such a response ends at the target's stop tokens, too,
            whatever the rules say: nothing can follow a complete one.
        text: its output text, cut at stop strings.
        session: its drafter's; None in plain decoding and while it does not run.
        unread: tokens in the target's cache that the drafter has yet to read, with aux hidden states [T, L, D].
        recurrent: its states in the engine where the target has such layers (`Target.new_states`), while it runs.

    Raises:
        ValueError: the prompt is empty or does not fit the target, or stop strings without a tokenizer.
    """

    def __init__(
        self,
        target: DecodingTarget,
        prompt: Sequence[int],
        params: SamplingParams,
        rules: StopRules,
        randomness: Randomness | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        check_prompt(target, prompt)
        self.params = params
        self.tokens = list(prompt)
        self._prompt_length = len(prompt)
        self.capacity = min(len(prompt) + rules.max_new_tokens, target.max_context)
        self.seed = params.request_seed()
        randomness = randomness or Randomness()
        self.source: RandomSource = randomness.source(self.seed)
        self.noise = randomness.noise(self.seed, target.vocab_size) if params.coupled else None
        self.seen = SeenTokens(target.vocab_size, params, prompt, device=target.device)
        self.text = TextStream(target.tokenizer, rules.stop_strings)
        self.constraint: Constraint | None = None if grammar is None else grammar.start()
        self.stop_ids = rules.ids(target) if grammar is None else rules.ids(target) | grammar.eos_ids
        self.session: Any = None
        self.unread: list[tuple[list[int], Tensor | None]] = []
        self.unread_tokens = 0
        self.recurrent: KVCache | None = None

    @property
    def anchor(self) -> int:
        """The last committed token, which is in no cache yet."""
        return self.tokens[-1]

    @property
    def response(self) -> list[int]:
        """The committed tokens behind the prompt."""
        return self.tokens[self._prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.capacity - len(self.tokens)

    def draft_call(self, slots: int | None = None) -> DraftCall:
        """A call for a draft no deeper than what may be committed besides the target's own token.

        Args:
            slots: most draft tokens in all, branches included; None: as many as the drafter has.
        """
        deepest = self.remaining - 1
        return DraftCall(
            self.session,
            self.anchor,
            self.params,
            seen=self.seen,
            source=self.source,
            limit=deepest if slots is None else min(slots, deepest),
            noise=self.noise,
            position=len(self.tokens),
            nodes=slots,
            constraint=self.constraint,
        )

    def target_rows(self, logits_KV: Tensor, draft: Draft, likeliest: Sequence[int] | None = None) -> TargetRows:
        """The target's rows after the anchor and `draft`, from their logits; `likeliest`: their argmax, where known."""

        def row(k: int) -> Tensor:
            before = draft.tokens_before(k)
            allowed_V = None if self.constraint is None else self.constraint.allowed(before)
            logits_V = constrained(at_least_float32(logits_KV[k]), allowed_V)
            return warp(logits_V, self.params, self.seen.with_tokens(before))

        if self.noise is not None:
            noise, position = self.noise, len(self.tokens)
            return TargetRows(row, lambda k: noise.pick(row(k), position + len(draft.tokens_before(k))))
        if self._plain_rows and self.params.temperature == 0.0 and likeliest is not None:
            return TargetRows(row, likeliest.__getitem__)
        return TargetRows(row)

    @property
    def _plain_rows(self) -> bool:
        """Whether the target's distributions depend on its logits alone."""
        return not self.params.penalised and self.constraint is None

    def gpu_rows(self, logits_KV: Tensor, draft: Draft) -> tuple[TargetRows, Tensor]:
        """As `target_rows`, on a GPU and without a constraint: all rows are warped at once, and what verification will
        ask of them is a tensor that the host has yet to read: `TargetRows.node_probs` [K - 1] or, of coupled sampling,
        the tokens of `pick` [K].
        """
        if self._plain_rows:
            probs = list(warp(at_least_float32(logits_KV), self.params).unbind())
        else:
            rows = self.target_rows(logits_KV, draft)
            probs = [rows.row(k) for k in range(len(logits_KV))]
        if self.noise is not None:
            places = (len(self.tokens) + len(draft.tokens_before(k)) for k in range(len(probs)))
            picks = [self.noise.pick_tensor(probs_V, place) for probs_V, place in zip(probs, places, strict=True)]
            return TargetRows(probs.__getitem__), torch.stack(picks)
        values = [probs[parent + 1][token] for token, parent in zip(draft.tokens, draft.parents, strict=True)]
        return TargetRows(probs.__getitem__), torch.stack(values) if values else logits_KV.new_empty(0)

    def commit(self, tokens: Sequence[int]) -> tuple[list[int], str, FinishReason | None]:
        """Take a round's tokens up to the first that ends the response: (tokens kept, text released, why it ended)."""
        kept, stopped = self.text.cut(tokens, self.stop_ids)
        self.tokens += kept
        for token in kept:
            self.seen.add(token)
            if self.constraint is not None:
                self.constraint.commit(token)
        finish: FinishReason | None = "stop" if stopped else "length" if self.remaining == 0 else None
        return kept, self.text.release(final=finish is not None), finish

    def leave(self) -> None:
        """Forget what its KV blocks, states and session held: it is prefilled anew when it runs again."""
        self.session = self.recurrent = None
        self.all_read()

    def leave_unread(self, tokens: list[int], aux_TLD: Tensor | None) -> None:
        """Note tokens, with their aux hidden states, that the drafter has yet to read."""
        self.unread.append((tokens, aux_TLD))
        self.unread_tokens += len(tokens)

    def all_read(self) -> None:
        """The drafter has read them, or never will."""
        self.unread.clear()
        self.unread_tokens = 0

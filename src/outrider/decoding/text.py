"""Text of a response as its tokens come: what is final is released, and stop strings end it.

A token may end inside a UTF-8 character, so text is released only when it no longer changes; text that may
be the beginning of a stop string is held back until it is not.

    window of tokens    | context: text is final | text not final yet |
    decoded             | prefix: in the text    | new | U+FFFD x0..3 |

A character has at most four bytes, so the last three replacement characters may still become one: the last alone,
where a decoder writes one for an unfinished character (byte-level BPE), or all three, where it writes one for every
byte (byte fallback). All that is before them is final, also in a run of bytes that never becomes text. Decoding
together with the context keeps the space that some tokenizers write between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

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

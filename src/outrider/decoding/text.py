"""Tokens to text as they come, and stop strings wherever they fall.

A token may end inside a UTF-8 character, so text is released only when it no longer changes; a piece of text that may
be the beginning of a stop string is held back until it is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"


class TextStream:
    """Incremental detokenisation with stop strings.

    Args:
        tokenizer: the target's; None gives no text (token-only use).
        stop_strings: text that ends the response; it is not part of the output.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop_strings: Sequence[str] = ()) -> None:
        if any(not stop for stop in stop_strings):
            raise ValueError("an empty stop string would stop before the first token; leave it out.")
        if stop_strings and tokenizer is None:
            raise ValueError("stop strings need a tokenizer; load the target with one.")
        self.tokenizer = tokenizer
        self.stop_strings = tuple(stop_strings)
        self.text = ""  # everything final so far, cut at a stop string
        self.stopped = False
        self._tokens: list[int] = []
        self._start = 0  # tokens before this one are final; decoding restarts here
        self._final = 0  # characters of decode(tokens[_start:]) already in `text`
        self._released = 0

    def push(self, token: int) -> bool:
        """Add one token; True when a stop string is complete."""
        if self.tokenizer is None:
            return False
        self._tokens.append(token)
        window = self._window(self.tokenizer)
        if window.endswith(_REPLACEMENT):
            return False
        self.text += window[self._final :]
        # The last token stays in the window: some tokenizers write a space between two tokens, not after one.
        self._start = len(self._tokens) - 1
        self._final = len(self._window(self.tokenizer))
        return self._cut()

    def cut(self, tokens: Sequence[int], stop_ids: frozenset[int]) -> tuple[list[int], bool]:
        """Push tokens up to and including the first that stops the response; says whether one did."""
        for position, token in enumerate(tokens):
            if self.push(token) or token in stop_ids:
                return list(tokens[: position + 1]), True
        return list(tokens), False

    def _window(self, tokenizer: PreTrainedTokenizerBase) -> str:
        return str(tokenizer.decode(self._tokens[self._start :], skip_special_tokens=True))

    def _cut(self) -> bool:
        places = [at for stop in self.stop_strings if (at := self.text.find(stop)) >= 0]
        if places:
            self.text = self.text[: min(places)]
            self.stopped = True
        return self.stopped

    def release(self, final: bool = False) -> str:
        """Text not released before; keeps back what may become a stop string, unless `final`."""
        if final and self.tokenizer is not None and not self.stopped:
            window = self._window(self.tokenizer)
            self.text += window[self._final :]
            self._final = len(window)
            self._cut()  # a stop string may have been waiting for an unfinished character behind it
        end = len(self.text)
        if not final:
            end -= max((_overlap(self.text, stop) for stop in self.stop_strings), default=0)
        piece = self.text[self._released : end]
        self._released = max(self._released, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

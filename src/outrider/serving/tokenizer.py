"""The target's tokenizer in the server: prompts become tokens in bounded time, and tokens their own text and bytes.

    short texts    one thread, in the order in which they come
    long texts     another thread; on a CPU it rests between two of them, since the engine computes on the same cores
    too long       counted in pieces, and refused when the pieces have twice as many tokens as fit

How many characters a token may stand for has no bound that holds for every tokenizer (an unknown word, white space
that is dropped), so tokens are counted. A cut between two pieces adds a few tokens at most: a text whose pieces have
twice as many tokens as fit does not fit. The counted tokens are thrown away: a prompt has those of its whole text.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

_SHORT = 4096  # bytes of a text for the thread of short ones: ten milliseconds at most
_PIECE = 4096  # characters that are counted at once
_WHOLE = 6  # bytes for each token that fits: a text of no more is tokenised at once, as most that fit are
_REST = 3.0  # of the thread of long texts, times as long as it has worked: it takes a quarter of one core
_KEPT = 2**16  # texts, and bytes, of single tokens
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a token of byte fallback
_Result = TypeVar("_Result")


class ServerTokenizer:
    """Tokenises for many clients of one asyncio loop. A caller that is cancelled ends what has not begun.

    Args:
        tokenizer: the target's.
        most: tokens that fit, prompt and response together.
        rests: whether the engine computes on the CPU.

    Attributes:
        piece: from a token to its own text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int, rests: bool) -> None:
        self.tokenizer, self.most = tokenizer, most
        self._short, self._long = _Lane("short texts", 0.0), _Lane("long texts", _REST if rests else 0.0)
        self._special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.piece = lru_cache(_KEPT)(lambda token: str(tokenizer.decode([token])))
        self._bytes = lru_cache(_KEPT)(self._bytes_of)

    async def tokens(self, text: str, special: bool) -> list[int]:
        """The tokens of a text. `special`: with those that the tokenizer adds, such as one for the beginning.

        Raises:
            ValueError: it has more tokens than fit.
        """
        size = len(text.encode())
        if size > _WHOLE * self.most:
            counted = 0
            for start in range(0, len(text), _PIECE):
                counted += len(await self.run(partial(self._encode, text[start : start + _PIECE], False), size))
                if counted > 2 * self.most:
                    raise ValueError(f"the prompt has more than {self.most} tokens, the most that fit: shorten it.")
        return await self.run(partial(self._encode, text, special), size)

    async def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens.

        Raises:
            ValueError: they are more than fit.
        """
        if len(tokens) > self.most:
            raise ValueError(f"tokens: {len(tokens)} are more than the {self.most} that fit.")
        return str(await self.run(partial(self.tokenizer.decode, list(tokens)), len(tokens)))

    async def run(self, work: Callable[[], _Result], size: int) -> _Result:
        """What `work` on a text of so many bytes returns."""
        return await (self._short if size <= _SHORT else self._long).run(work)

    def has_text(self, token: int) -> bool:
        """Whether a token is part of a text; special tokens are not."""
        return token not in self._special

    def bytes_of(self, token: int, first: bool) -> tuple[int, ...] | None:
        """A token's bytes in a response; joined they are its text. None: it has none, as special tokens.

        Args:
            first: no token with text is before it, so it loses the space that some tokenizers write between words.
        """
        return self._bytes(token, first)

    def _encode(self, text: str, special: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    @cached_property
    def _byte_level(self) -> bool:
        return self.tokenizer.convert_tokens_to_string(["\u0120"]) == " "

    @cached_property
    def _byte_fallback(self) -> bool:
        return self.tokenizer.convert_tokens_to_string(["<0x41>"]) == "A"

    def _bytes_of(self, token: int, first: bool) -> tuple[int, ...] | None:
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None or token in self._special:
            return None
        assert isinstance(name, str)
        if self._byte_level:
            # A token with another character is one that was added, and stands for itself.
            known = all(character in _BYTE_LEVEL for character in name)
            return tuple(_BYTE_LEVEL[character] for character in name) if known else tuple(name.encode())
        if self._byte_fallback and (byte := _BYTE.fullmatch(name)):
            return (int(byte[1], 16),)
        before = [] if first else ["a"]  # decoders look at what is before a token, not at what it is
        joined = self.tokenizer.convert_tokens_to_string([*before, name])
        return tuple(joined.removeprefix("".join(before)).encode())


class _Lane:
    """A thread that does one piece of work after the other, in order, and rests after each.

    Args:
        rest: seconds of rest per second of work.
    """

    def __init__(self, name: str, rest: float) -> None:
        self._thread, self._rest, self._turn = ThreadPoolExecutor(1, name), rest, asyncio.Lock()

    async def run(self, work: Callable[[], _Result]) -> _Result:
        await self._turn.acquire()
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        try:
            return await loop.run_in_executor(self._thread, work)
        finally:
            # The result need not wait for the rest, only the next in the row.
            loop.call_later(self._rest * (time.perf_counter() - began), self._turn.release)


def _byte_level() -> dict[str, int]:
    """From the characters in which byte-level tokenizers write bytes to these. Source: GPT-2's `bytes_to_unicode`."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()

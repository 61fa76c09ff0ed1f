"""The prefix cache: KV blocks that outlive their request, for requests that begin with the same tokens.

    key of block i = SHA-256(key of block i - 1, tokens of block i)         before block 0: SHA-256(salt)

    free --allocate--> held --full--> held, kept --its last request leaves--> idle --hit--> held, kept
      ^                                                                        |
      +------------------- the idle block that was used longest ago ----------+

A key stands for all tokens up to the end of its block, on which its keys and values depend, and on nothing else. Blocks
are read-only once kept: a request that hits one writes behind it. Aux hidden states lie in the same slots
(target/paged.py), so that a drafter reads of a cached prefix what it would have read of a prompt.
Source: automatic prefix caching of vLLM (docs/design/prefix_caching).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block, given that of the block before it."""
    return sha256(before + array("q", tokens).tobytes()).digest()


def add_keys(keys: list[bytes], tokens: Sequence[int], block_size: int, salt: str) -> None:
    """Append the keys of all blocks that `tokens` fill behind those that have keys; a salt has prefixes of its own."""
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        before = keys[-1] if keys else sha256(salt.encode()).digest()
        keys.append(block_key(before, tokens[start : start + block_size]))


class PrefixCache:
    """Which blocks are kept, by key. `idle` are those that no request holds, the one used longest ago first."""

    def __init__(self) -> None:
        self.idle: dict[int, None] = {}
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning of these keys that is kept."""
        blocks: list[int] = []
        for key in keys:
            if key not in self._block_of:
                break
            blocks.append(self._block_of[key])
        return blocks

    def keep(self, block: int, key: bytes) -> None:
        """Keep a full block, unless another one has its key."""
        if key not in self._block_of:
            self._block_of[key], self._key_of[block] = block, key

    def evict(self) -> int:
        """Forget the idle block that was used longest ago."""
        block = next(iter(self.idle))
        del self.idle[block], self._block_of[self._key_of.pop(block)]
        return block

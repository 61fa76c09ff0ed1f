"""Who answers: the interface of a source of responses, and the local engine behind it. Servers are in servers.py.

requests (all of a turn, done or not)  ->  source  ->  commits: lists of replies that are kept together or not at all
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.data.conversations import Message
from outrider.data.generation import generate_batch, plan_batches
from outrider.data.responses import Failure
from outrider.data.samples import Reply
from outrider.sampling import SamplingParams
from outrider.target import Target
from outrider.target.resolve import dtype_name


@dataclass(frozen=True)
class RegenerationConfig:
    """What decides a response, beside the target and the prompt. Lengths in tokens."""

    max_new_tokens: int = 256
    max_prompt_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    thinking: bool = False

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, seed=self.seed)

    def seed_of(self, conversation: str, turn: int) -> int:
        """A seed of its own for every response, below 2^31."""
        digest = hashlib.sha256(f"{self.seed}\n{turn}\n{conversation}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True)
class Request:
    """One response that is wanted, or was (`done`): what the source may need to plan."""

    id: str
    turn: int
    prompt: list[int]
    seed: int
    done: bool
    messages: list[Message]
    tools: tuple[dict[str, Any], ...]


class ResponseSource(Protocol):
    """Something that answers requests."""

    @property
    def description(self) -> dict[str, Any]:
        """Settings that decide what it answers: `generator`, and `dtype` where it is known."""
        ...

    @property
    def renders_prompts(self) -> bool:
        """Whether prompts are tokenised by the source itself, by a template that need not be ours."""
        ...

    def answer(
        self, requests: Sequence[Request], config: RegenerationConfig, stop: Callable[[], bool]
    ) -> Iterator[list[Reply | Failure]]:
        """Answers to the requests that are not done, in commits; ends early when `stop` says so."""
        ...


@dataclass(frozen=True)
class LocalSource:
    """The target itself, batch by batch. A commit is a batch, so a batch is always decoded whole."""

    target: Target
    batch_size: int = 64
    renders_prompts: bool = False

    @property
    def description(self) -> dict[str, Any]:
        return {"generator": "outrider", "dtype": dtype_name(self.target.dtype)}

    def answer(
        self, requests: Sequence[Request], config: RegenerationConfig, stop: Callable[[], bool]
    ) -> Iterator[list[Reply | Failure]]:
        for batch in plan_batches([len(r.prompt) for r in requests], self.batch_size):
            wanted = [requests[i] for i in batch if not requests[i].done]
            if not wanted:
                continue
            if stop():
                return
            prompts, seeds = [r.prompt for r in wanted], [r.seed for r in wanted]
            said = generate_batch(self.target, prompts, config.max_new_tokens, config.params, seeds)
            yield [Reply(r.id, r.turn, r.prompt, s.tokens, s.finished) for r, s in zip(wanted, said, strict=True)]

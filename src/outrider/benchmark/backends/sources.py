"""What a sweep needs of one kind of engine: an idle backend for a variant and a level, and a judge of its responses.

    local           none, fixed-K, threshold, prefix, ...    this process's engine (benchmark/local.py)
    transformers    none, prompt-lookup, assisted            transformers' generate, one request at a time
    servers         none, fixed-K, or none, speculative      engines over HTTP, started here or elsewhere
    mlx             none, speculative                        outrider.mlx, one request at a time

"none" is the baseline of all of them: the same engine without speculation, in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.benchmark.backends.engines import Launch, Server
from outrider.benchmark.backends.launch import free_port, launched
from outrider.benchmark.backends.sequential import Decode, SequentialBackend
from outrider.benchmark.backends.server import Endpoint, ServerBackend
from outrider.benchmark.backends.transformers_models import HfDecoder
from outrider.benchmark.frontier import Compare, Serve
from outrider.benchmark.load import Backend
from outrider.benchmark.variants import NO_SPECULATION
from outrider.evaluation.run import compare_by, compare_greedy
from outrider.target import Target

SPECULATIVE, PROMPT_LOOKUP, ASSISTED = "speculative", "prompt-lookup", "assisted"


class Source(Protocol):
    """Gives backends. `exact`: greedy responses that differ from plain decoding are a bug of ours, not a rounding."""

    exact: bool

    def serve(self, variant: str, level: float) -> Backend: ...

    def compare(self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> str:
        """same, tie or mismatch; where the logits are not to be seen, no tie is found."""
        ...

    def close(self) -> None: ...


@dataclass
class LocalSource:
    """Our engine; `engines` is `local_engines`."""

    target: Target
    engines: Serve
    exact = True

    def serve(self, variant: str, level: float) -> Backend:
        return self.engines(variant, level)

    def compare(self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> str:
        return compare_greedy(self.target, prompt, plain, other)

    def close(self) -> None:
        """Engines end with their last reference."""


@dataclass
class DecoderSource:
    """Functions that decode one prompt, by variant. `judge` None: any difference is a mismatch."""

    decoders: dict[str, Decode]
    judge: Compare | None = None
    exact = False

    def serve(self, variant: str, level: float) -> Backend:
        return SequentialBackend(self.decoders[variant])

    def compare(self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> str:
        return "mismatch" if self.judge is None else self.judge(prompt, plain, other)

    def close(self) -> None:
        """Nothing outlives its request."""


def transformers_source(model: Any, eos_ids: Sequence[int], drafts: int, assistant: Any | None) -> DecoderSource:
    """Plain generate, prompt lookup of `drafts` tokens, and assisted generation where there is an assistant."""
    decoders: dict[str, Decode] = {
        NO_SPECULATION: HfDecoder(model, eos_ids),
        PROMPT_LOOKUP: HfDecoder(model, eos_ids, lookup=drafts),
    }
    if assistant is not None:
        decoders[ASSISTED] = HfDecoder(model, eos_ids, assistant=assistant)

    @torch.inference_mode()
    def last_logits(tokens: Sequence[int]) -> Tensor:
        logits_BTV: Tensor = model(torch.tensor([list(tokens)], device=model.device), logits_to_keep=1).logits
        return logits_BTV[0, -1]

    return DecoderSource(decoders, partial(compare_by, last_logits))


class ServerSource:
    """Servers by variant, one at a time: `reach(variant)` is left before the next one is entered."""

    exact = False

    def __init__(
        self, reach: Callable[[str], AbstractContextManager[Endpoint]], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._reach, self._tokenizer = reach, tokenizer
        self._variant: str | None = None
        self._endpoint: Endpoint | None = None
        self._engine, self._client = ExitStack(), ExitStack()

    def serve(self, variant: str, level: float) -> Backend:
        self._client.close()
        if variant != self._variant:
            self.close()
            self._endpoint = self._engine.enter_context(self._reach(variant))
            self._variant = variant
        assert self._endpoint is not None
        backend = ServerBackend(self._endpoint, self._tokenizer)
        self._client.callback(backend.close)
        return backend

    def compare(self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> str:
        return "mismatch"

    def close(self) -> None:
        self._variant = None
        self._client.close()
        self._engine.close()


def running_servers(endpoints: dict[str, Endpoint]) -> Callable[[str], AbstractContextManager[Endpoint]]:
    """Servers that somebody else started, by variant."""
    return lambda variant: nullcontext(endpoints[variant])


def launching(
    engine: Server,
    plan: Callable[[], Launch],
    drafts: dict[str, int],
    endpoint: Endpoint,
    logs: Path,
    timeout: float,
) -> Callable[[str], AbstractContextManager[Endpoint]]:
    """An engine started for each variant, with so many draft tokens; `logs` gets its output."""

    @contextmanager
    def reach(variant: str) -> Iterator[Endpoint]:
        planned = replace(plan(), drafts=drafts[variant], port=free_port())
        here = replace(endpoint, url=f"http://127.0.0.1:{planned.port}")
        log = logs / f"{engine.name}-{variant}.log"
        with launched(engine.command(planned), here.root + engine.health, log, timeout, engine.environment(planned)):
            yield here

    return reach

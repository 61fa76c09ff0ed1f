"""The engine of this process as a backend, sized so that a level's requests fit."""

from __future__ import annotations

import gc
import importlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.backends.base import Acceptance, Backend, ExternalEngine, Launch, RequestStats, Speculation
from outrider.backends.launch import free_port, launched
from outrider.backends.openai import Endpoint, ServerBackend
from outrider.backends.transformers import HfDecoder
from outrider.drafters.base import Drafter, TreeDrafter, draft_slots
from outrider.engine.batch import Output, Request, StepRecord
from outrider.engine.engine import Engine
from outrider.engine.scheduler import EngineConfig
from outrider.evaluation.evaluate import compare_by, compare_greedy
from outrider.loadtest.load import Compare, Serve
from outrider.loadtest.variants import NO_SPECULATION, Pruned, Shortened, Variant
from outrider.target.model import Target


def engine_config(longest: int, users: int, token_budget: int) -> EngineConfig:
    """Room for `users` requests of at most `longest` tokens at once, none of which is ever preempted.

    Raises:
        ValueError: `token_budget` is below `users`.
    """
    blocks = users * -(-longest // EngineConfig.block_size)
    return EngineConfig(users, token_budget, num_blocks=max(blocks, EngineConfig.num_blocks))


def drafter_of(variant: Variant, drafter: Drafter) -> Drafter | None:
    """What drafts for a variant: this drafter, no more of it than the variant wants, or none."""
    if variant.drafts == 0:
        return None
    if variant.drafts == draft_slots(drafter):
        return drafter
    if isinstance(drafter, TreeDrafter):
        return Pruned(drafter, variant.drafts)
    return Shortened(drafter, variant.drafts)


def local_engines(
    target: Target, drafter: Drafter, variants: Sequence[Variant], config_at: Callable[[float], EngineConfig]
) -> Serve:
    """A new engine for every point; `config_at` a level."""
    by_name = {variant.name: variant for variant in variants}

    def serve(name: str, level: float) -> Engine:
        variant = by_name[name]
        gc.collect()  # the last engine's memory comes back now, not inside the window
        return Engine(target, drafter_of(variant, drafter), variant.policy, variant.gate, config_at(level))

    return serve


# ----------------------------------------------------------------------------
# One request after the other, through a function that decodes one prompt: what a library without an engine gives.
#
#     decode(prompt, most) -> rounds: [tokens], [tokens, tokens, tokens], [tokens], ...        each as soon as it is
#     there
#
# A round's tokens are one output, so every request's accepted length is its tokens / its rounds. Users beyond the first
# wait for their turn, and their wait counts as time to the first token.
# ----------------------------------------------------------------------------


Decode = Callable[[Sequence[int], int], Iterator[list[int]]]


class SequentialBackend:
    """A queue before `decode`, which is given prompt tokens and the most tokens of the response.

    It yields the tokens of each round, stop token included, and is closed early where a request is cancelled.
    """

    last: StepRecord | None = None

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._waiting: deque[Request] = deque()
        self._current: tuple[str, Iterator[list[int]]] | None = None
        self._told: dict[str, list[int]] = {}  # tokens of every round, by request
        self._rounds: list[int] = []  # tokens of every round since the mark

    @property
    def idle(self) -> bool:
        return self._current is None and not self._waiting

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def cancel(self, id: str) -> bool:
        if self._current is not None and self._current[0] == id:
            close = getattr(self._current[1], "close", None)
            if close is not None:
                close()
            self._current = None
            return True
        waiting = len(self._waiting)
        self._waiting = deque(request for request in self._waiting if request.id != id)
        return len(self._waiting) < waiting

    def step(self) -> list[Output]:
        if self._current is None:
            if not self._waiting:
                return []
            request = self._waiting.popleft()
            self._current = request.id, self._decode(request.prompt, request.rules.max_new_tokens)
            self._told[request.id] = []
        id, rounds = self._current
        tokens = next(rounds, None)
        if tokens is None:
            self._current = None
            return [Output(id, [], "", "stop")]
        self._told[id].append(len(tokens))
        self._rounds.append(len(tokens))
        return [Output(id, tokens, "", None)]

    def start_window(self) -> None:
        self._rounds.clear()

    def acceptance(self) -> Acceptance:
        return Acceptance(_mean(self._rounds), rounds=len(self._rounds))

    def request_stats(self, id: str) -> RequestStats:
        return RequestStats(None, _mean(self._told.pop(id)))


def _mean(rounds: Sequence[int]) -> float | None:
    return sum(rounds) / len(rounds) if rounds else None


# ----------------------------------------------------------------------------
# What a sweep needs of one kind of engine: an idle backend for a variant and a level, and a judge of its responses.
#
#     local           none, fixed-K, threshold, prefix, ...    this process's engine (loadtest/sources.py)
#     transformers    none, prompt-lookup, assisted            transformers' generate, one request at a time
#     servers         none, fixed-K, or none, speculative      engines over HTTP, started here or elsewhere
#     mlx             none, speculative                        outrider.mlx, one request at a time
#
# "none" is the baseline of all of them: the same engine without speculation, in the same run.
# ----------------------------------------------------------------------------


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
    engine: ExternalEngine,
    plan: Callable[[], Launch],
    speculations: dict[str, Speculation | None],
    endpoint: Endpoint,
    logs: Path,
    timeout: float,
) -> Callable[[str], AbstractContextManager[Endpoint]]:
    """An engine started for each variant, drafting as it says; `logs` gets its output."""

    @contextmanager
    def reach(variant: str) -> Iterator[Endpoint]:
        planned = replace(plan(), speculation=speculations[variant], port=free_port())
        here = replace(endpoint, url=f"http://127.0.0.1:{planned.port}")
        log = logs / f"{engine.name}-{variant}.log"
        with launched(engine.command(planned), here.root + engine.health, log, timeout, engine.environment(planned)):
            yield here

    return reach


# ----------------------------------------------------------------------------
# MLX as a backend: `outrider.mlx` decodes one prompt, here it takes the load.
#
# `outrider.mlx.bench.decoder(target, drafter_directory or None)` returns a `Decode` (sequential.py): a function of
# prompt tokens and the most tokens of the response that yields the tokens of each round, greedily, stop token included.
# ----------------------------------------------------------------------------


_ENTRY = "outrider.backends.mlx.drafter"


def mlx_source(target: str, drafter: Path) -> DecoderSource:
    """Plain and speculative decoding by MLX.

    Raises:
        ValueError: MLX is not installed.
    """
    try:
        decoder = importlib.import_module(_ENTRY).decoder
    except ImportError as error:
        raise ValueError(f"--backend mlx needs MLX ({error}): pip install 'outrider[mlx]'.") from error
    return DecoderSource({NO_SPECULATION: decoder(target, None), SPECULATIVE: decoder(target, drafter)})

"""The engines that a load test measures, each under variants of its speculation.

    local           none, fixed-K, threshold, prefix, ...    our engine in this process (backends/local.py)
    transformers    none, prompt-lookup, assisted            transformers' generate, one request at a time
    servers         none, fixed-K, or none, speculative      engines over HTTP, started here or elsewhere
    mlx             none, speculative                        MLX, one request at a time

"none" is the baseline of all of them: the same engine without speculation, in the same run.
"""

from __future__ import annotations

import importlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.backends.base import Acceptance, Backend, ExternalEngine, Launch, RequestStats, Speculation
from outrider.backends.launch import free_port, launched
from outrider.backends.local import NO_SPECULATION, fixed_length
from outrider.backends.openai import Endpoint, ServerBackend
from outrider.backends.transformers import HfDecoder
from outrider.decoding.request import Output, Request, StepRecord
from outrider.evaluation.evaluate import compare_by, compare_coupled, compare_greedy
from outrider.evaluation.loadtest.load import Ask, Compare, Serve
from outrider.target.model import Target

SPECULATIVE, PROMPT_LOOKUP, ASSISTED = "speculative", "prompt-lookup", "assisted"


@dataclass(frozen=True)
class MeasuredEngine:
    """An engine and the variants it is measured under.

    Attributes:
        serve: gives an idle backend for a variant and a level.
        compare: how a response compares with plain decoding's: same, tie or mismatch; a tie is found by the logits
            only, so without them every difference is a mismatch.
        exact: responses that differ from plain decoding's are a bug of ours, not a rounding.
        grouped: whether changing the variant is expensive, as where it starts an engine.
        settings: what else decides its figures, and the type of the weights (`dtype`) where it is known.
        close: ends what still runs.
    """

    serve: Serve
    variants: Sequence[str]
    compare: Compare = lambda ask, plain, other: "mismatch"
    exact: bool = False
    grouped: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


def among(names: Sequence[str] | None, there: list[str]) -> list[str]:
    """The variants asked for, all that there are by default; the one without speculation in any case.

    Raises:
        ValueError: one of them is not there.
    """
    if names is None:
        return there
    if unknown := [name for name in names if name not in there]:
        raise ValueError(f"no variant {unknown[0]!r} here; there are {', '.join(there)}.")
    return list(dict.fromkeys([*there[:1], *names])) if there[0] == NO_SPECULATION else list(names)


def compare_asked(target: Target, ask: Ask, plain: Sequence[int], other: Sequence[int]) -> str:
    """How a greedy or coupled response compares with plain decoding's: same, tie or mismatch."""
    if ask.params.coupled:
        return compare_coupled(target, ask.prompt, plain, other=other, params=ask.params)
    return compare_greedy(target, ask.prompt, plain, speculative=other)


# ----------------------------------------------------------------------------
# One request after the other, through a function that decodes it: what a library without an engine gives.
#
#     decode(request) -> [tokens], [tokens, tokens, tokens], [tokens], ...        each round as soon as it is there
#
# A round's tokens are one output, so every request's accepted length is its tokens / its rounds. Users beyond the first
# wait for their turn, and their wait counts as time to the first token.
# ----------------------------------------------------------------------------


Decode = Callable[[Request], Iterator[list[int]]]


class SequentialBackend:
    """Requests decoded one after another by a function.

    `decode` yields the tokens of each round, stop token included, and is closed early where a request is cancelled.
    """

    last: StepRecord | None = None

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._waiting: deque[Request] = deque()
        self._current: tuple[str, Iterator[list[int]]] | None = None
        self._sizes: dict[str, list[int]] = {}  # tokens of every round, by request
        self._rounds: list[int] = []  # tokens of every round of the window

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
            self._current = request.id, self._decode(request)
            self._sizes[request.id] = []
        id, rounds = self._current
        tokens = next(rounds, None)
        if tokens is None:
            self._current = None
            return [Output(id, [], "", finish="stop")]
        self._sizes[id].append(len(tokens))
        self._rounds.append(len(tokens))
        return [Output(id, tokens, "", finish=None)]

    def start_window(self) -> None:
        self._rounds.clear()

    def acceptance(self) -> Acceptance:
        counts = Counter(size - 1 for size in self._rounds)
        histogram = tuple(counts[accepted] for accepted in range(max(counts, default=0) + 1))
        return Acceptance(_mean(self._rounds), rounds=len(self._rounds), histogram=histogram)

    def request_stats(self, id: str) -> RequestStats:
        return RequestStats(None, _mean(self._sizes.pop(id)))


def _mean(rounds: Sequence[int]) -> float | None:
    return sum(rounds) / len(rounds) if rounds else None


def transformers_engine(
    model: Any,
    eos_ids: Sequence[int],
    drafts: int,
    assistant: Any | None,
    *,
    names: Sequence[str] | None = None,
    settings: dict[str, Any] | None = None,
) -> MeasuredEngine:
    """transformers' generate: plain, with prompt lookup of `drafts` tokens, and assisted where there is an assistant.

    Raises:
        ValueError: no such variant.
    """
    decoders = {
        NO_SPECULATION: HfDecoder(model, eos_ids),
        PROMPT_LOOKUP: HfDecoder(model, eos_ids, lookup=drafts),
    }
    if assistant is not None:
        decoders[ASSISTED] = HfDecoder(model, eos_ids, assistant=assistant)

    @torch.inference_mode()
    def last_logits(tokens: Sequence[int]) -> Tensor:
        logits_BTV: Tensor = model(torch.tensor([list(tokens)], device=model.device), logits_to_keep=1).logits
        return logits_BTV[0, -1]

    variants = among(names, list(decoders))
    return MeasuredEngine(
        _sequential({name: partial(_greedily, decoder) for name, decoder in decoders.items()}),
        variants,
        lambda ask, plain, other: compare_by(last_logits, ask.prompt, plain, other=other),
        settings=settings or {},
    )


def _greedily(decoder: HfDecoder, request: Request) -> Iterator[list[int]]:
    return decoder(request.prompt, request.rules.max_new_tokens)


def mlx_engine(
    target: str, drafter: Path, *, names: Sequence[str] | None = None, settings: dict[str, Any] | None = None
) -> MeasuredEngine:
    """Plain and speculative decoding by MLX.

    Raises:
        ValueError: MLX is not installed, or there is no such variant.
    """
    try:
        decoder = importlib.import_module("outrider.backends.mlx.drafter").decoder
    except ImportError as error:
        raise ValueError(f"--backend mlx needs MLX ({error}): pip install 'outrider[mlx]'.") from error
    decoders = {NO_SPECULATION: decoder(target, None), SPECULATIVE: decoder(target, drafter)}
    return MeasuredEngine(_sequential(decoders), among(names, list(decoders)), settings=settings or {})


def _sequential(decoders: dict[str, Decode]) -> Serve:
    return lambda variant, level: SequentialBackend(decoders[variant])


# ----------------------------------------------------------------------------
# Engines over HTTP, one server at a time: those that run already, and those that are started for each variant.
# ----------------------------------------------------------------------------


class _Servers:
    """Clients of servers: `reach(variant)` is left before the next one is entered."""

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

    def close(self) -> None:
        self._variant = None
        self._client.close()
        self._engine.close()


def running_servers(
    endpoints: dict[str, Endpoint],
    tokenizer: PreTrainedTokenizerBase,
    *,
    names: Sequence[str] | None = None,
    settings: dict[str, Any] | None = None,
) -> MeasuredEngine:
    """Servers that somebody else started, by variant.

    Raises:
        ValueError: no such variant.
    """
    servers = _Servers(lambda variant: nullcontext(endpoints[variant]), tokenizer)
    variants = among(names, sorted(endpoints))
    return MeasuredEngine(servers.serve, variants, settings=settings or {}, close=servers.close)


def launched_engine(
    engine: ExternalEngine,
    launch: Launch,
    whole: Speculation,
    endpoint: Endpoint,
    tokenizer: PreTrainedTokenizerBase,
    *,
    names: Sequence[str] | None,
    capacity: Callable[[], tuple[int, int]],
    logs: Path,
    timeout: float,
    settings: dict[str, Any],
) -> MeasuredEngine:
    """An engine that is started for each variant: none, and fixed-K with so many drafts.

    Whatever is wrong with a variant is found here, before the baseline is measured, which can take an hour.

    Args:
        whole: speculation with as many drafts as the drafter makes.
        capacity: (users, tokens of the longest request), asked for when an engine starts.
        logs: directory for what started engines print.
        timeout: seconds until a started engine must serve.

    Raises:
        ValueError: no such variant, or the engine refuses the drafter.
    """
    speculations = {
        name: None if name == NO_SPECULATION else replace(whole, drafts=fixed_length(name, whole.drafts))
        for name in dict.fromkeys([NO_SPECULATION, *(names or [f"fixed-{whole.drafts}"])])
    }
    for speculation in speculations.values():
        engine.command(replace(launch, speculation=speculation))

    @contextmanager
    def reach(variant: str) -> Iterator[Endpoint]:
        users, context = capacity()
        planned = replace(launch, users=users, context=context, speculation=speculations[variant], port=free_port())
        here = replace(endpoint, url=f"http://127.0.0.1:{planned.port}")
        log = logs / f"{engine.name}-{variant}.log"
        with launched(
            engine.command(planned),
            here.root + engine.health,
            log,
            timeout=timeout,
            environment=engine.environment(planned),
        ):
            yield here

    servers = _Servers(reach, tokenizer)
    return MeasuredEngine(servers.serve, list(speculations), grouped=True, settings=settings, close=servers.close)

"""Where a sweep gets its backends: an idle one for a variant and a level, and a judge of its responses.

    local           none, fixed-K, threshold, prefix, ...    this process's engine (backends/local.py)
    transformers    none, prompt-lookup, assisted            transformers' generate, one request at a time
    servers         none, fixed-K, or none, speculative      engines over HTTP, started here or elsewhere
    mlx             none, speculative                        MLX, one request at a time

"none" is the baseline of all of them: the same engine without speculation, in the same run.
"""

from __future__ import annotations

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
from outrider.backends.local import NO_SPECULATION
from outrider.backends.openai import Endpoint, ServerBackend
from outrider.backends.transformers import HfDecoder
from outrider.engine.batch import Output, Request, StepRecord
from outrider.evaluation.evaluate import compare_by, compare_greedy
from outrider.loadtest.load import Compare, Serve
from outrider.target.model import Target

# ----------------------------------------------------------------------------
# One request after the other, through a function that decodes one prompt: what a library without an engine gives.
#
#     decode(prompt, most) -> [tokens], [tokens, tokens, tokens], [tokens], ...        each round as soon as it is there
#
# A round's tokens are one output, so every request's accepted length is its tokens / its rounds. Users beyond the first
# wait for their turn, and their wait counts as time to the first token.
# ----------------------------------------------------------------------------


Decode = Callable[[Sequence[int], int], Iterator[list[int]]]


class SequentialBackend:
    """Requests decoded one after another by a function of prompt tokens and the most tokens of the response.

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
            self._current = request.id, self._decode(request.prompt, request.rules.max_new_tokens)
            self._sizes[request.id] = []
        id, rounds = self._current
        tokens = next(rounds, None)
        if tokens is None:
            self._current = None
            return [Output(id, [], "", "stop")]
        self._sizes[id].append(len(tokens))
        self._rounds.append(len(tokens))
        return [Output(id, tokens, "", None)]

    def start_window(self) -> None:
        self._rounds.clear()

    def acceptance(self) -> Acceptance:
        return Acceptance(_mean(self._rounds), rounds=len(self._rounds))

    def request_stats(self, id: str) -> RequestStats:
        return RequestStats(None, _mean(self._sizes.pop(id)))


def _mean(rounds: Sequence[int]) -> float | None:
    return sum(rounds) / len(rounds) if rounds else None


SPECULATIVE, PROMPT_LOOKUP, ASSISTED = "speculative", "prompt-lookup", "assisted"


class BackendSource(Protocol):
    """Gives backends by variant and level.

    `exact`: greedy responses that differ from plain decoding are a bug of ours, not a rounding.
    """

    exact: bool

    def serve(self, variant: str, level: float) -> Backend:
        """An idle backend."""
        ...

    def compare(self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> str:
        """How a response compares with plain decoding's: same, tie or mismatch; a tie is found by the logits only."""
        ...

    def close(self) -> None: ...


@dataclass
class LocalBackends:
    """Our engine, made by `local_engines`."""

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
class DecoderBackends:
    """Functions that decode one prompt, by variant, each behind a queue. `judge` None: any difference is a mismatch."""

    decoders: dict[str, Decode]
    judge: Compare | None = None
    exact = False

    def serve(self, variant: str, level: float) -> Backend:
        return SequentialBackend(self.decoders[variant])

    def compare(self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> str:
        return "mismatch" if self.judge is None else self.judge(prompt, plain, other)

    def close(self) -> None:
        """Nothing outlives its request."""


def transformers_backends(model: Any, eos_ids: Sequence[int], drafts: int, assistant: Any | None) -> DecoderBackends:
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

    return DecoderBackends(decoders, partial(compare_by, last_logits))


class ServerBackends:
    """Clients of servers, one server at a time: `reach(variant)` is left before the next one is entered."""

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
    """Reaches servers that somebody else started, by variant."""
    return lambda variant: nullcontext(endpoints[variant])


def launching(
    engine: ExternalEngine,
    plan: Callable[[], Launch],
    speculations: dict[str, Speculation | None],
    endpoint: Endpoint,
    logs: Path,
    timeout: float,
) -> Callable[[str], AbstractContextManager[Endpoint]]:
    """Reaches an engine that is started for each variant, with its speculation; `logs` gets its output."""

    @contextmanager
    def reach(variant: str) -> Iterator[Endpoint]:
        planned = replace(plan(), speculation=speculations[variant], port=free_port())
        here = replace(endpoint, url=f"http://127.0.0.1:{planned.port}")
        log = logs / f"{engine.name}-{variant}.log"
        with launched(engine.command(planned), here.root + engine.health, log, timeout, engine.environment(planned)):
            yield here

    return reach


_MLX = "outrider.backends.mlx.drafter"


def mlx_backends(target: str, drafter: Path) -> DecoderBackends:
    """Plain and speculative decoding by MLX.

    Raises:
        ValueError: MLX is not installed.
    """
    try:
        decoder = importlib.import_module(_MLX).decoder
    except ImportError as error:
        raise ValueError(f"--backend mlx needs MLX ({error}): pip install 'outrider[mlx]'.") from error
    return DecoderBackends({NO_SPECULATION: decoder(target, None), SPECULATIVE: decoder(target, drafter)})

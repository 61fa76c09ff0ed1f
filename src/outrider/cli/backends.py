"""`--backend KIND` and what belongs to it: which engine is measured, under which variants, started how.

local                          our engine; variants as in benchmark/variants.py
transformers                   none, prompt-lookup; assisted where --assistant names a model
openai, vllm, sglang, ...      none (--baseline-url) and speculative (--base-url): servers that run already;
                               with --launch none and fixed-K: started here, one at a time
mlx                            none, speculative
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from outrider.benchmark.backends.engines import ENGINES, Engine, Launch
from outrider.benchmark.backends.mlx import mlx_source
from outrider.benchmark.backends.server import Endpoint
from outrider.benchmark.backends.sources import (
    ASSISTED,
    PROMPT_LOOKUP,
    SPECULATIVE,
    ServerSource,
    Source,
    launching,
    running_servers,
    transformers_source,
)
from outrider.benchmark.backends.transformers_models import load_causal_lm
from outrider.benchmark.variants import NO_SPECULATION, fixed_length
from outrider.cli.drafters import DrafterChoice
from outrider.cli.runtime import default_dtype
from outrider.data.chat import Chat
from outrider.data.conversations import Message
from outrider.drafters.ngram import NgramConfig
from outrider.drafters.standalone import StandaloneConfig
from outrider.formats import load_drafter
from outrider.target.load import count_layers
from outrider.target.resolve import resolve_model

Kind = Literal["local", "transformers", "openai", "vllm", "sglang", "llama.cpp", "mlx"]
ONE_AT_A_TIME = ("transformers", "mlx")
API_KEY = "OUTRIDER_API_KEY"


@dataclass(frozen=True)
class ServerOptions:
    """Which servers, and how they are started where they are. See the options of `outrider bench`."""

    base_url: str | None = None
    baseline_url: str | None = None
    served_model: str | None = None
    chat: bool = False
    launch: bool = False
    engine_python: str = sys.executable
    engine_command: str | None = None
    engine_args: str = ""
    engine_target: str | None = None
    engine_drafter: str | None = None
    startup_timeout: float = 600.0


@dataclass(frozen=True)
class Chosen:
    """A source and the variants it is measured under; `grouped` where changing the variant is expensive."""

    source: Source
    variants: list[str]
    grouped: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def choose_transformers(
    target: str, chat: Chat, assistant: str | None, drafts: int, names: list[str] | None, device: str
) -> Chosen:
    """transformers' generate.

    Raises:
        ValueError: no such model or variant.
    """
    dtype = default_dtype(device)
    model = load_causal_lm(target, device, dtype)
    helper = None if assistant is None else load_causal_lm(assistant, device, dtype)
    there = [NO_SPECULATION, PROMPT_LOOKUP, *([] if helper is None else [ASSISTED])]
    source = transformers_source(model, sorted(chat.eos_ids), drafts, helper)
    return Chosen(source, _among(names, there), settings={"assistant": assistant, "prompt_lookup": drafts})


def choose_mlx(target: str, choice: DrafterChoice, names: list[str] | None) -> Chosen:
    """Apple's MLX.

    Raises:
        ValueError: it is not installed, or there is no trained drafter.
    """
    if choice.directory is None:
        raise ValueError(f"--backend mlx decodes with a trained drafter, not with {choice.kind}: give its directory.")
    return Chosen(mlx_source(target, choice.directory), _among(names, [NO_SPECULATION, SPECULATIVE]))


def choose_servers(
    kind: str,
    options: ServerOptions,
    chat: Chat,
    choice: Callable[[], DrafterChoice],
    names: list[str] | None,
    messages_of: Callable[[Sequence[int]], list[Message]],
    thinking: bool,
    room: Callable[[], tuple[int, int]],
    logs: Path,
    device: str,
) -> Chosen:
    """Engines over HTTP.

    Args:
        choice: the drafter, asked for only where an engine is started with it.
        room: (users, tokens of the longest request), asked for when an engine starts.

    Raises:
        ValueError: no server is named and none is to be started, or the engine does not know such drafters.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"--backend {kind}: one process asks a server; torchrun is for local, transformers and mlx.")
    engine = next(engine for engine in ENGINES if engine.name == kind)
    endpoint = Endpoint(
        options.base_url or "http://127.0.0.1",
        options.served_model,
        os.environ.get(API_KEY),
        engine.extra,
        engine.metrics,
        messages_of if options.chat else None,
        thinking,
    )
    if options.launch:
        if options.base_url or options.baseline_url:
            raise ValueError("--launch starts the servers itself: leave out --base-url and --baseline-url.")
        return _launched(engine, options, chat, choice(), names, endpoint, room, logs, device)
    if options.base_url is None:
        raise ValueError(
            f"--backend {kind}: name a running server (--base-url, and --baseline-url for one without speculation), or "
            "let it be started (--launch)."
        )
    endpoints = {SPECULATIVE: endpoint}
    if options.baseline_url is not None:
        endpoints[NO_SPECULATION] = Endpoint(**{**vars(endpoint), "url": options.baseline_url})
    servers = {"base_url": options.base_url, "baseline_url": options.baseline_url, "chat": options.chat}
    source = ServerSource(running_servers(endpoints), chat.tokenizer)
    return Chosen(source, _among(names, sorted(endpoints)), settings=servers)


def _launched(
    engine: Engine,
    options: ServerOptions,
    chat: Chat,
    choice: DrafterChoice,
    names: list[str] | None,
    endpoint: Endpoint,
    room: Callable[[], tuple[int, int]],
    logs: Path,
    device: str,
) -> Chosen:
    algorithm, gamma, drafter = _described(choice, chat.name)
    wanted = list(dict.fromkeys([NO_SPECULATION, *(names or [f"fixed-{gamma}"])]))
    drafts = {name: 0 if name == NO_SPECULATION else fixed_length(name, gamma) for name in wanted}
    llama = engine.name == "llama.cpp"
    target = options.engine_target or (chat.name if llama else str(resolve_model(chat.name)))

    def plan() -> Launch:
        users, context = room()
        return Launch(
            target,
            options.engine_drafter or drafter,
            algorithm,
            gamma,
            0,
            str(default_dtype(device)).removeprefix("torch."),
            users,
            context,
            options.engine_python,
            options.engine_command,
            tuple(shlex.split(options.engine_args)),
        )

    source = ServerSource(launching(engine, plan, drafts, endpoint, logs, options.startup_timeout), chat.tokenizer)
    settings = {"engine_args": options.engine_args, "chat": options.chat, "engine_drafter": options.engine_drafter}
    return Chosen(source, wanted, grouped=True, settings=settings)


def _described(choice: DrafterChoice, target: str) -> tuple[str, int, str | None]:
    """(algorithm, most drafts, what an engine loads) of a drafter for a target's id or directory."""
    if choice.directory is not None:
        module = load_drafter(choice.directory, num_target_layers=count_layers(target)).drafter
        return module.algorithm, int(module.config.gamma), str(choice.directory)
    default = NgramConfig.gamma if choice.kind == "ngram" else StandaloneConfig.gamma
    return choice.kind, choice.gamma or default, str(resolve_model(choice.where)) if choice.kind == "lm" else None


def _among(names: list[str] | None, there: list[str]) -> list[str]:
    """The variants asked for, all that there are by default."""
    if names is None:
        return there
    if unknown := [name for name in names if name not in there]:
        raise ValueError(f"no variant {unknown[0]!r} here; there are {', '.join(there)}.")
    return list(dict.fromkeys([*there[:1], *names])) if there[0] == NO_SPECULATION else names

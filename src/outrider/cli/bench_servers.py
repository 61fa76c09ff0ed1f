"""`--backend openai|vllm|sglang|llama.cpp`: servers that run already, or engines that are started here.

--launch   drafter -> read, and held to what the engine loads -> a command for every variant -> only then measured

Whatever is wrong with a drafter is found before the baseline is measured, which can take an hour.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from outrider.benchmark.backends.engines import SERVERS, Launch, Server
from outrider.benchmark.backends.server import Endpoint
from outrider.benchmark.backends.sources import SPECULATIVE, ServerSource, launching, running_servers
from outrider.benchmark.variants import NO_SPECULATION, fixed_length
from outrider.cli.backends import Chosen, among
from outrider.cli.drafters import DrafterChoice
from outrider.cli.runtime import default_dtype
from outrider.data.chat import Chat
from outrider.drafters.ngram import NgramConfig
from outrider.drafters.standalone import StandaloneConfig
from outrider.formats.checkpoint import empty_module, read_config, read_parts
from outrider.formats.engines import drafting_of, engine_of
from outrider.formats.target_facts import embedding_factor
from outrider.target.load import count_layers
from outrider.target.resolve import dtype_name, resolve_model

API_KEY = "OUTRIDER_API_KEY"
EngineType = Literal["float32", "bfloat16", "float16"]
_GGUF = "llama.cpp"  # reads files of its own, converted from the checkpoints that are named beside them


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
    engine_dtype: EngineType | None = None
    startup_timeout: float = 600.0


@dataclass(frozen=True)
class Wanted:
    """What is to be measured on servers.

    Args:
        chat: of the target.
        choice: the drafter, asked for only where an engine is started with it.
        names: of variants; None: all there are.
        chat_of: what a prompt is asked with where servers render prompts themselves.
        room: (users, tokens of the longest request), asked for when an engine starts.
        logs: directory for what started engines print.
        device: of our own process, which decides a started engine's type where nothing else does.
    """

    chat: Chat
    choice: Callable[[], DrafterChoice]
    names: list[str] | None
    chat_of: Callable[[Sequence[int]], dict[str, Any]]
    thinking: bool
    room: Callable[[], tuple[int, int]]
    logs: Path
    device: str


def choose_servers(kind: str, options: ServerOptions, wanted: Wanted) -> Chosen:
    """Engines over HTTP.

    Raises:
        ValueError: no server is named and none is to be started, or the engine does not load this drafter.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"--backend {kind}: one process asks a server; torchrun is for local, transformers and mlx.")
    engine = next(engine for engine in SERVERS if engine.name == kind)
    endpoint = Endpoint(
        options.base_url or "http://127.0.0.1",
        options.served_model,
        os.environ.get(API_KEY),
        engine.extra,
        engine.metrics,
        wanted.chat_of if options.chat else None,
        wanted.thinking if wanted.thinking or kind != "openai" else None,  # not every server knows the field
    )
    if options.launch:
        if options.base_url or options.baseline_url:
            raise ValueError("--launch starts the servers itself: leave out --base-url and --baseline-url.")
        return _launched(engine, options, wanted, endpoint)
    if options.base_url is None:
        raise ValueError(
            f"--backend {kind}: name a running server (--base-url, and --baseline-url for one without speculation), or "
            "let it be started (--launch)."
        )
    endpoints = {SPECULATIVE: endpoint}
    if options.baseline_url is not None:
        endpoints[NO_SPECULATION] = replace(endpoint, url=options.baseline_url)
    servers = {"base_url": options.base_url, "baseline_url": options.baseline_url, "chat": options.chat}
    source = ServerSource(running_servers(endpoints), wanted.chat.tokenizer)
    return Chosen(source, among(wanted.names, sorted(endpoints)), settings=servers)


def _launched(engine: Server, options: ServerOptions, wanted: Wanted, endpoint: Endpoint) -> Chosen:
    gguf, target = engine.name == _GGUF, wanted.chat.name
    launch = Launch(
        target=options.engine_target or (target if gguf else str(resolve_model(target))),
        drafter=options.engine_drafter,
        algorithm="",
        drafts=0,
        port=0,
        dtype=options.engine_dtype or dtype_name(default_dtype(wanted.device)),
        users=1,
        context=1,
        python=options.engine_python,
        executable=options.engine_command,
        extra=tuple(shlex.split(options.engine_args)),
    )
    engine.command(launch)  # what cannot be started needs no drafter either
    launch = _drafting(launch, engine.name, wanted.choice(), target)
    gamma = launch.drafts
    variants = list(dict.fromkeys([NO_SPECULATION, *(wanted.names or [f"fixed-{gamma}"])]))
    drafts = {name: 0 if name == NO_SPECULATION else fixed_length(name, gamma) for name in variants}
    for count in drafts.values():  # what a command refuses, it refuses now
        engine.command(replace(launch, drafts=count))

    def plan() -> Launch:
        users, context = wanted.room()
        return replace(launch, users=users, context=context)

    servers = launching(engine, plan, drafts, endpoint, wanted.logs, options.startup_timeout)
    settings: dict[str, Any] = {"engine_args": options.engine_args, "chat": options.chat}
    settings |= {"engine_drafter": options.engine_drafter, "dtype": None if gguf else launch.dtype}
    return Chosen(ServerSource(servers, wanted.chat.tokenizer), variants, grouped=True, settings=settings)


def _drafting(launch: Launch, engine: str, choice: DrafterChoice, target: str) -> Launch:
    """With the drafter, and with as many drafts as it makes.

    Raises:
        ValueError: not a drafter, or not one that the engine loads as it is.
    """
    if choice.directory is not None:
        return _trained(launch, engine, choice.directory, target)
    if choice.kind == "ngram":
        return replace(launch, algorithm="ngram", drafts=choice.gamma or NgramConfig.gamma, drafter=None)
    drafter = launch.drafter or (choice.where if engine == _GGUF else str(resolve_model(choice.where)))
    return replace(launch, algorithm=choice.kind, drafts=choice.gamma or StandaloneConfig.gamma, drafter=drafter)


def _trained(launch: Launch, engine: str, directory: Path, target: str) -> Launch:
    """As `_drafting`, for a directory; `target` says how deep it is where config.json does not."""
    parts = read_parts(directory, count_layers(target))
    empty_module(parts, directory)
    name, served = parts.method.name, engine_of(engine)
    try:
        if launch.drafter is None and engine != _GGUF:
            served.check_loads(parts, read_config(directory)[1], embedding_factor(target))
        elif name in served.dialects:  # what --engine-drafter names was made of it
            served.limits(parts, embedding_factor(target))
    except ValueError as error:
        raise ValueError(f"--launch with the drafter {directory}: {error}") from error
    told = drafting_of(parts, launch.drafter or str(directory))
    return replace(
        launch,
        algorithm=told.method,
        drafts=told.drafts,
        drafter=told.drafter,
        reduced_vocabulary=told.reduced_vocabulary,
        mixed=told.mixed,
    )

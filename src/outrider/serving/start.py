"""Starts our engine behind OpenAI's API."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TypeVar

from outrider.api.drafter import choose_drafter
from outrider.api.model import Model, load
from outrider.api.scheduling import by_profile
from outrider.config import API_KEY
from outrider.decoding.cost import Profile
from outrider.decoding.engine import Engine, default_config
from outrider.decoding.profile import MachineProfile, setting_of
from outrider.decoding.scheduler import EngineConfig
from outrider.serving.app import Limits, Server
from outrider.serving.config import LOOPBACK, ServeConfig
from outrider.serving.connection import http_server
from outrider.serving.metrics import ServerMetrics
from outrider.serving.worker import Worker
from outrider.target.model import Target

Say = Callable[[str], None]
_Result = TypeVar("_Result")


def run_server(config: ServeConfig, say: Say) -> bool:
    """Serve until the process is told to stop; whether the server came up."""
    key = os.environ.get(API_KEY)
    if key is not None and (not key.isascii() or not key.strip()):
        raise ValueError(f"{API_KEY} must be ASCII text, or not set.")
    if key is None and config.host not in LOOPBACK:
        say(f"warning: anyone who reaches {config.host} may use this server; set {API_KEY} to ask for a key.")
    choice = choose_drafter(config.drafter, config.target, config.thinking)
    if config.token_budget is not None:  # refused before minutes of loading
        EngineConfig(config.max_requests or EngineConfig.max_requests, config.token_budget)

    def load_and_build() -> tuple[Model, Server]:
        model = load(
            config.target,
            choice,
            config.machine.device,
            thinking=config.thinking,
            tree=config.tree,
            lookup=config.lookup,
            lookup_responses=config.lookup_responses,
            say=say,
        )
        return model, build_server(  # it may run forwards, to measure what a step costs
            model,
            engine_config(model, config, say),
            config.profile,
            max_waiting=config.max_waiting,
            max_new_tokens=config.max_new_tokens,
            shutdown_seconds=config.shutdown_timeout,
            name=config.name,
            thinking=config.thinking,
        )

    with _bind(config.host, config.port) as address:  # before minutes of loading
        model, server = _call_in_thread(load_and_build)
        drafted = "plain decoding" if model.drafter is None else f"drafter {model.drafter.name}"
        url = f"http://{config.host}:{config.port}"
        say(f"serving {server.name} ({drafted}) at {url}/v1; {url}/ shows its work")
        running = http_server(server, key, host=config.host, port=config.port)
        with suppress(KeyboardInterrupt):  # raised again once the server has ended in order
            running.run(sockets=[address])
    return running.started


def engine_config(model: Model, config: ServeConfig, say: Say) -> EngineConfig:
    """The engine's own sizes for a loaded model, but for those that are given; it says why it has no prefix cache."""
    prefix_cache, most = config.prefix_cache, config.max_requests or EngineConfig.max_requests
    if prefix_cache:
        try:
            model.target.check_prefixes()
        except ValueError as error:
            say(f"prompts are read whole: {error}")
            prefix_cache = False
    drafter = model.drafter if prefix_cache else None
    usual = default_config(model.target, most, 0 if drafter is None else len(drafter.drafter.aux_layers))
    blocks = None if config.kv_tokens is None else config.kv_tokens // usual.block_size
    return replace(
        usual,
        token_budget=config.token_budget or usual.token_budget,
        num_blocks=blocks or usual.num_blocks,
        prefix_cache=prefix_cache,
    )


def build_server(
    model: Model,
    config: EngineConfig,
    profile: Path | None,
    *,
    max_waiting: int,
    max_new_tokens: int | None,
    name: str | None,
    thinking: bool,
    shutdown_seconds: float = Limits.shutdown_seconds,
) -> Server:
    """The server of a loaded model.

    Args:
        profile: drafts and verifies by these costs; None: by the model's own `scheduling`, whose costs are those of a
            handful of users.
    """
    if not isinstance(model.target, Target):
        raise ValueError("the engine serves targets of PyTorch.")
    drafter = None if model.drafter is None else model.drafter.drafter
    if profile is None:
        chosen = model.scheduling
    else:
        if drafter is None or drafter.trees:
            raise ValueError("--profile: no chains are drafted here; leave it out.")
        cost = Profile.load(profile)
        cost.check(setting_of(model.target, drafter))
        chosen = by_profile(drafter, MachineProfile(cost, profile, None))
    engine = Engine(model.target, drafter, chosen.policy, config=config)
    name = name or model.target.name
    worker = Worker(engine, ServerMetrics(name, engine), max_waiting)
    limits = Limits(max_new_tokens, shutdown_seconds=shutdown_seconds)
    return Server(worker, name, limits, thinking=thinking)


def _bind(host: str, port: int) -> socket.socket:
    """The server's socket. Clients are refused until it listens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror or error}; give another.") from error
    return bound


def _call_in_thread(function: Callable[[], _Result]) -> _Result:
    """What a function returns that is called in a thread of its own, which has ended on return.

    GCC's OpenMP keeps a pool of threads for every thread that has computed in parallel, until that thread ends. While
    all pools together have more threads than there are cores, whoever waits at a barrier sleeps instead of spinning,
    and a step of the engine has hundreds of barriers: the engine's thread must have the only pool. Source: libgomp,
    config/linux/wait.h (`gomp_managed_threads`).
    """
    done: Future[_Result] = Future()

    def call() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    thread = Thread(target=call, name="load", daemon=True)  # a daemon: Ctrl-C must not wait for a download
    thread.start()
    result = done.result()
    thread.join()
    return result

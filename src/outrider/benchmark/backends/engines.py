"""Engines that serve drafters over HTTP: how each is started, how it is asked, and under which names it counts.

             started with                      counts drafts on /metrics
vllm         --no-enable-prefix-caching        vllm:spec_decode_num_{drafts,draft_tokens,...}_total
sglang       --disable-radix-cache             sglang:spec_accept_length (a gauge)
llama.cpp    --no-cache-prompt                 llamacpp:spec_decode_num_{drafts,...}_total

Counted prompts are asked for several times, and a cached one has no prefill: caches are off, as in engines that have
none. All three take penalties from the model's own files where a request names none; decoding here has no penalties.
Speculative flags are those of formats/drafting_flags.py. Sources: vllm 0.32.0, sglang 0.5.23 and llama.cpp b11434.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.benchmark.backends.prometheus import MetricNames
from outrider.formats.drafting_flags import Drafting, llama_cpp_flags, sglang_flags, vllm_environment, vllm_flags

_NO_PENALTY = {"presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Launch:
    """One engine to be started.

    Args:
        target: a directory or id that the engine can load; for llama.cpp a .gguf file.
        drafter: the same, in the engine's dialect; None: what `algorithm` needs none for (ngram).
        algorithm: a name of formats/drafting_flags.py.
        drafts: tokens per draft; 0 starts the engine without speculation.
        reduced_vocabulary, mixed: as in `Drafting`.
        python: of the environment the engine is installed in.
        executable: instead of it, the engine's own command.
        users: requests at once; `context`: tokens of the longest of them.
        extra: further flags.
    """

    target: str
    drafter: str | None
    algorithm: str
    drafts: int
    port: int
    dtype: str
    users: int
    context: int
    python: str = sys.executable
    executable: str | None = None
    extra: tuple[str, ...] = ()
    reduced_vocabulary: bool = False
    mixed: bool = False

    @property
    def positions(self) -> int:
        """Of one request. Where rows and next draft of the longest have no room, vLLM drafts for none in the batch."""
        return self.context + 2 * (self.drafts + 1)

    @property
    def drafting(self) -> Drafting:
        return Drafting(self.algorithm, self.drafts, self.drafter, self.reduced_vocabulary, self.mixed)


@dataclass(frozen=True)
class Server:
    """A kind of engine. `extra` are fields of every request, `command` and `environment` start it."""

    name: str
    metrics: MetricNames
    command: Callable[[Launch], list[str]]
    extra: dict[str, Any] = field(default_factory=dict)
    environment: Callable[[Launch], dict[str, str]] = lambda launch: {}
    health: str = "/health"


def vllm_command(launch: Launch) -> list[str]:
    """The module is the same server as `vllm serve`, which some wheels cannot start by name."""
    command = [launch.executable, "serve"] if launch.executable else [launch.python, "-m"]
    command += [] if launch.executable else ["vllm.entrypoints.openai.api_server"]
    command += [launch.target] if launch.executable else ["--model", launch.target]
    command += ["--host", "127.0.0.1", "--port", str(launch.port), "--dtype", launch.dtype]
    command += ["--max-model-len", str(launch.positions), "--max-num-seqs", str(launch.users)]
    command += ["--no-enable-prefix-caching"]
    if launch.drafts:
        command += [*vllm_flags(launch.drafting), "--per-request-spec-decode-metrics", "summary"]
    return [*command, *launch.extra]


def _vllm_environment(launch: Launch) -> dict[str, str]:
    return {"VLLM_NO_USAGE_STATS": "1"} | (vllm_environment(launch.drafting) if launch.drafts else {})


def sglang_command(launch: Launch) -> list[str]:
    """A part is sent for every step."""
    command = [launch.executable] if launch.executable else [launch.python, "-m", "sglang.launch_server"]
    command += ["--model-path", launch.target, "--host", "127.0.0.1", "--port", str(launch.port)]
    command += ["--dtype", launch.dtype, "--context-length", str(launch.positions), "--enable-metrics"]
    command += ["--max-running-requests", str(launch.users), "--stream-interval", "1", "--disable-radix-cache"]
    if launch.drafts:
        command += sglang_flags(launch.drafting)
    return [*command, *launch.extra]


def llama_cpp_command(launch: Launch) -> list[str]:
    """Its context is that of all users together."""
    for path in (launch.target, launch.drafter if launch.drafts else None):
        if path is not None and not path.endswith(".gguf"):
            raise ValueError(
                f"llama.cpp reads GGUF files, not {path}: convert target and drafter (outrider export DIR --to "
                "llama.cpp --out OUT says how) and name them: --engine-target T.gguf --engine-drafter D.gguf."
            )
    command = [launch.executable or "llama-server", "-m", launch.target, "--host", "127.0.0.1"]
    command += ["--port", str(launch.port), "--metrics", "-np", str(launch.users)]
    command += ["-c", str(launch.users * launch.positions), "--no-cache-prompt"]
    if launch.drafts:
        command += llama_cpp_flags(launch.drafting)
    return [*command, *launch.extra]


def _cannot_launch(launch: Launch) -> list[str]:
    raise ValueError("--launch: how to start an engine is known for vllm, sglang and llama.cpp; start it yourself.")


def _counters(prefix: str) -> MetricNames:
    name = prefix + ":spec_decode_num_{}_total"
    return MetricNames(name.format("drafts"), name.format("draft_tokens"), name.format("accepted_tokens"))


SERVERS = (
    Server("openai", MetricNames(), _cannot_launch),
    Server(
        "vllm",
        _counters("vllm"),
        vllm_command,
        {"return_token_ids": True, "repetition_penalty": 1.0, **_NO_PENALTY},
        _vllm_environment,
    ),
    Server(
        "sglang",
        MetricNames(length="sglang:spec_accept_length"),
        sglang_command,
        {"repetition_penalty": 1.0, **_NO_PENALTY},
    ),
    Server("llama.cpp", _counters("llamacpp"), llama_cpp_command, {"repeat_penalty": 1.0, **_NO_PENALTY}),
)

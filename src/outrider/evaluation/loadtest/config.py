"""Settings of load tests: the load, the service level, the sampling of requests, and `outrider bench`.

Read by `--help`, so nothing here imports PyTorch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from outrider.config import (
    API_KEY,
    AUTO,
    CHOICES,
    DRAFTS,
    ENGINES,
    FILES,
    GENERAL,
    LOAD,
    MODELS,
    ONE_LINE,
    PROMPTS,
    SAMPLING,
    SERVICE,
    SMOLLM2,
    TREE_FORM,
    TREE_METHODS,
    Config,
    DataDirectory,
    EngineType,
    Machine,
    StartedEngine,
    TaskNames,
    argument,
    check_tree,
    option,
    rare,
)

if TYPE_CHECKING:
    from outrider.evaluation.loadtest.load import Ask

Arrival = Literal["closed", "poisson"]
BACKENDS = ("local", "transformers", "openai", "vllm", "sglang", "llama.cpp", "mlx")  # a test compares the registry
ONE_AT_A_TIME = ("transformers", "mlx")
USERS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
VARIANTS = "none,fixed-3,fixed-*,prefix,..,look-ahead+skip; all by default"
_MOST_LOAD = 10**6  # users, or requests per second


@dataclass(frozen=True)
class Sla(Config):
    """Service level: at most so many seconds to the first token, then at least so many tokens per second."""

    ttft: Annotated[
        float, rare(SERVICE, "seconds to the first token that a good request may take", "--sla-ttft", min=0.0)
    ] = 2.0
    tokens_per_second: Annotated[
        float,
        rare(SERVICE, "tokens per second that a good request must have", "--sla-tokens-per-second", min=0.0),
    ] = 5.0


@dataclass(frozen=True)
class Traffic(Config):
    """How requests are sampled: they take turns with the temperatures; 0 is greedy decoding.

    The turns come in random order, so that no task of a mix gets one temperature alone: of two temperatures every
    pair of prompts has one each. `coupled`: by coupled noise (sampling.py).

    Raises:
        ValueError: no temperature, one named twice, or one that is none.
    """

    temperatures: Annotated[
        tuple[float, ...], option(PROMPTS, "as 0, or 0,1: requests take turns", "--temperature", min=0.0)
    ] = (0.0,)
    top_p: Annotated[
        float, rare(SAMPLING, "keep the likeliest tokens of this total probability", above=0.0, max=1.0)
    ] = 1.0
    coupled: Annotated[
        bool, rare(SAMPLING, "by noise of seed and position: the text plain decoding gives", "--coupled")
    ] = False

    def check(self) -> None:
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"--temperature: {list(self.temperatures)} must be different temperatures, one at least.")
        if self.coupled and self.greedy:
            raise ValueError("--coupled is for sampled requests: give --temperature above 0, or leave it out.")

    @property
    def greedy(self) -> bool:
        """Whether every request is decoded greedily."""
        return not any(self.temperatures)

    def asks(self, prompts: Sequence[Sequence[int]], seed: int, repeat: int = 0) -> list[Ask]:
        """The prompts with their sampling parameters, each with a seed of its own; the same ones every time."""
        from outrider.evaluation.loadtest.load import Ask
        from outrider.sampling import SamplingParams

        asks, order = [], list[float]()
        for number, prompt in enumerate(prompts):
            if not order:
                order = random.Random(f"{seed} temperatures {number}").sample(self.temperatures, len(self.temperatures))
            temperature = order.pop()
            drawn = "" if self.coupled else repeat
            request_seed = random.Random(f"{seed} request {number} {drawn}").getrandbits(32)
            top_p = self.top_p if temperature else 1.0
            coupled = self.coupled and temperature > 0
            params = SamplingParams(temperature=temperature, top_p=top_p, seed=request_seed, coupled=coupled)
            asks.append(Ask(prompt, params))
        return asks


def check_levels(arrivals: str, levels: Sequence[float]) -> None:
    """Refuse what is neither a number of users (closed) nor a rate (poisson).

    Raises:
        ValueError: one of them is, or two are the same.
    """
    option = "--concurrency" if arrivals == "closed" else "--rates"
    if not levels or min(levels) <= 0 or len(set(levels)) < len(levels) or max(levels) > _MOST_LOAD:
        raise ValueError(f"{option}: levels {list(levels)} must be different numbers above 0 and at most {_MOST_LOAD}.")
    if arrivals == "closed" and any(level != int(level) for level in levels):
        raise ValueError(f"concurrency {list(levels)}: the number of users must be whole.")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Config):
    """A load on an engine, ours or another (evaluation/loadtest/bench.py)."""

    target: Annotated[str, option(MODELS, "model id or directory", beside="name", show_default=ONE_LINE)] = SMOLLM2
    drafter: Annotated[
        tuple[str, ...],
        option(MODELS, CHOICES, repeated=True, beside="drafter", metavar="[NAME=]CHOICE", show_default=False),
    ] = (AUTO,)
    backend: Annotated[
        str, option(MODELS, ", ".join(BACKENDS), choices=BACKENDS, metavar="ENGINE", show_default=False)
    ] = "local"
    tasks: TaskNames
    data_dir: DataDirectory = None
    prompts: Annotated[int, rare(PROMPTS, "how many conversations there are in all", min=1)] = 100
    turns: Annotated[int, rare(PROMPTS, "of each; the baseline answers the earlier ones", min=1)] = 1
    thinking: Annotated[bool, rare(PROMPTS, "ask the chat template for it", "--thinking/--no-thinking")] = False
    max_new_tokens: Annotated[int, option(PROMPTS, "per response", min=1)] = 64
    seed: Annotated[int, rare(PROMPTS, "of the mix of prompts, of arrivals and of sampling")] = 0
    traffic: Traffic = Traffic()
    arrivals: Annotated[Arrival, option(LOAD, "users that wait, or a rate")] = "closed"
    concurrency: Annotated[
        tuple[float, ...] | None, option(LOAD, "users (closed); 1,2,4,8,16,32 where an engine batches")
    ] = None
    rates: Annotated[tuple[float, ...], option(LOAD, "requests per second (poisson)")] = (0.5, 1.0, 2.0)
    repeats: Annotated[int, rare(LOAD, "of every point", min=1)] = 3
    requests_per_point: Annotated[
        int | None, rare(LOAD, "counted requests, one per user where that is more; 12 by default", min=1)
    ] = None
    seconds_per_point: Annotated[float | None, rare(LOAD, "a window of that length instead", min=0.0)] = None
    max_requests: Annotated[int, rare(LOAD, "served at once (poisson)", min=1)] = 32
    token_budget: Annotated[int, rare(LOAD, "most rows of one forward (local)", min=1)] = 512
    sla: Sla = Sla()
    variants: Annotated[tuple[str, ...] | None, option(DRAFTS, VARIANTS)] = None
    profile: Annotated[
        tuple[Path, ...],
        option(
            DRAFTS,
            "from outrider profile; adaptive variants need it",
            repeated=True,
            beside="path",
            metavar="PATH",
        ),
    ] = ()
    against: Annotated[str | None, rare(DRAFTS, "variant that gains are over; MTP-1, else none, by default")] = None
    user_speeds: Annotated[
        tuple[float, ...] | None,
        rare(DRAFTS, "promised tokens/s: gains at those; as --against has", above=0.0),
    ] = None
    confidence_threshold: Annotated[float | None, rare(DRAFTS, "of variant threshold", min=0.0, max=1.0)] = None
    tree: Annotated[str | None, rare(DRAFTS, f"{TREE_FORM} ({TREE_METHODS})", metavar="SIZE")] = None
    assistant: Annotated[
        str | None, rare(DRAFTS, "smaller model of variant assisted (transformers)", beside="name")
    ] = None
    prompt_lookup: Annotated[int, rare(DRAFTS, "tokens copied per round (transformers)", min=1)] = 10
    base_url: Annotated[str | None, option(ENGINES, f"server that speculates; its key, if any, in {API_KEY}")] = None
    baseline_url: Annotated[str | None, option(ENGINES, "the same server without speculation")] = None
    served_model: Annotated[str | None, rare(ENGINES, "the target's name on the servers")] = None
    chat: Annotated[bool, rare(ENGINES, "servers that render prompts themselves", "--chat")] = False
    launch: Annotated[bool, option(ENGINES, "start the engine, and stop it whatever happens", "--launch")] = False
    engine_dtype: Annotated[
        EngineType | None, rare(ENGINES, "of a started engine; float32 on the CPU, bfloat16 elsewhere")
    ] = None
    engine: StartedEngine = StartedEngine()
    engine_target: Annotated[
        str | None, rare(ENGINES, "what it loads instead of --target, as T.gguf", beside="name")
    ] = None
    engine_drafter: Annotated[str | None, rare(ENGINES, "... and instead of --drafter, as D.gguf", beside="name")] = (
        None
    )
    startup_timeout: Annotated[float, rare(ENGINES, "seconds until a started engine must serve", min=0.0)] = 600.0
    out: Annotated[Path, option(GENERAL, "directory for points and plots; run again to go on", beside="path")]
    machine: Machine = Machine()

    def check(self) -> None:
        ours = self.backend == "local"
        check_tree(self.tree, self.confidence_threshold)
        if self.tree is not None and not ours:
            raise ValueError(f"--tree is for --backend local; {self.backend} drafts as it is configured to.")
        if not self.traffic.greedy and self.backend == "transformers":
            raise ValueError(f"--temperature: {self.backend} decodes greedily here; leave it out.")
        if self.traffic.coupled and self.backend not in ("local", "mlx"):
            raise ValueError(f"--coupled is for --backend local and mlx; {self.backend} samples in its own way.")
        if self.launch and (self.base_url or self.baseline_url):
            raise ValueError("--launch starts the servers itself: leave out --base-url and --baseline-url.")
        check_levels(self.arrivals, self.levels)
        self.engine.words()

    @property
    def levels(self) -> tuple[float, ...]:
        """Users (closed) or requests per second (poisson), one after the other."""
        if self.arrivals == "poisson":
            return self.rates
        return self.concurrency or (USERS[:1] if self.backend in ONE_AT_A_TIME else USERS)

    def users(self, level: float) -> int:
        """Requests that are served at once at a level."""
        return int(level) if self.arrivals == "closed" else self.max_requests

    @property
    def requests(self) -> int | None:
        """Counted requests of a point; None: those of a time."""
        return 12 if self.requests_per_point is None and self.seconds_per_point is None else self.requests_per_point


@dataclass(frozen=True, kw_only=True)
class EnginesTableConfig(Config):
    """Load tests of several engines in one table (`outrider bench-table`)."""

    directories: Annotated[tuple[Path, ...], argument("--out of outrider bench, one per engine")]
    out: Annotated[Path | None, option(FILES, "Markdown file for the table", beside="path")] = None


_RECORD, _PREDICT, _MACHINE = "Record", "Predict", "Machine"


@dataclass(frozen=True)
class RecordedTraffic(Traffic):
    """`Traffic` of prompts that are recorded."""

    temperatures: Annotated[
        tuple[float, ...], option(_RECORD, "as 0, or 0,1: prompts take turns", "--temperature", min=0.0)
    ] = (0.0,)


@dataclass(frozen=True, kw_only=True)
class RecordingMachine(Machine):
    """Where drafts are recorded."""

    device: Annotated[str, rare(_RECORD, "auto, cpu, cuda, ...")] = "auto"
    threads: Annotated[int | None, rare(_RECORD, "CPU threads; $OMP_NUM_THREADS, else all", min=1, max=1024)] = None


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(Config):
    """A load test predicted from recorded drafts and a profile, or the recording (evaluation/loadtest/predict.py)."""

    recording: Annotated[
        Path | None,
        option(_RECORD, "decode --tasks here, write traces to this .npz, and stop", "--record", beside="path"),
    ] = None
    target: Annotated[str, option(_RECORD, "model id or directory", beside="name", show_default=ONE_LINE)] = SMOLLM2
    drafter: Annotated[str, option(_RECORD, CHOICES, beside="drafter", show_default=False)] = AUTO
    tasks: Annotated[
        tuple[str, ...] | None, option(_RECORD, "JSONL files or shipped sets; first turns", beside="name")
    ] = None
    data_dir: DataDirectory = None
    max_samples: Annotated[int, option(_RECORD, "prompts in all, mixed from the tasks", min=1)] = 100
    thinking: Annotated[bool, rare(_RECORD, "ask the chat template for it", "--thinking/--no-thinking")] = False
    machine: RecordingMachine = RecordingMachine()
    traffic: Annotated[RecordedTraffic, _RECORD] = RecordedTraffic()
    traces: Annotated[Path | None, option(_PREDICT, "what --record wrote", beside="path")] = None
    profile: Annotated[Path | None, option(_PREDICT, 'outrider profile\'s, or {"sps": [...], ...}', beside="path")] = (
        None
    )
    validate: Annotated[Path | None, option(_PREDICT, "measured frontier.json to compare with", beside="path")] = None
    out: Annotated[
        Path | None, option(_PREDICT, "directory for frontier.json, plots, validation.json", beside="path")
    ] = None
    concurrency: Annotated[tuple[float, ...], option(LOAD, "users of closed loops")] = USERS
    rates: Annotated[tuple[float, ...] | None, option(LOAD, "Poisson arrivals per second, instead")] = None
    requests: Annotated[int, rare(LOAD, "counted per point, one per user where that is more", min=1)] = 12
    max_new_tokens: Annotated[int, option(LOAD, "per response; no more than was recorded", min=1)] = 64
    repeats: Annotated[int, rare(LOAD, "other arrivals each; a closed loop needs one", min=1)] = 1
    seed: Annotated[int, rare(LOAD, "of the mix of prompts, and of arrivals")] = 0
    sla: Sla = Sla()
    variants: Annotated[tuple[str, ...] | None, option(DRAFTS, VARIANTS)] = None
    confidence_threshold: Annotated[
        float | None, rare(DRAFTS, "of variant threshold; as recommended if not given", min=0.0, max=1.0)
    ] = None
    replicas: Annotated[int, option(_MACHINE, "engines behind one router", min=1)] = 1
    routing: Annotated[
        Literal["least-loaded", "round-robin"], rare(_MACHINE, "who gets a request: least-loaded or round-robin")
    ] = "least-loaded"
    max_requests: Annotated[
        int | None, rare(_MACHINE, "running at once, per engine; all users, or 32 of Poisson arrivals", min=1)
    ] = None
    token_budget: Annotated[int, rare(_MACHINE, "rows per step", min=1)] = 512
    scale_verify: Annotated[float, option(_MACHINE, "target forwards take so many times as long")] = 1.0
    scale_draft: Annotated[float, option(_MACHINE, "drafts take so many times as long")] = 1.0

    def check(self) -> None:
        check_levels(self.arrivals, self.levels)
        if self.recording is not None and self.tasks is None:
            raise ValueError("--record needs --tasks: prompts to decode.")
        if self.recording is None and None in (self.traces, self.profile, self.out):
            raise ValueError("give --traces, --profile and --out; or --record FILE to make traces first.")

    @property
    def arrivals(self) -> Arrival:
        """Users that wait, or a rate."""
        return "closed" if self.rates is None else "poisson"

    @property
    def levels(self) -> tuple[float, ...]:
        """Users, or requests per second."""
        return self.concurrency if self.rates is None else self.rates

"""`outrider bench`: open the engine that the settings name, measure it, and compare engines that were measured.

local                          our engine; variants as in backends/local.py
transformers                   none, prompt-lookup; assisted if --assistant names a model
mlx                            none, speculative
openai, vllm, sglang, ...      none (--baseline-url) and speculative (--base-url): servers that run already;
                               with --launch none and fixed-K: started here, one at a time
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.api.drafter import HYBRID, DrafterChoice, OpenedDrafter, name_drafters, require_drafter, warn_of_thinking
from outrider.backends.base import Launch
from outrider.backends.local import NO_SPECULATION, NamedDrafter, choose_variants, engine_config, local_engines
from outrider.backends.openai import Endpoint, shown_url
from outrider.backends.registry import server_of
from outrider.backends.transformers import load_causal_lm
from outrider.checkpoints.checkpoint import CALIBRATION, SAMPLED_CALIBRATION
from outrider.config import API_KEY
from outrider.data.chat import Chat
from outrider.decoding.cost import Profile
from outrider.decoding.profile import setting_of
from outrider.drafters.base import draft_slots
from outrider.drafters.draft import TreeSize
from outrider.evaluation.loadtest.config import BenchConfig, Traffic
from outrider.evaluation.loadtest.engines import (
    SPECULATIVE,
    MeasuredEngine,
    compare_asked,
    launched_engine,
    mlx_engine,
    running_servers,
    transformers_engine,
)
from outrider.evaluation.loadtest.load import mixed_prompts
from outrider.evaluation.loadtest.metrics import Frontier, Journal, PointSummary
from outrider.evaluation.loadtest.sweep import Sweep, Workload, run_workload
from outrider.target.hub import model_config, resolve_model
from outrider.target.linear import warm_up
from outrider.target.model import Target, load_target, read_architectures
from outrider.training.parallel import ALONE, Ranks
from outrider.utils.files import check_outputs
from outrider.utils.measure import default_dtype, dtype_name, machine, versions

Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """What a load test measured.

    `exact`: greedy and coupled output must be plain decoding's. Other engines' numerics change with their batches.
    """

    frontier: Frontier
    exact: bool

    @property
    def differing(self) -> list[str]:
        """Variants whose output differs from plain decoding's although it must not: a bug."""
        return sorted({point.variant for point in self.frontier.points if point.mismatches}) if self.exact else []


def run_bench(
    config: BenchConfig,
    ranks: Ranks = ALONE,
    *,
    say: Say = lambda line: None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Bench:
    """Measure an engine under a load, or go on with what `config.out` holds.

    Raises:
        ValueError: the engine, the drafter or the prompts cannot be had, or `config.out` holds another measurement.
    """
    check_outputs(config.out)
    opening = _Opening(config, str(ranks.device), say)
    engine = opening.engine()
    try:
        against = config.against
        if against is not None and against not in engine.variants:
            raise ValueError(f"--against {against}: not among what is measured, {', '.join(engine.variants)}.")
        sweep, work = _sweep(config, engine), opening.work
        settings = sweep.settings() | engine.settings | _settings(config, work, ranks)
        settings |= {} if config.backend == "local" else {"drafter": opening.texts[""]}
        journal = ranks.from_main(
            lambda: Journal(config.out, settings | {"machine": machine(), "versions": versions()})
        )
        run_workload(
            sweep,
            engine,
            work,
            tokenizer=opening.chat.tokenizer,
            journal=journal,
            thinking=config.thinking,
            ranks=ranks,
            on_progress=on_progress,
        )
    finally:
        engine.close()
    speeds = config.user_speeds or ()
    measured = ranks.from_main(
        lambda: Frontier.of(
            config.arrivals, journal.points, journal.settings, against=config.against, user_speeds=speeds
        )
    )
    return Bench(measured, engine.exact)


def _sweep(config: BenchConfig, engine: MeasuredEngine) -> Sweep:
    return Sweep(
        arrivals=config.arrivals,
        levels=config.levels,
        variants=tuple(engine.variants),
        repeats=config.repeats,
        requests=config.requests,
        seconds=config.seconds_per_point,
        max_new_tokens=config.max_new_tokens,
        sla=config.sla,
        seed=config.seed,
        grouped=engine.grouped,
        traffic=config.traffic,
    )


def _settings(config: BenchConfig, work: Workload, ranks: Ranks) -> dict[str, Any]:
    """What else decides every single figure."""
    return {
        "backend": config.backend,
        "target": config.target,
        "tasks": ",".join(config.tasks),
        "prompts": len(work.prompts),
        "thinking": config.thinking,
        "turns": config.turns,
        "max_requests": None if config.arrivals == "closed" else config.max_requests,
        "device": ranks.device.type,
        "token_budget": config.token_budget,
        "tree": None if config.tree is None else TreeSize.parse(config.tree).setting,
        "world": ranks.world,
        "prompts_sha256": hashlib.sha256(repr(work.prompts).encode()).hexdigest(),
    }


class _Opening:
    """Opens the engine that a config names. `texts`: drafters by name, "" for one that has none."""

    def __init__(self, config: BenchConfig, place: str, say: Say) -> None:
        self.config, self.place, self.say = config, place, say
        self.size = None if config.tree is None else TreeSize.parse(config.tree)
        self.chat = Chat.load(config.target)
        self.texts = name_drafters(config.drafter)
        if self.texts == {config.drafter[0]: config.drafter[0]}:
            self.texts = {"": config.drafter[0]}  # the only one needs no name
        elif config.backend != "local" or config.tree is not None:
            raise ValueError("several or named drafters (--drafter) are for --backend local without --tree.")
        prompts = mixed_prompts(
            self.chat.tokenizer, config.tasks, config.prompts, seed=config.seed, thinking=config.thinking
        )
        self.work = Workload(prompts, config.turns, config.max_new_tokens)
        self.users = max(map(config.users, config.levels))

    def engine(self) -> MeasuredEngine:
        """The engine of `--backend`."""
        opened = {"local": self.ours, "transformers": self.transformers, "mlx": self.mlx}.get(self.config.backend)
        return (opened or self.server)()

    def choice(self, name: str = "") -> DrafterChoice:
        """The drafter of that name."""
        chosen = require_drafter(self.texts[name], self.config.target, self.config.thinking)
        warn_of_thinking(chosen, self.config.thinking)
        return chosen

    def ours(self) -> MeasuredEngine:
        """Our engine in this process, with its kernels built for so many users."""
        config = self.config
        choices = {name: self.choice(name) for name in self.texts}
        target = load_target(config.target, default_dtype(self.place), self.place)
        opened = {
            name: (self.texts[name], choice, choice.open(target, tree=self.size)) for name, choice in choices.items()
        }
        for name, (_, _, drafter) in opened.items():
            for line in calibration_note(drafter.metadata, config.traffic):
                self.say(f"{name} {line}".lstrip())
        drafters = named_drafters(target, opened, config.profile, threshold=config.confidence_threshold)
        built = choose_variants(drafters, config.variants)
        rows = self.users * (max(draft_slots(named.drafter) for named in drafters) + 1)
        warm_up(min(rows, max(config.token_budget, self.users)))
        longest = self.work.longest + config.max_new_tokens
        return MeasuredEngine(
            local_engines(
                target, built, lambda level: engine_config(longest, config.users(level), config.token_budget)
            ),
            [variant.name for _, variant in built],
            partial(compare_asked, target),
            exact=True,
            settings={"dtype": dtype_name(target.dtype), "drafters": {named.name: named.about for named in drafters}},
        )

    def transformers(self) -> MeasuredEngine:
        """transformers' `generate`."""
        config, dtype = self.config, default_dtype(self.place)
        model = load_causal_lm(config.target, self.place, dtype)
        assistant = None if config.assistant is None else load_causal_lm(config.assistant, self.place, dtype)
        about = {
            "assistant": config.assistant,
            "prompt_lookup": config.prompt_lookup,
            "dtype": dtype_name(dtype),
        }
        return transformers_engine(
            model,
            sorted(self.chat.eos_ids),
            config.prompt_lookup,
            assistant=assistant,
            names=config.variants,
            settings=about,
        )

    def mlx(self) -> MeasuredEngine:
        """MLX, which computes in the type that the model is stored in."""
        choice = self.choice()
        if choice.directory is None or choice.hybrid:
            kind = HYBRID if choice.hybrid else choice.kind
            raise ValueError(f"--backend mlx decodes with a trained drafter, not with {kind}: give its directory.")
        stored: Any = model_config(resolve_model(self.config.target)).get_text_config().dtype
        about = {"dtype": None if stored is None else dtype_name(stored)}
        return mlx_engine(self.config.target, choice.directory, names=self.config.variants, settings=about)

    def server(self) -> MeasuredEngine:
        """An engine over HTTP: started here with --launch, else one that runs."""
        config = self.config
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                f"--backend {config.backend}: one process asks a server; torchrun is for local, transformers and mlx."
            )
        engine = server_of(config.backend)
        endpoint = Endpoint(
            config.base_url or "http://127.0.0.1",
            config.served_model,
            os.environ.get(API_KEY),
            engine=engine,
            chat_of=self.work.chat_of if config.chat else None,
            thinking=config.thinking if config.thinking or engine.takes_thinking else None,
        )
        return self.started(endpoint) if config.launch else self.running(endpoint)

    def running(self, endpoint: Endpoint) -> MeasuredEngine:
        """A server that speculates and, if it is named, one that does not."""
        config = self.config
        if config.base_url is None:
            raise ValueError(
                f"--backend {config.backend}: name a running server (--base-url, and --baseline-url for one without "
                "speculation), or let it be started (--launch)."
            )
        endpoints = {SPECULATIVE: endpoint}
        if config.baseline_url is not None:
            endpoints[NO_SPECULATION] = replace(endpoint, url=config.baseline_url)
        urls = {"base_url": config.base_url, "baseline_url": config.baseline_url}
        about = {**{name: url and shown_url(url) for name, url in urls.items()}, "chat": config.chat}
        return running_servers(endpoints, self.chat.tokenizer, names=config.variants, settings=about)

    def started(self, endpoint: Endpoint) -> MeasuredEngine:
        """An engine that is started for each variant."""
        config, engine, target = self.config, endpoint.engine, self.chat.name
        plan = Launch(
            target=config.engine_target or (target if engine.gguf else str(resolve_model(target))),
            dtype=config.engine_dtype or dtype_name(default_dtype(config.machine.device)),
            architectures=() if engine.gguf else read_architectures(target),
            prompt_cache=False,
            python=config.engine.engine_python or sys.executable,
            executable=config.engine.engine_command,
            extra=config.engine.words(),
        )
        engine.command(plan)  # what cannot be started needs no drafter either
        return launched_engine(
            engine,
            plan,
            self.choice().speculation(engine, target, config.engine_drafter),
            endpoint=endpoint,
            tokenizer=self.chat.tokenizer,
            names=config.variants,
            capacity=partial(self.work.capacity, self.users),
            logs=config.out / "logs",
            timeout=config.startup_timeout,
            settings={
                "engine_args": config.engine.engine_args,
                "chat": config.chat,
                "engine_drafter": config.engine_drafter,
                "dtype": None if engine.gguf else plan.dtype,
            },
        )


def calibration_note(metadata: Mapping[str, Any], traffic: Traffic) -> list[str]:
    """A line if confidences were not calibrated at every temperature of the traffic."""
    sections = (metadata.get(name, {}) for name in (CALIBRATION, SAMPLED_CALIBRATION))
    fitted = [section.get("sampling", {}).get("temperature") for section in sections]
    known = [temperature for temperature in fitted if temperature is not None]
    if not known or set(traffic.temperatures) <= set(known):
        return []
    calibrated, sampled = (", ".join(f"{value:g}" for value in values) for values in (known, traffic.temperatures))
    return [
        f"confidences were calibrated at temperature {calibrated}, requests are sampled at {sampled}: variants that "
        "read them plan with other probabilities (outrider calibrate --temperature T)"
    ]


def named_drafters(
    target: Target,
    opened: Mapping[str, tuple[str, DrafterChoice, OpenedDrafter]],
    profiles: Sequence[Path],
    threshold: float | None,
) -> list[NamedDrafter]:
    """Opened drafters as a sweep serves them.

    Args:
        opened: by name, each with the text and the choice that it was opened by.
        profiles: what variants that choose by cost decide by; each is of one drafter's shape.
        threshold: of variant threshold, for all; None: as each recommends. The nodes of trees have none.

    Raises:
        ValueError: a profile of something else than these drafters.
    """
    costs = {path: Profile.load(path) for path in profiles}
    settings = {name: setting_of(target, drafter.drafter) for name, (_, _, drafter) in opened.items()}
    for cost in costs.values():
        if cost.setting not in settings.values():
            cost.check(next(iter(settings.values())))
    named = []
    for name, (text, choice, drafter) in opened.items():
        limit = drafter.recommended_threshold if threshold is None else threshold
        limit = None if drafter.drafter.trees else limit
        fitting = next((path for path, cost in costs.items() if cost.setting == settings[name]), None)
        files = [] if choice.directory is None else sorted(choice.directory.iterdir())
        about = {
            "choice": text,
            "algorithm": drafter.algorithm,
            "sha256": _digest([path for path in files if path.suffix in (".json", ".safetensors")]),
            "threshold": limit,
            "profile_sha256": _digest([] if fitting is None else [fitting]),
        }
        measured = None if fitting is None else costs[fitting]
        named.append(NamedDrafter(name, drafter.drafter, limit, cost=measured, about=about))
    return named


def _digest(paths: Sequence[Path]) -> str | None:
    """SHA-256 of files that decide: a profile measured anew, a drafter trained or calibrated again."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest() if paths else None


# ----------------------------------------------------------------------------
# Sweeps of several engines in one table: the same target, prompts and lengths, each against its own baseline.
#
# engine        variant    load      type   tok/s   user   TTFT   gap   tau   x none
# local         fixed-7       1   float32    41.2   41.9    88    51   2.31    1.62
# transformers  none          1   float32    17.0   ...                       1.00
#
# Two differences are shown, not refused: the type of the weights, which MLX and GGUF files choose themselves, and
# whether a server rendered the prompts from messages ("chat") with the template it has.
# ----------------------------------------------------------------------------


HEADINGS = ("engine", "variant", "load", "type", "tok/s", "user", "TTFT", "gap", "tau", "x none")  # times in ms
_SAME = ("target", "prompts_sha256", "max_new_tokens", "thinking", "turns", "arrivals", "device", "traffic")


def side_by_side(directories: Sequence[Path]) -> list[tuple[str, ...]]:
    """Table rows of several sweeps, by load, then in the order given; blank where an engine does not tell.

    Raises:
        ValueError: a sweep is missing, or two were made under different conditions (each is named).
    """
    sweeps = [Frontier.load(directory / "frontier.json") for directory in directories]
    for directory, sweep in zip(directories[1:], sweeps[1:], strict=True):
        differing = [name for name in _SAME if sweep.settings.get(name) != sweeps[0].settings.get(name)]
        if sweep.machine != sweeps[0].machine:
            differing.append("machine")
        if differing:
            raise ValueError(
                f"{directory} was not measured as {directories[0]} was: {', '.join(differing)} differ. Measure both "
                "alike, on one machine."
            )
    rows = [
        (point.level, _row(sweep, point, _baseline(sweep, point.level))) for sweep in sweeps for point in sweep.points
    ]
    return [row for _, row in sorted(rows, key=lambda entry: entry[0])]


def _baseline(sweep: Frontier, level: float) -> float | None:
    return next((p.throughput for p in sweep.points if (p.variant, p.level) == (NO_SPECULATION, level)), None)


def _row(sweep: Frontier, point: PointSummary, plain: float | None) -> tuple[str, ...]:
    ratio = "" if plain is None else f"{point.throughput / plain:.2f}"
    figures = point.shown("user_p50"), point.shown("ttft_p50", 1e3, ".0f"), point.shown("gap_p50", 1e3, ".0f")
    engine = f"{sweep.settings.get('backend') or '?'}{' (chat)' if sweep.settings.get('chat') else ''}"
    measured = engine, point.variant, f"{point.level:g}", sweep.settings.get("dtype") or ""
    return *measured, f"{point.throughput:.1f}", *figures, point.shown("tau", form=".2f"), ratio

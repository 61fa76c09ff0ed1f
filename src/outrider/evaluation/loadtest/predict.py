"""`outrider simulate`: record drafts at every position of some responses, and predict a load test from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType

import numpy as np
from pydantic import TypeAdapter, ValidationError

from outrider.api.drafter import require_drafter, warn_of_thinking
from outrider.backends.local import default_variants, engine_config
from outrider.data.sources import prompts_label
from outrider.decoding.profile import setting_of
from outrider.decoding.request import StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.evaluation.loadtest.bench import calibration_note
from outrider.evaluation.loadtest.config import SimulateConfig, Traffic
from outrider.evaluation.loadtest.load import Ask, mixed_prompts
from outrider.evaluation.loadtest.metrics import Frontier
from outrider.evaluation.loadtest.simulate import (
    Cluster,
    PointError,
    check_comparable,
    compare,
    load_machine,
    serve,
    simulate_sweep,
)
from outrider.evaluation.loadtest.sweep import Sweep
from outrider.evaluation.loadtest.traces import Traces, record
from outrider.target.model import load_target
from outrider.utils.files import check_outputs
from outrider.utils.measure import default_dtype, machine, versions

Progress = Callable[[str, int, int], None]


def record_traces(
    config: SimulateConfig,
    *,
    say: Callable[[str], None] = lambda line: None,
    on_progress: Progress = lambda what, done, total: None,
) -> Traces:
    """Decode the prompts a load test would ask, with a draft at every position, and write `config.recording`."""
    assert config.recording is not None and config.tasks is not None
    check_outputs(files=[config.recording])
    choice = require_drafter(config.drafter, config.target, config.thinking)
    warn_of_thinking(choice, config.thinking)
    device = config.machine.device
    target = load_target(config.target, default_dtype(device), device)
    opened = choice.open(target)
    assert target.tokenizer is not None
    for line in calibration_note(opened.metadata, config.traffic):
        say(line)
    prompts = mixed_prompts(
        target.tokenizer, config.tasks, config.max_samples, seed=config.seed, thinking=config.thinking
    )
    about = {
        "setting": setting_of(target, opened.drafter).model_dump(),
        "tasks": [prompts_label(task) for task in config.tasks],
        "max_new_tokens": config.max_new_tokens,
        "thinking": config.thinking,
        "threshold": opened.recommended_threshold,
        "traffic": asdict(config.traffic),
        "versions": versions(),
        "machine": machine(),
    }
    asks = config.traffic.asks([prompt.tokens for prompt in prompts], config.seed)
    rules = StopRules(config.max_new_tokens)
    traces = record(target, opened.drafter, asks, rules=rules, about=about, on_progress=on_progress)
    traces.save(config.recording)
    return traces


@dataclass(frozen=True)
class Prediction:
    """A predicted load test. `compared`: with a measured one, None without --validate."""

    frontier: Frontier
    compared: list[PointError] | None


def predict(config: SimulateConfig, on_progress: Progress = lambda what, done, total: None) -> Prediction:
    """Predict a load test from traces and the profile of a machine.

    Raises:
        ValueError: files of something else, or `config.validate` was measured under another load.
    """
    assert config.traces is not None and config.profile is not None and config.out is not None
    check_outputs(config.out)
    traces = Traces.load(config.traces)
    measured = None if config.validate is None else Frontier.load(config.validate)
    setting, recommended, traffic = _recorded(traces, config.traces)
    costs = load_machine(config.profile, setting, config.scale_draft, verify=config.scale_verify)
    threshold = recommended if config.confidence_threshold is None else config.confidence_threshold
    confident = not np.isnan(traces.confidences_NK).any()
    sweep = Sweep(
        arrivals=config.arrivals,
        levels=config.levels,
        variants=config.variants or tuple(default_variants(traces.slots, threshold, bool(confident))),
        repeats=config.repeats,
        requests=config.requests,
        seconds=None,
        max_new_tokens=config.max_new_tokens,
        sla=config.sla,
        seed=config.seed,
        traffic=traffic,
    )
    scales = {"scale_verify": config.scale_verify, "scale_draft": config.scale_draft}
    settings = sweep.settings() | {
        "token_budget": config.token_budget,
        "max_requests": config.max_requests,
        "replicas": config.replicas,
        "routing": config.routing,
        "simulated": scales | {"traces": traces.about},
    }
    if measured is not None:
        check_comparable(json.loads(json.dumps(settings)), measured.settings)
    asks = [Ask(response.prompt, response.params) for response in traces.responses]
    longest = max(len(ask.prompt) for ask in asks) + config.max_new_tokens

    def serving(variant: str, level: float) -> Cluster:
        engine = engine_config(longest, _running(config, level), config.token_budget)
        return serve(
            variant,
            traces,
            costs,
            engine=engine,
            threshold=threshold,
            replicas=config.replicas,
            routing=config.routing,
        )

    points = simulate_sweep(sweep, serving, asks, on_progress=on_progress)
    frontier = Frontier.of(config.arrivals, points, settings)
    return Prediction(frontier, None if measured is None else compare(frontier.points, measured.points))


def _running(config: SimulateConfig, level: float) -> int:
    """Requests that an engine serves at once; the least loaded replica never has more than its share of the users."""
    if config.arrivals == "poisson":
        return config.max_requests or EngineConfig.max_requests
    users = math.ceil(level / config.replicas) if config.routing == "least-loaded" else int(level)
    return min(users, config.max_requests or users)


def _recorded(traces: Traces, path: Path) -> tuple[dict[str, object], float | None, Traffic]:
    """The setting, the recommended threshold and the traffic that traces were recorded with."""
    setting, recommended = traces.about.get("setting"), traces.about.get("threshold")
    unsaid = f"{path} does not say what was recorded; record again (--record {path})."
    if not isinstance(setting, dict) or not isinstance(recommended, (int, float, NoneType)):
        raise ValueError(unsaid)
    try:
        return setting, recommended, TypeAdapter(Traffic).validate_python(traces.about.get("traffic"))
    except ValidationError as error:
        raise ValueError(unsaid) from error

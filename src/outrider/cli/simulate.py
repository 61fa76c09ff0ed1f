"""outrider simulate --record TRACES --tasks ...,   outrider simulate --traces TRACES --profile FILE --out DIR"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from outrider.benchmark.cluster import Cluster, Routing
from outrider.benchmark.frontier import Sweep
from outrider.benchmark.local import engine_config
from outrider.benchmark.machines import load_machine
from outrider.benchmark.metrics import Sla
from outrider.benchmark.plots import write_plots
from outrider.benchmark.predict import Comparison, check_comparable, compare, serve, simulate_sweep
from outrider.benchmark.prompts import mixed_prompts
from outrider.benchmark.summary import Frontier, PointSummary
from outrider.benchmark.traces import Traces, record
from outrider.benchmark.variants import KNOWN, default_variants
from outrider.cli.drafters import AUTO, CHOICES, require_drafter, warn_of_thinking
from outrider.cli.options import counting, show_paths, split_names, split_numbers
from outrider.cli.runtime import load, set_up
from outrider.decoding import StopRules
from outrider.engine import EngineConfig
from outrider.evaluation.profile import setting_of
from outrider.evaluation.results import machine as this_machine
from outrider.formats import versions
from outrider.target.resolve import EMBEDDED_ID


def simulate_command(
    recording: Annotated[
        Path | None, typer.Option("--record", help="decode --tasks here, write traces to this .npz, and stop")
    ] = None,
    target: Annotated[str, typer.Option(help="to record: model id or directory")] = EMBEDDED_ID,
    drafter: Annotated[str, typer.Option(help=f"to record: {CHOICES}")] = AUTO,
    tasks: Annotated[str | None, typer.Option(help="to record: JSONL files or shipped sets; first turns")] = None,
    max_samples: Annotated[int, typer.Option(min=1, help="to record: prompts in all, mixed from the tasks")] = 100,
    device: Annotated[str, typer.Option(help="to record: cpu, cuda, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="to record")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="per response; no more than was recorded")] = 64,
    seed: Annotated[int, typer.Option(help="of the mix of prompts, and of arrivals")] = 0,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="to record: of the chat template")] = False,
    traces: Annotated[Path | None, typer.Option(help="what --record wrote")] = None,
    profile: Annotated[Path | None, typer.Option(help='outrider profile\'s, or {"sps": [...], ...}')] = None,
    out: Annotated[Path | None, typer.Option(help="directory for frontier.json, plots, validation.json")] = None,
    concurrency: Annotated[str, typer.Option(help="users of closed loops")] = "1,2,4,8,16,32",
    rates: Annotated[str | None, typer.Option(help="Poisson arrivals per second, instead")] = None,
    variants: Annotated[str | None, typer.Option(help="comma-separated; all of them by default")] = None,
    confidence_threshold: Annotated[
        float | None, typer.Option(help="of `threshold`; as recommended if not given")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="counted per point, one per user where that is more")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="other arrivals each; a closed loop needs one")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="engines behind one router")] = 1,
    routing: Annotated[str, typer.Option(help="least-loaded or round-robin")] = "least-loaded",
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="running at once, per engine; all users, or 32 of Poisson arrivals")
    ] = None,
    token_budget: Annotated[int, typer.Option(min=1, help="rows per step")] = EngineConfig.token_budget,
    sla_ttft: Annotated[float, typer.Option(help="seconds to the first token")] = Sla.ttft,
    sla_tokens_per_second: Annotated[float, typer.Option(help="of a user")] = Sla.tokens_per_second,
    scale_verify: Annotated[float, typer.Option(help="target forwards take so many times as long")] = 1.0,
    scale_draft: Annotated[float, typer.Option(help="drafts take so many times as long")] = 1.0,
    validate: Annotated[Path | None, typer.Option(help="measured frontier.json to compare with")] = None,
) -> None:
    """Predict a load test from a profile and recorded drafts: any concurrency, any policy, machines you do not have."""
    console = Console()
    if recording is not None:
        if tasks is None:
            raise ValueError("--record needs --tasks: prompts to decode.")
        set_up(threads)
        found = record_traces(
            target, drafter, split_names(tasks), max_samples, max_new_tokens, seed, thinking, device, console
        )
        found.save(recording)
        show_paths(console, recording)
        return
    if traces is None or profile is None or out is None:
        raise ValueError("give --traces, --profile and --out; or --record FILE to make traces first.")
    recorded, measured = Traces.load(traces), None if validate is None else Frontier.load(validate)
    machine = load_machine(profile, recorded.about["setting"], scale_draft, scale_verify)
    threshold = recorded.about["threshold"] if confidence_threshold is None else confidence_threshold
    allowed = default_variants(recorded.gamma, threshold, not np.isnan(recorded.confidences_NK).any())
    names = allowed if variants is None else split_names(variants, f"variant; there are {KNOWN}")
    kind: Literal["closed", "poisson"] = "closed" if rates is None else "poisson"
    levels = split_numbers("--concurrency", concurrency) if rates is None else split_numbers("--rates", rates)
    sla = Sla(sla_ttft, sla_tokens_per_second)
    sweep = Sweep(kind, levels, tuple(names), repeats, requests, None, max_new_tokens, sla, seed)
    settings = sweep.settings() | {"token_budget": token_budget, "max_requests": max_requests}
    settings |= {"replicas": replicas, "routing": routing}
    settings |= {"simulated": {"scale_verify": scale_verify, "scale_draft": scale_draft, "traces": recorded.about}}
    if measured is not None:
        check_comparable(settings, measured.settings)
    router, prompts = _routing(routing), [response.prompt for response in recorded.responses]

    def serving(variant: str, level: float) -> Cluster:
        if kind == "poisson":
            limit = max_requests or EngineConfig.max_requests
        else:  # the least loaded replica never has more than its share
            users = math.ceil(level / replicas) if routing == "least-loaded" else int(level)
            limit = min(users, max_requests or users)
        longest = max(len(prompt) for prompt in prompts) + max_new_tokens
        engine = engine_config(longest, limit, token_budget)
        return serve(variant, recorded, machine, engine, threshold, replicas, router)

    with counting(console, "simulate") as on_progress:
        points = simulate_sweep(sweep, serving, prompts, on_progress)
    frontier = Frontier.of(kind, points, settings)
    path = frontier.save(out)
    console.print(points_table(frontier.points))
    show_paths(console, path, *write_plots(frontier, out))
    if measured is not None:
        report(compare(frontier.points, measured.points), out / "validation.json", console)


def record_traces(
    target: str,
    drafter: str,
    tasks: list[str],
    count: int,
    tokens: int,
    seed: int,
    thinking: bool,
    device: str,
    console: Console,
) -> Traces:
    """Decode the prompts a load test would ask, with a draft at every position."""
    choice = require_drafter(drafter, target, thinking)
    warn_of_thinking(choice, thinking)
    loaded = load(target, device)
    opened = choice.open(loaded)
    assert loaded.tokenizer is not None
    prompts = [prompt.tokens for prompt in mixed_prompts(loaded.tokenizer, tasks, count, seed, thinking)]
    about = {
        "setting": setting_of(loaded, opened.drafter).model_dump(),
        "tasks": [Path(task).stem for task in tasks],
        "max_new_tokens": tokens,
        "thinking": thinking,
        "threshold": opened.recommended_threshold,
        "versions": versions(),
        "machine": this_machine(),
    }
    with counting(console, "record") as on_progress:
        found = record(loaded, opened.drafter, prompts, StopRules(tokens), about, on_progress)
    positions, matching = len(found.accepted_N), int(found.accepted_N.sum())
    console.print(
        f"{len(prompts)} responses, {positions} positions, on average {matching / positions:.2f} drafts right"
    )
    return found


def points_table(points: list[PointSummary]) -> Table:
    """Throughput by variant and level."""
    levels = sorted({point.level for point in points})
    view = Table(title="simulated tokens per second")
    view.add_column("variant")
    for level in levels:
        view.add_column(f"{level:g}", justify="right", no_wrap=True)
    found = {(point.variant, point.level): f"{point.throughput:.1f}" for point in points}
    for variant in dict.fromkeys(point.variant for point in points):
        view.add_row(variant, *(found[variant, level] for level in levels))
    return view


def report(compared: list[Comparison], path: Path, console: Console) -> None:
    """Print and write the error at every point; the worst is named."""
    view = Table(title="tokens per second: simulated against measured")
    for heading in ("variant", "level", "measured", "simulated", "error"):
        view.add_column(heading, justify="left" if heading == "variant" else "right", no_wrap=True)
    for one in compared:
        view.add_row(
            one.variant, f"{one.level:g}", f"{one.measured:.1f}", f"{one.predicted:.1f}", f"{one.error:+.1f} %"
        )
    console.print(view)
    worst = max(compared, key=lambda one: abs(one.error))
    console.print(f"worst: {worst.variant} at {worst.level:g}, {worst.error:+.1f} %", highlight=False)
    content = {"points": [one.model_dump() for one in compared], "worst": worst.model_dump()}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    show_paths(console, path)


def _routing(name: str) -> Routing:
    for known in get_args(Routing):
        if name == known:
            return known
    raise ValueError(f"--routing {name!r}: choose one of {', '.join(get_args(Routing))}.")

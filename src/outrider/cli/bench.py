"""`outrider bench` (load on an engine), `bench-table` (several engines in one table) and `simulate` (a predicted load).

`bench --backend` names the engine, and with it the variants (evaluation/loadtest/engines.py):

local                          our engine; variants as in backends/local.py
transformers                   none, prompt-lookup; assisted where --assistant names a model
openai, vllm, sglang, ...      none (--baseline-url) and speculative (--base-url): servers that run already;
                               with --launch none and fixed-K: started here, one at a time
mlx                            none, speculative
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.table import Table

from outrider.api.drafter import AUTO, HYBRID, DrafterChoice, require_drafter, warn_of_thinking
from outrider.cli import options as opt
from outrider.cli.common import (
    check_outputs,
    choose_tree,
    counting,
    load,
    show_lines,
    show_paths,
    split_names,
    split_numbers,
    split_words,
)
from outrider.cli.evaluate import name_drafters
from outrider.cli.options import BACKENDS, CHOICES, DRAFTS, FILES, GENERAL, MODELS, PROMPTS, SMOLLM2, option, rare
from outrider.evaluation.verdict import load_verdict
from outrider.utils.measure import default_dtype, dtype_name, machine, set_up, versions
from outrider.utils.terminal import Terminal, terminal_table

if TYPE_CHECKING:
    from outrider.api.drafter import OpenedDrafter
    from outrider.backends.base import ExternalEngine
    from outrider.backends.local import NamedDrafter
    from outrider.backends.openai import Endpoint
    from outrider.evaluation.loadtest.engines import MeasuredEngine
    from outrider.evaluation.loadtest.load import Traffic
    from outrider.evaluation.loadtest.metrics import Frontier, Gain, PointSummary
    from outrider.evaluation.loadtest.simulate import Cluster, PointError, Routing
    from outrider.evaluation.loadtest.traces import Traces
    from outrider.target.model import Target

LOAD, SERVER, RECORD, PREDICT, MACHINE = "Load", opt.ENGINES, "Record", "Predict", "Machine"
_CONCURRENCY = "1,2,4,8,16,32"
ONE_AT_A_TIME = ("transformers", "mlx")
_SMOLLM2 = SMOLLM2.partition("/")[2]  # the default on one line of help


def kinds() -> list[str]:
    """What `--backend` can be."""
    from outrider.backends.registry import servers

    return ["local", "transformers", *(engine.name for engine in servers()), "mlx"]


# ----------------------------------------------------------------------------
# What `outrider bench` shows: a table of 80 columns, verdicts, and where files and plots are.
# ----------------------------------------------------------------------------


def report(frontier: Frontier, out: Path, console: Console, exact: bool = True) -> None:
    """Write frontier.json and the plots, print tables and verdicts.

    Args:
        exact: whether greedy and coupled output must be plain decoding's; other engines' numerics change with their
            batches.

    Raises:
        ValueError: it had to be and was not: a bug worth reporting.
    """
    from outrider.evaluation.loadtest.plots import write_plots

    path = frontier.save(out)
    _print(frontier, console)
    show_paths(console, path, *write_plots(frontier, out))
    wrong = sorted({point.variant for point in frontier.points if point.mismatches})
    if wrong and exact:
        raise ValueError(
            f"output differs from plain decoding with {', '.join(wrong)}; this is a bug, please report it."
        )
    _print_gains(frontier, console)
    show_lines(console, *_verdict(frontier))


def _print_gains(frontier: Frontier, console: Console) -> None:
    """Gains of the highlighted variants, at six values at most; frontier.json has all."""
    from outrider.evaluation.loadtest.metrics import INTERVAL
    from outrider.evaluation.loadtest.plots import highlighted

    titles = {
        "throughput": ("throughput over that of {}", "tokens/s promised to a user"),
        "speed": ("tokens/s of the median user over those with {}", "tokens/s of all users"),
    }
    for figure, (title, given) in titles.items():
        found = {(gain.variant, gain.at): gain for gain in frontier.gains if gain.figure == figure}
        if not found:
            return
        values = sorted({at for _, at in found})
        values = [values[place * (len(values) - 1) // 5] for place in range(6)] if len(values) > 6 else values
        against = next(iter(found.values())).against
        rows = [
            (variant, *(_gain_cell(found[variant, at]) for at in values))
            for variant in reversed(highlighted(frontier))
            if (variant, values[0]) in found
        ]
        if any(any(cells) for _, *cells in rows):
            note = f"by {given} (below: {100 * INTERVAL:.0f} % interval; blank: outside of what was measured)"
            show_lines(console, f"{title.format(against)}, {note}")
            headings = ("variant", *(f"{at:.3g}" for at in values))
            console.print(terminal_table(headings, rows, text=("variant",), box=None, padding=(0, 1, 0, 0)))
        else:
            show_lines(console, f"{title.format(against)}: the curves have no {given} in common; measure more loads")


def _gain_cell(gain: Gain) -> str:
    if gain.ratio is None:
        return ""
    return f"{gain.ratio:.2f}" if gain.low is None else f"{gain.ratio:.2f}\n{gain.low:.2f}-{gain.high:.2f}"


def _print(frontier: Frontier, console: Console) -> None:
    from outrider.evaluation.loadtest.metrics import table_rows

    headings, *rows = table_rows(frontier)
    ours = "draft in % of the time" if "draft" in headings else "gap between outputs in ms"
    title = f"medians; {frontier.arrivals} arrivals; TTFT in ms, {ours}, other: mismatches"
    table = terminal_table(headings, rows, text=("variant",), title=title, box=None, padding=(0, 1, 0, 0))
    console.print(table)
    for level in frontier.levels:
        console.print(
            f"load {level.level:g}: best adaptive {level.adaptive} is {level.ratio:.3f}x best static {level.static}",
            highlight=False,
        )
    for verdict in frontier.overall:
        kind = "adaptive" if verdict.adaptive else "static"
        console.print(
            f"{verdict.variant} ({kind}): {verdict.mean_ratio:.2f}x no speculation (mean of loads), "
            f"{verdict.worst_ratio:.2f}x at worst",
            highlight=False,
        )


def _verdict(frontier: Frontier) -> list[str]:
    """What the measured ratios say, and the next command where there is one drafter."""
    from outrider.backends.local import is_adaptive
    from outrider.evaluation.loadtest.metrics import speedups

    ratios, settings = speedups(frontier), frontier.settings
    if not ratios:
        return ["No verdict: add `none` to --variants, and loads at which it meets the service level."]
    adapt = ""
    drafters = list(settings.get("drafters", {}).values())
    if len(drafters) == 1 and not any(map(is_adaptive, ratios)):
        models = shlex.join(["--target", settings["target"], "--drafter", drafters[0]["choice"]])
        adapt = (
            f"outrider profile {models} --out profile.json, then this command with --profile profile.json and another"
        )
        adapt += " --out: variants that choose by the load"
    return load_verdict(ratios, "plain" if frontier.arrivals == "closed" else "plain's goodput", adapt=adapt)


def choose_traffic(temperature: str, top_p: float, coupled: bool) -> Traffic:
    """What `--temperature`, `--top-p` and `--coupled` say.

    Raises:
        ValueError: not temperatures, or what does not go together.
    """
    from outrider.evaluation.loadtest.load import Traffic

    return Traffic(split_numbers("--temperature", temperature), top_p, coupled)


def calibration_note(metadata: Mapping[str, Any], traffic: Traffic) -> list[str]:
    """A line where confidences were not calibrated at every temperature of the traffic."""
    from outrider.checkpoints.checkpoint import CALIBRATION, SAMPLED_CALIBRATION

    fitted = [
        metadata.get(name, {}).get("sampling", {}).get("temperature") for name in (CALIBRATION, SAMPLED_CALIBRATION)
    ]
    known = [temperature for temperature in fitted if temperature is not None]
    if not known or set(traffic.temperatures) <= set(known):
        return []
    found, sampled = (", ".join(f"{one:g}" for one in some) for some in (known, traffic.temperatures))
    return [
        f"confidences were calibrated at temperature {found}, requests are sampled at {sampled}: variants that read "
        "them plan with other probabilities (outrider calibrate --temperature T)"
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
    from outrider.backends.local import NamedDrafter
    from outrider.decoding.cost import Profile
    from outrider.decoding.profile import setting_of

    costs = {path: Profile.load(path) for path in profiles}
    settings = {name: setting_of(target, one.drafter) for name, (_, _, one) in opened.items()}
    for cost in costs.values():
        if cost.setting not in settings.values():
            cost.check(next(iter(settings.values())))
    found = []
    for name, (text, choice, one) in opened.items():
        limit = one.recommended_threshold if threshold is None else threshold
        limit = None if one.drafter.trees else limit
        fitting = next((path for path, cost in costs.items() if cost.setting == settings[name]), None)
        files = [] if choice.directory is None else sorted(choice.directory.iterdir())
        about = {
            "choice": text,
            "algorithm": one.algorithm,
            "sha256": _digest([path for path in files if path.suffix in (".json", ".safetensors")]),
            "threshold": limit,
            "profile_sha256": _digest([] if fitting is None else [fitting]),
        }
        found.append(
            NamedDrafter(name, one.drafter, limit, cost=None if fitting is None else costs[fitting], about=about)
        )
    return found


def _digest(paths: Sequence[Path]) -> str | None:
    """Of files that decide: a profile measured anew, a drafter trained or calibrated again."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest() if paths else None


def bench_command(
    *,
    target: Annotated[str, option(MODELS, "model id or directory", show_default=_SMOLLM2)] = SMOLLM2,
    drafter: opt.DrafterNames = [AUTO],  # noqa: B006 - typer copies it
    backend: Annotated[str, option(MODELS, BACKENDS, metavar="ENGINE", show_default=False)] = "local",
    tasks: opt.Tasks,
    data_dir: opt.DataDirectory = None,
    prompts: Annotated[int, rare(PROMPTS, "how many conversations there are in all", min=1)] = 100,
    turns: Annotated[int, rare(PROMPTS, "of each; the baseline answers the earlier ones", min=1)] = 1,
    thinking: Annotated[bool, rare(PROMPTS, "ask the chat template for it", "--thinking/--no-thinking")] = False,
    max_new_tokens: Annotated[int, option(PROMPTS, "per response", min=1)] = 64,
    seed: Annotated[int, rare(PROMPTS, "of the mix of prompts, of arrivals and of sampling")] = 0,
    temperature: opt.Temperatures = "0",
    top_p: opt.TopP = 1.0,
    coupled: opt.Coupled = False,
    arrivals: Annotated[Literal["closed", "poisson"], option(LOAD, "users that wait, or a rate")] = "closed",
    concurrency: Annotated[str | None, option(LOAD, "users (closed); 1,2,4,8,16,32 where an engine batches")] = None,
    rates: Annotated[str, option(LOAD, "requests per second (poisson)")] = "0.5,1,2",
    repeats: Annotated[int, rare(LOAD, "of every point", min=1)] = 3,
    requests_per_point: Annotated[
        int | None, rare(LOAD, "counted requests, one per user where that is more; 12 by default", min=1)
    ] = None,
    seconds_per_point: Annotated[float | None, rare(LOAD, "a window of that length instead", min=0.0)] = None,
    max_requests: Annotated[int, rare(LOAD, "served at once (poisson)", min=1)] = 32,
    token_budget: Annotated[int, rare(LOAD, "most rows of one forward (local)", min=1)] = 512,
    sla_ttft: opt.SlaTtft = 2.0,
    sla_tokens_per_second: opt.SlaTokensPerSecond = 5.0,
    variants: opt.Variants = None,
    profile: Annotated[
        list[Path] | None, option(DRAFTS, "from outrider profile; adaptive variants need it", metavar="PATH")
    ] = None,
    against: Annotated[str | None, rare(DRAFTS, "variant that gains are over; MTP-1, else none, by default")] = None,
    user_speeds: Annotated[str | None, rare(DRAFTS, "promised tokens/s: gains at those; as --against has")] = None,
    confidence_threshold: Annotated[float | None, rare(DRAFTS, "of variant threshold", min=0.0, max=1.0)] = None,
    tree: Annotated[str | None, rare(DRAFTS, f"{opt.TREE_FORM} ({opt.TREE_METHODS})", metavar="SIZE")] = None,
    assistant: Annotated[str | None, rare(DRAFTS, "smaller model of variant assisted (transformers)")] = None,
    prompt_lookup: Annotated[int, rare(DRAFTS, "tokens copied per round (transformers)", min=1)] = 10,
    base_url: Annotated[
        str | None, option(SERVER, f"server that speculates; its key, if any, in {opt.API_KEY}")
    ] = None,
    baseline_url: Annotated[str | None, option(SERVER, "the same server without speculation")] = None,
    served_model: Annotated[str | None, rare(SERVER, "the target's name on the servers")] = None,
    chat: Annotated[bool, rare(SERVER, "servers that render prompts themselves", "--chat")] = False,
    launch: Annotated[bool, option(SERVER, "start the engine, and stop it whatever happens", "--launch")] = False,
    engine_dtype: Annotated[
        opt.EngineType | None, rare(SERVER, "of a started engine; float32 on the CPU, bfloat16 elsewhere")
    ] = None,
    engine_python: opt.EnginePython = sys.executable,
    engine_command: opt.EngineCommand = None,
    engine_args: opt.EngineArgs = "",
    engine_target: Annotated[str | None, rare(SERVER, "what it loads instead of --target, as T.gguf")] = None,
    engine_drafter: Annotated[str | None, rare(SERVER, "... and instead of --drafter, as D.gguf")] = None,
    startup_timeout: Annotated[float, rare(SERVER, "seconds until a started engine must serve", min=0.0)] = 600.0,
    out: Annotated[Path, option(GENERAL, "directory for points and plots; run again to go on")],
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Put load on an engine, ours or another: throughput against user speed."""
    from outrider.backends.base import Launch
    from outrider.backends.local import KNOWN, NO_SPECULATION, engine_config
    from outrider.backends.openai import Endpoint, shown_url
    from outrider.backends.registry import server_of
    from outrider.backends.transformers import load_causal_lm
    from outrider.data.chat import Chat
    from outrider.evaluation.loadtest.engines import (
        SPECULATIVE,
        launched_engine,
        local_engine,
        mlx_engine,
        running_servers,
        transformers_engine,
    )
    from outrider.evaluation.loadtest.load import mixed_prompts
    from outrider.evaluation.loadtest.metrics import Frontier, Journal, Sla
    from outrider.evaluation.loadtest.sweep import Sweep, Workload, check_levels, run_workload
    from outrider.target.hub import model_config, resolve_model
    from outrider.training.parallel import join

    if backend not in kinds():
        raise ValueError(f"--backend {backend} is none of {', '.join(kinds())}.")
    set_up(threads)
    size = choose_tree(tree, confidence_threshold)
    if size is not None and backend != "local":
        raise ValueError(f"--tree is for --backend local; {backend} drafts as it is configured to.")
    known = Chat.load(target)
    traffic = choose_traffic(temperature, top_p, coupled)
    promised = () if user_speeds is None else split_numbers("--user-speeds", user_speeds)
    if promised and min(promised) <= 0:
        raise ValueError(f"--user-speeds {user_speeds}: tokens per second are above 0.")
    texts = name_drafters(drafter)
    if texts == {drafter[0]: drafter[0]}:
        texts = {"": drafter[0]}  # the only one needs no name
    elif backend != "local" or size is not None:
        raise ValueError("several or named drafters (--drafter) are for --backend local without --tree.")
    if not traffic.greedy and backend in ONE_AT_A_TIME:
        raise ValueError(f"--temperature {temperature}: {backend} decodes greedily here; leave it out.")
    if coupled and backend != "local":
        raise ValueError(f"--coupled is for --backend local; {backend} samples in its own way.")
    names = None if variants is None else split_names(variants, f"variant; there are {KNOWN}")
    if arrivals == "closed":
        default = "1" if backend in ONE_AT_A_TIME else _CONCURRENCY
        levels = split_numbers("--concurrency", concurrency if concurrency is not None else default)
    else:
        levels = split_numbers("--rates", rates)
    check_levels(arrivals, levels)
    check_outputs(out)
    users = {level: int(level) if arrivals == "closed" else max_requests for level in levels}
    if requests_per_point is None and seconds_per_point is None:
        requests_per_point = 12
    work = Workload(
        mixed_prompts(known.tokenizer, split_names(tasks), prompts, seed=seed, thinking=thinking), turns, max_new_tokens
    )

    most_users = max(users.values())

    def pick(name: str = "") -> DrafterChoice:
        found = require_drafter(texts[name], target, thinking)
        warn_of_thinking(found, thinking)
        return found

    def measured_engine(place: str) -> MeasuredEngine:
        if backend == "local":
            choices, loaded = {name: pick(name) for name in texts}, load(target, place)
            opened = {name: (texts[name], choice, choice.open(loaded, tree=size)) for name, choice in choices.items()}
            for name, (_, _, one) in opened.items():
                show_lines(console, *(f"{name} {line}".lstrip() for line in calibration_note(one.metadata, traffic)))
            return local_engine(
                loaded,
                named_drafters(loaded, opened, profile or [], threshold=confidence_threshold),
                names=names,
                config_at=lambda level: engine_config(work.longest + max_new_tokens, users[level], token_budget),
                users=most_users,
                token_budget=token_budget,
            )
        if backend == "transformers":
            dtype = default_dtype(place)
            model = load_causal_lm(target, place, dtype)
            helper = None if assistant is None else load_causal_lm(assistant, place, dtype)
            about = {"assistant": assistant, "prompt_lookup": prompt_lookup, "dtype": dtype_name(dtype)}
            return transformers_engine(
                model, sorted(known.eos_ids), prompt_lookup, assistant=helper, names=names, settings=about
            )
        if backend == "mlx":
            choice = pick()
            if choice.directory is None or choice.hybrid:
                kind = HYBRID if choice.hybrid else choice.kind
                raise ValueError(f"--backend mlx decodes with a trained drafter, not with {kind}: give its directory.")
            # mlx-lm computes in the type that the model is stored in.
            stored: Any = model_config(resolve_model(target)).get_text_config().dtype
            about = {"dtype": None if stored is None else dtype_name(stored)}
            return mlx_engine(target, choice.directory, names=names, settings=about)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                f"--backend {backend}: one process asks a server; torchrun is for local, transformers and mlx."
            )
        engine = server_of(backend)
        endpoint = Endpoint(
            base_url or "http://127.0.0.1",
            served_model,
            os.environ.get(opt.API_KEY),
            engine=engine,
            chat_of=work.chat_of if chat else None,
            thinking=thinking if thinking or engine.takes_thinking else None,
        )
        return launch_engine(engine, endpoint) if launch else reach_servers(endpoint)

    def reach_servers(endpoint: Endpoint) -> MeasuredEngine:
        if base_url is None:
            raise ValueError(
                f"--backend {backend}: name a running server (--base-url, and --baseline-url for one without "
                "speculation), or let it be started (--launch)."
            )
        endpoints = {SPECULATIVE: endpoint}
        if baseline_url is not None:
            endpoints[NO_SPECULATION] = replace(endpoint, url=baseline_url)
        urls = {"base_url": base_url, "baseline_url": baseline_url}
        about = {**{name: url and shown_url(url) for name, url in urls.items()}, "chat": chat}
        return running_servers(endpoints, known.tokenizer, names=names, settings=about)

    def launch_engine(engine: ExternalEngine, endpoint: Endpoint) -> MeasuredEngine:
        if base_url or baseline_url:
            raise ValueError("--launch starts the servers itself: leave out --base-url and --baseline-url.")
        plan = Launch(
            target=engine_target or (known.name if engine.gguf else str(resolve_model(known.name))),
            dtype=engine_dtype or dtype_name(default_dtype(device)),
            prompt_cache=False,
            python=engine_python,
            executable=engine_command,
            extra=split_words("--engine-args", engine_args),
        )
        engine.command(plan)  # what cannot be started needs no drafter either
        return launched_engine(
            engine,
            plan,
            pick().speculation(engine, known.name, engine_drafter),
            endpoint=endpoint,
            tokenizer=known.tokenizer,
            names=names,
            capacity=partial(work.capacity, most_users),
            logs=out / "logs",
            timeout=startup_timeout,
            settings={
                "engine_args": engine_args,
                "chat": chat,
                "engine_drafter": engine_drafter,
                "dtype": None if engine.gguf else plan.dtype,
            },
        )

    with join(device) as ranks, ExitStack() as stack:
        console = Terminal(quiet=not ranks.main)
        engine = measured_engine(str(ranks.device))
        stack.callback(engine.close)
        if against is not None and against not in engine.variants:
            raise ValueError(f"--against {against}: not among what is measured, {', '.join(engine.variants)}.")
        sweep = Sweep(
            arrivals=arrivals,
            levels=levels,
            variants=tuple(engine.variants),
            repeats=repeats,
            requests=requests_per_point,
            seconds=seconds_per_point,
            max_new_tokens=max_new_tokens,
            sla=Sla(sla_ttft, sla_tokens_per_second),
            seed=seed,
            grouped=engine.grouped,
            traffic=traffic,
        )
        settings = sweep.settings() | engine.settings | {"backend": backend, "target": target}
        settings |= {} if backend == "local" else {"drafter": texts[""]}
        settings |= {"tasks": tasks, "prompts": len(work.prompts), "thinking": thinking, "turns": turns}
        settings |= {"max_requests": None if arrivals == "closed" else max_requests, "device": ranks.device.type}
        settings |= {"token_budget": token_budget, "tree": None if size is None else size.setting, "world": ranks.world}
        settings |= {"prompts_sha256": hashlib.sha256(repr(work.prompts).encode()).hexdigest()}
        journal = ranks.from_main(lambda: Journal(out, settings | {"machine": machine(), "versions": versions()}))
        with counting(console, "bench") as on_progress:
            run_workload(
                sweep, engine, work, tokenizer=known.tokenizer, journal=journal,
                thinking=thinking, ranks=ranks, on_progress=on_progress,
            )  # fmt: skip
        if ranks.main:
            frontier = Frontier.of(arrivals, journal.points, journal.settings, against=against, user_speeds=promised)
            report(frontier, out, console, exact=engine.exact)


def bench_table(
    directories: Annotated[list[Path], typer.Argument(help="--out of outrider bench, one per engine")],
    *,
    out: Annotated[Path | None, option(FILES, "Markdown file for the table")] = None,
) -> None:
    """Compare engines that bench measured, each with itself without speculation."""
    from outrider.evaluation.loadtest.sweep import HEADINGS, side_by_side

    rows, console = side_by_side(directories), Terminal()
    console.print(engines_table(rows))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        lines = [HEADINGS, ("---", "---", *("---:" for _ in HEADINGS[2:])), *rows]
        out.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")
        show_paths(console, out)


def engines_table(rows: list[tuple[str, ...]]) -> Table:
    """The rows of `side_by_side` for the terminal."""
    from outrider.evaluation.loadtest.sweep import HEADINGS

    return terminal_table(HEADINGS, rows, text=HEADINGS[:2], box=None, padding=(0, 1, 0, 0))


def simulate_command(
    *,
    recording: Annotated[
        Path | None, option(RECORD, "decode --tasks here, write traces to this .npz, and stop", "--record")
    ] = None,
    target: Annotated[str, option(RECORD, "model id or directory", show_default=_SMOLLM2)] = SMOLLM2,
    drafter: Annotated[str, option(RECORD, CHOICES, show_default=False)] = AUTO,
    tasks: Annotated[str | None, option(RECORD, "JSONL files or shipped sets; first turns")] = None,
    data_dir: opt.DataDirectory = None,
    max_samples: Annotated[int, option(RECORD, "prompts in all, mixed from the tasks", min=1)] = 100,
    thinking: Annotated[bool, rare(RECORD, "ask the chat template for it", "--thinking/--no-thinking")] = False,
    device: Annotated[str, rare(RECORD, "auto, cpu, cuda, ...")] = "auto",
    threads: Annotated[int | None, rare(RECORD, "CPU threads; $OMP_NUM_THREADS, else all", min=1, max=1024)] = None,
    temperature: Annotated[str, option(RECORD, "as 0, or 0,1: prompts take turns")] = "0",
    top_p: Annotated[float, rare(RECORD, "keep the likeliest tokens of this total probability")] = 1.0,
    coupled: Annotated[bool, rare(RECORD, "by noise of seed and position", "--coupled")] = False,
    traces: Annotated[Path | None, option(PREDICT, "what --record wrote")] = None,
    profile: Annotated[Path | None, option(PREDICT, 'outrider profile\'s, or {"sps": [...], ...}')] = None,
    validate: Annotated[Path | None, option(PREDICT, "measured frontier.json to compare with")] = None,
    out: Annotated[Path | None, option(PREDICT, "directory for frontier.json, plots, validation.json")] = None,
    concurrency: Annotated[str, option(LOAD, "users of closed loops")] = _CONCURRENCY,
    rates: Annotated[str | None, option(LOAD, "Poisson arrivals per second, instead")] = None,
    requests: Annotated[int, rare(LOAD, "counted per point, one per user where that is more", min=1)] = 12,
    max_new_tokens: Annotated[int, option(LOAD, "per response; no more than was recorded", min=1)] = 64,
    repeats: Annotated[int, rare(LOAD, "other arrivals each; a closed loop needs one", min=1)] = 1,
    seed: Annotated[int, rare(LOAD, "of the mix of prompts, and of arrivals")] = 0,
    sla_ttft: opt.SlaTtft = 2.0,
    sla_tokens_per_second: opt.SlaTokensPerSecond = 5.0,
    variants: opt.Variants = None,
    confidence_threshold: Annotated[
        float | None, rare(DRAFTS, "of variant threshold; as recommended if not given", min=0.0, max=1.0)
    ] = None,
    replicas: Annotated[int, option(MACHINE, "engines behind one router", min=1)] = 1,
    routing: Annotated[str, rare(MACHINE, "least-loaded or round-robin")] = "least-loaded",
    max_requests: Annotated[
        int | None, rare(MACHINE, "running at once, per engine; all users, or 32 of Poisson arrivals", min=1)
    ] = None,
    token_budget: Annotated[int, rare(MACHINE, "rows per step", min=1)] = 512,
    scale_verify: Annotated[float, option(MACHINE, "target forwards take so many times as long")] = 1.0,
    scale_draft: Annotated[float, option(MACHINE, "drafts take so many times as long")] = 1.0,
) -> None:
    """Predict a load test from a profile and recorded drafts."""
    import numpy as np
    from pydantic import TypeAdapter, ValidationError

    from outrider.backends.local import KNOWN, default_variants, engine_config
    from outrider.decoding.scheduler import EngineConfig
    from outrider.evaluation.loadtest.load import Ask, Traffic
    from outrider.evaluation.loadtest.metrics import Frontier, Sla
    from outrider.evaluation.loadtest.plots import write_plots
    from outrider.evaluation.loadtest.simulate import check_comparable, compare, load_machine, serve, simulate_sweep
    from outrider.evaluation.loadtest.sweep import Sweep
    from outrider.evaluation.loadtest.traces import Traces

    console = Terminal()
    to_record = choose_traffic(temperature, top_p, coupled)
    if recording is not None:
        if tasks is None:
            raise ValueError("--record needs --tasks: prompts to decode.")
        check_outputs(files=[recording])
        set_up(threads)
        found = record_traces(
            target, drafter, split_names(tasks), traffic=to_record,
            count=max_samples, tokens=max_new_tokens, seed=seed, thinking=thinking, device=device, console=console,
        )  # fmt: skip
        found.save(recording)
        show_paths(console, recording)
        return
    if traces is None or profile is None or out is None:
        raise ValueError("give --traces, --profile and --out; or --record FILE to make traces first.")
    check_outputs(out)
    recorded, measured = Traces.load(traces), None if validate is None else Frontier.load(validate)
    setting, recommended = recorded.about.get("setting"), recorded.about.get("threshold")
    unsaid = f"{traces} does not say what was recorded; record again (--record {traces})."
    if not isinstance(setting, dict) or not isinstance(recommended, (int, float, NoneType)):
        raise ValueError(unsaid)
    try:
        traffic = TypeAdapter(Traffic).validate_python(recorded.about.get("traffic"))
    except ValidationError as error:
        raise ValueError(unsaid) from error
    machine = load_machine(profile, setting, scale_draft, verify=scale_verify)
    threshold = recommended if confidence_threshold is None else confidence_threshold
    allowed = default_variants(recorded.slots, threshold, not np.isnan(recorded.confidences_NK).any())
    names = allowed if variants is None else split_names(variants, f"variant; there are {KNOWN}")
    kind: Literal["closed", "poisson"] = "closed" if rates is None else "poisson"
    levels = split_numbers("--concurrency", concurrency) if rates is None else split_numbers("--rates", rates)
    sla = Sla(sla_ttft, sla_tokens_per_second)
    sweep = Sweep(
        arrivals=kind, levels=levels, variants=tuple(names), repeats=repeats, requests=requests, seconds=None,
        max_new_tokens=max_new_tokens, sla=sla, seed=seed, traffic=traffic,
    )  # fmt: skip
    settings = sweep.settings() | {"token_budget": token_budget, "max_requests": max_requests}
    settings |= {"replicas": replicas, "routing": routing}
    settings |= {"simulated": {"scale_verify": scale_verify, "scale_draft": scale_draft, "traces": recorded.about}}
    if measured is not None:
        check_comparable(json.loads(json.dumps(settings)), measured.settings)
    router, asks = _routing(routing), [Ask(response.prompt, response.params) for response in recorded.responses]

    def serving(variant: str, level: float) -> Cluster:
        if kind == "poisson":
            limit = max_requests or EngineConfig.max_requests
        else:  # the least loaded replica never has more than its share
            users = math.ceil(level / replicas) if routing == "least-loaded" else int(level)
            limit = min(users, max_requests or users)
        longest = max(len(ask.prompt) for ask in asks) + max_new_tokens
        engine = engine_config(longest, limit, token_budget)
        return serve(variant, recorded, machine, engine=engine, threshold=threshold, replicas=replicas, routing=router)

    with counting(console, "simulate") as on_progress:
        points = simulate_sweep(sweep, serving, asks, on_progress=on_progress)
    frontier = Frontier.of(kind, points, settings)
    path = frontier.save(out)
    console.print(points_table(frontier.points))
    show_paths(console, path, *write_plots(frontier, out))
    if measured is not None:
        report_simulation(compare(frontier.points, measured.points), out / "validation.json", console)


def record_traces(
    target: str,
    drafter: str,
    tasks: list[str],
    *,
    traffic: Traffic,
    count: int,
    tokens: int,
    seed: int,
    thinking: bool,
    device: str,
    console: Console,
) -> Traces:
    """Decode the prompts a load test would ask, with a draft at every position."""
    from outrider.data.sources import prompts_label
    from outrider.decoding.profile import setting_of
    from outrider.decoding.request import StopRules
    from outrider.evaluation.loadtest.load import mixed_prompts
    from outrider.evaluation.loadtest.traces import record

    choice = require_drafter(drafter, target, thinking)
    warn_of_thinking(choice, thinking)
    loaded = load(target, device)
    opened = choice.open(loaded)
    assert loaded.tokenizer is not None
    show_lines(console, *calibration_note(opened.metadata, traffic))
    prompts = [prompt.tokens for prompt in mixed_prompts(loaded.tokenizer, tasks, count, seed=seed, thinking=thinking)]
    about = {
        "setting": setting_of(loaded, opened.drafter).model_dump(),
        "tasks": [prompts_label(task) for task in tasks],
        "max_new_tokens": tokens,
        "thinking": thinking,
        "threshold": opened.recommended_threshold,
        "traffic": asdict(traffic),
        "versions": versions(),
        "machine": machine(),
    }
    with counting(console, "record") as on_progress:
        asks = traffic.asks(prompts, seed)
        found = record(loaded, opened.drafter, asks, rules=StopRules(tokens), about=about, on_progress=on_progress)
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


def report_simulation(compared: list[PointError], path: Path, console: Console) -> None:
    """Print and write the error at every point; the worst is named."""
    from outrider.evaluation.loadtest.simulate import errors_of, validation_rows

    headings, *rows = validation_rows(compared)
    title = "tokens per second: simulated against measured"
    console.print(terminal_table(headings, rows, text=("variant",), title=title))
    show_lines(console, *errors_of(compared))
    worst = max(compared, key=lambda one: abs(one.error))
    content = {"points": [one.model_dump() for one in compared], "worst": worst.model_dump()}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    show_paths(console, path)


def _routing(name: str) -> Routing:
    from outrider.evaluation.loadtest.simulate import Routing

    for known in get_args(Routing):
        if name == known:
            return known
    raise ValueError(f"--routing {name!r}: choose one of {', '.join(get_args(Routing))}.")

"""outrider bench --backend KIND --tasks FILES_OR_NAMES --concurrency 1,2,4,8,16,32 --out DIR"""

from __future__ import annotations

import hashlib
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from outrider.benchmark.frontier import Sweep
from outrider.benchmark.journal import Journal
from outrider.benchmark.local import engine_config
from outrider.benchmark.metrics import Sla
from outrider.benchmark.prompts import mixed_prompts
from outrider.benchmark.summary import Frontier
from outrider.benchmark.variants import KNOWN
from outrider.benchmark.workload import Workload, run_workload
from outrider.cli.backends import ONE_AT_A_TIME, Chosen, Kind, choose_mlx, choose_transformers
from outrider.cli.bench_local import choose_local
from outrider.cli.bench_report import report
from outrider.cli.bench_servers import API_KEY, EngineType, ServerOptions, Wanted, choose_servers
from outrider.cli.drafters import AUTO, CHOICES, DrafterChoice, require_drafter, warn_of_thinking
from outrider.cli.options import TREE, choose_tree, counting, split_names, split_numbers
from outrider.cli.runtime import load, set_up
from outrider.data.chat import Chat
from outrider.drafters.tree_size import FORM
from outrider.evaluation.results import machine
from outrider.formats import versions
from outrider.target.resolve import EMBEDDED_ID
from outrider.training.ranks import join

_CONCURRENCY = "1,2,4,8,16,32"


def bench_command(
    tasks: Annotated[
        str, typer.Option(help="comma-separated JSONL files, shipped sets or tasks (gsm8k, mt-bench, ...)")
    ],
    out: Annotated[Path, typer.Option(help="directory for points, summary and plots; what is there is gone on with")],
    target: Annotated[str, typer.Option(help="model id or directory")] = EMBEDDED_ID,
    drafter: Annotated[str, typer.Option(help=CHOICES)] = AUTO,
    backend: Annotated[Kind, typer.Option(help="what serves")] = "local",
    arrivals: Annotated[Literal["closed", "poisson"], typer.Option(help="users that wait, or a rate")] = "closed",
    concurrency: Annotated[
        str | None, typer.Option(help="users (closed); 1,2,4,8,16,32 where an engine batches")
    ] = None,
    rates: Annotated[str, typer.Option(help="requests per second (poisson)")] = "0.5,1,2",
    variants: Annotated[str | None, typer.Option(help="none,fixed-3,threshold,prefix,...,look-ahead+skip")] = None,
    profile: Annotated[Path | None, typer.Option(help="from outrider profile; adaptive variants need it")] = None,
    confidence_threshold: Annotated[float | None, typer.Option(help="of variant threshold")] = None,
    tree: Annotated[str | None, typer.Option(help=TREE, metavar=FORM)] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    requests_per_point: Annotated[
        int | None, typer.Option(min=1, help="counted requests, one per user where that is more; 12 by default")
    ] = None,
    seconds_per_point: Annotated[float | None, typer.Option(help="a window of that length instead")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="how many conversations there are in all")] = 100,
    turns: Annotated[int, typer.Option(min=1, help="of each conversation; the baseline answers the earlier ones")] = 1,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="ask the chat template for it")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    max_requests: Annotated[int, typer.Option(min=1, help="served at once (poisson)")] = 32,
    token_budget: Annotated[int, typer.Option(min=1, help="most rows of one forward (local)")] = 512,
    sla_ttft: Annotated[float, typer.Option(help="seconds to the first token")] = Sla.ttft,
    sla_tokens_per_second: Annotated[float, typer.Option(help="of each user")] = Sla.tokens_per_second,
    base_url: Annotated[str | None, typer.Option(help=f"server that speculates; its key, if any, in {API_KEY}")] = None,
    baseline_url: Annotated[str | None, typer.Option(help="the same server without speculation")] = None,
    served_model: Annotated[str | None, typer.Option(help="the target's name on the servers")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="servers that render prompts themselves")] = False,
    launch: Annotated[bool, typer.Option("--launch", help="start the engine, and stop it whatever happens")] = False,
    engine_dtype: Annotated[
        EngineType | None, typer.Option(help="of a started engine; float32 with --device cpu, bfloat16 with others")
    ] = None,
    engine_python: Annotated[str, typer.Option(help="python of the engine's environment")] = sys.executable,
    engine_command: Annotated[str | None, typer.Option(help="the engine's own command instead")] = None,
    engine_args: Annotated[str, typer.Option(help="further flags, as one string")] = "",
    engine_target: Annotated[str | None, typer.Option(help="what it loads instead of --target, as T.gguf")] = None,
    engine_drafter: Annotated[str | None, typer.Option(help="... and instead of --drafter, as D.gguf")] = None,
    startup_timeout: Annotated[float, typer.Option(help="seconds until a started engine must serve")] = 600.0,
    assistant: Annotated[str | None, typer.Option(help="smaller model of variant assisted (transformers)")] = None,
    prompt_lookup: Annotated[int, typer.Option(min=1, help="tokens copied per round (transformers)")] = 10,
    seed: Annotated[int, typer.Option()] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Load on an engine, ours or another: throughput against user speed, with and without speculation."""
    set_up(threads)
    size = choose_tree(tree, confidence_threshold)
    if size is not None and backend != "local":
        raise ValueError(f"--tree is for --backend local; {backend} drafts as it is configured to.")
    known = Chat.load(target)
    names = None if variants is None else split_names(variants, f"variant; there are {KNOWN}")
    if arrivals == "closed":
        levels = split_numbers("--concurrency", concurrency or ("1" if backend in ONE_AT_A_TIME else _CONCURRENCY))
    else:
        levels = split_numbers("--rates", rates)
    users = {level: int(level) if arrivals == "closed" else max_requests for level in levels}
    if requests_per_point is None and seconds_per_point is None:
        requests_per_point = 12
    work = Workload(mixed_prompts(known.tokenizer, split_names(tasks), prompts, seed, thinking), turns, max_new_tokens)

    def pick() -> DrafterChoice:
        found = require_drafter(drafter, target, thinking)
        warn_of_thinking(found, thinking)
        return found

    def choose(place: str) -> Chosen:
        if backend == "local":
            choice, most = pick(), max(users.values())
            return choose_local(
                choice, load(target, place), names, confidence_threshold, profile,
                lambda level: engine_config(work.longest + max_new_tokens, users[level], token_budget), most, size,
                token_budget,
            )  # fmt: skip
        if backend == "transformers":
            return choose_transformers(target, known, assistant, prompt_lookup, names, place)
        if backend == "mlx":
            return choose_mlx(target, pick(), names)
        options = ServerOptions(
            base_url, baseline_url, served_model, chat, launch, engine_python, engine_command, engine_args,
            engine_target, engine_drafter, engine_dtype, startup_timeout,
        )  # fmt: skip
        room = partial(work.room, max(users.values()))
        wanted = Wanted(known, pick, names, work.chat_of, thinking, room, out / "logs", device)
        return choose_servers(backend, options, wanted)

    with join(device) as ranks, ExitStack() as stack:
        console = Console(quiet=not ranks.main)
        chosen = choose(str(ranks.device))
        stack.callback(chosen.source.close)
        sweep = Sweep(
            arrivals, levels, tuple(chosen.variants), repeats, requests_per_point, seconds_per_point, max_new_tokens,
            Sla(sla_ttft, sla_tokens_per_second), seed, grouped=chosen.grouped,
        )  # fmt: skip
        settings = sweep.settings() | chosen.settings | {"backend": backend, "target": target, "drafter": drafter}
        settings |= {"tasks": tasks, "prompts": len(work.prompts), "thinking": thinking, "turns": turns}
        settings |= {"max_requests": None if arrivals == "closed" else max_requests, "device": device}
        settings |= {"token_budget": token_budget, "tree": None if size is None else size.setting, "world": ranks.world}
        settings |= {"prompts_sha256": hashlib.sha256(repr(work.prompts).encode()).hexdigest()}
        journal = ranks.from_main(lambda: Journal(out, settings | {"machine": machine(), "versions": versions()}))
        with counting(console, "bench") as on_progress:
            run_workload(sweep, chosen.source, work, known.tokenizer, thinking, journal, ranks, on_progress)
        if ranks.main:
            report(Frontier.of(arrivals, journal.points, settings), out, console, chosen.source.exact)

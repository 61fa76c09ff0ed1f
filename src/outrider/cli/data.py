"""`outrider prepare` (the target's responses, from this machine or servers) and `outrider inspect` (a look at them)."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.cli import options as opt
from outrider.cli.common import load, responding, show_lines, training_dtype
from outrider.cli.options import FILES, GENERAL, MODELS, SAMPLING, option, rare
from outrider.utils.measure import set_up, usable_device
from outrider.utils.packaged import packaged
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.data.inspection import Row
    from outrider.data.regenerate import DataSection, Regeneration


def prepare_command(
    overrides: opt.Overrides = None,
    *,
    target: Annotated[str | None, option(MODELS, "model id or directory; the recipe's by default")] = None,
    recipe: Annotated[Path | None, option(FILES, "take what is not given here from its data section")] = None,
    prompts: Annotated[
        list[str] | None, option(FILES, "JSONL file, shipped set, name, hf:owner/name[:split]; repeatable")
    ] = None,
    not_in: Annotated[list[str] | None, rare(FILES, "drop prompts that share 13 words with these; repeatable")] = None,
    data_dir: opt.DataDirectoryOfRecipe = None,
    limit: Annotated[int | None, option(FILES, "conversations of each --prompts", min=1)] = None,
    max_turns: Annotated[int | None, rare(FILES, "turns of each conversation of --prompts", min=1)] = None,
    out: Annotated[Path | None, option(FILES, "the responses file, *.jsonl")] = None,
    base_url: Annotated[
        list[str] | None, option("Servers", "OpenAI-compatible server of the target; repeatable; none: decode here")
    ] = None,
    model: Annotated[str | None, option("Servers", "the target's name on the servers")] = None,
    chat: Annotated[bool | None, rare("Servers", "servers without /v1/completions", "--chat")] = None,
    concurrency: Annotated[int | None, option("Servers", "requests in flight per server", min=1)] = None,
    timeout: Annotated[float | None, rare("Servers", "seconds per request")] = None,
    retries: Annotated[int | None, rare("Servers", "of a failed request", min=0)] = None,
    thinking: Annotated[
        bool | None, option(SAMPLING, "ask the chat template for it", "--thinking/--no-thinking")
    ] = None,
    max_new_tokens: Annotated[int | None, option(SAMPLING, "per response", min=2)] = None,
    max_prompt_tokens: Annotated[int | None, rare(SAMPLING, "longer prompts are skipped", min=1)] = None,
    temperature: Annotated[list[float] | None, option(SAMPLING, "0: the likeliest token; repeatable", min=0.0)] = None,
    top_p: Annotated[float | None, rare(SAMPLING, "keep the likeliest tokens of this total probability")] = None,
    top_k: Annotated[int | None, rare(SAMPLING, "keep the k likeliest tokens; 0: all", min=0)] = None,
    seed: Annotated[int | None, option(SAMPLING, "of random numbers")] = None,
    batch_size: Annotated[int | None, rare(GENERAL, "responses decoded at once here", min=1)] = None,
    max_minutes: Annotated[float | None, option(GENERAL, "stop after this long; run again to go on")] = None,
    device: Annotated[str | None, option(GENERAL, "auto, cpu, cuda, ...; the recipe's, else auto")] = None,
    threads: opt.Threads = None,
    overlap: Annotated[
        bool, option(FILES, "only print how much text the prompts share with --not-in", "--overlap")
    ] = False,
) -> None:
    """Generate the target's responses for training; run again to go on."""
    from pydantic import ValidationError

    from outrider.data.regenerate import DataSection, PromptSource
    from outrider.training.dataset import recipe_prompts, responses_path
    from outrider.training.recipe import load_recipe

    if overrides and recipe is None:
        raise ValueError(f"{overrides[0]} changes a field of a recipe: give --recipe.")
    base = load_recipe(recipe, overrides or ()) if recipe else None
    set_up(threads or (base.threads if base else None))
    given: dict[str, Any] = {
        "not_in": not_in or None,
        "directory": None if data_dir is None else str(data_dir),
        "base_urls": base_url,
        "served_model": model,
        "chat_api": chat,
        "concurrency": concurrency,
        "timeout": timeout,
        "retries": retries,
        "thinking": thinking,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "temperature": temperature if temperature is None or len(temperature) > 1 else temperature[0],
        "top_p": top_p,
        "top_k": top_k,
        "batch_size": batch_size,
        "max_minutes": max_minutes,
    }
    if prompts:
        given["prompts"] = [PromptSource(path=path, limit=limit, max_turns=max_turns) for path in prompts]
    elif limit is not None or max_turns is not None:
        raise ValueError("--limit and --max-turns belong to --prompts; a recipe has its own for each source.")
    chosen = {name: value for name, value in given.items() if value is not None}
    there = {**(base.data.model_dump() if base else {}), **chosen}
    name = target or (base.target if base else None)
    path = out or (responses_path(base) if base else None)
    if name is None or path is None or not there.get("prompts"):
        missing = "--target" if name is None else "--out" if path is None else "--prompts"
        raise ValueError(f"{missing} is missing: give it, or a --recipe that has it.")
    try:
        data = DataSection.model_validate({**there, "responses": str(path)})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"--{str(first['loc'][0]).replace('_', '-')} {first['input']}: {first['msg']}.") from error
    chosen_seed = seed if seed is not None else base.seed if base else 0
    precision = base.precision if base else "auto"
    place = device or (base.device if base else "auto")
    if overlap:
        if not data.not_in:
            raise ValueError("--overlap compares prompts with sets of --not-in: name one.")
        recipe_prompts(data, lambda line: show_lines(Terminal(), line))
        return
    run(data, name, path, seed=chosen_seed, device=place, precision=precision, console=Terminal())


def run(data: DataSection, target: str, path: Path, seed: int, device: str, precision: str, console: Console) -> None:
    """Complete the responses file and say what came out.

    Raises:
        ValueError: a prompt and its response may not fit the target's context, or see `make_responses`.
        typer.Exit: every request failed; the status is 1.
    """
    from outrider.data.chat import Chat
    from outrider.data.responses import TOKEN_BYTES, sole_writer, truncation_warning
    from outrider.training.dataset import check_prompt_files, make_responses
    from outrider.utils.files import check_space

    chat, loaded = Chat.load(target), None
    longest = data.max_prompt_tokens + data.max_new_tokens
    if longest > chat.max_context:
        raise ValueError(
            f"--max-prompt-tokens + --max-new-tokens is {longest} and {chat.name} reads {chat.max_context} tokens; "
            "lower one of them."
        )
    size = check_prompt_files(data) * data.max_new_tokens * TOKEN_BYTES
    check_space(path, size, "a file of the longest responses", remedy="Free some, or choose another --out.")
    if not data.base_urls:
        place = usable_device(device)
        # The type in which training would compute: the responses' settings name it.
        loaded = load(target, place, training_dtype(precision, place, console), console=console)
        chat = Chat.of(loaded)
    started = time.monotonic()
    with responding(console, data.max_minutes) as progress, sole_writer(path):
        made = make_responses(data, chat, loaded, seed=seed, path=path, on_progress=progress.update, say=progress.say)
    report(made, path, time.monotonic() - started, console=console)
    if warning := truncation_warning([reply.finished for reply in made.replies], data.max_new_tokens):
        console.print(warning, highlight=False, markup=False, soft_wrap=True)
    if made.failures and not made.replies:
        raise typer.Exit(1)


def report(made: Regeneration, path: Path, seconds: float, console: Console) -> None:
    """Counts, speed, lengths, and what to look out for."""
    from outrider.data.responses import companion_file

    counts = made.summary
    lines = [
        f"{counts.total} turns = {counts.done} done + {counts.skipped} skipped (prompt too long) "
        f"+ {counts.failed} failed + {counts.waiting} waiting",
        f"{counts.tokens} response tokens, {made.new_tokens / seconds:.0f} tokens/s in this run; "
        f"{counts.finished / max(counts.done, 1):.1%} of the responses finished by themselves",
    ]
    lengths = sorted(len(r.response) for r in made.replies)
    if len(lengths) > 1:
        cuts = statistics.quantiles(lengths, n=20, method="inclusive")
        marks = ", ".join(f"{percent}% {cuts[percent // 5 - 1]:.0f}" for percent in (5, 25, 50, 75, 95))
        lines.append(f"response length at quantile {marks}; longest {lengths[-1]}")
    if counts.inexact:
        lines.append(
            f"warning: {counts.inexact / counts.done:.1%} of the responses came as text and were split into tokens "
            "again; where the target had chosen other tokens, the drafter learns what it would not say. Prefer a "
            "server that returns token ids."
        )
    if counts.failed:
        lines.append(f"the first failure: {made.failures[0].reason}")
        lines.append(f"reasons of all: {companion_file(path, 'failed')}; the next run asks again")
    for line in [*lines, str(path)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def inspect_command(
    path: Annotated[Path, typer.Argument(help="a responses file (*.jsonl), or a drafter directory in any dialect")],
    *,
    target: Annotated[
        str | None, option(MODELS, "whose tokenizer, or whom the drafter is for; the one the file names by default")
    ] = None,
    row: Annotated[int | None, option("Responses", "only this row", min=0)] = None,
    limit: Annotated[int, option("Responses", "rows from the beginning", min=1)] = 5,
    tokens: Annotated[bool, option("Responses", "show token boundaries", "--tokens")] = False,
    html: Annotated[Path | None, option("Responses", "write a page here instead")] = None,
    tensors: Annotated[bool, option("Drafter", "list its tensors", "--tensors")] = False,
) -> None:
    """Show which tokens are trained on, or what a checkpoint is."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    console = Terminal(highlight=False, soft_wrap=True)
    path = packaged(path, "models")
    if path.suffix == ".jsonl":
        inspect_responses(path, target, row, limit=limit, tokens=tokens, html=html, console=console)
    elif path.exists():
        inspect_checkpoint(path, target, tensors, console=console)
    else:
        raise ValueError(f"{path} does not exist: give a responses file, *.jsonl, or a drafter directory.")


def inspect_checkpoint(path: Path, target: str | None, tensors: bool, console: Console) -> None:
    """Say what a checkpoint is.

    Raises:
        ValueError: it is in no dialect we read (told after what can be said of it), or damaged.
    """
    from outrider.checkpoints.describe import describe, describe_unknown, tensor_rows
    from outrider.checkpoints.registry import UnknownDialect
    from outrider.target.model import count_layers

    depth = None if target is None else count_layers(target)
    try:
        facts = describe(path, depth)
    except UnknownDialect as error:
        print_facts(describe_unknown(path, error.raw), console)
        raise
    print_facts(facts, console)
    if tensors:
        rows = tensor_rows(path)
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, shape, kind in rows:
            console.print(f"{name:{widths[0]}}  {shape:{widths[1]}}  {kind}", markup=False)


def print_facts(facts: Sequence[tuple[str, str]], console: Console) -> None:
    """Labels in a column, values beside them."""
    width = max(len(label) for label, _ in facts)
    for label, value in facts:
        console.print(f"{label:{width}}  {value}", markup=False)


def inspect_responses(
    path: Path, target: str | None, row: int | None, limit: int, tokens: bool, html: Path | None, console: Console
) -> None:
    """Rows of a responses file, on the terminal or as a page.

    Raises:
        ValueError: no such file or row, or its target's tokenizer cannot be found.
    """
    from outrider.data.inspection import html_page, rows_of, terminal_text
    from outrider.data.responses import read_responses
    from outrider.target.hub import load_tokenizer, resolve_model

    settings, replies = read_responses(path)
    rows = rows_of(replies)
    if row is not None and row >= len(rows):
        raise ValueError(f"{path} has {len(rows)} rows, numbered from 0; there is no row {row}.")
    chosen = range(min(limit, len(rows))) if row is None else [row]
    named = target or settings.get("target")
    if named is None:
        raise ValueError(f"{path} does not name its target: give --target.")
    tokenizer = load_tokenizer(resolve_model(str(named), weights=False))
    most = max((token for row in rows for token in row.sample.tokens), default=0)
    if most >= len(tokenizer):
        raise ValueError(f"{path}: token {most} is none of {named}, which has {len(tokenizer)}: give its own --target.")
    summary = [(str(name), str(value)) for name, value in settings.items()] + figures(rows)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(html_page(path.name, summary, [rows[i] for i in chosen], tokenizer=tokenizer), encoding="utf-8")
        console.print(f"{len(chosen)} of {len(rows)} rows in {html}", markup=False)
        return
    for name, value in summary:
        console.print(f"{name}: {value}", style="dim", markup=False)
    for number in chosen:
        console.print(f"\nrow {number}  {rows[number].caption}", style="bold", markup=False)
        console.print(terminal_text(rows[number], tokenizer, tokens))


def figures(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Counts over all rows."""
    total = sum(len(row.sample.tokens) for row in rows)
    supervised = sum(row.sample.num_supervised for row in rows)
    finished = Counter(done for row in rows for done in row.finished)
    return [
        ("rows", f"{len(rows)} of {len({row.sample.id for row in rows})} conversations"),
        ("tokens", f"{total}, {supervised} supervised ({supervised / max(total, 1):.0%})"),
        ("responses", f"{finished.total()}, {finished[True]} finished by themselves"),
        ("inexact", str(sum(not exact for row in rows for exact in row.exact))),
    ]

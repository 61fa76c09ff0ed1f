"""`outrider generate` (one prompt, streamed) and `outrider models` (drafters by target)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outrider.api.drafter import AUTO, HOW_TO_TRAIN, choose_drafter
from outrider.cli import options as opt
from outrider.cli.common import check_outputs, choose_tree, choose_typical, show_lines, show_paths, split_names
from outrider.cli.options import DRAFTS, PROMPTS, SAMPLING, SMOLLM2, option
from outrider.utils.measure import machine, set_up, versions
from outrider.utils.terminal import Terminal, printable

if TYPE_CHECKING:
    from outrider.api.model import Model
    from outrider.checkpoints.published import Published
    from outrider.decoding.request import Output
    from outrider.target.model import DecodingTarget

STYLES = {"draft": "green", "correction": "bold red", "bonus": "bold blue"}


def generate_command(
    prompt: Annotated[str, typer.Argument(help="what to answer")],
    *,
    target: opt.TargetName = SMOLLM2,
    drafter: opt.DrafterOrNone = AUTO,
    backend: opt.Backend = "local",
    raw: Annotated[bool, option(PROMPTS, "no chat template: continue the text")] = False,
    thinking: opt.Thinking = False,
    max_new_tokens: opt.MaxNewTokens = 256,
    stop: Annotated[list[str] | None, option(SAMPLING, "text that ends the response; repeatable")] = None,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    seed: opt.SeedOrRandom = None,
    confidence_threshold: Annotated[
        float | None, option(DRAFTS, "verify while so confident; else by cost, per round", min=0.0, max=1.0)
    ] = None,
    tree: opt.Tree = None,
    lookup: opt.Lookup = None,
    typical: opt.Typical = None,
    show_rounds: Annotated[bool, option(DRAFTS, "colour drafts, corrections and bonus tokens")] = False,
    trace: Annotated[Path | None, option(DRAFTS, "JSON file of every round, for outrider report")] = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Answer a prompt, streamed."""
    from outrider.api.model import load
    from outrider.decoding.verification import lossy_note

    set_up(threads)
    console = Terminal(highlight=False, soft_wrap=True)
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # how Python shows bytes that are not UTF-8
        raise ValueError("the prompt is not UTF-8 text.")
    if not prompt.strip():
        raise ValueError("the prompt is empty: give at least one word to answer.")
    if raw and thinking:
        raise ValueError("--thinking asks the chat template for it, and --raw has none: leave one of them out.")
    check_outputs(files=[trace])
    size = choose_tree(tree, confidence_threshold)
    lossy, choice = choose_typical(typical), choose_drafter(drafter, target, thinking)
    if choice is None and (size is not None or lossy is not None):
        raise ValueError(f"--drafter {drafter}: nothing is drafted, so --tree and --typical have no meaning.")
    errors = Terminal(stderr=True, highlight=False, soft_wrap=True)
    texts = () if lookup is None else split_names(lookup, "text file")
    loading = partial(load, tree=size, backend=backend, lookup=texts, say=partial(show_lines, errors))
    model = loading(target, choice, device, thinking=thinking)
    used = "plain decoding"
    if model.drafter is not None:
        used = f"drafter {model.drafter.name}"
        if confidence_threshold is None and model.scheduling.costs:
            used += f"; {model.scheduling}"
    elif drafter == AUTO:
        used = f"plain decoding, no drafter for {target}: none in models/, none published that is read here "
        used += f"(outrider models); {HOW_TO_TRAIN}"
    if lossy is not None:
        used += f"; {lossy_note(lossy.settings)}"
    options: dict[str, Any] = {
        "raw": raw,
        "thinking": thinking,
        "max_new_tokens": max_new_tokens,
        "stop": stop or (),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "confidence_threshold": confidence_threshold,
    }
    chunks = []
    try:
        for chunk in model.stream(prompt, **options, typical=lossy, trace=trace is not None):
            chunks.append(chunk)
            if show_rounds:
                console.print(coloured(chunk, model.target), end="")
            else:
                sys.stdout.write(printable(chunk.text) if sys.stdout.isatty() else chunk.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        print(flush=True)  # the shell's prompt gets a line of its own
        raise
    print(flush=True)
    if temperature > 0:
        used += f"; seed {chunks[-1].seed}"
    summary(chunks, used, errors, with_legend=show_rounds)
    if trace is not None:
        drafts = {"tree": tree, "lookup": lookup, "typical": typical, "decoded by": used}
        settings = {"prompt": prompt, **options, "seed": chunks[-1].seed, **drafts}
        write_trace(trace, model, chunks, settings=settings)
        show_paths(errors, trace)


def write_trace(path: Path, model: Model, chunks: Sequence[Output], settings: Mapping[str, Any]) -> None:
    """Write a response whose chunks have traces, as `outrider serve` writes its answers (docs/serving.md)."""
    from outrider.decoding.text import TextStream
    from outrider.serving.inspector import trace_json
    from outrider.utils.files import write_atomically

    tokenizer = model.target.tokenizer
    assert tokenizer is not None
    text, rounds = TextStream(tokenizer), []
    for chunk in chunks:
        assert chunk.trace is not None, "the chunks were decoded with trace=True"
        final = chunk.finish is not None
        rounds.append(trace_json(chunk.trace, text, lambda id: str(tokenizer.decode([id])), final=final))
    choice = {"index": 0, "text": "".join(chunk.text for chunk in chunks), "finish_reason": chunks[-1].finish}
    answer = {
        "object": "generation",
        "model": model.target.name,
        "choices": [choice | {"trace": rounds}],
        "settings": dict(settings),
        "machine": machine(),
        "versions": versions(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(answer, ensure_ascii=False, indent=1) + "\n")


def coloured(chunk: Output, target: DecodingTarget) -> Text:
    """The tokens of one round in their colours."""
    assert target.tokenizer is not None
    text = Text()
    for token, kind in zip(chunk.tokens, chunk.origins, strict=True):
        text.append(printable(str(target.tokenizer.decode([token]))), style=STYLES[kind])
    return text


def legend() -> str:
    """What the colours of `coloured` mean."""
    marks = ", ".join(f"[{style}]{kind}[/{style}]" for kind, style in STYLES.items())
    return f"[dim]tokens: {marks}[/dim]"


def summary(chunks: list[Output], used: str, console: Console, with_legend: bool) -> None:
    """Rounds, accepted length, where the time went and what was `used`, on one line."""
    tokens = sum(len(c.tokens) for c in chunks)
    drafting, verifying, other = (
        sum(getattr(c, f"{name}_seconds") for c in chunks) for name in ("draft", "verify", "other")
    )
    if with_legend:
        console.print(legend())
    seconds = drafting + verifying + other
    console.print(
        f"[dim]{tokens} tokens in {len(chunks)} rounds (tau {tokens / len(chunks):.2f}), {tokens / seconds:.1f} "
        "tokens/s; seconds: "
        f"draft {drafting:.2f}, verify {verifying:.2f}, other {other:.2f} (prefill included); {escape(used)}[/dim]"
    )


# ----------------------------------------------------------------------------
# outrider models [TARGET]: the drafters on this machine, and published ones.
# ----------------------------------------------------------------------------


_THINKING = {True: "on", False: "off", None: "?"}


def models(
    target: Annotated[str | None, typer.Argument(help="only drafters for targets with this in their name")] = None,
) -> None:
    """List drafters by target, on this machine and published.

    Repository, kind, dialect, rows of a block, and whether the training texts had thinking in them.
    """
    from outrider.checkpoints.published import PUBLISHED, drafters_for, shipped_drafters

    console = Terminal(highlight=False)
    wanted = (target or "").lower()
    # Of a directory: the drafters of the models that it may be a fine-tune of.
    offers = list(drafters_for(target)) if target is not None and Path(target).is_dir() else []
    related = {offer.made_for: offer for offer in reversed(offers)}
    local = [
        (made_for, directory)
        for made_for, directory in shipped_drafters()
        if wanted in made_for.lower() or made_for in related
    ]
    entries = [entry for entry in PUBLISHED if wanted in entry.target.lower() or entry.target in related]
    if not local and not entries:
        raise ValueError(
            f"no drafter on this machine and no published one for a target like {target!r}; outrider models lists all."
        )
    for offer in related.values():
        if line := offer.relation(str(target)):
            console.print(line, markup=False, soft_wrap=True)
    if local:
        console.print("on this machine", style="underline")
    for made_for, directory in local:
        console.print(made_for, style="bold", markup=False, soft_wrap=True)
        console.print(f"  {directory}", markup=False, soft_wrap=True)
    if entries:
        console.print("published", style="underline")
        console.print(models_table(entries))
        console.print("rows: of a block, or steps of a chain; blank: see the config. think: in the training texts.")
        console.print(
            "in brackets: not read here, and passed over by --drafter auto (pickle: weights that can run code; "
            "layers: of a kind that no drafter here has)."
        )


def models_table(entries: list[Published]) -> Table:
    """One row per checkpoint, two lines each so that 80 columns hold it; in brackets why one is not read."""
    view = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("target / drafter", "kind", "dialect", "rows", "think"):
        view.add_column(heading, justify="right" if heading == "rows" else "left", no_wrap=True)
    for number, entry in enumerate(entries):
        if number == 0 or entries[number - 1].target != entry.target:
            view.add_row(entry.target, style="bold")
        rows = "" if entry.rows is None else str(entry.rows)
        dialect = f"({entry.obstacle})" if entry.obstacle else entry.dialect
        view.add_row(f"  {entry.repo}", entry.algorithm, dialect, rows, _THINKING[entry.thinking])
    return view

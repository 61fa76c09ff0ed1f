"""`outrider generate` (one prompt, streamed), `serve` (OpenAI's API) and `models` (drafters by target)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outrider.api.config import GenerateConfig
from outrider.cli.common import show_lines, show_paths
from outrider.config import AUTO, Config, argument
from outrider.serving.config import ServeConfig, require_packages
from outrider.utils.terminal import Terminal, printable

if TYPE_CHECKING:
    from outrider.api.model import Model
    from outrider.checkpoints.published import Published
    from outrider.decoding.request import Output
    from outrider.target.model import DecodingTarget

STYLES = {"draft": "green", "correction": "bold red", "bonus": "bold blue"}


def generate(config: GenerateConfig) -> None:
    """Answer a prompt, streamed."""
    from outrider.api.scheduling import given_typical
    from outrider.serving.inspector import write_answer
    from outrider.utils.files import check_outputs

    check_outputs(files=[config.trace])
    typical, errors = given_typical(config.typical), Terminal(stderr=True, highlight=False, soft_wrap=True)
    model = _load(config, errors)
    used = _used(config, model)
    chunks = []
    try:
        for chunk in model.stream(config.prompt, **config.options(), typical=typical, trace=config.trace is not None):
            chunks.append(chunk)
            _show(chunk, model, coloured_by_origin=config.show_rounds)
    except KeyboardInterrupt:
        print(flush=True)  # the shell's prompt gets a line of its own
        raise
    print(flush=True)
    if config.sampling.temperature > 0:
        used += f"; seed {chunks[-1].seed}"
    summary(chunks, used, errors, with_legend=config.show_rounds)
    if config.trace is not None:
        drafts = {"tree": config.tree, "lookup": list(config.lookup) or None, "typical": config.typical}
        settings = {"prompt": config.prompt, **config.options(), "seed": chunks[-1].seed, **drafts, "decoded by": used}
        write_answer(config.trace, model.target, chunks, settings=settings)
        show_paths(errors, config.trace)


def _load(config: GenerateConfig, errors: Console) -> Model:
    """The model of a config, whose options its drafter has."""
    from outrider.api.drafter import choose_drafter
    from outrider.api.model import load
    from outrider.drafters.draft import TreeSize

    tree = None if config.tree is None else TreeSize.parse(config.tree)
    choice = choose_drafter(config.drafter, config.target, config.thinking)
    if choice is None and (tree is not None or config.typical is not None):
        raise ValueError(f"--drafter {config.drafter}: nothing is drafted, so --tree and --typical have no meaning.")
    return load(
        config.target,
        choice,
        config.machine.device,
        thinking=config.thinking,
        tree=tree,
        backend=config.backend,
        lookup=config.lookup,
        say=partial(show_lines, errors),
    )


def _used(config: GenerateConfig, model: Model) -> str:
    """What decodes, in words."""
    from outrider.api.drafter import HOW_TO_TRAIN
    from outrider.api.scheduling import given_typical
    from outrider.decoding.verification import lossy_note

    used = "plain decoding"
    if model.drafter is not None:
        used = f"drafter {model.drafter.name}"
        if config.confidence_threshold is None and model.scheduling.costs:
            used += f"; {model.scheduling}"
    elif config.drafter == AUTO:
        used = f"plain decoding, no drafter for {config.target}: none in models/, none published that is read here "
        used += f"(outrider models); {HOW_TO_TRAIN}"
    if (typical := given_typical(config.typical)) is not None:
        used += f"; {lossy_note(typical.settings)}"
    return used


def _show(chunk: Output, model: Model, coloured_by_origin: bool) -> None:
    if coloured_by_origin:
        Terminal(highlight=False, soft_wrap=True).print(coloured(chunk, model.target), end="")
    else:
        sys.stdout.write(printable(chunk.text) if sys.stdout.isatty() else chunk.text)
        sys.stdout.flush()


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


def serve(config: ServeConfig) -> None:
    """Serve OpenAI's API, with drafts; a key, if any, is in $OUTRIDER_API_KEY."""
    say = partial(show_lines, Terminal(stderr=True))
    if config.engine is not None:
        from outrider.serving.other_engine import become_engine, engine_command

        command = engine_command(config, say)
        if config.launch:
            become_engine(config, command, say)
        print(*command.lines, sep="\n")
        return
    require_packages()
    from outrider.serving.start import run_server

    if not run_server(config, say):  # uvicorn has said why
        raise typer.Exit(1)


# ----------------------------------------------------------------------------
# outrider models [TARGET]: the drafters on this machine, and published ones.
# ----------------------------------------------------------------------------


_THINKING = {True: "on", False: "off", None: "?"}


@dataclass(frozen=True)
class ModelsConfig(Config):
    """Which drafters are listed."""

    target: Annotated[str | None, argument("only drafters for targets with this in their name")] = None


def models(config: ModelsConfig) -> None:
    """List drafters by target, on this machine and published.

    Repository, kind, dialect, rows of a block, and whether the training texts had thinking in them.
    """
    from outrider.checkpoints.published import PUBLISHED, drafters_for, shipped_drafters

    console, target = Terminal(highlight=False), config.target
    wanted = (target or "").lower()
    # For a directory, the drafters of the models that it may be a fine-tune of.
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

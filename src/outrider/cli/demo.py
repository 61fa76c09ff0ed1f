"""`outrider demo`: the packaged drafter races plain decoding; then the whole road to a drafter of one's own.

    race -> responses -> training -> evaluation -> report

Training ends when the time is over that the other parts leave of nine minutes, wherever it is by then; an evaluation
that would take too long is shortened, and a line says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from outrider.cli.common import counting, show_lines
from outrider.cli.evaluate import report, write_page
from outrider.cli.generate import coloured, legend
from outrider.cli.train import run_training
from outrider.config import FILES, GENERAL, PROMPTS, Config, argument, option
from outrider.evaluation.verdict import drafter_verdict
from outrider.utils.measure import default_dtype, versions
from outrider.utils.packaged import PACKAGE
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.api.model import Model
    from outrider.data.sources import TaskSettings
    from outrider.decoding.request import Output
    from outrider.target.model import Target
    from outrider.training.recipe import Recipe

RESPONSES = PACKAGE / "data" / "packaged" / "demo.jsonl"  # of the demo's recipe, with a digest of the target's weights
_TASKS = ["eval_math", "eval_chat", "eval_code"]
_RACE_TOKENS = 64
_PACKAGED = "packaged"  # in the settings of a responses file: how many of them came with the package
_LIVE = 4  # prompts of each source that are answered here, where packaged responses are there for the others
_SECONDS, _REPORT_SECONDS, _EVALUATION_SECONDS = 540.0, 40.0, 150.0  # of the whole demo, and at most
_FEWEST_MINUTES = 2.0  # of training
_FEWEST_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Config):
    """How large the demo is."""

    overrides: Annotated[tuple[str, ...], argument("recipe fields to change: optimizer.steps=20 ...")] = ()
    out: Annotated[Path, option(FILES, "where the run goes", beside="path")] = Path("runs/demo")
    eval_samples: Annotated[int, option(PROMPTS, "held-out prompts per task", min=1)] = 3
    eval_tokens: Annotated[int, option(PROMPTS, "new tokens per response, fewer on a slow machine", min=1)] = 96
    threads: Annotated[int | None, option(GENERAL, "CPU threads; $OMP_NUM_THREADS, else all", min=1, max=1024)] = None


def demo(config: DemoConfig) -> None:
    """Race a drafter, then train, evaluate and report a small one, in ten minutes."""
    from outrider.api.drafter import require_drafter
    from outrider.api.model import Model
    from outrider.checkpoints.published import shipped_drafter
    from outrider.data.sources import TaskSettings
    from outrider.serving.inspector import write_answer
    from outrider.target.model import load_target
    from outrider.training.recipe import load_recipe

    console = Terminal()
    started = time.perf_counter()
    out, eval_samples, eval_tokens = config.out, config.eval_samples, config.eval_tokens
    recipe = load_recipe(Path("demo"), config.overrides).model_copy(update={"out": str(out)})
    show_lines(console, f"loading {recipe.target}")
    target = load_target(recipe.target, default_dtype(recipe.device), recipe.device)
    shipped = shipped_drafter(recipe.target)
    shown = plain_rate = None
    if shipped is not None:
        console.rule("a race: the packaged drafter against plain decoding")
        shown = Model(target, require_drafter(str(shipped), recipe.target).open(target), say=console.print)
        plain_rate = race(shown, console)
    console.rule("responses of the target to train on")
    recipe = add_packaged_responses(recipe, target, console)
    console.rule("training")
    if plain_rate is not None:
        eval_tokens, seconds = fit_evaluation(eval_tokens, eval_samples, plain_rate, console=console)
        if not any(override.startswith("optimizer.max_minutes=") for override in config.overrides):
            left = _SECONDS - _REPORT_SECONDS - seconds - (time.perf_counter() - started)
            limit = {"max_minutes": max(left / 60, _FEWEST_MINUTES)}
            recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update=limit)})
    run_training(recipe, target, console)
    console.rule("the drafter trained just now, on prompts that it has not seen")
    model = Model(target, require_drafter(str(out / "drafter"), recipe.target).open(target), say=console.print)
    _measure(model, TaskSettings(eval_samples, eval_tokens), out / "eval", console=console)
    console.rule("the report")
    shown, (_, prompt) = shown or model, _prompts()[-1]
    chunks = list(shown.stream(prompt, max_new_tokens=eval_tokens, trace=True))
    drafter = str(shipped or out / "drafter")
    asked = {"prompt": prompt, "drafter": drafter, "max_new_tokens": eval_tokens, "policy": str(shown.scheduling)}
    write_answer(out / "answer.json", shown.target, chunks, settings=asked)
    write_page([out], out / "report.html", "outrider demo", console=console)
    show_lines(
        console,
        f"demo finished in {(time.perf_counter() - started) / 60:.1f} minutes",
        "next: outrider serve, whose page at http://127.0.0.1:8000/ shows the same of your own prompts",
    )


# ----------------------------------------------------------------------------
# The race. Both decode the same prompt in turns, round by round, each with a clock of its own: the one whose clock is
# behind moves next, so that what is seen is how far each would be by now if it had the machine to itself.
# ----------------------------------------------------------------------------


@dataclass
class Runner:
    """One of the two. `seconds`: of its own rounds, prefill included."""

    name: str
    chunks: Iterator[Output]
    text: Text = field(default_factory=Text)
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    seconds: float = 0.0
    finished: bool = False

    def move(self, target: Target) -> None:
        """One round."""
        started = time.perf_counter()
        chunk = next(self.chunks, None)
        self.seconds += time.perf_counter() - started
        if chunk is None:
            self.finished = True
            return
        self.rounds += 1
        self.tokens += chunk.tokens
        self.text.append_text(coloured(chunk, target))

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return len(self.tokens) / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        length = len(self.tokens) / max(1, self.rounds)
        return f"{self.name}: {self.rate:.1f} tokens/s, {length:.2f} tokens per forward of the target"


def race(model: Model, console: Console) -> float:
    """Decode a prompt of each task plainly and with the drafter, shown live on a terminal; a line for each prompt.

    Returns the tokens per second of plain decoding.
    """
    plain_model = replace(model, drafter=None)
    model.scheduling  # noqa: B018  (measures step costs where they are not known, before clocks run)
    both: list[tuple[Runner, Runner]] = []
    console.print(legend())
    for name, prompt in _prompts():
        plain = Runner("plain", plain_model.stream(prompt, max_new_tokens=_RACE_TOKENS))
        fast = Runner("drafter", model.stream(prompt, max_new_tokens=_RACE_TOKENS))
        show_lines(console, f"{name}: {prompt if len(prompt) < 100 else prompt[:97] + '...'}")
        with Live(console=console, refresh_per_second=8, transient=not console.is_terminal) as live:
            while not (plain.finished and fast.finished):
                behind = [runner for runner in (plain, fast) if not runner.finished]
                min(behind, key=lambda runner: runner.seconds).move(model.target)  # type: ignore[arg-type]
                if console.is_terminal:
                    live.update(Group(Text(str(plain), "bold"), plain.text, Text(str(fast), "bold"), fast.text))
        same = "the same text" if plain.tokens == fast.tokens else "another text (outrider eval tells a tie or fault)"
        show_lines(console, f"{plain}; {fast}: {fast.rate / plain.rate:.2f}x, {same}")
        both.append((plain, fast))
    totals = [
        sum(len(runner.tokens) for runner in lane) / sum(runner.seconds for runner in lane)
        for lane in zip(*both, strict=True)
    ]
    show_lines(console, f"in all {totals[1] / totals[0]:.2f}x of plain decoding's {totals[0]:.1f} tokens/s")
    return totals[0]


def _prompts() -> list[tuple[str, str]]:
    """The first prompt of each task, which nothing here trains on."""
    from outrider.data.sources import load_prompts

    return [(task, str(load_prompts(task, 1)[0].turns[0])) for task in _TASKS]


# ----------------------------------------------------------------------------
# Responses: a few are made here, and the others are the package's where those are this target's. That is known from the
# settings and the chat template that both files record, and from the digest of the target's weights.
# ----------------------------------------------------------------------------


def add_packaged_responses(recipe: Recipe, target: Target, console: Console) -> Recipe:
    """Answer a few prompts of each source, add packaged responses to others, and let the recipe train on these alone.

    Where the packaged ones are another target's, or were made in another way, nothing is added and a line says why. The
    recipe stays as it is, and training answers all prompts itself.
    """
    from outrider.cli.common import responding
    from outrider.data.chat import Chat
    from outrider.data.responses import ResponseFile, read_responses
    from outrider.target.hub import resolve_model
    from outrider.training.dataset import make_responses, recipe_prompts, responses_path
    from outrider.utils.files import file_sha256, weight_files

    path = responses_path(recipe)
    answered = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"prompts": [], "responses": str(path)})}
    )
    if path.exists():
        return answered if _PACKAGED in read_responses(path)[0] else recipe
    few = [source.model_copy(update={"limit": min(_LIVE, source.limit or _LIVE)}) for source in recipe.data.prompts]
    data = recipe.data.model_copy(update={"prompts": few})
    chat = Chat.of(target)
    with responding(console, data.max_minutes) as progress:
        made = make_responses(
            data, chat, target, seed=recipe.seed, path=path, on_progress=progress.update, say=progress.say
        )
    settings, _ = read_responses(path)
    stored_settings, stored = read_responses(RESPONSES)
    weights = [file_sha256(file) for file in weight_files(resolve_model(recipe.target))]
    try:
        ResponseFile(RESPONSES, settings)
        if stored_settings["target_sha256"] != weights:
            raise ValueError(f"{RESPONSES} was made by other weights than {recipe.target} has here.")
    except ValueError as error:
        show_lines(console, f"packaged responses are not used: {error}")
        return recipe
    known = {(reply.id, reply.turn): reply for reply in stored}
    both = [(reply, known[reply.id, reply.turn]) for reply in made.replies if (reply.id, reply.turn) in known]
    same = sum(here == there for here, there in both)
    prompts = recipe_prompts(recipe.data)
    wanted = {prompt.id for prompt in prompts}
    file = ResponseFile(path, settings)
    added = [reply for key, reply in known.items() if key not in file.replies and reply.id in wanted]
    file.commit(added)
    file.settings[_PACKAGED] = len(added)
    file.finish([prompt.id for prompt in prompts], {"live": len(made.replies), "packaged": len(added)}, [])
    show_lines(
        console,
        f"{len(made.replies)} prompts answered here, {len(both)} of which the package has too: {same} token for token; "
        f"{len(added)} answers taken from the package (the same weights, template and settings, by their digests)",
    )
    return answered


# ----------------------------------------------------------------------------
# The evaluation's budget.
# ----------------------------------------------------------------------------


def fit_evaluation(tokens: int, samples: int, plain_rate: float, console: Console) -> tuple[int, float]:
    """New tokens per response for which decoding `samples` prompts of each task both ways fits the budget, and the
    seconds that it takes.

    A conversation of two turns counts twice; speculative decoding is reckoned as slow as plain decoding.
    """
    from outrider.data.sources import load_prompts

    turns = sum(len(prompt.turns) for task in _TASKS for prompt in load_prompts(task, samples))
    fitting = math.floor(_EVALUATION_SECONDS * plain_rate / (2 * turns))
    chosen = min(tokens, max(fitting, _FEWEST_TOKENS))
    if chosen < tokens:
        seconds = f"for about {_EVALUATION_SECONDS:.0f} seconds here"
        show_lines(console, f"{chosen} new tokens a response instead of {tokens}, {seconds}")
    return chosen, chosen * 2 * turns / plain_rate


def _measure(model: Model, settings: TaskSettings, out: Path, console: Console) -> None:
    """The model's drafter against plain decoding, with the default schedule."""
    from outrider.evaluation.evaluate import evaluate
    from outrider.evaluation.figures import speedups

    assert model.drafter is not None
    chosen = model.scheduling
    with counting(console, "eval") as on_progress:
        results = evaluate(
            model.target,  # type: ignore[arg-type]
            model.drafter.drafter,
            _TASKS,
            settings=settings,
            drafter_info=model.drafter.info(),
            policy=chosen.policy,
            recorded={"drafter": model.drafter.name, "policy": chosen.name},
            versions=versions(),
            on_progress=on_progress,
        )
    report(results, out, console, verdict=drafter_verdict(speedups(results), {}, uneven=chosen.uneven))

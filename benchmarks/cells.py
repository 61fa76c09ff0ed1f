"""The table of cells {task x temperature} x users: a variant's throughput over that of plain decoding and of the best
static variant.

    python -m benchmarks.cells prompts DIR             three kinds of text that no packaged drafter was trained on
    python -m benchmarks.cells measure FILES --profile PROFILE --out cells.jsonl    goes on where it was interrupted
    python -m benchmarks.cells table cells.jsonl
    python -m benchmarks.cells record FILES --out TRACES            what the simulator needs of the same prompts
    python -m benchmarks.cells simulate cells.jsonl --traces TRACES --profile PROFILE --out simulated.jsonl

In a cell every variant has an engine of its own, and all answer the same requests in the same order, always so many at
once as there are users. The engines take turns, step by step: the next step is always that of the engine that has got
least far. So a machine whose speed wavers from minute to minute slows all of them alike. An engine's seconds are those
of its own steps, prompts included; nothing runs beside them.

The load is constant while it is measured: the first requests have fewer tokens, each another number, so that requests
end one after another, and whoever is done asks again until the last counted token. With an end at which users have no
more requests, engines whose requests end unevenly would have fewer of them to decode together, and seem slower.

Prompts take about half of the time, and which of them fall into what is counted is an accident of where the requests
are by then. So a throughput is that of requests with one prompt and L tokens each, L the cell's tokens per prompt:

    L / (p + L d)      d   seconds per token in steps that read no prompt
                       p   seconds per prompt: steps that read some, less d for each of their tokens

Where some variant had no step without a prompt, it is tokens per second as they were counted, of all variants.

A cell passes where the variant is at least as fast as plain decoding (1.00) and within 3 % of the best static variant
of that cell in hindsight; plain decoding is one of those. Cells that do not are named. Quartiles are over requests that
began and ended while they were counted, where both have four of them: seconds per token of each, plain over variant.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice, product
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.backends.local import NO_SPECULATION, build_variant, engine_config, is_adaptive, limited
from outrider.checkpoints.checkpoint import load_drafter
from outrider.checkpoints.published import shipped_drafter
from outrider.data.chat import Chat
from outrider.data.sources import load_prompts
from outrider.decoding.cost import Profile
from outrider.decoding.engine import Engine
from outrider.decoding.profile import setting_of
from outrider.decoding.request import Request, StopRules
from outrider.drafters.ngram import HybridDrafter
from outrider.evaluation.loadtest.load import Ask
from outrider.evaluation.loadtest.simulate import SimulatedEngine
from outrider.evaluation.loadtest.traces import Traces
from outrider.evaluation.loadtest.traces import record as record_traces
from outrider.sampling import SamplingParams
from outrider.target.hub import EMBEDDED_ID
from outrider.target.model import Target, load_target
from outrider.utils.measure import machine, quartiles, set_up, today, versions
from outrider.utils.terminal import markdown_table

LEAST, BEHIND, COUNT = 1.0, 0.03, 32
WITHIN = 0.1  # what a simulated ratio may be off
JUDGED = "look-ahead+skip"
_FEWEST = 4  # requests that quartiles are given of
_LONGEST = 640  # tokens of a prompt and its response: sizes the KV pools
app = typer.Typer(add_completion=False)

_PLACES = ["Lisbon", "Kyoto", "Tromso", "Nairobi", "Quito", "Gdansk", "Hobart", "Izmir"]
_NAMES = ["Amara Osei", "Jonas Lind", "Mei Tanaka", "Ravi Patel", "Sofia Costa", "Tomas Novak", "Zahra Amini"]
_THINGS = ["a lighthouse", "an old bicycle", "the first snow", "a night train", "a bakery at dawn", "a lost glove"]
_FORMS = [
    "a poem of eight lines",
    "a story of five sentences",
    "a letter from a sailor",
    "a dialogue of two neighbours",
]
_SENTENCES = [
    "The ferry leaves from the northern pier at a quarter past six.",
    "My grandmother planted this pear tree in the year I was born.",
    "If it rains tomorrow, the concert will be held in the town hall.",
    "She has forgotten her umbrella on the train again.",
    "Nobody knew who had painted the small picture behind the door.",
]
_LANGUAGES = ["French", "Spanish", "German", "Italian"]


def kinds() -> dict[str, list[str]]:
    """Prompts by kind: translation, records to be written as JSON, and free writing."""

    def take(*parts: Sequence[str]) -> list[tuple[str, ...]]:
        return list(islice(cycle(product(*parts)), COUNT))

    days = range(1, COUNT + 1)
    return {
        "translation": [
            f"Translate into {language}, then explain the grammar of your translation: {sentence}"
            for sentence, language in take(_SENTENCES, _LANGUAGES)
        ],
        "json": [
            f"Write the bookings as a JSON list with the keys name, city, day and nights: {name} stays in {place} from "
            f"May {1 + day % 28} for {1 + day % 6} nights, and {other} in {elsewhere} from June {1 + day % 30} for two."
            for day, (name, place), (elsewhere, other) in zip(
                days, take(_NAMES, _PLACES), take(_PLACES[::-1], _NAMES[::-1]), strict=True
            )
        ],
        "writing": [f"Write {form} about {thing}." for thing, form in take(_THINGS, _FORMS)],
    }


@app.command()
def prompts(directory: Path) -> None:
    """Write translation.jsonl, json.jsonl and writing.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    for kind, texts in kinds().items():
        lines = [json.dumps({"id": f"{kind}-{i:02}", "turns": [text]}) for i, text in enumerate(texts, start=1)]
        (directory / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------
# Measuring a cell.
# ----------------------------------------------------------------------------


@dataclass
class Run:
    """One variant's counted tokens in one cell, and the seconds of the steps that gave them.

    Attributes:
        prompts: whose first token was counted.
        prompt_seconds, prompt_tokens: of the steps that read prompts, part of `seconds` and `tokens`.
        requests: of those that began and ended while it was counted, id -> (seconds from submission to end, tokens).
    """

    variant: str
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    prompts: int = 0
    prompt_seconds: float = 0.0
    prompt_tokens: int = 0
    requests: dict[str, tuple[float, int]] = field(default_factory=dict)

    def rate(self, length: float | None) -> float:
        """Tokens per second of requests with so many tokens each; None: of those that were counted."""
        if length is None:
            return self.tokens / self.seconds
        pace = (self.seconds - self.prompt_seconds) / (self.tokens - self.prompt_tokens)
        prompt = (self.prompt_seconds - pace * self.prompt_tokens) / self.prompts
        return length / (prompt + length * pace)

    @staticmethod
    def rates(runs: Sequence[Run], length: float) -> dict[str, float]:
        """`rate` by variant; where one of them read prompts in every step, of the requests as they were counted."""
        told = None if any(run.tokens == run.prompt_tokens for run in runs) else length
        return {run.variant: run.rate(told) for run in runs}

    @staticmethod
    def total(runs: Sequence[Run]) -> Run:
        """Of several runs, without their requests; with the first one's name."""
        names = ("seconds", "tokens", "steps", "prompts", "prompt_seconds", "prompt_tokens")
        return Run(runs[0].variant, **{name: sum(getattr(run, name) for run in runs) for name in names})


class Lane:
    """An engine whose users always wait for an answer, and what it has done so far.

    Args:
        ask: the request number i, from 0 on.
    """

    def __init__(
        self, variant: str, engine: Engine | SimulatedEngine, users: int, ask: Callable[[int], Request]
    ) -> None:
        self.run, self.engine, self.users, self.ask = Run(variant), engine, users, ask
        self.texts: dict[str, list[int]] = {}  # of all requests so far
        self.done: set[str] = set()
        self._began: dict[str, float] = {}  # of those under way, which are counted from their beginning

    def taken(self, started: float) -> float:
        """Seconds of the step that began then."""
        return time.perf_counter() - started

    def step(self) -> None:
        """One step of the engine, behind requests for all its free places."""
        started = time.perf_counter()
        while len(self.texts) - len(self.done) < self.users:
            request = self.ask(len(self.texts))
            self.engine.submit(request)
            self._began[request.id], self.texts[request.id] = self.run.seconds, []
        outputs = self.engine.step()
        seconds, tokens = self.taken(started), sum(len(output.tokens) for output in outputs)
        self.run.seconds += seconds
        self.run.tokens += tokens
        self.run.steps += 1
        if self.engine.last is not None and self.engine.last.prefill_tokens:
            self.run.prompt_seconds += seconds
            self.run.prompt_tokens += tokens
        for output in outputs:
            if output.error is not None:
                raise output.error
            self.run.prompts += not self.texts[output.id]
            self.texts[output.id] += output.tokens
            if output.finish is not None:
                self.done.add(output.id)
                if (began := self._began.pop(output.id, None)) is not None:
                    self.run.requests[output.id] = (self.run.seconds - began, len(self.texts[output.id]))

    def count_from_here(self) -> None:
        """Forget what was counted so far, and requests that are under way."""
        self.run = Run(self.run.variant)
        self._began.clear()


class SimulatedLane(Lane):
    """A simulated engine, whose steps take what it says."""

    def taken(self, started: float) -> float:
        assert self.engine.last is not None
        return self.engine.last.seconds


def answer(lanes: Sequence[Lane], tokens: int) -> None:
    """So many tokens in every lane, or as many more as the last step gives; lanes take turns."""
    while going := [lane for lane in lanes if lane.run.tokens < tokens]:
        min(going, key=lambda lane: (lane.run.tokens, lane.run.seconds)).step()


@app.command()
def measure(
    tasks: list[Path],
    out: Annotated[Path, typer.Option(help="JSON lines, one per cell and repeat; those that are there stay")],
    profile: Annotated[Path, typer.Option(help="outrider profile --drafter hybrid --out PROFILE")],
    variants: str = f"{NO_SPECULATION},fixed-3,fixed-7,{JUDGED}",
    temperatures: str = "0,1",
    users: str = "1,2,4,8,16,32",
    repeats: Annotated[int, typer.Option(help="of each cell, other prompts each as far as there are some")] = 1,
    requests: Annotated[int, typer.Option(help="whose tokens are counted, at least; one per user")] = 8,
    max_new_tokens: int = 64,
    threads: int = 2,
) -> None:
    """Measure cells with hybrid drafts of the shipped drafter, on SmolLM2-135M-Instruct."""
    set_up(threads)
    target = load_target(EMBEDDED_ID)
    costs = Profile.load(profile)
    done = {cell_key(line) for line in read_lines([out])} if out.is_file() else set()
    for repeat, temperature, task, level in product(
        range(repeats), map(float, temperatures.split(",")), tasks, map(int, users.split(","))
    ):
        cell: dict[str, Any] = {"task": task.stem, "temperature": temperature, "users": level, "repeat": repeat}
        if cell_key(cell) in done:
            continue
        counted = max(requests, level) * max_new_tokens
        asks = Asks(prompt_tokens(target, task), temperature, max_new_tokens, users=level, first=repeat * requests)
        lanes = [Lane(name, build_engine(target, name, costs, level), level, asks) for name in variants.split(",")]
        answer(lanes, max(64, level * max_new_tokens // 2))  # kernels, first beliefs, and prompts of all users
        for lane in lanes:
            lane.count_from_here()
        gc.collect()
        answer(lanes, counted)
        cell["differing"] = differing(lanes) if not temperature else None
        cell |= {"runs": [asdict(lane.run) for lane in lanes], "max_new_tokens": max_new_tokens}
        cell |= {"machine": machine(), "versions": versions(), "date": today()}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")
        rates = Run.rates([lane.run for lane in lanes], max_new_tokens)
        told = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
        print(f"{task.stem} T={temperature:g} users {level} repeat {repeat}: {told} tokens/s", flush=True)


def prompt_tokens(target: Target, task: Path) -> list[list[int]]:
    """The first turns of a task, rendered."""
    chat = Chat.of(target)
    return [chat.prompts(conversation, [], False)[0] for conversation in load_prompts(str(task))]


@dataclass(frozen=True)
class Asks:
    """The requests of a cell: prompts from the one numbered `first` on, round and round, each with its number as its
    seed; the first of each user of evenly spaced lengths up to `max_new_tokens`.
    """

    texts: Sequence[list[int]]
    temperature: float
    max_new_tokens: int
    users: int
    first: int = 0

    def __call__(self, number: int) -> Request:
        most = self.max_new_tokens * min(number + 1, self.users) // self.users
        place = self.first + number
        params = SamplingParams(self.temperature, seed=place)
        return Request(str(place), self.texts[place % len(self.texts)], params, rules=StopRules(max(2, most)))


def differing(lanes: Sequence[Lane]) -> int:
    """How many answers of variants are not plain decoding's, of those that both have ended."""
    (plain,) = (lane for lane in lanes if lane.run.variant == NO_SPECULATION)
    return sum(lane.texts[id] != plain.texts[id] for lane in lanes for id in lane.done & plain.done)


def build_engine(target: Target, name: str, costs: Profile, users: int) -> Engine:
    """The engine of a variant, warmed up."""
    path = shipped_drafter(EMBEDDED_ID)
    assert path is not None
    drafter = HybridDrafter(load_drafter(path, target))
    variant = build_variant(name, drafter.slots, None, cost=costs)
    engine = Engine(
        target,
        limited(drafter, variant.drafts),
        variant.policy,
        config=engine_config(_LONGEST, users, 512),
    )
    engine.warm_up()
    return engine


def cell_key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["task"], line["temperature"], line["users"], line["repeat"]


def read_lines(files: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


# ----------------------------------------------------------------------------
# The same cells in the simulator: the same loop around simulated engines, over traces of the same prompts.
# ----------------------------------------------------------------------------


@app.command()
def record(
    tasks: list[Path],
    out: Annotated[Path, typer.Option(help="directory of a file for each task and temperature; those there stay")],
    temperatures: str = "0,1",
    prompts: Annotated[int, typer.Option(help="of each task, its first ones")] = COUNT,
    max_new_tokens: int = 48,
    threads: int = 2,
) -> None:
    """Record traces of the shipped drafter, copies beside it."""
    set_up(threads)
    target = load_target(EMBEDDED_ID)
    path = shipped_drafter(EMBEDDED_ID)
    assert path is not None
    drafter = HybridDrafter(load_drafter(path, target))
    about = {"setting": setting_of(target, drafter).model_dump()}
    for temperature, task in product(map(float, temperatures.split(",")), tasks):
        place = trace_file(out, task.stem, temperature)
        if not place.is_file():
            texts = prompt_tokens(target, task)[:prompts]
            asks = [Ask(text, SamplingParams(temperature, seed=number)) for number, text in enumerate(texts)]
            record_traces(target, drafter, asks, StopRules(max_new_tokens), about).save(place)
            print(place, flush=True)


def trace_file(directory: Path, task: str, temperature: float) -> Path:
    return directory / f"{task}-{temperature:g}.npz"


@app.command()
def simulate(
    files: list[Path],
    traces: Annotated[Path, typer.Option(help="what record wrote")],
    profile: Annotated[Path, typer.Option(help="the one that the cells were measured with")],
    out: Annotated[Path, typer.Option(help="JSON lines as measure writes them")],
) -> None:
    """Simulate measured cells, and print how far off the ratios to plain decoding are."""
    measured, costs = read_lines(files), Profile.load(profile)
    cells = []
    for line in measured:
        found = Traces.load(trace_file(traces, line["task"], line["temperature"]))
        texts = [list(response.prompt) for response in found.responses]
        users, most = line["users"], line["max_new_tokens"]
        asks = Asks(texts, line["temperature"], most, users=users)
        lanes = []
        for name in (run["variant"] for run in line["runs"]):
            variant = build_variant(name, found.slots, None, cost=costs)
            config = engine_config(_LONGEST, users, 512)
            engine = SimulatedEngine(found, costs, variant.policy, config=config, slots=variant.drafts)
            lanes.append(SimulatedLane(name, engine, users, asks))
        answer(lanes, max(64, users * most // 2))
        for lane in lanes:
            lane.count_from_here()
        answer(lanes, min(run["tokens"] for run in line["runs"]))
        cells.append({**line, "differing": None, "runs": [asdict(lane.run) for lane in lanes]})
    out.write_text("".join(f"{json.dumps(cell)}\n" for cell in cells), encoding="utf-8")
    print("\n".join(compared(measured, cells)))


def ratios(line: dict[str, Any]) -> dict[str, float]:
    """Throughput of a cell's variants over plain decoding."""
    runs = [Run(**run) for run in line["runs"]]
    whole = Run.total(runs)
    rates = Run.rates(runs, whole.tokens / whole.prompts)
    return {name: rate / rates[NO_SPECULATION] for name, rate in rates.items() if name != NO_SPECULATION}


def compared(measured: Sequence[dict[str, Any]], simulated: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: by variant, temperature and users the errors of simulated ratios, mean and (least to most)."""
    errors: dict[tuple[str, float], dict[int, list[float]]] = {}
    for one, other in zip(measured, simulated, strict=True):
        theirs = ratios(other)
        for name, ratio in ratios(one).items():
            by_users = errors.setdefault((name, one["temperature"]), {})
            by_users.setdefault(one["users"], []).append(theirs[name] / ratio - 1)
    levels = sorted({users for found in errors.values() for users in found})
    rows = [
        [f"{name}, T={temperature:g}", *(_span(found.get(level, [])) for level in levels)]
        for (name, temperature), found in sorted(errors.items())
    ]
    every = [error for found in errors.values() for some in found.values() for error in some]
    within = sum(abs(error) <= WITHIN for error in every)
    told = f"{within} of {len(every)} ratios within {WITHIN:.0%}, worst {max(every, key=abs):+.1%}"
    headings = ["variant and temperature", *map(str, levels)]
    return [*markdown_table(headings, rows, text=headings[:1]), "", told]


def _span(errors: Sequence[float]) -> str:
    if not errors:
        return ""
    return f"{statistics.mean(errors):+.1%} ({min(errors):+.1%} to {max(errors):+.1%})"


# ----------------------------------------------------------------------------
# The table.
# ----------------------------------------------------------------------------


@app.command()
def table(
    files: list[Path],
    variant: Annotated[str, typer.Option(help="the one that is judged")] = JUDGED,
    out: Annotated[Path | None, typer.Option(help="Markdown file")] = None,
) -> None:
    """Print the table, its mean, and the cells that do not pass."""
    measured = read_lines(files)
    if not measured:
        raise typer.BadParameter(f"no cells in {', '.join(map(str, files))}.", param_hint="FILES")
    lines = report(measured, variant)
    print("\n".join(lines))
    if out is not None:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def report(measured: Sequence[dict[str, Any]], variant: str) -> list[str]:
    """Lines of Markdown: ratio to plain decoding (quartiles over requests) / to the best static variant of the cell.

    Raises:
        ValueError: the variant or plain decoding was not measured in a cell.
    """
    cells: dict[tuple[str, float], dict[int, list[dict[str, Run]]]] = {}
    for line in measured:
        runs = {run["variant"]: Run(**run) for run in line["runs"]}
        if missing := {variant, NO_SPECULATION} - runs.keys():
            raise ValueError(f"{line['task']} at {line['users']} users: {', '.join(missing)} was not measured.")
        cells.setdefault((line["task"], line["temperature"]), {}).setdefault(line["users"], []).append(runs)
    levels = sorted({level for found in cells.values() for level in found})
    rows, ratios, failed = [], list[float](), list[str]()
    for (task, temperature), found in cells.items():
        row = [f"{task}, T={temperature:g}"]
        for level in levels:
            if level not in found:
                row.append("")
                continue
            repeats = found[level]
            whole = Run.total([run for runs in repeats for run in runs.values()])
            totals = [Run.total([runs[name] for runs in repeats]) for name in repeats[0]]
            rates = Run.rates(totals, whole.tokens / whole.prompts)
            paces = [ratio for runs in repeats for ratio in by_request(runs, variant)]
            low, _, high = quartiles(paces) if paces else (math.nan,) * 3
            spread = f" ({low:.2f}-{high:.2f})" if len(paces) >= _FEWEST else ""
            ratio = rates[variant] / rates[NO_SPECULATION]
            best = max((name for name in rates if not is_adaptive(name)), key=lambda name: rates[name])
            hindsight = rates[variant] / rates[best]
            ratios.append(ratio)
            row.append(f"{ratio:.2f}{spread} / {hindsight:.2f}")
            if ratio < LEAST or hindsight < 1 - BEHIND:
                failed.append(f"{row[0]} at {level}: {ratio:.3f} of plain, {hindsight:.3f} of {best}")
        rows.append(row)
    passed = f"{len(ratios) - len(failed)} of {len(ratios)} cells pass, mean {statistics.mean(ratios):.3f} of plain"
    headings = ["task and temperature", *map(str, levels)]
    return [*markdown_table(headings, rows, text=headings[:1]), "", passed, *(f"* {line}" for line in failed)]


def by_request(runs: dict[str, Run], variant: str) -> list[float]:
    """Seconds per token of each request that both have counted, plain over variant."""

    def pace(name: str, id: str) -> float:
        seconds, tokens = runs[name].requests[id]
        return seconds / tokens

    both = runs[NO_SPECULATION].requests.keys() & runs[variant].requests.keys()
    return [pace(NO_SPECULATION, id) / pace(variant, id) for id in sorted(both)]


if __name__ == "__main__":
    app()

"""Measure a `Profile`: what an engine step costs here, by requests, tokens and context (decoding/cost.py).

    sweep 1:  forward(2, 9, 64)  draft(4)  forward(1, 1, 768)  extend(8) ...     each job once, in shuffled order,
    sweep 2:  draft(32)  forward(8, 40, 256) ...                                 so that drift affects all alike

Timed are target forwards over a grid, drafts, the drafter's reading, and the rest of an engine step:

R requests     1, 2, 4, ... and the most
B tokens       R, 2 R, ... (drafts + 1) R, of large trees not every count; for R = 1 every count up to 32, where matrix
               kernels change, and then chunks of prefill, which have logits only at their end; on a GPU also before
               and after each count at which a step computes more rows (target/graphs.py)
S context      cached tokens per request

Requests have equally many tokens in every second sweep; in the others the first have as many as a request verifies at
most, and the last one each: that is what policies choose.

A sparse profile (`QUICK`) takes seconds: B = 1, 4, 16, ... for one request at the shortest context, and a few shapes
that say what longer contexts and more requests add to those (decoding/cost.py, `ForwardTable`).

Contexts are random keys and values: their content does not affect time, but unwritten memory would. Recurrent layers
count a context as read; going back to the accepted rows (target/cache.py) is not in the times.
Shapes: T tokens, L aux layers, D target hidden.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.decoding.config import ProfileConfig
from outrider.decoding.cost import Additive, Cell, Curve, Profile, Setting
from outrider.decoding.engine import Engine
from outrider.decoding.request import Request, StepRecord, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import DraftCall, Drafter, draft_slots
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.graphs import computed_rows
from outrider.target.model import Target
from outrider.target.paged import PagedKV, Span
from outrider.utils.files import cache_dir
from outrider.utils.locks import sole_process
from outrider.utils.measure import Clock, dtype_name, machine, quartiles, today, versions

Shape = tuple[int, int, int]  # R, B, S
Key = tuple[str, Shape]
Jobs = dict[Key, Callable[[], float]]  # each returns its seconds
DENSE = 32  # tokens of one request up to which every count is measured
PLAIN_WIDTH = 8  # rows per request where no drafter says how many
_EVERY = 16  # rows per request up to which every count is measured; beyond it, every eighth
_BLOCK_SIZE = 16  # of the KV pool
READ = 2  # committed tokens of a request that its drafter reads after a step
FEWEST_SWEEPS = 3  # fewer give no median
STEADY = 0.2  # most spread of a profile that is kept for long
_FALLS = 0.1  # of the seconds of a smaller forward, that a larger one may seem to take less
WARM_UP_STEPS = 2


# What decoding measures by itself: a lone user and a handful of users, drafts of up to 32 tokens.
QUICK = ProfileConfig(max_requests=4, max_tokens=32, contexts=(128, 512), repeats=5, seconds=3.0, sparse=True)


def forward_jobs(
    target: Target, aux_layers: tuple[int, ...], shapes: Sequence[Shape], width: int, branching: bool = False
) -> Jobs:
    """Jobs of ragged target forwards; beyond `DENSE` tokens, with logits for the last `width` rows of a request only.

    A request's blocks are contiguous, as they mostly are in the engine. With `branching`, rows that may be an
    anchor and its drafts (up to `width`) are trees in which every node has two children. The calls of a job take the
    two divisions of the tokens in turn.
    """
    per_request = {
        (r, b, s): -(-(s + max(max(lengths) for lengths in _divisions(r, b, width))) // _BLOCK_SIZE)
        for r, b, s in shapes
    }
    kv = PagedKV(target, max(r * per_request[r, b, s] for r, b, s in shapes), _BLOCK_SIZE)
    for pool in chain.from_iterable(kv.pools):
        pool.uniform_(-1.0, 1.0)
    states = [target.new_states() for _ in range(max(r for r, _, _ in shapes))]
    jobs: Jobs = {}
    for r, b, s in shapes:
        blocks, steps = per_request[r, b, s], []
        for lengths in _divisions(r, b, width):
            spans = []
            for i, count in enumerate(lengths):
                tokens, own = _tokens(target, count), list(range(i * blocks, (i + 1) * blocks))
                logits = count if b <= DENSE else min(count, width)
                parents = [(row - 1) // 2 for row in range(count)] if branching and count <= width else None
                spans.append(Span(tokens, s, own, logits=logits, parents=parents, states=states[i]))
            steps.append(spans)
        forward = partial(_forward, target, cycle(steps), kv, aux_layers=aux_layers)
        jobs["forward", (r, b, s)] = _timed(target.device, forward)
    return jobs


def _divisions(requests: int, tokens: int, width: int) -> list[list[int]]:
    """Tokens of each request: equally many; and as many as fit into the first, if none has more than `width`."""
    even = [tokens // requests + (i < tokens % requests) for i in range(requests)]
    left, uneven = tokens - requests, []
    for _ in range(requests):
        uneven.append(1 + min(left, width - 1))
        left -= uneven[-1] - 1
    return [even] if left else [even, uneven]


def _forward(target: Target, steps: Iterator[Sequence[Span]], kv: PagedKV, aux_layers: tuple[int, ...]) -> None:
    spans = next(steps)
    for span in spans:
        if span.states is not None:
            span.states.assume(span.past)
    target.forward_ragged(spans, kv, aux_layers)


def draft_jobs(
    target: Target, drafter: Drafter, counts: Sequence[int], context: int, params: Sequence[SamplingParams]
) -> Jobs:
    """Jobs of drafts of several requests after `context` tokens, and the drafter's reading of `READ` tokens.

    `params`: of each of the most requests.
    """
    sessions = [drafter.new_session(context) for _ in range(counts[-1])]
    for session in sessions:
        drafter.extend([session], [_tokens(target, context)], _aux_hidden_states(target, drafter, context))
    seen = SeenTokens(target.vocab_size)
    calls = [
        DraftCall(session, _tokens(target, 1)[0], own, seen=seen, source=SeededSource(0))
        for session, own in zip(sessions, params, strict=True)
    ]

    def extend(count: int) -> float:
        fresh = [drafter.new_session(READ) for _ in range(count)]
        tokens, aux_TLD = [_tokens(target, READ) for _ in fresh], _aux_hidden_states(target, drafter, count * READ)
        seconds = _timed(target.device, lambda: drafter.extend(fresh, tokens, aux_TLD))()
        for session in fresh:
            drafter.end(session)
        return seconds

    jobs: Jobs = {}
    for n in counts:
        jobs["draft", (n, n * draft_slots(drafter), context)] = _timed(
            target.device, partial(drafter.propose, calls[:n])
        )
        shorts = [replace(call, limit=1) for call in calls[:n]]
        jobs["draft_one", (n, n, context)] = _timed(target.device, partial(drafter.propose, shorts))
        jobs["extend", (n, n * READ, 0)] = partial(extend, n)
    return jobs


def sweep(
    jobs: Jobs, repeats: int, seconds: float, on_progress: Callable[[str, int, int], None]
) -> dict[Key, list[float]]:
    """Time each job: its seconds, `repeats` times, or at least three times if more would exceed `seconds`."""
    started = time.perf_counter()
    sizes = {(what, shape[1]): job for (what, shape), job in jobs.items()}
    for job in sizes.values():  # the first call of a size selects and prepares kernels
        job()
    timed: dict[Key, list[float]] = {key: [] for key in jobs}
    order, shuffle = list(jobs), random.Random(0).shuffle
    for number in range(2 * repeats):
        if number >= repeats:  # twice as many of those that contradict themselves or others
            order = doubtful(timed)
            if not order:
                break
        begun = time.perf_counter()
        shuffle(order)
        for done, key in enumerate(order, 1):
            timed[key].append(jobs[key]())
            on_progress("profile", min(number, repeats - 1) * len(order) + done, repeats * len(order))
        now = time.perf_counter()
        if number + 1 >= FEWEST_SWEEPS and now - started + (now - begun) > seconds * (1 if number < repeats else 2):
            break
    return timed


def doubtful(timed: dict[Key, list[float]]) -> list[Key]:
    """Jobs to repeat: their seconds vary by more than `STEADY`, or a larger forward took less than a smaller one."""
    found = set[Key]()
    smaller: Key | None = None
    for key in sorted(timed, key=lambda key: (key[0], key[1][0], key[1][2], key[1][1])):  # rows last
        low, median, high = quartiles(timed[key])
        if (high - low) / median > STEADY:
            found.add(key)
        same_row = smaller is not None and (smaller[0], *smaller[1][::2]) == (key[0], *key[1][::2])
        if smaller is not None and same_row and low < (1 - _FALLS) * quartiles(timed[smaller])[0]:
            found |= {smaller, key}
        smaller = key
    return sorted(found)


def engine_steps(
    target: Target, drafter: Drafter | None, params: Sequence[SamplingParams], repeats: int
) -> list[StepRecord]:
    """Engine steps of as many requests as there are `params`, every draft verified."""
    steps, slots, requests = WARM_UP_STEPS + repeats, draft_slots(drafter), len(params)
    length = steps * (1 if drafter is None else drafter.gamma + 1) + 1  # no request ends before the last step
    blocks = -(-(1 + length + slots) // _BLOCK_SIZE)
    config = EngineConfig(requests, requests * (slots + 1), _BLOCK_SIZE, num_blocks=requests * blocks)
    engine = Engine(target, drafter, config=config)
    for i, own in enumerate(params):
        engine.submit(Request(str(i), _tokens(target, 1), own, rules=StopRules(length, stop_ids=())))
    found = []
    for _ in range(steps):
        engine.step()
        assert engine.last is not None and engine.last.requests == requests
        found.append(engine.last)
    return found[WARM_UP_STEPS:]


def _timed(device: torch.device, call: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        clock = Clock(device)
        with clock:
            call()
        return clock.take()

    return seconds


def _tokens(target: Target, count: int) -> list[int]:
    return torch.randint(0, target.vocab_size, (count,)).tolist()


def _aux_hidden_states(target: Target, drafter: Drafter, count: int) -> torch.Tensor | None:
    shape = (count, len(drafter.aux_layers), target.hidden_size)
    return torch.randn(shape, device=target.device, dtype=target.dtype) if drafter.aux_layers else None


def setting_of(target: Target, drafter: Drafter | None) -> Setting:
    """The setting that a profile is measured in and used in. Costs depend on shapes, not on weights."""
    on_cpu = target.device.type == "cpu"
    return Setting(
        target=f"{target.name.rstrip('/').split('/')[-1]} ({target.num_layers} x {target.hidden_size})",
        dtype=dtype_name(target.dtype),
        processor=machine()["cpu" if on_cpu else "gpu"],
        threads=torch.get_num_threads() if on_cpu else None,
        drafter=None if drafter is None else _shape_name(drafter),
    )


def _shape_name(drafter: Drafter) -> str:
    config, tree = drafter.config, getattr(drafter, "shape", None)  # how its trees grow, if they do
    length = f"gamma {drafter.gamma}"
    if drafter.trees:
        length = f"tree of {drafter.slots}, depth {drafter.gamma}"
    if not is_dataclass(config):
        return f"{type(drafter).__name__}, {length}"
    return f"{type(config).__name__.removesuffix('Config')}, {length}, shape {shape_digest(config, tree)}"


def shape_digest(config: Any, tree: object = None) -> str:
    """Digest of a drafter's config and tree shape, without fields at their defaults and whatever their order."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
    return sha256(repr((sorted(values.items()), tree)).encode()).hexdigest()[:8]


def grid(config: ProfileConfig, width: int, jumps: Collection[int] = ()) -> list[Shape]:
    """The shapes of the forwards to time, where a request verifies up to `width` rows; `jumps`: see the function."""
    if config.sparse:
        return _sparse_grid(config, width, jumps)
    shapes = []
    widths = [k for k in range(1, width + 1) if k <= _EVERY or k % 8 == 0 or k == width]
    for r in config.requests:
        counts = {r * k for k in widths} | {b for b in jumps if r < b <= r * width}
        if r == 1:
            counts |= {*range(1, DENSE + 1), *(DENSE << i for i in range(config.max_tokens.bit_length()))}
            counts.add(config.max_tokens)
        shapes += [(r, b, s) for s in config.contexts for b in sorted(counts) if b <= config.max_tokens]
    return shapes


def jumps(target: Target, most: int) -> set[int]:
    """The numbers of tokens, up to `most`, before and after which a step computes more rows; none on a CPU."""
    if target.graphs is None:
        return set()
    return {b + i for b in range(1, most) if computed_rows(b) < computed_rows(b + 1) for i in (0, 1)}


def _sparse_grid(config: ProfileConfig, width: int, jumps: Collection[int]) -> list[Shape]:
    """One request, shortest context: 1, 4, 16, ... tokens, `width` and the most; elsewhere the most, and one each."""
    most, shortest = config.max_tokens, min(config.contexts)
    shapes = []
    for s, r in product(sorted(config.contexts), config.requests):
        counts = {most} if r > 1 and s > shortest else {r, most}
        if r == 1 and s == shortest:
            counts |= {min(width, most), *(1 << i for i in range(0, most.bit_length(), 2)), *jumps}
        shapes += [(r, b, s) for b in sorted(counts)]
    return shapes


@torch.inference_mode()
def measure_profile(
    target: Target,
    drafter: Drafter | None,
    config: ProfileConfig,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Profile:
    """Measure target and drafter on this machine, with the present number of threads.

    Raises:
        ValueError: the contexts do not fit the target, or its family cannot be batched.
    """
    width = PLAIN_WIDTH if drafter is None else draft_slots(drafter) + 1
    shapes = grid(config, width, jumps(target, config.max_tokens))
    longest = max(s + -(-b // r) for r, b, s in shapes)
    if longest > target.max_context:
        raise ValueError(
            f"contexts {list(config.contexts)} with up to {config.max_tokens} new tokens need {longest} positions, "
            f"{target.name} has {target.max_context}; lower --contexts or --max-tokens."
        )
    counts = config.requests
    branching = drafter is not None and drafter.trees
    jobs = forward_jobs(target, () if drafter is None else drafter.aux_layers, shapes, width=width, branching=branching)
    if drafter is not None:
        jobs |= draft_jobs(target, drafter, counts, context=config.middle, params=config.params(counts[-1]))
    timed = sweep(jobs, config.repeats, config.seconds, on_progress=on_progress)
    cells = []
    for r, b, s in shapes:
        low, median, high = quartiles(timed["forward", (r, b, s)])
        cells.append(Cell(requests=r, tokens=b, context=s, low=low, median=median, high=high))
    repeats = min(len(seconds) for seconds in timed.values())  # as many as `seconds` allowed
    plain = {
        n: [step.other_seconds for step in engine_steps(target, None, config.params(n), repeats=repeats)]
        for n in counts
    }
    verified = 0.0
    if drafter is not None:  # with most requests, where it can be told from what steps vary by
        steps = engine_steps(target, drafter, config.params(counts[-1]), repeats=repeats)
        more = statistics.median([step.other_seconds for step in steps]) - statistics.median(plain[counts[-1]])
        verified = max(0.0, more) / max(1.0, statistics.mean([step.admitted for step in steps]))
    return Profile(
        setting=setting_of(target, drafter),
        cells=cells,
        fit=Additive.fit(cells),
        gamma=0 if drafter is None else drafter.sources.drafter.gamma,
        draft=_curve("draft", timed),
        draft_one=_curve("draft_one", timed),
        extend=_curve("extend", timed),
        other=Curve(requests=counts, seconds=[quartiles(plain[n]) for n in counts]),
        verified=verified,
        repeats=repeats,
        temperatures=list(config.temperatures),
        machine=machine(),
        versions=versions(),
        date=today(),
    )


def _curve(name: str, timed: dict[Key, list[float]]) -> Curve | None:
    found = sorted((shape[0], quartiles(seconds)) for (what, shape), seconds in timed.items() if what == name)
    return Curve(requests=[n for n, _ in found], seconds=[q for _, q in found]) if found else None


def break_even(profile: Profile, context: int, rows: int) -> dict[int, float]:
    """By number of requests, the accepted length at which drafts pay: seconds of a round of them / of a plain step.

    `rows`: of a request that drafts, its anchor included. A drafter that was not measured costs nothing.
    """
    found = {}
    for count in profile.other.requests:
        plain, verifying = profile.seconds(np.array([count, count * rows]), count, context)
        found[count] = float((verifying + profile.draft_seconds(count)) / plain)
    return found


# ----------------------------------------------------------------------------
# The machine's profile: what a step costs here, measured in seconds on first use and kept in the user's cache.
#
#     $OUTRIDER_CACHE/profiles/TARGET-HASH.json        a `Profile` of the shapes in `QUICK`
#
# The hash is of all that step costs follow from: the `Setting`, the shapes of the target's weights, the instructions
# that PyTorch and oneDNN may use, and versions. The values of weights and a drafter's calibration are not in it: they
# change what is accepted, and no time. What was measured with something else therefore has another name; a file that is
# damaged, or that was copied from another machine, is measured again.
#
# A machine that does other work measures too long and unevenly. Policies weigh costs against each other, so a machine
# that is slower in everything changes nothing; uneven times do. A profile states its spread (`Profile.spread`): an
# uneven one is used, but only for ten minutes before it is measured again; a steady one is used for a month.
# ----------------------------------------------------------------------------


_KEPT = {True: 30 * 86400.0, False: 600.0}  # seconds, by whether it is steady


@dataclass(frozen=True)
class MachineProfile:
    """A profile of this machine. `path`: its file, None where the cache cannot be written; `seconds`: that measuring it
    took just now, None where it was read.
    """

    profile: Profile
    path: Path | None
    seconds: float | None

    @property
    def facts(self) -> str:
        """`step costs measured on 2026-11-23, spread 4 %`; of an uneven one also why, and what comes of it."""
        when = f"on {self.profile.date}" if self.seconds is None else f"now in {self.seconds:.1f} s"
        facts = f"step costs measured {when}, spread {100 * self.profile.spread:.0f} %"
        return f"{facts} (uneven: other work ran meanwhile; decoding corrects them)" if self.uneven else facts

    @property
    def uneven(self) -> bool:
        """Whether the same measurement gave so different seconds that other work must have run beside it."""
        return self.profile.spread > STEADY


def machine_profile(
    target: Target, drafter: Drafter | None, say: Callable[[str], None] = lambda line: None, *, again: bool = False
) -> MachineProfile:
    """Read the machine's profile, or measure and keep it. Of several processes one measures and the others wait.

    Args:
        say: told in one line before anything is measured.
        again: measure even if a profile is kept that may be used.

    Raises:
        ValueError: the target cannot be measured: the engine does not batch its family, or its layers are sharded.
    """
    if target.sharded:
        raise ValueError(f"{target.name} is sharded over processes, which would have to measure it together.")
    setting = setting_of(target, drafter)
    path = profile_path(target, setting)
    known = None if again else _read(path, setting)
    if known is not None:
        return MachineProfile(known, path, None)
    with ExitStack() as stack:
        with suppress(OSError):  # a read-only home: measured by every process, for itself
            stack.enter_context(sole_process(path.with_suffix(".lock")))
        known = None if again else _read(path, setting)
        if known is not None:
            return MachineProfile(known, path, None)
        say(f"measuring what a step of {setting.target} costs here, to choose draft lengths by; kept in {path}")
        started = time.perf_counter()
        measured = measure_profile(target, drafter, _fitting(target.max_context))
        seconds = time.perf_counter() - started
        try:
            measured.save(path)
        except OSError:
            return MachineProfile(measured, None, seconds)
        return MachineProfile(measured, path, seconds)


def _fitting(max_context: int) -> ProfileConfig:
    """`QUICK`, with the contexts that a target of so many positions has."""
    there = [context for context in QUICK.contexts if context + QUICK.max_tokens <= max_context]
    return replace(QUICK, contexts=tuple(there) or (max(1, max_context - QUICK.max_tokens),))


def profile_path(target: Target, setting: Setting) -> Path:
    """Where the profile of a target in this setting is kept."""
    shapes = sorted((name, tuple(weight.shape)) for name, weight in target.model.named_parameters())
    instructions = torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    # "halves": weights that are bfloat16 are read as such; profiles kept from before are measured again.
    about = [setting.model_dump(), shapes, instructions, versions(), "halves"]
    name = re.sub(r"[^\w.-]+", "-", setting.target.split(" (")[0])[:64]
    return cache_dir() / "profiles" / f"{name}-{sha256(json.dumps(about).encode()).hexdigest()[:16]}.json"


def _read(path: Path, setting: Setting) -> Profile | None:
    """The profile that is kept there; None where there is none, or none to be used any more."""
    try:
        profile = Profile.load(path)
        profile.check(setting)
        age = time.time() - path.stat().st_mtime
    except (OSError, ValueError):
        return None
    return profile if 0 <= age < _KEPT[profile.spread <= STEADY] else None

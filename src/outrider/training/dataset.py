"""Makes the training and held-out samples of a recipe's data section, and chooses the reduced draft vocabulary.

    sources -> conversations, interleaved -> responses (regenerated, or a file as it is) -> samples -> split

The split is by conversation, on a hash of the id: the `held_out` smallest are held out, the same for every seed, so
that seeds compare and share a feature store. When conversations are added, none that was trained on becomes held out;
some that were held out may be trained on.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.data.chat import Chat
from outrider.data.conversations import Conversation, number_copies
from outrider.data.regenerate import (
    DataSection,
    LocalSource,
    Progress,
    Regeneration,
    ServerSource,
    no_progress,
    regenerate,
)
from outrider.data.responses import (
    Line,
    Reply,
    Sample,
    open_responses,
    sole_writer,
    stored_samples,
    truncation_warning,
)
from outrider.data.sources import EvaluationText, find_prompts, iterate_prompts, prompt_sources
from outrider.target.hub import canonical_id
from outrider.target.model import Target
from outrider.training.recipe import Recipe
from outrider.utils.files import recover_interrupted_write


def recipe_prompts(data: DataSection, say: Callable[[str], None] = lambda line: None) -> list[Conversation]:
    """All conversations of a recipe, the sources interleaved so that an early stop leaves a fair mixture.

    Args:
        say: called with each line of the table of text shared with the sets of `not_in`.

    Raises:
        ValueError: two different conversations have the same id, or see `EvaluationText`.
    """
    sources = []
    apart = EvaluationText(data.not_in, data.directory) if data.not_in else None
    read = prompt_sources([source.path for source in data.prompts], data.directory)
    for source in compress(data.prompts, read):
        chosen = (
            conversation.first_turns(source.max_turns)
            for conversation in iterate_prompts(source.path, data.directory)
            if source.max_characters is None or conversation.opening_characters <= source.max_characters
        )
        if apart is not None:
            shares = partial(apart.shares, Path(source.path).stem)
            chosen = (conversation for conversation in chosen if not shares(conversation))
        sources.append(list(islice(chosen, source.limit)))
    for line in [] if apart is None else apart.table():
        say(line)
    places = [((i + 0.5) / len(prompts), p) for prompts in sources for i, p in enumerate(prompts)]
    prompts = list(number_copies(p for _, p in sorted(places, key=lambda place: place[0])))
    repeated = [name for name, count in Counter(p.id for p in prompts).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} prompt ids of data.prompts belong to more than one conversation "
            f"({', '.join(repeated[:3])}); give each its own, or none."
        )
    return prompts


def check_prompt_files(data: DataSection) -> int:
    """Read the prompt files of a recipe and find the sets of `not_in`, before anything is loaded; other sources may be
    a download and are left out.

    Returns the number of their turns.

    Raises:
        ValueError: a file does not exist or has a malformed line, or there is no set of a name in `not_in`.
    """
    for name in data.not_in:
        find_prompts(name, data.directory)
    files = [source for source in data.prompts if source.path.endswith(".jsonl")]
    return sum(
        len(conversation.first_turns(source.max_turns).turns)
        for source in files
        for conversation in islice(iterate_prompts(source.path), source.limit)
    )


def make_responses(
    data: DataSection,
    chat: Chat,
    target: Target | None,
    seed: int,
    path: Path,
    on_progress: Progress = no_progress,
    say: Callable[[str], None] = lambda line: None,
) -> Regeneration:
    """Complete the responses at `path`: by the servers the section names, else by the target itself.

    Args:
        target: needed without servers. A server's key, where it wants one, is in $OPENAI_API_KEY.
        on_progress, say: see `regenerate`.

    Raises:
        ValueError: see `regenerate`; or servers ended the run before everything was done.
    """
    deadline = time.monotonic() + data.max_minutes * 60 if data.max_minutes else float("inf")
    source: LocalSource | ServerSource
    if data.base_urls:
        source = ServerSource(chat, data, api_key=os.environ.get("OPENAI_API_KEY"))
    else:
        assert target is not None
        source = LocalSource(target, data)
    made = regenerate(
        source,
        recipe_prompts(data, say),
        path,
        seed=seed,
        on_progress=on_progress,
        say=say,
        stop=lambda: time.monotonic() > deadline,
    )
    if source.trouble:
        raise ValueError(
            f"{source.trouble}. {made.summary.waiting} of {made.summary.total} turns are waiting; what is done is in "
            f"{path}, and the same command goes on from there."
        )
    return made


def existing_responses(path: Path, target: Target) -> tuple[dict[str, Any], Iterator[tuple[Reply, Line]]]:
    """`open_responses` of a file as it is, whatever sampling made it.

    Raises:
        ValueError: no such file, made by another target or with another chat template, or it does not say with which.
    """
    settings, replies = open_responses(path)
    ours, theirs = Chat.of(target), settings.get("chat_template_sha256")
    same_model = canonical_id(str(settings.get("target"))) == canonical_id(ours.name)
    if same_model and theirs is None:
        raise ValueError(
            f"{path} does not say with which chat template it was made (chat_template_sha256 in its first line); write "
            "the responses with outrider prepare."
        )
    if not same_model or theirs != ours.template_sha256:
        what = "chat template" if same_model else f"target {settings.get('target')!r}"
        raise ValueError(
            f"{path} was made with another {what} than {ours.name!r} has; a drafter learns its own target."
        )
    return settings, replies


class Dataset(NamedTuple):
    """Samples to train on and to hold out, and the settings their responses were made with."""

    samples: list[Sample]
    held_out: list[Sample]
    responses: dict[str, Any]


def responses_path(recipe: Recipe) -> Path:
    """Path of the recipe's responses file, which may not exist yet."""
    return Path(recipe.data.responses) if recipe.data.responses else Path(recipe.out) / "responses.jsonl"


def _wanted(data: DataSection, replies: Iterator[tuple[Reply, Line]]) -> Iterator[tuple[Reply, Line]]:
    """The replies to the recipe's prompts; all where it names none."""
    if not data.prompts:
        return replies
    wanted = {c.id: len(c.turns) for c in recipe_prompts(data)}
    return (pair for pair in replies if pair[0].turn < wanted.get(pair[0].id, 0))


def known_samples(recipe: Recipe) -> list[Sample]:
    """The samples to train on of the responses that are there; no model is loaded and none is made."""
    path = responses_path(recipe)
    samples = stored_samples(path, _wanted(recipe.data, open_responses(path)[1])) if path.is_file() else []
    enough = len({sample.id for sample in samples}) > recipe.data.held_out
    return split_samples(samples, recipe.data.held_out, path)[0] if enough else []


def recipe_samples(
    recipe: Recipe,
    target: Target,
    on_progress: Progress = no_progress,
    say: Callable[[str], None] = lambda line: None,
) -> Dataset:
    """The recipe's samples, regenerating what is missing; `on_progress` and `say` as in `regenerate`."""
    data = recipe.data
    path = responses_path(recipe)
    # Once training has begun its samples are fixed, or a resumed run would not be the same run.
    # And the main rank alone, which comes here, cannot decode with a target that is spread over all.
    state = Path(recipe.out) / "state"
    recover_interrupted_write(state)  # a killed writer may have left it under another name
    fixed = target.sharded or (state / "state.json").is_file()
    if data.prompts and not fixed:
        with sole_writer(path):  # the processes of `outrider features write` come here one after another
            chat = Chat.of(target)
            made = make_responses(data, chat, target, seed=recipe.seed, path=path, on_progress=on_progress, say=say)
        if made.summary.waiting and data.max_minutes is not None:
            answered = f"{made.summary.done} of {made.summary.total} turns are answered"
            say(f"data.max_minutes, {data.max_minutes:g}, is over: {answered}, which training goes on with")
    settings, replies = existing_responses(path, target)
    finished: list[bool] = []

    def counted() -> Iterator[tuple[Reply, Line]]:
        for reply, line in _wanted(data, replies):
            finished.append(reply.finished)
            yield reply, line

    samples = stored_samples(path, counted())
    if warning := truncation_warning(finished, settings.get("max_new_tokens", data.max_new_tokens)):
        say(warning)
    return Dataset(*split_samples(samples, data.held_out, path), settings)


def split_samples(samples: Sequence[Sample], held_out: int, path: Path) -> tuple[list[Sample], list[Sample]]:
    """(training, held-out), by conversation: a sample of later turns contains the earlier responses.

    Raises:
        ValueError: there are no more conversations than are to be held out.
    """

    def place(name: str) -> bytes:
        return hashlib.sha256(f"0\n{name}".encode()).digest()

    order = sorted({s.id for s in samples}, key=place)
    if len(order) <= held_out:
        raise ValueError(
            f"{path} has responses to {len(order)} conversations and data.held_out takes {held_out} of them; "
            "add prompts or lower data.held_out."
        )
    chosen = set(order[:held_out])
    ranked = sorted(samples, key=lambda s: place(s.id))
    return [s for s in ranked if s.id not in chosen], [s for s in ranked if s.id in chosen]


# ----------------------------------------------------------------------------
# A reduced draft vocabulary: the tokens worth drafting, by frequency in the target's own responses.
#
# Lossless all the same: a token outside it is never drafted, and verification can still emit it.
# ----------------------------------------------------------------------------


def choose_draft_ids(
    samples: Sequence[Sample],
    vocab_size: int,
    draft_vocab_size: int,
    always: frozenset[int],
    then: Sequence[int] = (),
) -> Tensor:
    """[Vd] ascending target ids: `always` (stop tokens), the most frequent of responses, those of all text, `then`."""
    if draft_vocab_size >= vocab_size:
        return torch.arange(vocab_size)
    responses, everything = _Frequencies(vocab_size), _Frequencies(vocab_size)
    for sample in samples:
        tokens_n = np.asarray(sample.tokens)
        everything.add(tokens_n)
        for start, end in sample.spans:
            responses.add(tokens_n[start:end])
    ranked = [*sorted(always), *responses.ranked(), *everything.ranked(), *then, *range(vocab_size)]
    return torch.tensor(sorted(list(dict.fromkeys(ranked))[:draft_vocab_size]))


class _Frequencies:
    """How often each token of a vocabulary comes; of equally frequent ones the first to come is first."""

    def __init__(self, vocab_size: int) -> None:
        self.counts_V = np.zeros(vocab_size, dtype=np.int64)
        self.first_V = np.full(vocab_size, np.iinfo(np.int64).max)
        self.seen = 0

    def add(self, tokens_n: np.ndarray) -> None:
        ids, places, counts = np.unique(tokens_n, return_index=True, return_counts=True)
        self.counts_V[ids] += counts
        self.first_V[ids] = np.minimum(self.first_V[ids], self.seen + places)
        self.seen += len(tokens_n)

    def ranked(self) -> list[int]:
        """The tokens that came, the most frequent ones first."""
        order = np.lexsort((self.first_V, -self.counts_V))
        found: list[int] = order[: np.count_nonzero(self.counts_V)].tolist()
        return found

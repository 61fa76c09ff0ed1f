"""Settings of what is done with a recipe: train, features, prepare, init, recipe and runs.

Read by `--help`, so nothing here imports PyTorch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from outrider.config import (
    FILES,
    GENERAL,
    MODELS,
    SAMPLING,
    Config,
    TargetName,
    argument,
    option,
    rare,
)

_SERVERS, _PROCESSES, _SIZE = "Servers", "Processes", "Size"
RecipePath = Annotated[Path, argument("a recipe: a YAML file, or one that outrider recipe lists")]
Overrides = Annotated[tuple[str, ...], argument("fields to change: optimizer.steps=200 ...")]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """A recipe to train by; everything else is in the recipe (training/recipe.py)."""

    recipe: RecipePath
    overrides: Overrides = ()
    dry_run: Annotated[
        bool, option(GENERAL, "only time a few steps and say what all take: time, memory, disk", "--dry-run")
    ] = False


@dataclass(frozen=True, kw_only=True)
class FeaturesConfig(Config):
    """The store of a recipe's features (training/feature_store.py)."""

    recipe: RecipePath
    overrides: Overrides = ()

    @property
    def changes(self) -> list[str]:
        """The fields of the recipe that change."""
        return ["features.mode=store", *self.overrides]


@dataclass(frozen=True, kw_only=True)
class WriteFeaturesConfig(FeaturesConfig):
    """Which part of the store this process writes, and how large it may be."""

    shard: Annotated[int | None, option(_PROCESSES, "this process's number, from 0; else RANK")] = None
    of: Annotated[int | None, option(_PROCESSES, "how many processes write; else WORLD_SIZE")] = None
    only: Annotated[tuple[int, ...], option(_PROCESSES, "write just this shard; repeatable", repeated=True)] = ()
    limit_gb: Annotated[float | None, option(_SIZE, "ask for --yes above this size")] = None
    max_bytes: Annotated[int | None, option(_SIZE, "keep at most this much, as a rolling window (features.max_gb)")] = (
        None
    )
    yes: Annotated[bool, option(_SIZE, "write whatever the size", "--yes")] = False

    @property
    def changes(self) -> list[str]:
        window = [] if self.max_bytes is None else [f"features.max_gb={self.max_bytes / 2**30!r}"]
        return [*super().changes, *window]

    @property
    def process(self) -> tuple[int, int]:
        """(number of this process, how many write).

        Raises:
            ValueError: there is no process of that number.
        """
        number = int(os.environ.get("RANK", 0)) if self.shard is None else self.shard
        count = int(os.environ.get("WORLD_SIZE", 1)) if self.of is None else self.of
        if count < 1:
            raise ValueError(f"--of {count} must be at least 1.")
        if not 0 <= number < count:
            raise ValueError(f"--shard {number} --of {count}: processes are numbered 0 to {count - 1}.")
        return number, count

    def check(self) -> None:
        assert self.process


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Config):
    """Responses of the target to prompts; what is not given is the recipe's (training/responses.py)."""

    overrides: Overrides = ()
    target: Annotated[str | None, option(MODELS, "model id or directory; the recipe's by default", beside="name")] = (
        None
    )
    recipe: Annotated[
        Path | None, option(FILES, "take what is not given here from its data section", beside="name")
    ] = None
    prompts: Annotated[
        tuple[str, ...],
        option(FILES, "JSONL file, shipped set, name, hf:owner/name[:split]; repeatable", repeated=True, beside="name"),
    ] = ()
    not_in: Annotated[
        tuple[str, ...],
        rare(FILES, "drop prompts that share 13 words with these; repeatable", repeated=True, beside="name"),
    ] = ()
    directory: Annotated[
        Path | None,
        rare(
            "Prompts",
            "where prompts by name are looked for without network; $OUTRIDER_DATA",
            "--data-dir",
            beside="path",
            show_default=False,
        ),
    ] = None
    limit: Annotated[int | None, option(FILES, "conversations of each --prompts", min=1)] = None
    max_turns: Annotated[int | None, rare(FILES, "turns of each conversation of --prompts", min=1)] = None
    out: Annotated[Path | None, option(FILES, "the responses file, *.jsonl", beside="path")] = None
    base_urls: Annotated[
        tuple[str, ...],
        option(
            _SERVERS,
            "OpenAI-compatible server of the target; repeatable; none: decode here",
            "--base-url",
            repeated=True,
        ),
    ] = ()
    served_model: Annotated[str | None, option(_SERVERS, "the target's name on the servers", "--model")] = None
    chat_api: Annotated[bool | None, rare(_SERVERS, "servers without /v1/completions", "--chat")] = None
    concurrency: Annotated[int | None, option(_SERVERS, "requests in flight per server", min=1)] = None
    timeout: Annotated[float | None, rare(_SERVERS, "seconds per request", above=0.0)] = None
    retries: Annotated[int | None, rare(_SERVERS, "of a failed request", min=0)] = None
    thinking: Annotated[bool | None, option(SAMPLING, "ask the chat template for it", "--thinking/--no-thinking")] = (
        None
    )
    max_new_tokens: Annotated[int | None, option(SAMPLING, "per response", min=2)] = None
    max_prompt_tokens: Annotated[int | None, rare(SAMPLING, "longer prompts are skipped", min=1)] = None
    temperature: Annotated[
        tuple[float, ...], option(SAMPLING, "0: the likeliest token; repeatable", min=0.0, repeated=True)
    ] = ()
    top_p: Annotated[
        float | None, rare(SAMPLING, "keep the likeliest tokens of this total probability", above=0.0, max=1.0)
    ] = None
    top_k: Annotated[int | None, rare(SAMPLING, "keep the k likeliest tokens; 0: all", min=0)] = None
    seed: Annotated[int | None, option(SAMPLING, "of random numbers")] = None
    batch_size: Annotated[int | None, rare(GENERAL, "responses decoded at once here", min=1)] = None
    max_minutes: Annotated[float | None, option(GENERAL, "stop after this long; run again to go on", above=0.0)] = None
    device: Annotated[str | None, option(GENERAL, "auto, cpu, cuda, ...; the recipe's, else auto")] = None
    threads: Annotated[int | None, option(GENERAL, "CPU threads; $OMP_NUM_THREADS, else all", min=1, max=1024)] = None
    overlap: Annotated[bool, option(FILES, "only print how much text the prompts share with --not-in", "--overlap")] = (
        False
    )

    def check(self) -> None:
        if self.overrides and self.recipe is None:
            raise ValueError(f"{self.overrides[0]} changes a field of a recipe: give --recipe.")
        if not self.prompts and (self.limit is not None or self.max_turns is not None):
            raise ValueError("--limit and --max-turns belong to --prompts; a recipe has its own for each source.")


@dataclass(frozen=True, kw_only=True)
class InitConfig(Config):
    """A first run, planned from a model and prompts (training/first_run.py)."""

    target: TargetName
    prompts: Annotated[
        tuple[str, ...],
        option(FILES, "JSONL file, shipped set, hf:owner/name[:split]; repeatable", repeated=True, beside="name"),
    ] = ()
    out: Annotated[
        Path | None, option(FILES, "directory for recipe and prompts; runs/NAME by default", beside="path")
    ] = None
    force: Annotated[bool, option(FILES, "write over files that are there", "--force")] = False

    @property
    def directory(self) -> Path:
        """Where recipe and prompts are written."""
        return self.out or Path("runs") / Path(self.target).expanduser().resolve().name


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(Config):
    """What is shown of recipes."""

    name: Annotated[str | None, argument("a packaged recipe, printed; with --explain: a field")] = None
    copy: Annotated[Path | None, option(FILES, "write the recipe to this file, to be changed", beside="path")] = None
    explain: Annotated[bool, option(GENERAL, "type, default and meaning of each field, or of one")] = False
    schema: Annotated[bool, option(GENERAL, "print the JSON schema of recipes, for editors")] = False

    def check(self) -> None:
        if (self.copy is not None) + self.explain + self.schema > 1:
            raise ValueError("--copy, --explain and --schema: give one of them.")
        if self.copy is not None and self.name is None:
            raise ValueError(
                f"--copy {self.copy}: name the recipe to copy, as outrider recipe demo --copy {self.copy}."
            )


@dataclass(frozen=True, kw_only=True)
class RunsConfig(Config):
    """Where trainings are looked for (training/runs.py)."""

    directory: Annotated[Path, argument("where the runs are")] = Path("runs")
    json_out: Annotated[bool, option(GENERAL, "print a JSON list", "--json")] = False

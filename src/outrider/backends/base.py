"""An inference engine beside Outrider's own: what it loads, what it cannot serve, how it is started and asked.

    drafter --write--> checkpoint in the engine's dialect        `outrider export --to NAME`
    Launch  --command, environment--> a running server           `outrider bench --backend NAME --launch`,
                                                                 `outrider serve --engine NAME --launch`
    Request --request_fields--> a streamed answer                `outrider bench --backend NAME`

Every engine is one subclass of `ExternalEngine` in a file of its own and one line of backends/registry.py
(docs/add-an-engine.md shows how to add one).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from outrider.checkpoints.dialects.base import Dialect, ExportedCheckpoint, TargetFacts
from outrider.checkpoints.dialects.deepspec import widened
from outrider.checkpoints.registry import Export, methods
from outrider.decoding.request import Output, Request, StepRecord
from outrider.drafters.base import DrafterWeights


@dataclass(frozen=True)
class Speculation:
    """The drafting that an engine is started with.

    Attributes:
        method: of checkpoints/registry.py; or `lm`, a smaller language model; or `ngram`, which needs no weights.
        drafts: tokens per draft.
        drafter: directory or file that the engine loads; None: the method needs none.
        reduced_vocabulary: whether the drafter drafts from a part of the target's tokens.
        mixed_layers: whether some of its layers have a sliding window and some have none.
    """

    method: str
    drafts: int
    drafter: str | None = None
    reduced_vocabulary: bool = False
    mixed_layers: bool = False

    @staticmethod
    def of(parts: DrafterWeights, drafter: str) -> Speculation:
        """Speculation with a trained drafter that the engine finds at `drafter`."""
        reduced, mixed = parts.draft_ids_Vd is not None, bool(getattr(parts.config, "layer_types", ()))
        chain = Speculation(parts.algorithm, parts.config.gamma, drafter)
        return replace(chain, reduced_vocabulary=reduced, mixed_layers=mixed)


@dataclass(frozen=True)
class Launch:
    """How an engine's server is started. What is None is left to the engine.

    Args:
        target: a directory or id that the engine can load.
        speculation: None starts the engine without drafts.
        name: of the model, as clients ask for it.
        architectures: the target's, in its config.json.
        users: requests at once; `context`: tokens of the longest of them.
        prompt_cache: whether prompts that begin alike share their prefill. Load tests ask for counted prompts several
            times, and a cached one has no prefill.
        python: of the environment the engine is installed in.
        executable: the engine's own command, instead of `python`.
        extra: further flags.
    """

    target: str
    speculation: Speculation | None = None
    host: str = "127.0.0.1"
    port: int = 0
    name: str | None = None
    dtype: str | None = None
    architectures: tuple[str, ...] = ()
    users: int | None = None
    context: int | None = None
    prompt_cache: bool = True
    python: str = sys.executable
    executable: str | None = None
    extra: tuple[str, ...] = ()

    @property
    def positions(self) -> int | None:
        """Positions per request: its context and room for two drafts.

        If rows and next draft of the longest request have no room, vLLM drafts for none in the batch.
        """
        if self.context is None:
            return None
        return self.context + 2 * ((self.speculation.drafts if self.speculation else 0) + 1)

    def flags(self, **values: str) -> list[str]:
        """`flag value` of each of these fields that is not None: flags(users="--max-num-seqs")."""
        given = {flag: getattr(self, name) for name, flag in values.items()}
        return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]


@dataclass(frozen=True)
class MetricNames:
    """Names under which /metrics counts rounds, drafted and accepted tokens, or shows the accepted length itself.

    `length` is a gauge over a time of the engine's choosing: of a window it tells less than counters do.
    """

    rounds: str | None = None
    drafted: str | None = None
    accepted: str | None = None
    length: str | None = None

    @staticmethod
    def counters(prefix: str) -> MetricNames:
        """The counters that vLLM and llama.cpp share but for their prefix."""
        name = prefix + ":spec_decode_num_{}_total"
        return MetricNames(name.format("drafts"), name.format("draft_tokens"), name.format("accepted_tokens"))

    def accepted_K(self, page: Mapping[str, Sequence[float]]) -> Sequence[float]:
        """Drafts accepted at each position, of the values on /metrics by name; () if it does not count them so."""
        name = (self.accepted or "").replace("_total", "_per_pos_total")
        return page.get(name) or page.get(name.removesuffix("_total"), ())  # the latter: newer llama.cpp


# What a request leaves out, servers take from the target's generation settings; decoding here has no penalties.
NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Round:
    """One round that the server described.

    Attributes:
        start: tokens of the response before it.
        verified: drafts verified; 0: none of the drafter's.
        accepted: drafts accepted.
        tokens: that it gave.
    """

    start: int
    verified: int
    accepted: int
    tokens: int


@dataclass(frozen=True)
class Counts:
    """Rounds of one answer, as its server counts them.

    Attributes:
        accepted: drafts accepted at all positions.
        accepted_K: drafts accepted at each position; None: the server reports their sum alone.
        drafted: None: not reported.
        slots: drafts of a round; None: not reported.
        described: every round, if the server describes them.
    """

    rounds: int
    accepted: int
    accepted_K: tuple[int, ...] | None = None
    drafted: int | None = None
    slots: int | None = None
    described: tuple[Round, ...] = ()

    @property
    def reached_K(self) -> tuple[int, ...]:
        """Rounds that verified a draft at each position and had accepted all before it."""
        assert self.accepted_K is not None
        if self.described:
            drafting = [(r.verified, r.accepted) for r in self.described if r.verified]
            return tuple(sum(v > k and a >= k for v, a in drafting) for k in range(len(self.accepted_K)))
        return (self.rounds, *self.accepted_K[:-1])


def at_positions(histogram: Sequence[int]) -> tuple[int, ...]:
    """Drafts accepted at each position, from the numbers of rounds that accepted 0, 1, 2 ... drafts."""
    return tuple(sum(histogram[k + 1 :]) for k in range(len(histogram) - 1))


def rounds_by_accepted(rounds: int, accepted_K: Sequence[int]) -> tuple[int, ...] | None:
    """Numbers of rounds that accepted 0, 1, 2 ... drafts, from the drafts accepted at each position.

    None where they cannot be those of one engine, as if the counts of several stand one after another.
    """
    at_least = (rounds, *accepted_K)
    if list(at_least) != sorted(at_least, reverse=True) or at_least[-1] < 0:
        return None
    return tuple(here - deeper for here, deeper in zip(at_least, (*accepted_K, 0), strict=True))


class ExternalEngine:
    """All that is known of one engine; a subclass states what differs from a plain OpenAI-compatible server.

    Attributes:
        takes: how it takes the drafters of built-in methods, by method; `exports` adds what installed methods bring.
        also_drafts: what its command line calls methods that it drafts with and gets no export of.
        calibration: what becomes of a DSpark drafter's calibrated confidences, the end of a sentence.
        over_http: whether it serves an OpenAI-compatible API.
        gguf: whether it loads GGUF files, converted from the checkpoints.
        takes_thinking: whether its chat endpoint knows `chat_template_kwargs`.
        request_fields: further fields of every request.
        health: path that answers with a success once it serves.
        key_variable: the variable from which it reads the key that its clients must send; None: it reads none.
    """

    name: ClassVar[str]
    takes: ClassVar[Mapping[str, Export]] = {}
    also_drafts: ClassVar[Mapping[str, str]] = {}
    calibration: ClassVar[str] = "reads them as they are"
    over_http: ClassVar[bool] = True
    gguf: ClassVar[bool] = False
    takes_thinking: ClassVar[bool] = True
    request_fields: ClassVar[Mapping[str, Any]] = {}
    metrics: ClassVar[MetricNames] = MetricNames()
    health: ClassVar[str] = "/health"
    key_variable: ClassVar[str | None] = None

    def exports(self) -> dict[str, Export]:
        """How it takes the drafters of every method that it can, by method."""
        brought = {method.name: method.exports[self.name] for method in methods() if self.name in method.exports}
        return {**self.takes, **brought}

    def check(self, parts: DrafterWeights) -> list[str]:
        """List what the engine leaves out when it serves this drafter, a sentence each.

        Raises:
            ValueError: it cannot serve the drafter; the message names the field and what to train instead. Callers
                put the engine's name before it.
        """
        return []

    def check_dialect(self, parts: DrafterWeights, dialect: Dialect) -> None:
        """Refuse a dialect that the engine reads otherwise than its maker."""

    def finish(self, written: ExportedCheckpoint) -> ExportedCheckpoint:
        """The checkpoint with what the engine reads otherwise than the dialect's maker."""
        return written

    def serve(self, parts: DrafterWeights, directory: str, target: str) -> list[str]:
        """The commands that serve an exported drafter, one a line."""
        raise NotImplementedError

    def command(self, launch: Launch) -> list[str]:
        """The words of the command that starts the server.

        Raises:
            ValueError: it cannot be started here, or not like that.
        """
        raise ValueError(f"--launch: how to start {self.name} is not known here; start it yourself (--base-url).")

    def family_flags(self, architectures: Sequence[str]) -> list[str]:
        """Flags that drafting needs for targets of a family, which their architectures in config.json tell."""
        return []

    def environment(self, launch: Launch) -> dict[str, str]:
        """Variables that the command needs."""
        return {}

    def accepted_length(self, event: Mapping[str, Any]) -> float | None:
        """Tokens per round of one request, from an event of its stream; None: not reported."""
        return None

    def counts(self, answer: Mapping[str, Any], tokens: int) -> Counts | None:
        """The rounds of a whole answer of so many tokens; None: not reported."""
        return None

    def name_of(self, method: str) -> str:
        """The engine's name of a method."""
        names = {name: export.name for name, export in self.exports().items() if export.name is not None}
        names |= self.also_drafts
        if method not in names:
            raise ValueError(f"{self.name} has no drafters of kind {method}; it knows {', '.join(names)}.")
        return names[method]

    def limits(self, parts: DrafterWeights, factor: float) -> list[str]:
        """`check`, and whether the engine has the method at all.

        Args:
            factor: by which the target multiplies its embeddings.
        """
        name, config, exports = parts.algorithm, parts.config, self.exports()
        if name not in exports:
            raise ValueError(f"it takes no {name} drafters: train one of {', '.join(exports)} (drafter.algorithm).")
        export = exports[name]
        if factor != 1.0 and not export.scales_embeddings:
            raise ValueError(f"input_embedding_scale {factor:g} has no place there: its {name} drafters get none.")
        if export.whole_vocabulary and config.draft_vocab_size != config.vocab_size:
            raise ValueError(
                f"draft_vocab_size {config.draft_vocab_size} has no place there; its {name} drafts from all "
                f"{config.vocab_size} tokens: train with drafter.draft_vocab_size=null."
            )
        if export.targets_vocabulary:
            check_targets_vocabulary(parts)
        return [*self.check(parts), *export.check(parts)]

    def check_loads(self, parts: DrafterWeights, dialect: Dialect, factor: float) -> None:
        """Whether a checkpoint can be given to the engine as it is; `factor` as in `limits`.

        Raises:
            ValueError: it cannot serve this drafter, or must have it exported; the message is as that of `check`.
        """
        self.limits(parts, factor)
        name, export = parts.algorithm, self.exports()[parts.algorithm]
        known = [each.name for each in (export.dialect, export.also_reads) if each is not None]
        first = f"export it first (outrider export DIR --to {self.name} --out OUT)."
        if dialect.name not in known:
            raise ValueError(
                f"{name} drafters are not loaded in the dialect {dialect.name}, only in {' or '.join(known)}: {first}"
            )
        if export.widens and parts.draft_ids_Vd is not None:
            raise ValueError(f"draft_vocab_size {parts.config.draft_vocab_size} has no place there: {first}")
        self.check_dialect(parts, dialect)

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        """The checkpoint that the engine loads.

        Raises:
            ValueError: it has no such method, or cannot serve this drafter; the message names engine and field.
        """
        try:
            left_out = self.limits(parts, 1.0 if target is None else target.embedding_scale)
            export = self.exports()[parts.algorithm]
            self.check_dialect(parts, export.dialect)
            if export.widens and parts.draft_ids_Vd is not None:
                parts = widened(parts)
                column = f"column {parts.config.markov_rank} of the sequential head"
                zero = f"tokens outside the draft vocabulary have a probability of 0, by {column}."
                left_out = [f"d2t, which {self.name} does not read: {zero}", *left_out]
            written = self.finish(export.dialect.write(parts, target))
        except ValueError as error:
            raise ValueError(f"--to {self.name}: {error}") from error
        return replace(written, fallbacks=[*written.fallbacks, *left_out])


# ----------------------------------------------------------------------------
# Checks that several engines share.
# ----------------------------------------------------------------------------


def require(parts: DrafterWeights, field: str, value: object, reason: str) -> None:
    """Refuse a drafter whose config has another value of a field than the engine serves."""
    if (own := getattr(parts.config, field)) != value:
        given, needed = (json.dumps(x) for x in (own, value))
        raise ValueError(f"{field} {given} is not served there; {reason}: train with drafter.{field}={needed}.")


def check_sequential_head(parts: DrafterWeights) -> None:
    """Refuse DSpark without a sequential head."""
    if parts.algorithm == "dspark" and parts.config.markov_rank == 0:
        raise ValueError("markov_rank 0 has no place there: train with drafter.markov_rank=64.")


def check_vanilla_head(parts: DrafterWeights) -> None:
    """Refuse DSpark without the vanilla sequential head, the first of three and the only one served there."""
    check_sequential_head(parts)
    if parts.algorithm == "dspark":
        require(parts, "markov_head_type", "vanilla", reason="its DSpark has that sequential head alone")


def check_targets_vocabulary(parts: DrafterWeights) -> None:
    """Refuse an LM head or embedding of the drafter's own: these engines take the target's."""
    if parts.head_VdH is not None or parts.embedding_VH is not None:
        raise ValueError("lm_head.weight, embed_tokens.weight of the drafter's own have no place there: train without.")


def causal_in_sliding_layers_alone(parts: DrafterWeights) -> bool:
    """Whether block rows see those after them in full layers and not in sliding ones (`is_causal` null)."""
    return getattr(parts.config, "is_causal", False) is None


# ----------------------------------------------------------------------------
# What takes requests under load.
# ----------------------------------------------------------------------------


class Backend(Protocol):
    """The receiver of a load: our `Engine`, a simulated one, or a client of a server.

    `step` returns what came since the last call; if nothing did, it waits, but not long if requests may come
    meanwhile. `last` is None if steps are not seen; then only what users see is measured, and what a
    `ReportsAcceptance` backend reports.
    """

    @property
    def idle(self) -> bool: ...

    @property
    def last(self) -> StepRecord | None: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, id: str) -> bool: ...

    def step(self) -> list[Output]: ...


@dataclass(frozen=True)
class Acceptance:
    """Acceptance in a window: tokens per round with the bonus, accepted drafts per verified one; None: not reported.

    `histogram`: numbers of rounds that accepted 0, 1, 2 ... drafts.
    """

    accepted_length: float | None
    acceptance: float | None = None
    rounds: float | None = None
    histogram: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RequestStats:
    """A finished request: its response if the outputs were parts of a text, and its accepted length."""

    tokens: list[int] | None
    accepted_length: float | None


@runtime_checkable
class ReportsAcceptance(Protocol):
    """A backend without step records that reports acceptance since `start_window`, and once of a finished request."""

    def start_window(self) -> None: ...

    def acceptance(self) -> Acceptance: ...

    def request_stats(self, id: str) -> RequestStats: ...

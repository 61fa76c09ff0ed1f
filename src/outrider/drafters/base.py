"""What decoding and training need of a drafter: `Drafter`, `DraftModule`, and the catalogue's `Method`.

A draft's distributions p_k must be those that its tokens were *sampled from*, warps included: acceptance
min(1, p_t/p_d) is lossless for no others (Leviathan et al., arXiv 2211.17192).
Shapes: K block positions, L aux layers, V target vocab.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.drafters.confidence import UNSCALED, ChainHeads, ConfidenceScaling, SampledScaling
from outrider.drafters.config import DrafterConfig
from outrider.drafters.draft import Draft, TreeSize
from outrider.drafters.fused_loss import DraftLogits, Supervision, fused_loss, label_probabilities
from outrider.drafters.heads import ConfidenceHead, VanillaMarkov
from outrider.drafters.layers import BlockLayout
from outrider.drafters.loss import DraftLoss
from outrider.drafters.rope import RopeTables
from outrider.sampling import Constraint, PositionNoise, RandomSource, SamplingParams, SeenTokens, constrained
from outrider.target.linear import Packable, PackedLinear, pack
from outrider.target.model import DecodingTarget, Target
from outrider.target.paged_attention import Division, Ints
from outrider.utils.measure import on_device

if TYPE_CHECKING:
    from outrider.drafters.dflash import DFlash
    from outrider.drafters.ngram import Library, NgramConfig

Calibratable: TypeAlias = Literal["confidences", "candidates"] | None
Level = Callable[[int, Tensor], Tensor]  # (k, tokens of paths [R, P, k + 1], anchor first) -> logits [R, P or 1, Vd]


@dataclass(frozen=True)
class DraftCall:
    """One request that wants a block: its session, and what its tokens are drawn with.

    `limit`: most tokens of use to it one after another, at least 1; None: the whole block. `nodes`: most draft tokens
    in all, where they branch; None: as many as the drafter has. With `noise` (coupled sampling) x_1 is drawn with that
    of `position`, the number of committed tokens, and `source` is not asked. `constraint`: what the response must
    follow; None: nothing.
    """

    session: Any
    anchor: int
    params: SamplingParams
    seen: SeenTokens
    source: RandomSource
    limit: int | None = None
    noise: PositionNoise | None = None
    position: int = 0
    nodes: int | None = None
    constraint: Constraint | None = None

    def constrained(self, logits_C: Tensor, ids_C: Tensor | None, drafts: Sequence[int]) -> Tensor:
        """Logits of the tokens `ids_C` (None: of all) behind `drafts`, -inf where the constraint rules a token out.

        Where it rules out all of them they stay as they are: what is drawn has p_t = 0, is rejected, and its residual
        is p_t. Ending the draft there would let its length, which policies see, tell of the tokens before.
        """
        allowed_V = None if self.constraint is None else self.constraint.allowed(drafts)
        allowed_C = allowed_V if allowed_V is None or ids_C is None else allowed_V[ids_C]
        return logits_C if allowed_C is None or not allowed_C.any() else constrained(logits_C, allowed_C)


class FailedCall(ValueError):
    """Drawing the tokens of one call failed, which says nothing of the others. `session`: the call's."""

    def __init__(self, session: Any, error: Exception) -> None:
        super().__init__(f"drafting: {error}")
        self.session = session


@contextmanager
def drawing_for(call: DraftCall) -> Iterator[None]:
    """What is drawn for one call alone; an exception in it becomes `FailedCall`."""
    try:
        yield
    except Exception as error:
        raise FailedCall(call.session, error) from error


class Drafter(ABC):
    """What decoding needs of any drafter. A session is its memory of one request's committed tokens, and no others.

    Attributes:
        aux_layers: target layers whose outputs `extend` takes; () if it reads none.
        gamma: most tokens that one draft can have accepted.
        nodes: most draft tokens of one tree, all branches together; None where drafts do not branch.
        config: what the cost of a draft follows from, a dataclass; None: nothing but the drafter's class.
        heads: what its chains are sampled with; None where it samples none.
    """

    aux_layers: tuple[int, ...] = ()
    gamma: int
    nodes: int | None = None
    config: Any = None
    heads: ChainHeads | None = None

    @property
    def trees(self) -> bool:
        """Whether its drafts branch."""
        return self.nodes is not None

    @property
    def slots(self) -> int:
        """Most draft tokens that one request brings to a target forward."""
        return self.gamma if self.nodes is None else self.nodes

    @property
    def sources(self) -> Sources:
        """Where the drafts of a request may come from: itself alone, unless it is made of two."""
        return Sources(self)

    def limited(self, drafts: int) -> Drafter:
        """The same drafter, asked for at most so many tokens, at least 1: its length, or the nodes of a tree."""
        return self if drafts >= self.slots else LimitedDrafter(self, drafts)

    def of_length(self, gamma: int) -> Drafter:
        """The same drafter as one that always drafts `gamma` tokens; only a block drafter's pass depends on it."""
        return self

    @abstractmethod
    def new_session(self, capacity: int) -> Any:
        """An empty session for at most `capacity` committed tokens."""

    @abstractmethod
    def extend(self, sessions: Sequence[Any], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        """Take newly committed tokens of several requests.

        Args:
            tokens: per session, those the target has just read (old anchor, accepted drafts), not the new anchor.
            aux_TLD: their raw aux hidden states [T, L, D], sessions one after the other; None where `aux_layers` is ().
        """

    @abstractmethod
    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> Sequence[Draft]:
        """One chain or tree per call; a chain may stop at the first confidence below `min_confidence`.

        Raises:
            FailedCall: one call's tokens could not be drawn. The others may be asked for again.
        """

    def end(self, session: Any) -> None:  # noqa: B027
        """Free what a session holds; it is not used again. A session that holds tensors of its own needs nothing."""

    def session_at(self, session: Any, length: int) -> Any:
        """The session as it was at its first `length` committed tokens.

        A drafter that defines it can have its confidences calibrated: drafts after every token of a text. Sessions of
        one request are used from the longest to the shortest, and may share memory.
        """
        raise NotImplementedError

    def levels(self, calls: Sequence[DraftCall], depth: int) -> Level:
        """Draft logits of all paths of a tree of that depth, level by level; temperatures and penalties left out.

        A drafter that defines it can have the accuracy of its candidates measured.
        """
        raise NotImplementedError

    @classmethod
    def calibrates(cls) -> Calibratable:
        """What `outrider calibrate` measures of it: its confidences, the accuracy of its candidates, or nothing."""
        if cls.levels is not Drafter.levels:
            return "candidates"
        return "confidences" if cls.session_at is not Drafter.session_at else None

    def ahead(self) -> DeviceDrafter | None:
        """Itself, if its blocks and chains can follow tokens that are on a GPU alone."""
        return None

    def with_heads(self, heads: ChainHeads) -> Drafter:
        """The same drafter, its chains sampled with other heads."""
        other = copy.copy(self)
        other.heads = heads
        return other

    def with_trees(self, size: TreeSize) -> Drafter:
        """The same drafter, drafting trees of that size.

        Raises:
            ValueError: it drafts chains only, or has no such trees.
        """
        raise ValueError(f"tree {size}: this drafter drafts chains only.")


class DeviceDrafter(Protocol):
    """What launching ahead (decoding/ahead.py) needs of a drafter, whose anchors and lengths are on a GPU alone.

    Its chains are drawn with `heads` from logits of `head`. The host reads no values, so that graphs may do all of it.
    Shapes: R requests, T rows of the target, H draft hidden.
    """

    heads: ChainHeads
    head: Head

    def memory(self, end: int) -> list[Tensor]:
        """What graphs of the other calls read, made ready for blocks behind `end` tokens."""
        ...

    def table(self, sessions: Sequence[Any], requests: int) -> Ints:
        """Where these sessions have their keys, padded to so many requests."""
        ...

    def block_at(self, anchors_R: Tensor, lengths_R: Tensor, real_R: Tensor, *, table: Tensor) -> Tensor:
        """Hidden states of the draft positions, [R, gamma, H].

        Args:
            lengths_R: committed tokens that each session has read.
            real_R: 1, or 0 for padding.
            table: as `table` gives it, on the device.
        """
        ...

    def extend_at(self, aux_TLD: Tensor, positions_T: Tensor, rows: Division, *, table: Tensor) -> None:
        """As `Drafter.extend` of rows at these positions, those of rejected drafts included, which the next block
        overwrites before it reads them.

        Args:
            rows: whose they are.
        """
        ...


class WrappedDrafter(Drafter):
    """A drafter that does as another one, but for what a subclass changes."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.aux_layers, self.gamma, self.nodes = drafter.aux_layers, drafter.gamma, drafter.nodes
        self.config, self.heads = drafter.config, drafter.heads

    def new_session(self, capacity: int) -> Any:
        return self.drafter.new_session(capacity)

    def extend(self, sessions: Sequence[Any], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        self.drafter.extend(sessions, tokens, aux_TLD)

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> Sequence[Draft]:
        return self.drafter.propose(calls, min_confidence)

    def end(self, session: Any) -> None:
        self.drafter.end(session)


class LimitedDrafter(WrappedDrafter):
    """A drafter that is asked for at most `drafts` tokens; see `Drafter.limited`."""

    def __init__(self, drafter: Drafter, drafts: int) -> None:
        super().__init__(drafter)
        assert 1 <= drafts <= drafter.slots
        self.gamma = min(drafts, drafter.gamma)
        self.nodes = drafts if drafter.trees else None

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> Sequence[Draft]:
        counts = [call.nodes if self.trees else call.limit for call in calls]
        assert all(count is not None and count <= self.slots for count in counts), "engines plan with our slots"
        return super().propose(calls, min_confidence)


@dataclass(frozen=True)
class Sources:
    """Where the drafts of a request may come from.

    Attributes:
        drafter: what `propose` reaches; drafting costs its passes.
        lookup: how prompt lookup searches, which costs no pass; None: there is none.
        library: other texts that it may search.
    """

    drafter: Drafter
    lookup: NgramConfig | None = None
    library: Library | None = None


def longest_draft(calls: Sequence[DraftCall], gamma: int) -> int:
    """How many positions anybody has use for, `gamma` at most."""
    return max(gamma if call.limit is None else min(call.limit, gamma) for call in calls)


def draft_slots(drafter: Drafter | None) -> int:
    """How many draft tokens one request brings to a target forward at most."""
    return 0 if drafter is None else drafter.slots


# ----------------------------------------------------------------------------
# What a loaded drafter is: its weights, and its calibration.
#
#     draft logits = head[draft_ids] h        c_k = sigmoid(s_k / T_k + b_k)
#
# Shapes: N rows, H draft hidden, V target vocab, Vd draft vocab, M draft heads.
# ----------------------------------------------------------------------------


Head = Callable[[Tensor], Tensor]  # hidden states [N, H] -> draft logits [N, Vd]


@dataclass(frozen=True)
class DraftCalibration:
    """What `outrider calibrate` measured of a drafter, as far as serving it needs that.

    Attributes:
        scaling: calibrates the confidences; as it is, it leaves them as they are.
        sampled: the same for sampled requests; None: as `scaling`.
        accuracy: a_k(i) per draft position and rank, which candidate trees are chosen by (drafters/trees.py);
            None where nobody has measured them.
    """

    scaling: ConfidenceScaling = UNSCALED
    sampled: SampledScaling | None = None
    accuracy: Sequence[Sequence[float]] | None = None

    def check(self, gamma: int) -> None:
        """It fits a drafter of `gamma` draft positions.

        Raises:
            ValueError: another number of positions, a temperature that is not above 0, or an estimator for greedy or
                sampled requests alone.
        """
        for one in (self.scaling, *(() if self.sampled is None else (self.sampled.scaling,))):
            if one.temperatures is not None and (len(one.temperatures) != gamma or min(one.temperatures) <= 0):
                raise ValueError(
                    f"temperatures {list(one.temperatures)} must be {gamma} numbers above 0, one per draft position; "
                    "calibrate this drafter again (outrider calibrate)."
                )
            if one.offsets is not None and len(one.offsets) != gamma:
                raise ValueError(
                    f"offsets {list(one.offsets)} must be {gamma} numbers, one per draft position; calibrate this "
                    "drafter again (outrider calibrate)."
                )
            if (one.estimator is None) != (self.scaling.estimator is None):
                raise ValueError(
                    "an estimator of confidences for greedy or for sampled requests alone; calibrate this drafter at "
                    "temperature 0 and above again (outrider calibrate)."
                )
        if self.accuracy is not None and len(self.accuracy) != gamma:
            raise ValueError(
                f"candidate accuracies of {len(self.accuracy)} positions for a drafter of {gamma}; measure this "
                "drafter again (outrider calibrate)."
            )


UNCALIBRATED = DraftCalibration()


@dataclass(frozen=True)
class DrafterWeights:
    """A drafter's weights: its module, and the vocabulary, LM head and embedding that are not the target's.

    Attributes:
        draft_ids_Vd: int64, the target's id of every draft token; None: the draft vocabulary is the target's.
        head_VdH: the drafter's own LM head over its draft vocabulary, [M, Vd, H] where each of M heads has one; None:
            the target's.
        embedding_VH: its own token embedding; None: the target's.
        embedding_scale: what embeddings are multiplied by, where the checkpoint says so; None: what the target does.
    """

    module: DraftModule
    draft_ids_Vd: Tensor | None = None
    head_VdH: Tensor | None = None
    embedding_VH: Tensor | None = None
    embedding_scale: float | None = None

    @property
    def config(self) -> Any:
        """The module's config."""
        return self.module.config

    @property
    def algorithm(self) -> str:
        """The method's name."""
        return self.module.algorithm

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The module's tensors by name; they take raw aux hidden states."""
        return self.module.folded_state_dict()

    def folded(self, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None) -> DrafterWeights:
        """A copy in another type, whose module takes raw aux hidden states and has no gradients."""
        ids_Vd = None if self.draft_ids_Vd is None else self.draft_ids_Vd.to(device)
        head, embedding_VH = (None if t is None else t.to(device, dtype) for t in (self.head_VdH, self.embedding_VH))
        return DrafterWeights(
            self.module.folded(dtype, device),
            ids_Vd,
            head,
            embedding_VH=embedding_VH,
            embedding_scale=self.embedding_scale,
        )

    def serve(self, target: Target, calibration: DraftCalibration = UNCALIBRATED) -> Drafter:
        """A drafter with a copy of these weights, ready to draft for `target`.

        Raises:
            ValueError: made for another target, or the draft ids or the calibration do not fit the config.
        """
        made: Any = self.module.drafter()
        drafter: Drafter = made(self.for_target(target), target, calibration)
        return drafter

    def for_target(self, target: Target) -> DrafterWeights:
        """Without what is only a copy of the target's own tensors.

        Raises:
            ValueError: the drafter is made for embeddings multiplied by another factor than this target's.
        """
        check_embedding_scale(self.embedding_scale, target.embed_scale, target.name)
        return self.without_copies(target.head_VD, target.embed_VD)

    def without_copies(self, head_VH: Tensor, embedding_VH: Tensor) -> DrafterWeights:
        """Without a head and an embedding that are only copies of these, the target's."""
        rows_VdH = head_VH if self.draft_ids_Vd is None else head_VH[self.draft_ids_Vd.to(head_VH.device)]
        return replace(
            self,
            head_VdH=None if _equal(self.head_VdH, rows_VdH) else self.head_VdH,
            embedding_VH=None if _equal(self.embedding_VH, embedding_VH) else self.embedding_VH,
        )

    def check(self) -> None:
        """The draft ids fit the config.

        Raises:
            ValueError: there are more or fewer than draft tokens.
        """
        ids = self.config.vocab_size if self.draft_ids_Vd is None else len(self.draft_ids_Vd)
        if ids != self.config.draft_vocab_size:
            raise ValueError(
                f"{ids} draft ids for a draft vocabulary of {self.config.draft_vocab_size}; "
                "pass the checkpoint's draft_ids_Vd."
            )

    def head(self, target: Target, number: int = 0) -> PackedLinear:
        """The LM head over the draft vocabulary: hidden states [N, H] -> draft logits [N, Vd] in float32.

        Args:
            number: which, where the drafter has several.
        """
        if self.head_VdH is not None:
            own_VdH = self.head_VdH if self.head_VdH.dim() == 2 else self.head_VdH[number]
            return PackedLinear(own_VdH.to(target.device, serving_dtype(target)))
        if self.draft_ids_Vd is None and target.dtype == serving_dtype(target):
            return target.head
        ids = self.draft_ids_Vd
        head_VH = target.head_VD if ids is None else target.head_VD[ids.to(target.device)]
        return PackedLinear(head_VH.to(serving_dtype(target)))

    def embedding(self, target: Target) -> Tensor:
        """What turns tokens into inputs of the drafter, [V, H]; the target's factor is applied to either."""
        return target.embed_VD if self.embedding_VH is None else self.embedding_VH.to(target.device)

    def chain_heads(
        self,
        target: DecodingTarget,
        calibration: DraftCalibration,
        sequential: VanillaMarkov | None,
        confidence: ConfidenceHead | None = None,
    ) -> ChainHeads:
        """What `sample_chain` reads besides hidden states; the heads are those of the served copy."""
        return ChainHeads(
            target.vocab_size,
            sequential,
            confidence,
            draft_ids_Vd=None if self.draft_ids_Vd is None else self.draft_ids_Vd.to(target.device),
            scaling=calibration.scaling,
            sampled=calibration.sampled,
        )


def serving_dtype(target: Target) -> torch.dtype:
    """The type of the matrices that a drafter for this target is served with: the target's on a GPU, else float32."""
    return target.dtype if target.device.type == "cuda" else torch.float32


def capped(head: Head, multiplier: float, softcap: float | None) -> Head:
    """c tanh(m u / c) of the logits u [N, Vd] that `head` gives, m the multiplier, c the cap (None: m u)."""
    if multiplier == 1.0 and softcap is None:
        return head

    def logits(hidden_NH: Tensor) -> Tensor:
        scaled_NVd = head(hidden_NH) * multiplier
        return scaled_NVd if softcap is None else softcap * torch.tanh(scaled_NVd / softcap)

    return logits


def _equal(own: Tensor | None, theirs: Tensor) -> bool:
    """Whether a drafter's tensor is the target's, in all of its M copies."""
    if own is None or own.shape[-2:] != theirs.shape:
        return False
    copies = own if own.dim() > theirs.dim() else own[None]
    return all(torch.equal(one.to(theirs), theirs) for one in copies)


def check_embedding_scale(stated: float | None, factor: float, target: str) -> None:
    """What a checkpoint says embeddings are multiplied by is what its target multiplies them by.

    Raises:
        ValueError: it is not, by more than rounding to bfloat16 explains.
    """
    if stated is not None and not math.isclose(stated, factor, rel_tol=2**-8):
        raise ValueError(
            f"input_embedding_scale is {stated:g}, and {target} multiplies embeddings by {factor:g}: this drafter was "
            "made for another target, or its config.json does not say what it was trained with."
        )


def check_fits(config: Any, target: DecodingTarget, final: bool = False) -> None:
    """A drafter must have been made for this target.

    Args:
        final: whether its aux hidden states may include the last hidden state.

    Raises:
        ValueError: hidden size, vocabulary, depth or aux hidden states differ (the message says which).
    """
    for name, mine, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if mine != theirs:
            raise ValueError(
                f"this drafter was made for another target: {name} is {mine}, {target.name} has {theirs}. "
                "Load the target it was trained on, or train a drafter for this one (outrider train)."
            )
    target.check_aux_layers(config.target_layer_ids, final)


def last_hidden_layer(target: Target) -> int:
    """The aux layer of the target's last hidden state, after the final norm.

    Raises:
        ValueError: the target has residual streams, whose last aux hidden state is their mean before that norm.
    """
    if target.family.streams:
        raise ValueError(
            f"this method reads the last hidden state after the final norm, and {target.name} gives the mean of its "
            "residual streams before it: choose another method, such as dspark_v4."
        )
    return target.num_layers - 1


# ----------------------------------------------------------------------------
# The trainable module of a drafter.
#
#     recipe --> config --> DraftModule --rows--> DraftRows.loss   (training)
#                           DrafterWeights --serve--> Drafter      (decoding)
#
# Training knows a drafter by `DraftModule` alone, decoding by `Drafter` alone, checkpoints by the fields of `config`
# and the tensors of the module. Embedding and LM head are the target's, frozen, never the module's.
#
# Shapes: S context slots of all sequences, N anchors (one draft each), K = gamma draft positions, L aux layers, D
# target hidden size, H draft hidden size (= D, because the head is the target's), V vocabulary, Vd draft vocabulary, r
# rank.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockInputs:
    """One training forward.

    Context slots are those of each sequence before its last anchor, one sequence after the other. An anchor at
    position a may use slots 0 .. a-1 of its own sequence: the aux hidden states there, and the tokens after them, the
    last of which is itself.

    Attributes:
        aux_SLD: raw float32 aux hidden states, in the order of `config.target_layer_ids`.
        tokens_S: token i of its sequence, for slot i.
        next_tokens_S: token i + 1.
        layout: slots per sequence, positions of the anchors, whose anchors they are.
        previous_NK: x_{k-1} for draft position k = 1..gamma; column 0 holds the anchors.
        embed: the target's frozen, scaled embedding, int64 [...] -> float32 [..., D].
    """

    aux_SLD: Tensor
    tokens_S: Tensor
    next_tokens_S: Tensor
    layout: BlockLayout
    previous_NK: Tensor
    embed: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DraftRows:
    """Output of a training forward, draft logits z = W_d h + W2 l at every position, and what they are trained by.

    A method that is trained by something else returns a subclass with tensors of its own and its own `loss`.

    Attributes:
        hidden_NKH: normed hidden states h; row (n, k) predicts x_k and may depend on previous_NK[n, :k+1] only.
        latent_NKr, w2_Vr: latents l of a sequential head and its output matrix [Vd, r]; None without one.
    """

    hidden_NKH: Tensor
    latent_NKr: Tensor | None = None
    w2_Vr: Tensor | None = None

    def logits(self, given: Supervision) -> DraftLogits:
        """The factors of z at the supervised positions."""
        latent_Mr = None if self.latent_NKr is None else given.wide(self.latent_NKr)
        return DraftLogits(given.wide(self.hidden_NKH), latent_Mr, self.w2_Vr)

    def loss(self, given: Supervision) -> DraftLoss:
        """sum_i w_i [ce CE_i + l1 ||p_d - p_t||_1 + kl KL(p_t || p_d)] / sum_i w_i of p_d = softmax(z).

        With a base share b (Domino's curriculum): (1 - b) of that and b of it for softmax(W_d h), without the
        sequential head's correction. Called with autocast off; acceptance and agreement are p_d's.
        """
        logits = self.logits(given)
        share = 0.0 if logits.latent_Nr is None else given.base_share
        drafts = fused_loss(logits, given.head, given.target, terms=given.terms(1 - share))
        if not share:
            return DraftLoss(*drafts[:3])
        parallel = fused_loss(DraftLogits(logits.hidden_NH), given.head, given.target, terms=given.terms(share))
        return DraftLoss(drafts.loss + parallel.loss, drafts.acceptance_N, drafts.agreement_N)

    def label_probabilities(self, given: Supervision) -> tuple[Tensor, Tensor]:
        """p_d of the label at each supervised position, and whether it is the likeliest token; no gradients.

        D-PACE takes its weights from the first.
        """
        return label_probabilities(self.logits(given), given.head, given.target.labels_N)

    def drafted_labels(self, given: Supervision) -> tuple[Tensor, Tensor]:
        """The same of what is drawn in serving, given the response's tokens before: `label_probabilities`, unless a
        method draws from other distributions.
        """
        return self.label_probabilities(given)


M = TypeVar("M", bound="DraftModule")


class DraftModule(Packable, ABC):
    """A trainable drafter: `config`, parameters, and the training forward `rows`.

    Aux hidden states differ in size by orders of magnitude, so training measures `aux_scale_L` and a module that needs
    aux hidden states of order one divides them by it. The constants fold into the weight named by `aux_weight` when
    weights are saved. A module whose first act is to norm its aux hidden states may leave the scale alone: `aux_weight`
    is then None.

    Attributes:
        aux_weight: name of the weight [out, L * D (+ more)] whose first columns read the flattened aux hidden states /
            aux_scale.
        aux_scale_L: ones unless training set it.
    """

    aux_weight: str | None = None
    config: Any
    aux_scale_L: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("aux_scale_L", torch.ones(len(config.target_layer_ids)), persistent=False)

    @abstractmethod
    def rows(self, inputs: BlockInputs) -> DraftRows:
        """The training forward: all draft positions of all anchors, given the true previous tokens."""

    @staticmethod
    @abstractmethod
    def drafter() -> type[Drafter]:
        """The class of the drafter that serves this module, made as `drafter(weights, target, calibration)`.

        What the method can do when served follows from what that class defines: trees (`with_trees`), calibration
        (`calibrates`).
        """

    @classmethod
    def drafts_trees(cls) -> bool:
        """Whether the drafter that serves it can be asked for trees."""
        return cls.drafter().with_trees is not Drafter.with_trees

    def check_target(self, target: DecodingTarget) -> None:
        """It was made for this target; a module that reads the last hidden state, after the final norm, overrides this.

        Raises:
            ValueError: hidden size, vocabulary, depth or aux hidden states differ (the message says which).
        """
        check_fits(self.config, target)

    def of_length(self: M, gamma: int) -> M:
        """The module with the same weights, drafting blocks of `gamma` tokens; itself if it drafts one by one."""
        return self

    def block_backbone(self) -> DFlash | None:
        """Itself, if its layers and fields are DFlash's, whose faults in servers `outrider doctor` looks for."""
        return None

    def initialize_from(self, target: Target, documents: Sequence[Sequence[int]]) -> None:
        """Set fresh weights from the target's, in place, given a few token sequences.

        By default they stay as they are.

        Called only for targets with Llama-shaped layers (`target.family.fused`).
        """

    def starts_from_target(self) -> bool:
        """Whether `initialize_from` copies weights of the target, whose licence then holds for the drafter, too."""
        return type(self).initialize_from is not DraftModule.initialize_from

    def separable_layers(self) -> list[nn.Module]:
        """Layers that a training forward runs once each: they can be compiled and sharded one by one."""
        return list(getattr(self, "layers", ()))

    def after_step(self, summed: Callable[[Tensor], Tensor]) -> None:
        """Called after each optimizer step of a training, on every rank; `summed` adds up a tensor over ranks.

        A module that defines it may count the rows of a forward: batches are then not padded, layers not compiled.
        """

    def counts_rows(self) -> bool:
        """Whether a training forward counts its rows, as routers of experts do for `after_step`."""
        return type(self).after_step is not DraftModule.after_step

    @property
    def algorithm(self) -> str:
        """The method's name, as in a recipe's `drafter.algorithm`."""
        name: str = self.config.algorithm
        return name

    def _aux_columns(self) -> Tensor:
        return self.aux_scale_L.repeat_interleave(self.config.hidden_size)

    def folded_state_dict(self) -> dict[str, Tensor]:
        """Weights that take raw aux hidden states: `aux_scale_L` divided out of the columns that read them. What is
        saved.
        """
        state = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        scale = self._aux_columns()
        if self.aux_weight is not None and bool((scale != 1).any()):
            weight = state[self.aux_weight].clone()
            weight[:, : len(scale)] /= scale
            state[self.aux_weight] = weight
        return {name: tensor.contiguous() for name, tensor in state.items()}

    def folded(self: M, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None) -> M:
        """A copy without gradients that takes raw aux hidden states; training may go on with the module."""
        with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
            folded = type(self)(self.config).eval().requires_grad_(False)
        state = {name: tensor.to(device, dtype, copy=True) for name, tensor in self.folded_state_dict().items()}
        folded.load_state_dict(state, assign=True)
        folded.aux_scale_L = torch.ones(self.aux_scale_L.shape, device=device or self.aux_scale_L.device)
        return folded

    def packed(self: M, device: torch.device, dtype: torch.dtype) -> M:
        """A copy to serve from: `folded` in float32, its linears packed in `dtype`."""
        served = self.folded(torch.float32, device)
        pack(served, dtype)
        return served

    def chain_heads(self) -> tuple[VanillaMarkov | None, ConfidenceHead | None]:
        """The sequential head and the confidence head, which sampling reads beside hidden states; None: has none."""
        return None, None

    @torch.no_grad()
    def rescale_aux(self, scale_L: Tensor) -> None:
        """Divide aux hidden states by `scale_L` [L] from now on, in place, without changing what is computed from raw
        ones.
        """
        before = self._aux_columns()
        self.aux_scale_L.copy_(scale_L)
        if self.aux_weight is not None:
            self.get_parameter(self.aux_weight)[:, : len(before)].mul_(self._aux_columns() / before)


class ModuleDrafter(Drafter, Generic[M]):
    """What drafters that serve a `DraftModule` share: a packed copy of it, embedding, LM head and chain heads.

    Raises:
        ValueError: the module was made for another target, or what it is served with does not fit it.
    """

    def __init__(self, weights: DrafterWeights, target: Target, calibration: DraftCalibration = UNCALIBRATED) -> None:
        config, self.device = weights.config, target.device
        weights.module.check_target(target)
        calibration.check(config.gamma)
        weights.check()
        self.config, self.module = config, cast(M, weights.module.packed(target.device, serving_dtype(target)))
        self.aux_layers, self.gamma, self.accuracy = tuple(config.target_layer_ids), config.gamma, calibration.accuracy
        self.embed_VH, self.embed_scale = weights.embedding(target), target.embed_scale
        self.head: Head = weights.head(target)
        sequential, confidence = self.module.chain_heads()
        self.heads: ChainHeads = weights.chain_heads(target, calibration, sequential, confidence=confidence)

    @cached_property
    def rope(self) -> RopeTables:
        """The rotations of layers that `config` describes, by position."""
        return RopeTables(self.config, self.device)

    def embed(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """Token ids [...] -> what the drafter reads of them, float32 [..., H]."""
        ids = tokens if isinstance(tokens, Tensor) else on_device(tokens, self.device, torch.long)
        embedded = F.embedding(ids, self.embed_VH).float()
        return embedded if self.embed_scale == 1.0 else embedded * self.embed_scale

"""The two networks of the proof: tables of random numbers that depend on the whole context, computed when asked.

Everything between them is production code. Shapes: K block positions, V vocab, Vd draft vocab, H draft hidden.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.contrib.domino import Domino, DominoConfig, PrefixHead
from outrider.contrib.lilicorr import LatticeHead, LatticeRows, LiLiCorrConfig
from outrider.drafters.base import DraftCall
from outrider.drafters.chain import sample_chain, sample_rows
from outrider.drafters.confidence import ChainHeads
from outrider.drafters.dflash2 import CandidateRows, CandidateSelector
from outrider.drafters.draft import Draft, Siblings, conditional_confidences, without
from outrider.drafters.heads import ConfidenceHead, SequentialHead, build_sequential_head
from outrider.sampling import RandomSource, SamplingParams, SeenTokens, constrained, warp
from tests.proof.enumeration import DraftTree, Tokens

M = TypeVar("M", bound=torch.nn.Module)


class ToyTarget:
    """Random logits for every context, as a table that is filled when asked.

    Args:
        constraint: the tokens that may follow a context, [V], or None for all.
    """

    def __init__(
        self,
        vocab_size: int,
        params: SamplingParams,
        seed: int = 0,
        constraint: Callable[[Tokens], Tensor | None] = lambda context: None,
    ) -> None:
        self.vocab_size, self.params, self.seed, self.constraint = vocab_size, params, seed, constraint
        self._rows: dict[Tokens, Tensor] = {}

    def row(self, context: Tokens) -> Tensor:
        """The warped distribution of the token after `context`."""
        if context not in self._rows:
            logits_V = 1.5 * torch.randn(self.vocab_size, generator=_generator(self.seed, context), dtype=torch.float64)
            seen = SeenTokens(self.vocab_size, self.params, output=context)
            self._rows[context] = warp(constrained(logits_V, self.constraint(context)), self.params, seen.with_tokens())
        return self._rows[context]


@dataclass(frozen=True)
class ToyConstraint:
    """A `Constraint` that is a function of the context."""

    after: Callable[[Tokens], Tensor | None]
    context: Tokens

    def allowed(self, drafts: Sequence[int] = ()) -> Tensor | None:
        return self.after((*self.context, *drafts))

    def commit(self, token: int) -> None:
        raise AssertionError("an enumerated round commits nothing")


class ToyDrafter:
    """Random base logits and hidden states per context under real sequential and confidence heads, all in float64."""

    hidden_size, rank = 3, 2

    def __init__(
        self,
        target: ToyTarget,
        gamma: int,
        head_kind: str | None,
        draft_ids: Sequence[int] | None = None,
        seed: int = 1,
    ) -> None:
        self.target, self.gamma, self.seed = target, gamma, seed
        self.draft_ids_Vd = None if draft_ids is None else torch.tensor(draft_ids)
        self.draft_vocab_size = target.vocab_size if draft_ids is None else len(draft_ids)
        self.head: SequentialHead | None = None
        generator = _generator(seed, ())
        if head_kind == "domino":
            self.head = self._prefix_head(generator)
        elif head_kind is not None:
            markov = build_sequential_head(
                head_kind, target.vocab_size, self.draft_vocab_size, self.hidden_size, self.rank
            )
            self.head = _random(markov, generator)
        with_markov = head_kind not in (None, "domino")
        self.confidence = _random(ConfidenceHead(self.hidden_size, self.rank, with_markov), generator)
        self._trees: dict[tuple[Tokens, float], DraftTree] = {}

    def _prefix_head(self, generator: torch.Generator) -> PrefixHead:
        """Domino's, whose first draft of several is uncorrected, over a random embedding; its backbone is not asked."""
        shapes = {"hidden_size": self.hidden_size, "intermediate_size": 2, "num_attention_heads": 1, "head_dim": 2}
        target = {"vocab_size": self.target.vocab_size, "num_target_layers": 1, "target_layer_ids": (0,)}
        head = {"gru_hidden_dim": 2, "emb_dim": self.rank, "pure_draft_prefix_len": min(1, self.gamma - 1)}
        fields: dict[str, Any] = {**shapes, **target, **head, "num_key_value_heads": 1, "mask_token_id": 0}
        fields |= {"draft_vocab_size": self.draft_vocab_size, "block_size": self.gamma}
        module = _random(Domino(DominoConfig(**fields)), generator)
        embedding_VH = torch.randn(self.target.vocab_size, self.hidden_size, generator=generator, dtype=torch.float64)
        return PrefixHead(module, lambda tokens: F.embedding(tokens, embedding_VH))

    def draft(self, context: Tokens, source: RandomSource, min_confidence: float = 0.0) -> Draft:
        if (context, min_confidence) not in self._trees:
            self._trees[context, min_confidence] = DraftTree(
                lambda recorder: self._draw(context, recorder, min_confidence)
            )
        return self._trees[context, min_confidence].draw(source)

    def _draw(self, context: Tokens, source: RandomSource, min_confidence: float) -> Draft:
        columns = self.draft_vocab_size + self.hidden_size
        block = torch.randn(self.gamma, columns, generator=_generator(self.seed, context), dtype=torch.float64)
        base_logits_KVd, hidden_KH = block.split([self.draft_vocab_size, self.hidden_size], dim=1)
        params = self.target.params
        seen = SeenTokens(self.target.vocab_size, params, output=context)
        call = DraftCall(
            None, context[-1], params, seen, source, constraint=ToyConstraint(self.target.constraint, context)
        )
        heads = ChainHeads(self.target.vocab_size, self.head, self.confidence, self.draft_ids_Vd)
        return self._sample(base_logits_KVd, hidden_KH, call, heads, min_confidence)

    def _sample(
        self, base_logits_KVd: Tensor, hidden_KH: Tensor, call: DraftCall, heads: ChainHeads, min_confidence: float
    ) -> Draft:
        return sample_chain(lambda _: base_logits_KVd, hidden_KH[None], [call], heads, min_confidence)[0]


class ToySelector(ToyDrafter):
    """The same block, drawn by a real candidate selector among the `count` likeliest tokens of each position."""

    def __init__(
        self, target: ToyTarget, gamma: int, count: int, draft_ids: Sequence[int] | None = None, seed: int = 1
    ) -> None:
        super().__init__(target, gamma, None, draft_ids, seed)
        self.count = count
        self.selector = CandidateSelector(
            target.vocab_size, self.draft_vocab_size, self.hidden_size, self.rank
        ).double()
        for weight in self.selector.parameters():
            torch.nn.init.normal_(weight, generator=_generator(seed, (count,)))

    def _sample(
        self, base_logits_KVd: Tensor, hidden_KH: Tensor, call: DraftCall, heads: ChainHeads, min_confidence: float
    ) -> Draft:
        rows = CandidateRows(lambda _: base_logits_KVd, hidden_KH[None], self.selector, self.count, self.draft_ids_Vd)
        return sample_rows(rows, self.gamma, [call], heads, min_confidence)[0]


class ToyLattice(ToyDrafter):
    """The same block, drawn by the scores of a real lattice head between the `count` likeliest tokens of positions."""

    def __init__(
        self, target: ToyTarget, gamma: int, count: int, draft_ids: Sequence[int] | None = None, seed: int = 1
    ) -> None:
        super().__init__(target, gamma, None, draft_ids, seed)
        shapes = dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"), 1)
        config = LiLiCorrConfig(
            **shapes,
            hidden_size=self.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            target_layer_ids=(0,),
            num_target_layers=1,
            mask_token_id=0,
            block_size=gamma + 1,
            lilicorr_candidate_topk=count,
            lilicorr_hidden_size=4,
            lilicorr_num_layers=1,
            lilicorr_num_heads=2,
            lilicorr_factor_dim=2,
            lilicorr_logit_scale=2.0,
        )
        self.lattice, generator = LatticeHead(config).double(), _generator(seed, (count,))
        for weight in self.lattice.parameters():
            torch.nn.init.normal_(weight, generator=generator)
        self.embed_VH = torch.randn(target.vocab_size, self.hidden_size, generator=generator, dtype=torch.float64)

    def _sample(
        self, base_logits_KVd: Tensor, hidden_KH: Tensor, call: DraftCall, heads: ChainHeads, min_confidence: float
    ) -> Draft:
        log_probs_Kc, tokens_Kc = base_logits_KVd.log_softmax(-1).topk(self.lattice.config.lilicorr_candidate_topk)
        if self.draft_ids_Vd is not None:
            tokens_Kc = self.draft_ids_Vd[tokens_Kc]
        context_1H = self.embed_VH[call.anchor][None]
        scores = self.lattice(self.embed_VH[tokens_Kc][None], log_probs_Kc[None], hidden_KH[None], context_1H)
        rows = LatticeRows(hidden_KH[None], tokens_Kc[None], *scores)
        return sample_rows(rows, self.gamma, [call], heads, min_confidence)[0]


@dataclass
class ToyRequest:
    """One toy request in a round; its context ends with the anchor."""

    target: ToyTarget
    drafter: ToyDrafter | ToyTreeDrafter
    context: Tokens
    source: RandomSource

    def draft(self, min_confidence: float) -> Draft:
        return self.drafter.draft(self.context, self.source, min_confidence)

    def score(self, tokens: list[int]) -> Callable[[int], Tensor]:
        return lambda k: self.target.row(self.context + tuple(tokens[:k]))


class ForgetfulRequest(ToyRequest):
    """A wrong one: the repetition penalty forgets the draft tokens before row k."""

    def score(self, tokens: list[int]) -> Callable[[int], Tensor]:
        params = self.target.params
        mask_V = SeenTokens(self.target.vocab_size, params, output=self.context).with_tokens()
        plain = ToyTarget(self.target.vocab_size, SamplingParams(temperature=1.0), self.target.seed)
        return lambda k: warp(plain.row(self.context + tuple(tokens[:k])).log(), params, mask_V)


def _random(module: M, generator: torch.Generator) -> M:
    """The module in float64, all of its weights random."""
    for weight in module.double().parameters():
        torch.nn.init.normal_(weight, generator=generator)
    return module


def _generator(seed: int, context: Tokens) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr((seed, context)).encode()))


# ----------------------------------------------------------------------------
# Trees for the enumeration of tests/proof/enumeration.py: every draw of every sibling, then every way to verify them.
#
#     shape (-1, -1, 0)      x_0 ~ p_d   x_1 ~ p_d without x_0   x_2 ~ p_d(. | x_0)   -> Draft -> verify
#
# The drafter's network is a table of random rows, as the target's, with another seed; its warp and its penalty follow
# the path of a node. Shapes are given, or grown best first by what is known before each draw. Shapes: V vocab.
# ----------------------------------------------------------------------------


Kind = Literal["without", "replaced", "chosen"]


@dataclass
class Growth:
    """A tree while it is drawn.

    `kinds` take turns: how the children of node i come about is `kinds[(i + 1) % len(kinds)]`.
    """

    rows: Callable[[Tokens], Tensor]  # p_d after a path of draft tokens
    kinds: Sequence[Kind]
    source: RandomSource
    tree: Draft = field(default_factory=Draft.empty)
    left: dict[int, Tensor] = field(default_factory=dict)  # what the next child of a node is drawn from
    drawn: dict[int, Siblings] = field(default_factory=dict)

    def remaining(self, node: int) -> Tensor:
        if node not in self.left:
            row_V = self.rows(tuple(self.tree.tokens[i] for i in self.tree.path(node)))
            self.left[node] = row_V
            if self.kind(node) != "chosen":
                self.drawn[node] = Siblings(lambda: row_V, self.kind(node) == "replaced")
        return self.left[node]

    def kind(self, node: int) -> Kind:
        return self.kinds[(node + 1) % len(self.kinds)]

    def add(self, node: int) -> bool:
        """One more child of a node; False where nothing is left to draw."""
        left_V = self.remaining(node)
        if not left_V.any():
            return False
        if self.kind(node) == "chosen":  # the likeliest first; the third is a duplicate of the second
            count = len(self.tree.children(node))
            token = int(left_V.argsort(descending=True, stable=True)[min(count, 1)])
        else:
            token = self.source.choose(left_V)
            if self.kind(node) == "without":
                self.left[node] = without(left_V, token)
        self.tree = Draft([*self.tree.tokens, token], [*self.tree.parents, node])
        return True


class ToyTreeDrafter:
    """Draws trees of a given shape (`parents`), or of as many nodes as it has where `grown`."""

    def __init__(
        self,
        target: ToyTarget,
        parents: Sequence[int],
        kinds: Sequence[Kind] = ("without",),
        grown: bool = False,
        seed: int = 1,
    ) -> None:
        self.target, self.parents, self.kinds, self.grown = target, parents, kinds, grown
        self.table = ToyTarget(target.vocab_size, target.params, seed)
        self._trees: dict[Tokens, DraftTree] = {}

    def draft(self, context: Tokens, source: RandomSource, min_confidence: float = 0.0) -> Draft:
        """A whole tree, whatever `min_confidence`."""
        if context not in self._trees:
            self._trees[context] = DraftTree(lambda recorder: self._draw(context, recorder))
        return self._trees[context].draw(source)

    def _draw(self, context: Tokens, source: RandomSource) -> Draft:
        growth = Growth(lambda path: self.table.row(context + path), self.kinds, source)
        survivals = self._grow(growth) if self.grown else self._follow(growth)
        return Draft(growth.tree.tokens, growth.tree.parents, growth.drawn, conditional_confidences(survivals))

    def _follow(self, growth: Growth) -> list[float]:
        place = {-1: -1}  # a node whose parent, or whose own draw, could not be had is left out
        for node, parent in enumerate(self.parents):
            if parent in place and growth.add(place[parent]):
                place[node] = len(growth.tree.tokens) - 1
        return []

    def _grow(self, growth: Growth) -> list[float]:
        """The next node goes where p_d along the path times what siblings left is largest: known before its draw."""
        survivals: list[float] = []
        reached, open_mass = {-1: 0.8}, {-1: 1.0}
        for _ in self.parents:
            parent = max(open_mass, key=lambda node: (reached[node] * open_mass[node], -node))
            survival = min([reached[parent] * open_mass[parent], *survivals[-1:]])
            before_V = growth.remaining(parent)
            if survival <= 0 or not growth.add(parent):
                break
            node, token = len(survivals), growth.tree.tokens[-1]
            survivals.append(survival)
            share = before_V[token].item()
            reached[node], open_mass[node] = survival * share, 1.0
            open_mass[parent] *= 1 - share
        return survivals

"""EAGLE-3: one decoder layer that drafts token by token from fused target features and its own outputs.

    f_i   = W_fc [H^(low)_i; H^(mid)_i; H^(high)_i]            fused feature of a committed token
    u     = [norm(Emb(x_{i+1})); norm(f_i)]                    the pair (f_i, x_{i+1}): attention reads 2 H
    g     = f_i + W_o attn(u),    h_i = g + MLP(norm(g))       residual from the feature, not from the embedding
    p(x_{i+2}) = softmax(W_head norm(h_i))                     embedding and head are the target's, frozen

For an anchor at position a, draft 1 comes from the pair (f_{a-1}, anchor). The feature of x_1 is not known yet, and h
takes its place: draft k + 1 comes from the pair (h, x_k), where h is the layer's output for draft k *before* the final
norm. Training unrolls exactly this ("training-time test"): every step attends to the keys of the true pairs before
its anchor and to those of its own chain, so the drafter learns on the inputs that it will have.

Context pairs need keys and values only: nobody reads their outputs, because committed tokens have true features. So a
training forward is one product over all context slots and gamma small steps over the anchors' rows.

Choices of the official code that are kept: no bias in `fc`, no q/k norms, the fed-back state before the norm. A pair
stands at its token's position, where the official code counts from its feature: rotary attention sees differences only.
An anchor with nothing before it drafts from a feature of zeros. Checkpoints of other makers differ from it in the six
flags that end the config; they are served and trained as they are.

Training: soft cross-entropy with the target's distribution at every draft position, a mean weighted by 0.8^(k-1)
(`DraftRows.loss`, drafters/base.py; `default_objective` below), from every response token where a recipe says
`anchors: all`, as its packaged ones do.

Source: EAGLE-3, arXiv 2503.01840; parameter names are those of the official checkpoints.
Shapes: S context slots, N anchors, X rows, L aux layers, H hidden, Q heads, G kv heads, E head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from outrider.drafters.base import (
    BlockInputs,
    DraftCall,
    Drafter,
    DraftModule,
    DraftRows,
    ModuleDrafter,
    longest_draft,
)
from outrider.drafters.cache import CachedKeys, DraftKV, DraftSession
from outrider.drafters.chain import sample_steps
from outrider.drafters.config import Count, LayerConfig, NotInRecipe, draft_vocabulary
from outrider.drafters.draft import Draft, TreeSize, rerank
from outrider.drafters.layers import (
    EVERYTHING,
    Attention,
    AttentionPattern,
    BlockLayout,
    KeySource,
    SwiGLU,
    block_attention,
)
from outrider.drafters.rope import Rope, RopeScaling, describe_rope, rope_table
from outrider.drafters.target_weights import layer_shapes
from outrider.target.linear import Packable
from outrider.target.model import Target

Eagle = TypeVar("Eagle", bound="Eagle3Config")


def eagle_aux_layers(num_target_layers: int) -> list[int]:
    """The official choice: what layers 2, L / 2 and L - 3 read, i.e. the outputs of those before them."""
    return sorted({1, num_target_layers // 2 - 1, num_target_layers - 4})


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """One layer in the target's shapes, unrolled over `gamma` draft tokens and as many steps of the training-time test.

    `norm_before_residual`: the residual is norm(f), not f. `norm_before_fc`: all aux hidden states are normed together,
    `fc_norm`: each by itself. `norm_output`: h is fed back behind the final norm. `attention_bias`: in all four
    projections. `qk_norm`: queries and keys are normed head by head.
    """

    algorithm: ClassVar[str] = "eagle3"

    gamma: Annotated[Count, Field(description="Draft tokens of a chain, and steps of the unrolled training.")] = 7
    rope_theta: NotInRecipe[float] = 10000.0
    rope_scaling: NotInRecipe[RopeScaling | None] = field(default=None, repr=False)
    rms_norm_eps: NotInRecipe[float] = 1e-6
    max_position_embeddings: NotInRecipe[int] = 8192
    norm_before_residual: NotInRecipe[bool] = False
    norm_before_fc: NotInRecipe[bool] = False
    fc_norm: NotInRecipe[bool] = False
    norm_output: NotInRecipe[bool] = False
    attention_bias: NotInRecipe[bool] = False
    qk_norm: NotInRecipe[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are two norms in one place: set one of them to false.")

    @classmethod
    def default_objective(cls, chosen: Mapping[str, Any]) -> dict[str, float]:
        return {"ce": 0.0, "l1": 0.0, "soft_ce": 1.0, "confidence": 0.0, "decay": round(-1 / math.log(0.8), 2)}

    def describe(self) -> list[tuple[str, str]]:
        return [describe_rope(self), *super().describe()]

    @classmethod
    def from_target(
        cls: type[Eagle],
        target: Target,
        *,
        target_layer_ids: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        **chosen: Any,
    ) -> Eagle:
        """The target's layer shapes and the recipe's choices.

        Args:
            target_layer_ids: None: an early, a middle and a late layer.
            draft_vocab_size: None: the target's.
        """
        return cls(
            **layer_shapes(target),
            draft_vocab_size=draft_vocabulary(target, draft_vocab_size),
            target_layer_ids=target.check_aux_layers(target_layer_ids or eagle_aux_layers(target.num_layers)),
            **chosen,
        )


class Eagle3Layer(Packable):
    """The decoder layer, in the parts that context pairs and drafting rows need."""

    groups = (("self_attn.k_proj", "self_attn.v_proj"),)

    def __init__(self, config: Eagle3Config, pattern: AttentionPattern) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(H, eps=eps)  # of the embedding
        self.hidden_norm = nn.RMSNorm(H, eps=eps)  # of the feature
        self.self_attn = Attention(config, 2 * H, qk_norm=config.qk_norm, bias=config.attention_bias, pattern=pattern)
        self.post_attention_layernorm = nn.RMSNorm(H, eps=eps)
        self.mlp = SwiGLU(config)
        self.norm_before_residual = config.norm_before_residual

    def pair(self, feature_XH: Tensor, embedded_XH: Tensor) -> Tensor:
        """u [X, 2 H]"""
        return torch.cat((self.input_layernorm(embedded_XH), self.hidden_norm(feature_XH)), dim=-1)

    def keys_values(self, feature_XH: Tensor, embedded_XH: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Of context pairs, whose outputs nobody reads: [X, G, E] each."""
        k, v = self.outputs(self.pair(feature_XH, embedded_XH), "self_attn.k_proj", "self_attn.v_proj")
        return self.self_attn.keys_values(k, v, rope)

    def forward(self, feature_XH: Tensor, embedded_XH: Tensor, rope: Rope, source: KeySource) -> Tensor:
        """h [X, H], before the final norm."""
        pair_XP = self.pair(feature_XH, embedded_XH)
        residual_XH = pair_XP[..., embedded_XH.shape[-1] :] if self.norm_before_residual else feature_XH
        g_XH = residual_XH + self.self_attn(pair_XP, rope, source)
        return g_XH + self.mlp(self.post_attention_layernorm(g_XH))


class ChainKeys:
    """The key source of training chains, one row of every anchor at a time: the context and the chain so far.

    The slot right before an anchor is the pair that its chain begins with: it is computed there and not seen here.

    Args:
        context: keys and values of the context slots, [S, G, E] each.
    """

    def __init__(self, context: tuple[Tensor, Tensor], layout: BlockLayout) -> None:
        self.context, self.layout = context, replace(layout, anchors_N=layout.anchors_N - 1)
        self.chain: list[tuple[Tensor, Tensor]] = []

    def attend(self, attention: Attention, q_NQE: Tensor, k_NGE: Tensor, v_NGE: Tensor) -> Tensor:
        self.chain.append((k_NGE, v_NGE))
        own_k, own_v = (torch.stack(rows, dim=1) for rows in zip(*self.chain, strict=True))
        return block_attention(q_NQE[:, None], *self.context, own_k, own_v, self.layout)[:, 0]


class Eagle3(DraftModule):
    """The drafter to train; see Eagle3Drafter for how it serves.

    Weights begin as noise, as in the paper: the layer reads pairs [embedding; feature], which no layer of the target
    does.
    """

    aux_weight: str | None = "fc.weight"
    groups = (("fc",),)
    pattern: ClassVar[AttentionPattern] = EVERYTHING  # what the rows of one draft see of one another
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        H = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * H, H, bias=False)
        self.midlayer = Eagle3Layer(config, self.pattern)
        self.norm = nn.RMSNorm(H, eps=config.rms_norm_eps)
        L, eps = len(config.target_layer_ids), config.rms_norm_eps
        self.input_norm = nn.RMSNorm(L * H, eps=eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(nn.RMSNorm(H, eps=eps) for _ in range(L)) if config.fc_norm else None
        if (
            config.norm_before_fc or config.fc_norm
        ):  # aux hidden states of any size will do, and `fc` does not read them
            self.aux_weight = None

    def features(self, aux_SLD: Tensor) -> Tensor:
        """f [S, H] of committed tokens; float32 also under autocast, as every residual stream here."""
        if self.fc_norm is not None:
            aux_SLD = torch.stack([norm(aux_SLD[:, i].float()) for i, norm in enumerate(self.fc_norm)], dim=1)
        elif self.input_norm is not None:
            aux_SLD = self.input_norm(aux_SLD.flatten(-2).float())[:, None]
        else:
            aux_SLD = aux_SLD / self.aux_scale_L[:, None]
        return self.fc(aux_SLD.flatten(-2)).float()

    def step(self, state_XH: Tensor, embedded_XH: Tensor, rope: Rope, source: KeySource) -> tuple[Tensor, Tensor]:
        """Drafting rows: what the head reads, and what takes the place of the next feature (h, or the same)."""
        state_XH = self.midlayer(state_XH, embedded_XH, rope, source)
        normed_XH = self.norm(state_XH)
        return normed_XH, normed_XH if self.config.norm_output else state_XH

    def training_context(self, inputs: BlockInputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Features [N, H] right before the anchors, and keys and values of the context pairs."""
        feature_SH = self.features(inputs.aux_SLD)
        embedded_SH = inputs.embed(inputs.next_tokens_S)
        rope = self.rope(inputs.layout.positions_S() + 1)  # a pair stands where its token does
        context = self.midlayer.keys_values(feature_SH, embedded_SH, rope)
        return inputs.layout.before_anchors(feature_SH), context

    def rope(self, positions_X: Tensor) -> Rope:
        return rope_table(positions_X, self.config)

    def rows(self, inputs: BlockInputs) -> DraftRows:
        """Keys of the context pairs in one product, then the anchors' chains step by step."""
        state_NH, context = self.training_context(inputs)
        source, hidden = ChainKeys(context, inputs.layout), []
        for k in range(self.config.gamma):
            embedded_NH = inputs.embed(inputs.previous_NK[:, k])
            hidden_NH, state_NH = self.step(
                state_NH, embedded_NH, self.rope(inputs.layout.anchors_N + k), source=source
            )
            hidden.append(hidden_NH)
        return DraftRows(torch.stack(hidden, dim=1))

    @staticmethod
    def drafter() -> type[Drafter]:
        return Eagle3Drafter


# ----------------------------------------------------------------------------
# EAGLE-3 ready to serve: a cache of committed pairs, one small pass per draft token.
#
#     committed x_0 .. x_{c-1} with features f_0 .. f_{c-1}; the anchor is x_c
#     pair i = (f_i, x_{i+1}), at the position of its token     pairs 0 .. c-2 are cached, f_{c-1} waits for its token
#     draft 1       pair c-1 = (f_{c-1}, anchor)                written behind the committed pairs and forgotten
#     draft k + 1   the pair (h of draft k, x_k)                likewise
#
# A committed pair costs keys and values alone. Requests share every matrix product; only attention goes one by one.
#
# Shapes: R requests, M rows of one request, X = R M rows, T new tokens, L aux layers, H hidden.
# ----------------------------------------------------------------------------


def _pairs(session: DraftSession) -> int:
    """Committed pairs in the cache."""
    return max(0, session.length - 1)


class Eagle3Drafter(ModuleDrafter[Eagle3]):
    """Serves one EAGLE-3 drafter for one target."""

    def new_session(self, capacity: int, drafted: int | None = None) -> DraftSession:
        """An empty cache of `capacity` committed tokens and `drafted` rows of one draft (None: those of a chain)."""
        kv = DraftKV(self.config, capacity + (self.gamma if drafted is None else drafted), self.device)
        nothing = torch.zeros(1, self.config.hidden_size, device=self.device)  # precedes the first token
        return DraftSession([kv], [nothing])

    def extend(self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        """Cache the pairs that newly committed tokens complete (aux hidden states: raw, [T, L, H], session after
        session).
        """
        assert aux_TLD is not None
        features_TH = self.module.features(aux_TLD.float())
        states: list[Tensor] = []
        completing: list[Sequence[int]] = []
        left: list[Tensor] = []
        for session, part, new_TH in zip(sessions, tokens, features_TH.split([len(t) for t in tokens]), strict=True):
            waiting = torch.cat((session.waiting[0], new_TH))
            first = 0 if session.length else 1  # the very first token completes no pair
            states.append(waiting[first : len(part)])
            completing.append(part[first:])
            left.append(waiting[-1:].clone())  # not a view that keeps a prefill alive
        counts = [len(part) for part in completing]
        starts = [_pairs(session) for session in sessions]
        rope = self.rope([s + 1 + i for s, n in zip(starts, counts, strict=True) for i in range(n)])
        embedded_TH = self.embed([token for part in completing for token in part])
        keys, values = self.module.midlayer.keys_values(torch.cat(states), embedded_TH, rope)
        for session, start, k, v in zip(sessions, starts, keys.split(counts), values.split(counts), strict=True):
            session.caches[0].write(start, k, v)
        for session, part, waiting in zip(sessions, tokens, left, strict=True):  # nothing can fail any more
            session.length, session.waiting = session.length + len(part), [waiting]

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """A chain of up to gamma tokens per call, while their confidence is at least `min_confidence`.

        Only an estimator could give one, and `outrider calibrate` fits none for this method: `min_confidence` is idle
        as yet.
        """
        sessions: list[DraftSession] = [call.session for call in calls]
        state_RH = torch.cat([session.waiting[0] for session in sessions])

        def step(k: int, previous: list[int]) -> Tensor:
            nonlocal state_RH
            hidden_RH, state_RH = self.advance(sessions, state_RH, previous, depth=k, written=k)
            return hidden_RH

        return sample_steps(
            self.head,
            step,
            longest_draft(calls, self.gamma),
            calls=calls,
            heads=self.heads,
            min_confidence=min_confidence,
        )

    def advance(
        self,
        sessions: Sequence[DraftSession],
        state_XH: Tensor,
        tokens: Sequence[int],
        *,
        depth: int = 0,
        written: int = 0,
        drafted_RMW: Tensor | None = None,
        spacing: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Drafting rows through the layer: what the head reads and what the next rows take, [X, H] each.

        Args:
            state_XH, tokens: the pairs, M per session, session after session.
            depth: drafts between the anchor and these tokens (0: they are anchors).
            written: rows of this draft that are in the cache already, behind the committed pairs.
            drafted_RMW: which rows of this draft a row sees, itself included (W = written + M); None: by the pattern.
            spacing: positions from one row of a request to the next: 0 for alternatives, 1 along a chain.
        """
        M = len(tokens) // len(sessions)
        visible = None
        if drafted_RMW is not None:
            rows = zip(sessions, drafted_RMW, strict=True)
            visible = [F.pad(drafted_MW, (_pairs(session), 0), value=True) for session, drafted_MW in rows]
        starts = [_pairs(session) + written for session in sessions]
        source = CachedKeys(sessions, starts, [M] * len(sessions), visible=visible)
        rope = self.rope([session.length + depth + m * spacing for session in sessions for m in range(M)])
        return self.module.step(state_XH, self.embed(tokens), rope, source=source)

    def with_trees(self, size: TreeSize) -> Drafter:
        """The same drafter with dynamic trees; the paper's depth, if trained so far, and width where `size` has none.

        Raises:
            ValueError: more nodes than such a tree ever has.
        """
        shape = TreeShape(
            depth=min(TreeShape.depth, self.gamma) if size.depth is None else size.depth,
            top_k=TreeShape.top_k if size.top_k is None else size.top_k,
            nodes=size.nodes,
        )
        most = shape.top_k + (shape.depth - 1) * shape.top_k**2
        if shape.nodes > most:
            raise ValueError(
                f"a tree of {shape.nodes} nodes: with depth {shape.depth} and top_k {shape.top_k} there are {most} at "
                "most."
            )
        return DynamicTreeDrafter(self, shape)


# ----------------------------------------------------------------------------
# EAGLE-2's dynamic tree: grow where the drafter is sure, then keep the nodes that are most likely to be reached.
#
#     expand   depth 1: the top k tokens after the anchor.   depth d + 1: of all nodes of depth d the k most likely ones
#              get the drafter's top k children each            (k, then k^2, k^2, ... candidates; one pass per depth)
#     rerank   of all candidates, the N with the largest  s(node) = product of p along its path
#
# A path's probability stands for its chance of acceptance, which is well founded where the drafter is calibrated. All
# candidates are top-k tokens: nothing is drawn, so choosing among them by probability is lossless at any temperature
# (drafters/draft.py says why that would not hold for drawn nodes). Scores are those of temperature 1 whatever the
# request samples with. Rows of one depth run together; each sees the committed pairs, its ancestors and itself.
#
# Depth is the paper's 6, but no more than the gamma that the drafter was trained for. A deeper tree must be asked for:
# in its last steps the drafter reads states that training never showed it. That costs acceptance, not exactness.
#
# Source: EAGLE-2, arXiv 2406.16858. Shapes: R requests, M rows of one depth, k children, H hidden, Vd draft vocab, W
# rows of one draft so far.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeShape:
    """The paper's tree for 7B targets by default; `nodes` counts draft tokens, the anchor not among them."""

    depth: int = 6
    top_k: int = 10
    nodes: int = 60

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"tree {name} {getattr(self, name)} must be at least 1.")

    @property
    def rows(self) -> int:
        """Most rows that growing a tree takes: the anchor's and those that get children."""
        return 1 + (self.depth - 1) * self.top_k


@dataclass
class _Pool:
    """All candidates of one request, parents before children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # log s

    def draft(self, nodes: int) -> Draft:
        # exp of each number by itself: a vectorised one may order neighbours differently.
        survivals = [math.exp(score) for score in self.scores]
        return rerank(Draft(self.tokens, self.parents), survivals, nodes)


class DynamicTreeDrafter(Drafter):
    """Serves a trained EAGLE-3 drafter with trees instead of chains."""

    def __init__(self, drafter: Eagle3Drafter, shape: TreeShape) -> None:
        self.drafter, self.config, self.shape = drafter, drafter.config, shape
        self.aux_layers, self.gamma = drafter.aux_layers, shape.depth
        self.nodes: int = shape.nodes

    def new_session(self, capacity: int) -> DraftSession:
        return self.drafter.new_session(capacity, self.shape.rows)

    def extend(self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        self.drafter.extend(sessions, tokens, aux_TLD)

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """A tree per call, no deeper and no larger than it has use for; `min_confidence` is left to the policy."""
        depths = [self.gamma if call.limit is None else min(call.limit, self.gamma) for call in calls]
        sizes = [self.nodes if call.nodes is None else min(call.nodes, self.nodes) for call in calls]
        growth = _Growth(self.drafter, [call.session for call in calls], [call.anchor for call in calls])
        for depth in range(max(depths)):
            if depth:
                growth.choose(self.shape.top_k)
            growth.expand(depth, self.shape.top_k, [depth < deepest for deepest in depths])
        return [pool.draft(size) for pool, size in zip(growth.pools, sizes, strict=True)]


class _Growth:
    """The trees of all requests, growing depth by depth.

    `states_RMH`, `tokens_RM`: the pairs of the rows that are next to get children; `nodes_RM` their nodes (-1: anchor),
    `scores_RM` their log s, `seen_RMW` the rows of this draft that each may see.
    """

    def __init__(self, drafter: Eagle3Drafter, sessions: Sequence[DraftSession], anchors: Sequence[int]) -> None:
        self.drafter, self.sessions = drafter, sessions
        self.states_RMH = torch.stack([session.waiting[0] for session in sessions])
        device = self.states_RMH.device
        self.tokens_RM = torch.tensor(anchors, device=device)[:, None]
        self.nodes_RM = torch.full_like(self.tokens_RM, -1)
        self.scores_RM = torch.zeros(self.tokens_RM.shape, device=device)
        self.seen_RMW = torch.ones(len(anchors), 1, 1, dtype=torch.bool, device=device)
        self.candidates = 0  # per request, of all depths
        self.pools = [_Pool() for _ in sessions]

    def expand(self, depth: int, top_k: int, wanted: Sequence[bool]) -> None:
        """Give every row its `top_k` children; they are put down for the requests that want this depth."""
        R, M, H = self.states_RMH.shape
        written = self.seen_RMW.shape[2] - M
        hidden_XH, next_XH = self.drafter.advance(
            self.sessions,
            self.states_RMH.reshape(R * M, H),
            self.tokens_RM.flatten().tolist(),
            depth=depth,
            written=written,
            drafted_RMW=self.seen_RMW if depth else None,
        )
        log_probs_XVd = self.drafter.head(hidden_XH).log_softmax(-1)
        top_Xk, ids_Xk = log_probs_XVd.topk(min(top_k, log_probs_XVd.shape[-1]), dim=-1)
        ids_Vd = self.drafter.heads.draft_ids_Vd
        self.outputs_RMH = next_XH.view(R, M, H)
        # Rounding must not let a child outlive its parent.
        self.child_scores_RC = (self.scores_RM[..., None] + top_Xk.clamp(max=0.0).view(R, M, -1)).flatten(1)
        self.child_tokens_RC = (ids_Xk if ids_Vd is None else ids_Vd[ids_Xk]).reshape(R, -1)
        parents_RC = self.nodes_RM.repeat_interleave(top_Xk.shape[-1], dim=1)
        lists = (self.child_tokens_RC.tolist(), parents_RC.tolist(), self.child_scores_RC.tolist())
        for pool, wants, tokens, parents, scores in zip(self.pools, wanted, *lists, strict=True):
            if wants:
                pool.tokens += tokens
                pool.parents += parents
                pool.scores += scores
        self.candidates += parents_RC.shape[1]

    def choose(self, top_k: int) -> None:
        """Of the children just made, the `top_k` most likely are the next rows."""
        R, M, H = self.outputs_RMH.shape
        children = self.child_scores_RC.shape[1]
        self.scores_RM, chosen_RM = self.child_scores_RC.topk(min(top_k, children), dim=1)
        row_RM = chosen_RM // (children // M)  # of the parent
        self.tokens_RM = self.child_tokens_RC.gather(1, chosen_RM)
        self.nodes_RM = self.candidates - children + chosen_RM
        self.states_RMH = self.outputs_RMH.gather(1, row_RM[..., None].expand(-1, -1, H))
        inherited = self.seen_RMW.gather(1, row_RM[..., None].expand(-1, -1, self.seen_RMW.shape[2]))
        itself = torch.eye(row_RM.shape[1], dtype=torch.bool, device=inherited.device).expand(R, -1, -1)
        self.seen_RMW = torch.cat((inherited, itself), dim=2)

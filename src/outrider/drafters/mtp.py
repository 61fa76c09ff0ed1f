"""MTP: sequential modules, each of which predicts one token further, after DeepSeek-V3.

    u_i^k = W_k [norm(Emb(x_{i+k})); norm(h_i^{k-1})]       h_i^0: the target's hidden state, after its final norm
    h_i^k = norm(Block_k(u_1^k .. u_i^k))                   one causal transformer layer over positions i
    p(x_{i+k+1}) = softmax(W_head h_i^k)                    embedding and head are the target's, frozen

An anchor at position a is drafted for in row i = a - 1: draft k comes from h_{a-1}^k, which has read x_{a-1+k}. There
are D modules. Draft k <= D is module k's, exactly as above: its keys are rows 0 .. a-1 of its own depth. Draft k > D
reuses module D one row further, on its own output: row i + 1 of depth D asks for h_{i+1}^{D-1}, which has read as much
as h_i^D has, and is replaced by it. So

    D = 1        MTP-1; with gamma > 1 what engines do with DeepSeek-V3's one module: context keys from pairs of
                 (target state, next token), then the module's own states
    D = gamma    the paper's modules: a full causal pass over the text at each depth

and training runs the very same rows, so what is trained is what is served, at every depth.

Choices. h^0 is what the target's head reads, which is also what engines hand over. The embedding comes first in the
concatenation, as in DeepSeek's checkpoints (the paper writes the state first). States go from depth to depth behind the
norm, as in SGLang: h^k is then the same kind of quantity for every k. vLLM hands them on before the norm, and takes the
embedding at position 0 for zero; with gamma = 1 only the latter remains. Weights trained as in the paper with one depth
know draft 1 only: any engine that reuses them asks for more than they learned, and this training is what unrolls it.

Training: ce CE + l1 ||p_d - p_t||_1 at every draft position, a weighted mean (`DraftRows.loss`, drafters/base.py).

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2. Parameter names of a module are those of its checkpoints, but
for `norm`: `shared_head.norm` there.
Shapes: S context slots, N anchors, K = gamma draft positions, H hidden, Q heads, G kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

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
    check_fits,
    last_hidden_layer,
    longest_draft,
)
from outrider.drafters.cache import CachedKeys, DraftKV, DraftSession
from outrider.drafters.chain import sample_steps
from outrider.drafters.config import Count, LayerConfig, NotInRecipe, draft_vocabulary
from outrider.drafters.draft import Draft
from outrider.drafters.eagle3 import ChainKeys
from outrider.drafters.layers import Attention, AttentionPattern, KeySource, SwiGLU
from outrider.drafters.rope import Rope, RopeScaling, describe_rope, rope_table
from outrider.drafters.target_weights import copy_target_layers, layer_shapes
from outrider.target.linear import Packable
from outrider.target.model import DecodingTarget, Target
from outrider.utils.measure import on_device


@dataclass(frozen=True, kw_only=True)
class MTPConfig(LayerConfig):
    """`num_modules` modules in the target's layer shapes draft `gamma` tokens; `qk_norm` where the target has it."""

    algorithm: ClassVar[str] = "mtp"

    target_layer_ids: NotInRecipe[tuple[int, ...]]
    num_modules: Annotated[
        Count, Field(description="Modules with weights of their own; the last one drafts what is left of gamma.")
    ] = 1
    gamma: Annotated[Count, Field(description="Draft tokens of a round.")] = 1
    qk_norm: NotInRecipe[bool] = False
    rope_theta: NotInRecipe[float] = 10000.0
    rope_scaling: NotInRecipe[RopeScaling | None] = field(default=None, repr=False)
    rms_norm_eps: NotInRecipe[float] = 1e-6
    max_position_embeddings: NotInRecipe[int] = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_modules > self.gamma:
            raise ValueError(
                f"num_modules {self.num_modules} must be between 1 and gamma {self.gamma}: module k drafts token k."
            )
        if tuple(self.target_layer_ids) != (self.num_target_layers - 1,):
            raise ValueError(
                f"target_layer_ids {list(self.target_layer_ids)} must be [{self.num_target_layers - 1}]: MTP reads the "
                "target's last hidden state."
            )

    def describe(self) -> list[tuple[str, str]]:
        return [("modules", str(self.num_modules)), describe_rope(self), *super().describe()]

    @classmethod
    def from_target(cls, target: Target, *, draft_vocab_size: int | None = None, **chosen: Any) -> MTPConfig:
        """The target's layer shapes and the recipe's choices."""
        return cls(
            **layer_shapes(target),
            draft_vocab_size=draft_vocabulary(target, draft_vocab_size),
            target_layer_ids=(last_hidden_layer(target),),
            qk_norm=hasattr(target.decoder.layers[-1].self_attn, "q_norm"),
            **chosen,
        )


class MTPModule(Packable):
    """One depth: the projection of [embedding; state], one transformer layer, and the norm the head reads behind."""

    groups = (("eh_proj",), ("self_attn.k_proj", "self_attn.v_proj"))

    def __init__(self, config: MTPConfig, depth: int) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = nn.RMSNorm(H, eps=eps)
        self.hnorm = nn.RMSNorm(H, eps=eps)
        self.eh_proj = nn.Linear(2 * H, H, bias=False)
        self.input_layernorm = nn.RMSNorm(H, eps=eps)
        self.self_attn = Attention(
            config, H, qk_norm=config.qk_norm, layer=depth, pattern=AttentionPattern(causal=True)
        )
        self.post_attention_layernorm = nn.RMSNorm(H, eps=eps)
        self.mlp = SwiGLU(config)
        self.norm = nn.RMSNorm(H, eps=eps)

    def combine(self, state_XH: Tensor, embedded_XH: Tensor) -> Tensor:
        """u: what the layer reads; float32 also under autocast, as every residual stream here."""
        return self.eh_proj(torch.cat((self.enorm(embedded_XH), self.hnorm(state_XH)), dim=-1)).float()

    def forward(self, state_XH: Tensor, embedded_XH: Tensor, rope: Rope, source: KeySource) -> Tensor:
        """h, behind its norm."""
        u_XH = self.combine(state_XH, embedded_XH)
        x_XH = u_XH + self.self_attn(self.input_layernorm(u_XH), rope, source)
        return self.norm(x_XH + self.mlp(self.post_attention_layernorm(x_XH)))

    def keys_values(self, state_XH: Tensor, embedded_XH: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Of rows whose h nobody reads, [X, G, E] each."""
        u_XH = self.input_layernorm(self.combine(state_XH, embedded_XH))
        k, v = self.outputs(u_XH, "self_attn.k_proj", "self_attn.v_proj")
        return self.self_attn.keys_values(k, v, rope)


class CausalKeys:
    """The key source of whole sequences, concatenated: each row sees those before it in its own."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def attend(self, attention: Attention, q_SQE: Tensor, k_SGE: Tensor, v_SGE: Tensor) -> Tensor:
        """[S, Q, E]; the keys and values are kept in `seen`."""
        self.seen = k_SGE, v_SGE
        sequences = zip(*(x.transpose(0, 1).split(self.lengths, dim=1) for x in (q_SQE, k_SGE, v_SGE)), strict=True)
        attended = [
            F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
            for q, k, v in sequences
        ]
        return torch.cat(attended, dim=1).transpose(0, 1)


class MTP(DraftModule):
    """The modules of all depths. States are normed on entry, so the scale of the aux layer does not matter.

    Weights begin as the target's: the layer of every module is the target's last one, eh_proj the sum of both normed
    inputs, with gains that give this sum the size of the residual stream in front of that layer. The last norm begins
    as ones: the target's own makes untrained states overconfident.
    """

    config: MTPConfig

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config)
        self.depths = nn.ModuleList(MTPModule(config, depth) for depth in range(config.num_modules))

    def module(self, depth: int) -> MTPModule:
        """What drafts token `depth` (from 0)."""
        module = self.depths[min(depth, len(self.depths) - 1)]
        assert isinstance(module, MTPModule)
        return module

    def rows(self, inputs: BlockInputs) -> DraftRows:
        """Context keys once per module; the anchors' own rows depth by depth.

        An anchor's row is computed apart from the context, of which it sees the slots before its own. That serves an
        anchor at position 0 too: nothing precedes it, and its h^0 is zero.
        """
        config, layout = self.config, inputs.layout
        modules = len(self.depths)
        rope_S = rope_table(layout.positions_S() + 1, config)  # a pair stands where its token does
        state_SH = inputs.aux_SLD[:, 0]
        state_NH = layout.before_anchors(state_SH)
        hidden = []
        for k in range(config.gamma):
            module = self.module(k)
            if k < modules:
                embedded_SH = inputs.embed(_tokens_ahead(inputs, k))
                if k + 1 < modules:
                    causal = CausalKeys(layout.lengths)
                    state_SH = module(state_SH, embedded_SH, rope_S, source=causal)
                    context = causal.seen
                else:
                    context = module.keys_values(state_SH, embedded_SH, rope_S)
                source = ChainKeys(context, layout)
            rope_N = rope_table(layout.anchors_N + max(0, k + 1 - modules), config)
            state_NH = module(state_NH, inputs.embed(inputs.previous_NK[:, k]), rope_N, source=source)
            hidden.append(state_NH)
        return DraftRows(torch.stack(hidden, dim=1))

    def check_target(self, target: DecodingTarget) -> None:
        check_fits(self.config, target, final=True)

    @staticmethod
    def drafter() -> type[Drafter]:
        return MTPDrafter

    @torch.no_grad()
    def initialize_from(self, target: Target, documents: Sequence[Sequence[int]]) -> None:
        """A layer that reads a stream of the size it was trained on adds to it in proportion."""
        gain = (_residual_mean_square(target, documents) / 2) ** 0.5
        for module in self.depths:
            assert isinstance(module, MTPModule)
            copy_target_layers([module], target, documents)
            module.enorm.weight.fill_(gain)
            module.hnorm.weight.fill_(gain)
            eye_HH = torch.eye(self.config.hidden_size)
            module.eh_proj.weight.copy_(torch.cat((eye_HH, eye_HH), dim=1))


def _tokens_ahead(inputs: BlockInputs, more: int) -> Tensor:
    """[S] token i + 1 + more of its sequence, for slot i; behind the last anchor they are those it drafts after."""
    if not more:
        return inputs.next_tokens_S
    layout, S = inputs.layout, len(inputs.next_tokens_S)
    counts = torch.zeros(len(layout.lengths), dtype=torch.long, device=layout.sequence_N.device)
    counts = counts.index_add(0, layout.sequence_N, torch.ones_like(layout.sequence_N))
    behind_Bm = inputs.previous_NK[counts.cumsum(0) - 1, 1 : 1 + more]
    rows: list[int] = []  # of next_tokens_S, behind which those of `behind_Bm` stand
    for sequence, length in enumerate(layout.lengths):
        end, first = len(rows) + length, S + sequence * more
        rows += [*range(len(rows) + more, end), *range(first + max(0, more - length), first + more)]
    return torch.cat((inputs.next_tokens_S, behind_Bm.flatten()))[on_device(rows, layout.sequence_N.device, torch.long)]


# ----------------------------------------------------------------------------
# MTP ready to serve: packed weights, one key cache per depth, and a chain of steps after the anchor.
#
#     committed tokens x_0 .. x_{c-1} and their states h_0^0 .. h_{c-1}^0 are known; the anchor is x_c
#     rows of depth k whose token is committed:  0 .. c-1-k      cached; their states wait for depth k + 1
#     rows of depth k that a draft completes:    c-k .. c-1      k of them: the newest row's token is draft k - 1
#     draft k > D:                               row c-1+k-D of depth D, on its own last output
#
# The rows a draft completes are written behind those that are final, and forgotten: a session's lengths follow from the
# number of committed tokens alone. Requests share every matrix product; only attention goes one by one.
#
# See drafters/mtp.py for the method. Shapes: T rows of all requests, m rows of one, H hidden, Q heads, G kv heads,
# E head dim.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of one request at one depth: what they read, their first cache slot and first position."""

    state_mH: Tensor
    tokens: Sequence[int]
    start: int
    position: int


class MTPDrafter(ModuleDrafter[MTP]):
    """Serves MTP for one target."""

    def new_session(self, capacity: int) -> DraftSession:
        """Empty caches for one request of at most `capacity` committed tokens."""
        depths, slots = range(self.config.num_modules), capacity + self.gamma
        caches = [DraftKV(self.config, slots, self.device) for _ in depths]
        return DraftSession(caches, [torch.empty(0, self.config.hidden_size, device=self.device) for _ in depths])

    def extend(self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        """Take newly committed tokens: each depth caches the rows that they complete (aux hidden states: [T, 1, H])."""
        assert aux_TLD is not None
        states = list(aux_TLD[:, 0].float().split([len(part) for part in tokens]))
        waiting: list[list[Tensor]] = [[] for _ in sessions]
        for depth in range(self.config.num_modules):
            rows = []
            for left, one in zip(waiting, zip(sessions, tokens, states, strict=True), strict=True):
                completed, rest_mH = self._completed(depth, *one)
                rows.append(completed)
                left.append(rest_mH)
            last = depth + 1 == self.config.num_modules  # of its rows only the keys are ever read
            states = self._run(depth, sessions, rows, keys_only=last)
        for session, part, left in zip(sessions, tokens, waiting, strict=True):  # nothing can fail any more
            session.length, session.waiting = session.length + len(part), left

    def _completed(
        self, depth: int, session: DraftSession, tokens: Sequence[int], state_mH: Tensor
    ) -> tuple[_Rows, Tensor]:
        """The rows of a depth whose token is among `tokens`, and the states beyond them, which wait."""
        start = max(0, session.length - depth - 1)
        rows = max(0, session.length + len(tokens) - depth - 1 - start)
        states = torch.cat((session.waiting[depth], state_mH))
        return _Rows(states[:rows], tokens[len(tokens) - rows :], start, position=start + 1), states[rows:].clone()

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """A chain of up to gamma tokens per call, while their confidence is at least `min_confidence`.

        Only an estimator could give one, and `outrider calibrate` fits none for this method: `min_confidence` is idle
        as yet.
        """
        sessions: list[DraftSession] = [call.session for call in calls]
        chains: list[list[int]] = [[] for _ in calls]
        states = [torch.zeros(0, self.config.hidden_size, device=self.device)] * len(calls)

        def step(k: int, previous: list[int]) -> Tensor:
            nonlocal states
            for chain, token in zip(chains, previous, strict=True):
                chain.append(token)
            rows = [self._drafted(k, *one) for one in zip(sessions, chains, states, strict=True)]
            states = self._run(min(k, self.config.num_modules - 1), sessions, rows)
            return torch.stack([state_mH[-1] for state_mH in states])

        return sample_steps(
            self.head,
            step,
            longest_draft(calls, self.gamma),
            calls=calls,
            heads=self.heads,
            min_confidence=min_confidence,
        )

    def _drafted(self, k: int, session: DraftSession, chain: Sequence[int], state_mH: Tensor) -> _Rows:
        """The rows whose tokens are the anchor and the drafts so far (`chain`), given what step k - 1 made."""
        further = max(0, k + 1 - self.config.num_modules)  # rows behind the newest committed state
        if not further:
            state_mH = torch.cat((session.waiting[k], state_mH))[-k - 1 :]
        rows = state_mH[-1:] if further else state_mH
        if not len(rows):  # nothing is committed before the anchor: the state before the text is zero
            rows = torch.zeros(1, self.config.hidden_size, device=self.device)
        end = max(1, session.length) + further
        return _Rows(
            rows, chain[len(chain) - len(rows) :], end - len(rows), position=session.length + further + 1 - len(rows)
        )

    def _run(
        self, depth: int, sessions: Sequence[DraftSession], rows: Sequence[_Rows], keys_only: bool = False
    ) -> list[Tensor]:
        """Rows of one depth through its module, their keys into the caches: h [m, H] per request."""
        module, counts = self.module.module(depth), [len(part.tokens) for part in rows]
        rope = self.rope([p.position + i for p, n in zip(rows, counts, strict=True) for i in range(n)])
        state_TH = torch.cat([part.state_mH for part in rows])
        embedded_TH = self.embed([token for part in rows for token in part.tokens])
        if keys_only:
            keys, values = module.keys_values(state_TH, embedded_TH, rope)
            for session, part, k, v in zip(sessions, rows, keys.split(counts), values.split(counts), strict=True):
                session.caches[depth].write(part.start, k, v)
            return []
        source = CachedKeys(sessions, [part.start for part in rows], counts)
        return list(module(state_TH, embedded_TH, rope, source=source).split(counts))


def _residual_mean_square(target: Target, documents: Sequence[Sequence[int]]) -> float:
    """Of what the last layer reads; position 0 is left out: its activations are outliers."""
    before = max(-1, target.num_layers - 2)
    aux_of, _ = target.prefill_packed(documents, (before,))
    return torch.cat([aux_TLD[1:].float() for aux_TLD in aux_of]).square().mean().item()

"""DFlash: block-diffusion drafting with context-KV injection.

    H_ctx = RMSNorm(W_c [H^(l1); ...; H^(lm)])          features of committed tokens, strictly before the anchor
    K, V  = [W^K H_ctx ; W^K H_block], [W^V H_ctx ; W^V H_block]      in every draft layer, bidirectional in the block
    block = [anchor, mask, ..., mask]  ->  one parallel pass  ->  one hidden state per draft position -> chain or tree

Embedding and LM head are the target's, frozen, and live outside this module.
Layouts: with `sample_from_anchor` row k predicts the token *after* its position, so gamma rows give gamma drafts;
without it rows 1..gamma (the masks) predict the token *at* theirs, and row 0 only conditions.

Training is by cross-entropy alone, position k of the block weighing exp(-(k - 1) / decay) (`loss_decay`).

Source: DFlash, arXiv 2602.06036; the two layouts as in DeepSpec checkpoints.
Shapes: N blocks, K rows a block, S context slots, L aux layers, T target hidden, H draft hidden, E head dim.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from outrider.drafters.base import (
    UNCALIBRATED,
    BlockInputs,
    DraftCalibration,
    DraftCall,
    Drafter,
    DrafterWeights,
    DraftModule,
    DraftRows,
    ModuleDrafter,
    capped,
    longest_draft,
    serving_dtype,
)
from outrider.drafters.cache import DraftPool, DraftSession, RequestCaches
from outrider.drafters.chain import sample_chain
from outrider.drafters.config import (
    Count,
    LayerConfig,
    MaskToken,
    NotInRecipe,
    check_mask_token,
    draft_vocabulary,
    mask_token_id,
)
from outrider.drafters.draft import Draft, TreeSize
from outrider.drafters.graphs import BlockGraphs
from outrider.drafters.layers import Attention, AttentionPattern, BlockLayout, KeySource, SwiGLU, block_attention
from outrider.drafters.rope import Rope, RopeScaling, describe_rope, rope_table
from outrider.drafters.target_weights import copy_target_layers, layer_shapes
from outrider.drafters.trees import BlockTreeDrafter
from outrider.target.graphs import FEWEST_PAGES, power_of_two
from outrider.target.kernels import LayerKernels, Norms
from outrider.target.linear import Packable
from outrider.target.model import Target, full_tensor
from outrider.target.paged_attention import Division, Ints, available
from outrider.utils.measure import on_device

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as transformers names them
LayerType = Literal["full_attention", "sliding_attention"]
Block = TypeVar("Block", bound="DFlashConfig")
Module = TypeVar("Module", bound="DFlash")


def default_aux_layers(num_target_layers: int, count: int) -> list[int]:
    """z-lab's choice: one aux layer in the middle, or `count` evenly spaced over [1, layers - 3], rounded."""
    if count == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def loss_decay(block_size: int) -> float:
    """The decay of the loss in positions: 4, 5 and 7 for blocks of 8, 10 and 16 rows, the anchor included.

    Linear between these three, which are DFlash's, and beyond them with the slope of the nearer two (ours).
    """
    return 5 + (block_size - 10) / (2 if block_size < 10 else 3)


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayerConfig):
    """A DFlash drafter. `block_size` counts the rows of a block, the anchor included.

    `layer_types`, where layers differ, says of each whether it has the window ("sliding_attention") or sees all
    ("full_attention"); () is one kind throughout. `is_causal` is about the rows of a block, and None, as z-lab's model
    has it, makes sliding layers causal and full ones not.

    Draft logits are c tanh(m u / c), u being those of the head, m `output_multiplier` and c `final_logit_softcapping`
    (None: m u), as z-lab's drafters may have them.
    """

    algorithm: ClassVar[str] = "dflash"
    layouts: ClassVar[tuple[bool, ...]] = (False,)  # values of sample_from_anchor that the method's checkpoints have
    reads_last: ClassVar[bool] = False  # whether its aux layers may include the last, after the final norm

    num_hidden_layers: Annotated[Count, Field(description="Draft layers.")] = 2
    mask_token_id: NotInRecipe[int]
    block_size: Annotated[Count, Field(description="Rows of a block, the anchor included.")] = 7
    sample_from_anchor: Annotated[
        bool, Field(description="Whether the anchor's row drafts, too: block_size drafts instead of one less.")
    ] = False
    rope_theta: NotInRecipe[float] = 10000.0
    rope_scaling: NotInRecipe[RopeScaling | None] = field(default=None, repr=False)
    rms_norm_eps: NotInRecipe[float] = 1e-6
    sliding_window: Annotated[Count | None, Field(description="Context tokens that attention sees; null: all.")] = None
    max_position_embeddings: NotInRecipe[int] = 8192
    # Not in the repr, by which profiles know what they are of: these change no shape.
    layer_types: Annotated[tuple[LayerType, ...], Field(description="Which layers have the window; empty: all.")] = (
        field(default=(), repr=False)
    )
    is_causal: Annotated[
        bool | None,
        Field(description="Whether rows of a block see earlier rows only; null: in windowed layers."),
    ] = field(default=False, repr=False)
    output_multiplier: NotInRecipe[float] = field(default=1.0, repr=False)
    final_logit_softcapping: NotInRecipe[float | None] = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma < 1:
            raise ValueError(f"block_size {self.block_size} leaves no draft position; use at least 2.")
        check_mask_token(self.mask_token_id, self.vocab_size)
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            # z-lab's model applies the window inside the block too, where our rows all see each other.
            raise ValueError(
                f"sliding_window {self.sliding_window} must cover the block of {self.block_size}; use null for none."
            )
        for name in ("output_multiplier", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} {value} must be a finite number above 0; leave it out for plain logits.")
        kinds = set(self.layer_types)
        if self.layer_types and (len(self.layer_types) != self.num_hidden_layers or kinds != {FULL, SLIDING}):
            raise ValueError(
                f"layer_types {list(self.layer_types)}: one of {FULL} and {SLIDING} for each of the "
                f"{self.num_hidden_layers} layers, or nothing where all are alike."
            )
        if self.layer_types and self.sliding_window is None:
            raise ValueError(f"sliding_window null leaves the layers of kind {SLIDING} without a window.")
        if self.is_causal is None and not self.layer_types:
            raise ValueError("is_causal null is for layers of two kinds (layer_types): say true or false.")

    @classmethod
    def default_objective(cls, chosen: Mapping[str, Any]) -> dict[str, float]:
        return {"ce": 1.0, "l1": 0.0, "confidence": 0.0, "decay": loss_decay(chosen.get("block_size", cls.block_size))}

    @classmethod
    def from_target(
        cls: type[Block],
        target: Target,
        *,
        target_layer_ids: Sequence[int] | None = None,
        num_aux_layers: Annotated[
            Count, Field(description="Aux layers, evenly spaced, where target_layer_ids is left out.")
        ] = 4,
        draft_vocab_size: int | None = None,
        mask_token: MaskToken = None,
        **chosen: Any,
    ) -> Block:
        """The target's layer shapes and the recipe's choices.

        Args:
            target_layer_ids: None: `num_aux_layers` evenly spaced.
            draft_vocab_size: None: the target's.
            mask_token: None: a special token that no chat template uses.
        """
        if target_layer_ids is None and num_aux_layers > max(1, target.num_layers - 3):
            raise ValueError(
                f"drafter.num_aux_layers is {num_aux_layers}, and a target of {target.num_layers} layers has "
                f"{max(1, target.num_layers - 3)} from its second to its third last: ask for fewer, or name them in "
                "drafter.target_layer_ids."
            )
        aux_layers = target_layer_ids or default_aux_layers(target.num_layers, num_aux_layers)
        config = cls(
            draft_vocab_size=draft_vocabulary(target, draft_vocab_size),
            target_layer_ids=target.check_aux_layers(aux_layers, cls.reads_last),
            mask_token_id=mask_token_id(target, mask_token),
            **{**layer_shapes(target), **chosen},
        )
        if config.sample_from_anchor not in config.layouts:
            raise ValueError(
                "drafter.sample_from_anchor=true has no DFlash checkpoint dialect: leave it null, or use "
                "drafter.algorithm=dspark with drafter.markov_rank=0 and drafter.enable_confidence_head=false."
            )
        return config

    def comparable_fields(self, chosen: Mapping[str, Any], target: Target) -> dict[str, tuple[object, object]]:
        pairs = super().comparable_fields(chosen, target)
        if "num_aux_layers" in pairs:
            pairs["num_aux_layers"] = (chosen["num_aux_layers"], len(self.target_layer_ids))
        if "mask_token" in pairs:
            pairs["mask_token"] = (mask_token_id(target, chosen["mask_token"]), self.mask_token_id)
        return pairs

    def describe(self) -> list[tuple[str, str]]:
        rows = [("draft layers", str(self.num_hidden_layers)), describe_rope(self)]
        if self.sliding_window is not None:
            count = sum(pattern.window is not None for pattern in self.attention_patterns)
            windowed = "all" if count == self.num_hidden_layers else f"{count} of {self.num_hidden_layers}"
            rows.append(("sliding window", f"{self.sliding_window}, in {windowed} layers"))
        if self.is_causal is not False:
            rows.append(("rows see those before them", "in all layers" if self.is_causal else "in sliding layers"))
        if not self.plain_logits:
            cap = self.final_logit_softcapping
            scaled = f"times {self.output_multiplier:g}"
            rows.append(("logits", scaled if cap is None else f"{scaled}, capped at {cap:g}"))
        layout = "anchor drafts too" if self.sample_from_anchor else "anchor, then masks that draft"
        rows.append(("block", f"{self.block_size} rows: {layout}; mask token {self.mask_token_id}"))
        return [*rows, *super().describe()]

    @property
    def attention_patterns(self) -> tuple[AttentionPattern, ...]:
        """What block rows see, layer by layer."""
        kinds = self.layer_types or (FULL if self.sliding_window is None else SLIDING,) * self.num_hidden_layers
        sliding = [kind == SLIDING for kind in kinds]
        return tuple(
            AttentionPattern(
                self.sliding_window if window else None, window if self.is_causal is None else self.is_causal
            )
            for window in sliding
        )

    @property
    def plain_logits(self) -> bool:
        """Whether draft logits are the head's own."""
        return self.output_multiplier == 1.0 and self.final_logit_softcapping is None

    @property
    def gamma(self) -> int:
        """Draft tokens per block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


class BlockContext(NamedTuple):
    """The key source of training: block rows see the context before their anchor and their own block.

    A tuple, so that sharded layers find its tensors among their inputs.
    """

    hidden_SH: Tensor
    rope: Rope
    layout: BlockLayout

    def attend(self, attention: Attention, q_NKQE: Tensor, k_NKGE: Tensor, v_NKGE: Tensor) -> Tensor:
        k, v = attention.outputs(self.hidden_SH, "k_proj", "v_proj")
        context = attention.keys_values(k, v, self.rope)
        return block_attention(q_NKQE, *context, k_NKGE, v_NKGE, self.layout, attention.pattern)


class DraftLayer(Packable):
    """A decoder layer: x += attention(norm(x)), x += MLP(norm(x)).

    Packed, all of it but attention runs in compiled kernels where there are some (target/kernels.py).
    """

    kernels: LayerKernels | None = None

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(H, eps=eps)
        self.self_attn = Attention(config, H, qk_norm=True, layer=index, pattern=config.attention_patterns[index])
        self.post_attention_layernorm = nn.RMSNorm(H, eps=eps)
        self.mlp = SwiGLU(config)

    def after_packing(self) -> None:
        attention, mlp = self.self_attn, self.mlp
        linears = (
            attention.matrices["q_proj", "k_proj", "v_proj"],
            attention.matrices["o_proj",],
            mlp.matrices["gate_proj", "up_proj"],
            mlp.matrices["down_proj",],
        )
        matrices = [linear.matrix for linear in linears if linear.matrix is not None]
        if len(matrices) < len(linears):
            return
        norms = Norms(
            input=self.input_layernorm.weight,
            post=self.post_attention_layernorm.weight,
            q=attention.q_norm.weight,
            k=attention.k_norm.weight,
            eps=float(self.input_layernorm.eps or 0.0),
        )
        q, k, _ = (width // attention.head_dim for width in linears[0].widths)
        self.kernels = LayerKernels(*matrices, norms=norms, heads=(q, k))

    def forward(self, x_NKH: Tensor, rope: Rope, source: KeySource) -> Tensor:
        if self.kernels is None:
            x_NKH = x_NKH + self.self_attn(self.input_layernorm(x_NKH), rope, source)
            return x_NKH + self.mlp(self.post_attention_layernorm(x_NKH))
        return self.kernels.around(partial(source.attend, self.self_attn), x_NKH, rope)


class DFlash(DraftModule):
    """The backbone all block drafters share. Parameter names are those of the z-lab dialect.

    Weights begin as the target's: fc picks the last aux layer, hidden_norm is the input norm of the layer that the
    copied keys come from, and the draft layers are the target's last ones (drafters/target_weights.py). The final norm
    begins as ones: the target's own makes untrained hidden states overconfident, and the first losses explode.
    """

    aux_weight: str | None = "fc.weight"
    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(self.make_layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        names = [f"layers.{i}.self_attn.{name}" for i in range(len(self.layers)) for name in ("k_proj", "v_proj")]
        self.context_projections = tuple(names)
        self.groups = (("fc",), self.context_projections)

    @staticmethod
    def make_layer(config: Any, index: int) -> DraftLayer:
        """A fresh layer of the backbone."""
        return DraftLayer(config, index)

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [layer.self_attn for layer in self.layers if isinstance(layer, DraftLayer)]

    def context(self, aux_SLT: Tensor) -> Tensor:
        """Features of committed tokens [S, L, T] -> H_ctx [S, H]."""
        features_SH = self.fc((aux_SLT / self.aux_scale_L[:, None]).flatten(-2))
        return self.hidden_norm(features_SH.to(self.hidden_norm.weight.dtype))

    def forward(self, aux_SLT: Tensor, embedded_NKH: Tensor, layout: BlockLayout) -> Tensor:
        """The backbone in training: normed hidden states of the prediction rows, [N, gamma, H].

        Args:
            aux_SLT: raw aux hidden states of the context slots of all sequences, concatenated.
            embedded_NKH: embeddings of [anchor, mask, ...] per block (see `block_tokens`).
            layout: where the blocks stand; decides positions and the mask.
        """
        layout.prepare(embedded_NKH.shape[1], self.config.attention_patterns)
        rope = rope_table(layout.positions_S(), self.config)
        source = BlockContext(self.context(aux_SLT), rope, layout)
        positions_NK = layout.block_positions_NK(embedded_NKH.shape[1])
        return self.blocks(embedded_NKH, rope_table(positions_NK, self.config), source)

    def blocks(self, x_NKH: Tensor, rope: Rope, source: KeySource) -> Tensor:
        """The layers over embedded blocks: normed hidden states of the prediction rows."""
        for layer in self.layers:
            x_NKH = layer(x_NKH, rope, source)
        return self.norm(x_NKH[:, -self.config.gamma :])

    def context_keys_values(self, aux_SLT: Tensor, rope: Rope) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [S, G, E] of committed tokens, per layer; packed, all layers' projections are one product."""
        outputs = self.outputs(self.context(aux_SLT), *self.context_projections)
        parts = zip(self.attentions, outputs[::2], outputs[1::2], strict=True)
        return [attention.keys_values(k, v, rope) for attention, k, v in parts]

    def block_tokens(self, anchors_N: Tensor) -> Tensor:
        """[N] anchor tokens -> [N, K] block inputs: the anchor, then masks."""
        masks = anchors_N.new_full((len(anchors_N), self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat((anchors_N[:, None], masks), dim=1)

    def rows(self, inputs: BlockInputs) -> DraftRows:
        if not self.config.plain_logits:
            raise ValueError(
                f"output_multiplier {self.config.output_multiplier:g}, final_logit_softcapping "
                f"{self.config.final_logit_softcapping}: drafters whose logits are multiplied or capped are "
                "served here, not trained."
            )
        embedded_NKH = inputs.embed(self.block_tokens(inputs.previous_NK[:, 0]))
        return DraftRows(self(inputs.aux_SLD, embedded_NKH, inputs.layout))

    @staticmethod
    def drafter() -> type[Drafter]:
        return DFlashDrafter

    def of_length(self: Module, gamma: int) -> Module:
        """The same weights with blocks of `gamma` drafts; fewer than its own."""
        other = copy.copy(self)  # modules and parameters are shared
        other.config = replace(self.config, block_size=self.config.block_size - self.config.gamma + gamma)
        return other

    def block_backbone(self) -> DFlash | None:
        return self

    @torch.no_grad()
    def initialize_from(self, target: Target, documents: Sequence[Sequence[int]]) -> None:
        source = copy_target_layers(self.layers, target, documents)
        self.pick_last_aux_layer(full_tensor(source[0].input_layernorm.weight))

    @torch.no_grad()
    def pick_last_aux_layer(self, norm_H: Tensor) -> None:
        """Set the features to the last aux hidden state, normed with `norm_H`."""
        hidden = self.config.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        self.hidden_norm.weight.copy_(norm_H)


# ----------------------------------------------------------------------------
# A block drafter ready to serve: a draft KV cache of committed features, one block per call.
#
#     extend    W_c, norm, then K and V of every layer -> appended to each session's cache
#     propose   one block of K rows per request over [context KV ; block KV] -> sampling chain -> drafts
#
# Requests share every matrix product; only attention goes one by one, on a GPU not even that (`DraftPool`). Block keys
# and values are written behind the context and forgotten: a session's length moves only with committed features.
# Shapes: R requests, T new tokens, L aux layers, K block rows, H draft hidden.
# ----------------------------------------------------------------------------


class BlockDrafter(ModuleDrafter[DFlash]):
    """Serves DFlash or DSpark for one target."""

    pools: ClassVar[bool] = True  # on a GPU

    def __init__(self, weights: DrafterWeights, target: Target, calibration: DraftCalibration = UNCALIBRATED) -> None:
        super().__init__(weights, target, calibration)
        config = weights.config
        self.head = capped(self.head, config.output_multiplier, config.final_logit_softcapping)
        self.caches: DraftPool | RequestCaches
        self.graphs: BlockGraphs | None = None
        if self.pools and available(self.device, serving_dtype(target)):
            self.caches = DraftPool(config, config.attention_patterns, self.device, dtype=serving_dtype(target))
            if target.graphs is not None:
                self.graphs = BlockGraphs(target.graphs, self.caches, self.rope)
        else:
            self.caches = RequestCaches(config, self.device)

    def of_length(self, gamma: int) -> BlockDrafter:
        """The same weights with blocks of `gamma` drafts, sessions in common; fewer than its own."""
        other = copy.copy(self)
        other.module = self.module.of_length(gamma)
        other.config, other.gamma = other.module.config, gamma
        return other

    def new_session(self, capacity: int) -> DraftSession:
        """Empty draft KV caches for one request of at most `capacity` committed tokens, or a layer's window of them."""
        config, rows = self.config, self.config.block_size
        seen = [capacity if p.window is None else min(capacity, p.window - 1) for p in config.attention_patterns]
        return self.caches.session([count + rows for count in seen])

    def extend(self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        """Append the features of newly committed tokens (raw aux hidden states [T, L, H], session after session)."""
        assert aux_TLD is not None
        counts = [len(part) for part in tokens]
        starts = [session.length for session in sessions]
        rope = self.rope([i for s, n in zip(starts, counts, strict=True) for i in range(s, s + n)])
        self.caches.append(sessions, counts, self.module.context_keys_values(aux_TLD.float(), rope))
        for session, count in zip(sessions, counts, strict=True):
            session.length += count

    def block_hidden(self, sessions: Sequence[DraftSession], anchors: Sequence[int]) -> Tensor:
        """One block pass: normed hidden states of the prediction rows, [R, gamma, H]. No cache grows."""
        K, lengths = self.config.block_size, [session.length for session in sessions]
        if self.graphs is not None and self.graphs.captures:
            return self.graphs.run(self._blocks, sessions, anchors, rows=K)
        cos_NE, sin_NE = self.rope([length + k for length in lengths for k in range(K)])
        rope = cos_NE.unflatten(0, (-1, K)), sin_NE.unflatten(0, (-1, K))
        return self._blocks(on_device(anchors, self.device), rope, self.caches.source(sessions, K))

    def _blocks(self, anchors_R: Tensor, rope: Rope, source: KeySource) -> Tensor:
        return self.module.blocks(self.embed(self.module.block_tokens(anchors_R)), rope, source)

    def ahead(self) -> BlockDrafter | None:
        own = type(self).propose is BlockDrafter.propose and type(self).extend is BlockDrafter.extend
        return self if own and self.graphs is not None and self.graphs.captures and not self.heads.estimates else None

    # See `DeviceDrafter`: its sessions are in a pool.

    def memory(self, end: int) -> list[Tensor]:
        self.rope.cover(end + self.config.block_size)
        return [*self._pool.layers, *self.rope.kept]

    def table(self, sessions: Sequence[DraftSession], requests: int) -> Ints:
        pages = power_of_two(sum(len(session.pages) for session in sessions))
        return self._pool.table(sessions, requests, max(FEWEST_PAGES, pages))

    def block_at(self, anchors_R: Tensor, lengths_R: Tensor, real_R: Tensor, *, table: Tensor) -> Tensor:
        K = self.config.block_size
        positions_RK = lengths_R[:, None] + torch.arange(K, device=self.device)
        cos, sin = (kept[positions_RK] for kept in self.rope.kept)
        return self._blocks(anchors_R, (cos, sin), self._pool.source_of(table, lengths_R, real_R, rows=K))

    def extend_at(self, aux_TLD: Tensor, positions_T: Tensor, rows: Division, *, table: Tensor) -> None:
        cos, sin = (kept[positions_T] for kept in self.rope.kept)
        layers = self.module.context_keys_values(aux_TLD.float(), (cos, sin))
        self._pool.append_at(table, rows, positions_T, layers=layers)

    @property
    def _pool(self) -> DraftPool:
        assert isinstance(self.caches, DraftPool)
        return self.caches

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """Draft for every call, gamma tokens each at most, while c_k is at least `min_confidence`."""
        hidden_RKH = self.block_hidden([call.session for call in calls], [call.anchor for call in calls])
        return sample_chain(
            self.head,
            hidden_RKH[:, : longest_draft(calls, self.gamma)],
            calls,
            heads=self.heads,
            min_confidence=min_confidence,
            graphs=self.graphs,
        )

    def session_at(self, session: DraftSession, length: int) -> DraftSession:
        """See `Drafter`; the caches are shared, for a block overwrites only what comes behind it."""
        earlier = copy.copy(session)
        earlier.length = length
        return earlier


class DFlashDrafter(BlockDrafter):
    """Serves a drafter of blocks whose rows do not depend on each other's tokens: chains, or trees."""

    def with_trees(self, size: TreeSize) -> Drafter:
        """The same drafter with trees of its likeliest paths.

        Raises:
            ValueError: its drafts depend on each other, deeper than a block, or more nodes than such a tree ever has.
        """
        return BlockTreeDrafter.of_size(self, size)

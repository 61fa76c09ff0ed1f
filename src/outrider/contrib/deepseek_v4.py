"""DSpark with DeepSeek-V4's draft layers: shared-latent attention, mixtures of experts, hyper-connections.

A row has n residual streams X [n, H]. Around each sublayer f (attention, then experts) they are read, mixed, written:

    a, b, C = maps(X)                          a, b: n weights each; C: [n, n], rows and columns sum to 1 (Sinkhorn)
    X      <- C^T X + b (f(norm(a^T X)))^T     first X: n copies of the embedding; the last a^T X goes to the final norm

    q   = R unit(W_qb norm(W_qa u))            Q heads of width E; R rotates the last dims of a head, pair by pair
    k   = R norm(W_kv u)                       one latent for all heads, key and value alike
    out = W_ob W_oa R^-1 sum_s p_s k_s         p: softmax over the seen latents and one sink per head; W_oa by groups

    experts: s = sqrt(softplus(W_g u)), the top k of s + bias, weighted by s / sum(s) * routed_scaling_factor,
             and a shared expert; an expert is W_2 (silu(min(W_1 u, m)) * clamp(W_3 u, -m, m))

A block sees the latents of the last `sliding_window` committed tokens before its anchor, the same ones in every row,
and all of its own rows. Latents of committed tokens are made of the features (W_kv H_ctx), as in DFlash; those of
DeepSeek-V4 are the means of its streams after the aux layers, its last one before the final norm. The heads are
DSpark's; confidences read a^T X before the final norm.

The bias is no parameter: after each step it moves by `balance_rate` towards the experts that were chosen less often
than the mean (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Whether the published layers were trained so is not said.

Source: DSpark, arXiv 2607.05147; manifold-constrained hyper-connections, arXiv 2512.24880; the equations as in vLLM
0.32 (models/deepseek_v4) and transformers 5.23. Parameter names are those under `mtp.*` in the target's checkpoint,
with `hc_attn.fn` for `hc_attn_fn`, and one tensor for the matrices of all experts.
Shapes: N blocks, K rows, W window, S context slots, n streams, H hidden, Q heads, E head dim, I expert width,
T rows of all blocks, k experts of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from outrider.checkpoints.dialects.base import (
    LARGEST_VOCABULARY,
    LONGEST_CONTEXT,
    MOST_DRAFTS,
    ExportedCheckpoint,
    Fields,
    Source,
    TargetFacts,
    module_of,
)
from outrider.checkpoints.registry import Method
from outrider.drafters.base import (
    UNCALIBRATED,
    BlockInputs,
    DraftCalibration,
    Drafter,
    DrafterWeights,
    Head,
    check_fits,
)
from outrider.drafters.config import Count, MaskToken, NotInRecipe
from outrider.drafters.dflash import BlockDrafter, DFlash
from outrider.drafters.dspark import DSpark, DSparkConfig, DSparkRows
from outrider.drafters.layers import BlockLayout
from outrider.drafters.target_weights import layer_shapes
from outrider.target.linear import Packable
from outrider.target.model import DecodingTarget, Target
from outrider.utils.files import check_finite
from outrider.utils.measure import dtype_name, on_device


@dataclass(frozen=True, kw_only=True)
class DSparkV4Config(DSparkConfig):
    """DSpark's fields and those of the layers. Defaults are DeepSeek-V4-Flash's, but for the number of experts.

    `intermediate_size` is the width of an expert. DeepSeek-V4-Flash has 256 experts of half the hidden size, 6 a row.
    """

    algorithm: ClassVar[str] = "dspark_v4"
    reads_last: ClassVar[bool] = True

    num_hidden_layers: Annotated[Count, Field(description="Draft layers.")] = 3
    block_size: Annotated[Count, Field(description="Rows of a block, the anchor included.")] = 5
    sliding_window: Annotated[Count, Field(description="Tokens before the anchor that its block sees.")] = 128
    intermediate_size: Annotated[Count, Field(description="Width of an expert; null: half the hidden size.")]
    n_routed_experts: Annotated[Count, Field(description="Experts of a layer, the shared one not counted.")] = 16
    num_experts_per_tok: Annotated[Count, Field(description="Experts of a row, the shared one not counted.")] = 2
    routed_scaling_factor: Annotated[float, Field(gt=0, description="Sum of the weights of a row's experts.")] = 1.5
    swiglu_limit: Annotated[float, Field(gt=0, description="Largest input of an expert's product.")] = 10.0
    balance_rate: Annotated[
        float | None, Field(gt=0, description="Step of the router's bias towards even use of experts; null: none.")
    ] = field(default=1e-3, repr=False)
    q_lora_rank: Annotated[Count, Field(description="Rank of the queries; null: a quarter of the hidden size.")]
    qk_rope_head_dim: Annotated[
        Count, Field(description="Dimensions of a head that are rotated; null: half of them, 64 at most.")
    ]
    o_groups: Annotated[Count, Field(description="Groups of heads that are projected apart; null: 8 or fewer.")]
    o_lora_rank: Annotated[
        Count, Field(description="Rank of a group's projection; null: a quarter of the hidden size.")
    ]
    hc_mult: Annotated[Count, Field(description="Residual streams.")] = 4
    hc_sinkhorn_iters: Annotated[Count, Field(description="Normalisations of the matrix that mixes the streams.")] = 20
    hc_eps: NotInRecipe[float] = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_key_value_heads != 1:
            raise ValueError(f"num_key_value_heads {self.num_key_value_heads}: one latent serves all heads; use 1.")
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.head_dim:
            raise ValueError(
                f"qk_rope_head_dim {self.qk_rope_head_dim} must be even and at most head_dim {self.head_dim}."
            )
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups {self.o_groups} must divide num_attention_heads {self.num_attention_heads}.")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than n_routed_experts {self.n_routed_experts}."
            )
        if self.rope_scaling is not None:
            raise ValueError(
                f"rope_scaling {self.rope_scaling.rope_type!r} has no place here: layers with a window are unscaled."
            )
        if self.layer_types or self.is_causal is not False:
            raise ValueError("layer_types and is_causal have no place here: all layers have the window and no order.")
        if self.markov_head_type != "vanilla":
            raise ValueError(f"markov_head_type {self.markov_head_type!r}: DeepSeek-V4's sequential head is 'vanilla'.")
        if not self.plain_logits:
            raise ValueError("output_multiplier and final_logit_softcapping have no place here: logits are the head's.")

    @classmethod
    def from_target(
        cls,
        target: Target,
        *,
        target_layer_ids: Sequence[int] | None = None,
        num_aux_layers: Annotated[
            Count, Field(description="Aux layers where target_layer_ids is left out: the last ones before the last.")
        ] = 3,
        draft_vocab_size: int | None = None,
        mask_token: MaskToken = None,
        **chosen: Any,
    ) -> DSparkV4Config:
        """Heads and hidden size of the target, the other sizes in DeepSeek-V4's proportions, the recipe's choices.

        Args:
            target_layer_ids: None: `num_aux_layers` layers before the last one; of a target with residual streams the
                last ones, as DeepSeek's.
            draft_vocab_size: None: the target's.
            mask_token: None: a special token that no chat template uses.
        """
        shapes = layer_shapes(target)
        H, Q, E = shapes["hidden_size"], shapes["num_attention_heads"], shapes["head_dim"]
        if target_layer_ids is None and num_aux_layers >= target.num_layers:
            raise ValueError(
                f"drafter.num_aux_layers is {num_aux_layers}, and a target of {target.num_layers} layers has "
                f"{target.num_layers - 1} before its last: ask for fewer, or name them in drafter.target_layer_ids."
            )
        end = target.num_layers if target.family.streams else target.num_layers - 1
        own = {
            "num_key_value_heads": 1,
            "rope_scaling": None,
            "intermediate_size": max(1, H // 2),
            "q_lora_rank": max(1, H // 4),
            "qk_rope_head_dim": min(64, max(2, E // 4 * 2)),
            "o_groups": math.gcd(8, Q),
            "o_lora_rank": max(1, H // 4),
        }
        return super().from_target(
            target,
            target_layer_ids=target_layer_ids or range(end - num_aux_layers, end),
            draft_vocab_size=draft_vocab_size,
            mask_token=mask_token,
            **{**own, **chosen},
        )

    def describe(self) -> list[tuple[str, str]]:
        experts = (
            f"{self.num_experts_per_tok} of {self.n_routed_experts} and a shared one, {self.intermediate_size} wide"
        )
        return [*super().describe(), ("experts", experts), ("residual streams", str(self.hc_mult))]


# ----------------------------------------------------------------------------
# Rotation of pairs, hyper-connections, experts.
# ----------------------------------------------------------------------------


Turn = tuple[Tensor, Tensor]  # cos and sin of the angles of a row's pairs, [..., 1, pairs]; the 1 stands for heads


def turns(positions: Tensor, width: int, theta: float) -> Turn:
    """The angles of `width` / 2 pairs at absolute positions."""
    inverse = theta ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = (positions[..., None].float() * inverse)[..., None, :]
    return angles.cos(), angles.sin()


def turned(x: Tensor, turn: Turn, back: bool = False) -> Tensor:
    """Heads [..., Q, E] with neighbouring dims of their end rotated, forwards or `back`; float32."""
    cos, sin = turn
    fixed, moving = x.float().split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    first, second = moving.unflatten(-1, (-1, 2)).unbind(-1)
    sin = -sin if back else sin
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((fixed, pairs.flatten(-2)), dim=-1)


def unit(x: Tensor, eps: float) -> Tensor:
    """RMS norm without a gain, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def sinkhorn(logits_Xnn: Tensor, iterations: int, eps: float) -> Tensor:
    """Softmax of the rows, then columns and rows normalised in turn: matrices whose rows and columns sum to 1."""
    matrix = logits_Xnn.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


class StreamMaps(nn.Module):
    """What is computed from the streams: a^T X with a = sigmoid(scale W unit(X) + base) + eps, and more, in float32.

    Args:
        outputs: rows of W.
        scales: numbers in `scale`.
    """

    def __init__(self, config: DSparkV4Config, outputs: int, scales: int = 1) -> None:
        super().__init__()
        self.norm_eps, self.eps = config.rms_norm_eps, config.hc_eps
        self.fn = nn.Parameter(0.02 * torch.randn(outputs, config.hc_mult * config.hidden_size))
        self.base = nn.Parameter(torch.zeros(outputs))
        self.scale = nn.Parameter(torch.ones(scales))

    def weights(self, streams_XnH: Tensor) -> Tensor:
        """W unit(X), [X, outputs]."""
        return F.linear(unit(streams_XnH.flatten(-2), self.norm_eps), self.fn.float())

    def read(self, streams_XnH: Tensor, logits_Xn: Tensor) -> Tensor:
        """[X, H]"""
        return ((torch.sigmoid(logits_Xn) + self.eps)[..., None] * streams_XnH).sum(-2)


class StreamReader(StreamMaps):
    """Weighs the streams and adds them up."""

    def __init__(self, config: DSparkV4Config) -> None:
        super().__init__(config, config.hc_mult)

    def forward(self, streams_XnH: Tensor) -> Tensor:
        with torch.autocast(streams_XnH.device.type, enabled=False):
            return self.read(streams_XnH, self.weights(streams_XnH) * self.scale.float() + self.base.float())


class HyperConnection(StreamMaps):
    """One sublayer's connection to the streams: what it reads, and how its output is written and the streams mixed.

    Weights begin as plain residual connections of equal streams: b is about 1, and C any matrix whose columns sum to 1.
    """

    def __init__(self, config: DSparkV4Config) -> None:
        super().__init__(config, (2 + config.hc_mult) * config.hc_mult, scales=3)
        self.streams, self.iterations = config.hc_mult, config.hc_sinkhorn_iters

    def forward(self, streams_XnH: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The streams behind `sublayer` [X, H] -> [X, H]."""
        n = self.streams
        with torch.autocast(streams_XnH.device.type, enabled=False):
            sizes = (n, n, n * n)
            parts = zip(self.weights(streams_XnH).split(sizes, -1), self.scale, self.base.split(sizes), strict=True)
            reading, writing, mixing = (x.float() * scale.float() + base.float() for x, scale, base in parts)
            matrix_Xnn = sinkhorn(mixing.unflatten(-1, (n, n)), self.iterations, self.eps)
            inputs_XH = self.read(streams_XnH, reading)
        out_XH = sublayer(inputs_XH)
        with torch.autocast(streams_XnH.device.type, enabled=False):
            written = 2 * torch.sigmoid(writing)[..., None] * out_XH.float()[..., None, :]
            return matrix_Xnn.mT @ streams_XnH + written


class Expert(Packable):
    """The shared expert; `product` is every expert's."""

    groups = (("w1", "w3"), ("w2",))

    def __init__(self, config: DSparkV4Config) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.outputs(x, "w1", "w3")
        return self.w2(product(gate, up, self.limit))


def product(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up, both limited before; float32 as all that is summed up over experts."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


class RoutedExperts(nn.Module):
    """The matrices of all routed experts, one tensor each: every rank then has a gradient of every one."""

    def __init__(self, config: DSparkV4Config) -> None:
        super().__init__()
        experts, inner, hidden = config.n_routed_experts, config.intermediate_size, config.hidden_size
        self.limit = config.swiglu_limit
        self.w1, self.w3 = (nn.Parameter(_uniform(experts, inner, hidden)) for _ in range(2))
        self.w2 = nn.Parameter(_uniform(experts, hidden, inner))

    def forward(self, x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """The weighted sum of each row's experts, [T, H]; each expert takes its rows at once."""
        order = experts_Tk.flatten().argsort(stable=True)
        counts = rows_of_experts(experts_Tk, len(self.w1)).tolist()
        x_TH = x_TH.to(self.w1.dtype)
        parts = x_TH[order // experts_Tk.shape[1]].split(counts)
        found = [
            F.linear(product(F.linear(x, w1), F.linear(x, w3), self.limit).to(x.dtype), w2).float()
            for x, w1, w2, w3 in zip(parts, self.w1.unbind(), self.w2.unbind(), self.w3.unbind(), strict=True)
            if len(x) or torch.is_grad_enabled()  # in training all have a gradient, zero without rows
        ]
        rows_TkH = torch.cat(found)[order.argsort()].unflatten(0, experts_Tk.shape)
        return (rows_TkH * weights_Tk[..., None]).sum(1)


def rows_of_experts(experts_Tk: Tensor, experts: int) -> Tensor:
    """How many rows chose each expert; `bincount` would wait for a GPU."""
    chosen = experts_Tk.flatten()
    return chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def _uniform(*shape: int) -> Tensor:
    """As the weights of an nn.Linear begin."""
    return torch.empty(shape).uniform_(-1, 1) / math.sqrt(shape[-1])


class Router(nn.Module):
    """Chooses the experts of a row and weighs them, in float32."""

    bias: Tensor

    def __init__(self, config: DSparkV4Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(_uniform(config.n_routed_experts, config.hidden_size))
        self.register_buffer("bias", torch.zeros(config.n_routed_experts))
        self.chosen: Tensor | None = None  # how often each expert was, since the last step of a training

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and their weights, [T, k] each."""
        with torch.autocast(x_TH.device.type, enabled=False):
            scores_Tn = F.softplus(F.linear(x_TH.float(), self.weight.float())).sqrt()
            experts_Tk = (scores_Tn + self.bias).topk(self.config.num_experts_per_tok, dim=-1, sorted=False).indices
            weights_Tk = scores_Tn.gather(-1, experts_Tk)
            weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor
        if self.training and torch.is_grad_enabled():
            counted = rows_of_experts(experts_Tk, len(self.bias))
            self.chosen = counted if self.chosen is None else self.chosen + counted
        return experts_Tk, weights_Tk

    @torch.no_grad()
    def balance(self, rate: float, summed: Callable[[Tensor], Tensor]) -> None:
        """Move the bias by `rate` towards experts that were chosen less often than the mean, and count anew."""
        chosen = summed(torch.zeros_like(self.bias) if self.chosen is None else self.chosen.to(self.bias.dtype))
        self.bias += rate * torch.sign(chosen.mean() - chosen)
        self.chosen = None


class MixtureOfExperts(nn.Module):
    """Routed experts and the shared one."""

    def __init__(self, config: DSparkV4Config) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = RoutedExperts(config)
        self.shared_experts = Expert(config)

    def forward(self, x_XH: Tensor) -> Tensor:
        rows_TH = x_XH.flatten(0, -2)
        return self.experts(rows_TH, *self.gate(rows_TH)).view(x_XH.shape) + self.shared_experts(x_XH)


# ----------------------------------------------------------------------------
# Attention over latents. Where those of committed tokens come from is all that training and serving differ in.
# ----------------------------------------------------------------------------


class LatentSource(Protocol):
    """The latents of committed tokens that blocks see."""

    def window(self, attention: LatentAttention) -> tuple[Tensor, Tensor]:
        """[N, W, E], and which of them there are, bool [N, W]."""
        ...


class ContextLatents(NamedTuple):
    """Of training: made of the features of all sequences, then gathered block by block.

    A tuple, so that sharded layers find its tensors among their inputs.
    """

    hidden_SH: Tensor
    turn: Turn
    slots_NW: Tensor  # S where there is none

    @staticmethod
    def of(hidden_SH: Tensor, layout: BlockLayout, config: DSparkV4Config) -> ContextLatents:
        positions_S, S = layout.positions_S(), len(hidden_SH)
        width = min(config.sliding_window, max(layout.lengths))
        lengths = on_device(layout.lengths, positions_S.device)
        starts_N = (lengths.cumsum(0) - lengths)[layout.sequence_N]
        places_NW = layout.anchors_N[:, None] - 1 - torch.arange(width, device=positions_S.device)
        slots_NW = torch.where(places_NW >= 0, starts_N[:, None] + places_NW, S)
        return ContextLatents(hidden_SH, turns(positions_S, config.qk_rope_head_dim, config.rope_theta), slots_NW)

    def window(self, attention: LatentAttention) -> tuple[Tensor, Tensor]:
        latents_SE = attention.latents(attention.wkv(self.hidden_SH), self.turn)
        latents = F.pad(latents_SE, (0, 0, 0, 1))  # the row behind the last: nothing
        return latents[self.slots_NW], self.slots_NW < len(latents_SE)


@dataclass
class LatentSession:
    """What a drafter remembers of one request: the last W latents of every layer, position p in slot p mod W.

    Attributes:
        latents_LWE: L layers.
        length: number of committed tokens.
    """

    latents_LWE: Tensor
    length: int = 0


class SessionLatents(NamedTuple):
    """Of serving: what the sessions of the blocks' requests hold."""

    latents_NLWE: Tensor
    seen_NW: Tensor

    @staticmethod
    def of(sessions: Sequence[LatentSession]) -> SessionLatents:
        slots = sessions[0].latents_LWE.shape[1]
        used = [min(session.length, slots) for session in sessions]
        width = max(used)
        latents = torch.stack([session.latents_LWE[:, :width] for session in sessions])
        device = latents.device
        return SessionLatents(latents, torch.arange(width, device=device) < on_device(used, device)[:, None])

    def window(self, attention: LatentAttention) -> tuple[Tensor, Tensor]:
        return self.latents_NLWE[:, attention.layer], self.seen_NW


class LatentAttention(Packable):
    """Attention of blocks over a window of latents and their own."""

    groups = (("wq_a", "wkv"), ("wq_b",), ("wo_b",))

    def __init__(self, config: DSparkV4Config, layer: int) -> None:
        super().__init__()
        H, E, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.layer, self.heads, self.head_dim, self.eps = layer, config.num_attention_heads, E, eps
        self.wq_a = nn.Linear(H, config.q_lora_rank, bias=False)
        self.q_norm = nn.RMSNorm(config.q_lora_rank, eps=eps)
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * E, bias=False)
        self.wkv = nn.Linear(H, E, bias=False)
        self.kv_norm = nn.RMSNorm(E, eps=eps)
        self.attn_sink = nn.Parameter(torch.zeros(self.heads))
        self.out_groups, self.out_rank = config.o_groups, config.o_lora_rank
        self.wo_a = nn.Linear(self.heads * E // config.o_groups, config.o_groups * config.o_lora_rank, bias=False)
        self.wo_b = nn.Linear(config.o_groups * config.o_lora_rank, H, bias=False)

    def latents(self, kv_XE: Tensor, turn: Turn) -> Tensor:
        """Outputs of wkv -> latents as rows see them, [X, E]."""
        return turned(self.kv_norm(kv_XE.float())[..., None, :], turn)[..., 0, :]

    def forward(self, u_NKH: Tensor, turn: Turn, source: LatentSource) -> Tensor:
        """[N, K, H] -> [N, K, H]"""
        q, kv = self.outputs(u_NKH, "wq_a", "wkv")
        q_NKQE = self.wq_b(self.q_norm(q.float())).unflatten(-1, (self.heads, self.head_dim))
        q_NKQE = turned(unit(q_NKQE, self.eps), turn) * self.head_dim**-0.5
        window_NWE, seen_NW = source.window(self)
        K, latents_NJE = q_NKQE.shape[1], torch.cat((window_NWE, self.latents(kv, turn)), dim=1)
        scores = (q_NKQE.flatten(1, 2) @ latents_NJE.mT).float().unflatten(1, (K, self.heads))
        scores = scores.masked_fill(~F.pad(seen_NW, (0, K), value=True)[:, None, None], -torch.inf)
        sink = self.attn_sink.float()[:, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        mixed_NKQE = (weights.flatten(1, 2) @ latents_NJE).unflatten(1, (K, self.heads))
        grouped = turned(mixed_NKQE, turn, back=True).flatten(-2).unflatten(-1, (self.out_groups, -1))
        low = torch.einsum("nkgi,gri->nkgr", grouped, self.wo_a.weight.unflatten(0, (self.out_groups, -1)))
        return self.wo_b(low.flatten(-2))


class DraftLayer(nn.Module):
    """Attention and experts, each with its connection to the streams."""

    def __init__(self, config: DSparkV4Config, index: int) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.hc_attn, self.hc_ffn = HyperConnection(config), HyperConnection(config)
        self.attn_norm, self.ffn_norm = nn.RMSNorm(H, eps=eps), nn.RMSNorm(H, eps=eps)
        self.attn, self.ffn = LatentAttention(config, index), MixtureOfExperts(config)

    def forward(self, streams_NKnH: Tensor, turn: Turn, source: LatentSource) -> Tensor:
        streams_NKnH = self.hc_attn(streams_NKnH, lambda x: self.attn(self.attn_norm(x), turn, source))
        return self.hc_ffn(streams_NKnH, lambda x: self.ffn(self.ffn_norm(x)))


# ----------------------------------------------------------------------------
# The module, and the drafter that serves it.
# ----------------------------------------------------------------------------


class DSparkV4(DSpark):
    """DSpark over these layers, whose weights begin random; fc picks the target's last aux layer."""

    config: DSparkV4Config

    def __init__(self, config: DSparkV4Config) -> None:
        super().__init__(config)
        self.hc_head = StreamReader(config)
        self.context_projections = tuple(f"layers.{i}.attn.wkv" for i in range(len(self.layers)))
        self.groups = (("fc",), self.context_projections)

    @staticmethod
    def make_layer(config: Any, index: int) -> Any:
        return DraftLayer(config, index)

    def turn(self, positions: Tensor) -> Turn:
        """The rotations of rows at these positions."""
        return turns(positions, self.config.qk_rope_head_dim, self.config.rope_theta)

    def forward(self, aux_SLT: Tensor, embedded_NKH: Tensor, layout: BlockLayout) -> Tensor:
        """The backbone in training: hidden states of the prediction rows before the final norm, [N, gamma, H]."""
        source = ContextLatents.of(self.context(aux_SLT), layout, self.config)
        return self.hidden(embedded_NKH, self.turn(layout.block_positions_NK(embedded_NKH.shape[1])), source)

    def hidden(self, x_NKH: Tensor, turn: Turn, source: LatentSource) -> Tensor:
        """The layers over embedded blocks: hidden states of the prediction rows before the final norm."""
        streams_NKnH = x_NKH.float()[..., None, :].expand(-1, -1, self.config.hc_mult, -1)
        for layer in self.layers:
            streams_NKnH = layer(streams_NKnH, turn, source)
        return self.hc_head(streams_NKnH[:, -self.config.gamma :])

    def rows(self, inputs: BlockInputs) -> DSparkRows:
        """The confidence head reads hidden states before the norm."""
        rows = super().rows(inputs)
        return replace(rows, hidden_NKH=self.norm(rows.hidden_NKH))

    def context_latents(self, aux_TLD: Tensor, positions_T: Tensor) -> Tensor:
        """Latents of committed tokens of every layer, [L, T, E]; packed, all layers' projections are one product."""
        outputs = self.outputs(self.context(aux_TLD), *self.context_projections)
        attentions = [layer.attn for layer in self.layers if isinstance(layer, DraftLayer)]
        turn = self.turn(positions_T)
        return torch.stack([a.latents(kv, turn) for a, kv in zip(attentions, outputs, strict=True)])

    def after_step(self, summed: Callable[[Tensor], Tensor]) -> None:
        if self.config.balance_rate is not None:
            for layer in self.layers:
                assert isinstance(layer, DraftLayer)
                layer.ffn.gate.balance(self.config.balance_rate, summed)

    def packed(self, device: torch.device, dtype: torch.dtype) -> DSparkV4:
        copy = super().packed(device, dtype)
        for layer in copy.layers:
            assert isinstance(layer, DraftLayer)
            layer.ffn.experts.to(dtype)
        return copy

    def check_target(self, target: DecodingTarget) -> None:
        check_fits(self.config, target, final=True)

    def block_backbone(self) -> DFlash | None:
        return None

    def starts_from_target(self) -> bool:
        return False

    @staticmethod
    def drafter() -> type[Drafter]:
        return DSparkV4Drafter

    @torch.no_grad()
    def initialize_from(self, target: Target, documents: Sequence[Sequence[int]]) -> None:
        self.pick_last_aux_layer(torch.ones(self.config.hidden_size))


class DSparkV4Drafter(BlockDrafter):
    """Serves it for one target: hidden states are handed to the chain before the norm, which the head begins with."""

    pools = False  # sessions hold their latents
    module: DSparkV4
    config: DSparkV4Config

    def __init__(self, weights: DrafterWeights, target: Target, calibration: DraftCalibration = UNCALIBRATED) -> None:
        super().__init__(weights, target, calibration)
        head: Head = self.head
        self.head = lambda hidden_NH: head(self.module.norm(hidden_NH))

    def new_session(self, capacity: int) -> Any:
        config = self.config
        shape = config.num_hidden_layers, config.sliding_window, config.head_dim
        return LatentSession(torch.zeros(shape, device=self.device))

    def extend(self, sessions: Sequence[Any], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        """Append the latents of newly committed tokens; of more than a window the last."""
        assert aux_TLD is not None
        kept: list[Tensor] = []
        places: list[list[int]] = []
        for session, part, aux in zip(sessions, tokens, aux_TLD.split([len(part) for part in tokens]), strict=True):
            count, slots = len(part), session.latents_LWE.shape[1]
            kept.append(aux[-min(count, slots) :] if count else aux)
            places.append(list(range(session.length + max(0, count - slots), session.length + count)))
        positions_T = on_device([place for part in places for place in part], self.device, torch.long)
        latents_LTE = self.module.context_latents(torch.cat(kept).float(), positions_T)
        ends = zip(sessions, tokens, positions_T.split(list(map(len, places))), strict=True)
        for (session, part, own), found in zip(ends, latents_LTE.split(list(map(len, places)), dim=1), strict=True):
            session.latents_LWE[:, own % session.latents_LWE.shape[1]] = found
            session.length += len(part)

    def block_hidden(self, sessions: Sequence[Any], anchors: Sequence[int]) -> Tensor:
        """One block pass: hidden states of the prediction rows before the final norm, [R, gamma, H]."""
        tokens_RK = self.module.block_tokens(on_device(anchors, self.device))
        lengths_R = on_device([session.length for session in sessions], self.device)
        positions_RK = lengths_R[:, None] + torch.arange(tokens_RK.shape[1], device=self.device)
        return self.module.hidden(self.embed(tokens_RK), self.module.turn(positions_RK), SessionLatents.of(sessions))


# ----------------------------------------------------------------------------
# DeepSeek-V4's DSpark: the tensors under `mtp.` in the target's own checkpoint, `dspark_...` in its config.json.
#
#     mtp.{i}.attn.*, attn_norm, ffn_norm, ffn.gate, ffn.shared_experts.w{1,2,3}     layer i, names our own
#     mtp.{i}.ffn.experts.{e}.w{1,2,3}.weight                                        one tensor of all experts here
#     mtp.{i}.hc_{attn,ffn}_{fn,base,scale}                                          hc_attn.fn, ...
#     mtp.0.main_proj, main_norm                                                     fc, hidden_norm
#     mtp.{last}.norm, hc_head_{fn,base,scale}, markov_head.*, confidence_head.proj  the heads; the last has no bias
#
# It is read and not written: there is no such checkpoint without its target. A `scale` beside a `weight` is of blocks:
#
#     FP8  float8_e4m3fn [out, in], a scale for each block of `quantization_config.weight_block_size`
#     FP4  int8 [out, in / 2], two e2m1 numbers a byte, the low half first; a scale for every 32 numbers of a row
#
# Scales are float8_e8m0fnu (or their bytes) or float32. What is read is bfloat16, which holds products with powers of
# two exactly, or float32. Experts are not trained in these formats here: drafts are those of the unrounded activations.
#
# Source: vLLM 0.32 (models/deepseek_v4/nvidia/dspark.py, quant_config.py) and transformers 5.23
# (integrations/finegrained_fp8.py). The published tensors were not at hand. DeepSeek-V4.1 has other names, experts of
# its own number and connections that read one sublayer earlier; it is refused.
# ----------------------------------------------------------------------------


_TENSOR = re.compile(r"mtp\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")
_CONNECTION = re.compile(r"hc_(attn|ffn|head)_(fn|base|scale)")
_OF_THE_MODEL = {"main_proj.weight": "fc.weight", "main_norm.weight": "hidden_norm.weight"}
_HEADS = ("norm.", "markov_head.", "confidence_head.")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class DeepSeekV4:
    """DSpark inside a DeepSeek-V4 checkpoint."""

    name = "DeepSeek-V4"
    spelling = "DeepseekV4ForCausalLM"
    methods: tuple[str, ...] = (DSparkV4Config.algorithm,)
    prefix = "mtp."

    def reads(self, raw: Mapping[str, Any]) -> bool:
        """A target without DSpark, whose `mtp.` is another module, is no drafter."""
        named = self.spelling in (raw.get("architectures") or []) and "dspark_block_size" in raw
        return named or raw.get("model_type") == "deepseek_v41"

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        if raw.get("model_type") == "deepseek_v41":
            raise ValueError(f"{source.where}: DSpark of DeepSeek-V4.1 is not read, only that of DeepSeek-V4.")
        fields = Fields(raw, source.where, self.name)
        for name, wanted in (("hidden_act", "silu"), ("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc")):
            if fields.text(name, wanted) != wanted:
                raise fields.refuse(name, f"{wanted!r}: draft layers have no other here")
        for name, expected in (("norm_topk_prob", True), ("attention_bias", False)):
            if fields.flag(name, expected) != expected:
                raise fields.refuse(name, f"{str(expected).lower()}: draft layers are not otherwise here")
        if fields.integer("n_shared_experts", default=1) != 1:
            raise fields.refuse("n_shared_experts", "1")
        found = _renamed(dequantised(tensors, fields, source))
        layers = 1 + max((int(name.split(".")[1]) for name in found if name.startswith("layers.")), default=-1)
        if not layers:
            raise ValueError(f"{source.where}: no tensors mtp.0.* beside it, where DSpark's draft layers are.")
        confidence = "confidence_head.proj.weight" in found
        if confidence:
            found["confidence_head.proj.bias"] = torch.zeros(1)
        config = DSparkV4Config(**_sizes(fields), num_hidden_layers=layers, enable_confidence_head=confidence)
        return DrafterWeights(module_of(config, found, source, kind=DSparkV4))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        raise ValueError(
            f"the dialect {self.name} is read only: its tensors are part of the target's checkpoint. Leave the drafter "
            "in Outrider's."
        )


def _sizes(fields: Fields) -> dict[str, Any]:
    """The arguments of the config that config.json states."""
    head_dim, vocab = fields.integer("head_dim"), fields.integer("vocab_size", high=LARGEST_VOCABULARY)
    depth = fields.integer("num_hidden_layers")
    partial = int(head_dim * fields.number("partial_rotary_factor")) if "partial_rotary_factor" in fields else 0
    rotated = {"default": partial} if partial else {}
    main = fields.section("rope_parameters", {}).section("main", {})
    return {
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("moe_intermediate_size"),
        "num_attention_heads": fields.integer("num_attention_heads"),
        "num_key_value_heads": fields.integer("num_key_value_heads", default=1),
        "head_dim": head_dim,
        "vocab_size": vocab,
        "draft_vocab_size": fields.integer("draft_vocab_size", high=LARGEST_VOCABULARY, default=vocab),
        "max_position_embeddings": fields.integer("max_position_embeddings", high=LONGEST_CONTEXT),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": main.number("rope_theta") if "rope_theta" in main else fields.number("rope_theta", 10000.0),
        "num_target_layers": depth,
        "target_layer_ids": fields.integers("dspark_target_layer_ids", low=-1, high=depth - 1),
        "mask_token_id": fields.integer("dspark_noise_token_id", low=0, high=vocab - 1),
        "block_size": fields.integer("dspark_block_size", high=MOST_DRAFTS),
        "markov_rank": fields.integer("dspark_markov_rank"),
        "sliding_window": fields.integer("sliding_window", high=LONGEST_CONTEXT),
        "q_lora_rank": fields.integer("q_lora_rank"),
        "qk_rope_head_dim": fields.integer("qk_rope_head_dim", **rotated),
        "o_groups": fields.integer("o_groups"),
        "o_lora_rank": fields.integer("o_lora_rank"),
        "n_routed_experts": fields.integer("n_routed_experts"),
        "num_experts_per_tok": fields.integer("num_experts_per_tok"),
        "routed_scaling_factor": fields.number("routed_scaling_factor"),
        "swiglu_limit": fields.number("swiglu_limit"),
        "hc_mult": fields.integer("hc_mult"),
        "hc_sinkhorn_iters": fields.integer("hc_sinkhorn_iters"),
        "hc_eps": fields.number("hc_eps"),
    }


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under our names; a name that is not theirs stays as it is, for `module_of` to refuse."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        stage, rest = (match[1], match[2]) if match else ("", name)
        expert, connection = _EXPERT.fullmatch(rest), _CONNECTION.fullmatch(rest)
        if match is None or rest in _OF_THE_MODEL or rest.startswith(_HEADS):
            ours = _OF_THE_MODEL.get(rest, rest)
        elif expert:
            experts.setdefault(f"layers.{stage}.ffn.experts.{expert[2]}", {})[int(expert[1])] = tensor
            continue
        elif connection:
            own = f"hc_{connection[1]}.{connection[2]}"
            ours = own if connection[1] == "head" else f"layers.{stage}.{own}"
        else:
            ours = f"layers.{stage}.{rest}"
        found[name if ours in found else ours] = tensor
    for name, each in experts.items():
        shapes = {tensor.shape for tensor in each.values()}
        if sorted(each) == list(range(len(each))) and len(shapes) == 1:
            found[name] = torch.stack([each[number] for number in range(len(each))])
        else:
            found |= {f"{name}.{number}": tensor for number, tensor in each.items()}
    return found


def dequantised(tensors: Mapping[str, Tensor], fields: Fields, source: Source) -> dict[str, Tensor]:
    """The tensors with weights multiplied by their scales.

    Raises:
        ValueError: a scale without its weight, in another format, or not finite; the message names the tensor.
    """
    scales = {name.removesuffix(".scale"): tensor for name, tensor in tensors.items() if name.endswith(".scale")}
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(".scale")}
    for name, scale in scales.items():
        weight, where = found.get(f"{name}.weight"), f"{source.where}: {name}"
        if weight is None or weight.dim() != 2 or scale.dim() != 2:
            raise ValueError(f"{where}.scale is the scale of no matrix {name}.weight.")
        if weight.dtype in (torch.int8, torch.uint8):
            weight, block = _unpacked(weight), (1, 32)
        elif weight.dtype == torch.float8_e4m3fn:
            block = _block(fields.section("quantization_config"))
        else:
            raise ValueError(f"{where}.weight is {dtype_name(weight.dtype)}: with a scale FP8 (e4m3) and FP4 are read.")
        wanted = [-(-size // side) for size, side in zip(weight.shape, block, strict=True)]
        if list(scale.shape) != wanted:
            raise ValueError(f"{where}.scale has shape {list(scale.shape)}, and blocks of {list(block)} need {wanted}.")
        exact = scale.dtype != torch.float32
        factors = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
        factors = factors.repeat_interleave(block[0], 0)[: weight.shape[0]]
        factors = factors.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
        found[f"{name}.weight"] = (weight.float() * factors).to(torch.bfloat16 if exact else torch.float32)
    if plain := [n for n, t in found.items() if t.dtype.itemsize == 1]:
        raise ValueError(f"{source.where}: {plain[0]} is {dtype_name(found[plain[0]].dtype)} without a scale.")
    check_finite(Path(source.where).parent, found)
    return found


def _block(fields: Fields) -> tuple[int, int]:
    """Rows and columns of a block of FP8."""
    stated = fields.raw("weight_block_size")
    if not (isinstance(stated, list) and [type(side) for side in stated] == [int, int] and min(stated) > 0):
        raise fields.refuse("weight_block_size", "two numbers above 0, as [128, 128]")
    return stated[0], stated[1]


def _unpacked(packed: Tensor) -> Tensor:
    """FP4 [out, in / 2] -> float32 [out, in]."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    codes = packed.contiguous().view(torch.uint8)
    return values[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()]


METHOD = Method(DSparkV4Config, DSparkV4, also_reads=(DeepSeekV4(),))

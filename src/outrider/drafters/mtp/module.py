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

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2. Parameter names of a module are those of its checkpoints, but
for `norm`: `shared_head.norm` there.
Shapes: S context slots, N anchors, K = gamma draft positions, H hidden, Q heads, G kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.drafters.attention import split_attention
from outrider.drafters.dflash import SwiGLU, rope_table
from outrider.drafters.kv import check_heads
from outrider.drafters.method import BlockInputs, DraftModule, DraftRows
from outrider.drafters.projections import Projections, Rope


@dataclass(frozen=True)
class MTPConfig:
    """`num_modules` modules in the target's layer shapes draft `gamma` tokens; `qk_norm` where the target has it."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    num_modules: int = 1
    gamma: int = 1
    qk_norm: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if not 1 <= self.num_modules <= self.gamma:
            raise ValueError(
                f"num_modules {self.num_modules} must be between 1 and gamma {self.gamma}: module k drafts token k."
            )
        check_heads(self)
        if tuple(self.target_layer_ids) != (self.num_target_layers - 1,):
            raise ValueError(
                f"target_layer_ids {list(self.target_layer_ids)} must be [{self.num_target_layers - 1}]: MTP reads the "
                "target's last hidden state."
            )


class MTPModule(nn.Module):
    """One depth: the projection of [embedding; state], one transformer layer, and the norm the head reads behind."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = nn.RMSNorm(H, eps=eps)
        self.hnorm = nn.RMSNorm(H, eps=eps)
        self.eh_proj = nn.Linear(2 * H, H, bias=False)
        self.input_layernorm = nn.RMSNorm(H, eps=eps)
        self.self_attn = Projections(config, H, config.qk_norm)
        self.post_attention_layernorm = nn.RMSNorm(H, eps=eps)
        self.mlp = SwiGLU(config)
        self.norm = nn.RMSNorm(H, eps=eps)

    def combine(self, state_XH: Tensor, embedded_XH: Tensor) -> Tensor:
        """u: what the layer reads; float32 also under autocast, as every residual stream here."""
        return self.eh_proj(torch.cat((self.enorm(embedded_XH), self.hnorm(state_XH)), dim=-1)).float()

    def queries(self, u_XH: Tensor, rope: Rope) -> Tensor:
        return self.self_attn.queries(self.input_layernorm(u_XH), rope)

    def keys_values(self, u_XH: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        return self.self_attn.keys_values(self.input_layernorm(u_XH), rope)

    def finish(self, u_XH: Tensor, attended_XQE: Tensor) -> Tensor:
        """The rest of the layer: h, behind its norm."""
        x_XH = u_XH + self.self_attn.o_proj(attended_XQE.flatten(-2))
        return self.norm(x_XH + self.mlp(self.post_attention_layernorm(x_XH)))


class MTP(DraftModule):
    """The modules of all depths. States are normed on entry, so the scale of the tap does not matter."""

    algorithm: ClassVar[str] = "mtp"
    final_tap: ClassVar[bool] = True
    config: MTPConfig

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config)
        self.depths = nn.ModuleList(MTPModule(config) for _ in range(config.num_modules))

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
        modules, E, theta = len(self.depths), config.head_dim, config.rope_theta
        before = replace(layout, anchors_N=layout.anchors_N - 1)
        rope_S = rope_table(layout.positions_S() + 1, E, theta)  # a pair stands where its token does
        state_SH = inputs.taps_SLD[:, 0]
        state_NH = layout.before_anchors(state_SH)
        hidden = []
        for k in range(config.gamma):
            module = self.module(k)
            if k < modules:
                u_SH = module.combine(state_SH, inputs.embed(_tokens_ahead(inputs, k)))
                context = module.keys_values(u_SH, rope_S)
                own: list[tuple[Tensor, Tensor]] = []
                if k + 1 < modules:
                    state_SH = module.finish(u_SH, _causal(module.queries(u_SH, rope_S), *context, layout.lengths))
            u_NH = module.combine(state_NH, inputs.embed(inputs.previous_NK[:, k]))
            rope_N = rope_table(layout.anchors_N + max(0, k + 1 - modules), E, theta)
            own.append(module.keys_values(u_NH, rope_N))
            own_k, own_v = (torch.stack(rows, dim=1) for rows in zip(*own, strict=True))
            query_N1QE = module.queries(u_NH, rope_N)[:, None]
            attended = split_attention(query_N1QE, *context, own_k, own_v, before)
            state_NH = module.finish(u_NH, attended[:, 0])
            hidden.append(state_NH)
        return DraftRows(torch.stack(hidden, dim=1))


def _tokens_ahead(inputs: BlockInputs, more: int) -> Tensor:
    """[S] token i + 1 + more of its sequence, for slot i; behind the last anchor they are those it drafts after."""
    if not more:
        return inputs.next_tokens_S
    counts = torch.bincount(inputs.layout.sequence_N, minlength=len(inputs.layout.lengths))
    last = (counts.cumsum(0) - 1).tolist()
    parts = inputs.next_tokens_S.split(inputs.layout.lengths)
    return torch.cat(
        [torch.cat((part, inputs.previous_NK[n, 1 : 1 + more]))[more:] for part, n in zip(parts, last, strict=True)]
    )


def _causal(q_SQE: Tensor, k_SGE: Tensor, v_SGE: Tensor, lengths: Sequence[int]) -> Tensor:
    """Causal attention inside each sequence, [S, Q, E]."""
    sequences = zip(*(x.transpose(0, 1).split(list(lengths), dim=1) for x in (q_SQE, k_SGE, v_SGE)), strict=True)
    seen = [
        F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        for q, k, v in sequences
    ]
    return torch.cat(seen, dim=1).transpose(0, 1)

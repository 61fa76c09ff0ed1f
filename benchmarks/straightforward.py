"""The loss and training step as they are usually written: whole logits, padding, a dense mask and plain autograd.

    loss = sum_i w_i [ce CE_i + l1 ||p_d - p_t||_1 + conf BCE(c_i, 1 - ||p_d - p_t||_1 / 2)] / sum_i w_i

Shapes: N positions, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.drafters.dflash import DFlash, DraftLayer
from outrider.drafters.dspark import DSpark
from outrider.drafters.layers import Attention, AttentionPattern
from outrider.drafters.loss import ObjectiveConfig
from outrider.drafters.rope import rope_table
from outrider.target.fused import rotate
from outrider.target.model import Target
from outrider.training.batches import BlockBatch
from outrider.training.objective import inverse_ids
from outrider.training.recipe import Precision


def full_logit_objective(
    logits_NVd: Tensor,
    target_logits_NV: Tensor,
    draft_ids_Vd: Tensor | None,
    labels_N: Tensor,
    confidence_N: Tensor | None,
    weights_N: Tensor,
    config: ObjectiveConfig,
) -> Tensor:
    """The weighted mean; labels index the draft vocabulary (None: the whole one), -1 outside it."""
    with torch.no_grad():
        target_logits_NV = target_logits_NV.to(torch.promote_types(target_logits_NV.dtype, torch.float32))
        p_t = (target_logits_NV - target_logits_NV.logsumexp(-1, keepdim=True)).exp_()
        if draft_ids_Vd is not None:
            p_t = p_t[:, draft_ids_Vd]
        del target_logits_NV
        outside = 1 - p_t.sum(-1)
    logits_NVd = logits_NVd.to(torch.promote_types(logits_NVd.dtype, torch.float32))
    # As precise as log_softmax is not: it sums plainly on a CPU, off by 1e-5 over 150,000 terms.
    log_p_d = logits_NVd - logits_NVd.logsumexp(-1, keepdim=True)
    del logits_NVd
    ce = -log_p_d.gather(1, labels_N.clamp(min=0)[:, None])[:, 0] * (labels_N >= 0)
    distance = (log_p_d.exp() - p_t).abs().sum(-1) + outside
    loss = config.ce * ce + config.l1 * distance
    if confidence_N is not None:
        label = (1 - distance.detach() / 2).clamp(0, 1)
        loss = loss + config.confidence * F.binary_cross_entropy_with_logits(confidence_N, label, reduction="none")
    return (weights_N * loss).sum() / weights_N.sum()


# ----------------------------------------------------------------------------
# The training step as it is usually written, which benchmarks/training.py compares with.
#
#     context padded to the longest sequence, blocks to the most blocks;  one dense mask over [all context, all blocks]
#     logits of every block row, supervised or not:  z [N K, Vd],  target's [N K, V]  ->  plain autograd
#
# Nothing is slow on purpose: attention is PyTorch's own under the mask, the target's side builds no graph, and loss and
# gradients equal ours (tests/benchmarks/test_straightforward.py). What it lacks is what training/ does differently.
#
# Shapes: B sequences, S longest context, n most blocks of a sequence, K rows a block, P = n K block rows, N positions.
# ----------------------------------------------------------------------------


class StraightforwardObjective:
    """As `BlockObjective`, for the same drafters, batches and settings; returns the loss."""

    def __init__(
        self,
        target: Target,
        draft_ids_Vd: Tensor,
        config: ObjectiveConfig,
        precision: Precision = "float32",
    ) -> None:
        self.target, self.config = target, config
        self.inverse_V = inverse_ids(draft_ids_Vd, target.vocab_size)
        self.products = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.draft_ids_Vd = draft_ids_Vd if len(draft_ids_Vd) < target.vocab_size else None
        self.target_head_VH = target.head_VD.to(self.products)
        self.head_VH = self.target_head_VH if self.draft_ids_Vd is None else self.target_head_VH[self.draft_ids_Vd]

    def __call__(self, drafter: DFlash, batch: BlockBatch) -> Tensor:
        device = batch.supervised_NK.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.products == torch.bfloat16):
            hidden_NKH = self.hidden(drafter, batch)
            logits_NKV = F.linear(hidden_NKH, self.head_VH)
            confidence_NK = embedding_NKr = None
            if isinstance(drafter, DSpark):
                if drafter.markov_head is not None:
                    latent_NKr, embedding_NKr = drafter.markov_head.unroll(batch.previous_NK, hidden_NKH)
                    logits_NKV = logits_NKV + drafter.markov_head.bias(latent_NKr)
                if drafter.confidence_head is not None:
                    confidence_NK = drafter.confidence_head(hidden_NKH, embedding_NKr).float()
            target_logits_NKT = F.linear(batch.target_hidden_NKD.to(self.products), self.target_head_VH)
        if self.target.softcap is not None:
            target_logits_NKT = torch.tanh(target_logits_NKT / self.target.softcap) * self.target.softcap
        weights_K = self.config.position_weights(logits_NKV.shape[1], device)
        return full_logit_objective(
            logits_NKV.flatten(0, 1),
            target_logits_NKT.flatten(0, 1),
            self.draft_ids_Vd,
            self.inverse_V[batch.labels_NK].flatten(),
            None if confidence_NK is None else confidence_NK.flatten(),
            (weights_K * batch.supervised_NK).flatten(),
            self.config,
        )

    def hidden(self, drafter: DFlash, batch: BlockBatch) -> Tensor:
        """The backbone's normed prediction rows [N, gamma, H], from one padded batch."""
        layout, K = batch.layout, drafter.config.block_size
        counts = torch.bincount(layout.sequence_N, minlength=len(layout.lengths)).tolist()
        aux = [rows.flatten(-2) for rows in batch.aux_SLD.float().split(layout.lengths)]
        context_BSH = drafter.hidden_norm(drafter.fc(pad_sequence(aux, batch_first=True)).float())
        embedded = F.embedding(drafter.block_tokens(batch.previous_NK[:, 0]), self.target.embed_VD).float()
        embedded_NKH = embedded * self.target.embed_scale
        x_BPH = pad_sequence(list(embedded_NKH.split(counts)), batch_first=True).flatten(1, 2)
        anchors_Bn = pad_sequence(list(layout.anchors_N.split(counts)), batch_first=True)
        slots_S = torch.arange(context_BSH.shape[1], device=x_BPH.device)
        rows_BP = (anchors_Bn[..., None] + torch.arange(K, device=x_BPH.device)).flatten(1)
        ropes = rope_table(rows_BP, drafter.config), rope_table(slots_S.expand(len(aux), -1), drafter.config)
        for layer in drafter.layers:
            assert isinstance(layer, DraftLayer)
            mask_BPJ = dense_mask(anchors_Bn, context_BSH.shape[1], K, layer.self_attn.pattern)
            attended = _attend(layer.self_attn, layer.input_layernorm(x_BPH), context_BSH, mask_BPJ, *ropes)
            x_BPH = x_BPH + attended
            x_BPH = x_BPH + layer.mlp(layer.post_attention_layernorm(x_BPH))
        x_BnKH = x_BPH.unflatten(1, (-1, K))
        x_NKH = torch.cat([rows[:count] for rows, count in zip(x_BnKH, counts, strict=True)])
        return drafter.norm(x_NKH[:, -drafter.config.gamma :])


def dense_mask(anchors_Bn: Tensor, slots: int, rows: int, pattern: AttentionPattern) -> Tensor:
    """[B, P, S + P]: True where a block row sees a context slot (before its anchor) or a row of its own block."""
    B, n = anchors_Bn.shape
    device = anchors_Bn.device
    slots_S = torch.arange(slots, device=device)
    context = (slots_S < anchors_Bn[..., None])[:, :, None].expand(-1, -1, rows, -1)
    if pattern.window is not None:
        positions = anchors_Bn[..., None, None] + torch.arange(rows, device=device)[:, None]
        context = context & (positions - slots_S < pattern.window)
    blocks = torch.arange(n * rows, device=device) // rows
    own = blocks[:, None] == blocks
    if pattern.causal:
        own = own.tril()
    return torch.cat((context.flatten(1, 2), own.expand(B, -1, -1)), dim=-1)


def _attend(
    attention: Attention,
    x_BPH: Tensor,
    context_BSH: Tensor,
    mask_BPJ: Tensor,
    rope_rows: tuple[Tensor, Tensor],
    rope_context: tuple[Tensor, Tensor],
) -> Tensor:
    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, attention.head_dim))

    def rotated(norm: torch.nn.Module, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(norm(heads(x).float()), *rope).to(x.dtype)

    q = rotated(attention.q_norm, attention.q_proj(x_BPH), rope_rows)
    k_own = rotated(attention.k_norm, attention.k_proj(x_BPH), rope_rows)
    k_context = rotated(attention.k_norm, attention.k_proj(context_BSH), rope_context)
    k = torch.cat((k_context, k_own), dim=1)
    v = heads(torch.cat((attention.v_proj(context_BSH), attention.v_proj(x_BPH)), dim=1))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask_BPJ[:, None], enable_gqa=True
    )
    return attention.o_proj(out.transpose(1, 2).flatten(-2))

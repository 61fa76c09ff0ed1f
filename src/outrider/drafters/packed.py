"""A block drafter ready to serve: packed weights, a draft KV cache of committed features, one block per call.

    extend(taps)    W_c, norm, then K and V of *all* layers in one matrix product -> appended to the cache
    propose(anchor) one block of K rows over [context KV ; block KV] -> sequential walk -> Proposal

Block keys and values are written behind the context and forgotten: the cache's length moves only with committed
features. Shapes: T new tokens, L taps, K block rows, G kv heads, Q queries per kv head, E head dim, S slots.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.base import Proposal
from outrider.drafters.chain import sample_chain
from outrider.drafters.dflash import DFlash, DFlashConfig, DraftLayer, rope_table
from outrider.drafters.dspark import DSpark
from outrider.sampling import RandomSource, SamplingParams, SeenTokens
from outrider.target.lean import rotate
from outrider.target.linear import PackedLinear
from outrider.target.model import Target


def check_fits(config: DFlashConfig, target: Target) -> None:
    """A drafter must have been made for this target.

    Raises:
        ValueError: hidden size, vocabulary, depth or taps differ (the message says which).
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
    target.check_taps(config.target_layer_ids)


class _PackedLayer:
    def __init__(self, layer: DraftLayer) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self.input_norm = layer.input_layernorm.weight.detach()
        self.qkv = PackedLinear.fused(attn.q_proj, attn.k_proj, attn.v_proj)
        self.q_norm, self.k_norm = attn.q_norm.weight.detach(), attn.k_norm.weight.detach()
        self.o = PackedLinear.fused(attn.o_proj)
        self.post_norm = layer.post_attention_layernorm.weight.detach()
        self.gate_up = PackedLinear.fused(mlp.gate_proj, mlp.up_proj)
        self.down = PackedLinear.fused(mlp.down_proj)


class PackedDrafter:
    """Serves one drafter for one target. Weights are copied; train the module, then build this again.

    Args:
        draft_ids_Vd: the target's id of every draft token; None where the draft vocabulary is the target's.
        temperatures: T_k > 0 per draft position, that calibrate the confidences; None leaves them as the head says.
    """

    def __init__(
        self,
        drafter: DFlash,
        target: Target,
        draft_ids_Vd: Tensor | None = None,
        temperatures: Sequence[float] | None = None,
    ) -> None:
        config = drafter.config
        check_fits(config, target)
        if temperatures is not None and (len(temperatures) != config.gamma or min(temperatures) <= 0):
            raise ValueError(
                f"temperatures {list(temperatures)} must be {config.gamma} numbers above 0, one per draft position; "
                "calibrate this drafter again (outrider calibrate)."
            )
        self.temperatures = temperatures
        ids = target.vocab_size if draft_ids_Vd is None else len(draft_ids_Vd)
        if ids != config.draft_vocab_size:
            raise ValueError(
                f"{ids} draft ids for a draft vocabulary of {config.draft_vocab_size}; "
                "pass the checkpoint's draft_ids_Vd."
            )
        # A copy on the target's device and in float32: heads and distributions need it, and drafters are small.
        drafter = copy.deepcopy(drafter).to(target.device, torch.float32)
        self.config, self.drafter = config, drafter
        self.taps, self.block_size = tuple(config.target_layer_ids), config.block_size
        self.draft_ids_Vd = None if draft_ids_Vd is None else draft_ids_Vd.to(target.device)
        self.embed_VH, self.embed_scale = target.embed_VD, target.embed_scale
        whole = self.draft_ids_Vd is None and target.dtype == torch.float32
        head_VH = target.head_VD if self.draft_ids_Vd is None else target.head_VD[self.draft_ids_Vd]
        self.head = target.head if whole else PackedLinear(head_VH.float())
        folded = drafter.folded_state_dict()
        self.fc = PackedLinear(folded["fc.weight"])
        self.hidden_norm, self.norm = folded["hidden_norm.weight"], folded["norm.weight"]
        layers = [layer for layer in drafter.layers if isinstance(layer, DraftLayer)]
        self.layers = [_PackedLayer(layer) for layer in layers]
        self.context_kv = PackedLinear.fused(
            *[proj for layer in layers for proj in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        )
        # As far as the *target* reads, whatever the drafter's own config says.
        positions = torch.arange(target.max_context + config.block_size, device=target.device)
        self.rope = rope_table(positions, config.head_dim, config.rope_theta)
        masks = [config.mask_token_id] * (config.block_size - 1)
        self.masks_M = torch.tensor(masks, dtype=torch.long, device=target.device)

    def new_state(self, capacity: int) -> DraftState:
        """An empty draft KV cache for one request of at most `capacity` committed tokens."""
        return DraftState(self, capacity)

    def features(self, taps_TLT: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """Context keys and values [T, G, E] per layer for committed tokens at positions start.."""
        T, G, E, eps = len(taps_TLT), self.config.num_key_value_heads, self.config.head_dim, self.config.rms_norm_eps
        context_TH = F.rms_norm(
            self.fc(taps_TLT.reshape(T, -1).float()), (self.config.hidden_size,), self.hidden_norm, eps
        )
        kv = self.context_kv(context_TH).view(T, len(self.layers), 2, G, E)
        cos, sin = (table[start : start + T] for table in self.rope)
        return [
            (rotate(F.rms_norm(kv[:, i, 0], (E,), layer.k_norm, eps), cos, sin), kv[:, i, 1])
            for i, layer in enumerate(self.layers)
        ]


class DraftState:
    """The draft KV cache of one request."""

    def __init__(self, packed: PackedDrafter, capacity: int) -> None:
        config = packed.config
        self.packed = packed
        shape = (config.num_key_value_heads, capacity + config.block_size, config.head_dim)
        self.keys = [packed.hidden_norm.new_empty(shape) for _ in packed.layers]
        self.values = [packed.hidden_norm.new_empty(shape) for _ in packed.layers]
        self.length = 0

    def extend(self, taps_TLD: Tensor) -> None:
        """Append the features of T newly committed tokens (raw taps [T, L, target hidden])."""
        end = self.length + len(taps_TLD)
        for i, (k, v) in enumerate(self.packed.features(taps_TLD, self.length)):
            self.keys[i][:, self.length : end] = k.transpose(0, 1)
            self.values[i][:, self.length : end] = v.transpose(0, 1)
        self.length = end

    def block_hidden(self, anchor: int) -> Tensor:
        """One block pass: normed hidden states of the prediction rows, [gamma, H]. The cache does not move."""
        packed, config = self.packed, self.packed.config
        K, G, E, eps = config.block_size, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
        heads, start, end = config.num_attention_heads, self.length, self.length + config.block_size
        tokens_K = torch.cat((torch.tensor([anchor], device=packed.embed_VH.device), packed.masks_M))
        x = F.embedding(tokens_K, packed.embed_VH).float()
        if packed.embed_scale != 1.0:
            x = x * packed.embed_scale
        cos, sin = (table[start:end] for table in packed.rope)
        mask = None
        if config.sliding_window is not None:
            slots = torch.arange(end, device=x.device)
            distance = slots[start:, None] - slots
            mask = ((distance < config.sliding_window) | (slots >= start)).repeat(heads // G, 1)
        for i, layer in enumerate(packed.layers):
            qkv = layer.qkv(F.rms_norm(x, x.shape[-1:], layer.input_norm, eps)).view(K, -1, E)
            q, k, v = qkv.split((heads, G, G), dim=1)
            q = rotate(F.rms_norm(q, (E,), layer.q_norm, eps), cos, sin)
            self.keys[i][:, start:end] = rotate(F.rms_norm(k, (E,), layer.k_norm, eps), cos, sin).transpose(0, 1)
            self.values[i][:, start:end] = v.transpose(0, 1)
            q_GRE = q.transpose(0, 1).reshape(1, G, -1, E)  # rows: query group x block rows
            keys, values = self.keys[i][None, :, :end], self.values[i][None, :, :end]
            out = F.scaled_dot_product_attention(q_GRE, keys, values, attn_mask=mask)
            x = x + layer.o(out.view(heads, K, E).transpose(0, 1).reshape(K, heads * E))
            gate, up = layer.gate_up(F.rms_norm(x, x.shape[-1:], layer.post_norm, eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return F.rms_norm(x[-config.gamma :], x.shape[-1:], packed.norm, eps)

    def propose(
        self,
        anchor: int,
        params: SamplingParams,
        seen: SeenTokens,
        source: RandomSource,
        limit: int | None = None,
        floor: float = 0.0,
    ) -> Proposal:
        """Draft up to `limit` tokens (all gamma by default) after `anchor`, while c_k is at least `floor`."""
        hidden_KH = self.block_hidden(anchor)[:limit]
        drafter = self.packed.drafter
        head = confidence = None
        if isinstance(drafter, DSpark):
            head, confidence = drafter.markov_head, drafter.confidence_head
        return sample_chain(
            lambda: self.packed.head(hidden_KH),
            hidden_KH,
            anchor,
            head,
            confidence,
            params,
            seen,
            source,
            self.packed.draft_ids_Vd,
            floor,
            self.packed.temperatures,
        )

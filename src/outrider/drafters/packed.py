"""A block drafter ready to serve: packed weights, a draft KV cache of committed features, one block per call.

    extend    W_c, norm, then K and V of *all* layers in one matrix product -> appended to each session's cache
    propose   one block of K rows per request over [context KV ; block KV] -> sequential walk -> Proposals

Requests share every matrix product; only attention goes one by one. Block keys and values are written behind the
context and forgotten: a session's length moves only with committed features.
Shapes: R requests, N = R * K rows, T new tokens, L taps, K block rows, G kv heads, Q heads, E head dim, S slots.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.attention import Sight, serving_mask
from outrider.drafters.base import DraftCall, Proposal, longest_draft
from outrider.drafters.chain import sample_chain
from outrider.drafters.dflash import DFlash, DraftLayer, SwiGLU, rope_table
from outrider.drafters.dspark import DSpark
from outrider.drafters.kv import DraftKV
from outrider.drafters.method import Serving, check_fits
from outrider.drafters.projections import Projections
from outrider.drafters.serving import WEIGHTS_ALONE, capped
from outrider.target.lean import rotate
from outrider.target.linear import PackedLinear
from outrider.target.model import Target


class PackedLayer:
    """One draft layer over rows [N, H]; `attend` turns their fused queries, keys and values into [N, Q * E].

    Takes a `DraftLayer`, or a module whose parts have the same names.
    """

    def __init__(self, layer: Any, config: Any) -> None:
        self.eps = config.rms_norm_eps
        attn: Projections = layer.self_attn
        mlp: SwiGLU = layer.mlp
        self.input_norm = layer.input_layernorm.weight.detach()
        self.qkv = PackedLinear.fused(attn.q_proj, attn.k_proj, attn.v_proj)
        self.q_norm = attn.q_norm.weight.detach() if attn.qk_norm else None
        self.k_norm = attn.k_norm.weight.detach() if attn.qk_norm else None
        self.o = PackedLinear.fused(attn.o_proj)
        self.post_norm = layer.post_attention_layernorm.weight.detach()
        self.gate_up = PackedLinear.fused(mlp.gate_proj, mlp.up_proj)
        self.down = PackedLinear.fused(mlp.down_proj)

    def normed(self, x_NH: Tensor, weight_H: Tensor) -> Tensor:
        return F.rms_norm(x_NH, x_NH.shape[-1:], weight_H, self.eps)

    def mlp(self, x_NH: Tensor) -> Tensor:
        gate, up = self.gate_up(x_NH).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))

    def __call__(self, x_NH: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        x_NH = x_NH + self.o(attend(self.qkv(self.normed(x_NH, self.input_norm))))
        return x_NH + self.mlp(self.normed(x_NH, self.post_norm))


class PackedDrafter:
    """Serves one drafter for one target. Weights are copied; train the module, then build this again."""

    layer: ClassVar[type[PackedLayer]] = PackedLayer

    def __init__(self, drafter: DFlash, target: Target, serving: Serving = WEIGHTS_ALONE) -> None:
        config = drafter.config
        check_fits(config, target)
        serving.check(config)
        # A copy on the target's device and in float32: heads and distributions need it, and drafters are small.
        drafter = copy.deepcopy(drafter).to(target.device, torch.float32)
        self.config, self.drafter = config, drafter
        self.taps, self.gamma, self.sights = tuple(config.target_layer_ids), config.gamma, config.sights
        self.embed_VH, self.embed_scale = serving.embedding(target), target.embed_scale
        self.head = capped(serving.head(target), config.output_multiplier, config.final_logit_softcapping)
        folded = drafter.folded_state_dict()
        self.fc = PackedLinear(folded["fc.weight"])
        self.hidden_norm, self.norm = folded["hidden_norm.weight"], folded["norm.weight"]
        layers = [layer for layer in drafter.layers if isinstance(layer, DraftLayer)]
        self.layers = [self.layer(layer, config) for layer in layers]
        self.context_kv = PackedLinear.fused(
            *[proj for layer in layers for proj in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        )
        # As far as the *target* reads, whatever the drafter's own config says.
        positions = torch.arange(target.max_context + config.block_size, device=target.device)
        self.rope = rope_table(positions, config.head_dim, config.rope_theta)
        masks = [config.mask_token_id] * (config.block_size - 1)
        self.masks_M = torch.tensor(masks, dtype=torch.long, device=target.device)
        sequential = drafter.markov_head if isinstance(drafter, DSpark) else None
        confidence = drafter.confidence_head if isinstance(drafter, DSpark) else None
        self.heads = serving.chain_heads(target, sequential, confidence)

    def new_session(self, capacity: int) -> DraftSession:
        """An empty draft KV cache for one request of at most `capacity` committed tokens."""
        return DraftSession(self, capacity)

    def features(self, taps_TLD: Tensor, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Context keys and values [T, G, E] per layer for committed tokens at these positions."""
        T, G, E, eps = len(taps_TLD), self.config.num_key_value_heads, self.config.head_dim, self.config.rms_norm_eps
        context_TH = F.rms_norm(
            self.fc(taps_TLD.reshape(T, -1).float()), (self.config.hidden_size,), self.hidden_norm, eps
        )
        kv = self.context_kv(context_TH).view(T, len(self.layers), 2, G, E)
        cos, sin = (table[positions_T] for table in self.rope)
        return [
            (rotate(F.rms_norm(kv[:, i, 0], (E,), layer.k_norm, eps), cos, sin), kv[:, i, 1])
            for i, layer in enumerate(self.layers)
        ]

    def extend(
        self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], taps_TLD: Tensor | None
    ) -> None:
        """Append the features of newly committed tokens (raw taps [T, L, target hidden], session after session)."""
        assert taps_TLD is not None
        counts = [len(part) for part in tokens]
        positions = [
            torch.arange(s.length, s.length + n, device=taps_TLD.device) for s, n in zip(sessions, counts, strict=True)
        ]
        for i, (k, v) in enumerate(self.features(taps_TLD, torch.cat(positions))):
            for session, keys, values in zip(sessions, k.split(counts), v.split(counts), strict=True):
                session.layers[i].write(session.length, keys, values)
        for session, count in zip(sessions, counts, strict=True):
            session.length += count

    def block_hidden(self, sessions: Sequence[DraftSession], anchors: Sequence[int]) -> Tensor:
        """One block pass: normed hidden states of the prediction rows, [R, gamma, H]. No cache grows."""
        config, R = self.config, len(sessions)
        K, G, E, eps = config.block_size, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
        heads, device = config.num_attention_heads, self.embed_VH.device
        anchors_R1 = torch.tensor(anchors, device=device)[:, None]
        x = F.embedding(torch.cat((anchors_R1, self.masks_M.expand(R, -1)), dim=1).flatten(), self.embed_VH).float()
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        starts_R = torch.tensor([session.length for session in sessions], device=device)
        positions_N = (starts_R[:, None] + torch.arange(K, device=device)).flatten()
        cos, sin = (table[positions_N] for table in self.rope)
        seen = [session.visible() for session in sessions]

        def attend(i: int, qkv: Tensor) -> Tensor:
            q, k, v = qkv.view(R * K, -1, E).split((heads, G, G), dim=1)
            q = rotate(F.rms_norm(q, (E,), self.layers[i].q_norm, eps), cos, sin)
            k = rotate(F.rms_norm(k, (E,), self.layers[i].k_norm, eps), cos, sin)
            rows = zip(q.split(K), k.split(K), v.split(K), strict=True)
            parts = zip(sessions, seen, rows, strict=True)
            return torch.cat([session.attend(i, *own, visible[self.sights[i]]) for session, visible, own in parts])

        for i, layer in enumerate(self.layers):
            x = layer(x, partial(attend, i))
        return F.rms_norm(x.view(R, K, -1)[:, -config.gamma :], x.shape[-1:], self.norm, eps)

    def propose(self, calls: Sequence[DraftCall], floor: float = 0.0) -> list[Proposal]:
        """Draft for every call, gamma tokens each at most, while c_k is at least `floor`."""
        hidden_RKH = self.block_hidden([call.session for call in calls], [call.anchor for call in calls])
        return sample_chain(self.head, hidden_RKH[:, : longest_draft(calls, self.gamma)], calls, self.heads, floor)


class DraftSession:
    """The draft KV cache of one request: `length` committed features, then room for one block."""

    def __init__(self, packed: PackedDrafter, capacity: int) -> None:
        config = packed.config
        self.block, self.sights = config.block_size, set(packed.sights)
        self.layers = [DraftKV(config, capacity + config.block_size, packed.hidden_norm) for _ in packed.layers]
        self.length = 0

    def visible(self) -> dict[Sight, Tensor | None]:
        """What the rows of a block see, [K, S], for every kind of layer; None: everything."""
        device = self.layers[0].keys_GSE.device
        return {sight: serving_mask(sight, self.length, self.block, device) for sight in self.sights}

    def attend(self, layer: int, q_KQE: Tensor, k_KGE: Tensor, v_KGE: Tensor, visible_KS: Tensor | None) -> Tensor:
        """A block over the context and itself, [K, Q * E]."""
        self.layers[layer].write(self.length, k_KGE, v_KGE)
        return self.layers[layer].attend(q_KQE, self.length + self.block, visible_KS)

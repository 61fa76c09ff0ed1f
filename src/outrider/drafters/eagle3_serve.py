"""EAGLE-3 ready to serve: packed weights, a cache of committed pairs, one small pass per draft token.

    committed x_0 .. x_{c-1} with features f_0 .. f_{c-1}; the anchor is x_c
    pair i = (f_i, x_{i+1}), at the position of its token     pairs 0 .. c-2 are cached, f_{c-1} waits for its token
    draft 1       pair c-1 = (f_{c-1}, anchor)                written behind the committed pairs and forgotten
    draft k + 1   the pair (h of draft k, x_k)                likewise

A committed pair costs keys and values alone. Requests share every matrix product; only attention goes one by one.

See drafters/eagle3.py for the method. Shapes: R requests, M rows of one request, X = R M rows, T new tokens, L taps,
H hidden, P = 2 H a pair, Q heads, G kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.base import DraftCall, Proposal, longest_draft
from outrider.drafters.chain import sample_steps
from outrider.drafters.dflash import rope_table
from outrider.drafters.eagle3 import Eagle3, Eagle3Config
from outrider.drafters.kv import DraftKV
from outrider.drafters.method import Serving, check_fits
from outrider.target import Target
from outrider.target.lean import rotate
from outrider.target.linear import PackedLinear


class Eagle3Session:
    """One request: `count` committed tokens, keys and values of their pairs, and the feature that waits for a token."""

    def __init__(self, config: Eagle3Config, slots: int, like: Tensor) -> None:
        self.count = 0
        self.waiting_H = like.new_zeros(config.hidden_size)  # nothing precedes the first token
        self.kv = DraftKV(config, slots, like)

    @property
    def pairs(self) -> int:
        """Committed pairs in the cache."""
        return max(0, self.count - 1)

    def attend(self, q_MQE: Tensor, end: int, drafted_MW: Tensor | None) -> Tensor:
        """M rows over all committed pairs and, of the slots behind them, those in `drafted_MW`; [M, Q * E]."""
        visible_MS = None if drafted_MW is None else F.pad(drafted_MW, (self.pairs, 0), value=True)
        return self.kv.attend(q_MQE, end, visible_MS)


class Eagle3Drafter:
    """Serves one drafter for one target. Weights are copied; train the module, then build this again."""

    def __init__(self, module: Eagle3, target: Target, serving: Serving) -> None:
        config = module.config
        check_fits(config, target)
        serving.check(config)
        self.config = config
        self.taps, self.gamma = tuple(config.target_layer_ids), config.gamma
        self.embed_VH, self.embed_scale = serving.embedding(target), target.embed_scale
        self.head, self.heads = serving.head(target), serving.chain_heads(target)
        state = {
            name: tensor.to(target.device, torch.float32, copy=True)
            for name, tensor in module.folded_state_dict().items()
        }
        layer = "midlayer."
        attention = layer + "self_attn."
        self.fc, self.norm = PackedLinear(state["fc.weight"]), state["norm.weight"]
        self.tap_norms = [state[f"fc_norm.{i}.weight"] for i in range(len(self.taps))] if config.fc_norm else None
        self.joint_norm = state.get("input_norm.weight")
        self.input_norm, self.hidden_norm = state[layer + "input_layernorm.weight"], state[layer + "hidden_norm.weight"]
        self.kv, self.qkv = _joined(state, attention, "kv"), _joined(state, attention, "qkv")
        self.q_norm, self.k_norm = state.get(attention + "q_norm.weight"), state.get(attention + "k_norm.weight")
        self.o = PackedLinear(state[attention + "o_proj.weight"], state.get(attention + "o_proj.bias"))
        self.post_norm = state[layer + "post_attention_layernorm.weight"]
        self.gate_up = PackedLinear(torch.cat([state[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up")]))
        self.down = PackedLinear(state[layer + "mlp.down_proj.weight"])

    def new_session(self, capacity: int, drafted: int | None = None) -> Eagle3Session:
        """An empty cache of `capacity` committed tokens and `drafted` rows of one draft (None: those of a chain)."""
        return Eagle3Session(self.config, capacity + (self.gamma if drafted is None else drafted), self.norm)

    def features(self, taps_TLH: Tensor) -> Tensor:
        """f [T, H] from raw taps."""
        return self.fc(self._normed_taps(taps_TLH.float()).flatten(1))

    def extend(
        self, sessions: Sequence[Eagle3Session], tokens: Sequence[Sequence[int]], taps_TLD: Tensor | None
    ) -> None:
        """Cache the pairs that newly committed tokens complete (taps: raw, [T, L, H], session after session)."""
        assert taps_TLD is not None
        features_TH = self.features(taps_TLD)
        states: list[Tensor] = []
        completing: list[Sequence[int]] = []
        waiting_RH: list[Tensor] = []
        for session, part, new_TH in zip(sessions, tokens, features_TH.split([len(t) for t in tokens]), strict=True):
            waiting = torch.cat((session.waiting_H[None], new_TH))
            first = 0 if session.count else 1  # the very first token completes no pair
            states.append(waiting[first : len(part)])
            completing.append(part[first:])
            waiting_RH.append(waiting[-1].clone())  # not a view that keeps a prefill alive
        counts = [len(part) for part in completing]
        starts = [session.pairs for session in sessions]
        flat = [token for part in completing for token in part]
        kv = self.kv(self._pairs(torch.cat(states), flat)).unflatten(1, (2, -1, self.config.head_dim))
        new = kv[:, 0] if self.k_norm is None else self._rms(kv[:, 0], self.k_norm)
        keys = rotate(new, *self._rope([s + 1 + i for s, n in zip(starts, counts, strict=True) for i in range(n)]))
        for session, start, k, v in zip(sessions, starts, keys.split(counts), kv[:, 1].split(counts), strict=True):
            session.kv.write(start, k, v)
        for session, part, waiting in zip(sessions, tokens, waiting_RH, strict=True):  # nothing can fail any more
            session.count, session.waiting_H = session.count + len(part), waiting

    def propose(self, calls: Sequence[DraftCall], floor: float = 0.0) -> list[Proposal]:
        """A chain of up to gamma tokens per call, while their confidence is at least `floor`.

        Only an estimator could give one, and `outrider calibrate` fits none for this method: `floor` is idle as yet.
        """
        sessions: list[Eagle3Session] = [call.session for call in calls]
        state_RH = torch.stack([session.waiting_H for session in sessions])

        def step(k: int, previous: list[int]) -> Tensor:
            nonlocal state_RH
            state_RH = self.advance(sessions, state_RH, previous, k, k)
            return self.normed(state_RH)

        return sample_steps(self.head, step, longest_draft(calls, self.gamma), calls, self.heads, floor)

    def advance(
        self,
        sessions: Sequence[Eagle3Session],
        state_XH: Tensor,
        tokens: Sequence[int],
        depth: int,
        written: int,
        drafted_RMW: Tensor | None = None,
        spacing: int = 0,
    ) -> Tensor:
        """Drafting rows through the layer: h [X, H], as the next row takes it (before the final norm, or behind).

        Args:
            state_XH, tokens: the pairs, M per session, session after session.
            depth: drafts between the anchor and these tokens (0: they are anchors).
            written: rows of this draft that are in the cache already, behind the committed pairs.
            drafted_RMW: which rows of this draft a row sees, itself included (W = written + M); None: all.
            spacing: positions from one row of a request to the next: 0 for alternatives, 1 along a chain.
        """
        Q, G, E = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        R, M = len(sessions), len(tokens) // len(sessions)
        pairs_XP = self._pairs(state_XH, tokens)
        qkv = self.qkv(pairs_XP).view(R * M, -1, E)
        qk, v = qkv.split((Q + G, G), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self._rms(qk[:, :Q], self.q_norm), self._rms(qk[:, Q:], self.k_norm)), dim=1)
        qk = rotate(qk, *self._rope([s.count + depth + m * spacing for s in sessions for m in range(M)]))
        attended = []
        for r, session in enumerate(sessions):
            rows, start = slice(r * M, (r + 1) * M), session.pairs + written
            session.kv.write(start, qk[rows, Q:], v[rows])
            attended.append(session.attend(qk[rows, :Q], start + M, None if drafted_RMW is None else drafted_RMW[r]))
        residual_XH = pairs_XP[:, self.config.hidden_size :] if self.config.norm_before_residual else state_XH
        x_XH = residual_XH + self.o(torch.cat(attended))
        gate, up = self.gate_up(self._rms(x_XH, self.post_norm)).chunk(2, dim=-1)
        x_XH = x_XH + self.down(F.silu(gate).mul_(up))
        return self._rms(x_XH, self.norm) if self.config.norm_output else x_XH

    def normed(self, state_XH: Tensor) -> Tensor:
        """What the head reads."""
        return state_XH if self.config.norm_output else self._rms(state_XH, self.norm)

    def _normed_taps(self, taps_TLH: Tensor) -> Tensor:
        if self.tap_norms is not None:
            return torch.stack([self._rms(taps_TLH[:, i], weight) for i, weight in enumerate(self.tap_norms)], dim=1)
        return taps_TLH if self.joint_norm is None else self._rms(taps_TLH.flatten(1), self.joint_norm)

    def _pairs(self, state_XH: Tensor, tokens: Sequence[int]) -> Tensor:
        tokens_X = torch.tensor(tokens, dtype=torch.long, device=self.embed_VH.device)
        embedded_XH = F.embedding(tokens_X, self.embed_VH).float() * self.embed_scale
        return torch.cat((self._rms(embedded_XH, self.input_norm), self._rms(state_XH, self.hidden_norm)), dim=-1)

    def _rms(self, x_XH: Tensor, weight_H: Tensor) -> Tensor:
        return F.rms_norm(x_XH, x_XH.shape[-1:], weight_H, self.config.rms_norm_eps)

    def _rope(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        positions_X = torch.tensor(positions, dtype=torch.long, device=self.embed_VH.device)
        return rope_table(positions_X, self.config.head_dim, self.config.rope_theta)


def _joined(state: Mapping[str, Tensor], attention: str, names: str) -> PackedLinear:
    """One matrix for some of the projections q, k, v; their biases, where they have any."""
    weights = [state[f"{attention}{name}_proj.weight"] for name in names]
    biases = [state.get(f"{attention}{name}_proj.bias") for name in names]
    bias = torch.cat([one for one in biases if one is not None]) if biases[0] is not None else None
    return PackedLinear(torch.cat(weights), bias)

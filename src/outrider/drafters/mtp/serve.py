"""MTP ready to serve: packed weights, one key cache per depth, and a chain of steps after the anchor.

    committed tokens x_0 .. x_{c-1} and their states h_0^0 .. h_{c-1}^0 are known; the anchor is x_c
    rows of depth k whose token is committed:  0 .. c-1-k      cached; their states wait for depth k + 1
    rows of depth k that a draft completes:    c-k .. c-1      k of them: the newest row's token is draft k - 1
    draft k > D:                               row c-1+k-D of depth D, on its own last output

The rows a draft completes are written behind those that are final, and forgotten: a session's lengths follow from the
number of committed tokens alone. Requests share every matrix product; only attention goes one by one.

See drafters/mtp/module.py for the method. Shapes: T rows of all requests, m rows of one, H hidden, Q heads, G kv heads,
E head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.base import DraftCall, Proposal, longest_draft
from outrider.drafters.chain import sample_steps
from outrider.drafters.dflash import rope_table
from outrider.drafters.kv import DraftKV
from outrider.drafters.method import Serving, check_fits
from outrider.drafters.mtp.module import MTP, MTPConfig, MTPModule
from outrider.drafters.packed import PackedLayer
from outrider.target import Target
from outrider.target.lean import rotate
from outrider.target.linear import PackedLinear


class MTPSession:
    """One request: `count` committed tokens and, per depth, keys, values and the states that wait for a token."""

    def __init__(self, config: MTPConfig, capacity: int, like: Tensor) -> None:
        self.count = 0
        self.depths = [DraftKV(config, capacity + config.gamma, like) for _ in range(config.num_modules)]
        self.waiting = [like.new_empty(0, config.hidden_size) for _ in range(config.num_modules)]

    def attend(self, depth: int, start: int, q_mQE: Tensor) -> Tensor:
        """The rows from `start` on over themselves and all before them, causally: [m, Q * E]."""
        end, visible_mS = start + len(q_mQE), None
        if len(q_mQE) > 1:
            rows_m1 = torch.arange(start, end, device=q_mQE.device)[:, None]
            visible_mS = torch.arange(end, device=q_mQE.device) <= rows_m1
        return self.depths[depth].attend(q_mQE, end, visible_mS)


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of one request at one depth: what they read, their first cache slot and first position."""

    state_mH: Tensor
    tokens: Sequence[int]
    start: int
    position: int


class _PackedModule(PackedLayer):
    def __init__(self, module: MTPModule, config: MTPConfig) -> None:
        super().__init__(module, config)
        self.enorm, self.hnorm = module.enorm.weight.detach(), module.hnorm.weight.detach()
        self.eh = PackedLinear.fused(module.eh_proj)
        self.norm = module.norm.weight.detach()


class MTPDrafter:
    """Serves MTP for one target. Weights are copied; train the module, then build this again."""

    def __init__(self, drafter: MTP, target: Target, serving: Serving) -> None:
        config = drafter.config
        check_fits(config, target, final=True)
        serving.check(config)
        drafter = copy.deepcopy(drafter).to(target.device, torch.float32)  # heads and distributions need float32
        self.config = config
        self.taps, self.gamma = tuple(config.target_layer_ids), config.gamma
        self.modules = [_PackedModule(drafter.module(k), config) for k in range(config.num_modules)]
        self.embed_VH, self.embed_scale = serving.embedding(target), target.embed_scale
        self.head, self.heads = serving.head(target), serving.chain_heads(target)
        positions = torch.arange(target.max_context + config.gamma + 1, device=target.device)
        self.rope = rope_table(positions, config.head_dim, config.rope_theta)

    def new_session(self, capacity: int) -> MTPSession:
        """Empty caches for one request of at most `capacity` committed tokens."""
        return MTPSession(self.config, capacity, self.modules[0].norm)

    def extend(self, sessions: Sequence[MTPSession], tokens: Sequence[Sequence[int]], taps_TLD: Tensor | None) -> None:
        """Take newly committed tokens: each depth caches the rows that they complete (taps: [T, 1, H])."""
        assert taps_TLD is not None
        states = list(taps_TLD[:, 0].float().split([len(part) for part in tokens]))
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
            session.count, session.waiting = session.count + len(part), left

    def _completed(
        self, depth: int, session: MTPSession, tokens: Sequence[int], state_mH: Tensor
    ) -> tuple[_Rows, Tensor]:
        """The rows of a depth whose token is among `tokens`, and the states beyond them, which wait."""
        start = max(0, session.count - depth - 1)
        rows = max(0, session.count + len(tokens) - depth - 1 - start)
        states = torch.cat((session.waiting[depth], state_mH))
        return _Rows(states[:rows], tokens[len(tokens) - rows :], start, start + 1), states[rows:].clone()

    def propose(self, calls: Sequence[DraftCall], floor: float = 0.0) -> list[Proposal]:
        """A chain of up to gamma tokens per call, while their confidence is at least `floor`.

        Only an estimator could give one, and `outrider calibrate` fits none for this method: `floor` is idle as yet.
        """
        sessions: list[MTPSession] = [call.session for call in calls]
        chains: list[list[int]] = [[] for _ in calls]
        states = [self.modules[0].norm.new_zeros(0, self.config.hidden_size)] * len(calls)

        def step(k: int, previous: list[int]) -> Tensor:
            nonlocal states
            for chain, token in zip(chains, previous, strict=True):
                chain.append(token)
            rows = [self._drafted(k, *one) for one in zip(sessions, chains, states, strict=True)]
            states = self._run(min(k, self.config.num_modules - 1), sessions, rows)
            return torch.stack([state_mH[-1] for state_mH in states])

        return sample_steps(self.head, step, longest_draft(calls, self.gamma), calls, self.heads, floor)

    def _drafted(self, k: int, session: MTPSession, chain: Sequence[int], state_mH: Tensor) -> _Rows:
        """The rows whose tokens are the anchor and the drafts so far (`chain`), given what step k - 1 made."""
        further = max(0, k + 1 - self.config.num_modules)  # rows behind the newest committed state
        if not further:
            state_mH = torch.cat((session.waiting[k], state_mH))[-k - 1 :]
        rows = state_mH[-1:] if further else state_mH
        if not len(rows):  # nothing is committed before the anchor: the state before the text is zero
            rows = self.modules[0].norm.new_zeros(1, self.config.hidden_size)
        end = max(1, session.count) + further
        return _Rows(rows, chain[len(chain) - len(rows) :], end - len(rows), session.count + further + 1 - len(rows))

    def _run(
        self, depth: int, sessions: Sequence[MTPSession], rows: Sequence[_Rows], keys_only: bool = False
    ) -> list[Tensor]:
        """Rows of one depth through its module, their keys into the caches: h [m, H] per request."""
        config, module, counts = self.config, self.modules[depth], [len(part.tokens) for part in rows]
        Q, G, E, eps = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
        device = self.embed_VH.device
        tokens_T = torch.tensor([token for part in rows for token in part.tokens], dtype=torch.long, device=device)
        positions_T = torch.cat([torch.arange(p.position, p.position + n) for p, n in zip(rows, counts, strict=True)])
        embedded_TH = F.embedding(tokens_T, self.embed_VH).float() * self.embed_scale
        state_TH = module.normed(torch.cat([part.state_mH for part in rows]), module.hnorm)
        u_TH = module.eh(torch.cat((module.normed(embedded_TH, module.enorm), state_TH), dim=-1))
        qkv = module.qkv(module.normed(u_TH, module.input_norm)).view(len(tokens_T), Q + 2 * G, E)
        q, k, v = qkv.split((Q, G, G), dim=1)
        if module.q_norm is not None:
            q, k = F.rms_norm(q, (E,), module.q_norm, eps), F.rms_norm(k, (E,), module.k_norm, eps)
        cos, sin = (table[positions_T.to(device)] for table in self.rope)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        for session, part, k_mGE, v_mGE in zip(sessions, rows, k.split(counts), v.split(counts), strict=True):
            session.depths[depth].write(part.start, k_mGE, v_mGE)
        if keys_only:
            return []
        attended = [
            session.attend(depth, part.start, q_mQE)
            for session, part, q_mQE in zip(sessions, rows, q.split(counts), strict=True)
        ]
        x_TH = u_TH + module.o(torch.cat(attended))
        x_TH = x_TH + module.mlp(module.normed(x_TH, module.post_norm))
        return list(module.normed(x_TH, module.norm).split(counts))

"""MTP against plain numpy, trained and served; what it may see; that it learns, and decodes what the target would."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.decoding.generate import generate
from outrider.decoding.request import Output, StopRules
from outrider.drafters.base import BlockInputs, DraftCall, DrafterWeights
from outrider.drafters.layers import BlockLayout
from outrider.drafters.mtp import MTP, MTPConfig
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from outrider.training.dataset import choose_draft_ids
from outrider.training.objective import scatter
from tests.toys.alignment import build, serve
from tests.toys.drafters import make_mtp
from tests.toys.targets import toy_samples, toy_target
from tests.toys.training import lower_loss

TOLERANCE = 1e-4
DEPTHS = [(1, 1), (1, 7), (2, 3), (3, 3), (3, 7)]  # (modules, gamma)
Array = NDArray[np.float64]


class Reference:
    """The definition, row by row: depth k is recomputed from the first row on for every draft."""

    def __init__(self, drafter: MTP, target: Target) -> None:
        self.config = drafter.config
        self.weights = {name: tensor.double().numpy() for name, tensor in drafter.folded_state_dict().items()}
        self.embed = target.embed_VD.double().numpy() * target.embed_scale

    def drafts(self, states_SH: Array, tokens: Sequence[int], anchor: int) -> Array:
        """h^1 .. h^gamma of the row before `anchor` [gamma, H]; `tokens` go on behind the anchor."""
        first = anchor - 1 if anchor else -1
        states = list(states_SH[:anchor]) or [np.zeros(self.config.hidden_size)]
        modules, inputs, found = self.config.num_modules, [], []
        for k in range(1, self.config.gamma + 1):
            depth = min(k, modules) - 1
            if k <= modules:
                last = anchor - 1 + k
                inputs = [self.combine(depth, state, tokens[last - back]) for back, state in _from_last(states)]
            else:
                inputs = [*inputs, self.combine(depth, states[-1], tokens[first + k])]
            states = self.layer(depth, inputs)
            found.append(states[-1])
        return np.stack(found)

    def combine(self, depth: int, state_H: Array, token: int) -> Array:
        both = [self.norm(depth, "enorm", self.embed[token]), self.norm(depth, "hnorm", state_H)]
        return self.weight(depth, "eh_proj") @ np.concatenate(both)

    def layer(self, depth: int, inputs: list[Array]) -> list[Array]:
        config, E = self.config, self.config.head_dim
        groups = config.num_attention_heads // config.num_key_value_heads
        normed = [self.norm(depth, "input_layernorm", u) for u in inputs]
        q, k, v = (
            [(self.weight(depth, f"self_attn.{name}_proj") @ x).reshape(-1, E) for x in normed] for name in "qkv"
        )
        if config.qk_norm:
            q = [np.stack([self.norm(depth, "self_attn.q_norm", head) for head in row]) for row in q]
            k = [np.stack([self.norm(depth, "self_attn.k_norm", head) for head in row]) for row in k]
        q, k = [[self.rotate(x, i) for i, x in enumerate(rows)] for rows in (q, k)]
        states = []
        for i, u in enumerate(inputs):
            heads = []
            for h in range(config.num_attention_heads):
                scores = np.array([q[i][h] @ k[j][h // groups] for j in range(i + 1)]) / np.sqrt(E)
                weights = np.exp(scores - scores.max())
                heads.append(sum(w * v[j][h // groups] for j, w in enumerate(weights / weights.sum())))
            x = u + self.weight(depth, "self_attn.o_proj") @ np.concatenate(heads)
            y = self.norm(depth, "post_attention_layernorm", x)
            gate, up = self.weight(depth, "mlp.gate_proj") @ y, self.weight(depth, "mlp.up_proj") @ y
            x = x + self.weight(depth, "mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)
            states.append(self.norm(depth, "norm", x))
        return states

    def weight(self, depth: int, name: str) -> Array:
        return self.weights[f"depths.{depth}.{name}.weight"]

    def norm(self, depth: int, name: str, x: Array) -> Array:
        return x / np.sqrt((x**2).mean() + self.config.rms_norm_eps) * self.weight(depth, name)

    def rotate(self, x_QE: Array, position: int) -> Array:
        half = x_QE.shape[-1] // 2
        angle = position * self.config.rope_theta ** (-np.arange(half) / half)
        a, b = x_QE[:, :half], x_QE[:, half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1)


def _from_last(states: list[Array]) -> list[tuple[int, Array]]:
    return [(len(states) - 1 - i, state) for i, state in enumerate(states)]


def text(length: int, seed: int) -> tuple[list[int], Tensor]:
    """Random tokens, and states that stand for the target's [length, 1, H]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 97, (length,), generator=generator).tolist()
    return tokens, 5 * torch.randn(length, 1, 32, generator=generator)


def block_inputs(target: Target, parts: list[tuple[list[int], Tensor, list[int]]], gamma: int) -> BlockInputs:
    """As the training room makes them: (tokens, aux hidden states, anchors) per sequence; tokens reach gamma beyond an
    anchor.
    """
    lengths = [anchors[-1] for _, _, anchors in parts]
    anchors_N = torch.tensor([anchor for _, _, anchors in parts for anchor in anchors])
    sequence_N = torch.tensor([i for i, (_, _, anchors) in enumerate(parts) for _ in anchors])
    read, following = (
        torch.tensor(
            [t for (tokens, _, _), length in zip(parts, lengths, strict=True) for t in tokens[ahead : length + ahead]]
        )
        for ahead in (0, 1)
    )
    return BlockInputs(
        torch.cat([aux_layers[:length] for (_, aux_layers, _), length in zip(parts, lengths, strict=True)]),
        read,
        following,
        layout=BlockLayout(lengths, anchors_N, sequence_N),
        previous_NK=torch.tensor([tokens[a : a + gamma] for tokens, _, anchors in parts for a in anchors]),
        embed=lambda tokens: F.embedding(tokens, target.embed_VD) * target.embed_scale,
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("modules", "gamma"), DEPTHS)
@torch.no_grad()
def test_the_training_forward_is_the_definition(family: str, modules: int, gamma: int) -> None:
    target = toy_target(family)
    drafter = make_mtp(target, modules, gamma)
    reference = Reference(drafter, target)
    anchors = [[0, 1, 2, 9], [0], [4, 5, 12]]  # 0: a prompt of one token has no state before its anchor
    parts = [(*text(30, seed), positions) for seed, positions in enumerate(anchors)]
    rows = iter(drafter.rows(block_inputs(target, parts, gamma)).hidden_NKH)
    for tokens, aux_layers, positions in parts:
        for anchor in positions:
            expected = reference.drafts(aux_layers[:, 0].double().numpy(), tokens, anchor)
            np.testing.assert_allclose(next(rows), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("modules", "gamma"), [(1, 4), (3, 4)])
@torch.no_grad()
def test_bfloat16_precision_keeps_states_in_float32(modules: int, gamma: int) -> None:
    target = toy_target("qwen3")
    drafter = make_mtp(target, modules, gamma)
    inputs = block_inputs(target, [(*text(30, 0), [0, 2, 9]), (*text(30, 1), [4, 12])], gamma)
    expected = drafter.rows(inputs).hidden_NKH
    with torch.autocast("cpu", torch.bfloat16):
        found = drafter.rows(inputs).hidden_NKH
    assert found.dtype == torch.float32
    assert 0 < (found - expected).abs().mean() < 0.02 * expected.abs().mean()


class Drawn:
    """A random source that draws the given tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def choose(self, probs_V: Tensor) -> int:
        return self.tokens.pop(0)

    def accept(self, probability: float) -> bool:
        raise AssertionError("drafting never accepts")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("modules", "gamma"), DEPTHS)
@torch.inference_mode()
def test_served_rounds_are_the_definition(family: str, modules: int, gamma: int) -> None:
    """Two requests at once, over uneven rounds. One begins with its anchor alone; drafts of the other are rejected."""
    target = toy_target(family)
    drafter = make_mtp(target, modules, gamma)
    served, reference = DrafterWeights(drafter).serve(target), Reference(drafter, target)
    texts = [text(60, 1), text(60, 2)]
    sessions = [served.new_session(40) for _ in texts]
    seen: list[Tensor] = []
    inner = served.head
    served.head = lambda hidden: (seen.append(hidden), inner(hidden))[1]
    committed = [0, 0]
    for counts in ([0, 5], [1, 2], [1, 1], [9, 3], [2, 4], [1, 1]):
        new = [range(at, at + count) for at, count in zip(committed, counts, strict=True)]
        tokens = [[x[i] for i in part] for (x, _), part in zip(texts, new, strict=True)]
        aux_layers = torch.cat([h[part.start : part.stop] for (_, h), part in zip(texts, new, strict=True)])
        served.extend(sessions, tokens, aux_layers)
        committed = [part.stop for part in new]
        chains = [  # what is drawn is the text in one request and something else in the other
            [*x[: n + 1], *(x[n + 1 : n + gamma] if r else text(gamma - 1, n)[0])]
            for r, ((x, _), n) in enumerate(zip(texts, committed, strict=True))
        ]
        calls = [
            DraftCall(session, chain[n], SamplingParams(temperature=1.0), SeenTokens(97), Drawn([*chain[n + 1 :], 0]))
            for session, chain, n in zip(sessions, chains, committed, strict=True)
        ]
        seen.clear()
        proposals = served.propose(calls)
        hidden_KRH = torch.stack(seen)
        for r, ((_, h), chain, n) in enumerate(zip(texts, chains, committed, strict=True)):
            assert proposals[r].tokens == [*chain[n + 1 :], 0]
            expected = reference.drafts(h[:, 0].double().numpy(), chain, n)
            np.testing.assert_allclose(hidden_KRH[:, r], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("modules", "gamma"), [(1, 3), (3, 4)])
@torch.no_grad()
def test_a_row_sees_its_own_past_only(modules: int, gamma: int) -> None:
    target = toy_target()
    drafter = make_mtp(target, modules, gamma)
    anchors = [[3, 8], [2, 6, 11]]
    texts = [text(30, seed) for seed in range(2)]
    before = drafter.rows(block_inputs(target, [(*t, a) for t, a in zip(texts, anchors, strict=True)], gamma))
    numbered = [(s, a) for s, positions in enumerate(anchors) for a in positions]
    for n, (sequence, anchor) in enumerate(numbered):
        for k in range(gamma):
            # all that row (n, k) may not see: states from the anchor on, tokens behind x_{a+k}, and the other sequence
            others = [text(30, 7 + s) for s in range(2)]
            tokens, aux_layers = texts[sequence]
            strange_tokens, strange_aux_layers = others[sequence]
            known = anchor + k + 1
            others[sequence] = (
                [*tokens[:known], *strange_tokens[known:]],
                torch.cat((aux_layers[:anchor], strange_aux_layers[anchor:])),
            )
            changed = block_inputs(target, [(*t, a) for t, a in zip(others, anchors, strict=True)], gamma)
            after = drafter.rows(changed).hidden_NKH
            torch.testing.assert_close(after[n, k], before.hidden_NKH[n, k], atol=1e-5, rtol=0)
            # and the test can fail: the token before x_k matters
            others[sequence][0][anchor + k] ^= 1
            moved = block_inputs(target, [(*t, a) for t, a in zip(others, anchors, strict=True)], gamma)
            assert (drafter.rows(moved).hidden_NKH[n, k] - before.hidden_NKH[n, k]).abs().max() > 1e-3


@pytest.mark.parametrize(("modules", "gamma"), [(1, 3), (2, 3)])
def test_loss_falls(modules: int, gamma: int) -> None:
    """A few steps on one text, whose states are the target's, from weights of the target."""
    target = toy_target()
    config = MTPConfig.from_target(target, num_modules=modules, gamma=gamma)
    drafter = MTP(config)
    tokens = text(40, 0)[0]
    drafter.initialize_from(target, [tokens])
    aux_layers, _ = target.prefill_packed([tokens], drafter.config.target_layer_ids)
    anchors = list(range(3, 30))
    inputs = block_inputs(target, [(tokens, aux_layers[0].clone(), anchors)], gamma)
    labels_NK = torch.tensor([tokens[a + 1 : a + 1 + gamma] for a in anchors])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)

    def step() -> float:
        logits = drafter.rows(inputs).hidden_NKH @ target.head_VD.T
        loss = F.cross_entropy(logits.flatten(0, 1), labels_NK.flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
        optimizer.step()
        return loss.item()

    lower_loss(step, to=0.7)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_begin_as_the_targets_last_layer(family: str) -> None:
    target = toy_target(family)
    drafter = MTP(MTPConfig.from_target(target, num_modules=2, gamma=2))
    tokens = text(20, 3)[0]
    drafter.initialize_from(target, [tokens])
    layer = target.model.model.layers[-1].state_dict()
    for depth in range(2):
        mine = drafter.module(depth).state_dict()
        assert set(layer) <= set(mine)
        assert all(torch.equal(mine[name], tensor) for name, tensor in layer.items())
    hidden = target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-2][0, 1:]
    module = drafter.module(0)
    with torch.no_grad():
        u = module.combine(torch.randn(500, 32), torch.randn(500, 32))
    torch.testing.assert_close(u.square().mean(), hidden.square().mean(), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("family", "modules", "gamma", "draft_vocab"),
    [("llama", 1, 1, 97), ("llama", 1, 7, 40), ("llama", 3, 3, 97), ("qwen3", 2, 7, 97), ("gemma", 2, 3, 40)],
)
def test_greedy_decoding_is_plain_decoding(family: str, modules: int, gamma: int, draft_vocab: int) -> None:
    model = toy_target(family).model
    model.get_output_embeddings().weight.data[6:] *= 0.1  # few likely tokens: some drafts are accepted
    target = Target(model, None, "toy")
    ids = torch.arange(draft_vocab) if draft_vocab < 97 else None
    drafter = DrafterWeights(make_mtp(target, modules, gamma, draft_vocab), ids).serve(target)
    rules = StopRules(20, stop_ids=())
    rounds: list[Output] = []
    for prompt in ([5], text(9, 4)[0]):
        drafted = generate(target, prompt, drafter, rules=rules)
        assert drafted.tokens == generate(target, prompt, None, rules=rules).tokens
        rounds += drafted.rounds
    assert max(r.proposed for r in rounds) == gamma and sum(r.accepted for r in rounds) > 0


@pytest.mark.parametrize("draft_vocab", [97, 40])
@pytest.mark.parametrize(("modules", "gamma"), [(1, 1), (1, 4), (3, 4)])
def test_trained_equals_served(modules: int, gamma: int, draft_vocab: int) -> None:
    """The training room's forward and the decoding loop give the same acceptance at the same anchors."""
    target, samples = toy_target("qwen3"), toy_samples(3)
    drafter = make_mtp(target, modules, gamma, draft_vocab)
    ids = choose_draft_ids(samples, 97, draft_vocab, frozenset({1}))
    served = DrafterWeights(drafter, ids if draft_vocab < 97 else None).serve(target)
    found = [serve(served, target, sample) for sample in samples]
    batch, compute = build(drafter, target, samples, ids, [(i, sorted(visited)) for i, visited in enumerate(found)])
    with torch.no_grad():
        trained_NK = scatter(compute(drafter, batch).acceptance_N, batch.supervised_NK)
    served_NK = torch.stack([visited[anchor] for visited in found for anchor in sorted(visited)])
    compared = batch.supervised_NK & served_NK.isfinite()
    torch.testing.assert_close(trained_NK[compared], served_NK[compared], atol=TOLERANCE, rtol=0)
    assert compared.sum() > 30


def test_saved_and_loaded(tmp_path: Path) -> None:
    target = toy_target()
    drafter = make_mtp(target, 2, 3)
    save_drafter(Checkpoint(DrafterWeights(drafter)), tmp_path / "drafter")
    loaded = load_checkpoint(tmp_path / "drafter").weights.module
    assert isinstance(loaded, MTP) and loaded.config == drafter.config
    inputs = block_inputs(target, [(*text(30, 0), [2, 9])], 3)
    assert torch.equal(loaded.rows(inputs).hidden_NKH, drafter.rows(inputs).hidden_NKH)


@torch.inference_mode()
def test_one_request_with_less_room_stops_earlier_than_the_other() -> None:
    target = toy_target()
    served = DrafterWeights(make_mtp(target, 1, 4)).serve(target)
    sessions = [served.new_session(20) for _ in range(2)]
    tokens, aux_layers = text(6, 0)
    served.extend(sessions, [tokens, tokens[:2]], torch.cat((aux_layers, aux_layers[:2])))
    calls = [
        DraftCall(s, 9, SamplingParams(), SeenTokens(97), SeededSource(0), limit)
        for s, limit in zip(sessions, (1, 3), strict=True)
    ]
    both = [proposal.tokens for proposal in served.propose(calls)]
    assert [len(tokens) for tokens in both] == [1, 3]
    assert both == [served.propose([call])[0].tokens for call in calls]  # nothing of a draft is remembered


def test_config_refuses_what_it_cannot_be() -> None:
    target = toy_target()
    config = make_mtp(target, 1, 2).config
    for change, message in [
        ({"num_modules": 3}, "num_modules 3 must be between 1 and gamma 2"),
        ({"target_layer_ids": (2,)}, r"target_layer_ids \[2\] must be \[4\]"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **change)

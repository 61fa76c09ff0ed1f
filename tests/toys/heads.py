"""What the tests of Medusa and Hydra share: texts with random features, their training forward, and served rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import BlockInputs, DraftCall, Drafter
from outrider.drafters.draft import Draft
from outrider.drafters.layers import BlockLayout
from outrider.drafters.medusa import HeadsDrafter, HeadsModule, MedusaConfig
from outrider.sampling import SamplingParams, SeenTokens
from outrider.target.model import Target
from outrider.training.dataset import choose_draft_ids
from tests.toys.alignment import check_alignment
from tests.toys.oracle import row_of
from tests.toys.targets import toy_samples, toy_target
from tests.toys.training import lower_loss

VOCAB, HIDDEN = 97, 32


def toy_heads(config: type[MedusaConfig] = MedusaConfig, **changes: int) -> MedusaConfig:
    """The config of Medusa's or Hydra's heads for the toy targets."""
    fields = {"draft_vocab_size": VOCAB, "num_heads": 4, "num_layers": 2, **changes}
    return config(hidden_size=HIDDEN, vocab_size=VOCAB, num_target_layers=5, **fields)


@dataclass
class Text:
    tokens_T: Tensor
    features_TH: Tensor


def toy_texts(count: int = 3, length: int = 24, seed: int = 0) -> list[Text]:
    g = torch.Generator().manual_seed(seed)
    return [
        Text(torch.randint(VOCAB, (length,), generator=g), torch.randn(length, HIDDEN, generator=g))
        for _ in range(count)
    ]


def training_inputs(target: Target, texts: list[Text], anchors: list[list[int]], gamma: int) -> BlockInputs:
    """The training forward's inputs for these anchors of each text."""
    lengths = [max(positions, default=0) for positions in anchors]
    sequence = [i for i, positions in enumerate(anchors) for _ in positions]
    previous = [texts[i].tokens_T[a : a + gamma] for i, positions in enumerate(anchors) for a in positions]
    return BlockInputs(
        aux_SLD=torch.cat([text.features_TH[:n] for text, n in zip(texts, lengths, strict=True)])[:, None],
        tokens_S=torch.cat([text.tokens_T[:n] for text, n in zip(texts, lengths, strict=True)]),
        next_tokens_S=torch.cat([text.tokens_T[1 : n + 1] for text, n in zip(texts, lengths, strict=True)]),
        layout=BlockLayout(lengths, torch.tensor([a for p in anchors for a in p]), torch.tensor(sequence)),
        previous_NK=torch.stack(previous),
        embed=lambda tokens: F.embedding(tokens, target.embed_VD) * target.embed_scale,
    )


class Forced:
    """Draws the given tokens: teacher forcing through the production sampling chain."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = list(indices)

    def choose(self, probs_V: Tensor) -> int:
        return self.indices.pop(0)

    def accept(self, probability: float) -> bool:
        raise AssertionError("drafting never accepts")


def forced_call(drafter: HeadsDrafter, text: Text, at: int, session: object, limit: int | None = None) -> DraftCall:
    """A block after the anchor at `at` that draws the text's own tokens."""
    tokens = text.tokens_T.tolist()
    return DraftCall(
        session,
        tokens[at],
        SamplingParams(temperature=1.0),
        SeenTokens(VOCAB),
        Forced(tokens[at + 1 : at + 1 + drafter.gamma]),
        limit,
    )


def served_rounds(drafter: HeadsDrafter, texts: list[Text]) -> Iterator[tuple[Text, int, Draft]]:
    """(text, anchor position, proposal) of three requests that start, grow and stand still at their own pace."""
    sessions = [drafter.new_session(64) for _ in texts]
    at, growth = [0] * len(texts), cycle([0, 5, 7, 1, 0, 3, 2, 1, 4])
    for _ in range(4):
        calls = [forced_call(drafter, *each) for each in zip(texts, at, sessions, strict=True)]
        yield from zip(texts, at, drafter.propose(calls), strict=True)
        grown = [next(growth) for _ in texts]
        tokens = [text.tokens_T[a : a + g].tolist() for text, a, g in zip(texts, at, grown, strict=True)]
        aux_layers = torch.cat([text.features_TH[a : a + g] for text, a, g in zip(texts, at, grown, strict=True)])
        drafter.extend(sessions, tokens, aux_layers[:, None])
        at = [a + g for a, g in zip(at, grown, strict=True)]


Reference = Callable[[HeadsModule, np.ndarray, np.ndarray], np.ndarray]  # feature [H], embeddings [k, H] -> h_k [H]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def reference_layers(head: torch.nn.Module, feature_H: np.ndarray, inputs_Z: np.ndarray) -> np.ndarray:
    """One head in float64."""
    state = {name: tensor.double().numpy() for name, tensor in head.state_dict().items()}
    x_H = feature_H + silu(state["layers.0.weight"] @ inputs_Z + state["layers.0.bias"])
    for layer in range(1, len(state) // 2):
        x_H = x_H + silu(state[f"layers.{layer}.weight"] @ x_H + state[f"layers.{layer}.bias"])
    return x_H


def check_rows(module: HeadsModule, target: Target, reference: Reference) -> None:
    """The training forward against a numpy reference, first tokens and sequences without anchors included."""
    texts, anchors = toy_texts(), [[0, 3, 9], [], [5]]
    rows_NKH = module.rows(training_inputs(target, texts, anchors, module.config.gamma)).hidden_NKH
    expected = [(texts[i], a) for i, positions in enumerate(anchors) for a in positions]
    for row_KH, (text, at) in zip(rows_NKH.detach().numpy(), expected, strict=True):
        for k in range(module.config.gamma):
            np.testing.assert_allclose(row_KH[k], hidden_at(module, target, reference, text, at, k), atol=1e-4)


def hidden_at(module: HeadsModule, target: Target, reference: Reference, text: Text, at: int, k: int) -> np.ndarray:
    feature = text.features_TH[at - 1] if at else torch.zeros(HIDDEN)
    embedded = target.embed_VD[text.tokens_T[at : at + k + 1]] * target.embed_scale
    return reference(module, feature.double().numpy(), embedded.double().numpy())


def check_serving(
    module: HeadsModule, drafter: HeadsDrafter, target: Target, reference: Reference, ids: Tensor | None = None
) -> None:
    """Served distributions against softmax(head h_k) of the reference, over uneven rounds."""
    kept = torch.arange(VOCAB) if ids is None else ids
    for text, at, proposal in served_rounds(drafter, toy_texts()):
        assert len(proposal.tokens) == module.config.gamma
        for k in range(module.config.gamma):
            logits = target.head_VD[kept].double().numpy() @ hidden_at(module, target, reference, text, at, k)
            expected = np.zeros(VOCAB)
            expected[kept.numpy()] = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            np.testing.assert_allclose(row_of(proposal, k).numpy(), expected, atol=1e-4)


def check_trained_equals_served(module: HeadsModule, draft_vocab: int) -> None:
    """The objective's acceptance and that of the decoding loop, at every anchor of some texts."""
    samples = toy_samples(4)
    ids = choose_draft_ids(samples, VOCAB, draft_vocab, frozenset({1}))
    assert check_alignment(toy_target("qwen3"), module, samples, ids) > 50


def fit(module: HeadsModule, target: Target, inputs: BlockInputs, labels_NK: Tensor, *, to: float) -> None:
    """Plain cross-entropy training, until the loss is below `to` x the first one."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)

    def step() -> float:
        logits_NKV = module.rows(inputs).hidden_NKH @ target.head_VD.T
        loss = F.cross_entropy(logits_NKV.flatten(0, 1), labels_NK.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    lower_loss(step, to=to)


def check_learns(module: HeadsModule, target: Target) -> None:
    """Cross-entropy on a few texts falls, and every parameter takes part."""
    inputs = training_inputs(target, toy_texts(), [[2, 4, 9], [3], [1, 6]], module.config.gamma)
    labels_NK = torch.cat((inputs.previous_NK[:, 1:], inputs.previous_NK[:, :1]), dim=1)
    fit(module, target, inputs, labels_NK, to=0.5)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


RULES = StopRules(max_new_tokens=20, stop_ids=())


def fit_to_decoding(module: HeadsModule, target: Target, prompt: list[int]) -> None:
    """Learn the target's greedy text after a prompt by heart, well enough for drafts to be accepted."""
    K, tokens = module.config.gamma, [*prompt, *generate(target, prompt, None, rules=RULES).tokens]
    hidden_TH = target.forward(torch.tensor([tokens]), target.new_cache(len(tokens)), logits=0).hidden_BTD[0].clone()
    anchors = list(range(len(prompt) - 1, len(tokens) - K))
    inputs = training_inputs(target, [Text(torch.tensor(tokens), hidden_TH)], [anchors], K)
    labels_NK = torch.stack([torch.tensor(tokens[a + 1 : a + 1 + K]) for a in anchors])
    fit(module, target, inputs, labels_NK, to=0.02)


def check_identity(target: Target, drafter: Drafter, learned: list[int], least: int) -> None:
    """With the drafter and without it: the same tokens, greedy and coupled, from a single prompt token on.

    Args:
        learned: the prompt of `fit_to_decoding`, after which at least `least` drafts must be accepted.
    """
    coupled = SamplingParams(temperature=0.8, seed=3, coupled=True)
    for prompt in ([5], learned):
        for params in (SamplingParams(), coupled):
            plain = generate(target, prompt, None, params, RULES)
            drafted = generate(target, prompt, drafter, params, RULES)
            assert drafted.tokens == plain.tokens
            if prompt == learned and params != coupled:
                assert sum(r.accepted for r in drafted.rounds) >= least


def last_row(drafter: HeadsDrafter, call: DraftCall, before: list[int]) -> Tensor:
    """p_d of the token after the drafts `before`, which are forced."""
    ids = drafter.heads.draft_ids_Vd
    forced = Forced([*(t if ids is None else int((ids == t).nonzero()) for t in before), 0])
    (proposal,) = drafter.propose([replace(call, source=forced, limit=len(before) + 1)])
    return row_of(proposal, len(before))

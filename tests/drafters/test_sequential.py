"""Sequential heads, confidence head and the chain that samples from them, against the equations in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafters.base import DraftCall
from outrider.drafters.chain import sample_chain
from outrider.drafters.confidence import CertaintyEstimator, ChainHeads, ConfidenceScaling, SampledScaling, certainty
from outrider.drafters.heads import ConfidenceHead, VanillaMarkov, build_sequential_head
from outrider.sampling import PositionNoise, SamplingParams, SeededSource, SeenTokens, warp
from tests.toys.oracle import drafted_with, row_of

V, VD, H, R, N, K = 11, 7, 5, 3, 2, 4
KINDS = ["vanilla", "gated", "rnn"]
Array = NDArray[np.float64]


def random_(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)


def make_head(kind: str, draft_vocab: int = VD) -> VanillaMarkov:
    torch.manual_seed(0)
    head = build_sequential_head(kind, V, draft_vocab, H, R).double()
    random_(head)
    return head


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def numpy_latents(head: VanillaMarkov, prev_K: Array, hidden_KH: Array) -> tuple[Array, Array]:
    """The equations of the module docstring, for one block."""
    weights = {name: value.detach().numpy() for name, value in head.state_dict().items()}
    w1 = weights["markov_w1.weight"]
    state = np.zeros(R)
    latents = []
    for token, h in zip(prev_K, hidden_KH, strict=True):
        e = w1[int(token)]
        if head.kind == "vanilla":
            latent = e
        elif head.kind == "gated":
            latent = sigmoid(weights["gate_proj.weight"] @ np.concatenate([h, e]) + weights["gate_proj.bias"]) * e
        else:
            z = np.concatenate([state, e, h])
            w_g, w_c, w_o = np.split(weights["joint_proj.weight"], 3)
            b_g, b_c, b_o = np.split(weights["joint_proj.bias"], 3)
            gate = sigmoid(w_g @ z + b_g)
            state = gate * state + (1 - gate) * np.tanh(w_c @ z + b_c)
            latent = np.tanh(w_o @ z + b_o)
        latents.append(latent)
    return np.array(latents), w1[prev_K.astype(int)]


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(V, (N, K), generator=generator),
        torch.randn(N, K, H, dtype=torch.float64, generator=generator),
    )


def unrolled(kind: str) -> tuple[VanillaMarkov, Tensor, Tensor, Tensor, Tensor]:
    """A head, previous tokens and hidden states, and the latents and embeddings it makes of them."""
    head, (prev_NK, hidden_NKH) = make_head(kind), inputs()
    return head, prev_NK, hidden_NKH, *head.unroll(prev_NK, hidden_NKH)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_heads_follow_the_equations(kind: str) -> None:
    head, prev_NK, hidden_NKH, latent_NKr, embedding_NKr = unrolled(kind)
    for n in range(N):
        latent_Kr, e_Kr = numpy_latents(head, prev_NK[n].numpy(), hidden_NKH[n].numpy())
        np.testing.assert_allclose(latent_NKr[n], latent_Kr, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(embedding_NKr[n], e_Kr, rtol=1e-12)
        bias_KVd = latent_Kr @ head.markov_w2.weight.numpy().T
        np.testing.assert_allclose(head.bias(latent_NKr[n]), bias_KVd, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_unroll_is_repeated_step(kind: str) -> None:
    head, prev_NK, hidden_NKH, latent_NKr, embedding_NKr = unrolled(kind)
    state = head.initial_state(N)
    for k in range(K):
        latent_Nr, embedding_Nr, state = head.step(prev_NK[:, k], hidden_NKH[:, k], state)
        torch.testing.assert_close(latent_Nr, latent_NKr[:, k], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(embedding_Nr, embedding_NKr[:, k], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_weight(kind: str) -> None:
    head = make_head(kind)
    latent_NKr, _ = head.unroll(*inputs())
    head.bias(latent_NKr).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


def test_checkpoint_names_and_shapes() -> None:
    shapes = {kind: {n: tuple(p.shape) for n, p in make_head(kind).state_dict().items()} for kind in KINDS}
    markov = {"markov_w1.weight": (V, R), "markov_w2.weight": (VD, R)}
    assert shapes["vanilla"] == markov
    assert shapes["gated"] == markov | {"gate_proj.weight": (R, H + R), "gate_proj.bias": (R,)}
    assert shapes["rnn"] == markov | {"joint_proj.weight": (3 * R, 2 * R + H), "joint_proj.bias": (3 * R,)}
    confidence = ConfidenceHead(H, R, with_markov=True).state_dict()
    assert {n: tuple(p.shape) for n, p in confidence.items()} == {"proj.weight": (1, H + R), "proj.bias": (1,)}


@pytest.mark.parametrize("kind", KINDS)
def test_training_starts_from_the_base_drafter(kind: str) -> None:
    head = build_sequential_head(kind, 1000, VD, H, 16)
    prev_NK, hidden_NKH = inputs()
    latent_NKr, _ = head.unroll(prev_NK, hidden_NKH.float())
    assert head.bias(latent_NKr).abs().max() == 0
    assert abs(head.markov_w1.weight.std().item() - 0.02) < 0.001


@pytest.mark.parametrize("with_markov", [True, False])
@torch.inference_mode()
def test_confidence_head(with_markov: bool) -> None:
    confidence = ConfidenceHead(H, R, with_markov).double()
    random_(confidence)
    h, e = torch.randn(N, K, H, dtype=torch.float64), torch.randn(N, K, R, dtype=torch.float64)
    x = np.concatenate([h, e], axis=-1) if with_markov else h.numpy()
    expected = x @ confidence.proj.weight[0].numpy() + confidence.proj.bias.numpy()
    np.testing.assert_allclose(confidence(h, e if with_markov else None), expected, rtol=1e-12)


def test_confidence_needs_the_embedding_it_was_trained_with() -> None:
    with pytest.raises(ValueError, match="confidence_head_with_markov"):
        ConfidenceHead(H, R, with_markov=True)(torch.zeros(1, H), None)


GREEDY, SAMPLED = ([0.5, 2.0, 1.0, 4.0], [0.0, 1.0, -1.0, 0.5]), ([3.0, 1.0, 0.25, 2.0], [-2.0, 0.0, 0.5, 1.0])


@pytest.mark.parametrize("temperatures", [[0.0, 0.0], [0.8, 1.5], [0.2, 0.0], [1.0, 0.6]])
@pytest.mark.parametrize("estimates", [False, True])
@torch.inference_mode()
def test_confidences_are_calibrated_for_the_temperature_of_their_request(
    temperatures: list[float], estimates: bool
) -> None:
    """Linear in the logit from the fit for greedy text to that at temperature 0.8, and no further."""
    base_RKV, hidden_RKH = (torch.randn(2, K, size, dtype=torch.float64) for size in (V, H))
    confidence, estimators = ConfidenceHead(H, R, with_markov=False).double(), [None, None]
    random_(confidence)
    if estimates:
        estimators = [CertaintyEstimator([0.7, -0.1], [0.1] * K), CertaintyEstimator([0.2, 0.3], [-0.4] * K)]
    greedy, sampled = (
        ConfidenceScaling(*fitted, estimator) for fitted, estimator in zip((GREEDY, SAMPLED), estimators, strict=True)
    )
    heads = ChainHeads(V, None, None if estimates else confidence, scaling=greedy, sampled=SampledScaling(0.8, sampled))
    calls = [
        DraftCall(None, 0, SamplingParams(temperature=one), SeenTokens(V), SeededSource(r))
        for r, one in enumerate(temperatures)
    ]
    drafts = sample_chain(lambda _: base_RKV.flatten(0, 1), hidden_RKH, calls, heads)
    raw_RK = confidence(hidden_RKH, None).numpy()
    for r, temperature in enumerate(temperatures):
        w, logits = min(1.0, temperature / 0.8), []
        for (slopes, offsets), estimator in zip((GREEDY, SAMPLED), estimators, strict=True):
            own_K = raw_RK[r]
            if estimator is not None:
                own_K = certainty(base_RKV[r]).numpy() @ np.array(estimator.weights) + np.array(estimator.biases)
            logits.append(own_K / np.array(slopes) + np.array(offsets))
        expected = sigmoid((1 - w) * logits[0] + w * logits[1])
        np.testing.assert_allclose(drafts[r].confidences, expected, rtol=1e-9)
    if not estimates:
        block = heads.calibrated_block(confidence(hidden_RKH, None), temperatures).tolist()
        np.testing.assert_allclose(block, [draft.confidences for draft in drafts], rtol=1e-9)


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=4, top_p=0.9, min_p=0.02, repetition_penalty=1.5),
    SamplingParams(temperature=1.0, presence_penalty=0.8, frequency_penalty=0.5),
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("draft_ids", [None, [0, 2, 3, 5, 7, 8, 10]])
@pytest.mark.parametrize("kind", [None, *KINDS])
@torch.inference_mode()
def test_chain_reports_what_it_samples(kind: str | None, draft_ids: list[int] | None, params: SamplingParams) -> None:
    ids = list(range(V)) if draft_ids is None else draft_ids
    head = None if kind is None else make_head(kind, len(ids))
    confidence = ConfidenceHead(H, R, with_markov=head is not None).double()
    random_(confidence)
    base_KVd, hidden_KH = torch.randn(K, len(ids), dtype=torch.float64), torch.randn(K, H, dtype=torch.float64)
    anchor, prompt = 4, [1, 4]
    seen = SeenTokens(V, params, prompt)
    ids_Vd = None if draft_ids is None else torch.tensor(ids)

    def draft() -> tuple[list[int], Tensor, list[float]]:
        source = SeededSource(3)
        heads = ChainHeads(V, head, confidence, ids_Vd)
        call = DraftCall(None, anchor, params, seen, source)
        (proposal,) = sample_chain(lambda _: base_KVd, hidden_KH[None], [call], heads)
        rows = [row_of(proposal, k, V).double() for k in range(K)]  # one-hot rows are float32, whatever the logits
        return proposal.tokens, torch.stack(rows), proposal.confidences

    tokens, probs_KV, confidences = draft()
    assert draft()[0] == tokens  # `seen` was not changed by drafting
    prev_K = np.array([anchor, *tokens[:-1]])
    logits_KVd, features = base_KVd.numpy(), hidden_KH.numpy()
    if head is not None:
        latent_Kr, e_Kr = numpy_latents(head, prev_K, features)
        logits_KVd = logits_KVd + latent_Kr @ head.markov_w2.weight.numpy().T
        features = np.concatenate([features, e_Kr], axis=1)
    assert probs_KV.shape == (K, V) and probs_KV.dtype == torch.float64
    for k in range(K):
        seen_V = SeenTokens(V, params, prompt, output=tokens[:k]).with_tokens()
        expected_Vd = warp(torch.from_numpy(logits_KVd[k]), params, None if seen_V is None else seen_V[ids])
        torch.testing.assert_close(probs_KV[k, ids], expected_Vd, rtol=1e-10, atol=1e-13)
        assert probs_KV[k, tokens[k]] > 0
        assert abs(probs_KV[k].sum() - 1) < 1e-12
    logits_K = features @ confidence.proj.weight[0].numpy() + confidence.proj.bias.numpy()
    np.testing.assert_allclose(confidences, sigmoid(logits_K), rtol=1e-10)


@torch.inference_mode()
def test_coupled_drafts_race_with_the_noise_of_their_positions() -> None:
    noise, logits_KV = PositionNoise(5, V), 0.1 * torch.randn(K, V, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=1.0, coupled=True)
    for position in (1, 7, 30):
        call = DraftCall(None, 0, params, SeenTokens(V), SeededSource(0), noise=noise, position=position)
        (draft,) = sample_chain(lambda _: logits_KV, torch.zeros(1, K, H), [call], ChainHeads(V))
        assert draft.tokens == [noise.pick(logits_KV[k].softmax(-1), position + k) for k in range(K)]


@torch.inference_mode()
def test_a_request_that_draws_nothing_shifts_no_other() -> None:
    logits_RKV = torch.randn(3, K, V, generator=torch.Generator().manual_seed(0))
    limits, likeliest = (0, None, 2), logits_RKV.argmax(-1).tolist()
    calls = [DraftCall(None, 0, SamplingParams(), SeenTokens(V), SeededSource(0), limit) for limit in limits]
    drafts = sample_chain(lambda logits_NV: logits_NV, logits_RKV, calls, ChainHeads(V))
    assert [draft.tokens for draft in drafts] == [[], likeliest[1], likeliest[2][:2]]


@torch.inference_mode()
def test_proposal_can_be_cut() -> None:
    source, seen = SeededSource(0), SeenTokens(V)
    confidence = ConfidenceHead(H, R, with_markov=False)
    call = DraftCall(None, 0, SamplingParams(), seen, source)
    hidden_1KH = torch.randn(1, K, H)
    (proposal,) = sample_chain(lambda _: torch.randn(K, V), hidden_1KH, [call], ChainHeads(V, None, confidence))
    cut = proposal.truncated(2)
    assert cut.tokens == proposal.tokens[:2] and cut.confidences == proposal.confidences[:2]
    assert drafted_with(cut) == drafted_with(proposal)[:2]
    (silent,) = sample_chain(lambda _: torch.randn(K, V), hidden_1KH, [call], ChainHeads(V))
    assert silent.confidences == [] and silent.truncated(1).confidences == []

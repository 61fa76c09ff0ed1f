"""The formulas of the loss by hand, and the fused loss against them, in value and gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import outrider.drafters.fused_loss as fused
from outrider.drafters.base import DraftRows
from outrider.drafters.dflash2 import SelectorRows
from outrider.drafters.dspark import DSparkRows
from outrider.drafters.fused_loss import (
    DraftLogits,
    FusedLoss,
    HeadProducts,
    Supervision,
    TargetView,
    fused_loss,
    label_probabilities,
)
from outrider.drafters.heads import ConfidenceHead
from outrider.drafters.loss import (
    DraftLoss,
    ObjectiveConfig,
    Term,
    acceptance_probability,
    confidence_loss,
    cross_entropy,
    dpace_weights,
    kl_divergence,
    l1_distance,
    reference_loss,
    soft_cross_entropy,
)
from outrider.training.batches import Schedule
from outrider.training.objective import BlockObjective
from outrider.training.recipe import OptimizerSection
from tests.toys.alignment import build
from tests.toys.dialects import made
from tests.toys.targets import toy_samples, toy_target

V, VD, H, R, N = 29, 17, 8, 5, 41


# ----------------------------------------------------------------------------
# The formulas, from sums over a vocabulary of four, of which three can be drafted.
# ----------------------------------------------------------------------------

P_D = [0.5, 0.2, 0.3]
P_T = [0.1, 0.4, 0.2]  # the fourth token has 0.3
D, T = (torch.tensor([row], dtype=torch.float64) for row in (P_D, P_T))


def test_the_cross_entropy_is_that_of_the_label() -> None:
    log_p = D.log().expand(3, 3)
    found = cross_entropy(log_p, torch.tensor([0, 2, -1]))
    assert found.tolist() == pytest.approx([-math.log(0.5), -math.log(0.3), 0.0], abs=1e-15)


def test_the_1_norm_is_over_the_whole_vocabulary() -> None:
    by_hand = sum(abs(d - t) for d, t in zip([*P_D, 0.0], [*P_T, 0.3], strict=True))
    assert l1_distance(D, T).item() == pytest.approx(by_hand, abs=1e-15)
    overlap = sum(map(min, P_D, P_T))
    assert acceptance_probability(l1_distance(D, T)).item() == pytest.approx(overlap, abs=1e-15)


def test_the_divergence_is_over_the_draft_vocabulary() -> None:
    by_hand = sum(t * math.log(t / d) for d, t in zip(P_D, P_T, strict=True))
    assert kl_divergence(T.log(), D.log()).item() == pytest.approx(by_hand, abs=1e-15)


def test_the_soft_cross_entropy_is_over_the_draft_vocabulary() -> None:
    """The target's distribution there sums to one; where it would choose another token nothing is to be learned."""
    by_hand = -sum(t / 0.7 * math.log(d) for d, t in zip(P_D, P_T, strict=True))
    found = soft_cross_entropy(T.log().expand(2, 3), D.log().expand(2, 3), torch.tensor([1, -1]))
    assert found.tolist() == pytest.approx([by_hand, 0.0], abs=1e-15)


def test_a_confidence_is_trained_towards_the_acceptance() -> None:
    confidence, acceptance = 0.7, 0.5
    chance = 1 / (1 + math.exp(-confidence))
    by_hand = -(acceptance * math.log(chance) + (1 - acceptance) * math.log(1 - chance))
    found = confidence_loss(
        torch.tensor(confidence, dtype=torch.float64), torch.tensor(acceptance, dtype=torch.float64)
    )
    assert found.item() == pytest.approx(by_hand, abs=1e-15)


def test_the_terms_add_up() -> None:
    weight = torch.tensor([0.25], dtype=torch.float64)
    terms = [Term("ce", 2 * weight), Term("l1", 3 * weight), Term("kl", 5 * weight)]
    label, argmax = torch.tensor([1]), torch.tensor([0])
    loss, acceptance, agreement = reference_loss(D.log(), T.log(), labels=label, argmax=argmax, terms=terms)
    divergence = sum(t * math.log(t / d) for d, t in zip(P_D, P_T, strict=True))
    assert loss.item() == pytest.approx(0.25 * (2 * -math.log(0.2) + 3 * 1.0 + 5 * divergence), abs=1e-15)
    assert acceptance.item() == pytest.approx(0.5, abs=1e-15) and agreement.item() == 1.0
    assert reference_loss(D.log(), T.log(), labels=label, argmax=torch.tensor([-1]), terms=terms).agreement_N == 0


def test_position_weights_decay() -> None:
    weights = ObjectiveConfig(decay=4.0).position_weights(3, torch.device("cpu"))
    torch.testing.assert_close(weights, torch.exp(-torch.tensor([0.0, 1.0, 2.0]) / 4))
    assert ObjectiveConfig(decay=4.0, dpace=0.5).position_weights(3, torch.device("cpu")).tolist() == [1.0, 1.0, 1.0]


def dpace_by_hand(likely: list[float], alpha: float) -> list[float]:
    """The weights of one block, from the paper's sums."""
    smoothed = [alpha + (1 - alpha) * q for q in likely]
    reached = [math.prod(smoothed[: j + 1]) for j in range(len(smoothed))]
    return [sum(reached[k:]) for k in range(len(smoothed))]


def test_dpace_weights_are_the_gradient_of_the_accepted_length() -> None:
    supervised = torch.arange(4) < torch.tensor([4, 2, 0, 1])[:, None]
    likely = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = dpace_weights(likely, supervised, 0.5)
    for row, kept, count in zip(weights.tolist(), likely.tolist(), (4, 2, 0, 1), strict=True):
        assert row == pytest.approx([*dpace_by_hand(kept[:count], 0.5), *[0.0] * (4 - count)], abs=1e-14)
    log_s = (0.5 + 0.5 * likely[0]).log().requires_grad_()
    log_s.exp().cumprod(-1).sum().backward()
    torch.testing.assert_close(weights[0], log_s.grad)


def test_the_share_of_the_parallel_logits_falls_to_zero() -> None:
    config = ObjectiveConfig(base=0.8, base_fraction=0.5)
    assert [config.base_share(done) for done in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.8, 0.4, 0.0, 0.0])
    assert ObjectiveConfig().base_share(0.0) == 0.0


def test_what_a_recipe_does_not_set_is_not_recorded() -> None:
    """Runs from before these fields can be resumed."""
    assert set(ObjectiveConfig().model_dump()) == {"ce", "l1", "confidence", "decay"}
    chosen = {"dpace": 0.5, "base": 1.0, "base_fraction": 0.5}
    assert chosen.items() <= ObjectiveConfig(**chosen).model_dump().items()


# ----------------------------------------------------------------------------
# The fused loss and what methods make of it, against the formulas.
# ----------------------------------------------------------------------------


class Case:
    """Random draft logits z = W h + W2 l of a reduced vocabulary, and the target's view, which may be soft-capped."""

    def __init__(self, seed: int = 0, softcap: float | None = None, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.leaves = [leaf.requires_grad_() for leaf in (rand(N, H), rand(N, R), rand(VD, R))]
        self.logits = DraftLogits(*self.leaves)
        head_VH, target_NH = rand(V, H), rand(N, H)
        ids = torch.unique(torch.arange(0, 2 * VD, 2) % V)[:VD]
        whole = target_NH @ head_VH.T
        whole = whole if softcap is None else torch.tanh(whole / softcap) * softcap
        self.log_p_t = whole.log_softmax(-1)[:, ids]
        labels, argmax = (torch.randint(-1, VD, (N,), generator=generator) for _ in range(2))
        self.head = HeadProducts(head_VH[ids], dtype)
        self.view = TargetView(target_NH, whole.logsumexp(-1), labels, argmax, softcap)
        self.weights = torch.rand(N, generator=generator, dtype=torch.float64).to(dtype)

    @property
    def unary(self) -> Tensor:
        """The parallel logits."""
        return self.leaves[0] @ self.head.head_VH.T

    @property
    def z(self) -> Tensor:
        return self.unary + self.leaves[1] @ self.leaves[2].T

    def terms(self, **weights: float) -> list[Term]:
        return [Term(kind, weight * self.weights) for kind, weight in weights.items()]  # type: ignore[arg-type]

    def reference(self, z: Tensor, terms: list[Term]) -> DraftLoss:
        labels, argmax = self.view.labels_N, self.view.argmax_N
        return reference_loss(z.log_softmax(-1), self.log_p_t, labels=labels, argmax=argmax, terms=terms)

    def fused(self, **weights: float) -> FusedLoss:
        return fused_loss(self.logits, self.head, self.view, terms=self.terms(**weights))

    def given(self, config: ObjectiveConfig, base_share: float = 0.0) -> Supervision:
        """The N positions as blocks of one."""
        tensors = (self.view.hidden_ND, self.view.lse_N, self.view.labels_N, self.view.argmax_N)
        return Supervision(
            config,
            self.head,
            torch.arange(VD),
            view=TargetView(*(tensor[:, None] for tensor in tensors), softcap=self.view.softcap),
            supervised_NK=torch.ones(N, 1, dtype=torch.bool),
            supervised_M=torch.arange(N),
            positions=N,
            weights_NK=self.weights[:, None],
            total_weight=self.weights.sum(),
            base_share=base_share,
        )

    def rows(self) -> DraftRows:
        hidden, latent, w2 = self.leaves
        return DraftRows(hidden[:, None], latent[:, None], w2)

    def check(self, ours: Tensor, theirs: Tensor, *more: Tensor, tolerance: float = 1e-12) -> None:
        """The same value and the same gradients, also towards the leaves `more`."""
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
        leaves = [*self.leaves, *more]
        mine, other = (
            torch.autograd.grad(3 * loss, leaves, materialize_grads=True, retain_graph=True) for loss in (ours, theirs)
        )
        for gradient, expected in zip(mine, other, strict=True):
            torch.testing.assert_close(gradient, expected, atol=tolerance, rtol=100 * tolerance)


def small_chunks(monkeypatch: pytest.MonkeyPatch, rows: int, scratch: int = 64) -> None:
    monkeypatch.setattr(fused, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(fused, "CHUNK_BYTES", rows * 2 * VD * 8)
    monkeypatch.setattr(fused, "_SCRATCH_BYTES", scratch * VD * 4)


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("scratch", [3, 64])
@pytest.mark.parametrize(
    ("weights", "softcap", "dtype"),
    [
        ({"ce": 0.3, "l1": 0.9}, None, torch.float64),
        ({"ce": 0.3, "l1": 0.9, "kl": 0.6}, 5.0, torch.float64),
        ({"kl": 1.0}, None, torch.float64),
        ({"ce": 0.3, "kl": 0.6}, None, torch.float32),
        ({"soft_ce": 1.0}, None, torch.float64),
        ({"ce": 0.3, "l1": 0.9, "kl": 0.6, "soft_ce": 0.8}, 5.0, torch.float64),
        ({"soft_ce": 0.8}, None, torch.float32),
    ],
)
def test_the_fused_loss_is_the_formula(
    chunk: int,
    scratch: int,
    weights: dict[str, float],
    softcap: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_chunks(monkeypatch, chunk, scratch)
    case = Case(softcap=softcap, dtype=dtype)
    found, expected = case.fused(**weights), case.reference(case.z, case.terms(**weights))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    case.check(found.loss / N, expected.loss / N, tolerance=tolerance)
    torch.testing.assert_close(found.acceptance_N, expected.acceptance_N, atol=tolerance, rtol=0)
    assert torch.equal(found.agreement_N, expected.agreement_N)


def test_eagle3s_loss_is_the_sum_over_whole_distributions() -> None:
    """Value and gradients by hand in float64: every position, step k weighing 0.8^(k-1), a target token that cannot be
    drafted left out of the sum and not of the mean."""
    target, samples, ids = toy_target(), toy_samples(3), torch.arange(0, 80, 2)
    drafter = made("eagle3", draft_vocab_size=40).weights.module.train().requires_grad_()
    section = OptimizerSection(sequences_per_step=3, anchors="all")
    schedule = Schedule.of(section, samples, seed=1, gamma=drafter.config.gamma)
    batch, _ = build(drafter, target, samples, ids, schedule.step(0))
    assert len(batch.previous_NK) == sum(sample.num_supervised for sample in samples), "every response token"
    compute = BlockObjective(target, ids, ObjectiveConfig(**type(drafter.config).default_objective({})))
    z_NKV = (compute.rows(drafter, batch).hidden_NKH @ compute.head_VH.T).double()
    whole_NKV = (batch.target_hidden_NKD @ target.head_VD.T)[..., ids].double()
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for n, k in batch.supervised_NK.nonzero().tolist():
        weights += 0.8**k
        if int(batch.argmax_NK[n, k]) in ids:
            total = total - 0.8**k * (whole_NKV[n, k].softmax(-1) * z_NKV[n, k].log_softmax(-1)).sum()
    expected, found = total / weights, compute(drafter, batch).loss
    assert any(int(token) not in ids for token in batch.argmax_NK[batch.supervised_NK])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-3)  # 4.48 is 1 / ln(1 / 0.8) rounded
    parameters = list(drafter.parameters())
    by_hand = torch.autograd.grad(expected, parameters, allow_unused=True, materialize_grads=True)
    ours = torch.autograd.grad(found, parameters, allow_unused=True, materialize_grads=True)
    for mine, theirs in zip(ours, by_hand, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_without_latents_the_hidden_states_alone_are_trained() -> None:
    case = Case(2)
    found = fused_loss(DraftLogits(case.leaves[0]), case.head, case.view, terms=case.terms(ce=1.0))
    case.check(found.loss, case.reference(case.unary, case.terms(ce=1.0)).loss)


def test_the_likeliest_tokens_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch, 7)
    case = Case(3)
    found = fused_loss(case.logits, case.head, case.view, terms=case.terms(ce=1.0), top=4)
    assert found.candidates is not None
    assert torch.equal(found.candidates.indices_Nc, case.z.topk(4).indices)
    assert case.fused(ce=1.0).candidates is None


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_parallel_logits_have_their_share_of_the_loss(share: float) -> None:
    case, config = Case(6), ObjectiveConfig(ce=0.3, l1=0.9, kl=0.6)
    terms = case.given(config).terms()
    whole, parallel = case.reference(case.z, terms), case.reference(case.unary, terms)
    found = case.rows().loss(case.given(config, share))
    case.check(found.loss, (1 - share) * whole.loss + share * parallel.loss)
    torch.testing.assert_close(found.acceptance_N, whole.acceptance_N)


@pytest.mark.parametrize("gradient", [True, False])
def test_confidences_have_a_loss_of_their_own(gradient: bool) -> None:
    """DSpark's: its gradient also trains what the head reads, or the head alone."""
    case, config = Case(8), ObjectiveConfig(ce=0.3, l1=0.9, confidence=0.7, confidence_gradient=gradient)
    head, given = ConfidenceHead(H, R, with_markov=True).double(), case.given(config)
    hidden, latent, w2 = case.leaves
    rows = DSparkRows(
        hidden[:, None], latent[:, None], w2, confidence=head, read_NKH=hidden[:, None], embedding_NKr=latent[:, None]
    )
    plain = case.reference(case.z, given.terms())
    read = (hidden, latent) if gradient else (hidden.detach(), latent.detach())
    bce = confidence_loss(head(*read), plain.acceptance_N)
    expected = plain.loss + 0.7 * (case.weights * bce).sum() / case.weights.sum()
    case.check(rows.loss(given).loss, expected, *head.parameters())
    without = replace(rows, confidence=None).loss(given)
    torch.testing.assert_close(without.loss, plain.loss)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("count", "chunk"), [(1, 64), (4, 7), (VD, 64)])
def test_candidates_have_a_loss_beside_that_of_the_parallel_logits(
    count: int, chunk: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DFlash 2's: the distribution over the candidates as one over the vocabulary that is zero elsewhere."""
    small_chunks(monkeypatch, chunk)
    monkeypatch.setattr(fused, "TILE_BYTES", 3 * count * H * 8)
    case, config = Case(4, softcap), ObjectiveConfig(ce=0.3, l1=0.9)
    hidden, latent, w2 = case.leaves
    rows = SelectorRows(hidden[:, None], correction_NKr=latent[:, None], codebook_Vr=w2, count=count)
    found, given = rows.loss(case.given(config)), case.given(config)
    kept = torch.zeros_like(case.z, dtype=torch.bool).scatter(1, case.unary.topk(count).indices, True)
    known = case.view.labels_N
    known = torch.where(kept.gather(1, known.clamp(min=0)[:, None])[:, 0], known, -1)
    among = reference_loss(
        case.z.masked_fill(~kept, -1e300).log_softmax(-1),
        case.log_p_t,
        labels=known,
        argmax=case.view.argmax_N,
        terms=given.terms(),
    )
    case.check(found.loss, case.reference(case.unary, given.terms()).loss + among.loss)
    torch.testing.assert_close(found.acceptance_N, among.acceptance_N, atol=1e-12, rtol=1e-12)
    assert torch.equal(found.agreement_N, among.agreement_N)


def test_candidates_have_no_divergence() -> None:
    """They have no probability where the target has some."""
    case = Case(4)
    hidden, latent, w2 = case.leaves
    rows = SelectorRows(hidden[:, None], correction_NKr=latent[:, None], codebook_Vr=w2, count=4)
    for term in ("kl", "soft_ce"):
        with pytest.raises(ValueError, match=rf"objective\.{term}"):
            rows.loss(case.given(ObjectiveConfig(**{term: 0.1})))


@pytest.mark.parametrize("count", [None, 4])
def test_probabilities_of_labels(count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch, 7)
    case = Case(7)
    z = case.z.detach()
    if count is not None:
        candidates = case.unary.topk(count).indices
        z = z.masked_fill(~torch.zeros_like(z, dtype=torch.bool).scatter(1, candidates, True), -torch.inf)
    some = (case.view.labels_N >= 0).nonzero()[0, 0]
    case.view.labels_N[some] = z[some].argmax()
    labels_N = case.view.labels_N
    rows = case.rows()
    if count is not None:
        hidden, latent, w2 = case.leaves
        rows = SelectorRows(hidden[:, None], correction_NKr=latent[:, None], codebook_Vr=w2, count=count)
    probabilities, likeliest = rows.label_probabilities(case.given(ObjectiveConfig()))
    expected = z.softmax(-1).gather(1, labels_N.clamp(min=0)[:, None])[:, 0] * (labels_N >= 0)
    torch.testing.assert_close(probabilities, expected, atol=1e-12, rtol=1e-12)
    assert (probabilities == 0).any() and (probabilities > 0).any() and not probabilities.requires_grad
    assert likeliest.tolist() == (z.argmax(-1) == labels_N).tolist() and likeliest.any() and not likeliest.all()


def test_probabilities_of_labels_in_bfloat16() -> None:
    """Logits near 60: plain bfloat16 is off by up to 0.25 in them, and so by a quarter in probability."""
    generator = torch.Generator().manual_seed(5)
    head, w2 = (torch.randn(300, width, generator=generator).bfloat16().float() for width in (32, 8))
    hidden = (torch.randn(64, 32, generator=generator) * 4).bfloat16().float()
    latent = (torch.randn(64, 8, generator=generator) * 0.5).bfloat16().float()
    logits = hidden @ head.T
    labels = logits.argmax(-1)
    assert logits.amax(-1).mean() > 40
    exact, rounded = (
        label_probabilities(DraftLogits(hidden, latent, w2), HeadProducts(head, dtype), labels)[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0.2 < exact.mean() < 0.98 and (exact - rounded).abs().max() < 0.02


@pytest.mark.parametrize("method", ["dflash", "dspark", "dflash2", "domino"])
def test_dpace_is_its_definition_for_every_block_drafter(method: str) -> None:
    """Loss and gradients of a training batch, with a reduced vocabulary and blocks that end early."""
    target, samples = toy_target(), toy_samples(3)
    ids = torch.arange(0, 80, 2)
    drafter = made(method, draft_vocab_size=40).weights.module.train().requires_grad_()
    batch, _ = build(drafter, target, samples, ids, Schedule(samples, 3, 5, seed=1).step(0))
    assert not batch.supervised_NK.all()
    config = ObjectiveConfig(ce=1.0, l1=0.0, confidence=0.0, dpace=0.5)
    compute = BlockObjective(target, ids, config)
    rows = compute.rows(drafter, batch)
    z_NKV = unary_NKV = rows.hidden_NKH @ compute.head_VH.T
    if rows.latent_NKr is not None and rows.w2_Vr is not None:
        z_NKV = z_NKV + rows.latent_NKr @ rows.w2_Vr.T
    if isinstance(rows, SelectorRows):
        z_NKV = z_NKV + rows.correction_NKr @ rows.codebook_Vr.T
        kept = torch.zeros_like(z_NKV, dtype=torch.bool).scatter(2, unary_NKV.topk(rows.count).indices, True)
        z_NKV = z_NKV.masked_fill(~kept, -torch.inf)
    total: Tensor | float = 0.0
    for n, k_s in enumerate(batch.supervised_NK.sum(-1).tolist()):
        labels = [int((ids == label).nonzero()[0]) if label in ids else None for label in batch.labels_NK[n, :k_s]]
        log_probs = [
            z_NKV[n, k].log_softmax(-1)[label] if label is not None else None for k, label in enumerate(labels)
        ]
        likely = [0.0 if log_p is None else math.exp(log_p.item()) for log_p in log_probs]
        for k, weight in enumerate(dpace_by_hand(likely, 0.5)):
            if likely[k] > 0 and log_probs[k] is not None:
                total = total - weight * log_probs[k]
            if isinstance(rows, SelectorRows) and labels[k] is not None:  # the parallel logits have their own loss
                total = total - weight * unary_NKV[n, k].log_softmax(-1)[labels[k]]
    assert isinstance(total, Tensor)
    expected = total / batch.supervised_NK.sum()
    found = compute(drafter, batch).loss
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    parameters = list(drafter.parameters())
    whole = torch.autograd.grad(expected, parameters, allow_unused=True, materialize_grads=True)
    ours = torch.autograd.grad(found, parameters, allow_unused=True, materialize_grads=True)
    for mine, theirs in zip(ours, whole, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
    decayed = BlockObjective(target, ids, config.model_copy(update={"dpace": None}))(drafter, batch).loss
    assert abs(decayed.item() - found.item()) > 1e-3


# ----------------------------------------------------------------------------
# Memory and precision.
# ----------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The largest tensor, in bytes, that any operation inside returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.nbytes)
        return out


@pytest.mark.parametrize(("rows", "vocab"), [(2048, 512), (64, 16384)])
def test_no_tensor_is_larger_than_half_the_budget(rows: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever N and V are; with a float32 head held in bfloat16, no float32 copy of it is made either."""
    budget = 2**20
    monkeypatch.setattr(fused, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(fused, "CHUNK_BYTES", budget)
    monkeypatch.setattr(fused, "TILE_BYTES", budget // 8)
    hidden = torch.randn(rows, H, requires_grad=True)
    head = HeadProducts(torch.randn(vocab, H).bfloat16(), torch.float32)
    labels = torch.zeros(rows, dtype=torch.long)
    view = TargetView(torch.randn(rows, H), torch.randn(rows) + 9, labels, labels)
    with Allocations() as seen:
        fused_loss(DraftLogits(hidden), head, view, terms=ObjectiveConfig().terms(torch.ones(rows))).loss.backward()
    assert budget // 4 < seen.largest <= budget // 2


def test_chunks_are_equal_and_inside_the_budget() -> None:
    rows = fused.chunk_rows(3584, 151_936, 4)
    assert 16 <= rows <= fused.CHUNK_BYTES // (8 * 151_936)
    assert fused.chunk_rows(784, 12_288, 4) == 784
    assert fused.chunk_rows(10**6, 10**8, 4) == 16  # never fewer, whatever the vocabulary


def test_a_head_in_another_type_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "TILE_BYTES", 5 * H * 8)
    case = Case(4)
    narrow = case.head.head_VH.bfloat16()
    results = []
    for held in (narrow, narrow.double()):
        case.head = HeadProducts(held, torch.float64)
        results.append(torch.autograd.grad(case.fused(ce=0.1, l1=0.9).loss, case.leaves))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-11)


def test_bfloat16_logits_keep_their_precision_where_probability_is() -> None:
    """Logits near 60: plain bfloat16 would be off by 0.2; centred ones give acceptance to a percent."""
    generator = torch.Generator().manual_seed(5)
    rows, vocab, width = 64, 300, 32
    head = torch.randn(vocab, width, generator=generator).bfloat16().float()
    hidden = (torch.randn(rows, width, generator=generator) * 4).bfloat16().float()
    target = (hidden + torch.randn(rows, width, generator=generator) * 0.2).bfloat16().float()
    logits = target @ head.T
    assert logits.amax(-1).mean() > 40
    argmax = logits.argmax(-1)
    argmax[::5] = -1  # those rows find a reference of their own
    view = TargetView(target, logits.logsumexp(-1), argmax, argmax)
    terms = ObjectiveConfig().terms(torch.ones(rows))
    exact, rounded = (
        fused_loss(DraftLogits(hidden), HeadProducts(head, dtype), view, terms=terms)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0.1 < exact.acceptance_N.mean() < 0.95
    assert (exact.acceptance_N - rounded.acceptance_N).abs().max() < 0.02
    plain = torch.minimum((hidden.bfloat16() @ head.bfloat16().T).float().softmax(-1), logits.softmax(-1)).sum(-1)
    assert (exact.acceptance_N - plain).abs().max() > 0.04

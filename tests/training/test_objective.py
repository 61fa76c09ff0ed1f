"""The chunked objective against the same formula written densely with autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import outrider.training.loss as loss_module
from outrider.training.batches import Schedule
from outrider.training.loss import BlockObjective, TargetView, objective
from outrider.training.recipe import ObjectiveConfig
from tests.toys.alignment import build
from tests.toys.dialects import made
from tests.toys.targets import toy_samples, toy_target

V, VD, H, R, N = 29, 17, 8, 5, 41


def case(seed: int = 0) -> tuple[dict[str, Tensor], Tensor, Tensor, TargetView]:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    trained = {"hidden": rand(N, H), "latent": rand(N, R), "w2": rand(VD, R), "confidence": rand(N)}
    head_full, target_hidden = rand(V, H), rand(N, H)
    ids = torch.arange(0, 2 * VD, 2) % V
    ids = torch.unique(ids)[:VD]
    logits = target_hidden @ head_full.T
    labels = torch.randint(-1, VD, (N,), generator=generator)
    argmax = torch.randint(-1, VD, (N,), generator=generator)
    view = TargetView(target_hidden, logits.logsumexp(-1), labels, argmax)
    return trained, head_full[ids], logits.softmax(-1)[:, ids], view


def heads(trained: dict[str, Tensor]) -> dict[str, Any]:
    """The heads' arguments of `objective`."""
    return {"latent_Nr": trained["latent"], "w2_Vr": trained["w2"], "confidence_N": trained["confidence"]}


def dense(
    trained: dict[str, Tensor], head: Tensor, p_t: Tensor, view: TargetView, w: Tensor, c: ObjectiveConfig
) -> Tensor:
    z = trained["hidden"] @ head.T + trained["latent"] @ trained["w2"].T
    p_d = z.softmax(-1)
    distance = (p_d - p_t).abs().sum(-1) + (1 - p_t.sum(-1))
    known = view.labels_N >= 0
    ce = -z.log_softmax(-1).gather(1, view.labels_N.clamp(min=0)[:, None])[:, 0] * known
    kl = (p_t * (p_t.log() - z.log_softmax(-1))).sum(-1)
    label = (1 - distance / 2).detach()
    bce = F.binary_cross_entropy_with_logits(trained["confidence"], label, reduction="none")
    return (w * (c.ce * ce + c.l1 * distance + c.kl * kl + c.confidence * bce)).sum() / w.sum()


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("scratch", [3, 64])
@pytest.mark.parametrize("kl", [0.0, 0.6])
def test_loss_and_gradients_equal_the_dense_formula(
    chunk: int, scratch: int, kl: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk * 2 * VD * 8)
    monkeypatch.setattr(loss_module, "_SCRATCH_BYTES", scratch * VD * 4)
    trained, head, p_t, view = case()
    config = ObjectiveConfig(ce=0.3, l1=0.9, kl=kl, confidence=0.7)
    weights = torch.rand(N, dtype=torch.float64)
    ours = {k: v.clone().requires_grad_() for k, v in trained.items()}
    theirs = {k: v.clone().requires_grad_() for k, v in trained.items()}
    output = objective(ours["hidden"], head, view, config, weights_N=weights, **heads(ours))
    expected = dense(theirs, head, p_t, view, weights, config)
    torch.testing.assert_close(output.loss, expected, atol=1e-12, rtol=1e-12)
    (3 * output.loss).backward()
    (3 * expected).backward()
    for name in trained:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, atol=1e-12, rtol=1e-10)


def dense_candidates(
    trained: dict[str, Tensor], head: Tensor, p_t: Tensor, view: TargetView, w: Tensor, c: ObjectiveConfig, count: int
) -> tuple[Tensor, Tensor]:
    """The loss, and acceptance among the candidates, from whole logits."""
    unary = trained["hidden"] @ head.T
    kept = torch.zeros_like(unary, dtype=torch.bool).scatter(1, unary.topk(count).indices, True)
    among = (unary + trained["latent"] @ trained["w2"].T).masked_fill(~kept, -torch.inf)
    known, label = view.labels_N >= 0, view.labels_N.clamp(min=0)[:, None]
    total, overlap = torch.zeros_like(w), torch.zeros_like(w)
    for z, has_ce in ((unary, known), (among, known & kept.gather(1, label)[:, 0])):
        distance = (z.softmax(-1) - p_t).abs().sum(-1) + (1 - p_t.sum(-1))
        ce = torch.where(has_ce, -z.log_softmax(-1).gather(1, label)[:, 0], 0.0)
        total, overlap = total + c.ce * ce + c.l1 * distance, 1 - distance / 2
    bce = F.binary_cross_entropy_with_logits(trained["confidence"], overlap.detach(), reduction="none")
    return (w * (total + c.confidence * bce)).sum() / w.sum(), overlap


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("count", "chunk"), [(1, 64), (4, 7), (VD, 64)])
def test_candidates_have_the_dense_loss_and_gradients(
    count: int, chunk: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk * 2 * VD * 8)
    trained, head, p_t, view = case(4)
    if softcap is not None:  # every token can be drafted, so that their logits are the whole distribution
        logits = torch.tanh(view.hidden_ND @ head.T / softcap) * softcap
        view, p_t = replace(view, lse_N=logits.logsumexp(-1), softcap=softcap), logits.softmax(-1)
    config, weights = ObjectiveConfig(ce=0.3, l1=0.9, confidence=0.7), torch.rand(N, dtype=torch.float64)
    ours = {k: v.clone().requires_grad_() for k, v in trained.items()}
    theirs = {k: v.clone().requires_grad_() for k, v in trained.items()}
    output = objective(ours["hidden"], head, view, config, weights_N=weights, **heads(ours), candidates=count)
    expected, overlap = dense_candidates(theirs, head, p_t, view, weights, config, count)
    torch.testing.assert_close(output.loss, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(output.acceptance_N, overlap, atol=1e-12, rtol=1e-12)
    (3 * output.loss).backward()
    (3 * expected).backward()
    for name in trained:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, atol=1e-12, rtol=1e-10)


def test_a_divergence_is_for_whole_distributions() -> None:
    trained, head, _, view = case(4)
    with pytest.raises(ValueError, match="kl is for drafters that draw from the whole"):
        objective(
            trained["hidden"],
            head,
            view,
            ObjectiveConfig(kl=0.1),
            weights_N=torch.ones(N),
            **heads(trained),
            candidates=4,
        )


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_parallel_logits_have_their_share_of_the_loss(share: float) -> None:
    """Of cross-entropy and distances; the confidence head's loss stays whole."""
    trained, head, p_t, view = case(6)
    config, weights = ObjectiveConfig(ce=0.3, l1=0.9, kl=0.6, confidence=0.7), torch.rand(N, dtype=torch.float64)
    ours = {k: v.clone().requires_grad_() for k, v in trained.items()}
    theirs = {k: v.clone().requires_grad_() for k, v in trained.items()}
    output = objective(ours["hidden"], head, view, config, weights_N=weights, **heads(ours), base_share=share)
    alone = config.model_copy(update={"confidence": 0.0})
    bce = config.model_copy(update={"ce": 0.0, "l1": 0.0, "kl": 0.0})
    parallel = {**theirs, "latent": torch.zeros_like(trained["latent"])}
    parts = [dense(theirs, head, p_t, view, weights, alone), dense(parallel, head, p_t, view, weights, alone)]
    expected = (1 - share) * parts[0] + share * parts[1] + dense(theirs, head, p_t, view, weights, bce)
    torch.testing.assert_close(output.loss, expected, atol=1e-12, rtol=1e-12)
    output.loss.backward()
    expected.backward()
    for name in trained:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, atol=1e-12, rtol=1e-10)
    plain = objective(trained["hidden"], head, view, config, weights_N=weights, **heads(trained))
    torch.testing.assert_close(output.acceptance_N, plain.acceptance_N)


def test_the_share_of_the_parallel_logits_falls_to_zero() -> None:
    config = ObjectiveConfig(base=0.8, base_fraction=0.5)
    assert [config.base_share(done) for done in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.8, 0.4, 0.0, 0.0])
    assert ObjectiveConfig().base_share(0.0) == 0.0


def test_what_a_recipe_does_not_set_is_not_recorded() -> None:
    """Runs from before these fields can be resumed."""
    assert set(ObjectiveConfig().model_dump()) == {"ce", "l1", "confidence", "decay"}
    set_here = ObjectiveConfig(dpace=0.5, base=1.0, base_fraction=0.5).model_dump()
    assert {name: set_here[name] for name in ("dpace", "base", "base_fraction")} == {
        "dpace": 0.5,
        "base": 1.0,
        "base_fraction": 0.5,
    }


# D-PACE.


def dpace_reference(likely: list[float], alpha: float) -> list[float]:
    """The weights of one block, from the paper's sums."""
    smoothed = [alpha + (1 - alpha) * q for q in likely]
    reached = [math.prod(smoothed[: j + 1]) for j in range(len(smoothed))]
    return [sum(reached[k:]) for k in range(len(smoothed))]


def test_dpace_weights_are_the_gradient_of_the_accepted_length() -> None:
    supervised = torch.arange(4) < torch.tensor([4, 2, 0, 1])[:, None]
    likely = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = loss_module.dpace_weights(likely, supervised, 0.5)
    for row, kept, count in zip(found.tolist(), likely.tolist(), (4, 2, 0, 1), strict=True):
        assert row == pytest.approx([*dpace_reference(kept[:count], 0.5), *[0.0] * (4 - count)], abs=1e-14)
    log_s = (0.5 + 0.5 * likely[0]).log().requires_grad_()
    log_s.exp().cumprod(-1).sum().backward()
    torch.testing.assert_close(found[0], log_s.grad)


@pytest.mark.parametrize("count", [None, 4])
def test_probabilities_of_labels(count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 7 * 2 * VD * 8)
    trained, head, _, view = case(7)
    unary = trained["hidden"] @ head.T
    z = unary + trained["latent"] @ trained["w2"].T
    if count is not None:
        z = z.masked_fill(
            ~torch.zeros_like(z, dtype=torch.bool).scatter(1, unary.topk(count).indices, True), -torch.inf
        )
    labels_N = view.labels_N.clone()
    some = (labels_N >= 0).nonzero()[0, 0]
    labels_N[some] = z[some].argmax()
    found, likeliest = loss_module.label_probabilities(
        (trained["hidden"], trained["latent"], trained["w2"]),
        loss_module.HeadProducts(head, torch.float64),
        labels_N,
        count,
    )
    expected = z.softmax(-1).gather(1, labels_N.clamp(min=0)[:, None])[:, 0] * (labels_N >= 0)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert (found == 0).any() and (found > 0).any()
    assert likeliest.tolist() == (z.argmax(-1) == labels_N).tolist() and likeliest.any() and not likeliest.all()


@pytest.mark.parametrize("count", [None, 4])
def test_probabilities_of_labels_in_bfloat16(count: int | None) -> None:
    """Logits near 60: plain bfloat16 is off by up to 0.25 in them, and so by a quarter in probability."""
    generator = torch.Generator().manual_seed(5)
    head, w2 = (torch.randn(300, width, generator=generator).bfloat16().float() for width in (32, 8))
    hidden = (torch.randn(64, 32, generator=generator) * 4).bfloat16().float()
    latent = (torch.randn(64, 8, generator=generator) * 0.5).bfloat16().float()
    logits = hidden @ head.T
    labels = logits.argmax(-1)
    assert logits.amax(-1).mean() > 40
    exact, rounded = (
        loss_module.label_probabilities((hidden, latent, w2), loss_module.HeadProducts(head, dtype), labels, count)[0]
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
    if rows.candidates is not None:
        kept = torch.zeros_like(z_NKV, dtype=torch.bool).scatter(2, unary_NKV.topk(rows.candidates).indices, True)
        z_NKV = z_NKV.masked_fill(~kept, -torch.inf)
    total: Tensor | float = 0.0
    for n, k_s in enumerate(batch.supervised_NK.sum(-1).tolist()):
        labels = [int((ids == label).nonzero()[0]) if label in ids else None for label in batch.labels_NK[n, :k_s]]
        log_probs = [
            z_NKV[n, k].log_softmax(-1)[label] if label is not None else None for k, label in enumerate(labels)
        ]
        likely = [0.0 if log_p is None else math.exp(log_p.item()) for log_p in log_probs]
        for k, weight in enumerate(dpace_reference(likely, 0.5)):
            if likely[k] > 0 and log_probs[k] is not None:
                total = total - weight * log_probs[k]
            if rows.candidates is not None and labels[k] is not None:  # the parallel logits have a loss of their own
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


def test_the_confidences_loss_may_train_their_head_alone() -> None:
    """The rest then has the gradients of a loss without it."""
    target, samples = toy_target(), toy_samples(3)
    drafter = made("dspark").weights.module.train().requires_grad_()
    batch, _ = build(drafter, target, samples, torch.arange(97), Schedule(samples, 3, 5, seed=1).step(0))

    def gradients(**changes: float | bool) -> dict[str, Tensor]:
        names, parameters = zip(*drafter.named_parameters(), strict=True)
        loss = BlockObjective(target, torch.arange(97), ObjectiveConfig(**changes))(drafter, batch).loss
        return dict(zip(names, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True))

    whole, alone, without = gradients(), gradients(confidence_gradient=False), gradients(confidence=0.0)
    heads = {name for name in whole if name.startswith("confidence_head")}
    for name in heads:
        torch.testing.assert_close(alone[name], whole[name])
    for name in whole.keys() - heads:
        torch.testing.assert_close(alone[name], without[name])
    assert heads and any(not torch.allclose(whole[name], alone[name]) for name in whole.keys() - heads)


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    trained, head, p_t, view = case(1)
    sequential = {**heads(trained), "confidence_N": None}
    output = objective(trained["hidden"], head, view, ObjectiveConfig(), weights_N=torch.ones(N), **sequential)
    p_d = (trained["hidden"] @ head.T + trained["latent"] @ trained["w2"].T).softmax(-1)
    torch.testing.assert_close(output.acceptance_N, torch.minimum(p_d, p_t).sum(-1), atol=1e-12, rtol=1e-12)


def test_without_heads_only_the_backbone_gets_a_gradient() -> None:
    trained, head, _, view = case(2)
    hidden = trained["hidden"].requires_grad_()
    objective(hidden, head, view, ObjectiveConfig(ce=1, l1=0), weights_N=torch.ones(N)).loss.backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0


def test_soft_capped_targets() -> None:
    trained, head, _, view = case(3)
    logits = torch.tanh(view.hidden_ND @ head.T / 5) * 5
    capped = TargetView(view.hidden_ND, logits.logsumexp(-1), view.labels_N, view.argmax_N, softcap=5.0)
    output = objective(trained["hidden"], head, capped, ObjectiveConfig(), weights_N=torch.ones(N))
    p_d = (trained["hidden"] @ head.T).softmax(-1)
    torch.testing.assert_close(output.acceptance_N, torch.minimum(p_d, logits.softmax(-1)).sum(-1))


def test_position_weights_decay() -> None:
    weights = ObjectiveConfig(decay=4.0).position_weights(3, torch.device("cpu"))
    torch.testing.assert_close(weights, torch.exp(-torch.tensor([0.0, 1.0, 2.0]) / 4))


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
    monkeypatch.setattr(loss_module, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", budget)
    monkeypatch.setattr(loss_module, "TILE_BYTES", budget // 8)
    hidden = torch.randn(rows, H, requires_grad=True)
    head = torch.randn(vocab, H).bfloat16()
    labels = torch.zeros(rows, dtype=torch.long)
    view = TargetView(torch.randn(rows, H), torch.randn(rows) + 9, labels, labels)
    with Allocations() as seen:
        objective(hidden, head, view, ObjectiveConfig(), weights_N=torch.ones(rows)).loss.backward()
    assert budget // 4 < seen.largest <= budget // 2


def test_chunks_are_equal_and_inside_the_budget() -> None:
    rows = loss_module.chunk_rows(3584, 151_936, 4)
    assert 16 <= rows <= loss_module.CHUNK_BYTES // (8 * 151_936)
    assert loss_module.chunk_rows(784, 12_288, 4) == 784
    assert loss_module.chunk_rows(10**6, 10**8, 4) == 16  # never fewer, whatever the vocabulary


def test_a_head_in_another_type_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "TILE_BYTES", 5 * H * 8)
    trained, head, _, view = case(4)
    narrow = head.bfloat16()
    results = []
    for held in (narrow, narrow.double()):
        leaves = {k: v.clone().requires_grad_() for k, v in trained.items()}
        output = objective(leaves["hidden"], held, view, ObjectiveConfig(), weights_N=torch.ones(N), **heads(leaves))
        output.loss.backward()
        results.append([leaf.grad for leaf in leaves.values()])
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
    exact, rounded = (
        objective(hidden, head, view, ObjectiveConfig(), weights_N=torch.ones(rows), products=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0.1 < exact.acceptance_N.mean() < 0.95
    assert (exact.acceptance_N - rounded.acceptance_N).abs().max() < 0.02
    plain = torch.minimum((hidden.bfloat16() @ head.bfloat16().T).float().softmax(-1), logits.softmax(-1)).sum(-1)
    assert (exact.acceptance_N - plain).abs().max() > 0.04

"""DSpark with DeepSeek-V4's layers: against loops, served as trained; its window, routing, streams and training."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import DeepseekV4Model

from outrider.api.drafter import choose_drafter
from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.contrib.deepseek_v4 import (
    ContextLatents,
    DSparkV4,
    DSparkV4Config,
    DSparkV4Drafter,
    RoutedExperts,
    Router,
    sinkhorn,
)
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import DraftCall, Drafter, DrafterWeights, DraftModule
from outrider.drafters.dspark import DSparkRows
from outrider.drafters.layers import BlockLayout
from outrider.drafters.loss import ObjectiveConfig
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target, load_target
from outrider.training.batches import Schedule
from outrider.training.dataset import choose_draft_ids
from outrider.training.features import measure_aux_scale
from outrider.training.objective import BlockObjective
from outrider.training.recipe import Precision, Recipe
from outrider.training.setup import Run
from outrider.training.trainer import Trainer
from tests.toys.alignment import Forced, build, check_alignment
from tests.toys.deepseek_v4 import RAW, Reference, published, write
from tests.toys.dialects import config_of
from tests.toys.engine import finish
from tests.toys.oracle import row_of
from tests.toys.published import published_target
from tests.toys.targets import randomise, toy_samples, toy_target, with_mask_token
from tests.toys.tokenizer import byte_tokenizer
from tests.toys.training import OPTIMIZER, on_policy_samples, recipe, train_until


def make(**changes: Any) -> DSparkV4:
    """Random weights and biases of the routers, unequal scales of the aux layers."""
    drafter = DSparkV4(config_of("dspark_v4", **changes))
    randomise(drafter)
    for number, layer in enumerate(drafter.layers):
        layer.ffn.gate.bias.copy_(0.2 * torch.randn(len(layer.ffn.gate.bias), generator=generator(number)))
    drafter.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0]))
    return drafter


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ----------------------------------------------------------------------------
# A checkpoint in the published names, read and served, against loops.
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [[3], [8], [2, 7, 1, 9]], ids=["few", "the-window", "longer-than-the-window"])
@torch.inference_mode()
def test_a_published_checkpoint_drafts_as_loops_over_rows_say(committed: list[int], tmp_path: Path) -> None:
    tensors, target = published(), toy_target()
    drafter = load_checkpoint(write(tmp_path, tensors), num_target_layers=5).serve(target)
    assert isinstance(drafter, DSparkV4Drafter) and drafter.heads.confidence is not None
    aux_TLD = torch.randn(sum(committed), 3, 32, generator=generator(1))
    session = drafter.new_session(64)
    for part in aux_TLD.split(committed):
        drafter.extend([session], [[7] * len(part)], part)
    block = [11, *[RAW["dspark_noise_token_id"]] * 4]
    reference = Reference(tensors)
    hidden = reference.hidden(aux_TLD.flatten(1).double().numpy(), target.embed_VD[block].double().numpy())
    found = drafter.block_hidden([session], [11])[0]
    np.testing.assert_allclose(found.numpy(), hidden, atol=1e-4, rtol=0)
    drafts = [20, 31, 42, 53, 64]
    logits, confidences = reference.logits(hidden, [11, *drafts[:-1]], target.head_VD.double().numpy())
    call = DraftCall(
        session,
        11,
        SamplingParams(temperature=1.0),
        SeenTokens(97),
        SeededSource(0),
        noise=Forced(drafts, 1),
        position=1,
    )
    (draft,) = drafter.propose([call])
    assert draft.tokens == drafts
    rows = torch.stack([row_of(draft, k) for k in range(5)])
    np.testing.assert_allclose(rows.numpy(), torch.tensor(logits).softmax(-1).numpy(), atol=1e-4, rtol=0)
    np.testing.assert_allclose(draft.confidences, 1 / (1 + np.exp(-confidences)), atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_training_forward_is_that_of_the_loops_too(tmp_path: Path) -> None:
    tensors = published(1)
    module = load_checkpoint(write(tmp_path, tensors), num_target_layers=5).weights.module
    lengths, anchors = [14, 3], [0, 5, 14, 3]
    layout = BlockLayout(lengths, torch.tensor(anchors), torch.tensor([0, 0, 0, 1]))
    aux, embedded = torch.randn(17, 3, 32, generator=generator(2)), torch.randn(4, 5, 32, generator=generator(3))
    assert isinstance(module, DSparkV4)
    found = module(aux, embedded, layout)
    for block, (anchor, start) in enumerate(zip(anchors, [0, 0, 0, 14], strict=True)):
        features = aux[start : start + anchor].flatten(1).double().numpy()
        expected = Reference(tensors).hidden(features, embedded[block].double().numpy())
        np.testing.assert_allclose(found[block].numpy(), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_block_without_context_is_transformers_own_layers(tmp_path: Path) -> None:
    """A second reference: layers of the target in transformers, without compression and with rows that see all rows."""
    tensors = published(3)
    module = load_checkpoint(write(tmp_path, tensors), num_target_layers=5).weights.module
    names = ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_lora_rank", "o_groups")
    names += ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "routed_scaling_factor")
    names += ("swiglu_limit", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps", "rope_theta", "sliding_window")
    kinds = {"layer_types": ["sliding_attention"] * 3, "mlp_layer_types": ["moe"] * 3, "num_hidden_layers": 3}
    partial = RAW["qk_rope_head_dim"] / RAW["head_dim"]
    config = DeepseekV4Config(**{name: RAW[name] for name in names}, **kinds, partial_rotary_factor=partial)
    theirs = DeepseekV4Model._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    renamed = {
        re.sub(r"^mtp\.(\d)\.", r"layers.\1.", name): t for name, t in tensors.items() if name.startswith("mtp.")
    }
    renamed |= {re.sub(r"^layers\.2\.", "", name): t for name, t in renamed.items() if "layers.2.hc_head" in name}
    state = transformers_names(renamed)
    missing, _ = theirs.load_state_dict(state, strict=False)
    assert set(missing) == {"embed_tokens.weight", "norm.weight"}
    x = torch.randn(2, 5, 32, generator=generator(7))
    streams, positions = x[:, :, None].repeat(1, 1, 3, 1), torch.arange(5)[None]
    rope = {"main": theirs.rotary_emb(x, position_ids=positions, layer_type="main")}
    for layer in theirs.layers:
        mask = torch.zeros(2, 1, 5, 5)
        streams = layer(streams, position_embeddings=rope, position_ids=positions, attention_mask=mask)
    layout = BlockLayout([1, 1], torch.zeros(2, dtype=torch.long), torch.arange(2))
    assert isinstance(module, DSparkV4)
    torch.testing.assert_close(module(torch.randn(2, 3, 32), x, layout), theirs.hc_head(streams), atol=1e-4, rtol=0)


def transformers_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As transformers' conversion of DeepSeek-V4's checkpoints names and joins them."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        for theirs, ours in TRANSFORMERS:
            name = re.sub(theirs, ours, name)
        found[name] = tensor
    for i in range(3):
        experts, count = f"layers.{i}.mlp.experts", RAW["n_routed_experts"]
        gate_up = [torch.cat([found.pop(f"{experts}.{e}.w{n}.weight") for n in (1, 3)]) for e in range(count)]
        found[f"{experts}.gate_up_proj"] = torch.stack(gate_up)
        found[f"{experts}.down_proj"] = torch.stack([found.pop(f"{experts}.{e}.w2.weight") for e in range(count)])
    return found


TRANSFORMERS = [
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(\w+)", r".\1_hc.\2"),
    (r"^hc_head_(\w+)", r"hc_head.hc_\1"),
    (r"\.attn_sink", ".sinks"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
]


# ----------------------------------------------------------------------------
# Served as trained.
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"sample_from_anchor": False}, {"draft_vocab_size": 40}, {"sliding_window": 64}]
)
def test_trained_equals_served(changes: dict[str, Any]) -> None:
    target, samples = toy_target("qwen3"), toy_samples(4)
    drafter = make(**changes)
    ids = choose_draft_ids(samples, 97, drafter.config.draft_vocab_size, frozenset({1}))
    assert check_alignment(target, drafter, samples, ids) > 50


@torch.no_grad()
def test_confidences_are_trained_on_what_they_are_served_from() -> None:
    """The hidden state before the norm, whose length a normed one does not have."""
    target, samples = toy_target(), toy_samples(3)
    drafter = make()
    batch, compute = build(drafter, target, samples, torch.arange(97), Schedule(samples, 3, 6, seed=1).step(0))
    rows = compute.rows(drafter, batch)
    assert isinstance(rows, DSparkRows) and drafter.confidence_head is not None
    torch.testing.assert_close(drafter.norm(rows.read_NKH), rows.hidden_NKH)
    before = compute(drafter, batch).loss
    drafter.norm.weight.mul_(-1)  # the logits turn around, confidences must not move
    after = compute.rows(drafter, batch)
    assert isinstance(after, DSparkRows)
    assert torch.equal(rows.read_NKH, after.read_NKH) and torch.equal(after.hidden_NKH, -rows.hidden_NKH)
    drafter.norm.weight.mul_(-1)
    drafter.confidence_head.proj.weight.mul_(2)
    assert compute(drafter, batch).loss != before


@torch.inference_mode()
def test_requests_of_a_batch_are_served_as_if_alone() -> None:
    drafter = DrafterWeights(make().eval()).serve(toy_target())
    assert isinstance(drafter, DSparkV4Drafter)
    aux = {n: torch.randn(n, 3, 32, generator=generator(n)) for n in (0, 1, 5, 6, 7, 20)}
    alone = []
    for part in aux.values():
        session = drafter.new_session(64)
        drafter.extend([session], [[4] * len(part)], part)
        alone.append(drafter.block_hidden([session], [9])[0])
    sessions = [drafter.new_session(64) for _ in aux]
    for half in (0, 1):  # in two parts, the first empty for some
        parts = [part[: len(part) // 3] if half == 0 else part[len(part) // 3 :] for part in aux.values()]
        drafter.extend(sessions, [[4] * len(part) for part in parts], torch.cat(parts))
    together = drafter.block_hidden(sessions, [9] * len(aux))
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-5, rtol=1e-5)


def test_text_is_that_of_plain_decoding_alone_and_in_the_engine() -> None:
    """Coupled noise: the same tokens at temperature 1, where some drafts of any drafter are accepted."""
    target, rules = toy_target(), StopRules(20, stop_ids=())
    params = SamplingParams(temperature=1.0, seed=4, coupled=True)
    drafter = DrafterWeights(make().eval()).serve(target)
    prompts = [[5], [9, 8, 7, 30, 31], list(range(10, 23))]
    plain = [generate(target, prompt, None, params, rules).tokens for prompt in prompts]
    alone = [generate(target, prompt, drafter, params, rules) for prompt in prompts]
    assert [found.tokens for found in alone] == plain
    assert sum(r.accepted for found in alone for r in found.rounds) > 0
    engine = Engine(target, drafter, config=EngineConfig(max_requests=2, num_blocks=40))
    together = finish(engine, [Request(str(n), prompt, params, rules) for n, prompt in enumerate(prompts)])
    assert list(together.values()) == plain


def test_what_a_block_sees_ends_at_the_window_and_at_its_anchor() -> None:
    layout = BlockLayout([9, 4], torch.tensor([0, 2, 9, 4]), torch.tensor([0, 0, 0, 1]))
    slots = ContextLatents.of(torch.zeros(13, 32), layout, config_of("dspark_v4", sliding_window=5)).slots_NW
    seen = [sorted(slot for slot in row if slot < 13) for row in slots.tolist()]
    assert seen == [[], [0, 1], [4, 5, 6, 7, 8], [9, 10, 11, 12]]


@torch.inference_mode()
def test_tokens_outside_the_window_do_not_matter_and_the_last_inside_does() -> None:
    drafter = DrafterWeights(make(sliding_window=6).eval()).serve(toy_target())
    assert isinstance(drafter, DSparkV4Drafter)
    aux = torch.randn(15, 3, 32, generator=generator(0))

    def hidden(changed: int | None) -> Tensor:
        own = aux.clone()
        if changed is not None:
            own[changed] += 1
        session = drafter.new_session(64)
        drafter.extend([session], [[4] * 15], own)
        return drafter.block_hidden([session], [9])

    plain = hidden(None)
    assert all(torch.equal(hidden(i), plain) for i in range(9))
    assert all((hidden(i) - plain).abs().max() > 1e-5 for i in range(9, 15))


# ----------------------------------------------------------------------------
# Streams, routing.
# ----------------------------------------------------------------------------


def test_streams_are_mixed_by_matrices_whose_rows_and_columns_sum_to_one() -> None:
    matrix = sinkhorn(torch.randn(50, 4, 4, generator=generator(0)), 20, 1e-6)
    assert (matrix > 0).all()
    for dim in (-1, -2):
        torch.testing.assert_close(matrix.sum(dim), torch.ones(50, 4), atol=1e-3, rtol=0)
    rough = sinkhorn(torch.randn(50, 4, 4, generator=generator(0)), 1, 1e-6)
    assert (rough.sum(-1) - 1).abs().max() > 0.1  # one iteration normalises the columns alone


def test_a_fresh_connection_is_a_plain_residual_connection() -> None:
    config = config_of("dspark_v4")
    drafter = DSparkV4(config)
    connection = drafter.layers[0].hc_attn
    with torch.no_grad():
        connection.fn.zero_()
        x = torch.randn(2, 3, 32, generator=generator(1))
        streams = x[..., None, :].expand(2, 3, 3, 32)
        out = connection(streams, lambda y: torch.ones_like(y))
    torch.testing.assert_close(out, streams + 1, atol=1e-4, rtol=0)


def test_each_row_is_a_weighted_sum_of_its_experts() -> None:
    config = config_of("dspark_v4")
    router, experts = Router(config), RoutedExperts(config)
    randomise(router)
    randomise(experts)
    router.bias.copy_(torch.tensor([5.0, 0, 0, 0, -5.0]))
    x = torch.randn(40, 32, generator=generator(4))
    chosen, weights = router(x)
    assert (chosen == 0).any(1).all() and not (chosen == 4).any()  # the bias chooses
    torch.testing.assert_close(weights.sum(1), torch.full((40,), 1.5))
    scores = torch.nn.functional.softplus(x @ router.weight.T).sqrt().gather(1, chosen)
    torch.testing.assert_close(weights, 1.5 * scores / scores.sum(1, keepdim=True))  # and does not weigh
    found = experts(x, chosen, weights)
    for row in range(40):
        expected = torch.zeros(32)
        for e, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            gate, up = (experts.w1[e] @ x[row]).clamp(max=10), (experts.w3[e] @ x[row]).clamp(-10, 10)
            expected = expected + weight * (experts.w2[e] @ (gate * gate.sigmoid() * up))
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)


# ----------------------------------------------------------------------------
# Training.
# ----------------------------------------------------------------------------


def run_of(target: Target, samples: list[Any], **changes: Any) -> Run:
    torch.manual_seed(0)
    chosen = {"n_routed_experts": 6, "sliding_window": 16, "block_size": 4, "markov_rank": 6, **changes}
    drafter = DSparkV4(DSparkV4Config.from_target(with_mask_token(target), num_aux_layers=3, **chosen))
    drafter.initialize_from(target, [])
    ids = torch.arange(97)
    drafter.aux_scale_L.copy_(measure_aux_scale(target, samples[:3], drafter.config.target_layer_ids))
    objective = BlockObjective(target, ids, ObjectiveConfig(ce=1.0))
    return Run(target, drafter, objective, ids, False, samples[2:], samples[:2])


def v4_recipe(out: Path, **changes: Any) -> Recipe:
    return recipe(out, drafter={"algorithm": "dspark_v4"}, **changes)


def test_the_loss_falls_and_drafts_are_learnt(tmp_path: Path) -> None:
    target = toy_target()
    run = run_of(target, on_policy_samples(target, 12))
    run.held_out = run.samples[:3]  # toys learn by heart, they do not generalise
    first = {name: tensor.clone() for name, tensor in run.drafter.state_dict().items()}
    chosen = {**OPTIMIZER, "steps": 400, "sequences_per_step": 10, "anchors_per_sequence": 8, "learning_rate": 3e-3}
    learning = v4_recipe(tmp_path, optimizer=chosen, eval_every=50, save_every=50)
    before = Trainer(learning, run).evaluate()

    def learned(after: dict[str, float]) -> bool:
        return after["expected_length_greedy"] > 1.5 and after["loss"] < before["loss"] - 1

    train_until(learned, learning, run, part=50)
    assert all(not torch.equal(tensor, first[name]) for name, tensor in run.drafter.state_dict().items())


def test_gradients_reach_every_expert_and_every_map() -> None:
    target, samples = toy_target(), toy_samples(4)
    drafter = make()
    batch, compute = build(drafter, target, samples, torch.arange(97), Schedule(samples, 3, 8, seed=1).step(0))
    compute(drafter, batch).loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        parts = parameter.grad.flatten(1).abs().amax(1) if ".experts." in name else parameter.grad.abs().max()[None]
        assert (parts > 0).all(), name


def test_bfloat16_products_change_little_and_leave_routing_and_mixing_in_float32() -> None:
    target, samples = toy_target(), toy_samples(4)
    drafter, losses, kinds = make(), [], set[torch.dtype]()
    batch, _ = build(drafter, target, samples, torch.arange(97), Schedule(samples, 3, 8, seed=1).step(0))
    drafter.layers[1].ffn.gate.register_forward_hook(lambda _m, _a, out: kinds.add(out[1].dtype))
    drafter.layers[1].hc_ffn.register_forward_hook(lambda _m, _a, out: kinds.add(out.dtype))
    precisions: tuple[Precision, ...] = ("float32", "bfloat16")
    for precision in precisions:
        compute = BlockObjective(target, torch.arange(97), ObjectiveConfig(), precision)
        losses.append(compute(drafter, batch).loss.item())
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=1e-2) and kinds == {torch.float32}


def test_an_expert_that_nobody_chose_has_a_gradient_of_zero() -> None:
    """With none a rank's reduction would wait for it."""
    target, samples = toy_target(), toy_samples(4)
    drafter = make()
    drafter.layers[1].ffn.gate.bias[3] = -100.0
    batch, compute = build(drafter, target, samples, torch.arange(97), Schedule(samples, 3, 8, seed=1).step(0))
    compute(drafter, batch).loss.backward()
    experts = drafter.layers[1].ffn.experts
    for grad in (experts.w1.grad, experts.w2.grad, experts.w3.grad):
        assert grad is not None and not grad[3].any() and grad[0].any()


def test_the_bias_moves_towards_experts_that_are_chosen_less_often() -> None:
    router = Router(config_of("dspark_v4"))
    x = torch.randn(64, 32, generator=generator(0))
    router.bias.copy_(torch.tensor([9.0, 9.0, 0, 0, 0]))
    router(x)
    router.balance(0.5, lambda counts: counts)
    assert router.bias.tolist() == [8.5, 8.5, 0.5, 0.5, 0.5] and router.chosen is None
    with torch.no_grad():
        router(x)
    assert router.chosen is None  # an evaluation counts nothing


def test_even_use_of_experts_is_learnt(tmp_path: Path) -> None:
    target = toy_target()

    def unevenness(rate: float | None) -> float:
        run = run_of(target, toy_samples(14), balance_rate=rate)
        gate = run.drafter.layers[0].ffn.gate
        with torch.no_grad():
            gate.bias.copy_(torch.tensor([0.3, 0.3, 0, 0, -0.3, -0.3]))
        Trainer(v4_recipe(tmp_path / str(rate), optimizer=OPTIMIZER), run).train()
        seen: list[Tensor] = []
        gate.register_forward_hook(lambda _m, _a, out: seen.append(torch.bincount(out[0].flatten(), minlength=6)))
        batch, compute = build(
            run.drafter, target, toy_samples(4), torch.arange(97), Schedule(toy_samples(4), 3, 8, seed=1).step(0)
        )
        with torch.no_grad():
            compute(run.drafter, batch)
        return float(seen[0].float().std() / seen[0].float().mean())

    assert unevenness(0.05) < 0.7 * unevenness(None)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    target, states = toy_target(), []
    for name, stops in (("whole", [None]), ("in-parts", [4, 8, None])):
        for stop in stops:
            run = run_of(target, toy_samples(14))
            Trainer(v4_recipe(tmp_path / name), run).train(stop_after=stop)
        states.append(run.drafter.state_dict())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert any(states[0][f"layers.{i}.ffn.gate.bias"].any() for i in range(3))


def test_a_trained_drafter_is_saved_and_served_again(tmp_path: Path) -> None:
    target = toy_target()
    run = run_of(target, toy_samples(14))
    Trainer(v4_recipe(tmp_path), run).train()
    loaded = load_checkpoint(tmp_path / "drafter")
    assert loaded.config == replace(run.drafter.config)
    state = run.drafter.folded_state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.weights.tensors.items())
    assert loaded.serve(target).gamma == 4


def test_checkpointed_activations_route_as_before(tmp_path: Path) -> None:
    target, states = toy_target(), []
    for name in (False, True):
        run = run_of(target, toy_samples(14))
        Trainer(v4_recipe(tmp_path / str(name), optimizer={**OPTIMIZER, "checkpoint_activations": name}), run).train()
        states.append(run.drafter.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], atol=1e-4, rtol=1e-4)


# ----------------------------------------------------------------------------
# Its own target.
# ----------------------------------------------------------------------------


def check_texts(target: Target, drafter: Drafter) -> None:
    """Greedy text, alone and in the engine, is plain decoding's; so is coupled text, with some drafts accepted."""
    prompts, rules = [[9, 8, 7, 30, 31], list(range(10, 43))], StopRules(12, stop_ids=())
    params = SamplingParams(repetition_penalty=3.0)
    plain = [generate(target, prompt, None, params, rules).tokens for prompt in prompts]
    assert [generate(target, prompt, drafter, params, rules).tokens for prompt in prompts] == plain
    engine = Engine(target, drafter, config=EngineConfig(max_requests=2, num_blocks=40))
    together = finish(engine, [Request(str(n), prompt, params, rules) for n, prompt in enumerate(prompts)])
    assert list(together.values()) == plain
    coupled, rules = SamplingParams(temperature=1.0, seed=4, coupled=True), StopRules(40, stop_ids=())
    found = generate(target, prompts[1], drafter, coupled, rules)
    assert found.tokens == generate(target, prompts[1], None, coupled, rules).tokens
    assert sum(r.accepted for r in found.rounds) > 0


def test_deepseek_v4_is_trained_for_and_decoded_with(tmp_path: Path) -> None:
    target = published_target("deepseek_v4")
    run = run_of(target, toy_samples(14))
    assert run.drafter.config.target_layer_ids == (2, 3, 4), "the last one's streams too, as DeepSeek's"
    Trainer(v4_recipe(tmp_path, optimizer={**OPTIMIZER, "steps": 4}, eval_every=4), run).train()
    loaded = load_checkpoint(tmp_path / "drafter")
    assert isinstance(loaded.weights.module, DSparkV4)
    check_texts(target, loaded.serve(target))


PUBLISHED_NAMES = [("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"), ("model.", "")]


def test_one_checkpoint_is_target_and_drafter(tmp_path: Path) -> None:
    """Under the names that DeepSeek publishes, which transformers reads and does not write."""
    made = published_target("deepseek_v4")
    made.model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    weights = {name: tensor for name, tensor in published().items() if name.startswith("mtp.")}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        for theirs, ours in PUBLISHED_NAMES:
            name = name.replace(theirs, ours)
        weights[name.replace(".attn.norm.", ".attn.kv_norm.")] = tensor
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    target, choice = load_target(tmp_path), choose_drafter(str(tmp_path), str(tmp_path))
    tokens = torch.tensor([list(range(10, 43))])
    ours, theirs = (t.forward(tokens, t.new_cache(0), logits=None).logits_BTV for t in (target, made))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    assert choice is not None
    opened = choice.open(target)
    assert opened.algorithm == "dspark_v4" and opened.drafter.aux_layers == (2, 3, 4) and opened.drafter.gamma == 5
    check_texts(target, opened.drafter)


# ----------------------------------------------------------------------------
# The config.
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "one latent serves all heads"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim 3 must be even"),
        ({"qk_rope_head_dim": 10}, "at most head_dim 8"),
        ({"o_groups": 3}, "o_groups 3 must divide"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok 6 is more than n_routed_experts 5"),
        ({"is_causal": True}, "layer_types and is_causal have no place"),
        ({"markov_head_type": "gated"}, "markov_head_type 'gated'"),
    ],
)
def test_configs_that_no_layer_has_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of("dspark_v4", **changes)


def test_new_drafters_have_the_targets_width_and_deepseeks_proportions() -> None:
    config = DSparkV4Config.from_target(with_mask_token(toy_target()))
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (32, 4, 8)
    assert (config.intermediate_size, config.q_lora_rank, config.o_lora_rank, config.o_groups) == (16, 8, 8, 4)
    assert (config.num_hidden_layers, config.block_size, config.sliding_window, config.hc_mult) == (3, 5, 128, 4)
    assert config.target_layer_ids == (1, 2, 3) and config.gamma == 5 and config.qk_rope_head_dim == 4
    changed = DSparkV4Config.from_target(with_mask_token(toy_target()), intermediate_size=9, num_aux_layers=1)
    assert changed.intermediate_size == 9 and changed.target_layer_ids == (3,)
    with pytest.raises(ValueError, match="has 4 before its last"):
        DSparkV4Config.from_target(with_mask_token(toy_target()), num_aux_layers=5)


def test_a_shorter_block_is_one_of_fewer_rows() -> None:
    target = toy_target()
    module: DraftModule = make().eval()
    drafter = DrafterWeights(module).serve(target)
    assert isinstance(drafter, DSparkV4Drafter)
    short, session = drafter.of_length(2), drafter.new_session(32)
    assert isinstance(short, DSparkV4Drafter)
    with torch.inference_mode():
        drafter.extend([session], [[4] * 5], torch.randn(5, 3, 32, generator=generator(0)))
        assert short.block_hidden([session], [9]).shape == (1, 2, 32)
        assert not torch.allclose(short.block_hidden([session], [9]), drafter.block_hidden([session], [9])[:, :2])

"""The MLX backend against mlx-lm's own decoding and against the torch path. `make test-mlx` runs it with MLX."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as mlx_nn
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM
from typer.testing import CliRunner

import outrider.backends.mlx.target as mlx_cache
from outrider.backends.mlx.drafter import MLXDrafter, OutputRows, decoder
from outrider.backends.mlx.target import Call, MLXCache, MLXTarget, load_mlx_target, older_fields, to_torch
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.checkpoints.published import shipped_drafter
from outrider.cli.main import app
from outrider.data.chat import render
from outrider.data.conversations import Conversation
from outrider.data.sources import TaskSettings
from outrider.decoding.engine import Engine, Step, config_alone
from outrider.decoding.generate import acceptance, generate, stream
from outrider.decoding.policies import FixedPolicy, ThresholdPolicy
from outrider.decoding.request import Request, StopRules
from outrider.drafters.base import DraftCall, DrafterWeights, draft_slots
from outrider.drafters.dflash import FULL, SLIDING, DFlash, DFlashConfig
from outrider.drafters.draft import Draft
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.drafters.medusa import Medusa, MedusaConfig
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.rope import RopeScaling
from outrider.evaluation.evaluate import decode_turns
from outrider.evaluation.loadtest.metrics import Frontier
from outrider.sampling import Randomness, RandomSource, SamplingParams, SeededSource, SeenTokens, warp
from outrider.target.hub import EMBEDDED_ID
from outrider.target.model import Target, load_target
from outrider.target.paged import Span
from tests.proof.enumeration import exact_output_distribution, exact_target_distribution, max_deviation
from tests.toys.alignment import read_prompt
from tests.toys.example_drafter import Bigram, BigramConfig
from tests.toys.mlx_models import MLX_TOYS, mlx_model, mlx_toy, plain_mlx
from tests.toys.oracle import Oracle, chain_of, row_of
from tests.toys.targets import TOY, randomise, toy_config, toy_target
from tests.toys.tokenizer import byte_tokenizer

pytest.importorskip(
    "mlx_lm", reason="mlx-lm is not installed: make test-mlx runs these tests in an environment with it"
)

PROMPT = [5, 9, 11, 40, 41, 42, 3, 8, 8, 20, 30, 50, 60, 70]
WINDOWED, HYBRID = "gpt_oss", "qwen3_next"


@pytest.fixture(autouse=True, scope="module")
def _no_compiler() -> Any:
    """On Linux mx.compile calls a C++ compiler for every new kernel: seconds each."""
    mx.disable_compile()
    yield
    mx.enable_compile()


# --- the target: rollback, aux hidden states, embeddings, head


def distance_after_rollback(family: str) -> float:
    """Logits after a forward of which 2 of 5 rows were kept, twice, against a forward that saw the kept ones only."""
    target = mlx_toy(family)
    draft, last = [7, 1, 9, 33, 12], [21, 22, 23]
    kv, kept = target.new_kv(4, 16), list(PROMPT)
    target.forward_ragged([Span(PROMPT, 0, [], 0)], kv)
    for _ in range(2):
        target.forward_ragged([Span(draft, len(kept), [], 5)], kv)
        kv.keep_paths([([], len(kept), [0, 1])])
        kept += draft[:2]
        assert kv.cache.length == len(kept)
        target.forward_ragged([Span([13], len(kept), [], 1)], kv)  # a single row is written in place
        kept.append(13)
    after = target.forward_ragged([Span(last, len(kept), [], 3)], kv).logits_NV
    fresh = target.forward_ragged([Span([*kept, *last], 0, [], 3)], target.new_kv(4, 16)).logits_NV
    assert after is not None and fresh is not None
    return (after - fresh).abs().max().item()


@pytest.mark.parametrize("family", MLX_TOYS)
def test_rollback_leaves_no_trace(family: str) -> None:
    assert distance_after_rollback(family) < 1e-4


def test_wrong_rollbacks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's own trim of a full window, and a recurrent state that is not made up for."""
    with monkeypatch.context() as patch:
        patch.setattr(mlx_cache, "_cut", lambda layer, count: layer.trim(count))
        assert distance_after_rollback(WINDOWED) > 1e-2
    with monkeypatch.context() as patch:
        patch.setattr(Call, "again", lambda call, rows: None)
        assert distance_after_rollback(HYBRID) > 1e-2


def test_a_memory_that_cannot_be_rolled_back_is_refused() -> None:
    model, _ = mlx_model("llama")

    class OtherMemory:
        """A kind of cache nobody has heard of."""

    model.make_cache = lambda: [OtherMemory()]
    with pytest.raises(ValueError, match="OtherMemory"):
        MLXCache(model)


def saved(model: Any, directory: Path, **fields: object) -> MLXTarget:
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))
    byte_tokenizer().save_pretrained(directory)
    return load_mlx_target(str(directory))


def test_code_that_comes_with_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="never runs code that comes with a model"):
        saved(toy_target("llama").model, tmp_path, model_file="code.py")


def check_same_forward(target: Target, ours: MLXTarget, tolerance: float) -> None:
    aux_layers = (-1, 0, 2, 3)
    span = Span(PROMPT * 2, 0, [0, 1, 2], 2 * len(PROMPT))
    expected = target.forward_ragged([span], target.new_kv(3, 16), aux_layers)
    found = ours.forward_ragged([span], ours.new_kv(3, 16), aux_layers)
    for mine, theirs in ((found.logits_NV, expected.logits_NV), (found.aux_TLD, expected.aux_TLD)):
        assert mine is not None and theirs is not None
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_and_aux_layers_are_those_of_torch(family: str, tmp_path: Path) -> None:
    """Saved by transformers 5, whose rope_parameters mlx-lm's llama does not read."""
    target = toy_target(family)
    check_same_forward(target, saved(target.model, tmp_path), 1e-4)


def test_gemma_3_scales_embeddings_and_has_two_rotations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("full", 5e3), ("sliding", 5e2))}
    fields = {**TOY, "hidden_size": 64, "rope_parameters": {f"{kind}_attention": rope[kind] for kind in rope}}
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    config = Gemma3TextConfig(**fields, layer_types=kinds, sliding_window=8, query_pre_attn_scalar=8)
    target = Target(Gemma3ForCausalLM(config), None, "toy")
    ours = saved(target.model, tmp_path, sliding_window_pattern=2)
    assert ours.embed_scale == pytest.approx(8.0)
    check_same_forward(target, ours, 1e-4)


def test_older_fields_fill_gaps_only() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 7.0, "factor": 2.0}
    assert older_fields({"rope_parameters": rope}) == {"rope_theta": 7.0, "rope_scaling": rope}
    assert older_fields({"rope_parameters": rope, "rope_theta": 5.0, "rope_scaling": {}}) == {}
    nested = older_fields({"text_config": {"hidden_size": 8, "rope_parameters": {"rope_theta": 7.0}}})
    assert nested["text_config"]["rope_theta"] == 7.0 and nested["text_config"]["hidden_size"] == 8
    assert older_fields({"rope_theta": 3.0}) == {}


def test_rows_of_a_quantised_head_are_its_rows() -> None:
    mx.random.seed(0)
    ids, hidden = mx.array([3, 1, 60]), torch.randn(4, 32)
    for module in (mlx_nn.Linear(32, 97, bias=False), mlx_nn.Embedding(97, 32)):
        quantised = module.to_quantized(group_size=32, bits=4)
        full = mx.dequantize(quantised.weight, quantised.scales, quantised.biases, 32, 4)
        expected = hidden @ to_torch(full).T
        found = OutputRows(quantised, mx.float32, ids)(hidden)
        torch.testing.assert_close(found, expected[:, [3, 1, 60]], atol=1e-4, rtol=1e-4)
        assert OutputRows(module, mx.float32)(hidden).shape == (4, 97)


# --- greedy identity


@pytest.mark.parametrize("family", MLX_TOYS)
def test_greedy_text_is_that_of_mlx_lm(family: str) -> None:
    """Rounds of every length: most drafts of an oracle are right, and what is wrong is rolled back."""
    target = mlx_toy(family)
    text = plain_mlx(target, PROMPT, 48)
    rules = StopRules(48, ())
    assert generate(target, PROMPT, None, rules=rules).tokens == text
    for seed in range(2):
        found = generate(target, PROMPT, Oracle(target, PROMPT + text, spoil=0.3, seed=seed), rules=rules)
        assert found.tokens == text
        assert {r.accepted < r.verified for r in found.rounds} == {True, False}
    assert generate(target, PROMPT, NgramDrafter(), rules=rules).tokens == text


@pytest.mark.parametrize("family", ["llama", WINDOWED, HYBRID])
def test_greedy_text_with_a_block_drafter(family: str) -> None:
    """Random drafts are rejected nearly always: every round rolls back."""
    target = mlx_toy(family)
    drafter = MLXDrafter(checkpoint(toy_config()), target)
    assert generate(target, PROMPT, drafter, rules=StopRules(32, ())).tokens == plain_mlx(target, PROMPT, 32)


def test_a_quantised_target_shares_its_embedding_and_head() -> None:
    model, config = mlx_model("qwen3", hidden_size=64, intermediate_size=64)
    mlx_nn.quantize(model, group_size=32, bits=4)
    target = MLXTarget(model, config, None, "quantised")
    drafter = MLXDrafter(checkpoint(toy_config(hidden_size=64, draft_vocab_size=40), ids=list(range(3, 43))), target)
    assert drafter.head.quantised["bits"] == 4
    found = generate(target, PROMPT, drafter, rules=StopRules(32, ()))
    assert found.tokens == plain_mlx(target, PROMPT, 32)
    assert all(r.proposed for r in found.rounds[:-1])


def test_a_bfloat16_target_drafts_in_bfloat16() -> None:
    model, config = mlx_model("llama")
    model.set_dtype(mx.bfloat16)
    target = MLXTarget(model, config, None, "bfloat16")
    drafter = MLXDrafter(checkpoint(toy_config()), target)
    assert drafter.backbone.fc.weight.dtype == mx.bfloat16
    found = generate(target, PROMPT, drafter, SamplingParams(temperature=1.0), StopRules(16, ()))
    assert len(found.tokens) == 16


# --- the drafter


def checkpoint(config: DFlashConfig, seed: int = 0, ids: list[int] | None = None) -> Checkpoint:
    drafter = (DSpark if isinstance(config, DSparkConfig) else DFlash)(config)
    randomise(drafter, seed)
    return Checkpoint(DrafterWeights(drafter.eval().requires_grad_(False), None if ids is None else torch.tensor(ids)))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, MLXTarget]:
    """The same toy Llama twice."""
    target = toy_target("llama")
    return target, saved(target.model, tmp_path_factory.mktemp("toy"))


CASES = {
    "vanilla": toy_config(),
    "gated": toy_config(markov_head_type="gated", confidence_head_with_markov=False),
    "rnn": toy_config(markov_head_type="rnn"),
    "rank 0": toy_config(markov_rank=0, enable_confidence_head=False),
    "anchor and masks": toy_config(sample_from_anchor=False, block_size=5),
    "dflash": toy_config(dspark=False),
    "window": toy_config(sliding_window=6),
    "causal": toy_config(sliding_window=6, is_causal=True),
    "capped": toy_config(dspark=False, output_multiplier=0.7, final_logit_softcapping=2.0),
    "windows in some layers": toy_config(sliding_window=6, layer_types=(SLIDING, FULL), is_causal=None),
    "embedding aux layer": toy_config(target_layer_ids=(-1, 1)),
    "draft vocabulary": toy_config(draft_vocab_size=30),
    "rope by yarn": toy_config(rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=16)),
    "rope as llama 3.1": toy_config(
        rope_scaling=RopeScaling(
            "llama3", 8.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0
        )
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_drafter_is_the_torch_drafter(case: str, both: tuple[Target, MLXTarget]) -> None:
    """Hidden states, distributions and confidences on the same context, grown in uneven pieces with drafts between."""
    target, ours = both
    config = CASES[case]
    made = checkpoint(config, ids=None if config.draft_vocab_size == 97 else list(range(60, 0, -2)))
    packed, drafter = made.serve(target), MLXDrafter(made, ours)
    assert drafter.aux_layers == packed.aux_layers and drafter.gamma == packed.gamma
    sessions = packed.new_session(64), drafter.new_session(64)
    torch.manual_seed(1)
    for start, count in ((0, 5), (5, 1), (6, 9), (15, 3)):
        aux_TLD = 3 * torch.randn(count, len(config.target_layer_ids), 32)
        proposals = []
        for each, session in zip((packed, drafter), sessions, strict=True):
            each.extend([session], [list(range(count))], aux_TLD)
            (proposal,) = each.propose([call(session, anchor=start + 7)])
            proposals.append(proposal)
        theirs, mine = proposals
        assert mine.tokens == theirs.tokens and len(mine.tokens) == config.gamma
        torch.testing.assert_close(mine.confidences, theirs.confidences, atol=1e-4, rtol=0)
        for k in range(config.gamma):
            torch.testing.assert_close(row_of(mine, k), row_of(theirs, k), atol=1e-4, rtol=0)


@pytest.mark.parametrize("trained", [None, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_a_sliding_window_size_is_a_window_in_every_layer_and_bounds_the_cache(
    causal: bool, trained: int | None, both: tuple[Target, MLXTarget]
) -> None:
    """Drafts as of the same weights with that window in torch; the text stays the target's."""
    target, ours = both
    windowed = toy_config(sliding_window=6, is_causal=causal)
    made, theirs = checkpoint(replace(windowed, sliding_window=trained)), checkpoint(windowed).serve(target)
    drafter = MLXDrafter(made, ours, sliding_window_size=6)
    mine, session = drafter.new_session(64), theirs.new_session(64)
    torch.manual_seed(1)
    for count in (3, 1, 17, 1, 1, 4):
        aux_TLD = 3 * torch.randn(count, 3, 32)
        for each, state in ((drafter, mine), (theirs, session)):
            each.extend([state], [list(range(count))], aux_TLD)
        found, expected = (each.propose([call(state, 9)])[0] for each, state in ((drafter, mine), (theirs, session)))
        torch.testing.assert_close(row_of(found, 0), row_of(expected, 0), atol=1e-4, rtol=0)
        assert found.tokens == expected.tokens
        assert all(cache.state[0].shape[2] == min(cache.offset, 5) for cache in mine)
    assert mine[0].offset == 27
    rules = StopRules(32, ())
    assert generate(ours, PROMPT, drafter, rules=rules).tokens == plain_mlx(ours, PROMPT, 32)
    with pytest.raises(ValueError, match="sliding_window_size=1 must be at least 2"):
        MLXDrafter(made, ours, sliding_window_size=1)


def call(session: Any, anchor: int) -> DraftCall:
    params = SamplingParams(temperature=1.0)
    return DraftCall(session, anchor, params, SeenTokens(97), SeededSource(anchor))


def test_calibration_reaches_the_confidences(both: tuple[Target, MLXTarget]) -> None:
    plain = checkpoint(toy_config())
    stored = {"temperatures": [2.0] * 4, "offsets": [0.5] * 4}
    calibrated = Checkpoint(plain.weights, {"calibration": stored})
    found = []
    for made in (plain, calibrated):
        drafter = MLXDrafter(made, both[1])
        session = drafter.new_session(8)
        drafter.extend([session], [[1, 2]], torch.ones(2, 3, 32))
        found.append(drafter.propose([call(session, 5)])[0].confidences)
    before, after = (torch.tensor(values) for values in found)
    torch.testing.assert_close(after, (before.logit() / 2 + 0.5).sigmoid())


def test_what_cannot_draft_here_is_refused(both: tuple[Target, MLXTarget]) -> None:
    config = MedusaConfig(
        hidden_size=32, vocab_size=97, draft_vocab_size=97, num_target_layers=5, num_heads=2, num_layers=1
    )
    with pytest.raises(ValueError, match=r"drafts with dflash and dspark.*this drafter is medusa"):
        MLXDrafter(Checkpoint(DrafterWeights(Medusa(config))), both[1])
    example = Bigram(BigramConfig.from_target(both[0]))  # the drafter of docs/add-a-drafter.md
    with pytest.raises(ValueError, match=r"drafts with dflash and dspark.*this drafter is bigram"):
        MLXDrafter(Checkpoint(DrafterWeights(example)), both[1])
    with pytest.raises(ValueError, match="made for another target: num_target_layers is 9"):
        MLXDrafter(checkpoint(toy_config(num_target_layers=9)), both[1])
    with pytest.raises(ValueError, match="chains, not trees"):
        both[1].forward_ragged([Span([1, 2, 3], 0, [], 1, parents=[-1, 0, 0])], both[1].new_kv(1, 16))


def target_copies(target: Target, ids: list[int] | None) -> dict[str, Tensor]:
    """The two tensors that DeepSpec and speculators store once more."""
    rows = target.head_VD if ids is None else target.head_VD[ids]
    return {"head_VdH": rows.clone(), "embedding_VH": target.embed_VD.clone()}


@pytest.mark.parametrize("ids", [None, list(range(60, 0, -2))])
def test_copies_of_the_targets_tensors_are_shared(ids: list[int] | None, both: tuple[Target, MLXTarget]) -> None:
    target, ours = both
    bare = checkpoint(toy_config(draft_vocab_size=97 if ids is None else 30), ids=ids)
    drafter = MLXDrafter(Checkpoint(replace(bare.weights, **target_copies(target, ids))), ours)
    assert drafter.embed is ours.embed
    head = drafter.head.parameters["weight"]
    assert ids is not None or head is ours.head.weight
    torch.testing.assert_close(to_torch(head), target_copies(target, ids)["head_VdH"], atol=0, rtol=0)


@pytest.mark.parametrize("own", [("head_VdH",), ("embedding_VH",), ("head_VdH", "embedding_VH")])
@pytest.mark.parametrize("ids", [None, list(range(60, 0, -2))])
def test_a_head_and_an_embedding_of_its_own_draft_as_in_torch(
    own: tuple[str, ...], ids: list[int] | None, both: tuple[Target, MLXTarget]
) -> None:
    target, ours = both
    bare = checkpoint(toy_config(draft_vocab_size=97 if ids is None else 30), ids=ids)
    copies = target_copies(target, ids)
    torch.manual_seed(3)
    made = Checkpoint(
        replace(bare.weights, **{name: copies[name] + 0.3 * torch.randn_like(copies[name]) for name in own})
    )
    drafters = made.serve(target), MLXDrafter(made, ours), MLXDrafter(bare, ours)
    rows = []
    for drafter in drafters:
        session: Any = drafter.new_session(16)
        drafter.extend([session], [[1, 2, 3]], 3 * torch.ones(3, 3, 32))
        (proposal,) = drafter.propose([call(session, anchor=9)])
        rows.append(row_of(proposal, 0))
    torch.testing.assert_close(rows[1], rows[0], atol=1e-4, rtol=0)
    assert (rows[1] - rows[2]).abs().max() > 1e-2, "without them it drafts otherwise"


def test_copies_of_what_a_quantised_target_was_made_from_are_shared() -> None:
    """They quantise to its very bits; a head that is no copy is served as it is."""
    model, config = mlx_model("qwen3", hidden_size=64, intermediate_size=64)
    sources = {"head_VdH": model.lm_head.weight, "embedding_VH": model.model.embed_tokens.weight}
    copies = {name: to_torch(weight) for name, weight in sources.items()}
    mlx_nn.quantize(model, group_size=32, bits=4)
    target = MLXTarget(model, config, None, "quantised")
    made = checkpoint(toy_config(hidden_size=64))
    shared = MLXDrafter(Checkpoint(replace(made.weights, **copies)), target)
    assert shared.embed is target.embed and shared.head.quantised["bits"] == 4
    changed = {name: copy + (torch.arange(64) == 5) * 1.0 for name, copy in copies.items()}
    apart = MLXDrafter(Checkpoint(replace(made.weights, **changed)), target)
    assert not apart.head.quantised and torch.equal(to_torch(apart.embed.weight), changed["embedding_VH"])
    found = generate(target, PROMPT, apart, rules=StopRules(24, ()))
    assert found.tokens == plain_mlx(target, PROMPT, 24)


def test_another_factor_of_embeddings_is_refused(both: tuple[Target, MLXTarget]) -> None:
    made = checkpoint(toy_config(dspark=False))
    MLXDrafter(Checkpoint(replace(made.weights, embedding_scale=1.0)), both[1])
    with pytest.raises(ValueError, match=r"input_embedding_scale is 5\.65, and .* multiplies embeddings by 1:"):
        MLXDrafter(Checkpoint(replace(made.weights, embedding_scale=5.65)), both[1])


# --- distributions


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, repetition_penalty=1.3, seed=4),
        SamplingParams(temperature=1.0, min_p=0.05, seed=5, coupled=True),
    ],
)
@pytest.mark.parametrize("policy", [FixedPolicy(), ThresholdPolicy(0.5)])
def test_sampled_text_and_rounds_are_those_of_torch(
    params: SamplingParams, policy: FixedPolicy | ThresholdPolicy, both: tuple[Target, MLXTarget]
) -> None:
    """The same seed draws the same tokens, accepts the same drafts and stops at the same doubts."""
    made, rules = checkpoint(toy_config()), StopRules(40, ())
    theirs = generate(both[0], PROMPT, made.serve(both[0]), params, rules, policy)
    mine = generate(both[1], PROMPT, MLXDrafter(made, both[1]), params, rules, policy)
    assert mine.tokens == theirs.tokens
    assert [(r.proposed, r.accepted) for r in mine.rounds] == [(r.proposed, r.accepted) for r in theirs.rounds]


class OneRound:
    """A request of the proof tool over MLX."""

    def __init__(self, target: MLXTarget, drafter: Any, context: tuple[int, ...], source: RandomSource) -> None:
        request = Request("", context, SamplingParams(temperature=1.0), StopRules(8, stop_ids=()))

        def begun(drafter: Any) -> tuple[Engine, Step]:
            slots = draft_slots(drafter)
            randomness = Randomness(lambda seed: source)
            engine = Engine(target, drafter, config=config_alone(target, request, slots), randomness=randomness)
            read_prompt(engine, request)
            return engine, engine.begin()

        self.begun, self.source = begun, source
        self.engine, self.step = begun(drafter)

    def draft(self, min_confidence: float) -> Draft:
        (draft,) = self.engine.draft(self.step)
        return draft

    def score(self, tokens: list[int]) -> Any:
        """Rows after each of the tokens, from a cache of their own: the proof tool scores every path of a draft."""
        engine, step = self.begun(None)
        return engine.score(step, [Draft.chain(tokens)]).rows[0].row


@pytest.mark.parametrize("broken", [False, True])
def test_the_output_distribution_is_the_targets(broken: bool) -> None:
    """Every way two rounds at temperature 1 may go, through the production code, on a vocabulary of three."""
    target = mlx_toy("llama", vocab_size=3)
    made = checkpoint(toy_config(vocab_size=3, draft_vocab_size=3, mask_token_id=0, block_size=2))
    drafter: Any = Skewed(made, target) if broken else MLXDrafter(made, target)
    rows: dict[tuple[int, ...], Tensor] = {}

    def row(tokens: tuple[int, ...]) -> Tensor:
        if tokens not in rows:
            logits = target.forward_ragged([Span(list(tokens), 0, [], 1)], target.new_kv(1, 16)).logits_NV
            assert logits is not None
            rows[tokens] = warp(logits[-1], SamplingParams(temperature=1.0)).double()
        return rows[tokens]

    expected = exact_target_distribution(row, [(1, 2)], 2)
    found = exact_output_distribution(
        lambda context, source: OneRound(target, drafter, context, source), [(1, 2)], FixedPolicy(), 2
    )
    assert len(expected) == 9 and sum(found.values()) == pytest.approx(1.0, abs=1e-5)
    deviation = max_deviation(found, expected)
    assert (deviation > 1e-2) if broken else (deviation < 1e-5)


class Skewed(MLXDrafter):
    """Says that it drew from uniform distributions."""

    def propose(self, calls: Any, min_confidence: float = 0.0) -> list[Draft]:
        return [
            chain_of(p.tokens, torch.full((len(p.tokens), 3), 1 / 3), p.confidences)
            for p in super().propose(calls, min_confidence)
        ]


# --- users' side


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A toy Llama with a byte tokenizer, and a drafter for it."""
    where = tmp_path_factory.mktemp("on_disk")
    torch.manual_seed(0)
    vocab = len(byte_tokenizer())
    model = LlamaForCausalLM(LlamaConfig(**{**TOY, "vocab_size": vocab}))
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    saved(model, where / "target")
    save_drafter(checkpoint(toy_config(vocab_size=vocab, draft_vocab_size=vocab)), where / "drafter")
    return where / "target", where / "drafter"


def test_generate_says_the_same_with_both_backends(on_disk: tuple[Path, Path]) -> None:
    target, drafter = map(str, on_disk)
    arguments = [
        "generate",
        "hello",
        "--target",
        target,
        "--raw",
        "--max-new-tokens",
        "12",
        "--threads",
        "1",
        "--drafter",
    ]
    runs = {
        (backend, choice): CliRunner().invoke(app, [*arguments, choice, "--backend", backend])
        for backend in ("local", "mlx")
        for choice in (drafter, "none", "ngram@3")
    }
    assert all(run.exit_code == 0 for run in runs.values()), [run.output for run in runs.values()]
    assert len({run.stdout for run in runs.values()}) == 1


def test_eval_on_mlx(on_disk: tuple[Path, Path], tmp_path: Path) -> None:
    """Greedy output identical, and results that say what they were measured with."""
    target, drafter = map(str, on_disk)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "a", "turns": ["Hi there.", "And then?"]}) + "\n")
    arguments = ["eval", "--target", target, "--drafter", drafter, "--tasks", str(tasks), "--max-new-tokens", "6"]
    arguments += ["--out", str(tmp_path / "out"), "--threads", "1", "--backend", "mlx"]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["tasks"][0]["generation_tps"] > 0
    assert results["tasks"][0]["greedy_identical"] and set(results["settings"]["backend"]) == {"mlx", "mlx-lm"}
    refused = CliRunner().invoke(app, [*arguments, "--tree", "8"])
    assert refused.exit_code != 0 and "--tree" in str(refused.exception)


def test_bench_on_mlx(on_disk: tuple[Path, Path], tmp_path: Path) -> None:
    """The verb from its options to its report: the same text with and without the drafter."""
    target, drafter = map(str, on_disk)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in ("Hi there.", "And then?")))
    arguments = ["bench", "--backend", "mlx", "--target", target, "--tasks", str(tasks), "--threads", "1"]
    arguments += ["--requests-per-point", "2", "--repeats", "1", "--max-new-tokens", "6", "--drafter"]
    run = CliRunner().invoke(app, [*arguments, drafter, "--out", str(tmp_path / "out")])
    assert run.exit_code == 0, (run.output, run.exception)
    frontier = Frontier.load(tmp_path / "out" / "frontier.json")
    assert [(p.variant, p.level, p.same) for p in frontier.points] == [("none", 1, 2), ("speculative", 1, 2)]
    assert frontier.points[0].median("tau") == 1 <= (frontier.points[1].median("tau") or 0)
    assert frontier.settings["backend"] == "mlx" and (tmp_path / "out" / "frontier.png").is_file()
    sampled = [*arguments, drafter, "--out", str(tmp_path / "sampled"), "--temperature", "1", "--coupled"]
    run = CliRunner().invoke(app, sampled)
    assert run.exit_code == 0, (run.output, run.exception)
    reference = {name: json.loads((tmp_path / name / "reference.json").read_text()) for name in ("out", "sampled")}
    assert reference["out"] != reference["sampled"], "temperature reaches the decoder"
    coupled = Frontier.load(tmp_path / "sampled" / "frontier.json").points
    assert [(p.variant, p.same) for p in coupled] == [("none", 2), ("speculative", 2)]
    assert all(p.median("generation_tps") for p in [*frontier.points, *coupled])
    assert frontier.points[0].acceptance_histogram and not any(frontier.points[0].acceptance_histogram[1:])
    refused = CliRunner().invoke(app, [*arguments, "ngram", "--out", str(tmp_path / "other")])
    assert isinstance(refused.exception, ValueError) and "a trained drafter, not with ngram" in str(refused.exception)


def test_multi_turn_evaluation_and_the_bench_entry(on_disk: tuple[Path, Path]) -> None:
    """Both turns of a conversation, plain and speculative; and rounds as the benchmark wants them."""
    target, drafter = load_mlx_target(str(on_disk[0])), load_checkpoint(on_disk[1])
    config = TaskSettings(max_new_tokens=10)
    turns = Conversation("c", ["Hi there.", "And then?"])
    (pairs,) = decode_turns(target, MLXDrafter(drafter, target), [turns], config, policy=FixedPolicy(), flip=False)
    assert [pair.verdict for pair in pairs] == ["same", "same"]
    plain, speculative = (decoder(str(on_disk[0]), where) for where in (None, on_disk[1]))
    request = Request("", PROMPT, SamplingParams(), StopRules(10))
    rounds = list(plain(request))
    assert all(len(tokens) == 1 for tokens in rounds)
    assert list(chain.from_iterable(rounds)) == list(chain.from_iterable(speculative(request)))


def test_streaming_stops_inside_a_block() -> None:
    target = mlx_toy("llama")
    text = plain_mlx(target, PROMPT, 24)
    stop = text[10]
    end = text.index(stop) + 1
    chunks = list(stream(target, PROMPT, Oracle(target, PROMPT + text, 0.0), rules=StopRules(24, (stop,))))
    assert [token for chunk in chunks for token in chunk.tokens] == text[:end]
    assert chunks[-1].finish == "stop" and len(chunks) < end


def test_a_model_that_mlx_lm_does_not_know_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"model\*\.safetensors"):
        load_mlx_target(str(tmp_path))


@pytest.mark.parametrize("damage", ["missing", "not finite", "no config"])
def test_damaged_models_are_refused(tmp_path: Path, damage: str) -> None:
    saved(toy_target("llama").model, tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "not finite":
        tensors[name][0, 0] = torch.inf
    else:
        (tmp_path / "config.json").write_text('{"hidden_size": "x"}')
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="hidden_size" if damage == "no config" else "up_proj"):
        load_mlx_target(str(tmp_path))


# --- the real model


@pytest.mark.slow
def test_smollm_with_the_shipped_drafter() -> None:
    """The tokens of plain MLX decoding, and the rounds of the torch path."""
    where = shipped_drafter(EMBEDDED_ID)
    assert where is not None
    made, rules = load_checkpoint(where), StopRules(16)
    ours, target = load_mlx_target(EMBEDDED_ID), load_target(EMBEDDED_ID)
    drafter, packed = MLXDrafter(made, ours), made.serve(target)
    prompt = render(ours.tokenizer, ["What is 12 times 7? Think step by step."], [])
    mine, theirs = generate(ours, prompt, drafter, rules=rules), generate(target, prompt, packed, rules=rules)
    assert mine.tokens == plain_mlx(ours, prompt, len(mine.tokens)) == theirs.tokens
    lengths = {path: acceptance(found.rounds, drafter.gamma)[0] for path, found in (("mlx", mine), ("torch", theirs))}
    assert lengths["mlx"] > 1.1
    assert lengths["mlx"] == pytest.approx(lengths["torch"], rel=0.01)

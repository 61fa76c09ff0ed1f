"""The targets of published drafters, each by config at toy size: forwards, decoding, trees, engine and features."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.cache_utils import Cache

import outrider.target.paged as paged
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import Drafter, DrafterWeights
from outrider.drafters.eagle3 import DynamicTreeDrafter, Eagle3Drafter, TreeShape
from outrider.drafters.ngram import NgramDrafter
from outrider.evaluation.evaluate import compare_greedy
from outrider.sampling import SamplingParams
from outrider.target.cache import RecurrentLayer
from outrider.target.kernels import FewRows, attends
from outrider.target.model import Target, load_target
from outrider.target.paged import PagedKV, Span
from tests.toys.decoding import generate_batch
from tests.toys.documents import DOCUMENT_AUX_LAYERS, documents, largest_difference
from tests.toys.eagle3 import make_drafter
from tests.toys.engine import finish, toy_drafter, watch_preemptions
from tests.toys.oracle import Oracle, Oracles
from tests.toys.published import PUBLISHED, published_target
from tests.toys.ragged import ragged_difference, run_alone
from tests.toys.targets import random_target
from tests.toys.tokenizer import byte_tokenizer
from tests.toys.trees import SelfTrees, check_nodes, check_ragged_trees, prompt_of, random_tree

HYBRID = [name for name in PUBLISHED if name.startswith(("qwen3_next", "qwen3.5"))]
STATEFUL = [*HYBRID, "deepseek_v4"]  # layers keep a state outside the pages
BRANCHING = [name for name in PUBLISHED if name not in STATEFUL]
NESTED = [name for name in PUBLISHED if "nested" in name]
AUX_LAYERS = (-1, 0, 2, 3, 4)
TREES = ["gpt_oss", "gemma4 (nested)", "deepseek_v3"]  # drafted by the target itself, which takes its time
RULES = StopRules(16, stop_ids=())
PENALTY = 3.0
PROMPT = prompt_of(21)  # beyond the toys' window of 16


def reference(target: Target, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """transformers' logits in one pass, the embedding and what follows each layer; of several streams the mean."""
    outputs: list[Tensor] = []
    layers = target.decoder.layers if target.family.streams else []
    hooks = [layer.register_forward_hook(lambda _m, _a, out: outputs.append(out.mean(2))) for layer in layers]
    with torch.no_grad():
        found = target.model(tokens, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    return found.logits, [target.embed_VD[tokens], *outputs] if hooks else list(found.hidden_states)


@pytest.mark.parametrize("name", PUBLISHED)
def test_forward_equals_transformers_with_cache_aux_layers_and_rollback(name: str) -> None:
    target = published_target(name)
    tokens = torch.randint(4, 97, (1, 40))
    logits, outputs = reference(target, tokens)
    cache = target.new_cache(64)
    target.forward(tokens[:, :17], cache, AUX_LAYERS)
    target.forward(torch.randint(4, 97, (1, 5)), cache, AUX_LAYERS)  # a rejected block ...
    cache.rollback(17)  # ... leaves no trace
    for start, end, kept in ((17, 18, 18), (18, 26, 22), (22, 40, 40)):  # the second in part
        output = target.forward(tokens[:, start:end], cache, AUX_LAYERS, logits=None)
        cache.rollback(kept)
        assert output.logits_BTV is not None and output.aux_BTLD is not None
        torch.testing.assert_close(output.logits_BTV, logits[:, start:end], atol=1e-4, rtol=1e-4)
        for place, aux_layer in enumerate(AUX_LAYERS):
            expected = outputs[aux_layer + 1][:, start:end]
            torch.testing.assert_close(output.aux_BTLD[:, :, place], expected, atol=1e-4, rtol=1e-4)


def drafters(name: str, target: Target, text: list[int]) -> dict[str, Drafter]:
    eagle = Eagle3Drafter(DrafterWeights(make_drafter(target)), target)
    found: dict[str, Drafter] = {
        "oracle": Oracle(target, text, spoil=0.3),
        "dspark": toy_drafter(target),
        "ngram": NgramDrafter(),
        "eagle3": eagle if name in STATEFUL else DynamicTreeDrafter(eagle, TreeShape(4, 3, 12)),
    }
    return {**found, "trees": SelfTrees(target)} if name in TREES else found


@pytest.mark.parametrize("name", PUBLISHED)
def test_greedy_text_is_plain_decodings_and_transformers(name: str) -> None:
    """The penalty makes the toys' text vary: of its own accord it often repeats one token."""
    target, params = published_target(name), SamplingParams(repetition_penalty=PENALTY)
    plain = generate(target, PROMPT, params=params, rules=RULES).tokens
    prompt = torch.tensor([PROMPT])
    theirs = target.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=-1,
        repetition_penalty=PENALTY,
    )
    assert plain == theirs[0, 21:].tolist() and len(set(plain)) > 12
    accepted = {}
    for kind, drafter in drafters(name, target, [*PROMPT, *plain, *plain]).items():
        fast = generate(target, PROMPT, drafter, params, RULES)
        assert fast.tokens == plain, kind
        accepted[kind] = sum(r.accepted for r in fast.rounds)
    assert accepted["oracle"] > 6 and accepted.get("trees", 1) > 0
    oracle, rules = Oracle(target, [*PROMPT, *plain], 0.0), StopRules(16, [plain[10]])
    stopped = generate(target, PROMPT, oracle, params, rules)
    assert stopped.tokens == plain[: plain.index(plain[10]) + 1] and stopped.finish == "stop"


@pytest.mark.parametrize("name", BRANCHING)
@torch.inference_mode()
def test_every_node_is_scored_as_if_its_path_stood_alone(name: str) -> None:
    check_nodes(published_target(name), 21)


@pytest.mark.parametrize("name", PUBLISHED)
@torch.inference_mode()
def test_requests_in_one_pass_are_computed_as_if_alone(name: str) -> None:
    target = published_target(name)
    assert ragged_difference(target) < 1e-5
    if name in BRANCHING:
        check_ragged_trees(target)


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - {"qwen3", "llama3.1", "deepseek_v4"}))
@torch.inference_mode()
def test_four_requests_are_one_call_per_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in any case (but DeepSeek-V4's compressed one), recurrent layers of requests with equally many rows."""
    if not attends(torch.float32, torch.device("cpu")):
        pytest.skip("no C compiler here")
    target, calls = published_target(name), Counter[str]()

    def counted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[what] += 1
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(FewRows, "attend", counted("attention", FewRows.attend))
    monkeypatch.setattr(RecurrentLayer, "join", counted("recurrence", RecurrentLayer.join))
    monkeypatch.setattr(paged, "attend_folded", lambda *_, **__: pytest.fail("request by request"))
    layers = target.decoder.layers
    attending, recurrent = (sum(hasattr(layer, kind) for layer in layers) for kind in ("self_attn", "linear_attn"))
    kv, states = PagedKV(target, 60, 4), [target.new_states() for _ in range(4)]

    def count(past: Sequence[int], rows: Sequence[int], parents: list[int] | None = None) -> tuple[int, int]:
        calls.clear()
        spans = []
        for i, (start, new) in enumerate(zip(past, rows, strict=True)):
            tree = parents if i == 3 else None
            blocks = list(range(15 * i, 15 * i + 15))
            spans.append(Span([5 + row for row in range(new)], start, blocks, 1, parents=tree, states=states[i]))
        target.forward_ragged(spans, kv)
        return calls["attention"], calls["recurrence"]

    assert count([0] * 4, [9, 5, 14, 7])[0] == attending
    assert count([9, 5, 14, 7], [1] * 4) == (attending, recurrent)
    assert count([10, 6, 15, 8], [4, 1, 16, 4]) == (attending, 3 * recurrent)
    if name in BRANCHING:
        tree = random_tree(24, 97).row_parents
        assert tree is not None
        assert count([11, 7, 16, 9], [4, 1, 16, len(tree)], tree) == (attending, 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_engine_serves_it(name: str) -> None:
    """Drafts accepted and rejected, requests preempted and cancelled; only those that run hold states."""
    target, params = published_target(name), SamplingParams(repetition_penalty=PENALTY)
    requests = [Request(str(i), prompt_of(7 + 7 * i, i), params, StopRules(24, stop_ids=())) for i in range(3)]
    plain = {r.id: generate(target, r.prompt, params=params, rules=r.rules).tokens for r in requests}
    drafter = Oracles(target, [[*r.prompt, *plain[r.id]] for r in requests], 0.3)
    engine = Engine(target, drafter, config=EngineConfig(4, 24, 4, 12))
    preempted, drafts = watch_preemptions(engine), Counter[str]()

    def check() -> None:
        assert engine.last is not None
        drafts["accepted"] += engine.last.accepted
        drafts["rejected"] += engine.last.admitted - engine.last.accepted
        holding = {id for id, state in engine._states.items() if state.recurrent is not None}
        assert holding == (set(engine.scheduler.running) if name in STATEFUL else set())
        if "leaves" in engine._states and drafts["accepted"] > 3:
            engine.cancel("leaves")

    found = finish(engine, [replace(requests[1], id="leaves"), *requests], check)
    left = found.pop("leaves")
    assert found == plain and left == plain["1"][: len(left)] and len(left) < 24
    assert min(drafts.values()) > 3 and preempted
    assert engine.scheduler.allocator.used == 0 and not engine._states


@pytest.mark.parametrize("name", STATEFUL)
def test_a_forward_that_fails_leaves_the_states_as_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, tokens = published_target(name), prompt_of(9)
    after: list[torch.Tensor] = []
    for fails in (False, True):
        kv, states = PagedKV(target, 8, 4), target.new_states()
        target.forward_ragged([Span(tokens[:4], 0, [2, 3, 4], 0, states=states)], kv)
        if fails:
            with monkeypatch.context() as broken:
                broken.setattr(target.decoder.layers[3].mlp, "forward", lambda *_, **__: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    target.forward_ragged([Span([7, 8, 9], 4, [2, 3, 4], 0, states=states)], kv)
            first = target.decoder.layers[0]
            assert "forward" not in vars(getattr(first, "linear_attn", None) or first.self_attn)
        after.append(target.forward_ragged([Span(tokens[4:], 4, [2, 3, 4], 0, states=states)], kv).hidden_TD)
    assert torch.equal(*after)


@pytest.mark.parametrize("name", PUBLISHED)
def test_features_are_those_of_decoding(name: str) -> None:
    target, texts = published_target(name), documents()
    packed = target.prefill_packed(texts, DOCUMENT_AUX_LAYERS)
    assert largest_difference(target, packed) < 1e-4


@pytest.mark.parametrize("name", PUBLISHED)
def test_left_padded_batch_equals_single_sequences(name: str) -> None:
    target = published_target(name)
    prompts = [prompt_of(n, n) for n in (3, 11, 7)]
    together = [r.tokens for r in generate_batch(target, prompts, 12, SamplingParams(), [0, 1, 2])]
    for prompt, tokens in zip(prompts, together, strict=True):
        plain = generate(target, prompt, rules=StopRules(12)).tokens
        assert compare_greedy(target, prompt, plain, tokens) != "mismatch"


def test_kimi_is_read_under_its_published_names(tmp_path: Path) -> None:
    """transformers writes the language model's layers under another name than Moonshot; its type is `kimi_k2` there."""
    made = published_target("kimi_k2.5 (nested)")
    made.model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    ours, theirs = "language_model.model.blocks.", "language_model.model.layers."
    renamed = {name.replace(ours, theirs): weight for name, weight in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "kimi_k2"
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, expected = (
        target.forward(torch.tensor([PROMPT]), target.new_cache(21), logits=None).logits_BTV
        for target in (load_target(tmp_path), made)
    )
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", NESTED)
def test_a_multimodal_directory_is_a_target(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(PUBLISHED[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    whole.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target, tokens = load_target(tmp_path), torch.tensor([PROMPT])
    output = target.forward(tokens, target.new_cache(21), logits=None)
    with torch.no_grad():
        expected = whole(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    assert output.logits_BTV is not None
    torch.testing.assert_close(output.logits_BTV, expected, atol=1e-4, rtol=1e-4)


def test_sparse_attention_is_refused_where_its_indexer_leaves_keys_out() -> None:
    """Up to `index_topk` tokens it is attention to all keys; beyond them transformers computes something else."""
    fields = {**PUBLISHED["glm_moe_dsa"].to_dict(), "index_topk": 24}
    target, wide = random_target(PUBLISHED["glm_moe_dsa"].__class__(**fields), "toy"), published_target("glm_moe_dsa")
    tokens = torch.randint(4, 97, (1, 40))
    with torch.no_grad():
        sparse, full = target.model(tokens).logits, wide.model(tokens).logits
    torch.testing.assert_close(sparse[:, :24], full[:, :24], atol=1e-4, rtol=1e-4)
    assert (sparse - full)[:, 24:].abs().amax() > 1e-2 and target.max_context == 24
    found = target.forward(tokens[:, :24], target.new_cache(40), logits=None).logits_BTV
    assert found is not None
    torch.testing.assert_close(found, sparse[:, :24], atol=1e-4, rtol=1e-4)
    longer = tokens[0, :25].tolist()
    calls: list[Callable[[], object]] = [
        lambda: target.forward(tokens[:, :25], target.new_cache(40)),
        lambda: target.forward_ragged([Span(longer, 0, [0, 1, 2, 3], 1)], target.new_kv(4, 8)),
        lambda: target.prefill_packed([longer], (1,)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"24 keys of each text at most \(index_topk\), and 25 tokens"):
            call()


def test_mxfp4_weights_are_dequantised(tmp_path: Path) -> None:
    """gpt-oss as it is published: values of sign, exponent and mantissa in four bits, 32 of them sharing a scale."""
    config = PUBLISHED["gpt_oss"].__class__(**{**PUBLISHED["gpt_oss"].to_dict(), "intermediate_size": 64})
    plain = random_target(config, "toy").model
    plain.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        E, inner, outer = weights.pop(name).shape
        blocks = torch.randint(0, 256, (E, outer, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 124, (E, outer, inner // 32), dtype=torch.uint8)
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = blocks, scales
        values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        fours = torch.stack([blocks & 15, blocks >> 4], dim=-1).long()
        numbers = values[fours & 7] * (1 - 2 * (fours >> 3)) * 2.0 ** (scales[..., None, None].float() - 127)
        expected[name] = numbers.reshape(E, outer, inner).transpose(1, 2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": {"quant_method": "mxfp4"}}))
    target = load_target(tmp_path)
    loaded = dict(target.model.named_parameters())
    for name, weight in expected.items():
        assert loaded[name].dtype == torch.float32
        torch.testing.assert_close(loaded[name].data, weight, atol=0, rtol=0)
    assert generate(target, PROMPT, NgramDrafter(), rules=RULES).tokens == generate(target, PROMPT, rules=RULES).tokens


def _all_rollbacks(target: Target) -> float:
    """The largest difference of logits after going back to every row of a block, against a recomputed cache."""
    block, after, worst = prompt_of(6, 1), prompt_of(3, 2), 0.0
    for kept in range(7):
        cache = target.new_cache(40)
        target.forward(torch.tensor([PROMPT]), cache)
        target.forward(torch.tensor([block]), cache)
        cache.rollback(21 + kept)
        found = target.forward(torch.tensor([after]), cache).logits_BTV
        whole = torch.tensor([[*PROMPT, *block[:kept], *after]])
        expected = target.forward(whole, target.new_cache(40)).logits_BTV
        assert found is not None and expected is not None
        worst = max(worst, (found - expected).abs().max().item())
    return worst


def _not_at_all(self: RecurrentLayer, count: int, cache: Cache) -> None:
    pass


def _without_replay(self: RecurrentLayer, count: int, cache: Cache) -> None:
    if count:
        self.conv_states[0], self.recurrent_states[0] = self._before


def _without_restoring(self: RecurrentLayer, count: int, cache: Cache) -> None:
    if count and self._rows_BTD is not None and count < self._rows_BTD.shape[1]:
        self._module(hidden_states=self._rows_BTD[:, :-count], cache_params=cache)


def _convolution_only(self: RecurrentLayer, count: int, cache: Cache) -> None:
    kept, drop = self.recurrent_states[0], _DROP
    drop(self, count, cache)
    self.recurrent_states[0] = kept


_DROP = RecurrentLayer.drop


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_goes_back_to_any_row(name: str) -> None:
    assert _all_rollbacks(published_target(name)) < 1e-4


@pytest.mark.parametrize("wrong", [_not_at_all, _without_replay, _without_restoring, _convolution_only])
def test_a_state_that_is_not_rolled_back_is_seen(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[RecurrentLayer, int, Cache], None]
) -> None:
    target = published_target("qwen3.5 (nested)")
    alone = run_alone(target)
    monkeypatch.setattr(RecurrentLayer, "drop", wrong)
    assert _all_rollbacks(target) > 1e-2
    assert ragged_difference(target, alone=alone) > 1e-2


@pytest.mark.parametrize("name", STATEFUL)
def test_targets_with_states_sample_losslessly_and_refuse_trees(name: str) -> None:
    target = published_target(name)
    params = SamplingParams(0.8, seed=3, coupled=True)
    plain = generate(target, PROMPT, params=params, rules=RULES).tokens
    fast = generate(target, PROMPT, Oracle(target, [*PROMPT, *plain], 0.3), params, RULES)
    assert fast.tokens == plain and len(fast.rounds) < 14
    with pytest.raises(ValueError, match=rf"'{target.config.model_type}' cannot verify trees.*--tree"):
        generate(target, PROMPT, SelfTrees(target), rules=RULES)
    with pytest.raises(ValueError, match=rf"'{target.config.model_type}' cannot verify trees.*--tree"):
        Engine(target, SelfTrees(target))


def test_going_back_twice_and_too_far() -> None:
    target = published_target("qwen3_next")
    cache, expected = target.new_cache(40), target.new_cache(40)
    target.forward(torch.tensor([PROMPT]), cache)
    target.forward(torch.tensor([[5, 6, 7, 8]]), cache)
    cache.rollback(24)
    cache.rollback(22)
    target.forward(torch.tensor([[*PROMPT, 5]]), expected)
    ours, theirs = (target.forward(torch.tensor([[9]]), found).logits_BTV for found in (cache, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    with pytest.raises(AssertionError, match="last forward"):
        cache.rollback(4)


def test_sinks_and_windows_matter_at_this_size() -> None:
    """Without its sinks or its window gpt-oss is another model: the comparisons above would see either."""
    target = published_target("gpt_oss")
    before = target.forward(torch.tensor([PROMPT]), target.new_cache(21)).logits_BTV
    for change in ("sinks", "window"):
        config = PUBLISHED["gpt_oss"].__class__(**PUBLISHED["gpt_oss"].to_dict())
        if change == "window":
            config.sliding_window = 64
        other = random_target(config, "toy")
        if change == "sinks":
            for layer in other.decoder.layers:
                layer.self_attn.sinks.fill_(-torch.inf)
        after = other.forward(torch.tensor([PROMPT]), other.new_cache(21)).logits_BTV
        assert before is not None and after is not None and (before - after).abs().max() > 1e-2, change

"""Decoding on the simulated device: launches and syncs of a step of the engine, and its CUDA graphs.

A step of one request on a target of 36 layers launches at most 750 kernels, 1,050 with a DSpark drafter of five layers,
where no graphs can be made; with them at most 20 and 80.
The host waits at most 3 times in a usual greedy step and 5 times in a sampled one, however many requests there are; of
those that are launched ahead see test_ahead.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import outrider.drafters.graphs as draft_graphs
import outrider.target.paged_attention as paged_attention
from outrider.api.model import Model
from outrider.decoding.config import ProfileConfig
from outrider.decoding.engine import Engine, default_config
from outrider.decoding.generate import generate, stream
from outrider.decoding.policies import ThresholdPolicy
from outrider.decoding.profile import QUICK, grid, jumps
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.decoding.structured import Grammar
from outrider.decoding.verification import TargetRows, Verdict, verify_all
from outrider.drafters.base import DrafterWeights
from outrider.drafters.cache import DraftPool, RequestCaches
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.draft import Draft, DraftRow, Siblings
from outrider.drafters.dspark import DSpark
from outrider.evaluation.loadtest.config import Traffic
from outrider.evaluation.loadtest.traces import record
from outrider.sampling import RandomSource, SamplingParams, SeededSource
from outrider.serving.config import ServeConfig
from outrider.serving.start import engine_config
from outrider.target.graphs import StepGraphs
from outrider.target.linear import PackedLinear
from outrider.target.model import Target
from outrider.target.paged import PagedKV, Span
from tests.gpu.simulated import SimulatedDevice, simulated_device
from tests.gpu.toys import MOST_GRAPHED, MOST_LAUNCHES, MOST_SYNCS, SAMPLED, decoding, deep_target, dspark
from tests.toys.engine import finish, prompts, toy_drafter
from tests.toys.published import published_target
from tests.toys.ragged import BLOCKS, run_alone, run_ragged
from tests.toys.targets import TOY_CONFIGS, randomise, toy_config, toy_target
from tests.toys.trees import random_tree


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_device() as found:
        yield found


def step_of(device: SimulatedDevice, engine: Engine, requests: int, params: SamplingParams) -> None:
    """Count a usual step in which all requests decode."""
    engine.ahead = None
    decoding(engine, requests, params)
    device.counts.reset()
    outputs = engine.step()
    assert len(outputs) == requests and not any(output.error for output in outputs)


def graphs_of(target: Target) -> StepGraphs:
    assert target.graphs is not None
    return target.graphs


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
def test_launches_of_a_round_of_36_layers(device: SimulatedDevice, drafted: bool, captures: bool) -> None:
    target = deep_target(36)
    graphs_of(target).captures = captures
    engine = Engine(target, dspark(target) if drafted else None)
    step_of(device, engine, 1, SamplingParams())
    most = MOST_GRAPHED if captures else MOST_LAUNCHES
    assert device.counts.launches <= most["dspark" if drafted else "plain"], device.counts.report()
    assert captures or device.counts.operations["simulated::paged_attention"] == (41 if drafted else 36), "a layer"


@torch.inference_mode()
def test_a_step_computes_the_rows_of_all_requests_packed(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token less, of whichever request, never costs more rows, and on average 0.9 rows less."""
    monkeypatch.setattr(paged_attention, "_kernel", lambda: lambda *_, **__: None)  # rows are counted alone
    target = deep_target(1)
    kv = target.new_kv(32 * 4, 16)

    def computed(lengths: Sequence[int]) -> int:
        spans = [Span([5] * count, 20 + i, list(range(4 * i, 4 * i + 4)), 1) for i, count in enumerate(lengths)]
        graphs_of(target)._steps.clear()
        assert len(target.forward_ragged(spans, kv).hidden_TD) == sum(lengths)
        (step,) = graphs_of(target)._steps[kv].values()
        return len(step.hidden_TD)

    assert computed([1] * 31 + [6]) == 48
    generator, lengths = torch.Generator().manual_seed(0), [4] * 32
    found = [computed(lengths)]
    while max(lengths) > 1:
        longer = [i for i, count in enumerate(lengths) if count > 1]
        lengths[longer[int(torch.randint(len(longer), (), generator=generator))]] -= 1
        found.append(computed(lengths))
    saved = [before - after for before, after in pairwise(found)]
    assert min(saved) == 0 and sum(saved) >= 0.9 * len(saved)


def test_costs_are_measured_where_a_step_computes_more_rows(device: SimulatedDevice) -> None:
    most = jumps(deep_target(1), 300)
    assert {16, 17, 48, 49, 256, 257, 288, 289} <= most and not {15, 18, 272} & most
    counts = {b for r, b, _ in grid(ProfileConfig(32, max_tokens=300, contexts=(8,)), 8, most) if r == 32}
    assert {32, 48, 49, 64, 65, 256} <= counts and max(counts) == 256
    assert (1, 17, 128) in grid(QUICK, 8, jumps(deep_target(1), QUICK.max_tokens))
    assert jumps(toy_target("qwen3"), 300) == set()


@pytest.mark.parametrize("requests", [2, 5, 32])
def test_attention_is_one_call_per_layer(device: SimulatedDevice, requests: int) -> None:
    """For all requests, also where one reads its prompt in the same step."""
    target = deep_target(6)
    graphs_of(target).captures = False
    engine = Engine(target, config=EngineConfig(33, 512))
    step_of(device, engine, requests, SamplingParams())
    assert device.counts.operations["simulated::paged_attention"] == 6
    engine.submit(Request("late", [5] * 60))
    device.counts.reset()
    engine.step()
    assert engine.last is not None and engine.last.prefill_tokens
    assert device.counts.operations["simulated::paged_attention"] == 6


def test_a_graph_serves_every_step_of_its_bucket(device: SimulatedDevice) -> None:
    """A draft's too, whatever the contexts and lengths."""
    target = deep_target(4)
    drafter = dspark(target, layers=1)
    engine = Engine(target, drafter, config=EngineConfig(4, 256))
    engine.ahead = None
    decoding(engine, 3, SamplingParams())
    (steps,) = graphs_of(target)._steps.values()
    assert drafter.graphs is not None
    for id in ("2", "1"):
        made = [one.graph for one in (*steps.values(), *drafter.graphs._captured.values())]
        device.counts.reset()
        for _ in range(5):
            engine.step()
        assert [one.graph for one in (*steps.values(), *drafter.graphs._captured.values())] == made
        assert device.counts.operations["graph"] == 15
        assert engine.cancel(id)  # fewer requests are another bucket of a draft
        engine.step()


def test_a_draft_that_cannot_be_captured_leaves_the_target_its_graphs(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Request(str(i), prompt, rules=StopRules(20, stop_ids=())) for i, prompt in enumerate(prompts(2))]
    texts, blocks = [], DSpark.blocks

    def waits(module: DSpark, x_RKH: Tensor, *others: Any) -> Tensor:
        assert x_RKH.sum().item() < 1e9
        return blocks(module, x_RKH, *others)

    for captured in (True, False):
        target = toy_target("qwen3")
        target = Target(target.model.to("cuda"), None, target.name)
        drafter = toy_drafter(target)
        assert isinstance(drafter, BlockDrafter) and drafter.graphs is not None
        engine = Engine(target, drafter, config=EngineConfig(4, 64, 4, 128))
        if captured:
            texts.append(finish(engine, asked))
        else:
            monkeypatch.setattr(DSpark, "blocks", waits)
            with pytest.warns(UserWarning, match="drafts run without CUDA graphs"):
                texts.append(finish(engine, asked))
        assert drafter.graphs.captures is captured and graphs_of(target).captures
    assert texts[0] == texts[1]


class Uncapturable:
    """torch.cuda.graph of something that cannot be captured."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


@pytest.mark.parametrize("requests", [1, 3])
def test_what_cannot_be_captured_runs_all_the_same(
    device: SimulatedDevice, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Request(str(i), prompt, rules=StopRules(30, stop_ids=())) for i, prompt in enumerate(prompts(requests))]
    texts = []
    for captured in (True, False):
        target = toy_target("qwen3")
        target = Target(target.model.to("cuda"), None, target.name)
        engine = Engine(target, toy_drafter(target), config=EngineConfig(4, 64, 4, 128))
        if captured:
            texts.append(finish(engine, asked))
        else:
            monkeypatch.setattr(torch.cuda, "graph", Uncapturable)
            with pytest.warns(UserWarning, match="without CUDA graphs"):
                texts.append(finish(engine, asked))
        assert graphs_of(target).captures is captured
    assert texts[0] == texts[1]


def test_one_request_has_the_same_bits_with_drafts_and_without(device: SimulatedDevice) -> None:
    """Logits behind the anchor: of the anchor alone and of the anchor with 7 and 15 drafts behind it, in bfloat16."""
    target, tokens = deep_target(6), list(range(4, 104))
    found, kv, blocks = [], target.new_kv(8, 16), list(range(8))
    for drafts in (0, 7, 15):
        target.forward_ragged([Span(tokens, 0, blocks, 0)], kv)
        logits_NV = target.forward_ragged([Span([9] * (drafts + 1), len(tokens), blocks, drafts + 1)], kv).logits_NV
        assert logits_NV is not None
        found.append(logits_NV[0].tolist())
    assert found[0] == found[1] == found[2]
    (steps,) = graphs_of(target)._steps.values()
    assert len(steps) == 1


@torch.inference_mode()
def tree_rows(target: Target) -> list[Tensor]:
    """Logits and aux hidden states of trees and a chain, before and after the deepest paths were kept."""
    trees, prompts_of = [random_tree(14, 97, 4), Draft.chain([8, 9]), random_tree(9, 97, 5)], prompts(3, seed=2)
    kv, blocks, found = PagedKV(target, 60, 4), [list(range(start, start + 20)) for start in (40, 0, 20)], []
    kept = []
    for prompt, tree, own in zip(prompts_of, trees, blocks, strict=True):
        alone_kv = target.new_kv(20, 4)
        target.forward_ragged([Span(prompt, 0, list(range(20)), 0)], alone_kv)
        span = Span([7, *tree.tokens], len(prompt), list(range(20)), len(tree.tokens) + 1, tree.row_parents)
        alone = target.forward_ragged([span], alone_kv, (0, 2))
        path = tree.path(max(range(len(tree.depths)), key=lambda node: (tree.depths[node], node)))
        kept.append([0, *(node + 1 for node in path)])
        alone_kv.keep_paths([(list(range(20)), len(prompt), kept[-1])])
        after = target.forward_ragged([Span([5, 6], len(prompt) + len(kept[-1]), list(range(20)), 2)], alone_kv)
        assert alone.logits_NV is not None and alone.aux_TLD is not None and after.logits_NV is not None
        found += [alone.logits_NV, alone.aux_TLD, after.logits_NV]
        target.forward_ragged([Span(prompt, 0, own, 0)], kv)
    spans = [
        Span([7, *tree.tokens], len(prompt), own, len(tree.tokens) + 1, tree.row_parents)
        for prompt, tree, own in zip(prompts_of, trees, blocks, strict=True)
    ]
    spans.insert(1, Span([6] * 30, 0, list(range(50, 60)), 1))  # a prompt among them
    together = target.forward_ragged(spans, kv, (0, 2))
    kv.keep_paths([(own, len(p), rows) for own, p, rows in zip(blocks, prompts_of, kept, strict=True)])
    more = [Span([5, 6], len(p) + len(rows), own, 2) for own, p, rows in zip(blocks, prompts_of, kept, strict=True)]
    after_all = target.forward_ragged(more, kv).logits_NV
    assert together.logits_NV is not None and together.aux_TLD is not None and after_all is not None
    return [x.cpu() for x in (*found, together.logits_NV, together.aux_TLD, together.hidden_TD, after_all)]


def test_rows_of_trees_are_those_of_the_cpu(device: SimulatedDevice) -> None:
    here = toy_target("qwen3")
    expected = tree_rows(here)
    there = Target(here.model.to("cuda"), None, here.name)
    for found, other in zip(tree_rows(there), expected, strict=True):
        torch.testing.assert_close(found, other, atol=1e-4, rtol=1e-4)
    assert device.counts.operations["graph"] > 6


@pytest.mark.parametrize("family", [name for name in TOY_CONFIGS if name != "qwen3_moe"])  # experts: CUDA alone
def test_ragged_forwards_are_those_of_the_cpu(device: SimulatedDevice, family: str) -> None:
    """Windows, soft caps, rollbacks and prompts beside steps; no keys are gathered, and none that were not written."""
    here = toy_target(family)
    expected, tokens = run_alone(here)
    device.counts.reset()
    found = run_ragged(Target(here.model.to("cuda"), None, here.name), tokens, BLOCKS)
    for rows, others in zip(found, expected, strict=True):
        torch.testing.assert_close(rows.cpu(), others, atol=2e-4, rtol=2e-4)
    operations = device.counts.operations
    assert not operations["aten::scaled_dot_product_attention"] and operations["simulated::paged_attention"] >= 7


def test_two_single_requests_at_a_time(device: SimulatedDevice) -> None:
    """The second one keeps its keys itself; when the first has ended, the next request borrows its pages."""
    target = toy_target("qwen3")
    target = Target(target.model.to("cuda"), None, target.name)
    rules = StopRules(12, stop_ids=())
    first, second, third = prompts(3)
    alone = [generate(target, prompt, rules=rules).tokens for prompt in (first, second, third)]
    steps = [stream(target, prompt, rules=rules) for prompt in (first, second)]
    together: list[list[int]] = [[], []]
    for pair in zip(*steps, strict=True):
        for tokens, chunk in zip(together, pair, strict=True):
            tokens += chunk.tokens
    del steps, pair, chunk
    assert together == alone[:2]
    device.counts.reset()
    assert generate(target, third, rules=rules).tokens == alone[2]
    assert device.counts.operations["graph"] >= 11


@pytest.mark.parametrize("requests", [1, 3, 32])
@pytest.mark.parametrize("drafted", [False, True])
def test_syncs_of_a_greedy_step(device: SimulatedDevice, requests: int, drafted: bool) -> None:
    target = deep_target(6)
    engine = Engine(target, dspark(target, layers=2) if drafted else None, config=EngineConfig(32, 512))
    step_of(device, engine, requests, SamplingParams())
    assert device.counts.syncs <= MOST_SYNCS["greedy"], device.counts.report()


@pytest.mark.parametrize(("kind", "requests"), [*product(SAMPLED, [1, 5]), ("plain", 32)])
def test_syncs_of_a_sampled_step(device: SimulatedDevice, requests: int, kind: str) -> None:
    target = deep_target(6)
    engine = Engine(target, dspark(target, layers=2), config=EngineConfig(32, 512))
    step_of(device, engine, requests, SAMPLED[kind])
    assert device.counts.syncs <= MOST_SYNCS["sampled"], device.counts.report()


@pytest.mark.parametrize("kind", ["greedy", *SAMPLED])
def test_text_is_that_of_the_cpu(device: SimulatedDevice, kind: str) -> None:
    params, texts = SAMPLED.get(kind, SamplingParams()), []
    for where in ("cpu", "cuda"):
        target = toy_target("qwen3")
        target = Target(target.model.to(where), None, target.name)
        engine = Engine(target, toy_drafter(target), config=EngineConfig(4, 64, 4, 128))
        rules = StopRules(40, stop_ids=())
        requests = [Request(str(i), prompt, replace(params, seed=i), rules) for i, prompt in enumerate(prompts(3))]
        requests[1] = replace(requests[1], trace=True)
        texts.append(finish(engine, requests))
    assert texts[0] == texts[1]


class EvenTokens:
    """A grammar of responses of even tokens, and its state."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, target: Target) -> None:
        self.allowed_V = torch.arange(target.vocab_size, device=target.device) % 2 == 0

    def start(self) -> EvenTokens:
        return self

    def allowed(self, drafts: Sequence[int] = ()) -> Tensor | None:
        return self.allowed_V

    def commit(self, token: int) -> None:
        assert token % 2 == 0


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_company_changes_no_text(device: SimulatedDevice, where: str) -> None:
    """A request with a seed says the same beside longer drafts, a constraint, other settings and earlier ends."""
    target = toy_target("qwen3")
    target = Target(target.model.to(where), None, target.name)
    changes: list[dict[str, Any]] = [
        {"most_drafts": 1},
        {"rules": StopRules(7, stop_ids=())},
        {"grammar": cast(Grammar, EvenTokens(target))},
        {"params": replace(SAMPLED["penalties"], seed=5)},
        {"params": SamplingParams()},
    ]
    requests = [
        Request(str(i), prompt, **{"params": SamplingParams(1.0, seed=i), "rules": StopRules(20, stop_ids=())} | own)
        for i, (prompt, own) in enumerate(zip(prompts(len(changes)), changes, strict=True))
    ]
    drafter, policy, config = toy_drafter(target), ThresholdPolicy(0.5), EngineConfig(8, 256, 4, 256)
    together = finish(Engine(target, drafter, policy, config=config), requests)
    for request in requests:
        alone = finish(Engine(target, drafter, policy, config=config), [request])[request.id]
        assert alone == together[request.id], request


@pytest.mark.slow
def test_chains_of_more_kinds_than_are_captured(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three temperatures, each alone and then together, with graphs for all of them, for two and for none."""
    asked = [
        Request(str(i), prompt, SamplingParams(0.5 + i / 2, seed=i), StopRules(12, stop_ids=()))
        for i, prompt in enumerate(prompts(3))
    ]
    texts, made = [], []
    for most in (64, 2, 0):
        monkeypatch.setattr(draft_graphs, "_MOST_CHAINS", most)
        target = toy_target("qwen3")
        target = Target(target.model.to("cuda"), None, target.name)
        drafter, said = toy_drafter(target), []
        for some in (*([one] for one in asked), asked):
            engine = Engine(target, drafter, config=EngineConfig(4, 64, 4, 128))
            engine.ahead = None
            said.append(finish(engine, some))
        texts.append(said)
        assert drafter.graphs is not None
        made.append(len(drafter.graphs._chains))
    assert texts[0] == texts[1] == texts[2] and made[0] > made[1] == 2 and made[2] == 0


def test_traces_of_sampled_text_are_those_of_the_cpu(device: SimulatedDevice) -> None:
    found = []
    for where in ("cpu", "cuda"):
        target = toy_target("qwen3")
        target = Target(target.model.to(where), None, target.name)
        asks = Traffic((1.0,)).asks(prompts(2), seed=0)
        found.append(record(target, toy_drafter(target), asks, StopRules(12, stop_ids=()), {}))
    here, there = found
    assert [r.tokens for r in here.responses] == [r.tokens for r in there.responses]
    assert here.drafted_N.tolist() == there.drafted_N.tolist()
    assert here.accepted_N.tolist() == there.accepted_N.tolist() and here.accepted_N.sum() > 10


def test_a_drafter_of_a_bfloat16_target_is_served_in_bfloat16(device: SimulatedDevice) -> None:
    drafter = dspark(deep_target(6), layers=2)
    matrices = [module for module in drafter.module.modules() if isinstance(module, PackedLinear)]
    assert matrices and all(matrix.weight.dtype == torch.bfloat16 for matrix in [*matrices, drafter.head])
    assert drafter.head(torch.ones(2, 64, device="cuda")).dtype == torch.float32
    assert isinstance(drafter.caches, DraftPool)
    assert {pool.dtype for pool in drafter.caches.layers} == {torch.bfloat16}


def test_sizes_on_a_gpu(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool for all requests at full length, or of a quarter of the free memory; larger steps; a CPU has its own."""
    target = toy_target("qwen3")
    there = Target(target.model.to("cuda"), None, target.name)
    config = default_config(there)
    assert config.token_budget == 4096 and config.num_blocks == 32 * there.max_context // 16
    per_block = 2 * 16 * sum(keys_KSE.shape[0] * keys_KSE.shape[2] * 4 for keys_KSE, _ in PagedKV(there, 1, 16).layers)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (4 * 10 * per_block + 3, 2**37))
    assert default_config(there).num_blocks == 10
    assert default_config(there, kept_aux=1).num_blocks == 4 * 10 * per_block // 4 // (per_block + 16 * 32 * 4) < 10
    assert default_config(there, max_requests=5000).token_budget == 5000
    assert default_config(toy_target("qwen3")) == EngineConfig()


def test_a_server_takes_the_engine_s_sizes_but_for_those_that_are_given(device: SimulatedDevice) -> None:
    target = toy_target("qwen3")
    there = Model(Target(target.model.to("cuda"), None, target.name), None)
    said: list[str] = []
    usual = replace(default_config(there.target, 3), prefix_cache=True)
    assert engine_config(there, ServeConfig(max_requests=3), said.append) == usual
    given = engine_config(there, ServeConfig(kv_tokens=100, token_budget=64, prefix_cache=False), said.append)
    assert (given.max_requests, given.token_budget, given.num_blocks, given.prefix_cache) == (32, 64, 6, False)
    here = Model(toy_target("qwen3"), None)
    assert engine_config(here, ServeConfig(), said.append) == EngineConfig(prefix_cache=True) and not said
    hybrid = Model(published_target("qwen3_next"), None)
    assert engine_config(hybrid, ServeConfig(), said.append) == EngineConfig()
    assert len(said) == 1 and "state from token to token" in said[0]


def test_a_cached_prefix_is_read_from_the_device(device: SimulatedDevice) -> None:
    """Tokens and drafts are those without a cache, and no step waits for it."""
    target, rules = deep_target(6), StopRules(12, stop_ids=())
    prompt, found = [4 + i % 90 for i in range(60)], {}
    for on in (True, False):
        engine = Engine(target, dspark(target, layers=2), config=EngineConfig(2, 256, prefix_cache=on))
        found[on] = [finish(engine, [Request(id, prompt, rules=rules)])[id] for id in "ab"]
        decoding(engine, 2, SamplingParams())
        device.counts.reset()
        engine.step()
        assert device.counts.syncs <= MOST_SYNCS["greedy"]
    assert found[True] == found[False]


def test_a_prompt_is_read_in_pieces_in_the_step_of_those_who_decode(device: SimulatedDevice) -> None:
    """256 rows of a prompt a step, in the graph of the others, which nobody's tokens tell."""
    target = deep_target(4)
    asked = [Request(str(i), prompt, rules=StopRules(40, stop_ids=())) for i, prompt in enumerate(prompts(3))]
    long = [4 + i % 90 for i in range(600)]
    late = [Request(id, long, rules=StopRules(4, stop_ids=())) for id in ("late", "later")]
    plain = {one.id: generate(target, one.prompt, None, one.params, one.rules).tokens for one in (*asked, *late)}
    engine = Engine(target, config=replace(default_config(target), max_requests=4, num_blocks=100))
    for request in asked:
        engine.submit(request)
    found: dict[str, list[int]] = {id: [] for id in plain}
    reading: list[tuple[int, int]] = []  # prompt rows and launches of a step
    while not engine.idle:
        device.counts.reset()
        outputs = engine.step()
        for output in outputs:
            found[output.id] += output.tokens
        assert engine.last is not None
        if engine.last.prefill_tokens and len(found["0"]) > 1:
            reading.append((engine.last.prefill_tokens, device.counts.launches))
            assert {output.id for output in outputs} >= {"0", "1", "2"}
        if len(found["0"]) in (5, 20):
            engine.submit(late.pop(0))
    assert found == plain and [rows for rows, _ in reading] == 2 * [256, 256, 87]
    assert max(launches for _, launches in reading[3:]) <= MOST_GRAPHED["plain"]  # the first made the graphs


def test_weights_are_on_the_device_once(device: SimulatedDevice) -> None:
    target = deep_target(6)
    attention = target.model.model.layers[0].self_attn
    fused = {attention.q_proj.weight.data_ptr(), attention.k_proj.weight.data_ptr(), attention.v_proj.weight.data_ptr()}
    storages = {
        attention.q_proj.weight.untyped_storage().data_ptr(),
        attention.v_proj.weight.untyped_storage().data_ptr(),
    }
    assert len(fused) == 3 and len(storages) == 1


# ----------------------------------------------------------------------------
# Drafts: the keys of all requests are in one pool, and attention is one call a layer.
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["greedy", *SAMPLED])
def test_launches_of_a_step_hardly_grow_with_requests(
    device: SimulatedDevice, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a draft not at all; the target's step is one graph, and drafts are verified together."""
    drafting: list[int] = []

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*arguments: Any) -> Any:
            before = device.counts.launches
            found = call(*arguments)
            drafting.append(device.counts.launches - before)
            return found

        return counts

    for name in ("propose", "extend"):
        monkeypatch.setattr(BlockDrafter, name, counted(getattr(BlockDrafter, name)))
    launches, drafts = [], []
    for requests in (1, 32):
        target = deep_target(6)
        engine = Engine(target, dspark(target), config=EngineConfig(32, 512))
        step_of(device, engine, requests, SAMPLED.get(kind, SamplingParams()))
        launches.append(device.counts.launches)
        drafts.append(drafting[-2:])
        captured = 2 if kind in ("penalties", "coupled") else 3
        assert device.counts.operations["graph"] == captured, "of blocks, chains that draw alike, and the target"
    assert drafts[0] == drafts[1] and min(drafts[0]) > 0
    assert launches[1] <= 1.3 * launches[0], launches


def rejections(count: int, where: str) -> tuple[list[Draft], list[TargetRows], list[RandomSource]]:
    """Drafts that are mostly rejected: drawn of half the vocabulary, of another half and of all, chosen, and trees."""
    generator, V = torch.Generator().manual_seed(0), 12
    halves = [torch.arange(0, V, 2).to(where), torch.arange(1, V, 2).to(where)]
    drafts, rows = [], []
    for number in range(count):
        kind = number % 5
        target_KV = (3 * torch.randn(4, V, generator=generator)).softmax(-1)
        ids = halves[kind] if kind < 2 else None
        probs_KC = (3 * torch.randn(3, V if ids is None else len(ids), generator=generator)).softmax(-1)
        index_K = probs_KC.multinomial(1, generator=generator)
        tokens = (index_K if ids is None else ids.cpu()[index_K])[:, 0].tolist()
        firsts = probs_KC.gather(1, index_K)[:, 0].tolist()
        siblings = {
            k - 1: Siblings(DraftRow(probs_C, ids, V), first=first)
            for k, (probs_C, first) in enumerate(zip(probs_KC.to(where), firsts, strict=True))
        }
        drafts.append(Draft(tokens, [-1, 0, 1], siblings if kind < 3 else {}))
        if kind == 4:
            tokens = target_KV[0].topk(3).indices.tolist()
            drafts[-1] = Draft(tokens, [-1, -1, 0], {-1: Siblings(DraftRow(probs_KC[0].to(where), None, V))})
        probs = [target_KV[parent + 1, token].item() for token, parent in zip(tokens, drafts[-1].parents, strict=True)]
        warped_KV = target_KV.to(where)
        rows.append(TargetRows(warped_KV.__getitem__, node_probs=None if where == "cpu" else probs))
    return drafts, rows, [SeededSource(number) for number in range(count)]


def test_rejections_of_all_requests_are_computed_together(device: SimulatedDevice) -> None:
    """Tokens are those of the CPU, which computes one after another; of chains, more take no more launches."""
    found = verify_all(*rejections(100, "cuda"))
    assert found == verify_all(*rejections(100, "cpu"))
    assert sum(isinstance(one, Verdict) and one.accepted < 3 for one in found) > 60
    launches = []
    for count in (10, 100):
        chains = [part for part in zip(*rejections(count, "cuda"), strict=True) if part[0].is_chain]
        device.counts.reset()
        verify_all(*(list(part) for part in zip(*chains, strict=True)))
        launches.append(device.counts.launches)
    assert launches[1] <= 1.3 * launches[0], launches


def test_a_row_that_fails_ends_its_request_alone(device: SimulatedDevice) -> None:
    drafts, rows, sources = rejections(10, "cuda")

    def lost() -> Tensor:
        raise ValueError("no row")

    drafts[0] = replace(drafts[0], siblings={k: Siblings(lost, first=1e9) for k in drafts[0].siblings})
    found = verify_all(drafts, rows, sources)
    assert isinstance(found[0], ValueError) and found[1:] == verify_all(*rejections(10, "cpu"))[1:]


KINDS: dict[str, Any] = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


@torch.inference_mode()
@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 7}, KINDS, {**KINDS, "is_causal": None}, {"is_causal": True, "sample_from_anchor": False}],
)
def test_blocks_in_a_pool_are_those_of_the_cpu(device: SimulatedDevice, changes: dict[str, Any]) -> None:
    """Requests of uneven lengths and capacities that come and go, windows that have turned over, shorter blocks."""
    weights = DSpark(toy_config(**changes))
    randomise(weights)
    target = toy_target("qwen3")
    here = BlockDrafter(DrafterWeights(weights), target)
    there_target = Target(target.model.to("cuda"), None, target.name)
    there = BlockDrafter(DrafterWeights(weights.to("cuda")), there_target)
    assert isinstance(there.caches, DraftPool) and isinstance(here.caches, RequestCaches)
    generator = torch.Generator().manual_seed(0)
    sessions: list[tuple[Any, Any]] = []

    def grow(counts: Sequence[int]) -> None:
        aux_TLD = torch.randn(sum(counts), 3, 32, generator=generator)
        tokens = [[0] * count for count in counts]
        here.extend([one for one, _ in sessions], tokens, aux_TLD)
        there.extend([other for _, other in sessions], tokens, aux_TLD.to("cuda"))

    def compare(mine: BlockDrafter, theirs: BlockDrafter) -> None:
        anchors = list(range(5, 5 + len(sessions)))
        expected = mine.block_hidden([one for one, _ in sessions], anchors)
        found = theirs.block_hidden([other for _, other in sessions], anchors).cpu()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    for capacity, counts in ((40, [0]), (90, [9, 60]), (23, [1, 17, 5]), (30, [3, 1, 0, 24])):
        sessions.append((here.new_session(capacity), there.new_session(capacity)))
        grow(counts)
        compare(here, there)
        compare(here.of_length(2), there.of_length(2))
    pages = there.caches.layers[0].shape[2]
    del sessions[1]
    for _ in range(3):
        sessions.append((here.new_session(40), there.new_session(40)))
        grow([2] * (len(sessions) - 1) + [8])
        compare(here, there)
        del sessions[-1]
    assert device.counts.operations["graph"] == 11
    assert there.caches.layers[0].shape[2] == pages, "pages of forgotten sessions are used again"

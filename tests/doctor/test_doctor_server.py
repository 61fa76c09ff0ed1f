"""The doctor of a server: real servers of a toy, healthy and with seeded faults, and what servers say of themselves."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import outrider
import outrider.decoding.verification as verification
import outrider.doctor.replay as replay
import outrider.doctor.servers as server
import outrider.serving.app as app
from outrider.backends.base import Counts, Round
from outrider.backends.openai import Endpoint
from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.data.chat import render
from outrider.data.responses import Sample
from outrider.doctor.evidence import Finding, Status, verdict
from outrider.doctor.probe import Probe
from outrider.doctor.replay import Expected, Replay, Text, faults, log_likelihood, walk
from outrider.doctor.servers import (
    CHECKS,
    Evidence,
    Question,
    ServerAnswer,
    ServerClient,
    examine_server,
    server_json,
    spread_of_length,
)
from outrider.drafters.base import DrafterWeights
from outrider.drafters.cache import CachedKeys
from outrider.drafters.dflash import BlockDrafter, DraftLayer
from outrider.drafters.dspark import DSpark
from outrider.drafters.layers import Attention
from outrider.drafters.medusa import Medusa, MedusaConfig
from outrider.drafters.rope import rope_table
from outrider.target.fused import rotate
from outrider.target.model import Target, load_target
from tests.toys.alphabets import TEMPLATE, alphabet, toy_tokenizer
from tests.toys.command_line import Run
from tests.toys.serving import serving

ROOT = Path(__file__).parents[2]
QUESTIONS, NEW = 10, 24
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def target(alphabet_pair: Path) -> Target:
    return load_target(alphabet_pair / "target")


@pytest.fixture(scope="module")
def weights(alphabet_pair: Path, target: Target) -> DrafterWeights:
    return load_checkpoint(alphabet_pair / "drafter").weights.for_target(target)


@pytest.fixture(scope="module")
def questions(target: Target) -> list[Question]:
    rng, turns = random.Random(7), list[str]()
    while len(turns) < QUESTIONS:
        turn = alphabet(rng)[0]
        turns += [turn] if turn.isalpha() else []
    return [
        Question(
            "long" if len(turn) > 4 else "short",
            tuple(render(toy_tokenizer(), [turn], [])),
            {"messages": [{"role": "user", "content": turn}]},
        )
        for turn in turns
    ]


@pytest.fixture
def home(alphabet_pair: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    for name in ("drafter", "target"):
        shutil.copytree(alphabet_pair / name, tmp_path / name)
    return tmp_path


@contextmanager
def asking(home: Path, target: Target) -> Iterator[ServerClient]:
    """A client of a server of what lies in `home`; `target` is what it should serve."""
    with serving(outrider.load(home / "target", str(home / "drafter"))) as served:
        yield ServerClient(Endpoint(served.url), "m", target, max_new_tokens=NEW, timeout=60)


def config(**changes: Any) -> Change:
    def change(home: Path) -> None:
        path = home / "drafter" / "config.json"
        fields = json.loads(path.read_text())
        if "rope_theta" in changes:
            fields["rope_parameters"]["rope_theta"] = changes["rope_theta"]
        path.write_text(json.dumps(fields | changes))

    return change


def tensors(edit: Callable[[dict[str, Tensor]], None]) -> Change:
    def change(home: Path) -> None:
        path = home / "drafter" / "model.safetensors"
        found = load_file(path)
        edit(found)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, path)

    return change


def without_markov(found: dict[str, Tensor]) -> None:
    found["markov_head.markov_w2.weight"].zero_()


def without_last_layer(found: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        if name.startswith("layers.1.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()


def four_bits(found: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        if name.endswith(("proj.weight", "fc.weight", "markov_w2.weight")):
            scale = tensor.float().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 7
            tensor.copy_((tensor.float() / scale).round() * scale)


def swapped_columns(found: dict[str, Tensor]) -> None:
    first, second, *rest = found["fc.weight"].chunk(3, dim=1)
    found["fc.weight"] = torch.cat((second, first, *rest), dim=1)


FAULTS: dict[str, tuple[str, Change]] = {
    "aux layers - 1": ("aux layers", config(target_layer_ids=[-1, 0, 2])),
    "aux layers + 1": ("aux layers", config(target_layer_ids=[1, 2, 3])),
    "order": ("order of aux layers", tensors(swapped_columns)),
    "mask token": ("mask token", config(mask_token_id=0)),
    "layout": ("block layout", config(sample_from_anchor=False)),
    "causal": ("attention inside the block", config(is_causal=True)),
    "rope": ("RoPE base", config(rope_theta=100_000.0)),
    "window": ("window", config(sliding_window=16, use_sliding_window=True, layer_types=["sliding_attention"] * 2)),
    "markov": ("sequential head", tensors(without_markov)),
    "layer": ("weights", tensors(without_last_layer)),
    "four bits": ("weights", tensors(four_bits)),
}
QUICK = ("aux layers - 1", "causal")


def by_check(report: Evidence) -> dict[str, Finding]:
    return {finding.check: finding for finding in report.findings}


def causes(report: Evidence) -> list[str]:
    return [finding.check for finding in report.findings if finding.group == "likely causes"]


def test_a_healthy_server_is_clean(
    alphabet_pair: Path, target: Target, weights: DrafterWeights, questions: list[Question]
) -> None:
    with asking(alphabet_pair, target) as client:
        report = examine_server(client, weights, questions, baseline=client)
    assert {name: f.figure for name, f in by_check(report).items() if f.status != "ok"} == {}
    assert "rounds described" in by_check(report)["counters"].figure
    assert "5 of 5 greedy texts are the same" in by_check(report)["with and without drafter"].figure
    assert report.hypotheses[0].fault.name == "none" and not causes(report)
    assert report.hypotheses[0].length > 1.5, "far above chance, or the tests below prove nothing"
    found = json.loads(json.dumps(server_json(report)["server"]))
    assert found["hypotheses"][0]["fault"] == "none" and found["rounds"] > 50


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_a_seeded_fault_is_named_first(
    name: str, home: Path, target: Target, weights: DrafterWeights, questions: list[Question]
) -> None:
    cause, change = FAULTS[name]
    change(home)
    with asking(home, target) as client:
        report = examine_server(client, weights, questions)
    assert causes(report)[0] == cause
    first = by_check(report)[cause]
    assert first.status in ("fault", "warning") and first.meaning and first.remedy


def positions_moved(patch: pytest.MonkeyPatch) -> None:
    def block_hidden(self: BlockDrafter, sessions: Any, anchors: Any) -> Tensor:
        rows, lengths = self.config.block_size, [session.length for session in sessions]
        tokens_RK = self.module.block_tokens(torch.tensor(anchors))
        tables = self.rope([length + k + 1 for length in lengths for k in range(rows)])
        rope = tuple(table.unflatten(0, tokens_RK.shape) for table in tables)
        source = CachedKeys(sessions, lengths, [rows] * len(sessions))
        return self.module.blocks(self.embed(tokens_RK), rope, source)  # type: ignore[arg-type]

    patch.setattr(BlockDrafter, "block_hidden", block_hidden)


def features_late(patch: pytest.MonkeyPatch) -> None:
    own, last = BlockDrafter.extend, dict[int, Tensor]()

    def extend(self: BlockDrafter, sessions: Any, tokens: Any, aux_TLD: Tensor) -> None:
        parts = list(aux_TLD.split([len(part) for part in tokens]))
        for place, (session, part) in enumerate(zip(sessions, parts, strict=True)):
            if not len(part):
                continue
            before = part[:1] if session.length == 0 else last[id(session)]
            parts[place], last[id(session)] = torch.cat((before, part[:-1])), part[-1:]
        own(self, sessions, tokens, torch.cat(parts))

    patch.setattr(BlockDrafter, "extend", extend)


def first_norm_everywhere(patch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.32 norms context keys on a CPU."""
    own = DSpark.context_keys_values

    def context_keys_values(self: DSpark, aux_SLT: Tensor, rope: Any) -> Any:
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        norms = [attention.k_norm for attention in attentions]
        try:
            for attention in attentions:
                attention.k_norm = norms[0]
            return own(self, aux_SLT, rope)
        finally:
            for attention, norm in zip(attentions, norms, strict=True):
                attention.k_norm = norm

    patch.setattr(DSpark, "context_keys_values", context_keys_values)


def drafts_compared(patch: pytest.MonkeyPatch) -> None:
    def compared(draft: Any, node: int, rows: Any, source: Any) -> tuple[int | None, Tensor | None]:
        target_V = rows.row(node + 1)
        token = source.choose(target_V)
        for child in draft.children(node):
            if draft.tokens[child] == token:
                return child, None
        return None, torch.nn.functional.one_hot(torch.tensor(token), len(target_V)).to(target_V.dtype)

    patch.setattr(verification, "_try_children", compared)


@pytest.mark.parametrize(
    ("seed", "cause"),
    [
        (drafts_compared, "sampling on one side"),
        pytest.param(positions_moved, "position ids", marks=pytest.mark.slow),
        pytest.param(features_late, "features", marks=pytest.mark.slow),
        pytest.param(first_norm_everywhere, "norms of context keys", marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_the_servers_code_is_named(
    seed: Callable[[pytest.MonkeyPatch], None],
    cause: str,
    alphabet_pair: Path,
    target: Target,
    weights: DrafterWeights,
    questions: list[Question],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed(monkeypatch)  # the replay does not go through the code that serves
    with asking(alphabet_pair, target) as client:
        report = examine_server(client, weights, questions)
    assert causes(report)[0] == cause


@pytest.mark.parametrize("fault", [None, "layout"])
def test_counters_alone_tell(
    fault: str | None,
    home: Path,
    target: Target,
    weights: DrafterWeights,
    questions: list[Question],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that describes no rounds: counts by position from its record, as vLLM has it."""
    monkeypatch.setattr(server, "_FIELDS", ({"return_token_ids": True}, {}))
    if fault is not None:
        FAULTS[fault][1](home)
    with asking(home, target) as client:
        report = examine_server(client, weights, questions, temperatures=[0.0])
    assert "counts by position" in by_check(report)["counters"].figure
    assert causes(report)[:1] == ([] if fault is None else [FAULTS[fault][0]])


def test_an_older_checkpoint_is_named(
    home: Path, target: Target, weights: DrafterWeights, questions: list[Question]
) -> None:
    def older(found: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for tensor in found.values():
            if tensor.is_floating_point() and tensor.dim() == 2:
                tensor += 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)

    tensors(older)(home)
    stale = load_checkpoint(home / "drafter").weights.for_target(target)
    with asking(home, target) as client:
        report = examine_server(client, weights, questions, others={"runs/older": stale})
    assert causes(report)[0] == "weights" and "runs/older" in by_check(report)["weights"].figure


def test_another_template_is_found(
    home: Path, target: Target, weights: DrafterWeights, questions: list[Question]
) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{% if not enable_thinking %}-{% endif %}", "")
    tokenizer.save_pretrained(home / "target")
    with asking(home, target) as client:
        rendered = [client.render(questions[0])]
        found = find("prompt", client=client, rendered=rendered)
        assert found.status == "fault" and "with thinking" in found.figure
        tokenizer.chat_template = "be good! " + TEMPLATE
        other = replace(client, target=Target(target.model, tokenizer, target.name))
        own = replace(questions[0], tokens=tuple(render(tokenizer, [tuple(questions[0].chat["messages"])], [])))
        assert rendered[0] is not None
        found = find("prompt", client=other, rendered=[replace(rendered[0], question=own)])
        assert found.status == "fault" and "be good!" in found.figure


def test_another_target_is_found_in_its_text(
    home: Path, target: Target, weights: DrafterWeights, questions: list[Question]
) -> None:
    path = home / "target" / "model.safetensors"
    found = load_file(path)
    found["model.layers.2.mlp.down_proj.weight"] += 0.5 * torch.randn_like(found["model.layers.2.mlp.down_proj.weight"])
    save_file(found, path, metadata={"format": "pt"})
    with asking(home, target) as client:
        text = by_check(examine_server(client, weights, questions[:4], temperatures=[0.0]))["text"]
    assert text.status == "fault" and "not this target's" in text.meaning


def test_sampled_text_of_another_temperature_is_found(
    alphabet_pair: Path, target: Target, weights: DrafterWeights, questions: list[Question]
) -> None:
    """As on vLLM 0.32 on a CPU, which loses the temperature of drafts; greedy answers are judged all the same."""

    class Hot(ServerClient):
        async def _post(self, client: Any, body: Any, chat: bool, plain: bool = False) -> Any:
            return await super()._post(client, {**body, "temperature": 4 * body["temperature"]}, chat, plain)

    with asking(alphabet_pair, target) as client:
        hot = Hot(client.endpoint, "m", target, max_new_tokens=NEW, timeout=60)
        report = examine_server(hot, weights, questions)
    found = by_check(report)
    assert found["sampled text"].status == "fault" and server.causes(report.findings)[0].check == "sampled text"
    assert found["text"].status == found["acceptance"].status == "ok"
    assert len(report.hypotheses[0].expected) == sum(a.temperature == 0 for a in report.answers)


def test_what_is_expected_of_sampled_text_is_the_entropy(target: Target, weights: DrafterWeights) -> None:
    prompt, drawn, generator = list(range(4, 12)), list[Text](), torch.Generator().manual_seed(0)
    for _ in range(16):
        tokens = list(prompt)
        for _ in range(NEW):
            text = torch.tensor([tokens])
            logits_V = target.logits(target.forward(text, target.new_cache(text.shape[1]), logits=0).hidden_BTD[0, -1])
            tokens.append(int(torch.multinomial((logits_V / 0.7).softmax(-1), 1, generator=generator)))
        sample = Sample("s", tokens, ((len(prompt), len(tokens)),))
        drawn.append(Text(sample, NEW, 0.7, counts=Counts(0, 0)))
    found = [Replay(target, weights, drawn).surprise(index) for index in range(len(drawn))]
    deviation = sum(variance for _, variance in found) ** 0.5
    assert deviation > 1 and abs(sum(excess for excess, _ in found)) < 3 * deviation


def canned(target: Target, **said: Any) -> ServerClient:
    """A server that answers every question alike."""

    class Canned(ServerClient):
        async def _post(self, client: Any, body: Any, chat: bool, plain: bool = False) -> Any:
            if "error" in said:
                raise ValueError(said["error"])
            return {"choices": [{"token_ids": said["tokens"], "finish_reason": "length"}], **said["fields"]}

    return Canned(Endpoint("http://127.0.0.1:9"), "m", target, max_new_tokens=8, timeout=1)


def record(histogram: list[int], **changes: int) -> dict[str, Any]:
    accepted = sum(count * hits for hits, count in enumerate(histogram))
    fields = {"num_spec_steps": sum(histogram), "num_accepted_draft_tokens": accepted, "num_spec_tokens": 4}
    fields |= {"acceptance_histogram": histogram, "num_draft_tokens": 4 * sum(histogram)}
    return {"metrics": {"speculative_decoding": fields | changes}}


def test_a_server_that_does_not_answer(target: Target, weights: DrafterWeights, questions: list[Question]) -> None:
    report = examine_server(canned(target, error="down"), weights, questions)
    found = by_check(report)
    assert verdict(report.findings) == "fault" and "0 of 10" in found["answers"].figure
    assert "down" in found["answers"].figure and list(found) == ["answers"]


@pytest.mark.parametrize("reason", ["ReadTimeout", "status 500"])
def test_a_server_that_stops_answering_is_judged_by_what_it_said(
    reason: str,
    alphabet_pair: Path,
    target: Target,
    weights: DrafterWeights,
    questions: list[Question],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It hangs, or fails, from its seventh answer on."""
    own, answered = app.RouteAnswer.collect, list[None]()

    async def collect(self: app.RouteAnswer, submission: Any) -> Any:
        answered.append(None)
        if len(answered) > 6 and reason == "ReadTimeout":
            await asyncio.sleep(60)
        if len(answered) > 6:
            raise RuntimeError("broken on purpose")
        return await own(self, submission)

    monkeypatch.setattr(app.RouteAnswer, "collect", collect)
    with asking(alphabet_pair, target) as client:
        client.timeout = 3 if reason == "ReadTimeout" else 60
        report = examine_server(client, weights, questions)
    found = by_check(report)
    assert found["answers"].status == "warning" and "6 of 10 questions" in found["answers"].figure
    assert reason in found["answers"].figure and server.causes(report.findings)[0].check == "answers"
    assert found["text"].status == found["acceptance"].status == "ok"


def test_a_record_that_contradicts_the_counters_is_not_believed(
    alphabet_pair: Path,
    target: Target,
    weights: DrafterWeights,
    questions: list[Question],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers tell more rounds than there were; /metrics counts them rightly and fits the text."""
    own = app.RouteAnswer.collect

    async def collect(self: app.RouteAnswer, submission: Any) -> Any:
        data = await own(self, submission)
        data["choices"][0].pop("trace", None)
        told = data["metrics"]["speculative_decoding"]
        told["acceptance_histogram"][0] += 3
        told["num_spec_steps"] += 3
        return data

    monkeypatch.setattr(app.RouteAnswer, "collect", collect)
    with asking(alphabet_pair, target) as client:
        report = examine_server(client, weights, questions)
    found = by_check(report)
    assert [cause.check for cause in server.causes(report.findings)] == ["counters"]
    assert "10 of 10" in found["counters"].figure
    assert found["acceptance"].status == "ok" and found["asked again"].status == "skipped"


def test_a_server_without_counters_is_judged_by_its_text(
    target: Target, weights: DrafterWeights, questions: list[Question]
) -> None:
    client = canned(target, tokens=[5, 6, 7], fields={})
    found = by_check(examine_server(client, weights, questions[:2], temperatures=[0.0]))
    assert found["counters"].status == "warning" and found["acceptance"].status == "skipped"
    assert found["text"].status == "fault"


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        (record([9, 9, 9, 9, 9]), "cannot have given"),
        (record([1, 1, 0, 0, 0], num_accepted_draft_tokens=3), "accepted by position"),
        (record([1, 1, 0, 0, 0], num_draft_tokens=0), "drafted"),
        (record([-1, 2, 0, 0, 0], num_spec_steps=-1), "fell"),
        (record([0, 3, 0, 0, 0], num_spec_steps=2), "first drafts accepted in 2 rounds"),
    ],
)
def test_counts_that_cannot_be(
    fields: dict[str, Any], wrong: str, target: Target, weights: DrafterWeights, questions: list[Question]
) -> None:
    client = canned(target, tokens=[5, 6, 7], fields=fields)
    counters = by_check(examine_server(client, weights, questions[:2], temperatures=[0.0]))["counters"]
    assert counters.status == "fault" and wrong in counters.figure


def test_a_server_that_drafts_nothing(target: Target, weights: DrafterWeights, questions: list[Question]) -> None:
    client = canned(target, tokens=[5, 6, 7], fields=record([0, 0, 0, 0, 0]))
    counters = by_check(examine_server(client, weights, questions[:2], temperatures=[0.0]))["counters"]
    assert counters.status == "fault" and "no drafts" in counters.meaning


def find(check: str, weights: DrafterWeights | None = None, **evidence: Any) -> Finding:
    """The finding of one check; `evidence`: fields and measurements of `Evidence`."""
    e = Evidence(cast(Any, None), cast(Any, weights), 0, answers=[])
    vars(e).update({"counters": SimpleNamespace(drafting=True, bad=0, unlike=0)} | evidence)
    finding = next(one for one in CHECKS if one.name == check).find(e)
    assert finding is not None
    return finding


def answer(counts: Counts, tokens: int = 20, question: Question | None = None) -> ServerAnswer:
    return ServerAnswer(question or Question("k", (1, 2), {}), 0.0, tuple(range(tokens)), exact=True, counts=counts)


@pytest.mark.parametrize(
    ("slots", "drafted", "status"), [(4, 40, "ok"), (3, 30, "warning"), (None, 30, "warning"), (4, 30, "warning")]
)
def test_draft_lengths_that_are_cut(slots: int | None, drafted: int, status: str, weights: DrafterWeights) -> None:
    found = find("draft length", weights, chosen=[0], compared=[answer(Counts(10, 9, drafted=drafted, slots=slots))])
    assert found.status == status


@pytest.mark.parametrize(("way", "word"), [("again", "prefix cache"), ("together", "one batch")])
def test_less_is_accepted_the_second_time(way: str, word: str) -> None:
    first, fewer = Counts(10, 9, slots=4), Counts(14, 5, slots=4)
    again = {"again": [answer(first)], "together": [answer(first)]} | {way: [answer(fewer)]}
    found = find("asked again", answers=[answer(first)], again=again)
    assert found.status == "fault" and word in found.meaning
    again[way] = [answer(first)]
    assert find("asked again", answers=[answer(first)], again=again).status == "ok"


def test_an_answer_without_drafts_is_possible_where_the_server_chooses() -> None:
    """Ours drafts nothing while that does not pay; a second answer is compared only where as much was drafted."""
    rounds = [{"source": None, "drafts": [], "tokens": [n]} for n in range(8)]
    plain = server.counts_of({"choices": [{"trace": rounds}], **record([0, 0, 0, 0, 0])}, 8)
    assert plain is not None and plain.rounds == 0 and server.impossible(answer(plain, tokens=8)) is None
    drafted = replace(plain, rounds=4, accepted=4, described=(Round(0, 2, 1, tokens=2),) * 4)
    first, second = answer(drafted, tokens=8), answer(plain, tokens=8)
    found = find("asked again", answers=[first], again={"again": [second], "together": [first]})
    assert found.status == "ok" and "again against" not in found.figure


def test_ties_are_told_from_errors(target: Target, questions: list[Question]) -> None:
    prompt = torch.tensor([questions[0].tokens])
    logits_V = target.logits(target.forward(prompt, target.new_cache(99), logits=0).hidden_BTD[0, -1])
    first, second, last = logits_V.sort(descending=True).indices[[0, 1, -1]].tolist()
    one = replace(answer(Counts(1, 0), question=questions[0]), tokens=(first,))
    client = SimpleNamespace(target=target)
    wrong = find("with and without drafter", client=client, answers=[one], baseline=[replace(one, tokens=(last,))])
    assert wrong.status == "fault" and f"{logits_V[last]:.4f}) without" in wrong.figure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_TIE_BFLOAT16", float(logits_V[first] - logits_V[second]) + 1e-3)
        tie = find("with and without drafter", client=client, answers=[one], baseline=[replace(one, tokens=(second,))])
    assert tie.status == "ok" and "tie of bfloat16" in tie.figure


def test_defaults_that_change_the_text(target: Target, questions: list[Question]) -> None:
    prompt = torch.tensor([questions[0].tokens])
    logits_V = target.logits(target.forward(prompt, target.new_cache(99), logits=0).hidden_BTD[0, -1])
    one = replace(answer(Counts(1, 0), question=questions[0]), tokens=(int(logits_V.argmax()),))
    client, other = SimpleNamespace(target=target), replace(one, tokens=(int(logits_V.argmin()),))
    found = find("defaults", client=client, answers=[one], again={"plain": [other]})
    assert found.status == "warning" and "by default" in found.figure and "generation_config.json" in found.meaning
    assert find("defaults", client=client, answers=[one], again={"plain": [one]}).status == "ok"
    assert find("defaults", client=client, answers=[one], again={"plain": []}).status == "skipped"


def test_causes_are_the_worst_first() -> None:
    def finding(status: Status, check: str, group: str = "server", meaning: str = "m") -> Finding:
        return Finding(status, "figure", meaning, group=group, check=check)

    found = [
        finding("ok", "text", meaning=""),
        finding("warning", "draft length"),
        finding("fault", "acceptance", meaning=""),
        finding("fault", "aux layers", "likely causes"),
        finding("unclear", "features", "likely causes"),
        finding("fault", "prompt"),
    ]
    assert [cause.check for cause in server.causes(found)] == ["aux layers", "prompt", "draft length", "features"]


# The traps of docs/engines.md, and the check of the doctor that names it where a server has it; None: such a
# server ends before it answers, or its drafter is another one by its own log.
TRAPS = {
    "attention-in-a-block": "attention inside the block",
    "llama-cpp-conversion": None,
    "llama-cpp-dspark-head": "weights",
    "llama-cpp-last-aux-layer": None,
    "llama-cpp-reduced-vocabulary": None,
    "llama-cpp-short-drafts": "draft length",
    "penalties": "defaults",
    "sglang-cpu": None,
    "vllm-context-limit": "asked again",
    "vllm-cpu-sampled-drafts": "sampled text",
    "vllm-dflash-cpu-norms": "norms of context keys",
    "vllm-dspark-cpu": None,
    "vllm-eagle3-aux-layers": None,
    "vllm-medusa-biases": "weights",
    "vllm-medusa-config-keys": None,
    "vllm-medusa-reduced-vocabulary": None,
    "vllm-memory-on-a-cpu": None,
    "wrong-shapes-load": "RoPE base",
}


def test_every_trap_of_an_engine_has_a_rule(target: Target, weights: DrafterWeights) -> None:
    """A finding that names the trap names its heading, too."""
    traps = (ROOT / "docs" / "engines.md").read_text().partition("\n## Traps\n")[2]
    assert set(re.findall(r"^### (\S+)$", traps, re.MULTILINE)) == TRAPS.keys()
    probe = Probe(target, weights, [Sample("s", list(range(4, 40)), ((8, 36),))])
    said = {fault.name: fault.meaning + fault.remedy for fault in faults(probe, {}, weights.config.gamma)}
    cut = find("draft length", weights, chosen=[0], compared=[answer(Counts(10, 9, drafted=30, slots=3))])
    first, fewer = answer(Counts(10, 9, slots=4)), answer(Counts(14, 5, slots=4))
    less = find("asked again", answers=[first], again={"again": [first], "together": [fewer]})
    one = replace(first, question=Question("k", (5, 6), {}))
    changed = find(
        "defaults", client=SimpleNamespace(target=target), answers=[one], again={"plain": [replace(one, tokens=(9,))]}
    )
    drawn = [replace(one, tokens=(7,), temperature=1.0)]
    unlikely = find("sampled text", replayed=(SimpleNamespace(surprise=lambda index: (20.0, 1.0)), drawn))
    for name, found in (
        ("draft length", cut),
        ("asked again", less),
        ("defaults", changed),
        ("sampled text", unlikely),
    ):
        said[name] = found.meaning + found.remedy
    missing = [page for page, check in TRAPS.items() if check is not None and page not in said[check]]
    assert missing == []


def medusa_weights(target: Target) -> DrafterWeights:
    config = MedusaConfig.from_target(target, num_heads=2)
    torch.manual_seed(0)
    module = Medusa(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return DrafterWeights(module, None)


def test_biases_that_a_loader_dropped_are_a_hypothesis(target: Target) -> None:
    probe = Probe(target, medusa_weights(target), [Sample("s", list(range(4, 40)), ((8, 36),))])
    found = {v.label: v for fault in faults(probe, {}, 2) for v in fault.variants}
    dropped = found["biases not loaded"].module
    assert dropped is not None
    zeros = [bool((bias == 0).all()) for name, bias in dropped(probe.drafter).named_parameters() if "bias" in name]
    assert zeros and all(zeros)


def test_interleaved_rotation_is_that_of_the_reordered_head(weights: DrafterWeights) -> None:
    own = cast(DSpark, weights.module)
    changed = cast(DSpark, replay._interleaved(own))
    attentions = [cast(DraftLayer, module.layers[0]).self_attn for module in (own, changed)]
    size, theta = own.config.head_dim, own.config.rope_theta
    torch.manual_seed(0)
    rows, positions = torch.randn(5, own.config.hidden_size), torch.tensor([3, 4, 7, 20, 90])
    halves = rope_table(positions, own.config)

    def scores(attention: Attention, neighbours: bool) -> Tensor:
        parts = []
        for projection, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
            heads = norm(projection(rows).unflatten(-1, (-1, size)))[:, 0]
            if neighbours:
                angles = positions[:, None] * theta ** (-torch.arange(0, size, 2) / size)
                even, odd = heads[:, ::2], heads[:, 1::2]
                cos, sin = angles.cos(), angles.sin()
                parts.append(torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1))
            else:
                parts.append(rotate(heads[:, None], *halves)[:, 0])
        return parts[0] @ parts[1].T

    with torch.no_grad():
        expected, found, plain = scores(attentions[0], True), scores(attentions[1], False), scores(attentions[0], False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, expected, rtol=1e-2)


def test_counts_are_read_from_every_engine() -> None:
    by_position = server.counts_of({"choices": [{}], **record([2, 1, 0, 3, 0])}, 16)
    assert by_position == Counts(6, 10, (4, 3, 3, 0), drafted=24, slots=4)
    timings = {"draft_n": 9, "draft_n_accepted": 5, "predicted_n": 12}
    assert server.counts_of({"choices": [{}], "timings": timings}, 12) == Counts(7, 5, drafted=9)
    draft = {"outcome": "accepted"}
    rounds = [
        {"source": "drafter", "drafts": [draft, {"outcome": "rejected"}, {"outcome": "left out"}], "tokens": [1, 2]},
        {"source": "copy", "drafts": [draft], "tokens": [3, 4]},
        {"source": None, "drafts": [], "tokens": [5]},
    ]
    described = (Round(0, 2, 1, tokens=2), Round(2, 0, 0, tokens=2), Round(4, 0, 0, tokens=1))
    found = server.counts_of({"choices": [{"trace": rounds}], **record([1, 0, 0, 0, 0])}, 5)
    assert found == Counts(1, 1, (1, 0, 0, 0), drafted=2, slots=4, described=described)
    told = {"spec_verify_ct": 6, "spec_num_correct_drafts": 10, "spec_num_proposed_drafts": 24}
    for histogram, expected in (([2, 1, 0, 3, 0], by_position), (None, Counts(6, 10, drafted=24))):
        details = told | {"spec_correct_drafts_histogram": histogram}
        assert server.counts_of({"choices": [{"sglext": {"spec_tokens_details": details}}]}, 16) == expected
        assert server.counts_of({"choices": [{"meta_info": details}]}, 16) == expected
    prefix = "vllm:spec_decode_num_"
    before = {f"{prefix}drafts_total": [3.0], f"{prefix}draft_tokens_total": [12.0]}
    before |= {f"{prefix}accepted_tokens_total": [2.0], f"{prefix}accepted_tokens_per_pos_total": [2.0, 0.0]}
    after = {name: [value + k + 1 for k, value in enumerate(values)] for name, values in before.items()}
    assert server.between(before, after) == Counts(1, 1, (1, 2), drafted=1, slots=2)
    assert server.between({}, {}) is None


def test_rounds_are_read_from_detailed_records() -> None:
    """vLLM's first token comes with the prefill; its last round may go on behind the answer."""
    steps = {"per_step_accepted": [2, 0, 3], "per_step_drafted": [4, 4, 4]}
    fields = record([1, 0, 1, 1, 0])
    fields["metrics"]["speculative_decoding"] |= steps
    told = (Round(1, 4, 2, tokens=3), Round(4, 4, 0, tokens=1), Round(5, 4, 3, tokens=2))
    found = server.counts_of({"choices": [{}], **fields}, 7)
    assert found is not None and found.described == told and found.reached_K == (3, 2, 2, 1)
    for tokens in (5, 10):  # some step without drafts is missing, so that places are not known
        found = server.counts_of({"choices": [{}], **fields}, tokens)
        assert found is not None and found.described == ()


def test_counters_are_taken_where_an_answer_tells_sums_alone() -> None:
    sums, exact = Counts(9, 5, drafted=30), Counts(7, 5, drafted=30)
    assert server.better_of(sums, exact) is exact and server.better_of(None, exact) is exact
    assert server.better_of(sums, replace(exact, accepted=4)) is sums, "others were served meanwhile"
    assert server.better_of(replace(sums, accepted_K=(5,)), exact) == replace(sums, accepted_K=(5,))
    assert server.better_of(sums, None) is sums


def enumerated(q_NK: np.ndarray, response: int, start: int, cut: bool) -> Expected:
    """Expected counts by all outcomes of every comparison."""
    slots = q_NK.shape[1]
    total, reached, accepted = 0.0, np.zeros(slots), np.zeros(slots)
    places = [(n, k) for n in range(response) for k in range(slots)]
    for outcome in product((0, 1), repeat=len(places)):
        right = dict(zip(places, outcome, strict=True))
        weight = np.prod([q_NK[p] if right[p] else 1 - q_NK[p] for p in places])
        n = start
        while n < response:
            limit = min(slots, response - n - 1) if cut else slots
            hits = next((k for k in range(limit) if not right[n, k]), limit)
            if limit:
                total += weight
                reached[: min(hits + 1, limit)] += weight
                accepted[:hits] += weight
            n += hits + 1
    return Expected(total, reached, accepted)


@pytest.mark.parametrize(("start", "cut"), [(0, False), (0, True), (1, False)])
def test_the_walk_is_the_enumeration(start: int, cut: bool) -> None:
    q_NK = np.random.default_rng(0).uniform(0.2, 0.9, (4, 2))
    found, expected = walk(q_NK, 4, start, cut=cut), enumerated(q_NK, 4, start, cut=cut)
    assert found.rounds == pytest.approx(expected.rounds)
    np.testing.assert_allclose(found.reached_K, expected.reached_K)
    np.testing.assert_allclose(found.accepted_K, expected.accepted_K)


def test_the_truth_is_likeliest() -> None:
    """Counts drawn from one q are likelier under it than under others, rounds described or not."""
    rng, sample = np.random.default_rng(1), Sample("s", list(range(80)), ((2, 80),))
    true_NK, other_NK = np.full((60, 3), 0.7), np.full((60, 3), 0.5)
    rounds, start = list[Round](), 0
    while start < 60:
        hits = next((k for k in range(3) if rng.random() >= 0.7), 3)
        rounds.append(Round(start, 3, hits, tokens=hits + 1))
        start += hits + 1
    hits_K = tuple(sum(one.accepted > k for one in rounds) for k in range(3))
    plain = Counts(len(rounds), sum(hits_K), hits_K, slots=3)
    for counts in (plain, replace(plain, accepted_K=None), replace(plain, described=tuple(rounds))):
        text = Text(sample, 60, 1.0, counts)
        scores = []
        for q_NK in (true_NK, other_NK):
            rows_NK = q_NK[: len(text.starts)]
            scores.append(log_likelihood([walk(q_NK, 60, 0, cut=False)], [text], [rows_NK]))
        assert scores[0] > scores[1] + 1


def test_the_spread_of_an_accepted_length() -> None:
    assert spread_of_length([0.5], 100) == pytest.approx(0.05)
    generator, rates = random.Random(0), (0.6, 0.5, 0.9)
    lengths = [next((k for k, rate in enumerate(rates) if generator.random() >= rate), 3) for _ in range(20_000)]
    assert spread_of_length(rates, 1) == pytest.approx(statistics.pstdev(lengths), rel=0.02)


def test_the_verb(alphabet_pair: Path, tmp_path: Path, run: Run) -> None:
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    rows = [{"id": text, "turns": [text]} for text in ("aceg", "bdfh", "cegi", "dfhj")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--target", alphabet_pair / "target", "--drafter", alphabet_pair / "drafter", "--tasks", prompts]
    given += ["--max-new-tokens", 16, "--json", report]
    with serving(outrider.load(alphabet_pair / "target", str(alphabet_pair / "drafter"))) as served:
        status, out, _ = run("doctor", "--base-url", served.url, *given)
    assert status == 0 and "acceptance: accepted length" in out
    found = json.loads(report.read_text())
    assert found["verdict"] == "ok" and found["server"]["hypotheses"][0]["fault"] == "none"
    assert "with and without drafter" not in out
    with (
        serving(outrider.load(alphabet_pair / "target", str(alphabet_pair / "drafter"))) as served,
        serving(outrider.load(alphabet_pair / "target", drafter=None)) as plain,
    ):
        status, out, _ = run("doctor", "--base-url", served.url, "--baseline-url", plain.url, *given)
    assert status == 0 and "with and without drafter" in out
    status, _, errors = run("doctor", "--base-url", served.url, *given)
    assert status and "no model is listed" in errors
    status, _, errors = run("doctor", "--base-url", served.url, *given, "--temperature", "0.7")
    assert status and "give 0, 1 or 0,1" in errors
    status, _, errors = run("doctor", "--base-url", served.url, *given, "--quick")
    assert status and "--quick: not together with --base-url" in errors
    status, _, errors = run("doctor", *given, "--baseline-url", served.url)
    assert status and "--baseline-url: only with --base-url" in errors


def test_a_key_follows_no_redirect(
    alphabet_pair: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a host that would answer: neither to list models nor to ask one that is named. No report has it."""
    key, heard = "kept-to-ourselves", list[str]()
    monkeypatch.setenv("OUTRIDER_API_KEY", key)

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            heard.append(f"{self.path} {self.headers.get('Authorization')}")
            self.answer(200, b'{"data": [{"id": "m"}]}')

        do_POST = do_GET

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Moved(Elsewhere):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer(307, b"", Location=f"http://localhost:{there.server_port}{self.path}")

        do_POST = do_GET

    report = tmp_path / "report.json"
    given = ["--target", alphabet_pair / "target", "--drafter", alphabet_pair / "drafter", "--json", report]
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as there,
        ThreadingHTTPServer(("127.0.0.1", 0), Moved) as here,
    ):
        for one in (there, here):
            threading.Thread(target=one.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{here.server_port}"
        status, out, errors = run("doctor", "--base-url", url, *given)
        assert status == 2 and "no model is listed" in errors and "307" in errors
        status, more, again = run("doctor", "--base-url", url, "--served-model", "m", *given)
        for one in (there, here):
            one.shutdown()
    assert status == 1 and "307" in more and not heard
    assert key not in out + errors + more + again + report.read_text()

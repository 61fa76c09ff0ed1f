"""Prompts, rendering, regenerated responses that survive a kill, and the boundary the loss mask is."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import sysconfig
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM

import outrider.data.regenerate as sources
from outrider.data.chat import Chat, render
from outrider.data.conversations import Conversation, content_id
from outrider.data.regenerate import (
    DataSection,
    LocalSource,
    Regeneration,
    Response,
    decode_batch,
    plan_batches,
    regenerate,
    temperature_of,
)
from outrider.data.responses import (
    FORMAT,
    Reply,
    Sample,
    companion_file,
    join_turns,
    open_responses,
    read_responses,
    sole_writer,
    stored_samples,
)
from outrider.data.sources import load_prompts, shipped_sets
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from outrider.training.batches import BlockBatch, Schedule, build_batch
from outrider.training.dataset import choose_draft_ids
from outrider.training.feature_store import samples_digest
from outrider.training.features import Features
from outrider.training.recipe import OptimizerSection
from tests.toys.decoding import generate_batch
from tests.toys.targets import TOY, toy_samples
from tests.toys.tokenizer import byte_tokenizer


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_prompts_with_and_without_ids_blank_lines_and_limit(tmp_path: Path) -> None:
    path = write(
        tmp_path / "my.jsonl", '{"id": 7, "turns": ["a", "b"], "x": 1}\n\n{"turns": ["ü"]}\n{"turns": ["c"]}\n'
    )
    assert load_prompts(path) == [
        Conversation("7", ("a", "b")),
        Conversation(content_id(("ü",), ()), ("ü",)),
        Conversation(content_id(("c",), ()), ("c",)),
    ]
    assert [p.id for p in load_prompts(str(path), limit=2)] == ["7", content_id(("ü",), ())]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["a"', r"my\.jsonl:2: Invalid JSON"),
        ('["a"]', r"my\.jsonl:2: .*object"),
        ('{"text": "a"}', r"my\.jsonl:2: no conversation among the fields text\. Each line must be"),
        ('{"turns": []}', r"my\.jsonl:2: turns: .*at least 1"),
        ('{"turns": "a"}', r"my\.jsonl:2: turns: .*valid array"),
        ('{"turns": ["a", 3]}', r"my\.jsonl:2: turns\.1: .*string"),
        ('{"turns": ["a", " "]}', r"my\.jsonl:2: an empty turn"),
    ],
)
def test_a_malformed_prompt_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "my.jsonl", '{"turns": ["fine"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        load_prompts(path)
    assert len(load_prompts(path, limit=1)) == 1, "lines beyond the limit are not read"


def test_missing_and_empty_prompt_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no prompt file 'nope'.*eval_math.*train_chat"):
        load_prompts("nope")
    with pytest.raises(ValueError, match=r"empty\.jsonl: no prompts"):
        load_prompts(write(tmp_path / "empty.jsonl", "\n \n"))


def test_shipped_sets_are_many_distinct_and_disjoint() -> None:
    sets = {name: load_prompts(name) for name in shipped_sets()}
    train = [p for name, prompts in sets.items() if name.startswith("train_") for p in prompts]
    held_out = [p for name, prompts in sets.items() if name.startswith("eval_") for p in prompts]
    assert len(train) + len(held_out) == sum(map(len, sets.values())) >= 200 and len(held_out) >= 30
    every = train + held_out
    assert len({p.id for p in every}) == len(every)
    texts = [{" ".join(str(p.turns[0]).lower().split()) for p in part} for part in (train, held_out)]
    assert len(texts[0]) == len(train) and len(texts[1]) == len(held_out) and not texts[0] & texts[1]


def test_render_through_the_chat_template() -> None:
    tokenizer = byte_tokenizer()
    one = render(tokenizer, ["hé"], [])
    assert tokenizer.decode(one) == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert one[0] == tokenizer.convert_tokens_to_ids("<|im_start|>"), "special tokens, not their letters"
    two = render(tokenizer, ["hé", "and?"], ["yes"])
    expected = "yes<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(two) == tokenizer.decode(one) + expected
    assert two[: len(one)] == one, "a later turn continues the earlier tokens"


def test_render_for_a_base_model_and_an_empty_prompt() -> None:
    base = byte_tokenizer(chat=False)
    assert base.decode(render(base, ["Once", "and then?"], ["upon a time"])) == "Once\n\nupon a time\n\nand then?"
    for tokenizer in (base, byte_tokenizer()):
        with pytest.raises(ValueError, match="prompt is empty"):
            render(tokenizer, ["a", " \n"], ["b"])


PROMPTS = [Conversation(f"p{i}", tuple("abcdefg"[i : i + 1 + i % 3])) for i in range(5)]  # 1, 2, 3, 1 and 2 turns
DATA = DataSection(responses="r.jsonl", max_new_tokens=6, batch_size=2)
SAMPLED = DATA.model_copy(update={"temperature": 1.3, "top_p": 0.95, "top_k": 40})


@pytest.fixture(scope="module")
def target() -> Target:
    """A random model over the byte tokenizer's ids."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    model = LlamaForCausalLM(LlamaConfig(**{**TOY, "vocab_size": len(tokenizer), "num_hidden_layers": 2}))
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return Target(model, tokenizer, "toy")


def make(
    target: Target,
    path: Path,
    data: DataSection = DATA,
    prompts: list[Conversation] = PROMPTS,
    *,
    seed: int = 4,
    on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> Regeneration:
    return regenerate(LocalSource(target, data), prompts, path, seed=seed, on_progress=on_progress, stop=stop)


def changed(data: DataSection, **fields: object) -> DataSection:
    return data.model_copy(update=fields)


def key(reply: Reply) -> tuple[str, int]:
    return reply.id, reply.turn


def test_regeneration_keeps_prompts_responses_and_turns_apart(target: Target, tmp_path: Path) -> None:
    progress: list[tuple[int, int, int]] = []
    path = tmp_path / "deep" / "r.jsonl"
    made = make(target, path, on_progress=lambda *numbers: progress.append(numbers))
    samples = made.replies
    assert list(map(key, samples)) == [(p.id, t) for p in PROMPTS for t in range(len(p.turns))]
    settings, read = read_responses(path)
    assert read == samples and not companion_file(path, "journal").exists()
    assert list(settings.items()) == [
        ("target", "toy"),
        ("max_new_tokens", 6),
        ("max_prompt_tokens", 512),
        ("temperature", 0.0),
        ("top_p", 1.0),
        ("top_k", 0),
        ("seed", 4),
        ("thinking", False),
        ("chat_template_sha256", Chat.of(target).template_sha256),
        ("generator", "outrider"),
        ("dtype", "float32"),
    ]
    summary = json.loads(path.read_text().splitlines()[0])["summary"]
    assert summary == asdict(made.summary) and summary["total"] == summary["done"] == 9
    found = {key(s): s for s in samples}
    tokenizer = target.tokenizer
    assert tokenizer is not None
    for prompt in PROMPTS:
        for turn in range(len(prompt.turns)):
            replies = [tokenizer.decode(found[prompt.id, t].response, skip_special_tokens=True) for t in range(turn)]
            sample = found[prompt.id, turn]
            assert tokenizer.decode(sample.prompt) == tokenizer.decode(
                render(tokenizer, prompt.turns[: turn + 1], replies)
            )
            assert 1 <= len(sample.response) <= 6
            # greedy: each response token is the argmax after everything before it, the first one included
            tokens = torch.tensor([sample.prompt + sample.response])
            logits = target.forward(tokens, target.new_cache(tokens.shape[1]), logits=None).logits_BTV
            assert logits is not None
            assert logits[0, len(sample.prompt) - 1 : -1].argmax(-1).tolist() == sample.response
    assert progress[-1] == (9, 9, sum(len(s.response) for s in samples))


class Killed(BaseException):
    """Stands for kill -9 between two system calls."""


@pytest.mark.parametrize("data", [DATA, SAMPLED], ids=["greedy", "sampled"])
def test_a_run_killed_anywhere_ends_with_the_bytes_of_an_uninterrupted_one(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: DataSection
) -> None:
    make(target, tmp_path / "whole.jsonl", data)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    chance = random.Random(1)
    path = tmp_path / "killed.jsonl"
    journal = companion_file(path, "journal")
    decoded: list[int] = []

    def dying(*args: Any, **named: Any) -> Iterator[dict[int, Response]]:
        for ended in decode_batch(*args, **named):
            if chance.random() < 0.15:
                raise Killed
            decoded.append(len(ended))
            yield ended

    monkeypatch.setattr(sources, "decode_batch", dying)
    kills = torn = 0
    while not path.exists():
        try:
            make(target, path, data)
        except Killed:
            kills += 1
            if journal.exists() and chance.random() < 0.5:  # it died inside a write
                torn += 1
                with journal.open("ab") as file:
                    file.write(b'{"replies": [{"id": "p0", "tu')
    assert kills >= 3 and torn >= 1
    assert path.read_bytes() == whole and not journal.exists()
    assert sum(decoded) == 9, "nothing is decoded twice"


def test_every_cut_of_the_journal_is_gone_on_from(target: Target, tmp_path: Path) -> None:
    journals: list[bytes] = []
    path = tmp_path / "r.jsonl"

    def keep(done: int, *_: int) -> None:
        if done:
            journals.append(companion_file(path, "journal").read_bytes())

    make(target, path, SAMPLED, on_progress=keep)
    whole, journal = path.read_bytes(), journals[-1]
    for cut in random.Random(0).sample(range(len(journal)), 12):
        path.unlink()
        companion_file(path, "journal").write_bytes(journal[:cut])
        make(target, path, SAMPLED)
        assert path.read_bytes() == whole, cut


def test_what_is_said_does_not_depend_on_the_batch_but_on_the_seed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", list(range(40)))  # many leave their batch early
    alone = make(target, tmp_path / "1.jsonl", changed(SAMPLED, batch_size=1)).replies
    assert make(target, tmp_path / "2.jsonl", changed(SAMPLED, batch_size=5)).replies == alone
    assert make(target, tmp_path / "3.jsonl", SAMPLED, seed=5).replies != alone
    assert len({tuple(r.response) for r in alone}) > 5


def test_each_conversation_has_one_of_several_temperatures(target: Target, tmp_path: Path) -> None:
    """What it says is what it says where all have that temperature, whichever share its batch."""
    temperatures = [0.0, 0.6, 1.3]
    prompts = [*PROMPTS, *(Conversation(f"q{i}", ("q",)) for i in range(4))]
    mixture = changed(SAMPLED, temperature=temperatures, batch_size=3)
    mixed = make(target, tmp_path / "mixed.jsonl", mixture, prompts).replies
    alike = [
        {key(r): r for r in make(target, tmp_path / f"{T}.jsonl", changed(SAMPLED, temperature=T), prompts).replies}
        for T in temperatures
    ]
    of_each = {reply.id: temperatures.index(temperature_of(reply.id, temperatures)) for reply in mixed}
    assert mixed == [alike[of_each[r.id]][key(r)] for r in mixed]
    assert set(of_each.values()) == {0, 1, 2}, "the prompts have all three"
    assert all(mixed != [chosen[key(r)] for r in mixed] for chosen in alike)
    drawn = Counter(temperature_of(f"p{i}", temperatures) for i in range(3000))
    assert all(900 < drawn[T] < 1100 for T in temperatures)
    assert read_responses(tmp_path / "mixed.jsonl")[0]["temperature"] == temperatures


@pytest.mark.parametrize("temperatures", [[], -0.5, [0.0, -1.0], True, "warm"])
def test_temperatures_that_are_none(temperatures: object) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        DataSection(responses="r.jsonl", temperature=temperatures)  # type: ignore[arg-type]


def test_sampling_follows_the_targets_distribution(target: Target) -> None:
    params = SamplingParams(temperature=1.0, top_k=3)
    prompt = [5, 6, 7]
    logits = target.forward(torch.tensor([prompt]), target.new_cache(3)).logits_BTV
    assert logits is not None
    top = logits[0, -1].topk(3)
    drawn = generate_batch(target, [prompt] * 3000, 1, params, range(3000))
    counts = torch.tensor([sum(r.tokens == [int(token)] for r in drawn) for token in top.indices])
    assert int(counts.sum()) == 3000
    assert torch.allclose(counts / 3000, top.values.softmax(-1), atol=0.04)


def test_batches_are_planned_from_all_prompts_whatever_is_done() -> None:
    lengths = [random.Random(0).randrange(1, 99) for _ in range(70)]
    plan = plan_batches(lengths, 4)
    assert sorted(i for batch in plan for i in batch) == list(range(70))
    assert plan[:16] == plan_batches(lengths[:64], 4), "a longer list begins with the same batches"


def test_prompts_added_later_keep_the_replies_that_are_there(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = make(target, path, SAMPLED, PROMPTS[:3]).replies
    more = make(target, path, SAMPLED, PROMPTS)
    assert [r for r in more.replies if r.id in {"p0", "p1", "p2"}] == first
    assert more.summary.total == more.summary.done == 9
    assert more.new_tokens == sum(len(r.response) for r in more.replies if r.id in ("p3", "p4"))


def test_an_early_stop_keeps_what_there_is_and_the_counts_add_up(target: Target, tmp_path: Path) -> None:
    whole = make(target, tmp_path / "whole.jsonl", SAMPLED)
    batches: list[int] = []
    path = tmp_path / "r.jsonl"
    made = make(target, path, SAMPLED, on_progress=lambda *n: batches.append(n[0]), stop=lambda: len(batches) >= 2)
    assert len(made.replies) == 2, "a batch that began is decoded to its end"
    assert (made.summary.total, made.summary.done, made.summary.waiting) == (9, 2, 7)
    assert make(target, path, SAMPLED).replies == whole.replies
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_prompts_that_are_too_long_are_passed_over(target: Target, tmp_path: Path) -> None:
    length = len(render(byte_tokenizer(), ["a"], []))
    made = make(target, tmp_path / "r.jsonl", changed(DATA, max_prompt_tokens=length))
    assert sorted(map(key, made.replies)) == [(p.id, 0) for p in PROMPTS]
    assert (made.summary.done, made.summary.skipped, made.summary.waiting) == (5, 4, 0)


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.5}, {"max_new_tokens": 7}, {"seed": 1}, {"max_prompt_tokens": 9}, {"top_k": 2}, {"top_p": 0.5}],
)
def test_responses_made_with_other_settings_are_refused(
    target: Target, tmp_path: Path, change: dict[str, float]
) -> None:
    path = tmp_path / "r.jsonl"
    seed = int(change.get("seed", 4))
    fields = {name: value for name, value in change.items() if name != "seed"}
    make(target, path, prompts=PROMPTS[:1])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="other settings"):
        make(target, path, changed(DATA, **fields), seed=seed)
    assert path.read_bytes() == before
    path.rename(companion_file(path, "journal"))  # and so is a journal
    with pytest.raises(ValueError, match="other settings"):
        make(target, path, changed(DATA, **fields), seed=seed)


def test_another_conversation_under_the_same_id_is_refused(target: Target, tmp_path: Path) -> None:
    make(target, tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match="another prompt with the id 'p1'"):
        make(target, tmp_path / "r.jsonl", prompts=[Conversation("p1", ("other", "c"))])


def test_a_file_in_any_order_that_was_cut_short_is_gone_on_with(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    whole = make(target, path)
    settings, _ = read_responses(path)
    lines = [json.dumps({"format": FORMAT, "settings": settings})]
    lines += [json.dumps(asdict(reply)) for reply in reversed(whole.replies)]
    write(path, "\n".join(lines[:6]) + "\n" + lines[6][:20])  # died inside a line
    assert read_responses(path) == (settings, list(reversed(whole.replies))[:5])
    again = make(target, path)
    assert again.replies == whole.replies and again.new_tokens < whole.new_tokens
    with pytest.raises(ValueError, match="other settings"):
        make(target, write(path, "\n".join(lines) + "\n"), changed(DATA, thinking=True))


def test_a_file_of_an_older_version_is_refused_by_name(target: Target, tmp_path: Path) -> None:
    old = {"target": "toy", "max_new_tokens": 6, "max_prompt_tokens": 512, "temperature": 0.0, "seed": 4}
    text = json.dumps({"settings": old}) + "\n"
    path = write(tmp_path / "r.jsonl", text)
    with pytest.raises(ValueError, match=r"r\.jsonl has format 1.*format 2.*Delete"):
        make(target, path)
    assert path.read_text() == text
    path.rename(companion_file(path, "journal"))  # and so is a journal
    with pytest.raises(ValueError, match=r"r\.journal\.jsonl has format 1"):
        make(target, path)


def test_a_malformed_line_that_is_not_the_last_is_named(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    make(target, path, prompts=PROMPTS[:2])
    lines = path.read_text().splitlines(keepends=True)
    for number, broken in ((1, "{}\n"), (2, '{"id": "p0"}\n'), (3, "half\n"), (len(lines), "half\n")):
        write(path, "".join([*lines[: number - 1], broken, *lines[number:]]))
        with pytest.raises(
            ValueError, match=r"not a responses file" if number == 1 else rf"r\.jsonl:{number}: .*Delete the file"
        ):
            read_responses(path)
    path.unlink()
    write(companion_file(path, "journal"), lines[0] + "half\n" + lines[1])
    with pytest.raises(ValueError, match=r"r\.journal\.jsonl:2: not a journal line"):
        make(target, path, prompts=PROMPTS[:2])


def features(sample: Sample) -> Features:
    """Rows that carry the position they predict, aux hidden states that carry their own."""
    positions = torch.tensor(sample.supervised_positions)
    aux_layers = torch.arange(len(sample.tokens) - 1).float()[:, None, None].expand(-1, 2, 4)
    return Features(aux_layers, positions.float()[:, None].expand(-1, 4), positions.float(), positions)


def batch_of(samples: list[Sample], chosen: list[tuple[int, list[int]]], gamma: int) -> BlockBatch:
    return build_batch(chosen, samples, [features(samples[i]) for i, _ in chosen], gamma)


def test_anchors_are_exactly_the_tokens_whose_next_token_is_a_response_token() -> None:
    samples = toy_samples(6)
    everything = Schedule(samples, 2, 1000, seed=3)
    few = Schedule(samples, 2, 5, seed=3)
    for index, sample in enumerate(samples):
        first, last = sample.spans[0][0] - 1, len(sample.tokens) - 2
        assert everything.anchors(index, 0) == list(range(first, last + 1))
        drawn = [few.anchors(index, epoch) for epoch in range(40)]
        assert all(anchors == sorted(set(anchors)) and len(anchors) == 5 for anchors in drawn)
        assert {a for anchors in drawn for a in anchors} == set(range(first, last + 1))
    epochs = [[index for step in range(first, first + 3) for index, _ in few.step(step)] for first in (0, 3, 6)]
    assert all(sorted(dealt) == list(range(6)) for dealt in epochs), "an epoch deals every sample once"
    assert len(set(map(tuple, epochs))) == 3, "in an order of its own"


def test_fixed_blocks_cover_every_response_token_once() -> None:
    gamma = 3
    samples = [*toy_samples(6), Sample("turns", list(range(20)), ((2, 9), (10, 16)))]
    blocks = OptimizerSection(sequences_per_step=2, anchors_per_sequence=1000, anchors="blocks")
    schedule = Schedule.of(blocks, samples, 3, gamma)
    assert schedule.anchors(6, 0) == [1, 4, 7, 9, 12], "anew in every response"
    for index, sample in enumerate(samples):
        batch = batch_of(samples, [(index, schedule.anchors(index, 0))], gamma)
        assert batch.lse_NK[batch.supervised_NK].tolist() == sample.supervised_positions
        assert schedule.anchors(index, 0) == schedule.anchors(index, 7)
    few = Schedule.of(blocks.model_copy(update={"anchors_per_sequence": 2}), samples, 3, gamma)
    drawn = [tuple(few.anchors(6, epoch)) for epoch in range(60)]
    assert {len(set(anchors)) for anchors in drawn} == {2}
    assert {a for anchors in drawn for a in anchors} == {1, 4, 7, 9, 12}, "any of them, not the first"
    assert few.anchors_dealt(5) == sum(len(anchors) for step in range(5) for _, anchors in few.step(step))


def test_all_anchors_are_every_response_token() -> None:
    samples = toy_samples(6)
    schedule = Schedule.of(OptimizerSection(sequences_per_step=2, anchors="all"), samples, 3, gamma=4)
    for index, sample in enumerate(samples):
        assert schedule.anchors(index, 0) == [position - 1 for position in sample.supervised_positions]
    with pytest.raises(ValueError, match="anchors_per_sequence"):
        OptimizerSection(anchors="all", anchors_per_sequence=5)


@pytest.mark.parametrize("gamma", [1, 4, 30])
def test_blocks_supervise_the_following_response_tokens_and_nothing_else(gamma: int) -> None:
    samples = toy_samples(5)
    chosen = Schedule(samples, 3, 1000, seed=1).step(0)
    batch = batch_of(samples, chosen, gamma)
    blocks = [(number, index, anchor) for number, (index, anchors) in enumerate(chosen) for anchor in anchors]
    assert len(blocks) == len(batch.previous_NK[:, 0])
    assert batch.layout.lengths == [anchors[-1] for _, anchors in chosen]
    assert torch.equal(batch.aux_SLD[:, 0, 0].long(), batch.layout.positions_S())
    for n, (number, index, anchor) in enumerate(blocks):
        tokens, prompt = samples[index].tokens, samples[index].tokens[: samples[index].spans[0][0]]
        assert int(batch.layout.anchors_N[n]) == anchor and int(batch.layout.sequence_N[n]) == number
        assert int(batch.previous_NK[:, 0][n]) == tokens[anchor]
        following = tokens[anchor + 1 : anchor + 1 + gamma]
        inside = len(following)
        assert batch.supervised_NK[n].tolist() == [True] * inside + [False] * (gamma - inside)
        assert batch.labels_NK[n].tolist() == following + [0] * (gamma - inside)
        assert batch.previous_NK[n, :inside].tolist() == tokens[anchor : anchor + inside]
        predicted = list(range(anchor + 1, anchor + 1 + inside))
        assert min(predicted) >= len(prompt)
        for rows in (batch.target_hidden_NKD[n, :inside, 0], batch.lse_NK[n, :inside], batch.argmax_NK[n, :inside]):
            assert rows.tolist() == predicted, "the target's view of exactly these positions"


def test_turns_join_into_one_sample_unless_the_template_rewrote_them() -> None:
    first = Reply("a", 0, [1, 2], [3, 4], True)
    second = Reply("a", 1, [1, 2, 3, 4, 5, 6], [7], True)
    rewritten = Reply("a", 2, [1, 2, 9], [8, 8], False)
    joined = join_turns([second, Reply("b", 0, [5], [6], True), rewritten, first])
    assert joined == [
        Sample("a", [1, 2, 3, 4, 5, 6, 7], ((2, 4), (6, 7))),
        Sample("a", [1, 2, 9, 8, 8], ((3, 5),)),
        Sample("b", [5, 6], ((1, 2),)),
    ]
    assert joined[0].supervised_positions == [2, 3, 6] and joined[0].anchors == [1, 2, 5]
    assert joined[0].supervised_tokens == [3, 4, 7] and joined[0].num_supervised == 3


def written(path: Path, replies: Sequence[Reply]) -> Path:
    """A responses file of these replies, in their order."""
    lines = [{"format": FORMAT, "settings": {}}, *map(asdict, replies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def stored(path: Path) -> list[Sample]:
    return stored_samples(path, open_responses(path)[1])


def test_stored_samples_are_the_joined_ones(tmp_path: Path) -> None:
    """Later turns, a rewritten one, nothing answered, lines of one conversation apart, one cut off by a crash."""
    first = Reply("a", 0, [1, 2], [3, 4], True)
    second = Reply("a", 1, [1, 2, 3, 4, 5, 6], [7], True)
    silent = Reply("a", 2, [1, 2, 3, 4, 5, 6, 7, 8], [], True)
    rewritten = Reply("a", 3, [1, 2, 9], [8, 8], False)
    others = [Reply("b", 0, [5], [6], True), Reply("c", 0, [5, 6], [], True), Reply("d", 0, [300, 7], [8] * 40, True)]
    path = written(tmp_path / "r.jsonl", [second, others[0], rewritten, *others[1:], silent, first])
    with path.open("a") as file:
        file.write('{"id": "e", "tu')
    joined = join_turns(read_responses(path)[1])
    found = stored(path)
    facts = [(s.id, s.tokens, s.spans, s.length, s.anchors, s.supervised_tokens) for s in joined]
    assert len(joined) == 4 and joined[0].length == 8
    for samples in (found, pickle.loads(pickle.dumps(found))):  # another rank's
        assert [(s.id, s.tokens, s.spans, s.length, s.anchors, s.supervised_tokens) for s in samples] == facts
    assert samples_digest(found) == samples_digest(joined)
    whole = json.dumps([(s.tokens, s.spans) for s in joined])
    assert samples_digest(joined) == hashlib.sha256(whole.encode()).hexdigest(), "as runs have it that began before"
    sent = pickle.dumps(found)
    path.write_text(path.read_text().replace("300", "301"))
    with pytest.raises(ValueError, match=r"r\.jsonl changed"):
        pickle.loads(sent)


def test_tokens_of_stored_samples_take_no_memory(tmp_path: Path) -> None:
    replies = [Reply(str(i), 0, [1000] * 500, list(range(1000, 2500)), True) for i in range(100)]
    path = written(tmp_path / "r.jsonl", replies)
    taken = {}
    for name, read in (("stored", stored), ("joined", lambda path: join_turns(read_responses(path)[1]))):
        tracemalloc.start()
        samples = read(path)
        assert sum(len(sample.tokens) for sample in samples) == 200_000
        taken[name] = tracemalloc.get_traced_memory()[0] / len(samples)
        tracemalloc.stop()
    assert taken["stored"] < 1500 < 16000 < taken["joined"], "bytes of a sample"


def test_a_reduced_vocabulary_has_the_most_frequent_tokens_the_first_of_equals() -> None:
    samples = [Sample("a", [9, 8, 8, 3, 5, 3], ((3, 6),)), Sample("b", [8, 7, 4, 4, 6], ((2, 3), (4, 5)))]
    expected = [1, 3, 5, 4, 6, 8, 9, 7, 0, 2]  # a stop token, 3 twice, then 5, 4, 6 of responses; 8 thrice; 9, 7
    for size in range(1, 12):
        assert choose_draft_ids(samples, 10, size, frozenset({1})).tolist() == sorted(expected[:size])


def test_a_block_ends_with_its_response_even_where_another_one_follows() -> None:
    sample = Sample("a", list(range(10, 20)), ((2, 4), (5, 9)))
    batch = batch_of([sample], [(0, [1, 2, 4, 7])], gamma=3)
    assert batch.supervised_NK.tolist() == [[True, True, False], [True, False, False], [True] * 3, [True, False, False]]
    assert batch.labels_NK.tolist() == [[12, 13, 0], [13, 0, 0], [15, 16, 17], [18, 0, 0]]
    assert batch.lse_NK[2].tolist() == [5.0, 6.0, 7.0] and batch.previous_NK[0].tolist() == [11, 12, 13]


def test_library_functions_become_prompts_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = load_prompts("stdlib_functions", 300)
    assert len(prompts) == 300 == len({p.id for p in prompts})
    part = Path(sysconfig.get_paths()["stdlib"]) / "email"  # the whole library takes seconds to parse
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(part)})
    assert load_prompts("stdlib_functions", 20) == load_prompts("stdlib_functions", 30)[:20]
    for prompt in prompts:
        code = str(prompt.turns[0]).split("```python\n")[1].removesuffix("\n```")
        assert code.startswith("def ") and code.count('"""') >= 2


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with sole_writer(tmp_path / "r.jsonl"):
            order.append("second")

    other = threading.Thread(target=second)
    with sole_writer(tmp_path / "r.jsonl"):
        other.start()
        other.join(timeout=0.3)
        order.append("first")
    other.join()
    assert order == ["first", "second"]

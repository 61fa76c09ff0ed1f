"""Prompts, rendering, regenerated responses that survive a kill, and the boundary the loss mask is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TOY, toy_samples
from test_text import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.data import responses
from outrider.data.chat import render
from outrider.data.prompts import Prompt, load_prompts, shipped_sets
from outrider.data.responses import RegenerationConfig, read_responses, regenerate
from outrider.data.samples import Reply, Sample, join_turns
from outrider.target import Target
from outrider.training.batches import BlockBatch, Schedule, build_batch
from outrider.training.features import Features


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_prompts_with_and_without_ids_blank_lines_and_limit(tmp_path: Path) -> None:
    path = write(
        tmp_path / "my.jsonl", '{"id": 7, "turns": ["a", "b"], "x": 1}\n\n{"turns": ["ü"]}\n{"turns": ["c"]}\n'
    )
    assert load_prompts(path) == [
        Prompt("7", ("a", "b")),
        Prompt("my-3", ("ü",)),
        Prompt("my-4", ("c",)),
    ]
    assert [p.id for p in load_prompts(str(path), limit=2)] == ["7", "my-3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["a"', r"my\.jsonl:2: Invalid JSON"),
        ('["a"]', r"my\.jsonl:2: .*object"),
        ('{"prompt": "a"}', r"my\.jsonl:2: turns: Field required"),
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
    texts = [{" ".join(p.turns[0].lower().split()) for p in part} for part in (train, held_out)]
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


PROMPTS = [Prompt(f"p{i}", tuple("abcdefg"[i : i + 1 + i % 3])) for i in range(5)]  # 1, 2, 3, 1 and 2 turns
CONFIG = RegenerationConfig(max_new_tokens=6, batch_size=2)


@pytest.fixture(scope="module")
def target() -> Target:
    """A random model over the byte tokenizer's ids."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    model = LlamaForCausalLM(LlamaConfig(**{**TOY, "vocab_size": len(tokenizer), "num_hidden_layers": 2}))
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return Target(model, tokenizer, "toy")


def key(reply: Reply) -> tuple[str, int]:
    return reply.id, reply.turn


def test_regeneration_keeps_prompts_responses_and_turns_apart(target: Target, tmp_path: Path) -> None:
    progress: list[tuple[int, int, int]] = []
    path = tmp_path / "deep" / "r.jsonl"
    samples = regenerate(target, PROMPTS, CONFIG, path, lambda *numbers: progress.append(numbers))
    assert sorted(map(key, samples)) == [(p.id, t) for p in PROMPTS for t in range(len(p.turns))]
    settings, read = read_responses(path)
    assert sorted(read, key=key) == sorted(samples, key=key)
    assert settings == {"target": "toy", "max_new_tokens": 6, "max_prompt_tokens": 512, "temperature": 0.0, "seed": 0}
    found = {key(s): s for s in samples}
    tokenizer = target.tokenizer
    assert tokenizer is not None
    for prompt in PROMPTS:
        for turn in range(len(prompt.turns)):
            replies = [tokenizer.decode(found[prompt.id, t].response, skip_special_tokens=True) for t in range(turn)]
            sample = found[prompt.id, turn]
            assert sample.prompt == render(tokenizer, prompt.turns[: turn + 1], replies)
            assert 1 <= len(sample.response) <= 6
            # greedy: each response token is the argmax after everything before it, the first one included
            tokens = torch.tensor([sample.prompt + sample.response])
            logits = target.forward(tokens, target.new_cache(tokens.shape[1]), logits=None).logits_BTV
            assert logits is not None
            assert logits[0, len(sample.prompt) - 1 : -1].argmax(-1).tolist() == sample.response
    assert progress[-1] == (9, 9, sum(len(s.response) for s in samples))


@pytest.mark.parametrize("kept", [1, 3, 6])
def test_a_killed_regeneration_goes_on_to_the_same_samples(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    whole = regenerate(target, PROMPTS, CONFIG, tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    path = write(tmp_path / "killed.jsonl", "".join(lines[:kept]) + lines[kept][:-9])  # died inside a line
    generate = responses.generate_all
    asked: list[list[int]] = []

    def counted(target: Target, prompts: Sequence[list[int]], *rest: object) -> object:
        asked.extend(prompts)
        return generate(target, prompts, *rest)

    monkeypatch.setattr(responses, "generate_all", counted)
    resumed = regenerate(target, PROMPTS, replace(CONFIG, batch_size=3), path)
    assert sorted(resumed, key=key) == sorted(whole, key=key)
    assert sorted(read_responses(path)[1], key=key) == sorted(whole, key=key), "and so does the file"
    assert len(asked) == len(whole) - (kept - 1), "finished responses are not written again"


def test_an_early_stop_keeps_what_there_is(target: Target, tmp_path: Path) -> None:
    batches: list[int] = []
    samples = regenerate(
        target, PROMPTS, CONFIG, tmp_path / "r.jsonl", lambda *n: batches.append(n[0]), stop=lambda: len(batches) >= 2
    )
    assert batches == [2, 4] and len(samples) == 4
    assert len(regenerate(target, PROMPTS, CONFIG, tmp_path / "r.jsonl")) == 9


def test_prompts_that_are_too_long_are_passed_over(target: Target, tmp_path: Path) -> None:
    length = len(render(byte_tokenizer(), ["a"], []))
    samples = regenerate(target, PROMPTS, replace(CONFIG, max_prompt_tokens=length), tmp_path / "r.jsonl")
    assert sorted(map(key, samples)) == [(p.id, 0) for p in PROMPTS]


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"max_new_tokens": 7}, {"seed": 1}, {"max_prompt_tokens": 9}])
def test_responses_made_with_other_settings_are_refused(
    target: Target, tmp_path: Path, change: dict[str, float]
) -> None:
    path = tmp_path / "r.jsonl"
    regenerate(target, PROMPTS[:1], CONFIG, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="other settings"):
        regenerate(target, PROMPTS, replace(CONFIG, **change), path)
    assert path.read_bytes() == before


def test_a_malformed_line_that_is_not_the_last_is_named(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    regenerate(target, PROMPTS[:2], CONFIG, path)
    lines = path.read_text().splitlines(keepends=True)
    for number, broken in ((1, "{}\n"), (2, '{"id": "p0"}\n'), (3, "half\n"), (len(lines), "half\n")):
        write(path, "".join([*lines[: number - 1], broken, *lines[number:]]))
        with pytest.raises(ValueError, match=rf"r\.jsonl:{number}: .*Delete the file"):
            read_responses(path)


def features(sample: Sample) -> Features:
    """Rows that carry the position they predict, taps that carry their own."""
    positions = torch.tensor(sample.supervised_positions)
    taps = torch.arange(len(sample.tokens) - 1).float()[:, None, None].expand(-1, 2, 4)
    return Features(taps, positions.float()[:, None].expand(-1, 4), positions.float(), positions)


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
    dealt = [index for step in range(3) for index, _ in few.step(step)]
    assert sorted(dealt) == list(range(6)), "an epoch deals every sample once"


@pytest.mark.parametrize("gamma", [1, 4, 30])
def test_blocks_supervise_the_following_response_tokens_and_nothing_else(gamma: int) -> None:
    samples = toy_samples(5)
    chosen = Schedule(samples, 3, 1000, seed=1).step(0)
    batch = batch_of(samples, chosen, gamma)
    blocks = [(number, index, anchor) for number, (index, anchors) in enumerate(chosen) for anchor in anchors]
    assert len(blocks) == len(batch.anchor_tokens_N)
    assert batch.layout.lengths == [anchors[-1] for _, anchors in chosen]
    assert torch.equal(batch.taps_SLD[:, 0, 0].long(), batch.layout.positions_S())
    for n, (number, index, anchor) in enumerate(blocks):
        tokens, prompt = samples[index].tokens, samples[index].tokens[: samples[index].spans[0][0]]
        assert int(batch.layout.anchors_N[n]) == anchor and int(batch.layout.sequence_N[n]) == number
        assert int(batch.anchor_tokens_N[n]) == tokens[anchor]
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


def test_a_block_ends_with_its_response_even_where_another_one_follows() -> None:
    sample = Sample("a", list(range(10, 20)), ((2, 4), (5, 9)))
    batch = batch_of([sample], [(0, [1, 2, 4, 7])], gamma=3)
    assert batch.supervised_NK.tolist() == [[True, True, False], [True, False, False], [True] * 3, [True, False, False]]
    assert batch.labels_NK.tolist() == [[12, 13, 0], [13, 0, 0], [15, 16, 17], [18, 0, 0]]
    assert batch.lse_NK[2].tolist() == [5.0, 6.0, 7.0] and batch.previous_NK[0].tolist() == [11, 12, 13]


def test_library_functions_become_prompts_without_being_imported() -> None:
    prompts = load_prompts("stdlib_functions", 300)
    assert len(prompts) == 300 == len({p.id for p in prompts})
    assert prompts == load_prompts("stdlib_functions", 400)[:300]
    for prompt in prompts:
        code = prompt.turns[0].split("```python\n")[1].removesuffix("\n```")
        assert code.startswith("def ") and code.count('"""') >= 2

"""Made prompts: distinct, the same for every limit, an even mixture of kinds, and apart from what is measured with."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest

from benchmarks import cells
from outrider.data import made_prompts as grammar
from outrider.data.conversations import Conversation, content_id, parse_row, row_of
from outrider.data.made_prompts import COUNT, MadePrompt, made_prompts
from outrider.data.sources import EvaluationText, load_prompts, shipped_sets
from outrider.target.hub import EMBEDDED_ID, load_tokenizer, resolve_model

FEW = 6_000
FIRST = """
from itertools import islice
from outrider.data.made_prompts import made_prompts
print(list(islice(made_prompts(), 90)))
"""


@pytest.fixture(scope="module")
def made() -> list[MadePrompt]:
    return list(islice(made_prompts(), FEW))


def check_distinct(prompts: list[MadePrompt]) -> None:
    """All are distinct, case and signs aside; there are many skeletons, none of which many share."""
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    words = {tuple(" ".join(re.findall(r"\w+", turn.lower())) for turn in prompt.turns) for prompt in prompts}
    assert len(words) > 0.999 * len(prompts) and len({prompt.turns for prompt in prompts}) == len(prompts)
    skeletons = Counter(prompt.skeleton for prompt in prompts)
    assert len(skeletons) > 400 and len(skeletons) > len(prompts) / 4
    assert skeletons.most_common(1)[0][1] < len(prompts) / 100


def test_they_are_distinct_and_have_many_skeletons(made: list[MadePrompt]) -> None:
    check_distinct(made)


@pytest.mark.slow
def test_there_are_sixty_thousand() -> None:
    prompts = list(made_prompts())
    assert len(prompts) == COUNT >= 60_000
    check_distinct(prompts)


def test_a_skeleton_has_no_words_of_lists(made: list[MadePrompt]) -> None:
    found = [prompt for prompt in made if "{city}" in prompt.skeleton]
    cities = set(grammar._grammar()["words"]["city"])
    assert found and all(not cities & set(re.findall(r"\w+", prompt.skeleton)) for prompt in found)
    assert all(cities & set(re.findall(r"\w+", " ".join(prompt.turns))) for prompt in found)


def test_the_first_are_the_same_whatever_the_limit_and_the_process() -> None:
    few, more = load_prompts("made_prompts", 40), load_prompts("made_prompts", 200)
    assert few == more[:40] and len(more) == 200
    there = {"PYTHONHASHSEED": "2", "PYTHONPATH": ":".join(sys.path)}
    elsewhere = subprocess.run([sys.executable, "-c", FIRST], env=there, capture_output=True, text=True, check=True)
    assert elsewhere.stdout == f"{list(islice(made_prompts(), 90))}\n"


def test_every_prefix_is_an_even_mixture_of_kinds(made: list[MadePrompt]) -> None:
    kinds = list(grammar._grammar()["kinds"])
    assert len(kinds) >= 12
    for size in (len(kinds), 100, 1000, FEW):
        counts = Counter(prompt.kind for prompt in made[:size])
        assert set(counts) == set(kinds) and max(counts.values()) - min(counts.values()) <= 1
    assert all(prompt.id.startswith(f"made-{prompt.kind}-") for prompt in made)


def test_they_are_conversations(made: list[MadePrompt]) -> None:
    for prompt in made:
        conversation = Conversation(prompt.id, prompt.turns)
        assert parse_row(row_of(conversation)) == conversation and prompt.id.endswith(content_id(prompt.turns, ())[:12])
        assert (len(prompt.turns) > 1) == (prompt.kind == "conversations") and len(prompt.turns) <= 3
        assert all(turn == turn.strip() for turn in prompt.turns) and len(set(prompt.turns)) == len(prompt.turns)
    several = Counter(len(prompt.turns) for prompt in made if prompt.kind == "conversations")
    assert min(several[2], several[3]) > 50


def test_fields_are_filled_and_every_list_is_used(made: list[MadePrompt]) -> None:
    lists = grammar._grammar()
    asked = re.findall(r"\{([A-Za-z_]+)(?:\.\d+)*\}", str(lists))
    names = {name[0].lower() + name[1:] for name in asked}
    assert names == {*lists["words"], *lists["wordings"]} and not set(lists["words"]) & set(lists["wordings"])
    for prompt in made:
        for turn in prompt.turns:
            assert not re.search(r"\{[\w.:/-]+\}", turn), turn
            assert not re.search(r"\b[Aa] [aeio]\w", turn) or "```" in turn, turn
            assert "```" in turn or not re.search(r"[^\n] {2}| [,;?]", turn), turn


def test_a_number_and_a_word_stand_for_one_thing_throughout_a_prompt() -> None:
    for seed in range(40):
        writer = grammar._Writer(random.Random(seed))

        def write(template: str, by: grammar._Writer = writer) -> str:
            return by.write(template)[0]

        twice, other, capital = write("{city}{a:3-9} {city}{a:3-9}|{city.2}|{Object}").split("|")
        first, second = twice.split()
        assert first == second and other != first[:-1] and capital[0].isupper()
        assert int(write("{b:20-40/5}")) in range(20, 41, 5) and 3 <= int(first[-1]) <= 9
        assert write("a {animal}") == ("an " if write("{animal}")[0] in "aeiou" else "a ") + write("{animal}")
        same, another = write("{name}|{order}"), write("{order.2}")
        assert same.partition("|")[0] in same.partition("|")[2] and write("{name.2}") in another


def test_openings_have_10_to_300_tokens(made: list[MadePrompt]) -> None:
    tokenizer = load_tokenizer(resolve_model(EMBEDDED_ID, weights=False))
    lengths = [len(tokenizer.encode(prompt.turns[0])) for prompt in made]
    assert min(lengths) >= 10 and max(lengths) <= 300
    assert max(lengths) > 100 and sum(lengths) > 25 * len(lengths), "not all of them are short"


def test_they_share_nothing_with_what_is_measured_with(made: list[MadePrompt]) -> None:
    """No 13 words with the shipped evaluations, nor words of the lists behind the cells' prompts."""
    evaluations = [name for name in shipped_sets() if name.startswith("eval_")]
    text = EvaluationText(evaluations)
    assert not any(text.shares("made", Conversation(prompt.id, prompt.turns)) for prompt in made)
    lists = (cells._PLACES, cells._THINGS, cells._FORMS, cells._SENTENCES, cells._LANGUAGES)
    names = [part for name in cells._NAMES for part in name.split()]
    theirs = {word.lower() for words in (*lists, names) for word in words}
    written = "\n".join(turn.lower() for prompt in made for turn in prompt.turns)
    assert [word for word in sorted(theirs) if re.search(rf"\b{re.escape(word)}\b", written)] == []

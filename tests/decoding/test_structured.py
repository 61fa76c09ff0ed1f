"""Structured output on toys and on the real SmolLM2: grammars, their states, hostile descriptions, random schemas."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from llguidance import LLParserLimits
from transformers import LlamaConfig

import outrider
import outrider.decoding.structured as structured_module
from outrider.api.model import Model
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.decoding.structured import GrammarCompiler, GrammarState, StructuredOutput, StructureError
from outrider.drafters.draft import Draft, Siblings, allowed_part
from outrider.drafters.ngram import NgramDrafter
from outrider.sampling import SamplingParams
from outrider.target.hub import EMBEDDED_ID
from outrider.target.model import Target
from tests.toys.schemas import Tally, check_schemas, decode, problem, random_schema
from tests.toys.targets import TOY, random_target, toy_target
from tests.toys.tokenizer import FALLBACK, TOKENIZER, ids


@pytest.fixture(scope="module")
def model(toy: Path) -> Model:
    """Its stop token is the tokenizer's own, where other tests' is a quotation mark."""
    loaded = outrider.load(toy / "target", str(toy / "drafter"))
    assert isinstance(loaded.target, Target)
    loaded.target.model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    return loaded


@pytest.fixture(scope="module")
def compiler(model: Model) -> GrammarCompiler:
    return model.grammars


def texts_of(state: GrammarState, drafts: list[int] | None = None) -> set[str]:
    """What may come next, as tokens' own spelling."""
    allowed_V = state.allowed(drafts or [])
    assert allowed_V is not None
    return set(TOKENIZER.convert_ids_to_tokens(allowed_V.nonzero()[:, 0].tolist()))


# ----------------------------------------------------------------------------
# Grammars and their states.
# ----------------------------------------------------------------------------


def test_what_may_come_next(compiler: GrammarCompiler) -> None:
    state = compiler.compile(StructuredOutput(regex="ab?c*")).start()
    assert texts_of(state) == {"a"}
    assert texts_of(state, ids("a")) == {"b", "c", "<|end|>"}
    assert texts_of(state, ids("abc")) == {"c", "<|end|>"}
    assert texts_of(state, ids("a")) == {"b", "c", "<|end|>"}
    end = TOKENIZER.eos_token_id
    assert state.allowed([*ids("a"), end]) is None and state.allowed(ids("x")) is None
    for token in ids("ab"):
        state.commit(token)
    assert texts_of(state) == {"c", "<|end|>"}
    with pytest.raises(StructureError, match="does not follow"):
        state.commit(ids("b")[0])
    state.commit(end)
    assert state.allowed() is None and state.allowed(ids("c")) is None


@pytest.mark.parametrize(
    ("wanted", "whole", "others"),
    [
        ({"choice": ["yes", "no", 'm"\n\u540d']}, ["yes", 'm"\n\u540d'], ["y", "maybe", "yesno"]),
        ({"grammar": 'root ::= "a" ("b" | "c")*'}, ["a", "abcb"], ["b", "ad"]),
        ({"grammar": 'start: "a" ("b" | "c")*'}, ["a", "abcb"], ["b", "ad"]),
        ({"choice": [f"c{i}" for i in range(5000)]}, ["c0", "c4999"], ["c", "c5000", ""]),
        ({"json": {"type": "integer"}}, ["-12"], ["1.5", "x", " 1"]),
        ({"json": {"const": 2**53 - 1}}, [str(2**53 - 1)], [str(2**53)]),
        ({"json": {"type": "integer", "minimum": 7, "maximum": 2**63 - 1}}, ["7", str(2**53 - 1)], ["6", str(2**53)]),
        ({"json": {"type": "integer", "minimum": -(2**63)}}, [str(1 - 2**53), "5"], [str(-(2**53))]),
        ({"json": {"enum": [{"maximum": 3}]}}, ['{"maximum": 3}'], [str(2**53 - 1)]),
        ({"json": {"type": "number", "multipleOf": 0.5}}, ["1.5", "-2000000"], ["1.25"]),
        ({"grammar": 'start: "a" %json {"const": 3}'}, ["a3"], ["3"]),
        (
            {"json": '{"const": {"a": [1]}}'},
            ['{"a":[1]}', '{"a": [1]}', '{\n  "a": [\n    1\n  ]\n}'],
            ['{  "a": [1]}'],
        ),
        ({"json": {"const": {"a": 1}}, "whitespace": ""}, ['{"a":1}'], ['{"a": 1}']),
        ({"json": {"const": {"a": 1}}, "whitespace": " {0,3}"}, ['{"a":1}', '{   "a":  1}'], ['{    "a":1}']),
    ],
)
def test_the_forms(compiler: GrammarCompiler, wanted: dict[str, Any], whole: list[str], others: list[str]) -> None:
    grammar = compiler.compile(StructuredOutput(**wanted))

    def fits(text: str) -> bool:
        allowed_V = grammar.start().allowed(ids(text))
        return allowed_V is not None and bool(allowed_V[TOKENIZER.eos_token_id])

    assert [fits(text) for text in whole] == [True] * len(whole)
    assert [fits(text) for text in others] == [False] * len(others)


def test_a_state_asked_in_any_order_is_a_fresh_one(compiler: GrammarCompiler) -> None:
    """Drafts are read and taken back, across commits."""
    chooser = random.Random(1)
    for _ in range(20):
        grammar = compiler.compile(StructuredOutput(json=random_schema(chooser)))
        state, said = grammar.start(), list[int]()
        while len(said) < 30:
            for _ in range(3):
                drafts: list[int] = []
                for _ in range(chooser.randrange(5)):
                    known = fresh_mask(grammar.start(), [*said, *drafts])
                    if known is None:
                        break
                    drafts.append(chooser.choice(known.nonzero()[:, 0].tolist()))
                mine, fresh = state.allowed(drafts), fresh_mask(grammar.start(), [*said, *drafts])
                assert (mine is None and fresh is None) or torch.equal(mine, fresh)  # type: ignore[arg-type]
            now = state.allowed()
            if now is None:
                break
            said.append(chooser.choice(now.nonzero()[:, 0].tolist()))
            state.commit(said[-1])


def fresh_mask(state: GrammarState, tokens: list[int]) -> torch.Tensor | None:
    for token in tokens:
        state.commit(token)
    return state.allowed()


def test_pieces_with_a_space_and_bytes() -> None:
    """A tokenizer of Llama 2's kind; the response is what its decoder makes of the tokens."""
    target = random_target(toy_config_of(len(FALLBACK)), "fallback")
    target.tokenizer = FALLBACK
    compiler = GrammarCompiler(target)
    for pattern in ("a a(1 a)*", "\u00e9\u540d?[a1]{3}"):
        grammar = compiler.compile(StructuredOutput(regex=pattern))
        for seed in range(5):
            said = generate(target, [257], None, SamplingParams(1.0, seed=seed), StopRules(60), grammar=grammar)
            text = said.text.removesuffix("<unk>")  # its stop token, which is not marked as a special one
            assert said.finish == "stop" and re.fullmatch(pattern, text), said


def toy_config_of(vocab: int) -> LlamaConfig:
    return LlamaConfig(**{**TOY, "vocab_size": vocab, "eos_token_id": 0, "num_hidden_layers": 2})


def test_chosen_nodes_that_may_not_come_are_left_out(compiler: GrammarCompiler) -> None:
    """With what is behind them, and with the confidences of the others; drawn nodes stay."""
    state = compiler.compile(StructuredOutput(regex="ab(c|d)")).start()
    a, b, c, d, x = (ids(letter)[0] for letter in "abcdx")
    tree = Draft([x, a, b, b, x, d, c], [-1, -1, 0, 1, 3, 3, 3], confidences=[0.5, 0.8, 0.5, 0.5, 1.0, 0.5, 0.5])
    part = allowed_part(tree, state)
    assert (part.tokens, part.parents) == ([a, b, d, c], [-1, 0, 1, 1])
    assert part.confidences == pytest.approx([0.4, 0.25, 0.5, 0.5])
    chain = Draft.chain([a, x, b], confidences=[0.9, 0.8, 0.7])
    assert allowed_part(chain, state) == Draft.chain([a], confidences=[0.9])
    drawn = Draft.chain([a, x, b], {-1: Siblings(lambda: torch.ones(3)), 0: Siblings(lambda: torch.ones(3))})
    assert allowed_part(drawn, state) is drawn


# ----------------------------------------------------------------------------
# Descriptions that are refused.
# ----------------------------------------------------------------------------


def chain_of_rules(count: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "a"'


WRONG: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {}, "one of json"),
    (lambda: {"regex": "a", "choice": ["a"]}, "one of json"),
    (lambda: {"regex": "a", "whitespace": ""}, "whitespace is about json"),
    (lambda: {"choice": []}, "at least one"),
    (lambda: {"choice": [1]}, "must be texts"),
    (lambda: {"json": "{"}, "not JSON"),
    (lambda: {"json": int}, "not a class of pydantic"),
    (lambda: {"json": {"type": "wizard"}}, "wizard"),
    (lambda: {"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    (lambda: {"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "nsatisfiable"),
    (lambda: {"json": {"allOf": [{"type": "string"}, {"type": "number"}]}}, "nsatisfiable"),
    (lambda: {"json": {"enum": []}}, "nsatisfiable"),
    (lambda: {"json": {"$ref": "#"}}, "rules never end"),
    (lambda: {"json": {"$ref": "#/$defs/missing"}}, "does not exist"),
    (lambda: {"json": "[" * 5000 + "]" * 5000}, "not JSON"),
    (lambda: {"json": '{"type": "array", "items": ' * 500 + "{}" + "}" * 500}, "recursion"),
    (lambda: {"json": {"enum": [f"value {i}" for i in range(20_000)]}}, "characters"),
    (
        lambda: {
            "json": {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)}, "$ref": "#/$defs/d0"}
        },
        "references",
    ),
    (lambda: {"regex": "(a"}, "unclosed group"),
    (lambda: {"regex": r"[^\s\S]"}, "nothing satisfies"),
    (lambda: {"regex": r"a(?=b)"}, "look-around"),
    (lambda: {"regex": "(" * 20_000 + "a" + ")" * 20_000}, "invalid regex"),
    (lambda: {"regex": "a" * 200_000}, "characters"),
    (lambda: {"grammar": "start: start"}, "rules never end"),
    (lambda: {"grammar": "start: missing"}, "missing"),
    (lambda: {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "cannot be read"),
    (lambda: {"grammar": chain_of_rules(5000)}, "rules"),
    (lambda: {"json": {"const": 2**53 + 1}}, "9007199254740993 cannot be followed exactly"),
    (lambda: {"json": {"minimum": 2**53}}, "9007199254740992 cannot be followed exactly"),
    (lambda: {"json": {"enum": [{"maximum": 2**60}]}}, "1152921504606846976 cannot be followed exactly"),
    (lambda: {"json": {"type": "integer", "minimum": 10**30, "maximum": 1e300}}, "cannot be followed exactly"),
    (lambda: {"json": {"anyOf": [{"enum": [{"a": [-(2**63)]}]}]}}, "-9223372036854775808 cannot be followed exactly"),
    (lambda: {"json": '{"const": NaN}'}, "nan cannot be followed"),
    (lambda: {"grammar": 'start: "a" | %json {"const": -9223372036854775808}'}, "cannot be followed exactly"),
    (lambda: {"grammar": "start: %json {"}, "no JSON follows"),
    (lambda: {"json": {"type": "number", "multipleOf": 9_999_991}}, "remainders"),
    (lambda: {"json": {"allOf": [{"multipleOf": step, "type": "integer"} for step in (97, 89, 8.3)]}}, "remainders"),
    (
        lambda: {
            "json": json.dumps({f"d{i}": {"$ref": f"#/d{i + 1}"} for i in range(1500)}).replace("$ref", "\\u0024ref")
        },
        "references",
    ),
]


@pytest.mark.parametrize(("describe", "reason"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_followed_is_refused(
    compiler: GrammarCompiler, describe: Callable[[], dict[str, Any]], reason: str
) -> None:
    started = time.process_time()
    with pytest.raises(StructureError, match=reason):
        compiler.compile(StructuredOutput(**describe()))
    assert time.process_time() - started < 20, "of a processor, however long this process had to wait for one"


def test_the_most_that_is_read(compiler: GrammarCompiler) -> None:
    """Chains of rules and references follow each other by recursion: the bound is far from where the process ends."""
    state = compiler.compile(StructuredOutput(grammar=chain_of_rules(990))).start()
    assert texts_of(state) == {"a"}
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(990)} | {"d990": {"type": "null"}}
    schema = {"$defs": definitions, "$ref": "#/$defs/d0"}
    assert texts_of(compiler.compile(StructuredOutput(json=schema)).start()) == {"n"}


def test_a_target_without_stop_or_tokenizer() -> None:
    target = toy_target()
    assert target.eos_ids and target.tokenizer is None
    with pytest.raises(StructureError, match="fast tokenizer"):
        GrammarCompiler(target).compile(StructuredOutput(regex="a"))
    target.model.generation_config.eos_token_id = target.config.eos_token_id = None
    with pytest.raises(StructureError, match="no stop token"):
        GrammarCompiler(target).compile(StructuredOutput(regex="a"))


# ----------------------------------------------------------------------------
# Decoding.
# ----------------------------------------------------------------------------


class Town(pydantic.BaseModel):
    kind: bool
    size: int = pydantic.Field(ge=0, le=99)


def test_keywords_of_generate(model: Model) -> None:
    """One prompt or several, streamed or not; a pydantic class, and what else there is."""
    town = Town.model_validate_json(model.generate("a town", json_schema=Town, max_new_tokens=100).text)
    assert 0 <= town.size <= 99
    many = model.generate(["a", "b", "c"], regex="[xyz]{4}", temperature=1.0, seed=3)
    assert all(re.fullmatch("[xyz]{4}", one.text) and one.finish == "stop" for one in many)
    pieces = [chunk.text for chunk in model.stream("a", choice=["left", "right"], seed=1, temperature=1)]
    assert "".join(pieces) in ("left", "right")
    assert re.fullmatch("(ab)+", model.generate("a", grammar='root ::= "ab" | "ab" root', seed=2, temperature=1).text)
    with pytest.raises(StructureError, match="one of json"):
        model.generate("a", regex="a", choice=["a"])


def test_everything_that_goes_with_it(model: Model) -> None:
    """Penalties, coupled sampling, log-probabilities, stop strings, a cut, a stop that rules leave out, copies."""
    target = model.target
    grammar = model.grammars.compile(StructuredOutput(regex="[ab]{8}"))
    harsh = SamplingParams(1.0, seed=1, repetition_penalty=1.5, presence_penalty=1, frequency_penalty=1, min_p=0.2)
    requests = [
        Request("penalties", ids("ab"), harsh, grammar=grammar),
        Request("logprobs", ids("ab"), grammar=grammar, logprobs=2),
        Request("cut", ids("ab"), rules=StopRules(5), grammar=grammar),
        Request("no stops", ids("ab"), rules=StopRules(40, ()), grammar=grammar),
        Request("top_k", ids("ab"), SamplingParams(1.0, seed=2, top_k=2, top_p=0.9), grammar=grammar),
        Request("free", ids("ab"), rules=StopRules(9, ())),
    ]
    assert isinstance(target, Target) and model.drafter is not None
    said = decode(Engine(target, model.drafter.drafter), requests, Tally())
    assert {name: one.finish for name, one in said.items()} == {
        name: "length" if name in ("cut", "free") else "stop" for name in said
    }
    assert re.fullmatch("[ab]{5}", said["cut"].text)
    assert all(re.fullmatch("[ab]{8}", one.text) for name, one in said.items() if name not in ("cut", "free"))
    assert said["free"].tokens == generate(target, ids("ab"), rules=StopRules(9, ())).tokens
    alone = [
        generate(target, ids("ab"), drafter, SamplingParams(1.0, seed=4, coupled=True), grammar=grammar).tokens
        for drafter in (None, model.drafter.drafter, NgramDrafter())
    ]
    assert alone[0] == alone[1] == alone[2]
    stopped = generate(target, ids("ab"), rules=StopRules(stop_strings=["a", "b"]), grammar=grammar)
    assert stopped.finish == "stop" and stopped.text == ""


def test_too_much_work_ends_one_request(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows while the expression is matched, not when it is compiled."""
    assert isinstance(model.target, Target) and model.drafter is not None
    monkeypatch.setattr(structured_module, "_LIMITS", LLParserLimits(max_lexer_states=40))
    grammar = model.grammars.compile(StructuredOutput(regex="[ab]*a[ab]{60}"))
    engine = Engine(model.target, model.drafter.drafter)
    engine.submit(Request("much", ids("a"), SamplingParams(1.0, seed=1), rules=StopRules(200), grammar=grammar))
    engine.submit(Request("free", ids("ab"), rules=StopRules(20, ())))
    last = {}
    while not engine.idle:
        last |= {output.id: output for output in engine.step()}
    error = last["much"].error
    assert last["much"].finish == "error" and error is not None
    assert isinstance(error, StructureError) or isinstance(error.__cause__, StructureError)
    assert last["free"].finish == "length"


SMALL = EngineConfig(max_requests=16, num_blocks=400)


def toy_schemas(model: Model, count: int, seed: int) -> Tally:
    assert isinstance(model.target, Target) and model.drafter is not None
    prompts = [ids(text) for text in ("ab", "a town:", "x", '{"id": 1, "name": "b"}')]
    return check_schemas(
        model.target, model.drafter.drafter, prompts, count=count, seed=seed, longest=200, config=SMALL
    )


def test_random_schemas(model: Model) -> None:
    tally = toy_schemas(model, 24, seed=0)
    assert tally.accepted and tally.cut < tally.responses / 10


@pytest.mark.soak
def test_ten_thousand_random_schemas(model: Model) -> None:
    started = time.monotonic()
    tally = toy_schemas(model, 10_000, seed=1)
    print(f"\n{tally}; {time.monotonic() - started:.0f} s")
    assert tally.accepted and tally.cut < tally.responses / 20


def real_schemas(count: int, seed: int) -> Tally:
    model = outrider.load(EMBEDDED_ID)
    assert isinstance(model.target, Target) and model.drafter is not None
    asked = ["Describe a town.", "Give me some data about a river.", "Answer in JSON.", "Invent a person."]
    prompts = [list(model._request(text).prompt) for text in asked]
    return check_schemas(
        model.target, model.drafter.drafter, prompts, count=count, seed=seed, longest=250, config=EngineConfig(8)
    )


def test_random_schemas_on_the_real_model() -> None:
    tally = real_schemas(3, seed=0)
    assert tally.accepted


@pytest.mark.soak
def test_three_hundred_random_schemas_on_the_real_model() -> None:
    started = time.monotonic()
    tally = real_schemas(300, seed=1)
    print(f"\n{tally}; {time.monotonic() - started:.0f} s")
    assert tally.accepted and tally.cut < tally.responses / 20


def test_a_document_that_does_not_follow_is_noticed() -> None:
    assert problem({"type": "integer"}, "1") is None
    assert problem({"type": "integer"}, '"1"') and problem({"type": "integer"}, "1,") and problem({}, "")

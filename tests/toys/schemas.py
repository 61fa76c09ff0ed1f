"""Random JSON schemas whose documents are short, and many requests decoded under them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jsonschema
import torch
from torch import Tensor

from outrider.decoding.engine import Engine
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.decoding.structured import Grammar, GrammarCompiler, StructuredOutput
from outrider.drafters.base import Drafter
from outrider.evaluation.evaluate import compare_by
from outrider.sampling import SamplingParams, constrained
from outrider.target.model import Target

Schema = dict[str, Any]
_WORDS = ["id", "name", "kind", "at", "ok", "n", "x y", "größe", 'a"b', "名"]
_PATTERNS = ["^[a-c]{1,4}$", "^(ab|ba)+c?$", "^[0-9]{2}-[0-9]{2}$", "^[^a-z]{1,3}$"]


def random_schema(chooser: random.Random, depth: int = 2) -> Schema:
    """Every document of it is short: lengths, counts and digits are bounded."""
    definitions = {word: _node(chooser, 1, []) for word in chooser.sample(["T", "U"], chooser.randrange(3))}
    schema = _node(chooser, depth, list(definitions))
    return {**schema, "$defs": definitions} if definitions else schema


def _node(chooser: random.Random, depth: int, names: list[str]) -> Schema:
    leaves = ["null", "boolean", "integer", "number", "string", "pattern", "enum", "const"]
    inner = ["object", "object", "object", "array", "anyOf", "tuple"]
    kind = chooser.choice(inner * 2 + leaves if depth else leaves)
    if names and chooser.random() < 0.2:
        return {"$ref": f"#/$defs/{chooser.choice(names)}"}
    below = partial(_node, chooser, depth - 1, names)
    if kind in ("null", "boolean"):
        return {"type": kind}
    if kind == "integer":
        low = chooser.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + chooser.randrange(500)}
    if kind == "number":
        return {"type": "number", "multipleOf": chooser.choice([0.5, 0.25, 2]), "minimum": -20, "maximum": 20}
    if kind == "string":
        shortest = chooser.randrange(3)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + chooser.randrange(6)}
    if kind == "pattern":
        return {"type": "string", "pattern": chooser.choice(_PATTERNS), "maxLength": 6}
    if kind == "enum":
        return {"enum": chooser.sample([*_WORDS, 1, -2.5, None, True, [1, "b"], {"k": 0}], chooser.randint(1, 4))}
    if kind == "const":
        return {"const": chooser.choice([*_WORDS, 0, False, None])}
    if kind == "anyOf":
        return {"anyOf": [below() for _ in range(chooser.randint(1, 3))]}
    if kind == "array":
        fewest = chooser.randrange(3)
        return {"type": "array", "items": below(), "minItems": fewest, "maxItems": fewest + chooser.randrange(3)}
    if kind == "tuple":
        items = [below() for _ in range(chooser.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    keys = chooser.sample(_WORDS, chooser.randint(1, 4))
    return {
        "type": "object",
        "properties": {key: below() for key in keys},
        "required": chooser.sample(keys, chooser.randint(0, len(keys))),
        "additionalProperties": False,
    }


def problem(schema: Schema, text: str) -> str | None:
    """What is wrong with a document; None: nothing."""
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


@dataclass
class Tally:
    """Of many schemas: unsatisfiable ones, responses that were cut by their length, and their drafts."""

    responses: int = 0
    unsatisfiable: int = 0
    cut: int = 0
    ties: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{value} {name}" for name, value in vars(self).items())


@dataclass
class Said:
    """A response."""

    tokens: list[int]
    text: str = ""
    finish: str | None = None


def decode(engine: Engine, requests: Sequence[Request], tally: Tally) -> dict[str, Said]:
    """Run an engine until it is idle."""
    said = {request.id: Said([]) for request in requests}
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            one = said[output.id]
            one.tokens += output.tokens
            one.text += output.text
            one.finish = output.finish
            tally.verified, tally.accepted = tally.verified + output.verified, tally.accepted + output.accepted
    return said


@torch.inference_mode()
def masked_logits(target: Target, grammar: Grammar, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Of the token behind `tokens`, which begin with the prompt."""
    state = grammar.start()
    for token in tokens[len(prompt) :]:
        state.commit(token)
    logits = target.forward(torch.tensor([list(tokens)]), target.new_cache(len(tokens)), logits=1).logits_BTV
    assert logits is not None
    return constrained(logits[0, -1].float(), state.allowed())


def check_schemas(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    count: int,
    seed: int,
    longest: int,
    config: EngineConfig,
) -> Tally:
    """Decode under random schemas with drafts, at temperatures 0 and 1, and plainly at 0, beside free requests.

    Raises:
        AssertionError: a whole response does not follow its schema, or a greedy one is not plain decoding's.
    """
    chooser, compiler, tally = random.Random(seed), GrammarCompiler(target), Tally()
    todo: list[tuple[Schema, Grammar]] = []
    while len(todo) < count:
        schema = random_schema(chooser)
        try:
            todo.append((schema, compiler.compile(StructuredOutput(json=schema))))
        except ValueError as error:
            assert "nsatisfiable" in str(error), (schema, error)
            tally.unsatisfiable += 1
    drafting, plain = Engine(target, drafter, config=config), Engine(target, config=config)
    rules, group = StopRules(longest), 4 * config.max_requests
    for first in range(0, count, group):
        greedy: list[Request] = []
        sampled: list[Request] = []
        for number, (_, grammar) in enumerate(todo[first : first + group], first):
            prompt = prompts[number % len(prompts)]
            greedy.append(Request(f"g{number}", prompt, rules=rules, grammar=grammar))
            sampled.append(
                Request(f"s{number}", prompt, SamplingParams(1.0, seed=number), rules=rules, grammar=grammar)
            )
        free = [Request(f"f{first}-{i}", prompts[i], rules=StopRules(8)) for i in range(min(4, len(prompts)))]
        mixed = [one for pair in zip(greedy, sampled, strict=True) for one in pair]
        said, alone = decode(drafting, [*free, *mixed], tally), decode(plain, greedy, Tally())
        for number, request in enumerate(greedy, first):
            schema, grammar = todo[number]
            for id in (request.id, f"s{number}"):
                tally.responses += 1
                tally.tokens += len(said[id].tokens)
                if said[id].finish == "length":
                    tally.cut += 1
                else:
                    assert (wrong := problem(schema, said[id].text)) is None, (schema, said[id].text, wrong)
            mine, theirs = said[request.id], alone[request.id]
            if mine.text != theirs.text:
                logits = partial(masked_logits, target, grammar, request.prompt)
                verdict = compare_by(logits, request.prompt, theirs.tokens, other=mine.tokens)
                assert verdict == "tie", (schema, mine, theirs)
                tally.ties += 1
    return tally

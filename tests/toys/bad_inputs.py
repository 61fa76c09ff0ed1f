"""Bad inputs of the command line, made from small tables: options x values, files x damage, fields x wrong values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import typer

from outrider.cli.main import app

Spoil = Callable[[Path], None]


class Case(NamedTuple):
    """One bad input: how files of a copy of the toy directory are spoilt, and the command that meets it.

    `args`: {here} is that directory. `named`: what the message must contain, case and the kind of dash left aside.
    `statuses`: exit statuses that are documented for it.
    """

    name: str
    args: tuple[str, ...]
    named: str
    spoil: Spoil | None = None
    statuses: tuple[int, ...] = (2,)


TARGET = "--target {here}/target"
VERBS = {  # a complete command each, which option cases add a bad option to
    "generate": f"generate hello {TARGET} --drafter none --max-new-tokens 2",
    "package": "package {here}/drafter --out out",
    "demo": "demo --out out",
    "prepare": f"prepare {TARGET} --prompts {{here}}/prompts.jsonl --out out.jsonl --max-new-tokens 2 "
    "--max-prompt-tokens 99",
    "inspect": f"inspect {{here}}/responses.jsonl {TARGET}",
    "eval": f"eval {TARGET} --drafter ngram --tasks {{here}}/prompts.jsonl --out out --max-new-tokens 2",
    "doctor": f"doctor --quick {TARGET}",
    "calibrate": f"calibrate {TARGET} --drafter {{here}}/drafter --tasks {{here}}/prompts.jsonl --max-new-tokens 2",
    "profile": f"profile {TARGET} --drafter none --out out.json --repeats 1 --contexts 8 --max-tokens 1 "
    "--max-requests 1",
    "bench-drafters": f"bench-drafters ngram {TARGET} --repeats 3 --context 8",
    "bench": f"bench {TARGET} --drafter ngram --tasks {{here}}/prompts.jsonl --out out --concurrency 1",
    "simulate": "simulate --traces {here}/traces.npz --profile {here}/profile.json --out out --concurrency 1",
}


# ----------------------------------------------------------------------------
# Options: every number that a verb takes x what is no such number.
# ----------------------------------------------------------------------------

_INTEGERS = {"word": "x", "empty": "", "fraction": "1.5", "nan": "nan", "huge": "9" * 30}
_FLOATS = {"word": "x", "empty": "", "nan": "nan", "infinite": "inf", "minus infinite": "-inf", "negative": "-1"}


def option_cases() -> Iterator[Case]:
    group: Any = typer.main.get_command(app)
    for verb in group.listed:
        if verb.name not in VERBS:
            continue
        for param in verb.load().params:
            kind = param.type_descriptor.annotation
            if kind not in (int, float):
                continue
            values = dict(_INTEGERS if kind is int else _FLOATS)
            least = getattr(param, "min", None)
            if kind is int and least is not None:
                values["below"] = str(least - 1)
            name = max(param.opts, key=len)
            for what, value in values.items():
                args = *VERBS[verb.name].split(), f"{name}={value}"
                yield Case(f"{verb.name} {name}: {what}", args, name.removeprefix("--"))


_TEXTS = {  # options whose text holds more than a word
    ("generate", "--tree"): ("", "x", "0", "-1", "1,depth", "4,depth=x", "9" * 30, "4,depth=-1", "4,top_k=0", "4,a=1"),
    ("eval", "--tree"): ("x", "nan", "4,depth=0"),
    ("generate", "--typical"): ("", "x", "1", "0,0", "nan,nan", "2,2", "0.1,0.1,0.1", "-1,0.3", "inf,0.1"),
    ("profile", "--contexts"): ("", "x", "0", "-1", "nan", "inf", "1.5", "64,", "9" * 30),
    ("bench", "--concurrency"): ("", "x", "0", "-1", "nan", "inf", "1.5", "1,", "9" * 30),
    ("simulate", "--concurrency"): ("", "x", "0", "-1", "nan", "inf", "1.5"),
    ("simulate", "--rates"): ("", "x", "0", "-1", "nan", "inf"),
    ("bench", "--variants"): ("", "x", ",", "fixed-", "fixed--1", "fixed-x"),
    ("simulate", "--variants"): ("", "x", "fixed-x"),
    ("bench", "--backend"): ("", "x"),
    ("simulate", "--routing"): ("", "x"),
    ("bench-drafters", "--tree"): ("x", "ngram=", "ngram=x", "other=4"),
    ("bench-drafters", "--block-size"): ("x", "ngram=", "ngram=0", "ngram=-1", "ngram=nan"),
    ("generate", "--device"): ("", "x", "cuda:99", "meta", "mps", "xpu", "vulkan", "privateuseone"),
    ("eval", "--device"): ("x", "meta", "cuda:-1"),
    ("prepare", "--device"): ("x", "meta"),
    ("package", "--dtype"): ("", "x", "int8"),
    ("generate", "--drafter"): ("", "x", "ngram@", "ngram@x", "ngram@0", "ngram@-1", "lm:", "lm:@3", "/dev/null", "@"),
    ("eval", "--drafter"): ("", "x", "none", "ngram@nan", f"ngram@{'9' * 30}"),
    ("eval", "--tasks"): ("", ",", "x", "/", "/dev/null", "hf:", "hf:x", "a/b", "\x1b[31mred"),
    ("eval", "--out"): ("/dev/null/x", "{here}/prompts.jsonl", "/proc/x"),
}
_URLS = (
    "", "x", "http://", "http://127.0.0.1:99999", "http://127.0.0.1:x", "http://[::1", "ftp://127.0.0.1", "://", "http://:80",
    "http://127.0.0.1:-1", "http://a b", "http://127.0.0.1:1?x=1", "http://127.0.0.1:1",
)  # fmt: skip


_NAMED = {"--variants": "variant", "--tasks": "", "--out": ""}  # what the message names in place of the option


def text_cases() -> Iterator[Case]:
    for (verb, option), values in _TEXTS.items():
        for value in values:
            args = *VERBS[verb].split(), f"{option}={value}"
            yield Case(f"{verb} {option}: {value[:20]!r}", args, _NAMED.get(option, option.removeprefix("--")))
    for url in _URLS:
        for verb, more in (("prepare", "--retries 0 --timeout 2"), ("bench", "--backend vllm")):
            args = *VERBS[verb].split(), *more.split(), f"--base-url={url}"
            yield Case(f"{verb} --base-url: {url!r}", args, "", statuses=(1, 2))


_OF_PATHS = ("export", "inspect", "package", "train", "experiment", "runs", "compare", "report", "bench-table", "push")
_TARGETS = ("", "/", "/dev/null", "a/b/c", "x" * 300, "\x1b[31mred", "a b", "\udcff", "{here}", "{here}/prompts.jsonl")


def name_cases() -> Iterator[Case]:
    for target in _TARGETS:
        for verb in ("generate hi", "init --out out", "doctor"):
            yield Case(f"{verb} --target {target[:20]!r}", (*verb.split(), f"--target={target}"), "")
    for path in ("", "/", "/dev/null", "x" * 300, "\x1b[31mred", "\udcff", "{here}", "{here}/prompts.jsonl"):
        for verb in _OF_PATHS:
            more = {"package": ("--out", "out"), "push": ("a/b",)}.get(verb, ())
            statuses = (0, 2) if verb == "runs" or (verb, path) == ("inspect", "{here}/prompts.jsonl") else (2,)
            yield Case(f"{verb} {path[:20]!r}", (verb, path, *more), "", statuses=statuses)
    for prompt in ("", " ", "\n", "\udcff"):
        args = "generate", prompt, *VERBS["generate"].split()[2:]
        yield Case(f"generate {prompt!r}", args, "prompt")


# ----------------------------------------------------------------------------
# Files: every file that a verb reads x damage.
# ----------------------------------------------------------------------------


def _replace(content: bytes) -> Spoil:
    def spoil(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return spoil


def _special(make: Callable[[Path], object]) -> Spoil:
    def spoil(path: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return spoil


def _truncate(path: Path) -> None:
    content = path.read_bytes()
    _replace(content[: len(content) * 2 // 3])(path)


DAMAGE: Mapping[str, Spoil] = {
    "missing": Path.unlink,
    "a directory": _special(Path.mkdir),
    "a pipe": _special(os.mkfifo),
    "a link to itself": _special(lambda path: path.symlink_to(path.name)),
    "cut off": _truncate,
    "empty": _replace(b""),
    "not UTF-8": _replace(b'{"turns": "\xff\xfe"'),
    "a list in a list in a list": _replace(b"[" * 100_000),
    "a closed list in a list in a list": _replace(b"[" * 3000 + b"]" * 3000),
    "a number of 6000 digits": _replace(b"1" * 6000),
    "null": _replace(b"null"),
    "a list": _replace(b"[1, 2]"),
    "an unknown field": _replace(b'{"qwertz": 1}'),
    "escape codes": _replace(b"\x1b]0;title\x07\x1b[31m"),
    "a long line": _replace(b"x" * 3_000_000),
}

_READERS = (  # file, what must be named, commands that read it; a verb alone is its line of VERBS
    (
        "prompts.jsonl",
        "prompts.jsonl",
        ("eval", "prepare", f"init {TARGET} --prompts {{here}}/prompts.jsonl --out out"),
    ),
    ("recipe.yaml", "recipe.yaml", ("train {here}/recipe.yaml", "prepare --recipe {here}/recipe.yaml")),
    ("table.yaml", "table.yaml", ("experiment {here}/table.yaml --dry-run",)),
    ("options.yaml", "options.yaml", ("eval --config {here}/options.yaml",)),
    ("responses.jsonl", "responses.jsonl", ("inspect",)),
    ("drafter/outrider.json", "outrider.json", ("inspect {here}/drafter", "package")),
    ("drafter/config.json", "config.json", ("inspect {here}/drafter", "calibrate")),
    ("drafter/model.safetensors", "model.safetensors", ("inspect {here}/drafter",)),
    ("eval/results.json", "results.json", ("compare {here}/eval", "package --results {here}/eval/results.json")),
    ("costs.json", "costs.json", ("compare {here}/eval --draft-cost {here}/costs.json",)),
    ("profile.json", "profile.json", ("simulate",)),
    ("traces.npz", "traces.npz", ("simulate",)),
    ("rounds.npz", "rounds.npz", ("calibrate --rounds {here}/rounds.npz",)),
    ("bench/frontier.json", "frontier.json", ("bench-table {here}/bench",)),
    ("bench/settings.json", "settings.json", ("bench --out {here}/bench",)),
    ("runs/one/state/state.json", "", ("runs {here}/runs",)),
    ("runs/one/metrics.jsonl", "", ("runs {here}/runs",)),
    ("runs/one/drafter/outrider.json", "", ("runs {here}/runs",)),
    ("runs/one/results.json", "", ("runs {here}/runs",)),
    ("target/config.json", "config.json", ("generate",)),
    ("target/tokenizer.json", "", ("generate",)),
)
_FINE = {  # a drafter of another maker has no outrider.json; what is missing is collected or begun anew
    ("drafter/outrider.json", "missing"),
    ("responses.jsonl", "cut off"),
    ("rounds.npz", "a link to itself"),
    ("bench/settings.json", "a link to itself"),
    ("rounds.npz", "missing"),
    ("bench/settings.json", "missing"),
    ("bench/settings.json", "an unknown field"),
}


def complete(command: str) -> tuple[str, ...]:
    """The words of a command; of `VERB --option ...`, those of its line in VERBS before the options."""
    verb, *rest = command.split()
    whole = not rest or rest[0].startswith("--")
    return (*VERBS[verb].split(), *rest) if whole and verb in VERBS else (verb, *rest)


def damage_cases() -> Iterator[Case]:
    for file, named, commands in _READERS:
        for command in commands:
            for what, spoil in DAMAGE.items():
                if (file, what) in _FINE:
                    continue
                # A list of trainings leaves out what cannot be read; transformers has other files for a tokenizer.
                statuses = (0, 2) if file.startswith("runs/") or file == "target/tokenizer.json" else (2,)
                args = complete(command)
                yield Case(f"{args[0]}, {file} is {what}", args, named, partial(_spoil, file, spoil), statuses)


def _spoil(file: str, spoil: Spoil, here: Path) -> None:
    spoil(here / file)


# ----------------------------------------------------------------------------
# Fields: what a valid file says x values of the wrong kind.
# ----------------------------------------------------------------------------

_NAN, _INF, _HUGE = float("nan"), float("inf"), 10**400
_NUMBERS = (None, "0.5", "x", [], {}, _NAN, _INF, -_INF, True)
_COUNTS = (*_NUMBERS, -1, 1.5, _HUGE)
_LISTS = (None, "x", 1, {}, [None], ["x"], [[1]], [_NAN], [_INF])
_TOKENS = (None, "x", 5, {}, [-1], [10**30], [1.5], [1.0], [None], [True], ["5"], [[5]], [10**6])
# {file: (command, ((field by its dotted name, values), ...))}
_FIELDS: dict[str, tuple[str, tuple[tuple[str, tuple[Any, ...]], ...]]] = {
    "drafter/outrider.json": (
        f"eval {TARGET} --drafter {{here}}/drafter --tasks {{here}}/prompts.jsonl --out out --max-new-tokens 2",
        (
            ("calibration", (None, "x", 1, [], [1])),
            ("calibration.temperatures", (*_LISTS, [], [0.0] * 5, [-1.0] * 5, [1.0])),
            ("calibration.offsets", (*_LISTS, [], [1.0])),
            ("calibration.estimator", ("x", [], {"weights": [_NAN], "biases": []})),
            ("candidates", (None, "x", [], {"accuracy": "x"}, {"accuracy": [[_NAN]]})),
            ("recommended", ("x", [], 1, {"confidence_threshold": "0.5"}, {"confidence_threshold": _NAN})),
            ("recommended.confidence_threshold", (2, -1, _INF, [], {}, True, "x")),
            ("target", (1, [], {}, True)),
            ("step", ("x", -1, 1.5, [], _NAN, True)),
            ("history", ("x", 1, {}, [1], ["x"])),
            ("recipe", ("x", 1, [])),
            ("format", _COUNTS),
        ),
    ),
    "drafter/config.json": (
        "inspect {here}/drafter",
        tuple(
            (name, (None, "x", "8", [], {}, -1, 0, 1.5, _NAN, _INF, True, 10**30))
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        ),
    ),
    "responses.jsonl": (
        VERBS["inspect"],
        (
            ("1.prompt", (*_TOKENS, [])),
            ("1.response", _TOKENS),
            ("1.id", (None, 1, [], {}, True)),
            ("1.turn", (None, "x", -1, 1.5, [], True)),
            ("1.finished", (None, "x", 1, [])),
            ("1.exact", (None, "x", 1, [])),
            ("1.unknown", (1,)),
            ("0.format", _COUNTS),
            ("0.settings", (None, "x", 1, [], [1])),
        ),
    ),
    "eval/results.json": (
        "compare {here}/eval",
        (
            ("tasks", (None, "x", 1, [], {}, [1])),
            ("tasks.0.tokens_per_second", (None, "x", [], {}, _NAN, _INF, -1, 0)),
            ("tasks.0.accepted_length", (None, "x", [], _NAN, _INF, -1)),
            ("tasks.0.acceptance_histogram", (None, "x", [None], ["x"], [-1, 2], [_NAN])),
            ("tasks.0.speedup_quartiles", (None, "x", [1], [1, 2, 3, 4], [_NAN, 1, 2])),
            ("settings", (None, "x", 1, [])),
            ("settings.sampling", ("x", 1, [1])),
            ("machine", (None, "x", [])),
            ("drafter", (None, "x", [], {})),
            ("drafter.gamma", (None, "x", -1, 1.5, _HUGE)),
        ),
    ),
    "profile.json": (
        VERBS["simulate"],
        (
            ("cells", (None, "x", [], [1], {})),
            ("cells.0.median", (None, "x", [], -1, 0, _NAN, _INF)),
            ("cells.0.requests", (None, "x", [], -1, 0, 1.5, _NAN, 10**30)),
            ("cells.0.tokens", (None, "x", [], -1, 0, 1.5, _NAN, 10**30)),
            ("fit.bias", (None, "x", [], _NAN, _INF)),
            ("other.seconds", (None, "x", [], [1], [[1, 2]], [["x", 1, 2]])),
            ("other.requests", (None, "x", [], [-1], [1.5], [3, 2])),
            ("gamma", (None, "x", [], -1, 1.5, _NAN)),
            ("format", (None, 1, "x", [])),
        ),
    ),
    "bench/frontier.json": (
        "bench-table {here}/bench",
        (
            ("points", (None, "x", 1, {}, [1])),
            ("points.0.quartiles", (None, "x", {}, {"tokens_per_second": ["x"]}, {"tokens_per_second": None})),
            ("points.0.level", (None, "x", [], _NAN, _INF)),
            ("settings", (None, "x", [])),
        ),
    ),
}


def _set(content: Any, names: list[str], value: Any) -> None:
    for name in names[:-1]:
        content = content[int(name)] if isinstance(content, list) else content.setdefault(name, {})
    content[int(names[-1]) if isinstance(content, list) else names[-1]] = value


def _set_field(file: str, field: str, value: Any, here: Path) -> None:
    path = here / file
    lines = path.suffix == ".jsonl"
    content = [*map(json.loads, path.read_text().splitlines())] if lines else json.loads(path.read_text())
    _set(content, field.split("."), value)
    texts = map(json.dumps, content) if lines else [json.dumps(content)]
    # Python writes an integer of any length; an exponent that overflows is what other tools write.
    path.write_text("".join(f"{text}\n" for text in texts))


def field_cases() -> Iterator[Case]:
    for file, (command, fields) in _FIELDS.items():
        for field, values in fields:
            for value in values:
                spoil = partial(_set_field, file, field, value)
                # Serving names the part of a calibration that does not fit the drafter.
                named = field.rpartition(".")[2] if field.startswith("calibration.") else Path(file).name
                yield Case(f"{Path(file).name}, {field} is {value!r:.24}", tuple(command.split()), named, spoil)


# ----------------------------------------------------------------------------
# Recipes, tables of experiments and options files: YAML.
# ----------------------------------------------------------------------------

_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
_YAML = {
    "aliases of aliases": _BOMB,
    "aliases of aliases in a field": _BOMB + "data: *i\ntarget: *i\nout: *i\n",
    "an alias of itself": "target: &a [*a]\nout: *a\n",
    "a mapping of itself": "&a\ntarget: *a\nout: x\ndata: *a\n",
    "a python object": "target: !!python/object/apply:os.system ['true']\n",
    "two documents": "target: a\n---\ntarget: b\n",
    "a tab": "target:\tx\n\tout: y\n",
    "an unknown alias": "target: *x\n",
    "a key twice": "target: a\ntarget: b\nout: x\ndata: {prompts: []}\n",
    "keys of numbers": "1: 2\nnull: 3\n",
    "a key that is a list": "? [1, 2]\n: 3\n",
    "deep": "[" * 20_000,
    "deep and closed": "x: " + "[" * 900 + "]" * 900,
    "escape codes in a key": '"\\e]0;x\\a\\e[31m": 1\n',
    "a NUL in a path": "rows: {a: {}}\n"
    'target: "a\\0"\nout: "\\0"\nrecipe: "\\0"\ntasks: ["\\0"]\ndata: {responses: "\\0"}\n',
}
_OVERRIDES = {
    "optimizer.learning_rate": (".nan", ".inf", "-1", "0", "x", "null", "[]", "{}", "1e400", "true"),
    "optimizer.steps": (".nan", ".inf", "-1", "0", "1.5", "x", "null", "[]"),
    "optimizer.warmup_fraction": (".nan", ".inf", "-1", "1", "x"),
    "optimizer.weight_decay": (".nan", ".inf", "-1", "x"),
    "data.temperature": (".nan", ".inf", "-1", "x", "null"),
    "data.top_p": (".nan", ".inf", "-1", "0", "2", "x"),
    "data.timeout": (".nan", ".inf", "-1", "0", "x"),
    "data.max_minutes": (".nan", ".inf", "-1", "0", "x"),
    "data.max_new_tokens": (".nan", "-1", "0", "1.5", "x", "null"),
    "data.held_out": (".nan", "-1", "0", "x"),
    "data.prompts": ("x", "1", "[1]", "[{}]", "[{path: 1}]", "[[x]]"),
    "feature_cache_gb": (".nan", ".inf", "-1", "x", "[]"),
    "features.max_gb": (".nan", ".inf", "-1", "x"),
    "watch.temperature": (".nan", ".inf", "-1", "x"),
    "watch.min_delta": (".nan", ".inf", "-1", "x"),
    "drafter.gamma": (".nan", "-1", "0", "1.5", "x", "9" * 40),
    "drafter.num_hidden_layers": (".nan", "-1", "0", "1.5", "x", "9" * 40),
    "drafter.algorithm": ("x", "1", "null", "[]", "{}"),
    "drafter": ("x", "1", "[]"),
    "objective": ("x", "1", "[]", "{x: 1}"),
    "objective.l1": (".nan", ".inf", "-1", "x"),
    "objective.decay": (".nan", "-.inf", "0", "x"),
    "seed": (".nan", "x", "1.5", "null", "9" * 40, "-1"),
    "threads": (".nan", "x", "1.5", "0", "-1", "9" * 40),
    "target": ("1", "[]", "{}", "null", "true"),
    "out": ("1", "[]", "null"),
    "log": ("x", "[x]", "1"),
    "x": ("1",),
    "a.b": ("1",),
    "target.x": ("1",),
    "": ("1",),
}


def yaml_cases() -> Iterator[Case]:
    readers = (("recipe.yaml", "train {here}/recipe.yaml"), ("table.yaml", "experiment {here}/table.yaml --dry-run"))
    for file, command in (*readers, ("options.yaml", "eval --config {here}/options.yaml")):
        for what, text in _YAML.items():
            spoil = partial(_spoil, file, _replace(text.encode()))
            yield Case(f"{file} has {what}", complete(command), "" if "NUL" in what else file, spoil)
    for field, values in _OVERRIDES.items():
        for value in values:
            args = "train", "{here}/recipe.yaml", f"{field}={value}"
            # Its prompts are missing: a value that is taken shows in another message than that about the field.
            named = field.rpartition(".")[2] if field else "override"
            spoil = partial(_spoil, "prompts.jsonl", Path.unlink)
            yield Case(f"train {field}={value[:12]}", args, named, spoil)


# ----------------------------------------------------------------------------
# Chat templates, and escape codes in what is printed.
# ----------------------------------------------------------------------------

_TEMPLATES = {
    "divides by zero": "{{ 1 / 0 }}",
    "takes a remainder of zero": "{{ 1 % 0 }}",
    "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "asks for a huge range": "{% for i in range(10 ** 12) %}x{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "writes without end": "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "makes a huge text": "{{ 'x' * 10 ** 12 }}",
    "makes a huge list": "{{ [1] * 10 ** 12 }}",
    "pads a text": "{{ '%1000000000000s' % 'x' }}",
    "is no template": "{% for %}",
    "is not closed": "{% if true %}",
    "raises": "{{ raise_exception('no') }}",
    "reads what is not there": "{{ nothing.at.all }}",
    "adds text to a number": "{{ 1 + 'x' }}",
    "calls a text": "{{ 'x'() }}",
    "reaches for a class": "{{ ''.__class__.__mro__ }}",
    "has an unknown filter": "{{ messages | qwertz }}",
    "includes a file": "{% include '/etc/passwd' %}",
    "extends itself": "{% extends 'self' %}",
    "indexes past the end": "{{ messages[10 ** 6].content }}",
    "sorts what has no order": "{{ [1, 'x'] | sort }}",
    "raises escape codes": "{{ raise_exception('\x1b]0;title\x07') }}",
    "is empty": "",
}


def _set_template(text: str, here: Path) -> None:
    (here / "target/chat_template.jinja").write_text(text)


def template_cases() -> Iterator[Case]:
    for what, text in _TEMPLATES.items():
        for verb in ("generate", "prepare"):
            # prepare passes over prompts that the template refuses and says so; which end with status 1
            spoil = partial(_set_template, text)
            yield Case(f"{verb}, a chat template that {what}", complete(verb), "", spoil, statuses=(1, 2))


def every_case() -> list[Case]:
    """All of them; names are distinct."""
    makers = option_cases, text_cases, name_cases, damage_cases, field_cases, yaml_cases, template_cases
    cases = {case.name: case for maker in makers for case in maker()}
    return list(cases.values())

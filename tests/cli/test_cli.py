"""The command line: help for every verb, whole runs on a toy model, and mistakes that end in one line and status 2."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from huggingface_hub.utils import LocalEntryNotFoundError
from typer.main import get_command
from typer.testing import CliRunner

import outrider.checkpoints.published as published
import outrider.cli.main as main
import outrider.config as cfg
from outrider.api.drafter import DrafterChoice
from outrider.backends.registry import exporters, servers
from outrider.checkpoints.checkpoint import Checkpoint, add_metadata, save_drafter
from outrider.checkpoints.published import published_for
from outrider.checkpoints.registry import tree_methods
from outrider.cli.command import config_value
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import DrafterWeights
from outrider.drafters.draft import TREE_FORM
from outrider.drafters.eagle3 import Eagle3, Eagle3Config
from outrider.drafters.hydra import Hydra, HydraConfig
from outrider.drafters.medusa import Medusa, MedusaConfig
from outrider.evaluation.comparison import conditions_of, differences
from outrider.evaluation.loadtest.config import BACKENDS
from outrider.evaluation.model_card import eval_command, measured
from outrider.evaluation.results import Results
from outrider.evaluation.verbs import other_choices
from outrider.target.hub import EMBEDDED_ID
from outrider.target.model import load_target
from outrider.utils.packaged import Kind, packaged
from tests.toys.command_line import Run, check_error
from tests.toys.documentation import (
    CARDS,
    HISTORY,
    LINK,
    NO_TEST,
    OTHERS,
    PAGES,
    ROOT,
    RUN_BY,
    anchors,
    command_rows,
    documented_commands,
    other_rows,
    prose_of,
    words_of,
)
from tests.toys.targets import randomise
from tests.toys.tokenizer import byte_tokenizer

VERBS = {
    "init": ["--target", "--prompts", "--out", "--force"],
    "train": ["RECIPE", "OVERRIDES"],
    "recipe": ["NAME", "--copy", "--explain", "--schema"],
    "runs": ["DIRECTORY", "--json"],
    "eval": [
        "--target",
        "--drafter",
        "--tasks",
        "--draft-length",
        "--confidence-threshold",
        "--block-size",
        "--label",
        "--tree",
        "--typical",
    ],
    "generate": [
        "PROMPT",
        "--max-new-tokens",
        "--temperature",
        "--show-rounds",
        "--confidence-threshold",
        "--tree",
        "--typical",
        "--thinking",
    ],
    "serve": ["--target", "--drafter", "--host", "--port", "--max-waiting", "--profile", "--tree", "--thinking"],
    "compare": ["RESULTS", "--out", "--draft-cost", "--question", "--allow-different"],
    "report": ["PLACES", "--out", "--title"],
    "experiment": ["TABLE", "--rows", "--dry-run"],
    "bench-drafters": ["DRAFTERS", "--context", "--repeats"],
    "calibrate": ["--tasks", "--fit-tasks", "--plot", "--thinking"],
    "profile": ["--target", "--drafter", "--tree", "--max-requests", "--contexts", "--seconds", "--plot"],
    "bench": ["--backend", "--concurrency", "--variants", "--arrivals", "--launch", "--turns", "--thinking", "--tree"],
    "bench-table": ["DIRECTORIES", "--out"],
    "models": ["TARGET"],
    "simulate": ["--record", "--traces", "--profile", "--validate", "--thinking"],
    "package": ["DRAFTER", "--out", "--target", "--dtype", "--results", "--license"],
    "push": ["DRAFTER", "REPO", "--public"],
    "demo": ["--out", "--eval-samples"],
    "prepare": ["--target", "--prompts", "--out", "--recipe", "--base-url", "--thinking", "--max-minutes"],
    "inspect": ["PATH", "--target", "--row", "--limit", "--html"],
    "export": ["DRAFTER", "--to", "--out", "--target"],
    "features plan": ["RECIPE"],
    "features write": ["RECIPE", "--shard", "--limit-gb", "--max-bytes", "--yes"],
    "features check": ["RECIPE"],
    "doctor": ["--target", "--drafter", "--data", "--eval", "--json"],
}


def shown(*arguments: str) -> str:
    found = CliRunner().invoke(main.app, [*arguments], env={"COLUMNS": "100", "TERM": "dumb"})
    assert found.exit_code == 0, arguments
    return found.output.strip()


def parser(verb: str) -> Any:
    command: Any = get_command(main.app)
    for name in verb.split():
        command = command.resolve_command(command.context_class(command), [name])[1]
    return command


def test_help_of_the_command() -> None:
    """Verbs are listed by purpose, on one screen."""
    text = shown("--help")
    assert len(text.splitlines()) <= 40
    panels = re.findall(r"^╭─ (\w+) ─", text, re.MULTILINE)
    assert panels == ["Options", "Use", "Train", "Measure"]
    top = {verb.split()[0] for verb in VERBS}
    assert set(parser("").commands) == top and all(f"│ {verb} " in text for verb in top)
    assert set(parser("features").commands) == {"plan", "write", "check"}
    for verb in VERBS:
        *group, name = verb.split()
        listed = parser(" ".join(group)).commands[name]
        assert parser(verb).help.splitlines()[0] == (listed.help or parser(verb).help), verb


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_fits_a_screen(verb: str) -> None:
    """In named panels, with an example that the verb can read; `--help-all` lists the rest."""
    text = shown(*verb.split(), "--help")
    assert len(text.splitlines()) <= 40
    assert "╭─ Options ─" not in text and "─ General ─" in text
    options = [option for option in parser(verb).params if any(name.startswith("--") for name in option.opts)]
    hidden = [option for option in options if option.hidden]
    assert len(options) - len(hidden) <= 20
    assert ("--help-all" in text) == bool(hidden) and ("--config" in text) == (len(options) > 1)
    words = " ".join(text.replace("│", " ").split())
    for option in options:
        if not option.hidden and option.show_default and option.default not in (None, False, True, ""):
            shown_as = f"({option.show_default})" if isinstance(option.show_default, str) else option.default
            assert f"[default: {shown_as}" in words, option.name
    full = shown(*verb.split(), "--help-all") if hidden else text
    assert all(option.opts[0] in full for option in options) and all(option.help for option in options)
    for word in VERBS[verb]:
        assert word.lower() in full.lower(), word


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_a_verb_is_read_by_it(verb: str) -> None:
    text, found = shown(*verb.split(), "--help"), 0
    for line in map(str.rstrip, text[text.index("Example:") :].splitlines()[1:]):
        assert line.startswith(" outrider "), "an example has a line of its own"
        if line.startswith(f" outrider {verb}"):
            arguments = shlex.split(line.removeprefix(f" outrider {verb}"))
            parser(verb).make_context(verb, arguments)
            found += 1
            for named in (word for word in arguments if word.startswith(("docs/", "smollm2"))):
                assert any(packaged(named, kind).exists() for kind in get_args(Kind)), named
    assert found


def test_options_from_a_file(run: Run, toy: Path, tmp_path: Path) -> None:
    """Under their names, the command line coming first; another name is refused."""
    command, config = ("generate", "say a word", "--target", toy / "target"), tmp_path / "options.yaml"
    config.write_text(
        "max_new_tokens: 7\ntop-k: 5\nshow-rounds: true\nstop: [absent, missing]\ndrafter: none\nseed: null\n"
    )
    assert "7 tokens in 7 rounds" in run(*command, "--config", config)[2]
    assert "9 tokens in 9 rounds" in run(*command, "--config", config, "--max-new-tokens", 9)[2]
    options = parser("generate").make_context("generate", ["hi", "--config", str(config)]).params
    assert (options["top_k"], options["show_rounds"], options["seed"]) == (5, True, None)
    assert list(options["stop"]) == ["absent", "missing"]
    levels = tmp_path / "levels.yaml"
    levels.write_text("concurrency: [1, 2]\ntasks: eval_math\nout: there\nchat: true\n")
    options = parser("bench").make_context("bench", ["--config", str(levels)]).params
    assert (options["concurrency"], options["tasks"], options["chat"]) == ("1,2", "eval_math", True)
    assert options["out"] == tmp_path / "there"
    config.write_text("max-new-tokenz: 7\n")
    check_error(run(*command, "--config", config), "no option 'max-new-tokenz'; did you mean max-new-tokens?")
    config.write_text("max-new-tokens: many\n")
    check_error(run(*command, "--config", config), "Invalid value for '--max-new-tokens'")
    for line, reason in (
        ("show-rounds: 1", "show-rounds: 1 is not true or false"),
        ("device: no", "device: False is not a number or a text"),
        ("stop: [[a]]", "stop: ['a'] is not a number"),
        ("seed: {a: 1}", "seed: {'a': 1} is not a number"),
    ):
        config.write_text(line)
        check_error(run(*command, "--config", config), reason)
    config.write_text("- 7\n")
    check_error(run(*command, "--config", config), "one option per line")
    config.write_text("a: [\n")
    check_error(run(*command, "--config", config), "not valid YAML")
    absent = tmp_path / "absent.yaml"
    check_error(run(*command, "--config", absent), f"--config {absent} cannot be read: No such file or directory.")


def test_every_option_of_serve_can_be_in_its_file(tmp_path: Path) -> None:
    """As on the command line, which comes first; what lies beside the file is found there."""
    (tmp_path / "mine").mkdir()
    given: dict[str, Any] = {
        "target": "mine", "drafter": "ngram@4", "host": "::1", "port": 8001, "name": "m", "thinking": True,
        "max-requests": 3, "max-waiting": 0, "shutdown-timeout": 9, "max-new-tokens": 9, "kv-tokens": 64,
        "token-budget": 5, "prefix-cache": True,
        "profile": "profiles/one.json", "tree": "8,depth=2", "device": "cpu", "threads": 1, "engine": "vllm",
        "launch": True, "engine-dtype": "float32", "engine-python": "python3", "engine-command": "mine",
        "engine-args": "--seed 1", "lookup": ["mine", "texts.txt"], "lookup-responses": 7,
    }  # fmt: skip
    verb, config = parser("serve"), tmp_path / "serve.yaml"
    names = {param.opts[0].removeprefix("--") for param in verb.params if param.expose_value}
    assert given.keys() == names
    config.write_text(yaml.safe_dump(given))
    here: dict[str, Any] = {name: tmp_path / given[name] for name in ("target", "profile", "engine-command")}
    here["lookup"] = f"{tmp_path / 'mine'},{tmp_path / 'texts.txt'}"
    words = [
        str(word) for name, value in {**given, **here}.items() for word in (f"--{name}", value) if word is not True
    ]
    read = verb.make_context("serve", ["--config", str(config)]).params
    assert read == verb.make_context("serve", words).params
    assert read["profile"] == tmp_path / "profiles" / "one.json"
    over = verb.make_context("serve", ["--config", str(config), "--port", "8002", "--no-thinking"]).params
    assert over == {**read, "port": 8002, "thinking": False}


def test_paths_in_a_file_of_options_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after NAME=, hybrid: and lm:, and between commas. Names stay names, and words of --drafter are none."""
    monkeypatch.chdir(Path("/"))
    top, config = tmp_path / "below", tmp_path / "below" / "options.yaml"
    for name in ("here", "ngram", "auto", "a=b"):
        (top / name).mkdir(parents=True)

    def read(verb: str, **given: Any) -> list[Any]:
        config.write_text(yaml.safe_dump(given))
        required = [] if verb != "calibrate" else ["--drafter", "d", "--target", "t"]
        required += ["--tasks", "t"] if "tasks" not in given and verb in ("bench", "calibrate") else []
        words = [*required, *(["--out", "o"] if verb == "bench" else []), "--config", str(config)]
        params = parser(verb).make_context(verb, words).params
        return [params[name] for name in given]

    assert read("bench", profile=["one.json", "sub/two.json"]) == [[top / "one.json", top / "sub/two.json"]]
    assert read("bench", profile="one.json") == [[top / "one.json"]]
    found = f"gsm8k,{top / 'here'}"
    for tasks in ("gsm8k,here", "gsm8k, here,", ["gsm8k", "here"]):
        assert read("calibrate", tasks=tasks, fit_tasks=tasks) == [found, found]
        assert read("bench", tasks=tasks) == [found]
    assert read("serve", lookup="a.txt,b/c.txt") == [f"{top / 'a.txt'},{top / 'b/c.txt'}"]
    assert read("prepare", prompts=["here", "hf:here", "eval_chat"], recipe="demo") == [
        [str(top / "here"), "hf:here", "eval_chat"], Path("demo")
    ]  # fmt: skip
    assert read("prepare", recipe="here") == [top / "here"]
    for given, meant in {
        "here": f"{top}/here", "hybrid:here": f"hybrid:{top}/here", "lm:here": f"lm:{top}/here",
        "lm:here@4": f"lm:{top}/here@4", "mine=here": f"mine={top}/here", "mine=lm:here@4": f"mine=lm:{top}/here@4",
        "mine=hybrid:here": f"mine=hybrid:{top}/here", "a=b": f"{top}/a=b",
    }.items():  # fmt: skip
        assert read("bench", drafter=given) == [[meant]], given
        if not given.startswith("mine="):
            assert read("serve", drafter=given) == [meant], given
    names = ["auto", "none", "hybrid", "ngram", "mine=ngram", "ngram@4", "hybrid:", "lm:", "lm:absent@4", "o/absent"]
    assert read("bench", drafter=names) == [names]
    (top / "7").touch()
    assert read("bench", prompts=7) == [7]


def test_every_option_that_takes_a_path_takes_it_from_beside_the_file(tmp_path: Path) -> None:
    """A new option of text says where it is looked for (`beside`), or is here as one that is no path."""
    (tmp_path / "here").touch()
    none = {"label", "tree", "typical", "device", "stop", "host", "name", "contexts", "temperature", "concurrency",
            "rates", "variants", "against", "user_speeds", "base_url", "baseline_url", "served_model", "engine_args",
            "block_size", "backend", "temperatures", "base_urls", "rows", "question", "title", "license", "source",
            "to", "dtype"}  # fmt: skip
    for verb in VERBS:
        command = parser(verb)
        params = command.params
        if not any("--config" in param.opts for param in params):
            continue
        for param in params:
            if not param.opts[0].startswith("--") or param.is_eager:
                continue
            annotation = param.type_descriptor.annotation
            if {str, Path} & {annotation, *get_args(annotation)}:
                found = config_value(param, command.fields[param.name], "here", place=tmp_path / "options.yaml")
                assert found == ("here" if param.name in none else str(tmp_path / "here")), (verb, param.name)


def test_the_packaged_drafter_is_found_by_its_name(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, shown, _ = run("inspect", "smollm2-135m-dspark")
    assert status == 0 and "dspark" in shown
    made = run("export", "smollm2-135m-dspark", "--to", "vllm", "--out", "out")
    assert made[0] == 0 and (tmp_path / "out" / "model.safetensors").is_file(), made[2]


def test_misspelt_commands_end_in_one_line(run: Run) -> None:
    check_error(run("evaluate"), "No such command 'evaluate'")
    check_error(run("eval", "--out", "there"), "Missing option '--target'")
    check_error(run("eval", "--tmperature", "1"), "No such option: --tmperature")
    check_error(run("bench", "--backend", "vlm", "--tasks", "a", "--out", "b"), "--backend 'vlm': choose one of local")
    assert run()[0] == 2
    check_error(run("genrate", "hi"), "Did you mean 'generate'?")
    check_error(run("features", "plam"), "Did you mean 'plan'?")
    check_error(run("eval", "--tmperature", "1"), "--temperature")


def test_generate_is_the_same_with_and_without_a_drafter(run: Run, toy: Path) -> None:
    command = ("generate", "say a word", "--target", toy / "target", "--max-new-tokens", 20)
    plain = run(*command)
    drafted = run(*command, "--drafter", toy / "drafter", "--confidence-threshold", 0.1)
    assert plain[0] == drafted[0] == 0, plain[2] + drafted[2]
    assert plain[1] == drafted[1] and plain[1].strip(), "stdout is the text and nothing else"
    assert "20 tokens in 20 rounds (tau 1.00)" in plain[2] and "20 tokens in" in drafted[2]
    seen = run(*command, "--drafter", toy / "drafter", "--show-rounds", "--raw", "--temperature", 1)
    assert seen[0] == 0 and "tokens: draft, correction, bonus" in seen[2]


def test_generate_thinks_when_asked(run: Run, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template hears of it, the drafter's training is looked at, and `auto` prefers one that has seen it."""
    target = shutil.copytree(toy / "target", tmp_path / "target")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking %}T{% endif %}"
    tokenizer.save_pretrained(target)
    drafter = shutil.copytree(toy / "drafter", tmp_path / "drafter")
    add_metadata(drafter, recipe={"data": {"thinking": False}})
    command = ("--target", target, "--drafter", drafter, "--max-new-tokens", 12)
    with pytest.warns(UserWarning, match="trained on responses without thinking"):
        found = run("generate", "hi", *command, "--thinking")
    assert found[0] == 0 and found[1] == run("generate", "hiT", *command, "--raw")[1]
    assert found[1] != run("generate", "hi", *command)[1]
    check_error(
        run("generate", "hi", *command, "--thinking", "--raw"),
        "--thinking needs the chat template, which --raw leaves out",
    )

    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(published, "snapshot_download", offline)
    quick, thoughtful = (published_for("Qwen/Qwen3-4B", thinking)[0].repo for thinking in (False, True))
    assert quick != thoughtful
    check_error(run("generate", "hi", "--target", "Qwen/Qwen3-4B"), quick)
    check_error(run("generate", "hi", "--target", "Qwen/Qwen3-4B", "--thinking"), thoughtful)


def test_eval_writes_results_with_identical_output(run: Run, toy: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "mine.jsonl"
    tasks.write_text('{"turns": ["one", "two"]}\n{"turns": ["three"]}\n')
    found = run(
        "eval", "--target", toy / "target", "--drafter", toy / "drafter", "--tasks", tasks,
        "--out", tmp_path / "out", "--max-new-tokens", 12, "--draft-length", 3,
    )  # fmt: skip
    assert found[0] == 0, found[2]
    results = Results.model_validate_json((tmp_path / "out" / "results.json").read_text())
    task = results.tasks[0]
    assert task.task == "mine" and task.samples == 2 and task.turns == 3 and task.tokens <= 36
    assert task.greedy_identical and task.greedy_mismatches == 0
    assert "FixedPolicy(length=3)" in str(results.settings["policy"]) and results.versions["outrider"]
    assert sum(task.acceptance_histogram) == task.rounds and not any(task.acceptance_histogram[4:])
    assert task.by_prompt is not None and len(task.by_prompt) == 2, "the turns of a conversation together"
    tokens, rounds = map(sum, zip(*task.by_prompt, strict=True))
    assert rounds == task.rounds and tokens / rounds == pytest.approx(task.accepted_length)
    lines = found[1].splitlines()
    verdict = next(i for i, line in enumerate(lines) if line.startswith("Verdict: "))
    assert (
        lines[-1].startswith(("Next: outrider ", "Next, several users at once: outrider bench "))
        and "That is 3 turns: measure more" in lines[verdict + 1]
    )
    assert "keep it" in lines[verdict] or any(line.startswith("`--drafter ngram` on 3 ") for line in lines[verdict:])


def test_eval_of_several_prompts_together(run: Run, toy: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "mine.jsonl"
    tasks.write_text('{"turns": ["one", "two"]}\n{"turns": ["three"]}\n{"turns": ["four", "five", "six"]}\n')
    models = ("--target", toy / "target", "--drafter", "ngram", "--tasks", tasks)
    command = ("eval", *models, "--max-new-tokens", 12, "--draft-length", 3, "--no-others")
    results = {}
    for together in (1, 2):
        found = run(*command, "--concurrency", together, "--out", tmp_path / str(together))
        assert found[0] == 0, found[2]
        results[together] = Results.load(tmp_path / str(together) / "results.json")
    (alone,), (batch,) = results[1].tasks, results[2].tasks
    assert (batch.samples, batch.turns, batch.tokens) == (alone.samples, alone.turns, alone.tokens) == (3, 6, 72)
    assert batch.greedy_identical and batch.by_prompt is not None and alone.by_prompt is not None
    assert [tokens for tokens, _ in batch.by_prompt] == [
        tokens - turns for (tokens, _), turns in zip(alone.by_prompt, (2, 1, 3), strict=True)
    ], "the first token of a response comes with its prompt"
    assert sum(batch.acceptance_histogram) == batch.rounds == sum(rounds for _, rounds in batch.by_prompt)
    assert any(batch.acceptance_histogram[1:4]) and not any(batch.acceptance_histogram[4:])
    assert batch.reached[0] < batch.rounds and batch.verified_drafts <= 3 * batch.rounds
    parts = batch.draft_seconds + batch.verify_seconds + batch.other_seconds
    assert 0.5 < parts / (batch.tokens / batch.tokens_per_second) <= 1, "equal shares of the engine's seconds"
    assert results[2].settings["concurrency"] == 2 and "--concurrency 2" in eval_command(results[2])
    lines = differences(["alone", "together"], [conditions_of(results[1]), conditions_of(results[2])])
    assert lines == ["concurrency: 1 (alone), 2 (together)"]


def test_eval_compares_with_ngram_and_the_drafter_of_the_target() -> None:
    shipped = published.shipped_drafter(EMBEDDED_ID)
    found = other_choices(DrafterChoice("lm", "somewhere"), EMBEDDED_ID)
    assert shipped is not None and list(found) == ["--drafter ngram", f"--drafter {shipped.name}"]
    assert list(other_choices(DrafterChoice("ngram", ""), EMBEDDED_ID)) == [f"--drafter {shipped.name}"]
    assert list(other_choices(DrafterChoice("directory", str(shipped)), EMBEDDED_ID)) == ["--drafter ngram"]


def test_drafters_without_training(run: Run, toy: Path, tmp_path: Path) -> None:
    """Copies, and the target drafting for itself: results say which drafter they are of."""
    tasks = tmp_path / "mine.jsonl"
    tasks.write_text('{"turns": ["one two one two"]}\n')
    command = ("eval", "--target", toy / "target", "--tasks", tasks, "--max-new-tokens", 10)
    for drafter, name, gamma in (
        ("ngram", "ngram@10", 10),
        ("ngram@3", "ngram@3", 3),
        (f"lm:{toy / 'target'}@2", f"lm:{toy / 'target'}@2", 2),
        (f"hybrid:{toy / 'drafter'}", f"hybrid:{toy / 'drafter'}", 16),
    ):
        found = run(*command, "--drafter", drafter, "--out", tmp_path / "out")
        assert found[0] == 0, found[2]
        results = Results.model_validate_json((tmp_path / "out" / "results.json").read_text())
        assert results.settings["drafter"] == name and results.settings["gamma"] == gamma
        assert results.tasks[0].greedy_identical
        if drafter.startswith("lm:"):
            assert not results.tasks[0].acceptance_histogram[0], "it agrees with itself"
    check_error(run(*command, "--drafter", "lm:", "--out", tmp_path / "out"), "write ngram, ngram@8, lm:ID_OR_DIR")
    check_error(run(*command, "--drafter", "ngram@0", "--out", tmp_path / "out"), "gamma=0")
    check_error(run("calibrate", "--tasks", tasks, "--target", toy / "target", "--drafter", "ngram"), "no directory")
    seen = run("generate", "word", "--target", toy / "target", "--max-new-tokens", 8, "--drafter", "ngram")
    assert seen[0] == 0 and "drafter ngram@10" in seen[2]


def test_drafts_that_branch(run: Run, toy: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "mine.jsonl"
    tasks.write_text('{"turns": ["say a word"]}\n')
    command = ("eval", "--target", toy / "target", "--tasks", tasks, "--max-new-tokens", 12, "--out", tmp_path / "out")
    vocab = load_target(toy / "target").vocab_size
    sizes = {"hidden_size": 32, "vocab_size": vocab, "draft_vocab_size": vocab, "num_target_layers": 5}
    attention = {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    for module in (
        Eagle3(Eagle3Config(**sizes, **attention, target_layer_ids=(0, 1, 3), gamma=4)),
        Medusa(MedusaConfig(**sizes, num_heads=3, num_layers=1)),
        Hydra(HydraConfig(**sizes, num_heads=3, num_layers=1)),
    ):
        randomise(module)
        save_drafter(Checkpoint(DrafterWeights(module)), tmp_path / module.algorithm)
        status, stdout, stderr = run(*command, "--drafter", tmp_path / module.algorithm, "--tree", 6)
        assert status == 0, stderr + stdout
        results = Results.model_validate_json((tmp_path / "out" / "results.json").read_text())
        assert str(results.settings["drafter"]).endswith(f"{module.algorithm} (tree of 6)")
        assert results.settings["tree"] == 6 and results.drafter is not None
        assert results.drafter.label == module.algorithm and results.drafter.nodes == 6
        assert results.tasks[0].greedy_identical and not results.tasks[0].greedy_mismatches
        seen = run("generate", "say a word", *command[1:3], *command[5:7], "--drafter", tmp_path / module.algorithm,
                    "--tree", 6)  # fmt: skip
        assert seen[0] == 0 and "(tree of 6)" in seen[2]
    for choice, message in ((toy / "drafter", "dspark drafts chains; trees are for"), ("ngram", "neither blocks nor")):
        check_error(run(*command, "--drafter", choice, "--tree", 6), message)
    eagle = ("--drafter", tmp_path / "eagle3")
    check_error(run(*command, *eagle, "--tree", 311), "with depth 4 and top_k 10 there are 310 at most")
    assert run(*command, *eagle, "--tree", "6,depth=2,top_k=3")[0] == 0
    results = Results.model_validate_json((tmp_path / "out" / "results.json").read_text())
    assert str(results.settings["drafter"]).endswith("eagle3 (tree of 6,depth=2,top_k=3)")
    assert results.settings["tree"] == "6,depth=2,top_k=3" and results.settings["gamma"] == 2
    assert results.drafter is not None and results.drafter.label == "eagle3 6,depth=2,top_k=3"
    check_error(run(*command, "--drafter", tmp_path / "hydra", "--tree", "6,depth=2"), "ask for 6 nodes alone")
    check_error(run(*command, *eagle, "--tree", "6,width=2"), "write NODES[,depth=D][,top_k=K]")
    check_error(run(*command, *eagle, "--tree", 6, "--confidence-threshold", 0.5), "--tree with --confidence-threshold")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.jsonl").write_text(tasks.read_text())
    both = ("--tasks", f"{tasks},{tmp_path}/other/mine.jsonl")
    check_error(run(*command[:3], *both, "--out", tmp_path / "o", *eagle), "mine")
    config = tmp_path / "eagle3" / "config.json"
    config.write_text(config.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": "4"'))
    check_error(run(*command, *eagle), "num_attention_heads is '4'; it must be an integer")


def test_lossy_verification_says_so_everywhere(run: Run, toy: Path, tmp_path: Path) -> None:
    tasks, note = tmp_path / "mine.jsonl", "LOSSY: typical acceptance, epsilon 0.2, delta 0.4"
    tasks.write_text('{"turns": ["one", "two"]}\n')
    models = ("--target", toy / "target", "--drafter", toy / "drafter", "--max-new-tokens", 10)
    command = ("eval", *models, "--tasks", tasks, "--out", tmp_path / "out", "--typical")
    for temperature, same in ((0, "2/2 turns"), (1, "sampled")):
        status, stdout, stderr = run(*command, "0.2,0.4", "--temperature", temperature)
        assert status == 0, stderr
        assert note in " ".join(stdout.split()) and same in stdout
        results = Results.model_validate_json((tmp_path / "out" / "results.json").read_text())
        assert results.settings["lossy"] == {"rule": "typical acceptance", "epsilon": 0.2, "delta": 0.4}
        card = measured([results])
        assert note in card and "--typical 0.2,0.4" in card
    seen = run("generate", "word", *models, "--typical", "default")
    assert seen[0] == 0 and "; LOSSY: typical acceptance, epsilon 0.09, delta 0.3" in seen[2]
    for text, message in (("0.1", "give EPSILON,DELTA"), ("0,0.3", "epsilon=0.0 must be"), ("a,b", "give numbers")):
        check_error(run(*command, text), message)
    check_error(run("generate", "word", "--drafter", "none", "--typical", "default"), "nothing is drafted")


def test_generate_copies_from_texts_as_serve_does(run: Run, toy: Path, tmp_path: Path) -> None:
    """As far as the library, which only hybrids have; tests/api reads the texts."""
    (tmp_path / "notes.txt").write_text("say a word and another one")
    command = ("generate", "say a word", "--target", toy / "target", "--max-new-tokens", 8)
    texts = ("--lookup", tmp_path / "notes.txt")
    plain = run(*command, "--drafter", "none")
    assert plain[0] == 0 and run(*command, *texts, "--drafter", f"hybrid:{toy / 'drafter'}")[:2] == plain[:2]
    check_error(run(*command, *texts, "--drafter", toy / "drafter"), "needs a hybrid drafter")
    check_error(run(*command, *texts, "--drafter", "none"), "lookup needs a hybrid drafter")
    check_error(run(*command, "--lookup", tmp_path / "absent", "--drafter", f"hybrid:{toy / 'drafter'}"), "absent")


def test_mistakes_in_recipes(run: Run, tmp_path: Path) -> None:
    check_error(run("train", tmp_path / "nope.yaml"), "no recipe")
    check_error(run("train", tmp_path / "[/nope].yaml"), "[/nope].yaml")  # not markup
    (tmp_path / "r.yaml").write_text("target: a\nout: b\ndata: {prompts: [{path: x}]}\n")
    check_error(run("train", tmp_path / "r.yaml", "optimizer.steps"), "not of the form key.path=value")
    check_error(run("train", tmp_path / "r.yaml", "optimizer.step=3"), "r.yaml: invalid recipe: optimizer.step: Extra")
    twice = run("train", tmp_path / "r.yaml", "optimizer.step=3", "optimizer.steps=many")
    check_error(twice, "optimizer.steps: Input should be a valid integer")
    check_error(twice, "; optimizer.step: Extra inputs are not permitted; did you mean optimizer.steps?")
    check_error(run("train", tmp_path / "r.yaml", "learning_rate=1"), "did you mean optimizer.learning_rate?")
    check_error(run("train", tmp_path / "r.yaml", "optimiser.steps=1"), "did you mean optimizer?")
    check_error(run("train", tmp_path / "r.yaml", "drafter.markov_ranc=1"), "did you mean markov_rank?")
    (tmp_path / "r.yaml").write_text("a: [\n")
    for verb in ("train", "experiment"):
        check_error(run(verb, tmp_path / "r.yaml"), "r.yaml: not valid YAML (while parsing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    check_error(run("train", tmp_path / "binary"), "binary: not valid YAML")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    check_error(run("inspect", tmp_path / "binary.jsonl"), "binary.jsonl is not a responses file")


def test_mistakes_in_tasks_and_drafters(run: Run, toy: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"turns": ["fine"]}\n{"turns": "oops"}\n')

    def evaluate_(tasks: object, drafter: object = toy / "drafter", *more: object) -> tuple[int, str, str]:
        out = tmp_path / "out"
        return run("eval", "--target", toy / "target", "--drafter", drafter, "--tasks", tasks, "--out", out, *more)

    check_error(evaluate_(bad), "bad.jsonl:2: turns: ")
    check_error(evaluate_(f"eval_math,{tmp_path}/nope"), "give a JSONL path or one of the shipped sets: eval_chat")
    check_error(
        evaluate_("eval_math", toy / "nope"),
        "nope: give a drafter directory (outrider train writes one)",
    )
    check_error(evaluate_("eval_math", toy / "target"), "LlamaForCausalLM")
    check_error(evaluate_("eval_math", toy / "other"), "made for another target: vocab_size")
    both = ("--draft-length", 3, "--confidence-threshold", 0.5)
    check_error(evaluate_("eval_math", toy / "drafter", *both), "--draft-length or --confidence-threshold, not both")
    check_error(evaluate_("eval_math", toy / "drafter", "--top-p", 2), "--top-p 2.0")
    assert not (tmp_path / "out").exists()


def test_mistakes_in_prompts_and_targets(run: Run, toy: Path, tmp_path: Path) -> None:
    target = ("--target", toy / "target")
    check_error(run("generate", " \n", *target), "the prompt is empty")
    check_error(run("generate", "hi", *target, "--drafter", tmp_path), "has no config.json")
    check_error(run("generate", "hi", *target, "--stop", ""), "an empty stop string")
    check_error(run("generate", "hi", *target, "--top-p", 0), "--top-p 0.0")
    check_error(run("generate", "x" * 300, *target), "reads 256")
    check_error(run("generate", "hi", "--target", tmp_path), "without config.json")
    config, toy_config = tmp_path / "config.json", json.loads((toy / "target" / "config.json").read_text())
    for text, message in (
        ("{", "config.json: not valid JSON"),
        ("{}", "config.json is no config of a model that transformers knows: Unrecognized model"),
        (json.dumps({**toy_config, "hidden_size": "x"}), "config.json: hidden_size is 'x'; it must be an integer"),
    ):
        config.write_text(text)
        check_error(run("generate", "hi", "--target", tmp_path, "--drafter", "ngram"), message)
        check_error(run("bench", "--target", tmp_path, "--tasks", "eval_math", "--out", tmp_path / "out"), message)
    check_error(run("generate", "hi", *target, "--max-new-tokens", 0), "--max-new-tokens")


def test_places_that_cannot_be_written_are_refused_before_the_work(run: Run, toy: Path, tmp_path: Path) -> None:
    file, models = tmp_path / "file", ("--target", toy / "target", "--drafter", toy / "drafter")
    file.write_text("not a directory")
    math = ("--tasks", "eval_math")
    for command in (
        ("eval", *models, *math, "--out", file / "out"),
        ("profile", *models, "--out", file / "profile.json"),
        ("profile", *models, "--out", tmp_path / "p.json", "--export-sglang", file),
        ("calibrate", *models, *math, "--plot", file / "plot.png"),
        ("bench", *models, *math, "--out", file),
        ("simulate", *models, *math, "--record", file / "traces.npz"),
        ("bench-drafters", *models[:2], "ngram", "--out", file / "costs.json"),
        ("doctor", *models, "--json", file / "found.json"),
    ):
        check_error(run(*command), f"{file} is a file")
    check_error(run("profile", *models, "--out", tmp_path), f"{tmp_path} is a directory: name a file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_loads_that_cannot_be_are_refused_before_the_target_is_loaded(run: Run, toy: Path, tmp_path: Path) -> None:
    bench = ("bench", "--target", toy / "target", "--drafter", toy / "nope", "--tasks", "eval_math", "--out", tmp_path)
    for option, value, message in (
        ("--concurrency", "0", "levels [0.0] must be different numbers above 0"),
        ("--concurrency", "1,nan", "--concurrency '1,nan': give numbers"),
        ("--concurrency", "1.5", "the number of users must be whole"),
        ("--rates", "inf", "--rates 'inf': give numbers"),
        ("--rates", "2,2", "must be different numbers above 0"),
    ):
        arrivals = "poisson" if option == "--rates" else "closed"
        check_error(run(*bench, "--arrivals", arrivals, option, value), message)
    launched = ("--backend", "vllm", "--launch", "--engine-args", "'open")
    check_error(run(*bench, *launched), '--engine-args "\'open": No closing quotation.')


HEAVY = ("torch", "transformers", "numpy", "matplotlib", "yaml", "httpx")
STARTED = """
import resource, sys
from outrider.cli.main import main
sys.argv = ["outrider", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("ended", end.code or 0, used.ru_utime + used.ru_stime, *sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "status"),
    [("--help", 0), ("--version", 0), ("", 2), ("genrate", 2), ("features --help", 0), ("features plam", 2),
     ("bench --help", 0), ("eval --tmperature 1", 2)],
)  # fmt: skip
def test_what_runs_no_verb_imports_no_pytorch(words: str, status: int) -> None:
    """Help and typos take about 0.2 s where PyTorch takes seconds; the bound has room for slow machines."""
    found = subprocess.run([sys.executable, "-c", STARTED, *words.split()], capture_output=True, text=True)
    code, seconds, *modules = found.stdout[found.stdout.rindex("ended") :].split()[1:]
    assert int(code) == status, found.stderr
    assert not set(HEAVY) & set(modules)
    assert float(seconds) < 1.0


HELPED = """
import sys
from outrider.cli.main import main
verbs, heavy = sys.argv[1].split(","), sys.argv[2].split(",")
for verb in verbs:
    for option, status in (("--help", 0), ("--hlep", 2)):
        sys.argv = ["outrider", *verb.split(), option]
        try:
            main()
        except SystemExit as end:
            assert (end.code or 0) == status, (verb, end.code)
        assert not set(heavy) & set(sys.modules), verb
"""


def test_help_and_options_of_all_verbs_import_no_pytorch() -> None:
    """In one process: what one verb imports is found there, and named."""
    command = [sys.executable, "-c", HELPED, ",".join(VERBS), ",".join(HEAVY)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr.splitlines()[-1]


def test_names_and_defaults_that_help_writes_out_are_the_ones_in_use() -> None:
    assert (cfg.SMOLLM2, cfg.TREE_FORM) == (EMBEDDED_ID, TREE_FORM)
    named, _ = cfg.TREE_METHODS.split(" and ")
    assert set(named.split(", ")) <= set(tree_methods())
    assert list(BACKENDS) == ["local", "transformers", *(engine.name for engine in servers()), "mlx"]
    assert cfg.EXPORTERS.split(", ") == [engine.name for engine in exporters()]
    for verb in ("bench", "simulate"):
        assert {param.name: param.default for param in parser(verb).params}["token_budget"] == EngineConfig.token_budget
    shown = {param.name: param.show_default for param in parser("serve").params}
    usual = EngineConfig()
    assert shown["max_requests"] == str(usual.max_requests) and shown["token_budget"] == str(usual.token_budget)
    assert shown["kv_tokens"] == str(usual.num_blocks * usual.block_size)


def test_the_version_is_the_package_s(run: Run) -> None:
    assert run("--version")[:2] == (0, f"outrider {metadata.version('outrider')}\n")


def test_a_shell_completes_verbs_and_options() -> None:
    """As the script that `outrider --install-completion` installs asks for them."""
    command = Path(sys.executable).with_name("outrider")

    def completed(words: str) -> list[str]:
        asked = {"_OUTRIDER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        found = subprocess.run([command], capture_output=True, text=True, env={**os.environ, **asked})
        return found.stdout.split()

    assert completed("outrider ge") == ["generate"]
    assert completed("outrider features w") == ["write"]
    assert completed("outrider bench-table --o") == ["--out"]


def test_the_installed_command_ends_a_mistake_in_one_line() -> None:
    command = Path(sys.executable).with_name("outrider")
    found = subprocess.run(
        [command, "generate", " "], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    check_error((found.returncode, found.stdout, found.stderr), "the prompt is empty")
    assert not found.stdout


def test_links_of_the_documentation_lead_to_files_and_headings_of_the_repository() -> None:
    """`make docs` checks them on the site, where docs/site/hooks.py has rewritten some."""
    links = [(page, *link) for page in PAGES + CARDS for link in LINK.findall(prose_of(page))]
    lost = []
    for page, file, anchor in links:
        there = page.parent / file if file else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(f"{page.relative_to(ROOT)}: {file}#{anchor}")
    assert len(links) > 100 and not lost


def test_files_that_pages_name_are_there() -> None:
    """`target/kernels.c` and its like, below src/outrider or the root; `drafters/NAME.py` stands for many."""
    pages = [page for page in PAGES if page.parent.name != "upstream"]  # whose files are vLLM's
    named = [(page, name) for page in pages for name in re.findall(r"`([a-z][\w/-]*/[\w-]+\.\w+)`", prose_of(page))]
    named = [(page, name) for page, name in named if name.endswith((".py", ".c", ".js", ".yaml", ".json", ".jsonl"))]
    places = (ROOT, ROOT / "src" / "outrider")
    lost = {f"{page.relative_to(ROOT)}: {name}" for page, name in named
            if "NAME" not in name and not any((place / name).exists() for place in places)}  # fmt: skip
    assert len(named) > 100 and not lost


def test_pages_that_code_names_are_there() -> None:
    files = [path for top in ("src", "tests", "benchmarks") for path in (ROOT / top).rglob("*") if path.is_file()]
    code = [path for path in files if path.suffix in (".py", ".yaml", ".js", ".sh", ".c")]
    named = {name for path in code for name in re.findall(r"docs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))}
    lost = [name for name in sorted(named) if not (ROOT / name).is_file()]
    assert named and not lost


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES + CARDS if page.name not in HISTORY],
    ids=lambda page: f"{page.parent.name}-{page.stem}",
)
def test_the_commands_of_the_documentation_are_read(page: Path) -> None:
    """By the program's own parser: verbs, options and kinds of values exist, and a block's command is complete.

    A page with blocks of commands, but a model card, names tests that run such commands, or says what they need.
    """
    text = page.read_text(encoding="utf-8")
    tests = [test.strip("`") for test in re.findall(r"tests/[\w/]+\.py|`tests/[\w/]+`", text)]
    assert all((ROOT / test).exists() for test in tests), [test for test in tests if not (ROOT / test).exists()]
    commands = documented_commands(page)
    assert tests or "Needs: " in text or page in CARDS or not any(in_block for _, in_block in commands)
    for words, in_block in commands:
        two = " ".join(words[:2]) in VERBS
        try:
            parser(" ".join(words[: 1 + two])).make_context("outrider", words[1 + two :])
        except Exception as error:
            # A sentence may name a verb or an option alone. Typer has its own copy of click's errors.
            if in_block or type(error).__name__ not in ("MissingParameter", "BadOptionUsage"):
                raise AssertionError(f"outrider {shlex.join(words)}: {error}") from error


def test_the_commands_of_the_documentation_are_run() -> None:
    """Every verb by the tests that `RUN_BY` names, with every option of a command; or what it needs is said."""
    for verb, names in RUN_BY.items():
        for name in names:
            test = ROOT / "tests" / name
            assert verb in words_of(test) or f"{verb}_command" in test.read_text(encoding="utf-8"), (verb, name)
    for names, _ in OTHERS.values():
        assert all((ROOT / "tests" / name).is_file() for name in names)
    rows = [*command_rows(), *other_rows()]
    lost = [f"{page.name}: {command}: {needs}" for page, command, _, needs in rows if any(NO_TEST in n for n in needs)]
    assert len(rows) > 80 and not lost, "\n".join(lost)

"""Code that comes with a model is never run, whatever is typed: one line says so."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.toys.command_line import Run, check_error

AUTO = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({place!r}).write_text("ran")
class Config(LlamaConfig):
    model_type = "foreign"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
FILES: dict[str, dict[str, Any]] = {
    "config": {"config.json": {"model_type": "foreign", "auto_map": AUTO}},
    "model of a known type": {"config.json": {"auto_map": AUTO}},
    "tokenizer": {
        "tokenizer_config.json": {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer"] * 2}}
    },
}
VERBS = {
    "generate": ["hello", "--target", "TARGET", "--drafter", "none", "--max-new-tokens", "2"],
    "init": ["--target", "TARGET", "--prompts", "PROMPTS", "--out", "OUT"],
    "prepare": [
        "--target",
        "TARGET",
        "--prompts",
        "PROMPTS",
        "--out",
        "OUT/r.jsonl",
        "--max-new-tokens",
        "2",
        "--max-prompt-tokens",
        "100",
    ],
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", FILES)
def test_it_does_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, toy: Path, run: Run, kind: str, verb: str
) -> None:
    target, ran = tmp_path / "target", tmp_path / "ran"
    shutil.copytree(toy / "target", target)
    (target / "code.py").write_text(CODE.format(place=str(ran)))
    for name, fields in FILES[kind].items():
        (target / name).write_text(json.dumps({**json.loads((target / name).read_text()), **fields}))
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["hello"]}\n')
    places = {"TARGET": target, "PROMPTS": tmp_path / "prompts.jsonl"}
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    arguments = [places.get(part, part.replace("OUT", str(tmp_path / "out"))) for part in VERBS[verb]]
    found = run(verb, *arguments)
    assert not ran.exists()
    if kind != "model of a known type":
        check_error(found, "never runs code that comes with a model")
        assert str(target) in found[2]
    elif verb != "init":  # init wants more prompts than that
        assert found[0] == 0, found[2]

"""Fine-tunes: the base model that a model's files name, whether a drafter of one may serve the other, adapters
merged.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.target import hub
from outrider.target.hub import base_of, is_adapter, lineage, loadable_name, resolve_model, shape_differences
from outrider.target.model import count_layers, load_target


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def copy(toy: Path, place: Path, card: str = "", **config: object) -> Path:
    """A copy of the toy target with this front matter and these fields of config.json."""
    shutil.copytree(toy / "target", place)
    (place / "README.md").write_text(f"---\n{card}\n---\n# A model\n")
    fields = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**fields, **config}))
    return place


def test_the_files_of_a_fine_tune_name_its_base(toy: Path, tmp_path: Path) -> None:
    here = str(toy / "target")
    card = copy(toy, tmp_path / "card", "base_model: owner/base", _name_or_path="owner/other")
    assert base_of(str(card)) == "owner/base"
    several = copy(toy, tmp_path / "several", "base_model: [owner/one, owner/two]")
    assert base_of(str(several)) == "owner/one"
    assert base_of(str(copy(toy, tmp_path / "config", "", _name_or_path=here))) == here
    short = copy(toy, tmp_path / "short", "base_model: SmolLM2-135M-Instruct")
    assert base_of(str(short)) == hub.EMBEDDED_ID, "by its canonical name"
    for number, name in enumerate(("/home/someone/checkpoint-500", "''", "[]", "3", str(tmp_path / "n4"))):
        place = copy(toy, tmp_path / f"n{number}", f"base_model: {name}")
        assert base_of(str(place)) is None, f"{name}: a path of another machine, nothing, or itself"
    for text in ("[", "[" * 5000):
        (card / "README.md").write_text(f"---\nbase_model: {text}\n---\n")
        assert base_of(str(card)) == "owner/other", "a card that is not YAML is passed over"


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.json", '{"text_config": "x"}'), ("tokenizer.json", '{"model": "x"}'), ("tokenizer.json", "[1]")],
)
def test_files_that_say_nothing_do_not_stop_a_comparison(toy: Path, tmp_path: Path, name: str, text: str) -> None:
    place = copy(toy, tmp_path / "one", "")
    (place / name).write_text(text)
    assert shape_differences(str(place), str(place)) == []


def test_the_base_of_a_base(toy: Path, tmp_path: Path) -> None:
    first = copy(toy, tmp_path / "first", f"base_model: {tmp_path / 'third'}")
    second = copy(toy, tmp_path / "second", f"base_model: {first}")
    third = copy(toy, tmp_path / "third", f"base_model: {second}")
    assert lineage(str(third)) == [str(third), str(second), str(first)], "a circle ends"


def test_a_model_that_is_not_here_has_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(repo: str, local_files_only: bool = False, allow_patterns: object = None) -> str:
        asked.append(local_files_only)
        raise FileNotFoundError("not cached")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert base_of("owner/model", download=False) is None and asked == [True, True], "nothing was fetched"
    assert shape_differences("owner/model", "owner/other") is None


def test_differences_that_a_drafter_cannot_serve(toy: Path, tmp_path: Path) -> None:
    base = str(toy / "target")
    assert shape_differences(str(copy(toy, tmp_path / "same", torch_dtype="bfloat16")), base) == []
    larger = copy(toy, tmp_path / "larger", hidden_size=64, vocab_size=9000)
    vocab = json.loads((toy / "target" / "config.json").read_text())["vocab_size"]
    assert shape_differences(str(larger), base) == [
        "hidden_size is 64, there 32",
        f"vocab_size is 9000, there {vocab}",
    ]
    other = copy(toy, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[:2]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert shape_differences(str(other), base) == ["its tokenizer has another vocabulary"]


def save_adapter(base: Path, place: Path, **config: object) -> None:
    """A random LoRA over two matrices of each layer, as peft writes it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    lora = LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], **config})
    adapted = get_peft_model(model, lora)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(place)


def test_an_adapter_is_merged_on_load(toy: Path, tmp_path: Path) -> None:
    """W + scale B A in the adapted matrices, the base's weights in all others."""
    base, adapter = toy / "target", tmp_path / "adapter"
    save_adapter(base, adapter)
    assert is_adapter(adapter) and base_of(str(adapter)) == str(base)
    assert count_layers(str(adapter)) == 5 and not list((tmp_path / "cache").rglob("*.safetensors"))
    loaded, plain = load_target(adapter), load_target(base)
    assert loaded.name == str(adapter) and loaded.tokenizer is not None
    lora = {name: tensor.double() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    merged, changed = loaded.model.state_dict(), 0
    for name, weight in plain.model.state_dict().items():
        place = f"base_model.model.{name.removesuffix('.weight')}"
        wanted = weight.double()
        if f"{place}.lora_A.weight" in lora:
            wanted = wanted + 7 / 3 * lora[f"{place}.lora_B.weight"] @ lora[f"{place}.lora_A.weight"]
            changed += 1
        torch.testing.assert_close(merged[name].double(), wanted, atol=1e-6, rtol=1e-6)
    assert changed == 10


def test_a_merged_adapter_is_kept_until_it_changes(toy: Path, tmp_path: Path) -> None:
    base, adapter = toy / "target", tmp_path / "adapter"
    save_adapter(base, adapter)
    (adapter / "chat_template.jinja").write_text("mine")
    place = resolve_model(str(adapter))
    assert place.is_relative_to(tmp_path / "cache") and (place / "chat_template.jinja").read_text() == "mine"
    made = (place / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(adapter)) == resolve_model(str(adapter), weights=False) == place
    assert loadable_name(str(adapter)) == str(place) and loadable_name(str(base)) == str(base), "engines merge nothing"
    assert (place / "model.safetensors").stat().st_mtime_ns == made, "not merged again"
    shutil.rmtree(adapter)
    save_adapter(base, adapter, lora_alpha=9)
    assert resolve_model(str(adapter)) == place and (place / "model.safetensors").stat().st_mtime_ns != made


def test_adapters_that_cannot_be_merged(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = toy / "target", tmp_path / "adapter"
    save_adapter(base, adapter)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        with pytest.raises(ValueError, match=r"adapter of .*target: pip install peft.*merge_and_unload"):
            count_layers(str(adapter))
    prompts = tmp_path / "prompts"
    tuned = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), tuned).save_pretrained(prompts)
    with pytest.raises(ValueError, match=r"the PROMPT_TUNING adapter .* cannot be merged"):
        load_target(prompts)
    fields = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": "/elsewhere/base"}))
    (adapter / "README.md").unlink()
    with pytest.raises(ValueError, match="names no base model on this machine or the hub"):
        load_target(adapter)

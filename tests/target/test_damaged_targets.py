"""Targets that would load as another model, or not at all: config.json, weight files and devices, each refused in one
line that names the file and what is wrong with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.target.hub import resolve_model
from outrider.target.model import Target, load_target, outline_target
from outrider.utils.files import check_finite
from outrider.utils.measure import usable_device
from tests.toys.command_line import Run, check_error
from tests.toys.published import PUBLISHED, published_target
from tests.toys.target_directory import save_toy_target
from tests.toys.tokenizer import byte_tokenizer

UP = "model.layers.1.mlp.up_proj.weight"
NAN, INF = float("nan"), float("inf")
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole target of two layers."""
    directory = tmp_path_factory.mktemp("sound")
    save_toy_target(directory, layers=2)
    return directory


def config(**fields: object) -> Damage:
    """Fields of config.json."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    """A change of the tensors of model.safetensors."""

    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path, {"format": "pt"})

    return damage


def put(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return tensors(lambda found: found.update({name: change(found[name])}))


def spoilt(value: float) -> Callable[[Tensor], Tensor]:
    """The last element is `value`."""
    return lambda tensor: torch.cat([tensor.flatten()[:-1], torch.tensor([value])]).view(tensor.shape)


def without(name: str) -> Damage:
    return tensors(lambda found: found.pop(name))


def weights(content: Callable[[bytes], bytes]) -> Damage:
    """Other bytes of model.safetensors."""

    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(content(path.read_bytes()))

    return damage


def instead(name: str, content: object) -> Damage:
    """A file in place of model.safetensors: text, or what torch.save writes of anything else."""

    def damage(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        if isinstance(content, str):
            (directory / name).write_text(content)
        else:
            torch.save(content, directory / name)

    return damage


def index(weight_map: object) -> Damage:
    return instead("model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": weight_map}))


def rope(**fields: object) -> Damage:
    return config(rope_parameters={"rope_type": "default", "rope_theta": 5000.0, **fields})


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"

DAMAGED: dict[str, tuple[Damage, str]] = {
    "no matrix": (without(UP), rf"lacks tensor {UP}: the checkpoint is incomplete"),
    "no norm": (without("model.norm.weight"), r"lacks tensor model\.norm\.weight"),
    "no head": (without("lm_head.weight"), r"lacks tensor lm_head\.weight"),
    "no embedding": (without("model.embed_tokens.weight"), r"lacks tensor model\.embed_tokens\.weight"),
    "no head, no embedding, tied": (
        lambda directory: [
            damage(directory)
            for damage in (
                without("lm_head.weight"),
                without("model.embed_tokens.weight"),
                config(tie_word_embeddings=True),
            )
        ],
        "lacks tensor",
    ),
    "a layer more": (config(num_hidden_layers=3), r"lacks tensors model\.layers\.2.* and 6 more"),
    "a layer less": (config(num_hidden_layers=1), r"has tensors model\.layers\.1.*no place for"),
    "a bias": (
        tensors(lambda found: found.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})),
        r"has tensor model\.layers\.0\.self_attn\.q_proj\.bias, which its config\.json has no place for",
    ),
    "NaN": (put(UP, spoilt(NAN)), rf"{UP} has NaN or infinity"),
    "infinite norm": (put("model.norm.weight", spoilt(INF)), r"model\.norm\.weight has NaN or infinity"),
    "both infinities": (put(UP, lambda t: t * INF), rf"{UP} has NaN or infinity"),
    "another shape": (
        put(UP, lambda t: t[:, :5].contiguous()),
        rf"safetensors: {UP} has shape \[48, 5\], .*\[48, 32\]",
    ),
    **{
        f"type {kind}": (
            put(UP, lambda t, kind=kind: t.to(kind)),
            rf"{UP} is of type \w+, and config\.json has no quant",
        )
        for kind in (torch.int8, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn)
    },
    **{
        f"{name} {value!r}": (config(**{name: value}), rf"config\.json.*{name}")
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
        for value in (0, -1, "2", 2.5, [2], True, 10**9, 10**30)
    },
    **{
        f"{name} {value!r}": (config(**{name: value}), rf"config\.json.*{name}")
        for name in ("vocab_size", "intermediate_size", "max_position_embeddings")
        for value in (0, -1, "97", None, 10**15)
    },
    **{
        f"eos_token_id {value!r}": (config(eos_token_id=value), r"config\.json: eos_token_id is .*a token id or a list")
        for value in ("x", -1, 2.5, [1, "a"], {}, True)
    },
    **{
        f"generation_config.json {text[:20]}": (
            lambda directory, text=text: (directory / "generation_config.json").write_text(text),
            r"generation_config\.json",
        )
        for text in ("", "[]", "[" * 10**5, '{"eos_token_id": "x"}', '{"eos_token_id": [[1]]}')
    },
    "negative window": (config(sliding_window=-1), r"config\.json: sliding_window is -1"),
    "heads that do not divide": (config(hidden_size=33), r"config\.json.*hidden size \(33\) is not a multiple"),
    "heads that do not share": (config(num_key_value_heads=3), r"num_key_value_heads is 3; it must be a divisor"),
    "odd heads": (config(head_dim=7), r"head_dim is 7; it must be even"),
    "other heads": (config(head_dim=10), r"q_proj\.weight has shape \[32, 32\], config\.json implies \[40, 32\]"),
    "wider": (config(hidden_size=2**20), r"has shape \[\d+, 32\], config\.json implies \[\d+, 1048576\]"),
    "no tensors": (tensors(lambda found: found.clear()), "far more than the 0 elements of its weight files"),
    "deeper": (config(num_hidden_layers=2**10), r"config\.json implies [\d,]+ parameters, far more than"),
    "activation": (config(hidden_act="nope"), r"config\.json: hidden_act is 'nope'"),
    "activation of a number": (config(hidden_act=3), r"config\.json.*hidden_act"),
    "rope": (rope(rope_type="nope"), r"config\.json: rope_type is 'nope'.*default, linear"),
    "rope of a number": (rope(rope_type=3), r"config\.json.*"),
    "rope without factor": (rope(rope_type="yarn"), r"config\.json.*"),
    "rope list": (config(rope_parameters=[1]), r"config\.json.*rope_parameters"),
    **{
        f"rope_theta {value!r}": (rope(rope_theta=value), r"config\.json: rope_parameters.rope_theta is")
        for value in (0, -5, "x", NAN, INF)
    },
    "rope factor": (rope(rope_type="linear", factor=0), r"config\.json: rope_parameters.factor is 0"),
    **{
        f"eps {value!r}": (config(rms_norm_eps=value), r"config\.json.*rms_norm_eps") for value in (-1.0, NAN, INF, "x")
    },
    **{
        f"truncated to {size}": (weights(lambda content, size=size: content[:size]), "not a readable safetensors file")
        for size in (0, 4, 8, 100, 5000, -1)
    },
    "huge header": (weights(lambda content: b"\xff" * 8 + content), "not a readable safetensors file"),
    "header that is no JSON": (weights(lambda _: (10).to_bytes(8, "little") + b"not json!!"), "not a readable"),
    "header of another length": (weights(lambda c: (5).to_bytes(8, "little") + c[8:]), "not a readable"),
    "pointer of git-lfs": (weights(lambda _: POINTER), "not a readable safetensors file"),
    "no weights": (lambda directory: (directory / "model.safetensors").unlink(), "model.safetensors is missing"),
    "missing part": (index({UP: "model-00001-of-00002.safetensors"}), r"model-00001-of-00002\.safetensors is missing"),
    "part elsewhere": (index({UP: "../model.safetensors"}), r"index\.json: weight_map names \['\.\./model"),
    "index of a list": (index([1]), r"index\.json: weight_map is not a mapping"),
    "index without end": (instead("model.safetensors.index.json", "[" * 10**5), r"index\.json: weight_map"),
    **{
        name: (instead(name, {"a": 1}), rf"{name} is a pickle.*reads safetensors only")
        for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth")
    },
    **{
        f"quantised by {method}": (config(quantization_config={"quant_method": method, "bits": 4, **more}), message)
        for method, more, message in (
            ("gptq", {}, "cannot load its gptq weights: .*pip install"),
            ("awq", {}, "cannot load its awq weights: "),
            ("bitsandbytes", {"load_in_4bit": True}, "cannot load its bitsandbytes weights: .*pip install"),
            ("bitsandbytes without a size", {}, "quant_method is 'bitsandbytes without a size'"),
            ("compressed-tensors", {}, "cannot load its compressed-tensors weights: "),
            ("nope", {}, r"config\.json: quantization_config\.quant_method is 'nope'; it must be one of"),
            (None, {}, r"config\.json: quantization_config\.quant_method is None"),
        )
    },
    "quantised by a list": (
        config(quantization_config=[1]),
        r"config\.json is no config of a model that transformers knows: 'list'",
    ),
}


def damaged(sound: Path, place: Path, damage: Damage) -> Path:
    shutil.copytree(sound, place)
    damage(place)
    return place


def lines_of(error: BaseException) -> int:
    return len(str(error).splitlines())


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_target_is_refused_by_name(sound: Path, tmp_path: Path, case: str) -> None:
    damage, message = DAMAGED[case]
    place = damaged(sound, tmp_path / "target", damage)
    with pytest.raises(ValueError, match=message) as caught:
        load_target(place)
    assert str(place) in str(caught.value) and lines_of(caught.value) == 1


@pytest.mark.parametrize(
    "case", ["num_hidden_layers 1000000000", "rope", "activation", "no matrix", "pytorch_model.bin"]
)
def test_the_command_line_says_it_in_one_line(sound: Path, tmp_path: Path, run: Run, case: str) -> None:
    place = damaged(sound, tmp_path / "target", DAMAGED[case][0])
    check_error(run("generate", "hello", "--target", place, "--drafter", "none"), str(place))


def test_the_command_line_refuses_a_drafter_that_is_not_finite(toy: Path, tmp_path: Path, run: Run) -> None:
    place = damaged(toy / "drafter", tmp_path / "drafter", put("norm.weight", spoilt(NAN)))
    found = run("generate", "hello", "--target", toy / "target", "--drafter", place)
    check_error(found, f"{place}: norm.weight has NaN or infinity")


def test_what_is_no_damage_loads(sound: Path, tmp_path: Path) -> None:
    """Tied embeddings, other modules beside the decoder, other float types, weights in parts."""
    expected = logits(load_target(sound))

    def parts(directory: Path) -> None:
        found = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").unlink()
        names, places = sorted(found), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        weight_map = {name: places[number % 2] for number, name in enumerate(names)}
        for place in places:
            save_file({n: found[n] for n in names if weight_map[n] == place}, directory / place, {"format": "pt"})
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    fine: dict[str, Damage] = {
        "other modules": tensors(
            lambda found: found.update({"visual.blocks.0.w": torch.ones(2), "mtp.fc": torch.ones(2)})
        ),
        "old buffers": tensors(
            lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
        ),
        "float64": put(UP, lambda t: t.double()),
        "parts": parts,
    }
    for name, change in fine.items():
        assert torch.equal(logits(load_target(damaged(sound, tmp_path / name, change))), expected), name
    tied = damaged(sound, tmp_path / "tied", without("lm_head.weight"))
    config(tie_word_embeddings=True)(tied)
    target = load_target(tied)
    assert torch.equal(target.head_VD, target.embed_VD)


def logits(target: Target) -> Tensor:
    found = target.forward(torch.tensor([[5, 6, 7]]), target.new_cache(3)).logits_BTV
    assert found is not None
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_familys_own_checkpoint_loads(name: str, tmp_path: Path) -> None:
    target = published_target(name)
    target.model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    outline_target(tmp_path)
    torch.testing.assert_close(logits(load_target(tmp_path)), logits(target))


def test_a_base_that_lacks_tensors_is_not_merged(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    base = damaged(sound, tmp_path / "base", without(UP))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    save_file({"x": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"lacks tensor {UP}"):
        resolve_model(str(adapter))


def test_a_sum_that_overflows_is_looked_at_again(tmp_path: Path) -> None:
    large = {"half": torch.full((100,), 6e4, dtype=torch.float16), "single": torch.full((100,), 3e38)}
    check_finite(tmp_path, large)
    large["half"][7] = NAN
    with pytest.raises(ValueError, match="half has NaN"):
        check_finite(tmp_path, large)


@pytest.mark.parametrize("name", ["nope", "", "cpu:x", "cuda:-1", "mps", "xpu", "hpu", "vulkan", "privateuseone"])
def test_a_device_that_is_not_here_is_refused(name: Any) -> None:
    if name in ("mps", "xpu") and getattr(torch, name).is_available():
        pytest.skip("this machine has one")
    with pytest.raises(ValueError, match=r"device .*use auto, cpu"):
        usable_device(name)


def test_a_gpu_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert usable_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="'cuda:2': PyTorch sees 2 CUDA devices"):
        usable_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="'cuda': PyTorch sees no CUDA device; use cpu"):
        usable_device("cuda")


@pytest.mark.parametrize("name", ["nope", "meta"])
def test_the_command_line_refuses_a_device_that_is_not_here(sound: Path, run: Run, name: str) -> None:
    check_error(run("generate", "hello", "--target", sound, "--drafter", "none", "--device", name), f"device '{name}'")

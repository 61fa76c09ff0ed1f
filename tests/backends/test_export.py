"""Exports: what is written drafts as its source does, for every engine; what an engine cannot serve is an error."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.backends.base import Launch, Speculation
from outrider.backends.export import export_drafter, refusals, target_facts
from outrider.backends.registry import MARKS, engine_of, export_table, exporters
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.checkpoints.dialects.base import TargetFacts
from outrider.checkpoints.registry import methods
from outrider.cli.main import app
from outrider.drafters.base import DraftCall, DrafterWeights
from outrider.drafters.draft import Draft
from outrider.drafters.eagle3 import Eagle3
from outrider.drafters.rope import RopeScaling
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from outrider.training.setup import load_start
from outrider.utils.terminal import markdown_table
from tests.toys.alignment import check_alignment
from tests.toys.dialects import FACTS, VD, L, config_of, made
from tests.toys.targets import randomise, toy_samples, toy_target
from tests.toys.training import going_on

Change = dict[str, Any]
PAIRS = [(engine.name, method) for engine in exporters() for method in engine.exports()]


def facts_of(target: Target) -> TargetFacts:
    return TargetFacts("toys/target", ("LlamaForCausalLM",), L, target.embed_VD, target.head_VD)


def proposals(checkpoint: Checkpoint, target: Target, params: SamplingParams) -> list[Draft]:
    """Drafts after contexts of three lengths."""
    drafter = checkpoint.serve(target)
    found: list[Draft] = []
    for length, seed in ((9, 1), (1, 2), (14, 3)):
        generator = torch.Generator().manual_seed(seed)
        aux_TLD = 3 * torch.randn(length, len(drafter.aux_layers), 32, generator=generator)
        tokens: Sequence[int] = torch.randint(4, 97, (length + 1,), generator=generator).tolist()
        session = drafter.new_session(32)
        drafter.extend([session], [tokens[:-1]], aux_TLD)
        call = DraftCall(session, tokens[-1], params, SeenTokens(97), SeededSource(params.seed or 0), None)
        found.append(drafter.propose([call])[0])
    return found


def drafts(checkpoint: Checkpoint, target: Target) -> list[list[int]]:
    """Greedy drafts after contexts of three lengths."""
    return [draft.tokens for draft in proposals(checkpoint, target, SamplingParams())]


@pytest.mark.parametrize(("engine", "method"), PAIRS)
@torch.inference_mode()
def test_an_export_drafts_as_its_source(tmp_path: Path, engine: str, method: str) -> None:
    target = toy_target("qwen3")
    changes: Change = {} if engine_of(engine).exports()[method].whole_vocabulary else {"draft_vocab_size": VD}
    before = made(method, **changes)
    exported = export_drafter(before, engine_of(engine), tmp_path / "out", facts_of(target))
    after = load_checkpoint(tmp_path / "out")
    assert drafts(after, target) == drafts(before, target)
    assert bool(exported.written.fallbacks) == (
        method in ("domino", "medusa") or engine_of(engine).exports()[method].widens
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(command in card for command in exported.commands) and "base_model: toys/target" in card
    assert all(sentence in card for sentence in exported.written.fallbacks)
    assert str(tmp_path / "out") in " ".join(exported.commands)


@pytest.mark.parametrize(
    ("change", "own"),
    [
        ({}, ""),
        ({"markov_head_type": "gated"}, "head embedding"),
        ({"markov_head_type": "rnn", "confidence_head_with_markov": False}, ""),
        ({"markov_rank": 0, "markov_head_type": "rnn", "enable_confidence_head": False}, "head"),
    ],
)
@torch.inference_mode()
def test_a_widened_drafter_drafts_as_before(tmp_path: Path, change: Change, own: str) -> None:
    """Tokens, their distributions and confidences; what could not be drafted has a probability of exactly 0."""
    target = toy_target("qwen3")
    before = made("dspark", own, draft_vocab_size=VD, **change)
    export_drafter(before, engine_of("deepspec"), tmp_path / "out", facts_of(target), dtype=torch.float32)
    after = load_checkpoint(tmp_path / "out")
    assert after.weights.draft_ids_Vd is None and after.config.markov_rank == before.config.markov_rank + 1
    ids = before.weights.draft_ids_Vd
    assert ids is not None
    params = SamplingParams(temperature=2.0, seed=5)
    for old, new in zip(proposals(before, target, params), proposals(after, target, params), strict=True):
        assert new.tokens == old.tokens
        torch.testing.assert_close(torch.tensor(new.confidences), torch.tensor(old.confidences))
        for node, siblings in old.siblings.items():
            row_V = new.siblings[node].row()
            torch.testing.assert_close(row_V, siblings.row())
            assert not row_V.index_fill(0, ids, 0.0).any()


@pytest.mark.parametrize("method", [method.name for method in methods()])
def test_the_table_of_engines_says_what_exports_do(method: str) -> None:
    headings, *rows = export_table()
    cells = dict(zip(headings, next(row for row in rows if row[0] == method), strict=True))
    for reduced in (False, True):
        change: Change = {"draft_vocab_size": VD} if reduced else {}
        reasons = refusals(made(method, **change).weights.folded(), FACTS)
        assert list(reasons) == headings[1:]
        for engine, reason in reasons.items():
            able = cells[engine] != "-" and not (reduced and "*" in cells[engine])
            assert able == (reason is None), (engine, reason)
            if reason is not None:
                assert re.fullmatch(rf"--to {engine}: .*: train .*drafter\.\w+.*\.", reason), reason


def test_the_table_of_engines_is_in_the_documentation() -> None:
    headings, *rows = export_table()
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    assert "\n".join(markdown_table(headings, rows, text=headings)) in page


OWN = {"eagle3": "head", "dspark": "head embedding", "medusa": "heads", "mtp": "head embedding", "hydra": "embedding"}


@pytest.mark.parametrize(("method", "own"), OWN.items())
@torch.inference_mode()
def test_heads_and_embeddings_of_a_drafters_own_are_served(method: str, own: str) -> None:
    """A drafter with its own tensors drafts on one target as without them on a target that has them."""
    target = toy_target("qwen3")
    checkpoint = made(method, own)
    head = target.head_VD if checkpoint.weights.head_VdH is None or own == "heads" else checkpoint.weights.head_VdH
    embedding_VH = target.embed_VD if checkpoint.weights.embedding_VH is None else checkpoint.weights.embedding_VH
    model = toy_target("qwen3").model
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head.clone())
    model.model.embed_tokens.weight = torch.nn.Parameter(embedding_VH.clone())
    theirs = drafts(
        Checkpoint(replace(checkpoint.weights, head_VdH=None, embedding_VH=None)), Target(model, None, "toy")
    )
    mine = drafts(checkpoint, target)
    if own == "heads":  # each position is that of a drafter with this head alone
        assert checkpoint.weights.head_VdH is not None
        one_each = [
            drafts(Checkpoint(replace(checkpoint.weights, head_VdH=one)), target) for one in checkpoint.weights.head_VdH
        ]
        theirs = [[one_each[k][i][k] for k in range(3)] for i in range(3)]
        assert mine != one_each[0]
    assert mine == theirs
    assert mine != drafts(Checkpoint(replace(checkpoint.weights, head_VdH=None, embedding_VH=None)), target)


def test_the_targets_own_tensors_are_not_kept_twice() -> None:
    target = toy_target("qwen3")
    module = made("dspark").weights.module
    own = DrafterWeights(module, head_VdH=target.head_VD.clone(), embedding_VH=target.embed_VD.clone())
    copies = own.for_target(target)
    assert copies.head_VdH is None and copies.embedding_VH is None
    several = DrafterWeights(module, head_VdH=torch.stack([target.head_VD] * 3)).for_target(target)
    assert several.head_VdH is None
    other = torch.stack([target.head_VD, target.head_VD + 1])
    assert DrafterWeights(module, head_VdH=other).for_target(target).head_VdH is other


@pytest.mark.parametrize(
    "change",
    [
        {"norm_before_residual": True, "attention_bias": True},
        {"norm_before_fc": True, "qk_norm": True},
        {"fc_norm": True, "norm_output": True},
    ],
)
def test_eagle3_with_the_flags_of_other_makers_is_served_as_it_is_trained(change: Change) -> None:
    target = toy_target("llama")
    plain, flagged = (Eagle3(config_of("eagle3", **fields)) for fields in ({}, change))
    for module in (plain, flagged):
        randomise(module)
    assert check_alignment(target, flagged, toy_samples(3), torch.arange(97)) > 30
    flagged.load_state_dict(plain.state_dict(), strict=False)
    assert drafts(Checkpoint(DrafterWeights(plain)), target) != drafts(Checkpoint(DrafterWeights(flagged)), target), (
        "the flags matter"
    )


MIXED: Change = {
    "sliding_window": 9,
    "layer_types": ("sliding_attention", "full_attention"),
    "is_causal": None,
}
UNSERVED: list[tuple[str, str, Change, str]] = [
    ("vllm", "hydra", {}, "it takes no hydra drafters: train one of dflash, .*As it is, Outrider alone serves it"),
    ("vllm", "dspark", {"markov_head_type": "rnn"}, '"rnn" is not served .* --to sglang, deepspec, speculators, or'),
    ("vllm", "dspark", {"markov_rank": 0, "confidence_head_with_markov": False}, "markov_rank 0 has no place"),
    ("llama.cpp", "dspark", {"markov_head_type": "gated"}, 'markov_head_type "gated" is not served there'),
    ("llama.cpp", "dspark", {"target_layer_ids": (0, 2, 4)}, r"target_layer_ids \[0, 2, 4\] reach the last layer"),
    ("llama.cpp", "dspark", {"confidence_head_with_markov": False}, "confidence_head_with_markov false has no place"),
    ("llama.cpp", "dflash", {"draft_vocab_size": VD}, "40 has no place .* drafter.draft_vocab_size=null"),
    ("llama.cpp", "dflash2", {"selector_top_k": 6}, "selector_top_k 6 does not fit; its selector keeps 42 numbers"),
    *[
        (engine, "lilicorr", {"lilicorr_candidate_topk": count}, f"lilicorr_candidate_topk {count} has no place")
        for engine, count in (("vllm", 6), ("sglang", 32))
    ],
    ("vllm", "dflash", {"sample_from_anchor": True}, "sample_from_anchor true is not served there"),
    ("sglang", "dspark", {"markov_rank": 0, "confidence_head_with_markov": False}, "markov_rank 0 has no place"),
    ("deepspec", "dspark", {"sample_from_anchor": False}, "sample_from_anchor false is not served there"),
    ("sglang", "dspark", {"sample_from_anchor": False}, "sample_from_anchor false is not served there"),
    ("sglang", "eagle3", {"norm_output": True}, "norm_output true has no place"),
    ("sglang", "eagle3", {"target_layer_ids": (0, 1)}, r"target_layer_ids \[0, 1\] must be three"),
    ("sglang", "dflash", {"sliding_window": 9}, "is_causal False is not heeded there"),
    (
        "sglang",
        "dflash",
        {"output_multiplier": 0.5},
        "whether output_multiplier and final_logit_softcapping are heeded",
    ),
    ("sglang", "dspark", {"is_causal": True}, "is_causal True is not heeded there"),
    ("vllm", "dflash", MIXED, r"is_causal null .* would become true for all layers.*--to zlab"),
    ("vllm", "dflash", {"final_logit_softcapping": 3.0}, "final_logit_softcapping are not heeded there"),
    ("llama.cpp", "dflash", {"rope_scaling": RopeScaling("linear", 2.0)}, "rope_type 'linear': nobody has seen"),
    ("llama.cpp", "dflash", MIXED, "is_causal null .* has no place there"),
    ("deepspec", "dspark", MIXED, "is_causal null is not served there"),
    ("speculators", "dflash", {"is_causal": True}, "is_causal true has no place in the speculators dialect"),
]


@pytest.mark.parametrize(("engine", "method", "change", "message"), UNSERVED)
def test_what_an_engine_cannot_serve_is_an_error_and_nothing_is_written(
    tmp_path: Path, engine: str, method: str, change: Change, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        export_drafter(made(method, **change), engine_of(engine), tmp_path / "out", FACTS)
    advised = rf"--to {engine}: .* As it is, (export it --to .*, or serve it with|.* alone).*\."
    assert re.fullmatch(advised, str(refused.value)), "one line that says what to do"
    assert not list(tmp_path.iterdir())


def test_llama_cpp_is_given_no_tensors_of_the_targets(tmp_path: Path) -> None:
    """It would draft with an embedding that comes without a head; a reduced vocabulary's head is what it needs."""
    engine = engine_of("llama.cpp")
    whole, reduced = (
        engine.write(made("dspark", **change).weights.folded(), FACTS) for change in ({}, {"draft_vocab_size": VD})
    )
    assert not {"lm_head.weight", "embed_tokens.weight"} & set(whole.tensors)
    assert torch.equal(
        reduced.tensors["lm_head.weight"], FACTS.head_VH[made("dspark", draft_vocab_size=VD).weights.draft_ids_Vd]
    )
    assert "embed_tokens.weight" not in reduced.tensors


@pytest.mark.parametrize("engine", ["llama.cpp", "sglang", "zlab"])
def test_engines_that_take_the_targets_head_and_embedding_refuse_other_ones(tmp_path: Path, engine: str) -> None:
    for own in ("embedding", "head"):
        with pytest.raises(ValueError, match=r"of the drafter's own .* --to vllm, speculators, or serve"):
            export_drafter(made("dflash", own), engine_of(engine), tmp_path / own, FACTS)
    copies = replace(made("dflash").weights, head_VdH=FACTS.head_VH.clone(), embedding_VH=FACTS.embedding_VH.clone())
    export_drafter(Checkpoint(copies), engine_of(engine), tmp_path / "copies", FACTS)


def test_every_head_has_an_engine_or_a_dialect(tmp_path: Path) -> None:
    """SGLang and DeepSpec know the gated and the recurrent head, which vLLM and llama.cpp do not."""
    tied = replace(FACTS, head_VH=FACTS.embedding_VH)
    for kind in ("gated", "rnn"):
        for engine in ("sglang", "deepspec", "speculators"):
            export_drafter(made("dspark", markov_head_type=kind), engine_of(engine), tmp_path / kind / engine, tied)


def test_sglang_finds_the_block_in_its_section_and_at_the_top() -> None:
    config = engine_of("sglang").write(made("dspark").weights.folded(), FACTS).config
    section = config["dflash_config"]
    assert section["block_size"] == config["block_size"] == 4 and section["markov_rank"] == config["markov_rank"] == 6
    assert section["target_layer_ids"] == config["target_layer_ids"] == [0, 2, 3]


def test_the_commands(tmp_path: Path) -> None:
    commands = {
        engine: " ".join(engine_of(engine).serve(made("dspark").weights.folded(), "my drafter", "org/target"))
        for engine in ("vllm", "sglang", "llama.cpp")
    }
    words = shlex.split(commands["vllm"])
    assert words[:4] == ["VLLM_USE_V2_MODEL_RUNNER=1", "vllm", "serve", "org/target"]
    assert json.loads(words[-1]) == {"method": "dspark", "model": "my drafter", "num_speculative_tokens": 4}
    assert "--speculative-algorithm DSPARK --speculative-dspark-block-size 4" in commands["sglang"]
    assert "hf download org/target" in commands["llama.cpp"] and "--target-model-dir TARGET" in commands["llama.cpp"]
    local = engine_of("llama.cpp").serve(made("dspark").weights.folded(), "my drafter", str(tmp_path))
    assert f"convert_hf_to_gguf.py {tmp_path} " in local[0] and f"--target-model-dir {tmp_path} " in local[1]
    assert "TARGET" not in " ".join(local) and "hf download" not in " ".join(local)
    assert "--spec-type draft-dspark --spec-draft-n-max 4" in commands["llama.cpp"]
    eagle = engine_of("sglang").serve(made("eagle3").weights.folded(), "d", "t")[0]
    assert "--speculative-algorithm EAGLE3 --speculative-num-steps 4" in eagle and "draft-tokens 5" in eagle


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("Qwen3NextForCausalLM", " --mamba-scheduler-strategy extra_buffer"),
        ("Qwen3_5MoeForConditionalGeneration", " --mamba-scheduler-strategy extra_buffer"),
        ("Gemma4ForConditionalGeneration", " --attention-backend triton"),
        ("Qwen3ForCausalLM", " --speculative-dflash-block-size 4"),
    ],
)
def test_sglang_has_flags_of_the_targets_family(tmp_path: Path, architecture: str, flags: str) -> None:
    """In the command that an export prints, and in that which starts it; a server without drafts needs none."""
    facts = replace(FACTS, architectures=(architecture,))
    engine = engine_of("sglang")
    assert export_drafter(made("dflash"), engine, tmp_path / "d", facts).commands[-1].endswith(flags)
    assert export_drafter(made("dflash"), engine_of("vllm"), tmp_path / "v", facts).commands[-1].endswith("}'")
    plan = Launch("T", Speculation("dflash", 3, "D"), architectures=(architecture,), extra=("--last", "1"))
    assert shlex.join(engine.command(plan)).endswith(f"{flags} --last 1"), "the user's flags win"
    plain = shlex.join(engine.command(replace(plan, speculation=None)))
    assert "mamba" not in plain and "triton" not in plain


def test_engines_run_dflash_2_under_dflashs_name() -> None:
    commands = {
        engine: " ".join(engine_of(engine).serve(made("dflash2").weights.folded(), "d", "t"))
        for engine in ("vllm", "speculators", "sglang", "llama.cpp")
    }
    for engine in ("vllm", "speculators"):
        words = shlex.split(commands[engine])
        assert words[0] == "VLLM_USE_V2_MODEL_RUNNER=1", "V1 cannot draw from candidates"
        assert json.loads(words[-1]) == {"method": "dflash", "model": "d", "num_speculative_tokens": 3}
    assert "--speculative-algorithm DFLASH --speculative-dflash-block-size 4" in commands["sglang"]
    assert "--spec-type draft-dflash --spec-draft-n-max 3" in commands["llama.cpp"]


def test_engines_run_lilicorr_under_dflashs_name_and_find_its_head() -> None:
    weights = made("lilicorr", conv_kernel_size=2, conv_group_size=8).weights.folded()
    for engine in ("vllm", "sglang"):
        written = engine_of(engine).write(weights, FACTS)
        section = written.config["dflash_config"]
        assert written.config["architectures"] == ["LiLiCorrDraftModel"] and section["projector_type"] == "lilicorr"
        assert (section["lilicorr_candidate_topk"], section["lilicorr_hidden_size"]) == (4, 16)
        assert (section["lilicorr_vector_eps"], section["lilicorr_logit_scale"]) == (1e-4, 8.0)
        assert (section["conv_kernel_size"], section["conv_group_size"]) == (2, 8)
        assert {"lilicorr.layers.1.attn.in_proj_weight", "lilicorr.feature_norm.bias"} <= set(written.tensors)
    words = shlex.split(engine_of("vllm").serve(weights, "d", "t")[0])
    assert words[0] == "VLLM_USE_V2_MODEL_RUNNER=1"
    assert json.loads(words[-1]) == {"method": "dflash", "model": "d", "num_speculative_tokens": 3}
    assert (
        "--speculative-algorithm DFLASH --speculative-dflash-block-size 4"
        in engine_of("sglang").serve(weights, "d", "t")[0]
    )


def test_calibration_is_named_where_an_engine_has_no_place_for_it(tmp_path: Path) -> None:
    calibrated = replace(made("dspark"), metadata={"calibration": {"temperatures": [1.0] * 4}})
    exported = export_drafter(calibrated, engine_of("vllm"), tmp_path / "out", FACTS)
    assert exported.written.fallbacks == [
        "The calibration of confidences stays in outrider.json; vllm reads them as they are."
    ]
    assert "## Left out" in (tmp_path / "out" / "README.md").read_text()
    (sglang,) = export_drafter(calibrated, engine_of("sglang"), tmp_path / "sglang", FACTS).written.fallbacks
    assert "outrider calibrate --export-sglang DIR" in sglang and "--speculative-dspark-confidence-sts-path" in sglang
    metadata = {**calibrated.metadata, "recommended": {"confidence_threshold": 0.25}}
    block = export_drafter(replace(made("dflash"), metadata=metadata), engine_of("zlab"), tmp_path / "zlab", FACTS)
    assert block.written.fallbacks == [
        "The calibration of confidences stays in outrider.json; zlab computes none for dflash.",
        "What is recommended (confidence threshold 0.25) stays in outrider.json, where zlab does not look.",
    ]


def test_exchange_dialects_name_their_makers_commands() -> None:
    (zlab,) = engine_of("zlab").serve(made("dflash").weights.folded(), "my drafter", "org/target")
    parse = importlib.import_module("dflash.cli")._parser().parse_args
    seen = parse(shlex.split(zlab)[1:])
    assert (seen.model, seen.draft, seen.prompt) == ("org/target", "my drafter", "PROMPT")
    where, deepspec = engine_of("deepspec").serve(made("dspark").weights.folded(), "my drafter", "org/target")
    assert where.startswith("# ") and "DeepSpec" in where
    assert shlex.split(deepspec)[2:] == ["--target_name_or_path", "org/target", "--draft_name_or_path", "my drafter"]
    reason, ours = engine_of("speculators").serve(made("mtp").weights.folded(), "d", "t")
    assert "for exchange" in reason and ours.startswith("outrider generate")


def test_another_target_and_an_existing_directory_are_refused(tmp_path: Path) -> None:
    other = replace(FACTS, num_layers=6)
    with pytest.raises(ValueError, match=r"num_target_layers is 5, toys/target has 6"):
        export_drafter(made("dflash"), engine_of("zlab"), tmp_path / "out", other)
    with pytest.raises(ValueError, match="exists: export to a new directory"):
        export_drafter(made("dflash"), engine_of("zlab"), tmp_path, FACTS)
    with pytest.raises(ValueError, match=r"--to tensorrt is none of vllm, sglang, llama\.cpp"):
        engine_of("tensorrt")


def test_training_does_not_go_on_from_a_head_that_is_not_the_targets(tmp_path: Path) -> None:
    save_drafter(made("eagle3", "head"), tmp_path / "d")
    recipe = going_on("eagle3", tmp_path / "d", tmp_path / "out")
    with pytest.raises(ValueError, match="has an LM head or embedding of its own"):
        load_start(recipe, toy_target())


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A target's directory, tied, without a tokenizer: exports need none."""
    model = toy_target("qwen3").model
    model.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_a_targets_facts_come_from_its_files(toy: Path) -> None:
    model = toy_target("qwen3").model
    facts = target_facts(str(toy), torch.float32)
    assert facts.architectures == ("Qwen3ForCausalLM",) and facts.num_layers == 5
    assert torch.equal(facts.embedding_VH, model.get_input_embeddings().weight)
    assert torch.equal(facts.head_VH, model.get_output_embeddings().weight)


def test_without_an_engine_export_shows_who_takes_the_drafter(tmp_path: Path, toy: Path) -> None:
    save_drafter(replace(made("dspark", draft_vocab_size=VD), metadata={"target": str(toy)}), tmp_path / "d")
    shown = CliRunner().invoke(app, ["export", str(tmp_path / "d")], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.exception
    table, answers = shown.output.split(MARKS)
    assert all(len(line.rstrip()) <= 80 for line in table.splitlines())
    assert re.search(r"dspark +speculators +DeepSpec\+ +DeepSpec +- +DeepSpec\+ +speculators", table)
    able, unable = [engine.name for engine in exporters() if engine.name != "zlab"], "--to zlab: it takes no dspark"
    assert all(f"--to {name} --out OUT writes {tmp_path / 'd'}" in answers for name in able) and unable in answers
    half = CliRunner().invoke(app, ["export", str(tmp_path / "d"), "--to", "vllm"])
    assert "--to ENGINE and --out OUT go together" in str(half.exception)
    save_drafter(replace(made("dspark"), metadata={"target": str(tmp_path / "moved")}), tmp_path / "e")
    gone = CliRunner().invoke(app, ["export", str(tmp_path / "e")])
    assert f"{tmp_path / 'e'} names this target: give another with --target." in str(gone.exception)


def test_the_commands_line(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    save_drafter(replace(made("eagle3"), metadata={"target": str(toy), "step": 3}), tmp_path / "d")
    out = tmp_path / "out"
    arguments = ["export", str(tmp_path / "d"), "--to", "vllm", "--out", str(out), "--dtype", "bfloat16"]
    exported = runner.invoke(app, arguments)
    assert exported.exit_code == 0, exported.output
    assert "vllm serve" in exported.output and "lm_head" not in exported.output
    again = runner.invoke(app, arguments)
    assert isinstance(again.exception, ValueError) and "exists: export to a new directory" in str(again.exception)
    seen = runner.invoke(app, ["inspect", str(out), "--tensors"])
    assert seen.exit_code == 0, seen.output
    for words in (
        "dialect                    speculators",
        "method                     eagle3",
        "aux layers (outputs)       0, 1, 3",
        "  as hidden states         1, 2, 4",
        "drafts per round           4",
        "stored beside the drafter  LM head",
        "bfloat16",
        "layers.0.self_attn.q_proj.weight",
        "[32, 64]",
    ):
        assert words in seen.output, words
    save_drafter(made("dflash"), tmp_path / "nameless")
    unnamed = runner.invoke(app, ["export", str(tmp_path / "nameless"), "--to", "zlab", "--out", str(tmp_path / "x")])
    assert "does not say which target it is for: name it with --target" in str(unnamed.exception)
    (out / "outrider.json").unlink()
    verifier = ["export", str(out), "--to", "sglang", "--out", str(tmp_path / "y")]
    assert runner.invoke(app, verifier).exit_code == 0, "speculators' verifier names the target, as inspect says"
    monkeypatch.chdir(tmp_path)
    for engine in exporters():
        made_for = "eagle3" if "eagle3" in engine.exports() else "dflash" if "dflash" in engine.exports() else "dspark"
        save_drafter(made(made_for), tmp_path / "any")
        local = runner.invoke(app, ["export", "any", "--to", engine.name, "--out", engine.name, "--target", toy.name])
        assert str(toy) in local.output, "a target of a relative path is named by its directory"


def test_inspect_says_what_it_can_of_what_it_does_not_know(tmp_path: Path, toy: Path) -> None:
    runner = CliRunner()
    unknown = runner.invoke(app, ["inspect", str(toy)])
    assert "architectures  ['Qwen3ForCausalLM']" in unknown.output and "million" in unknown.output
    assert "is not a drafter dialect Outrider reads" in str(unknown.exception)
    export_drafter(made("eagle3"), engine_of("sglang"), tmp_path / "d", FACTS)
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    del raw["outrider"]
    (tmp_path / "d" / "config.json").write_text(json.dumps(raw))
    nameless = runner.invoke(app, ["inspect", str(tmp_path / "d")])
    assert "an unstated number of layers" in nameless.output and "0, 1, 3" in nameless.output
    named = runner.invoke(app, ["inspect", str(tmp_path / "d"), "--target", str(toy)])
    assert "fits targets with          5 layers" in named.output

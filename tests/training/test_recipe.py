"""Recipes: every one in the project loads, overrides reach their field, and mistakes are named in time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError

from outrider.checkpoints.registry import methods
from outrider.data.regenerate import DataSection, PromptSource
from outrider.drafters.config import mask_token_id
from outrider.drafters.dflash import DFlashConfig
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.target.model import Target
from outrider.training.dataset import recipe_prompts
from outrider.training.recipe import Recipe, apply_override, load_recipe
from outrider.training.setup import prepare
from outrider.utils.packaged import PACKAGE
from tests.toys.targets import toy_target

RECIPES = sorted((PACKAGE / "recipes").glob("**/*.yaml"))
MINIMAL = "target: some/model\nout: runs/x\ndata: {prompts: [{path: train_math}]}\n"


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    (tmp_path / "r.yaml").write_text(MINIMAL)
    return tmp_path / "r.yaml"


ONE_MACHINE_S = {"threads", "device", "precision", "feature_cache_gb"}  # `auto` and null find them on every machine


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_of_the_project_loads(path: Path) -> None:
    recipe = load_recipe(path)
    raw = yaml.safe_load(path.read_text())
    length = {name: raw["optimizer"][name] for name in ("steps", "epochs") if name in raw["optimizer"]}
    assert recipe.target == raw["target"] and recipe.optimizer.model_dump().items() >= length.items() and length
    assert not ONE_MACHINE_S & raw.keys()
    assert load_recipe(path, ["optimizer.epochs=null", "optimizer.steps=3"]).optimizer.steps == 3
    assert Recipe.model_validate(recipe.model_dump()) == recipe


def test_tables_of_experiments_are_for_every_machine() -> None:
    for path in (PACKAGE / "experiments").glob("*.yaml"):
        raw = yaml.safe_load(path.read_text())
        assert raw["rows"] and not ONE_MACHINE_S & {*raw, *raw["set"]}, path.name


def test_every_method_has_a_recipe_for_the_embedded_model() -> None:
    found = {load_recipe(path).drafter.algorithm for path in (PACKAGE / "recipes" / "smollm2-135m").glob("*.yaml")}
    assert found == {method.name for method in methods()}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_that_comments_name_exist(path: Path) -> None:
    comments = " ".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    for name in re.findall(r"[\w./-]+\.yaml", comments):
        assert (path.parent / name).is_file(), name


def test_there_are_recipes_and_the_demo_uses_shipped_prompts_only() -> None:
    assert len(RECIPES) >= 2
    prompts = recipe_prompts(load_recipe(Path("demo")).data)
    assert len(prompts) == 240 and all(len(p.turns) == 1 for p in prompts if p.id.startswith("train-chat"))


def test_overrides_of_top_nested_and_list_values(minimal: Path) -> None:
    overrides = [
        "seed=5",
        "optimizer.learning_rate=2e-3",
        "drafter.target_layer_ids=[3, 9]",
        "drafter.enable_confidence_head=false",
        "drafter.draft_vocab_size=null",
        "data.prompts=[{path: a.jsonl, limit: 2}, {path: b=c.jsonl}]",
        "objective={ce: 1.0, l1: 0}",
        "out=runs/a=b",
        "optimizer.steps=10",
        "optimizer.steps=20",
    ]
    recipe = load_recipe(minimal, overrides)
    assert recipe.seed == 5 and recipe.out == "runs/a=b" and recipe.optimizer.steps == 20
    assert recipe.optimizer.learning_rate == 2e-3
    assert recipe.drafter.target_layer_ids == (3, 9) and recipe.drafter.draft_vocab_size is None
    assert not recipe.drafter.enable_confidence_head
    assert [(s.path, s.limit) for s in recipe.data.prompts] == [("a.jsonl", 2), ("b=c.jsonl", None)]
    assert (recipe.objective.ce, recipe.objective.l1, recipe.objective.confidence) == (1.0, 0.0, 1.0)
    assert load_recipe(minimal).seed == 0 and load_recipe(minimal).optimizer.steps == 1000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.step=3"], r"optimizer\.step: Extra inputs"),
        (["speed=9"], "speed: Extra inputs"),
        (["optimizer.steps=0"], r"optimizer\.steps: .*greater than or equal to 1"),
        (["optimizer.steps=many"], r"optimizer\.steps: .*integer"),
        (["drafter.markov_head_type=lstm"], r"drafter\.markov_head_type: .*'vanilla', 'gated' or 'rnn'"),
        (["drafter.algorithm=eagle"], r"drafter\.algorithm: .*'eagle'.*dflash, dspark"),
        (["data.prompts=[]"], "data: .*prompts .at least 1 source"),
        (["data.prompts=[{file: a}]"], r"data\.prompts\.0\.path: Field required"),
        (["data=null"], "data: "),
        (["precision=float16"], "precision: Input should be 'auto', 'float32' or 'bfloat16'"),
        (["feature_cache_gb=-1"], r"feature_cache_gb\S*: .*greater than or equal to 0"),
        (["optimizer.warmup_fraction=1"], r"optimizer\.warmup_fraction: .*less than 1"),
        (["optimizer.steps"], "'optimizer.steps' is not of the form key.path=value"),
        (["=3"], "'=3' is not of the form"),
        (["seed.x=3"], "seed: .*valid integer"),
        (["target.name=3"], "target is not a section"),
        (["data.prompts.0.path=x"], "prompts is not a section"),
        (["data.prompts=[{path: x"], r"override 'data\.prompts=\[\{path: x': the value is not valid YAML"),
    ],
)
def test_mistakes_in_overrides_name_the_field(minimal: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(minimal, overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target: [", r"r\.yaml: not valid YAML"),
        ("- a\n- b\n", "a recipe is a YAML mapping"),
        ("", "a recipe is a YAML mapping"),
        ("target: a\nout: b\n", "data: Field required"),
        (MINIMAL + "drafters: {}\n", "drafters: Extra inputs"),
        (
            MINIMAL + "drafter:\n  markov_rnk: 3\n",
            r"drafter\.markov_rnk: no field of dspark drafters, which have .*markov_rank",
        ),
    ],
)
def test_mistakes_in_the_file_name_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(path, ["seed=1"] if text else [])
    assert str(path) in str(caught.value) and not isinstance(caught.value, ValidationError)


def test_a_missing_recipe_says_where_recipes_are(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("")
    with pytest.raises(ValueError, match=r"mine is a directory: give .*recipe\.yaml"):
        load_recipe(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"no recipe .*nope\.yaml: there is no such file; .*outrider recipe lists"):
        load_recipe(tmp_path / "nope.yaml")
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(ValueError, match=r"recipe\.yml: .*; did you mean .*recipe\.yaml\?"):
        load_recipe(tmp_path / "recipe.yml")


def test_a_packaged_recipe_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no such file is; it may go on from the packaged drafter."""
    monkeypatch.chdir(tmp_path)
    name, file = Path("smollm2-135m/dspark"), PACKAGE / "recipes" / "smollm2-135m" / "dspark.yaml"
    for spelled in (name, name.with_suffix(".yaml"), "recipes" / name.with_suffix(".yaml")):
        assert load_recipe(spelled) == load_recipe(file)
    start = load_recipe(name, ["start_from=smollm2-135m-dspark"]).start_from
    assert start == str(PACKAGE / "models" / "smollm2-135m-dspark")
    name.mkdir(parents=True)
    assert load_recipe(name) == load_recipe(file), "a directory is no recipe"
    name.rmdir()
    name.write_text(MINIMAL)
    assert load_recipe(name).target == "some/model", "a file of that name comes first"


def test_each_method_has_the_loss_of_its_paper_unless_the_recipe_has_another(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL)

    def weights(*overrides: str) -> list[float]:
        found = load_recipe(path, overrides).objective
        return [found.ce, found.l1, found.confidence, found.decay]

    assert weights() == weights("drafter.markov_rank=8") == [0.1, 0.9, 1.0, 4.0], "DSpark, as in DeepSpec's configs"
    for rows, decay in ((8, 4), (10, 5), (16, 7), (9, 4.5), (13, 6), (4, 2), (19, 8)):
        assert weights("drafter.algorithm=dflash", f"drafter.block_size={rows}") == [1.0, 0.0, 0.0, decay]
    assert weights("drafter.algorithm=dflash2") == [1.0, 0.0, 0.0, 4.0], "of its default, 8 rows"
    mixed = weights("drafter.algorithm=dflash", "drafter.block_size=16", "objective.l1=0.5")
    assert mixed == [1.0, 0.5, 0.0, 7.0], "only what is set differs"
    saved = load_recipe(path, ["drafter.algorithm=dflash", "objective.decay=3"])
    again = Recipe.model_validate(saved.model_dump())
    assert again.objective == saved.objective and again.objective.decay == 3
    with pytest.raises(ValueError, match=r"drafter\.algorithm.*objective\.ce"):
        load_recipe(path, ["drafter.algorithm=nope", "objective.ce=-1"])


def prompt_file(path: Path, prompts: dict[str, list[str]]) -> str:
    path.write_text("".join(json.dumps({"id": name, "turns": turns}) + "\n" for name, turns in prompts.items()))
    return str(path)


def test_prompts_are_interleaved_filtered_and_limited(tmp_path: Path) -> None:
    few = prompt_file(tmp_path / "few.jsonl", {f"f{i}": ["short", "second"] for i in range(2)})
    many = prompt_file(tmp_path / "many.jsonl", {f"m{i}": ["x" * (9 if i % 2 else 1)] for i in range(16)})
    short = PromptSource(path=many, max_characters=5, limit=6)
    prompts = recipe_prompts(DataSection(prompts=[PromptSource(path=few, max_turns=1), short]))
    assert [p.id for p in prompts] == ["m0", "f0", "m2", "m4", "m6", "f1", "m8", "m10"]
    assert all(len(p.turns) == 1 for p in prompts)
    assert len(recipe_prompts(DataSection(prompts=[PromptSource(path=few)]))[0].turns) == 2


def test_duplicate_prompt_ids_are_refused(tmp_path: Path) -> None:
    first = prompt_file(tmp_path / "a.jsonl", {"x": ["one"], "y": ["two"]})
    second = prompt_file(tmp_path / "b.jsonl", {"y": ["three"]})
    with pytest.raises(ValueError, match=r"1 prompt ids of data\.prompts belong to more than one conversation \(y\)"):
        recipe_prompts(DataSection(prompts=[PromptSource(path=first), PromptSource(path=second)]))


def test_prompt_paths_start_at_the_recipe_where_such_a_file_exists(minimal: Path) -> None:
    prompt_file(minimal.parent / "mine.jsonl", {"x": ["one"]})
    recipe = load_recipe(minimal, ["data.prompts=[{path: mine.jsonl}, {path: other.jsonl}, {path: train_math}]"])
    assert [s.path for s in recipe.data.prompts] == [str(minimal.parent / "mine.jsonl"), "other.jsonl", "train_math"]


class StubTokenizer:
    """The few things mask_token_id asks of a tokenizer."""

    def __init__(self, mask: int | None = None, template: str | None = "<|im_start|> ... <|im_end|>") -> None:
        self.mask_token_id, self.chat_template = mask, template
        self.bos_token_id, self.eos_token_id, self.pad_token_id = 2, 1, 0
        self.unk_token, self.unk_token_id = "<unk>", 9
        self.added = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 9, "<file>": 5, "<jupyter>": 7}
        self.added |= {"<|im_start|>": 11, "<|im_end|>": 12, "<beyond>": 97}

    def get_added_vocab(self) -> dict[str, int]:
        return self.added

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.added.get(token, self.unk_token_id)


def stubbed(family: str = "llama", tokenizer: StubTokenizer | None = None) -> Target:
    target = toy_target(family)
    target.tokenizer = tokenizer or StubTokenizer()
    return target


def test_the_mask_token_is_the_recipes_the_tokenizers_or_the_last_unused_special_one() -> None:
    assert mask_token_id(stubbed(tokenizer=StubTokenizer(mask=33)), None) == 33
    assert mask_token_id(stubbed(tokenizer=StubTokenizer(mask=33)), "<file>") == 5
    assert mask_token_id(stubbed(), "<unk>") == 9, "the unknown token itself may be chosen"
    with pytest.raises(ValueError, match="'<nope>' is not one token of toy-llama"):
        mask_token_id(stubbed(), "<nope>")
    last = stubbed()
    assert mask_token_id(last, None) == 9, "not the template's 11 and 12, not 97, which the target lacks"
    bare = StubTokenizer(template=None)
    assert mask_token_id(stubbed(tokenizer=bare), None) == 12
    bare.added = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    with pytest.raises(ValueError, match=r"no spare special token.*drafter\.mask_token"):
        mask_token_id(stubbed(tokenizer=bare), None)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"])
def test_a_drafter_takes_its_shapes_from_the_target(family: str) -> None:
    config = DSparkConfig.from_target(stubbed(family), num_aux_layers=2, draft_vocab_size=1000)
    assert isinstance(config, DSparkConfig)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 48, 8)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.vocab_size, config.draft_vocab_size, config.max_position_embeddings) == (97, 97, 256)
    assert config.num_target_layers == 5 and config.target_layer_ids == (1, 2)
    assert config.rope_theta == 5000.0 and config.mask_token_id == 9
    assert (config.block_size, config.gamma, config.markov_rank) == (7, 7, 64)
    assert torch.isfinite(DSpark(config).fc.weight).all()


def test_a_drafter_follows_the_recipe() -> None:
    chosen = {"target_layer_ids": [3, -1], "block_size": 5, "sliding_window": 9, "draft_vocab_size": 20}
    config = DFlashConfig.from_target(stubbed(), **chosen)
    assert type(config) is DFlashConfig and config.target_layer_ids == (-1, 3) and config.gamma == 4
    assert config.sliding_window == 9 and config.draft_vocab_size == 20
    heads = {"markov_head_type": "gated", "markov_rank": 8, "enable_confidence_head": False}
    dspark = DSparkConfig.from_target(stubbed(), num_aux_layers=1, sample_from_anchor=False, **heads)
    assert isinstance(dspark, DSparkConfig) and dspark.gamma == 6 and dspark.target_layer_ids == (2,)
    assert {name: getattr(dspark, name) for name in heads} == heads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": [1, 4]}, "this drafter cannot read the final layer, 4"),
        ({"num_aux_layers": 3}, r"num_aux_layers is 3, and a target of 5 layers has 2 from"),  # evenly: 1, 1.5, 2
        ({"algorithm": "dflash", "block_size": 1, "num_aux_layers": 2}, "block_size 1"),
        ({"algorithm": "dflash", "sample_from_anchor": True, "num_aux_layers": 2}, r"drafter\.sample_from_anchor"),
        ({"markov_rank": 0, "num_aux_layers": 2}, "confidence_head_with_markov"),
        ({"num_aux_layers": 2}, r"data\.max_prompt_tokens \+ data\.max_new_tokens is 768"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_before_responses_are_made(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    raw = {"target": "toy", "out": str(tmp_path / "out"), "data": {"prompts": [{"path": "train_math"}]}}
    recipe = Recipe.model_validate({**raw, "drafter": changes})
    with pytest.raises(ValueError, match=message):
        prepare(recipe, stubbed())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("field", ["optimizer.checkpoint_activations", "compile"])
def test_what_is_done_layer_by_layer_needs_layers(tmp_path: Path, field: str) -> None:
    raw: dict[str, Any] = {"target": "toy", "out": str(tmp_path / "out"), "data": {"prompts": [{"path": "train_math"}]}}
    apply_override(raw, f"{field}=true")
    for algorithm in ("eagle3", "medusa", "hydra", "mtp"):
        recipe = Recipe.model_validate({**raw, "drafter": {"algorithm": algorithm}})
        with pytest.raises(ValueError, match=f"{field}=true works on draft layers .* kind {algorithm} has no stack"):
            prepare(recipe, stubbed())
    assert not (tmp_path / "out").exists()
    layered = Recipe.model_validate({**raw, "drafter": {"algorithm": "dflash", "num_aux_layers": 2}})
    with pytest.raises(ValueError, match="no GPU" if field == "compile" else r"data\.max_prompt_tokens"):
        prepare(layered, stubbed())
    if field == "compile":
        twice = Recipe.model_validate({**raw, "drafter": {"algorithm": "dflash_input", "num_aux_layers": 2}})
        with pytest.raises(ValueError, match="dflash_input runs its context through the draft layers"):
            prepare(twice, stubbed())

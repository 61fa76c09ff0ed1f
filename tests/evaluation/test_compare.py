"""Results side by side: the same conditions or a refusal, seeds in groups, and every file and picture there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.checkpoints.checkpoint import Checkpoint, save_drafter, with_block_size
from outrider.checkpoints.describe import DrafterInfo, TrainingInfo
from outrider.checkpoints.registry import method_of
from outrider.drafters.base import DraftCall, Drafter, DrafterWeights
from outrider.drafters.dflash import BlockDrafter, DFlash
from outrider.drafters.dspark import DSpark
from outrider.drafters.medusa import Medusa, MedusaConfig
from outrider.evaluation.comparison import (
    HEADINGS,
    Group,
    LabelledResults,
    answers,
    compare,
    difference_interval,
    figures_of,
    load_comparison,
    load_results,
    markdown,
    notes,
    rows,
    write_comparison,
)
from outrider.evaluation.draft_cost import (
    CostPoint,
    DraftCosts,
    DrafterCost,
    cost_cells,
    measure_costs,
    sample_text,
)
from outrider.evaluation.results import Results
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import load_target
from outrider.training.batches import Schedule
from tests.toys.command_line import Run, check_error
from tests.toys.dialects import config_of
from tests.toys.evaluations import results, task_result
from tests.toys.targets import randomise, toy_config, toy_samples, toy_target

SHIPPED = Path(__file__).parents[2] / "docs" / "results"


def loaded(found: Results, label: str | None = None, where: str = "x") -> LabelledResults:
    assert found.drafter is not None
    return LabelledResults(label or found.drafter.label, Path(where), found)


def save(found: Results, directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "results.json").write_text(found.model_dump_json())
    return directory


def test_figures_means_and_seeds() -> None:
    comparison = compare([loaded(results("a", 2.0)), loaded(results("b", 1.4)), loaded(results("a", 3.0, seed=1))])
    assert [group.label for group in comparison.groups] == ["a", "b"] and not comparison.differences
    a = comparison.groups[0]
    assert [entry.drafter.training.seed for entry in a.entries if entry.drafter.training] == [0, 1]
    tau = a.spreads["math"]["accepted_length"]
    assert tau is not None and (tau.mean, tau.low, tau.high) == (2.5, 2.0, 3.0)
    first = {figures.task: figures for figures in a.entries[0].figures}
    assert first["math"].draft_ms == 5 and first["math"].verify_ms == pytest.approx(30)
    assert first["math"].acceptance_rate == 0.5  # 5 rounds of 2 accepted drafts, 20 verified
    assert first["math"].reached == [10, 5] and first["chat"].reached == [10, 0]
    one_verified = {"acceptance_histogram": [2, 8, 0], "conditional_acceptance": [0.8, None]}
    assert figures_of(task_result("math", 2.0, **one_verified)).reached == [10, 0], "position 2 was never judged"
    assert first["mean"].accepted_length == 1.5 and first["mean"].turns == 8
    assert not comparison.budgets, "seeds and seconds are no budget"


def test_rows_list_every_result() -> None:
    comparison = compare([loaded(results("a", 2.0)), loaded(results("a", 3.0, seed=1)), loaded(results("b"))])
    found = rows(comparison)
    assert [row[:2] for row in found[:4]] == [
        ["math", "a, 2 results"], ["math", "  seed 0"], ["math", "  seed 1"], ["math", "b"]
    ]  # fmt: skip
    cells = dict(zip(HEADINGS, found[0], strict=True))
    assert cells["tau"] == "2.50 (2.00-3.00)" and cells["speedup"] == "2.00x" and cells["identical"] == "8/8"
    mean = dict(zip(HEADINGS, found[8], strict=True))
    assert mean["task"] == "mean" and mean["parameters"] == "8.0 M" and mean["minutes"] == "2.5"
    assert markdown(comparison).count("\n| ") == len(found)
    assert any("the same where they are recorded" in line for line in notes(comparison))
    assert "device cpu, dtype float32" in notes(comparison)[0]


def test_questions_are_answered_with_the_spread_of_the_seeds(tmp_path: Path) -> None:
    """Differences to the first label; curves where the metrics of every seed are beside its drafter."""
    found = [results("a", 2.0), results("a", 3.0, seed=1), results("b", 2.2), results("c", 2.5), results("c", seed=1)]
    for number, one in enumerate(found[:3]):
        run = tmp_path / f"run-{number}"
        run.mkdir()
        one.settings["drafter"] = str(run / "drafter")
        lines = [{"group": "held_out", "step": step, "expected_length_greedy": 1 + step / 10} for step in (5, 10)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    questions = {"which": ["a", "b", "c"], "others": ["b", "c"]}
    comparison = compare([loaded(one) for one in found], questions=questions)
    rows_of_which = answers(comparison)[:3]
    assert rows_of_which[0] == ["which", "a", "1.75 (1.50-2.00)", "", "", ""]
    assert rows_of_which[1] == ["which", "b", "1.60", "-0.15", "-", "0.3"], "prompts were not recorded"
    assert [entry.curve for entry in comparison.groups[0].entries] == 2 * [[(5, 1.5), (10, 2.0)]]
    assert not comparison.groups[2].entries[0].curve
    names = [path.name for path in write_comparison(comparison, tmp_path / "out")]
    assert names[-2:] == ["questions.png", "convergence.png"]
    assert "| which | b | 1.60 | -0.15 | - | 0.3 |" in (tmp_path / "out/comparison.md").read_text()
    assert load_comparison(tmp_path / "out/comparison.json").questions == questions
    with pytest.raises(ValueError, match="question 'which': no results are called d"):
        compare([loaded(one) for one in found], questions={"which": ["a", "d"]})


def test_the_interval_of_a_difference_is_that_of_prompts_and_seeds() -> None:
    """Beside the normal one of many prompts with ten rounds each, whose paired differences alone matter."""
    random = np.random.default_rng(5)
    hardness = random.normal(20, 5, 400)  # what the prompts have in common

    def group(label: str, gain: float, seeds: Sequence[float] = (0.0,)) -> Group:
        found = []
        for shift in seeds:
            tokens = (hardness + gain + shift + random.normal(0, 2, 400)).round()
            one = task_result("math", 2.0, by_prompt=[(int(count), 10) for count in tokens])
            found.append(loaded(results(label, seed=len(found), tasks=[one])))
        return compare(found).groups[0]

    def difference(first: Group, other: Group) -> NDArray[np.float64]:
        a, b = (np.array(group.entries[0].figures[0].by_prompt)[:, 0] / 10 for group in (first, other))
        return np.asarray(b - a)

    first, other = group("a", 0.0), group("b", 1.0)
    paired = difference(first, other)
    interval = difference_interval(first, other)
    half = 1.96 * paired.std() / 20
    assert interval == pytest.approx((paired.mean() - half, paired.mean() + half), abs=0.1 * half)
    assert difference_interval(first, first) == (0, 0)
    spread = difference_interval(first, group("c", 1.0, seeds=(-2.0, 2.0)))
    assert spread is not None and spread[1] - spread[0] == pytest.approx(0.4, abs=0.1), (
        "from the lower seed to the higher"
    )
    assert difference_interval(first, compare([loaded(results("d"))]).groups[0]) is None, "prompts were not recorded"
    idle = compare([loaded(results("e", tasks=[task_result("math", 2.0, by_prompt=[(0, 0)] * 400)]))]).groups[0]
    assert difference_interval(first, idle) is None, "no round, no length"


def test_a_question_of_the_command_line(run: Run, tmp_path: Path) -> None:
    """Its text may have an equals sign. Seeds without a common step of their curves have no convergence to draw."""
    given = []
    for number, one in enumerate([results("a"), results("a", seed=1), results("b")]):
        one.settings["drafter"] = str(tmp_path / f"run-{number}" / "drafter")
        given.append(save(one, tmp_path / f"run-{number}"))
        line = {"group": "held_out", "step": 5 + min(number, 1), "expected_length_greedy": 1.5}
        (tmp_path / f"run-{number}" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    command = ["compare", *given, "--out", tmp_path / "out"]
    for question, curves in (("at n=2=a,b", True), ("a alone=a", False)):
        status, out, error = run(*command, "--question", question)
        assert status == 0, error
        assert list(load_comparison(tmp_path / "out/comparison.json").questions) == [question.rpartition("=")[0]]
        assert ("convergence.png" in out) == curves
    for question in ("no names", "=a", "which=", "which= , "):
        status, _, error = run(*command, "--question", question)
        assert status and "give TEXT=NAME,NAME" in error
    with pytest.raises(ValueError, match="question 'which': name the results"):
        compare([loaded(results("a"))], questions={"which": []})


def test_ties_and_differences_from_plain_decoding_are_counted() -> None:
    wrong = task_result("math", 2.0, greedy_ties=1, greedy_mismatches=2)
    sampled = task_result("chat", 2.0, greedy_identical=None)
    found = rows(compare([loaded(results("a", tasks=[wrong, sampled]))]))
    place = HEADINGS.index("identical")
    assert [row[place] for row in found] == ["1/4, 1 tie, 2 DIFFER", "sampled", "sampled"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": {"cpu": "b", "threads": 2}}, "machine cpu: a (a), b (b)"),
        ({"machine": {"cpu": "a", "threads": 4}}, "machine threads: 2 (a), 4 (b)"),
        ({"versions": {"outrider": "0.2.0"}}, "version of outrider: 0.1.0 (a), 0.2.0 (b)"),
        ({"tasks": [task_result("math", 2.0)]}, "tasks: math, chat (a), math (b)"),
        ({"tasks": [task_result("math", 2.0, samples=3), task_result("chat", 1.0)]}, "samples of math: 4 (a), 3 (b)"),
        ({"tasks": [task_result("math", 2, prompts_sha256="o"), task_result("chat", 1)]}, "prompts of math: sha of"),
    ],
)
def test_other_conditions_are_refused_or_told(changes: dict[str, Any], message: str) -> None:
    both = [loaded(results("a")), loaded(results("b", **changes))]
    with pytest.raises(ValueError, match="not comparable: ") as refused:
        compare(both)
    assert message in str(refused.value) and "; " not in str(refused.value), "that and nothing else"
    told = compare(both, allow_different=True)
    assert len(told.differences) == 1 and message in told.differences[0]
    assert any(line.startswith("Differs: ") for line in notes(told))


@pytest.mark.parametrize("name", ["target", "max_new_tokens", "sampling", "device", "dtype"])
def test_other_settings_are_refused(name: str) -> None:
    settings = {**results("b").settings, name: {"temperature": 1.0} if name == "sampling" else "other"}
    with pytest.raises(ValueError, match="temperature" if name == "sampling" else name):
        compare([loaded(results("a")), loaded(results("b", settings=settings))])


def test_budgets_that_differ_are_told_not_refused() -> None:
    longer = results("b")
    assert longer.drafter is not None and longer.drafter.training is not None
    longer.drafter.training.steps = 200
    assert compare([loaded(results("a")), loaded(longer)]).budgets == ["steps: 100 (a), 200 (b)"]
    longer.drafter.training.anchors = 3000
    budgets = compare([loaded(results("a")), loaded(longer), loaded(results("a", seed=1))]).budgets
    assert budgets[1:] == ["seed 0, anchors: 2800 (a), 3000 (b)"], "other seeds have other samples"


def test_one_label_is_one_drafter() -> None:
    other = results("a")
    assert other.drafter is not None
    other.drafter.parameters = 9_000_000
    with pytest.raises(ValueError, match=r"'a' names different drafters: parameters: 8000000 \(one\), 9000000 \(two\)"):
        compare([loaded(results("a"), where="one"), loaded(other, where="two")])
    policy = {**results("a").settings, "policy": "ThresholdPolicy(threshold=0.5)"}
    with pytest.raises(ValueError, match="'a' names different drafters: policy"):
        compare([loaded(results("a")), loaded(results("a", settings=policy), where="two")])
    told = compare([loaded(results("a")), loaded(results("a", settings=policy), "b")])
    assert [group.verified for group in told.groups] == ["whole block", "ThresholdPolicy(threshold=0.5)"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "whole block"),
        ({"confidence_threshold": 0.25}, "while c >= 0.25"),
        ({"draft_length": 3}, "3 drafts"),
        ({"tree": 60}, "tree of 60"),
        ({"tree": 60, "draft_length": 16}, "16 nodes of a tree of 60"),
        ({"tree": 60, "draft_length": 64, "slots": 60}, "tree of 60"),
        ({"policy": "look-ahead+skip", "step_costs": "step costs measured on a day"}, "by cost (look-ahead+skip)"),
    ],
)
def test_what_was_verified_is_said_where_it_is_not_the_whole_block(options: dict[str, Any], said: str) -> None:
    settings = results("b").settings | {"draft_length": None, "confidence_threshold": None, "tree": None} | options
    other = results("b", settings=settings)
    told = compare([loaded(results("a")), loaded(other)])
    lines = [line for line in notes(told) if line.startswith("Verified")]
    assert lines == ([f"Verified where not the whole block: b {said}."] if options else [])
    assert other.verified == said and all(line in markdown(told) for line in lines)


def test_trees_of_two_sizes_are_two_drafters() -> None:
    def of(nodes: int) -> LabelledResults:
        found = results("a")
        assert found.drafter is not None
        info = found.drafter.model_copy(update={"nodes": nodes})
        return loaded(found.model_copy(update={"drafter": info}), where=f"tree-{nodes}")

    with pytest.raises(ValueError, match=r"'a' names different drafters: nodes: 16 \(tree-16\), 60 \(tree-60\)"):
        compare([of(16), of(60)])


def lossy(found: Results) -> Results:
    rule = {"rule": "typical acceptance", "epsilon": 0.09, "delta": 0.3}
    return found.model_copy(update={"settings": {**found.settings, "lossy": rule}})


def test_lossy_results_are_compared_only_when_asked_and_say_so(tmp_path: Path) -> None:
    wrong = [task_result("math", 2.0, greedy_identical=False, greedy_mismatches=1), task_result("chat", 1.0)]
    pair = [loaded(results("a")), loaded(lossy(results("b", tasks=wrong)))]
    with pytest.raises(ValueError, match=r"not comparable: verification: lossless \(a\), LOSSY: typical acceptance"):
        compare(pair)
    with pytest.raises(ValueError, match="'a' names different drafters: verification: lossless"):
        compare([pair[0], loaded(lossy(results("a")), where="y")], allow_different=True)
    told = compare(pair, allow_different=True)
    found = rows(told)
    assert [row[1] for row in found[:2]] == ["a", "b (LOSSY)"]
    assert found[1][HEADINGS.index("identical")] == "3/4", "a share, not a bug"
    note = "b: LOSSY: typical acceptance, epsilon 0.09, delta 0.3; its output is not the target's."
    assert note in notes(told) and note in markdown(told)
    write_comparison(told, tmp_path)
    assert "LOSSY" in (tmp_path / "comparison.json").read_text()


def test_what_a_verified_node_brings() -> None:
    """Ten rounds that accepted ten drafts: of 20 in chains of two, of 400 in trees of 40."""
    tree = results("tree", tasks=[task_result("math", 2.0, verified_drafts=400), task_result("chat", 2.0)])
    assert tree.drafter is not None
    tree.drafter.nodes = 40
    chain = results("chain")
    assert chain.drafter is not None
    chain.drafter.nodes = 2
    found = rows(compare([loaded(chain), loaded(tree)]))
    cells = [[row[HEADINGS.index(name)] for name in ("gamma", "per verified")] for row in found[:2]]
    assert cells == [["2", "50.0 %"], ["2 (40 nodes)", "2.5 %"]]


def test_long_names_that_differ_at_their_ends() -> None:
    base = results("a").settings
    names = [f"{'directory/' * 9}v{i}" for i in (1, 2)]
    pair = [loaded(results(x, settings=base | {"target": name})) for x, name in zip("ab", names, strict=True)]
    with pytest.raises(ValueError, match=r"target: directory/.*\.\.\..*v1 \(a\), .*v2 \(b\)"):
        compare(pair)


def test_a_directory_counts_once(run: Run) -> None:
    """Given twice it would be taken for two seeds."""
    shipped = SHIPPED / "shipped-greedy"
    assert run("compare", shipped)[0] == 0
    check_error(run("compare", shipped, f"other={shipped}/"), "shipped-greedy is given twice")


def test_a_directory_may_have_an_equals_sign(tmp_path: Path) -> None:
    directory = save(results("a"), tmp_path / "lr=1" / "eval")
    assert load_results(str(directory)).label == "a"
    assert load_results(f"mine={directory}").label == "mine" and load_results(f"mine={directory}").path == directory


def test_the_shipped_results_are_read_and_older_files_refused(tmp_path: Path) -> None:
    shipped = load_results(str(SHIPPED / "shipped-greedy"))
    assert shipped.drafter.gamma == 7 and shipped.label == "dspark"
    found = rows(compare([shipped]))
    per_verified = HEADINGS.index("per verified")
    assert len(found) == 4 and found[0][per_verified].endswith(" %")
    older = json.loads((SHIPPED / "shipped-greedy" / "results.json").read_text())
    for task in older["tasks"]:
        task["verified_drafts"] = None  # not recorded
    (tmp_path / "results.json").write_text(json.dumps(older))
    assert rows(compare([load_results(str(tmp_path))]))[0][per_verified] == "-"
    del older["drafter"]
    (tmp_path / "results.json").write_text(json.dumps(older))
    with pytest.raises(ValueError, match="that this version reads: drafter: Field required"):
        load_results(str(tmp_path))


def test_training_info_sums_all_trainings() -> None:
    earlier = {"step": 10, "anchors": 100, "training_seconds": 5.0}
    now = {"step": 20, "anchors": 200, "training_seconds": 7.0, "recipe": {"seed": 3, "drafter": {}}}
    info = TrainingInfo.of({**now, "history": [earlier]})
    assert info is not None and (info.steps, info.anchors, info.seconds, info.seed) == (30, 300, 12.0, 3)
    unknown = TrainingInfo.of({**now, "history": [{"step": 10}]})
    assert unknown is not None and (unknown.steps, unknown.anchors, unknown.seconds) == (30, None, None)
    other_seed = TrainingInfo.of({**now, "recipe": {"seed": 4, "drafter": {}}})
    other_recipe = TrainingInfo.of({**now, "recipe": {"seed": 3, "drafter": {"markov_rank": 3}}})
    assert other_seed is not None and other_recipe is not None
    assert info.recipe_sha256 == other_seed.recipe_sha256 != other_recipe.recipe_sha256
    assert TrainingInfo.of({"calibration": {}}) is None


def test_anchors_dealt_are_those_of_the_steps() -> None:
    schedule = Schedule(toy_samples(7), 3, 10, seed=1)
    taken = [sum(len(anchors) for _, anchors in schedule.step(step)) for step in range(9)]
    for steps in range(10):
        assert schedule.anchors_dealt(steps) == sum(taken[:steps])


def test_draft_costs_are_of_every_length_in_turns(toy: Path) -> None:
    target = load_target(str(toy / "target"))
    vocab = {"vocab_size": target.vocab_size, "draft_vocab_size": target.vocab_size}
    calls: list[tuple[str, int | None]] = []

    class Watched(BlockDrafter):
        name = ""

        def propose(self, found: Any, min_confidence: float = 0.0) -> Any:
            calls.append((self.name, found[0].limit))
            assert found[0].session.length == found[0].position - 1 and found[0].position > 20
            assert self.gamma == self.module.config.gamma == found[0].limit, "the block itself is so long"
            return super().propose(found, min_confidence)

    named = []
    for name, module in (("a", DSpark(toy_config(**vocab))), ("b", DFlash(toy_config(dspark=False, **vocab)))):
        randomise(module)
        drafter = Watched(DrafterWeights(module), target)
        drafter.name = name
        named.append((DrafterInfo(label=name, algorithm=name, gamma=drafter.gamma), drafter))
    tokens = sample_text(target, 40)
    assert len(tokens) == 40
    costs = measure_costs(target, named, 20, 3, {})
    assert [[point.gamma for point in one.points] for one in costs.drafters] == [[1, 2, 3, 4], [1, 2, 3]]
    for point in costs.drafters[0].points:
        assert point.proposed == point.gamma
        assert 0 < point.whole[0] <= point.whole[1] <= point.whole[2]
        assert point.whole[2] >= max(point.read[0], point.propose[0])
    # Five repeats, two of them not counted; both drafters at one length before the next, and not always the same first.
    assert len(calls) == 5 * 7
    orders, left = set(), list(calls)
    while left:
        gamma = left[0][1]
        turn, left = left[: 1 if gamma == 4 else 2], left[1 if gamma == 4 else 2 :]
        assert {length for _, length in turn} == {gamma}
        orders.add("".join(name for name, _ in turn))
    assert orders == {"a", "ab", "ba"}
    with pytest.raises(ValueError, match="reads 256 tokens"):
        measure_costs(target, named, 250, 3, {})


def test_blocks_of_another_size_are_the_same_weights() -> None:
    module = DSpark(toy_config())
    randomise(module)
    other = with_block_size(Checkpoint(DrafterWeights(module), {"calibration": {}, "step": 3}), 6)
    assert other.config.gamma == 6 and other.metadata == {"step": 3}
    for name, tensor in module.state_dict().items():
        assert (other.weights.module.state_dict()[name] == tensor).all(), name


@pytest.mark.parametrize("method", ["dspark", "dflash", "dflash2", "domino"])
def test_a_drafter_of_another_length_is_one_with_another_block_size(method: str) -> None:
    target, tokens = toy_target(), list(range(20, 31))
    module = method_of(method).module(config_of(method, block_size=6))
    randomise(module)
    weights = DrafterWeights(module)
    own = weights.serve(target)
    aux = target.forward(torch.tensor([tokens]), target.new_cache(20), own.aux_layers, logits=0).aux_BTLD
    assert aux is not None

    def drafted(drafter: Drafter, session: Any) -> list[int]:
        seen, source = SeenTokens(target.vocab_size), SeededSource(0)
        call = DraftCall(session, 5, SamplingParams(), seen=seen, source=source, limit=gamma, position=len(tokens) + 1)
        return drafter.propose([call])[0].tokens

    session = own.new_session(40)
    own.extend([session], [tokens], aux[0])
    rows = module.config.block_size - module.config.gamma
    for gamma in range(2, module.config.gamma):
        other = with_block_size(Checkpoint(weights, {}), gamma + rows).serve(target)
        theirs = other.new_session(40)
        other.extend([theirs], [tokens], aux[0])
        assert drafted(own.of_length(gamma), session) == drafted(other, theirs) and own.gamma == module.config.gamma
    gamma = 1  # DFlash 2's convolution sees three rows, and Domino corrects the second draft: their blocks keep these
    assert len(drafted(own.of_length(1), session)) == 1


@pytest.mark.parametrize("more", [{}, {"conv_kernel_size": 3, "conv_group_size": 8}])
def test_a_lattice_of_another_length_scores_fewer_positions(more: dict[str, int]) -> None:
    target, tokens = toy_target(), list(range(20, 31))
    module = method_of("lilicorr").module(config_of("lilicorr", block_size=6, **more))
    randomise(module)
    weights = DrafterWeights(module)
    own = weights.serve(target)
    aux = target.forward(torch.tensor([tokens]), target.new_cache(20), own.aux_layers, logits=0).aux_BTLD
    session = own.new_session(40)
    own.extend([session], [tokens], aux if aux is None else aux[0])
    for gamma in range(1, module.config.gamma):
        seen, source = SeenTokens(target.vocab_size), SeededSource(0)
        call = DraftCall(session, 5, SamplingParams(), seen=seen, source=source, limit=gamma, position=len(tokens) + 1)
        assert len(own.of_length(gamma).propose([call])[0].tokens) == gamma
    with pytest.raises(ValueError, match="block_size"):
        with_block_size(Checkpoint(weights, {}), module.config.block_size - 1)


def costs_of(machine: dict[str, Any], **milliseconds: list[float]) -> DraftCosts:
    """Medians as given, quartiles a tenth to either side."""
    drafters = []
    for name, found in milliseconds.items():
        whole = [(0.9e-3 * ms, 1e-3 * ms, 1.1e-3 * ms) for ms in found]
        points = [CostPoint(gamma=k, read=w, propose=w, whole=w, proposed=k) for k, w in enumerate(whole, start=1)]
        drafters.append(DrafterCost(info=DrafterInfo(label=name, algorithm=name, gamma=len(found)), points=points))
    return DraftCosts(target="toy", context=9, repeats=5, drafters=drafters, machine=machine, versions={})


def test_draft_costs_are_in_every_form_of_a_comparison(run: Run, tmp_path: Path) -> None:
    costs = costs_of({"cpu": "a", "threads": 2}, flat=[2.0, 2.0, 2.0], rising=[10.0, 20.0])
    cells = [["drafter", "1", "2", "3", "quartiles"], ["flat", "2.0", "2.0", "2.0", "1.8-2.2"]]
    assert cost_cells(costs) == [*cells, ["rising", "10.0", "20.0", "", "18.0-22.0"]]
    told = compare([loaded(results("a"))], costs=costs)
    assert told.draft_cost == costs and "| rising | 10.0 | 20.0 |  | 18.0-22.0 |" in markdown(told)
    (tmp_path / "cost.json").write_text(costs.model_dump_json())
    status, out, _ = run("compare", save(results("a"), tmp_path / "a"), "--draft-cost", tmp_path / "cost.json")
    assert status == 0 and "18.0-22.0" in out, "without --out too"


def test_draft_costs_of_another_machine_are_refused_or_told() -> None:
    costs = costs_of({"cpu": "b", "threads": 2}, flat=[2.0])
    with pytest.raises(ValueError, match=r"not comparable: machine cpu: a \(results\), b \(draft costs\)\. --allow"):
        compare([loaded(results("a"))], costs=costs)
    told = compare([loaded(results("a"))], allow_different=True, costs=costs)
    assert "Differs: machine cpu: a (results), b (draft costs)." in notes(told)


def test_drafters_are_named_before_the_target_is_loaded(run: Run) -> None:
    command = ("bench-drafters", "--target", "no/such-target")
    check_error(run(*command, "a=ngram", "a=ngram@3"), "two drafters have the name a")
    check_error(run(*command, "ngram", "ngram"), "two drafters have the name ngram")
    check_error(run(*command, "a=lm:"), "write ngram, ngram@8")
    check_error(run(*command, "a=ngram", "--tree", "b=16"), "--tree 'b=16': no drafter is called 'b'; there are a.")
    check_error(run(*command, "a=ngram", "--tree", "16"), "--tree '16': no drafter is called '16'")
    check_error(run(*command, "a=ngram", "--tree", "a=6,depth=0"), "write NODES[,depth=D][,top_k=K]")
    for text in ("a=0", "a=many"):
        check_error(run(*command, "a=ngram", "--block-size", text), f"--block-size '{text}': give NAME=NUMBER")


def test_from_eval_to_pictures(run: Run, toy: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "mine.jsonl"
    tasks.write_text('{"turns": ["one", "two"]}\n{"turns": ["three"]}\n')
    command = ("eval", "--target", toy / "target", "--drafter", toy / "drafter", "--tasks", tasks)
    for out, more in (("whole", ()), ("short", ("--block-size", 3, "--label", "three"))):
        found = run(*command, "--max-new-tokens", 12, "--out", tmp_path / out, *more)
        assert found[0] == 0, found[2]
    written = Results.model_validate_json((tmp_path / "short" / "results.json").read_text())
    assert written.drafter is not None and (written.drafter.label, written.drafter.gamma) == ("three", 3)
    assert (written.settings["device"], written.settings["dtype"]) == ("cpu", "float32")
    assert written.drafter.parameters and written.tasks[0].prompts_sha256 and written.tasks[0].verified_drafts
    cost = tmp_path / "cost.json"
    vocab = load_target(toy / "target").vocab_size
    sizes = {"hidden_size": 32, "vocab_size": vocab, "draft_vocab_size": vocab, "num_target_layers": 5}
    heads = Medusa(MedusaConfig(**sizes, num_heads=3, num_layers=1))
    randomise(heads)
    save_drafter(Checkpoint(DrafterWeights(heads)), tmp_path / "medusa")
    drafters = (f"dspark={toy / 'drafter'}", f"three={toy / 'drafter'}", f"tree={tmp_path / 'medusa'}")
    shapes = ("--block-size", "three=3", "--tree", "tree=6")
    measured = ("--target", toy / "target", "--context", 30, "--repeats", 3, "--out", cost)
    found = run("bench-drafters", *drafters, *shapes, *measured)
    assert found[0] == 0, found[2]
    costs = DraftCosts.model_validate_json(cost.read_text()).drafters
    assert [(one.info.label, one.info.gamma, one.info.nodes) for one in costs] == [
        ("dspark", 7, 7), ("three", 3, 3), ("tree", 3, 6)
    ]  # fmt: skip
    assert costs[2].points[-1].proposed == 6 and len(costs[2].points) == 3, "whole trees, by depth"
    out = tmp_path / "out"
    found = run("compare", tmp_path / "whole", tmp_path / "short", "--out", out, "--draft-cost", cost)
    assert found[0] == 0, found[2]
    assert "dspark" in found[1] and "three" in found[1] and "identical" in found[1] and "…" not in found[1]
    names = {"comparison.json", "comparison.md", "conditional_acceptance.png", "tau_speedup.png", "draft_cost.png"}
    names |= {"tau_speedup_all.png"}
    assert {path.name for path in out.iterdir()} == names
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in out.glob("*.png"))
    assert len(json.loads((out / "comparison.json").read_text())["groups"]) == 2


def test_mistakes(run: Run, tmp_path: Path) -> None:
    a, b = save(results("a"), tmp_path / "a"), save(results("b", machine={"cpu": "b"}), tmp_path / "b")
    check_error(run("compare", tmp_path), "has no results.json: give directories that outrider eval --out wrote")
    check_error(run("compare", a, b), "not comparable: machine cpu: a (a), b (b)")
    check_error(run("compare", a, "--draft-cost", tmp_path / "no.json"), "no draft costs")
    assert run("compare", a, b, "--allow-different")[0] == 0
    (b / "results.json").write_text("{}")
    check_error(run("compare", a, b), "is not a results.json that this version reads: tasks: Field required")

"""Typical acceptance: the rule by hand, its greedy limit, which path wins, and that it is lossy."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import outrider.evaluation.figures as plots
from outrider.decoding.generate import generate
from outrider.decoding.policies import FixedPolicy
from outrider.decoding.request import StopRules
from outrider.decoding.verification import TargetRows, TypicalAcceptance, lossy_note, verify
from outrider.drafters.draft import Draft
from outrider.sampling import SamplingParams
from tests.proof import cases as chains
from tests.proof import tree_cases as trees
from tests.proof.cases import TOLERANCE, VISIBLE, WARPS
from tests.proof.enumeration import RequestFactory, exact_output_distribution, exact_target_distribution, max_deviation
from tests.proof.toys import ToyTarget
from tests.proof.tree_cases import KINDS
from tests.toys.evaluations import results
from tests.toys.oracle import SelfDrafter
from tests.toys.targets import toy_target


class Likeliest:
    """Every draw is the argmax; nothing may ask for chance."""

    def accept(self, probability: float) -> bool:
        raise AssertionError("typical acceptance has no chance in it")

    def choose(self, probs_V: Tensor) -> int:
        return int(probs_V.argmax())


def rows(*of: list[float]) -> dict[int, Tensor]:
    return dict(enumerate(torch.tensor(row) for row in of))


def test_thresholds_by_hand() -> None:
    rule = TypicalAcceptance()
    assert rule.threshold(torch.tensor([0.0, 1.0, 0.0])) == pytest.approx(0.09)
    assert rule.threshold(torch.full((4,), 0.25)) == pytest.approx(0.3 / 4)  # exp(-H) of a uniform row is 1 / V
    half = torch.tensor([0.5, 0.5, 0.0])
    assert rule.threshold(half) == pytest.approx(0.09)  # 0.3 / 2 is more than epsilon
    assert TypicalAcceptance(epsilon=0.2, delta=0.1).threshold(half) == pytest.approx(0.05)


def test_a_token_right_at_the_threshold_is_kept() -> None:
    target = rows([0.25, 0.5, 0.25], [0.0, 1.0, 0.0])
    rule = TypicalAcceptance(epsilon=0.25, delta=1.0)
    assert rule.threshold(target[0]) == 0.25
    assert verify(Draft.chain([0]), TargetRows(target.__getitem__), Likeliest(), rule).path == [0]


def test_a_chain_is_kept_up_to_its_first_implausible_token() -> None:
    target = rows([0.5, 0.4, 0.1], [0.05, 0.9, 0.05], [1.0, 0.0, 0.0])
    verdict = verify(Draft.chain([1, 0, 0]), TargetRows(target.__getitem__), Likeliest(), TypicalAcceptance())
    assert verdict.path == [0]
    assert verdict.next_token == 1  # from the target's row after the path, the token just turned down included


def test_the_longest_path_wins_and_of_these_the_likelier() -> None:
    #        anchor -> 0 (p 0.6), 1 (p 0.2), 2 (p 0.2);   1 -> 3 (p 0.3);   2 -> 4 (p 0.5);   0 -> 5 (p 0.01)
    tree = Draft([0, 1, 2, 0, 0, 1], [-1, -1, -1, 1, 2, 0])
    after = rows([0.6, 0.2, 0.2], [0.98, 0.01, 0.01], [0.3, 0.7, 0.0], [0.5, 0.5, 0.0], [1.0, 0, 0], [0.0, 1.0, 0.0])
    verdict = verify(tree, TargetRows(after.__getitem__), Likeliest(), TypicalAcceptance())
    assert verdict.path == [2, 4]
    assert verdict.next_token == 1


def test_rows_are_asked_for_on_kept_nodes_only() -> None:
    after = rows([1.0, 0.0])
    verdict = verify(Draft([1, 0], [-1, 0]), TargetRows(after.__getitem__), Likeliest(), TypicalAcceptance())
    assert verdict.path == [] and verdict.next_token == 0


@pytest.mark.parametrize("seed", range(20))
def test_at_temperature_zero_it_is_the_lossless_rule(seed: int) -> None:
    draw = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]  # distinct siblings: of two equal ones the rules may follow different copies
    while len(paths) < 13:
        path = (*draw.choice(paths), draw.randrange(3))
        paths += [] if path in paths else [path]
    tree = Draft([path[-1] for path in paths[1:]], [paths.index(path[:-1]) - 1 for path in paths[1:]])
    after = [torch.eye(3)[draw.randrange(3)] for _ in paths]
    verdict = verify(tree, TargetRows(after.__getitem__), Likeliest(), TypicalAcceptance())
    assert verdict == verify(tree, TargetRows(after.__getitem__, lambda row: int(after[row].argmax())), Likeliest())


def test_it_is_lossy() -> None:
    """A drafter that always says 1 makes the output always 1, where the target says it 3 times in 10."""
    verdict = verify(
        Draft.chain([1]), TargetRows(lambda row: torch.tensor([0.7, 0.3])), Likeliest(), TypicalAcceptance()
    )
    assert verdict.path == [0]


@pytest.mark.parametrize("wrong", [{"epsilon": 0.0}, {"delta": 1.5}, {"epsilon": math.nan}])
def test_constants_without_a_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="typical acceptance"):
        TypicalAcceptance(**wrong)


def off(new_request: RequestFactory, target: ToyTarget, tokens: int = 2) -> float:
    found = exact_output_distribution(new_request, [(0,)], FixedPolicy(), tokens, typical=TypicalAcceptance())
    assert abs(sum(found.values()) - 1) < TOLERANCE
    return max_deviation(found, exact_target_distribution(target.row, [(0,)], tokens))


@pytest.mark.parametrize("name", ["plain", "temperature", "top_p", "penalty"])
@pytest.mark.parametrize("kinds", [None, "without", "chosen"])
def test_the_proof_flags_it(kinds: str | None, name: str) -> None:
    if kinds is None:
        chain = chains.toy(WARPS[name], 2, "vanilla")
        assert off(chains.requests_of(chain), chain.target) > VISIBLE
    else:
        tree = trees.toy(WARPS[name], (-1, -1, 0), KINDS[kinds])
        assert off(chains.requests_of(tree), tree.target) > VISIBLE


def test_the_proof_passes_it_at_temperature_zero() -> None:
    """Through the rule itself: the proof's requests never hand over the target's picks."""
    chain, tree = (
        chains.toy(WARPS["greedy"], 3, "vanilla"),
        trees.toy(WARPS["greedy"], (-1, -1, 0, 0, 1), KINDS["chosen"]),
    )
    assert off(chains.requests_of(chain), chain.target, 4) <= TOLERANCE
    assert off(chains.requests_of(tree), tree.target, 4) <= TOLERANCE


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_decoding_at_temperature_zero_is_plain_decoding(penalty: float) -> None:
    """Through the rule: a lone request has no picks to follow."""
    target, rules = toy_target(), StopRules(24, stop_ids=())
    params = SamplingParams(repetition_penalty=penalty)
    plain = generate(target, [5, 9], None, params, rules)
    drafted = generate(target, [5, 9], SelfDrafter(target, 0.5, 4), params, rules, typical=TypicalAcceptance())
    assert drafted.tokens == plain.tokens and sum(r.accepted for r in drafted.rounds) >= 3


def test_decoding_at_temperature_one_accepts_more() -> None:
    target, rules = toy_target(), StopRules(40, stop_ids=())
    rounds = {}
    for rule in (None, TypicalAcceptance(epsilon=0.01, delta=0.1)):
        drafter, params = SelfDrafter(target, 0.5, 4), SamplingParams(1.0, seed=1)
        rounds[rule] = len(generate(target, [5, 9], drafter, params, rules, typical=rule).rounds)
    exact, lossy = rounds.values()
    assert lossy < exact


def test_coupled_sampling_refuses_it() -> None:
    params = SamplingParams(1.0, coupled=True)
    with pytest.raises(ValueError, match="coupled sampling does not"):
        generate(toy_target(), [5], None, params, typical=TypicalAcceptance())


def test_results_and_pictures_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = "LOSSY: typical acceptance, epsilon 0.09, delta 0.3"
    assert lossy_note(TypicalAcceptance().settings) == note and lossy_note(None) == ""
    monkeypatch.setattr(plots.plt, "close", lambda figure: None)
    for rule in (None, TypicalAcceptance().settings):
        found = results("a")
        found.settings["lossy"] = rule
        for plot in (plots.plot_acceptance, plots.plot_histogram):
            plot(found, tmp_path / "plot.png")
            assert (note in plots.plt.gcf().get_suptitle().replace("\n", " ")) == (rule is not None)
    monkeypatch.undo()
    plots.plt.close("all")

"""Broken versions of the code, each of which some test must notice: `make mutants` (tests/mutants/run.py).

A mutant replaces one piece of text of one file. The first tests to run are those that are expected to notice it; the
result, with the test that did, is docs/results/mutants.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """One broken version.

    Attributes:
        what: what is wrong with it. "(biased)": the output is no longer distributed as the target's.
        file: under src/outrider.
        edits: (old text, new text) each; the old one is in the file exactly once.
        tests: expected to notice it: a file, or a file::function.
    """

    name: str
    what: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: str

    def applied(self, text: str) -> str:
        """The text of `file` with the edits.

        Raises:
            ValueError: an old text is not there exactly once.
        """
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {text.count(old)} times in {self.file}, not once: {old!r}")
            text = text.replace(old, new)
        return text

    def path(self, root: Path) -> Path:
        """The file in the tree at `root`."""
        return root / "src" / "outrider" / self.file


# Mutants that no test can notice, and why: the behaviour is the same.
EQUIVALENT: dict[str, str] = {
    "engine_admits_after_preemption": "What was preempted last waits first. It needs as many blocks as it gave back, "
    "and the request that it gave way to, which did not fit before, took at least one of them: there are too few.",
    "recurrent_drop_leaves_flag": "Only transformers' get_conv_state and get_recurrent_state read the flag, and they "
    "answer None where it is off or the state is None. Where the flag would be wrong both states are None.",
}


def _of(file: str, tests: str, *rows: tuple[Any, ...]) -> Iterator[Mutant]:
    """The mutants of a file: name, what, old and new text; then the row's own tests, else `tests`; then more edits."""
    for name, what, old, new, *more in rows:
        edits = ((old, new), *(more[1] if len(more) > 1 else ()))
        yield Mutant(name, what, file, edits, more[0] if more else tests)


MUTANTS: list[Mutant] = [
    *_of(
        "sampling.py",
        "tests/sampling/test_sampling.py",
        (
            "warp_presence_counts_prompt",
            "presence and frequency penalties count the prompt",
            "written_KV = seen_KV // IN_OUTPUT",
            "written_KV = (seen_KV + 1) // IN_OUTPUT",
        ),
        (
            "src_choose_argmax_above_0.9",
            "choose returns the argmax of a row whose top is >= 0.9",
            "if top.item() >= 1.0:",
            "if top.item() >= 0.9:",
            "tests/sampling/test_sampling.py::test_choose_inverts_the_cumulative_distribution",
        ),
        (
            "src_accept_above_0.9",
            "accept is certain from 0.9 on",
            "if probability >= 1.0:",
            "if probability >= 0.9:",
            "tests/sampling/test_sampling.py::test_accept_compares_one_uniform_number_with_the_probability",
        ),
        (
            "src_accept_below_0.1_rejected",
            "accept never says yes below 0.1",
            "if probability <= 0.0:",
            "if probability <= 0.1:",
            "tests/sampling/test_sampling.py::test_accept_compares_one_uniform_number_with_the_probability",
        ),
        (
            "src_choose_no_total",
            "the total of a row is taken to be 1",
            "self._uniform() * total",
            "self._uniform()",
            "tests/sampling/test_sampling.py::test_choose_inverts_the_cumulative_distribution",
        ),
        (
            "src_choose_right_false",
            "a uniform 0 picks a token of probability 0",
            "right=True)",
            "right=False)",
            "tests/sampling/test_sampling.py::test_the_smallest_uniform_number_skips_impossible_tokens",
        ),
        (
            "warp_minp_before_topp",
            "min-p before top-p",
            (
                "    if params.top_p < 1.0:\n"
                "        probs_KV = probs_KV.masked_fill(probs_KV < _nucleus_floor(probs_KV, "
                "params.top_p), 0.0)\n"
                "    if params.min_p > 0.0:\n"
                "        probs_KV = probs_KV.masked_fill(probs_KV < params.min_p * probs_KV.amax(-1, "
                "keepdim=True), 0.0)\n"
            ),
            (
                "    if params.min_p > 0.0:\n"
                "        probs_KV = probs_KV.masked_fill(probs_KV < params.min_p * probs_KV.amax(-1, "
                "keepdim=True), 0.0)\n"
                "        probs_KV = probs_KV / probs_KV.sum(-1, keepdim=True)\n"
                "    if params.top_p < 1.0:\n"
                "        probs_KV = probs_KV.masked_fill(probs_KV < _nucleus_floor(probs_KV, "
                "params.top_p), 0.0)\n"
            ),
            "tests/sampling/test_sampling.py::test_warp_equals_huggingface",
        ),
        (
            "warp_nucleus_guess_any",
            "one row's short nucleus ends the search for all rows",
            "bool((before_KS[..., -1] >= top_p).all())",
            "bool((before_KS[..., -1] >= top_p).any())",
            "tests/sampling/test_sampling.py::test_a_nucleus_of_most_of_the_vocabulary_beside_one_of_few_tokens",
        ),
        (
            "warp_nucleus_le",
            "a token is kept although the likelier ones already have top_p",
            "kept_K1 = (before_KS < top_p)",
            "kept_K1 = (before_KS <= top_p)",
            "tests/sampling/test_sampling.py::test_the_nucleus_ends_where_its_mass_reaches_top_p",
        ),
        (
            "warp_penalty_only_divides",
            "the penalty divides negative logits too",
            "torch.where(logits_KV < 0, logits_KV * penalty, logits_KV / penalty)",
            "logits_KV / penalty",
            "tests/sampling/test_sampling.py::test_warp_equals_huggingface",
        ),
        (
            "warp_topk_strict",
            "top-k drops the k-th token",
            "logits_KV < last_kept_K1",
            "logits_KV <= last_kept_K1",
            "tests/sampling/test_sampling.py::test_warp_equals_huggingface",
        ),
        (
            "residual_small_mass_is_target",
            "a residual of little mass is replaced by the target's row",
            "if mass > 0 else",
            "if mass > 0.02 else",
            "tests/sampling/test_sampling.py::test_acceptance_and_residual_make_the_target",
        ),
        (
            "residual_not_clamped",
            "the residual keeps |p_t - p_d|",
            "(target_V - draft_V).clamp_(min=0)",
            "(target_V - draft_V).abs_()",
            "tests/sampling/test_sampling.py::test_acceptance_and_residual_make_the_target",
        ),
        (
            "src_choose_sums_in_float32",
            "the sums of a row are float32, so that rare tokens of a large vocabulary never come",
            "probs_V.cumsum(-1, dtype=torch.float64)",
            "probs_V.cumsum(-1)",
            "tests/sampling/test_random_source.py",
        ),
        (
            "noise_seed_position_concat",
            "seed 16, position 0 shares noise with seed 0, position 1",
            "(position << 64)",
            "(position << 4)",
            "tests/sampling/test_random_source.py",
        ),
        (
            "noise_uniform_not_exponential",
            "the race's noise is uniform",
            "generator.standard_exponential(self.vocab_size)",
            "generator.random(self.vocab_size)",
        ),
        (
            "noise_forgotten_rows_differ",
            "a row's noise depends on how many rows are remembered",
            "(position << 64)",
            "(len(self._rows) << 64)",
        ),
        (
            "noise_of_places_not_ids",
            "among some tokens the noise is that of the first ones of the vocabulary",
            "noise[ids])",
            "noise[: len(ids)])",
            "tests/sampling/test_random_source.py",
        ),
        (
            "noise_ranks_impossible_tokens",
            "tokens of probability 0 come last in the ranking instead of not at all",
            "int((probs > 0).sum())",
            "len(probs)",
            "tests/decoding/test_tree.py",
        ),
        (
            "warp_temperature_multiplies",
            "logits are multiplied by the temperature",
            "/ min(params.temperature, _MOST_TEMPERATURE)",
            "* min(params.temperature, _MOST_TEMPERATURE)",
        ),
        (
            "warp_penalty_of_unseen",
            "the penalty is for the tokens that have not come yet",
            "torch.where(seen_KV > 0, penalised_KV, logits_KV)",
            "torch.where(seen_KV > 0, logits_KV, penalised_KV)",
        ),
        (
            "warp_minp_absolute",
            "min-p is not relative to the likeliest token",
            "params.min_p * probs_KV.amax(-1, keepdim=True)",
            "params.min_p",
        ),
        (
            "warp_not_normalised",
            "what top-p and min-p keep does not sum to one",
            "return probs_KV / probs_KV.sum(-1, keepdim=True)",
            "return probs_KV",
        ),
        (
            "seen_keeps_drafts",
            "drafts that were only tried stay among the tokens seen",
            "seen_V = self._seen_V.clone()",
            "seen_V = self._seen_V",
            "tests/proof/test_proof_engine.py::test_policies_over_two_requests",
        ),
        (
            "seed_of_unseeded_is_0",
            "all requests without a seed draw the same numbers",
            "return secrets.randbits(32) if self.temperature > 0 else 0",
            "return 0",
            "tests/engine/test_engine.py::test_requests_without_a_seed_differ_and_report_one_that_repeats_them",
        ),
        (
            "residual_not_normalised",
            "the residual keeps its small mass, so that the next sibling is accepted too rarely",
            "return excess_V / mass if mass > 0",
            "return excess_V if mass > 0",
            "tests/proof/test_proof_tree.py",
        ),
    ),
    *_of(
        "verification.py",
        "tests/proof/test_proof_tree.py",
        (
            "verify_ratio_inverted",
            "accept with p_d / p_t",
            "if source.accept(target_V[token].item() / drawn_with):",
            "if source.accept(drawn_with / max(target_V[token].item(), 1e-30)):",
            "tests/proof/test_proof.py::test_one_request",
        ),
        (
            "verify_first_probability_reused",
            "every sibling is judged by the first one's p_d",
            "        if draft_V is None and siblings.first is not None:",
            "        if siblings.first is not None:",
            "tests/verification/test_verify.py::test_each_sibling_is_judged_by_what_it_was_drawn_from",
        ),
        (
            "verify_siblings_not_removed",
            "a rejected sibling stays in p_d",
            "            draft_V = without(draft_V, token)",
            "            pass",
            "tests/proof/test_proof_tree.py::test_every_shape_and_kind",
        ),
        (
            "verify_replaced_treated_as_without",
            "with replacement is treated as without",
            "if not siblings.replaced and child != children[-1]:",
            "if child != children[-1]:",
            "tests/proof/test_proof_tree.py::test_every_shape_and_kind",
        ),
        (
            "verify_correction_from_target",
            "a rejection draws from p_t",
            "        target_V = residual(target_V, draft_V)\n",
            "        residual(target_V, draft_V)\n",
            "tests/proof/test_proof.py::test_one_request",
        ),
        (
            "verify_chosen_stays",
            "a rejected chosen token stays in p_t",
            "            target_V = _without_chosen(target_V, token)\n",
            "",
            "tests/proof/test_proof_tree.py::test_every_shape_and_kind",
        ),
        (
            "verify_row_of_parent",
            "a node's children are judged by its parent's row",
            "rows.row(node + 1), source=source)",
            "rows.row(max(node, 0)), source=source)",
            "tests/proof/test_proof.py::test_one_request",
        ),
        (
            "verify_pick_first_child",
            "greedy follows the first child whatever it is",
            "if draft.tokens[child] == token), None)",
            "if True), None)",
            "tests/decoding/test_tree.py::test_the_engine_serves_trees",
        ),
        (
            "typical_needs_both",
            "typical acceptance uses the larger threshold",
            "return min(self.epsilon,",
            "return max(self.epsilon,",
            "tests/verification/test_typical.py::test_thresholds_by_hand",
        ),
        (
            "typical_shortest_path",
            "typical acceptance keeps the likeliest, not the longest path",
            "(*kept[node], -node)",
            "(kept[node][1], -node)",
            "tests/verification/test_typical.py::test_a_chain_is_kept_up_to_its_first_implausible_token",
        ),
        (
            "verify_pick_row_of_parent",
            "greedy and coupled tokens are read from the row before",
            "rows.pick(node + 1)",
            "rows.pick(max(node, 0))",
            "tests/engine/test_engine.py::test_greedy_outputs_are_solo_outputs",
        ),
        (
            "typical_entropy_sign",
            "the threshold rises with the entropy",
            "math.exp(-entropy)",
            "math.exp(entropy)",
            "tests/verification/test_typical.py",
        ),
        (
            "typical_strict",
            "a token right at the threshold is turned down",
            "if probability >= least:",
            "if probability > least:",
            "tests/verification/test_typical.py",
        ),
        (
            "typical_next_after_anchor",
            "the next token is drawn from the first row, whatever was accepted",
            "rows[last] if last in rows else",
            "rows[-1] if -1 in rows else",
            "tests/verification/test_typical.py",
        ),
    ),
    *_of(
        "decoding/round.py",
        "tests/decoding/test_decoding.py",
        (
            "round_ignores_policy",
            "whole drafts are verified whatever the policy says",
            "draft.truncated(length)",
            "draft.truncated(None)",
            "tests/decoding/test_decoding.py::test_policies_and_acceptance_never_change_the_output",
        ),
        (
            "round_rejected_by_first_node",
            "a correction is known by the anchor's children alone",
            "self.verdict.path[-1] if self.verdict.path else -1",
            "-1",
        ),
    ),
    *_of(
        "decoding/request.py",
        "tests/decoding/test_decoding.py",
        (
            "library_keeps_prompts",
            "prompts are copied to other requests too",
            "return self.tokens[self._prompt_length :]",
            "return list(self.tokens)",
            "tests/decoding/test_hybrid.py::test_asking_twice_is_answered_from_the_first_answer",
        ),
        (
            "request_target_unmasked",
            "the target's rows are not masked",
            "logits_V = constrained(at_least_float32(logits_KV[k]), allowed_V)",
            "logits_V = at_least_float32(logits_KV[k])",
            "tests/decoding/test_structured.py::test_keywords_of_generate",
        ),
        (
            "request_greedy_unmasked",
            "the target's likeliest token is taken whatever may come",
            "plain = not self.params.penalised and self.constraint is None",
            "plain = not self.params.penalised",
            "tests/decoding/test_structured.py::test_everything_that_goes_with_it",
        ),
        (
            "request_stops_by_rules_alone",
            "a complete response goes on where the rules have no stop token",
            "rules.ids(target) if grammar is None else rules.ids(target) | grammar.eos_ids",
            "rules.ids(target)",
            "tests/decoding/test_structured.py::test_everything_that_goes_with_it",
        ),
        (
            "rows_penalty_forgets_block",
            "the penalty forgets the drafts before a row",
            "self.seen.with_tokens(before)",
            "self.seen.with_tokens(draft.tokens_before(0))",
            "tests/decoding/test_decoding.py::test_deterministic_warps_equal_plain_decoding",
        ),
        (
            "rows_penalty_sees_whole_block",
            "the penalty sees drafts behind a row",
            "self.seen.with_tokens(before)",
            "self.seen.with_tokens(draft.tokens)",
            "tests/engine/test_engine.py::test_coupled_tokens_depend_on_the_seed_alone",
        ),
        (
            "rows_greedy_pick_ignores_penalty",
            "the argmax of raw logits is taken under a penalty",
            "plain = not self.params.penalised and self.constraint is None",
            "plain = self.constraint is None",
            "tests/engine/test_steps.py::test_a_greedy_penalty_reads_warped_rows",
        ),
        (
            "rows_coupled_position",
            "coupled noise is that of the next position",
            "position + len(draft.tokens_before(k))",
            "position + 1 + len(draft.tokens_before(k))",
            "tests/decoding/test_tree.py::test_coupled_tokens_depend_on_the_seed_alone",
        ),
        (
            "eng_preempted_keeps_unread",
            "a preempted request keeps features of its old cache",
            "        self.session = self.recurrent = None\n        self.unread.clear()\n",
            "        self.session = self.recurrent = None\n",
            "tests/engine/test_steps.py::test_a_preempted_request_is_read_anew",
        ),
        (
            "eng_preempted_restarts_random_state",
            "a preempted request draws its random numbers again",
            "        self.session = self.recurrent = None\n        self.unread.clear()\n",
            (
                "        self.source = Randomness().source(self.seed)\n"
                "        self.session = self.recurrent = None\n"
                "        self.unread.clear()\n"
            ),
            "tests/engine/test_steps.py::test_a_preempted_request_goes_on_with_its_random_numbers",
        ),
        (
            "eng_draft_limit_one_short",
            "the last drafts are one token shorter",
            "deepest = self.remaining - 1",
            "deepest = max(1, self.remaining - 2)",
            "tests/engine/test_steps.py::test_drafts_reach_to_the_last_token_but_one",
        ),
        (
            "eng_noise_shared_seed",
            "requests of neighbouring seeds share noise",
            "randomness.noise(self.seed, target.vocab_size)",
            "randomness.noise(self.seed & 6, target.vocab_size)",
            "tests/engine/test_engine.py::test_coupled_tokens_depend_on_the_seed_alone",
        ),
        (
            "eng_seen_from_output_only",
            "the penalty does not see the prompt",
            "params, prompt, device=target.device",
            "params, [], device=target.device",
            "tests/decoding/test_decoding.py::test_the_repetition_penalty_is_that_of_transformers_prompt_included",
        ),
        (
            "eng_last_off_by_one",
            "a response ends one token early",
            '"length" if self.remaining == 0',
            '"length" if self.remaining <= 1',
            "tests/engine/test_engine.py::test_greedy_outputs_are_solo_outputs",
        ),
        (
            "text_keeps_one_token_more",
            "the token behind a stop stays in the response",
            "list(tokens[: position + 1]), True",
            "list(tokens[: position + 2]), True",
            "tests/decoding/test_decoding.py::test_a_stop_token_inside_a_block_cuts_the_commit_there",
        ),
        (
            "text_cut_at_last_stop",
            "the text ends at the last of several stop strings",
            "self.text[: min(places)]",
            "self.text[: max(places)]",
            "tests/decoding/test_text.py",
        ),
        (
            "text_releases_stop_but_one",
            "a stop string but its last character is released",
            "min(len(text), len(stop) - 1)",
            "min(len(text), len(stop) - 2)",
            "tests/decoding/test_text.py",
        ),
        (
            "text_stop_ids_ignored",
            "stop tokens do not stop",
            "if self.push(token) or token in stop_ids:",
            "if self.push(token):",
        ),
        (
            "commit_forgets_seen",
            "a repetition penalty does not see the response",
            "            self.seen.add(token)\n",
            "            pass\n",
        ),
        (
            "call_position_one_before",
            "coupled drafts are drawn with the noise of the position before",
            "            position=len(self.tokens),",
            "            position=len(self.tokens) - 1,",
        ),
        (
            "capacity_beyond_context",
            "a response may outgrow the target's context",
            "min(len(prompt) + rules.max_new_tokens, target.max_context)",
            "len(prompt) + rules.max_new_tokens",
        ),
    ),
    *_of(
        "decoding/structured.py",
        "tests/decoding/test_structured.py",
        (
            "grammar_drafts_not_taken_back",
            "drafts that another draft replaces stay read",
            "self._matcher.rollback(len(self._read) - common)",
            "pass",
            "tests/decoding/test_structured.py::test_a_state_asked_in_any_order_is_a_fresh_one",
        ),
        (
            "grammar_masks_of_the_last_round",
            "masks are kept when a token is committed",
            "        self._masks.clear()\n",
            "",
            "tests/decoding/test_structured.py::test_what_may_come_next",
        ),
        (
            "grammar_stop_token_read_on",
            "drafts behind a stop token are read",
            "if self._ended or not self._eos_ids.isdisjoint(drafts):",
            "if self._ended:",
            "tests/decoding/test_structured.py::test_what_may_come_next",
        ),
        (
            "grammar_errors_unseen",
            "a matcher that gave up allows the stop token",
            "    if matcher.is_error():",
            "    if False:",
            "tests/decoding/test_structured.py::test_what_cannot_be_followed_is_refused",
        ),
    ),
    *_of(
        "decoding/generate.py",
        "tests/decoding/test_decoding.py",
        (
            "single_keeps_path_of_whole_draft",
            "the accepted path is looked for as if the whole draft had been verified",
            "self.cache.length - (len(result.verified.tokens) + 1)",
            "self.cache.length - (len(result.draft.tokens) + 1)",
        ),
        (
            "single_reads_aux_of_first_rows",
            "a lone request's drafter is given one aux row for all accepted tokens",
            "aux_BTLD[:, kept])",
            "aux_BTLD[:, [0] * len(kept)])",
            "tests/decoding/test_decoding.py::test_the_drafter_reads_the_aux_hidden_states_of_the_tokens_that_stay",
        ),
        (
            "lane_features_of_rejected",
            "the drafter is given rows of the front, not of the path",
            "None if aux_BTLD is None else aux_BTLD[:, kept])",
            "None if aux_BTLD is None else aux_BTLD[:, : len(kept)])",
            "tests/decoding/test_tree.py::test_greedy_output_equals_plain_decoding",
        ),
        (
            "stats_count_behind_stop",
            "drafts accepted behind a stop are counted",
            "accepted = min(result.verdict.accepted, len(tokens))",
            "accepted = result.verdict.accepted",
            "tests/decoding/test_decoding.py::test_a_stop_token_inside_a_block_cuts_the_commit_there",
        ),
        (
            "acceptance_given_itself",
            "conditional acceptance is conditioned on the position itself",
            "r.accepted >= k - 1 for r in rounds",
            "r.accepted >= k for r in rounds",
            "tests/decoding/test_tree.py::test_acceptance_is_counted_by_depth",
        ),
    ),
    *_of(
        "decoding/drafting.py",
        "tests/engine/test_steps.py",
        (
            "drafting_history_twice",
            "the history remembers a step before its policy is asked",
            "        return self.history.step_view(\n            [turn.id for turn in turns],\n",
            (
                "        early = self.history.step_view(\n"
                "            [turn.id for turn in turns],\n"
                "            [draft.confidences for draft in drafts],\n"
                "            [len(draft.tokens) for draft in drafts],\n"
                "            contexts=[len(turn.state.tokens) for turn in turns],\n"
                "        )\n"
                "        self.record(turns, early, [None] * len(turns))\n"
                "        return self.history.step_view(\n            [turn.id for turn in turns],\n"
            ),
            "tests/engine/test_steps.py::test_the_history_is_what_the_policy_was_shown",
        ),
        (
            "drafting_dropped_by_token",
            "a draft loses its last token where that is odd (biased)",
            "                drafts[i] = draft\n",
            (
                "                odd = bool(draft.tokens) and draft.tokens[-1] % 2\n"
                "                drafts[i] = draft.truncated(len(draft.tokens) - 1) if odd else draft\n"
            ),
            "tests/proof/test_proof_engine.py::test_policies_over_two_requests",
        ),
        (
            "drafting_view_of_drawn_tokens",
            "the policy is shown the probabilities of the drawn tokens (biased)",
            "            [draft.confidences for draft in drafts],\n",
            (
                "            [\n"
                "                [s.first or 1.0 for s in draft.siblings.values()] or draft.confidences for "
                "draft in drafts\n"
                "            ],\n"
            ),
            "tests/proof/test_proof_engine.py::test_policies_over_two_requests",
        ),
        (
            "copies_source_by_token",
            "a copy takes the place of a draft that begins with another token (biased)",
            "                drafts[i] = draft\n",
            (
                "                rival = self._found.get(turns[i].id)\n"
                "                other = rival is not None and draft.tokens[:1] != rival.tokens[:1]\n"
                "                drafts[i] = rival.draft(limits[i], 0.0) if other else draft\n"
            ),
            "tests/proof/test_proof_hybrid.py::test_in_the_engine",
        ),
        (
            "copies_count_as_drafts",
            "a copy counts as what the drafter drafted",
            "[turn.id in self._taken for turn in turns]",
            "[False for turn in turns]",
            "tests/decoding/test_hybrid.py",
        ),
        (
            "copies_not_learned",
            "nothing is learned from what came of copies",
            "        self.beliefs.record(ids, ",
            "        self.beliefs.expected(ids) if not ids else self.beliefs.record(ids[:0], ",
            "tests/decoding/test_hybrid.py",
        ),
        (
            "copies_learned_taken_only",
            "copies that were not taken teach nothing",
            "{turn.id: turn.state.tokens for turn in turns})",
            "{turn.id: turn.state.tokens for turn in turns if turn.id in self._taken})",
            "tests/decoding/test_hybrid.py",
        ),
        (
            "copies_of_all_sources_alike",
            "what came of copies of other texts counts for those of the request's own",
            "- 1 + MOST_MATCHED * borrowed_N",
            "- 1 + 0 * borrowed_N",
            "tests/decoding/test_hybrid.py",
        ),
        (
            "library_any_seed",
            "responses are copied by requests whose numbers may have drawn them (biased)",
            "return params.fixed_text or params.seed is None",
            "return True",
            "tests/decoding/test_hybrid.py",
        ),
        (
            "library_before_the_text",
            "another text is copied though more of the request's own agrees",
            "matched > found[id][0]",
            "True",
            "tests/decoding/test_hybrid.py",
        ),
        (
            "copies_outcomes_one_late",
            "copies are compared with the text one token on",
            "text[self.start :]",
            "text[self.start + 1 :]",
            "tests/decoding/test_hybrid.py",
        ),
        (
            "copies_never_end",
            "copies are drafted however unlikely their end is",
            "if survival < _LEAST_SURVIVAL or",
            "if",
            "tests/decoding/test_hybrid.py",
        ),
        (
            "copies_beyond_the_response",
            "a copy may be longer than the response",
            "min(turns[i].limit, turns[i].state.remaining - 1)",
            "turns[i].limit",
            "tests/decoding/test_hybrid.py",
        ),
        (
            "drafting_gate_ignored",
            "requests draft as deep as they may, whatever the gate says",
            "min(turns[i].limit, depth)",
            "turns[i].limit",
            "tests/engine/test_steps.py::test_drafts_are_no_deeper_than_the_gate_says",
        ),
        (
            "drafting_gate_forgets_others",
            "the gate is not told of requests that cannot draft",
            "other_requests=len(turns) - len(able)",
            "other_requests=0",
        ),
        (
            "drafting_view_forgets_prefill",
            "the policy is not told of the rows of prefill",
            "turns],\n            other_tokens=other_tokens,",
            "turns],\n            other_tokens=0,",
        ),
    ),
    *_of(
        "engine/batch.py",
        "tests/engine/test_engine.py",
        (
            "logprobs_of_row_before",
            "log-probabilities are those of the row before a token's own",
            "rows = [0, *(node + 1 for node in verdict.path)]",
            "rows = [0, *(node for node in verdict.path)]",
            "tests/engine/test_requests.py::test_logprobs_are_those_of_the_targets_logits",
        ),
        (
            "eng_sources_swapped",
            "requests of a step draw from one another's sources",
            "self.states[id].source for id in self.ids]",
            "self.states[id].source for id in reversed(self.ids)]",
        ),
        (
            "eng_features_of_first_request",
            "the drafter is given the aux hidden states of the step's first rows",
            "torch.tensor([self._first_row[id] + row for",
            "torch.tensor([row for",
        ),
        (
            "eng_keeps_path_behind",
            "the keys of an accepted path are looked for behind the committed ones",
            "at[id].cached - len(rows), rows)",
            "at[id].cached, rows)",
            "tests/decoding/test_tree.py",
        ),
        (
            "eng_unread_one_ahead",
            "the drafter reads each token with the aux hidden state of the one before",
            "state.tokens[cached - len(rows) : cached]",
            "state.tokens[cached - len(rows) + 1 : cached + 1]",
            "tests/engine/test_steps.py::test_a_preempted_request_is_read_anew",
        ),
        (
            "eng_argmax_of_first_rows",
            "greedy requests take the argmax of the first request's rows",
            "likeliest_N[own]",
            "likeliest_N[: len(draft.tokens) + 1]",
        ),
        (
            "eng_rows_overlap",
            "a request's rows begin inside those of the one before",
            "first = own.stop",
            "first = own.stop - len(draft.tokens)",
        ),
    ),
    *_of(
        "engine/engine.py",
        "tests/engine/test_engine.py",
        (
            "eng_anchor_row_lost",
            "the row of the old anchor is not kept",
            "[*range(work.prefill + 1),",
            "[*range(work.prefill),",
        ),
        (
            "eng_history_never_forgets",
            "what a finished request's drafts were worth stays for ever",
            "        self.drafting.forget(id, state.response)\n",
            "",
            "tests/engine/test_steps.py",
        ),
        (
            "eng_preempted_session_open",
            "a preempted request's drafter session is never ended",
            ("            self.drafting.close(self._states[id])\n            self._states[id].leave()"),
            "            self._states[id].leave()",
            "tests/engine/test_steps.py::test_what_a_request_held_is_given_back",
        ),
        (
            "eng_cancelled_session_open",
            "a cancelled request's drafter session is never ended",
            "            return False\n        self._forget(id)\n",
            (
                "            return False\n"
                "        state = self._states.pop(id)\n"
                "        self.scheduler.remove(id)\n"
                "        self.drafting.forget(id, state.response)\n"
            ),
            "tests/engine/test_stateful.py",
        ),
        (
            "eng_record_counts_outputs",
            "the step's record counts requests instead of committed tokens",
            "committed=sum(len(output.tokens) for output in outputs)",
            "committed=len(outputs)",
            "tests/engine/test_steps.py::test_policies_and_gates_are_told_of_the_rest_of_the_step",
        ),
    ),
    *_of(
        "engine/scheduler.py",
        "tests/engine/test_steps.py",
        (
            "engine_ignores_most_drafts",
            "a request has more drafts than it may",
            "min(progress.most_drafts, share, left)",
            "min(self.draft_slots, share, left)",
            "tests/engine/test_requests.py::test_a_request_has_as_many_drafts_as_it_may",
        ),
        (
            "engine_budget_per_prompt",
            "no quarter of the budget is kept for prompts",
            "budget = max(len(decoding), budget - budget // 4)",
            "budget = max(len(decoding), budget)",
            "tests/engine/test_steps.py::test_a_quarter_of_the_rows_is_kept_for_waiting_prompts",
        ),
        (
            "engine_preempts_oldest",
            "the oldest request gives way",
            "self._preempt(next(reversed(self.running)), preempted)",
            "self._preempt(next(iter(self.running)), preempted)",
            "tests/engine/test_steps.py::test_the_youngest_request_gives_way",
        ),
        (
            "engine_cached_off_by_one",
            "all committed tokens count as cached",
            "progress.cached = progress.length - 1",
            "progress.cached = progress.length",
            "tests/engine/test_engine.py::test_greedy_outputs_are_solo_outputs",
        ),
        (
            "engine_blocks_leak",
            "a finished request's blocks stay allocated",
            ("            self.allocator.release(progress.blocks)\n        else:"),
            ("            pass\n        else:"),
            "tests/engine/test_engine.py::test_greedy_outputs_are_solo_outputs",
        ),
        (
            "engine_share_forgets_anchor",
            "drafts get the rows that anchors need: the budget is exceeded",
            "budget // max(len(decoding), 1) - 1",
            "budget // max(len(decoding), 1)",
            "tests/engine/test_steps.py::test_a_quarter_of_the_rows_is_kept_for_waiting_prompts",
        ),
        (
            "engine_drafts_to_the_end",
            "a draft may fill the request's capacity, the target's own token then exceeds it",
            "progress.capacity - progress.length - 1",
            "progress.capacity - progress.length",
        ),
        (
            "engine_admits_after_preemption",
            "what was preempted is admitted again in the same step",
            " and not preempted and",
            " and",
        ),
        (
            "engine_lowered_limit_ignored",
            "requests are admitted without end once more are running than a lowered limit allows",
            "len(self.running) < self.config.max_requests",
            "len(self.running) != self.config.max_requests",
            "tests/engine/test_steps.py::test_the_books_of_the_scheduler_balance",
        ),
        (
            "engine_prefill_exceeds_budget",
            "the anchor joins a prefill that fills the budget",
            "if missing < budget:",
            "if missing <= budget:",
            "tests/engine/test_steps.py::test_the_books_of_the_scheduler_balance",
        ),
        (
            "engine_preempted_goes_last",
            "a preempted request waits behind those that came after it",
            "self.waiting.appendleft((id, progress))",
            "self.waiting.append((id, progress))",
            "tests/engine/test_steps.py::test_the_books_of_the_scheduler_balance",
        ),
        (
            "engine_preempted_counts_as_cached",
            "a preempted request goes on without its keys",
            "progress.blocks, progress.cached = [], 0",
            "progress.blocks = []",
        ),
        (
            "engine_cancels_the_others",
            "cancelling a waiting request drops all but it",
            "if entry[0] != id)",
            "if entry[0] == id)",
            "tests/engine/test_steps.py::test_the_books_of_the_scheduler_balance",
        ),
        (
            "engine_blocks_rounded_down",
            "a half-filled block is not counted",
            "return -(-tokens // self.config.block_size)",
            "return max(1, tokens // self.config.block_size)",
        ),
        (
            "engine_draft_block_leaks",
            "one block of those that drafts left unused is never free again",
            "self.allocator.release(progress.blocks[needed:])",
            "self.allocator.release(progress.blocks[needed + 1 :])",
            "tests/engine/test_steps.py::test_the_books_of_the_scheduler_balance",
        ),
    ),
    *_of(
        "engine/blocks.py",
        "tests/engine/test_steps.py",
        (
            "blocks_last_given_twice",
            "the last block of a run stays free",
            "self._free_N[start : start + length] = False",
            "self._free_N[start : start + length - 1] = False",
        ),
        (
            "blocks_overwrite_neighbour",
            "a growing request takes the block behind its own though it is in use",
            "len(behind) if behind.all() else int(behind.argmin())",
            "len(behind)",
        ),
    ),
    *_of(
        "scheduling/policies.py",
        "tests/scheduling/test_scheduling.py",
        (
            "threshold_strict",
            "the threshold policy drops confidences equal to it",
            "(own_RK >= self.threshold)",
            "(own_RK > self.threshold)",
            "tests/scheduling/test_scheduling.py::test_threshold",
        ),
        (
            "threshold_any_prefix",
            "tokens behind a doubtful one are verified",
            "np.logical_and.accumulate(passing_RK, axis=1).sum(axis=1)",
            "passing_RK.sum(axis=1)",
            "tests/scheduling/test_scheduling.py::test_threshold",
        ),
        (
            "prefix_global_search",
            "the prefix scheduler looks past the first non-improvement (biased)",
            "return int(worse.argmax()) if worse.any() else len(order_N)",
            "return int(throughput.argmax())",
            "tests/scheduling/test_scheduling.py::test_prefix_stops_at_the_first_dip",
        ),
        (
            "prefix_order_by_request",
            "ties are broken by request first",
            ("        return lengths_of(order_N[: self.admitted(view, survival_RK, order_N)], len(survival_RK))"),
            (
                "        order_N = np.sort(order_N)\n"
                "        return lengths_of(order_N[: self.admitted(view, survival_RK, order_N)], "
                "len(survival_RK))"
            ),
            "tests/scheduling/test_profile.py::test_a_policy_decides_with_it",
        ),
        (
            "lookahead_reads_realised",
            "look-ahead plans with confidences not yet revealed (biased)",
            "return np.where(open_RK, scale_R[:, None] * promise_RK, 0.0)",
            "return np.where(open_RK, survival_RK, 0.0)",
            "tests/proof/test_proof.py::test_two_requests_over_rounds",
        ),
        (
            "goodput_forgets_plain_token",
            "goodput does not count the target's own token",
            "tokens_K = requests + gained_RK[",
            "tokens_K = gained_RK[",
            "tests/scheduling/test_scheduling.py::test_goodput_counts_the_token_that_the_target_adds_itself",
        ),
        (
            "fixed_ignores_drafted",
            "a fixed length is asked for of shorter drafts too",
            "np.minimum(view.drafted_R, self.length)",
            "np.full_like(view.drafted_R, self.length)",
        ),
        (
            "async_reads_this_step",
            "the number of tokens follows from this step's confidences (biased)",
            "old_RK = _earlier_survival(view)",
            "old_RK = survival_RK",
            "tests/proof/test_proof.py",
        ),
        (
            "async_not_scaled",
            "the old step is not scaled to the requests that draft now",
            "gains(old_RK), drafting / len(old_RK)",
            "gains(old_RK), 1.0",
        ),
        (
            "goodput_reads_this_step",
            "the common length follows from this step's confidences (biased)",
            "gained_RK = np.cumsum(promised_survival(view), axis=1)",
            "gained_RK = np.cumsum(view.survival_RK().mean(axis=0) + np.zeros((requests, 1)), axis=1)",
            "tests/proof/test_proof.py",
        ),
        (
            "order_reversed",
            "the least likely tokens are admitted first",
            "(STEPS + 0.5 - survival * STEPS)",
            "(survival * STEPS + 0.5)",
        ),
        (
            "lookahead_ignores_price",
            "all planned tokens are admitted, whatever their survival turns out to be",
            "return max(1, int(below.argmax())) if below.any() else len(realised_M)",
            "return len(realised_M)",
        ),
        (
            "lengths_by_position",
            "admitted tokens are counted by position instead of by request",
            "np.bincount(admitted_N % requests",
            "np.bincount(admitted_N // requests",
        ),
        (
            "seconds_without_prefill",
            "rows of prefill cost nothing",
            "other_tokens=view.other_tokens, context=context",
            "other_tokens=0, context=context",
        ),
    ),
    *_of(
        "scheduling/beliefs.py",
        "tests/scheduling/test_beliefs.py",
        (
            "beliefs_behind_rejection",
            "drafts behind a rejection count as outcomes",
            "positions_K < np.minimum(accepted_R + 1, verified_R)[:, None]",
            "positions_K < verified_R[:, None]",
            "tests/scheduling/test_beliefs.py::test_only_what_was_reached_and_verified_is_an_outcome",
        ),
        (
            "beliefs_rejections_unseen",
            "accepted drafts alone are outcomes",
            "positions_K < np.minimum(accepted_R + 1, verified_R)[:, None]",
            "positions_K < np.minimum(accepted_R, verified_R)[:, None]",
            "tests/scheduling/test_beliefs.py::test_positions_are_learned",
        ),
        (
            "beliefs_never_forget",
            "old outcomes count for ever",
            "self._variance_P = np.maximum(variance_P, self._least_P)",
            "self._variance_P = variance_P",
            "tests/scheduling/test_beliefs.py::test_a_change_of_task_is_followed_within_200_rounds",
        ),
        (
            "beliefs_no_fade",
            "what is not tried keeps its belief",
            "self._mean_P[places] = prior + FADE * (self._mean_P[places] - prior)",
            "pass",
            "tests/scheduling/test_beliefs.py::test_hopeless_drafts_are_tried_again",
        ),
        (
            "beliefs_kinds_mixed",
            "drafts with confidences teach about drafts without",
            "return known * self.groups + groups, position + at",
            "return 0 * known + groups, position + at",
            "tests/scheduling/test_beliefs.py::test_drafts_with_confidences_teach_nothing_about_drafts_without",
        ),
        (
            "beliefs_each_takes_all",
            "every parameter takes the whole residual",
            "            error_N = error_N - factor_N * change_P[place_N]\n",
            "",
            "tests/scheduling/test_beliefs.py::test_one_outcome_is_an_extended_kalman_filter",
        ),
        (
            "beliefs_others_certain",
            "a parameter counts those behind it as known",
            "weight_4N = factor_4N / (1 / curvature_N + later_4N)",
            "weight_4N = factor_4N * curvature_N",
            "tests/scheduling/test_beliefs.py::test_one_outcome_is_an_extended_kalman_filter",
        ),
        (
            "beliefs_request_kept",
            "a new request inherits the deviation of one that left",
            "= self._prior_P[places_2], self._most_P[places_2]",
            "= self._mean_P[places_2], self._variance_P[places_2]",
            "tests/scheduling/test_beliefs.py::test_a_request_has_its_own_deviation_and_a_new_one_starts_from_all",
        ),
        (
            "beliefs_groups_fade_together",
            "a group fades though another request of it was verified",
            "np.setdiff1d(groups_R[~tried_R], groups_R[tried_R])",
            "np.unique(groups_R[~tried_R])",
        ),
    ),
    *_of(
        "scheduling/gate.py",
        "tests/scheduling/test_scheduling.py",
        (
            "history_all_drafts_verified",
            "verdicts behind the end of a response count",
            "    return np.where(ended_R, committed_R, verified_R), np.where(ended_R, committed_R, accepted_R)",
            "    return verified_R, accepted_R",
            "tests/scheduling/test_scheduling.py::test_verdicts_behind_the_end_of_a_response_are_unknown",
        ),
        (
            "history_copies_teach",
            "outcomes of copies count for the drafter beside them",
            "np.minimum(verified_R, made_R), np.minimum(accepted_R, made_R)",
            "verified_R, accepted_R",
            "tests/decoding/test_hybrid.py",
        ),
        (
            "history_belief_forgotten_late",
            "a new request inherits the beliefs of one that left",
            "            self._beliefs.forget(id)\n",
            "            pass\n",
        ),
        (
            "gate_means_without_confidences",
            "the gate reads lagging means of drafts without confidences",
            "if self._foreseen and self._beliefs is not None:",
            "if False and self._beliefs is not None:",
            "tests/scheduling/test_scheduling.py::test_without_confidences_text_that_does_not_fit_costs_at_most_3_per_cent",
        ),
        (
            "gate_margin_ignored",
            "drafting need not promise the margin",
            "return best if best.throughput() > (1 + self.margin) * plan.throughput()",
            "return best if best.throughput() > plan.throughput()",
            "tests/scheduling/test_scheduling.py::test_a_gain_too_small_to_trust_is_left",
            [("copied_RK]).throughput() > (1 + self.margin) * plan", "copied_RK]).throughput() > plan")],
        ),
        (
            "gate_probe_free",
            "probes are not paid for by savings",
            "if self.cost.draft_seconds(plan.drafting + count, plan.depth) - drafting <= float(saved[count - 1]):",
            "if True:",
            "tests/scheduling/test_scheduling.py::test_probing_costs_a_hundredth_and_is_staggered",
        ),
        (
            "history_decay_swapped",
            "the newest draft weighs what the old ones should",
            "self.decay * start_R2K + (1 - self.decay) * new_R2K",
            "(1 - self.decay) * start_R2K + self.decay * new_R2K",
            "tests/scheduling/test_scheduling.py::test_history_gives_the_past_its_decay_and_the_latest_draft_the_rest",
        ),
        (
            "history_slot_kept",
            "a new request inherits the means of one that left",
            "            self._means_S2K[slot], self._idle_S[slot] = np.nan, 0\n",
            "            pass\n",
            "tests/scheduling/test_scheduling.py::test_history_forgets_a_request_but_not_its_lesson",
        ),
        (
            "async_one_step_back",
            "only one earlier step is remembered",
            "deque(maxlen=2)",
            "deque(maxlen=1)",
        ),
        (
            "gate_idle_never_reset",
            "a request that has drafted still counts as waiting to probe",
            "np.where(made_R > 0, 0, self._idle_S[slots_R] + 1)",
            "self._idle_S[slots_R] + 1",
        ),
        (
            "gate_beliefs_end_at_zero",
            "a position that no draft reached is believed to be hopeless",
            "    return carried_RK",
            "    return beliefs_RK",
        ),
        (
            "gate_all_probe",
            "all waiting requests may probe in one step",
            "max(1, len(skipping_R) // 4)",
            "len(skipping_R)",
        ),
        (
            "history_survival_not_shifted",
            "confidences are the ratio of a survival to itself",
            "survival_R2K[:, 0, 1:] = survival_R2K[:, 1, :-1]",
            "survival_R2K[:, 0, 1:] = survival_R2K[:, 1, 1:]",
        ),
        (
            "history_new_request_blank",
            "a new request is judged by its first draft alone",
            ("        if self._all_2K is not None:\n            old_R2K"),
            ("        if False:\n            old_R2K"),
        ),
    ),
    *_of(
        "scheduling/cost.py",
        "tests/scheduling/test_profile.py",
        (
            "cost_prompts_counted",
            "what reading prompts takes counts against the step, so that drafts look cheap beside them",
            "np.maximum(seconds_N - (alone_2[1] - alone_2[0]), alone_2[0])",
            "seconds_N",
            "tests/scheduling/test_scheduling.py",
        ),
        (
            "cost_may_fall",
            "noise in the cells is kept: more tokens may cost less",
            "while pools and pools[-1][0] > mean:",
            "while False:",
        ),
        (
            "cost_context_not_interpolated",
            "contexts between two cells cost as the lower one",
            "((1 - along_r) * along_s) * table[r, s_next]",
            "((1 - along_r) * along_s) * table[r, s]",
        ),
        (
            "cost_depth_of_gamma",
            "a draft of depth d costs d / gamma of a whole one",
            "(depth - 1) / (self.gamma - 1)",
            "depth / self.gamma",
        ),
        (
            "cost_sps_one_token_more",
            "a forward costs as one of a token more",
            "np.minimum(tokens_N, len(self._seconds)) - 1]",
            "np.minimum(tokens_N, len(self._seconds) - 1)]",
            "tests/scheduling/test_scheduling.py",
        ),
        (
            "cost_spread_without_drafts",
            "times of drafts that a busy machine spoilt count as steady",
            "float(max([forwards, *((high - low) / median for low, median, high in drafts)]))",
            "float(max([forwards, *((high - low) / median for low, median, high in drafts[:0])]))",
            "tests/evaluation/test_machine_profile.py::test_it_is_kept_by_its_spread",
        ),
        (
            "cost_longer_context_without_steps",
            "the first row of a longer context has no steps between its few cells",
            "self._seconds_RSB[0, s - 1] if s else self.theta",
            "self.theta",
            "tests/evaluation/test_machine_profile.py"
            "::test_a_sparse_grid_has_few_shapes_and_its_table_the_steps_of_the_first_row",
        ),
    ),
    *_of(
        "target/cache.py",
        "tests/target/test_target_families.py",
        (
            "cache_rollback_first_layer",
            "only one layer's slots are rolled back",
            ("        for store in self._used:\n            store.length = length"),
            ("        for store in self._used[:1]:\n            store.length = length"),
            "tests/target/test_paged.py::test_a_request_is_computed_as_if_it_were_alone",
        ),
        (
            "cache_keep_path_moves_keys_only",
            "values of an accepted path stay behind",
            "                layer.values[:, :, start:end] = layer.values.index_select(2, from_T)\n",
            "",
            "tests/decoding/test_tree.py::test_every_node_is_scored_as_if_its_path_stood_alone",
        ),
        (
            "cache_keep_path_one_early",
            "the path is copied to one slot before",
            "torch.tensor(rows, device=layer.keys.device) + start",
            "torch.tensor(rows, device=layer.keys.device) + max(start - 1, 0)",
            "tests/decoding/test_tree.py::test_every_node_is_scored_as_if_its_path_stood_alone",
        ),
        (
            "recurrent_drop_keeps_state",
            "a recurrent layer does not go back",
            "        self.conv_states[0], self.recurrent_states[0] = self._before\n",
            "",
            "tests/target/test_target_families.py::test_forward_equals_transformers_with_cache_aux_layers_and_rollback",
        ),
        (
            "recurrent_drop_one_row_less",
            "one row too few is run again",
            "kept = rows_BTD.shape[1] - count",
            "kept = max(0, rows_BTD.shape[1] - count - 1)",
            "tests/target/test_target_families.py::test_forward_equals_transformers_with_cache_aux_layers_and_rollback",
        ),
        (
            "cache_keep_rows_pad",
            "left padding is not narrowed with the batch",
            "            self.pad_B = self.pad_B[rows]",
            "            self.pad_B = self.pad_B[: len(rows)]",
            "tests/target/test_target.py::test_a_padded_batch_that_loses_sequences_goes_on_as_before",
        ),
        (
            "recurrent_drop_leaves_flag",
            "a recurrent layer without a state says that it has one",
            "self.has_previous_state[0] = self._before[0] is not None",
            "self.has_previous_state[0] = True",
        ),
        (
            "recurrent_reruns_last_rows",
            "the last rows of a forward are run again instead of the first",
            "self._rows_BTD = rows_BTD[:, :kept]",
            "self._rows_BTD = rows_BTD[:, -max(kept, 1) :]",
        ),
        (
            "cache_keep_rows_keys_only",
            "values of a batch that lost sequences stay where they were",
            '("keys", "values")',
            '("keys",)',
            "tests/target/test_target.py",
        ),
    ),
    *_of(
        "target/paged.py",
        "tests/target/test_paged.py",
        (
            "paged_slots_off_one_block",
            "a span starting inside a block reads from its start",
            "return slots[start - first * size : end - first * size]",
            "return slots[: end - start]",
            "tests/target/test_paged.py::test_a_request_is_computed_as_if_it_were_alone",
        ),
        (
            "paged_window_one_more",
            "a sliding window shows one position more",
            "visible.triu_(past + 1 - window)",
            "visible.triu_(past - window)",
            "tests/target/test_paged.py::test_a_request_is_computed_as_if_it_were_alone",
        ),
        (
            "paged_branch_positions",
            "branches take their slot as their position",
            (
                "    positions: list[int] = (span.past + Branches.of(span.parents).depths_T).tolist()\n"
                "    return positions"
            ),
            "    return range(span.past, span.end)",
            "tests/decoding/test_tree.py::test_trees_and_chains_of_many_requests_in_one_ragged_pass",
        ),
        (
            "paged_short_moves_forgotten",
            "keys of an accepted path that move by one slot stay",
            "if row != place]",
            "if row > place + 1]",
            "tests/decoding/test_tree.py",
        ),
        (
            "paged_window_view_of_first_block",
            "a window's keys are viewed as if the request's first block came first",
            "(used[0] - first) * self.block_size + start",
            "used[0] * self.block_size + start",
        ),
        (
            "paged_logits_of_first_rows",
            "logits are those of a span's first rows",
            "range(len(tokens) - span.logits, len(tokens))",
            "range(len(tokens) - len(span.tokens), len(tokens) - len(span.tokens) + span.logits)",
        ),
        (
            "paged_values_of_keys",
            "keys are written where values belong",
            "zip(self._kv.layers[layer_idx], (key_states, value_states), strict=True)",
            "zip(self._kv.layers[layer_idx], (key_states, key_states), strict=True)",
        ),
    ),
    *_of(
        "target/kernels.c",
        "tests/target/test_kernels.py",
        (
            "kernels_bias_of_the_first_panel",
            "every panel adds the bias of the first",
            "matrix->bias[first + n]",
            "matrix->bias[n]",
        ),
        (
            "kernels_panel_not_moved_on",
            "inputs behind the first block meet the weights of the first",
            "matrix->weights + (p * in + k) * WIDTH",
            "matrix->weights + p * in * WIDTH",
        ),
        (
            "kernels_last_inputs_left_out",
            "inputs behind a multiple of four are left out",
            "for (; k < depth; k++) ADD(k);",
            "",
        ),
        (
            "kernels_keys_without_norm",
            "keys are normed with the weights of queries",
            "head < layer->heads ? layer->q_norm : layer->k_norm",
            "layer->q_norm",
        ),
        (
            "kernels_gate_and_up_swapped",
            "the activation is taken of the other half",
            "*up = gate + inner;",
            "*up = gate; gate += inner;",
        ),
    ),
    *_of(
        "target/kernels.py",
        "tests/target/test_kernels.py",
        (
            "few_rows_window_one_more",
            "a sliding window shows one cached position more",
            "length + depths + 1 - window",
            "length + depths - window",
        ),
        (
            "few_rows_see_the_next",
            "a row sees the one behind it",
            "(distance >= 0)",
            "(distance >= -1)",
        ),
        (
            "few_rows_window_among_rows",
            "a sliding window shows one of the new rows more",
            "(distance < (rows",
            "(distance <= (rows",
        ),
        (
            "few_rows_tree_without_window",
            "rows of a tree see their ancestors outside the window",
            "branches.visible(past=0, window=window)",
            "branches.visible(past=0)",
        ),
        (
            "few_rows_first_block_of_the_first",
            "every request reads the blocks of the first",
            '"first_block": _starts([len(own) for own in blocks])',
            '"first_block": np.zeros(len(rows), dtype=np.int64)',
        ),
        (
            "few_rows_any_type",
            "keys of any type are read as float32",
            'device.type == "cpu" and dtype == torch.float32 and',
            'device.type == "cpu" and',
        ),
    ),
    *_of(
        "target/attention.py",
        "tests/decoding/test_tree.py",
        (
            "branches_see_row_before",
            "a node sees the row before it instead of its parent",
            "sees_TT[row] |= sees_TT[parent]",
            "sees_TT[row] |= sees_TT[row - 1]",
        ),
        (
            "branches_window_one_more",
            "a sliding window over branches shows one position more",
            "position_T[:, None] - position_N < window",
            "position_T[:, None] - position_N <= window",
        ),
        (
            "window_starts_one_late",
            "a sliding window loses its first position",
            "max(0, past + 1 - window)",
            "max(0, past + 2 - window)",
            "tests/target/test_paged.py",
        ),
        (
            "softcap_not_divided",
            "scores are not divided by the soft cap",
            "torch.tanh(scores / softcap) * softcap",
            "torch.tanh(scores) * softcap",
            "tests/target/test_paged.py",
        ),
    ),
    *_of(
        "target/lean.py",
        "tests/target/test_target.py",
        (
            "lean_padding_visible",
            "left padding is attended to",
            "mask = (mask & real) | own[None]",
            "mask = mask | own[None]",
        ),
        (
            "lean_final_aux_unnormed",
            "the last aux hidden state is the one before the final norm",
            "captured[len(self.layers) - 1] = normed",
            "captured[len(self.layers) - 1] = hidden.view(B, T, -1)",
        ),
    ),
    *_of(
        "training/loss.py",
        "tests/training/test_objective.py",
        (
            "loss_distance_half",
            "the distance lacks its factor 2",
            "2 * gap.sum(-1)",
            "gap.sum(-1)",
            "tests/training/test_objective.py::test_loss_and_gradients_equal_the_dense_formula",
        ),
        (
            "loss_gradient_inner_missing",
            "the gradient of the distance lacks <p_d, b>",
            "(scale_C - 2 * l1_C * inner_C)",
            "(scale_C)",
            "tests/training/test_objective.py::test_loss_and_gradients_equal_the_dense_formula",
        ),
        (
            "loss_outside_mass",
            "the target's mass outside the draft vocabulary is ignored",
            "inside_C = (target_top_C - lse_C).exp() / gap.amax(-1)",
            "inside_C = torch.ones_like(target_top_C)",
            "tests/training/test_objective.py::test_loss_and_gradients_equal_the_dense_formula",
        ),
        (
            "loss_weights_not_total",
            "each micro-batch is divided by its own weight",
            "(weights_N.sum() if total_weight is None else total_weight)",
            "weights_N.sum()",
            "tests/training/test_parallel.py::test_two_ranks_take_the_steps_of_one",
        ),
        (
            "loss_confidence_target",
            "confidence is trained towards the distance",
            "F.binary_cross_entropy_with_logits(confidence_N, acceptance_N, reduction",
            "F.binary_cross_entropy_with_logits(confidence_N, 1 - acceptance_N, reduction",
            "tests/training/test_objective.py::test_loss_and_gradients_equal_the_dense_formula",
        ),
        (
            "loss_softcap_ignored",
            "the target's softcap is left out",
            (
                "            gap.add_(shift_C[:, None]).div_(softcap).tanh_().mul_(softcap)\n"
                "            shift_C = torch.zeros_like(shift_C)\n"
            ),
            "            pass\n",
            "tests/training/test_objective.py::test_candidates_have_the_dense_loss_and_gradients",
        ),
        (
            "loss_ce_without_label",
            "a label outside the draft vocabulary has a cross-entropy",
            "- label_logit_C) * known_C",
            "- label_logit_C)",
        ),
        (
            "loss_w2_of_last_chunk",
            "the sequential head learns from the last chunk alone",
            "d_w2.addmm_(z.T, latent)",
            "d_w2.copy_(z.T @ latent)",
        ),
        (
            "loss_pulls_back_last_tile",
            "the hidden state's gradient is that of the last tile of the head",
            "            total += part\n",
            "            total = part\n",
        ),
        (
            "loss_acceptance_not_halved",
            "acceptance is 1 - ||p_d - p_t||_1",
            "(1 - distance_N / 2).clamp(0, 1)",
            "(1 - distance_N).clamp(0, 1)",
        ),
        (
            "loss_labels_not_mapped",
            "labels are ids of the target, not of the draft vocabulary",
            "labels_N=self.inverse_V[batch.labels_NK[keep_NK]]",
            "labels_N=batch.labels_NK[keep_NK]",
            "tests/training/test_trainer.py",
        ),
        (
            "loss_aux_stay_scaled",
            "drafters are trained on scaled aux hidden states",
            "batch.aux_SLD.float() * drafter.aux_scale_L[:, None]",
            "batch.aux_SLD.float()",
            "tests/drafters/test_alignment.py",
        ),
    ),
    *_of(
        "training/recipe.py",
        "tests/training/test_objective.py",
        (
            "loss_decay_from_one",
            "position weights begin at exp(-1/g)",
            "torch.exp(-torch.arange(gamma, device=device, dtype=torch.float32) / decay)",
            "torch.exp(-torch.arange(1, gamma + 1, device=device, dtype=torch.float32) / self.decay)",
            "tests/training/test_objective.py::test_position_weights_decay",
        ),
    ),
    *_of(
        "training/batches.py",
        "tests/data/test_data.py",
        (
            "batch_supervises_across_turns",
            "a block is supervised beyond its response",
            "(rows_NK >= 0).cumprod(-1).bool()",
            "(rows_NK >= 0)",
            "tests/data/test_data.py::test_fixed_blocks_cover_every_response_token_once",
        ),
        (
            "batch_hidden_one_late",
            "the target's rows are those of the next token",
            "hidden.append(seen.hidden_RD[rows_NK])",
            "hidden.append(seen.hidden_RD[(rows_NK + 1).clamp(max=len(seen.hidden_RD) - 1)])",
            "tests/data/test_data.py::test_blocks_supervise_the_following_response_tokens_and_nothing_else",
        ),
        (
            "batch_context_includes_anchor",
            "the context holds the anchor's own features",
            "aux_layers.append(seen.aux_SLD[: positions[-1]])",
            "aux_layers.append(seen.aux_SLD[: positions[-1]].roll(-1, 0))",
            "tests/drafters/test_alignment.py::test_trained_equals_served",
        ),
        (
            "batch_teacher_sees_label",
            "a position is given the token that it must predict",
            "previous.append(tokens_n[ahead_NK - 1])",
            "previous.append(tokens_n[ahead_NK.clamp(max=len(tokens_n) - 1)])",
        ),
        (
            "schedule_same_order",
            "every epoch deals the samples in the same order",
            "generator=_generator(self.seed, epoch)).tolist()",
            "generator=_generator(self.seed, 0)).tolist()",
            "tests/data/test_data.py::test_anchors_are_exactly_the_tokens_whose_next_token_is_a_response_token",
        ),
        (
            "schedule_same_anchors",
            "every epoch has the same anchors",
            "generator=_generator(self.seed, epoch, index)",
            "generator=_generator(self.seed, 0, index)",
        ),
    ),
    *_of(
        "training/state.py",
        "tests/training/test_trainer.py",
        (
            "state_moments_lost",
            "a resumed run starts with fresh moments",
            'if f"exp_avg.{name}" in tensors:',
            'if f"exp_avg_.{name}" in tensors:',
            "tests/training/test_trainer.py::test_a_killed_and_resumed_run_ends_with_the_same_weights",
        ),
        (
            "state_step_one_early",
            "a resumed run repeats a step",
            'return int(stored["step"])',
            'return max(0, int(stored["step"]) - 1)',
            "tests/training/test_trainer.py::test_a_killed_and_resumed_run_ends_with_the_same_weights",
        ),
        (
            "state_weights_not_restored",
            "a resumed run starts from fresh weights",
            'parameter.copy_(_placed(tensors[f"weight.{name}"], parameter))',
            "pass",
        ),
        (
            "state_buffers_not_restored",
            "a resumed run divides aux hidden states by scales that it measured anew",
            'buffer.copy_(tensors[f"buffer.{name}"])',
            "pass",
        ),
        (
            "state_moments_of_gradients",
            "a resumed run takes the first moment for the second",
            'tensors[f"{m}.{name}"]',
            "tensors[f\"{'exp_avg' if m == 'exp_avg_sq' else m}.{name}\"]",
        ),
        (
            "state_counts_steps_anew",
            "a resumed run corrects the bias of its moments as in the first step",
            "for m in _MOMENTS}",
            'for m in _MOMENTS} | {"step": torch.zeros(())}',
        ),
        (
            "state_of_any_recipe",
            "a state of another recipe is resumed",
            ('    check_settings(directory, stored["settings"], settings)\n    path'),
            "    path",
        ),
    ),
    *_of(
        "checkpoints/dialects/base.py",
        "tests/checkpoints/test_dialects.py",
        (
            "checkpoint_d2t_absolute",
            "d2t is written as ids, not as offsets",
            "    return ids_Vd - torch.arange(len(ids_Vd), device=ids_Vd.device)",
            "    return ids_Vd.clone()",
            "tests/checkpoints/test_dialects.py::test_a_round_trip_keeps_every_field_and_every_bit",
        ),
        (
            "checkpoint_d2t_read_absolute",
            "d2t is read as ids (written alike, so a round trip agrees)",
            "    return ids_Vd - torch.arange(len(ids_Vd), device=ids_Vd.device)",
            "    return ids_Vd.clone()",
            "tests/checkpoints/test_dialects.py::test_a_damaged_draft_vocabulary",
            (("ids_Vd = d2t_Vd.long() + torch.arange(len(d2t_Vd))", "ids_Vd = d2t_Vd.long()"),),
        ),
        (
            "checkpoint_d2t_duplicates",
            "two draft tokens may name one target token",
            "    if len(names) != len(ids_Vd):",
            "    if False:",
            "tests/checkpoints/test_dialects.py::test_a_draft_vocabulary_names_no_token_twice",
        ),
        (
            "checkpoint_t2d_unread",
            "a t2d that contradicts d2t is accepted",
            "if t2d_V is not None and not torch.equal(",
            "if False and not torch.equal(",
        ),
    ),
    *_of(
        "checkpoints/dialects/eagle3.py",
        "tests/checkpoints/test_dialects.py",
        (
            "eagle3_aux_shift",
            "EAGLE-3's hidden-state numbers are read as layer outputs",
            "states = tuple(i - 1 for i in fields.integers(LAYERS, 0, depth))",
            "states = tuple(i for i in fields.integers(LAYERS, 0, depth))",
            "tests/checkpoints/test_dialects.py::test_a_round_trip_keeps_every_field_and_every_bit",
        ),
    ),
    *_of(
        "checkpoints/dialects/speculators.py",
        "tests/checkpoints/test_dialects.py",
        (
            "speculators_aux_shift_both",
            "speculators' layer numbers lack the one, reading and writing alike",
            "tuple(state - 1 for state in fields.integers(name, low=0, high=depth))",
            "tuple(state for state in fields.integers(name, low=0, high=depth))",
            "tests/checkpoints/test_dialects.py::test_a_round_trip_keeps_every_field_and_every_bit",
        ),
        (
            "speculators_layers_written_as_ours",
            "block drafters' layer numbers are written without the one",
            "_BLOCK_LAYERS: [aux_layer + 1 for aux_layer in config.target_layer_ids]",
            "_BLOCK_LAYERS: list(config.target_layer_ids)",
        ),
    ),
    *_of(
        "checkpoints/dialects/medusa.py",
        "tests/checkpoints/test_dialects.py",
        (
            "medusa_bias_random",
            "a head's missing bias is not zero",
            "rest[name].new_zeros(config.hidden_size)",
            "rest[name].new_ones(config.hidden_size)",
            "tests/checkpoints/test_dialects.py::test_medusa_without_biases_has_zero_ones",
        ),
    ),
    *_of(
        "drafters/base.py",
        "tests/drafters/test_alignment.py",
        (
            "draft_ids_unmapped",
            "the mask of a reduced draft vocabulary is read by draft token",
            "allowed_V if allowed_V is None or ids_C is None else allowed_V[ids_C]",
            "allowed_V if allowed_V is None or ids_C is None else allowed_V[: len(ids_C)]",
            "tests/proof/test_proof_structured.py::test_mutation_a_chain_ends_where_no_draft_token_may_come",
        ),
        (
            "checkpoint_scales_not_folded",
            "aux scales stay outside the checkpoint",
            "for name, tensor in self.folded_state_dict().items()}",
            "for name, tensor in self.state_dict().items()}",
            "tests/checkpoints/test_formats.py::test_round_trip_in_both_dialects",
        ),
        (
            "checkpoint_embedding_scale_lost",
            "a checkpoint's embedding scale is not read",
            "            embedding_scale=self.embedding_scale,\n",
            "            embedding_scale=None,\n",
            "tests/checkpoints/test_embedding_scale.py::test_a_factor_that_is_not_the_targets_is_an_error_wherever_the_drafter_meets_a_target",
        ),
        (
            "own_head_of_first",
            "all of a drafter's own heads are its first",
            "self.head_VdH[number]",
            "self.head_VdH[0]",
            "tests/drafters/test_head_drafters.py::test_a_medusa_of_the_release_has_an_lm_head_for_each_of_its_heads",
        ),
        (
            "rescale_inverted",
            "a new aux scale is divided out twice",
            "mul_(self._aux_columns() / before)",
            "mul_(before / self._aux_columns())",
            "tests/training/test_watch.py::test_aux_scales_fold_in_and_out_without_changing_the_function",
        ),
    ),
    *_of(
        "drafters/chain.py",
        "tests/drafters/test_alignment.py",
        (
            "chain_penalty_forgets_drafts",
            "penalties of a draft do not see the drafts before it",
            "chain.seen_V[chain.previous] += IN_OUTPUT",
            "chain.seen_V[chain.previous] += 0",
            "tests/drafters/test_sequential.py",
        ),
        (
            "chain_ids_not_mapped",
            "drafts are indices of the draft vocabulary",
            "chain.previous = index if ids_C is None else int(ids_C[index])",
            "chain.previous = index",
            "tests/drafters/test_sequential.py",
        ),
        (
            "chain_first_is_the_top",
            "p_d of a drawn token is said to be that of the likeliest (biased)",
            "first=probs_C[index].item()",
            "first=probs_C.max().item()",
            "tests/proof/test_proof.py::test_one_request",
        ),
        (
            "chain_noise_of_first_position",
            "all coupled drafts of a block race with the same noise",
            "call.position + len(chain.tokens)",
            "call.position",
            "tests/drafters/test_sequential.py",
        ),
        (
            "chain_rows_by_request",
            "a request's logits are looked for as if all requests drew",
            "{r: n for n, r in enumerate(active)}",
            "{r: min(r, len(active) - 1) for r in active}",
            "tests/drafters/test_sequential.py::test_a_request_that_draws_nothing_shifts_no_other",
        ),
        (
            "chain_forgets_sequential_head",
            "drafts are drawn without the sequential head",
            "            logits_AC = logits_AC + head.bias(_rows_of(latent_Rr, active))\n",
            "            pass\n",
        ),
    ),
    *_of(
        "drafters/heads.py",
        "tests/drafters/test_sequential.py",
        (
            "heads_offset_sign",
            "calibration's offset is subtracted",
            "(logit_N / temperature + offset)",
            "(logit_N / temperature - offset)",
            "tests/drafters/test_head_drafters.py::test_blocks_are_cut_by_limit_and_floor",
        ),
        (
            "heads_rnn_gate_swapped",
            "the recurrent head's gate keeps what it should replace",
            "gate_Nr * state_Nr + (1 - gate_Nr) * torch.tanh(candidate_Nr)",
            "(1 - gate_Nr) * state_Nr + gate_Nr * torch.tanh(candidate_Nr)",
        ),
    ),
    *_of(
        "drafters/draft.py",
        "tests/drafters/test_drawn_tree.py",
        (
            "without_not_normalised",
            "p_d without a token keeps its smaller mass",
            "return rest_V / mass if mass > 0 else rest_V",
            "return rest_V",
            "tests/proof/test_proof_tree.py",
        ),
        (
            "draft_parents_as_nodes",
            "the rows of a tree take their nodes' parents for rows",
            "[-1, *(parent + 1 for parent in self.parents)]",
            "[-1, *(max(parent, 0) for parent in self.parents)]",
            "tests/decoding/test_tree.py",
        ),
        (
            "rerank_breadth_first",
            "a dynamic tree keeps its first nodes instead of the likeliest",
            "key=lambda i: (-survivals[i], i)",
            "key=lambda i: i",
            "tests/drafters/test_eagle_tree.py",
        ),
        (
            "siblings_drawn_with_replacement",
            "siblings are drawn again and again from the whole p_d",
            "        probs_V = without(probs_V, drawn[-1])\n",
            "",
        ),
    ),
    *_of(
        "drafters/trees.py",
        "tests/drafters/test_static_tree.py",
        (
            "best_tree_forgets_prefix",
            "a node's product leaves out its parent",
            "candidate((*path, 0), -product)",
            "candidate((*path, 0), prefix)",
            "tests/drafters/test_candidates.py",
        ),
        (
            "accuracy_may_rise",
            "noise lets a later rank look better than an earlier one",
            "[min(row[: i + 1]) for i in range(ranks)]",
            "[row[i] for i in range(ranks)]",
            "tests/drafters/test_candidates.py",
        ),
    ),
    *_of(
        "drafters/eagle3.py",
        "tests/drafters/test_eagle3.py",
        (
            "eagle_context_position",
            "serving puts committed pairs one position early",
            "[s + 1 + i for s, n in zip(starts, counts, strict=True)",
            "[s + i for s, n in zip(starts, counts, strict=True)",
            "tests/drafters/test_eagle3.py",
        ),
        (
            "eagle_waits_with_first",
            "the feature that waits for its token is the oldest",
            "left.append(waiting[-1:].clone())",
            "left.append(waiting[:1].clone())",
            "tests/drafters/test_eagle3.py",
        ),
        (
            "eagle_tree_parent_row",
            "a child's state and mask are those of another row than its parent's",
            "chosen_RM // (children // M)",
            "chosen_RM % M",
            "tests/drafters/test_eagle_tree.py",
        ),
        (
            "eagle_norm_output_ignored",
            "a drafter that feeds back normed states is served with raw ones",
            "normed_XH if self.config.norm_output else state_XH",
            "state_XH",
        ),
    ),
    *_of(
        "drafters/mtp.py",
        "tests/drafters/test_mtp.py",
        (
            "mtp_rows_one_late",
            "deeper modules cache their rows one slot late",
            "start = max(0, session.length - depth - 1)",
            "start = max(0, session.length - depth)",
        ),
        (
            "mtp_position_stands_still",
            "rows behind the newest committed state keep its position",
            "position=session.length + further + 1 - len(rows)",
            "position=session.length + 1 - len(rows)",
        ),
    ),
    *_of(
        "drafters/dflash.py",
        "tests/drafters/test_alignment.py",
        (
            "dflash_predicts_from_first_rows",
            "drafts are read from the anchor's row on, trained and served alike",
            "self.norm(x_NKH[:, -self.config.gamma :])",
            "self.norm(x_NKH[:, : self.config.gamma])",
            "tests/drafters/test_dflash_parity.py",
        ),
        (
            "dflash_block_one_late",
            "serving puts blocks one position late",
            "[length + k for length in lengths for k in range(K)]",
            "[length + k + 1 for length in lengths for k in range(K)]",
        ),
    ),
    *_of(
        "drafters/layers.py",
        "tests/drafters/test_alignment.py",
        (
            "training_sees_anchor_feature",
            "training shows blocks the context slot of their own anchor",
            "(slots_S < anchors_N[:, None])[:, None]",
            "(slots_S <= anchors_N[:, None])[:, None]",
        ),
        (
            "serving_window_one_more",
            "serving shows one position more of the context than training",
            "(distance_KS < pattern.window)",
            "(distance_KS <= pattern.window)",
        ),
        (
            "draft_rope_angles_interleaved",
            "the halves of a rotation are pairs of neighbours",
            "torch.cat((angles, angles), dim=-1)",
            "angles.repeat_interleave(2, dim=-1)",
            "tests/drafters/test_dflash_parity.py",
        ),
    ),
    *_of(
        "drafters/domino.py",
        "tests/drafters/test_domino.py",
        (
            "domino_served_without_memory",
            "the served head knows the last token alone",
            "return latent_Nr, None, PrefixState(state_NG, k + 1)",
            "return latent_Nr, None, PrefixState(torch.zeros_like(state_NG), k + 1)",
        ),
        (
            "domino_corrects_one_later",
            "the served head leaves one draft more uncorrected",
            "k >= self.module.config.pure_draft_prefix_len",
            "k > self.module.config.pure_draft_prefix_len",
        ),
        (
            "domino_trained_on_the_next_token",
            "the GRU of training is asked for the state before the last token",
            "latent_NKr = self.latent(hidden_NKH, states_NKG)",
            "latent_NKr = self.latent(hidden_NKH, F.pad(states_NKG, (0, 0, 1, 0))[:, :-1])",
        ),
    ),
    *_of(
        "training/loss.py",
        "tests/training/test_objective.py",
        (
            "dpace_without_suffix",
            "D-PACE weighs a position by what precedes it alone",
            "return reached_NK.flip(-1).cumsum(-1).flip(-1)",
            "return reached_NK",
        ),
        (
            "dpace_trusts_what_cannot_be_drafted",
            "a token outside the draft vocabulary counts as drafted for sure",
            "found.append(log_probs_C.exp() * (label_C >= 0))",
            "found.append(torch.where(label_C >= 0, log_probs_C.exp(), 1.0))",
        ),
        (
            "base_share_beside_the_whole",
            "the corrected logits keep their whole loss beside the parallel ones",
            "ce_N=(1 - share) * config.ce * w_N",
            "ce_N=config.ce * w_N",
        ),
    ),
    *_of(
        "drafters/dflash2.py",
        "tests/drafters/test_candidates.py",
        (
            "selector_of_first_requests",
            "candidates are rescored with the tokens of the first requests",
            "self.previous_R[active]",
            "self.previous_R[: len(active)]",
            "tests/drafters/test_dflash2.py",
        ),
        (
            "candidates_ids_not_mapped",
            "candidates are indices of the draft vocabulary",
            "indices_AC if self.draft_ids_Vd is None else self.draft_ids_Vd[indices_AC]",
            "indices_AC",
            "tests/drafters/test_dflash2.py",
        ),
        (
            "convolution_kernel_of_earlier_row",
            "a row is mixed with the kernel of the row that it reads",
            "kernel[:, o:, o] * x[:, :-o]",
            "kernel[:, :-o, o] * x[:, :-o]",
            "tests/drafters/test_dflash2_parity.py",
        ),
    ),
    *_of(
        "drafters/medusa.py",
        "tests/drafters/test_head_drafters.py",
        (
            "medusa_reads_first_token",
            "heads read the first of the newly committed tokens",
            "aux_TLD[end - 1 : end, -1]",
            "aux_TLD[end - len(part) : end - len(part) + 1, -1]",
        ),
        (
            "medusa_levels_of_first_head",
            "all depths of a tree are the first head's",
            "logits_RKVd[:, k : k + 1]",
            "logits_RKVd[:, :1]",
            "tests/drafters/test_static_tree.py",
        ),
    ),
    *_of(
        "drafters/ngram.py",
        "tests/drafters/test_free_drafters.py",
        (
            "ngram_first_occurrence",
            "the first occurrence is copied instead of the latest",
            "self.places[tuple(self.tokens[end - n : end])] = end",
            "self.places.setdefault(tuple(self.tokens[end - n : end]), end)",
        ),
        (
            "ngram_shortest_suffix",
            "the shortest known suffix decides",
            "range(min(len(ending), self.config.longest), self.config.shortest - 1, -1)",
            "range(self.config.shortest, min(len(ending), self.config.longest) + 1)",
        ),
        (
            "library_of_one_token",
            "a library takes a number of tokens that hold nothing to copy",
            "responses < _LEAST_RESPONSES",
            "responses < 0",
            "tests/decoding/test_hybrid.py::test_no_fewer_tokens_of_responses_than_can_be_copied",
        ),
    ),
    *_of(
        "training/trainer.py",
        "tests/training/test_watch.py",
        (
            "resume_forgets_watch",
            "a resumed run has forgotten its best drafter",
            'self.watch.load_state_dict(read_run(state).get("watch", {}))',
            "self.watch.load_state_dict({})",
        ),
        (
            "learning_rate_one_step_ahead",
            "steps are taken with the next step's learning rate",
            'group["lr"] = learning_rate(step, config)',
            'group["lr"] = learning_rate(step + 1, config)',
            "tests/training/test_trainer.py",
        ),
        (
            "resume_features_of_first_steps",
            "a resumed run trains on the features of its first steps' samples",
            "for index, _ in part] for step in range(first, last))",
            "for index, _ in part] for step in range(last - first))",
            "tests/training/test_trainer.py",
        ),
    ),
    *_of(
        "training/watch.py",
        "tests/training/test_watch.py",
        (
            "watch_resumes_patience",
            "a resumed run has its whole patience again",
            'self._mark, self._failed = state["mark"], state["failed"]',
            'self._mark, self._failed = state["mark"], 0',
        ),
        (
            "watch_resumes_without_mark",
            "the first check of a resumed run always passes min_delta",
            'self._mark, self._failed = state["mark"], state["failed"]',
            'self._mark, self._failed = float("-inf"), state["failed"]',
        ),
        (
            "watch_compares_measures",
            "a resumed run compares with a best value that was measured otherwise",
            'if state.get("measure") != _measure_of(self.config):',
            "if not state:",
        ),
    ),
    *_of(
        "training/features.py",
        "tests/training/test_trainer.py",
        (
            "features_multiplied_by_scale",
            "aux hidden states are multiplied by their scale",
            "(raw_SLD.float() / aux_scale_L[:, None])",
            "(raw_SLD.float() * aux_scale_L[:, None])",
            "tests/drafters/test_dflash2.py::test_trained_equals_served",
        ),
    ),
    *_of(
        "data/responses.py",
        "tests/data/test_data.py",
        (
            "span_includes_prompt_token",
            "the last token of a prompt counts as generated",
            "spans.append((len(reply.prompt), len(tokens)))",
            "spans.append((len(reply.prompt) - 1, len(tokens)))",
        ),
        (
            "turns_always_joined",
            "a turn joins its conversation's sample though its prompt begins otherwise",
            "if spans and reply.prompt[: len(tokens)] != tokens:",
            "if False:",
        ),
    ),
    *_of(
        "calibration/fit.py",
        "tests/calibration/test_calibration.py",
        (
            "fit_without_prior",
            "few rounds move temperatures and offsets freely",
            "_PRIOR_P = np.array([4.0, 1.0])",
            "_PRIOR_P = np.array([1e-9, 1e-9])",
        ),
        (
            "fit_each_position_alone",
            "a temperature is fitted as if no position came before",
            "survival(rounds, scaling, k - 1)[judged_N, -1] if k > 1 else np.ones(int(judged_N.sum()))",
            "np.ones(int(judged_N.sum()))",
        ),
        (
            "outcome_one_position_late",
            "position k counts as accepted where k + 1 is",
            "return predicted_N, (rounds.accepted_N[judged_N] >= k)",
            "return predicted_N, (rounds.accepted_N[judged_N] > k)",
        ),
        (
            "ece_errors_cancel",
            "errors of different bins cancel",
            "np.abs(found.predicted_M - found.happened_M).sum() / len(predicted_N)",
            "np.abs((found.predicted_M - found.happened_M).sum()) / len(predicted_N)",
        ),
        (
            "auc_ties_count_whole",
            "a tie counts as a win",
            "np.cumsum(counts) - (counts - 1) / 2",
            "np.cumsum(counts)",
        ),
        (
            "scaling_multiplies",
            "logits are multiplied by the temperature",
            "logit(confidences_NJ) / temperatures_J + offsets_J",
            "logit(confidences_NJ) * temperatures_J + offsets_J",
        ),
        (
            "measured_on_fitted",
            "without tasks to fit on, what was fitted on is measured too",
            "[0 if fit_tasks else 1 :: 1 if fit_tasks else 2]",
            "[:: 1 if fit_tasks else 2]",
        ),
        (
            "estimator_never_sees_rejections",
            "the estimator is fitted to accepted positions alone",
            "(positions_K <= rounds.accepted_N[:, None])",
            "(positions_K < rounds.accepted_N[:, None])",
        ),
        (
            "replay_of_every_block",
            "blocks inside accepted runs count as rounds",
            "place += int(rounds.accepted_N[place]) + 1",
            "place += 1",
        ),
        (
            "refusal_never_for_ece",
            "a scaling that makes the calibration error larger is stored",
            "after <= before + noise:",
            "after <= before + 10:",
            "tests/calibration/test_calibration.py::test_a_scaling_that_tells_more_but_says_it_wrongly_is_refused",
        ),
    ),
    *_of(
        "calibration/collect.py",
        "tests/calibration/test_calibration.py",
        (
            "rounds_judged_one_late",
            "a block is compared with the text one token further on",
            "tokens[call.session.length + 1 :]",
            "tokens[call.session.length + 2 :]",
        ),
        (
            "rounds_verified_beyond_text",
            "a block that agrees to the text's end counts as verified whole",
            "gamma if right < len(left) else len(left)",
            "gamma",
            "tests/calibration/test_calibration.py::test_a_block_that_agrees_to_the_end_of_the_text_is_verified_that_far",
        ),
    ),
    *_of(
        "calibration/candidates.py",
        "tests/calibration/test_measured_trees.py",
        (
            "ranks_from_one",
            "with a reduced draft vocabulary ranks are counted from 1",
            "(logits_NVd > own_N[:, None]).sum(1)",
            "(logits_NVd >= own_N[:, None]).sum(1)",
        ),
    ),
    *_of(
        "checkpoints/checkpoint.py",
        "tests/checkpoints/test_formats.py",
        (
            "calibration_swapped",
            "temperatures and offsets are read as one another",
            "DraftCalibration(found.temperatures, found.offsets,",
            "DraftCalibration(found.offsets, found.temperatures,",
            "tests/checkpoints/test_formats.py::test_calibration_is_read_as_it_was_written",
        ),
        (
            "metadata_format_unread",
            "outrider.json of another format is read",
            "found != FORMAT:",
            "False:",
            "tests/evaluation/test_shipped.py::test_metadata_of_another_format_is_refused",
        ),
    ),
    *_of(
        "evaluation/machine_profile.py",
        "tests/evaluation/test_machine_profile.py",
        (
            "machine_profile_of_any_weights",
            "two targets of one name and of other shapes share a profile",
            "about = [setting.model_dump(), shapes,",
            "about = [setting.model_dump(),",
            "tests/evaluation/test_machine_profile.py::test_what_costs_follow_from_has_a_file_of_its_own",
        ),
        (
            "machine_profile_unchecked",
            "a profile that was copied from another machine is used",
            "        profile.check(setting)\n",
            "",
            "tests/evaluation/test_machine_profile.py::test_a_damaged_or_foreign_file_is_measured_again",
        ),
        (
            "machine_profile_uneven_for_ever",
            "a profile that a busy machine spoilt is used as long as a steady one",
            "profile.spread <= STEADY",
            "True",
            "tests/evaluation/test_machine_profile.py::test_it_is_kept_by_its_spread",
        ),
        (
            "machine_profile_measured_by_all",
            "a process that waited for another one's measurement measures too",
            "        known = _read(path, setting)\n        if known is not None:\n"
            "            return MachineProfile(known, path, None)\n        say(",
            "        say(",
            "tests/evaluation/test_machine_profile.py::test_of_several_processes_one_measures",
        ),
    ),
    *_of(
        "api/scheduling.py",
        "tests/api/test_scheduling.py",
        (
            "default_without_gate",
            "by default every round drafts, whatever it costs",
            "variant.policy, variant.gate, name",
            "variant.policy, None, name",
        ),
        (
            "default_trees_cut",
            "the nodes of trees are planned as a chain's tokens are",
            "if opened is None or opened.drafter.trees:",
            "if opened is None:",
        ),
    ),
    *_of(
        "loadtest/traces.py",
        "tests/loadtest/test_sampled.py",
        (
            "given_text_ratio_inverted",
            "a draft is given the text's token with p_t / p_d",
            "(probs[found[0]] / target_C[found[0]])",
            "(target_C[found[0]] / probs[found[0]])",
            "tests/loadtest/test_sampled.py::test_drafts_after_the_text_have_the_law_of_drafts_before_it",
        ),
        (
            "given_text_rejected_from_target",
            "a rejected draft is drawn from what the target has in excess",
            "residual(probs, target_C)",
            "residual(target_C, probs)",
            "tests/loadtest/test_sampled.py::test_drafts_after_the_text_have_the_law_of_drafts_before_it",
        ),
        (
            "given_text_follows_after_rejection",
            "drafts go on following the text behind a rejected one",
            "        self.agrees = False\n",
            "        self.agrees = True\n",
            "tests/loadtest/test_sampled.py::test_drafts_after_the_text_have_the_law_of_drafts_before_it",
        ),
        (
            "given_text_never_begins_anew",
            "after one rejection no later draft of the response is accepted",
            '"""Begin a new draft."""\n        self.agrees = True',
            '"""Begin a new draft."""\n        self.agrees &= True',
            "tests/loadtest/test_sampled.py::test_drafts_given_nearly_greedy_text_are_those_of_greedy_decoding",
        ),
        (
            "given_text_one_early",
            "drafts are held against the text one token further on",
            "DraftsGivenText(tokens, read + 1,",
            "DraftsGivenText(tokens, read,",
            "tests/loadtest/test_sampled.py::test_drafts_given_nearly_greedy_text_are_those_of_greedy_decoding",
        ),
        (
            "given_text_stale_features",
            "the drafter reads aux hidden states of the token before",
            "None if aux_TLD is None else aux_TLD[own]",
            "None if aux_TLD is None else aux_TLD[place - 1 : place]",
            "tests/loadtest/test_sampled.py::test_drafts_given_nearly_greedy_text_are_those_of_greedy_decoding",
        ),
    ),
    *_of(
        "loadtest/load.py",
        "tests/loadtest/test_sampled.py",
        (
            "coupled_seed_of_repeat",
            "coupled requests of later repeats are compared with other noise's text",
            'drawn = "" if self.coupled else repeat',
            "drawn = repeat",
            "tests/loadtest/test_sampled.py::test_requests_take_turns_with_the_temperatures",
        ),
        (
            "traffic_first_temperature",
            "every request has the same temperature",
            "temperature = order.pop()",
            "temperature = order[0]",
            "tests/loadtest/test_sampled.py::test_requests_take_turns_with_the_temperatures",
        ),
        (
            "traffic_shared_seed",
            "all requests share one seed",
            'f"{seed} request {number} {drawn}"',
            'f"{seed} request {drawn}"',
            "tests/loadtest/test_sampled.py::test_requests_take_turns_with_the_temperatures",
        ),
        (
            "traffic_by_parity",
            "temperatures take turns in one order, as tasks do",
            ".sample(self.temperatures, len(self.temperatures))",
            ".sample(self.temperatures, 0) or list(self.temperatures)",
            "tests/loadtest/test_sampled.py::test_requests_take_turns_with_the_temperatures",
        ),
    ),
    *_of(
        "loadtest/sweep.py",
        "tests/loadtest/test_sampled.py",
        (
            "coupled_not_compared",
            "coupled responses are not compared with plain decoding's",
            "        if ask.comparable:\n",
            "        if ask.params.temperature == 0.0:\n",
            "tests/loadtest/test_sampled.py::test_the_real_model_under_a_mixture",
        ),
        (
            "sampled_compared",
            "sampled responses have to be plain decoding's",
            "        if ask.comparable:\n",
            "        if True:\n",
            "tests/loadtest/test_sampled.py::test_the_real_model_under_a_mixture",
        ),
    ),
    *_of(
        "loadtest/metrics.py",
        "tests/loadtest/test_gains.py",
        (
            "gains_inverted",
            "what the baseline has over the variant is its gain",
            "my.read(axis, asked.at) / their.read(axis, asked.at)",
            "their.read(axis, asked.at) / my.read(axis, asked.at)",
        ),
        (
            "gains_extrapolated",
            "a speed that was never reached has a gain",
            "return bool(values.min() <= value <= values.max())",
            "return True",
        ),
        (
            "gains_of_dominated_points",
            "a load that is worse for all is part of the curve",
            "if not kept or point[1] > kept[-1][1]:",
            "if True:",
        ),
        (
            "gains_linear",
            "lines between loads are straight without logarithms",
            "logs_L2 = np.log(self.points_L2[np.argsort(self.points_L2[:, axis])])",
            "logs_L2 = self.points_L2[np.argsort(self.points_L2[:, axis])]",
            "tests/loadtest/test_gains.py",
            (
                (
                    "x = logs_L2[:, axis], logs_L2[:, 1 - axis], np.log(value)",
                    "x = logs_L2[:, axis], logs_L2[:, 1 - axis], value",
                ),
                (
                    "return float(np.exp(y_L[place] + slope * (x - x_L[place])))",
                    "return float(y_L[place] + slope * (x - x_L[place]))",
                ),
            ),
        ),
    ),
    *_of(
        "loadtest/metrics.py",
        "tests/loadtest/test_several_drafters.py",
        (
            "drafter_trained_again_unnoticed",
            "points of a drafter that changed go on under its name",
            "sorted(compared | (now.keys() & before.keys()))",
            "sorted(compared)",
        ),
    ),
    *_of(
        "loadtest/simulate.py",
        "tests/loadtest/test_simulate.py::test_errors_are_in_per_cent_of_the_measured",
        (
            "ratio_error_of_throughput",
            "the error of a ratio is that of the throughput",
            "100 * (ratio / plain - 1)",
            "100 * (ratio - 1)",
        ),
    ),
    *_of(
        "backends/local.py",
        "tests/loadtest/test_several_drafters.py",
        (
            "variant_of_every_drafter",
            "a variant of one drafter is measured for all",
            "named = [prefix] if prefix else list(drafters)",
            "named = list(drafters)",
        ),
        (
            "fixed_lengths_beyond_the_drafter",
            "a length that a drafter does not have is asked of it",
            "return 1 <= int(fixed[1]) <= self.slots",
            "return True",
        ),
    ),
    *_of(
        "decoding/trace.py",
        "tests/decoding/test_trace.py",
        (
            "trace_first_left_out_is_verified",
            "the first draft that the policy left out is told as verified",
            "if node >= verified:",
            "if node > verified:",
        ),
        (
            "trace_reads_on_behind_the_end",
            "drafts behind an accepted one that ended the response are told as rejected",
            "ended = committed <= result.verdict.accepted",
            "ended = False",
        ),
        (
            "trace_sibling_behind_the_accepted",
            "siblings behind an accepted one are told as rejected",
            "any(sibling < node and sibling in path",
            "any(sibling > node and sibling in path",
        ),
        (
            "trace_compared_row_of_the_node",
            "the probability compared is read from the row behind the draft",
            "compared.get(parent + 1)",
            "compared.get(node + 1)",
        ),
        (
            "trace_forgets_the_last_tokens",
            "tokens behind the last whole chunk of the vocabulary are never among the likeliest",
            "torch.arange(behind, V, device",
            "torch.arange(behind, behind, device",
        ),
        (
            "trace_rows_of_the_round_before",
            "a round's likeliest tokens are those in the rows of the round before",
            "first = own.stop",
            "first = own.start",
        ),
        (
            "trace_rows_between_accepted_drafts",
            "rows of rejected drafts are taken for those of the accepted path",
            "adjacent = rows == list(range(rows[0], rows[0] + len(rows)))",
            "adjacent = True",
        ),
        (
            "trace_plain_is_bonus",
            "tokens of rounds without verified drafts are told as a bonus",
            'origin if result.verified.tokens else "plain"',
            "origin",
        ),
    ),
    *_of(
        "engine/engine.py",
        "tests/engine/test_steps.py::test_a_trace_changes_no_token_and_is_only_of_who_asks",
        (
            "engine_traces_unasked",
            "every request is traced",
            "        if request.trace:\n",
            "        if True:\n",
        ),
    ),
    *_of(
        "serving/inspector.py",
        "tests/serving/test_inspector.py",
        (
            "inspector_counts_unread_as_reached",
            "every verified draft counts as reached",
            "range(min(output.verified, output.accepted + 1))",
            "range(output.verified)",
        ),
        (
            "inspector_keeps_listeners",
            "listeners that have gone are told on",
            "watches.discard(watch)",
            "pass",
        ),
        (
            "inspector_holds_up_the_end",
            "a listener holds up the end of the server",
            "while not closing():",
            "while True:",
        ),
        (
            "inspector_counts_are_kept",
            "an event has the counts of those before it again",
            "        self._clear()\n        return event",
            "        return event",
        ),
    ),
    *_of(
        "serving/app.py",
        "tests/serving/test_inspector.py",
        (
            "inspector_events_without_key",
            "what the engine does is told without the key",
            '"/version", "/")',
            '"/version", "/", "/inspector/events")',
        ),
    ),
    *_of(
        "serving/worker.py",
        "tests/serving/test_toy_server.py",
        (
            "serving_cancel_keeps_request",
            "a request whose client has gone goes on",
            "            self._commands.put(found)\n",
            "",
            "tests/serving/test_hostile_clients.py",
        ),
        (
            "serving_keeps_part_of_refused",
            "of prompts that are refused together the first are decoded",
            "for earlier in requests[:done]:",
            "for earlier in requests[:0]:",
        ),
        (
            "serving_queue_counts_http_requests",
            "the queue's bound counts HTTP requests, not their choices",
            "if len(self._live) + requests > ",
            "if len(self._live) + 1 > ",
        ),
    ),
    *_of(
        "serving/metrics.py",
        "tests/serving/test_toy_server.py",
        (
            "serving_preemptions_not_counted",
            "preempted requests are not counted",
            "self._preempted.inc(step.preempted)",
            "self._preempted.inc(0)",
        ),
        (
            "serving_position_one_late",
            "accepted drafts are counted one position late",
            "self._by_position[: output.accepted]",
            "self._by_position[1 : output.accepted + 1]",
            "tests/serving/test_smollm_server.py::test_text_is_that_of_generate",
        ),
    ),
    *_of(
        "serving/schema.py",
        "tests/serving/test_smollm_server.py",
        (
            "serving_choices_share_a_seed",
            "all choices have the first one's seed",
            "self.seed + choice",
            "self.seed",
            "tests/serving/test_smollm_server.py::test_choices_and_seeds",
        ),
    ),
    *_of(
        "serving/app.py",
        "tests/serving/test_hostile_clients.py",
        (
            "serving_models_without_key",
            "the list of models needs no key",
            '_OPEN_PATHS = ("/health",',
            '_OPEN_PATHS = ("/v1/models", "/health",',
            "tests/serving/test_toy_server.py::test_keys_are_asked_for_where_one_is_set",
        ),
        (
            "serving_body_limit_per_piece",
            "the limit of a body holds for each of its pieces",
            'size += len(message.get("body", b""))',
            'size = len(message.get("body", b""))',
        ),
        (
            "serving_field_twice",
            "of a field that is given twice the last value counts",
            "if name in fields:",
            "if name in ():",
        ),
    ),
    *_of(
        "serving/tools.py",
        "tests/serving/test_structured.py",
        (
            "tools_arguments_of_any_kind",
            "a call that is required has any object as its arguments",
            "_ANY_OBJECT | function.parameters if follows else _ANY_OBJECT",
            "_ANY_OBJECT",
        ),
        (
            "tools_several_calls",
            "parallel_tool_calls false lets a response have several calls",
            'one = format == "llama" or not asked.parallel_tool_calls',
            'one = format == "llama"',
        ),
        (
            "tools_mark_in_a_text_ends_the_call",
            "a mark in a text of a call's JSON ends the call",
            "if complete or self._first_mark:",
            "if True:",
            "tests/serving/test_toy_server.py::test_tool_calls_are_read",
        ),
    ),
    *_of(
        "serving/connection.py",
        "tests/serving/test_hostile_clients.py",
        (
            "serving_time_limit_per_piece",
            "every piece of a request gives its client time anew",
            "if self._arrival is None:",
            "if _cancel(self._arrival) or True:",
        ),
        (
            "serving_deaf_behind_pipelined",
            "a client that goes behind a pipelined request is not noticed",
            "                self.flow.resume_reading()  # uvicorn pauses it for a pipelined request\n",
            "",
        ),
        (
            "serving_unread_for_ever",
            "a client that does not read keeps its connection",
            "limits.unread_seconds, self.transport.abort)",
            "1000 * limits.unread_seconds, self.transport.abort)",
        ),
    ),
    *_of(
        "engine/engine.py",
        "tests/serving/test_toy_server.py",
        (
            "engine_claims_no_memory",
            "the KV pool's memory comes as blocks are first written, so that a server grows under load",
            "        self.kv.claim()\n",
            "",
        ),
        (
            "engine_learns_from_warm_up",
            "what is learned of the warm-up's drafts stays",
            "self.drafting, self.last = drafting, None",
            "self.last = None",
        ),
    ),
]

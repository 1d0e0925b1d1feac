"""Faults where several target groups share a draft."""

from tests.mutants.mutant import Mutant

SHARED = "tests/engine/test_shared_draft.py::"
WHO_ELSE = SHARED + "test_tokens_do_not_depend_on_who_else_is_served"
SAME_MODEL = SHARED + "test_a_draft_that_is_the_target_is_accepted_always"
BIAS = SHARED + "test_links_that_break_do_not_bias_the_output"
LOST_BLOCK = SHARED + "test_of_a_block_that_is_lost_nothing_is_kept_not_even_an_end"
WAITED_FOR = SHARED + "test_sampled_tokens_are_the_same_where_a_group_waits_for_its_draft"
MEETINGS = "tests/engine/test_meetings.py::"

GROUP_FAULTS = (
    Mutant(
        name="groups-use-the-same-slots",
        file="engine/grouping.py",
        old="first_slot, first_page = group * self.num_slots, group * self.num_pages",
        new="first_slot, first_page = 0, group * self.num_pages",
        tests=(WHO_ELSE,),
    ),
    Mutant(
        name="groups-use-the-same-pages",
        file="engine/grouping.py",
        old="first_slot, first_page = group * self.num_slots, group * self.num_pages",
        new="first_slot, first_page = group * self.num_slots, 0",
        tests=(SAME_MODEL,),
    ),
    Mutant(
        name="reply-to-groups-split-at-the-wrong-candidate",
        file="engine/grouping.py",
        old="own, of_own = slice(begin, end), slice(candidates_before[begin], candidates_before[end])",
        new="own, of_own = slice(begin, end), slice(begin, begin + candidates_before[end] - candidates_before[begin])",
        tests=(WHO_ELSE,),
    ),
    Mutant(
        name="distributions-of-groups-in-another-order",
        file="engine/grouping.py",
        old="Dense(torch.cat(dense)) if dense",
        new="Dense(torch.cat(dense[::-1])) if dense",
        tests=(BIAS,),
    ),
    Mutant(
        name="random-keys-of-another-group",
        file="engine/grouping.py",
        old="getattr(request.opened, field.name) for request in requests])",
        new='getattr(request.opened, field.name) for request in (requests[::-1] if field.name == "stream_keys" else requests)])',
        tests=(WHO_ELSE,),
    ),
    Mutant(
        name="scores-of-groups-that-are-not-served-forgotten",
        file="engine/draft_scores.py",
        old="holders.difference_update(groups)",
        new="holders.clear()",
        tests=(SHARED + "test_a_group_that_is_late_keeps_the_scores_of_its_candidates",),
    ),
    Mutant(
        name="history-of-a-row-taken-from-another-group",
        file="engine/histories.py",
        old="groups_R = slots_R // self._num_slots",
        new="groups_R = slots_R * 0",
        tests=("tests/engine/test_histories.py",),
    ),
    Mutant(
        name="end-brought-by-a-lost-block-kept",
        file="engine/out_of_memory.py",
        old="void = [sequence for sequence in ended if sequence.has_ended_in_block]",
        new="void: list[Sequence] = []",
        tests=(LOST_BLOCK,),
    ),
    Mutant(
        name="sequence-that-depends-on-lost-draft-goes-on",
        file="engine/out_of_memory.py",
        old="        if change.starts_over:\n",
        new="        if False:\n",
        tests=(WAITED_FOR,),
    ),
    Mutant(
        name="draft-that-is-back-knows-nothing-of-the-prefixes",
        file="engine/shared_draft.py",
        old="            if self._is_alone:\n",
        new="            if False:\n",
        tests=(SAME_MODEL,),
    ),
    Mutant(
        name="draft-waits-for-a-group-that-does-not-come",
        file="engine/meetings.py",
        old="and now < group.replied_at + LATEST * group.away.value",
        new="",
        tests=(MEETINGS + "test_nobody_waits_for_a_group_that_does_not_come",),
    ),
    Mutant(
        name="draft-waits-for-as-long-as-it-takes",
        file="engine/meetings.py",
        old="return latest if expected <= latest else now",
        new="return expected",
        tests=(MEETINGS + "test_a_group_that_comes_later_than_a_burst_takes_is_not_waited_for",),
    ),
    Mutant(
        name="draft-never-waits",
        file="engine/meetings.py",
        old="return best if rounds[best] < WORTH_WAITING * alone else 1",
        new="return 1",
        tests=(MEETINGS + "test_groups_meet_where_that_makes_rounds_shorter",),
    ),
    Mutant(
        name="work-ahead-waits-for-nobody",
        file="engine/meetings.py",
        old="        if not num_joining:\n            return now",
        new="        if True:\n            return now",
        tests=(MEETINGS + "test_a_burst_ahead_begins_in_time_for_those_that_are_away",),
    ),
    Mutant(
        name="groups-that-ask-in-turn-never-meet",
        file="engine/meetings.py",
        old="(self._delays(now, due, coming, count), -count)",
        new="self._delays(now, due, coming, count)",
        tests=(MEETINGS + "test_groups_that_ask_in_turn_meet_if_that_makes_nobody_late",),
    ),
    Mutant(
        name="only-the-last-of-several-replies-is-learned-from",
        file="engine/lessons.py",
        old="        self._verified.append(_Verified(",
        new="        self._verified[:] = []\n        self._verified.append(_Verified(",
        tests=(WHO_ELSE,),
    ),
    Mutant(
        name="group-stays-with-another-draft-though-its-own-is-back",
        file="engine/shared_draft.py",
        old="if link.draft != self._own_draft and",
        new="if False and",
        tests=(WAITED_FOR,),
    ),
    Mutant(
        name="group-that-turns-to-its-own-draft-goes-on-where-it-may-not",
        file="engine/shared_draft.py",
        old='answers again", starts_over=not self._decodes_alone)',
        new='answers again", starts_over=False)',
        tests=(WAITED_FOR,),
    ),
    Mutant(
        name="any-draft-counts-as-the-group-s-own",
        file="job/shared_drafts.py",
        old='if own_alone and address["draft"] != self.own_draft:',
        new="if False:",
        tests=("tests/job/test_target_groups.py::test_a_group_finds_its_own_draft_among_others",),
    ),
    Mutant(
        name="status-tells-groups-by-number-alone",
        file="job/status.py",
        old="int(match[1]) % num_drafts",
        new="int(match[1])",
        tests=("tests/job/test_status.py::test_target_groups_are_told_apart_with_their_drafts",),
    ),
    Mutant(
        name="emulated-branches-catch-less-than-measured",
        file="emulation/markov.py",
        old="missed_by_W = (1 - _spread(int(is_wrong_V.sum()), generator)) ** (-1 / RANK_EXPONENT) - 1",
        new="missed_by_W = (1 - _spread(int(is_wrong_V.sum()), generator)) ** -2 - 1",
        tests=("tests/emulation/test_markov.py",),
    ),
    Mutant(
        name="goodput-runs-the-tokens-of-all-targets-in-one-pass",
        file="policies/goodput.py",
        old="(-(-number // round.num_targets) for number in (num_tokens, round.num_rows))",
        new="(number for number in (num_tokens, round.num_rows))",
        tests=("tests/policies/test_goodput.py",),
    ),
    Mutant(
        name="goodput-has-the-targets-pass-for-every-burst",
        file="policies/goodput.py",
        old="over_ns = spent_ns - self._pass_ns(round.num_pass_tokens, round) / round.num_bursts",
        new="over_ns = spent_ns - self._pass_ns(round.num_pass_tokens, round)",
        tests=("tests/policies/test_goodput.py",),
    ),
    Mutant(
        name="goodput-in-turns-forgets-the-other-bursts",
        file="policies/goodput.py",
        old="        if round.num_bursts <= 1:\n            return added_RS",
        new="        if True:\n            return added_RS",
        tests=("tests/policies/test_goodput.py",),
    ),
    Mutant(
        name="policy-is-not-told-of-the-other-targets",
        file="engine/draft_ahead.py",
        old="            num_targets=len(request.groups),\n            num_bursts=self._num_bursts,\n        )\n\n    def wanted_now",
        new="        )\n\n    def wanted_now",
        tests=(SHARED + "test_policies_are_told_whose_sequences_they_are",),
    ),
    Mutant(
        name="status-is-not-told-of-a-draft-that-is-lost",
        file="engine/shared_draft.py",
        old="            self._on_loss()\n",
        new="",
        tests=(WAITED_FOR,),
    ),
    Mutant(
        name="status-is-not-told-of-a-draft-that-answers",
        file="job/target_group.py",
        old="            self._tell_draft(link.draft)\n",
        new="",
        tests=(
            "tests/job/test_target_groups.py::test_a_draft_that_dies_for_good_hands_its_groups_to_the_other",
        ),
    ),
    Mutant(
        name="report-mixes-target-groups",
        file="reporting/speed.py",
        old='is_its_S = run.shards["replica"] == place',
        new='is_its_S = run.shards["replica"] >= place',
        tests=("tests/reporting/test_figures.py",),
    ),
    Mutant(
        name="choice-of-rounds-takes-the-bursts-as-they-happen-to-be",
        file="theory/rounds.py",
        old="bursts = [(count, -(-num_groups // count) * own_rows) for count in range(1, num_groups + 1)]",
        new="bursts = [(self._num_bursts, num_rows)]",
        tests=("tests/theory/test_rounds.py",),
    ),
    Mutant(
        name="choice-of-rounds-forgets-the-other-targets",
        file="theory/rounds.py",
        old="bursts = [(count, -(-num_groups // count) * own_rows) for count in range(1, num_groups + 1)]",
        new="bursts = [(1, num_rows)]",
        tests=("tests/theory/test_rounds.py",),
    ),
)

"""How ``--policies`` is read: names, options, first lengths and caps."""

from __future__ import annotations

import pytest

from specdist.policies.choice import PolicyChoice
from specdist.policies.registry import HEAD_POLICIES
from specdist.policies.registry import POLICIES as BUILT
from specdist.utils.errors import UserError
from tests.lab.emulation.choices import INITIAL_LENGTHS, POLICIES, policy_choices


def labels(*names: str, lengths: list[int] | None = None, cap: int | None = None) -> list[str]:
    return [choice.label for choice in policy_choices(names, lengths, cap)]


def test_all_stands_for_every_policy_that_can_be_built() -> None:
    without_head = set(BUILT) - set(HEAD_POLICIES)
    assert set(POLICIES) == without_head
    choices = policy_choices(["all"], None, None)
    assert {choice.policy for choice in choices} == without_head
    firsts = {name: [c.first_length for c in choices if c.policy == name] for name in without_head}
    for name in ("fixed", "hf_heuristic", "gammatune", "gammatune_plus"):
        assert firsts[name] == list(INITIAL_LENGTHS)
    for name in ("confidence", "draft_verify", "svip", "adaedl", "goodput"):
        assert firsts[name] == [None]


def test_all_policies_share_one_cap_that_reaches_the_longest_first_length() -> None:
    choices = policy_choices(["all"], None, None)
    assert {choice.max_draft_tokens for choice in choices if choice.policy != "fixed"} == {24}
    assert [choice.max_draft_tokens for choice in policy_choices(["svip"], None, None)] == [20]
    assert [choice.max_draft_tokens for choice in policy_choices(["svip", "fixed"], [2, 5], None)] == [
        20,
        2,
        5,
    ]


def test_default_first_lengths_end_at_the_cap() -> None:
    assert labels("gammatune", cap=5) == [f"gammatune from {length}" for length in (1, 2, 3, 5)]


def test_the_options_of_a_policy_are_part_of_its_name() -> None:
    found = labels(
        "svip", "svip:stop_root_entropy=0.5", "gammatune:length_bonus=1,length_rate=0.25", lengths=[3]
    )
    assert found == [
        "svip",
        "svip stop_root_entropy=0.5",
        "gammatune length_bonus=1 length_rate=0.25 from 3",
    ]
    [choice] = policy_choices(["fixed:num_draft_tokens=4"], None, None)
    assert choice == PolicyChoice("fixed", {"num_draft_tokens": 4})
    assert (choice.label, choice.family, type(choice.first_length)) == ("K = 4", "fixed", int)


def test_every_setting_is_run_once() -> None:
    assert labels("svip", "all", "svip:stop_root_entropy=0.3", lengths=[5]).count("svip") == 1
    assert labels("fixed", "fixed:num_draft_tokens=2", lengths=[1, 2]) == ["K = 1", "K = 2"]


@pytest.mark.parametrize(
    ("names", "lengths", "cap", "message"),
    [
        (["svop"], None, None, "'svop' is not a length policy: choose from all, fixed"),
        (["none"], None, None, "the target alone is always measured"),
        (["svip:stop=1"], None, None, "'stop' is not an option of svip, which takes stop_root_entropy"),
        (["svip:stop_bound=1"], None, None, "'stop_bound' is not an option of svip"),
        (["svip:stop_root_entropy=much"], None, None, "stop_root_entropy takes float, not 'much'"),
        (["fixed:num_draft_tokens=2.5"], None, None, "num_draft_tokens takes int, not '2.5'"),
        (
            ["svip:stop_root_entropy=-1"],
            None,
            None,
            "--stop_root_entropy -1.0 must be a finite number of at least 0",
        ),
        (["svip:max_draft_tokens=9"], None, None, "use --max_draft_tokens"),
        (["svip", "goodput"], [1, 2], None, "--initial_lengths has no effect"),
        (["fixed:num_draft_tokens=2"], [1, 2], None, "--initial_lengths has no effect"),
        (["fixed"], None, 9, "--max_draft_tokens has no effect"),
        (["gammatune"], [1, 9], 8, "--initial_lengths 9 is more than --max_draft_tokens 8"),
        (["gammatune:min_draft_tokens=3"], [2], None, "--min_draft_tokens 3 is more than"),
    ],
)
def test_what_cannot_be_is_refused(
    names: list[str], lengths: list[int] | None, cap: int | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        policy_choices(names, lengths, cap)

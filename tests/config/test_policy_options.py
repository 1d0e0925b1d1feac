"""The options of policies: each has its own, with its own defaults; heads, and drafting ahead."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from specdist.config.arguments import resolved_yaml
from specdist.config.generate import GenerateConfig
from specdist.policies.registry import HEAD_KINDS, OPTION_NAMES, owners_of
from specdist.utils.errors import UserError
from tests.config.options import config, from_file

ADAPTIVE = sorted(set(get_args(get_type_hints(GenerateConfig)["policy"])) - {"none", "fixed", "auto"})


def head_of(policy: str) -> dict[str, str]:
    return {"head": "h"} if policy in HEAD_KINDS else {}


def test_a_policy_has_the_defaults_of_its_own_options_only() -> None:
    """Options of other policies stay empty, in the record of the run and when two runs are compared."""
    svip = config(draft="small", policy="svip")
    assert svip.policy_options == {"max_draft_tokens": 20, "stop_root_entropy": 0.3}
    assert (svip.num_draft_tokens, svip.stop_probability, svip.block_tokens) == (None, None, 21)
    assert config(draft="small", policy="fixed").policy_options == {"num_draft_tokens": 5}
    assert (config(draft="small").policy, config().policy) == ("goodput", "none")
    assert config(draft="small", policy="none", num_draft_tokens=3).policy_options == {}
    plus = config(draft="small", policy="gammatune_plus", stop_probability=0.25, max_draft_tokens=9)
    assert plus.policy_options == {
        "num_draft_tokens": 5, "max_draft_tokens": 9, "stop_probability": 0.25, "length_rate": 0.5,
    }  # fmt: skip
    assert plus.block_tokens == 10


@pytest.mark.parametrize("policy", ["fixed", *ADAPTIVE])
def test_an_option_of_another_policy_is_refused(policy: str) -> None:
    """It would be ignored, and the run would seem to be another one."""
    own = config(draft="small", policy=policy, **head_of(policy)).policy_options
    assert own
    for name in OPTION_NAMES:
        owners = owners_of(name)
        if name in own:
            assert policy in owners
            continue
        value = next(iter(owners.values())).default
        with pytest.raises(UserError) as error:
            config(draft="small", policy=policy, **{name: value})
        assert str(error.value).startswith(f"--{name} {value} has no effect with --policy {policy}: ")
        assert all(owner in str(error.value) for owner in owners)


@pytest.mark.parametrize("policy", ["fixed", *ADAPTIVE])
def test_the_resolved_configuration_of_every_policy_gives_the_same_run(tmp_path: Path, policy: str) -> None:
    """Filled-in defaults come back as given options, which the policy takes."""
    options = config(draft="small", policy=policy, **head_of(policy))
    assert from_file(tmp_path, resolved_yaml(options)) == options


def test_only_a_verifier_that_is_trusted_makes_a_run_lossy() -> None:
    """And it is trusted by default: that is the paper's method."""
    sprinter = {"draft": "small", "policy": "sprinter", "head": "h"}
    assert (config(**sprinter).verify, config(**sprinter).is_exact) == ("doubted", False)
    assert config(**sprinter, verify="all").is_exact
    for policy in ("fixed", "specdecpp", *ADAPTIVE):
        if policy != "sprinter":
            assert config(draft="small", policy=policy, **head_of(policy)).is_exact
    assert config().is_exact


def test_drafting_ahead_needs_a_rank_of_its_own() -> None:
    """In one process the two models cannot work at the same time."""
    ahead = config(draft="d", overlap="asynchronous")
    ahead.check_world(2)
    with pytest.raises(UserError, match=r"--overlap asynchronous needs a rank .* 1 rank .*--num_processes 2"):
        ahead.check_world(1)
    assert not config(draft=None, overlap="asynchronous").is_asynchronous
    # By default every round chooses, except where what is emitted would depend on it.
    config(draft="d").check_world(1)
    assert config(draft="d").chooses_rounds and not config().chooses_rounds
    assert not config(draft="d", policy="sprinter", head="h").chooses_rounds

"""Every mode of an emulation emits the tokens of the target's table, and the result says what it measured."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from specdist.config.arguments import parse_arguments
from specdist.utils.errors import UserError
from tests.lab.emulation.__main__ import main
from tests.lab.emulation.config import MODE_OPTIONS, EmulationConfig
from tests.lab.emulation.markov import TARGET_WEIGHTS
from tests.lab.emulation.run import Emulation
from tests.statistics import chi_square_p_value

# Passes of six milliseconds, and draft steps of a tenth of that: work ahead pays, whatever hosts take.
SMALL = ["--emulate", "h100-sxm", "--target", "8b", "--draft", "0.5b", "--prompt_tokens", "20",
         "--output_tokens", "24", "--batch_sizes", "6", "--rounds", "40", "--acceptance", "0.7"]  # fmt: skip
# Of a chi-square that is right; all numbers are seeded, so that it does not fail by chance.
LEAST_P = 1e-4


@pytest.mark.parametrize(
    ("temperature", "policy"), [("0", "fixed"), ("1", "confidence")], ids=["greedy", "sampled"]
)
def test_every_mode_emits_the_targets_own_tokens(temperature: str, policy: str) -> None:
    """Greedy: each the next on the circle. Sampled: as far on as the target's probabilities say."""
    chosen = ["--temperature", temperature, "--policies", policy, "--modes", *MODE_OPTIONS]
    emulation = Emulation(parse_arguments(EmulationConfig, [*SMALL, *chosen]))
    cases = list(emulation.cases())
    assert {case.mode for case in cases} == {*MODE_OPTIONS.values()}
    for case in cases:
        run = emulation.run_of(case)
        completions = list(run.engine(run.requests(30)).run())
        has_drafted = any(completion.num_accepted_draft_tokens for completion in completions)
        assert len(completions) == 30 and has_drafted == (case.mode != "target only"), case
        places_V = np.argsort(run.pair.order_V)
        counts = np.zeros(len(places_V), int)
        for completion in completions:
            ids = [completion.request.prompt_ids[-1], *completion.token_ids]
            np.add.at(counts, np.diff(places_V[ids]) % len(places_V), 1)
        if temperature == "0":
            assert counts[1] == counts.sum(), case
        else:
            steps = counts[1 : 1 + len(TARGET_WEIGHTS)]
            assert steps.sum() == counts.sum(), case
            p_value = chi_square_p_value(torch.from_numpy(steps), torch.from_numpy(TARGET_WEIGHTS))
            assert p_value > LEAST_P, (case, steps)


def test_the_last_line_is_json_with_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    """What other programs read."""
    modes = ["--modes", "colocated", "--policies", "goodput", "--batch_sizes", "1", "6"]
    assert main([*SMALL, *modes, "--rounds", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    results = json.loads(lines[-1])["outcomes"]
    assert [(one["batch_size"], one["mode"], one["policy"]) for one in results] == [
        (1, "target only", "target only"),
        (1, "colocated", "goodput"),
        (6, "target only", "target only"),
        (6, "colocated", "goodput"),
    ]
    assert min(one["tokens_per_s"] for one in results) > 0 and results[0]["speedup_per_gpu"] == 1
    assert any("colocated" in line and "goodput" in line for line in lines[:-1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--emulate", "tpu"], "--gpu tpu is not in the table"),
        (["--vocab_size", "1000"], "--vocab_size 1000 must be a power of two"),
        (["--policies", "specdecpp"], "--policies specdecpp is not a policy without a head"),
        (
            ["--policies", "svip:stop=1"],
            "svip:stop=1 is not an option of svip, which takes max_draft",
        ),
    ],
)
def test_a_mistake_is_told(given: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Emulation(parse_arguments(EmulationConfig, [*SMALL, *given]))


def test_a_draft_on_rank_0_of_a_sharded_target_takes_the_time_that_was_planned() -> None:
    """Both models' passes and those over prompts, each after the other on one device. A batch that were full
    of sequences further on than the usual ones would run more prompts, and be slower."""
    large = ["--emulate", "b200", "--target", "70b", "--draft", "1b", "--tp_size", "4", "--batch_sizes", "32"]
    options = ["--modes", "colocated", "--policies", "fixed", "--rounds", "60", "--acceptance", "0.8"]
    emulation = Emulation(parse_arguments(EmulationConfig, [*large, *options]))
    *_, case = emulation.cases()
    outcome = emulation.measure(case)
    assert outcome.num_gpus == 4 and outcome.planned_tokens_per_s is not None
    assert outcome.tokens_per_s == pytest.approx(outcome.planned_tokens_per_s, rel=0.05)

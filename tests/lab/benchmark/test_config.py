"""Options of the benchmark: what is refused, and how the message names it."""

from __future__ import annotations

import pytest

from specdist.config.arguments import parse_arguments
from specdist.lab.benchmark.config import BenchmarkConfig
from specdist.utils.errors import UserError
from tests.lab.benchmark.config import ComparisonConfig

SYNTHETIC = ["--output", "r.json", "--synthetic", "5m", "--acceptance", "0.8"]
TRAINED = ["--output", "r.json", "--target", "t", "--draft", "d", "--prompts", "p.jsonl"]


def test_defaults_of_both_kinds_of_pair() -> None:
    config = parse_arguments(BenchmarkConfig, [*SYNTHETIC, "--batch_sizes", "8", "2", "8"])
    assert config.batch_sizes == [2, 8]
    assert parse_arguments(BenchmarkConfig, TRAINED).batch_sizes == [1, 8, 32]
    assert parse_arguments(BenchmarkConfig, TRAINED).prompt_column == "prompt"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--synthetic", "5m", "--acceptance", "1"], "--output must be given"),
        (["--output", "r.json"], "no models given"),
        (["--output", "r.json", "--target", "t"], "no models given"),
        (["--output", "r.json", "--target", "t", "--draft", "d"], "--prompts is missing"),
        ([*TRAINED, "--acceptance", "0.5"], "add --synthetic"),
        ([*SYNTHETIC, "--epsilon", "0.1"], "either --acceptance or --epsilon"),
        ([*SYNTHETIC[:-2]], "either --acceptance or --epsilon"),
        ([*SYNTHETIC[:-1], "1.5"], "--acceptance 1.5 must be in"),
        ([*SYNTHETIC, "--target", "t"], "leave out --target and --draft"),
        ([*SYNTHETIC, "--synthetic", "6m"], "--synthetic '6m' is not a shape: choose one of 5m, 20m"),
        ([*SYNTHETIC, "--peers", "vllm", "--policies", "all"], "--peers vllm has no effect with --policies"),
        ([*SYNTHETIC, "--repeats", "0"], "--repeats 0 must be at least 1"),
        ([*SYNTHETIC, "--batch_sizes", "0"], "--batch_sizes .* must be at least 1"),
        ([*SYNTHETIC, "--temperature", "-1"], "--temperature -1.0 must be 0 .greedy. or a number above"),
        ([*SYNTHETIC, "--top_p", "0"], r"--top_p 0.0 must be in \(0, 1\]"),
        ([*SYNTHETIC, "--top_k", "5"], "--top_k, --top_p and --min_p have no effect with --temperature 0"),
        ([*SYNTHETIC, "--prompt_column", "text"], "describes --prompts, which was not given"),
        ([*SYNTHETIC, "--split_special_tokens"], "describes --prompts, which was not given"),
        ([*TRAINED, "--prompt_column", "a", "--messages_column", "b"], "exclude each other"),
        ([*SYNTHETIC, "--placements", "beside"], "--placements: invalid choice: 'beside' .choose from"),
        ([*SYNTHETIC, "--num_branches", "2"], "--num_branches 2 has no effect without --placements separate"),
        ([*SYNTHETIC, "--placements", "separate", "--num_branches", "13"], r"must be in \[0, 12\]"),
        ([*SYNTHETIC, "--acceptance_rule", "gumbel"], "no effect with --temperature 0"),
        ([*SYNTHETIC, "--initial_lengths", "2"], "--initial_lengths 2 has no effect without --policies"),
        ([*SYNTHETIC, "--max_draft_tokens", "9"], "--max_draft_tokens 9 has no effect without --policies"),
        ([*SYNTHETIC, "--policies", "svip", "--max_draft_tokens", "0"], "--max_draft_tokens 0 must be"),
        (
            [*SYNTHETIC, "--policies", "all", "--initial_lengths", "0"],
            "--initial_lengths .* must be at least",
        ),
        ([*SYNTHETIC, "--policies", "specdecpp"], "specdecpp needs a trained head, and none was given"),
        ([*SYNTHETIC, "--head", "h"], "--head h has no effect without --policies"),
        (
            [*SYNTHETIC, "--policies", "svip", "--head", "h"],
            "--head h is for a policy among .* has none of them",
        ),
        (
            [*SYNTHETIC, "--policies", "specdecpp", "sprinter", "--head", "h"],
            "--policies has specdecpp and sprinter: name policies that use a head of its kind",
        ),
        (
            [*SYNTHETIC, "--policies", "specdecpp", "--head", "h", "--placements", "separate"],
            "--head h is measured with the draft in the target's process",
        ),
        ([*SYNTHETIC, "--policies", "faster"], "'faster' is not a length policy"),
        ([*SYNTHETIC, "--group_column", "task"], "--group_column task has no effect without --prompts"),
        (
            [*SYNTHETIC, "--overlaps", "asynchronous"],
            "--overlaps asynchronous has no effect without --placements separate",
        ),
        (
            [*SYNTHETIC, "--placements", "separate", "--overlaps", "both"],
            "--overlaps: invalid choice: 'both'",
        ),
        (
            [*SYNTHETIC, "--placements", "separate", "--overlaps", "synchronous", "--num_branches", "2"],
            "--num_branches 2 has no effect without --overlaps asynchronous",
        ),
    ],
)
def test_contradictory_options_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_arguments(ComparisonConfig, arguments)


def test_placements() -> None:
    config = parse_arguments(ComparisonConfig, SYNTHETIC)
    assert config.is_colocated and not config.is_separate
    config = parse_arguments(ComparisonConfig, [*SYNTHETIC, "--placements", "separate"])
    assert config.is_separate and not config.is_colocated


def test_policies() -> None:
    config = parse_arguments(
        ComparisonConfig, [*SYNTHETIC, "--policies", "svip", "gammatune", "--initial_lengths", "8", "2"]
    )
    assert [choice.label for choice in config.choices] == ["svip", "gammatune from 2", "gammatune from 8"]
    # Room is kept for the longest block of any method.
    assert config.longest_draft == 20
    assert parse_arguments(ComparisonConfig, [*SYNTHETIC, "--policies", "all"]).longest_draft == 24
    config = parse_arguments(ComparisonConfig, SYNTHETIC)
    assert config.choices == [] and config.longest_draft == config.num_draft_tokens

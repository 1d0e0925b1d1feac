"""Recorded runs of draft steps against single passes and draws on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.prefix_states import Rollback
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.models.passes.static_runs import MAX_RUN_GRAPHS, StaticRuns, difference_of_runs
from specdist.sampling.branch_estimates import DraftDraws, Drawn
from specdist.sampling.distributions import (
    FIRST_NEXT,
    Dense,
    NextDraws,
    SamplingSettings,
    sample_next_tokens,
)
from specdist.sampling.random import Purpose, RandomKeys
from specdist.utils.ranges import arange_segments
from tests.engine.harness import paged_runner
from tests.engine.test_rope_borders import ROPE
from tests.installed import needs
from tests.models.families import VOCAB_SIZE, noisy_copy, tiny_model
from tests.models.recurrent.twins import use_twins
from tests.models.tape import TapeCapturer

RULES = {
    "greedy": SamplingSettings(temperature=0.0),
    "rejection": SamplingSettings(temperature=0.9),
    "top-k, top-p": SamplingSettings(temperature=0.9, top_k=30, top_p=0.9),
    "gumbel": SamplingSettings(temperature=0.9, is_coupled=True),
}
# float32 sums in another order.
TOLERANCE = 5e-5
PAGE_SIZE, NUM_PAGES = 4, 6
# Of three sequences: tokens in the cache; tokens that it lacks, the last of which is drawn after; steps. The
# second one's pages end with its only step: its table goes on with zeros, where the first sequence lies.
NUM_CACHED, NUM_LACKING, NUM_STEPS = np.array([5, 6, 9]), np.array([1, 2, 1]), np.array([4, 1, 3])
NUM_OWN_PAGES = (3, 2, 4)
LONGROPE = ROPE | {"original_max_position_embeddings": 8}


def draws(rule: str) -> DraftDraws:
    return DraftDraws(settings=RULES[rule], vocab_size=VOCAB_SIZE - 3, keeps_scores=True, keeps_features=True)


def runner_of(model: torch.nn.Module, acceleration: Acceleration, tokens: np.ndarray) -> ModelRunner:
    runner = paged_runner(model, acceleration)
    rollback = Rollback(max(NUM_STEPS) + 2)
    runner.allocate(
        num_pages=NUM_PAGES * 3, page_size=PAGE_SIZE, num_slots=3, max_seq_len=24, rollback=rollback
    )
    slots, places = np.repeat(np.arange(3), NUM_OWN_PAGES), arange_segments(np.array(NUM_OWN_PAGES))
    runner.update_pages(PageUpdates(slots, places, np.arange(len(slots))))
    # Of the last sequence all tokens are beyond the border of a rope that has one.
    runner.update_pages(PageUpdates(np.arange(3), -1 - np.array([6, 8, 10]), np.zeros(3, int)))
    runner.forward(_batch(tokens, np.zeros(3, int), NUM_CACHED), [])
    assert (runner.runs is not None) == acceleration.is_static
    return runner


def _batch(tokens: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> FlatBatch:
    slots = np.repeat(np.arange(3), lengths)
    positions = np.repeat(begins, lengths) + arange_segments(lengths)
    return FlatBatch(tokens[slots, positions], slots, positions)


def keys_of(seed: int) -> RandomKeys:
    """Of the first draws; streams are any 64 bits."""
    streams = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, size=3)
    return RandomKeys(streams, NUM_CACHED + NUM_LACKING, np.array([0, 3, 1]))


def single_steps(
    runner: ModelRunner, tokens: np.ndarray, keys: RandomKeys, how: DraftDraws
) -> list[list[Drawn]]:
    """Of every sequence, the draws of its steps: each alone, with the host's random numbers."""
    found: list[list[Drawn]] = []
    for slot in range(3):
        found.append([])
        begin, length = NUM_CACHED[slot], NUM_LACKING[slot]
        ids: np.ndarray | Tensor = tokens[slot, begin : begin + length]
        for step in range(NUM_STEPS[slot]):
            batch = FlatBatch(ids, np.full(length, slot), np.arange(begin, begin + length))
            own = [
                each[slot : slot + 1] for each in (keys.stream_keys_N, keys.positions_N, keys.num_misses_N)
            ]
            key = RandomKeys(own[0], own[1] + step, own[2])
            uniforms = key.uniforms(Purpose.DRAFT) if how.settings.is_random else None
            streams, positions = torch.from_numpy(key.stream_keys_N), torch.from_numpy(key.positions_N)
            drawn = how.draw(runner.forward(batch, [length - 1]), streams, positions, uniforms)
            found[-1].append(drawn)
            ids, begin, length = drawn.token_ids_N, begin + length, 1
    return found


@pytest.mark.parametrize(
    ("rule", "family", "more"),
    [
        *((rule, "llama", {}) for rule in RULES),
        # Before, its frequencies were chosen on the host: such passes are not recorded.
        pytest.param("greedy", "llama", {"rope_parameters": LONGROPE}, marks=needs("transformers", "5.23")),
        ("rejection", "qwen3_5_text", {}),
        ("greedy", "falcon_h1", {}),
    ],
)
def test_a_run_gives_what_single_steps_give(
    rule: str, family: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is replayed with other tokens and random numbers, and whatever takes fewer steps writes
    nowhere else: the passes after it see the same caches."""
    use_twins(monkeypatch)
    model, capturer = noisy_copy(tiny_model(family, **more)), TapeCapturer()
    how = draws(rule)
    given: list[tuple[Tensor, Tensor]] = []
    for seed in range(3):
        tokens = np.random.default_rng(seed).integers(2, VOCAB_SIZE, size=(3, 24))
        plain = runner_of(model, Acceleration(), tokens)
        if seed == 0:
            runner = runner_of(model, Acceleration(is_static=True, capturer=capturer), tokens)
        else:
            runner.forward(_batch(tokens, np.zeros(3, int), NUM_CACHED), [])
        expected = single_steps(plain, tokens, keys_of(seed), how)
        run = runner.runs.run(_batch(tokens, NUM_CACHED, NUM_LACKING), NUM_STEPS, keys_of(seed), how)
        assert run is not None and run.columns_DCA.shape == (max(NUM_STEPS), 5, 3)
        given.append((run.columns_DCA, run.columns_DCA.clone()))
        for slot, steps in enumerate(expected):
            for step, drawn in enumerate(steps):
                ids, probabilities, *features = run.columns_DCA[step, :, slot]
                assert int(ids) == int(drawn.token_ids_N[0]), (seed, slot, step)
                assert drawn.features_3N is not None
                wanted = torch.cat([drawn.probabilities_N, drawn.features_3N[:, 0].double()])
                found = torch.stack([probabilities, *features])
                torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
                torch.testing.assert_close(
                    run.scores_DSV[step, slot], drawn.scores_NV[0], atol=TOLERANCE, rtol=TOLERANCE
                )
        # The last drawn token of each is not in the cache.
        after = _batch(tokens, NUM_CACHED + NUM_LACKING + NUM_STEPS - 1, np.ones(3, int))
        found_after, wanted_after = (each.forward(after, range(3)) for each in (runner, plain))
        torch.testing.assert_close(found_after, wanted_after, atol=TOLERANCE, rtol=TOLERANCE)
    assert all(torch.equal(*columns) for columns in given)
    assert capturer.num_replays >= 3 and capturer.num_captures <= 4, "passes, and one run"


@pytest.mark.parametrize(("rule", "family"), [("gumbel", "llama"), ("rejection", "falcon_h1")])
def test_a_run_of_one_step_gives_what_that_step_gives(
    rule: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no pass but the first, and recurrent layers are told of no other."""
    monkeypatch.setattr(f"{__name__}.NUM_STEPS", np.ones(3, np.int64))
    test_a_run_gives_what_single_steps_give(rule, family, {}, monkeypatch)


def test_draws_scores_and_cache_are_of_the_same_run() -> None:
    """Not of several that it takes to record one, in one of which rounding decides otherwise."""

    runs: list[StaticRuns] = []

    class Other(TapeCapturer):
        def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
            replay = super().capture(function)

            def other() -> Tensor:
                result = replay()
                if runs:
                    for scores in runs.pop()._scores.values():
                        scores.fill_(7.0)
                return result

            return other

    tokens = np.full((3, 24), 5)
    runner = runner_of(tiny_model("llama"), Acceleration(is_static=True, capturer=Other()), tokens)
    assert runner.runs is not None
    runs.append(runner.runs)
    batch, how = _batch(tokens, NUM_CACHED, NUM_LACKING), draws("rejection")
    run = runner.runs.run(batch, NUM_STEPS, keys_of(0), how)
    assert run is not None and not runs
    for step, scores in enumerate(run.scores_DSV[:, :3]):
        ids, probabilities = run.columns_DCA[step, :2]
        assert torch.equal(scores.gather(1, ids.long()[:, None])[:, 0].double(), probabilities)


@pytest.mark.parametrize("most_steps", [1, 4])
def test_a_run_reads_the_next_tokens_that_it_draws_first(most_steps: int) -> None:
    """Those that the host would draw, in replays, too; in another order than the sequences', of one that was
    not rejected, and of one that takes no part; the target's are lines of its pass, or a matrix."""
    model, how, slots = noisy_copy(tiny_model("llama")), draws("rejection"), np.array([2, 0, 1, 3])
    tokens = np.random.default_rng(0).integers(2, VOCAB_SIZE, size=(3, 24))
    recorded = Acceleration(is_static=True, capturer=TapeCapturer())
    drawing, told = (runner_of(model, recorded, tokens).runs for _ in range(2))
    num_steps = np.minimum(NUM_STEPS, most_steps)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        target_WV, scores_MV = torch.rand(2, 4, how.vocab_size, generator=generator) ** 9
        keys = RandomKeys(2**40 * slots + seed, 5 + slots, slots * 3)
        lines = None if seed == 3 else np.array([3, -1, 0, 0])
        own_lines = None if seed == 3 else np.array([4, 1, 5, 2])
        of_pass = target_WV if own_lines is None else torch.rand(6, how.vocab_size, generator=generator)
        of_pass[slice(None) if own_lines is None else own_lines] = target_WV
        next_draws = NextDraws(Dense(of_pass, own_lines), keys, scores_MV, lines, slots)
        draft_WV = scores_MV if lines is None else scores_MV[lines] * torch.tensor([[1.0], [0], [1], [1]])
        drawn_W = sample_next_tokens(Dense(target_WV), keys, Dense(draft_WV))
        assert torch.equal(next_draws.token_ids_W, drawn_W) and len(drawn_W.unique()) > 2
        batch, ends = _batch(tokens, NUM_CACHED, NUM_LACKING), np.cumsum(NUM_LACKING) - 1
        batch.token_ids_T[ends] = FIRST_NEXT - np.array([1, 2, 0])
        found = drawing.run(batch, num_steps, keys_of(seed), how, None, next_draws)
        batch.token_ids_T[ends] = drawn_W[[1, 2, 0]]
        expected = told.run(batch, num_steps, keys_of(seed), how)
        assert torch.equal(next_draws.token_ids_W, drawn_W.double())
        assert torch.equal(found.columns_DCA[0], expected.columns_DCA[0])


class Shown(DraftDraws):
    """Gives random numbers in the place of probabilities."""

    def draw(
        self, logits_NV: Tensor, stream_keys_N: Tensor, positions_N: Tensor, uniforms_N: Tensor | None
    ) -> Drawn:
        assert uniforms_N is not None
        return Drawn(torch.zeros_like(positions_N), uniforms_N.clone(), None, logits_NV)


def test_random_numbers_of_a_run_are_the_hosts_to_the_last_bit() -> None:
    """At the ends of what streams, positions and misses may be; in a replay, too."""
    model, capturer = tiny_model("llama"), TapeCapturer()
    tokens = np.full((3, 24), 5)
    runner = runner_of(model, Acceleration(is_static=True, capturer=capturer), tokens)
    how = Shown(settings=RULES["rejection"], vocab_size=VOCAB_SIZE, keeps_scores=False, keeps_features=False)
    streams = np.array([[-(2**63), -1, 2**63 - 1], [0, 2**32, -(2**31)]])
    positions, misses = np.array([0, 2**31 + 1, 2**32 - 5]), np.array([2**30 - 1, 0, 1])
    for streams_A in streams:
        keys = RandomKeys(streams_A, positions, misses)
        run = runner.runs.run(_batch(tokens, NUM_CACHED, NUM_LACKING), NUM_STEPS, keys, how)
        assert run is not None and not len(run.scores_DSV)
        steps = np.arange(4)[:, None]
        expected = RandomKeys(streams_A, positions + steps, misses).uniforms(Purpose.DRAFT)
        assert torch.equal(run.columns_DCA[:, 1], expected)
        assert len(expected.unique()) == expected.numel()
    assert capturer.num_replays > capturer.num_captures


def test_a_run_for_which_there_is_no_room_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are then replays of passes; a run that was recorded before goes on."""
    assert MAX_RUN_GRAPHS > 1
    monkeypatch.setattr("specdist.models.passes.static_runs.MAX_RUN_GRAPHS", 1)
    tokens = np.full((3, 24), 5)
    runner = runner_of(tiny_model("llama"), Acceleration(is_static=True, capturer=TapeCapturer()), tokens)
    batch = _batch(tokens, NUM_CACHED, NUM_LACKING)
    for num_steps, is_recorded in ((4, True), (2, False), (4, True)):
        run = runner.runs.run(batch, np.minimum(NUM_STEPS, num_steps), keys_of(0), draws("greedy"))
        assert (run is not None) == is_recorded
    ragged = runner_of(tiny_model("llama"), Acceleration(), tokens)
    assert ragged.runs is None


def test_what_counts_as_the_same_run() -> None:
    """Columns of two steps: ids and probabilities of four sequences; next tokens are not compared."""
    last = [0.5, 0.5, 0.5, torch.nan]
    expected = torch.tensor([[3.0, 4, 5, 6], [0.5] * 4, [7.0, 8, 9, 1], last, [2.0] * 4])
    all_of_them = np.full(4, 2)
    near = expected + torch.tensor([0.0, 1e-6, 0.0, 1e-6, 1.0])[:, None]
    error, most = difference_of_runs(near, expected, all_of_them, 1e-4)
    assert error <= most
    other = near.clone()
    other[0, 0], other[2, 0], other[3, 0] = 9.0, 1.0, 0.1  # a draw that rounding decides, and what follows
    error, most = difference_of_runs(other, expected, all_of_them, 1e-4)
    assert error <= most
    for place, value in (((1, 1), 0.6), ((1, 1), torch.nan), ((3, 3), 0.5)):
        wrong = near.clone()
        wrong[place] = value
        error, most = difference_of_runs(wrong, expected, all_of_them, 1e-4)
        assert not error <= most, place
    wrong = near.clone()
    wrong[0, :3] += 1
    error, most = difference_of_runs(wrong, expected, all_of_them, 1e-4)
    assert not error <= most


def test_what_takes_no_part_in_a_step_is_not_compared() -> None:
    """Two steps of two sequences, of which the second takes one, and padding beside them."""
    expected = torch.tensor([[3.0, 4, 5], [0.5] * 3, [7.0, 8, 9], [0.5] * 3, [2.0] * 3])
    for place, is_same in (((1, 2), True), ((3, 2), True), ((3, 1), True), ((1, 1), False), ((3, 0), False)):
        other = expected.clone()
        other[place] = 0.6
        error, most = difference_of_runs(other, expected, np.array([2, 1]), 1e-4)
        assert (error <= most) == is_same, place

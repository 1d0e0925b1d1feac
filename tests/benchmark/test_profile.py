"""The profile: the job from end to end, the choice of rounds, and floors that are counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from specdist.benchmark.floors import measure_bytes_per_s, measure_floors, measure_flop_per_s
from specdist.benchmark.picture import draw_timeline, middle_rounds
from specdist.benchmark.setting import Setting
from specdist.engine.timeline import Kind, Span
from tests.benchmark.conftest import NUM_DRAFT_TOKENS, TINY
from tests.benchmark.test_run import run_job

CPU = torch.device("cpu")
MS = 1_000_000


def spans(*kinds: Kind) -> list[Span]:
    """One millisecond of each, from 5 ms on."""
    return [Span(kind, (5 + index) * MS, (6 + index) * MS) for index, kind in enumerate(kinds)]


def test_rounds_are_taken_from_the_middle() -> None:
    target = spans("host", *["idle", "verify"] * 10)
    begin_ns, end_ns = middle_rounds(target, num_rounds=4)
    # Ten passes begin at 7, 9, .., 25 ms: the fourth is the first of the middle four.
    assert (begin_ns, end_ns) == (13 * MS, 21 * MS)
    assert middle_rounds(target[:3], num_rounds=4) == (5 * MS, 8 * MS)


def test_the_picture_has_a_lane_per_rank_in_the_colours_of_its_work(tmp_path: Path) -> None:
    target, draft = spans(*["idle", "verify"] * 10), spans(*["draft", "idle"] * 10)
    draw_timeline(tmp_path / "t.png", "title", {"target": target, "draft": draft})
    pixels = (imread(tmp_path / "t.png")[:, :, :3] * 255).round().astype(int)
    for colour in ((0x2F, 0x6D, 0xB5), (0xE0, 0x8A, 0x1E), (0xEC, 0xEC, 0xEC)):
        # Four rounds of half a lane each: far more than a legend's patch.
        assert (pixels == colour).all(axis=2).mean() > 0.05


def test_floors_count_what_a_pass_must_do(setting: Setting) -> None:
    [target, draft] = measure_floors(
        setting.paged,
        batch_sizes=[2],
        num_context_tokens=8,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        num_passes=2,
        seed=0,
    )
    hidden, inner, kv_width = TINY.hidden_size, TINY.intermediate_size, TINY.hidden_size // 2
    layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * inner
    head, num_norms = hidden * TINY.vocab_size, 2 * TINY.num_layers + 1
    weights = TINY.num_layers * layer + head
    num_tokens, num_keys = 2 * (NUM_DRAFT_TOKENS + 1), 8 + NUM_DRAFT_TOKENS + 1
    cache = 2 * num_keys * TINY.num_layers * 2 * kv_width
    assert target.num_bytes == 4 * (weights + num_norms * hidden + cache)
    attention = 4 * num_tokens * num_keys * TINY.num_layers * hidden
    assert target.num_flop == 2 * num_tokens * weights + attention
    assert (draft.model, draft.num_new_tokens) == ("draft", 1)
    for result in (target, draft):
        assert result.floor_s == max(result.memory_s, result.arithmetic_s) > 0
        assert result.floor_s > 0 and result.best_s <= result.measured_s
        assert result.ratio == pytest.approx(result.measured_s / result.floor_s)


def test_rates_are_those_of_some_machine() -> None:
    # A byte a nanosecond is less than any memory's rate, even on a busy machine; 10 TB/s more than a CPU's.
    assert 1e8 < measure_bytes_per_s(2**24, torch.float32, CPU) < 1e13
    assert 1e8 < measure_flop_per_s(torch.float32, CPU) < 1e14


@pytest.mark.ranks
def test_the_job_writes_pictures_shares_and_floors(tmp_path: Path) -> None:
    done = run_job(
        *("--synthetic", "5m", "--epsilon", "0.05", "--synthetic_folder", "pairs", "--profile", "out"),
        *("--batch_sizes", "2", "--num_prompts", "3", "--num_draft_tokens", "3", "--max_prompt_tokens", "12"),
        *("--max_new_tokens", "12", "--overhead_repeats", "2", "--device", "cpu", "--num_branches", "2"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert [run["name"] for run in document["runs"]] == [
        f"specdist, K = 3, {way}" for way in ("separate", "ahead", "ahead, 2 branches")
    ]
    for run in document["runs"]:
        assert sum(run["target_shares"].values()) == pytest.approx(1)
        assert sum(run["draft_shares"].values()) == pytest.approx(1)
        assert (tmp_path / "out" / run["picture"]).read_bytes().startswith(b"\x89PNG")
    assert [(item["model"], item["batch_size"]) for item in document["floors"]] == [
        ("target", 2),
        ("draft", 2),
    ]
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(last["pictures"]) == 3
    assert "Shares of each rank's time" in done.stdout

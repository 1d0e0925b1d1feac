"""If the draft's process dies, the benchmark ends at once and says why: nothing hangs."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from specdist.engine.request import Request
from specdist.lab.benchmark.pair import fixed_length
from specdist.utils.errors import UserError
from tests.lab.benchmark.lineup import PlacedSpecdist
from tests.lab.benchmark.setting import ComparedSetting
from tests.lab.draft_rank import DraftRank, DraftSource, RankOrder

ORDER = RankOrder(num_slots=2, choice=fixed_length(3))
SOON_S = 20

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def prepared(setting: ComparedSetting) -> None:
    """So that no test waits for the first draft's imports."""
    with setting.start_draft_rank():
        pass


@pytest.fixture(autouse=True)
def ends_soon_and_leaves_no_world(prepared: None) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert not dist.is_initialized()
    assert time.monotonic() - begin < SOON_S, "the error came from a timeout"


def kill(rank: DraftRank) -> None:
    os.kill(rank._process.pid or 0, signal.SIGKILL)


def test_a_draft_killed_during_a_run_ends_it_with_the_reason(setting: ComparedSetting) -> None:
    requests = [
        Request(row_id=row, sample_index=0, prompt_ids=[1, 2, 3], max_new_tokens=4 + 8 * row)
        for row in range(4)
    ]
    with pytest.raises(UserError, match="ended with exit code -9"), setting.start_draft_rank() as rank:
        rank.build(ORDER)
        with rank.serving() as channel:
            engine, _ = setting.paged.engine(requests, ORDER, setting.paged.assembly.draft(channel))
            for number, _ in enumerate(engine.run()):
                assert number < 3, "the run has ended without its draft"
                kill(rank)


def test_a_draft_killed_between_two_runs_ends_the_next_one_with_the_reason(setting: ComparedSetting) -> None:
    with pytest.raises(UserError, match="exit code -9"), setting.start_draft_rank() as rank:
        PlacedSpecdist(setting.paged, ORDER, rank).prepare()
        kill(rank)
        with rank.serving():
            pass


def test_a_refusal_by_the_drafts_process_is_shown(setting: ComparedSetting) -> None:
    source = DraftSource(
        checkpoint=str(setting.pair.draft_checkpoint.folder.parent),
        quantization=None,
        trust_remote_code=False,
        allow_pickle=False,
        dtype="float32",
        model_impl="auto",
        device=setting.device,
        num_threads=1,
        num_context_tokens=0,
        assembly=setting.paged.assembly,
    )
    with pytest.raises(UserError, match="draft's process has failed: --draft"):
        DraftRank(source, setting.device)


def test_an_error_in_the_drafts_process_is_shown_with_its_traceback(setting: ComparedSetting) -> None:
    with pytest.raises(UserError, match=r"has failed: Traceback(.|\n)*TypeError"):  # noqa: SIM117
        with setting.start_draft_rank() as rank:
            rank.build(dataclasses.replace(ORDER, num_slots="two"))  # type: ignore[arg-type]

"""Several target groups and their drafts in one launch: the files of one process, whoever is killed."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from specdist.config.generate import GenerateConfig
from specdist.engine.sockets import LinkError
from specdist.job.parts import Part, place_of
from specdist.job.shared_drafts import DraftDirectory, check_greeting
from specdist.job.status import StatusReader
from specdist.job.target_group import common_pages
from specdist.utils.errors import UserError
from tests.job.gate import Gate
from tests.job.group_storm import LAUNCH_ONLY, RULES, SHARED, Storm, check_same, storm_through
from tests.job.killing import wait_until
from tests.job.launching import TIMEOUT_S, run_here, shard_bytes, shard_files, shard_stats
from tests.job.ranks import fork_ranks, started_ranks

pytestmark = pytest.mark.ranks
# Few enough that a run takes seconds.
FEW: dict[str, Any] = SHARED | {"num_samples": 1, "max_new_tokens": 24}


def test_groups_that_share_a_draft_write_the_files_of_one_process(
    options: dict[str, Any], tmp_path: Path
) -> None:
    chosen = options | FEW | RULES["rejection"]
    assert run_here(**chosen, output=tmp_path / "one").code == 0
    ended = fork_ranks(3, **chosen, num_targets=2, output=tmp_path / "run")
    assert ended.code == 0, ended.stderr
    assert shard_bytes(tmp_path / "run") == shard_bytes(tmp_path / "one")
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir())
    assert [any(part in log for log in logs) for part in ("-g0-rank", "-g1-rank", "draft-0.log")] == [
        True
    ] * 3
    stats = shard_stats(tmp_path / "run")
    assert all(shard["num_accepted_tokens"] > 0 and shard["num_draft_tokens"] > 0 for shard in stats)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["info"]["reproducibility"] == "tokens"
    assert manifest["info"]["num_devices"] == 1.5


def test_three_groups_and_a_draft_that_works_ahead(options: dict[str, Any], tmp_path: Path) -> None:
    """The tokens are those of one group whose draft is a rank of its own; both see a window alone."""
    chosen = options | FEW | RULES["rejection"] | {"overlap": "ahead", "draft_window": 16}
    assert fork_ranks(2, **chosen, output=tmp_path / "one").code == 0
    ended = fork_ranks(4, **chosen, num_targets=3, output=tmp_path / "run")
    assert ended.code == 0, ended.stderr
    # How far it works ahead follows from times that each run measures.
    check_same(tmp_path / "run", tmp_path / "one", "ahead")


def test_kills_and_stops_of_groups_and_their_draft_change_no_row(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """`python -m tests.job.group_storm` is the long version."""
    chosen = options | SHARED | RULES["gumbel"] | {"num_samples": 1}
    assert run_here(**chosen, output=tmp_path / "one").code == 0
    storm = Storm(num_kills=2, num_stops=1, rng=random.Random(4))
    # Every round is chosen, by costs that the draft and the first group measure.
    chosen |= {"policy": "auto", "overlap": "auto"}
    storm_through(tmp_path / "run", chosen, storm, num_targets=2, num_drafts=1)
    check_same(tmp_path / "run", tmp_path / "one", "gumbel")


def drafts_of(output: Path) -> set[tuple[int, int | None]]:
    """Of every group at work: the draft that it begins with, and the one that serves it."""
    return {(group.draft, group.served_by) for group in StatusReader(output).read().groups}


def test_a_draft_that_dies_for_good_hands_its_groups_to_the_other(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Under rejection both groups wait for a draft, and begin their sequences again."""
    chosen = options | SHARED | RULES["rejection"] | {"num_samples": 1}
    assert run_here(**chosen, output=tmp_path / "one").code == 0
    launch = LAUNCH_ONLY | {"max_restarts": 0, "num_targets": 2, "num_drafts": 2}
    gate = Gate(tmp_path / "gate")
    with started_ranks(4, gate=gate, **chosen, **launch, output=tmp_path / "run") as world:
        gate.let_through(lambda: len(shard_files(tmp_path / "run")) > 0, world.is_running)
        # Each begins with its own.
        wait_until(lambda: (0, 0) in drafts_of(tmp_path / "run"), world.is_running)
        (draft,) = psutil.Process(world.processes[2].pid).children()
        draft.kill()
        gate.open()
        code = world.end(TIMEOUT_S)
        words = world.words("stderr")
    assert code == 0, "\n".join(words)
    assert "draft 0 has failed 1 times (--max_restarts): the others go on without it" in words[2]
    assert "its sequences begin again" in words[0]
    assert shard_bytes(tmp_path / "run") == shard_bytes(tmp_path / "one")


def test_a_launch_that_is_asked_to_stop_ends_as_a_replica_does(
    options: dict[str, Any], tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    with started_ranks(3, gate=gate, **options | SHARED, num_targets=2, output=tmp_path / "run") as world:
        gate.let_through(lambda: len(shard_files(tmp_path / "run")) > 0, world.is_running)
        for process in world.processes[:2]:
            os.kill(process.pid or 0, signal.SIGTERM)
        logs = tmp_path / "run" / "logs"
        wait_until(lambda: sum("SIGTERM: stopping" in path.read_text() for path in logs.iterdir()) == 2)
        gate.open()
        world.processes[0].join(TIMEOUT_S)
        world.processes[1].join(TIMEOUT_S)
        world.processes[2].join(TIMEOUT_S)
        assert [process.exitcode for process in world.processes] == [75, 75, 75], world.words("stderr")


def config(**options: Any) -> GenerateConfig:
    return GenerateConfig(prompts="p", target="t", draft="d", output="o", **options)


def test_ranks_are_groups_first_and_then_drafts() -> None:
    chosen = config(num_targets=3, tp_size=2, num_drafts=2)
    assert chosen.num_world_ranks == 8
    chosen.check_world(8)
    places = [place_of(chosen, rank) for rank in range(8)]
    assert places[3] == (Part("target", 1), 1, 2)
    assert places[7] == (Part("draft", 1), 0, 1)


@pytest.mark.parametrize(
    ("options", "world_size", "words"),
    [
        ({"num_targets": 3, "tp_size": 2}, 8, "needs 7 ranks, but 8 were launched"),
        ({"num_targets": 2, "num_drafts": 3}, 5, "more drafts than target groups"),
        ({"num_targets": 2, "draft_placement": "shared"}, 3, "needs drafts on ranks of their own"),
        ({"num_targets": 2, "policy": "none"}, 3, "needs drafts on ranks of their own"),
    ],
)
def test_launches_that_do_not_fit_are_refused(options: dict[str, Any], world_size: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        config(**options).check_world(world_size)


def test_a_greeting_that_does_not_fit_is_refused_by_what_differs() -> None:
    terms = {"temperature": 0.5, "vocab_size": 320}
    check_greeting({"token": "t", "terms": dict(terms)}, "t", terms)
    with pytest.raises(ValueError, match=r"temperature is 1\.0 for the target group and 0\.5 for the draft"):
        check_greeting({"token": "t", "terms": terms | {"temperature": 1.0}}, "t", terms)
    for greeting in ({"terms": terms}, {"token": "u", "terms": terms}):
        with pytest.raises(ValueError, match="its token is not that of this launch"):
            check_greeting(greeting, "t", terms)


def test_a_group_finds_its_own_draft_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group 1 of two drafts, of which its own is being started again."""
    directory = DraftDirectory.__new__(DraftDirectory)
    directory.own_draft, greeted = 1, []

    def greet(self: DraftDirectory, address: dict[str, Any], greeting: Any) -> tuple[Any, dict[str, Any]]:
        greeted.append(address["draft"])
        return None, {"draft": address["draft"]}

    monkeypatch.setattr(DraftDirectory, "_greet", greet)
    known = [{"draft": 0}]
    monkeypatch.setattr(DraftDirectory, "_addresses", lambda self: known)
    assert directory.dial({})[1] == {"draft": 0}
    with pytest.raises(LinkError, match="has told its address"):
        directory.dial({}, own_alone=True)
    known.append({"draft": 1})
    assert directory.dial({}, own_alone=True)[1] == {"draft": 1}
    assert greeted == [0, 1]


def test_a_rank_is_started_before_anything_touches_a_device(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs before the fork, all checks of the options among it, creates no context of CUDA; one that did
    would be told of."""
    forks: list[str] = []

    def no_fork() -> int:
        forks.append("forked")
        raise SystemExit(3)

    def no_context() -> None:
        forks.append("context")

    monkeypatch.setattr(torch.cuda, "_lazy_init", no_context)
    monkeypatch.setattr(os, "fork", no_fork)
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    for name, value in {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("specdist.job.supervisor.launch_store", lambda **_: dist.HashStore())
    ended = run_here(**options | FEW, num_targets=2, output=tmp_path / "run")
    assert (ended.code, forks) == (3, ["forked"]), ended.stderr
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="has used CUDA"):
        run_here(**options | FEW, num_targets=2, output=tmp_path / "run")


def test_a_draft_s_cache_that_limits_its_groups_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert common_pages(100, 200) == 100 and not caplog.text
    assert common_pages(100, 40) == 40
    assert "has 40 pages for each target group" in caplog.text and "--draft_window" in caplog.text

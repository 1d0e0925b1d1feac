"""A draft that learns on the way, in a job: what is refused, what is kept beside the run, the same bytes."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdist.cli.generate import main as generate
from specdist.data import RunFolder
from specdist.data.layout import ADAPTED
from specdist.data.opening import delete_run_files
from specdist.data.segments import SEGMENTS
from specdist.engine.adapting import AdaptingDraftWorker
from specdist.job.adaptation import WEIGHTS_NAME, Keeper, check_adaptation
from specdist.job.model_plan import plan_models
from specdist.job.reproducibility import reproducibility
from specdist.job.topology import Topology
from specdist.learning.adaptation import Judgement, Switch
from specdist.models.loading import load_whole
from specdist.models.replacing import parameters_of, replace_weights
from specdist.models.runner import ModelRunner
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError
from tests.forked import started_world
from tests.job.launching import TIMEOUT_S, job_arguments, parse, read_output, refused, run_here, shard_stats
from tests.job.pair import Pair
from tests.job.ranks import fork_ranks, free_port

CPU = torch.device("cpu")
# Of learning, in every wait for the target of a run that is killed.
NUM_PIECES = 60
# Learning that makes garbage of the draft, which takes over at once.
WILD = {"adapt_draft": True, "adapt_rate": 1.0, "adapt_interval": 1, "adapt_batch": 8, "adapt_margin": -1.0}


def options_of(pair: Pair) -> dict[str, Any]:
    return {
        "prompts": pair.prompts, "target": pair.target, "draft": pair.draft, "device": "cpu",
        "temperature": 0, "max_new_tokens": 16, "rows_per_shard": 10, "max_num_seqs": 4,
    }  # fmt: skip


def two_ranks(**changes: Any) -> Topology:
    options = {"rank": 1, "world_size": 2, "tp_size": 1, "uses_draft": True, "device": CPU} | changes
    return Topology(**options)


def keeper_in(output: Path, pair: Pair, **changes: Any) -> tuple[Keeper, ModelRunner]:
    """The draft's rank at the start of a run in this folder."""
    config = parse(**(options_of(pair) | WILD | changes), output=output)
    draft = plan_models(config).draft
    assert draft is not None
    runner = ModelRunner(load_whole(draft, dtype=torch.float32, device=CPU), CPU)
    return Keeper(config, draft, runner, SamplingSettings(temperature=0.0), 320), runner


def take_over(keeper: Keeper, runner: ModelRunner, factor: float, num_steps: int) -> dict[str, torch.Tensor]:
    """Other weights become the draft; returns them."""
    replace_weights(runner, {name: factor * each for name, each in runner.model.named_parameters()})
    judgement = Judgement(num_tokens=10, of_draft=0.5, of_copy=0.75, error=0.1)
    keeper.on_switch(Switch(num_steps=num_steps, judgement=judgement))
    keeper.close()
    return {name: each.detach().clone() for name, each in parameters_of(runner).items()}


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"draft": None}, ["this run has none", "--draft"]),
        ({"policy": "none"}, ["this run has none", "--policy none"]),
        ({"num_targets": 2}, ["--num_targets", "a replica for each target"]),
        ({"trace": True}, ["--trace"]),
        ({"draft_quantization": "int8"}, ["--draft_quantization"]),
        ({"adapt_memory": "1MiB"}, ["--adapt_memory 1MiB", "GiB that learning takes", "16 bytes"]),
    ],
)
def test_what_cannot_learn_is_refused(pair: Pair, changes: dict[str, Any], fragments: list[str]) -> None:
    config = parse(**(options_of(pair) | {"adapt_draft": True} | changes), output="unused")
    with pytest.raises(UserError) as raised:
        check_adaptation(config, plan_models(config), two_ranks())
    assert all(fragment in str(raised.value) for fragment in ("--adapt", *fragments))


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"adapt_batch": 0}, ["--adapt_batch 0", "at least 1"]),
        ({"adapt_rate": -1.0}, ["--adapt_rate -1.0", "above 0"]),
        ({"adapt_margin": 2.0}, ["--adapt_margin 2.0", "between -1 and 1"]),
        ({"adapt_memory": "much"}, ["--adapt_memory", "8GiB"]),
        ({"adapt_draft": None, "adapt_rate": 0.1}, ["--adapt_rate 0.1", "--adapt_draft"]),
    ],
)
def test_values_are_checked(pair: Pair, changes: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        parse(**(options_of(pair) | {"adapt_draft": True} | changes), output="unused")
    assert all(fragment in str(raised.value) for fragment in fragments)


def test_a_draft_beside_the_target_has_no_time_to_learn(pair: Pair, no_models: None, tmp_path: Path) -> None:
    ended = run_here(**options_of(pair), adapt_draft=True, output=tmp_path / "run")
    refused(ended, "--adapt_draft", "shares the target's rank 0", "--num_processes 2")


def test_under_rejection_only_the_distribution_is_the_seed_s(pair: Pair) -> None:
    options = options_of(pair) | {"adapt_draft": True, "output": "unused"}
    for changes, expected in (
        ({}, "tokens"),
        ({"temperature": 1.0, "acceptance": "gumbel"}, "tokens"),
        ({"temperature": 1.0}, "distribution"),
        ({"temperature": 1.0, "adapt_draft": None}, "tokens"),
    ):
        assert reproducibility(parse(**(options | changes)), two_ranks()) == expected


def test_the_draft_that_took_over_is_there_after_a_kill(pair: Pair, tmp_path: Path) -> None:
    """A draft folder like any other; what a kill leaves of the next one is not read."""
    keeper, runner = keeper_in(tmp_path, pair)
    first = take_over(keeper, runner, 1.5, 3)
    (tmp_path / ADAPTED / f"{WEIGHTS_NAME}.x.tmp").write_bytes(b"half of another")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / ADAPTED, dtype=torch.float32)
    assert all(torch.equal(each, first[name]) for name, each in loaded.named_parameters())
    keeper, runner = keeper_in(tmp_path, pair)
    assert all(torch.equal(each, first[name]) for name, each in parameters_of(runner).items())
    copied = keeper.learner._model.named_parameters()
    assert all(torch.equal(each, first[name]) for name, each in copied), "it learns on from there"
    second = take_over(keeper, runner, 0.5, 4)
    keeper, runner = keeper_in(tmp_path, pair)
    assert all(torch.equal(each, second[name]) for name, each in parameters_of(runner).items())
    assert [each["num_steps"] for each in keeper.switches] == [3, 4]


def test_of_replicas_the_draft_that_has_learned_most_is_kept(pair: Pair, tmp_path: Path) -> None:
    """Whichever writes last; a relaunch counts on from there, and the record has that of every kept draft."""
    (one, one_runner), (other, other_runner) = (keeper_in(tmp_path, pair) for _ in range(2))
    take_over(one, one_runner, 1.5, 3)
    most = take_over(other, other_runner, 0.5, 7)
    take_over(one, one_runner, 0.9, 5)

    def relaunched() -> tuple[Keeper, ModelRunner]:
        keeper, runner = keeper_in(tmp_path, pair)
        assert all(torch.equal(each, most[name]) for name, each in parameters_of(runner).items())
        return keeper, runner

    keeper, runner = relaunched()
    assert [each["num_steps"] for each in keeper.switches] == [3, 7]
    take_over(one, one_runner, 1.2, 6)
    relaunched()
    most = take_over(keeper, runner, 0.7, 1)
    take_over(one, one_runner, 1.1, 7)
    keeper, runner = relaunched()
    assert [each["num_steps"] for each in keeper.switches] == [3, 7, 1]


def test_a_draft_made_of_another_is_not_used_and_a_damaged_one_refused(pair: Pair, tmp_path: Path) -> None:
    keeper, runner = keeper_in(tmp_path, pair)
    take_over(keeper, runner, 1.5, 3)
    keeper, runner = keeper_in(tmp_path, pair, draft=pair.target)
    own = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    assert all(torch.equal(each, own.get_parameter(name)) for name, each in parameters_of(runner).items())
    assert not keeper.switches
    path = tmp_path / ADAPTED / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=rf"{path} cannot be read .* delete {path.parent}"):
        keeper_in(tmp_path, pair)


def dies_when_it_has_learned(arguments: list[str]) -> int:
    """A rank of the job; that of the draft learns in every wait, however short, and is killed as soon as a
    draft that it has made is kept, once a shard is complete."""
    keep = Keeper._keep

    def learn(worker: AdaptingDraftWorker, connection: socket.socket) -> None:
        for _ in range(NUM_PIECES if worker._may_learn else 0):
            worker.learn_piece()

    def keep_and_die(keeper: Keeper) -> None:
        keep(keeper)
        if keeper.switches[-1]["complete_shards"]:
            os.kill(os.getpid(), signal.SIGKILL)

    AdaptingDraftWorker.wait, Keeper._keep = learn, keep_and_die  # type: ignore[method-assign]
    return generate(arguments)


@pytest.mark.ranks
def test_a_killed_run_goes_on_with_what_was_learned_and_writes_the_same_rows(
    pair: Pair, tmp_path: Path
) -> None:
    """However far learning comes in the time there is, and with a draft that an earlier start has spoiled."""
    options, run = options_of(pair) | {"num_draft_tokens": 3}, tmp_path / "run"
    run_here(**options, output=tmp_path / "one")
    words = job_arguments(generate, options | WILD | {"output": run})
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with started_world(2, dies_when_it_has_learned, words, environment=environment) as world:
        assert world.end(TIMEOUT_S) == -signal.SIGKILL, world.words("stderr")
    complete = RunFolder(run).recorded_shards()
    assert complete and len(complete) < 3, "the kill came while rows were left"
    keeper, runner = keeper_in(run, pair)
    assert keeper.switches, "what was learned has outlived the kill"
    take_over(keeper, runner, -1.0, 12345)
    assert fork_ranks(2, **options, **WILD, output=run).code == 0
    assert text_of(run) == text_of(tmp_path / "one")
    spoiled = shard_stats(run)[-1]
    assert spoiled["num_accepted_tokens"] < 0.1 * spoiled["num_draft_tokens"]
    segments = RunFolder(run).manifest.info[SEGMENTS]
    assert segments[0]["draft"] == str(pair.draft)
    assert [each["learned"] for each in segments[1:]][: len(keeper.switches)] == keeper.switches
    (learned,) = [each for each in segments[1:] if each["learned"]["num_steps"] == 12345]
    assert learned["draft"] == ADAPTED and learned["fingerprint"] == segments[0]["fingerprint"]
    assert learned["complete_shards"] == len(complete)
    delete_run_files(RunFolder(run))
    assert not list((run / ADAPTED).iterdir()), "--overwrite begins with --draft"


def text_of(output: Path) -> list[Any]:
    """What the target has said; how it was drafted differs."""
    table = read_output(output)
    return [table.column(name).to_pylist() for name in ("row_id", "completion_ids", "finish_reason")]

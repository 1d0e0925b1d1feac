"""A run whose models have recurrent layers, as the job builds it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from specdist.config.generate import GenerateConfig
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.job.models.model_plan import check_goes_back, plan_models
from specdist.job.ranks.topology import Topology
from specdist.job.replica.plan import ReplicaPlan
from specdist.job.replica.replica import build_replica
from specdist.llm import NO_PATH
from specdist.utils.errors import UserError
from tests.job.gate import Gate
from tests.job.killing import fork_and_kill
from tests.job.launching import logged_rows, read_output, run_here, shard_bytes, shard_stats
from tests.models.all_families import save_pair

NUM_NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("qwen3_5")
    save_pair("qwen3_5_text", folder)
    return folder


def topology_of(config: GenerateConfig) -> Topology:
    return Topology(
        rank=0, world_size=1, tp_size=1, uses_draft=config.uses_draft_model, device=torch.device("cpu")
    )


def config_of(folder: Path, **options: object) -> GenerateConfig:
    values: dict[str, object] = {
        "prompts": NO_PATH, "output": NO_PATH, "target": str(folder / "target"), "temperature": 0.0,
        "max_new_tokens": NUM_NEW, "device": "cpu", "dtype": "float32", "max_num_seqs": 4,
        "cache_memory": "16MB", "max_num_batched_tokens": 32,
    }  # fmt: skip
    return GenerateConfig(**{**values, **options})  # type: ignore[arg-type]


def test_rows_that_begin_alike_are_those_of_generate(folder: Path) -> None:
    """Among them two samples of a row; with measured costs, and with n-grams."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(1)
    common = torch.randint(2, 96, (40,), generator=generator).tolist()
    prompts = [[*common, 7, 8, 9], common[:33], [*common, 7, 8, 9], [*common, 3]]
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=NUM_NEW, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    for options in (
        {"draft": str(folder / "draft"), "policy": "goodput"},
        {"draft": "ngram"},
    ):
        config = config_of(folder, **options)
        plan = ReplicaPlan(config=config, models=plan_models(config), topology=topology_of(config))
        replica = build_replica(plan)
        requests = [
            Request(row_id=row, sample_index=row // 2, prompt_ids=ids) for row, ids in enumerate(prompts)
        ]
        rules = StopRules(NO_TEXT, plan.models.target.stop_token_ids())
        recorder = StatsRecorder()
        found = list(replica.engine(iter(requests), rules, recorder).run())
        found.sort(key=lambda completion: completion.request.row_id)
        assert [completion.token_ids for completion in found] == expected, options
        # All of the third's, and most of the second's or the fourth's.
        assert recorder.close_shard(0).num_shared_prompt_tokens > 32 + 16


def test_a_killed_job_ends_with_the_rows_of_an_undisturbed_one(folder: Path, tmp_path: Path) -> None:
    """Random tokens, of samples that begin with copies of states before the kill and after it."""
    rows = [{"prompt": " ".join(f"t{20 + (row * place) % 70}" for place in range(40))} for row in range(1, 3)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {
        "prompts": tmp_path / "prompts.jsonl", "target": folder / "target", "draft": folder / "draft",
        "num_samples": 2, "max_num_seqs": 2, "max_new_tokens": 10, "device": "cpu",
        "dtype": "float32", "temperature": 0.8, "cache_memory": "16MB", "num_draft_tokens": 3,
    }  # fmt: skip
    assert run_here(**options, output=tmp_path / "whole").code == 0
    run, gate = tmp_path / "run", Gate(tmp_path / "gate")
    code = fork_and_kill(lambda: len(logged_rows(run, 0).splitlines()) == 3, gate=gate, **options, output=run)
    assert code == -signal.SIGKILL
    resumed = run_here(**options, output=run)
    assert resumed.code == 0 and shard_bytes(run) == shard_bytes(tmp_path / "whole")
    shares = [shard["num_shared_prompt_tokens"] for shard in shard_stats(tmp_path / "whole")]
    assert shares == [2 * 32], shares
    assert all(row["finish_reason"] != "error" for row in read_output(run).to_pylist())


def test_a_draft_that_cannot_go_back_to_any_token_is_refused_where_it_must(folder: Path) -> None:
    models = plan_models(config_of(folder, draft=str(folder / "draft")))
    with pytest.raises(UserError, match="recurrent layers, whose state is of a text's end alone"):
        check_goes_back(models.draft, "another job drafts after every token")


def test_what_states_do_not_fit_is_refused_by_name(folder: Path) -> None:
    config = config_of(folder, cache_memory="50KB")
    plan = ReplicaPlan(config=config, models=plan_models(config), topology=topology_of(config))
    with pytest.raises(UserError, match=r"states of recurrent layers take .* lower --max_num_seqs"):
        build_replica(plan)

"""Block drafters in a job: the target's tokens wherever the draft runs, their costs, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdist.data.run.run_folder import RunFolder
from specdist.job.costs.measuring import ModelTimes, combined_costs, of_blocks
from specdist.job.models.model_plan import plan_models, settled
from specdist.job.totals.report import frozen_costs
from specdist.policies.costs import Curve
from tests.engine.block_drafters import DSPARK, authors_values, block_drafter, speculators_values
from tests.engine.eagle import save_published
from tests.job.launching import parse, read_output, refused, run_here, shard_bytes
from tests.job.pair import NUM_VOCAB_TOKENS, Pair, random_llama, save, train_tokenizer
from tests.job.ranks import fork_ranks
from tests.job.test_eagle import copied

# Every token of the draft is one of the even ids.
IDS = range(0, NUM_VOCAB_TOKENS, 2)
SAMPLED = {"temperature": 2.5, "seed": 7, "num_draft_tokens": 3}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> dict[str, Any]:
    """Of a job with a target of three layers and a DSpark draft in the published form."""
    folder = tmp_path_factory.mktemp("blocks")
    target = random_llama(num_hidden_layers=3)
    save(folder / "target", target, train_tokenizer())
    draft = block_drafter(target, IDS, **DSPARK)
    save_published(draft, speculators_values(target, len(IDS), **DSPARK), folder / "draft")
    return {
        "prompts": pair.prompts,
        "target": folder / "target",
        "draft": folder / "draft",
        "device": "cpu",
        "max_new_tokens": 16,
        "limit": 12,
        "rows_per_shard": 10,
    }


def test_greedy_tokens_are_the_target_s(options: dict[str, Any], tmp_path: Path) -> None:
    """With the default policy, which measures, and drafts where it pays; a block has five tokens."""
    greedy = options | {"temperature": 0}
    run_here(**(greedy | {"draft": None}), output=tmp_path / "alone")
    ended = run_here(**(greedy | {"policy": None}), output=tmp_path / "run")
    alone, drafted = (read_output(tmp_path / name)["completion_ids"] for name in ("alone", "run"))
    assert alone == drafted
    assert "drafts at most 5 tokens: --max_draft_tokens 20 is lowered" in ended.stderr
    costs = frozen_costs(RunFolder(tmp_path / "run"))
    assert costs is not None and min(costs.synchronous.ns) > 0


@pytest.mark.ranks
def test_ranks_write_the_files_of_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    """Sampled, with the draft beside the target, and on a rank of its own beside a sharded target."""
    sampled = options | SAMPLED
    ended = run_here(**sampled, output=tmp_path / "one")
    assert 0.03 < ended.totals["draft_acceptance_rate"] < 0.9
    fork_ranks(3, **sampled, overlap=None, tp_size=2, output=tmp_path / "ranks")
    assert shard_bytes(tmp_path / "ranks") == shard_bytes(tmp_path / "one")


def test_a_draft_without_embeddings_and_head_takes_the_target_s(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """In the form of DFlash's authors, which name the layers that the states come out of."""
    target = AutoModelForCausalLM.from_pretrained(options["target"])
    ids, layers = range(NUM_VOCAB_TOKENS), {"aux_hidden_state_layer_ids": [1, 2]}
    draft = block_drafter(target, ids, **layers)
    published = save_published(draft, speculators_values(target, len(ids), **layers), tmp_path / "published")
    own = save_published(draft, authors_values(target, [0, 1]), tmp_path / "own")
    weights = load_file(own / "model.safetensors")
    embedding, head = (weights.pop(name) for name in ("embed_tokens.weight", "lm_head.weight"))
    assert not torch.equal(head, target.lm_head.weight)
    shared = copied(own, tmp_path / "shared")
    save_file(weights, shared / "model.safetensors")
    named = copied(own, tmp_path / "named")
    weights |= {"embed_tokens.weight": embedding, "lm_head.weight": target.lm_head.weight.detach().clone()}
    save_file(weights, named / "model.safetensors")
    files = {}
    for each in (published, own, shared, named):
        run_here(**(options | SAMPLED | {"draft": each}), output=tmp_path / f"of_{each.name}")
        files[each.name] = shard_bytes(tmp_path / f"of_{each.name}")
    assert files["shared"] == files["named"] != files["own"] == files["published"]


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"speculators_model_type": "medusa"}, ["speculators_model_type medusa, and dflash, dspark, eagle3"]),
        ({"block_size": 1, "sample_from_anchor": False}, ["block_size 1, in which nothing is drafted"]),
        ({"mask_token_id": None}, ["no mask_token_id"]),
        ({"target_hidden_size": 128}, ["hidden states of 128 numbers, and the target's have 64"]),
    ],
)
def test_drafts_with_unknown_parts_or_for_another_target_are_refused(
    options: dict[str, Any], no_models: None, tmp_path: Path, changes: dict[str, Any], fragments: list[str]
) -> None:
    draft = copied(options["draft"], tmp_path / "draft")
    values = json.loads((draft / "config.json").read_text())
    values |= changes
    (draft / "config.json").write_text(json.dumps(values))
    refused(run_here(**(options | {"draft": draft}), output=tmp_path / "run"), f"--draft {draft}", *fragments)


def test_longer_blocks_than_the_draft_has_are_lowered(options: dict[str, Any], tmp_path: Path) -> None:
    config = parse(**(options | {"num_draft_tokens": 9}), output=tmp_path / "run")
    draft = plan_models(config, may_read_states=True).draft
    assert settled(config, draft).policy_options == {"num_draft_tokens": 5}


def test_a_block_s_pass_counts_once() -> None:
    """Beside steps that only draw, whatever their number."""
    passes = ModelTimes(Curve([1, 4], [500, 900]), (30.0, 4.0))
    found = of_blocks(passes, Curve([1, 4], [20, 60]))
    assert found.passes.ns == [20, 60]
    assert (found.synchronous.sizes, found.synchronous.ns) == ([1, 4], [480, 840])
    costs = combined_costs(passes, found, num_context_tokens=1000, num_rows=4)
    assert costs.draft_ns(4, 9000) == 60, "steps read no context"
    assert costs.synchronous_ns(4, 3000) == 840 + 2 * 4 * 30
    assert costs.synchronous_ns(1, 1000) == 480

"""An EAGLE-3 draft in a job: the target's tokens wherever the draft runs, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specdist.job.models.model_plan import plan_models
from specdist.models.draft_models.eagle3 import EAGLE3
from specdist.models.draft_models.eagle3 import PEAGLE as PARALLEL
from specdist.models.draft_models.kinds import drafter_of
from specdist.utils.errors import UserError
from tests.engine.eagle import PEAGLE, eagle_model, save_published, speculators_values
from tests.job.launching import parse, refused, run_here, shard_bytes
from tests.job.pair import NUM_VOCAB_TOKENS, Pair, random_llama, save, train_tokenizer
from tests.job.ranks import fork_ranks

# Every token of the draft is one of the even ids.
IDS = range(0, NUM_VOCAB_TOKENS, 2)
SAMPLED = {"temperature": 2.5, "seed": 7, "num_draft_tokens": 3}


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> dict[str, Any]:
    """Options of a job with a target of three layers and a draft in the published form."""
    folder = tmp_path_factory.mktemp("eagle")
    target = random_llama(num_hidden_layers=3)
    save(folder / "target", target, train_tokenizer())
    eagle_model(target, IDS).save_pretrained(folder / "draft")
    return {
        "prompts": pair.prompts,
        "target": folder / "target",
        "draft": folder / "draft",
        "device": "cpu",
        "max_new_tokens": 16,
        "limit": 12,
        "rows_per_shard": 10,
    }


@pytest.mark.ranks
def test_ranks_write_the_files_of_one_process(eagle: dict[str, Any], tmp_path: Path) -> None:
    """Sampled, with the draft beside the target, on a rank of its own, and a P-EAGLE draft in speculators'
    format with a sharded target."""
    target = AutoModelForCausalLM.from_pretrained(eagle["target"])
    draft = eagle_model(target, IDS, **PEAGLE)
    values = speculators_values(target, len(IDS), **PEAGLE)
    parallel = eagle | {"draft": save_published(draft, values, tmp_path / "draft")}
    for name, given, num_ranks, tp_size in (("one", eagle, 2, 1), ("parallel", parallel, 2, 2)):
        options, output = given | SAMPLED, tmp_path / f"{num_ranks}-{tp_size}"
        ended = run_here(**options, output=tmp_path / name)
        assert 0.03 < ended.totals["draft_acceptance_rate"] < 0.9
        fork_ranks(num_ranks, **options, overlap=None, tp_size=tp_size, output=output)
        assert shard_bytes(output) == shard_bytes(tmp_path / name), name


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"overlap": "asynchronous"}, "--overlap asynchronous"),
        ({"model_impl": "specdist"}, "--model_impl specdist"),
    ],
)
def test_what_does_not_go_together_is_refused(
    eagle: dict[str, Any], changes: dict[str, Any], left_out: str
) -> None:
    config = parse(**(eagle | changes), output="unused")
    with pytest.raises(UserError, match=f"{eagle['draft']} is an EAGLE-3 draft.* leave out {left_out}"):
        plan_models(config, may_read_states=True)
    with pytest.raises(UserError, match=r"jobs/generate\.py alone can use"):
        plan_models(config)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"target_hidden_size": 128}, ["hidden states of 128 numbers, and the target's have 64"]),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, ["layers 0, 1, 3", "three of the target's 3"]),
        ({"num_hidden_layers": 2}, ["its files hold no layers.1."]),
        ({"layer_types": ["sliding_attention"]}, ["layers with a sliding window"]),
    ],
)
def test_drafts_of_another_form_or_target_are_refused(
    eagle: dict[str, Any], no_models: None, tmp_path: Path, changes: dict[str, Any], fragments: list[str]
) -> None:
    draft = copied(eagle["draft"], tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text()) | changes
    (draft / "config.json").write_text(json.dumps(config))
    refused(run_here(**(eagle | {"draft": draft}), output=tmp_path / "run"), f"--draft {draft}", *fragments)


def test_a_draft_with_other_tensors_is_refused_for_what_they_are(
    eagle: dict[str, Any], tmp_path: Path
) -> None:
    weights = load_file(eagle["draft"] / "model.safetensors")
    for number, (change, fragment) in enumerate(
        (
            ({"lm_head.scale": torch.ones(1)}, "takes lm_head.scale: it is of another form"),
            (
                {"d2t": weights["d2t"] + 1000},
                "d2t does not give every id of the draft one of the target's 320",
            ),
        )
    ):
        draft = copied(eagle["draft"], tmp_path / f"draft-{number}")
        save_file(weights | change, draft / "model.safetensors")
        refused(run_here(**(eagle | {"draft": draft}), output=tmp_path / "run"), f"--draft {draft}", fragment)


def test_a_published_p_eagle_draft_says_by_one_name_what_masks_are(eagle: dict[str, Any]) -> None:
    """Its authors' configuration is EAGLE-3's, with the id; one token is not a block."""
    config = AutoConfig.from_pretrained(eagle["draft"])
    assert drafter_of(config) is EAGLE3
    config.ptd_token_id = 7
    assert drafter_of(config) is PARALLEL
    assert PARALLEL.max_draft_tokens(config) == 8
    assert PARALLEL.build(config).config.mask_token_id == 7
    config.speculative_tokens = 1
    faults = PARALLEL.faults(config, AutoConfig.from_pretrained(eagle["target"]))
    assert faults == ["speculative_tokens 1, which is not a block"]


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target

"""Mixtures of experts as users run them: over two ranks, with a draft on a rank of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specdist.config.generate import GenerateConfig
from specdist.job.models.model_plan import ModelPlan, plan_models
from specdist.job.run.manifest import EXPERT_PARALLEL, frozen_models
from specdist.models.passes.all_reduce import SUMS
from specdist.utils.errors import UserError
from tests.job.given_costs import generate_with_long_passes
from tests.job.launching import parse, read_output
from tests.job.ranks import fork_ranks
from tests.models.all_families import VOCAB_SIZE, save_pair

NUM_NEW, LENGTHS = 24, (3, 12, 40, 70)


def written_prompts(path: Path) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    # The words of smaller ids begin with those of special tokens.
    prompts = [torch.randint(20, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    rows = [{"prompt": " ".join(f"t{token_id}" for token_id in prompt)} for prompt in prompts]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return prompts


def generated(target: PreTrainedModel, prompt: list[int]) -> list[int]:
    """By transformers, with the family's own attention; up to the end of the text."""
    tokens = target.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found


@pytest.mark.slow
@pytest.mark.ranks
def test_a_mixture_over_two_ranks_and_a_draft_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Experts whose parts would be narrow are whole on a rank."""
    target = save_pair("qwen3_moe", tmp_path / "pair").eval()
    prompts = written_prompts(tmp_path / "prompts.jsonl")
    ended = fork_ranks(
        3, generate_with_long_passes, prompts=tmp_path / "prompts.jsonl", output=tmp_path / "run",
        target=tmp_path / "pair/target", draft=tmp_path / "pair/draft", tp_size=2, device="cpu",
        dtype="float32", temperature=0, max_new_tokens=NUM_NEW, cache_memory="256MiB", num_draft_tokens=3,
        overlap="asynchronous",
    )  # fmt: skip
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["info"][EXPERT_PARALLEL] is True
    assert ended.totals["exact"] is True
    assert ended.stderr.count("memory of cpu in GiB") == 1
    assert ended.totals["num_error_rows"] == 0, ended.stderr
    # A draft that errs on purpose: tokens were both accepted and rejected.
    assert 0 < (ended.totals["draft_acceptance_rate"] or 0) < 1, ended.stderr
    found = read_output(tmp_path / "run")["completion_ids"].to_pylist()
    assert found == [generated(target, prompt) for prompt in prompts]


def test_how_experts_are_shared_out_is_chosen_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And what is not quantised of them is told."""
    save_pair("gpt_oss", tmp_path)

    def planned(**options: object) -> tuple[GenerateConfig, ModelPlan]:
        given = {
            "prompts": "p",
            "output": "run",
            "target": tmp_path / "target",
            "tp_size": 2,
            "dtype": "float32",
        }
        config = parse(**(given | options))
        return config, plan_models(config)

    config, auto = planned(max_num_seqs=1)
    assert not auto.is_expert_parallel
    _, always = planned(expert_parallel="always")
    assert always.is_expert_parallel
    begun = {"tp_size": 2, EXPERT_PARALLEL: True}
    assert frozen_models(config, auto, begun).is_expert_parallel, "as the run has begun"
    assert not frozen_models(config, auto, {"tp_size": 2}).is_expert_parallel, "earlier runs had parts"
    # With other ranks, or where the option is given, it is not the earlier run's to say.
    assert not frozen_models(config, auto, begun | {"tp_size": 4}).is_expert_parallel
    never, parts = planned(expert_parallel="never")
    assert not frozen_models(never, parts, begun).is_expert_parallel
    # Its sums over the ranks stay, whatever the option says.
    summed = begun | {SUMS: [[4096, "one-shot"]]}
    assert (
        frozen_models(never, parts, summed).sums == frozen_models(config, auto, summed).sums == summed[SUMS]
    )
    assert frozen_models(config, auto, summed | {"tp_size": 4}).sums is None
    assert "quantises" not in caplog.text
    planned(target_quantization="int8")
    assert "--target_quantization int8 quantises linear layers, and not the experts of" in caplog.text
    with pytest.raises(UserError, match="--expert_parallel always has no effect with --tp_size 1"):
        planned(expert_parallel="always", tp_size=1)

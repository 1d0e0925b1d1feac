"""Adapters in runs: the output is that of the merged model, and the manifest tells adapters apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdist import SamplingOptions, SpeculativeLLM
from specdist.job.models.model_plan import plan_models
from tests.job.launching import parse, refused, run_here
from tests.job.pair import Pair
from tests.models.peft_adapters import with_adapter, write_adapter

PROMPTS = ["One two three", "Return a list of", "The last of these", "a"]
GREEDY = SamplingOptions(temperature=0, max_new_tokens=12)


@pytest.fixture(scope="module")
def adapters(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the target and of the draft, and the merged target."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapters")
    target, draft = (AutoModelForCausalLM.from_pretrained(path) for path in (pair.target, pair.draft))
    options = {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 40}
    found = {
        "target": write_adapter(target, folder / "target", **options),
        "draft": write_adapter(draft, folder / "draft", **options),
        "merged": folder / "merged",
    }
    with_adapter(target, found["target"]).merge_and_unload().save_pretrained(found["merged"])
    AutoTokenizer.from_pretrained(pair.target).save_pretrained(found["merged"])
    return found


def test_a_run_s_tokens_are_those_of_the_merged_target(pair: Pair, adapters: dict[str, Path]) -> None:
    """The draft has its own adapter, or is the target itself, quantised, with the target's."""
    common: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    adapted = common | {"target_adapter": str(adapters["target"])}
    drafted = {"policy": "fixed", "num_draft_tokens": 3}
    llms = {
        "merged": SpeculativeLLM(str(adapters["merged"]), **common),
        "plain": SpeculativeLLM(str(pair.target), **common),
        "draft": SpeculativeLLM(
            str(pair.target), str(pair.draft), **adapted, **drafted, draft_adapter=str(adapters["draft"])
        ),
        "self": SpeculativeLLM(
            str(pair.target),
            str(pair.target),
            **adapted,
            **drafted,
            draft_adapter=str(adapters["target"]),
            draft_quantization="int8",
        ),
    }
    results = {name: llm.generate(PROMPTS, GREEDY, use_tqdm=False) for name, llm in llms.items()}
    tokens = {name: [list(each.completion_ids) for each in found] for name, found in results.items()}
    assert tokens["draft"] == tokens["self"] == tokens["merged"] != tokens["plain"]
    # With the adapter that it drafts for.
    of_self = results["self"]
    assert sum(r.num_accepted_draft_tokens for r in of_self) > 0.5 * sum(r.num_draft_tokens for r in of_self)


def test_a_manifest_tells_adapters_apart(
    options: dict[str, Any], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Rows of two adapters in one folder could not be told apart."""
    both = {"target_adapter": adapters["target"], "draft_adapter": adapters["draft"]}
    options = options | {"limit": 2, "max_new_tokens": 4}
    models = plan_models(parse(**options, **both, output="unused"))
    assert models.target.adapter is not None and models.draft is not None and models.draft.adapter is not None
    assert run_here(**options, **both, output=tmp_path / "run").totals
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["info"]["loading_check"]["is_checked"]
    written = manifest["fingerprint"]
    assert written["target_adapter"] == models.target.adapter.fingerprint()
    assert written["draft_adapter"] == models.draft.adapter.fingerprint()
    ended = run_here(**options, draft_adapter=adapters["draft"], output=tmp_path / "run")
    assert ended.code == 2 and "  target_adapter: " in ended.stderr


def test_adapters_are_refused_before_any_model_is_loaded(
    options: dict[str, Any], tmp_path: Path, no_models: None
) -> None:
    ended = run_here(**options, target_adapter=tmp_path, output=tmp_path / "run")
    refused(ended, f"--target_adapter {tmp_path}", "adapter_config.json")
    ended = run_here(**options, draft_adapter=options["draft"], output=tmp_path / "run")
    refused(ended, f"--draft_adapter {options['draft']}", "adapter_config.json")
    assert "has no effect" in "".join(parse(**options | {"policy": "none", "num_draft_tokens": None},
                                            draft_adapter="x", output="unused").warnings())  # fmt: skip

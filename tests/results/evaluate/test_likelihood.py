"""The target's log-likelihood of completions, batched and padded, against one row at a time."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdist import load_run
from specdist.utils.errors import UserError
from tests.job.pair import random_llama, save, train_tokenizer
from tests.results.evaluate.evaluating import evaluate
from tests.results.evaluate.files import FAILED, merged_file, run_folder


def one_by_one(model_folder, rows) -> list[float]:
    """Log-likelihoods of the completions, from one plain forward pass per row."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    found = []
    for row in rows:
        prompt_ids = tokenizer(row["prompt"])["input_ids"]
        token_ids = torch.tensor([prompt_ids + row["completion_ids"]])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(token_ids).logits[0].double(), dim=-1)
        places = range(len(prompt_ids), token_ids.shape[1])
        found.append(sum(float(log_probs[place - 1, token_ids[0, place]]) for place in places))
    return found


@pytest.mark.parametrize("max_num_batched_tokens", [1, 60, 4096])
def test_batched_log_likelihoods_are_those_of_single_passes(
    generated, tmp_path, max_num_batched_tokens
) -> None:
    """Float32 sums of a dozen terms, in batches of other shapes: 1e-4."""
    rows = load_run(generated.mine).table.to_pylist()
    expected = one_by_one(generated.pair.target, rows)
    options = {"model": generated.pair.target, "output": tmp_path / "out", "device": "cpu"}
    document = evaluate(
        generated.mine, task="likelihood", max_num_batched_tokens=max_num_batched_tokens, **options
    )[1]
    scored = pa.ipc.open_file(pa.memory_map(str(tmp_path / "out" / "rows.arrow"))).read_all().to_pydict()
    assert scored["log_likelihood"] == pytest.approx(expected, abs=1e-4)
    num_tokens = sum(len(row["completion_ids"]) for row in rows)
    assert document["facts"]["num_tokens"] == num_tokens == sum(scored["num_tokens"])
    value = document["metrics"]["log_likelihood_per_token"]["value"]
    assert value == pytest.approx(sum(expected) / num_tokens, abs=1e-5)


def test_rows_without_tokens_do_not_count(generated, tmp_path) -> None:
    rows = load_run(generated.mine).table.slice(0, 2).to_pylist()
    kept = [
        {name: rows[0][name] for name in ("prompt", "completion", "num_prompt_tokens")}
        | {"completion_ids": tuple(rows[0]["completion_ids"])},
        FAILED,
    ]
    path = merged_file(tmp_path / "run.arrow", {}, kept)
    document = evaluate(path, task="likelihood", model=generated.pair.target)[1]
    found = document["metrics"]["log_likelihood_per_token"]
    expected = one_by_one(generated.pair.target, rows[:1])[0] / len(rows[0]["completion_ids"])
    assert found["value"] == pytest.approx(expected, abs=1e-5) and found["num_prompts"] == 1


def test_what_cannot_be_encoded_again_is_refused(generated, tmp_path) -> None:
    """Several turns, whose tokens of prompts are a sum, and special tokens that were split."""
    path, row = tmp_path / "run.arrow", {"prompt": "a b", "num_prompt_tokens": 99}
    merged = merged_file(path, {"turn_completions": [["a", "b"]]}, [row])
    with pytest.raises(UserError, match=r"rows of .*run.arrow have several turns \(--turns_column\)"):
        evaluate(merged, task="likelihood", model=generated.pair.target)
    folder = run_folder(tmp_path / "run", {}, [row], split_special_tokens=True)
    with pytest.raises(
        UserError, match="does not tell which special tokens --split_special_tokens has split"
    ):
        evaluate(folder, task="likelihood", model=generated.pair.target)


def test_a_model_with_another_tokenizer_is_refused(generated, tmp_path) -> None:
    folder = save(tmp_path / "other", random_llama(), train_tokenizer("zebras quiz vexed jocks " * 9))
    merged = merged_file(tmp_path / "run.arrow", {}, [{"prompt": "a b", "num_prompt_tokens": 99}])
    with pytest.raises(
        UserError, match=r"its tokenizer gives \d+ tokens for the prompt of row 0, and the run had 99"
    ):
        evaluate(merged, task="likelihood", model=folder)

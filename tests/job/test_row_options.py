"""Options of logits processing and of single rows in whole runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdist.data.run.merging import merge_run
from specdist.data.run.run_folder import RunFolder
from tests.job.launching import read_output, refused, run_here
from tests.job.pair import Pair, write_arrow
from tests.job.ranks import fork_ranks

NUM_ROWS = 8
# Of transformers' generate and of the job, each under its own names.
PROCESSED: dict[str, Any] = {"repetition_penalty": 1.3, "min_new_tokens": 6}
TRANSFORMERS: dict[str, Any] = {**PROCESSED, "suppress_tokens": [40, 41], "sequence_bias": {(50,): 3.0}}
JOB: dict[str, Any] = {**PROCESSED, "suppress_tokens": [40, 41], "logit_bias": ["50=3.0"]}


def texts_of(prompts: Path) -> list[str]:
    table = pa.ipc.open_file(pa.OSFile(str(prompts))).read_all()
    return [text[:40] for text in table["prompt"].to_pylist()[:NUM_ROWS]]


@pytest.mark.ranks
def test_processed_tokens_are_those_of_transformers(
    options: dict[str, Any], pair: Pair, tmp_path: Path
) -> None:
    """Greedy, in one process, and with the target on two ranks."""
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    model = AutoModelForCausalLM.from_pretrained(pair.target)
    one, two = tmp_path / "one", tmp_path / "two"
    # "the" may stand with or without a space before it.
    words = {"bad_words": ["the", "river"]}
    common = (
        options | JOB | words | {"limit": NUM_ROWS, "max_new_tokens": 20, "logprobs": 2, "prompt_logprobs": 1}
    )
    ended = run_here(**common, output=one), fork_ranks(2, **common, tp_size=2, output=two)
    assert all(each.totals["draft_acceptance_rate"] > 0.2 for each in ended)
    assert read_output(one)["completion_ids"] == read_output(two)["completion_ids"]
    bad_words = [tokenizer(text).input_ids for word in words["bad_words"] for text in (word, f" {word}")]
    for row in read_output(one).to_pylist():
        prompt_ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        with torch.inference_mode():
            found = model.generate(
                prompt_ids, do_sample=False, max_new_tokens=20, bad_words_ids=bad_words, **TRANSFORMERS
            )
            text_ids = torch.cat([prompt_ids, torch.tensor([row["completion_ids"]])], dim=1)
            plain = model(text_ids).logits[0, :-1].log_softmax(dim=1)
        prompt, plain = plain.tensor_split([prompt_ids.shape[1] - 1])
        assert row["prompt_ids"] == prompt_ids[0].tolist()
        expected = prompt.gather(1, prompt_ids[0, 1:, None])[:, 0].tolist()
        assert row["prompt_logprobs"] == [None, *(pytest.approx(value, abs=1e-5) for value in expected)]
        best = prompt.topk(1, dim=1)
        assert row["top_prompt_logprob_ids"] == [None, *best.indices.tolist()]
        np.testing.assert_allclose(row["top_prompt_logprobs"][1:], best.values.numpy(), atol=1e-5)
        assert row["completion_ids"] == found[0, prompt_ids.shape[1] :].tolist()
        expected = plain.gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0].tolist()
        assert row["logprobs"] == pytest.approx(expected, abs=1e-5)
        best = plain.topk(2, dim=1)
        assert row["top_logprob_ids"] == best.indices.tolist()
        np.testing.assert_allclose(row["top_logprobs"], best.values.numpy(), atol=1e-5)
        # Of the softmax after the penalty and the biases, which have removed tokens.
        assert len(row["processed_logprobs"]) == len(expected) and max(row["processed_logprobs"]) <= 0
    for name in ("logprobs", "prompt_logprobs"):
        found = (read_output(run)[name].combine_chunks().flatten().drop_null() for run in (one, two))
        np.testing.assert_allclose(*(values.to_numpy() for values in found), atol=1e-4)


def test_rows_have_options_of_their_own(options: dict[str, Any], pair: Pair, tmp_path: Path) -> None:
    """Each row is what a run with these options gives it, whatever the others have."""
    prompts = tmp_path / "rows.arrow"
    own: dict[str, list[Any]] = {
        "temperature": [0.0, 0.7, None, 1.2, 0.0, None, 0.9, 0.0],
        "seed": [None, 5, 6, None, 7, None, 5, None],
        "max_new_tokens": [4, None, 9, None, None, 12, None, None],
    }
    struct = [
        {"top_k": 3, "stop": None, "repetition_penalty": 1.4},
        None,
        {"top_k": None, "stop": ["e"], "presence_penalty": 0.8},
        {"top_k": 9, "stop": ["a", "o"], "frequency_penalty": 0.6},
    ] * 2
    write_arrow(prompts, {"prompt": texts_of(pair.prompts), **own, "options": struct})
    common = options | {"prompts": prompts, "temperature": 0.5, "model_impl": "transformers"}
    rows = {"row_options": ["temperature", "seed", "max_new_tokens", "options"]}
    assert run_here(**common, **rows, output=tmp_path / "together").code == 0
    found = read_output(tmp_path / "together").to_pylist()
    for row in (2, 3):
        values = {name: column[row] for name, column in own.items() if column[row] is not None}
        values |= {name: value for name, value in (struct[row] or {}).items() if value}
        # The first row has its own number: as the only one that is not cut.
        alone = tmp_path / f"alone-{row}"
        assert run_here(**(common | {"limit": row + 1} | values), output=alone).code == 0
        assert read_output(alone)["completion_ids"].to_pylist()[row] == found[row]["completion_ids"], row


def test_rows_have_numbers_of_samples_of_their_own(
    options: dict[str, Any], pair: Pair, tmp_path: Path
) -> None:
    """Each sample is what it is in a run that has it of every row; a restart completes what is missing, and
    whoever reads the run knows how many there are."""
    numbers, column = [3, None, 1, 2, None, 1, 3, 2], [3, 1, 1, 2, 1, 1, 3, 2]
    prompts = write_arrow(tmp_path / "rows.arrow", {"prompt": texts_of(pair.prompts), "num_samples": numbers})
    common = options | {"prompts": prompts, "temperature": 0.7, "max_new_tokens": 5, "rows_per_shard": 3}
    common |= {"model_impl": "transformers", "output": tmp_path / "own"}
    assert run_here(**common, row_options=["num_samples"]).totals["num_completions"] == sum(column)
    (tmp_path / "own/shards/shard-00001.arrow").unlink()
    again = run_here(**common, row_options=["num_samples"])
    assert (
        again.totals["num_completions"] == sum(column) and f"{sum(column)} of {sum(column)}" in again.stderr
    )
    assert run_here(**(common | {"output": tmp_path / "all"}), num_samples=3).code == 0
    every = {(r["row_id"], r["sample_index"]): r for r in read_output(tmp_path / "all").to_pylist()}
    merge_run(RunFolder(tmp_path / "own"), tmp_path / "own.arrow")
    rows = pa.ipc.open_file(pa.OSFile(str(tmp_path / "own.arrow"))).read_all().to_pylist()
    keys = [(row["row_id"], row["sample_index"]) for row in rows]
    assert keys == [(row, sample) for row, number in enumerate(column) for sample in range(number)]
    for key, row in zip(keys, rows, strict=True):
        assert row["completion_ids"] == every[key]["completion_ids"]
        assert row["num_samples"] == numbers[key[0]]


def test_rows_that_loop_end_and_are_counted(options: dict[str, Any], pair: Pair, tmp_path: Path) -> None:
    """Each by its own number of copies, if it has one; what is cut has no log-probabilities."""
    own = {"prompt": texts_of(pair.prompts)[:4], "stop_repeats": [None, 0, -2, 70]}
    given = {"prompts": write_arrow(tmp_path / "rows.arrow", own), "row_options": ["stop_repeats"]}
    given |= {"logit_bias": ["50=1000"], "max_new_tokens": 80, "logprobs": 0, "output": tmp_path / "run"}
    ended = run_here(**(options | given), stop_repeats=4)
    lengths = {0: (64, "repetition"), 1: (80, "length"), 2: (1, "repetition"), 3: (70, "repetition")}
    for row in read_output(tmp_path / "run").to_pylist():
        assert (len(row["completion_ids"]), row["finish_reason"]) == lengths[row["row_id"]]
        assert len(row["logprobs"]) == row["num_completion_tokens"] == len(row["completion_ids"])
    told = "3 of 4 completions (75%) ended in a loop (finish_reason repetition)"
    assert ended.totals["num_looping_completions"] == 3 and told in ended.stderr
    assert "3 of them ended in a loop" in (tmp_path / "run/README.md").read_text()
    refused(run_here(**(options | given), stop_repeats=5), "stop_repeats: 4 in --output, 5 now")


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ({"logit_bias": ["7:1"]}, "--logit_bias 7:1 is not a token id and a finite number"),
        ({"logit_bias": ["100000=1"]}, "--logit_bias 100000 is not a token of --target"),
        ({"suppress_tokens": [100_000]}, "--suppress_tokens 100000 is not a token of --target"),
        ({"logprobs": 1000}, "--logprobs 1000 is more than the 320 tokens"),
        ({"row_options": ["colour"]}, "--row_options 'colour' is not an option that a row can have"),
        ({"stop_repeats": 1}, "--stop_repeats 1 must be 0, 2 or more, or -2 or less"),
        ({"row_options": ["seed"]}, "--row_options seed is not a column of --prompts"),
    ],
)
@pytest.mark.usefixtures("no_models")
def test_a_wrong_option_is_refused(
    options: dict[str, Any], tmp_path: Path, given: dict[str, Any], fragment: str
) -> None:
    refused(run_here(**options, **given, output=tmp_path / "run"), fragment)

"""Completions as texts, with a tokenizer as Llama 2's: a run, its results and the library for Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdist import SamplingOptions, SpeculativeLLM
from tests.data.test_batches import write
from tests.detokenizers import llama, plain
from tests.job.launching import read_output, run_here
from tests.job.pair import random_llama, save, write_arrow
from tests.job.test_batch_input import run_merge

TEXTS = ["the sky", "a b the", "<s>the sky is", "n't the END"]


BYTES = llama().convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Special tokens are likely; bytes, of which a random model seldom makes characters, are left out."""
    folder = tmp_path_factory.mktemp("llama")
    mark = llama().convert_tokens_to_ids("<|mark|>")
    return {
        "target": save(folder / "target", random_llama(), llama()), "device": "cpu", "policy": "fixed",
        "prompts": write_arrow(folder / "prompts.arrow", {"prompt": TEXTS * 2}), "temperature": 1.0,
        "max_new_tokens": 24, "logit_bias": [f"{mark}=6.0"], "model_impl": "transformers",
        "suppress_tokens": BYTES,
    }  # fmt: skip


def test_completions_and_their_stop_strings_go_on_from_the_prompt(
    run: dict[str, Any], tmp_path: Path
) -> None:
    """In the run, in options of rows, and from Python."""
    tokenizer = llama()
    prompt_ids = [tokenizer(text)["input_ids"] for text in TEXTS * 2]
    assert run_here(**run, output=tmp_path / "run").code == 0
    rows = read_output(tmp_path / "run").to_pylist()
    wholes = []
    for row, before in zip(rows, prompt_ids, strict=True):
        assert row["completion"] == plain(tokenizer, before, row["completion_ids"])
        wholes.append(plain(tokenizer, before, row["completion_ids"], skip_special=False))
    assert any(row["completion"] != tokenizer.decode(row["completion_ids"]) for row in rows)
    # One that holds a part of a special token, one with the space before a completion's first word.
    marked, place = next((text, place) for text in wholes if (place := text.find("<|mark|>")) > 0)
    stops = [marked[place - 1 : place + 4], next(text[:3] for text in wholes if text.startswith(" "))]
    assert run_here(**run, stop=stops, output=tmp_path / "stopped").code == 0
    stopped = read_output(tmp_path / "stopped").to_pylist()
    columns = {"prompt": TEXTS * 2, "stop": [stops] * 8}
    changes = {"prompts": write_arrow(tmp_path / "rows.arrow", columns), "row_options": ["stop"]}
    assert run_here(**(run | changes), output=tmp_path / "rows").code == 0
    assert read_output(tmp_path / "rows")["completion"].to_pylist() == [row["completion"] for row in stopped]
    for row, old, whole, before in zip(stopped, rows, wholes, prompt_ids, strict=True):
        end = min((place for stop in stops if (place := whole.find(stop)) >= 0), default=None)
        if end is None:
            assert row["completion_ids"] == old["completion_ids"]
            continue
        assert row["finish_reason"] == "stop" and row["completion"] == whole[:end].replace("<|mark|>", "")
        count = len(row["completion_ids"])
        assert row["completion_ids"] == old["completion_ids"][:count]
        shorter = plain(tokenizer, before, old["completion_ids"][: count - 1], skip_special=False)
        assert not any(stop in shorter for stop in stops)
    assert "" in [row["completion"] for row in stopped] and any(stops[0] in text for text in wholes)
    llm = SpeculativeLLM(target=str(run["target"]), device="cpu", model_impl="transformers")
    names = ("temperature", "max_new_tokens", "logit_bias", "suppress_tokens")
    sampling = SamplingOptions(stop=stops, **{name: run[name] for name in names})
    found = llm.generate(TEXTS * 2, sampling, use_tqdm=False)
    assert [each.completion for each in found] == [row["completion"] for row in stopped]


def test_tokens_of_a_result_are_together_its_text(run: dict[str, Any], tmp_path: Path) -> None:
    bodies = [{"prompt": "the sky", "max_tokens": 12, "logprobs": 1, "stop": ["<|mark|>"], "seed": 1}]
    changes = {"prompts": write(tmp_path / "a.jsonl", bodies, url="/v1/completions"), "logit_bias": None}
    assert run_here(**(run | changes), output=tmp_path / "run").code == 0
    assert run_merge(tmp_path / "run", tmp_path / "results.jsonl")[0] == 0
    (row,) = read_output(tmp_path / "run").to_pylist()
    (choice,) = json.loads((tmp_path / "results.jsonl").read_text())["response"]["body"]["choices"]
    assert choice["text"] == row["completion"]
    special = [text for text in choice["logprobs"]["tokens"] if text in ("<s>", "</s>", "<|mark|>")]
    joined = "".join(choice["logprobs"]["tokens"])
    for text in special:
        joined = joined.replace(text, "", 1)
    assert joined == choice["text"]

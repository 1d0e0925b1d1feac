"""Generation from Python: the job's tokens, in the order of the prompts, for every form of prompt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import specdist
from specdist import SamplingOptions, SpeculativeLLM
from specdist.models.passes.runner import ModelRunner
from specdist.utils.errors import UserError
from tests.job.launching import read_output, run_here
from tests.job.pair import Pair

GREEDY = SamplingOptions(temperature=0, max_new_tokens=12)


@pytest.fixture(scope="module")
def llm(pair: Pair) -> Iterator[SpeculativeLLM]:
    yield SpeculativeLLM(str(pair.target), str(pair.draft), device="cpu", max_num_seqs=4)


def job(pair: Pair, output: Path, **options: Any) -> dict[str, list[Any]]:
    shared = {"prompts": pair.prompts, "target": pair.target, "device": "cpu", "limit": 6}
    assert run_here(**shared, **options, output=output).code == 0
    found: dict[str, list[Any]] = read_output(output).to_pydict()
    return found


def test_biases_are_a_mapping_too_and_lists_are_not_texts(llm: SpeculativeLLM) -> None:
    plain = llm.generate(["the fox"], GREEDY, use_tqdm=False)[0].token_ids
    biased = [
        llm.generate(["the fox"], replace(GREEDY, logit_bias=bias), use_tqdm=False)[0].token_ids
        for bias in ({plain[0]: -100.0}, [f"{plain[0]}=-100.0"])
    ]
    assert biased[0] == biased[1] and plain[0] not in biased[0]
    for name in ("bad_words", "logit_bias"):
        with pytest.raises(UserError, match=f"{name} is a list of texts, not the text 'fox'"):
            llm.generate(["the fox"], replace(GREEDY, **{name: "fox"}), use_tqdm=False)
    with pytest.raises(UserError, match="--logit_bias a=2 is not a token id"):
        llm.generate(["the fox"], replace(GREEDY, logit_bias={"a": 2}), use_tqdm=False)


def test_the_tokens_are_those_of_the_job(pair: Pair, llm: SpeculativeLLM, tmp_path: Path) -> None:
    """They are those of the target alone, greedy or with the same random numbers, whatever the policy."""
    greedy = job(pair, tmp_path / "greedy", temperature=0, max_new_tokens=12)
    found = llm.generate(greedy["prompt"], GREEDY, use_tqdm=False)
    assert [result.token_ids for result in found] == greedy["completion_ids"]
    assert [result.text for result in found] == greedy["completion"]
    assert [result.finish_reason for result in found] == greedy["finish_reason"]
    coupled = SpeculativeLLM(
        str(pair.target),
        str(pair.draft),
        policy="fixed",
        num_draft_tokens=3,
        acceptance="gumbel",
        device="cpu",
    )
    sampling = SamplingOptions(temperature=0.8, max_new_tokens=9, seed=5, num_samples=2)
    results = coupled.generate(greedy["prompt"], sampling, use_tqdm=False)
    options = {"temperature": 0.8, "max_new_tokens": 9, "seed": 5, "num_samples": 2}
    expected = job(pair, tmp_path / "gumbel", acceptance="gumbel", **options)
    assert [result.token_ids for result in results] == expected["completion_ids"]
    assert [(result.prompt_index, result.sample_index) for result in results] == [
        (row, sample) for row in range(6) for sample in range(2)
    ]
    assert sum(result.num_accepted_draft_tokens for result in results) > 0
    assert coupled.statistics["num_completions"] == 12


def test_prompts_may_be_texts_token_ids_or_messages(
    llm: SpeculativeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = llm.generate("a b", GREEDY, use_tqdm=False)
    (ids,) = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    again, shorter = llm.generate(["a b", "a"], GREEDY, use_tqdm=False)
    assert text.token_ids == again.token_ids and text.num_prompt_tokens > shorter.num_prompt_tokens
    assert ids.num_prompt_tokens == 3 and len(ids.token_ids) <= 12
    (chat,) = llm.generate([[{"role": "user", "content": "a b"}]], GREEDY, use_tqdm=False)
    # The template's own text is around the message.
    assert chat.error is None and chat.num_prompt_tokens > text.num_prompt_tokens
    # OpenAI's forms, as in a run.
    parts = [{"type": "text", "text": "a b"}]
    messages: Any = [[{"role": "user", "content": parts, "name": None}], [{"role": "user"}]]
    same, bad = llm.generate(messages, GREEDY, use_tqdm=False)
    assert same.token_ids == chat.token_ids and bad.error == "messages[0] has no content"
    assert "--continue_final_message" not in caplog.text
    llm.generate([[*messages[0], {"role": "assistant", "content": "c"}]], GREEDY, use_tqdm=False)
    assert "1 of 1 prompts end with a message of the assistant" in caplog.text


def test_a_prompt_that_cannot_be_used_gives_a_result_with_the_reason(llm: SpeculativeLLM) -> None:
    """The call goes on, and the other results keep their places."""
    good, empty, unknown, long = llm.generate(["a", [], [10**6], [5] * 10**5], GREEDY, use_tqdm=False)
    assert good.error is None and good.finish_reason in ("stop", "length")
    assert [result.finish_reason for result in (empty, unknown, long)] == ["error"] * 3
    assert "empty" in str(empty.error) and "token id" in str(unknown.error) and "room" in str(long.error)


def test_what_the_job_refuses_is_refused_here_too(pair: Pair, llm: SpeculativeLLM) -> None:
    target, draft = str(pair.target), str(pair.draft)
    with pytest.raises(UserError, match="temperature is an option of generate"):
        SpeculativeLLM(target, temperature=0)
    with pytest.raises(UserError, match="num_draughts is not an option"):
        SpeculativeLLM(target, num_draughts=3)
    with pytest.raises(UserError, match="--num_draft_tokens 4 has no effect with --policy svip"):
        SpeculativeLLM(target, draft, policy="svip", num_draft_tokens=4)
    mixed: Any = [5, {"role": "user", "content": "a"}]
    with pytest.raises(UserError, match="a prompt is a text, a sequence of token ids, or"):
        llm.generate([mixed], GREEDY, use_tqdm=False)
    with pytest.raises(UserError, match="--temperature -1"):
        llm.generate(["a"], SamplingOptions(temperature=-1), use_tqdm=False)


def test_lack_of_memory_says_what_needs_less(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    llm = SpeculativeLLM(str(pair.target), device="cpu", max_num_seqs=4)
    monkeypatch.setattr(ModelRunner, "forward", forward)
    with pytest.raises(UserError, match=r"memory ran out \(CUDA out .*2.00 GiB.*with a smaller max_num_seqs"):
        llm.generate(["the fox"], GREEDY, use_tqdm=False)


def test_the_models_own_settings_are_the_default(pair: Pair, tmp_path: Path) -> None:
    """Options given to generate() replace all of them."""
    target = shutil.copytree(pair.target, tmp_path / "target")
    path = target / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.7, "max_new_tokens": 3}))
    llm = SpeculativeLLM(str(target), generation_config="model")
    assert (llm.default_sampling.temperature, llm.default_sampling.max_new_tokens) == (0.7, 3)
    (by_default,) = llm.generate(["a b"], use_tqdm=False)
    (given,) = llm.generate(["a b"], SamplingOptions(temperature=0.7, max_new_tokens=3), use_tqdm=False)
    assert by_default.token_ids == given.token_ids and len(given.token_ids) <= 3
    assert SpeculativeLLM(str(target)).default_sampling == SamplingOptions()


def test_every_public_name_can_be_imported() -> None:
    for name in specdist.__all__:
        assert getattr(specdist, name).__doc__

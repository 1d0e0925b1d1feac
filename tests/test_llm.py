"""Generation from Python: the job's tokens, in the order of the prompts, for every form of prompt."""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import specdist
from specdist import SamplingOptions, SpeculativeLLM
from specdist.engine.engine import Engine
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
    plain = llm.generate(["the fox"], GREEDY, use_tqdm=False)[0].completion_ids
    biased = [
        llm.generate(["the fox"], replace(GREEDY, logit_bias=bias), use_tqdm=False)[0].completion_ids
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
    assert [result.completion_ids for result in found] == greedy["completion_ids"]
    assert [result.completion for result in found] == greedy["completion"]
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
    assert [result.completion_ids for result in results] == expected["completion_ids"]
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
    assert text.completion_ids == again.completion_ids and text.num_prompt_tokens > shorter.num_prompt_tokens
    assert ids.num_prompt_tokens == 3 and len(ids.completion_ids) <= 12
    (chat,) = llm.generate([[{"role": "user", "content": "a b"}]], GREEDY, use_tqdm=False)
    # The template's own text is around the message.
    assert chat.error is None and chat.num_prompt_tokens > text.num_prompt_tokens
    # OpenAI's forms, as in a run.
    parts = [{"type": "text", "text": "a b"}]
    messages: Any = [[{"role": "user", "content": parts, "name": None}], [{"role": "user"}]]
    same, bad = llm.generate(messages, GREEDY, use_tqdm=False)
    assert same.completion_ids == chat.completion_ids and bad.error == "messages[0] has no content"
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


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda llm: SamplingOptions(max_tokns=5), "max_tokns is not an option of SamplingOptions: did you mean"),
    (lambda llm: SamplingOptions(max_tokens=5, max_new_tokens=6), "max_new_tokens is given twice"),
    (lambda llm: SamplingOptions(temperature="hot"), "is 'hot', of type str, but must be a number"),
    (lambda llm: SamplingOptions(max_new_tokens=1.5), "is 1.5, of type float, but must be a whole number"),
    (lambda llm: SamplingOptions(stop=[1]), "stop is [1], of type list, but must be a list of texts or None"),
    (lambda llm: SamplingOptions(n=True), "num_samples is True, of type bool, but must be a whole number"),
    (lambda llm: llm.generate(["a"], {"n": 2}), "sampling is {'n': 2}, but must be SamplingOptions"),
    (lambda llm: llm.generate(["a", "b"], [GREEDY]), "1 SamplingOptions are too few or too many for 2"),
    (lambda llm: SpeculativeLLM("t", max_model_len=5), "is not an option: did you mean max_seq_len?"),
    (lambda llm: SpeculativeLLM("t", max_tokens=5), "max_tokens is an option of generate(): give it there"),
    (lambda llm: SpeculativeLLM("t", dtype="int7"), "dtype is 'int7', of type str, but must be one of"),
    (lambda llm: SpeculativeLLM("t", max_num_seqs="4"), "of type str, but must be a whole number or None"),
    (lambda llm: SpeculativeLLM("t", prompts="p.jsonl"), "prompts is of a run: specdist.generate() or"),
    (lambda llm: SpeculativeLLM("t", tp_size=2), "tp_size is 2, but SpeculativeLLM has one device"),
    (
        lambda llm: SpeculativeLLM("t", json_schema={}),
        "json_schema here is a file: give a schema to generate()",
    ),
    (lambda llm: SamplingOptions(guided_json={}), "did you mean json_schema?"),
    (lambda llm: SamplingOptions(stop_token_ids=[1]), "is not an option of SamplingOptions; python jobs"),
    (lambda llm: llm.generate(None), "prompts is None, but a prompt is a text, a sequence of token ids"),
    (
        lambda llm: llm.generate({"role": "user", "content": "a"}),
        "prompts is {'content': 'a', 'role': 'user'}, but",
    ),
    (
        lambda llm: llm.generate([{"role": "user", "content": "a"}]),
        "prompt 0 is {'content': 'a', 'role': 'user'}",
    ),
    (
        lambda llm: llm.generate(["a", None]),
        "prompt 1 is None, but a prompt is a text, a sequence of token ids",
    ),
    (lambda llm: llm.generate(pd.DataFrame({"prompt": ["a"]})), "prompts is   prompt"),
    (lambda llm: llm.generate([b"ab"]), "prompt 0 is b'ab', but a prompt is a text"),
    (lambda llm: llm.chat("hi"), "chat() takes lists of messages, and this is none: 'h'"),
    (lambda llm: llm.chat(["hi"]), "chat() takes lists of messages, and this is none: 'hi'"),
    (lambda llm: llm.chat([], temperature=0), "temperature is not an argument of generate(): options are in"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_names_and_types_are_told_in_words(
    llm: SpeculativeLLM, call: Callable[[Any], Any], message: str
) -> None:
    """A typing error would otherwise be a TypeError of a class that nobody has heard of."""
    with pytest.raises(UserError, match=re.escape(message)):
        call(llm)


def test_each_prompt_may_have_its_own_options(pair: Pair) -> None:
    """Its random numbers are those of its place: as if all had had its options."""
    llm = SpeculativeLLM(pair.target, device="cpu", max_num_seqs=4)
    prompts, rest = ["the quick", "a slow brown fox", "over"], {"temperature": 0.9, "seed": 3}
    short, long = SamplingOptions(max_tokens=3, **rest), SamplingOptions(max_new_tokens=8, n=2, **rest)
    found = llm.generate(prompts, [long, short, long], use_tqdm=False)
    places = [(each.prompt_index, each.sample_index) for each in found]
    assert places == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    assert llm.statistics["num_completions"] == 5
    assert [each.num_completion_tokens for each in found if each.prompt_index == 1] == [3]
    wanted = llm.generate(prompts, long, use_tqdm=False)
    for each in found:
        same = wanted[2 * each.prompt_index + each.sample_index]
        assert each.completion_ids == same.completion_ids[: each.num_completion_tokens]


def test_each_call_may_have_a_constraint_of_its_own(pair: Pair, llm: SpeculativeLLM) -> None:
    """Fault: a constraint of one call held in the next, or its blocks outgrew the caches."""
    prompts, greedy = ["the fox", "a dog"], {"temperature": 0, "max_new_tokens": 12}

    def texts(model: SpeculativeLLM, **constraint: Any) -> list[str]:
        sampling = SamplingOptions(**greedy, **constraint)
        return [each.completion for each in model.generate(prompts, sampling, use_tqdm=False)]

    plain, regex = texts(llm), "(yes|no), [0-9]{3}"
    with SpeculativeLLM(pair.target, pair.draft, device="cpu", max_num_seqs=4, regex=regex) as other:
        expected = texts(other)
        assert all(re.fullmatch(regex, text) for text in expected)
        assert set(texts(other, choices=["red", "blue"])) <= {"red", "blue"}
        assert texts(other) == expected
    assert texts(llm, regex=regex) == expected
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    assert all(json.loads(text)["a"] in (1, 2) for text in texts(llm, json_schema=schema))
    assert texts(llm) == plain
    both = [SamplingOptions(**greedy, choices=[text]) for text in ("x", "yz")]
    assert [each.completion for each in llm.generate(prompts, both, use_tqdm=False)] == ["x", "yz"]
    with pytest.raises(UserError, match="regex and choices exclude each other"):
        SamplingOptions(regex="a", choices=["a"])
    with pytest.raises(UserError, match="stop and regex exclude each other"):
        SamplingOptions(regex="a", stop="a")
    with pytest.raises(UserError, match=r"^regex cannot be used: "):
        texts(llm, regex="(")


def test_a_conversation_or_several_are_answered_and_what_is_closed_is_gone(pair: Pair) -> None:
    with SpeculativeLLM(pair.target, pair.draft, dtype=torch.float32, max_num_seqs=2) as llm:
        talk = [{"role": "user", "content": "a b"}]
        (one,) = llm.chat(talk, GREEDY, use_tqdm=False)
        two = llm.chat([talk, talk], GREEDY, use_tqdm=False)
        assert [each.completion_ids for each in two] == [one.completion_ids] * 2
        (alike,) = llm.generate([talk], GREEDY, use_tqdm=False)
        assert alike == one
    with pytest.raises(UserError, match="is closed"):
        llm.generate(["a"], GREEDY)


@pytest.mark.parametrize("temperature", [0, 1])
def test_results_as_they_finish_are_those_of_the_list(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Faults: they come all at the end; a loop that was left goes on, or its cache is read by the next."""
    rounds: list[int] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: rounds.append(1) or step(engine))
    llm = SpeculativeLLM(pair.target, pair.draft, policy="fixed", device="cpu", max_num_seqs=2)
    sampling = SamplingOptions(temperature=temperature, seed=3, n=2, max_new_tokens=8)
    call: Any = {"prompts": ["the quick", [], "a slow brown fox", "over"], "use_tqdm": False}
    call["sampling"] = [sampling, sampling, replace(sampling, max_new_tokens=5), sampling]
    expected, total = llm.generate(**call), len(rounds)
    found = [(len(rounds) - total, result) for result in llm.generate(**call, as_completed=True)]
    assert sorted((each for _, each in found), key=lambda each: (each.row_id, each.sample_index)) == expected
    times = [time for time, _ in found]
    assert times[:2] == [0, 0] and 0 < times[2] < total // 2 and times == sorted(times)

    for way in ("break", "error", "close"):
        results = llm.generate(**call, as_completed=True)
        with suppress(ArithmeticError):
            for result in filter(lambda each: each.error is None, results):
                assert gc.get_freeze_count() and result in expected
                with pytest.raises(UserError, match="the results of the last call are not at their end"):
                    llm.generate("a")
                if way == "break":
                    break
                if way == "error":
                    raise ArithmeticError
                results.close()
        assert next(results, None) is None and not gc.get_freeze_count()
        assert llm.generate(**call) == expected
    with pytest.raises(UserError, match="--temperature -1"):
        llm.generate(["a", "b"], [sampling, replace(sampling, temperature=-1)], as_completed=True)
    results = llm.generate(**call, as_completed=True)
    assert next(results).error
    llm.close()
    assert list(results) == []


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
    assert by_default.completion_ids == given.completion_ids and len(given.completion_ids) <= 3
    assert SpeculativeLLM(str(target)).default_sampling == SamplingOptions()


def test_every_public_name_can_be_imported() -> None:
    assert dir(specdist) == sorted(specdist.__all__)
    for name in specdist.__all__:
        assert getattr(specdist, name).__doc__

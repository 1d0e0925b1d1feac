"""The job: finished rows, or the first rows of a run, become a draft that is accepted more often."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdist.cli import distill as main
from specdist.data.formats.prompts import open_prompts
from specdist.job.texts.tokens import PromptEncoder
from specdist.training.drafts import training
from specdist.training.drafts.data import Example, Examples, read_prompts
from tests.engine.eagle import eagle_model
from tests.job.launching import read_output, refused, run_here
from tests.job.pair import Pair, noisy_copy

FAST = {"epochs": 6, "batch_size": 8, "learning_rate": 1e-3, "cost_ratio": 0.1}


def distilled(folder: Path, **options: Any) -> dict[str, Any]:
    return run_here(main, **FAST | {"new_draft": folder} | options).totals


@pytest.fixture(scope="module")
def noisy(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that has forgotten much of the target."""
    folder = tmp_path_factory.mktemp("noisy") / "draft"
    shutil.copytree(pair.draft, folder)
    model = AutoModelForCausalLM.from_pretrained(pair.target)
    noisy_copy(model, 0.1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(
    options: dict[str, Any], finished: Path, noisy: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained") / "draft"
    shown = distilled(folder, **options | {"draft": noisy}, output=finished, teacher="target")
    return folder, shown


def test_a_distilled_draft_is_accepted_more_often(trained: tuple[Path, dict[str, Any]]) -> None:
    """On rows that it was not trained on; everything is told."""
    folder, shown = trained
    assert shown["after"]["acceptance"] > shown["before"]["acceptance"] + 0.06
    assert shown["after"]["speed_up"] > shown["before"]["speed_up"]
    record = json.loads((folder / "distillation.json").read_text())
    assert record["history"]["losses"][-1] < record["history"]["losses"][1]
    assert record["num_training_sequences"] + record["num_held_out_sequences"] == 96
    assert (folder / "distillation.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / training.CHECKPOINT_NAME).exists()
    # Written anew in every epoch.
    assert 22 * 16 < shown["num_own_tokens"] <= 22 * 16 * FAST["epochs"]


def test_prompts_of_all_rows_but_those_held_out_are_learned_from(
    trained: tuple[Path, dict[str, Any]], options: dict[str, Any], pair: Pair
) -> None:
    """At every place but the first; and completions stay a quarter of the sequences."""
    assert trained[1]["num_prompts"] == 24 - 2
    prompts = open_prompts(str(pair.prompts), prompt_column="prompt", messages_column=None, limit=None)
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(pair.target), max_prompt_tokens=64)

    def example(row_id: int) -> Example:
        ids = np.array(encoder.prompt_ids(prompts.prompt(row_id)), np.int32)
        return Example(row_id=row_id, sample_index=0, prompt_ids=ids, completion_ids=ids[:3])

    held_out = [example(1), example(4)]
    texts = read_prompts(prompts, encoder, held_out, num_rows=11, max_tokens=5)
    row_ids = [text.row_id for text in texts]
    assert len(row_ids) == 11 and not {1, 4} & set(row_ids) and max(row_ids) > 18
    for text in texts:
        whole = np.r_[text.prompt_ids, text.completion_ids]
        assert np.array_equal(whole, example(text.row_id).prompt_ids[:5])
        assert len(text.prompt_ids) == 1
    examples = Examples([example(0)], held_out, texts)
    counts = Counter(len(each.prompt_ids) > 1 for each in examples.learned)
    assert counts[False] == 11 and counts[True] == 4


def test_the_folder_is_a_draft_and_promises_what_a_run_finds(
    trained: tuple[Path, dict[str, Any]], options: dict[str, Any], noisy: Path, tmp_path: Path
) -> None:
    found = {}
    for name, draft in (("before", noisy), ("after", trained[0])):
        ended = run_here(**options | {"draft": draft}, output=tmp_path / name, num_draft_tokens=1)
        found[name] = ended.totals["draft_acceptance_rate"]
        assert abs(found[name] - trained[1][name]["acceptance"]) < 0.12
    assert found["after"] > found["before"] + 0.06


@pytest.mark.parametrize(
    "changes", [{"teacher": "recorded"}, {"teacher": "tokens"}, {"loss": "tvd"}], ids=str
)
def test_every_teacher_teaches(
    changes: dict[str, Any], options: dict[str, Any], finished: Path, noisy: Path, tmp_path: Path
) -> None:
    run = options | {"draft": noisy, "output": finished, "logprobs": 320} | changes
    shown = distilled(tmp_path / "draft", **run)
    assert shown["after"]["acceptance"] > shown["before"]["acceptance"] + 0.02


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_draft_goes_on_with_the_prompts_anew_after_every_evaluation(
    options: dict[str, Any], finished: Path, noisy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is then; with every prompt once in an epoch. Those texts are what it learns from."""
    write, calls, num_learned = training.with_own_texts, [], 0
    batches = training.batches

    def spied(writer: Any, prompts: Sequence[Example], step: int) -> list[Example]:
        weights = sum(float(weight.detach().double().sum()) for weight in writer.model.parameters())
        texts = write(writer, prompts, step)
        calls.append((step, weights, [example.row_id for example in prompts], texts))
        return texts

    def counted(examples: Sequence[Example], *arguments: Any) -> Any:
        nonlocal num_learned
        written = {id(text) for *_, texts in calls for text in texts}
        num_learned += sum(id(example) in written for example in examples)
        return batches(examples, *arguments)

    monkeypatch.setattr(training, "with_own_texts", spied)
    monkeypatch.setattr(training, "batches", counted)
    run = options | {"draft": noisy, "output": finished, "teacher": "target", "epochs": 2}
    shown = distilled(tmp_path / "draft", **run)
    history = json.loads((tmp_path / "draft" / "distillation.json").read_text())["history"]
    steps, weights, rows, texts = zip(*calls, strict=True)
    assert list(steps) == history["steps"][:-1] and len(set(weights)) == len(weights)
    in_all = Counter(row_id for part in rows for row_id in part)
    assert set(in_all.values()) == {2} and len(in_all) == shown["num_prompts"] == 22
    assert num_learned == sum(len(part) for part in texts) == 44
    num_tokens = sum(text.num_tokens for part in texts for text in part)
    assert shown["num_own_tokens"] == num_tokens - 2 * (shown["num_prompt_tokens"] + 22)


@pytest.mark.parametrize("teacher", ["tokens", "target"])
def test_an_interrupted_training_ends_with_the_same_weights(
    teacher: str,
    options: dict[str, Any],
    finished: Path,
    noisy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed after the third evaluation; and with other options it is not continued."""
    run = options | {"draft": noisy, "output": finished, "teacher": teacher, "epochs": 2}
    distilled(tmp_path / "whole", **run)
    write, num_written = training.write_atomically, 0

    def dying(*arguments: Any) -> None:
        nonlocal num_written
        write(*arguments)
        num_written += 1
        if num_written == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "write_atomically", dying)
    with pytest.raises(KeyboardInterrupt):
        distilled(tmp_path / "cut", **run)
    monkeypatch.undo()
    changed = run_here(main, **FAST | run | {"new_draft": tmp_path / "cut", "batch_size": 5})
    assert changed.code == 2 and "other options, models or rows" in changed.stderr
    shown = distilled(tmp_path / "cut", **run)
    assert shown["steps"] > 0
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_the_first_layers_of_the_target_are_a_draft(
    options: dict[str, Any], finished: Path, tmp_path: Path, pair: Pair
) -> None:
    run = options | {"draft": None, "output": finished, "layers": 1}
    shown = distilled(tmp_path / "draft", **run)
    assert shown["after"]["acceptance"] > shown["before"]["acceptance"]
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["num_hidden_layers"] == 1
    ended = run_here(**options | {"draft": tmp_path / "draft", "limit": 4}, output=tmp_path / "run")
    assert ended.totals["draft_acceptance_rate"] > 0
    refused = run_here(main, **FAST | run | {"layers": 2, "new_draft": tmp_path / "other"})
    assert refused.code == 2 and "--layers 2 must be less than the 2 layers" in refused.stderr


@pytest.mark.parametrize("coupled", [{"temperature": 0}, {"acceptance": "gumbel"}], ids=str)
def test_one_command_generates_distils_and_goes_on_with_the_tokens_of_one_draft(
    coupled: dict[str, Any], options: dict[str, Any], noisy: Path, tmp_path: Path
) -> None:
    """``--first`` ends with whole shards; the change of the draft is in the manifest."""
    run = options | {"draft": noisy, "model_impl": "transformers", "num_samples": 1} | coupled
    assert run_here(**run, output=tmp_path / "plain").code == 0
    options_file = tmp_path / "run.yaml"
    values = {name: str(value) if isinstance(value, Path) else value for name, value in run.items()}
    options_file.write_text(yaml.safe_dump(values | {"output": str(tmp_path / "run"), "policy": "fixed"}))
    shown = distilled(
        tmp_path / "draft", config=options_file, first=0.1, go_on=True, epochs=1, overlap="synchronous"
    )
    assert shown["rest"]["num_completions"] == 16
    before, after = (read_output(tmp_path / name)["completion_ids"] for name in ("plain", "run"))
    assert before == after and len(after) == 24
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    first, second = manifest["info"]["segments"]
    assert (first["draft"], first["complete_shards"]) == (str(noisy), 0)
    assert (second["draft"], second["complete_shards"]) == (str(tmp_path / "draft"), 1)
    assert first["fingerprint"] != second["fingerprint"] and manifest["info"]["draft"] == second["draft"]
    # A relaunch has the new draft; and one that differs in more is refused.
    again = run | {"draft": tmp_path / "draft", "output": tmp_path / "run"}
    assert run_here(**again).code == 0
    other = run_here(**again | {"draft": noisy, "seed": 7})
    assert other.code == 2 and "seed" in other.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": "ngram"}, "--draft ngram cannot be trained"),
        ({"draft": None}, "--draft none cannot be trained"),
        ({"teacher": "tokens", "loss": "tvd"}, "--loss tvd has no effect with --teacher tokens"),
        ({"teacher": "recorded"}, "--teacher recorded needs a run with"),
        ({"epochs": 0}, "--epochs 0 must be at least 1"),
        ({"prompt_rows": -1}, "--prompt_rows -1 must not be negative"),
        ({"prompt_rows": 5, "teacher": "tokens"}, "--prompt_rows 5 needs --teacher target"),
        ({"own_tokens": -1}, "--own_tokens -1 must not be negative"),
        (
            {"own_tokens": 9, "prompt_rows": 0, "teacher": "target"},
            "--own_tokens 9 go on with the prompts of",
        ),
        ({"own_temperature": -1}, "--own_temperature -1.0 must not be negative"),
        ({"own_temperature": 0, "own_tokens": 0}, "--own_temperature 0.0 is of the texts of --own_tokens"),
        ({"first": 1.5}, "--first 1.5 must be between 0 and 1"),
        ({"output": "nothing"}, "holds no run: generate one"),
    ],
    ids=str,
)
def test_mistakes_are_told(
    changes: dict[str, Any], message: str, options: dict[str, Any], finished: Path, tmp_path: Path
) -> None:
    run = FAST | options | {"output": finished, "new_draft": tmp_path / "draft"} | changes
    ended = run_here(main, **run)
    assert ended.code == 2 and message in ended.stderr
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("policy", ["fixed", "none"])
def test_an_eagle_draft_is_not_trained(
    policy: str, options: dict[str, Any], finished: Path, tmp_path: Path, pair: Pair
) -> None:
    """Whether or not the run uses it."""
    target = AutoModelForCausalLM.from_pretrained(pair.target)
    eagle_model(target, range(9)).save_pretrained(tmp_path / "eagle")
    run = FAST | options | {"output": finished, "draft": tmp_path / "eagle", "policy": policy}
    refused(run_here(main, **run, new_draft=tmp_path / "draft"), "is an EAGLE-3 draft", "name ")


def test_a_folder_of_something_else_is_left_alone(
    options: dict[str, Any], finished: Path, tmp_path: Path, pair: Pair
) -> None:
    (tmp_path / "precious").write_text("mine")
    ended = run_here(main, **FAST | options, output=finished, new_draft=tmp_path)
    assert ended.code == 2 and "not of an earlier distillation" in ended.stderr
    ended = run_here(main, **FAST | options, output=finished, new_draft=pair.draft)
    assert ended.code == 2 and "is the folder of a model of this run" in ended.stderr
    assert (tmp_path / "precious").read_text() == "mine"

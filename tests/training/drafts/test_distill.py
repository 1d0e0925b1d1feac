"""The job: the finished rows of a run become a draft that is accepted more often."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdist.cli import distill as main
from specdist.training.drafts import run as job
from specdist.training.drafts import trainer as training
from specdist.training.drafts.trainer import DraftTrainer
from tests.engine.eagle import eagle_model
from tests.job.launching import refused, run_here
from tests.job.pair import Pair, noisy_copy
from tests.job.ranks import fork_ranks

FAST = {"epochs": 2, "learning_rate": 2e-3, "prompt_rows": 0}


@pytest.fixture(scope="session")
def options(pair: Pair) -> dict[str, Any]:
    """A run of three shards, but for its output."""
    return pair.job(max_new_tokens=16, rows_per_shard=8, temperature=0.8, num_samples=4, top_k=24)


@pytest.fixture(scope="session")
def noisy(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that has forgotten much of the target."""
    folder = tmp_path_factory.mktemp("noisy") / "draft"
    shutil.copytree(pair.draft, folder)
    noisy_copy(AutoModelForCausalLM.from_pretrained(pair.target), 0.1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def finished(options: dict[str, Any], noisy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rejection, and with log-probabilities; only to be read."""
    output = tmp_path_factory.mktemp("finished") / "run"
    assert run_here(**options | {"draft": noisy}, output=output, logprobs=320).code == 0
    return output


def distilled(run: Path, folder: Path, **options: Any) -> dict[str, Any]:
    return run_here(main, **FAST | {"run": run, "new_draft": folder} | options).totals


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@dataclass
class Trained:
    """``written``: in each step the sum of the draft's weights, the seeds of its texts, and labels without
    and with them."""

    folder: Path
    shown: dict[str, Any]
    written: list[tuple[float, tuple[int, ...], torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def trained(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """By the target, with prompts."""
    folder, write, written = tmp_path_factory.mktemp("trained") / "draft", training.with_own_texts, []

    def spied(inputs: dict[str, torch.Tensor], draft: Any, **kinds: Any) -> dict[str, torch.Tensor]:
        found = write(inputs, draft, **kinds)
        total = sum(float(weight.detach().double().sum()) for weight in draft.parameters())
        written.append((total, tuple(kinds["seeds"]), inputs["labels"], found["labels"]))
        return found

    with mock.patch.object(training, "with_own_texts", spied):
        shown = distilled(finished, folder, teacher="target", epochs=3, prompt_rows=2000)
    return Trained(folder, shown, written)


def test_a_distilled_draft_is_accepted_more_often(trained: Trained) -> None:
    """On rows that it was not trained on; nothing but the draft and its record is left in the folder."""
    folder, shown = trained.folder, trained.shown
    assert shown["acceptance_after"] > shown["acceptance_before"] + 0.06
    record = json.loads((folder / "distillation.json").read_text())
    assert record["num_training_sequences"] + record["num_held_out_sequences"] == 96
    assert record["num_prompts"] == 24 - record["num_held_out_sequences"] // 4 == 22
    losses = [entry["loss"] for entry in record["history"] if "loss" in entry]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert not (folder / "checkpoints").exists()


def test_the_folder_is_a_draft_and_promises_what_a_run_finds(
    trained: Trained, options: dict[str, Any], tmp_path: Path
) -> None:
    ended = run_here(**options | {"draft": trained.folder}, output=tmp_path / "run", num_draft_tokens=1)
    found = ended.totals["draft_acceptance_rate"]
    assert abs(found - trained.shown["acceptance_after"]) < 0.12
    assert found > trained.shown["acceptance_before"] + 0.06


def test_the_target_s_tokens_teach(finished: Path, tmp_path: Path) -> None:
    """Recorded log-probabilities, the default, do on two ranks below."""
    shown = distilled(finished, tmp_path / "draft", epochs=4, learning_rate=1e-3, teacher="tokens")
    assert shown["acceptance_after"] > shown["acceptance_before"] + 0.01


def test_a_killed_training_ends_with_the_same_weights(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while its third checkpoint was written; and with other options it is not continued."""
    run = {"teacher": "target", "epochs": 1, "prompt_rows": 9}
    distilled(finished, tmp_path / "whole", **run)
    save, saved = DraftTrainer._save_checkpoint, []

    def dying(trainer: DraftTrainer, *arguments: Any) -> None:
        save(trainer, *arguments)
        saved.append(Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}")
        if len(saved) == 3:
            (saved[-1] / "trainer_state.json").write_text('{"cut": ')
            raise KeyboardInterrupt

    monkeypatch.setattr(DraftTrainer, "_save_checkpoint", dying)
    with pytest.raises(KeyboardInterrupt):
        distilled(finished, tmp_path / "cut", **run)
    monkeypatch.undo()
    changed = FAST | run | {"run": finished, "new_draft": tmp_path / "cut", "batch_size": 5}
    refused(run_here(main, **changed), "is of a training with other options", "give another folder")
    ended = run_here(main, **changed | {"batch_size": 8})
    assert ended.totals["steps"] > 0
    assert json.loads((tmp_path / "cut" / "distillation.json").read_text())["history"][0]["step"] == 0
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_the_draft_writes_after_every_prompt_anew(trained: Trained) -> None:
    """As it is then: those texts, with their prompts, are what it learns from."""
    totals, seeds, *_ = zip(*trained.written, strict=True)
    assert len(set(totals)) > len(totals) / 2 and len(set(seeds)) == len(seeds)
    num_prompts = sum(int((before[:, 0] >= 0).sum()) for *_, before, _ in trained.written)
    assert num_prompts == 3 * trained.shown["num_prompts"] == 3 * 22
    for *_, before, after in trained.written:
        is_prompt = before[:, 0] >= 0
        grown = (after >= 0).sum(1) - (before >= 0).sum(1)
        assert bool((grown[is_prompt] > 0).all()) and not grown[~is_prompt].any()


def on_a_rank(arguments: Sequence[str]) -> int:
    """The command itself is not sent to other processes."""
    return main(arguments)


def test_two_ranks_share_the_training(finished: Path, tmp_path: Path) -> None:
    """A step of two ranks has the sequences of both."""
    run = FAST | {"run": finished, "epochs": 4, "batch_size": 4, "device": "cpu"}
    shown = fork_ranks(2, on_a_rank, **run, new_draft=tmp_path / "draft").totals
    assert shown["acceptance_after"] > shown["acceptance_before"] + 0.02
    history = json.loads((tmp_path / "draft" / "distillation.json").read_text())["history"]
    assert max(entry["step"] for entry in history) <= 4 * -(-shown["num_training_sequences"] // 8)


def test_an_unfinished_run_is_learned_from_and_keeps_its_draft(
    options: dict[str, Any], noisy: Path, tmp_path: Path
) -> None:
    """Its complete shards are what is learned from; another draft needs another run."""
    changes = {"draft": noisy, "model_impl": "transformers", "num_samples": 1}
    run = options | changes
    assert run_here(**run, output=tmp_path / "run").code == 0
    for path in [*(tmp_path / "run").rglob("shard-*2.arrow"), *(tmp_path / "run").rglob("shard-*2.json")]:
        path.unlink()
    shown = distilled(tmp_path / "run", tmp_path / "draft", epochs=1)
    assert shown["num_training_sequences"] + shown["num_held_out_sequences"] == 16
    other = run_here(**run | {"draft": tmp_path / "draft", "output": tmp_path / "run"})
    assert other.code == 2 and "\n  draft: " in other.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": "ngram"}, "--draft ngram cannot be trained: name the folder"),
        ({"prompt_rows": 5}, "--prompt_rows 5 needs --teacher target"),
        ({"draft": "same", "new_draft": "same"}, "--new_draft same is a folder that is read: give another"),
        ({"run": "nothing"}, "--run nothing holds no run: generate one"),
    ],
    ids=str,
)
def test_mistakes_are_told(
    changes: dict[str, Any], message: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded."""
    monkeypatch.setattr(job, "load_plain", None)
    run = FAST | {"run": finished, "new_draft": tmp_path / "draft"} | changes
    refused(run_here(main, **run), message)
    assert not (tmp_path / "draft").exists()


def test_what_the_run_does_not_have_is_told(finished: Path, pair: Pair, noisy: Path, tmp_path: Path) -> None:
    """Log-probabilities; rows; its own target; a draft that is trained."""
    run = shutil.copytree(finished, tmp_path / "run")
    values = yaml.safe_load((run / "config.yaml").read_text())
    words = FAST | {"run": run, "new_draft": tmp_path / "draft"}
    refused(
        run_here(main, **words, target=noisy), "is not the model that wrote --run", "name that run's target"
    )
    shutil.rmtree(run / "shards")
    refused(run_here(main, **words), "has fewer than 2 finished rows", "generate more")
    (run / "config.yaml").write_text(yaml.safe_dump(values | {"logprobs": None}))
    refused(run_here(main, **words, teacher="recorded"), "--teacher recorded needs a run", "--logprobs 20")
    eagle_model(AutoModelForCausalLM.from_pretrained(pair.target), range(9)).save_pretrained(
        tmp_path / "eagle"
    )
    (run / "config.yaml").write_text(yaml.safe_dump(values | {"policy": "none"}))
    refused(run_here(main, **words, draft=tmp_path / "eagle"), "is an EAGLE-3 draft", "name ")

"""An EAGLE-3 draft in training: its steps are those of a block that it drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdist.cli.distill import main
from specdist.distillation.data import Example
from specdist.distillation.eagle_draft import frequent_ids, unrolled
from tests.engine.eagle import LAYERS, Drafted, eagle_model, eagle_target, expected_probabilities
from tests.job.launching import refused, run_here
from tests.job.pair import random_llama, save, train_tokenizer

VOCAB_SIZE, NUM_STEPS, LENGTHS = 24, 4, (17, 11)
IDS = list(range(2, 22))


@torch.no_grad()
def test_a_step_of_training_is_a_step_of_a_block() -> None:
    """Every step of two sequences in one batch, against the published formulas for a block that begins
    there: other keys, states or positions would give other probabilities."""
    target = eagle_target(VOCAB_SIZE)
    draft = eagle_model(target, IDS)
    generator = np.random.default_rng(3)
    texts = [generator.choice(IDS, size=length).tolist() for length in LENGTHS]
    token_ids_BL = torch.tensor([text + [0] * (LENGTHS[0] - len(text)) for text in texts])
    found = target(token_ids_BL, output_hidden_states=True).hidden_states
    states_BLS = torch.cat([found[layer] for layer in LAYERS], dim=-1)
    outputs = list(unrolled(draft, token_ids_BL, states_BLS, NUM_STEPS))
    for row, text in enumerate(texts):
        for begin in (1, 2, 5, len(text) - NUM_STEPS - 1):
            block = Drafted(text[: begin + 1], text[begin + 1 : begin + 1 + NUM_STEPS], [])
            own = [
                float(draft.logits(outputs[step][row, begin + step][None]).softmax(-1)[0, candidate])
                for step, candidate in enumerate(block.candidates)
            ]
            np.testing.assert_allclose(own, expected_probabilities(target, draft, block), rtol=2e-4)


def test_a_new_draft_knows_the_most_frequent_tokens() -> None:
    nothing = np.zeros(0, np.int32)
    texts = [[7, 7, 7, 3], [7, 3, 9], [3, 5, 5]]
    examples = [
        Example(row_id=0, sample_index=0, prompt_ids=nothing, completion_ids=np.array(text)) for text in texts
    ]
    assert frequent_ids(examples, 3, 12).tolist() == [3, 5, 7]
    assert frequent_ids(examples, 6, 12).tolist() == [0, 1, 3, 5, 7, 9]


def test_a_run_trains_a_draft_and_goes_on_with_it(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a run without a draft: training raises acceptance, and the folder is a draft of the target."""
    save(tmp_path / "target", random_llama(num_hidden_layers=3), train_tokenizer())
    run = options | {"target": tmp_path / "target", "draft": None, "temperature": 1, "top_k": None}
    assert run_here(**run, output=tmp_path / "run").code == 0
    training = {"new_draft": tmp_path / "eagle", "kind": "eagle3", "epochs": 6, "learning_rate": 0.003}
    training |= {"draft_vocab_size": 200, "unrolled_steps": 2, "batch_size": 4}
    # It does not begin as the draft that is named, a model of its own.
    ended = run_here(main, **run | training | {"draft": options["draft"]}, output=tmp_path / "run")
    record = ended.totals
    assert record["start"] is None
    assert record["after"]["acceptance"] > record["before"]["acceptance"] + 0.02
    assert json.loads((tmp_path / "eagle" / "config.json").read_text())["draft_vocab_size"] == 200
    again = run | {"draft": tmp_path / "eagle", "num_draft_tokens": 2}
    drafted = run_here(**again, output=tmp_path / "drafted")
    # Not its own training rows' tokens: sampled anew.
    assert drafted.totals["draft_acceptance_rate"] > 0.05


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"kind": "eagle3", "layers": 1}, ["--layers 1 is for --kind model"]),
        ({"kind": "eagle3", "teacher": "recorded", "logprobs": 5}, ["--teacher recorded with --kind eagle3"]),
        ({"draft_vocab_size": 100}, ["--draft_vocab_size 100 is for --kind eagle3"]),
        ({"kind": "eagle3"}, ["--kind eagle3 with --target", "this target has 2"]),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], finished: Path, tmp_path: Path, changes: dict[str, Any], fragments: list[str]
) -> None:
    given = options | changes | {"new_draft": tmp_path / "new", "output": finished}
    refused(run_here(main, **given), *fragments)

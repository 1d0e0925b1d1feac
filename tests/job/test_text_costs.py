"""Passes of models with experts are timed with the run's own text: other tokens choose other experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from specdist.job.costs import measuring
from specdist.job.costs.pass_times import PassTimer, tokens_of_text
from specdist.models.batch.flat import FlatBatch
from tests.engine.harness import PAGE_SIZE, paged_runner
from tests.job.launching import run_here
from tests.job.pair import MAX_POSITIONS, NUM_VOCAB_TOKENS, Pair, save, some_texts

NUM_EXPERTS = 8


def mixture() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=NUM_VOCAB_TOKENS, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MAX_POSITIONS,
        num_local_experts=NUM_EXPERTS, num_experts_per_tok=2, sliding_window=None, bos_token_id=None,
        eos_token_id=0, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    return MixtralForCausalLM(config).float().eval()


def test_every_row_begins_elsewhere_in_the_text_and_goes_on_there() -> None:
    assert tokens_of_text((), [2, 3]).tolist() == [0] * 5
    assert tokens_of_text(range(10, 20), [3, 2]).tolist() == [10, 11, 12, 15, 16]
    # A text that is too short is repeated.
    assert tokens_of_text((7, 8, 9), [5]).tolist() == [7, 8, 9, 7, 8]
    assert tokens_of_text((7, 8), [1, 1, 1, 1]).tolist() == [7, 7, 8, 8]


def test_a_text_chooses_more_experts_than_one_token_again_and_again() -> None:
    runner = paged_runner(mixture())
    runner.allocate(num_pages=16, page_size=PAGE_SIZE, num_slots=4, max_seq_len=32)
    chosen: list[int] = []
    experts = cast(MixtralForCausalLM, runner.model).model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda _, arguments: chosen.append(len(arguments[1].unique())))
    for text_ids in (range(1, 40), ()):
        PassTimer(runner, len, text_ids=text_ids)(4, 8, 3)
    of_text, of_zeros = chosen
    assert of_zeros < 5 < of_text


def timed(monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[int]:
    """The tokens of all measured passes in the start of a run."""
    seen: set[int] = set()
    run = PassTimer._run

    def watched(timer: PassTimer, *shape: int) -> None:
        with monkeypatch.context() as patch:
            forward = timer._runner.forward

            def noting(batch: FlatBatch, index: np.ndarray) -> torch.Tensor:
                seen.update(np.asarray(batch.token_ids_T).tolist())
                return forward(batch, index)

            patch.setattr(timer._runner, "forward", noting)
            run(timer, *shape)

    with monkeypatch.context() as patch:
        patch.setattr(PassTimer, "_run", watched)
        ended = run_here(**options, policy="goodput")
    assert ended.code == 0, ended.stderr
    return seen


def test_a_run_times_its_prompts_own_tokens(
    pair: Pair, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair.target)
    target = save(tmp_path / "target", mixture(), tokenizer)
    monkeypatch.setattr(measuring, "BUDGET_S", 0.2)
    options = {**options, "max_new_tokens": 4}
    own = {token_id for text in some_texts(24) for token_id in tokenizer(text)["input_ids"]}
    found = timed(monkeypatch, **{**options, "target": target, "output": tmp_path / "run"})
    assert len(found) > 10 and found <= own
    # A model without experts is timed as ever.
    assert timed(monkeypatch, **{**options, "output": tmp_path / "dense"}) == {0}

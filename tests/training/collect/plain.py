"""The contents of a collection recomputed with transformers alone: one plain forward per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.job.pair import Pair

# float32 sums in another order, through a softmax; hidden states are rounded to half precision.
TOLERANCE = {"rtol": 2e-3, "atol": 1e-6}
HALF_TOLERANCE = {"rtol": 2e-3, "atol": 2e-3}


@dataclass(frozen=True)
class PlainPair:
    """Both models, loaded by transformers."""

    pair: Pair
    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @cached_property
    def target(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.pair.target).eval()

    @cached_property
    def draft(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.pair.draft).eval()

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.pair.target)

    @torch.inference_mode()
    def distributions(self, model: Any, token_ids: list[int]) -> Tensor:
        """[L, V]: row i is what follows the first i + 1 tokens."""
        logits = model(torch.tensor([token_ids])).logits[0].double()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers(torch.tensor([token_ids]), logits).softmax(-1)

    @torch.inference_mode()
    def hidden(self, token_ids: list[int]) -> np.ndarray:
        """[L, H] the draft's last hidden states."""
        output = self.draft(torch.tensor([token_ids]), output_hidden_states=True)
        return output.hidden_states[-1][0].numpy()

    def check_distributions(self, examples: pa.Table, token_ids: list[int]) -> None:
        """Ratio, acceptance and features of examples after prefixes of one sequence."""
        places, drawn = examples["position"].to_numpy().copy(), examples["token_id"].to_numpy().copy()
        draft_MV, target_MV = (
            self.distributions(model, token_ids)[places - 1] for model in (self.draft, self.target)
        )
        rows = np.arange(len(places))
        draft_M, target_M = draft_MV[rows, drawn].numpy(), target_MV[rows, drawn].numpy()
        assert (draft_M > 0).all()
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(examples["ratio"].to_numpy(), draft_M / target_M, **TOLERANCE)
        expected = np.minimum(1, target_M / draft_M)
        np.testing.assert_allclose(examples["acceptance"].to_numpy(), expected, **TOLERANCE)
        if self.temperature:
            entropy = torch.special.entr(draft_MV).sum(1)
            np.testing.assert_allclose(examples["entropy"].to_numpy(), entropy, rtol=2e-3, atol=1e-4)
            np.testing.assert_allclose(examples["probability"].to_numpy(), draft_M, **TOLERANCE)
            np.testing.assert_allclose(examples["top_probability"].to_numpy(), draft_MV.amax(1), **TOLERANCE)


def hidden_of(examples: pa.Table) -> np.ndarray:
    """[M, H] of a table's rows."""
    column = examples["hidden"].combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1).astype(np.float32)

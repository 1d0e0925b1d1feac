"""A synthetic pair of a chosen acceptance rate: a random target, and its first layers as draft.

Where no trained pair of a size is available, it shows the cost of the engine. Its text means nothing, so
every measurement with it is labelled synthetic.

B rows, P prompt tokens, N new tokens, H hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specdist.data.store.files import write_json
from specdist.job.ranks.topology import local_device
from specdist.lab.synthetic.config import SyntheticConfig
from specdist.lab.synthetic.random_llama import write_pair
from specdist.lab.synthetic.shapes import SHAPES
from specdist.utils.errors import UserError

RECORD_NAME = "synthetic.json"
SEARCH_SEED, MEASUREMENT_SEED = 1, 2
NUM_SAMPLE_ROWS, NUM_SAMPLE_PROMPT_TOKENS, NUM_SAMPLE_NEW_TOKENS = 32, 16, 32
FIRST_EPSILON, LARGEST_EPSILON = 0.05, 4.0
TOLERANCE = 0.01  # less than the standard error of the sample
MAX_SEARCH_STEPS = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SyntheticRecord:
    """The content of ``synthetic.json``, which is written last and so marks a complete pair.

    ``measured_acceptance`` is the share of ``num_measured_tokens`` greedy tokens of the target that are the
    draft's likeliest too; None where ε was given and nothing was run.
    """

    shape: str
    seed: int
    dtype: str
    wanted_acceptance: float | None
    epsilon: float
    measured_acceptance: float | None
    num_measured_tokens: int
    synthetic: bool = True


def make_synthetic(config: SyntheticConfig) -> tuple[str, dict[str, Any]]:
    """Run the job; no text, and the document to print. Raises :class:`UserError`."""
    record = build_synthetic(
        Path(config.output),
        config.shape,
        acceptance=config.acceptance,
        epsilon=config.epsilon,
        seed=config.seed,
        dtype=getattr(torch, config.dtype),
        device=local_device(config.device),
    )
    return "", dataclasses.asdict(record)


def build_synthetic(
    folder: Path,
    shape: str,
    *,
    acceptance: float | None = None,
    epsilon: float | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
) -> SyntheticRecord:
    """Build ``folder/target`` and ``folder/draft`` for a greedy acceptance or a given ε, or reuse them.

    A given ε needs the memory of one layer; a wanted acceptance is searched with the whole target on
    ``device``. Raises :class:`UserError` for an acceptance that no ε gives.
    """
    assert (acceptance is None) != (epsilon is None), "either an acceptance or an epsilon"
    dtype_name = str(dtype).removeprefix("torch.")
    found = read_record(folder)
    if (
        found is not None
        and (found.shape, found.seed, found.dtype, found.wanted_acceptance)
        == (shape, seed, dtype_name, acceptance)
        and epsilon in (None, found.epsilon)
    ):
        return found
    (folder / RECORD_NAME).unlink(missing_ok=True)
    measured, num_measured = None, 0
    if acceptance is not None:
        write_pair(folder, SHAPES[shape], epsilon=1.0, seed=seed, dtype=dtype)
        logger.info("looking for the epsilon that gives acceptance %g", acceptance)
        dialled = DialledTarget(folder / "target", SHAPES[shape].num_draft_layers, dtype=dtype, device=device)
        epsilon = find_epsilon(lambda value: dialled.acceptance(value, SEARCH_SEED), acceptance)
        # On other prompts, because the search has fitted the noise of its own.
        measured = dialled.acceptance(epsilon, MEASUREMENT_SEED)
        num_measured = NUM_SAMPLE_ROWS * NUM_SAMPLE_NEW_TOKENS
    assert epsilon is not None
    write_pair(folder, SHAPES[shape], epsilon=epsilon, seed=seed, dtype=dtype)
    record = SyntheticRecord(
        shape=shape,
        seed=seed,
        dtype=dtype_name,
        wanted_acceptance=acceptance,
        epsilon=epsilon,
        measured_acceptance=measured,
        num_measured_tokens=num_measured,
    )
    write_json(folder / RECORD_NAME, dataclasses.asdict(record))
    return record


def read_record(folder: Path) -> SyntheticRecord | None:
    """The record of a complete pair in ``folder``, or None."""
    path = folder / RECORD_NAME
    if not path.is_file():
        return None
    values: dict[str, Any] = json.loads(path.read_text())
    return SyntheticRecord(**values)


def find_epsilon(acceptance_at: Callable[[float], float], wanted: float) -> float:
    """The ε with ``acceptance_at(ε)`` = ``wanted``: doubled until it is too large, then interpolated.

    Acceptance is 1 at ε = 0 and falls nearly linearly, so few of the expensive evaluations are needed.
    Raises :class:`UserError` if the largest ε still gives more than wanted.
    """
    if wanted == 1:
        return 0.0
    low, acceptance_low = 0.0, 1.0
    high, acceptance_high = LARGEST_EPSILON, None
    epsilon = FIRST_EPSILON
    for _ in range(MAX_SEARCH_STEPS):
        found = acceptance_at(epsilon)
        logger.info("epsilon %.4f gives acceptance %.3f", epsilon, found)
        if abs(found - wanted) <= TOLERANCE:
            break
        if found < wanted:
            high, acceptance_high = epsilon, found
        elif epsilon >= LARGEST_EPSILON:
            raise UserError(
                f"--acceptance {wanted} is less than the {found:.2f} that remains when the later layers "
                "outweigh the first ones: raise it"
            )
        else:
            low, acceptance_low = epsilon, found
        if acceptance_high is None:
            epsilon = min(2 * low, LARGEST_EPSILON)
        else:
            share = (acceptance_low - wanted) / (acceptance_low - acceptance_high)
            epsilon = low + share * (high - low)
    return epsilon


class DialledTarget:
    """A loaded target that was written with ε = 1, whose ε can be changed; the draft is a part of it."""

    def __init__(
        self, folder: Path, num_draft_layers: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        transformers_logging.disable_progress_bar()
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device)
        self._num_draft_layers = num_draft_layers

    @torch.inference_mode()
    def acceptance(self, epsilon: float, seed: int) -> float:
        """Share of the target's greedy tokens after random prompts that are the draft's likeliest too."""
        prompts_BP = random_prompts(self._model.config.vocab_size, seed).to(self._model.device)
        with self._scaled(epsilon):
            output = self._model.generate(
                prompts_BP,
                attention_mask=torch.ones_like(prompts_BP),
                max_new_tokens=NUM_SAMPLE_NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
                output_hidden_states=True,
                return_dict_in_generate=True,
            )
        # The draft computes what the target's first layers do.
        hidden_BNH = torch.stack(
            [hidden[self._num_draft_layers][:, -1] for hidden in output.hidden_states], dim=1
        )
        draft_ids_BN = self._model.lm_head(self._model.model.norm(hidden_BNH)).argmax(-1)
        return (draft_ids_BN == output.sequences[:, prompts_BP.shape[1] :]).float().mean().item()

    @contextlib.contextmanager
    def _scaled(self, epsilon: float) -> Iterator[None]:
        def scale(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            del module, inputs
            return output * epsilon

        hooks = [
            part.register_forward_hook(scale)
            for layer in self._model.model.layers[self._num_draft_layers :]
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def random_prompts(vocab_size: int, seed: int) -> Tensor:
    """int64 [B, P]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (NUM_SAMPLE_ROWS, NUM_SAMPLE_PROMPT_TOKENS), generator=generator)

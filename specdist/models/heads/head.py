"""The trained head on a draft: one logit per token from the draft's last hidden state, its file, and the
digest of weights by which a draft is recognised.

A head reads one of two of the draft's last hidden states, after the final norm. For a drafted token y_i:

- its *own*, at the position where y_i is the input: e_i of SpecDec++ (Huang et al. 2024, Equation 4.1). It is
  the input of the output head in the pass that gives the distribution of y_{i+1}, so the estimate for y_i is
  known one draft pass after y_i was drawn.
- the *drawing* state, which y_i was drawn from: "the last embedding of the previous token" of SPRINTER's
  experiments (section 3.2). The estimate needs no further pass. Alone it cannot tell one token at a place
  from another; with features (the token's probability, the entropy) it can. SPRINTER's s(x, prefix) with the
  "embedding of the draft token x" may as well be the own state.

N tokens, H hidden size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from specdist.config.generate import GenerateConfig
from specdist.data.store.files import sha256_of, write_atomically
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.damage import reading
from specdist.models.heads.info import (
    WEIGHTS_NAME,
    DraftIdentity,
    HeadInfo,
    HeadKind,
    HiddenState,
    read_head_info,
)
from specdist.models.passes.hidden import HiddenStateHead
from specdist.policies.registry import HEAD_KINDS
from specdist.utils.errors import UserError

NUM_FEATURES = 3
# Smaller probabilities are clamped to this.
LEAST_PROBABILITY = 1e-6

HUB_SNAPSHOTS = "snapshots"
# Blocks of each weight file, spread evenly from its first byte to its last.
NUM_BLOCKS = 256
BLOCK_BYTES = 2**12


class TokenHead(HiddenStateHead):
    """ResNet of ``depth`` residual layers x + SiLU(Wx + b) and a linear one to a single logit (SpecDec++,
    section 5.1, "(D + 1)-layer ResNet with SiLU"); with depth 0 it is the linear layer alone."""

    def __init__(
        self,
        hidden_size: int,
        depth: int,
        *,
        uses_features: bool = False,
        hidden_state: HiddenState = "own",
    ) -> None:
        """``uses_features``: the head also reads features of the distribution that the token was drawn from,
        which a small draft's next hidden state hardly contains. The papers' heads do not. A head that reads
        the drawing state has depth 0: the sum of what the state and what the features say."""
        super().__init__()
        assert depth == 0 or hidden_state == "own", "the drawing state is read by a linear layer"
        self._hidden_state = hidden_state
        self.entry = nn.Linear(NUM_FEATURES, hidden_size) if uses_features else None
        self.residuals = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(depth))
        self.output = nn.Linear(hidden_size, 1)

    @property
    def dtype(self) -> torch.dtype:
        return self.output.weight.dtype

    @property
    def uses_features(self) -> bool:
        return self.entry is not None

    @property
    def reads_drawing_state(self) -> bool:
        return self._hidden_state == "drawing"

    def logits_of_draws(self, features_3N: Tensor) -> Tensor:
        if self.entry is None:
            return super().logits_of_draws(features_3N)
        return self._entered(features_3N) @ self.output.weight[0]

    def _entered(self, features_3N: Tensor) -> Tensor:
        """[N, H]"""
        assert self.entry is not None
        logs_2N = features_3N[1:].clamp(min=LEAST_PROBABILITY).log()
        return cast(Tensor, self.entry(torch.cat([features_3N[:1], logs_2N]).T.to(self.dtype)))

    def forward(self, hidden_NH: Tensor, features_3N: Tensor | None = None) -> Tensor:
        """Logits [N] of last hidden states in any floating type; their sigmoid is the estimate.

        ``features_3N``: as :func:`specdist.sampling.branch_estimates.draft_features` gives them, of the same
        tokens: entropy, probability of the token, probability of the likeliest one; for a head that uses
            them. One that reads the drawing state may be called without: see :meth:`logits_of_draws`.
        """
        state_NH = hidden_NH.to(self.dtype)
        if self.entry is not None and (features_3N is not None or not self.reads_drawing_state):
            assert features_3N is not None, "this head needs the features"
            state_NH = state_NH + self._entered(features_3N)
        for residual in self.residuals:
            state_NH = state_NH + nn.functional.silu(residual(state_NH))
        return cast(Tensor, self.output(state_NH)[:, 0])


def save_weights(head: TokenHead, folder: Path) -> str:
    """Write the weights; returns the file's SHA-256, for the JSON file that is to be written next."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    write_atomically(folder / WEIGHTS_NAME, lambda file: file.write(save(tensors)))
    return sha256_of(folder / WEIGHTS_NAME).hex()


def load_head(path: str | Path, *, kind: HeadKind, draft: DraftIdentity) -> TokenHead:
    """The head in a folder, ready for inference; needs no weights of the draft.

    Raises :class:`UserError` for a head of another kind or another draft, or if its files do not belong
    together.
    """
    info = read_head_info(path)
    info.check(path, kind=kind, draft=draft)
    file = Path(path) / WEIGHTS_NAME
    try:
        content = file.read_bytes()
        if sha256_of(file).hex() != info.weights_sha256:
            raise ValueError("its SHA-256 is not that of the JSON beside it")
        head = TokenHead(
            info.hidden_size,
            info.depth,
            uses_features=info.uses_features,
            hidden_state=info.hidden_state,
        )
        head.load_state_dict(load(content))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"--head {path}: {WEIGHTS_NAME} cannot be used ({error}): copy the folder again as a whole, or "
            "train the head again"
        ) from error
    return head.eval().requires_grad_(False)


@dataclass(frozen=True)
class DraftHead:
    """``network`` is on the CPU, in float32."""

    network: TokenHead
    info: HeadInfo

    def description(self) -> dict[str, Any]:
        """What the manifest says of the draft."""
        names = ("kind", "depth", "max_ratio", "uses_features", "hidden_state", "weights_sha256")
        return {name: getattr(self.info, name) for name in names} | {"draft": self.info.draft.name}


def open_draft_head(config: GenerateConfig, draft: Checkpoint) -> DraftHead | None:
    """The head that the run's policy reads; None for a policy without. Raises :class:`UserError` for a head
    that does not fit."""
    if config.head is None:
        return None
    network = load_head(config.head, kind=HEAD_KINDS[config.policy], draft=identify_draft(draft))
    return DraftHead(network, read_head_info(config.head))


def identify_draft(draft: Checkpoint) -> DraftIdentity:
    """The identity of this checkpoint; reads a megabyte of each weight file."""
    with reading(f"{draft.option} {draft.name}: its weight files", "put them back as they were"):
        fingerprint = _weights_digest(draft)
    return DraftIdentity(
        name=draft.name,
        revision=draft.folder.name if draft.folder.parent.name == HUB_SNAPSHOTS else None,
        architecture=str(draft.config.get_text_config().model_type),
        hidden_size=int(draft.config.get_text_config().hidden_size),
        fingerprint=fingerprint,
    )


def _weights_digest(draft: Checkpoint) -> str:
    """A digest of the weights, without names and tokenizer files.

    It reads blocks from all over the file, since a fine-tuned model may differ from its base in few layers.
    """
    digest = hashlib.sha256()
    for path in draft.weight_files:
        size = path.stat().st_size
        digest.update(f"{size}\0".encode())
        with path.open("rb") as file:
            for start in np.linspace(0, max(0, size - BLOCK_BYTES), NUM_BLOCKS).astype(int):
                file.seek(int(start))
                digest.update(file.read(BLOCK_BYTES))
    if draft.adapter is not None:
        digest.update(draft.adapter.fingerprint().encode())
    return digest.hexdigest()

"""The metadata of a trained head, and the check that it fits a draft. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specdist.data.store.files import write_json
from specdist.policies import HeadKind
from specdist.policies.registry import HEAD_KINDS
from specdist.utils.errors import UserError
from specdist.utils.json_values import from_fields, parse_object

WEIGHTS_NAME, INFO_NAME = "head.safetensors", "head.json"
# Version 1 had no ``hidden_state``: it was the own one.
FORMAT_VERSION = 2
HiddenState = Literal["own", "drawing"]


@dataclass(frozen=True, kw_only=True)
class DraftIdentity:
    """The draft that a head reads.

    ``fingerprint`` is a digest of its weights; ``name`` and ``revision`` (the hub's commit, None for a folder
    that is not a snapshot of the hub) are for people: a copy under another name is the same draft.
    """

    name: str
    revision: str | None
    architecture: str
    hidden_size: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class HeadInfo:
    """The JSON beside a head's weights.

    Attributes:
        kind: ``acceptance`` estimates min(1, P/Q) (SpecDec++), ``verifier`` the chance of Q/P <= max_ratio
            (SPRINTER).
        depth: residual layers before the linear one; 0 = the linear one alone.
        hidden_size: of the draft, the width of the input.
        max_ratio: the verifier's λ; None for the other kind.
        uses_features: it reads the features of the drafted token beside the hidden state.
        hidden_state: which one: with the drafted token as input, or the one that it was drawn from.
        data: what it was trained on, with the temperature, top_k and top_p of the collection.
        options: of the training.
        metrics: on the held-out rows.
        weights_sha256: of the weights' file, hexadecimal.
    """

    kind: HeadKind
    depth: int
    hidden_size: int
    draft: DraftIdentity
    weights_sha256: str
    max_ratio: float | None = None
    uses_features: bool = False
    hidden_state: HiddenState = "own"
    data: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Call it after the weights are written: without this file a folder is not a head."""
        write_json(folder / INFO_NAME, dataclasses.asdict(self))

    def check(self, folder: str | Path, *, kind: HeadKind, draft: DraftIdentity) -> None:
        """Raises :class:`UserError` for a head of another kind or for another draft."""
        what = f"--head {folder}"
        if self.kind != kind:
            raise UserError(
                f"{what} is of kind {self.kind}, for --policy {_policies_of(self.kind)}, but --policy "
                f"{_policies_of(kind)} reads one of kind {kind}: train one with jobs/train_head.py --kind "
                f"{kind}, or change --policy"
            )
        for name in ("hidden_size", "architecture"):
            if getattr(self.draft, name) != getattr(draft, name):
                raise UserError(
                    f"{what} was trained for a draft of {name} {getattr(self.draft, name)} "
                    f"({self.draft.name}), but --draft {draft.name} has {getattr(draft, name)}: choose that "
                    "draft, or train a head for this one with jobs/collect.py and jobs/train_head.py"
                )
        if self.draft.fingerprint != draft.fingerprint:
            revision = f" at revision {self.draft.revision}" if self.draft.revision else ""
            raise UserError(
                f"{what} was trained for {self.draft.name}{revision}, and --draft {draft.name} has other "
                "weights: choose that draft, or train a head for this one with jobs/collect.py and "
                "jobs/train_head.py"
            )


def _policies_of(kind: HeadKind) -> str:
    return " or ".join(policy for policy, its_kind in HEAD_KINDS.items() if its_kind == kind)


def read_head_info(path: str | Path) -> HeadInfo:
    """Read the JSON file of a head. Raises :class:`UserError` if it is missing or cannot be used."""
    file = Path(path) / INFO_NAME
    try:
        values = parse_object(file.read_bytes())
        version = values["format_version"]
        if version > FORMAT_VERSION:
            raise UserError(
                f"--head {path} has format version {version}, written by a newer specdist; this one knows up "
                f"to {FORMAT_VERSION}: update specdist, or train another head"
            )
        return from_fields(HeadInfo, values)
    except UserError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--head {path} is not a head: {INFO_NAME} cannot be read ({error!r}); give a folder that "
            "jobs/train_head.py has written"
        ) from error

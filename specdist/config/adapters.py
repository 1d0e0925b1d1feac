"""The options of adapters: low-rank updates that are merged into a model's weights while they are read."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.config.arguments import option
from specdist.config.groups import SELF
from specdist.utils.errors import UserError


@dataclass(kw_only=True)
class AdapterOptions:
    """LoRA adapters in PEFT's folders."""

    _argument_group_name = "Adapters"

    target_adapter: str | None = option(
        None,
        help="PEFT folder or hub id of a LoRA adapter that is merged into the target while it is loaded; the "
        "output follows the target with it",
    )
    draft_adapter: str | None = option(None, help="the same for the draft; changes acceptance alone")

    def check_adapters(self, draft: str | None) -> None:
        """Raises :class:`UserError` for an adapter of a draft that has the target's weights."""
        if self.draft_adapter is not None and draft is not None and draft.startswith(SELF):
            raise UserError(
                f"--draft_adapter {self.draft_adapter} with --draft {draft}: such a draft has the target's "
                "weights, with its adapter; leave --draft_adapter out"
            )

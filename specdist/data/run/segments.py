"""A run whose draft changes on its way: from which shard on which draft has proposed.

The manifest's fingerprint names the first draft. Once there is a second, ``segments`` in its ``info`` lists
all: the draft's folder, its part of the fingerprint, and the shards that were complete when it began. Another
draft changes no token greedily and with ``gumbel``; with ``rejection`` it changes the tokens of a seed, not
their distribution, so no shard may have rows of two drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from specdist.data.run.manifest import Manifest, ShardPlan, as_json, check_same
from specdist.utils.errors import UserError

# Fields of ``info``: the segments; and when the draft of this run may change, in the manifest that a replica
# brings.
SEGMENTS, DRAFT_CHANGES = "segments", "draft_changes"
ANY_TIME, BETWEEN_SHARDS, NEVER = "any time", "between shards", "never"
# Fields of the fingerprint; and those of ``info`` that say what was measured for a draft, or is its name.
DRAFT_FIELDS = ("draft", "draft_quantization", "draft_adapter")
COSTS, EARLIER_COSTS = "costs", "earlier_costs"
INFO_OF_DRAFT = ("draft", COSTS, EARLIER_COSTS)


def segments_of(manifest: Manifest) -> list[dict[str, Any]]:
    """All segments of a run, the first of which begins with it."""
    first = {"draft": manifest.info.get("draft"), "fingerprint": draft_fields(manifest), "complete_shards": 0}
    found: list[dict[str, Any]] = manifest.info.get(SEGMENTS) or [first]
    return found


def draft_fields(manifest: Manifest) -> dict[str, Any]:
    """What the fingerprint says of the draft."""
    return {name: manifest.fingerprint[name] for name in DRAFT_FIELDS if name in manifest.fingerprint}


def with_draft_of(old: Manifest, new: Manifest) -> Manifest:
    """``old`` as the manifest of a run with ``new``'s draft."""
    kept = {name: value for name, value in old.fingerprint.items() if name not in DRAFT_FIELDS}
    return replace(old, fingerprint=as_json(kept | draft_fields(new)))


def check_continues(old: Manifest, new: Manifest) -> None:
    """Raises :class:`UserError` that names every field in which the fingerprints differ; the draft may be any
    of the run's."""
    is_known = draft_fields(new) in [segment["fingerprint"] for segment in segments_of(old)]
    check_same(with_draft_of(old, new) if is_known else old, new)


class Shards(Protocol):
    """A run's shards as its folder has them."""

    def recorded_shards(self) -> set[int]:
        """The shards that are complete."""

    def begun_shards(self) -> list[int]:
        """The shards with part logs."""

    def plan(self) -> ShardPlan:
        """All of them."""


def next_segment(
    old: Manifest, new: Manifest, shards: Shards, find_another: Callable[[], str | None] | None
) -> Manifest | None:
    """The manifest of the run from now on with ``new``'s draft; None if that is the latest already, or the
    run is complete, so that no draft is needed.

    Raises :class:`UserError` if more than the draft is different, if it must not change, or where it may
    change between shards alone and some are begun.
    """
    rule = new.info.get(DRAFT_CHANGES, NEVER)
    segments = segments_of(old)
    is_latest = draft_fields(new) == segments[-1]["fingerprint"]
    if is_latest or rule == NEVER or with_draft_of(old, new).fingerprint != as_json(new.fingerprint):
        check_continues(old, new)
        return None
    complete = shards.recorded_shards()
    if len(complete) == shards.plan().num_shards:
        return None
    if rule == BETWEEN_SHARDS:
        former, own = segments[-1]["draft"], new.info.get("draft")
        asked = f"--draft {own}: --output holds a run with --draft {former}, and with --acceptance rejection"
        begun = sorted(set(shards.begun_shards()) - complete)
        if begun:
            shown = ", ".join(map(str, begun[:5])) + (", ..." if len(begun) > 5 else "")
            raise UserError(
                f"{asked} a draft may follow another between shards alone, but shards are begun ({shown}): "
                f"finish them with --draft {former}, or use another --output"
            )
        other = None if find_another is None else find_another()
        if other is not None:
            raise UserError(f"{asked} the draft cannot change while {other} is at work there: stop it first")
    segment = {
        "draft": new.info.get("draft"),
        "fingerprint": draft_fields(new),
        "complete_shards": len(complete),
    }
    info = {name: value for name, value in old.info.items() if name not in INFO_OF_DRAFT}
    info |= {name: new.info[name] for name in INFO_OF_DRAFT if name in new.info}
    return replace(old, info=info | {SEGMENTS: [*segments, segment]})

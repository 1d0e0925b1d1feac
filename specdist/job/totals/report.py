"""The totals of a run's finished shards, and the costs that its manifest keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdist.data.run.manifest import COSTS, EARLIER_COSTS
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.shard import Stats
from specdist.job.totals.totals import total_of
from specdist.policies.costs import CostModel
from specdist.utils.errors import UserError

# A run and its evaluation warn if more than this share of the completions was cut.
CUT_SHARE = 0.1


def total_stats(folder: RunFolder) -> Stats:
    """The statistics of all complete shards. Raises :class:`UserError` for damaged ones."""
    return total_of(folder, folder.complete_shards()).stats


def is_often_cut(num_cut: int, num_completions: int) -> bool:
    """Whether so many completions ended at a length limit that a warning is due."""
    return num_cut > CUT_SHARE * num_completions


def cut_line(num_cut: int, num_completions: int, settings: Mapping[str, Any]) -> str:
    """A sentence on completions that a length limit has cut. ``settings``: the manifest's fingerprint, or
    empty."""
    limits = [f"--{name} {settings.get(name, '')}".rstrip() for name in ("max_new_tokens", "max_seq_len")]
    line = f"{_share(num_cut, num_completions)} were cut by {' or '.join(limits)} (finish_reason length)"
    if is_often_cut(num_cut, num_completions):
        line += ": raise --max_new_tokens for complete ones"
    return line


def loop_line(num_looping: int, num_completions: int) -> str:
    """A sentence on completions that a loop has ended."""
    return f"{_share(num_looping, num_completions)} ended in a loop (finish_reason repetition)"


def rollout_line(total: Stats) -> str:
    """A sentence on what a rollout function has judged."""
    call_s = total.summary()["rollout_call_s"]
    called = "" if call_s is None else f", {total.num_rollout_calls:,} calls of {call_s:.3g} s"
    return (
        f"{total.num_completions:,} of {total.num_attempts:,} attempts were accepted "
        f"({total.num_completions / max(1, total.num_attempts):.0%}); {total.num_rejected_tokens:,} tokens "
        f"were rejected{called}"
    )


def _share(number: int, num_completions: int) -> str:
    return f"{number:,} of {num_completions:,} completions ({number / max(1, num_completions):.0%})"


def frozen_costs(folder: RunFolder) -> CostModel | None:
    """The latest of :func:`all_costs`, if there are any."""
    found = all_costs(folder)
    return found[-1] if found else None


def all_costs(folder: RunFolder) -> list[CostModel]:
    """The manifest's costs of passes: those that were corrected, and those in use. Raises :class:`UserError`
    for damaged ones."""
    info = folder.manifest.info
    try:
        return [CostModel.from_json(each) for each in (*info.get(EARLIER_COSTS, ()), info.get(COSTS)) if each]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{folder.manifest_path}: costs is damaged ({error}): delete this field and {EARLIER_COSTS}, and "
            "start the run's command again"
        ) from error


def totals_document(
    folder: RunFolder, total: Stats, *, num_devices: float, is_complete: bool
) -> dict[str, Any]:
    """The document in the last line that a run prints: its totals."""
    return {
        "output": str(folder.path),
        "exact": folder.manifest.info["exact"],
        "draft_placement": folder.manifest.info.get("draft_placement"),
        "complete": is_complete,
        **total.summary(num_devices),
    }


def check_results(folder: RunFolder) -> None:
    """Raises :class:`UserError` for damage that would keep the run from reporting its totals at its end."""
    frozen_costs(folder)
    total_stats(folder)

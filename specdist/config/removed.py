"""Options and values that earlier versions had, and what to do instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdist.utils.errors import UserError


@dataclass(frozen=True)
class Removed:
    """``remedy``: what to do instead. ``unused``: the value that the file of an earlier run has where it made
    no use of the option, besides null; such a file is read as before."""

    remedy: str
    unused: Any = False


_LEARNING = (
    "no draft learns during a run; leave it out, distil the draft from this run's rows with jobs/distill.py, "
    "and go on with --draft NEW_DRAFT"
)
_SHARING = (
    "a draft belongs to one target; leave it out, launch a replica for each target with the same --output "
    "(REPLICAS of slurm/run.sh), and give each a draft on a rank of its own (--num_processes tp_size + 1) or "
    "on its first rank (--draft_placement shared)"
)
_OF_SHARING = f"it was for drafts that several targets share: {_SHARING}"
# Values of options that have another name now.
RENAMED_VALUES = {
    "draft": {"memory": "ngram"},
    "overlap": {"none": "synchronous", "ahead": "asynchronous"},
}
# Of settings that a manifest holds.
NAMES_IN_MANIFESTS = {
    "draft_memory": "ngram_texts",
    "memory_rows": "ngram_rows",
    "claims": "leases",
    "shards_per_claim_folder": "shards_per_lease_folder",
}
# Of jobs/generate.py, and the Python interface.
OF_GENERATE = {
    "claims": Removed("it is called --leases now"),
    "claim_timeout": Removed("it is called --lease_timeout now", unused=60.0),
    "spool": Removed("it is called --cache_dir now"),
    "draft_memory": Removed("it is called --ngram_texts now"),
    "memory_column": Removed("it is called --ngram_column now"),
    "memory_rows": Removed("it is called --ngram_rows now"),
    "memory_size": Removed("it is called --ngram_size now", unused=2**22),
    "memory": Removed(
        "a draft model's candidates are not mixed with memory's; leave it out, or use --draft ngram without "
        "a draft model"
    ),
    "adapt_draft": Removed(_LEARNING),
    "adapt_rate": Removed(_LEARNING),
    "adapt_batch": Removed(_LEARNING, unused=512),
    "adapt_buffer": Removed(_LEARNING, unused=2**20),
    "adapt_interval": Removed(_LEARNING, unused=16),
    "adapt_margin": Removed(_LEARNING, unused=0.002),
    "adapt_memory": Removed(_LEARNING),
    "num_targets": Removed(_SHARING, unused=1),
    "num_drafts": Removed(_SHARING, unused=1),
    "draft_timeout": Removed(_OF_SHARING, unused=60.0),
    "max_restarts": Removed(_OF_SHARING, unused=3),
}

_EAGLE = (
    "EAGLE-3 drafts are not trained here; leave it out to train a draft model, or train one with "
    "https://github.com/vllm-project/speculators or https://github.com/sgl-project/SpecForge, whose drafts "
    "--draft takes"
)
# Of jobs/distill.py, besides.
OF_DISTILL = {
    "kind": Removed(_EAGLE, unused="model"),
    "draft_vocab_size": Removed(_EAGLE, unused=None),
    "unrolled_steps": Removed(_EAGLE, unused=5),
}
_OF_PACKAGE = "what it measures is this package itself; run, in the repository, {} with the same options"
_COMPARING = Removed(_OF_PACKAGE.format("python -m tests.lab.benchmark"), unused=None)
# Of jobs/benchmark.py.
OF_BENCHMARK = {
    "emulate": Removed(_OF_PACKAGE.format("python -m tests.lab.emulation")),
    "profile": Removed(
        f"{_OF_PACKAGE.format('python -m tests.lab.profile')}, and --output for the folder", unused=None
    ),
    "policies": _COMPARING,
    "initial_lengths": _COMPARING,
    "max_draft_tokens": _COMPARING,
    "head": _COMPARING,
    "group_column": _COMPARING,
    "placements": _COMPARING,
    "overlaps": _COMPARING,
    "num_branches": _COMPARING,
    "overhead_repeats": _COMPARING,
    "update_readme": Removed("the table is printed; leave it out, with --results and --brief", unused=None),
    "results": Removed("it was for --update_readme; leave both out", unused=None),
    "brief": Removed("it was for --update_readme; leave both out"),
}
# Of jobs/report.py.
OF_REPORT = {
    "tune": Removed("jobs/tune.py draws all that it has replayed itself, in pareto.png; leave it out")
}
# Of jobs/plan.py.
_VALIDATING = Removed(_OF_PACKAGE.format("python -m tests.lab.plan.validate"), unused=None)
OF_PLAN = {
    "validate": Removed(_VALIDATING.remedy),
    "batch_sizes": _VALIDATING,
    "draft_lengths": _VALIDATING,
    "repeats": Removed(_VALIDATING.remedy, unused=5),
}


def check_value(name: str, value: Any) -> None:
    """Raises :class:`UserError` for a value that has another name now."""
    if isinstance(value, str) and (now := RENAMED_VALUES.get(name, {}).get(value)) is not None:
        raise UserError(f"--{name} {value} is called --{name} {now} now")


def with_present_names(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run that an earlier version may have begun."""
    found = {NAMES_IN_MANIFESTS.get(name, name): value for name, value in settings.items()}
    overlap = found.get("overlap")
    return found | {"overlap": RENAMED_VALUES["overlap"].get(overlap, overlap)} if overlap else found

"""The settings that a run was started with, and whether a relaunch has the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdist.config.seeds import seed_fixes
from specdist.data.store.files import write_json
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

FORMAT_VERSION = 1
# All shards of a run lie in one folder, which its replicas list again and again: three files for each shard
# are few enough names for a file server and for a page of an object store.
MAX_SHARDS = 1000
# The default of a run whose rows need no more shards than that. At the end a replica waits for the rows that
# others have begun, and for a shard of each at most.
ROWS_PER_SHARD = 64
ABSENT = "(absent)"
# The field of the manifest's info for sums by shard, where rows have a number of completions of their own.
COMPLETIONS_PER_SHARD = "completions_per_shard"
# The field of ``info`` that tells whether the class ``tokens`` leaves rounding out, which may decide between
# two tokens.
UP_TO_ROUNDING = "up_to_rounding"
# Fields of ``info`` for measured costs: the latest, and those that earlier rounds were decided by.
COSTS, EARLIER_COSTS = "costs", "earlier_costs"


def fewest_rows_per_shard(num_rows: int) -> int:
    """The fewest rows per shard that make no more than :data:`MAX_SHARDS` shards."""
    return -(-num_rows // MAX_SHARDS)


@dataclass(frozen=True)
class ShardPlan:
    """Shard i begins with row i·rows_per_shard; the last shard may be shorter.

    ``num_samples``: completions of every row, unless rows have their own numbers: then
    ``completions_per_shard`` are their sums.
    """

    num_rows: int
    rows_per_shard: int
    num_samples: int = 1
    completions_per_shard: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.num_shards > MAX_SHARDS:
            raise UserError(
                f"--rows_per_shard {self.rows_per_shard} splits {self.num_rows} rows into {self.num_shards} "
                f"shards, and a run has at most {MAX_SHARDS}: raise it to "
                f"{fewest_rows_per_shard(self.num_rows)} or more, or split the rows into several runs"
            )

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.rows_per_shard)

    @staticmethod
    def of(num_rows: int, rows_per_shard: int | None, num_samples: int = 1) -> ShardPlan:
        """The plan of a new run; without a number of rows per shard as many as there should be. Raises
        :class:`UserError` for too many shards."""
        if rows_per_shard is None:
            rows_per_shard = max(ROWS_PER_SHARD, fewest_rows_per_shard(num_rows))
        return ShardPlan(num_rows, rows_per_shard, num_samples)

    def num_completions_of(self, shard: int) -> int:
        """Errors among them."""
        if self.completions_per_shard is not None:
            return self.completions_per_shard[shard]
        first, end = self.bounds(shard)
        return (end - first) * self.num_samples

    @property
    def num_completions(self) -> int:
        if self.completions_per_shard is not None:
            return sum(self.completions_per_shard)
        return self.num_rows * self.num_samples

    def bounds(self, shard: int) -> tuple[int, int]:
        """A shard's first row, and the row after its last. Raises IndexError for a shard not in the plan."""
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard} is not one of {self.num_shards}")
        start = shard * self.rows_per_shard
        return start, min(start + self.rows_per_shard, self.num_rows)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``fingerprint``: everything that decides the output. ``info``: fixed at the start, not compared."""

    fingerprint: dict[str, Any]
    info: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def write(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self))

    @staticmethod
    def read(path: Path) -> Manifest:
        """Raises :class:`UserError` if there is none, or it is not a manifest or of a newer format."""
        try:
            values = parse_object(path.read_bytes())
            version, fingerprint, info = values["format_version"], values["fingerprint"], values["info"]
            if not (type(version) is int and isinstance(fingerprint, dict) and isinstance(info, dict)):
                raise TypeError("a field has the wrong type")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(
                f"{path.parent} is not the folder of a run: it has no {path.name}. Give what --output was; a "
                "run that has just been started writes this file after its first checks"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is not a readable manifest of a run ({error!r}): use another --output; to keep the "
                "rows in this one, copy the new run's manifest.json over this one and start again here"
            ) from error
        if version > FORMAT_VERSION:
            raise UserError(
                f"{path} has format version {version}, written by a newer specdist; this one knows up to "
                f"{FORMAT_VERSION}: update specdist, or use another --output"
            )
        return Manifest(fingerprint=fingerprint, info=info, format_version=version)


def seed_says(manifest: Manifest) -> str:
    """What the run's seed fixes, for people."""
    info = manifest.info
    return seed_fixes(info["reproducibility"], is_up_to_rounding=bool(info.get(UP_TO_ROUNDING)))


def check_same(old: Manifest, new: Manifest) -> None:
    """Raises :class:`UserError` that names every field in which the fingerprints differ."""
    before, now = _flat(old.fingerprint), _flat(as_json(new.fingerprint))
    differences = [
        f"  {name}: {_shown(before, name)} in --output, {_shown(now, name)} now"
        for name in {**before, **now}
        if name not in before or name not in now or before[name] != now[name]
    ]
    if differences:
        raise UserError(
            "--output holds a run with different settings:\n"
            + "\n".join(differences)
            + "\nUse another --output, or --overwrite to delete that run's results and start afresh"
        )


def as_json(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint as a manifest gives it: in JSON a tuple is a list."""
    found: dict[str, Any] = json.loads(json.dumps(fingerprint))
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else ABSENT

"""The counts of counts.py as the tables in ``jobs/benchmarks/tables``: before and after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from specdist.utils.table import Table, decimals
from tests.gpu.counts import COUNTED, NUM_SEQUENCES

ENTRIES = ("before", "after")
LAYERS = {"1B": 16, "8B": 32, "70B, tp 4": 80}
PASSES = {"step": "32 × 1", "block": "32 × 6"}
GB = 1e9


def markdown() -> str:
    """All tables, with the commands."""
    entries = json.loads(COUNTED.read_text(encoding="utf-8"))
    entries = {name: entries[name] for name in ENTRIES if name in entries}
    parts = [
        "Kernels and bytes of a pass in bfloat16, 32 sequences with 1,100 keys:",
        _table(_shapes(entries)),
        "Kernels of a layer by family: "
        + "; ".join(f"{name}: {_families(counts)}" for name, counts in entries.items())
        + ".",
        "Synchronisations of a steady round, target + draft, by acceptance rule (4 sequences, at most 4 "
        "draft tokens, both models in one process); under rejection also copies between host and device, "
        "and what the draft is launched: graphs and single kernels:",
        _table(_rounds(entries)),
        "Share of passes that are replays, by number of sequences (at most 20 draft tokens, short rows that "
        "come and go); at 32 sequences, graphs of both models, and how often a round's draft synchronises:",
        _table(_replays(entries)),
        "\n".join(
            f"- {name}: commit {counts['commit']}, {counts['date']}, `{counts['command']}`"
            for name, counts in entries.items()
        ),
    ]
    return "\n\n".join(parts)


def _table(rows: Iterator[dict[str, str | int | None]]) -> str:
    found = list(rows)
    return Table.of(found, num_names=2).markdown() if found else "(not counted)"


def _shapes(entries: dict[str, Any]) -> Iterator[dict[str, str | int | None]]:
    for shape, num_layers in LAYERS.items():
        for kind, tokens in PASSES.items():
            for name, counts in entries.items():
                row: dict[str, str | int | None] = {"model": shape, "": name, "tokens": tokens}
                of_pass = counts["kernels_of_pass"]["llama"]
                moved = counts["bytes_of_pass"].get(shape, {}).get(kind)
                kernels = num_layers * of_pass["per_layer"] + of_pass["outside_of_layers"]
                row |= {
                    "kernels per layer": f"{of_pass['per_layer']:g}",
                    "kernels per pass": f"{kernels + of_pass['eager']:.0f}",
                    "GB moved": decimals(moved["moved_bytes"] / GB) if moved else None,
                    "GB of the floor": decimals(moved["floor_bytes"] / GB) if moved else None,
                    "ratio": decimals(moved["ratio"]) if moved else None,
                }
                yield row


def _families(counts: dict[str, Any]) -> str:
    return ", ".join(f"{family} {number:g}" for family, number in counts["kernels_per_layer"].items())


def _rounds(entries: dict[str, Any]) -> Iterator[dict[str, str | int | None]]:
    first = next(iter(entries.values()))["syncs_per_round"]["target"]
    for policy in next(iter(first.values())):
        for name, counts in entries.items():
            row: dict[str, str | int | None] = {"policy": policy, "": name}
            rounds = counts["rounds"]
            for rule in first:
                of_policy = rounds.get(rule, {}).get(policy)
                row[rule] = of_policy and " + ".join(
                    f"{of_policy[side]['synchronisations']:.1f}" for side in ("target", "draft")
                )
            of_policy = rounds["rejection"].get(policy)
            row["copies, rejection"] = of_policy and decimals(
                sum(of_policy[side]["copies"] for side in ("target", "draft")), 1
            )
            for what, key in (("graphs", "replays"), ("kernels", "eager kernels")):
                row[f"draft's {what}"] = of_policy and decimals(of_policy["draft"][key], 1)
            yield row


def _replays(entries: dict[str, Any]) -> Iterator[dict[str, str | int | None]]:
    policies = list(dict.fromkeys(p for counts in entries.values() for p in counts.get("replay_share", {})))
    for policy in policies:
        for name, counts in entries.items():
            found = counts.get("replay_share", {}).get(policy, {})
            row: dict[str, str | int | None] = {"policy": policy, "": name}
            for size in map(str, NUM_SEQUENCES):
                row[size] = f"{found[size]['share']:.1%}" if size in found else None
            of_32 = found.get("32", {})
            row["graphs"] = of_32.get("graphs")
            waits = of_32.get("draft_synchronisations_per_round")
            row["draft's synchronisations"] = None if waits is None else decimals(waits)
            yield row

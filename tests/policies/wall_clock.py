"""Every policy in every placement, by the wall clock: ``python -m tests.policies.wall_clock --output FILE``.

Each setting is a run or two of ``tests.lab.benchmark``, in which all methods take turns; a machine that is
otherwise idle, with two cores, is needed. ``--again N`` then measures goodput beside the best other alone,
where goodput was below it: the best of many is partly so by chance. The table of jobs/benchmarks/tables is
made from the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdist.data.leases.heartbeat import now_utc
from specdist.data.store.files import write_json
from specdist.utils.table import Table
from tests.lab.benchmark.choices import policy_choices
from tests.lab.benchmark.results import ComparedMethod, ComparisonResult
from tests.lab.emulation.policies import GOODPUT, OTHERS
from tests.ranks import REPOSITORY

TARGET_ONLY = "target only"
ALONE, COLOCATED, SYNCHRONOUS, ASYNCHRONOUS = TARGET_ONLY, "colocated", "synchronous", "asynchronous"
BRANCHES = "branches"
MODES = (COLOCATED, SYNCHRONOUS, ASYNCHRONOUS, BRANCHES)
TEMPERATURES = (0.0, 1.0)
# Options by the name of a pair.
PAIRS: dict[str, tuple[str, ...]] = {
    **{
        f"20m at {acceptance}": ("--synthetic", "20m", "--acceptance", str(acceptance))
        for acceptance in (0.5, 0.7, 0.85)
    },
    "small pair": (
        "--target", "runs/small-pair/target", "--draft", "runs/small-pair/draft_distilled",
        "--prompts", "runs/prompts/spec_bench.arrow",
    ),
}  # fmt: skip
# A run has blocks ahead with branches or without.
PLACEMENTS: dict[tuple[str, ...], tuple[str, ...]] = {
    (COLOCATED, SYNCHRONOUS, BRANCHES): ("--placements", "colocated", "separate", "--num_branches", "3"),
    (ASYNCHRONOUS,): ("--placements", "separate", "--overlaps", "asynchronous", "--num_branches", "0"),
}
WORK = (
    "--dtype", "bfloat16", "--batch_sizes", "8", "--num_prompts", "16", "--max_new_tokens", "48",
    "--overhead_repeats", "0",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--repeats", type=int, default=2, help="of every method, taken in turn")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--again", type=int, help="nothing but this many repeats where goodput was below")
    options = parser.parse_args()
    found = json.loads(options.output.read_text(encoding="utf-8")) if options.output.is_file() else {}
    settings = {_key(one): one for one in found.get("settings", [])}

    def keep(circumstances: ComparisonResult) -> None:
        """Settings of earlier commands stay."""
        result = {
            "command": "python -m tests.policies.wall_clock " + shlex.join(sys.argv[1:]),
            "date": now_utc(),
            "cpu": circumstances.hardware.cpu,
            "num_cores": circumstances.hardware.num_cores,
            "settings": [settings[key] for key in sorted(settings)],
        }
        write_json(options.output, result)

    if options.again:
        entries = {policy_choices([entry], None, None)[0].label: entry for entry in OTHERS}
        for setting in list(settings.values()):
            best = _best_other(setting)
            if _median(setting, GOODPUT) < _median(setting, best):
                result, rates = _measured(setting, [entries[best], GOODPUT], options.again)
                setting["again"] = rates[setting["mode"]]
                keep(result)
        return
    for pair, temperature in itertools.product(options.pairs, TEMPERATURES):
        for modes in PLACEMENTS:
            setting = {"pair": pair, "temperature": temperature, "mode": modes[0]}
            result, rates = _measured(setting, [*OTHERS, GOODPUT], options.repeats)
            for mode in modes:
                one = {**setting, "mode": mode, "tokens_per_s": rates[mode]}
                settings[_key(one)] = one
            keep(result)


def _key(setting: dict[str, Any]) -> tuple[int, float, int]:
    return list(PAIRS).index(setting["pair"]), setting["temperature"], MODES.index(setting["mode"])


def _measured(
    setting: dict[str, Any], policies: Sequence[str], repeats: int
) -> tuple[ComparisonResult, dict[str, dict[str, list[float]]]]:
    """The result; and tokens per second of every repeat, by mode and policy, the target alone among them."""
    placements = next(given for modes, given in PLACEMENTS.items() if setting["mode"] in modes)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        command = [
            sys.executable, "-m", "tests.lab.benchmark", *PAIRS[setting["pair"]], *placements, *WORK,
            "--temperature", str(setting["temperature"]), "--policies", *policies,
            "--repeats", str(repeats), "--output", str(output),
        ]  # fmt: skip
        # A thread for each process, so that a draft of its own is a device more, as a GPU would be.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, env=environment)
        result = ComparisonResult.read(output)
    rates: dict[str, dict[str, list[float]]] = {}
    for method in result.methods:
        per_repeat = [
            round(tokens / seconds, 1)
            for tokens, seconds in zip(method.num_tokens, method.seconds, strict=True)
        ]
        rates.setdefault(_mode(method), {})[_label(method)] = per_repeat
    alone = rates.pop(ALONE)
    return result, {mode: {**alone, **of_mode} for mode, of_mode in rates.items()}


def _mode(method: ComparedMethod) -> str:
    if method.policy is None:
        return ALONE
    if method.policy.num_branches:
        return BRANCHES
    return {"separate": SYNCHRONOUS}.get(method.policy.placement, method.policy.placement)


def _label(method: ComparedMethod) -> str:
    """Without the engine before it and the placement after it."""
    return method.name.removeprefix("specdist, ").split(", ")[0]


def _median(setting: dict[str, Any], name: str) -> float:
    return statistics.median(setting["tokens_per_s"][name])


def _best_other(setting: dict[str, Any]) -> str:
    names = [name for name in setting["tokens_per_s"] if name not in (GOODPUT, TARGET_ONLY)]
    return max(names, key=lambda name: _median(setting, name))


def markdown(path: Path) -> str:
    """A row per setting."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows: list[dict[str, str | int | None]] = []
    for one in found["settings"]:
        best = _best_other(one)
        alone, goodput = _median(one, TARGET_ONLY), _median(one, GOODPUT)
        num_cores = 1 if one["mode"] == MODES[0] else 2  # the draft's
        rows.append(
            {
                "pair": one["pair"],
                "temperature": f"{one['temperature']:g}",
                "mode": one["mode"],
                "target only": f"{alone:,.0f}",
                "goodput": f"{goodput:,.0f}",
                "best other": best,
                "its tokens/s": f"{_median(one, best):,.0f}",
                "goodput over it": f"{goodput / _median(one, best):.3f}",
                "measured again": _again(one),
                "x target only per core": f"{goodput / alone / num_cores:.2f}",
                "K = 5, too": f"{_median(one, 'K = 5') / alone / num_cores:.2f}",
            }
        )
    where = f"{found['cpu']}, {found['num_cores']} cores"
    return f"{Table.of(rows, num_names=3).markdown()}\n\n{where}; {found['date']}: `{found['command']}`"


def _again(setting: dict[str, Any]) -> str | None:
    """Goodput over the best other, of repeats in which both took turns: the median, lowest and highest."""
    if "again" not in setting:
        return None
    (other,) = (name for name in setting["again"] if name not in (GOODPUT, TARGET_ONLY))
    pairs = zip(setting["again"][GOODPUT], setting["again"][other], strict=True)
    ratios = sorted(goodput / rate for goodput, rate in pairs)
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    main()

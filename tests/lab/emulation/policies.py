"""Every policy in every placement, in virtual time: `python -m tests.lab.emulation.policies --output FILE`.

The engine, the draft and the policies are real, of Markov pairs with easy and hard stretches; clocks go by
passes of the planner's times (:mod:`tests.lab.emulation.virtual`). The table of jobs/benchmarks/tables is
made from the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from specdist.data.leases.heartbeat import now_utc
from specdist.data.store.files import write_json
from specdist.lab.plan.hardware import PUBLISHED
from specdist.policies.choice import PolicyChoice
from specdist.utils.table import Table
from tests.lab.emulation.choices import INITIAL_LENGTHS, policy_choices
from tests.lab.emulation.config import EmulationConfig
from tests.lab.emulation.virtual import tokens_per_s

PAIR: dict[str, Any] = {"emulate": "h100-sxm", "target": "70b", "draft": "1b", "tp_size": 4}
BATCH_SIZE, VARIATION = 32, 0.5
CHOSEN = "auto"
MODES = ("colocated", "synchronous", "asynchronous", "branches", CHOSEN)
TEMPERATURES, ACCEPTANCES = (0.0, 1.0), (0.5, 0.7, 0.85)
GOODPUT, TARGET_ONLY = "goodput", "target only"
# Fixed lengths and the policies of papers, those with a threshold with two.
OTHERS = (
    *(f"fixed:num_draft_tokens={length}" for length in (1, 3, 5, 8)),
    "hf_heuristic:num_draft_tokens=5", "gammatune:num_draft_tokens=5", "gammatune_plus:num_draft_tokens=5",
    "svip:stop_root_entropy=0.6", "adaedl", "confidence", "confidence:stop_probability=0.6",
)  # fmt: skip
SPREAD_POLICIES = ("fixed", "gammatune")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    parser.add_argument(
        "--rounds", type=int, default=100, help="of each run; in 30 chance has a part of several percent"
    )
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[BATCH_SIZE])
    parser.add_argument("--policies", nargs="+", default=[*OTHERS, GOODPUT])
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--acceptances", type=float, nargs="+", default=ACCEPTANCES)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--no_spreads", action="store_true", help="leave out what first lengths matter")
    parser.add_argument(
        "--repeats",
        type=int,
        default=0,
        help="nothing but goodput beside the best other where it was below, with so many other seeds: "
        "the best of many is partly so by chance",
    )
    options = parser.parse_args()
    command = "python " + " ".join(["-m", "tests.lab.emulation.policies", *sys.argv[1:]])
    found = json.loads(options.output.read_text(encoding="utf-8")) if options.output.is_file() else {}
    settings = {_key(one): one for one in found.get("settings", [])}
    spreads = {(*_key(one), one["policy"]): one for one in found.get("spreads", [])}

    def keep() -> None:
        """What earlier commands have found for other settings, or for other policies in as many rounds,
        stays."""
        result = {
            "command": command,
            "date": now_utc(),
            "settings": [settings[key] for key in sorted(settings)],
            "spreads": [spreads[key] for key in sorted(spreads)],
        }
        write_json(options.output, result)

    if options.repeats:
        for setting in settings.values():
            mode, name, rate = best_other(setting, list(settings.values()))
            if setting["tokens_per_s"][GOODPUT] < rate:
                setting["repeated"] = _repeated(setting, mode, name, options.repeats)
                sys.stderr.write(f"{setting}\n")
                keep()
        return
    for batch_size, temperature, mode, acceptance in itertools.product(
        options.batch_sizes, options.temperatures, options.modes, options.acceptances
    ):
        setting = {
            "batch_size": batch_size, "temperature": temperature, "mode": mode, "acceptance": acceptance
        }  # fmt: skip
        rates = {
            choice.label: round(_rate(setting, choice, options.rounds), 1)
            for choice in [PolicyChoice(), *policy_choices(options.policies, None, None)]
        }
        kept = settings.get(_key(setting), {})
        others = kept["tokens_per_s"] if kept.get("rounds") == options.rounds else {}
        settings[_key(setting)] = {
            **setting, "rounds": options.rounds, "tokens_per_s": {**others, **rates}
        }  # fmt: skip
        sys.stderr.write(f"{settings[_key(setting)]}\n")
        keep()
    for temperature, name in itertools.product(options.temperatures, SPREAD_POLICIES):
        if options.no_spreads:
            break
        setting = {
            "batch_size": BATCH_SIZE, "temperature": temperature, "mode": MODES[0],
            "acceptance": ACCEPTANCES[1],
        }  # fmt: skip
        all_rates = [
            round(_rate(setting, choice, options.rounds), 1)
            for choice in policy_choices([name], list(INITIAL_LENGTHS), None)
        ]
        spreads[(*_key(setting), name)] = {**setting, "policy": name, "tokens_per_s": all_rates}
        keep()


def _key(setting: dict[str, Any]) -> tuple[int, float, int, float]:
    mode = MODES.index(setting["mode"])
    return setting["batch_size"], setting["temperature"], mode, setting["acceptance"]


def best_other(setting: dict[str, Any], settings: list[dict[str, Any]]) -> tuple[str, str, float]:
    """The best of all but goodput in this setting, or, where every round is chosen and there are other
    settings, of all in other modes: its mode, its name and its tokens per second."""
    names = ("batch_size", "temperature", "acceptance")
    across = [] if setting["mode"] != CHOSEN else [
        one for one in settings if one["mode"] != CHOSEN and all(one[name] == setting[name] for name in names)
    ]  # fmt: skip
    rates = [
        (one["mode"], name, rate)
        for one in across or [setting]
        for name, rate in one["tokens_per_s"].items()
        if across or name not in (GOODPUT, TARGET_ONLY)
    ]
    return max(rates, key=lambda one: one[2])


def _repeated(setting: dict[str, Any], mode: str, name: str, num_seeds: int) -> dict[str, Any]:
    """Goodput over this other one, which was chosen by seed 0, with the seeds from 1 on."""
    choices = {choice.label: choice for choice in policy_choices([*OTHERS, GOODPUT], None, None)}
    rounds = setting["rounds"]
    ratios_N = [
        _rate(setting, choices[GOODPUT], rounds, seed)
        / _rate({**setting, "mode": mode}, choices[name], rounds, seed)
        for seed in range(1, num_seeds + 1)
    ]
    return {
        "other": [mode, name],
        "num_seeds": num_seeds,
        "ratio": round(float(np.mean(ratios_N)), 4),
        "standard_error": round(float(np.std(ratios_N, ddof=1)) / num_seeds**0.5, 4),
    }


def _rate(setting: dict[str, Any], choice: PolicyChoice, rounds: int, seed: int = 0) -> float:
    config = EmulationConfig(
        **PAIR,
        batch_sizes=[setting["batch_size"]],
        rounds=rounds,
        variation=VARIATION,
        acceptance=setting["acceptance"],
        temperature=setting["temperature"],
        seed=seed,
    )
    return tokens_per_s(config, setting["mode"], choice)


def table(result: dict[str, Any]) -> str:
    """A row per setting, then one for all modes of a setting, and what the first length matters."""
    rows: list[dict[str, str | int | None]] = []
    for one in result["settings"]:
        if one["batch_size"] != BATCH_SIZE:
            continue
        rates = one["tokens_per_s"]
        alone, goodput = rates[TARGET_ONLY], rates[GOODPUT]
        _, best, _ = best_other(one, [])
        rows.append(
            {
                "temperature": f"{one['temperature']:g}",
                "mode": one["mode"].replace("_", " "),
                "acceptance": f"{one['acceptance']:g}",
                "goodput": f"{goodput:,.0f}",
                "best other": best,
                "its tokens/s": f"{rates[best]:,.0f}",
                "goodput over it": f"{goodput / rates[best]:.3f}",
                "with other seeds": _again(one),
                "x target alone per GPU": f"{per_gpu(goodput / alone, one['mode']):.2f}",
                "K = 5, too": f"{per_gpu(rates['K = 5'] / alone, one['mode']):.2f}",
            }
        )
    parts = [
        Table.of(rows, num_names=3).markdown(),
        "Every round chosen (`--overlap auto`) by goodput, beside the best of all others in all modes:",
        Table.of(_chosen_rows(result["settings"]), num_names=3).markdown(),
    ]
    if result["spreads"]:
        parts += [
            f"First lengths of {', '.join(map(str, INITIAL_LENGTHS))}, {MODES[0]}, acceptance "
            f"{ACCEPTANCES[1]:g}: standard deviation of the rates over their mean."
        ]
    spreads: list[dict[str, str | int | None]] = [
        {
            "temperature": f"{one['temperature']:g}",
            "policy": one["policy"],
            "spread": f"{np.std(one['tokens_per_s']) / np.mean(one['tokens_per_s']):.3f}",
            "slowest": f"{min(one['tokens_per_s']):,.0f}",
            "fastest": f"{max(one['tokens_per_s']):,.0f}",
        }
        for one in result["spreads"]
    ]
    parts += [Table.of(spreads, num_names=2).markdown()] if spreads else []
    parts += [f"Figures of the GPU: {PUBLISHED}.", f"{result['date']}: `{result['command']}`"]
    return "\n\n".join(parts)


def _chosen_rows(settings: list[dict[str, Any]]) -> list[dict[str, str | int | None]]:
    rows: list[dict[str, str | int | None]] = []
    for chosen in (one for one in settings if one["mode"] == CHOSEN):
        mode, best, best_rate = best_other(chosen, settings)
        rate, alone = chosen["tokens_per_s"][GOODPUT], chosen["tokens_per_s"][TARGET_ONLY]
        rows.append(
            {
                "sequences": str(chosen["batch_size"]),
                "temperature": f"{chosen['temperature']:g}",
                "acceptance": f"{chosen['acceptance']:g}",
                "auto": f"{rate:,.0f}",
                "best other": f"{mode.replace('_', ' ')}, {best}",
                "its tokens/s": f"{best_rate:,.0f}",
                "auto over it": f"{rate / best_rate:.3f}",
                "with other seeds": _again(chosen),
                "x target alone per GPU": f"{per_gpu(rate / alone, CHOSEN):.2f}",
            }
        )
    return rows


def per_gpu(ratio: float, mode: str) -> float:
    """Of tokens/s over those of the target alone: a draft that is not colocated has a GPU of its own."""
    return ratio if mode == MODES[0] else ratio * PAIR["tp_size"] / (PAIR["tp_size"] + 1)


def _again(setting: dict[str, Any]) -> str:
    found = setting.get("repeated")
    return f"{found['ratio']:.3f} ± {found['standard_error']:.3f}" if found else "-"


def markdown(path: Path) -> str:
    return table(json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()

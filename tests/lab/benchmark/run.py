"""A comparison from options to result, and what specdist adds to the models' work."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import Any

from specdist.lab.benchmark.methods import Method
from specdist.lab.benchmark.peers.engines import make_environments, peer_engines
from specdist.lab.benchmark.report import summary
from specdist.lab.benchmark.run import Timed, measure
from tests.lab.benchmark.choices import nearest_first_lengths
from tests.lab.benchmark.comparing import compare_groups, compare_lengths
from tests.lab.benchmark.config import COLOCATED, ComparisonConfig
from tests.lab.benchmark.lineup import ComparedLineup, PlacedSpecdist
from tests.lab.benchmark.overhead import measure_features, measure_heads, measure_passes, measure_policies
from tests.lab.benchmark.results import ComparisonResult
from tests.lab.benchmark.setting import ComparedSetting, set_up_comparison
from tests.lab.benchmark.tables import console_report

logger = logging.getLogger(__name__)


def compare(config: ComparisonConfig, command: str) -> tuple[str, dict[str, Any]]:
    """The text and the document to print. Raises :class:`UserError`."""
    result = run_comparison(config, command)
    return f"{console_report(result)}\n\nall of it: {config.output}", summary(result)


def run_comparison(config: ComparisonConfig, command: str) -> ComparisonResult:
    """Measure everything and write ``--output``, after every repeat, so that an interrupted run loses at most
    the last one.

    Raises :class:`UserError` before anything is measured, and if the draft's own process dies.
    """
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    make_environments(config)
    setting = set_up_comparison(config)
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(setting.start_draft_rank()) if config.is_separate else None
        peers = stack.enter_context(peer_engines(config, setting))
        lineup = ComparedLineup(config, setting, rank, peers)
        groups = {
            name: [Timed(method, rows) for method in lineup.methods] for name, rows in setting.groups.items()
        }
        items = [item for found in groups.values() for item in found]
        for _ in measure(items, config.repeats, setting.device):
            methods = compare_groups(groups, setting.paged.settings)
            result = ComparisonResult(
                **setting.circumstances(config, command),
                methods=methods,
                costs=lineup.costs,
                peer_versions={peer.label: peer.version for peer in peers},
                spreads=compare_lengths(methods),
            )
            result.write(output)
    if config.overhead_repeats:
        logger.info("timing single passes, or policies and features")
        result = dataclasses.replace(result, **_overhead(config, setting, lineup.methods))
        result.write(output)
    return result


def _overhead(config: ComparisonConfig, setting: ComparedSetting, methods: list[Method]) -> dict[str, Any]:
    """Fields of the result: single passes beside transformers, or policies and features in a round."""
    paged, rows = setting.paged, setting.rows
    num_repeats, length = config.overhead_repeats, config.num_draft_tokens
    if config.policies is None:
        passes = measure_passes(
            paged,
            num_context_tokens=setting.work.longest_prompt,
            num_draft_tokens=length,
            num_passes=num_repeats,
            seed=config.seed,
        )
        return {"overhead": passes}
    shown = nearest_first_lengths(((choice.family, choice.first_length) for choice in config.choices), length)
    orders = [
        method.order
        for method in methods
        if isinstance(method, PlacedSpecdist)
        and method.placement == COLOCATED
        and shown[method.order.choice.family] == method.order.choice.first_length
    ]
    batch_sizes = sorted({order.num_slots for order in orders})
    found: dict[str, Any] = {
        "policy_overhead": measure_policies(paged, orders, rows, num_repeats),
        "feature_overhead": [
            measure_features(paged, batch_size, rows, length, num_repeats) for batch_size in batch_sizes
        ],
    }
    if paged.head is not None:
        found["head_overhead"] = [
            item
            for batch_size in batch_sizes
            for item in measure_heads(
                paged, batch_size, num_repeats, config.seed, uses_features=paged.head.uses_features
            )
        ]
    return found

"""Acceptance of the draft tokens: by position in the block, by block length, by the draft's entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, zip_longest

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from specdist.data.stats.shard import Stats
from specdist.results.report.formats import NOTHING, count, number, percent
from specdist.results.report.markup import left_out, noted, paragraph, table
from specdist.results.report.panel import Panel, label_of, names, table_by_run
from specdist.results.report.panels.traces import Share, acceptance_by_entropy, entropy_edges
from specdist.results.report.runs import ReportedRun
from specdist.results.report.style import (
    RUN_COLOURS,
    RUN_MARKERS,
    from_zero,
    legend_below,
    new_figure,
    one_plot,
    percent_axis,
    whole_numbers,
)

MAX_POSITIONS_LISTED = 12


def drafted_per_position(stats: Stats) -> np.ndarray:
    """The number of blocks with a token at each position."""
    lengths = np.array(stats.draft_length_histogram, np.int64)
    return np.cumsum(lengths[::-1])[::-1][1:]


def accepted_share_per_position(stats: Stats) -> np.ndarray:
    """The share of the tokens drafted at each position that were accepted."""
    drafted = drafted_per_position(stats)
    accepted = np.zeros(len(drafted))
    accepted[: len(stats.num_accepted_tokens_per_pos)] = stats.num_accepted_tokens_per_pos
    return accepted / drafted


def by_position(runs: Sequence[ReportedRun]) -> Panel:
    figure, axes = one_plot("position in the block", "accepted")
    for index, run in enumerate(runs):
        shares = accepted_share_per_position(run.total)
        positions = np.arange(1, len(shares) + 1)
        acceptance = run.total.verified_acceptance_rate
        colour, marker = RUN_COLOURS[index], RUN_MARKERS[index]
        axes.plot(positions, shares, marker=marker, color=colour, label=label_of(run, runs, "measured"))
        if acceptance is not None and run.is_exact:
            told = f"α to the power of the position, α = {acceptance:.3f}" if len(runs) == 1 else None
            axes.plot(positions, acceptance**positions, ":", color=colour, label=told)
    axes.set_ylim(0, 1.06)
    percent_axis(axes)
    whole_numbers(axes)
    legend_below(figure)
    totals = [
        ("drafted", lambda run: count(run.total.num_draft_tokens)),
        ("accepted", lambda run: count(run.total.num_accepted_tokens)),
        ("share accepted", lambda run: percent(run.summary["draft_acceptance_rate"])),
        ("α: acceptance rate of verified tokens", lambda run: number(run.total.verified_acceptance_rate, 3)),
    ]
    content = [table_by_run("of all draft tokens", runs, totals), _positions(runs)]
    if not all(run.is_exact for run in runs):
        content.append(paragraph("In a lossy run, tokens committed unverified count as accepted."))
    return Panel(
        name="acceptance-by-position",
        title="Acceptance by position in the block",
        help="The share of the draft tokens at each position of a block that became part of a completion. A "
        "token counts only if all before it were accepted. The dotted line is α to the power of the "
        "position: the share if every token had the same chance of acceptance, whatever its position.",
        figure=figure,
        alt="Share of accepted tokens by position in the block",
        content=content,
    )


def _positions(runs: Sequence[ReportedRun]) -> Markup:
    """Shares by position, and of how many drafted tokens."""
    columns = [
        [
            noted(percent(share), f"of {count(number)}")
            for share, number in zip(
                accepted_share_per_position(run.total), drafted_per_position(run.total), strict=True
            )
        ]
        for run in runs
    ]
    num_positions = max(map(len, columns))
    num_shown = min(num_positions, MAX_POSITIONS_LISTED)
    caption = f"The first {num_shown} of {num_positions} positions" if num_positions > num_shown else ""
    cells = islice(zip_longest(*columns, fillvalue=NOTHING), num_shown)
    rows = [[str(place), *shares] for place, shares in enumerate(cells, start=1)]
    header = ["accepted at position", *(label_of(run, runs) for run in runs)]
    return table(header, rows, caption=caption)


def lengths(runs: Sequence[ReportedRun]) -> Panel:
    figure, axes = one_plot("tokens of a block", "share of blocks")
    for index, run in enumerate(runs):
        drafted, accepted = (
            np.array(counts) / run.total.num_drafts
            for counts in (run.total.draft_length_histogram, run.total.accepted_length_histogram)
        )
        for counts, label, style in ((drafted, "drafted", ":"), (accepted, "accepted", "-")):
            axes.plot(
                counts, style, marker=RUN_MARKERS[index], color=RUN_COLOURS[index],
                label=f"{label_of(run, runs)} {label}".strip(),
            )  # fmt: skip
    from_zero(axes)
    percent_axis(axes)
    whole_numbers(axes)
    legend_below(figure)
    rows = [
        ("blocks", lambda run: count(run.total.num_drafts)),
        ("mean drafted", lambda run: number(run.total.num_block_candidates / run.total.num_drafts)),
        ("mean accepted", lambda run: number(run.total.num_accepted_tokens / run.total.num_drafts)),
        ("nothing accepted", lambda run: percent(_accepted_share(run.total, 0))),
        (
            "tokens per block, with the target's own",
            lambda run: number(run.summary["mean_acceptance_length"]),
        ),
        (
            "passes of a sequence without a block",
            lambda run: count(run.total.num_row_steps - run.total.num_drafts),
        ),
    ]
    return Panel(
        name="block-lengths",
        title="Drafted and accepted lengths",
        help="The lengths of the blocks that the draft proposed, and how many of their tokens the target "
        "accepted. Every pass also adds one token of the target's own.",
        figure=figure,
        alt="Histograms of drafted and accepted lengths",
        content=[table_by_run("per block", runs, rows)],
    )


def _accepted_share(stats: Stats, length: int) -> float:
    counts = stats.accepted_length_histogram
    return (counts[length] if length < len(counts) else 0) / stats.num_drafts


def by_entropy(runs: Sequence[ReportedRun]) -> Panel:
    traces = {run.label: run.trace for run in runs if run.trace is not None and run.trace.num_verified}
    edges = entropy_edges(list(traces.values()))
    shares = {label: acceptance_by_entropy(trace, edges) for label, trace in traces.items()}
    content = [_entropies(shares)] if shares else []
    for label, trace in traces.items():
        if trace.num_shards_read < trace.num_shards:
            content.append(
                paragraph(
                    f"{label}: {trace.num_tokens:,} tokens, the traces of {trace.num_shards_read} of "
                    f"{trace.num_shards} shards, spread over the run."
                )
            )
    if len(traces) < len(runs):
        untraced = names([run for run in runs if run.label not in traces])
        which = "This run has" if len(runs) == 1 else f"{untraced}:"
        how = "Generate with --trace to see how acceptance depends on the draft's entropy."
        content.append(left_out(f"{which} no trace. {how}"))
    return Panel(
        name="acceptance-by-entropy",
        title="Acceptance by the draft's entropy",
        help="How uncertain the draft was about a token (0 nats: certain), and how often the target then "
        "accepted it. Error bars are 95% intervals. The steeper the fall, the more a policy gains that stops "
        "at high entropy, such as svip.",
        figure=_entropy_figure(shares) if shares else None,
        alt="Share of accepted tokens by entropy of the draft",
        content=content,
    )


def _entropy_figure(shares_by_run: Mapping[str, Sequence[Share]]) -> Figure:
    figure = new_figure(4.0)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.2])
    for index, (label, all_shares) in enumerate(shares_by_run.items()):
        shares = [share for share in all_shares if share.num_tokens]
        middles = np.array([(share.low + share.high) / 2 for share in shares])
        values = np.array([share.value for share in shares])
        bounds = np.array([share.bounds for share in shares]).T
        num_all = sum(share.num_tokens for share in shares)
        amounts = [share.num_tokens / num_all for share in shares]
        colour, marker = RUN_COLOURS[index], RUN_MARKERS[index]
        above.errorbar(
            middles, values, np.abs(bounds - values), marker=marker, color=colour, label=label, capsize=3,
            elinewidth=1.2,
        )  # fmt: skip
        below.plot(middles, amounts, marker=marker, color=colour)
    above.set_ylabel("accepted")
    below.set_ylabel("tokens")
    below.set_xlabel("entropy of the draft, nats")
    above.set_ylim(0, 1.04)
    from_zero(below)
    for axes in (above, below):
        percent_axis(axes)
    if len(shares_by_run) > 1:
        legend_below(figure)
    return figure


def _entropies(shares_by_run: Mapping[str, Sequence[Share]]) -> Markup:
    """Shares by entropy, and of how many verified tokens."""
    [first, *_] = shares_by_run.values()
    intervals = [f"{share.low:.2f} to {share.high:.2f}" for share in first[:-1]]
    intervals.append(f"{first[-1].low:.2f} and more")
    columns = [
        [noted(percent(share.value), f"of {count(share.num_tokens)}") if share.num_tokens else NOTHING
         for share in shares]
        for shares in shares_by_run.values()
    ]  # fmt: skip
    header = ["entropy, nats", *(f"{label}, accepted" for label in shares_by_run)]
    return table(header, zip(intervals, *columns, strict=True))

"""A plan as text: tables, and the reason for the recommendation."""

from __future__ import annotations

from collections.abc import Sequence

from specdist.lab.plan.advise import WORTHWHILE, Plan, Work
from specdist.lab.plan.filling import Site
from specdist.lab.plan.model.hardware import GIB, MIB
from specdist.lab.plan.model.memory import Fit
from specdist.lab.plan.model.simulate import Mode
from specdist.models.files.sizes import ModelSize
from specdist.utils.table import Table

NAMES: dict[Mode, str] = {
    "target only": "target only",
    "colocated": "draft on rank 0",
    "in turns": "draft GPU, in turns",
    "ahead": "draft GPU, ahead",
    "branches": "draft GPU, branches",
}


def memory_table(fits: Sequence[tuple[Mode, int, Fit]], work: Work) -> str:
    """The memory of every GPU in GiB, and how many sequences of the full length fit."""
    rows: list[dict[str, str | int | None]] = []
    for mode, tp_size, fit in fits:
        for role, share in (("target", fit.target), ("draft", fit.draft)):
            if share is None:
                continue
            first = role == "target"
            rows.append(
                {
                    "mode": NAMES[mode].removesuffix(", ahead") if first else "",
                    "tp": tp_size if first else "",
                    "GPU of": "both" if mode == "colocated" else role,
                    "weights": _gib(share.weight_bytes),
                    "reserved": _gib(share.reserved_bytes),
                    "usable": _gib(share.usable_bytes),
                    "cache per sequence": _gib(
                        share.cache_bytes_per_row + share.branch_bytes_per_row, digits=4
                    ),
                    "max sequences": share.most_rows,
                    "": ("fits" if fit.most_rows else "does not fit") if first else "",
                }
            )
    table = Table.of(rows, num_names=2)
    return f"GiB per GPU, for sequences of {work.row_tokens} tokens:\n{table.console()}"


def plan_table(plans: Sequence[Plan], chosen: Plan | None) -> str:
    """One line per plan; the recommended one is marked."""
    has_states = any(plan.prediction.state_bytes_per_round for plan in plans)
    rows: list[dict[str, str | int | None]] = [
        {
            "": "=>" if plan is chosen else "",
            "mode": NAMES[plan.settings.mode],
            "tp": plan.tp_size,
            "GPUs": plan.num_gpus,
            "replicas": plan.num_replicas,
            "batch": plan.settings.num_rows,
            "K": plan.settings.num_draft_tokens or None,
            "tokens/s": f"{plan.tokens_per_s:,.0f}",
            "per GPU": f"{plan.tokens_per_s_per_gpu:,.0f}",
            "hours": f"{plan.hours:.3g}",
            "tokens/round": f"{found.tokens_per_round:.2f}",
            "round ms": f"{found.round_s * 1e3:.1f}",
            "target busy": f"{found.target_share:.0%}",
            "draft busy": f"{found.draft_share:.0%}" if found.draft_share else None,
            **({"states MiB/round": _mib(found.state_bytes_per_round)} if has_states else {}),
        }
        for plan in plans
        for found in [plan.prediction]
    ]
    return Table.of(rows, num_names=2).console()


def reason(plans: Sequence[Plan], chosen: Plan, target: ModelSize, site: Site) -> str:
    """Why this plan, in sentences."""
    gpu, width = site.gpu, target.bytes_per_number
    free_tokens = gpu.sustained_flops_per_s(width) * width / (2 * gpu.sustained_bytes_per_s)
    limit = (
        f"A target pass takes the time of reading the weights for up to about {free_tokens:.0f} tokens; "
        "beyond that, its time grows with the number of tokens"
    )
    plain = next((plan for plan in plans if plan.settings.mode == "target only"), None)
    others = [plan for plan in plans if plan.settings.mode != "target only"]
    if plain is not None and chosen is plain:
        if not others:
            return f"Target only: there is no draft, or none fits. {limit}."
        best = max(others, key=lambda plan: plan.tokens_per_s)
        return (
            f"Do not speculate: plain decoding with {plain.settings.num_rows} sequences gives "
            f"{plain.tokens_per_s:,.0f} tokens/s, and the best speculative setting gives "
            f"{best.tokens_per_s / plain.tokens_per_s:.2f} times that ({NAMES[best.settings.mode]}; "
            f"worthwhile from {WORTHWHILE:g} on). {limit}."
        )
    name = NAMES[chosen.settings.mode]
    sentences = [f"{name[0].upper()}{name[1:]} with {_setting(chosen)}"]
    if plain is None:
        sentences.append("plain decoding does not fit")
    else:
        sentences.append(
            f"{chosen.tokens_per_s / plain.tokens_per_s:.2f} times the tokens/s of plain decoding on the "
            f"same nodes ({chosen.tokens_per_s_per_gpu / plain.tokens_per_s_per_gpu:.2f} times per GPU used)"
        )
    text = ": ".join(sentences) + f". {limit}; its passes have {chosen.prediction.tokens_per_pass:.0f}."
    if chosen.settings.mode == "branches":
        text += (
            f" It takes {chosen.settings.num_branches} branches per sequence that catch "
            f"{chosen.settings.caught:.0%} of the misses, an assumption (--caught)."
        )
    better = [plan for plan in plans if plan.tokens_per_s_per_gpu > WORTHWHILE * chosen.tokens_per_s_per_gpu]
    if better:
        most = max(better, key=lambda plan: plan.tokens_per_s_per_gpu)
        text += (
            f" Per GPU, {NAMES[most.settings.mode]} with {_setting(most)} gives more "
            f"({most.tokens_per_s_per_gpu:,.0f} tokens/s on {most.num_gpus}): choose it if other jobs can "
            "use the remaining GPUs."
        )
    return text


def _setting(plan: Plan) -> str:
    length = plan.settings.num_draft_tokens
    drafts = f" and {length} draft tokens" if length else ""
    return f"tp_size {plan.tp_size}, {plan.settings.num_rows} sequences{drafts}"


def _mib(num_bytes: float) -> str | None:
    return f"{num_bytes / MIB:.2f}" if num_bytes else None


def _gib(num_bytes: int, digits: int = 1) -> str:
    return f"{num_bytes / GIB:.{digits}f}"

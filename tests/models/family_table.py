"""The tables of families in the manuals, of what ``family_runs`` has found last."""

from __future__ import annotations

import json
import re
from collections import Counter

from tests.models.family_runs import EXACT, REFUSED, STORED, UNPREPARED

# Of an error's message.
MOST_CHARACTERS = 100

# Those that most people run.
MAIN_FAMILIES = {
    "Llama 2, 3": "llama",
    "Qwen2, 2.5": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3, mixtures": "qwen3_moe",
    "Qwen3.5": "qwen3_5_text",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Gemma 3": "gemma3_text",
    "Phi-3, Phi-4": "phi3",
    "gpt-oss": "gpt_oss",
    "DeepSeek V3, R1": "deepseek_v3",
    "GLM-4.5, mixtures": "glm4_moe",
}

# What a refusal's message has, and in how many words the table says it.
REASONS = {
    r"takes no positions": "takes no positions of its tokens",
    r"attention registry": "attention outside of transformers' registry",
    r"has layers \((.*?)\)": "layers of other kinds",
    r"not implement \((.*?)\)": "attention with {}",
    r"counts the positions": "takes no positions of its tokens",
    r"has an encoder": "an encoder beside the decoder",
    r"nothing in \w+ takes": "weights that its text model does not take",
    r"not a stack of layers": "not a stack of layers",
    r"not a causal language model": "not a causal language model",
    r"split or joined": "a mixture stored by expert",
    r"cannot be cut over": "no cut fits",
    r"key/value heads": "too few key/value heads",
}


def markdown() -> str:
    """Families with the same outcomes share a row."""
    found = json.loads(STORED.read_text(encoding="utf-8"))
    by_family: dict[str, list[str]] = {}
    for one in found["outcomes"]:
        by_family.setdefault(one["family"], []).append(outcome_words(one["kind"], one["detail"]))
    rows: dict[tuple[str, ...], list[str]] = {}
    for family, outcomes in by_family.items():
        rows.setdefault(tuple(outcomes), []).append(family)
    totals = [Counter(one["kind"] for one in found["outcomes"] if one["tp_size"] == size) for size in (1, 2)]
    lines = [
        f"transformers {found['transformers']}, DeepSpeed {found['deepspeed']}, torch {found['torch']}, "
        f"{found['date']}, `{found['command']}`, {found['minutes']} minutes on {found['device']}:",
        "",
        "| `--tp_size 1` | `--tp_size 2` | number | families |",
        "|---|---|---|---|",
    ]
    for outcomes, families in sorted(rows.items(), key=lambda row: (row[0] != (EXACT, EXACT), -len(row[1]))):
        lines.append(f"| {' | '.join(outcomes)} | {len(families)} | {', '.join(families)} |")
    counts = [", ".join(f"{number} {kind}" for kind, number in each.most_common()) for each in totals]
    lines += ["", f"In all {len(by_family)}: on one rank {counts[0]}; on two {counts[1]}."]
    return "\n".join(lines)


def main_families() -> str:
    """The outcomes of :data:`MAIN_FAMILIES`."""
    outcomes = {
        (one["family"], one["tp_size"]): outcome_words(one["kind"], one["detail"])
        for one in json.loads(STORED.read_text(encoding="utf-8"))["outcomes"]
    }
    rows = [
        f"| {models} | `{family}` | {outcomes[family, 1]} | {outcomes[family, 2]} |"
        for models, family in MAIN_FAMILIES.items()
    ]
    head = ["| models | family | `--tp_size 1` | `--tp_size 2` |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def outcome_words(kind: str, detail: str) -> str:
    """``exact``, or what is said instead in few words."""
    if kind == EXACT:
        return EXACT
    if detail.startswith(UNPREPARED):
        return "not tried: no small model of it was made that generates"
    if kind != REFUSED:
        return f"{kind}: {detail[:MOST_CHARACTERS]}"
    for pattern, words in REASONS.items():
        match = re.search(pattern, detail)
        if match is not None:
            return f"refused: {words.format(*match.groups())}"
    return f"refused: {detail}"

"""Draws a case by its seed. Caches are small, so that preemption is common, and rows share pages."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.random_runs.case import Case, Row

FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gpt_neox", "gpt2", "phi", "gemma", "qwen2", "gpt_neo",
    "qwen3_5_text", "lfm2", "falcon_h1",
)  # fmt: skip
POLICIES = (
    "fixed", "hf_heuristic", "confidence", "draft_verify", "svip", "adaedl", "gammatune", "gammatune_plus",
    "specdecpp", "sprinter", "goodput",
)  # fmt: skip
GRAMMARS = (
    "((ab|d)c?){3,9}", "[abcd]{2,30}", "(ddd[abc]|ab|[bc]d){1,9}a", "(ab|d)c?(ddd[abc]|ab)d?",
    "d{16}(ab|d)c?", "(a|b|dddc)", "abcabcabcabc[abd]*",
)  # fmt: skip
SHARE_OF_FAMILIES = 0.15


def case_of(name: str) -> Case:
    """The case of a name such as ``3:17`` or, on real ranks, ``3:17:ranks``."""
    seed, number, *placement = name.split(":")
    return draw(f"{seed}:{number}", placement=placement[0] if placement else None)


def draw(seed: str, *, placement: str | None = None) -> Case:
    """The case of this seed; ``placement``: there."""
    rng = random.Random(f"{seed} {placement}")
    is_family = placement is None and rng.random() < SHARE_OF_FAMILIES
    model = rng.choice(FAMILIES) if is_family else rng.choice(["markov"] * 4 + ["repetitive"])
    draft = rng.choice(["noisy"] * 9 + ["same", "ngram", "ngram", "none"])
    is_crowded = rng.random() < 0.6
    values: dict[str, Any] = {
        "model": model,
        "model_seed": rng.randrange(2 if is_family else 100),
        "spread": rng.choice([0.5, 1.0, 1.0, 2.0]),
        "difference": rng.choice([0.3, 1.0, 2.0, 4.0]),
        "draft": draft,
        "seed": rng.randrange(1000),
        "cap": rng.randint(1, 3 if is_crowded else 6),
        "threshold": rng.choice([0.1, 0.2, 0.4, 0.6]),
        "policy": rng.choice(POLICIES) if draft in ("noisy", "same") else "fixed",
        "is_traced": rng.random() < 0.1,
    }
    values["trusts_draft"] = values["policy"] == "sprinter" and draft == "same" and rng.random() < 0.5
    values |= _placement(rng, placement, model, draft)
    values |= _acceptance(rng, is_family)
    values |= _overlap(rng, values)
    values |= _processing(rng, values, is_family)
    values |= _rows(rng, values, is_family)
    values |= _crowd(rng, values) if is_crowded else _sizes(rng, values)
    return Case(**values)


def _placement(rng: random.Random, placement: str | None, model: str, draft: str) -> dict[str, Any]:
    if placement == "ranks":
        has_model = draft in ("noisy", "same")
        tp_size = rng.choice([1, 2]) if has_model else 2
        return {
            "placement": "ranks",
            "tp_size": tp_size,
            "has_draft_rank": has_model and (tp_size == 1 or rng.random() < 0.8),
        }
    is_sliced = model in ("markov", "repetitive") and rng.random() < 0.15
    return {"placement": "threads"} if is_sliced else {}


def _acceptance(rng: random.Random, is_family: bool) -> dict[str, Any]:
    kind = rng.choice(["greedy", "greedy", "gumbel", "gumbel", "rejection", "rejection"])
    if kind == "greedy":
        # Without noise, most of a transformer's cases say something at once.
        return {"acceptance": rng.choice(["gumbel", "rejection"]), "temperature": 0.0}
    default: dict[str, float] = {}
    if rng.random() < 0.3:
        default["top_k"] = rng.randint(2, 6)
    if rng.random() < 0.3:
        default["top_p"] = round(rng.uniform(0.6, 0.98), 2)
    return {
        "acceptance": "gumbel" if is_family else kind,
        "temperature": round(rng.uniform(0.5, 1.6), 2),
        "default": default,
    }


def _overlap(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """``synchronous``, ``asynchronous``, or ``auto`` by a script or by costs."""
    if values["draft"] not in ("noisy", "same"):
        return {}
    most = values["cap"] + 1
    kind = rng.choice(["synchronous", "asynchronous", "asynchronous", "auto", "auto"])
    if kind == "synchronous":
        return {}
    found: dict[str, Any] = {
        "num_ahead_tokens": rng.randint(1, most),
        "num_branches": rng.choice([0, 1, 2, 3]),
    }
    if kind == "auto" and rng.random() < 0.3:
        return {**found, "num_ahead_tokens": most, "has_chooser": True}
    if kind == "auto":
        found["shapes"] = tuple(
            _shape(rng, found["num_ahead_tokens"], found["num_branches"]) for _ in range(rng.randint(1, 8))
        )
    return found


def _shape(rng: random.Random, most_ahead: int, most_branches: int) -> tuple[int, int, int, int]:
    alone = rng.choice([0, 0, 1, 2, 4, 60])
    kind = rng.choice(["synchronous", "asynchronous", "listen", "alone"])
    if kind == "synchronous":
        return (1, 0, 0, alone)
    if kind == "asynchronous":
        return (0, rng.randint(1, most_ahead), rng.randint(0, most_branches), alone)
    return (0, 1, 0, 0) if kind == "listen" else (0, 0, 0, alone)


def _processing(rng: random.Random, values: dict[str, Any], is_family: bool) -> dict[str, Any]:
    end = 1 if is_family else 0
    found: dict[str, Any] = {"eos": (end,) if rng.random() < 0.4 else ()}
    if rng.random() < 0.3:
        found["num_logprobs"] = rng.choice([0, 2, 5])
    if rng.random() < 0.15:
        found["num_prompt_logprobs"] = rng.choice([0, 3])
    kind = rng.choice(["none"] * 5 + ["words"] * 3 + ["regex"] * 2)
    if kind == "regex" and not is_family:
        forced = {"forced_room": rng.randint(1, 6)} if rng.random() < 0.6 else {}
        return {**found, **forced, "eos": (end,), "regex": rng.choice(GRAMMARS)}
    if kind == "words":
        most = 90 if is_family else 6
        first, second, third = rng.sample(range(1, most + 1), 3)
        words = {
            "logit_bias": ((first, round(rng.uniform(-2, 2), 1)),),
            "bad_words": ((first, second), (second, second, third)),
            "suppressed_ids": (third,),
            "min_new_tokens": rng.randint(2, 9),
        }
        found |= {name: value for name, value in words.items() if rng.random() < 0.5}
        penalties = _penalties(rng)
        found["default"] = {**values.get("default", {}), **penalties}
    return found


def _penalties(rng: random.Random) -> dict[str, float]:
    all_of_them = {
        "repetition_penalty": rng.choice([0.7, 1.3, 1.8]),
        "presence_penalty": round(rng.uniform(-0.5, 0.8), 2),
        "frequency_penalty": round(rng.uniform(-0.3, 0.6), 2),
        "min_p": round(rng.uniform(0.01, 0.2), 2),
    }
    return {name: value for name, value in all_of_them.items() if rng.random() < 0.4}


def _rows(rng: random.Random, values: dict[str, Any], is_family: bool) -> dict[str, Any]:
    vocab = 96 if is_family else 7
    num_rows = rng.randint(2, 4 if is_family else 7)
    # Full pages of four tokens, and parts of one.
    prefix = [rng.randrange(vocab) for _ in range(rng.choice([0, 3, 4, 8, 9]))]
    prompts: list[tuple[int, ...]] = []
    for _ in range(num_rows):
        if prompts and rng.random() < 0.25:
            # The same again, or as far as a page goes.
            same = rng.choice(prompts)
            prompts.append(same if rng.random() < 0.5 else same[: max(1, len(same) // 4 * 4)])
            continue
        own = [rng.randrange(vocab) for _ in range(rng.randint(1, 24 if is_family else 12))]
        prompts.append(tuple(prefix + own if rng.random() < 0.6 else own))
    has_own = rng.random() < 0.4
    rows = [_row(rng, prompt, values, is_family, has_own=has_own) for prompt in prompts]
    found: dict[str, Any] = {
        "rows": tuple(rows),
        "num_samples": rng.choice([1, 1, 1, 2, 3]),
        "max_new_tokens": rng.randint(3, 16 if is_family else 24),
    }
    if rng.random() < 0.2:
        found["stop"] = tuple(_strings(rng, is_family))
    return found


def _row(
    rng: random.Random, prompt: tuple[int, ...], values: dict[str, Any], is_family: bool, *, has_own: bool
) -> Row:
    own: dict[str, Any] = {}
    if has_own:
        if rng.random() < 0.4:
            own["max_new_tokens"] = rng.randint(1, 20)
        if rng.random() < 0.3:
            own["seed"] = rng.randrange(1000)
        if rng.random() < 0.3:
            own["stop"] = tuple(_strings(rng, is_family)) if rng.random() < 0.7 else ()
        if rng.random() < 0.3:
            greedy = values["temperature"] == 0 or rng.random() < 0.3
            temperature = 0.0 if greedy else round(rng.uniform(0.5, 1.6), 2)
            own["options"] = {"temperature": temperature, **_penalties(rng)}
            if rng.random() < 0.3:
                own["options"]["top_k"] = rng.randint(2, 6)
        if values.get("regex") is not None and rng.random() < 0.4:
            own["regex"] = rng.choice(["", *GRAMMARS])
    return Row(prompt=prompt, **own)


def _strings(rng: random.Random, is_family: bool) -> list[str]:
    """Of letters of the tokens' texts."""
    if is_family:
        return ["".join(chr(ord("A") + rng.randrange(96)) for _ in range(rng.choice([1, 1, 2])))]
    if rng.random() < 0.15:
        return [rng.choice(["<end>", "a<end>", "<end><end>"])]
    return ["".join(rng.choice("abcd") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 2))]


def _crowd(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Sequences that grow together until the pages run out. A short prompt is admitted beside others."""
    rows = tuple(replace(row, prompt=row.prompt[: rng.randint(2, 9)]) for row in values["rows"])
    return {
        "rows": rows,
        "max_new_tokens": rng.randint(12, 30),
        "num_samples": rng.choice([1, 2, 3]),
        "num_ahead_tokens": min(2, values.get("num_ahead_tokens", 0)),
        "shapes": tuple((now, min(2, ahead), *rest) for now, ahead, *rest in values.get("shapes", ())),
        "forced_room": min(2, values.get("forced_room", 0)),
        "max_num_seqs": rng.choice([3, 4, 8, 20]),
        "spare_pages": rng.choice([2, 4, 6, 8, 10, 14]),
        "room": rng.choice([3, 8, 20, 100]),
    }


def _sizes(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    longest = max(len(row.prompt) for row in values["rows"])
    return {
        "max_seq_len": longest + rng.choice([2, 6, 30, 30]),
        "max_num_seqs": rng.choice([1, 2, 3, 4, 8, 20]),
        "spare_pages": rng.choice([0, 0, 1, 2, 3, 5, 8, 100]),
        "room": rng.choice([0, 1, 3, 8, 20, 100]),
    }

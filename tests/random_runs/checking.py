"""Compares a run with the target alone, and its counts with one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from specdist.engine.request import Completion
from specdist.sampling.constraints.constraint import Constraint
from tests.random_runs.case import Case, Row
from tests.random_runs.models import decode_of, pair_of, special_ids_of
from tests.random_runs.oracle import (
    Rules,
    choices,
    end_of,
    logits_of,
    probabilities_of,
    scores_of,
    softmax,
    waiting_times,
)
from tests.random_runs.running import Run

# Of scores: the engine's are float32, and a transformer's pass adds up in another order than a plain one
# (largest difference of logits seen: 4e-6).
SLACK_OF_TABLES, SLACK_OF_MODELS = 1e-5, 2e-4


@dataclass
class Found:
    """What a check has found.

    Attributes:
        wrong: what is wrong, in words.
        places: of tokens that are drawn under ``rejection``, where each lies in its distribution, in [0, 1):
            uniform if the distribution is followed. The tokens that the draft favours come first.
        is_broken: the run itself has not come to its end.
    """

    wrong: list[str] = field(default_factory=list)
    places: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    is_broken: bool = False


def check(case: Case, run: Run) -> Found:
    """Everything that has to hold of a run of this case."""
    found = Found()
    expected = [(index, sample) for index in range(len(case.rows)) for sample in range(case.num_samples)]
    keys = [(c.request.row_id, c.request.sample_index) for c in run.completions]
    if keys != expected:
        found.wrong.append(f"completions of {keys} instead of {expected}")
        return found
    for completion in run.completions:
        name = f"row {completion.request.row_id}, sample {completion.request.sample_index}"
        found.wrong += [f"{name}: {wrong}" for wrong in check_completion(case, completion, found.places)]
    found.wrong += _check_counts(run, repeats=bool(run.stats.num_preemptions))
    return found


def same_tokens(one: Run, other: Run) -> list[str]:
    """Under rejection, where no token depends on the batch."""
    return [
        f"row {a.request.row_id}, sample {a.request.sample_index}: {a.token_ids}, alone {b.token_ids}"
        for a, b in zip(one.completions, other.completions, strict=True)
        if a.token_ids != b.token_ids
    ]


def roomy(case: Case) -> Case:
    """The same in one process, one sequence at a time, without a preemption, a chunk or a neighbour."""
    one = replace(case, placement="local", tp_size=1, has_draft_rank=False)
    return replace(one, max_num_seqs=1, spare_pages=1000, room=1000)


def is_independent(case: Case) -> bool:
    """Whether a seed fixes its tokens under rejection: block lengths depend on each row alone, or on none."""
    depends = case.policy in ("goodput", "draft_verify") and not case.num_ahead_tokens
    return case.is_rejection and not (depends or case.shapes or case.has_chooser)


def check_completion(case: Case, completion: Completion, places: list[float]) -> Iterator[str]:
    """What is wrong with it. To ``places`` are added those of its drawn tokens, see :class:`Found`."""
    row, request, tokens = case.rows[completion.request.row_id], completion.request, completion.token_ids
    if completion.error is not None:
        yield f"error {completion.error!r}"
        return
    target, draft = pair_of(case)
    size, all_ids = len(row.prompt), [*row.prompt, *tokens]
    logits_LV = logits_of(target, all_ids)
    rules = rules_of(case, row)
    slack = SLACK_OF_TABLES if case.is_markov else SLACK_OF_MODELS
    seed = case.seed if row.seed is None else row.seed
    draft_LV = logits_of(draft, all_ids) if case.is_rejection else None
    rng = np.random.default_rng([case.seed, request.row_id, request.sample_index])
    processed = []
    for position in range(size, len(all_ids)):
        token_id, before = all_ids[position], all_ids[:position]
        try:
            scores_V = scores_of(logits_LV[position - 1], before, rules)
        except AssertionError:
            yield f"token {position - size} of {tokens} follows a text that its constraint does not allow"
            return
        if rules.is_greedy or case.acceptance == "gumbel":
            waiting_V = waiting_times(seed, request.row_id, request.sample_index, position, len(scores_V))
            expected = choices(scores_V, rules.options, waiting_V, slack)
            if token_id not in expected:
                yield f"token {position - size} of {tokens} is not {sorted(expected)}"
                return
        elif probabilities_of(scores_V, rules.options, slack)[token_id] <= 0:
            yield f"token {position - size} of {tokens} has no probability"
            return
        elif draft_LV is not None:
            drafted_V = scores_of(draft_LV[position - 1], before, rules)
            found_V, other_V = (probabilities_of(each, rules.options) for each in (scores_V, drafted_V))
            places += place_of(found_V, other_V, token_id, rng)
        processed.append(_logprob(scores_V, rules, token_id))
    strings = case.stop if row.stop is None else row.stop
    expected_end = end_of(
        tokens,
        partial(decode_of, case),
        special_ids=special_ids_of(case),
        end_ids=case.eos,
        strings=strings,
        room=case.longest_of(row) - size,
    )
    ended = (len(tokens), completion.finish_reason, completion.text)
    if ended != expected_end:
        yield f"{tokens} ends as {ended}, not as {expected_end}"
    yield from _check_logprobs(case, completion, logits_LV, processed, slack)
    blocks = len(tokens) - completion.num_accepted_draft_tokens
    if not completion.num_spec_steps <= blocks or blocks < 1:
        yield f"{len(tokens)} tokens in {completion.num_spec_steps} drafts and {blocks} blocks"
    if not completion.num_accepted_draft_tokens <= completion.num_draft_tokens:
        yield f"{completion.num_accepted_draft_tokens} of {completion.num_draft_tokens} tokens accepted"


def rules_of(case: Case, row: Row) -> Rules:
    regex = case.regex_of(row)
    return Rules(
        options=case.options_of(row),
        num_prompt_tokens=len(row.prompt),
        grammar=Constraint("regex", regex).grammar if regex else None,
        logit_bias=case.logit_bias,
        bad_words=case.bad_words,
        suppressed_ids=case.suppressed_ids,
        min_new_tokens=case.min_new_tokens,
        end_ids=case.eos,
    )


def place_of(
    found_V: np.ndarray, other_V: np.ndarray, token_id: int, rng: np.random.Generator
) -> list[float]:
    """The token's place in the distribution ``found_V``, after the tokens that ``other_V`` favours more.
    Nothing of a token that is certain."""
    if found_V[token_id] > 1 - 1e-6:
        return []
    order = np.argsort(found_V - other_V, kind="stable")
    place = int(np.flatnonzero(order == token_id)[0])
    below = found_V[order[:place]].sum()
    return [float(below + rng.random() * found_V[token_id])]


def _logprob(scores_V: np.ndarray, rules: Rules, token_id: int) -> float:
    found_V = softmax(scores_V) if rules.is_greedy else probabilities_of(scores_V, rules.options)
    with np.errstate(divide="ignore"):
        return float(np.log(found_V[token_id]))


def _check_logprobs(
    case: Case, completion: Completion, logits_LV: np.ndarray, processed: list[float], slack: float
) -> Iterator[str]:
    size, tokens = len(completion.request.prompt_ids), completion.token_ids
    logprobs_LV = np.log(np.array([softmax(logits_V) for logits_V in logits_LV]))
    own = completion.logprobs
    if (own is None) != (case.num_logprobs is None):
        yield "log-probabilities are missing, or not wanted"
    elif own is not None:
        rows = logprobs_LV[size - 1 : -1]
        yield from _compare("raw log-probabilities", own.raw, _at(rows, tokens), slack)
        yield from _compare("processed log-probabilities", own.processed, processed, slack)
        yield from _compare_top(rows, own.top_ids, own.top_raw, case.num_logprobs or 0, slack)
    prompt = completion.prompt_logprobs
    if (prompt is None) != (case.num_prompt_logprobs is None):
        yield "the prompt's log-probabilities are missing, or not wanted"
    elif prompt is not None:
        rows, wanted = logprobs_LV[: size - 1], completion.request.prompt_ids[1:]
        if prompt.raw[0] is not None or prompt.top_ids[0] is not None:
            yield "the first token of a prompt has no log-probability"
        raw = [each for each in prompt.raw[1:] if each is not None]
        ids = [each for each in prompt.top_ids[1:] if each is not None]
        tops = [each for each in prompt.top_raw[1:] if each is not None]
        yield from _compare("the prompt's log-probabilities", raw, _at(rows, wanted), slack)
        yield from _compare_top(rows, ids, tops, case.num_prompt_logprobs or 0, slack)


def _at(rows: np.ndarray, token_ids: Sequence[int]) -> list[float]:
    return [float(row[token_id]) for row, token_id in zip(rows, token_ids, strict=True)]


def _compare(name: str, found: Sequence[float], expected: Sequence[float], slack: float) -> Iterator[str]:
    if len(found) != len(expected):
        yield f"{len(found)} {name}, not {len(expected)}"
    elif len(found) and not np.allclose(found, expected, rtol=1e-4, atol=slack):
        worst = int(np.abs(np.array(found) - expected).argmax())
        yield f"{name} [{worst}] is {found[worst]:.6f}, not {expected[worst]:.6f}"


def _compare_top(
    rows: np.ndarray, ids: Sequence[list[int]], tops: Sequence[list[float]], num_top: int, slack: float
) -> Iterator[str]:
    if not len(rows) == len(ids) == len(tops):
        yield f"likeliest tokens of {len(ids)} places, not of {len(rows)}"
        return
    for place, (row, own_ids, own) in enumerate(zip(rows, ids, tops, strict=True)):
        best = np.sort(row)[::-1][:num_top]
        yield from _compare(f"likeliest tokens' log-probabilities at {place}", own, best.tolist(), slack)
        yield from _compare(f"likeliest tokens at {place}", own, row[own_ids].tolist(), slack)


def _check_counts(run: Run, *, repeats: bool) -> Iterator[str]:
    stats, completions = run.stats, run.completions
    sums = {
        "num_completion_tokens": sum(len(c.token_ids) for c in completions),
        "num_prompt_tokens": sum(len(c.request.prompt_ids) for c in completions),
        "num_completions": len(completions),
        "num_error_rows": 0,
    }
    # What a preemption or a lost link takes back has been counted.
    counted = {
        "num_draft_tokens": sum(c.num_draft_tokens for c in completions),
        "num_accepted_tokens": sum(c.num_accepted_draft_tokens for c in completions),
        "num_drafts": sum(c.num_spec_steps for c in completions),
    }
    for name, expected in (sums if repeats else sums | counted).items():
        if getattr(stats, name) != expected:
            yield f"{name} is {getattr(stats, name)}, not {expected}"
    for name, least in counted.items():
        if getattr(stats, name) < least:
            yield f"{name} is {getattr(stats, name)}, less than the completions' {least}"
    for less, more in (
        ("num_accepted_tokens", "num_draft_tokens"),
        ("num_drafts", "num_draft_tokens"),
        ("num_drafts", "num_row_steps"),
        ("num_ahead_hits", "num_ahead_verified"),
        ("num_ahead_verified", "num_ahead_chains"),
    ):
        if not 0 <= getattr(stats, less) <= getattr(stats, more):
            yield f"{less} is {getattr(stats, less)}, {more} {getattr(stats, more)}"

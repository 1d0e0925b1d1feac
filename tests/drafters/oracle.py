"""What a perfect choice between a draft model and memory would give, and a perfect memory: bounds at T = 0.

    python -m tests.drafters.oracle --target LARGE --draft SMALL --prompts FILE ... --output FILE.json

The target's greedy completions are fixed, so what each source gets accepted at each place is too: the draft
as many tokens as it agrees, memory as far as its proposal is the text. The fewest passes are then found by
going back from the end. No engine decides here, so nothing depends on estimates.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdist import load_run
from specdist.cli.generate import main as generate
from specdist.config.speculation import MEMORY_CHANCE
from specdist.drafters.ngram_index import NgramIndex

# Of a block from memory, by default.
MOST = 64


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--num_draft_tokens", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype=torch.float32).eval()
    runs = [bounds(options, prompts, draft) for prompts in options.prompts]
    command = shlex.join(["python", "-m", "tests.drafters.oracle", *given])
    options.output.write_text(json.dumps({"command": command, "runs": runs}, indent=1) + "\n")
    return 0


def bounds(options: argparse.Namespace, prompts: str, draft: Any) -> dict[str, Any]:
    """Tokens per target pass of one set of prompts, each source alone and the best of several."""
    texts = greedy_texts(options, prompts)
    num_draft_tokens, passes, num_tokens = options.num_draft_tokens, dict[str, int](), 0
    shares = np.zeros(2)
    for prompt_ids, completion_ids in texts:
        tokens = np.r_[prompt_ids, completion_ids].astype(np.int64)
        first = len(prompt_ids) + 1  # the prompt's own pass gives the first token
        num_tokens += len(tokens) - first
        agreed_N = agreements(draft, tokens)
        model = capped_runs(agreed_N, num_draft_tokens)
        index = proposed(tokens, len(prompt_ids))
        places = best_places(tokens, first)
        sources = {
            "draft": model,
            "memory": index,
            "draft or memory": np.maximum(model, index),
            "any place": places,
            "draft or any place": np.maximum(model, places),
            "draft, then any place": continued(model, places, num_draft_tokens),
        }
        for name, accepted_N in sources.items():
            passes[name] = passes.get(name, 0) + fewest_passes(accepted_N, first, len(tokens))
        inside = np.arange(first, len(tokens))
        shares += [(index[inside] > model[inside]).sum(), (places[inside] > model[inside]).sum()]
    return {
        "prompts": Path(prompts).stem,
        "num_tokens": num_tokens,
        "tokens_per_pass": {name: round(num_tokens / count, 3) for name, count in passes.items()},
        "share_memory_is_better": round(shares[0] / num_tokens, 4),
        "share_any_place_is_better": round(shares[1] / num_tokens, 4),
    }


def greedy_texts(options: argparse.Namespace, prompts: str) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion of every row, as the target alone writes them."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        errors = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        words = [
            "--target", options.target, "--prompts", prompts, "--output", folder, "--device", "cpu",
            "--temperature", "0", "--limit", str(options.limit),
            "--max_new_tokens", str(options.max_new_tokens),
        ]  # fmt: skip
        assert generate(words) == 0, errors.getvalue()
        rows = load_run(folder).table.select(["prompt", "completion_ids"]).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    return [
        (tokenizer(row["prompt"]).input_ids, row["completion_ids"]) for row in rows if row["completion_ids"]
    ]


@torch.no_grad()
def agreements(draft: Any, tokens: np.ndarray) -> np.ndarray:
    """bool [N]: whether the draft's likeliest token at each place is the text's."""
    logits_NV = draft(torch.from_numpy(tokens)[None]).logits[0]
    return np.r_[False, logits_NV[:-1].argmax(-1).numpy() == tokens[1:]]


def capped_runs(agreed_N: np.ndarray, most: int) -> np.ndarray:
    """[N]: of a block that begins at each place, the tokens that are right."""
    found, run = np.zeros(len(agreed_N), np.int64), 0
    for place in range(len(agreed_N) - 1, -1, -1):
        run = run + 1 if agreed_N[place] else 0
        found[place] = min(run, most)
    return found


def proposed(tokens: np.ndarray, num_prompt_tokens: int) -> np.ndarray:
    """[N]: right tokens of the index's proposal at each place."""
    index, slot = NgramIndex(num_slots=1, max_length=len(tokens) + 1), np.array([0])
    index.begin(slot, np.array([num_prompt_tokens]))
    right_N = np.zeros(len(tokens), np.int64)
    begin = num_prompt_tokens + 1
    index.append(slot, np.array([begin]), tokens[:begin])
    for place in range(begin, len(tokens)):
        found = index.propose(slot, np.array([MOST]), least_chance=MEMORY_CHANCE)
        text = tokens[place : place + len(found.token_ids_C)]
        right_N[place] = np.cumprod(found.token_ids_C[: len(text)] == text).sum()
        index.append(slot, np.array([1]), tokens[place : place + 1])
    return right_N


def best_places(tokens: np.ndarray, first: int) -> np.ndarray:
    """[N]: the most right tokens of all earlier places that end in the same two tokens; what is proposed may
    go on into itself, as a repetition does."""
    found = np.zeros(len(tokens), np.int64)
    same_NN = tokens[:, None] == tokens[None]
    for place in range(first, len(tokens)):
        after = 2 + np.flatnonzero(same_NN[place - 1, 1 : place - 1] & same_NN[place - 2, : place - 2])
        for begin in after:
            text = tokens[place : place + MOST]
            same = text == tokens[begin : begin + len(text)]
            found[place] = max(found[place], int(np.cumprod(same).sum()))
    return found


def continued(first_N: np.ndarray, then_N: np.ndarray, length: int) -> np.ndarray:
    """[N]: of blocks of the first source, each followed by one of the second."""
    beyond_N = np.r_[then_N, np.zeros(length, np.int64)][length:]
    return np.maximum(np.where(first_N == length, length + beyond_N, first_N), then_N)


def fewest_passes(accepted_N: np.ndarray, first: int, end: int) -> int:
    """So that every token is committed: a pass commits at most one token more than it accepts."""
    fewest = np.zeros(end + 1, np.int64)
    for place in range(end - 1, first - 1, -1):
        reached = min(end, place + 1 + int(accepted_N[place]))
        fewest[place] = 1 + fewest[place + 1 : reached + 1].min()
    return int(fewest[first])


if __name__ == "__main__":
    sys.exit(main())

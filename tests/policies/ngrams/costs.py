"""What n-grams cost: time to update and to look up in a round, beside the target's pass, and bytes per token.

    python -m tests.policies.ngrams.costs --tokenizer FOLDER --texts FILE --output FILE.json

Real texts, one thread's CPU time, and the compiled index; the times of passes are the planner's. All of it
but prompts is done between two passes, so its share of a pass is what it adds to a round where nothing else
hides it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from transformers import AutoTokenizer

from specdist.lab.plan.hardware import find_gpu
from specdist.lab.plan.job import open_model
from specdist.lab.plan.roofline import Placement
from specdist.policies.costs import CostModel, Curve
from specdist.policies.ngrams.block_lengths import BlockLengths
from specdist.policies.ngrams.ngram_index import NgramIndex
from specdist.policies.ngrams.text_store import TextSettings

# The shape of a target, and the GPUs that share it.
TARGETS = (("8b", 1), ("70b", 4))
BATCH_SIZES = (1, 16, 64, 256)
STORE_TOKENS = (0, 2**22)
CONTEXT, NEW_TOKENS, NUM_ROUNDS, MOST = 1000, 5, 60, 64
GPU = "h100-sxm"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--texts", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    token_ids = tokens_of(options.texts, options.tokenizer)
    runs = [measured(token_ids, *case) for case in ((s, b) for s in STORE_TOKENS for b in BATCH_SIZES)]
    for run in runs:
        for shape, tp_size in TARGETS:
            share = run["update_us"] + run["look_up_us"] + run["choice_us"]
            run[f"share_of_{shape}"] = round(share / (1e6 * pass_s(shape, tp_size, run["batch_size"])), 5)
    given = sys.argv[1:] if arguments is None else arguments
    result = {
        "command": shlex.join(["python", "-m", "tests.policies.ngrams.costs", *given]),
        "bytes_per_token": bytes_per_token(),
        "runs": runs,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def tokens_of(path: str, tokenizer: str) -> np.ndarray:
    """All texts of the file, one after the other."""
    table = pa.ipc.open_file(pa.memory_map(path)).read_all()
    texts = [
        f"{row['prompt']} {row['reference']}" for row in table.select(["prompt", "reference"]).to_pylist()
    ]
    encoded = AutoTokenizer.from_pretrained(tokenizer)(texts, add_special_tokens=False)["input_ids"]
    return np.concatenate([np.array(ids, np.int64) for ids in encoded])


def measured(token_ids: np.ndarray, store_tokens: int, batch_size: int) -> dict[str, Any]:
    """Medians over rounds in which every sequence has so many new tokens."""
    length = CONTEXT + NEW_TOKENS * NUM_ROUNDS
    rows = np.arange(batch_size)
    # The sequences' own texts are the last ones, and not in the store.
    others, own = token_ids[: -batch_size * length], token_ids[-batch_size * length :].reshape(batch_size, -1)
    texts = TextSettings(
        num_tokens=store_tokens,
        given=[others[begin : begin + 500] for begin in range(0, len(others), 500)] if store_tokens else (),
        adds_sequences=store_tokens > 0,
    )
    index = NgramIndex(num_slots=batch_size, max_length=4096, learns_together=True, texts=texts)
    block_lengths = BlockLengths(CostModel(Curve([1, 4096], [10**7, 10**8]), Curve([1], [1])))
    index.begin(rows, np.full(batch_size, CONTEXT))
    begin = time.thread_time()
    index.append(rows, np.full(batch_size, CONTEXT), own[:, :CONTEXT].ravel())
    prompt_ns = 1e9 * (time.thread_time() - begin) / (batch_size * CONTEXT)
    times: list[tuple[float, float, float]] = []
    for first in range(CONTEXT, length, NEW_TOKENS):
        new = own[:, first : first + NEW_TOKENS].ravel()
        marks = [time.thread_time()]
        index.append(rows, np.full(batch_size, NEW_TOKENS), new)
        marks.append(time.thread_time())
        found = index.propose(rows, np.full(batch_size, MOST), least_chance=0.1)
        marks.append(time.thread_time())
        block_lengths.lengths(
            found.chances_C, found.lengths_R, num_pass_tokens=batch_size, num_rows=batch_size,
            num_context=float(first),
        )  # fmt: skip
        marks.append(time.thread_time())
        times.append(tuple(np.diff(marks)))  # type: ignore[arg-type]
    update, look_up, choosing = (round(1e6 * statistics.median(each), 1) for each in zip(*times, strict=True))
    return {
        "batch_size": batch_size,
        "store_tokens": min(store_tokens, len(others)),
        "update_us": update,
        "look_up_us": look_up,
        "choice_us": choosing,
        "prompt_ns_per_token": round(prompt_ns),
    }


def pass_s(shape: str, tp_size: int, batch_size: int) -> float:
    model, dtype = open_model("--target", shape, "auto")
    placement = Placement(
        model=model, gpu=find_gpu(GPU, dtype), tp_size=tp_size, context_tokens=CONTEXT + NEW_TOKENS
    )
    return placement.pass_s(NEW_TOKENS * batch_size, batch_size)


def bytes_per_token() -> dict[str, float]:
    """Of a sequence's own text, beside its table; and of other texts, with theirs."""
    index = NgramIndex(num_slots=1, max_length=1000, texts=TextSettings(num_tokens=2**20))
    state, store = index._state, index._state.store
    assert store is not None
    arrays = (store.tokens, store.owners, store.earlier, store.heads)
    return {
        "own": (state.tokens.nbytes + state.earlier.nbytes) / state.tokens.shape[1],
        "own_table_of_a_sequence": state.heads.nbytes,
        "other_texts": sum(array.nbytes for array in arrays) / store.capacity,
    }


if __name__ == "__main__":
    sys.exit(main())

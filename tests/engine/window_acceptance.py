"""How much of a draft's tokens is accepted if it sees a window alone: measured on long prompts.

python -m tests.engine.window_acceptance --target T --drafts D E --texts texts.arrow

Each prompt is as many tokens of the texts' column ``text``, one after the other. `python -m tests.readme`
makes the table.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
from transformers import AutoTokenizer

from specdist import SamplingOptions, SpeculativeLLM
from specdist.data.store.files import write_json
from specdist.lab.benchmark.results import versions
from specdist.utils.table import Table
from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks/draft-window-small-pair-cpu.json"
WINDOWS = (None, 512, 256, 64, 16)
NUM_DRAFT_TOKENS = 4


def markdown() -> str:
    """The share of drafted tokens that is accepted, a column for each window."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows: dict[tuple[str, float], dict[str, str | int | None]] = {}
    for one in found["results"]:
        temperature = f"{one['temperature']:g}"
        row = rows.setdefault(
            (one["draft"], one["temperature"]), {"draft": one["draft"], "temperature": temperature}
        )
        name = "all tokens" if one["draft_window"] is None else f"last {one['draft_window']:,}"
        row[name] = f"{one['num_accepted_draft_tokens'] / one['num_draft_tokens']:.3f}"
    return Table.of(list(rows.values()), num_names=1).markdown()


def prompts_of(path: Path, target: str, *, num_prompts: int, num_tokens: int) -> list[list[int]]:
    texts = pa.ipc.open_file(path).read_all()["text"].to_pylist()
    ids = AutoTokenizer.from_pretrained(target)("\n\n".join(texts))["input_ids"]
    parts = [ids[first : first + num_tokens] for first in range(0, len(ids), num_tokens)]
    return [part for part in parts if len(part) == num_tokens][:num_prompts]


def measure(
    target: str, draft: str, window: int | None, prompts: list[list[int]], num_new_tokens: int
) -> list[dict[str, Any]]:
    """At temperature 0 and 1."""
    llm = SpeculativeLLM(
        target, draft, policy="fixed", num_draft_tokens=NUM_DRAFT_TOKENS, draft_window=window,
        device="cpu", max_num_seqs=len(prompts),
    )  # fmt: skip
    found = []
    for temperature in (0.0, 1.0):
        sampling = SamplingOptions(temperature=temperature, max_new_tokens=num_new_tokens, seed=1)
        results = llm.generate(prompts, sampling, use_tqdm=False)
        assert not any(result.error for result in results)
        numbers = ("num_draft_tokens", "num_accepted_draft_tokens")
        counts = {name: sum(getattr(result, name) for result in results) for name in numbers}
        found.append({
            "draft": Path(draft).name, "draft_window": window, "temperature": temperature, **counts
        })  # fmt: skip
        sys.stdout.write(f"{json.dumps(found[-1])}\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafts", nargs="+", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--prompt_tokens", type=int, default=1500)
    parser.add_argument("--new_tokens", type=int, default=128)
    options = parser.parse_args()
    prompts = prompts_of(
        options.texts, options.target, num_prompts=options.num_prompts, num_tokens=options.prompt_tokens
    )
    results = [
        one
        for draft in options.drafts
        for window in WINDOWS
        for one in measure(options.target, draft, window, prompts, options.new_tokens)
    ]
    names = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    write_json(
        RESULTS,
        {
            "kind": "acceptance by the draft's window",
            "command": shlex.join(["python", "-m", "tests.engine.window_acceptance", *names]),
            "date": datetime.now(UTC).date().isoformat(),
            "versions": versions(),
            "num_prompts": len(prompts),
            "num_draft_tokens": NUM_DRAFT_TOKENS,
            "results": results,
        },
    )


if __name__ == "__main__":
    main()

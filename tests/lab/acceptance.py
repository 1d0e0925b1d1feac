"""How much of what drafts propose a target accepts, at temperature 0 and 1.

python -m tests.lab.acceptance --target T --drafts D E --prompts gsm8k.arrow alpaca.arrow --output found.json

Prompts are those of a column ``prompt`` that have at most ``--prompt_tokens`` tokens; of files with a column
``text``, as many tokens of their texts, one after the other. ``--drafts none`` is the target alone, and a
folder with an MTP head takes its place. `python -m tests.readme` makes the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import torch
from transformers import AutoTokenizer

from specdist import SamplingOptions, SpeculativeLLM
from specdist.data.store.files import write_json
from specdist.utils.table import Table
from tests.ranks import REPOSITORY

DRAFTERS = REPOSITORY / "jobs/benchmarks/drafters-small-pair-cpu.json"
HEAD = "mtp"


def drafters_markdown() -> str:
    """Tokens per target forward of every set of prompts; of all sets, how often the token at a
    position is accepted, and tokens per second."""
    found = json.loads(DRAFTERS.read_text(encoding="utf-8"))["results"]
    rows = []
    for (draft, temperature), parts in itertools.groupby(
        found, lambda one: (one["draft"], one["temperature"])
    ):
        sets = list(parts)
        num_drafts = sum(one["num_drafts"] for one in sets)
        row = {"draft": draft, "temperature": f"{temperature:g}"}
        for one in sets:
            row[one["prompts"]] = f"{1 + one['num_accepted_draft_tokens'] / max(one['num_drafts'], 1):.2f}"
        for place in range(5):
            accepted = sum(sum(one["num_accepted_tokens_per_pos"][place : place + 1]) for one in sets)
            row[f"{place + 1}"] = f"{accepted / num_drafts:.2f}" if num_drafts else ""
        speed = sum(one["num_tokens"] for one in sets) / sum(one["wall_s"] for one in sets)
        rows.append(row | {"tokens/s": f"{speed:.0f}"})
    return Table.of(rows, num_names=1).markdown()


def prompts_of(path: Path, tokenizer: Any, num_prompts: int, num_tokens: int) -> list[Any]:
    table = pa.ipc.open_file(path).read_all()
    if "prompt" in table.column_names:
        prompts = table["prompt"].to_pylist()
        short = (each for each in prompts if len(tokenizer(each)["input_ids"]) <= num_tokens)
        return list(itertools.islice(short, num_prompts))
    ids = tokenizer("\n\n".join(table["text"].to_pylist()))["input_ids"]
    return [ids[num_tokens * part :][:num_tokens] for part in range(num_prompts)]


def measure(
    options: argparse.Namespace,
    draft: str,
    prompts: dict[str, Any],
    greedy: dict[str, Any],
) -> list[dict[str, Any]]:
    """``greedy``: the target's own tokens of each set."""
    has_head = (Path(draft) / "modeling_mimo.py").exists()
    target = draft if has_head else options.target
    drafting: dict[str, Any] = {} if draft == "none" else {"num_draft_tokens": options.num_draft_tokens}
    llm = SpeculativeLLM(
        target, HEAD if has_head else None if draft == "none" else draft, policy="fixed", device="cpu",
        dtype="float32", max_num_seqs=options.max_num_seqs, trust_remote_code=has_head, **drafting,
    )  # fmt: skip
    found = []
    for temperature, (name, own) in itertools.product((0.0, 1.0), prompts.items()):
        sampling = SamplingOptions(temperature=temperature, max_new_tokens=options.new_tokens, seed=1)
        begin = time.monotonic()
        results = llm.generate(own, sampling, use_tqdm=False)
        wall_s = time.monotonic() - begin
        assert not any(result.error for result in results)
        token_ids = [result.token_ids for result in results]
        assert temperature or greedy.setdefault(name, token_ids) == token_ids
        stats = dataclasses.asdict(llm._stats)
        counts = ("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos")
        one = {"draft": Path(draft).name, "temperature": temperature, "prompts": name}
        one |= {count: stats[count] for count in counts}
        one["num_accepted_draft_tokens"] = sum(one["num_accepted_tokens_per_pos"])
        found.append(one | {"num_tokens": sum(map(len, token_ids)), "wall_s": round(wall_s, 3)})
        sys.stdout.write(f"{json.dumps(found[-1])}\n")
        sys.stdout.flush()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafts", nargs="+", required=True)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--num_prompts", type=int, default=32)
    parser.add_argument("--prompt_tokens", type=int, default=512)
    parser.add_argument("--new_tokens", type=int, default=96)
    parser.add_argument("--num_draft_tokens", type=int, default=5)
    parser.add_argument("--max_num_seqs", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    sizes = options.num_prompts, options.prompt_tokens
    prompts = {path.stem: prompts_of(path, tokenizer, *sizes) for path in options.prompts}
    greedy: dict[str, Any] = {}
    results = [one for draft in options.drafts for one in measure(options, draft, prompts, greedy)]
    names = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    frame = {
        "kind": "acceptance of drafts",
        "command": shlex.join(["python", "-m", "tests.lab.acceptance", *names]),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    write_json(options.output, frame | {"results": results})


if __name__ == "__main__":
    main()

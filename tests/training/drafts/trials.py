"""What `jobs/distill.py` makes of a draft with several options: acceptance on many rows that it has not seen.

    python -m tests.training.drafts.trials --target TARGET --draft DRAFT --prompts FILE --work FOLDER \\
        --output RESULT --trial NAME SHARE TEMPERATURE SAMPLES [OPTION ...]

A trial generates that share of the first 2,000 rows, trains, and judges the draft before and after on every
second one of the last 400 rows' completions, greedy ones and samples: how many of the target's tokens it
would have drafted greedily, and the mean common mass of both distributions at temperature 1. The 400 rows
before those are for choices between options, which must not see the last ones. Nothing depends on the
machine. Trials are added to RESULT.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdist.cli import distill as distil
from specdist.cli import generate
from specdist.config.arguments import parse_arguments
from specdist.config.generate import GenerateConfig
from specdist.data.run.reading import open_shard
from specdist.data.run.run_folder import RunFolder
from specdist.sampling.distributions import SamplingSettings
from specdist.training.drafts.acceptance import acceptances
from specdist.training.drafts.data import COLUMNS, Example, batches

NUM_ROWS, EVERY = 2000, 2
JUDGED = {"others": slice(1600, 2000, EVERY), "validation": slice(1200, 1600, EVERY)}
ROWS_PER_SHARD, TEMPERATURES, TOKENS_PER_PASS, COST_RATIO = 50, (0.0, 1.0), 4096, 0.05
RECORDED = ("options", "num_training_sequences", "num_training_tokens", "num_prompts", "num_prompt_tokens",
            "num_own_tokens", "num_held_out_sequences", "num_held_out_tokens", "before", "after",
            "steps")  # fmt: skip
CPU = torch.device("cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("target", "draft", "prompts"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--trial", nargs=4, required=True, metavar=("NAME", "SHARE", "TEMPERATURE", "SAMPLES")
    )
    options, more = parser.parse_known_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    document = json.loads(options.output.read_text()) if options.output.is_file() else {"trials": []}
    name, share, temperature, num_samples = options.trial
    new = options.work / f"draft-{name}"
    run = [
        *common_words(options, float(temperature)), "--num_samples", num_samples,
        "--output", str(options.work / f"first-{share}-{temperature}-{num_samples}"),
    ]  # fmt: skip
    # A measured one would depend on the machine, and decides when training stops.
    words = [*run, "--first", share, "--new_draft", str(new), "--cost_ratio", str(COST_RATIO), *more]
    silently(distil, words)
    record = json.loads((new / "distillation.json").read_text())
    trial = {
        "name": name,
        "command": shlex.join(["python", "-m", "tests.training.drafts.trials", *given]),
        "share": float(share), "temperature": float(temperature), "num_samples": int(num_samples),
        **{each: record[each] for each in RECORDED},
        "held_out": [round(each["acceptance"], 4) for each in record["history"]["prospects"]],
        "losses": record["history"]["losses"],
        "judged_before": judged_before(options), "judged": judged(options, str(new)),
    }  # fmt: skip
    document["trials"] = [each for each in document["trials"] if each["name"] != name] + [trial]
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    sys.stderr.write(f"{json.dumps(trial | {'losses': None, 'command': None})}\n")
    return 0


def common_words(options: argparse.Namespace, temperature: float) -> list[str]:
    return [
        "--target", options.target, "--draft", options.draft, "--prompts", options.prompts, "--device", "cpu",
        "--limit", str(NUM_ROWS), "--rows_per_shard", str(ROWS_PER_SHARD), "--max_new_tokens", "128",
        "--max_num_seqs", "32", "--temperature", str(temperature),
    ]  # fmt: skip


def silently(job: Any, words: Sequence[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert job(list(words)) == 0


def judged_before(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """The same of the draft as it was, kept beside the completions that it is judged by."""
    path = options.work / "before.json"
    if not path.is_file():
        path.write_text(json.dumps(judged(options, options.draft)))
    return json.loads(path.read_text())


def judged(options: argparse.Namespace, draft: str) -> dict[str, dict[str, dict[str, float]]]:
    """By rows and by temperature: the acceptance of this draft, and its standard error over completions."""
    models = [
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (options.target, draft)
    ]
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in JUDGED}
    for temperature in TEMPERATURES:
        words = [
            *common_words(options, temperature),
            "--output",
            str(options.work / f"whole-{temperature:g}"),
        ]
        config = parse_arguments(GenerateConfig, words)
        if len(RunFolder(Path(config.output)).complete_shards()) * ROWS_PER_SHARD < NUM_ROWS:
            silently(generate, words)
        for name, rows in JUDGED.items():
            found[name][f"{temperature:g}"] = mean(list(rates(config, *models, completions(config, rows))))
    return found


def completions(config: GenerateConfig, chosen: slice) -> list[Example]:
    """Of the run, by row."""
    folder, tokenizer = RunFolder(Path(config.output)), AutoTokenizer.from_pretrained(config.target)
    rows = []
    for shard in folder.complete_shards():
        rows += open_shard(folder.paths(shard), verify=False).select([*COLUMNS, "prompt"]).to_pylist()
    return [
        Example(
            row_id=row["row_id"], sample_index=0,
            prompt_ids=np.array(tokenizer(row["prompt"])["input_ids"], np.int32),
            completion_ids=np.array(row["completion_ids"], np.int32),
        )
        for row in sorted(rows, key=lambda row: row["row_id"])[chosen]
        if row["finish_reason"] != "error" and row["completion_ids"]
    ]  # fmt: skip


@torch.no_grad()
def rates(
    config: GenerateConfig, target: PreTrainedModel, draft: PreTrainedModel, examples: list[Example]
) -> Any:
    """Of every completion its accepted tokens, and all."""
    settings = SamplingSettings(temperature=config.temperature)
    for _, batch in batches(examples, TOKENS_PER_PASS, config, CPU):
        logits = [
            model(batch.token_ids_BL).logits[batch.rows_M, batch.columns_M]
            for model in ([draft, target] if settings.is_random else [draft])
        ]
        found_M = acceptances(logits[0], batch.places, settings, *logits[1:])
        for part in found_M.split(list(batch.lengths)):
            yield float(part.sum()), len(part)


def mean(rates: Sequence[tuple[float, int]]) -> dict[str, float]:
    accepted_U, counts_U = np.array(rates).T
    share = accepted_U.sum() / counts_U.sum()
    error = np.sqrt(((accepted_U - share * counts_U) ** 2).sum()) / counts_U.sum()
    return {"acceptance": round(share, 4), "error": round(error, 4), "num_tokens": int(counts_U.sum())}


if __name__ == "__main__":
    sys.exit(main())

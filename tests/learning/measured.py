"""What a real draft gains by learning on the way, in counts, which no other work on the machine changes.

    python -m tests.learning.measured --target TARGET --draft DRAFT --prompts FILE --out FILE

Everything is real but the time: after every round the draft gets a number of pieces of learning, as many as a
wait may have room for. The same rows run without. Greedily and with gumbel the completions must be the same.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdist.engine.request import Request
from specdist.learning.adaptation import Adaptation, AdaptSettings, Served, copy_of
from specdist.models.replacing import parameters_of, replace_weights
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import CPU
from tests.engine.test_adapting import Adapting

NUM_PARTS, RATE_OF_WIDTH = 5, 5e-5 * 2048


class Learning(Adapting):
    """With the job's own settings."""

    def learner(self) -> Any:
        runner = self.runners[1]
        own, width = parameters_of(runner), runner.model.config.hidden_size
        settings = AdaptSettings(
            sampling=self.settings, vocab_size=self.vocab_size, rate=RATE_OF_WIDTH / width
        )
        served = Served(weights=own, replace=lambda weights: replace_weights(runner, weights))
        self.adaptation = Adaptation(copy_of(runner.model, own, CPU), settings, served)
        return self.adaptation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--pieces", type=int, default=16)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    options = parser.parse_args()
    folders = (options.target, options.draft)
    models = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in folders]
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    prompts = pa.ipc.open_file(options.prompts).read_all().column("prompt").to_pylist()[: options.rows]
    requests = [
        Request(row_id=row, sample_index=0, prompt_ids=ids, shard=row * NUM_PARTS // len(prompts))
        for row, ids in enumerate(tokenizer(prompts)["input_ids"])
        if len(ids) < 300
    ]
    document: dict[str, Any] = {
        "command": "python -m tests.learning.measured " + shlex.join(sys.argv[1:]),
        "num_rows": len(requests), "pieces_per_round": options.pieces, "settings": {},
    }  # fmt: skip
    for temperature in options.temperatures:
        found = document["settings"][f"{temperature:g}"] = {}
        tokens = []
        for name, num_pieces in (("without", 0), ("with", options.pieces)):
            replica = Learning(
                *models, settings=SamplingSettings(temperature=temperature, is_coupled=temperature > 0),
                max_new_tokens=96, max_num_seqs=16, max_num_batched_tokens=512, max_seq_len=400,
                num_pages=4000, eos=[tokenizer.eos_token_id], num_draft_tokens=4,
            )  # fmt: skip
            replica.num_pieces = num_pieces
            tokens.append([each.token_ids for each in replica.generate(requests)])
            found[name] = figures(replica)
        found["same_completions"] = tokens[0] == tokens[1]
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def figures(replica: Learning) -> dict[str, Any]:
    parts = [replica.stats_recorder.close_shard(part) for part in range(NUM_PARTS)]
    num_tokens = sum(part.num_completion_tokens for part in parts)
    return {
        "acceptance": [part.num_accepted_tokens / part.num_draft_tokens for part in parts],
        "verified_acceptance": [part.verified_acceptance_rate for part in parts],
        "tokens_per_pass": [part.num_completion_tokens / part.num_row_steps for part in parts],
        "num_tokens": num_tokens,
        "num_steps": sum(part.num_adapt_steps for part in parts),
        "num_switches": sum(part.num_adapt_switches for part in parts),
        "num_comparisons_tokens": sum(part.num_adapt_judged for part in parts),
    }


if __name__ == "__main__":
    main()

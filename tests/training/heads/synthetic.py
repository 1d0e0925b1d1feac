"""Collections whose distribution is known: what a head should find in them can be said beforehand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from specdist.data.leases.opening import open_run_folder
from specdist.data.run.manifest import Manifest, ShardPlan
from specdist.models.heads.examples import PREFIX_KINDS, ExampleBlock, example_table
from specdist.models.heads.info import DraftIdentity, HeadKind

HIDDEN_SIZE = 12
ROWS_PER_SHARD = 7
DRAFT = DraftIdentity(
    name="small", revision=None, architecture="llama", hidden_size=HIDDEN_SIZE, fingerprint="abc"
)
# What a token's fate depends on: the logit of its acceptance is this direction's part of the hidden state.
DIRECTION = np.linspace(-1.5, 2.0, HIDDEN_SIZE)


def write_collection(
    folder: Path,
    kind: HeadKind = "acceptance",
    *,
    num_rows: int = 60,
    seed: int = 0,
    draft: DraftIdentity = DRAFT,
    num_missing_shards: int = 0,
    follows_features: bool = False,
) -> Path:
    """Rows of 5 to 40 examples with normal hidden states; Q/P is e**-z + 1 with z the logit along DIRECTION,
    so that min(1, P/Q) = sigmoid(z). The features say nothing; or with ``follows_features`` everything, as
    the token's probability is that of its acceptance, and the hidden states nothing."""
    plan = ShardPlan(num_rows, ROWS_PER_SHARD)
    manifest = Manifest(
        fingerprint={
            "kind": kind, "num_rows": num_rows, "rows_per_shard": ROWS_PER_SHARD, "temperature": 1.0,
            "target": "digest of a target", "seed": seed,
        },
        info={
            "target": "large", "draft": "small", "prompts": "prompts.arrow",
            "draft_identity": dataclasses.asdict(draft),
        },
    )  # fmt: skip
    run = open_run_folder(folder, manifest, "", overwrite=False)
    generator = np.random.default_rng(seed)
    for shard in range(plan.num_shards - num_missing_shards):
        blocks = [block(row_id, kind, generator) for row_id in range(*plan.bounds(shard))]
        if follows_features:
            blocks = [dataclasses.replace(each, probabilities_M=1 / each.features_3M[1]) for each in blocks]
        certain = [np.ones(len(each)) for each in blocks]
        table = example_table(blocks, certain, hidden_size=HIDDEN_SIZE, hidden_dtype="float16")
        run.finish_shard(shard, table, {"num_examples": table.num_rows})
    return folder


def block(row_id: int, kind: HeadKind, generator: np.random.Generator) -> ExampleBlock:
    num_examples = int(generator.integers(5, 41))
    hidden_MH = generator.normal(size=(num_examples, HIDDEN_SIZE)).astype(np.float16)
    return ExampleBlock(
        row_id=row_id,
        prefix_kind="target" if kind == "acceptance" else PREFIX_KINDS[row_id % len(PREFIX_KINDS)],
        positions_M=np.arange(3, 3 + num_examples),
        token_ids_M=np.arange(num_examples),
        probabilities_M=1 + np.exp(-hidden_MH.astype(float) @ DIRECTION),
        features_3M=generator.uniform(size=(3, num_examples)),
        hidden_MH=hidden_MH,
    )

"""The dataset card of a complete run, ``README.md`` in its folder: its contents, its options, how to read it.

With it ``datasets.load_dataset(FOLDER)`` finds the rows, and the folder can be pushed to a hub as it is. It
depends on the manifest, the columns of the first shard, the counts of rows and the last start's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from specdist.config.arguments import PATH_OPTIONS
from specdist.data.file_names import DATA_PATTERN, TRACE_PATTERN
from specdist.data.run.manifest import COMPLETIONS_PER_SHARD, Manifest, seed_says
from specdist.data.run.reading import open_shard
from specdist.data.run.run_folder import CARD_MARK, RunFolder
from specdist.data.stats.schema import column_fields, fields_table
from specdist.data.stats.shard import Stats
from specdist.data.store.files import write_atomically
from specdist.job.totals.report import total_stats
from specdist.job.totals.spending import chosen_options, options_of, price_text
from specdist.policies.registry import OPTION_NAMES, papers_of
from specdist.utils.markdown import code, plain, table

SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "bad_words", "suppress_tokens", "min_new_tokens", "constraint_column", "row_options",
    "seed", "max_new_tokens", "stop", "stop_repeats", "num_samples", "max_seq_len",
)  # fmt: skip


def write_card(folder: RunFolder) -> None:
    """Write the card of a complete run, unless there is one: it may have been edited."""
    if folder.card_path.exists():
        return
    schema = open_shard(folder.paths(0), verify=False).schema
    options = options_of(folder.config_path)
    content = card_text(folder.manifest, schema, total_stats(folder), options).encode()
    write_atomically(folder.card_path, lambda file: file.write(content))


def card_text(
    manifest: Manifest, schema: pa.Schema, total: Stats, given: Mapping[str, Any] | None = None
) -> str:
    """The whole file; ``schema`` is that of the shards, ``total`` the sum of their statistics, ``given`` the
    options of the last start."""
    given = given or {}
    from huggingface_hub import DatasetCard, DatasetCardData

    run, info = manifest.fingerprint, manifest.info
    title = " ".join(f"Completions by {last_name(info['target'])} of {last_name(info['prompts'])}".split())
    sums = info.get(COMPLETIONS_PER_SHARD)
    num_rows = int(run["num_rows"]) * int(run["num_samples"]) if sums is None else sum(sums)
    figures = total.summary(info.get("world_size", 1))
    patterns = {"default": DATA_PATTERN} | ({"trace": TRACE_PATTERN} if run.get("trace") else {})
    data = DatasetCardData(
        pretty_name=title,
        task_categories=["text-generation"],
        tags=["synthetic", "speculative-decoding", "specdist"],
        configs=[
            {"config_name": name, "data_files": [{"split": "train", "path": pattern}]}
            | ({"default": True} if name == "default" else {})
            for name, pattern in patterns.items()
        ],
    )
    card = DatasetCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.jinja")),
        title=plain(title),
        run=run,
        info=info,
        total=total,
        num_errors=num_rows - total.num_completions,
        price=price_text(given, figures["tokens_per_s_per_device"]),
        seed=seed_says(manifest),
        has_logprobs=not {"logprobs", "prompt_logprobs"}.isdisjoint(schema.names),
        mark=CARD_MARK,
        options=table(
            ["option", "value"], [[name, code(value)] for name, value in _options(run, info, given).items()]
        ),
        columns=fields_table("column", column_fields(schema, "an input column, unchanged")),
        papers=papers_of(run["policy"], run["acceptance"]),
    )
    return f"{card.content.rstrip()}\n"


def _options(run: Mapping[str, Any], info: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options by name, without those that do not apply, and all others that were chosen: of paths the
    last parts, since whose folders these were is nobody's business."""
    chosen = chosen_options(given)
    chosen |= {name: last_name(chosen[name]) for name in PATH_OPTIONS & {*chosen}}
    names = ("policy", *OPTION_NAMES, "verify", "acceptance", "overlap", "num_branches")
    of_draft = {name: run.get(name) for name in names} if run["policy"] != "none" else {"policy": "none"}
    values = {
        "target": last_name(info["target"]),
        "draft": last_name(info["draft"]),
        **chosen,
        "dtype": run["dtype"],
        "cache_dtype": run.get("cache_dtype"),
        **{name: run.get(name) for name in SAMPLING},
        **of_draft,
        "specdist": info.get("versions", {}).get("specdist"),
    }
    return {name: value for name, value in values.items() if value is not None}


def last_name(name: str | list[str] | None) -> str | None:
    """The last part of a local path, or of each of several; a hub's name stays whole."""
    if isinstance(name, list):
        return ", ".join(last_name(each) or each for each in name)
    if name is None:
        return None
    path = Path(name)
    is_local = path.is_absolute() or name.startswith(".") or len(path.parts) > 2
    return path.name or name if is_local else name

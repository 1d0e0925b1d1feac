"""The dataset card of a complete run, ``README.md`` in its folder: its contents, its options, how to read it.

With it ``datasets.load_dataset(FOLDER)`` finds the rows, and the folder can be pushed to a hub as it is. It
depends only on the manifest, the columns of the first shard and the counts of rows, so that every replica and
every restart writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from specdist.data.run.layout import DATA_PATTERN, TRACE_PATTERN
from specdist.data.run.manifest import COMPLETIONS_PER_SHARD, Manifest, seed_says
from specdist.data.run.reading import open_shard
from specdist.data.run.run_folder import CARD_MARK, RunFolder
from specdist.data.stats.schema import column_fields, fields_table
from specdist.data.stats.shard import Stats
from specdist.data.store.files import write_atomically
from specdist.job.totals.report import total_stats
from specdist.job.totals.spending import gpu_price_of, price_text
from specdist.policies.registry import OPTION_NAMES, papers_of
from specdist.utils.markdown import code, plain, table

SIZE_BOUNDS = ((1e3, "n<1K"), (1e4, "1K<n<10K"), (1e5, "10K<n<100K"), (1e6, "100K<n<1M"))
LARGEST_SIZE = "n>1M"
LOSSY = (
    "> **These completions do not follow the target's own distribution.** The lossy policy `sprinter` "
    "commits tokens that its verifier trusts, unverified by the target."
)
UNCHECKED = (
    "> **Whether these completions follow the target's own distribution is not known**: the loaded target "
    "could not be compared with an unsharded computation."
)
EXACT = "The completions are exact: they follow the target's own distribution, as if it had generated alone."
WITH_CACHE = "Its keys and values were kept in {cache_dtype}, which is part of it."
ROUNDING = "Log-probabilities agree up to rounding, which depends on the rows of a pass."
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "bad_words", "suppress_tokens", "min_new_tokens", "constraint_column", "row_options",
    "seed", "max_new_tokens", "stop", "num_samples", "max_seq_len",
)  # fmt: skip
READING = """```python
from datasets import load_dataset

rows = load_dataset("FOLDER", split="train")  # this folder, or the name of its repository
```

`specdist.load_run("FOLDER")` gives the rows, memory-mapped, and the run's statistics."""


def write_card(folder: RunFolder) -> None:
    """Write the card of a complete run, unless there is one: it may have been edited."""
    if folder.card_path.exists():
        return
    schema = open_shard(folder.paths(0), verify=False).schema
    price = gpu_price_of(folder.config_path)
    content = card_text(folder.manifest, schema, total_stats(folder), price).encode()
    write_atomically(folder.card_path, lambda file: file.write(content))


def card_text(manifest: Manifest, schema: pa.Schema, total: Stats, gpu_price: float | None = None) -> str:
    """The whole file; ``schema`` is that of the shards, ``total`` the sum of their statistics."""
    run, info = manifest.fingerprint, manifest.info
    title = _title(info)
    sums = info.get(COMPLETIONS_PER_SHARD)
    num_rows = int(run["num_rows"]) * int(run["num_samples"]) if sums is None else sum(sums)
    has_logprobs = not {"logprobs", "prompt_logprobs"}.isdisjoint(schema.names)
    sections = [
        f"---\n{_front_matter(title, num_rows, manifest.info, is_traced=bool(run.get('trace')))}---",
        f"# {plain(title)}",
        " ".join(filter(None, [_made(run, total, num_rows), _spent(info, total, gpu_price)])),
        EXACT if info["exact"] else LOSSY if run["policy"] == "sprinter" else UNCHECKED,
        *([WITH_CACHE.format_map(run)] if run.get("cache_dtype") else []),
        " ".join(
            [
                seed_says(manifest),
                *([ROUNDING] if has_logprobs else []),
            ]
        ),
        CARD_MARK,
        "## How it was generated",
        table(["option", "value"], [[name, code(value)] for name, value in _options(run, info).items()]),
        "## Reading it",
        READING,
        "## Columns",
        fields_table("column", column_fields(schema, "an input column, unchanged")),
        *_references(run),
    ]
    return "\n\n".join(sections) + "\n"


def _made(run: Mapping[str, Any], total: Stats, num_rows: int) -> str:
    """How many rows are completions, and how many of these were cut."""
    how = "by the target alone" if run["policy"] == "none" else "by speculative decoding"
    sentences = [
        f"{total.num_completions:,} completions of {run['num_rows']:,} prompts, generated with specdist "
        f"{how}."
    ]
    if num_errors := num_rows - total.num_completions:
        sentences.append(
            f"{num_errors:,} more {'row has' if num_errors == 1 else 'rows have'} an error instead of a "
            "completion (`finish_reason` is `error`)."
        )
    if total.num_cut_completions:
        sentences.append(
            f"{total.num_cut_completions:,} of the completions were cut by `max_new_tokens` or `max_seq_len` "
            "(`finish_reason` is `length`)."
        )
    return " ".join(sentences)


def _spent(info: Mapping[str, Any], total: Stats, gpu_price: float | None) -> str:
    figures = total.summary(info.get("world_size", 1))
    told = price_text(gpu_price, figures["tokens_per_s_per_device"])
    return f"They took: {told}." if told else ""


def _title(info: Mapping[str, Any]) -> str:
    title = f"Completions by {_last_name(info['target'])} of {_last_name(info['prompts'])}"
    # In one line: a line of the title could end the front matter.
    return " ".join(title.split())


def _front_matter(title: str, num_rows: int, info: Mapping[str, Any], *, is_traced: bool) -> str:
    configs: list[dict[str, Any]] = [
        {"config_name": "default", "default": True, "data_files": [_files(DATA_PATTERN)]}
    ]
    if is_traced:
        configs.append({"config_name": "trace", "data_files": [_files(TRACE_PATTERN)]})
    values = {
        "pretty_name": title,
        "task_categories": ["text-generation"],
        "size_categories": [next((name for bound, name in SIZE_BOUNDS if num_rows < bound), LARGEST_SIZE)],
        "tags": ["synthetic", "speculative-decoding", "specdist"],
        "configs": configs,
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)


def _files(pattern: str) -> dict[str, str]:
    return {"split": "train", "path": pattern}


def _options(run: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """The options by name, without those that do not apply."""
    names = ("policy", *OPTION_NAMES, "verify", "acceptance", "overlap", "num_branches")
    of_draft = {name: run.get(name) for name in names} if run["policy"] != "none" else {"policy": "none"}
    values = {
        "target": _last_name(info["target"]),
        "draft": _last_name(info["draft"]),
        "dtype": run["dtype"],
        "cache_dtype": run.get("cache_dtype"),
        **{name: run.get(name) for name in SAMPLING},
        **of_draft,
        "specdist": info.get("versions", {}).get("specdist"),
    }
    return {name: value for name, value in values.items() if value is not None}


def _references(run: Mapping[str, Any]) -> list[str]:
    found = papers_of(run["policy"], run["acceptance"])
    if not found:
        return []
    return ["## Methods", "\n".join(f"- {reference.markdown()}" for reference in found)]


def _last_name(name: str | None) -> str | None:
    """The last part of a local path; a hub's name stays whole."""
    if name is None:
        return None
    path = Path(name)
    is_local = path.is_absolute() or name.startswith(".") or len(path.parts) > 2
    return path.name or name if is_local else name

"""Options of runs whose prompts or results lie on an object store."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.config.arguments import option


@dataclass(kw_only=True)
class StorageOptions:
    """Where copies lie."""

    _argument_group_name = "Storage"

    push_to_hub: str | None = option(
        None,
        help="owner/name of a data set on the Hugging Face hub, which gets the finished run: its card and "
        "its rows; made private if there is none",
    )
    spool: str | None = option(
        None,
        help="folder on a disk of this machine for what a URL in --prompts or --output needs locally: "
        "fetched prompts, rows of unfinished shards, logs (default: specdist-UID in the folder of temporary "
        "files)",
    )

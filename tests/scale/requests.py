"""A store in this process's memory that counts requests as S3 would be asked them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from specdist.data.store.object_store import ObjectStore
from specdist.data.store.storage import StorePath

NAMES_PER_REQUEST = 1000
REQUESTS = "requests"
# By the method of fsspec's file system; a copy asks for the size first.
COSTS = {"cp_file": 2}


class CountingStore(ObjectStore):
    """``counts`` may be replaced at any time. A listing is one request for every thousand names."""

    def __init__(self) -> None:
        super().__init__("s3", fsspec.filesystem("memory", skip_instance_cache=True), retry_s=0.0)
        self._read_options = {}
        self.counts: Counter[str] = Counter()

    def _try(self, request: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        name = request.__name__
        if name == "find":
            folder, prefix = arguments[0], options.pop("prefix", "")
            try:
                found = self._filesystem.ls(f"/{folder}", detail=True)
            except FileNotFoundError:
                found = []
            named = {entry["name"]: {**entry, "name": entry["name"].lstrip("/")} for entry in found}
            named = {key: entry for key, entry in named.items() if key.rpartition("/")[2].startswith(prefix)}
            self.counts[REQUESTS] += 1 + len(named) // NAMES_PER_REQUEST
            return named
        self.counts[REQUESTS] += COSTS.get(name, 1)
        if name == "ls":
            options.pop("refresh")
            found = request(f"/{arguments[0]}", **options)
            self.counts[REQUESTS] += len(found) // NAMES_PER_REQUEST
            return [{**entry, "name": entry["name"].lstrip("/")} for entry in found]
        try:
            return request(*arguments, **options)
        except FileNotFoundError:
            # s3fs asks for a folder of that name, too.
            self.counts[REQUESTS] += name == "info"
            raise


def counting_folder(cache_dir: Path) -> tuple[CountingStore, StorePath]:
    store = CountingStore()
    return store, StorePath(store, f"bucket/{cache_dir.name}", cache_dir)

"""What replicas that were killed have left of a run on a store: removed once the run is complete."""

from __future__ import annotations

import logging
import shutil

from specdist.data.run.layout import RUN_TAG
from specdist.data.run.run_folder import RunFolder
from specdist.data.store.files import TEMPORARY_SUFFIX
from specdist.data.store.storage import StorePath
from specdist.utils.errors import UserError

logger = logging.getLogger(__name__)


def remove_leftovers(folder: RunFolder) -> None:
    """Of a complete run: copies of part logs that reached the store after their shard was complete, this
    machine's part logs and data that waited for an upload, and on S3 the parts of uploads that were never
    completed. What cannot be removed is harmless, and stays, as do the files of a run begun anew in its
    place."""
    path = folder.path
    if not isinstance(path, StorePath):
        return
    shutil.rmtree(path.spool / f"run-{folder.run_tag}", ignore_errors=True)
    for file in (path.spool / "files").glob(f"*/*{TEMPORARY_SUFFIX}"):
        file.unlink(missing_ok=True)
    retry_s, path.store.retry_s = path.store.retry_s, 0.0
    try:
        if folder.manifest.info.get(RUN_TAG, "") == folder.run_tag:
            parts = path / "parts"
            for name in path.store.below(parts.key):
                (parts / name).unlink(missing_ok=True)
            path.store.abort_uploads(path.key)
    except (OSError, UserError) as error:
        logger.info("part logs and parts of uploads that were cut short may be left in %s: %s", path, error)
    finally:
        path.store.retry_s = retry_s

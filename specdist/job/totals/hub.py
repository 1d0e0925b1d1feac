"""The finished data set on a hub: the card, and the Arrow files of all shards. Imports no torch.

What names machines and local paths stays behind: manifest, options, statistics and logs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from specdist.data.file_names import DATA_PATTERN, TRACE_PATTERN
from specdist.data.leases.membership import Membership
from specdist.data.run.run_folder import RunFolder
from specdist.data.store.copies import mirrored
from specdist.data.store.object_store import describe_error
from specdist.utils.errors import UserError

# The field of ``info`` for the repository that has the data set.
PUSHED_TO = "pushed_to"
# The lease of the replica that uploads.
HUB = "hub"
FILES_PER_COMMIT = 50

logger = logging.getLogger(__name__)


def check_hub(repository: str) -> None:
    """Create the data set's repository, private, if there is none. Raises :class:`UserError` if it cannot be
    written to."""
    with _client(repository) as api:
        api.create_repo(repository, repo_type="dataset", private=True, exist_ok=True)
        api.auth_check(repository, repo_type="dataset", write=True)


def push_to_hub(folder: RunFolder, membership: Membership, repository: str) -> None:
    """Upload a complete run, once, by one of its replicas. Raises :class:`UserError` if the hub refuses, or
    does not answer; another start of the command tries again."""
    if folder.manifest.info.get(PUSHED_TO) == repository:
        return
    lease = membership.leases.take(HUB, membership.leases.latest().get(HUB))
    if lease is None:
        logger.info("another replica uploads the data set to %s", repository)
        return
    try:
        root = mirrored(folder.path)
        found = [path for pattern in (DATA_PATTERN, TRACE_PATTERN) for path in sorted(root.glob(pattern))]
        # The card comes last: with it the data set is whole.
        files = [str(path.relative_to(root)) for path in [*found, root / folder.card_path.name]]
        for start in range(0, len(files), FILES_PER_COMMIT):
            with _client(repository) as api:
                api.upload_folder(
                    repo_id=repository, repo_type="dataset", folder_path=root,
                    allow_patterns=files[start : start + FILES_PER_COMMIT],
                    commit_message="Files of a run of specdist",
                )  # fmt: skip
        with membership.setup():
            folder.freeze(PUSHED_TO, repository)
        logger.info("the data set is in the repository %s", repository)
    finally:
        membership.leases.remove_up_to(lease)


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="specdist")


@contextlib.contextmanager
def _client(repository: str) -> Iterator[Any]:
    """The hub's client; whatever it raises names the option."""
    try:
        yield _api()
    except Exception as error:
        raise UserError(
            f"--push_to_hub {repository} is refused by the hub, or the hub cannot be reached "
            f"({describe_error(error)}): name a repository as owner/name, log in with hf auth login or set "
            "HF_TOKEN to a token that may write to it, and check the network and HF_ENDPOINT; all rows are "
            "kept, and the same command uploads them"
        ) from error

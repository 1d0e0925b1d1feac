"""The finished data set on a hub: the card, and the Arrow files of all shards. Imports no torch.

What names machines and local paths stays behind: manifest, options, statistics and logs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdist.data.leases.membership import Membership
from specdist.data.run.run_folder import RunFolder
from specdist.data.store.object_store import describe_error
from specdist.data.store.storage import local_copy
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
    api = _api()
    with _explained(repository):
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
        files = [path for shard in folder.complete_shards() for path in _files_of(folder, shard)]
        # The card comes last: with it the data set is whole.
        for start in range(0, len(files), FILES_PER_COMMIT):
            _commit(folder, repository, files[start : start + FILES_PER_COMMIT])
        _commit(folder, repository, [folder.card_path])
        with membership.setup():
            folder.freeze(PUSHED_TO, repository)
        logger.info("the data set is in %s/datasets/%s", _api().endpoint, repository)
    finally:
        membership.leases.remove_up_to(lease)


def _files_of(folder: RunFolder, shard: int) -> list[Path]:
    paths = folder.paths(shard)
    return [paths.data, *([paths.trace] if paths.trace.is_file() else [])]


def _commit(folder: RunFolder, repository: str, paths: Sequence[Path]) -> None:
    """Upload in one commit; files that the repository has already are not sent again."""
    from huggingface_hub import CommitOperationAdd

    root = f"{str(folder.path).rstrip('/')}/"
    with contextlib.ExitStack() as copies, _explained(repository):
        _api().create_commit(
            repository,
            [CommitOperationAdd(str(path).removeprefix(root), str(copies.enter_context(local_copy(path))))
             for path in paths],
            commit_message=f"{len(paths)} files of a run of specdist",
            repo_type="dataset",
        )  # fmt: skip


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="specdist")


@contextlib.contextmanager
def _explained(repository: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    label = f"--push_to_hub {repository}"
    try:
        yield
    except HFValidationError as error:
        raise UserError(
            f"{label} is not the name of a repository, owner/name: {describe_error(error)}"
        ) from error
    except (HfHubHTTPError, LocalTokenNotFoundError) as error:
        raise UserError(
            f"{label} is refused by the hub ({describe_error(error)}): log in with hf auth login, or set "
            "HF_TOKEN to a token that may write to this repository; all rows are kept, and the same "
            "command uploads them"
        ) from error
    except Exception as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{label} cannot be reached ({describe_error(error)}): check the network and HF_ENDPOINT; all "
            "rows are kept, and the same command uploads them"
        ) from error

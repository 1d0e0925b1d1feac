"""Whether a storage can be used, found out before anything expensive starts, and what to do if not."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from specdist.data.file_names import PROBE
from specdist.data.store.files import unique_tag
from specdist.data.store.object_store import CONDITIONAL, FIRST_RETRY_S, describe_error
from specdist.data.store.storage import StorePath, storage_path
from specdist.utils.errors import UserError

CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the machine a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or give the machine a service account",
    "azure": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "set HF_TOKEN, or run hf auth login",
}


def check_output(path: Path) -> None:
    """Raises :class:`UserError` if a run cannot be written to this storage: without credentials, permission
    or a bucket, or if objects cannot be created exclusively."""
    if not isinstance(path, StorePath):
        return
    protocol = path.store.protocol
    if protocol == "hf":
        raise UserError(
            f"--output {path}: a run is not written to a hub piece by piece: give a folder or a bucket, and "
            "--push_to_hub owner/name, which uploads the finished data set"
        )
    if protocol not in CONDITIONAL:
        known = ", ".join(f"{name}://" for name in sorted(CONDITIONAL))
        raise UserError(
            f"--output {path}: {protocol}:// has no conditional writes, with which replicas lease shards: "
            f"give --output a folder that all of them share, or a URL of {known}"
        )
    with explain(f"--output {path}", path):
        is_exclusive = path.store.check((path / PROBE).key, unique_tag())
    if not is_exclusive:
        raise UserError(
            f"--output {path}: this server ignores the condition If-None-Match of a write, so two replicas "
            "could lease the same shard: use a server that has conditional writes (AWS S3, MinIO since "
            "2024), or a folder that all replicas share"
        )


@contextlib.contextmanager
def reading(text: str) -> Iterator[Path]:
    """The path of a run, and what its store answers to the first requests; see :func:`explain`."""
    path = storage_path(text)
    with explain(text, path) if isinstance(path, StorePath) else contextlib.nullcontext():
        yield path


@contextlib.contextmanager
def explain(label: str, path: StorePath) -> Iterator[None]:
    """Make the first requests to a store within: they are given up sooner, and an OSError becomes a
    :class:`UserError` with a remedy."""
    store = path.store
    retry_s, store.retry_s = store.retry_s, min(store.retry_s, FIRST_RETRY_S)
    try:
        yield
    except OSError as error:
        raise UserError(f"{label} {_reason(error, path)}") from error
    finally:
        store.retry_s = retry_s


def _reason(error: OSError, path: StorePath) -> str:
    protocol = path.store.protocol
    kind = CONDITIONAL.get(protocol, protocol)
    bucket = path.key.split("/")[0]
    cause = error.__cause__
    if isinstance(error, FileNotFoundError):
        missing = f"there is no {protocol}://{bucket} ({describe_error(error)})"
        return f"cannot be used: {missing}: create it, or correct the URL"
    if cause is not None and "Credential" in type(cause).__name__:
        remedy = CREDENTIALS.get(kind, f"see fsspec's documentation of {protocol}://")
        return f"needs credentials, and none were found ({describe_error(cause)}): {remedy}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"is refused by the store ({describe_error(error)}): these credentials need the permission to "
            "list, read, write and delete objects there"
        )
    where = " (AWS_ENDPOINT_URL)" if kind == "s3" else ""
    return f"cannot be reached ({describe_error(error)}): check the network and the server's address{where}"

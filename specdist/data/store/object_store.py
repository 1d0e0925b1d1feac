"""Requests to an object store through fsspec: errors that mean something, and retries of those that pass.

Exclusive creation, on which leases and the publishing of shards rest, is a conditional write of the store
(S3: ``If-None-Match: *``; Google Cloud Storage: ``ifGenerationMatch=0``; Azure: no overwriting). fsspec has
it as ``mode="create"``. :meth:`ObjectStore.check` tries it out, since some servers ignore the condition.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdist.utils.errors import UserError

# Where fsspec's ``mode="create"`` is one request that the store refuses if the object exists: protocols, and
# the extra of specdist that installs each one's package.
CONDITIONAL = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "abfs": "azure", "abfss": "azure", "az": "azure",
}  # fmt: skip
S3 = frozenset({"s3", "s3a"})
# Requests are repeated here, and not by three libraries one in the other.
S3_SETTINGS = {
    "config_kwargs": {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60}
}
RETRY_S, FIRST_RETRY_S = 300.0, 20.0
FIRST_WAIT_S, MAX_WAIT_S = 0.2, 10.0
PERMANENT = (errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS, errno.EPERM, getattr(errno, "EREMCHG", -1))
# Errors that are an answer: the request is never tried again.
ANSWERS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)

logger = logging.getLogger(__name__)


class StoreError(OSError):
    """A request that failed for good, with the store's own words."""


@dataclass(frozen=True)
class ObjectInfo:
    """``st_size`` in bytes and ``st_mtime`` in seconds by the store's clock, as ``Path.stat`` has them;
    ``version``: changes with the content (an ETag), empty if the store tells none."""

    st_size: int
    st_mtime: float
    version: str


class ObjectStore:
    """The objects of one fsspec file system. Paths have no protocol: ``bucket/key``."""

    def __init__(self, protocol: str, filesystem: Any) -> None:
        self.protocol, self._filesystem = protocol, filesystem
        # How long a request that fails is repeated.
        self.retry_s = RETRY_S
        # Otherwise s3fs asks for the size of every object first.
        self._read_options = {"max_concurrency": 1} if protocol in S3 else {}

    def read(self, path: str) -> bytes:
        """Raises FileNotFoundError or :class:`StoreError`, as all requests do."""
        content: bytes = self._try(self._filesystem.cat_file, path, **self._read_options)
        return content

    def write(self, path: str, content: bytes) -> None:
        """Whole or not at all, in the place of what was there."""
        self._try(self._filesystem.pipe_file, path, content)

    def create(self, path: str, content: bytes) -> bool:
        """False if the object exists, unless an answer was lost and it is this one."""
        try:
            self._try(self._filesystem.pipe_file, path, content, mode="create")
        except FileExistsError:
            try:
                return self.read(path) == content
            except FileNotFoundError:
                return False
        return True

    def upload(self, file: Path, path: str, *, exclusively: bool = False) -> bool:
        """Whole or not at all; False if it was to be created and exists. If an answer is lost, the object may
        be this file's all the same. Raises FileNotFoundError if the file is gone."""
        options = {"mode": "create"} if exclusively else {}
        try:
            self._try(self._filesystem.put_file, str(file), path, **options)
        except FileExistsError:
            return False
        return True

    def download(self, path: str, file: Path) -> None:
        self._try(self._filesystem.get_file, path, str(file))

    def info(self, path: str) -> ObjectInfo:
        """Raises FileNotFoundError, also for what is a folder."""
        found = self._try(self._filesystem.info, path)
        if found["type"] != "file":
            raise FileNotFoundError(path)
        return _info(found)

    def copy(self, path: str, target: str) -> None:
        self._try(self._filesystem.cp_file, path, target)

    def remove(self, path: str) -> None:
        """Nothing if there is no such object."""
        with contextlib.suppress(FileNotFoundError):
            self._try(self._filesystem.rm_file, path)

    def listing(self, folder: str, prefix: str = "") -> dict[str, ObjectInfo | None]:
        """The names in a folder that begin with ``prefix``; None for those of folders. Empty if there is no
        such folder."""
        try:
            if prefix and self.protocol in S3:
                # Others can list the names with a prefix alone only with all that is below.
                options = {"maxdepth": 1, "withdirs": True, "detail": True}
                found = self._try(self._filesystem.find, folder, prefix=prefix, **options).values()
            else:
                found = self._try(self._filesystem.ls, folder, detail=True, refresh=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        start = f"{folder.rstrip('/')}/"
        named = {entry["name"].removeprefix(start).rstrip("/"): entry for entry in found}
        return {
            name: _info(entry) if entry["type"] == "file" else None
            for name, entry in named.items()
            if name and "/" not in name and name.startswith(prefix)
        }

    def below(self, folder: str) -> dict[str, ObjectInfo]:
        """All objects below a folder, by their names from there on."""
        try:
            found = self._try(self._filesystem.find, folder, detail=True)
        except FileNotFoundError:
            return {}
        start = f"{folder.rstrip('/')}/"
        return {name.removeprefix(start): _info(entry) for name, entry in found.items() if name != folder}

    def abort_uploads(self, folder: str) -> None:
        """Remove the parts of uploads to objects below a folder that were not completed, which S3 keeps."""
        if self.protocol not in S3:
            return
        bucket, _, prefix = folder.partition("/")
        for upload in self._try(self._filesystem.list_multipart_uploads, bucket):
            if upload["Key"].startswith(f"{prefix}/"):
                self._try(self._filesystem.abort_mpu, bucket, upload["Key"], upload["UploadId"])

    def check(self, path: str, tag: str) -> bool:
        """Create and remove an object beside ``path``; returns whether the store refuses to create it while
        it exists. Raises as :meth:`read` does."""
        probe = f"{path}.{tag}"
        try:
            return self.create(probe, b"1") and not self.create(probe, b"2")
        finally:
            self.remove(probe)

    def _try(self, request: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        deadline = time.monotonic() + self.retry_s
        wait_s = FIRST_WAIT_S
        while True:
            try:
                return request(*arguments, **options)
            except ANSWERS:
                raise
            except Exception as error:
                if _is_precondition(error):
                    raise FileExistsError(str(error)) from error
                if _is_permanent(error) or time.monotonic() + wait_s > deadline:
                    raise StoreError(_errno(error), describe_error(error)) from error
                logger.debug("a request to the store is repeated: %s", error)
            time.sleep(wait_s * random.uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, MAX_WAIT_S)


def connect(option: str, url: str, **settings: Any) -> tuple[ObjectStore, str]:
    """The store of a URL, and the path in it. Raises :class:`UserError` for an unknown protocol or a missing
    package."""
    import fsspec

    protocol = url.partition("://")[0].lower()
    try:
        # Other replicas change what is listed.
        options = {**(S3_SETTINGS if protocol in S3 else {}), **settings}
        filesystem = fsspec.filesystem(protocol, use_listings_cache=False, **options)
    except (ImportError, ValueError) as error:
        if protocol not in fsspec.available_protocols():
            known = ", ".join(f"{name}://" for name in ("s3", "gs", "abfs", "hf", "file"))
            raise UserError(
                f"{option}{url}: {protocol}:// is not a storage that fsspec knows: give a path, or a URL of "
                f"{known}, ..."
            ) from error
        extra = CONDITIONAL.get(protocol)
        remedy = f"pip install -e '.[{extra}]' in specdist's folder" if extra else str(error)
        raise UserError(f"{option}{url} needs a package that is not installed ({error}): {remedy}") from error
    if protocol in S3:
        filesystem.retries = 1
    return ObjectStore(protocol, filesystem), str(filesystem._strip_protocol(url)).rstrip("/")


def describe_error(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{getattr(error, 'strerror', None) or error or type(error).__name__}".split())


def _info(entry: dict[str, Any]) -> ObjectInfo:
    when = next((entry[name] for name in ("LastModified", "mtime", "created", "last_modified")
                 if entry.get(name) is not None), 0.0)  # fmt: skip
    when = when.timestamp() if hasattr(when, "timestamp") else when
    seconds = float(when) if isinstance(when, (int, float)) else 0.0
    version = next((entry[name] for name in ("ETag", "etag", "blob_id", "generation", "md5Hash")
                    if entry.get(name)), "")  # fmt: skip
    return ObjectInfo(int(entry["size"] or 0), seconds, str(version).strip('"'))


def _errno(error: BaseException) -> int:
    if isinstance(error, PermissionError):
        return errno.EACCES
    return getattr(error, "errno", None) or errno.EIO


def _is_precondition(error: BaseException) -> bool:
    """Whether a conditional write was refused: not all servers name the condition in their answer."""
    response = getattr(error.__cause__ or error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return code in ("PreconditionFailed", "412")


def _is_permanent(error: BaseException) -> bool:
    is_known = isinstance(error, (PermissionError, ValueError, TypeError, KeyError, ImportError))
    return is_known or getattr(error, "errno", None) in PERMANENT or "Credential" in type(error).__name__

"""Paths on an object store, beside local ones: what this package does with a file works on both.

A run on ``s3://bucket/run`` has the same files under the same names as one in a folder, and the same code
leases, publishes and reads them. What differs is here and in :mod:`specdist.data.store.files`:

- A :class:`StorePath` has those methods of ``Path`` that the package uses, one or a few requests each, and
  no others. Folders need not be made. An object is seen whole or not at all, and at once by all (S3, Google
  Cloud Storage and Azure promise this, for listings too).
- A lease, and the data of a finished shard, are created by a conditional write, where a file would be linked.
  Small files of an attempt lie on the store under names with its tag, as in a folder; its data waits in the
  cache directory, so that it travels once.
- Leases need no clock of the store: a heartbeat is an object that changes, or has not changed for long by the
  watcher's own clock.
- What grows or is mapped into memory lies in the *cache directory*, a local folder: the part logs of this
  machine's replicas, copied to the store from time to time; logs; copies of inputs; shards on their way.

A local folder keeps ``pathlib.Path``, and so its speed and guarantees.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from specdist.data.store.object_store import ObjectStore, connect
from specdist.utils.errors import UserError

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
LOCAL = ("file", "local")
NUM_THREADS = 16
Item = TypeVar("Item")
Result = TypeVar("Result")
WILDCARD = re.compile(r"[*?\[]")

if TYPE_CHECKING:
    _Path = Path
else:
    _Path = object


class StorePath(_Path):
    """An object or a folder of a store. To the type checker it is a ``Path``: functions of this package take
    either. ``cache_dir``: the local folder of this URL."""

    def __init__(self, store: ObjectStore, key: str, cache_dir: Path) -> None:
        self.store, self.key, self.cache_dir = store, key, cache_dir

    def __truediv__(self, name: Any) -> StorePath:
        # "a" / "" is "a", as it is for paths.
        return StorePath(self.store, str(PurePosixPath(self.key) / str(name)), self.cache_dir)

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.key).stem

    @property
    def parent(self) -> StorePath:
        return StorePath(self.store, str(PurePosixPath(self.key).parent), self.cache_dir)

    def with_name(self, name: str) -> StorePath:
        return self.parent / name

    def __str__(self) -> str:
        return f"{self.store.protocol}://{self.key}"

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __lt__(self, other: Any) -> bool:
        return self.key < other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def names(self, prefix: str = "") -> list[str]:
        """Names of the objects and folders in this folder that begin with ``prefix``."""
        return list(self.store.listing(self.key, prefix))

    def iterdir(self) -> Generator[StorePath, None, None]:
        return (self / name for name in self.names())

    def glob(self, pattern: str) -> Generator[StorePath, None, None]:
        """Wildcards in the last part of the pattern alone."""
        folder, _, last = pattern.rpartition("/")
        found = self / folder if folder else self
        prefix = WILDCARD.split(last)[0]
        return (found / name for name in found.names(prefix) if fnmatch.fnmatchcase(name, last))

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        """:class:`specdist.data.store.object_store.ObjectInfo`. Raises FileNotFoundError."""
        return self.store.info(self.key)

    def is_file(self) -> bool:
        try:
            self.store.info(self.key)
        except FileNotFoundError:
            return False
        return True

    exists = is_file

    def is_dir(self) -> bool:
        """A store has no folders: each can be written to."""
        return True

    def mkdir(self, mode: int = 0, parents: bool = False, exist_ok: bool = False) -> None:
        """See :meth:`is_dir`."""

    def rmdir(self) -> None:
        """See :meth:`is_dir`."""

    def open(self, mode: str = "r", *_: Any) -> Any:
        """Open the object to be read, as a whole."""
        assert mode == "rb", "objects are written as a whole"
        return io.BytesIO(self.read_bytes())

    def read_bytes(self) -> bytes:
        return self.store.read(self.key)

    def read_text(self, encoding: str | None = "utf-8", *_: Any) -> str:
        return self.read_bytes().decode(encoding or "utf-8")

    def write_bytes(self, content: Any) -> int:
        self.store.write(self.key, bytes(content))
        return len(content)

    def write_text(self, text: str, encoding: str | None = "utf-8", *_: Any) -> int:
        return self.write_bytes(text.encode(encoding or "utf-8"))

    def touch(self, *_: Any, **__: Any) -> None:
        self.write_bytes(b"")

    def create(self, content: bytes) -> bool:
        """Write an object that does not exist; of all callers, on any machine, one gets True."""
        return self.store.create(self.key, content)

    def unlink(self, missing_ok: bool = False) -> None:
        self.store.remove(self.key)

    def replace(self, target: Any) -> StorePath:
        """Rename the object in two steps: another may see both names. Raises FileNotFoundError."""
        self.store.copy(self.key, target.key)
        self.store.remove(self.key)
        return StorePath(self.store, target.key, self.cache_dir)

    def upload(self, file: Path, *, exclusively: bool = False) -> bool:
        """See :meth:`specdist.data.store.object_store.ObjectStore.upload`."""
        return self.store.upload(file, self.key, exclusively=exclusively)


def is_url(text: str) -> bool:
    return URL.match(text) is not None


def cache_folder(cache_dir: str | None = None) -> Path:
    """``--cache_dir``, or a folder of this user where the machine keeps temporary files."""
    return Path(cache_dir) if cache_dir else Path(tempfile.gettempdir()) / f"specdist-{os.getuid()}"


def local_folder(text: str, cache_dir: str | None = None) -> Path:
    """Where an output's local files lie: its folder, or a URL's in the cache directory. Asks no store."""
    if not is_url(text):
        return Path(text)
    protocol, _, rest = text.partition("://")
    if protocol.lower() in LOCAL:
        return Path(f"/{rest.lstrip('/')}")
    name = re.sub(r"[^\w.-]+", "-", rest.strip("/"))[-60:]
    digest = hashlib.sha256(text.rstrip("/").encode()).hexdigest()[:12]
    return cache_folder(cache_dir) / f"{name}-{digest}"


def storage_path(text: str, *, option: str = "", cache_dir: str | None = None, **settings: Any) -> Path:
    """A path as given: local, or a URL of which fsspec knows the protocol; ``file://`` is local.

    Raises :class:`UserError` for an unknown protocol or a missing package. ``settings``: of fsspec's file
    system.
    """
    local = local_folder(text, cache_dir)
    if not is_url(text) or text.partition("://")[0].lower() in LOCAL:
        return local
    store, key = connect(option, text, **settings)
    if not key:
        raise UserError(f"{option}{text} names no bucket: give a URL such as s3://bucket/folder")
    return StorePath(store, key, local)


def cached(path: Path) -> Path:
    """Where a file of a store is kept on this machine; its folder is made. A local path is its own."""
    if not isinstance(path, StorePath):
        return path
    digest = hashlib.sha256(path.parent.key.encode()).hexdigest()[:12]
    folder = path.cache_dir / "files" / digest
    folder.mkdir(parents=True, exist_ok=True)
    return folder / path.name


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """A file to be read or mapped: the local one itself, or a copy that is removed at the end (a mapping of
    it stays valid)."""
    if not isinstance(path, StorePath):
        yield path
        return
    path.cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="copy-", dir=path.cache_dir) as folder:
        file = Path(folder) / path.name
        path.store.download(path.key, file)
        yield file


def in_parallel(path: Path, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The function's results in order; on a store many requests are made at a time."""
    if not isinstance(path, StorePath):
        return [function(item) for item in items]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(function, items))


def write_through(path: StorePath, write: Any) -> None:
    """Upload what ``write`` writes into a file."""
    path.cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.cache_dir) as file:
        opened: BinaryIO = file  # type: ignore[assignment]
        write(opened)
        file.flush()
        path.upload(Path(file.name))

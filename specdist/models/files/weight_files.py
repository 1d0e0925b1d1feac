"""The weight files of a checkpoint: finding them, checking that they are complete, reading their tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specdist.models.files.damage import reading
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

SAFETENSORS_NAME, INDEX_SUFFIX = "model.safetensors", ".index.json"
# Other names of the same tensors.
MISTRAL_FILES = "consolidated*.safetensors"
# Kinds of plain numbers in safetensors' headers.
PLAIN_KINDS = {"F64", "F32", "F16", "BF16"}

logger = logging.getLogger(__name__)


def find_weight_files(
    option: str, name: str, folder: Path, *, first: str = SAFETENSORS_NAME
) -> tuple[Path, ...]:
    """The files that hold the weights: those that transformers reads where a folder holds several models. The
    log names what is left out. Raises :class:`UserError` if any is missing or damaged.

    ``first``: the file, or index, that config.json names (``transformers_weights``).
    """
    what = f"{option} {name}"
    files = _named_files(what, folder, first)
    if not files:
        but = f" but Mistral's own ({MISTRAL_FILES})" if any(folder.glob(MISTRAL_FILES)) else ""
        raise UserError(
            f"{what} has no *.safetensors files{but}: complete the download; or, if its weights are in "
            "another format, such as pickled *.bin files, load it once with transformers and save it with "
            "save_pretrained, which writes safetensors"
        )
    holders: dict[str, Path] = {}
    has_index = any(folder.glob(f"*{INDEX_SUFFIX}"))
    for path in files:
        with reading(f"{what}: {path.name} is not a whole safetensors file and"), open_weights(path) as file:
            names = file.names
        twice = next((each for each in names if holders.setdefault(each, path) != path), None)
        if twice is not None and not has_index:
            raise UserError(
                f"{what}: {holders[twice].name} and {path.name} both hold {twice}, and no index says which "
                "of them counts: move the files of the other model away"
            )
    left_out = sorted({path.name for path in folder.glob("*.safetensors")} - {path.name for path in files})
    if left_out:
        # Not a warning: of these every rank would give one.
        logger.info(
            "%s: its weights are those of %s, as in transformers: %s beside it is not read",
            what, files[0].name if len(files) == 1 else "its index", ", ".join(left_out),
        )  # fmt: skip
    return files


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[StoredTensors]:
    """The tensors of one file, each read on demand."""
    with safe_open(path, framework="pt") as file:
        yield StoredTensors(file)


def stored_shapes(paths: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in the files."""
    found: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with open_weights(path) as file:
            found |= {name: file.shape(name) for name in file.names}
    return found


class StoredTensors:
    """Tensors of a file by name: :meth:`shape` and :meth:`kind` of number (``BF16``, ``F8_E4M3``, as in
    safetensors headers) without reading the tensor; :meth:`read` reads it, :meth:`rows` a few of its rows."""

    def __init__(self, file: Any) -> None:
        """``file``: safetensors' own."""
        self._file = file
        self.names: list[str] = list(file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def kind(self, name: str) -> str:
        return str(self._file.get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        found: Tensor = self._file.get_tensor(name)
        return found

    def rows(self, name: str, rows: Sequence[int]) -> Tensor:
        part = self._file.get_slice(name)
        return torch.cat([part[row : row + 1] for row in rows])


def _named_files(what: str, folder: Path, first: str) -> tuple[Path, ...]:
    """The first file alone, else those that its index names, as in transformers; without both, all but
    Mistral's own."""
    if (folder / first).is_file() and not first.endswith(INDEX_SUFFIX):
        return (folder / first,)
    index_name = f"{first.removesuffix(INDEX_SUFFIX)}{INDEX_SUFFIX}"
    index = folder / index_name
    if not index.is_file():
        return tuple(sorted(path for path in folder.glob("*.safetensors") if not path.match(MISTRAL_FILES)))
    with reading(f"{what}: {index_name}"):
        values = parse_object(index.read_bytes())
        names = sorted(set(values["weight_map"].values()))
        # transformers needs it.
        if not isinstance(values["metadata"], dict):
            raise ValueError("its metadata is not an object")
        if not names:
            raise ValueError("its weight_map is empty")
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ValueError(f"it names {outside[0]!r}, which is not a file of this folder")
    files = tuple(folder / name for name in names)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise UserError(f"{what} lacks {missing[0]}, which {index_name} names: fetch it again")
    return files

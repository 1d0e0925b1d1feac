"""The weight files of a checkpoint: finding them, checking that they are complete, reading their tensors."""

from __future__ import annotations

import contextlib
import logging
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from specdist.models.files.damage import reading
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

SAFETENSORS_NAME, PICKLE_NAME = "model.safetensors", "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"
PICKLE_SUFFIX = ".bin"
# Other names of the same tensors.
MISTRAL_FILES = "consolidated*.safetensors"
# Kinds of plain numbers in safetensors' headers.
KINDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
PLAIN_KINDS = set(KINDS.values())

logger = logging.getLogger(__name__)


def find_weight_files(
    option: str, name: str, folder: Path, *, allows_pickle: bool, first: str = SAFETENSORS_NAME
) -> tuple[Path, ...]:
    """The files that hold the weights: those that transformers reads where a folder holds several models. The
    log names what is left out. Raises :class:`UserError` if any is missing or damaged.

    Pickled files are used only if there are no others and it is allowed; even then no code in them is run.
    ``first``: the file, or index, that config.json names (``transformers_weights``).
    """
    what = f"{option} {name}"
    files = _named_files(what, folder, first, "*.safetensors")
    if not files:
        files = _pickled_files(what, folder, allows_pickle=allows_pickle)
    holders: dict[str, Path] = {}
    has_index = any(folder.glob(f"*{INDEX_SUFFIX}"))
    for path in files:
        damage = f"{what}: {path.name} is not a whole {_kind(path)} file and"
        with reading(damage), open_weights(path) as file:
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
    if path.suffix == PICKLE_SUFFIX:
        # weights_only: tensors and plain containers; anything that would call a function is an error.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
            raise ValueError("it holds other things than named tensors")
        yield StoredTensors(
            list(tensors),
            lambda name: tuple(tensors[name].shape),
            lambda name: tensors[name].clone(),
            lambda name: KINDS.get(tensors[name].dtype, str(tensors[name].dtype).removeprefix("torch.")),
            lambda name, rows: tensors[name][list(rows)],
        )
        return
    with safe_open(path, framework="pt") as file:
        yield StoredTensors(
            list(file.keys()),
            lambda name: tuple(file.get_slice(name).get_shape()),
            file.get_tensor,
            lambda name: str(file.get_slice(name).get_dtype()),
            lambda name, rows: torch.cat([file.get_slice(name)[row : row + 1] for row in rows]),
        )


def stored_shapes(paths: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in the files."""
    found: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with open_weights(path) as file:
            found |= {name: file.shape(name) for name in file.names}
    return found


class StoredTensors:
    """Tensors by name: :meth:`shape` and :meth:`kind` of number (``BF16``, ``F8_E4M3``, as in safetensors
    headers) without reading the tensor; :meth:`read` reads it, :meth:`rows` a few of its rows."""

    def __init__(
        self,
        names: list[str],
        shape: Callable[[str], tuple[int, ...]],
        read: Callable[[str], Tensor],
        kind: Callable[[str], str],
        rows: Callable[[str, Sequence[int]], Tensor],
    ) -> None:
        self.names = names
        self.shape = shape
        self.read = read
        self.kind = kind
        self.rows = rows


def _kind(path: Path) -> str:
    return "PyTorch" if path.suffix == PICKLE_SUFFIX else "safetensors"


def _named_files(what: str, folder: Path, first: str, pattern: str) -> tuple[Path, ...]:
    """The first file alone, else those that its index names, as in transformers; without both, all that match
    the pattern."""
    if (folder / first).is_file() and not first.endswith(INDEX_SUFFIX):
        return (folder / first,)
    index_name = f"{first.removesuffix(INDEX_SUFFIX)}{INDEX_SUFFIX}"
    index = folder / index_name
    if not index.is_file():
        return tuple(sorted(path for path in folder.glob(pattern) if not path.match(MISTRAL_FILES)))
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


def _pickled_files(what: str, folder: Path, *, allows_pickle: bool) -> tuple[Path, ...]:
    if not list(folder.glob(f"*{PICKLE_SUFFIX}")):
        but = f" but Mistral's own ({MISTRAL_FILES})" if any(folder.glob(MISTRAL_FILES)) else ""
        raise UserError(f"{what} has no *.safetensors files{but}: is the download complete?")
    if not allows_pickle:
        raise UserError(
            f"{what} has no *.safetensors, only pickled *{PICKLE_SUFFIX} weights, a format that can carry "
            "code: load it once with transformers and save it with save_pretrained, which writes "
            "safetensors, or pass --allow_pickle to read its tensors, and only tensors"
        )
    return _named_files(what, folder, PICKLE_NAME, f"pytorch_model*{PICKLE_SUFFIX}")

"""Texts of earlier runs, or any others, whose n-grams are looked up: ``--ngram_texts``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet

from specdist.config.generate import GenerateConfig
from specdist.data.formats.inputs import find_files
from specdist.data.formats.text import is_text
from specdist.data.run.manifest import Manifest
from specdist.job.texts.tokens import load_tokenizer
from specdist.kernels import cpu_library
from specdist.models.files.checkpoint import Checkpoint
from specdist.policies.costs import CostModel
from specdist.policies.ngrams.block_lengths import NgramSettings
from specdist.policies.ngrams.text_store import TextSettings
from specdist.utils.errors import UserError, first_line

# The column of a run's completions first, then what data sets call a text.
COLUMNS = ("completion", "text", "response", "output", "answer")
MANIFEST, SHARDS = "manifest.json", "shards"
BATCH = 1024
# Of a token to be proposed where measured costs decide whether it is verified.
LEAST_CHANCE = 0.02


@dataclass(frozen=True)
class NgramTexts:
    """Token ids, text after text, the last ones that there is room for; ``sha256`` of all of them."""

    token_ids: list[np.ndarray]
    sha256: str


def read_ngram_texts(config: GenerateConfig, target: Checkpoint, vocab_size: int) -> NgramTexts | None:
    """None without ``--ngram_texts``. Raises :class:`UserError`, also where
    compiled code to look n-grams up is missing."""
    if not config.uses_ngrams:
        return None
    _check_library()
    if not config.ngram_texts:
        return None
    tokenizer = load_tokenizer(target)
    found: list[np.ndarray] = []
    for name in config.ngram_texts:
        path = Path(name)
        if is_run_of(path, vocab_size):
            found += _completions(path)
            continue
        texts = _texts(path, config.ngram_column)
        for begin in range(0, len(texts), BATCH):
            encoded = tokenizer(texts[begin : begin + BATCH], add_special_tokens=False)["input_ids"]
            found += [np.array(ids, np.int32) for ids in encoded if ids and max(ids) < vocab_size]
    found = _latest([ids for ids in found if ids.max() < vocab_size], config.ngram_size)
    digest = hashlib.sha256()
    for ids in found:
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return NgramTexts(found, digest.hexdigest())


def ngram_settings(
    config: GenerateConfig, texts: NgramTexts | None, costs: CostModel | None, *, learns_together: bool
) -> NgramSettings | None:
    """What is looked up in a run; None without. ``costs``: of the run, if it has measured any.
    ``learns_together``: where the seed fixes the tokens under rejection, a block may depend on its own
    sequence alone."""
    if not config.uses_ngrams:
        return None
    settings = TextSettings()
    if texts is not None or config.ngram_rows:
        said = finished_rows(config.output, config.ngram_size) if config.ngram_rows else []
        settings = TextSettings(
            num_tokens=config.ngram_size,
            given=[*(texts.token_ids if texts else ()), *said],
            adds_sequences=config.ngram_rows,
        )
    return NgramSettings(
        max_tokens=config.block_tokens - 1,
        least_chance=LEAST_CHANCE if costs else config.policy_options.get("stop_probability", 0.0),
        learns_together=learns_together,
        costs=costs,
        texts=settings,
    )


def _check_library() -> None:
    """Raises :class:`UserError` where nothing can be looked up."""
    try:
        cpu_library.ngrams_library()
    except cpu_library.NOT_COMPILED as error:
        raise UserError(
            f"--draft ngram looks n-grams up in compiled code, which cannot be made ({first_line(error)}): "
            "it takes a C compiler (gcc, clang, or what the variable CC names) and a folder that can be "
            "written ($XDG_CACHE_HOME or ~/.cache); or leave --draft out"
        ) from error


@cache
def finished_rows(output: str, ngram_size: int) -> list[np.ndarray]:
    """Completions of the shards that are finished in a local folder: a relaunch remembers what it said."""
    folder = Path(output)
    return _latest(_completions(folder), ngram_size) if any((folder / SHARDS).rglob("*.arrow")) else []


def _latest(texts: list[np.ndarray], num_tokens: int) -> list[np.ndarray]:
    """The last ones that there is room for: the oldest would be overwritten by those after them."""
    for index in range(len(texts), 0, -1):
        num_tokens -= len(texts[index - 1]) + 1
        if num_tokens < 0:
            return texts[index:]
    return texts


def is_run_of(path: Path, vocab_size: int) -> bool:
    """Whether it is the folder of a run whose target had as many tokens: then its token ids are taken."""
    if not (path / MANIFEST).is_file():
        return False
    try:
        return bool(Manifest.read(path / MANIFEST).info.get("vocab_size") == vocab_size)
    except (OSError, ValueError):
        return False


def _completions(path: Path) -> list[np.ndarray]:
    found = []
    for file in _shards(path):
        column = _table(file)["completion_ids"].combine_chunks()
        ids, lengths = column.flatten().to_numpy(), pa.compute.list_value_length(column).to_numpy()
        found += np.split(np.asarray(ids, np.int32), np.cumsum(lengths))[:-1]
    return [ids for ids in found if len(ids)]


def _shards(path: Path) -> list[Path]:
    files = sorted((path / SHARDS).rglob("*.arrow"))
    if not files:
        raise UserError(f"--ngram_texts {path}: the run has no finished shard")
    return files


def _texts(path: Path, column_name: str | None) -> list[str]:
    """Of a run's folder the completions, else the texts of this column, or of the first with a known name."""
    if (path / MANIFEST).is_file():
        files = _shards(path)
    else:
        try:
            files = find_files(path)
        except UserError as error:
            raise UserError(str(error).replace("--prompts", "--ngram_texts")) from error
    found: list[str] = []
    for file in files:
        table = _table(file)
        names = COLUMNS if column_name is None else (column_name,)
        columns = [name for name in names if name in table.column_names]
        if not columns:
            raise UserError(
                f"--ngram_texts {file} has none of the columns {', '.join(names)}, but "
                f"{', '.join(table.column_names)}: name the one with the text by --ngram_column"
            )
        column = table[columns[0]]
        if not is_text(column.type):
            raise UserError(f"--ngram_texts {file}: column {columns[0]!r} is {column.type}, not text")
        found += [text for text in column.to_pylist() if text]
    return found


def _table(file: Path) -> pa.Table:
    try:
        if file.suffix == ".parquet":
            return pa.parquet.read_table(file)
        if file.suffix == ".arrow":
            with pa.memory_map(str(file)) as source:
                return pa.ipc.open_file(source).read_all()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"--ngram_texts {file} cannot be read: {error}") from error
    raise UserError(f"--ngram_texts {file}: give Arrow or Parquet files, or the folder of a run")

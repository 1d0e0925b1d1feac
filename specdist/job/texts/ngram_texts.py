"""Texts of earlier runs, or any others, whose n-grams are looked up: ``--ngram_texts``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute

from specdist.config.generate import GenerateConfig
from specdist.data.formats.inputs import find_files, read_inputs
from specdist.data.formats.jsonl import PromptColumn
from specdist.data.formats.text import is_text
from specdist.data.run.manifest import Manifest
from specdist.data.run.reading import read_columns
from specdist.data.run.run_folder import RunFolder
from specdist.job.texts.tokens import load_tokenizer
from specdist.kernels import cpu_library
from specdist.models.files.checkpoint import Checkpoint
from specdist.policies.costs import CostModel
from specdist.policies.ngrams.block_lengths import NgramSettings
from specdist.policies.ngrams.text_store import TextSettings
from specdist.utils.errors import UserError, first_line

# The column of a run's completions first, then what data sets call a text.
COLUMNS = ("completion", "text", "response", "output", "answer")
MANIFEST = "manifest.json"
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
        if (path / MANIFEST).is_file() and not _shards(path):
            raise UserError(f"--ngram_texts {path}: the run has no finished shard")
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
    return _latest(_completions(Path(output)), ngram_size)


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
        column = read_columns(file, ["completion_ids"])["completion_ids"].combine_chunks()
        ids, lengths = column.flatten().to_numpy(), pa.compute.list_value_length(column).to_numpy()
        found += np.split(np.asarray(ids, np.int32), np.cumsum(lengths))[:-1]
    return [ids for ids in found if len(ids)]


def _shards(path: Path) -> list[Path]:
    """Of the finished shards of a run."""
    folder = RunFolder(path)
    return [folder.data_path(shard) for shard in folder.complete_shards()]


def _texts(path: Path, column_name: str | None) -> list[str]:
    """Of a run's folder the completions, else the texts of this column, or of the first with a known name."""
    try:
        files = _shards(path) if (path / MANIFEST).is_file() else find_files(path)
        rows = read_inputs(files, PromptColumn("", is_chat=False)).rows
    except UserError as error:
        raise UserError(str(error).replace("--prompts", "--ngram_texts")) from error
    names = COLUMNS if column_name is None else (column_name,)
    columns = [name for name in names if name in rows.schema.names]
    if not columns:
        raise UserError(
            f"--ngram_texts {files[0]} has none of the columns {', '.join(names)}, but "
            f"{', '.join(rows.schema.names)}: name the one with the text by --ngram_column"
        )
    kind = rows.schema.field(columns[0]).type
    if not is_text(kind):
        raise UserError(f"--ngram_texts {files[0]}: column {columns[0]!r} is {kind}, not text")
    return [text for text in rows.values(columns[0]) if text]

"""``--draft ngram``: the job without a draft model, whose candidates are from a row's own tokens."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from specdist.data.run.manifest import Manifest
from specdist.job.texts.ngram_texts import finished_rows
from specdist.kernels import cpu_library
from specdist.training.collect.config import CollectConfig
from specdist.utils.errors import UserError
from tests.job.launching import Ended, read_output, refused, run_here, shard_stats
from tests.job.pair import Pair, write_arrow
from tests.job.ranks import fork_ranks

NGRAMS: dict[str, Any] = {"draft": "ngram", "policy": "confidence", "overlap": None}


@pytest.fixture(scope="module")
def repetitive(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Prompts that say everything twice."""
    path = tmp_path_factory.mktemp("prompts") / "twice.arrow"
    given = pa.ipc.open_file(pa.OSFile(str(options["prompts"]))).read_all()["prompt"].to_pylist()
    write_arrow(path, {"prompt": [f"{text[:60]} {text[:60]} {text[:20]}" for text in given]})
    return options | {"prompts": path}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.2, "acceptance": "gumbel"}], ids=["greedy", "gumbel"]
)
def test_the_output_is_that_of_the_target_alone(
    repetitive: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """In one process, and on the target's two ranks, of which one remembers."""
    alone, ngrams, ranks = (tmp_path / name for name in ("alone", "ngrams", "ranks"))
    assert run_here(**(repetitive | settings | {"draft": None}), output=alone).code == 0
    found = [
        run_here(**(repetitive | settings | NGRAMS), trace=True, output=ngrams),
        # By the measured costs of the target's passes, by which nothing may be worth a try.
        fork_ranks(2, **(repetitive | settings | NGRAMS | {"policy": None}), tp_size=2, output=ranks),
    ]
    assert "costs" in Manifest.read(ranks / "manifest.json").info
    assert found[0].totals["draft_acceptance_rate"] > 0.02
    for ended, output in zip(found, (ngrams, ranks), strict=True):
        assert ended.totals["exact"]
        assert ended.totals["draft_placement"] is None
        assert read_output(output)["completion_ids"] == read_output(alone)["completion_ids"]


def test_a_run_says_what_its_candidates_are_from(repetitive: dict[str, Any], tmp_path: Path) -> None:
    """Under rejection the same seed gives the same tokens in another batch; and no other draft goes on."""
    options = repetitive | NGRAMS | {"temperature": 0.2, "model_impl": "transformers"}
    runs = tmp_path / "run", tmp_path / "narrow"
    ended: list[Ended] = [
        run_here(**options, max_num_seqs=rows, max_draft_tokens=20, output=output)
        for rows, output in zip((32, 3), runs, strict=True)
    ]
    assert ended[0].totals["draft_acceptance_rate"] > 0
    assert read_output(runs[0])["completion_ids"] == read_output(runs[1])["completion_ids"]
    manifest = Manifest.read(runs[0] / "manifest.json")
    assert manifest.info["reproducibility"] == "tokens" and manifest.info["draft"] == "ngram"
    assert "memory" in manifest.fingerprint["draft"]
    again = run_here(**(options | {"draft": None}), output=runs[0])
    assert again.code == 2 and "draft" in again.stderr


def test_jobs_that_need_a_draft_model_say_so(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--draft ngram is not a model, and this job needs a draft model"):
        CollectConfig(
            kind="acceptance",
            prompts=str(pair.prompts),
            target="large",
            draft="ngram",
            output=str(tmp_path),
        )


def test_without_a_compiler_n_grams_are_refused(
    repetitive: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any model is loaded."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    cpu_library.ngrams_library.cache_clear()
    ended = run_here(**(repetitive | NGRAMS), output=tmp_path / "run")
    refused(ended, "--draft ngram", "no C compiler was found", "takes a C compiler")
    assert not (tmp_path / "run").exists()
    cpu_library.ngrams_library.cache_clear()


def test_what_an_earlier_run_has_said_is_remembered(repetitive: dict[str, Any], tmp_path: Path) -> None:
    """A second epoch greedily: nearly every token is known, and no token another. The same texts are part of
    the run, and give the same tokens in another batch also under rejection; finished rows do not."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_here(**(repetitive | NGRAMS), output=first).code == 0
    again = run_here(**(repetitive | NGRAMS), ngram_texts=[first], output=second)
    assert read_output(second)["completion_ids"] == read_output(first)["completion_ids"]
    passes = [sum(stats["num_row_steps"] for stats in shard_stats(each)) for each in (first, second)]
    assert again.totals["exact"] and passes[1] < 0.6 * passes[0], passes
    other = run_here(**(repetitive | NGRAMS), output=second)
    assert other.code == 2 and "ngram_texts" in other.stderr
    sampled = repetitive | NGRAMS | {"temperature": 0.2, "model_impl": "transformers", "limit": 12}
    runs = {
        name: {"ngram_texts": [first], "max_num_seqs": rows, "ngram_rows": has_rows or None}
        for name, rows, has_rows in (("wide", 32, False), ("narrow", 3, False), ("rows", 4, True))
    }
    for name, options in runs.items():
        assert run_here(**sampled, **options, max_draft_tokens=20, output=tmp_path / name).code == 0
    # A relaunch begins with the shards that it has finished.
    finished_rows.cache_clear()
    begun = finished_rows(str(tmp_path / "rows"), 2**20)
    said = read_output(tmp_path / "rows")["completion_ids"].to_pylist()
    assert [ids.tolist() for ids in begun] == [ids for ids in said if ids]
    assert len(finished_rows(str(tmp_path / "rows"), 40)) < len(begun) and not finished_rows("nowhere", 40)
    kinds = [Manifest.read(tmp_path / name / "manifest.json").info["reproducibility"] for name in runs]
    assert kinds == ["tokens", "tokens", "distribution"]
    wide, narrow = (read_output(tmp_path / name)["completion_ids"] for name in ("wide", "narrow"))
    assert wide == narrow


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ["a"]}, "has none of the columns completion, text"),
        ({"text": [1]}, "column 'text' is int64, not text"),
    ],
)
def test_texts_that_cannot_be_read_for_n_grams(
    columns: dict[str, Any], message: str, options: dict[str, Any], no_models: None, tmp_path: Path
) -> None:
    write_arrow(tmp_path / "texts.arrow", columns)
    ended = run_here(**(options | NGRAMS), ngram_texts=[tmp_path / "texts.arrow"], output=tmp_path / "run")
    assert ended.code == 2 and message in ended.stderr
    missing = run_here(**(options | NGRAMS), ngram_texts=[tmp_path / "none"], output=tmp_path / "run")
    assert missing.code == 2 and "--ngram_texts" in missing.stderr and "no such file" in missing.stderr

"""``--draft ngram``: the job without a draft model, whose candidates are from a row's own tokens."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from specdist.data.run.manifest import Manifest
from tests.job.launching import Ended, read_output, run_here
from tests.job.pair import write_arrow
from tests.job.ranks import fork_ranks

NGRAMS: dict[str, Any] = {"draft": "ngram", "policy": "fixed", "overlap": None}


@pytest.fixture(scope="module")
def repetitive(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Prompts that say everything twice."""
    path = tmp_path_factory.mktemp("prompts") / "twice.arrow"
    given = pa.ipc.open_file(pa.OSFile(str(options["prompts"]))).read_all()["prompt"].to_pylist()
    write_arrow(path, {"prompt": [f"{text[:60]} {text[:60]} {text[:20]}" for text in given]})
    return options | {"prompts": path}


@pytest.mark.ranks
def test_the_output_is_that_of_the_target_alone(repetitive: dict[str, Any], tmp_path: Path) -> None:
    """In one process, and on the target's two ranks, of which one remembers."""
    settings = {"temperature": 0.2, "acceptance": "gumbel"}
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
        run_here(**options, max_num_seqs=rows, output=output)
        for rows, output in zip((32, 3), runs, strict=True)
    ]
    assert ended[0].totals["draft_acceptance_rate"] > 0
    assert read_output(runs[0])["completion_ids"] == read_output(runs[1])["completion_ids"]
    manifest = Manifest.read(runs[0] / "manifest.json")
    assert manifest.info["reproducibility"] == "tokens" and manifest.info["draft"] == "ngram"
    assert "prompt lookup" in manifest.fingerprint["draft"]
    again = run_here(**(options | {"draft": None}), output=runs[0])
    assert again.code == 2 and "draft" in again.stderr

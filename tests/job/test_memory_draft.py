"""``--draft memory``: the job without a draft model, whose candidates are from a row's own tokens."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from specdist.collecting.config import CollectConfig
from specdist.data import Manifest
from specdist.utils.errors import UserError
from tests.job.launching import Ended, read_output, run_here, shard_stats
from tests.job.pair import Pair, write_arrow
from tests.job.ranks import fork_ranks

MEMORY: dict[str, Any] = {"draft": "memory", "policy": None, "overlap": None}


BESIDE: dict[str, Any] = {"memory": True, "num_draft_tokens": 1}


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
    """In one process, and on the target's two ranks, of which one remembers; beside a draft model, in
    one process or on a rank of its own."""
    alone, memory, ranks = (tmp_path / name for name in ("alone", "memory", "ranks"))
    assert run_here(**(repetitive | settings | {"draft": None}), output=alone).code == 0
    found = [
        run_here(**(repetitive | settings | MEMORY), trace=True, output=memory),
        fork_ranks(2, **(repetitive | settings | MEMORY), tp_size=2, output=ranks),
    ]
    for ended, output in zip(found, (memory, ranks), strict=True):
        assert ended.totals["exact"] and ended.totals["draft_acceptance_rate"] > 0.02
        assert ended.totals["draft_placement"] is None
        assert read_output(output)["completion_ids"] == read_output(alone)["completion_ids"]
    options, output = repetitive | settings | BESIDE, tmp_path / "beside"
    ended = fork_ranks(2, **options, output=output) if settings else run_here(**options, output=output)
    assert read_output(output)["completion_ids"] == read_output(alone)["completion_ids"]
    num_memory_tokens = sum(stats["num_memory_tokens"] for stats in shard_stats(output))
    assert 0 < num_memory_tokens < sum(stats["num_draft_tokens"] for stats in shard_stats(output))


def test_a_run_says_what_its_candidates_are_from(repetitive: dict[str, Any], tmp_path: Path) -> None:
    """Under rejection the same seed gives the same tokens in another batch; and no other draft goes on."""
    options = repetitive | MEMORY | {"temperature": 0.2, "model_impl": "transformers"}
    runs = tmp_path / "run", tmp_path / "narrow"
    ended: list[Ended] = [
        run_here(**options, max_num_seqs=rows, max_draft_tokens=20, output=output)
        for rows, output in zip((32, 3), runs, strict=True)
    ]
    assert ended[0].totals["draft_acceptance_rate"] > 0
    assert read_output(runs[0])["completion_ids"] == read_output(runs[1])["completion_ids"]
    manifest = Manifest.read(runs[0] / "manifest.json")
    assert manifest.info["reproducibility"] == "tokens" and manifest.info["draft"] == "memory"
    assert "memory" in manifest.fingerprint["draft"]
    beside = run_here(**(options | {"draft": repetitive["draft"]}), memory=True, output=runs[0])
    assert beside.code == 2 and "memory" in beside.stderr
    again = run_here(**(options | {"draft": None}), output=runs[0])
    assert again.code == 2 and "draft" in again.stderr


def test_jobs_that_need_a_draft_model_say_so(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--draft memory is not a model, and this job needs a draft model"):
        CollectConfig(
            kind="acceptance",
            prompts=str(pair.prompts),
            target="large",
            draft="memory",
            output=str(tmp_path),
        )

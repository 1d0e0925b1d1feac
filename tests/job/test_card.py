"""The card of a run folder: its contents, and that libraries understand it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import yaml

import specdist
from specdist.data.columns import OUTPUT_COLUMNS
from specdist.data.stats.rows import output_schema
from specdist.data.stats.shard import Stats
from specdist.job.totals.card import card_text
from specdist.job.totals.spending import chosen_options
from specdist.policies.registry import resolve_policy_options
from tests.finished_runs import manifest_with
from tests.job.launching import Ended, run_here

INPUTS = pa.schema({"reference": pa.string(), "odd | `name`\n# x": pa.int64()})


def text(is_exact: bool = True, num_completions: int = 14, num_cut: int = 0, **changes: Any) -> str:
    total = Stats(num_completions=num_completions, num_cut_completions=num_cut)
    return card_text(manifest_with(**changes), output_schema(INPUTS, is_exact=is_exact), total)


def front_matter(card: str) -> dict[str, Any]:
    _, matter, _ = card.split("---\n", 2)
    return yaml.safe_load(matter)


def test_the_card_of_a_run_says_what_was_run(tmp_path: Path) -> None:
    card = text()
    assert "# Completions by large of data/prompts.arrow" in card
    assert "14 completions of 7 prompts, generated with specdist by speculative decoding." in card
    assert "The completions are exact" in card and "The seed fixes the tokens" in card
    for row in ("| target | `large` |", "| draft | `lab/small` |", "| policy | `svip` |", "| top_p | `0.9` |",
                "| stop_root_entropy | `0.3` |", "| max_draft_tokens | `20` |"):  # fmt: skip
        assert row in card
    assert "| top_k" not in card and "num_draft_tokens |" not in card.split("## Columns")[0]
    for name in OUTPUT_COLUMNS:
        assert f"| `{name}` | " in card
    assert "| `reference` | string | an input column, unchanged |" in card
    assert "2411.18462" in card and "2302.01318" in card and "2502.04557" not in card
    assert "/models" not in card, "whose folders these were is nobody's business"


def test_the_card_names_every_option_that_was_chosen_and_what_a_constraint_does() -> None:
    """A limit of the batch is in no fingerprint; what is as by default, with this policy, says nothing."""
    own = {"draft": "lab/small", "policy": "goodput", **resolve_policy_options("goodput", {}), "stop": []}
    given = {**own, "max_num_seqs": 3, "json_schema": "/home/me/s.json", "prompt_column": "prompt"}
    assert chosen_options(given).keys() == {"max_num_seqs", "json_schema"}
    card = card_text(manifest_with(constraint="x"), output_schema(INPUTS, is_exact=True), Stats(), given)
    assert "| max_num_seqs | `3` |" in card and "| json_schema | `s.json` |" in card
    assert "which these allow at each place" in card and "allow at each place" not in text()


def test_error_rows_are_not_completions() -> None:
    """And completions that were cut are reported: both could be mistaken for answers."""
    assert "error" not in text().split("## How")[0] and "were cut" not in text()
    card = text(num_completions=11, num_cut=2)
    assert "11 completions of 7 prompts, generated" in card and "14 completions" not in card
    assert "3 more rows have an error instead of a completion (`finish_reason` is `error`)." in card
    assert "2 of the completions were cut by `max_new_tokens` or `max_seq_len`" in card
    assert "1 more row has an error" in text(num_completions=13)


def test_a_lossy_run_warns() -> None:
    card = text(is_exact=False, policy="sprinter", info={"exact": False})
    assert "do not follow the target's own distribution" in card and "are exact" not in card
    assert "2502.04557" in card


@pytest.mark.parametrize("name", ["---\nx: y", "<script>", "`|`"])
def test_unusual_names_are_escaped(name: str) -> None:
    card = text(stop=[name], info={"target": name, "prompts": name})
    assert front_matter(card)["configs"][0]["config_name"] == "default"
    assert " ".join(name.split()) in front_matter(card)["pretty_name"]
    lines = card.splitlines()
    assert "<script>" not in "".join(line for line in lines if line.startswith("# "))
    assert lines.count("---") == 2 and len([line for line in lines if line.startswith("# ")]) == 1
    rows = [line for line in lines if line.startswith("| ")]
    assert all(line.endswith(" |") for line in rows) and any("odd " in row and "# x" in row for row in rows)


def test_libraries_read_the_folder_of_a_run(
    greedy: tuple[Path, Ended], options: dict[str, Any], tmp_path: Path
) -> None:
    """A run folder is a data set as it is; relaunching a complete run gives the same card."""
    output = tmp_path / "run"
    shutil.copytree(greedy[0], output)
    rows = datasets.load_dataset(str(output), split="train", cache_dir=str(tmp_path / "cache"))
    run = specdist.load_run(output)
    assert rows.to_list() == run.dataset.to_list() and len(rows) == 24
    assert rows.column_names == [*OUTPUT_COLUMNS, "reference"]
    # The last line that the job printed; the folder has another name here.
    assert {**run.statistics, "output": None} == {**greedy[1].totals, "output": None}
    card = (output / "README.md").read_bytes()
    (output / "README.md").unlink()
    assert run_here(**options, output=output).code == 0
    assert (output / "README.md").read_bytes() == card

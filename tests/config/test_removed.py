"""Options that earlier versions had are refused by name, with what to do instead."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from specdist import SpeculativeLLM
from specdist.config.arguments import parse_arguments
from specdist.config.generate import parse_generate_config
from specdist.config.removed import OF_BENCHMARK, OF_DISTILL, OF_GENERATE, OF_PLAN, with_present_names
from specdist.lab.benchmark.config import BenchmarkConfig
from specdist.lab.plan.options import PlanConfig
from specdist.training.drafts.config import DistillConfig
from specdist.utils.errors import UserError
from tests.lab.benchmark.config import ComparisonConfig
from tests.lab.emulation.config import EmulationConfig
from tests.lab.plan.validate import ValidationConfig

NEEDED = ["--target=large", "--draft=small", "--prompts=p", "--output=o"]
# By name: a value that made use of it, those in the file of a run that did not, and of the remedy.
REMOVED = {
    "claims": ("folder", ("null",), "called --leases now"),
    "claim_timeout": ("30", ("60.0", "60"), "called --lease_timeout now"),
    "spool": ("folder", ("null",), "called --cache_dir now"),
    "draft_memory": ("runs/old", ("null",), "called --ngram_texts now"),
    "memory_column": ("text", ("null",), "called --ngram_column now"),
    "memory_rows": ("true", ("false",), "called --ngram_rows now"),
    "memory_size": ("4096", ("4194304",), "called --ngram_size now"),
    "memory": ("true", ("false",), "use --draft ngram without a draft model"),
    "adapt_draft": ("true", ("false",), "jobs/distill.py, and go on with --draft"),
    "adapt_rate": ("0.001", ("null",), "jobs/distill.py"),
    "adapt_batch": ("64", ("512",), "jobs/distill.py"),
    "adapt_buffer": ("4096", ("1048576",), "jobs/distill.py"),
    "adapt_interval": ("4", ("16",), "jobs/distill.py"),
    "adapt_margin": ("0.1", ("0.002",), "jobs/distill.py"),
    "adapt_memory": ("16GiB", ("null",), "jobs/distill.py"),
    "num_targets": ("3", ("1",), "launch a replica for each target"),
    "num_drafts": ("2", ("1",), "--draft_placement shared"),
    "draft_timeout": ("30", ("60.0", "60"), "launch a replica for each target"),
    "max_restarts": ("0", ("3",), "launch a replica for each target"),
}
OF_DISTILLING = {
    "kind": ("eagle3", "model", "speculators or .*SpecForge"),
    "draft_vocab_size": ("100", "null", "speculators or .*SpecForge"),
    "unrolled_steps": ("2", "5", "speculators or .*SpecForge"),
}


@pytest.mark.parametrize(
    ("name", "value", "now"),
    [("draft", "memory", "ngram"), ("overlap", "none", "synchronous"), ("overlap", "ahead", "asynchronous")],
)
def test_a_value_that_has_another_name_is_refused_by_it(name: str, value: str, now: str) -> None:
    """On the command line, and from Python."""
    message = f"^--{name} {value} is called --{name} {now} now$"
    with pytest.raises(UserError, match=message):
        parse_generate_config([*(each for each in NEEDED if f"--{name}" not in each), f"--{name}={value}"])
    with pytest.raises(UserError, match=message):
        SpeculativeLLM("large", **({"draft": "small"} | {name: value}))


def test_a_run_of_an_earlier_version_has_the_present_names() -> None:
    earlier = {"overlap": "ahead", "memory_rows": True, "draft_memory": "abc", "seed": 1}
    present = {"overlap": "asynchronous", "ngram_rows": True, "ngram_texts": "abc", "seed": 1}
    assert with_present_names(earlier) == present == with_present_names(present)
    assert with_present_names({"overlap": "auto"}) == {"overlap": "auto"} and not with_present_names({})


def test_all_of_them_are_tested() -> None:
    assert OF_GENERATE.keys() == REMOVED.keys() and OF_DISTILL.keys() == OF_DISTILLING.keys()


@pytest.mark.parametrize("name", REMOVED)
def test_it_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """On the command line, in a YAML file, and from Python; the file of an earlier run that did not use it is
    read as before."""
    used, unused, remedy = REMOVED[name]
    message = f"{name} is not an option any more: .*{remedy}"
    with pytest.raises(UserError, match=f"^--{message}"):
        parse_generate_config([*NEEDED, f"--{name}={used}"])
    file = tmp_path / "run.yaml"
    file.write_text(f"seed: 3\n{name}: {used}\n")
    with pytest.raises(UserError, match=f"run.yaml, line 2: {message}"):
        parse_generate_config(["--config", str(file), *NEEDED])
    with pytest.raises(UserError, match=f"^{message}"):
        SpeculativeLLM("large", "small", **{name: used})
    for value in unused:
        file.write_text(f"seed: 3\n{name}: {value}\n")
        assert parse_generate_config(["--config", str(file), *NEEDED]).seed == 3


@pytest.mark.parametrize("name", OF_DISTILLING)
def test_one_of_distilling_is_refused_by_name(name: str, tmp_path: Path) -> None:
    used, unused, remedy = OF_DISTILLING[name]
    needed, file = [*NEEDED, "--new_draft=n"], tmp_path / "run.yaml"
    with pytest.raises(UserError, match=f"^--{name} is not an option any more: .*{remedy}"):
        parse_arguments(DistillConfig, [*needed, f"--{name}={used}"])
    file.write_text(f"seed: 3\n{name}: {unused}\n")
    assert parse_arguments(DistillConfig, ["--config", str(file), *needed]).seed == 3


@pytest.mark.parametrize(("config", "name"), [(BenchmarkConfig, name) for name in OF_BENCHMARK]
                         + [(PlanConfig, name) for name in OF_PLAN])  # fmt: skip
def test_one_of_measurements_is_refused_by_name_with_the_new_command(config: type, name: str) -> None:
    """And the new command has it."""
    removed = config._removed_options  # type: ignore[attr-defined]
    message = f"^--{name} is not an option any more: {re.escape(removed[name].remedy)}"
    for words in ([f"--{name}", "2"], [f"--{name}=2", "--target=70b"]):
        with pytest.raises(UserError, match=message):
            parse_arguments(config, words)
    found = re.search(r"python -m (tests\.lab\.\w+)(\.validate)?", removed[name].remedy)
    kinds = {
        "tests.lab.benchmark": ComparisonConfig, "tests.lab.emulation": EmulationConfig,
        "tests.lab.plan": ValidationConfig,
    }  # fmt: skip
    if found and found[1] in kinds and name != "validate":
        assert name in {field.name for field in dataclasses.fields(kinds[found[1]])}
    else:
        assert name in ("profile", "update_readme", "results", "brief", "validate")

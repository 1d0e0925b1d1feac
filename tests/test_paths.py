"""Paths are local: every option of every job refuses a URL, and extras are installed from the checkout."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from specdist.config.arguments import PATH_OPTIONS, URL_OPTIONS, parse_arguments
from specdist.config.generate import GenerateConfig, parse_generate_config
from specdist.lab.demo.config import PairConfig
from specdist.lab.plan.options import PlanConfig
from specdist.results.evaluate.config import EvaluateConfig
from specdist.training.collect.config import CollectConfig
from specdist.training.drafts.config import DistillConfig
from specdist.training.heads.config import TrainConfig
from specdist.utils.errors import UserError
from tests.lab.emulation.config import EmulationConfig
from tests.ranks import REPOSITORY

CONFIGS: list[Any] = [CollectConfig, DistillConfig, EmulationConfig, EvaluateConfig, GenerateConfig,
                      PairConfig, PlanConfig, TrainConfig]  # fmt: skip
# Not paths themselves, though their help speaks of files: a template may begin with a URL.
NOT_PATHS = {"emulate", "lm_eval_export", "prompt_template"}
RUN = ["--prompts", "p.jsonl", "--output", "out", "--target", "model"]


def names_of(config: Any) -> set[str]:
    """Options of text; the job's own --trace is a switch."""
    return {field.name for field in dataclasses.fields(config) if "str" in str(field.type)}


def speaks_of_a_path(field: dataclasses.Field) -> bool:
    """An option of text, or of several texts, whose help says that it names a file, a folder or a model."""
    help_text = field.metadata["help"]
    return "str" in str(field.type) and bool(re.search(r"\b(folders?|files?|hub id)\b", help_text))


def test_every_option_that_names_a_path_is_known_as_one() -> None:
    for config in CONFIGS:
        found = {field.name for field in dataclasses.fields(config) if speaks_of_a_path(field)}
        unknown = found - PATH_OPTIONS - NOT_PATHS
        assert not unknown, f"add to specdist.config.arguments.PATH_OPTIONS: {unknown} of {config.__name__}"
    # The others belong to jobs with a parser of their own.
    assert PATH_OPTIONS - set().union(*map(names_of, CONFIGS)) == {"config", "folder", "outputs"}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_url_is_refused_by_name_in_every_path_option(config: Any) -> None:
    required = {field.name for field in dataclasses.fields(config) if field.default is dataclasses.MISSING}
    takes_urls = set(getattr(config, URL_OPTIONS, ()))
    assert takes_urls <= {"prompts", "output", "run", "against"}
    for option in sorted(PATH_OPTIONS & names_of(config) - takes_urls):
        others = [f"--{name}=acceptance" for name in required - {option}]
        with pytest.raises(UserError, match=f"--{option} s3://bucket/x is a URL, but .*: give .* instead"):
            parse_arguments(config, [*others, f"--{option}=s3://bucket/x"])


@pytest.mark.parametrize("url", ["s3://b/out", "gs://b", "hdfs://node:9000/x", "https://x/y"])
def test_nothing_is_created_for_a_url(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"--head {url} is a URL"):
        parse_generate_config([*RUN, "--head", url])
    file = tmp_path / "c.yaml"
    file.write_text(f"target: {url}\n")
    with pytest.raises(UserError, match=rf"--target {url} is a URL"):
        parse_generate_config(["--config", str(file), "--output", "out", "--prompts", "p.jsonl"])
    taken = parse_generate_config(["--prompts", url, "--output", url, "--target", "model"])
    assert (taken.prompts, taken.output) == ([url], url)
    assert sorted(tmp_path.iterdir()) == [file]


def test_extras_are_installed_from_the_checkout() -> None:
    """The public index has another package of this name. pip finds a project's own extras in the checkout."""
    files = [
        path
        for folder in ("jobs", "specdist", "slurm")
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in (".py", ".md", ".sh", ".yaml")
    ]
    assert len(files) > 100
    for path in [*files, REPOSITORY / "README.md"]:
        found = re.findall(r"pip install '?specdist.*|\bspecdist\[.*", path.read_text(encoding="utf-8"))
        assert not found, f"{path}: {found}"

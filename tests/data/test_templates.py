"""Prompts that a template writes, and rows of a run as input, each beside what Jinja or Arrow say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from specdist.data.formats.prompts import Prompts, RowError, open_prompts
from specdist.data.formats.templates import PromptTemplate
from specdist.data.run.manifest import Manifest
from specdist.data.run.run_folder import run_of
from specdist.utils.errors import UserError
from tests.data.folders import INPUTS, TABLE, finish, open_
from tests.data.test_refusals import written
from tests.refusals import places, recorded

ROW = {"q": "why?", "n": 3, "range": 7, "none": None, "o": {"a": "x", "items": "y"}, "l": ["é<", "b"]}
# A template, and the text of ROW; None: the line and words of the row's error.
TEXTS: list[tuple[str, str | None, str]] = [
    ("{{ q }} {{ n + 1 }}\n", "why? 4", ""),
    ("  {% if n > 2 %}\nmany\n  {% endif %}\nof {{ q }}\n\n", "many\nof why?\n", ""),
    ("{{ l | tojson }} {{ o.a }} {{ o['items'] }}", '["é<", "b"] x y', ""),
    ("{{ range }}{% for i in l %}{{ loop.index }}{{ i }}{% endfor %}", "71é<2b", ""),
    ("{% set ns = namespace(k=0) %}{% for i in l %}{% set ns.k = ns.k + n %}{% endfor %}{{ ns.k }}", "6", ""),
    ("{{ q }}\n{{ none }}", None, "line 2: a value is null"),
    ("{{ q }}{{ o.items }}", None, "line 1: a function is not text"),
    ("{{ q }}\n\n{{ o.b }}", None, "line 3: 'dict object' has no attribute 'b'"),
    ("{% set x = l.append(1) %}{{ q }}", None, "access to attribute 'append'"),
    ("{% include q %}", None, "no loader"),
    ("{{ q }}{{ '\\ud83d' }}", None, "surrogates not allowed"),
    ("{% if n > 3 %}{{ q }}{% endif %}", None, "gives an empty text"),
]


def opened(
    path: Path, template: str = "", *, system_prompt: str | None = None, is_chat: bool = False, **options: Any
) -> Prompts:
    made = PromptTemplate(template, system_prompt=system_prompt, is_chat=is_chat) if template else None
    options = {"prompt_column": None, "messages_column": None, "limit": None, "template": made} | options
    return open_prompts(str(path), **options)


@pytest.mark.parametrize(("template", "text", "reason"), TEXTS, ids=lambda value: str(value)[:40])
def test_a_row_has_the_text_of_its_template_or_the_reason_why_not(
    template: str, text: str | None, reason: str, tmp_path: Path
) -> None:
    """As transformers lays out chat templates. Alone it notices that null becomes a word of a prompt."""
    prompts = opened(written(tmp_path / "a.jsonl", json.dumps(ROW).encode() + b"\n"), template)
    if text is not None:
        assert prompts.prompt(0) == text
        assert prompts.num_beginning_with(text[:2], 1) == 1 == 1 - prompts.num_beginning_with("other", 1)
        return
    with pytest.raises(RowError) as error:
        prompts.prompt(0)
    assert error.value.reason.startswith("--prompt_template") and reason in error.value.reason


def test_a_chat_has_the_system_prompt_of_its_row_and_no_tools(tmp_path: Path) -> None:
    """And a file's own column of the name ``prompt`` is kept by another."""
    rows = b'{"prompt": "a", "lang": "de", "tools": [{"name": "t"}]}\n{"prompt": "b", "lang": null}\n'
    path = written(tmp_path / "a.jsonl", rows)
    prompts = opened(path, "{{ prompt }}?", system_prompt="In {{ lang }}.", is_chat=True)
    assert prompts.is_chat and not prompts.has_tools and "prompt" not in prompts.schema.names
    expected = [{"role": "system", "content": "In de."}, {"role": "user", "content": "a?"}]
    assert prompts.prompt(0) == expected and prompts.table(1, 2)["source_prompt"].to_pylist() == ["b"]
    with pytest.raises(RowError, match="--system_prompt, line 1: a value is null"):
        prompts.prompt(1)


@pytest.mark.parametrize("suffix", ["arrow", "parquet", "jsonl"])
def test_rows_of_a_run_are_those_without_errors_under_other_names(suffix: str, tmp_path: Path) -> None:
    """Any piece of any columns of two files, as Arrow's own filter gives them."""
    rng = random.Random(5)
    reasons = pa.array([rng.choice(["stop", "length", "error"]) for _ in range(100)])
    whole = pa.concat_tables([TABLE] * 20).set_column(
        TABLE.column_names.index("finish_reason"), "finish_reason", reasons
    )
    for number, piece in enumerate((whole.slice(0, 37), whole.slice(37))):
        lines = "".join(json.dumps(row) + "\n" for row in piece.to_pylist()).encode()
        written(tmp_path / f"{number}.{suffix}", lines if suffix == "jsonl" else piece)
    own = [name if name in INPUTS.column_names else f"input_{name}" for name in whole.column_names]
    whole = whole.rename_columns(own)
    everything = opened(tmp_path, prompt_column="input_completion", keep_errors=True)
    assert everything.table(0, 100).to_pydict() == whole.to_pydict()
    good = whole.filter(pa.compute.not_equal(reasons, "error"))
    found = opened(tmp_path, prompt_column="input_completion")
    assert found.num_rows == len(good) < 80 and opened(tmp_path, prompt_column="ref", limit=9).num_rows == 9
    for _ in range(30):
        start, stop = sorted(rng.sample(range(len(good) + 1), 2))
        assert found.table(start, stop).to_pydict() == good.slice(start, stop - start).to_pydict()
    if suffix != "jsonl":  # read when they are needed, from the file that has them
        (tmp_path / f"1.{suffix}").unlink()
        num_first = reasons.slice(0, 37).to_pylist().count("error")
        assert found.prompt(36 - num_first)
        with pytest.raises(UserError, match=f"1.{suffix} was deleted"):
            found.prompt(37 - num_first)


def test_what_a_run_had_read_of_another_gets_a_longer_name(tmp_path: Path) -> None:
    """Alone it notices that two columns get one name, or that the older answer takes the newer one's."""
    older = {name: TABLE[name].to_pylist()[::-1] for name in ("completion", "error", "row_id")}
    columns = TABLE.to_pydict() | {"input_logprobs": TABLE["ref"]}
    for prefix in ("input_", "input_input_"):
        columns |= {f"{prefix}{name}": values for name, values in older.items()}
    file = written(tmp_path / "a.arrow", pa.table(columns))
    template = "{{ completion }} {{ input_completion }} {{ input_input_completion }}"
    found = opened(file, template, keep_errors=True)
    rows = found.table(0, len(TABLE))
    new, old = columns["completion"][1], older["completion"][1]
    assert found.prompt(1) == f"{new} {new} {old}"
    for prefix in ("input_input_", "input_input_input_"):
        assert all(rows[f"{prefix}{name}"].to_pylist() == older[name] for name in older)
    assert rows["input_input_logprobs"].to_pylist() == rows["ref"].to_pylist()


def test_every_refusal_of_templates_and_runs_is_true(tmp_path: Path) -> None:
    """Each has a template, a file or a folder with its fault; a file says the same as the text."""
    file, template = written(tmp_path / "a.jsonl", b'{"q": "x"}\n'), tmp_path / "t.jinja"
    template.write_text("{{ q }}\n{% if %}")
    errors = TABLE.set_column(5, "finish_reason", pa.array(["error"] * 5))
    both = {name: ["x"] for name in ("ref", "prompt", "source_prompt")}
    taken = written(tmp_path / "taken.arrow", pa.table(both))
    faults: list[tuple[Path, dict[str, Any], list[str]]] = [
        (file, {"template": "no.jinja"}, ["--prompt_template no.jinja is not a file", "{{ question }}"]),
        (file, {"template": str(template)}, [f"{template}, line 2 is not valid in Jinja: Expected"]),
        (file, {"template": "{{ lipsum() }}{{ p }}"}, ["reads lipsum, p, but the columns", "are q (string)"]),
        (file, {"template": "{% if 1 %}q{% endif %}"}, ["reads no column", "{{ question }}"]),
        (file, {"template": "{{ q }}", "system_prompt": "{{ s }}"}, ["--system_prompt reads s, but"]),
        (file, {"prompt_column": "q", "keep_errors": True}, ["--keep_errors has no effect", "leave it out"]),
        (taken, {"template": "{{ ref }}"}, ["a column source_prompt, which", "rename it"]),
        (written(tmp_path / "e.arrow", errors), {"prompt_column": "ref"}, ["errors alone: --keep_errors"]),
    ]  # fmt: skip
    with recorded() as made:
        for path, options, words in faults:
            with pytest.raises(UserError) as refused:
                opened(path, **options)
            assert all(word in str(refused.value) for word in words), refused.value
    modules = places("data/formats/templates.py", "data/formats/run_rows.py")
    missed = [code for place, code in modules.items() if place not in made]
    assert not missed, missed


def test_a_run_has_the_files_of_its_finished_shards(tmp_path: Path) -> None:
    """Those of a run that is going on are read if that is asked for."""
    manifest = Manifest(fingerprint={"num_rows": 10, "rows_per_shard": 5, "num_samples": 1})
    folder = open_(tmp_path / "run", manifest=manifest)
    runs = [run_of(folder.path), run_of(folder.path / "shards")]
    assert [run and run.path for run in runs] == [folder.path] * 2
    with pytest.raises(
        UserError, match=r"complete: 2 of 2 shards are missing \(0, 1\).*start its command again$"
    ):
        folder.finished_files(unfinished=True)
    finish(folder, 1)
    with pytest.raises(UserError, match=r"1 of 2 shards are missing \(0\).*with --unfinished$"):
        folder.finished_files(unfinished=False)
    assert folder.finished_files(unfinished=True) == [folder.data_path(1)]
    finish(folder, 0)
    assert folder.finished_files(unfinished=False) == [*map(folder.data_path, range(2))]
    (tmp_path / "manifest.json").write_text('{"files": []}')
    assert run_of(tmp_path) is None is run_of(tmp_path / "nothing")

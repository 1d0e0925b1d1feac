"""The options: one parser for file and command line, ranges checked, nothing ignored silently."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from specdist.config.arguments import resolved_yaml
from specdist.config.generate import GenerateConfig, parse_generate_config
from specdist.job.rows.row_options import _number
from specdist.job.run.opening import open_run_prompts
from specdist.utils.errors import UserError
from tests.config.options import COMMAND_LINE, NEEDED, config, from_file
from tests.ranks import REPOSITORY

# Written out, billions of values.
LEVELS = [f"&a{level} [{', '.join([f'*a{level - 1}'] * 9 if level else ['x'])}]" for level in range(12)]
ALIAS_BOMB = f"seed: [{', '.join(LEVELS)}]"


def parsed(*arguments: str) -> GenerateConfig:
    return parse_generate_config([*COMMAND_LINE, *arguments])


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    """Wherever --config stands among the arguments, and for every spelling of an option."""
    values = NEEDED | {"seed": 5, "top_k": 7, "temperature": 0.25, "draft": "small"}
    found = from_file(tmp_path, values, "--seed", "6", "--temperature=0")
    assert (found.seed, found.top_k, found.temperature, found.draft) == (6, 7, 0.0, "small")
    path = str(tmp_path / "config.yaml")
    assert parse_generate_config(["--seed", "6", "--config", path, "--top-k", "8"]).seed == 6
    assert parse_generate_config(["--seed", "6", f"--config={path}", "--top-k", "8"]).top_k == 8


def test_the_file_has_the_types_of_the_command_line(tmp_path: Path) -> None:
    """One parser for both: YAML's own idea of a type does not matter."""
    values = "\n".join(
        [*(f"{name}: {value}" for name, value in NEEDED.items()),
         "top_p: 1", "temperature: 1e-1", "overwrite: yes", "limit: null", "cache_memory: 1000000"]
    )  # fmt: skip
    found = from_file(tmp_path, values)
    assert found == parsed("--top_p=1", "--temperature=0.1", "--overwrite", "--cache_memory", "1000000")
    assert (found.overwrite, found.limit, found.cache_bytes()) == (True, None, 1_000_000)


def test_a_list_on_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    """Stop strings may contain anything, and those of the file must not stay when others are given."""
    strings = ["\n\n", "--end", " ", "é", "a: b"]
    assert from_file(tmp_path, NEEDED | {"stop": strings}).stop == strings
    assert from_file(tmp_path, NEEDED | {"stop": "one"}).stop == ["one"]
    assert from_file(tmp_path, NEEDED | {"stop": strings}, "--stop", "x", "y").stop == ["x", "y"]
    assert parsed("--stop", "x", "--stop", "y").stop == ["x", "y"]
    assert parsed().stop == []


WRITTEN = ["yes", "no", "on", "Off", "true", "012", "12:30", "1_0", "3.0", "0x10", "1e3", ".inf",
           "2026-01-02", "2026-01-02 10:00:00", "=", "<<", "é", "- x"]  # fmt: skip


@pytest.mark.parametrize("name", ["choices", "stop", "bad_words"])
def test_text_is_what_the_file_says_and_not_what_yaml_makes_of_it(tmp_path: Path, name: str) -> None:
    """YAML 1.1 has numbers to the base 8 and 60, dates, and five ways to write false."""
    assert (
        getattr(from_file(tmp_path, f"{name}: [{', '.join(WRITTEN[:-1])}]", *COMMAND_LINE), name)
        == WRITTEN[:-1]
    )
    lines = "".join(f"\n- {text!r}" for text in WRITTEN)
    assert getattr(from_file(tmp_path, f"{name}:{lines}\n- |-\n  null", *COMMAND_LINE), name) == [
        *WRITTEN,
        "null",
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("stop: [a, null]", "line 1: stop has null, which is nothing in YAML: write it in quotes"),
        ("seed: 1\nchoices:\n- a\n-\n", "line 4: choices has an item without a value, which is nothing in"),
        (
            "\nmax_new_tokens: 012",
            "line 2: max_new_tokens is 012, which is 10 in YAML: write it as a decimal",
        ),
        ("seed: 12:30", "line 1: seed is 12:30, which is 750 in YAML: write it as a decimal number"),
        ("seed: 1\ntop_k: 2\nseed: 3", "line 3: seed is in line 1, too: leave one of them out"),
    ],
)
def test_what_yaml_reads_as_something_else_is_refused_with_the_line(
    tmp_path: Path, values: str, message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        from_file(tmp_path, values)


@pytest.mark.parametrize(
    ("values", "fragment"),
    [
        (NEEDED | {"top_q": 1}, r"line \d: top_q is not an option: did you mean --top_[pk]\?"),
        (NEEDED | {"zzz": 1}, r"line \d: zzz is not an option; --help all lists all options"),
        (NEEDED | {"seed": "x"}, r"--seed: 'x' is not a whole number \(--config .*, line \d\)"),
        (NEEDED | {"dtype": "float64"}, r"--dtype: invalid choice: '?float64.* did you mean float\d\d\?"),
        ({"prompts": "p", "output": "o"}, "--target must be given"),
    ],
)
def test_the_file_is_checked_like_the_command_line(tmp_path: Path, values: Any, fragment: str) -> None:
    """An unknown key is a typing error that would otherwise silently change the run."""
    with pytest.raises(UserError, match=fragment):
        from_file(tmp_path, values)


def test_the_short_help_has_the_main_options_on_one_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it notices a main option that is no option any more, and one whose line is too long."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        parsed("--help")
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0][2:] for line in lines if line.startswith("  --")]
    assert sorted(shown) == sorted(GenerateConfig._main_options) and len(shown) == 26
    assert len(lines) <= 50 and max(map(len, lines)) <= 100
    assert lines[-1].endswith("--help all lists all options")


@pytest.mark.parametrize(
    ("values", "fragment"),
    [
        ("", "must be a mapping"),
        (NEEDED | {"seed": {"value": 1}}, "seed must be one plain value"),
        (NEEDED | {"config": "other.yaml"}, "cannot name another one"),
        ("seed: !!python/object/apply:os.getcwd []", "cannot be read"),
        ("[" * 10_000, "cannot be read"),
        (ALIAS_BOMB, "seed must be one plain value"),
        (ALIAS_BOMB.replace("seed: [", "stop: [a, "), "stop must be one plain value"),
    ],
)
def test_a_file_that_is_not_a_flat_mapping_is_refused(tmp_path: Path, values: Any, fragment: str) -> None:
    """With the file's name; a second file or a second value would be ignored."""
    with pytest.raises(UserError, match=fragment) as error:
        from_file(tmp_path, values)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        *[(name, 0, 1) for name in ("rows_per_shard", "tp_size", "num_draft_tokens", "max_new_tokens",
                                    "num_samples", "max_num_seqs", "max_num_batched_tokens", "limit",
                                    "max_seq_len")],
        ("temperature", -0.1, 0.0),
        ("temperature", float("nan"), 5.0),
        ("temperature", float("inf"), 1e-3),
        ("top_k", -2, 0),
        ("top_p", 0.0, 1e-6),
        ("top_p", 1.01, 1.0),
        ("seed", -1, 0),
        ("seed", 2**63, 2**63 - 1),
        ("stop_probability", 1.1, 1.0),
        ("stop_root_entropy", -0.1, 0.0),
        ("cache_memory", "8 gigabytes", "8 GiB"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(name: str, bad: Any, good: Any) -> None:
    """The message names the option and the value; the value at the edge of the range is accepted."""
    with pytest.raises(UserError) as error:
        config(**{name: bad})
    assert f"--{name} {bad[-1] if isinstance(bad, list) else bad!r} " in str(error.value)
    assert getattr(config(**{name: good}), name) == good


def test_top_k_of_vllm_keeps_every_token() -> None:
    """Its -1 is 0 here, for the run as for a row: refused, or kept, it would make another run of the same."""
    assert config(temperature=0, top_k=-1).top_k == parsed("--top_k", "-1").top_k == 0
    assert [_number(0, "top_k", "top_k", value) for value in (-1, -1.0, 5)] == [0, 0, 5]


def test_a_pass_must_have_room_for_a_block() -> None:
    """Otherwise no row could ever be verified; without a draft a block is one token."""
    with pytest.raises(UserError, match=r"--max_num_batched_tokens 5 is less than .* 6 tokens"):
        config(draft="small", policy="fixed", max_num_batched_tokens=5)
    assert config(draft="small", policy="fixed", max_num_batched_tokens=6).block_tokens == 6
    assert config(max_num_batched_tokens=1).block_tokens == 1


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("123", 123), ("2KiB", 2048), ("1.5 MB", 1_500_000), ("8gib", 2**33), ("3B", 3), ("1GB", 10**9)],
)
def test_sizes_are_read_as_written(text: str, num_bytes: int) -> None:
    """A GB is not a GiB."""
    assert config(cache_memory=text).cache_bytes() == num_bytes


@pytest.mark.parametrize("draft", [None, "none", ""])
def test_without_a_draft_nothing_is_drafted(draft: str | None) -> None:
    """All spellings of no draft are the same run, with the same fingerprint."""
    assert config(draft=draft) == config()
    assert not config(draft=draft).uses_draft


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({}, []),
        ({"draft": "small"}, []),
        ({"draft": "small", "policy": "none"}, ["--draft small"]),
        ({"draft": "small", "trace": True}, []),
        ({"trace": True}, ["--trace"]),
        ({"draft": "small", "policy": "none", "stop_bound": 0.5}, ["--draft small", "--stop_bound 0.5"]),
        ({"temperature": 0, "top_k": 5}, ["--top_k"]),
        ({"temperature": 0, "num_samples": 4}, ["--num_samples 4"]),
        ({"temperature": 0.5, "num_samples": 4, "top_k": 5, "top_p": 0.5}, []),
    ],
)
def test_options_without_effect_give_a_warning(options: dict[str, Any], fragments: list[str]) -> None:
    """One sentence each, and none for options that have an effect."""
    warnings = config(**options).warnings()
    assert len(warnings) == len(fragments)
    for warning, fragment in zip(warnings, fragments, strict=True):
        assert fragment in warning and ("no effect" in warning or "identical" in warning)


@pytest.mark.parametrize(
    ("options", "fitting"),
    [
        ({}, {1}),
        ({"draft": "small"}, {1, 2}),
        ({"tp_size": 2}, {2}),
        ({"tp_size": 2, "draft": "small"}, {2, 3}),
        ({"tp_size": 2, "draft": "small", "draft_placement": "own"}, {3}),
        ({"draft": "small", "draft_placement": "shared"}, {1}),
        ({"tp_size": 2, "draft_placement": "own"}, {2}),
        ({"tp_size": 4, "draft": "small", "policy": "none"}, {4}),
    ],
)
def test_the_number_of_ranks_must_fit(options: dict[str, Any], fitting: set[int]) -> None:
    """The target's ranks, and with a draft one for it or none."""
    for world_size in range(1, 7):
        if world_size in fitting:
            config(**options).check_world(world_size)
            continue
        with pytest.raises(UserError) as error:
            config(**options).check_world(world_size)
        message = str(error.value)
        assert message.startswith(f"{world_size} rank")
        assert f"--num_processes {max(fitting)}" in message
        assert ("or 1 to hold both" in message) == (fitting == {1, 2})
        assert ("or 2 to hold the draft on the target's rank 0" in message) == (fitting == {2, 3})


def test_a_way_to_prompts_on_the_command_line_wins_over_another_in_the_file(tmp_path: Path) -> None:
    """Alone it notices that both are taken, or that neither is refused where one place names both."""
    values = NEEDED | {"messages_column": "chat", "prompts": ["a", "b"]}
    found = from_file(tmp_path, values, "--prompt_template", "{{ x }}", "--chat")
    assert (found.messages_column, found.prompt_column, found.prompts) == (None, None, ["a", "b"])
    assert from_file(tmp_path, values, "--prompt_column=x", "--prompts=c").prompts == ["c"]
    assert from_file(tmp_path, values).messages_column == "chat"
    with pytest.raises(UserError, match="messages_column chat and --prompt_template exclude each other"):
        from_file(tmp_path, values, "--prompt_template={{ x }}", "--messages_column=chat")


def test_the_resolved_configuration_gives_the_same_run(tmp_path: Path) -> None:
    """It records what was run; only --overwrite is left out, since repeating it would delete the run."""
    options = config(
        draft="small", stop=["\n", "--x", "é"], temperature=0.1, messages_column="chat", limit=3,
        cache_memory="1.5GiB", overwrite=True,
    )  # fmt: skip
    again = from_file(tmp_path, resolved_yaml(options))
    assert again == dataclasses.replace(options, overwrite=False)
    assert resolved_yaml(again) == resolved_yaml(options)


def test_the_shipped_configurations_are_valid_and_their_shipped_prompts_can_be_read() -> None:
    """Alone it notices a template's variable, an option or a column that is none."""
    for path in sorted((REPOSITORY / "jobs/configs").glob("*.yaml")):
        found = parse_generate_config(["--config", str(path)])
        if found.prompts[0].startswith("jobs/"):
            found.prompts = [str(REPOSITORY / found.prompts[0])]
            prompts = open_run_prompts(found)
            assert prompts.num_rows == 64 and prompts.is_chat and found.chat_format.variables

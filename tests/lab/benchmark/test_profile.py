"""The profile: the whole job, merging the traces of two processes, and lower bounds computed by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tests.lab.benchmark.conftest import NUM_DRAFT_TOKENS, TINY
from tests.lab.benchmark.passes import measure_bytes_per_s, measure_floors, measure_flop_per_s
from tests.lab.benchmark.setting import ComparedSetting
from tests.lab.profile import main, merge_traces

CPU = torch.device("cpu")


def test_traces_of_two_processes_become_one_on_one_clock() -> None:
    def trace(base_ns: int) -> dict[str, object]:
        name = {"name": "process_name", "ph": "M", "args": {"name": "python"}}
        return {"baseTimeNanoseconds": base_ns, "traceEvents": [name, {"name": "verify", "ts": 5.0}]}

    merged = merge_traces({"target": trace(1_000_000), "draft": trace(1_007_000)})
    assert merged["baseTimeNanoseconds"] == 1_000_000
    assert [event.get("ts") for event in merged["traceEvents"]] == [None, 5.0, None, 12.0]
    names = [event["args"]["name"] for event in merged["traceEvents"] if "args" in event]
    assert names == ["target: python", "draft: python"]


def test_lower_bounds_count_the_bytes_and_operations_of_a_pass(setting: ComparedSetting) -> None:
    [target, draft] = measure_floors(
        setting.paged,
        batch_sizes=[2],
        num_context_tokens=8,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        num_passes=2,
        seed=0,
    )
    hidden, inner, kv_width = TINY.hidden_size, TINY.intermediate_size, TINY.hidden_size // 2
    layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * inner
    head, num_norms = hidden * TINY.vocab_size, 2 * TINY.num_layers + 1
    weights = TINY.num_layers * layer + head
    num_tokens, num_keys = 2 * (NUM_DRAFT_TOKENS + 1), 8 + NUM_DRAFT_TOKENS + 1
    cache = 2 * num_keys * TINY.num_layers * 2 * kv_width
    assert target.num_bytes == 4 * (weights + num_norms * hidden + cache)
    attention = 4 * num_tokens * num_keys * TINY.num_layers * hidden
    assert target.num_flop == 2 * num_tokens * weights + attention
    assert (draft.model, draft.num_new_tokens) == ("draft", 1)
    for result in (target, draft):
        times_s = result.num_bytes / result.bytes_per_s, result.num_flop / result.flop_per_s
        assert result.floor_s == max(times_s) > 0
        assert result.best_s <= result.measured_s
        assert result.ratio == pytest.approx(result.measured_s / result.floor_s)


def test_measured_rates_are_plausible() -> None:
    # 1 GB/s is less than the rate of any memory, even on a busy machine; 10 TB/s is more than that of a CPU.
    assert 1e8 < measure_bytes_per_s(2**24, torch.float32, CPU) < 1e13
    assert 1e8 < measure_flop_per_s(torch.float32, CPU) < 1e14


@pytest.mark.ranks
def test_the_command_writes_traces_shares_and_floors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(
        [*("--synthetic", "tiny", "--epsilon", "0.05", "--output", "out", "--batch_sizes", "2"),
         *("--num_prompts", "3", "--num_draft_tokens", "3", "--max_prompt_tokens", "12"),
         *("--max_new_tokens", "12", "--overhead_repeats", "2", "--num_branches", "2"),
         *("--placements", "colocated", "separate", "--device", "cpu")]
    )  # fmt: skip
    assert code == 0
    stdout = capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "profile.json").read_text())
    ways = ("", ", separate", ", asynchronous", ", asynchronous, 2 branches")
    assert [run["name"] for run in document["runs"]] == [f"specdist, K = 3{way}" for way in ways]
    for run in document["runs"]:
        assert sum(run["target_shares"].values()) == pytest.approx(1)
        assert sum(run["draft_shares"].values()) == pytest.approx(1)
        trace = json.loads(gzip.decompress((tmp_path / "out" / run["trace"]).read_bytes()))
        phases = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
        assert {"verify", "draft", "idle"} <= phases
    assert [(item["model"], item["batch_size"]) for item in document["floors"]] == [
        ("target", 2),
        ("draft", 2),
    ]
    last = json.loads(stdout.strip().splitlines()[-1])
    assert last["traces"] == [run["trace"] for run in document["runs"]]
    assert "Shares of each rank's time" in stdout

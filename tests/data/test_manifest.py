from __future__ import annotations

import pytest

from specdist.data.run.manifest import FORMAT_VERSION, Manifest, ShardPlan, check_same
from specdist.utils.errors import UserError


def test_shards_cover_every_row_once_and_in_order():
    for num_rows in range(1, 40):
        for rows_per_shard in range(1, 45):
            plan = ShardPlan(num_rows, rows_per_shard)
            bounds = [plan.bounds(shard) for shard in range(plan.num_shards)]
            assert [row for start, stop in bounds for row in range(start, stop)] == list(range(num_rows))
            assert all(stop - start == rows_per_shard for start, stop in bounds[:-1])
            assert bounds[-1][1] > bounds[-1][0]


def test_a_manifest_survives_its_file(tmp_path):
    manifest = Manifest(fingerprint={"seed": 1, "sampling": {"top_p": 0.1, "stop": ["é"]}}, info={"t": 0.25})
    manifest.write(tmp_path / "manifest.json")
    assert Manifest.read(tmp_path / "manifest.json") == manifest
    assert manifest.format_version == FORMAT_VERSION


def test_the_same_run_may_continue():
    old = Manifest(fingerprint={"seed": 1, "sampling": {"stop": ["a"], "top_p": 1}}, info={"started": 1})
    new = Manifest(fingerprint={"sampling": {"top_p": 1.0, "stop": ("a",)}, "seed": 1}, info={"started": 2})
    check_same(old, new)


def test_every_difference_is_named_with_both_values():
    old = Manifest(fingerprint={"seed": 1, "same": 0, "sampling": {"top_p": 0.9, "top_k": 5}, "gone": None})
    new = Manifest(fingerprint={"seed": 2, "same": 0, "sampling": {"top_p": 1.0, "top_k": 5}, "fresh": "x"})
    with pytest.raises(UserError) as raised:
        check_same(old, new)
    assert str(raised.value).splitlines() == [
        "--output holds a run with different settings:",
        "  seed: 1 in --output, 2 now",
        "  sampling.top_p: 0.9 in --output, 1.0 now",
        "  gone: null in --output, (absent) now",
        '  fresh: (absent) in --output, "x" now',
        "Use another --output, or --overwrite to delete that run's results and start afresh",
    ]


def test_a_newer_format_is_refused(tmp_path):
    path = tmp_path / "manifest.json"
    Manifest(fingerprint={}, format_version=FORMAT_VERSION + 1).write(path)
    with pytest.raises(
        UserError, match=r"has format version 2.*knows up to 1: update specdist, or use another"
    ):
        Manifest.read(path)

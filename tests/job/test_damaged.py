"""Damaged files of a run and of its models are named, or do no harm: never a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.job.launching import Ended, refused, run_here, shard_bytes
from tests.job.pair import Pair

DEEP = b"[" * 100_000
# As disks, copies and editors leave files: empty, cut, of another encoding, deep, or with other values.
OF_RUNS = [
    ("manifest.json", b'{"format_version": 1, "fingerprint": [], "info": null}'),
    ("shards/shard-00001.json", b'{"num_rows": "x", "num_bytes": null}'),
    ("shards/shard-00001.arrow", bytes(500)),
    ("stats/shard-00001.json", b'{"num_rounds": 1e400}'),
    ("parts/shard-00002.00001.jsonl", b'{"crc32": 5}\nnull\n' + DEEP),
    ("leases/gone-1-ab12.beat", b'{"replica": null, "silent_after_s": "x"}'),
]


OF_MODELS = [
    ("config.json", DEEP),
    ("generation_config.json", b"null"),
    ("tokenizer.json", b"\xff\xfe{\x00}\x00"),
    ("tokenizer_config.json", b"[3]"),
    ("model.safetensors.index.json", b'{"weight_map": {"a": 5}}'),
    ("model-00002-of-00003.safetensors", b"\xff" * 8 + b"{}"),
]


@pytest.mark.parametrize(("name", "content"), OF_RUNS, ids=[name for name, _ in OF_RUNS])
def test_of_a_run(
    options: dict[str, Any], greedy: tuple[Path, Ended], finished: Path, name: str, content: bytes
) -> None:
    """Two shards of it were finished; what is not damaged stays, or the run ends with the same files."""
    for path in finished.glob("*/shard-00002.*"):
        path.unlink()
    before = shard_bytes(finished)
    path = finished / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    ended = run_here(**options, lease_timeout=1, output=finished)
    after = shard_bytes(finished)
    if ended.code == 0:
        assert after == shard_bytes(greedy[0])
        return
    refused(ended, path.name)
    assert {**before, path.name: b""} == {**after, path.name: b""}


@pytest.mark.parametrize(("name", "content"), OF_MODELS, ids=[name for name, _ in OF_MODELS])
def test_of_a_model(
    pair: Pair, options: dict[str, Any], no_models: None, tmp_path: Path, name: str, content: bytes
) -> None:
    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    (target / name).write_bytes(content)
    refused(run_here(**options | {"target": target}, output=tmp_path / "run"), f"--target {target}")

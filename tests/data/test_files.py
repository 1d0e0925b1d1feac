from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdist.data import files
from specdist.data.files import sha256_of, temporary_path, write_atomically, write_json


def test_the_content_is_complete_and_durable_before_it_gets_its_name(tmp_path, monkeypatch):
    path, steps = tmp_path / "a.bin", []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor):
        steps.append("fsync")
        assert temporary_path(path).exists() == ("replace" not in steps)
        if "replace" not in steps:
            assert temporary_path(path).read_bytes() == b"new"
        real_fsync(descriptor)

    def replace(self, target):
        steps.append("replace")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_atomically(path, lambda file: file.write(b"new"))
    assert steps == ["fsync", "replace", "fsync"]
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError("disk full")

    def write(file):
        file.write(b"ne")
        if failing == "write":
            fail()

    if failing == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    if failing == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_temporary_file_of_an_earlier_crash_is_no_obstacle(tmp_path):
    path = tmp_path / "a.json"
    temporary_path(path).write_bytes(b"something longer than the new content")
    write_json(path, {"b": 1, "a": [None, 0.1]})
    assert path.read_text() == '{\n  "b": 1,\n  "a": [\n    null,\n    0.1\n  ]\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_sha256_reads_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "READ_BYTES", 3)
    for size in range(8):
        (tmp_path / "a").write_bytes(b"x" * size)
        assert sha256_of(tmp_path / "a") == hashlib.sha256(b"x" * size).digest()


def test_the_data_layer_imports_no_model_library():
    code = (
        "import sys, specdist.data; "
        "sys.exit(', '.join({'torch', 'transformers', 'datasets', 'deepspeed'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

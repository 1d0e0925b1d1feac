from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdist.data.store import files
from specdist.data.store.files import (
    json_bytes,
    publish,
    sealed,
    sha256_of,
    unsealed,
    write_atomically,
)


def test_the_content_is_complete_and_durable_before_it_gets_its_name(tmp_path, monkeypatch):
    path, steps = tmp_path / "a.bin", []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor):
        steps.append("fsync")
        temporary = [found.read_bytes() for found in tmp_path.glob("a.bin.*.tmp")]
        assert temporary == ([b"new"] if "replace" not in steps else [])
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


def test_a_file_that_was_tidied_away_before_it_had_its_name_is_written_again(tmp_path):
    """A replica may be paused for so long that another one takes it for dead."""
    num_written = 0

    def write(file):
        nonlocal num_written
        file.write(b"new")
        num_written += 1
        if num_written == 1:
            Path(file.name).unlink()

    write_atomically(tmp_path / "manifest.json", write)
    assert num_written == 2
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("manifest.json", b"new")]
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "gone" / "manifest.json", write)


def publishers(tmp_path, num):
    paths = [tmp_path / f"a.{number}.tmp" for number in range(num)]
    for number, path in enumerate(paths):
        path.write_bytes(b"%d" % number * 1000)
    return paths


@pytest.mark.parametrize("error", [None, errno.EPERM, errno.EOPNOTSUPP])
def test_a_name_can_be_published_only_once(tmp_path, monkeypatch, error):
    """With hard links, and on file systems without them."""
    temporaries = publishers(tmp_path, 3)
    if error:
        monkeypatch.setattr(os, "link", raising(OSError(error, "no links here")))
    assert [publish(path, tmp_path / "a") for path in temporaries] == [True, False, False]
    assert (tmp_path / "a").read_bytes() == b"0" * 1000
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a", *temporaries]


def test_a_link_whose_answer_was_lost_counts_as_made(tmp_path, monkeypatch):
    """NFS repeats a request, which then finds the link of its own first attempt."""
    first, second = publishers(tmp_path, 2)
    real_link = os.link

    def link(source, target):
        real_link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        assert publish(first, tmp_path / "a")
    assert not publish(second, tmp_path / "a")


def raising(error):
    def fail(*_):
        raise error

    return fail


def test_sha256_is_that_of_the_whole_file(tmp_path, monkeypatch):
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


def test_a_seal_detects_every_change():
    values = {"num_rows": 3, "note": "as it was", "parts": [1, 2.5, None]}
    kept = json.loads(json_bytes(sealed(values)))
    assert unsealed(kept) == values
    for name, value in (("num_rows", 4), ("note", "as it is"), ("parts", [1, 2.5])):
        with pytest.raises(ValueError, match="checksum"):
            unsealed({**kept, name: value})
    with pytest.raises(ValueError, match="checksum"):
        unsealed(values)

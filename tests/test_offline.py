"""Packing, and installing without a network, with wheels of a few bytes in place of the real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PIP = sorted(Path(sys.base_prefix, "lib", f"python{HERE}", "ensurepip/_bundled").glob("pip-*.whl"))
NEEDS = ["torch>=2.11", "deepspeed", "numpy>=2", "odd; python_version >= '3.99'"]
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
# Nothing is built: the project's own wheel lies there.
BACKEND = """
import shutil

def build_wheel(folder, settings=None, metadata=None):
    return shutil.copy("specdist-0.1.0-py3-none-any.whl", folder).rpartition("/")[2]

build_editable = build_wheel
"""
TORCH = """
from types import SimpleNamespace
__version__, cuda = VERSION, SimpleNamespace(device_count=lambda: 0)
"""

pytestmark = pytest.mark.skipif(not PIP, reason="this Python brings no wheel of pip along")


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    needs: Sequence[str] = (),
    text: str = "",
    file: str = "__init__.py",
) -> Path:
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: node\n"]
    metadata += [f"Requires-Dist: {need}\n" for need in needs]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/{file}", text)
        archive.writestr(f"{info}/METADATA", "".join(metadata))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the scripts, and beside it what an index would give."""
    folder = tmp_path_factory.mktemp("packing")
    clone, index = folder / "clone", folder / "index"
    shutil.copytree(REPOSITORY / "jobs", clone / "jobs", ignore=shutil.ignore_patterns("[!eioc]*", "configs"))
    (clone / "pyproject.toml").write_text(PROJECT)
    (clone / "backend.py").write_text(BACKEND)
    why = "def why_no_gpu(): return 'none is there'"
    write_wheel(clone, "specdist", "0.1.0", NEEDS, why, "job/ranks/topology.py")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *command], cwd=clone, check=True)
    (clone / "runs/demo/pair").mkdir(parents=True)
    index.mkdir()
    write_wheel(index, "torch", "2.13.0", ["triton"], TORCH.replace("VERSION", "'2.13.0'"))
    write_wheel(index, "torch", "2.13.0+cpu")
    write_wheel(index, "deepspeed", "0.19.8", ["torch>=2"])
    for name, version in {"triton": "3.7.1", "rouge_score": "0.1.2", "numpy": "2.4.6", "odd": "1"}.items():
        write_wheel(index, name, version)
    write_wheel(index, "setuptools", "84.0")
    write_wheel(index, "vllm", "0.33.0", ["torch==2.14.0"], "__version__ = '0.33.0'")
    write_wheel(index, "torch", "2.14.0")
    shutil.copy(PIP[-1], index)
    return clone


def run(script: Path, *words: object, **variables: object) -> subprocess.CompletedProcess[str]:
    """Where no index answers."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "SPECDIST_", "PYTHON"))
    }
    more = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9",
        "PIP_RETRIES": 0,
    } | variables
    return subprocess.run(
        ["bash", script, *map(str, words)], env=kept | {name: str(value) for name, value in more.items()},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def pack(clone: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    index = clone.parent / "index"
    return run(
        clone / "jobs/offline.sh", "pack", folder, *options,
        PYTHON=sys.executable, PYTHONPATH=index / PIP[-1].name, PIP_FIND_LINKS=index, PIP_NO_INDEX=1,
    )  # fmt: skip


def names(folder: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in (folder / "wheels").glob("*.whl")}


def test_what_is_there_is_used_and_the_rest_comes_from_the_folder(clone: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    ended = pack(clone, packed, "--vllm", "0.33.0")
    assert ended.returncode == 0, ended.stderr
    assert names(packed) == {"torch", "triton", "deepspeed", "rouge_score", "numpy", "setuptools", "pip"}
    assert not list((packed / "wheels").glob("torch-*cpu*")), "the plain wheel is built for CUDA 13.0"
    assert (packed / "runs/demo/pair").is_dir()

    # An image with a torch that is supported, and a numpy that is not.
    image = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", image], check=True)
    (site,) = image.glob("lib/python*/site-packages")
    for name, version, text in (
        ("torch", "2.12.0", TORCH.replace("VERSION", "'2.12.0'")),
        ("numpy", "1.26.0", ""),
    ):
        with zipfile.ZipFile(write_wheel(tmp_path, name, version, text=text)) as archive:
            archive.extractall(site)
    before = sorted(site.rglob("*.py"))
    ended = run(packed / "jobs/offline.sh", "install", PYTHON=image / "bin/python")
    assert ended.returncode == 0, ended.stderr
    assert "used as it is there: torch 2.12.0\n" in ended.stdout
    assert "installed: deepspeed 0.19.8, numpy 2.4.6 (there: 1.26.0)\n" in ended.stdout
    assert "torch 2.12.0 sees no GPU: none is there" in ended.stdout
    assert sorted(site.rglob("*.py")) == before
    # vLLM has a torch of its own.
    (own,) = packed.glob(".venv-vllm/lib/python*/site-packages")
    found = {path.name for path in own.glob("*.dist-info")}
    assert found == {"vllm-0.33.0.dist-info", "torch-2.14.0.dist-info"}


def test_markers_are_those_of_the_node_s_python(clone: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    ended = pack(clone, packed, "--python", "3.99", "--cuda", "none")
    assert ended.returncode == 0, ended.stderr
    assert names(packed) == {"deepspeed", "rouge_score", "numpy", "odd", "setuptools", "pip"}
    refused = run(packed / "jobs/offline.sh", "install", PYTHON=sys.executable)
    assert refused.returncode == 1
    assert f"packed for Python 3.99, and PYTHON={sys.executable} is another" in refused.stderr


def test_what_cannot_be_packed_is_refused(clone: Path, tmp_path: Path) -> None:
    ended = pack(clone, clone)
    assert ended.returncode == 1 and "is not empty" in ended.stderr
    ended = pack(clone, tmp_path / "other", "--cuda", "12.6")
    assert ended.returncode == 1 and "--cuda 12.6 is not understood" in ended.stderr
    assert not (tmp_path / "other").exists()

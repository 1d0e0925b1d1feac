"""The versions that an install takes: the same with and without a GPU, and such as pyproject.toml allows."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.ranks import REPOSITORY

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None  # type: ignore[assignment]

CPU, CUDA = "constraints-cpu.txt", "constraints-cuda.txt"
# Extras of their own, which the tests go without.
UNTESTED = {"lm-eval", "gcsfs", "adlfs"}
TOOLS = ("bash", "dirname", "sha256sum", "rm", "cat", "sed")


def pins(name: str) -> dict[str, Requirement]:
    """By package."""
    lines = (REPOSITORY / "jobs" / name).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert len({canonicalize_name(pin.name) for pin in found}) == len(found), "a package is pinned twice"
    return {canonicalize_name(pin.name): pin for pin in found}


def test_a_gpu_node_gets_the_versions_that_were_tested() -> None:
    on_cpu, on_gpu = pins(CPU), pins(CUDA)
    assert {name: str(pin) for name, pin in on_gpu.items()} == {
        name: str(pin) for name, pin in on_cpu.items()
    }
    for pin in on_gpu.values():
        (specifier,) = pin.specifier
        assert specifier.operator == "==" and "*" not in specifier.version, pin
    assert {"torch", "transformers", "accelerate", "deepspeed", "datasets", "pyarrow", "safetensors", "numpy",
            "tokenizers", "huggingface-hub"} <= on_gpu.keys()  # fmt: skip


@pytest.mark.skipif(tomllib is None, reason="Python 3.10 reads no TOML")
def test_every_dependency_is_pinned_to_a_version_that_the_project_allows() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    wanted += [Requirement(line) for lines in project["optional-dependencies"].values() for line in lines]
    pinned = pins(CUDA)
    seen = set()
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        if name in UNTESTED or name == project["name"]:
            continue
        assert name in pinned, f"{requirement} is pinned nowhere"
        (specifier,) = pinned[name].specifier
        assert requirement.specifier.contains(specifier.version), (requirement, pinned[name])
        seen.add(name)
    assert len(seen) > 20


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_install_takes_the_file_of_the_machine(tmp_path: Path, has_gpu: bool) -> None:
    """With a Python that only writes down what it is asked."""
    (tmp_path / "jobs").mkdir()
    for name in ("install.sh", "environment.sh", CPU, CUDA):
        shutil.copy(REPOSITORY / "jobs" / name, tmp_path / "jobs" / name)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$*" >>asked\n', encoding="utf-8")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    scripts = [python]
    if has_gpu:
        scripts.append(tools / "nvidia-smi")
        scripts[-1].write_text("#!/bin/bash\n", encoding="utf-8")
    for script in scripts:
        script.chmod(0o755)

    def install() -> list[str]:
        command = ["bash", str(tmp_path / "jobs/install.sh")]
        subprocess.run(command, env={"PATH": str(tools)}, cwd=tmp_path, check=True, timeout=60)
        return (tmp_path / "asked").read_text(encoding="utf-8").splitlines()

    asked, compiled = install()
    assert compiled == "-m compileall -q -j 0 .venv/lib"
    assert f"--constraint jobs/{CUDA if has_gpu else CPU}" in asked
    assert asked.endswith("-e .[dev]")
    assert len(install()) == 2, "nothing has changed, and it has installed again"
    with (tmp_path / "jobs" / (CUDA if has_gpu else CPU)).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert len(install()) == 4

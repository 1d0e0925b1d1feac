"""A private Slurm on this machine: every node has processes, a name and mounts of its own.

Debian's packages are enough (slurmctld, slurmd, slurm-client, munge); it needs root. Nodes see one file
system, as on a cluster, and not each other's processes. Everything ends with the process that started it.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "unshare", "setpriv")
NUM_GPUS = 4
WAIT_S = 60.0
NODE = """
hostname {name}
mount --bind {folder}/hosts /etc/hosts
slurmd -D -N {name} &
wait
"""
CONFIG = """
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/run/slurmctld
SlurmdPidFile={folder}/run/%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=1
JobRequeue=1
KillWait=20
SlurmdTimeout=6
MessageTimeout=5
TCPTimeout=2
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=64 \
RealMemory=1000000 TmpDisk=1000000 Gres=gpu:{num_gpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no cluster here."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if absent:
        packages = "slurmctld slurmd slurm-client munge"
        return f"Slurm is not installed (no {', '.join(absent)}): apt-get install {packages}"
    return None if os.geteuid() == 0 else "a private Slurm needs root"


class Cluster:
    """Nodes ``n0``, ``n1``, ..., from entering to leaving."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self._folder = folder
        self._num_nodes = num_nodes
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf"),
        }  # fmt: skip

    def __enter__(self) -> Cluster:
        folder, host = self._folder, socket.gethostname().split(".")[0]
        # Not to be written by others: munge looks at every folder above its socket.
        folder.chmod(0o755)
        for name in ("state", "log", "run", "munge", "dev"):
            (folder / name).mkdir()
        key = folder / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        for gpu in range(NUM_GPUS):
            # Slurm wants device files; these are clones of /dev/null.
            os.mknod(folder / "dev" / f"nvidia{gpu}", 0o666 | 0o020000, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/nvidia[0-{NUM_GPUS - 1}]\n")
        names = [f"n{node}" for node in range(self._num_nodes)]
        hosts = [f"127.0.0.1 localhost {host}", *(f"127.0.0.1 {name}" for name in names)]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        port = _free_ports(1 + self._num_nodes)
        (folder / "slurm.conf").write_text(
            CONFIG.format(
                host=host,
                folder=folder,
                port=port,
                first_port=port + 1,
                last_port=port + self._num_nodes,
                last=self._num_nodes - 1,
                num_gpus=NUM_GPUS,
            )
        )
        munge = folder / "munge"
        self._start(
            "munged", "munged", "-F", f"--socket={munge}/socket", f"--key-file={key}",
            f"--pid-file={munge}/pid", f"--seed-file={munge}/seed", f"--log-file={munge}/log",
        )  # fmt: skip
        self._wait_until(lambda: (munge / "socket").exists())
        self._start("slurmctld", "slurmctld", "-D")
        for name in names:
            self.power_on(name)
        self._wait_until(lambda: set(self.ask("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self._daemons)):
            self.power_off(name)

    def power_on(self, node: str) -> None:
        self._start(
            node, "unshare", "--fork", "--pid", "--mount-proc", "--uts", "--mount", "--kill-child=KILL",
            "bash", "-c", NODE.format(name=node, folder=self._folder),
        )  # fmt: skip

    def power_off(self, node: str) -> None:
        """At once, with all that runs there."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def ask(self, *command: str) -> str:
        """A Slurm command's output."""
        ended = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert ended.returncode == 0, f"{command}: {ended.stderr}"
        return ended.stdout

    def submit(self, folder: Path, settings: Mapping[str, str], *command: str) -> str:
        """sbatch, from a folder, with settings in its environment; the number of the job."""
        ended = subprocess.run(
            ["sbatch", "--parsable", *command],
            env={**self.environment, **settings},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def states(self) -> dict[str, str]:
        """Of all jobs that wait or run, array tasks apart, as ``12_3``. A busy controller is asked again: its
        silence does not mean that there are no jobs."""
        found: dict[str, str] = {}

        def is_told() -> bool:
            lines = self.ask("squeue", "-h", "-r", "-o", "%i %T").splitlines()
            found.update(line.split(maxsplit=1) for line in lines)
            return True

        self._wait_until(is_told)
        return found

    def _start(self, name: str, *command: str) -> None:
        with (self._folder / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                if reached():
                    return
            except AssertionError:
                pass  # the controller does not answer yet
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text() for path in sorted((self._folder / "log").iterdir()))
                self.__exit__(None, None, None)
                raise AssertionError(f"the cluster did not come up\n{logs}")
            time.sleep(0.1)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _free_ports(num: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    while True:
        first = random.SystemRandom().randrange(20_000, 30_000)
        try:
            for port in range(first, first + num):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first

"""Which jobs may open the same folder at the same time."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from specdist.data.file_names import LEASES
from specdist.data.leases.membership import Membership
from specdist.data.leases.opening import is_open
from specdist.data.run.manifest import Manifest
from specdist.job.run.preflight import _check_leases, open_joined
from specdist.utils.errors import UserError
from tests.data.folders import open_


def join(output: Path, *, is_shared: bool) -> Membership:
    member = Membership(output, silent_after_s=60)
    open_joined(member, Manifest(fingerprint={}), "", overwrite=False, is_shared=is_shared)
    return member


def test_a_folder_for_one_job_is_refused_until_the_first_has_left(tmp_path: Path) -> None:
    first = join(tmp_path / "run", is_shared=False)
    with pytest.raises(UserError, match=rf"run is being written by process {os.getpid()} on .*: wait until"):
        join(tmp_path / "run", is_shared=False)
    first.leave()
    join(tmp_path / "run", is_shared=False).leave()


def test_replicas_of_one_run_change_its_folder_once(tmp_path: Path) -> None:
    """And those with other options one behind another: with a draft that follows, for example."""
    output, first = tmp_path / "run", Manifest(fingerprint={"draft": "a"})
    members = [Membership(output, silent_after_s=60) for _ in range(4)]
    for member in members[:3]:
        open_joined(member, first, "seed: 1\n", overwrite=False)
    assert len(list(output.glob("leases/setup.*"))) == 1
    assert members[0].leases.latest()["setup"].generation == 2
    open_joined(members[3], first, "seed: 1\nlog_level: debug\n", overwrite=False)
    assert members[0].leases.latest()["setup"].generation == 4
    assert (output / "config.yaml").read_text() == "seed: 1\nlog_level: debug\n"
    assert not is_open(output, Manifest(fingerprint={"draft": "b"}), "seed: 1\nlog_level: debug\n")
    for member in members:
        member.leave()
    assert not list(output.glob("leases/*"))


def test_a_replica_that_would_lease_shards_elsewhere_than_the_others_is_refused(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared" / "run", tmp_path / "other" / "run"
    folder = open_(tmp_path / "run", manifest=Manifest(fingerprint={}, info={LEASES: str(shared)}))
    _check_leases(folder, shared)
    for mine, said in ((other, f"in --leases {other.parent}"), (None, "in --output itself")):
        text = rf"would lease them {re.escape(said)}, .*: give --leases {re.escape(str(shared.parent))}$"
        with pytest.raises(UserError, match=text):
            _check_leases(folder, mine)
    folder = open_(tmp_path / "itself", manifest=Manifest(fingerprint={}))
    with pytest.raises(UserError, match=r"lease shards in --output itself, .*: leave --leases out$"):
        _check_leases(folder, other)

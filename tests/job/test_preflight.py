"""Which jobs may open the same folder at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdist.data.leases.membership import Membership
from specdist.data.run.manifest import Manifest
from specdist.job.run.preflight import open_joined
from specdist.utils.errors import UserError


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


def test_replicas_of_one_run_open_its_folder_one_behind_another(tmp_path: Path) -> None:
    output, first = tmp_path / "run", Manifest(fingerprint={"draft": "a"})
    members = [Membership(output, silent_after_s=60) for _ in range(3)]
    for number, member in enumerate(members, start=1):
        open_joined(member, first, f"seed: {number}\n", overwrite=False)
        assert members[0].leases.latest()["setup"].generation == 2 * number
        assert (output / "config.yaml").read_text() == f"seed: {number}\n"
    for member in members:
        member.leave()
    assert not list(output.glob("leases/*"))

"""Which jobs may open the same folder at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdist.data import Manifest, Membership
from specdist.job.preflight import open_joined
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


def test_any_number_of_replicas_may_join_a_run(tmp_path: Path) -> None:
    members = [join(tmp_path / "run", is_shared=True) for _ in range(3)]
    assert len(members[0].others()) == 2
    for member in members:
        member.leave()
    assert members[0].others() == []

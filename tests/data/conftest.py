from __future__ import annotations

import pytest

from tests.data.folders import contents, finish, open_


@pytest.fixture
def whole(tmp_path):
    """The files of an undisturbed run."""
    finish(open_(tmp_path / "whole"))
    return contents(tmp_path / "whole")

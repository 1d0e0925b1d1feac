"""Which tests a change runs: none is left out of what imports it, and what is rare runs by its name alone."""

from __future__ import annotations

from tests.conftest import LONG, RARE, TESTS
from tests.quick import files_to_run
from tests.ranks import REPOSITORY


def test_a_change_runs_what_imports_it_itself_and_the_unit_tests() -> None:
    found = files_to_run([REPOSITORY / "specdist/data/formats/batches.py", TESTS / "gpu/test_first_day.py"])
    assert "tests/job/test_chat_format.py" in found, "imports what was changed"
    assert "tests/gpu/test_first_day.py" in found, "was changed, however rare"
    assert "tests/engine/test_scheduler.py" in found, "a unit test of the engine"
    assert "tests/gpu/test_engine.py" not in found and "tests/results/report/test_page.py" not in found


def test_files_with_a_place_of_their_own_exist() -> None:
    assert [name for name in sorted(LONG.keys() | RARE) if not (TESTS / name).is_file()] == []

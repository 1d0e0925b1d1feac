"""No constraint ends the process that asks for its grammar."""

from __future__ import annotations

import os
import signal

import pytest

from specdist.sampling.constraints.compiling import CompilingProcess
from specdist.sampling.constraints.constraint import Constraint, ConstraintError

# llguidance overflows its stack: in a grammar the numbers are not seen before.
CRASH = 'start: %json {"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775807}'


def test_a_crash_is_the_error_of_its_constraint_alone() -> None:
    """And of every row that has it; a process that is ended from outside is no error."""
    process = CompilingProcess()
    assert process.grammar(Constraint("regex", "a+")) == Constraint("regex", "a+").grammar
    for _ in range(2):
        with pytest.raises(ConstraintError, match="cannot compile it: its process ended with SIGSEGV"):
            process.grammar(Constraint("grammar", CRASH))
    assert process.grammar(Constraint("regex", "b+"))
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert process.grammar(Constraint("regex", "c+"))
    with pytest.raises(ConstraintError, match="unclosed group"):
        process.grammar(Constraint("regex", "(a"))
    with pytest.raises(ConstraintError, match="it is not JSON: Object of type bytes"):
        process.grammar(Constraint("json_schema", {"const": b"x"}))


@pytest.mark.parametrize(
    ("limits", "ended"), [({"max_seconds": 1}, "SIGXCPU"), ({"max_memory": 200 << 20}, "SIGABRT")]
)
def test_time_and_memory_are_limited(limits: dict[str, int], ended: str) -> None:
    """A constraint without either would hold up all rows, or take the memory of the models."""
    with pytest.raises(ConstraintError, match=f"ended with {ended}"):
        CompilingProcess(**limits).grammar(Constraint("regex", "abcdefghij" * 400_000))

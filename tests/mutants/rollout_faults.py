"""Faults in the processes that call a user's function."""

from tests.mutants.mutant import Mutant

POOL = "tests/rollouts/test_pool.py"

ROLLOUT_FAULTS = (
    Mutant("a-killed-run-leaves-processes-that-hang-in-the-users-function", "main",
        "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)",
        "pass",
        (f"{POOL}::test_a_killed_run_leaves_no_worker",)),
    Mutant("an-error-is-told-with-a-line-that-is-not-the-users", "_told",
        "frame.filename == file",
        "True",
        (f"{POOL}::test_whatever_a_function_does_is_an_answer",)),
)

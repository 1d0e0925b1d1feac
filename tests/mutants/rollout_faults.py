"""Faults in what follows from a user's function, and in what a replica that goes on takes from notes."""

from tests.mutants.mutant import Mutant

ROLLOUTS, POOL = "tests/job/test_rollouts.py::", "tests/job/rollouts/test_pool.py::"

ROLLOUT_FAULTS = (
    Mutant("attempts-share-their-random-numbers", "stream_key",
        "later = (turn, attempt) if attempt else",
        "later =",
        (ROLLOUTS + "test_attempts_are_drawn_anew",), is_dangerous=True),
    Mutant("what-is-judged-is-not-noted", "RolloutRows.end",
        'self._note(chain, log, {"completion"',
        'self._note(chain, log, {"nothing"',
        (ROLLOUTS + "test_a_run_that_is_killed_goes_on_where_it_was",)),
    Mutant("answers-are-not-noted", "RolloutRows.answered",
        '        self._note(chain, log, {"answer": judged.answer.to_json()})\n',
        "",
        (ROLLOUTS + "test_a_run_that_is_killed_goes_on_where_it_was",)),
    Mutant("turns-go-on-from-a-rejected-attempt", "Chain.begin_attempt",
        "self.done, self.messages = (), list(self.prompt)",
        "self.done = ()",
        (ROLLOUTS + "test_attempts_are_drawn_anew",)),
    Mutant("run-ends-while-a-function-is-asked", "_next_assignment",
        "if recorder.lease() or recorder.waits_for_answers:",
        "if recorder.lease():",
        (ROLLOUTS + "test_a_function_that_accepts_everything_changes_no_token",)),
    Mutant("a-killed-run-leaves-processes-that-hang-in-the-users-function", "main",
        "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)",
        "pass",
        (POOL + "test_a_killed_run_leaves_no_worker",)),
    Mutant("an-error-is-told-with-a-line-that-is-not-the-users", "_told",
        "frame.filename == file",
        "True",
        (POOL + "test_whatever_a_function_does_is_an_answer",)),
)  # fmt: skip

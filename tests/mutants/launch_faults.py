"""Faults in launches of several ranks, target groups and drafts."""

from tests.mutants.mutant import Mutant

GROUPS = "tests/job/test_target_groups.py::"
FAILOVER = GROUPS + "test_a_draft_that_dies_for_good_hands_its_groups_to_the_other"

LAUNCH_FAULTS = (
    Mutant(
        name="group-knows-its-own-draft-alone",
        file="job/shared_drafts.py",
        old="for offset in range(self._num_drafts):",
        new="for offset in range(1):",
        tests=(FAILOVER,),
    ),
    Mutant(
        name="part-that-is-killed-is-not-started-again",
        file="job/supervisor.py",
        old="if published == num_starts and num_starts >= self._config.max_restarts:",
        new="if published == num_starts:",
        tests=("tests/job/test_supervisor.py",),
    ),
    Mutant(
        name="part-that-always-fails-is-started-without-end",
        file="job/supervisor.py",
        old="if published == num_starts and num_starts >= self._config.max_restarts:",
        new="if published == num_starts and num_starts > self._config.max_restarts:",
        tests=("tests/job/test_supervisor.py",),
    ),
    Mutant(
        name="launch-of-too-many-ranks-accepted",
        file="config/generate.py",
        old="if world_size != self.num_world_ranks:",
        new="if world_size < self.num_world_ranks:",
        tests=(GROUPS + "test_launches_that_do_not_fit_are_refused",),
    ),
    Mutant(
        name="a-rank-ends-before-rank-0-has-shown-the-error",
        file="job/entry.py",
        old="            if not shows_errors:\n                time.sleep(RANK_0_FIRST_S)\n",
        new="",
        tests=("tests/job/test_half_precision.py::test_with_the_old_fault_the_job_does_not_begin",),
    ),
)

"""Faults in launches of several ranks, target groups and drafts."""

from tests.mutants.mutant import Mutant

GROUPS = "tests/job/test_target_groups.py::"
FAILOVER = GROUPS + "test_a_draft_that_dies_for_good_hands_its_groups_to_the_other"

ENDING = "tests/gpu/test_ending.py::test_a_complete_run_keeps_no_graph_that_holds_a_collective"

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
        name="a-complete-run-waits-for-its-graphs",
        file="job/entry.py",
        old='            if topology.device.type != "cuda":\n                dist.destroy_process_group()\n',
        new="            dist.destroy_process_group()\n",
        tests=(ENDING,),
    ),
    Mutant(
        name="graphs-live-on-when-a-run-has-ended",
        file="job/entry.py",
        old="            gc.collect()  #",
        new="            #",
        tests=(ENDING,),
    ),
    Mutant(
        name="a-rank-gives-up-its-graphs-alone",
        file="models/graphs.py",
        old="        if self._group is None:\n            return is_right\n",
        new="        return is_right\n",
        tests=(
            "tests/gpu/test_faults.py::test_a_rank_that_cannot_record_or_replay_makes_all_ranks_give_graphs_up",
        ),
    ),
    Mutant(
        name="a-world-of-one-works-on-the-first-gpu",
        file="job/topology.py",
        old="        torch.cuda.set_device(topology.device)\n    if topology.world_size == 1:\n        return\n",
        new="        if topology.world_size > 1:\n            torch.cuda.set_device(topology.device)\n"
        "    if topology.world_size == 1:\n        return\n",
        tests=("tests/gpu/test_ending.py::test_a_world_of_one_works_on_its_own_gpu",),
    ),
    Mutant(
        name="a-rank-ends-before-rank-0-has-shown-the-error",
        file="job/entry.py",
        old="            if not shows_errors:\n                time.sleep(RANK_0_FIRST_S)\n",
        new="",
        tests=("tests/job/test_half_precision.py::test_with_the_old_fault_the_job_does_not_begin",),
    ),
    Mutant(
        name="absent-deepspeed-not-noticed-at-the-start",
        file="job/topology.py",
        old='check_installed("deepspeed", ',
        new='check_installed("torch", ',
        tests=("tests/job/test_few_packages.py::test_sharding_without_deepspeed_is_refused_at_the_start",),
    ),
    Mutant(
        name="true-taken-for-a-number",
        file="utils/json_values.py",
        old="if type(value) not in types:",
        new="if not isinstance(value, types):",
        tests=("tests/utils/test_json_values.py",),
    ),
)

"""Faults in launches of several ranks, target groups and drafts."""

from tests.mutants.mutant import Mutant

GROUPS = "tests/job/test_target_groups.py::"
FAILOVER = GROUPS + "test_a_draft_that_dies_for_good_hands_its_groups_to_the_other"

ENDING = "tests/gpu/test_ending.py::test_a_complete_run_keeps_no_graph_that_holds_a_collective"

LAUNCH_FAULTS = (
    Mutant("group-knows-its-own-draft-alone", "DraftDirectory._addresses",
        "for offset in range(self._num_drafts):",
        "for offset in range(1):",
        (FAILOVER,)),
    Mutant("part-that-is-killed-is-not-started-again", "Supervisor._supervise",
        "if published == num_starts and num_starts >= self._config.max_restarts:",
        "if published == num_starts:",
        ("tests/job/test_supervisor.py",)),
    Mutant("part-that-always-fails-is-started-without-end", "Supervisor._supervise",
        "if published == num_starts and num_starts >= self._config.max_restarts:",
        "if published == num_starts and num_starts > self._config.max_restarts:",
        ("tests/job/test_supervisor.py",)),
    Mutant("launch-of-too-many-ranks-accepted", "GenerateConfig._check_parts",
        "if world_size != self.num_world_ranks:",
        "if world_size < self.num_world_ranks:",
        (GROUPS + "test_launches_that_do_not_fit_are_refused",)),
    Mutant("a-complete-run-waits-for-its-graphs", "run_rank",
        '            if topology.device.type != "cuda":\n                dist.destroy_process_group()\n',
        "            dist.destroy_process_group()\n",
        (ENDING,)),
    Mutant("graphs-live-on-when-a-run-has-ended", "run_rank",
        "            gc.collect()  #",
        "            #",
        (ENDING,)),
    Mutant("a-rank-gives-up-its-graphs-alone", "CudaGraphs.agree",
        "        if self._group is None:\n            return is_right\n",
        "        return is_right\n",
        ("tests/gpu/test_faults.py::test_a_rank_that_cannot_record_or_replay_makes_all_ranks_give_graphs_up",)),
    Mutant("a-world-of-one-works-on-the-first-gpu", "join_world",
        "        torch.cuda.set_device(topology.device)\n    if topology.world_size == 1:\n        return\n",
        ("        if topology.world_size > 1:\n            torch.cuda.set_device(topology.device)\n"
         "    if topology.world_size == 1:\n        return\n"),
        ("tests/gpu/test_ending.py::test_a_world_of_one_works_on_its_own_gpu",)),
    Mutant("a-rank-ends-before-rank-0-has-shown-the-error", "run_rank",
        "            if not shows_errors:\n                time.sleep(RANK_0_FIRST_S)\n",
        "",
        ("tests/job/test_half_precision.py::test_with_the_old_fault_the_job_does_not_begin",)),
    Mutant("absent-deepspeed-not-noticed-at-the-start", "topology_from_environment",
        'check_installed("deepspeed", ',
        'check_installed("torch", ',
        ("tests/job/test_few_packages.py::test_sharding_without_deepspeed_is_refused_at_the_start",)),
    Mutant("true-taken-for-a-number", "_of_plain",
        "if type(value) not in types:",
        "if not isinstance(value, types):",
        ("tests/utils/test_json_values.py",)),
)

"""Faults in launches of several ranks."""

from tests.mutants.mutant import Mutant

CONNECTING = "tests/job/test_connecting.py"
TOGETHER = "tests/models/test_graphs.py::test_ranks_record_and_give_up_together"

LAUNCH_FAULTS = (
    Mutant("launch-of-too-many-ranks-accepted", "GenerateConfig.check_world",
        "if world_size not in fitting:",
        "if world_size < min(fitting):",
        ("tests/config/test_generate.py::test_the_number_of_ranks_must_fit",)),
    Mutant("a-rank-gives-up-its-graphs-alone", "CudaGraphs.agree",
        "return agreed(self._group, is_right)",
        "return is_right",
        (TOGETHER,)),
    Mutant("passes-are-recorded-beyond-their-memory", "GraphMemory.has_room",
        "if grown_bytes + self._largest_bytes > self._most_bytes:",
        "if False:",
        ("tests/models/test_graphs.py", "tests/gpu/test_memory.py")),
    Mutant("nccl-takes-memory-after-the-cache", "_agree_on_pages",
        "        _connect(plan, loaded, activity)\n",
        "",
        (CONNECTING,)),
    Mutant("a-world-of-one-works-on-the-first-gpu", "join_world",
        "        torch.cuda.set_device(topology.device)\n    if topology.world_size == 1:\n        return\n",
        ("        if topology.world_size > 1:\n            torch.cuda.set_device(topology.device)\n"
         "    if topology.world_size == 1:\n        return\n"),
        (CONNECTING,)),
    Mutant("a-rank-ends-before-rank-0-has-shown-the-error", "run_rank",
        "            if not shows_errors:\n                time.sleep(RANK_0_FIRST_S)\n",
        "",
        ("tests/job/test_half_precision.py::test_with_the_old_fault_the_job_does_not_begin",)),
    Mutant("absent-deepspeed-not-noticed-at-the-start", "topology_from_environment",
        'check_installed("deepspeed", ',
        'check_installed("torch", ',
        ("tests/job/test_few_packages.py::test_sharding_without_deepspeed_is_refused_at_the_start",)),
    Mutant("a-plan-is-not-for-this-machine", "plan_call",
        "memory_bytes={gpu: least.total_memory}",
        "memory_bytes={}",
        ("tests/test_replicas.py::test_replicas_are_where_the_planner_places_them",)),
    Mutant("a-loop-that-was-left-stays-open", "Completions.__iter__",
        "yield from self._results",
        "yield from map(lambda result: result, self._results)",
        ("tests/test_llm.py::test_results_as_they_finish_are_those_of_the_list",)),
)

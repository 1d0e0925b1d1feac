"""Faults in what the host does while a device is at work, and in the emulation and the planner that show it."""

from tests.mutants.mutant import Mutant

MEANWHILE = "tests/engine/test_meanwhile.py"
DEVICE = "tests/emulation/test_device.py"
MARKOV = "tests/emulation/test_markov.py"
SIMULATED, ADVICE = "tests/planning/test_simulate.py", "tests/planning/test_advise.py"

HOST_FAULTS = (
    Mutant(
        name="shard-counts-as-finished-before-its-files-are-there",
        file="job/uploads.py",
        old="        self._running.append((self._pool.submit(publish), then))\n",
        new="        then(True)\n        self._running.append((self._pool.submit(publish), lambda is_mine: None))\n",
        tests=("tests/job/test_uploads.py",),
    ),
    Mutant(
        name="run-ends-before-its-last-shards-have-their-files",
        file="job/recording.py",
        old="self._uploads.settle(max_running=None if self._is_stored else 0)",
        new="self._uploads.settle()",
        tests=("tests/job/test_uploads.py",),
    ),
    Mutant(
        name="a-block-is-begun-whatever-the-host-takes-for-it",
        file="policies/goodput.py",
        old="if not rows.num_drafted:",
        new="if False:",
        tests=("tests/policies/test_goodput.py::test_what_any_drafting_takes_is_weighed_once",),
    ),
    Mutant(
        name="what-every-round-takes-counted-as-drafting",
        file="job/host_times.py",
        old="beyond[1] - step - beyond[0]",
        new="beyond[1] - step",
        tests=("tests/job/test_host_times.py",),
    ),
    Mutant(
        name="steps-cost-what-their-passes-do",
        file="job/host_times.py",
        old="np.asarray(costs.draft.ns) + step_ns",
        new="np.asarray(costs.draft.ns) + 0 * step_ns",
        tests=("tests/job/test_host_times.py",),
    ),
    Mutant(
        name="times-of-round-counted-up-to-when-they-are-read",
        file="engine/timeline.py",
        old="            if interval is last:\n                return\n",
        new="",
        tests=("tests/engine/test_timeline.py",),
    ),
    Mutant(
        name="next-tokens-are-lost-with-failed-pass",
        file="engine/engine.py",
        old="        finally:\n            # The target is at work",
        new="        except KeyError:\n            raise\n        else:\n            # The target is at work",
        tests=("tests/engine/test_faults.py",),
    ),
    Mutant(
        name="candidates-of-ended-sequence-run-for-next-one",
        file="engine/blocks.py",
        old="ids_C[np.repeat(goes_on_R, num_R)]",
        new="ids_C[: int(num_R[goes_on_R].sum())]",
        tests=("tests/engine/test_blocks.py",),
    ),
    Mutant(
        name="error-of-a-round-loses-what-had-been-finished",
        file="engine/engine.py",
        old="                yield from self._completions()\n                out_of_memory",
        new="                out_of_memory",
        tests=(MEANWHILE,),
    ),
    Mutant(
        name="completions-wait-for-the-pass",
        file="engine/engine.py",
        old="            yield from self._completions()\n            # For those",
        new="            # For those",
        tests=(MEANWHILE,),
    ),
    Mutant(
        name="pass-is-waited-for-when-it-begins",
        file="engine/local_target.py",
        old="    distributions_N: Distributions\n    verify_input: VerifyInput\n",
        new="    distributions_N: Distributions\n    verify_input: VerifyInput\n\n"
        "    def __post_init__(self) -> None:\n        assert self._fetched_N is not None\n",
        tests=(MEANWHILE,),
    ),
    Mutant(
        name="emulated-result-is-there-at-once",
        file="emulation/device.py",
        old="                    device.wait()\n",
        new="                    pass\n",
        tests=(DEVICE,),
    ),
    Mutant(
        name="emulated-passes-run-side-by-side",
        file="emulation/device.py",
        old="begin = max(asked_ns or time.monotonic_ns(), self.free_at_ns)",
        new="begin = asked_ns or time.monotonic_ns()",
        tests=(DEVICE,),
    ),
    Mutant(
        name="emulated-draft-at-temperature-accepts-less",
        file="emulation/markov.py",
        old="acceptance_V[:, None] * masses_VM,",
        new="acceptance_V[:, None] ** 2 * masses_VM,",
        tests=(MARKOV,),
    ),
    Mutant(
        name="round-ahead-counts-both-devices",
        file="emulation/accounting.py",
        old="lengths_R - now_R - np.maximum(busy_R, ahead_R)",
        new="lengths_R - now_R - (busy_R + ahead_R)",
        tests=(DEVICE,),
    ),
    Mutant(
        name="draft-before-its-reply-counts-as-work-ahead",
        file="emulation/accounting.py",
        old="is_now_P = _lies_in(own_P2[:, 0], draft.spans_S2)",
        new="is_now_P = np.zeros(len(own_P2), bool)",
        tests=(DEVICE,),
    ),
    Mutant(
        name="emulated-run-takes-the-time-of-one-step",
        file="emulation/runner.py",
        old=" + (num_steps - 1) * step_ns\n",
        new="\n",
        tests=("tests/emulation/test_runs.py",),
    ),
    Mutant(
        name="emulated-run-draws-all-steps-with-one-number",
        file="emulation/runner.py",
        old="uniforms_A = None if uniforms_DA is None else uniforms_DA[step]",
        new="uniforms_A = None if uniforms_DA is None else uniforms_DA[0]",
        tests=("tests/emulation/test_runs.py",),
    ),
    Mutant(
        name="draft-beside-a-sharded-target-out-of-memory-ends-the-job",
        file="engine/colocated.py",
        old="            if is_out_of_memory(error):\n",
        new="            if False:\n",
        tests=("tests/engine/test_faults.py",),
    ),
    Mutant(
        name="draft-on-rank-0-is-given-a-channel",
        file="job/allocation.py",
        old="topology.has_draft_rank and topology.rank in",
        new="topology.uses_draft and topology.rank in",
        tests=("tests/job/test_allocation.py",),
    ),
    Mutant(
        name="planned-targets-of-a-draft-never-wait",
        file="planning/simulate.py",
        old="found.append((max(away_s + own_s, busy_s), work_s))",
        new="found.append((away_s + own_s, work_s))",
        tests=(SIMULATED,),
    ),
    Mutant(
        name="planned-draft-holds-the-rows-of-one-target",
        file="planning/memory.py",
        old="        num_rows *= self.num_targets\n",
        new="",
        tests=(ADVICE,),
    ),
    Mutant(
        name="planned-draft-on-rank-0-takes-no-memory",
        file="planning/memory.py",
        old="        both = _share(gpu, beside, of_target, target=target, tp_size=tp_size, draft=draft)\n",
        new="        both = _share(gpu, beside, of_target, target=target, tp_size=tp_size)\n",
        tests=(ADVICE,),
    ),
    Mutant(
        name="emulated-batch-is-filled-a-chunk-at-a-time",
        file="emulation/session.py",
        old="            engine.scheduler.settings = limits\n",
        new="",
        tests=("tests/emulation/test_modes.py",),
    ),
    Mutant(
        name="second-step-is-run-for-nothing",
        file="engine/draft_runs.py",
        old="return min(max(1, int(",
        new="return min(max(2, int(",
        tests=("tests/engine/test_draft_loop.py",),
    ),
    Mutant(
        name="prompts-of-all-but-one-slot-are-read-between-passes",
        file="engine/engine.py",
        old="self.scheduler.look_ahead(len(finished) + 1)",
        new="self.scheduler.look_ahead()",
        tests=(MEANWHILE,),
    ),
)

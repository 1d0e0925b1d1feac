"""Faults in the choice of a round's work, and in rounds without the draft."""

from tests.mutants.mutant import Mutant

CHOSEN = "tests/engine/test_goodput.py::"
FOLLOWS_TARGET = CHOSEN + "test_goodput_follows_the_target_s_distribution[chosen-plain]"
SAME_MODEL = CHOSEN + "test_goodput_accepts_a_draft_that_is_the_target[chosen]"
ROUNDS, LESSONS = "tests/theory/test_rounds.py", "tests/engine/test_lessons.py"

ROUND_FAULTS = (
    Mutant(
        name="target-goes-on-alone-while-drafted-tokens-wait",
        file="engine/draft_ahead.py",
        old="return 0 if is_pending or self.shape.num_ahead else self.shape.num_rounds_alone",
        new="return self.shape.num_rounds_alone",
        tests=(FOLLOWS_TARGET, SAME_MODEL),
    ),
    Mutant(
        name="draft-is-not-told-what-it-missed",
        file="engine/on_demand.py",
        old="self._missed or [NOTHING_MISSED]",
        new="[NOTHING_MISSED]",
        tests=(SAME_MODEL,),
    ),
    Mutant(
        name="next-token-alone-drawn-as-if-nothing-had-missed",
        file="engine/no_draft.py",
        old="np.array([sequence.counters.num_misses for sequence in sequences], np.int64)",
        new="np.zeros(len(sequences), np.int64)",
        tests=("tests/engine/test_on_demand.py",),
    ),
    Mutant(
        name="cost-of-a-pass-does-not-know-the-context",
        file="policies/costs.py",
        old="more * context.target_row_ns",
        new="0 * more * context.target_row_ns",
        tests=(ROUNDS,),
    ),
    Mutant(
        name="decoding-alone-is-never-left",
        file="theory/rounds.py",
        old="if rate > WORTH_ASKING * rates.alone:",
        new="if rate > 100 * WORTH_ASKING * rates.alone:",
        tests=(ROUNDS,),
    ),
    Mutant(
        name="prompts-give-the-draft-time-in-all-rounds",
        file="theory/rounds.py",
        old="share_KB = np.minimum(1.0, prompts * own_rows * tokens_KB / chunk)",
        new="share_KB = np.ones_like(tokens_KB)",
        tests=(ROUNDS,),
    ),
    Mutant(
        name="work-ahead-is-planned-without-the-drafts-host",
        file="theory/rounds.py",
        old="step_ns, host_ns = float(costs.draft_ns(rows, context)), float(costs.ahead.look_up(rows))",
        new="step_ns, host_ns = float(costs.draft_ns(rows, context)), 0.0",
        tests=("tests/job/test_costs.py",),
    ),
    Mutant(
        name="work-ahead-is-planned-for-passes-of-whole-blocks",
        file="theory/rounds.py",
        old="sizes_KB = np.rint(own_rows * (1 + ready_KB * lengths_K[:, None])).astype(int)",
        new="sizes_KB = np.rint(own_rows * (1 + 0 * ready_KB + lengths_K[-1])).astype(int)",
        tests=("tests/job/test_costs.py",),
    ),
    Mutant(
        name="a-prompt-in-the-pass-lowers-what-a-ready-token-must-bring",
        file="policies/goodput.py",
        old="bare_ns = self._target_ns(len(lengths_R) + np.arange(len(lines_C) + 1), round)",
        new="bare_ns = pass_ns",
        tests=("tests/policies/test_goodput.py",),
    ),
    Mutant(
        name="what-a-proposal-adds-is-counted-without-the-round",
        file="planning/validate.py",
        old="proposals_ns = [_beside_passes_ns(passes, stats) - round_ns for stats in drafting]",
        new="proposals_ns = [_beside_passes_ns(passes, stats) for stats in drafting]",
        tests=("tests/planning/test_validate.py",),
    ),
    Mutant(
        name="all-repeats-count-alike",
        file="planning/validate.py",
        old="[min(times) for times in zip(*(curve.ns for curve in curves), strict=True)]",
        new="[max(times) for times in zip(*(curve.ns for curve in curves), strict=True)]",
        tests=("tests/planning/test_validate.py",),
    ),
    Mutant(
        name="first-prompts-stand-beside-rounds",
        file="theory/rounds.py",
        old="        if not num_new_tokens:\n            return\n",
        new="",
        tests=(ROUNDS,),
    ),
    Mutant(
        name="host-of-a-draft-that-works-ahead-is-free",
        file="theory/rounds.py",
        old="float(costs.ahead.look_up(rows))",
        new="0.0",
        tests=(ROUNDS,),
    ),
    Mutant(
        name="host-of-a-draft-in-turns-is-free",
        file="theory/rounds.py",
        old=" + float(costs.turns.look_up(rows))",
        new="",
        tests=(ROUNDS,),
    ),
    Mutant(
        name="steps-count-as-the-hosts-time",
        file="job/measuring.py",
        old="spent_ns - sum(step_ns(size) for size in reply.draft_pass_sizes_P.tolist())",
        new="spent_ns - sum(step_ns(size) for size in reply.draft_pass_sizes_P.tolist()[:1])",
        tests=("tests/job/test_drafting_times.py",),
    ),
    Mutant(
        name="acceptance-is-not-learned",
        file="theory/rounds.py",
        old="        self._acceptance += num_accepted, num_verified\n",
        new="",
        tests=("tests/planning/test_sweep.py",),
    ),
    Mutant(
        name="acceptance-of-long-ago-is-not-forgotten",
        file="theory/rounds.py",
        old="        self._acceptance *= 0.5 ** (num_verified / MEMORY)\n",
        new="",
        tests=("tests/planning/test_sweep.py",),
    ),
    Mutant(
        name="draft-learns-before-its-reply",
        file="engine/draft_worker.py",
        old="        if wanted_now or self._memory.is_on:\n",
        new="        if True:\n",
        tests=(LESSONS,),
    ),
    Mutant(
        name="draft-that-works-ahead-learns-nothing",
        file="engine/draft_worker.py",
        old="        self._lessons.learn()\n        self._forget_scores(request)\n        with",
        new="        self._forget_scores(request)\n        with",
        tests=(LESSONS,),
    ),
    Mutant(
        name="target-that-was-told-to-go-on-alone-is-drafted-for",
        file="theory/rounds.py",
        old="        if shape.num_rounds_alone:\n            return shape\n",
        new="",
        tests=(ROUNDS,),
    ),
    Mutant(
        name="time-to-spare-for-drafting-makes-verifying-free",
        file="policies/goodput.py",
        old="round.num_bursts * (self._first_ns + steps * step_ns)",
        new="round.num_bursts * self._drafting_ns",
        tests=("tests/policies/test_goodput.py",),
    ),
    Mutant(
        name="runs-of-steps-grow-whatever-was-needed",
        file="engine/draft_runs.py",
        old="return min(max(1, int(",
        new="return min(max(1, num_steps, int(",
        tests=("tests/engine/test_draft_loop.py",),
    ),
)

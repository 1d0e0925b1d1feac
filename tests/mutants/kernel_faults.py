"""Faults in the kernels for GPUs, and in the passes that are recorded there."""

from tests.mutants.mutant import Mutant

ATTENTION = "tests/kernels/test_paged_attention.py"
FLOAT64 = f"{ATTENTION}::test_it_equals_float64"
NEIGHBOURS = f"{ATTENTION}::test_a_row_does_not_depend_on_its_neighbours"
PADDING = f"{ATTENTION}::test_padding_gets_zeros"
SAMPLING = "tests/kernels/test_sampling.py"
STATIC = "tests/models/test_static.py"
PROBE = "tests/models/test_probe.py::"
RUNS = "tests/models/test_static_runs.py::"
RUN, NUMBERS = (
    RUNS + "test_a_run_gives_what_single_steps_give",
    RUNS + "test_random_numbers_of_a_run_are_the_hosts",
)
NUMBERS += "_to_the_last_bit"

KERNEL_FAULTS = (
    Mutant(
        name="splits-are-joined-without-rescaling",
        file="kernels/paged_attention.py",
        old="outputs * old[:, None] + split_outputs * new[:, None]",
        new="outputs + split_outputs * new[:, None]",
        tests=(FLOAT64,),
    ),
    Mutant(
        name="a-query-misses-its-own-key",
        file="kernels/paged_attention.py",
        old="is_key[None, :] & (keys_N[None, :] <= position_M[:, None])",
        new="is_key[None, :] & (keys_N[None, :] < position_M[:, None])",
        tests=(FLOAT64,),
    ),
    Mutant(
        name="window-one-key-too-wide",
        file="kernels/paged_attention.py",
        old="keys_N[None, :] > position_M[:, None] - window",
        new="keys_N[None, :] >= position_M[:, None] - window",
        tests=(FLOAT64,),
    ),
    Mutant(
        name="places-after-the-last-key-are-read",
        file="kernels/paged_attention.py",
        old="is_read = is_key[:, None] & (columns_D < width)[None, :]",
        new="is_read = (keys_N >= 0)[:, None] & (columns_D < width)[None, :]",
        tests=(FLOAT64,),
    ),
    Mutant(
        name="size-of-splits-depends-on-the-batch",
        file="kernels/paged_attention.py",
        old='"split_keys": SPLIT_KEYS,',
        new='"split_keys": SPLIT_KEYS if in_splits else 2**20,',
        tests=(NEIGHBOURS,),
    ),
    Mutant(
        name="queries-without-keys-divide-by-zero",
        file="kernels/paged_attention.py",
        old="result = outputs / tl.where(sums == 0.0, 1.0, sums)[:, None]\n        tl.store",
        new="result = outputs / sums[:, None]\n        tl.store",
        tests=(PADDING,),
    ),
    Mutant(
        name="kernel-drops-what-ties-with-last-that-top-p-keeps",
        file="kernels/sampling.py",
        old="num_reached = tl.sum((sums >= wanted).to(tl.int32), 0)",
        new="num_reached = tl.sum((sums > wanted).to(tl.int32), 0)",
        tests=(SAMPLING,),
    ),
    Mutant(
        name="kernel-renormalises-before-top-p-without-top-k",
        file="kernels/sampling.py",
        old="is_kept = (ids < num_ids) & (_sort_keys(scores) >= least_key)",
        new="is_kept = ids < num_ids",
        tests=(SAMPLING,),
    ),
    Mutant(
        name="kernel-draws-an-id-without-mass",
        file="kernels/sampling.py",
        old="(before + tl.cumsum(masses, 0) > wanted) & (masses > 0)",
        new="before + tl.cumsum(masses, 0) >= wanted",
        tests=(SAMPLING,),
    ),
    Mutant(
        name="every-slice-races-with-noise-of-first",
        file="kernels/sampling.py",
        old="steps = (ids + first_id + 1)",
        new="steps = (ids + 1)",
        tests=(SAMPLING,),
    ),
    Mutant(
        name="padding-tokens-write-to-page-0",
        file="models/static.py",
        old="cache_index[:] = scratch_page * page_size +",
        new="cache_index[:] =",
        tests=(STATIC,),
    ),
    Mutant(
        name="padding-tokens-belong-to-last-sequence",
        file="models/static.py",
        old="    starts[num_segments] = num_tokens\n",
        new="",
        tests=(STATIC,),
    ),
    Mutant(
        name="all-steps-of-run-draw-with-same-number",
        file="models/static_runs.py",
        old="firsts_S + torch.arange(num_steps, device=firsts_S.device)[:, None]",
        new="firsts_S + torch.zeros(num_steps, 1, dtype=torch.int64, device=firsts_S.device)",
        tests=(NUMBERS, RUN),
    ),
    Mutant(
        name="run-draws-without-misses",
        file="models/static_runs.py",
        old="keys.positions_N, keys.num_misses_N\n",
        new="keys.positions_N, 0 * keys.num_misses_N\n",
        tests=(NUMBERS, RUN),
    ),
    Mutant(
        name="run-writes-after-end-of-sequences-steps",
        file="models/static_runs.py",
        old="np.nonzero(np.arange(1, num_steps)[:, None] < num_steps_A)",
        new="np.nonzero(np.arange(1, num_steps)[:, None] < 0 * num_steps_A + num_steps)",
        tests=(RUN,),
    ),
    Mutant(
        name="later-steps-of-run-read-scratch-page",
        file="models/static_runs.py",
        old="ends_A, pages_SP, num_more_keys_S)",
        new="ends_A, pages_SP)",
        tests=(RUN,),
    ),
    Mutant(
        name="later-steps-of-run-miss-newest-key",
        file="models/static_runs.py",
        old="used[lines] = seen.positions_T + 1",
        new="used[lines] = seen.positions_T",
        tests=(RUN,),
    ),
    Mutant(
        name="scores-of-run-overwritten-by-next",
        file="models/static_runs.py",
        old="scores_SV[:num_rows].clone()",
        new="scores_SV[:num_rows]",
        tests=(RUN,),
    ),
    Mutant(
        name="draws-of-run-overwritten-by-next",
        file="models/static_runs.py",
        old="columns.view(num_steps, -1, bucket.num_logits).clone()",
        new="columns.view(num_steps, -1, bucket.num_logits)",
        tests=(RUN,),
    ),
    Mutant(
        name="wrong-replay-of-run-passes-for-rounding",
        file="models/static_runs.py",
        old="    if is_equal_DS[0].float().mean() < LEAST_EQUAL_DRAWS:\n        return torch.inf, 0.0\n",
        new="",
        tests=(RUNS + "test_what_counts_as_the_same_run",),
    ),
    Mutant(
        name="scores-of-run-kept-for-other-sequences",
        file="engine/draft_runs.py",
        old="scores_AV = run.scores[step]",
        new="scores_AV = run.scores[step].flip(0)",
        tests=("tests/gpu/test_waits.py::test_how_late_a_policy_is_asked_changes_no_row",),
    ),
    Mutant(
        name="library-used-though-no-faster",
        file="models/probe.py",
        old="if seconds[chosen] >= LEAST_GAIN * seconds[fastest]:",
        new="if True:",
        tests=(PROBE + "test_a_kernel_of_a_library_is_used_if_it_is_right_and_faster",),
    ),
    Mutant(
        name="library-used-though-numbers-depend-on-batch",
        file="models/probe.py",
        old="        if not torch.equal(found, found_THD[begin:end]):\n",
        new="        if False:\n",
        tests=(PROBE + "test_a_kernel_of_a_library_is_used_if_it_is_right_and_faster",),
    ),
    Mutant(
        name="library-sees-one-key-too-many-in-window",
        file="models/library_kernels.py",
        old="else rules.window - 1",
        new="else rules.window",
        tests=(PROBE + "test_of_two_libraries_the_faster_one_is_used",),
    ),
    Mutant(
        name="scores-of-another-run-than-draws",
        file="models/static_runs.py",
        old="        if is_new:\n",
        new="        if False:\n",
        tests=(RUNS + "test_draws_scores_and_cache_are_of_the_same_run",),
    ),
)

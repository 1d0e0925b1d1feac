"""Faults in the kernels for GPUs, and in the passes that are recorded there."""

from tests.mutants.mutant import Mutant

ATTENTION = "tests/kernels/test_paged_attention.py"
FLOAT64 = f"{ATTENTION}::test_it_equals_float64"
NEIGHBOURS = f"{ATTENTION}::test_a_row_does_not_depend_on_its_neighbours"
PADDING = f"{ATTENTION}::test_padding_gets_zeros"
SAMPLING = "tests/kernels/test_sampling.py"
STATIC = "tests/models/test_static.py"

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
)

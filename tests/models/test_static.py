"""Static passes against one plain forward per row; what padding may write to; the choice of buckets."""

import copy

import numpy as np
import pytest
import torch

from specdist.models.attention.kernel import SdpaKernel
from specdist.models.batch.flat import FlatBatch, Segments
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.static import (
    FREE_TOKENS,
    MAX_TOKENS,
    Bucket,
    StaticPasses,
    bucket_of_tokens,
    choose_bucket,
)
from tests.engine.harness import paged_runner
from tests.models.chunks import MIXED, NUM_PAGES, TOLERANCE, Ends, GrowingRows, check_rows
from tests.models.families import tiny_model
from tests.models.kernels import PlainKernel

CPU = torch.device("cpu")
PAGE_SIZE = 4
# Short chunks of 1 to 16 tokens, of one row or several, that begin at different times and outgrow windows.
SHORT: list[Ends] = [
    {3: 5}, {3: 6, 0: 3}, {3: 14, 0: 4, 1: 13}, {0: 5, 1: 14, 3: 15, 4: 1}, {4: 2, 3: 16, 1: 15, 0: 6},
    {1: 31, 0: 12, 3: 30, 4: 9, 2: 8}, {1: 32}, {2: 9, 0: 20, 1: 40},
]  # fmt: skip
STATIC = Acceleration(is_static=True)
# One of each kind of attention and of positions.
STATIC_FAMILIES = ("llama", "gemma2", "gpt2", "gpt_neo", "granite_swa", "youtu")


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """The buckets of the static passes that ran."""
    ran: list[Bucket] = []
    compute = StaticPasses.compute

    def recording(self: StaticPasses, bucket: Bucket) -> torch.Tensor:
        ran.append(bucket)
        return compute(self, bucket)

    monkeypatch.setattr(StaticPasses, "compute", recording)
    return ran


@pytest.mark.parametrize(
    ("family", "schedule"),
    [*((family, SHORT) for family in STATIC_FAMILIES), ("gemma2", MIXED)],
    ids=[*STATIC_FAMILIES, "gemma2, mixed"],
)
def test_static_passes_match_plain_forwards(
    family: str, schedule: list[Ends], buckets: list[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tiny rows never reach a second bucket of keys otherwise.
    monkeypatch.setattr("specdist.models.passes.static.MIN_KEYS", 8)
    monkeypatch.setattr("specdist.models.passes.static.KEYS_FACTOR", 2)
    if schedule is MIXED:
        monkeypatch.setattr("specdist.models.passes.static.MAX_TOKENS", 32)
    plain = tiny_model(family)
    kernel = Acceleration(is_static=True, kernels=[PlainKernel()])
    check_rows(plain, paged_runner(plain, kernel), schedule)
    if schedule is SHORT:
        assert len(buckets) == len(schedule)
        assert {bucket.num_pages for bucket in buckets} == {2, 4, 8, 16}
        assert {bucket.num_segments for bucket in buckets} == {2, 3, 5, 6, 9}
        assert len({bucket.num_tokens for bucket in buckets}) > 3
    else:
        assert 0 < len(buckets) < len(schedule)


def test_rows_in_parts_and_at_once_are_the_same() -> None:
    """However few keys SDPA may gather at once."""
    plain = tiny_model("gemma2")
    rows = GrowingRows(plain, SHORT, page_size=PAGE_SIZE)
    runner = paged_runner(plain, STATIC)
    passes = rows.run(runner)
    first = next(passes)
    assert runner._static is not None
    runner._static.kernel = SdpaKernel(max_gathered_keys=1)
    for found, wanted in (first, *passes):
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_bfloat16_passes_agree() -> None:
    """Ragged and static passes of a bfloat16 model, both near the float32 one."""
    plain = tiny_model("gemma2", initializer_range=0.05)
    half = copy.deepcopy(plain).bfloat16()
    rows = GrowingRows(plain, SHORT, page_size=PAGE_SIZE)
    for acceleration in (Acceleration(), STATIC):
        for found, wanted in rows.run(paged_runner(half, acceleration)):
            assert found.dtype == torch.bfloat16
            # Eight bits of mantissa through three layers; the logits are of order 1.
            torch.testing.assert_close(found.float(), wanted, atol=0.1, rtol=0.1)


def test_padding_touches_no_page_of_a_row() -> None:
    """A pass changes what its own tokens write, and the scratch page; every other key stays as it was."""
    runner = paged_runner(tiny_model("llama"), STATIC)
    runner.allocate(num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_slots=5, max_seq_len=40)
    cache = runner.cache.key_value
    runner.pages.pages[:] = np.random.default_rng(0).permutation(NUM_PAGES)[:50].reshape(5, 10)
    marker = 7.0
    for layer in cache.shapes:
        for pages in (cache.keys[layer], cache.values[layer]):
            assert len(pages) == NUM_PAGES + 1
            pages.fill_(marker)
    # Nine tokens of five segments become sixteen of ten.
    slots = np.array([3, 3, 3, 0, 1, 1, 4, 2, 2])
    positions = np.array([9, 10, 11, 0, 6, 7, 39, 5, 6])
    runner.forward(FlatBatch(np.full(9, 5), slots, positions), [2, 3])
    written = runner.pages.pages[slots, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    for layer, (heads, width, *_) in cache.shapes.items():
        for pages in (cache.keys[layer], cache.values[layer]):
            changed = (pages.view(-1, heads * width) != marker).any(dim=1).numpy()
            assert changed[written].all()
            changed[written] = False
            assert not changed[: NUM_PAGES * PAGE_SIZE].any()
            assert changed[NUM_PAGES * PAGE_SIZE :].any()


def bucket_of(lengths: list[int], keys: int, num_logits: int, table_width: int = 1000) -> Bucket | None:
    lengths_S = np.array(lengths)
    segments = Segments(lengths_S.cumsum() - lengths_S, lengths_S, np.maximum(lengths_S, keys))
    return choose_bucket(segments, num_logits, page_size=16, table_width=table_width)


def test_sizes_are_rounded_up_to_buckets() -> None:
    """Tokens and segments are padded; segments of the padding are no longer than the longest may be, of which
    attention's tiles are chosen."""
    assert bucket_of([1], 1, 1) == Bucket(1, 2, 64, 1, 1)
    assert bucket_of([1] * 5, 1025, 5) == Bucket(8, 9, 256, 8, 1)
    assert bucket_of([1, 5, 6], 1024, 12) == Bucket(16, 5, 64, 16, 8)
    assert bucket_of([1, 2, 6], 5000, 3, table_width=400) == Bucket(16, 5, 400, 4, 8)
    assert bucket_of([1] * 31 + [21], 300, 52) == Bucket(64, 33, 64, 64, 64)
    assert bucket_of([5] * 8, 300, 40) == Bucket(64, 12, 64, 64, 8)
    # A prompt chunk beside decoding: few of its logits are wanted.
    assert bucket_of([6] * 32 + [800], 3000, 193) == Bucket(1024, 65, 256, 224, 1024)
    assert bucket_of([MAX_TOKENS], 300, 0) == Bucket(MAX_TOKENS, 2, 256, 1, MAX_TOKENS)
    assert bucket_of([MAX_TOKENS, 1], 300, 1) is None, "left to ragged passes"


def test_padding_is_at_most_a_fourth_of_a_pass() -> None:
    for number in range(FREE_TOKENS + 1, MAX_TOKENS + 1):
        bucket = bucket_of_tokens(number)
        assert number <= bucket < number * 1.25
        assert bucket == bucket_of_tokens(bucket), "a bucket is its own"

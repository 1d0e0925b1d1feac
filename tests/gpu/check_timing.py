"""The checks of test_timing.py; each runs in a process with a fake device."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import torch

from specdist.data.stats.shard import Stats
from specdist.engine import engine as engine_module
from specdist.engine.draft import draft_worker as draft_module
from specdist.engine.times.timeline import HostClock
from specdist.job.costs.pass_times import NUM_PASSES, verify_logits
from specdist.models.loading.memory import device_memory
from specdist.sampling.distributions import SamplingSettings
from tests.engine.harness import PAGE_SIZE, Harness, paged_runner, requests_for
from tests.gpu.books import Counts
from tests.gpu.device import DEVICE
from tests.gpu.engine_runs import GPU, MODES, RULES, SIZES, outcomes, prompts
from tests.lab.curves import measure_curve
from tests.models.families import noisy_copy, tiny_model


def check_events_add_no_synchronisation(rule: str) -> None:
    """The same rows with the host's clock, with events that complete at once, and with late ones."""
    target = tiny_model("llama").bfloat16()
    for draft, mode in ((None, {}), (noisy_copy(target), {}), (noisy_copy(target), MODES["branches"])):
        replica = Harness(target, draft, device=GPU, settings=RULES[rule], **SIZES, **mode)
        replica.generate(requests_for(prompts()))  # what is recorded once
        with (
            patch.object(engine_module, "clock_of", lambda device: HostClock()),
            patch.object(draft_module, "clock_of", lambda device: HostClock()),
        ):
            untimed, expected, _ = counted(replica)
        # The buffers of a pass's inputs are asked for too.
        assert all(line.startswith("models/passes/staging.py") for line in untimed.queries)
        assert untimed.num_synchronisations > 0
        for delay in (0, 3):
            DEVICE.query_delay = delay
            timed, found, stats = counted(replica)
            DEVICE.query_delay = 0
            assert found == expected
            assert timed.num_synchronisations == untimed.num_synchronisations, timed.report()
            assert (timed.num_kernels, timed.num_replays) == (untimed.num_kernels, untimed.num_replays)
            assert timed.queries.total() > stats.num_rounds
            check_times(stats, is_complete=not delay)


def counted(replica: Harness) -> tuple[Counts, object, Stats]:
    DEVICE.reset()
    completions = replica.generate(requests_for(prompts()))
    return DEVICE.counts(), outcomes(completions), replica.stats_recorder.close_shard(0)


def check_times(stats: Stats, *, is_complete: bool) -> None:
    """The times of a run of one shard add up."""
    target_ns = stats.target_ns
    assert sum(dataclasses.astuple(target_ns)) == stats.wall_ns > 0
    assert min(dataclasses.astuple(target_ns) + dataclasses.astuple(stats.draft_ns)) >= 0
    passes_ns = sum(stats.target_pass_ns_per_size.values())
    assert passes_ns == target_ns.prefill + target_ns.verify
    if is_complete:
        assert min(stats.target_pass_ns_per_size.values()) > 0
    if stats.num_draft_tokens:
        assert stats.draft_ns.draft > 0


def check_measurements_wait_for_the_device() -> None:
    """The host waits before the first and after the last kernel of every measured pass."""
    runner = paged_runner(tiny_model("llama").bfloat16(), device=GPU)
    runner.allocate(num_pages=16, page_size=PAGE_SIZE, num_slots=2, max_seq_len=32)
    DEVICE.reset()
    settings = SamplingSettings(temperature=0.0)
    curve = measure_curve(
        runner,
        lambda logits_NV: verify_logits(logits_NV, settings=settings, vocab_size=logits_NV.shape[1]),
        num_rows=2,
        num_tokens_per_row=2,
    )
    assert len(curve.sizes) == 3
    waits = DEVICE.counts().synchronisations
    measured = [count for (_, line), count in waits.items() if "times/timeline.py" in line]
    assert sum(measured) == 2 * NUM_PASSES * len(curve.sizes), DEVICE.counts().report()


def check_free_memory_is_what_the_allocator_can_give_back() -> None:
    device = torch.device("cuda:0")
    before = device_memory(device)
    for _ in range(2):
        torch.empty(1000, device=device)
    assert torch.cuda.mem_get_info(device)[0] < before.free_bytes and device_memory(device) == before

"""Tokens with a cache in 8 bits are the target's with such a cache, whatever is drafted: blocks are taken
back, prefixes shared, rows branched and preempted."""

from __future__ import annotations

from specdist.models.passes.acceleration import Acceleration
from tests.engine.harness import PAGE_SIZE, Harness, requests_for
from tests.engine.test_greedy import MAX_NEW_TOKENS, prompts_of_lengths, reference
from tests.engine.test_identity import check_preempted
from tests.models.families import noisy_copy, tiny_model
from tests.models.test_float8_cache import rounding

NARROW = Acceleration(has_float8_cache=True)


def test_tokens_are_those_of_generate_on_rounded_keys_and_values() -> None:
    target = tiny_model("llama")
    draft = noisy_copy(target)
    system, *rests = prompts_of_lengths(16, 1, 9)
    prompts = [*(system + rest for rest in rests), rests[1]]
    with rounding(target):
        expected = [reference(target, prompt, None) for prompt in prompts]
    assert expected != [reference(target, prompt, None) for prompt in prompts], "rounding changes tokens"
    requests = requests_for(prompts)
    kept_back = shared = 0
    for more in (
        {},
        {"num_draft_tokens": 5},
        {"num_draft_tokens": 3, "num_ahead_tokens": 5, "num_branches": 3},
    ):
        options = {"max_new_tokens": MAX_NEW_TOKENS, "acceleration": NARROW, **more}
        replica = Harness(target, draft if more else None, max_num_seqs=3, **options)
        completions = replica.generate(requests)
        assert [completion.token_ids for completion in completions] == expected, more
        stats = replica.stats_recorder.close_shard(0)
        kept_back += stats.num_draft_tokens - stats.num_accepted_tokens
        shared += stats.num_shared_prompt_tokens
        if more == {"num_draft_tokens": 5}:
            check_preempted(target, draft, requests, completions, 96 // PAGE_SIZE + 2, **options)
    assert kept_back > 0 and shared > 0

"""Faults that show only where two options meet: preempted rows, shared pages, rounds that are known early,
branches, samples, log-probabilities. Random runs find them."""

from tests.mutants.mutant import Mutant

RANDOM_RUNS = "tests/random_runs/test_random_runs.py::test_random_runs_in_this_process"
ON_RANKS = "tests/random_runs/test_random_runs.py::test_random_runs_on_real_ranks"

INTERPLAY_FAULTS = (
    Mutant("resumed-sequence-counts-the-pages-that-it-had", "Sequence.admit",
        "        self.num_reserved = 0\n        self.context_length = len(self.token_ids)\n",
        "        self.context_length = len(self.token_ids)\n",
        (RANDOM_RUNS,)),
    Mutant("evicted-page-of-a-prompt-is-still-found", "PageTable._new_page",
        "            del self._page_of_key[key]\n",
        "",
        (RANDOM_RUNS,)),
    Mutant("first-token-after-a-shared-prefix-is-not-run", "Sequence.admit",
        "self.num_shared = self.num_prefilled = num_shared\n",
        "self.num_shared, self.num_prefilled = num_shared, num_shared + (0 < num_shared < len(self.token_ids) - 1)\n",
        (RANDOM_RUNS,)),
    Mutant("round-known-early-draws-a-resumed-next-token-anew", "NextRound.foresee",
        "any(sequence.is_prefilling or sequence.forced_next_token is not None for sequence in new)",
        "any(sequence.is_prefilling for sequence in new)",
        (RANDOM_RUNS,)),
    Mutant("a-prompt-is-scored-at-the-place-of-a-resumed-one", "LogprobBook.prompt_tokens",
        "                token_ids += sequence.token_ids[chunk.begin + 1 : end]\n            first += size\n",
        "                token_ids += sequence.token_ids[chunk.begin + 1 : end]\n                first += size\n",
        (RANDOM_RUNS,)),
    Mutant("samples-of-a-preempted-row-draw-alike", "Scheduler._new_sequence",
        "                seed, request.row_id, request.sample_index, len(request.earlier), request.attempt\n",
        "                seed, request.row_id, min(1, request.sample_index), len(request.earlier), request.attempt\n",
        (RANDOM_RUNS,)),
    Mutant("next-token-of-a-preemption-stays-forced", "Sequence.begin_block",
        "        self.forced_next_token = None\n        self.num_redraft = 0\n        self.num_candidates",
        "        self.num_redraft = 0\n        self.num_candidates",
        (RANDOM_RUNS,)),
)

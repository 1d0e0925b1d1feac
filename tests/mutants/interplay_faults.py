"""Faults that show only where two options meet: preempted rows, shared pages, rounds that are known early,
branches, samples, log-probabilities. Random runs find them; ``python -m tests.random_runs --faults`` says
after how many cases."""

from tests.mutants.mutant import Mutant

RANDOM_RUNS = "tests/random_runs/test_random_runs.py::test_random_runs_in_this_process"

INTERPLAY_FAULTS = (
    Mutant(
        name="resumed-sequence-counts-the-pages-that-it-had",
        file="engine/sequence.py",
        old="        self.num_reserved = 0\n        self.context_length = len(self.token_ids)\n",
        new="        self.context_length = len(self.token_ids)\n",
        tests=(RANDOM_RUNS,),
    ),
    Mutant(
        name="evicted-page-of-a-prompt-is-still-found",
        file="cache/pages.py",
        old="            del self._page_of_key[self._key_of_page.pop(page)]\n",
        new="            self._key_of_page.pop(page)\n",
        tests=(RANDOM_RUNS,),
    ),
    Mutant(
        name="first-token-after-a-shared-prefix-is-not-run",
        file="engine/sequence.py",
        old="self.num_shared = self.num_prefilled = num_shared\n",
        new="self.num_shared, self.num_prefilled = num_shared, num_shared + (0 < num_shared < len(self.token_ids) - 1)\n",
        tests=(RANDOM_RUNS,),
    ),
    Mutant(
        name="round-known-early-draws-a-resumed-next-token-anew",
        file="engine/next_round.py",
        old="any(sequence.is_prefilling or sequence.forced_next_token is not None for sequence in new)",
        new="any(sequence.is_prefilling for sequence in new)",
        tests=(RANDOM_RUNS,),
    ),
    Mutant(
        name="a-prompt-is-scored-at-the-place-of-a-resumed-one",
        file="engine/logprobs.py",
        old="                token_ids += sequence.token_ids[chunk.begin + 1 : end]\n            first += size\n",
        new="                token_ids += sequence.token_ids[chunk.begin + 1 : end]\n                first += size\n",
        tests=(RANDOM_RUNS,),
    ),
    Mutant(
        name="a-stop-string-inside-a-block-keeps-the-block",
        file="engine/stopping.py",
        old="        for count in range(1, len(new_ids) + 1):\n",
        new="        for count in (len(new_ids),):\n",
        tests=(RANDOM_RUNS,),
    ),
    Mutant(
        name="resumed-completion-counts-as-its-prompt",
        file="engine/opened.py",
        old='"num_prompt_tokens": np.array([sequence.num_prompt_tokens for',
        new='"num_prompt_tokens": np.array([sequence.context_length for',
        tests=(RANDOM_RUNS,),
    ),
    Mutant(
        name="samples-of-a-preempted-row-draw-alike",
        file="engine/scheduler.py",
        old="stream_key=stream_key(seed, request.row_id, request.sample_index, len(request.earlier))",
        new="stream_key=stream_key(seed, request.row_id, min(1, request.sample_index), len(request.earlier))",
        tests=(RANDOM_RUNS,),
    ),
    Mutant(
        name="resumed-sequence-has-missed-nothing",
        file="engine/opened.py",
        old="np.array([sequence.counters.num_misses for sequence in sequences], np.int64)",
        new="np.zeros(len(sequences), np.int64)",
        tests=(RANDOM_RUNS,),
    ),
    Mutant(
        name="next-token-of-a-preemption-stays-forced",
        file="engine/sequence.py",
        old="        self.forced_next_token = None\n        self.num_redraft = 0\n        self.num_candidates",
        new="        self.num_redraft = 0\n        self.num_candidates",
        tests=(RANDOM_RUNS,),
    ),
    Mutant(
        name="log-probabilities-of-a-preempted-token-are-anothers",
        file="engine/logprobs.py",
        old="            self._of[order][position] = line\n",
        new="            self._of[order].setdefault(len(self._of[order]) and max(self._of[order]) + 1 or position, line)\n",
        tests=(RANDOM_RUNS,),
    ),
)

"""Faults in candidates from memory: the index, their acceptance, and the token after a rejection."""

from tests.mutants.mutant import Mutant

MEMORY = "tests/engine/test_memory_draft.py"
PLAIN = f"{MEMORY}::test_tokens_follow_the_target_s_distribution[plain]"
ONE_HOT = f"{MEMORY}::test_one_hot_targets_emit_what_they_emit_alone"
BATCH = f"{MEMORY}::test_tokens_depend_neither_on_the_batch_nor_on_preemptions_nor_on_slices"
REPEATED = f"{MEMORY}::test_a_text_that_repeats_itself_is_accepted_as_a_whole"
INDEX = "tests/drafters/test_ngram_index.py"

MEMORY_FAULTS = (
    Mutant(
        name="memory-judged-with-a-draft-models-probability",
        file="engine/memory_draft.py",
        old="draft_probabilities_C=np.ones(num_candidates),",
        new="draft_probabilities_C=np.full(num_candidates, 0.5),",
        tests=(PLAIN,),
    ),
    Mutant(
        name="residual-of-memory-keeps-the-candidate",
        file="engine/no_draft.py",
        old="target_W = without_rejected(target_W, rejected_ids_R[drawn])",
        new="without_rejected(target_W, rejected_ids_R[drawn])",
        tests=(PLAIN,),
        is_dangerous=True,
    ),
    Mutant(
        name="residual-of-memory-without-the-first-candidate-of-the-block",
        file="engine/memory_draft.py",
        old="places_R = np.where(is_rejected_R, num_accepted_R, 0)",
        new="places_R = np.where(is_rejected_R, 0, 0)",
        tests=(PLAIN,),
    ),
    Mutant(
        name="residual-of-memory-lacks-a-token-after-full-blocks-too",
        file="engine/memory_draft.py",
        old="is_rejected_R = num_accepted_R < self._num_verified(slots_R)",
        new="is_rejected_R = self._num_verified(slots_R) > 0",
        tests=(PLAIN,),
    ),
    Mutant(
        name="residual-of-memory-of-another-row",
        file="engine/no_draft.py",
        old="without_rejected(target_W, rejected_ids_R[drawn])",
        new="without_rejected(target_W, np.roll(rejected_ids_R[drawn], 1))",
        tests=(PLAIN,),
    ),
    Mutant(
        name="memory-of-a-preempted-sequence-is-another-ones",
        file="engine/memory_draft.py",
        old="        self._is_new[opened.slots] = True\n",
        new="",
        tests=(BATCH,),
    ),
    Mutant(
        name="memory-proposes-beyond-a-rows-end",
        file="engine/memory_draft.py",
        old="limits_R, is_resumed_R = np.where(is_end_R, 0, request.draft_now_R), request.num_redraft_R > 0",
        new="limits_R = np.where(is_end_R, 0, request.draft_now_R * 0 + self._candidate_ids.shape[1])\n"
        "        is_resumed_R = request.num_redraft_R > 0",
        tests=(REPEATED, BATCH),
    ),
    Mutant(
        name="index-finds-the-last-tokens-themselves",
        file="drafters/plain_ngrams.py",
        old="(tokens[1:-1] == tokens[-1]) & (tokens[:-2] == tokens[-2])",
        new="(tokens[1:] == tokens[-1]) & (tokens[:-1] == tokens[-2])",
        tests=(INDEX,),
    ),
    Mutant(
        name="index-predicts-from-the-token-that-came",
        file="kernels/ngrams.c",
        old="index->num_right[class] += tokens[place + 1] == token;",
        new="index->num_right[class] += tokens[place] == token;",
        tests=(INDEX,),
    ),
    Mutant(
        name="index-takes-the-earliest-match",
        file="kernels/ngrams.c",
        old="if (length > best_length) {",
        new="if (length >= best_length) {",
        tests=(INDEX,),
    ),
    Mutant(
        name="store-goes-on-in-another-text",
        file="kernels/ngrams.c",
        old="    if (token_at(store, place) == NO_TOKEN) place = store->earlier[place % store->capacity];\n",
        new="    while (place < *store->count && token_at(store, place) == NO_TOKEN) place++;\n",
        tests=(INDEX,),
    ),
    Mutant(
        name="store-ends-with-a-block-of-a-running-sequence",
        file="kernels/ngrams.c",
        old="if (is_linked) store->earlier[place % store->capacity] = begin + 1 + overlap;",
        new="",
        tests=(INDEX,),
    ),
    Mutant(
        name="sequence-finds-itself-in-the-store",
        file="kernels/ngrams.c",
        old="if (store->owners[place % store->capacity] == index->owners[slot]) continue;",
        new="",
        tests=(INDEX,),
    ),
    Mutant(
        name="store-reads-tokens-that-were-overwritten",
        file="kernels/ngrams.c",
        old="return place > *store->count - store->capacity; }",
        new="return place > *store->count - 2 * store->capacity; }",
        tests=(INDEX,),
    ),
    Mutant(
        name="shorter-proposal-of-two-sources",
        file="kernels/ngrams.c",
        old="is_store = other > own;",
        new="is_store = other > 0;",
        tests=(INDEX,),
    ),
    Mutant(
        name="preempted-sequence-is-stored-twice",
        file="drafters/ngram_index.py",
        old="np.where(unstored_R == ALL, first_R, unstored_R)",
        new="np.where(unstored_R == ALL, 0, unstored_R)",
        tests=(INDEX,),
    ),
    Mutant(
        name="resumed-sequence-is-told-as-a-new-one",
        file="engine/memory_draft.py",
        old="self._is_resumed[opened.slots] = opened.are_resumed",
        new="self._is_resumed[opened.slots] = False",
        tests=(f"{MEMORY}::test_other_rows_are_remembered_once",),
    ),
    Mutant(
        name="repeated-block-of-memory-is-a-new-one",
        file="engine/memory_draft.py",
        old="found = found.first(kept_R).instead(is_resumed_R, again)",
        new="found = found.first(kept_R)",
        tests=(f"{MEMORY}::test_a_preempted_sequence_repeats_its_block",),
    ),
    Mutant(
        name="repeated-block-of-memory-is-its-slots",
        file="engine/memory_draft.py",
        old="            block = self._suspended.pop(stream_key, NONE)\n",
        new="            block = self._candidate_ids[slot, : self._num_candidates[slot]].copy()\n",
        tests=(f"{MEMORY}::test_a_preempted_sequence_repeats_its_block",),
    ),
    Mutant(
        name="memory-is-weighed-by-passes-alone",
        file="drafters/block_lengths.py",
        old="ns = costs.pass_ns(num_pass_tokens, num_rows, num_context) + costs.message.at(num_rows)",
        new="ns = costs.pass_ns(num_pass_tokens, num_rows, num_context)",
        tests=("tests/drafters/test_block_lengths.py",),
    ),
    Mutant(
        name="slot-keeps-the-last-sequences-chances",
        file="drafters/ngram_state.py",
        old="self.num_right[slots] = self.num_tried[slots] = 0",
        new="pass",
        tests=(BATCH,),
    ),
)

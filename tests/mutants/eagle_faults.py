"""Faults in EAGLE-3 drafts: what they read, what they say, and what the target's rank sends them."""

from tests.mutants.mutant import Mutant

EAGLE = "tests/engine/test_eagle.py"
FORMULAS = f"{EAGLE}::test_every_block_is_what_the_published_formulas_say"
WHOLE = f"{FORMULAS}[llama]"
PARALLEL = f"{FORMULAS}[peagle, preempted, as on a device]"
SEVERAL = f"{FORMULAS}[gemma2, two layers of Qwen3, preempted]"
RECORDED = "tests/models/drafters/test_recorded.py::test_blocks_of_recorded_passes_are_those_of_others[eagle3]"

EAGLE_FAULTS = (
    Mutant("states-of-the-token-itself", "previous_slots",
        "before_T = np.maximum(batch.positions_T - 1, 0)",
        "before_T = np.maximum(batch.positions_T, 0)",
        (WHOLE,)),
    Mutant("states-of-rejected-drafts-stay", "DraftWorker._resolve",
        "            kept_R = begins_R\n",
        "            pass\n",
        (WHOLE,)),
    Mutant("states-of-accepted-tokens-are-not-sent", "_committed",
        "num_accepted[slots_R] = num_accepted_R",
        "num_accepted[slots_R] = 0",
        (WHOLE,)),
    Mutant("vocabulary-of-the-draft-taken-for-the-targets", "OwnVocabularyModel.whole_logits",
        "whole_NV.index_copy_(1, self.known_ids, own_Nv)",
        "whole_NV.index_copy_(1, torch.arange(len(self.d2t)), own_Nv)",
        (WHOLE,)),
    Mutant("first-position-is-seen", "causal_bias",
        "hidden_RQL |= (keys_L == 0) & (positions_RQ[:, :, None] > 0)",
        "pass",
        (WHOLE,)),
    Mutant("recorded-steps-read-the-state-of-the-first", "StaticRuns._compute",
        "passes.after_of(bucket) if step == 1 else cache_index[step - 2]",
        "passes.after_of(bucket)",
        (RECORDED,)),
    Mutant("states-are-added-without-their-norm", "LlamaForCausalLMEagle3.draft",
        "            hidden = normed\n",
        "            hidden = states_TE\n",
        (SEVERAL,)),
    Mutant("rows-of-a-padded-pass-are-taken-in-order", "DrafterLayer.forward",
        "        if index_N is not None:\n            # In",
        "        if index_N is not None and len(index_N) < len(hidden_TE):\n            # In",
        ("tests/models/drafters/test_recorded.py::test_blocks_of_recorded_passes_are_those_of_others[peagle]",)),
    Mutant("masks-stand-one-position-late", "DraftBlocks._pairs_and_masks",
        "blocks.starts_A[:, None] + 1 + np.arange(num_masks)",
        "blocks.starts_A[:, None] + 2 + np.arange(num_masks)",
        (PARALLEL,)),
    Mutant("masks-have-the-state-before-them", "previous_slots",
        "        places_T[batch.is_mask_T] = no_state\n",
        "        pass\n",
        (PARALLEL,)),
    Mutant("first-key-of-a-window-is-hidden", "PagedAttention.attend",
        "group.seen(None if rules.hides_first else rules.window)",
        "group.seen(rules.window)",
        ("tests/models/test_windowed_pages.py::"
         "test_a_hidden_first_token_is_the_sequence_s_and_not_the_window_s[by torch]",)),
)

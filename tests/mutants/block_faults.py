"""Faults in drafters of blocks: what a block sees, where it stands, and what is drawn of it."""

from tests.mutants.mutant import Mutant

FORMULAS = "tests/engine/test_block_drafters.py::test_every_block_is_what_the_published_formulas_say"
DFLASH, DSPARK = (f"{FORMULAS}[{name}]" for name in ("dflash, preempted", "dspark, gemma2"))
DISTRIBUTION = "tests/engine/test_block_drafters.py::test_tokens_follow_the_target_s_distribution[dflash, cut]"
CONFIDENCES = "tests/engine/test_block_drafters.py::test_lengths_follow_confidences_that_no_draw_has_changed"
PERFECT = "tests/engine/test_block_drafters.py::test_a_perfect_draft_is_always_accepted"
JOB = "tests/job/test_block_drafters.py"
BLOCK_FAULTS = (
    Mutant("block-stands-one-position-late", "DraftBlocks._whole_blocks",
        "blocks.starts_A[:, None] + np.arange(size)",
        "blocks.starts_A[:, None] + 1 + np.arange(size)",
        (DFLASH,)),
    Mutant("recorded-block-sees-itself-causally", "SdpaKernel.attend",
        "        if not rules.is_causal:\n",
        "        if False:\n",
        ("tests/models/drafters/test_recorded.py::test_blocks_of_recorded_passes_are_those_of_others[dflash]",)),
    Mutant("authors-layers-taken-for-those-that-states-go-into", "_parts",
        "[layer + 1 for layer in",
        "[layer for layer in",
        (f"{JOB}::test_a_draft_without_embeddings_and_head_takes_the_target_s",)),
    Mutant("markov-head-reads-another-token", "DraftBlocks.forward",
        "self._model.after(own_Nv, hidden_NE, token_ids_N)",
        "self._model.after(own_Nv, hidden_NE, torch.full_like(token_ids_N, 1))",
        (DSPARK, PERFECT)),
    Mutant("likeliest-tokens-in-place-of-drawn-ones", "DraftDraws.draw",
        "drawn_N = distributions_N.draw(uniforms_N).clamp(min=0)",
        "drawn_N = logits_NV.argmax(dim=-1)",
        (DISTRIBUTION,)),
    Mutant("block-s-length-looks-at-the-last-token-drawn", "DraftLoop.collect",
        "num_drafted_R: np.ndarray = drafting.ends_R - tails_R\n",
        "last_R = self._draft_state.probabilities[slots_R, drafting.ends_R - 1]\n"
        "        num_drafted_R = np.maximum(0, drafting.ends_R - tails_R - (last_R < 0.4))\n",
        (DISTRIBUTION,)),
    Mutant("confidence-of-another-place", "DraftBlocks.confidences",
        "(each[rows_A + place] for each in self._kept)",
        "(each[rows_A] for each in self._kept)",
        (f"{CONFIDENCES}[dflash]",)),
    Mutant("goodput-s-forecast-is-of-confident-places-alone", "Goodput.num_to_draw",
        "        self._forecast.observe(",
        "        _ = (",
        ("tests/policies/test_goodput.py::test_blocks_that_give_nothing_are_not_run_for_ever",)),
    Mutant("block-s-contexts-cost-nothing", "of_blocks",
        "block_row_ns=row_ns",
        "block_row_ns=0.0",
        (f"{JOB}::test_a_block_s_pass_counts_once",)),
    Mutant("block-s-own-pages-are-not-planned", "HeldModel.fixed_bytes",
        " + num_own * self.page_bytes",
        "",
        ("tests/job/test_allocation.py::test_blocks_have_pages_beside_those_of_the_table",)),
)

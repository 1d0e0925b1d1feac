"""Faults in drafters of blocks: what a block sees, where it stands, and what is drawn of it."""

from tests.mutants.mutant import Mutant

FORMULAS = "tests/engine/test_block_drafters.py::test_every_block_is_what_the_published_formulas_say"
DFLASH, DSPARK = (f"{FORMULAS}[{name}]" for name in ("dflash, preempted", "dspark, gemma2"))
DISTRIBUTION = "tests/engine/test_block_drafters.py::test_tokens_follow_the_target_s_distribution[dflash]"
PERFECT = "tests/engine/test_block_drafters.py::test_a_perfect_draft_is_always_accepted"
JOB = "tests/job/test_block_drafters.py"
CAUSAL = (
    "torch.zeros(self._size, keys.shape[2]).masked_fill(torch.arange(keys.shape[2]) > keys.shape[2] "
    "- self._size + torch.arange(self._size)[:, None], -torch.inf).repeat(call.num_repeats, 1)[None, None]"
)

BLOCK_FAULTS = (
    Mutant("block-stands-one-position-late", "BlockPass.run_blocks",
        "(blocks.starts_A[:, None] + np.arange(size)).ravel()",
        "(blocks.starts_A[:, None] + 1 + np.arange(size)).ravel()",
        (DFLASH,)),
    Mutant("block-sees-itself-causally", "BlockAttention.attend",
        "attend_segments(queries, keys, values, bias, call.rules)",
        f"attend_segments(queries, keys, values, {CAUSAL} + (0 if bias is None else bias), call.rules)",
        (DFLASH,)),
    Mutant("block-sees-beyond-a-context", "BlockAttention._seen",
        "if is_own_AL.all():",
        "if True:",
        (DFLASH,)),
    Mutant("block-reads-the-state-of-another-layer", "Block.read_states",
        "return ReadStates(layers)",
        "return ReadStates((*layers[:-1], layers[-1] + 1))",
        (DFLASH,)),
    Mutant("authors-layers-taken-for-those-that-states-go-into", "_parts",
        "[layer + 1 for layer in",
        "[layer for layer in",
        (f"{JOB}::test_a_draft_without_embeddings_and_head_takes_the_target_s",)),
    Mutant("rows-of-the-place-before", "BlockRunner.forward",
        "rows_N = self._lines[slots_N] * size + places_N + self.model.config.first_row",
        "rows_N = self._lines[slots_N] * size + places_N",
        (DFLASH,)),
    Mutant("block-s-vocabulary-taken-for-the-targets", "OwnVocabularyModel.whole_logits",
        "whole_NV.index_copy_(1, self.known_ids, own_Nv)",
        "whole_NV.index_copy_(1, torch.arange(len(self.d2t)), own_Nv)",
        (DFLASH,)),
    Mutant("markov-head-reads-another-token", "BlockRunner.forward",
        "return self.model.after(own_Nv, hidden_NE, token_ids_N)",
        "return self.model.after(own_Nv, hidden_NE, torch.full_like(token_ids_N, 1))",
        (DSPARK, PERFECT)),
    Mutant("likeliest-tokens-in-place-of-drawn-ones", "DraftDraws.draw",
        "drawn_N = distributions_N.draw(uniforms_N).clamp(min=0)",
        "drawn_N = logits_NV.argmax(dim=-1)",
        (DISTRIBUTION,)),
    Mutant("block-s-pass-costs-nothing", "of_blocks",
        "np.asarray(blocks.ns) - steps(np.asarray(blocks.sizes))",
        "0 * np.asarray(blocks.ns)",
        (f"{JOB}::test_a_block_s_pass_counts_once",)),
    Mutant("plan-has-a-pass-of-a-block-for-every-token", "_round",
        "    if costs.block_tokens:\n",
        "    if False:\n",
        ("tests/lab/plan/test_simulate.py::test_a_block_is_one_pass_whatever_is_drawn_of_it",)),
    Mutant("more-is-drafted-than-a-block-has", "settled",
        "            changes[name] = most\n",
        "            changes[name] = most + 3\n",
        (f"{JOB}::test_longer_blocks_than_the_draft_has_are_lowered",)),
    Mutant("blocks-take-bits-of-a-narrow-cache-for-numbers", "BlockAttention._of_contexts",
        "self._cache.read(layer, group.pages, reads_values=reads_values)",
        "(self._cache.values if reads_values else self._cache.keys)[layer].index_select(0, group.pages)",
        ("tests/engine/test_narrow_drafters.py::test_rounded_keys_and_values_are_read[block]",)),
    Mutant("steps-of-a-block-are-counted-as-passes", "BlockRunner.num_run",
        "return self._num_run",
        "return len(batch)",
        ("tests/engine/test_block_drafters.py::test_tokens_are_those_of_the_target_alone[dflash, greedy]",)),
)

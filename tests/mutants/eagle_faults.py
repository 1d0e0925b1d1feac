"""Faults in EAGLE-3 drafts: what they read, what they say, and what the target's rank sends them."""

from tests.mutants.mutant import Mutant

EAGLE = "tests/engine/test_eagle.py"
FORMULAS = f"{EAGLE}::test_every_block_is_what_the_published_formulas_say"
WHOLE = f"{FORMULAS}[llama]"
SEVERAL = f"{FORMULAS}[two layers of Qwen3, with more norms]"
DISTRIBUTION = f"{EAGLE}::test_tokens_follow_the_target_s_distribution"

EAGLE_FAULTS = (
    Mutant("states-of-the-token-itself", "DrafterPass.run",
        "before_T = np.maximum(batch.positions_T - 1, 0)",
        "before_T = np.maximum(batch.positions_T, 0)",
        (WHOLE,)),
    Mutant("states-arrive-one-position-late", "_committed",
        "begins_M = batch.positions_T[segments.starts_S]",
        "begins_M = batch.positions_T[segments.starts_S] + 1",
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
    Mutant("first-position-is-seen", "WithoutFirst.bias",
        "        found[:, 0, :, 0].masked_fill_(is_hidden_RQ, -torch.inf)\n",
        "",
        (WHOLE,)),
    Mutant("draft-has-tokens-beyond-its-vocabulary", "UNKNOWN_LOGIT",
        "UNKNOWN_LOGIT = -1e30",
        "UNKNOWN_LOGIT = 0.0",
        (WHOLE,)),
    Mutant("drafts-of-an-eagle-draft-judged-with-another-q", "DraftWorker._respond",
        "draft_probabilities_C=state.probabilities[places_C],",
        "draft_probabilities_C=state.probabilities[places_C] / 2,",
        (f"{DISTRIBUTION}[plain]",)),
    Mutant("states-are-added-without-their-norm", "LlamaForCausalLMEagle3.draft",
        "            hidden = normed\n",
        "            hidden = states_TE\n",
        (SEVERAL,)),
    Mutant("outputs-are-handed-on-without-their-norm", "LlamaForCausalLMEagle3.draft",
        "return self.norm(hidden) if self._hands_on_normed else hidden",
        "return hidden",
        (SEVERAL,)),
    Mutant("earlier-layers-write-over-the-first-one", "DrafterLayer.forward",
        "attend(self.index, self",
        "attend(0, self",
        (SEVERAL,)),
)

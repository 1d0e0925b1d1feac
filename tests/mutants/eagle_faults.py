"""Faults in EAGLE-3 drafts: what they read, what they say, and what the target's rank sends them."""

from tests.mutants.mutant import Mutant

EAGLE = "tests/engine/test_eagle.py"
FORMULAS = f"{EAGLE}::test_every_block_is_what_the_published_formulas_say"
WHOLE = f"{FORMULAS}[llama]"
TRAINING = "tests/distillation/test_eagle_draft.py::test_a_step_of_training_is_a_step_of_a_block"
DISTRIBUTION = f"{EAGLE}::test_tokens_follow_the_target_s_distribution"

EAGLE_FAULTS = (
    Mutant(
        name="states-of-the-token-itself",
        file="models/eagle_runner.py",
        old="before_T = np.maximum(batch.positions_T - 1, 0)",
        new="before_T = np.maximum(batch.positions_T, 0)",
        tests=(WHOLE,),
    ),
    Mutant(
        name="states-arrive-one-position-late",
        file="engine/target_states.py",
        old="begins_M = batch.positions_T[segments.starts_S]",
        new="begins_M = batch.positions_T[segments.starts_S] + 1",
        tests=(WHOLE,),
    ),
    Mutant(
        name="states-of-rejected-drafts-stay",
        file="engine/eagle_draft.py",
        old="np.minimum(state.num_computed[slots_R], begins_R)",
        new="state.num_computed[slots_R]",
        tests=(WHOLE,),
    ),
    Mutant(
        name="states-of-accepted-tokens-are-not-sent",
        file="engine/target_states.py",
        old="num_accepted[request.slots_R] = request.num_accepted_R",
        new="num_accepted[request.slots_R] = 0",
        tests=(WHOLE,),
    ),
    Mutant(
        name="vocabulary-of-the-draft-taken-for-the-targets",
        file="models/eagle.py",
        old="whole_NV.index_copy_(1, self.known_ids, own_Nv)",
        new="whole_NV.index_copy_(1, torch.arange(len(self.d2t)), own_Nv)",
        tests=(WHOLE,),
    ),
    Mutant(
        name="first-position-is-seen",
        file="models/eagle_runner.py",
        old="        found[:, 0, :, 0].masked_fill_(is_hidden_RQ, -torch.inf)\n",
        new="",
        tests=(WHOLE,),
    ),
    Mutant(
        name="draft-has-tokens-beyond-its-vocabulary",
        file="models/eagle.py",
        old="UNKNOWN_LOGIT = -1e30",
        new="UNKNOWN_LOGIT = 0.0",
        tests=(WHOLE,),
    ),
    Mutant(
        name="drafts-of-an-eagle-draft-judged-with-another-q",
        file="engine/draft_worker.py",
        old="draft_probabilities_C=state.probabilities[places_C],",
        new="draft_probabilities_C=state.probabilities[places_C] / 2,",
        tests=(f"{DISTRIBUTION}[plain]",),
    ),
    Mutant(
        name="every-step-of-training-reads-the-first-step-s-keys",
        file="distillation/eagle_draft.py",
        old="(places[None] <= places[:, None] - last) &",
        new="(places[None] <= places[:, None]) &",
        tests=(TRAINING,),
    ),
    Mutant(
        name="states-of-training-are-not-moved-on",
        file="distillation/eagle_draft.py",
        old="        states_BLE = states_BLE.roll(1, dims=1)\n",
        new="        states_BLE = states_BLE.roll(1 if not of_steps else 0, dims=1)\n",
        tests=(TRAINING,),
    ),
)

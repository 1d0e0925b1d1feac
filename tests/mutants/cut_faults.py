"""Faults in how layers are cut over ranks."""

from tests.mutants.mutant import Mutant

FOUR_RANKS = "tests/models/test_parity.py::test_slices_of_four_ranks_match_plain_forwards"
PLANS = "tests/models/test_tp_plan.py::"

CUT_FAULTS = (
    Mutant("joined-projections-cut-as-one-block", "own_ranges",
        "parts = cut.parts or (width,)",
        "parts = (width,)",
        (FOUR_RANKS,)),
    Mutant("latent-attention-cut-like-a-feed-forward-part", "planned_cuts",
        "is_of_heads = any(hasattr(owner, count) for count in OF_HEADS)",
        'is_of_heads = "Attention" in type(owner).__name__',
        (PLANS + "test_attention_of_any_name_is_cut_between_heads",)),
    Mutant("key-value-heads-dealt-in-turn", "own_ranges",
        "rank // repeats * size",
        "rank % (num_ranks // repeats) * size",
        (FOUR_RANKS,)),
    Mutant("norm-over-the-heads-of-this-rank-alone", "NormOverRanks.forward",
        "dist.all_reduce(squares_T1, group=self.mp_group)",
        "squares_T1 *= self.whole_width / len(self.weight)",
        (FOUR_RANKS,)),
    Mutant("towers-for-images-cut-like-texts", "_unnamed",
        "if name.startswith(layers) and not",
        "if not",
        (PLANS + "test_what_a_plan_leaves_out_is_cut_before_the_output_projection",)),
)  # fmt: skip

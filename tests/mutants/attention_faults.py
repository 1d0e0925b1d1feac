"""Faults of what layers attend to and how their positions are rotated: rules of masks, and borders of ropes."""

from tests.mutants.mutant import Mutant

BORDERS = "tests/engine/test_rope_borders.py::test_every_row_has_the_tokens_of_generate"
ALONE = f"{BORDERS}[alone-phi3]"
DRY_RUN = "tests/models/test_dry_run.py::"
CHECK = "tests/models/test_loading_check.py::"

ATTENTION_FAULTS = (
    Mutant(
        name="rope-by-position-alone",
        file="cache/branch_pages.py",
        old="return (self._rope_lengths[slots_T] > border) | (positions_T >= border)",
        new="return positions_T >= border",
        tests=(ALONE, CHECK + "test_a_rope_s_border_is_passed[phi3]"),
    ),
    Mutant(
        name="rope-of-the-longest-row",
        file="models/rope.py",
        old="is_long = is_marked | (positions >= self._border)",
        new="is_long = (is_marked | (positions >= self._border)).any().expand_as(is_marked)",
        tests=(ALONE,),
    ),
    Mutant(
        name="pages-shared-across-a-rope-s-border",
        file="cache/pages.py",
        old="keys, key = [], bytes(rope_length > border for border in self._rope_borders)",
        new='keys, key = [], b""',
        tests=(ALONE,),
    ),
    Mutant(
        name="block-across-a-rope-s-border",
        file="engine/scheduler.py",
        old="            end = min(end, border + 1)\n",
        new="            pass\n",
        tests=(f"{BORDERS}[all accepted-phi3]",),
    ),
    Mutant(
        name="row-not-run-anew-beyond-a-rope-s-border",
        file="engine/scheduler.py",
        old="return border is not None and sequence.context_length <= border < len(sequence.token_ids)",
        new="return False",
        tests=(ALONE,),
    ),
    Mutant(
        name="round-foreseen-across-a-rope-s-border",
        file="engine/next_round.py",
        old="            or any(map(scheduler.must_recompute, sequences))\n",
        new="",
        tests=(f"{BORDERS}[in turns-phi3]",),
    ),
    Mutant(
        name="window-from-the-arguments-alone",
        file="models/dry_run.py",
        old="        return found[1]\n",
        new="        return window\n",
        tests=(DRY_RUN + "test_windows_are_those_of_the_masks[phimoe]",),
    ),
    Mutant(
        name="mask-of-its-own-ignored",
        file="models/dry_run.py",
        old='self.foreign.add("a mask of its own")',
        new="pass",
        tests=(DRY_RUN + "test_what_is_not_implemented_is_refused_by_name_without_weights[doge]",),
    ),
    Mutant(
        name="any-mask-taken-for-a-window",
        file="models/dry_run.py",
        old="if not torch.equal(is_seen_L, (keys_L <= query) & (keys_L > query - window)):",
        new="if False:",
        tests=(DRY_RUN + "test_rules_are_read_off_transformers_own_functions",),
    ),
)

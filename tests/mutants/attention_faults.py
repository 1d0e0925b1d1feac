"""Faults of what layers attend to and how their positions are rotated: rules of masks, and borders of ropes."""

from tests.mutants.mutant import Mutant

BORDERS = "tests/engine/test_rope_borders.py::test_every_row_has_the_tokens_of_generate"
ALONE = f"{BORDERS}[alone-phi3]"
DRY_RUN = "tests/models/test_dry_run.py::"
PARITY = "tests/models/test_parity.py::test_ragged_chunks_match_plain_forwards[granite_swa]"
CHECK = "tests/models/test_loading_check.py::"

ATTENTION_FAULTS = (
    Mutant("rope-by-position-alone", "BranchPageTable.are_long",
        "return (self._rope_lengths[slots_T] > border) | (positions_T >= border)",
        "return positions_T >= border",
        (ALONE, CHECK + "test_a_rope_s_border_is_passed")),
    Mutant("pages-shared-across-a-rope-s-border", "PageTable._page_keys",
        "keys, key = [], bytes(rope_length > border for border in self._rope_borders)",
        'keys, key = [], b""',
        (ALONE,)),
    Mutant("block-across-a-rope-s-border", "Scheduler.room",
        "            end = min(end, border + 1)\n",
        "            pass\n",
        (f"{BORDERS}[all accepted-phi3]",)),
    Mutant("sinks-of-other-heads-of-the-group", "attend_segments",
        "sinks.repeat_interleave(num_queries, dim=1)",
        "sinks.repeat(1, num_queries)",
        (PARITY,)),
    Mutant("compiled-pass-without-the-sinks", "CompiledPass._fill",
        " or own.has_sinks:",
        ":",
        ("tests/models/test_compiled.py::test_rules_that_compiled_code_lacks",)),
    Mutant("kernels-not-tried-with-sinks", "_record",
        "AttentionRules(scaling, window, softcap, s_aux is not None)",
        "AttentionRules(scaling, window, softcap)",
        (DRY_RUN + "test_sinks_are_a_rule_of_their_layer",)),
    Mutant("window-from-the-arguments-alone", "LayerShapes.record",
        "        return found[1]\n",
        "        return window\n",
        (DRY_RUN + "test_windows_are_those_of_the_masks[phimoe]",)),
    Mutant("any-mask-taken-for-a-window", "window_of",
        "if not torch.equal(is_seen_L, (keys_L <= query) & (keys_L > query - window)):",
        "if False:",
        (DRY_RUN + "test_rules_are_read_off_transformers_own_functions",)),
)

"""Faults of Mamba's states and of the kernels of recurrent layers."""

from tests.mutants.mutant import Mutant

MAMBA = "tests/models/recurrent/test_mamba.py::"
LENGTHS = MAMBA + "test_any_number_of_tokens_gives_the_numbers_of_one_after_the_other"
MODULES = MAMBA + "test_modules_give_the_numbers_of_their_own_forward"
KERNELS = "tests/kernels/test_recurrent.py::"
OF_MAMBA = KERNELS + "test_outputs_are_those_of_one_token_after_the_other"
RIGHT = KERNELS + "test_kernels_are_used_only_if_they_are_right"

MAMBA_FAULTS = (
    Mutant("mamba2-is-cut-within-a-group", "Mamba2.num_pieces",
        "else num_groups",
        "else self.module.A_log.numel()",
        (MAMBA + "test_a_mixer_is_cut_between_groups",)),
    Mutant("mamba2-one-accepted-token-too-many", "run_mamba2",
        "device=borders_S.device) < borders_S[:, None]",
        "device=borders_S.device) <= borders_S[:, None]",
        (LENGTHS + "[17-2]",)),
    Mutant("mamba2-chunks-forget-the-state", "run_mamba2",
        "state_SHPN = _after(state_SHPN, chunk, rates_H)",
        "state_SHPN = _after(0 * state_SHPN, chunk, rates_H)",
        (LENGTHS + "[200-2]",)),
    Mutant("falcon-h1-without-its-multipliers", "Mamba2.project",
        "projected = projected * multipliers[0, 0]",
        "pass",
        (MODULES + "[falcon_h1]",)),
    Mutant("kernel-keeps-a-mamba-state-one-token-late", "mamba_kernel",
        "if token == border:",
        "if token == border + 1:",
        (OF_MAMBA + "[mamba 2-6]",)),
    Mutant("kernel-reads-another-group", "mamba_kernel",
        "group = head // (num_heads // num_groups)",
        "group = head % num_groups",
        (OF_MAMBA + "[mamba 2-6]",)),
    Mutant("kernel-begins-with-what-the-slot-holds", "delta_rule_kernel",
        "is_used & (is_first == 0)",
        "is_used",
        (KERNELS + "test_a_sequence_begins_without_a_state_whatever_its_slot_holds[delta rule]",)),
    Mutant("a-sequence-begins-with-what-the-slot-holds", "Runs.read",
        "return found.masked_fill_(self.numbers_5S[1].bool().view(-1, *[1] * (found.dim() - 1)), 0.0)",
        "return found",
        (MODULES + "[mamba2]",)),
    Mutant("recurrent-kernels-unchecked", "kernels.check",
        "check_difference(f",
        "str(f",
        (RIGHT,)),
)  # fmt: skip

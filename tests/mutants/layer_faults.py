"""Faults in the fused steps of layers, and in what decides that a layer is fused."""

from tests.mutants.mutant import Mutant

KERNELS = "tests/kernels/test_layers.py"
NORMS = KERNELS + "::test_norms_are_those_of_transformers"
RESIDUALS = KERNELS + "::test_a_residual_with_its_norms_is_what_they_are_alone"
ROTARY = KERNELS + "::test_rotary_embeddings_are_those_of_transformers"
GATES = KERNELS + "::test_gated_activations_are_the_plain_ones"
ROUNDING = "tests/kernels/test_rounding.py::"
FUSING = "tests/kernels/test_fusing.py::"
NEXT_NORM = FUSING + "test_a_norm_is_done_by_the_layer_before_where_it_is_that_of_what_the_layer_gives"
JOINED = FUSING + "test_layers_are_joined_where_they_read_the_same_input"
JOINED_SUMS = (
    "tests/models/test_all_reduce.py::"
    "test_sums_joined_with_norms_are_right_while_ranks_are_late_and_models_keep_their_logits"
)
COUNTS = "tests/gpu/test_counts.py::test_a_layer_has_few_kernels"

LAYER_FAULTS = (
    Mutant("float8-ties-away-from-zero", "rounding.float8_bits",
        "((magnitudes >> 20) & 1)",
        "1",
        (ROUNDING + "test_every_float8_and_every_middle_between_two",)),
    Mutant("a-kernel-with-wrong-scales-rounds", "check_kernel",
        '    check_difference("scales of tokens differ", off, SCALE_TOLERANCE)\n',
        "    del off\n",
        (ROUNDING + "test_a_kernel_that_rounds_otherwise_is_not_used",)),
    Mutant("norm-counts-padding-of-block", "_normed",
        "tl.sum(numbers * numbers, 1) / width",
        "tl.sum(numbers * numbers, 1) / block_width",
        (NORMS,)),
    Mutant("norm-rounds-once", "_normed",
        "        numbers = _rounded(numbers, dtype)\n",
        "        numbers = numbers\n",
        (NORMS,)),
    Mutant("norm-takes-rows-as-contiguous", "rms_norm",
        "*rows_LMW.stride()[:2], epsilon",
        "num_inner * width, width, epsilon",
        (KERNELS + "::test_a_norm_does_not_depend_on_other_rows",)),
    Mutant("sum-normed-before-it-is-rounded", "residual_norm_kernel",
        "    numbers = _rounded(numbers, loaded.dtype)\n    tl.store(sums",
        "    tl.store(sums",
        (RESIDUALS,)),
    Mutant("layers-of-any-structure-fused", "Forms._layer",
        "            trials.append([differences(found.run(hidden, kwargs), expected)])\n",
        "            found.run(hidden, kwargs)\n",
        (FUSING + "test_a_layer_of_another_structure_stays_as_it_is",)),
    Mutant("gate-and-up-read-as-contiguous", "gated_activation",
        "gates_MW.stride(0), ups_MW.stride(0),",
        "width, width,",
        (GATES,)),
    Mutant("norm-done-before-for-any-input", "FusedNorm.__call__",
        "        if done is not None and done[0]() is inputs:\n",
        "        if done is not None:\n",
        (NEXT_NORM,)),
    Mutant("a-joined-product-serves-twice", "JoinedProjections.of",
        "self._outputs.pop(index)",
        "self._outputs[index]",
        (JOINED,)),
    Mutant("a-joined-product-forgets-biases", "JoinedProjections.of",
        "product(inputs, self.weight, self.bias)",
        "product(inputs, self.weight)",
        (JOINED, FUSING + "test_every_family_keeps_its_logits")),
    Mutant("a-rank-reads-before-its-peer-has-written", "summed_over_ranks",
        "is_waiting = tl.min(tl.where(is_rank_N, seen_N, turn), 0) < turn",
        "is_waiting = tl.min(tl.where(is_rank_N, seen_N, turn), 0) < 0",
        (JOINED_SUMS,)),
    Mutant("a-term-is-written-over-while-a-peer-reads", "summed_over_ranks",
        "(turn & 1) * half",
        "0 * half",
        (JOINED_SUMS,)),
    Mutant("sums-left-where-more-is-made-of-them", "Sums.watched",
        "self._num_made == 1 and output is self._last, None",
        "self._num_made == 1, None",
        (JOINED_SUMS,)),
    Mutant("joined-sums-used-at-any-length", "choose_sums",
        "*(pair for pair in joined[:1] if pair[1] == JOINED)",
        "*((most, JOINED) for most, _ in joined[-1:])",
        (JOINED_SUMS,)),
    Mutant("rotary-adds-second-half", "rotary_kernel",
        "_row(from_cos, is_half), -second, _row",
        "_row(from_cos, is_half), second, _row",
        (ROTARY,)),
    Mutant("fused-wherever-names-match", "Forms._best",
        'largest <= tolerance_of("formula", dtype)',
        'largest <= tolerance_of("formula", dtype) or True',
        (FUSING + "test_another_formula_stays_as_it_is",)),
    Mutant("all-logits-taken-for-the-wanted-ones", "TorchPass.__init__",
        '"logits_to_keep" in inspect.signature(type(model).forward).parameters',
        "True",
        ("tests/models/test_parity.py::test_a_model_that_gives_all_logits_is_asked_for_the_wanted_ones",)),
    Mutant("passes-not-fused", "TorchPass.fused",
        "else self._fused.active()",
        "else contextlib.nullcontext()",
        (FUSING + "test_a_runners_passes_are_fused", COUNTS)),
    Mutant("cache-written-by-plain-operations", "writer_on",
        "    return trial.found or plain_write\n",
        "    return plain_write\n",
        (COUNTS,)),
)

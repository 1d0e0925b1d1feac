"""Faults in products of few tokens, and in the choice of their ways."""

from tests.mutants.mutant import Mutant

KERNEL = "tests/kernels/test_products.py::test_products_of_few_tokens_equal_float64"
CHOICE = "tests/models/test_products.py::"
FASTER = CHOICE + "test_the_kernel_is_used_where_it_is_right_and_clearly_faster"
FROZEN = CHOICE + "test_a_run_that_goes_on_keeps_its_choice_but_for_a_kernel_that_is_wrong_here"
GATES = CHOICE + "test_a_product_of_gates_and_ups_has_their_activation_in_it"

PRODUCT_FAULTS = (
    Mutant("last-split-of-a-product-left-out", "few_tokens_kernel",
        "for each in range(num_splits):",
        "for each in range(num_splits - 1):",
        (KERNEL,)),
    Mutant("arrivals-of-a-product-are-kept", "few_tokens_kernel",
        "tl.store(arrivals + block, 0)",
        "tl.store(arrivals + block, 1)",
        (KERNEL,)),
    Mutant("inputs-beyond-the-last-are-multiplied", "few_tokens_kernel",
        "is_input = inputs_K < num_inputs",
        "is_input = inputs_K < num_inputs + 8",
        (KERNEL,)),
    Mutant("scales-of-blocks-taken-for-those-of-rows", "few_tokens_kernel",
        "rows_N // rows * stride_scale if rows > 0",
        "rows_N // rows if rows > 0",
        (KERNEL,)),
    Mutant("scales-of-inputs-forgotten", "_scaled",
        "sums *= tl.load(input_scales + places_T, mask=is_token_T, other=0.0)[None, :]",
        "sums *= 1.0",
        (KERNEL,)),
    Mutant("matrices-split-for-half-of-the-card", "splits_of",
        "PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors",
        "num_multiprocessors",
        ("tests/kernels/test_products.py::test_matrices_are_split_for_the_whole_card",)),
    Mutant("ups-are-gated-by-those-before", "few_tokens_kernel",
        "own_N % parts * num_outputs",
        "own_N % parts",
        (KERNEL,)),
    Mutant("a-wrong-activation-in-the-product", "_place_gates",
        "            if tried[key] is None:",
        "            if key in tried:",
        (GATES,)),
    Mutant("activations-after-the-product", "FusedMlp.__call__",
        "if self.product is not None and",
        "if self.product is None and",
        (GATES,)),
    Mutant("products-by-the-kernel-though-no-faster", "products._fastest",
        "if LEAST_GAIN * of_kernel <= of_torch",
        "if of_kernel <= of_torch",
        (FASTER,)),
    Mutant("products-by-a-wrong-kernel", "_check",
        '    check_difference("its numbers differ", float(difference), tolerance_of("quantised product", x_TK.dtype))\n',
        "    assert len(difference.shape) == 0\n",
        (FROZEN,)),
    Mutant("products-of-a-run-that-goes-on-measured-anew", "choose_products",
        "measure or _cold_s, kind in known)",
        "measure or _cold_s, False)",
        (FROZEN,)),
    Mutant("ranks-choose-products-alone", "choose_products",
        "if group is not None:",
        "if group is None and group is not None:",
        ("tests/models/test_probe.py::test_ranks_that_share_a_model_choose_the_same_kernel",)),
)

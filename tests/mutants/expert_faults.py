"""Faults in how experts are read, cut and chosen."""

from tests.mutants.mutant import Mutant

CONVERSIONS = "tests/models/test_conversions.py::"
PLACES = CONVERSIONS + "test_every_piece_lies_where_transformers_puts_it"
PARTS = "tests/models/test_experts.py::test_the_ranks_parts_of_experts_make_whole_ones"
SUMMED = "tests/models/test_experts.py::test_what_experts_give_is_summed_over_the_ranks_once"
WHOLE = "tests/models/test_experts.py::test_ranks_of_whole_experts_give_together_what_all_give"
FEW = "tests/models/test_loading_check.py::test_a_few_of_many_experts_are_compared"
BLOCK = "tests/models/test_experts.py::test_only_what_a_block_adds_up_is_summed_together"
OVER_RANKS = "tests/models/test_mixtures.py::test_mixtures_over_ranks_are_those_of_transformers"
LOADED = CONVERSIONS + "test_experts_are_loaded_as_transformers_does_one_by_one"

QUANTISED = "tests/models/test_quantized_experts.py::"
ONE_BY_ONE = QUANTISED + "test_experts_stored_one_by_one_are_the_numbers_that_are_meant"
PLAIN = "tests/models/test_packed_experts.py::test_what_cannot_stay_packed_is_dequantised_and_says_why"
PACKED = "tests/models/test_packed_experts.py::test_packed_experts_give_what_their_numbers_give"
KERNEL = "tests/kernels/test_experts.py::test_experts_products_are_those_of_their_plain_numbers"
ROUTER = "tests/kernels/test_experts.py::test_a_routers_choice_is_that_of_float64"
ROUTERS = "tests/kernels/test_fusing.py::test_routers_choose_what_their_own_code_does"
PAIRS = "tests/kernels/test_experts.py::test_pairs_are_sorted_by_expert_and_summed_by_token"
RECORDED = "tests/gpu/test_engine.py::test_packed_experts_give_the_rows_of_a_cpu_in_recorded_passes"

EXPERT_FAULTS = (
    Mutant("a-group-of-experts-too-few", "route_kernel",
        "ranked_G >= last", "ranked_G > last", (ROUTER,)),
    Mutant("routers-weights-with-their-correction", "route_kernel",
        "ranked_E == best, scores_E", "ranked_E == best, choice_E", (ROUTER,), is_dangerous=True),
    Mutant("pairs-of-an-expert-in-one-place", "sort_kernel",
        "ids_S * num_pairs + pairs_S", "ids_S * num_pairs", (PAIRS,), is_dangerous=True),
    Mutant("what-products-leave-out-is-added", "sum_kernel",
        "(columns_H < width) & (expert < num_experts)", "columns_H < width", (PAIRS,)),
    Mutant("any-weights-of-a-router-are-right", "_router_options",
        "rtol=1e-5, atol=0", "rtol=1e-5, atol=1", (ROUTERS,)),
    Mutant("ranks-choose-experts-by-other-code", "FusedLayers.__init__",
        "router.module.forward = router.own", "pass", (ROUTERS,)),
    Mutant("groups-of-any-number-stay-packed", "packed_experts._packed",
        "form.columns is not None and form.columns & (form.columns - 1)",
        "False",
        (PLAIN,)),
    Mutant("parts-of-experts-have-no-borders", "_border",
        "{piece.shape[dim] for _, piece in places}",
        "{0}",
        (PACKED,)),
    Mutant("halves-of-experts-exchanged", "_cat",
        "for tensor, begin in zip(tensors, begins, strict=False)",
        "for tensor, begin in zip(tensors, begins[-2::-1], strict=False)",
        (PLACES, LOADED)),
    Mutant("experts-in-the-order-of-letters", "_grouped",
        "sorted(stored_names, key=dot_natural_key)",
        "sorted(stored_names)",
        (CONVERSIONS + "test_twelve_experts_are_in_the_order_of_their_numbers",)),
    Mutant("gates-and-ups-of-other-ranks", "_cuts",
        "range(part * width + own.start, part * width + own.stop)",
        "range((part * width + own.start) // num_parts, (part * width + own.stop) // num_parts)",
        (PARTS,)),
    Mutant("every-rank-adds-the-experts-biases", "_cuts",
        "Cut(1, () if rank else whole)",
        "Cut(1, whole)",
        (PARTS,)),
    Mutant("experts-not-summed-over-ranks", "experts._forward",
        "    dist.all_reduce(output, group=module.mp_group)\n",
        "",
        (SUMMED,)),
    Mutant("weights-of-other-chosen-experts", "_of_own",
        "chosen_TK - own.start, skipped)",
        "chosen_TK.flip(-1) - own.start, skipped)",
        (WHOLE,)),
    Mutant("routers-of-two-layers-exchanged", "Filling._fill",
        "        target = self._targets[name]\n",
        "        places = [f'layers.{layer}.mlp.gate.' for layer in (0, 1)]\n"
        "        other = next((i for i in (0, 1) if places[i] in name), 0)\n"
        "        name = name.replace(places[other], places[1 - other])\n"
        "        target = self._targets[name]\n",
        (OVER_RANKS,)),
    Mutant("shared-experts-summed-twice", "share_sums",
        "                part.mp_group = None\n",
        "                pass\n",
        (OVER_RANKS,)),
    Mutant("other-experts-than-those-that-are-compared", "_of_chosen",
        "chosen[numbers]",
        "numbers",
        (FEW,)),
    Mutant("layers-that-take-the-places-of-others-are-compared", "_choose_layers",
        "    if [_parts(layer) for layer in cut_stack] == [made[layer] for layer in layers]:\n",
        "    if True:\n",
        ("tests/models/test_loading_check.py::"
         "test_families_in_which_a_few_layers_are_another_model_are_checked",)),
    Mutant("blocks-that-norm-what-they-add-up-are-summed-after-it", "_adds_up",
        "(one + other - both).abs().max() <= TOLERANCE",
        "0 * (one + other - both).abs().max() <= TOLERANCE",
        (BLOCK,)),
    Mutant("what-a-rank-has-of-experts-is-put-in-one-place", "Piece.on_rank",
        "begin + part.begin[cut.dim]",
        "part.begin[cut.dim]",
        (OVER_RANKS, PACKED)),
    Mutant("experts-before-their-scales", "QuantizedTensors.matrices",
        "from_stored(form, parts, (num_outputs, num_inputs))",
        "from_stored(form, {**parts, form.scale_name: torch.ones_like(parts[form.scale_name])}, "
        "(num_outputs, num_inputs))",
        (ONE_BY_ONE,)),
    Mutant("scales-of-divided-groups-in-turns", "QuantizedWeight.spread",
        "scales_AB = scales_AB.repeat_interleave((old or shape[dim]) // new, dim)",
        "scales_AB = torch.cat([scales_AB] * ((old or shape[dim]) // new), dim)",
        (PACKED,)),
    Mutant("halves-of-a-byte-exchanged-in-the-kernel", "experts.grouped_product_kernel",
        "tl.interleave(codes & 15, codes >> 4)",
        "tl.interleave(codes >> 4, codes & 15)",
        (KERNEL,)),
    Mutant("experts-one-after-the-other-on-a-gpu", "PackedExperts.choose_product",
        "self.product = trial.found or self.dequantized_product",
        "self.product = self.dequantized_product",
        (RECORDED,)),
)  # fmt: skip

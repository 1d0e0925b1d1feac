"""Faults in how experts are read, cut and chosen."""

from tests.mutants.mutant import Mutant

CONVERSIONS = "tests/models/test_conversions.py::"
PLACES = CONVERSIONS + "test_every_piece_lies_where_transformers_puts_it"
PARTS = "tests/models/test_experts.py::test_the_ranks_parts_of_experts_make_whole_ones"
SUMMED = "tests/models/test_experts.py::test_what_experts_give_is_summed_over_the_ranks_once"
FAMILIES = "tests/models/test_family_runs.py::test_families_in_turn_do_what_the_table_says"
LOADED = CONVERSIONS + "test_experts_are_loaded_as_transformers_does_one_by_one"

QUANTISED = "tests/models/test_quantized_experts.py::"
ONE_BY_ONE = QUANTISED + "test_experts_stored_one_by_one_are_the_numbers_that_are_meant"
JOINED = QUANTISED + "test_mxfp4_experts_are_what_transformers_makes_of_them"

EXPERT_FAULTS = (
    Mutant("halves-of-experts-exchanged", "_cat",
        "for tensor, begin in zip(tensors, begins, strict=False)",
        "for tensor, begin in zip(tensors, begins[-2::-1], strict=False)",
        (PLACES, LOADED)),
    Mutant("pieces-of-a-split-begin-where-the-whole-did", "Piece.within",
        "begin=_changed(self.begin, dim, first - begin)",
        "begin=_changed(self.begin, dim, first)",
        (PLACES,)),
    Mutant("experts-collected-before-they-are-placed", "conversions_of",
        "        except UnknownOperationError:\n",
        "            raise UnknownOperationError\n        except UnknownOperationError:\n",
        (LOADED,)),
    Mutant("experts-in-the-order-of-letters", "_grouped",
        "sorted(stored_names, key=dot_natural_key)",
        "sorted(stored_names)",
        (CONVERSIONS + "test_twelve_experts_are_in_the_order_of_their_numbers",)),
    Mutant("gates-and-ups-of-other-ranks", "_cuts",
        "range(part * width + own.start, part * width + own.stop)",
        "range((part * width + own.start) // num_parts, (part * width + own.stop) // num_parts)",
        (PARTS,)),
    Mutant("alternating-halves-taken-for-halves-after-each-other", "_cuts",
        "    if not module.is_concatenated:\n",
        "    if False:\n",
        (PARTS,)),
    Mutant("every-rank-adds-the-experts-biases", "_cuts",
        "ExpertsCut(1, () if rank else whole)",
        "ExpertsCut(1, whole)",
        (PARTS,)),
    Mutant("experts-not-summed-over-ranks", "experts._forward",
        "        dist.all_reduce(output, group=module.mp_group)\n",
        "        pass\n",
        (SUMMED,)),
    Mutant("what-a-rank-has-of-experts-is-put-in-one-place", "Piece.of_ranges",
        "begin + part.begin[dim]",
        "part.begin[dim]",
        (FAMILIES,)),
    Mutant("halves-of-four-bits-exchanged", "float4_numbers",
        "[blocks_NGB & 15, blocks_NGB >> 4]",
        "[blocks_NGB >> 4, blocks_NGB & 15]",
        (JOINED,)),
    Mutant("joined-experts-not-turned", "QuantizedExperts.numbers",
        "float4_numbers(blocks, scales).T",
        "float4_numbers(blocks, scales).reshape(*reversed(float4_numbers(blocks, scales).shape))",
        (JOINED,)),
    Mutant("every-expert-in-the-place-of-the-first", "Filling._take_expert",
        "Piece(meant, (expert, 0, 0)",
        "Piece(meant, (0, 0, 0)",
        (JOINED,)),
    Mutant("experts-before-their-scales", "QuantizedExperts.numbers",
        "from_stored(form, parts, (num_outputs, num_inputs)).dequantized(torch.float32)",
        "from_stored(form, {**parts, form.scale_name: torch.ones_like(parts[form.scale_name])}, "
        "(num_outputs, num_inputs)).dequantized(torch.float32)",
        (ONE_BY_ONE,)),
)  # fmt: skip

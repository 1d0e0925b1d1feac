"""Faults in how experts are read, cut and chosen."""

from tests.mutants.mutant import Mutant

CONVERSIONS = "tests/models/test_conversions.py::"
PLACES = CONVERSIONS + "test_every_piece_lies_where_transformers_puts_it"
LOADED = CONVERSIONS + "test_experts_are_loaded_as_transformers_does_one_by_one"

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
)  # fmt: skip

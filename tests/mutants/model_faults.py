"""Faults in how models run."""

from tests.mutants.mutant import Mutant

OTHER_LAYERS = "tests/models/test_llama.py::test_a_model_that_computes_something_else_keeps_its_layers"
STRUCTURES = "tests/models/test_llama.py::test_structures_that_are_not_known"

MODEL_FAULTS = (
    Mutant(
        name="layers-of-any-model-taken-for-known-ones",
        file="models/llama_check.py",
        old="    if not difference <= TOLERANCES.get(model.dtype, 0.0):\n",
        new="    if False:\n",
        tests=(OTHER_LAYERS + "[halve_residual]",),
    ),
    Mutant(
        name="adapted-linear-layers-taken-for-plain-ones",
        file="models/llama.py",
        old="any(type(layer) is not nn.Linear for layer in layers)",
        new="any(not isinstance(layer, nn.Linear) for layer in layers)",
        tests=(STRUCTURES + "[replace_linear]",),
    ),
    Mutant(
        name="weights-packed-into-a-second-copy",
        file="models/llama.py",
        old="            each.data = part\n",
        new="            part.data = each\n",
        tests=("tests/models/test_llama.py::test_weights_are_packed_once_and_shared",),
    ),
)

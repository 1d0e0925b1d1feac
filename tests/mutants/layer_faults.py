"""Faults in the fused steps of layers, and in what decides that a layer is fused."""

from tests.mutants.mutant import Mutant

KERNELS = "tests/kernels/test_layers.py"
NORMS = KERNELS + "::test_norms_are_those_of_transformers"
RESIDUALS = KERNELS + "::test_a_residual_with_its_norms_is_what_they_are_alone"
ROTARY = KERNELS + "::test_rotary_embeddings_are_those_of_transformers"
GATES = KERNELS + "::test_gated_activations_are_the_plain_ones"
WRITING = KERNELS + "::test_keys_and_values_are_written_where_they_belong"
FUSING = "tests/kernels/test_fusing.py::"
COUNTS = "tests/gpu/test_fusing.py::test_a_layer_has_few_kernels[llama-15]"

LAYER_FAULTS = (
    Mutant(
        name="norm-counts-padding-of-block",
        file="kernels/layers.py",
        old="tl.sum(numbers * numbers, 1) / width",
        new="tl.sum(numbers * numbers, 1) / block_width",
        tests=(NORMS,),
    ),
    Mutant(
        name="norm-rounds-once",
        file="kernels/layers.py",
        old="        numbers = _rounded(numbers, dtype)\n",
        new="        numbers = numbers\n",
        tests=(NORMS,),
    ),
    Mutant(
        name="norms-of-last-block-of-rows-left-out",
        file="kernels/layers.py",
        old='rms_norm_kernel[(triton.cdiv(len(rows_MW), options["block_rows"]),)]',
        new='rms_norm_kernel[(max(1, len(rows_MW) // options["block_rows"]),)]',
        tests=(KERNELS + "::test_a_norm_does_not_depend_on_other_rows", NORMS),
    ),
    Mutant(
        name="norm-takes-rows-as-contiguous",
        file="kernels/layers.py",
        old="            rows_MW.stride(0),\n",
        new="            width,\n",
        tests=(KERNELS + "::test_a_norm_does_not_depend_on_other_rows",),
    ),
    Mutant(
        name="sum-normed-before-it-is-rounded",
        file="kernels/layers.py",
        old="    numbers = _rounded(numbers, loaded.dtype)\n    tl.store(sums",
        new="    tl.store(sums",
        tests=(RESIDUALS,),
    ),
    Mutant(
        name="residual-is-normed",
        file="kernels/layers.py",
        old="    tl.store(sums + places, numbers, mask=is_used)\n    numbers = _normed(numbers, weight,",
        new="    numbers = _normed(numbers, weight,",
        tests=(RESIDUALS, FUSING + "test_every_family_keeps_its_logits"),
    ),
    Mutant(
        name="layers-of-any-structure-fused",
        file="models/fusing.py",
        old="            trials.append([differences(run_layer(twin, hidden, kwargs, epsilon, form), expected)])\n",
        new="            run_layer(twin, hidden, kwargs, epsilon, form)\n",
        tests=(FUSING + "test_a_layer_of_another_structure_stays_as_it_is",),
    ),
    Mutant(
        name="layers-not-asked-what-they-hand-over",
        file="models/fusing.py",
        old="            if handed_over != kwargs:\n",
        new="            if False:\n",
        tests=(FUSING + "test_a_layer_of_another_structure_stays_as_it_is",),
    ),
    Mutant(
        name="residuals-not-fused",
        file="models/fusing.py",
        old="        if args or not self.fits(hidden_states):\n",
        new="        if True:\n",
        tests=(COUNTS, FUSING + "test_a_runners_passes_are_fused"),
    ),
    Mutant(
        name="rotary-adds-second-half",
        file="kernels/layers.py",
        old="_row(from_cos, is_half), -second, _row",
        new="_row(from_cos, is_half), second, _row",
        tests=(ROTARY,),
    ),
    Mutant(
        name="rotary-turns-both-halves-by-first-angles",
        file="kernels/layers.py",
        old="first, _row(from_sin + half, is_half)",
        new="first, _row(from_sin, is_half)",
        tests=(ROTARY,),
    ),
    Mutant(
        name="rotary-takes-heads-as-contiguous",
        file="kernels/layers.py",
        old="            *queries_THD.stride()[:2],\n",
        new="            num_heads * width,\n            width,\n",
        tests=(ROTARY,),
    ),
    Mutant(
        name="gate-not-rounded-before-product",
        file="kernels/layers.py",
        old="_rounded(gate / (1.0 + tl.exp(-slope)), loaded.dtype)",
        new="gate / (1.0 + tl.exp(-slope))",
        tests=(GATES,),
    ),
    Mutant(
        name="values-written-with-strides-of-keys",
        file="kernels/layers.py",
        old="            *values_TGD.stride()[:2],\n",
        new="            *keys_TGD.stride()[:2],\n",
        tests=(WRITING,),
    ),
    Mutant(
        name="wide-tokens-written-in-part",
        file="kernels/layers.py",
        old="write_kernel[(num_tokens, triton.cdiv(token_width, BLOCK))]",
        new="write_kernel[(num_tokens, 1)]",
        tests=(WRITING,),
    ),
    Mutant(
        name="fused-wherever-names-match",
        file="models/fusing.py",
        old="largest <= TOLERANCES[dtype]",
        new="largest <= TOLERANCES[dtype] or True",
        tests=(FUSING + "test_another_formula_stays_as_it_is",),
    ),
    Mutant(
        name="formula-tried-in-models-dtype-alone",
        file="models/fusing.py",
        old="dict.fromkeys([torch.float32, dtype])",
        new="dict.fromkeys([dtype])",
        tests=(FUSING + "test_another_formula_stays_as_it_is",),
    ),
    Mutant(
        name="trials-call-projections",
        file="models/fusing.py",
        old="            twin._modules = {**module._modules, **dict(zip(PROJECTIONS, scales, strict=True))}\n",
        new="",
        tests=(FUSING + "test_projections_are_not_tried",),
    ),
    Mutant(
        name="layers-fused-for-all-who-share-model",
        file="models/fusing.py",
        old="        self.is_active = False\n        self.num_fused",
        new="        self.is_active = True\n        self.num_fused",
        tests=(FUSING + "test_every_family_keeps_its_logits",),
    ),
    Mutant(
        name="passes-not-fused",
        file="models/runner.py",
        old="                stack.enter_context(self._fused.active())\n",
        new="                pass\n",
        tests=(FUSING + "test_a_runners_passes_are_fused", COUNTS),
    ),
    Mutant(
        name="cache-written-by-plain-operations",
        file="cache/writing.py",
        old="    return write_tokens\n",
        new="    return plain_write\n",
        tests=(COUNTS,),
    ),
)

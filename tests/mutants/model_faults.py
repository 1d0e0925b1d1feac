"""Faults in how models run."""

from specdist.kernels import cpu_library
from tests.mutants.mutant import Mutant

OTHER_LAYERS = "tests/models/test_compiled.py::test_a_model_that_computes_something_else_keeps_its_layers"
COMPILED = "tests/models/test_compiled.py::"
STRUCTURES = "tests/models/test_compiled.py::test_structures_that_are_not_known"
QUANTIZED = "tests/models/test_quantized_weights.py::"
SHARDED_QUANTIZED = "tests/models/test_quantized.py::test_a_quantised_model_is_the_same_on_two_ranks"
PEER_MEMORY = (
    "tests/models/test_all_reduce.py::test_ranks_sum_through_peers_memory_where_it_is_right_and_faster_on_all_of_them"
)

ROUNDING = "tests/models/test_input_rounding.py::"
FAMILIES = "tests/models/test_family_runs.py::test_families_in_turn_do_what_the_table_says"
WRAPPERS = "tests/models/test_wrappers.py::"

# Faults in code for instructions that not every processor has.
TILE_FAULTS = (
    Mutant("compiled-tiles-in-passes-of-many-tokens-alone", "cpu_tiles.h",
        "    for (int64_t input = 0; input < num_inputs; input += TILE_INPUTS, weights += BLOCK_BYTES) {",
        ("    for (int64_t input = rows > 8 ? TILE_INPUTS : 0; input < num_inputs; "
         "input += TILE_INPUTS, weights += BLOCK_BYTES) {"),
        (COMPILED + "test_logits_are_the_same_bits_in_any_batch[bfloat16-1]",)),
)

MODEL_FAULTS = (
    *(TILE_FAULTS if cpu_library.has_instruction("amx_bf16") else ()),
    Mutant("layers-of-any-model-taken-for-known-ones", "choose_pass",
        '        check_difference("its largest logits differ", difference, tolerance_of("pass", model.dtype))\n',
        "",
        (OTHER_LAYERS,)),
    Mutant("no-number-taken-for-a-small-one", "check_difference",
        "if not difference <= tolerance:",
        "if difference > tolerance:",
        ("tests/utils/test_trial.py",)),
    Mutant("wrong-candidate-used", "first_right",
        "            note = check(found)\n",
        "            note = None\n",
        ("tests/utils/test_trial.py",)),
    Mutant("adapted-linear-layers-taken-for-plain-ones", "linears_of",
        "any(type(layer) is not nn.Linear for layer in layers)",
        "any(not isinstance(layer, nn.Linear) for layer in layers)",
        (STRUCTURES + "[replace_linear]",)),
    Mutant("compiled-sums-that-depend-on-the-batch", "cpu_pass.c",
        "first = softmaxes[0].first / KEYS * KEYS,",
        "first = softmaxes[0].first,",
        (COMPILED + "test_logits_are_the_same_bits_in_any_batch[float32-1]",)),
    Mutant("compiled-attention-to-the-first-keys-over-and-over", "cpu_pass.c",
        "        memcpy(rows, next_rows, sizeof rows);\n",
        "",
        (COMPILED + "test_ragged_chunks_match_plain_forwards[llama]",)),
    Mutant("compiled-products-that-begin-anew-with-every-part-of-the-inputs", "cpu_products.h",
        "kernel(packed + (first * steps + step * size) * size_of_step, block, now,",
        "kernel(packed + first * steps * size_of_step, block, now,",
        (COMPILED + "test_more_inputs_and_tokens_than_a_cache_keeps[float32]",)),
    Mutant("compiled-attention-one-key-short-of-the-window", "cpu_pass.c",
        "own - layer->window + 1 : 0)",
        "own - layer->window + 2 : 0)",
        (COMPILED + "test_ragged_chunks_match_plain_forwards[mistral]",)),
    Mutant("peers-memory-may-give-ranks-other-bits", "_try",
        "    if not torch.equal(first_N, sums_N):\n",
        "    if False:\n",
        (PEER_MEMORY,)),
    Mutant("messages-of-any-length-through-peers-memory", "Sums._way",
        "if num_bytes <= most and",
        "if",
        (PEER_MEMORY,)),
    Mutant("ranks-choose-sums-by-their-own-times", "_slowest",
        "max(times[size][name] for times in of_ranks)",
        "own[size][name]",
        (PEER_MEMORY,)),
    Mutant("sums-of-a-run-that-goes-on-are-measured-anew", "choose_sums",
        "    if choice is None:\n",
        "    if True:\n",
        (PEER_MEMORY,)),
    Mutant("scales-of-another-rank", "QuantizedWeight.cut",
        "return scales.narrow(dim, start // shared, -(-(stop - start) // shared))",
        "return scales.narrow(dim, 0, -(-(stop - start) // shared))",
        (QUANTIZED + "test_a_part_has_its_own_scales",)),
    Mutant("halves-of-a-byte-exchanged", "_halves",
        "torch.stack([numbers & 15, numbers >> 4], dim=-1)",
        "torch.stack([numbers >> 4, numbers & 15], dim=-1)",
        (QUANTIZED + "test_stored_parts_mean_the_matrix",)),
    Mutant("inputs-with-the-scale-of-the-largest-token", "values_of",
        "values = values * scales\n",
        "values = values * scales.amax(0)\n",
        (ROUNDING + "test_ranks_with_scales_of_their_own_round_no_more_than_one",)),
    Mutant("loading-check-with-scales-of-whole-tokens", "rounded_values",
        "x_TK.split(sizes or x_TK.shape[1], dim=1)",
        "x_TK.split(x_TK.shape[1], dim=1)",
        (SHARDED_QUANTIZED,)),
    Mutant("collect-runs-the-models-as-they-are-stored", "CollectConfig.run_config",
        "            PromptOptions, ModelOptions, QuantizationOptions, ",
        "            PromptOptions, ModelOptions, ",
        ("tests/training/collect/test_collect.py::test_quantised_models_are_those_of_the_run",)),
    Mutant("a-cut-that-is-not-tried", "cut",
        "        reason = None if reason == reason_whole else reason\n",
        "        reason = None\n",
        (FAMILIES,)),
    Mutant("towers-of-images-are-loaded", "without_towers",
        "            setattr(base, name, None)\n",
        "",
        (WRAPPERS + "test_a_tower_s_weights_are_neither_read_nor_kept",)),
    Mutant("experts-that-are-not-there", "conversions_of",
        "            if wanted is not None and wanted.shape != tensor.shape:",
        "            if False:",
        ("tests/models/test_fitting.py::test_what_is_said_of_a_mixture_is_true",)),
    Mutant("a-draft-narrower-than-the-targets-tokens", "common_vocab_size",
        "    if last >= draft.vocab_width:",
        "    if False:",
        ("tests/job/test_model_refusals.py::test_a_token_that_the_draft_has_no_logits_for_is_refused",)),
    Mutant("tokens-that-the-model-has-not", "PromptEncoder.token_ids",
        "last >= self._vocab_size:",
        "last > self._vocab_size:",
        ("tests/job/test_model_refusals.py::test_a_token_of_the_tokenizer_alone_is_an_error_of_the_rows_that_have_it",)),
)

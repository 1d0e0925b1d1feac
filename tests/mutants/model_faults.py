"""Faults in how models run."""

from specdist.kernels import cpu_library
from tests.mutants.mutant import Mutant

OTHER_LAYERS = "tests/models/test_llama.py::test_a_model_that_computes_something_else_keeps_its_layers"
COMPILED = "tests/models/test_compiled.py::"
STRUCTURES = "tests/models/test_llama.py::test_structures_that_are_not_known"
QUANTIZED = "tests/models/test_quantized_weights.py::"
SHARDED_QUANTIZED = "tests/models/test_quantized.py::test_a_quantised_model_is_the_same_on_two_ranks"
PEER_MEMORY = (
    "tests/models/test_all_reduce.py::test_ranks_sum_through_peers_memory_only_if_it_is_right_on_all_of_them"
)

FAMILIES = "tests/models/test_family_runs.py::test_families_in_turn_do_what_the_table_says"
LEDGER = "tests/engine/test_stats_recorder.py"

# Faults in code for instructions that not every processor has.
TILE_FAULTS = (
    Mutant(
        name="compiled-tiles-in-passes-of-many-tokens-alone",
        file="kernels/cpu_tiles.h",
        old="    for (int64_t input = 0; input < num_inputs; input += TILE_INPUTS, weights += BLOCK_BYTES) {",
        new="    for (int64_t input = rows > 8 ? TILE_INPUTS : 0; input < num_inputs; "
        "input += TILE_INPUTS, weights += BLOCK_BYTES) {",
        tests=(COMPILED + "test_logits_are_the_same_bits_in_any_batch[bfloat16-1]",),
    ),
    Mutant(
        name="compiled-tiles-that-take-the-first-tokens-for-all",
        file="kernels/cpu_tiles.h",
        old="(const char *)packed + first * size * 2;",
        new="(const char *)packed;",
        tests=(COMPILED + "test_logits_are_the_same_bits_in_any_batch[bfloat16-1]",),
    ),
)

MODEL_FAULTS = (
    *(TILE_FAULTS if cpu_library.has_instruction("amx_bf16") else ()),
    Mutant(
        name="layers-of-any-model-taken-for-known-ones",
        file="models/llama_check.py",
        old="    if not difference <= TOLERANCES.get(dtype, 0.0):\n",
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
    Mutant(
        name="compiled-sums-that-depend-on-the-batch",
        file="kernels/cpu_pass.c",
        old="first = softmaxes[0].first / KEYS * KEYS,",
        new="first = softmaxes[0].first,",
        tests=(COMPILED + "test_logits_are_the_same_bits_in_any_batch[float32-1]",),
    ),
    Mutant(
        name="compiled-attention-to-the-first-keys-over-and-over",
        file="kernels/cpu_pass.c",
        old="        memcpy(rows, next_rows, sizeof rows);\n",
        new="",
        tests=(COMPILED + "test_ragged_chunks_match_plain_forwards[llama]",),
    ),
    Mutant(
        name="compiled-products-that-begin-anew-with-every-part-of-the-inputs",
        file="kernels/cpu_products.h",
        old="kernel(packed + first * steps + step * size, block, now,",
        new="kernel(packed + first * steps, block, now,",
        tests=(COMPILED + "test_more_inputs_and_tokens_than_a_cache_keeps[float32]",),
    ),
    Mutant(
        name="compiled-tokens-beyond-the-first-that-share-a-look-at-the-weights",
        file="kernels/cpu_products.h",
        old="int64_t first = first_of_group(first_group + group, num_tokens);\n                    int size",
        new="int64_t first = first_of_group(group, num_tokens);\n                    int size",
        tests=(COMPILED + "test_more_inputs_and_tokens_than_a_cache_keeps[float32]",),
    ),
    Mutant(
        name="compiled-attention-one-key-short-of-the-window",
        file="kernels/cpu_pass.c",
        old="own - layer->window + 1 : 0)",
        new="own - layer->window + 2 : 0)",
        tests=(COMPILED + "test_ragged_chunks_match_plain_forwards[mistral]",),
    ),
    Mutant(
        name="compiled-attention-to-keys-of-the-future",
        file="kernels/cpu_pass.c",
        old="(keys >= softmax->first) & (keys <= softmax->last);",
        new="keys >= softmax->first;",
        tests=(COMPILED + "test_logits_are_the_same_bits_in_any_batch[float32-1]",),
    ),
    Mutant(
        name="compiled-attention-with-the-first-of-converted-values",
        file="kernels/cpu_pass.c",
        old="is_converted ? numbers + KEYS * D : values",
        new="is_converted ? numbers : values",
        tests=(COMPILED + "test_logits_are_the_same_bits_in_any_batch[bfloat16-1]",),
    ),
    Mutant(
        name="peers-memory-may-give-ranks-other-bits",
        file="models/all_reduce.py",
        old="    if not torch.equal(first_N, sums_N):\n",
        new="    if False:\n",
        tests=(PEER_MEMORY,),
    ),
    Mutant(
        name="peers-memory-tried-once",
        file="models/all_reduce.py",
        old="for seed in (0, 1)",
        new="for seed in (0,)",
        tests=(PEER_MEMORY,),
    ),
    Mutant(
        name="messages-of-any-length-through-peers-memory",
        file="models/all_reduce.py",
        old="output.nbytes <= max_bytes and ",
        new="",
        tests=(PEER_MEMORY,),
    ),
    Mutant(
        name="scales-of-another-rank",
        file="models/quantized_weights.py",
        old="return scales.narrow(dim, start // shared, -(-(stop - start) // shared))",
        new="return scales.narrow(dim, 0, -(-(stop - start) // shared))",
        tests=(QUANTIZED + "test_a_part_has_its_own_scales",),
    ),
    Mutant(
        name="groups-that-begin-one-column-late",
        file="models/quantized_weights.py",
        old="return scales.narrow(dim, start // shared, -(-(stop - start) // shared))",
        new="return scales.narrow(dim, max(0, start - 1) // shared, -(-(stop - start) // shared))",
        tests=(QUANTIZED + "test_a_part_has_its_own_scales",),
    ),
    Mutant(
        name="zero-points-left-out",
        file="models/quantized_weights.py",
        old="        if self.zeros_AB is not None:\n            values -=",
        new="        if False:\n            values -=",
        tests=(QUANTIZED + "test_stored_parts_mean_the_matrix",),
    ),
    Mutant(
        name="halves-of-a-byte-exchanged",
        file="models/quantized_weights.py",
        old="halves = torch.stack([self.numbers & 15, self.numbers >> 4], dim=-1)",
        new="halves = torch.stack([self.numbers >> 4, self.numbers & 15], dim=-1)",
        tests=(QUANTIZED + "test_stored_parts_mean_the_matrix",),
    ),
    Mutant(
        name="a-scale-per-token-of-each-rank-alone",
        file="models/quantized_linear.py",
        old="            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)\n",
        new="            pass\n",
        tests=(SHARDED_QUANTIZED,),
    ),
    Mutant(
        name="every-rank-reads-all-weights",
        file="models/weight_stream.py",
        old="return _Node(ranks, ranks.index(own)) if can_share else _Node((own,), 0)",
        new="return _Node((own,), 0)",
        tests=("tests/models/test_loading.py",),
    ),
    Mutant(
        name="weights-overwritten-before-the-slowest-rank-has-read-them",
        file="models/weight_stream.py",
        old="first = min(self._number(1 + reader)",
        new="first = max(self._number(1 + reader)",
        tests=("tests/models/test_weight_stream.py",),
    ),
    Mutant(
        name="damaged-copies-of-weights-are-used",
        file="models/staged_files.py",
        old="is_right = _crc32(copy, on_step) == record.crc32",
        new="_crc32(copy, on_step)",
        tests=("tests/models/test_staged_files.py",),
    ),
    Mutant(
        name="starts-are-not-counted",
        file="engine/stats_recorder.py",
        old="            stats.num_starts += 1\n",
        new="",
        tests=(LEDGER,),
    ),
    Mutant(
        name="tune-runs-the-models-as-they-are-stored",
        file="tuning/config.py",
        old="            PromptOptions, ModelOptions, QuantizationOptions, ",
        new="            PromptOptions, ModelOptions, ",
        tests=("tests/tuning/test_run.py::test_quantised_models_are_those_of_the_run",),
    ),
    Mutant(
        name="collect-runs-the-models-as-they-are-stored",
        file="collecting/config.py",
        old="            PromptOptions, ModelOptions, QuantizationOptions, ",
        new="            PromptOptions, ModelOptions, ",
        tests=("tests/collecting/test_collect.py::test_quantised_models_are_those_of_the_run",),
    ),
    Mutant(
        name="benchmark-runs-the-models-as-they-are-stored",
        file="benchmark/setting.py",
        old="**values_of(config, QuantizationOptions)}",
        new="}",
        tests=("tests/benchmark/test_quantized.py",),
    ),
    Mutant(
        name="draft-of-its-own-process-as-it-is-stored",
        file="benchmark/draft_rank.py",
        old="quantization=source.quantization)",
        new="quantization=None)",
        tests=("tests/benchmark/test_quantized.py::test_the_drafts_process_loads_the_same_weights",),
    ),
    Mutant(
        name="lower-bounds-of-plain-weights",
        file="benchmark/passes.py",
        old="quantization=quantization_of(checkpoint),",
        new="quantization=None,",
        tests=("tests/benchmark/test_quantized.py::test_lower_bounds_read_the_quantised_bytes",),
    ),
    Mutant(
        name="a-cut-that-is-not-tried",
        file="models/cutting.py",
        old="        reason = None if reason == reason_whole else reason\n",
        new="        reason = None\n",
        tests=(FAMILIES,),
    ),
    Mutant(
        name="shapes-of-single-experts-compared",
        file="models/fitting.py",
        old="if stored not in converted and parameters[name].shape",
        new="if parameters[name].shape",
        tests=(
            "tests/models/test_fitting.py::test_a_sound_mixture_is_refused_only_for_what_is_not_done_with_it",
        ),
    ),
    Mutant(
        name="experts-that-are-not-there",
        file="models/fitting.py",
        old="    for name, text in sorted(found.conversion_errors.items()):",
        new="    for name, text in ():",
        tests=("tests/models/test_fitting.py::test_what_is_said_of_a_mixture_is_true",),
    ),
    Mutant(
        name="a-draft-narrower-than-the-targets-tokens",
        file="job/same_tokens.py",
        old="    if last >= draft.vocab_width:",
        new="    if False:",
        tests=("tests/job/test_model_refusals.py::test_a_token_that_the_draft_has_no_logits_for_is_refused",),
    ),
    Mutant(
        name="tokens-that-the-model-has-not",
        file="job/tokens.py",
        old="last >= self._vocab_size:",
        new="last > self._vocab_size:",
        tests=(
            "tests/job/test_model_refusals.py::test_a_token_of_the_tokenizer_alone_is_an_error_of_the_rows_that_have_it",
        ),
    ),
)

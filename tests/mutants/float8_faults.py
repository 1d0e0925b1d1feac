"""Faults of a cache in 8 bits: scales of another token or head, forgotten, or not copied."""

from tests.mutants.mutant import Mutant

CACHE = "tests/models/test_float8_cache.py::"
ROUNDING = CACHE + "test_numbers_become_the_nearest_with_a_scale_of_each_head"
LOGITS = CACHE + "test_logits_are_those_of_rounded_keys_and_values"
COPIES = CACHE + "test_copies_take_their_scales_along"
KERNELS = "tests/kernels/test_float8_cache.py::"
WRITTEN = "tests/kernels/test_layers.py::test_rotary_embeddings_are_those_of_transformers"
ATTENTION = KERNELS + "test_attention_equals_float64"

FLOAT8_FAULTS = (
    Mutant("tokens-promised-where-8-bits-are-rounded", "reproducibility",
        "if rounds_to_8_bits(models.target):",
        "if False:",
        ("tests/job/test_goodput.py::test_a_run_states_its_reproducibility",)),
    Mutant("one-scale-for-all-heads", "to_float8",
        "tokens_TGD.abs().amax(-1)",
        "tokens_TGD.abs().amax((-1, -2)).unsqueeze(-1).expand(tokens_TGD.shape[:2])",
        (ROUNDING, f"{LOGITS}[llama-acceleration0-False]")),
    Mutant("scales-not-copied-with-tokens", "KeyValueCache.copy_tokens",
        "for block, token_width in self._blocks:",
        "for block, token_width in [each for each in self._blocks if each[0].dtype != SCALE_DTYPE]:",
        (COPIES,)),
    Mutant("latents-written-without-scales", "KeyValueCache.write",
        "keys_TGD, self.key_scales.get(layer))",
        "keys_TGD)",
        (COPIES,)),
    Mutant("gathered-with-scales-of-keys", "SdpaKernel.attend",
        "scales[role].index_select",
        "scales[0].index_select",
        (ATTENTION,)),
    Mutant("kernel-reads-scales-of-first-head", "_one_split",
        "(pages_N * page_size + keys_N % page_size) * num_kv_heads + kv_head\n",
        "(pages_N * page_size + keys_N % page_size) * num_kv_heads\n",
        (ATTENTION,)),
    Mutant("kernel-writes-scales-of-heads-to-first", "heads_kernel",
        "key_scales + places_M,",
        "key_scales + places_M // num_kv_heads * num_kv_heads,",
        (WRITTEN,)),
)  # fmt: skip

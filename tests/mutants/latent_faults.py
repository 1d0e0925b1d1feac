"""Faults of latent attention: of what is absorbed, of what is kept, and of the kernel that reads it."""

from tests.mutants.mutant import Mutant

LATENT = "tests/models/test_latent.py::"
LOGITS = LATENT + "test_every_family_keeps_its_logits_in_the_latents_memory[deepseek_v3]"
EXPANDED = LATENT + "test_segments_of_many_tokens_expand_latents_to_the_same_logits"
OTHERS = LATENT + "test_other_numbers_are_noticed_and_keys_and_values_are_kept"
WIDER = "tests/kernels/test_paged_attention.py::test_it_equals_float64"
V3 = LATENT + "test_a_thousand_tokens_of_deepseek_v3_take_70_megabytes"
QUANTIZED = LATENT + "test_quantised_projections_from_latents_become_plain_ones"

LATENT_FAULTS = (
    Mutant("queries-through-another-heads-matrix", "Latents.queries",
        "@ to_keys_HDR).transpose(0, 1)",
        "@ to_keys_HDR.roll(1, 0)).transpose(0, 1)",
        (LOGITS,)),
    Mutant("latents-unchecked", "can_keep_latents",
        "each.check(generator)",
        "pass",
        (f"{OTHERS}[queries]", f"{OTHERS}[output]")),
    Mutant("scale-of-the-latents-width", "_record",
        "scale=scaling or query.shape[-1] ** -0.5, is_latent=True",
        "scale=None, is_latent=True",
        (LOGITS,)),
    Mutant("rotated-part-is-not-kept", "Latents.__call__",
        "key = torch.cat((latent, rotated), dim=-1)",
        "key = torch.cat((latent, 0 * rotated), dim=-1)",
        (LOGITS,)),
    Mutant("expanded-before-all-is-written", "ExpandedAttention.attend_latents",
        "self._cache.write(layer, self._cache_index_T, call.keys, call.values)",
        "pass",
        (EXPANDED,)),
    Mutant("recorded-passes-take-long-chunks", "ModelRunner._recorded",
        "self._static is None or self.torch_pass.expanded_segments(batch) is not None",
        "self._static is None",
        (EXPANDED,)),
    Mutant("kernel-leaves-the-rest-of-keys-out", "_one_split",
        "scores = _dot(rest_queries, tl.trans(rest_keys), scores)",
        "pass",
        (WIDER + "[wider]",)),
    Mutant("part-of-the-heads-reads-another-key", "attend_kernel",
        "kv_head = head // num_parts",
        "kv_head = head",
        (WIDER + "[latent]",)),
    Mutant("planner-cuts-latents", "LayerCache.num_numbers",
        "return self.width if self.is_latent else",
        "return self.width // tp_size if self.is_latent else",
        (V3,)),
    Mutant("quantised-projection-counted-narrow", "_quantized",
        "if name not in names or name in absorbed:",
        "if name not in names:",
        (QUANTIZED,)),
)

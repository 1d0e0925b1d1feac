"""Faults in adapters: another scale, the wrong way round, left out in one of the paths that read weights."""

from tests.mutants.mutant import Mutant

MERGED = "tests/models/test_lora.py::test_the_merged_model_is_peft_s"
PATTERNS, DORA, VOCABULARY = (
    f"{MERGED}[{name}]" for name in ("ranks and scales of modules", "DoRA", "vocabulary")
)
QUANTISED = (
    "tests/models/test_lora.py::test_a_model_that_is_quantised_while_it_is_loaded_is_quantised_with_its"
)
JOB = "tests/job/test_adapters.py"

ADAPTER_FAULTS = (
    Mutant("adapter-scaled-by-rank-with-rslora", "_scale",
        '(math.sqrt(rank) if config.get("use_rslora") else rank)',
        "rank",
        (PATTERNS,)),
    Mutant("embedding-s-adapter-left-out-of-the-check", "read_sample",
        "checkpoint.adapted(taker, found[new_name], sample.vocab_ids)",
        "found[new_name]",
        (VOCABULARY,)),
    Mutant("adapter-left-out-of-what-is-read", "Filling._fill",
        "whole = self._checkpoint.adapted(name, whole)",
        "pass",
        (f"{QUANTISED}_adapter",
         "tests/models/test_parity.py::test_slices_of_two_ranks_match_plain_forwards")),
    Mutant("manifest-without-the-adapter", "_changes_fingerprint",
        "None if model.adapter is None else model.adapter.fingerprint()",
        "None",
        (JOB,)),
)

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
    Mutant(
        name="adapter-scaled-by-rank-with-rslora",
        file="models/adapter_folder.py",
        old='(math.sqrt(rank) if config.get("use_rslora") else rank)',
        new="rank",
        tests=(PATTERNS,),
    ),
    Mutant(
        name="adapter-s-patterns-not-read",
        file="models/adapter_folder.py",
        old='return of_module("alpha_pattern", "lora_alpha") /',
        new='return float(config["lora_alpha"]) /',
        tests=(PATTERNS,),
    ),
    Mutant(
        name="adapter-with-lengths-of-columns",
        file="models/lora.py",
        old="return merged * (magnitude / merged.norm(dim=1))[:, None]",
        new="return merged * magnitude[:, None]",
        tests=(DORA,),
    ),
    Mutant(
        name="embedding-s-adapter-left-out-of-the-check",
        file="models/reference.py",
        old="checkpoint.adapted(taker, found[new_name], sample.vocab_ids)",
        new="found[new_name]",
        tests=(VOCABULARY,),
    ),
    Mutant(
        name="quantised-without-the-adapter",
        file="models/loading.py",
        old="found[part] = whole.clone() if merged is whole else merged",
        new="found[part] = whole.clone()",
        tests=(f"{QUANTISED}_adapter",),
    ),
    Mutant(
        name="adapter-left-out-of-a-sharded-target",
        file="models/loading.py",
        old="local = cut_tensor(layer, wanted[name], checkpoint.adapted(name, whole), dtype)",
        new="local = cut_tensor(layer, wanted[name], whole if group else checkpoint.adapted(name, whole), dtype)",
        tests=("tests/models/test_parity.py::test_slices_of_two_ranks_match_plain_forwards[untied]",),
    ),
    Mutant(
        name="manifest-without-the-adapter",
        file="job/fingerprint.py",
        old="None if model.adapter is None else model.adapter.fingerprint()",
        new="None",
        tests=(JOB,),
    ),
)

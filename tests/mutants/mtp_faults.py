"""Faults in MTP heads: what they read of the target, how they join it, and which tensors they are made of."""

from tests.mutants.mutant import Mutant

PAPERS = "tests/engine/test_mtp.py::test_every_block_is_what_the_papers_say[ernie4_5_moe]"
FILES = "tests/models/drafters/test_mtp.py::test_published_files_give_the_head_and_the_target"

MTP_FAULTS = (
    Mutant("head-reads-states-before-the-final-norm", "StateReader.__init__",
        'model.get_decoder() if hasattr(model, "get_decoder") else model.base_model',
        "stack[-1]",
        (PAPERS,)),
    Mutant("states-stand-where-other-families-have-them", "JoinedStates.forward",
        "parts[::-1] if self._states_first else parts",
        "parts",
        ("tests/engine/test_mtp.py::test_every_block_is_what_the_papers_say[mimo]",)),
    Mutant("head-sees-the-first-token", "DrafterRunner.__init__",
        "self._shapes.hide_first()",
        "pass",
        (PAPERS,)),
    Mutant("head-has-the-experts-of-the-first-layer", "FileNames.own",
        "return own + stored.removeprefix(prefix) if own else None",
        'return own + stored.removeprefix(prefix) if own and "experts" not in stored else None',
        (f"{FILES}[deepseek_v3]",)),
    Mutant("plan-counts-a-shared-embedding-twice", "_share",
        "        weight_bytes -= draft.shared_bytes(tp_size)\n",
        "        pass\n",
        ("tests/models/drafters/test_mtp.py::test_a_head_beside_its_model_has_the_same_embedding[False]",)),
)

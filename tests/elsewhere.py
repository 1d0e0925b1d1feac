"""The table of options under speculation here and in other engines, from their documentation and code.

The column for this project is filled by tests: an option is *exact* where each of the tests named exists and
compares what the engine emits, or writes, with the target's own. Of the others each cell says what the cited
page says; a question mark is for what no page says.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from specdist.utils.table import Table

REPOSITORY = Path(__file__).parent.parent
ENGINES = ("vLLM", "SGLang", "TensorRT-LLM", "transformers")

VLLM = "https://github.com/vllm-project/vllm"
SGLANG = "https://github.com/sgl-project/sglang"
TENSORRT = "https://github.com/NVIDIA/TensorRT-LLM"
# By the names that the cells have; a commit or a number fixes the version.
SOURCES = {
    "matrix of vLLM": f"{VLLM}/blob/00712b315d4a267f7b14e0593708c9a8e357630e/docs/features/README.md",
    "speculation in vLLM": "https://docs.vllm.ai/en/v0.17.0/features/speculative_decoding/",
    "vLLM 38202": f"{VLLM}/issues/38202",
    "vLLM 42744": f"{VLLM}/issues/42744",
    "vLLM 18902": f"{VLLM}/issues/18902",
    "vLLM 9423": f"{VLLM}/issues/9423",
    "vLLM 34497": f"{VLLM}/issues/34497",
    "vLLM 34668": f"{VLLM}/pull/34668",
    "vLLM 54906": f"{VLLM}/issues/54906",
    "SGLang 10617": f"{SGLANG}/issues/10617",
    "SGLang 22049": f"{SGLANG}/pull/22049",
    "SGLang 13019": f"{SGLANG}/issues/13019",
    "SGLang 9187": f"{SGLANG}/issues/9187",
    "SGLang 14046": f"{SGLANG}/pull/14046",
    "SGLang 26330": f"{SGLANG}/issues/26330",
    "SGLang 28395": f"{SGLANG}/pull/28395",
    "sampling of TensorRT-LLM": (
        f"{TENSORRT}/blob/05ce57bcac5b5a3ead7b142fa4bb9ed012805008/docs/source/features/sampling.md"
    ),
    "matrix of TensorRT-LLM": (
        f"{TENSORRT}/blob/01edceae1757b6d77dd9129d14e73b93fb1d2a3d"
        "/docs/source/features/feature-combination-matrix.md"
    ),
    "TensorRT-LLM 17955": f"{TENSORRT}/pull/17955",
    "TensorRT-LLM 18401": f"{TENSORRT}/pull/18401",
    "transformers 5.23": (
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/generation/utils.py"
    ),
}
UNKNOWN = "?"


@dataclass(frozen=True)
class Cell:
    """What an engine does with an option under speculation, and the names of ``SOURCES`` that say so."""

    text: str
    sources: tuple[str, ...] = ()

    def __str__(self) -> str:
        marks = [f"[{number}]({SOURCES[name]})" for number, name in enumerate(self.sources, 1)]
        return f"{self.text} ({', '.join(marks)})" if marks else self.text


@dataclass(frozen=True)
class Row:
    """An option; ``tests`` of this project as ``file::function``; ``others`` in the order of ``ENGINES``."""

    option: str
    tests: tuple[str, ...]
    others: tuple[Cell, Cell, Cell, Cell]


def cell(text: str, *sources: str) -> Cell:
    return Cell(text, sources)


NOT_SAID = Cell(UNKNOWN)
ONE_ROW = cell("one row at a time", "transformers 5.23")
PROCESSORS = "tests/sampling/test_processors.py::test_a_processor_does_what_transformers_does"
ENUMERATED = "tests/sampling/test_processors.py::test_speculation_on_processed_distributions_by_enumeration"
FOLLOWS = "tests/engine/test_processing.py::test_processed_tokens_follow_the_target"
COMBINED = "tests/engine/test_processing.py::test_twenty_combinations_of_options_follow_the_target"
MASKED = "tests/engine/test_constraints.py::test_completions_follow_the_masked_target_s_distribution"
PROCESSED = (PROCESSORS, ENUMERATED, FOLLOWS, COMBINED)

ROWS = (
    Row(
        "temperature, top-k, top-p",
        (
            *PROCESSED,
            "tests/engine/test_distribution.py::test_synchronous_drafting_follows_the_target_s_distribution",
            "tests/engine/test_distribution.py::test_asynchronous_drafting_follows_the_target_s_distribution",
        ),
        (
            cell("yes", "speculation in vLLM"),
            cell("yes", "SGLang 10617"),
            cell("yes", "sampling of TensorRT-LLM"),
            ONE_ROW,
        ),
    ),
    Row(
        "min-p",
        PROCESSED,
        (
            cell("refused", "vLLM 42744"),
            cell("not at every token", "SGLang 10617"),
            cell("in one mode of its sampler", "sampling of TensorRT-LLM"),
            ONE_ROW,
        ),
    ),
    Row(
        "repetition, presence, frequency penalties",
        PROCESSED,
        (
            cell("reported not to work", "vLLM 18902"),
            cell("an approximation", "SGLang 22049"),
            cell("of the target alone, if enabled; not with trees", "sampling of TensorRT-LLM"),
            ONE_ROW,
        ),
    ),
    Row(
        "logit bias",
        PROCESSED,
        (
            cell("refused", "vLLM 38202"),
            cell("not at every token", "SGLang 10617"),
            cell("refused", "TensorRT-LLM 17955"),
            ONE_ROW,
        ),
    ),
    Row("bad words, least length", PROCESSED, (NOT_SAID, NOT_SAID, NOT_SAID, ONE_ROW)),
    Row(
        "JSON schema, regular expression, grammar",
        (
            MASKED,
            COMBINED,
            "tests/sampling/constraints/test_matcher.py::test_whatever_the_masks_of_a_schema_allow_is_an_instance_of_it",
        ),
        (
            cell("yes; reported to break", "vLLM 9423"),
            cell("reported to stop early; open for its second version", "SGLang 9187", "SGLang 13019"),
            cell("yes", "matrix of TensorRT-LLM"),
            cell("no grammars", "transformers 5.23"),
        ),
    ),
    Row(
        "thinking budget",
        (
            "tests/engine/test_constraints.py::test_a_budget_of_thinking_is_kept_as_by_the_target_alone",
            "tests/job/test_constraints.py::test_a_budget_of_thinking",
        ),
        (
            cell("yes; reported to be ignored by its second runner", "vLLM 34668", "vLLM 54906"),
            cell("reported to be ignored", "SGLang 26330"),
            NOT_SAID,
            cell("no", "transformers 5.23"),
        ),
    ),
    Row(
        "log-probabilities",
        ("tests/engine/test_logprobs.py::test_log_probabilities_are_those_of_a_plain_pass",),
        (
            cell("yes; reported to be wrong", "matrix of vLLM", "vLLM 34497"),
            cell("reported to be missing in its second version", "SGLang 14046"),
            cell("refused", "TensorRT-LLM 18401"),
            ONE_ROW,
        ),
    ),
    Row(
        "log-probabilities of the prompt",
        ("tests/engine/test_prompt_logprobs.py::test_prompts_are_scored_as_by_a_plain_pass",),
        (
            cell("yes", "matrix of vLLM"),
            NOT_SAID,
            cell("refused", "TensorRT-LLM 18401"),
            cell("no", "transformers 5.23"),
        ),
    ),
    Row(
        "options of single rows in a batch",
        (
            "tests/engine/test_processing.py::test_rows_of_one_batch_have_options_of_their_own",
            "tests/job/test_row_options.py::test_rows_have_options_of_their_own",
        ),
        (
            cell("yes", "vLLM 34668"),
            cell("yes", "SGLang 22049"),
            cell("yes", "sampling of TensorRT-LLM"),
            cell("no", "transformers 5.23"),
        ),
    ),
    Row(
        "several samples of a prompt",
        (
            "tests/engine/test_identity.py::test_samples_of_a_prompt_share_its_pages_and_differ",
            "tests/job/test_invariance.py::test_samples_of_a_row_differ_and_share_its_prompt",
        ),
        (NOT_SAID, NOT_SAID, cell("yes", "sampling of TensorRT-LLM"), cell("no", "transformers 5.23")),
    ),
    Row(
        "LoRA of the target",
        (
            "tests/models/test_lora.py::test_the_merged_model_is_peft_s",
            "tests/job/test_adapters.py::test_a_run_s_tokens_are_those_of_the_merged_target",
        ),
        (
            cell("no", "matrix of vLLM"),
            cell("n-grams only", "SGLang 28395"),
            cell("untested", "matrix of TensorRT-LLM"),
            NOT_SAID,
        ),
    ),
)


def markdown() -> str:
    """Raises ValueError for a test that does not exist."""
    lines = []
    for row in ROWS:
        missing = [test for test in row.tests if not _exists(test)]
        if missing or not row.tests:
            raise ValueError(f"{row.option}: there is no test {', '.join(missing)}")
        num_tests = f"{len(row.tests)} test{'s' if len(row.tests) > 1 else ''}"
        lines.append([row.option, f"exact, {num_tests}", *map(str, row.others)])
    return Table(["option", "here", *ENGINES], lines, num_names=2 + len(ENGINES)).markdown()


def _exists(test: str) -> bool:
    file, _, function = test.partition("::")
    return function in _functions(REPOSITORY / file)


@cache
def _functions(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))

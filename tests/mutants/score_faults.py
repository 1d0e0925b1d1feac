"""Faults in what counts as an answer."""

from tests.mutants.mutant import Mutant

ANSWERS = "tests/results/evaluate/test_answers.py"
CHOICE = "tests/results/evaluate/test_multiple_choice.py"
GSM8K = "tests/results/evaluate/test_gsm8k.py"
WRITING = "tests/results/evaluate/test_writing.py"
PROGRAMS = "tests/results/evaluate/test_programs.py"

SCORE_FAULTS = (
    Mutant("thinking-without-an-end-is-an-answer", "without_thinking",
        '        return ""\n    answer',
        "        return completion\n    answer",
        (ANSWERS,)),
    Mutant("numbered-heading-is-an-answer", "final_expression",
        "if each and not (form is MARK and HEADING.match(reading, each.end()))",
        "if each",
        (WRITING, GSM8K)),
    Mutant("word-of-magnitude-is-a-unit", "_number",
        ' * _factor(match["last_scale"])',
        "",
        (WRITING,)),
    Mutant("one-of-several-letters-is-chosen", "_only",
        'found.pop() if len(found) == 1 else ""',
        "max(found)",
        (WRITING,)),
    Mutant("discussed-choices-are-answers", "_letter_in",
        "_without_list(text)",
        "text",
        (WRITING,)),
    Mutant("next-question-is-read-too", "readings",
        "[answer[: next_question.start()], answer]",
        "[answer]",
        (ANSWERS, GSM8K, CHOICE)),
    Mutant("number-of-a-choice-is-its-text", "right_letter",
        "if not is_number and text in choices",
        "if text in choices",
        (CHOICE,)),
    Mutant("block-runs-without-its-problem", "program_of",
        "for part in (problem_code(problem, name), block)",
        "for part in (block,)",
        (PROGRAMS,)),
    Mutant("first-letter-of-several-counts", "_last",
        "reversed([*form.finditer(text)])",
        "form.finditer(text)",
        (WRITING,)),
)

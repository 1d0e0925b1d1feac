"""Faults in what counts as an answer."""

from tests.mutants.mutant import Mutant

ANSWERS = "tests/results/evaluate/test_answers.py"
CHOICE = "tests/results/evaluate/test_multiple_choice.py"
GSM8K = "tests/results/evaluate/test_gsm8k.py"
PROGRAMS = "tests/results/evaluate/test_programs.py"

SCORE_FAULTS = (
    Mutant("thinking-without-an-end-is-an-answer", "without_thinking",
        '        return ""\n    answer',
        "        return completion\n    answer",
        (ANSWERS,)),
    Mutant("first-end-of-thinking-counts", "without_thinking",
        "completion.rfind(end)",
        "completion.find(end)",
        (ANSWERS,)),
    Mutant("numbered-heading-is-an-answer", "FORMS",
        r"{RESULT}(?![.):]+[*_]*[ \t]+\S|[ \t]*[A-Z][a-z])",
        "{RESULT}",
        (GSM8K,)),
    Mutant("dash-of-a-range-is-a-minus", "NUMBER",
        r"(?:(?<![\w.)\]}}%])-)?",
        "-?",
        (GSM8K,)),
    Mutant("next-question-is-read-too", "readings",
        "[answer[: next_question.start()], answer]",
        "[answer]",
        (ANSWERS, GSM8K, CHOICE)),
    Mutant("number-of-a-choice-is-its-text", "right_letter",
        "if not is_number and text in choices",
        "if text in choices",
        (CHOICE,)),
    Mutant("first-letter-of-several-counts", "_last",
        "for letter in reversed(letters)",
        "for letter in letters",
        (CHOICE,)),
    Mutant("block-runs-without-its-problem", "program_of",
        "for part in (problem_code(problem, name), block)",
        "for part in (block,)",
        (PROGRAMS,)),
)

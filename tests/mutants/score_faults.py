"""Faults in what counts as an answer."""

from tests.mutants.mutant import Mutant

ANSWERS = "tests/evaluation/test_answers.py"
CHOICE = "tests/evaluation/test_multiple_choice.py"
GSM8K = "tests/evaluation/test_gsm8k.py"
PROGRAMS = "tests/evaluation/test_programs.py"

SCORE_FAULTS = (
    Mutant(
        name="thinking-without-an-end-is-an-answer",
        file="evaluation/answers.py",
        old='        return ""\n    answer',
        new="        return completion\n    answer",
        tests=(ANSWERS,),
    ),
    Mutant(
        name="first-end-of-thinking-counts",
        file="evaluation/answers.py",
        old="completion.rfind(end)",
        new="completion.find(end)",
        tests=(ANSWERS,),
    ),
    Mutant(
        name="numbered-heading-is-an-answer",
        file="evaluation/gsm8k.py",
        old=r"{RESULT}(?![.):]+[*_]*[ \t]+\S|[ \t]*[A-Z][a-z])",
        new="{RESULT}",
        tests=(GSM8K,),
    ),
    Mutant(
        name="dash-of-a-range-is-a-minus",
        file="evaluation/gsm8k.py",
        old=r"(?:(?<![\w.)\]}}%])-)?",
        new="-?",
        tests=(GSM8K,),
    ),
    Mutant(
        name="next-question-is-read-too",
        file="evaluation/answers.py",
        old="[answer[: next_question.start()], answer]",
        new="[answer]",
        tests=(ANSWERS, GSM8K, CHOICE),
    ),
    Mutant(
        name="number-of-a-choice-is-its-text",
        file="evaluation/multiple_choice.py",
        old="if not is_number and text in choices",
        new="if text in choices",
        tests=(CHOICE,),
    ),
    Mutant(
        name="first-letter-of-several-counts",
        file="evaluation/multiple_choice.py",
        old="for letter in reversed(letters)",
        new="for letter in letters",
        tests=(CHOICE,),
    ),
    Mutant(
        name="block-runs-without-its-problem",
        file="evaluation/programs.py",
        old="for part in (problem_code(problem, name), block)",
        new="for part in (block,)",
        tests=(PROGRAMS,),
    ),
)

"""Code that passes the tests of the column ``test_list``, a list of assertions as in MBPP, in the sandbox of
``jobs/evaluate.py``."""

import re

from specdist import rollout
from specdist.results.evaluate.tasks.sandbox import run_program


def check(row, messages):
    text = messages[-1]["content"]
    code = (re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL) or [text])[-1]
    for test in row["test_list"]:
        ended = run_program(f"{code}\n{test}\n")
        if ended.outcome != "passed":
            return rollout.reject(f"{test}: {ended.detail or ended.outcome}")
    return rollout.accept()

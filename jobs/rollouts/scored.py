"""Best of several: the nearer the last number is to the column ``answer``, the higher the score, up to 1."""

import re

from specdist import rollout


def check(row, messages):
    numbers = re.findall(r"-?\d+(?:\.\d+)?", messages[-1]["content"].replace(",", ""))
    if not numbers:
        return rollout.reject("the answer has no number")
    return rollout.accept(score=1 / (1 + abs(float(numbers[-1]) - float(row["answer"]))), number=numbers[-1])

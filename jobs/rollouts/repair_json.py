"""Completions that are JSON: the model repairs what is not, told what the parser says."""

import json

from specdist import rollout


def check(row, messages):
    try:
        json.loads(messages[-1]["content"].strip().removeprefix("```json").removesuffix("```"))
    except (ValueError, RecursionError) as error:
        request = f"This is not valid JSON: {error}. Answer with the repaired JSON alone."
        return rollout.messages([{"role": "user", "content": request}])
    return rollout.accept()

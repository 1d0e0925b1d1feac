"""The plan in the README is what its command prints."""

from __future__ import annotations

import re
import shlex

from specdist.config.generate import parse_arguments
from specdist.planning.job import run_plan
from specdist.planning.options import PlanConfig
from tests.readme import documentation

BEGIN, END = "<!-- plan:begin -->", "<!-- plan:end -->"


def test_the_readmes_plan_is_that_of_its_command() -> None:
    """If it differs, run the command and put its output between the markers."""
    before, _, rest = documentation().partition(BEGIN)
    shown = rest.partition(END)[0].strip("\n`")
    command = re.findall(r"```bash\n(.*?)```", before, re.DOTALL)[-1].replace("\\\n", " ")
    arguments = shlex.split(command)
    assert arguments[:2] == ["python", "jobs/plan.py"]
    text, _ = run_plan(parse_arguments(PlanConfig, arguments[2:]), command)
    assert shown == text

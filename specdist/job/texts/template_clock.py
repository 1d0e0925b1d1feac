"""The date in chat prompts: ``strftime_now`` of chat templates, told by a clock that stands still.

transformers gives templates the time at which each row is read: a run over midnight, a restart, or replicas
in two time zones would have prompts with several dates. So the template gets a macro of the same name before
it, which Jinja finds first, with all that ``strftime`` says of one moment.
"""

from __future__ import annotations

import json
import logging
import string
from datetime import datetime
from functools import lru_cache

from specdist.data.run.run_folder import RunFolder

# The field of the manifest for the local time, with its time zone, at which a run was first started.
CLOCK = "clock"
NAME = "strftime_now"
# Directives may have a flag, such as %-d for a day without its zero.
CODES = [f"%{flag}{letter}" for flag in ("", *"-_0^#") for letter in string.ascii_letters]
# Its end of the line is Jinja's, so that the template begins as it would alone.
MACRO = (
    "{% set strftime_texts = TEXTS %}"
    "{% macro strftime_now(format) %}"
    '{% set told = namespace(text=format.replace("%%", "\\u0000")) %}'
    "{% for code, text in strftime_texts.items() if code in format %}"
    "{% set told.text = told.text.replace(code, text) %}{% endfor %}"
    '{{ told.text.replace("\\u0000", "%") }}{% endmacro %}\n'
)

logger = logging.getLogger(__name__)


@lru_cache
def with_clock(template: str, now: datetime) -> str:
    """The template, with ``now`` as its time."""
    if NAME not in template:
        return template
    return MACRO.replace("TEXTS", json.dumps({code: now.strftime(code) for code in CODES})) + template


def clock_info() -> dict[str, str]:
    """What the manifest's ``info`` has of a run that begins now."""
    return {CLOCK: datetime.now().astimezone().isoformat()}


def run_clock(folder: RunFolder) -> datetime:
    """The local time of a run's first start, where that was."""
    return datetime.fromisoformat(folder.manifest.info[CLOCK]).replace(tzinfo=None)

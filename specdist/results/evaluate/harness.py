"""Generation tasks of lm-evaluation-harness: export their prompts, and evaluate a run with their metrics.

The harness asks a model while it evaluates, but a run answers later. So it runs twice, and asks the same both
times: first with a model that records the requests, and, when the run is complete, with one that answers from
it. The settings of the export are stored with every prompt.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from specdist.config.groups import RULES
from specdist.data.store.files import write_atomically
from specdist.results.evaluate.config import LM_EVAL, EvaluateConfig
from specdist.results.evaluate.reading import Completions
from specdist.results.evaluate.results import write_arrow
from specdist.results.evaluate.scores import ERROR, IDENTITY_COLUMNS, Metric, Scores, Scoring
from specdist.results.evaluate.tasks.texts import answer_columns, answer_of
from specdist.utils.errors import UserError

# The number of the request, in the order in which the harness asks, and the settings of the export.
REQUEST_COLUMN, SETTINGS_COLUMN = "lm_eval_request", "lm_eval_settings"
# The harness's generation options that a run supports.
KNOWN_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


def export_prompts(config: EvaluateConfig) -> tuple[str, dict[str, Any]]:
    """Write the tasks' prompts, and the options that they require as YAML for ``jobs/generate.py --config``.

    Raises :class:`UserError` for tasks that are unknown to the harness, that do not generate, or that require
    different options.
    """
    assert config.lm_eval_export is not None and config.output is not None
    output = Path(config.output)
    options_path = output.with_suffix(".yaml")
    for path in (output, options_path):
        if path.exists() and not config.overwrite:
            raise UserError(f"--output: {path} exists: give another name, or --overwrite to replace it")
    _require_package()
    include = config.lm_eval_include
    settings: dict[str, Any] = {
        "tasks": config.lm_eval_export,
        "include": None if include is None else str(Path(include).resolve()),
        "num_fewshot": config.lm_eval_num_fewshot,
        "limit": config.lm_eval_limit,
    }
    recorder = _answering(None)
    _evaluate(recorder, settings, predict_only=True)
    settings["options"] = options = run_options(recorder.asked)
    num_prompts = len(recorder.asked)
    table = pa.table(
        {
            "prompt": [request.args[0] for request in recorder.asked],
            REQUEST_COLUMN: pa.array(range(num_prompts), pa.int64()),
            SETTINGS_COLUMN: [json.dumps(settings)] * num_prompts,
        }
    )
    write_arrow(output, table)
    content = yaml.safe_dump(options, sort_keys=False, allow_unicode=True)
    write_atomically(options_path, lambda file: file.write(content.encode()))
    text = (
        f"{num_prompts:,} prompts of {', '.join(config.lm_eval_export)}: {output}\n"
        f"python jobs/generate.py --config {options_path} --prompts {output} --target TARGET --output RUN\n"
        f"python jobs/evaluate.py RUN --task {LM_EVAL}"
    )
    return text, {"output": str(output), "options": str(options_path), "num_prompts": num_prompts}


def harness(completions: Completions, config: EvaluateConfig) -> Scoring:
    """Raises :class:`UserError` if the run's prompts were not exported, or its options are not those that the
    tasks require."""
    _require_package()
    wanted = dict.fromkeys((REQUEST_COLUMN, SETTINGS_COLUMN), f"--task {LM_EVAL} (see --lm_eval_export)")
    completions.check_columns(wanted)
    found = completions.table[SETTINGS_COLUMN].unique().to_pylist()
    if len(found) != 1:
        raise UserError(
            f"{completions.path} mixes the prompts of {len(found)} exports: evaluate one at a time"
        )
    settings: dict[str, Any] = json.loads(found[0])
    if completions.manifest is not None:  # a merged file does not record how it was generated
        _check_options(completions.manifest.fingerprint, settings["options"])
    return partial(_score, completions, settings)


def _score(completions: Completions, settings: Mapping[str, Any]) -> Scores:
    """The mean over documents for each of the harness's tasks, filters and metrics.

    The facts hold the harness's own aggregates, which are the same for metrics that it averages.
    """
    names = (*IDENTITY_COLUMNS, *answer_columns(completions), REQUEST_COLUMN)
    rows = {row[REQUEST_COLUMN]: row for row in completions.rows(*names) if row["sample_index"] == 0}
    until = settings["options"].get("stop")
    answers = {
        number: (row["prompt"], "" if row["finish_reason"] == ERROR else answer_of(row, until))
        for number, row in rows.items()
    }
    model = _answering(answers)
    results = _evaluate(model, settings, predict_only=False)
    # A document that a task asks several times has the row of its first request.
    asked = reversed([*enumerate(model.asked)])
    row_ids = {(request.task_name, request.doc_id): rows[number]["row_id"] for number, request in asked}
    facts = {
        "lm_eval": {
            task: {name: float(value) for name, value in found.items() if isinstance(value, Real)}
            for task, found in results["results"].items()
        },
        "lm_eval_version": results.get("lm_eval_version"),
        "settings": settings,
    }
    return Scores(columns={}, metrics=_by_document(results["samples"], row_ids), facts=facts)


def run_options(asked: Sequence[Any]) -> dict[str, Any]:
    """Options of ``jobs/generate.py`` for these requests. Raises :class:`UserError` if they differ."""
    from lm_eval.models.utils import normalize_gen_kwargs

    found = [(_options(request, normalize_gen_kwargs(request.args[1])), request) for request in asked]
    options, first = found[0]
    for others, request in found:
        if others != options:
            raise UserError(
                "--lm_eval_export: the tasks require different options; export them separately: "
                f"{first.task_name}: {json.dumps(options)}; {request.task_name}: {json.dumps(others)}"
            )
    return options


def _options(request: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(wanted) - KNOWN_OPTIONS)
    if unknown:
        raise UserError(
            f"--lm_eval_export {request.task_name}: the task requires {unknown[0]}={wanted[unknown[0]]!r}, "
            "which specdist does not support"
        )
    options = {"temperature": float(wanted["temperature"]), "max_new_tokens": int(wanted["max_gen_toks"])}
    if options["temperature"] > 0:
        options |= {name: RULES[name].kept(wanted[name]) for name in ("top_k", "top_p") if name in wanted}
    stops = [text for text in wanted.get("until", []) if text]
    return options | ({"stop": stops} if stops else {})


def _check_options(fingerprint: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    wanted = {"top_k": 0, "top_p": 1.0, "stop": None, **options}
    for name, value in wanted.items():
        is_unused = name.startswith("top_") and wanted["temperature"] == 0
        if (fingerprint[name] or None) != (value or None) and not is_unused:
            raise UserError(
                f"--task {LM_EVAL}: the run had {name} {fingerprint[name]}, but its tasks require {value}: "
                "generate with the .yaml file that --lm_eval_export has written, as --config"
            )


def _require_package() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import lm_eval  # noqa: F401 (not needed for anything else)
    except ImportError as error:
        raise UserError(
            f"the package lm-eval (lm-evaluation-harness) cannot be imported: "
            f"pip install -e '.[harness]' in specdist's folder ({error})"
        ) from error


def _answering(answers: Mapping[int, tuple[str, str]] | None) -> Any:
    """A model for the harness, which records its requests and answers each with the text for its number, if
    it has the same prompt; without ``answers`` with ''."""
    from lm_eval.api.model import LM

    class Answering(LM):  # its base exists only where the package is installed
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[Any] = []

        def generate_until(self, requests: list[Any]) -> list[str]:
            start = len(self.asked)
            self.asked += requests
            return [self._answer(number, request) for number, request in enumerate(requests, start)]

        def _answer(self, number: int, request: Any) -> str:
            if answers is None:
                return ""
            prompt, answer = answers.get(number, (None, ""))
            if prompt != request.args[0]:
                what = "is not in the run" if prompt is None else "has a different prompt in the run"
                raise UserError(
                    f"--task {LM_EVAL}: request {number}, for document {request.doc_id} of "
                    f"{request.task_name}, {what}: was the run made from this export, and is it complete?"
                )
            return answer

        def loglikelihood(self, requests: list[Any]) -> Any:
            raise UserError(
                f"--lm_eval_export {requests[0].task_name}: the task requires likelihoods, but a run has "
                "only completions: choose tasks whose output_type is generate_until"
            )

        loglikelihood_rolling = loglikelihood

    return Answering()


def _evaluate(model: Any, settings: Mapping[str, Any], *, predict_only: bool) -> dict[str, Any]:
    """Run the harness. Raises :class:`UserError` for any error of it."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    try:
        results = simple_evaluate(
            model=model,
            tasks=list(settings["tasks"]),
            num_fewshot=settings["num_fewshot"],
            limit=settings["limit"],
            task_manager=TaskManager(
                include_path=settings["include"], include_defaults=settings["include"] is None
            ),
            bootstrap_iters=0,
            predict_only=predict_only,
            confirm_run_unsafe_code=predict_only,
        )
    except UserError:
        raise
    except Exception as error:  # tasks are third-party code and data, and can fail in any way
        raise UserError(
            f"lm-evaluation-harness cannot evaluate {', '.join(settings['tasks'])}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return dict(results)


def _by_document(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], row_ids: Mapping[tuple[str, int], int]
) -> dict[str, Metric]:
    """Means over documents of a task's metrics, by filter. Metrics that are no numbers are left to the
    harness."""
    values: dict[str, dict[int, float]] = {}
    for task, found in samples.items():
        for sample in found:
            row_id = row_ids[task, sample["doc_id"]]
            for metric in sample["metrics"]:
                value = sample[metric]
                if isinstance(value, (Real, np.bool_)) and math.isfinite(value):
                    values.setdefault(f"{task}: {metric}, {sample['filter']}", {})[row_id] = float(value)
    return {name: Metric.of([*found], [*found.values()]) for name, found in values.items()}

"""Generation tasks of lm-evaluation-harness: export their prompts, and evaluate a run with their metrics.

The harness asks a model while it evaluates, but a run answers later. So it runs twice: first with a model
that records the requests, and, when the run is complete, with one that answers from it. The settings of the
export are stored with every prompt.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
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
from specdist.results.evaluate.scores import Metric, Scores
from specdist.results.evaluate.tasks.texts import ERROR, answer_columns, answer_of
from specdist.utils.errors import UserError

logger = logging.getLogger(__name__)

TASK_COLUMN, DOC_COLUMN, REQUEST_COLUMN = "lm_eval_task", "lm_eval_doc_id", "lm_eval_request"
SETTINGS_COLUMN = "lm_eval_settings"
COLUMNS = (TASK_COLUMN, DOC_COLUMN, REQUEST_COLUMN, SETTINGS_COLUMN)
GENERATE = "generate_until"
# The harness's generation options that a run supports.
KNOWN_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
NUM_BOOTSTRAPS = 1000


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
    recorder = _answering({})
    _evaluate(recorder, settings, predict_only=True)
    options = run_options(recorder.asked)
    table = _prompt_table(recorder.asked, {**settings, "options": options})
    write_arrow(output, table)
    content = yaml.safe_dump(options, sort_keys=False, allow_unicode=True)
    write_atomically(options_path, lambda file: file.write(content.encode()))
    text = (
        f"{table.num_rows:,} prompts of {', '.join(config.lm_eval_export)}: {output}\n"
        f"python jobs/generate.py --config {options_path} --prompts {output} --target TARGET --output RUN\n"
        f"python jobs/evaluate.py RUN --task {LM_EVAL}"
    )
    return text, {"output": str(output), "options": str(options_path), "num_prompts": table.num_rows}


def check_harness(completions: Completions, config: EvaluateConfig) -> dict[str, Any]:
    """The settings of the export. Raises :class:`UserError` if the run's prompts were not exported, or its
    options are not those that the tasks require."""
    _require_package()
    completions.check_columns(dict.fromkeys(COLUMNS, f"--task {LM_EVAL} (see --lm_eval_export)"))
    found = completions.table[SETTINGS_COLUMN].unique().to_pylist()
    if len(found) != 1:
        raise UserError(
            f"{completions.path} mixes the prompts of {len(found)} exports: evaluate one at a time"
        )
    settings: dict[str, Any] = json.loads(found[0])
    if completions.manifest is not None:
        _check_options(completions.manifest.fingerprint, settings["options"])
    else:
        logger.warning("a merged file does not record how it was generated, so its options are not checked")
    return settings


def score_harness(completions: Completions, config: EvaluateConfig) -> Scores:
    """The mean over documents for each of the harness's tasks, filters and metrics.

    The facts hold the harness's own aggregates, which are the same for metrics that it averages.
    """
    settings = check_harness(completions, config)
    names = ("row_id", "sample_index", "finish_reason", *answer_columns(completions), *COLUMNS)
    rows = completions.rows(*names)
    rows = [row for row in rows if row["sample_index"] == 0]
    until = settings["options"].get("stop")
    answers = {
        _key(row): (row["prompt"], "" if row["finish_reason"] == ERROR else answer_of(row, until))
        for row in rows
    }
    results = _evaluate(_answering(answers), settings, predict_only=False)
    row_ids = {(row[TASK_COLUMN], row[DOC_COLUMN]): row["row_id"] for row in reversed(rows)}
    columns, metrics, prompt_ids_P = _by_document(results["samples"], row_ids)
    aggregates = {
        task: {name: float(value) for name, value in found.items() if _is_number(value)}
        for task, found in results["results"].items()
    }
    facts = {"lm_eval": aggregates, "lm_eval_version": results.get("lm_eval_version"), "settings": settings}
    return Scores(columns=columns, metrics=metrics, prompt_ids_P=prompt_ids_P, facts=facts)


def run_options(asked: Sequence[Any]) -> dict[str, Any]:
    """Options of ``jobs/generate.py`` for these requests. Raises :class:`UserError` if they differ."""
    from lm_eval.models.utils import normalize_gen_kwargs

    by_task: dict[str, list[str]] = {}
    for request in asked:
        wanted = json.dumps(_options(request, normalize_gen_kwargs(request.args[1])))
        tasks = by_task.setdefault(wanted, [])
        if request.task_name not in tasks:
            tasks.append(request.task_name)
    if len(by_task) > 1:
        groups = "; ".join(f"{', '.join(tasks)}: {wanted}" for wanted, tasks in by_task.items())
        raise UserError(
            f"--lm_eval_export: the tasks require different options; export them separately: {groups}"
        )
    options: dict[str, Any] = json.loads(next(iter(by_task)))
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
    """Compare the run's options with those that the tasks require. Stop strings that the run did not have are
    no difference: completions are cut at them here."""
    wanted = {"top_k": 0, "top_p": 1.0, **options}
    for name in ("temperature", "max_new_tokens", "top_k", "top_p"):
        is_greedy = wanted["temperature"] == 0 == fingerprint["temperature"]
        if fingerprint[name] != wanted[name] and not (is_greedy and name.startswith("top_")):
            raise UserError(
                f"--task {LM_EVAL}: the run had {name} {fingerprint[name]}, but its tasks require "
                f"{wanted[name]}: generate with the .yaml file that --lm_eval_export has written, as --config"
            )
    others = sorted(set(fingerprint["stop"] or ()) - set(options.get("stop", ())))
    if others:
        raise UserError(
            f"--task {LM_EVAL}: the run stopped at {others[0]!r}, which its tasks do not use as a stop "
            "string: generate with the .yaml file that --lm_eval_export has written, as --config"
        )


def _key(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row[TASK_COLUMN], row[DOC_COLUMN], row[REQUEST_COLUMN]


def _prompt_table(asked: Sequence[Any], settings: Mapping[str, Any]) -> pa.Table:
    keys = _request_keys(asked)
    return pa.table(
        {
            "prompt": [request.args[0] for request in asked],
            TASK_COLUMN: [task for task, _, _ in keys],
            DOC_COLUMN: pa.array([doc for _, doc, _ in keys], pa.int64()),
            REQUEST_COLUMN: pa.array([number for _, _, number in keys], pa.int64()),
            SETTINGS_COLUMN: [json.dumps(settings)] * len(asked),
        }
    )


def _request_keys(asked: Sequence[Any]) -> list[tuple[str, int, int]]:
    """Task, document, and number of the request: a document has several if a task repeats them."""
    seen: Counter[tuple[str, int]] = Counter()
    keys = []
    for request in asked:
        document = (request.task_name, request.doc_id)
        keys.append((*document, seen[document]))
        seen[document] += 1
    return keys


def _require_package() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import lm_eval  # noqa: F401 (not needed for anything else)
    except ImportError as error:
        raise UserError(
            f"the package lm-eval (lm-evaluation-harness) cannot be imported: "
            f"pip install -e '.[harness]' in specdist's folder ({error})"
        ) from error


def _answering(answers: Mapping[tuple[str, int, int], tuple[str, str]]) -> Any:
    """A model for the harness, which records its requests and returns the given answers, or else ''."""
    from lm_eval.api.model import LM

    class Answering(LM):  # its base exists only where the package is installed
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[Any] = []

        def generate_until(self, requests: list[Any]) -> list[str]:
            self.asked += requests
            if not answers:
                return [""] * len(requests)
            return [
                self._answer(key, request)
                for key, request in zip(_request_keys(requests), requests, strict=True)
            ]

        def _answer(self, key: tuple[str, int, int], request: Any) -> str:
            prompt, answer = answers.get(key, (None, ""))
            if prompt != request.args[0]:
                what = "is not in the run" if prompt is None else "has a different prompt in the run"
                raise UserError(
                    f"--task {LM_EVAL}: request {key[2]} of document {key[1]} of {key[0]} {what}: was the "
                    "run made from this export, and is it complete?"
                )
            return answer

        def loglikelihood(self, requests: list[Any]) -> Any:
            raise _not_generated(requests)

        def loglikelihood_rolling(self, requests: list[Any]) -> Any:
            raise _not_generated(requests)

    return Answering()


def _not_generated(requests: Sequence[Any]) -> UserError:
    return UserError(
        f"--lm_eval_export {requests[0].task_name}: the task requires likelihoods, but a run has only "
        f"completions: choose tasks whose output_type is {GENERATE}"
    )


def _evaluate(model: Any, settings: Mapping[str, Any], *, predict_only: bool) -> dict[str, Any]:
    """Run the harness. Raises :class:`UserError` for any error of it."""
    from lm_eval import simple_evaluate

    try:
        results = simple_evaluate(
            model=model,
            tasks=list(settings["tasks"]),
            num_fewshot=settings["num_fewshot"],
            limit=settings["limit"],
            task_manager=_task_manager(settings),
            bootstrap_iters=0 if predict_only else NUM_BOOTSTRAPS,
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


def _task_manager(settings: Mapping[str, Any]) -> Any:
    """The harness's own thousands of tasks are left out if the folder has all that are needed."""
    from lm_eval.tasks import TaskManager

    include = settings["include"]
    if include is not None:
        manager = TaskManager(include_path=include, include_defaults=False)
        if set(settings["tasks"]) <= set(manager.all_tasks):
            return manager
    return TaskManager(include_path=include)


def _by_document(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], row_ids: Mapping[tuple[str, int], int]
) -> tuple[dict[str, list[Any]], dict[str, Metric], np.ndarray]:
    """Rows of every task, document and filter, and for each metric its sums over documents, which are the
    prompts of their task."""
    prompt_ids_P = np.unique(np.array(list(row_ids.values()), np.int64))
    names = ("row_id", "task", "doc_id", "filter", "metric", "value")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    sums: dict[str, np.ndarray] = {}
    for task, found in samples.items():
        for sample in found:
            row_id = row_ids[task, sample["doc_id"]]
            for metric in sample["metrics"]:
                if not _is_number(sample[metric]):
                    continue
                value = float(sample[metric])
                entry = (row_id, task, sample["doc_id"], sample["filter"], metric, value)
                for column, item in zip(columns.values(), entry, strict=True):
                    column.append(item)
                name = f"{task}: {metric}, {sample['filter']}"
                sums.setdefault(name, np.zeros((2, len(prompt_ids_P))))
                sums[name][:, np.searchsorted(prompt_ids_P, row_id)] += value, 1
    return columns, {name: Metric(*sums_2P) for name, sums_2P in sums.items()}, prompt_ids_P


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, bool, np.number, np.bool_))

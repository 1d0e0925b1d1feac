"""The options of ``jobs/evaluate.py``. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from specdist.config.arguments import URL, option
from specdist.utils.errors import UserError
from specdist.utils.rules import Refusals, Rule, check_options

GSM8K, MATH, HUMANEVAL, ROUGE = "gsm8k", "math", "humaneval", "rouge"
EXACT_MATCH, MULTIPLE_CHOICE, LM_EVAL = "exact_match", "multiple_choice", "lm_eval"
TASKS = (GSM8K, MATH, HUMANEVAL, ROUGE, EXACT_MATCH, MULTIPLE_CHOICE, LM_EVAL)
PLUGIN = "plug-in"
PLUGIN_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

# The tasks that an option is for; it is refused with all others.
OPTIONS_OF_TASKS = {
    "reference_column": (GSM8K, MATH, ROUGE, EXACT_MATCH, MULTIPLE_CHOICE),
    "choices_column": (MULTIPLE_CHOICE,),
    "cut_at": (GSM8K, MATH, HUMANEVAL, ROUGE, EXACT_MATCH, MULTIPLE_CHOICE, PLUGIN),
    "ignore_case": (EXACT_MATCH,),
    "ignore_punctuation": (EXACT_MATCH,),
    "use_stemmer": (ROUGE,),
    "k": (HUMANEVAL,),
    "allow_code_execution": (HUMANEVAL,),
}


@dataclass(kw_only=True)
class EvaluateConfig:
    """Every option of ``jobs/evaluate.py``. Raises :class:`UserError` for values that do not go together."""

    _url_options: ClassVar[tuple[str, ...]] = ("run", "against")

    # What is evaluated
    run: str | None = option(
        None,
        help="folder or URL of a run, or its merged .arrow or .parquet file; may stand first without --run",
    )
    task: str | None = option(
        None,
        rule=Rule(
            lambda task: task in TASKS or PLUGIN_NAME.fullmatch(task) is not None,
            f"must be one of {', '.join(TASKS)}, or a function as module:function",
        ),
        help=f"one of {', '.join(TASKS)}, or module:function, a function from a row to its score",
    )
    against: str | None = option(
        None, help="another run over the same prompts: compare the tokens and the scores"
    )
    output: str | None = option(
        None, help="folder for results.json and the rows (default: evaluation/TASK in the run folder)"
    )
    overwrite: bool = option(False, help="replace existing results in --output")

    # How completions are read
    reference_column: str | None = option(
        None, help="column of the correct answers (default: reference; gsm8k: final_answer, else reference)"
    )
    choices_column: str | None = option(
        None,
        help="multiple_choice: column with the list of choice texts, for references that are not letters",
    )
    cut_at: list[str] | None = option(
        None, action="extend", rule=Rule(bool, "must not be empty"),
        help="cut completions at the first of these strings before scoring",
    )  # fmt: skip
    ignore_case: bool = option(False, help="exact_match: ignore case")
    ignore_punctuation: bool = option(False, help="exact_match: ignore ASCII punctuation")
    use_stemmer: bool = option(False, help="rouge: compare word stems (Porter stemmer)")

    # Code
    k: list[int] | None = option(
        None, action="extend", at_least=1,
        help="humaneval: the values of k in pass@k (default: 1 and the number of samples per prompt)",
    )  # fmt: skip
    allow_code_execution: bool = option(
        False, help="humaneval: run the generated programs on this machine, each in a sandbox"
    )

    # lm-evaluation-harness
    lm_eval_export: list[str] | None = option(
        None, action="extend",
        help="instead of evaluating a run: write the prompts of these lm-evaluation-harness tasks to the "
        ".arrow file --output, and the options that they require to a .yaml file next to it",
    )  # fmt: skip
    lm_eval_include: str | None = option(
        None, help="with --lm_eval_export: folder of task YAML files, in place of the harness's own"
    )
    lm_eval_num_fewshot: int | None = option(
        None, at_least=0, help="with --lm_eval_export: number of few-shot examples"
    )
    lm_eval_limit: int | None = option(
        None, above=0, help="with --lm_eval_export: only the first N documents of each task"
    )

    _refusals: ClassVar[Refusals] = (
        (" ".join(("run", "task", "against", *OPTIONS_OF_TASKS)), lambda o: o.lm_eval_export,
         "has no effect with --lm_eval_export, which only writes prompts: leave it out"),
        ("lm_eval_export", lambda o: not (o.output or "").endswith(".arrow"),
         "needs --output, the .arrow file to write, not {o.output!r}"),
        ("lm_eval_include lm_eval_num_fewshot lm_eval_limit", lambda o: not o.lm_eval_export,
         "has no effect without --lm_eval_export; a run knows what was exported: leave it out"),
        ("run", lambda o: URL.match(o.run) and o.output is None,
         "is a URL: name a folder for the results with --output"),
        *((name, lambda o, tasks=tasks: o.task_kind not in tasks, "has no effect {o._without}: leave it out")
          for name, tasks in OPTIONS_OF_TASKS.items()),
        ("task", lambda o: o.task_kind == HUMANEVAL and not o.allow_code_execution,
         "runs programs written by a model on this machine: add --allow_code_execution to allow it; they "
         "run in a sandbox against mistakes, which does not stop an attacker"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if self.lm_eval_export:
            return
        if self.run is None:
            raise UserError("no run to evaluate: name its folder, as in evaluate.py runs/mine --task gsm8k")
        if self.task is None and self.against is None:
            raise UserError(f"give --task (one of {', '.join(TASKS)}, or module:function) or --against")

    @property
    def _without(self) -> str:
        return f"with --task {self.task}" if self.task else "without --task"

    @property
    def task_kind(self) -> str | None:
        """The task, or ``plug-in`` for a function of the user's."""
        return PLUGIN if self.task is not None and ":" in self.task else self.task

    @property
    def task_options(self) -> dict[str, Any]:
        """The task's own options, with their defaults."""
        names = [name for name, tasks in OPTIONS_OF_TASKS.items() if self.task_kind in tasks]
        return {name: getattr(self, name) for name in names}

    @property
    def output_folder(self) -> Path:
        """The folder of the results."""
        if self.output is not None:
            return Path(self.output)
        assert self.run is not None
        path = Path(self.run)
        base = path if path.is_dir() else path.with_name(f"{path.stem}-evaluation")
        name = (self.task or "identity").replace(":", "-")
        if self.against is not None:
            name += f"-against-{Path(self.against).resolve().stem}"
        return base / "evaluation" / name if path.is_dir() else base / name

"""The options of ``jobs/evaluate.py``. Imports no torch."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from specdist.config.arguments import URL, option
from specdist.utils.errors import UserError
from specdist.utils.rules import SEED, Rule, check_ranges, within

GSM8K, HUMANEVAL, ROUGE, EXACT_MATCH = "gsm8k", "humaneval", "rouge", "exact_match"
MULTIPLE_CHOICE, LIKELIHOOD, LM_EVAL = "multiple_choice", "likelihood", "lm_eval"
TASKS = (GSM8K, HUMANEVAL, ROUGE, EXACT_MATCH, MULTIPLE_CHOICE, LIKELIHOOD, LM_EVAL)
PLUGIN = "plug-in"
PLUGIN_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

# The tasks that an option is for; it is refused with all others.
OPTIONS_OF_TASKS = {
    "reference_column": (GSM8K, ROUGE, EXACT_MATCH, MULTIPLE_CHOICE),
    "choices_column": (MULTIPLE_CHOICE,),
    "cut_at": (GSM8K, HUMANEVAL, ROUGE, EXACT_MATCH, MULTIPLE_CHOICE, PLUGIN),
    "ignore_case": (EXACT_MATCH,),
    "ignore_punctuation": (EXACT_MATCH,),
    "use_stemmer": (ROUGE,),
    "problem_column": (HUMANEVAL,),
    "k": (HUMANEVAL,),
    "allow_code_execution": (HUMANEVAL,),
    "time_limit_s": (HUMANEVAL,),
    "memory_limit_mib": (HUMANEVAL,),
    "num_workers": (HUMANEVAL,),
    "model": (LIKELIHOOD,),
    "device": (LIKELIHOOD,),
    "max_num_batched_tokens": (LIKELIHOOD,),
}
DEFAULTS: dict[str, Any] = {
    "time_limit_s": 10.0,
    "memory_limit_mib": 2048,
    "num_workers": 0,
    "device": "auto",
    "max_num_batched_tokens": 4096,
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
        None, help=f"one of {', '.join(TASKS)}, or module:function, a function from a row to its score"
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
    problem_column: str | None = option(
        None,
        help="humaneval: column with the problems' own text, of which chat answers leave out a part "
        "(default: problem, else the message with the function, else the prompt)",
    )
    k: list[int] | None = option(
        None, action="extend", at_least=1,
        help="humaneval: the values of k in pass@k (default: 1 and the number of samples per prompt)",
    )  # fmt: skip
    allow_code_execution: bool = option(
        False, help="humaneval: run the generated programs on this machine, each in a sandbox"
    )
    time_limit_s: float | None = option(
        None, above=0, help="humaneval: time limit of a program, in seconds (default 10)"
    )
    memory_limit_mib: int | None = option(
        None, rule=within(at_least=64, text="must be at least 64, which Python itself needs"),
        help="humaneval: memory limit of a program, in MiB (default 2048)",
    )  # fmt: skip
    num_workers: int | None = option(
        None, at_least=0, help="humaneval: number of programs run in parallel (default 0: one per CPU core)"
    )

    # Likelihood
    model: str | None = option(None, help="likelihood: folder or hub id of the target")
    device: Literal["auto", "cpu", "cuda"] | None = option(
        None, help="likelihood: auto (default) = cuda if available"
    )
    max_num_batched_tokens: int | None = option(
        None, above=0, help="likelihood: maximum number of tokens per pass, including padding (default 4096)"
    )

    # Statistics
    confidence: float = option(0.95, above=0, below=1, help="confidence level of the bootstrap intervals")
    num_resamples: int = option(2000, at_least=100, help="number of bootstrap resamples")
    seed: int = option(0, rule=SEED, help="seed of the bootstrap and of the paired test")

    # lm-evaluation-harness
    lm_eval_export: list[str] | None = option(
        None, action="extend",
        help="instead of evaluating a run: write the prompts of these lm-evaluation-harness tasks to the "
        ".arrow file --output, and the options that they require to a .yaml file next to it",
    )  # fmt: skip
    lm_eval_include: str | None = option(
        None, help="with --lm_eval_export: folder of additional task YAML files"
    )
    lm_eval_num_fewshot: int | None = option(
        None, at_least=0, help="with --lm_eval_export: number of few-shot examples"
    )
    lm_eval_limit: int | None = option(
        None, above=0, help="with --lm_eval_export: only the first N documents of each task"
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.lm_eval_export is not None:
            self._check_export()
        else:
            self._check_evaluation()
        for name, value in DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

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

    def _check_export(self) -> None:
        refused = ("run", "task", "against", *OPTIONS_OF_TASKS)
        self._refuse(refused, "with --lm_eval_export, which only writes prompts")
        if self.output is None or not self.output.endswith(".arrow"):
            raise UserError(f"--lm_eval_export needs --output, the .arrow file to write, not {self.output!r}")

    def _check_evaluation(self) -> None:
        self._refuse(
            ("lm_eval_include", "lm_eval_num_fewshot", "lm_eval_limit"),
            "without --lm_eval_export; a run knows what was exported",
        )
        if self.run is None:
            raise UserError("no run to evaluate: name its folder, as in evaluate.py runs/mine --task gsm8k")
        if URL.match(self.run) and self.output is None:
            raise UserError(f"--run {self.run} is a URL: name a folder for the results with --output")
        if self.task is None and self.against is None:
            raise UserError(f"give --task (one of {', '.join(TASKS)}, or module:function) or --against")
        if self.task is not None and self.task not in TASKS and not PLUGIN_NAME.fullmatch(self.task):
            raise UserError(
                f"--task {self.task} must be one of {', '.join(TASKS)}, or a function as module:function"
            )
        kind = self.task_kind
        others = [name for name, tasks in OPTIONS_OF_TASKS.items() if kind not in tasks]
        self._refuse(others, f"with --task {self.task}" if self.task else "without --task")
        if kind == HUMANEVAL and not self.allow_code_execution:
            raise UserError(
                "--task humaneval runs programs written by a model on this machine: add "
                "--allow_code_execution to allow it; they run in a sandbox, which is not a virtual machine"
            )
        if kind == LIKELIHOOD and self.model is None:
            raise UserError("--task likelihood needs --model, the folder of the target")

    def _refuse(self, names: Any, why: str) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in names:
            value = getattr(self, name)
            if value != defaults[name]:
                raise UserError(f"--{name} {value} has no effect {why}: leave it out")

"""The options of ``jobs/tune.py``: those of the run that is tuned for, and how much is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specdist.config.arguments import option
from specdist.config.generate import PICKLE_HELP, TRUST_HELP, GenerateConfig
from specdist.utils.errors import UserError

# Of these the tuned run takes the value over; the others say what is tried, and where.
SHARED_OPTIONS = (
    "target", "draft", "dtype", "device", "acceptance", "temperature", "top_k", "top_p", "max_new_tokens",
    "max_num_seqs", "max_num_batched_tokens", "max_seq_len", "seed",
    "trust_remote_code", "allow_pickle",
)  # fmt: skip


@dataclass(kw_only=True)
class TuneConfig:
    """Every option of ``jobs/tune.py``. Raises :class:`UserError` for a value out of its range."""

    # What goes in and out
    prompts: str = option(help="Arrow IPC file or folder, save_to_disk folder, Parquet or JSONL")
    output: str = option(help="folder that gets best.yaml, pareto.png, table.txt, trace.arrow, costs.json")
    prompt_column: str | None = option(None, help="column that holds the prompt text (default: prompt)")
    messages_column: str | None = option(None, help="column of chat messages, put through the chat template")
    num_prompts: int = option(32, help="calibration prompts, spread evenly over the file")
    replay_only: bool = option(
        False, help="take trace.arrow and costs.json from --output, as an earlier run left them; no model"
    )

    # Models
    target: str = option(help="hub id or folder of the large model")
    draft: str = option(help="hub id or folder of the small model")
    head: list[str] | None = option(
        None,
        help="heads that jobs/train_head.py has trained for the draft, for specdecpp and sprinter (exact)",
        action="extend",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", help="auto = the checkpoint's")
    device: Literal["auto", "cpu", "cuda"] = option("auto", help="auto = cuda where there is one")
    trust_remote_code: bool = option(False, help=TRUST_HELP)
    allow_pickle: bool = option(False, help=PICKLE_HELP)

    # The run that is tuned for
    max_draft_tokens: int = option(20, help="most draft tokens per round that are tried")
    acceptance: Literal["rejection", "gumbel"] = option("rejection", help="as in jobs/generate.py")
    temperature: float = option(1.0, help="0 = greedy")
    top_k: int = option(0, help="keep the k likeliest tokens; 0 = all")
    top_p: float = option(1.0, help="keep the smallest set of tokens with this probability; 1 = all")
    max_new_tokens: int = option(64, help="longest completion of a calibration prompt, in tokens")
    max_num_seqs: int = option(8, help="rows generated at a time, for which the policy is chosen")
    max_num_batched_tokens: int = option(2048, help="most tokens of one target pass")
    max_seq_len: int | None = option(
        None, help="longest prompt plus completion (default: of the calibration prompts)"
    )
    seed: int = option(0, help="of the calibration completions")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_draft_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} must be at least 1")
        # Nothing that a run would refuse is measured for one.
        self.run_config("goodput", max_draft_tokens=self.max_draft_tokens)

    def run_config(self, policy: str, **options: Any) -> GenerateConfig:
        """The options of a run with this policy. Raises :class:`UserError` for what it would refuse."""
        values: dict[str, Any] = {name: getattr(self, name) for name in SHARED_OPTIONS}
        return GenerateConfig(
            prompts=self.prompts,
            output=self.output,
            prompt_column=self.prompt_column,
            messages_column=self.messages_column,
            **values,
            **{"policy": policy, **options},
        )

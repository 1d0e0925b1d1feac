"""The jobs whose tokens are compared. All are of the kind whose tokens a seed fixes.

Work ahead takes what time there is, so that its batches differ from run to run: in bfloat16 only the layers
compiled for a CPU round every row alike in all of them, and with tensor parallelism it is those of
transformers that run.
"""

from __future__ import annotations

from dataclasses import dataclass

BASE = "--device cpu --limit 12 --rows_per_shard 4 --max_new_tokens 24 --cache_memory 64MiB"
PROMPTS = "--prompts {models}/prompts.arrow"
DRAFTS = "--target {models}/target --draft {models}/draft"
EAGLE = "--target {models}/eagle_target --draft {models}/eagle"
COPIES = "--target {models}/copying/target --draft ngram --prompts {models}/copying/prompts.arrow --limit 4"
FIXED = "--policy fixed --num_draft_tokens 4"
SYNCHRONOUS = f"{FIXED} --overlap synchronous"
ASYNCHRONOUS = f"{FIXED} --overlap asynchronous"
DRAWN = "--temperature 1 --top_p 0.95 --seed 3"
GUMBEL = f"{DRAWN} --acceptance gumbel"
PENALTIES = (
    "--repetition_penalty 1.3 --presence_penalty 0.2 --frequency_penalty 0.1 --min_p 0.02 --min_new_tokens 6 "
    "--logit_bias 50=3.0 --bad_words the river --stop qu"
)
REGEX = "--regex ([a-z]+,){{2}}[0-9]{{3}}[.]"
HALF = "--dtype bfloat16"


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        name: a word.
        options: its command line, but for ``BASE``, usual prompts and the output.
        num_ranks: 1 is one process without ``torch.distributed``.
        is_timed: measured times choose what is drafted: tokens are compared, but not what rows count.
    """

    name: str
    options: str
    num_ranks: int = 1
    is_timed: bool = False

    def arguments(self, models: str) -> list[str]:
        prompts = "" if "--prompts" in self.options else PROMPTS
        return f"{BASE} {prompts} {self.options}".format(models=models).split()


CASES = (
    Case("greedy", f"{DRAFTS} --temperature 0", is_timed=True),
    Case("greedy-half", f"{DRAFTS} {SYNCHRONOUS} {HALF} --temperature 0"),
    Case("alone", f"--target {{models}}/target --draft none {DRAWN}"),
    Case("gumbel", f"{DRAFTS} {GUMBEL}", is_timed=True),
    Case("gumbel-half", f"{DRAFTS} {SYNCHRONOUS} {HALF} {GUMBEL}"),
    Case("rejection", f"{DRAFTS} {SYNCHRONOUS} {DRAWN} --logprobs 2 --prompt_logprobs 1"),
    Case("rejection-half", f"{DRAFTS} {SYNCHRONOUS} {HALF} {DRAWN}"),
    Case("svip", f"{DRAFTS} {DRAWN} --policy svip"),
    Case("gammatune", f"{DRAFTS} {DRAWN} --policy gammatune_plus"),
    Case("specdecpp", f"{DRAFTS} {DRAWN} --policy specdecpp --head {{models}}/heads/acceptance"),
    Case("preempted", f"{DRAFTS} {SYNCHRONOUS} {DRAWN} --max_new_tokens 90 --cache_memory 256KiB"),
    Case("penalties", f"{DRAFTS} {SYNCHRONOUS} {DRAWN} {PENALTIES}"),
    Case("samples", f"{DRAFTS} {SYNCHRONOUS} {DRAWN} --num_samples 3 --max_num_seqs 5"),
    Case("constraint", f"{DRAFTS} {SYNCHRONOUS} {DRAWN} {REGEX}"),
    Case("quantised", f"{DRAFTS} {SYNCHRONOUS} {DRAWN} --draft_quantization int4"),
    Case("ngram", f"{COPIES} {FIXED} {DRAWN}"),
    Case("ngram-gumbel", f"--target {{models}}/target --draft ngram {GUMBEL}", is_timed=True),
    Case("eagle", f"{EAGLE} {SYNCHRONOUS} {DRAWN}"),
    Case("own", f"{DRAFTS} {SYNCHRONOUS} {DRAWN}", 2),
    Case("own-gumbel", f"{DRAFTS} {GUMBEL} {PENALTIES}", 2, is_timed=True),
    Case("own-asynchronous", f"{DRAFTS} {ASYNCHRONOUS} {DRAWN} --num_branches 0", 2),
    Case("own-branches", f"{DRAFTS} {ASYNCHRONOUS} {DRAWN} --num_branches 3 --num_samples 2", 2),
    Case("own-branches-half", f"{DRAFTS} {ASYNCHRONOUS} {HALF} {DRAWN} --num_branches 3", 2),
    Case("own-eagle", f"{EAGLE} {SYNCHRONOUS} {GUMBEL}", 2),
    Case("own-constraint", f"{DRAFTS} {ASYNCHRONOUS} {DRAWN} {REGEX}", 2),
    Case("shared-tp2", f"{DRAFTS} {SYNCHRONOUS} {DRAWN} --tp_size 2 --draft_placement shared", 2),
    Case("ngram-tp2", f"{COPIES} {FIXED} {DRAWN} --tp_size 2", 2),
    Case("own-tp2", f"{DRAFTS} {SYNCHRONOUS} {DRAWN} {PENALTIES} --tp_size 2", 3),
    Case("own-tp2-half", f"{DRAFTS} {SYNCHRONOUS} {HALF} {DRAWN} --tp_size 2", 3),
    Case("own-tp2-greedy", f"{DRAFTS} --temperature 0 --tp_size 2", 3, is_timed=True),
    Case("own-tp2-eagle", f"{EAGLE} {SYNCHRONOUS} {DRAWN} --tp_size 2", 3),
)
# One of several shards, which a kill leaves unfinished.
RESUMED = next(case for case in CASES if case.name == "own")

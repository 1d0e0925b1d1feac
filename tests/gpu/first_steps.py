"""The steps of :mod:`tests.gpu.first_day`, each a command that can also be typed by hand, in their order.

Those come first that need no other and of which a failure, or a figure, tells most. Those that run the job
compare what it wrote with another run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from tests.gpu.guard import why_not

PYTHON = sys.executable
CHECKS = [PYTHON, "-m", "tests.gpu.first_checks"]
TESTS = [PYTHON, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
# Over how many GPUs sums are measured.
NUM_RANKS = (2, 4, 8)
# Prompts of the long steps have 1.25 to 1.4 times as many tokens; on a CPU they are only to be tried.
COPY_DISTANCE = {"cuda": 4600, "cpu": 300}
# Where a command may take ten minutes, what it has begun is lost.
MOST_S = 540
GENERATE, SHARED = "jobs/generate.py", "tests/gpu/one_gpu.py"
ROWS = ["--limit", "24", "--max_new_tokens", "32", "--rows_per_shard", "8", "--overwrite"]
GREEDY, SAMPLED = ["--temperature", "0"], ["--temperature", "0.8", "--top_p", "0.9"]
DRAFTING = ["--policy", "fixed", "--num_draft_tokens", "4"]
EXACT, ROUNDED = ["--dtype", "float32"], ["--dtype", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, what its failure would tell, and what it needs.

    Attributes:
        needs: steps whose folders it reads.
        skips: why it is not run at all.
    """

    name: str
    title: str
    tells: str
    command: list[str]
    num_gpus: int = 1
    limit_s: float = MOST_S
    runs_on_cpu: bool = False
    needs: tuple[str, ...] = ()
    skips: str = ""


@dataclass(frozen=True)
class Jobs:
    """Commands of jobs into the folder of a day, over ``models``, on ``device``.

    With ``shares_gpu`` all ranks of a job use one GPU.
    """

    output: Path
    models: Path
    device: str
    shares_gpu: bool = False

    def num_gpus(self, ranks: int) -> int:
        return 1 if self.shares_gpu else ranks

    @property
    def draft(self) -> list[str]:
        return ["--draft", f"{self.models}/draft", *DRAFTING]

    @property
    def copying(self) -> Path:
        return self.output / "long-pair"

    def job(
        self,
        name: str,
        *options: str,
        ranks: int = 1,
        on: str | None = None,
        script: str = GENERATE,
        of: Path | None = None,
    ) -> list[str]:
        """Greedy unless the options say otherwise."""
        of = of or self.models
        if ranks > 1 and self.shares_gpu and script == GENERATE:
            script, options = SHARED, (*options, "--cache_memory", "1GiB")
        inputs = ["--prompts", f"{of}/prompts.arrow", "--target", f"{of}/target"]
        outputs = ["--device", on or self.device, "--output", f"{self.output}/{name}"]
        return [*launcher(ranks), script, *inputs, *ROWS, *GREEDY, *options, *outputs]

    def equal(self, name: str, *command: str, wanted: str = "cpu") -> list[str]:
        """The job, then the comparison: its completions must be those of another run."""
        return [*CHECKS, "equal", f"{self.output}/{name}", f"{self.output}/{wanted}", "--", *command]

    def alike(self, name: str, *command: str) -> list[str]:
        """The same of completions that are drawn, by the random numbers of the step before."""
        return [*CHECKS, "alike", f"{self.output}/{name}", f"{self.output}/cpu-{name}", "--", *command]

    def near(self, name: str, *command: str) -> list[str]:
        """The job, then the comparison with float32; the CPU's run in bfloat16 says how near is near."""
        runs = (f"{self.output}/{run}" for run in (name, "cpu", "cpu-bfloat16"))
        return [*CHECKS, "near", *runs, "--", *command]


def launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return [PYTHON]
    one_node = ["--multi_gpu", "--num_machines", "1", "--num_processes", str(ranks)]
    return [
        *(PYTHON, "-m", "specdist.job.ranks.launch", *one_node),
        *("--main_process_port", "0", "--mixed_precision", "no"),
    ]


def plan(output: Path, *, device: str, num_gpus: int = 1) -> list[Step]:
    """All steps, in their order.

    Args:
        device: of the jobs; with "cpu" measurements are on the fake device.
        num_gpus: of this node, which decides over how many sums and the long prompts are run.
    """
    shares_gpu = num_gpus == 1 and device == "cuda"
    jobs = Jobs(output, output / "pair", device, shares_gpu=shares_gpu)
    steps = [
        Step(name="versions", limit_s=120, runs_on_cpu=True,
             title="libraries, devices and how they are connected",
             tells="whether drivers, CUDA, NCCL and the wheels of this environment fit one another",
             command=[*CHECKS, "versions"]),
        *measuring_steps(output, is_fake=device == "cpu", num_gpus=num_gpus),
        *one_gpu_steps(jobs),
        *sharded_steps(jobs),
        *long_steps(jobs, num_gpus=num_gpus),
        *failing_steps(jobs),
        *beside_vllm(jobs),
        *tests_of_kernels(),
        Step(name="leftovers", limit_s=60, title="memory that is still taken when all jobs have ended",
             tells="whether a rank lives on, or memory is lost with it", command=[*CHECKS, "leftovers"]),
    ]  # fmt: skip
    return [
        replace(step, title=f"{step.title} (here all on one GPU, sums by gloo)")
        if SHARED in step.command
        else step
        for step in steps
    ]


def measuring_steps(output: Path, *, is_fake: bool, num_gpus: int) -> list[Step]:
    """What needs no checkpoint: weights are random, and made on the device."""

    # The widest sum that there are GPUs for.
    ranks = max((number for number in NUM_RANKS if number <= num_gpus), default=min(NUM_RANKS))

    mode = ["--fake"] if is_fake else []
    skips = "" if not is_fake else why_not() or ""

    def command(module: str, name: str) -> list[str]:
        return [PYTHON, "-m", f"tests.gpu.{module}", f"{output}/{name}", *mode]

    steps = [
        Step(name="shapes", runs_on_cpu=True,
             title="the project's kernels at the shapes of 1B, 8B and 70B over four ranks, in bfloat16",
             tells="whether a kernel is right at the sizes that people run, and how fast it is",
             command=command("first_kernels", "shapes")),
        Step(name="costs", runs_on_cpu=True,
             title="products of a layer, launches, nodes of graphs, waits, sampling: seconds of each",
             tells="what the planner assumes of a GPU", command=command("first_costs", "costs")),
        Step(name="graphs", runs_on_cpu=True, title="thirty recorded passes of a model of 8B",
             tells="whether large passes can be recorded and replayed, what a graph needs, and what it saves",
             command=command("first_graphs", "graphs")),
        Step(name="drafters", limit_s=300,
             title="tiny drafters of the target's states: EAGLE-3, MTP, DFlash",
             tells="whether states are read and written rightly in recorded passes; seconds of a run",
             command=command("first_drafters", "drafters")),
        Step(name="all-reduce", num_gpus=2, limit_s=300,
             title="sums over 2, 4, ... GPUs by their size, in graphs, with norms after them and without",
             tells="which ways sum rightly in graphs, how fast each is to 8 MiB, and whether it ends",
             command=[*launcher(ranks), "tests/gpu/first_sums.py", f"{output}/all-reduce"]),
        Step(name="no-multicast", num_gpus=2, limit_s=300, title="the same without the switch's own sums",
             tells="what a node is like whose driver has no multicast",
             command=["env", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", *launcher(ranks),
                      "tests/gpu/first_sums.py", f"{output}/no-multicast"]),
        Step(name="calibration", needs=("costs",), num_gpus=0, limit_s=60, runs_on_cpu=True,
             title="what the steps before have measured, as calibration.json for jobs/plan.py --calibration",
             tells="whether it is complete, and nothing in it impossible",
             command=[PYTHON, "-m", "tests.gpu.first_calibration", str(output)]),
    ]  # fmt: skip
    return [replace(step, skips=skips) for step in steps]


def tests_of_kernels() -> list[Step]:
    """The project's own tests of what only a GPU can show, with small sizes and every form."""
    return [
        Step(name="passes",
             title="recorded passes and pinned buffers of one GPU, for every family of the tests",
             tells="whether a replay does what was recorded, in float32 and bfloat16",
             command=[*TESTS, "tests/models/test_cuda.py"]),
        # What is compiled ahead for other GPUs says nothing of this one, and takes minutes.
        Step(name="kernels", title="the tests of the project's kernels on one GPU",
             tells="whether every kernel answers rightly in every form and precision",
             command=[*TESTS, "tests/kernels", "--deselect", "tests/kernels/test_compilation.py"]),
    ]  # fmt: skip


def one_gpu_steps(jobs: Jobs) -> list[Step]:
    """One process against the same on the CPU: greedy, in bfloat16, and sampled."""
    pair = Step(
        name="pair", num_gpus=0, limit_s=300, runs_on_cpu=True, title="a tiny pair of random models",
        tells="nothing of the GPUs: the later steps run these models",
        command=[PYTHON, "-m", "tests.job.pair", str(jobs.models)],
    )  # fmt: skip
    return [
        pair,
        on_cpu(jobs, "cpu", "24 rows in one process on the CPU, float32", *EXACT, "--logprobs", "2"),
        Step(name="one", needs=("pair", "cpu"), runs_on_cpu=True, title="the same on one GPU, float32",
             tells="the whole job without any communication: kernels, recorded passes, sampling, records",
             command=jobs.equal("one", *jobs.job("one", *jobs.draft, *EXACT))),
        on_cpu(jobs, "cpu-bfloat16", "the same on the CPU in bfloat16", *ROUNDED),
        Step(name="bfloat16", needs=("pair", "cpu", "cpu-bfloat16"), runs_on_cpu=True,
             title="the same on one GPU in bfloat16, with FlashAttention",
             tells="accuracy where people run: as near to float32 as a CPU in bfloat16, or a kernel is wrong",
             command=jobs.near("bfloat16", *jobs.job("bfloat16", *jobs.draft, *ROUNDED))),
        on_cpu(jobs, "cpu-sampled", "rows sampled with top-p on the CPU, float32", *EXACT, *SAMPLED),
        Step(name="sampled", needs=("pair", "cpu-sampled"), runs_on_cpu=True, title="the same on one GPU",
             tells="kernels of top-p and of draws, acceptance and residuals",
             command=jobs.alike("sampled", *jobs.job("sampled", *jobs.draft, *EXACT, *SAMPLED))),
    ]  # fmt: skip


def on_cpu(jobs: Jobs, name: str, title: str, *options: str) -> Step:
    return Step(
        name=name, needs=("pair",), num_gpus=0, runs_on_cpu=True, title=title,
        tells="nothing of the GPUs: what later steps are compared with",
        command=jobs.job(name, *jobs.draft, *options, on="cpu"),
    )  # fmt: skip


def sharded_steps(jobs: Jobs) -> list[Step]:
    """Several ranks; the first shows at once whether a run with NCCL in its graphs ends. Where they share
    a GPU there is no NCCL."""
    main = ["--tp_size", "2", *jobs.draft, *EXACT]
    rounded = ["--tp_size", "2", *jobs.draft, *ROUNDED]
    alone = ["--tp_size", "2", *EXACT]
    without, failing = (
        jobs.job(name, *alone, ranks=2, script="tests/gpu/without_peers.py")
        for name in ("sharded-nccl", "trial")
    )
    return [
        Step(name="sharded-nccl", needs=("pair", "cpu"), num_gpus=2,
             title="the target on two GPUs without a draft, all sums by NCCL",
             tells="whether a run ends whose recorded passes hold NCCL's calls, and sums in recorded passes",
             command=jobs.equal("sharded-nccl", *without)),
        Step(name="sharded", needs=("pair", "cpu"), num_gpus=jobs.num_gpus(2),
             title="the same, short sums through the peers' memory",
             tells="loading in slices and sums over ranks, in recorded passes, too: the log says by what",
             command=jobs.equal("sharded", *jobs.job("sharded", *alone, ranks=2))),
        Step(name="trial", needs=("pair", "cpu"), num_gpus=2,
             title="the same while a trial of layers fails on one rank",
             tells="whether all ranks then sum in the same way, or wait for ever",
             command=jobs.equal("trial", "env", "FAILS_ON=1", *failing)),
        Step(name="main", needs=("pair", "cpu"), num_gpus=jobs.num_gpus(3),
             title="the target on two GPUs and the draft on a third: the main job",
             tells="the draft's rank joins DeepSpeed's broadcast while the target is loaded, or all hang",
             command=jobs.equal("main", *jobs.job("main", *main, ranks=3))),
        Step(name="bfloat16-2", needs=("pair", "cpu", "cpu-bfloat16"), num_gpus=jobs.num_gpus(3),
             title="the main job in bfloat16",
             tells="a sharded model's buffers and sums in the precision that people run",
             command=jobs.near("bfloat16-2", *jobs.job("bfloat16-2", *rounded, ranks=3))),
    ]  # fmt: skip


def long_steps(jobs: Jobs, *, num_gpus: int) -> list[Step]:
    """Prompts of thousands of tokens, over as many GPUs as there are, at most three."""
    ranks = min(max(num_gpus, 1), 3) if jobs.device == "cuda" else 1
    options = [*ROUNDED, *(["--tp_size", "2"] if ranks > 1 else [])]
    options += ["--draft", f"{jobs.copying}/draft", *DRAFTING] if ranks != 2 else []
    alone = jobs.job("long-alone", *ROUNDED, of=jobs.copying)
    long = jobs.job("long", *options, ranks=ranks, of=jobs.copying)
    return [
        Step(name="long-pair", num_gpus=0, limit_s=300, runs_on_cpu=True,
             title="a pair that copies from far back, prompts of thousands of tokens, and what follows them",
             tells="nothing of the GPUs: the two next steps run these models",
             command=[PYTHON, "-m", "tests.job.copying", str(jobs.copying),
                      "--distance", str(COPY_DISTANCE[jobs.device]), "--num_prompts", "16"]),
        Step(name="long-alone", needs=("long-pair",), runs_on_cpu=True,
             title="the long prompts in bfloat16 on one GPU, the target alone",
             tells="positions, rotary frequencies and attention kernels far into a text: each token is known",
             command=jobs.equal("long-alone", *alone, wanted="long-pair/known")),
        Step(name="long", needs=("long-pair", "long-alone"), num_gpus=ranks, runs_on_cpu=True,
             title="the same as the main job; on two GPUs the sharded target alone, on one target and draft",
             tells="whether a sharded target and a draft are as exact there as on short prompts in float32",
             command=jobs.equal("long", *long, wanted="long-alone")),
    ]  # fmt: skip


def beside_vllm(jobs: Jobs) -> list[Step]:
    """The same rows by vLLM, where there is one: the only comparison of speed that counts."""
    pair, environment = jobs.output / "vllm-pair", Path(__file__).parents[2] / ".venv-vllm"
    models = ["--target", f"{pair}/target", "--draft", f"{pair}/draft"]
    rows = ["--prompts", f"{jobs.models}/prompts.arrow", "--output", f"{jobs.output}/vllm/found.json"]
    rows += ["--num_prompts", "24", "--max_new_tokens", "256"]
    sizes = ["--batch_size", "1", "24", "--engines", "specdist", "vllm"]
    skips = "" if environment.is_dir() else "there is no .venv-vllm: pack one by jobs/offline.sh pack --vllm"
    return [
        Step(name="vllm-pair", num_gpus=0, limit_s=200, skips=skips, title="a random pair of 1B parameters",
             tells="nothing of the GPUs: the next step runs these models",
             command=[PYTHON, "-m", "tests.lab.random_pair", "--shape", "1b", "--epsilon", "0.05",
                      "--dtype", "bfloat16", "--output", str(pair)]),
        Step(name="vllm", needs=("pair", "vllm-pair"), skips=skips,
             title="tokens/s, starts and equal tokens beside vLLM, the target alone and with the draft",
             tells="where another engine is faster, at one row or at many",
             command=[PYTHON, "jobs/benchmark.py", *models, *rows, *sizes]),
    ]  # fmt: skip


def failing_steps(jobs: Jobs) -> list[Step]:
    """Ranks that die or have no memory, and the draft's work beside the target's."""
    main = ["--tp_size", "2", *jobs.draft, *EXACT]
    ahead = [*main, "--overlap", "asynchronous", "--num_branches", "2"]
    killed = jobs.job("kill", *main, ranks=3)
    short = jobs.job("memory", *main, ranks=3, script="tests/gpu/short_of_memory.py")
    return [
        Step(name="kill", needs=("pair", "cpu"), num_gpus=jobs.num_gpus(3),
             title="a rank of the main job is killed with SIGKILL; then the same command again",
             tells="whether the others, which wait in NCCL, end in time, and what they leave on the devices",
             command=[*CHECKS, "kill", f"{jobs.output}/kill", f"{jobs.output}/cpu", "--", *killed]),
        Step(name="memory", needs=("pair", "cpu"), num_gpus=3,
             title="a device of the main job has no memory in the middle of a pass; all ranks start over",
             tells="whether memory comes back when a rank replaces its program, and NCCL meets again",
             command=jobs.equal("memory", *short)),
        Step(name="asynchronous", needs=("pair", "cpu"), num_gpus=jobs.num_gpus(3),
             title="the draft drafts ahead, with two branches per row",
             tells="the draft's work beside the target's: streams that race would change a token",
             command=jobs.equal("asynchronous", *jobs.job("asynchronous", *ahead, ranks=3))),
    ]  # fmt: skip

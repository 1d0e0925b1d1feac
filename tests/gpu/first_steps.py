"""The steps of :mod:`tests.gpu.first_day`, each a command that can also be typed by hand."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

PYTHON = sys.executable
SHOW_VERSIONS = (
    "import importlib, torch\n"
    "for name in ('torch', 'triton', 'transformers', 'accelerate', 'deepspeed', 'datasets'):\n"
    "    try:\n"
    "        print(name, importlib.import_module(name).__version__)\n"
    "    except ImportError as error:\n"
    "        print(name, 'cannot be imported:', error)\n"
    "print('CUDA', torch.version.cuda)\n"
    "if torch.cuda.is_available():\n"
    "    print('NCCL', torch.cuda.nccl.version())\n"
    "for index in range(torch.cuda.device_count()):\n"
    "    print(index, torch.cuda.get_device_properties(index))\n"
)
SHOW_MEMORY = ["--query-gpu=index,memory.used,memory.total", "--format=csv"]
TESTS = [PYTHON, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
CHECKS = [PYTHON, "-m", "tests.gpu.first_checks"]
# Prompts of the long steps have 1.25 to 1.4 times as many tokens; on a CPU they are only to be tried.
COPY_DISTANCE = {"cuda": 4600, "cpu": 300}
# Where a command may take ten minutes, what it has begun is lost.
MOST_S = 540


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, what its failure would tell, and what it needs; ``needs``: steps whose folders it reads."""

    name: str
    title: str
    tells: str
    command: list[str]
    num_gpus: int = 1
    limit_s: float = 300
    runs_on_cpu: bool = False
    needs: tuple[str, ...] = ()


def plan(output: Path, pair: Path | None, *, device: str, num_gpus: int = 1) -> list[Step]:
    """All steps, in their order.

    ``device``: of the jobs. ``num_gpus``: of this node, which decides over how many the long prompts are run.
    """
    models = pair or output / "pair"
    copying = output / "long-pair"
    rows = ["--limit", "16", "--max_new_tokens", "32", "--rows_per_shard", "8"]
    rows += ["--temperature", "0", "--overwrite"]
    drafting = ["--policy", "fixed", "--num_draft_tokens", "4"]
    draft = ["--draft", f"{models}/draft", *drafting]
    exact, rounded = ["--dtype", "float32"], ["--dtype", "bfloat16"]

    def job(
        name: str,
        *options: str,
        ranks: int = 1,
        on: str = device,
        script: str = "jobs/generate.py",
        of: Path = models,
    ) -> list[str]:
        launcher = [PYTHON]
        if ranks > 1:
            launcher += ["-m", "specdist.job.launch", "--multi_gpu", "--num_machines", "1"]
            launcher += ["--num_processes", str(ranks), "--main_process_port", "0", "--mixed_precision", "no"]
        inputs = ["--prompts", f"{of}/prompts.arrow", "--target", f"{of}/target"]
        return [*launcher, script, *inputs, *rows, *options, "--device", on, "--output", f"{output}/{name}"]

    def equal(name: str, *command: str, wanted: str = "cpu") -> list[str]:
        """The job, then the comparison: its completions must be those of another run."""
        return [*CHECKS, "equal", f"{output}/{name}", f"{output}/{wanted}", "--", *command]

    def near(name: str, *command: str) -> list[str]:
        """The job, then the comparison with float32; the CPU's run in bfloat16 says how near is near."""
        runs = (f"{output}/{run}" for run in (name, "cpu", "cpu-bfloat16"))
        return [*CHECKS, "near", *runs, "--", *command]

    main = ["--tp_size", "2", *draft, *exact]
    long_ranks = min(max(num_gpus, 1), 3) if device == "cuda" else 1
    long = ["--dtype", "bfloat16", *(["--tp_size", "2"] if long_ranks > 1 else [])]
    long += ["--draft", f"{copying}/draft", *drafting] if long_ranks != 2 else []
    steps = [
        Step(
            name="versions",
            title="libraries, devices and how they are connected",
            tells="whether drivers, CUDA, NCCL and the wheels of this environment fit one another",
            command=[*CHECKS, "versions"],
            limit_s=120,
            runs_on_cpu=True,
        ),
        Step(
            name="kernels",
            title="the project's kernels on one GPU",
            tells="whether every kernel answers rightly",
            # What is compiled ahead for other GPUs says nothing of this one, and takes minutes.
            command=[*TESTS, "tests/kernels", "--deselect", "tests/kernels/test_compilation.py"],
            limit_s=MOST_S,
        ),
        Step(
            name="passes",
            title="recorded passes and pinned buffers of one GPU, for every family of the tests",
            tells="whether a replay does what was recorded, in float32 and bfloat16",
            command=[*TESTS, "tests/models/test_cuda.py"],
            limit_s=MOST_S,
        ),
        Step(
            name="pair",
            title="a small pair of models, trained on the spot on the CPU",
            tells="nothing of the GPUs: the later steps run these models",
            command=["true"] if pair else [PYTHON, "jobs/train_demo.py", "--output", str(models)],
            num_gpus=0,
            limit_s=MOST_S,
            runs_on_cpu=pair is not None,
        ),
        Step(
            name="cpu",
            needs=("pair",),
            title="16 rows in one process on the CPU, float32",
            tells="nothing of the GPUs: what the later steps must write",
            command=job("cpu", *draft, *exact, on="cpu"),
            num_gpus=0,
            limit_s=MOST_S,
            runs_on_cpu=True,
        ),
        Step(
            name="cpu-bfloat16",
            needs=("pair",),
            title="the same on the CPU in bfloat16",
            tells="nothing of the GPUs: how far rounding alone leads away from float32",
            command=job("cpu-bfloat16", *draft, *rounded, on="cpu"),
            num_gpus=0,
            limit_s=MOST_S,
            runs_on_cpu=True,
        ),
        Step(
            name="one",
            needs=("pair", "cpu"),
            title="the same on one GPU, float32",
            tells="the whole job without any communication: kernels, recorded passes, sampling, records",
            command=equal("one", *job("one", *draft, *exact)),
            limit_s=MOST_S,
            runs_on_cpu=True,
        ),
        Step(
            name="bfloat16",
            needs=("pair", "cpu", "cpu-bfloat16"),
            title="the same on one GPU in bfloat16, with FlashAttention",
            tells="accuracy where people run: as near to float32 as a CPU in bfloat16, or a kernel is wrong",
            command=near("bfloat16", *job("bfloat16", *draft, *rounded)),
            limit_s=MOST_S,
            runs_on_cpu=True,
        ),
        Step(
            name="sharded",
            needs=("pair", "cpu"),
            title="the target on two GPUs, without a draft",
            tells="loading in slices and sums over ranks, in recorded passes, too: the log says by what",
            command=equal("sharded", *job("sharded", "--tp_size", "2", *exact, ranks=2)),
            num_gpus=2,
            limit_s=MOST_S,
        ),
        Step(
            name="draft",
            needs=("pair", "cpu"),
            title="the target on one GPU, the draft on another",
            tells="the messages between target and draft beside NCCL, and the rank of a draft alone",
            command=equal("draft", *job("draft", *draft, *exact, ranks=2)),
            num_gpus=2,
            limit_s=MOST_S,
        ),
        Step(
            name="main",
            needs=("pair", "cpu"),
            title="the target on two GPUs and the draft on a third: the main job",
            tells="the draft's rank joins DeepSpeed's broadcast while the target is loaded, or all hang",
            command=equal("main", *job("main", *main, ranks=3)),
            num_gpus=3,
            limit_s=MOST_S,
        ),
        Step(
            name="bfloat16-2",
            needs=("pair", "cpu", "cpu-bfloat16"),
            title="the main job in bfloat16",
            tells="a sharded model's buffers and sums in the precision that people run",
            command=near("bfloat16-2", *job("bfloat16-2", "--tp_size", "2", *draft, *rounded, ranks=3)),
            num_gpus=3,
            limit_s=MOST_S,
        ),
        Step(
            name="long-pair",
            title="a pair that copies from far back, prompts of thousands of tokens, and what follows them",
            tells="nothing of the GPUs: the two next steps run these models",
            command=[
                *(PYTHON, "-m", "tests.job.copying", str(copying)),
                *("--distance", str(COPY_DISTANCE[device]), "--num_prompts", "16"),
            ],
            num_gpus=0,
            runs_on_cpu=True,
        ),
        Step(
            name="long-alone",
            needs=("long-pair",),
            title="the long prompts in bfloat16 on one GPU, the target alone",
            tells="positions, rotary frequencies and attention kernels far into a text: every token is known",
            command=equal(
                "long-alone",
                *job("long-alone", "--dtype", "bfloat16", of=copying),
                wanted="long-pair/known",
            ),
            limit_s=MOST_S,
            runs_on_cpu=True,
        ),
        Step(
            name="long",
            needs=("long-pair", "long-alone"),
            title="the same as the main job; on two GPUs the sharded target alone, on one target and draft",
            tells="whether a sharded target and a draft are as exact there as on short prompts in float32",
            command=equal("long", *job("long", *long, ranks=long_ranks, of=copying), wanted="long-alone"),
            num_gpus=long_ranks,
            limit_s=MOST_S,
            runs_on_cpu=True,
        ),
        Step(
            name="kill",
            needs=("pair", "cpu"),
            title="a rank of the main job is killed with SIGKILL; then the same command again",
            tells="whether the others, which wait in NCCL, end in time, and what they leave on the devices",
            command=[*CHECKS, "kill", f"{output}/kill", f"{output}/cpu", "--", *job("kill", *main, ranks=3)],
            num_gpus=3,
            limit_s=MOST_S,
        ),
        Step(
            name="memory",
            needs=("pair", "cpu"),
            title="a device of the main job has no memory in the middle of a pass; all ranks start over",
            tells="whether memory comes back when a rank replaces its program, and NCCL meets again",
            command=equal("memory", *job("memory", *main, ranks=3, script="tests/gpu/short_of_memory.py")),
            num_gpus=3,
            limit_s=MOST_S,
        ),
        Step(
            name="ahead",
            needs=("pair", "cpu"),
            title="the draft drafts ahead, with two branches per row",
            tells="the draft's work beside the target's: streams that race would change a token",
            command=equal(
                "ahead", *job("ahead", *main, "--overlap", "ahead", "--num_branches", "2", ranks=3)
            ),
            num_gpus=3,
            limit_s=MOST_S,
        ),
        Step(
            name="round",
            title="where the time of a round goes: phases and kernels of a random pair of 1B, the draft "
            + ("on the target's GPU" if num_gpus < 2 else "on a GPU of its own"),
            tells="launches, copies and waits that only real time shows, beside the floors of passes",
            command=[
                *(PYTHON, "jobs/benchmark.py", "--synthetic", "1b", "--acceptance", "0.8"),
                *(*rounded, "--device", device, "--profile", f"{output}/profile"),
                *("--placements", "colocated" if num_gpus < 2 else "separate"),
                *("--batch_sizes", "8", "--num_prompts", "8"),
            ],
            limit_s=MOST_S,
        ),
        Step(
            name="leftovers",
            title="memory that is still taken when all jobs have ended",
            tells="whether a rank lives on, or memory is lost with it",
            command=[*CHECKS, "leftovers"],
            limit_s=60,
        ),
    ]
    if pair is None:
        return steps
    return [replace(step, needs=tuple(name for name in step.needs if name != "pair")) for step in steps]

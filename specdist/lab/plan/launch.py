"""The commands that start a plan: one for every replica on a node, with GPUs of its own."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdist.lab.plan.advise import Plan
from specdist.lab.plan.filling import Site

GPU_LAUNCH, CPU_LAUNCH = "jobs/accelerate/gpu8.yaml", "jobs/accelerate/cpu.yaml"
PROMPTS, OUTPUT = "PROMPTS", "OUTPUT"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start a plan.

    Attributes:
        commands: one for each replica on a node, to be run side by side.
        num_nodes: number of nodes, all of them with the same output folder.
        placeholders: words in the commands that stand for unknown paths.
    """

    commands: tuple[str, ...]
    num_nodes: int
    placeholders: tuple[str, ...]

    def lines(self) -> list[str]:
        """As text: a heading and the commands."""
        title = "Launch"
        if len(self.commands) > 1:
            title += f" {len(self.commands)} replicas side by side"
        if self.num_nodes > 1:
            title += f", on each of {self.num_nodes} nodes"
        if len(self.commands) * self.num_nodes > 1:
            title += "; they share the prompts through the output folder"
        notes = ""
        if self.placeholders:
            names = " and ".join(self.placeholders)
            notes = f" (with your paths in place of {names}: plan.py takes --prompts and --output)"
        return [f"{title}{notes}:", *self.commands]


def launch_of(
    plan: Plan,
    site: Site,
    options: Mapping[str, Any],
    *,
    config_path: str | None,
    prompts: str | None,
    output: str | None,
    on_cpu: bool,
) -> Launch:
    """The commands of a plan. ``options`` are in the file ``config_path``, or else on the command line."""
    per_node = min(site.gpus_per_node // plan.num_gpus, plan.num_replicas)
    job = ["jobs/generate.py"]
    if config_path is not None:
        job += ["--config", config_path]
    else:
        job += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    job += ["--prompts", prompts or PROMPTS, "--output", output or OUTPUT]
    if plan.num_gpus == 1:
        words = ["python", *job]
    else:
        config_file = CPU_LAUNCH if on_cpu else GPU_LAUNCH
        words = ["accelerate", "launch", "--config_file", config_file]
        words += ["--num_processes", str(plan.num_gpus), *job]
    commands = []
    for replica in range(per_node):
        first = replica * plan.num_gpus
        gpus = ",".join(map(str, range(first, first + plan.num_gpus)))
        # A single replica takes the first visible GPUs.
        prefix = f"CUDA_VISIBLE_DEVICES={gpus} " if per_node > 1 and not on_cpu else ""
        commands.append(prefix + shlex.join(words))
    return Launch(
        commands=tuple(commands),
        num_nodes=-(-plan.num_replicas // per_node),
        placeholders=tuple(word for word, path in ((PROMPTS, prompts), (OUTPUT, output)) if path is None),
    )

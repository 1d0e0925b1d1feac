"""Ways to fill a site's GPUs with replicas: which ranks one has, and how many of them there are.

A replica is on one node.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdist.lab.plan.model.hardware import Gpu
from specdist.lab.plan.model.simulate import OWN_GPU, Mode


@dataclass(frozen=True, kw_only=True)
class Site:
    """The hardware: nodes of equal GPUs."""

    gpu: Gpu
    gpus_per_node: int
    num_nodes: int
    max_num_seqs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The ranks of one replica.

    Attributes:
        num_drafts: 1 where the draft has a GPU of its own, else 0.
        num_replicas: that fit into the site; all replicas of a node share it, so that it does not count.
    """

    tp_size: int
    num_drafts: int = 0
    num_replicas: int = field(default=1, compare=False)

    @property
    def num_gpus(self) -> int:
        return self.tp_size + self.num_drafts


def shape_of(site: Site, mode: Mode, tp_size: int) -> Shape:
    """Of the replicas of this mode whose target has ``tp_size`` ranks."""
    num_drafts = int(mode in OWN_GPU)
    num_replicas = site.gpus_per_node // (tp_size + num_drafts) * site.num_nodes
    return Shape(tp_size=tp_size, num_drafts=num_drafts, num_replicas=num_replicas)

"""Ways to fill a site's GPUs with replicas: which ranks one has, and how many of them there are.

A target's ranks are on one node. Targets that share drafts (``--num_targets``, ``--num_drafts``) are one
replica, on one node or on two; any other replica is on one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from specdist.planning.hardware import Gpu
from specdist.planning.simulate import OWN_GPU, Mode

MOST_TARGETS_PER_DRAFT = 8
MOST_NODES = 2


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
        num_drafts: with a GPU of their own.
        num_nodes: over which the replica extends.
        num_replicas: that fit into the site; all replicas of a node share it, so that it does not count.
    """

    tp_size: int
    num_targets: int = 1
    num_drafts: int = 0
    num_nodes: int = 1
    num_replicas: int = field(default=1, compare=False)

    @property
    def num_gpus(self) -> int:
        return self.num_targets * self.tp_size + self.num_drafts

    @property
    def targets_per_draft(self) -> int:
        """Of the draft that serves the most."""
        return -(-self.num_targets // max(1, self.num_drafts))


def shapes(site: Site, mode: Mode, tp_size: int) -> Iterator[Shape]:
    """Of the replicas of this mode whose target has ``tp_size`` ranks; with as many targets per draft as each
    has, those that leave the fewest GPUs without work."""
    size = site.gpus_per_node
    if mode not in OWN_GPU:
        yield Shape(tp_size=tp_size, num_replicas=size // tp_size * site.num_nodes)
        return
    alone = Shape(tp_size=tp_size, num_drafts=1)
    yield Shape(tp_size=tp_size, num_drafts=1, num_replicas=size // alone.num_gpus * site.num_nodes)
    for per_draft in range(2, MOST_TARGETS_PER_DRAFT + 1):
        # Ranks are numbered through: on two nodes a target's would not stay on one unless they divide it.
        for num_nodes in range(1, 1 + (min(MOST_NODES, site.num_nodes) if size % tp_size == 0 else 1)):
            num_targets = _most_targets(size, num_nodes, tp_size, per_draft)
            num_drafts = -(-num_targets // per_draft)
            if num_nodes > 1:
                # A launch has equally many ranks on each.
                num_drafts = size * num_nodes - num_targets * tp_size
            if num_targets > num_drafts and num_targets > num_drafts * (per_draft - 1):
                yield Shape(
                    tp_size=tp_size,
                    num_targets=num_targets,
                    num_drafts=num_drafts,
                    num_nodes=num_nodes,
                    num_replicas=site.num_nodes // num_nodes,
                )


def _most_targets(gpus_per_node: int, num_nodes: int, tp_size: int, per_draft: int) -> int:
    """Whose drafts fit beside them; a target's ranks are on one node, its draft anywhere."""
    num_targets = gpus_per_node // tp_size * num_nodes
    while num_targets and not _has_room(gpus_per_node, num_nodes, tp_size, num_targets, per_draft):
        num_targets -= 1
    return num_targets


def _has_room(gpus_per_node: int, num_nodes: int, tp_size: int, num_targets: int, per_draft: int) -> bool:
    # The nodes take as many targets as they can; what is left of them is for drafts.
    num_free = num_nodes * gpus_per_node - num_targets * tp_size
    return -(-num_targets // per_draft) <= num_free

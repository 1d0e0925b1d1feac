"""A few of a model's experts, for a check that has no room for all of them.

Routers score these alone, and choose as many of them as they do of all. So a small model of transformers' own
can be made of their weights, and the loaded one can run with them as it is cut.

E experts, H hidden size, T tokens.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specdist.models.files.checkpoint import EXPERT_COUNTS
from specdist.models.files.weight_files import StoredTensors
from specdist.models.sharding.experts import experts_of

LEAST_EXPERTS = 16
# What configurations call how many experts a token chooses.
CHOSEN_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
# What blocks call their routers.
ROUTERS = ("gate", "router")
NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class ExpertSample:
    """The experts ``chosen`` of ``num_all`` of every layer, as many of each group if routers choose groups
    first. ``counts``: what the configuration calls their number."""

    num_all: int
    chosen: tuple[int, ...]
    counts: tuple[str, ...]

    @staticmethod
    def of(model: nn.Module, config: Any) -> ExpertSample | None:
        """The sample of a model; None where it would hardly be smaller, or routers are not known here.
        ``config``: of texts."""
        counts = tuple(name for name in EXPERT_COUNTS if getattr(config, name, None))
        numbers = {getattr(config, name) for name in counts}
        top_k = next((found for name in CHOSEN_COUNTS if (found := getattr(config, name, None))), None)
        if len(numbers) != 1 or top_k is None:
            return None
        (num_all,) = numbers
        num_groups = getattr(config, "n_group", None) or 1
        num_chosen_groups = getattr(config, "topk_group", None) or num_groups
        # A group is scored by its best two.
        each = max(2, -(-LEAST_EXPERTS // num_groups), -(-top_k // num_chosen_groups))
        if num_all % num_groups or 2 * each * num_groups > num_all:
            return None
        size = num_all // num_groups
        within = np.linspace(0, size - 1, each).astype(int)
        chosen = tuple(int(group * size + place) for group in range(num_groups) for place in within)
        found = ExpertSample(num_all, chosen, counts)
        blocks = [name.rpartition(".")[0] for name, _ in experts_of(model)]
        return found if blocks and all(found.of_router(model, block) for block in blocks) else None

    @property
    def config(self) -> dict[str, int]:
        return dict.fromkeys(self.counts, len(self.chosen))

    def of_router(self, model: nn.Module, block: str) -> dict[str, Tensor]:
        """What of a block has a number, a row or a column for each expert, beside the experts themselves."""
        owner = model.get_submodule(block)
        tensors = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
        return {
            f"{block}.{name}": tensor
            for name, tensor in tensors.items()
            if ("." not in name or name.startswith(tuple(f"{router}." for router in ROUTERS)))
            and self.num_all in (*tensor.shape[:1], *tensor.shape[-1:])
        }

    def of_each(self, model: nn.Module) -> set[str]:
        """The parameters and buffers of a whole model that have something of each expert."""
        found: set[str] = set()
        for name, experts in experts_of(model):
            found |= {f"{name}.{leaf}" for leaf, _ in experts.named_parameters()}
            found |= self.of_router(model, name.rpartition(".")[0]).keys()
        return found

    def renamed(self, stored_name: str) -> str | None:
        """The name with the number of a single expert among those chosen; None for another expert."""
        found = NUMBER.search(stored_name)
        if found is None:
            return stored_name
        if int(found[0]) not in self.chosen:
            return None
        number = self.chosen.index(int(found[0]))
        return f"{stored_name[: found.start()]}{number}{stored_name[found.end() :]}"

    def read(self, file: StoredTensors, name: str) -> tuple[Tensor, tuple[int, ...] | None]:
        """What a stored tensor has of these experts; and which of its rows these are, if not all."""
        shape = file.shape(name)
        if NUMBER.search(name) is not None or self.num_all not in shape:
            return file.read(name), None
        if shape[0] == self.num_all:
            return file.rows(name, self.chosen), self.chosen
        return file.read(name)[..., list(self.chosen)], None

    def number(self, key: str, value: Any) -> Any:
        """An attribute of a module, which may be the number of experts."""
        return len(self.chosen) if type(value) is int and value == self.num_all and "expert" in key else value

    @contextlib.contextmanager
    def alone(self, model: nn.Module) -> Iterator[None]:
        """A context in which the loaded model has only these experts, whichever ranks have them."""
        undo: list[Callable[[], None]] = []
        for name, experts in list(experts_of(model)):
            block = name.rpartition(".")[0]
            for tensor in self.of_router(model, block).values():
                undo.append(functools.partial(setattr, tensor, "data", tensor.data))
                own = list(self.chosen)
                tensor.data = tensor.data[own] if len(tensor) == self.num_all else tensor.data[..., own]
            owner = model.get_submodule(block)
            routers = (getattr(owner, router, None) for router in ROUTERS)
            for module in (owner, *(each for each in routers if isinstance(each, nn.Module))):
                for key, value in list(vars(module).items()):
                    if self.number(key, value) is not value:
                        undo.append(functools.partial(setattr, module, key, value))
                        setattr(module, key, self.number(key, value))
            undo.append(functools.partial(setattr, experts, "forward", experts.forward))
            chosen = torch.tensor(self.chosen, device=next(model.parameters()).device)
            experts.forward = functools.partial(_of_chosen, chosen, experts.forward)
        try:
            yield
        finally:
            for each in reversed(undo):
                each()


def _of_chosen(
    chosen: Tensor, forward: Callable[..., Tensor], hidden: Tensor, numbers: Tensor, weights: Tensor
) -> Tensor:
    return forward(hidden, chosen[numbers], weights)

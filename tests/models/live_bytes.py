"""How many bytes the tensors that a computation makes hold at most.

Measured where every operation passes by: what one makes inside itself (a workspace of a sort) is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``peak``: the most bytes alive at one time, of tensors created inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._outside: set[int] = set()
        self._alive: dict[int, weakref.ref[Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and id(tensor) not in self._alive:
                self._outside.add(tensor.untyped_storage().data_ptr())
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._alive[id(tensor)] = weakref.ref(tensor)
        self.peak = max(self.peak, self._now())
        return result

    def _now(self) -> int:
        storages: dict[int, int] = {}
        for key, reference in list(self._alive.items()):
            tensor = reference()
            if tensor is None:
                del self._alive[key]
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._outside:
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

"""Adapters of tiny models, as PEFT writes them, with random numbers where training starts from zeros."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel


def write_adapter(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """The folder of an adapter for ``model``, which stays as it is; ``options`` of PEFT's LoraConfig."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**{"r": 4, "lora_alpha": 6} | options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return folder


def with_adapter(model: PreTrainedModel, folder: Path) -> Any:
    """PEFT's own model with the adapter beside its weights."""
    from peft import PeftModel

    return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()

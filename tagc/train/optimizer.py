"""AdamW, its learning rate, and the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tagc.config import TrainerConfig


def build_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, 2019) in two groups: matrices decay; biases and norms (one dimension) do not.

    Embeddings are matrices and decay too: so does nanoGPT, whose configuration the TAGC paper trains, and with tied
    weights the embedding is the LM head, so any other rule would make tied and untied runs differ in kind.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def learning_rate_at(step: int, config: TrainerConfig) -> float:
    """The learning rate of optimizer step ``step``, counted from 0.

    It rises linearly and reaches the peak at step ``warmup_steps``, then falls on half a cosine to
    ``min_learning_rate_frac`` of the peak at the last step, ``max_steps - 1``, and stays there.

    Example: peak 1, floor 0.1, 2 warm-up steps, 5 steps: 1/3, 2/3, 1, 0.55, 0.1.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    decay_steps = max(1, config.max_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    floor = config.min_learning_rate_frac
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients in place so that their norm over all parameters and ranks is at most ``max_norm``.

    Returns the norm before scaling: fp32 scalar, the same on every rank, not finite if any gradient is not.
    ``max_norm=0`` only measures. No host synchronisation; sharded gradients cost communication of one scalar.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total_norm = nn.utils.get_total_norm(gradients)
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    total_norm = total_norm.float()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)
    return total_norm

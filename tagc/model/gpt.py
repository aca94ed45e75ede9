"""A GPT-2 decoder, in reading order: attention, MLP, block, model.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): pre-norm blocks, learned positions, GELU
with the tanh approximation, biases by configuration except in the LM head.

Shape letters: B sequences, T tokens per sequence (at most ``config.context``), C width, H heads, D = C / H,
V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tagc.config import ModelConfig


class Attention(nn.Module):
    """Causal multi-head self-attention, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            part_BTC.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part_BTC in self.qkv(x_BTC).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, dropout_p=dropout, is_causal=True)
        return F.dropout(self.proj(y_BHTD.transpose(1, 2).flatten(-2)), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.fc = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.proj = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden_BTC4 = F.gelu(self.fc(x_BTC), approximate="tanh")
        return F.dropout(self.proj(hidden_BTC4), self.dropout, self.training)


class Block(nn.Module):
    """One pre-norm transformer block, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)
        # Recomputing in here rather than in a wrapper module leaves every parameter's name as it is.
        self.recompute_activations = False

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.recompute_activations and torch.is_grad_enabled():
            return checkpoint(self._transform, x_BTC, use_reentrant=False)
        return self._transform(x_BTC)

    def _transform(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC))
        return x_BTC + self.mlp(self.ln_2(x_BTC))


class GPT(nn.Module):
    """GPT-2 language model over ``vocab_size`` tokens.

    Build it under ``torch.device("meta")`` and give it values with :func:`tagc.model.init.materialize`, which makes
    them independent of how the parameters are sharded.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.wte = nn.Embedding(vocab_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width, bias=config.bias)
        self.lm_head = nn.Linear(config.width, vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the LM head use the token embedding's parameter, where the configuration asks for it.

        To be repeated after anything that gives modules new parameters one by one, such as ``to_empty``.
        """
        if self.config.tie_weights:
            self.lm_head.weight = self.wte.weight

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """The mean cross-entropy, or the logits when there are no targets.

        Args: ``inputs_BT`` and ``targets_BT``: int64 [B, T], ids in [0, V), T <= context.
        Returns: fp32 scalar (nats per token), or logits [B, T, V] in the computation's dtype.
        Errors: ``ValueError`` when T exceeds the context.
        """
        length = inputs_BT.shape[1]
        if length > self.config.context:
            raise ValueError(f"a sequence of {length} tokens does not fit model.context={self.config.context}")
        positions_T = torch.arange(length, device=inputs_BT.device)
        x_BTC = self.wte(inputs_BT) + self.wpe(positions_T)
        x_BTC = F.dropout(x_BTC, self.config.dropout, self.training)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.lm_head(self.ln_f(x_BTC))
        if targets_BT is None:
            return logits_BTV
        # A sum of exponentials over the vocabulary needs fp32 whatever the parameters' dtype is.
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def parameter_count(model: GPT) -> int:
    """Elements of all parameters over all ranks; a tied matrix counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(model: GPT) -> int:
    """Floating-point operations that training needs per token, forward and backward, for model utilisation.

    ``6 M + 12 L T C`` (Chowdhery et al., "PaLM", 2022, appendix B). M: elements of the matrices that multiply
    activations (every linear weight, the LM head included; looking up an embedding is no multiplication). The second
    term is attention's two products at the full context, not halved for the causal mask. Norms, biases and GELU are
    left out, and so is recomputation: the figure is the work that the model needs, not what the hardware did.
    """
    config = model.config
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    return 6 * matrices + 12 * config.layers * config.context * config.width

"""The model on one process: shapes, causality, counts, tying, and that it learns."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tagc.comm.policy import is_compressed
from tagc.config import CompressorConfig, ModelConfig, TrainerConfig
from tagc.model.gpt import GPT, flops_per_token, parameter_count
from tests.model.common import VOCAB, build_plain, global_batch, train

CONF = Path(__file__).parents[2] / "conf" / "model"
PAPER = ModelConfig(layers=12, width=768, heads=12, context=512)
PAPER_VOCAB = 50304


def _committed_config(name: str) -> ModelConfig:
    return OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(CONF / f"{name}.yaml"))
    )


def _on_meta(config: ModelConfig, vocab_size: int) -> GPT:
    with torch.device("meta"):
        return GPT(config, vocab_size)


def test_logits_and_loss_have_the_stated_shapes_and_dtypes() -> None:
    gpt = build_plain()
    inputs, targets = global_batch(0, 7)
    logits = gpt(inputs)
    assert logits.shape == (12, 7, VOCAB)
    loss = gpt(inputs, targets)
    assert loss.shape == () and loss.dtype == torch.float32
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(loss, expected)
    assert abs(loss.item() - math.log(VOCAB)) < 0.05  # an untrained model knows nothing
    assert gpt.bfloat16()(inputs, targets).dtype == torch.float32


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"17 tokens does not fit model\.context=16"):
        build_plain()(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("changed", [0, 5, 15])
def test_a_token_changes_no_earlier_logits(changed: int) -> None:
    gpt = build_plain()
    inputs, _ = global_batch(0, 16)
    other = inputs.clone()
    other[:, changed] = (other[:, changed] + 1) % VOCAB
    difference = (gpt(inputs) - gpt(other)).abs().amax(dim=(0, 2))
    assert torch.all(difference[:changed] == 0)
    assert torch.all(difference[changed:] > 0)


def test_nano_has_3_4_million_parameters() -> None:
    assert parameter_count(_on_meta(ModelConfig(), 4096)) == 3_377_280


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2", 124.44), ("gpt2_medium", 354.82), ("gpt2_large", 774.03), ("gpt2_xl", 1557.61)]
)
def test_committed_sizes_are_those_of_gpt2(name: str, millions: float) -> None:
    """Counts of the released GPT-2 checkpoints: 50,257 tokens, tied."""
    config = _committed_config(name)
    config.tie_weights = True
    assert round(parameter_count(_on_meta(config, 50257)) / 1e6, 2) == millions


def test_gpt2_untied_has_163_million_parameters_and_tied_one_matrix_less() -> None:
    config = _committed_config("gpt2")
    untied = parameter_count(_on_meta(config, PAPER_VOCAB))
    config.tie_weights = True
    assert untied == 163_109_376
    assert untied - parameter_count(_on_meta(config, PAPER_VOCAB)) == PAPER_VOCAB * 768


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_configs_hold_differences_only(path: Path) -> None:
    values = OmegaConf.to_object(OmegaConf.load(path))
    assert values.pop("name") == path.stem
    defaults = vars(ModelConfig())
    assert all(defaults[key] != value for key, value in values.items())


def test_the_papers_configuration_is_met() -> None:
    """162.6 M parameters, 82.3 % of them in MLP matrices, token embedding and LM head (nanoGPT's ``bias=False``)."""
    parameters = dict(_on_meta(dataclasses.replace(PAPER, bias=False), PAPER_VOCAB).named_parameters())
    total = sum(p.numel() for p in parameters.values())
    compressed = sum(
        p.numel() for name, p in parameters.items() if is_compressed(name, p.shape, CompressorConfig(min_numel=16384))
    )
    assert total == 162_614_016
    assert round(100 * compressed / total, 1) == 82.3


@pytest.mark.parametrize("tie_weights", [False, True])
def test_flops_are_those_that_torch_counts(tie_weights: bool) -> None:
    gpt = build_plain(tie_weights=tie_weights)
    inputs, targets = global_batch(0, 16)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        gpt(inputs, targets).backward()
    assert counter.get_total_flops() == inputs.numel() * flops_per_token(gpt)


def test_tied_weights_are_one_parameter_with_both_gradients() -> None:
    gpt = build_plain(tie_weights=True)
    assert gpt.lm_head.weight is gpt.wte.weight
    assert "lm_head.weight" not in dict(gpt.named_parameters())
    inputs, targets = global_batch(0, 16)
    gpt(inputs, targets).backward()
    tied_gradient = gpt.wte.weight.grad
    untied = build_plain()
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.wte.weight)
    untied(inputs, targets).backward()
    torch.testing.assert_close(tied_gradient, untied.wte.weight.grad + untied.lm_head.weight.grad)


def test_dropout_acts_in_training_only() -> None:
    gpt = build_plain(dropout=0.5)
    inputs, _ = global_batch(0, 16)
    assert not torch.equal(gpt(inputs), gpt(inputs))
    gpt.eval()
    assert torch.equal(gpt(inputs), gpt(inputs))
    plain = build_plain().eval()
    assert torch.equal(gpt(inputs), plain(inputs))


def test_a_small_text_is_learnt_by_heart() -> None:
    gpt = build_plain()
    trainer = TrainerConfig(learning_rate=1e-2)
    inputs, targets = (part[:2] for part in global_batch(0, 16))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=trainer.learning_rate)
    for _ in range(60):
        loss = gpt(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1


def test_recomputed_activations_change_no_loss() -> None:
    expected = train(build_plain(), TrainerConfig())
    gpt = build_plain()
    calls = []
    for block in gpt.blocks:
        block.recompute_activations = True
        block.attn.register_forward_hook(lambda *_: calls.append(1))
    assert train(gpt, TrainerConfig(), steps=3)["losses"] == expected["losses"]
    assert len(calls) == 2 * (3 * 2 + 1)  # per block: each of 3 steps runs it twice, validation once

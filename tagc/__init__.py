"""Transformer-aware gradient compression under PyTorch FSDP2."""

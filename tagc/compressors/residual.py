"""What a sender keeps of a bucket and adds to the next gradient: one part, whatever the method.

Two storages: the values themselves (:class:`Residual`), and ``carry`` where ``owed`` (:class:`OwedResidual`), where a
value that comes back unresolved needs one bit and no copy. Both are stored in float32 or bfloat16 and computed in fp32.

Shape letters: W ranks, N elements of one shard, B bytes of its bitmap, K sampled positions.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes, pack_bits, unpack_bits


class Residual:
    """Plain values, zero at first. An encoder of :mod:`tagc.kernels` replaces ``values_WN`` in place."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, kernels: ModuleType) -> None:
        self.kernels = kernels
        self.values_WN = torch.zeros(shape, device=device, dtype=dtype)

    def add(self, gradient_WN: Tensor, decay: float) -> Tensor:
        """``gradient + decay * residual``, float32 [W, N], in the gradient's memory."""
        return gradient_WN.add_(self.values_WN.float(), alpha=decay) if decay else gradient_WN

    def sample(self, gradient_WN: Tensor, position_K: Tensor, decay: float) -> Tensor:
        """The same at the positions given, in every shard: float32 [W, K]. Changes nothing."""
        return self.kernels.sample_values(gradient_WN, self.values_WN, None, position_K, decay)

    def keep(self, values_WN: Tensor) -> None:
        """Replace the whole residual."""
        self.values_WN.copy_(values_WN)

    def keep_rounding(self, x_and_wire: tuple[Tensor, Tensor] | None) -> Tensor:
        """Keep ``x - wire``, both [W, N]; None: nothing. Returns the squared norm of what is kept, a float32 scalar."""
        if x_and_wire is None:
            self.values_WN.zero_()
        else:
            torch.sub(*x_and_wire, out=self.values_WN)
        return self.values_WN.float().square().sum()

    def restore(self, owner: int, positions: Tensor, sent_index_WB: Tensor) -> None:
        """Keep what was sent for ``positions`` of ``owner``'s shard. Errors: this storage has no copy of it."""
        raise NotImplementedError(f"{type(self).__name__} keeps no copy of what was sent")

    def values(self) -> Tensor:
        """What is kept: float32 [W, N], a copy."""
        return self.values_WN.to(torch.float32, copy=True)

    def state(self) -> dict[str, Tensor]:
        """The tensors behind it, by the names they have in checkpoints. Nothing is copied."""
        return {"residual_WN": self.values_WN}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave."""
        self.values_WN = state["residual_WN"].to(self.values_WN.device)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return sum(tensor.nbytes for tensor in self.state().values())


class OwedResidual(Residual):
    """``carry``, the last step's values, where the bitmap ``owed`` says that they have not been applied yet."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, kernels: ModuleType) -> None:
        super().__init__(shape, dtype, device, kernels)
        self.owed_WB = torch.zeros(shape[0], bitmap_bytes(shape[1]), dtype=torch.uint8, device=device)

    def add(self, gradient_WN: Tensor, decay: float) -> Tensor:
        return self.kernels.add_residual(gradient_WN, self.values_WN, self.owed_WB, decay)

    def sample(self, gradient_WN: Tensor, position_K: Tensor, decay: float) -> Tensor:
        return self.kernels.sample_values(gradient_WN, self.values_WN, self.owed_WB, position_K, decay)

    def keep(self, values_WN: Tensor) -> None:
        super().keep(values_WN)
        self.owed_WB.fill_(255)

    def keep_rounding(self, x_and_wire: tuple[Tensor, Tensor] | None) -> Tensor:
        self.owed_WB.fill_(255)
        return super().keep_rounding(x_and_wire)

    def restore(self, owner: int, positions: Tensor, sent_index_WB: Tensor) -> None:
        numel = self.values_WN.shape[1]
        sent_N, owed_N = unpack_bits(sent_index_WB[owner], numel), unpack_bits(self.owed_WB[owner], numel)
        owed_N[positions] |= sent_N[positions]
        self.owed_WB[owner] = pack_bits(owed_N)

    def values(self) -> Tensor:
        return torch.where(unpack_bits(self.owed_WB, self.values_WN.shape[1]), self.values_WN, 0.0).float()

    def state(self) -> dict[str, Tensor]:
        return {"carry_WN": self.values_WN, "owed_WB": self.owed_WB}

    def load(self, state: dict[str, Tensor]) -> None:
        device = self.values_WN.device
        self.values_WN, self.owed_WB = state["carry_WN"].to(device), state["owed_WB"].to(device)

"""The exchange: everything that ranks send each other during a step passes here, and only here bytes are counted.

All shards of a bucket travel at once. The dense baseline and every compressor use the same transport:

* gloo: point-to-point messages in 1 MB pieces to all peers, both directions at once. gloo's own collectives move data
  one way at a time and reach half of a full-duplex link. Each piece waits for its time on the paced link.
* any other backend (NCCL): its native collectives, stream-ordered.

Not counted: the per-step control message (a few numbers per bucket) and the gradient-norm all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codec.bitmap import or_bitmaps
from tagc.compressors.base import Kind, Part
from tagc.network.link import Link
from tagc.network.pacing import PacedLink
from tagc.network.stream_pacing import StreamPacer

PIECE_BYTES = 1 << 20
# torch 2.13 renames these collectives and warns about the old names; torch 2.11 knows only those.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Exchange:
    """One rank's end of all exchanges.

    ``sent_bytes`` counts by kind what this rank sent to other ranks since :meth:`take_sent_bytes`.
    """

    def __init__(self, link: Link, device: torch.device) -> None:
        self.link = link
        self.metered = True  # False: nothing is counted or paced, as during validation
        self.sent_bytes: Counter[Kind] = Counter()
        self.total_bytes: Counter[Kind] = Counter()  # the same since the beginning
        paced_link = link if isinstance(link, PacedLink) else None
        self._host_pacer = paced_link if device.type == "cpu" else None
        self._stream_pacer = StreamPacer(paced_link, device) if paced_link and device.type == "cuda" else None

    @contextmanager
    def always_metered(self) -> Iterator[None]:
        """Within the block everything is counted and paced."""
        before, self.metered = self.metered, True
        try:
            yield
        finally:
            self.metered = before

    def take_sent_bytes(self) -> dict[Kind, int]:
        """Bytes sent by kind since the last call, then start again."""
        result = dict(self.sent_bytes)
        self.sent_bytes.clear()
        return result

    def _count(self, kind: Kind, nbytes: int) -> None:
        self.sent_bytes[kind] += nbytes
        self.total_bytes[kind] += nbytes

    def reduce_scatter(
        self, parts: Sequence[Part], group: dist.ProcessGroup, *, diagnostic: bool = False
    ) -> list[Tensor]:
        """Send row w of every part to rank w and reduce what arrives; all parts and shards travel at once.

        Returns one tensor per part: without the W dimension fp32 for "sum" (on gloo added in rank order) and uint8 for
        "or", and [W, ...] for "stack". A diagnostic exchange is neither counted nor paced. Errors: ``ValueError`` for a
        part of another shape.
        """
        if not parts:
            return []
        ranks = group.size()
        for part in parts:
            if part.tensor.shape[0] != ranks or not part.tensor.is_contiguous():
                raise ValueError(
                    f"a part must be contiguous with {ranks} rows, one per rank, got {tuple(part.tensor.shape)}"
                )
            if not diagnostic:
                self._count(part.kind, peers_bytes(part, ranks))
        if _is_gloo(group):
            return self._reduce_scatter_pieces(parts, group, paced=not diagnostic)
        with self._pace_stream(0 if diagnostic else sum(peers_bytes(part, ranks) for part in parts)):
            return [_reduce_scatter_native(part, group) for part in parts]

    def _reduce_scatter_pieces(self, parts: Sequence[Part], group: dist.ProcessGroup, *, paced: bool) -> list[Tensor]:
        """Adds piece by piece while later pieces are under way: at 1 Gbit/s adding takes a tenth of the time."""
        rank = group.rank()
        received = [torch.empty_like(part.tensor) for part in parts]
        reduced = {
            number: torch.empty_like(part.tensor[0], dtype=torch.float32)
            for number, part in enumerate(parts)
            if part.reduce == "sum"
        }

        def add_piece(number: int, piece: slice) -> None:
            part = parts[number]
            if number in reduced:
                rows = [row.flatten() for row in received[number]]
                rows[rank] = part.tensor[rank].flatten()  # was sent nowhere
                size = part.tensor.itemsize
                elements = slice(piece.start // size, piece.stop // size)
                _add_rows([row[elements] for row in rows], reduced[number].view(-1)[elements])

        pairs = [(list(part.tensor), list(rows)) for part, rows in zip(parts, received, strict=True)]
        self._exchange_pieces(pairs, group, paced=paced, on_arrival=add_piece)
        for number, part in enumerate(parts):
            if number not in reduced:
                received[number][rank].copy_(part.tensor[rank])
                reduced[number] = _reduce_rows(received[number], part)
        return [reduced[number] for number in range(len(parts))]

    def all_gather(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup, kind: Kind) -> None:
        """Gather every rank's ``shard`` [n] into ``output`` [W * n], in rank order. ``shard`` may be a view of it."""
        self.all_gather_parts([(output.view(group.size(), -1), shard.flatten())], group, kind)

    def all_gather_parts(self, parts: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup, kind: Kind) -> None:
        """Gather several tensors at once: pairs of an output [W, n] and the own shard [n], which may be a row of it."""
        ranks, rank = group.size(), group.rank()
        sent_bytes = (ranks - 1) * sum(shard.nbytes for _, shard in parts)
        if self.metered:
            self._count(kind, sent_bytes)
        if _is_gloo(group):
            for output, shard in parts:
                if output[rank].data_ptr() != shard.data_ptr():
                    output[rank].copy_(shard)
            pairs = [([output[rank]] * ranks, list(output)) for output, _ in parts if output.numel()]
            self._exchange_pieces(pairs, group, paced=self.metered)
        else:
            with self._pace_stream(sent_bytes if self.metered else 0):
                for output, shard in parts:
                    _all_gather_single(output.view(-1), shard, group=group)

    def gather_numbers(self, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The step's control message: a few numbers [n] of every rank -> [W, n]. Neither counted nor paced."""
        gathered = own.new_empty(group.size() * own.numel())
        _all_gather_single(gathered, own, group=group)
        return gathered.view(group.size(), -1)

    def _pace_stream(self, nbytes: int) -> AbstractContextManager[None]:
        if self._stream_pacer is None or not nbytes:
            return nullcontext()
        return self._stream_pacer.pace(nbytes)

    def _exchange_pieces(
        self,
        pairs: Sequence[tuple[list[Tensor], list[Tensor]]],
        group: dist.ProcessGroup,
        *,
        paced: bool,
        on_arrival: Callable[[int, slice], None] = lambda number, piece: None,
    ) -> None:
        """Send ``pairs[i][0][w]`` to rank w and receive rank w's into ``pairs[i][1][w]``, for all i and w at once.

        ``on_arrival(i, piece)``: these bytes of every rank's row of ``pairs[i][1]`` are there.
        """
        ranks, rank = group.size(), group.rank()
        # In turn around the ring, so that no receiver is everybody's first.
        peers = [(rank + distance) % ranks for distance in range(1, ranks)]
        plan = _plan_pieces([rows[rank] for rows, _ in pairs])
        incoming = {w: _cut_pieces([rows[w] for _, rows in pairs], plan) for w in peers}
        outgoing = {w: _cut_pieces([rows[w] for rows, _ in pairs], plan) for w in peers}
        receiving = {
            (w, tag): dist.irecv(piece, group=group, group_src=w, tag=tag)
            for w in peers
            for tag, piece in enumerate(incoming[w])
        }
        pieces = [(w, tag, outgoing[w][tag]) for tag in range(len(plan)) for w in peers]
        sending = []
        link = self._host_pacer if paced and self._host_pacer and self._host_pacer.is_capped else None
        # All reservations first: a late wake-up from one wait must not delay the pieces behind it.
        sent_at = [link.reserve("send", piece.numel()) for _, _, piece in pieces] if link else []
        arrived_at = link.reserve("receive", sum(p.numel() for w in peers for p in incoming[w])) if link else 0.0
        for i, (w, tag, piece) in enumerate(pieces):
            if link:
                link.wait_until(sent_at[i])
            sending.append(dist.isend(piece, group=group, group_dst=w, tag=tag))
        for tag, (number, bytes_) in enumerate(plan):
            for w in peers:
                _wait(receiving[w, tag])
            on_arrival(number, bytes_)
        for request in sending:
            _wait(request)
        if link:
            link.wait_until(arrived_at)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return "gloo" in dist.get_backend(group)


def peers_bytes(part: Part, ranks: int) -> int:
    """What a rank sends its peers of ``part``: all rows but its own."""
    return part.tensor.nbytes // ranks * (ranks - 1)


def _wait(request: dist.Work | None) -> None:
    assert request is not None  # only for ranks outside the group
    request.wait()


def _plan_pieces(tensors: Sequence[Tensor]) -> list[tuple[int, slice]]:
    """(number of the tensor, some of its bytes), none longer than PIECE_BYTES, over all tensors."""
    return [
        (number, slice(begin, min(begin + PIECE_BYTES, tensor.nbytes)))
        for number, tensor in enumerate(tensors)
        for begin in range(0, tensor.nbytes, PIECE_BYTES)
    ]


def _cut_pieces(tensors: Sequence[Tensor], plan: Sequence[tuple[int, slice]]) -> list[Tensor]:
    """Views of the tensors' bytes."""
    return [tensors[number].flatten().view(torch.uint8)[piece] for number, piece in plan]


def _reduce_rows(rows_WN: Tensor, part: Part) -> Tensor:
    if part.reduce == "or":
        return or_bitmaps(rows_WN)
    if part.reduce == "stack":
        return rows_WN
    total = torch.empty_like(rows_WN[0], dtype=torch.float32)
    _add_rows(list(rows_WN), total)
    return total


def _add_rows(rows: Sequence[Tensor], total: Tensor) -> None:
    """The sum in rank order, in fp32, into ``total``."""
    if rows[0].dtype == torch.float32 and len(rows) > 1:
        torch.add(rows[0], rows[1], out=total)  # one pass over memory instead of a copy and a sum
        rest = rows[2:]
    else:
        total.copy_(rows[0])
        rest = rows[1:]
    for row in rest:
        total += row


def _reduce_scatter_native(part: Part, group: dist.ProcessGroup) -> Tensor:
    if part.reduce == "sum" and part.tensor.dtype == torch.float32:
        total = torch.empty_like(part.tensor[0])
        _reduce_scatter_single(total.flatten(), part.tensor.flatten(), op=dist.ReduceOp.SUM, group=group)
        return total
    received = torch.empty_like(part.tensor)  # NCCL would add bf16 in bf16 and cannot OR: move, then reduce here
    dist.all_to_all_single(received, part.tensor, group=group)
    return _reduce_rows(received, part)

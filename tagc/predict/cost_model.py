"""What an iteration takes at any number of ranks and any bandwidth: a model, to be told from measurements by its name.

One rank of N, all alike. Two resources serve one request at a time, in the order of arrival: the processor and the link
(full duplex; a rank sends as much as it receives, so one direction stands for both). An exchange of b bytes to N-1
peers occupies the link for

    t(b) = a m(b) + max(h b / r, b / r0)      m(b) = (N-1) ceil(b / (N-1) / 1 MB) messages

a: cost of a message; h: bytes on the wire per byte, for headers; r: rate of the link; r0: what the transport reaches
without a cap. The link's latency L passes after it.
A unit u (an FSDP unit: root, embedding, blocks, head) costs processor time f(u) forward and b(u) backward, e(u) to
encode its gradients and d(u) to decode the shard; it moves P(u) bytes of parameters and G(u) of gradients per exchange.

    main      for every unit: t(P(u)) + L, f(u);   in reverse: t(P(u)) + L where it was freed, b(u)
    reducer   for every unit whose last b(u) is over, one after another: e(u), t(G(u)) + L, d(u)

The iteration ends when both have ended. ``prefetch`` (CUDA): gathers move to an actor of their own, one unit ahead of
the computation; without it (CPU) main waits for each. ``overlap`` off: main does the reducer's work. So gradients hide
behind the backward pass of the units that follow, and encoding and decoding behind the link, never behind computation.

With N ranks, sizes are those of traffic.py; e is constant (a rank encodes its whole bucket however many
owners there are), d follows :func:`decode_growth`. Not modelled: ranks that wait for each other, congestion inside a
switch, validation, and the optimizer as a part of its own (its time is within f and b).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tagc.network.link import WIRE_BYTES_PER_BYTE

PIECE_BYTES = 1 << 20  # the exchange's message size
SLICES = 8  # a unit's computation gives way to the reducer this often, as a scheduler would let it


@dataclass(frozen=True)
class UnitCost:
    """One unit on one rank: milliseconds of the processor, per micro-batch and per step; bytes sent per exchange."""

    forward_ms: float
    backward_ms: float
    encode_ms: float
    decode_ms: float
    gather_bytes: int
    gradient_bytes: int
    is_gathered_again: bool  # for backward
    is_gathered_once: bool = False  # in a step, whatever its micro-batches: a replica spares the others

    def gathers(self, micro_steps: int, keeps_gathered: bool) -> int:
        """How often a step gathers it."""
        if keeps_gathered or self.is_gathered_once:
            return 1
        return micro_steps * (2 if self.is_gathered_again else 1)


@dataclass(frozen=True)
class LinkCost:
    """The link of one rank. Rates in bytes per second and direction, infinite for no cap."""

    ranks: int
    rate_bytes_per_s: float = math.inf
    transport_bytes_per_s: float = math.inf
    message_ms: float = 0.0
    latency_ms: float = 0.0
    wire_bytes_per_byte: float = WIRE_BYTES_PER_BYTE

    def exchange_ms(self, nbytes: int) -> float:
        """Time for which ``nbytes``, sent to all peers together, occupy the link; 0 for nothing to send.

        >>> LinkCost(ranks=3, rate_bytes_per_s=1e6, message_ms=0.5, wire_bytes_per_byte=1).exchange_ms(4_000_000)
        4002.0
        """
        peers = self.ranks - 1
        if nbytes == 0 or peers == 0:
            return 0.0
        messages = peers * math.ceil(nbytes / peers / PIECE_BYTES)
        seconds = max(nbytes * self.wire_bytes_per_byte / self.rate_bytes_per_s, nbytes / self.transport_bytes_per_s)
        return self.message_ms * messages + seconds * 1e3


class _Op(NamedTuple):
    """What an actor does next: it occupies a resource, starts after ``needs`` and is known as ``name`` when over."""

    resource: Literal["processor", "link"]
    ms: float
    name: str = ""
    needs: str = ""
    delay_ms: float = 0.0  # after the resource is free again


def decode_growth(is_sketch: bool, density: float, ranks: int, measured_ranks: int) -> float:
    """Decoding time at ``ranks`` over that at ``measured_ranks``, for the same bucket.

    A sketch is peeled once per shard (1/N of the bucket), with work in proportion to its peers' union 1 - (1-d)^(N-1),
    d: the density one rank keeps. Messages that never add up are decoded one by one: (N-1)/N of the bucket.

    >>> round(decode_growth(False, 0.2, 4, 2), 3), round(decode_growth(True, 0.2, 4, 2), 3)
    (1.5, 1.22)
    """

    def work(n: int) -> float:
        return (1 - (1 - density) ** (n - 1) if is_sketch else n - 1) / n

    return work(ranks) / work(measured_ranks)


def predict_iteration_ms(
    units: Sequence[UnitCost],
    link: LinkCost,
    *,
    micro_steps: int = 1,
    keeps_gathered: bool = False,
    prefetch: bool = False,
    overlap: bool = True,
) -> float:
    """Modelled milliseconds of one iteration. units: in forward order.

    keeps_gathered: parameters are gathered once per step (``trainer.reshard_after_forward=false``).
    """
    main: list[_Op] = []
    gathers: list[_Op] = []
    reducer: list[_Op] = []
    passes = 0  # forward and backward passes of units so far

    def run_pass(unit: UnitCost, ms: float, is_gathered: bool) -> None:
        nonlocal passes
        if is_gathered:
            # Ahead by one: it starts when the pass before the last is over, so together with the last one.
            ahead = f"pass {passes - 2}" if prefetch and passes >= 2 else ""
            op = _Op("link", link.exchange_ms(unit.gather_bytes), f"gather {passes}", ahead, link.latency_ms)
            (gathers if prefetch else main).append(op)
        first = f"gather {passes}" if is_gathered else ""
        main.extend(_Op("processor", ms / SLICES, needs=first) for _ in range(SLICES - 1))
        main.append(_Op("processor", ms / SLICES, f"pass {passes}", first))
        passes += 1

    for micro_step in range(micro_steps):
        for unit in units:
            run_pass(unit, unit.forward_ms, micro_step == 0 or not (keeps_gathered or unit.is_gathered_once))
        for unit in reversed(units):
            run_pass(unit, unit.backward_ms, unit.is_gathered_again and not (keeps_gathered or unit.is_gathered_once))
            if micro_step == micro_steps - 1:
                actor = reducer if overlap else main
                actor.append(_Op("processor", unit.encode_ms, needs=f"pass {passes - 1}"))
                actor.append(_Op("link", link.exchange_ms(unit.gradient_bytes), delay_ms=link.latency_ms))
                actor.append(_Op("processor", unit.decode_ms))
    return _run_actors([main, gathers, reducer])


def _run_actors(actors: Sequence[list[_Op]]) -> float:
    """Let all actors run, each in its own order; what can start first is served first, then what came first.

    Returns when the last has ended.
    """
    place, clock = [0] * len(actors), [0.0] * len(actors)
    free_at = {"processor": 0.0, "link": 0.0}
    finished = {"": 0.0}
    while True:
        ready = []
        for i, ops in enumerate(actors):
            if place[i] < len(ops) and ops[place[i]].needs in finished:
                op = ops[place[i]]
                arrival = max(clock[i], finished[op.needs])
                start = max(arrival, free_at[op.resource]) if op.ms else arrival  # no time asks for no resource
                ready.append((start, arrival, i))
        if not ready:
            return max(clock)
        start, _, i = min(ready)
        op = actors[i][place[i]]
        clock[i] = start
        if op.ms:
            free_at[op.resource] = start + op.ms
            clock[i] += op.ms + op.delay_ms
        if op.name:
            finished[op.name] = clock[i]
        place[i] += 1

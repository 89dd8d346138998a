"""Emulated NICs, for experiments on one host: ports that bytes pass at a rate.

A rail of a node has an egress and an ingress port, an int64 word each: the nanosecond until which
it is taken. The words lie in the heap of the rail's first GPU at the node, so that the GPUs of a
rail share its NIC. Who sends bytes takes a slot of bytes / rate of the sender's egress port, and,
from when that begins, one as long of the receiver's ingress port; the bytes have passed when the
second slot has. A slot begins when it is asked for, or when the one before it ends.

So a port is a queue, first come, first served: senders with as many slots under way each share it
evenly, whatever their number, and nothing is lost. A word is never reset: a port that is taken
until some time in the past is free.

Time is `clock_ns`: of one GPU, or of one host's interpreters. PEs on several GPUs have no common
clock. The rate and the rail's first GPU are in the PE's state, so kernels of any rate are the same.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import cdiv, clock_ns, helper, i64, jit, relax
from .shape import SLOT_BYTES, Shape

# Words of a PE's state (see `wire`).
NIC_RATE = tl.constexpr(15)  # bytes that a port passes in a millisecond
NIC_GPU = tl.constexpr(16)  # local GPU whose heap holds the ports of this PE's rail
SLOT_WORDS = tl.constexpr(SLOT_BYTES // 4)


@helper
def slot_ns(state_ptr, num_bytes):
    """Return how long bytes take to pass a port, in nanoseconds, rounded up.

    Example: 65,536 bytes at 6.25e9 bytes/s, 6,250,000 in a millisecond, take 10,486 ns.
    """
    return cdiv(num_bytes * 1000000, i64(tl.load(state_ptr + NIC_RATE)))


@helper
def egress_port(bases_ptr, state_ptr, port_off, pe, S: tl.constexpr):
    """Return the word of the port by which this PE's rail leaves the node of `pe`."""
    gpu: int = i64(tl.load(state_ptr + NIC_GPU))
    holder: int = pe - pe % S.G + gpu
    return (tl.load(bases_ptr + holder) + port_off).to(tl.pointer_type(tl.int64))


@helper
def ingress_port(bases_ptr, state_ptr, port_off, pe, S: tl.constexpr):
    """Return the word of the port by which this PE's rail comes to the node of `pe`."""
    return egress_port(bases_ptr, state_ptr, port_off, pe, S) + 1


@helper
def take(port_ptr, from_ns, num_ns):
    """Take the next `num_ns` of a port, from `from_ns` on; return when they begin. Never waits.

    The word first catches up with `from_ns`, then goes on by `num_ns`: what others take between the
    two makes this slot later and overlaps with nothing.

    Example: a port taken until 70, asked for 20 from 50 on, gives 70; from 80 on, 80.
    """
    tl.atomic_max(port_ptr, from_ns, sem="relaxed", scope="sys")
    return i64(tl.atomic_add(port_ptr, num_ns, sem="relaxed", scope="sys"))


@helper
def reserve(bases_ptr, state_ptr, port_off, from_pe, to_pe, num_bytes, S: tl.constexpr):
    """Take slots for bytes from a PE to one of the same rail; return when they will have passed.

    Never waits. Where the egress port is taken for long, the ingress port idles until then, though
    others may ask for it: who can wait takes the second slot when the first begins, as put does.
    """
    num_ns: int = slot_ns(state_ptr, num_bytes)
    out_ptr = egress_port(bases_ptr, state_ptr, port_off, from_pe, S)
    began: int = take(out_ptr, clock_ns(), num_ns)
    return take(ingress_port(bases_ptr, state_ptr, port_off, to_pe, S), began, num_ns) + num_ns


@helper
def wait_until(ns):
    """Wait until a time. It waits for no peer: slots end by themselves."""
    now: int = i64(clock_ns())
    while now < ns:
        relax()
        now: int = i64(clock_ns())


@jit
def _occupy_kernel(
    slots_ptr, bases_ptr, state_ptr, port_off, from_pe, to_pe, num_bytes, count, S: tl.constexpr
):
    """Take `count` slots a program, all at once, without moving a byte; wait for the last."""
    first: int = i64(tl.program_id(0)) * i64(count)
    passed: int = i64(clock_ns())
    for i in range(first, first + i64(count)):
        asked: int = i64(clock_ns())
        passed: int = reserve(
            bases_ptr, state_ptr, port_off, i64(from_pe), i64(to_pe), i64(num_bytes), S
        )
        tl.store(slots_ptr + 2 * i, asked)
        tl.store(slots_ptr + 2 * i + 1, passed)
    wait_until(passed)


def occupy(
    slots: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    *,
    port_off: int,
    from_pe: int,
    to_pe: int,
    num_bytes: int,
    programs: int,
    shape: Shape,
) -> None:
    """Take slots of both ports between two PEs, and wait for the last: what ports do by themselves.

    Args:
        slots: out, (programs, slots a program, 2) int64: when each was asked for, and when the
            bytes will have passed, in nanoseconds of `clock_ns`.
        bases, state: as of `wire.put`; the state is that of a PE of the same rail.
        port_off: byte offset of the ports.
        from_pe, to_pe: PEs of one rail.
        num_bytes: of a slot.
        programs: that take slots at the same time.
    """
    _occupy_kernel[(programs,)](
        *(slots, bases, state, port_off, from_pe, to_pe, num_bytes, slots.shape[1]),
        S=shape,
        num_warps=1,
    )


def take_ref(taken_until: int, from_ns: int, num_ns: int) -> tuple[int, int]:
    """Return when a slot begins, and until when the port is taken then: as `take`.

    Example:
        >>> take_ref(70, 50, 20), take_ref(70, 80, 20)
        ((70, 90), (80, 100))
    """
    began = max(taken_until, from_ns)
    return began, began + num_ns

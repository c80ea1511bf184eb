"""Packs whole documents into sequences, so that few are cut and little is padded.

Best fit, longest first (as in arXiv 2404.10830): each piece goes where it leaves the least room. Pieces of
equal length are placed together, so the time hardly depends on how many there are.
"""

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The sequence that each piece of 1 to `capacity` tokens goes into; sequences are numbered in the order
    of their first pieces."""
    order = np.argsort(-lengths, kind="stable")
    edges = np.flatnonzero(np.diff(lengths[order], prepend=-1, append=-1))
    sequences, opened = np.empty(len(lengths), dtype=np.int64), 0
    rooms: dict[int, list[np.ndarray]] = {}  # room left in tokens -> sequences
    known = 0  # bit r is set while rooms has a sequence with r left

    def leave(room: int, chunk: np.ndarray) -> None:
        nonlocal known
        if room and len(chunk):
            rooms.setdefault(room, []).append(chunk)
            known |= 1 << room

    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        pieces = order[begin:end]
        length = int(lengths[pieces[0]])
        while len(pieces):
            fitting = known >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                chunk = rooms[room].pop()
                if not rooms[room]:
                    known ^= 1 << room
            else:
                room = capacity
                chunk = np.arange(opened, opened - (-len(pieces) // (room // length)))
                opened += len(chunk)
            each = room // length
            used = min(len(chunk), -(-len(pieces) // each))
            leave(room, chunk[used:])
            here, pieces = pieces[: used * each], pieces[used * each :]
            sequences[here] = np.repeat(chunk[:used], each)[: len(here)]
            leave(room - each * length, chunk[: used - 1])
            leave(room - (len(here) - each * (used - 1)) * length, chunk[used - 1 : used])
    _, first = np.unique(sequences, return_index=True)
    rank = np.empty(opened, dtype=np.int64)
    rank[np.argsort(first)] = np.arange(opened)
    result: np.ndarray = rank[sequences]
    return result

"""Which holder gives an element to each rank that needs it: pure, the same answer on every rank."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence


def first_asked(n_holders: int, takers: Sequence[int], turn: int) -> int:
    """Index of the holder to be asked first, so that load left uneven by one tensor evens out over the next.

    Args:
        n_holders: Ranks that hold the elements.
        takers: Ranks that ask, ascending, at least one. Shards of one tensor may have the same holders, but
            not the same takers.
        turn: How many tensors of the same kind came before.
    """
    return (turn + takers[0]) * len(takers) % n_holders


def share_out(
    holders: Sequence[int], takers: Sequence[int], ranks_per_node: int, first: int = 0
) -> list[tuple[int, int]]:
    """Give each taker one holder: on its own node if it can be, then the least loaded.

    Args:
        holders: Ranks, ascending, at least one.
        takers: Ranks, ascending, none of them a holder.
        ranks_per_node: Ranks r with equal r // ranks_per_node share a node.
        first: Index of the holder to be asked first.

    Returns:
        Pairs (holder, taker), each taker once.
    """
    turned = [*holders[first:], *holders[:first]]
    by_node: dict[int, deque[int]] = {}
    for rank in turned:
        by_node.setdefault(rank // ranks_per_node, deque()).append(rank)
    load = dict.fromkeys(turned, 0)
    pairs = []
    far = []
    # Takers with a holder on their node first: the others can then go round the load that these make.
    for taker in takers:
        near = by_node.get(taker // ranks_per_node)
        if near is None:
            far.append(taker)
            continue
        load[near[0]] += 1
        pairs.append((near[0], taker))
        near.rotate(-1)
    queue = [(load[rank], index, rank) for index, rank in enumerate(turned)]
    heapq.heapify(queue)
    for taker in far:
        count, place, giver = queue[0]
        heapq.heapreplace(queue, (count + 1, place, giver))
        pairs.append((giver, taker))
    return pairs

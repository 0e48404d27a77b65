"""Which holder gives an element to each rank that needs it: pure, the same answer on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def share_out(
    holders: Sequence[int], needers: Sequence[int], ranks_per_node: int, turn: int = 0
) -> list[tuple[int, int]]:
    """Give each needer that is not a holder one holder: on its own node if it can be, then the least loaded.

    Args:
        holders: Ranks, ascending.
        needers: Ranks, ascending.
        ranks_per_node: Ranks of one node.
        turn: How often the same question came before; the first holder to be asked moves on with it, so that
            load left uneven by one tensor evens out over the next.

    Returns:
        Pairs (holder, needer), each needer once.
    """
    assert holders, "nobody holds the element"
    holding = set(holders)
    takers = [rank for rank in needers if rank not in holding]
    if not takers:
        return []
    # Shards of one tensor ask the same holders: they differ in their takers.
    start = (turn + takers[0]) * len(takers) % len(holders)
    order = {rank: (index - start) % len(holders) for index, rank in enumerate(holders)}
    by_node: dict[int, list[int]] = {}
    for rank in holders:
        by_node.setdefault(rank // ranks_per_node, []).append(rank)
    load = dict.fromkeys(holders, 0)
    pairs = []
    far = []
    # Takers with no choice of node first, so that those with a choice can go round the load that these make.
    for taker in takers:
        near = by_node.get(taker // ranks_per_node)
        if near is None:
            far.append(taker)
            continue
        giver = min(near, key=lambda rank: (load[rank], order[rank]))
        load[giver] += 1
        pairs.append((giver, taker))
    queue = [(load[rank], order[rank], rank) for rank in holders]
    heapq.heapify(queue)
    for taker in far:
        count, place, giver = queue[0]
        heapq.heapreplace(queue, (count + 1, place, giver))
        pairs.append((giver, taker))
    return pairs

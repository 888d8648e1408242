"""`python -m bench.foresight`: misses of a planned order of eviction, compared with Belady's.

It reads no data. A data set of equal files is read in a new random order each epoch by some nodes,
each of which reads its part of the order (as PyTorch's DistributedSampler splits it) and has a
cache for half of its part. Belady's order fetches a file at its turn, and knows all uses. The
mount's (fusefs/planning/) fetches an eighth of the cache ahead, for which it may evict only files
with a later next use; it knows this epoch and the next, or all. As nodes are alike, one is
simulated. The table has the misses from the second epoch on.
"""

from __future__ import annotations

import argparse
import heapq
import random
from array import array

from fusefs.planning.prefetcher import AHEAD_SHARE

EPOCHS = 4
CACHE_SHARE = 1 / 2


def next_uses(files: int, nodes: int, seed: int) -> tuple[array[int], int]:
    """Return the turn of the next use of each turn's file, for one node; and turns per epoch.

    If there is no next use, it is the number of turns.
    """
    generator, reads = random.Random(seed), array("i")
    order = list(range(files))
    for _ in range(EPOCHS):
        generator.shuffle(order)
        reads.extend(order[::nodes])
    following, last = array("i", reads), array("i", [len(reads)]) * files
    for turn in range(len(reads) - 1, -1, -1):
        following[turn], last[reads[turn]] = last[reads[turn]], turn
    return following, len(reads) // EPOCHS


def misses(following: array[int], per_epoch: int, room: int, ahead: int, epochs_known: int) -> int:
    """Count the misses after the first epoch, of a cache with room for `room` files.

    A file is fetched `ahead` turns before its own; uses after the next `epochs_known` epochs are
    not known and count as none.
    """
    turns = len(following)
    is_there, uses = bytearray(turns), list[int]()
    used = found = 0
    for turn in range(turns + ahead):
        done = turn - ahead
        if done >= 0:
            next_use = following[done]
            known = per_epoch * (done // per_epoch + 1 + epochs_known)
            if next_use >= min(turns, known):
                used -= 1
            elif next_use > turn:
                is_there[next_use] = 1
                heapq.heappush(uses, -next_use)
            else:
                used -= 1  # it is already there, as the file of its next turn
        if turn >= turns or is_there[turn]:
            continue
        found += turn >= per_epoch
        used += 1
        if used > room and uses and -uses[0] > turn:
            is_there[-heapq.heappop(uses)] = 0
            used -= 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.foresight", description=__doc__)
    parser.add_argument("--files", type=int, default=10_000_000)
    parser.add_argument("--nodes", default="1,10,100,1000")
    arguments = parser.parse_args()
    print("| nodes | reads of a node | Belady's misses | two epochs known | all known |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for nodes in map(int, arguments.nodes.split(",")):
        following, per_epoch = next_uses(arguments.files, nodes, nodes)
        room = int(CACHE_SHARE * per_epoch)
        best = misses(following, per_epoch, room, 0, EPOCHS)
        ahead = int(AHEAD_SHARE * room)
        ratios = [misses(following, per_epoch, room, ahead, known) / best for known in (1, EPOCHS)]
        cells = " | ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"| {nodes} | {EPOCHS * per_epoch:,} | {best:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

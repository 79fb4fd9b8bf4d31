"""How a minibatch is cut into micro-batches, one forward and backward pass each. It never changes the gradient.

Rows that have the same prompt are put into packs, where the prompt is computed once; packs of similar length make a
micro-batch of at most so many padded tokens.
"""

import heapq
from typing import NamedTuple

from grpo_lightning.rollout.batch import pack_tokens
from grpo_lightning.rollout.buffer import Row


class MicroBatch(NamedTuple):
    """Indices of its rows; how many of them at a time share a prompt; whether it counts, or only fills up."""

    rows: list[int]
    packs: list[int]
    counts: bool = True


def cut_for(
    rows: list[Row], micro_batch_tokens: int, process: int, processes: int, attention: float | None = None
) -> list[MicroBatch]:
    """The micro-batches of one process, the same number for every process: where it has fewer than another it repeats
    a row that counts for nothing, because sharded models need all processes to take part in each.

    Args:
        attention: where prompts may be shared, what attending to one token costs, in parts of what the rest of the
            model costs for a token (see `model.examine`); None keeps every row in a pack of its own.
    """
    if not rows:
        return []
    # With several processes no pack may be so large that they cannot get about as much to do each.
    most = micro_batch_tokens if processes == 1 else sum(len(row.token_ids) for row in rows) // (4 * processes)
    parts: list[list[list[int]]] = [[] for _ in range(processes)]
    loads = [0.0] * processes
    for pack in sorted(packs_of(rows, min(most, micro_batch_tokens), attention), key=lambda p: (-_tokens(rows, p), p)):
        least = loads.index(min(loads))
        parts[least].append(pack)
        loads[least] += _cost(_tokens(rows, pack), attention or 0.0)
    batches = [cut(rows, part, micro_batch_tokens) for part in parts]
    filler = MicroBatch([0], [1], counts=False)
    return batches[process] + [filler] * (max(map(len, batches)) - len(batches[process]))


def without_loss(rows: list[Row], silent_without_advantage: bool) -> tuple[list[int], list[int]]:
    """Indices of the rows that have a loss, at least one; and of those of which it is exactly zero.

    Rows without a loss token are in neither: nothing that is measured of them counts.
    """
    trained = [index for index, row in enumerate(rows) if row.loss_mask.any()]
    silent = [index for index in trained if silent_without_advantage and not _has_advantage(rows[index])]
    heard = sorted(set(trained) - set(silent))
    # Where no row has one, one still gives every weight its gradient of zero: the optimiser moves by its momentum.
    return heard or silent[:1], silent if heard else silent[1:]


def _has_advantage(row: Row) -> bool:
    return row.advantage is None or bool(row.advantage.where(row.loss_mask[row.start :], 0).any())


def cut(rows: list[Row], packs: list[list[int]], micro_batch_tokens: int) -> list[MicroBatch]:
    """Packs of similar length together, at most `micro_batch_tokens` padded tokens each, and at least one pack."""
    batches: list[MicroBatch] = []
    widest = 0
    for pack in sorted(packs, key=lambda p: (-_tokens(rows, p), p)):
        if not batches or (len(batches[-1].packs) + 1) * widest > micro_batch_tokens:
            batches.append(MicroBatch([], []))
            widest = _tokens(rows, pack)
        batches[-1].rows.extend(pack)
        batches[-1].packs.append(len(pack))
    return batches


def packs_of(rows: list[Row], most: int, attention: float | None) -> list[list[int]]:
    """Indices of the rows of each pack, at most `most` tokens unless a row alone has more.

    The rows of one prompt are split into as many packs as cost least: more of them compute the prompt more often, fewer
    of them are longer, and every token of a pack is compared with every other.
    """
    if attention is None:
        return [[index] for index in range(len(rows))]
    prompts: dict[bytes, list[int]] = {}
    for index, row in enumerate(rows):
        prompts.setdefault(row.token_ids[: row.start].numpy().tobytes(), []).append(index)
    packs = []
    for members in prompts.values():
        start = rows[members[0]].start
        own = sum(rows[i].length - 1 for i in members)
        number = min(range(1, len(members) + 1), key=lambda n: n * _cost(start + own / n, attention))
        packs += _split(rows, members, number, most)
    return packs


def _split(rows: list[Row], members: list[int], number: int, most: int) -> list[list[int]]:
    """The rows of one prompt in `number` packs, or more where `most` asks for it, about as long as each other."""
    start = rows[members[0]].start
    packs: list[list[int]] = [[] for _ in range(number)]
    shortest = [(start, which) for which in range(number)]  # a heap: (tokens, pack)
    for index in sorted(members, key=lambda i: (-rows[i].length, i)):
        tokens, which = shortest[0]
        longer = tokens + rows[index].length - 1
        if packs[which] and longer > most:
            packs.append([index])
            heapq.heappush(shortest, (start + rows[index].length - 1, len(packs) - 1))
        else:
            packs[which].append(index)
            heapq.heapreplace(shortest, (longer, which))
    return [pack for pack in packs if pack]


def _tokens(rows: list[Row], pack: list[int]) -> int:
    return pack_tokens([rows[i] for i in pack])


def _cost(tokens: float, attention: float) -> float:
    return tokens * (1 + attention * tokens)

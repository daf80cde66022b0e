"""Through the rows of a pipeline schedule as far as order and needs allow. Torch-free.

A rank goes through the slots of its row in order. A slot is one action, or a forward and a backward pass that begin
together, when both have what they need.
"""

from collections.abc import Iterator, Sequence

from moefold.config.action import ActionResult, ScheduleRow, Slot, SlotRow


def one_per_slot(row: ScheduleRow) -> SlotRow:
    """Each action in a slot of its own."""
    return tuple((action,) for action in row)


def execute_order(rows: Sequence[SlotRow]) -> Iterator[tuple[int, Slot]]:
    """Yield every slot with its rank, each behind all that it needs; end where no rank can go on.

    Nothing but a rank's own row and what others made decides when it can: any order of visits gets as far.
    """
    num_stages = 1 + max((action.stage for row in rows for slot in row for action in slot), default=0)
    made: set[ActionResult] = set()
    begun = [0] * len(rows)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, row in enumerate(rows):
            while begun[rank] < len(row):
                slot = row[begun[rank]]
                if not all(need in made for action in slot for need in action.consumes(num_stages)):
                    break
                yield rank, slot
                made.update(action.produces for action in slot)
                begun[rank] += 1
                is_moving = True


def find_deadlock(rows: Sequence[SlotRow]) -> tuple[int, Slot] | None:
    """The first rank that cannot end, because what it needs comes later, and the slot before which it waits."""
    begun = [0] * len(rows)
    for rank, _ in execute_order(rows):
        begun[rank] += 1
    stuck = (rank for rank, row in enumerate(rows) if begun[rank] < len(row))
    return next(((rank, rows[rank][begun[rank]]) for rank in stuck), None)

"""A pipeline whose time passes tick by tick and whose events are found by looking, to compare the simulator with."""

from collections import defaultdict, deque


def stream_of(piece) -> str:
    return "communication" if piece.part.endswith("_comm") else "compute"


class Chain:
    """An action under way."""

    def __init__(self, action, pieces):
        self.action, self.left, self.stream, self.end = action, deque(pieces), None, None


def run(rows, stages, *, overlap):
    """Play a step; returns every piece as (rank, stream, action, start, end), and every message as (from, to, end)."""
    machine = Machine(rows, stages, overlap)
    for tick in range(100_000):
        machine.end_pieces(tick)
        while machine.move_messages(tick) or any(machine.begin(rank, tick) for rank in range(len(rows))):
            pass
        if machine.is_done():
            return machine.pieces, machine.messages
    raise AssertionError("it never ends")


class Machine:
    """All ranks and links."""

    def __init__(self, rows, stages, overlap):
        self.slots = [deque(row) for row in rows]
        self.now = [[] for _ in rows]
        self.outbox = [[] for _ in rows]
        self.begun = [() for _ in rows]
        self.stages, self.overlap = stages, overlap
        self.owner = {a.stage: r for r, row in enumerate(rows) for slot in row for a in slot}
        self.made, self.arrived = set(), set()
        self.links = defaultdict(deque)
        self.pieces, self.messages = [], []

    def is_done(self):
        return not any(self.slots) and not any(self.now) and not any(self.links.values())

    def end_pieces(self, tick):
        for rank, chains in enumerate(self.now):
            for chain in list(chains):
                if chain.end == tick:
                    chain.stream = chain.end = None
                if chain.end is None and not chain.left:
                    chains.remove(chain)
                    self.made.add(key(chain.action))
                    self.outbox[rank].append(chain.action)
            if not chains:
                for action in self.begun[rank] if self.outbox[rank] else ():
                    self.post(rank, action)
                self.outbox[rank].clear()

    def post(self, rank, action):
        to = action.stage + (1 if action.kind == "F" else -1)
        if action.kind != "W" and to in self.owner and self.owner[to] != rank:
            seconds = self.stages[min(action.stage, to)].p2p_s
            self.links[rank, self.owner[to]].append([key(action), seconds, None])

    def move_messages(self, tick):
        moved = False
        for pair, queue in self.links.items():
            if queue and queue[0][2] is None:
                queue[0][2] = tick + queue[0][1]
            if queue and queue[0][2] == tick:
                self.arrived.add(queue.popleft()[0])
                self.messages.append((*pair, tick))
                moved = True
        return moved

    def has_all(self, rank, action):
        s, m = action.stage, action.micro_batch
        if action.kind == "W":
            return (s, "I", m) in self.made
        needed = [(s - 1, "F", m)] if action.kind == "F" else [(s, "F", m), (s + 1, "I", m)]
        return all(
            need in (self.made if self.owner[need[0]] == rank else self.arrived)
            for need in needed
            if need[0] in self.owner
        )

    def begin(self, rank, tick):
        """Begin one piece, if one can begin."""
        if not self.now[rank]:
            if not self.slots[rank]:
                return False
            slot = self.slots[rank][0]
            if not all(self.has_all(rank, action) for action in (slot if self.overlap else slot[:1])):
                return False
            self.begun[rank] = self.slots[rank].popleft()
            self.now[rank] = [Chain(a, self.stages[a.stage].segments(a.kind)) for a in slot]
        chains = self.now[rank]
        busy = {chain.stream for chain in chains}
        for chain in sorted(chains, key=lambda chain: chain.action.kind == "F") if self.overlap else chains[:1]:
            is_free = chain.end is None and chain.left and stream_of(chain.left[0]) not in busy
            if is_free and (self.overlap or self.has_all(rank, chain.action)):
                piece = chain.left.popleft()
                chain.stream, chain.end = stream_of(piece), tick + piece.seconds
                self.pieces.append((rank, stream_of(piece), chain.action, tick, chain.end))
                return True
        return False


def key(action):
    """Return the result of the action."""
    return action.stage, "I" if action.kind == "B" else action.kind, action.micro_batch

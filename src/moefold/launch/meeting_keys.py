"""Keys of a meeting point, by which sites connect with each other and send their state to a joining site."""

import secrets
from collections.abc import Collection

from moefold.launch.signed_lines import BadRequestError

MAX_STORE_BYTES = 256 * 2**20


class MeetingKeys:
    """Values by key, where the first part of a key names a connection of sites or a transfer to one."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._num_bytes = 0
        self._name = secrets.token_hex(4)
        self._num_epochs = 0
        self._epochs: dict[tuple[int, ...], str] = {}
        """Sites that are connected with each other, and the name under which they connected."""
        self._num_transfers = 0
        self._transfers: dict[int, str] = {}
        """Transfers to joining sites that may be in progress."""

    def set(self, key: str, value: str) -> None:
        """Store a value that the sites share under a key, within the size of the store.

        Raises:
            BadRequestError: the store is full.
        """
        before = self._values.get(key)
        added_bytes = len(key) + len(value) - (0 if before is None else len(key) + len(before))
        if self._num_bytes + added_bytes > MAX_STORE_BYTES:
            raise BadRequestError("the store is full")
        self._values[key] = value
        self._num_bytes += added_bytes

    def get(self, key: str) -> str | None:
        """Return the value of a key, or None if not yet, or it was forgotten."""
        return self._values.get(key)

    def is_over(self, key: str) -> bool:
        """Return whether the connection or transfer of a key has ended, because one of its sites left."""
        name = key.partition("/")[0]
        is_own = name.startswith((f"{self._name}-", f"gift-{self._name}-"))
        return is_own and name not in self._epochs.values() and name not in self._transfers.values()

    def forget(self) -> None:
        """Delete the keys of connections and transfers that are over."""
        living_names = {*self._epochs.values(), *self._transfers.values()}
        self._values = {key: value for key, value in self._values.items() if key.partition("/")[0] in living_names}
        self._num_bytes = sum(len(key) + len(value) for key, value in self._values.items())

    def connect(self, group: tuple[int, ...]) -> str:
        """Return the name of the connection of sites, a new one if they are not connected."""
        if group not in self._epochs:
            self._num_epochs += 1
            self._epochs[group] = f"{self._name}-{self._num_epochs}"
        return self._epochs[group]

    def disconnect(self, group: tuple[int, ...]) -> None:
        """End the connection of sites, which may be broken."""
        self._epochs.pop(group, None)

    def end_all_except(self, groups: Collection[tuple[int, ...]]) -> None:
        """Keep the connections of these sets of sites, and end all others."""
        self._epochs = {group: epoch for group, epoch in self._epochs.items() if group in groups}

    def leave(self, number: int) -> None:
        """End the connections and the transfer of a site, which may come back as another process."""
        self._transfers.pop(number, None)
        self._epochs = {group: epoch for group, epoch in self._epochs.items() if number not in group}

    def begin_transfer(self, number: int) -> str:
        """Return the name of a new transfer to a joining site."""
        self._num_transfers += 1
        self._transfers[number] = f"gift-{self._name}-{self._num_transfers}"
        return self._transfers[number]

    def end_transfer(self, number: int) -> None:
        """End the transfer to a site: its state has arrived."""
        self._transfers.pop(number, None)

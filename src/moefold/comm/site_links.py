"""Exchange between the ranks of the same number on several sites.

Each site is a job with its own process groups. Rank r of a site has one gloo process group with rank r of the other
sites of a round. It is built directly on a key-value store, which is not a store of the jobs. A thread exchanges and
sums a vector in parts of bounded size, while training may continue. Every member adds the parts in the order of the
members, so all of them get the same bits.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.private_torch import gloo_group
from moefold.comm.wire_codes import PlainCode, WireCode
from moefold.cost.site_traffic import PART_ELEMENTS


class KeyValueStore(Protocol):
    """A store that all sites can reach."""

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        ...

    def wait(self, keys: Sequence[str]) -> None:
        """Wait until all keys are written."""
        ...


class _TorchStore(dist.Store):
    """torch store on a `KeyValueStore`, with the methods that gloo calls to connect the members of a group."""

    def __init__(self, store: KeyValueStore) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys)


@dataclass(frozen=True)
class SiteRound:
    """Members of a round, as the meeting point chose them."""

    epoch: str
    """Name of the set of members. For another set the members connect again."""
    members: tuple[int, ...]
    """The sites of the round, ascending, this site included."""
    weights: tuple[float, ...]
    """Weight of each member. A member of weight 0 takes part, and its values are not read."""


@dataclass(frozen=True)
class Probe:
    """Values that the same rank of the other sites compares with its own."""

    key: int
    """Key below 2**63. Probes with different keys or sizes are not exchanged."""
    values: Tensor
    """Values of the probe, on the host."""


@dataclass(frozen=True)
class ExchangeResult:
    """Result of an exchange on this rank."""

    mean: Tensor
    """Weighted sum of the members' decoded vectors, on the host."""
    decoded: Tensor
    """This site's vector as the members decoded it, or the vector itself if its code is lossless."""
    sent_bytes: int
    seconds: float
    of_members: Tensor | None = None
    """Decoded values of each member that are not averaged, [members, values], or zeros for a member of weight 0. None
    means there are no such values."""
    probes: Tensor | None = None
    """Values of the probe of each member, [members, ...], or None without a probe, or if they cannot be compared."""


class SiteLinks:
    """Process groups of this rank with the same rank of the other sites.

    Args:
        store: store of the meeting point.
        host: address of this machine that the other sites can reach.
        timeout_s: longest wait for another site.
    """

    def __init__(self, store: KeyValueStore, host: str, number: int, rank: int, timeout_s: float) -> None:
        # torch calls a store of Python only as long as Python holds it.
        self._store = _TorchStore(store)
        self._host = host
        self._number = number
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._epoch = ""
        self._group: Any = None
        self._return_group: Any = None
        """Connection from the second of two members to the first, or None with more members."""
        self._members: tuple[int, ...] = ()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sites")

    def begin(
        self,
        round_: SiteRound,
        delta: Tensor,
        num_coded: int,
        code: WireCode,
        num_gathered: int = 0,
        probe: Probe | None = None,
    ) -> "Future[ExchangeResult]":
        """Start to exchange a vector with the members of a round, in the thread.

        Errors of the connection are raised by the result of the future.

        Args:
            round_: members and weights.
            delta: the vector of this site, on the host, of the same size and type on all members. It must not change
                before the exchange is done.
            num_coded: elements at the start of the vector that are sent as a code. All others are sent unchanged.
            num_gathered: number of the last coded elements that are not averaged: the result has these elements of each
                member, and its mean is not defined there.
            probe: exchanged too. All members have a probe, or no member has.
        """
        return self._thread.submit(self._exchange, round_, delta, num_coded, code, num_gathered, probe)

    def send_state(self, transfer: str, tensors: Sequence[Tensor]) -> int:
        """Send the tensors of this rank to the same rank of a site that joins. Block, and return the bytes.

        Args:
            tensors: local tensors, in the order of the receiver's.
        """
        group = self._connect_pair(transfer, 0)
        sent_bytes = 0
        for tensor in tensors:
            if tensor.numel():
                content = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
                for first in range(0, len(content), PART_ELEMENTS):
                    group.send([content[first : first + PART_ELEMENTS]], 1, 0).wait()
                sent_bytes += len(content)
        return sent_bytes

    @torch.no_grad()
    def receive_state(self, transfer: str, tensors: Sequence[Tensor]) -> None:
        """Receive the tensors that `send_state` of another site sends, and write them to `tensors`. It blocks.

        Args:
            tensors: local tensors of the sizes and types of the sender's.
        """
        group = self._connect_pair(transfer, 1)
        for tensor in tensors:
            if tensor.numel():
                content = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
                for first in range(0, len(content), PART_ELEMENTS):
                    group.recv([content[first : first + PART_ELEMENTS]], 0, 0).wait()
                tensor.copy_(content.view(tensor.dtype).view(tensor.shape))

    def _connect_pair(self, transfer: str, member: int) -> Any:
        store = dist.PrefixStore(f"{transfer}/{self._rank}", self._store)
        return gloo_group(store, member, 2, self._host, self._timeout)

    def drop(self) -> None:
        """Drop the connections after a failed round. The next round has a new epoch."""
        self._group = None
        self._return_group = None
        self._epoch = ""

    def close(self) -> None:
        """End the thread and close the connections."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.drop()

    def _exchange(
        self,
        round_: SiteRound,
        delta: Tensor,
        num_coded: int,
        code: WireCode,
        num_gathered: int,
        probe: Probe | None,
    ) -> ExchangeResult:
        started_s = time.perf_counter()
        # A meeting point that was started again counts epochs from 1.
        if (round_.epoch, round_.members) != (self._epoch, self._members):
            self._connect(round_.epoch, round_.members)
        mean = torch.empty_like(delta)
        is_lossy = num_coded > 0 and not (isinstance(code, PlainCode) and code.dtype == delta.dtype)
        decoded = delta.clone() if is_lossy else delta
        sent_bytes = 0
        num_averaged = num_coded - num_gathered
        gathered = delta.new_zeros(len(round_.members), num_gathered) if num_gathered else None
        spans = [(span, code) for span in _slices(0, num_averaged)]
        spans += [(span, code) for span in _slices(num_averaged, num_coded)]
        spans += [(span, PlainCode(delta.dtype)) for span in _slices(num_coded, len(delta))]
        for span, part_code in spans:
            payload = part_code.encode(delta[span])
            received = self._all_gather(payload)
            sent_bytes += payload.nbytes * (len(round_.members) - 1)
            total = mean[span].zero_()
            is_gathered = num_averaged <= span.start < num_coded
            for member, (weight, values) in enumerate(zip(round_.weights, received, strict=True)):
                if weight and is_gathered:
                    assert gathered is not None
                    place = slice(span.start - num_averaged, span.stop - num_averaged)
                    gathered[member, place] = part_code.decode(values, total)
                elif weight:
                    total.add_(part_code.decode(values, total), alpha=weight)
            if decoded is not delta:
                decoded[span] = part_code.decode(payload, total)
        probes = None if probe is None else self._exchange_probe(probe)
        if probes is not None:
            sent_bytes += probes[0].nbytes * (len(round_.members) - 1)
        return ExchangeResult(mean, decoded, sent_bytes, time.perf_counter() - started_s, gathered, probes)

    def _exchange_probe(self, probe: Probe) -> Tensor | None:
        """Return the values of all members, or None if their keys or sizes differ."""
        heads = self._all_gather(torch.tensor([probe.key, probe.values.numel()]))
        if not probe.values.numel() or not all(torch.equal(head, heads[0]) for head in heads):
            return None
        return torch.stack(self._all_gather(probe.values.contiguous()))

    def _all_gather(self, values: Tensor) -> list[Tensor]:
        """Return the tensors of all members, which are sent as bytes: gloo has no int16.

        In a ring of three or more members, each connection carries one direction. Two members have a connection for
        each direction: on a single connection gloo reaches half of the rate of a slow link
        (docs/log.md#2026-11-26-exchanges-between-two-sites-over-a-slow-link).
        """
        payload = values.view(torch.uint8)
        received = [torch.empty_like(payload) for _ in self._members]
        if self._return_group is None:
            self._group.allgather([received], [payload]).wait()
        else:
            me = self._members.index(self._number)
            peer = 1 - me
            groups = (self._group, self._return_group)
            received[me] = payload
            works = (groups[me].send([payload], peer, 0), groups[peer].recv([received[peer]], peer, 0))
            for work in works:
                work.wait()
        return [content.view(values.dtype) for content in received]

    def _connect(self, epoch: str, members: tuple[int, ...]) -> None:
        """Connect to the same rank of the other sites, and return once all are connected."""
        self.drop()
        member = members.index(self._number)

        def connect(name: str) -> Any:
            store = dist.PrefixStore(f"{epoch}/{self._rank}{name}", self._store)
            return gloo_group(store, member, len(members), self._host, self._timeout)

        self._group = connect("")
        self._return_group = connect("/return") if len(members) == 2 else None
        self._epoch = epoch
        self._members = members


def _slices(first: int, end: int) -> list[slice]:
    """Return slices of at most `PART_ELEMENTS` elements."""
    return [slice(start, min(start + PART_ELEMENTS, end)) for start in range(first, end, PART_ELEMENTS)]

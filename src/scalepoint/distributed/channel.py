"""Exchanges messages and tensors between the ranks of a group.

Messages are JSON in the store of the group. In exchange number n every rank writes its message under its own key; rank
0 reads all of them and writes one list, which the other ranks wait for:

    exchange 7:   7/0, 7/1, 7/2 (one message of each rank)   --rank 0-->   7/all   -->   rank 1, rank 2

Tensors use collectives. The object collectives of torch are not used: they can run code that they receive. While a
rank waits for others, it checks their heartbeats: a dead rank is named in a RankError.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from scalepoint.distributed.encoding import decode_error, decode_tensors, encode_error, encode_tensors
from scalepoint.distributed.heartbeats import INTERVAL, Heartbeats, heartbeat_timeout
from scalepoint.distributed.store import GroupStore
from scalepoint.errors import RankError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Message = dict[str, Any]
ALL = "all"  # instead of a rank, in the key of the list of all messages


class Channel:
    """Connects this rank with the other ranks of the default group.

    Attributes:
        is_active: Whether this rank runs a public function. Only then it sends heartbeats.
        shared_error: The error that all ranks raise at the moment, so that it is not announced again.
    """

    def __init__(self, process_group: Any) -> None:
        from torch import distributed  # noqa: PLC0415  # torch is imported already, because there is a group

        self.process_group = process_group
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.is_active = False
        self.shared_error: BaseException | None = None
        self._store = GroupStore()
        self._heartbeats = Heartbeats(self._store, self.rank, self.size)
        self._exchange_count = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context of a public function."""
        with self._heartbeats.sent():
            self.is_active = True
            try:
                yield
            finally:
                self.is_active = False

    def finish(self) -> None:
        """End a public function. Rank 0 returns last: its process may hold the store that the others still read."""
        if self.rank:
            self._heartbeats.set_idle()
        number = self._send({"phase": "the end"})
        if not self.rank:
            for rank, message in enumerate(self._collect(number)):
                if "failure" in message:
                    raise decode_error(message["failure"], rank)
            self._heartbeats.set_idle()

    # -- messages -----------------------------------------------------------------------------------------------------

    def exchange(self, phase: str, content: Message) -> list[Message]:
        """Send a message and return those of all ranks, in rank order.

        Raises:
            RankError: A rank is dead, or in a different phase.
            Exception: The error with which a rank has left its public function.
        """
        number = self._send({"phase": phase, **content})
        messages = self._receive_list(number) if self.rank else self._collect(number)
        for rank, message in enumerate(messages):
            if "failure" in message:
                self.shared_error = decode_error(message["failure"], rank)
                raise self.shared_error
        phases = {message["phase"] for message in messages}
        if len(phases) > 1 and not any("error" in message for message in messages):
            listed = ", ".join(f"rank {rank}: {message['phase']}" for rank, message in enumerate(messages[:8]))
            raise RankError(f"the ranks do not make the same calls ({listed}): every rank must, and in the same order")
        return messages

    def announce_failure(self, error: BaseException) -> None:
        """Send the error to the ranks that wait for this one, unless all of them raise it already."""
        is_shared, self.shared_error = error is self.shared_error, None
        if is_shared:
            return
        message = {"phase": "", "failure": encode_error(error)}
        with suppress(Exception):  # the error itself matters more than that it cannot be sent
            number = self._send(message)
            if self.rank:
                return
            # Rank 0 may have been interrupted before it wrote the list of its last exchange: answer that one too.
            for exchange in (number - 1, number):
                if not self._store.has(_key(exchange, ALL)):
                    self._store.set(_key(exchange, ALL), json.dumps([message]))

    def _send(self, message: Message) -> int:
        """Write the message of this rank for the next exchange; returns the number of the exchange."""
        number = self._exchange_count
        self._exchange_count += 1
        self._store.set(_key(number, self.rank), json.dumps(message))
        return number

    def _collect(self, number: int) -> list[Message]:
        """Read the messages of all ranks and write their list. Rank 0 calls this."""
        texts = self._wait_for({rank: _key(number, rank) for rank in range(self.size)})
        messages = [json.loads(text) for text in texts]
        self._store.set(_key(number, ALL), json.dumps(messages))
        for rank in range(self.size):
            self._store.delete(_key(number, rank))
        if number:
            # Every rank has sent a message of this exchange, so it has read the list of the last one.
            self._store.delete(_key(number - 1, ALL))
        return messages

    def _receive_list(self, number: int) -> list[Message]:
        """Read the list that rank 0 writes; other ranks call this. Rank 0 needs all ranks, so each must be alive."""
        texts = self._wait_for(dict.fromkeys(range(self.size), _key(number, ALL)))
        messages: list[Message] = json.loads(texts[0])
        return messages

    def _wait_for(self, keys: Mapping[int, str]) -> list[bytes]:
        """Return the values of the keys, once all exist; the rank of a missing key must be alive."""
        start_time, missing = time.monotonic(), dict(keys)
        while missing:
            existing = {key for key in set(missing.values()) if self._store.has(key)}
            missing = {rank: key for rank, key in missing.items() if key not in existing}
            if missing:
                self._heartbeats.check(missing, start_time)
                # All ranks poll one store: with more ranks each polls less often.
                time.sleep(min(0.05, 0.0002 * self.size + (time.monotonic() - start_time) / 20))
        return [self._store.get(key) for key in dict.fromkeys(keys.values())]

    # -- tensors ------------------------------------------------------------------------------------------------------

    def gather_tensors(self, tensors: Mapping[str, "Tensor"], name: str) -> list[dict[str, "Tensor"]]:
        """See scalepoint.distributed.gather_tensors."""
        import torch  # noqa: PLC0415
        from torch import distributed  # noqa: PLC0415

        header, data = encode_tensors(tensors)
        contents = [message["value"] for message in self.exchange(name, {"value": [header, data.numel()]})]
        longest = max(length for _, length in contents)
        # all_gather needs one length on all ranks
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device())
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in contents]
        if longest:
            self._run_collective(partial(distributed.all_gather, parts, padded), name)
        return [decode_tensors(part.cpu(), header) for part, (header, _) in zip(parts, contents, strict=True)]

    def broadcast_tensors(self, tensors: Mapping[str, "Tensor"], name: str) -> dict[str, "Tensor"]:
        """See scalepoint.distributed.broadcast_tensors."""
        import torch  # noqa: PLC0415
        from torch import distributed  # noqa: PLC0415

        header, data = encode_tensors({} if self.rank else tensors)
        header, length = self.exchange(name, {"value": [header, data.numel()]})[0]["value"]
        data = (torch.empty(length, dtype=torch.uint8) if self.rank else data).to(self._device())
        if length:
            self._run_collective(partial(distributed.broadcast, data, 0), name)
        return decode_tensors(data.cpu(), header)

    def all_reduce_sum(self, tensors: Sequence["Tensor"], name: str) -> None:
        """See scalepoint.distributed.all_reduce_sum."""
        from torch import distributed  # noqa: PLC0415

        shapes = [[str(tensor.dtype), *tensor.shape] for tensor in tensors]
        if any(message["value"] != shapes for message in self.exchange(name, {"value": shapes})):
            raise RankError(f"{name}: the ranks have tensors of different shapes: use the same model on every rank")
        for tensor in tensors:
            on_device = tensor.to(self._device()).contiguous()
            self._run_collective(partial(distributed.all_reduce, on_device), name)
            if on_device is not tensor:
                tensor.copy_(on_device)

    def _device(self) -> "torch.device":
        """Return the device of tensors in collectives: nccl needs CUDA, gloo the CPU."""
        import torch  # noqa: PLC0415
        from torch import distributed  # noqa: PLC0415

        is_cuda = "nccl" in str(distributed.get_backend(self.process_group))
        return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")

    def _run_collective(self, start: Callable[..., Any], name: str) -> None:
        """Start a collective and wait for it. If a rank dies meanwhile, raise a RankError that names the rank."""
        start_time = time.monotonic()
        try:
            work = start(group=self.process_group, async_op=True)
            while not work.is_completed():
                self._heartbeats.check(range(self.size), start_time)
                time.sleep(min(0.02, 0.0005 + (time.monotonic() - start_time) / 50))
            work.wait()
        except RankError:
            raise
        except RuntimeError as error:
            # The error of torch does not say which rank broke the connection; its missing heartbeat does, soon.
            while time.monotonic() - start_time < 2 * heartbeat_timeout():
                self._heartbeats.check(range(self.size), start_time)
                time.sleep(INTERVAL / 10)
            raise RankError(f"{name}: the connection between the ranks broke: {error}") from error


def _key(exchange: int, rank: int | str) -> str:
    return f"{exchange}/{rank}"


@dataclass
class _ProcessState:
    """State of this process, which has at most one default group."""

    channel: Channel | None = None
    disabled: int = 0


_state = _ProcessState()


def current_channel() -> Channel | None:
    """Return the channel of the default group; None without a group, with one rank, and inside `without_channel`."""
    if _state.disabled:
        return None
    distributed = sys.modules.get("torch.distributed")  # importing torch takes seconds; without it there is no group
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        _state.channel = None
        return None
    process_group = distributed.group.WORLD
    if _state.channel is None or _state.channel.process_group is not process_group:
        _state.channel = Channel(process_group)
    return _state.channel if _state.channel.size > 1 else None


@contextmanager
def without_channel() -> Iterator[None]:
    """Inside this context, `current_channel` returns None."""
    _state.disabled += 1
    try:
        yield
    finally:
        _state.disabled -= 1

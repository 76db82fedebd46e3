"""Messages and tensors between the ranks of a group, and the detection of dead ranks.

Messages are JSON in the store of the group. In exchange number n every rank writes its message under its own key;
rank 0 reads all of them and writes one list, which the other ranks wait for. Tensors use collectives. The object
collectives of torch are not used: they pickle, and their timeout cannot tell a slow rank (rank 0 may evaluate for an
hour) from a dead one. Each rank writes a heartbeat instead, and a rank whose heartbeat stops is named in a RankError.
"""

import builtins
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from scalepoint import errors
from scalepoint.errors import BatchNote, RankError, ScalepointError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Message = dict[str, Any]
TIMEOUT_VARIABLE = "SCALEPOINT_RANK_TIMEOUT"
DEFAULT_TIMEOUT = 60.0  # seconds without a heartbeat; ten times as long before the first heartbeat of a rank
HEARTBEAT_INTERVAL = 1.0  # seconds
IDLE = b"idle"  # instead of a heartbeat, between two public functions
ALL = "all"  # instead of a rank, in the key of the list of all messages


def heartbeat_timeout() -> float:
    """Return the seconds after which a rank without a heartbeat counts as dead."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text or DEFAULT_TIMEOUT)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise UsageError(f"{TIMEOUT_VARIABLE}={text!r}: must be a number of seconds above 0")
    return seconds


class Channel:
    """Connects this rank with the other ranks of the default group.

    Attributes:
        is_active: Whether this rank sends heartbeats, which is while it runs a public function.
        shared_error: The error that all ranks raise at the moment, so that it is not announced again.
    """

    def __init__(self, process_group: Any) -> None:
        from torch import distributed  # noqa: PLC0415  # torch is imported already, because there is a group

        from scalepoint.compat.torch_names import default_store  # noqa: PLC0415

        self.process_group = process_group
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.is_active = False
        self.shared_error: BaseException | None = None
        self._store: Any = default_store()
        self._exchanges = 0
        self._last_check = 0.0
        self._heartbeats: dict[int, tuple[bytes, float]] = {}  # of each rank: the last value, and when it changed

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Write a new heartbeat every second, from a thread."""
        self._stop, key = threading.Event(), _key("beat", self.rank)

        def beat() -> None:
            with suppress(Exception):  # the store is gone: the main thread raises that error at its next exchange
                while not self._stop.wait(HEARTBEAT_INTERVAL):
                    self._store.set(key, str(time.time()))

        with _store_errors():
            self._store.set(key, str(time.time()))
        self.is_active, self._heartbeats = True, {}
        self._thread = threading.Thread(target=beat, daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self._stop_heartbeat()
            self.is_active = False

    def _stop_heartbeat(self) -> None:
        self._stop.set()
        self._thread.join()

    def _set_idle(self) -> None:
        """Send no heartbeats until the next public function: the user's program may take long between two of them."""
        self._stop_heartbeat()
        with _store_errors():
            self._store.set(_key("beat", self.rank), IDLE)

    def exchange(self, phase: str, content: Message) -> list[Message]:
        """Send a message and return those of all ranks, in rank order.

        Raises:
            RankError: A rank is dead, or in a different phase.
            Exception: The error with which a rank has left its public function.
        """
        number = self._send({"phase": phase, **content})
        messages = self._receive_list(number) if self.rank else self._collect(number)
        for index, message in enumerate(messages):
            if "failure" in message:
                self.shared_error = decode_error(message["failure"], index)
                raise self.shared_error
        phases = {message["phase"] for message in messages}
        if len(phases) > 1 and not any("error" in message for message in messages):
            listed = ", ".join(f"rank {index}: {message['phase']}" for index, message in enumerate(messages[:8]))
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
            # Other ranks may wait for the list of the exchange in which rank 0 was interrupted: answer that one too.
            for exchange in (number - 1, number):
                if not self._store.check([_key(exchange, ALL)]):
                    self._store.set(_key(exchange, ALL), json.dumps([message]))

    def finish(self) -> None:
        """End a public function. Rank 0 returns last: its process may hold the store that the others still read."""
        if self.rank:
            self._set_idle()
        number = self._send({"phase": "the end"})
        if not self.rank:
            for index, message in enumerate(self._collect(number)):
                if "failure" in message:
                    raise decode_error(message["failure"], index)
            self._set_idle()

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
                self._check_alive(range(self.size), start_time)
                time.sleep(min(0.02, 0.0005 + (time.monotonic() - start_time) / 50))
            work.wait()
        except RankError:
            raise
        except RuntimeError as error:
            # The error of torch does not say which rank broke the connection; its missing heartbeat does, soon.
            while time.monotonic() - start_time < 2 * heartbeat_timeout():
                self._check_alive(range(self.size), start_time)
                time.sleep(HEARTBEAT_INTERVAL / 10)
            raise RankError(f"{name}: the connection between the ranks broke: {error}") from error

    def _send(self, message: Message) -> int:
        """Write the message of this rank for the next exchange; returns the number of the exchange."""
        number = self._exchanges
        self._exchanges += 1
        with _store_errors():
            self._store.set(_key(number, self.rank), json.dumps(message))
        return number

    def _collect(self, number: int) -> list[Message]:
        """Read the messages of all ranks and write their list. Rank 0 calls this."""
        texts = self._wait_for({rank: _key(number, rank) for rank in range(self.size)})
        messages = [json.loads(text) for text in texts]
        with _store_errors():
            self._store.set(_key(number, ALL), json.dumps(messages))
            for rank in range(self.size):
                self._store.delete_key(_key(number, rank))
            if number:
                # Every rank has sent a message of this exchange, so it has read the list of the last one.
                self._store.delete_key(_key(number - 1, ALL))
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
            with _store_errors():
                existing = {key for key in set(missing.values()) if self._store.check([key])}
            missing = {rank: key for rank, key in missing.items() if key not in existing}
            if missing:
                self._check_alive(list(missing), start_time)
                # All ranks poll one store: with more ranks each polls less often.
                time.sleep(min(0.05, 0.0002 * self.size + (time.monotonic() - start_time) / 20))
        with _store_errors():
            return [self._store.get(key) for key in dict.fromkeys(keys.values())]

    def _check_alive(self, ranks: Sequence[int], start_time: float) -> None:
        """Raise a RankError that names the first rank whose heartbeat has stopped.

        Clocks of machines differ, so the time is measured here, from when the heartbeat last changed.
        """
        now = time.monotonic()
        if now < self._last_check + HEARTBEAT_INTERVAL / 4:
            return
        self._last_check = now
        for rank in ranks:
            if rank == self.rank:
                continue
            key = _key("beat", rank)
            with _store_errors():
                value = self._store.get(key) if self._store.check([key]) else b""
            value = b"" if value == IDLE else value
            last, since = self._heartbeats.get(rank, (None, now))
            timeout = heartbeat_timeout()
            if value != last:
                self._heartbeats[rank] = (value, now)
            elif now - since > timeout and (value or now - start_time > 10 * timeout):
                reason = "sent no heartbeat" if value else "has not joined"
                raise RankError(
                    f"rank {rank} of {self.size} {reason} for {now - since:.0f} s: it has exited, or its machine is "
                    f"unreachable. Start all ranks again with resume: finished work is kept. {TIMEOUT_VARIABLE} sets "
                    "the seconds"
                )


@contextmanager
def _store_errors() -> Iterator[None]:
    """Translate the errors of torch's stores, which are RuntimeErrors."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            "the store of the group cannot be reached, because its process (rank 0 or torchrun) has exited. "
            "Start all ranks again with resume: finished work is kept"
        ) from error


def _key(exchange: int | str, rank: int | str) -> str:
    """Return a key in the store. The store outlives ranks that torchrun restarts: each attempt has its own keys."""
    return f"scalepoint/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{exchange}/{rank}"


def encode_tensors(tensors: Mapping[str, "Tensor"]) -> tuple[list[Any], "Tensor"]:
    """Return a header with names, dtypes and shapes, and one tensor with the bytes of all tensors."""
    import torch  # noqa: PLC0415

    header = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]
    parts = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    return header, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def decode_tensors(data: "Tensor", header: Sequence[Any]) -> dict[str, "Tensor"]:
    """Undo `encode_tensors`. `data` may be longer than needed."""
    import torch  # noqa: PLC0415

    tensors, start = {}, 0
    for name, dtype_name, shape in header:
        dtype = getattr(torch, dtype_name)
        end = start + dtype.itemsize * torch.Size(shape).numel()
        tensors[name] = data[start:end].clone().view(dtype).reshape(shape)  # the clone is aligned for any dtype
        start = end
    return tensors


def encode_error(error: BaseException) -> Message:
    """Convert an error to JSON values."""
    has_message = len(error.args) == 1 or (isinstance(error, ScalepointError) and bool(error.args))
    message = str(error.args[0]) if has_message else str(error)
    notes = [[str(note), isinstance(note, BatchNote)] for note in getattr(error, "__notes__", ())]
    return {"type": type(error).__name__, "message": message, "notes": notes}


def decode_error(encoded: Message, rank: int) -> Exception:
    """Restore the error of another rank: its class if that is one of scalepoint or Python, else a RankError."""
    name, message = encoded["type"], encoded["message"]
    error_type = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(error_type, type) and issubclass(error_type, Exception)):
        error_type, message = RankError, f"{name}: {message}"
    try:
        error = error_type(message)
    except TypeError:  # such as UnicodeDecodeError, which takes five arguments
        error = RankError(f"{name}: {message}")
    for note, is_batch_note in encoded["notes"]:
        error.add_note(BatchNote(note) if is_batch_note else note)
    error.add_note(f"raised on rank {rank}")
    return error


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

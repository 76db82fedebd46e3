"""Many processes, one job: inside a group of torch.distributed, ranks share the data and bring together what they saw.

    with together():                          a public function: every rank calls the same ones in the same order
        with agreed("calibrating") as told:   one phase: an error of one rank is the error of all
            told.mine = what this rank did    ... and afterwards told.all is what each did
        states = gathered(tensors)            the tensors of each rank, in the order of ranks
        states = handed(tensors)              those of rank 0
        add_up(tensors)                       their sums, the same bits on every rank

Ranks meet at the store of the group: each leaves a word under the number of the meeting; the first reads them all and
leaves one with what all said, which the others wait for. While a rank works it leaves a heartbeat, so that one that is
slow is waited for, and one that is dead is named. Without a group every function here is the plain case of one rank,
and costs nothing.
"""

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from scalepoint.carried import Words, described, packed, rebuilt, unpacked
from scalepoint.errors import RankError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
TIMEOUT = "SCALEPOINT_RANK_TIMEOUT"
SECONDS = 60.0  # without a heartbeat a rank counts as dead; ten times as long for one that has not come at all
BEAT = 1.0
AWAY = "away"  # instead of a heartbeat: between two functions
ALL = "all"  # in the place of a rank: what all of them said


def rank() -> int:
    """Which of the ranks this process is; 0 where it works alone."""
    group = _group()
    return 0 if group is None else group.rank


def size() -> int:
    """How many ranks work together."""
    group = _group()
    return 1 if group is None else group.size


def is_main() -> bool:
    """Whether this is the rank that writes files and prints."""
    return rank() == 0


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process works by itself, also when it is one of a group."""
    _state.alone += 1
    try:
        yield
    finally:
        _state.alone -= 1


@contextmanager
def together() -> Iterator[None]:
    """Around a public function: while it runs the others see that this rank lives, and learn when it fails."""
    group = _group()
    if group is None or group.is_beating:
        yield
        return
    with group.beating(), warnings.catch_warnings():
        if group.rank:
            warnings.simplefilter("ignore")  # rank 0 tells
        try:
            yield
        except BaseException as error:
            if error is not group.raised:
                group.leave(error)
            group.raised = None
            raise
        group.end()


@dataclass
class Told:
    """What this rank says at the end of a phase, and what all said."""

    mine: Any = None
    at: float = 0.0  # where in the data: of several errors the first one counts
    all: list[Any] = field(default_factory=list)


@contextmanager
def agreed(what: str) -> Iterator[Told]:
    """A phase that all ranks end together: well, or all with the same error."""
    group, told = _group(), Told()
    if group is None:
        yield told
        told.all = [told.mine]
        return
    failed: Exception | None = None
    with together():
        try:
            yield told
        except RankError:
            raise
        except Exception as error:
            failed = error
        own = {"said": told.mine} if failed is None else {"error": described(failed), "at": told.at}
        found = group.meet(what, own)
        told.all = [each.get("said") for each in found]
        wrong = [(each["at"], index) for index, each in enumerate(found) if "error" in each]
        if wrong:
            first = min(wrong)[1]
            if failed is not None and first == group.rank:
                group.raised = failed
                raise failed
            group.raised = rebuilt(found[first]["error"], first)
            raise group.raised from failed


def told(what: str, make: Callable[[], Any]) -> Any:
    """What `make` gives on rank 0, which alone calls it; plain values, as JSON has them."""
    with agreed(what) as said:
        if is_main():
            with alone():
                said.mine = make()
    return said.all[0]


def run_on_main(name: str, function: Callable[[], T], result_type: Any) -> T:
    """Call `function` on rank 0 only and return its result on every rank.

    Args:
        name: Name of the phase, for errors.
        function: It runs as a single process, so it may call functions that use ranks.
        result_type: Type of the result; pydantic converts it to JSON and back.

    Returns:
        On rank 0 the object itself, on the other ranks an equal one.
    """
    if _group() is None:
        return function()
    own: T | None = None

    def run() -> Any:
        nonlocal own
        own = function()
        return to_jsonable_python(own, inf_nan_mode="strings")

    sent = told(name, run)
    result: T = own if is_main() else TypeAdapter(result_type).validate_python(sent)  # type: ignore[assignment]
    return result


def gathered(tensors: Mapping[str, "Tensor"], what: str = "gathering") -> list[dict[str, "Tensor"]]:
    """These tensors of every rank, in the order of ranks; names and shapes may differ between them."""
    group = _group()
    return [dict(tensors)] if group is None else group.gathered(tensors, what)


def handed(tensors: Mapping[str, "Tensor"], what: str = "handing on") -> dict[str, "Tensor"]:
    """The tensors of rank 0, on every rank; what the others give does not count."""
    group = _group()
    return dict(tensors) if group is None else group.handed(tensors, what)


def add_up(tensors: Sequence["Tensor"], what: str = "adding up") -> None:
    """Make each the sum over all ranks, in place; all have the same shapes."""
    group = _group()
    if group is not None and tensors:
        group.add_up(tensors, what)


def places(parts: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Where each batch of this rank begins among those of all, and where the last one ends; `parts` has the lengths of
    every rank's batches. The first of every rank come first, then the second of every rank, as the data is shared."""
    own, total, mine = rank(), 0, []
    for index in range(max(map(len, parts))):
        for each, lengths in enumerate(parts):
            if index < len(lengths):
                if each == own:
                    mine.append(total)
                total += lengths[index]
    return mine, total


def start() -> None:
    """Join the group that torchrun started this process for, unless that has happened."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return
    from torch import cuda, distributed  # noqa: PLC0415  # torch takes seconds to load
    from torch._C._distributed_c10d import PrefixStore, TCPStore  # noqa: PLC0415

    if distributed.is_initialized():
        return
    backend, env = "nccl" if cuda.is_available() else "gloo", os.environ
    if not is_restarted():
        distributed.init_process_group(backend)
        return
    # torchrun's store still holds where the ranks of the last attempt listened: this attempt's words go beside them
    kept = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    store = PrefixStore(f"restart {env['TORCHELASTIC_RESTART_COUNT']}", kept)
    distributed.init_process_group(backend, store=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]))


def is_restarted() -> bool:
    """Whether torchrun started this process again, after one of its ranks had died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def limit() -> float:
    """Seconds after which a rank without a heartbeat is dead."""
    given = os.environ.get(TIMEOUT, "")
    try:
        found = float(given or SECONDS)
    except ValueError:
        found = 0.0
    if found <= 0:
        raise UsageError(f"{TIMEOUT}={given!r}: a number of seconds, above 0")
    return found


class _Group:
    """The default group of torch.distributed."""

    def __init__(self, pg: Any) -> None:
        from torch import distributed  # noqa: PLC0415  # it is loaded: there is a group
        from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

        self.pg = pg
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.store: Any = _get_default_store()
        self.count = 0  # meetings
        self.raised: BaseException | None = None  # what all ranks know of
        self.is_beating = False
        self.looked = 0.0
        self.seen: dict[int, tuple[bytes, float]] = {}  # the last heartbeat of each rank, and when it was new

    @contextmanager
    def beating(self) -> Iterator[None]:
        """A thread leaves a new number every second."""
        self.ended, own = threading.Event(), _key("beat", self.rank)

        def beat() -> None:
            with suppress(Exception):  # without a store there is nobody to tell
                while not self.ended.wait(BEAT):
                    self.store.set(own, str(time.time()))

        with self._reaching():
            self.store.set(own, str(time.time()))
        self.is_beating, self.seen = True, {}
        self.thread = threading.Thread(target=beat, daemon=True)
        self.thread.start()
        try:
            yield
        finally:
            self.ended.set()
            self.thread.join()
            self.is_beating = False

    def rest(self) -> None:
        """No heartbeat until the next function: what comes before it may take long, and is none of ours."""
        self.ended.set()
        self.thread.join()
        with self._reaching():
            self.store.set(_key("beat", self.rank), AWAY)

    def meet(self, what: str, own: Words) -> list[Words]:
        """Leave a word, wait for those of all."""
        number = self.count
        self._post(number, {"what": what, **own})
        found = self._passed_on(number) if self.rank else self._collected(number)
        for index, each in enumerate(found):
            if "left" in each:
                self.raised = rebuilt(each["left"], index)
                raise self.raised
        others = {each["what"] for each in found}
        if len(others) > 1 and not any("error" in each for each in found):
            doing = ", ".join(f"rank {index}: {each['what']}" for index, each in enumerate(found[:8]))
            raise RankError(f"the ranks do not make the same calls ({doing}): every rank has to, in the same order")
        return found

    def leave(self, error: BaseException) -> None:
        """Tell those who will wait for this rank that it does not come."""
        word = {"what": "", "left": described(error)}
        with suppress(Exception):
            number = self.count
            self._post(number, word)
            for each in () if self.rank else (number - 1, number):  # others may wait for a meeting that this one left
                if not self.store.check([_key(each, ALL)]):
                    self.store.set(_key(each, ALL), json.dumps([word]))

    def end(self) -> None:
        """Rank 0 goes last: it may hold the store that the others still read."""
        number = self.count
        if self.rank:
            self.rest()
        self._post(number, {"what": "the end"})
        if not self.rank:
            for index, said in enumerate(self._collected(number)):
                if "left" in said:
                    raise rebuilt(said["left"], index)
            self.rest()

    def gathered(self, tensors: Mapping[str, "Tensor"], what: str) -> list[dict[str, "Tensor"]]:
        import torch  # noqa: PLC0415
        from torch import distributed  # noqa: PLC0415

        about, own = packed(tensors)
        found = [each["said"] for each in self.meet(what, {"said": [about, own.numel()]})]
        longest = max(length for _, length in found)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device())
        padded[: own.numel()] = own
        everything = [torch.empty_like(padded) for _ in found]
        if longest:
            self._finish(lambda: distributed.all_gather(everything, padded, group=self.pg, async_op=True), what)
        return [unpacked(each.cpu(), header) for each, (header, _) in zip(everything, found, strict=True)]

    def handed(self, tensors: Mapping[str, "Tensor"], what: str) -> dict[str, "Tensor"]:
        import torch  # noqa: PLC0415
        from torch import distributed  # noqa: PLC0415

        about, own = packed({} if self.rank else tensors)
        header, length = self.meet(what, {"said": [about, own.numel()]})[0]["said"]
        flat = torch.empty(length, dtype=torch.uint8) if self.rank else own
        flat = flat.to(self._device())
        if length:
            self._finish(lambda: distributed.broadcast(flat, 0, group=self.pg, async_op=True), what)
        return unpacked(flat.cpu(), header)

    def add_up(self, tensors: Sequence["Tensor"], what: str) -> None:
        from torch import distributed  # noqa: PLC0415

        shapes = [[str(each.dtype), *each.shape] for each in tensors]
        found = self.meet(what, {"said": shapes})
        if any(each["said"] != shapes for each in found):
            raise RankError(f"{what}: the ranks have tensors of other shapes: they do not work on the same model")
        for each in tensors:
            moved = each.to(self._device()).contiguous()
            self._finish(partial(distributed.all_reduce, moved, group=self.pg, async_op=True), what)
            if moved is not each:
                each.copy_(moved)

    def _device(self) -> Any:
        """Where collectives find tensors."""
        import torch  # noqa: PLC0415
        from torch import distributed  # noqa: PLC0415

        is_cuda = "nccl" in str(distributed.get_backend(self.pg))
        return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")

    def _finish(self, begin: Callable[[], Any], what: str) -> None:
        """A collective that ends, or names the rank that it misses."""
        began = time.monotonic()
        try:
            work = begin()
            while not work.is_completed():
                self._check_alive(range(self.size), began)
                time.sleep(min(0.02, 0.0005 + (time.monotonic() - began) / 50))
            work.wait()
        except RankError:
            raise
        except RuntimeError as error:
            while time.monotonic() - began < 2 * limit():  # who it was shows when a heartbeat stays away
                self._check_alive(range(self.size), began)
                time.sleep(BEAT / 10)
            raise RankError(f"{what}: the connection between the ranks broke: {error}") from error

    def _post(self, number: int, word: Words) -> None:
        self.count = number + 1
        with self._reaching():
            self.store.set(_key(number, self.rank), json.dumps(word))

    def _collected(self, number: int) -> list[Words]:
        """What all said: the first rank reads it and passes it on."""
        words = self._awaited({each: _key(number, each) for each in range(self.size)})
        found = [json.loads(word) for word in words]
        with self._reaching():
            self.store.set(_key(number, ALL), json.dumps(found))
            for each in range(self.size):
                self.store.delete_key(_key(number, each))
            if number:
                self.store.delete_key(_key(number - 1, ALL))  # all have read it: they are here
        return found

    def _passed_on(self, number: int) -> list[Words]:
        """The same, on the other ranks."""
        found: list[Words] = json.loads(self._awaited(dict.fromkeys(range(self.size), _key(number, ALL)))[0])
        return found

    def _awaited(self, keys: Mapping[int, str]) -> list[bytes]:
        """What stands under keys, each with a rank that must live until it does."""
        began, missing = time.monotonic(), dict(keys)
        while missing:
            with self._reaching():
                there = {key for key in set(missing.values()) if self.store.check([key])}
            missing = {each: key for each, key in missing.items() if key not in there}
            if missing:
                self._check_alive(list(missing), began)
                time.sleep(min(0.05, 0.0002 * self.size + (time.monotonic() - began) / 20))  # who asks: all of them
        with self._reaching():
            return [self.store.get(each) for each in dict.fromkeys(keys.values())]

    def _check_alive(self, ranks: Sequence[int], began: float) -> None:
        """An error that names the first rank whose heartbeat stands still."""
        now = time.monotonic()
        if now < self.looked + BEAT / 4:
            return
        self.looked = now
        for each in ranks:
            if each == self.rank:
                continue
            key = _key("beat", each)
            with self._reaching():
                beat = self.store.get(key) if self.store.check([key]) else b""
            beat = b"" if beat == AWAY.encode() else beat
            last, since = self.seen.get(each, (None, now))
            if beat != last:
                self.seen[each] = (beat, now)
            elif now - since > limit() and (beat or now - began > 10 * limit()):
                why = "gave no sign of life" if beat else "did not come"
                raise RankError(
                    f"rank {each} of {self.size} {why} for {now - since:.0f} s: it has ended, or its machine cannot be "
                    f"reached. Start all ranks again; what was finished is kept for resume. {TIMEOUT} sets the seconds"
                )

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:  # torch's errors of stores and networks are RuntimeErrors
            raise RankError(
                "the store of the group cannot be reached: the process that holds it, rank 0 or torchrun, has ended. "
                "Start all ranks again; what was finished is kept for resume"
            ) from error


@dataclass
class _State:
    found: _Group | None = None
    alone: int = 0


_state = _State()


def _group() -> _Group | None:
    """The group, where there is one of several ranks and this process is not alone just now."""
    return None if _state.alone else _refreshed()


def _refreshed() -> _Group | None:
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_available() or not torch_distributed.is_initialized():
        _state.found = None
        return None
    pg = torch_distributed.group.WORLD
    if _state.found is None or _state.found.pg is not pg:
        _state.found = _Group(pg)
    return _state.found if _state.found.size > 1 else None


def _key(number: int | str, rank: int | str) -> str:
    """Of a word in the store, which outlives the ranks that torchrun starts again."""
    return f"scalepoint/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}/{rank}"

"""Share one job between the ranks of a torch.distributed group.

Without a group every function here is the one-process case and costs nothing, so callers need no branches.

    @participating()                        # a public function: every rank calls the same ones in the same order
    def calibrate(model, data): ...

    with phase("calibrating") as step:      # an error on one rank is raised on all of them
        step.value = count                  # JSON values only
    step.values                             # the value of every rank, in rank order

    result = run_on_main("verifying", lambda: verify(path), Verification)
    all_reduce_sum(tensors)                 # the same bits on every rank

`channel.py` exchanges messages and tensors, `heartbeats.py` detects dead ranks.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from scalepoint.distributed.channel import current_channel, without_channel
from scalepoint.distributed.encoding import decode_error, encode_error
from scalepoint.errors import RankError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


def rank() -> int:
    """Return the index of this process in the group; 0 without a group."""
    channel = current_channel()
    return 0 if channel is None else channel.rank


def world_size() -> int:
    """Return the number of processes in the group; 1 without a group."""
    channel = current_channel()
    return 1 if channel is None else channel.size


def is_main() -> bool:
    """Whether this is rank 0, which alone writes files and prints."""
    return rank() == 0


@contextmanager
def single_process() -> Iterator[None]:
    """Inside this context, act as if there were no group, for work of one rank that the other ranks do not share."""
    with without_channel():
        yield


@contextmanager
def participating() -> Iterator[None]:
    """Decorator or context for a public function that all ranks call together.

    While it runs, this rank sends heartbeats. If it raises, the other ranks raise the same error at their next phase
    instead of waiting for the timeout. Warnings are shown on rank 0 only. Nested calls change nothing.
    """
    channel = current_channel()
    if channel is None or channel.is_active:
        yield
        return
    with channel.active(), warnings.catch_warnings():
        if channel.rank:
            warnings.simplefilter("ignore")
        try:
            yield
        except BaseException as error:
            channel.announce_failure(error)
            raise
        channel.finish()


@dataclass
class Phase:
    """Values that the ranks exchange in a phase.

    Attributes:
        value: Contribution of this rank, set inside the `with` block. JSON values only.
        position: Index of the current batch. If several ranks fail, the error with the lowest position is raised.
        values: Contribution of each rank, in rank order; filled when the block ends.
    """

    value: Any = None
    position: float = 0.0
    values: list[Any] = field(default_factory=list)


@contextmanager
def phase(name: str) -> Iterator[Phase]:
    """Run a block that all ranks finish together: all succeed, or all raise the same error.

    Args:
        name: Appears in errors; ranks that are in different phases raise RankError.

    Yields:
        A Phase. Set `value` inside the block and read `values` after it.
    """
    channel, step = current_channel(), Phase()
    if channel is None:
        yield step
        step.values = [step.value]
        return
    local_error: Exception | None = None
    with participating():
        try:
            yield step
        except RankError:  # the group is broken: the ranks cannot agree on anything
            raise
        except Exception as error:
            local_error = error
        message: dict[str, Any] = {"value": step.value}
        if local_error is not None:
            message = {"error": encode_error(local_error), "position": step.position}
        answers = channel.exchange(name, message)
        step.values = [answer.get("value") for answer in answers]
        failures = [(answer["position"], index) for index, answer in enumerate(answers) if "error" in answer]
        if failures:
            _, failed = min(failures)
            if local_error is not None and failed == channel.rank:
                channel.shared_error = local_error
                raise local_error
            channel.shared_error = decode_error(answers[failed]["error"], failed)
            raise channel.shared_error from local_error


def run_on_main(name: str, function: Callable[[], T], result_type: Any = None) -> T:
    """Call `function` on rank 0 only and return its result on every rank.

    Args:
        name: Name of the phase, for errors.
        function: It runs as a single process, so it may call functions that use ranks.
        result_type: Type of the result; pydantic converts it to JSON and back. None for a function without result.

    Returns:
        On rank 0 the object itself, on the other ranks an equal one.
    """
    if current_channel() is None:
        return function()
    main_result: T | None = None
    with phase(name) as step:
        if is_main():
            with single_process():
                main_result = function()
            step.value = to_jsonable_python(main_result, inf_nan_mode="strings")
    result: T = main_result if is_main() else TypeAdapter(result_type).validate_python(step.values[0])  # type: ignore[assignment]
    return result


def gather_values(name: str, value: Any) -> list[Any]:
    """Return the JSON values of all ranks, in rank order."""
    with phase(name) as step:
        step.value = value
    return step.values


def wait_for_all(name: str) -> None:
    """Wait until every rank has called this function (barrier)."""
    gather_values(name, None)


def check_equal(name: str, value: str, hint: str) -> None:
    """Raise UsageError on every rank if `value` differs between ranks.

    Args:
        name: What is compared, such as "model"; used in the error.
        value: A fingerprint.
        hint: What the user should do, for the end of the error.
    """
    values = gather_values(name, value)
    different = [index for index, other in enumerate(values) if other != values[0]]
    if different:
        raise UsageError(f"rank {different[0]} has a different {name} from rank 0: {hint}")


def gather_tensors(tensors: Mapping[str, "Tensor"], name: str = "gathering tensors") -> list[dict[str, "Tensor"]]:
    """Return the tensors of every rank, in rank order. Names and shapes may differ between ranks."""
    channel = current_channel()
    return [dict(tensors)] if channel is None else channel.gather_tensors(tensors, name)


def broadcast_tensors(tensors: Mapping[str, "Tensor"], name: str = "broadcasting tensors") -> dict[str, "Tensor"]:
    """Return the tensors of rank 0 on every rank. The tensors of other ranks are ignored."""
    channel = current_channel()
    return dict(tensors) if channel is None else channel.broadcast_tensors(tensors, name)


def all_reduce_sum(tensors: Sequence["Tensor"], name: str = "summing tensors") -> None:
    """Replace each tensor by its sum over all ranks, in place. Shapes and dtypes must agree between ranks."""
    channel = current_channel()
    if channel is not None and tensors:
        channel.all_reduce_sum(tensors, name)


def shard(items: Sequence[T]) -> Sequence[T]:
    """Return the items of this rank: item i belongs to rank i modulo the number of ranks."""
    return items[rank() :: world_size()]


def interleave(shards: Iterable[Sequence[T]]) -> list[T]:
    """Undo `shard`: return the first item of every rank, then the second of every rank, and so on."""
    missing: Any = object()
    rounds = zip_longest(*shards, fillvalue=missing)
    return [item for items in rounds for item in items if item is not missing]


def batch_offsets(lengths: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Number the rows of all ranks in the order of `interleave`.

    Args:
        lengths: Number of rows of each batch, per rank.

    Returns:
        The number of the first row of each batch of this rank, and the number of rows of all ranks.
    """
    this_rank = rank()
    batches = interleave([(index == this_rank, length) for length in part] for index, part in enumerate(lengths))
    starts = list(accumulate((length for _, length in batches), initial=0))
    return [start for start, (is_of_this_rank, _) in zip(starts, batches, strict=False) if is_of_this_rank], starts[-1]


def init_from_torchrun() -> None:
    """Join the group that torchrun started this process for. Does nothing without torchrun, or if it is joined."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return
    from torch import cuda, distributed  # noqa: PLC0415  # torch takes seconds to load

    if distributed.is_initialized():
        return
    backend, env = "nccl" if cuda.is_available() else "gloo", os.environ
    if not is_restarted():
        distributed.init_process_group(backend)
        return
    # torchrun's store still holds the addresses of the ranks of the last attempt, so this attempt needs its own prefix.
    torchrun_store = distributed.TCPStore(  # type: ignore[attr-defined]  # not in its __all__
        env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False
    )
    store = distributed.PrefixStore(  # type: ignore[attr-defined]
        f"restart {env['TORCHELASTIC_RESTART_COUNT']}", torchrun_store
    )
    distributed.init_process_group(backend, store=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]))


def is_restarted() -> bool:
    """Whether torchrun started this process again, after a rank had died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

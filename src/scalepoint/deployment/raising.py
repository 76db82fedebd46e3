"""What `max_drop` tries: more precision where it removes most error for its cost, then less again, until no file that
costs less still holds.

    0          the config as it was given
    1          ranges by the other method: free at run time
    upwards    along the front of the allocation (measured after the solver), until a file holds
    downwards  of what held, only the layers that remove most error, half as many at a time; then the middle between
               what failed and what held, by cost; then single layers lowered again

    cost = share of the float model's size + share of its time

Each file is judged by the user's metric; the estimate only says which to try.
"""

from collections.abc import Mapping, Sequence

from scalepoint.allocation import AS_IT_IS, Allocation, Choice, Widths, front, thinned, trimmed
from scalepoint.deployment.trials import Bar, Step, Trial
from scalepoint.quantize.config import FLOAT
from scalepoint.report import Raised

LEAST, MOST = 0.1, 0.5  # how much of the error may stay after a step upwards
TRIM = 0.1  # of the error: what removes less is not raised
MOST_POINTS = 64  # of the front: a search looks at few of them
LAST = 0.1  # the last of the allowed files goes further


def start_of(trials: Sequence[Trial]) -> int:
    """The trial whose config is raised: the better of those that were not allocated."""
    plain = [index for index, trial in enumerate(trials) if trial.chosen is None]
    return max(plain, key=lambda index: (trials[index].rank, -index))


def next_step(trials: Sequence[Trial], widths: Widths, bar: Bar, *, is_last: bool = False) -> Step | None:
    """The next file to try; None when no other could be better."""
    start = start_of(trials)
    points = _points(widths)
    tried = {_key(trial.chosen): bar.holds(trial.score) for trial in trials if trial.chosen is not None}
    tried[_key(unraised(widths))] = False
    known = {place: tried[_key(point.chosen)] for place, point in enumerate(points) if _key(point.chosen) in tried}
    holding = min((place for place, holds in known.items() if holds), default=None)
    failing = max((place for place in known if not known[place] and place < (holding or len(points))), default=-1)
    if holding is None:
        chosen = _up(points, failing, _share(trials, bar, is_last=is_last))
    else:
        chosen = _fewer(widths, trials, tried, bar)
        if chosen is None and holding - failing > 1:
            chosen = _middle(points, failing, holding)
        chosen = chosen or _lowered(widths, trials, tried, bar)
    if chosen is None:
        return None
    base = sum(choices[AS_IT_IS].cost for choices in _table(widths).values())
    config = widths.config(trials[start].config, chosen.chosen)
    return Step(config, _raised(widths, chosen), start, dict(chosen.chosen), max(chosen.cost - base, 0.0))


def unraised(widths: Widths) -> dict[str, str]:
    """All layers as they are."""
    return dict.fromkeys((row.name for row in widths.rows), AS_IT_IS)


def _points(widths: Widths) -> list[Allocation]:
    """The front without what is hardly worth raising, as long as one layer with weights stays quantized: otherwise
    there is nothing to deploy."""
    weighted = [row.name for row in widths.rows if row.weights]
    items = widths.items("cost")
    lowered = [trimmed(items, point, TRIM) for point in thinned(front(items), MOST_POINTS)]
    points = sorted({_key(each.chosen): each for each in lowered}.values(), key=lambda point: point.cost)
    return [each for each in points if not weighted or any(each.chosen[name] != FLOAT for name in weighted)]


def _key(chosen: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((chosen or {}).items()))


def _share(trials: Sequence[Trial], bar: Bar, *, is_last: bool) -> float:
    """How much of the error may stay: the drop is taken to follow it."""
    drop = min(bar.drop(trial.score) for trial in trials)
    share = min(max((bar.max_drop or 0.0) / drop if drop > 0 else MOST, LEAST), MOST)
    return share * LAST if is_last else share


def _up(points: Sequence[Allocation], failing: int, share: float) -> Allocation | None:
    higher = points[failing + 1 :]
    if not higher:
        return None
    before = points[max(failing, 0)].error
    return next((point for point in higher if point.error <= share * before), higher[-1])


def _fewer(
    widths: Widths, trials: Sequence[Trial], tried: Mapping[tuple[tuple[str, str], ...], bool], bar: Bar
) -> Allocation | None:
    """Of the layers that the cheapest file that holds has raised, those that remove most error: in the middle between
    all of them and the most that were too few."""
    table, best = _table(widths), _cheapest(trials, bar)
    gains = {name: table[name][AS_IT_IS].error - table[name][width].error for name, width in best.items()}
    order = sorted((name for name, width in best.items() if width != AS_IT_IS), key=lambda name: -gains[name])

    def kept(count: int) -> dict[str, str]:
        first = set(order[:count])
        return {name: width if name in first else AS_IT_IS for name, width in best.items()}

    few = max((count for count in range(len(order)) if tried.get(_key(kept(count))) is False), default=0)
    if len(order) - few < 2:
        return None
    return _allocation(table, kept((len(order) + few) // 2))


def _cheapest(trials: Sequence[Trial], bar: Bar) -> Mapping[str, str]:
    """What the cheapest file that holds has chosen."""
    best = min((trial for trial in trials if trial.chosen is not None and bar.holds(trial.score)), key=_cost_of)
    assert best.chosen is not None  # noqa: S101  # as asked
    return best.chosen


def _allocation(table: Mapping[str, Mapping[str, Choice]], chosen: Mapping[str, str]) -> Allocation:
    picked = [table[name][width] for name, width in chosen.items()]
    return Allocation(chosen, sum(each.error for each in picked), sum(each.cost for each in picked))


def _middle(points: Sequence[Allocation], failing: int, holding: int) -> Allocation:
    """Between the two, by cost."""
    low = points[failing].cost if failing >= 0 else points[0].cost
    wanted = (low + points[holding].cost) / 2
    return min(points[failing + 1 : holding], key=lambda point: abs(point.cost - wanted))


def _lowered(
    widths: Widths, trials: Sequence[Trial], tried: Mapping[tuple[tuple[str, str], ...], bool], bar: Bar
) -> Allocation | None:
    """The cheapest that holds with one layer lowered: where that adds least error for what it saves, and less than what
    failed has."""
    table, best = _table(widths), _cheapest(trials, bar)
    now_at = _allocation(table, best)
    error, cost = now_at.error, now_at.cost
    bad = [sum(table[name][width].error for name, width in key) for key, holds in tried.items() if not holds]
    found = []
    for name, width in best.items():
        now = table[name][width]
        for other in (each for each in table[name].values() if each.cost < now.cost):
            more, saved = other.error - now.error, now.cost - other.cost
            chosen = {**best, name: other.name}
            if _key(chosen) not in tried and error + more < min(bad):
                found.append((more / saved, name, Allocation(chosen, error + more, cost - saved)))
    return min(found, key=lambda each: each[:2])[2] if found else None


def _cost_of(trial: Trial) -> float:
    return trial.cost


def _table(widths: Widths) -> dict[str, dict[str, Choice]]:
    """Error and cost of every row at each of its widths."""
    return {item.name: {each.name: each for each in item.choices} for item in widths.items("cost")}


def _raised(widths: Widths, chosen: Allocation) -> tuple[Raised, ...]:
    """What is other than it was, the most worthwhile first."""
    table, found = _table(widths), []
    for row in widths.rows:
        to, share = chosen.chosen[row.name], len(row.layers)
        if to == AS_IT_IS:
            continue
        before, after = table[row.name][AS_IT_IS], table[row.name][to]
        gain, cost = (before.error - after.error) / share, (after.cost - before.cost) / share
        found += [Raised(layer, to, gain, cost) for layer in row.layers]
    return tuple(sorted(found, key=lambda each: -(each.gain or 0.0) / max(each.cost, 1e-12)))

"""The rate that holds on tasks nobody tuned: begin where feedback usually suffices, probe at once,
and back off where quality falls.

Error feedback keeps what a rate leaves out, so the error of the model is no more than what waits on
the devices, and averages of models lose most of that. What a rate must not do is keep the mean
update from going its way, and that the server can measure without any knowledge of the task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedpress_protocols.defaults import SMALL
from fedpress_protocols.policies import LEAST_COMPARED, Auto, Comparison, Pace, Rung
from fedpress_strategies.policies.facts import Facts

_SAFE = 3
"""Rungs above the hardest at which a task begins that cannot be probed."""
_RECENT = 5
"""Models whose losses are taken together."""
_BARRED = 4
"""Windows for which a rung that was given up is not tried again."""
_NEW = 3
"""Windows for which a rung that may not be the last is probed in each."""
_FADING = 0.7
"""The weight of a probe relative to the next one."""
_STEP = 0.85
"""An upper bound on the share of the progress that the next more compressed profile keeps."""
_SURE = 2
"""Probes that must agree before the rate is lowered: one alone tells little."""
_REGAINED = 0.1
"""The share of its whole descent by which a loss must rise to count: one that is near zero may
double by chance."""
_GENTLER = 1.5
"""By how many times the next gentler profile's bodies may be larger."""
_SELDOM = 9
"""Uploads of a client in the whole task at which the floor holds as it is."""
_LONG = 90
"""Rounds beyond which more of them lower the floor no further: what a residual keeps is as old as
before, and the model has moved on as far."""
_MARGIN = 1.35
"""A progress below the floor by this factor says that the task is a sensitive one: what it is to
have from then on lies above the floor by as much, and so does what a task goes back to where
clients upload seldom, at most."""
_DOUBT = 3.0
"""Times the uploads from which it is not sure enough that clients upload seldom to probe again."""
_LOWEST = 0.55
"""The share of the floor that holds for clients that upload often."""
_HALVINGS = 20
_FEW = 3
"""Models whose losses are taken together to tell whether momentum does harm."""
_BEGUN = 0.1
"""The share of the first model's loss by which it has fallen once training has begun."""
_BEGINNING = 0.2
"""The share of the rounds after which it has begun in any case."""
_ABOVE, _OF_DESCENT = 0.15, 0.05
"""The shares of the least loss, and of the descent to it, by which it has risen if it is above."""
_JUMP, _JUMP_OF_DESCENT = 0.25, 0.1
"""The shares of a model's loss, and of the descent so far, by which the next one's is above it if
the step between them went too far."""
_CALM = 10
"""The models after such a step that have less momentum: as many rounds as momentum of .8 takes to
forget nine tenths of an update."""
_TWICE = 2
"""Rungs by which flat updates of clients that upload seldom are gentler still, for twice the bits:
what waits is mostly never sent."""
_LESS_MOMENTUM = 0.5
"""The most momentum where updates are flat, and of models with running statistics."""
_ROUNDS_THAT_TELL = 2
"""Rounds after which a server can know that the same clients come again. A simulation knows before
and does not act on it sooner, so that it makes the same models."""
_SAME = 1.5
"""Times the cohort up to which the clients are mostly the same in each round: there a jump of the
loss is not that of others, and momentum has fewer of their differences to even out."""


def first_pace(auto: Auto, facts: Facts, hardest: Rung) -> tuple[Pace, str]:
    """The pace of the first round and its reason: a cohort that is too small for a probe begins
    less compressed, as it learns of a fault late."""
    first = _hardest(auto, facts, hardest)
    if not _can_probe(auto, facts):
        first, why = max(0, first - _SAFE), "begin gentle"
    elif first < hardest:
        some = "1 profile" if hardest - first == 1 else f"{hardest - first} profiles"
        above = f"begin {some} above the most compressed"
        is_of_model = facts.has_statistics and hardest - first == auto.statistics_reserve
        seldom = "as far as is known, clients upload seldom"
        why = f"{above}: {'the model has BatchNorm' if is_of_model else seldom}"
    else:
        why = "begin at the most compressed profile"
    return Pace(rung=first, probe_at=auto.window), why


def probes(auto: Auto, pace: Pace, facts: Facts) -> bool:
    """Whether the round that `facts` are of is a probe."""
    return _can_probe(auto, facts) and facts.number >= pace.probe_at


def next_pace(
    auto: Auto, before: Pace, facts: Facts, comparison: Comparison | None, hardest: Rung
) -> tuple[Pace, str]:
    """The pace of the round that `facts` are of, no harder than `hardest`, and the reason for what
    it changes; `comparison` is of the previous round, if that was a probe with enough uploads."""
    if (auto.reserve or auto.flat_reserve) and not before.probes and facts.number <= auto.window:
        begun, _ = first_pace(auto, facts, hardest)
        if begun.rung > before.rung:
            return before.model_copy(update={"rung": begun.rung}), "harder: the same clients come"
    hardest, number = _hardest(auto, facts, hardest), facts.number
    if hardest < before.rung:  # what probes have told was of a harder profile
        back = {"rung": hardest, "since": number, "probes": 0, "inner": 0.0, "norm": 0.0}
        back["probe_at"] = number - 1 + auto.window
        why = "updates are flat" if facts.are_flat else "clients upload seldom"
        return before.model_copy(update=back), f"gentler: {why}"
    rung = before.rung
    changes: dict[str, float] = {"rung": rung}
    if comparison is not None and comparison.progress is not None:
        changes |= {
            "inner": _FADING * before.inner + comparison.inner,
            "norm": _FADING * before.norm + comparison.norm,
            "probes": before.probes + 1,
        }
    pace = before.model_copy(update=changes)
    moved, why = _moved(auto, pace, facts, comparison, hardest)
    changes = {"rung": moved}
    if number > before.probe_at or moved != rung:
        is_new = moved != rung or (rung < hardest and number - pace.since < _NEW * auto.window)
        is_first = pace.probes > before.probes and pace.probes < _SURE
        is_new |= is_first and _is_slow(auto, pace, facts)
        changes["probe_at"] = number - 1 + (auto.window if is_new else auto.every)
    if moved != rung:
        changes |= {"since": number, "probes": 0}
    if moved > rung:  # the probes were of a gentler profile
        changes |= {"inner": pace.inner * _STEP ** (moved - rung)}
    if moved < rung:
        changes |= {"barred": number + _BARRED * auto.window, "inner": 0.0, "norm": 0.0}
        changes |= {"far_short": pace.far_short or _is_far_short(auto, pace, facts)}
    return pace.model_copy(update=changes), why


def next_momentum(auto: Auto, facts: Facts) -> tuple[float | None, str]:
    """The most momentum of the round that `facts` are of, None for all that there is, and why.

    Momentum makes good what a rate costs in speed. Where updates have little in common it mostly
    repeats their noise: before a model has learnt anything, and where the clients' rate is near the
    one at which training diverges. There the loss does not fall, or it rises. Where the same
    clients train for long in every round, their mean update is most of the way already, and several
    times that overshoots: there the loss goes up and down by a lot. Few clients that change are
    another matter: momentum evens out what they differ by. Flat updates, such as Adam's, get no
    shorter near the optimum, and overshoot it. Running statistics come with the model that devices
    have measured, and momentum takes the weights away from it."""
    if auto.careful_momentum is None:
        return None, ""
    goes: tuple[float | None, str] = (None, "more momentum: no loss speaks against it")
    if facts.are_flat or facts.has_statistics:
        cause = "updates are flat" if facts.are_flat else "the model has BatchNorm"
        goes = _LESS_MOMENTUM, f"momentum {_LESS_MOMENTUM}: {cause}"
    careful = min(auto.careful_momentum, 1.0 if goes[0] is None else goes[0])
    are_the_same = facts.population is not None and facts.population <= _SAME * facts.size
    come_again = are_the_same and facts.number > _ROUNDS_THAT_TELL
    if facts.size < SMALL and not come_again:
        return goes
    losses = [loss for loss in facts.losses if loss is not None]
    jump = _jump(losses) if are_the_same else None
    if jump is not None:
        now = "the loss went from {:.4g} to {:.4g} with the next model".format(*jump)
        return careful, f"less momentum: {now}"
    means = [sum(losses[stop - _FEW : stop]) / _FEW for stop in range(_FEW, len(losses) + 1)]
    is_early = facts.number <= 1 + _BEGINNING * facts.rounds
    waits = careful, "less momentum until the loss falls"
    if not means:
        return waits if is_early and (losses or facts.number <= auto.window) else goes
    first, newest, least = losses[0], means[-1], min(means)
    if is_early and least > first - _BEGUN * abs(first):
        return waits
    if newest > least + _ABOVE * abs(least) + _OF_DESCENT * max(0.0, first - least):
        now = f"the loss of the last {_FEW} models is {newest:.4g}, after {least:.4g}"
        return careful, f"less momentum: {now}"
    return goes


def _jump(losses: Sequence[float]) -> tuple[float, float] | None:
    """The newest jump of the loss in the last `_CALM` models: before and after it."""
    for after in range(len(losses) - 1, max(0, len(losses) - 1 - _CALM), -1):
        descent = max(0.0, losses[0] - min(losses[: after + 1]))
        rise = losses[after] - losses[after - 1]
        if rise > max(_JUMP * abs(losses[after - 1]), _JUMP_OF_DESCENT * descent):
            return losses[after - 1], losses[after]
    return None


def _moved(
    auto: Auto, pace: Pace, facts: Facts, comparison: Comparison | None, hardest: Rung
) -> tuple[Rung, str]:
    """The rung to go to, and why."""
    rung, is_settled = pace.rung, facts.number - pace.since >= auto.window
    over = _over_budget(auto, facts)
    if over:
        return (rung + 1, over) if rung < hardest else (rung, f"{over}, at the hardest profile")
    if not is_settled:
        return rung, ""
    fault, back = _fault(auto, pace, facts)
    if fault:
        if rung == 0:
            return rung, "" if comparison is None else f"{fault}, at the gentlest profile"
        back = min(rung, back)
        while back and not _may_spend(auto, facts, back):
            back -= 1
        if not back:
            return rung, f"{fault}, and upload_bytes leave no room for a gentler profile"
        return rung - back, f"gentler: {fault}"
    if rung < hardest and facts.number >= pace.barred:
        progress = _progress(pace)
        if progress is None and not _can_probe(auto, facts):
            if facts.are_flat and _uploads_of_a_client(facts) < _SELDOM:
                return rung, ""  # what waits is much, and most of it would never be sent
            return rung + 1, "harder: nothing measured speaks against it"
        least = floor_of(auto, facts) * (_MARGIN if pace.far_short else 1.0)
        if progress is not None and _STEP * progress >= least:
            return rung + 1, f"harder: compressed updates go {progress:.2f} of the way"
    return rung, ""


def _progress(pace: Pace) -> float | None:
    """As pooled over the probes; None where none told any."""
    return pace.inner / pace.norm if pace.norm > 0 else None


def _can_probe(auto: Auto, facts: Facts) -> bool:
    return auto.sketch > 0 and facts.size >= LEAST_COMPARED


def floor_of(auto: Auto, facts: Facts, doubt: float = 1.0) -> float:
    """The floor of the task's progress, lower where clients upload often, higher where seldom.

    A residual is sent with the client's next uploads. At a progress of p an update is under way for
    about 1 / p of the client's uploads, so of `uploads` in the whole task 1 / (p * uploads) is the
    share of the task by which the model lags: the same at a progress that is lower by as much as
    the uploads are more, those of `_LONG` rounds at most. Of few uploads it is what a client keeps
    to the end that counts: the floor is where as much of all updates arrives as at `auto.floor`
    with `_SELDOM` uploads. It is not raised if clients may upload `_SELDOM` times, or `doubt` times
    as often.
    """
    uploads = _uploads_of_a_client(facts)
    is_known = facts.population is not None and auto.floor > 0
    if not is_known or _most_uploads(facts) >= doubt * _SELDOM or uploads >= _SELDOM:
        counted = uploads * min(1.0, _LONG / facts.rounds)
        return auto.floor * max(_LOWEST, min(1.0, _SELDOM / counted if counted else 1.0))
    due, least, most = _arriving(auto.floor, _SELDOM), auto.floor, 1.0
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if _arriving(middle, uploads) < due else (least, middle)
    return most


def _arriving(progress: float, uploads: float) -> float:
    """The share of a client's updates that has arrived when the task ends: of one that `n` uploads
    have followed, all but (1 - progress) ** (n + 1)."""
    uploads = max(1.0, uploads)
    kept = 1 - progress
    return 1 - kept * (1 - math.pow(kept, uploads)) / (progress * uploads)


def _uploads_of_a_client(facts: Facts) -> float:
    """In the whole task; 0 where the number of clients is not known."""
    if facts.population is None:
        return 0.0
    return facts.rounds * min(1.0, facts.size / facts.population)


def _most_uploads(facts: Facts) -> float:
    """The most that a client's uploads in the whole task may be."""
    fewest = facts.population if facts.least_population is None else facts.least_population
    return facts.rounds * min(1.0, facts.size / fewest) if fewest else math.inf


def _hardest(auto: Auto, facts: Facts, hardest: Rung) -> Rung:
    """The most compressed profile for clients that upload as often as these, updates as flat, and
    a model with running statistics or none.

    A flat update is sent a few rows at a time, so that all of its values wait as long; of others
    the large values, which training follows most closely, hardly do. The loss of weights before a
    BatchNorm layer does not depend on their length (Arora et al. 2019, arXiv:1812.03981, Section
    2): the error of compression makes them longer, and every step after that shorter."""
    is_seldom = _uploads_of_a_client(facts) < _SELDOM
    kept = auto.reserve if is_seldom else 0
    if facts.are_flat and auto.flat_reserve:
        kept = max(kept, auto.flat_reserve + (_TWICE if is_seldom else 0))
    if facts.has_statistics:
        kept = max(kept, auto.statistics_reserve)
    return max(0, hardest - kept)


def _is_slow(auto: Auto, pace: Pace, facts: Facts) -> bool:
    """Whether the pooled progress is below the floor, or may be."""
    progress = _progress(pace)
    return progress is not None and progress < floor_of(auto, facts, _DOUBT)


def _is_far_short(auto: Auto, pace: Pace, facts: Facts) -> bool:
    progress = _progress(pace)
    return progress is not None and progress * _MARGIN < floor_of(auto, facts)


def _rungs_back(auto: Auto, pace: Pace, facts: Facts) -> int:
    """The rungs to go back for a fault: as many as bring the progress to the floor, or `_MARGIN`
    times that, if each brings it `_STEP` nearer to 1 or less. The seldomer clients upload, the
    nearer it is to the latter, since what they keep meanwhile is lost."""
    progress, floor = _progress(pace), floor_of(auto, facts)
    if progress is None or not 0 < progress < floor:
        return 1
    wider = _MARGIN if _is_far_short(auto, pace, facts) else floor / auto.floor
    aim = floor * min(max(1.0, wider), _MARGIN)
    return math.ceil(math.log(progress / aim) / math.log(_STEP))


def _fault(auto: Auto, pace: Pace, facts: Facts) -> tuple[str, int]:
    """The reason to lower the compression rate, "" if there is none, and by how many rungs: for a
    loss, one for each time that it rose by `auto.rise`, up to `_SAFE`, and no fewer than for the
    progress."""
    progress, floor, back = _progress(pace), floor_of(auto, facts), _rungs_back(auto, pace, facts)
    if pace.probes >= _SURE and progress is not None and progress < floor:
        return f"compressed updates go {progress:.2f} of the way, less than {floor:.2g}", back
    measured = [(model, loss) for model, loss in enumerate(facts.losses) if loss is not None]
    newest = [loss for model, loss in measured[-_RECENT:] if model >= pace.since]
    values = [loss for _, loss in measured]
    if len(newest) < _RECENT or len(values) < 2 * _RECENT:
        return "", 0
    level = sum(newest) / _RECENT
    best = min(sum(values[stop - _RECENT : stop]) / _RECENT for stop in range(_RECENT, len(values)))
    regained = _REGAINED * (values[0] - best)
    if level > best + max(auto.rise * abs(best), regained, 2 * _error(newest)):
        times = math.log(level / best) / math.log1p(auto.rise) if best > 0 else 1.0
        back = max(back, min(round(times), _SAFE))
        return f"the loss of the last {_RECENT} models is {level:.4g}, after {best:.4g}", back
    return "", 0


def _error(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((each - mean) ** 2 for each in values) / (len(values) - 1) / len(values))


def _over_budget(auto: Auto, facts: Facts) -> str:
    """Why the rate must rise for the budget of bytes; "" if it need not."""
    if auto.upload_bytes is None or not facts.uploaded:
        return ""
    rounds_left = facts.rounds - facts.number + 1
    spent, usual = sum(facts.uploaded), facts.uploaded[-1]
    if spent + rounds_left * usual <= auto.upload_bytes:
        return ""
    return (
        f"harder: {spent:,} bytes came in, and {rounds_left} rounds of {usual:,} would go beyond "
        f"upload_bytes of {auto.upload_bytes:,}"
    )


def _may_spend(auto: Auto, facts: Facts, rungs: int) -> bool:
    """Whether the budget of bytes allows for profiles that are so many rungs gentler."""
    if auto.upload_bytes is None or not facts.uploaded:
        return True
    rounds_left = facts.rounds - facts.number + 1
    each = _GENTLER**rungs * facts.uploaded[-1]
    return sum(facts.uploaded) + rounds_left * each <= auto.upload_bytes

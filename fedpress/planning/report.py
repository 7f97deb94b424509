"""`fedpress plan`'s answer: a table for people, the same figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedpress.compressor_option import compressor_from_option
from fedpress.compressor_table import aligned
from fedpress.planning.choice import Choice, Row, choose, counted, seconds
from fedpress.planning.costs import cost
from fedpress.planning.downlink import Downlink, downlink
from fedpress.planning.profiles import AUTO, MEASURED_ON, Candidate, candidates
from fedpress.planning.situation import Situation
from fedpress.planning.trial import Measured, Trial, checked, rate_of_auto, tried
from fedpress.planning.trial import to_json as trial_to_json
from fedpress.planning.updates import Drawn
from fedpress_compression import kernels
from fedpress_compression.compressor import to_config
from fedpress_protocols.errors import ConfigurationError, IncompatiblePlan
from fedpress_protocols.plan import MaskingTerms

_HEADINGS = (
    *("profile", "up", "times less", "down", "up s", "codec s", "round s", "in time"),
    "all up",
)
_LOSS = "loss on digits"
_TRIAL_HEADINGS = (
    *("trial", "body expected", "measured", "times less", "nmse", "accuracy %", "loss"),
)


@dataclass(frozen=True)
class Report:
    """The rows that could be measured, why others could not, and what follows."""

    situation: Situation
    down: Downlink
    rows: tuple[Row, ...]
    refused: dict[str, str]
    choice: Choice
    trial: Trial | None = None
    measured: Mapping[str, Measured] = field(default_factory=dict)
    """In a trial, by profile."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; docs/planning.md says what each key is."""
        asked, best = self.situation, self.choice.row
        return {
            "model": {
                "name": asked.model,
                "parameters": asked.spec.size,
                "bytes": asked.model_bytes,
            },
            "lane": asked.lane,
            "link_mbit": {"up": asked.up, "down": asked.down},
            "cohort": asked.cohort,
            "rounds": asked.rounds,
            "compute_seconds": asked.compute,
            "deadline_seconds": asked.deadline,
            "device_slowdown": asked.slowdown,
            "kernels": kernels.CHOSEN,
            "download_bytes": {"each_round": self.down.each, "anew": self.down.anew},
            "profiles": [_plain(row, self) for row in self.rows],
            "refused": self.refused,
            "recommended": "none" if best is None else best.candidate.name,
            "reason": self.choice.reason,
            "loss_measured_on": MEASURED_ON[asked.lane],
            "trial": None
            if self.trial is None
            else trial_to_json(self.trial, asked, self.measured),
        }

    def to_text(self) -> str:
        """The table, the recommendation, and what the figures leave out."""
        asked = self.situation
        lines = [
            f"{asked.model}: {asked.spec.size:,} parameters, {_bytes(self.down.anew)} to "
            f"download anew; {counted(asked.cohort, 'device')} a round, "
            f"{counted(asked.rounds, 'round')}, {asked.lane} lane",
            f"links {asked.up:g} Mbit/s up, {asked.down:g} down; {seconds(asked.compute)} of "
            f"training; codec CPU of this machine ({kernels.CHOSEN}) x {asked.slowdown:g}",
            "",
            *aligned([self._headings, *(self._cells(row) for row in self.rows)]),
        ]
        lines += [f"{name}: {why}" for name, why in self.refused.items()]
        lines += [f"{AUTO}: {r.candidate.advice}" for r in self.rows if r.candidate.name == AUTO]
        lines += self._of_trial()
        best = self.choice.row
        lines += ["", f"recommended: {'none' if best is None else best.candidate.name}"]
        lines.append(f"  {self.choice.reason}")
        if best is not None:
            if best.candidate.advice:
                lines.append(f"  goes with: {best.candidate.advice}")
            if best.candidate.name != AUTO:
                lines.append(f"  compressor: {json.dumps(best.candidate.config)}")
        lines += self._of_losses()
        factor = max(row.cost.factor for row in self.rows)
        if factor > 1:
            lines.append(f"measured on a part of the model and multiplied by {factor:,.1f}")
        return "\n".join(lines)

    def _of_losses(self) -> list[str]:
        on = (
            "loss on digits: points below float32 with momentum, "
            f"{MEASURED_ON[self.situation.lane]}"
        )
        if self.trial is None:
            return [
                "",
                on,
                "loss: unknown for your model, and the recommendation rests on that of the digits; "
                "--trial --app module:factory measures yours",
            ]
        return [
            "",
            on,
            f"loss in the trial: points below float32 on {self.trial.subject}; "
            f"{counted(self.trial.rounds, 'round')} {'tells' if self.trial.rounds == 1 else 'tell'}"
            " how a task begins, not where it ends",
        ]

    def _of_trial(self) -> list[str]:
        """The trial's results beside what was expected."""
        if self.trial is None:
            return []
        trial, cohort = self.trial, self.trial.cohort(self.situation)
        base = self.measured[self._baseline.candidate.name]
        rows = []
        for row in self.rows:
            result = self.measured[row.candidate.name]
            is_baseline = row.candidate.baseline
            rows.append(
                (
                    row.candidate.name,
                    _bytes(row.cost.body),
                    _bytes(result.body),
                    "" if is_baseline else f"{base.body / result.body:,.0f}",
                    "" if result.nmse is None else f"{result.nmse:.3f}",
                    "unknown" if result.accuracy is None else f"{result.accuracy:.1f}",
                    ""
                    if is_baseline
                    else "unknown"
                    if result.loss is None
                    else f"{round(result.loss, 1) + 0.0:.1f}",  # no -0.0
                )
            )
        rounds = counted(trial.rounds, "round")
        averaged = "of that round"
        if trial.averaged > 1:
            averaged = f"means of the last {trial.averaged} rounds"
        return [
            "",
            f"trial on {trial.subject}: {rounds}, {cohort} of {trial.clients} clients each, seed "
            f"{trial.seed}, strategy {trial.strategy} (auto has its own, and "
            f"{rate_of_auto(self.situation):g} bit a value or more); accuracies are {averaged}",
            "",
            *aligned([_TRIAL_HEADINGS, *rows]),
            *self._discards(),
        ]

    def _discards(self) -> list[str]:
        """A line for each profile that lost updates to the model in the trial."""
        return [
            f"{name}: {counted(sum(each.discards.values()), 'update')} lost to the model, in whole "
            f"or in part: {', '.join(each.discards)}"
            for name, each in self.measured.items()
            if each.discards
        ]

    def _cells(self, row: Row) -> tuple[str, ...]:
        asked, base = self.situation, self._baseline
        loss = row.candidate.loss
        return (
            row.candidate.name,
            _bytes(row.upload),
            "" if row.candidate.baseline else f"{base.upload / row.upload:,.0f}",
            _bytes(row.download),
            _short(row.up_seconds),
            _short(row.codec_seconds),
            _short(row.round_seconds),
            "yes" if row.in_time else "no",
            _bytes(asked.cohort * asked.rounds * row.upload),
            *((f"{self.money(row):,.2f}",) if asked.price_gb else ()),
            "" if row.candidate.baseline else "unknown" if loss is None else f"{loss:.1f}",
        )

    def money(self, row: Row) -> float:
        """The price of all devices' bytes in both directions, over all rounds."""
        asked = self.situation
        return asked.cohort * asked.rounds * (row.upload + row.download) * asked.price_gb / 1e9

    @property
    def _headings(self) -> tuple[str, ...]:
        return (*_HEADINGS, *(("money",) if self.situation.price_gb else ()), _LOSS)

    @property
    def _baseline(self) -> Row:
        return next(row for row in self.rows if row.candidate.baseline)


def planned(
    situation: Situation,
    own: Sequence[str] = (),
    real: Drawn | None = None,
    trial: Trial | None = None,
    on_start: Callable[[str], None] = lambda name: None,
) -> Report:
    """Measure every sensible profile in `situation`, and the compressors `own` besides; on `real`
    updates if there are any, else on drawn ones. After a `trial`, which tells `on_start` what it
    begins with, the recommendation goes by the losses in it.

    Raises ConfigurationError for a compressor that is none, and where the lane takes no upload.
    """
    if trial is not None:
        checked(situation, trial)
    down = downlink(situation)
    compared = [*candidates(situation), *(_own(text, situation) for text in own)]
    rows, refused = [], {}
    for candidate in compared:
        try:
            rows.append(Row.of(candidate, cost(candidate, situation, real), down, situation))
        except IncompatiblePlan as exc:
            if candidate.baseline:
                raise ConfigurationError(f"the {situation.lane} lane: {exc}") from exc
            refused[candidate.name] = str(exc)
    if trial is None:
        return Report(situation, down, tuple(rows), refused, choose(rows, situation))
    measured = tried([row.candidate for row in rows], situation, trial, on_start)
    judged = [replace(row, candidate=_judged(row.candidate, trial, measured)) for row in rows]
    choice = choose(judged, situation)
    if all(each.accuracy is None for each in measured.values()):
        choice = Choice(
            None,
            f"the trainers of {trial.subject} measure no accuracy: let `evaluate` return a number "
            "as `accuracy`",
        )
    return Report(situation, down, tuple(rows), refused, choice, trial, measured)


def _judged(candidate: Candidate, trial: Trial, measured: Mapping[str, Measured]) -> Candidate:
    """The candidate with its loss in the trial, and what that was measured with."""
    strategy = "" if candidate.name == AUTO else f"{trial.strategy}, as in the trial"
    return replace(candidate, loss=measured[candidate.name].loss, strategy=strategy)


def _own(text: str, situation: Situation) -> Candidate:
    masked = situation.lane == "masked"
    if text.partition(":")[0].strip() == AUTO:
        raise _auto_refused(text, masked=masked)
    made = compressor_from_option(text, masked=masked)
    return Candidate(text, to_config(made), masking=MaskingTerms() if masked else None)


def _auto_refused(text: str, *, masked: bool) -> ConfigurationError:
    if masked:
        return ConfigurationError(
            "auto decides in the clear lane alone",
            hint=f"leave --compressor {text} out: a masked task that names no compressor has the "
            "support of 5 % in the table",
        )
    return ConfigurationError(
        "auto is in the table already: it is the default of a task that names no compressor",
        hint=f"leave --compressor {text} out; to measure auto with terms of your own, run "
        f"`fedpress simulate --compressor {text}`",
    )


def _plain(row: Row, report: Report) -> dict[str, Any]:
    whole = report.situation.cohort * report.situation.rounds
    return {
        "name": row.candidate.name,
        "compressor": None if row.candidate.name == AUTO else to_config(row.candidate.made),
        "body_bytes": round(row.cost.body),
        "session_bytes": {"sent": row.cost.sent, "received": row.cost.received},
        "upload_bytes": row.upload,
        "download_bytes": row.download,
        "all_rounds_bytes": {"up": whole * row.upload, "down": whole * row.download},
        "money": report.money(row),
        "seconds": {
            "down": row.down_seconds,
            "codec": row.codec_seconds,
            "up": row.up_seconds,
            "device": row.device_seconds,
            "server": row.round_seconds - row.device_seconds,
            "round": row.round_seconds,
        },
        "in_time": row.in_time,
        "expected_loss_points": row.candidate.loss,
        "goes_with": row.candidate.advice,
        "measured_part": 1 / row.cost.factor,
    }


def _bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return (
                f"{number / size:.3g} {unit}"
                if number < 1000 * size
                else f"{number / size:,.0f} {unit}"
            )
    return f"{number:.0f} B"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"

"""What a compression did, as a value that can be printed and written."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

from relinear.compress.budget import Budget
from relinear.compress.corpus import Corpus
from relinear.compress.corrections import MeasuredPoint
from relinear.compress.heal import HealReport
from relinear.compress.plan import CompressPlan
from relinear.compress.speed import PlannedSpeed
from relinear.system.machine import describe_machine

__all__ = ["CompressReport"]

#: times the original's share of repeated 4-grams from which greedy text is said to degenerate
DEGENERATE = 1.3


@dataclasses.dataclass(frozen=True)
class CompressReport:
    """What a compression did; printing it shows the plan by type of layer and the sizes.

    plan: what every layer became. parameters, parameters_before: of the whole model. calibration_loss: of the original
    on the calibration's tokens, nats a token. seconds: by phase, of this call. budget: what was allowed; None for a
    plan that was given. speed: of the layers by the table, None where it was not measured. points: predictions held
    against measurements. evaluation: the compressed model beside the original (loss, agreement, samples, speed), None
    where it was not measured. peak_memory_bytes: of this call. settings: all of them. healing: None where there was
    none. left: what no target could name, such as experts that are held as one tensor, in words. corpus: the texts.
    bytes, bytes_before: of the whole model, floats at no more than half precision; None where nothing counts them.
    budgets: rows of the frontier. model: its name.
    """

    plan: CompressPlan
    parameters: int
    parameters_before: int
    calibration_tokens: int
    calibration_loss: float | None
    seconds: dict[str, float]
    corpus: Corpus | None = None
    bytes: int | None = None
    bytes_before: int | None = None
    budgets: tuple[dict[str, Any], ...] = ()
    model: str = ""
    healing: HealReport | None = None
    budget: Budget | None = None
    speed: PlannedSpeed | None = None
    points: tuple[MeasuredPoint, ...] = ()
    evaluation: dict[str, Any] | None = None
    peak_memory_bytes: int | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    left: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The result in a sentence; that its text degenerates stands first."""
        if self.bytes is not None and self.bytes_before:
            said = [f"{self.bytes / self.bytes_before:.2f} of the bytes"]
        else:
            said = [f"{self.parameters / self.parameters_before:.2f} of the parameters"]
        if self.speed is not None and self.evaluation is None:
            said.append(f"{self.speed.ratio:.1f} times as fast by the table")
        if self.evaluation is None:
            nats = self.plan.nats
            return ", ".join([*said, "nothing measured" if nats is None else f"{nats:+.2f} nats predicted"])
        found = self.evaluation
        said.append(f"{found['speed']['decode']['ratio']:.1f} times as fast")
        said.append(f"{found['nats']:+.2f} nats on text like yours")
        said += [f"{other['nats']:+.2f} on {name}" for name, other in found["elsewhere"].items()]
        before, after = found["repeated_before"], found["repeated"]
        if before is None:
            return ", ".join(said)
        if after > max(DEGENERATE * before, before + 0.05):
            return (
                f"Its greedy text repeats itself ({after:.0%} of 4-grams, the original's {before:.0%}): "
                + ", ".join(said)
            )
        return ", ".join([*said, "writes as the original does"])

    @property
    def remarks(self) -> list[str]:
        """What should be known of how far the figures tell, in sentences."""
        if self.evaluation is None:
            return []
        found, predicted = [] if self.corpus is None else self.corpus.remarks, self.plan.nats
        nats, interval = self.evaluation["nats"], self.evaluation["interval"] or 0.0
        if predicted is not None and self.healing is None and abs(nats - predicted) > max(abs(nats) / 2, interval):
            found.append(
                f"the plan's prediction of {predicted:+.3f} nats is off by more than half: {nats:+.3f} were measured; "
                "measured_points=3 corrects predictions"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        layers = {name: layer.to_dict() for name, layer in self.plan.layers.items()}
        return {
            "parameters": self.parameters,
            "parameters_before": self.parameters_before,
            "calibration": {"tokens": self.calibration_tokens, "loss": self.calibration_loss}
            | ({} if self.corpus is None else self.corpus.to_dict()),
            "remarks": self.remarks,
            "model": self.model,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "verdict": self.verdict,
            "bytes": self.bytes,
            "bytes_before": self.bytes_before,
            "budgets": list(self.budgets),
            "budget": None if self.budget is None else self.budget.to_dict(),
            "predicted_nats": self.plan.nats,
            "measured_nats": None if self.evaluation is None else self.evaluation["nats"],
            "planned_speed": None if self.speed is None else self.speed.to_dict(),
            "points": [point.to_dict() for point in self.points],
            "evaluation": self.evaluation,
            "peak_memory_bytes": self.peak_memory_bytes,
            "layers": layers,
            "left": list(self.left),
            "seconds": self.seconds,
            "healing": None if self.healing is None else self.healing.to_dict(),
            "settings": self.settings,
            "machine": describe_machine(),
        }

    def __str__(self) -> str:
        share = self.parameters / self.parameters_before
        lines = [f"{self.verdict}.", str(self.plan)]
        lines += [f"whole model: {self.parameters_before:,} -> {self.parameters:,} parameters ({share:.3f})"]
        lines += [f"left as they are: {what}" for what in self.left]
        if self.speed is not None:
            lines.append(str(self.speed))
        if self.healing is not None:
            lines.append(str(self.healing))
        if self.evaluation is not None:
            lines += _evaluation_lines(self.evaluation, self.plan.nats)
        lines += [*map(_budget_line, self.budgets), *self.remarks]
        return "\n".join(lines)


def _plus_minus(found: Mapping[str, Any]) -> str:
    return "" if found["interval"] is None else f" ± {found['interval']:.3f}"


def _budget_line(row: Mapping[str, Any]) -> str:
    measured = "".join(
        f", {found['nats']:+.3f} ± {found['interval'] or 0:.3f} measured on {name}"
        for name, found in ({"the corpus": row["measured"]} | row["elsewhere"] if "measured" in row else {}).items()
    )
    speed = "" if row["speed"] is None else f", {row['speed']:.2f} times as fast by the table"
    share = f"{row['bits']:.2f} bits a weight ({row['share_of_bytes']:.2f} of the bytes)"
    return f"{share}{speed}: {row['predicted']:+.3f} nats predicted{measured}"


def _evaluation_lines(found: Mapping[str, Any], predicted: float | None) -> list[str]:
    where = "tokens that calibration has not seen" if found["unseen"] else "tokens of the calibration"
    expected = "" if predicted is None else f", predicted {predicted:+.3f}"
    speeds = [f"{what} {found['speed'][what]['ratio']:.2f}" for what in ("prefill", "decode")]
    return [
        f"loss on {found['tokens']:,} {where}: {found['loss_before']:.3f} -> {found['loss']:.3f} "
        f"({found['nats']:+.3f}{_plus_minus(found)}{expected}); next token as the original's: {found['agreement']:.1%}",
        *(
            f"loss on {name}: {other['loss_before']:.3f} -> {other['loss']:.3f} "
            f"({other['nats']:+.3f}{_plus_minus(other)})"
            for name, other in found["elsewhere"].items()
        ),
        f"times the original's speed, measured at batch {found['speed']['batch']}: {', '.join(speeds)}",
    ]

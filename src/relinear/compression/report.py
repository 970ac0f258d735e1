"""Report a compression: printed, as JSON, and as a page."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relinear.compression.budget import Budget
from relinear.compression.corpus import CompressionData
from relinear.compression.healing import HealReport
from relinear.compression.plan import CompressPlan, by_type
from relinear.contract.operator import OperatorConfig
from relinear.deprecated import with_attributes_of_0_2
from relinear.pages import page as pages
from relinear.pages.blocks import Part, Section
from relinear.pages.records import about, what_ran
from relinear.system.files import damaged_file_errors
from relinear.system.machine import provenance
from relinear.system.text import columns

#: times the original's share of repeated 4-grams from which greedy text is said to degenerate
DEGENERATE = 1.3


@with_attributes_of_0_2
@dataclasses.dataclass(frozen=True)
class CompressReport:
    """Result of a compression; printing it shows the plan by type of layer and the sizes.

    Attributes:
        plan: what every layer became.
        calibration_tokens: number of tokens that calibrated.
        calibration_loss: the original's loss on them, in nats per token.
        seconds: by phase, of this call.
        parameters_before: number of the original's parameters.
        bytes: bytes of all weights, floats at no more than half precision.
        bytes_before: the original model's bytes, counted in the same way.
        file: name of the file that the program reads.
        file_bytes: its size on disk; None before it is written.
        corpus: the texts.
        model: name of the model.
        healing: None if there was none.
        budget: what was allowed; None for a plan from a file.
        evaluation: the compressed model compared with the original (loss, agreement, repeated text); None if it was
            not measured.
        peak_memory_bytes: peak memory of this call.
        settings: all settings of the compression.
        out_of_reach: what no target can name, such as experts stored as one tensor, in words.
    """

    plan: CompressPlan
    calibration_tokens: int
    calibration_loss: float
    seconds: dict[str, float]
    parameters_before: int
    bytes: int
    bytes_before: int
    file: str
    file_bytes: int | None
    corpus: CompressionData
    model: str
    healing: HealReport | None
    budget: Budget | None
    evaluation: dict[str, Any] | None
    peak_memory_bytes: int
    settings: dict[str, Any]
    out_of_reach: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Return parameters of the whole model after compression."""
        return self.parameters_before - self.plan.parameters_before + self.plan.parameters

    @property
    def verdict(self) -> str:
        """Return the result in a sentence, which starts with degenerate text if there is any."""
        facts = [f"{self.bytes / self.bytes_before:.2f} of the bytes"]
        if self.evaluation is None:
            nats = self.plan.nats
            return ", ".join([*facts, "nothing measured" if nats is None else f"{nats:+z.2f} nats predicted"])
        texts = {"text like yours": self.evaluation, **self.evaluation["elsewhere"]}
        facts += [_loss_change(evaluation, name) for name, evaluation in texts.items()]
        before, after = self.evaluation["repeated_before"], self.evaluation["repeated"]
        if before is None:
            return ", ".join(facts)
        if after > max(DEGENERATE * before, before + 0.05):
            degenerate = f"Its greedy text repeats itself ({after:.0%} of 4-grams, the original's {before:.0%})"
            return f"{degenerate}: {', '.join(facts)}"
        repeats = f"repeats {after:.0%} of 4-grams (the original {before:.0%})"
        return ", ".join([*facts, repeats if after > before else "repeats itself no more than the original"])

    @property
    def remarks(self) -> list[str]:
        """Return warnings about how far the figures can be trusted."""
        if self.evaluation is None:
            return []
        remarks, predicted = self.corpus.remarks, self.plan.nats
        nats = self.evaluation["nats"]
        interval = max(self.evaluation["interval"] or 0.0, 2e-3)  # less may be rounding
        if predicted is not None and self.healing is None and abs(nats - predicted) > max(abs(nats) / 2, interval):
            remarks.append(
                f"the plan's prediction of {predicted:+z.3f} nats is off by more than half: {nats:+z.3f} were measured"
            )
        return remarks

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        copied = ["parameters", "parameters_before", "remarks", "model", "verdict", "bytes", "bytes_before"]
        copied += ["file", "file_bytes", "evaluation", "peak_memory_bytes", "out_of_reach", "seconds", "settings"]
        return {
            **{name: getattr(self, name) for name in copied},
            "budget": self.budget and self.budget.to_dict(),
            "healing": self.healing and dataclasses.asdict(self.healing),
            "calibration": {"tokens": self.calibration_tokens, "loss": self.calibration_loss} | self.corpus.to_dict(),
            "predicted_nats": self.plan.nats,
            "layers": self.plan.rows,
            **provenance(),
        }

    def __str__(self) -> str:
        share = self.parameters / self.parameters_before
        in_bits = self.settings.get("keep") is None
        lines = [f"{self.verdict}.", self.plan.table(in_bits)]
        if not in_bits:
            lines += [f"whole model: {self.parameters_before:,} -> {self.parameters:,} parameters ({share:.3f})"]
        else:
            lines += [f"whole model: {self.bytes_before / 1e6:,.1f} -> {self.bytes / 1e6:,.1f} MB of weights"]
        if self.file_bytes is not None:
            lines += [f"on disk: {self.file}, {self.file_bytes / 1e6:,.1f} MB"]
        lines += [f"not replaced: {layers}" for layers in self.out_of_reach]
        if self.healing is not None:
            lines.append(str(self.healing))
        if self.evaluation is not None:
            lines.append(_evaluation_table(self.evaluation))
        return "\n".join([*lines, *self.remarks])


def _loss_change(evaluation: Mapping[str, Any], where: str) -> str:
    """Return by how much the loss on ``where`` rose, or that no rise or fall was detected."""
    nats, margin = evaluation["nats"], evaluation["interval"]
    if abs(nats) > (margin or 0.0):
        change = f"{nats:+.{2 if abs(nats) >= 5e-3 else 3}f}" if abs(nats) >= 5e-4 else "less than 0.001"
        return f"{change} nats on {where}"
    ends = "" if margin is None else f" (95 % interval {nats - margin:+.2g} to {nats + margin:+.2g} nats)"
    return f"no difference in loss detected on {where}{ends}"


def _evaluation_table(evaluation: Mapping[str, Any]) -> str:
    """Return a table of losses on the corpus and on other texts."""
    where = "unseen text of the corpus" if evaluation["unseen"] else "text of the calibration"
    rows = [("loss, nats per token", "tokens", "original", "compressed", "above", "next token as the original's")]
    for name, one in {where: evaluation, **evaluation["elsewhere"]}.items():
        above = f"{one['nats']:+z.3f}" + ("" if one["interval"] is None else f" ± {one['interval']:.3f}")
        losses = f"{one['loss_before']:.3f}", f"{one['loss']:.3f}"
        rows.append((name, f"{one['tokens']:,}", *losses, above, f"{one['agreement']:.1%}"))
    return columns(rows)


# The page


TEMPLATE = "compression/report.html"


def write_page(path: str | Path, report: Mapping[str, Any]) -> Path:
    """Write the page on ``report`` (the values of report.json); everything is inline, so it can be mailed."""
    return pages.write_page(path, [report_section(report)])


def report_section(report: Mapping[str, Any]) -> Section:
    """Return a page's blocks for ``report``, the values of report.json.

    Raises:
        ValueError: where it lacks what a report has.
    """
    with damaged_file_errors("this", "not a report of a compression", "run the compression again"):
        values = {
            "report": report,
            "types": by_type(report["layers"]),
            "operators": {name: _operator(layer["operator"]) for name, layer in report["layers"].items()},
        }
    note = about(report, report.get("model"))
    return Section("Compression", "compress", [Part(TEMPLATE, values), *what_ran(report)], note=note)


def _operator(values: Mapping[str, Any] | None) -> str:
    return "dense" if values is None else str(OperatorConfig.from_dict(values, is_record=True))

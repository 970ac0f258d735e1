"""Calibration statistics of layers as files, for studies that look at them again and again; ``compress`` keeps none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relinear.compression.calibrate import Calibration
from relinear.compression.layer_statistics import Statistics
from relinear.compression.storage import load_tensors, read_record, save_tensors, write_record
from relinear.contract.calibration_statistics import CalibrationStatistics
from relinear.contract.operator import OperatorConfig


class SavedStatistics:
    """Hold statistics of linear layers in a folder: 16 bytes for each entry of A and G, several times the model."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        values = read_record(self.folder / "moments.json")
        self.tokens, self.loss, self.counts = values["tokens"], values["loss"], values["counts"]
        self.names = list(self.counts)

    @classmethod
    def of(cls, calibration: Calibration, folder: str | Path) -> SavedStatistics:
        """Return those of ``calibration``; measured once."""
        folder, counts = Path(folder), dict[str, int]()

        def keep(statistics: Statistics) -> dict:
            for name, known in statistics.items():
                counts[name] = known.tokens
                tensors = {"A": known.input_moment.clone(), "G": known.gradient_moment.clone()}
                save_tensors(folder / f"{name}.safetensors", tensors)
            return {}

        if not (folder / "moments.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            calibration.map_layers("candidates", f"kept-{folder.name}", keep)
            order = {name: counts[name] for group in calibration.targets.values() for name in group}
            write_record(
                folder / "moments.json", {"tokens": calibration.tokens, "loss": calibration.loss, "counts": order}
            )
        return cls(folder)

    def moments(self, name: str) -> CalibrationStatistics:
        """Return those of the linear layer ``name``."""
        tensors = load_tensors(self.folder / f"{name}.safetensors")
        return CalibrationStatistics(tensors["A"], tensors["G"], self.counts[name])

    def candidate_errors(self, entry: OperatorConfig, name: str, module: Any) -> list[tuple[OperatorConfig, float]]:
        """Return the sizes of ``entry`` for a layer with their errors."""
        return entry.candidate_errors(module, self.moments(name))

"""What is fuzzed: a kind is a file or an argument that commands read, with an example and the code that reads it."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

import relinear
from conftest import make_tiny_llama
from fuzz import mutate
from relinear.compare import recipe, report
from relinear.compare.folder import comparison_folder
from relinear.compare.settings import CompareSettings
from relinear.compression import CompressSettings
from relinear.compression.plan import CompressPlan
from relinear.contract.operator import OperatorConfig
from relinear.data import DataSettings
from relinear.data.sources import local_sources
from relinear.distill.settings import DistillSettings
from relinear.evaluate.language import _lambada_rows
from relinear.settings import yaml_settings
from relinear.surgery.summary import summary
from relinear.training import FitSettings, TrainSettings, fit, read_metrics, read_result
from relinear.training.callbacks import read_moments
from relinear.training.run import build_model
from relinear_cli import options, terminal
from train_helpers import Tokens

__all__ = ["KINDS"]

Case = Callable[[random.Random, Path], None]

#: kind -> (share of the cases, function of a random generator and an empty folder)
KINDS: dict[str, tuple[int, Case]] = {}


def kind(share: int) -> Callable[[Case], Case]:
    def keep(case: Case) -> Case:
        KINDS[case.__name__] = (share, case)
        return case

    return keep


RECIPES = [yaml.safe_load(path.read_text()) for path in sorted(recipe.BUNDLED.glob("*.yaml"))]
TRAIN = {
    "model": "tiny",
    "model_overrides": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "operators": {"up_proj": {"kind": "low_rank", "rank": 4}, "q_proj": "hdpl:rank=4,blocks=4", "down_proj": None},
    "attachments": [{"kind": "context_manager", "dim": 8}],
    "objective": "distill:teacher=nowhere,temperature=2",
    "layers": [0, 1],
    "exclude": ["k_proj"],
    "steps": 10,
    "learning_rate": 1e-3,
    "betas": [0.9, 0.95],
    "data": {"data": "stdlib", "sequence_length": 32, "tokenizer": "bytes"},
}


def examples() -> list[dict[str, Any]]:
    """A setting of every operator and attachment that can be made without arguments."""
    found = []
    for family in (relinear.LowRank, relinear.residual.ReZero):
        for cls in family.kinds().values():
            if not cls.__module__.startswith("relinear."):  # of another test
                continue
            try:
                found.append(cls().to_dict())
            except TypeError:
                continue
    return found


@functools.cache
def settings_examples() -> list[dict[str, Any]]:
    return examples()


def written(value: dict[str, Any], rng: random.Random) -> str:
    try:
        return yaml.safe_dump(value) if rng.random() < 0.7 else json.dumps(value)
    except (RecursionError, yaml.YAMLError, ValueError):
        return json.dumps({"entries": {"a": "dense"}})


@kind(14)
def recipes(rng: random.Random, folder: Path) -> None:
    base = rng.choice([*RECIPES, {"entries": {"a": "dense", "b": rng.choice(settings_examples())}, "train": TRAIN}])
    text = written(mutate.tree(rng, base), rng) if rng.random() < 0.5 else mutate.text(rng, written(base, rng))
    path = folder / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass") if rng.random() < 0.9 else mutate.data(rng, text.encode()))
    CompareSettings.load(recipe.read_recipe(path), path.name)


def build_without_weights(settings: TrainSettings) -> None:
    """Build the model as a run does before it reads data."""
    with torch.device("meta"):
        build_model(settings)


@kind(8)
def training_recipes(rng: random.Random, folder: Path) -> None:
    text = written(mutate.tree(rng, TRAIN), rng) if rng.random() < 0.6 else mutate.text(rng, written(TRAIN, rng))
    (folder / "train.yaml").write_text(text, encoding="utf-8", errors="replace")
    settings = TrainSettings.load(yaml_settings.read_yaml(folder / "train.yaml"), "train.yaml")
    if settings.model == "tiny":
        build_without_weights(settings)


@kind(14)
def overrides(rng: random.Random, folder: Path) -> None:
    values = [
        "steps=3", "learning_rate=1e-3", "data.sequence_length=64", "model_overrides={hidden_size: 32}",
        "operators.q_proj={kind: low_rank, rank: 2}", "betas=[0.9, 0.99]", "layers=[0]", "seed=1",
        "model_overrides.vocab_size=99", "attachments=[rezero]", "objective=distill:teacher=x",
        "data.cache_dir=/x", "report_to=[]",
    ]  # fmt: skip
    given = [mutate.text(rng, text) if rng.random() < 0.7 else text for text in rng.sample(values, rng.randrange(1, 4))]
    if rng.random() < 0.3:
        strange = json.dumps(mutate.strange(rng))
        given.append(f"{rng.choice(values).partition('=')[0]}={strange}")
    loaded = yaml_settings.apply_overrides(copy.deepcopy(TRAIN), yaml_settings.parse_overrides(given))
    settings = TrainSettings.load(loaded, "settings")
    if settings.model == "tiny" and rng.random() < 0.3:
        build_without_weights(settings)


@kind(14)
def operators(rng: random.Random, folder: Path) -> None:
    setting = rng.choice(settings_examples())
    plain = ",".join(f"{key}={json.dumps(value)}" for key, value in setting.items() if key != "kind")
    text = f"{rng.choice(['q_proj=', 'mlp.*=', '', '.*_proj='])}{setting['kind']}{':' if plain else ''}{plain}"
    text = mutate.text(rng, rng.choice([text, "up_proj=transponder:rank=8,base=(low_rank:rank=4)", "q_proj=none"]))
    mapping = options.operator_mapping([text])
    with torch.device("meta"):
        relinear.replace_(
            make_tiny_llama(), mapping, layers=options.parse_layers(rng.choice([None, "0", "0-1", "1,0"]))
        )


@kind(6)
def arguments(rng: random.Random, folder: Path) -> None:
    reader, text = rng.choice(
        [
            (options.parse_layers, "0,4-11"),
            (lambda text: options.parse_numbers("--seeds", text), "0,1,2"),
            (lambda text: options.named_entries([text, "dense"]), "low_rank:rank=4"),
            (lambda text: DistillSettings.load(yaml_settings.parse_overrides([text])), "learning_rate=1e-3"),
            (lambda text: CompressSettings.load(yaml_settings.parse_overrides([text])), "keep=0.5"),
        ]
    )
    reader(mutate.text(rng, text))


@functools.cache
def checkpoints() -> list[Path]:
    """Saved models: with operators and a context, and stock."""
    home = Path(tempfile.mkdtemp(prefix="fuzz-checkpoints-"))
    torch.manual_seed(0)
    mixed = make_tiny_llama()
    relinear.attach_(mixed, relinear.ContextManager(dim=8))
    relinear.replace_(mixed, {"q_proj": relinear.CCL(rank=4, context_dim=8), "up_proj": relinear.LowRank(rank=2)})
    for name, model in {"operators": mixed, "stock": make_tiny_llama()}.items():
        relinear.save_pretrained(model, home / name)
    return [home / "operators", home / "stock"]


def copied(rng: random.Random, folder: Path) -> Path:
    place = folder / "model"
    shutil.copytree(rng.choice(checkpoints()), place)
    return place


@kind(9)
def checkpoint_configs(rng: random.Random, folder: Path) -> None:
    place = copied(rng, folder)
    path = place / rng.choice(["config.json"] * 5 + ["generation_config.json"])
    if not path.exists():
        return
    if rng.random() < 0.75:
        path.write_text(json.dumps(mutate.tree(rng, json.loads(path.read_text()))))
    else:
        path.write_text(mutate.text(rng, path.read_text()), errors="replace")
    summary(relinear.from_pretrained(place))


@kind(9)
def checkpoint_records(rng: random.Random, folder: Path) -> None:
    place = folder / "model"
    shutil.copytree(checkpoints()[0], place)
    values = json.loads((place / "config.json").read_text())
    values["quantization_config"] = mutate.tree(rng, values["quantization_config"])
    (place / "config.json").write_text(json.dumps(values))
    summary(relinear.from_pretrained(place))


@kind(7)
def safetensors_headers(rng: random.Random, folder: Path) -> None:
    place = copied(rng, folder)
    path = place / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, body = content[8 : 8 + length], content[8 + length :]
    what = rng.randrange(3)
    if what == 0:
        header = json.dumps(mutate.tree(rng, json.loads(header))).encode()
    elif what == 1:
        header = mutate.data(rng, header)
    else:
        path.write_bytes(mutate.data(rng, content))
    if what < 2:
        stated = len(header) if rng.random() < 0.9 else rng.choice([0, 2**63, length + 1])
        path.write_bytes(struct.pack("<Q", stated) + header + body)
    relinear.from_pretrained(place)


def json_file(folder: Path, name: str, value: Any, rng: random.Random) -> Path:
    path = folder / name
    text = json.dumps(mutate.tree(rng, value)) if rng.random() < 0.7 else mutate.text(rng, json.dumps(value))
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


ROW = {"step": 2, "loss": 5.0, "tokens": 64, "tokens_per_second": None, "learning_rate": 1e-3}
RESULT = {
    "validation_loss": 5.0, "perplexity": 148.0, "initial_perplexity": 200.0, "parameters": 100, "flops_per_token": 200,
    "tokens_per_second": 10.0, "peak_memory_bytes": 1000, "aux": {}, "steps": 10, "out_dir": "x",
}  # fmt: skip


@kind(6)
def run_records(rng: random.Random, folder: Path) -> None:
    record = {"status": "done", "settings": TrainSettings.load(TRAIN).model_dump(mode="json"), "result": RESULT}
    json_file(folder, "run.json", record, rng)
    rows = "".join(json.dumps(ROW) + "\n" for _ in range(3))
    (folder / "metrics.jsonl").write_text(mutate.text(rng, rows) if rng.random() < 0.5 else rows, errors="replace")
    read_result(folder)
    read_metrics(folder / "metrics.jsonl")


@kind(4)
def comparison_records(rng: random.Random, folder: Path) -> None:
    json_file(folder, "run.json", {"format": 1, "recipe": RECIPES[0], "entries": {}}, rng)
    comparison_folder(folder).check({"base": TRAIN})


@functools.cache
def results() -> dict[str, Any]:
    """What a comparison writes."""
    statistic = {"mean": 5.0, "std": 0.1, "values": [4.9, 5.1]}
    curve = [{"step": step, "tokens": step * 64, "loss": 6.0, "validation_loss": 5.5} for step in range(3)]
    run = {"seed": 0, "validation_loss": 5.0, "perplexity": 148.0, "initial_perplexity": 200.0, "steps": 10}
    run |= {"tokens_per_second": 10.0, "peak_memory_bytes": 1000, "aux": {"aux/kl": 0.1}, "curve": curve}
    speed = {"train_ratio": 1.0, "inference_ratio": 1.1, "reference": "dense", "rounds": 3}
    speed |= {"train_tokens_per_second": 10.0, "inference_tokens_per_second": 11.0}
    tuning = {
        "trials": [{"learning_rate": 1e-3, "validation_loss": 5.0}, {"learning_rate": 2e-3, "validation_loss": None}]
    }
    entry = {"name": "a", "operators": "dense", "settings": TRAIN, "parameters": 100, "flops_per_token": 200}
    entry |= {
        "size_mismatch": 0.01,
        "learning_rate": 1e-3,
        "tuning": tuning | {"edge": True},
        "dense": True,
        "speed": speed,
    }
    entry |= dict.fromkeys(("validation_loss", "perplexity", "initial_perplexity"), statistic)
    entry |= {"peak_memory_bytes": 1000, "runs": [run, run]}
    return {
        "format": 1, "name": "small", "description": "", "budget": "10 steps", "match": {"by": "width", "text": "same"},
        "data": {}, "entries": [entry, entry | {"name": "b", "speed": None, "tuning": None}], "notes": ["note"],
        "recipe": {"entries": {}}, "machine": {"cores": 2}, "command": "relinear compare", "finished": "now",
    }  # fmt: skip


@kind(5)
def comparison_results(rng: random.Random, folder: Path) -> None:
    json_file(folder, "results.json", results(), rng)
    found = report.read_results(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        terminal.print_results(found)
    with mock.patch.object(report, "save_panels"):  # the pictures take a second
        report.results_section(folder)
    if rng.random() < 0.02:
        report.write_report(folder)


@kind(3)
def compression_plans(rng: random.Random, folder: Path) -> None:
    model = make_tiny_llama()
    layer = {"operator": {"kind": "low_rank", "rank": 2}, "parameters": 10, "parameters_before": 20, "nats": 0.1}
    layers = {"model.layers.0.self_attn.q_proj": layer, "model.layers.1.mlp.up_proj": layer | {"operator": None}}
    CompressPlan.load(json_file(folder, "plan.json", {"format": 1, "others": 10, "layers": layers}, rng), model)


@kind(3)
def moments(rng: random.Random, folder: Path) -> None:
    sums = {"tokens": 3.0, "mu": [1.0, 2.0], "mu_squared": [1.0, 4.0], "variance": [1.0, 1.0]}
    latents = {"a": {"mean": [0.1], "std": [0.2], "sums": sums}}
    read_moments(
        json_file(folder, "latent_moments.json", {"format": 1, "every": 1, "decay": 0.9, "latents": latents}, rng)
    )


@kind(9)
def data(rng: random.Random, folder: Path) -> None:
    rows = [{"text": f"row {number} says {number * 7}", "n": number, "other": None} for number in range(6)]
    suffix = rng.choice([".txt", ".md", ".jsonl", ".jsonl", ".jsonl", ".parquet"])
    path = folder / f"train{suffix}"
    if suffix == ".jsonl":
        lines = [json.dumps(mutate.tree(rng, row) if rng.random() < 0.2 else row) for row in rows]
        content = "\n".join(lines)
        content = mutate.text(rng, content) if rng.random() < 0.5 else content
        path.write_bytes(
            mutate.data(rng, content.encode("utf-8", "replace"))
            if rng.random() < 0.2
            else content.encode("utf-8", "replace")
        )
        if rng.random() < 0.3:
            list(_lambada_rows(path))
        if path.read_bytes().lstrip().startswith((b"null", b"NaN")):  # they end the process, in pyarrow
            return
    elif suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([{"text": row["text"], "n": row["n"]} for row in rows]), path
        )
        path.write_bytes(mutate.data(rng, path.read_bytes()))
    else:
        path.write_bytes(mutate.data(rng, b"\xef\xbb\xbfSome text. " * 20))
    column = rng.choice([None, None, "text", "n", "absent", mutate.text(rng, "text")])
    settings = DataSettings(data=str(folder), text_column=column, cache_dir=folder / ".cache")
    for source in local_sources(folder, None, settings)[0].values():
        list(source.documents())


FIT = FitSettings(steps=3, batch_size=2, save_every=2, dtype="float32", device="cpu", threads=1, log_every=1)


class _Stop(Exception):
    pass


def resumed(home: Path, stop_at: int | None = None) -> dict[str, torch.Tensor]:
    """The weights of a run of three steps that goes on from what is in ``home``."""

    def stop(progress: Any) -> None:
        if progress.stage == "save" and progress.done == stop_at:
            raise _Stop

    torch.manual_seed(0)
    model = make_tiny_llama()
    fit(model, Tokens(samples=8), FIT, out_dir=home, on_progress=stop)
    return model.state_dict()


@functools.cache
def interrupted() -> tuple[Path, dict[str, torch.Tensor]]:
    """A run with a checkpoint that it can go on from, and what it comes to."""
    home = Path(tempfile.mkdtemp(prefix="fuzz-run-"))
    with contextlib.suppress(_Stop):
        resumed(home, stop_at=2)
    with tempfile.TemporaryDirectory() as copy_of_it:
        shutil.copytree(home, copy_of_it, dirs_exist_ok=True)
        return home, resumed(Path(copy_of_it))


@kind(1)
def training_state(rng: random.Random, folder: Path) -> None:
    """Whatever is damaged or gone: refused, or the very run that it would have been."""
    home, expected = interrupted()
    shutil.copytree(home, folder, dirs_exist_ok=True)
    (checkpoint,) = (folder / "checkpoints").glob("checkpoint-*")
    path = rng.choice(sorted(path for path in checkpoint.iterdir() if path.is_file()))
    what = rng.randrange(3)
    if what == 0:
        path.unlink()
    elif what == 1 and path.suffix == ".json":
        path.write_text(json.dumps(mutate.tree(rng, json.loads(path.read_text()))))
    else:
        path.write_bytes(mutate.data(rng, path.read_bytes()))
    found = resumed(folder)
    assert all(torch.equal(found[key], value) for key, value in expected.items()), f"{path.name}: silently another run"


@kind(4)
def settings_of_operators(rng: random.Random, folder: Path) -> None:
    OperatorConfig.from_dict(mutate.tree(rng, rng.choice(settings_examples())))

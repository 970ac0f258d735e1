"""The rival of results/compress/caldera.py: its code words are the paper's, and the nearest is found."""

import importlib
import itertools

import numpy as np
import pytest
import torch

from conftest import REPOSITORY


@pytest.fixture
def study(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.syspath_prepend(str(REPOSITORY / "results" / "compress"))
    return importlib.import_module("caldera")


@pytest.mark.slow
def test_the_nearest_of_all_words_is_found(study):
    signs = np.array(list(itertools.product((1, -1), repeat=8)))
    even = (signs < 0).sum(1) % 2 == 0
    parts = [pattern * signs[even == fits] for pattern, fits in zip(study.MAGNITUDES, study.EVEN, strict=True)]
    half = np.concatenate(parts)
    assert np.all(half.sum(1) % 2 == 0)
    words = torch.tensor(np.concatenate([half - 0.25, half + 0.25]), dtype=torch.float32)
    assert len(words) == len(torch.unique(words, dim=0)) == 2**16
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    nearest = words[torch.cdist(x, words).argmin(1)]
    assert torch.allclose((study.coded(x, 2, 1.0) - x).norm(dim=1), (nearest - x).norm(dim=1))
    assert len(study.WORDS) == 2**8
    for bits, most in ((2, 0.11), (3, 0.04), (4, 0.014)):  # of a normal variable's variance
        assert float((study.nearest(x, bits) - x).square().mean()) < most


@pytest.mark.slow
def test_integers_and_factors_share_the_work(study, monkeypatch):
    monkeypatch.setattr(study, "TURNS", 3)
    monkeypatch.setattr(study, "INNER", 2)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 32, generator=generator)
    rows = torch.randn(400, 32, generator=generator) * torch.linspace(0.1, 3, 32)
    inputs = rows.T @ rows / 400

    def error(found):
        return float(((found - weight) @ inputs * (found - weight)).sum())

    torch.manual_seed(0)
    alone = error(study.caldera(weight, inputs, 2, 0))
    assert error(study.caldera(weight, inputs, 2, 8)) < 0.9 * alone
    assert alone < 0.75 * error(study.nearest(weight, 2))
    lower = study.block_lower(inputs)
    blocks = lower.unflatten(0, (-1, 8)).unflatten(2, (-1, 8)).diagonal(dim1=0, dim2=2)
    assert torch.allclose(blocks, torch.eye(8).unsqueeze(-1).expand_as(blocks), atol=1e-4)
    middle = torch.linalg.solve(lower, torch.linalg.solve(lower, inputs).T)  # block-diagonal
    outside = middle.unflatten(0, (-1, 8)).unflatten(2, (-1, 8)).permute(0, 2, 1, 3)[~torch.eye(4, dtype=torch.bool)]
    assert float(outside.abs().max()) < 1e-3 * float(middle.abs().max())

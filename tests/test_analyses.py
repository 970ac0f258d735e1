"""Analyses of conditioned layers: exact against the materialised operators, and right on cases known by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from relinear.activations.shared_context import context_owner
from relinear.analysis.analyses import HeldOutText, Subject, analyze, applying, held_out_tokens
from relinear.analysis.effective_rank import effective_rank, effective_ranks, realized_spectra
from relinear.analysis.fingerprints import context_fingerprints
from relinear.analysis.gates import gate_statistics
from relinear.analysis.latents import latent_statistics
from relinear.analysis.outputs import output_statistics
from relinear.analysis.planes import plane_angles
from relinear.analysis.recording import record_contexts, record_gates
from relinear.analysis.report import analyses_blocks
from relinear.analysis.top_tokens import top_tokens
from relinear.clifford import bivector_to_matrix
from relinear.contract.operator import named_operators
from relinear.data import DataSettings
from relinear.data.tokenizers import load_tokenizer
from relinear_cli.analyze import analyze_saved
from relinear_cli.main import main
from tiny_models import starting_tokenizer

IDS = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(1))


def test_sequences_begin_as_the_tokenizer_says(corpus) -> None:
    ids = held_out_tokens(HeldOutText(DataSettings(data=str(corpus)), 8, 24), starting_tokenizer())
    assert ids.shape == (8, 24)
    assert (ids[:, 0] == 257).all()
    assert (ids[:, 1:] != 257).all()


def conditioned(mixer="token", **settings):
    model = make_tiny_gpt2()
    relinear.attach_(model, relinear.ContextManager(dim=8, mixer=mixer))
    relinear.replace_(model, {"mlp.c_fc": relinear.CCL(rank=6, context_dim=8, **settings)})
    return model


# Effective rank


def test_effective_rank_of_known_spectra() -> None:
    assert effective_rank(torch.tensor([3.0, 3.0, 3.0, 3.0])) == pytest.approx(4)
    assert effective_rank(torch.tensor([5.0, 0.0])) == pytest.approx(1)
    p = torch.tensor([0.75, 0.25])
    assert effective_rank(8 * p) == pytest.approx(math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))))
    assert effective_rank(torch.zeros(3)) == 0


@pytest.mark.parametrize("gates", ["both", "inner", "outer", "none"])
@pytest.mark.parametrize("right", [(6, 9), (9, 6), None])
def test_spectra_equal_those_of_the_materialised_operators(gates: str, right: tuple[int, int] | None) -> None:
    tokens, rank = 11, 5 if right is None else right[0]
    left = torch.randn(70, rank)  # more rows than a block holds
    basis = None if right is None else torch.randn(*right)
    inner = torch.rand(tokens, rank) if gates in ("both", "inner") else None
    outer = torch.rand(tokens, 70) if gates in ("both", "outer") else None
    a = (torch.ones(tokens, rank) if inner is None else inner).double()
    b = (torch.ones(tokens, 70) if outer is None else outer).double()
    dense = torch.einsum(
        "to,or,tr,ri->toi", b, left.double(), a, (torch.eye(rank) if basis is None else basis).double()
    )
    spectra = realized_spectra(left, basis, inner, outer, tokens)
    stacked = {
        "operators": dense.flatten(1),
        "outputs": dense.transpose(0, 1).flatten(1),
        "inputs": dense.flatten(0, 1),
    }
    for space, matrix in stacked.items():
        expected = torch.linalg.svdvals(matrix)
        count = min(len(expected), len(spectra[space]))
        # Singular values from a Gram matrix are exact to the root of its precision.
        assert torch.allclose(spectra[space][:count], expected[:count], atol=1e-6 * expected[0])
        assert effective_rank(spectra[space]) == pytest.approx(effective_rank(expected), rel=1e-4)


def test_ranks_of_a_model_along_a_sequence() -> None:
    model = conditioned()
    found = effective_ranks(model, IDS[:1])
    name = "transformer.h.1.mlp.c_fc"
    operator = model.get_submodule(name)
    with torch.no_grad():
        dense = operator.effective_weight(record_contexts(model, IDS[:1])[0]).double()
    assert dense.shape == (24, 128, 32)
    expected = torch.linalg.svdvals(dense.flatten(1))
    layer = found[name]
    assert layer["effective_rank"]["operators"] == pytest.approx(effective_rank(expected), rel=1e-4)
    values = torch.tensor(layer["singular_values"]["operators"], dtype=torch.float64)
    assert torch.allclose(values, expected / expected[0], atol=1e-6)
    assert layer["rank"] == 6
    assert layer["effective_rank"]["operators"] > 2
    assert layer["effective_rank"]["inputs"] <= 6 + 1e-6
    assert layer["effective_rank"]["outputs"] > 6 - 1
    json.dumps(found, allow_nan=False)


def test_the_control_realises_one_operator() -> None:
    model = make_tiny_llama()
    relinear.replace_(model, {"mlp.up_proj": relinear.LowRank(rank=5)})
    for layer in effective_ranks(model, IDS[:1]).values():
        assert layer["effective_rank"]["operators"] == pytest.approx(1, abs=1e-3)
        assert layer["rank"] == 32  # of the matrix as such; what it spans is below
        assert layer["effective_rank"]["outputs"] <= 5 + 1e-3
    static = conditioned(basis_gate=False, output_gate=False)
    for layer in effective_ranks(static, IDS[:1]).values():
        assert layer["effective_rank"]["operators"] == pytest.approx(1, abs=1e-3)


# Gates


def fix_gates(model, low: float, high: float) -> None:
    """Every basis gate ``high`` after token ids below 10 and ``low`` after others, through the embedding alone."""
    owner = context_owner(model)

    def contexts(decoder, inputs):
        open_ = (inputs["input_ids"] < 10).float()[..., None]
        return open_.expand(-1, -1, owner.context_dim)

    owner.contexts = contexts
    logit = [math.log(p / (1 - p)) for p in (low, high)]
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("basis_gate"):
                module.weight.fill_((logit[1] - logit[0]) / module.weight.shape[1])
                module.bias.fill_(logit[0])


def test_statistics_of_gates_set_by_hand() -> None:
    model = conditioned(gate_depth=0)
    fix_gates(model, 0.05, 0.6)
    share = float((IDS < 10).double().mean())
    layer = gate_statistics(model, IDS)["transformer.h.0.mlp.c_fc"]["basis"]
    assert layer["active"] == pytest.approx(share)
    assert layer["shut"] == pytest.approx(1 - share)
    assert layer["open"] == pytest.approx(0, abs=1e-9)
    assert layer["mean"] == pytest.approx(0.05 + 0.55 * share, rel=1e-5)
    assert layer["variation"] == pytest.approx(0.55 * math.sqrt(share * (1 - share)), rel=1e-4)
    entropy = [-(g * math.log(g) + (1 - g) * math.log(1 - g)) for g in (0.05, 0.6)]
    assert layer["entropy"] == pytest.approx((1 - share) * entropy[0] + share * entropy[1], rel=1e-5)
    assert sum(layer["histogram"]) == pytest.approx(1)
    assert layer["histogram"][2] + layer["histogram"][1] == pytest.approx(1 - share)


def test_top_tokens_of_gates_set_by_hand() -> None:
    model = conditioned(gate_depth=0)
    fix_gates(model, 0.05, 0.6)
    ids = torch.cat([IDS.clamp_min(10), torch.tensor([[3, 4, 5] * 8])])
    gates = top_tokens(model, ids, count=3, min_occurrences=3, top_share=0.1)["transformer.h.1.mlp.c_fc"]
    assert len(gates) == 6
    for gate in gates:
        assert set(gate["tokens"]) == {3, 4, 5}
        assert gate["values"] == pytest.approx([0.6] * 3)
        assert gate["purity"] == 1
        assert gate["base_rate"] == pytest.approx(24 / 120)
        assert gate["explained_by_token"] == pytest.approx(1)
    with pytest.raises(ValueError, match="occur 99 times"):
        top_tokens(model, ids, min_occurrences=99)


def test_memory_is_not_explained_by_the_current_token() -> None:
    ids = IDS % 6
    token = top_tokens(conditioned(), ids)["transformer.h.0.mlp.c_fc"]
    ema = top_tokens(conditioned("ema"), ids)["transformer.h.0.mlp.c_fc"]
    assert all(gate["explained_by_token"] == pytest.approx(1) for gate in token)
    assert sum(gate["explained_by_token"] for gate in ema) / len(ema) < 0.99


@pytest.mark.parametrize("checkpointing", [False, True])
def test_recording_leaves_the_model_as_it_was(checkpointing: bool) -> None:
    model = conditioned("ema").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    sequences = list(record_gates(model, IDS))
    assert model.training
    assert not any(module._forward_hooks for n, module in model.named_modules() if n.endswith("c_fc"))
    contexts = record_contexts(model, IDS)
    operator = model.transformer.h[0].mlp.c_fc
    for sequence, context in zip(sequences, contexts):
        expected = operator.gates(context)
        for part, gates in sequence["transformer.h.0.mlp.c_fc"].items():
            assert torch.allclose(gates, expected[part], atol=1e-6)


def test_fingerprints() -> None:
    model = conditioned("ema")
    found = context_fingerprints(model, IDS)
    assert torch.allclose(torch.tensor(found["contexts"]), record_contexts(model, IDS), atol=1e-6)
    similarity = torch.tensor(found["similarity"])
    assert torch.allclose(similarity.diagonal(), torch.ones(4), atol=1e-5)
    assert found["step"] > 0
    same = context_fingerprints(conditioned(), torch.full((2, 9), 7))
    assert same["step"] == 0
    assert torch.allclose(torch.tensor(same["similarity"]), torch.ones(2, 2), atol=1e-5)


# The command


def test_analyze_writes_numbers_and_figures(drawn, tmp_path, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and the cow over the $moon$.\n" * 60)
    model, control = tmp_path / "model", tmp_path / "control"
    tokenizer = load_tokenizer("bytes")
    for path, gates in ((model, True), (control, False)):
        built = make_tiny_gpt2(vocab_size=300)
        relinear.attach_(built, relinear.ContextManager(dim=8, mixer="ema"))
        relinear.replace_(built, {"mlp.c_fc": relinear.CCL(rank=6, context_dim=8, basis_gate=gates, output_gate=gates)})
        relinear.save_pretrained(built, path, tokenizer=tokenizer)
    out = tmp_path / "out"
    arguments = ["analyze", str(model), "--control", str(control), "--data", str(text), "--out", str(out)]
    assert main([*arguments, "--sequences", "3", "--length", "32"]) == 0
    printed = capsys.readouterr().out
    assert "effective rank of operators" in printed  # the tables of the page
    assert "control" in printed
    for name in ("effective_rank", "gates", "top_tokens", "fingerprints"):
        assert json.loads((out / f"{name}.json").read_text())
        assert (out / f"{name}.png").is_file()
        assert (out / f"{name}.svg").stat().st_size > 3_000
    assert main([*arguments, "--only", "gate"]) == 2
    assert "did you mean 'gates'" in capsys.readouterr().err
    assert main([*arguments, "--length", "129", "--out", str(tmp_path / "long")]) == 2
    assert "129 tokens are too long for this model, which reads 128" in capsys.readouterr().err


def test_of_what_is_too_short_there_is_taken_what_there_is(tmp_path) -> None:
    """As ``relinear report --analyze`` asks for; the record says how much it was."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 60)
    model = make_tiny_gpt2(vocab_size=300, n_positions=32)
    relinear.replace_(model, {"mlp.c_fc": relinear.Transponder(rank=2)})
    relinear.save_pretrained(model, tmp_path / "model", tokenizer=load_tokenizer("bytes"))
    text = HeldOutText(DataSettings(data=str(tmp_path / "text.txt")), fewer=True)
    names = applying(model)[:1]
    analyze_saved(str(tmp_path / "model"), text, tmp_path / "out", names, loaded=model)
    record = json.loads((tmp_path / "out" / "analyze.json").read_text())
    assert record["length"] == 32
    assert 0 < record["sequences"] < 64


# Outputs of any operator


def test_outputs_of_a_linear_and_of_a_nonlinear_operator() -> None:
    """A linear operator is explained whole, with as many directions as it has; one whose sign is lost is not."""
    model = make_tiny_llama(num_hidden_layers=1, vocab_size=400)
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=3), "v_proj": relinear.LowRank(rank=3)})
    attention = model.model.layers[0].self_attn
    attention.v_proj.register_forward_hook(lambda module, args, output: output.abs())
    ids = torch.arange(400).reshape(4, 100)
    # a forward hook of the model's own stands before those of the analysis
    layers = {"q": attention.q_proj, "v": attention.v_proj, "mlp": model.model.layers[0].mlp.up_proj}
    found = output_statistics(model, layers, ids)
    assert found["q"]["linear_share"] == pytest.approx(1)
    assert found["mlp"]["linear_share"] == pytest.approx(1)
    assert found["v"]["linear_share"] < 0.5
    assert 1 < found["q"]["effective_rank"]["data"] <= 3.001
    values = found["q"]["singular_values"]["data"]
    assert values[0] == 1
    assert values[3] < 1e-6
    assert output_statistics(model, layers, ids[:, :3])["q"]["linear_share"] is None  # 12 tokens, 16 inputs


def test_updates_are_told_where_the_initial_values_can_be_drawn_again(tmp_path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 60)
    settings = {"data": {"data": str(tmp_path / "text.txt"), "tokenizer": "bytes", "sequence_length": 16}}
    settings |= {"model_overrides": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}, "steps": 2}
    settings |= {"operators": {"up_proj": "monarch:blocks=4"}, "warmup_steps": 0, "batch_size": 2, "threads": 1}
    run = tmp_path / "run"
    relinear.train(settings, run)
    (layer,) = [name for name, _ in named_operators(relinear.from_pretrained(run / "model"))]
    text = HeldOutText(DataSettings(data=settings["data"]["data"]), 8, 16)
    for name, changed in (("first", False), ("changed", True)):
        if changed:  # as another version of torch would draw others
            record = json.loads((run / "run.json").read_text())
            record["model"]["initial_sha256"] = "0" * 64
            (run / "run.json").write_text(json.dumps(record))
        results = analyze_saved(str(run / "model"), text, tmp_path / name, ["outputs"])
        (row,) = results["outputs"]["run"].values()
        assert ("update" in row) != changed
        assert changed or 0 < row["update"] < 1
        kinds = [block.kind for block in analyses_blocks(tmp_path / name)]
        assert kinds[:4] == ["text", "text", "chart", "chart"]
        assert (tmp_path / name / "outputs.png").is_file()
    assert layer.endswith("up_proj")


# Latents and planes


def test_latents_of_known_encoders() -> None:
    """A dimension that reads the input moves, one that does not is the prior; without noise nothing is sampled."""
    model = make_tiny_llama(num_hidden_layers=1)
    relinear.replace_(model, {"q_proj": relinear.HDPL(rank=3, blocks=2)})
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.mu.weight[1:].zero_()
        layer.mu.bias.zero_()
        layer.logvar.bias.zero_()
    (found,) = latent_statistics(model, IDS).values()
    assert (found["size"], found["active"]) == (3, 1)
    assert found["std"][1:] == [0, 0]
    assert found["sigma"] == pytest.approx(1)
    assert found["nats"] >= 0.5 * found["std"][0] ** 2 - 1e-6  # half the mean square of the one that moves
    still = make_tiny_llama(num_hidden_layers=1)
    relinear.replace_(still, {"q_proj": relinear.HDPL(rank=3, blocks=2, noise=False)})
    (without,) = latent_statistics(still, IDS).values()
    assert without["nats"] is None
    assert without["sigma"] == 0


def test_a_rotor_in_one_plane_turns_by_twice_its_length() -> None:
    beta = torch.zeros(2, 10)
    beta[0, 0] = math.radians(15)
    angles = plane_angles(beta)
    assert angles[0].tolist() == pytest.approx([30, 0], abs=1e-4)
    assert angles[1].tolist() == [0, 0]
    turn = torch.linalg.matrix_exp(2 * bivector_to_matrix(beta[0].double()))  # of vectors
    assert turn[0, 0].item() == pytest.approx(math.cos(math.radians(30)))


def test_planes_of_a_model_and_its_page(drawn, tmp_path) -> None:
    model = make_tiny_llama(num_hidden_layers=1)
    relinear.replace_(model, {"q_proj": relinear.Rotor(width=2, depth=0), "v_proj": relinear.HDPL(rank=3, blocks=2)})
    results = analyze(Subject(model, IDS), tmp_path)
    assert set(results) >= {"latents", "planes"}
    for name in ("latents", "planes"):
        assert (tmp_path / f"{name}.svg").stat().st_size > 3_000
    (angles,) = json.loads((tmp_path / "planes.json").read_text()).values()
    assert len(angles["left"]) == len(angles["right"]) == 2
    kinds = [block.kind for block in analyses_blocks(tmp_path)]
    assert kinds.count("chart") >= 2


def test_models_that_an_analysis_does_not_apply_to_are_refused() -> None:
    subject = Subject(make_tiny_llama(), IDS)
    for name in ("gates", "top_tokens", "fingerprints", "effective_rank", "outputs", "modulators", "latents", "planes"):
        with pytest.raises(ValueError, match=f"no analysis named {name} applies to this model; those that do: none"):
            analyze(subject, Path("nowhere"), [name])

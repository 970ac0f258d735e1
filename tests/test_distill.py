"""relinear.distill_: recording, fitting, resuming, and the command."""

import contextlib
import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama, mostly_slow
from relinear.distill.record import record, token_blocks

SETTINGS = {
    "tokens": 2048,
    "validation_tokens": 512,
    "sequence_length": 32,
    "tokens_per_step": 128,
    "learning_rate": 0.02,
}
OPERATORS = [
    relinear.LowRank(rank=4),
    relinear.BlockHadamard(blocks=4),
    relinear.Monarch(blocks=4),
    relinear.Rotor(scale=True),
    relinear.Rotor(depth=0, terms="multivector"),
    relinear.HDPL(rank=8, blocks=4),
    relinear.Transponder(rank=2),
]


def corpus(vocabulary=96, blocks=90, length=32):
    """Token blocks with some structure, so that activations are not isotropic."""
    steps = torch.randint(0, 5, (blocks, length), generator=torch.Generator().manual_seed(1))
    return steps.cumsum(1) % vocabulary


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("config", OPERATORS, ids=lambda config: config.kind + getattr(config, "terms", ""))
def test_every_operator_is_fitted_and_put_in_place(config):
    model = make_tiny_llama()
    settings = SETTINGS | {"epochs": 6, "learning_rate": 0.05}
    report = relinear.distill_(model, {"q_proj": config}, corpus(), layers=[1], settings=settings)
    (fit,) = report.layers
    assert fit.name == "model.layers.1.self_attn.q_proj"
    assert fit.error <= fit.start_error
    # An isotropic random weight is beyond a few hundred parameters, but not the scale of its output.
    assert fit.error < (0.9 if fit.parameters > 200 else 1.1)
    assert type(model.model.layers[1].self_attn.q_proj.config) is type(config)
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert torch.isfinite(model(corpus()[:2]).logits).all()
    assert "q_proj" in str(report)


def test_an_operator_that_can_represent_the_layer_is_exact():
    model = make_tiny_gpt2()
    before = model(corpus()[:2]).logits
    mapping = {"c_fc": relinear.LowRank(rank=32), "c_attn": relinear.LowRank(rank=32)}
    report = relinear.distill_(model, mapping, corpus(), settings=SETTINGS)
    assert len(report.layers) == 4
    assert all(fit.error < 1e-6 for fit in report.layers)
    torch.testing.assert_close(model(corpus()[:2]).logits, before, atol=1e-3, rtol=1e-3)


def test_inputs_are_recorded_with_earlier_replacements_active_and_stored_once():
    model, blocks = make_tiny_llama(), corpus()[:6]
    layer = model.model.layers[1].self_attn
    modules = {name: getattr(layer, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    seen = []
    handle = layer.k_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    with record(model, blocks, modules, batch=4) as recording:
        assert recording.values("q_proj") is recording.values("v_proj")
        assert recording.values("o_proj") is not recording.values("q_proj")
        first = recording.values("k_proj").clone()
    torch.testing.assert_close(first, torch.cat(seen))
    handle.remove()
    relinear.replace_(model, {"v_proj": relinear.LowRank(rank=1)}, layers=0)
    with record(model, blocks, modules, batch=4) as recording:
        assert (recording.values("k_proj") - first).norm() > 1e-3 * first.norm()
    deep = {"up": model.model.layers[0].mlp.up_proj}
    calls = []
    model.model.layers[1].register_forward_pre_hook(lambda *_: calls.append(1))
    with record(model, blocks, deep, batch=4):
        assert not calls  # a pass ends with the last module that is asked for


@pytest.mark.parametrize("stopped", [False, True])
def test_every_module_has_its_own_mode_afterwards(stopped):
    model = make_tiny_llama().train()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}

    def stop(progress):
        if stopped and progress.text == "fit model.layers.1.self_attn.q_proj":
            raise KeyboardInterrupt

    mapping = {"q_proj": relinear.Transponder(rank=2)}
    with pytest.raises(KeyboardInterrupt) if stopped else contextlib.nullcontext():
        relinear.distill_(model, mapping, corpus(), settings=SETTINGS, on_progress=stop)
    after = {name: module.training for name, module in model.named_modules()}
    assert {name: mode for name, mode in after.items() if name in before} == before
    replaced = {name: mode for name, mode in after.items() if "q_proj." in name}
    assert replaced
    for name, mode in replaced.items():
        assert mode is (".layers.0." in name), name


def test_on_disk_gives_the_same_and_leaves_nothing(tmp_path):
    results = []
    for on_disk in (False, True):
        torch.manual_seed(5)
        model = make_tiny_llama()
        settings = SETTINGS | {"on_disk": on_disk}
        relinear.distill_(
            model,
            {".*[qv]_proj": relinear.LowRank(rank=2)},
            corpus(),
            settings=settings,
            out_dir=tmp_path / str(on_disk),
        )
        results.append(weights(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert not list((tmp_path / "True" / "recorded").iterdir())


@pytest.mark.parametrize("loss", ["cosine", "kl"])
def test_other_losses(loss):
    model = make_tiny_llama()
    frozen = weights(model)
    report = relinear.distill_(
        model, {".*[qk]_proj": relinear.Rotor()}, corpus(), layers=[0], settings=SETTINGS | {"loss": loss}
    )
    assert len(report.layers) == 2
    for fit in report.layers:
        assert fit.error < fit.start_error
        assert (fit.cosine is None) == (loss == "kl")
    kept = weights(model)
    assert all(torch.equal(kept[name], value) for name, value in frozen.items() if name in kept)
    assert all(p.requires_grad for p in model.parameters())


def test_the_output_projection_is_trained_again():
    model = make_tiny_llama()
    before = model.model.layers[0].self_attn.o_proj.weight.detach().clone()
    settings = SETTINGS | {"retrain": "o_proj", "epochs": 3}
    report = relinear.distill_(model, {"v_proj": relinear.LowRank(rank=2)}, corpus(), layers=[0], settings=settings)
    first, second = report.layers
    assert (first.retrained, second.retrained) == (False, True)
    assert second.error < second.start_error
    assert not torch.equal(model.model.layers[0].self_attn.o_proj.weight, before)


def test_conditioned_operators_are_fitted_on_their_context():
    model = make_tiny_llama()
    relinear.attach_(model, relinear.ContextManager(dim=8))
    config = relinear.CCL(rank=8, context_dim=8)
    report = relinear.distill_(model, {"q_proj": config}, corpus(), layers=[1], settings=SETTINGS | {"epochs": 6})
    assert report.layers[0].error < 1
    assert torch.isfinite(model(corpus()[:2]).logits).all()


def test_a_fit_worse_than_zeros_is_warned_of():
    model = make_tiny_llama()
    settings = SETTINGS | {"init": "fresh", "learning_rate": 1e-9}
    with pytest.warns(UserWarning, match=r"1 of 1 layers .* zeros.*layers\.1\.self_attn\.q_proj"):
        report = relinear.distill_(model, {"q_proj": relinear.LowRank(rank=2)}, corpus(), layers=[1], settings=settings)
    assert report.layers[0].error > 1
    assert "worse than an output of zeros" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good = relinear.distill_(
            make_tiny_llama(), {"q_proj": relinear.LowRank(rank=16)}, corpus(), layers=[1], settings=SETTINGS
        )
    assert "zeros" not in str(good)


def test_perplexity_before_and_after_is_that_of_held_out_tokens():
    model = make_tiny_llama()
    blocks = token_blocks(corpus(), None, 32, 80)

    def perplexity():
        with torch.no_grad():
            logits = model(blocks[64:]).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), blocks[64:, 1:].flatten()).exp().item()

    before = perplexity()
    report = relinear.distill_(model, {"v_proj": relinear.LowRank(rank=1)}, corpus(), settings=SETTINGS)
    assert report.perplexity_before == pytest.approx(before, rel=1e-5)
    assert report.perplexity == pytest.approx(perplexity(), rel=1e-5)
    assert report.perplexity != pytest.approx(before, rel=1e-4)
    assert f"{report.perplexity_before:,.2f} before, {report.perplexity:,.2f} after" in str(report)
    assert report.to_dict()["perplexity"] == report.perplexity
    assert report.layers[0].operator == "LowRank(rank=1)"


def test_the_directory_of_a_distillation_is_evaluated(tmp_path, capfd):
    from relinear.data.tokenizers import byte_tokenizer
    from relinear_cli.main import main

    model = make_tiny_llama(vocab_size=258)
    tokenizer, text = byte_tokenizer(), tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text())
    relinear.distill_(
        model,
        {"q_proj": relinear.LowRank(rank=4)},
        [text.read_text()],
        tokenizer=tokenizer,
        settings=SETTINGS,
        out_dir=tmp_path / "run",
    )
    printed = []
    for directory in ("run", "run/model"):
        arguments = ["--data", str(text), "--split", "all", "--max-tokens", "300", "--sequence-length", "64", "--json"]
        assert main(["eval", str(tmp_path / directory), *arguments]) == 0
        printed.append(json.loads(capfd.readouterr().out)["perplexity"]["loss"])
    assert printed[0] == printed[1]
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert "LowRank(rank=4)" in capfd.readouterr().out


class Stop(Exception):
    pass


def outputs_of(model, name, blocks):
    """What a module gives for blocks (N, T): (N T, O)."""
    found = []
    module = model.get_submodule(name)
    handle = module.register_forward_hook(
        lambda module, args, output: found.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        model(blocks)
    handle.remove()
    return found[0].flatten(0, 1)


def relative(got, wanted):
    return ((got - wanted).square().sum() / wanted.square().sum()).item()


@pytest.mark.parametrize("loss", mostly_slow(["mse", "kl"], "mse"))
def test_the_original_models_outputs_are_the_target(loss):
    model, original = make_tiny_llama(), make_tiny_llama()
    original.load_state_dict(model.state_dict())
    other, held_out = copy.deepcopy(model), token_blocks(corpus(), None, 32, 80)[64:]
    mapping = {
        r".*\.0\..*(v|down)_proj": relinear.LowRank(rank=1),
        ".*1.self_attn.q_proj": relinear.LowRank(rank=32),
        ".*1.self_attn.v_proj": relinear.LowRank(rank=16),
    }
    settings = SETTINGS | {"epochs": 4, "loss": loss, "retrain": "o_proj"}
    relinear.distill_(other, mapping, corpus(), settings=settings)
    report = relinear.distill_(model, mapping, corpus(), settings=settings | {"target": "original"})
    if loss == "kl":
        with torch.no_grad():
            logs = [m(held_out).logits.log_softmax(-1) for m in (original, model, other)]
        ours, theirs = ((logs[0].exp() * (logs[0] - log)).sum(-1).mean().item() for log in logs[1:])
        assert ours < theirs
        return
    for fit in report.layers[-3:]:
        wanted = outputs_of(original, fit.name, held_out)
        if not fit.retrained:
            assert fit.error == pytest.approx(relative(outputs_of(model, fit.name, held_out), wanted), rel=1e-4)
        assert relative(outputs_of(model, fit.name, held_out), wanted) < relative(
            outputs_of(other, fit.name, held_out), wanted
        )


@pytest.mark.parametrize(
    "config",
    mostly_slow(OPERATORS, OPERATORS[0], OPERATORS[5]),
    ids=lambda config: config.kind + getattr(config, "terms", ""),
)
def test_a_bias_starts_at_the_mean_of_the_target(config, tmp_path):
    model, original = make_tiny_llama(), make_tiny_llama()
    original.load_state_dict(model.state_dict())
    train = token_blocks(corpus(), None, 32, 80)[:64]
    name = "model.layers.1.self_attn.q_proj"
    settings = SETTINGS | {"bias": True, "learning_rate": 1e-12}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is learnt at such a rate
        relinear.distill_(model, {"q_proj": config}, corpus(), layers=[1], settings=settings, out_dir=tmp_path)
    wanted, got = (outputs_of(m, name, train).mean(0) for m in (original, model))
    bias = model.get_submodule(name).bias
    if config.fits_weight:
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    else:
        torch.testing.assert_close(bias, wanted, atol=1e-5, rtol=1e-4)
    assert bias.abs().max() > 0 or config.fits_weight
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(loaded.get_submodule(name).bias, bias)
    torch.testing.assert_close(loaded(corpus()[:2]).logits, model(corpus()[:2]).logits)


def test_a_bias_where_a_layer_has_one_and_where_none_can_be():
    model = make_tiny_gpt2()
    name, train = "transformer.h.1.attn.c_attn", token_blocks(corpus(), None, 32, 80)[:64]
    wanted = outputs_of(model, name, train).mean(0)
    settings = SETTINGS | {"bias": True, "init": "fresh", "learning_rate": 1e-12}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is learnt at such a rate
        relinear.distill_(model, {"c_attn": relinear.LowRank(rank=2)}, corpus(), layers=[1], settings=settings)
    torch.testing.assert_close(model.get_submodule(name).bias, wanted, atol=1e-5, rtol=1e-4)
    assert "layer_bias" not in str(model.config.quantization_config)
    model = make_tiny_llama()
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=2)}, layers=0)
    before = weights(model)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj is an operator without a bias"):
        relinear.distill_(
            model, {".*[qk]_proj": relinear.LowRank(rank=1)}, corpus(), settings=SETTINGS | {"bias": True}
        )
    assert weights(model).keys() == before.keys()


@pytest.mark.parametrize("loss", ["mse", "cosine"])
def test_targets_of_a_layer_are_trained_together(loss):
    model, original = make_tiny_llama(), make_tiny_llama()
    original.load_state_dict(model.state_dict())
    held_out = token_blocks(corpus(), None, 32, 80)[64:]
    settings = SETTINGS | {"joint": True, "loss": loss, "epochs": 3, "learning_rate": 0.01}
    report = relinear.distill_(
        model, {".*[qkv]_proj": relinear.LowRank(rank=2)}, corpus(), layers=[1], settings=settings
    )
    assert len(report.layers) == 3
    name = "model.layers.1.self_attn"
    error = relative(outputs_of(model, name, held_out), outputs_of(original, name, held_out))
    for fit in report.layers:
        assert fit.joint_error == pytest.approx(error, rel=1e-4)
        if loss == "mse":
            assert fit.joint_error < 0.98 * fit.joint_start_error
        own = relative(outputs_of(model, fit.name, held_out), outputs_of(original, fit.name, held_out))
        assert fit.error == pytest.approx(own, rel=1e-4)
    assert "joint error" in str(report)
    assert all(p.requires_grad for p in model.parameters())
    for settings, match in [
        (SETTINGS | {"joint": True, "loss": "kl"}, "joint=True is for"),
        (SETTINGS | {"joint": True}, "no module inside the model holds lm_head"),
    ]:
        with pytest.raises(ValueError, match=match):
            relinear.distill_(original, {"lm_head": relinear.LowRank(rank=2)}, corpus(), settings=settings)


def test_a_directory_of_the_first_version_goes_on(tmp_path):
    """It had fewer settings, and did not write the operators down."""
    config = relinear.LowRank(rank=2)
    mapping = {"q_proj": config}
    model = make_tiny_llama()
    start = weights(model)

    def stop(progress):
        if progress.stage == "fit" and ".1." in progress.text:
            raise Stop

    with pytest.raises(Stop):
        relinear.distill_(model, mapping, corpus(), settings=SETTINGS, out_dir=tmp_path, on_progress=stop)
    state = json.loads((tmp_path / "distill.json").read_text())
    settings = {k: v for k, v in state["settings"].items() if k not in ("target", "bias", "joint")}
    digest = hashlib.sha256(json.dumps([settings, state["operators"]], sort_keys=True).encode())
    digest.update(token_blocks(corpus(), None, 32, 80).numpy().tobytes())
    for layer in range(2):
        digest.update(start[f"model.layers.{layer}.self_attn.q_proj.weight"].view(torch.uint8).numpy().tobytes())
    old = {"fingerprint": digest.hexdigest(), "settings": settings, "done": state["done"]}
    (tmp_path / "distill.json").write_text(json.dumps(old))
    model = make_tiny_llama()
    model.load_state_dict(start)
    fitted = []
    relinear.distill_(
        model,
        mapping,
        corpus(),
        settings=SETTINGS,
        out_dir=tmp_path,
        on_progress=lambda progress: progress.stage == "fit" and fitted.append(progress.text.partition(" ")[2]),
    )
    assert all(".1." in name for name in fitted)
    (tmp_path / "distill.json").write_text(json.dumps(old))
    other = {"q_proj": relinear.LowRank(rank=3)}
    model = make_tiny_llama()
    model.load_state_dict(start)
    with pytest.raises(ValueError, match="another"):
        relinear.distill_(model, other, corpus(), settings=SETTINGS, out_dir=tmp_path)


MORE = {"target": "original", "joint": True, "bias": True, "retrain": "o_proj"}


@pytest.mark.parametrize(
    "more", mostly_slow([{}, {"retrain": "o_proj"}, MORE, MORE | {"joint": False, "loss": "kl"}], {}), ids=str
)
def test_resuming_is_exact(tmp_path, more):
    def run(folder, stop_at=None, overwrite=False):
        model = make_tiny_llama()
        model.load_state_dict(start)

        def watch(progress):
            if stop_at and progress.text.startswith(" ".join(stop_at)):
                raise Stop

        report = relinear.distill_(
            model,
            {".*[qv]_proj" if more else "q_proj": relinear.Rotor(scale=True)},
            corpus(),
            settings=SETTINGS | more | {"tokens": 512},
            out_dir=folder,
            overwrite=overwrite,
            on_progress=watch,
        )
        return model, report

    start = weights(make_tiny_llama())
    whole, wanted = run(tmp_path / "whole")
    for stop_at in [("fit", "model.layers.1"), ("record", "model.layers.0")]:
        with pytest.raises(Stop):
            run(tmp_path / "cut", stop_at, overwrite=stop_at[0] != "fit")
        torch.manual_seed(123)
        resumed, report = run(tmp_path / "cut")
        assert report == wanted
        assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(whole).items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "model").eval()
    torch.testing.assert_close(loaded(corpus()[:2]).logits, whole(corpus()[:2]).logits)
    with pytest.raises(ValueError, match="another"):
        relinear.distill_(
            make_tiny_llama(), {"k_proj": relinear.Rotor()}, corpus(), settings=SETTINGS, out_dir=tmp_path / "cut"
        )


def test_wrong_inputs_change_nothing(tmp_path):
    model = make_tiny_llama()
    before = copy.deepcopy(model)
    rank = relinear.LowRank(rank=2)
    for mapping, data, settings, match in [
        ({"q_proj": rank}, corpus(blocks=3), SETTINGS, "the corpus has"),
        ({"q_proj": rank}, ["text"], SETTINGS, "tokenizer"),
        ({"nothing": rank}, corpus(), SETTINGS, "matches no module; known"),
        ({"q_proj": None}, corpus(), SETTINGS, "nothing to distill"),
        ({"q_proj": rank}, corpus(), SETTINGS | {"token": 1}, "unknown setting"),
        ({"q_proj": rank}, corpus(), SETTINGS | {"retrain": "nothing"}, "matches no linear layer"),
    ]:
        with pytest.raises(ValueError, match=match):
            relinear.distill_(model, mapping, data, settings=settings, out_dir=tmp_path / "out")
        assert not (tmp_path / "out").exists()
    for name, value in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_blocks_from_texts_tensors_and_mappings():
    from relinear.data.tokenizers import byte_tokenizer

    texts = ["some text, " * 9, "another one. " * 9]
    blocks = token_blocks(iter(texts), byte_tokenizer(), 16, 5)
    assert bytes(blocks.flatten().tolist()).decode() == texts[0][:80]
    assert torch.equal(token_blocks(corpus(), None, 16, 4), corpus()[:2].view(4, 16))
    assert torch.equal(token_blocks([{"input_ids": ids} for ids in corpus()], None, 32, 2), corpus()[:2])
    rows = [{"input_ids": [0, 0, *ids.tolist(), 0], "attention_mask": [0, 0, *[1] * 32, 0]} for ids in corpus()]
    assert torch.equal(token_blocks(rows, None, 32, 2), corpus()[:2])
    batches = [{"input_ids": torch.tensor(r), "attention_mask": torch.tensor(r).ne(0)} for r in ([[5, 0], [6, 7]],)]
    assert token_blocks(batches, None, 3, 1).tolist() == [[5, 6, 7]]


@pytest.mark.slow
def test_the_command_killed_and_started_again(tmp_path):
    from relinear.data.tokenizers import byte_tokenizer

    torch.manual_seed(0)
    model = make_tiny_llama(vocab_size=258, num_hidden_layers=4)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text() * 3)
    environment = os.environ | {"PYTHONPATH": str(Path(relinear.__file__).parents[1])}

    def command(out):
        arguments = [str(tmp_path / "model"), "-r", "q_proj=rotor", "--data", str(text), "--split", "all"]
        arguments += ["--tokens", "16384", "--set", "validation_tokens=1024", "--threads", "1", "--out", str(out)]
        return [sys.executable, "-c", "from relinear_cli.main import run; run()", "distill", *arguments]

    subprocess.run(command(tmp_path / "whole"), env=environment, check=True, capture_output=True)
    process = subprocess.Popen(command(tmp_path / "cut"), env=environment, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "fit model.layers.2" in line:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert len(json.loads((tmp_path / "cut" / "distill.json").read_text())["done"]) in (2, 3)
    assert not (tmp_path / "cut" / "model").exists()
    subprocess.run(command(tmp_path / "cut"), env=environment, check=True, capture_output=True)
    weights, reports = (
        [tmp_path / run / name for run in ("cut", "whole")] for name in ("model/model.safetensors", "report.json")
    )
    assert weights[0].read_bytes() == weights[1].read_bytes()
    cut, whole = (json.loads(path.read_text()) for path in reports)
    assert cut.pop("command") != whole.pop("command")  # their --out
    assert cut == whole

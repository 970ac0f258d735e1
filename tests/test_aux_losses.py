"""Auxiliary losses: added once, scaled as the cross-entropy is, and never stale."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

import relinear
from relinear import contract
from relinear.contract.auxiliary_losses import operator_metrics
from relinear.contract.config import Config, register
from relinear.contract.operator import Operator, OperatorConfig
from relinear.contract.wrapper import Wrapper, WrapperConfig
from relinear.operators.low_rank import LowRank, LowRankLinear
from surgery_helpers import IDS, llama


class PenalizedLinear(LowRankLinear):
    """A low-rank layer with the mean squared output as its auxiliary loss, noted for every token."""

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            squares = y.float().square().mean(-1)
            self.record_auxiliary({"energy": 0.1 * squares}, {"energy": squares.detach()})
        return y


@register
class Penalized(LowRank):
    kind = "penalised_for_test"
    module_class = PenalizedLinear


@pytest.fixture
def model():
    model = llama().train()
    relinear.replace_(model, {"up_proj": Penalized(rank=4)}, layers=[0, 1])
    return model


BATCH = torch.arange(4 * 9).reshape(4, 9) % 50


def padded(ids):
    """Labels of sequences that end after 9, 6, 2 and 5 tokens, and whose prompt (of the second) is masked."""
    labels = ids.clone()
    for row, (start, end) in enumerate([(0, 9), (3, 6), (0, 2), (0, 5)]):
        labels[row, :start] = labels[row, end:] = -100
    return labels


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_loss_is_cross_entropy_plus_the_terms(model):
    loss = model(IDS, labels=IDS).loss
    terms = contract.auxiliary_losses_of(model)
    assert set(terms) == {f"model.layers.{i}.mlp.up_proj/energy" for i in (0, 1)}
    logits = model(IDS).logits
    plain = torch.nn.functional.cross_entropy(logits[0, :-1], IDS[0, 1:])
    torch.testing.assert_close(loss, plain + sum(terms.values()))
    assert isinstance(model(IDS, labels=IDS, return_dict=False)[0], torch.Tensor)
    torch.testing.assert_close(model(IDS, labels=IDS, return_dict=False)[0], loss)


def test_absent_in_eval_and_in_generate(model):
    model.eval()
    assert contract.auxiliary_losses_of(model) == {}
    logits = model(IDS).logits
    plain = torch.nn.functional.cross_entropy(logits[0, :-1], IDS[0, 1:])
    torch.testing.assert_close(model(IDS, labels=IDS).loss, plain)
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert contract.auxiliary_losses_of(model) == {}


def energy_by_hand(model, ids, counted, **kwargs):
    """0.1 times the mean squared output of every layer over the tokens that count, through hooks of its own."""
    terms, handles = {}, []
    for name, operator in relinear.contract.auxiliary_losses.named_operators(model):
        handles.append(
            operator.register_forward_hook(
                lambda module, args, y, name=name: terms.update({f"{name}/energy": 0.1 * y[counted].square().mean()})
            )
        )
    model(ids, **kwargs)
    for handle in handles:
        handle.remove()
    return terms


def test_the_terms_are_means_over_the_tokens_that_the_loss_counts(model):
    labels = padded(BATCH)
    counted = torch.zeros_like(labels, dtype=torch.bool)
    counted[:, :-1] = labels[:, 1:] != -100
    assert counted.sum() == 8 + 3 + 1 + 4
    mask = torch.ones_like(BATCH)
    mask[2, 2:] = mask[3, 5:] = 0
    ready = {"labels": labels, "shift_labels": torch.where(counted, BATCH, -100)}
    everything = torch.ones_like(counted)
    for inputs, wanted in (
        ({"labels": labels}, counted),
        ({"labels": labels, "attention_mask": torch.ones_like(BATCH)}, counted),
        (ready, counted),
        ({"attention_mask": mask}, mask == 1),
        ({}, everything),
    ):
        expected = energy_by_hand(model, BATCH, wanted, **inputs)
        model(BATCH, **inputs)
        found = contract.auxiliary_losses_of(model)
        assert set(found) == set(expected)
        measured = relinear.contract.auxiliary_losses.operator_metrics(model)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
            torch.testing.assert_close(measured[name], value.detach() / 0.1)
    changed = BATCH.clone()
    changed[2, 2:] = changed[3, 5:] = 7
    model(BATCH, labels=labels)
    before = contract.auxiliary_losses_of(model)
    model(changed, labels=torch.where(labels == -100, -100, changed))
    for name, value in contract.auxiliary_losses_of(model).items():
        torch.testing.assert_close(value, before[name])


def test_a_batch_without_a_target_has_no_terms_and_no_nan(model):
    ignored = torch.full_like(BATCH, -100)
    model(BATCH, labels=ignored, num_items_in_batch=torch.tensor(8)).loss.backward()
    assert all(value == 0 for value in contract.auxiliary_losses_of(model).values())
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_unshifted_labels_count_where_they_stand():
    from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=50, pad_token_id=0, num_labels=3, **sizes)
    tokens = LlamaForTokenClassification(copy.deepcopy(config)).train()
    relinear.replace_(tokens, {"up_proj": Penalized(rank=4)})
    labels = torch.where(padded(BATCH) == -100, -100, BATCH % 3)
    expected = energy_by_hand(tokens, BATCH, labels != -100)
    loss = tokens(BATCH, labels=labels).loss
    (found,), (wanted,) = contract.auxiliary_losses_of(tokens).values(), expected.values()
    torch.testing.assert_close(found, wanted)
    assert loss > found
    sequences = LlamaForSequenceClassification(config).train()
    relinear.replace_(sequences, {"up_proj": Penalized(rank=4)})
    mask = torch.ones_like(BATCH)
    mask[1:, 4:] = 0
    expected = energy_by_hand(sequences, BATCH, mask == 1)
    sequences(BATCH, attention_mask=mask, labels=torch.tensor([0, 1, 2, 0]), num_items_in_batch=torch.tensor(4))
    (found,), (wanted,) = contract.auxiliary_losses_of(sequences).values(), expected.values()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_hdpl_leaves_padding_out():
    model = llama().train()
    relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4, blocks=2, bound="free_bits", beta=1.0)}, layers=[0])
    layer = model.model.layers[0].self_attn.q_proj
    torch.nn.init.normal_(layer.logvar.weight)
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    labels = padded(BATCH)
    model(BATCH, labels=labels)
    (term,) = contract.auxiliary_losses_of(model).values()
    x = seen[0][:, :-1][labels[:, 1:] != -100]
    layer(x)
    torch.testing.assert_close(term, layer.auxiliary_losses()["latent"])
    layer(seen[0])
    assert (term - layer.auxiliary_losses()["latent"]).abs() > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("labels", [BATCH, padded(BATCH)], ids=["full", "padded"])
def test_accumulation_gives_the_gradient_of_the_whole_batch(model, labels, checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parts = copy.deepcopy(model)
    total = (labels[:, 1:] != -100).sum()
    model(BATCH, labels=labels, num_items_in_batch=total).loss.backward()
    for part, wanted in zip(BATCH.split(1), labels.split(1), strict=True):
        parts(part, labels=wanted, num_items_in_batch=total).loss.backward()
    whole, accumulated = gradients(model), gradients(parts)
    assert set(whole) == set(accumulated)
    for name in whole:
        torch.testing.assert_close(accumulated[name], whole[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("whole", [False, True], ids=["layers", "model"])
def test_what_is_recomputed_changes_no_term_and_no_metric(whole):
    model = llama().train()
    relinear.replace_(model, {"q_proj": relinear.HDPL(rank=4, blocks=2, bound="free_bits", beta=1.0)})
    plain, labels = copy.deepcopy(model), padded(BATCH)
    torch.manual_seed(0)
    plain(BATCH, labels=labels).loss.backward()

    def run(ids):
        return model(ids, labels=labels).loss

    torch.manual_seed(0)
    if whole:
        loss = checkpoint(run, BATCH, use_reentrant=False)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = run(BATCH)
    loss.backward()
    # of a whole model, torch stops half-way
    for recorded in () if whole else (contract.auxiliary_losses_of, operator_metrics):
        torch.testing.assert_close(recorded(model), recorded(plain))
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("settings", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": True}], ids=str)
def test_a_trainer_that_leaves_the_terms_out_is_told(model, settings, tmp_path):
    def by_itself(outputs, labels, num_items_in_batch):
        return outputs.logits.square().mean()

    function = by_itself if settings.pop("compute_loss_func", None) else None
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no", **settings
    )
    rows = [{"input_ids": row, "labels": row} for row in BATCH]
    with pytest.warns(UserWarning, match="not added to any loss"):
        Trainer(model, arguments, train_dataset=rows, compute_loss_func=function).train()
    with pytest.warns(UserWarning, match="not added to any loss"):  # by a model that knows nothing of accumulation, too
        model(BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(BATCH, labels=BATCH)
        with torch.no_grad():
            model(BATCH)
        model.eval()(BATCH)


def test_two_forwards_before_one_backward_under_checkpointing(model):
    plain = copy.deepcopy(model)
    (plain(BATCH[:2], labels=BATCH[:2]).loss + plain(BATCH[2:], labels=BATCH[2:]).loss).backward()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    (model(BATCH[:2], labels=BATCH[:2]).loss + model(BATCH[2:], labels=BATCH[2:]).loss).backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient, atol=1e-6, rtol=1e-4)


def test_reentrant_checkpointing_is_refused(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="reentrant"):
        model(IDS, labels=IDS)


def test_a_skipped_layer_leaves_no_stale_loss(model):
    model(IDS, labels=IDS).loss.backward()
    model.model.layers[1].mlp.forward = lambda x: x
    loss = model(IDS, labels=IDS).loss
    assert set(contract.auxiliary_losses_of(model)) == {"model.layers.0.mlp.up_proj/energy"}
    loss.backward()


def test_an_operator_at_two_places_counts_with_its_last_call(model):
    layers = model.model.layers
    layers[1].mlp.up_proj = shared = layers[0].mlp.up_proj
    seen = []
    shared.register_forward_hook(lambda module, args, y: seen.append(0.1 * y.square().mean(-1)))
    output = model(BATCH, labels=padded(BATCH))
    counted = torch.nn.functional.pad(padded(BATCH)[:, 1:] != -100, (0, 1))
    terms = contract.auxiliary_losses_of(model)
    assert set(terms) == {"model.layers.0.mlp.up_proj/energy"}
    assert len(seen) == 2
    torch.testing.assert_close(terms["model.layers.0.mlp.up_proj/energy"], seen[1][counted].mean())
    shared.train(False)
    torch.testing.assert_close(output.loss - seen[1][counted].mean(), model(BATCH, labels=padded(BATCH)).loss)


def test_deepcopy_after_a_training_forward(model):
    model(IDS, labels=IDS)
    other = copy.deepcopy(model)
    assert contract.auxiliary_losses_of(other) == {}
    torch.testing.assert_close(other(IDS, labels=IDS).loss, model(IDS, labels=IDS).loss)


@pytest.mark.slow
def test_fullgraph_compile(model):
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(BATCH, labels=padded(BATCH)).loss, eager(BATCH, labels=padded(BATCH)).loss)
    loss = compiled(IDS, labels=IDS).loss
    torch.testing.assert_close(loss, eager(IDS, labels=IDS).loss)
    loss.backward()
    assert len(contract.auxiliary_losses_of(model)) == 2


def test_a_kind_is_registered_once():
    register(LowRank)
    with pytest.raises(ValueError, match="already registered"):

        @register
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Other(OperatorConfig):
            kind = "low_rank"
            module_class = LowRankLinear

    assert Config.from_dict is not OperatorConfig.from_dict
    with pytest.raises(ValueError, match="hides a method"):

        @register
        class Hiding(OperatorConfig):
            kind = "hiding"
            module_class = LowRankLinear
            scaled: float = 1.0

    for rank in (1, 2):  # a notebook's cell that runs again

        @register
        class Again(OperatorConfig):
            kind = "again"
            module_class = LowRankLinear
            size: int = rank

    assert OperatorConfig.read("again").size == 2


def test_a_tuple_without_a_loss_warns_as_an_output_does(model):
    for keywords in ({}, {"return_dict": False}):
        with pytest.warns(UserWarning, match="not added to any loss"):
            model(IDS, **keywords)


def test_metrics_without_a_loss_are_detached_and_those_of_the_forward(model):
    class Measured(LowRankLinear):
        def forward(self, x):
            y = super().forward(x)
            self.record_auxiliary({}, {"energy": y.float().square().mean(-1)})
            return y

    layer = model.model.layers[0].mlp.up_proj
    layer.__class__ = Measured
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(BATCH, labels=padded(BATCH)).loss
    before = layer.metrics()["energy"]
    loss.backward()
    assert layer.metrics()["energy"].equal(before)
    assert not before.requires_grad
    layer.clear_auxiliary_losses()
    assert not layer.has_auxiliary()


def test_a_layer_that_is_skipped_keeps_the_means_of_its_own_forward(model) -> None:
    """Means of metrics are taken when they are read: not with the mask of a later forward, of the same shape."""
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(2, 6, layer.in_features)
    layer(x)
    energy = layer._metrics["energy"]
    first, second = torch.arange(12).view(2, 6) < 5, torch.arange(12).view(2, 6) >= 5
    layer.reduce_auxiliary(first)
    layer.reduce_auxiliary(second)
    torch.testing.assert_close(layer.metrics()["energy"], energy[first].mean())
    layer(x)  # by itself: all tokens count
    torch.testing.assert_close(layer.metrics()["energy"], energy.mean())


def energy(y):
    return {"energy": 0.1 * y.float().square().mean(-1)}


class MeasuredWrapper(Wrapper):
    """A wrapper with a parameter and a loss of its own."""

    def create(self, **kw):
        self.gain = torch.nn.Parameter(torch.empty(self.out_features, **kw))

    def reset_own_parameters(self):
        torch.nn.init.ones_(self.gain)

    def forward(self, x):
        y = self.base(x) * self.gain
        if self.training:
            self.record_auxiliary(energy(y), {})
        return y

    def neutralize(self):
        torch.nn.init.ones_(self.gain)

    def flops_per_token(self):
        return self.base_flops_per_token() + self.out_features


@register
class Measured(WrapperConfig):
    kind = "measured_wrapper"
    module_class = MeasuredWrapper


class NestedLinear(Operator):
    """An operator made of another one."""

    def create(self, **kw):
        self.inner = Penalized(rank=4).build(self.in_features, self.out_features, **kw)

    def reset_parameters(self):
        self.inner.reset_parameters()
        self.zero_bias_()

    def forward(self, x):
        return self.inner(x)

    def flops_per_token(self):
        return self.inner.flops_per_token()


@register
class Nested(OperatorConfig):
    kind = "nested_operator"
    module_class = NestedLinear


def terms_of(model, **keywords):
    loss = model(BATCH, labels=BATCH, **keywords).loss
    terms = contract.auxiliary_losses_of(model)
    logits = model(BATCH).logits
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), BATCH[:, 1:].flatten())
    torch.testing.assert_close(loss, plain + sum(terms.values()))
    return terms


@pytest.mark.filterwarnings("ignore:the operators' auxiliary losses")
def test_wrappers_and_nested_operators_have_losses_of_their_own():
    model = llama().train()
    relinear.replace_(model, {"up_proj": Measured(base=Penalized(rank=4)), "down_proj": Nested()}, layers=[0])
    terms = terms_of(model)
    assert set(terms) == {
        "model.layers.0.mlp.up_proj/energy",
        "model.layers.0.mlp.up_proj/base.energy",
        "model.layers.0.mlp.down_proj/energy",
    }
    assert model.model.layers[0].mlp.down_proj.inner.name_in_model == "model.layers.0.mlp.down_proj.inner"
    wrapper = model.model.layers[0].mlp.up_proj
    assert [name for name, _ in wrapper.named_parameters()] == ["gain", "base.down", "base.up"]
    frozen = Measured().convert(torch.nn.Linear(4, 4).requires_grad_(False))
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@pytest.mark.filterwarnings("ignore:the operators' auxiliary losses")
def test_losses_are_added_once_where_a_model_is_a_part_of_another(model):
    class Outer(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *inputs, **keywords):
            return self.inner(*inputs, **keywords)

    outer = Outer(model)
    relinear.replace_(outer, {"k_proj": relinear.LowRank(rank=2)})
    assert len(terms_of(outer.train())) == 2


@pytest.mark.filterwarnings("ignore:the operators' auxiliary losses")
def test_copies_that_peft_does_not_use_hide_no_loss(model):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(target_modules=["o_proj"], modules_to_save=["up_proj"])
    adapted = get_peft_model(model, settings)
    adapted.add_adapter("other", settings)
    for name in ("default", "other"):
        adapted.set_adapter(name)
        assert set(terms_of(adapted.train())) == {f"model.layers.{i}.mlp.up_proj/energy" for i in (0, 1)}


def test_a_bias_that_nobody_initialises_is_zero():
    class Forgetful(LowRankLinear):
        def reset_parameters(self):
            torch.nn.init.ones_(self.down)
            torch.nn.init.ones_(self.up)

    assert not Forgetful(LowRank(rank=2), 64, 64).bias.any()


def test_nothing_is_recorded_in_eval():
    class Unguarded(LowRankLinear):
        def forward(self, x):
            y = super().forward(x)
            self.record_auxiliary(energy(y), {})
            return y

    layer = Unguarded(LowRank(rank=2), 4, 4).eval()
    layer(torch.ones(3, 4))
    assert layer.train().auxiliary_losses() == {}


def test_a_wrappers_own_parameters_are_initialised_anew_and_on_the_meta_device():
    with torch.device("meta"):
        model = llama()
        relinear.replace_(model, {"q_proj": Measured()})
    model.to_empty(device="cpu")
    wrapper = model.model.layers[0].self_attn.q_proj
    wrapper.gain.data.fill_(7)
    model.init_weights()
    assert (wrapper.gain == 1).all()
    wrapper.gain.data.fill_(7)
    wrapper.reset_parameters()
    assert (wrapper.gain == 1).all()


def test_a_plan_knows_which_wrappers_can_be_neutral():
    class Louder(MeasuredWrapper):
        neutralize = Wrapper.neutralize

    @register
    class Loud(WrapperConfig):
        kind = "loud"
        module_class = Louder

    assert Measured().fits_weight
    with pytest.raises(ValueError, match="loud"):
        relinear.plan(llama(), {"q_proj": Loud()}, init="from_weight")


def test_a_subclass_adds_to_its_parents_losses_and_a_token_may_have_several_values(model):
    class Several(PenalizedLinear):
        def forward(self, x):
            y = super().forward(x)
            self.record_auxiliary({"several": y.square()}, {})
            return y

    layer = model.model.layers[0].mlp.up_proj
    layer.__class__ = Several
    outputs = []
    layer.register_forward_hook(lambda module, args, y: outputs.append(y))
    labels = padded(BATCH)
    model(BATCH, labels=labels)
    losses = layer.auxiliary_losses()
    assert set(losses) == {"energy", "several"}
    counted = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))
    torch.testing.assert_close(losses["several"], outputs[0].square()[counted].mean())


def test_losses_of_two_models_in_one_have_full_names(model):
    both = torch.nn.ModuleDict({"a": model, "b": copy.deepcopy(model)})
    for part in both.values():
        part(BATCH, labels=BATCH)
    assert len(contract.auxiliary_losses_of(both)) == 4
    assert len(operator_metrics(both)) == 4


def test_settings_of_a_base_that_is_no_dataclass_are_refused():
    class Base(OperatorConfig):
        rank: int = 4

    class Leaf(Base):
        kind = "leaf_of_a_plain_base"
        module_class = LowRankLinear

    with pytest.raises(ValueError, match=r"Base\.rank is no setting of Leaf; make Base a dataclass"):
        register(Leaf)

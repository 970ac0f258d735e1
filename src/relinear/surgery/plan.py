"""Replace linear layers in two phases: ``plan`` resolves and checks and returns a ``Plan``; ``Plan.apply_`` replaces.

``replace_`` does both.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from relinear.activations.hooks import check_not_hooked
from relinear.activations.shared_context import check_context_serves
from relinear.contract.attachment import AttachmentConfig
from relinear.contract.config import check_value
from relinear.contract.input_checks import check_finite, check_model
from relinear.contract.linear_layers import linear_features
from relinear.contract.operator import Init, Operator, OperatorConfig
from relinear.contract.wrapper import WrapperConfig
from relinear.deprecated import with_attributes_of_0_2, with_renamed_keyword
from relinear.hf.attachments import apply_attachment_
from relinear.hf.config_record import check_not_quantized, finish_surgery_
from relinear.hf.model_config import loaded_from
from relinear.hf.peft_models import unfreeze_new_parameters_, unwrapped, warn_adapters_omit
from relinear.settings.config_text import keeps_layer
from relinear.settings.messages import quoted, warn_user
from relinear.settings.patterns import ALL_LINEAR
from relinear.surgery.coverage import warn_of_gaps
from relinear.surgery.select import (
    ParameterHolders,
    Target,
    parameter_holders,
    parameter_tied_to,
    reader_of_weight,
    select_targets,
)
from relinear.surgery.summary import Summary, module_flops, module_parameters, summary
from relinear.surgery.tied import check_can_embed, replace_layer_keeping_ties_, tied_head

#: warn about operators with more than this factor of the replaced layer's parameters
_WARN_ABOVE = 1.5


@dataclasses.dataclass(frozen=True)
class Replacement:
    """Describe the planned replacement of one module by an operator.

    Attributes:
        target: the module, with its names.
        config: settings of the operator.
        in_features: size of the layer's input.
        out_features: size of the layer's output.
    """

    target: Target
    config: OperatorConfig
    in_features: int
    out_features: int

    @property
    def name(self) -> str:
        """Return the module's first name in the model."""
        return self.target.name


@with_attributes_of_0_2
@dataclasses.dataclass(frozen=True)
class Plan:
    """The changes that ``replace_`` would make, before anything has changed. Printing it shows a line per layer.

    Attributes:
        model: the model to change.
        replacements: one for every layer to replace.
        init: how the operators are initialised.
        skipped: why each other linear layer stays, by name.
        notes: warnings that ``apply_`` issues and the summary shows.
    """

    model: nn.Module
    replacements: tuple[Replacement, ...]
    init: Init
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.replacements)} layers to replace (init={self.init}):"]
        for r in self.replacements:
            also = f" (also {', '.join(r.target.aliases)})" if r.target.aliases else ""
            lines.append(f"  {r.name}{also}: {type(r.target.module).__name__} -> {r.config}")
        return "\n".join([*lines, *self.notes])

    def apply_(self) -> Summary:
        """Apply the plan. All operators are built before the first replacement, so a failure changes nothing.

        Returns:
            The model's summary, with the sizes of replaced layers before and after.

        Raises:
            ValueError: if a layer was replaced since the plan was made, or within a block of interventions.
        """
        check_not_hooked(self.model, "replace_")
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for replacement in self.replacements:
            if modules.get(replacement.name) is not replacement.target.module:
                raise ValueError(f"{replacement.name} is another layer than when the plan was made: plan again")
        before = {
            r.name: (module_parameters(r.target.module), module_flops(r.target.module)) for r in self.replacements
        }
        old_parameters = {id(parameter) for parameter in self.model.parameters()}
        operators = [r.config.convert(r.target.module, self.init) for r in self.replacements]
        for operator in operators:  # an operator that lacks what the record and the summary ask for fails here
            operator.config.to_dict()
            operator.flops_per_token()
        for replacement, operator in zip(self.replacements, operators, strict=True):
            target = replacement.target
            replace_layer_keeping_ties_(self.model, (target.name, *target.aliases), target.module, operator)
        finish_surgery_(self.model)
        if unwrapped(self.model) is not self.model and operators:
            if self.init == "fresh":
                unfreeze_new_parameters_(self.model, old_parameters)
            warn_adapters_omit(f"{len(operators)} operators", [r.name for r in self.replacements])
        for note in self.notes:
            warn_user(note)
        result = dataclasses.replace(summary(self.model, before=before, skipped=self.skipped), notes=self.notes)
        if any(r.target.pattern == ALL_LINEAR for r in self.replacements):
            warn_of_gaps(result.coverage)
        return result


def plan(
    model: nn.Module,
    mapping: Mapping[str, OperatorConfig | str | None],
    *,
    layers: Iterable[int] | int | None = None,
    exclude: str | Iterable[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    init: Init = "fresh",
) -> Plan:
    """Resolve which layers ``mapping`` replaces, and check that every replacement is possible; changes nothing.

    Args:
        model: any ``nn.Module``; names are those of ``model.named_modules()``.
        mapping: pattern -> operator config. A plain key is an exact name or a dotted suffix ("q_proj"), anything else
            a regular expression matched in full, ``"all-linear"`` everything but the output head. The first match wins;
            ``None`` leaves the layer alone. A config may be text, as on the command line: ``"low_rank:rank=8"``. A
            plain key may also name the token embedding; a head that is tied to it then uses the operator, too.
        layers: indices of the decoder layers to change (negative ones count from the end); all by default.
        exclude: patterns of layers, or of modules that hold them, to leave alone.
        filter_fn: ``filter_fn(module, name) -> bool``; False leaves the layer alone.
        init: "fresh" initialises new parameters (with a warning if the model is pretrained), "from_weight" fits them to
            the layer's weight (``fit_to_linear_``).

    Returns:
        The plan; print it, or apply it with ``apply_()``.

    Raises:
        ValueError: for a pattern without a match (with the nearest names), a size that the operator does not support, a
            tied weight, a root that is itself a linear layer, a quantized model, or an operator that cannot be fitted.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> plan = relinear.plan(model, {".*mlp.*": "monarch:blocks=8"}, layers=[0, 1], exclude="down_proj")
        >>> len(plan.replacements)
        4
    """
    check_model(model, "surgery (plan, replace_)")
    check_value("init", init, Init)
    if not isinstance(mapping, Mapping) or not mapping:
        raise ValueError(f"mapping must be a non-empty dict of pattern -> operator config, got {quoted(mapping)}")
    configs = {pattern: _operator_config(pattern, config) for pattern, config in mapping.items()}
    check_not_quantized(model)
    targets, skipped = select_targets(model, mapping, layers=layers, exclude=exclude, filter_fn=filter_fn)
    replacements, holders = [], parameter_holders(model)
    for target in targets:
        config = configs[target.pattern]
        if config is None:
            skipped[target.name] = "mapped to None"
        else:
            shape = linear_features(target.module)
            _check_target(model, holders, target, config, shape, init)
            replacements.append(Replacement(target, config, *shape))
    return Plan(model, tuple(replacements), init, skipped, tuple(_notes(model, replacements, init)))


def _check_target(
    model: nn.Module,
    holders: ParameterHolders,
    target: Target,
    config: OperatorConfig,
    shape: tuple[int, int],
    init: Init,
) -> None:
    """Raise ValueError if an operator of ``config`` cannot replace ``target``."""
    if not target.name:
        raise ValueError(f"the model itself is a linear layer; call {config}.convert(linear, {init=})")
    head = tied_head(model, target.module)
    names = [target.name]
    if head is not None:
        names += [name for name, module in model.named_modules() if module is head]
    reader = next(filter(None, (reader_of_weight(model, name) for name in names)), None)
    if reader is not None:
        raise ValueError(f"{target.name} cannot be replaced: {reader} reads its weight. Leave it out with exclude=")
    shared = parameter_tied_to(holders, target.module, head)
    if shared is not None:
        raise ValueError(
            f"{target.name} shares its weight with {shared}. Build the model with tie_word_embeddings=False, or leave "
            "it out with exclude="
        )
    for name, parameter in target.module.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(f"{target.name}.{name} is {parameter.dtype}; only floating-point layers can be replaced")
    if init == "from_weight" and not config.fits_weight:
        raise ValueError(f"{target.name}: {config.kind} cannot be fitted to a weight in closed form; {config.fit_hint}")
    if init == "from_weight":
        check_finite(target.module, target.name)
    try:
        config.check_shape(*shape)
    except ValueError as error:
        raise ValueError(f"{target.name}: {error}") from error
    check_can_embed(config, target.module, target.name)
    check_context_serves(model, target.name, config)


def _notes(model: Any, replacements: list[Replacement], init: Init) -> Iterator[str]:
    """Yield warnings about a plan: trained weights that are lost, operators larger than the layers they replace."""
    replaced = [r for r in replacements if not _wraps_replaced_layer(r.config)]
    name = loaded_from(model)
    lost = [r.name for r in replaced if not isinstance(r.target.module, Operator)]
    if init == "fresh" and name and lost:
        yield (
            f"init='fresh' discards the trained weights of {len(lost)} layers of {quoted(name)} (such as {lost[0]}): "
            "the model has to be trained again. init='from_weight' fits operators to the weights, if they can be; "
            "relinear.distill_ and relinear.compress fit operators to the layers' outputs"
        )
    counts = Counter((r.config, r.in_features, r.out_features, module_parameters(r.target.module)) for r in replaced)
    for (config, in_features, out_features, before), count in counts.items():
        after = module_parameters(config.build(in_features, out_features, device="meta"))
        if before and after > _WARN_ABOVE * before:
            yield (
                f"{config} has {after:,} parameters in place of {before:,}, {after / before:.1f} times as many, in "
                f"{count} layers of {in_features} -> {out_features}; a smaller size makes the model smaller"
            )


def _wraps_replaced_layer(config: OperatorConfig | None) -> bool:
    """Return whether an operator, or the innermost of several, wraps the layer that it replaces."""
    while isinstance(config, WrapperConfig):
        config = config.base
    return config is None


def _operator_config(pattern: Any, config: Any) -> OperatorConfig | None:
    if config is None or (isinstance(config, str) and keeps_layer(config)):
        return None
    try:
        return OperatorConfig.read(config)
    except ValueError as error:
        raise ValueError(f"{quoted(pattern)}: {error}") from None


def replace_(
    model: nn.Module,
    mapping: Mapping[str, OperatorConfig | str | None],
    *,
    layers: Iterable[int] | int | None = None,
    exclude: str | Iterable[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    init: Init = "fresh",
) -> Summary:
    """Replace linear layers of ``model`` in place: ``relinear.plan(...)`` with the same arguments, applied.

    Args:
        model: any ``nn.Module``; changed in place.
        mapping: pattern -> operator config, or its text ``"low_rank:rank=8"``; ``None`` leaves a layer alone. A plain
            key is a name or dotted suffix, anything else a regular expression matched in full; the first match wins.
        layers: indices of the decoder layers to change (negative ones count from the end); all by default.
        exclude: patterns of layers, or of modules that hold them, to leave alone.
        filter_fn: ``filter_fn(module, name) -> bool``; False leaves the layer alone.
        init: "fresh" initialises new parameters, "from_weight" fits them to the layer's weight.

    Returns:
        A summary to print: layer, operator, parameters and FLOPs per token, before and after.

    Raises:
        ValueError: as ``relinear.plan``; the model is then unchanged.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> mapping = {"q_proj": relinear.HDPL(rank=8), ".*mlp.*": relinear.Monarch(blocks=8)}
        >>> report = relinear.replace_(model, mapping, layers=[0, 1])
        >>> report.parameters < report.parameters_before
        True
    """
    return plan(model, mapping, layers=layers, exclude=exclude, filter_fn=filter_fn, init=init).apply_()


@with_renamed_keyword("method", "attachment")
def attach_(model: nn.Module, attachment: AttachmentConfig | str) -> None:
    """Attach a model-level part (``ContextManager``, residual method, ...) in place, so that checkpoints restore it.

    Args:
        model: a model that supports the part, usually a Hugging Face decoder.
        attachment: the part's settings, or text as on the command line: ``"context_manager:dim=64"``.

    Raises:
        ValueError: if ``model`` does not support the part, as its ``check`` says; the model is then unchanged.

    Examples:
        >>> model = relinear.from_preset("tiny")
        >>> relinear.attach_(model, "context_manager:dim=16")
        >>> sum(p.numel() for n, p in model.named_parameters() if "relinear_context" in n)
        4704
    """
    check_model(model, "attach_")
    attachment = AttachmentConfig.read(attachment)
    check_not_quantized(model)
    apply_attachment_(model, attachment)
    finish_surgery_(model)

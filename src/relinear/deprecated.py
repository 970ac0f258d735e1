"""Public names that have moved or changed. The old name works for one version, with a DeprecationWarning."""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

_HOMES = {
    "relinear.activations": "Add Clamp Inject context intervene latents moment_alignment",
    "relinear.compression": "CompressSettings",
    "relinear.contract": "AttachmentConfig NotLinearError ObjectiveConfig",
    "relinear.data": "prepare_data",
    "relinear.distill": "DistillSettings",
    "relinear.evaluate": "lambada lm_eval",
    "relinear.models": "preset_names",
    "relinear.residual": "DeepNorm LaurelLR LaurelPA LaurelRW LayerNormScaling PostLN ReZero SDPAGate SecondEmbedding "
    "residual_methods",
    "relinear.surgery": "placement placement_names train_only_",
    "relinear.system.allocator": "tune_allocator",
    "relinear.training": "LatentMoments read_moments",
}
#: name in ``relinear`` -> (module that it is in now, its name there)
MOVED = {name: (module, name) for module, names in _HOMES.items() for name in names.split()}
MOVED["aux_losses"] = ("relinear.contract", "auxiliary_losses_of")
MOVED["Replace"] = ("relinear.activations", "Patch")
MOVED["residual_"] = ("relinear", "attach_")


def moved(name: str) -> Any:
    """Return what ``relinear.<name>``, one of ``MOVED``, is now, and warn on behalf of the caller's caller."""
    module, new = MOVED[name]
    warnings.warn(f"relinear.{name} has moved: from {module} import {new}", DeprecationWarning, stacklevel=3)
    return getattr(import_module(module), new)


#: module of 0.2 that operators, attachments and scripts import from -> the module that has its names now
MOVED_MODULES = {
    "relinear.core.attachment": "relinear.contract.attachment",
    "relinear.core.aux": "relinear.contract.auxiliary_losses",
    "relinear.core.config": "relinear.contract.config",
    "relinear.core.context": "relinear.activations.shared_context",
    "relinear.core.inference": "relinear.contract.inference",
    "relinear.core.latents": "relinear.activations.latent_recording",
    "relinear.core.moments": "relinear.contract.calibration_statistics",
    "relinear.core.objective": "relinear.contract.objective",
    "relinear.core.operator": "relinear.contract.operator",
    "relinear.core.roles": "relinear.contract.parameter_roles",
    "relinear.core.sites": "relinear.activations.hooks",
    "relinear.core.token_terms": "relinear.contract.auxiliary_mixin",
    "relinear.compress.calibrate": "relinear.compression.calibrate",
    "relinear.compress.export_gguf": "relinear.compression.gguf",
    "relinear.compress.settings": "relinear.compression.settings",
    "relinear.explore.subject": "relinear.explore.explored_model",
    "relinear.train.callbacks": "relinear.training.callbacks",
    "relinear.train.fit": "relinear.training.fitting",
    "relinear.train.optim": "relinear.training.optim",
    "relinear.train.run": "relinear.training.run",
    "relinear.train.settings": "relinear.training.settings",
    "relinear.train.trainer": "relinear.training.trainer",
}
#: package of 0.2 whose name is that of a function -> the room that has both now
_HIDDEN = {"relinear.compress": "relinear.compression", "relinear.train": "relinear.training"}
_PACKAGES = {name.rpartition(".")[0] for name in MOVED_MODULES}
_INTERVENTIONS = {name: name for name in ("Add", "Clamp", "Inject", "intervene")}
_INTERVENTIONS |= {"Edit": "Intervention", "Replace": "Patch"}
#: (module now, name of 0.2) -> its name now, after "module:" if that is in another one
_RENAMED = {
    ("relinear.contract.calibration_statistics", "Moments"): "CalibrationStatistics",
    ("relinear.contract.calibration_statistics", "descend_"): "fit_by_lbfgs_",
    ("relinear.activations.shared_context", "check_conditioned"): "check_context_serves",
    ("relinear.activations.shared_context", "check_carries_context"): "decoder_for_context",
    ("relinear.contract.auxiliary_losses", "aux_losses"): "auxiliary_losses_of",
    ("relinear.contract.auxiliary_mixin", "TokenTerms"): "AuxiliaryLossMixin",
    ("relinear.activations.latent_recording", "Moments"): "LatentDistribution",
    ("relinear.activations.latent_recording", "moments"): "aggregated_posterior",
    **{
        ("relinear.activations.latent_recording", old): f"relinear.activations.interventions:{new}"
        for old, new in _INTERVENTIONS.items()
    },
    ("relinear.activations.hooks", "Latent"): "Activation",
    ("relinear.activations.latent_recording", "Latent"): "Activation",
    ("relinear.activations.latent_recording", "observe"): "relinear.activations.hooks:observe",
    ("relinear.activations.hooks", "LatentTap"): "ActivationHook",
    ("relinear.activations.hooks", "Gated"): "HasHookPoints",
    ("relinear.activations.hooks", "Site"): "HookPoint",
    ("relinear.activations.hooks", "sites"): "hook_points",
    ("relinear.contract.auxiliary_losses", "IGNORED_LABEL"): "relinear.hf.labels:IGNORED_LABEL",
    ("relinear.contract.auxiliary_losses", "share_of_batch"): "relinear.hf.labels:share_of_batch",
    ("relinear.contract.config", "layer_indices"): "relinear.hf.model_layout:layer_indices",
    ("relinear.contract.config", "parse_setting"): "relinear.settings.config_text:parse_config_text",
    ("relinear.explore.explored_model", "prepare_subject"): "load_explored_model",
    ("relinear.contract.objective", "GuidedTraining"): "relinear.hf.training_loss:ModelWithObjective",
    ("relinear.contract.objective", "kl_terms"): "relinear.evaluate.losses:kl_terms",
}


class _MovedModules:
    """Find modules of 0.2 by their old paths."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        known = name in MOVED_MODULES or name in _PACKAGES
        return ModuleSpec(name, self, is_package=name in _PACKAGES) if known else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in _HIDDEN:  # importing from below it must not hide the function
            room = import_module(_HIDDEN[name])
            function = getattr(room, name.rpartition(".")[2])
            function.__path__, function.__spec__ = [], None
            vars(function).update({n: getattr(room, n) for n in getattr(room, "__all__", vars(room)) if n[0] != "_"})
            sys.modules[name] = function
        elif name in MOVED_MODULES:
            new = MOVED_MODULES[name]
            warnings.warn(f"{name} has moved to {new}; the old path works for one version", DeprecationWarning, 2)
            import_module(new)
            module.__getattr__ = lambda key: _find(new, key)  # type: ignore[method-assign]


def _find(module: str, old: str) -> Any:
    other, _, name = _RENAMED.get((module, old), old).rpartition(":")
    return getattr(import_module(other or module), name)


def find_moved_modules() -> None:
    """Let modules of 0.2 be imported by their old paths, if no module of that name exists."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())  # type: ignore[arg-type]


def renamed_in_module(module: str, **names: Any) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``module``, which gives ``names`` under their old names and warns."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{names[name].__module__}.{names[name].__name__}")
        return names[name]

    return find


#: class -> name of 0.2 of a method or attribute -> its name now
_ATTRIBUTES_OF_0_2 = {
    "AttachmentConfig": {"for_part": "for_model"},
    "AuxiliaryLossMixin": {"aux_losses": "auxiliary_losses", "note": "record_auxiliary"},
    "CCL": {"basis_gates": "basis_gate_count"},
    "CalibrationStatistics": {"inputs": "input_moment", "outputs": "gradient_moment"},
    "CompressReport": {"left": "out_of_reach"},
    "Coordinates": {"spread": "ratio"},
    "Coverage": {"left": "skipped", "layers": "replaced_layers", "parameters": "replaced_parameters"},
    "FoldReport": {"left": "skipped"},
    "HasHookPoints": {
        "tap_kind": "hook_kind",
        "tap_sizes": "hook_sizes",
        "_taps": "activation_hooks",
        "_tapped": "hooked",
        "_is_edited": "is_intervened",
    },
    "Inject": {"source": "value"},
    "Operator": {
        "from_linear": "fit_to_linear_",
        "from_moments": "fit_to_calibration_",
        "wrong_values": "problem_with_values",
    },
    "OperatorConfig": {
        "error_curve": "candidate_errors",
        "formerly": "legacy_defaults",
        "resized": "scaled",
        "sizes": "candidates",
    },
    "Plan": {"left": "skipped"},
    "Progress": {"step": "done", "steps": "total", "phase": "stage", "what": "text"},
    "ResidualConfig": {"site": "residual_part"},
    "Settings": {"updated": "replace"},
}
_Class = TypeVar("_Class", bound=type)
_Function = TypeVar("_Function", bound=Callable)


def with_attributes_of_0_2(cls: _Class) -> _Class:
    """Decorate a class so that methods and attributes work under their old names for one version, and warn."""
    for old, new in _ATTRIBUTES_OF_0_2[cls.__name__].items():
        attribute = RenamedAttribute(new)
        attribute.__set_name__(cls, old)
        setattr(cls, old, attribute)
    return cls


class RenamedAttribute:
    """Keep an old name of a method or attribute working for one version, with a warning."""

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    def __get__(self, instance: Any, owner: type) -> Any:
        warn_renamed(f"{owner.__name__}.{self.old}", self.new)
        # an override under the old name takes precedence, unless it is the one that calls super()
        overrides = [cls for cls in owner.__mro__ if not isinstance(vars(cls).get(self.old, self), RenamedAttribute)]
        source: Any = owner if instance is None else instance
        return getattr(super(overrides[-1], source) if overrides else source, self.new)


def adopt_renamed_attributes(cls: type) -> None:
    """Rename what the new class ``cls`` defines under an old name to the new one, and warn."""
    for base in cls.__mro__[1:]:
        for old, hook in vars(base).items():
            if isinstance(hook, RenamedAttribute) and old in vars(cls):
                warn_renamed(f"{cls.__name__}.{old}", hook.new, 4)
                setattr(cls, hook.new, vars(cls)[old])


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that ``old``, such as ``Class.attribute`` or ``function(argument=)``, is now called ``new``."""
    message = f"{old} has a new name: {new}; the old one works in this version only"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


#: attribute in which a module of 0.2 declares fans and initialisation -> its name now
_DECLARATIONS_OF_0_2 = {
    "fixed_fan_in": "finite_fan_in",
    "fixed_fan_out": "finite_fan_out",
    "constant_start": "constant_initialized",
    "orthogonal_start": "orthogonal_initialized",
}


def declared(module: object, attribute: str) -> tuple[str, ...]:
    """Return what ``module`` declares in ``attribute`` or under its name of 0.2, which takes precedence and warns."""
    for old, new in _DECLARATIONS_OF_0_2.items():
        if new == attribute and hasattr(module, old):
            warn_renamed(f"{type(module).__name__}.{old}", attribute)
            if names := getattr(module, old):
                return names
    return getattr(module, attribute, ())


def with_renamed_keyword(old: str, new: str) -> Callable[[_Function], _Function]:
    """Decorate a function so that its keyword ``new`` works as ``old``, its name of 0.2, and warns."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if old in keywords:
                warn_renamed(f"{function.__name__}({old}=)", f"{new}=")
                keywords[new] = keywords.pop(old)
            return function(*arguments, **keywords)

        return call  # type: ignore[return-value]

    return decorate


def overwriting(overwrite: bool, resume: bool | None) -> bool:
    """Return whether to overwrite, from ``overwrite`` or from the deprecated ``resume``, its opposite."""
    if resume is None:
        return overwrite
    warnings.warn("resume= is deprecated; overwrite=True is what resume=False was", DeprecationWarning, stacklevel=3)
    return not resume


#: class of settings -> key of 0.2 -> its name now
RENAMED_SETTINGS = {
    "CompareSettings": {"sizes": "widths"},
    "Preregistration": {"spread": "std", "spread_from": "std_from"},
    "CompressSettings": {"menu": "candidates"},
    "DistillSettings": {"batch_size": "tokens_per_step"},
    "TrainSettings": {"model_start": "model_init"},
}


#: class of settings -> key of 0.2 that was off (null) by default and was removed -> what to set instead
_REPLACED_SETTINGS = {"FitSettings": {"fan_in_base": "parametrization='mup'"}}
#: class of settings -> keys of 0.2 that had no effect there
_WITHOUT_EFFECT = {"FitSettings": ("save_model", "keep_checkpoint")}


def with_new_keys(settings: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` for the class ``settings`` with keys of 0.2 under their new names; warns of each.

    Raises:
        ValueError: for a key that was replaced and is not null.
    """
    known = [RENAMED_SETTINGS[base.__name__] for base in settings.__mro__ if base.__name__ in RENAMED_SETTINGS]
    renamed = {old: new for names in known for old, new in names.items() if old in values and new not in values}
    for old, new in renamed.items():
        warn_renamed(f"the setting {old}", new)
    values = {renamed.get(key, key): value for key, value in values.items()}
    for base in settings.__mro__:
        for key, instead in _REPLACED_SETTINGS.get(base.__name__, {}).items():
            if values.pop(key, None) is not None:
                raise ValueError(f"the setting {key} was removed; use {instead}")
    for key in _WITHOUT_EFFECT.get(settings.__name__, ()):
        if key in values:
            del values[key]
            message = f"{settings.__name__} has no {key} any more, which had no effect; omit it"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
    return values


#: class of settings -> keys in records of earlier versions that were removed
REMOVED_SETTINGS = _WITHOUT_EFFECT | {
    "BenchSettings": ("for_inference", "peers", "untuned"),
    "ModelBenchSettings": ("for_inference",),
}


def without_removed(settings: type, values: Any) -> Any:
    """Return ``values``, a record of the class ``settings``, without the keys that were removed."""
    removed = REMOVED_SETTINGS.get(settings.__name__, ())
    has_keys = removed and isinstance(values, Mapping)
    return {key: value for key, value in values.items() if key not in removed} if has_keys else values


#: column of results of 0.1 and 0.2 -> its name now
RENAMED_COLUMNS = {"spread": "std", "deviation": "size_mismatch", "passed": "phase"}
#: columns with what a user wrote, in which any key is allowed
_AS_WRITTEN = ("recipe", "settings", "set")


def with_new_columns(results: Any) -> Any:
    """Return JSON values of results, also of 0.1 and 0.2, with the columns' names of this version."""
    if isinstance(results, list):
        return [with_new_columns(value) for value in results]
    if not isinstance(results, dict):
        return results
    return {
        RENAMED_COLUMNS.get(key, key): value if key in _AS_WRITTEN else with_new_columns(value)
        for key, value in results.items()
    }

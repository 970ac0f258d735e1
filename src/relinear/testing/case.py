"""Define ``Case``: a variant of an operator that the conformance suite tests."""

import dataclasses

from relinear.contract.operator import OperatorConfig
from relinear.deprecated import warn_renamed

#: shapes (in, out) for cases
SQUARE, WIDE, NARROW, ODD = (16, 16), (16, 24), (24, 16), (15, 9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A variant of an operator and what its tests need to know.

    Attributes:
        config: the variant.
        shapes: (in, out) sizes to build it in; the slow tests use the first only.
        variant: distinguishes this case from others of the same kind in the names of tests.
        linear: whether it has ``to_dense`` (in eval mode, and with a context if it is conditioned).
        context_dim: width of the context that it reads, None if it is not conditioned.
        lossless_config: settings of the same kind with which a fitted weight is reproduced exactly (in eval mode).
        exact_tolerance: relative error allowed there, in float64.
        bf16_tolerance: relative error (Frobenius) of outputs and gradients in bfloat16 against float32.
        exact: what ``lossless_config`` was called; it works for one version.
    """

    config: OperatorConfig
    shapes: tuple[tuple[int, int], ...] = (SQUARE, WIDE, NARROW)
    variant: str = ""
    linear: bool = True
    context_dim: int | None = None
    lossless_config: OperatorConfig | None = None
    exact_tolerance: float = 1e-10
    bf16_tolerance: float = 2e-2
    exact: dataclasses.InitVar[OperatorConfig | None] = None

    def __post_init__(self, exact: OperatorConfig | None) -> None:
        if exact is not None:
            warn_renamed("Case(exact=)", "lossless_config", 4)
            object.__setattr__(self, "lossless_config", exact)

    @property
    def name(self) -> str:
        return f"{self.config.kind}-{self.variant}" if self.variant else self.config.kind

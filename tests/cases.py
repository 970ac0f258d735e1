"""The table of operator variants that the conformance suite runs on, a row a variant, and that of the kernels.

Adding an operator is one row here. Nothing in the suite knows an operator by name: what differs is a field of the row.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import relinear
import relinear.functional.ccl
import relinear.functional.cgt
import relinear.functional.context_manager
import relinear.functional.hdpl
import relinear.functional.monarch
import relinear.functional.transponder
import relinear.kernels.ccl
import relinear.kernels.cgt
import relinear.kernels.context_manager
import relinear.kernels.hdpl
import relinear.kernels.monarch
import relinear.kernels.transponder
from conftest import make_tiny_llama, mostly_slow
from relinear import functional, kernels
from relinear.functional import block_hadamard as functional_block_hadamard
from relinear.functional import pivoted_low_rank as functional_pivoted
from relinear.functional import quantized as functional_quantized
from relinear.functional import rotor as functional_rotor
from relinear.functional.block_hadamard import block_hadamard_sizes
from relinear.kernels import block_hadamard as kernels_block_hadamard
from relinear.kernels import pivoted_low_rank as kernels_pivoted
from relinear.kernels import quantized as kernels_quantized
from relinear.kernels import rotor as kernels_rotor
from relinear.testing import ODD, SQUARE, WIDE, Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCase:
    """A function of ``kernels`` and the reference of the same name and signature that it must agree with.

    Args:
        kind: stem of both files.
        reference, fast: the two functions; either returns a tensor or a tuple of tensors and None.
        arguments: yields positional argument tuples (tensors, None and plain values) for a dtype.
        tolerance: relative error allowed in float64, of outputs and of every gradient.
    """

    kind: str
    reference: Callable
    fast: Callable
    arguments: Callable[[torch.dtype], Iterator[tuple]]
    tolerance: float = 1e-11


def _ccl_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    shared = (draw(2, 5, 7), draw(2, 5, 4), draw(3, 7), draw(6, 3))
    norm, inner, outer = (draw(3), draw(3)), (draw(3, 4), draw(3)), (draw(6, 4), draw(6))
    yield (*shared, draw(6), *norm, *inner, *outer, True)
    yield (*shared, draw(6), None, None, *inner, *outer, False)
    yield (*shared, None, *norm, None, None, *outer, False)
    yield (*shared, draw(6), *norm, *inner, None, None, True)
    yield (draw(5, 7), None, draw(3, 7), draw(6, 3), draw(6), *norm)


def _recurrence_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    generator = torch.Generator().manual_seed(3)
    for tokens in (1, 2, 7, 16, 21):
        value = torch.randn(2, tokens, 3, generator=generator, dtype=dtype)
        state = torch.randn(2, 3, generator=generator, dtype=dtype)
        yield torch.tensor([0.0, 0.9, 1.0], dtype=dtype), value, state
        yield torch.rand(2, tokens, 3, generator=generator, dtype=dtype), value, state


def leaves_of(arguments: tuple, dtype: torch.dtype) -> tuple[list, list[Tensor]]:
    """Copies of a row's arguments, and those among them and their lists that have gradients."""
    leaves: list[Tensor] = []

    def copied(value):
        if isinstance(value, list):
            return [copied(entry) for entry in value]
        if not isinstance(value, Tensor) or not value.is_floating_point():  # settings, indices
            return value
        leaves.append(value.detach().to(dtype).clone().requires_grad_())
        return leaves[-1]

    return [copied(value) for value in arguments], leaves


def block_hadamard_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    """Widths of one, two and three small transforms, odd factors, padding, two stages, with and without bias."""
    for rows, in_features, out_features, blocks, depth in (
        (3, 16, 16, 4, 1),
        (3, 96, 40, 4, 1),
        (3, 200, 130, 3, 2),
        (3, 8192, 16, 2, 1),
    ):
        widths = block_hadamard_sizes(in_features, out_features, blocks, depth)
        stages = [torch.randn(blocks, o // blocks, i // blocks, dtype=dtype) for i, o in widths]
        bias = torch.randn(out_features, dtype=dtype) if depth == 1 else None
        yield torch.randn(rows, in_features, dtype=dtype), stages, out_features, bias
        yield torch.randn(rows, in_features, dtype=dtype), stages, out_features, bias, False


def _monarch_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    """Sizes that the blocks divide and that they do not, sub-blocks of several ranks, with a bias and without."""
    for leading, inputs, outputs, blocks, rank in (((3, 5), 16, 24, 4, 1), ((7,), 15, 10, 4, 2), ((), 9, 9, 3, 2)):
        right = torch.randn(blocks, blocks * rank, -(-inputs // blocks), dtype=dtype)
        left = torch.randn(blocks, -(-outputs // blocks), blocks * rank, dtype=dtype)
        yield torch.randn(*leading, inputs, dtype=dtype), right, left, outputs, torch.randn(outputs, dtype=dtype)
        yield torch.randn(inputs, 5, dtype=dtype).T, right, left, outputs


def _pivoted_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    """Few tokens and many, with a bias and without, full rank among them."""
    for leading, inputs, outputs, rank in (((3, 5), 10, 14, 4), ((300,), 9, 6, 6), ((1,), 7, 12, 7)):
        order = torch.randperm(inputs).int()
        mix, up = torch.randn(rank, inputs - rank, dtype=dtype), torch.randn(outputs, rank, dtype=dtype)
        bias = torch.randn(outputs, dtype=dtype) if rank == 4 else None
        yield torch.randn(*leading, inputs, dtype=dtype), order, mix, up, bias


def quantized_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    """All bits, sizes that kernels take and that they do not, with zero points and a bias and without."""
    for bits, inputs, group, rows in (
        (2, 128, 32, 1),
        (3, 192, 64, 3),
        (5, 20, 8, 2),
        (7, 64, 64, 9),
        (8, 576, 128, 5),
    ):
        groups, even = -(-inputs // group), bits % 2 == 0
        packed = torch.randint(0, 256, (7, -(-inputs // 8) * bits), dtype=torch.uint8)
        zeros = torch.randint(0, 256, (7, groups), dtype=torch.uint8) if even else None
        scales, bias = torch.randn(7, groups, dtype=dtype) / 2**bits, torch.randn(7, dtype=dtype)
        x = torch.randn(rows, inputs, dtype=dtype) / inputs**0.5
        yield x, packed, scales, zeros, bits, group, None if even else bias


def _step_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    """Both bases, with and without a permutation, a norm and slopes."""
    for tokens, branches, seed, settings in (
        (5, 3, 3, ()),
        (2, 2, None, (1, "blade", False, "gelu")),
    ):
        left, right = (torch.randn(1, branches, 1, 1, 4, 4, dtype=dtype) for _ in range(2))
        slopes, mix = torch.rand(branches, dtype=dtype), torch.randn(branches, dtype=dtype)
        yield torch.randn(tokens, 16, dtype=dtype), left, right, slopes, mix, seed, *settings


def _network_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    """Sizes that are no windows, in either layout, with and without orders and bias."""
    for tokens, inputs, outputs, ordered, settings in (
        (5, 20, 24, True, {}),
        (2, 16, 16, False, {"layout": "spread", "normalize": False, "activate_entry": True, "residual": True}),
    ):
        form = functional_rotor.NetworkSettings(outputs, (16, 16, 16), **settings)
        counts = (1, -(-inputs // 16)), (2, 1), (-(-outputs // 16), 1)
        left, right = ([torch.randn(*count, 1, 4, 4, dtype=dtype) for count in counts] for _ in range(2))
        branches = 2 + form.activate_entry
        table = functional_rotor.branch_orders(16, 2, 1, form.activate_entry, 0)
        orders = torch.from_numpy(table).int() if ordered else None
        slopes, mix = torch.rand(branches, dtype=dtype), torch.randn(branches, dtype=dtype)
        bias = torch.randn(outputs, dtype=dtype) if ordered else None
        yield torch.randn(tokens, inputs, dtype=dtype), left, right, orders, slopes, mix, bias, form


def transponder_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    """Both gates, either alone, ranks that are unrolled and one that is not, one token and many; a bias by turns."""
    forms = (8, (3, 5), 1, 1), (2, (1,), 1, 0), (4, (7,), 0, 1), (32, (2, 3), 1, 1)
    for index, (rank, tokens, channel, scalar) in enumerate(forms):
        x, weight, bias, down = torch.randn(*tokens, 12), torch.randn(10, 12), torch.randn(10), torch.randn(rank, 12)
        ups = [torch.randn(10, rank) if channel else None, torch.randn(1, rank) if scalar else None]
        alphas = [torch.tensor([1.3]), torch.tensor([0.7])]
        given = x, weight, bias if index % 2 else None, down, *ups, *alphas
        yield tuple(None if t is None else t.to(dtype) for t in given)


def _cgt_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    """Shares of every token, and those that a sequence has in common."""
    for shares in ((2, 3, 5), (2, 1, 5), (5,)):
        sizes = (2, 3, 7), shares, (5, 2, 7), (5, 2, 7), (5, 2)
        yield tuple(torch.randn(*size, dtype=dtype) for size in sizes)


def _windows_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    """x (N, I, V), left and right (W, O, I, S, L, L): shared factors and two blocks, both bases."""
    for tokens, inputs, outputs, terms, blocks, size, basis in [
        (5, 1, 1, 1, 1, 16, "spinor"),
        (5, 2, 3, 2, 1, 16, "blade"),
        (5, 2, 1, 1, 2, 32, "spinor"),
        (0, 1, 1, 1, 1, 16, "spinor"),
    ]:
        factors = [torch.randn(terms, outputs, inputs, blocks, 4, 4, dtype=dtype) for _ in range(2)]
        yield torch.randn(tokens, inputs, size, dtype=dtype), *factors, basis


def _hadamard_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    for shape in ((3, 1), (2, 5, 24), (4, 8192)):
        yield (torch.randn(*shape, dtype=dtype),)


def _hdpl_arguments(dtype: torch.dtype) -> Iterator[tuple]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    for leading, noise, bias in (((2, 5), True, True), ((7,), True, False), ((), True, True), ((3, 2), False, True)):
        weights = (draw(4, 3, 2), draw(5, 8), draw(5), draw(5, 8), draw(5), draw(12, 5), draw(12) if bias else None)
        yield (draw(*leading, 8), *weights, draw(*leading, 5) if noise else None)
    yield (draw(2, 8, 6).transpose(1, 2), *weights, draw(2, 6, 5))
    yield (draw(7, 8), *weights[:3], None, None, *weights[5:], None)


CASES: list[Case] = [
    Case(config=relinear.CCL(rank=5, context_dim=6), linear=False, context_dim=6),
    Case(
        config=relinear.CCL(rank=5, context_dim=6, norm=False, gate_depth=2, gate_width=7),
        variant="plain",
        context_dim=6,
        lossless_config=relinear.CCL(rank=16, context_dim=6, norm=False),
    ),
    Case(
        config=relinear.CCL(rank=20, context_dim=6, norm=False, basis_gate=False, gate_bias=False, gate_depth=0),
        variant="output_gate",
        context_dim=6,
        lossless_config=relinear.CCL(rank=20, context_dim=6, norm=False, basis_gate=False, gate_bias=False),
    ),
    Case(
        config=relinear.CCL(rank=5, context_dim=6, norm=False, output_gate=False),
        variant="basis_gate",
        context_dim=6,
        lossless_config=relinear.CCL(rank=16, context_dim=6, norm=False, output_gate=False),
    ),
    Case(
        config=relinear.CCL(rank=5, norm=False, basis_gate=False, output_gate=False),
        variant="static",
        lossless_config=relinear.CCL(rank=16, norm=False, basis_gate=False, output_gate=False),
    ),
    Case(
        config=relinear.CCL(rank=6, context_dim=6, norm=False, composition="remixing", templates=3),
        variant="remixing",
        context_dim=6,
        lossless_config=relinear.CCL(rank=18, context_dim=6, norm=False, composition="remixing", templates=3),
    ),
    Case(
        config=relinear.CCL(rank=6, context_dim=6, composition="selection", templates=3, output_gate=False),
        variant="selection",
        linear=False,
        context_dim=6,
        bf16_tolerance=0.5,  # a token whose two best templates are nearly level takes another one
    ),
    Case(config=relinear.LowRank(rank=5), lossless_config=relinear.LowRank(rank=16)),
    Case(config=relinear.PivotedLowRank(rank=5), lossless_config=relinear.PivotedLowRank(rank=16)),
    Case(config=relinear.BlockHadamard(blocks=4), lossless_config=relinear.BlockHadamard(blocks=1)),
    Case(config=relinear.BlockHadamard(blocks=3, depth=2), variant="deep", shapes=(ODD, WIDE), bf16_tolerance=3e-2),
    Case(config=relinear.BlockHadamard(blocks=4, mix_input=False), variant="plain", shapes=(SQUARE, ODD)),
    Case(config=relinear.BlockHadamard(blocks=4, depth=2, mix_input=False), variant="between", bf16_tolerance=3e-2),
    Case(
        config=relinear.HDPL(rank=6, blocks=4, beta=0.5), linear=False, lossless_config=relinear.HDPL(rank=32, blocks=4)
    ),
    Case(config=relinear.HDPL(rank=5, blocks=2, bound="free_bits"), variant="free_bits", linear=False),
    Case(config=relinear.HDPL(rank=4, blocks=3, bound="geometric_jsd"), variant="jsd", shapes=(ODD,), linear=False),
    Case(
        config=relinear.HDPL(rank=6, blocks=4, noise=False, init="authors"),
        variant="no_noise",
        linear=False,
        lossless_config=relinear.HDPL(rank=32, blocks=4, noise=False),
    ),
    # The kink of its PReLU makes the network's gradient jump with rounding; the smooth row holds it to more.
    Case(config=relinear.Rotor(), linear=False, shapes=(SQUARE, (24, 40), ODD), bf16_tolerance=0.25),
    Case(config=relinear.Rotor(activation="gelu"), variant="smooth", linear=False, bf16_tolerance=4e-2),
    Case(config=relinear.Rotor(depth=0, scale=True), variant="sum", shapes=((24, 40), SQUARE, (8, 17), (40, 12))),
    Case(
        config=relinear.Rotor(depth=0, width=1, rotors="single", basis="blade"),
        variant="blade",
        shapes=((9, 35), SQUARE),
    ),
    Case(config=relinear.Rotor(depth=1, activation="none", normalize=False), variant="product", shapes=(SQUARE, ODD)),
    Case(config=relinear.Rotor(depth=0, terms="multivector"), variant="multivector", shapes=((8, 9), (2, 3), SQUARE)),
    Case(
        config=relinear.Rotor(depth=0, terms="kronecker"),
        variant="kronecker",
        shapes=(SQUARE, (32, 32)),
        lossless_config=relinear.Rotor(depth=0, terms="kronecker", width=64),
    ),
    Case(
        config=relinear.Rotor(depth=0, permute_terms=True, windows="spread", scale=True),
        variant="permuted",
        shapes=((24, 40), SQUARE, (11, 13)),
    ),
    # In front of a LayerNorm a scale has no gradient but rounding.
    Case(
        config=relinear.Rotor.authors(activation="elu", normalize=False, init_std=0.3, residual=True),
        variant="authors",
        linear=False,
        shapes=((11, 13), SQUARE, (8, 8)),
        bf16_tolerance=4e-2,
    ),
    Case(
        config=relinear.Rotor.authors(activation="none", normalize=False, depth=1, residual=True, scale=False),
        variant="authors-product",
        shapes=(SQUARE, (24, 40)),
        bf16_tolerance=0.1,
    ),
    Case(
        config=relinear.Rotor(inner=32, activation="gelu"),
        variant="inner",
        linear=False,
        shapes=(SQUARE, (24, 40), (11, 5)),
        bf16_tolerance=4e-2,
    ),
    Case(config=relinear.Monarch(blocks=4), lossless_config=relinear.Monarch(blocks=4, rank=4)),
    Case(config=relinear.Monarch(blocks=4, rank=2), variant="padded", shapes=(ODD, (9, 15))),
    Case(config=relinear.Quantized()),
    Case(config=relinear.Quantized(bits=3, group=5, symmetric=True), variant="symmetric", shapes=(ODD, WIDE)),
    Case(config=relinear.Quantized(symmetric=True, levels="iq4_nl"), variant="iq4_nl", shapes=(ODD,)),
    Case(config=relinear.Quantized(group=32, levels="k"), variant="k", shapes=((256, 9),)),
    Case(config=relinear.OutputGate(), linear=False),
    Case(config=relinear.Transponder(), linear=False, lossless_config=relinear.Transponder()),
    Case(config=relinear.Transponder(rank=3, channel=False), variant="scalar", linear=False, shapes=(WIDE, ODD)),
    Case(config=relinear.Transponder(rank=20, scalar=False, learnable_alpha=False), variant="channel", linear=False),
    Case(
        config=relinear.Transponder(contextual=False),
        variant="static",
        lossless_config=relinear.Transponder(init="identity"),
    ),
    Case(config=relinear.Transponder(phi="gelu", shared=False, biases=True), variant="free", linear=False),
    Case(config=relinear.Transponder(base=relinear.HDPL(rank=6, blocks=4)), variant="on_hdpl", linear=False),
    Case(
        config=relinear.Transponder(base=relinear.CCL(rank=5, context_dim=6)),
        variant="on_ccl",
        linear=False,
        context_dim=6,
        bf16_tolerance=5e-2,  # the rounding of two operators adds up, and the gradient of alpha is one number
    ),
]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
#: the first of each kind, and the others in the slow tests: for what takes seconds a case
case_of_every_kind = pytest.mark.parametrize(
    "case",
    mostly_slow(CASES, *{case.config.kind: case for case in reversed(CASES)}.values()),
    ids=lambda case: case.name,
)

KERNELS: list[KernelCase] = [
    KernelCase(
        kind="transponder",
        reference=functional.transponder.modulated_linear,
        fast=kernels.transponder.modulated_linear,
        arguments=transponder_arguments,
    ),
    KernelCase(
        kind="cgt",
        reference=functional.cgt.modulate,
        fast=kernels.cgt.modulate,
        arguments=_cgt_arguments,
    ),
    KernelCase(kind="hdpl", reference=functional.hdpl.hdpl, fast=kernels.hdpl.hdpl, arguments=_hdpl_arguments),
    KernelCase(kind="ccl", reference=functional.ccl.ccl, fast=kernels.ccl.ccl, arguments=_ccl_arguments),
    KernelCase(
        kind="context_manager",
        reference=functional.context_manager.linear_recurrence,
        fast=kernels.context_manager.linear_recurrence,
        arguments=_recurrence_arguments,
    ),
    KernelCase(
        kind="monarch",
        reference=functional.monarch.monarch,
        fast=kernels.monarch.monarch,
        arguments=_monarch_arguments,
    ),
    KernelCase(
        kind="block_hadamard-transform",
        reference=functional_block_hadamard.hadamard,
        fast=kernels_block_hadamard.hadamard,
        arguments=_hadamard_arguments,
    ),
    KernelCase(
        kind="block_hadamard",
        reference=functional_block_hadamard.block_hadamard,
        fast=kernels_block_hadamard.block_hadamard,
        arguments=block_hadamard_arguments,
    ),
    KernelCase(
        kind="pivoted_low_rank",
        reference=functional_pivoted.pivoted_low_rank,
        fast=kernels_pivoted.pivoted_low_rank,
        arguments=_pivoted_arguments,
    ),
    KernelCase(
        kind="quantized",
        reference=functional_quantized.quantized,
        fast=kernels_quantized.quantized,
        arguments=quantized_arguments,
    ),
    KernelCase(
        kind="rotor-step",
        reference=functional_rotor.rotor_step,
        fast=kernels_rotor.rotor_step,
        arguments=_step_arguments,
    ),
    KernelCase(
        kind="rotor-network",
        reference=functional_rotor.rotor_network,
        fast=kernels_rotor.rotor_network,
        arguments=_network_arguments,
    ),
    KernelCase(
        kind="rotor",
        reference=functional_rotor.sandwich_windows,
        fast=kernels_rotor.sandwich_windows,
        arguments=_windows_arguments,
    ),
]


def ccl_results(dtypes, in_features, out_features):
    """Output and gradients of one small CCL layer with one input and context, in each dtype."""
    operator = relinear.CCL(rank=8, context_dim=6).build(in_features, out_features)
    x, values = torch.randn(37, in_features), torch.randn(37, 6)
    results = []
    for dtype in dtypes:
        module = copy.deepcopy(operator).to(dtype)
        given = x.to(dtype).requires_grad_()
        with relinear.activations.context(values.to(dtype)):
            y = module(given)
        y.square().mean().backward()
        results.append([y, given.grad, *(p.grad for p in module.parameters())])
    return results


def model_with(case: Case) -> nn.Module:
    """A tiny Llama with the case's operator twice in every layer, and a context manager where it needs one."""
    in_features, out_features = case.shapes[0]
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}
    torch.manual_seed(0)
    model = make_tiny_llama(hidden_size=in_features, intermediate_size=out_features, **heads)
    if case.context_dim is not None:
        relinear.attach_(model, relinear.ContextManager(dim=case.context_dim, mixer="gru"))
    relinear.replace_(model, {r".*\.(gate|up)_proj": case.config})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model

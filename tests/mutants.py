"""``python -m tests.mutants``: rows of docs/papers.md, each with a mutant that a test of the row must see.

A mutant is the row's place in the code with one thing wrong: another norm, a missing factor, an order turned around.
The tree is copied once; each mutant runs its one test in a process that has torch and transformers loaded. Exits 1 if a
mutant survives, if a test fails without one, or if a row has neither a mutant nor stands in ``WITHOUT``.

    python -m tests.mutants [WORD ...]      those whose row, file or test contain one of the words
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MUTANTS", "WITHOUT", "Mutant", "main", "rows"]

ROOT = Path(__file__).resolve().parents[1]
#: what a copy needs; results without their records
_PARTS = ("src", "tests", "results/cgt", "docs", "pyproject.toml", "README.md")
_LONGEST = 600


@dataclasses.dataclass(frozen=True)
class Mutant:
    """What is wrong, where, and who must see it.

    row: how the row's first cell begins. file: of ROOT. was, now: text of it, which stands there once. test: of the
    row, FILE::NAME.
    """

    row: str
    file: str
    was: str
    now: str
    test: str


_F, _L = "src/relinear/functional", "src/relinear/models/cgt/losses.py"
_STUDY = "results/cgt/cgt_study"
MUTANTS = (
    # CGT
    Mutant(
        "Section 3.1: T(x; y)",
        f"{_F}/cgt.py",
        "inner = (generated_right * x.unsqueeze(-2)).sum(-1) + generated_bias",
        "inner = (generated_right * x.unsqueeze(-2)).sum(-1)",
        "test_cgt::test_modulation_is_the_papers_formula",
    ),
    Mutant(
        "Section 3.1: sigma(y)",
        f"{_F}/cgt.py",
        'return torch.tanh(scores) if kind == "tanh" else torch.softmax(scores, -1)',
        "return torch.softmax(scores, -1)",
        "test_cgt::test_model_is_the_papers_equations",
    ),
    Mutant(
        "Section 3.1, Figure 1a",
        "src/relinear/models/cgt/layers.py",
        "return y + self.attn(torch.cat([x, self.ln_1(y)], -1), **kwargs)[0]",
        "return y + self.attn(torch.cat([x, y], -1), **kwargs)[0]",
        "test_cgt::test_model_is_the_papers_equations",
    ),
    Mutant(
        "Figure 14: y as a moving average",
        f"{_F}/cgt.py",
        "age = seen.unsqueeze(-1) - seen.unsqueeze(-2)",
        "age = seen.unsqueeze(-1) - seen.unsqueeze(-2) + 1",
        "test_cgt::test_moving_average_against_a_loop",
    ),
    Mutant(
        "Section 3.1: with y fixed, T folds",
        f"{_F}/cgt.py",
        "return eye + generated_left @ generated_right, generated_left @ (sigma @ right_bias)",
        "return eye + generated_left @ generated_right, 0 * (generated_left @ (sigma @ right_bias))",
        "test_specialize::test_logits_equal_the_frozen_models",
    ),
    Mutant(
        "Section 3.2, Figure 1b",
        "src/relinear/models/cgt/objective.py",
        "frozen = context[rows, splits - 1]",
        "frozen = context[rows, splits]",
        "test_cgt_objectives::test_auxiliary_loss_against_one_sequence_at_a_time",
    ),
    Mutant(
        "Section 3.2: s in (2, n)",
        "src/relinear/models/cgt/objective.py",
        "last = length - 2 if horizon is None else length - 1 - horizon",
        "last = length - 1 if horizon is None else length - horizon",
        "test_cgt_objectives::test_splits_leave_a_prefix_and_a_rest",
    ),
    Mutant(
        "Section 3.4: R_C",
        _L,
        "n = F.normalize(y, dim=-1)\n    steps",
        "n = y\n    steps",
        "test_cgt_objectives::test_continuity",
    ),
    Mutant(
        "Section 3.4: R_D",
        _L,
        "products = (n @ n.mT).square()",
        "products = (n @ n.mT).abs()",
        "test_cgt_objectives::test_decorrelation",
    ),
    Mutant(
        "Eq. 3",
        "src/relinear/models/cgt/objective.py",
        'terms = {"ce": self.eta * output.loss}',
        'terms = {"ce": output.loss}',
        "test_cgt_objectives::test_objective_is_equation_three",
    ),
    Mutant(
        "Section 3.3, Eq. 1, Appendix C",
        _L,
        "return 1 + noise**2 / torch.maximum(s[:, None], s)",
        "return 1 + noise**2 / torch.minimum(s[:, None], s)",
        "test_cgt_objectives::test_estimation_kernel_is_the_covariance_of_running_means",
    ),
    Mutant(
        "Appendix A.1: exponential kernel",
        _L,
        "smooth = torch.exp(-_distances(length).square() / (2 * (scale * length) ** 2))",
        "smooth = torch.exp(-_distances(length).square() / (scale * length) ** 2)",
        "test_cgt_objectives::test_kernels_are_the_papers",
    ),
    Mutant(
        "Eq. 2, 5 and 7",
        _L,
        "unsqueeze(-1) * log_variance.exp() - log_variance\n",
        "unsqueeze(-1) * log_variance.exp().square() - log_variance\n",
        "test_cgt_objectives::test_kl_is_equation_two",
    ),
    Mutant(
        "Appendix A.2: R_P",
        _L,
        "pairs.clamp(min=1)[:, None, :, None] - wanted).square().sum((1, 3))",
        "pairs.clamp(min=1)[:, None, :, None] - wanted).abs().sum((1, 3))",
        "test_cgt_objectives::test_gaussian_process_matching",
    ),
    Mutant(
        "Appendix A.2: R'_D",
        _L,
        "values = mean.square().sum(-1) + (covariance - eye).square().sum((-1, -2))",
        "values = (covariance - eye).square().sum((-1, -2))",
        "test_cgt_objectives::test_moment_matching",
    ),
    Mutant(
        "Appendix A.3, Eq. 9 and 10",
        _L,
        "terms = -torch.linalg.inv(wide) * distances.square()",
        "terms = -wide * distances.square()",
        "test_cgt_objectives::test_profile_of_estimation_grows_as_a_square",
    ),
    Mutant(
        "zeta chosen empirically",
        _L,
        '"quadratic": s**2',
        '"quadratic": s**3',
        "test_cgt_objectives::test_profiles",
    ),
    Mutant(
        "Section 4.3: growing zeta",
        _L,
        "terms = -torch.linalg.inv(wide) * distances.square()",
        "terms = -wide * distances.square()",
        "test_cgt_objectives::test_profile_of_estimation_grows_as_a_square",
    ),
    Mutant(
        "Section 4.1, Figure 2, Appendix B.3",
        f"{_STUDY}/tasks.py",
        "answers = [int(a * x + b * y) for x, y in pairs]",
        "answers = [int((a * x + b * y) // 1) for x, y in pairs]",
        "test_tasks::test_arithmetic_cuts_as_the_papers_example_does",
    ),
    Mutant(
        "Section 4.1: linear regression",
        f"{_STUDY}/tasks.py",
        'vectors[0::2, : self.inputs] = torch.from_numpy(drawn["x"]).float()',
        'vectors[0::2, : self.inputs] = torch.from_numpy(drawn["x"]).float().flip(0)',
        "test_tasks::test_regression_interleaves_x_and_y",
    ),
    Mutant(
        "Section 4.1, Appendix B.4: mixtures",
        f"{_STUDY}/tasks.py",
        "cut = int(generator.integers(self.start, self.finish + 1)) if self.mixed else self.length",
        "cut = self.length // 2 if self.mixed else self.length",
        "test_tasks::test_mixture_joins_two_documents",
    ),
    Mutant(
        "Section 4.2: task vectors",
        f"{_STUDY}/measures.py",
        "hidden[:, position] = vector",
        "pass",
        "test_cgt_analysis::test_task_vectors_are_transplanted",
    ),
    Mutant(
        "Figure 4: plain Transformer; ridge regression",
        f"{_STUDY}/measures.py",
        "gram = x[:n].T @ x[:n] + task.noise**2 * np.eye(x.shape[1])",
        "gram = x[:n].T @ x[:n] + task.noise * np.eye(x.shape[1])",
        "test_cgt_analysis::test_ridge_is_scikit_learns",
    ),
    Mutant(
        "Figure 13a",
        f"{_STUDY}/contexts.py",
        "y = model.context(ids[:, :cut])[:, -1]",
        "y = model.context(ids)[:, -1]",
        "test_cgt_analysis::test_losses_by_position",
    ),
    Mutant(
        "Figures 6a, 13a, 14",
        f"{_STUDY}/contexts.py",
        'flat = torch.nn.functional.cross_entropy(logits[:, :-1].mT.float(), rest[:, 1:], reduction="none")',
        'flat = torch.nn.functional.cross_entropy(logits[:, 1:].mT.float(), rest[:, 1:], reduction="none")',
        "test_cgt_analysis::test_losses_by_position",
    ),
    Mutant(
        "Figures 6b, 10a, 20",
        f"{_STUDY}/plots.py",
        "order = np.argsort(-y.std(0))[:components]",
        "order = np.arange(y.shape[1])[:components]",
        "test_cgt_analysis::test_figure_of_the_context_draws_the_components_that_vary_most",
    ),
    Mutant(
        "Figures 6c, 15, 16, 19",
        f"{_STUDY}/contexts.py",
        "np.fill_diagonal(similarity, -np.inf)",
        "pass",
        "test_cgt_analysis::test_clustering_scores",
    ),
    Mutant(
        "Appendix D.3: logits that rise",
        f"{_STUDY}/contexts.py",
        "rise = (logits[1] - logits[0]).mean((0, 1))",
        "rise = (logits[0] - logits[1]).mean((0, 1))",
        "test_cgt_analysis::test_token_shifts",
    ),
    Mutant(
        "Figure 17a",
        f"{_STUDY}/contexts.py",
        "centred = (y - y.mean(1, keepdim=True)).double()",
        "centred = y.double()",
        "test_cgt_analysis::test_dot_products_and_spectrum",
    ),
    Mutant(
        "Figures 3a, 10b, 13b, 18",
        f"{_STUDY}/contexts.py",
        "n = torch.nn.functional.normalize(y.double(), dim=-1)",
        "n = y.double()",
        "test_cgt_analysis::test_dot_products_and_spectrum",
    ),
    Mutant(
        "Table 1: accuracy with y computed",
        f"{_STUDY}/measures.py",
        "right = (logits[:, :-1].argmax(-1) == ids[:, 1:])[:, answers[1:]].float()",
        "right = (logits[:, 1:].argmax(-1) == ids[:, 1:])[:, answers[1:]].float()",
        "test_cgt_analysis::test_accuracy_counts_answer_symbols",
    ),
    Mutant(
        'Figure 9 ("ctx")',
        f"{_STUDY}/measures.py",
        "for parts, begin in ((without, middle), (within, start)):",
        "for parts, begin in ((without, middle), (within, middle)):",
        "test_cgt_analysis::test_specialised_accuracy_with_the_examples_in_context",
    ),
    Mutant(
        "Eq. 4",
        f"{_STUDY}/measures.py",
        "scale = centred.square().sum(-1).mean(1).clamp_min(1e-20).sqrt()",
        "scale = centred.square().sum(-1).mean(1).clamp_min(1e-20)",
        "test_cgt_analysis::test_variation_is_equation_four",
    ),
    Mutant(
        "Table 1, Section 4.2: linear fit",
        f"{_STUDY}/measures.py",
        "late = y.view(len(y), task.tasks, task.task_length, -1)[:, :, half:]",
        "late = y.view(len(y), task.tasks, task.task_length, -1)[:, :, :half]",
        "test_cgt_analysis::test_probe_reads_anywhere_in_the_second_half",
    ),
    # rotors
    Mutant(
        "vectors of 2^n coordinates",
        "src/relinear/clifford/products.py",
        "return a * device_table(_reverse_signs, multivector_dimension(a), a, a.dtype)",
        "return a",
        "test_clifford::test_agrees_with_the_clifford_package",
    ),
    Mutant(
        "x -> r x r~, and r x s~",
        "src/relinear/clifford/products.py",
        "return _product(r, x, reverse(s)).to(dtype)",
        "return _product(r, x, s).to(dtype)",
        "test_rotor::test_blade_basis_is_the_sandwich_of_the_algebra",
    ),
    Mutant(
        "any size: windows of the largest power of two",
        f"{_F}/rotor.py",
        "return torch.cat(((y[..., :wrapped] + y[..., size:]) / 2, y[..., wrapped:size]), dim=-1)",
        "return torch.cat((y[..., :wrapped] + y[..., size:], y[..., wrapped:size]), dim=-1)",
        "test_rotor::test_windows_cover_every_coordinate_and_are_averaged",
    ),
    Mutant(
        "block-Hadamard, depth 1",
        f"{_F}/block_hadamard.py",
        "y = torch.stack((low + high, low - high), dim=-3).flatten(-4, -2)",
        "y = torch.stack((low + high, low + high), dim=-3).flatten(-4, -2)",
        "test_structured::test_hadamard_is_the_kronecker_power",
    ),
    Mutant(
        "low rank 1 and 4",
        f"{_F}/low_rank.py",
        "return root[:, None] * vh[:rank], u[:, :rank] * root",
        "return vh[:rank], u[:, :rank] * root",
        "test_moments::test_identity_moments_give_the_plain_fit",
    ),
    # HDPL
    Mutant(
        "Eq. 1 to 3, 7: block-diagonal",
        f"{_F}/hdpl.py",
        "return block_diagonal(x, blocks) + linear(silu(z), decoder, bias)",
        "return block_diagonal(x, blocks) + linear(z, decoder, bias)",
        "test_hdpl::test_forward_is_the_authors_form",
    ),
    Mutant(
        "Eq. 6, Algorithm 1",
        f"{_F}/hdpl.py",
        "return torch.addcmul(mu.to(wide), torch.exp(0.5 * logvar.to(wide)), noise).to(mu.dtype)",
        "return torch.addcmul(mu.to(wide), torch.exp(logvar.to(wide)), noise).to(mu.dtype)",
        "test_hdpl::test_forward_is_the_authors_form",
    ),
    Mutant(
        "Eq. 8: KL",
        f"{_F}/hdpl.py",
        "return 0.5 * (mu.square() + torch.expm1(logvar) - logvar)",
        "return 0.5 * (mu.square() + torch.exp(logvar) - logvar)",
        "test_hdpl::test_kl_against_torch_distributions",
    ),
    Mutant(
        "Eq. 9: clamp at ln 2",
        f"{_F}/hdpl.py",
        "return kl.clamp(max=bound), kl.detach() >= bound",
        "return kl.clamp(min=bound), kl.detach() >= bound",
        "test_hdpl::test_the_papers_bound_gives_no_gradient_where_it_clamps",
    ),
    Mutant(
        "Section 2.3: the divergence",
        f"{_F}/hdpl.py",
        "shape = 0.5 * (torch.sinh(half).square() - log_cosh)",
        "shape = 0.5 * (torch.sinh(half).square() + log_cosh)",
        "test_hdpl::test_geometric_jsd_against_its_definition",
    ),
    # Transponder
    Mutant(
        "Eq. 2, 6, Figure 1",
        f"{_F}/transponder.py",
        "out = out * modulator_gate(x, down, scalar, scalar_alpha)",
        "out = out + modulator_gate(x, down, scalar, scalar_alpha)",
        "test_transponder::test_reference_against_the_equations",
    ),
    Mutant(
        "Eq. 4: bottleneck with phi",
        f"{_F}/transponder.py",
        "hidden = PHI[phi](torch.nn.functional.linear(x, down, down_bias).to(wide))",
        "hidden = torch.nn.functional.linear(x, down, down_bias).to(wide)",
        "test_transponder::test_every_bottleneck_is_its_equation",
    ),
    Mutant(
        "Eq. 5: learnable curvature",
        f"{_F}/transponder.py",
        "return 2 * torch.sigmoid(alpha * torch.nn.functional.linear(hidden, up.to(wide), offset))",
        "return torch.sigmoid(alpha * torch.nn.functional.linear(hidden, up.to(wide), offset))",
        "test_transponder::test_every_bottleneck_is_its_equation",
    ),
    Mutant(
        'A, B "Kaiming uniform (He et al.)"',
        "src/relinear/operators/transponder.py",
        'slope = 0.0 if self.init == "he" else math.sqrt(5)',
        "slope = math.sqrt(5)",
        "test_transponder::test_he_is_hes_bound_and_spreads_gates_four_times_as_far",
    ),
    Mutant(
        '"zero biases"',
        f"{_F}/transponder.py",
        "offset = None if up_bias is None else up_bias.to(wide)",
        "offset = None",
        "test_transponder::test_every_bottleneck_is_its_equation",
    ),
    Mutant(
        "Table 1: five variants",
        "src/relinear/operators/transponder.py",
        'for name, wanted, size in (("channel", settings.channel, out_features), ("scalar", settings.scalar, 1)):',
        'for name, wanted, size in (("channel", settings.channel, 1), ("scalar", settings.scalar, 1)):',
        "test_transponder::test_layers_of_tables_1_and_6_are_their_gates",
    ),
    Mutant(
        "Table 6: ranks",
        "src/relinear/operators/transponder.py",
        "rank, biases, learnt = settings.rank, settings.biases, settings.learnable_alpha",
        "rank, biases, learnt = 8, settings.biases, settings.learnable_alpha",
        "test_transponder::test_layers_of_tables_1_and_6_are_their_gates",
    ),
    Mutant(
        "Table 4: without context, fixed alpha",
        f"{_F}/transponder.py",
        "return (z * (2 * torch.sigmoid(alpha * gate_logits.to(wide)))).to(z.dtype)",
        "return (z * torch.sigmoid(alpha * gate_logits.to(wide))).to(z.dtype)",
        "test_transponder::test_controls_of_table_4",
    ),
    Mutant(
        "Table 2: DeepNet, LayerNorm Scaling",
        "src/relinear/residual/scaling.py",
        "block.norm.relinear_scale = 1 / math.sqrt(block.layer + 1)",
        "block.norm.relinear_scale = 1 / (block.layer + 1)",
        "test_residual::test_layernorm_scaling",
    ),
    Mutant(
        "Table 3: Post-LN",
        "src/relinear/residual/post_norm.py",
        "return self.norm(torch.add(y, x, alpha=self.alpha)) - x",
        "return self.norm(y)",
        "test_residual::test_post_ln",
    ),
    # starts, placements and recipes
    Mutant(
        "start, as the text suggests",
        "src/relinear/operators/hdpl.py",
        "nn.init.normal_(self.blocks, std=0.01)",
        "nn.init.normal_(self.blocks, std=0.02)",
        "test_hdpl::test_initialisation",
    ),
    Mutant(
        "Table 5: placements",
        "src/relinear/surgery/placement.py",
        '"last": ("all-linear", -1)',
        '"last": ("all-linear", 0)',
        "test_transponder::test_placements_of_table_5",
    ),
    Mutant(
        "Table 7: set-up",
        "src/relinear/compare/recipes/transponder-paper.yaml",
        "  schedule: noam\n",
        "  schedule: cosine\n",
        "test_transponder::test_the_papers_recipe_is_table_7",
    ),
    Mutant(
        "Section 4.1, Table 1: set-up, corpora",
        "src/relinear/compare/recipes/ccl-paper.yaml",
        "  batch_size: 64\n",
        "  batch_size: 32\n",
        "test_ccl::test_the_papers_recipe_has_its_models_and_its_budget",
    ),
    Mutant(
        "Table 1, as the code runs",
        "src/relinear/compare/recipes/hdpl-authors.yaml",
        "  max_grad_norm: 0\n",
        "  max_grad_norm: 1\n",
        "test_hdpl::test_the_authors_recipe_is_what_their_code_does",
    ),
    Mutant(
        'Table 2: FLOPs, "< 0.1 %" more',
        "src/relinear/operators/ccl.py",
        "return 2 * rank * (self.in_features + out) + network + gates",
        "return 2 * rank * (self.in_features + out)",
        "test_ccl::test_the_overhead_at_the_papers_own_vocabulary_is_eight_percent",
    ),
    Mutant(
        "55 parameters a rotor",
        "src/relinear/operators/sandwich_sum.py",
        '"rotor": ((n * (n - 1) // 2,),) * 2,',
        '"rotor": ((n * n // 2,),) * 2,',
        "test_rotor::test_exact_parameter_counts",
    ),
    Mutant(
        "initialisation",
        "src/relinear/operators/sandwich_sum.py",
        "nn.init.normal_(parameter, std=share / math.sqrt(parameter.shape[-1]))",
        "nn.init.normal_(parameter, std=share)",
        "test_rotor::test_fresh_layers_keep_the_variance",
    ),
    Mutant(
        "alpha, a factor of each sandwich",
        "src/relinear/operators/sandwich_sum.py",
        'nn.init.constant_(self.scale, 1.0 if self.config.gains == "ones" else kept)',
        "nn.init.constant_(self.scale, 1.0)",
        "test_rotor::test_fresh_layers_keep_the_variance",
    ),
    Mutant(
        "the network: entry rotor",
        f"{_F}/rotor.py",
        "x = torch.nn.functional.layer_norm(x, x.shape[-1:])",
        "x = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-5)",
        "test_rotor::test_the_authors_network",
    ),
    Mutant(
        "Section 4.1: vectors in place of tokens",
        "src/relinear/models/cgt/model.py",
        "nn.functional.pad(vectors, (0, missing))",
        "nn.functional.pad(vectors, (missing, 0))",
        "test_cgt::test_padded_vectors_enter_with_zeros_to_the_width_of_the_model",
    ),
    Mutant(
        "Eq. 6: y drawn",
        "src/relinear/models/cgt/model.py",
        "y + torch.exp(0.5 * spread) * torch.randn_like(y)",
        "y + torch.exp(spread) * torch.randn_like(y)",
        "test_cgt::test_variational_form_draws_in_training_only",
    ),
    Mutant(
        "Section 4.2, Appendix B.2.1",
        "results/cgt/arithmetic.py",
        '"width": 112,',
        '"width": 128,',
        "test_cgt_scripts::test_arithmetic_of_the_paper",
    ),
    Mutant(
        "Section 4.3, Appendix D.2",
        "results/cgt/regression.py",
        '"width": 128,',
        '"width": 64,',
        "test_cgt_scripts::test_regression_of_the_paper",
    ),
    Mutant(
        "Section 4.4, Appendix B.2.2",
        "results/cgt/text.py",
        '"start": 256,',
        '"start": 128,',
        "test_cgt_scripts::test_texts_of_the_paper",
    ),
    Mutant(
        "start, as the authors' code",
        "src/relinear/operators/hdpl.py",
        "nn.init.uniform_(encoder.bias, -bound, bound) if authors else",
        "nn.init.zeros_(encoder.bias) if authors else",
        "test_hdpl::test_the_authors_encoders_have_torchs_biases_and_no_variance_weight",
    ),
    Mutant(
        "Section 2.5, Eq. 14: cost",
        "src/relinear/operators/hdpl.py",
        "return 2 * sum(p.numel() for p in (self.blocks,",
        "return sum(p.numel() for p in (self.blocks,",
        "test_hdpl::test_flops_are_those_of_the_section_on_cost",
    ),
    Mutant(
        "Section 3.3: cost of the layer",
        "src/relinear/operators/ccl.py",
        "network = 2 * (hidden + self.config.gate_sizes()[-1] * gates)",
        "network = 2 * hidden",
        "test_ccl::test_the_overhead_at_the_papers_own_vocabulary_is_eight_percent",
    ),
    Mutant(
        "Eq. 3, 7: path-level gates",
        "src/relinear/operators/path_transponder.py",
        'if self.reads == "normed" or path.norm_name is None:',
        "if True:",
        "test_transponder::test_paths_are_gated_by_the_stream_itself",
    ),
    # CCL
    Mutant(
        "Eq. 1: LayerNorm(x W_basis)",
        f"{_F}/ccl.py",
        "centred = h - h.mean(-1, keepdim=True)",
        "centred = h",
        "test_ccl::test_each_arm_of_table_4_is_the_equations",
    ),
    Mutant(
        "Eq. 2, 3: basis gate",
        f"{_F}/ccl.py",
        "h = h if g_basis is None else h * g_basis",
        "h = h if g_basis is None else h + g_basis",
        "test_ccl::test_each_arm_of_table_4_is_the_equations",
    ),
    Mutant(
        "Eq. 4 and Figure 3",
        f"{_F}/ccl.py",
        "return (y + b) * g_out if gate_bias else y * g_out + b",
        "return y * g_out + b",
        "test_ccl::test_each_arm_of_table_4_is_the_equations",
    ),
    Mutant(
        "Table 4: static, no output gate",
        f"{_F}/ccl.py",
        "    if g_out is None:\n        return y + b\n",
        "    if g_out is None:\n        return y\n",
        "test_ccl::test_each_arm_of_table_4_is_the_equations",
    ),
    Mutant(
        "Eq. 5: effective weight",
        f"{_F}/ccl.py",
        "left = mix if g_basis is None else mix * g_basis[..., None, :]",
        "left = mix",
        "test_conformance::test_forward_equals_its_dense_matrix",
    ),
    Mutant(
        "Section 4.2: selection",
        f"{_F}/ccl.py",
        "return torch.zeros_like(shares).scatter(-1, chosen, shares.gather(-1, chosen))",
        "return shares",
        "test_ccl::test_selection_and_remixing_are_mixtures_of_low_rank_maps",
    ),
    Mutant(
        "Section 4.2: remixing",
        f"{_F}/ccl.py",
        "return torch.softmax(features @ weight.T + bias, -1)",
        "return torch.sigmoid(features @ weight.T + bias)",
        "test_ccl::test_selection_and_remixing_are_mixtures_of_low_rank_maps",
    ),
    Mutant(
        "Sections 4.4 to 4.6",
        "src/relinear/analysis/effective_rank.py",
        "return float(torch.exp(-(p * p.log()).sum()))",
        "return float(1 / (p * p).sum())",
        "test_analyses::test_effective_rank_of_known_spectra",
    ),
    # Settings, parts and scripts
    Mutant(
        "Section 3.1: 2",
        "src/relinear/models/cgt/layers.py",
        "self.modulate_mlp = None if two_streams else Modulator(config)",
        "self.modulate_mlp = None if two_streams or layer_idx > config.context_layer else Modulator(config)",
        "test_cgt::test_model_is_the_papers_equations",
    ),
    Mutant(
        "y given from outside",
        "src/relinear/models/cgt/model.py",
        "        y = y if computes else None\n        for block in self.h[:split]:",
        "        for block in self.h[:split]:",
        "test_cgt::test_frozen_context_reaches_only_the_upper_layers_and_skips_the_y_stream",
    ),
    Mutant(
        "Appendix A.1: L_rec",
        "src/relinear/models/cgt/objective.py",
        "y = output.context if drawn is None else drawn",
        "y = output.context",
        "test_cgt_objectives::test_variational_auxiliary_loss_freezes_the_drawn_context",
    ),
    Mutant(
        "Appendix B.2: Adam",
        "results/cgt/cgt_study/schedule.py",
        '"warmup": 10_000',
        '"warmup": 1_000',
        "test_cgt_scripts::test_arithmetic_of_the_paper",
    ),
    Mutant(
        "Table 1: x-only",
        "results/cgt/arithmetic.py",
        '    "width": 112,',
        '    "width": 128,',
        "test_cgt_scripts::test_arithmetic_of_the_paper",
    ),
    Mutant(
        "Table 1: no auxiliary",
        "results/cgt/arithmetic.py",
        "        half = options.continuity / 2\n",
        "        half = options.continuity\n",
        "test_cgt_scripts::test_weights_of_the_regularisers_are_options",
    ),
    Mutant(
        "Figures 7, 11 and",
        "results/cgt/arithmetic.py",
        '    "context_layer": 4,',
        '    "context_layer": 3,',
        "test_cgt_scripts::test_arithmetic_of_the_paper",
    ),
    Mutant(
        "Figure 8: w_C and",
        "results/cgt/text.py",
        "half = options.continuity / 2",
        "half = options.continuity",
        "test_cgt_scripts::test_weights_of_the_regularisers_are_options",
    ),
    Mutant(
        "Appendix D.1: one",
        "results/cgt/arithmetic.py",
        '    "examples": 4,',
        '    "examples": 8,',
        "test_cgt_scripts::test_arithmetic_of_the_paper",
    ),
    Mutant(
        "rotors r = exp(b)",
        "src/relinear/clifford/exponential.py",
        "(-1) ** m / math.factorial(2 * m + odd)",
        "1 / math.factorial(2 * m + odd)",
        "test_clifford::test_agrees_with_the_clifford_package",
    ),
    Mutant(
        "Algorithm 2: the",
        "src/relinear/clifford/decomposition.py",
        "largest_part(matrix, power_step(matrix, vector))",
        "largest_part(matrix, vector)",
        "test_clifford::test_power_iteration_reproduces_the_value_but_not_the_gradient",
    ),
    Mutant(
        "(no such baseline)",
        "src/relinear/distill/fit.py",
        "module.bias.copy_(module.bias + mean if fitted else mean)",
        "module.bias.copy_(module.bias if fitted else mean)",
        "test_distill::test_a_bias_starts_at_the_mean_of_the_target",
    ),
    Mutant(
        "log-perplexity on",
        "src/relinear/evaluate/language.py",
        "count += int((labels[:, 1:] != IGNORED_LABEL).sum())",
        "count += labels.numel()",
        "test_evaluate::test_disjoint_windows_against_a_plain_sum",
    ),
    Mutant(
        "Appendix A.3: the",
        "src/relinear/functional/hdpl.py",
        "return kl.clamp(max=bound), kl.detach() >= bound",
        "return kl.clamp(max=bound), kl.detach() < bound",
        "test_hdpl::test_share_of_clamped_tokens_and_who_regularises",
    ),
    Mutant(
        "Table 1, with the",
        "src/relinear/compare/recipes/hdpl-authors.yaml",
        "  decay_embeddings: true",
        "  decay_embeddings: false",
        "test_hdpl::test_the_authors_recipe_is_what_their_code_does",
    ),
    Mutant(
        "Section 4.2: manipulate",
        "src/relinear/core/latents.py",
        "+ (std_a - std_b.to(std_a)).square()).mean())",
        ").mean())",
        "test_latents::test_alignment_is_the_wasserstein_distance_and_trains",
    ),
    Mutant(
        "one A or two",
        "src/relinear/operators/transponder.py",
        "separate = settings.channel and settings.scalar and not settings.shared",
        "separate = settings.channel and settings.scalar and settings.shared",
        "test_transponder::test_two_a_would_be_two_percent_and_biases_are_no_more_than_one",
    ),
    Mutant(
        "Table 2: overheads",
        "src/relinear/operators/transponder.py",
        "separate = settings.channel and settings.scalar and not settings.shared",
        "separate = settings.channel and settings.scalar",
        "test_transponder::test_overheads_of_the_paper",
    ),
    Mutant(
        "bf16 for weights",
        "src/relinear/train/optim.py",
        "eps=settings.eps",
        "eps=1.0",
        "test_transponder::test_bf16_adam_holds_weights_and_states_in_bf16",
    ),
    Mutant(
        "Table 2: Base-64",
        "src/relinear/compare/recipes/ccl-paper.yaml",
        "  steps: 5000",
        "  steps: 2500",
        "test_ccl::test_the_papers_recipe_has_its_models_and_its_budget",
    ),
    Mutant(
        "Eq. 4, 5: encoders",
        "src/relinear/operators/hdpl.py",
        "AffineParameters(rank, self.in_features, **kw) if self.config.noise",
        "AffineParameters(2 * rank, self.in_features, **kw) if self.config.noise",
        "test_hdpl::test_names_and_shapes_of_the_parameters",
    ),
    Mutant(
        "Figure 1, Section",
        "src/relinear/operators/hdpl.py",
        "AffineParameters(rank, self.in_features, **kw) if self.config.noise",
        "AffineParameters(1, self.in_features, **kw) if self.config.noise",
        "test_hdpl::test_parameters_are_those_of_the_paper",
    ),
    Mutant(
        "total loss: sum",
        "src/relinear/core/aux.py",
        "total = torch.stack([term.to(loss.device, loss.dtype) for term in terms.values()]).sum()",
        "total = torch.stack([term.to(loss.device, loss.dtype) for term in terms.values()]).mean()",
        "test_aux_losses::test_the_loss_is_cross_entropy_plus_the_terms",
    ),
    Mutant(
        "Figure 17: beta_y",
        "results/cgt/arithmetic.py",
        'float(options.column.partition("-")[2] or options.kl)',
        "options.kl",
        "test_cgt_scripts::test_vae_columns_weigh_the_divergence",
    ),
    Mutant(
        "Section 3.1: Global",
        "src/relinear/operators/context_manager.py",
        "states = linear_recurrence(decay, value, start)",
        "states = linear_recurrence(decay, value.flip(1), start)",
        "test_causality::test_managers_are_causal",
    ),
    Mutant(
        "Table 2: 10.29",
        "src/relinear/operators/context_manager.py",
        "self.norm = nn.LayerNorm(width, **kw)",
        "self.norm = nn.LayerNorm(width, bias=False, **kw)",
        "test_ccl::test_both_the_token_and_the_moving_averages_fit_the_papers_count",
    ),
    Mutant(
        "Figures 1 and 2",
        "src/relinear/operators/context_manager.py",
        "nn.Embedding(vocabulary, dim, **kw)",
        "nn.Embedding(2 * vocabulary, dim, **kw)",
        "test_ccl::test_both_the_token_and_the_moving_averages_fit_the_papers_count",
    ),
    Mutant(
        "Section 3.2: o",
        "src/relinear/surgery/select.py",
        "return named | {id(output_head(model))}",
        "return named - {id(output_head(model))}",
        "test_surgery::test_all_linear_leaves_the_head",
    ),
    Mutant(
        "not in the paper",
        "src/relinear/operators/hdpl.py",
        "if self.config.noise else None",
        "if self.config.bias else None",
        "test_hdpl::test_without_noise_the_paths_are_those_of_eval_and_the_size_less_by_the_variance_encoder",
    ),
    Mutant(
        "Table 2: SDPA-Gate",
        "src/relinear/surgery/placement.py",
        r'r".*\.(self_attn\.[qkvo]_proj|attn',
        r'r".*\.(self_attn\.[qkv]_proj|attn',
        "test_transponder::test_gates_of_the_sdpa_baselines_size_are_those_on_q_k_v_and_o",
    ),
    Mutant(
        "Lemma 1: every",
        "src/relinear/functional/rotor.py",
        "return clifford.from_spin(y) if basis",
        "return clifford.to_spin(y) if basis",
        "test_rotor::test_blade_basis_of_general_terms_is_the_geometric_product",
    ),
    Mutant(
        "Algorithm 1: commuting",
        "src/relinear/clifford/decomposition.py",
        "parts, _, _ = _Decompose.apply(matrix)",
        "parts = _Decompose.apply(matrix)[0].flip(-3)",
        "test_clifford::test_parts_commute_are_simple_and_multiply_to_the_rotor",
    ),
    Mutant(
        "sums of w sandwiches",
        "src/relinear/operators/rotor.py",
        "self.entry = SandwichSum(config, in_features, out_features, window, config.width, **kw)",
        "self.entry = SandwichSum(config, in_features, out_features, window, 1, **kw)",
        "test_rotor::test_exact_parameter_counts",
    ),
    Mutant(
        "widths and depths",
        "src/relinear/operators/rotor.py",
        "for k in range(config.depth))",
        "for k in range(1))",
        "test_rotor::test_exact_parameter_counts",
    ),
    Mutant(
        "inputs recorded with",
        "src/relinear/distill/record.py",
        "value = output if outputs else args[0]",
        "value = output",
        "test_distill::test_inputs_are_recorded_with_earlier_replacements_active_and_stored_once",
    ),
    Mutant(
        "q, k and v of a",
        "src/relinear/distill/run.py",
        'joint = {"joint_start_error": before.relative, "joint_error": after.relative}',
        'joint = {"joint_start_error": before.relative, "joint_error": before.relative}',
        "test_distill::test_targets_of_a_layer_are_trained_together",
    ),
    Mutant(
        "the output projection",
        "src/relinear/distill/run.py",
        "fits += [self._retrain(name, before.pop(name)) for name in retrained]",
        "fits += []",
        "test_distill::test_the_output_projection_is_trained_again",
    ),
    Mutant(
        "Figure 4",
        "results/cgt/cgt_study/measures.py",
        "y = model.context(vectors[:, : 2 * k])[:, -1]",
        "y = model.context(vectors)[:, -1]",
        "test_cgt_analysis::test_regression_errors_of_frozen_and_dynamic_models",
    ),
    Mutant(
        "Figures 2 and 3",
        "src/relinear/analysis/modulators.py",
        "scalar[name] = first[:, 0].clone()",
        "scalar[name] = first[0].clone()",
        "test_modulator_analysis::test_record_holds_the_gates_that_the_model_used",
    ),
    Mutant(
        "mean squared error",
        "src/relinear/distill/fit.py",
        "return (got - wanted).square().mean() / mean_square",
        "return (got + wanted).square().mean() / mean_square",
        "test_distill::test_every_operator_is_fitted_and_put_in_place",
    ),
    Mutant(
        "throughput, 44 %",
        "src/relinear/kernels/triton/hdpl.py",
        "sample = mean.to(tl.float32) + tl.exp(0.5 * spread.to(tl.float32)) * drawn",
        "sample = mean.to(tl.float32) + tl.exp(spread.to(tl.float32)) * drawn",
        "test_triton::test_kernels_in_the_interpreter",
    ),
    Mutant(
        "Eq. 8 to 10: one",
        "src/relinear/kernels/triton/transponder.py",
        "gated *= 2 * tl.sigmoid(_logits(",
        "gated *= tl.sigmoid(_logits(",
        "test_triton::test_kernels_in_the_interpreter",
    ),
    Mutant(
        "Figure 2: curves",
        "src/relinear/compare/report.py",
        '"curves": figures.curves(entries, palette, results.get("ngram")),',
        '"curves": [],',
        "test_compare_engine::test_report_is_self_contained_and_escapes",
    ),
    Mutant(
        "Figure 4: perplexity",
        "src/relinear/compare/results.py",
        '"flops_per_token": planned.size.flops,',
        '"flops_per_token": planned.size.parameters,',
        "test_compare_engine::test_results_hold_what_was_asked",
    ),
    Mutant(
        "accuracy on multiple-choice",
        "src/relinear/evaluate/language.py",
        "found = simple_evaluate(model=wrapped, tasks=names, **settings)",
        "found = simple_evaluate(model=wrapped, tasks=names, limit=1, **settings)",
        "test_evaluate::test_lm_eval_runs_a_task_on_a_model_with_operators",
    ),
)

#: rows without a mutant: how their first cells begin
WITHOUT: tuple[str, ...] = ()


def rows() -> list[tuple[str, list[str]]]:
    """The first cell of every row of the page that names tests, and those tests."""
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", page, flags=re.M):
        for line in block.strip().splitlines()[2:]:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if tests := re.findall(r"`(test_\w+::test_\w+)`", cells[2]):
                found.append((cells[0], tests))
    return found


def uncovered() -> list[str]:
    """Rows that name a test and have no mutant for one of them."""
    return [
        cell
        for cell, tests in rows()
        if not any(cell.startswith(mutant.row) and mutant.test in tests for mutant in MUTANTS)
    ]


def copied(folder: Path) -> None:
    """The tree, as the tests need it."""
    for part in _PARTS:
        source, target = ROOT / part, folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.png", "fixtures"))
        else:
            shutil.copy(source, target)


def passes(folder: Path, *tests: str) -> bool:
    """Whether tests of one file of the tree pass, in a process that begins with torch and transformers imported."""
    (stem,) = {test.partition("::")[0] for test in tests}
    child = os.fork()
    if not child:
        os.chdir(folder)
        sys.path.insert(0, str(folder / "src"))
        sys.dont_write_bytecode = True
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        import pytest

        chosen = " or ".join(test.partition("::")[2] for test in tests)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", "-k", chosen]
        os._exit(int(pytest.main([f"tests/{stem}.py", *options])))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 1):
        raise RuntimeError(f"{', '.join(tests)} could not be run: pytest ended with {code}")
    return code == 0


def survives(folder: Path, mutant: Mutant) -> bool:
    """Whether a mutant's test passes with it in the tree."""
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.was) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.was)} times: {mutant.was}")
    try:
        path.write_text(text.replace(mutant.was, mutant.now), encoding="utf-8")
        return passes(folder, mutant.test)
    finally:
        path.write_text(text, encoding="utf-8")


def main(words: Sequence[str] = ()) -> int:
    """Run the mutants, tell those that survive and the rows without; 1 if there is anything wrong."""
    import pytest  # noqa: F401
    import transformers  # noqa: F401

    chosen = [m for m in MUTANTS if not words or any(word in f"{m.row} {m.file} {m.test}" for word in words)]
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        tests = dict.fromkeys(mutant.test for mutant in chosen)
        for stem in dict.fromkeys(test.partition("::")[0] for test in tests):
            if not passes(folder, *(test for test in tests if test.startswith(f"{stem}::"))):
                wrong += 1
                print(f"tests fail without a mutant: {stem}", flush=True)
        for mutant in chosen:
            alive = survives(folder, mutant)
            wrong += alive
            print(f"{'SURVIVES' if alive else 'seen'}: {mutant.row} ({mutant.test})", flush=True)
    for cell in uncovered():
        listed = cell.startswith(WITHOUT)
        wrong += not listed
        print(f"no mutant{'' if listed else ', and not listed'}: {cell[:80]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

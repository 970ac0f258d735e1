"""A conditioned model gives the same tokens, losses and gradients cached, padded, recomputed, compiled, copied."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM, StaticCache

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama, mostly_slow

VOCABULARY, DIM = 96, 8
PAD = 0


def make_tiny_qwen2():
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).eval()


MODELS = {"llama": make_tiny_llama, "gpt2": make_tiny_gpt2, "qwen2": make_tiny_qwen2}
MANAGERS = {
    "token": relinear.ContextManager(dim=DIM),
    "ema": relinear.ContextManager(dim=DIM, mixer="ema", timescales=(2.0, 30.0)),
    "gru": relinear.ContextManager(dim=DIM, mixer="gru", source="embeddings"),
}
every_model = pytest.mark.parametrize(
    "model_name",
    mostly_slow(["llama", "gpt2", "qwen2"], "llama"),  # test_model_layout.py has all families, in fewer ways
)
every_manager = pytest.mark.parametrize("manager", list(MANAGERS))


def conditioned(model_name: str, manager: str, seed: int = 0, **overrides):
    """A tiny model with conditioned layers everywhere, its context made strong enough that every token shows."""
    torch.manual_seed(seed)
    model = MODELS[model_name](**overrides)
    relinear.attach_(model, MANAGERS[manager])
    relinear.replace_(model, {"all-linear": relinear.CCL(rank=8, context_dim=DIM)})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "relinear_context.output" in name or "trunk" in name:
                parameter.mul_(4)
    return model.eval()


def prompts(rows: int = 2, tokens: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def same_generation(model, ids, **settings) -> None:
    """Cached generation equals generation without a cache."""
    settings = {"max_new_tokens": 10, "pad_token_id": PAD} | settings
    results = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        results.append(model.generate(ids, use_cache=use_cache, **settings))
    assert torch.equal(*results)


# Generation


@every_model
@every_manager
def test_the_context_matters(model_name: str, manager: str) -> None:
    model = conditioned(model_name, manager)
    ids = prompts()
    before = model(ids).logits
    with torch.no_grad():
        model.base_model.relinear_context.output.weight.mul_(-1)
    assert (model(ids).logits - before).abs().max() > 1e-2


@every_model
@every_manager
@pytest.mark.parametrize("mode", ["greedy", "sampled", "beams"])
def test_generation_with_a_cache(model_name: str, manager: str, mode: str) -> None:
    settings = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "top_k": 20},
        "beams": {"num_beams": 4, "do_sample": False},
    }[mode]
    same_generation(conditioned(model_name, manager), prompts(), **settings)


@every_model
@every_manager
def test_generation_from_one_token(model_name: str, manager: str) -> None:
    same_generation(conditioned(model_name, manager), prompts(tokens=1), do_sample=False)


@every_model
@every_manager
@pytest.mark.parametrize("beams", [1, 4])
def test_left_padding_changes_nothing(model_name: str, manager: str, beams: int) -> None:
    model = conditioned(model_name, manager)
    lengths = (9, 4, 1)
    rows = [prompts(1, n, seed=n)[0] for n in lengths]
    ids = torch.stack([nn.functional.pad(row, (max(lengths) - len(row), 0), value=PAD) for row in rows])
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    settings = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "pad_token_id": PAD}
    together = model.generate(ids, attention_mask=mask, **settings)
    for row, padded in zip(rows, together):
        alone = model.generate(row[None], attention_mask=torch.ones(1, len(row), dtype=torch.long), **settings)
        assert torch.equal(padded[max(lengths) :], alone[0, len(row) :])


@every_model
@every_manager
@pytest.mark.parametrize("sizes", [(4, 5), (1, 1, 7), (8, 1), (1,) * 9])
def test_prompts_in_chunks(model_name: str, manager: str, sizes: tuple[int, ...]) -> None:
    model, ids = conditioned(model_name, manager).double(), prompts()
    with torch.no_grad():
        whole = model(ids).logits
        # Two ways to make a cache: layers on demand, or all of them at once.
        for cache in (DynamicCache(), DynamicCache(config=model.config)):
            parts = [model(chunk, past_key_values=cache).logits for chunk in ids.split(sizes, dim=1)]
            assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-6)


@every_manager
def test_chunked_prefill_of_generate(manager: str) -> None:
    model = conditioned("llama", manager)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    assert torch.equal(
        model.generate(prompts(), prefill_chunk_size=4, **settings), model.generate(prompts(), **settings)
    )


@every_manager
def test_static_cache_with_left_padding(manager: str) -> None:
    model, ids = conditioned("llama", manager), prompts()
    ids[0, :4] = PAD
    mask = (ids != PAD).long()
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD, "attention_mask": mask}
    dynamic = model.generate(ids, **settings)
    cache = StaticCache(config=model.config, max_cache_len=32)
    assert torch.equal(model.generate(ids, past_key_values=cache, disable_compile=True, **settings), dynamic)


@every_manager
def test_a_cache_serves_several_continuations(manager: str) -> None:
    model, ids = conditioned("llama", manager).double(), prompts(1)
    with torch.no_grad():
        cache = model(ids[:, :5]).past_key_values
        for tail in (ids[:, 5:], ids[:, 5:].flip(1)):
            expected = model(torch.cat([ids[:, :5], tail], 1)).logits[:, 5:]
            assert torch.allclose(model(tail, past_key_values=copy.deepcopy(cache)).logits, expected, atol=1e-6)


@every_model
@every_manager
def test_packed_documents_start_afresh(model_name: str, manager: str) -> None:
    model = conditioned(model_name, manager).double()
    documents = [prompts(1, n, seed=n) for n in (5, 1, 7)]
    positions = torch.cat([torch.arange(d.shape[1])[None] for d in documents], dim=1)
    with torch.no_grad():
        packed = model(torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(d, use_cache=False).logits for d in documents], dim=1)
    assert torch.allclose(packed, alone, atol=1e-6)


# Training


def loss_and_gradients(model, batches, run=None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all batches, run forward one after another before the one backward."""
    model.zero_grad()
    # The loss is ours: stock GPT-2 logs a warning in its own, which no compiler follows.
    run = model if run is None else run
    logits = [run(ids).logits for ids in batches]
    losses = [
        nn.functional.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for y, ids in zip(logits, batches)
    ]
    sum(losses).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [loss.item() for loss in losses], gradients


def assert_same(actual, expected, tolerance: float) -> None:
    assert actual[0] == pytest.approx(expected[0], abs=tolerance)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.allclose(actual[1][name], gradient, atol=tolerance, rtol=tolerance), name


@every_model
@every_manager
@pytest.mark.parametrize("forwards", [1, 2])
def test_gradient_checkpointing(model_name: str, manager: str, forwards: int) -> None:
    model = conditioned(model_name, manager).double().train()
    batches = [prompts(seed=s) for s in range(forwards)]
    expected = loss_and_gradients(model, batches)
    assert "relinear_context.output.weight" in str(expected[1].keys())
    model.gradient_checkpointing_enable()
    assert_same(loss_and_gradients(model, batches), expected, 1e-12)


@every_model
def test_reentrant_checkpointing_is_refused(model_name: str) -> None:
    model = conditioned(model_name, "token").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="reentrant"):
        model(prompts())
    model.eval()(prompts())


def check_compiled(model_name: str, manager: str, checkpointing: bool) -> None:
    torch._dynamo.reset()
    model = conditioned(model_name, manager).train()
    model.config.use_cache = False  # with checkpointing, stock models log that it is off, which no compiler follows
    batches = [prompts(seed=s) for s in range(1 + checkpointing)]
    expected = loss_and_gradients(model, batches)
    if checkpointing:
        model.gradient_checkpointing_enable()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # Handing the context over is a side effect inside the checkpointed function; the compiler wants to be told that it
    # need not be repeated in the backward, whose recomputation it derives from the graph.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=checkpointing):
        assert_same(loss_and_gradients(model, batches, compiled), expected, 1e-5)


@pytest.mark.slow  # one in training, under checkpointing, is among the fast ones of test_compiled_models.py
@every_model
@every_manager
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiles_as_one_graph(model_name: str, manager: str, checkpointing: bool) -> None:
    check_compiled(model_name, manager, checkpointing)


def test_a_cache_keeps_the_last_state_and_not_those_before_it() -> None:
    model = make_tiny_llama()
    relinear.attach_(model, MANAGERS["ema"])
    state = model(torch.ones(1, 50, dtype=torch.long), use_cache=True).past_key_values.layers[-1].state
    assert state.untyped_storage().nbytes() == state.nbytes


@every_model
@every_manager
def test_deepcopy_is_independent(model_name: str, manager: str) -> None:
    model, ids = conditioned(model_name, manager), prompts()
    expected = model(ids).logits
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(ids).logits, expected)
    twin(ids, labels=ids).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert twin.base_model.relinear_context.output.weight.grad.abs().sum() > 0


@every_model
@every_manager
def test_save_and_load(model_name: str, manager: str, tmp_path) -> None:
    model, ids = conditioned(model_name, manager), prompts()
    model.save_pretrained(tmp_path)
    torch.manual_seed(9)
    loaded = relinear.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    same_generation(loaded, ids, do_sample=False)


def _rank(rank: int, world: int, port: int, queue) -> None:
    import os

    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = conditioned("llama", "ema").double().train()
    model.gradient_checkpointing_enable()
    parallel = nn.parallel.DistributedDataParallel(model)
    rows = prompts(rows=4).chunk(world)[rank]
    loss_and_gradients(model, [rows], parallel)
    if rank == 0:
        # Plain lists: a tensor's shared memory would not outlive this process.
        queue.put({name: p.grad.tolist() for name, p in model.named_parameters()})
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel() -> None:
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = mp.get_context("spawn")
    queue = spawn.SimpleQueue()
    processes = [spawn.Process(target=_rank, args=(rank, 2, port, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    gradients = queue.get()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    model = conditioned("llama", "ema").double().train()
    _, expected = loss_and_gradients(model, [prompts(rows=4)])
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(torch.tensor(gradients[name], dtype=torch.float64), gradient, atol=1e-10), name


@pytest.mark.parametrize("mixer", ["ema", "gru"])
def test_a_memory_in_float64_is_exact_in_float64(mixer):
    """Against the recurrence written out; float32 anywhere inside would be off by 1e-8."""
    model = make_tiny_llama()
    relinear.attach_(model, relinear.ContextManager(dim=DIM, mixer=mixer))
    owner = model.double().model.relinear_context
    ids = torch.randint(1, VOCABULARY, (2, 9))
    context, final = owner(ids)
    features, memory = owner.embedding(ids), owner.memory
    state, states = torch.zeros(2, DIM, dtype=torch.float64), []
    for token in features.unbind(1):
        if mixer == "ema":
            keep = torch.exp(-torch.exp(-memory.log_timescale))
            state = keep * state + (1 - keep) * token
        else:
            gate = torch.sigmoid(memory.gate(token))
            state = (1 - gate) * state + gate * torch.tanh(memory.candidate(token))
        states.append(state)
    mixed = owner.norm(torch.cat([features, torch.stack(states, 1)], -1))
    expected = owner.output(nn.functional.gelu(owner.hidden(mixed)))
    torch.testing.assert_close(context, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(final, state, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("strict", mostly_slow([False, True], False))
@pytest.mark.parametrize("manager", mostly_slow(["ema", "gru"], "gru"))
def test_a_memory_is_exported_for_any_number_of_tokens(manager, strict):
    model = conditioned("llama", manager, num_hidden_layers=1)
    ids = prompts(tokens=6)
    tokens = {1: torch.export.Dim("tokens", min=2, max=100)}
    program = torch.export.export(
        model,
        (),
        {"input_ids": ids, "use_cache": False},
        dynamic_shapes={"input_ids": tokens, "use_cache": None},
        strict=strict,
    )
    for length in (2, 33, 100):
        longer = torch.randint(1, VOCABULARY, (ids.shape[0], length))
        found = program.module()(input_ids=longer, use_cache=False).logits
        torch.testing.assert_close(found, model(longer, use_cache=False).logits)

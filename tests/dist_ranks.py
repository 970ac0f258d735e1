"""What each rank of test_distributed.py runs."""

import contextlib
import json
import os
import sys
import time
import traceback

import torch
from accelerate.state import AcceleratorState
from torch.distributed.tensor.experimental import implicit_replication
from transformers import TrainerCallback

import relinear
import relinear.surgery.parallel
from conftest import kinds_for_dense_models, make_tiny_llama
from relinear.hf.training_loss import ModelWithObjective
from relinear.models.cgt.objective import CGTObjective
from relinear.surgery.layer_bias import LayerBias
from relinear.training import FitSettings, fit
from tiny_models import make_cgt
from train_helpers import DATA, Gradients, Tokens

SETTINGS = FitSettings(
    steps=1, batch_size=4, warmup_steps=0, dtype="float32", max_grad_norm=0, threads=1, device="cpu", log_every=1
)
CONTEXT = relinear.ContextManager(dim=8)
#: name -> (what is replaced, what is attached): every operator, every attachment, auxiliary losses among them
PARTS = {
    "low_rank": ({"up_proj": relinear.LowRank(rank=4)}, []),
    "pivoted_low_rank": ({"up_proj": relinear.PivotedLowRank(rank=4)}, []),
    "block_hadamard": ({"up_proj": relinear.BlockHadamard()}, []),
    "monarch": ({"up_proj": relinear.Monarch(blocks=4)}, []),
    "hdpl": ({"up_proj": relinear.HDPL(rank=4, blocks=4, beta=0.1)}, []),
    "rotor": ({"up_proj": relinear.Rotor(width=2)}, []),
    "transponder": ({"up_proj": relinear.Transponder(rank=2)}, []),
    "output_gate": ({"up_proj": relinear.OutputGate()}, []),
    "layer_bias": (
        {"up_proj": relinear.LowRank(rank=4)},
        [LayerBias(layers=("model.layers.0.self_attn.q_proj",))],
    ),
    "context": ({"up_proj": relinear.CCL(rank=4, context_dim=8)}, [CONTEXT]),
}


def others(family, named, part):
    """A row for every kind of ours that has none yet, with its defaults."""
    from relinear.models import heads  # noqa: F401  registers its kind

    return {kind: part(cls()) for kind, cls in kinds_for_dense_models(family).items() if kind not in named}


PARTS |= others(
    relinear.LowRank,
    {config.kind for mapping, _ in PARTS.values() for config in mapping.values()},
    lambda config: ({"up_proj": config}, []),
)
PARTS |= others(
    relinear.residual.ReZero,
    {config.kind for _, attached in PARTS.values() for config in attached},
    lambda config: ({"q_proj": relinear.LowRank(rank=4)}, [config]),
)


#: what takes a step on two ranks: these, and the model that has an objective of its own
CGT = "cgt"
MODELS = (*PARTS, CGT)
#: what is split over ranks: the rows of operators, and one operator in another
PARTS["on_hdpl"] = ({"up_proj": relinear.Transponder(rank=2, base=relinear.HDPL(rank=4, blocks=4, beta=0.1))}, [])
PLANNED = ("low_rank", "context", "on_hdpl")
SPLIT = [part for part, (_, attached) in PARTS.items() if part == "context" or not attached]


def built(part):
    torch.manual_seed(0)
    if part == CGT:  # every draw of a split is the same one, as ranks draw their own
        objective = CGTObjective(splits=(4,), continuity=0.1)
        return ModelWithObjective(make_cgt(vocab_size=96), objective)
    model = make_tiny_llama()
    mapping, attached = PARTS[part]
    for attachment in attached:
        relinear.attach_(model, attachment)
    relinear.replace_(model, mapping)
    return model


def without_noise(*size, **kwargs):
    """In place of ``torch.randn``: ranks draw noise of their own, so gradients are only equal without it."""
    return torch.zeros(*size, **{key: value for key, value in kwargs.items() if key != "generator"})


def one_step(part, settings):
    """Losses of two steps, and the gradients of the first; padded sequences, so that ranks have unequal shares.

    CGT's losses are means over a batch's sequences, so those are whole.
    """
    drawn, seen, model = torch.randn, Gradients(), built(part)
    torch.randn = without_noise
    try:
        result = fit(model, DATA["full" if part == CGT else "padded"](), settings.replace(steps=2), callbacks=[seen])
    finally:
        torch.randn = drawn
    losses = [value for row in result.curve for key, value in row.items() if key in ("loss", "cross_entropy")]
    return {"gradients": seen.found, "losses": losses}


def steps(folder, rank, parts):
    found = {part: one_step(part, SETTINGS) for part in MODELS if part in parts}
    if rank == 0:
        torch.save(found, folder / "steps.pt")


def shards(model):
    """FSDP2 around every decoder layer and the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded(folder, rank, parts):
    """FSDP2: a step, shards on disk, one file of them, and shards of that file again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    model = shards(built("context")).train()
    data = Tokens()
    batch = {key: torch.stack([data[2 * i + rank][key] for i in range(4)]) for key in data[0]}
    held = []  # in full while the gradients of the first layer are computed

    def look(*_):
        held.append({name for name, parameter in model.named_parameters() if not hasattr(parameter, "placements")})

    model.model.layers[0].register_full_backward_hook(look)
    model(**batch).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    placements = sum(hasattr(parameter, "placements") for parameter in model.parameters())
    dcp.save({"model": states.get_model_state_dict(model)}, checkpoint_id=folder / "shards")

    fresh = shards(built("context"))  # as after a restart
    loaded = {"model": states.get_model_state_dict(fresh)}
    dcp.load(loaded, checkpoint_id=folder / "shards")
    states.set_model_state_dict(fresh, loaded["model"])
    with torch.no_grad():
        logits = fresh.eval()(data[0]["input_ids"][None]).logits
    whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(fresh, options=whole)
    if rank == 0:
        single = built("context")
        single.load_state_dict(weights)
        relinear.save_pretrained(single, folder / "single")
    torch.distributed.barrier()

    again = shards(built("context"))
    source = relinear.from_pretrained(folder / "single").state_dict()
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(again, source, options=options)
    back = states.get_model_state_dict(again, options=whole)
    if rank == 0:
        found = {"logits": logits, "placements": placements, "back": back, "held": held[0]}
        torch.save(found, folder / "sharded.pt")


def step_by_hand(model):
    """Losses of two steps of AdamW, and the gradients of the first; noise is drawn alike on every rank.

    The optimiser is the one that a GPU gets by default.
    """
    data = Tokens()
    batch = {key: torch.stack([data[i][key] for i in range(4)]) for key in data[0]}
    # eps above what ranks round differently: Adam makes a whole step of a gradient that is next to nothing
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2, eps=1e-4, foreach=True)
    losses, gradients = [], {}
    for _ in range(2):
        torch.manual_seed(3)
        loss = model(**batch).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = gradients or {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        with implicit_replication():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def steps_on_both(model):
    """``step_by_hand`` of a model that is divided over ranks, gathered; and what a rank holds of it."""
    from torch.distributed.checkpoint import state_dict as states

    losses, gradients = step_by_hand(model)
    held = sum((p.to_local() if hasattr(p, "placements") else p).numel() for p in model.parameters())
    saved = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
    gathered = {n: g.full_tensor() if hasattr(g, "placements") else g for n, g in gradients.items()}
    return {"losses": losses, "gradients": gathered, "held": held, "saved": saved}


def split(folder, rank, parts):
    """Tensor parallel: every operator split over the ranks, the rest of the model on each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, found = init_device_mesh("cpu", (2,)), {}
    for part in filter(parts.__contains__, SPLIT):
        model = built(part)
        plan = relinear.surgery.parallel.tensor_parallel_plan(model)
        parallelize_module(model, mesh, plan)
        found[part] = steps_on_both(model) | {"operators": len(plan)}
    if rank == 0:
        torch.save(found, folder / "split.pt")


def planned(folder, rank, parts):
    """The same by transformers: a checkpoint is loaded split, and saved whole."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    found = {}
    for part in filter(parts.__contains__, PLANNED):
        if rank == 0:
            relinear.save_pretrained(built(part), folder / part)
        torch.distributed.barrier()
        model = AutoModelForCausalLM.from_pretrained(folder / part, distributed_config=DistributedConfig(tp_size=2))
        model.save_pretrained(folder / f"{part}-again")
        found[part] = steps_on_both(model)
    if rank == 0:
        torch.save(found, folder / "planned.pt")


def fully(folder, rank, parts):
    """FSDP2: every parameter of every part divided over the ranks, which have the same batch."""
    found = {part: steps_on_both(shards(built(part))) for part in PARTS if part in parts}
    if rank == 0:
        torch.save(found, folder / "fully.pt")


class Stop(TrainerCallback):
    """Ends a run as a kill does."""

    class Killed(Exception):
        pass

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise Stop.Killed


def interrupted(folder, rank, parts):
    """A run of six steps that is cut off after the fourth; its last checkpoint is of the third."""
    settings = SETTINGS.replace(steps=6, save_every=3)
    started, deadline = folder / "interrupted" / "checkpoints", time.monotonic() + 60
    while rank and not started.exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # the second rank finds what the first has begun
    try:
        data = (DATA["full"](), DATA["full"](seed=1))
        fit(built("context"), data, settings, out_dir=folder / "interrupted", callbacks=[Stop()])
    except Stop.Killed:
        if rank == 0:
            (folder / "interrupted" / "before.json").write_text(json.dumps(4))


TASKS = {
    "steps": steps,
    "split": split,
    "planned": planned,
    "fully": fully,
    "sharded": sharded,
    "interrupted": interrupted,
}


def run_rank(rank, ranks, port, folder, tasks):
    """Run tasks, each with its parts, as one of several ranks, in a forked process with the variables of torchrun."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)  # what earlier tests found is one process
    with (folder / f"rank-{rank}.txt").open("w") as log, contextlib.redirect_stdout(log):
        try:
            torch.distributed.init_process_group("gloo")
            for name, parts in tasks.items():
                TASKS[name](folder, rank, parts)
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        except BaseException:
            traceback.print_exc(file=log)
            log.flush()
            sys.exit(1)

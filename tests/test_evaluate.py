"""Perplexity and LAMBADA against lm-eval and against plain sums; the wrapper of lm-eval on a task of our own."""

import json
import math

import pytest
import torch

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from relinear.data.tokenizers import byte_tokenizer
from relinear.evaluate.language import lambada, lm_eval, perplexity
from tiny_models import starting_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 4


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def model():
    return make_tiny_llama(vocab_size=258)


@pytest.fixture(scope="module")
def no_tasks(tmp_path_factory):
    """A task manager that does not read lm-eval's thousands of task files, which takes ten seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False, include_path=str(tmp_path_factory.mktemp("tasks")))


def token_losses(model, ids):
    logits = model(input_ids=ids[None]).logits[0].double()
    return -logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]


def test_disjoint_windows_against_a_plain_sum(model, tokenizer):
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    with torch.no_grad():
        losses = torch.cat([token_losses(model, ids[start : start + 50]) for start in range(0, len(ids), 50)])
    found = perplexity(model, TEXT, tokenizer, sequence_length=50, batch_size=3)
    assert found.tokens == len(losses) == len(ids) - math.ceil(len(ids) / 50)
    assert found.loss == pytest.approx(losses.mean().item(), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.loss))


@pytest.mark.parametrize("stride", [1, 20, 33, 49])
def test_a_stride_predicts_every_token_once_from_the_longest_context(model, tokenizer, stride):
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])[:120]
    starts = [0]
    while starts[-1] + 50 < len(ids):
        starts.append(starts[-1] + stride)
    with torch.no_grad():
        whole = [token_losses(model, ids[start : start + 50]) for start in starts]
    seen, expected = 1, []
    for start, losses in zip(starts, whole, strict=True):
        expected += losses[seen - start - 1 :].tolist()
        seen = start + len(losses) + 1
    found = perplexity(model, TEXT, tokenizer, sequence_length=50, stride=stride, max_tokens=120)
    assert found.tokens == len(expected) == 119
    assert found.loss == pytest.approx(sum(expected) / 119, rel=1e-6)


@pytest.mark.parametrize("stride", [None, 20])
def test_windows_begin_with_what_the_tokenizer_puts_there(model, stride):
    ids = [*TEXT[:120].encode()]
    step = stride or 49
    starts = [0]
    while starts[-1] + 49 < len(ids):
        starts.append(starts[-1] + step)
    seen, expected = 0, []
    with torch.no_grad():
        for start in starts:
            losses = token_losses(model, torch.tensor([257, *ids[start : start + 49]]))
            expected += losses[seen - start :].tolist()
            seen = start + len(losses)
    found = perplexity(model, TEXT[:120], starting_tokenizer(), sequence_length=50, stride=stride)
    assert found.tokens == len(expected) == 120
    assert found.loss == pytest.approx(sum(expected) / 120, rel=1e-6)


def test_a_start_that_the_text_has_is_not_put_there_again(model):
    tokenizer = starting_tokenizer()
    assert perplexity(model, "<|pad|>" + TEXT, tokenizer) == perplexity(model, TEXT, tokenizer)


def test_lambada_begins_as_the_tokenizer_says(model):
    seen = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    lambada(model, starting_tokenizer(), ["a cat and a dog", "word " * 100 + "end"])
    assert [ids.shape for ids in seen] == [(1, 16), (1, 128)]
    assert all(ids[0, 0] == 257 for ids in seen)


def test_half_an_emoji_is_no_error(model, tokenizer):
    assert perplexity(model, TEXT + "\ud83d", tokenizer) == perplexity(model, TEXT + "?", tokenizer)
    assert lambada(model, tokenizer, ["a \ud83d and a dog"]) == lambada(model, tokenizer, ["a ? and a dog"])


def test_perplexity_equals_lm_evals_rolling_loglikelihood(model, tokenizer):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    # lm-eval predicts the first token too, from the end-of-text token; so does a document that starts with it.
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=64)
    request = Instance("loglikelihood_rolling", {}, (TEXT,), 0)
    (total,) = harness.loglikelihood_rolling([request], disable_tqdm=True)
    found = perplexity(model, tokenizer.eos_token + TEXT, tokenizer, sequence_length=128, stride=128, max_tokens=65)
    (first,) = harness.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (TEXT[:64],), 0)], disable_tqdm=True
    )
    assert found.tokens == 64
    assert found.loss == pytest.approx(-first / 64, rel=1e-5)
    assert total < first


def test_documents_are_joined_by_the_end_of_text_token(model, tokenizer):
    parts = ["first document", "second document"]
    joined = parts[0] + tokenizer.eos_token + parts[1]
    assert perplexity(model, parts, tokenizer) == perplexity(model, joined, tokenizer)


def test_a_dataset_gives_what_its_text_gives(model, tokenizer):
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    blocks = [{"input_ids": ids[at : at + 32], "labels": ids[at : at + 32]} for at in range(0, 192, 32)]

    class Blocks(torch.utils.data.Dataset):
        def __len__(self):
            return len(blocks)

        def __getitem__(self, index):
            return blocks[index]

    from_text = perplexity(model, TEXT, tokenizer, sequence_length=32, max_tokens=192)
    assert perplexity(model, Blocks()).loss == pytest.approx(from_text.loss, rel=1e-6)
    masked = [dict(block, labels=torch.full_like(block["labels"], -100)) for block in blocks]
    masked[0] = blocks[0]
    blocks[:] = masked
    assert perplexity(model, Blocks()).tokens == 31
    assert perplexity(model, Blocks(), max_tokens=20).tokens == 19


class Rows(list, torch.utils.data.Dataset):
    """A list of samples as a dataset."""


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_that_a_mask_leaves_out_are_not_read(side):
    model = make_tiny_gpt2(vocab_size=258).eval()  # which has learnt positions
    for parameter in model.parameters():
        parameter.data.mul_(5)
    alone, padded = Rows(), Rows()
    for length in (5, 9, 8):
        ids, pad = torch.randint(1, 258, (length,)), torch.zeros(9 - length, dtype=torch.long)
        alone.append({"input_ids": ids, "labels": ids})
        values = {"input_ids": (ids, pad), "labels": (ids, pad - 100), "attention_mask": (ids**0, pad)}
        padded.append({k: torch.cat(v if side == "right" else v[::-1]).tolist() for k, v in values.items()})
    assert perplexity(model, padded) == perplexity(model, alone)
    padded[0]["attention_mask"].pop()
    with pytest.raises(ValueError, match="input_ids has 9 tokens and attention_mask 8"):
        perplexity(model, padded)
    with pytest.raises(ValueError, match="a mapping with input_ids and labels"):
        perplexity(model, torch.utils.data.TensorDataset(torch.zeros(2, 2)))


def test_a_model_that_gives_nan_has_no_perplexity(tokenizer):
    model = make_tiny_llama(vocab_size=258)
    model.lm_head.weight.data[97, 3] = torch.nan  # of a token that few texts have
    with pytest.raises(ValueError, match=r"lm_head\.weight holds values that are not finite"):
        perplexity(model, TEXT, tokenizer)
    with pytest.raises(ValueError, match=r"lm_head\.weight holds values that are not finite"):
        relinear.evaluate.lambada(model, tokenizer, ["a cat and a dog"])
    model = make_tiny_llama(vocab_size=258)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * torch.tensor(3e38) * 0.0 * torch.inf)
    with pytest.raises(ValueError, match="gives NaN though its weights are finite"):
        perplexity(model, TEXT, tokenizer)


def test_modes_and_gradients_are_left_as_they_were(model, tokenizer):
    model.train()
    model.model.layers[0].eval()
    perplexity(model, TEXT, tokenizer, max_tokens=20)
    assert model.training
    assert not model.model.layers[0].training
    assert all(p.grad is None for p in model.parameters())


def test_dropout_is_off():
    model = make_tiny_gpt2(vocab_size=258, resid_pdrop=0.5).train()
    first, second = (perplexity(model, TEXT, byte_tokenizer(), max_tokens=60) for _ in range(2))
    assert first == second


def test_lambada_equals_lm_evals_loglikelihoods(model, tokenizer):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    texts = ["a cat and a dog", "one two three four five", "x yz", "it was late and she went home"]
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    pairs = [text.rpartition(" ") for text in texts]
    requests = [Instance("loglikelihood", {}, (context, " " + word), i) for i, (context, _, word) in enumerate(pairs)]
    scored = harness.loglikelihood(requests, disable_tqdm=True)
    found = lambada(model, tokenizer, texts, batch_size=3)
    assert found.examples == 4
    assert found.perplexity == pytest.approx(math.exp(-sum(score for score, _ in scored) / 4), rel=1e-4)
    assert found.accuracy == sum(greedy for _, greedy in scored) / 4


def test_lambada_counts_words_that_are_right(tokenizer):
    class Parrot(torch.nn.Module):
        """Predicts that the text goes on as ``b`` does."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, **_):
            logits = torch.zeros(*input_ids.shape, 258)
            logits[..., :-1, :] = 10 * torch.nn.functional.one_hot(input_ids[..., 1:], 258).float()
            logits[input_ids == ord("q")] = 0.0
            return type("Output", (), {"logits": logits})()

    found = lambada(Parrot(), tokenizer, [{"text": "see the cat"}, {"text": "see the qua"}])
    assert found.accuracy == 0.5


def test_lambada_reads_the_openai_form_and_cuts_long_contexts(tmp_path, tokenizer):
    model = make_tiny_gpt2(vocab_size=258)
    rows = [{"text": "word " * 100 + "end"}, {"text": "short text"}]
    path = tmp_path / "test.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    long = lambada(model, tokenizer, path)
    assert long == lambada(model, tokenizer, [rows[0]["text"][-128:], rows[1]["text"]])
    assert lambada(model, tokenizer, path, max_examples=1).examples == 1


def test_lm_eval_runs_a_task_on_a_model_with_operators(tmp_path, tokenizer, model, no_tasks):
    relinear.replace_(model, {"q_proj": relinear.LowRank(rank=4)})
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"context": f"{i} and", "word": str(i)}) for i in range(4)))
    task = {
        "task": "echo",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": " {{word}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }
    found = lm_eval(model, tokenizer, [task], bootstrap_iters=0, task_manager=no_tasks)["echo"]
    expected = lambada(model, tokenizer, [f"{i} and {i}" for i in range(4)])
    assert found["perplexity,none"] == pytest.approx(expected.perplexity, rel=1e-4)
    assert found["acc,none"] == expected.accuracy


def test_lm_eval_names_an_unknown_task(model, tokenizer, no_tasks):
    with pytest.raises(ValueError, match="no_such_task"):
        lm_eval(model, tokenizer, "no_such_task", task_manager=no_tasks)


def test_lm_eval_says_how_to_get_it(monkeypatch, model, tokenizer):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"relinear\[eval\]"):
        lm_eval(model, tokenizer, "arc_easy")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sequence_length": 1}, "at least 2"),
        ({"sequence_length": 500}, "texts of 500 tokens are too long for this model, which reads 128"),
        ({"stride": 0}, "stride must be from 1 to sequence_length=128"),
        ({"stride": 129}, "got 129"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_tokens": 1}, "no token to predict"),
    ],
)
def test_wrong_arguments_of_perplexity(model, tokenizer, settings, said):
    with pytest.raises(ValueError, match=said):
        perplexity(model, TEXT, tokenizer, **settings)


def test_text_without_a_tokenizer_and_a_dataset_with_one(model, tokenizer):
    with pytest.raises(ValueError, match="tokenizer"):
        perplexity(model, TEXT)
    with pytest.raises(ValueError, match="omit tokenizer"):
        perplexity(model, torch.utils.data.TensorDataset(torch.zeros(2, 2)), tokenizer)
    with pytest.raises(ValueError, match="fewer than two tokens"):
        perplexity(model, [], tokenizer)


@pytest.mark.parametrize(
    ("texts", "said"), [([], "at least one"), (["single"], "'single'"), ("absent.jsonl", "absent.jsonl")]
)
def test_wrong_texts_of_lambada(model, tokenizer, texts, said):
    with pytest.raises(ValueError, match=said):
        lambada(model, tokenizer, texts)


def test_lambada_names_the_line_that_is_broken(tmp_path, model, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a b"}\n{"txt": "a b"}\n')
    with pytest.raises(ValueError, match="line 2"):
        lambada(model, tokenizer, path)


@pytest.mark.slow
def test_smollm2_has_its_known_perplexity(smollm2, corpora):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2)
    text = (corpora / "wikitext2" / "test.txt").read_text(encoding="utf-8")
    found = perplexity(model, text, AutoTokenizer.from_pretrained(smollm2), max_tokens=20_480)
    assert found.tokens == 20 * 1023
    assert found.perplexity == pytest.approx(20.6, abs=0.05)

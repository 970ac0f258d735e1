"""Exploring a model: its index against brute force, what the server answers and refuses, the page in a browser."""

import http.client
import json
import re
import threading

import pytest
import torch

import relinear
from conftest import make_tiny_gpt2, make_tiny_llama
from relinear.data import DataSettings
from relinear.data.tokenizers import byte_tokenizer
from relinear.explore import units as units_module
from relinear.explore.changes import effect, try_change
from relinear.explore.explored_model import load_explored_model
from relinear.explore.page import static_page
from relinear.explore.server import MAX_BODY_BYTES, make_server
from relinear.explore.units import BINS, TOP, choose_hook_points, index_units, read_index, values_of
from relinear_cli.main import main
from tiny_models import make_cgt, starting_tokenizer

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>{{ 7 * 7 }}"
Q0 = "model.layers.0.self_attn.q_proj"
CHANGE = {"text": "a", "point": Q0, "unit": 0, "action": "set", "value": 1}


def with_latents():
    model = make_tiny_llama(vocab_size=258)
    relinear.replace_(model, {"q_proj": relinear.HDPL(rank=6, blocks=4), "down_proj": relinear.Transponder()})
    for module in model.modules():
        if isinstance(module, relinear.Operator) and hasattr(module, "mu"):
            torch.nn.init.normal_(module.mu.bias)
    return model


def with_gates():
    model = make_tiny_gpt2(vocab_size=258)
    relinear.attach_(model, relinear.ContextManager(dim=8))
    relinear.replace_(model, {"mlp.c_fc": relinear.CCL(rank=6, context_dim=8)})
    return model


def with_prefixes():
    return make_cgt(vocab_size=258, n_positions=128)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A small corpus, with text in it that a page must not read as markup."""
    path = tmp_path_factory.mktemp("corpus") / "texts.txt"
    path.write_text(
        "\n".join(f"Line {n} of {HOSTILE} and of other things, {n * n}." for n in range(200)), encoding="utf-8"
    )
    return path


def saved(model, folder):
    relinear.save_pretrained(model, folder, tokenizer=byte_tokenizer())
    return folder


def prepared(folder, texts, **settings):
    from transformers import AutoTokenizer

    model, tokenizer = relinear.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    settings = {"sequences": 30, "length": 24} | settings
    return load_explored_model(
        str(folder), model, tokenizer, data=DataSettings(data=str(texts), validation_fraction=0.5), **settings
    )


@pytest.fixture(scope="module")
def explored(tmp_path_factory, texts):
    torch.manual_seed(0)
    return prepared(saved(with_latents(), tmp_path_factory.mktemp("model") / "a & <b>"), texts)


def test_typed_text_begins_as_the_tokenizer_says(explored, monkeypatch) -> None:
    monkeypatch.setattr(explored, "tokenizer", starting_tokenizer())
    assert explored.encode("ab").tolist() == [257, 97, 98]
    with pytest.raises(ValueError, match="type some text first"):
        explored.encode("")


# The index


def brute_force(model, ids):
    """The values (N, T, R) of some hook_points by hooks of this test's own."""
    found = {}

    def keep(name, value):
        found.setdefault(name, []).append(value.detach().float())

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, relinear.Operator) and hasattr(module, "mu"):
            handles.append(module.register_forward_hook(
                lambda m, args, out, name=name: keep(name, torch.nn.functional.linear(args[0], m.mu.weight, m.mu.bias))
            ))  # fmt: skip
        elif name.endswith(".modulator"):
            handles.append(module.register_forward_pre_hook(
                lambda m, args, name=name: [keep(f"{name}.{k}", v) for k, v in m.gates_of(args[0]).items()] and None
            ))  # fmt: skip
        elif isinstance(module, relinear.Operator) and hasattr(module, "gates"):
            handles.append(module.register_forward_hook(
                lambda m, args, out, name=name: [keep(f"{name}.{k}_gate", v) for k, v in m.gates().items()] and None
            ))  # fmt: skip
        elif type(module) is torch.nn.Linear:
            handles.append(module.register_forward_hook(lambda m, args, out, name=name: keep(f"{name}.output", out)))
    with torch.no_grad():
        for row in ids:
            model(row[None])
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("make", [with_latents, with_gates, make_tiny_llama], ids=["latents", "gates", "stock"])
def test_the_index_is_that_of_brute_force(make) -> None:
    model = make().eval()
    ids = torch.randint(0, 96, (2 * units_module.BATCH + 9, 12), generator=torch.Generator().manual_seed(0))
    places = choose_hook_points(model)
    index = index_units(model, ids, places, {"a": 1})
    expected = brute_force(model, ids)
    assert set(places) <= set(expected)
    for name, facts in index.hook_points.items():
        values, rows = expected[name], slice(facts.start, facts.start + facts.size)
        got = {key: tensor[rows] for key, tensor in index.tensors.items()}
        torch.testing.assert_close(
            values_of(model, ids[3], {name: places[name]})[name], values[3], rtol=1e-4, atol=1e-5
        )
        for end, sign in (("most", 1), ("least", -1)):
            best = (sign * values).amax(1).T.sort(1, descending=True).values[:, :TOP]
            torch.testing.assert_close(got[f"{end}_value"], sign * best, rtol=1e-4, atol=1e-5)
            there = values[got[f"{end}_row"].long(), got[f"{end}_token"].long(), torch.arange(facts.size)[:, None]]
            torch.testing.assert_close(there, sign * best, rtol=1e-4, atol=1e-5)
            assert all(len(set(row)) == TOP for row in got[f"{end}_row"].tolist())
        flat = values.flatten(0, 1)
        torch.testing.assert_close(got["mean"], flat.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got["std"], flat.std(0, correction=0), rtol=1e-3, atol=1e-5)
        assert (got["counts"].sum(1) == len(flat)).all()
        edges = got["low"][:, None] + got["width"][:, None] * torch.arange(BINS + 1)
        for unit in range(facts.size):
            # up to what lies on an edge
            below = torch.tensor([(flat[:, unit] < edge).sum() for edge in edges[unit]])
            close = (flat[:, unit, None] - edges[unit]).abs().le(1e-5 + 1e-4 * got["width"][unit]).sum(0)
            counted = torch.cat([torch.zeros(1, dtype=torch.long), got["counts"][unit].long().cumsum(0)])
            assert ((counted - below).abs() <= close + (edges[unit] == edges[unit][-1])).all()


def test_fewer_texts_than_places_leave_some_empty() -> None:
    model = make_tiny_llama().eval()
    ids = torch.randint(0, 96, (3, 5))
    index = index_units(model, ids, choose_hook_points(model, ["q_proj.output"]), {})
    assert (index.tensors["most_row"][:, :3] >= 0).all()
    assert (index.tensors["most_row"][:, 3:] == -1).all()
    assert list(index.hook_points) == [f"model.layers.{n}.self_attn.q_proj.output" for n in (0, 1)]
    assert [facts.layer for facts in index.hook_points.values()] == [0, 1]


def test_an_index_is_kept_and_made_again_where_anything_changed(explored, tmp_path) -> None:
    explored.index.save(tmp_path / "index")
    made_from = dict(explored.index.made_from)
    again = read_index(tmp_path / "index", made_from)
    assert again.hook_points == explored.index.hook_points
    assert torch.equal(again.ids, explored.index.ids)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in explored.index.tensors.items())
    assert read_index(tmp_path / "index", made_from | {"data": "other"}) is None
    assert read_index(tmp_path / "nowhere", made_from) is None
    whole = (tmp_path / "index" / "units.safetensors").read_bytes()
    (tmp_path / "index" / "units.safetensors").write_bytes(whole[: len(whole) // 2])
    assert read_index(tmp_path / "index", made_from) is None


def test_sites_that_cannot_be_indexed_are_refused(monkeypatch) -> None:
    model = make_tiny_llama().eval()
    with pytest.raises(ValueError, match=r"named 'q_porj'; did you mean 'q_proj\.output'"):
        choose_hook_points(model, ["q_porj"])
    monkeypatch.setattr(units_module, "_MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="too many for one index"):
        choose_hook_points(model)
    monkeypatch.undo()
    model.model.layers[0].self_attn.q_proj.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        index_units(model, torch.zeros(1, 4, dtype=torch.long), choose_hook_points(model, ["q_proj.output"]), {})


# What is asked of a model


@pytest.mark.parametrize(
    ("make", "point", "action", "value"),
    [
        (with_latents, Q0, "set", 40.0),
        (with_latents, "model.layers.1.mlp.down_proj.modulator.channel", "at most", 0.5),
        (with_gates, "transformer.h.1.mlp.c_fc.basis_gate", "add", 0.75),
        (with_prefixes, "transformer.context", "at least", 2.0),
    ],
)
def test_the_code_that_is_shown_repeats_a_change(make, point, action, value, tmp_path, texts, capsys) -> None:
    torch.manual_seed(0)
    explored = prepared(saved(make(), tmp_path / "it's"), texts, sequences=4)
    found = try_change(explored, 'a "text" of\\n its own\'s', point, 3, action, value, new=5)
    assert found["after"]["divergence"] > 0
    names = {}
    exec(compile(found["code"], "shown", "exec"), names)
    ids = [explored.tokenizer.encode(token) for token in found["tokens"]]
    single = [n for n, one in enumerate(ids) if len(one) == 1]  # the others are parts of characters
    assert len(single) > 3
    chosen = [ids[n][0] for n in single]
    torch.testing.assert_close(names["probabilities"][chosen], torch.tensor(found["after"]["probabilities"])[single])
    assert found["after"]["text"] in capsys.readouterr().out
    with torch.no_grad():
        plain = explored.model(names["ids"]).logits[0, -1].softmax(-1)
    torch.testing.assert_close(plain[chosen], torch.tensor(found["before"]["probabilities"])[single])


def test_the_control_is_another_unit_moved_as_far(explored) -> None:
    found = try_change(explored, "some text", Q0, 2, "set", 1.0, new=0, seed=1)
    control = found["control"]["change"]
    assert (control["point"], control["unit"]) == explored.control_of(Q0, 2, 1)
    assert control["unit"] != 2
    mean, std = explored.index.tensors["mean"], explored.index.tensors["std"]
    rows = [explored.index.row(Q0, unit) for unit in (2, control["unit"])]
    away = [float((v - mean[r]) / std[r]) for v, r in zip((1.0, control["value"]), rows)]
    assert away[0] == pytest.approx(away[1], rel=1e-3)
    assert len({explored.control_of(Q0, 2, seed) for seed in range(60)}) == 5


def test_an_effect_is_that_of_the_unit_at_its_mean(explored) -> None:
    found = effect(explored, Q0, 1)
    row = explored.index.row(Q0, 1)
    expected = []
    for text, place in zip(explored.index.tensors["most_row"][row][:5], explored.index.tensors["most_token"][row][:5]):
        ids = explored.index.ids[text].long()[None, : place + 1]
        with torch.no_grad():
            before = explored.model(ids).logits[0, -1].log_softmax(-1)
            with relinear.activations.intervene(
                explored.model, {Q0: relinear.activations.Patch(float(explored.index.tensors["mean"][row]), dims=[1])}
            ):
                after = explored.model(ids).logits[0, -1].log_softmax(-1)
        expected.append((before.exp() * (before - after)).sum())
    assert found["unit"]["divergence"] == pytest.approx(float(torch.stack(expected).mean()), rel=1e-2, abs=1e-7)
    assert found["control_unit"] == explored.control_of(Q0, 1)


def test_colours_are_the_values_along_the_text(explored) -> None:
    found = explored.color("a text", Q0, 4)
    ids = explored.encode("a text")
    values = values_of(explored.model, ids, {Q0: explored.points[Q0]})[Q0]
    assert found["tokens"] == list("a text")
    assert found["values"] == pytest.approx(values[:, 4].tolist())
    assert [len(one) for one in found["strongest"]] == [3] * 6


def test_search_finds_units_by_their_marked_tokens(explored) -> None:
    found = explored.search("o")
    assert found
    for one in found[:3]:
        page = explored.unit(one["point"], one["unit"])
        marks = [entry["tokens"][entry["token"]] for entry in page["most"]]
        assert sum("o" in mark.lower() for mark in marks) == one["count"]
    assert [one["count"] for one in found] == sorted((one["count"] for one in found), reverse=True)
    assert explored.search("no token is like this") == []


def test_a_prefix_is_shown_as_weights(tmp_path, texts) -> None:
    from relinear.explore.changes import prefix_view

    explored = prepared(saved(with_prefixes(), tmp_path / "cgt"), texts, sequences=4)
    found = prefix_view(explored, "a prefix", "a text")
    special = relinear.specialize(explored.model, explored.encode("a prefix"))
    with torch.no_grad():
        probabilities = special(explored.encode("a text")[None]).logits[0, -1].softmax(-1)
    best = [explored.token_text(int(token)) for token in probabilities.topk(3).indices]
    assert set(best) <= set(found["tokens"])
    assert sorted(found["probabilities"]["specialised"], reverse=True)[:3] == pytest.approx(
        probabilities.topk(3).values.tolist()
    )
    context = explored.model.context(explored.encode("a prefixa text")[None])[0]
    assert torch.tensor(found["context"]).shape == context.shape
    torch.testing.assert_close(torch.tensor(found["context"]), context)
    names = {f"transformer.h.{n}.{layer}" for n in (2, 3) for layer in ("attn.c_attn", "mlp.c_fc")}
    assert {row["name"] for row in found["weights"]} == names
    weight = "transformer.h.2.mlp.c_fc.weight"
    change = special.state_dict()[weight] - explored.model.state_dict()[weight]
    row = next(row for row in found["weights"] if row["name"] == weight.removesuffix(".weight"))
    assert row["change"] == pytest.approx(float(change.norm() / explored.model.state_dict()[weight].norm()), rel=1e-4)
    assert 1 <= row["rank"] <= 10  # templates times rank


# The server


@pytest.fixture(scope="module")
def address(explored):
    server = make_server([explored, explored])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address
    server.shutdown()
    server.server_close()


def ask(address, method, path, body=None, **headers):
    connection = http.client.HTTPConnection(*address[:2], timeout=60)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None and not isinstance(body, bytes):
        body, headers = json.dumps(body), {"Content-Type": "application/json"} | headers
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def test_the_server_listens_on_this_machine_alone(address) -> None:
    assert address[0] == "127.0.0.1"
    status, page, headers = ask(address, "GET", "/")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers
    assert "a &amp; &lt;b&gt;" in page


def test_the_server_answers(address, explored) -> None:
    status, answer, _ = ask(address, "GET", f"/api/unit?model=1&point={Q0}&unit=3&seed=2")
    assert status == 200
    assert json.loads(answer)["unit"] == json.loads(json.dumps(explored.unit(Q0, 3)))
    values = {"model": 0, "text": "hm", "point": Q0, "unit": 1, "action": "add", "value": 2, "new": 3}
    status, answer, _ = ask(address, "POST", "/api/change", values)
    assert status == 200
    assert json.loads(answer)["after"]["change"] == {"point": Q0, "unit": 1, "action": "add", "value": 2.0}
    for path, body in (("/api/next", {"text": "a"}), ("/api/effect", {"point": Q0, "unit": 0})):
        assert ask(address, "POST", path, body)[0] == 200


@pytest.mark.parametrize(
    ("status", "method", "path", "body", "headers"),
    [
        (403, "GET", "/", None, {"Host": "evil.example"}),
        (403, "GET", "/api/text?row=0", None, {"Host": "evil.example:80"}),
        (403, "POST", "/api/next", {"text": "a"}, {"Origin": "http://evil.example"}),
        (404, "GET", "/etc/passwd", None, {}),
        (404, "GET", "/../../etc/passwd", None, {}),
        (404, "POST", "/api/text", {}, {}),
        (413, "POST", "/api/next", b"x" * (3 * MAX_BODY_BYTES), {"Content-Type": "application/json"}),
        (415, "POST", "/api/next", b"{}", {"Content-Type": "text/plain"}),
        (400, "POST", "/api/next", b"{", {"Content-Type": "application/json"}),
        (400, "POST", "/api/next", b"[" * 100_000, {"Content-Type": "application/json"}),
        (400, "POST", "/api/next", [1], {}),
        (400, "POST", "/api/next", {"text": ""}, {}),
        (400, "POST", "/api/next", {"text": 3}, {}),
        (400, "POST", "/api/next", {"text": "a " * 2000}, {}),
        (400, "POST", "/api/next", {"text": "a", "model": 7}, {}),
        (400, "GET", "/api/unit?point=nope&unit=1", None, {}),
        (400, "GET", f"/api/unit?point={Q0}&unit=99", None, {}),
        (400, "GET", f"/api/unit?point={Q0}&unit=x", None, {}),
        (400, "GET", "/api/text?row=-1", None, {}),
        (400, "GET", "/api/search?query=", None, {}),
        (400, "POST", "/api/change", CHANGE | {"action": "eval"}, {}),
        (400, "POST", "/api/change", CHANGE | {"value": "1"}, {}),
        (400, "POST", "/api/change", CHANGE | {"new": 10**6}, {}),
        (400, "POST", "/api/change", CHANGE | {"value": float("nan")}, {}),
        (400, "POST", "/api/prefix", {"prefix": "a", "text": "b"}, {}),
    ],
)  # fmt: skip
def test_the_server_refuses(address, status, method, path, body, headers) -> None:
    got, answer, _ = ask(address, method, path, body, **headers)
    assert got == status
    assert json.loads(answer)["error"]


# The command


def test_the_command_says_what_is_wrong(tmp_path, texts, capsys) -> None:
    model = saved(with_latents(), tmp_path / "model")
    (tmp_path / "empty.txt").write_text("")
    fine = [str(model), "--data", str(texts), "--sequences", "2", "--length", "8", "--static", str(tmp_path / "x.html")]
    for given, words in [
        ([str(tmp_path / "nothing"), *fine[1:]], "nothing"),
        ([*fine, "--hook-points", "k_prj"], "k_prj"),
        ([*fine[:2], str(tmp_path / "empty.txt"), *fine[3:]], "empty.txt|no text|0 sequences"),
        ([*fine, "--length", "4000"], "too long for this model"),
        ([*fine, "--tokenizer", str(tmp_path)], "no tokenizer"),
    ]:
        assert main(["explore", *given]) == 2, given
        assert re.search(words, capsys.readouterr().err), words
    assert not (tmp_path / "x.html").exists()
    assert main(["explore", *fine]) == 0
    assert (tmp_path / "x.html").is_file()
    assert (model / "explore" / "index.json").is_file()


def test_a_port_in_use_is_said(address, explored) -> None:
    with pytest.raises(OSError, match="another --port"):
        make_server([explored], port=address[1])


# The page


def test_text_of_corpus_and_file_names_is_escaped_in_the_file(explored) -> None:
    page = static_page([explored], effects=2)
    tags = re.findall(r"<(script|img)\b([^>]*)>", page)
    assert [tag for tag, _ in tags] == ["script"] * 3
    assert "<b>" not in page
    assert HOSTILE not in page


def view_of(browser, url, home):
    """A page in the browser, and what went wrong on it or was asked for from elsewhere."""
    view, wrong = browser.new_page(), []
    view.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    view.on("pageerror", lambda error: wrong.append(str(error)))
    view.on("dialog", lambda dialog: wrong.append(f"dialog {dialog.message}"))
    view.on("request", lambda r: None if r.url.startswith((home, "data:", "blob:")) else wrong.append(r.url))
    view.goto(url)
    view.wait_for_selector("#explore[data-ready=yes]")
    return view, wrong


def fits(view):
    view.emulate_media(color_scheme="dark")
    view.set_viewport_size({"width": 390, "height": 800})
    assert view.evaluate("document.documentElement.scrollWidth") <= 390
    view.emulate_media(color_scheme="light")
    view.set_viewport_size({"width": 1280, "height": 800})


def test_the_page_shows_units_and_changes_them(browser, explored) -> None:
    server = make_server([explored])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        view, wrong = view_of(browser, home, home)
        unit, control = (view.locator(f"[data-role={role}]") for role in ("unit", "control"))
        assert unit.locator("li").count() == control.locator("li").count() == TOP
        assert unit.locator(".marked").count() == TOP
        before = unit.inner_text()
        view.get_by_label("unit", exact=True).fill("4")
        view.keyboard.press("Tab")
        view.wait_for_function("text => document.querySelector('[data-role=unit]').innerText !== text", arg=before)
        assert f"{Q0} #4" in unit.inner_text()
        other = control.inner_text()
        view.get_by_role("button", name="Another control").click()
        view.wait_for_function("text => document.querySelector('[data-role=control]').innerText !== text", arg=other)
        view.get_by_role("button", name="Measure its effect").click()
        view.wait_for_selector("text=the distribution moves by")
        view.get_by_label("text", exact=True).fill(HOSTILE)
        view.get_by_role("button", name="Colour the text").click()
        view.wait_for_selector("[data-role=text] span")
        assert view.locator("[data-role=text]").inner_text() == HOSTILE
        assert len(set(view.locator("[data-role=text] span").evaluate_all("s => s.map(x => x.style.background)"))) > 1
        view.get_by_label("value as a number").fill("3")
        view.get_by_role("button", name="Change it").click()
        view.wait_for_selector("[data-role=code]")
        assert "relinear.activations.Patch(value=3.0, dims=[4])" in view.locator("[data-role=code]").inner_text()
        assert view.locator("[data-role=change] tbody tr").count() >= 10
        view.get_by_label("units highest at a token").fill("o")
        view.get_by_role("button", name="Search").click()
        view.wait_for_selector("text=×")
        view.get_by_label("text", exact=True).fill("")
        view.get_by_role("button", name="Colour the text").click()
        view.wait_for_selector("text=type some text first")
        fits(view)
        assert [line for line in wrong if "400" not in line] == []  # the browser notes the refused request
    finally:
        server.shutdown()
        server.server_close()


def test_thousands_of_units_open_at_once(browser, texts, tmp_path) -> None:
    """In processor time of the page, for a busy machine takes its own time by the clock."""
    model = make_tiny_llama(vocab_size=258, hidden_size=192, intermediate_size=512, num_hidden_layers=3)
    explored = prepared(saved(model, tmp_path / "model"), texts, sequences=20, length=16)
    assert sum(facts.size for facts in explored.index.hook_points.values()) > 5_000
    path = tmp_path / "many.html"
    path.write_text(static_page([explored]), encoding="utf-8")
    view = browser.new_page()
    meter = view.context.new_cdp_session(view)
    meter.send("Performance.enable", {"timeDomain": "threadTicks"})
    view.goto(path.as_uri())
    view.wait_for_selector("#explore[data-ready=yes]")
    measured = {one["name"]: one["value"] for one in meter.send("Performance.getMetrics")["metrics"]}
    assert measured["TaskDuration"] < 2


def test_the_file_shows_units_without_a_server(browser, explored, tmp_path) -> None:
    path = tmp_path / "mailed.html"
    path.write_text(static_page([explored, explored], effects=3), encoding="utf-8")
    view, wrong = view_of(browser, path.as_uri(), "file:")
    assert view.locator(".pane").count() == 2
    assert "To type texts or change units, run relinear explore" in view.locator("#help").inner_text()
    assert view.get_by_role("button", name="Change it").count() == 0
    unit = view.locator("[data-role=unit]").first
    expected = explored.unit(Q0, 0)
    assert unit.locator("li").count() == TOP
    marked = unit.locator(".marked").first.inner_text()
    assert marked.strip() == expected["most"][0]["tokens"][expected["most"][0]["token"]].strip()
    before = unit.inner_text()
    view.get_by_label("texts in which it is").first.select_option("least")
    assert unit.inner_text() != before
    view.get_by_label("hook point").first.select_option(index=1)
    view.wait_for_function("text => document.querySelector('[data-role=unit]').innerText !== text", arg=before)
    fits(view)
    assert wrong == []

"""Caches that another user has, had or may have a hand in are not read, loaded or changed."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from relinear.explore import units
from relinear.explore.explored_model import _default_folder
from relinear.kernels.native import build
from relinear.system import private_cache
from relinear.system.private_cache import check_private, private_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="a system without owners")
OTHER = 65534


@pytest.fixture
def pretend(monkeypatch):
    """Lets paths have other owners and modes than they have."""
    facts: dict[Path, dict[str, int]] = {}
    real = Path.lstat

    def lstat(path):
        state = real(path)
        shown = {name: getattr(state, name) for name in ("st_uid", "st_gid", "st_mode")}
        return SimpleNamespace(**shown | facts.get(path, {}))

    monkeypatch.setattr(Path, "lstat", lstat)
    monkeypatch.setattr(private_cache, "_is_private", lambda group: group == 4242)
    return lambda path, **changes: facts.update({path: changes})


@pytest.fixture
def really():
    """Gives paths another owner, which root alone can."""
    if os.geteuid() != 0:
        pytest.skip("another user's files can be made by root alone")
    return lambda path, st_uid: os.chown(path, st_uid, st_uid)


@pytest.fixture(params=["pretend", "really"])
def give(request):
    """Both: an owner of a path, as far as this process can see."""
    return request.getfixturevalue(request.param)


DIRECTORY, STICKY = 0o040000, 0o041000


@pytest.mark.parametrize(
    ("where", "facts", "reason"),
    [
        ("a", {"st_uid": OTHER}, "belongs to another user"),
        ("a/b", {"st_uid": OTHER}, "belongs to another user"),
        ("a/b", {"st_mode": DIRECTORY | 0o777}, "other users may write"),
        ("a/b", {"st_mode": STICKY | 0o777}, "other users may write"),
        ("a/b", {"st_mode": DIRECTORY | 0o775}, "other users may write"),
        ("a/b", {"st_mode": DIRECTORY | 0o775, "st_gid": 4242}, None),
        ("a", {"st_mode": DIRECTORY | 0o777}, "other users may write"),
        ("a", {"st_mode": STICKY | 0o777}, None),
        ("a", {"st_uid": 0}, None),
    ],
)
def test_what_others_own_or_may_write_to_is_refused_and_left(where, facts, reason, pretend, tmp_path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    before = folder.stat()
    pretend(tmp_path / where, **facts)
    for path in (folder, tmp_path / "link", folder / "new"):
        made = path.name == "new"
        if reason is None or (made and where == "a/b" and facts.get("st_mode") == STICKY | 0o777):
            assert private_folder(path) == path.resolve()
        else:
            with pytest.raises(PermissionError, match=reason) as error:
                private_folder(path)
            assert error.value.filename == str(tmp_path / where)
            assert not (folder / "new").exists()
    assert folder.stat().st_mode == before.st_mode


def test_folders_that_are_made_are_open_to_nobody_else(tmp_path):
    before = os.umask(0)
    try:
        private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")} == {0o755}


def test_tokens_under_a_permissive_umask_are_read_again(tmp_path):
    def build(folder):
        (folder / "part").mkdir()
        (folder / "part" / "x").write_text("b")
        return {"a": 1}

    before = os.umask(0)
    try:
        found = [private_cache.cached(tmp_path / "mine", "tokens", "key", build) for _ in range(2)]
    finally:
        os.umask(before)
    assert found[0] == found[1]


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    for name in ("RELINEAR_CACHE", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    for find in (private_cache.cache_folder, build.library_path):
        with pytest.raises(OSError, match="no home directory; set HOME, or RELINEAR_CACHE"):
            find()
    build._was_built.cache_clear()
    assert build._was_built() is False


def test_a_link_of_another_user_is_refused(pretend, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    mine = (tmp_path / "mine").resolve()  # what is read is what was checked, whoever exchanges a link meanwhile
    assert check_private(tmp_path / "link") == mine
    assert private_cache.cached(tmp_path / "link", "tokens", "key", lambda folder: {})[0].is_relative_to(mine)
    assert private_folder(tmp_path / "link" / "new") == mine / "new"
    pretend(tmp_path / "link", st_uid=OTHER)
    with pytest.raises(PermissionError, match="another user"):
        check_private(tmp_path / "link")


@pytest.mark.parametrize("planted", [".", "tokens", "tokens/entry", "tokens/entry/manifest.json"])
def test_tokens_of_another_user_are_not_read(planted, give, tmp_path, monkeypatch):
    def entry():
        return private_cache.cached(tmp_path / "cache", "tokens", "key", lambda folder: {"tokens": 3})

    folder, _ = entry()
    assert entry() == (folder, {"tokens": 3})
    give(tmp_path / "cache" / planted.replace("entry", folder.name), st_uid=OTHER)
    monkeypatch.setattr(private_cache, "_read_entry", lambda folder: pytest.fail("read"))
    with pytest.raises(
        OSError, match=r"belongs to another user .* set cache_dir or RELINEAR_CACHE to a folder of your own"
    ):
        entry()


@pytest.mark.parametrize("planted", [".", "index.json", "units.safetensors"])
def test_an_index_of_another_user_is_not_read(planted, give, tmp_path, monkeypatch):
    index = units.Index({}, torch.zeros(0, 0), {}, {})
    index.save(tmp_path / "explore")
    give(tmp_path / "explore" / planted, st_uid=OTHER)
    monkeypatch.setattr(units, "read_json", lambda path: pytest.fail("read"))
    with pytest.raises(PermissionError, match="belongs to another user"):
        units.read_index(tmp_path / "explore", {})


def test_a_model_that_others_write_to_has_its_index_in_the_cache(give, tmp_path, monkeypatch):
    monkeypatch.setenv("RELINEAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    assert _default_folder(str(tmp_path / "model")) == tmp_path / "model" / "explore"
    give(tmp_path / "model", st_uid=OTHER)
    assert _default_folder(str(tmp_path / "model")).is_relative_to(tmp_path / "cache")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A place for kernels, with one that is there; lists of what is loaded, and of what is built."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"code")
    kept = build._hashed(path, path)
    path.rename(kept)
    loaded, built = [], []
    monkeypatch.setattr(build.ctypes, "CDLL", lambda name: loaded.append(Path(name)) or SimpleNamespace())
    monkeypatch.setattr(build, "_build", lambda path: built.append(path) or path)
    return SimpleNamespace(path=path, kept=kept, loaded=loaded, built=built)


def test_kernels_are_loaded_if_they_are_what_was_built(library):
    assert build.library.__wrapped__()
    assert build._was_built.__wrapped__()
    assert (library.loaded, library.built) == ([library.kept], [])
    library.kept.write_bytes(b"other code")
    assert not build._was_built.__wrapped__()
    assert build.library.__wrapped__()
    assert (library.loaded, library.built) == ([library.kept, library.path], [library.path])


@pytest.mark.parametrize("planted", ["folder", "file"])
def test_kernels_of_another_user_are_not_loaded(planted, library, give):
    give(library.kept if planted == "file" else library.path.parent, st_uid=OTHER)
    said = rf"belongs to another user.*{library.path.parent}.*set TORCH_EXTENSIONS_DIR to a folder of your own"
    assert not build._was_built.__wrapped__()
    with pytest.warns(UserWarning, match=said):
        assert not build.library.__wrapped__()
    assert (library.loaded, library.built) == ([], [])


def test_kernels_in_a_folder_that_was_open_to_others_are_not_loaded(library):
    library.path.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="other users may write there"):
        assert not build.library.__wrapped__()
    assert (library.loaded, library.built) == ([], [])
    assert library.path.parent.stat().st_mode & 0o777 == 0o777


@pytest.fixture
def open_to_all():
    """A folder of root's that another user reaches and may write to, and what that user does in it."""
    if os.geteuid() != 0:
        pytest.skip("root alone can act as another user")

    def as_other(*command):
        subprocess.run(command, check=True, user=OTHER, group=OTHER, extra_groups=[], capture_output=True)

    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o777)
        as_other("touch", f"{name}/probe")
        yield Path(name), as_other


@pytest.mark.parametrize("closed", [False, True])
def test_tokens_that_a_second_user_writes_are_not_read(closed, open_to_all):
    folder, as_other = open_to_all
    folder.chmod(0o755)
    root = folder / "cache"
    honest, _ = private_cache.cached(root, "tokens", "key", lambda made: {"tokens": 3})
    for path in (root, root / "tokens", honest):
        path.chmod(0o777)
    as_other("sh", "-c", f"cd {honest} && sed 's/3/4/' manifest.json > new && mv new manifest.json")
    if closed:  # too late
        for path in (root, root / "tokens", honest):
            path.chmod(0o755)
    with pytest.raises(OSError, match="other users may write there" if not closed else "belongs to another user"):
        private_cache.cached(root, "tokens", "key", lambda made: pytest.fail("built"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("who", ["closed", "open", "root"])
def test_code_that_a_second_user_plants_does_not_run(who, open_to_all, monkeypatch):
    folder, as_other = open_to_all
    source, code, ran = folder / "code.c", folder / "code.so", folder / "ran"
    source.write_text(f'#include <fcntl.h>\n__attribute__((constructor)) void run(void) {{ creat("{ran}", 0644); }}')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", code, source], check=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    monkeypatch.setattr(build, "_build", lambda path: pytest.fail("built"))
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.parent.chmod(0o777)
    as_other("cp", code, build._hashed(path, code))
    if who != "open":
        for part in (folder, path.parent):
            part.chmod(0o755)
    if who == "root":  # the same file, if it were one's own
        os.chown(build._hashed(path, code), 0, 0)
        assert build.library.__wrapped__()
    else:
        with pytest.warns(UserWarning, match="belongs to another user" if who == "closed" else "other users may write"):
            assert not build.library.__wrapped__()
    assert ran.exists() == (who == "root")


def test_a_build_is_kept_under_its_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_run", lambda command: Path(command[-1]).write_bytes(b"code"))
    path = private_folder(tmp_path / "kernels") / "kernels-key.so"
    kept = build._build(path)
    assert kept == build._cached_library(path)
    assert kept.read_bytes() == b"code"
    assert not kept.stat().st_mode & 0o022
    monkeypatch.setattr(build, "_run", lambda command: pytest.fail("built again"))
    assert build._build(path) == kept

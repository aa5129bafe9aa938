"""How outputs are written: temporary names where others may write too, what is trusted, what kills leave."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from conftest import ROOT, TINY_LLAMA

USAGE, IO, EXISTS, CANCELLED = 2, 6, 8, 130
NOBODY = 65534
TEMPORARY = re.compile(r"\.(.+)\.halfbyte-\d+-[0-9a-f]{16}$")
DENSE = TINY_LLAMA / "model.safetensors"


@pytest.fixture
def environment(stubs):
    """Stand-ins for the driver and NVRTC, and no cache."""
    return {
        **os.environ,
        "HALFBYTE_CUDA_DRIVER": str(stubs / "libstub_cuda.so"),
        "HALFBYTE_NVRTC": str(stubs / "libstub_nvrtc.so"),
        "HALFBYTE_CACHE_DIR": "",
    }


@pytest.fixture
def run(cli, environment):
    def run(*arguments, code=0, **options):
        command = [str(cli), *map(str, arguments)]
        options = {"env": environment, **options}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
        assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stderr}"
        return done

    return run


# ---- Another user, in a directory like /tmp

# What writes, by what it writes. Every place that makes a temporary name is in one of them.
WRITERS = {
    "checkpoint file": ["quantize", DENSE, "-o", "OUT"],
    "checkpoint directory": ["quantize", TINY_LLAMA, "-o", "OUT"],
    "report": ["inspect", DENSE, "--json", "OUT"],
    "PTX": ["ptx", "quantize", "--arch", "sm_90a", "-o", "OUT"],
    "description": ["ptx", "quantize", "--describe", "--dtype", "f32", "--format", "int8", "-o", "OUT"],
    "pack": ["precompile", "--arch=sm_90a", "--ops=dequantize", "--dtypes=f16", "--jobs=4", "-o", "OUT"],
    "pack of one process": ["precompile", "--arch=sm_90a", "--ops=dequantize", "--dtypes=f16", "--jobs=1", "-o", "OUT"],
}

def attack(directory, stop):
    """Until something can be read from `stop`: tries what another user could do with temporary names. What succeeded,
    and the modes that were seen."""
    done, modes = set(), {}

    def attempt(what, action):
        try:
            action()
            done.add(what)
        except OSError:
            pass

    def open_file(path, flags):
        os.close(os.open(path, flags | os.O_NONBLOCK))

    while not select.select([stop], [], [], 0)[0]:
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            try:
                status = os.lstat(path)
            except OSError:
                continue
            if ".halfbyte-" not in name or status.st_uid == os.geteuid():
                continue
            is_directory = stat.S_ISDIR(status.st_mode)
            kind = "directory" if is_directory else "file"
            modes.setdefault(kind, set()).add(stat.S_IMODE(status.st_mode))
            attempt(f"write {kind}", lambda: open_file(path, os.O_WRONLY))
            attempt(f"remove {kind}", lambda: (os.rmdir if is_directory else os.unlink)(path))
            attempt(f"rename {kind}", lambda: os.rename(path, path + "-mine"))
            attempt(f"chmod {kind}", lambda: os.chmod(path, 0o777))
            if is_directory:
                attempt("list", lambda: os.listdir(path))
                attempt("enter", lambda: open_file(path + "/lock", os.O_RDONLY))
                attempt("make", lambda: os.mkdir(path + "/mine"))
    return sorted(done), {kind: sorted(seen) for kind, seen in modes.items()}


@contextlib.contextmanager
def attacked_by_another_user(directory):
    """A list that has, at the end, what attack() returned for a process of another user."""
    (stop, stopping), (result, resulting) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(resulting, b"\n")
            os.write(resulting, json.dumps(attack(directory, stop)).encode())
        finally:
            os._exit(0)
    os.close(resulting)
    results = []
    with open(result) as lines:
        try:
            lines.readline()
            yield results
        finally:
            os.write(stopping, b"x")
            results += json.loads(lines.read())
            os.waitpid(pid, 0)
            os.close(stop)
            os.close(stopping)


def plant(directory, name, precious):
    """What the other user puts in the way: names that a temporary of a process to come could have, all of them
    links to a file that the victim may write, or directories with such links."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for next_pid in range(pid, pid + 200):
        path = directory / f".{name}.halfbyte-{next_pid}"
        if next_pid % 2:
            path.symlink_to(precious)
        else:
            path.mkdir()
            for log in range(4):
                (path / f"{log}.log").symlink_to(precious)
            os.chown(path, NOBODY, NOBODY)
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
@pytest.mark.parametrize("what", WRITERS)
def test_another_user_in_a_sticky_directory(run, what):
    with tempfile.TemporaryDirectory() as base:
        base = Path(base)
        shared, precious, out = base / "shared", base / "precious", base / "shared" / "out"
        base.chmod(0o755)
        shared.mkdir()
        shared.chmod(0o1777)
        precious.write_text("precious")
        plant(shared, out.name, precious)
        planted = set(os.listdir(shared))
        command = [out if word == "OUT" else word for word in WRITERS[what]]
        with attacked_by_another_user(shared) as results:
            run(*command)
            run(*command, "--force")
        achieved, modes = results
        assert achieved == []
        assert set(modes.get("directory", [])) <= {0o700}
        assert set(modes.get("file", [])) <= {0o644, 0o600}
        assert precious.read_text() == "precious"
        assert set(os.listdir(shared)) == planted | {"out"}
        assert out.lstat().st_uid == 0


def test_temporary_names_are_made_in_one_place():
    """What makes files or directories, and where it may stand."""
    makes = re.compile(r"O_CREAT|O_TRUNC|\bmkdir\(|create_director|\bmk[ds]temp|tmpnam|ofstream|\bcreat\(")
    allowed = {
        "src/core/temporary.cc",
        "src/cuda/cubin_cache.cc",  # the directory of the cache, and its locks in it
        "src/io/file.cc",  # in a directory of temporary.cc
        "src/io/checkpoint_writer.cc",  # likewise
        "src/io/journal.cc",  # likewise
        "src/benchmark/checkpoint_bench.cc",  # likewise
    }
    found = set()
    for folder in ("src", "cli", "python"):
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in (".cc", ".h", ".py") and not re.search(r"_test\.|test_|testing", name):
                found |= {name} if makes.search(path.read_text()) else set()
    assert found <= allowed


# ---- What is loaded


@pytest.fixture
def pack(run, tmp_path):
    path = tmp_path / "packs" / "kernels.hbk"
    path.parent.mkdir()
    run("precompile", "--arch=sm_90a", "--ops=dequantize", "--dtypes=f16", "--jobs=1", "-o", path)
    return path


def doctor(run, environment, pack):
    document = json.loads(run("doctor", "--json", "-", env={**environment, "HALFBYTE_KERNEL_PACK": str(pack)}).stdout)
    return document["cuda"]["kernel_pack_problem"]


def test_packs_that_others_could_have_written(run, environment, pack):
    assert doctor(run, environment, pack) == ""
    for path, mode, what in [
        (pack, 0o666, "it may be written by others (mode 0666)"),
        (pack.parent, 0o777, f'its directory "{pack.parent}" may be written by others (mode 0777)'),
    ]:
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        problem = doctor(run, environment, pack)
        assert what in problem and "nobody but root and this user could have written it" in problem
        path.chmod(before)
    if os.geteuid() == 0:
        os.chown(pack, NOBODY, NOBODY)
        assert "it belongs to user 65534, not to root or user 0" in doctor(run, environment, pack)


def test_packs_are_written_so_that_they_can_be_loaded(run, environment, tmp_path):
    """Whatever the umask: neither they nor those of the worker processes are open to others."""
    for umask, mode in [(0, 0o644), (0o002, 0o644), (0o077, 0o600)]:
        path = tmp_path / f"{umask:03o}.hbk"
        run("precompile", "--arch=sm_90a", "--ops=dequantize", "--dtypes=f16", "--jobs=2", "-o", path, umask=umask)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert doctor(run, environment, path) == ""


# ---- What runs leave that are killed


def at_work(directory):
    """Whether a run has a temporary name there, and its lock."""
    paths = [path for path in directory.iterdir() if TEMPORARY.match(path.name)]
    with contextlib.suppress(FileNotFoundError):  # it went on
        return any(path.is_file() or len(os.listdir(path)) > 1 for path in paths)
    return False


def has_complete_files(directory):
    """Whether a run has complete files there, three at least."""
    journals = [path / "journal" for path in directory.iterdir() if (path / "journal").exists()]
    with contextlib.suppress(FileNotFoundError):
        return any(path.read_bytes().count(b"\n") > 3 for path in journals)
    return False


def start_and_stop(cli, environment, directory, *arguments, at_work=at_work):
    """Starts the tool and stops it at work."""
    for _ in range(20):
        process = subprocess.Popen([cli, *map(str, arguments)], env=environment, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            if at_work(directory):
                process.send_signal(signal.SIGSTOP)
                if at_work(directory):
                    return process
                process.send_signal(signal.SIGCONT)  # it was about to end
                process.wait()
        for path in directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    pytest.fail("the run was never seen at work")


def test_a_killed_dry_run_leaves_nothing(cli, environment, tmp_path):
    """Where it measures, too: its files have no names."""
    (tmp_path / "work").mkdir()
    for delay in (0.002, 0.005, 0.01, 0.02, 0.04):
        process = subprocess.Popen(
            [cli, "quantize", DENSE, "-o", tmp_path / "work/out", "--dry-run", "--search"], env=environment, stdout=subprocess.DEVNULL
        )
        time.sleep(delay)
        process.kill()
        process.wait()
        assert os.listdir(tmp_path / "work") == []


def leftovers(done):
    return json.loads(done.stdout).get("leftovers", [])


@pytest.mark.parametrize("source", [DENSE, TINY_LLAMA], ids=["file", "directory"])
def test_what_a_killed_run_left_is_removed(cli, run, environment, tmp_path, source):
    out = tmp_path / "out"
    quantize = ["quantize", source, "-o", out]
    run(*quantize)
    expected = {p.relative_to(out): p.read_bytes() for p in [out, *out.rglob("*")] if p.is_file()}
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    process = start_and_stop(cli, environment, tmp_path, *quantize)
    process.kill()
    process.wait()
    left = os.listdir(tmp_path)
    assert [TEMPORARY.match(name)[1] for name in left] == ["out"]
    run(*quantize, "--dry-run")
    assert os.listdir(tmp_path) == left, "a dry run changes nothing"
    done = run(*quantize, "--json", "-")
    assert [found["path"] for found in leftovers(done)] == [str(tmp_path / name) for name in left]
    assert all(found["removed"] and found["why_kept"] == "" for found in leftovers(done))
    assert done.stderr.splitlines() == [
        f'halfbyte: removed "{tmp_path / name}", which an earlier run left' for name in left
    ]
    assert os.listdir(tmp_path) == ["out"]
    assert {p.relative_to(out): p.read_bytes() for p in [out, *out.rglob("*")] if p.is_file()} == expected
    assert leftovers(run(*quantize, "--force", "--json", "-")) == []


def test_what_a_living_run_uses_is_kept(cli, run, environment, tmp_path):
    out = tmp_path / "out"
    living = start_and_stop(cli, environment, tmp_path, "quantize", TINY_LLAMA, "-o", out)
    (name,) = os.listdir(tmp_path)
    done = run("quantize", TINY_LLAMA, "-o", out, "--json", "-")
    why = "a run that has not ended uses it"
    assert leftovers(done) == [
        {"path": str(tmp_path / name), "removed": False, "why_kept": why, "unfinished": False}
    ]
    assert done.stderr == f'halfbyte: kept "{tmp_path / name}", which an earlier run left: {why}\n'
    living.send_signal(signal.SIGCONT)
    assert living.wait(60) == EXISTS, "the other was first"
    assert os.listdir(tmp_path) == ["out"]


def content_of(out):
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_an_interrupted_run(cli, run, environment, tmp_path):
    """It is left alone, resumed, or discarded."""
    work, want, report = tmp_path / "work", tmp_path / "want", tmp_path / "report.json"
    work.mkdir()
    out = work / "out"
    quantize = ["quantize", TINY_LLAMA, "--shard-size", "100KB", "--threads", "1", "-o"]
    run(*quantize, want)

    def interrupt(*options):
        process = start_and_stop(cli, environment, work, *quantize, out, *options, at_work=has_complete_files)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        assert process.wait() == CANCELLED
        (name,) = os.listdir(work)
        return work / name

    left = interrupt("--json", report)
    assert "files are complete and kept" in json.loads(report.read_text())["error"]["message"]
    assert run(*quantize, out, "--resume", "--discard", code=USAGE).stderr.count("--resume excludes --discard")
    refused = run(*quantize, out, "--resume", "--group-size", "128", code=USAGE).stderr
    assert f'cannot resume "{left}": options/group_size is not set there and 128 here' in refused
    run(*quantize, out, "--resume", "--dry-run")
    assert os.listdir(work) == [left.name]

    done = run(*quantize, out)
    hint = "halfbyte: --resume goes on with it, --discard removes it\n"
    assert done.stderr == (
        f'halfbyte: kept "{left}", which an earlier run left: it is unfinished, and some of its files are complete\n{hint}'
    )
    assert content_of(out) == content_of(want)
    shutil.rmtree(out)

    # The report of the run that was interrupted makes room.
    assert run(*quantize, out, "--json", report, code=EXISTS)
    text = run(*quantize, out, "--resume", "--json", report).stdout
    count = json.loads(report.read_text())["num_resumed_files"]
    assert count >= 3 and f"resumed      {count} files of an earlier run" in text
    assert content_of(out) == content_of(want) and os.listdir(work) == ["out"]
    shutil.rmtree(out)

    left = interrupt()
    found = leftovers(run(*quantize, out, "--discard", "--json", "-"))
    assert found == [{"path": str(left), "removed": True, "why_kept": "", "unfinished": True}]
    assert content_of(out) == content_of(want) and os.listdir(work) == ["out"]


@pytest.mark.parametrize("option", ["report", "pack"])
def test_leftovers_of_other_outputs(cli, run, environment, tmp_path, option):
    out = tmp_path / "out"
    if option == "report":
        command = ["quantize", TINY_LLAMA, "-o", tmp_path / "model", "--json", out]
    else:
        command = [out if word == "OUT" else word for word in WRITERS["pack"]]
    process = start_and_stop(cli, environment, tmp_path, *command)
    process.kill()
    process.wait()
    left = [name for name in os.listdir(tmp_path) if name.startswith(".out.")]
    assert len(left) == 1
    done = run(*command)
    assert f'halfbyte: removed "{tmp_path / left[0]}"' in done.stderr
    assert not any(TEMPORARY.match(name) for name in os.listdir(tmp_path))


def test_leftovers_never_enter_a_model(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, model)
    names = [".model.safetensors.halfbyte-1-0123456789abcdef", ".report.json.halfbyte-2-0123456789abcdef"]
    for name in names:
        (model / name).write_bytes(b"not complete")
    (model / "sub").mkdir()
    (model / "sub" / names[0]).write_bytes(b"not complete")
    (model / "sub" / "side.txt").write_bytes(b"complete")
    report = json.loads(run("quantize", model, "-o", tmp_path / "out", "--json", "-").stdout)
    assert set(report["skipped_files"]) >= {*names, "sub/" + names[0]}
    assert not any(TEMPORARY.match(path.name) for path in (tmp_path / "out").rglob("*"))
    assert (tmp_path / "out" / "sub" / "side.txt").read_bytes() == b"complete"

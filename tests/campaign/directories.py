"""Outputs where others write, where nothing fits, of every name; links, devices, mount points: old, absent or complete."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import stat
import subprocess
from pathlib import Path

from campaign.base import CODES, TINY_LLAMA, text_of

OK, IO, EXISTS = CODES["OK"], CODES["IO"], CODES["EXISTS"]
NOBODY = 65534
DENSE = TINY_LLAMA / "model.safetensors"
PRECOMPILE = ["precompile", "--arch=sm_90a", "--ops=dequantize", "--dtypes=f16", "--formats=nf4", "-o", "OUT"]

# Every command that writes; IN stands for what "quantize" made of the same kind. Then what it writes.
COMMANDS = {
    "quantize file": (["quantize", DENSE, "-o", "OUT", "--format", "int4"], "file"),
    "quantize directory": (["quantize", TINY_LLAMA, "-o", "OUT", "--format", "int4"], "directory"),
    "dequantize file": (["dequantize", "IN", "-o", "OUT"], "file"),
    "dequantize directory": (["dequantize", "IN", "-o", "OUT"], "directory"),
    "convert file": (["convert", "IN", "-o", "OUT", "--layout", "halfbyte"], "file"),
    "convert directory": (["convert", "IN", "-o", "OUT", "--layout", "halfbyte"], "directory"),
    "precompile": ([*PRECOMPILE, "--jobs=1"], "file"),
    "precompile by processes": ([*PRECOMPILE, "--jobs=2"], "file"),
    "ptx": (["ptx", "quantize", "--arch", "sm_90a", "-o", "OUT"], "file"),
    "report": (["inspect", DENSE, "--json", "OUT"], "file"),
    "bench report": (["bench", "qgemm", "--explain", "--device=cpu", "--json", "OUT"], "file"),
}


TEMPORARY = re.compile(r"\.halfbyte-\d+-[0-9a-f]{16}")


class NotHere(Exception):
    """This machine or user cannot make the place."""


# ---- What is there, before and after


def tree(path):
    """All below a path, links not followed: relative path -> what it is."""
    path = os.fsdecode(path)
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return {}
    found = {"": describe(path, status)}
    if stat.S_ISDIR(status.st_mode):
        for name in sorted(os.listdir(path)):
            for below, what in tree(os.path.join(path, name)).items():
                found[f"{name}/{below}"] = what
    return found


def describe(path, status):
    kind = stat.S_IFMT(status.st_mode)
    if stat.S_ISREG(kind):
        with open(path, "rb") as file:
            return "file", hashlib.sha256(file.read()).hexdigest()
    if stat.S_ISLNK(kind):
        return "link", os.readlink(path)
    return {stat.S_IFDIR: "directory"}.get(kind, f"special {kind:o}"), status.st_rdev if kind != stat.S_IFDIR else 0


class Directories:
    def __init__(self, section, scratch):
        self.section, self.scratch = section, scratch
        stubs = section.build / "tests"
        self.environment = {
            **os.environ,
            "HALFBYTE_NVRTC": str(stubs / "libstub_nvrtc.so"),
            "HALFBYTE_CUDA_DRIVER": str(stubs / "libstub_cuda.so"),
            "HALFBYTE_CACHE_DIR": "",
            "TMPDIR": str(scratch),
        }
        self.preload = stubs / "libplain_rename.so"
        self.inputs = {kind: scratch / f"in-{kind}" for kind in ("file", "directory")}
        for kind, path in self.inputs.items():
            self.run(f"quantize {kind}", path)
        self.expected = {}
        for command in COMMANDS:
            out = scratch / "expected"
            self.run(command, out)
            self.expected[command] = tree(out)
            shutil.rmtree(out) if out.is_dir() else out.unlink()

    def arguments(self, command, out):
        words, kind = COMMANDS[command]
        return [{"OUT": out, "IN": self.inputs[kind]}.get(str(word), word) for word in words]

    def run(self, command, out, *more, **options):
        options.setdefault("env", self.environment)
        return self.section.cli(*self.arguments(command, out), *more, **options)

    def is_complete(self, command, out):
        """Whether the output is the one that the command makes."""
        found = tree(out)
        if not command.endswith("report") or found.get("", [""])[0] != "file":
            return found == self.expected[command]
        with contextlib.suppress(ValueError):  # it has the paths, or what the machine is
            return json.loads(Path(os.fsdecode(out)).read_text())["ok"]
        return False

    def unprivileged(self, directory):
        """Options that run the tool as a user whom modes bind. That user may not reach the build: it is copied."""
        tool = self.scratch / "tool"
        if not tool.exists():
            tool.mkdir(mode=0o755)
            for file in (self.section.campaign.cli, *self.section.campaign.cli.parent.glob("libhalfbyte.so*")):
                shutil.copy(file, tool)
            for file in (TINY_LLAMA, DENSE):
                shutil.copytree(file, tool / "model") if file.is_dir() else shutil.copy(file, tool)
        options = {
            "executable": tool / self.section.campaign.cli.name,
            "env": {**self.environment, "LD_LIBRARY_PATH": str(tool)},
        }
        if os.geteuid() == 0:
            for path in (self.scratch, directory):
                path.chmod(0o755)
            options |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        return options


# ---- Places. Each is a context manager that is given a new directory and the kind of output ("file", "directory"), and
# gives (path of the output, exit codes that may be, without --force and with it, options of the run). Of these
# "keeps_names" says that temporary names cannot be removed there, "elsewhere" where the place itself changes.


def place(function):
    PLACES[function.__name__.replace("_", " ")] = contextlib.contextmanager(function)
    return function


PLACES = {}


def make_old(out, kind, state):
    if kind == "directory":
        shutil.copytree(state.inputs["directory"], out)
    else:
        out.write_bytes(b"old")


@place
def nothing(state, directory, kind):
    yield directory / "out", {OK}, {OK}, {}


@place
def an_old_output(state, directory, kind):
    make_old(directory / "out", kind, state)
    yield directory / "out", {EXISTS}, {OK}, {}


@place
def an_empty_directory(state, directory, kind):
    (directory / "out").mkdir()
    yield directory / "out", {EXISTS}, {OK if kind == "directory" else EXISTS}, {}


@place
def a_directory_with_other_files(state, directory, kind):
    make_old(directory / "out", "directory", state)
    (directory / "out" / "mine.txt").write_text("mine")
    yield directory / "out", {EXISTS}, {EXISTS}, {}


@place
def a_home_directory(state, directory, kind):
    (directory / "out").mkdir()
    for name in ("config.json", ".profile", "paper/paper.tex"):
        (directory / "out" / name).parent.mkdir(exist_ok=True)
        (directory / "out" / name).write_text("mine")
    yield directory / "out", {EXISTS}, {EXISTS}, {}


@place
def a_directory_with_links(state, directory, kind):
    make_old(directory / "out", "directory", state)
    (directory / "mine").write_text("mine")
    (directory / "out" / "vocab.txt").symlink_to("../mine")
    yield directory / "out", {EXISTS}, {EXISTS}, {}


@place
def a_link_to_a_file(state, directory, kind):
    (directory / "mine").write_text("mine")
    (directory / "out").symlink_to("mine")
    yield directory / "out", {EXISTS}, {OK if kind == "file" else EXISTS}, {}


@place
def a_link_to_nothing(state, directory, kind):
    (directory / "out").symlink_to("nowhere")
    yield directory / "out", {EXISTS}, {OK if kind == "file" else EXISTS}, {}


@place
def a_link_to_a_directory(state, directory, kind):
    make_old(directory / "mine", "directory", state)
    (directory / "out").symlink_to("mine")
    yield directory / "out", {EXISTS}, {EXISTS}, {}


@place
def a_link_to_itself(state, directory, kind):
    (directory / "out").symlink_to("out")
    yield directory / "out", {EXISTS, IO}, {OK, EXISTS, IO}, {}


@place
def a_hard_link(state, directory, kind):
    (directory / "mine").write_text("mine")
    (directory / "out").hardlink_to(directory / "mine")
    yield directory / "out", {EXISTS}, {OK if kind == "file" else EXISTS}, {}


@place
def a_fifo(state, directory, kind):
    os.mkfifo(directory / "out")
    yield directory / "out", {EXISTS}, {EXISTS}, {}


@place
def a_link_to_a_fifo(state, directory, kind):
    os.mkfifo(directory / "fifo")
    (directory / "out").symlink_to("fifo")
    yield directory / "out", {EXISTS}, {EXISTS}, {}


@place
def a_socket(state, directory, kind):
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(directory) if hasattr(
        contextlib, "chdir"
    ) else contextlib.nullcontext():
        server.bind("out")
        yield directory / "out", {EXISTS}, {EXISTS}, {}


@place
def a_device(state, directory, kind):
    try:
        os.mknod(directory / "out", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError as error:
        raise NotHere("mknod") from error
    yield directory / "out", {EXISTS}, {EXISTS}, {}


@place
def a_link_to_a_device(state, directory, kind):
    (directory / "out").symlink_to("/dev/null")
    yield directory / "out", {EXISTS}, {EXISTS}, {}


@place
def no_parent(state, directory, kind):
    yield directory / "nowhere" / "out", {IO}, {IO}, {}


@place
def a_parent_that_is_a_file(state, directory, kind):
    (directory / "file").write_text("mine")
    yield directory / "file" / "out", {IO}, {IO}, {}


@place
def a_parent_that_is_a_link(state, directory, kind):
    (directory / "real").mkdir()
    (directory / "link").symlink_to("real")
    yield directory / "link" / "out", {OK}, {OK}, {}


@place
def a_slash_at_the_end(state, directory, kind):
    yield f"{directory}/out/", {OK if kind == "directory" else IO}, {OK if kind == "directory" else IO}, {}


@place
def proc(state, directory, kind):
    if not Path("/proc/self").exists():
        raise NotHere("/proc")
    yield Path("/proc/out"), {IO}, {IO}, {}


@place
def a_read_only_directory(state, directory, kind):
    options = state.unprivileged(directory)
    directory.chmod(0o555)
    yield directory / "out", {IO}, {IO}, options
    directory.chmod(0o755)


@place
def a_directory_that_cannot_be_listed(state, directory, kind):
    if os.geteuid() != 0:
        raise NotHere("two users")
    options = state.unprivileged(directory)
    directory.chmod(0o333)
    yield directory / "out", {OK}, {OK}, options
    directory.chmod(0o755)


@place
def a_sticky_directory_with_an_output_of_another(state, directory, kind):
    if os.geteuid() != 0:
        raise NotHere("two users")
    options = state.unprivileged(directory)
    directory.chmod(0o1777)
    make_old(directory / "out", kind, state)
    yield directory / "out", {EXISTS}, {IO}, options


@place
def names_planted_by_another(state, directory, kind):
    """Of temporary files to come, as far as anybody can guess: links to a file that the victim may write."""
    if os.geteuid() != 0:
        raise NotHere("two users")
    directory.chmod(0o1777)
    (directory / "mine").write_text("mine")
    for pid in range(os.getpid(), os.getpid() + 300):
        for end in ("", "-0000000000000000"):
            path = directory / f".out.halfbyte-{pid}{end}"
            path.symlink_to("mine") if pid % 2 else path.mkdir()
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    yield directory / "out", {OK}, {OK}, {}


@contextlib.contextmanager
def attribute(path, letter):
    if subprocess.run(["chattr", f"+{letter}", path], capture_output=True).returncode != 0:
        raise NotHere(f"chattr +{letter}")
    try:
        yield
    finally:
        subprocess.run(["chattr", f"-{letter}", path], capture_output=True)


@place
def an_immutable_output(state, directory, kind):
    make_old(directory / "out", kind, state)
    with attribute(directory / "out", "i"):
        yield directory / "out", {EXISTS}, {IO}, {}


@place
def an_immutable_file_in_it(state, directory, kind):
    make_old(directory / "out", kind, state)
    file = directory / "out" / "config.json" if kind == "directory" else directory / "out"
    with attribute(file, "i"):
        # The new output may be complete, with the old one beside it.
        yield directory / "out", {EXISTS}, {IO}, {}
    for name in os.listdir(directory):
        if name.startswith("."):
            for path in directory.joinpath(name).rglob("*"):
                subprocess.run(["chattr", "-i", path], capture_output=True)


@place
def an_immutable_directory(state, directory, kind):
    with attribute(directory, "i"):
        yield directory / "out", {IO}, {IO}, {}


@place
def a_directory_that_only_grows(state, directory, kind):
    make_old(directory / "out", kind, state)
    (directory / "in").mkdir()
    with attribute(directory / "in", "a"):
        # A directory needs no other name there than its own; temporary names cannot be removed.
        codes = {OK if kind == "directory" else IO}
        yield directory / "in" / "out", codes, codes, {"keeps_names": True}


@contextlib.contextmanager
def mounted(path, *options):
    path.mkdir(exist_ok=True)
    command = ["mount", *options, path]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        raise NotHere("mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], capture_output=True)


@place
def a_mount_point(state, directory, kind):
    with mounted(directory / "out", "-t", "tmpfs", "tmpfs"):
        yield directory / "out", {EXISTS}, {EXISTS}, {}


@place
def a_mount_point_of_the_same_file_system(state, directory, kind):
    make_old(directory / "old", "directory", state)
    with mounted(directory / "out", "--bind", directory / "old"):
        yield directory / "out", {EXISTS}, {EXISTS}, {}


@place
def a_file_that_is_a_mount_point(state, directory, kind):
    (directory / "old").write_text("old")
    (directory / "out").write_text("old")
    if os.geteuid() != 0:
        raise NotHere("mount")
    if subprocess.run(["mount", "--bind", directory / "old", directory / "out"], capture_output=True).returncode:
        raise NotHere("mount")
    try:
        yield directory / "out", {EXISTS}, {EXISTS}, {}
    finally:
        subprocess.run(["umount", "-l", directory / "out"], capture_output=True)


@place
def a_mounted_directory(state, directory, kind):
    with mounted(directory / "disk", "-t", "tmpfs", "tmpfs"):
        yield directory / "disk" / "out", {OK}, {OK}, {}


@place
def a_read_only_mount(state, directory, kind):
    make_old(directory / "disk", "directory", state)
    with mounted(directory / "disk", "--bind", directory / "disk"):
        subprocess.run(["mount", "-o", "remount,ro,bind", directory / "disk"], capture_output=True)
        yield directory / "disk" / "out", {IO}, {IO}, {}


@place
def an_overlay(state, directory, kind):
    """The old output lies in the layer below, which cannot be renamed everywhere."""
    for name in ("lower", "upper", "work"):
        (directory / name).mkdir()
    make_old(directory / "lower" / "out", kind, state)
    layers = f"lowerdir={directory}/lower,upperdir={directory}/upper,workdir={directory}/work"
    with mounted(directory / "disk", "-t", "overlay", "overlay", "-o", layers):
        yield directory / "disk" / "out", {EXISTS}, {OK, IO}, {"elsewhere": ("upper/", "work/")}


@place
def a_fat_disk(state, directory, kind):
    image = directory / "image"
    image.write_bytes(b"")
    os.truncate(image, 8 << 20)
    if not shutil.which("mkfs.vfat") or subprocess.run(["mkfs.vfat", image], capture_output=True).returncode != 0:
        raise NotHere("mkfs.vfat")
    with mounted(directory / "disk", "-o", "loop", image):
        make_old(directory / "disk" / "out", kind, state)
        yield directory / "disk" / "out", {EXISTS}, {OK}, {}


@place
def no_rename_flags(state, directory, kind):
    make_old(directory / "out", kind, state)
    environment = {**state.environment, "LD_PRELOAD": str(state.preload), "PLAIN_RENAME_LINKS": "1"}
    yield directory / "out", {EXISTS}, {OK}, {"env": environment}


@place
def no_rename_flags_and_no_links(state, directory, kind):
    make_old(directory / "out", kind, state)
    yield directory / "out", {EXISTS}, {OK}, {"env": {**state.environment, "LD_PRELOAD": str(state.preload)}}


@place
def nothing_without_rename_flags_and_links(state, directory, kind):
    yield directory / "out", {OK}, {OK}, {"env": {**state.environment, "LD_PRELOAD": str(state.preload)}}


def umask_place(umask):
    @contextlib.contextmanager
    def under_umask(state, directory, kind):
        make_old(directory / "out", kind, state)
        yield directory / "out", {EXISTS}, {OK}, {"umask": umask}

    return under_umask


def disk_place(kibibytes):
    """A disk of so many KiB: what does not fit leaves the old output."""

    @contextlib.contextmanager
    def on_disk(state, directory, kind):
        with mounted(directory / "disk", "-t", "tmpfs", "tmpfs", "-o", f"size={kibibytes}k"):
            try:
                make_old(directory / "disk" / "out", kind, state)
            except (OSError, shutil.Error):
                shutil.rmtree(directory / "disk" / "out", ignore_errors=True)
            exists = (directory / "disk" / "out").exists()
            yield directory / "disk" / "out", {EXISTS} if exists else {OK, IO}, {OK, IO}, {}

    return on_disk


def inodes_place(count):
    @contextlib.contextmanager
    def with_inodes(state, directory, kind):
        with mounted(directory / "disk", "-t", "tmpfs", "tmpfs", "-o", f"nr_inodes={count}"):
            yield directory / "disk" / "out", {OK, IO}, {OK, IO}, {}

    return with_inodes


NAMES = {
    "one letter": b"x",
    "spaces": b" a b ",
    "a leading dash": b"-out",
    "an option": b"--force",
    "a newline": b"a\nb",
    "control characters": b"\x1b[2J\r\t\x7f",
    "quotes": b"'\"\\$`;&|",
    "not UTF-8": b"\xff\xfe\xc0\xaf",
    "Unicode": "Grüße 重み 🙂 \u202e".encode(),
    "a leading dot": b".out",
    "dots": b"...",
    "255 bytes": b"n" * 255,
    "255 bytes of Unicode": "重".encode() * 85,
    "256 bytes": b"n" * 256,
    "a temporary name": b".out.halfbyte-1-0123456789abcdef",
    "percents": b"%s%n{}",
    "an ending": b"out.safetensors",
}


def name_place(name):
    @contextlib.contextmanager
    def named(state, directory, kind):
        code = {IO} if len(name) > 255 else {OK}
        yield os.path.join(os.fsencode(directory), name), code, code, {}

    return named


def relative_place(name):
    """By its name alone, which is then no option only behind "=" or "./"."""

    @contextlib.contextmanager
    def named(state, directory, kind):
        yield b"./" + name if name.startswith(b"-") else name, {OK}, {OK}, {"cwd": directory}

    return named


def all_places(quick):
    places = dict(PLACES)
    for umask in (0, 0o002, 0o077):
        places[f"umask {umask:03o}"] = umask_place(umask)
    for kibibytes in (64, 2000, 4000) if quick else (4, 16, 64, 256, *range(500, 9000, 250)):
        places[f"disk of {kibibytes} KiB"] = disk_place(kibibytes)
    for count in (2, 6) if quick else range(2, 30):
        places[f"disk of {count} inodes"] = inodes_place(count)
    for what, name in NAMES.items():
        places[f"name {what}"] = name_place(name)
        if len(name) < 256 and not quick:
            places[f"relative name {what}"] = relative_place(name)
    return places


# ---- One case


def check_place(section, state, make_place, command, force):
    kind = COMMANDS[command][1]
    with section.directory() as scratch:
        directory = Path(scratch)
        with make_place(state, directory, kind) as (out, codes, codes_forced, options):
            where = options.get("cwd", "")
            full = os.path.join(os.fsencode(where), os.fsencode(out)) if where else os.fsencode(out)
            keeps_names, elsewhere = options.pop("keeps_names", False), options.pop("elsewhere", ())
            before = tree(directory)
            arguments = ["--force"] if force else []
            done = run_command(state, command, out, arguments, options)
            section.count("runs")
            after = tree(directory)
            if keeps_names:
                after = {path: what for path, what in after.items() if ".out.halfbyte-" not in path}
            says = text_of(done.stderr)[-500:]
            expected = codes_forced if force else codes
            section.check(done.returncode in expected, f"exit {done.returncode}, expected {sorted(expected)}: {says}")
            complete = state.is_complete(command, full.rstrip(b"/"))
            if done.returncode == OK:
                section.check(complete, "exit 0, and the output is not what it should be")
            else:
                section.check(says.startswith("halfbyte: "), f"says nothing of exit {done.returncode}: {says!r}")
                # With an old output that cannot be removed the new one is complete, and the error says so.
                kept_old = "is complete, but its old content" in says
                section.check(complete if kept_old else after == before, f"what was there changed: {says}")
                if kept_old:
                    return
            parent, name = os.path.split(os.fsdecode(full).rstrip("/"))
            inside = (os.path.relpath(os.path.join(os.path.realpath(parent), name), directory) + "/", *elsewhere)
            beside = [
                {path: what for path, what in found.items() if not path.startswith(inside)}
                for found in (before, after)
            ]
            section.check(done.returncode != OK or beside[0] == beside[1], "what is beside the output changed")
            left = {path for path in set(after) - set(before) if TEMPORARY.search(path)}
            section.check("a temporary name" in section.current or not left, f"left {sorted(left)}")


def run_command(state, command, out, arguments, options):
    words = state.arguments(command, out)
    if "user" in options:  # what that user can read
        tool = state.scratch / "tool"
        readable = {str(TINY_LLAMA): tool / "model", str(DENSE): tool / DENSE.name}
        words = [readable.get(str(word), word) for word in words]
    options = {"env": state.environment, **options}
    words = [os.fsdecode(word) if isinstance(word, bytes) else word for word in (*words, *arguments)]
    return state.section.cli(*words, **options)


def run(section):
    with section.directory() as scratch:
        state = Directories(section, Path(scratch))
        places = all_places(section.quick)
        # Each place with a command of each kind, without and with --force; of those that differ by a number or name, one.
        if section.quick:
            by_kind = {}
            for kind in ("file", "directory"):
                commands = [name for name, (_, its_kind) in COMMANDS.items() if its_kind == kind]
                section.random.shuffle(commands)
                by_kind[kind] = itertools.cycle(commands)
            every = [(kind, force) for kind in by_kind for force in ("", " / --force")]
            one = itertools.cycle([[combination] for combination in every])
            cases = [
                f"{place} / {next(by_kind[kind])}{force}"
                for place in places
                for kind, force in (every if place in PLACES else next(one))
            ]
        else:
            cases = [
                f"{place} / {command}{force}" for place in places for command in COMMANDS for force in ("", " / --force")
            ]
        for case in section.cases(cases):
            place, command, *force = case.split(" / ")
            try:
                check_place(section, state, places[place], command, bool(force))
            except NotHere as reason:
                section.count(f"skipped: {reason}")

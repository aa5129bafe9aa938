"""Each call of libc on files fails, with every error, once and from then on, short, or after its effect.

A case is a command, a call of it by number, and what happens to that call (tests/campaign/libfaults.c).
Afterwards each output is the older one, none, or, byte for byte, that of an undisturbed run; exit code 0 only
with the last; otherwise a code that the error may have, and a message with a path and a reason; nothing
temporary is left where it could be removed, but for what is unfinished, which a run that resumes completes; the
input is as it was. An interrupted call (EINTR) is no error
at all. Then the input changes under the command.
"""

import errno
import os
import re
import shutil
import signal
from pathlib import Path

from . import commands
from .base import CODES, text_of

REMOVALS = {"unlink", "rmdir"}
WALKS = {"open", "opendir", "readdir", "stat", "close"}
_ANY = "EIO ENOMEM EACCES EPERM ESTALE"
_PATH = "ENOENT ENAMETOOLONG ELOOP"
_SPACE = "ENOSPC EDQUOT EFBIG EROFS"
ERRORS = {
    "open": f"{_ANY} {_PATH} EMFILE ENFILE EINTR EBUSY EAGAIN",
    # libc does not try again after EINTR.
    "opendir": f"{_ANY} {_PATH} EMFILE ENFILE EBUSY",
    "create": f"{_ANY} {_PATH} ENOSPC EDQUOT EROFS EMFILE ENFILE EINTR EBUSY",
    "read": "EIO ENOMEM ESTALE EINTR EAGAIN EINVAL",
    "write": f"EIO ENOMEM ESTALE EPERM {_SPACE} EINTR EAGAIN EINVAL",
    "copy": f"EIO ENOMEM {_SPACE} EINTR EXDEV EINVAL ENOSYS EOPNOTSUPP",
    "truncate": f"EIO EPERM {_SPACE} EINTR EINVAL",
    "fallocate": "EIO EPERM ENOSPC EDQUOT EFBIG EINTR EINVAL ENOSYS EOPNOTSUPP",
    "sync": "EIO ENOSPC EDQUOT EROFS EINTR EINVAL",
    "close": "EIO EINTR ENOSPC EDQUOT ESTALE",
    "rename": f"{_ANY} {_PATH} ENOSPC EDQUOT EROFS EBUSY EXDEV",
    "renameat2": f"{_ANY} {_PATH} ENOSPC EDQUOT EROFS EBUSY EXDEV EINVAL ENOSYS",
    "link": f"{_ANY} {_PATH} ENOSPC EDQUOT EROFS EXDEV",
    "symlink": f"{_ANY} {_PATH} ENOSPC EDQUOT EROFS",
    "unlink": f"{_ANY} EROFS EBUSY",
    "rmdir": f"{_ANY} EROFS EBUSY ENOTEMPTY",
    "mkdir": f"{_ANY} {_PATH} ENOSPC EDQUOT EROFS",
    "stat": f"{_ANY} {_PATH}",
    "access": f"{_ANY} {_PATH} EROFS",
    "statfs": "EIO ENOMEM EACCES ENOSYS EINTR",
    "readlink": f"{_ANY} {_PATH} EINVAL",
    "realpath": f"{_ANY} {_PATH}",
    "readdir": "EIO ENOMEM ENOENT",
    "chmod": f"{_ANY} EROFS",
    "utime": f"{_ANY} EROFS",
    "lock": "EINTR ENOLCK EAGAIN EIO",
    "mmap": "ENOMEM EACCES EAGAIN ENODEV",
    "pipe": "EMFILE ENFILE",
    "dup": "EMFILE",
    "poll": "EINTR ENOMEM",
    "ioctl": "EIO EINVAL EOPNOTSUPP",
    "spawn": "ENOMEM EAGAIN ENOENT",
    "random": "EINTR ENOSYS",
}
SHORT = {"read": [0, 1], "write": [0, 1], "copy": [0, 1]}
MOST_OF_PIPES = 30  # calls that are made to fail: how often workers are waited for is chance
# Errors that come after the effect, as network file systems may tell them.
LATE = {"rename": "EIO", "renameat2": "EIO", "link": "EIO", "sync": "EIO", "close": "EIO"}
# Conditions that last: to all calls of these kinds from this one on.
LASTING = [
    ("ENOSPC", "create write truncate fallocate mkdir rename renameat2 link symlink copy"),
    ("EIO", " ".join(ERRORS)),
    ("EROFS", "create write truncate fallocate mkdir rename renameat2 link unlink rmdir"),
    ("EMFILE", "open opendir create pipe dup"),
    ("ESTALE", "open opendir create read write stat sync close rename renameat2 unlink"),
]


def cases_of(command, calls):
    """The cases of a command: "COMMAND | NUMBER KIND WHAT VALUE"."""
    pipes = 0
    for call in calls:
        pipes += call.path == "(pipe)"
        if call.path == "(pipe)" and pipes > MOST_OF_PIPES:
            continue
        head = f"{command.name} | {call.number} {call.kind}"
        for error in ERRORS.get(call.kind, "").split():
            yield f"{head} error {error}"
        for count in SHORT.get(call.kind, []):
            yield f"{head} short {count}"
        if call.kind in LATE:
            yield f"{head} late {LATE[call.kind]}"
        for error, kinds in LASTING:
            if call.kind in kinds.split():
                yield f"{head} lasting {error}"


def removing_calls(calls):
    """The calls, as (number, kind), that remove what is temporary: where one fails, it may stay."""
    found, removed = set(), []
    for call in reversed(calls):
        walks = call.kind in WALKS and ".halfbyte-" in call.path
        if call.kind in REMOVALS:
            removed.append(call.path)
        if call.kind in REMOVALS or (walks and any(_is_below(path, call.path) for path in removed)):
            found.add((call.number, call.kind))
        elif call.kind in commands.CHANGES:
            removed = []
    return found


def _is_below(path, directory):
    return path == directory or path.startswith(directory + "/")


def _faults_of(what, value):
    if what == "lasting":
        kinds = next(kinds for error, kinds in LASTING if error == value)
        return {"do": f"error {getattr(errno, value)}", "then": kinds}
    return {"do": f"{what} {value if what == 'short' else getattr(errno, value)}"}


def _allowed_codes(call, what, value):
    codes = {"IO"}
    if value == "ENOMEM":
        codes.add("NO_MEMORY")
    if call.path.startswith("(spawn") and value in ("ENOMEM", "EAGAIN"):
        codes.add("NO_MEMORY")
    if value in ("EEXIST", "ENOTEMPTY"):
        codes.add("EXISTS")
    # What is not there though it is named, or is shorter than it was, is no input, pack, or output of ours.
    if value in ("ENOENT", "ENAMETOOLONG", "ELOOP") or (what == "short" and call.kind == "read"):
        codes |= {"BAD_INPUT", "EXISTS", "CORRUPT" if call.path.endswith(".hbk") else "BAD_INPUT"}
    return codes


# Reasons that are told in other words than those of the errno.
_OTHER_REASONS = re.compile(
    "out of memory|does not exist|is a link|changed while reading|not a regular file|in the meantime|"
    "it ends before"
)


def _check_message(section, bench, done, call, what, value):
    message = text_of(done.stderr)
    places = [str(bench.folder), "standard output", "pipe", "worker"]
    section.check("halfbyte: error: " in message, f"says only {message!r}")
    if value == "ENOMEM" and "halfbyte: error: out of memory" in message:
        return  # a fixed text, since there may be no memory for another
    section.check(any(place in message for place in places), f"names no path: {message!r}")
    number = getattr(errno, value, None) if what != "short" else None
    reason = os.strerror(number or errno.EIO) in message  # what writes nothing is an I/O error
    section.check(reason or _OTHER_REASONS.search(message), f"gives no reason: {message!r}")


def fail_call(section, bench, command, removing, name):
    head, kind, what, value = name.split(" | ")[1].split(" ")
    done = bench.run(command, faults={"at": head, **_faults_of(what, value)})
    calls = bench.calls()
    call = next((call for call in calls if call.number == int(head)), None)
    if call is None:  # threads and processes differ from run to run
        section.count("not reached")
        return
    section.count("faults")
    bench.check_code(done.returncode)
    states = bench.check_outputs(command, complete=done.returncode == 0)
    lost = [output for output, state in states.items() if state == "absent" and command.keeps_older]
    section.check(not lost, f"{call}: lost {lost}")
    if done.returncode not in (0, None) and done.returncode > 0:
        word = {code: name for name, code in CODES.items()}.get(done.returncode)
        allowed = _allowed_codes(call, what, value)
        told = f"exit {word}, not one of {sorted(allowed)}: {text_of(done.stderr)!r}"
        section.check(word in allowed, f"{call}: {told}")
        _check_message(section, bench, done, call, what, value)
    if call.kind == kind and (value == "EINTR" or (what, value) == ("short", "1")):
        section.check(done.returncode == 0, f"{call}: is an error: {text_of(done.stderr)!r}")
    left = bench.leftovers(command)
    # What is gone, or locked by another, is somebody else's to remove.
    left = [] if ".halfbyte-" in call.path and value in ("ENOENT", "EAGAIN") else left
    removal_fails = (call.number, call.kind) in removing or (what == "lasting" and value != "ENOSPC")
    # Which of its processes does what differs from run to run.
    removal_fails |= "jobs" in command.name and call.kind in REMOVALS | WALKS
    unfinished = bench.unfinished(command) if done.returncode != 0 else []
    left = [name for name in left if name not in unfinished]
    if left and not removal_fails:
        section.finding(f"{call}: leaves {left}")
    bench.check_input()
    if unfinished:
        bench.check_resumed(command, call)


def _fail_calls(section, bench):
    names, by_name = [], {}
    for command in bench.commands():
        bench.run(command, faults={})
        calls = bench.calls()
        by_name[command.name] = command, removing_calls(calls)
        names += cases_of(command, calls)
    section.random.shuffle(names)  # a run that time ends has seen some of all
    for name in section.cases(section.sample(names, 800)):
        fail_call(section, bench, *by_name[name.split(" | ")[0]], name)


# The input changes while a command reads it: the process stops itself after a read, the file is changed, it
# goes on.

def _shorter(path):
    os.truncate(path, path.stat().st_size // 2)


def _empty(path):
    os.truncate(path, 0)


def _longer(path):
    with open(path, "ab") as file:
        file.write(b"\0" * 64)


def _rewritten(path):
    content = bytearray(path.read_bytes())
    content[-100:] = bytes(100)
    path.write_bytes(content)


def _replaced(path):
    other = path.with_name("other")
    shutil.copyfile(path, other)
    other.rename(path)


def _removed(path):
    path.unlink()


CHANGES_OF_INPUT = {"shorter": _shorter, "empty": _empty, "longer": _longer, "rewritten": _rewritten,
                    "replaced": _replaced, "removed": _removed}  # fmt: skip


def _change_input(section, bench):
    names, by_name = [], {}
    for command in bench.commands():
        if command.force or not any("{input}" in word for word in command.arguments):
            continue
        by_name[command.name] = command
        bench.run(command, faults={})
        for call in bench.calls():
            if call.kind == "read" and call.path.startswith(f"{bench.input}/"):
                names += [f"{command.name} | {call.number} {change}" for change in CHANGES_OF_INPUT]
    for name in section.cases(section.sample(names, 60)):
        number, change = name.split(" | ")[1].split(" ")
        change_input(section, bench, by_name[name.split(" | ")[0]], int(number), change)


def change_input(section, bench, command, number, change):
    """A file changes when the read with this number is over."""
    bench.keep_input()
    bench.restore(command)
    process = bench.start(command, at=number, do=f"after {int(signal.SIGSTOP)}")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        process.returncode = os.waitstatus_to_exitcode(status)
        process.communicate()
        section.count("not reached")
        return
    try:
        call = next(call for call in bench.calls() if call.number == number)
        if call.kind == "read" and call.path.startswith(f"{bench.input}/"):
            CHANGES_OF_INPUT[change](Path(call.path))
            section.count("changes of the input")
        else:  # threads took turns in another order
            section.count("not reached")
        os.kill(process.pid, signal.SIGCONT)
        _, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    code, message = process.returncode, text_of(stderr)
    if bench.check_code(code) and code != 0:
        allowed = (CODES["BAD_INPUT"], CODES["IO"])
        section.check(code in allowed, f"{call}: exit code {code}: {message!r}")
        section.check("halfbyte: error: " in message, f"says only {message!r}")
    # What was read before it changed, and is not read again, may change.
    bench.check_outputs(command, complete=code == 0)
    left = set(bench.leftovers(command)) - set(bench.unfinished(command) if code == CODES["IO"] else [])
    section.check(not left, f"{call}: leaves {left}")
    bench.restore_input()


def run(section):
    if section.quick:
        section.limit = min(section.limit or 55, 55)
    with section.directory() as folder:
        bench = commands.Bench(section, folder)
        _change_input(section, bench)
        _fail_calls(section, bench)

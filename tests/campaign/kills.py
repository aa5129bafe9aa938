"""The tool is killed before and after every call that changes a file, and at random; then it runs again.

After the kill each output is the older one, none, or complete. Then the same command runs undisturbed, and goes
on with what is unfinished, or in a third of the cases discards it: it must end well, or refuse to replace what is complete without --force; its outputs are those of an undisturbed
run, byte for byte, and nothing that the killed run has left is there any more.
"""

import contextlib
import os
import signal
import time
import zlib

from . import commands
from .base import CODES, text_of

SLOWEST = 2.0  # seconds that a killed command's worker processes have to notice


def _wait_for_group(process):
    """Until no process is left that the killed one had started."""
    end = time.monotonic() + SLOWEST
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):  # that it has ended in this moment
        os.killpg(process.pid, signal.SIGKILL)


def _check_after_kill(section, bench, command):
    states = bench.check_outputs(command)
    lost = [output for output, state in states.items() if state == "absent" and command.keeps_older]
    section.check(not lost, f"the kill loses {lost}")
    section.count("left by kills", bool(bench.leftovers(command)))
    discards = zlib.crc32((section.current or "").encode()) % 3 == 0
    if command.can_resume:
        section.count("discarded" if discards else "resumed", bool(bench.unfinished(command)))
        command = command.with_options("--discard" if discards else "--resume")
    done = bench.run(command, restore=False)
    code = done.returncode
    if code == CODES["EXISTS"] and not command.force and "new" in states.values():
        # The killed run has published this output; what it had not published comes when the user removes it.
        section.check(all(state in ("new", "absent") for state in states.values()), f"outputs are {states}")
        done = bench.run(command.with_options("--force"), restore=False)
        code = done.returncode
    if section.check(code == 0, f"the next run ends with {code}: {text_of(done.stderr)!r}"):
        bench.check_outputs(command, complete=True)
    left = bench.leftovers(command)
    section.check(not left, f"the next run leaves {left}")
    bench.check_input()


def _kill_at_calls(section, bench):
    names, by_name = [], {}
    for command in bench.commands():
        by_name[command.name] = command
        bench.run(command, faults={})
        for call in bench.calls():
            if call.kind in commands.CHANGES and call.path.startswith("/"):
                case = f"{command.name} | {call.number} {call.kind}"
                names += [f"{case} before", f"{case} after"]
    for name in section.cases(section.sample(names, 450)):
        number, _, when = name.split(" | ")[1].split(" ")
        kill_at_call(section, bench, by_name[name.split(" | ")[0]], number, when)


def kill_at_call(section, bench, command, number, when):
    bench.restore(command)
    process = bench.start(command, at=number, do=f"{when} {int(signal.SIGKILL)}")
    process.communicate()
    _wait_for_group(process)
    section.count("kills" if process.returncode == -signal.SIGKILL else "not reached")
    _check_after_kill(section, bench, command)


def _kill_at_moments(section, bench, number):
    """At any moment from the start to a little after the end of a run."""
    every = [command for command in bench.commands() if command.name.split()[0] not in ("inspect", "compare")]
    moments = [section.random.random() for _ in range(number)]
    seconds = {}
    for command in every:
        start = time.monotonic()
        bench.run(command)
        seconds[command.name] = time.monotonic() - start
    for name in section.cases(f"moment {i}" for i in range(number)):
        i = int(name.split()[1])
        command = every[i % len(every)]
        bench.restore(command)
        process = bench.start(command)
        time.sleep(1.1 * moments[i] * seconds[command.name])
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()
        _wait_for_group(process)
        section.count("kills at random" if process.returncode == -signal.SIGKILL else "ended before")
        _check_after_kill(section, bench, command)


def run(section):
    if section.quick:
        section.limit = min(section.limit or 48, 48)
    with section.directory() as folder:
        bench = commands.Bench(section, folder)
        _kill_at_moments(section, bench, 60 if section.quick else 1000)
        _kill_at_calls(section, bench)

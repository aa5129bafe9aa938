#!/usr/bin/env python3
"""Compares the log of `compute-sanitizer --tool racecheck --racecheck-report hazard` with the list of hazards that are
explained.

    scripts/racecheck.py LOG [--allowed FILE] [--sources DIR] [--print-entries]

A hazard has a kind (RAW, WAR, WAW; "race" in reports of --racecheck-report analysis, which tells no more) and two
accesses: of each whether it reads or writes, and the line of source it is in, by file, function and text, so that an
entry outlives edits elsewhere. Where the access that comes first (the read of a WAR, the write of a RAW) is by the first lane of a
warp, which is the one that arrives at barriers for it, the kind says so. Kernels must have been compiled with lines (HALFBYTE_LINE_INFO=1). How often a hazard is reported depends on
the run and is not compared.

Exit code 1 for hazards that are not listed, a log that is not complete, and lines that this does not
understand; entries that no hazard matches are printed only. --print-entries prints those that are missing as
the list has them, but for their reason."""

import argparse
import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NO_REASON = "REASON MISSING"


class Failure(Exception):
    pass


class Access(NamedTuple):
    kind: str  # Read or Write
    file: str  # below src/
    function: str
    text: str

    def __str__(self):
        return f"{self.kind:<5} {self.file} | {self.function} | {self.text}"


class Hazard(NamedTuple):
    kernel: str  # or its file; -: the tool does not say
    kind: str
    accesses: tuple  # two, in order

    def __str__(self):
        return "\n".join([f"kernel {self.kernel}: {self.kind}", *(f"  {access}" for access in self.accesses)])


class Sources:
    """The sources of kernels: lines by the names that compilers print."""

    def __init__(self, root):
        names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.*")}
        self.files = {name: path.read_text().splitlines() for name, path in sorted(names.items())
                      if re.search(r"\.cuh?$|_args\.h$|^formats/.*\.h$", name)}
        self.kernels = {self.function_of(name, i) for name, lines in self.files.items() if name.endswith(".cu")
                        for i, line in enumerate(lines) if "__global__" in line}

    def find(self, name):
        """The name below the root: `name` may have more or fewer directories."""
        found = [file for file in self.files if f"/{name}".endswith(f"/{file}") or f"/{file}".endswith(f"/{name}")]
        if len(found) != 1:
            raise Failure(f"{name} is {'no file' if not found else 'more than one file'} of the sources")
        return found[0]

    def function_of(self, file, index):
        """The function of the line: the last one that began before."""
        lines = self.files[file]
        for first in range(index, -1, -1):
            if re.search(r"\b(__device__|__global__|__host__|HALFBYTE_FN)\b", lines[first]):
                head = " ".join(line for line in lines[first : first + 8] if not line.startswith("#"))
                head = re.sub(r"__launch_bounds__\((\([^)]*\)|[^()])*\)", "", head)
                name = re.search(r"(\w+(?:::\w+)*|operator\S+)\s*\(", head)
                return name.group(1).split("::")[-1] if name else "?"
        return "?"

    def access(self, kind, file, line):
        file = self.find(file)
        if not 1 <= line <= len(self.files[file]):
            raise Failure(f"{file} has no line {line}: these are not the sources of the kernels")
        return Access(kind, file, self.function_of(file, line - 1), " ".join(self.files[file][line - 1].split()))


# "Read access at PLACE [12 hazards]", of which the place is, by the version of the tool,
#   0x1f0 in /some/file.cu:12:function(int)        (to 2024.1)
#   function(int)+0x1f0 in /some/file.cu:12        (since)
ACCESS = re.compile(r"(?P<kind>Read|Write) access at (?P<place>.*?)(?: by thread \([^)]*\).*?)?(?: \[\d+ hazards?\])?")
PLACES = [re.compile(r"0x[0-9a-f]+ in (?P<file>[^:]+):(?P<line>\d+):(?P<function>.+)"),
          re.compile(r"(?P<function>.+)\+0x[0-9a-f]+ in (?P<file>[^:]+):(?P<line>\d+)")]
FIRST = re.compile(r"(?i:error|warning|warn|info): Race reported between (.*)")
OTHER = re.compile(r"and (.*)")
# A hazard by itself, then its accesses: "Read Thread (1,0,0) at PLACE".
HAZARD = re.compile(r"(?i:error|warning|warn|info): (?:\(Warp Level Programming\) )?Potential (RAW|WAR|WAW) hazard detected at .*")
BY_THREAD = re.compile(r"(Read|Write) Thread \((\d+), ?\d+, ?\d+\) at (.*)")
EARLIER = {"RAW": "Write", "WAR": "Read"}
# What may follow it.
DETAIL = re.compile(r"Current Value : .*|Saved host backtrace up to driver entry point .*|Host Frame: .*")
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \(\d+ errors?, \d+ warnings?\)")
PASSED = re.compile(r"\[ +PASSED +\] (\d+) tests?\.")


def parse_access(text, sources):
    """An access, and the kernel if the function that the tool names is one or in one."""
    match = ACCESS.fullmatch(text)
    if not match:
        raise Failure(f"not an access: {text}")
    return access_at(match["kind"], match["place"], sources)


@functools.cache
def access_at(kind, text, sources):
    for place in PLACES:
        if found := place.fullmatch(text):
            kernels = [word for word in re.findall(r"\w+", found["function"]) if word in sources.kernels]
            return sources.access(kind, found["file"], int(found["line"])), kernels[:1]
    raise Failure(f"no file and line (HALFBYTE_LINE_INFO=1 compiles with them): {text}")


def parse_log(text, sources):
    """The hazards of a log, in order of appearance."""
    hazards, first, num_reports, num_pairs, displayed, passed = {}, None, 0, 0, 0, 0
    num_logs = num_summaries = 0  # it may be the logs of several processes, one behind the other
    kind, accesses = None, []  # of the hazard that is being read
    for number, line in enumerate(text.splitlines(), 1):
        if match := PASSED.search(line):
            passed += int(match[1])
        if not line.startswith("========="):
            continue
        line = line.removeprefix("=========").strip()
        try:
            if kind and len(accesses) < 2:
                if not (match := BY_THREAD.fullmatch(line)):
                    raise Failure(f"not an access of a hazard: {line}")
                accesses.append(access_at(match[1], match[3], sources))
                if EARLIER.get(kind) == match[1] and int(match[2]) % 32 == 0:
                    kind += ", the earlier by a first lane"
                if len(accesses) == 2:
                    num_pairs += 1
                    add(hazards, kind, *accesses, sources)
            elif line in ("", "COMPUTE-SANITIZER"):
                first = kind = None
                num_logs += line != ""
            elif match := HAZARD.fullmatch(line):
                kind, accesses = match[1], []
                num_reports += 1
            elif (kind or first) and DETAIL.fullmatch(line):
                pass
            elif match := SUMMARY.fullmatch(line):
                displayed += int(match[1])
                num_summaries += 1
            elif match := FIRST.fullmatch(line):
                # Older versions have all on one line.
                first, *others = match[1].split(" and ") if " and Read access" in line or " and Write access" in line \
                    else [match[1]]
                first = parse_access(first, sources)
                num_reports += 1
                for other in others:
                    num_pairs += 1
                    add(hazards, "race", first, parse_access(other, sources), sources)
            elif first and (match := OTHER.fullmatch(line)):
                num_pairs += 1
                add(hazards, "race", first, parse_access(match[1], sources), sources)
            else:
                raise Failure(f"not understood: {line}")
        except Failure as failure:
            raise Failure(f"line {number}: {failure}") from None
    if num_summaries == 0 or num_summaries < num_logs:
        raise Failure("no RACECHECK SUMMARY: the log is not complete")
    if displayed != num_reports or num_pairs < num_reports:
        raise Failure(f"{displayed} hazards displayed, {num_reports} reports of {num_pairs} pairs read")
    if not passed:
        raise Failure("no test passed")
    return list(hazards)


def add(hazards, kind, first, second, sources):
    # The tool names the functions that became part of a kernel: then it is the file of the kernel, if one of them is there.
    accesses = tuple(sorted((first[0], second[0])))
    of_lines = [access.function for access in accesses if access.function in sources.kernels]
    names = first[1] + second[1] + of_lines or [access.file for access in accesses if access.file.endswith(".cu")] or ["-"]
    hazards[Hazard(names[0], kind, accesses)] = None


def parse_allowed(text):
    """Hazards and their reasons: a line `kernel NAME: KIND`, two of accesses, and the reason, indented; # comments."""
    entries, lines = {}, [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    at = 0
    while at < len(lines):
        kernel = re.fullmatch(r"kernel (\S+): (.+)", lines[at])
        accesses = [re.fullmatch(r"  (Read|Write) +(\S+) \| (\S+) \| (.+)", line) for line in lines[at + 1 : at + 3]]
        if not kernel or len(accesses) < 2 or not all(accesses):
            raise Failure(f"the list of allowed hazards: not an entry: {lines[at]}")
        at += 3
        reason = []
        while at < len(lines) and not lines[at].startswith("kernel "):
            reason.append(lines[at].strip())
            at += 1
        if not reason or NO_REASON in reason:
            raise Failure(f"the list of allowed hazards: no reason for one of {kernel[1]}")
        entries[Hazard(kernel[1], kernel[2], tuple(sorted(Access(*match.groups()) for match in accesses)))] = " ".join(reason)
    return entries


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--allowed", type=Path, default=ROOT / "scripts/racecheck_allowed.txt")
    parser.add_argument("--sources", type=Path, default=ROOT / "src")
    parser.add_argument("--print-entries", action="store_true")
    arguments = parser.parse_args()
    try:
        allowed = parse_allowed(arguments.allowed.read_text())
        hazards = parse_log(arguments.log.read_text(errors="replace"), Sources(arguments.sources))
    except Failure as failure:
        print(f"racecheck: {failure}")
        return 1
    unknown = [hazard for hazard in hazards if hazard not in allowed]
    unused = [hazard for hazard in allowed if hazard not in hazards]
    for hazard in unused:
        print(f"racecheck: listed, and not reported any more:\n{hazard}")
    for hazard in unknown:
        print(f"racecheck: not listed:\n{hazard}")
    if arguments.print_entries and unknown:
        print("\n# ---- Entries that are missing")
        print("\n\n".join(f"{hazard}\n  {NO_REASON}" for hazard in unknown))
    print(f"racecheck: {len(hazards)} hazards, {len(unknown)} not listed; {len(unused)} of {len(allowed)} entries not used")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())

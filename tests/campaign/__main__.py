"""The campaign: attacks on the tool and the library, in sections. scripts/campaign.sh builds what they need and calls this.

    python -m campaign [--quick] [--seed WORD] [--time SECONDS] [--restart] [--case NAME] [--list] [SECTION...]
"""

import argparse
import importlib
import sys

from campaign.base import Campaign, SECTIONS


def main():
    parser = argparse.ArgumentParser(prog="scripts/campaign.sh", description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="those to run (default: all)")
    parser.add_argument("--quick", action="store_true", help="a part of each section, minutes in all: for CI")
    parser.add_argument("--seed", default="0", help="chooses what is drawn at random (default: 0)")
    parser.add_argument("--time", type=float, metavar="SECONDS", help="end each section after this long")
    parser.add_argument("--restart", action="store_true", help="run again what an earlier run with this seed has done")
    parser.add_argument("--case", metavar="NAME", help="only the case that a finding names, even if it was done")
    parser.add_argument("--list", action="store_true", help="name the sections")
    arguments = parser.parse_args()
    modules = {name: importlib.import_module(f"campaign.{name}") for name in SECTIONS}
    if arguments.list:
        for name, module in modules.items():
            print(f"{name:12} {module.__doc__.strip().splitlines()[0]}")
        return 0
    for name in arguments.sections:
        if name not in modules:
            parser.error(f"no section is named {name}: {', '.join(modules)}")
    campaign = Campaign(arguments.quick, arguments.seed, arguments.time, arguments.restart, arguments.case)
    campaign.run({name: modules[name].run for name in arguments.sections or modules})
    return campaign.finish()


if __name__ == "__main__":
    sys.exit(main())

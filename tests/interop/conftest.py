"""Options of readers_test.py, which cells of its table are run, and the count of them in ctest's words."""


def pytest_addoption(parser):
    group = parser.getgroup("readers")
    group.addoption("--full", action="store_true", help="all cells of the table, not some that the seed draws")
    group.addoption("--seed", default="0", help="a word that draws cells and architectures")
    group.addoption("--count", type=int, default=100, help="how many cells are drawn")
    group.addoption("--random", type=int, default=0, metavar="COUNT", help="instead: so many other architectures, drawn")
    group.addoption("--write", metavar="FILE", help="with --full: write the table, instead of comparing with it")


def pytest_terminal_summary(terminalreporter):
    """scripts/check.sh adds this to what other stages count."""
    failed = sum(len(terminalreporter.stats.get(outcome, [])) for outcome in ("failed", "error"))
    total = failed + len(terminalreporter.stats.get("passed", []))
    if total:
        terminalreporter.line(f"{100 * (total - failed) // total}% tests passed, {failed} tests failed out of {total}")

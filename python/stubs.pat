# What nanobind's stubs leave out: names with underscores.
_core.__prefix__:
    __version__: str


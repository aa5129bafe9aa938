"""A second implementation of the file layouts and of the numeric contract.

Written from the specification alone, in NumPy, so that the tests can hold the library against
something that shares no code with it. Slow and plain on purpose.
"""

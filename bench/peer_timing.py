"""Time of CUDA work enqueued by torch, as `halfbyte bench` takes it of ours."""

import statistics

SETS = 3  # of buffers that take turns: together several times the second-level cache
LAUNCHES, ROUNDS = 21, 9


def time_us(launch, launches=LAUNCHES, rounds=ROUNDS):
    """The median of several rounds of many launches; launch(i) takes the number of a buffer set."""
    import torch

    for i in range(SETS):
        launch(i)
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # the host enqueues meanwhile
        start.record()
        for i in range(launches):
            launch(i % SETS)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return statistics.median(times)


def time_graph_us(launch, launches, rounds=7):
    """The same of a graph of many launches, replayed, in us of one: launch(i) takes the number of the launch. The smaller of
    two medians, as `halfbyte bench` has it."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # what is made once
        launch(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            launch(i)
    graph.replay()
    medians = []
    for _ in range(2):
        times = []
        for _ in range(rounds):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / launches)
        medians.append(statistics.median(times))
    return min(medians)

"""Time of CUDA work enqueued by torch, as bench/cuda_timing.h takes it of ours."""

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

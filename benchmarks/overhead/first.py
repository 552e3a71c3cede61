"""Prints the seconds of the first and the second call in a process that has trained a little by hand.

Arguments: the net, the rows of a piece, the number of pieces, the threads.
"""

import sys

import torch
from steps import random_set_up
from timing import time_of


def main(net_name: str, ub_size: int, pieces: int, threads: int) -> None:
    torch.set_num_threads(threads)
    setting = random_set_up(net_name, ub_size, pieces)
    optimizer = torch.optim.SGD(setting.net.parameters(), lr=0.0)
    for _ in range(3):
        setting.by_hand()
        optimizer.step()
        optimizer.zero_grad()
    step = setting.with_anybatch()
    print(time_of(setting, step).wall_s, time_of(setting, step).wall_s)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

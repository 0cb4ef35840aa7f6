"""Ends right after a collective, whose tensors the threads of PyTorch have not freed yet.

They have to wait for the interpreter, which this thread keeps.
"""

import sys
from pathlib import Path

import torch
from torch import distributed

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from pytorch_ddp import Group

from lbbsp_core.runtime.reliability.activity import CurrentActivity

distributed.init_process_group("gloo")
sys.setswitchinterval(1000)
group = Group(distributed.group.WORLD, torch.device("cpu"), CurrentActivity())
for number in range(20):
    assert group.all_gather([number, group.rank]) == [[number, 0], [number, 1]]
distributed.destroy_process_group()

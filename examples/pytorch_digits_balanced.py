"""Trains on handwritten digits with PyTorch: faster workers get larger batches.

Run it by torchrun, or on this machine with three unequal workers:
lbbsp launch --framework torch -n 3 --speeds 1,1,0.4 examples/pytorch_digits_balanced.py
"""

import os

import numpy as np
import torch
from pytorch_ddp import LoadBalancer
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
for name, value in ALONE.items():
    os.environ.setdefault(name, value)  # where nothing has started several workers
distributed.init_process_group("gloo")
gpus = torch.cuda.device_count()
device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % gpus}" if gpus else "cpu"

images, labels = load_digits(return_X_y=True)
images = np.kron(images.reshape(-1, 1, 8, 8), np.ones((3, 3))).astype("float32") / 16
images, labels = torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device)
data = TensorDataset(images[:1536], labels[:1536])

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3),
    nn.ReLU(),
    nn.MaxPool2d(4),
    nn.Flatten(),
    nn.Linear(32 * 25, 10),
)
model = DistributedDataParallel(model.to(device))
optimizer = torch.optim.Adam(model.parameters(), 2e-3)
balancer = LoadBalancer(model, 192, keep=[optimizer])
loader = balancer.loader(data)

for epoch in balancer.epochs(8):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    if distributed.get_rank() == 0:
        print(f"epoch {epoch}: loss {total / len(loader):.4f}", flush=True)

if distributed.get_rank() == 0:
    with torch.no_grad():
        right = model.module(images[1536:]).argmax(1) == labels[1536:]
    print(f"accuracy: {right.float().mean():.4f}")
distributed.destroy_process_group()

"""Training step of a small PyTorch CNN, on a GPU if there is one, for ``lbbsp profile``.

lbbsp profile examples/profile_torch.py --max-batch 65536 -o profile.json --plot profile.html
"""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


def block(channels_in, channels_out):
    """Halves the image size and changes the number of channels."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


torch.manual_seed(0)
model = nn.Sequential(
    block(3, 64), block(64, 128), block(128, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(256, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loss_of = nn.CrossEntropyLoss()


def step(batch_size):
    """Runs one iteration; lbbsp waits for the GPU before it reads the clock."""
    images = torch.randn(batch_size, 3, 64, 64, device=device)
    labels = torch.randint(10, (batch_size,), device=device)
    optimizer.zero_grad(set_to_none=True)
    loss_of(model(images), labels).backward()
    optimizer.step()

"""What drives a worker's speed: CPU and memory, its own and that of others, and the GPU.

`ResourceSampler` reads them; the other modules are where it reads:

    linux, cgroup (or portable elsewhere), gpu ──> totals and levels ──> sampler ──> percents, rates
"""

from lbbsp_core.resources.sampler import ResourceSampler

__all__ = ["ResourceSampler"]

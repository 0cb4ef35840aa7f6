"""Child processes, shared by the launcher and the profiler.

``child`` starts a child in its own session, through ``_exec``, which makes the kernel kill the
child when its parent dies, and adds threads that read the child's output and report its exit. Its
`Reaper` runs a helper, ``_reaper``, that kills the children's own descendants, and removes their
cgroups, when the parent is killed.

Imports point one way: the launcher and the profiler import this package, which imports neither.
``_exec`` and ``_reaper`` are programs that are started by their paths: they import only the
standard library.
"""

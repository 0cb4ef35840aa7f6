"""Child processes: started, watched and reaped, for the launcher and the profiler alike."""

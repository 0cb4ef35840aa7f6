"""Demo of ``lbbsp demo``: the job of its workers, shared by all frameworks, and the comparison."""

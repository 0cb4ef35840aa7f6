"""The job of ``lbbsp demo``: what both frameworks' workers share."""

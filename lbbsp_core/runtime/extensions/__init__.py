"""What a session does in each step beside balancing: one file and one entry in a list each."""

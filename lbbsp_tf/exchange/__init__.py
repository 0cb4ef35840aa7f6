"""What the replicas of a job tell each other: collectives, and a session for each replica."""

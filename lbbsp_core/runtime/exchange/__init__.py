"""What workers tell each other, and how it is encoded."""
